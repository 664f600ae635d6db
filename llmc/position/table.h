// position/table.h -- the table of positional encodings. A new one is a header beside this file, and an include and a
// row here (docs/new_encoding.md).
#ifndef LLMC_POSITION_TABLE_H
#define LLMC_POSITION_TABLE_H

#include <set>

#include "../base/parse.h"
#include "alibi.cuh"
#include "cable.cuh"
#include "fire.cuh"
#include "kerple.cuh"
#include "learned.cuh"
#include "none.cuh"
#include "rope.cuh"
#include "sinusoidal.cuh"
#include "t5.cuh"

//  --pos name     type          what it is
#define POSITIONS(X) \
    X(none,         NoPosition,   "no positional information but a causal mask, where there is one (NoPE)") \
    X(cable,        CableFull,    "-g_i |S_i - S_j|: S sums ReLU biases of each token, g weighs the query (paper)") \
    MORE_POSITIONS(X)

// `make FEW_POSITIONS=1` leaves these out, so that a build takes a fraction of the time while you work on a row above.
#if defined(FEW_POSITIONS)
#define MORE_POSITIONS(X)
#else
#define MORE_POSITIONS(X) \
    X(cable_nw,     CableNW,      "cable with g = 1") \
    X(kcable,       KCable,       "-log(1 + r^2) of cable's r = g_i |S_i - S_j|") \
    X(kcable_nw,    KCableNW,     "kcable with g = 1") \
    X(cable_v1,     CableV1,      "cable with softplus biases and g = 1 (arXiv version)") \
    X(alibi,        Alibi,        "-m_h |i-j|, fixed slopes") \
    X(rope,         Rope,         "q and k rotated by t * theta^(-2i/HS); --rope_scaling pi, ntk, yarn stretch it") \
    X(t5,           T5,           "a learned bias for each of 32 logarithmic buckets of i-j") \
    X(t5_clip,      T5Clip,       "a learned bias for each i-j up to K, the last one beyond") \
    X(kerple,       Kerple,       "-r1 log(1 + r2 |i-j|)") \
    X(kerple_power, KerplePower,  "-r1 |i-j|^r2") \
    X(fire,         Fire,         "an MLP of the log-distance, normalised by the later position") \
    X(learned,      Learned,      "a table wpe[t] added to the token embedding; nothing beyond the trained length") \
    X(sinusoidal,   Sinusoidal,   "sqrt(C) * embedding + sines and cosines of t")
#endif

// POS_none, POS_cable, ...: a row's number
enum PositionKind {
#define X(name, type, help) POS_##name,
    POSITIONS(X)
#undef X
    NUM_POSITIONS
};

struct PositionRow { const char *name, *help; };
inline const PositionRow position_rows[] = {
#define X(name, type, help) {#name, help},
    POSITIONS(X)
#undef X
};

// the table, as --help prints it
inline std::string position_help() {
    std::string s;
    for (const PositionRow& row : position_rows) { s += strprintf("  %-13s %s\n", row.name, row.help); }
    return s;
}

// Calls f(PositionType<Type>()): the one place where a name becomes a type.
template <class Type> struct PositionType { using type = Type; };
template <class F> void with_position_type(const PositionConfig& config, F f) {
    switch (config.kind) {
#define X(name, type, help) case POS_##name: f(PositionType<type>()); break;
        POSITIONS(X)
#undef X
        default: die(EXIT_BAD_INPUT, "encoding number %d does not exist", config.kind);
    }
}

// Calls f(encoding) with the encoding bound to a layer.
template <class F> void with_position(const PositionView& view, F f) {
    with_position_type(*view.config, [&](auto type) {
        f(bind_encoding<typename decltype(type)::type>(view));
    });
}

// What an encoding of this configuration asks of a model of these shapes.
inline PositionTables position_tables(const PositionConfig& config, const PositionDims& dims) {
    PositionTables t;                                       // declare() fills it; no pointer is set yet
    t.dims = dims;
    t.config = &config;
    with_position_type(config, [&](auto type) {
        typename decltype(type)::type encoding{PositionView()};
        encoding.declare(t);
    });
    const auto earlier_layer = [](const FileTensor& a, const FileTensor& b) { return a.layer < b.layer; };
    std::stable_sort(t.files.begin(), t.files.end(), earlier_layer);
    return t;
}

// The longest sequence the encoding can encode; INT_MAX if there is no limit
inline int position_max_length(const PositionConfig& config) {
    int length = 0;
    with_position_type(config, [&](auto type) { length = decltype(type)::type::max_length(config); });
    return length;
}

// Sets config.values to the encoding's defaults, which may depend on config.T_train
inline void position_defaults(PositionConfig& config) {
    with_position_type(config, [&](auto type) { decltype(type)::type::defaults(config); });
}

// "t5_clip:K=64" -> the encoding with its defaults for T_train and the given values. Unknown names and keys are errors
// that list what there is.
inline PositionConfig parse_position(const std::string& text, int T_train) {
    PositionConfig config;
    config.T_train = T_train;
    const size_t colon = text.find(':');
    config.name = text.substr(0, colon);
    config.kind = -1;
    std::string known;
    for (int k = 0; k < NUM_POSITIONS; k++) {
        if (config.name == position_rows[k].name) { config.kind = k; }
        known += std::string(k > 0 ? ", " : "") + position_rows[k].name;
    }
    check(config.kind >= 0, "--pos %s: expected one of the encodings %s", config.name.c_str(),
          known.c_str());
    position_defaults(config);
    std::set<std::string> seen;                             // keys, each of which may be given once
    size_t at = colon;                                      // before the next key=value
    while (at != std::string::npos) {
        const size_t next = text.find(',', at + 1);
        const std::string item = text.substr(at + 1, next == std::string::npos ? next : next - at - 1);
        const size_t eq = item.find('=');
        const std::string key = item.substr(0, eq);
        std::string keys;
        bool found = false;
        for (auto& kv : config.values) {
            keys += (keys.empty() ? "" : ", ") + kv.first;
            if (kv.first != key || eq == std::string::npos) { continue; }
            const std::string number = item.substr(eq + 1);
            const bool positive = parse_value(number, any(), kv.second) && kv.second > 0;
            check(positive, "--pos %s: %s: expected a positive number, got '%s'", text.c_str(), key.c_str(),
                  number.c_str());
            found = true;
        }
        check(!found || seen.insert(key).second, "--pos %s: %s is given twice", text.c_str(), key.c_str());
        check(found, "--pos %s: '%s' is not key=value with one of %s's keys: %s", text.c_str(), item.c_str(),
              config.name.c_str(), keys.empty() ? "it has none" : keys.c_str());
        at = next;
    }
    return config;
}

// "t5_clip:K=64": parse_position's inverse, with every value spelled out
inline std::string position_text(const PositionConfig& config) {
    std::string s = config.name;
    for (size_t i = 0; i < config.values.size(); i++) {
        s += strprintf("%s%s=%.9g", i == 0 ? ":" : ",", config.values[i].first.c_str(), config.values[i].second);
    }
    return s;
}

#endif
