// position/encoding.cuh -- what a positional encoding is: the struct to derive from, and its bias functor.
//
// An encoding is one struct that derives from Encoding and overrides what it does, in the order of a step:
//   declare          its parameters, its arrays, and the columns it wants from the qkv matmul
//   embed_forward    changes the token embeddings                             embed_backward      (learned, sinusoidal)
//   prepare_forward  rotates q and k, scales q, or turns its columns of qkv   prepare_backward    (rope, ssmax, cable;
//                    into what its bias needs                                           the tables of t5 and kerple)
//   bias             a functor, added to the scaled scores inside the attention kernels; its backward receives dlogit
// and, if need be, defaults, hooks and score_factor. The functor is the template argument of a GPU's attention
// kernels, so encodings that share one (t5, t5_clip, kerple: ToeplitzBias; none, learned, sinusoidal, rope: NoBias)
// share the compiled kernels. alibi.cuh is a small example, cable.cuh the full one; docs/new_encoding.md adds one.
#pragma once

#include <climits>

#include "../base/fastmath.h"
#include "tensors.cuh"

// ----------------------------------------------------------------------------------------------------------
// the bias functor: B_ij in device code. Rows and tiles belong to one (batch, head) pair bh = b * NH + h.

// The forms of B that the tensor-core kernels (attention/flash) know
//   None         0
//   Linear       -slopes[h] |i-j|                                   alibi, alibi_random
//   Distance     -g_i |S_i - S_j|, S non-decreasing                 cable, grape_q
//   LogDistance  -g_i log(1 + (S_i - S_j)^2), or `inside`: -log(1 + (g_i (S_i - S_j))^2)         kcable
//   Toeplitz     table[h][table_zero + j - i]                       t5, kerple, bam, sandwich, alibi_trained
//   Fire         f_h(table[table_zero - |i-j|] inv[max(i,j)]), f_h piecewise linear             fire
//   Unknown      any other (cope, cable_signed, grape_k, grape_qk): attention runs on the portable kernels
enum class FlashBias { None, Linear, Distance, LogDistance, Toeplitz, Fire, Unknown };
// Biases that decay without end, unlike the rest: whole tiles have weights of 0 (flash/bias.cuh, choose_cpu.cuh).
__host__ __device__ constexpr bool flash_skips(FlashBias Kind) {
    return Kind == FlashBias::Linear || Kind == FlashBias::Distance;
}
// Those that the tensor-core kernels multiply by the factors of ssmax, as part of CABLE's g: the rest would need more
// sums in the backward, or a product for each pair
__host__ __device__ constexpr bool flash_takes_factor(FlashBias Kind, bool inside) {
    return Kind == FlashBias::None || Kind == FlashBias::Distance || (Kind == FlashBias::LogDistance && !inside);
}
// of --tile_skip default, in units of log2: T keys that are so far below the largest are less than 2^-24 of a row's sum
__host__ __device__ inline float flash_skip_tau(int T) { return 24.0f + portable_log2f((float)T); }
// The share of the tiles (causal: of the causal ones) that is computed. rows: tiles of queries, `tiles` of them in each
// head; live(x): how many tiles of keys row x meets
template <class Live> double tile_share(int rows, int tiles, bool causal, Live live) {
    double computed = 0.0, all = 0.0;
    for (int x = 0; x < rows; x++) {
        all += causal ? x % tiles + 1 : tiles;
        computed += live(x);
    }
    return all > 0.0 ? computed / all : 1.0;
}

// A piece of Fire's f: value + slope y up to y = end, where the slope grows by bend
struct alignas(16) FirePiece {
    float value, slope, end, bend;
};

constexpr int CABLE_CHUNK = 128;                        // tokens whose S counts from one origin (cable.cuh)

// What those kernels read of a bias, and where they leave its gradients; each form uses its own part.
struct FlashBiasArgs {
    const float* slopes;                    // (NH), Linear
    const float *S_offset, *g;              // (B*NH,stride), Distance and LogDistance; S as in cable.cuh
    const double* S_origin;                 // (B*NH,ceil(stride/128))
    bool inside;                            // LogDistance: g is inside the logarithm
    const float* table;                     // (NH,table_entries), Toeplitz
    int table_zero, table_entries;          // the column of i = j; columns outside the table read its nearest end
    const FirePiece* pieces;                // (NH,33), Fire; its table is one row, ascending towards both ends
    const float* inv;                       // (T+128), descending
    const float *dpsi, *dnorm;              // as the table, (2,T+128): derivatives, position/fire.cuh
    float *dS, *dg;                         // (B*NH,stride), overwritten, before the suffix sum
    float* dtable;                          // (B*NH,table_entries), overwritten
    double* sums;                           // Fire: (B*NH,FIRE_SLOTS,33,4); the first slots are overwritten
    const float* factor;                    // (B*NH,stride), null: 1. B is multiplied by it; Distance, LogDistance
    float* moment;                          // (B*NH,stride), as in PositionView; overwritten
};

// A tile of pairs: the queries i0 .. i0+ni-1 and the keys j0 .. j0+nj-1 of a sequence
struct PairRange { int i0, ni, j0, nj; };

// To derive a functor from; being an aggregate, its initializer then begins with {} for this base. It has a member
// tile(bh, i0, j0), which returns the bias inside one tile of the score matrix: an object whose (r, c) is B_ij for i =
// i0 + r, j = j0 + c. Neither the rows nor the columns of a tile cross a multiple of 128. It is vectorized over r
// (forward) or c (backward): no branches, no libm.
struct BiasFunctor {
    static constexpr FlashBias flash = FlashBias::Unknown;  // or the form it has; fill() then says with which arrays
    static constexpr bool counts_gates = false;             // B depends on the scores of other keys: only cope.cuh
    void fill(FlashBiasArgs&) const {}
    // dlogit (ni, nj), row stride ld: the gradient of the loss in the logits of queries i0.. and keys j0.., zero where
    // masked. In shared memory; called by all threads of the one block that owns bh, once per tile, in a fixed order.
    // May overwrite dlogit. The default is right where nothing is learned.
    __device__ void backward(int, int, int, int, int, float*, int) const {}
};

// B = 0
struct NoBias : BiasFunctor {
    static constexpr FlashBias flash = FlashBias::None;
    struct Tile { __device__ float operator()(int, int) const { return 0.0f; } };
    __device__ Tile tile(int, int, int) const { return {}; }
};

// ----------------------------------------------------------------------------------------------------------
// the encoding: what does nothing unless it is overridden

// What an encoding changes. Encodings of one layer must change different things.
enum PositionHook { CHANGES_EMBEDDINGS = 1, TURNS_QK = 2, ADDS_BIAS = 4, SCALES_Q = 8, COUNTS_GATES = 16 };

struct Encoding {
    static constexpr int hooks = 0;                         // which of the three that are no bias it changes
    static constexpr bool has_relu = false;                 // whether its S (cable.cuh) stands still at a closed ReLU
    PositionView v;
    float* key_max = nullptr;                               // see declare_key_max

    explicit Encoding(const PositionView& view) : v(view) {}

    static Hyperparameters defaults(int /*T_train*/) { return {}; }
    template <class Tensors> void declare(Tensors&) {}

    // x (B,T,C): embeddings of the tokens at t0 .. t0+T-1. t0 > 0 only while generating, with B = 1
    void embed_forward(floatX*, int /*B*/, int /*T*/, int /*t0*/, Stream) const {}
    void embed_backward(floatX* /*dx*/, int /*B*/, int /*T*/, Stream) const {}
    // qkv (B,v.stride,OC): rows t0 .. t0+T-1 of every sequence are new
    void prepare_forward(floatX* /*qkv*/, int /*B*/, int /*T*/, int /*t0*/, Stream) const {}
    // before the attention's backward, with its qkv: zeroes what the bias functor sums into
    void begin_backward(const floatX* /*qkv*/, int /*B*/, int /*T*/, Stream) const {}
    // before the splits of keys of a token at t0 are read (attention/decode.cuh); scale: of q.k
    void begin_decode(const floatX* /*qkv*/, int /*B*/, int /*t0*/, int /*splits*/, float /*scale*/, Stream) const {}
    // dqkv holds the gradients of q, k, v; the bias functor's sums are complete. Overwrites dqkv's extra columns.
    void prepare_backward(floatX* /*dqkv*/, const floatX* /*qkv*/, int /*B*/, int /*T*/, Stream) const {}
    NoBias bias() const { return {}; }
    float score_factor(int /*T*/) const { return 1.0f; }                    // multiplies 1/sqrt(HS)
};

// The encoding, its pointers set
template <class Type> Type bind_encoding(const PositionView& view) {
    Type encoding(view);
    PositionBinder binder(view);
    encoding.declare(binder);
    return encoding;
}

// No positional encoding (NoPE: Haviv et al. 2022, Kazemnejad et al. 2023). The causal mask still tells a model
// something about positions.
struct NoPosition : Encoding {
    using Encoding::Encoding;
};

// ----------------------------------------------------------------------------------------------------------
// the largest norm of a key in each split of a text, updated with each new key
//
// Decoding reads the keys in splits, and skips those whose logits cannot matter (attention/decode.cuh). If a bias never
// grows with the distance (alibi, cable), the largest norm in a split and the bias of its last key bound all of its
// logits.

constexpr int DECODE_SPLIT = 256;       // keys

// key_max (B*NH,ceil(stride/DECODE_SPLIT)): the largest |k_j|^2 of each split, over the keys up to t0 + T - 1. The last
// T of them are new. One block per (batch, head) and split with new keys.
static __global__ void key_max_kernel(float* key_max, const floatX* qkv, QkvShape shape, int T, int t0, int BNH) {
    const auto [stride, NH, HS, OC] = shape;
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
inline void update_key_max(const Encoding& e, const floatX* qkv, int B, int T, int t0, Stream stream) {
    if (e.key_max == nullptr) { return; }
    const PositionView& v = e.v;
    const int BNH = B * v.NH;
    const int splits = (t0 + T - 1) / DECODE_SPLIT - t0 / DECODE_SPLIT + 1;
    const Grid grid((size_t)BNH * splits, T > 32 ? 128 : 32, 0, stream);
    launch(key_max_kernel, grid, e.key_max, qkv, v.qkv_shape(v.stride), T, t0, BNH);
}

// ----------------------------------------------------------------------------------------------------------
// how rope and ssmax walk over the heads of q and k: a block has HEAD_TOKENS tokens of a sequence, up to HEAD_LANES
// neighbouring threads share a head, and each of them takes packs of P channels

constexpr int HEAD_TOKENS = 8;
constexpr int HEAD_LANES = 8;

struct HeadWalk {
    size_t b;               // the block's sequence
    int t, tokens;          // its tokens: t .. t + tokens - 1 of the call's
    int lanes, lane;        // threads of a head, and which of them this is
    int first, step;        // its heads: for (int r = first; r < tokens * (heads of a token); r += step)

    // T: tokens of a sequence; packs: of a head
    __device__ HeadWalk(int T, int packs) {
        const int parts = ceil_div(T, HEAD_TOKENS);
        b = blockIdx.x / parts;
        t = (int)(blockIdx.x % parts) * HEAD_TOKENS;
        tokens = imin(HEAD_TOKENS, T - t);
        lanes = imin(packs, imin((int)blockDim.x, HEAD_LANES));
        lane = threadIdx.x % lanes;
        step = blockDim.x / lanes;
        const int group = threadIdx.x / lanes;
        first = group < step ? group : INT_MAX;             // surplus threads have none
    }
};

// f(i, h, sum) for each token i and head h of the block. sum: of what the threads of that head have left in parts
// (tokens,NH,lanes), in shared memory, in their order
template <class F> __device__ inline void sum_lanes(const float* parts, const HeadWalk& walk, int NH, F f) {
    __syncthreads();
    for (int k = threadIdx.x; k < walk.tokens * NH; k += blockDim.x) {
        const int i = k % walk.tokens;                      // neighbouring threads store neighbouring tokens
        const int h = k / walk.tokens;
        const float* part = parts + (i * NH + h) * walk.lanes;
        float sum = part[0];
        for (int lane = 1; lane < walk.lanes; lane++) { sum += part[lane]; }
        f(i, h, sum);
    }
}

// floats: of dynamic shared memory
inline Grid head_grid(int B, int T, size_t floats, Stream stream, const char* file = __builtin_FILE(),
                      int line = __builtin_LINE()) {
    return Grid((size_t)B * ceil_div(T, HEAD_TOKENS), 256, sizeof(float) * floats, stream, file, line);
}
