// attention/visits.cuh -- which (query, key) pairs attention computes, a tile at a time.
//
// A query sees the keys up to its own (causal) or all keys of its sequence, unless the mask hides them: keys of another
// document, and keys that are neither in the window nor sinks (AttentionMask, position/encoding.cuh). A sequence may
// end early (kv_len); there are no keys after its end. A tile whose pairs are all hidden is not visited, nor is a tile
// whose weights the bias makes 0 (first_key, choose.cuh).
#pragma once

#include "../base/matrix.cuh"
#include "../position/table.h"

constexpr int ATTENTION_TILE = LANES > 1 ? 64 : 32;         // divides 128, so no tile crosses a chunk of CABLE's sum
constexpr int ATTENTION_THREADS = 64;
// Whether a query meets its own key first, as skipping tiles requires (choose.cuh); on a GPU only the
// tensor-core kernels skip tiles
constexpr bool LAST_TILE_FIRST = !ON_GPU;

// Shapes of a call: queries t0 .. t0+T-1 of every sequence attend to keys 0 .. t0+T-1 of the same qkv (B,stride,OC).
struct AttentionDims {
    int T, t0, stride, NH, HS, OC;                          // OC: width of a row of qkv, with the encoding's columns
    float scale;                                            // of q.k: 1/sqrt(HS) times score_factor
    const int* kv_len = nullptr;                            // (B), or null: all sequences have t0 + T tokens
    const int* first_key = nullptr;                         // from choose.cuh; null: no tile is skipped
    int forgotten = 0;                                      // this, factor and moment: as in PositionView
    AttentionMask mask = {};
    const float* factor = nullptr;
    float* moment = nullptr;

    // of the queries from i0 on; null: B has no factor
    __device__ const float* factors(int bh, int i0) const {
        return factor == nullptr ? nullptr : factor + (size_t)bh * stride + i0;
    }
    __device__ int tokens(int b) const { return kv_len == nullptr ? t0 + T : clamp(kv_len[b], 0, t0 + T); }
    __host__ __device__ int C() const { return NH * HS; }
    __host__ __device__ int padded_HS() const { return round_up(HS, LANES); }      // whole registers, for block_matmul
};

inline AttentionDims attention_dims(const PositionView& v, int T, int t0) {
    const float scale = v.score_factor * score_factor(v) / sqrtf((float)v.HS);
    return {T, t0, v.stride, v.NH, v.HS, v.OC, scale, v.kv_len, nullptr, v.forgotten,
            v.mask.within(t0 + T), v.factor, v.moment};
}

// A tile of pairs with its mask
template <bool Causal> struct PairTile : PairRange {
    AttentionMask mask;

    // whether query i0 + r does not see key j0 + c
    __device__ bool hides(int r, int c) const {
        const int i = i0 + r;
        const int j = j0 + c;
        return (Causal && j > i) || (mask.exists() && mask.hides(i, j, mask.begin(i)));
    }
    // whether some of its pairs are hidden, or all of them
    __device__ bool hides_any() const {
        const int end = i0 + ni;
        return (Causal && j0 + nj > i0 + 1) ||
               (mask.exists() && mask.hides_any(i0, end, j0, j0 + nj, mask.begin(end - 1)));
    }
    __device__ bool hides_all() const {
        return mask.exists() && mask.hides_all(i0, i0 + ni, j0, j0 + nj, mask.begin(i0));
    }
    // whether its queries are its keys: query r sees at most the keys 0 .. r
    __device__ bool diagonal() const { return Causal && i0 == j0; }
    // Sets the scores (queries, keys) of hidden pairs to -inf. All threads of the block call it.
    __device__ void hide(const Matrix<float>& scores) const {
        if (!hides_any()) { return; }
        for (int r = 0; r < ni; r++) {
            for (int c = threadIdx.x; c < nj; c += blockDim.x) {
                if (hides(r, c)) { scores(r, c) = -INFINITY; }
            }
        }
        __syncthreads();
    }
};

// The tiles that one (batch, head) visits. LastFirst: from a query's own key downwards, otherwise upwards to it
template <bool Causal, bool LastFirst> struct Visits {
    const AttentionDims& dims;
    int bh;
    int tokens;                                             // of the sequence

    __device__ Visits(const AttentionDims& dims, int bh)
        : dims(dims), bh(bh), tokens(dims.tokens(bh / dims.NH)) {}

    // A range for `for`: the tiles of keys that a tile of queries visits, or of queries that visit a tile of keys
    template <bool OfKeys> struct Walk {
        static constexpr bool Downwards = OfKeys && LastFirst;
        struct End {};
        const Visits& visits;
        int fixed, size;                                    // i0 and ni of the tile of queries, or j0 and nj
        int at, end_at;                                     // where the next tile begins, and the last one ends

        __device__ Walk begin() const { return *this; }
        __device__ End end() const { return {}; }
        __device__ PairTile<Causal> operator*() const {
            const int n = imin(ATTENTION_TILE, visits.tokens - at);
            const AttentionMask mask = visits.dims.mask.of(visits.bh / visits.dims.NH, visits.dims.stride);
            if (OfKeys) { return {{fixed, size, at, n}, mask}; }
            return {{at, n, fixed, size}, mask};
        }
        __device__ void operator++() { at += Downwards ? -ATTENTION_TILE : ATTENTION_TILE; }
        // Steps over tiles that are not visited; returns whether a tile is left
        __device__ bool operator!=(End) {
            while (exists() && visits.skips(**this)) { ++*this; }
            return exists();
        }
        __device__ bool exists() const { return Downwards ? at >= end_at : at < end_at; }
    };
    // the tiles of keys that the queries i0 .. i0+ni-1 of one tile visit
    __device__ Walk<true> keys_of(int i0, int ni) const {
        const int seen = Causal ? i0 + ni : tokens;
        const int first = first_key(i0);
        const int end = ni == 0 ? first : round_up(seen, ATTENTION_TILE);
        if (LastFirst) { return {*this, i0, ni, end - ATTENTION_TILE, first}; }
        return {*this, i0, ni, first, end};
    }
    // the tiles of queries that visit the keys j0 .. j0+nj-1 of one tile, upwards; t0 = 0
    __device__ Walk<false> queries_of(int j0, int nj) const {
        return {*this, j0, nj, Causal ? j0 : 0, tokens};
    }

private:
    __device__ int first_key(int i0) const {
        if (!LAST_TILE_FIRST || dims.first_key == nullptr) { return 0; }
        return dims.first_key[bh * ceil_div(dims.stride, ATTENTION_TILE) + i0 / ATTENTION_TILE];
    }
    __device__ bool skips(const PairTile<Causal>& t) const { return t.j0 < first_key(t.i0) || t.hides_all(); }
};

// ----------------------------------------------------------------------------------------------------------
// a tile in shared memory

// tile (rows, padded HS) = factor * from, whose rows have HS columns; the padding is zeroed
__device__ inline void load_tile(float* tile, const Matrix<const floatX>& from, float factor) {
    const int width = round_up(from.cols, LANES);
    for (int r = 0; r < from.rows; r++) {
        for (int d = threadIdx.x; d < from.cols; d += blockDim.x) { tile[r * width + d] = factor * (float)from(r, d); }
        for (int d = from.cols + (int)threadIdx.x; d < width; d += blockDim.x) { tile[r * width + d] = 0.0f; }
    }
}
// tile_T (HS, ATTENTION_TILE) = factor * from, transposed; columns beyond from's rows are zeroed
__device__ inline void load_tile_transposed(float* tile_T, const Matrix<const floatX>& from, float factor) {
    for (int d = 0; d < from.cols; d++) {
        float* row = tile_T + d * ATTENTION_TILE;
        for (int r = threadIdx.x; r < from.rows; r += blockDim.x) { row[r] = factor * (float)from(r, d); }
        for (int r = from.rows + (int)threadIdx.x; r < ATTENTION_TILE; r += blockDim.x) { row[r] = 0.0f; }
    }
}

// Below any logit, and finite: a query whose keys in its first tiles are all hidden then sums e^(-inf - largest) = 0
constexpr float LEAST_LOGIT = -1e30f;
