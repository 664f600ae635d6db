// position/layer.cuh -- the encodings of one layer, as a trainer calls them.
#pragma once

#include <array>

#include "table.h"

struct LayerPosition {
    std::array<PositionView, 4> views;                      // one for each hook at most, in the order of their steps
    int count = 0;
    bool new_padding = false;                               // rows end in padding that other layers write to

    // Each of its encodings in turn, as in encoding.cuh
    void embed_forward(floatX* x, int B, int T, int t0, Stream s) const;
    void prepare_forward(floatX* qkv, int B, int T, int t0, Stream s) const;
    void prepare_backward(floatX* dqkv, const floatX* qkv, int B, int T, Stream s) const;
    void embed_backward(floatX* dx, int B, int T, Stream s) const;
    // the encoding whose bias attention adds to the scores
    const PositionView& bias() const { return views[(size_t)count - 1]; }
    int columns() const { return bias().columns; }
    int row() const { return bias().OC; }
};

// Lends the factors of ssmax to the bias of its layer, if `scale` is ssmax.
void share_factors(PositionView& bias, PositionView& scale);

// Of each head of a layer: whether its S (cable.cuh) has moved, or the ReLU was closed for every token so far
enum HeadState { HAS_NO_RELU, IS_DEAD, HAS_MOVED };
// states (NH), of an encoding with a ReLU, after B windows of view.stride tokens, the last one of `last`
void find_moved(int* states, const PositionView& view, int B, int last, Stream stream);

#if !defined(KERNELS_ELSEWHERE)
// Calls f(encoding) with each encoding of a layer: with_position makes Rope or CableFull of a view.
template <class F> void with_positions(const LayerPosition& layer, F f) {
    for (int i = 0; i < layer.count; i++) { with_position(layer.views[(size_t)i], f); }
}
LAUNCHER void LayerPosition::embed_forward(floatX* x, int B, int T, int t0, Stream s) const {
    with_positions(*this, [&](const auto& encoding) { encoding.embed_forward(x, B, T, t0, s); });
}
LAUNCHER void LayerPosition::prepare_forward(floatX* qkv, int B, int T, int t0, Stream s) const {
    with_positions(*this, [&](const auto& encoding) { encoding.prepare_forward(qkv, B, T, t0, s); });
}
LAUNCHER void LayerPosition::prepare_backward(floatX* dqkv, const floatX* qkv, int B, int T, Stream s) const {
    const auto backward = [&](const auto& encoding) { encoding.prepare_backward(dqkv, qkv, B, T, s); };
    const bool first = (encoding_traits(*bias().config).hooks & COUNTS_GATES) != 0;
    if (first) { with_position(bias(), backward); }         // cope takes q and dq as attention had them
    for (int i = 0; i < count - first; i++) { with_position(views[(size_t)i], backward); }
}
LAUNCHER void LayerPosition::embed_backward(floatX* dx, int B, int T, Stream s) const {
    with_positions(*this, [&](const auto& encoding) { encoding.embed_backward(dx, B, T, s); });
}
LAUNCHER void share_factors(PositionView& bias, PositionView& scale) {
    with_position(scale, [&](const auto& encoding) {
        if constexpr (std::decay_t<decltype(encoding)>::hooks == SCALES_Q) {
            bias.factor = encoding.factors;
            bias.moment = scale.moment = encoding.moments;
        }
    });
}

// One block per head
__global__ void find_moved_kernel(int* states, const float* S_offset, const double* S_origin, int B, int stride,
                                  int last) {
    float most = 0.0f;
    for (int b = threadIdx.x; b < B; b += blockDim.x) {
        const int t = (b == B - 1 ? last : stride) - 1;
        const size_t bh = (size_t)b * gridDim.x + blockIdx.x;
        const double origin = S_origin[bh * ceil_div(stride, CABLE_CHUNK) + t / CABLE_CHUNK];
        most = fmaxf(most, (float)(origin + S_offset[bh * stride + t]));               // S at the end of the window
    }
    most = block_max(most);
    int& state = states[blockIdx.x];
    if (threadIdx.x == 0 && state < HAS_MOVED) { state = most > 0.0f ? HAS_MOVED : IS_DEAD; }
}
LAUNCHER void find_moved(int* states, const PositionView& view, int B, int last, Stream stream) {
    with_position(view, [&](const auto& encoding) {
        if constexpr (std::decay_t<decltype(encoding)>::has_relu) {
            launch(find_moved_kernel, Grid((size_t)view.NH, 128, 0, stream), states, encoding.S_offset,
                   encoding.S_origin, B, view.stride, last);
        }
    });
}
#endif
