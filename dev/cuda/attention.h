// attention.h -- what the two ladders of attention share: the inputs, the oracle, and the tiles of their middle rungs.
//
//   logit_ij = scale q_i.k_j - g_i (S_i - S_j), j <= i     P = softmax(logit)     out_i = sum_j P_ij v_j
//   CABLE's bias, causal. S and g are inputs here: cable_scan.cu is the ladder that makes S. Names as in
//   llmc/attention.cuh.
#ifndef DEV_CUDA_ATTENTION_H
#define DEV_CUDA_ATTENTION_H

#include "ladder.h"

#include "llmc/attention/choose.cuh"

using Bias = CableBias<false>;                              // B_ij = -g_i |S_i - S_j|
constexpr FlashBias KIND = Bias::flash;                     // its name among the tensor-core kernels

// ----------------------------------------------------------------------------------------------------------
// the oracle: plain loops over one head after the other

// q, k, v, dout (heads,T,HS), S, g (heads,T). Only differences of S are rounded to R, as in the kernels.
template <class R> struct OracleInputs {
    size_t heads, T, HS;
    R scale;
    std::vector<R> q, k, v, dout, g;
    std::vector<double> S;
};

// Stored: what P and dlogit are rounded to before they are multiplied by v, dout, k and q: bf16 on the tensor cores
template <class R, class Stored = R> struct AttentionOracle {
    std::vector<R> out, lse;                                // (heads,T,HS), (heads,T)
    std::vector<R> dq, dk, dv, dS, dg;

    static R logit(const OracleInputs<R>& in, size_t at, size_t i, size_t j) {
        R dot = 0;
        for (size_t d = 0; d < in.HS; d++) { dot += in.q[(at + i) * in.HS + d] * in.k[(at + j) * in.HS + d]; }
        return in.scale * dot - in.g[at + i] * (R)(in.S[at + i] - in.S[at + j]);
    }
    void forward(const OracleInputs<R>& in) {
        const size_t HS = in.HS;
        out.assign(in.heads * in.T * HS, 0);
        lse.assign(in.heads * in.T, 0);
        std::vector<R> P(in.T);
        for (size_t at = 0; at < in.heads * in.T; at += in.T) {
            for (size_t i = 0; i < in.T; i++) {
                R largest = -INFINITY, sum = 0;
                for (size_t j = 0; j <= i; j++) { largest = std::max(largest, P[j] = logit(in, at, i, j)); }
                for (size_t j = 0; j <= i; j++) { sum += P[j] = std::exp(P[j] - largest); }
                for (size_t j = 0; j <= i; j++) {
                    const R weight = (R)rounded<Stored>(P[j]) / sum;
                    for (size_t d = 0; d < HS; d++) { out[(at + i) * HS + d] += weight * in.v[(at + j) * HS + d]; }
                }
                lse[at + i] = largest + std::log(sum);
            }
        }
    }
    // given_out, given_lse: what the forward has stored
    void backward(const OracleInputs<R>& in, const std::vector<R>& given_out, const std::vector<R>& given_lse) {
        const size_t HS = in.HS;
        for (std::vector<R>* x : {&dq, &dk, &dv}) { x->assign(in.heads * in.T * HS, 0); }
        for (std::vector<R>* x : {&dS, &dg}) { x->assign(in.heads * in.T, 0); }
        for (size_t at = 0; at < in.heads * in.T; at += in.T) {
            for (size_t i = 0; i < in.T; i++) {
                const R *dout = &in.dout[(at + i) * HS], *q = &in.q[(at + i) * HS];
                R row_dot = 0;
                for (size_t d = 0; d < HS; d++) { row_dot += given_out[(at + i) * HS + d] * dout[d]; }
                for (size_t j = 0; j <= i; j++) {
                    R dP = 0;
                    for (size_t d = 0; d < HS; d++) { dP += dout[d] * in.v[(at + j) * HS + d]; }
                    const R P = std::exp(logit(in, at, i, j) - given_lse[at + i]);
                    const R dlogit = P * (dP - row_dot);
                    const R P_stored = (R)rounded<Stored>(P), dlogit_stored = (R)rounded<Stored>(dlogit);
                    for (size_t d = 0; d < HS; d++) {
                        dv[(at + j) * HS + d] += P_stored * dout[d];
                        dq[(at + i) * HS + d] += in.scale * dlogit_stored * in.k[(at + j) * HS + d];
                        dk[(at + j) * HS + d] += in.scale * dlogit_stored * q[d];
                    }
                    dg[at + i] -= dlogit * (R)(in.S[at + i] - in.S[at + j]);
                    dS[at + i] -= in.g[at + i] * dlogit;
                    dS[at + j] += in.g[at + i] * dlogit;
                }
            }
        }
    }
};

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
    Array<floatX> qkv, dout;
    Array<float> S_offset, g, dS, dg;                       // (B,NH,T)
    Array<double> S_origin;                                 // (B,NH,chunks)
    Bias bias;

    AttentionProblem(size_t B, int T, int NH, int HS)
        : dims{T, 0, T, NH, HS, round_up(3 * NH * HS + 2 * NH, 8), 1.0f / sqrtf((float)HS)}, B(B), C((size_t)dims.C()),
          OC((size_t)dims.OC), heads(B * NH), n(heads * T), host_qkv(draw()), host_dout(normals<floatX>(B * T * C, 2)),
          qkv(host_qkv), dout(host_dout), S_offset(n), g(n), dS(n), dg(n),
          S_origin(heads * ceil_div(T, CABLE_CHUNK)),
          bias{{}, S_offset, g, S_origin, dS, dg, T, ceil_div(T, CABLE_CHUNK), true} {
        launch(cable_forward_kernel, Grid(heads, 128, 0, device_stream()), (float*)S_offset, (double*)S_origin,
               (float*)g, (const floatX*)qkv, T, 0, T, NH, dims.C(), dims.OC, false, true);
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
        for (size_t part = 0; part < 3; part++) { *parts[part] = as<R>(by_heads(host_qkv, dims, B, OC, part * C)); }
        in.dout = as<R>(by_heads(host_dout, dims, B, C, 0));
        in.g = as<R>(g.host());
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
__device__ inline float dot_rows(const float* a, const float* b, int HS) {
    float dot = 0.0f;
    for (int d = 0; d < HS; d++) { dot += a[d] * b[d]; }
    return dot;
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

#endif
