// engine/json.h -- JSON that may come from anywhere: a broken file is an Error that names the file and the field.
//
// The parser is nlohmann's. Added here: bounds on depth and size, refusal of repeated keys (two readers might take
// different values), and accessors that fail with a message.
#pragma once

#include <cmath>
#include <set>
#include <type_traits>

#include "../base/common.h"

// The library's assertions in destructors fail only for a value that a failed allocation has left half made. Thrown
// from a destructor, bad_alloc ends the program as any failed allocation does.
[[noreturn]] inline void json_half_made() { throw std::bad_alloc(); }
#define JSON_ASSERT(holds) ((holds) ? (void)0 : json_half_made())
#include <nlohmann/json.hpp>

using Json = nlohmann::ordered_json;        // keeps the order of keys, so that a file reads as it was written

const int JSON_MAX_DEPTH = 32;              // printing recurses once per level
const size_t JSON_MAX_ORDERED_KEYS = 20000; // an ordered object looks its keys up one by one
// Both are bounded, as a value takes up to 50 times the memory of its text. Vocabularies may be larger.
const uint64_t JSON_MAX_BYTES = 4000000;
const size_t JSON_MAX_VALUES = 250000, JSON_MAX_VOCABULARY_VALUES = 2500000;

// `text` as JSON, or an Error that begins with `what`, the name of the file. J = nlohmann::json for objects of any size
// (vocabularies), where the order of keys does not matter. without: a key that is left out of objects at depth 1
template <class J = Json>
J parse_json(const std::string& text, const std::string& what, const std::string& without = "") {
    using Event = typename J::parse_event_t;
    const size_t most = std::is_same<J, Json>::value ? JSON_MAX_VALUES : JSON_MAX_VOCABULARY_VALUES;
    size_t values = 0;
    std::vector<std::set<std::string>> open_objects;    // the keys seen so far
    // called by the parser at each brace, bracket, key and value
    auto watch = [&](int depth, Event event, J& parsed) {
        const bool opens = event == Event::object_start || event == Event::array_start;
        check(!opens || depth < JSON_MAX_DEPTH, "%s: JSON nested deeper than %d levels", what.c_str(), JSON_MAX_DEPTH);
        values += opens || event == Event::value;
        check(values <= most, "%s: JSON of more than %zu values", what.c_str(), most);
        if (event == Event::object_start) { open_objects.emplace_back(); }
        if (event == Event::object_end) { open_objects.pop_back(); }
        if (event == Event::key) {
            const std::string& key = parsed.template get_ref<const std::string&>();
            std::set<std::string>& keys = open_objects.back();
            check(keys.insert(key).second, "%s: the key \"%.80s\" appears twice", what.c_str(), key.c_str());
            check(!(std::is_same<J, Json>::value) || keys.size() <= JSON_MAX_ORDERED_KEYS,
                  "%s: an object with more than %zu keys", what.c_str(), JSON_MAX_ORDERED_KEYS);
            return depth != 2 || without.empty() || key != without;
        }
        return true;
    };
    // the library would skip it, but not every reader of the file does
    check(text.compare(0, 3, "\xEF\xBB\xBF") != 0, "%s: begins with a byte order mark (BOM); save it as UTF-8 without "
          "one", what.c_str());
    try {
        return J::parse(text, watch);
    } catch (const nlohmann::json::exception& e) {
        die(EXIT_BAD_INPUT, "%s: not valid JSON: %.200s", what.c_str(), e.what());
    }
}

// A line of a log, its keys sorted; null if it is not JSON; an error beyond parse_json's bounds
inline nlohmann::json parse_json_line(const std::string& line) {
    return nlohmann::json::accept(line) ? parse_json<nlohmann::json>(line, "not a record") : nlohmann::json();
}

inline Json read_json(const std::string& path) {
    refuse_stand_in(path);
    return parse_json(read_file(path, JSON_MAX_BYTES), path);
}

// One line (indent -1) or a pretty print. Bytes that are not UTF-8 (a path may hold any) become U+FFFD, not an error.
template <class J> std::string json_text(const J& j, int indent = -1) {
    return j.dump(indent, ' ', false, J::error_handler_t::replace);
}

// The start of a value, for messages
template <class J> std::string json_excerpt(const J& j) {
    if (j.is_structured()) { return strprintf("an %s of %zu", j.type_name(), j.size()); }
    const std::string s = json_text(j);
    return s.size() <= 60 ? s : s.substr(0, 57) + "...";
}

// The value of `key` in j; `what` names j in messages. The functions below also check the type.
template <class J> const J& json_at(const J& j, const std::string& key, const std::string& what) {
    check(j.is_object(), "%s: expected an object with the key \"%s\", got %s", what.c_str(), key.c_str(),
          json_excerpt(j).c_str());
    const auto it = j.find(key);
    check(it != j.end(), "%s: the key \"%s\" is missing", what.c_str(), key.c_str());
    return *it;
}

// an integer in [lo, hi]
template <class J>
int64_t json_int(const J& j, const std::string& key, int64_t lo, int64_t hi, const std::string& what) {
    const J& v = json_at(j, key, what);
    // a number that only fits in uint64_t must not wrap around to a negative one
    const bool fits = v.is_number_integer() && (!v.is_number_unsigned() || v.template get<uint64_t>() <= INT64_MAX);
    check(fits && v.template get<int64_t>() >= lo && v.template get<int64_t>() <= hi,
          "%s: \"%s\": expected an integer from %lld to %lld, got %s", what.c_str(), key.c_str(), (long long)lo,
          (long long)hi, json_excerpt(v).c_str());
    return v.template get<int64_t>();
}

// an integer or a fraction, finite
template <class J> double json_number(const J& j, const std::string& key, const std::string& what) {
    const J& v = json_at(j, key, what);
    check(v.is_number() && std::isfinite(v.template get<double>()), "%s: \"%s\": expected a finite number, got %s",
          what.c_str(), key.c_str(), json_excerpt(v).c_str());
    return v.template get<double>();
}

template <class J> std::string json_string(const J& j, const std::string& key, const std::string& what) {
    const J& v = json_at(j, key, what);
    check(v.is_string(), "%s: \"%s\": expected a string, got %s", what.c_str(), key.c_str(), json_excerpt(v).c_str());
    return v.template get<std::string>();
}

// An error unless every key of an object is in `values`, with one of the values listed there, or in `free` ("key key"),
// with any value. For messages: kind, "a gpt2", and changes, "what the model computes"
inline void check_keys(const Json& j, const Json& values, const std::string& free, const std::string& kind,
                       const char* changes, const std::string& what) {
    for (const auto& item : j.items()) {
        const std::string& key = item.key();
        const auto listed = values.find(key);
        if (listed != values.end()) {
            check(std::find(listed->begin(), listed->end(), item.value()) != listed->end(), "%s: %s: expected %s, "
                  "which is what is computed here, got %s", what.c_str(), key.c_str(),
                  json_excerpt(listed->front()).c_str(), json_excerpt(item.value()).c_str());
            continue;
        }
        const bool known = key.find(' ') == std::string::npos &&
                           (" " + free + " ").find(" " + key + " ") != std::string::npos;
        check(known, "%s: \"%s\" is not a known key of %s, and may change %s; remove it if it does not", what.c_str(),
              printable(key).c_str(), kind.c_str(), changes);
    }
}
