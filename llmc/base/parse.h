// base/parse.h -- values as text and text as values, taken whole or not at all: of flags, hyperparameters and lists.
#pragma once

#include <cmath>

#include "common.h"

// What a value may be: bounds of a number (or of each one in a list), or the choices of a text. A choice may end in
// "[:s]", an optional factor: "pi[:s]" admits pi and pi:4; or in "[:FILE]", a path.
struct Range {
    double lo = -INFINITY, hi = INFINITY;
    bool or_minus_one = false;              // -1 stands for "work it out" or "all"
    bool takes_value = true;                // false: a switch
    const char* choices = nullptr;          // "a|b|c"
};

// Ranges as a row of the flag table writes them
inline Range any() { return {}; }
inline Range between(double lo, double hi) { return {lo, hi}; }
inline Range at_least(double lo) { return {lo}; }
inline Range minus_one_or(double lo) { return {lo, INFINITY, true}; }
inline Range one_of(const char* choices) { return {-INFINITY, INFINITY, false, true, choices}; }
inline Range a_switch() { return {-INFINITY, INFINITY, false, false}; }

// The types that a flag may have in addition to bool, int, int64_t and double
using Text = std::string;
using Ints = std::vector<int>;                              // "1,2,3"
using Names = std::vector<std::string>;
inline bool is_in(const Names& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
}

// ----------------------------------------------------------------------------------------------------------
// a value as text

inline std::string option_text(const std::string& v) { return v; }
inline std::string option_text(bool v) { return v ? "1" : "0"; }
inline std::string option_text(int v) { return std::to_string(v); }
inline std::string option_text(int64_t v) { return std::to_string(v); }
inline std::string option_text(double v) { return strprintf("%.9g", v); }      // as many digits as a float32 has
template <class E> std::string option_text(const std::vector<E>& v) {
    std::string s;
    for (const E& e : v) { s += (s.empty() ? "" : ",") + option_text(e); }
    return s;
}

// what kind of value a flag takes, for messages and --help
inline std::string option_kind(const Text&) { return "text"; }
inline std::string option_kind(bool) { return "0 or 1"; }
inline std::string option_kind(int) { return "an int"; }
inline std::string option_kind(int64_t) { return "an integer"; }
inline std::string option_kind(double) { return "a number"; }
inline std::string option_kind(const Ints&) { return "ints joined by commas or blanks, each"; }
inline std::string option_kind(const Names&) { return "names joined by commas"; }

// "an integer >= 1 or -1", for messages and --help
template <class V> std::string option_wanted(const Range& r, const V& value) {
    if (r.choices) { return std::string("one of ") + r.choices; }
    std::string s = option_kind(value);
    if (std::isfinite(r.hi)) { return s + strprintf(" from %g to %g", r.lo, r.hi); }
    if (std::isfinite(r.lo)) { s += strprintf(" >= %g", r.lo); }
    return s + (r.or_minus_one ? " or -1" : "");
}

// "2h03m", "4m12s", "9s", for progress lines
inline std::string format_duration(double seconds) {
    const long s = seconds < 0 ? 0 : (long)(seconds + 0.5);
    if (s >= 3600) { return strprintf("%ldh%02ldm", s / 3600, s / 60 % 60); }
    if (s >= 60) { return strprintf("%ldm%02lds", s / 60, s % 60); }
    return strprintf("%lds", s);
}

// ----------------------------------------------------------------------------------------------------------
// text in lines

constexpr size_t HELP_COLUMNS = 80, CONSOLE_COLUMNS = 100;

inline Names words_of(const std::string& text) {
    Names words;
    for (size_t at = 0; at < text.size(); at = std::min(text.find(' ', at), text.size()) + 1) {
        words.push_back(text.substr(at, text.find(' ', at) - at));
    }
    return words;
}

constexpr size_t LONGEST_LINE = 64000000;   // bytes of a line of a log; --curve at a million tokens writes 20 MB

// Calls f for each whole line of a file. An error names the line.
template <class F> void each_line(const File& file, F f) {
    std::string block;                      // the file from `begin` on
    size_t number = 1;
    for (uint64_t begin = 0, at = 1; at > 0; begin += at) {
        block.resize((size_t)std::min<uint64_t>(LONGEST_LINE, file.size - begin));
        file.read(&block[0], block.size(), begin);
        at = 0;
        try {
            for (size_t end; (end = block.find('\n', at)) != std::string::npos; at = end + 1, number++) {
                f(block.substr(at, end - at));
            }
            check(at > 0 || block.size() < LONGEST_LINE, "longer than %zu bytes, as no line of a log is", LONGEST_LINE);
        } catch (const Error& e) {
            die(e.code, "%s: line %zu: %s; remove the line or move the file away", file.path.c_str(), number, e.what());
        }
    }
}

// Joins pieces of text with spaces, from column `at` on. A piece beyond `columns` begins a new line at column `indent`.
inline std::string wrapped(const Names& pieces, size_t at, size_t indent, size_t columns = HELP_COLUMNS) {
    std::string s;
    for (const std::string& piece : pieces) {
        const bool first = s.empty(), fits = at + 1 + piece.size() <= columns;
        if (!first) { s += fits ? " " : "\n" + std::string(indent, ' '); }
        if (!first) { at = fits ? at + 1 : indent; }
        s += piece;
        at += piece.size();
    }
    return s;
}

// ----------------------------------------------------------------------------------------------------------
// text as a value: each function returns whether the whole of `text` is a value that the range admits

inline bool in_range(double v, const Range& r) { return (v >= r.lo && v <= r.hi) || (r.or_minus_one && v == -1); }

inline bool parse_value(const std::string& text, const Range& r, double& value) {
    // strtod itself would also take " 5", "nan", "infinity" and hexadecimal
    if (text.empty() || text.find_first_not_of("0123456789+-.eE") != std::string::npos) { return false; }
    char* end = nullptr;
    value = strtod(text.c_str(), &end);
    return *end == '\0' && std::isfinite(value) && in_range(value, r);
}

inline bool parse_value(const std::string& text, const Range& r, int64_t& value) {
    // strtoll itself would also take " 5" and "+5"; errno says that a number is too large for it
    if (text.empty() || text.find_first_not_of("0123456789-") != std::string::npos) { return false; }
    char* end = nullptr;
    errno = 0;
    value = (int64_t)strtoll(text.c_str(), &end, 10);
    return *end == '\0' && end != text.c_str() && errno == 0 && in_range((double)value, r);
}

inline bool parse_value(const std::string& text, const Range& r, int& value) {
    int64_t wide = 0;                                       // an int64_t that does not fit is an error, not cut off
    const bool good = parse_value(text, r, wide) && wide >= INT32_MIN && wide <= INT32_MAX;
    value = good ? (int)wide : 0;
    return good;
}

inline bool parse_value(const std::string& text, const Range&, bool& value) {
    value = text == "1";
    return text == "0" || text == "1";
}

// one of the range's choices, or any text where it has none
inline bool parse_value(const std::string& text, const Range& r, std::string& value) {
    value = text;
    for (const char* at = r.choices; at; at = strchr(at, '|'), at = at ? at + 1 : nullptr) {
        const std::string choice(at, strcspn(at, "|["));        // without its "[:s]"
        if (text == choice) { return true; }
        double factor;
        const char* more = at + choice.size();
        if (*more != '[' || text.compare(0, choice.size() + 1, choice + ":") != 0) { continue; }
        const std::string rest = text.substr(choice.size() + 1);
        const bool path = strncmp(more, "[:FILE]", 7) == 0;
        if (path ? !rest.empty() : parse_value(rest, at_least(1), factor)) { return true; }
    }
    return r.choices == nullptr;
}

// a list: each item is in the range, and none is empty
template <class E> bool parse_value(const std::string& text, const Range& r, std::vector<E>& value) {
    value.clear();
    for (size_t at = 0; at <= text.size();) {
        const size_t end = std::min(text.find(',', at), text.size());
        E item;
        if (end == at || !parse_value(text.substr(at, end - at), r, item)) { return false; }
        value.push_back(item);
        at = end + 1;
    }
    return true;            // an empty text, or a comma at the end, was rejected as an empty item
}

// ----------------------------------------------------------------------------------------------------------
// mistyped words

// Levenshtein's distance, row by row
inline size_t edit_distance(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); j++) { row[j] = j; }
    for (size_t i = 1; i <= a.size(); i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); j++) {
            const size_t change = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = std::min(change, std::min(row[j - 1], row[j]) + 1);
        }
    }
    return row[b.size()];
}

// "did you mean cable? ": the nearest of the words, "" if none is near
inline std::string did_you_mean(const std::string& text, const Names& words) {
    std::string nearest;
    size_t least = std::min((size_t)4, text.size() / 2 + 1);    // with more changes it is another word
    for (const std::string& word : words) {
        const size_t distance = edit_distance(text.substr(0, 40), word);
        if (distance < least) { least = distance; nearest = "did you mean " + word + "? "; }
    }
    return nearest;
}
