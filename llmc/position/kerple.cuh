// position/kerple.cuh -- kernelized relative positions (Chi et al. 2022): two positive scalars for each head and layer.
//
//   kerple:        B_ij = -r1 log(1 + r2 |i-j|)     dr1 = -log(1 + r2 d)   dr2 = -r1 d / (1 + r2 d)      d = |i-j|
//   kerple_power:  B_ij = -r1 |i-j|^r2              dr1 = -d^r2            dr2 = -r1 d^r2 log d          0 < r2 <= 2
//   backward: the sum of dlogit along each diagonal times these. The update keeps r1, r2 >= 0.01 (power: r2 <= 2).
#ifndef LLMC_POSITION_KERPLE_CUH
#define LLMC_POSITION_KERPLE_CUH

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

// One block per head. In double, because the sums of the diagonals cancel: those of a row are 0 in all.
template <bool Power>
static __global__ void kerple_backward_kernel(float* dr1, float* dr2, const float* dtable, const float* r1, const float* r2, int B,
                                              int T, int NH, int columns) {
    const int h = blockIdx.x;
    const float a = r1[h];
    const float p = r2[h];
    double sum1 = 0.0;
    double sum2 = 0.0;
    for (int n = threadIdx.x; n < columns - TOEPLITZ_PAD; n += blockDim.x) {
        float dB = 0.0f;
        for (int b = 0; b < B; b++) { dB += dtable[((size_t)b * NH + h) * columns + n]; }
        const float d = fabsf((float)(T - 1 - n));
        const float k = Power ? power_distance(d, p) : fast_log1p(p * d);
        sum1 -= (double)(dB * k);
        sum2 -= (double)(dB * a * (Power ? k * log_distance(d) : d / (1.0f + p * d)));
    }
    sum1 = block_sum(sum1);
    sum2 = block_sum(sum2);
    if (threadIdx.x == 0) {
        dr1[h] += (float)sum1;
        dr2[h] += (float)sum2;
    }
}

template <bool Power> struct KerpleOf : Toeplitz {
    using Toeplitz::Toeplitz;
    Parameter r1, r2;

    template <class Tensors> void declare(Tensors& t) {
        const size_t NH = (size_t)t.dims.NH;
        t.param(r1, "kerple_r1", "kerple.r1", Per::Layer, NH, 0, {uniform(0, 2), false, 0.01f});
        t.param(r2, "kerple_r2", "kerple.r2", Per::Layer, NH, 0, {uniform(0, Power ? 2 : 1), false, 0.01f, Power ? 2.0f : FLT_MAX});
        declare_table(t, Per::Layer);
    }
    void prepare_forward(floatX*, int, int, int t0, Stream stream) const {
        fill_table(KerpleValue<Power>{r1.value, r2.value}, t0, stream);
    }
    void prepare_backward(floatX*, const floatX*, int B, int, Stream stream) const {
        launch(kerple_backward_kernel<Power>, Grid((size_t)v.NH, 128, 0, stream), r1.grad, r2.grad, dtable, r1.value, r2.value, B, v.T,
               v.NH, columns());
    }
};

using Kerple = KerpleOf<false>;
using KerplePower = KerpleOf<true>;

#endif
