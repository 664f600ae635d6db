// position/layer.cuh -- the encodings of one layer, as a trainer calls them.
#pragma once

#include <array>

#include "table.h"

struct LayerPosition {
    std::array<PositionView, 4> views;                      // one for each hook at most, in the order of their steps
    int count = 0;
    bool new_padding = false;                               // rows end in padding that other layers write to

    void embed_forward(floatX* x, int B, int T, Start start, Stream s) const {
        each([&](const auto& encoding) { encoding.embed_forward(x, B, T, start, s); });
    }
    void prepare_forward(floatX* qkv, int B, int T, Start start, Stream s) const {
        each([&](const auto& encoding) { encoding.prepare_forward(qkv, B, T, start, s); });
    }
    void prepare_backward(floatX* dqkv, const floatX* qkv, int B, int T, Stream s) const {
        each([&](const auto& encoding) { encoding.prepare_backward(dqkv, qkv, B, T, s); });
    }
    void embed_backward(floatX* dx, int B, int T, Stream s) const {
        each([&](const auto& encoding) { encoding.embed_backward(dx, B, T, s); });
    }
    // the encoding whose bias attention adds to the scores
    const PositionView& bias() const { return views[(size_t)count - 1]; }
    int columns() const { return bias().columns; }
    int row() const { return bias().OC; }

private:
    // Calls f(encoding) with each of them: with_position makes Rope or CableFull of a view.
    template <class F> void each(F f) const {
        for (int i = 0; i < count; i++) { with_position(views[(size_t)i], f); }
    }
};
