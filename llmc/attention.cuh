// attention.cuh -- multi-head attention for every encoding, causal or bidirectional, any head size: which kernels run.
//
// The portable kernels (attention_portable.cuh: mathematics, what is saved) do everything. In CUDA builds the tensor-core
// kernels (attention_flash.cuh) take over where the elements are bf16 and bias and head size are theirs. No T x T buffer exists.
#ifndef LLMC_ATTENTION_CUH
#define LLMC_ATTENTION_CUH

#include "attention_portable.cuh"
#if defined(CUDA_BUILD)
#include "attention_flash_backward.cuh"
#endif

#if defined(CUDA_BUILD)
// Which FlashBias a functor's bias is, and its arrays
template <class Bias> struct FlashOf { static constexpr bool exists = false; };
template <> struct FlashOf<NoBias> {
    static constexpr bool exists = true;
    static constexpr FlashBias kind = FlashBias::None;
    static void fill(FlashArgs&, const NoBias&) {}
};
template <> struct FlashOf<AlibiBias> {
    static constexpr bool exists = true;
    static constexpr FlashBias kind = FlashBias::Linear;
    static void fill(FlashArgs&, const AlibiBias&) {}
};
template <bool LogKernel> struct FlashOf<CableBias<LogKernel>> {
    static constexpr bool exists = true;
    static constexpr FlashBias kind = LogKernel ? FlashBias::LogDistance : FlashBias::Distance;
    static void fill(FlashArgs& p, const CableBias<LogKernel>& bias) {
        p.S_offset = bias.S_offset; p.S_origin = bias.S_origin; p.g = bias.g;
        p.dS = bias.dS; p.dg = bias.dg;
    }
};
template <> struct FlashOf<ToeplitzBias> {
    static constexpr bool exists = true;
    static constexpr FlashBias kind = FlashBias::Toeplitz;
    static void fill(FlashArgs& p, const ToeplitzBias& bias) {
        p.table = bias.table; p.table_zero = bias.T - 1; p.table_entries = bias.ND; p.dtable = bias.dtable;
    }
};
inline FlashArgs flash_args(const AttentionDims& p, int B, const floatX* qkv) {
    FlashArgs f = {};
    f.qkv = (const bf16*)qkv;
    f.B = B; f.T = p.T; f.stride = p.stride; f.NH = p.NH; f.HS = p.HS; f.OC = p.OC; f.scale = p.scale; f.kv_len = p.kv_len;
    return f;
}
// the FlashBias of an encoding; false: it has none
inline bool find_flash_bias(const PositionConfig& position, FlashBias& kind) {
    bool exists = false;
    PositionView v;
    v.config = &position;
    with_position(v, [&](auto p) {
        using Flash = FlashOf<decltype(p.bias())>;
        exists = Flash::exists;
        if constexpr (Flash::exists) { kind = Flash::kind; }
    });
    return exists;
}
// whether attention runs on the tensor cores, and with which bias
inline bool find_flash(const PositionConfig& position, int HS, FlashBias& kind) {
    return sizeof(floatX) == sizeof(bf16) && flash_head_size(HS) && find_flash_bias(position, kind);
}
constexpr int TILE_SKIP_T = 2048;                           // below it, finding the tiles costs about what it saves
inline bool skips_tiles(FlashBias K, int T, const PositionConfig& config) {
    return flash_skips(K) && T >= TILE_SKIP_T && config.tile_skip != TileSkip::Off;
}
// the spans, and two floats for each
inline size_t tile_skip_scratch(int B, int T, int NH) { return (size_t)4 * B * NH * ceil_div(T, FLASH_TILE); }
// f.span, from what qkv holds: the backward finds the forward's
template <bool Causal, FlashBias K> void choose_tiles(FlashArgs& f, float* scratch, const PositionConfig& config, Stream stream) {
    if constexpr (flash_skips(K)) {
        if (scratch == nullptr || !skips_tiles(K, f.T, config)) { return; }
        f.span = (const FlashSpan*)scratch;
        flash_skip<Causal, K>((FlashSpan*)scratch, scratch + tile_skip_scratch(f.B, f.T, f.NH) / 2, f,
                              config.tile_skip == TileSkip::Exact ? 128.0f : flash_skip_tau(f.T), stream);
    }
}
#endif

// floats of scratch that attention_forward wants
inline size_t attention_forward_scratch(int B, int T, int NH) {
#if defined(CUDA_BUILD)
    return tile_skip_scratch(B, T, NH);
#else
    return (void)B, (void)T, (void)NH, 0;
#endif
}

// out (B,T,C), lse (B,NH,v.T) or null, qkv (B,v.T,OC) with q | k | v | the encoding's columns in a row, prepared by it.
// The sequences may end at v.kv_len: the rows behind it are out 0, lse -inf, and the others' bits are as without them.
// scratch: attention_forward_scratch floats, or null: no tiles are skipped
template <bool Causal>
void attention_forward(floatX* out, float* lse, float* scratch, const floatX* qkv, const PositionView& v, int B, int T, int t0, Stream stream) {
    const int BNH = B * v.NH, tiles = (t0 + T - 1) / ATTENTION_TILE - t0 / ATTENTION_TILE + 1;
    with_position(v, [&](auto position) {
        const auto bias = position.bias();
        const AttentionDims p = attention_dims(v, T, t0, position.score_factor(v.T));
        (void)scratch;
#if defined(CUDA_BUILD)
        using Flash = FlashOf<std::decay_t<decltype(bias)>>;
        if constexpr (Flash::exists && sizeof(floatX) == sizeof(bf16)) {
            FlashArgs f = flash_args(p, B, qkv);
            Flash::fill(f, bias);
            f.out = (bf16*)out;
            f.lse = lse;
            if (t0 == 0) { choose_tiles<Causal, Flash::kind>(f, scratch, *v.config, stream); }
            if (t0 == 0 && flash_forward<Causal, Flash::kind>(f, stream)) { return; }
        }
#endif
        launch(attention_forward_kernel<Causal, std::decay_t<decltype(bias)>>,
               Grid((size_t)BNH * tiles, ATTENTION_THREADS, attention_forward_shared(p), stream), out, lse, qkv, bias, p, BNH);
    });
}

// which kernels a model's attention runs on, for the banner
inline std::string attention_description(const PositionConfig& position, int HS) {
#if defined(CUDA_BUILD)
    FlashBias kind;
    if (sizeof(floatX) != sizeof(bf16)) { return "portable kernels, float32"; }
    if (!find_flash_bias(position, kind)) { return "portable kernels: none of the tensor-core kernels knows the bias of " + position.name; }
    if (!flash_head_size(HS)) { return strprintf("portable kernels: the tensor-core kernels want a head size of 64 or 128, this is %d", HS); }
    return "tensor-core kernels, bf16";
#else
    return (void)position, strprintf("portable kernels, float32, head size %d", HS);
#endif
}

// An error where the tiles of the portable kernels do not fit into a block's shared memory, `limit` bytes.
inline void check_head_size(const PositionConfig& position, int HS, bool trains, size_t limit) {
#if defined(CUDA_BUILD)
    FlashBias kind;
    if (find_flash(position, HS, kind)) { return; }
#else
    (void)position;
#endif
    auto wanted = [&](int size) {
        AttentionDims p = {};
        p.HS = size;
        return trains ? attention_backward_shared(p) : attention_forward_shared(p);
    };
    int most = HS;
    while (most > 0 && wanted(most) > limit) { most--; }
    check(most == HS, "--model: heads of %d want %s of shared memory a block in the portable attention, this GPU has %s: at most %d fit; "
          "take more heads", HS, format_bytes((double)wanted(HS)).c_str(), format_bytes((double)limit).c_str(), most);
}

// The share of the tiles (causal: of the causal ones) that the last attention_forward computed for a batch's first sequence, from its
// scratch; 1 where nothing could be skipped.
inline double live_tile_share(const float* scratch, const PositionConfig& position, bool causal, int T, int NH, int HS, Stream stream) {
#if defined(CUDA_BUILD)
    FlashBias kind;
    if (!find_flash(position, HS, kind) || !skips_tiles(kind, T, position)) { return 1.0; }
    std::vector<FlashSpan> span((size_t)NH * ceil_div(T, FLASH_TILE));
    copy_to_host(span.data(), scratch, sizeof(FlashSpan) * span.size(), stream);
    return flash_live_share(span.data(), NH, T, causal);
#else
    return (void)scratch, (void)position, (void)causal, (void)T, (void)NH, (void)HS, (void)stream, 1.0;
#endif
}

// floats of scratch that attention_backward wants
inline size_t attention_backward_scratch(const PositionConfig& position, int B, int T, int NH, int HS) {
    size_t floats = (size_t)B * NH * T * (round_up(HS, LANES) + 1);
#if defined(CUDA_BUILD)
    FlashBias kind;
    if (find_flash_bias(position, kind)) { floats = std::max(floats, flash_backward_scratch(kind, B, T, NH) + tile_skip_scratch(B, T, NH)); }
#else
    (void)position;
#endif
    return floats;
}

// dqkv (B,T,OC): the q, k and v columns are overwritten; the bias functor's sums are complete on return. The rows of dout behind
// v.kv_len are not asked: those of dqkv are 0, and nothing is added to any sum.
// scratch: attention_backward_scratch floats.  dout, out (B,T,C), lse (B,NH,T)
template <bool Causal>
void attention_backward(floatX* dqkv, float* scratch, const floatX* dout, const floatX* qkv, const floatX* out, const float* lse,
                        const PositionView& v, int B, int T, Stream stream) {
    with_position(v, [&](auto position) {
        const auto bias = position.bias();
        const AttentionDims p = attention_dims(v, T, 0, position.score_factor(v.T));
#if defined(CUDA_BUILD)
        using Flash = FlashOf<std::decay_t<decltype(bias)>>;
        if constexpr (Flash::exists && sizeof(floatX) == sizeof(bf16)) {
            FlashArgs f = flash_args(p, B, qkv);
            Flash::fill(f, bias);
            f.out = (bf16*)out; f.lse = (float*)lse; f.dout = (const bf16*)dout; f.dqkv = (bf16*)dqkv;
            choose_tiles<Causal, Flash::kind>(f, scratch + flash_backward_scratch(Flash::kind, B, T, v.NH), *v.config, stream);
            if (flash_backward<Causal, Flash::kind>(f, scratch, stream)) { return; }
        }
#endif
        position.zero_bias_gradient(B, T, stream);          // the tensor-core kernels overwrite instead
        float* D = scratch + (size_t)B * v.NH * T * p.HSp();
        launch(attention_backward_kernel<Causal, std::decay_t<decltype(bias)>>,
               Grid((size_t)B * v.NH, ATTENTION_THREADS, attention_backward_shared(p), stream), dqkv, scratch, D, dout, qkv, out, lse, bias, p);
    });
}

#endif
