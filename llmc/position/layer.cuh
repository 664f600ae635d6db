// position/layer.cuh -- the encodings of one layer, as a trainer calls them.
#pragma once

#include <array>

#include "table.h"

struct LayerPosition {
    std::array<PositionView, 4> views;                      // one for each hook at most, in the order of their steps
    int count = 0;
    bool new_padding = false;                               // rows end in padding that other layers write to

    // Each of its encodings in turn, as in encoding.cuh
    void embed_forward(floatX* x, int B, int T, Start start, Stream s) const;
    void prepare_forward(floatX* qkv, int B, int T, Start start, Stream s) const;
    void prepare_backward(floatX* dqkv, const floatX* qkv, int B, int T, Stream s) const;
    void embed_backward(floatX* dx, int B, int T, Stream s) const;
    // the encoding whose bias attention adds to the scores
    const PositionView& bias() const { return views[(size_t)count - 1]; }
    int columns() const { return bias().columns; }
    int row() const { return bias().OC; }
};

// Lends the factors of ssmax to the bias of its layer, if `scale` is ssmax.
void share_factors(PositionView& bias, PositionView& scale);

#if !defined(KERNELS_ELSEWHERE)
// Calls f(encoding) with each encoding of a layer: with_position makes Rope or CableFull of a view.
template <class F> void with_positions(const LayerPosition& layer, F f) {
    for (int i = 0; i < layer.count; i++) { with_position(layer.views[(size_t)i], f); }
}
LAUNCHER void LayerPosition::embed_forward(floatX* x, int B, int T, Start start, Stream s) const {
    with_positions(*this, [&](const auto& encoding) { encoding.embed_forward(x, B, T, start, s); });
}
LAUNCHER void LayerPosition::prepare_forward(floatX* qkv, int B, int T, Start start, Stream s) const {
    with_positions(*this, [&](const auto& encoding) { encoding.prepare_forward(qkv, B, T, start, s); });
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
#endif
