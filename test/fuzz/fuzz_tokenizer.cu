// What must hold for any bytes, as a stream of tokens or as the files of a tokenizer. The tests feed it seeded inputs;
// libFuzzer (make fuzz) searches for more through fuzz_files.cu, which has the other parsers.
#include "llmc/engine/vocabulary.h"

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

// Inputs that are accepted: bytes, and the files of each kind of tokenizer
std::vector<std::string> tokenizer_seeds() {
    return {"\x03The cat's 3 hats: na\xC3\xAFve \xE2\x82\xAC \xF0\x9F\x98\x80 \xED\x95\x9C \xE4\xBD\xA0",
            std::string(1, '\0') + "{\"a\": 0, \"b\": 1, \"ab\": 2, \"\xC4\xA0\xC5\x83\": 3, \"<|endoftext|>\": 4}\x01"
                   "{\"eos_token\": \"ab\"}",
            "\x01[PAD]\n[UNK]\n[SEP]\nthe\n##s\n\xC3\xA9\ncaf\xC3\xA9\n1\n##0\n",
            "\x02{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2}, \"merges\": [\"a b\"]}, "
            "\"decoder\": {\"type\": \"ByteLevel\"}, "
            "\"added_tokens\": [{\"id\": 3, \"content\": \"<|endoftext|>\", \"special\": true}]}",
            "\x02{\"model\": {\"type\": \"Unigram\", \"vocab\": [[\"a\", 0], [\"b\", -1.5]]}}"};
}

void must(bool good, const char* what) {
    if (!good) { die(99, "%s", what); }
}

bool is_utf8(const std::string& s) {
    for (size_t at = 0; at < s.size();) {
        const size_t length = (size_t)utf8_length((unsigned char)s[at]);
        if (length == 0 || length > s.size() - at || utf8_missing(&s[at], length) != 0) { return false; }
        at += length;
    }
    return true;
}

void fuzz_stream(const std::string& bytes) {
    Utf8Stream utf8;
    std::string streamed;
    for (const char c : bytes) { streamed += utf8.push(std::string(1, c)); }
    streamed += utf8.flush();
    must(is_utf8(streamed) && (!is_utf8(bytes) || streamed == bytes), "a stream of tokens is UTF-8");
}

// A tokenizer loads or is refused.
void fuzz_files(int kind, const std::string& bytes) {
    const FuzzDirectory& directory = fuzz_directory();
    directory.clear();
    const size_t cut = bytes.find('\x01');              // separates two files
    const char* names[] = {"encoder.json", "vocab.txt", "tokenizer.json"};
    directory.write(names[kind], bytes.substr(0, cut));
    if (cut != std::string::npos) { directory.write("tokenizer_config.json", bytes.substr(cut + 1)); }
    try {
        const Tokenizer t = Tokenizer::load(directory.path);
        for (int id = 0; id < t.vocab_size(); id++) { must(!t.shown(id).empty(), "each id is shown"); }
        must(t.eot >= -1 && t.eot < t.vocab_size(), "the end of a text is a token");
        directory.clear();                              // what a checkpoint holds is the same tokenizer
        for (const auto& file : t.files) { directory.write(file.first, file.second); }
        const Tokenizer again = Tokenizer::load(directory.path);
        must(again.tokens == t.tokens && again.eot == t.eot, "a checkpoint's tokenizer has the same tokens");
    } catch (const Error& e) {
        must(e.code == EXIT_BAD_INPUT, e.what());
    }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) { return 0; }
    const std::string rest((const char*)data + 1, size - 1);
    if (data[0] < 3) { fuzz_files(data[0], rest); } else { fuzz_stream(rest); }
    return 0;
}
