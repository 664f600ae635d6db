// text/tokenizer.h -- text to token ids and back.
//
// A Tokenizer is a table of the bytes of every id, read from GPT-2's encoder.json (and vocab.bpe), BERT's vocab.txt or
// llm.c's gpt2_tokenizer.bin, or just the 256 bytes. Byte-level BPE cuts characters anywhere, so one token is bytes and not
// text: Utf8Stream makes text of a stream of them. Special tokens have no spelling: "<|endoftext|>" in a text is plain text.
#ifndef LLMC_TEXT_TOKENIZER_H
#define LLMC_TEXT_TOKENIZER_H

#include "bpe.h"
#include "../base/json.h"

struct Tokenizer {
    std::string path = "bytes";         // for messages
    std::vector<std::string> tokens;    // [V] the bytes of an id; WordPiece: as in the file, "##" included
    bool word_piece = false;
    int eot = -1;                       // <|endoftext|>, BERT's [SEP]; -1: none
    std::vector<std::string> files;     // what a checkpoint has to copy to hold this tokenizer
    std::string cannot_encode;          // why; empty: it can

    static constexpr int MAX_TOKENS = 1 << 20;
    static constexpr uint64_t MAX_FILE = 16u << 20;
    static constexpr size_t MAX_TEXT = 1u << 28;

    int vocab_size() const { return (int)tokens.size(); }

    // The bytes of one token. first: it starts the text, so that WordPiece puts no space before it.
    std::string decode(int id, bool first = false) const {
        check(id >= 0 && id < vocab_size(), "%s: there is no token %d, ids are 0 to %d", path.c_str(), id,
              vocab_size() - 1);
        const std::string& s = tokens[(size_t)id];
        if (!word_piece) { return s; }
        if (s.size() > 2 && s.compare(0, 2, "##") == 0) { return s.substr(2); }
        return first ? s : " " + s;
    }
    std::string decode(const std::vector<int>& ids) const {
        std::string out;
        for (size_t i = 0; i < ids.size(); i++) { out += decode(ids[i], i == 0); }
        return out;
    }

    // The ids of a text, without any special ones around it. Byte-level vocabularies take any bytes, and decode() returns
    // them; WordPiece does not see bytes that are no UTF-8.
    std::vector<int> encode(const std::string& text) const {
        check(cannot_encode.empty(), "%s: no text can be encoded: %s", path.c_str(), cannot_encode.c_str());
        check(text.size() <= MAX_TEXT, "%s: a text of %s, %s can be encoded at once", path.c_str(),
              format_bytes((double)text.size()).c_str(), format_bytes((double)MAX_TEXT).c_str());
        std::vector<int> ids;
        Cache cache;
        if (word_piece) {
            bert_words(text, [&](const std::string& word, int characters) {
                cache.append(ids, word, [&](std::vector<int>& out) { encode_word_pieces(word, characters, out); });
            });
        } else if (bpe.merges.empty()) {
            for (const char c : text) { ids.push_back(bpe.byte_ids[(unsigned char)c]); }
        } else {
            std::string word;
            gpt2_words(text, [&](size_t begin, size_t end) {
                word.assign(text, begin, end - begin);
                cache.append(ids, word, [&](std::vector<int>& out) { bpe.encode_word(word, out); });
            });
        }
        return ids;
    }

    // the vocabulary of models that are trained on bytes
    static Tokenizer bytes() {
        Tokenizer t;
        for (int i = 0; i < 256; i++) { t.tokens.push_back(std::string(1, (char)i)); }
        t.cannot_encode = t.bpe.find_bytes(t.tokens);
        return t;
    }

    // path: one of the files, told apart by their endings, or a directory that holds one of them
    static Tokenizer load(const std::string& path) {
        Tokenizer t;
        t.path = is_directory(path) ? find_in(path) : path;
        t.files.push_back(t.path);
        if (ends_with(t.path, ".json")) {
            t.load_encoder();
        } else if (ends_with(t.path, ".txt")) {
            t.load_word_pieces();
        } else if (ends_with(t.path, ".bin")) {
            t.load_llmc();
        } else {
            die(EXIT_BAD_INPUT, "%s: encoder.json, vocab.txt or gpt2_tokenizer.bin wanted", t.path.c_str());
        }
        return t;
    }

private:
    Bpe bpe;
    std::unordered_map<std::string, int> pieces;    // WordPiece: the id of a line
    size_t longest_piece = 0;                       // bytes
    int unknown = -1;                               // [UNK]

    static constexpr int MAX_WORD = 100;            // characters; a longer word is [UNK]

    // What the words of a text came to, as it has few different ones. It lives for one encode(): a Tokenizer can be shared.
    struct Cache {
        std::unordered_map<std::string, std::vector<int>> words;

        template <class F> void append(std::vector<int>& ids, const std::string& word, F encode_word) {
            if (word.size() > 64) { return encode_word(ids); }
            if (words.size() >= 1u << 16) { words.clear(); }        // bounds the memory; a word comes again soon or not at all
            const auto found = words.try_emplace(word);
            std::vector<int>& parts = found.first->second;
            if (found.second) { encode_word(parts); }
            ids.insert(ids.end(), parts.begin(), parts.end());
        }
    };

    // Appends the pieces of a word: the longest that it begins with, the longest "##" one that the rest begins with, and so on.
    void encode_word_pieces(const std::string& word, int characters, std::vector<int>& ids) const {
        const size_t first = ids.size();
        std::string piece;
        for (size_t begin = 0; begin < word.size();) {
            const size_t prefix = begin > 0 ? 2 : 0;
            size_t end = characters > MAX_WORD ? begin : std::min(word.size(), begin + longest_piece);
            auto found = pieces.end();
            for (; end > begin; end--) {            // of an end inside a character there is no piece: the file is UTF-8
                piece.assign("##", prefix).append(word, begin, end - begin);
                found = pieces.find(piece);
                if (found != pieces.end()) { break; }
            }
            if (found == pieces.end()) { ids.resize(first); ids.push_back(unknown); return; }
            ids.push_back(found->second);
            begin = end;
        }
    }

    static bool ends_with(const std::string& s, const std::string& end) {
        return s.size() >= end.size() && s.compare(s.size() - end.size(), end.size(), end) == 0;
    }

    static std::string find_in(const std::string& directory) {
        std::string found;
        for (const char* name : {"encoder.json", "vocab.json", "vocab.txt", "gpt2_tokenizer.bin"}) {
            const std::string path = directory + "/" + name;
            if (!path_exists(path)) { continue; }
            check(found.empty(), "%s: holds two tokenizers, %s and %s; name the file that is meant", directory.c_str(),
                  found.c_str(), path.c_str());
            found = path;
        }
        check(!found.empty(), "%s: no tokenizer in this directory (encoder.json, vocab.txt or gpt2_tokenizer.bin "
              "wanted)", directory.c_str());
        return found;
    }

    // {"token": id, ...}: every id from 0 to V - 1 once, tokens spelled as byte-level BPE spells
    void load_encoder() {
        const char* name = path.c_str();
        const auto j = parse_json<nlohmann::json>(read_file(path, MAX_FILE), path);
        check(j.is_object() && !j.empty() && j.size() <= (size_t)MAX_TOKENS, "%s: an object of 1 to %d tokens wanted",
              name, MAX_TOKENS);
        tokens.resize(j.size());
        std::vector<bool> seen(j.size());
        for (const auto& item : j.items()) {
            const std::string& key = item.key();
            const int id = (int)json_int(j, key, 0, (int64_t)j.size() - 1, path);
            check(!seen[(size_t)id], "%s: two tokens have the id %d", name, id);
            check(!key.empty(), "%s: token %d is empty", name, id);
            seen[(size_t)id] = true;
            check(Bpe::unspell(key, tokens[(size_t)id]), "%s: token %d, \"%.80s\", is not spelled as byte-level BPE spells "
                  "(another kind of tokenizer?)", name, id, key.c_str());
        }
        const auto end = j.find("<|endoftext|>");
        if (end != j.end()) { eot = end->get<int>(); }
        cannot_encode = "vocab.bpe (or merges.txt) is not beside it";
        for (const char* merges : {"vocab.bpe", "merges.txt"}) {
            const std::string beside = path.substr(0, path.rfind('/') + 1) + merges;
            if (files.size() > 1 || !path_exists(beside)) { continue; }
            cannot_encode = bpe.load(beside, read_file(beside, MAX_FILE), tokens);
            if (cannot_encode.empty()) { cannot_encode = bpe.find_bytes(tokens); }
            files.push_back(beside);
        }
    }

    // one token a line, the line number is the id
    void load_word_pieces() {
        const char* name = path.c_str();
        const std::string text = read_file(path, MAX_FILE);
        for (size_t begin = 0; begin < text.size();) {
            const size_t end = std::min(text.find('\n', begin), text.size());
            const size_t length = end - begin - (end > begin && text[end - 1] == '\r');
            check(length > 0, "%s: line %zu is empty", name, tokens.size() + 1);
            check(length <= 1024, "%s: line %zu is %zu bytes long, no token is", name, tokens.size() + 1, length);
            check(vocab_size() < MAX_TOKENS, "%s: more than %d lines", name, MAX_TOKENS);
            tokens.push_back(text.substr(begin, length));
            const int id = vocab_size() - 1;
            for (size_t at = 0; at < length;) {
                check(utf8_next(tokens.back(), at) != NO_CHARACTER, "%s: line %d is no UTF-8 at its byte %zu", name, id + 1, at);
            }
            pieces[tokens.back()] = id;             // of a line that is there twice the last counts, as elsewhere
            longest_piece = std::max(longest_piece, length);
            if (tokens.back() == "[UNK]") { unknown = id; }
            if (tokens.back() == "[SEP]") { eot = id; }
            begin = end + 1;
        }
        check(unknown >= 0, "%s: has no line [UNK], so it is no WordPiece vocabulary", name);
        word_piece = true;
    }

    // 256 int32 (20240328, version, V, end-of-text id from version 2 on), then of each token its length, a byte, and
    // its bytes
    void load_llmc() {
        const char* name = path.c_str();
        const std::string data = read_file(path, MAX_FILE);
        check(data.size() >= 1024, "%s: %zu bytes, but its header has 1024", name, data.size());
        int32_t header[4];
        memcpy(header, data.data(), sizeof header);
        check(header[0] == 20240328, "%s: magic number %d, wanted 20240328 (llm.c's gpt2_tokenizer.bin)", name,
              header[0]);
        check(header[1] == 1 || header[1] == 2, "%s: version %d, wanted 1 or 2", name, header[1]);
        const int V = header[2], most = (int)std::min((data.size() - 1024) / 2, (size_t)MAX_TOKENS);
        check(V >= 1 && V <= most, "%s: the header says %d tokens, wanted 1 to %d, which its %zu bytes could hold",
              name, V, most, data.size());
        eot = header[1] == 2 ? header[3] : V == 50257 ? 50256 : -1;
        check(header[1] == 1 || (eot >= 0 && eot < V), "%s: the header says end-of-text id %d, wanted 0 to %d", name,
              eot, V - 1);
        size_t at = 1024;
        for (int id = 0; id < V; id++) {
            check(at < data.size(), "%s: ends before token %d of %d (truncated?)", name, id, V);
            const size_t length = (unsigned char)data[at++];
            check(length > 0, "%s: token %d is empty", name, id);
            check(length <= data.size() - at, "%s: ends inside token %d of %d (truncated?)", name, id, V);
            tokens.push_back(data.substr(at, length));
            at += length;
        }
        check(at == data.size(), "%s: %zu bytes, but its %d tokens end at byte %zu", name, data.size(), V, at);
        cannot_encode = bpe.find_bytes(tokens);
        if (cannot_encode.empty()) { cannot_encode = bpe.recover(tokens, eot); }
    }
};

#endif
