// text/settings.h -- what Hugging Face's files say about a text, without the vocabulary: the added tokens, and the keys
// that change ids. Each is honoured, or refused by its name, wherever it stands:
//
//   tokenizer.json            {"added_tokens": [{"id": 50256, "content": "<|endoftext|>", "special": true}, ...],
//                              "normalizer": ..., "pre_tokenizer": ..., "post_processor": ..., "model": ...}
//   tokenizer_config.json     {"tokenizer_class": "BertTokenizer", "do_lower_case": false, "pad_token": "[PAD]",
//                              "added_tokens_decoder": {"50257": {"content": "[PAD]", "lstrip": false, ...}}, ...}
//   added_tokens.json         {"[PAD]": 50257}                        } unless the configuration
//   special_tokens_map.json   {"pad_token": "[PAD]", ...}             } has added_tokens_decoder
#pragma once

#include <map>

#include "words.h"
#include "../json.h"

// A token that a text is searched for before it is split into words
struct AddedToken {
    std::string content;
    bool special = false;
    bool normalized = false;            // searched for in the text that the normalizer gives; false: in the text itself
    bool lstrip = false, rstrip = false;        // takes the white space on that side

    // special: the token is one, whatever j says
    static AddedToken read(const Json& j, bool special, const std::string& what) {
        AddedToken t;
        if (j.is_string()) {            // of a special token
            t.content = j.get<std::string>();
            t.special = true;
            return t;
        }
        const auto flag = [&](const char* key, bool absent) {
            return j.value(key, Json()).is_null() ? absent : json_bool(j, key, what);
        };
        t.content = json_string(j, "content", what);
        t.special = special || flag("special", false);
        t.normalized = flag("normalized", !t.special);
        t.lstrip = flag("lstrip", false);
        t.rstrip = flag("rstrip", false);
        check(!flag("single_word", false), "%s: \"%s\": single_word: expected false, got true", what.c_str(),
              printable(t.content).c_str());
        return t;
    }
    Json json() const {
        return {{"content", content}, {"lstrip", lstrip}, {"normalized", normalized}, {"rstrip", rstrip},
                {"single_word", false}, {"special", special}};
    }
};

// The value at "model.dropout" of tokenizer.json, or null
inline nlohmann::json value_at(const nlohmann::json& whole, std::string key) {
    std::replace(key.begin(), key.end(), '.', '/');
    const nlohmann::json::json_pointer at("/" + key);
    return whole.contains(at) ? whole[at] : nlohmann::json();
}

// The files beside a vocabulary
struct Beside {
    std::string dir;                            // with its slash
    std::string type;                           // "GPT2Tokenizer": the class that transformers takes; "": unknown
    std::string type_file;                      // which says so
    bool ours = false;                          // in a checkpoint of ours, added_tokens_decoder has every added token
    Json config = Json::object();               // tokenizer_config.json
    Json added = Json::object();                // added_tokens.json
    Json special = Json::object();              // special_tokens_map.json

    Beside() {}                                 // none
    explicit Beside(const std::string& dir) : dir(dir), ours(path_exists(dir + "manifest.json")) {
        config = read("tokenizer_config.json");
        const Json model = read("config.json"), of = model.value("model_type", Json());
        for (const char* name : {"tokenizer_config.json", "config.json"}) {
            if (!type.empty()) { break; }
            type_file = dir + name;
            const Json& j = name[0] == 'c' ? model : config;
            if (!j.value("tokenizer_class", Json()).is_null()) { type = json_string(j, "tokenizer_class", type_file); }
        }
        if (type.empty() && of == "gpt2") { type = "GPT2Tokenizer"; }
        if (type.empty() && of == "bert") { type = "BertTokenizer"; }
        if (ends_with(type, "Fast")) { type.resize(type.size() - strlen("Fast")); }
        if (config.contains("added_tokens_decoder")) { return; }
        added = read("added_tokens.json");
        special = read("special_tokens_map.json");
    }

private:
    Json read(const char* name) const {
        if (!path_exists(dir + name)) { return Json::object(); }
        const Json j = read_json(dir + name);
        check(j.is_object(), "%s: expected an object, got %s", (dir + name).c_str(), json_excerpt(j).c_str());
        return j;
    }
};

struct TextSettings {
    std::map<int, AddedToken> added;            // by id
    BertText bert;                              // how WordPiece reads
    bool prefix_space = false;                  // BPE: a text begins with a space

    static constexpr int MAX_TOKENS = 1 << 20;

    Json json() const {
        Json j = {{"folds", bert.folds}, {"chinese", bert.splits_chinese}, {"space", prefix_space}};
        for (const auto& [id, token] : added) { j[std::to_string(id)] = token.json(); }
        return j;
    }
    // The special tokens of a class of transformers
    static Json named(const std::string& type) {
        const char* end = "<|endoftext|>";
        if (type == "GPT2Tokenizer") { return {{"bos_token", end}, {"eos_token", end}, {"unk_token", end}}; }
        if (type != "BertTokenizer") { return Json::object(); }
        return {{"pad_token", "[PAD]"}, {"unk_token", "[UNK]"}, {"cls_token", "[CLS]"}, {"sep_token", "[SEP]"},
                {"mask_token", "[MASK]"}};
    }
    bool adds(int id, const std::string& content) const {
        const auto token = added.find(id);
        return token != added.end() && token->second.content == content;
    }

    // Reads every list of added tokens. whole: tokenizer.json, or {}; path: of the vocabulary
    void collect(const nlohmann::json& whole, const std::string& path, const Beside& beside) {
        if (whole.contains("added_tokens")) { add_list(whole["added_tokens"], path + ": added_tokens"); }
        const std::string config = beside.dir + "tokenizer_config.json: ", file = beside.dir + "added_tokens.json";
        const char* decoder = "added_tokens_decoder";
        if (beside.config.contains(decoder)) { add_list(beside.config[decoder], config + decoder); }
        for (const char* name : {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
                                 "mask_token", "additional_special_tokens", "extra_special_tokens"}) {
            const bool map = beside.special.contains(name), list = strstr(name, "_tokens") != nullptr;
            const Json& from = map ? beside.special : beside.config;        // the map replaces the configuration
            const bool has = from.contains(name), usual = !has && named(beside.type).contains(name);
            const Json value = usual ? named(beside.type)[name] : from.value(name, Json());
            const std::string what = (map ? beside.dir + "special_tokens_map.json: " : config) + name;
            if (value.is_null()) { continue; }
            for (const Json& j : list ? value : Json::array({value})) {
                roles.push_back({name, what, AddedToken::read(j, true, what), usual});
            }
        }
        for (const auto& item : beside.added.items()) {
            const int64_t id = json_int(beside.added, item.key(), 0, MAX_TOKENS, file);
            const auto is_it = [&](const Role& role) { return role.token.content == item.key(); };
            AddedToken token;
            token.content = item.key();
            token.special = std::any_of(roles.begin(), roles.end(), is_it);
            token.normalized = !token.special;
            const bool known = adds((int)id, item.key());               // tokenizer.json has its flags
            add(id, known ? added[(int)id] : token, file);
        }
    }

    // Gives each added token its place in the vocabulary: that with its spelling, or the next id. ours: the special
    // tokens that no list adds have no spelling
    void place(std::vector<std::string>& tokens, int& eot, bool word_piece, bool ours, const std::string& path) {
        for (const auto& [id, token] : added) {
            const bool next = id == (int)tokens.size();
            check(next || (id < (int)tokens.size() && tokens[(size_t)id] == token.content), "%s: added_tokens: \"%s\" "
                  "has the id %d of another token, or not the next free one, %zu", path.c_str(),
                  printable(token.content).c_str(), id, tokens.size());
            if (next) { tokens.push_back(token.content); }
            if (token.content == "<|endoftext|>") { eot = id; }
        }
        const Json bert = word_piece ? named("BertTokenizer") : Json::object();
        for (const Role& role : roles) {
            const std::string content = role.token.content, wanted = bert.value(role.name, content);
            check(wanted == content, "%s: expected \"%s\", got \"%s\"", role.what.c_str(), wanted.c_str(),
                  printable(content).c_str());
            const int id = (int)(std::find(tokens.begin(), tokens.end(), content) - tokens.begin());
            const bool next = id == (int)tokens.size();
            if (next && role.usual) { continue; }
            if (next) { tokens.push_back(content); }
            if (next || (!ours && added.count(id) == 0)) { add(id, role.token, role.what); }
            if (role.name == "eos_token" && !word_piece) { eot = id; }
        }
    }

    // Reads the settings of tokenizer_config.json and of tokenizer.json (`whole`, or null). If both have one, they must
    // agree; without one in the configuration, transformers takes the default of its class, if that has one.
    void read(const nlohmann::json& whole, const std::string& path, const Beside& beside, bool word_piece) {
        static const Json values = {
            {"add_bos_token", {false, nullptr}}, {"add_eos_token", {false, nullptr}}, {"clean_text", {true}},
            {"do_basic_tokenize", {true}}, {"never_split", {nullptr, Json::array()}},
            {"split_special_tokens", {false, nullptr}}, {"wordpieces_prefix", {"##"}}};
        const std::string what = beside.dir + "tokenizer_config.json";
        const std::string own = word_piece ? "BertTokenizer" : "GPT2Tokenizer";
        check_keys(beside.config, values, OTHER_KEYS, "a tokenizer", "the ids", what);
        const bool all = !whole.is_null();
        const bool any = all && (beside.type == "PreTrainedTokenizer" || beside.type == "TokenizersBackend");
        check(beside.type.empty() || beside.type == own || any, "%s: tokenizer_class: expected \"%s\" for %s, got "
              "\"%s\"", beside.type_file.c_str(), own.c_str(), path.c_str(), printable(beside.type).c_str());
        const auto setting = [&](const char* key, const std::string& place, bool otherwise) {
            Json wanted = beside.config.value(key, Json());
            const Json found = value_at(whole, place);
            const char* why = wanted.is_null() ? ", transformers' value without this key" : "";
            if (wanted.is_null() && (beside.type == own || found.is_null())) { wanted = otherwise; }
            const bool agree = found.is_null() || wanted.is_null() || found == wanted;
            check(agree, "%s: %s: expected %s, as %s of %s, got %s%s", what.c_str(), key, json_excerpt(found).c_str(),
                  place.c_str(), path.c_str(), json_excerpt(wanted).c_str(), why);
            const Json& value = found.is_null() ? wanted : found;
            const std::string at = found.is_null() ? what + ": " + key : path + ": " + place;
            check(value.is_boolean(), "%s: expected true or false, got %s", at.c_str(), json_excerpt(value).c_str());
            return value.get<bool>();
        };
        if (!word_piece) {
            prefix_space = setting("add_prefix_space", "pre_tokenizer.add_prefix_space", false);
            return;
        }
        bert.folds = setting("do_lower_case", "normalizer.lowercase", true);
        bert.splits_chinese = setting("tokenize_chinese_chars", "normalizer.handle_chinese_chars", true);
        const bool strips = setting("strip_accents", "normalizer.strip_accents", bert.folds);
        check(strips == bert.folds, "%s: strip_accents: expected %s, as lower case, got %s",
              (all ? path : what).c_str(), Json(bert.folds).dump().c_str(), Json(strips).dump().c_str());
    }

private:
    // A special token
    struct Role {
        std::string name, what;                 // "pad_token"; for messages
        AddedToken token;
        bool usual;                             // no file names it; its class does, if the vocabulary has it
    };
    std::vector<Role> roles;

    // A later list may change the flags of a token.
    void add(int64_t id, const AddedToken& token, const std::string& what) {
        const bool fits = id >= 0 && id < MAX_TOKENS && !token.content.empty();
        const bool free = fits && (added.count((int)id) == 0 || adds((int)id, token.content));
        check(free, "%s: \"%s\" has the id %lld of another token", what.c_str(), printable(token.content).c_str(),
              (long long)id);
        added[(int)id] = token;
    }
    // [{"id": 50257, "content": ...}, ...], or {"50257": {"content": ...}, ...}
    void add_list(const Json& list, const std::string& what) {
        check(list.is_structured(), "%s: expected a list, got %s", what.c_str(), json_excerpt(list).c_str());
        for (const auto& item : list.items()) {
            int64_t id = strtol(item.key().c_str(), nullptr, 10);
            if (list.is_array()) { id = json_int(item.value(), "id", 0, MAX_TOKENS, what); }
            add(id, AddedToken::read(item.value(), false, what), what);
        }
    }

    // Keys of tokenizer_config.json that change no id, or that are read elsewhere
    static constexpr const char* OTHER_KEYS =
        "tokenizer_class do_lower_case strip_accents tokenize_chinese_chars add_prefix_space added_tokens_decoder"
        " bos_token eos_token unk_token sep_token pad_token cls_token mask_token additional_special_tokens"
        " extra_special_tokens model_max_length max_len name_or_path _commit_hash special_tokens_map_file"
        " tokenizer_file vocab_file merges_file full_tokenizer_file init_inputs model_input_names padding_side"
        " truncation_side pad_to_multiple_of pad_token_type_id max_length stride truncation_strategy chat_template"
        " errors clean_up_tokenization_spaces spaces_between_special_tokens processor_class backend is_local"
        " local_files_only use_fast from_slow trim_offsets return_token_type_ids cache_dir trust_remote_code token"
        " verbose";
};

// An error if tokenizer.json puts other special tokens around a text A than the trainers do.
inline void check_around(const nlohmann::json& whole, const std::string& wanted, const std::string& path) {
    const nlohmann::json around = whole.value("post_processor", nlohmann::json());
    const std::string what = path + ": post_processor";
    const std::string type = around.is_null() ? "null" : json_string(around, "type", what);
    std::string found;
    if (type == "null" || type == "ByteLevel") { found = "A"; }
    if (type == "BertProcessing") {
        const nlohmann::json::json_pointer cls("/cls/0"), sep("/sep/0");
        found = around.value(cls, "") + " A " + around.value(sep, "");
    }
    if (type == "TemplateProcessing") {
        for (const auto& part : json_at(around, "single", what)) {
            for (const auto& item : part.items()) {
                found += (found.empty() ? "" : " ") + json_string(item.value(), "id", what);
            }
        }
    }
    check(found == wanted, "%s: expected \"%s\" around a text A, got \"%s\" (%s)", what.c_str(), wanted.c_str(),
          printable(found).c_str(), printable(type).c_str());
}

// An error if tokenizer.json needs something that is not computed here: {"model.dropout", the value that is}, ... A key
// that is absent or null means that value, too, unless it is a type.
using Settings = std::vector<std::pair<std::string, nlohmann::json>>;
inline void check_settings(const nlohmann::json& whole, const std::string& path, const Settings& settings) {
    for (const auto& [key, wanted] : settings) {
        const nlohmann::json found = value_at(whole, key);
        check(found == wanted || (found.is_null() && !ends_with(key, ".type")), "%s: %s: expected %s, got %s",
              path.c_str(), key.c_str(), json_excerpt(wanted).c_str(), json_excerpt(found).c_str());
    }
}
