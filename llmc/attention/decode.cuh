// attention/decode.cuh -- attention of one new token per sequence to all tokens up to itself, for any encoding.
//
//   logit_j = scale q.k_j + f B_j     P = softmax_j(logit)     out = P v     for the query at t0, over the keys 0 .. t0
//   The keys are cut into splits, so that one query fills the machine too (Flash-Decoding: Dao et al. 2023). Split s
//   leaves
//     m_s = max logit_j,  l_s = sum e^(logit_j - m_s),  O_s = sum e^(logit_j - m_s) v_j
//   and then, in the order of s and in float32,
//     M = max m_s,  out = sum_s e^(m_s - M) O_s / sum_s e^(m_s - M) l_s          docs/attention.md, "One new token"
//
// The window: where B_j never grows with the distance (alibi, cable), the bound of flash/bias.cuh holds for a split as
// for a tile, with its longest key from key_max (position/encoding.cuh). A split whose bound is more than tau below the
// logit of the query's own key is not read and weighs 0: the cost of a token no longer grows with the text.
// tau = 128 ln 2 changes no bit: fast_exp returns 0 below -87.3, and the 1.4 between them is for rounding.
// tau = (24 + log2 t0) ln 2: the sum loses less than 2^-24 of itself.
//
// Each key and value is used once, so nothing is staged: neighbouring threads load neighbouring pieces of a row, of 16
// bytes in bf16. The splits, and so the bits, depend only on t0.
#pragma once

#include "choose.cuh"

// floats of scratch that attention_decode needs at any t0 < stride
inline size_t attention_decode_scratch(int B, int stride, int NH, int HS) {
    return (size_t)B * NH * ceil_div(stride, DECODE_SPLIT) * (HS + 2);
}

// out (B,C), qkv (B,v.stride,OC) prepared by the encoding up to row t0; the rows after it are not read.
// scratch: attention_decode_scratch floats. As causal attention_forward with T = 1, in another order of sums.
void attention_decode(floatX* out, const floatX* qkv, float* scratch, const PositionView& v, int B, int t0,
                      Stream stream);

// floats of scratch that attention needs
inline size_t attention_scratch(int B, int stride, int NH, int HS) {
    return std::max(attention_forward_scratch(B, stride, NH), attention_decode_scratch(B, stride, NH, HS));
}
// Causal attention of T new tokens per sequence; by attention_decode for a single token that continues a text.
inline void attention(floatX* out, float* lse, float* scratch, const floatX* qkv, const PositionView& v, int B, int T,
                      int t0, Stream stream) {
    if (T == 1 && t0 > 0) { return attention_decode(out, qkv, scratch, v, B, t0, stream); }
    attention_forward<Mask::Causal>(out, lse, scratch, qkv, v, B, T, t0, stream);
}

#if !defined(KERNELS_ELSEWHERE)
constexpr int DECODE_THREADS = ON_GPU ? 128 : 1;
constexpr int DECODE_PIECE = LANES > 1 ? 2 * WAYS : 8;      // elements of a row that are loaded together
constexpr int DECODE_WINDOW_SPLITS = 3;                     // with fewer, looking for a window costs more than it saves
constexpr int DECODE_AHEAD = 8;                             // rows to prefetch ahead
// Row stride of the partial dot products: 4 more than a multiple of the 32 banks, so that a warp's 4 keys of 8 pieces
// each go to 32 different banks.
constexpr int DECODE_LD = DECODE_SPLIT + 4;
static_assert(DECODE_TILE % DECODE_THREADS == 0 && DECODE_SPLIT % DECODE_TILE == 0, "a key belongs to one thread");
static_assert(DECODE_SPLIT % LANES == 0, "the last register of a split stays inside it");

struct DecodeDims : AttentionDims { // of one query, at t0
    const float* key_max;           // (BNH,ceil(stride/DECODE_SPLIT)) or null: no split is left out
    bool exact;                     // the window changes no bit
};

// The number of splits of the keys 0 .. t0
__host__ __device__ inline int decode_splits(int t0) { return t0 / DECODE_SPLIT + 1; }

// DECODE_PIECE elements of a row, as float32
struct DecodePiece {
    lanes x[DECODE_PIECE / LANES];
};

// A piece of n elements, then zeros. Reads nothing after n: there may be no memory.
template <class T> __device__ __forceinline__ DecodePiece load_piece(const T* p, int n) {
    DecodePiece piece;
    if constexpr (ON_GPU && sizeof(T) == 2) {
        if (n >= DECODE_PIECE && (size_t)p % 16 == 0) { return bits_as<DecodePiece>(load_pack<DECODE_PIECE>(p)); }
    }
    UNROLL
    for (int r = 0; r < DECODE_PIECE / LANES; r++) {
        if ((r + 1) * LANES <= n) { piece.x[r] = load_lanes(p + r * LANES); continue; }
        float rest[LANES] = {};
        for (int e = r * LANES; e < n; e++) { rest[e - r * LANES] = (float)p[e]; }
        piece.x[r] = load_lanes(rest);
    }
    return piece;
}

// Prefetches a piece: a head's rows are too far apart for a CPU to predict the next load.
__device__ __forceinline__ void prefetch_piece(const floatX* p) {
    for (int e = 0; e < DECODE_PIECE; e += 16) { prefetch(p + e); }
}

// the dot product of two pieces: on a CPU 16 sums, each of every 16th element, are added in their order
__device__ __forceinline__ float piece_dot(const DecodePiece& a, const DecodePiece& b) {
    constexpr int SUMS = LANES > 1 ? WAYS : 1, STEP = SUMS / LANES;
    float s[SUMS], total = 0.0f;
    UNROLL
    for (int r = 0; r < STEP; r++) {
        lanes sum = a.x[r] * b.x[r];
        UNROLL
        for (int n = r + STEP; n < DECODE_PIECE / LANES; n += STEP) { sum += a.x[n] * b.x[n]; }
        store_lanes(s + r * LANES, sum);
    }
    UNROLL
    for (int i = 0; i < SUMS; i++) { total += s[i]; }
    return total;
}

// the largest of n > 0 scores, known to all threads; there is room for whole registers
__device__ inline float decode_max(float* scores, int n) {
    for (int c = n + (int)threadIdx.x; c < round_up(n, LANES); c += blockDim.x) { scores[c] = -INFINITY; }
    lanes largest = lanes{} - INFINITY;
    for (int c = threadIdx.x * LANES; c < n; c += blockDim.x * LANES) {
        const lanes x = load_lanes(scores + c);
        largest = x > largest ? x : largest;
    }
    float l[LANES], m = -INFINITY;
    store_lanes(l, largest);
    for (int i = 0; i < LANES; i++) { m = l[i] > m ? l[i] : m; }
    return block_max(m);
}

// Whether all logits of a split are more than tau below the logit of the query's own key. query: scaled; key_max, bias:
// the split's largest |k|^2 and B. False for a NaN.
__device__ inline bool decode_outside_window(const float* query, const floatX* own_key, int HS, float key_max,
                                             float bias, float tau) {
    const auto sums = sums_over<2>(threadIdx.x, HS, blockDim.x, [&](float* s, int d) {
        s[0] += query[d] * query[d];
        s[1] += query[d] * (float)own_key[d];
    });
    const float norm = block_sum(sums.x[0]), own = block_sum(sums.x[1]);
    return sqrtf(norm) * sqrtf(key_max) + bias < own - tau;
}

// How a block divides a row, and the sizes, in floats, of its arrays in shared memory
struct DecodeShared {
    int parts;                      // pieces of a row
    int groups;                     // of threads; each group takes whole rows
    int query, scores, O;           // O is also the room of add_row_bias
};
__host__ __device__ inline DecodeShared decode_shared(int HS, int threads) {
    const int parts = ceil_div(HS, DECODE_PIECE);
    const int width = parts * DECODE_PIECE;
    const int groups = imax(threads / parts, 1);
    return {parts, groups, width, parts * DECODE_LD, imax(groups * width, DECODE_SPLIT)};
}

// scores (parts,DECODE_LD) = query k^T, one piece of one of the nj keys per thread at a time. v: values to prefetch
__device__ __forceinline__ void decode_scores(float* scores, const float* query, const floatX* k, const floatX* v,
                                              int nj, int HS, int OC) {
    const int parts = ceil_div(HS, DECODE_PIECE);
    int part = threadIdx.x % parts;
    for (int c = threadIdx.x / parts; c < nj;) {
        const int d = part * DECODE_PIECE;
        const int ahead = imin(c + DECODE_AHEAD, nj - 1);
        prefetch_piece(k + (size_t)ahead * OC + d);
        prefetch_piece(v + (size_t)c * OC + d);
        const DecodePiece key = load_piece(k + (size_t)c * OC + d, HS - d);
        scores[part * DECODE_LD + c] = piece_dot(load_piece(query + d, DECODE_PIECE), key);
        c += blockDim.x / parts;                            // this thread's next piece: blockDim.x pieces further
        part += blockDim.x % parts;
        if (part >= parts) {
            part -= parts;
            c++;
        }
    }
}

// One block per split of the keys of one (batch, head): partial (BNH,splits,HS+2) = O_s, m_s, l_s.
template <class Bias>
__global__ void attention_decode_kernel(float* partial, const floatX* qkv, Bias bias, DecodeDims dims, int BNH) {
    const int HS = dims.HS;
    const DecodeShared shared = decode_shared(HS, blockDim.x);
    const int parts = shared.parts;
    const int groups = shared.groups;
    const int width = shared.query;
    const int bh = blockIdx.x % BNH;
    const int split = blockIdx.x / BNH;
    const int j0 = split * DECODE_SPLIT;
    const int t0 = dims.t0;
    const int splits = decode_splits(t0);
    const int nj = imin(DECODE_SPLIT, t0 + 1 - j0);         // keys of this split
    float* query = dynamic_shared();                        // (width): scale q
    float* scores = query + shared.query;                   // (parts,DECODE_LD): parts of the scores; row 0 becomes P
    float* O = scores + shared.scores;                      // (groups,width): P v of every groups-th key
    const floatX* q = qkv + (size_t)(bh / dims.NH) * dims.stride * dims.OC + bh % dims.NH * HS;
    const floatX* k = q + (size_t)j0 * dims.OC + dims.C();
    const floatX* v = k + dims.C();
    const AttentionMask mask = dims.mask.of((size_t)(bh / dims.NH), dims.stride);
    const int begin = mask.begin(t0);                       // of the query's document
    q += (size_t)t0 * dims.OC;
    const float factor = dims.factor == nullptr ? 1.0f : *dims.factors(bh, t0);         // of B
    partial += ((size_t)bh * splits + split) * (HS + 2);

    // the query, padded with zeros to whole pieces
    for (int d = threadIdx.x; d < width; d += blockDim.x) { query[d] = d < HS ? dims.scale * (float)q[d] : 0.0f; }
    __syncthreads();
    // 1. outside the window the split weighs nothing, and O_s is not written. The last split has the query's own key
    bool outside = mask.exists() && mask.hides_all(t0, t0 + 1, j0, j0 + nj, begin);
    if (!outside && dims.key_max != nullptr && splits >= DECODE_WINDOW_SPLITS && split + 1 < splits) {
        const int tile = (nj - 1) / DECODE_TILE * DECODE_TILE;
        const float nearest = factor * bias.tile(bh, t0, j0 + tile)(0, nj - 1 - tile);     // the split's largest bias
        const float longest = dims.key_max[(size_t)bh * ceil_div(dims.stride, DECODE_SPLIT) + split];
        const float tau = LN2 * (dims.exact ? 128.0f : flash_skip_tau(t0));
        outside = decode_outside_window(query, q + dims.C(), HS, longest, nearest, tau);
    }
    if (outside) {
        if (threadIdx.x == 0) {
            partial[HS] = -INFINITY;
            partial[HS + 1] = 0.0f;
        }
        return;
    }
    // 2. scores = (scale q) k^T, in parts
    decode_scores(scores, query, k, v, nj, HS, dims.OC);
    __syncthreads();
    // 3. logits, from here to the values one key per thread, in the first row of scores
    for (int p = 1; p < parts; p++) {
        SIMD
        for (int c = threadIdx.x; c < nj; c += blockDim.x) { scores[c] += scores[p * DECODE_LD + c]; }
    }
    constexpr bool COUNTS = !ON_GPU || Bias::counts_gates;  // maybe CoPE's B, which counts keys: hide first
    if (!COUNTS) { add_row_bias(bias, scores, O, bh, t0, j0, nj, factor); }
    for (int c = threadIdx.x; c < nj && mask.exists(); c += blockDim.x) {
        if (mask.hides(t0, j0 + c, begin)) { scores[c] = -INFINITY; }
    }
    if (COUNTS) { add_row_bias(bias, scores, O, bh, t0, j0, nj, factor); }
    // 4. exponentials and their sum
    const float largest = decode_max(scores, nj);
    const float reference = largest > -INFINITY ? largest : 0.0f;       // no finite logit: the split weighs nothing
    const auto part_sum = sums_over<1>(threadIdx.x, nj, blockDim.x, [&](float* s, int c) {
        scores[c] = fast_exp(scores[c] - reference);
        s[0] += scores[c];
    });
    const float sum = block_sum(part_sum.x[0]);
    __syncthreads();
    // 5. O = P v: a thread takes one piece of every groups-th value; then the groups are added
    for (int w = threadIdx.x; w < parts * groups; w += blockDim.x) {
        const int group = w / parts;
        const int d = w % parts * DECODE_PIECE;
        DecodePiece o = {};
        for (int c = group; c < nj; c += groups) {
            const DecodePiece value = load_piece(v + (size_t)c * dims.OC + d, HS - d);
            UNROLL
            for (int r = 0; r < DECODE_PIECE / LANES; r++) { o.x[r] = fused_madd(scores[c], value.x[r], o.x[r]); }
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
        partial[HS] = largest;
        partial[HS + 1] = sum;
    }
}

// out (BNH,HS) from partial (BNH,splits,HS+2), a block per (batch, head). O_s of a split without weight is not read.
static __global__ void attention_decode_combine_kernel(floatX* out, const float* partial, int splits, int HS) {
    float* weight = dynamic_shared();                       // (splits): e^(m_s - M)
    const size_t row = (size_t)HS + 2;
    partial += (size_t)blockIdx.x * splits * row;
    out += (size_t)blockIdx.x * HS;
    // 1. M, the largest of all logits
    float largest = -INFINITY;
    for (int s = threadIdx.x; s < splits; s += blockDim.x) {
        const float of_split = partial[s * row + HS];
        largest = of_split > largest ? of_split : largest;
    }
    largest = block_max(largest);
    // 2. the weights of the splits, and the sum of all exponentials
    float sum = 0.0f;
    float first = (float)splits;                            // the first split with a weight above 0
    for (int s = threadIdx.x; s < splits; s += blockDim.x) {
        weight[s] = fast_exp(partial[s * row + HS] - largest);
        sum += weight[s] * partial[s * row + HS + 1];
        if (weight[s] != 0.0f && s < first) { first = (float)s; }
    }
    sum = block_sum(sum);
    first = -block_max(-first);
    __syncthreads();                                        // all weights are there
    // 3. out = sum_s weight_s O_s / sum
    for (int d = threadIdx.x; d < HS; d += blockDim.x) {
        float o = 0.0f;
        for (int s = (int)first; s < splits; s++) { o = weight[s] != 0.0f ? o + weight[s] * partial[s * row + d] : o; }
        out[d] = (floatX)(o / sum);
    }
}

LAUNCHER void attention_decode(floatX* out, const floatX* qkv, float* scratch, const PositionView& v, int B, int t0,
                               Stream stream) {
    const int BNH = B * v.NH;
    const int splits = decode_splits(t0);
    const TileSkip skip = v.run->tile_skip;
    DecodeDims dims = {attention_dims(v, 1, t0), nullptr, skip == TileSkip::Exact};
    const float* key_max = begin_decode(v, qkv, B, t0, splits, dims.scale, stream);
    if (skip != TileSkip::Off) { dims.key_max = key_max; }
    with_bias(v, [&](auto bias) {
        const DecodeShared shared = decode_shared(v.HS, DECODE_THREADS);
        const size_t bytes = sizeof(float) * (shared.query + shared.scores + shared.O);
        const Grid grid((size_t)BNH * splits, DECODE_THREADS, bytes, stream);
        launch(attention_decode_kernel<decltype(bias)>, grid, scratch, qkv, bias, dims, BNH);
    });
    const Grid grid((size_t)BNH, DECODE_THREADS, sizeof(float) * splits, stream);
    launch(attention_decode_combine_kernel, grid, out, scratch, splits, v.HS);
}
#endif
