// Ids become text: UTF-8 from pieces, every kind of vocabulary and its files in a checkpoint; bad files are refused.
#include "llmc/base/math.h"
#include "test/fuzz/fuzz_tokenizer.cu"
#include "test/catch.h"
#include "test/files.h"

namespace {

int refused(const std::string& path, const std::string& text) {
    return throws_with([&] { Tokenizer::load(path); }, text);
}

// Utf8Stream once more, independently: UTF-8 with errors replaced, by ranges of code points instead of byte tables. A
// lead byte takes continuation bytes as long as they can still become a legal character.
std::string replaced(const std::string& s) {
    const unsigned least_of_length[] = {0, 0x80, 0x800, 0x10000};           // below it a shorter form exists
    const auto leading_ones = [](unsigned char a) {
        int n = 0;
        while (n < 8 && (a & 0x80u >> n) != 0) { n++; }
        return n;
    };
    std::string out;
    for (size_t i = 0; i < s.size();) {
        const unsigned a = (unsigned char)s[i];
        const int ones = leading_ones((unsigned char)a);
        const bool lead = ones != 1 && ones <= 4;
        const int extra = lead ? std::max(ones, 1) - 1 : -1;                // continuation bytes that belong to it
        unsigned lo = extra <= 0 ? a : a & (0x3Fu >> extra), hi = lo;       // the code points still possible
        int taken = 0;
        bool legal = extra >= 0;
        for (; legal && taken <= extra; taken++) {
            const int left = extra - taken;
            const unsigned least = least_of_length[extra];
            const unsigned first = lo << 6 * left, last = ((hi + 1) << 6 * left) - 1;
            legal = last >= least && first <= 0x10FFFF && !(first >= 0xD800 && last <= 0xDFFF);
            if (!legal || left == 0) { break; }
            const size_t next = i + 1 + (size_t)taken;
            if (next >= s.size() || ((unsigned char)s[next] & 0xC0) != 0x80) { legal = false; taken++; break; }
            lo = hi = lo << 6 | ((unsigned char)s[next] & 0x3F);
        }
        out += legal ? s.substr(i, (size_t)extra + 1) : "\xEF\xBF\xBD";
        i += legal ? (size_t)extra + 1 : (size_t)std::max(taken, 1);
    }
    return out;
}

// pushed in pieces of `cut` bytes
std::string stream(const std::string& bytes, size_t cut) {
    Utf8Stream utf8;
    std::string out;
    for (size_t i = 0; i < bytes.size(); i += cut) { out += utf8.push(bytes.substr(i, cut)); }
    return out + utf8.flush();
}

std::string utf8_of(unsigned c) {
    auto rest = [&](int shift) { return (char)(0x80 | (c >> shift & 0x3F)); };
    if (c < 0x80) { return {(char)c}; }
    if (c < 0x800) { return {(char)(0xC0 | c >> 6), rest(0)}; }
    if (c < 0x10000) { return {(char)(0xE0 | c >> 12), rest(6), rest(0)}; }
    return {(char)(0xF0 | c >> 18), rest(12), rest(6), rest(0)};
}

// how byte-level BPE spells these bytes, independent of the trainer's spelled()
std::string spelling(const std::string& bytes) {
    std::string out;
    for (const char c : bytes) {
        const unsigned b = (unsigned char)c;
        const bool prints = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        unsigned others = 0;                            // bytes before b that do not print
        for (unsigned o = 0; o < b; o++) { others += o < '!' || (o > '~' && o < 0xA1) || o == 0xAD; }
        out += utf8_of(prints ? b : 0x100 + others);
    }
    return out;
}

std::string written_names(const Tokenizer& t) {         // of the files that a checkpoint holds
    std::vector<std::string> names;
    for (const auto& file : t.files) { names.push_back(file.first); }
    return joined(names);
}
// the text of these ids
std::string text_of(const Tokenizer& t, const std::vector<int>& ids) {
    std::string out;
    for (size_t i = 0; i < ids.size(); i++) { out += t.shown(ids[i], i == 0); }
    return out;
}
// The files of a directory, in the order of their names
void write_files(const TempDir& dir, const std::map<std::string, std::string>& files) {
    for (const std::string& name : list_directory(dir.path)) { io_unlink(dir / name); }
    for (const auto& [name, text] : files) { write_file(dir / name, text); }
}

// tokenizer.json of byte-level BPE: a, e, " the", the bytes of U+00E9, and two added tokens behind a gap
const char* const BYTE_LEVEL = R"({"model": {"type": "BPE", "vocab": {"a": 0, "e": 1, "\u0120the": 2, "\u00c3": 3,
    "\u00a9": 4, "\u00c3\u00a9": 5}, "merges": ["\u0120 the"]}, "decoder": {"type": "ByteLevel"},
    "added_tokens": [{"id": 7, "content": "<|endoftext|>", "special": true}, {"id": 8, "content": "\u00e9"}]})";
const char* const PIECES = "[PAD]\n[UNK]\n[CLS]\n[SEP]\nplay\n##ing\n,\n##\n";

} // namespace

TEST_CASE("utf-8 stream: every character survives any cut, and comes as soon as it is whole", "[tokenizer]") {
    int wrong = 0;
    for (unsigned c = 0; c <= 0x10FFFF; c++) {
        if (c >= 0xD800 && c <= 0xDFFF) { continue; }
        const std::string s = utf8_of(c);
        Utf8Stream utf8;
        for (size_t i = 0; i < s.size(); i++) {
            wrong += utf8.push(s.substr(i, 1)) != (i + 1 < s.size() ? "" : s);
        }
        wrong += !utf8.flush().empty();
    }
    CHECK(wrong == 0);
    const std::string text = "na\xC3\xAFve \xE2\x82\xAC \xF0\x9F\x98\x80!";
    for (size_t cut = 1; cut <= text.size(); cut++) { CHECK(stream(text, cut) == text); }
}

TEST_CASE("utf-8 stream: what is not UTF-8 becomes U+FFFD", "[tokenizer]") {
    const struct { const char* bytes; const char* text; } table[] = {       // ? stands for U+FFFD
        {"a\x80""b", "a?b"}, {"\xC0\x80", "??"}, {"\xE2\x82", "?"}, {"\xE2\x82x", "?x"}, {"\xED\xA0\x80", "???"},
        {"\xE0\x9F\xBF", "???"}, {"\xF0\x8F\x80\x80", "????"}, {"\xF4\x90\x80\x80", "????"}, {"\xF5""a", "?a"},
        {"\xF0\x9F\x98\xF0\x9F\x98\x80", "?\xF0\x9F\x98\x80"}, {"\xC3\xC3\xA9", "?\xC3\xA9"}, {"\xFF\xFE", "??"},
        {"\xE2\xE2\x82\xAC", "?\xE2\x82\xAC"}, {"\xF1\x80\x80""a", "?a"}, {"", ""}};
    for (const auto& row : table) {
        std::string wanted;
        for (const char c : std::string(row.text)) { wanted += c == '?' ? "\xEF\xBF\xBD" : std::string(1, c); }
        for (const size_t cut : {1, 2, 3, 9}) { CHECK(stream(row.bytes, cut) == wanted); }
        CHECK(replaced(row.bytes) == wanted);
    }
    Utf8Stream again;
    again.push("\xE2\x82");
    again.flush();
    CHECK(again.push("\xACz") == "\xEF\xBF\xBDz");        // flush() ended the character
    int wrong = 0;                                      // bytes at the bounds of legal characters
    const std::string alphabet = "a\x7F\x80\x8F\x90\x9F\xA0\xBF\xC0\xC1\xC2\xDF\xE0\xE1\xED\xEF\xF0\xF1\xF4\xF5\xFF";
    for (uint64_t n = 0; n < 50000; n++) {
        std::string s;
        for (uint64_t i = 0; i < 8; i++) { s += alphabet[hash64(7, n, i) % alphabet.size()]; }
        wrong += stream(s, 1 + n % 8) != replaced(s);
    }
    CHECK(wrong == 0);
}

TEST_CASE("tokenizer: bytes", "[tokenizer]") {
    const Tokenizer t = Tokenizer::bytes();
    REQUIRE(t.vocab_size() == 256);
    for (int i = 0; i < 256; i++) { CHECK(t.shown(i) == std::string(1, (char)i)); }
    CHECK(t.shown(256) == "<256>");
    CHECK(throws_with([&] { t.shown(-1); }, "bytes: expected an id, got -1") == 2);
}

TEST_CASE("tokenizer: encoder.json with each of the 256 bytes, and a character in two tokens", "[tokenizer]") {
    TempDir dir;
    // GPT-2's own order: the printing bytes first, then the rest as U+0100 + n
    std::string json = "{", bytes;
    int id = 0, moved = 0;
    auto add = [&](int byte, unsigned spelled) {
        std::string c = spelled == '"' || spelled == '\\' ? "\\" : "";      // escaped in JSON
        c += utf8_of(spelled);
        json += strprintf("%s\"%s\": %d", id == 0 ? "" : ", ", c.c_str(), id);
        bytes += (char)byte;
        id++;
    };
    const int ranges[3][2] = {{0x21, 0x7E}, {0xA1, 0xAC}, {0xAE, 0xFF}};
    for (const auto& range : ranges) {
        for (int b = range[0]; b <= range[1]; b++) { add(b, (unsigned)b); }
    }
    for (int b = 0; b < 256; b++) {
        if (bytes.find((char)b) == std::string::npos) { add(b, 0x100u + (unsigned)moved++); }
    }
    REQUIRE(id == 256);
    json += ", \"\xC4\xA0the\": 256, \"\xC3\xA2\xC4\xA4\": 257, \"<|endoftext|>\": 258}";      // " the", E2 82
    write_file(dir / "encoder.json", json);
    for (const std::string& path : {dir / "encoder.json", dir.path}) {
        const Tokenizer t = Tokenizer::load(path);
        REQUIRE(t.vocab_size() == 259);
        CHECK(t.eot == 258);
        CHECK(written_names(t) == "vocab.json");
        for (int i = 0; i < 256; i++) { CHECK(t.shown(i) == bytes.substr((size_t)i, 1)); }
        CHECK(t.shown(256) == " the");
        CHECK(t.shown(258) == "<|endoftext|>");
        const int last = (int)bytes.find('\xAC');
        CHECK(text_of(t, {256, 257, last}) == " the\xE2\x82\xAC");
        for (int b = 0; b < 256; b++) { CHECK(spelled(b) == spelling(std::string(1, (char)b))); }
        Utf8Stream utf8;
        CHECK(utf8.push(t.shown(257)) == "");
        CHECK(utf8.push(t.shown(last)) == "\xE2\x82\xAC");
    }
    write_file(dir / "vocab.bpe", "#version: 0.2\n");
    CHECK(written_names(Tokenizer::load(dir.path)) == "vocab.json|merges.txt");
}

TEST_CASE("tokenizer: vocab.txt joins with spaces and glues ##", "[tokenizer]") {
    TempDir dir;
    const std::string path = dir / "vocab.txt", pieces = PIECES;
    std::string crlf;
    for (const char c : pieces) { crlf += c == '\n' ? "\r\n" : std::string(1, c); }
    for (const std::string& text : {pieces, crlf, pieces.substr(0, pieces.size() - 1)}) {
        write_file(path, text);
        const Tokenizer t = Tokenizer::load(dir.path);
        REQUIRE(t.vocab_size() == 8);
        CHECK(t.eot == 3);
        CHECK(text_of(t, {2, 4, 5, 6, 4, 3}) == "[CLS] playing , play [SEP]");
        CHECK(t.shown(5, true) == "ing");
        CHECK(t.shown(7) == " ##");
        CHECK(t.shown(8) == "<8>");
    }
    write_file(path, "a\n[UNK]\na\n");         // of two equal lines the last counts, as in BERT's own code
    CHECK(Tokenizer::load(path).id_of("a") == 2);
    for (const char* text : {"", "To be, or not to be\n"}) {
        write_file(path, text);
        CHECK(refused(path, path + ": has no line [UNK]") == 2);
    }
    std::string lines = "[UNK]\n";
    while (lines.size() < 2 * (size_t)Tokenizer::MAX_TOKENS + 6) { lines += "a\n"; }
    write_file(path, lines);
    CHECK(refused(path, "expected at most 1048576 lines, got more") == 2);
}

TEST_CASE("tokenizer: tokenizer.json of each kind, whatever its split", "[tokenizer]") {
    TempDir dir;
    const auto load = [&](const nlohmann::json& j) {
        write_files(dir, {{"tokenizer.json", j.dump()}});
        return Tokenizer::load(dir.path);
    };
    // 1 byte-level BPE; an added token is plain text, and no token of a gap has a spelling
    nlohmann::json j = parse_json<nlohmann::json>(BYTE_LEVEL, "j");
    const Tokenizer bytes = load(j);
    CHECK(bytes.kind == Tokenizer::Kind::Bytes);
    CHECK(text_of(bytes, {0, 2, 3, 4, 5, 6, 7, 8, 9}) == "a the\xC3\xA9\xC3\xA9<6><|endoftext|>\xC3\xA9<9>");
    CHECK((bytes.vocab_size() == 9 && bytes.eot == 7));
    CHECK(with_text(&bytes) == &bytes);
    j["pre_tokenizer"] = {{"type", "Sequence"}};            // of Llama 3, say
    j["model"]["vocab"]["<|endoftext|>"] = 7;               // where its name is, too
    j["model"]["vocab"]["\xE4\xBD\xA0"] = 6;                // not spelled: plain text
    CHECK(load(j).tokens[6] == "\xE4\xBD\xA0");
    CHECK(load(j).tokens[7] == "<|endoftext|>");
    // 2 WordPiece
    const nlohmann::json words = {{"[UNK]", 0}, {"[SEP]", 1}, {"the", 2}, {"##n", 3}, {"merges", 4}};
    const Tokenizer pieces = load({{"model", {{"type", "WordPiece"}, {"vocab", words}}}});
    CHECK(text_of(pieces, {2, 3, 2, 1, 4}) == "then the [SEP] merges");
    CHECK(pieces.eot == 1);
    // 3 any other: ids
    const Tokenizer unigram = load(parse_json<nlohmann::json>(R"({"decoder": null, "model": {
        "type": "Unigram", "vocab": [["<unk>", 0.0], ["\u2581the", -1.5], ["<|endoftext|>", 0]]}})", "unigram"));
    CHECK(unigram.kind == Tokenizer::Kind::Ids);
    CHECK((unigram.vocab_size() == 3 && unigram.eot == 2));
    CHECK(with_text(&unigram) == nullptr);
    CHECK(with_text(nullptr) == nullptr);
    j["decoder"] = {{"type", "Metaspace"}};
    CHECK(load(j).kind == Tokenizer::Kind::Ids);
    j["pre_tokenizer"] = {{"type", "ByteLevel"}};
    CHECK(load(j).kind == Tokenizer::Kind::Bytes);
}

TEST_CASE("tokenizer: the end of a text, and added tokens, from the files beside a vocabulary", "[tokenizer]") {
    TempDir dir;
    const std::string vocab = R"({"merges": 0, "<|endoftext|>": 1, "<end>": 2})";
    const struct { const char* config; int eot; } table[] = {
        {"{}", 1}, {R"({"eos_token": null})", 1}, {R"({"eos_token": "<end>"})", 2}, {R"({"eos_token": "<x>"})", 3},
        {R"({"eos_token": {"content": "<end>", "lstrip": false}})", 2}, {R"({"eos_token": "none"})", 1}};
    for (const auto& row : table) {
        INFO(row.config);
        write_files(dir, {{"vocab.json", vocab}, {"tokenizer_config.json", row.config},
                          {"added_tokens.json", R"({"<x>": 3, "<end>": 2})"}});
        for (const std::string& path : {dir.path, dir / "vocab.json"}) {
            const Tokenizer t = Tokenizer::load(path);
            CHECK(t.eot == row.eot);
            CHECK(text_of(t, {3, 2, 0}) == "<x><end>merges");
            CHECK(written_names(t) == "vocab.json|tokenizer_config.json|added_tokens.json");
        }
    }
    write_files(dir, {{"tokenizer.json", BYTE_LEVEL}, {"added_tokens.json", "{\"\u00e9\": 8}"}});
    CHECK(text_of(Tokenizer::load(dir.path), {8, 0}) == "\u00e9a");                // listed twice
    const struct { const char *name, *text, *said; } bad[] = {
        {"tokenizer_config.json", "[]", "tokenizer_config.json: expected an object, got an array of 0"},
        {"tokenizer_config.json", R"({"eos_token": {}})", "tokenizer_config.json: the key \"content\" is missing"},
        {"added_tokens.json", R"({"x": 1})", "two tokens have the id 1"},
        {"added_tokens.json", R"({"x": "3"})", "added_tokens.json: \"x\": expected an integer"}};
    for (const auto& row : bad) {
        write_files(dir, {{"vocab.json", vocab}, {row.name, row.text}});
        CHECK(refused(dir.path, row.said) == 2);
    }
}

TEST_CASE("tokenizer: what a checkpoint writes is the same tokenizer, by the libraries' names", "[tokenizer]") {
    const std::map<std::string, std::string> given = {
        {"encoder.json", "{\"a\": 0, \"b\": 1, \"ab\": 2}"}, {"vocab.bpe", "a b"}, {"other.txt", "[UNK]\n"},
        {"vocab.txt", PIECES}, {"tokenizer.json", BYTE_LEVEL}, {"tokenizer.model", "\n\x01"},
        {"special_tokens_map.json", "{}"}, {"chat_template.jinja", "{{ x }}"}, {"my.json", BYTE_LEVEL},
        {"my-vocab.txt", PIECES}};
    const struct { const char *name, *written; } table[] = {
        {"", "tokenizer.json|vocab.json|vocab.txt|tokenizer.model|merges.txt|special_tokens_map.json|"
             "chat_template.jinja"},
        {"/encoder.json", "vocab.json|merges.txt|special_tokens_map.json|chat_template.jinja"},
        {"/vocab.txt", "vocab.txt|special_tokens_map.json|chat_template.jinja"},
        {"/my-vocab.txt", "vocab.txt|special_tokens_map.json|chat_template.jinja"},
        {"/my.json", "tokenizer.json|special_tokens_map.json|chat_template.jinja"}};
    for (const auto& row : table) {
        INFO(row.name);
        TempDir from, to;
        write_files(from, given);
        const Tokenizer t = Tokenizer::load(from.path + row.name);
        TempDir::remove(from.path);                                         // nothing is read from there again
        CHECK(written_names(t) == row.written);
        for (const auto& file : t.files) { write_file(to / file.first, file.second); }
        const Tokenizer again = Tokenizer::load(to.path);
        CHECK((again.tokens == t.tokens && again.eot == t.eot && again.kind == t.kind));
        CHECK(written_names(again) == row.written);
        if (t.file("merges.txt") != nullptr) { CHECK(*t.file("merges.txt") == "a b"); }
    }
}

TEST_CASE("tokenizer: hostile files", "[tokenizer]") {
    TempDir dir;
    const struct { const char *name, *text, *said; } table[] = {
        {"vocab.json", "", "not valid JSON"}, {"vocab.json", "{", "not valid JSON"},
        {"vocab.json", "{\"a\": 0} x", "not valid JSON"}, {"vocab.json", "{\"\xFF\": 0}", "not valid JSON"},
        {"vocab.json", "7", "expected tokens and their ids, got 7"}, {"vocab.json", "{}", "got an object of 0"},
        {"vocab.json", "[0]", "vocab: expected a token and its score, got 0"},
        {"vocab.json", "{\"a\": -1}", "\"a\": expected an integer from 0 to 1048575, got -1"},
        {"vocab.json", "{\"a\": 1048576}", "got 1048576"}, {"vocab.json", "{\"a\": 0.0}", "an integer"},
        {"vocab.json", "{\"a\": \"0\"}", "an integer"}, {"vocab.json", "{\"a\": null}", "an integer"},
        {"vocab.json", "{\"a\": 18446744073709551616}", "an integer"},
        {"vocab.json", "{\"a\": 4294967296}", "an integer"}, {"vocab.json", "{\"a\": {\"b\": 0}}", "an integer"},
        {"vocab.json", "{\"a\": 0, \"b\": 0}", "two tokens have the id 0"},
        {"vocab.json", "{\"a\": 0, \"a\": 1}", "appears twice"},
        {"tokenizer.json", R"({"model": {}})", "the key \"vocab\" is missing"},
        {"tokenizer.json", R"({"model": {"vocab": 1}})", "expected tokens and their ids, got 1"},
        {"tokenizer.json", R"({"model": {"vocab": [["a", 0], [0, 0]]}})", "expected a token and its score, got an"},
        {"tokenizer.json", R"({"model": {"type": 1, "vocab": {"a": 0}}})", "\"type\": expected a string, got 1"},
        {"tokenizer.json", R"({"model": {"vocab": {"a": 0}}, "added_tokens": 7})", "expected an object with the key"},
        {"tokenizer.json", R"({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": -1, "content": "b"}]})", "got -1"},
        {"tokenizer.json", R"({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1, "content": 2}]})", "a string"},
        {"tokenizer.json", R"({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 0, "content": "b"}]})",
         "two tokens have the id 0"}};
    for (const auto& row : table) {
        INFO(row.text);
        write_files(dir, {{row.name, row.text}});
        CHECK(refused(dir.path, row.said) == 2);
        CHECK(refused(dir.path, dir / row.name + std::string(":")) == 2);
    }
    write_files(dir, {{"vocab.json", std::string(100000, '[')}});
    CHECK(refused(dir.path, "nested deeper") == 2);
    for (const char* name : {"vocab.json", "vocab.txt", "tokenizer.json"}) {
        write_files(dir, {{name, ""}});
        resize_file(dir / name, Tokenizer::MAX_FILE + 1);
        CHECK(refused(dir.path, "expected a file of at most 67.1 MB, got") == 2);
    }
}

TEST_CASE("tokenizer: paths with no tokenizer, or with two", "[tokenizer]") {
    TempDir dir;
    const std::string expected = ": expected tokenizer.json, vocab.json (or encoder.json) or vocab.txt";
    const std::string made = "; GPT-2's: python3 data/vocabulary.py --out DIR";
    CHECK(refused(dir / "missing.json", "missing.json: cannot open") == 2);
    CHECK(refused(dir.path, dir.path + expected + " in this directory, got none" + made) == 2);
    write_file(dir / "gpt2_tokenizer.bin", "");
    CHECK(refused(dir / "gpt2_tokenizer.bin", "gpt2_tokenizer.bin" + expected + made) == 2);
    write_file(dir / "vocab.txt", "[UNK]\n");
    write_file(dir / "encoder.json", "{\"a\": 0}");
    CHECK(refused(dir.path, "expected one vocabulary, got " + (dir / "encoder.json") + " and " +
                  (dir / "vocab.txt")) == 2);
    CHECK(Tokenizer::load(dir / "vocab.txt").vocab_size() == 1);
    write_file(dir / "tokenizer.json", BYTE_LEVEL);
    CHECK(Tokenizer::load(dir.path).path == dir / "tokenizer.json");
    alarm(60);
    REQUIRE(mkfifo((dir / "fifo.json").c_str(), 0600) == 0);
    CHECK(refused(dir / "fifo.json", "not a regular file") == 2);
    alarm(0);
}

TEST_CASE("tokenizer: what the fuzzer checks holds for seeded inputs", "[tokenizer]") {
    const std::vector<std::string> seeds = tokenizer_seeds();
    const std::string alphabet = std::string("\0\n\r\t ", 5) + "a'strelvmd019!#[]{}\",:"
                                 "\x7F\x80\x8F\x90\x9F\xA0\xA9\xBF\xC0\xC2\xC3\xE0\xE3\xED\xEF\xF0\xF4\xFF";
    int runs = 0;
    for (uint64_t n = 0; n < 3000; n++) {
        std::string data = seeds[n % seeds.size()];
        const uint64_t edits = hash64(31, n, 0) % 12;
        for (uint64_t e = 0; e < edits; e++) {
            const size_t at = 1 + hash64(32, n, e) % data.size();
            const char c = alphabet[hash64(33, n, e) % alphabet.size()];
            const uint64_t what = hash64(34, n, e) % 4;
            if (at >= data.size() || what == 0) { data.insert(data.begin() + (long)std::min(at, data.size()), c); }
            else if (what == 1) { data.erase(at, 1 + hash64(35, n, e) % 3); }
            else if (what == 2) { data[at] = c; }
            else { data += data.substr(at, hash64(36, n, e) % 40); }
        }
        INFO("n " << n);
        CHECK_NOTHROW(runs += 1 + LLVMFuzzerTestOneInput((const uint8_t*)data.data(), data.size()));
    }
    CHECK(runs == 3000);
}

TEST_CASE("real data: every golden text comes back from its ids", "[tokenizer][real]") {
    const std::string data = real_data();
    if (data.empty()) { return; }
    for (const bool is_gpt2 : {true, false}) {
        const Tokenizer t = Tokenizer::load(data + (is_gpt2 ? "encoder.json" : "vocab.txt"));
        CHECK(t.vocab_size() == (is_gpt2 ? 50257 : 30522));
        CHECK(t.eot == (is_gpt2 ? 50256 : 102));
        const std::string name = is_gpt2 ? "golden_gpt2_bpe.jsonl" : "golden_bert_wordpiece.jsonl";
        const std::string lines = read_file(data + name);
        int decoded = 0;
        for (size_t begin = 0, end; begin < lines.size(); begin = end + 1) {
            end = std::min(lines.find('\n', begin), lines.size());
            const Json j = parse_json(lines.substr(begin, end - begin), name);
            const std::string text = json_string(j, "text", name);
            const std::vector<int> ids = j["ids"].get<std::vector<int>>();
            // WordPiece does not keep case, accents or spacing; words of plain letters survive it
            bool plain = !ids.empty() && text.find_first_not_of("abcdefghijklmnopqrstuvwxyz ") == std::string::npos &&
                         text.find("  ") == std::string::npos && text.front() != ' ' && text.back() != ' ';
            plain = plain && std::count(ids.begin(), ids.end(), 100) == 0;          // [UNK]
            if (!is_gpt2 && !plain) { continue; }
            INFO(name << ": " << text);
            Utf8Stream utf8;
            std::string streamed;
            for (size_t i = 0; i < ids.size(); i++) { streamed += utf8.push(t.shown(ids[i], i == 0)); }
            CHECK(streamed + utf8.flush() == text);
            decoded++;
        }
        CHECK(decoded > (is_gpt2 ? 455 : 5));
    }
}
