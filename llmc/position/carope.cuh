// position/carope.cuh -- CARoPE (Veisi et al. 2025) of each layer's normalised input x; its paper says token embedding.
// Rope whose base frequency each token and head chooses. No program of the authors is known; c is this project's.
//
//   z_t = x_t . w + c     f_t = 1 / (1 + softplus(z_t))     S_ti = sum_{k<=t} f_k^i     w (NH,C): as in cable.cuh
//   The pair (2i, 2i+1) of q and k is turned by S_ti, i = 0 .. HS/2-1, so that logits depend on S_ti - S_ui. The paper
//   starts training from rope: w at 0, and c where f = 10000^(-2/HS), rope's frequency of pair 1.
//   backward: dS_ti = q_2i dq_2i+1 - q_2i+1 dq_2i + the same of k, of the turned q and dq
//     d(f_t^i) = sum_{k>=t} dS_ki     df = sum_i i f^(i-1) d(f^i)     dz = -df f^2 sigmoid(z)
//
// S is summed in float64, from an origin at each multiple of 128 tokens that is kept; what lies in between is summed
// again where it is needed. saves S_origin (B,NH,HS/2,ceil(T/128)) float64.
#pragma once

#include "rope.cuh"

__device__ inline float carope_f(float z) { return fast_reciprocal(1.0f + softplus(z)); }
// x^n
__device__ inline double whole_power(double x, int n) {
    double y = 1.0;
    for (; n > 0; n /= 2) {
        if (n % 2 == 1) { y *= x; }
        x *= x;
    }
    return y;
}

// One block per (batch, head, pair i): the pair of q and k of the tokens t0 .. t0+T-1 is turned, after the sum at t0 -
// 1. Back: x has the gradients, which are turned back, and qkv has q and k as the forward left them; dS (B,NH,HS/2,T)
// gets d(f_t^i).
template <bool Back>
static __global__ void carope_kernel(floatX* x, float* dS, double* S_origin, const floatX* qkv, const int* kv_len,
                                     QkvShape shape, int T, int t0) {
    const auto [stride, NH, HS, OC] = shape;
    const int i = blockIdx.x % (HS / 2);
    const size_t bh = blockIdx.x / (HS / 2);
    const size_t row = bh / NH * stride * OC;                                   // of the sequence's first token
    const size_t q = row + bh % NH * HS + 2 * i;
    const size_t z = row + 3 * NH * HS + bh % NH;
    const int counted = kv_len == nullptr ? T : kv_len[bh / NH];                // padding has no gradient
    S_origin += blockIdx.x * (size_t)ceil_div(stride, CABLE_CHUNK);
    dS += Back ? blockIdx.x * (size_t)T : 0;
    // as in cable_forward_kernel: from the first token of the chunk of token t0 - 1, for the same bits
    int start = imax(t0 - 1, 0) / CABLE_CHUNK * CABLE_CHUNK;
    double origin = start == 0 ? 0.0 : S_origin[start / CABLE_CHUNK];
    __syncthreads();
    for (; start < t0 + T; start += CABLE_CHUNK) {
        if (threadIdx.x == 0) { S_origin[start / CABLE_CHUNK] = origin; }
        const auto power = [&](int t) {
            return whole_power((double)carope_f((float)qkv[z + (size_t)t * shape.OC]), i);
        };
        origin += running_sums(start, imin(start + CABLE_CHUNK, t0 + T), power, [&](int t, double offset) {
            if (t < t0) { return; }                         // turned already
            const double S = origin + offset;
            Pack<2> angle;
            angle.x[0] = (float)portable_cos(S);
            angle.x[1] = (float)portable_sin(S);
            float slope = 0.0f;                             // of the loss in the angle
            for (size_t at = q + (size_t)t * shape.OC, k = at + shape.C(); at <= k; at += shape.C()) {  // q, then k
                const Pack<2> v = load_pack<2>(x + at);
                if (Back) {
                    const Pack<2> y = load_pack<2>(qkv + at);
                    slope += y.x[0] * v.x[1] - y.x[1] * v.x[0];
                }
                store_pack<2>(x + at, turned_pairs(v, angle, Back ? -1.0f : 1.0f));
            }
            if (Back) { dS[t] = t < counted ? slope : 0.0f; }
        });
    }
    if (Back) { suffix_sums(dS, T); }
}

// One block per (batch, head): dz, in the column of dqkv that z has in qkv, from d(f_t^i)
static __global__ void carope_backward_kernel(floatX* dqkv, const float* dS, const floatX* qkv, int T, int NH, int HS,
                                              int OC) {
    const size_t bh = blockIdx.x;
    const size_t z = bh / NH * T * OC + 3 * NH * HS + bh % NH;
    for (int t = threadIdx.x; t < T; t += blockDim.x) {
        const float zt = (float)qkv[z + (size_t)t * OC];
        const float f = carope_f(zt);
        float df = 0.0f;
        float power = 1.0f;                                 // f^(i-1)
        for (int i = 1; i < HS / 2; i++) {
            df += (float)i * power * dS[(bh * (HS / 2) + i) * T + t];
            power *= f;
        }
        dqkv[z + (size_t)t * OC] = (floatX)(-df * f * f * sigmoid(zt));
    }
}

struct Carope : Encoding {
    using Encoding::Encoding;
    static constexpr int hooks = TURNS_QK;
    double* S_origin = nullptr;                             // (B,NH,HS/2,ceil(T/128))
    float* dS = nullptr;                                    // (B,NH,HS/2,T)

    template <class Tensors> void declare(Tensors& t) {
        const int HS = t.HS;
        check(HS % 2 == 0, "--pos carope turns pairs, so the head size must be even, but %d channels / %d heads = %d; "
              "choose another --model", t.C(), t.NH, HS);
        check(!t.run->has("ssmax"), "--pos %s: expected no ssmax with carope, whose backward reads q's gradient "
              "before ssmax scales it", t.run->name.c_str());
        const double y = portable_pow(10000.0, 2.0 / HS) - 1.0;                 // softplus(c)
        const float c = (float)(y + portable_log1p(-portable_exp(-y)));
        t.columns("clock", t.NH, constant(c), constant(0.0f));
        const size_t rows = (size_t)t.B * t.NH * HS / 2, T = (size_t)t.stride;
        t.cached(S_origin, "S_origin", Per::Layer, rows, ceil_div(T, (size_t)CABLE_CHUNK));
        t.scratch(dS, "dS", rows, T);
    }
    void prepare_forward(floatX* qkv, int B, int T, int t0, Stream stream) const {
        turn<false>(qkv, qkv, B, T, t0, v.stride, stream);
    }
    void prepare_backward(floatX* dqkv, const floatX* qkv, int B, int T, Stream stream) const {
        turn<true>(dqkv, qkv, B, T, 0, T, stream);
        launch(carope_backward_kernel, Grid((size_t)B * v.NH, 256, 0, stream), dqkv, dS, qkv, T, v.NH, v.HS, v.OC);
    }
    template <bool Back>
    void turn(floatX* x, const floatX* qkv, int B, int T, int t0, int stride, Stream stream) const {
        const Grid grid((size_t)B * v.NH * v.HS / 2, 128, 0, stream);
        launch(carope_kernel<Back>, grid, x, dS, S_origin, qkv, v.kv_len, v.qkv_shape(stride), T, t0);
    }
};
