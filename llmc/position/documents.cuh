// position/documents.cuh -- the positions of a call's tokens, where their documents begin, and which keys they see
// (--window, --sinks, --document_mask).
#pragma once

#include "../base/device.h"

// The position of a call's first token. A recorded step (StepGraph) is launched for later tokens with the arguments of
// the recording, so its kernels read the position from the device; every kernel calls position().
struct Start {
    int t0;                                                 // in a recorded step: its value at the recording
    const int* now = nullptr;                               // on the device; null: t0

    __host__ __device__ Start(int t0, const int* now = nullptr) : t0(t0), now(now) {}
    __device__ int position() const { return now == nullptr ? t0 : *now; }
    bool begins() const { return t0 == 0; }                 // a new text, whose tables are not filled yet
    bool recorded() const { return now != nullptr; }
};

// Which of the keys in its range (causal, or all up to the sequence's end) a query sees, `begin` being where its
// document begins:
//   j >= begin  and  (|i - j| < window  or  j < begin + sinks)          window = 0: all of the document
// A window of W shows a causal query its own key and the W - 1 before it, a bidirectional one W - 1 on either side;
// sinks are the first tokens (Xiao et al. 2024). A query always sees its own key. Documents are told apart in causal
// models alone, where end_of_text is given: each begins with that token. Otherwise a sequence is one document. The rule
// is only for attention: CABLE's sums run on, as only their differences count.
struct AttentionMask {
    int window = 0;
    int sinks = 0;
    int end_of_text = -1;
    const int* documents = nullptr;         // (B,T) on the device: where each token's begins; null: at 0

    __host__ __device__ bool by_document() const { return end_of_text >= 0; }
    __host__ __device__ bool exists() const { return window > 0 || by_document(); }
    // the mask of this many tokens: none, where it hides nothing; what is not 0 is a window, if there is a mask
    __host__ __device__ AttentionMask within(int tokens) const {
        AttentionMask mask = *this;
        if (window > 0 && window < tokens && sinks < tokens) { return mask; }
        mask.window = by_document() ? tokens : 0;
        mask.sinks = 0;
        return mask;
    }
    // that of sequence b
    __device__ AttentionMask of(size_t b, int stride) const {
        AttentionMask mask = *this;
        if (documents != nullptr) { mask.documents += b * stride; }
        return mask;
    }
    __device__ int begin(int i) const { return documents == nullptr ? 0 : documents[i]; }
    __device__ int position(int i) const { return i - begin(i); }       // in the document
    // Of a mask that exists. begin: that of i
    __host__ __device__ bool hides(int i, int j, int begin) const {
        return j < begin || (j >= begin + sinks && (j <= i - window || j >= i + window));
    }
    // whether no query of i0 .. i1-1 sees a key of j0 .. j1-1; begin: that of i0
    __host__ __device__ bool hides_all(int i0, int i1, int j0, int j1, int begin) const {
        return j1 <= begin || (j0 >= begin + sinks && (j1 - 1 <= i0 - window || j0 >= i1 - 1 + window));
    }
    // whether one of them does not see one of these in its range; begin: that of the last query
    __host__ __device__ bool hides_any(int i0, int i1, int j0, int j1, int begin) const {
        const int after_sinks = begin + sinks;
        return j0 < begin ||
               (j1 > after_sinks && (imax(j0, after_sinks) <= i1 - 1 - window || j1 - 1 >= i0 + window));
    }
};

// documents (B,stride) from tokens (B,T) at t0 .. t0+T-1: for each token, where its document begins: at the last
// end_of_text up to it, or at 0
void find_documents(int* documents, const int* tokens, int end_of_text, int B, int T, Start start, int stride,
                    Stream stream);

#if !defined(KERNELS_ELSEWHERE)
// One block per sequence: where the documents of the tokens t0 .. t0+T-1 begin, continuing from t0 - 1. Each thread
// searches a piece of them, and then combines it with the earlier pieces.
__global__ void documents_kernel(int* documents, const int* tokens, int T, Start first, int stride, int end_of_text) {
    const int t0 = first.position();
    int* last = (int*)dynamic_shared();                     // (threads): the last document that begins in each piece
    documents += (size_t)blockIdx.x * stride + t0;
    tokens += (size_t)blockIdx.x * T;
    const int piece = ceil_div(T, (int)blockDim.x);
    const int begin = imin((int)threadIdx.x * piece, T);
    const int end = imin(begin + piece, T);
    int document = 0;
    for (int t = begin; t < end; t++) { document = tokens[t] == end_of_text ? t0 + t : document; }
    last[threadIdx.x] = document;
    document = t0 > 0 ? documents[-1] : 0;
    __syncthreads();
    for (int before = 0; before < (int)threadIdx.x; before++) { document = imax(document, last[before]); }
    for (int t = begin; t < end; t++) {
        document = tokens[t] == end_of_text ? t0 + t : document;
        documents[t] = document;
    }
}

LAUNCHER void find_documents(int* documents, const int* tokens, int end_of_text, int B, int T, Start start,
                             int stride, Stream stream) {
    const int threads = 128;
    const Grid grid((size_t)B, threads, sizeof(int) * threads, stream);
    launch(documents_kernel, grid, documents, tokens, T, start, stride, end_of_text);
}
#endif
