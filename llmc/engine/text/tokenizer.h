// text/tokenizer.h -- text to token ids and back.
//
// A Tokenizer is a table of the bytes of every id, read from GPT-2's vocab.json and merges.txt (or encoder.json and
// vocab.bpe), BERT's vocab.txt, transformers' tokenizer.json or llm.c's gpt2_tokenizer.bin, or just the 256 bytes.
// Byte-level BPE may cut a character in two, so a token is bytes, not text; Utf8Stream turns a stream of tokens into
// text. Tokens that Hugging Face's files add are found in a text before it is split (settings.h). Without such files a
// special token has no spelling: "<|endoftext|>" in a text is plain text.
#pragma once

#include "settings.h"
#include "subwords.h"
#include "../../base/parse.h"

constexpr int BYTE_VOCAB = 260;         // of BERTs that are trained on bytes: the 256, then [PAD] [CLS] [SEP] [MASK]

struct Tokenizer {
    std::string path = "bytes";         // for messages
    std::vector<std::string> tokens;    // [V] the bytes of each id; WordPiece: as in the file, "##" included
    bool word_piece = false;            // BERT's; false: byte-level BPE, or bytes
    int eot = -1;                       // <|endoftext|>, or BERT's [SEP]; -1: none
    TextSettings settings;              // the added tokens, and how a text is read
    // This tokenizer's files in a checkpoint: names that the libraries read, and contents. None for bytes
    std::vector<std::pair<std::string, std::string>> files;
    std::string cannot_encode;          // why it cannot encode; empty if it can

    // Bounds on files from unknown sources
    static constexpr int MAX_TOKENS = TextSettings::MAX_TOKENS;
    static constexpr uint64_t MAX_FILE = 16u << 20;     // bytes
    static constexpr size_t MAX_TEXT = 1u << 28;        // bytes, in one call of encode()

    // V; ids are 0 to V - 1
    int vocab_size() const { return (int)tokens.size(); }

    // The bytes of one token. first: it starts the text, so WordPiece puts no space before it.
    std::string decode(int id, bool first = false) const {
        check(id >= 0 && id < vocab_size(), "%s: expected a token from 0 to %d, got %d", path.c_str(),
              vocab_size() - 1, id);
        const std::string& s = tokens[(size_t)id];
        if (!word_piece) { return s; }
        if (s.size() > 2 && s.compare(0, 2, "##") == 0) { return s.substr(2); }    // continues the word before
        return first ? s : " " + s;                                                 // begins a word
    }
    // What stands for a token in a text that is shown; ids of a model with more rows than tokens are numbers: <30600>
    std::string shown(int id, bool first = false) const {
        return id < vocab_size() ? decode(id, first) : strprintf("<%d>", id);
    }
    // the bytes of a whole text
    std::string decode(const std::vector<int>& ids) const {
        std::string out;
        for (size_t i = 0; i < ids.size(); i++) { out += decode(ids[i], i == 0); }
        return out;
    }

    // The ids of a text, without special tokens around it. Byte-level vocabularies encode any bytes, and decode() gives
    // them back; WordPiece drops bytes that are not UTF-8.
    std::vector<int> encode(const std::string& text) const {
        check(cannot_encode.empty(), "%s: no text can be encoded: %s", path.c_str(), cannot_encode.c_str());
        check(text.size() <= MAX_TEXT, "%s: expected a text of at most %s, got %s (encode it in pieces)", path.c_str(),
              format_bytes((double)MAX_TEXT).c_str(), format_bytes((double)text.size()).c_str());
        std::vector<int> ids;
        Cache cache;
        const auto push = [&](int id) { ids.push_back(id); };
        whole[0].split(text, [&](const std::string& piece) {
            const std::string normalized = word_piece ? bert_normalized(piece, settings.bert) : piece;
            whole[1].split(normalized, [&](const std::string& rest) { encode_words(rest, cache, ids); }, push);
        }, push);
        return ids;
    }

    // Whether every text has the same ids in both
    bool same(const Tokenizer& o) const { return tokens == o.tokens && settings.json() == o.settings.json(); }

    // the vocabulary of models that are trained on bytes
    static Tokenizer bytes() {
        Tokenizer t;
        for (int i = 0; i < 256; i++) { t.tokens.push_back(std::string(1, (char)i)); }
        t.cannot_encode = t.bpe.find_bytes(t.tokens);
        return t;
    }

    static constexpr const char* NAMES =
        "vocab.json (or encoder.json), vocab.txt, tokenizer.json or gpt2_tokenizer.bin";
    // the files of that kind in a directory
    static std::vector<std::string> files_in(const std::string& directory) {
        std::vector<std::string> found;
        for (const char* name : {"encoder.json", "vocab.json", "vocab.txt", "gpt2_tokenizer.bin", "tokenizer.json"}) {
            if (path_exists(directory + "/" + name)) { found.push_back(directory + "/" + name); }
        }
        return found;
    }

    // path: one of the files, recognized by its ending, or a directory that holds one of them. The files are read here
    // and never again. What lies beside a file with a name of Hugging Face counts as in transformers: the settings, the
    // added tokens, and tokenizer.json, which is read instead and must have the same vocabulary.
    static Tokenizer load(const std::string& path) {
        Tokenizer t;
        refuse_hub_name(path);
        t.path = is_directory(path) ? find_in(path) : path;
        const std::string dir = t.path.substr(0, t.path.rfind('/') + 1), name = t.path.substr(dir.size());
        const bool parts = name == "vocab.json" || name == "encoder.json" || name == "vocab.txt";
        const bool named = parts || name == "tokenizer.json";
        if (!parts || !path_exists(dir + "tokenizer.json")) {
            t.read(named ? Beside(dir) : Beside());
            return t;
        }
        Tokenizer other;
        other.path = t.path;
        other.read(Beside());
        t.path = dir + "tokenizer.json";
        t.read(Beside(dir));
        const auto end = t.tokens.begin() + std::min(other.vocab_size(), t.vocab_size());
        const bool same = std::equal(other.tokens.begin(), other.tokens.end(), t.tokens.begin(), end);
        check(same && (other.bpe.merges.empty() || other.bpe.merges == t.bpe.merges), "%s: expected the vocabulary and "
              "the merges of %s beside it, got others; remove the file that is not the model's", t.path.c_str(),
              other.path.c_str());
        return t;
    }

private:
    Bpe bpe;
    WordPieces pieces;
    WholeTokens whole[2];               // the added tokens: searched for in the text; in the normalized text

    // A cache of the words of a text, which repeat. It lives for one encode(), so that threads can share a Tokenizer.
    struct Cache {
        std::unordered_map<std::string, std::vector<int>> words;

        // Appends the ids of a word; encode_word(out) appends them if the word is new.
        template <class F> void append(std::vector<int>& ids, const std::string& word, F encode_word) {
            if (word.size() > 64) { return encode_word(ids); }      // long words are rarely repeated
            if (words.size() >= 1u << 16) { words.clear(); }        // bounds the memory; frequent words soon return
            const auto found = words.try_emplace(word);             // second: the word is new
            std::vector<int>& parts = found.first->second;
            if (found.second) { encode_word(parts); }
            ids.insert(ids.end(), parts.begin(), parts.end());
        }
    };

    // Appends the ids of a normalized text without added tokens.
    void encode_words(const std::string& text, Cache& cache, std::vector<int>& ids) const {
        if (word_piece) {
            bert_words(text, [&](const std::string& word, int characters) {
                cache.append(ids, word, [&](std::vector<int>& out) { pieces.encode_word(word, characters, out); });
            });
            return;
        }
        const std::string spaced = settings.prefix_space && text[0] != ' ' ? " " + text : text;
        if (bpe.merges.empty()) {           // bytes
            for (const char c : spaced) { ids.push_back(bpe.byte_ids[(unsigned char)c]); }
            return;
        }
        std::string word;
        gpt2_words(spaced, [&](size_t begin, size_t end) {
            word.assign(spaced, begin, end - begin);
            cache.append(ids, word, [&](std::vector<int>& out) { bpe.encode_word(word, out); });
        });
    }

    // the one tokenizer file of a directory; two are an error, because either could be meant. transformers also writes
    // tokenizer.json beside the other files.
    static std::string find_in(const std::string& directory) {
        const std::vector<std::string> found = files_in(directory);
        check(!found.empty(), "%s: expected %s in this directory, got none", directory.c_str(), NAMES);
        check(found.size() == 1 || ends_with(found[1], "/tokenizer.json"), "%s: expected one tokenizer, got %s and %s "
              "(name one of the files)", directory.c_str(), found[0].c_str(), found[1].c_str());
        return found[0];
    }

    // Reads the file at `path`, and what lies beside it.
    void read(const Beside& beside) {
        const bool json = ends_with(path, ".json"), lines = ends_with(path, ".txt");
        check(json || lines || ends_with(path, ".bin"), "%s: expected %s", path.c_str(), NAMES);
        refuse_stand_in(path);
        const std::string text = read_file(path, MAX_FILE);
        if (!json && !lines) { return load_llmc(text); }
        const auto j = json ? parse_json<nlohmann::json>(text, path) : nlohmann::json();
        const bool all = j.is_object() && j.contains("model") && j["model"].is_object();    // tokenizer.json
        const std::string name = all ? "tokenizer.json" : "vocab.json";
        files.push_back({lines ? "vocab.txt" : name, text});
        settings.collect(all ? j : nlohmann::json::object(), path, beside);
        if (lines) { load_word_pieces(text); }
        else if (all) { load_tokenizer_json(j); }
        else { load_encoder(j); }
        settings.read(all ? j : nlohmann::json(), path, beside, word_piece);
        settings.place(tokens, eot, word_piece, beside.ours, path);
        for (const auto& [id, token] : settings.added) {
            const bool bert = token.normalized && word_piece;
            const std::string shape = bert ? bert_normalized(token.content, settings.bert) : token.content;
            if (!shape.empty()) { whole[token.normalized].add({shape, id, token.lstrip, token.rstrip}); }
        }
    }

    // {"token": id, ...}: every id from 0 to V - 1 once. spelled: the tokens are as byte-level BPE spells them
    // (Bpe::unspell), but for added tokens and byte 0, the special token of a model of bytes; otherwise plain text.
    void load_vocabulary(const nlohmann::json& j, bool spelled) {
        const char* name = path.c_str();
        check(j.is_object() && !j.empty() && j.size() <= (size_t)MAX_TOKENS, "%s: expected an object of 1 to %d "
              "tokens, got %s", name, MAX_TOKENS, json_excerpt(j).c_str());
        tokens.assign(j.size(), "");
        std::vector<bool> seen(j.size());           // j.size() different ids below j.size(): every one is there
        for (const auto& item : j.items()) {
            const std::string& key = item.key();
            const int id = (int)json_int(j, key, 0, (int64_t)j.size() - 1, path);
            check(!seen[(size_t)id], "%s: two tokens have the id %d", name, id);
            check(!key.empty(), "%s: token %d is empty", name, id);
            seen[(size_t)id] = true;
            const bool plain = !spelled || settings.adds(id, key) || key == std::string(1, '\0');
            if (plain) { tokens[(size_t)id] = key; continue; }
            check(Bpe::unspell(key, tokens[(size_t)id]), "%s: token %d, \"%s\", is not spelled as byte-level BPE "
                  "spells (another kind of tokenizer?)", name, id, printable(key, 80).c_str());
        }
        const auto end = j.find("<|endoftext|>");
        if (end != j.end()) { eot = end->get<int>(); }
    }

    // vocab.json; the merges are in a second file, without which the vocabulary can still decode
    void load_encoder(const nlohmann::json& j) {
        load_vocabulary(j, true);
        cannot_encode = "merges.txt (or vocab.bpe) is missing beside it";
        for (const char* merges : {"vocab.bpe", "merges.txt"}) {
            const std::string beside = path.substr(0, path.rfind('/') + 1) + merges;
            if (files.size() > 1 || !path_exists(beside)) { continue; }
            refuse_stand_in(beside);
            std::string text = read_file(beside, MAX_FILE);
            load_merges(beside, text);
            // some readers skip the first line, and what follows the last line end
            if (text.compare(0, 9, "#version:") != 0) { text = "#version: 0.2\n" + text; }
            if (text.back() != '\n') { text += '\n'; }
            files.push_back({"merges.txt", text});
        }
    }
    void load_merges(const std::string& from, const std::string& text) {
        cannot_encode = bpe.load(from, text, tokens, [&](int id) { return settings.added.count(id) > 0; });
        if (cannot_encode.empty()) { cannot_encode = bpe.find_bytes(tokens); }
    }

    // transformers' tokenizer.json, of the two kinds that are known here:
    //
    //   {"model": {"type": "BPE" | "WordPiece", "vocab": {"token": id, ...}, "merges": ["l o", ...]},
    //    "added_tokens": [{"id": 50256, "content": "<|endoftext|>", "special": true}, ...], "pre_tokenizer": ..., ...}
    void load_tokenizer_json(const nlohmann::json& j) {
        const nlohmann::json& model = j["model"];
        const std::string type = model.contains("type") ? json_string(model, "type", path) : "";
        check(type == "BPE" || type == "WordPiece", "%s: expected a model of type BPE or WordPiece, got \"%s\"",
              path.c_str(), printable(type).c_str());
        const nlohmann::json& vocab = json_at(model, "vocab", path);
        if (type == "BPE") {
            check_settings(j, path, {{"normalizer", nullptr}, {"pre_tokenizer.type", "ByteLevel"},
                                     {"pre_tokenizer.use_regex", true}, {"model.dropout", nullptr},
                                     {"model.ignore_merges", false}, {"model.continuing_subword_prefix", ""},
                                     {"model.end_of_word_suffix", ""}});
            const bool bert = vocab.size() == BYTE_VOCAB && vocab.contains("[MASK]");       // of bytes
            check_around(j, bert ? "[CLS] A [SEP]" : "A", path);
            load_vocabulary(vocab, true);
            std::string text;
            for (const auto& m : json_at(model, "merges", path)) {      // "l o", or ["l", "o"]
                const bool pair = m.is_array() && m.size() == 2 && m[0].is_string() && m[1].is_string();
                check(pair || m.is_string(), "%s: merges: expected two tokens, got %s", path.c_str(),
                      json_excerpt(m).c_str());
                const std::string joined = pair ? m[0].get<std::string>() + " " + m[1].get<std::string>() : "";
                text += (pair ? joined : m.get<std::string>()) + "\n";
            }
            load_merges(path + ": merges", text);
        } else {
            check_settings(j, path, {{"normalizer.type", "BertNormalizer"}, {"normalizer.clean_text", true},
                                     {"pre_tokenizer.type", "BertPreTokenizer"},
                                     {"model.continuing_subword_prefix", "##"}, {"model.unk_token", "[UNK]"},
                                     {"model.max_input_chars_per_word", WordPieces::MAX_WORD}});
            check_around(j, "[CLS] A [SEP]", path);
            load_vocabulary(vocab, false);
            std::string text;
            for (const std::string& token : tokens) { text += token + "\n"; }
            const std::vector<std::string> listed = std::exchange(tokens, {});
            load_word_pieces(text);
            check(tokens == listed, "%s: a token has a line end in it", path.c_str());
        }
    }

    // one token per line; its id is the line number, from 0 on
    void load_word_pieces(const std::string& text) {
        const char* name = path.c_str();
        for (size_t begin = 0; begin < text.size();) {
            const size_t end = std::min(text.find('\n', begin), text.size());
            const size_t length = end - begin - (end > begin && text[end - 1] == '\r');     // without CR
            check(length > 0, "%s: line %zu is empty (not a vocabulary, one token per line?)", name, tokens.size() + 1);
            check(length <= 1024, "%s: line %zu: expected a token of at most 1024 bytes, got %zu", name,
                  tokens.size() + 1, length);
            check(vocab_size() < MAX_TOKENS, "%s: expected at most %d lines, got more", name, MAX_TOKENS);
            tokens.push_back(text.substr(begin, length));
            const int id = vocab_size() - 1;
            for (size_t at = 0; at < length;) {
                check(utf8_next(tokens.back(), at) != NO_CHARACTER, "%s: line %d is not UTF-8 at its byte %zu", name,
                      id + 1, at);
            }
            pieces.add(tokens.back(), id);
            if (tokens.back() == "[SEP]") { eot = id; }
            begin = end + 1;
        }
        check(pieces.unknown >= 0, "%s: has no line [UNK], so it is not a WordPiece vocabulary", name);
        word_piece = true;
    }

    // llm.c's gpt2_tokenizer.bin:
    //
    //   byte 0     int32  magic: 20240328
    //   byte 4     int32  version: 1 or 2
    //   byte 8     int32  V, the number of tokens
    //   byte 12    int32  end-of-text id, from version 2 on
    //   byte 1024  of each token: uint8 length, then its bytes
    void load_llmc(const std::string& data) {
        const char* name = path.c_str();
        check(data.size() >= 1024, "%s: expected a header of 1024 bytes, got %zu bytes", name, data.size());
        int32_t header[4];
        memcpy(header, data.data(), sizeof header);
        check(header[0] == 20240328, "%s: expected magic number 20240328 (llm.c's gpt2_tokenizer.bin), got %d",
              name, header[0]);
        check(header[1] == 1 || header[1] == 2, "%s: expected version 1 or 2, got %d", name, header[1]);
        const int V = header[2];
        const int most = (int)std::min((data.size() - 1024) / 2, (size_t)MAX_TOKENS);   // each takes at least 2 bytes
        check(V >= 1 && V <= most, "%s: header: expected 1 to %d tokens, which its %zu bytes could hold, got %d",
              name, most, data.size(), V);
        if (header[1] == 2) {
            eot = header[3];
            check(eot >= 0 && eot < V, "%s: header: expected an end-of-text id from 0 to %d, got %d", name, V - 1, eot);
        } else if (V == 50257) {                    // GPT-2's, which predates this field of the header
            eot = 50256;
        }
        size_t at = 1024;
        for (int id = 0; id < V; id++) {
            check(at < data.size(), "%s: the file ends before token %d of %d (is it truncated?)", name, id, V);
            const size_t length = (unsigned char)data[at++];        // at most 255, by the format
            check(length > 0, "%s: token %d is empty", name, id);
            check(length <= data.size() - at, "%s: the file ends inside token %d of %d (is it truncated?)", name, id,
                  V);
            tokens.push_back(data.substr(at, length));
            at += length;
        }
        check(at == data.size(), "%s: expected %zu bytes, where its %d tokens end, got %zu", name, at, V, data.size());
        cannot_encode = bpe.find_bytes(tokens);     // the file has no merges: they follow from the tokens
        if (cannot_encode.empty()) { cannot_encode = bpe.recover(tokens, eot); }
        // by the names that the libraries read, unless those formats cannot express it
        if (!cannot_encode.empty() || (eot >= 0 && tokens[(size_t)eot] != "<|endoftext|>")) {
            files.push_back({"gpt2_tokenizer.bin", data});
            return;
        }
        nlohmann::json vocab;
        for (int id = 0; id < V; id++) { vocab[Bpe::spell(tokens[(size_t)id])] = id; }
        files.push_back({"vocab.json", json_text(vocab)});
        files.push_back({"merges.txt", bpe.text(tokens)});
    }
};

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
    // those that there are, ascending
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
          "got %d (give the vocab.txt of any other by --tokenizer)", BERT_VOCAB, BYTE_VOCAB, vocab);
    return {vocab, 256, -1, 257, 258, 259};                     // V, pad, unk, cls, sep, mask
}

// By their names in vocab.txt; of two equal lines the last counts, as in the tokenizer. Bytes get four more ids.
inline SpecialTokens special_tokens(const Tokenizer& tokenizer) {
    if (!tokenizer.word_piece && tokenizer.vocab_size() == 256) { return special_tokens(BYTE_VOCAB); }
    check(tokenizer.word_piece, "%s: expected BERT's vocab.txt, or bytes, for a masked language model, got byte-pair "
          "encoding, which has no [MASK]", tokenizer.path.c_str());
    SpecialTokens s;
    s.V = tokenizer.vocab_size();
    const struct { const char* name; int* id; } table[] = {
        {"[PAD]", &s.pad}, {"[UNK]", &s.unk}, {"[CLS]", &s.cls}, {"[SEP]", &s.sep}, {"[MASK]", &s.mask}};
    for (const auto& row : table) {
        for (int id = 0; id < s.V; id++) { if (tokenizer.tokens[(size_t)id] == row.name) { *row.id = id; } }
        check(*row.id >= 0, "%s: has no line %s, which a masked language model needs", tokenizer.path.c_str(),
              row.name);
    }
    return s;
}
