// cable.cuh -- context-aware biases for length extrapolation (CABLE, Veisi et al. 2025).
//
//   z_t = x_t . w_c + c_c     b_t = ReLU(z_t) (v1: softplus; signed: tanh)     S_t = sum_{k<=t} b_k
//   u_t = x_t . w_s + c_s     g_t = softplus(u_t) (nw: 1)
//   cable:  B_ij = -g_i |S_i - S_j|          kcable:  B_ij = -g_i log(1 + (S_i - S_j)^2)
//   kcable:weight=inside:  B_ij = -log(1 + r^2), r = g_i |S_i - S_j|
//   w_c, w_s (NH,C) are extra rows of the qkv matmul, so z and u (B,T,NH) are extra columns of qkv.
//   backward: the bias functor sums dg and dS over each tile, and then
//     db_t = sum_{k>=t} dS_k     dz = db [z > 0] (v1: db sigmoid(z); signed: db (1 - b^2))     du = dg sigmoid(u)
//
// S is summed in float64 and kept as a float64 origin per chunk of 128 tokens and a float32 offset inside it: at T =
// 131,072 a plain float32 sum is off by 0.1 to 27. Differences across chunks are float(origin_a - origin_b) + offsets.
// saves S_offset (B,NH,T), S_origin (B,NH,ceil(T/128)) float64, g (B,NH,T).
#pragma once

#include "position/key_max.cuh"

constexpr int CABLE_CHUNK = 128;

enum class CableStep { Relu, Softplus, Tanh };              // what b is of z; only with Tanh may S fall

// within 1.2e-7
__host__ __device__ inline float cable_tanh(float x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }

// x[t] = f(x[t]), by all threads of a block
template <class F> __device__ inline void each(float* x, int begin, int end, F f) {
    SIMD
    for (int t = begin + (int)threadIdx.x; t < end; t += blockDim.x) { x[t] = f(x[t]); }
}

// One block per (batch, head): b, S and g of the tokens t0 .. t0+T-1, continuing from S at t0 - 1.
__global__ void cable_forward_kernel(float* S_offset, double* S_origin, float* g, const floatX* qkv, int T,
                                     Start first, int stride, int NH, int C, int OC, CableStep step, bool weighted) {
    const int t0 = first.position();
    const size_t bh = blockIdx.x;
    const size_t b = bh / NH;
    const size_t h = bh % NH;
    const int chunks = ceil_div(stride, CABLE_CHUNK);       // of the whole capacity, as S_origin is laid out
    S_offset += bh * stride;                                // this head's rows
    g += bh * stride;
    S_origin += bh * chunks;
    const floatX* z = qkv + b * stride * OC + 3 * C + h;    // u is NH columns further
    // Every call sums a chunk from its first token, for the same bits: the chunk of token t0 - 1 once more, whose z and
    // u are kept with the keys.
    int start = imax(t0 - 1, 0) / CABLE_CHUNK * CABLE_CHUNK;
    double origin = start == 0 ? 0.0 : S_origin[start / CABLE_CHUNK];          // the sum that enters the chunk
    __shared__ double last;                                 // the sum that leaves a block's width of tokens
    __syncthreads();
    for (; start < t0 + T; start += CABLE_CHUNK) {
        const int end = imin(start + CABLE_CHUNK, t0 + T);
        if (threadIdx.x == 0) { S_origin[start / CABLE_CHUNK] = origin; }
        // 1. b and g; z and u are gathered first, because strided loads do not vectorize
        for (int t = start + (int)threadIdx.x; t < end; t += blockDim.x) {
            S_offset[t] = (float)z[(size_t)t * OC];         // S_offset holds b for a moment
            if (weighted) { g[t] = (float)z[(size_t)t * OC + NH]; }
        }
        if (step == CableStep::Softplus) { each(S_offset, start, end, [](float x) { return softplus(x); }); }
        else if (step == CableStep::Tanh) { each(S_offset, start, end, [](float x) { return cable_tanh(x); }); }
        else { each(S_offset, start, end, [](float x) { return x > 0.0f ? x : 0.0f; }); }
        if (weighted) { each(g, start, end, [](float x) { return softplus(x); }); }
        else { each(g, start, end, [](float) { return 1.0f; }); }
        // 2. the running sum of b, a block's width at a time
        double offset = 0.0;
        for (int base = start; base < end; base += blockDim.x) {
            const int t = base + (int)threadIdx.x;
            const double sum = offset + block_scan(t < end ? (double)S_offset[t] : 0.0);       // b_start + ... + b_t
            if (t < end) { S_offset[t] = (float)sum; }
            if (threadIdx.x == blockDim.x - 1) { last = sum; }
            __syncthreads();
            offset = last;
        }
        origin += offset;
    }
}

// One block per (batch, head): dS and dg become dz and du, in place and then in the extra columns of dqkv.
__global__ void cable_backward_kernel(floatX* dqkv, float* dS, float* dg, const floatX* qkv, int T, int NH, int C,
                                      int OC, CableStep step, bool weighted) {
    const size_t bh = blockIdx.x;
    const size_t b = bh / NH;
    const size_t h = bh % NH;
    const size_t z0 = b * T * OC + 3 * C + h;               // the head's z of the sequence's first token
    const floatX* z = qkv + z0;
    floatX* dz = dqkv + z0;
    dS += bh * T;
    dg += bh * T;
    // 1. db_t = sum_{k>=t} dS_k, from the last token to the first. Pieces are aligned, so that padding changes no
    // grouping
    double after = 0.0;                                     // sum of dS after the current tokens
    const int threads = (int)blockDim.x;
    for (int base = (ceil_div(T, threads) - 1) * threads; base >= 0; base -= threads) {
        const int t = base + threads - 1 - (int)threadIdx.x;
        const float dSt = t < T ? dS[t] : 0.0f;
        const double db = after + block_scan((double)dSt);  // thread 0 has the last token: a scan is a suffix sum
        if (t < T) { dS[t] = (float)db; }
        after += block_sum((double)dSt);
    }
    __syncthreads();
    // 2. dz = db db/dz
    for (int t = threadIdx.x; t < T; t += blockDim.x) {
        const float zt = (float)z[(size_t)t * OC];
        float slope = zt > 0.0f ? 1.0f : 0.0f;              // db/dz
        if (step == CableStep::Softplus) { slope = sigmoid(zt); }
        if (step == CableStep::Tanh) { slope = 1.0f - cable_tanh(zt) * cable_tanh(zt); }
        dz[(size_t)t * OC] = (floatX)(dS[t] * slope);
        if (weighted) { dS[t] = (float)z[(size_t)t * OC + NH]; }            // u, gathered as above
    }
    if (!weighted) { return; }
    // 3. du = dg sigmoid(u)
    each(dS, 0, T, [](float x) { return sigmoid(x); });
    for (int t = threadIdx.x; t < T; t += blockDim.x) { dz[(size_t)t * OC + NH] = (floatX)(dS[t] * dg[t]); }
}

// LogKernel: kcable
template <bool LogKernel> struct CableBias : BiasFunctor {
    static constexpr FlashBias flash = LogKernel ? FlashBias::LogDistance : FlashBias::Distance;
    const float *S_offset, *g;
    const double* S_origin;
    float *dS, *dg;             // (B,NH,T), null in the forward
    int stride, chunks;
    bool causal;
    bool inside = false;        // LogKernel: g is inside the logarithm
    bool falls = false;         // S may

    void fill(FlashBiasArgs& args) const {
        args.S_offset = S_offset;
        args.S_origin = S_origin;
        args.g = g;
        args.inside = inside;
        args.dS = dS;
        args.dg = dg;
    }
    struct Tile {
        float between;              // origin of the rows' chunk minus origin of the columns'
        const float *Si, *gi, *Sj;
        bool inside;
        __device__ float difference(int r, int c) const { return between + Si[r] - Sj[c]; }         // S_i - S_j
        __device__ float distance(int r, int c) const { return fabsf(difference(r, c)); }
        __device__ float operator()(int r, int c) const {
            const float D = distance(r, c);
            if (!LogKernel) { return -gi[r] * D; }
            const float a = argument(r, D);
            return -(inside ? 1.0f : gi[r]) * fast_log1p(a * a);
        }
        // what is squared in the logarithm
        __device__ float argument(int r, float D) const { return (inside ? gi[r] : 1.0f) * D; }
    };
    __device__ Tile tile(int bh, int i0, int j0) const {
        const double* origin = S_origin + (size_t)bh * chunks;
        const float* offset = S_offset + (size_t)bh * stride;
        const float between = (float)(origin[i0 / CABLE_CHUNK] - origin[j0 / CABLE_CHUNK]);
        return {between, offset + i0, g + (size_t)bh * stride + i0, offset + j0, inside};
    }
    // With D = S_i - S_j, k_ij = dB/d|D| / g_i and the sign of i - j, or of D if S may fall (1 where they are equal):
    //   dg_i = sum_j dlogit dB/dg     dS_i += g_i sum_j dlogit k sign     dS_j -= sum_i g_i dlogit k sign
    //   cable: k = -1, dB/dg = -|D|     kcable: k = -2 |D| / (1 + D^2), dB/dg = -log(1 + D^2)
    //   weight=inside, with r = g_i |D|: k = -2r / (1 + r^2), dB/dg = k |D|
    // For cable with a causal mask a row's sum is 0, but only in exact arithmetic: both sides sum the same rounded
    // dlogit (docs/attention.md).
    __device__ void backward(int bh, int i0, int ni, int j0, int nj, float* dlogit, int ld) const {
        float* dSi = dS + (size_t)bh * stride;              // of this head, all positions
        const Tile t = tile(bh, i0, j0);
        const bool one_sided = !LogKernel && !falls && (causal || i0 != j0);    // D has one sign where dlogit is not 0
        const float sign = i0 >= j0 ? 1.0f : -1.0f;
        // 1. one thread per query: dg_i, and its own share of dS_i. Leaves in dlogit what the keys need
        for (int r = threadIdx.x; r < ni; r += blockDim.x) {
            float* d = dlogit + r * ld;
            float dgi, sum;                                 // of dB/dg_i, and of dB/dS_i / g_i
            if (one_sided) {
                const auto of = sums_over<2>(0, nj, 1, [&](float* s, int c) {
                    s[0] -= d[c];
                    s[1] -= d[c] * t.distance(r, c);
                });
                dgi = of.x[1];
                sum = sign * of.x[0];
            } else {
                const auto of = sums_over<2>(0, nj, 1, [&](float* s, int c) {
                    const float D = t.distance(r, c), a = t.argument(r, D);
                    const float dk = LogKernel ? d[c] * (-2.0f * a / (1.0f + a * a)) : -d[c];     // dlogit k
                    const bool negative = falls ? t.difference(r, c) < 0.0f : j0 + c > i0 + r;
                    const float signed_dk = negative ? -dk : dk;
                    s[0] += LogKernel && !inside ? -d[c] * fast_log1p(a * a) : dk * D;
                    s[1] += signed_dk;
                    d[c] = signed_dk;
                });
                dgi = of.x[0];
                sum = of.x[1];
            }
            dg[(size_t)bh * stride + i0 + r] += dgi;
            dSi[i0 + r] += t.gi[r] * sum;
        }
        __syncthreads();
        // 2. a register of keys per thread, queries in order: dS_j gets the queries' shares with the opposite sign. The
        // tile's sums go into the first row of dlogit; the columns after nj are not read
        for (int c = threadIdx.x * LANES; c < nj; c += blockDim.x * LANES) {
            lanes sum = lanes{};
            for (int r = 0; r < ni; r++) {
                const float weight = one_sided ? sign * t.gi[r] : -t.gi[r];
                sum += weight * load_lanes(dlogit + r * ld + c);
            }
            store_lanes(dlogit + c, sum);
        }
        __syncthreads();
        for (int c = threadIdx.x; c < nj; c += blockDim.x) { dSi[j0 + c] += dlogit[c]; }
        __syncthreads();
    }
};

// LogKernel: kcable.  Weighted: g = softplus(u), else 1
template <bool LogKernel, bool Weighted, CableStep Step> struct Cable : Encoding {
    using Encoding::Encoding;
    static constexpr bool falls = Step == CableStep::Tanh;
    static constexpr bool keeps_form = !falls;
    static constexpr bool has_weight = LogKernel && Weighted;                   // inside the logarithm or outside
    float *S_offset = nullptr, *g = nullptr;                                    // (B,NH,T)
    float *dS = nullptr, *dg = nullptr;                                         // (B,NH,T)
    double* S_origin = nullptr;                                                 // (B,NH,ceil(T/128))

    static Hyperparameters defaults(int) {
        return has_weight ? Hyperparameters{{"weight", 0, 1.0, "outside|inside"}} : Hyperparameters();
    }
    template <class Tensors> void declare(Tensors& t) {
        t.columns("cable.c", t.NH);                                        // w_c, c_c
        if (Weighted) { t.columns("cable.s", t.NH); }                      // w_s, c_s
        declare_sums(t);
    }
    // all but the columns, for an encoding that derives from this one and fills S differently
    template <class Tensors> void declare_sums(Tensors& t) {
        const size_t BNH = (size_t)t.B * t.NH, T = (size_t)t.stride;
        t.cached(S_offset, "S_offset", Per::Layer, BNH, T);
        t.cached(S_origin, "S_origin", Per::Layer, BNH, ceil_div(T, (size_t)CABLE_CHUNK));
        t.cached(g, "g", Per::Layer, BNH, T);
        t.scratch(dS, "dS", BNH, T);
        t.scratch(dg, "dg", BNH, T);
        if (!LogKernel && !falls) { declare_key_max(*this, t); }        // a logarithm is never steep enough
    }
    void prepare_forward(floatX* qkv, int B, int T, Start start, Stream stream) const {
        const Grid grid((size_t)B * v.NH, 128, 0, stream);
        launch(cable_forward_kernel, grid, S_offset, S_origin, g, qkv, T, start, v.stride, v.NH, v.C(), v.OC, Step,
               Weighted);
        update_key_max(*this, qkv, B, T, start, stream);
    }
    void zero_bias_gradient(int B, int T, Stream stream) const {
        device_zero(dS, sizeof(float) * B * v.NH * T, stream);
        device_zero(dg, sizeof(float) * B * v.NH * T, stream);
    }
    void prepare_backward(floatX* dqkv, const floatX* qkv, int B, int T, Stream stream) const {
        const Grid grid((size_t)B * v.NH, 256, 0, stream);
        launch(cable_backward_kernel, grid, dqkv, dS, dg, qkv, T, v.NH, v.C(), v.OC, Step, Weighted);
    }
    CableBias<LogKernel> bias() const {
        const bool inside = has_weight && v.config->value("weight") == 1;
        return {{}, S_offset, g, S_origin, dS, dg, v.stride, ceil_div(v.stride, CABLE_CHUNK), v.causal, inside, falls};
    }
};

// the rows of table.h
using CableFull = Cable<false, true, CableStep::Relu>;
using CableNW = Cable<false, false, CableStep::Relu>;
using KCable = Cable<true, true, CableStep::Relu>;
using KCableNW = Cable<true, false, CableStep::Relu>;
using CableV1 = Cable<false, false, CableStep::Softplus>;
using KCableV1 = Cable<true, false, CableStep::Softplus>;
using CableSigned = Cable<false, true, CableStep::Tanh>;
