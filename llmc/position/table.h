// position/table.h -- the table of positional encodings. A new encoding is a header, an include and a row here.
#pragma once

#include <array>
#include <map>
#include <set>

#include "../base/common.h"
#include "encoding.cuh"

#if !defined(KERNELS_ELSEWHERE)
#include "added.cuh"
#include "toeplitz.cuh"
#include "../cable.cuh"
#include "rope.cuh"
#include "cope.cuh"
#include "fire.cuh"
#include "grape.cuh"
#include "ssmax.cuh"
#endif

//  --pos name     type          what it is
#define POSITIONS(X) \
    X(none,         NoPosition,   "no positional information but a causal mask, where there is one (NoPE)") \
    X(cable,        CableFull,    "-g_i |S_i - S_j|: S sums ReLU biases of each token, g weighs the query (paper)") \
    MORE_POSITIONS(X)

// `make FEW_POSITIONS=1` leaves these out: a build takes a fraction of the time while you work on a row above.
#if defined(FEW_POSITIONS)
#define MORE_POSITIONS(X)
#else
#define MORE_POSITIONS(X) \
    X(cable_nw,     CableNW,      "cable with g = 1") \
    X(kcable,       KCable,       "-g_i log(1 + (S_i - S_j)^2); weight=inside: -log(1 + (g_i (S_i - S_j))^2)") \
    X(kcable_nw,    KCableNW,     "kcable with g = 1") \
    X(cable_v1,     CableV1,      "cable with softplus biases and g = 1 (arXiv version); fox is the same") \
    X(cable_signed, CableSigned,  "cable with b = tanh(z), so that S may fall") \
    X(alibi,        Alibi,        "-m_h |i-j|, fixed slopes; slopes=geometric: 2^(-8(h+1)/NH) for every NH") \
    X(alibi_trained, AlibiTrained, "alibi with a factor of each slope that every layer learns") \
    X(alibi_random, AlibiRandom,  "alibi with slopes drawn by `seed` from the exponential distribution of `mean`") \
    X(grape_q,      GrapeQ,       "-g_i |i-j|, g a slope that the query chooses; cable with S_t = t") \
    X(grape_k,      GrapeK,       "-w_j |i-j|, w a slope that the key chooses") \
    X(grape_qk,     GrapeQK,      "-(g_i + w_j) |i-j|") \
    X(rope,         Rope,         "q and k, or a share p, turned by t theta^(-2i/HS), or clock=cable: by cable's S_t") \
    X(carope,       Carope,       "rope by sums of f_t^i, f_t a base frequency that each token and head chooses") \
    X(t5,           T5,           "a learned bias for each of `buckets` logarithmic classes of i-j up to `distance`") \
    X(t5_clip,      T5Clip,       "a learned bias for each i-j up to K, the last beyond (scale=C, layers=own)") \
    X(kerple,       Kerple,       "-r1 log(1 + r2 |i-j|)") \
    X(kerple_power, KerplePower,  "-r1 |i-j|^r2") \
    X(bam,          Bam,          "-e^a_h (|i-j| + 1e-5)^b_h, a and b learned, b from -1 to 2") \
    X(sandwich,     Sandwich,     "(pe_i.pe_j - d/2) NH/8h, h = 1 .. NH, of sines and cosines pe of width d") \
    X(cope,         Cope,         "q_i.e[p_ij]: p_ij counts the keys from j to i by sigmoid(q_i.k_t); causal only") \
    X(fire,         Fire,         "an MLP of the log-distance, normalised by the later position") \
    X(learned,      Learned,      "a table wpe[t] added to the token embedding; nothing beyond the trained length") \
    X(sinusoidal,   Sinusoidal,   "0.1 times sines and cosines of t, added to the token embedding") \
    X(ssmax,        SSMax,        "no position: q.k and bias times s_h log n, n the keys seen (also as rope+ssmax)") \
    X(kcable_v1,    KCableV1,     "kcable with softplus biases and g = 1 (arXiv version)")
#endif

// POS_none, POS_cable, ...: the rows' numbers
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

// Second names. The Forgetting Transformer's gate is log sigmoid(-z) = -softplus(z), so fox has the bias of cable_v1.
struct PositionAlias { const char *alias, *name; };
constexpr PositionAlias position_aliases[] = {{"fox", "cable_v1"}};

// the table, as --help prints it
inline std::string position_help() {
    std::string s;
    for (const PositionRow& row : position_rows) {
        s += strprintf("  %-14s %s\n", row.name, wrapped(words_of(row.help), 17, 17).c_str());
    }
    return s;
}

// What files compiled without the encodings' kernels know of a type
struct EncodingTraits {
    Hyperparameters (*defaults)(int T_train);
    void (*declare)(PositionTables&);
    int hooks;                                  // PositionHook
    bool has_relu;                              // see Encoding
    FlashBias form;                             // of its bias
};
EncodingTraits encoding_traits(const EncodingConfig& config);
// The arrays of a bound encoding's bias, and its factor of q.k/sqrt(HS)
FlashBiasArgs bias_arrays(const PositionView& view);
float score_factor(const PositionView& view);
// Encoding's, for attention. begin_decode returns key_max.
void begin_backward(const PositionView& view, const floatX* qkv, int B, int T, Stream stream);
const float* begin_decode(const PositionView& view, const floatX* qkv, int B, int t0, int splits, float scale,
                          Stream stream);

#if !defined(KERNELS_ELSEWHERE)
// Calls f(PositionType<Type>()). Only here a row's number becomes a type.
template <class Type> struct PositionType { using type = Type; };
template <class F> void with_position_type(const EncodingConfig& config, F f) {
    switch (config.kind) {
#define X(name, type, help) case POS_##name: f(PositionType<type>()); break;
        POSITIONS(X)
#undef X
        default: die(EXIT_BAD_INPUT, "encoding number %d does not exist", config.kind);
    }
}

// Calls f(encoding), the encoding bound to the view's layer.
template <class F> void with_position(const PositionView& view, F f) {
    with_position_type(*view.config, [&](auto type) {
        f(bind_encoding<typename decltype(type)::type>(view));
    });
}

LAUNCHER EncodingTraits encoding_traits(const EncodingConfig& config) {
    EncodingTraits traits = {};
    with_position_type(config, [&](auto type) {
        using Type = typename decltype(type)::type;
        using Bias = decltype(std::declval<Type>().bias());
        traits = {Type::defaults, [](PositionTables& tables) { Type(PositionView()).declare(tables); }, Type::hooks,
                  Type::has_relu, Bias::flash};
        if (Bias::flash != FlashBias::None) { traits.hooks |= ADDS_BIAS; }
        if (Bias::counts_gates) { traits.hooks |= COUNTS_GATES; }
    });
    return traits;
}
LAUNCHER FlashBiasArgs bias_arrays(const PositionView& view) {
    FlashBiasArgs args = {};                                // other forms' arrays stay null
    with_position(view, [&](const auto& encoding) { encoding.bias().fill(args); });
    return args;
}
LAUNCHER float score_factor(const PositionView& view) {
    float factor = 1.0f;
    with_position(view, [&](const auto& encoding) { factor = encoding.score_factor(view.stride); });
    return factor;
}
LAUNCHER void begin_backward(const PositionView& view, const floatX* qkv, int B, int T, Stream stream) {
    with_position(view, [&](const auto& encoding) { encoding.begin_backward(qkv, B, T, stream); });
}
LAUNCHER const float* begin_decode(const PositionView& view, const floatX* qkv, int B, int t0, int splits, float scale,
                                   Stream stream) {
    const float* key_max = nullptr;
    with_position(view, [&](const auto& encoding) {
        encoding.begin_decode(qkv, B, t0, splits, scale, stream);
        key_max = encoding.key_max;
    });
    return key_max;
}
#endif

// The layers, of L, that have this part of `config`
inline std::vector<int> layers_of_part(const PositionConfig& config, int part, int L) {
    std::vector<int> layers;
    for (int l = 0; l < L; l++) {
        const std::vector<int>& here = config.pattern[(size_t)l % config.pattern.size()];
        if (std::find(here.begin(), here.end(), part) != here.end()) { layers.push_back(l); }
    }
    return layers;
}

// The tensors that this configuration's encodings declare for a model of this shape
inline PositionTables position_tables(const PositionConfig& config, const PositionShape& shape,
                                      const PositionNames& names = {}) {
    PositionTables t(shape);
    t.names = names;
    t.run = &config;
    for (const EncodingConfig& c : config.parts) {
        t.config = &c;
        t.parts.push_back({layers_of_part(config, (int)t.parts.size(), t.L), t.params.size(), t.acts.size()});
        const EncodingTraits traits = encoding_traits(c);
        check(t.causal || (traits.hooks & COUNTS_GATES) == 0, "--pos %s: expected a causal model, as train_gpt2 has: "
              "positions are counted from a query backwards, and keys after it have none", c.name.c_str());
        traits.declare(t);
    }
    std::set<std::string> seen;
    for (const FileTensor& f : t.files) {
        check(seen.insert(f.name).second, "%s: two encodings keep a %s for all layers", config.name.c_str(),
              f.name.c_str());
    }
    const auto earlier_layer = [](const FileTensor& a, const FileTensor& b) { return a.layer < b.layer; };
    std::stable_sort(t.files.begin(), t.files.end(), earlier_layer);
    return t;
}

// The length up to which all encodings are defined; INT_MAX: any
inline int position_max_length(const PositionConfig& config) {
    return config.has("learned") ? config.T_train : INT_MAX;
}

// A value of h as --pos spells it: a number or the word of a choice
inline std::string hyperparameter_text(const Hyperparameter& h, double value) {
    if (h.choices == nullptr) { return strprintf("%.9g", value); }
    const char* word = h.choices;
    for (int n = 0; n < (int)value; n++) { word = strchr(word, '|') + 1; }
    return std::string(word, strcspn(word, "|"));
}

// Sets h to `found`, its value in the --pos `text`, or dies.
inline void set_hyperparameter(Hyperparameter& h, const std::string& found, const std::string& text) {
    const char* key = h.key.c_str();
    check(!h.given, "--pos %s: %s is given twice", text.c_str(), key);
    h.given = true;
    if (h.choices != nullptr) {
        std::string word;
        check(parse_value(found, one_of(h.choices), word), "--pos %s: %s: expected %s, got '%s'", text.c_str(), key,
              h.choices, found.c_str());
        for (h.value = 0; hyperparameter_text(h, h.value) != word;) { h.value++; }
        return;
    }
    const bool positive = parse_value(found, any(), h.value) && h.value > 0;
    check(positive, "--pos %s: %s: expected a positive number, got '%s'", text.c_str(), key, found.c_str());
}

// "t5_clip:K=64" -> the encoding with these values, else its defaults for T_train. Errors list the known names or keys.
inline EncodingConfig parse_encoding(const std::string& text, int T_train) {
    EncodingConfig config;
    const size_t colon = text.find(':');
    config.name = text.substr(0, colon);
    for (const PositionAlias& a : position_aliases) { config.name = config.name == a.alias ? a.name : config.name; }
    config.kind = -1;
    Names known;
    for (int k = 0; k < NUM_POSITIONS; k++) {
        if (config.name == position_rows[k].name) { config.kind = k; }
        known.push_back(position_rows[k].name);
    }
    check(config.kind >= 0, "--pos %s: %sexpected one of the encodings %s", config.name.c_str(),
          did_you_mean(config.name, known).c_str(), option_text(known).c_str());
    config.values = encoding_traits(config).defaults(T_train);
    std::string keys;
    for (const Hyperparameter& h : config.values) { keys += (keys.empty() ? "" : ", ") + h.key; }
    size_t at = colon;                                      // the character before the next key=value
    while (at != std::string::npos) {
        const size_t next = text.find(',', at + 1);
        const std::string item = text.substr(at + 1, next == std::string::npos ? next : next - at - 1);
        const size_t eq = item.find('=');
        bool found = false;
        for (Hyperparameter& h : config.values) {
            if (eq == std::string::npos || h.key != item.substr(0, eq)) { continue; }
            set_hyperparameter(h, item.substr(eq + 1), text);
            found = true;
        }
        check(found, "--pos %s: '%s' is not key=value with one of %s's keys: %s", text.c_str(), item.c_str(),
              config.name.c_str(), keys.empty() ? "it has none" : keys.c_str());
        at = next;
    }
    return config;
}

// ----------------------------------------------------------------------------------------------------------
// several encodings: in one layer, "rope+cable", or in layers that take turns, "rope,rope,rope,none"

// A layer applies its encodings in this order: q is scaled, then turned, and the bias reads the result. The backward
// has the same order, because the gradient of the scale needs q and dq both turned. --pos, and so a pattern, names them
// in the opposite order: "cable+rope".
inline int position_step(const EncodingConfig& config) {
    const int hooks = encoding_traits(config).hooks;
    if ((hooks & ADDS_BIAS) != 0) { return 2; }
    return (hooks & SCALES_Q) != 0 ? 0 : 1;
}

// The text of a pattern: text(part) of a layer's parts joined by +, layers joined by commas
template <class F> std::string pattern_text(const PositionConfig& config, F text) {
    std::string s;
    for (const std::vector<int>& layer : config.pattern) {
        for (int part : layer) { s += (part == layer[0] ? "" : "+") + text(config.parts[(size_t)part]); }
        s += &layer == &config.pattern.back() ? "" : ",";
    }
    return s;
}

// Dies unless the encodings of one layer change different things; `what` begins the message.
inline void check_hooks(const std::vector<EncodingConfig>& layer, const std::string& what) {
    const std::map<int, const char*> does = {{CHANGES_EMBEDDINGS, "change the embeddings"}, {TURNS_QK, "turn q and k"},
                                             {ADDS_BIAS, "add a bias to the scores"}, {SCALES_Q, "scale q"}};
    for (size_t i = 0; i < layer.size(); i++) {
        const int mine = encoding_traits(layer[i]).hooks;
        const char* name = layer[i].name.c_str();
        check(mine != 0 || layer.size() == 1, "%s: %s adds nothing to another encoding", what.c_str(), name);
        for (size_t j = 0; j < i; j++) {
            const int others = encoding_traits(layer[j]).hooks, both = mine & others;
            const bool turned = ((mine | others) & TURNS_QK) != 0 && ((mine | others) & COUNTS_GATES) != 0;
            check(!turned, "%s: %s and %s do not go together: a turned query would read another position embedding at "
                  "each place of the text", what.c_str(), layer[j].name.c_str(), name);
            check(both == 0, "%s: %s and %s both %s, and a layer has room for one that does", what.c_str(),
                  layer[j].name.c_str(), name, both == 0 ? "" : does.at(both));
        }
    }
}

// One configuration from the encodings of layers that take turns; `what` begins an error's message.
inline PositionConfig compose_positions(std::vector<std::vector<EncodingConfig>> layers, int T_train,
                                        const std::string& what) {
    PositionConfig all;
    all.T_train = T_train;
    all.parts.clear();
    all.pattern.clear();
    for (std::vector<EncodingConfig>& layer : layers) {
        check_hooks(layer, what);
        std::stable_sort(layer.begin(), layer.end(), [](const EncodingConfig& a, const EncodingConfig& b) {
            return position_step(a) > position_step(b);
        });
        all.pattern.emplace_back();
        for (const EncodingConfig& c : layer) {
            const auto found = std::find(all.parts.begin(), all.parts.end(), c);
            all.pattern.back().push_back((int)(found - all.parts.begin()));
            if (found == all.parts.end()) { all.parts.push_back(c); }
        }
    }
    if (all.parts.size() == 1) { all.pattern = {{0}}; }
    for (size_t part = 0; part < all.parts.size(); part++) {
        const EncodingConfig& c = all.parts[part];
        const bool everywhere = layers_of_part(all, (int)part, (int)layers.size()).size() == layers.size();
        check(everywhere || (encoding_traits(c).hooks & CHANGES_EMBEDDINGS) == 0, "%s: %s changes the embeddings, so "
              "all layers have it or none", what.c_str(), c.name.c_str());
    }
    all.name = pattern_text(all, [](const EncodingConfig& c) { return c.name; });
    return all;
}

// The configuration that --pos spells: "cable", "t5_clip:K=64", "rope+cable", "rope,rope,rope,none". A comma begins the
// next layer, or a key=value of the same encoding; a plus sign begins the next encoding, or is part of a number.
inline PositionConfig parse_position(const std::string& text, int T_train) {
    const auto begins_layer = [&](size_t at) {
        const size_t end = std::min(text.find_first_of(",:+", at), text.size());
        return text.find('=', at) >= end;
    };
    std::vector<std::vector<EncodingConfig>> layers(1);
    size_t begin = 0;
    for (size_t at = 0; at <= text.size(); at++) {
        const bool next_layer = at < text.size() && text[at] == ',' && begins_layer(at + 1);
        const bool next_part = at + 1 < text.size() && text[at] == '+' && !std::isdigit((unsigned char)text[at + 1]);
        if (!next_layer && !next_part && at < text.size()) { continue; }
        layers.back().push_back(parse_encoding(text.substr(begin, at - begin), T_train));
        if (next_layer) { layers.emplace_back(); }
        begin = at + 1;
    }
    return compose_positions(layers, T_train, "--pos " + text);
}

// "cable+rope:theta=10000,p=1": the inverse of parse_position, with every value spelled out
inline std::string position_text(const PositionConfig& config) {
    return pattern_text(config, [](const EncodingConfig& c) {
        std::string s = c.name;
        for (const Hyperparameter& h : c.values) {
            if (!h.written()) { continue; }
            s += (s == c.name ? ":" : ",") + h.key + "=" + hyperparameter_text(h, h.value);
        }
        return s;
    });
}

// ----------------------------------------------------------------------------------------------------------
// the encodings of one layer, as a trainer calls them

struct LayerPosition {
    std::array<PositionView, 4> views;                      // of `count` encodings, by position_step()
    int count = 0;
    bool new_padding = false;                               // rows end in padding that is not zero already

    // calls the same member of each encoding
    void embed_forward(floatX* x, int B, int T, int t0, Stream s) const;
    void prepare_forward(floatX* qkv, int B, int T, int t0, Stream s) const;
    void prepare_backward(floatX* dqkv, const floatX* qkv, int B, int T, Stream s) const;
    void embed_backward(floatX* dx, int B, int T, Stream s) const;
    // the encoding whose bias attention adds to the scores
    const PositionView& bias() const { return views[(size_t)count - 1]; }
    int columns() const { return bias().columns; }
    int row() const { return bias().OC; }
};

// Gives the bias of a layer the factors of `scale`, if that is ssmax.
void share_factors(PositionView& bias, PositionView& scale);

// Whether the S (cable.cuh) of a head has moved, or its ReLU was closed for every token so far
enum HeadState { HAS_NO_RELU, IS_DEAD, HAS_MOVED };
// Updates states (NH) after B windows of view.stride tokens, the last window of `last`. The encoding must have a ReLU.
void find_moved(int* states, const PositionView& view, int B, int last, Stream stream);

#if !defined(KERNELS_ELSEWHERE)
// Calls f(encoding) for each encoding of a layer: with_position makes a Rope or CableFull of a view.
template <class F> void with_positions(const LayerPosition& layer, F f) {
    for (int i = 0; i < layer.count; i++) { with_position(layer.views[(size_t)i], f); }
}
LAUNCHER void LayerPosition::embed_forward(floatX* x, int B, int T, int t0, Stream s) const {
    with_positions(*this, [&](const auto& encoding) { encoding.embed_forward(x, B, T, t0, s); });
}
LAUNCHER void LayerPosition::prepare_forward(floatX* qkv, int B, int T, int t0, Stream s) const {
    with_positions(*this, [&](const auto& encoding) { encoding.prepare_forward(qkv, B, T, t0, s); });
}
LAUNCHER void LayerPosition::prepare_backward(floatX* dqkv, const floatX* qkv, int B, int T, Stream s) const {
    const auto backward = [&](const auto& encoding) { encoding.prepare_backward(dqkv, qkv, B, T, s); };
    const bool first = (encoding_traits(*bias().config).hooks & COUNTS_GATES) != 0;
    if (first) { with_position(bias(), backward); }         // cope needs q and dq as attention saw them
    for (int i = 0; i < count - first; i++) { with_position(views[(size_t)i], backward); }
}
LAUNCHER void LayerPosition::embed_backward(floatX* dx, int B, int T, Stream s) const {
    with_positions(*this, [&](const auto& encoding) { encoding.embed_backward(dx, B, T, s); });
}
LAUNCHER void share_factors(PositionView& bias, PositionView& scale) {
    with_position(scale, [&](const auto& encoding) {
        if constexpr (std::decay_t<decltype(encoding)>::hooks == SCALES_Q) {
            bias.factor = encoding.factors;
            bias.moment = scale.moment = encoding.moments;
        }
    });
}

// One block per head
__global__ void find_moved_kernel(int* states, const float* S_offset, const double* S_origin, int B, int stride,
                                  int last) {
    float most = 0.0f;
    for (int b = threadIdx.x; b < B; b += blockDim.x) {
        const int t = (b == B - 1 ? last : stride) - 1;
        const size_t bh = (size_t)b * gridDim.x + blockIdx.x;
        const double origin = S_origin[bh * ceil_div(stride, CABLE_CHUNK) + t / CABLE_CHUNK];
        most = fmaxf(most, (float)(origin + S_offset[bh * stride + t]));               // S at the end of the window
    }
    most = block_max(most);
    int& state = states[blockIdx.x];
    if (threadIdx.x == 0 && state < HAS_MOVED) { state = most > 0.0f ? HAS_MOVED : IS_DEAD; }
}
LAUNCHER void find_moved(int* states, const PositionView& view, int B, int last, Stream stream) {
    with_position(view, [&](const auto& encoding) {
        if constexpr (std::decay_t<decltype(encoding)>::has_relu) {
            launch(find_moved_kernel, Grid((size_t)view.NH, 128, 0, stream), states, encoding.S_offset,
                   encoding.S_origin, B, view.stride, last);
        }
    });
}
#endif
