// From text to ids and back: merges and pieces, every kind of tokenizer file, and bad files are refused.
#include "llmc/base/portable.h"
#include "test/fuzz/fuzz_tokenizer.cu"
#include "test/catch.h"
#include "test/files.h"
#include "test/sha256.h"

namespace {

int refused(const std::string& path, const std::string& text) {
    return throws_with([&] { Tokenizer::load(path); }, text);
}

// gpt2_tokenizer.bin as llm.c writes it
std::string llmc_bytes(const std::vector<std::string>& tokens, int version, int eot) {
    std::string s = header_bytes({20240328, version, (int)tokens.size(), version == 2 ? eot : 0});
    for (const std::string& t : tokens) { s += (char)t.size() + t; }
    return s;
}

// the inverse of Bpe::unspell(), independent of Bpe::spell()
std::string spelled(const std::string& bytes) {
    std::string out;
    for (const char c : bytes) {
        const unsigned b = (unsigned char)c;
        const bool prints = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        unsigned others = 0;                            // bytes before b that do not print
        for (unsigned o = 0; o < b; o++) { others += o < '!' || (o > '~' && o < 0xA1) || o == 0xAD; }
        utf8_append(out, prints ? b : 0x100 + others);
    }
    return out;
}
double cpu_seconds() { return (double)clock() / CLOCKS_PER_SEC; }      // a bound on them holds under any load
// encoder.json of these tokens, ids in their order
std::string encoder_json(const std::vector<std::string>& tokens) {
    nlohmann::json j;
    for (size_t id = 0; id < tokens.size(); id++) { j[spelled(tokens[id])] = id; }
    return j.dump();
}

struct SmallBpe {
    std::vector<std::string> tokens;                    // the bytes, then each new token that a merge makes
    std::vector<std::pair<std::string, std::string>> merges;

    SmallBpe() {
        for (int b = 255; b >= 0; b--) { tokens.push_back(std::string(1, (char)b)); }       // in any order
    }
    void merge(const std::string& left, const std::string& right) {
        if (std::count(tokens.begin(), tokens.end(), left + right) == 0) { tokens.push_back(left + right); }
        merges.push_back({left, right});
    }
    std::string merges_text() const {
        std::string text = "#version: 0.2\n";
        for (const auto& m : merges) { text += spelled(m.first) + " " + spelled(m.second) + "\n"; }
        return text;
    }
    Tokenizer load(const TempDir& dir) const {
        write_file(dir / "encoder.json", encoder_json(tokens));
        write_file(dir / "vocab.bpe", merges_text());
        return Tokenizer::load(dir / "encoder.json");
    }
    // One word as the paper describes it, to compare with encode_word(): all places of the best pair, then all of the
    // next best, and so on.
    std::vector<std::string> cut(const std::string& word) const {
        std::vector<std::string> parts;
        for (const char c : word) { parts.push_back(std::string(1, c)); }
        for (;;) {
            size_t best = merges.size();
            for (size_t i = 0; i + 1 < parts.size(); i++) {
                const auto at = std::find(merges.begin(), merges.end(), std::make_pair(parts[i], parts[i + 1]));
                best = std::min(best, (size_t)(at - merges.begin()));
            }
            if (best == merges.size()) { return parts; }
            std::vector<std::string> merged;
            for (size_t i = 0; i < parts.size(); i++) {
                const bool both = i + 1 < parts.size() && merges[best] == std::make_pair(parts[i], parts[i + 1]);
                merged.push_back(both ? parts[i] + parts[i + 1] : parts[i]);
                i += both;
            }
            parts = merged;
        }
    }
};

// tokenizer.json of a SmallBpe, with <|endoftext|> after its tokens
nlohmann::json tokenizer_json(const SmallBpe& bpe) {
    nlohmann::json merges = nlohmann::json::array();
    for (const auto& m : bpe.merges) { merges.push_back({spelled(m.first), spelled(m.second)}); }
    return {{"added_tokens", {{{"id", bpe.tokens.size()}, {"content", "<|endoftext|>"}, {"special", true}}}},
            {"normalizer", nullptr},
            {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
            {"model", {{"type", "BPE"}, {"vocab", parse_json<nlohmann::json>(encoder_json(bpe.tokens), "vocab")},
                       {"merges", merges}}}};
}

std::string written_names(const Tokenizer& t) {         // of the files that a checkpoint holds
    std::vector<std::string> names;
    for (const auto& file : t.files) { names.push_back(file.first); }
    return joined(names);
}
std::string token_text(const Tokenizer& t, const std::string& text) {      // "the| cat"
    std::vector<std::string> parts;
    for (const int id : t.encode(text)) { parts.push_back(t.tokens[(size_t)id]); }
    return joined(parts);
}

// the expected results for whole files are given as hashes
std::string sha256(const std::string& s) {
    Sha256 sum;
    for (size_t at = 0; at < s.size(); at += 100) {         // in pieces that are not whole blocks
        sum.update((const uint8_t*)s.data() + at, std::min((size_t)100, s.size() - at));
    }
    return sum.hex();
}

} // namespace

TEST_CASE("tokenizer: bytes", "[tokenizer]") {
    const Tokenizer t = Tokenizer::bytes();
    REQUIRE(t.vocab_size() == 256);
    for (int i = 0; i < 256; i++) { CHECK(t.decode(i) == std::string(1, (char)i)); }
    CHECK(t.decode(std::vector<int>{'C', 0, 255}) == std::string("C\0\xFF", 3));
    CHECK(t.encode(std::string("C\0\xFF", 3)) == std::vector<int>{'C', 0, 255});
    CHECK(t.encode("").empty());
    CHECK(throws_with([&] { t.decode(256); }, "bytes: expected a token from 0 to 255, got 256") == 2);
    CHECK(throws_with([&] { t.decode(-1); }, "expected a token from 0 to 255, got -1") == 2);
}

TEST_CASE("tokenizer: encoder.json with each of the 256 bytes, and a character in two tokens", "[tokenizer]") {
    TempDir dir;
    // GPT-2's own order: the printing bytes first, then the rest as U+0100 + n
    std::string json = "{", bytes;
    int id = 0, moved = 0;
    auto add = [&](int byte, unsigned spelled) {
        std::string c = spelled == '"' || spelled == '\\' ? "\\" : "";      // escaped in JSON
        utf8_append(c, spelled);
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
        for (int i = 0; i < 256; i++) { CHECK(t.decode(i) == bytes.substr((size_t)i, 1)); }
        CHECK(t.decode(256) == " the");
        CHECK(t.decode(258) == "<|endoftext|>");
        const int last = (int)bytes.find('\xAC');
        CHECK(t.decode({256, 257, last}) == " the\xE2\x82\xAC");
        Utf8Stream utf8;
        CHECK(utf8.push(t.decode(257)) == "");
        CHECK(utf8.push(t.decode(last)) == "\xE2\x82\xAC");
    }
    CHECK(throws_with([&] { Tokenizer::load(dir.path).encode("a"); },
                      "merges.txt (or vocab.bpe) is missing beside it") == 2);
    write_file(dir / "vocab.bpe", "#version: 0.2\n");
    CHECK(written_names(Tokenizer::load(dir.path)) == "vocab.json|merges.txt");
}

TEST_CASE("byte-pair encoding: the earliest merge goes first, wherever it is", "[tokenizer]") {
    TempDir dir;
    SmallBpe small;
    for (const auto& m : std::vector<std::pair<std::string,
         std::string>>{{"h", "e"}, {"b", "c"}, {"a", "b"}, {"l", "l"}, {"a", "a"}, {"he", "ll"},
            {" ", "he"}, {"hell", "o"}, {" ", "hello"}, {"\xC3", "\xA9"}, {"aa", "aa"}, {"ab", "bc"}, {"'", "s"},
            {"\n", "\n"}}) {
        small.merge(m.first, m.second);
    }
    const Tokenizer t = small.load(dir);
    CHECK(written_names(t) == "vocab.json|merges.txt");
    const struct { const char* text; const char* tokens; } table[] = {
        // " he" comes after "hell", " hello" after both
        {"hello", "hello"}, {" hello", " hello"}, {" hell", " |hell"}, {" heal", " he|a|l"},
        {"abc", "a|bc"}, {"ab", "ab"}, {"abbc", "abbc"}, {"aab", "a|ab"}, {"aaa", "aa|a"}, {"aaaaa", "aaaa|a"},
        {"aaaaaaa", "aaaa|aa|a"},
        {"caf\xC3\xA9\xC3", "c|a|f|\xC3\xA9|\xC3"}, {"hell's", "hell|'s"}, {"h\n\ne", "h|\n|\n|e"},
        {"h\n\n", "h|\n\n"}, {"", ""}};
    for (const auto& row : table) {
        INFO(row.text);
        CHECK(token_text(t, row.text) == row.tokens);
        CHECK(t.decode(t.encode(row.text)) == row.text);
    }
    // the merge "a b" finds its b gone when its turn comes, and "a bc" has to wait for its own turn
    SmallBpe late;
    for (const auto& m : std::vector<std::pair<std::string,
         std::string>>{{"b", "c"}, {"a", "b"}, {"bc", "d"}, {"a", "bc"}}) {
        late.merge(m.first, m.second);
    }
    TempDir other;
    CHECK(token_text(late.load(other), "abcd abc") == "a|bcd| |abc");
    // llm.c's file has no merges, only the tokens in the order in which they were made
    write_file(dir / "gpt2_tokenizer.bin", llmc_bytes(small.tokens, 1, 0));
    const Tokenizer recovered = Tokenizer::load(dir / "gpt2_tokenizer.bin");
    for (const auto& row : table) { CHECK(token_text(recovered, row.text) == row.tokens); }
    // Hugging Face's names for the same files
    write_file(dir / "vocab.json", encoder_json(small.tokens));
    write_file(dir / "merges.txt", small.merges_text());
    io_unlink(dir / "vocab.bpe");
    CHECK(Tokenizer::load(dir / "vocab.json").encode("hello aab") == t.encode("hello aab"));
    CHECK(written_names(Tokenizer::load(dir / "vocab.json")) == "vocab.json|merges.txt");
}

TEST_CASE("byte-pair encoding: random merges, against the definition", "[tokenizer]") {
    TempDir dir;
    const std::string letters = "abc\xC3\xA9";          // \xC3\xA9 is a letter, but either byte by itself is not UTF-8
    int wrong = 0, merged = 0;
    int recovered = 0;
    for (uint64_t n = 0; n < 30; n++) {
        SmallBpe small;
        std::vector<std::string> parts;
        for (const char c : letters) { parts.push_back(std::string(1, c)); }
        for (uint64_t m = 0; m < 12; m++) {
            const std::string left = parts[hash64(11, n, 2 * m) % parts.size()],
                right = parts[hash64(11, n, 2 * m + 1) % parts.size()];
            if (std::count(small.tokens.begin(), small.tokens.end(), left + right) > 0) { continue; }
            small.merge(left, right);
            parts.push_back(left + right);
        }
        const Tokenizer t = small.load(dir);
        write_file(dir / "gpt2_tokenizer.bin", llmc_bytes(small.tokens, 1, 0));
        const Tokenizer again = Tokenizer::load(dir / "gpt2_tokenizer.bin");
        recovered += again.cannot_encode.empty();
        for (uint64_t k = 0; k < 200; k++) {
            std::string text;
            for (uint64_t i = 0, length = 1 + hash64(12, n, k) % 14; i < length; i++) {
                text += letters[hash64(n, k, i) % letters.size()];
            }
            std::vector<std::string> wanted;
            gpt2_words(text, [&](size_t begin, size_t end) {
                const std::vector<std::string> word = small.cut(text.substr(begin, end - begin));
                wanted.insert(wanted.end(), word.begin(), word.end());
            });
            merged += (int)(text.size() - wanted.size());
            wrong += token_text(t, text) != joined(wanted);
        }
    }
    CHECK(wrong == 0);
    CHECK(merged > 2000);
    CHECK(recovered > 0);
}

TEST_CASE("byte-pair encoding: a word of a million letters", "[tokenizer]") {
    TempDir dir;
    SmallBpe small;
    std::string part = "a";
    for (int i = 0; i < 6; i++, part += part) { small.merge(part, part); }
    const Tokenizer t = small.load(dir);
    const std::string text(1000003, 'a');
    const double start = cpu_seconds();
    const std::vector<int> ids = t.encode(text);
    CHECK(cpu_seconds() - start < 20);
    CHECK(ids.size() == 1000003 / 64 + 2);              // 3 are left over: aa, a
    CHECK(t.decode(ids) == text);
    const std::string words(1000000, ' ');
    CHECK(t.decode(t.encode(words + "a")) == words + "a");
}

TEST_CASE("tokenizer: hostile vocab.bpe", "[tokenizer]") {
    TempDir dir;
    SmallBpe small;
    small.merge("a", "b");
    small.merge("ab", "c");
    small.merge(" ", "ab");
    small.tokens.push_back("<|endoftext|>");
    small.load(dir);
    const std::string good = small.merges_text(), path = dir / "vocab.bpe";
    const struct { const char* lines; const char* text; } table[] = {
        {"a b\na\n", "line 2: expected two tokens with a space between them, got \"a\""},
        {"a b\n\nab c\n", "between them, got \"\""},
        {" b\n", "line 1: expected two tokens with a space between them, got \" b\""},
        {"a \n", "got \"a \""},
        {"a b c\n", "line 1, \"a b c\", is not spelled"}, {"a  b\n", "is not spelled"}, {"a \xC3\n", "is not spelled"},
        {"\xE4\xBD\xA0 a\n", "is not spelled"},
        {"a \tb\n", "is not spelled"}, {"a b\na b\n", "line 2, \"a b\", appears twice"},
        {"a c\n", "merges tokens that the vocabulary does not have"},
        {"abc d\n", "merges tokens that the vocabulary does not have"}, {"x yz\n", "does not have (files of two"},
        {"a b\n#version: 0.2\n", "line 2"}};
    for (const auto& row : table) {
        INFO(row.lines);
        write_file(path, row.lines);
        CHECK(refused(dir.path, row.text) == 2);
        CHECK(refused(dir.path, path + ": line ") == 2);
    }
    write_file(path, std::string("a b\0", 4));
    CHECK(refused(path.substr(0, path.rfind('/')), "is not spelled") == 2);
    write_file(path, "");
    resize_file(path, Tokenizer::MAX_FILE + 1);
    CHECK(refused(dir.path, "expected a file of at most 16.8 MB, got") == 2);
    // cut short: refused, never encoded differently
    for (size_t bytes = 0; bytes + 1 < good.size(); bytes++) {
        write_file(path, good.substr(0, bytes));
        INFO(bytes);
        CHECK(throws_with([&] { Tokenizer::load(dir.path).encode("abc"); }, path) == 2);
    }
    for (const std::string& whole : {good, good.substr(0, good.size() - 1), good.substr(good.find('\n') + 1)}) {
        write_file(path, whole);
        CHECK(token_text(Tokenizer::load(dir.path), "abc ab") == "abc| ab");
    }
    std::string crlf;
    for (const char c : good) { crlf += c == '\n' ? "\r\n" : std::string(1, c); }
    write_file(path, crlf);
    CHECK(token_text(Tokenizer::load(dir.path), "abc ab") == "abc| ab");
    small.tokens.erase(small.tokens.begin() + 1);       // 0xFE
    small.load(dir);
    CHECK(throws_with([&] { Tokenizer::load(dir.path).encode("a"); },
                      "no text can be encoded: no token is the byte 0xFE") == 2);
    write_file(dir / "gpt2_tokenizer.bin", llmc_bytes({"a", "a"}, 1, 0));
    CHECK(throws_with([&] { Tokenizer::load(dir / "gpt2_tokenizer.bin").encode("a"); },
                      "tokens 0 and 1 are the same byte") == 2);
    SmallBpe odd;
    odd.tokens.push_back("abc");
    write_file(dir / "gpt2_tokenizer.bin", llmc_bytes(odd.tokens, 1, 0));
    CHECK(throws_with([&] { Tokenizer::load(dir / "gpt2_tokenizer.bin").encode("a"); },
                      "token 256 is not a merge of two tokens before it") == 2);
}

TEST_CASE("wordpiece: the longest piece first, [UNK] for what has none", "[tokenizer]") {
    TempDir dir;
    const std::string pieces =
        "[PAD]\n[UNK]\n[CLS]\n[SEP]\nun\n##able\n##aff\n##a\nplay\n##ing\n##in\n,\nplaying\n\xE4\xBD\xA0\n##s\na\n##\n";
    write_file(dir / "vocab.txt", pieces + "##\xE4\ni\nunaf\n");
    CHECK(refused(dir.path, "vocab.txt: line 18 is not UTF-8 at its byte 3") == 2);
    write_file(dir / "vocab.txt", "a\n" + pieces);      // `a` is there twice: the last counts, as in BERT's own code
    CHECK(Tokenizer::load(dir.path).encode("a") == std::vector<int>{16});
    write_file(dir / "vocab.txt", pieces + "i\nunaf\n\xC3\x9F\n##\xC3\x9F\n");
    const Tokenizer t = Tokenizer::load(dir.path);
    const struct { const char* text; const char* tokens; } table[] = {
        {"unaffable", "[UNK]"},                         // greedy: "unaf" leaves "fable", which begins with no piece
        {"unaable", "un|##a|##able"}, {"Playing, PLAYINGS", "playing|,|playing|##s"}, {"playins", "play|##in|##s"},
        {"playx", "[UNK]"},
        {"\xE4\xBD\xA0" "a", "\xE4\xBD\xA0|a"}, {"[MASK]", "[UNK]|[UNK]|[UNK]"}, {"\xC3\x80 \xC3\xAE", "a|i"},
        {"##s", "[UNK]|[UNK]|[UNK]"},
        {" \x01\n", ""}, {"pl\xFF" "ay", "play"}, {"", ""}};
    for (const auto& row : table) {
        INFO(row.text);
        CHECK(token_text(t, row.text) == row.tokens);
    }
    CHECK(t.encode("a unaa") == std::vector<int>{15, 4, 7, 7});
    CHECK(t.encode(std::string(100, 'a')).size() == 100);
    CHECK(t.encode(std::string(101, 'a')) == std::vector<int>{1});
    // 100 characters: with marks, which do not count; of two bytes each
    std::string accented, sharp;
    for (int i = 0; i < 100; i++) { accented += "\xC3\xA1\xCC\x81"; sharp += "\xC3\x9F"; }
    CHECK(t.encode(sharp).size() == 100);
    CHECK(t.encode(sharp + "s") == std::vector<int>{1});
    CHECK(t.encode(accented).size() == 100);
    CHECK(t.encode(accented + "s") == std::vector<int>{1});
    CHECK(t.decode(t.encode("Unaable, playings")) == "unaable , playings");
}

TEST_CASE("tokenizer: what the fuzzer checks holds for seeded inputs", "[tokenizer]") {
    std::vector<std::string> seeds = tokenizer_seeds();
    SmallBpe small;                                     // which can encode
    small.merge("a", "a");
    small.merge("\xC3", "\xA9");
    seeds.push_back(std::string(1, '\0') + encoder_json(small.tokens) + "\x01" + small.merges_text());
    seeds.push_back("\x04" + tokenizer_json(small).dump());
    const std::string alphabet = std::string("\0\n\r\t ", 5) + "a'strelvmd019!#[]{}\",:"
                                 "\x7F\x80\x8F\x90\x9F\xA0\xA9\xBF\xC0\xC2\xC3\xE0\xE3\xED\xEF\xF0\xF4\xFF";
    int runs = 0;
    for (uint64_t n = 0; n < 4000; n++) {
        std::string data = seeds[n % 8 < 4 ? 0 : n % seeds.size()];
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
    CHECK(runs == 4000);
    int wrong = 0;                                      // and bytes of every value
    for (uint64_t n = 0; n < 2000; n++) {
        std::string data = "\x03";
        for (uint64_t i = 0; i < 1 + n % 61; i++) { data += (char)hash64(37, n, i); }
        try { LLVMFuzzerTestOneInput((const uint8_t*)data.data(), data.size()); } catch (const Error&) { wrong++; }
    }
    CHECK(wrong == 0);
}

TEST_CASE("tokenizer: hostile encoder.json", "[tokenizer]") {
    TempDir dir;
    const std::string path = dir / "encoder.json";
    const struct { const char* json; const char* text; } table[] = {
        {"", "not valid JSON"}, {"{", "not valid JSON"}, {"{\"a\": 0} x", "not valid JSON"}, {"{\"\xFF\": 0}", "not"},
        {"[0]", "expected an object of 1 to 1048576 tokens, got an array of 1"}, {"{}", "expected an object of 1 to"},
        {"{\"a\": 1}", "\"a\": expected an integer from 0 to 0, got 1"},
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
    CHECK(refused(path, "expected a file of at most 16.8 MB, got") == 2);
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
        CHECK(throws_with([&] { t.decode(8); }, path + ": expected a token from 0 to 7, got 8") == 2);
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
    CHECK(refused(path, "line 2: expected a token of at most 1024 bytes, got 1025") == 2);
    std::string lines = "[UNK]\n";
    while (lines.size() < 2 * (size_t)Tokenizer::MAX_TOKENS + 6) { lines += "a\n"; }
    write_file(path, lines);
    CHECK(refused(path, "expected at most 1048576 lines, got more") == 2);
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
    write_file(path, llmc_bytes(std::vector<std::string>(50257, "a"), 1, 0));       // version 1 was only GPT-2's
    CHECK(Tokenizer::load(path).eot == 50256);
    const std::string good = llmc_bytes(tokens, 2, 4);
    const int32_t field[] = {20240328, 2, 5, 4};
    const char* text[] = {"magic number", "version", "tokens, which its", "end-of-text id"};
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
            const char* more = below_eot ? "expected an end-of-text id from 0 to" : "truncated";
            CHECK(refused(path, below_eot || too_many ? more : text[f]) == 2);
        }
    }
    for (size_t bytes = 0; bytes < good.size(); bytes++) {
        write_file(path, good.substr(0, bytes));
        const bool header = bytes < 1024, few = bytes < 1034;
        const char* body = few ? "which its" : "(is it truncated?)";
        CHECK(refused(path, header ? "expected a header of 1024 bytes, got" : body) == 2);
    }
    write_file(path, good + "x");
    CHECK(refused(path, strprintf("expected %zu bytes, where its 5 tokens end, got %zu", good.size(),
                                  good.size() + 1)) == 2);
    write_file(path, llmc_bytes({"a", "", "bb", "cc"}, 2, 0));
    CHECK(refused(path, "token 1 is empty") == 2);
}

TEST_CASE("tokenizer: paths with no tokenizer, or with two", "[tokenizer]") {
    TempDir dir;
    CHECK(refused(dir / "missing.json", "missing.json: cannot open") == 2);
    CHECK(refused(dir.path, dir.path +
                  ": expected vocab.json (or encoder.json), vocab.txt, tokenizer.json or gpt2_tokenizer.bin in this "
                  "directory, got none") == 2);
    write_file(dir / "vocab.bpe", "#version: 0.2\n");
    CHECK(refused(dir / "vocab.bpe", "vocab.bpe: expected vocab.json (or encoder.json), vocab.txt, ") == 2);
    write_file(dir / "vocab.txt", "[UNK]\n");
    write_file(dir / "encoder.json", "{\"a\": 0}");
    CHECK(refused(dir.path, "expected one tokenizer, got " + (dir / "encoder.json") + " and " +
                  (dir / "vocab.txt")) == 2);
    CHECK(Tokenizer::load(dir / "vocab.txt").vocab_size() == 1);
    alarm(60);
    REQUIRE(mkfifo((dir / "fifo.bin").c_str(), 0600) == 0);
    CHECK(refused(dir / "fifo.bin", "not a regular file") == 2);
    alarm(0);
}

// tokenizer.json of [PAD] [UNK] [CLS] the ##n
nlohmann::json word_pieces_json() {
    const nlohmann::json vocab = {{"[PAD]", 0}, {"[UNK]", 1}, {"[CLS]", 2}, {"the", 3}, {"##n", 4}};
    return {{"added_tokens", {{{"id", 1}, {"content", "[UNK]"}, {"special", true}}}},
            {"normalizer", {{"type", "BertNormalizer"}, {"clean_text", true}, {"handle_chinese_chars", true},
                            {"strip_accents", nullptr}, {"lowercase", true}}},
            {"pre_tokenizer", {{"type", "BertPreTokenizer"}}},
            {"post_processor", {{"type", "BertProcessing"}, {"cls", {"[CLS]", 2}}, {"sep", {"[SEP]", 5}}}},
            {"model", {{"type", "WordPiece"}, {"unk_token", "[UNK]"}, {"continuing_subword_prefix", "##"},
                       {"max_input_chars_per_word", 100}, {"vocab", vocab}}}};
}

TEST_CASE("tokenizer: what a checkpoint writes is the same tokenizer, by the libraries' names", "[tokenizer]") {
    SmallBpe bpe;
    bpe.merge("t", "h");
    bpe.merge("th", "e");
    bpe.merge(" ", "the");
    bpe.merge("\xC3", "\xA9");
    const std::string text = "the then  the caf\xC3\xA9 \xFF";
    const std::string pieces = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\n##n\ncafe\n";
    const std::string llmc = llmc_bytes(bpe.tokens, 1, 0), odd = llmc_bytes(bpe.tokens, 2, 7);
    const struct { const char* name; std::string bytes; const char* written; } table[] = {
        {"encoder.json", encoder_json(bpe.tokens), "vocab.json|merges.txt"},
        {"vocab.json", encoder_json(bpe.tokens), "vocab.json|merges.txt"},
        {"gpt2_tokenizer.bin", llmc, "vocab.json|merges.txt"},
        {"gpt2_tokenizer.bin", odd, "gpt2_tokenizer.bin"},                // whose end has no name in the other files
        {"my.model.json", tokenizer_json(bpe).dump(), "tokenizer.json"},
        {"bert-vocab.txt", pieces, "vocab.txt"}};
    for (const auto& row : table) {
        INFO(row.name);
        TempDir from, to;
        write_file(from / row.name, row.bytes);
        std::string merges = bpe.merges_text();
        merges.erase(0, merges.find('\n') + 1);                            // without its version, and
        merges.pop_back();                                                  // the last line end
        write_file(from / "vocab.bpe", merges);
        const Tokenizer t = Tokenizer::load(from / row.name);
        TempDir::remove(from.path);                                         // nothing is read from there again
        for (const auto& file : t.files) { write_file(to / file.first, file.second); }
        CHECK(written_names(t) == row.written);
        const Tokenizer again = Tokenizer::load(to.path);
        CHECK(again.tokens == t.tokens);
        CHECK(again.eot == t.eot);
        const bool same = again.files == t.files;
        CHECK(same);
        CHECK(t.cannot_encode == "");
        CHECK(again.cannot_encode == "");
        CHECK(again.encode(text) == t.encode(text));
        if (!t.word_piece) { CHECK(token_text(t, "the then") == "the| the|n"); }
        if (t.files.size() == 2) { CHECK(t.files[1].second == bpe.merges_text()); }
    }
    // a vocabulary that cannot encode stays one that says why
    TempDir from, to;
    write_file(from / "encoder.json", encoder_json(bpe.tokens));
    write_file(from / "merges.txt", "t h\n");
    const Tokenizer t = Tokenizer::load(from.path);
    for (const auto& file : t.files) { write_file(to / file.first, file.second); }
    CHECK(t.cannot_encode.find("no merge of") == 0);
    CHECK(Tokenizer::load(to.path).cannot_encode.find("no merge of") == 0);
}

TEST_CASE("tokenizer: transformers' tokenizer.json, and ones that say something else", "[tokenizer]") {
    SmallBpe bpe;
    bpe.merge("t", "h");
    bpe.merge("th", "e");
    const nlohmann::json good = tokenizer_json(bpe);
    TempDir dir;
    const std::string path = dir / "tokenizer.json";
    const auto load = [&](const nlohmann::json& j) {
        write_file(path, j.dump());
        return Tokenizer::load(dir.path);
    };
    // 1 what is read
    CHECK(load(good).vocab_size() == 259);
    CHECK(load(good).eot == 258);
    CHECK(token_text(load(good), "the") == "the");
    nlohmann::json other = good;
    other["model"]["merges"] = {"t h", "th e"};                 // as they were written before
    other["model"]["vocab"]["<|endoftext|>"] = 258;             // the special token is in the vocabulary, too
    CHECK(token_text(load(other), "the") == "the");
    CHECK(load(other).tokens == load(good).tokens);

    const nlohmann::json bert = word_pieces_json();
    CHECK(load(bert).word_piece);
    CHECK(load(bert).encode("The then, x") == std::vector<int>{3, 3, 4, 1, 1});

    // 2 what is refused
    const struct { const nlohmann::json& of; const char *at, *value, *said; } table[] = {
        {good, "/model/type", "\"Unigram\"", "expected a model of type BPE or WordPiece, got \"Unigram\""},
        {good, "/model/type", "\"\\u001b[2J\"", "got \"\\x1b[2J\""},
        {good, "/normalizer", "{\"type\": \"NFC\"}", "normalizer: expected null, got an object of 1"},
        {good, "/pre_tokenizer", "null", "pre_tokenizer.type: expected \"ByteLevel\", got null"},
        {good, "/pre_tokenizer/type", "\"Split\"", "pre_tokenizer.type: expected \"ByteLevel\", got \"Split\""},
        {good, "/pre_tokenizer/add_prefix_space", "1", "pre_tokenizer.add_prefix_space: expected true or false, got 1"},
        {good, "/pre_tokenizer/use_regex", "false", "pre_tokenizer.use_regex: expected true, got false"},
        {good, "/model/dropout", "0.1", "model.dropout: expected null, got 0.1"},
        {good, "/model/vocab", "[]", "expected an object of 1 to"},
        {good, "/model/vocab/A", "-1", "\"A\": expected an integer from 0 to 257, got -1"},
        {good, "/model/merges", "[\"t\"]", "expected two tokens with a space between them, got \"t\""},
        {good, "/model/merges", "[[\"t\"]]", "merges: expected two tokens, got an array of 1"},
        {good, "/model/merges", "[[\"t\", 1]]", "merges: expected two tokens, got an array of 2"},
        {good, "/added_tokens/0/id", "259", "\"<|endoftext|>\" has the id 259 of another token, or not the next free"},
        {good, "/added_tokens/0/id", "5", "added_tokens: \"<|endoftext|>\" has the id 5 of another token"},
        {good, "/added_tokens/0/id", "-1", "\"id\": expected an integer from 0 to 1048576, got -1"},
        {good, "/added_tokens/0/content", "\"\"", "added_tokens: \"\" has the id 258 of another token"},
        {good, "/added_tokens/0/single_word", "true", "\"<|endoftext|>\": single_word: expected false, got true"},
        {good, "/post_processor", "{\"type\": \"RobertaProcessing\"}", "post_processor: expected \"A\" around a text"},
        {bert, "/post_processor", "{\"type\": \"TemplateProcessing\", \"single\": [{\"Sequence\": {\"id\": \"A\"}}]}",
         "post_processor: expected \"[CLS] A [SEP]\" around a text A, got \"A\" (TemplateProcessing)"},
        {good, "/added_tokens", "7", "added_tokens: expected a list, got 7"},
        {bert, "/post_processor", "null", "around a text A, got \"A\" (null)"},
        {bert, "/normalizer/lowercase", "0", "normalizer.lowercase: expected true or false, got 0"},
        {bert, "/normalizer/clean_text", "false", "normalizer.clean_text: expected true, got false"},
        {bert, "/normalizer/strip_accents", "false", "strip_accents: expected true, as lower case, got false"},
        {bert, "/normalizer", "null", "normalizer.type: expected \"BertNormalizer\", got null"},
        {bert, "/pre_tokenizer/type", "\"Whitespace\"", "expected \"BertPreTokenizer\", got \"Whitespace\""},
        {bert, "/model/unk_token", "\"[PAD]\"", "model.unk_token: expected \"[UNK]\", got \"[PAD]\""},
        {bert, "/model/vocab/the", "4", "two tokens have the id 4"},
        {bert, "/model/vocab", "{\"[UNK]\": 0, \"a\\nb\": 1}", "a token has a line end in it"},
        {bert, "/model/vocab", "{\"a\": 0}", "no line [UNK]"}};
    for (const auto& row : table) {
        nlohmann::json j = row.of;
        j[nlohmann::json::json_pointer(row.at)] = nlohmann::json::parse(row.value);
        if (strcmp(row.at, "/model/vocab") == 0 && &row.of == &bert) { j["added_tokens"] = nlohmann::json::array(); }
        write_file(path, j.dump());
        INFO(row.at << " = " << row.value);
        CHECK(refused(path, row.said) == 2);
        CHECK(refused(path, path + ": ") == 2);
    }
}

// The files of a directory, in the order of their names
void write_files(const TempDir& dir, const std::map<std::string, std::string>& files) {
    for (const std::string& name : list_directory(dir.path)) { io_unlink(dir / name); }
    for (const auto& [name, text] : files) { write_file(dir / name, text); }
}

TEST_CASE("tokenizer: settings beside a vocabulary are honoured, or refused by name", "[tokenizer]") {
    TempDir dir, copy;
    const std::string pieces = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nParis\nparis\n\xC3\xA9\ne\n\xE4\xBD\xA0\n";
    const std::string text = "Paris paris \xC3\xA9 \xE4\xBD\xA0\xE4\xBD\xA0";
    SmallBpe bpe;
    bpe.merge(" ", "a");
    const std::string vocabulary = encoder_json(bpe.tokens), merges = bpe.merges_text();
    // 1 of BERT: what transformers gives for the text
    const struct { const char *config, *tokens; } read[] = {
        {"{}", "paris|paris|e|\xE4\xBD\xA0|\xE4\xBD\xA0"},
        {R"({"do_lower_case": false})", "Paris|paris|\xC3\xA9|\xE4\xBD\xA0|\xE4\xBD\xA0"},
        {R"({"do_lower_case": false, "strip_accents": false})", "Paris|paris|\xC3\xA9|\xE4\xBD\xA0|\xE4\xBD\xA0"},
        {R"({"tokenizer_class": "BertTokenizerFast", "tokenize_chinese_chars": false, "never_split": null})",
         "paris|paris|e|[UNK]"}};
    for (const auto& row : read) {
        INFO(row.config);
        write_files(dir, {{"vocab.txt", pieces}, {"tokenizer_config.json", row.config}});
        CHECK(token_text(Tokenizer::load(dir.path), text) == row.tokens);
        CHECK(token_text(Tokenizer::load(dir / "vocab.txt"), text) == row.tokens);
    }
    // 2 of GPT-2: a space before a text, and after each added token
    const std::string spaced = R"({"add_prefix_space": true, "eos_token": "[PAD]"})";
    write_files(dir, {{"vocab.json", vocabulary}, {"merges.txt", merges}, {"tokenizer_config.json", spaced}});
    CHECK(token_text(Tokenizer::load(dir.path), "a[PAD]a\na") == " a|[PAD]| a|\n|a");
    CHECK(token_text(Tokenizer::load(dir.path), " a") == " a");
    CHECK(Tokenizer::load(dir.path).encode("").empty());
    CHECK(Tokenizer::load(dir.path).eot == 257);
    // 3 refused
    const struct { const char *name, *text, *said; } table[] = {
        {"tokenizer_config.json", R"({"strip_accents": false})", "strip_accents: expected true, as lower case, got"},
        {"tokenizer_config.json", R"({"do_lower_case": "no"})", "do_lower_case: expected true or false, got \"no\""},
        {"tokenizer_config.json", R"({"do_basic_tokenize": false})", "do_basic_tokenize: expected true"},
        {"tokenizer_config.json", R"({"never_split": ["a"]})", "never_split: expected null"},
        {"tokenizer_config.json", R"({"split_special_tokens": true})", "split_special_tokens: expected false"},
        {"tokenizer_config.json", R"({"add_bos_token": true})", "add_bos_token: expected false"},
        {"tokenizer_config.json", R"({"unk_token": "[PAD]"})", "unk_token: expected \"[UNK]\", got \"[PAD]\""},
        {"tokenizer_config.json", R"({"mecab_kwargs": {}})", "\"mecab_kwargs\" is not a known key of a tokenizer"},
        {"tokenizer_config.json", R"({"tokenizer_class": "BertJapaneseTokenizer"})",
         "tokenizer_class: expected \"BertTokenizer\" for " },
        {"config.json", R"({"model_type": "gpt2"})", "tokenizer_class: expected \"BertTokenizer\""},
        {"special_tokens_map.json", R"({"cls_token": {"content": "<s>"}})", "cls_token: expected \"[CLS]\", got \"<s>"},
        {"tokenizer_config.json", "[]", "tokenizer_config.json: expected an object"},
        {"tokenizer.json", R"({"model": {"type": "WordPiece", "vocab": {"[UNK]": 0}},
            "normalizer": {"type": "BertNormalizer"}, "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": {"type": "BertProcessing", "cls": ["[CLS]", 2], "sep": ["[SEP]", 3]}})",
         "expected the vocabulary and the merges of "}};
    for (const auto& row : table) {
        INFO(row.text);
        write_files(dir, {{"vocab.txt", pieces}, {row.name, row.text}});
        CHECK(refused(dir.path, row.said) == 2);
        CHECK(refused(dir / "vocab.txt", std::string("/") + row.name) == 2);
    }
    // 4 tokenizer.json beside the vocabulary is read, and must have what the configuration has, or its class without it
    nlohmann::json whole = word_pieces_json();
    whole["normalizer"]["lowercase"] = false;
    const std::string lines = "[PAD]\n[UNK]\n[CLS]\nthe\n##n\n";
    write_files(dir, {{"vocab.txt", lines}, {"tokenizer.json", whole.dump()}});
    CHECK(token_text(Tokenizer::load(dir.path), "then Then [CLS]") == "the|##n|[UNK]|[UNK]|[UNK]|[UNK]");
    CHECK(written_names(Tokenizer::load(dir.path)) == "tokenizer.json");
    const std::string said = "do_lower_case: expected false, as normalizer.lowercase of ";
    write_file(dir / "config.json", R"({"model_type": "bert"})");
    CHECK(refused(dir.path, said) == 2);
    CHECK(refused(dir.path, "got true, transformers' value without this key") == 2);
    write_file(dir / "tokenizer_config.json", R"({"tokenizer_class": "PreTrainedTokenizerFast"})");
    CHECK(token_text(Tokenizer::load(dir.path), "then Then") == "the|##n|[UNK]");
    write_file(dir / "tokenizer_config.json", R"({"do_lower_case": true})");
    CHECK(refused(dir.path, said) == 2);
    write_file(dir / "tokenizer_config.json", R"({"do_lower_case": false})");
    CHECK(token_text(Tokenizer::load(dir.path), "then Then [CLS]") == "the|##n|[UNK]|[CLS]");    // its class adds it
    // another split, though vocab.json and merges.txt are there
    nlohmann::json split = tokenizer_json(bpe);
    split["pre_tokenizer"] = {{"type", "Sequence"}};
    write_files(dir, {{"vocab.json", vocabulary}, {"merges.txt", merges}, {"tokenizer.json", split.dump()}});
    CHECK(refused(dir.path, "tokenizer.json: pre_tokenizer.type: expected \"ByteLevel\", got \"Sequence\"") == 2);
    write_files(dir, {{"vocab.json", vocabulary}, {"merges.txt", "#version: 0.2\n"},
                      {"tokenizer.json", tokenizer_json(bpe).dump()}});
    CHECK(token_text(Tokenizer::load(dir.path), " a") == " a");             // no merges to compare
    SmallBpe other = bpe;
    other.merge("b", "c");
    write_files(dir, {{"vocab.json", encoder_json(other.tokens)}, {"merges.txt", other.merges_text()},
                      {"tokenizer.json", tokenizer_json(bpe).dump()}});
    CHECK(refused(dir.path, "expected the vocabulary and the merges of " + (dir / "vocab.json")) == 2);
}

TEST_CASE("tokenizer: added tokens are found whole, wherever they are listed", "[tokenizer]") {
    TempDir dir;
    SmallBpe bpe;
    bpe.merge("a", "b");
    bpe.merge("p", "a");
    const std::string vocabulary = encoder_json(bpe.tokens), merges = bpe.merges_text();
    const std::string file = "tokenizer_config.json";
    const auto load = [&](std::map<std::string, std::string> more) {
        more.insert({{"vocab.json", vocabulary}, {"merges.txt", merges}});
        write_files(dir, more);
        return Tokenizer::load(dir.path);
    };
    // 1 the same tokens by each of the lists
    nlohmann::json whole = tokenizer_json(bpe);
    whole["added_tokens"] = {{{"id", 258}, {"content", "pad me"}}, {{"id", 259}, {"content", "\xC3\xA9"}}};
    const std::map<std::string, std::string> lists[] = {
        {{"added_tokens.json", R"({"\u00e9": 259, "pad me": 258})"}},
        {{"added_tokens.json", R"({"pad me": 258})"}, {"special_tokens_map.json", R"({"pad_token": "\u00e9"})"}},
        {{file, R"({"added_tokens_decoder": {"259": {"content": "\u00e9"}, "258": {"content": "pad me"}}})"},
         {"added_tokens.json", R"({"not read": 258})"}},
        {{file, R"({"additional_special_tokens": ["pad me", {"content": "\u00e9"}]})"}},
        {{file, R"({"bos_token": "pad me", "unk_token": {"content": "\u00e9"}, "eos_token": null})"}},
        {{"tokenizer.json", whole.dump()}}};
    for (const auto& list : lists) {
        const Tokenizer t = load(list);
        INFO(list.begin()->first << " " << list.begin()->second);
        CHECK(t.vocab_size() == 260);
        CHECK(token_text(t, "ab pad mepad\xC3\xA9 ") == "ab| |pad me|pa|d|\xC3\xA9| ");
        CHECK(t.decode(t.encode("ab pad me")) == "ab pad me");
    }
    // 2 white space on a side of them; the longest first; those that are not normalized before those that are
    const Tokenizer strips = load({{file, R"({"added_tokens_decoder": {
        "258": {"content": "<x>", "lstrip": true, "rstrip": true}, "259": {"content": "<y>", "lstrip": true},
        "260": {"content": " "}, "261": {"content": "q<x>"}, "262": {"content": "<y>z"},
        "263": {"content": "b<", "special": true}}})"}});
    const struct { const char* text; const char* tokens; } table[] = {
        {"a<x>\t\n\xC2\xA0" "b", "a|<x>|b"}, {"a\xC2\xA0<x>", "a|<x>"}, {"a\n<y>\n", "a|<y>|\n"}, {"q<x>", "q<x>"},
        {"<y>z<y>", "<y>z|<y>"}, {"ab<x>", "a|b<|x|>"}, {"a <x>  <y>", "a| |<x>| | |<y>"}, {" ", " "}};
    for (const auto& row : table) {
        INFO(row.text);
        CHECK(token_text(strips, row.text) == row.tokens);
    }
    // 3 a special token that the vocabulary has is one in a directory of transformers, and plain text elsewhere
    std::vector<std::string> tokens = bpe.tokens;
    tokens.push_back("<|endoftext|>");
    const auto with_end = [&](const std::string& name, const std::string& text) {
        write_files(dir, {{"vocab.json", encoder_json(tokens)}, {"merges.txt", merges}, {name, text}});
        return Tokenizer::load(dir.path).encode("<|endoftext|>").size();
    };
    CHECK(with_end("config.json", R"({"model_type": "gpt2"})") == 1);
    CHECK(with_end("special_tokens_map.json", R"({"eos_token": "<|endoftext|>"})") == 1);
    CHECK(with_end("config.json", "{}") == 13);
    // 4 of BERT: added tokens are searched for in lower case, special ones as they are; none is a piece of a word
    const std::string pieces = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n##s\n";
    write_files(dir, {{"vocab.txt", pieces}, {"special_tokens_map.json", R"({"additional_special_tokens": ["<B>"]})"},
                      {"added_tokens.json", R"({"New\u00e9": 7, "<B>": 8})"}});
    CHECK(token_text(Tokenizer::load(dir.path), "a NEWEs <B> <b>as") ==
          "a|New\xC3\xA9|[UNK]|<B>|[UNK]|[UNK]|[UNK]|a|##s");
    // 5 a vocabulary may have them inside, spelled as text, and without a merge
    tokens = bpe.tokens;
    tokens.insert(tokens.begin() + 9, "no merge");
    nlohmann::json inside = tokenizer_json(bpe);
    inside["model"]["vocab"] = parse_json<nlohmann::json>(encoder_json(tokens), "vocab");
    inside["model"]["vocab"].erase(spelled("no merge"));
    inside["model"]["vocab"]["no merge"] = 9;
    inside["added_tokens"] = {{{"id", 9}, {"content", "no merge"}}};
    write_files(dir, {{"tokenizer.json", inside.dump()}});
    CHECK(token_text(Tokenizer::load(dir.path), "abno merge") == "ab|no merge");
    // 6 refused
    const struct { const char *name, *text, *said; } bad[] = {
        {"added_tokens.json", R"({"x": 300})", "\"x\" has the id 300 of another token, or not the next free one, 258"},
        {"added_tokens.json", R"({"x": 3})", "added_tokens: \"x\" has the id 3 of another token"},
        {"added_tokens.json", R"({"x": "258"})", "added_tokens.json: \"x\": expected an integer"},
        {"added_tokens.json", R"({"x": 258, "y": 258})", "\"y\" has the id 258 of another token"},
        {"tokenizer_config.json", R"({"added_tokens_decoder": {"258": {"content": "x", "single_word": true}}})",
         "added_tokens_decoder: \"x\": single_word: expected false, got true"},
        {"tokenizer_config.json", R"({"added_tokens_decoder": {"258": {"content": ""}}})", "has the id 258 of another"},
        {"tokenizer_config.json", R"({"added_tokens_decoder": 1})", "added_tokens_decoder: expected a list, got 1"}};
    for (const auto& row : bad) {
        INFO(row.text);
        CHECK(throws_with([&] { load({{row.name, row.text}}); }, row.said) == 2);
    }
}

TEST_CASE("real data: every golden text has its ids, and the ids their text", "[tokenizer][real]") {
    const std::string data = real_data();
    if (data.empty()) { return; }
    for (const bool is_gpt2 : {true, false}) {
        const Tokenizer t = Tokenizer::load(data + (is_gpt2 ? "encoder.json" : "vocab.txt"));
        CHECK(t.vocab_size() == (is_gpt2 ? 50257 : 30522));
        CHECK(t.eot == (is_gpt2 ? 50256 : 102));
        const std::string name = is_gpt2 ? "golden_gpt2_bpe.jsonl" : "golden_bert_wordpiece.jsonl";
        const std::string lines = read_file(data + name);
        int count = 0, decoded = 0;
        for (size_t begin = 0, end; begin < lines.size(); begin = end + 1, count++) {
            end = std::min(lines.find('\n', begin), lines.size());
            const Json j = parse_json(lines.substr(begin, end - begin), name);
            const std::string text = json_string(j, "text", name);
            const std::vector<int> ids = j["ids"].get<std::vector<int>>();
            INFO(name << ": " << text);
            CHECK(t.encode(text) == ids);
            // WordPiece does not keep case, accents or spacing; words of plain letters survive it
            bool plain = !ids.empty() && text.find_first_not_of("abcdefghijklmnopqrstuvwxyz ") == std::string::npos &&
                         text.find("  ") == std::string::npos && text.front() != ' ' && text.back() != ' ';
            plain = plain && std::count(ids.begin(), ids.end(), 100) == 0;          // [UNK]
            if (!is_gpt2 && !plain) { continue; }
            Utf8Stream utf8;
            std::string streamed;
            for (size_t i = 0; i < ids.size(); i++) { streamed += utf8.push(t.decode(ids[i], i == 0)); }
            CHECK(t.decode(ids) == text);
            CHECK(streamed + utf8.flush() == text);
            decoded++;
        }
        CHECK(count == (is_gpt2 ? 456 : 454));
        CHECK(decoded > (is_gpt2 ? 455 : 5));
    }
}

TEST_CASE("real data: whole files encode to the golden hashes and to the shards of tiny Shakespeare",
          "[tokenizer][real]") {
    CHECK(sha256("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(sha256("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    const std::string data = real_data();
    if (data.empty()) { return; }
    const Tokenizer gpt2 = Tokenizer::load(data + "encoder.json"), bert = Tokenizer::load(data + "vocab.txt");
    // GPT-2's merges, recovered from the order of its tokens
    TempDir dir;
    write_file(dir / "gpt2_tokenizer.bin", llmc_bytes(gpt2.tokens, 2, gpt2.eot));
    const Tokenizer llmc = Tokenizer::load(dir.path);
    const auto hash =
        [](const std::vector<int>& ids) { return sha256(bytes_of(std::vector<uint16_t>(ids.begin(), ids.end()))); };
    int files = 0;
    for (const Json& j : parse_json(read_file(data + "golden_corpus.json"), "golden_corpus.json")) {
        const std::string file = json_string(j, "file", "golden_corpus.json");
        if (j.count("gpt2_tokens") == 0) { continue; }
        std::string path = data + file;
        if (!path_exists(path)) {                       // wikitext-2/train.txt comes as .xz
            path = dir / "unpacked";
            const bool unpacked = system(("xz -dc '" + data + file + ".xz' >'" + path + "'").c_str()) == 0;
            if (!unpacked) { WARN("SKIPPED: no xz to unpack " << file); continue; }
        }
        INFO(file);
        const std::string text = read_file(path);
        REQUIRE(sha256(text) == json_string(j, "sha256", file));
        const double start = cpu_seconds();
        const std::vector<int> ids = gpt2.encode(text);
        const double middle = cpu_seconds();
        const std::vector<int> pieces = bert.encode(text);
        const double end = cpu_seconds();
        CHECK((int64_t)ids.size() == json_int(j, "gpt2_tokens", 0, INT_MAX, file));
        CHECK(hash(ids) == json_string(j, "gpt2_ids_u16le_sha256", file));
        CHECK((int64_t)pieces.size() == json_int(j, "bert_uncased_tokens", 0, INT_MAX, file));
        CHECK(hash(pieces) == json_string(j, "bert_uncased_ids_u16le_sha256", file));
        CHECK(llmc.encode(text) == ids);
        CHECK(gpt2.decode(ids) == text);
        CHECK((double)text.size() / 1e6 / (middle - start) > 1.0);      // MB/s
        CHECK((double)text.size() / 1e6 / (end - middle) > 1.0);
        files++;
    }
    CHECK(files >= 4);
    std::vector<int> shakespeare;
    const std::string text = read_file(data + "input.txt");
    for (size_t begin = 0; begin < text.size();) {
        const size_t gap = text.find("\n\n", begin), end = gap == std::string::npos ? text.size() : gap + 2;
        const std::vector<int> ids = gpt2.encode(text.substr(begin, end - begin));
        shakespeare.push_back(gpt2.eot);
        shakespeare.insert(shakespeare.end(), ids.begin(), ids.end());
        begin = end;
    }
    const std::vector<uint16_t> tokens(shakespeare.begin(), shakespeare.end());
    const std::string val = read_file(data + "tiny_shakespeare_val.bin"),
        train = read_file(data + "tiny_shakespeare_train.bin");
    CHECK(bytes_of(tokens) == val.substr(1024) + train.substr(1024));
}
