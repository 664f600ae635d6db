// position/learned.cuh -- a learned vector for each position, added to the token embedding (Vaswani et al. 2017; GPT-2,
// BERT).
//
//   x_bt += wpe_t     backward: dwpe_t += sum_b dx_bt, in the order of b.     Nothing lies beyond the trained length.
//   t is the position in the document, where the attention mask tells documents apart.
#pragma once

#include "encoding.cuh"

// One block per row of x.
static __global__ void learned_forward_kernel(floatX* x, const float* wpe, int T, Start start, int C,
                                              AttentionMask mask, int stride) {
    const size_t b = blockIdx.x / T;
    const int t = (int)(blockIdx.x % T) + start.position();
    x += (size_t)blockIdx.x * C;
    wpe += (size_t)mask.of(b, stride).position(t) * C;
    for (int c = threadIdx.x; c < C; c += blockDim.x) { x[c] = (floatX)((float)x[c] + wpe[c]); }
}

// One block per position p, the only one that adds to wpe_p. Each document may have a token there.
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
    void embed_forward(floatX* x, int B, int T, Start start, Stream stream) const {
        check(T <= v.run->T_train - start.t0, "--pos learned has %d positions, position %d is needed; use a "
              "shorter --T or another encoding", v.run->T_train, start.t0 + T - 1);
        launch(learned_forward_kernel, Grid((size_t)B * T, 128, 0, stream), x, wpe.value, T, start, v.C(), v.mask,
               v.stride);
    }
    void embed_backward(floatX* dx, int B, int T, Stream stream) const {
        launch(learned_backward_kernel, Grid((size_t)T, 128, 0, stream), wpe.grad, dx, B, T, v.C(), v.mask);
    }
};

// The longest sequence that the encodings can encode; INT_MAX if there is no limit
inline int position_max_length(const PositionConfig& config) {
    return config.has("learned") ? config.T_train : INT_MAX;
}
