// pooling.cuh -- one vector per sequence: the mean of its tokens (Reimers and Gurevych 2019), or its first token.
//   Mean: out[b] = sum over t < length of inp[b,t] / length, [CLS] and [SEP] included.     Cls: out[b] = inp[b,0].
//   backward: each row that was added gets dout[b] / length.     saves nothing but the lengths.
// Rows after the end of a sequence are never read, and the sum is in the order of the tokens: padding changes no bit.
#pragma once

#include "base/device.h"

enum class Pooling { Mean, Cls };

// out (B,C) float32, inp (B,T,C), lengths (B) on the device, each in [1, T]
void pooling_forward(float* out, const floatX* inp, const int* lengths, int B, int T, int C, Pooling kind,
                     Stream stream);
// dinp (B,T,C) is overwritten, with zeros after the end of a sequence; dout (B,C) float32, lengths (B)
void pooling_backward(floatX* dinp, const float* dout, const int* lengths, int B, int T, int C, Pooling kind,
                      Stream stream);

#if !defined(KERNELS_ELSEWHERE)
constexpr int POOLING_COLUMNS = 256;            // of one block
constexpr int POOLING_TOKENS = 32;              // in one partial sum

// One block per sequence and piece of the columns. In shared memory it sums 32 tokens at a time, and then these sums:
// one sum over thousands of tokens would lose the low bits of the last ones. A thread only touches its own columns.
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
#endif
