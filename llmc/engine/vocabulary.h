// engine/vocabulary.h -- a model's vocabulary: token ids as text, and the files of it that a checkpoint keeps.
//
// A Tokenizer is the table of tokens by which ids are printed. Text becomes ids in Python (scripts/text.py,
// data/text.py), except for a model of bytes, which reads text itself. A token of byte-level BPE may end inside a
// character, so tokens are bytes, and Utf8Stream makes text of them.
#pragma once

#include <unordered_map>

#include "comm.h"
#include "json.h"
#include "safetensors.h"

// ----------------------------------------------------------------------------------------------------------
// UTF-8
//
//   code points          bytes
//   U+0000  .. U+007F    0xxxxxxx
//   U+0080  .. U+07FF    110xxxxx 10xxxxxx
//   U+0800  .. U+FFFF    1110xxxx 10xxxxxx 10xxxxxx              (without the surrogates U+D800 .. U+DFFF)
//   U+10000 .. U+10FFFF  11110xxx 10xxxxxx 10xxxxxx 10xxxxxx

// The length of a character that begins with byte a: 1 to 4, or 0 if none does. 0xC0 and 0xC1 would begin ASCII written
// in two bytes, and 0xF5 and above a character beyond U+10FFFF.
inline int utf8_length(unsigned char a) {
    if (a < 0x80) { return 1; }
    if (a < 0xC2) { return 0; }
    if (a < 0xE0) { return 2; }
    if (a < 0xF0) { return 3; }
    return a < 0xF5 ? 4 : 0;
}

// The number of bytes that s[0..n), n >= 1, lacks to be one character; -1: it begins no character.
inline int utf8_missing(const char* s, size_t n) {
    const int length = utf8_length((unsigned char)s[0]);
    if (length < (int)n) { return -1; }
    // The second byte's bounds keep out surrogates (ED A0 ..), what is beyond U+10FFFF (F4 90 ..), and characters
    // written longer than they need to be (E0 80 .., F0 80 ..).
    int lo = 0x80, hi = 0xBF;
    switch ((unsigned char)s[0]) {
        case 0xE0: lo = 0xA0; break;
        case 0xED: hi = 0x9F; break;
        case 0xF0: lo = 0x90; break;
        case 0xF4: hi = 0x8F; break;
    }
    for (size_t i = 1; i < n; i++) {
        const unsigned char c = (unsigned char)s[i];
        if (c < lo || c > hi) { return -1; }
        lo = 0x80;
        hi = 0xBF;
    }
    return length - (int)n;
}

// Bytes in, UTF-8 out. An unfinished character waits for its missing bytes. Bytes that are not UTF-8 become U+FFFD, one
// per maximal subpart (the Unicode Standard, 3.9).
struct Utf8Stream {
    std::string waiting;    // the start of a character, at most 3 bytes

    std::string push(const std::string& bytes) {
        std::string out;
        for (const char c : bytes) {
            waiting += c;
            if (waiting.size() > 1 && missing() < 0) {   // c does not continue the character that waits
                out += REPLACEMENT;
                waiting.assign(1, c);
            }
            const int more = missing();
            if (more > 0) { continue; }
            out += more == 0 ? waiting : REPLACEMENT;
            waiting.clear();
        }
        return out;
    }
    // the end of the stream
    std::string flush() {
        const std::string out = waiting.empty() ? "" : REPLACEMENT;
        waiting.clear();
        return out;
    }

private:
    static constexpr const char* REPLACEMENT = "\xEF\xBF\xBD";      // U+FFFD

    int missing() const { return utf8_missing(waiting.data(), waiting.size()); }
};

// ----------------------------------------------------------------------------------------------------------
// the spelling of byte-level BPE: a byte that prints is its own character, the others are U+0100, U+0101, ...

inline std::string spelled(int byte) {
    static const std::vector<std::string> of = [] {
        std::vector<std::string> characters;
        unsigned next = 0x100;
        for (unsigned b = 0; b < 256; b++) {
            const bool prints = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
            const unsigned c = prints ? b : next++;
            const std::string two = {(char)(0xC0 | c >> 6), (char)(0x80 | (c & 0x3F))};
            characters.push_back(c < 0x80 ? std::string(1, (char)c) : two);
        }
        return characters;
    }();
    return of[(size_t)byte];
}

// The bytes of a token; a token with other characters is plain text
inline std::string unspelled(const std::string& token) {
    static const std::unordered_map<std::string, char> bytes = [] {
        std::unordered_map<std::string, char> of;
        for (int b = 0; b < 256; b++) { of[spelled(b)] = (char)b; }
        return of;
    }();
    std::string out;
    for (size_t at = 0; at < token.size();) {
        const std::string character = token.substr(at, (size_t)utf8_length((unsigned char)token[at]));
        const auto byte = bytes.find(character);
        if (byte == bytes.end()) { return token; }
        out += byte->second;
        at += character.size();
    }
    return out;
}

// ----------------------------------------------------------------------------------------------------------
// the tokens of a vocabulary

constexpr int BYTE_VOCAB = 260;         // of a BERT of bytes: the 256, then [PAD] [CLS] [SEP] [MASK]

struct Tokenizer {
    // How tokens are shown: as bytes; as words, which "##" continues; as numbers
    enum class Kind { Bytes, WordPiece, Ids };

    std::string path = "bytes";         // for messages
    Kind kind = Kind::Bytes;
    std::vector<std::string> tokens;    // [V] by id: bytes (Kind::Bytes), or as in the file; "": no token
    int eot = -1;                       // the end-of-text token, or BERT's [SEP]; -1: none
    std::vector<std::pair<std::string, std::string>> files;     // in a checkpoint: name, contents. None for bytes

    static constexpr int MAX_TOKENS = 1 << 20;          // bounds on files from unknown sources
    static constexpr uint64_t MAX_FILE = 64u << 20;     // bytes

    int vocab_size() const { return (int)tokens.size(); }

    // The id of a token, the highest of several; -1: none
    int id_of(const std::string& token) const {
        for (int id = vocab_size(); id-- > 0;) { if (tokens[(size_t)id] == token) { return id; } }
        return -1;
    }
    // The text of a token, <30600> of an id without one. first: it begins the text
    std::string shown(int id, bool first = false) const {
        check(id >= 0, "%s: expected an id, got %d", path.c_str(), id);
        const std::string token = id < vocab_size() ? tokens[(size_t)id] : "";
        if (token.empty()) { return strprintf("<%d>", id); }
        if (kind != Kind::WordPiece) { return token; }
        if (token.size() > 2 && starts_with(token, "##")) { return token.substr(2); }
        return first ? token : " " + token;
    }
    // The contents of one of the files, or null
    const std::string* file(const std::string& name) const {
        for (const auto& [own, contents] : files) { if (own == name) { return &contents; } }
        return nullptr;
    }

    // the 256 bytes, for models that are trained on them
    static Tokenizer bytes() {
        Tokenizer t;
        for (int i = 0; i < 256; i++) { t.tokens.push_back(std::string(1, (char)i)); }
        return t;
    }

    // the vocabularies in a directory, in order of precedence
    static std::vector<std::string> files_in(const std::string& directory) {
        std::vector<std::string> found;
        for (const char* name : {"tokenizer.json", "encoder.json", "vocab.json", "vocab.txt"}) {
            if (path_exists(directory + "/" + name)) { found.push_back(directory + "/" + name); }
        }
        return found;
    }

    // path: a directory, or a vocabulary by itself. No file is read again after this.
    static Tokenizer load(const std::string& path) {
        refuse_hub_name(path);
        const char* expected = "%s: expected tokenizer.json, vocab.json (or encoder.json) or vocab.txt%s; GPT-2's: "
                               "python3 data/vocabulary.py --out DIR";
        const std::vector<std::string> found = is_directory(path) ? files_in(path) : std::vector<std::string>{path};
        check(!found.empty(), expected, path.c_str(), " in this directory, got none");
        check(found.size() == 1 || ends_with(found[0], "/tokenizer.json"), "%s: expected one vocabulary, got %s and %s "
              "(name one of the files)", path.c_str(), found[0].c_str(), found[1].c_str());
        Tokenizer t;
        t.path = found[0];
        check(ends_with(t.path, ".json") || ends_with(t.path, ".txt"), expected, t.path.c_str(), "");
        refuse_stand_in(t.path);
        const std::string text = read_file(t.path, MAX_FILE);
        if (ends_with(t.path, ".txt")) { t.read_lines(text); } else { t.read_json(text); }
        t.add_files(is_directory(path));
        t.read_files();
        return t;
    }

private:
    // vocab.txt: line n, from 0 on, is the token with id n
    void read_lines(const std::string& text) {
        kind = Kind::WordPiece;
        for (size_t begin = 0; begin < text.size();) {
            const size_t end = std::min(text.find('\n', begin), text.size());
            check(vocab_size() < MAX_TOKENS, "%s: expected at most %d lines, got more", path.c_str(), MAX_TOKENS);
            tokens.push_back(text.substr(begin, end - begin));
            if (ends_with(tokens.back(), "\r")) { tokens.back().pop_back(); }
            begin = end + 1;
        }
        check(id_of("[UNK]") >= 0, "%s: has no line [UNK], so it is not a WordPiece vocabulary", path.c_str());
        files.push_back({"vocab.txt", text});
    }

    // vocab.json, {"token": id, ...}, or tokenizer.json:
    //
    //   {"model": {"type": "BPE", "vocab": {"token": id, ...}, ...}, "decoder": {"type": "ByteLevel", ...},
    //    "added_tokens": [{"id": 50256, "content": "<|endoftext|>", ...}, ...], ...}
    //
    // Unigram has [["token", score], ...] as its vocab.
    void read_json(const std::string& text) {
        const auto j = parse_json<nlohmann::json>(text, path, "merges");
        const bool whole = j.is_object() && j.contains("model") && j["model"].is_object();
        files.push_back({whole ? "tokenizer.json" : "vocab.json", text});
        const auto type = [&](const char* part) {
            const bool has = whole && j.contains(part) && j[part].is_object() && j[part].contains("type");
            return has ? json_string(j[part], "type", path) : "";
        };
        const bool level = type("decoder") == "ByteLevel" || type("pre_tokenizer") == "ByteLevel";
        const bool bytes = !whole || (type("model") == "BPE" && level);
        kind = bytes ? Kind::Bytes : Kind::Ids;
        if (type("model") == "WordPiece") { kind = Kind::WordPiece; }
        const nlohmann::json& vocab = whole ? json_at(j["model"], "vocab", path) : j;
        check(vocab.is_structured() && !vocab.empty(), "%s: expected tokens and their ids, got %s", path.c_str(),
              json_excerpt(vocab).c_str());
        for (const auto& item : vocab.items()) {
            if (vocab.is_object()) {
                place(json_int(vocab, item.key(), 0, MAX_TOKENS - 1, path), bytes ? unspelled(item.key()) : item.key());
                continue;
            }
            const nlohmann::json& pair = item.value();
            check(pair.is_array() && !pair.empty() && pair[0].is_string(), "%s: vocab: expected a token and its score, "
                  "got %s", path.c_str(), json_excerpt(pair).c_str());
            place(vocab_size(), pair[0].get<std::string>());
        }
        if (!whole || !j.contains("added_tokens")) { return; }
        for (const auto& added : j["added_tokens"]) {
            add(json_int(added, "id", 0, MAX_TOKENS - 1, path), json_string(added, "content", path));
        }
    }
    // Adds a token in plain text; the vocabulary may have it already.
    void add(int64_t id, const std::string& token) {
        const std::string listed = kind == Kind::Bytes ? unspelled(token) : token;
        const bool known = id < vocab_size() && (tokens[(size_t)id] == listed || tokens[(size_t)id] == token);
        if (known) { tokens[(size_t)id] = token; } else { place(id, token); }
    }
    void place(int64_t id, const std::string& token) {
        check(id < MAX_TOKENS, "%s: expected at most %d tokens, got more", path.c_str(), MAX_TOKENS);
        tokens.resize(std::max(tokens.size(), (size_t)id + 1));
        check(tokens[(size_t)id].empty(), "%s: two tokens have the id %lld", path.c_str(), (long long)id);
        tokens[(size_t)id] = token;
    }

    // Adds the files beside the vocabulary. all: also other forms of it, if a directory was named
    void add_files(bool all) {
        const std::string dir = path.substr(0, path.rfind('/') + 1), own = files[0].first;
        const struct { const char* on_disk; const char* name; bool vocabulary; } table[] = {
            {"tokenizer.json", "tokenizer.json", true}, {"encoder.json", "vocab.json", true},
            {"vocab.json", "vocab.json", true}, {"vocab.txt", "vocab.txt", true},
            {"tokenizer.model", "tokenizer.model", true}, {"vocab.bpe", "merges.txt", own != "vocab.json"},
            {"merges.txt", "merges.txt", own != "vocab.json"},
            {"tokenizer_config.json", "tokenizer_config.json", false},
            {"special_tokens_map.json", "special_tokens_map.json", false},
            {"added_tokens.json", "added_tokens.json", false}, {"chat_template.jinja", "chat_template.jinja", false}};
        for (const auto& row : table) {
            const std::string from = dir + row.on_disk;
            if ((row.vocabulary && !all) || file(row.name) != nullptr || !path_exists(from)) { continue; }
            refuse_stand_in(from);
            files.push_back({row.name, read_file(from, MAX_FILE)});
        }
    }

    // Reads the added tokens, {"token": id, ...}, and the end-of-text token, by default the usual one.
    void read_files() {
        const std::string dir = path.substr(0, path.rfind('/') + 1);
        if (const std::string* text = file("added_tokens.json")) {
            const std::string what = dir + "added_tokens.json";
            const Json more = parse_json(*text, what);
            for (const auto& item : more.items()) {
                add(json_int(more, item.key(), 0, MAX_TOKENS - 1, what), item.key());
            }
        }
        eot = id_of(kind == Kind::WordPiece ? "[SEP]" : "<|endoftext|>");
        const std::string* text = file("tokenizer_config.json");
        if (text == nullptr) { return; }
        const std::string what = dir + "tokenizer_config.json";
        const Json config = parse_json(*text, what);
        check(config.is_object(), "%s: expected an object, got %s", what.c_str(), json_excerpt(config).c_str());
        Json end = config.value("eos_token", Json());
        if (end.is_object()) { end = json_at(end, "content", what); }
        const int id = end.is_string() ? id_of(end.get<std::string>()) : -1;
        if (id >= 0) { eot = id; }
    }
};

// The tokenizer if it can show tokens as text, else null
inline const Tokenizer* with_text(const Tokenizer* t) {
    return t != nullptr && t->kind != Tokenizer::Kind::Ids ? t : nullptr;
}

// "15496 995" -> ids below V. flag and command, of scripts/text.py: for messages
inline std::vector<int> parse_ids(const std::string& text, int V, const char* flag, const char* command) {
    const char* space = " ,\t\r\n";
    std::vector<int> ids;
    for (size_t at = 0; (at = text.find_first_not_of(space, at)) != std::string::npos;) {
        const size_t end = std::min(text.find_first_of(space, at), text.size());
        const std::string word = text.substr(at, end - at);
        char* rest = nullptr;
        const long id = strtol(word.c_str(), &rest, 10);
        check(*rest == '\0' && id >= 0 && id < V, "%s: '%s' is not a token id below %d; it takes ids, as in \"15496 "
              "995\"; for a text: python3 scripts/text.py %s RUN \"TEXT\"", flag, printable(word, 40).c_str(), V,
              command);
        ids.push_back((int)id);
        at = end;
    }
    return ids;
}

// ----------------------------------------------------------------------------------------------------------
// the special tokens of a masked language model

constexpr int BERT_VOCAB = 30522;

struct SpecialTokens {
    int V = 0;                              // ids are 0 to V - 1
    int pad = -1;                           // [PAD] fills the rows of a batch
    int unk = -1;                           // [UNK] stands for a word that cannot be encoded; -1: none (bytes)
    int cls = -1;                           // [CLS] begins a sequence
    int sep = -1;                           // [SEP] ends it
    int mask = -1;                          // [MASK]

    bool is_special(int id) const { return id == pad || id == unk || id == cls || id == sep || id == mask; }
    // the ones that exist, ascending
    std::vector<int> ids() const {
        std::vector<int> list;
        for (const int id : {pad, unk, cls, sep, mask}) { if (id >= 0) { list.push_back(id); } }
        std::sort(list.begin(), list.end());
        return list;
    }
};

// The special tokens of a vocabulary that is known by its size
inline SpecialTokens special_tokens(int vocab) {
    if (vocab == BERT_VOCAB) { return {vocab, 0, 100, 101, 102, 103}; }
    check(vocab == BYTE_VOCAB, "the ids of [PAD] [CLS] [SEP] [MASK]: expected a vocabulary of %d (BERT) or %d (bytes), "
          "got %d (give any other by --tokenizer)", BERT_VOCAB, BYTE_VOCAB, vocab);
    return {vocab, 256, -1, 257, 258, 259};                     // V, pad, unk, cls, sep, mask
}

// The special tokens of a vocabulary by their names; of bytes, the four ids after them
inline SpecialTokens special_tokens(const Tokenizer& t) {
    if (t.vocab_size() == 256) { return special_tokens(BYTE_VOCAB); }
    const SpecialTokens s = {t.vocab_size(), t.id_of("[PAD]"), t.id_of("[UNK]"), t.id_of("[CLS]"), t.id_of("[SEP]"),
                             t.id_of("[MASK]")};
    const std::pair<const char*, int> needed[] = {{"[PAD]", s.pad}, {"[CLS]", s.cls}, {"[SEP]", s.sep},
                                                  {"[MASK]", s.mask}};
    for (const auto& [name, id] : needed) {
        check(id >= 0, "%s: has no token %s, which a masked language model needs", t.path.c_str(), name);
    }
    return s;
}

// ----------------------------------------------------------------------------------------------------------
// the tokenizer of a run: found at the start, kept in memory, written into every checkpoint as transformers reads it:
//
//   the vocabulary's files         as given, under transformers' names; for bytes a tokenizer.json
//   tokenizer_config.json          as given, with the model's padding side and length; written here if there is none
//   generation_config.json         for a GPT-2: the token at which generate() stops

// The token at which --generate and transformers' generate() stop: the tokenizer's end of text or, if it has none,
// GPT-2's; -1: none. tokenizer: may be null
inline int stop_token(int V, const Tokenizer* tokenizer) {
    if (tokenizer != nullptr && tokenizer->eot >= 0) { return tokenizer->eot; }
    return V == 50257 ? 50256 : -1;
}

inline bool is_bytes(const Tokenizer& t) {
    return t.kind == Tokenizer::Kind::Bytes && t.tokens == Tokenizer::bytes().tokens;
}

// An error if the tokenizer has more than the model's V tokens, a notice if it has fewer. what: names the tokenizer
inline void check_fits(const Tokenizer& t, const std::string& what, int V) {
    check(t.vocab_size() <= V, "%s: expected the model's %d tokens, got %d", what.c_str(), V, t.vocab_size());
    if (t.vocab_size() < V) {
        say_once("%s: has %d tokens, and the model has %d rows", what.c_str(), t.vocab_size(), V);
    }
}

// The tokenizer beside the weights of a model with V tokens, or null. If it cannot be read or has more tokens, that is
// an error in a checkpoint of this program; beside other weights it is ignored, with a notice.
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
        say_once("%s; tokens are shown as ids (--tokenizer)", e.what());
        return nullptr;
    }
}

// The tokenizer of a model with V tokens: --tokenizer, or the one beside its weights (`source`, a directory or a file),
// or bytes; null if there is none. A resumed run keeps its checkpoint's. Weights from elsewhere may have more rows.
inline std::unique_ptr<Tokenizer> find_tokenizer(const std::string& flag, const std::string& source, bool resumed,
                                                 int V) {
    const Phase reading("reading the tokenizer");
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
        const bool fits = V != 256 || other == nullptr ||
                          (other->kind == Tokenizer::Kind::Bytes && other->vocab_size() >= V &&
                           std::equal(bytes.begin(), bytes.end(), other->tokens.begin()));
        check(fits, "%s%s: expected the 256 bytes in their order, as the tokens of this model are bytes; leave it out",
              other == t.get() ? "--tokenizer " : "", other->path.c_str());
    }
    if (V == 256) { return std::make_unique<Tokenizer>(Tokenizer::bytes()); }
    if (stored == nullptr) { return t; }
    check(t == nullptr || t->tokens == stored->tokens, "--tokenizer %s: its tokens are not those of %s, with which the "
          "run began; leave it out", t->path.c_str(), stored->path.c_str());
    return stored;
}

// tokenizer.json of a model of bytes. A BERT's puts [CLS] and [SEP] around a text. A GPT-2's only special token is byte
// 0, which no text contains: as itself, because its spelling U+0100 would be found in texts with that character.
inline Json byte_tokenizer_json(bool bert) {
    Json j = parse_json(R"json({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                       {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
            "pair": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                     {"SpecialToken": {"id": "[SEP]", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}},
                     {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
            "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [257], "tokens": ["[CLS]"]},
                               "[SEP]": {"id": "[SEP]", "ids": [258], "tokens": ["[SEP]"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": {}, "merges": []}})json", "tokenizer.json");
    if (!bert) { j["post_processor"] = nullptr; }
    Names tokens;                                               // by id
    for (int b = 0; b < 256; b++) { tokens.push_back(spelled(b)); }
    if (bert) { tokens.insert(tokens.end(), {"[PAD]", "[CLS]", "[SEP]", "[MASK]"}); } else { tokens[0] = {'\0'}; }
    for (int id = 0; id < (int)tokens.size(); id++) {
        const std::string& token = tokens[(size_t)id];
        j["model"]["vocab"][token] = id;
        if (bert ? id < 256 : id > 0) { continue; }
        j["added_tokens"].push_back({{"id", id}, {"content", token}, {"single_word", false}, {"lstrip", false},
                                     {"rstrip", false}, {"normalized", false}, {"special", true}});
    }
    return j;
}

// tokenizer_config.json for a vocabulary that has none
inline Json tokenizer_config(const Tokenizer& t, bool bert) {
    const char* type = t.file("vocab.txt") ? "BertTokenizer" : "GPT2Tokenizer";
    const bool whole = is_bytes(t) || t.file("tokenizer.json") != nullptr;
    Json j = {{"tokenizer_class", whole ? "PreTrainedTokenizerFast" : type}, {"clean_up_tokenization_spaces", false}};
    if (!bert) {
        const int special = is_bytes(t) ? 0 : t.eot;
        const Json end = special >= 0 ? Json(t.tokens[(size_t)special]) : Json();
        for (const char* key : {"bos_token", "eos_token", is_bytes(t) ? "pad_token" : "unk_token"}) { j[key] = end; }
        j["model_input_names"] = {"input_ids", "attention_mask"};
        return j;
    }
    const std::pair<const char*, const char*> names[] = {
        {"pad_token", "[PAD]"}, {"unk_token", "[UNK]"}, {"cls_token", "[CLS]"}, {"sep_token", "[SEP]"},
        {"mask_token", "[MASK]"}};
    for (const auto& [key, token] : names) {
        const bool has = is_bytes(t) ? strcmp(token, "[UNK]") != 0 : t.id_of(token) >= 0;       // bytes need no [UNK]
        if (has) { j[key] = token; }
    }
    return j;
}

// The files of a checkpoint that belong to its vocabulary: name, contents. config: its config.json; tokenizer: or null
inline std::vector<std::pair<std::string, std::string>> vocabulary_files(const Tokenizer* tokenizer,
                                                                         const Json& config) {
    const bool bert = config.contains(BERT_KEYS.C);
    const bool learned = config.contains("position") && config["position"].value("name", "") == "learned";
    std::vector<std::pair<std::string, std::string>> files;
    if (tokenizer != nullptr) {
        const Tokenizer& t = *tokenizer;
        files = t.files;
        if (is_bytes(t)) { files = {{"tokenizer.json", json_text(byte_tokenizer_json(bert), 1) + "\n"}}; }
        const std::string name = "tokenizer_config.json";
        const std::string* given = t.file(name);
        const bool words = bert || t.kind == Tokenizer::Kind::WordPiece;
        Json j = given != nullptr ? parse_json(*given, name) : tokenizer_config(t, words);
        j.erase("model_max_length");
        if (learned) { j["model_max_length"] = config.at(bert ? BERT_KEYS.T : GPT2_KEYS.T); }
        if (!words) { j["padding_side"] = "left"; }     // generate() continues a batch of texts at their common end
        const std::pair<std::string, std::string> file = {name, json_text(j, 2) + "\n"};
        const auto at = std::find_if(files.begin(), files.end(), [&](const auto& f) { return f.first == name; });
        if (at != files.end()) { *at = file; } else { files.push_back(file); }
    }
    const Json end = config.contains("eos_token_id") ? config["eos_token_id"] : Json();
    if (!bert && !end.is_null()) {
        const Json j = {{"bos_token_id", end}, {"eos_token_id", end}};
        files.push_back({"generation_config.json", json_text(j, 2) + "\n"});
    }
    return files;
}
