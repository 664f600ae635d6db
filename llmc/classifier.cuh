// classifier.cuh -- softmax cross-entropy over a row of logits, in place.
//   loss = log(sum_v e^(logit_v)) - logit_target        by log-sum-exp: finite for any finite logits
//   dlogit_v = dloss (softmax_v - [v = target])         dloss is 1 / (targets of the total batch)
// A row whose target is IGNORE_INDEX has loss 0 and gradient 0. Only the first V of the Vp columns are a vocabulary;
// the gradient of the other columns is 0.
//
// A target is a hit if its logit exceeds every other logit: a tie is not a hit. Training has floatX logits; evaluation
// has float32 logits in every build, because bf16 rounds close logits to a tie.
//
// The gradient overwrites the logits, because they are the largest array of a training step: N x 50304 for GPT-2. Loss
// and gradient come from one kernel, because both need the sum of exponentials.
#pragma once

#include "base/math.h"

// losses (N) float32; hits (N): 1 for a hit, else 0; may be null. logits (N,Vp), Vp a multiple of 8,
// become their gradient if `backward`; targets (N)
void classifier(float* losses, float* hits, floatX* logits, const int* targets, float dloss, size_t N, int V,
                int Vp, bool backward, Stream stream);
// without a gradient, and with float32 logits in every build
void classifier_float(float* losses, float* hits, float* logits, const int* targets, size_t N, int V, int Vp,
                      Stream stream);
// *sum = the sum of N losses, in a fixed order
void loss_sum(double* sum, const float* losses, size_t N, Stream stream);

#if !defined(LAYERS_ELSEWHERE)
// e^(x - top). A bf16 logit is off by 2^-9 of its size already, so a rougher exponential will do.
template <class Logit> __device__ inline float exp_from(float x, float top) {
    return sizeof(Logit) == 2 ? rough_exp(x, top) : fast_exp(x - top);
}

// A row's softmax: its target's logit; its rival, the largest other logit; and sum = sum_v e^(logit_v - top), for a top
// with which nothing overflows.
struct RowSoftmax { float target_logit, rival, top, sum; };
template <class Logit>
__device__ inline RowSoftmax row_softmax(const Logit* x, int target, int V, bool wants_rival) {
    constexpr bool FINDS = ON_GPU && sizeof(Logit) == 4;            // evaluation: the rival in the sum's pass
    RowSoftmax row = {(float)x[target], -INFINITY, (float)x[target], 0.0f};
    const int packed = V / PACK * PACK;                             // V need not be a multiple of a pack
    const auto find_rival = [&] {
        const auto logit = [&](int v) { return (float)x[v]; };
        const float before = max_over(threadIdx.x, target, blockDim.x, logit);
        const float after = max_over(target + 1 + threadIdx.x, V, blockDim.x, logit);
        row.rival = block_max(before > after ? before : after);
        row.top = row.target_logit > row.rival ? row.target_logit : row.rival;
    };
    const auto add_up = [&] {
        const auto add = [&](float* s, int v, float logit) {
            s[0] += exp_from<Logit>(logit, row.top);
            if (FINDS && v != target) { row.rival = fmaxf(row.rival, logit); }
        };
        const auto packs = sums_over<1>(threadIdx.x, packed / PACK, blockDim.x, [&](float* s, int k) {
            const Pack<PACK> xs = load_pack<PACK>(x + k * PACK);
            UNROLL
            for (int e = 0; e < PACK; e++) { add(s, k * PACK + e, xs.x[e]); }
        });
        const auto rest = sums_over<1>(packed + threadIdx.x, V, blockDim.x, [&](float* s, int v) {
            add(s, v, (float)x[v]);
        });
        row.sum = block_sum(packs.x[0] + rest.x[0]);
        if (FINDS) { row.rival = block_max(row.rival); }
    };
    // To find the largest logit first costs a pass. A GPU takes the target's logit as top, unless the sum becomes so
    // large that dloss / sum might be denormal, or infinite.
    if (!ON_GPU || (wants_rival && !FINDS)) { find_rival(); }
    add_up();
    if (ON_GPU && !(row.sum < 1e19f)) {
        find_rival();
        add_up();
    }
    return row;
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
    const RowSoftmax found = row_softmax(x, target, V, hits != nullptr);
    if (threadIdx.x == 0) {             // in double: the order of the three terms does not matter
        losses[row] = (float)((double)portable_logf(found.sum) + ((double)found.top - (double)found.target_logit));
        if (hits != nullptr) { hits[row] = found.target_logit > found.rival ? 1.0f : 0.0f; }
    }
    if (!backward) { return; }
    __syncthreads();                    // all threads have read x[target]
    // 2. the gradient without the target's -dloss, so that no element is tested
    const float scale = dloss / found.sum;        // 1 / sum and dloss in one factor
    const int packs = V / PACK;
    SIMD
    for (int k = threadIdx.x; k < packs; k += blockDim.x) {
        Pack<PACK> xs = load_pack<PACK>(x + k * PACK);
        UNROLL
        for (float& v : xs.x) { v = exp_from<Logit>(v, found.top) * scale; }
        store_pack<PACK>(x + k * PACK, xs);
    }
    for (int v = packs * PACK + threadIdx.x; v < Vp; v += blockDim.x) {
        x[v] = (Logit)(v < V ? exp_from<Logit>((float)x[v], found.top) * scale : 0.0f);
    }
    __syncthreads();
    if (threadIdx.x == 0) {             // the target's, rounded once
        x[target] = (Logit)(exp_from<Logit>(found.target_logit, found.top) * scale - dloss);
    }
}

LAUNCHER void classifier(float* losses, float* hits, floatX* logits, const int* targets, float dloss, size_t N, int V,
                         int Vp, bool backward, Stream stream) {
    launch(classifier_kernel<floatX>, Grid(N, 1024, 0, stream), losses, hits, logits, targets, dloss, V, Vp, backward);
}
LAUNCHER void classifier_float(float* losses, float* hits, float* logits, const int* targets, size_t N, int V, int Vp,
                               Stream stream) {
    launch(classifier_kernel<float>, Grid(N, 1024, 0, stream), losses, hits, logits, targets, 0.0f, V, Vp, false);
}

// One block. Each thread adds its losses in order, and block_sum the threads' sums.
__global__ void loss_sum_kernel(double* sum, const float* losses, size_t N) {
    double s = 0.0;
    for (size_t n = threadIdx.x; n < N; n += blockDim.x) { s += (double)losses[n]; }
    s = block_sum(s);
    if (threadIdx.x == 0) { *sum = s; }
}
LAUNCHER void loss_sum(double* sum, const float* losses, size_t N, Stream stream) {
    launch(loss_sum_kernel, Grid(1, 1024, 0, stream), sum, losses, N);
}
#endif
