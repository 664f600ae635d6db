// tokenizer.h -- from token ids back to text.
//
// A Tokenizer is a table of the bytes of every id, read from GPT-2's encoder.json, BERT's vocab.txt or llm.c's
// gpt2_tokenizer.bin, or just the 256 bytes. Byte-level BPE cuts characters anywhere, so one token is bytes and not
// text: Utf8Stream makes text of a stream of them.
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include "common.h"
#include "json.h"

// Bytes in, UTF-8 out: an unfinished character at the end waits for its rest; whatever is no UTF-8 becomes U+FFFD, one
// for each longest piece that could have started a character (the Unicode Standard, 3.9, and what other decoders do).
struct Utf8Stream {
    std::string waiting;    // the start of a character, at most 3 bytes

    std::string push(const std::string& bytes) {
        std::string out;
        for (const char c : bytes) {
            waiting += c;
            if (missing(waiting) < 0 && waiting.size() > 1) {   // c does not go on with the character before it
                out += REPLACEMENT;
                waiting.assign(1, c);
            }
            const int more = missing(waiting);
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
    static constexpr const char* REPLACEMENT = "\xEF\xBF\xBD";

    // How many bytes s, not empty, lacks to be one character; -1: nothing makes it one. The second byte's bounds keep
    // out surrogates, what is beyond U+10FFFF, and characters written longer than they need to be.
    static int missing(const std::string& s) {
        const unsigned char a = (unsigned char)s[0];
        const int length = a < 0x80 ? 1 : a < 0xC2 ? 0 : a < 0xE0 ? 2 : a < 0xF0 ? 3 : a < 0xF5 ? 4 : 0;
        if (length < (int)s.size()) { return -1; }
        for (size_t i = 1; i < s.size(); i++) {
            const unsigned char c = (unsigned char)s[i];
            const int lo = i > 1 ? 0x80 : a == 0xE0 ? 0xA0 : a == 0xF0 ? 0x90 : 0x80;
            const int hi = i > 1 ? 0xBF : a == 0xED ? 0x9F : a == 0xF4 ? 0x8F : 0xBF;
            if (c < lo || c > hi) { return -1; }
        }
        return length - (int)s.size();
    }
};

struct Tokenizer {
    std::string path = "bytes";         // for messages
    std::vector<std::string> tokens;    // [V] the bytes of an id; WordPiece: as in the file, "##" included
    bool word_piece = false;
    int eot = -1;                       // <|endoftext|>, BERT's [SEP]; -1: none
    std::vector<std::string> files;     // what a checkpoint has to copy to hold this tokenizer

    static constexpr int MAX_TOKENS = 1 << 20;
    static constexpr uint64_t MAX_FILE = 16u << 20;

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

    // the vocabulary of models that are trained on bytes
    static Tokenizer bytes() {
        Tokenizer t;
        for (int i = 0; i < 256; i++) { t.tokens.push_back(std::string(1, (char)i)); }
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

    // Code point -> byte of byte-level BPE (-1: none). GPT-2 writes the bytes that print as themselves and the other
    // 68, in order, as U+0100 and up, so that its vocabulary is text without spaces or control characters.
    static std::vector<int> byte_of_code_point() {
        std::vector<int> byte(0x144, -1);
        int next = 0x100;
        for (int b = 0; b < 256; b++) {
            const bool prints = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
            byte[(size_t)(prints ? b : next++)] = b;
        }
        return byte;
    }

    // {"token": id, ...}: every id from 0 to V - 1 once, tokens spelled in the letters of byte_of_code_point()
    void load_encoder() {
        const char* name = path.c_str();
        const auto j = parse_json<nlohmann::json>(read_file(path, MAX_FILE), path);
        check(j.is_object() && !j.empty() && j.size() <= (size_t)MAX_TOKENS, "%s: an object of 1 to %d tokens wanted",
              name, MAX_TOKENS);
        const std::vector<int> byte = byte_of_code_point();
        tokens.resize(j.size());
        std::vector<bool> seen(j.size());
        for (const auto& item : j.items()) {
            const std::string& key = item.key();
            const int id = (int)json_int(j, key, 0, (int64_t)j.size() - 1, path);
            check(!seen[(size_t)id], "%s: two tokens have the id %d", name, id);
            check(!key.empty(), "%s: token %d is empty", name, id);
            seen[(size_t)id] = true;
            for (size_t i = 0; i < key.size(); i++) {
                const int lead = (unsigned char)key[i];         // the parser has seen to it that this is UTF-8
                const int c = lead < 0x80 ? lead : lead < 0xE0 ? (lead & 0x1F) << 6 | (key[++i] & 0x3F) : INT32_MAX;
                check(c < (int)byte.size() && byte[(size_t)c] >= 0, "%s: token %d, \"%.80s\", is not spelled as "
                      "byte-level BPE spells (another kind of tokenizer?)", name, id, key.c_str());
                tokens[(size_t)id] += (char)byte[(size_t)c];
            }
        }
        const auto end = j.find("<|endoftext|>");
        if (end != j.end()) { eot = end->get<int>(); }
        const std::string merges = path.substr(0, path.rfind('/') + 1) + "vocab.bpe";
        if (path_exists(merges)) { files.push_back(merges); }   // what encoding will need beside it
    }

    // one token a line, the line number is the id
    void load_word_pieces() {
        const char* name = path.c_str();
        const std::string text = read_file(path, MAX_FILE);
        bool unknown = false;
        for (size_t begin = 0; begin < text.size();) {
            const size_t end = std::min(text.find('\n', begin), text.size());
            const size_t length = end - begin - (end > begin && text[end - 1] == '\r');
            check(length > 0, "%s: line %zu is empty", name, tokens.size() + 1);
            check(length <= 1024, "%s: line %zu is %zu bytes long, no token is", name, tokens.size() + 1, length);
            check(vocab_size() < MAX_TOKENS, "%s: more than %d lines", name, MAX_TOKENS);
            tokens.push_back(text.substr(begin, length));
            unknown = unknown || tokens.back() == "[UNK]";
            if (tokens.back() == "[SEP]") { eot = vocab_size() - 1; }
            begin = end + 1;
        }
        check(unknown, "%s: has no line [UNK], so it is no WordPiece vocabulary", name);
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
    }
};

#endif
