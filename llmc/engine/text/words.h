// text/words.h -- UTF-8, and how tokenizers split text into words: GPT-2's regular expression, and BERT's normalizer.
#pragma once

#include <cstring>
#include <iterator>
#include <string>

#include "unicode.h"

// ----------------------------------------------------------------------------------------------------------
// UTF-8
//
//   code points          bytes
//   U+0000  .. U+007F    0xxxxxxx
//   U+0080  .. U+07FF    110xxxxx 10xxxxxx
//   U+0800  .. U+FFFF    1110xxxx 10xxxxxx 10xxxxxx              (but for the surrogates U+D800 .. U+DFFF)
//   U+10000 .. U+10FFFF  11110xxx 10xxxxxx 10xxxxxx 10xxxxxx

// The length of a character that begins with byte a: 1 to 4, or 0 if none does. 0xC0 and 0xC1 would be ASCII written in
// two bytes, and everything above 0xF4 is beyond U+10FFFF.
inline int utf8_length(unsigned char a) {
    if (a < 0x80) { return 1; }
    if (a < 0xC2) { return 0; }
    if (a < 0xE0) { return 2; }
    if (a < 0xF0) { return 3; }
    return a < 0xF5 ? 4 : 0;
}

// How many bytes s[0..n), n >= 1, needs to become one character; -1: no bytes can make it one.
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

const uint32_t NO_CHARACTER = UINT32_MAX;

// The character at text[at], at < text.size(); `at` moves past it. If none begins there: NO_CHARACTER, and `at` moves
// by one byte.
inline uint32_t utf8_next(const std::string& text, size_t& at) {
    const unsigned char a = (unsigned char)text[at];
    if (a < 0x80) { at++; return a; }
    const size_t length = (size_t)utf8_length(a);
    const bool complete = length > 0 && length <= text.size() - at && utf8_missing(&text[at], length) == 0;
    if (!complete) { at++; return NO_CHARACTER; }
    uint32_t c = a & (0x7Fu >> length);         // the bits of the first byte, and 6 of each that follows
    for (size_t i = 1; i < length; i++) { c = c << 6 | ((unsigned char)text[at + i] & 0x3F); }
    at += length;
    return c;
}

inline void utf8_append(std::string& s, uint32_t c) {
    static const uint32_t first[] = {0, 0xC0, 0xE0, 0xF0};
    const int more = (c >= 0x80) + (c >= 0x800) + (c >= 0x10000);       // bytes after the first, of 6 bits each
    s += (char)(first[more] | c >> 6 * more);
    for (int k = more; k-- > 0;) { s += (char)(0x80 | (c >> 6 * k & 0x3F)); }
}

// Bytes in, UTF-8 out. An unfinished character at the end waits for its rest. Bytes that are not UTF-8 become U+FFFD,
// one for each longest piece that could have started a character (the Unicode Standard, 3.9, and other decoders).
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
// the tables of unicode.h, expanded to one entry per character, so that a lookup is one load

struct UnicodeTables {
    std::vector<uint8_t> classes;       // [UNICODE_LAST + 1] a UnicodeClass
    std::vector<uint32_t> folds;        // [UNICODE_LAST_FOLD + 1] folded, or LONG | index in UNICODE_LONG_FOLDS
    static constexpr uint32_t LONG = 1u << 31;

    UnicodeTables() : folds(UNICODE_LAST_FOLD + 1) {
        classes.reserve(UNICODE_LAST + 1);
        for (const uint32_t run : UNICODE_CLASS_RUNS) { classes.insert(classes.end(), run >> 3, (uint8_t)(run & 7)); }
        for (uint32_t c = 0; c <= UNICODE_LAST_FOLD; c++) { folds[c] = c; }
        int first = 0, target = 0;
        for (const int32_t* run = UNICODE_FOLD_RUNS; run < std::end(UNICODE_FOLD_RUNS);) {
            first += run[0];
            const int length = run[1] >> 2, step = run[1] & 3;
            for (int k = 0; k < length; k++) {
                target += k == 0 || step == 0 ? run[2 + k] : step;
                folds[(size_t)(first + std::max(step, 1) * k)] = (uint32_t)target;
            }
            run += 2 + (step == 0 ? length : 1);
        }
        for (uint32_t i = 0; i < sizeof UNICODE_LONG_FOLDS / sizeof(uint32_t); i += 4) {
            folds[UNICODE_LONG_FOLDS[i]] = LONG | i;
        }
    }

    static const UnicodeTables& get() {
        static const UnicodeTables tables;
        return tables;
    }

    // f(c) for each character of the folded c: canonical decomposition, no nonspacing marks, lower case
    template <class F> void fold(uint32_t c, F f) const {
        if (classes[c] == UNICODE_MARK) { return; }
        if (c >= 0xAC00 && c < 0xAC00 + 11172) {            // a Hangul syllable: (lead * 21 + vowel) * 28 + tail
            const uint32_t s = c - 0xAC00;
            f(0x1100 + s / (21 * 28));
            f(0x1161 + s / 28 % 21);
            if (s % 28 != 0) { f(0x11A7 + s % 28); }        // tail 0: none
            return;
        }
        const uint32_t folded = c <= UNICODE_LAST_FOLD ? folds[c] : c;
        if ((folded & LONG) == 0) { f(folded); return; }
        const uint32_t* targets = UNICODE_LONG_FOLDS + (folded - LONG) + 1;
        for (int i = 0; i < 3 && targets[i] != 0; i++) { f(targets[i]); }
    }
};

// ----------------------------------------------------------------------------------------------------------
// GPT-2: 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//
// In words: a contraction; or a run of letters, of numbers or of other characters, each with the space before it; or a
// run of white space, except its last character if a word follows. "It's  12 (ok)" is split into
// It|'s| | 12| (|ok|).

// The end of the contraction at text[begin], or 0 if there is none.
inline size_t gpt2_contraction(const std::string& text, size_t begin) {
    if (text[begin] != '\'') { return 0; }
    for (const char* s : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
        if (text.compare(begin, strlen(s), s) == 0) { return begin + strlen(s); }
    }
    return 0;
}

// Calls f(begin, end) for each word of the text, in order; the words cover it. A byte that is not UTF-8 counts as a
// symbol, like the U+FFFD to which other decoders change it; here the byte is kept.
template <class F> void gpt2_words(const std::string& text, F f) {
    const UnicodeTables& unicode = UnicodeTables::get();
    const size_t n = text.size();
    const auto next_class = [&](size_t& at) {               // one of the regular expression's four
        const uint32_t c = utf8_next(text, at);
        const int k = c == NO_CHARACTER ? (int)UNICODE_OTHER : unicode.classes[c];
        return k == UNICODE_LETTER || k == UNICODE_NUMBER || k == UNICODE_SPACE ? k : UNICODE_OTHER;
    };
    // the end of the run of class k that begins at `at`; last: where its last character begins
    const auto run = [&](size_t at, int k, size_t& last) {
        for (size_t next = at; at < n; at = next) {
            if (next_class(next) != k) { break; }
            last = at;
        }
        return at;
    };
    for (size_t begin = 0, end; begin < n; begin = end) {
        end = gpt2_contraction(text, begin);
        if (end == 0) {
            const bool space = text[begin] == ' ' && begin + 1 < n;
            size_t at = begin + space;                      // past the space that may begin a word
            size_t last = begin;
            int k = next_class(at);
            if (k == UNICODE_SPACE) { k = next_class(at = begin); }     // but not a run of white space
            end = run(at, k, last);
            // \s+(?!\S): white space before a word leaves its last character to that word
            if (k == UNICODE_SPACE && end < n && last > begin) { end = last; }
        }
        f(begin, end);
    }
}

// ----------------------------------------------------------------------------------------------------------
// BERT

// the blocks of Chinese characters as BERT defines them; each character is a word of its own
inline bool is_chinese(uint32_t c) {
    return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) || (c >= 0xF900 && c <= 0xFAFF) ||
           (c >= 0x20000 && c <= 0x2A6DF) || (c >= 0x2A700 && c <= 0x2CEAF) || (c >= 0x2F800 && c <= 0x2FA1F);
}

struct BertText {
    bool folds = true;          // to lower case without accents, as uncased models read; false: cased
    bool splits_chinese = true;
};

// The text as BERT reads it: without control and private-use characters, U+0000, U+FFFD and bytes that are not UTF-8;
// white space is ' ', Chinese characters have one on each side, and the rest may be folded. Marks that are not dropped
// stay in the order of the text.
inline std::string bert_normalized(const std::string& text, BertText how = {}) {
    const UnicodeTables& unicode = UnicodeTables::get();
    std::string out;
    for (size_t at = 0; at < text.size();) {
        const uint32_t c = utf8_next(text, at);
        if (c == NO_CHARACTER || c == 0xFFFD) { continue; } // U+FFFD stands for bytes that were not UTF-8 before
        const int k = unicode.classes[c];
        const bool dropped_space = c == 0x0B || c == 0x0C || c == 0x85;     // \s for GPT-2, control characters for BERT
        if (k == UNICODE_CONTROL || dropped_space) { continue; }
        if (k == UNICODE_SPACE) { out += ' '; continue; }
        const bool alone = how.splits_chinese && is_chinese(c);
        if (alone) { out += ' '; }
        if (how.folds) { unicode.fold(c, [&](uint32_t folded) { utf8_append(out, folded); }); }
        else { utf8_append(out, c); }
        if (alone) { out += ' '; }
    }
    return out;
}

// Calls f(word, characters) for each word of a normalized text. Words end at spaces; punctuation is a word of its own.
template <class F> void bert_words(const std::string& text, F f) {
    const UnicodeTables& unicode = UnicodeTables::get();
    std::string word;
    int characters = 0;                                     // in `word`
    const auto end_word = [&] {
        if (characters > 0) { f(word, characters); }
        word.clear();
        characters = 0;
    };
    for (size_t at = 0; at < text.size();) {
        const size_t begin = at;
        const uint32_t c = utf8_next(text, at);
        if (c == ' ') { end_word(); continue; }
        const bool alone = unicode.classes[c] == UNICODE_PUNCTUATION;
        if (alone) { end_word(); }
        word.append(text, begin, at - begin);
        characters++;
        if (alone) { end_word(); }
    }
    end_word();
}
