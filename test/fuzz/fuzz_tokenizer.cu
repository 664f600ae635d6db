// What must hold for any bytes, as text or as the files of a tokenizer. The tests feed it seeded inputs; libFuzzer
// (make fuzz) searches for more through fuzz_files.cu, which has the other parsers.
#include "llmc/engine/text/tokenizer.h"

namespace {

// A directory for the files of one input after the other; removed at the end.
struct FuzzDirectory {
    std::string path;
    FuzzDirectory() {
        const char* base = getenv("TMPDIR");
        path = std::string(base != nullptr ? base : "/tmp") + "/fuzz_XXXXXX";
        check(mkdtemp(&path[0]) != nullptr, "cannot make %s", path.c_str());
    }
    ~FuzzDirectory() { remove(path); }
    static void remove(const std::string& path) {
        struct stat st;
        if (lstat(path.c_str(), &st) != 0 || !S_ISDIR(st.st_mode)) { ::unlink(path.c_str()); return; }
        for (const std::string& name : list_directory(path)) { remove(path + "/" + name); }
        ::rmdir(path.c_str());
    }
    void clear() const {
        for (const std::string& name : list_directory(path)) { remove(path + "/" + name); }
    }
    void write(const std::string& name, const std::string& bytes) const {
        const int fd = io_create(path + "/" + name);
        io_write(fd, bytes.data(), bytes.size(), name);
        io_close(fd, name);
    }
};

const FuzzDirectory& fuzz_directory() {
    static const FuzzDirectory directory;
    return directory;
}

// gpt2_tokenizer.bin with the 256 bytes and these tokens; each is a merge of two tokens before it
std::string fuzz_vocabulary() {
    std::string s(1024, '\0');
    std::vector<std::string> tokens;
    for (int b = 0; b < 256; b++) { tokens.push_back(std::string(1, (char)b)); }
    for (const char* t : {" a", "aa", "th", "the", " the", "he", "in", "ing", "\xC3\xA9", "\xE2\x82", "\xE2\x82\xAC",
                          "  ", "    ",
                          "\n\n", "'s", "10", "100", "!!", "\xFF\xFE", "aaaa"}) { tokens.push_back(t); }
    const int32_t header[] = {20240328, 1, (int32_t)tokens.size()};
    memcpy(&s[0], header, sizeof header);
    for (const std::string& t : tokens) { s += (char)t.size() + t; }
    return s;
}

// Inputs that are accepted: text, and the files of each kind of tokenizer
std::vector<std::string> tokenizer_seeds() {
    return {"\x03The cat's 3 hats:\n\n  na\xC3\xAFve \xE2\x82\xAC \xF0\x9F\x98\x80 \xED\x95\x9C \xE4\xBD\xA0 "
            "the thing in \xC3\x89!!  100 aaaaaaa",
            std::string(1, '\0') + "{\"a\": 0, \"b\": 1, \"ab\": 2, \"\xC4\xA0\xC5\x83\": 3, \"<|endoftext|>\": 4}\x01"
                   "#version: 0.2\na b\n",
            "\x01[PAD]\n[UNK]\n[SEP]\nthe\n##s\n\xC3\xA9\ncaf\xC3\xA9\n1\n##0\n", "\x02" + fuzz_vocabulary(),
            "\x04{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2}, \"merges\": [\"a b\"]}, "
            "\"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false}, "
            "\"added_tokens\": [{\"id\": 3, \"content\": \"<|endoftext|>\", \"special\": true}]}"};
}

void must(bool good, const char* what) {
    if (!good) { die(99, "%s", what); }
}

bool is_utf8(const std::string& s) {
    for (size_t at = 0; at < s.size();) {
        if (utf8_next(s, at) == NO_CHARACTER) { return false; }
    }
    return true;
}

void fuzz_text(const std::string& text) {
    static const Tokenizer bpe = [] {
        fuzz_directory().clear();
        fuzz_directory().write("gpt2_tokenizer.bin", fuzz_vocabulary());
        return Tokenizer::load(fuzz_directory().path);
    }();
    must(bpe.cannot_encode.empty(), bpe.cannot_encode.c_str());
    const std::vector<int> ids = bpe.encode(text);
    must(bpe.decode(ids) == text, "what was encoded comes back");
    must(ids.size() <= text.size(), "no more tokens than bytes");
    size_t expected = 0;
    gpt2_words(text, [&](size_t begin, size_t end) {
        must(begin == expected && end > begin, "each word begins where the one before ended");
        expected = end;
    });
    must(expected == text.size(), "the words cover the text");
    Utf8Stream utf8;
    std::string streamed;
    for (const int id : ids) { streamed += utf8.push(bpe.decode(id)); }
    streamed += utf8.flush();
    must(is_utf8(streamed) && (!is_utf8(text) || streamed == text), "a stream of tokens is UTF-8");
    bert_words(bert_normalized(text), [](const std::string& word, int characters) {
        int counted = 0;
        for (size_t at = 0; at < word.size(); counted++) {
            must(utf8_next(word, at) != NO_CHARACTER, "words are UTF-8");
        }
        must(counted == characters && characters > 0, "words are counted in characters");
        std::string again;
        bert_words(bert_normalized(word), [&](const std::string& w, int) { again += w; });
        must(again == word, "a folded word stays as it is");
    });
}

// A tokenizer loads or is refused, and if it can encode, it gives the text back.
void fuzz_files(int kind, const std::string& bytes) {
    const FuzzDirectory& directory = fuzz_directory();
    directory.clear();
    const size_t cut = bytes.find('\x01');              // separates two files
    const char* names[] = {"encoder.json", "vocab.txt", "gpt2_tokenizer.bin", "tokenizer.json"};
    directory.write(names[kind], bytes.substr(0, cut));
    if (kind == 0 && cut != std::string::npos) { directory.write("vocab.bpe", bytes.substr(cut + 1)); }
    try {
        const Tokenizer t = Tokenizer::load(directory.path);
        for (int id = 0; id < t.vocab_size(); id++) { t.decode(id); }
        directory.clear();                              // what a checkpoint holds is the same tokenizer
        for (const auto& file : t.files) { directory.write(file.first, file.second); }
        const Tokenizer again = Tokenizer::load(directory.path);
        must(again.tokens == t.tokens && again.eot == t.eot, "a checkpoint's tokenizer has the same tokens");
        must(again.cannot_encode.empty() == t.cannot_encode.empty(), "and encodes what it encodes");
        if (!t.cannot_encode.empty()) { return; }
        const std::string text = "The caf\xC3\xA9's 100 \xF0\x9F\x98\x80\xFF aaaa  \n";
        const std::vector<int> ids = t.encode(text);
        for (const int id : ids) { must(id >= 0 && id < t.vocab_size(), "ids are in the vocabulary"); }
        const bool strips = std::any_of(t.settings.added.begin(), t.settings.added.end(), [](const auto& token) {
            return token.second.lstrip || token.second.rstrip;
        });
        const bool exact = !t.word_piece && !t.settings.prefix_space && !strips;
        must(!exact || t.decode(ids) == text, "what was encoded comes back");
        must(again.encode(text) == ids, "and gives the same ids");
    } catch (const Error& e) {
        must(e.code == EXIT_BAD_INPUT, e.what());
    }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) { return 0; }
    const std::string rest((const char*)data + 1, size - 1);
    if (data[0] < 3 || data[0] == 4) { fuzz_files(std::min<int>(data[0], 3), rest); }
    else { fuzz_text(rest); }
    return 0;
}
