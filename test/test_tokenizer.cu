// From ids to text: every tokenizer file, tokens that cut characters, and every bad file refused.
#include "../llmc/rand.h"
#include "../llmc/tokenizer.h"
#include "catch.h"
#include "files.h"

namespace {

int refused(const std::string& path, const std::string& text) {
    return throws_with([&] { Tokenizer::load(path); }, text);
}

// llm.c's format, as its writer has it
std::string llmc_bytes(const std::vector<std::string>& tokens, int version, int eot) {
    std::string s = header_bytes({20240328, version, (int)tokens.size(), version == 2 ? eot : 0});
    for (const std::string& t : tokens) { s += (char)t.size() + t; }
    return s;
}

// UTF-8 with errors replaced, told by code points: a second opinion on Utf8Stream. Each lead byte takes as many
// continuation bytes as could still become a legal character.
std::string replaced(const std::string& s) {
    std::string out;
    for (size_t i = 0; i < s.size();) {
        const unsigned a = (unsigned char)s[i];
        const int extra = a < 0x80 ? 0 : a < 0xC0 ? -1 : a < 0xE0 ? 1 : a < 0xF0 ? 2 : a < 0xF8 ? 3 : -1;
        unsigned lo = extra <= 0 ? a : a & (0x3Fu >> extra), hi = lo;       // the code points still possible
        int taken = 0;
        bool legal = extra >= 0;
        for (; legal && taken <= extra; taken++) {
            const int left = extra - taken;
            const unsigned least = extra == 0 ? 0 : extra == 1 ? 0x80 : extra == 2 ? 0x800 : 0x10000;
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

std::string stream(const std::string& bytes, size_t cut) {      // pushed in pieces of `cut` bytes
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

TEST_CASE("utf-8 stream: what is no UTF-8 becomes U+FFFD", "[tokenizer]") {
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
    int wrong = 0;                                      // bytes that like to be near a legal character
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
    for (int i = 0; i < 256; i++) { CHECK(t.decode(i) == std::string(1, (char)i)); }
    CHECK(t.decode(std::vector<int>{'C', 0, 255}) == std::string("C\0\xFF", 3));
    CHECK(throws_with([&] { t.decode(256); }, "bytes: there is no token 256, ids are 0 to 255") == 2);
    CHECK(throws_with([&] { t.decode(-1); }, "there is no token -1") == 2);
}

TEST_CASE("tokenizer: encoder.json, each of the 256 bytes and a character over two tokens", "[tokenizer]") {
    TempDir dir;
    // GPT-2's own order: the printing bytes first, then the others as U+0100 + n
    std::string json = "{", bytes;
    int id = 0, moved = 0;
    auto add = [&](int byte, unsigned spelled) {
        const std::string c = spelled == '"' || spelled == '\\' ? "\\" + utf8_of(spelled) : utf8_of(spelled);
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
        CHECK(t.files == std::vector<std::string>({dir / "encoder.json"}));
        for (int i = 0; i < 256; i++) { CHECK(t.decode(i) == bytes.substr((size_t)i, 1)); }
        CHECK(t.decode(256) == " the");
        CHECK(t.decode(258) == "<|endoftext|>");
        const int last = (int)bytes.find('\xAC');
        CHECK(t.decode({256, 257, last}) == " the\xE2\x82\xAC");
        Utf8Stream utf8;
        CHECK(utf8.push(t.decode(257)) == "");
        CHECK(utf8.push(t.decode(last)) == "\xE2\x82\xAC");
    }
    write_file(dir / "vocab.bpe", "#version: 0.2\n");
    CHECK(Tokenizer::load(dir.path).files == std::vector<std::string>({dir / "encoder.json", dir / "vocab.bpe"}));
}

TEST_CASE("tokenizer: hostile encoder.json", "[tokenizer]") {
    TempDir dir;
    const std::string path = dir / "encoder.json";
    const struct { const char* json; const char* text; } table[] = {
        {"", "not valid JSON"}, {"{", "not valid JSON"}, {"{\"a\": 0} x", "not valid JSON"}, {"{\"\xFF\": 0}", "not"},
        {"[0]", "an object of 1 to"}, {"{}", "an object of 1 to"}, {"{\"a\": 1}", "\"a\" is 1, an integer from 0 to 0"},
        {"{\"a\": -1}", "an integer from 0 to 0"}, {"{\"a\": 0, \"b\": 2}", "an integer from 0 to 1"},
        {"{\"a\": 0, \"b\": 0}", "two tokens have the id 0"}, {"{\"a\": 0, \"a\": 1}", "twice"},
        {"{\"a\": 0.0}", "an integer"}, {"{\"a\": \"0\"}", "an integer"}, {"{\"a\": null}", "an integer"},
        {"{\"a\": 18446744073709551616}", "an integer"}, {"{\"a\": 4294967296}", "an integer"},
        {"{\"a\": {\"b\": 0}}", "an integer"}, {"{\"\": 0}", "token 0 is empty"},
        {"{\"a b\": 0}", "not spelled as byte-level BPE"}, {"{\"\xC2\xA0\": 0}", "not spelled"},     // U+00A0
        {"{\"\xC5\x84\": 0}", "not spelled"}, {"{\"\xE0\xA0\xB0\": 0}", "not spelled"},            // U+0144, U+0830
        {"{\"\xF0\x9F\x98\x80\": 0}", "not spelled"}};
    for (const auto& row : table) {
        INFO(row.json);
        write_file(path, row.json);
        CHECK(refused(path, row.text) == 2);
        CHECK(refused(path, path + ":") == 2);
    }
    write_file(path, std::string(100000, '['));
    CHECK(refused(path, "nested deeper") == 2);
    write_file(path, "");
    resize_file(path, Tokenizer::MAX_FILE + 1);
    CHECK(refused(path, "a file of this kind has at most") == 2);
}

TEST_CASE("tokenizer: vocab.txt joins with spaces and glues ##", "[tokenizer]") {
    TempDir dir;
    const std::string path = dir / "vocab.txt";
    for (const char* text : {"[PAD]\n[UNK]\n[CLS]\n[SEP]\nplay\n##ing\n,\n##\n",
                             "[PAD]\r\n[UNK]\r\n[CLS]\r\n[SEP]\r\nplay\r\n##ing\r\n,\r\n##"}) {
        write_file(path, text);
        const Tokenizer t = Tokenizer::load(dir.path);
        REQUIRE(t.vocab_size() == 8);
        CHECK(t.eot == 3);
        CHECK(t.decode({2, 4, 5, 6, 4, 3}) == "[CLS] playing , play [SEP]");
        CHECK(t.decode(4, true) == "play");
        CHECK(t.decode(4) == " play");
        CHECK(t.decode(5, true) == "ing");
        CHECK(t.decode(7) == " ##");
        CHECK(throws_with([&] { t.decode(8); }, path + ": there is no token 8") == 2);
    }
    write_file(path, "a\n\nb\n[UNK]\n");
    CHECK(refused(path, path + ": line 2 is empty") == 2);
    write_file(path, "a\n\r\n[UNK]\n");
    CHECK(refused(path, "line 2 is empty") == 2);
    write_file(path, "To be, or not to be\n");
    CHECK(refused(path, "no line [UNK]") == 2);
    write_file(path, "");
    CHECK(refused(path, "no line [UNK]") == 2);
    write_file(path, "[UNK]\n" + std::string(1025, 'x'));
    CHECK(refused(path, "line 2 is 1025 bytes long") == 2);
    std::string lines = "[UNK]\n";
    while (lines.size() < 2 * (size_t)Tokenizer::MAX_TOKENS + 6) { lines += "a\n"; }
    write_file(path, lines);
    CHECK(refused(path, "more than 1048576 lines") == 2);
}

TEST_CASE("tokenizer: llm.c's gpt2_tokenizer.bin, and hostile ones", "[tokenizer]") {
    TempDir dir;
    const std::string path = dir / "gpt2_tokenizer.bin", longest(255, 'x');
    const std::vector<std::string> tokens = {"a", std::string("\0", 1), "\xE2\x82", longest, "<|endoftext|>"};
    for (const int version : {1, 2}) {
        write_file(path, llmc_bytes(tokens, version, 4));
        const Tokenizer t = Tokenizer::load(dir.path);
        CHECK(t.tokens == tokens);
        CHECK(t.eot == (version == 2 ? 4 : -1));
    }
    write_file(path, llmc_bytes(std::vector<std::string>(50257, "a"), 1, 0));       // version 1 was GPT-2's alone
    CHECK(Tokenizer::load(path).eot == 50256);
    const std::string good = llmc_bytes(tokens, 2, 4);
    const int32_t field[] = {20240328, 2, 5, 4};
    const char* text[] = {"magic number", "version", "tokens, wanted 1 to", "end-of-text id"};
    for (int f = 0; f < 4; f++) {
        for (const int32_t v : hostile_values(field[f])) {
            INFO("field " << f << " = " << v);
            write_file(path, good);
            patch_file(path, bytes_of<int32_t>({v}), 4 * (uint64_t)f);
            const bool fine = v == field[f] || (f == 1 && v == 1) || (f == 3 && v >= 0 && v < 5);
            if (fine) {
                CHECK(Tokenizer::load(path).vocab_size() == 5);
                continue;
            }
            const bool below_eot = f == 2 && v > 0 && v < 5, too_many = f == 2 && v == 6;
            CHECK(refused(path, path + ": ") == 2);
            CHECK(refused(path, below_eot ? "end-of-text id 4, wanted" : too_many ? "truncated" : text[f]) == 2);
        }
    }
    for (size_t bytes = 0; bytes < good.size(); bytes++) {
        write_file(path, good.substr(0, bytes));
        const bool header = bytes < 1024, few = bytes < 1034;
        CHECK(refused(path, header ? "its header has 1024" : few ? "the header says 5 tokens" : "(truncated?)") == 2);
    }
    write_file(path, good + "x");
    CHECK(refused(path, "its 5 tokens end at byte") == 2);
    write_file(path, llmc_bytes({"a", "", "bb", "cc"}, 2, 0));
    CHECK(refused(path, "token 1 is empty") == 2);
}

TEST_CASE("tokenizer: paths that hold none, or two", "[tokenizer]") {
    TempDir dir;
    CHECK(refused(dir / "missing.json", "missing.json: cannot open") == 2);
    CHECK(refused(dir.path, dir.path + ": no tokenizer in this directory") == 2);
    write_file(dir / "vocab.bpe", "#version: 0.2\n");
    CHECK(refused(dir / "vocab.bpe", "vocab.bpe: encoder.json, vocab.txt or gpt2_tokenizer.bin wanted") == 2);
    write_file(dir / "vocab.txt", "[UNK]\n");
    write_file(dir / "encoder.json", "{\"a\": 0}");
    CHECK(refused(dir.path, "holds two tokenizers, " + (dir / "encoder.json") + " and " + (dir / "vocab.txt")) == 2);
    CHECK(Tokenizer::load(dir / "vocab.txt").vocab_size() == 1);
    alarm(10);
    REQUIRE(mkfifo((dir / "fifo.bin").c_str(), 0600) == 0);
    CHECK(refused(dir / "fifo.bin", "not a regular file") == 2);
    alarm(0);
}

TEST_CASE("real data: GPT-2's and BERT's tokenizers decode the golden ids", "[tokenizer][real]") {
    const std::string data = real_data();
    if (data.empty()) { return; }
    const Tokenizer gpt2 = Tokenizer::load(data + "encoder.json"), bert = Tokenizer::load(data + "vocab.txt");
    CHECK(gpt2.vocab_size() == 50257);
    CHECK(gpt2.eot == 50256);
    CHECK(bert.vocab_size() == 30522);
    CHECK(bert.eot == 102);
    int lines = 0, wrong = 0, words = 0;
    auto each_line = [&](const std::string& name, auto f) {
        const std::string text = read_file(data + name);
        for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
            end = std::min(text.find('\n', begin), text.size());
            const Json j = parse_json(text.substr(begin, end - begin), name);
            f(json_string(j, "text", name), j["ids"].get<std::vector<int>>());
        }
    };
    each_line("golden_gpt2_bpe.jsonl", [&](const std::string& text, const std::vector<int>& ids) {
        lines++;
        wrong += gpt2.decode(ids) != text;
        Utf8Stream utf8;
        std::string streamed;
        for (const int id : ids) { streamed += utf8.push(gpt2.decode(id)); }
        wrong += streamed + utf8.flush() != text;
    });
    CHECK(lines == 456);
    CHECK(wrong == 0);
    // WordPiece does not keep case, accents or spacing; words of plain letters survive it
    each_line("golden_bert_wordpiece.jsonl", [&](const std::string& text, const std::vector<int>& ids) {
        const bool plain = text.find_first_not_of("abcdefghijklmnopqrstuvwxyz ") == std::string::npos && !ids.empty();
        if (!plain || text.find("  ") != std::string::npos || text.front() == ' ' || text.back() == ' ') { return; }
        if (std::count(ids.begin(), ids.end(), 100) > 0) { return; }                // [UNK]
        words++;
        wrong += bert.decode(ids) != text;
    });
    CHECK(words > 5);
    CHECK(wrong == 0);
    // the same table through llm.c's file
    TempDir dir;
    write_file(dir / "gpt2_tokenizer.bin", llmc_bytes(gpt2.tokens, 2, gpt2.eot));
    CHECK(Tokenizer::load(dir.path).tokens == gpt2.tokens);
}
