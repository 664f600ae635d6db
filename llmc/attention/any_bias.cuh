// attention/any_bias.cuh -- what attention does with an encoding's bias, tile by tile.
//
// On a GPU the kernels are compiled for each functor of position/. On a CPU they are compiled once, for AnyBias, which
// calls these functions through pointers, once per tile: the inner loops are still the functor's. So an edit of
// attention compiles no encoding, and an edit of an encoding compiles no attention.
#pragma once

#include <functional>

#include "../position/table.h"
#include "visits.cuh"

constexpr int DECODE_TILE = 128;                            // as wide as a bias functor's tile may be

#if !defined(KERNELS_ELSEWHERE)
// scores (keys, queries) += f B; factor: f of the tile's queries, or null. Each thread handles some of the queries.
// position/cope.cuh overloads it, because CoPE's B depends on other scores.
template <class Bias>
__device__ inline void add_bias(const Bias& bias, const Matrix<float>& scores, int bh, const PairRange& t,
                                const float* factor) {
    const auto B = bias.tile(bh, t.i0, t.j0);
    for (int c = 0; c < t.nj; c++) {
        float* row = scores.row(c);
        if (factor != nullptr) {
            SIMD
            for (int r = threadIdx.x; r < t.ni; r += blockDim.x) { row[r] += factor[r] * B(r, c); }
            continue;
        }
        SIMD
        for (int r = threadIdx.x; r < t.ni; r += blockDim.x) { row[r] += B(r, c); }
    }
}

// scores (nj), of query i and the keys from j0 on, += factor B. Each thread has every blockDim.x-th key. room: for nj
// floats, in shared memory. position/cope.cuh overloads it.
template <class Bias>
__device__ inline void add_row_bias(const Bias& bias, float* scores, float* /*room*/, int bh, int i, int j0, int nj,
                                    float factor) {
    for (int c0 = 0; c0 < nj; c0 += DECODE_TILE) {
        const auto tile = bias.tile(bh, i, j0 + c0);
        const int end = imin(DECODE_TILE, nj - c0);
        SIMD
        for (int c = threadIdx.x; c < end; c += blockDim.x) { scores[c0 + c] += factor * tile(0, c); }
    }
}

// P (queries, keys) holds scores and becomes e^(logit - lse); dlogit holds dP and becomes P (dP - row_dot). lse,
// row_dot and factor (or null) belong to the tile's queries. position/cope.cuh overloads it.
template <class Bias>
__device__ inline void take_gradient(const Bias& bias, const Matrix<float>& P, const Matrix<float>& dlogit, int bh,
                                     const PairRange& t, const float* lse, const float* row_dot, const float* factor) {
    const auto B = bias.tile(bh, t.i0, t.j0);
    for (int r = 0; r < t.ni; r++) {
        float* p = P.row(r);
        float* d = dlogit.row(r);
        const float lse_i = lse[r];
        const float row_dot_i = row_dot[r];
        const float factor_i = factor == nullptr ? 1.0f : factor[r];
        SIMD
        for (int c = threadIdx.x; c < t.nj; c += blockDim.x) {
            p[c] = fast_exp(p[c] + factor_i * B(r, c) - lse_i);
            d[c] = p[c] * (d[c] - row_dot_i);
        }
    }
}

// dlogit (queries, keys) becomes the gradient of B, and the moments grow. Each thread handles some of the queries.
template <class Bias>
__device__ inline void apply_factor(const Bias& bias, const Matrix<float>& dlogit, int bh, const PairRange& t,
                                    const AttentionDims& dims) {
    const auto B = bias.tile(bh, t.i0, t.j0);
    const float* factor = dims.factors(bh, t.i0);
    float* moment = dims.moment + (size_t)bh * dims.stride + t.i0;
    for (int r = threadIdx.x; r < t.ni; r += blockDim.x) {
        float* d = dlogit.row(r);
        const auto sum = sums_over<1>(0, t.nj, 1, [&](float* s, int c) {
            d[c] *= factor[r];
            s[0] += d[c] * B(r, c);
        });
        moment[r] += sum.x[0];
    }
    __syncthreads();
}
#endif

// ----------------------------------------------------------------------------------------------------------
// with_bias: calls f(bias) with the bias of a layer's encoding

#if defined(CUDA_BUILD)
template <class F> void with_bias(const PositionView& view, F f) {
    with_position(view, [&](const auto& encoding) { f(encoding.bias()); });
}
#else
struct AnyBias : BiasFunctor {
    const void* functor;
    // the functions above for this functor, its backward, and B_ij
    void (*add)(const void*, const Matrix<float>&, int, const PairRange&, const float*);
    void (*add_row)(const void*, float*, float*, int, int, int, int, float);
    void (*take)(const void*, const Matrix<float>&, const Matrix<float>&, int, const PairRange&, const float*,
                 const float*, const float*);
    void (*apply)(const void*, const Matrix<float>&, int, const PairRange&, const AttentionDims&);
    void (*sum)(const void*, int, int, int, int, int, float*, int);
    float (*at)(const void*, int bh, int i, int j);

    struct Tile {
        const AnyBias& bias;
        int bh, i0, j0;
        float operator()(int r, int c) const { return bias.at(bias.functor, bh, i0 + r, j0 + c); }
    };
    Tile tile(int bh, int i0, int j0) const { return {*this, bh, i0, j0}; }
    void backward(int bh, int i0, int ni, int j0, int nj, float* dlogit, int ld) const {
        sum(functor, bh, i0, ni, j0, nj, dlogit, ld);
    }
};
void with_bias(const PositionView& view, const std::function<void(const AnyBias&)>& f);

inline void add_bias(const AnyBias& bias, const Matrix<float>& scores, int bh, const PairRange& t,
                     const float* factor) {
    bias.add(bias.functor, scores, bh, t, factor);
}
inline void add_row_bias(const AnyBias& bias, float* scores, float* room, int bh, int i, int j0, int nj, float factor) {
    bias.add_row(bias.functor, scores, room, bh, i, j0, nj, factor);
}
inline void take_gradient(const AnyBias& bias, const Matrix<float>& P, const Matrix<float>& dlogit, int bh,
                          const PairRange& t, const float* lse, const float* row_dot, const float* factor) {
    bias.take(bias.functor, P, dlogit, bh, t, lse, row_dot, factor);
}
inline void apply_factor(const AnyBias& bias, const Matrix<float>& dlogit, int bh, const PairRange& t,
                         const AttentionDims& dims) {
    bias.apply(bias.functor, dlogit, bh, t, dims);
}

#if !defined(KERNELS_ELSEWHERE)
template <class Bias> AnyBias any_bias(const Bias& bias) {
    return {{}, &bias, [](const void* of, auto... a) { add_bias(*(const Bias*)of, a...); },
            [](const void* of, auto... a) { add_row_bias(*(const Bias*)of, a...); },
            [](const void* of, auto... a) { take_gradient(*(const Bias*)of, a...); },
            [](const void* of, auto... a) { apply_factor(*(const Bias*)of, a...); },
            [](const void* of, auto... a) { ((const Bias*)of)->backward(a...); },
            [](const void* of, int bh, int i, int j) { return ((const Bias*)of)->tile(bh, i, j)(0, 0); }};
}
LAUNCHER void with_bias(const PositionView& view, const std::function<void(const AnyBias&)>& f) {
    with_position(view, [&](const auto& encoding) {
        const auto bias = encoding.bias();
        f(any_bias(bias));
    });
}
#endif
#endif

// ----------------------------------------------------------------------------------------------------------
// a bias as numbers, for tests and dumps

// (rows,n): B_ij of (batch, head) bh, queries i0 .. i0+rows-1 and n keys; causal: 0 where j > i
std::vector<float> bias_rows(const PositionView& view, int bh, int i0, int rows, int n, Stream stream);

#if !defined(KERNELS_ELSEWHERE)
// One block per row.
template <class Bias>
__global__ void attention_bias_kernel(float* out, Bias bias, int bh, int i0, int n, bool causal) {
    const int i = i0 + (int)blockIdx.x;
    float* row = out + (size_t)blockIdx.x * n;
    for (int j0 = 0; j0 < n; j0 += ATTENTION_TILE) {
        const auto tile = bias.tile(bh, i, j0);
        for (int c = threadIdx.x; c < ATTENTION_TILE && j0 + c < n; c += blockDim.x) {
            row[j0 + c] = !causal || j0 + c <= i ? tile(0, c) : 0.0f;
        }
    }
}

LAUNCHER std::vector<float> bias_rows(const PositionView& view, int bh, int i0, int rows, int n, Stream stream) {
    std::vector<float> host((size_t)rows * n);
    with_bias(view, [&](auto bias) {
        float* out = (float*)device_malloc(sizeof(float) * host.size());
        launch(attention_bias_kernel<decltype(bias)>, Grid((size_t)rows, 128, 0, stream), out, bias, bh, i0, n,
               view.causal);
        copy_to_host(host.data(), out, sizeof(float) * host.size(), stream);
        device_free(out);
    });
    return host;
}
#endif
