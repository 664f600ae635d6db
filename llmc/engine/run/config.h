// run/config.h -- a model's shape, encoding and vocabulary, from the flags and the checkpoint or weights they name.
#pragma once

#include "../files/checkpoint.h"
#include "../files/import.h"
#include "../ranks/comm.h"
#include "../text/dataloader.h"
#include "../text/tokenizer.h"
#include "config_json.h"
#include "flags.h"

// The notice that a flag replaces what the model of the checkpoint at `path` was trained with; --resume refuses that
// (check_resumed_options).
inline void say_instead(const Options& o, const std::string& now, const std::string& was, const std::string& path) {
    if (o.resume || comm().rank > 0) { return; }
    say("%s: used instead of %s, which %s was trained with", now.c_str(), was.c_str(), path.c_str());
}

// --pos for a model from a checkpoint: what the flag says must agree with the checkpoint, and the checkpoint decides
// the rest. If that is not today's default, a message tells the value.
inline void check_position(const std::string& flag, const PositionConfig& found, const std::string& path) {
    const PositionConfig asked = parse_position(flag, found.T_train);
    bool conflict = asked.name != found.name || asked.pattern != found.pattern;
    bool differs = false;
    for (size_t part = 0; !conflict && part < asked.parts.size(); part++) {
        const Hyperparameters &mine = asked.parts[part].values, &theirs = found.parts[part].values;
        for (size_t i = 0; i < mine.size(); i++) {
            const bool same = mine[i] == theirs[i];
            conflict = conflict || (mine[i].given && !same);
            differs = differs || !same;
        }
    }
    check(!conflict, "--pos %s: the checkpoint %s was trained with %s", flag.c_str(), path.c_str(),
          position_text(found).c_str());
    if (!differs || comm().rank > 0) { return; }
    say("--pos %s: %s holds %s, which is used", flag.c_str(), path.c_str(), position_text(found).c_str());
}

// --window and --sinks from the flags, or else, as `position` has them, from the checkpoint at `path` (if any)
inline void resolve_mask(const Options& o, PositionConfig& position, const std::string& path) {
    const std::vector<int> windows = position.windows;
    const int sinks = position.mask.sinks;
    if (path.empty() || o.is_given("window")) { position.windows = o.window; }
    if (path.empty() || o.is_given("sinks")) { position.mask.sinks = o.sinks; }
    else if (!position.has_window()) { position.mask.sinks = 0; }       // --window 0 of a checkpoint that has both
    check(position.mask.sinks == 0 || position.has_window(), "--sinks %d: expected --window, too: without one every "
          "key is seen", position.mask.sinks);
    if (path.empty() || (position.windows == windows && position.mask.sinks == sinks)) { return; }
    say_instead(o, "--window " + option_text(position.windows) + strprintf(" --sinks %d", position.mask.sinks),
                option_text(windows) + strprintf(" and %d", sinks), path);
}

// --document_mask from the flag or the checkpoint at `path` (if any). data: what begins a document there, -1: unknown
inline void resolve_documents(Options& o, PositionConfig& position, const std::string& path, int data) {
    int& token = position.mask.end_of_text;
    const bool found = token >= 0;
    if (path.empty() || o.is_given("document_mask")) {
        if (!path.empty() && o.document_mask != found) {
            say_instead(o, strprintf("--document_mask %d", o.document_mask), found ? "1" : "0", path);
        }
        if (!o.document_mask) { token = -1; }
        else if (!found) { token = data; }
        check(!o.document_mask || token >= 0, "--document_mask 1: expected shards, whose header names the token that a "
              "document begins with; text files have none");
    }
    o.document_mask = token >= 0;                           // the effective value, for --resume to compare
    check(token < 0 || data < 0 || data == token, "%s: the data's documents begin with token %d, but those that "
          "the model was trained with begin with %d", path.c_str(), data, token);
    check(token < 0 || !position.has("fire"), "--document_mask 1: fire divides by the position in the sequence, which "
          "continues from document to document; expected another encoding");
}

// Checks of flags that depend neither on the data nor on the model
inline void check_before_data(const Options& o) {
    const int cores = (int)sysconf(_SC_NPROCESSORS_ONLN), most = std::max(64, 4 * cores);
    check(o.threads <= most, "--threads: expected at most %d on this machine of %d cores, got %d", most, cores,
          o.threads);
    check(o.pos.size() <= 2000, "--pos: expected the name of an encoding, got %zu bytes, %.40s...", o.pos.size(),
          o.pos.c_str());
    parse_position(o.pos, o.T);
}

// --pos for a model of L layers
inline PositionConfig parse_layers(const std::string& text, int T_train, int L) {
    const PositionConfig position = parse_position(text, T_train);
    const size_t turns = position.pattern.size();
    check((size_t)L % turns == 0, "--pos %s: expected a number of layers that divides the model's %d, got %zu",
          text.c_str(), L, turns);
    return position;
}

// The command that writes the files of this pattern, "" if no script of data/ does
inline std::string data_command(const std::string& pattern, Program program) {
    struct Script { const char *directory, *name, *for_bert; };
    const Script scripts[] = {{"data/tinyshakespeare/", "tinyshakespeare.py", " --encoding bert"},
                              {"data/edu_fineweb10B/", "fineweb_edu.py", " --encoding bert"},
                              {"data/wikitext103/", "wikitext.py", " --encoding bert"},
                              {"data/mldr_en/", "mldr.py", ""}, {"data/msmarco/", "msmarco.py", ""}};
    for (const Script& s : scripts) {
        if (pattern.find(s.directory) == std::string::npos) { continue; }
        return std::string("python3 data/") + s.name + (program == BERT_FLAG ? s.for_bert : "");
    }
    return "";
}

// --model: a size by name, with or without the prefix ("gpt2:"), or L,NH,C
struct ModelSize { const char* name; int L, NH, C; };

// The sizes as --help shows them
inline std::string sizes_help(const std::vector<ModelSize>& sizes) {
    Names words = words_of("Sizes for --model, with their layers, heads and channels:");
    for (const ModelSize& m : sizes) {
        const char* end = &m == &sizes.back() ? "" : ";";
        words.push_back(strprintf("%s %d,%d,%d%s", m.name, m.L, m.NH, m.C, end));
    }
    return wrapped(words, 0, 2) + "\n";
}

inline void parse_model(const std::string& text, const std::string& prefix, const std::vector<ModelSize>& sizes,
                        ModelConfig& c) {
    const std::string name = text.compare(0, prefix.size(), prefix) == 0 ? text.substr(prefix.size()) : text;
    std::string names;
    Ints shape;
    if (!parse_value(text, any(), shape)) { shape.clear(); }
    for (const ModelSize& s : sizes) {
        names += s.name + std::string(", ");
        if (name == s.name) { shape = {s.L, s.NH, s.C}; }
    }
    check(shape.size() == 3, "--model: expected %sor L,NH,C as in 12,12,768, got '%s'", names.c_str(),
          printable(text).c_str());
    c.L = shape[0];
    c.NH = shape[1];
    c.C = shape[2];
    check(c.L >= 1 && c.L <= 1024, "--model: expected 1 to 1024 layers, got '%s'", text.c_str());
    check(c.C >= 1 && c.C <= 65536, "--model: expected 1 to 65536 channels, got '%s'", text.c_str());
    check(c.NH >= 1 && c.C % c.NH == 0, "--model: expected a number of heads that divides the %d channels, got '%s'",
          c.C, text.c_str());
}

// --rope_scaling for a model whose checkpoint at `path` has a stretch already: a kind without a factor takes the
// checkpoint's, and a different stretch must have the same original length.
inline void restretch(const Options& o, const std::string& path, PositionConfig& position) {
    const PositionConfig found = position;
    parse_rope_scaling(o.rope_scaling, position);
    check(position.T_original == found.T_original, "--rope_scaling %s: expected original_max_position_embeddings %d, "
          "the original length of %s, got %d", o.rope_scaling.c_str(), found.T_original, path.c_str(),
          position.T_original);
    if (found.scaling == RopeScaling::None) { return; }
    if (position.scaling == found.scaling && position.scaling_factor == 0) {
        position.scaling_factor = found.scaling_factor;
    }
    const std::string now = rope_scaling_text(position), was = rope_scaling_text(found);
    if (now != was) { say_instead(o, "--rope_scaling " + now, was, path); }
}

// --rope_theta: the base of all ropes. path: the checkpoint, if any, that was trained with position's
inline void rebase(const Options& o, const std::string& path, PositionConfig& position) {
    if (o.rope_theta == 0) { return; }
    check(position.has("rope"), "--rope_theta %.9g: only rope has a base, and the encoding is %s", o.rope_theta,
          position.name.c_str());
    for (const EncodingConfig& c : position.parts) {
        const bool free = c.name != "rope" || !path.empty() || !c.values[0].given;
        check(free, "--rope_theta %.9g: --pos %s gives rope a base, too", o.rope_theta, o.pos.c_str());
    }
    const std::string was = position_text(position);
    if (!set_rope_theta(position, o.rope_theta) || path.empty()) { return; }
    check(!o.resume || o.may_change("rope_theta"), "--rope_theta %.9g: the run to be resumed had %s (%s); give that, "
          "or --allow_change rope_theta", o.rope_theta, was.c_str(), path.c_str());
    position.other_theta = o.rope_theta;
    say_instead(o, strprintf("--rope_theta %.9g", o.rope_theta), "that of " + was, path);
}

// Sets `c`, which has the flags' shape, to the model of the flags, or that of the checkpoint or weights at `path` (if
// any), which must agree with the flags and the data. data_vocab: the vocabulary of the data, 0 without data
inline void resolve_config(const Options& o, ModelConfig& c, const std::string& path, int data_vocab,
                           const ConfigKeys& keys) {
    c.T = o.T;
    c.V = data_vocab;
    if (path.empty()) {
        c.position = parse_layers(o.pos, c.T, c.L);
        c.position.T_original = c.T;
        parse_rope_scaling(o.rope_scaling, c.position);
        rebase(o, "", c.position);
        resolve_mask(o, c.position, path);
        return;
    }
    const Json j = read_config(path, keys);
    const ModelConfig asked = c;
    c.L = (int)json_int(j, keys.L, 1, 1024, path);
    c.NH = (int)json_int(j, keys.NH, 1, 65536, path);
    c.C = (int)json_int(j, keys.C, 1, 65536, path);
    c.V = (int)json_int(j, keys.V, 1, MAX_VOCAB, path);
    if (j.contains("vocab_used")) { c.V = (int)json_int(j, "vocab_used", 1, c.V, path); }    // the rest is padding
    const int trained = (int)json_int(j, keys.T, 1, INT32_MAX, path);
    check(c.C % c.NH == 0, "%s: %s %d does not divide %s %d", path.c_str(), keys.NH, c.NH, keys.C, c.C);
    const bool same_shape = c.L == asked.L && c.NH == asked.NH && c.C == asked.C;
    check(!o.is_given("model") || same_shape, "--model %s: %s holds a model of %d,%d,%d", o.model.c_str(),
          path.c_str(), c.L, c.NH, c.C);
    const bool bytes = data_vocab == (strcmp(keys.type, BERT_KEYS.type) == 0 ? BYTE_VOCAB : 256);
    check(data_vocab == c.V || (data_vocab < c.V && !bytes),
          "--train_files, --val_files: the data has a vocabulary of %d, the model in %s one of %d", data_vocab,
          path.c_str(), c.V);
    if (data_vocab > 0 && data_vocab < c.V && comm().rank == 0) {
        say("%s: the model has %d rows for the %d tokens of the data; its softmax is over all of them", path.c_str(),
            c.V, data_vocab);
    }
    if (!o.is_given("T")) { c.T = trained; }
    if (j.contains("position")) {
        c.position = position_from_json(j["position"], trained, path);
        check_version(j, c.position, path);
        if (o.is_given("pos")) { check_position(o.pos, c.position, path); }
    } else {                    // a model of another program: learned positions, unless another encoding is requested
        c.position = parse_layers(o.is_given("pos") ? o.pos : "learned", trained, c.L);
    }
    c.position.T_original = trained;
    if (j.contains("rope_scaling")) { rope_scaling_from_json(j["rope_scaling"], c.position, path); }
    if (o.is_given("rope_scaling")) { restretch(o, path, c.position); }
    check_rope_theta(j, c.position, path);
    rebase(o, j.contains("position") ? path : "", c.position);
    mask_from_json(c.position, j, path);
    resolve_mask(o, c.position, path);
}

// Which rows the softmax sees: as --vocab_softmax says, or the checkpoint at `path` (if any), which it must not
// contradict.
inline void resolve_softmax(Options& o, ModelConfig& c, const std::string& path) {
    c.padded_softmax = o.vocab_softmax == "padded";
    if (path.empty()) { return; }
    const Json j = read_config(path, GPT2_KEYS);
    const bool padded = j.contains("vocab_softmax") && json_string(j, "vocab_softmax", path) == "padded";
    const std::string found = padded ? "padded" : "used";
    check(!o.is_given("vocab_softmax") || o.vocab_softmax == found,
          "--vocab_softmax %s: the model in %s was trained with %s", o.vocab_softmax.c_str(), path.c_str(),
          found.c_str());
    check(!padded || json_int(j, "vocab_size", 1, MAX_VOCAB, path) == c.Vp(),
          "%s: vocab_size: expected vocab_used %d padded to %d", path.c_str(), c.V, c.Vp());
    o.vocab_softmax = found;
    c.padded_softmax = padded;
}

// ----------------------------------------------------------------------------------------------------------
// the tokenizer of a run: found at the start, kept in memory, written into every checkpoint as transformers reads it:
//
//   vocab.json, merges.txt | vocab.txt | tokenizer.json    the vocabulary, as it was given, or of bytes
//   tokenizer_config.json                                  the class that reads it, its special tokens
//   generation_config.json                                 for a GPT-2: the token at which generate() stops

inline bool is_bytes(const Tokenizer& t) { return !t.word_piece && t.tokens == Tokenizer::bytes().tokens; }

// An error unless every id of the tokenizer is one of the model's V; fewer give a notice. what: names the tokenizer
inline void check_fits(const Tokenizer& t, const std::string& what, int V) {
    check(t.vocab_size() <= V, "%s: expected the model's %d tokens, got %d", what.c_str(), V, t.vocab_size());
    if (t.vocab_size() < V && comm().rank == 0) {
        say("%s: has %d tokens, and the model has %d rows", what.c_str(), t.vocab_size(), V);
    }
}

// The tokenizer beside the weights of a model with V tokens, or null. One of an unknown kind, or with more tokens, is
// ignored with a notice if other software wrote the model; in a checkpoint of this program it is an error.
inline std::unique_ptr<Tokenizer> stored_tokenizer(const std::string& source, int V) {
    if (source.empty()) { return nullptr; }
    const size_t slash = source.rfind('/');
    std::string dir = source;
    if (!is_directory(source)) { dir = slash == std::string::npos ? "." : source.substr(0, slash); }
    if (Tokenizer::files_in(dir).empty()) { return nullptr; }
    try {
        auto t = std::make_unique<Tokenizer>(Tokenizer::load(dir));
        if (V != 256) { check_fits(*t, t->path, V); }
        return t;
    } catch (const Error& e) {
        if (path_exists(dir + "/manifest.json")) { throw; }
        if (comm().rank == 0) { say("%s; tokens are shown as ids (--tokenizer)", e.what()); }
        return nullptr;
    }
}

// The tokenizer of a model with V tokens: --tokenizer, or the one beside its weights (`source`, a directory or a file),
// or bytes; null if there is none. A resumed run keeps its checkpoint's. Weights from elsewhere may have more rows.
inline std::unique_ptr<Tokenizer> find_tokenizer(const std::string& flag, const std::string& source, bool resumed,
                                                 int V) {
    const Doing reading("reading the tokenizer");
    std::unique_ptr<Tokenizer> t;
    if (!flag.empty()) {
        t = std::make_unique<Tokenizer>(Tokenizer::load(flag));
        const std::string name = "--tokenizer " + t->path;
        check(!source.empty() || t->vocab_size() == V, "%s: expected the model's %d tokens, got %d", name.c_str(), V,
              t->vocab_size());
        check_fits(*t, name, V);
        if (!resumed && V != 256) { return t; }
    }
    std::unique_ptr<Tokenizer> stored = stored_tokenizer(source, V);
    for (const Tokenizer* other : {t.get(), stored.get()}) {
        const std::vector<std::string> bytes = Tokenizer::bytes().tokens;
        const bool fits = V != 256 || other == nullptr || (other->vocab_size() >= V && !other->word_piece &&
                          std::equal(bytes.begin(), bytes.end(), other->tokens.begin()));
        check(fits, "%s%s: expected the 256 bytes in their order, as the tokens of this model are bytes; leave it out",
              other == t.get() ? "--tokenizer " : "", other->path.c_str());
    }
    if (V == 256) { return std::make_unique<Tokenizer>(Tokenizer::bytes()); }
    if (stored == nullptr) { return t; }
    check(t == nullptr || t->same(*stored), "--tokenizer %s: its tokens are not those of %s, with which the run began; "
          "leave it out", t->path.c_str(), stored->path.c_str());
    const bool better = t != nullptr && t->cannot_encode.empty() && !stored->cannot_encode.empty();
    return better ? std::move(t) : std::move(stored);
}

// tokenizer_config.json. longest: the most tokens that the model can read, 0: any number
inline Json tokenizer_config(const Tokenizer& t, bool bert, int64_t longest) {
    bert = bert || t.word_piece;
    const bool one_file = is_bytes(t) || t.files[0].first == "tokenizer.json";
    const int special = is_bytes(t) ? 0 : t.eot;
    const Json end = special >= 0 ? Json(t.tokens[(size_t)special]) : Json();
    Json j = {{"tokenizer_class", "GPT2Tokenizer"}, {"clean_up_tokenization_spaces", false}};
    if (one_file) { j["tokenizer_class"] = "PreTrainedTokenizerFast"; }
    if (longest > 0) { j["model_max_length"] = longest; }
    if (!bert) {
        for (const char* key : {"bos_token", "eos_token", is_bytes(t) ? "pad_token" : "unk_token"}) { j[key] = end; }
        j["model_input_names"] = {"input_ids", "attention_mask"};
        j["padding_side"] = "left";                 // generate() continues a batch of texts at their common end
        if (!one_file) { j["add_prefix_space"] = t.settings.prefix_space; }
    } else if (!one_file) {
        j["tokenizer_class"] = "BertTokenizer";
        j["do_lower_case"] = t.settings.bert.folds;
        if (!t.settings.bert.splits_chinese) { j["tokenize_chinese_chars"] = false; }
    }
    for (const auto& [id, token] : t.settings.added) {
        j["added_tokens_decoder"][std::to_string(id)] = token.json();
    }
    const Json names = bert ? TextSettings::named("BertTokenizer") : Json::object();
    for (const auto& n : names.items()) {
        const bool has = t.word_piece ? is_in(t.tokens, n.value().get<std::string>()) : n.value() != "[UNK]";
        if (has) { j[n.key()] = n.value(); }                        // bytes need no [UNK]
    }
    return j;
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
        if (t.cannot_encode.empty()) {
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
