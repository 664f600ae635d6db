// embedding.cuh -- out[n] = wte[token[n]].
//   backward: dwte[v] += sum of dout's rows whose token is v. The host sorts the rows by token first (EmbeddingPlan), so
//   that each row of dwte has one block, which adds in the order of the rows: no atomics, the same bits every time.
#ifndef LLMC_EMBEDDING_CUH
#define LLMC_EMBEDDING_CUH

#include "device.h"

__global__ void embedding_forward_kernel(floatX* out, const int* tokens, const floatX* wte, int C) {
    const size_t n = blockIdx.x;
    const floatX* row = wte + (size_t)tokens[n] * C;
    for (int c = threadIdx.x; c < C; c += blockDim.x) { out[n * C + c] = row[c]; }
}
// out (N,C), tokens (N) all in [0, V), wte (V,C)
inline void embedding_forward(floatX* out, const int* tokens, const floatX* wte, size_t N, int C, Stream stream) {
    launch(embedding_forward_kernel, Grid(N, 128, 0, stream), out, tokens, wte, C);
}

// The rows of a micro-batch in groups of equal token: group g is rows[first[g]] .. rows[first[g + 1] - 1].
struct EmbeddingPlan {
    std::vector<int> rows, first;
    void build(const int* tokens, size_t N) {
        rows.resize(N);
        for (size_t n = 0; n < N; n++) { rows[n] = (int)n; }
        std::stable_sort(rows.begin(), rows.end(), [&](int a, int b) { return tokens[a] < tokens[b]; });
        first.clear();
        for (size_t n = 0; n < N; n++) {
            if (n == 0 || tokens[rows[n]] != tokens[rows[n - 1]]) { first.push_back((int)n); }
        }
        first.push_back((int)N);
    }
    size_t groups() const { return first.size() - 1; }
};

__global__ void embedding_backward_kernel(float* dwte, const floatX* dout, const int* tokens, const int* rows, const int* first, int C) {
    const int begin = first[blockIdx.x], end = first[blockIdx.x + 1];
    float* d = dwte + (size_t)tokens[rows[begin]] * C;
    for (int k = begin; k < end; k++) {
        const floatX* dy = dout + (size_t)rows[k] * C;
        for (int c = threadIdx.x; c < C; c += blockDim.x) { d[c] += (float)dy[c]; }
    }
}
// dwte (V,C) accumulates; rows and first are the plan's, on the device
inline void embedding_backward(float* dwte, const floatX* dout, const int* tokens, const int* rows, const int* first, size_t groups, int C,
                               Stream stream) {
    launch(embedding_backward_kernel, Grid(groups, 128, 0, stream), dwte, dout, tokens, rows, first, C);
}

#endif
