// position/rope.cuh -- rotary embedding (Su et al. 2021): neighbouring channels of q and k are pairs, turned by t f_i.
//
//   f_i = theta^(-2i/R), theta = 10000. The first R = p HS channels of each head are turned; p is 1 by default. For
//   longer texts than T_original, a model's first length, rope is stretched s times, s = T / T_original or as given.
//   Training may continue at a new length; T_original stays.
//   pi (Chen et al. 2023)       f_i / s
//   ntk (bloc97 2023)           theta' = theta * s^(R/(R-2))
//   yarn (Peng et al. 2023)     gamma f_i + (1 - gamma) f_i / s, gamma = clamp((T_original f_i / 2 pi - 1) / 31, 0, 1),
//                               and q.k times (0.1 ln s + 1)^2
//   longrope (Ding et al. 2024) f_i / factor_i from a file, which has a list for texts of up to T_original tokens and a
//                               list for longer texts, and q.k times 1 + ln s / ln T_original
//   backward: dq and dk are turned back. saves rope_table (T,R): cos and sin of each pair, for all heads and layers.
//
// With clock=cable the angle is S_t f_i, S a running sum in each head as in cable.cuh: logits depend on S_i - S_j.
//   z_t = x_t . w + c     b_t = ReLU(z_t)     S_t = sum_{k<=t} b_k         w (NH,C): extra rows of the qkv matmul
//   backward: dS_t = sum_i f_i (q_2i dq_2i+1 - q_2i+1 dq_2i + the same of k), q and dq turned; then as in cable.cuh
// c starts at 1, so S_t is about t at first, and training begins near rope. saves S as in cable.cuh.
#pragma once

#include "../cable.cuh"

// Radians per token of each of the R/2 pairs, in a text of T tokens
static std::vector<double> rope_frequencies(const PositionConfig& run, double theta, int R, int T) {
    const double T_original = run.original_length();
    const double s = run.stretch(T);
    // ntk stretches theta: fast pairs keep their speed, slow pairs turn s times as slowly
    if (run.scaling == RopeScaling::NTK && R > 2) { theta *= portable_pow(s, (double)R / (R - 2)); }
    std::vector<double> frequencies;
    for (int i = 0; i < R / 2; i++) {
        double f = portable_pow(theta, -2.0 * i / R);
        if (run.scaling == RopeScaling::PI) { f /= s; }
        // yarn: pairs with 32 turns or more within T_original keep their speed, pairs with at most one turn slow down
        if (run.scaling == RopeScaling::YaRN) {
            const double turns = T_original * f / 6.283185307179586476925286766559;
            const double ramp = (turns - 1.0) / 31.0;
            const double gamma = clamp(ramp, 0.0, 1.0);
            f = gamma * f + (1.0 - gamma) * f / s;
        }
        if (run.scaling == RopeScaling::LongRoPE) {
            f /= (T > T_original ? run.long_factor : run.short_factor)[(size_t)i];
        }
        frequencies.push_back(f);
    }
    return frequencies;
}

constexpr int ROPE_LAUNCH = 64;                             // pairs per launch: enough for a head of 128 channels
struct RopeFrequencies { double of[ROPE_LAUNCH]; };

// table (T,R), rows t0 .. t0+T-1. One block per pair, from `first` on.
static __global__ void rope_table_kernel(float* table, int T, int t0, int R, int first, RopeFrequencies frequencies) {
    const int i = first + blockIdx.x;
    const double f = frequencies.of[blockIdx.x];
    for (int t = t0 + (int)threadIdx.x; t < t0 + T; t += blockDim.x) {
        table[(size_t)t * R + 2 * i] = (float)portable_cos(t * f);
        table[(size_t)t * R + 2 * i + 1] = (float)portable_sin(t * f);
    }
}

// Pairs x0, x1, turned by the angles whose cos, sin stand at the same places of `angle`. sign = -1 turns back.
template <int P>
static __device__ __forceinline__ Pack<P> turned_pairs(Pack<P> v, const Pack<P>& angle, float sign) {
    UNROLL
    for (int e = 0; e < P; e += 2) {
        const float c = angle.x[e];
        const float s = sign * angle.x[e + 1];
        const float x0 = v.x[e];
        const float x1 = v.x[e + 1];
        v.x[e] = x0 * c - x1 * s;
        v.x[e + 1] = x0 * s + x1 * c;
    }
    return v;
}

// The 2 NH heads of q and k lie side by side.
template <int P>
static __global__ void rope_kernel(floatX* qkv, const float* table, QkvShape shape, int T, int t0, int R, float sign) {
    const auto [stride, NH, HS, OC] = shape;
    const HeadWalk walk(T, R / P);
    t0 += walk.t;
    for (int r = walk.first; r < walk.tokens * 2 * NH; r += walk.step) {
        const int head = r % (2 * NH);
        const size_t t = t0 + r / (2 * NH);
        floatX* x = qkv + (walk.b * stride + t) * OC + (size_t)head * HS;
        const float* angle = table + t * R;                 // all heads share it
        SIMD
        for (int d = walk.lane * P; d < R; d += walk.lanes * P) {
            store_pack<P>(x + d, turned_pairs(load_pack<P>(x + d), load_pack<P>(angle + d), sign));
        }
    }
}

// clock=cable: `pairs` pairs of each head of q and k, from `first` on, turned by S_t f_i. S_offset, S_origin: as in
// cable.cuh. Back: x has the gradients, which are turned back, and `turned` has q and k as the forward left them. dS
// (B,NH,T) is a sum over the pairs, those before `first` from earlier launches: each thread sums its packs in order, q
// then k, and the threads of a head are summed in order.
template <int P, bool Back>
static __global__ void rope_clock_kernel(floatX* x, float* dS, const floatX* turned, const float* S_offset,
                                         const double* S_origin, const int* kv_len, QkvShape shape, int T, int t0,
                                         int first, int pairs, RopeFrequencies frequencies) {
    const auto [stride, NH, HS, OC] = shape;
    float* parts = dynamic_shared();                        // Back: (tokens,NH,lanes)
    const HeadWalk walk(T, 2 * pairs / P);
    t0 += walk.t;
    for (int r = walk.first; r < walk.tokens * NH; r += walk.step) {
        const int t = t0 + r / NH;
        const size_t bh = walk.b * NH + r % NH;
        const double origin = S_origin[bh * ceil_div(stride, CABLE_CHUNK) + t / CABLE_CHUNK];
        const double S = origin + (double)S_offset[bh * stride + t];
        const bool counts = kv_len == nullptr || t < kv_len[walk.b];            // padding has no gradient
        const size_t q = (walk.b * stride + t) * OC + (size_t)(r % NH) * HS + 2 * first;
        float sum = 0.0f;
        for (int d = walk.lane * P; d < 2 * pairs; d += walk.lanes * P) {
            Pack<P> angle;
            for (int e = 0; e < P; e += 2) {
                angle.x[e] = (float)portable_cos(S * frequencies.of[(d + e) / 2]);
                angle.x[e + 1] = (float)portable_sin(S * frequencies.of[(d + e) / 2]);
            }
            for (size_t at = q + d; at <= q + d + NH * HS; at += NH * HS) {     // q, then k
                const Pack<P> v = load_pack<P>(x + at);
                if (Back && counts) {
                    const Pack<P> y = load_pack<P>(turned + at);
                    for (int e = 0; e < P; e += 2) {
                        const float slope = y.x[e] * v.x[e + 1] - y.x[e + 1] * v.x[e];      // the angle's gradient
                        sum += (float)frequencies.of[(d + e) / 2] * slope;
                    }
                }
                store_pack<P>(x + at, turned_pairs(v, angle, Back ? -1.0f : 1.0f));
            }
        }
        if (Back) { parts[r * walk.lanes + walk.lane] = sum; }
    }
    if (!Back) { return; }
    sum_lanes(parts, walk, NH, [&](int i, int h, float sum) {
        float& all = dS[(walk.b * shape.NH + h) * T + walk.t + i];
        all = first == 0 ? sum : all + sum;
    });
}

// What rope and carope demand of a model. summed: the angle is a sum over the text
template <class Tensors> void check_pairs(const Tensors& t, const char* encoding, bool summed) {
    check(t.HS % 2 == 0, "--pos %s turns pairs, so the head size must be even, but %d channels / %d heads = %d; choose "
          "another --model", encoding, t.C(), t.NH, t.HS);
    check(!summed || !t.run->has("ssmax"), "--pos %s: expected no ssmax with %s, whose backward reads q's gradient "
          "before ssmax scales it", t.run->name.c_str(), encoding);
}

struct Rope : Encoding {
    using Encoding::Encoding;
    static constexpr int hooks = TURNS_QK;
    float* table = nullptr;                                 // (T,R): cos, sin of t f_i, for the pair i
    float *S_offset = nullptr, *dS = nullptr;               // (B,NH,T), clock=cable, as is S_origin
    double* S_origin = nullptr;                             // (B,NH,ceil(T/128))

    static Hyperparameters defaults(int) {
        return {{"theta", 10000.0}, {"p", 1.0}, {"clock", 0, "token|cable"}};
    }
    static bool has_clock(const EncodingConfig& config) { return config.value("clock") == 1; }
    static int turned(const EncodingConfig& config, int HS) { return 2 * (int)std::ceil(config.value("p") * HS / 2); }
    template <class Tensors> void declare(Tensors& t) {
        const int HS = t.HS;
        const bool clock = has_clock(*t.config);
        check_pairs(t, clock ? "rope:clock=cable" : "rope", clock);
        const double p = t.config->value("p");
        check(p <= 1, "--pos rope:p=%g: expected the share of a head's channels that are turned, at most 1", p);
        const PositionConfig& c = *t.run;
        const bool yarn = c.scaling == RopeScaling::YaRN, longrope = c.scaling == RopeScaling::LongRoPE;
        const char* kind = yarn ? "yarn" : "longrope";
        check(p == 1 || !(yarn || longrope), "--rope_scaling %s: expected rope with p = 1, got %g: %s's factor is for "
              "all of q.k", kind, p, kind);
        const size_t pairs = (size_t)HS / 2;
        const size_t shorts = c.short_factor.size(), longs = c.long_factor.size();
        check(!longrope || (shorts == pairs && longs == pairs), "--rope_scaling longrope: expected short_factor and "
              "long_factor to have %zu numbers, one for each pair of a head's %d channels, got %zu and %zu", pairs, HS,
              shorts, longs);
        check(!longrope || c.original_length() > 1, "--rope_scaling longrope: expected an original length of at least "
              "2 tokens, got %d", c.original_length());
        const size_t T = (size_t)t.stride, BNH = (size_t)t.B * t.NH;
        if (!clock) {
            t.cached(table, "rope_table", Per::Model, T, (size_t)turned(*t.config, HS));
            return;
        }
        t.columns("clock", t.NH, constant(1.0f));                               // w, c
        t.cached(S_offset, "S_offset", Per::Layer, BNH, T);
        t.cached(S_origin, "S_origin", Per::Layer, BNH, ceil_div(T, (size_t)CABLE_CHUNK));
        t.scratch(dS, "dS", BNH, T);
    }
    void prepare_forward(floatX* qkv, int B, int T, int t0, Stream stream) const {
        const int R = turned(*v.config, v.HS);
        if (has_clock(*v.config)) {                         // g = 1 goes to dS, which is scratch
            cable_forward(S_offset, S_origin, dS, qkv, v.qkv_shape(v.stride), B, T, t0, CableStep::Relu, false, stream);
            turn_by_clock<false>(qkv, nullptr, B, T, t0, v.stride, stream);
            return;
        }
        if (v.layer == 0) {                                 // the first layer fills it for all
            each_launch(R, [&](int first, int pairs, const RopeFrequencies& some) {
                launch(rope_table_kernel, Grid((size_t)pairs, 128, 0, stream), table, T, t0, R, first, some);
            });
        }
        turn(qkv, B, T, t0, v.stride, 1.0f, stream);
    }
    // A rotation's transpose is its inverse.
    void prepare_backward(floatX* dqkv, const floatX* qkv, int B, int T, Stream stream) const {
        if (!has_clock(*v.config)) {
            turn(dqkv, B, T, 0, T, -1.0f, stream);
            return;
        }
        turn_by_clock<true>(dqkv, qkv, B, T, 0, T, stream);
        launch(cable_backward_kernel, Grid((size_t)B * v.NH, 256, 0, stream), dqkv, dS, dS, qkv, v.qkv_shape(T),
               CableStep::Relu, false);                     // without g it reads no dg
    }
    // Calls f(first, pairs, their frequencies) once per launch, which together have the R/2 pairs.
    template <class F> void each_launch(int R, F f) const {
        const std::vector<double> frequencies = rope_frequencies(*v.run, v.config->value("theta"), R, v.stride);
        for (int first = 0; first < R / 2; first += ROPE_LAUNCH) {
            const int pairs = imin(ROPE_LAUNCH, R / 2 - first);
            RopeFrequencies some = {};
            std::copy_n(frequencies.begin() + first, pairs, some.of);
            f(first, pairs, some);
        }
    }
    // Calls f(P), P being the channels of a pack, in whole pairs.
    template <class F> void with_pairs(int R, F f) const {
        constexpr int WIDE = imax(PACK, 2);
        if (R % WIDE == 0 && v.HS % WIDE == 0) { f(std::integral_constant<int, WIDE>()); }
        else { f(std::integral_constant<int, 2>()); }
    }
    template <bool Back>
    void turn_by_clock(floatX* x, const floatX* qkv, int B, int T, int t0, int stride, Stream stream) const {
        const int R = turned(*v.config, v.HS);
        const Grid grid = head_grid(B, T, Back ? (size_t)HEAD_TOKENS * v.NH * HEAD_LANES : 0, stream);
        each_launch(R, [&](int first, int pairs, const RopeFrequencies& some) {
            with_pairs(R, [&](auto P) {
                launch(rope_clock_kernel<P, Back>, grid, x, dS, qkv, S_offset, S_origin, v.kv_len, v.qkv_shape(stride),
                       T, t0, first, pairs, some);
            });
        });
    }
    void turn(floatX* x, int B, int T, int t0, int stride, float sign, Stream stream) const {
        const int R = turned(*v.config, v.HS);
        with_pairs(R, [&](auto P) {
            launch(rope_kernel<P>, head_grid(B, T, 0, stream), x, table, v.qkv_shape(stride), T, t0, R, sign);
        });
    }
    float score_factor(int T) const {
        const PositionConfig& c = *v.run;
        const double log_s = portable_log(c.stretch(T));
        if (c.scaling == RopeScaling::LongRoPE) { return (float)(1.0 + log_s / portable_log(c.original_length())); }
        if (c.scaling != RopeScaling::YaRN) { return 1.0f; }
        const double m = 0.1 * log_s + 1.0;
        return (float)(m * m);
    }
};

// ----------------------------------------------------------------------------------------------------------
// CARoPE (Veisi et al. 2025): rope whose base frequency each token and head chooses. x is each layer's normalised
// input, where the paper has the token embedding. No program of the authors is known; c is this project's.
//
//   z_t = x_t . w + c     f_t = 1 / (1 + softplus(z_t))     S_ti = sum_{k<=t} f_k^i     w (NH,C): as in cable.cuh
//   The pair (2i, 2i+1) of q and k is turned by S_ti, i = 0 .. HS/2-1, so logits depend on S_ti - S_ui. As in the paper
//   training starts from rope: w at 0, and c where f = 10000^(-2/HS), rope's frequency of pair 1.
//   backward: dS_ti = q_2i dq_2i+1 - q_2i+1 dq_2i + the same of k, q and dq turned
//     d(f_t^i) = sum_{k>=t} dS_ki     df = sum_i i f^(i-1) d(f^i)     dz = -df f^2 sigmoid(z)
//
// f and S are float64: a long text sums the error of f. saves S_origin (B,NH,HS/2,ceil(T/128)), S before each chunk of
// 128 tokens; inside a chunk the backward sums again.

__device__ inline double carope_f(double z) { return 1.0 / (1.0 + portable_log(1.0 + portable_exp(z))); }
// x^n
__device__ inline double whole_power(double x, int n) {
    double y = 1.0;
    for (; n > 0; n /= 2) {
        if (n % 2 == 1) { y *= x; }
        x *= x;
    }
    return y;
}

// One block per (batch, head, pair i): turns the pair of the tokens t0 .. t0+T-1. Back: x has the gradients, which are
// turned back, and qkv has q and k as the forward left them; dS (B,NH,HS/2,T) becomes d(f_t^i).
template <bool Back>
static __global__ void carope_kernel(floatX* x, float* dS, double* S_origin, const floatX* qkv, const int* kv_len,
                                     QkvShape shape, int T, int t0) {
    const auto [stride, NH, HS, OC] = shape;
    const int i = blockIdx.x % (HS / 2);
    const size_t bh = blockIdx.x / (HS / 2);
    const size_t row = bh / NH * stride * OC;                                   // the sequence's first token
    const size_t q = row + bh % NH * HS + 2 * i;
    const size_t z = row + 3 * NH * HS + bh % NH;
    const int counted = kv_len == nullptr ? T : kv_len[bh / NH];                // padding has no gradient
    S_origin += blockIdx.x * (size_t)ceil_div(stride, CABLE_CHUNK);
    dS += Back ? blockIdx.x * (size_t)T : 0;
    // as in cable_forward: from the first token of the chunk of token t0 - 1, for the same bits
    int start = imax(t0 - 1, 0) / CABLE_CHUNK * CABLE_CHUNK;
    double origin = start == 0 ? 0.0 : S_origin[start / CABLE_CHUNK];
    __syncthreads();
    for (; start < t0 + T; start += CABLE_CHUNK) {
        if (threadIdx.x == 0) { S_origin[start / CABLE_CHUNK] = origin; }
        const auto power = [&](int t) {
            return whole_power(carope_f((float)qkv[z + (size_t)t * shape.OC]), i);
        };
        origin += running_sums(start, imin(start + CABLE_CHUNK, t0 + T), power, [&](int t, double offset) {
            if (t < t0) { return; }                         // turned already
            const double S = origin + offset;
            Pack<2> angle;
            angle.x[0] = (float)portable_cos(S);
            angle.x[1] = (float)portable_sin(S);
            float slope = 0.0f;                             // the gradient of the angle
            for (size_t at = q + (size_t)t * shape.OC, k = at + shape.C(); at <= k; at += shape.C()) {  // q, then k
                const Pack<2> v = load_pack<2>(x + at);
                if (Back) {
                    const Pack<2> y = load_pack<2>(qkv + at);
                    slope += y.x[0] * v.x[1] - y.x[1] * v.x[0];
                }
                store_pack<2>(x + at, turned_pairs(v, angle, Back ? -1.0f : 1.0f));
            }
            if (Back) { dS[t] = t < counted ? slope : 0.0f; }
        });
    }
    if (Back) { suffix_sums(dS, T); }
}

// One block per (batch, head): dz, in the column of dqkv that z has in qkv, from d(f_t^i)
static __global__ void carope_backward_kernel(floatX* dqkv, const float* dS, const floatX* qkv, int T, int NH, int HS,
                                              int OC) {
    const size_t bh = blockIdx.x;
    const size_t z = bh / NH * T * OC + 3 * NH * HS + bh % NH;
    for (int t = threadIdx.x; t < T; t += blockDim.x) {
        const float zt = (float)qkv[z + (size_t)t * OC];
        const float f = (float)carope_f(zt);
        float df = 0.0f;
        float power = 1.0f;                                 // f^(i-1)
        for (int i = 1; i < HS / 2; i++) {
            df += (float)i * power * dS[(bh * (HS / 2) + i) * T + t];
            power *= f;
        }
        dqkv[z + (size_t)t * OC] = (floatX)(-df * f * f * sigmoid(zt));
    }
}

struct Carope : Encoding {
    using Encoding::Encoding;
    static constexpr int hooks = TURNS_QK;
    double* S_origin = nullptr;                             // (B,NH,HS/2,ceil(T/128))
    float* dS = nullptr;                                    // (B,NH,HS/2,T)

    template <class Tensors> void declare(Tensors& t) {
        check_pairs(t, "carope", true);
        const double y = portable_pow(10000.0, 2.0 / t.HS) - 1.0;               // softplus(c)
        const float c = (float)(y + portable_log1p(-portable_exp(-y)));
        t.columns("clock", t.NH, constant(c), constant(0.0f));
        const size_t rows = (size_t)t.B * t.NH * t.HS / 2, T = (size_t)t.stride;
        t.cached(S_origin, "S_origin", Per::Layer, rows, ceil_div(T, (size_t)CABLE_CHUNK));
        t.scratch(dS, "dS", rows, T);
    }
    void prepare_forward(floatX* qkv, int B, int T, int t0, Stream stream) const {
        turn<false>(qkv, qkv, B, T, t0, v.stride, stream);
    }
    void prepare_backward(floatX* dqkv, const floatX* qkv, int B, int T, Stream stream) const {
        turn<true>(dqkv, qkv, B, T, 0, T, stream);
        launch(carope_backward_kernel, Grid((size_t)B * v.NH, 256, 0, stream), dqkv, dS, qkv, T, v.NH, v.HS, v.OC);
    }
    template <bool Back>
    void turn(floatX* x, const floatX* qkv, int B, int T, int t0, int stride, Stream stream) const {
        const Grid grid((size_t)B * v.NH * v.HS / 2, 128, 0, stream);
        launch(carope_kernel<Back>, grid, x, dS, S_origin, qkv, v.kv_len, v.qkv_shape(stride), T, t0);
    }
};
