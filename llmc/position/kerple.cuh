// position/kerple.cuh -- kernelized relative positions (Chi et al. 2022): two positive scalars for each head and layer.
//
//   kerple:        B_ij = -r1 log(1 + r2 |i-j|)     dr1 = -log(1 + r2 d)   dr2 = -r1 d / (1 + r2 d)      d = |i-j|
//   kerple_power:  B_ij = -r1 |i-j|^r2              dr1 = -d^r2            dr2 = -r1 d^r2 log d          0 < r2 <= 2
//   backward: the sum of dlogit along each diagonal times these. The update keeps r1, r2 >= 0.01 (power: r2 <= 2).
#pragma once

#include "toeplitz.cuh"

// log(d) and d^p for a whole number d, taken as 1 and 0 at d = 0, where every caller multiplies log by d^p
__host__ __device__ inline float log_distance(float d) { return fast_log1p(d > 1.0f ? d - 1.0f : 0.0f); }
__host__ __device__ inline float power_distance(float d, float p) {
    const float e = fast_exp(p * log_distance(d));
    return d > 0.0f ? e : 0.0f;
}

// B_ij of head h at distance i - j
template <bool Power> struct KerpleValue {
    const float *r1, *r2;       // (NH)
    __device__ float operator()(int h, int distance) const {
        const float d = fabsf((float)distance);
        return -r1[h] * (Power ? power_distance(d, r2[h]) : fast_log1p(r2[h] * d));
    }
};

// dB * dB_ij/dr1 and dB * dB_ij/dr2, for sum_diagonals
template <bool Power> struct KerpleTerm1 {
    const float* r2;
    __device__ float operator()(int h, int distance, float dB) const {
        const float d = fabsf((float)distance);
        return -(dB * (Power ? power_distance(d, r2[h]) : fast_log1p(r2[h] * d)));
    }
};
template <bool Power> struct KerpleTerm2 {
    const float *r1, *r2;
    __device__ float operator()(int h, int distance, float dB) const {
        const float d = fabsf((float)distance);
        return -(dB * r1[h] * (Power ? power_distance(d, r2[h]) * log_distance(d) : d / (1.0f + r2[h] * d)));
    }
};

template <bool Power> struct KerpleOf : Toeplitz {
    using Toeplitz::Toeplitz;
    Parameter r1, r2;                                       // (NH), one pair for each layer

    template <class Tensors> void declare(Tensors& t) {
        const size_t NH = (size_t)t.NH;
        t.param(r1, "kerple_r1", "kerple.r1", Per::Layer, NH, 0, {uniform(0, 2), false, 0.01f});
        const float hi = Power ? 2.0f : FLT_MAX;
        t.param(r2, "kerple_r2", "kerple.r2", Per::Layer, NH, 0, {uniform(0, Power ? 2 : 1), false, 0.01f, hi});
        declare_table(t, Per::Layer);
    }
    void prepare_forward(floatX*, int, int, Start start, Stream stream) const {
        fill_table(KerpleValue<Power>{r1.value, r2.value}, start, stream);
    }
    void prepare_backward(floatX*, const floatX*, int B, int, Stream stream) const {
        sum_diagonals(r1.grad, KerpleTerm1<Power>{r2.value}, B, stream);
        sum_diagonals(r2.grad, KerpleTerm2<Power>{r1.value, r2.value}, B, stream);
    }
};

using Kerple = KerpleOf<false>;
using KerplePower = KerpleOf<true>;
