// attention.cuh -- multi-head attention with any positional encoding, causal or bidirectional, in memory that grows
// with T and not with T x T.
//
//   logit_ij = scale q_i.k_j + f_i B_ij     P_ij = softmax_j(logit_ij)    out_i = sum_j P_ij v_j  (Vaswani et al. 2017)
//   backward, with row_dot_i = sum_d dout_id out_id and dP_ij = dout_i.v_j:
//     dlogit_ij = P_ij (dP_ij - row_dot_i)     dv_j = sum_i P_ij dout_i     dq_i = scale sum_j dlogit_ij k_j
//     dk_j = scale sum_i dlogit_ij q_i         and the encoding's bias functor takes dB_ij = f_i dlogit_ij.
//   f: ssmax's factor, which q has already, or 1. For its gradient the backward leaves sum_j B_ij dB_ij.
//   saves lse_i = log sum_j e^(logit_ij), from which the backward recomputes P, tile by tile.
//
// Start with HeadOracle in test/layers/attention_oracle.h: the same two passes for one head, in plain loops over T x T
// matrices. The kernels here take the same steps a tile at a time, with an online softmax (Milakov and Gimelshein 2018;
// Dao et al. 2022). attention/visits.cuh says which tiles are visited, and which of their pairs are hidden. The kernels
// run in every build, for every encoding and head size; attention/choose.cuh says when a GPU takes the tensor-core
// kernels instead, and what padding gets. docs/attention.md derives what is not obvious.
//
// Names, here and in attention/:
//   i, j            a query, a key; a tile has the queries i0 + r, r < ni, and the keys j0 + c, c < nj
//   bh, b, h        a (batch, head) pair b * NH + h
//   Q_tile, K_tile  rows of q, k in shared memory, (rows, HS);   K_T is the transposed tile, (HS, rows)
//   scores, P       scale q.k, later the logits; e^(logit - largest), or probabilities
//   dP, dlogit      as above;   row_dot is D in Dao et al.
//   S, g            CABLE's cumulative sum and weight, nothing else
//   bias            the functor that knows B (position/encoding.cuh), on a CPU AnyBias (attention/any_bias.cuh)
#pragma once

#include "attention/any_bias.cuh"

#if !defined(KERNELS_ELSEWHERE)
// Half of P and of dlogit is 0 in a tile on the diagonal; on a CPU the products skip that half.
constexpr bool LEAVES_ZEROS = LANES > 1;
// Bytes of a block's shared memory: lay_out(first, dims) places its tiles from `first` on, up to `end`
template <class F> size_t shared_bytes(F lay_out, const AttentionDims& dims) {
    float* const first = (float*)sizeof(lanes);             // any address: nothing is read
    return sizeof(float) * (size_t)(lay_out(first, dims).end - first);
}

// ----------------------------------------------------------------------------------------------------------
// forward

struct ForwardTiles { float *Q_T, *K_tile, *V_tile, *O_tile, *scores, *largest, *sum, *shrink, *tile_sum, *end; };
__host__ __device__ inline ForwardTiles forward_tiles(float* first, const AttentionDims& dims) {
    constexpr int TILE = ATTENTION_TILE;
    const int width = dims.padded_HS();
    float* Q_T = first;                                     // (HS, TILE)
    float* K_tile = Q_T + dims.HS * TILE;                   // (TILE, width), as are V and O
    float* V_tile = K_tile + TILE * width;
    float* O_tile = V_tile + TILE * width;                  // the output, not yet divided by sum
    float* scores = O_tile + TILE * width;                  // (keys, queries)
    float* largest = scores + TILE * TILE;                  // of each query: its largest logit so far,
    float* sum = largest + TILE;                            // the sum of e^(logit - largest);
    float* shrink = sum + TILE;                             // their factor when `largest` grows,
    float* tile_sum = shrink + TILE;                        // and the sum of this tile's exponentials
    return {Q_T, K_tile, V_tile, O_tile, scores, largest, sum, shrink, tile_sum, tile_sum + TILE};
}
inline size_t attention_forward_shared(const AttentionDims& dims) { return shared_bytes(forward_tiles, dims); }

// One block per query tile of one (batch, head), longest rows first. Scores are kept transposed, (keys, queries), so
// that the softmax runs down columns: one query per thread or SIMD lane.
template <bool Causal, class Bias>
__global__ void attention_forward_kernel(floatX* out, float* lse, const floatX* qkv, Bias bias, AttentionDims dims,
                                         int BNH) {
    constexpr int TILE = ATTENTION_TILE;
    const int HS = dims.HS;
    const int C = dims.C();
    const int width = dims.padded_HS();                     // of a tile's row: HS, and zeros
    const int bh = blockIdx.x % BNH;
    const int b = bh / dims.NH;
    const int h = bh % dims.NH;
    const Visits<Causal, LAST_TILE_FIRST || Bias::counts_gates> visits(dims, bh);
    const int end = dims.t0 + dims.T;                       // of the queries, padding included
    const int tile_begin = ((end - 1) / TILE - (int)blockIdx.x / BNH) * TILE;
    const int i0 = imax(tile_begin, dims.t0);
    const int rows = imin(tile_begin + TILE, end) - i0;
    const int ni = clamp(visits.tokens - i0, 0, rows);      // the rows after them are padding
    const auto [Q_T, K_tile, V_tile, O_tile, scores, largest, sum, shrink, tile_sum, tiles_end] =
        forward_tiles(dynamic_shared(), dims);
    const floatX* q = qkv + (size_t)b * dims.stride * dims.OC + h * HS;

    load_tile_transposed(Q_T, view(q + (size_t)i0 * dims.OC, ni, HS, dims.OC), dims.scale);
    for (int e = threadIdx.x; e < TILE * width; e += blockDim.x) { O_tile[e] = 0.0f; }
    for (int r = threadIdx.x; r < TILE; r += blockDim.x) {
        largest[r] = LEAST_LOGIT;
        sum[r] = 0.0f;
    }
    for (const PairTile<Causal>& t : visits.keys_of(i0, ni)) {
        const int nj = t.nj;
        const floatX* k = q + (size_t)t.j0 * dims.OC + C;
        __syncthreads();
        load_tile(K_tile, view(k, nj, HS, dims.OC), 1.0f);
        load_tile(V_tile, view(k + C, nj, HS, dims.OC), 1.0f);
        __syncthreads();
        // 1. scores = k q^T, the scale is in Q_T already
        block_matmul(view(scores, nj, round_up(ni, LANES), TILE), view(K_tile, nj, HS, width), view(Q_T, HS, TILE));
        __syncthreads();
        // 2. logits
        t.hide(transposed(view(scores, nj, ni, TILE)));
        add_bias(bias, view(scores, nj, ni, TILE), bh, t, dims.factors(bh, i0));
        // 3. the largest logit; the sums of earlier tiles are relative to the one before
        for (int r = threadIdx.x; r < ni; r += blockDim.x) { shrink[r] = largest[r]; }
        for (int c = 0; c < nj; c++) {
            SIMD
            for (int r = threadIdx.x; r < ni; r += blockDim.x) {
                const float logit = scores[c * TILE + r];
                largest[r] = logit > largest[r] ? logit : largest[r];
            }
        }
        for (int r = threadIdx.x; r < ni; r += blockDim.x) {
            shrink[r] = fast_exp(shrink[r] - largest[r]);
            tile_sum[r] = 0.0f;
        }
        // 4. exponentials and their sum: the tile's first, then all (docs/attention.md, "Sums of many keys")
        for (int c = 0; c < nj; c++) {
            SIMD
            for (int r = threadIdx.x; r < ni; r += blockDim.x) {
                const float e = fast_exp(scores[c * TILE + r] - largest[r]);
                scores[c * TILE + r] = e;
                tile_sum[r] += e;
            }
        }
        for (int r = threadIdx.x; r < ni; r += blockDim.x) { sum[r] = shrink[r] * sum[r] + tile_sum[r]; }
        __syncthreads();
        // 5. O = shrink O + P v
        for (int r = 0; r < ni; r++) {
            for (int d = threadIdx.x; d < width; d += blockDim.x) { O_tile[r * width + d] *= shrink[r]; }
        }
        __syncthreads();
        const Triangle P_part = LEAVES_ZEROS && t.diagonal() ? Triangle::Lower : Triangle::None;
        block_matmul_add(view(O_tile, ni, width), transposed(view(scores, nj, ni, TILE)), view(V_tile, nj, width),
                         P_part);
    }
    __syncthreads();
    // 6. out = O / sum, and lse
    for (int r = 0; r < rows; r++) {
        const float inverse = r < ni ? 1.0f / sum[r] : 0.0f;
        floatX* o = out + ((size_t)b * dims.T + (i0 + r - dims.t0)) * C + h * HS;
        for (int d = threadIdx.x; d < HS; d += blockDim.x) { o[d] = (floatX)(O_tile[r * width + d] * inverse); }
    }
    for (int r = threadIdx.x; r < rows && lse != nullptr; r += blockDim.x) {
        lse[(size_t)bh * dims.stride + i0 + r] = r < ni ? largest[r] + portable_logf(sum[r]) : -INFINITY;
    }
}

// out (B,T,C), lse (B,NH,stride) or null, qkv (B,stride,OC)
template <bool Causal, class Bias>
void portable_attention_forward(floatX* out, float* lse, const floatX* qkv, const Bias& bias, const AttentionDims& dims,
                                int B, Stream stream) {
    const int BNH = B * dims.NH;
    const int tiles = (dims.t0 + dims.T - 1) / ATTENTION_TILE - dims.t0 / ATTENTION_TILE + 1;
    const Grid grid((size_t)BNH * tiles, ATTENTION_THREADS, attention_forward_shared(dims), stream);
    launch(attention_forward_kernel<Causal, Bias>, grid, out, lse, qkv, bias, dims, BNH);
}

// ----------------------------------------------------------------------------------------------------------
// backward

struct BackwardTiles { float *K_T, *V_T, *K_tile, *dK_tile, *dV_tile, *Q_tile, *dO_tile, *P, *dlogit, *end; };
__host__ __device__ inline BackwardTiles backward_tiles(float* first, const AttentionDims& dims) {
    constexpr int TILE = ATTENTION_TILE;
    const int width = dims.padded_HS();
    float* K_T = first;                                     // (HS, TILE)
    float* V_T = K_T + dims.HS * TILE;                      // (HS, TILE)
    float* K_tile = V_T + dims.HS * TILE;                   // (TILE, width), as are the next four
    float* dK_tile = K_tile + TILE * width;
    float* dV_tile = dK_tile + TILE * width;
    float* Q_tile = dV_tile + TILE * width;
    float* dO_tile = Q_tile + TILE * width;
    float* P = dO_tile + TILE * width;                      // (queries, keys): scores, then probabilities
    float* dlogit = P + TILE * TILE;                        // (queries, keys): dP, then dlogit
    return {K_T, V_T, K_tile, dK_tile, dV_tile, Q_tile, dO_tile, P, dlogit, dlogit + TILE * TILE};
}
inline size_t attention_backward_shared(const AttentionDims& dims) { return shared_bytes(backward_tiles, dims); }

// One block per (batch, head), so that every sum has one writer and one order: for each tile of keys, the tiles of
// queries that see it. dq (B,NH,T,padded HS) float32 and row_dot (B,NH,T) are scratch. dk has its scale from Q_tile.
template <bool Causal, class Bias>
__global__ void attention_backward_kernel(floatX* dqkv, float* dq, float* row_dot, const floatX* dout,
                                          const floatX* qkv, const floatX* out, const float* lse, Bias bias,
                                          AttentionDims dims) {
    constexpr int TILE = ATTENTION_TILE;
    const int HS = dims.HS;
    const int C = dims.C();
    const int OC = dims.OC;
    const int width = dims.padded_HS();                     // of a tile's row: HS, and zeros
    const int bh = blockIdx.x;
    const int b = bh / dims.NH;
    const int h = bh % dims.NH;
    const Visits<Causal, LAST_TILE_FIRST> visits(dims, bh);
    const int T = visits.tokens;
    const auto [K_T, V_T, K_tile, dK_tile, dV_tile, Q_tile, dO_tile, P, dlogit, tiles_end] =
        backward_tiles(dynamic_shared(), dims);
    const size_t first = (size_t)b * dims.T;
    const Matrix<const floatX> q = view(qkv + first * OC + h * HS, T, HS, OC);
    const Matrix<const floatX> k = view(q.data + C, T, HS, OC);
    const Matrix<const floatX> v = view(k.data + C, T, HS, OC);
    const Matrix<const floatX> o = view(out + first * C + h * HS, T, HS, C);
    const Matrix<const floatX> d_o = view(dout + first * C + h * HS, T, HS, C);
    floatX* dq_out = dqkv + first * OC + h * HS;
    dq += (size_t)bh * dims.T * width;
    row_dot += (size_t)bh * dims.T;
    lse += (size_t)bh * dims.T;

    // 1. row_dot
    for (int i = threadIdx.x; i < T; i += blockDim.x) { row_dot[i] = dot(o.row(i), d_o.row(i), HS); }
    for (size_t e = threadIdx.x; e < (size_t)T * width; e += blockDim.x) { dq[e] = 0.0f; }
    for (int j0 = 0; j0 < T; j0 += TILE) {
        const int nj = imin(TILE, T - j0);
        __syncthreads();
        load_tile_transposed(K_T, block(k, j0, nj, 0, HS), 1.0f);
        load_tile_transposed(V_T, block(v, j0, nj, 0, HS), 1.0f);
        load_tile(K_tile, block(k, j0, nj, 0, HS), 1.0f);
        for (int e = threadIdx.x; e < 2 * TILE * width; e += blockDim.x) { dK_tile[e] = 0.0f; }    // and dV_tile
        for (const PairTile<Causal>& t : visits.queries_of(j0, nj)) {
            const int i0 = t.i0;
            const int ni = t.ni;
            __syncthreads();
            load_tile(Q_tile, block(q, i0, ni, 0, HS), dims.scale);
            load_tile(dO_tile, block(d_o, i0, ni, 0, HS), 1.0f);
            __syncthreads();
            // 2. scores = q k^T and dP = dout v^T
            const int whole_nj = round_up(nj, LANES);       // whole registers; the columns after nj are not read
            block_matmul(view(P, ni, whole_nj, TILE), view(Q_tile, ni, HS, width), view(K_T, HS, TILE));
            block_matmul(view(dlogit, ni, whole_nj, TILE), view(dO_tile, ni, HS, width), view(V_T, HS, TILE));
            __syncthreads();
            // 3. P = e^(logit - lse) and dlogit = P (dP - row_dot)
            t.hide(view(P, ni, nj, TILE));
            take_gradient(bias, view(P, ni, nj, TILE), view(dlogit, ni, nj, TILE), bh, t, lse + i0, row_dot + i0,
                          dims.factors(bh, i0));
            __syncthreads();
            // 4. dv += P^T dout,  dk += dlogit^T q,  dq += dlogit k
            const Matrix<float> P_T = transposed(view(P, ni, nj, TILE));
            const Matrix<float> dlogit_T = transposed(view(dlogit, ni, nj, TILE));
            const bool diagonal = LEAVES_ZEROS && t.diagonal();
            const Triangle to_keys = diagonal ? Triangle::Upper : Triangle::None;
            const Triangle to_queries = diagonal ? Triangle::Lower : Triangle::None;
            block_matmul_add(view(dV_tile, nj, width), P_T, view(dO_tile, ni, width), to_keys);
            block_matmul_add(view(dK_tile, nj, width), dlogit_T, view(Q_tile, ni, width), to_keys);
            const Matrix<float> dq_rows = view(dq + (size_t)i0 * width, ni, width);
            block_matmul_add(dq_rows, view(dlogit, ni, nj, TILE), view(K_tile, nj, width), to_queries);
            __syncthreads();
            // 5. the bias functor's sums
            if (dims.factor != nullptr) { apply_factor(bias, view(dlogit, ni, nj, TILE), bh, t, dims); }
            bias.backward(bh, i0, ni, j0, nj, dlogit, TILE);
        }
        // every query has been seen: dk and dv of this tile are complete
        __syncthreads();
        for (int c = 0; c < nj; c++) {
            floatX* row = dq_out + (size_t)(j0 + c) * OC;
            for (int d = threadIdx.x; d < HS; d += blockDim.x) {
                row[C + d] = (floatX)dK_tile[c * width + d];
                row[2 * C + d] = (floatX)dV_tile[c * width + d];
            }
        }
    }
    __syncthreads();
    // 6. dq gets its scale; padding rows get zeros
    for (int i = 0; i < T; i++) {
        for (int d = threadIdx.x; d < HS; d += blockDim.x) {
            dq_out[(size_t)i * OC + d] = (floatX)(dims.scale * dq[(size_t)i * width + d]);
        }
    }
    for (int i = T; i < dims.T; i++) {
        for (int part = 0; part < 3; part++) {
            for (int d = threadIdx.x; d < HS; d += blockDim.x) { dq_out[(size_t)i * OC + part * C + d] = (floatX)0.0f; }
        }
    }
}

// floats of scratch that portable_attention_backward needs
inline size_t portable_attention_backward_scratch(int B, int T, int NH, int HS) {
    return (size_t)B * NH * T * (round_up(HS, LANES) + 1);
}

// dqkv (B,T,OC): the q, k and v columns are overwritten, the bias functor's sums grow. dout, out (B,T,C), lse (B,NH,T)
template <bool Causal, class Bias>
void portable_attention_backward(floatX* dqkv, float* scratch, const floatX* dout, const floatX* qkv, const floatX* out,
                                 const float* lse, const Bias& bias, const AttentionDims& dims, int B, Stream stream) {
    float* row_dot = scratch + (size_t)B * dims.NH * dims.T * dims.padded_HS();
    if (dims.factor != nullptr) { device_zero(dims.moment, sizeof(float) * B * dims.NH * dims.stride, stream); }
    const Grid grid((size_t)B * dims.NH, ATTENTION_THREADS, attention_backward_shared(dims), stream);
    launch(attention_backward_kernel<Causal, Bias>, grid, dqkv, scratch, row_dot, dout, qkv, out, lse, bias, dims);
}
#endif
