// contrastive.cuh -- InfoNCE: each query's candidate against all candidates of the batch.  Karpukhin et al. 2020, eq. 2
//   n(x) = x / max(|x|, 1e-12);   s_ij = n(q_i) . n(c_j) / temperature;   loss_i = -log softmax_j(s_ij)[i]
//   Candidate i < Q is the positive of query i, the other M - Q are hard negatives; every query sees all of them.
//   backward: ds_ij = dloss (softmax_j(s_ij) - [i = j]) / temperature;  dx = (dn - n (n . dn)) / |x|, as moving along
//     x changes nothing; or dn / 1e-12 where |x| is less than that.
// Everything is float32 in every build, in sums whose order depends only on the shapes.
#pragma once

#include "base/fastmath.h"
#include "base/libm.h"
#include "matmul.cuh"

// floats of scratch: the normalized rows, their inverse lengths, the scores
inline size_t contrastive_scratch(int Q, int M, int C) { return (size_t)(Q + M) * (C + 1) + (size_t)Q * M; }
// losses (Q); demb (Q+M,C) = d (sum of dloss * losses) / d emb; emb (Q+M,C): the queries, then the candidates, M >= Q.
// scratch: contrastive_scratch floats
void contrastive_forward_backward(float* losses, float* demb, float* scratch, const float* emb, int Q, int M,
                                  int C, float temperature, float dloss, Stream stream);

// What a step holds in addition to a chunk's activations: embeddings and their gradients, of all rows
struct ContrastiveBuffers {
    float *emb = nullptr, *demb = nullptr;
    float *losses = nullptr, *scratch = nullptr;
    // Q queries, M positives and negatives: emb and demb (Q+M,C), losses (Q)
    static size_t bytes(int Q, int M, int C) {
        return sizeof(float) * (2 * (size_t)(Q + M) * C + Q + contrastive_scratch(Q, M, C));
    }
    void allocate(int Q, int M, int C) {
        emb = (float*)device_malloc(bytes(Q, M, C));
        demb = emb + (size_t)(Q + M) * C;
        losses = demb + (size_t)(Q + M) * C;
        scratch = losses + Q;
    }
    void release() { device_free(emb); }
};

#if !defined(KERNELS_ELSEWHERE)
constexpr float MAX_INVERSE_NORM = 1e12f;

// out (n,C) = inp (n,C), each row divided by max(its length, 1e-12); inverse_norm (n). One block per row.
__global__ void normalize_rows_kernel(float* out, float* inverse_norm, const float* inp, int C) {
    const size_t row = blockIdx.x;
    // 1. the length of the row
    double squares = 0.0;                       // a float would overflow at lengths of 2e19 and underflow at 1e-19
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        const double x = (double)inp[row * C + c];
        squares += x * x;
    }
    const double inverse = 1.0 / sqrt(block_sum(squares));
    const float scale = inverse > (double)MAX_INVERSE_NORM ? MAX_INVERSE_NORM : (float)inverse;
    // 2. the row divided by it
    for (int c = threadIdx.x; c < C; c += blockDim.x) { out[row * C + c] = inp[row * C + c] * scale; }
    if (threadIdx.x == 0) { inverse_norm[row] = scale; }
}

// d (n,C): in, the gradient of the normalized rows; out, that of the rows themselves. One block per row.
__global__ void normalize_rows_backward_kernel(float* d, const float* normalized, const float* inverse_norm, int C) {
    const size_t row = blockIdx.x;
    const float* n = normalized + row * C;                      // (C)
    float* dx = d + row * C;                                    // (C)
    const float scale = inverse_norm[row];
    // 1. the part of the gradient that points along the row: to move that way does not change the direction
    const auto part = sums_over<1>(threadIdx.x, C, blockDim.x, [&](float* s, int c) { s[0] += n[c] * dx[c]; });
    float along = block_sum(part.x[0]);
    if (!(scale < MAX_INVERSE_NORM)) { along = 0.0f; }          // the divisor was the constant 1e-12
    // 2. the rest of it, for a row that was divided by its length
    for (int c = threadIdx.x; c < C; c += blockDim.x) { dx[c] = (dx[c] - n[c] * along) * scale; }
}

// ----------------------------------------------------------------------------------------------------------

// out (M,N) = scale A (M,K) B (K,N) in float32, where the operands of matmul.cuh are floatX. Similarities decide which
// of two candidates is nearer, often in the third digit: that is more than bf16 has.
struct FloatProduct {
    float* out;
    Matrix<const float> A, B;
    float scale;
};

constexpr int FLOAT_K = LANES > 1 ? 256 : 16;   // depth of a slice
constexpr int FLOAT_TILE = ON_GPU ? 64 : 128;   // rows and columns of out per block: 2 slices and a tile fit in 48 kB
constexpr size_t FLOAT_PRODUCT_SHARED = sizeof(float) * FLOAT_TILE * (2 * FLOAT_K + FLOAT_TILE);

// One block per tile c of out; slices a and b of A and B in shared memory
__global__ void float_product_kernel(FloatProduct p) {
    const int tiles_m = ceil_div(p.A.rows, FLOAT_TILE);
    const int m0 = (int)blockIdx.x % tiles_m * FLOAT_TILE;
    const int n0 = (int)blockIdx.x / tiles_m * FLOAT_TILE;
    const Matrix<const float> A = block(p.A, m0, FLOAT_TILE, 0, p.A.cols);
    const Matrix<const float> B = block(p.B, 0, p.B.rows, n0, FLOAT_TILE);
    const int M = A.rows;
    const int N = B.cols;
    const Matrix<float> a = view(dynamic_shared(), M, FLOAT_K);
    const Matrix<float> b = view(dynamic_shared() + FLOAT_TILE * FLOAT_K, FLOAT_K, FLOAT_TILE);
    const Matrix<float> c = view(b.data + FLOAT_K * FLOAT_TILE, M, FLOAT_TILE);
    for (int e = threadIdx.x; e < M * FLOAT_TILE; e += blockDim.x) { c.data[e] = 0.0f; }
    for (int k0 = 0; k0 < A.cols; k0 += FLOAT_K) {
        const int K = imin(FLOAT_K, A.cols - k0);
        __syncthreads();                                        // c is zero; the last slice has been read
        for (int e = threadIdx.x; e < M * FLOAT_K; e += blockDim.x) {
            const int k = e % FLOAT_K;
            a.data[e] = k < K ? A(e / FLOAT_K, k0 + k) : 0.0f;
        }
        for (int e = threadIdx.x; e < K * FLOAT_TILE; e += blockDim.x) {
            const int n = e % FLOAT_TILE;
            b.data[e] = n < N ? B(k0 + e / FLOAT_TILE, n) : 0.0f;
        }
        __syncthreads();
        block_matmul_add(block(c, 0, M, 0, round_up(N, LANES)), block(a, 0, M, 0, K), b);
    }
    __syncthreads();
    for (int m = 0; m < M; m++) {
        for (int n = threadIdx.x; n < N; n += blockDim.x) {
            p.out[(size_t)(m0 + m) * p.B.cols + n0 + n] = p.scale * c(m, n);
        }
    }
}
inline void float_product(float* out, const Matrix<const float>& A, const Matrix<const float>& B, float scale,
                          Stream stream) {
    const size_t tiles = (size_t)ceil_div(A.rows, FLOAT_TILE) * (size_t)ceil_div(B.cols, FLOAT_TILE);
    launch(float_product_kernel, Grid(tiles, 256, FLOAT_PRODUCT_SHARED, stream), FloatProduct{out, A, B, scale});
}

// ----------------------------------------------------------------------------------------------------------

// One block per query. scores (Q,M) become the gradient of the scores before they were divided by the temperature
// (scale is its inverse).
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
    // 3. the gradient, with respect to the cosine: hence the factor 1 / temperature
    const float weight = dloss * scale;
    for (int j = threadIdx.x; j < M; j += blockDim.x) {
        const float p = fast_exp(s[j] - largest) * (weight / sum);
        s[j] = j == i ? p - weight : p;
    }
}

LAUNCHER void contrastive_forward_backward(float* losses, float* demb, float* scratch, const float* emb, int Q, int M,
                                           int C, float temperature, float dloss, Stream stream) {
    check(Q >= 1 && M >= Q, "expected at least one candidate for each query, got %d for %d", M, Q);
    check(temperature > 0.0f, "expected a temperature above 0, got %g", (double)temperature);
    const size_t q = (size_t)Q, m = (size_t)M;
    const size_t c = (size_t)C;
    float* n = scratch;
    float* inverse_norm = n + (q + m) * c;
    const Matrix<float> queries = view(n, q, c);
    const Matrix<float> candidates = view(n + q * c, m, c);
    const Matrix<float> scores = view(inverse_norm + q + m, q, m);
    const float scale = 1.0f / temperature;
    // 1 all embeddings, queries and candidates alike, to length 1
    launch(normalize_rows_kernel, Grid(q + m, 256, 0, stream), n, inverse_norm, emb, C);
    // 2 the scores (Q,M), then their gradient in the same memory
    float_product(scores.data, queries, transposed(candidates), scale, stream);
    launch(contrastive_loss_kernel, Grid(q, 256, 0, stream), losses, scores.data, M, scale, dloss);
    // 3 the gradients of the normalised rows: two products with what the forward one multiplied
    float_product(demb, scores, candidates, 1.0f, stream);
    float_product(demb + q * c, transposed(scores), queries, 1.0f, stream);
    // 4 and of the embeddings themselves
    launch(normalize_rows_backward_kernel, Grid(q + m, 256, 0, stream), demb, n, inverse_norm, C);
}
#endif
