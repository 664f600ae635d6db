// position/documents.cuh -- the positions of a call's tokens, and where their documents begin (--document_mask).
#ifndef LLMC_POSITION_DOCUMENTS_CUH
#define LLMC_POSITION_DOCUMENTS_CUH

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

// One block per sequence: where the documents of the tokens t0 .. t0+T-1 begin, continuing from t0 - 1. Each thread
// searches a piece of them, and then combines it with the earlier pieces.
static __global__ void documents_kernel(int* documents, const int* tokens, int T, Start first, int stride,
                                        int end_of_text) {
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

// documents (B,stride) from tokens (B,T) at t0 .. t0+T-1: for each token, where its document begins: at the last
// end_of_text up to it, or at 0
inline void find_documents(int* documents, const int* tokens, int end_of_text, int B, int T, Start start, int stride,
                           Stream stream) {
    const int threads = 128;
    const Grid grid((size_t)B, threads, sizeof(int) * threads, stream);
    launch(documents_kernel, grid, documents, tokens, T, start, stride, end_of_text);
}

#endif
