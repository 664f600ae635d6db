// attention/choose.cuh -- which kernels attention runs on.
//
// The portable kernels (attention.cuh) can do everything. In CUDA builds the tensor-core kernels (flash/) take over
// where the elements are bf16, the head size is a multiple of 8 from 32 to 128, and the bias has a form they know
// (FlashBias, position/encoding.cuh).
#pragma once

#include "../attention.cuh"
#include "../position/table.h"

// The form of the bias of one encoding
inline FlashBias find_flash_bias(const EncodingConfig& encoding) {
    FlashBias kind = FlashBias::Unknown;
    with_position_type(encoding, [&](auto type) {
        kind = flash_form<typename decltype(type)::type>;
    });
    return kind;
}

// The encoding whose bias the tensor-core kernels do not know, or not beside ssmax; "" if they know all
inline std::string unknown_bias(const PositionConfig& position) {
    std::string name;
    for (const std::vector<int>& layer : position.pattern) {
        bool scaled = false;
        for (int part : layer) { scaled = scaled || (position_hooks(position.parts[(size_t)part]) & SCALES_Q) != 0; }
        for (int part : layer) {
            const EncodingConfig& c = position.parts[(size_t)part];
            const FlashBias kind = find_flash_bias(c);
            const bool inside = kind == FlashBias::LogDistance && !c.values.empty() && c.value("weight") == 1;
            if (kind == FlashBias::Unknown || (scaled && !flash_takes_factor(kind, inside))) { name = c.name; }
        }
    }
    return name;
}

// Tiles that the bias has zeroed are skipped from this length on; below it, finding them costs a GPU about what it
// saves.
constexpr int TILE_SKIP_T = 2048;
inline bool skips_tiles(FlashBias kind, int T, TileSkip skip) {
    return flash_skips(kind) && T >= TILE_SKIP_T && skip != TileSkip::Off;
}
// in units of log2: how far below the row's largest logit a skipped one is
inline float tile_skip_tau(int T, TileSkip skip) {
    return skip == TileSkip::Exact ? 128.0f : flash_skip_tau(T);
}

#if defined(CUDA_BUILD)
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

// the spans, and two floats for each
inline size_t tile_skip_scratch(int B, int T, int NH) { return (size_t)4 * B * NH * ceil_div(T, FLASH_TILE); }
// Sets args.span from what qkv holds, so that the backward finds the same spans as the forward.
template <bool Causal, FlashBias Kind>
void choose_tiles(FlashArgs& args, float* scratch, TileSkip skip, Stream stream) {
    if constexpr (flash_skips(Kind)) {
        if (scratch == nullptr || !skips_tiles(Kind, args.T, skip)) { return; }
        float* key_norm = scratch + tile_skip_scratch(args.B, args.T, args.NH) / 2;     // after the spans
        args.span = (const FlashSpan*)scratch;
        flash_skip<Causal, Kind>((FlashSpan*)scratch, key_norm, args, tile_skip_tau(args.T, skip), stream);
    }
}
// Computes the forward on the tensor cores; false if the portable kernels must, as for a part of a text (t0 > 0).
template <bool Causal, class Position>
bool choose_forward(floatX* out, float* lse, float* scratch, const floatX* qkv, const Position& position,
                    AttentionDims& dims, TileSkip skip, int B, Stream stream) {
    constexpr FlashBias Kind = flash_form<Position>;
    if constexpr (flash_exists(Kind)) {
        if (dims.t0 > 0 || !flash_head_size(dims.HS)) { return false; }
        FlashArgs args = flash_args(position.bias(), dims, B, qkv);
        if (args.factor != nullptr && !flash_takes_factor(Kind, args.inside)) { return false; }
        args.out = (bf16*)out;
        args.lse = lse;
        choose_tiles<Causal, Kind>(args, scratch, skip, stream);
        return flash_forward<Causal, Kind>(args, stream);
    }
    return false;
}
template <bool Causal, class Position>
bool choose_backward(floatX* dqkv, float* scratch, const floatX* dout, const floatX* qkv, const floatX* out,
                     const float* lse, Position& position, AttentionDims& dims, TileSkip skip, int B, Stream stream) {
    constexpr FlashBias Kind = flash_form<Position>;
    if constexpr (flash_exists(Kind)) {
        if (!flash_head_size(dims.HS)) { return false; }
        FlashArgs args = flash_args(position.bias(), dims, B, qkv);
        if (args.factor != nullptr && !flash_takes_factor(Kind, args.inside)) { return false; }
        args.out = (bf16*)out;
        args.lse = (float*)lse;
        args.dout = (const bf16*)dout;
        args.dqkv = (bf16*)dqkv;
        float* tiles = scratch + flash_backward_scratch(Kind, B, dims.T, dims.NH);      // finds what the forward found
        choose_tiles<Causal, Kind>(args, tiles, skip, stream);
        // the derivatives that the kernels read, and zeros in the slots that they leave out
        if (Kind == FlashBias::Fire) { position.zero_bias_gradient(B, dims.T, stream); }
        return flash_backward<Causal, Kind>(args, scratch, stream);
    }
    return false;
}
// floats of scratch that attention_backward needs
inline size_t attention_backward_scratch(const PositionConfig& position, int B, int T, int NH, int HS) {
    size_t floats = portable_attention_backward_scratch(B, T, NH, HS);      // the kernel is chosen later, by head size
    for (const EncodingConfig& c : position.parts) {
        const FlashBias kind = find_flash_bias(c);
        if (kind == FlashBias::Unknown) { continue; }
        floats = std::max(floats, flash_backward_scratch(kind, B, T, NH) + tile_skip_scratch(B, T, NH));
    }
    return floats;
}
inline double chosen_share(const float* scratch, const PositionView& v, int T, Stream stream) {
    const FlashBias kind = find_flash_bias(*v.config);
    const bool known = flash_exists(kind) && (v.factor == nullptr || flash_takes_factor(kind, false));
    if (!known || !flash_head_size(v.HS)) { return 1.0; }
    std::vector<FlashSpan> span((size_t)v.NH * ceil_div(T, FLASH_TILE));
    copy_to_host(span.data(), scratch, sizeof(FlashSpan) * span.size(), stream);
    return flash_live_share(span.data(), v.NH, T, v.causal);
}
#else
#include "skip.cuh"

inline bool uses_flash(const PositionConfig&, int) { return false; }
// the first key of each tile of queries, and the longest keys
inline size_t tile_skip_scratch(int B, int T, int NH) { return (size_t)2 * B * NH * ceil_div(T, ATTENTION_TILE); }
// Sets dims.first_key where a causal bias zeroes tiles.
template <bool Causal, class Position>
void choose_tiles(AttentionDims& dims, float* scratch, const floatX* qkv, const Position& position, TileSkip skip,
                  int B, Stream stream) {
    constexpr FlashBias Kind = flash_form<Position>;
    if constexpr (Causal && flash_skips(Kind)) {
        const int whole = position.v.decodes ? dims.T : dims.stride;    // tokens of the prompt, or of the whole window
        if (scratch == nullptr || dims.t0 + dims.T > whole || !skips_tiles(Kind, whole, skip)) { return; }
        float* key_norm = scratch + tile_skip_scratch(B, dims.stride, dims.NH) / 2;
        const float tau = 0.693147181f * tile_skip_tau(whole, skip);
        attention_skip((int*)scratch, key_norm, qkv, position.bias(), dims, B, tau, stream);
        dims.first_key = (const int*)scratch;
    }
}
template <bool Causal, class Position>
bool choose_forward(floatX*, float*, float* scratch, const floatX* qkv, const Position& position, AttentionDims& dims,
                    TileSkip skip, int B, Stream stream) {
    choose_tiles<Causal>(dims, scratch, qkv, position, skip, B, stream);
    return false;
}
template <bool Causal, class Position>
bool choose_backward(floatX*, float* scratch, const floatX*, const floatX* qkv, const floatX*, const float*,
                     Position& position, AttentionDims& dims, TileSkip skip, int B, Stream stream) {
    float* tiles = scratch + portable_attention_backward_scratch(B, dims.T, dims.NH, dims.HS);
    choose_tiles<Causal>(dims, tiles, qkv, position, skip, B, stream);
    return false;
}
inline size_t attention_backward_scratch(const PositionConfig&, int B, int T, int NH, int HS) {
    return portable_attention_backward_scratch(B, T, NH, HS) + tile_skip_scratch(B, T, NH);
}
inline double chosen_share(const float* scratch, const PositionView& v, int T, Stream stream) {
    if (!v.causal) { return 1.0; }
    std::vector<int> first_key((size_t)v.NH * ceil_div(T, ATTENTION_TILE));
    copy_to_host(first_key.data(), scratch, sizeof(int) * first_key.size(), stream);
    const int tiles = ceil_div(T, ATTENTION_TILE);
    return tile_share(v.NH * tiles, tiles, true, [&](int x) { return x % tiles + 1 - first_key[x] / ATTENTION_TILE; });
}
#endif

// ----------------------------------------------------------------------------------------------------------
// forward

// floats of scratch that attention_forward needs
inline size_t attention_forward_scratch(int B, int T, int NH) { return tile_skip_scratch(B, T, NH); }

// out (B,T,C), lse (B,NH,v.stride) or null, qkv (B,v.stride,OC) with q | k | v | the encoding's columns in a row,
// prepared by it. Sequences may end at v.kv_len: the rows after it get out 0 and lse -inf, and padding never changes
// the bits of other rows. scratch: attention_forward_scratch floats, or null: no tiles are skipped
template <bool Causal>
void attention_forward(floatX* out, float* lse, float* scratch, const floatX* qkv, const PositionView& v, int B, int T,
                       int t0, Stream stream) {
    with_position(v, [&](auto position) {
        AttentionDims dims = attention_dims(v, T, t0, v.score_factor * position.score_factor(v.stride));
        if (choose_forward<Causal>(out, lse, scratch, qkv, position, dims, v.run->tile_skip, B, stream)) { return; }
        if constexpr (Causal || !decltype(position)::causal_only) {
            portable_attention_forward<Causal>(out, lse, qkv, position.bias(), dims, B, stream);
        }
    });
}

// The share of the tiles (causal: of the causal ones) that the last attention_forward computed for the first sequence
// of a batch, from its scratch. 1 if nothing could be skipped, and with a mask, which hides other tiles.
inline double live_tile_share(const float* scratch, const PositionView& v, int T, Stream stream) {
    if (v.mask.exists() || !skips_tiles(find_flash_bias(*v.config), T, v.run->tile_skip)) { return 1.0; }
    return chosen_share(scratch, v, T, stream);
}

// ----------------------------------------------------------------------------------------------------------
// backward

// dqkv (B,T,OC): the q, k and v columns are overwritten; the bias functor's sums are complete on return. The rows of
// dqkv after v.kv_len become 0, and those of qkv and dout, which must be finite on the tensor cores, add nothing to any
// sum. scratch: attention_backward_scratch floats.  dout, out (B,T,C), lse (B,NH,T)
template <bool Causal>
void attention_backward(floatX* dqkv, float* scratch, const floatX* dout, const floatX* qkv, const floatX* out,
                        const float* lse, const PositionView& v, int B, int T, Stream stream) {
    with_position(v, [&](auto position) {
        AttentionDims dims = attention_dims(v, T, 0, v.score_factor * position.score_factor(v.stride));
        const TileSkip skip = v.run->tile_skip;
        if (choose_backward<Causal>(dqkv, scratch, dout, qkv, out, lse, position, dims, skip, B, stream)) { return; }
        position.zero_bias_gradient(B, T, stream);          // the tensor-core kernels overwrite instead
        position.begin_backward(qkv, B, T, stream);
        if constexpr (Causal || !decltype(position)::causal_only) {
            portable_attention_backward<Causal>(dqkv, scratch, dout, qkv, out, lse, position.bias(), dims, B, stream);
        }
        position.end_backward(dqkv, qkv, B, T, stream);
    });
}

// ----------------------------------------------------------------------------------------------------------
// before the work

// Which kernels a model's attention runs on, for the banner
inline std::string attention_description(const PositionConfig& position, int HS) {
    if (!ON_GPU || sizeof(floatX) == sizeof(float)) { return strprintf("portable kernels, float32, head size %d", HS); }
    if (uses_flash(position, HS)) { return "tensor-core kernels, bf16"; }
    const char* slow = "its products run in float32, without the tensor cores";
    const std::string unknown = unknown_bias(position);
    if (!unknown.empty()) {
        return strprintf("portable kernels%s, because no tensor-core kernel knows the bias of %s: %s",
                         position.pattern.size() > 1 ? " in some layers" : "", unknown.c_str(), slow);
    }
    return strprintf("portable kernels, because the tensor-core kernels have head sizes from 32 to 128 that 8 "
                     "divides, not %d: %s", HS, slow);
}

// An error where the tiles of the portable kernels do not fit into a block's shared memory, `limit` bytes.
inline void check_head_size(const PositionConfig& position, int HS, bool trains, size_t limit) {
    if (uses_flash(position, HS)) { return; }
    auto wanted = [&](int size) {
        AttentionDims dims = {};
        dims.HS = size;
        return trains ? attention_backward_shared(dims) : attention_forward_shared(dims);
    };
    int most = HS;                                          // the largest head size that fits, for the message
    while (most > 0 && wanted(most) > limit) { most--; }
    check(most == HS, "--model: expected heads that fit into %s of shared memory per block on this GPU, but "
          "heads of %d need %s in the portable attention: at most %d fit; use more heads",
          format_bytes((double)limit).c_str(), HS, format_bytes((double)wanted(HS)).c_str(), most);
}
