// gelu.cuh -- x times the probability that a standard normal number is below x, in two forms. Hendrycks, Gimpel 2016
//   Tanh ("gelu_new", GPT-2's): out = x/2 (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3).
//     It is computed as x s with s = sigmoid(2u) = (1 + tanh(u)) / 2, which keeps its relative precision where
//     1 + tanh(u) cancels.     backward: dinp = dout (s + x s (1 - s) 2 du/dx).
//   Erf ("gelu", BERT's): out = x Phi(x), Phi(x) = (1 + erf(x / sqrt(2))) / 2. On a CPU the relative error is
//     below 5 * 2^-23 (measured: 2.6 * 2^-23) down to x = -12.9, where Phi leaves float32's range; below -13.2 out
//     is 0.     backward: dinp = dout (Phi(x) + x phi(x)), phi(x) = e^(-x^2/2) / sqrt(2 pi).
//   Both save only their input. The backward also sums dinp's rows: the gradient of the bias in inp.
#pragma once

#include "base/math.h"
#include "base/matrix.cuh"

enum class Gelu { Tanh, Erf };

// N elements; out may be inp
void gelu_forward(floatX* out, const floatX* inp, size_t N, Gelu form, Stream stream);
// dinp, dout, inp (N,C); dinp may be dout. dbias (C) accumulates. scratch: MAX_SLABS * C floats
void gelu_backward(floatX* dinp, float* dbias, float* scratch, const floatX* dout, const floatX* inp, size_t N, int C,
                   Gelu form, Stream stream);

#if !defined(LAYERS_ELSEWHERE)
constexpr float GELU_TWO_SQRT_2_PI = 1.5957691216f;     // 2 sqrt(2/pi)
constexpr float GELU_CUBE = 0.044715f;
constexpr float INV_SQRT_2_PI = 0.398942280f;           // 1 / sqrt(2 pi)

struct GeluTanh {
    static __device__ float forward(float x) { return x * sigmoid(GELU_TWO_SQRT_2_PI * (x + GELU_CUBE * x * x * x)); }
    // The sigmoid is computed again: reading it from memory would take longer.
    static __device__ float slope(float x) {
        const float s = sigmoid(GELU_TWO_SQRT_2_PI * (x + GELU_CUBE * x * x * x));
        const float du2 = GELU_TWO_SQRT_2_PI * (1.0f + 3.0f * GELU_CUBE * x * x);       // 2 du/dx
        return s + x * s * (1.0f - s) * du2;
    }
};
struct GeluErf {
    static __device__ float forward(float x) { return x * normal_cdf(x, gaussian(x)); }
    static __device__ float slope(float x) {
        const float gauss = gaussian(x);                    // e^(-x^2/2), which Phi needs as well
        return normal_cdf(x, gauss) + x * (INV_SQRT_2_PI * gauss);
    }
};

// Calls f with the form's functions.
template <class F> void with_gelu(Gelu form, F f) {
    if (form == Gelu::Tanh) { f(GeluTanh()); } else { f(GeluErf()); }
}

// A pack of P elements is a load of 16 bytes on a GPU, a register on a CPU.
template <class Form, int P> __global__ void gelu_forward_kernel(floatX* out, const floatX* inp, size_t N) {
    const GridSpan s = grid_span(N / P);
    SIMD
    for (size_t k = s.begin; k < s.end; k += s.step) {
        Pack<P> x = load_pack<P>(inp + k * P);
        UNROLL
        for (float& v : x.x) { v = Form::forward(v); }
        store_pack<P>(out + k * P, x);
    }
}
LAUNCHER void gelu_forward(floatX* out, const floatX* inp, size_t N, Gelu form, Stream stream) {
    with_gelu(form, [&](auto gelu) {
        with_pack(N, [&](auto P) {
            launch(gelu_forward_kernel<decltype(gelu), P>, Grid::over(N / P, stream), out, inp, N);
        });
    });
}

template <class Form, int P>
__global__ void gelu_backward_kernel(floatX* dinp, float* partial, const floatX* dout, const floatX* inp, size_t N,
                                     int C) {
    slab_sums<P>(partial, N, C, C, [&](size_t i) {
        const Pack<P> in = load_pack<P>(inp + i);
        Pack<P> d = load_pack<P>(dout + i);
        UNROLL
        for (int e = 0; e < P; e++) { d.x[e] *= Form::slope(in.x[e]); }
        return store_pack<P>(dinp + i, d);
    });
}
LAUNCHER void gelu_backward(floatX* dinp, float* dbias, float* scratch, const floatX* dout, const floatX* inp, size_t N,
                            int C, Gelu form, Stream stream) {
    with_gelu(form, [&](auto gelu) {
        with_pack((size_t)C, [&](auto P) {
            launch(gelu_backward_kernel<decltype(gelu), P>, slab_grid(N, C, stream), dinp, scratch, dout, inp, N, C);
        });
    });
    add_slabs(dbias, scratch, slab_count(N), (size_t)C, (size_t)C, stream);
}
#endif
