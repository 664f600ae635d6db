// oracle_positions.cu -- what every encoding computes, by nested loops straight from the papers' formulas.
//
// Shares no code with llmc/ on purpose: kernel and reference never share a bug.
//
// A new encoding adds one struct here and registers it under its name in --pos:
//
//   struct MyOracle : NoOracle {                                   overrides what the encoding does, and nothing else
//       template <class R> static std::vector<R> bias(const OracleLayer<R>& o, int h) {
//           return each_pair(o, [&](int i, int j) { return -o.parameter("my_slope", h) * R(i - j); });
//       }
//   };
//   inline const bool my_oracle = register_oracle<MyOracle>("my");
//
// The tests evaluate it in double, which is the truth, and in float. How far the two are apart is what float32 costs on
// the same input, and so the unit of every tolerance (test/oracle.h).
#include "test/oracle_positions.h"

#include <cstdlib>
#include <stdexcept>

// B (T,T) of f(i, j) for every pair that counts; 0 where a causal mask hides the key
template <class R, class F> std::vector<R> each_pair(const OracleLayer<R>& o, F f) {
    std::vector<R> B((size_t)o.T * o.T, R(0));
    for (int i = 0; i < o.T; i++) {
        for (int j = 0; j < (o.causal ? i + 1 : o.T); j++) { B[(size_t)i * o.T + j] = f(i, j); }
    }
    return B;
}
// of f(i - j), which is computed once for each distance
template <class R, class F> std::vector<R> each_distance(const OracleLayer<R>& o, F f) {
    std::vector<R> of_distance;
    for (int d = o.causal ? 0 : 1 - o.T; d < o.T; d++) { of_distance.push_back(f(d)); }
    const int zero = (int)of_distance.size() - o.T;
    return each_pair(o, [&](int i, int j) { return of_distance[(size_t)(zero + i - j)]; });
}

// ----------------------------------------------------------------------------------------------------------
// the registry

// An encoding that does nothing. Oracles derive from it and hide what they change.
struct NoOracle {
    static constexpr bool slow = false;         // true: test_attention takes shorter sequences
    // B (T,T) of head h
    template <class R> static std::vector<R> bias(const OracleLayer<R>& o, int) {
        return std::vector<R>((size_t)o.T * o.T, R(0));
    }
    // q or k (HS) of head h at position t, as the scores take it; back: turned the other way
    static std::vector<double> rotate(const OracleLayer<double>&, const std::vector<double>& x, int /*h*/, int /*t*/,
                                      bool /*back*/) {
        return x;
    }
    // whether the bias depends on q and k: then it is that of CopeHead, not of bias()
    static constexpr bool reads_scores = false;
    // of CABLE's encodings, whose b, g and S are logged: the step of oracle_cable_S
    static constexpr char cable_step = 0;
    // the factor of q.k in addition to 1/sqrt(HS)
    static double score_factor(const OracleLayer<double>&) { return 1.0; }
    // the factor of q in head h if it sees n keys
    static double query_factor(const OracleLayer<double>&, int /*h*/, int /*keys*/) { return 1.0; }
    // the embedding (C) of the token at position t, as the first layer takes it
    static std::vector<double> embed(const OracleLayer<double>&, const std::vector<double>& x, int) { return x; }
};

static std::map<std::string, PositionOracle>& oracle_registry() {
    static std::map<std::string, PositionOracle> registry;
    return registry;
}
template <class Oracle> bool register_oracle(const std::string& name) {
    PositionOracle o;
    o.bias = Oracle::template bias<double>;
    o.float_bias = Oracle::template bias<float>;
    o.rotate = Oracle::rotate;
    o.embed = Oracle::embed;
    o.score_factor = Oracle::score_factor;
    o.query_factor = Oracle::query_factor;
    o.has_bias = &Oracle::template bias<double> != &NoOracle::bias<double>;
    o.slow = Oracle::slow;
    o.reads_scores = Oracle::reads_scores;
    o.cable_step = Oracle::cable_step;
    return oracle_registry().emplace(name, o).second;
}

const PositionOracle& find_oracle(const std::string& name) {
    const auto found = oracle_registry().find(name.substr(0, name.find(':')));
    if (found != oracle_registry().end()) { return found->second; }
    throw std::runtime_error("--pos " + name +
                             " has no oracle, so nothing tells whether it is right: derive a struct from NoOracle and "
                             "register it as \"" +
                             name + "\" in test/oracle_positions.cu");
}

// ----------------------------------------------------------------------------------------------------------
// the encodings

inline const bool none_oracle = register_oracle<NoOracle>("none");

// log(1 + x^2) of a pair of positions. A finite difference in a column changes few x; the other logarithms are kept.
template <class R> R log_of(const OracleLayer<R>& o, int i, int j, R x) {
    o.logarithms.resize((size_t)o.T * (size_t)o.T, {R(0), R(0)});
    std::pair<R, R>& last = o.logarithms[(size_t)i * (size_t)o.T + (size_t)j];
    if (last.first != x) { last = {x, std::log(1 + x * x)}; }
    return last.second;
}

// Veisi et al.: S_t = sum_{k<=t} b_k of oracle_cable_S, g_t = softplus(u_t); B_ij = -g_i |S_i - S_j|. Columns: z (NH),
// u (NH)
template <bool Log, bool Weighted, char Step> struct CableOracle : NoOracle {
    static constexpr char cable_step = Step;
    template <class R> static std::vector<R> bias(const OracleLayer<R>& o, int h) {
        const std::vector<R> S = oracle_cable_S<Step>(o, h);
        std::vector<R> g(S.size(), R(1));
        for (int i = 0; i < o.T && Weighted; i++) { g[(size_t)i] = oracle_softplus(o.column(i, o.NH + h)); }
        const bool inside = Log && Weighted && o.value("weight") == 1;
        return each_pair(o, [&](int i, int j) {
            const R D = std::fabs(S[(size_t)i] - S[(size_t)j]), gi = g[(size_t)i];
            if (!Log) { return -gi * D; }
            return inside ? -log_of(o, i, j, gi * D) : -gi * log_of(o, i, j, D);
        });
    }
};
inline const bool cable_oracle = register_oracle<CableOracle<false, true, 'r'>>("cable");
inline const bool cable_nw_oracle = register_oracle<CableOracle<false, false, 'r'>>("cable_nw");
inline const bool kcable_oracle = register_oracle<CableOracle<true, true, 'r'>>("kcable");
inline const bool kcable_nw_oracle = register_oracle<CableOracle<true, false, 'r'>>("kcable_nw");
inline const bool kcable_v1_oracle = register_oracle<CableOracle<true, false, 's'>>("kcable_v1");
inline const bool cable_v1_oracle = register_oracle<CableOracle<false, false, 's'>>("cable_v1");
inline const bool cable_signed_oracle = register_oracle<CableOracle<false, true, 't'>>("cable_signed");

// Press et al.: the authors' recursive get_slopes
std::vector<double> oracle_alibi_slopes(int n) {
    int p = 1;
    while (p * 2 <= n) { p *= 2; }
    std::vector<double> slopes;
    for (int i = 0; i < p; i++) { slopes.push_back(std::pow(std::pow(2.0, -8.0 / p), i + 1)); }
    if (p == n) { return slopes; }
    const std::vector<double> twice = oracle_alibi_slopes(2 * p);
    for (int i = 0; (int)slopes.size() < n; i += 2) { slopes.push_back(twice[(size_t)i]); }
    return slopes;
}
struct AlibiOracle : NoOracle {
    template <class R> static std::vector<R> bias(const OracleLayer<R>& o, int h) {
        const bool geometric = o.value("slopes") == 1;      // the paper's code, for every NH
        const double published = oracle_alibi_slopes(o.NH)[(size_t)h];
        const double scale = o.value("scale") > 0 ? o.value("scale") : 1.0;
        const R slope = (R)(scale * (geometric ? std::pow(2.0, -8.0 * (h + 1) / o.NH) : published));
        return each_distance(o, [&](int d) { return -slope * R(std::abs(d)); });
    }
};
inline const bool alibi_oracle = register_oracle<AlibiOracle>("alibi");

// the slopes times what a layer has learned
struct AlibiTrainedOracle : NoOracle {
    template <class R> static std::vector<R> bias(const OracleLayer<R>& o, int h) {
        const R slope = o.parameter("alibi_r", (size_t)h) * (R)oracle_alibi_slopes(o.NH)[(size_t)h];
        return each_distance(o, [&](int d) { return -slope * R(std::abs(d)); });
    }
};
inline const bool alibi_trained_oracle = register_oracle<AlibiTrainedOracle>("alibi_trained");

// Number h of a stream of SplitMix64 (Steele et al. 2014), as math.h chains it: in [0, 1)
static double oracle_uniform(uint64_t seed, uint64_t h) {
    uint64_t x = seed;
    for (const uint64_t word : {h, uint64_t(0), uint64_t(0)}) {
        x += 11400714819323198485u;
        x = (x ^ x >> 30) * 13787848793156543929u;
        x = (x ^ x >> 27) * 10723151780598845931u;
        x = (x ^ x >> 31) ^ word;
    }
    return std::ldexp((double)(x >> 11), -53);
}
struct AlibiRandomOracle : NoOracle {
    template <class R> static std::vector<R> bias(const OracleLayer<R>& o, int h) {
        const double u = oracle_uniform((uint64_t)o.value("seed"), (uint64_t)h);
        const R slope = (R)(-o.value("mean") * std::log(1 - u));
        return each_distance(o, [&](int d) { return -slope * R(std::abs(d)); });
    }
};
inline const bool alibi_random_oracle = register_oracle<AlibiRandomOracle>("alibi_random");

// Zhang et al.: a slope that the query chooses, the key, or both. Columns: the keys' u (NH), the queries' u (NH)
template <bool Queries, bool Keys> struct GrapeOracle : NoOracle {
    template <class R> static std::vector<R> bias(const OracleLayer<R>& o, int h) {
        const R slope = (R)oracle_alibi_slopes(o.NH)[(size_t)h];
        std::vector<R> of_key((size_t)o.T), of_query((size_t)o.T);
        for (int t = 0; t < o.T; t++) {
            if (Keys) { of_key[(size_t)t] = slope * oracle_softplus(o.column(t, h)); }
            if (Queries) { of_query[(size_t)t] = slope * oracle_softplus(o.column(t, h + (Keys ? o.NH : 0))); }
        }
        return each_pair(o, [&](int i, int j) {
            return -(of_key[(size_t)j] + of_query[(size_t)i]) * R(std::abs(i - j));
        });
    }
};
inline const bool grape_q_oracle = register_oracle<GrapeOracle<true, false>>("grape_q");
inline const bool grape_k_oracle = register_oracle<GrapeOracle<false, true>>("grape_k");
inline const bool grape_qk_oracle = register_oracle<GrapeOracle<true, true>>("grape_qk");

// Su et al.: the pair (2i, 2i+1) of q and k turned by t theta^(-2i/HS), and its stretches beyond the trained length.
// clock=cable: by cable's S_t instead of t. Columns: z (NH)
struct RopeOracle : NoOracle {
    static std::vector<double> rotate(const OracleLayer<double>& o, const std::vector<double>& x, int h, int position,
                                      bool back) {
        double t = o.value("clock") == 1 ? oracle_cable_S<'r'>(o, h)[(size_t)position] : position;
        t = back ? -t : t;
        std::vector<double> y = x;
        const double pi = std::acos(-1.0), theta = o.value("theta");
        const int R = 2 * (int)std::ceil(o.value("p") * o.HS / 2);
        const double stretch = o.stretch;
        for (int i = 0; i < R / 2; i++) {
            const double plain = std::pow(theta, -2.0 * i / R);
            double angle = t * plain;
            if (o.scaling == "pi") { angle = (t / stretch) * plain; }
            if (o.scaling == "ntk" && R > 2) {
                angle = t * std::pow(theta * std::pow(stretch, R / (R - 2.0)), -2.0 * i / R);
            }
            if (o.scaling == "yarn") {
                const double turns = o.T_train * plain / (2 * pi);
                const double gamma = std::min(1.0, std::max(0.0, (turns - 1) / 31));
                angle = t * (gamma * plain + (1 - gamma) * plain / stretch);
            }
            if (o.scaling == "longrope") {                  // those of long texts where o.T is beyond T_train
                angle = t / (o.T <= o.T_train ? o.short_factor : o.long_factor).at((size_t)i) * plain;
            }
            const double c = std::cos(angle), s = std::sin(angle);
            const double a = x[(size_t)(2 * i)], b = x[(size_t)(2 * i + 1)];
            y[(size_t)(2 * i)] = a * c - b * s;
            y[(size_t)(2 * i + 1)] = a * s + b * c;
        }
        return y;
    }
    static double score_factor(const OracleLayer<double>& o) {
        if (o.scaling == "longrope" && o.stretch > 1) {     // the square of the factor on each of q and k
            return std::pow(std::sqrt(1 + std::log(o.stretch) / std::log(o.T_train)), 2);
        }
        return o.scaling == "yarn" ? std::pow(0.1 * std::log(o.stretch) + 1, 2) : 1.0;
    }
};
inline const bool rope_oracle = register_oracle<RopeOracle>("rope");

// Veisi et al.: the pair (2i, 2i+1) of q and k turned by the sum of f_u^i over u <= t, f = 1 / (softplus(z) + 1).
// Columns: z (NH)
struct CaropeOracle : NoOracle {
    static std::vector<double> rotate(const OracleLayer<double>& o, const std::vector<double>& x, int h, int t,
                                      bool back) {
        std::vector<double> y = x, angles((size_t)o.HS / 2);
        for (int u = 0; u <= t; u++) {
            const double f = 1 / (oracle_softplus(o.column(u, h)) + 1);
            double power = 1;
            for (double& angle : angles) { angle += power; power *= f; }
        }
        for (int i = 0; i < o.HS / 2; i++) {
            const double angle = angles[(size_t)i], c = std::cos(angle);
            const double s = back ? -std::sin(angle) : std::sin(angle);
            const double a = x[(size_t)(2 * i)], b = x[(size_t)(2 * i + 1)];
            y[(size_t)(2 * i)] = a * c - b * s;
            y[(size_t)(2 * i + 1)] = a * s + b * c;
        }
        return y;
    }
};
inline const bool carope_oracle = register_oracle<CaropeOracle>("carope");

// Nakanishi: softmax of z with the base n instead of e, and an exponent s for each head: n^(s z) / sum
struct SSMaxOracle : NoOracle {
    static double query_factor(const OracleLayer<double>& o, int h, int keys) {
        return o.parameter("ssmax", (size_t)h) * std::log((double)keys);
    }
};
inline const bool ssmax_oracle = register_oracle<SSMaxOracle>("ssmax");

// Raffel et al.: the reference code's bucket of a key at distance n = i - j
static int oracle_t5_bucket(int n, bool causal, int all = 32, int reach = 128) {
    const int buckets = causal ? all : all / 2, exact = buckets / 2;
    const int offset = !causal && n < 0 ? buckets : 0;
    const int distance = causal ? std::max(n, 0) : std::abs(n);
    if (distance < exact) { return offset + distance; }
    const double logs = std::log((double)distance / exact) / std::log((double)reach / exact) * (buckets - exact);
    return offset + std::min(buckets - 1, exact + (int)(logs + 1e-12));
}
struct T5Oracle : NoOracle {
    template <class R> static std::vector<R> bias(const OracleLayer<R>& o, int h) {
        const std::vector<R>& table = o.params.at("t5");    // (buckets,NH)
        const int buckets = (int)o.value("buckets"), reach = (int)o.value("distance");
        return each_distance(o, [&](int d) {
            return table.at((size_t)(oracle_t5_bucket(d, o.causal, buckets, reach) * o.NH + h));
        });
    }
};
inline const bool t5_oracle = register_oracle<T5Oracle>("t5");

// a value for each distance up to K, the last one for all beyond; bidirectional: rows -K .. K
struct T5ClipOracle : NoOracle {
    static double score_factor(const OracleLayer<double>& o) {     // q.k / sqrt(C) instead of q.k / sqrt(HS)
        return o.value("scale") == 1 ? std::sqrt((double)o.HS / o.C) : 1.0;
    }
    template <class R> static std::vector<R> bias(const OracleLayer<R>& o, int h) {
        const int K = (int)o.value("K");
        const std::vector<R>& table = o.params.at("t5");
        return each_distance(o, [&](int d) {
            const int row = o.causal ? std::min(d, K) : K + std::max(-K, std::min(d, K));
            return table.at((size_t)(row * o.NH + h));
        });
    }
};
inline const bool t5_clip_oracle = register_oracle<T5ClipOracle>("t5_clip");

// Chi et al.
template <bool Power> struct KerpleOracle : NoOracle {
    template <class R> static std::vector<R> bias(const OracleLayer<R>& o, int h) {
        const R r1 = o.parameter("kerple_r1", (size_t)h), r2 = o.parameter("kerple_r2", (size_t)h);
        return each_distance(o, [&](int d) {
            const R distance = (R)std::abs(d);
            if (!Power) { return -r1 * std::log(1 + r2 * distance); }
            return d == 0 ? R(0) : -r1 * std::pow(distance, r2);
        });
    }
};
inline const bool kerple_oracle = register_oracle<KerpleOracle<false>>("kerple");
inline const bool kerple_power_oracle = register_oracle<KerpleOracle<true>>("kerple_power");

// Bianchessi et al.: the logarithm of a generalized Gaussian
struct BamOracle : NoOracle {
    template <class R> static std::vector<R> bias(const OracleLayer<R>& o, int h) {
        const R a = o.parameter("bam_a", (size_t)h), b = o.parameter("bam_b", (size_t)h);
        return each_distance(o, [&](int d) { return -std::exp(a) * std::pow((R)std::abs(d) + R(1e-5), b); });
    }
};
inline const bool bam_oracle = register_oracle<BamOracle>("bam");

// Chi et al. 2023: the product of the sinusoidal embeddings of i and j, less its largest value, by head
struct SandwichOracle : NoOracle {
    template <class R> static std::vector<R> bias(const OracleLayer<R>& o, int h) {
        const int d = (int)o.value("d");
        std::vector<R> pe((size_t)o.T * d);
        for (int t = 0; t < o.T; t++) {
            for (int k = 0; k < d / 2; k++) {
                const R angle = t / std::pow(R(10000), R(2 * k) / d);
                pe[(size_t)(t * d + 2 * k)] = std::sin(angle);
                pe[(size_t)(t * d + 2 * k + 1)] = std::cos(angle);
            }
        }
        const R ratio = R(8 * (h + 1)) / o.NH;
        return each_pair(o, [&](int i, int j) {
            R product = 0;
            for (int c = 0; c < d; c++) { product += pe[(size_t)(i * d + c)] * pe[(size_t)(j * d + c)]; }
            return (product - R(d) / 2) / ratio;
        });
    }
};
inline const bool sandwich_oracle = register_oracle<SandwichOracle>("sandwich");

// Golovneva et al.: B_ij = q_i.e[p_ij] with p_ij the sum of sigmoid(score_it) over the t from j to i that i sees
struct CopeOracle : NoOracle {
    static constexpr bool reads_scores = true;
};
inline const bool cope_oracle = register_oracle<CopeOracle>("cope");

// Li et al.: an MLP 1 -> 32 -> NH of the normalised log-distance
struct FireOracle : NoOracle {
    static constexpr bool slow = true;          // the MLP for each i, j and parameter
    template <class R> static std::vector<R> bias(const OracleLayer<R>& o, int h) {
        const std::vector<R> &w1 = o.params.at("fire_w1"), &b1 = o.params.at("fire_b1"), &w2 = o.params.at("fire_w2");
        const R c = std::fabs(o.parameter("fire_c", 0)), L = std::fabs(o.parameter("fire_l", 0)) * 512;
        const R b2 = o.parameter("fire_b2", (size_t)h);
        std::vector<R> far, norm;                   // of a distance, of max(i, j)
        for (int t = 0; t < o.T; t++) {
            far.push_back(std::log(c * t + 1));
            norm.push_back(std::log(c * std::max(L, (R)t) + 1) + R(1e-6));
        }
        return each_pair(o, [&](int i, int j) {
            const R y = far[(size_t)std::abs(i - j)] / norm[(size_t)std::max(i, j)];
            R f = b2;
            for (size_t k = 0; k < 32; k++) { f += w2[(size_t)h * 32 + k] * std::max(R(0), w1[k] * y + b1[k]); }
            return f;
        });
    }
};
inline const bool fire_oracle = register_oracle<FireOracle>("fire");

// a table wpe (T_train,C), added to the embeddings
struct LearnedOracle : NoOracle {
    static std::vector<double> embed(const OracleLayer<double>& o, const std::vector<double>& x, int t) {
        std::vector<double> y = x;
        for (size_t c = 0; c < (size_t)o.C; c++) { y[c] += o.parameter("wpe", (size_t)t * o.C + c); }
        return y;
    }
};
inline const bool learned_oracle = register_oracle<LearnedOracle>("learned");

// Vaswani et al. with embed=sqrt, scale=1
struct SinusoidalOracle : NoOracle {
    static std::vector<double> embed(const OracleLayer<double>& o, const std::vector<double>& x, int t) {
        std::vector<double> y;
        for (int c = 0; c < o.C; c++) {
            const double angle = t / std::pow(10000.0, (double)(c / 2 * 2) / o.C);
            const double wave = c % 2 == 0 ? std::sin(angle) : std::cos(angle);
            const double factor = o.value("embed") == 1 ? std::sqrt((double)o.C) : 1.0;
            y.push_back(factor * x[(size_t)c] + (double)(float)o.value("scale") * wave);
        }
        return y;
    }
};
inline const bool sinusoidal_oracle = register_oracle<SinusoidalOracle>("sinusoidal");
