// attention/decode.cuh -- attention of one new token a sequence over all the tokens before it, for every encoding.
//
//   a_j = scale q.k_j + B_j     P = softmax_j(a)     out = P v          of the query at t0, over the keys 0 .. t0 of the cache
//   The keys are cut into splits, so that one query fills the machine too (Flash-Decoding: Dao et al. 2023). A split s leaves
//     m_s = max a_j,  l_s = sum e^(a_j - m_s),  O_s = sum e^(a_j - m_s) v_j     and then, in the order of s and in float32,
//     out = sum_s e^(m_s - M) O_s / sum_s e^(m_s - M) l_s,  M = max m_s.
//
// The window: B_j that never grows with the distance (alibi, cable) soon is so low that a split adds nothing. With the longest key
// of each split kept (key_max, position/key_max.cuh) and j the last key of split s, all its logits are below |scale q| max|k| + B_j.
// Where this is tau below the logit of the query's own key, whose bias is 0, the split is not read and weighs 0: what decoding costs
// no longer grows with the text. tau = 128 ln 2: the split's weight would have been 0 in float32 too (fast_exp: below e^-87.3; the
// 1.4 between them is for rounding), no bit differs. tau = (24 + log2 t0) ln 2: what is lost of the sum is below 2^-24 of it.
//
// A key or value is read once and used once, so nothing is staged: a row is cut into pieces, of 16 bytes where floatX has two,
// and neighbouring threads take neighbouring pieces. Where the splits lie depends on t0 alone, so the bits do too.
#ifndef LLMC_ATTENTION_DECODE_CUH
#define LLMC_ATTENTION_DECODE_CUH

#include "../position/key_max.cuh"
#include "../position/table.h"

constexpr int DECODE_THREADS = 128;
constexpr int DECODE_TILE = 128;                            // as wide as a bias functor's tile may be
constexpr int DECODE_PIECE = LANES > 1 ? 2 * LANES : 8;
constexpr int DECODE_WINDOW_SPLITS = 3;                     // fewer are not worth asking
constexpr int DECODE_AHEAD = 8;                             // rows, of prefetching
// Row stride of the partial dot products. A warp writes those of its keys and pieces; 4 more than a multiple of the 32 banks
// keeps them apart where a row is 8 pieces.
constexpr int DECODE_LD = DECODE_SPLIT + 4;
static_assert(DECODE_TILE % DECODE_THREADS == 0 && DECODE_SPLIT % DECODE_TILE == 0, "a key belongs to one thread");
static_assert(DECODE_SPLIT % LANES == 0, "the last register of a split stays inside it");

struct DecodeDims {
    int t0, splits, stride, NH, HS, OC;
    float scale, tau;
    const float* key_max;                                   // (BNH,ceil(stride/DECODE_SPLIT)) or null: no split is left out
};

// DECODE_PIECE elements of a row, as float32
struct DecodePiece { lanes x[DECODE_PIECE / LANES]; };

// The first n of them, then zeros. Never reads behind n: there may be no memory.
__device__ __forceinline__ DecodePiece load_piece(const float* p, int n) {
    DecodePiece piece;
    UNROLL
    for (int r = 0; r < DECODE_PIECE / LANES; r++) {
        if ((r + 1) * LANES <= n) { piece.x[r] = load_lanes(p + r * LANES); continue; }
        float rest[LANES] = {};
        for (int e = r * LANES; e < n; e++) { rest[e - r * LANES] = p[e]; }
        piece.x[r] = load_lanes(rest);
    }
    return piece;
}
#if defined(CUDA_BUILD)
struct alignas(16) DecodeWords { uint32_t w[4]; };
__device__ __forceinline__ DecodePiece load_piece(const bf16* p, int n) {
    DecodePiece piece;
    if (n >= DECODE_PIECE && (size_t)p % 16 == 0) {
        const DecodeWords words = *(const DecodeWords*)p;
        UNROLL
        for (int i = 0; i < 4; i++) {                       // a bf16 is the upper half of a float32
            piece.x[2 * i] = bits_to_float((int32_t)(words.w[i] << 16));
            piece.x[2 * i + 1] = bits_to_float((int32_t)(words.w[i] & 0xffff0000u));
        }
        return piece;
    }
    UNROLL
    for (int e = 0; e < DECODE_PIECE; e++) { piece.x[e] = e < n ? (float)p[e] : 0.0f; }
    return piece;
}
#endif

// Asks for a piece that is loaded soon: a head's rows lie too far apart for a CPU to guess the next one.
__device__ __forceinline__ void prefetch_piece(const floatX* p) {
#if defined(CUDA_BUILD)
    (void)p;
#else
    for (int e = 0; e < DECODE_PIECE; e += 16) { __builtin_prefetch(p + e); }
#endif
}

__device__ __forceinline__ float piece_dot(const DecodePiece& a, const DecodePiece& b) {
    lanes sum = a.x[0] * b.x[0];
    UNROLL
    for (int r = 1; r < DECODE_PIECE / LANES; r++) { sum += a.x[r] * b.x[r]; }
    float s[LANES], total = 0.0f;
    store_lanes(s, sum);
    UNROLL
    for (int i = 0; i < LANES; i++) { total += s[i]; }
    return total;
}

// the largest of s (n), n > 0, known to all threads; s has room for whole registers
__device__ inline float decode_max(float* s, int n) {
    for (int c = n + (int)threadIdx.x; c < round_up(n, LANES); c += blockDim.x) { s[c] = -INFINITY; }
    lanes largest = lanes{} - INFINITY;
    for (int c = threadIdx.x * LANES; c < n; c += blockDim.x * LANES) {
        const lanes x = load_lanes(s + c);
        largest = x > largest ? x : largest;
    }
    float l[LANES], m = -INFINITY;
    store_lanes(l, largest);
    for (int i = 0; i < LANES; i++) { m = l[i] > m ? l[i] : m; }
    return block_max(m);
}

// Whether all logits are below `own`, the one of the query's own key, by more than tau. query: scaled; key_max: the largest |k|^2 of
// the keys, bias: the largest of theirs. A NaN says no.
__device__ inline bool decode_outside_window(const float* query, const floatX* own_key, int HS, float key_max, float bias, float tau) {
    float norm = 0.0f, own = 0.0f;
    for (int d = threadIdx.x; d < HS; d += blockDim.x) {
        norm += query[d] * query[d];
        own += query[d] * (float)own_key[d];
    }
    norm = block_sum(norm);
    own = block_sum(own);
    return sqrtf(norm) * sqrtf(key_max) + bias < own - tau;
}

inline size_t attention_decode_shared(int HS) {
    const size_t parts = (size_t)ceil_div(HS, DECODE_PIECE), workers = parts > DECODE_THREADS ? parts : DECODE_THREADS;
    return sizeof(float) * (parts * DECODE_PIECE + parts * DECODE_LD + workers * DECODE_PIECE);
}

// One block a split of the keys of one (batch, head): partial (BNH,splits,HS+2) = O_s, m_s, l_s
template <class Bias>
__global__ void attention_decode_kernel(float* partial, const floatX* qkv, Bias bias, DecodeDims p, int BNH) {
    const int HS = p.HS, C = p.NH * HS, parts = ceil_div(HS, DECODE_PIECE), width = parts * DECODE_PIECE;
    const int groups = (int)blockDim.x > parts ? (int)blockDim.x / parts : 1;
    const int bh = blockIdx.x % BNH, split = blockIdx.x / BNH, j0 = split * DECODE_SPLIT;
    const int n = DECODE_SPLIT < p.t0 + 1 - j0 ? DECODE_SPLIT : p.t0 + 1 - j0;
    float *query = dynamic_shared(), *s = query + width, *O = s + parts * DECODE_LD;
    const floatX* q = qkv + (size_t)(bh / p.NH) * p.stride * p.OC + bh % p.NH * HS;
    const floatX *k = q + (size_t)j0 * p.OC + C, *v = k + C;
    q += (size_t)p.t0 * p.OC;
    partial += ((size_t)bh * p.splits + split) * (HS + 2);

    for (int d = threadIdx.x; d < width; d += blockDim.x) { query[d] = d < HS ? p.scale * (float)q[d] : 0.0f; }
    __syncthreads();
    if (p.key_max != nullptr && split + 1 < p.splits) {     // the last one has the query's own key
        const int tile = (n - 1) / DECODE_TILE * DECODE_TILE;
        const float nearest = bias.tile(bh, p.t0, j0 + tile)(0, n - 1 - tile), longest = p.key_max[(size_t)bh * ceil_div(p.stride, DECODE_SPLIT) + split];
        if (decode_outside_window(query, q + C, HS, longest, nearest, p.tau)) {
            if (threadIdx.x == 0) {
                partial[HS] = -INFINITY;
                partial[HS + 1] = 0.0f;
            }
            return;
        }
    }
    // 1. a piece of a dot product a thread: s (parts,DECODE_LD)
    for (int c = threadIdx.x / parts, part = threadIdx.x % parts; c < n;) {
        const int d = part * DECODE_PIECE, ahead = c + DECODE_AHEAD < n ? c + DECODE_AHEAD : n - 1;
        prefetch_piece(k + (size_t)ahead * p.OC + d);
        prefetch_piece(v + (size_t)c * p.OC + d);
        s[part * DECODE_LD + c] = piece_dot(load_piece(query + d, DECODE_PIECE), load_piece(k + (size_t)c * p.OC + d, HS - d));
        c += blockDim.x / parts;
        part += blockDim.x % parts;
        if (part >= parts) {
            part -= parts;
            c++;
        }
    }
    __syncthreads();
    // 2. from here to the values a key is one thread's: logits, then their exponentials, in the first row of s
    for (int part = 1; part < parts; part++) {
        SIMD
        for (int c = threadIdx.x; c < n; c += blockDim.x) { s[c] += s[part * DECODE_LD + c]; }
    }
    for (int c0 = 0; c0 < n; c0 += DECODE_TILE) {
        const auto tile = bias.tile(bh, p.t0, j0 + c0);
        const int end = DECODE_TILE < n - c0 ? DECODE_TILE : n - c0;
        SIMD
        for (int c = threadIdx.x; c < end; c += blockDim.x) { s[c0 + c] += tile(0, c); }
    }
    const float m = decode_max(s, n), from = m > -INFINITY ? m : 0.0f;      // a split without a finite logit weighs nothing
    float sum = 0.0f;
    SIMD
    for (int c = threadIdx.x; c < n; c += blockDim.x) {
        const float e = fast_exp(s[c] - from);
        s[c] = e;
        sum += e;
    }
    sum = block_sum(sum);
    __syncthreads();
    // 3. a piece of every groups-th value a thread: O (groups,width)
    for (int w = threadIdx.x; w < parts * groups; w += blockDim.x) {
        const int group = w / parts, d = w % parts * DECODE_PIECE;
        DecodePiece o = {};
        for (int c = group; c < n; c += groups) {
            const DecodePiece x = load_piece(v + (size_t)c * p.OC + d, HS - d);
            UNROLL
            for (int r = 0; r < DECODE_PIECE / LANES; r++) { o.x[r] += s[c] * x.x[r]; }
        }
        UNROLL
        for (int r = 0; r < DECODE_PIECE / LANES; r++) { store_lanes(O + group * width + d + r * LANES, o.x[r]); }
    }
    __syncthreads();
    for (int d = threadIdx.x; d < HS; d += blockDim.x) {
        float o = 0.0f;
        for (int group = 0; group < groups; group++) { o += O[group * width + d]; }
        partial[d] = o;
    }
    if (threadIdx.x == 0) {
        partial[HS] = m;
        partial[HS + 1] = sum;
    }
}

// One block a (batch, head). O_s of a split that weighs nothing may not have been written.
static __global__ void attention_decode_combine_kernel(floatX* out, const float* partial, int splits, int HS) {
    float* weight = dynamic_shared();                       // (splits)
    const size_t row = (size_t)HS + 2;
    partial += (size_t)blockIdx.x * splits * row;
    out += (size_t)blockIdx.x * HS;
    float m = -INFINITY;
    for (int s = threadIdx.x; s < splits; s += blockDim.x) { m = partial[s * row + HS] > m ? partial[s * row + HS] : m; }
    m = block_max(m);
    float sum = 0.0f, first = (float)splits;                // the first split that weighs something
    for (int s = threadIdx.x; s < splits; s += blockDim.x) {
        weight[s] = fast_exp(partial[s * row + HS] - m);
        sum += weight[s] * partial[s * row + HS + 1];
        if (weight[s] != 0.0f && s < first) { first = (float)s; }
    }
    sum = block_sum(sum);
    first = -block_max(-first);
    __syncthreads();
    for (int d = threadIdx.x; d < HS; d += blockDim.x) {
        float o = 0.0f;
        for (int s = (int)first; s < splits; s++) { o = weight[s] != 0.0f ? o + weight[s] * partial[s * row + d] : o; }
        out[d] = (floatX)(o / sum);
    }
}

// floats of scratch that attention_decode wants at any t0 < stride
inline size_t attention_decode_scratch(int B, int stride, int NH, int HS) {
    return (size_t)B * NH * ceil_div(stride, DECODE_SPLIT) * (HS + 2);
}

// Which window p.t0 has: its tau and the key_max that the encoding keeps, if it keeps one
inline void choose_window(DecodeDims& p, const Encoding& encoding) {
    const TileSkip skip = encoding.v.config->tile_skip;
    if (skip == TileSkip::Off || p.splits < DECODE_WINDOW_SPLITS || encoding.key_max == nullptr) { return; }
    p.key_max = encoding.key_max;
    p.tau = 0.693147181f * (skip == TileSkip::Exact ? 128.0f : 24.0f + (float)std::log2((double)p.t0));
}

// out (B,C), qkv (B,v.T,OC) prepared by the encoding up to row t0; what lies behind that row is not read.
// scratch: attention_decode_scratch floats. The same as attention_forward<true> of one token, but for the order of its sums.
inline void attention_decode(floatX* out, const floatX* qkv, float* scratch, const PositionView& v, int B, int t0, Stream stream) {
    const int BNH = B * v.NH, splits = ceil_div(t0 + 1, DECODE_SPLIT);
    with_position(v, [&](auto position) {
        const auto bias = position.bias();
        DecodeDims p = {t0, splits, v.T, v.NH, v.HS, v.OC, position.score_factor(v.T) / sqrtf((float)v.HS), 0.0f, nullptr};
        choose_window(p, position);
        launch(attention_decode_kernel<std::decay_t<decltype(bias)>>,
               Grid((size_t)BNH * splits, DECODE_THREADS, attention_decode_shared(v.HS), stream), scratch, qkv, bias, p, BNH);
    });
    launch(attention_decode_combine_kernel, Grid((size_t)BNH, DECODE_THREADS, sizeof(float) * splits, stream), out, scratch, splits, v.HS);
}

#endif
