// position/none.cuh -- what an encoding is, and the one that does nothing (NoPE: Haviv et al. 2022, Kazemnejad et al. 2023).
//
// An encoding is one struct that derives from NoPosition and overrides what it does, in the order of a step:
//   specs            its parameters, their names in a checkpoint, its activations, the columns it wants from the qkv matmul
//   embed_forward    changes the token embeddings                       embed_backward    (learned, sinusoidal)
//   prepare_forward  rotates q and k, or turns its columns of qkv into  prepare_backward  (rope, cable; tables of t5, kerple)
//                    what its bias needs
//   bias             a functor added to the scaled scores inside the attention kernels; its backward receives da
// plus max_length and score_factor. The functor is the template argument of the attention kernels, so encodings that
// share one (t5, t5_clip, kerple: Toeplitz; none, learned, sinusoidal, rope: NoBias) share the compiled kernels.
#ifndef LLMC_POSITION_NONE_CUH
#define LLMC_POSITION_NONE_CUH

#include <climits>
#include <utility>

#include "../fastmath.h"
#include "../tensor.h"

enum class RopeScaling { None, PI, NTK, YaRN };
enum class TileSkip { Off, Exact, Default };        // tiles of scores that the bias has zeroed: attention_flash.cuh

// What --pos and --rope_scaling say. `values` are the encoding's hyperparameters: stored in config.json, printed at start.
struct PositionConfig {
    int kind = 0;                                           // row of POSITIONS
    std::string name = "none";
    int T_train = 1024;                                     // the length the model is, or was, trained at
    std::vector<std::pair<std::string, double>> values;
    RopeScaling scaling = RopeScaling::None;                // evaluation only, not part of the encoding's identity
    double scaling_factor = 0;                              // 0: max(1, T / T_train)
    TileSkip tile_skip = TileSkip::Default;                 // no part of it either

    double value(const char* key) const {
        for (const auto& kv : values) { if (kv.first == key) { return kv.second; } }
        die(EXIT_BAD_INPUT, "encoding %s has no hyperparameter %s", name.c_str(), key);
    }
};

// The shapes an encoding may depend on, and how the model's checkpoint names its tensors.
struct PositionDims {
    int L = 0, NH = 0, C = 0;
    int B = 0, T = 0;                                       // capacity of the activations (0: only the parameters are asked for)
    bool causal = true, decodes = false;                    // decodes: attention_decode is to run over these activations
    std::string layer_prefix = "transformer.h.", layer_suffix = ".attn.", model_prefix = "transformer.";
    std::string wpe_name = "transformer.wpe.weight";

    std::string layer_name(int l, const std::string& rest) const { return layer_prefix + std::to_string(l) + layer_suffix + rest; }
};

// What an encoding asks for; specs() appends.
struct PositionTables {
    int extra_columns = 0;                                  // of the qkv matmul, after the 3C of q, k and v
    std::vector<TensorSpec> params, acts;                   // all float32 in every build
    std::vector<FileTensor> files;
};

// An encoding bound to one layer of a running model. Arrays over time are (B, NH, T) with the stride T given here, which
// exceeds the tokens of a call while generating.
struct PositionView {
    const PositionConfig* config = nullptr;
    int L = 0, NH = 0, C = 0, HS = 0, layer = 0;
    int B = 0, T = 0;
    int OC = 0;                                             // width of a row of qkv
    bool causal = true;
    const int* kv_len = nullptr;                            // (B) on the device: keys >= kv_len[b] are masked; null: all T keys
    const TensorTable *params = nullptr, *acts = nullptr;
    float *master = nullptr, *grads = nullptr, *act_data = nullptr;

    float* param(const char* name) const { return params->pointer(master, name)(layer); }
    float* grad(const char* name) const { return params->pointer(grads, name)(layer); }   // null while evaluating
    float* act(const char* name) const { return acts->pointer(act_data, name)(layer); }
};

// Decoding takes keys so many at a time, and may leave a split of them out (attention_decode.cuh): where a bias never grows with the
// distance, the longest key of each split is kept as the keys come, to bound the logits of all.
constexpr int DECODE_SPLIT = 256;
inline void add_key_max(const PositionDims& d, const PositionConfig& config, PositionTables& t) {
    if (!d.decodes || config.tile_skip == TileSkip::Off) { return; }
    t.acts.push_back({"key_max", d.L, (size_t)d.B * d.NH, ceil_div((size_t)d.T, (size_t)DECODE_SPLIT), constant(0), false, -FLT_MAX, FLT_MAX,
                      Keep::Cached});
}
// key_max (B*NH,ceil(stride/DECODE_SPLIT)): the largest |k_j|^2 of a split, of the keys up to t0 + T - 1, the last T of them new. One
// block a (batch, head) and split with new keys.
static __global__ void key_max_kernel(float* key_max, const floatX* qkv, int T, int t0, int stride, int NH, int HS, int OC, int BNH) {
    const int bh = blockIdx.x % BNH, split = t0 / DECODE_SPLIT + blockIdx.x / BNH, j0 = split * DECODE_SPLIT;
    const int begin = j0 < t0 ? t0 : j0, end = j0 + DECODE_SPLIT < t0 + T ? j0 + DECODE_SPLIT : t0 + T;
    const floatX* k = qkv + (size_t)(bh / NH) * stride * OC + (NH + bh % NH) * HS;
    key_max += (size_t)bh * ceil_div(stride, DECODE_SPLIT) + split;
    float largest = begin > j0 ? *key_max : 0.0f;
    for (int j = begin + (int)threadIdx.x; j < end; j += blockDim.x) {
        float sum = 0.0f;
        for (int d = 0; d < HS; d++) {
            const float x = (float)k[(size_t)j * OC + d];
            sum += x * x;
        }
        largest = sum <= largest ? largest : sum < INFINITY ? sum : INFINITY;       // a NaN too: such a split is never left out
    }
    largest = block_max(largest);
    if (threadIdx.x == 0) { *key_max = largest; }
}

// The bias functor that adds nothing. Device code; rows and tiles are of one (batch, head) pair bh = b * NH + h.
struct NoBias {
    static constexpr bool has_bias = false, has_gradient = false;
    // The bias inside one tile of the score matrix: tile(bh, i0, j0)(r, c) is B_ij for i = i0 + r, j = j0 + c. Neither the rows
    // nor the columns of a tile cross a multiple of 128. Vectorized over r (forward) or c (backward): no branches, no libm.
    struct Tile { __device__ float operator()(int, int) const { return 0.0f; } };
    __device__ Tile tile(int, int, int) const { return {}; }
    // da (ni, nj), row stride ld: the loss's gradient in the logits of queries i0.. and keys j0.., zero where masked. In
    // shared memory; called by all threads of the one block that owns bh, once a tile, in a fixed order. May overwrite da.
    __device__ void backward(int, int, int, int, int, float*, int) const {}
};

struct NoPosition {
    PositionView v;
    explicit NoPosition(const PositionView& view) : v(view) {}

    static void defaults(PositionConfig&) {}                                // fills `values` from T_train
    static void specs(const PositionDims&, const PositionConfig&, PositionTables&) {}
    static int max_length(const PositionConfig&) { return INT_MAX; }        // longest sequence it can encode

    // x (B,T,C): embeddings of the tokens at t0 .. t0+T-1.  (t0 > 0 only while generating, with B = 1)
    void embed_forward(floatX* x, int B, int T, int t0, Stream) const { (void)x; (void)B; (void)T; (void)t0; }
    void embed_backward(floatX* dx, int B, int T, Stream) const { (void)dx; (void)B; (void)T; }
    // qkv (B,v.T,OC): rows t0 .. t0+T-1 of every sequence are new
    void prepare_forward(floatX* qkv, int B, int T, int t0, Stream) const { (void)qkv; (void)B; (void)T; (void)t0; }
    // dqkv holds the gradients of q, k, v; the bias functor's sums are complete. Overwrites dqkv's extra columns.
    void prepare_backward(floatX* dqkv, const floatX* qkv, int B, int T, Stream) const { (void)dqkv; (void)qkv; (void)B; (void)T; }
    // before the attention's backward: zeroes what the bias functor sums into
    void zero_bias_gradient(int B, int T, Stream) const { (void)B; (void)T; }
    NoBias bias() const { return {}; }
    float score_factor(int T) const { (void)T; return 1.0f; }               // multiplies 1/sqrt(HS)

    // prepare_forward of an encoding with a key_max
    void update_key_max(const floatX* qkv, int B, int T, int t0, Stream stream) const {
        if (v.acts->find("key_max") < 0) { return; }
        const int BNH = B * v.NH, splits = (t0 + T - 1) / DECODE_SPLIT - t0 / DECODE_SPLIT + 1;
        launch(key_max_kernel, Grid((size_t)BNH * splits, T > 32 ? 128 : 32, 0, stream), v.act("key_max"), qkv, T, t0, v.T, v.NH, v.HS, v.OC,
               BNH);
    }
};

#endif
