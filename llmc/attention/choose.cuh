// attention/choose.cuh -- attention as a trainer calls it.
//
// Which kernel runs?
//   decode.cuh      a single token that continues a text
//   flash/          on a GPU's tensor cores: bf16, a head size from 32 to 128 that 8 divides, a bias with a form in
//                   FlashBias (position/encoding.cuh), and tokens that begin a text
//   attention.cuh   everything else: the portable kernels
// flash/, and on a CPU the portable kernels, skip tiles that the bias has zeroed.
#pragma once

#include "../position/table.h"
#include "visits.cuh"

// The keys that a query may see, before AttentionMask: up to its own, or on both sides
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
// dqkv (B,T,OC): the q, k and v columns are overwritten; the bias functor's sums are complete on return. Rows after
// v.kv_len become 0 in dqkv, and add nothing to any sum; in qkv and dout they must be finite on the tensor cores.
// scratch: attention_backward_scratch(v.run, ...) floats.  dout, out (B,T,C), lse (B,NH,T)
template <Mask Keys>
void attention_backward(floatX* dqkv, float* scratch, const floatX* dout, const floatX* qkv, const floatX* out,
                        const float* lse, const PositionView& v, int B, int T, Stream stream);

// Tiles that the bias has zeroed are skipped from this length on. Below it, finding them costs a GPU what it saves.
constexpr int TILE_SKIP_T = 2048;
inline bool skips_tiles(int T, const PositionView& v) {
    return flash_skips(encoding_traits(*v.config).form) && T >= TILE_SKIP_T && v.run->tile_skip != TileSkip::Off;
}
// how far below its row's largest logit a skipped logit is at least, in units of log2
inline float tile_skip_tau(int T, TileSkip skip) {
    return skip == TileSkip::Exact ? 128.0f : flash_skip_tau(T);
}
// The share of the (causal) tiles that the last attention_forward computed for the first sequence of a batch, from its
// scratch. 1 if nothing could be skipped, or with a mask, whose hidden tiles are not counted.
double live_tile_share(const float* scratch, const PositionView& v, int T, Stream stream);

// An encoding whose bias the tensor-core kernels do not know, or not beside ssmax; "" if there is none
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
// Dies if the tiles of the portable kernels do not fit into the `limit` bytes of a block's shared memory
void check_head_size(const PositionConfig& position, int HS, bool trains, size_t limit);

#if !defined(KERNELS_ELSEWHERE)
#include "../attention.cuh"

#if defined(CUDA_BUILD)
// ----------------------------------------------------------------------------------------------------------
// CUDA builds: the tensor-core kernels wherever they can run

#include "flash/backward.cuh"
#include "flash/forward.cuh"

// A constant: the kernels of an encoding without a form are never instantiated
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
// Whether the tensor-core kernels take this head size and this factor
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
        float* tiles = scratch + flash_backward_scratch(Kind, B, dims.T, dims.NH);      // with the forward's spans
        choose_tiles<Causal, Kind>(args, tiles, v, stream);
        // the derivatives that the kernels read, and zeros in slots that they do not write
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
#else
// ----------------------------------------------------------------------------------------------------------
// CPU builds: always the portable kernels, which skip tiles of keys that a causal bias has zeroed
//
// The bound is that of flash/bias.cuh, in natural units: with j the last key of tile n, all logits of query i in the
// tiles 0 .. n are at most |scale q_i| max|k| + f_i B_ij. If that is more than tau below the logit of i's own key, the
// tiles are skipped. tau = 128 ln 2 changes no bit: fast_exp would return 0, and the query's own tile comes first.

// floats for first_key and key_norm
inline size_t tile_skip_scratch(int B, int T, int NH) { return (size_t)2 * B * NH * ceil_div(T, ATTENTION_TILE); }

// first_key (B*NH,tiles): the first key that a tile of queries visits, not before dims.forgotten. key_norm, of the same
// shape: the longest key of the tiles 0 .. n; tiles before t0 have theirs. One block per (batch, head).
template <class Bias>
__global__ void attention_skip_kernel(int* first_key, float* key_norm, const floatX* qkv, Bias bias, AttentionDims dims,
                                      float tau) {
    constexpr int TILE = ATTENTION_TILE;
    const int bh = blockIdx.x;
    const int b = bh / dims.NH;
    const int HS = dims.HS;
    const int T = dims.tokens(b);
    const int tiles = ceil_div(dims.stride, TILE);          // of the whole capacity
    const int begin = dims.t0 / TILE;                       // the new ones
    const int end = ceil_div(dims.t0 + dims.T, TILE);
    const floatX* q = qkv + (size_t)b * dims.stride * dims.OC + bh % dims.NH * HS;
    const floatX* k = q + dims.C();
    first_key += (size_t)bh * tiles;
    key_norm += (size_t)bh * tiles;

    // 1. the longest key of the tiles up to n
    for (int n = begin; n < end; n++) {
        float largest = 0.0f;
        for (int j = n * TILE; j < imin((n + 1) * TILE, T); j++) {
            const floatX* row = k + (size_t)j * dims.OC;
            float sum = dot(row, row, HS);
            if (!(sum < INFINITY)) { sum = INFINITY; }      // a NaN too: such a tile is never skipped
            largest = sum <= largest ? largest : sum;
        }
        key_norm[n] = n > 0 ? fmaxf(key_norm[n - 1], sqrtf(largest)) : sqrtf(largest);
    }
    // 2. the first tile that any of the 64 queries needs. The bound grows with n, so each query searches by bisection
    // among the tiles that earlier queries would skip.
    for (int m = begin; m < end; m++) {
        int first = m;
        for (int i = m * TILE; i < imin((m + 1) * TILE, T); i++) {
            const floatX* row = q + (size_t)i * dims.OC;
            const floatX* own_key = k + (size_t)i * dims.OC;
            const float length = dims.scale * sqrtf(dot(row, row, HS));
            const float least = dims.scale * dot(row, own_key, HS) - tau;
            const float* factor = dims.factors(bh, i);
            int low = dims.forgotten / TILE;
            int probe = first - 1;                          // usually no tile before `first` is needed
            while (low < first) {
                const float B = bias.tile(bh, m * TILE, probe * TILE)(i - m * TILE, TILE - 1);
                const float bound = length * key_norm[probe] + (factor == nullptr ? B : *factor * B);
                if (bound < least) { low = probe + 1; }
                else { first = probe; }
                probe = (low + first) / 2;
            }
        }
        first_key[m] = first * TILE;
    }
}

// Sets dims.first_key where a causal bias zeroes tiles.
template <bool Causal, class Bias>
void skip_tiles(AttentionDims& dims, float* scratch, const floatX* qkv, const PositionView& v, const Bias& bias, int B,
                Stream stream) {
    const int whole = v.decodes ? dims.T : dims.stride;     // tokens of the whole prompt, or window
    if (!Causal || scratch == nullptr || dims.t0 + dims.T > whole || !skips_tiles(whole, v)) { return; }
    int* first_key = (int*)scratch;
    float* key_norm = scratch + tile_skip_scratch(B, dims.stride, dims.NH) / 2;
    const float tau = LN2 * tile_skip_tau(whole, v.run->tile_skip);
    const Grid grid((size_t)B * dims.NH, ATTENTION_THREADS, 0, stream);
    launch(attention_skip_kernel<Bias>, grid, first_key, key_norm, qkv, bias, dims, tau);
    dims.first_key = first_key;
}

inline bool uses_flash(const PositionConfig&, int) { return false; }
template <bool Causal, class... Arguments> bool choose_forward(const Arguments&...) { return false; }
template <bool Causal, class... Arguments> bool choose_backward(const Arguments&...) { return false; }
LAUNCHER size_t attention_backward_scratch(const PositionConfig&, int B, int T, int NH, int HS) {
    return portable_attention_backward_scratch(B, T, NH, HS) + tile_skip_scratch(B, T, NH);
}
// see live_tile_share
inline double chosen_share(const float* scratch, const PositionView& v, int T, Stream stream) {
    if (!v.causal) { return 1.0; }
    const int tiles = ceil_div(T, ATTENTION_TILE);
    std::vector<int> first_key((size_t)v.NH * tiles);
    copy_to_host(first_key.data(), scratch, sizeof(int) * first_key.size(), stream);
    return tile_share(v.NH * tiles, tiles, true, [&](int x) { return x % tiles + 1 - first_key[x] / ATTENTION_TILE; });
}
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
