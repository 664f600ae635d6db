// classifier.cuh -- softmax and cross-entropy over a row of logits, in place.
//   loss = log(sum_v e^(logit_v)) - logit_target        by log-sum-exp: finite for any finite logits
//   dlogit_v = dloss (softmax_v - [v = target])         dloss is 1 / (targets of the total batch)
// A row whose target is IGNORE_INDEX has loss 0 and gradient 0. Only the first V of the Vp columns are a vocabulary;
// the gradient of the other columns is 0.
//
// A hit is a target whose logit is larger than every other one: a tie is not a hit. Training keeps its logits as
// floatX; evaluation takes them in float32 in every build, because bf16 rounds neighbours to a tie.
//
// The gradient overwrites the logits, because they are the largest array of a training step: N x 50304 for GPT-2. Loss
// and gradient come from one kernel, because both need the largest logit and the sum of exponentials.
#ifndef LLMC_CLASSIFIER_CUH
#define LLMC_CLASSIFIER_CUH

#include "base/fastmath.h"
#include "base/libm.h"

// Testing single elements costs as much as the arithmetic, so these test whether a pack holds that element.
__device__ inline bool pack_holds(int v, int element) { return element >= v && element < v + PACK; }
__device__ inline bool pack_ends(int v, int V) { return v + PACK > V; }

// A block's results for a row: its largest logit, which is the target's or that of its rival, the largest of the rest;
// and the sum of e^(logit - largest), in which no exponential overflows. V need not be a multiple of a pack.
struct RowSoftmax { float target_logit, rival, largest, sum; };
template <class Logit> __device__ inline RowSoftmax row_softmax(const Logit* x, int target, int V) {
    const float target_logit = (float)x[target];
    float rival = -INFINITY;
    float sum = 0.0f;
#if defined(CUDA_BUILD)
    // All in one pass, because reading the row takes longer than a few more exponentials: a thread's sum is relative to
    // the largest logit that it has seen so far.
    float top = target_logit;
    for (int v = threadIdx.x * PACK; v < V; v += blockDim.x * PACK) {
        Pack<PACK> xs = load_pack<PACK>(x + v);
        if (pack_ends(v, V)) {
            UNROLL
            for (int e = 0; e < PACK; e++) { xs.x[e] = v + e < V ? xs.x[e] : -INFINITY; }       // whose e^x is 0
        }
        if (pack_holds(v, target)) {
            UNROLL
            for (int e = 0; e < PACK; e++) { rival = v + e != target ? fmaxf(rival, xs.x[e]) : rival; }
        } else {
            UNROLL
            for (int e = 0; e < PACK; e++) { rival = fmaxf(rival, xs.x[e]); }
        }
        if (rival > top) {
            sum *= fast_exp(top - rival);
            top = rival;
        }
        UNROLL
        for (int e = 0; e < PACK; e++) { sum += fast_exp(xs.x[e] - top); }
    }
    rival = block_max(rival);
    const float largest = fmaxf(target_logit, rival);
    sum = block_sum(sum * fast_exp(top - largest));
#else
    const auto logit = [&](int v) { return (float)x[v]; };
    const float before = max_over(threadIdx.x, target, blockDim.x, logit);
    const float after = max_over(target + 1 + threadIdx.x, V, blockDim.x, logit);
    rival = block_max(before > after ? before : after);
    const float largest = target_logit > rival ? target_logit : rival;
    const auto part = sums_over<1>(threadIdx.x, V, blockDim.x, [&](float* s, int v) {
        s[0] += fast_exp((float)x[v] - largest);
    });
    sum = block_sum(part.x[0]);
#endif
    return {target_logit, rival, largest, sum};
}

// One block per row. logits (N,Vp) become their gradient when `backward`, and stay as they are otherwise.
template <class Logit>
__global__ void classifier_kernel(float* losses, float* hits, Logit* logits, const int* targets, float dloss, int V,
                                  int Vp, bool backward) {
    const size_t row = blockIdx.x;
    Logit* x = logits + row * Vp;           // (Vp)
    const int target = targets[row];
    // 0. no target
    if (target == IGNORE_INDEX) {
        if (threadIdx.x == 0) { losses[row] = 0.0f; }
        if (threadIdx.x == 0 && hits != nullptr) { hits[row] = 0.0f; }
        for (int v = threadIdx.x; v < Vp && backward; v += blockDim.x) { x[v] = (Logit)0.0f; }
        return;                         // the whole block returns: no thread is left waiting
    }
    // 1. the softmax's parts, and the loss
    const RowSoftmax found = row_softmax(x, target, V);
    if (threadIdx.x == 0) {             // in double, so that the order of the three does not matter
        losses[row] = (float)((double)portable_logf(found.sum) + ((double)found.largest - (double)found.target_logit));
        if (hits != nullptr) { hits[row] = found.target_logit > found.rival ? 1.0f : 0.0f; }
    }
    if (!backward) { return; }
    __syncthreads();                    // all threads have read x[target]
    // 2. the gradient
    const float scale = dloss / found.sum;        // the softmax's divisor and dloss in one factor
    if constexpr (PACK == 1) {
        SIMD
        for (int v = threadIdx.x; v < V; v += blockDim.x) {
            x[v] = (Logit)(fast_exp((float)x[v] - found.largest) * scale);
        }
        for (int v = V + threadIdx.x; v < Vp; v += blockDim.x) { x[v] = (Logit)0.0f; }
        __syncthreads();
        if (threadIdx.x == 0) {         // rounded once
            x[target] = (Logit)(fast_exp(found.target_logit - found.largest) * scale - dloss);
        }
        return;
    }
    for (int v = threadIdx.x * PACK; v < Vp; v += blockDim.x * PACK) {
        Pack<PACK> xs = load_pack<PACK>(x + v);
        UNROLL
        for (int e = 0; e < PACK; e++) { xs.x[e] = fast_exp(xs.x[e] - found.largest) * scale; }
        if (pack_holds(v, target)) {
            UNROLL
            for (int e = 0; e < PACK; e++) { xs.x[e] = v + e == target ? xs.x[e] - dloss : xs.x[e]; }
        }
        if (pack_ends(v, V)) {
            UNROLL
            for (int e = 0; e < PACK; e++) { xs.x[e] = v + e < V ? xs.x[e] : 0.0f; }
        }
        store_pack<PACK>(x + v, xs);
    }
}

// losses (N) float32; hits (N) or null: 1 where the target's logit exceeds the rest; logits (N,Vp), Vp a multiple
// of 8, floatX or float32, become their gradient when `backward`; targets (N)
template <class Logit>
void classifier(float* losses, float* hits, Logit* logits, const int* targets, float dloss, size_t N, int V, int Vp,
                bool backward, Stream stream) {
    launch(classifier_kernel<Logit>, Grid(N, 1024, 0, stream), losses, hits, logits, targets, dloss, V, Vp, backward);
}

// One block. Each thread adds its losses in order, and block_sum adds the threads in order.
__global__ void loss_sum_kernel(double* sum, const float* losses, size_t N) {
    double s = 0.0;
    for (size_t n = threadIdx.x; n < N; n += blockDim.x) { s += (double)losses[n]; }
    s = block_sum(s);
    if (threadIdx.x == 0) { *sum = s; }
}
// *sum = the sum of N losses, in a fixed order
inline void loss_sum(double* sum, const float* losses, size_t N, Stream stream) {
    launch(loss_sum_kernel, Grid(1, 1024, 0, stream), sum, losses, N);
}

#endif
