// position/kerple.cuh -- kernelized relative positions (Chi et al. 2022): two positive scalars a head and layer.
//
//   kerple:        B_ij = -r1 log(1 + r2 |i-j|)     dr1 = -log(1 + r2 d)   dr2 = -r1 d / (1 + r2 d)      d = |i-j|
//   kerple_power:  B_ij = -r1 |i-j|^r2              dr1 = -d^r2            dr2 = -r1 d^r2 log d          0 < r2 <= 2
//   backward: each diagonal's sum of da times these. The update projects r1, r2 to >= 0.01 (power: r2 <= 2).
#ifndef LLMC_POSITION_KERPLE_CUH
#define LLMC_POSITION_KERPLE_CUH

#include "toeplitz.cuh"

// log(d) and d^p for a whole number d, taken as 1 and 0 at d = 0, where every caller multiplies log by d^p
__host__ __device__ inline float log_distance(float d) { return fast_log1p(d > 1.0f ? d - 1.0f : 0.0f); }
__host__ __device__ inline float power_distance(float d, float p) {
    const float e = fast_exp(p * log_distance(d));
    return d > 0.0f ? e : 0.0f;
}

// One block a head.
template <bool Power>
static __global__ void kerple_forward_kernel(float* table, const float* r1, const float* r2, int T, int ND) {
    const float a = r1[blockIdx.x], p = r2[blockIdx.x];
    table += (size_t)blockIdx.x * ND;
    for (int n = threadIdx.x; n < ND; n += blockDim.x) {
        const float d = fabsf((float)(T - 1 - n));
        table[n] = -a * (Power ? power_distance(d, p) : fast_log1p(p * d));
    }
}

// One block a head. In double, because the diagonals' sums cancel: those of a row are 0 in all.
template <bool Power>
static __global__ void kerple_backward_kernel(float* dr1, float* dr2, const float* dtable, const float* r1,
                                              const float* r2, int B, int T, int NH, int ND) {
    const int h = blockIdx.x;
    const float a = r1[h], p = r2[h];
    double sum1 = 0.0, sum2 = 0.0;
    for (int n = threadIdx.x; n < ND - TOEPLITZ_PAD; n += blockDim.x) {
        float da = 0.0f;
        for (int b = 0; b < B; b++) { da += dtable[((size_t)b * NH + h) * ND + n]; }
        const float d = fabsf((float)(T - 1 - n));
        const float k = Power ? power_distance(d, p) : fast_log1p(p * d);
        sum1 -= (double)(da * k);
        sum2 -= (double)(da * a * (Power ? k * log_distance(d) : d / (1.0f + p * d)));
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

    static void specs(const PositionDims& d, const PositionConfig&, PositionTables& t) {
        const size_t NH = (size_t)d.NH;
        t.params.push_back({"kerple_r1", d.L, NH, 0, uniform(0, 2), false, 0.01f});
        t.params.push_back({"kerple_r2", d.L, NH, 0, uniform(0, Power ? 2 : 1), false, 0.01f, Power ? 2.0f : FLT_MAX});
        for (int l = 0; l < d.L; l++) {
            t.files.push_back({d.layer_name(l, "kerple.r1"), "kerple_r1", l, 0, NH, false});
            t.files.push_back({d.layer_name(l, "kerple.r2"), "kerple_r2", l, 0, NH, false});
        }
        table_specs(d, d.L, t);
    }
    void prepare_forward(floatX*, int, int, int t0, Stream stream) const {
        if (t0 > 0) { return; }                             // filled for all tokens there can be at t0 = 0
        launch(kerple_forward_kernel<Power>, Grid((size_t)v.NH, 128, 0, stream), v.act("bias_table"),
               v.param("kerple_r1"), v.param("kerple_r2"), v.T, columns());
    }
    void prepare_backward(floatX*, const floatX*, int B, int, Stream stream) const {
        launch(kerple_backward_kernel<Power>, Grid((size_t)v.NH, 128, 0, stream), v.grad("kerple_r1"),
               v.grad("kerple_r2"), v.act("dbias_table"), v.param("kerple_r1"), v.param("kerple_r2"), B, v.T, v.NH,
               columns());
    }
};

using Kerple = KerpleOf<false>;
using KerplePower = KerpleOf<true>;

#endif
