// attention/choose_gpu.cuh -- CUDA builds choose the tensor-core kernels (flash/) wherever these can run.
#pragma once

#include "flash/backward.cuh"
#include "flash/forward.cuh"

// A compile-time question: the kernels of an encoding without a form are never instantiated
constexpr bool flash_exists(FlashBias Kind) { return Kind != FlashBias::Unknown && sizeof(floatX) == sizeof(bf16); }
// Whether attention runs on the tensor cores
inline bool uses_flash(const PositionConfig& position, int HS) {
    return flash_head_size(HS) && sizeof(floatX) == sizeof(bf16) && unknown_bias(position).empty();
}

// The arguments of both passes; the bias functor fills in its own arrays
template <class Bias> FlashArgs flash_args(const Bias& bias, const AttentionDims& dims, int B, const floatX* qkv) {
    FlashArgs args = {};                                    // arrays that a form of B does not use stay null
    bias.fill(args);
    args.qkv = (const bf16*)qkv;
    args.B = B;
    args.T = dims.T;
    args.stride = dims.stride;
    args.NH = dims.NH;
    args.HS = dims.HS;
    args.OC = dims.OC;
    args.scale = dims.scale;
    args.kv_len = dims.kv_len;
    args.mask = dims.mask;
    args.factor = dims.factor;
    args.moment = dims.moment;
    return args;
}

// floats of scratch that choose_tiles needs: a FlashSpan, as large as two floats, and two floats of key_norm per tile
inline size_t tile_skip_scratch(int B, int T, int NH) { return (size_t)4 * B * NH * ceil_div(T, FLASH_TILE); }
// Sets args.span from what qkv holds, so that the backward finds the same spans as the forward.
template <bool Causal, FlashBias Kind>
void choose_tiles(FlashArgs& args, float* scratch, const PositionView& v, Stream stream) {
    if constexpr (flash_skips(Kind)) {
        if (scratch == nullptr || !skips_tiles(args.T, v)) { return; }
        float* key_norm = scratch + tile_skip_scratch(args.B, args.T, args.NH) / 2;     // after the spans
        args.span = (const FlashSpan*)scratch;
        flash_skip<Causal, Kind>((FlashSpan*)scratch, key_norm, args, tile_skip_tau(args.T, v.run->tile_skip), stream);
    }
}
// Whether they take this head size and this factor
template <FlashBias Kind> bool flash_takes(const FlashArgs& args) {
    return flash_head_size(args.HS) && (args.factor == nullptr || flash_takes_factor(Kind, args.inside));
}
// Computes the forward on the tensor cores; false if the portable kernels must, as for a part of a text (t0 > 0).
template <bool Causal, class Bias>
bool choose_forward(floatX* out, float* lse, float* scratch, const floatX* qkv, const PositionView& v, const Bias& bias,
                    const AttentionDims& dims, int B, Stream stream) {
    constexpr FlashBias Kind = Bias::flash;
    if constexpr (flash_exists(Kind)) {
        FlashArgs args = flash_args(bias, dims, B, qkv);
        if (dims.t0 > 0 || !flash_takes<Kind>(args)) { return false; }
        args.out = (bf16*)out;
        args.lse = lse;
        choose_tiles<Causal, Kind>(args, scratch, v, stream);
        return flash_forward<Causal, Kind>(args, stream);
    }
    return false;
}
template <bool Causal, class Bias>
bool choose_backward(floatX* dqkv, float* scratch, const floatX* dout, const floatX* qkv, const floatX* out,
                     const float* lse, const PositionView& v, const Bias& bias, const AttentionDims& dims, int B,
                     Stream stream) {
    constexpr FlashBias Kind = Bias::flash;
    if constexpr (flash_exists(Kind)) {
        FlashArgs args = flash_args(bias, dims, B, qkv);
        if (!flash_takes<Kind>(args)) { return false; }
        args.out = (bf16*)out;
        args.lse = (float*)lse;
        args.dout = (const bf16*)dout;
        args.dqkv = (bf16*)dqkv;
        float* tiles = scratch + flash_backward_scratch(Kind, B, dims.T, dims.NH);      // finds what the forward found
        choose_tiles<Causal, Kind>(args, tiles, v, stream);
        // the derivatives that the kernels read, and zeros in the slots that they leave out
        if (Kind == FlashBias::Fire) { begin_backward(v, qkv, B, dims.T, stream); }
        return flash_backward<Causal, Kind>(args, scratch, stream);
    }
    return false;
}
// The portable kernels of a GPU skip nothing.
template <bool Causal, class Bias>
void skip_tiles(AttentionDims&, float*, const floatX*, const PositionView&, const Bias&, int, Stream) {}

LAUNCHER size_t attention_backward_scratch(const PositionConfig& position, int B, int T, int NH, int HS) {
    size_t floats = portable_attention_backward_scratch(B, T, NH, HS);      // the kernel is chosen later, by head size
    for (const EncodingConfig& c : position.parts) {
        const FlashBias kind = encoding_traits(c).form;
        if (kind == FlashBias::Unknown) { continue; }
        floats = std::max(floats, flash_backward_scratch(kind, B, T, NH) + tile_skip_scratch(B, T, NH));
    }
    return floats;
}
// see live_tile_share
inline double chosen_share(const float* scratch, const PositionView& v, int T, Stream stream) {
    const FlashBias kind = encoding_traits(*v.config).form;
    const bool known = flash_exists(kind) && (v.factor == nullptr || flash_takes_factor(kind, false));
    if (!known || !flash_head_size(v.HS)) { return 1.0; }
    std::vector<FlashSpan> span((size_t)v.NH * ceil_div(T, FLASH_TILE));
    copy_to_host(span.data(), scratch, sizeof(FlashSpan) * span.size(), stream);
    return flash_live_share(span.data(), v.NH, T, v.causal);
}
