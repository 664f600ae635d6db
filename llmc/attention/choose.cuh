// attention/choose.cuh -- attention as a trainer calls it.
//
// Which kernel runs?
//   decode.cuh      a single token that continues a text
//   flash/          on the tensor cores of a GPU: bf16, a head size that is a multiple of 8 from 32 to 128, a bias of a
//                   form that they know (FlashBias, position/encoding.cuh), and tokens that begin a text
//   attention.cuh   everything else: these portable kernels can do it all
// The last two skip tiles that the bias has zeroed, except the portable ones on a GPU (choose_gpu.cuh, choose_cpu.cuh).
#pragma once

#include "../position/table.h"
#include "visits.cuh"

// The keys that a query sees, before AttentionMask: those up to its own, or those on both sides
enum class Mask { Causal, Both };
// floats of scratch that attention_forward needs
size_t attention_forward_scratch(int B, int T, int NH);
// out (B,T,C), lse (B,NH,v.stride) or null, qkv (B,v.stride,OC) with q | k | v | the encoding's columns in a row,
// prepared by it. Sequences may end at v.kv_len: the rows after it get out 0 and lse -inf, and padding never changes
// the bits of other rows. scratch: attention_forward_scratch floats, or null: no tiles are skipped
template <Mask Keys>
void attention_forward(floatX* out, float* lse, float* scratch, const floatX* qkv, const PositionView& v, int B, int T,
                       int t0, Stream stream);
// floats of scratch that attention_backward needs
size_t attention_backward_scratch(const PositionConfig& position, int B, int T, int NH, int HS);
// dqkv (B,T,OC): the q, k and v columns are overwritten; the bias functor's sums are complete on return. The rows of
// dqkv after v.kv_len become 0. The same rows of qkv and dout, which must be finite on the tensor cores, add nothing to
// any sum. scratch: attention_backward_scratch(v.run, ...) floats.  dout, out (B,T,C), lse (B,NH,T)
template <Mask Keys>
void attention_backward(floatX* dqkv, float* scratch, const floatX* dout, const floatX* qkv, const floatX* out,
                        const float* lse, const PositionView& v, int B, int T, Stream stream);

// Tiles that the bias has zeroed are skipped from this length on. Below it, finding them costs a GPU what it saves.
constexpr int TILE_SKIP_T = 2048;
inline bool skips_tiles(int T, const PositionView& v) {
    return flash_skips(encoding_traits(*v.config).form) && T >= TILE_SKIP_T && v.run->tile_skip != TileSkip::Off;
}
// in units of log2: how far below the row's largest logit a skipped one is
inline float tile_skip_tau(int T, TileSkip skip) {
    return skip == TileSkip::Exact ? 128.0f : flash_skip_tau(T);
}
// The share of the tiles (causal: of the causal ones) that the last attention_forward computed for the first sequence
// of a batch, from its scratch. 1 if nothing could be skipped, and with a mask, which hides other tiles.
double live_tile_share(const float* scratch, const PositionView& v, int T, Stream stream);

// The encoding whose bias the tensor-core kernels do not know, or not beside ssmax; "" if they know all
inline std::string unknown_bias(const PositionConfig& position) {
    std::string name;
    for (const std::vector<int>& layer : position.pattern) {
        bool scaled = false;
        for (int part : layer) { scaled |= (encoding_traits(position.parts[(size_t)part]).hooks & SCALES_Q) != 0; }
        for (int part : layer) {
            const EncodingConfig& c = position.parts[(size_t)part];
            const FlashBias kind = encoding_traits(c).form;
            const bool inside = c.name == "kcable" && c.value("weight") == 1;
            if (kind == FlashBias::Unknown || (scaled && !flash_takes_factor(kind, inside))) { name = c.name; }
        }
    }
    return name;
}

// Which kernels a model's attention runs on, for the banner
std::string attention_description(const PositionConfig& position, int HS);
// An error where the tiles of the portable kernels do not fit into a block's shared memory, `limit` bytes
void check_head_size(const PositionConfig& position, int HS, bool trains, size_t limit);

#if !defined(KERNELS_ELSEWHERE)
#include "../attention.cuh"

#if defined(CUDA_BUILD)
#include "choose_gpu.cuh"
#else
#include "choose_cpu.cuh"
#endif

LAUNCHER size_t attention_forward_scratch(int B, int T, int NH) { return tile_skip_scratch(B, T, NH); }

template <Mask Keys>
void attention_forward(floatX* out, float* lse, float* scratch, const floatX* qkv, const PositionView& v, int B, int T,
                       int t0, Stream stream) {
    constexpr bool Causal = Keys == Mask::Causal;
    with_bias(v, [&](auto bias) {
        AttentionDims dims = attention_dims(v, T, t0);
        if (choose_forward<Causal>(out, lse, scratch, qkv, v, bias, dims, B, stream)) { return; }
        skip_tiles<Causal>(dims, scratch, qkv, v, bias, B, stream);
        if constexpr (Causal || !decltype(bias)::counts_gates) {
            portable_attention_forward<Causal>(out, lse, qkv, bias, dims, B, stream);
        }
    });
}

template <Mask Keys>
void attention_backward(floatX* dqkv, float* scratch, const floatX* dout, const floatX* qkv, const floatX* out,
                        const float* lse, const PositionView& v, int B, int T, Stream stream) {
    constexpr bool Causal = Keys == Mask::Causal;
    with_bias(v, [&](auto bias) {
        AttentionDims dims = attention_dims(v, T, 0);
        if (choose_backward<Causal>(dqkv, scratch, dout, qkv, out, lse, v, bias, dims, B, stream)) { return; }
        float* tiles = scratch + portable_attention_backward_scratch(B, T, v.NH, v.HS);
        skip_tiles<Causal>(dims, tiles, qkv, v, bias, B, stream);
        begin_backward(v, qkv, B, T, stream);               // the tensor-core kernels overwrite instead
        if constexpr (Causal || !decltype(bias)::counts_gates) {
            portable_attention_backward<Causal>(dqkv, scratch, dout, qkv, out, lse, bias, dims, B, stream);
        }
    });
}

LAUNCHER double live_tile_share(const float* scratch, const PositionView& v, int T, Stream stream) {
    if (v.mask.exists() || !skips_tiles(T, v)) { return 1.0; }
    return chosen_share(scratch, v, T, stream);
}

LAUNCHER std::string attention_description(const PositionConfig& position, int HS) {
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

LAUNCHER void check_head_size(const PositionConfig& position, int HS, bool trains, size_t limit) {
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
#endif
