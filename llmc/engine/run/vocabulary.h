// run/vocabulary.h -- the tokenizer of a run: found once, at the start, kept in memory, and written into every
// checkpoint under the names that transformers reads:
//
//   vocab.json, merges.txt | vocab.txt | tokenizer.json    the vocabulary, as it was given, or of bytes
//   tokenizer_config.json                                  the class that reads it, its special tokens
//   generation_config.json                                 for a GPT-2: the token at which generate() stops
#pragma once

#include "../files/import.h"
#include "../ranks/comm.h"
#include "../text/tokenizer.h"

inline bool is_bytes(const Tokenizer& t) { return !t.word_piece && t.tokens == Tokenizer::bytes().tokens; }

// The tokenizer beside a model's weights, or null. One of an unknown kind is ignored with a notice if other software
// wrote the model; in a checkpoint of this program it is an error.
inline std::unique_ptr<Tokenizer> stored_tokenizer(const std::string& source) {
    if (source.empty()) { return nullptr; }
    const size_t slash = source.rfind('/');
    std::string dir = source;
    if (!is_directory(source)) { dir = slash == std::string::npos ? "." : source.substr(0, slash); }
    bool found = false;
    for (const char* name : {"vocab.json", "encoder.json", "vocab.txt", "gpt2_tokenizer.bin", "tokenizer.json"}) {
        found = found || path_exists(dir + "/" + name);
    }
    if (!found) { return nullptr; }
    try {
        return std::make_unique<Tokenizer>(Tokenizer::load(dir));
    } catch (const Error& e) {
        if (path_exists(dir + "/manifest.json")) { throw; }
        if (comm().rank == 0) { say("%s; tokens are shown as ids (--tokenizer)", e.what()); }
        return nullptr;
    }
}

// The tokenizer of a model with V tokens: --tokenizer, or the one beside its weights (`source`, a directory or a file),
// or bytes; null if there is none. A resumed run keeps that of its checkpoint.
inline std::unique_ptr<Tokenizer> find_tokenizer(const std::string& flag, const std::string& source, bool resumed,
                                                 int V) {
    const Doing reading("reading the tokenizer");
    std::unique_ptr<Tokenizer> t;
    if (!flag.empty()) { t = std::make_unique<Tokenizer>(Tokenizer::load(flag)); }
    if (t != nullptr) {
        check(t->vocab_size() == V, "--tokenizer %s: expected the model's %d tokens, got %d", t->path.c_str(), V,
              t->vocab_size());
        check(V != 256 || is_bytes(*t), "--tokenizer %s: expected the 256 bytes in their order, as the tokens of this "
              "model are bytes; leave it out", t->path.c_str());
    }
    if (V == 256) { return std::make_unique<Tokenizer>(Tokenizer::bytes()); }
    if (t != nullptr && !resumed) { return t; }
    std::unique_ptr<Tokenizer> stored = stored_tokenizer(source);
    if (stored == nullptr) { return t; }
    check(stored->vocab_size() == V, "%s: expected the model's %d tokens, got %d", stored->path.c_str(), V,
          stored->vocab_size());
    check(t == nullptr || t->tokens == stored->tokens, "--tokenizer %s: its tokens are not those of %s, with which the "
          "run began; leave it out", t->path.c_str(), stored->path.c_str());
    const bool better = t != nullptr && t->cannot_encode.empty() && !stored->cannot_encode.empty();
    return better ? std::move(t) : std::move(stored);
}

// tokenizer.json of a model that was trained on bytes. A BERT's puts [CLS] and [SEP] around a text. A GPT-2's only
// special token is byte 0, which text does not contain. It is not written as U+0100, because transformers would then
// find it in texts with that character.
inline Json byte_tokenizer_json(bool bert) {
    Json vocab = Json::object(), added = Json::array(), around;
    const auto add_special = [&](const std::string& name, int id) {
        vocab[name] = id;
        added.push_back({{"id", id}, {"content", name}, {"single_word", false}, {"lstrip", false}, {"rstrip", false},
                         {"normalized", false}, {"special", true}});
    };
    if (!bert) { add_special(std::string(1, '\0'), 0); }
    for (int b = bert ? 0 : 1; b < 256; b++) { vocab[Bpe::spell(std::string(1, (char)b))] = b; }
    if (bert) {
        const SpecialTokens s = special_tokens(BYTE_VOCAB);
        add_special("[PAD]", s.pad);
        add_special("[CLS]", s.cls);
        add_special("[SEP]", s.sep);
        add_special("[MASK]", s.mask);
        const auto token = [](const char* name) { return Json{{"SpecialToken", {{"id", name}, {"type_id", 0}}}}; };
        const auto text = [](const char* name) { return Json{{"Sequence", {{"id", name}, {"type_id", 0}}}}; };
        const auto ids = [](const char* name, int id) {
            return Json{{"id", name}, {"ids", Json::array({id})}, {"tokens", Json::array({name})}};
        };
        const Json cls = token("[CLS]"), sep = token("[SEP]");
        around = {{"type", "TemplateProcessing"},
                  {"single", Json::array({cls, text("A"), sep})},
                  {"pair", Json::array({cls, text("A"), sep, text("B"), sep})},
                  {"special_tokens", {{"[CLS]", ids("[CLS]", s.cls)}, {"[SEP]", ids("[SEP]", s.sep)}}}};
    }
    const Json level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false},
                        {"use_regex", true}};
    return {{"version", "1.0"}, {"truncation", nullptr}, {"padding", nullptr}, {"added_tokens", added},
            {"normalizer", nullptr}, {"pre_tokenizer", level}, {"post_processor", around}, {"decoder", level},
            {"model", {{"type", "BPE"}, {"dropout", nullptr}, {"unk_token", nullptr},
                       {"continuing_subword_prefix", nullptr}, {"end_of_word_suffix", nullptr}, {"fuse_unk", false},
                       {"byte_fallback", false}, {"ignore_merges", false}, {"vocab", vocab},
                       {"merges", Json::array()}}}};
}

// tokenizer_config.json. longest: the most tokens that the model can read, 0: any number
inline Json tokenizer_config(const Tokenizer& t, bool bert, int64_t longest) {
    const bool one_file = is_bytes(t) || t.files[0].first == "tokenizer.json";
    const int special = is_bytes(t) ? 0 : t.eot;
    const Json end = special >= 0 ? Json(t.tokens[(size_t)special]) : Json();
    Json j = {{"tokenizer_class", "GPT2Tokenizer"}, {"clean_up_tokenization_spaces", false}};
    if (one_file) { j["tokenizer_class"] = "PreTrainedTokenizerFast"; }
    if (longest > 0) { j["model_max_length"] = longest; }
    if (!bert) {
        for (const char* key : {"bos_token", "eos_token", is_bytes(t) ? "pad_token" : "unk_token"}) { j[key] = end; }
        j["model_input_names"] = {"input_ids", "attention_mask"};
        if (!one_file) { j["add_prefix_space"] = false; }
        return j;
    }
    if (!one_file) {
        j["tokenizer_class"] = "BertTokenizer";
        j["do_lower_case"] = true;
    }
    const std::pair<const char*, const char*> names[] = {
        {"pad_token", "[PAD]"}, {"unk_token", "[UNK]"}, {"cls_token", "[CLS]"}, {"sep_token", "[SEP]"},
        {"mask_token", "[MASK]"}};
    for (const auto& n : names) {
        if (t.word_piece || strcmp(n.second, "[UNK]") != 0) { j[n.first] = n.second; }      // bytes need none
    }
    return j;
}

// Sets the token in config.json that ends a text, at which transformers' generate() stops: the tokenizer's, or without
// one GPT-2's. V: the vocabulary without padding
inline void set_end_of_text(Json& config, const Tokenizer* tokenizer, int V) {
    int end = V == 50257 ? 50256 : -1;
    if (tokenizer != nullptr && tokenizer->eot >= 0) { end = tokenizer->eot; }
    for (const char* key : {"bos_token_id", "eos_token_id"}) { config[key] = end >= 0 ? Json(end) : Json(); }
}

// The small files of a checkpoint beside config.json, which is `config`: name, contents. tokenizer: may be null
inline std::vector<std::pair<std::string, std::string>> vocabulary_files(const Tokenizer* tokenizer,
                                                                         const Json& config) {
    const bool bert = config.contains(BERT_KEYS.C);
    const bool learned = config.contains("position") && config["position"].value("name", "") == "learned";
    std::vector<std::pair<std::string, std::string>> files;
    if (tokenizer != nullptr) {
        const Tokenizer& t = *tokenizer;
        files = t.files;
        if (is_bytes(t)) { files = {{"tokenizer.json", json_text(byte_tokenizer_json(bert), 1) + "\n"}}; }
        const char* reach = bert ? BERT_KEYS.T : GPT2_KEYS.T;
        const int64_t longest = learned ? json_int(config, reach, 1, INT32_MAX, "config") : 0;
        if (t.cannot_encode.empty() && (bert || !t.word_piece)) {
            files.push_back({"tokenizer_config.json", json_text(tokenizer_config(t, bert, longest), 2) + "\n"});
        }
    }
    const Json end = config.contains("eos_token_id") ? config["eos_token_id"] : Json();
    if (!bert && !end.is_null()) {
        const Json j = {{"bos_token_id", end}, {"eos_token_id", end}};
        files.push_back({"generation_config.json", json_text(j, 2) + "\n"});
    }
    return files;
}
