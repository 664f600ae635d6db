// UTF-8, the classes of characters and their folded forms, and text cut into words as GPT-2 and BERT cut it.
#include "llmc/base/portable.h"
#include "llmc/engine/text/words.h"
#include "test/files.h"
#include "test/sha256.h"

namespace {

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

std::string gpt2_cut(const std::string& text) {
    std::vector<std::string> words;
    gpt2_words(text, [&](size_t begin, size_t end) { words.push_back(text.substr(begin, end - begin)); });
    return joined(words);
}
std::string bert_cut(const std::string& text) {
    std::vector<std::string> words;
    bert_words(bert_normalized(text), [&](const std::string& word, int) { words.push_back(word); });
    return joined(words);
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

TEST_CASE("unicode: the tables have as many characters per class as Unicode 16", "[tokenizer]") {
    const UnicodeTables& unicode = UnicodeTables::get();
    REQUIRE(unicode.classes.size() == 0x110000);
    int counts[7] = {};
    for (const uint8_t k : unicode.classes) {
        REQUIRE(k < 7);
        counts[k]++;
    }
    CHECK(counts[UNICODE_LETTER] == 141028);
    CHECK(counts[UNICODE_NUMBER] == 1911);
    CHECK(counts[UNICODE_SPACE] == 25);
    CHECK(counts[UNICODE_MARK] == 2020);
    CHECK(counts[UNICODE_PUNCTUATION] == 855 + 9);                      // and $ + < = > ^ ` | ~
    CHECK(counts[UNICODE_CONTROL] == 65 - 6 + 170 + 137468);            // Cc, but for \t..\r and U+0085; Cf, Co
    const struct { UnicodeClass k; std::vector<uint32_t> characters; } table[] = {
        {UNICODE_LETTER, {'A', 'z', 0xAA, 0xB5, 0xBA, 0xC0, 0xFF, 0x1C5, 0x2B0, 0x3A9, 0x5D0, 0x905, 0x3042, 0x4E00,
                          0xAC00, 0xFF21, 0x10400, 0x2FA1D}},
        {UNICODE_NUMBER, {'0', '9', 0xB2, 0xBD, 0x661, 0x967, 0x2167, 0x2460, 0x3007, 0xFF19, 0x1D7D8}},
        {UNICODE_SPACE, {'\t', '\n', 0x0B, 0x0C, '\r', ' ', 0x85, 0xA0, 0x1680, 0x2000, 0x200A, 0x2028, 0x2029, 0x202F,
                         0x205F, 0x3000}},
        {UNICODE_MARK, {0x300, 0x345, 0x36F, 0x591, 0x64B, 0x94D, 0x3099, 0xFE0F, 0x1E944}},
        {UNICODE_PUNCTUATION, {'!', '/', ':', '@', '[', '`', '{', '~', '$', '_', 0xA1, 0xB7, 0xBF, 0x2014, 0x2026,
                               0x3001, 0xFF0C}},
        {UNICODE_CONTROL, {0, 0x1C, 0x1F, 0x7F, 0x9F, 0xAD, 0x200B, 0x200D, 0x2060, 0xFEFF, 0xE000, 0xF8FF, 0x10FFFD}},
        {UNICODE_OTHER, {0xA2, 0xA9, 0xAC, 0xD7, 0x378, 0x903, 0x20AC, 0x20DD, 0x2192, 0xFFFD, 0x1F600,
                         0xFFFFF, 0x10FFFF}}};
    for (const auto& row : table) {
        for (const uint32_t c : row.characters) {
            INFO("U+" << std::hex << c);
            CHECK((int)unicode.classes[c] == (int)row.k);
        }
    }
}

TEST_CASE("unicode: folding decomposes, drops marks and makes lower case", "[tokenizer]") {
    const UnicodeTables& unicode = UnicodeTables::get();
    const auto folded = [&](uint32_t c) {
        std::vector<uint32_t> out;
        unicode.fold(c, [&](uint32_t f) { out.push_back(f); });
        return out;
    };
    const struct { uint32_t c; std::vector<uint32_t> to; } table[] = {
        {'A', {'a'}}, {'z', {'z'}}, {'7', {'7'}}, {0xC9, {'e'}}, {0xE7, {'c'}}, {0xD8, {0xF8}}, {0xDF, {0xDF}},
        {0x130, {'i'}}, {0x131, {0x131}},
        {0x141, {0x142}}, {0x1D5, {'u'}}, {0x1E9E, {0xDF}}, {0x1EA8, {'a'}}, {0x212A, {'k'}}, {0x212B, {'a'}},
        {0x2126, {0x3C9}}, {0x3A3, {0x3C3}},
        {0x3C2, {0x3C2}}, {0x386, {0x3B1}}, {0x1FBC, {0x3B1}}, {0x419, {0x438}}, {0x401, {0x435}}, {0x42F, {0x44F}},
        {0x10A0, {0x2D00}},
        {0x13A0, {0xAB70}}, {0x2160, {0x2170}}, {0x24B6, {0x24D0}}, {0xFF21, {0xFF41}}, {0x10400, {0x10428}},
        {0x304C, {0x304B}}, {0x30D1, {0x30CF}},
        {0x37E, {';'}}, {0xFB01, {0xFB01}}, {0xF900, {0x8C48}}, {0x2FA1D, {0x2A600}}, {0x2FA1E, {0x2FA1E}},
        {0x301, {}}, {0x344, {}}, {0x302E, {0x302E}},
        {0xAC00, {0x1100, 0x1161}}, {0xAC01, {0x1100, 0x1161, 0x11A8}}, {0xD55C, {0x1112, 0x1161, 0x11AB}},
        {0xD7A3, {0x1112, 0x1175, 0x11C2}},
        {0xD7A4, {0xD7A4}}, {0x9CB, {0x9C7, 0x9BE}}, {0xCCB, {0xCC2, 0xCD5}}, {0x1D160, {0x1D158, 0x1D165, 0x1D16E}},
        {0x10FFFF, {0x10FFFF}}};
    for (const auto& row : table) {
        INFO("U+" << std::hex << row.c);
        CHECK(folded(row.c) == row.to);
    }
    int changed = 0, wrong = 0;
    for (uint32_t c = 0; c <= 0x10FFFF; c++) {
        const std::vector<uint32_t> once = folded(c);
        changed += once != std::vector<uint32_t>{c};
        for (const uint32_t f : once) { wrong += folded(f) != std::vector<uint32_t>{f}; }
    }
    CHECK(changed == 3083 + 52 + 11172 + 2020);                         // to one character, to more, Hangul, marks
    CHECK(wrong == 0);                                                  // a folded character folds to itself
    // every entry: dev/unicode_table.py prints this sum, from Unicode 16's own tables
    Sha256 sum;
    for (uint32_t c = 0; c <= 0x10FFFF; c++) {
        std::vector<uint32_t> row = folded(c);
        row.insert(row.begin(), {unicode.classes[c], (uint32_t)row.size()});
        sum.update((const uint8_t*)row.data(), row.size() * sizeof(uint32_t));
    }
    CHECK(sum.hex() == "0dd770bda56c637a5f1ba0d4418af286b204b7bb1bd67dcdcf410a1006ef4c47");
}

TEST_CASE("gpt-2 words: what the regular expression matches", "[tokenizer]") {
    const struct { const char* text; const char* words; } table[] = {
        {"", ""}, {"Hello world", "Hello| world"}, {" a  b   c ", " a| | b|  | c| "}, {"a1b22", "a|1|b|22"},
        {"3.14, no!?", "3|.|14|,| no|!?"},
        {"I'm you're he'll we'd I've it's don't", "I|'m| you|'re| he|'ll| we|'d| I|'ve| it|'s| don|'t"},
        {"I'M IT'S", "I|'|M| IT|'|S"},
        {"'sir 's '", "'s|ir| '|s| '"}, {"''s", "''|s"}, {"'rest 'le", "'re|st| '|le"}, {"a 's", "a| '|s"},
        {"x  's", "x| | '|s"}, {" 'll", " '|ll"},
        {"a\n\nb", "a|\n|\n|b"}, {"a\n b", "a|\n| b"}, {"a \nb", "a| |\n|b"}, {"a\n", "a|\n"}, {"a \n\t ", "a| \n\t "},
        {"\t\tx", "\t|\t|x"},
        {"na\xC3\xAFve caf\xC3\xA9!", "na\xC3\xAFve| caf\xC3\xA9|!"}, {"e\xCC\x81t", "e|\xCC\x81|t"},
        {"\xC2\xBD 1\xC2\xB2", "\xC2\xBD| 1\xC2\xB2"},
        {"a\xC2\xA0" "b", "a|\xC2\xA0|b"}, {"a\xE3\x80\x80\xE3\x80\x80" "b", "a|\xE3\x80\x80|\xE3\x80\x80|b"},
        {"a\xC2\x85 b", "a|\xC2\x85| b"},
        {"a\xE2\x80\x8B" "b", "a|\xE2\x80\x8B|b"}, {"a\xEF\xBB\xBF" "b", "a|\xEF\xBB\xBF|b"},
        {" \xF0\x9F\x98\x80!", " \xF0\x9F\x98\x80!"},
        {"\xE4\xBD\xA0\xE5\xA5\xBD 5", "\xE4\xBD\xA0\xE5\xA5\xBD| 5"}, {"<|endoftext|>", "<||endoftext||>"},
        {"a\xFF\xFE" "b \xE2\x82 c\xC3", "a|\xFF\xFE|b| \xE2\x82| c|\xC3"}, {"\x80 \x80", "\x80| \x80"},
        {"\xED\xA0\x80", "\xED\xA0\x80"}};
    for (const auto& row : table) {
        INFO(row.text);
        CHECK(gpt2_cut(row.text) == row.words);
    }
    CHECK(gpt2_cut(std::string("a\0b", 3)) == std::string("a|\0|b", 5));
}

TEST_CASE("bert words: cleaned, folded, split at Chinese characters and punctuation", "[tokenizer]") {
    const struct { const char* text; const char* words; } table[] = {
        {"", ""}, {" \t\r\n", ""}, {"Hello, World!", "hello|,|world|!"}, {"don't (U.S.A.)", "don|'|t|(|u|.|s|.|a|.|)"},
        {"a$b<c>d", "a|$|b|<|c|>|d"},
        {"\xC3\x89t\xC3\xA9 e\xCC\x81t\xC3\x89", "ete|ete"},
        {"\xE4\xBD\xA0\xE5\xA5\xBDx", "\xE4\xBD\xA0|\xE5\xA5\xBD|x"},
        // kana are not Chinese characters
        {"x\xE4\xBD\xA0y", "x|\xE4\xBD\xA0|y"}, {"\xE3\x81\x8C\xE3\x81\x8C", "\xE3\x81\x8B\xE3\x81\x8B"},
        {"a\xC2\xAD" "b\xE2\x80\x8B" "c\xEF\xBB\xBF" "d\x7F" "e", "abcde"}, {"a\xEF\xBF\xBD" "b", "ab"},
        {"a\xEE\x80\x80" "b", "ab"},
        {"a\xC2\xA0" "b\xE2\x80\xA8" "c\xE3\x80\x80" "d", "a|b|c|d"}, {"a\x0B" "b\x0C" "c\xC2\x85" "d", "abcd"},
        {"a\xE2\x80\x94" "b", "a|\xE2\x80\x94|b"},
        {"a\xCD\xBE", "a|;"}, {"\xCE\xA3\xCE\xA3", "\xCF\x83\xCF\x83"}, {"\xC4\xB0\xC4\xB1", "i\xC4\xB1"},
        {"[MASK]", "[|mask|]"},
        {"\xCC\x81\xCC\x81", ""},
        {"\xED\x95\x9C", "\xE1\x84\x92\xE1\x85\xA1\xE1\x86\xAB"}, {"a\xFF" "b\xC3 c\xE2\x82", "ab|c"},
        {"\xED\xA0\x80z\xF5", "z"},
        {"\xE2\x82\xAC" "5", "\xE2\x82\xAC" "5"}};
    for (const auto& row : table) {
        INFO(row.text);
        CHECK(bert_cut(row.text) == row.words);
    }
    CHECK(bert_cut(std::string("a\0b", 3)) == "ab");
    const uint32_t blocks[][2] = {{0x3400, 0x4DBF}, {0x4E00, 0x9FFF}, {0xF900, 0xFAFF}, {0x20000, 0x2A6DF},
                                  {0x2A700, 0x2CEAF}, {0x2F800, 0x2FA1F}};
    for (const auto& block : blocks) {
        INFO("U+" << std::hex << block[0]);
        for (const uint32_t c : block) { CHECK(bert_cut("a" + utf8_of(c) + "b").substr(0, 2) == "a|"); }
        for (const uint32_t c : {block[0] - 1, block[1] + 1}) {
            CHECK(bert_cut("a" + utf8_of(c) + "b").find('|') == std::string::npos);
        }
    }
}
