// position/sinusoidal.cuh -- fixed sines and cosines added to the token embedding (Vaswani et al. 2017, 3.4 and 3.5).
//
//   x = a x + s pe_t     pe[t,2i] = sin(t / 10000^(2i/C))     pe[t,2i+1] = cos(same)
//   backward: dx *= a
//   s is `scale`, 0.1 as in the authors' code, and a = 1. embed=sqrt,scale=1 is Vaswani et al.: a = sqrt(C). With s =
//   a = 1 the sines would drown embeddings of std 0.02.
#pragma once

#include "encoding.cuh"

// One block per token of a sequence: the sines of its position are computed once, in double because a float angle is
// off by 0.004 at t = 100,000, and added to that row of every sequence; again where it has another position in its
// document. factor: of the embedding, scale: of the sines
static __global__ void sinusoidal_forward_kernel(floatX* x, int B, int T, Start start, int C, float factor,
                                                 float scale, AttentionMask mask, int stride) {
    const size_t t = blockIdx.x;
    const int at = start.position() + (int)t;
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

    static Hyperparameters defaults(int) { return {{"scale", 0.1, 1.0}, {"embed", 0, 1.0, "plain|sqrt"}}; }
    float factor() const { return v.config->value("embed") == 1 ? sqrtf((float)v.C()) : 1.0f; }
    void embed_forward(floatX* x, int B, int T, Start start, Stream stream) const {
        const Grid grid((size_t)T, 128, sizeof(float) * (v.C() + 1), stream);
        launch(sinusoidal_forward_kernel, grid, x, B, T, start, v.C(), factor(), (float)v.config->value("scale"),
               v.mask, v.stride);
    }
    void embed_backward(floatX* dx, int B, int T, Stream stream) const {
        const size_t n = (size_t)B * T * v.C();
        if (factor() != 1.0f) { launch(sinusoidal_backward_kernel, Grid::over(n, stream), dx, n, factor()); }
    }
};
