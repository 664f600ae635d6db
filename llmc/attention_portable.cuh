// attention_portable.cuh -- the attention kernels of every build, encoding and head size, in O(T) memory.
//
//   a_ij = scale q_i.k_j + B_ij     P = softmax_j(a)     out = P v          Vaswani et al. 2017, eq. 1; online softmax: Milakov and
//   backward: with D_i = sum_d dout_i out_i,  da_ij = P_ij (dout_i.v_j - D_i)           Gimelshein 2018; tiles: Dao et al. 2022
//     dv = P^T dout,  dq = scale da k,  dk = scale da^T q,  and da goes to the bias functor.
//   saves lse (B,NH,T) = log sum_j e^(a_ij), from which the backward recomputes P tile by tile.
//
// Sequences of a batch may end earlier (kv_len): keys behind the end are no keys. Queries behind it give out = 0, lse = -inf and
// no gradient, whatever their dout is. No loop goes there, so that no bit of a sequence depends on its padding.
//
// The bias functor is the template argument (position/none.cuh says what it is). No T x T buffer exists anywhere.
#ifndef LLMC_ATTENTION_PORTABLE_CUH
#define LLMC_ATTENTION_PORTABLE_CUH

#include "matmul.cuh"
#include "positions.h"

constexpr int ATTENTION_TILE = LANES > 1 ? 64 : 32;         // divides 128, so no tile crosses a chunk of CABLE's sum
constexpr int ATTENTION_THREADS = 64;

// Shapes of a call: queries t0 .. t0+T-1 of every sequence attend to keys 0 .. t0+T-1 of the same qkv buffer (B,stride,OC).
struct AttentionDims {
    int T, t0, stride, NH, HS, OC;
    float scale;
    const int* kv_len = nullptr;                                            // (B) or null: all of them have t0+T tokens
    __device__ int tokens(int b) const {
        const int end = t0 + T, n = kv_len == nullptr ? end : kv_len[b];
        return n < 0 ? 0 : n < end ? n : end;
    }
    __host__ __device__ int C() const { return NH * HS; }
    __host__ __device__ int HSp() const { return round_up(HS, LANES); }     // padded, for block_matmul
};

// tile (n, HSp) = factor * rows of HS columns with row stride `row`, padding zeroed
__device__ inline void load_tile(float* tile, int HSp, const floatX* from, size_t row, int n, int HS, float factor) {
    for (int r = 0; r < n; r++) {
        for (int d = threadIdx.x; d < HS; d += blockDim.x) { tile[r * HSp + d] = factor * (float)from[r * row + d]; }
        for (int d = HS + (int)threadIdx.x; d < HSp; d += blockDim.x) { tile[r * HSp + d] = 0.0f; }
    }
}
// transposed: tile (HS, ATTENTION_TILE), columns n.. zeroed
__device__ inline void load_tile_transposed(float* tile, const floatX* from, size_t row, int n, int HS, float factor) {
    for (int d = 0; d < HS; d++) {
        for (int r = threadIdx.x; r < n; r += blockDim.x) { tile[d * ATTENTION_TILE + r] = factor * (float)from[r * row + d]; }
        for (int r = n + (int)threadIdx.x; r < ATTENTION_TILE; r += blockDim.x) { tile[d * ATTENTION_TILE + r] = 0.0f; }
    }
}

inline size_t attention_forward_shared(const AttentionDims& p) {
    const size_t tile = ATTENTION_TILE, HSp = (size_t)p.HSp();
    return sizeof(float) * (tile * p.HS + 3 * tile * HSp + tile * tile + 3 * tile);
}

// One block a query tile of one (batch, head), longest rows first. Scores are kept transposed, (keys, queries): the
// reductions of the softmax run down columns, one query a thread or SIMD lane.
template <bool Causal, class Bias>
__global__ void attention_forward_kernel(floatX* out, float* lse, const floatX* qkv, Bias bias, AttentionDims p, int BNH) {
    constexpr int TILE = ATTENTION_TILE;
    const int HS = p.HS, HSp = p.HSp(), C = p.C(), padded_end = p.t0 + p.T;
    const int bh = blockIdx.x % BNH, b = bh / p.NH, h = bh % p.NH, end = p.tokens(b);
    const int aligned = ((padded_end - 1) / TILE - (int)blockIdx.x / BNH) * TILE;
    const int i0 = aligned > p.t0 ? aligned : p.t0, rows = (aligned + TILE < padded_end ? aligned + TILE : padded_end) - i0;
    const int ni = end < i0 ? 0 : end - i0 < rows ? end - i0 : rows;        // the rows behind are padding
    const int keys = ni == 0 ? 0 : Causal ? i0 + ni : end;
    float *Qt = dynamic_shared(), *K = Qt + HS * TILE, *V = K + TILE * HSp, *O = V + TILE * HSp, *S = O + TILE * HSp;
    float *largest = S + TILE * TILE, *sum = largest + TILE, *factor = sum + TILE;
    const floatX* q = qkv + (size_t)b * p.stride * p.OC + h * HS;

    load_tile_transposed(Qt, q + (size_t)i0 * p.OC, p.OC, ni, HS, p.scale);
    for (int e = threadIdx.x; e < TILE * HSp; e += blockDim.x) { O[e] = 0.0f; }
    for (int r = threadIdx.x; r < TILE; r += blockDim.x) {
        largest[r] = -INFINITY;
        sum[r] = 0.0f;
    }
    for (int j0 = 0; j0 < keys; j0 += TILE) {
        const int nj = TILE < end - j0 ? TILE : end - j0;
        __syncthreads();
        load_tile(K, HSp, q + (size_t)j0 * p.OC + C, p.OC, nj, HS, 1.0f);
        load_tile(V, HSp, q + (size_t)j0 * p.OC + 2 * C, p.OC, nj, HS, 1.0f);
        __syncthreads();
        block_matmul<false>(S, TILE, K, HSp, 1, Qt, TILE, nj, round_up(ni, LANES), HS);
        __syncthreads();
        const auto tile = bias.tile(bh, i0, j0);
        for (int r = threadIdx.x; r < ni; r += blockDim.x) { factor[r] = largest[r]; }
        for (int c = 0; c < nj; c++) {
            SIMD
            for (int r = threadIdx.x; r < ni; r += blockDim.x) {
                float s = S[c * TILE + r] + tile(r, c);
                s = Causal && j0 + c > i0 + r ? -INFINITY : s;
                S[c * TILE + r] = s;
                largest[r] = s > largest[r] ? s : largest[r];
            }
        }
        for (int r = threadIdx.x; r < ni; r += blockDim.x) {
            factor[r] = fast_exp(factor[r] - largest[r]);
            sum[r] *= factor[r];
        }
        for (int c = 0; c < nj; c++) {
            SIMD
            for (int r = threadIdx.x; r < ni; r += blockDim.x) {
                const float e = fast_exp(S[c * TILE + r] - largest[r]);
                S[c * TILE + r] = e;
                sum[r] += e;
            }
        }
        __syncthreads();
        for (int r = 0; r < ni; r++) {
            for (int d = threadIdx.x; d < HSp; d += blockDim.x) { O[r * HSp + d] *= factor[r]; }
        }
        __syncthreads();
        block_matmul<true>(O, HSp, S, 1, TILE, V, HSp, ni, HSp, nj);
    }
    __syncthreads();
    for (int r = 0; r < rows; r++) {
        const float scale = r < ni ? 1.0f / sum[r] : 0.0f;
        floatX* o = out + ((size_t)b * p.T + (i0 + r - p.t0)) * C + h * HS;
        for (int d = threadIdx.x; d < HS; d += blockDim.x) { o[d] = (floatX)(O[r * HSp + d] * scale); }
    }
    for (int r = threadIdx.x; r < rows && lse != nullptr; r += blockDim.x) {
        lse[(size_t)bh * p.stride + i0 + r] = r < ni ? largest[r] + logf(sum[r]) : -INFINITY;
    }
}

inline size_t attention_backward_shared(const AttentionDims& p) {
    const size_t tile = ATTENTION_TILE, HSp = (size_t)p.HSp();
    return sizeof(float) * (2 * tile * p.HS + 5 * tile * HSp + 2 * tile * tile);
}

// One block a (batch, head), so that every sum has one writer and one order: keys tile by tile, and for each the queries.
// dq (B,NH,T,HSp) float32 and D (B,NH,T) are scratch.
template <bool Causal, class Bias>
__global__ void attention_backward_kernel(floatX* dqkv, float* dq, float* D, const floatX* dout, const floatX* qkv, const floatX* out,
                                          const float* lse, Bias bias, AttentionDims p) {
    constexpr int TILE = ATTENTION_TILE;
    const int HS = p.HS, HSp = p.HSp(), C = p.C(), bh = blockIdx.x, b = bh / p.NH, h = bh % p.NH, T = p.tokens(b);
    float *Kt = dynamic_shared(), *Vt = Kt + HS * TILE, *K = Vt + HS * TILE, *dK = K + TILE * HSp, *dV = dK + TILE * HSp;
    float *Q = dV + TILE * HSp, *dO = Q + TILE * HSp, *P = dO + TILE * HSp, *da = P + TILE * TILE;
    const size_t first = (size_t)b * p.T;
    const floatX *q = qkv + first * p.OC + h * HS, *o = out + first * C + h * HS, *dy = dout + first * C + h * HS;
    floatX* dq_out = dqkv + first * p.OC + h * HS;
    dq += (size_t)bh * p.T * HSp;
    D += (size_t)bh * p.T;
    lse += (size_t)bh * p.T;
    for (int i = threadIdx.x; i < T; i += blockDim.x) {
        float s = 0.0f;
        for (int d = 0; d < HS; d++) { s += (float)o[(size_t)i * C + d] * (float)dy[(size_t)i * C + d]; }
        D[i] = s;
    }
    for (size_t e = threadIdx.x; e < (size_t)T * HSp; e += blockDim.x) { dq[e] = 0.0f; }
    for (int j0 = 0; j0 < T; j0 += TILE) {
        const int nj = TILE < T - j0 ? TILE : T - j0;
        __syncthreads();
        load_tile_transposed(Kt, q + (size_t)j0 * p.OC + C, p.OC, nj, HS, 1.0f);
        load_tile_transposed(Vt, q + (size_t)j0 * p.OC + 2 * C, p.OC, nj, HS, 1.0f);
        load_tile(K, HSp, q + (size_t)j0 * p.OC + C, p.OC, nj, HS, 1.0f);
        for (int e = threadIdx.x; e < 2 * TILE * HSp; e += blockDim.x) { dK[e] = 0.0f; }   // dV follows dK
        for (int i0 = Causal ? j0 : 0; i0 < T; i0 += TILE) {
            const int ni = TILE < T - i0 ? TILE : T - i0;
            __syncthreads();
            load_tile(Q, HSp, q + (size_t)i0 * p.OC, p.OC, ni, HS, p.scale);
            load_tile(dO, HSp, dy + (size_t)i0 * C, C, ni, HS, 1.0f);
            __syncthreads();
            block_matmul<false>(P, TILE, Q, HSp, 1, Kt, TILE, ni, round_up(nj, LANES), HS);
            block_matmul<false>(da, TILE, dO, HSp, 1, Vt, TILE, ni, round_up(nj, LANES), HS);
            __syncthreads();
            const auto tile = bias.tile(bh, i0, j0);
            for (int r = 0; r < ni; r++) {
                const float lse_i = lse[i0 + r], D_i = D[i0 + r];
                SIMD
                for (int c = threadIdx.x; c < nj; c += blockDim.x) {
                    float s = P[r * TILE + c] + tile(r, c);
                    s = Causal && j0 + c > i0 + r ? -INFINITY : s;
                    const float prob = fast_exp(s - lse_i);
                    P[r * TILE + c] = prob;
                    da[r * TILE + c] = prob * (da[r * TILE + c] - D_i);
                }
            }
            __syncthreads();
            block_matmul<true>(dV, HSp, P, 1, TILE, dO, HSp, nj, HSp, ni);
            block_matmul<true>(dK, HSp, da, 1, TILE, Q, HSp, nj, HSp, ni);
            block_matmul<true>(dq + (size_t)i0 * HSp, HSp, da, TILE, 1, K, HSp, ni, HSp, nj);
            __syncthreads();
            bias.backward(bh, i0, ni, j0, nj, da, TILE);
        }
        __syncthreads();
        for (int c = 0; c < nj; c++) {
            for (int d = threadIdx.x; d < HS; d += blockDim.x) {
                dq_out[(size_t)(j0 + c) * p.OC + C + d] = (floatX)dK[c * HSp + d];
                dq_out[(size_t)(j0 + c) * p.OC + 2 * C + d] = (floatX)dV[c * HSp + d];
            }
        }
    }
    __syncthreads();
    for (int i = 0; i < T; i++) {
        for (int d = threadIdx.x; d < HS; d += blockDim.x) { dq_out[(size_t)i * p.OC + d] = (floatX)(p.scale * dq[(size_t)i * HSp + d]); }
    }
    for (int i = T; i < p.T; i++) {
        for (int part = 0; part < 3; part++) {
            for (int d = threadIdx.x; d < HS; d += blockDim.x) { dq_out[(size_t)i * p.OC + part * C + d] = (floatX)0.0f; }
        }
    }
}

inline AttentionDims attention_dims(const PositionView& v, int T, int t0, float score_factor) {
    return {T, t0, v.T, v.NH, v.HS, v.OC, score_factor / sqrtf((float)v.HS), v.kv_len};
}

#endif
