// contrastive.cuh -- embeddings of sequences: pooling makes them, InfoNCE or a teacher trains them.
//
// Pooling: one vector per sequence, the mean of its tokens (Reimers and Gurevych 2019), or its first token.
//   Mean: out[b] = sum over t < length of inp[b,t] / length, [CLS] and [SEP] included.     Cls: out[b] = inp[b,0].
//   backward: each row in the mean gets dout[b] / length.     saves nothing.
// Rows after the end of a sequence are never read, and tokens are summed in order: padding changes no bit.
//
// InfoNCE: each query's candidate against all candidates of the batch.  Karpukhin et al. 2020, eq. 2
//   n(x) = x / max(|x|, 1e-12);   s_ij = n(q_i) . n(c_j) / temperature;   loss_i = -log softmax_j(s_ij)[i]
//   Candidate i < Q is the positive of query i, the other M - Q are hard negatives of every query.
//   backward: ds_ij = dloss (softmax_j(s_ij) - [i = j]) / temperature;  dx = (dn - n (n . dn)) / |x|, because a longer
//     x has the same n; dx = dn / 1e-12 where |x| < 1e-12.
//
// Distillation: each embedding against another model's, t, of the same text.  Reimers and Gurevych 2020, eq. 1, whose
// squared difference is 2 loss for rows of length 1:    loss_r = 1 - n(x_r) . n(t_r);   dn_r = -dloss n(t_r)
// All of it is float32 in every build, and the order of its sums depends only on the shapes.
#pragma once

#include "base/math.h"
#include "matmul.cuh"

enum class Pooling { Mean, Cls };

// out (B,C) float32, inp (B,T,C), lengths (B) on the device, each in [0, T]; 0: NaN
void pooling_forward(float* out, const floatX* inp, const int* lengths, int B, int T, int C, Pooling kind,
                     Stream stream);
// dinp (B,T,C) is overwritten, with zeros after the end of a sequence; dout (B,C) float32, lengths (B)
void pooling_backward(floatX* dinp, const float* dout, const int* lengths, int B, int T, int C, Pooling kind,
                      Stream stream);

// floats of scratch: the normalized rows, their gradients and inverse lengths, the scores
inline size_t contrastive_scratch(int Q, int M, int C) { return (size_t)(Q + M) * (2 * C + 1) + (size_t)Q * M; }
// losses (Q); demb (Q+M,C) = d (sum of dloss * losses) / d emb; emb (Q+M,C). place (Q+M): the rows of emb and demb that
// belong to the queries, then to the candidates, M >= Q. scratch: contrastive_scratch floats
void contrastive_forward_backward(float* losses, float* demb, float* scratch, const float* emb, const int* place, int Q,
                                  int M, int C, float temperature, float dloss, Stream stream);
// losses (R); demb (R,C): the teacher's embeddings become d (sum of dloss * losses) / d emb; emb (R,C), place (R) as
// above. scratch: contrastive_scratch(R, 0, C) floats
void distill_forward_backward(float* losses, float* demb, float* scratch, const float* emb, const int* place, int R,
                              int C, float dloss, Stream stream);

// A step's embeddings and their gradients, of all rows; activations exist for one chunk of rows at a time
struct ContrastiveBuffers {
    float *emb = nullptr, *demb = nullptr;
    float *losses = nullptr, *scratch = nullptr;
    int* place = nullptr;
    // Q queries, M positives and negatives: emb and demb (Q+M,C), losses (Q), place (Q+M)
    static size_t bytes(int Q, int M, int C) {
        return sizeof(float) * ((size_t)(Q + M) * (2 * C + 1) + Q + contrastive_scratch(Q, M, C));
    }
    void allocate(int Q, int M, int C) {
        emb = (float*)device_malloc(bytes(Q, M, C));
        demb = emb + (size_t)(Q + M) * C;
        losses = demb + (size_t)(Q + M) * C;
        scratch = losses + Q;
        place = (int*)(scratch + contrastive_scratch(Q, M, C));
    }
    void release() { device_free(emb); }
};

#if !defined(LAYERS_ELSEWHERE)
constexpr int POOLING_COLUMNS = 256;            // of a block
constexpr int POOLING_TOKENS = 32;              // of a partial sum

// One block per sequence and POOLING_COLUMNS columns. It adds up sums of 32 tokens: one running sum over thousands of
// tokens would lose the low bits of the last. A thread only touches its own columns of shared memory: no barrier.
__global__ void pooling_forward_kernel(float* out, const floatX* inp, const int* lengths, int T, int C, Pooling kind) {
    const int pieces = ceil_div(C, POOLING_COLUMNS);
    const int c0 = (int)(blockIdx.x % pieces) * POOLING_COLUMNS;        // this block's columns
    const int columns = imin(C - c0, POOLING_COLUMNS);
    const size_t b = blockIdx.x / pieces;
    const int length = kind == Pooling::Mean ? lengths[b] : 1;          // tokens that count
    float* total = dynamic_shared();            // (POOLING_COLUMNS): of all tokens so far
    float* sum = total + POOLING_COLUMNS;       // (POOLING_COLUMNS): of these 32
    for (int c = threadIdx.x; c < columns; c += blockDim.x) { total[c] = 0.0f; }
    for (int t0 = 0; t0 < length; t0 += POOLING_TOKENS) {
        for (int c = threadIdx.x; c < columns; c += blockDim.x) { sum[c] = 0.0f; }
        for (int t = t0; t < t0 + POOLING_TOKENS && t < length; t++) {
            const floatX* x = inp + (b * T + t) * C + c0;       // (columns)
            SIMD
            for (int c = threadIdx.x; c < columns; c += blockDim.x) { sum[c] += (float)x[c]; }
        }
        for (int c = threadIdx.x; c < columns; c += blockDim.x) { total[c] += sum[c]; }
    }
    for (int c = threadIdx.x; c < columns; c += blockDim.x) { out[b * C + c0 + c] = total[c] / (float)length; }
}

LAUNCHER void pooling_forward(float* out, const floatX* inp, const int* lengths, int B, int T, int C, Pooling kind,
                              Stream stream) {
    const Grid grid((size_t)B * ceil_div(C, POOLING_COLUMNS), 256, 2 * sizeof(float) * POOLING_COLUMNS, stream);
    launch(pooling_forward_kernel, grid, out, inp, lengths, T, C, kind);
}

// One block per token.
__global__ void pooling_backward_kernel(floatX* dinp, const float* dout, const int* lengths, int T, int C,
                                        Pooling kind) {
    const size_t row = blockIdx.x;
    const size_t b = row / T;
    const int length = kind == Pooling::Mean ? lengths[b] : 1;
    const bool counts = (int)(row % T) < length;            // not padding; for Cls, the first token
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        dinp[row * C + c] = (floatX)(counts ? dout[b * C + c] / (float)length : 0.0f);
    }
}
LAUNCHER void pooling_backward(floatX* dinp, const float* dout, const int* lengths, int B, int T, int C, Pooling kind,
                               Stream stream) {
    launch(pooling_backward_kernel, Grid((size_t)B * T, 128, 0, stream), dinp, dout, lengths, T, C, kind);
}

// ----------------------------------------------------------------------------------------------------------
// InfoNCE: rows of length 1

constexpr float MAX_INVERSE_NORM = 1e12f;

// out (n,C): rows place[0 .. n-1] of inp, each divided by max(its length, 1e-12); inverse_norm (n). One block per row.
__global__ void normalize_rows_kernel(float* out, float* inverse_norm, const float* inp, const int* place, int C) {
    const size_t row = blockIdx.x;
    const float* x = inp + (size_t)place[row] * C;              // (C)
    // 1. the length of the row
    double squares = 0.0;                       // a float would overflow at lengths of 2e19 and underflow at 1e-19
    for (int c = threadIdx.x; c < C; c += blockDim.x) { squares += (double)x[c] * (double)x[c]; }
    const double inverse = 1.0 / sqrt(block_sum(squares));
    const float scale = inverse > (double)MAX_INVERSE_NORM ? MAX_INVERSE_NORM : (float)inverse;
    // 2. the row divided by it
    for (int c = threadIdx.x; c < C; c += blockDim.x) { out[row * C + c] = x[c] * scale; }
    if (threadIdx.x == 0) { inverse_norm[row] = scale; }
}

// dinp: rows place[0 .. n-1] of the gradient of inp, from dout (n,C), the normalized rows'. One block per row.
__global__ void normalize_rows_backward_kernel(float* dinp, const float* dout, const float* normalized,
                                               const float* inverse_norm, const int* place, int C) {
    const size_t row = blockIdx.x;
    const float* n = normalized + row * C;                      // (C)
    const float* dn = dout + row * C;                           // (C)
    float* dx = dinp + (size_t)place[row] * C;                  // (C)
    const float scale = inverse_norm[row];
    // 1. the gradient's component along the row, which changes only its length
    const auto part = sums_over<1>(threadIdx.x, C, blockDim.x, [&](float* s, int c) { s[0] += n[c] * dn[c]; });
    float along = block_sum(part.x[0]);
    if (!(scale < MAX_INVERSE_NORM)) { along = 0.0f; }          // the divisor was the constant 1e-12
    // 2. the other components, divided as the row was
    for (int c = threadIdx.x; c < C; c += blockDim.x) { dx[c] = (dn[c] - n[c] * along) * scale; }
}

// ----------------------------------------------------------------------------------------------------------
// InfoNCE: products in float32

constexpr int FLOAT_K = LANES > 1 ? 256 : 16;   // depth of a slice
constexpr int FLOAT_TILE = ON_GPU ? 64 : 128;   // rows and columns of out per block: 2 slices and a tile fit in 48 kB
constexpr size_t FLOAT_PRODUCT_SHARED = sizeof(float) * FLOAT_TILE * (2 * FLOAT_K + FLOAT_TILE);

// out (M,N) = scale A (M,K) B (K,N), all float32, unlike matmul.cuh's operands: the third digit often decides which of
// two candidates is nearer, and bf16 does not have it. One block per tile c of out.
__global__ void float_product_kernel(float* out, Matrix<const float> A, Matrix<const float> B, float scale) {
    const int tiles_m = ceil_div(A.rows, FLOAT_TILE);
    const int m0 = (int)blockIdx.x % tiles_m * FLOAT_TILE;
    const int n0 = (int)blockIdx.x / tiles_m * FLOAT_TILE;
    const Matrix<const float> rows = block(A, m0, FLOAT_TILE, 0, A.cols);
    const Matrix<const float> cols = block(B, 0, B.rows, n0, FLOAT_TILE);
    const Matrix<float> a = view(dynamic_shared(), rows.rows, FLOAT_K);
    const Matrix<float> b = view(dynamic_shared() + FLOAT_TILE * FLOAT_K, FLOAT_K, FLOAT_TILE);
    const Matrix<float> c = view(b.data + FLOAT_K * FLOAT_TILE, rows.rows, FLOAT_TILE);
    block_product<FLOAT_K>(c, rows, cols, a, b);
    for (int m = 0; m < c.rows; m++) {
        for (int n = threadIdx.x; n < cols.cols; n += blockDim.x) {
            out[(size_t)(m0 + m) * B.cols + n0 + n] = scale * c(m, n);
        }
    }
}
inline void float_product(float* out, const Matrix<const float>& A, const Matrix<const float>& B, float scale,
                          Stream stream) {
    const size_t tiles = (size_t)ceil_div(A.rows, FLOAT_TILE) * (size_t)ceil_div(B.cols, FLOAT_TILE);
    launch(float_product_kernel, Grid(tiles, 256, FLOAT_PRODUCT_SHARED, stream), out, A, B, scale);
}

// ----------------------------------------------------------------------------------------------------------
// InfoNCE: the loss and both passes

// One block per query. scores (Q,M) = scale cosine become the gradient of the cosines; scale = 1 / temperature
__global__ void contrastive_loss_kernel(float* losses, float* scores, int M, float scale, float dloss) {
    const int i = (int)blockIdx.x;
    float* s = scores + (size_t)i * M;          // (M): candidate i is the positive
    // 1. the largest score
    const float largest = block_max(max_over(threadIdx.x, M, blockDim.x, [&](int j) { return s[j]; }));
    // 2. the sum of exponentials, and the loss
    const auto part = sums_over<1>(threadIdx.x, M, blockDim.x, [&](float* sum, int j) {
        sum[0] += fast_exp(s[j] - largest);
    });
    const float sum = block_sum(part.x[0]);
    if (threadIdx.x == 0) { losses[i] = portable_logf(sum) + (largest - s[i]); }
    __syncthreads();                            // s[i] has been read
    // 3. the gradient of the cosines: hence the factor scale
    const float weight = dloss * scale;
    for (int j = threadIdx.x; j < M; j += blockDim.x) {
        const float p = fast_exp(s[j] - largest) * (weight / sum);
        s[j] = j == i ? p - weight : p;
    }
}

LAUNCHER void contrastive_forward_backward(float* losses, float* demb, float* scratch, const float* emb,
                                           const int* place, int Q, int M, int C, float temperature, float dloss,
                                           Stream stream) {
    check(Q >= 1 && M >= Q, "expected at least one candidate for each query, got %d for %d", M, Q);
    check(temperature > 0.0f, "expected a temperature above 0, got %g", (double)temperature);
    const size_t q = (size_t)Q, m = (size_t)M;
    const size_t c = (size_t)C;
    float* n = scratch;
    float* dn = n + (q + m) * c;
    float* inverse_norm = dn + (q + m) * c;
    const Matrix<float> queries = view(n, q, c);
    const Matrix<float> candidates = view(n + q * c, m, c);
    const Matrix<float> scores = view(inverse_norm + q + m, q, m);
    const float scale = 1.0f / temperature;
    // 1 all embeddings, queries and candidates alike, to length 1
    launch(normalize_rows_kernel, Grid(q + m, 256, 0, stream), n, inverse_norm, emb, place, C);
    // 2 the scores (Q,M), then the cosines' gradient in the same memory
    float_product(scores.data, queries, transposed(candidates), scale, stream);
    launch(contrastive_loss_kernel, Grid(q, 256, 0, stream), losses, scores.data, M, scale, dloss);
    // 3 the gradients of the normalized rows
    float_product(dn, scores, candidates, 1.0f, stream);
    float_product(dn + q * c, transposed(scores), queries, 1.0f, stream);
    // 4 and of the embeddings themselves
    launch(normalize_rows_backward_kernel, Grid(q + m, 256, 0, stream), demb, dn, n, inverse_norm, place, C);
}

// ----------------------------------------------------------------------------------------------------------
// distillation

// One block per row. target (R,C), the teacher's normalized rows, becomes the gradient of the normalized rows n (R,C).
__global__ void distill_kernel(float* losses, float* target, const float* n, int C, float dloss) {
    const size_t row = blockIdx.x;
    float* t = target + row * C;                                // (C)
    const auto part = sums_over<1>(threadIdx.x, C, blockDim.x, [&](float* s, int c) { s[0] += n[row * C + c] * t[c]; });
    const float cosine = block_sum(part.x[0]);
    if (threadIdx.x == 0) { losses[row] = 1.0f - cosine; }
    for (int c = threadIdx.x; c < C; c += blockDim.x) { t[c] *= -dloss; }
}

LAUNCHER void distill_forward_backward(float* losses, float* demb, float* scratch, const float* emb, const int* place,
                                       int R, int C, float dloss, Stream stream) {
    const Grid rows((size_t)R, 256, 0, stream);
    float* n = scratch;
    float* dn = n + (size_t)R * C;
    float* inverse_norm = dn + (size_t)R * C;
    launch(normalize_rows_kernel, rows, dn, inverse_norm, demb, place, C);
    launch(normalize_rows_kernel, rows, n, inverse_norm, emb, place, C);
    launch(distill_kernel, rows, losses, dn, n, C, dloss);
    launch(normalize_rows_backward_kernel, rows, demb, dn, n, inverse_norm, place, C);
}
#endif
