// position/alibi.cuh -- attention with linear biases (Press et al. 2022): B_ij = -m_h |i-j|, nothing learned.
//
//   m_h = 2^(-8(h+1)/NH). NH no power of two: the slopes of the next lower power p, then every other one of 2p's.
#ifndef LLMC_POSITION_ALIBI_CUH
#define LLMC_POSITION_ALIBI_CUH

#include <cmath>

#include "none.cuh"

// m_h; in double, which is exact where the exponent is whole
__host__ __device__ inline float alibi_slope(int h, int NH) {
    int p = 1;
    while (2 * p <= NH) { p *= 2; }
    return (float)exp2(h < p ? -8.0 * (h + 1) / p : -4.0 * (2 * (h - p) + 1) / p);
}
static __global__ void alibi_slopes_kernel(float* slopes, int NH) {
    for (int h = threadIdx.x; h < NH; h += blockDim.x) { slopes[h] = alibi_slope(h, NH); }
}

struct AlibiBias {
    static constexpr bool has_bias = true, has_gradient = false;
    const float* slopes;    // (NH)
    int NH;

    struct Tile {
        float slope;
        int between;        // i0 - j0
        __device__ float operator()(int r, int c) const { return -slope * fabsf((float)(between + r - c)); }
    };
    __device__ Tile tile(int bh, int i0, int j0) const { return {slopes[bh % NH], i0 - j0}; }
    __device__ void backward(int, int, int, int, int, float*, int) const {}
};

struct Alibi : NoPosition {
    using NoPosition::NoPosition;

    static void specs(const PositionDims& d, const PositionConfig& config, PositionTables& t) {
        t.acts.push_back({"alibi_slopes", 0, (size_t)d.NH, 0, constant(0), false, -FLT_MAX, FLT_MAX, Keep::Cached});
        add_key_max(d, config, t);
    }
    void prepare_forward(floatX* qkv, int B, int T, int t0, Stream stream) const {
        update_key_max(qkv, B, T, t0, stream);
        if (v.layer > 0 || t0 > 0) { return; }
        launch(alibi_slopes_kernel, Grid(1, 32, 0, stream), v.act("alibi_slopes"), v.NH);
    }
    AlibiBias bias() const { return {v.act("alibi_slopes"), v.NH}; }
};

#endif
