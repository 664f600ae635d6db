// position/added.cuh -- encodings added to the token embedding. t is a token's position in its document, if the
// attention mask tells documents apart, else in the sequence.
//
//   learned      x_bt += wpe_t, a vector for each position of the trained length; longer texts are an error
//                backward: dwpe_t += sum_b dx_bt, in the order of b         (Vaswani et al. 2017; GPT-2, BERT)
//   sinusoidal   x = a x + s pe_t     pe[t,2i] = sin(t / 10000^(2i/C))     pe[t,2i+1] = cos(same)
//                backward: dx *= a                                          (Vaswani et al. 2017, 3.4 and 3.5)
//                s is `scale`, 0.1 as in the CABLE paper's code; a is 1, or sqrt(C) with embed=sqrt. Vaswani et al. is
//                embed=sqrt,scale=1. With s = a = 1 the sines would drown embeddings of std 0.02.
#pragma once

#include "encoding.cuh"

// one block per row of x
static __global__ void learned_forward_kernel(floatX* x, const float* wpe, int T, int t0, int C, AttentionMask mask,
                                              int stride) {
    const size_t b = blockIdx.x / T;
    const int t = (int)(blockIdx.x % T) + t0;
    x += (size_t)blockIdx.x * C;
    wpe += (size_t)mask.of(b, stride).position(t) * C;
    for (int c = threadIdx.x; c < C; c += blockDim.x) { x[c] = (floatX)((float)x[c] + wpe[c]); }
}

// One block per position p; no other block adds to dwpe_p. Each document may have a token at p.
static __global__ void learned_backward_kernel(float* dwpe, const floatX* dx, int B, int T, int C, AttentionMask mask) {
    const int p = blockIdx.x;
    const int end = mask.documents == nullptr ? p + 1 : T;
    dwpe += (size_t)p * C;
    for (int b = 0; b < B; b++) {
        const AttentionMask of_b = mask.of(b, T);
        for (int t = p; t < end; t++) {
            const floatX* row = dx + ((size_t)b * T + t) * C;
            if (of_b.position(t) != p) { continue; }
            for (int c = threadIdx.x; c < C; c += blockDim.x) { dwpe[c] += (float)row[c]; }
        }
    }
}

struct Learned : Encoding {
    using Encoding::Encoding;
    static constexpr int hooks = CHANGES_EMBEDDINGS;
    Parameter wpe;              // (T_train,C)

    template <class Tensors> void declare(Tensors& t) {
        const size_t positions = (size_t)t.run->T_train;
        t.param(wpe, "wpe", t.names.wpe, Per::Model, positions, (size_t)t.C(), {normal(0.02f), true});
    }
    void embed_forward(floatX* x, int B, int T, int t0, Stream stream) const {
        check(T <= v.run->T_train - t0, "--pos learned has %d positions, position %d is needed; use a "
              "shorter --T or another encoding", v.run->T_train, t0 + T - 1);
        launch(learned_forward_kernel, Grid((size_t)B * T, 128, 0, stream), x, wpe.value, T, t0, v.C(), v.mask,
               v.stride);
    }
    void embed_backward(floatX* dx, int B, int T, Stream stream) const {
        launch(learned_backward_kernel, Grid((size_t)T, 128, 0, stream), wpe.grad, dx, B, T, v.C(), v.mask);
    }
};

// ----------------------------------------------------------------------------------------------------------
// sinusoidal

// One block for token t0 + t of all sequences: computes the sines of its position once, and again for a sequence in
// which the token has another position in its document. factor multiplies the embedding, scale the sines.
static __global__ void sinusoidal_forward_kernel(floatX* x, int B, int T, int t0, int C, float factor, float scale,
                                                 AttentionMask mask, int stride) {
    const size_t t = blockIdx.x;
    const int at = t0 + (int)t;
    float* pe = dynamic_shared();                           // (C + 1): the sines and cosines of `known`
    int known = -1;
    for (int b = 0; b < B; b++) {
        const int position = mask.of(b, stride).position(at);
        __syncthreads();
        for (int i = threadIdx.x; i < (C + 1) / 2 && position != known; i += blockDim.x) {
            const double angle = (double)position * portable_pow(10000.0, -2.0 * i / C);
            pe[2 * i] = scale * (float)portable_sin(angle);
            pe[2 * i + 1] = scale * (float)portable_cos(angle);
        }
        __syncthreads();
        known = position;
        floatX* row = x + ((size_t)b * T + t) * C;
        for (int c = threadIdx.x; c < C; c += blockDim.x) { row[c] = (floatX)(factor * (float)row[c] + pe[c]); }
    }
}

static __global__ void sinusoidal_backward_kernel(floatX* dx, size_t n, float scale) {
    const GridSpan s = grid_span(n);
    for (size_t i = s.begin; i < s.end; i += s.step) { dx[i] = (floatX)((float)dx[i] * scale); }
}

struct Sinusoidal : Encoding {
    using Encoding::Encoding;
    static constexpr int hooks = CHANGES_EMBEDDINGS;

    static Hyperparameters defaults(int) { return {{"scale", 0.1}, {"embed", 0, "plain|sqrt"}}; }
    float factor() const { return v.config->value("embed") == 1 ? sqrtf((float)v.C()) : 1.0f; }
    void embed_forward(floatX* x, int B, int T, int t0, Stream stream) const {
        const Grid grid((size_t)T, 128, sizeof(float) * (v.C() + 1), stream);
        launch(sinusoidal_forward_kernel, grid, x, B, T, t0, v.C(), factor(), (float)v.config->value("scale"),
               v.mask, v.stride);
    }
    void embed_backward(floatX* dx, int B, int T, Stream stream) const {
        const size_t n = (size_t)B * T * v.C();
        if (factor() != 1.0f) { launch(sinusoidal_backward_kernel, Grid::over(n, stream), dx, n, factor()); }
    }
};
