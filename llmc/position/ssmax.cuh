// position/ssmax.cuh -- Scalable-Softmax (SSMax, Nakanishi 2025): logits that grow with the logarithm of the number of
// keys, so that attention stays as sharp in a long text as in a short one.
//
//   f_i = s_h log(n_i)     n_i: how many keys query i sees     softmax of f_i z_ij: n_i^(s_h z_ij) / sum
//   z is the whole argument of the softmax, another encoding's bias included: here q'_i = f_i q_i, and attention
//   multiplies B_ij by f_i. cope computes B and its gates from q'.
//   backward: dq_i = f_i dq'_i     ds_h += sum_i (dq'_i.q'_i + sum_j B_ij dB_ij) / s_h
//
// s (NH), one for each layer, starts where s log n is 1 on average over the trained length. An update keeps it at 0.001
// or more, because the backward divides by it: only q' is kept. A causal query sees its own key and the keys before it,
// a bidirectional query all keys of its sequence, within document and window.
#pragma once

#include "encoding.cuh"

// How many keys each query sees
struct SSMaxKeys {
    AttentionMask mask;
    const int* kv_len;
    int stride;
    bool causal;

    // how many of the first `tokens` keys (causal: i + 1) query i sees, its own included. mask: of its sequence
    __device__ static int count(const AttentionMask& mask, int i, int tokens) {
        const int begin = mask.begin(i);
        tokens -= begin;
        if (mask.window == 0) { return tokens; }
        const int first = imax(i - begin - mask.window + 1, 0);
        const int end = imin(i - begin + mask.window, tokens);
        return end - first + imin(mask.sinks, first) + imax(imin(mask.sinks, tokens) - end, 0);
    }
    // log n of query t of sequence b, which has T tokens; 0 for padding
    __device__ float log_count(size_t b, int t, int T) const {
        const int tokens = kv_len == nullptr ? T : kv_len[b];
        if (t >= tokens) { return 0.0f; }
        return (float)portable_log((double)count(mask.of(b, stride), t, causal ? t + 1 : tokens));
    }
};

// log_n (HEAD_TOKENS), in shared memory, for the tokens that the block walks over
__device__ inline void ssmax_log_counts(float* log_n, const SSMaxKeys& keys, const HeadWalk& walk, int t0, int T) {
    for (int i = threadIdx.x; i < walk.tokens; i += blockDim.x) {
        log_n[i] = keys.log_count(walk.b, t0 + walk.t + i, T);
    }
    __syncthreads();
}

template <int P>
static __global__ void ssmax_forward_kernel(floatX* qkv, float* factors, const float* s, SSMaxKeys keys, int T, int t0,
                                            int NH, int HS, int OC) {
    float* log_n = dynamic_shared();
    const HeadWalk walk(T, HS / P);
    ssmax_log_counts(log_n, keys, walk, t0, t0 + T);
    for (int r = walk.first; r < walk.tokens * NH; r += walk.step) {
        const int i = r / NH;
        const int h = r % NH;
        floatX* q = qkv + (walk.b * keys.stride + t0 + walk.t + i) * OC + (size_t)h * HS;
        const float factor = s[h] * log_n[i];
        if (walk.lane == 0) { factors[(walk.b * NH + h) * keys.stride + t0 + walk.t + i] = factor; }
        for (int d = walk.lane * P; d < HS; d += walk.lanes * P) {
            Pack<P> x = load_pack<P>(q + d);
            UNROLL
            for (int e = 0; e < P; e++) { x.x[e] = factor * x.x[e]; }
            store_pack<P>(q + d, x);
        }
    }
}

// dots (NH,N): dq'.q' of each head and token. Each thread sums its channels, then the threads are summed.
template <int P>
static __global__ void ssmax_backward_kernel(floatX* dqkv, float* dots, const floatX* qkv, const float* s,
                                             SSMaxKeys keys, size_t N, int T, int NH, int HS, int OC) {
    float* log_n = dynamic_shared();
    float* parts = log_n + HEAD_TOKENS;                     // (tokens,NH,lanes)
    const HeadWalk walk(T, HS / P);
    ssmax_log_counts(log_n, keys, walk, 0, T);
    const size_t row0 = walk.b * T + walk.t;
    for (int r = walk.first; r < walk.tokens * NH; r += walk.step) {
        const int i = r / NH;
        const int h = r % NH;
        const floatX* q = qkv + (row0 + i) * OC + (size_t)h * HS;
        floatX* dq = dqkv + (row0 + i) * OC + (size_t)h * HS;
        const bool counts = log_n[i] > 0.0f;                // false: one key, or padding; q does not matter
        const float factor = s[h] * log_n[i];
        float dot = 0.0f;
        for (int d = walk.lane * P; d < HS; d += walk.lanes * P) {
            const Pack<P> x = load_pack<P>(q + d);
            Pack<P> dx = load_pack<P>(dq + d);
            UNROLL
            for (int e = 0; e < P; e++) {
                dot += counts ? dx.x[e] * x.x[e] : 0.0f;
                dx.x[e] = counts ? factor * dx.x[e] : 0.0f;
            }
            store_pack<P>(dq + d, dx);
        }
        parts[r * walk.lanes + walk.lane] = dot;
    }
    sum_lanes(parts, walk, NH, [&](int i, int h, float dot) { dots[h * N + row0 + i] = dot; });
}

// One block per head; no other block adds to ds_h. dots (NH,N); moments (B,NH,T), null without a bias
static __global__ void ssmax_gradient_kernel(float* ds, const float* dots, const float* moments, const float* s,
                                             size_t N, int T) {
    const size_t h = blockIdx.x;
    double sum = 0.0;
    for (size_t row = threadIdx.x; row < N; row += blockDim.x) {
        sum += (double)dots[h * N + row];
        if (moments != nullptr) { sum += (double)moments[(row / T * gridDim.x + h) * T + row % T]; }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { ds[h] += (float)(sum / (double)s[h]); }
}

struct SSMax : Encoding {
    using Encoding::Encoding;
    static constexpr int hooks = SCALES_Q;
    Parameter s;                                            // (NH)
    float* dots = nullptr;                                  // (NH,B T): dq'.q' of each query
    float *factors = nullptr, *moments = nullptr;           // (B,NH,T): PositionView's factor and moment

    // where s starts: 1 / mean of log n
    static float start_of(int T_train, bool causal) {
        const double t = std::max(T_train, 2), log_t = portable_log(t);
        if (!causal) { return (float)(1.0 / log_t); }
        // log T! by Stirling's series; below 16, where the series is off by more than 1e-9, as a product
        const double series = 1.0 / (12 * t) - 1.0 / (360 * t * t * t);
        double sum = (t + 0.5) * log_t - t + 0.91893853320467274 + series;
        double product = 1.0;
        for (int n = 2; n <= t && t < 16; n++) { product *= n; }
        if (t < 16) { sum = portable_log(product); }
        return (float)(t / sum);
    }
    template <class Tensors> void declare(Tensors& t) {
        const float start = start_of(t.run->T_train, t.causal);
        t.param(s, "ssmax", "ssmax.s", Per::Layer, (size_t)t.NH, 0, {constant(start), false, 1e-3f});
        t.scratch(dots, "ssmax_dots", (size_t)t.NH, (size_t)t.B * t.stride);
        t.cached(factors, "ssmax_factor", Per::Layer, (size_t)t.B * t.NH, (size_t)t.stride);
        t.scratch(moments, "ssmax_moment", (size_t)t.B * t.NH, (size_t)t.stride);
    }
    SSMaxKeys keys() const { return {v.mask, v.kv_len, v.stride, v.causal}; }
    void prepare_forward(floatX* qkv, int B, int T, int t0, Stream stream) const {
        with_pack((size_t)v.HS, [&](auto P) {
            launch(ssmax_forward_kernel<P>, head_grid(B, T, HEAD_TOKENS, stream), qkv, factors, s.value, keys(), T,
                   t0, v.NH, v.HS, v.OC);
        });
    }
    void prepare_backward(floatX* dqkv, const floatX* qkv, int B, int T, Stream stream) const {
        const size_t N = (size_t)B * T, parts = (size_t)HEAD_TOKENS * v.NH * HEAD_LANES;
        with_pack((size_t)v.HS, [&](auto P) {
            launch(ssmax_backward_kernel<P>, head_grid(B, T, HEAD_TOKENS + parts, stream), dqkv, dots, qkv, s.value,
                   keys(), N, T, v.NH, v.HS, v.OC);
        });
        launch(ssmax_gradient_kernel, Grid((size_t)v.NH, 1024, 0, stream), s.grad, dots, v.moment, s.value, N, T);
    }
};
