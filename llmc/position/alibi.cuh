// position/alibi.cuh -- attention with linear biases (Press et al. 2022): B_ij = -m_h |i-j|.
//
//   alibi:           m_h = 2^(-8(h+1)/NH), nothing learned. When NH is not a power of two: the slopes of the next lower
//                    power p, then every other one of the slopes of 2p. slopes=geometric: 2^(-8(h+1)/NH) for every NH,
//                    as the paper's code.
//   alibi_random:    m_h drawn once from the exponential distribution of this mean, a function of (seed, h); nothing
//                    learned. The paper tried this distribution; its mean is ours, about that of the slopes above.
//   alibi_trained:   B_ij = -r_h m_h |i-j|, m_h alibi's, r_h >= 0 learned by each layer from 1 on; dr_h = -m_h |i-j|
//                    times dlogit, summed along diagonals (toeplitz.cuh). Learned as a factor, steep and flat slopes
//                    change at the same rate.
#pragma once

#include "../base/portable.h"
#include "encoding.cuh"
#include "toeplitz.cuh"

// m_h; in double, which is exact where the exponent is whole
__host__ __device__ inline float alibi_slope(int h, int NH, bool geometric = false) {
    int p = 1;
    while (2 * p <= NH) { p *= 2; }                         // the largest power of two that is not above NH
    if (geometric) { p = NH; }
    return (float)portable_exp2(h < p ? -8.0 * (h + 1) / p : -4.0 * (2 * (h - p) + 1) / p);
}
static __global__ void alibi_slopes_kernel(float* slopes, int NH, bool geometric) {
    for (int h = threadIdx.x; h < NH; h += blockDim.x) { slopes[h] = alibi_slope(h, NH, geometric); }
}

// m_h of alibi_random
__host__ __device__ inline float alibi_random_slope(int h, uint64_t seed, double mean) {
    return (float)(-mean * portable_log(1.0 - uniform01(seed, (uint64_t)h)));
}
static __global__ void alibi_random_kernel(float* slopes, int NH, uint64_t seed, double mean) {
    for (int h = threadIdx.x; h < NH; h += blockDim.x) { slopes[h] = alibi_random_slope(h, seed, mean); }
}

struct LinearBias : BiasFunctor {
    static constexpr FlashBias flash = FlashBias::Linear;
    const float* slopes;    // (NH)
    int NH;

    struct Tile {
        float slope;
        int between;        // i0 - j0
        __device__ float operator()(int r, int c) const { return -slope * fabsf((float)(between + r - c)); }
    };
    __device__ Tile tile(int bh, int i0, int j0) const { return {slopes[bh % NH], i0 - j0}; }
    void fill(FlashBiasArgs& args) const { args.slopes = slopes; }
};

struct Alibi : Encoding {
    using Encoding::Encoding;
    float* slopes = nullptr;

    static Hyperparameters defaults(int) { return {{"slopes", 0, "press|geometric"}}; }
    template <class Tensors> void declare(Tensors& t) {
        t.cached(slopes, "alibi_slopes", Per::Model, (size_t)t.NH, 0);
        declare_key_max(*this, t);
    }
    void prepare_forward(floatX* qkv, int B, int T, int t0, Stream stream) const {
        update_key_max(*this, qkv, B, T, t0, stream);
        if (v.layer > 0 || t0 > 0) { return; }              // the first layer fills it, once for all tokens
        launch(alibi_slopes_kernel, Grid(1, 32, 0, stream), slopes, v.NH, v.config->value("slopes") == 1);
    }
    LinearBias bias() const { return {{}, slopes, v.NH}; }
};

struct AlibiRandom : Alibi {
    using Alibi::Alibi;

    static Hyperparameters defaults(int) { return {{"seed", 42}, {"mean", 0.125}}; }
    template <class Tensors> void declare(Tensors& t) {
        const double seed = t.config->value("seed");
        check(seed == std::floor(seed) && seed < 0x1p53, "--pos alibi_random: expected a whole seed, got %g", seed);
        Alibi::declare(t);
    }
    void prepare_forward(floatX* qkv, int B, int T, int t0, Stream stream) const {
        update_key_max(*this, qkv, B, T, t0, stream);
        if (v.layer > 0 || t0 > 0) { return; }
        launch(alibi_random_kernel, Grid(1, 32, 0, stream), slopes, v.NH, (uint64_t)v.config->value("seed"),
               v.config->value("mean"));
    }
};

// B_ij of head h at distance i - j, and dB * dB_ij/dr
struct AlibiTrainedValue {
    const float *slopes, *r;    // (NH)
    __device__ float operator()(int h, int distance) const { return -(r[h] * slopes[h]) * fabsf((float)distance); }
    __device__ float term(int, int h, int distance, float dB) const {
        return -(dB * slopes[h]) * fabsf((float)distance);
    }
};

struct AlibiTrained : Toeplitz {
    using Toeplitz::Toeplitz;
    float* slopes = nullptr;                                // (NH): alibi's
    Parameter r;                                            // (NH), for each layer

    template <class Tensors> void declare(Tensors& t) {
        const size_t NH = (size_t)t.NH;
        t.cached(slopes, "alibi_slopes", Per::Model, NH, 0);
        t.param(r, "alibi_r", "alibi.r", Per::Layer, NH, 0, {constant(1), false, 0.0f});
        declare_table(t, Per::Layer);
    }
    AlibiTrainedValue value() const { return {slopes, r.value}; }
    void prepare_forward(floatX*, int, int, int t0, Stream stream) const {
        if (v.layer == 0 && t0 == 0) { launch(alibi_slopes_kernel, Grid(1, 32, 0, stream), slopes, v.NH, false); }
        fill_table(value(), t0, stream);
    }
    void prepare_backward(floatX*, const floatX*, int B, int, Stream stream) const {
        sum_diagonals(r.grad, value(), B, stream);
    }
};
