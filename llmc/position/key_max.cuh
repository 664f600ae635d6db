// position/key_max.cuh -- the largest norm of a key in each split of a text, updated with each new key.
//
// Decoding reads the keys in splits, and skips those whose logits cannot matter (attention/decode.cuh). If a bias never
// grows with the distance (alibi, cable), the largest norm in a split and the bias of its last key bound all of its
// logits.
#pragma once

#include "encoding.cuh"

constexpr int DECODE_SPLIT = 256;       // keys

// key_max (B*NH,ceil(stride/DECODE_SPLIT)): the largest |k_j|^2 of each split, over the keys up to t0 + T - 1. The last
// T of them are new. One block per (batch, head) and split with new keys.
static __global__ void key_max_kernel(float* key_max, const floatX* qkv, int T, Start start, int stride, int NH, int HS,
                                      int OC, int BNH) {
    const int t0 = start.position();
    const int bh = blockIdx.x % BNH;
    const int split = t0 / DECODE_SPLIT + blockIdx.x / BNH;
    const int j0 = split * DECODE_SPLIT;
    const int begin = imax(j0, t0);
    const int end = imin(j0 + DECODE_SPLIT, t0 + T);
    const floatX* k = qkv + (size_t)(bh / NH) * stride * OC + (NH + bh % NH) * HS;
    key_max += (size_t)bh * ceil_div(stride, DECODE_SPLIT) + split;
    float largest = begin > j0 ? *key_max : 0.0f;
    for (int j = begin + (int)threadIdx.x; j < end; j += blockDim.x) {
        const floatX* k_j = k + (size_t)j * OC;
        float sum = dot(k_j, k_j, HS);
        if (!(sum < INFINITY)) { sum = INFINITY; }          // a NaN too: such a split is never skipped
        largest = sum <= largest ? largest : sum;
    }
    largest = block_max(largest);
    if (threadIdx.x == 0) { *key_max = largest; }
}

// Declares e's key_max where it will be read.
template <class Tensors> void declare_key_max(Encoding& e, Tensors& t) {
    if (!t.decodes || t.run->tile_skip == TileSkip::Off) { return; }
    const size_t splits = ceil_div((size_t)t.stride, (size_t)DECODE_SPLIT);
    t.cached(e.key_max, "key_max", Per::Layer, (size_t)t.B * t.NH, splits);
}

// for prepare_forward
inline void update_key_max(const Encoding& e, const floatX* qkv, int B, int T, Start start, Stream stream) {
    if (e.key_max == nullptr) { return; }
    const PositionView& v = e.v;
    const int BNH = B * v.NH;
    // 1 for a single token at any position
    const int splits = (start.t0 + T - 1) / DECODE_SPLIT - start.t0 / DECODE_SPLIT + 1;
    const Grid grid((size_t)BNH * splits, T > 32 ? 128 : 32, 0, stream);
    launch(key_max_kernel, grid, e.key_max, qkv, T, start, v.stride, v.NH, v.HS, v.OC, BNH);
}
