// text/words.h -- UTF-8, and text cut into words the two ways that tokenizers want it: as GPT-2's regular expression does, and
// as BERT's uncased models do.
#ifndef LLMC_TEXT_WORDS_H
#define LLMC_TEXT_WORDS_H

#include <cstring>
#include <string>

#include "unicode.h"

// ----------------------------------------------------------------------------------------------------------
// UTF-8

// How many bytes s[0..n), n >= 1, lacks to be one character; -1: nothing makes it one. The second byte's bounds keep out
// surrogates, what is beyond U+10FFFF, and characters written longer than they need to be.
inline int utf8_missing(const char* s, size_t n) {
    const unsigned char a = (unsigned char)s[0];
    const int length = a < 0x80 ? 1 : a < 0xC2 ? 0 : a < 0xE0 ? 2 : a < 0xF0 ? 3 : a < 0xF5 ? 4 : 0;
    if (length < (int)n) { return -1; }
    for (size_t i = 1; i < n; i++) {
        const unsigned char c = (unsigned char)s[i];
        const int lo = i > 1 ? 0x80 : a == 0xE0 ? 0xA0 : a == 0xF0 ? 0x90 : 0x80;
        const int hi = i > 1 ? 0xBF : a == 0xED ? 0x9F : a == 0xF4 ? 0x8F : 0xBF;
        if (c < lo || c > hi) { return -1; }
    }
    return length - (int)n;
}

const uint32_t NO_CHARACTER = UINT32_MAX;

// The character at text[at], at < text.size(), and at moved behind it; NO_CHARACTER and one byte on where none begins.
inline uint32_t utf8_next(const std::string& text, size_t& at) {
    const unsigned char a = (unsigned char)text[at];
    if (a < 0x80) { at++; return a; }
    const size_t length = a < 0xE0 ? 2 : a < 0xF0 ? 3 : 4;
    if (length > text.size() - at || utf8_missing(&text[at], length) != 0) { at++; return NO_CHARACTER; }
    uint32_t c = a & (0x7Fu >> length);
    for (size_t i = 1; i < length; i++) { c = c << 6 | ((unsigned char)text[at + i] & 0x3F); }
    at += length;
    return c;
}

inline void utf8_append(std::string& s, uint32_t c) {
    if (c < 0x80) { s += (char)c; return; }
    const int more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    s += (char)((more == 1 ? 0xC0 : more == 2 ? 0xE0 : 0xF0) | c >> 6 * more);
    for (int i = more - 1; i >= 0; i--) { s += (char)(0x80 | (c >> 6 * i & 0x3F)); }
}

// Bytes in, UTF-8 out: an unfinished character at the end waits for its rest; whatever is no UTF-8 becomes U+FFFD, one
// for each longest piece that could have started a character (the Unicode Standard, 3.9, and what other decoders do).
struct Utf8Stream {
    std::string waiting;    // the start of a character, at most 3 bytes

    std::string push(const std::string& bytes) {
        std::string out;
        for (const char c : bytes) {
            waiting += c;
            if (waiting.size() > 1 && missing() < 0) {   // c does not go on with the character before it
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
    static constexpr const char* REPLACEMENT = "\xEF\xBF\xBD";

    int missing() const { return utf8_missing(waiting.data(), waiting.size()); }
};

// ----------------------------------------------------------------------------------------------------------
// the tables of unicode.h, unfolded to one entry a character: a lookup is one load

struct UnicodeTables {
    std::vector<uint8_t> classes;       // [UNICODE_LAST + 1]
    std::vector<uint32_t> folds;        // [UNICODE_LAST_FOLD + 1] the folded character, or LONG | index into UNICODE_LONG_FOLDS
    static constexpr uint32_t LONG = 1u << 31;

    UnicodeTables() : folds(UNICODE_LAST_FOLD + 1) {
        classes.reserve(UNICODE_LAST + 1);
        for (const uint32_t run : UNICODE_CLASS_RUNS) { classes.insert(classes.end(), run >> 3, (uint8_t)(run & 7)); }
        for (uint32_t c = 0; c <= UNICODE_LAST_FOLD; c++) { folds[c] = c; }
        uint32_t first = 0;
        for (size_t i = 0; i < sizeof UNICODE_FOLD_RUNS / sizeof(uint32_t); i += 3) {
            const uint32_t* run = UNICODE_FOLD_RUNS + i;
            first += run[0];
            for (uint32_t k = 0, step = 1 + run[1] % 2; k < run[1] / 2; k++) { folds[first + step * k] = run[2] + step * k; }
        }
        for (uint32_t i = 0; i < sizeof UNICODE_LONG_FOLDS / sizeof(uint32_t); i += 4) { folds[UNICODE_LONG_FOLDS[i]] = LONG | i; }
    }

    static const UnicodeTables& get() {
        static const UnicodeTables tables;
        return tables;
    }

    // f(c) for each character that folding makes of c: canonical decomposition, no nonspacing marks, lower case
    template <class F> void fold(uint32_t c, F f) const {
        if (classes[c] == UNICODE_MARK) { return; }
        if (c >= 0xAC00 && c < 0xAC00 + 11172) {            // a syllable of Hangul: lead, vowel, tail
            const uint32_t s = c - 0xAC00;
            f(0x1100 + s / (21 * 28));
            f(0x1161 + s / 28 % 21);
            if (s % 28 != 0) { f(0x11A7 + s % 28); }
            return;
        }
        const uint32_t folded = c <= UNICODE_LAST_FOLD ? folds[c] : c;
        if ((folded & LONG) == 0) { f(folded); return; }
        for (uint32_t i = folded - LONG + 1, end = i + 3; i < end && UNICODE_LONG_FOLDS[i] != 0; i++) { f(UNICODE_LONG_FOLDS[i]); }
    }
};

// ----------------------------------------------------------------------------------------------------------
// GPT-2: 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+

// Calls f(begin, end) for each word of the text, one after the other. A byte that is no UTF-8 counts as a symbol, as the
// U+FFFD that other decoders make of it does; here it stays the byte it is.
template <class F> void gpt2_words(const std::string& text, F f) {
    const UnicodeTables& unicode = UnicodeTables::get();
    const size_t n = text.size();
    const auto next_class = [&](size_t& at) {
        const uint32_t c = utf8_next(text, at);
        const int k = c == NO_CHARACTER ? (int)UNICODE_OTHER : unicode.classes[c];
        return k == UNICODE_LETTER || k == UNICODE_NUMBER || k == UNICODE_SPACE ? k : UNICODE_OTHER;
    };
    // where the characters of class k from `at` on end; last: where the last of them begins
    const auto run = [&](size_t at, int k, size_t& last) {
        for (size_t next = at; at < n; at = next) {
            if (next_class(next) != k) { break; }
            last = at;
        }
        return at;
    };
    for (size_t begin = 0, end; begin < n; begin = end) {
        end = 0;
        if (text[begin] == '\'') {
            for (const char* s : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
                if (end == 0 && text.compare(begin, strlen(s), s) == 0) { end = begin + strlen(s); }
            }
        }
        if (end == 0) {
            const size_t start = begin + (text[begin] == ' ' && begin + 1 < n);     // behind the space a word may take along
            size_t at = start, last = begin;
            int k = next_class(at);
            if (k == UNICODE_SPACE) { k = next_class(at = begin); }
            end = run(at, k, last);
            // spaces leave the last one of them to the word that follows
            if (k == UNICODE_SPACE && end < n && last > begin) { end = last; }
        }
        f(begin, end);
    }
}

// ----------------------------------------------------------------------------------------------------------
// BERT, uncased

// the blocks of Chinese characters as BERT has them, which each become a word
inline bool is_chinese(uint32_t c) {
    return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) || (c >= 0xF900 && c <= 0xFAFF) ||
           (c >= 0x20000 && c <= 0x2A6DF) || (c >= 0x2A700 && c <= 0x2CEAF) || (c >= 0x2F800 && c <= 0x2FA1F);
}

// Calls f(word, characters) for each word of the text, in UTF-8: control and private-use characters, U+0000, U+FFFD and
// bytes that are no UTF-8 are dropped; Chinese characters and punctuation are words of their own; the rest is folded and
// ends at spaces. Marks that are not dropped stay in the order the text has them.
template <class F> void bert_words(const std::string& text, F f) {
    const UnicodeTables& unicode = UnicodeTables::get();
    std::string word;
    int characters = 0;
    const auto end_word = [&] {
        if (characters > 0) { f(word, characters); }
        word.clear();
        characters = 0;
    };
    const auto add = [&](uint32_t c) {
        const bool alone = unicode.classes[c] == UNICODE_PUNCTUATION;
        if (alone) { end_word(); }
        utf8_append(word, c);
        characters++;
        if (alone) { end_word(); }
    };
    for (size_t at = 0; at < text.size();) {
        const uint32_t c = utf8_next(text, at);
        if (c == NO_CHARACTER || c == 0xFFFD) { continue; }
        const int k = unicode.classes[c];
        const bool control = k == UNICODE_CONTROL || c == 0x0B || c == 0x0C || c == 0x85;   // the last three are \s all the same
        if (control) { continue; }
        if (k == UNICODE_SPACE) { end_word(); continue; }
        const bool chinese = is_chinese(c);
        if (chinese) { end_word(); }
        unicode.fold(c, add);
        if (chinese) { end_word(); }
    }
    end_word();
}

#endif
