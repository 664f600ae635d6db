// embedding.cuh -- token embeddings: out[n] = wte[token[n]]; BERT's scatter_rows, add_row.
//   backward: dwte[v] += the sum of the rows of dout whose token is v. The host sorts the rows by token first
//   (EmbeddingPlan), so that each row of dwte has one block, which adds in the order of the rows: no atomics, and the
//   same bits every time.
//   Of 65,536 tokens of English 2,500 are " the", and a GPU would wait for their block. There a token's rows are cut
//   into parts of EMBEDDING_PART rows. One block sums each part, row by row, and a second kernel adds the parts to dwte
//   in their order. The order of a token's sum depends only on its rows.
//   scatter_rows: dinp[rows[k]] = dout[k]. embedding_forward picks BERT's masked positions from the hidden states, no
//   row twice: this is its backward.
//   add_row: out[n] += row, BERT's token type. Its backward is add_row_sums (base/matrix.cuh).
#pragma once

#include <algorithm>

#include "base/matrix.cuh"

constexpr int EMBEDDING_PART = ON_GPU ? 64 : INT32_MAX;     // on a CPU other tokens keep the cores busy

// The rows of a micro-batch, sorted by token and cut into parts, each of one token: part p is rows[first[p]] ..
// rows[first[p + 1] - 1]. Hot tokens, which have several parts, come first: hot token h has the parts hot[h] ..
// hot[h + 1] - 1. It is a counting sort, linear in N + V.
struct EmbeddingPlan {
    std::vector<int> rows;          // (N), by token and, for equal tokens, in the order of the batch
    std::vector<int> first;         // (parts+1)
    std::vector<int> hot;           // (hot tokens+1)

    void build(const int* tokens, size_t N, int part = EMBEDDING_PART) {
        const int V = N > 0 ? *std::max_element(tokens, tokens + N) + 1 : 0;
        // 1. how often each token occurs
        std::vector<int> count((size_t)V);
        for (size_t n = 0; n < N; n++) { count[(size_t)tokens[n]]++; }
        // 2. where its rows begin: first those of the hot tokens, in parts
        std::vector<int> next((size_t)V);
        int at = 0;
        first.clear();
        hot.clear();
        for (int v = 0; v < V; v++) {
            if (count[v] <= part) { continue; }
            next[v] = at;
            hot.push_back((int)first.size());
            for (int k = 0; k < ceil_div(count[v], part); k++) { first.push_back(at + k * part); }
            at += count[v];
        }
        hot.push_back((int)first.size());
        for (int v = 0; v < V; v++) {
            if (count[v] == 0 || count[v] > part) { continue; }
            next[v] = at;
            first.push_back(at);
            at += count[v];
        }
        first.push_back(at);
        // 3. each row goes to the next free place of its token
        rows.resize(N);
        for (size_t n = 0; n < N; n++) { rows[(size_t)next[(size_t)tokens[n]]++] = (int)n; }
    }
    size_t parts() const { return first.size() - 1; }
    size_t hot_tokens() const { return hot.size() - 1; }
    size_t hot_parts() const { return (size_t)hot.back(); }
    // at most, for N tokens
    static size_t most_hot_tokens(size_t N) { return N / ((size_t)EMBEDDING_PART + 1); }
    static size_t most_hot_parts(size_t N) { return N / EMBEDDING_PART + most_hot_tokens(N); }
};
// An EmbeddingPlan on the device
struct EmbeddingRows {
    int* rows = nullptr;
    int* first = nullptr;
    int* hot = nullptr;
    size_t parts = 0;
    size_t hot_tokens = 0;
    size_t hot_parts = 0;

    void count(const EmbeddingPlan& plan) {
        parts = plan.parts();
        hot_tokens = plan.hot_tokens();
        hot_parts = plan.hot_parts();
    }
};

// floats of scratch that embedding_backward needs for at most N tokens
inline size_t embedding_backward_scratch(size_t N, size_t C) { return EmbeddingPlan::most_hot_parts(N) * C; }
// out (N,C), tokens (N) all in [0, V), wte (V,C)
void embedding_forward(floatX* out, const int* tokens, const floatX* wte, size_t N, int C, Stream stream);
// dwte (V,C) accumulates; partial: embedding_backward_scratch floats; dout (N,C), tokens (N)
void embedding_backward(float* dwte, float* partial, const floatX* dout, const int* tokens,
                        const EmbeddingRows& plan, int C, Stream stream);
// dinp (N,C), dout (n,C), rows (n), no two equal: blocks write in any order. The other rows of dinp stay as they are.
void scatter_rows(floatX* dinp, const floatX* dout, const int* rows, size_t n, int C, Stream stream);
// out (N,C) += row (C)
void add_row(floatX* out, const floatX* row, size_t N, int C, Stream stream);

#if !defined(LAYERS_ELSEWHERE)
// One block per token.
__global__ void embedding_forward_kernel(floatX* out, const int* tokens, const floatX* wte, int C) {
    const size_t n = blockIdx.x;
    const floatX* row = wte + (size_t)tokens[n] * C;        // (C)
    for (int c = threadIdx.x; c < C; c += blockDim.x) { out[n * C + c] = row[c]; }
}
LAUNCHER void embedding_forward(floatX* out, const int* tokens, const floatX* wte, size_t N, int C, Stream stream) {
    launch(embedding_forward_kernel, Grid(N, 128, 0, stream), out, tokens, wte, C);
}

// One block per part: the first hot_parts blocks write their sums to partial (hot_parts,C), later ones add to dwte.
template <int P>
__global__ void embedding_backward_kernel(float* dwte, float* partial, const floatX* dout, const int* tokens,
                                          const int* rows, const int* first, int hot_parts, int C) {
    const int begin = first[blockIdx.x];                    // the part: rows[begin] .. rows[end - 1]
    const int end = first[blockIdx.x + 1];
    const bool is_hot = (int)blockIdx.x < hot_parts;
    float* d = dwte + (size_t)tokens[rows[begin]] * C;      // (C), no other block's
    if (is_hot) { d = partial + (size_t)blockIdx.x * C; }
    if constexpr (ON_GPU) {
        // the sums stay in registers: some tokens have many rows
        for (int c = threadIdx.x * P; c < C; c += blockDim.x * P) {
            float sum[P];
            UNROLL
            for (int e = 0; e < P; e++) { sum[e] = is_hot ? 0.0f : d[c + e]; }
            for (int k = begin; k < end; k++) {
                const Pack<P> dy = load_pack<P>(dout + (size_t)rows[k] * C + c);
                UNROLL
                for (int e = 0; e < P; e++) { sum[e] += dy.x[e]; }
            }
            UNROLL
            for (int e = 0; e < P; e++) { d[c + e] = sum[e]; }
        }
    } else {
        for (int c = threadIdx.x; is_hot && c < C; c += blockDim.x) { d[c] = 0.0f; }
        for (int k = begin; k < end; k++) {
            const floatX* dy = dout + (size_t)rows[k] * C;
            for (int c = threadIdx.x; c < C; c += blockDim.x) { d[c] += (float)dy[c]; }
        }
    }
}
// One block per hot token: adds the sums of its parts.
static __global__ void embedding_hot_kernel(float* dwte, const float* partial, const int* tokens, const int* rows,
                                            const int* first, const int* hot, int C) {
    const int begin = hot[blockIdx.x];
    const int end = hot[blockIdx.x + 1];
    float* d = dwte + (size_t)tokens[rows[first[begin]]] * C;           // (C)
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        float sum = d[c];
        for (int p = begin; p < end; p++) { sum += partial[(size_t)p * C + c]; }
        d[c] = sum;
    }
}
LAUNCHER void embedding_backward(float* dwte, float* partial, const floatX* dout, const int* tokens,
                                 const EmbeddingRows& plan, int C, Stream stream) {
    with_pack((size_t)C, [&](auto P) {
        launch(embedding_backward_kernel<P>, Grid(plan.parts, 128, 0, stream), dwte, partial, dout, tokens, plan.rows,
               plan.first, (int)plan.hot_parts, C);
    });
    launch(embedding_hot_kernel, Grid(plan.hot_tokens, 256, 0, stream), dwte, partial, tokens, plan.rows, plan.first,
           plan.hot, C);
}

// One block per row of dout.
__global__ void scatter_rows_kernel(floatX* dinp, const floatX* dout, const int* rows, int C) {
    const size_t k = blockIdx.x;
    floatX* row = dinp + (size_t)rows[k] * C;       // (C)
    for (int c = threadIdx.x; c < C; c += blockDim.x) { row[c] = dout[k * C + c]; }
}
LAUNCHER void scatter_rows(floatX* dinp, const floatX* dout, const int* rows, size_t n, int C, Stream stream) {
    launch(scatter_rows_kernel, Grid(n, 128, 0, stream), dinp, dout, rows, C);
}

// One block per row of out.
__global__ void add_row_kernel(floatX* out, const floatX* row, int C) {
    floatX* o = out + (size_t)blockIdx.x * C;       // (C)
    SIMD
    for (int c = threadIdx.x; c < C; c += blockDim.x) { o[c] = (floatX)((float)o[c] + (float)row[c]); }
}
LAUNCHER void add_row(floatX* out, const floatX* row, size_t N, int C, Stream stream) {
    launch(add_row_kernel, Grid(N, 128, 0, stream), out, row, C);
}
#endif
