// attention.h -- what the two ladders of attention share: the inputs, and the tiles of their middle rungs.
//
//   logit_ij = scale q_i.k_j - g_i (S_i - S_j), j <= i     P = softmax(logit)     out_i = sum_j P_ij v_j
//   CABLE's bias, causal. S and g are inputs here: cable_scan.cu is the ladder that makes S. Names as in
//   llmc/attention.cuh.
#pragma once

#include "attention_oracle.h"

#include "llmc/attention/choose.cuh"

using Bias = CableBias;                                     // B_ij = -g_i |S_i - S_j|
constexpr FlashBias KIND = Bias::flash;                     // its name among the tensor-core kernels

// ----------------------------------------------------------------------------------------------------------
// the inputs

// x (B*NH,T,HS): columns first .. of rows (B,T,width), head by head
template <class T>
std::vector<T> by_heads(const std::vector<T>& rows, const AttentionDims& dims, size_t B, size_t width, size_t first) {
    const size_t NH = (size_t)dims.NH, HS = (size_t)dims.HS;
    const size_t time = (size_t)dims.T;
    std::vector<T> x(B * NH * time * HS);
    for (size_t e = 0; e < x.size(); e++) {
        const size_t t = e / HS % time, bh = e / HS / time;
        x[e] = rows[(bh / NH * time + t) * width + first + bh % NH * HS + e % HS];
    }
    return x;
}

// Random q, k, v, dout, and S, g as the shipped kernel makes them from the last columns of qkv
struct AttentionProblem {
    AttentionDims dims;
    size_t B, C, OC, heads, n;                              // n: of heads * T
    std::vector<floatX> host_qkv, host_dout;                // (B,T,OC): q | k | v | z | u; (B,T,C)
    DeviceArray<floatX> qkv, dout;
    DeviceArray<float> S_offset, g, dS, dg;                       // (B,NH,T)
    DeviceArray<double> S_origin;                                 // (B,NH,chunks)
    Bias bias;

    AttentionProblem(size_t B, int T, int NH, int HS)
        : dims{T, 0, T, NH, HS, round_up(3 * NH * HS + 2 * NH, 8), 1.0f / sqrtf((float)HS)}, B(B), C((size_t)dims.C()),
          OC((size_t)dims.OC), heads(B * NH), n(heads * T), host_qkv(draw()), host_dout(inputs(B * T * C, 2)),
          qkv(host_qkv), dout(host_dout), S_offset(n), g(n), dS(n), dg(n),
          S_origin(heads * ceil_div(T, CABLE_CHUNK)),
          bias{{}, S_offset, g, S_origin, dS, dg, T, ceil_div(T, CABLE_CHUNK)} {
        cable_forward(S_offset, S_origin, g, qkv, {T, NH, HS, dims.OC}, (int)B, T, 0, CableStep::Relu, true,
                      device_stream());
    }
    // z is small, so that the bias leaves the far keys some weight
    std::vector<floatX> draw() const {
        std::vector<floatX> x(B * dims.T * OC);
        for (size_t e = 0; e < x.size(); e++) {
            const size_t c = e % OC;
            const bool is_z = c >= 3 * C && c < 3 * C + dims.NH;
            x[e] = (floatX)(float)(normal01(20240520, 1, e) * (is_z ? 0.05 : 1.0));
        }
        return x;
    }
    template <class R> OracleInputs<R> oracle_inputs() const {
        OracleInputs<R> in = {heads, (size_t)dims.T, (size_t)dims.HS, (R)dims.scale, {}, {}, {}, {}, {}, {}};
        std::vector<R>* parts[] = {&in.q, &in.k, &in.v};
        for (size_t part = 0; part < 3; part++) {
            *parts[part] = numbers<R>(by_heads(host_qkv, dims, B, OC, part * C));
        }
        in.dout = numbers<R>(by_heads(host_dout, dims, B, C, 0));
        in.g = numbers<R>(g.host());
        const auto offset = S_offset.host();
        const auto origin = S_origin.host();
        const size_t T = (size_t)dims.T, chunks = origin.size() / heads;
        for (size_t e = 0; e < n; e++) {
            in.S.push_back(origin[e / T * chunks + e % T / CABLE_CHUNK] + (double)offset[e]);
        }
        return in;
    }
};

// ----------------------------------------------------------------------------------------------------------
// tiles of ROWS tokens in shared memory, for the middle rungs

constexpr int ROWS = 32;
constexpr int ROW_THREADS = 256;
constexpr int LD = ROWS + 1;                                // row length of a tile of (queries, keys)

// Where token t's q (part 0), k (1) or v (2) begins in qkv and dqkv (B,T,OC), and its row in out and dout (B,T,C)
__device__ inline size_t token_at(const AttentionDims& dims, int bh, int t, int part) {
    return ((size_t)(bh / dims.NH) * dims.T + t) * dims.OC + part * dims.C() + bh % dims.NH * dims.HS;
}
__device__ inline size_t output_at(const AttentionDims& dims, int bh, int t) {
    return ((size_t)(bh / dims.NH) * dims.T + t) * dims.C() + bh % dims.NH * dims.HS;
}
// tile (ROWS, HS + 1) = n rows of HS elements, `stride` apart, and zeros after them. HS is even and shared memory has
// 32 banks: with rows of HS + 1 the lanes of a warp, each in a row of its own, meet in 32 different banks.
__device__ inline void load_rows(float* tile, const floatX* from, int stride, int n, int HS) {
    for (int e = threadIdx.x; e < ROWS * HS; e += blockDim.x) {
        const int r = e / HS;
        const int d = e % HS;
        tile[r * (HS + 1) + d] = r < n ? (float)from[(size_t)r * stride + d] : 0.0f;
    }
}
// sum (ROWS, HS) += weights (ROWS, LD) tile (ROWS, HS + 1), or weights^T tile: every element belongs to one thread
template <bool Transposed>
__device__ inline void add_products(float* sum, const float* weights, const float* tile, int HS) {
    for (int e = threadIdx.x; e < ROWS * HS; e += blockDim.x) {
        const int r = e / HS;
        const int d = e % HS;
        float s = 0.0f;
        for (int c = 0; c < ROWS; c++) {
            s += (Transposed ? weights[c * LD + r] : weights[r * LD + c]) * tile[c * (HS + 1) + d];
        }
        sum[e] += s;
    }
}

// ----------------------------------------------------------------------------------------------------------
// the backward

// What a rung of the backward is given
struct Backward {
    floatX* dqkv;               // (B,T,OC): the columns of q, k and v
    float *dS, *dg;             // (B,NH,T)
    const floatX *dout, *qkv;   // (B,T,C), (B,T,OC)
    const floatX* out;          // (B,T,C)
    const float* lse;           // (B,NH,T)
    const float* P;             // (B,NH,T,T), for rung 1
    float* dlogit;              // (B,NH,T,T), scratch of rung 1
    float* row_dot;             // (B,NH,T), scratch of rungs 1, 2 and 3
    float* scratch;             // of the shipped kernels
    Bias bias;
    AttentionDims dims;
    int B;

    __host__ __device__ size_t heads() const { return (size_t)B * dims.NH; }
    __device__ const floatX* q(int bh, int t) const { return qkv + token_at(dims, bh, t, 0); }
    __device__ const floatX* k(int bh, int t) const { return qkv + token_at(dims, bh, t, 1); }
    __device__ const floatX* v(int bh, int t) const { return qkv + token_at(dims, bh, t, 2); }
    __device__ const floatX* d_out(int bh, int t) const { return dout + output_at(dims, bh, t); }
    // S_i - S_j, of i >= j
    __device__ float distance(int bh, int i, int j) const { return fabsf(bias.tile(bh, i, j).difference(0, 0)); }
};

// P (B,NH,T,T) as a forward that stores it would leave it; one thread per pair
__global__ void probabilities_kernel(float* P, Backward p) {
    const int T = p.dims.T;
    const GridSpan span = grid_span(p.heads() * T * T);
    for (size_t e = span.begin; e < span.end; e += span.step) {
        const int j = (int)(e % T);
        const int i = (int)(e / T % T);
        const int bh = (int)(e / T / T);
        const float score = p.dims.scale * dot(p.q(bh, i), p.k(bh, j), p.dims.HS);
        P[e] = j > i ? 0.0f : fast_exp(score + p.bias.tile(bh, i, j)(0, 0) - p.lse[(size_t)bh * T + i]);
    }
}

// The tiles of rung 3: queries and what comes back to them, keys and values, and the pairs of the two
struct Tiles {
    float *Q, *dO;              // (ROWS, HS + 1)
    float *K, *V;               // the same
    float *P, *dlogit;          // (ROWS, LD): queries by keys
};

// P and dlogit (ROWS, LD) of the queries from i0 and the keys from j0; 0 where there is no pair
__device__ inline void pair_tile(const Tiles& tiles, const Backward& p, int bh, int i0, int j0) {
    const int T = p.dims.T;
    const int HS = p.dims.HS;
    const auto bias = p.bias.tile(bh, i0, j0);
    for (int e = threadIdx.x; e < ROWS * ROWS; e += blockDim.x) {
        const int r = e / ROWS;
        const int c = e % ROWS;
        float P = 0.0f;
        float dlogit = 0.0f;
        if (i0 + r < T && j0 + c <= i0 + r) {
            const size_t row = (size_t)bh * T + i0 + r;
            const float score = dot(tiles.Q + r * (HS + 1), tiles.K + c * (HS + 1), HS);
            const float dP = dot(tiles.dO + r * (HS + 1), tiles.V + c * (HS + 1), HS);
            P = fast_exp(p.dims.scale * score + bias(r, c) - p.lse[row]);
            dlogit = P * (dP - p.row_dot[row]);
        }
        tiles.P[r * LD + c] = P;
        tiles.dlogit[r * LD + c] = dlogit;
    }
}
// The tiles, one after the other in shared memory. after: what lies there next, for the kernel's own sums
__device__ inline Tiles shared_tiles(int HS, float*& after) {
    const int rows = ROWS * (HS + 1);
    float* first = dynamic_shared();
    after = first + 4 * rows + 2 * ROWS * LD;
    return {first, first + rows, first + 2 * rows, first + 3 * rows, first + 4 * rows, first + 4 * rows + ROWS * LD};
}
__device__ inline void load_queries(const Tiles& tiles, const Backward& p, int bh, int i0) {
    load_rows(tiles.Q, p.q(bh, i0), p.dims.OC, p.dims.T - i0, p.dims.HS);
    load_rows(tiles.dO, p.d_out(bh, i0), p.dims.C(), p.dims.T - i0, p.dims.HS);
}
__device__ inline void load_keys(const Tiles& tiles, const Backward& p, int bh, int j0) {
    load_rows(tiles.K, p.k(bh, j0), p.dims.OC, p.dims.T - j0, p.dims.HS);
    load_rows(tiles.V, p.v(bh, j0), p.dims.OC, p.dims.T - j0, p.dims.HS);
}
// the rows of a sum (ROWS, HS) become part 0, 1 or 2 of dqkv
__device__ inline void store_rows(const Backward& p, const float* sum, int bh, int t0, int part, float factor) {
    const int HS = p.dims.HS;
    for (int e = threadIdx.x; e < ROWS * HS && t0 + e / HS < p.dims.T; e += blockDim.x) {
        p.dqkv[token_at(p.dims, bh, t0 + e / HS, part) + e % HS] = (floatX)(factor * sum[e]);
    }
}
