// embedding.cuh -- out[n] = wte[token[n]].
//   backward: dwte[v] += the sum of the rows of dout whose token is v. The host sorts the rows by token first
//   (EmbeddingPlan), so that each row of dwte has one block, which adds in the order of the rows: no atomics, and the
//   same bits every time.
#ifndef LLMC_EMBEDDING_CUH
#define LLMC_EMBEDDING_CUH

#include <algorithm>

#include "base/device.h"

// One block per token.
__global__ void embedding_forward_kernel(floatX* out, const int* tokens, const floatX* wte, int C) {
    const size_t n = blockIdx.x;
    const floatX* row = wte + (size_t)tokens[n] * C;        // (C)
    for (int c = threadIdx.x; c < C; c += blockDim.x) { out[n * C + c] = row[c]; }
}
// out (N,C), tokens (N) all in [0, V), wte (V,C)
inline void embedding_forward(floatX* out, const int* tokens, const floatX* wte, size_t N, int C, Stream stream) {
    launch(embedding_forward_kernel, Grid(N, 128, 0, stream), out, tokens, wte, C);
}

// The rows of a micro-batch in groups of equal token: group g is rows[first[g]] .. rows[first[g + 1] - 1]. It is a
// counting sort, linear in N + V, because the GPU waits for it.
struct EmbeddingPlan {
    std::vector<int> rows;          // (N), by token and, for equal tokens, in the order of the batch
    std::vector<int> first;         // (groups+1)

    void build(const int* tokens, size_t N) {
        const int V = N > 0 ? *std::max_element(tokens, tokens + N) + 1 : 0;
        // next[v + 1]: how many rows have token v; later next[v]: where the next of them goes
        std::vector<int> next((size_t)V + 1);
        // 1. how often each token occurs
        for (size_t n = 0; n < N; n++) { next[(size_t)tokens[n] + 1]++; }
        // 2. where its group begins
        first.clear();
        for (size_t v = 0; v < (size_t)V; v++) {
            if (next[v + 1] > 0) { first.push_back(next[v]); }
            next[v + 1] += next[v];
        }
        first.push_back((int)N);
        // 3. each row goes to the next free place of its group
        rows.resize(N);
        for (size_t n = 0; n < N; n++) { rows[(size_t)next[(size_t)tokens[n]]++] = (int)n; }
    }
    size_t groups() const { return first.size() - 1; }
};

// One block per group, that is, per token that occurs.
template <int P>
__global__ void embedding_backward_kernel(float* dwte, const floatX* dout, const int* tokens, const int* rows,
                                          const int* first, int C) {
    const int begin = first[blockIdx.x];                    // the group: rows[begin] .. rows[end - 1]
    const int end = first[blockIdx.x + 1];
    float* d = dwte + (size_t)tokens[rows[begin]] * C;      // (C), no other block's
#if defined(CUDA_BUILD)
    // the sums stay in registers: some tokens have many rows
    for (int c = threadIdx.x * P; c < C; c += blockDim.x * P) {
        float sum[P];
        UNROLL
        for (int e = 0; e < P; e++) { sum[e] = d[c + e]; }
        for (int k = begin; k < end; k++) {
            const Pack<P> dy = load_pack<P>(dout + (size_t)rows[k] * C + c);
            UNROLL
            for (int e = 0; e < P; e++) { sum[e] += dy.x[e]; }
        }
        UNROLL
        for (int e = 0; e < P; e++) { d[c + e] = sum[e]; }
    }
#else
    for (int k = begin; k < end; k++) {
        const floatX* dy = dout + (size_t)rows[k] * C;
        for (int c = threadIdx.x; c < C; c += blockDim.x) { d[c] += dy[c]; }
    }
#endif
}
// dwte (V,C) accumulates; dout (N,C), tokens (N); rows (N) and first (groups+1) are an EmbeddingPlan's, on the device
inline void embedding_backward(float* dwte, const floatX* dout, const int* tokens, const int* rows, const int* first,
                               size_t groups, int C, Stream stream) {
    with_pack((size_t)C, [&](auto P) {
        launch(embedding_backward_kernel<P>, Grid(groups, 128, 0, stream), dwte, dout, tokens, rows, first, C);
    });
}

#endif
