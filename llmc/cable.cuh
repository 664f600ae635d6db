// cable.cuh -- context-aware biases for length extrapolation (CABLE, Veisi et al. 2025).
//
//   z_t = x_t . w_c + c_c     b_t = ReLU(z_t)                S_t = sum_{k<=t} b_k
//   u_t = x_t . w_s + c_s     g_t = softplus(u_t) (nw: 1)    B_ij = -g_i |S_i - S_j|
//   w_c, w_s (NH,C) are extra rows of the qkv matmul, so z and u (B,T,NH) are extra columns of qkv.
//   backward: the bias functor sums dg and dS over each tile, and then
//     db_t = sum_{k>=t} dS_k     dz = db [z > 0]     du = dg sigmoid(u)
//   Variants have another b (v1: softplus; signed: tanh), or take the logarithm of the distance (kcable, at the end).
//
// S is summed in float64 and kept as a float64 origin per chunk of 128 tokens and a float32 offset inside it: at T =
// 131,072 a plain float32 sum is off by 0.1 to 27. Differences across chunks are float(origin_a - origin_b) + offsets.
// saves S_offset (B,NH,T), S_origin (B,NH,ceil(T/128)) float64, g (B,NH,T).
#pragma once

#include "position/encoding.cuh"

// b as a function of z, and db/dz
enum class CableStep { Relu, Softplus, Tanh };
__host__ __device__ inline float cable_b(CableStep step, float z) {
    if (step == CableStep::Softplus) { return softplus(z); }
    if (step == CableStep::Tanh) { return 2.0f * sigmoid(2.0f * z) - 1.0f; }        // within 1.2e-7
    return z > 0.0f ? z : 0.0f;
}
__host__ __device__ inline float cable_slope(CableStep step, float z) {
    if (step == CableStep::Softplus) { return sigmoid(z); }
    const float b = cable_b(step, z);
    return step == CableStep::Tanh ? 1.0f - b * b : (float)(z > 0.0f);
}

// x[t] = f(x[t]), by all threads of a block
template <class F> __device__ inline void each(float* x, int begin, int end, F f) {
    SIMD
    for (int t = begin + (int)threadIdx.x; t < end; t += blockDim.x) { x[t] = f(x[t]); }
}

// Calls f(t, sum of value(begin .. t)) for the tokens begin .. end-1, by all threads of a block; returns the last sum
template <class Value, class F> __device__ inline double running_sums(int begin, int end, Value value, F f) {
    double before = 0.0;
    for (int base = begin; base < end; base += blockDim.x) {
        const int t = base + (int)threadIdx.x;
        const double sum = before + block_scan(t < end ? value(t) : 0.0);
        if (t < end) { f(t, sum); }
        before = block_sum(threadIdx.x == blockDim.x - 1 ? sum : 0.0);      // the last thread's
    }
    return before;
}
// x[t] = sum_{k>=t} x[k], from the last token to the first, by all threads of a block. Each piece begins at a multiple
// of blockDim.x, so that padding changes no grouping
__device__ inline void suffix_sums(float* x, int T) {
    double after = 0.0;                                     // sum over the tokens after the current ones
    const int threads = (int)blockDim.x;
    __syncthreads();
    for (int base = (ceil_div(T, threads) - 1) * threads; base >= 0; base -= threads) {
        const int t = base + threads - 1 - (int)threadIdx.x;
        const double own = t < T ? (double)x[t] : 0.0;
        const double sum = after + block_scan(own);         // thread 0 has the last token: a scan is a suffix sum
        if (t < T) { x[t] = (float)sum; }
        after += block_sum(own);
    }
    __syncthreads();
}

// One block per (batch, head) and chunk, from the chunk `first` on: b, g and S_offset of the tokens before `end`. The
// chunk's sum goes to the next chunk's S_origin.
__global__ void cable_forward_kernel(float* S_offset, double* S_origin, float* g, const floatX* qkv, QkvShape shape,
                                     int first, int end, CableStep step, bool weighted) {
    const auto [stride, NH, HS, OC] = shape;
    const int chunks = ceil_div(end, CABLE_CHUNK) - first;
    const size_t bh = blockIdx.x / chunks;
    const int chunk = first + (int)(blockIdx.x % chunks);
    const int start = chunk * CABLE_CHUNK;
    const int next = imin(start + CABLE_CHUNK, end);
    const floatX* z = qkv + bh / NH * stride * OC + 3 * shape.C() + bh % NH;   // u is NH columns further
    S_origin += bh * ceil_div(stride, CABLE_CHUNK) + chunk;                    // laid out for the whole capacity
    // 1. b and g; z and u are gathered first, because strided loads do not vectorize
    float* b = S_offset + bh * stride;                      // until S takes its place
    float* u = g + bh * stride;                             // until g does
    for (int t = start + (int)threadIdx.x; t < next; t += blockDim.x) {
        b[t] = (float)z[(size_t)t * OC];
        u[t] = weighted ? (float)z[(size_t)t * OC + NH] : 0.0f;
    }
    each(b, start, next, [step](float z) { return cable_b(step, z); });
    each(u, start, next, [weighted](float x) { return weighted ? softplus(x) : 1.0f; });
    // 2. the running sum of b
    const auto b_of = [b](int t) { return (double)b[t]; };
    const double all = running_sums(start, next, b_of, [b](int t, double sum) { b[t] = (float)sum; });
    if (threadIdx.x == 0 && chunk == 0) { S_origin[0] = 0.0; }
    if (threadIdx.x == 0 && next < end) { S_origin[1] = all; }
}
// One block per (batch, head), of which one thread adds the chunks' sums in order.
__global__ void cable_origin_kernel(double* S_origin, int capacity, int chunks) {
    double* origin = S_origin + (size_t)blockIdx.x * capacity;
    for (int c = 1; c < chunks && threadIdx.x == 0; c++) { origin[c] += origin[c - 1]; }
}
// b, S and g of the tokens t0 .. t0+T-1, continuing from S at t0 - 1. A chunk is always summed from its first token,
// for equal bits: the chunk of token t0 - 1 is summed once more, from its z and u in qkv.
inline void cable_forward(float* S_offset, double* S_origin, float* g, const floatX* qkv, QkvShape shape, int B, int T,
                          int t0, CableStep step, bool weighted, Stream stream) {
    const int first = imax(t0 - 1, 0) / CABLE_CHUNK, chunks = ceil_div(t0 + T, CABLE_CHUNK) - first;
    const int capacity = ceil_div(shape.stride, CABLE_CHUNK);
    const size_t heads = (size_t)B * shape.NH;
    const Grid grid(heads * chunks, 128, 0, stream);
    launch(cable_forward_kernel, grid, S_offset, S_origin, g, qkv, shape, first, t0 + T, step, weighted);
    if (chunks > 1) { launch(cable_origin_kernel, Grid(heads, 32, 0, stream), S_origin + first, capacity, chunks); }
}

// One block per (batch, head): dz and du, the extra columns of dqkv, from dS and dg. dS is overwritten.
__global__ void cable_backward_kernel(floatX* dqkv, float* dS, float* dg, const floatX* qkv, QkvShape shape,
                                      CableStep step, bool weighted) {
    const auto [T, NH, HS, OC] = shape;
    const size_t bh = blockIdx.x;
    const size_t z0 = bh / NH * T * OC + 3 * shape.C() + bh % NH;        // the head's z of the sequence's first token
    const floatX* z = qkv + z0;
    floatX* dz = dqkv + z0;
    dS += bh * T;
    dg += bh * T;
    // 1. db_t = sum_{k>=t} dS_k
    float* db = dS;                                         // in the place of dS
    suffix_sums(db, T);
    // 2. dz = db db/dz
    float* u = db;                                          // in the place of db, gathered as in the forward
    for (int t = threadIdx.x; t < T; t += blockDim.x) {
        const float zt = (float)z[(size_t)t * OC];
        dz[(size_t)t * OC] = (floatX)(db[t] * cable_slope(step, zt));
        if (weighted) { u[t] = (float)z[(size_t)t * OC + NH]; }
    }
    if (!weighted) { return; }
    // 3. du = dg sigmoid(u)
    each(u, 0, T, [](float x) { return sigmoid(x); });
    for (int t = threadIdx.x; t < T; t += blockDim.x) { dz[(size_t)t * OC + NH] = (floatX)(u[t] * dg[t]); }
}

// ----------------------------------------------------------------------------------------------------------
// the bias

// -g_i |S_i - S_j|
struct CableBias : BiasFunctor {
    static constexpr FlashBias flash = FlashBias::Distance;
    const float *S_offset, *g;
    const double* S_origin;
    float *dS, *dg;             // (B,NH,T), null in the forward
    int stride, chunks;

    void fill(FlashBiasArgs& args) const {
        args.S_offset = S_offset;
        args.S_origin = S_origin;
        args.g = g;
        args.dS = dS;
        args.dg = dg;
    }
    struct Tile {
        float between;              // origin of the rows' chunk minus origin of the columns'
        const float *Si, *gi, *Sj;
        __device__ float difference(int r, int c) const { return between + Si[r] - Sj[c]; }         // S_i - S_j
        __device__ float operator()(int r, int c) const { return -gi[r] * fabsf(difference(r, c)); }
    };
    __device__ Tile tile(int bh, int i0, int j0) const {
        const double* origin = S_origin + (size_t)bh * chunks;
        const float* offset = S_offset + (size_t)bh * stride;
        const float between = (float)(origin[i0 / CABLE_CHUNK] - origin[j0 / CABLE_CHUNK]);
        return {between, offset + i0, g + (size_t)bh * stride + i0, offset + j0};
    }
    // A pair's shares of dg_i and of dS_i / g_i. dS_j gets the opposite of its share of dS_i
    struct Shares { float dg, dS; };
    // dg_i = -sum_j dlogit |S_i - S_j|     dS_i += -g_i sum_j dlogit sign(i - j)     dS_j -= the same, summed over i
    // In exact arithmetic the dlogit of a row sum to 0; rounded they do not, so dS_i and dS_j must sum the same rounded
    // numbers (docs/attention.md).
    __device__ void backward(int bh, int i0, int ni, int j0, int nj, float* dlogit, int ld) const {
        const Tile t = tile(bh, i0, j0);
        sum_shares(bh, i0, ni, j0, nj, dlogit, ld, [&](int r, int c, float d) {
            return Shares{-d * fabsf(t.difference(r, c)), c - r > i0 - j0 ? d : -d};
        });
    }
    // shares(r, c, dlogit) of each pair of a tile
    template <class F>
    __device__ void sum_shares(int bh, int i0, int ni, int j0, int nj, float* dlogit, int ld, const F& shares) const {
        const size_t head = (size_t)bh * stride;
        // 1. one thread per query; its shares of dS replace dlogit, for the keys
        for (int r = threadIdx.x; r < ni; r += blockDim.x) {
            float* d = dlogit + r * ld;
            const auto sum = sums_over<2>(0, nj, 1, [&](float* s, int c) {
                const Shares of = shares(r, c, d[c]);
                s[0] += of.dg;
                s[1] += of.dS;
                d[c] = of.dS;
            });
            dg[head + i0 + r] += sum.x[0];
            dS[head + i0 + r] += g[head + i0 + r] * sum.x[1];
        }
        __syncthreads();
        // 2. a register of keys per thread, queries in order. The tile's sums go into the first row of dlogit; the
        // columns after nj are not read
        for (int c = threadIdx.x * LANES; c < nj; c += blockDim.x * LANES) {
            lanes sum = lanes{};
            for (int r = 0; r < ni; r++) { sum += -g[head + i0 + r] * load_lanes(dlogit + r * ld + c); }
            store_lanes(dlogit + c, sum);
        }
        __syncthreads();
        for (int c = threadIdx.x; c < nj; c += blockDim.x) { dS[head + j0 + c] += dlogit[c]; }
        __syncthreads();
    }
};

// ----------------------------------------------------------------------------------------------------------
// the encoding

// Weighted: g = softplus(u), else 1
template <class Bias, bool Weighted, CableStep Step> struct Cable : Encoding {
    using Encoding::Encoding;
    float *S_offset = nullptr, *g = nullptr;                                    // (B,NH,T)
    float *dS = nullptr, *dg = nullptr;                                         // (B,NH,T)
    double* S_origin = nullptr;                                                 // (B,NH,ceil(T/128))
    static constexpr bool has_relu = Step == CableStep::Relu;

    // bias: c_c at first, so that the ReLU is open.  gate: g at first is about gate 2^(-8(h+1)/NH), as ALiBi spreads
    // its slopes, so that a loaded model still sees far; g is about e^c_s there, so c_s falls evenly
    static Hyperparameters defaults(int) {
        if (!has_relu) { return {}; }
        return Weighted ? Hyperparameters{{"bias"}, {"gate"}} : Hyperparameters{{"bias"}};
    }
    template <class Tensors> void declare(Tensors& t) {
        t.columns("cable.c", t.NH, constant(has_relu ? (float)t.config->value("bias") : 0.0f));         // w_c, c_c
        const double gate = Weighted && has_relu ? t.config->value("gate") : 0.0;
        const double step = -8 * LN2_HIGH / t.NH;
        const InitRule start = gate > 0 ? ramp((float)(portable_log(gate) + step), (float)step) : constant(0.0f);
        if (Weighted) { t.columns("cable.s", t.NH, start); }                // w_s, c_s
        declare_sums(t);
    }
    // all but the columns: an encoding that derives from this one may fill S differently
    template <class Tensors> void declare_sums(Tensors& t) {
        const size_t BNH = (size_t)t.B * t.NH, T = (size_t)t.stride;
        t.cached(S_offset, "S_offset", Per::Layer, BNH, T);
        t.cached(S_origin, "S_origin", Per::Layer, BNH, ceil_div(T, (size_t)CABLE_CHUNK));
        t.cached(g, "g", Per::Layer, BNH, T);
        t.scratch(dS, "dS", BNH, T);
        t.scratch(dg, "dg", BNH, T);
        if (flash_skips(Bias::flash)) { declare_key_max(*this, t); }
    }
    void prepare_forward(floatX* qkv, int B, int T, int t0, Stream stream) const {
        cable_forward(S_offset, S_origin, g, qkv, v.qkv_shape(v.stride), B, T, t0, Step, Weighted, stream);
        update_key_max(*this, qkv, B, T, t0, stream);
    }
    void begin_backward(const floatX*, int B, int T, Stream stream) const {
        device_zero(dS, sizeof(float) * B * v.NH * T, stream);
        device_zero(dg, sizeof(float) * B * v.NH * T, stream);
    }
    void prepare_backward(floatX* dqkv, const floatX* qkv, int B, int T, Stream stream) const {
        const Grid grid((size_t)B * v.NH, 256, 0, stream);
        launch(cable_backward_kernel, grid, dqkv, dS, dg, qkv, v.qkv_shape(T), Step, Weighted);
    }
    Bias bias() const {
        Bias bias = {};
        (CableBias&)bias = {{}, S_offset, g, S_origin, dS, dg, v.stride, ceil_div(v.stride, CABLE_CHUNK)};
        return bias;
    }
};

// the rows of table.h
using CableFull = Cable<CableBias, true, CableStep::Relu>;
using CableNW = Cable<CableBias, false, CableStep::Relu>;
using CableV1 = Cable<CableBias, false, CableStep::Softplus>;

// ----------------------------------------------------------------------------------------------------------
// variants

// S may fall, so the sign is taken of S_i - S_j: 1 where they are equal
struct CableSignedBias : CableBias {
    static constexpr FlashBias flash = FlashBias::Unknown;
    __device__ void backward(int bh, int i0, int ni, int j0, int nj, float* dlogit, int ld) const {
        const Tile t = tile(bh, i0, j0);
        sum_shares(bh, i0, ni, j0, nj, dlogit, ld, [&](int r, int c, float d) {
            const float D = t.difference(r, c);
            return Shares{-d * fabsf(D), D < 0.0f ? d : -d};
        });
    }
};
using CableSigned = Cable<CableSignedBias, true, CableStep::Tanh>;

// -g_i log(1 + (S_i - S_j)^2), or `inside`: -log(1 + r^2), r = g_i |S_i - S_j|
struct KCableBias : CableBias {
    static constexpr FlashBias flash = FlashBias::LogDistance;
    bool inside;

    void fill(FlashBiasArgs& args) const {
        CableBias::fill(args);
        args.inside = inside;
    }
    struct Tile {
        float between;              // as CableBias::Tile, not derived from it: ptxas would take more registers
        const float *Si, *gi, *Sj;
        bool inside;
        __device__ float distance(int r, int c) const { return fabsf(between + Si[r] - Sj[c]); }
        // what is squared in the logarithm
        __device__ float argument(int r, float D) const { return (inside ? gi[r] : 1.0f) * D; }
        __device__ float operator()(int r, int c) const {
            const float a = argument(r, distance(r, c));
            return -(inside ? 1.0f : gi[r]) * fast_log1p(a * a);
        }
    };
    __device__ Tile tile(int bh, int i0, int j0) const {
        const CableBias::Tile t = CableBias::tile(bh, i0, j0);
        return {t.between, t.Si, t.gi, t.Sj, inside};
    }
    // dS_i over g_i = sum_j dlogit k sign(i - j)     k = -2 |D| / (1 + D^2), inside: -2r / (1 + r^2)     D = S_i - S_j
    // dg_i = -sum_j dlogit log(1 + D^2), inside: sum_j dlogit k |D|
    __device__ void backward(int bh, int i0, int ni, int j0, int nj, float* dlogit, int ld) const {
        const Tile t = tile(bh, i0, j0);
        sum_shares(bh, i0, ni, j0, nj, dlogit, ld, [&](int r, int c, float d) {
            const float D = t.distance(r, c), a = t.argument(r, D);
            const float dk = d * (-2.0f * a / (1.0f + a * a));              // dlogit k
            const float of_S = j0 + c > i0 + r ? -dk : dk;
            return Shares{inside ? dk * D : -d * fast_log1p(a * a), of_S};
        });
    }
};
struct KCable : Cable<KCableBias, true, CableStep::Relu> {
    using Cable::Cable;
    static Hyperparameters defaults(int) { return {{"weight", 0, "outside|inside"}, {"bias"}, {"gate"}}; }
    KCableBias bias() const {
        KCableBias bias = Cable::bias();
        bias.inside = v.config->value("weight") == 1;
        return bias;
    }
};
using KCableNW = Cable<KCableBias, false, CableStep::Relu>;
using KCableV1 = Cable<KCableBias, false, CableStep::Softplus>;
