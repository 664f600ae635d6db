// position/grape.cuh -- additive GRAPE (GRAPE-A, Zhang et al. 2025, arXiv 2512.07805): ALiBi with slopes that queries,
// keys or both choose.
//
//   grape_q: B_ij = -g_i |i-j|     grape_k: B_ij = -w_j |i-j|     grape_qk: B_ij = -(g_i + w_j) |i-j|
//   g_i = m_h softplus(x_i . a_h + c_h)     w_j = m_h softplus(x_j . b_h + e_h)     m_h: ALiBi's slopes
//   backward: the bias functor sums dg and dw; du = dg m_h sigmoid(u) for u = x_i . a_h + c_h, and the same for w
//
// The authors' program (github.com/model-architectures/GRAPE, f5b539f, model/llama-mha-grape-a-*.py) takes the slopes
// from q and k: u is v_h . q_i / sqrt(HS) with a v_h of length 1, and m_h has a learned factor. All its models, ALiBi
// and RoPE too, have an RMSNorm of q and k (use_qk_rmsnorm), with which u is not linear in x_i, and |u| <= 1 while the
// norm's gain is 1. Here no encoding has this RMSNorm, so that models differ only in their bias: a_h, b_h (NH,C) are
// rows of the qkv matmul, as in CABLE, and c_h takes the place of the factor. grape_q is cable with S_t = t and the
// factor m_h, and runs on its kernels.
#pragma once

#include "../cable.cuh"
#include "toeplitz.cuh"

// One block per (batch, head): gate_t = m_h softplus(u_t) of the tokens t0 .. t0+T-1. u: head 0's column in the first
// row of qkv. S_offset, S_origin become S_t = t unless they are null.
static __global__ void grape_forward_kernel(float* gate, float* S_offset, double* S_origin, const floatX* u, int T,
                                            int t0, int stride, int NH, int OC) {
    const size_t bh = blockIdx.x;
    const float slope = alibi_slope((int)(bh % NH), NH);
    u += bh / NH * stride * OC + bh % NH;
    for (int t = t0 + (int)threadIdx.x; t < t0 + T; t += blockDim.x) {
        gate[bh * stride + t] = slope * softplus((float)u[(size_t)t * OC]);
        if (S_offset == nullptr) { continue; }
        S_offset[bh * stride + t] = (float)(t % CABLE_CHUNK);
        if (t % CABLE_CHUNK == 0) { S_origin[bh * ceil_div(stride, CABLE_CHUNK) + t / CABLE_CHUNK] = (double)t; }
    }
}

// One block per (batch, head): du from dgate (B,NH,T). du, u: head 0's column in dqkv, in qkv
static __global__ void grape_backward_kernel(floatX* du, const float* dgate, const floatX* u, int T, int NH, int OC) {
    const size_t bh = blockIdx.x;
    const float slope = alibi_slope((int)(bh % NH), NH);
    for (int t = threadIdx.x; t < T; t += blockDim.x) {
        const size_t at = (bh / NH * T + t) * OC + bh % NH;
        du[at] = (floatX)(dgate[bh * T + t] * slope * sigmoid((float)u[at]));
    }
}

// -(g_i + w_j) |i-j|
struct GrapeBias : BiasFunctor {
    const float *g, *w;         // (B,NH,T)
    float *dg, *dw;             // null in the forward
    int stride;

    struct Tile {
        const float *g, *w;
        int between;            // i0 - j0
        __device__ float distance(int r, int c) const { return fabsf((float)(between + r - c)); }
        __device__ float operator()(int r, int c) const { return -(g[r] + w[c]) * distance(r, c); }
    };
    __device__ Tile tile(int bh, int i0, int j0) const {
        return {g + (size_t)bh * stride + i0, w + (size_t)bh * stride + j0, i0 - j0};
    }
    // dg_i = -sum_j dlogit |i-j|     dw_j = -sum_i dlogit |i-j|
    __device__ void backward(int bh, int i0, int ni, int j0, int nj, float* dlogit, int ld) const {
        const Tile t = tile(bh, i0, j0);
        // 1. one thread per query; dlogit becomes dlogit |i-j|
        for (int r = threadIdx.x; r < ni; r += blockDim.x) {
            float* d = dlogit + r * ld;
            dg[(size_t)bh * stride + i0 + r] -= sums_over<1>(0, nj, 1, [&](float* s, int c) {
                d[c] *= t.distance(r, c);
                s[0] += d[c];
            }).x[0];
        }
        __syncthreads();
        // 2. one thread per key, over the queries in order
        for (int r = 1; r < ni; r++) {
            SIMD
            for (int c = threadIdx.x; c < nj; c += blockDim.x) { dlogit[c] += dlogit[r * ld + c]; }
        }
        for (int c = threadIdx.x; c < nj; c += blockDim.x) { dw[(size_t)bh * stride + j0 + c] -= dlogit[c]; }
        __syncthreads();
    }
};

struct GrapeQ : CableFull {
    using CableFull::CableFull;
    static constexpr bool has_relu = false;
    static Hyperparameters defaults(int) { return {}; }

    template <class Tensors> void declare(Tensors& t) {
        t.columns("grape.q", t.NH);                                         // a_h, c_h
        declare_sums(t);
    }
    void prepare_forward(floatX* qkv, int B, int T, int t0, Stream stream) const {
        launch(grape_forward_kernel, Grid((size_t)B * v.NH, 128, 0, stream), g, S_offset, S_origin, qkv + 3 * v.C(), T,
               t0, v.stride, v.NH, v.OC);
        update_key_max(*this, qkv, B, T, t0, stream);
    }
    void prepare_backward(floatX* dqkv, const floatX* qkv, int B, int T, Stream stream) const {
        launch(grape_backward_kernel, Grid((size_t)B * v.NH, 128, 0, stream), dqkv + 3 * v.C(), dg, qkv + 3 * v.C(), T,
               v.NH, v.OC);
    }
};

// Queries: grape_qk; otherwise grape_k, with g = 0
template <bool Queries> struct GrapeOf : Encoding {
    using Encoding::Encoding;
    float *g = nullptr, *w = nullptr;                                       // (B,NH,T)
    float *dg = nullptr, *dw = nullptr;                                     // (B,NH,T)

    template <class Tensors> void declare(Tensors& t) {
        t.columns("grape.k", t.NH);                                         // b_h, e_h
        if (Queries) { t.columns("grape.q", t.NH); }
        const size_t BNH = (size_t)t.B * t.NH, T = (size_t)t.stride;
        t.cached(w, "grape_w", Per::Layer, BNH, T);
        t.cached(g, "grape_g", Per::Layer, BNH, T);
        t.scratch(dw, "dgrape_w", BNH, T);
        t.scratch(dg, "dgrape_g", BNH, T);
    }
    void prepare_forward(floatX* qkv, int B, int T, int t0, Stream stream) const {
        const Grid grid((size_t)B * v.NH, 128, 0, stream);
        const floatX* u = qkv + 3 * v.C();
        launch(grape_forward_kernel, grid, w, nullptr, nullptr, u, T, t0, v.stride, v.NH, v.OC);
        if (Queries) {
            launch(grape_forward_kernel, grid, g, nullptr, nullptr, u + v.NH, T, t0, v.stride, v.NH, v.OC);
        } else if (t0 == 0) {
            device_zero(g, sizeof(float) * B * v.NH * v.stride, stream);
        }
    }
    void begin_backward(const floatX*, int B, int T, Stream stream) const {
        device_zero(dg, sizeof(float) * B * v.NH * T, stream);
        device_zero(dw, sizeof(float) * B * v.NH * T, stream);
    }
    void prepare_backward(floatX* dqkv, const floatX* qkv, int B, int T, Stream stream) const {
        const Grid grid((size_t)B * v.NH, 128, 0, stream);
        const int u = 3 * v.C();
        launch(grape_backward_kernel, grid, dqkv + u, dw, qkv + u, T, v.NH, v.OC);
        if (Queries) { launch(grape_backward_kernel, grid, dqkv + u + v.NH, dg, qkv + u + v.NH, T, v.NH, v.OC); }
    }
    GrapeBias bias() const { return {{}, g, w, dg, dw, v.stride}; }
};

using GrapeK = GrapeOf<false>;
using GrapeQK = GrapeOf<true>;
