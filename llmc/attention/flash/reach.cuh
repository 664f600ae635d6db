// attention/flash/reach.cuh -- which tiles of keys a block's queries meet, and in which order: all of them or those of
// their spans, under an AttentionMask those of the window and the sinks; and how the spans are found.
#pragma once

#include "start.cuh"

// Which tiles of keys the queries of a tile meet: sinks_begin .. sinks_end-1 and then first .. end-1; none if all the
// queries are padding. Skips: the bias has spans. Masked: args.mask is obeyed, else there are no sinks.
//
// Both ranges end with the queries' own tile, or (bidirectional) continue after it. Sinks to the right of the window
// are part of the second range, so there is no gap. Both begin at the document of the tile's first query; documents
// that begin further right do so in the own tile.
struct FlashReach {
    int sinks_begin = 0, sinks_end = 0;
    int first = 0, end = 0;

    // m: the tile of the queries. live: tiles that have tokens
    template <bool Causal, bool Skips, bool Masked>
    __device__ static FlashReach of(const FlashArgs& args, int bh, int m, int live) {
        FlashReach reach;
        if (m >= live) { return reach; }
        reach.end = Causal ? m + 1 : live;
        if (Masked) {
            const int row = m * FLASH_TILE;
            const int window = args.mask.window;
            const int begin = flash_begin(args, bh / args.NH, row);
            const int sinks = imin(ceil_div(begin + args.mask.sinks, FLASH_TILE), reach.end);
            reach.first = imax(begin, row - window + 1) / FLASH_TILE;
            if (!Causal) { reach.end = imin(live, (row + FLASH_TILE - 1 + window - 1) / FLASH_TILE + 1); }
            reach.end = imax(reach.end, sinks);
            reach.sinks_end = args.mask.sinks > 0 ? imin(sinks, reach.first) : 0;
            reach.sinks_begin = imin(begin / FLASH_TILE, reach.sinks_end);
        }
        if (Skips && args.span != nullptr) {
            const FlashSpan span = args.span[(size_t)bh * ceil_div(args.T, FLASH_TILE) + m];
            reach.sinks_begin = imin(imax(reach.sinks_begin, span.first), reach.sinks_end);
            reach.first = imax(reach.first, span.first);
            if (!Causal) { reach.end = imin(reach.end, span.last + 1); }
        }
        return reach;
    }
    __device__ bool has_sinks() const { return sinks_begin < sinks_end; }
    __device__ int begin() const { return has_sinks() ? sinks_begin : first; }
    __device__ int after(int n) const { return n + 1 == sinks_end ? first : n + 1; }       // the next tile
    __device__ bool gap_after(int n) const { return n + 1 == sinks_end && sinks_end < first; }
    __device__ bool contains(int n) const { return (n >= first && n < end) || (n >= sinks_begin && n < sinks_end); }
};

// Their order in the loop of the forward: the queries' own tile, those to its left, the sinks, those to its right. For
// queries in tile 3, with 6 tiles of tokens, 3 2 1 0 if causal, 3 2 1 0 4 5 if not. Without a mask all but the first
// are free of hidden pairs, except at the end of the keys.
template <bool Causal, bool Skips, bool Masked> struct FlashWalk {
    FlashReach reach;
    int own;                                // the queries' tile
    int left, sinks, count;                 // tiles: it and those to its left; the sinks; all

    // tokens: of this sequence
    __device__ FlashWalk(const FlashArgs& args, int bh, int own, int tokens) : own(own) {
        reach = FlashReach::of<Causal, Skips, Masked>(args, bh, own, ceil_div(tokens, FLASH_TILE));
        left = reach.end > 0 ? own - reach.first + 1 : 0;
        sinks = reach.sinks_end - reach.sinks_begin;
        count = left + sinks + (reach.end > 0 ? reach.end - own - 1 : 0);
    }
    __device__ int tile(int it) const {
        if ((Causal && !Masked) || it < left) { return own - it; }
        return it < left + sinks ? reach.sinks_end - 1 - (it - left) : own + 1 + (it - left - sinks);
    }
};

// What hides keys from the queries of sequence b: the end of its tokens, the diagonal if Causal, args.mask if Masked
template <bool Causal, bool Masked> struct FlashMask {
    const FlashArgs& args;
    int b, keys;                            // keys: its tokens

    // of query i, for hides: where its document begins
    __device__ int begin(int i) const { return Masked ? flash_begin(args, b, i) : 0; }
    __device__ bool hides(int i, int j, int begin) const {
        return j >= keys || (Causal && j > i) || (Masked && args.mask.hides(i, j, begin));
    }
    // whether the tiles m of queries and n of keys are on the diagonal or have hidden pairs
    __device__ bool edge(int m, int n) const {
        return m == n || (n + 1) * FLASH_TILE > keys || (Masked && cuts(m, n));
    }
    __device__ bool cuts(int m, int n) const {              // whether args.mask hides some
        const int i0 = m * FLASH_TILE, j0 = n * FLASH_TILE;
        return args.mask.hides_any(i0, i0 + FLASH_TILE, j0, j0 + FLASH_TILE, begin(i0 + FLASH_TILE - 1));
    }
    // hidden pairs become -inf. i: the lane's first query, j0: the tile's first key; begin: of the lane's queries
    __device__ void hide(FlashFragment<FLASH_TILE>& scores, const int (&begin)[FLASH_OWN], int i, int j0) const {
        const int row = i - j0, end = keys - j0;            // counted from j0: then the columns are constants
        UNROLL
        for (int e = 0; e < scores.SIZE; e++) {
            const int c = scores.column(e);
            const int r = row + 8 * scores.own(e);
            if (c >= end || (Causal && c > r)) { scores[e] = -INFINITY; }
            if (Masked && args.mask.hides(r, c, begin[scores.own(e)] - j0)) { scores[e] = -INFINITY; }
        }
    }
};

// ----------------------------------------------------------------------------------------------------------
// tiles of keys that the bias has already zeroed (Linear, Distance): found before attention runs, and then neither read
// nor computed
//
// S grows with j, so with scale2 = scale log2 e, in units of log2 and for all keys j of the tiles 0 .. n left of query
// i, and (bidirectional) of the tiles from n on right of it,
//   x_ij <= scale2 |q_i| max |k_j| - log2 e g_i (S_i - S_end(n)),      which grows with n,
//   x_ij <= scale2 |q_i| max |k_j| - log2 e g_i (S_begin(n) - S_i),    which falls with n,
// and the row's maximum is at least the logit of its own key, which carries no bias and is in the first tile of the
// loop. A tile whose bound is more than tau below that is skipped. tau = 128: ex2 would return +0 for each of its keys,
// so no bit differs; tau = 24 + log2 T: what is lost of a row's sum is below 2^-24 of it. docs/attention.md, "Skipping
// tiles with a bound".

// 1. for each tile n, the longest key of the tiles up to n and of those from n on

// the sum over four elements, in two words of two bf16 each
__device__ inline float flash_words_dot(uint32_t x0, uint32_t x1, uint32_t y0, uint32_t y1) {
    return unpack_lo(x0) * unpack_lo(y0) + unpack_hi(x0) * unpack_hi(y0) + unpack_lo(x1) * unpack_lo(y1) +
           unpack_hi(x1) * unpack_hi(y1);
}
// sum_d x_d y_d over a row of HS: one half of it by this thread, the other by its neighbour; both get the whole
__device__ inline float flash_half_dot(const bf16* x, const bf16* y, int HS) {
    float sum = 0.0f;
    for (int d = threadIdx.x % 2 * 8; d < HS; d += 16) {
        const uint4 a = *(const uint4*)(x + d);
        const uint4 b = *(const uint4*)(y + d);
        sum += flash_words_dot(a.x, a.y, b.x, b.y);
        sum += flash_words_dot(a.z, a.w, b.z, b.w);
    }
    return sum + shuffle_xor(sum, 1);
}

// key_norm (B*NH,tiles): max |k_j| of each tile, 0 after the last key; bidirectional: twice. One block per tile
template <bool Causal> __global__ void flash_key_norm_kernel(float* key_norm, FlashArgs args) {
    const int tiles = ceil_div(args.T, FLASH_TILE);
    const int bh = blockIdx.x / tiles;
    const int n = blockIdx.x % tiles;
    const int j = n * FLASH_TILE + (int)threadIdx.x / 2;    // two threads per key
    const int b = bh / args.NH;
    const bool token = j < flash_tokens(args, b);
    const size_t row = (size_t)b * args.stride + (token ? j : 0);
    const bf16* k = args.qkv + row * args.OC + (args.NH + bh % args.NH) * args.HS;
    float norm = sqrtf(flash_half_dot(k, k, args.HS));
    norm = norm < INFINITY ? norm : INFINITY;               // a NaN too: then nothing is skipped
    const float largest = block_max(token ? norm : 0.0f);
    if (threadIdx.x == 0) {
        key_norm[blockIdx.x] = largest;
        if (!Causal) { key_norm[gridDim.x + blockIdx.x] = largest; }
    }
}

// key_norm becomes the maximum over the tiles 0 .. n, the second one the maximum over the tiles from n on. One warp per
// (batch, head) and direction, 32 tiles at a time
__global__ void flash_key_norm_scan_kernel(float* key_norm, int tiles, int BNH) {
    const int lane = threadIdx.x;
    const bool mirrored = (int)blockIdx.x >= BNH;
    float before = 0.0f;                                    // the maximum over the tiles that came before these 32
    key_norm += (size_t)blockIdx.x * tiles;
    for (int base = 0; base < tiles; base += 32) {
        const bool exists = base + lane < tiles;
        const int n = mirrored ? tiles - 1 - (base + lane) : base + lane;
        float x = fmaxf(before, exists ? key_norm[n] : 0.0f);
        // after the step o a lane has the maximum over the 2 o lanes up to its own
        for (int o = 1; o < 32; o *= 2) { x = fmaxf(x, shuffle(x, lane >= o ? lane - o : lane)); }
        if (exists) { key_norm[n] = x; }
        before = shuffle(x, 31);
    }
}

// 2. the spans

// The span of 64 queries, by a block with two threads per query: the union of what each row finds by bisection.
template <bool Causal, FlashBias Kind>
__global__ void flash_skip_kernel(FlashSpan* span, const float* key_norm, FlashArgs args, float tau) {
    static_assert(flash_skips(Kind), "nothing to skip");
    const int tiles = ceil_div(args.T, FLASH_TILE);
    const int bh = blockIdx.x / tiles;
    const int m = blockIdx.x % tiles;                       // the tile of the queries
    const int b = bh / args.NH;
    const int i = m * FLASH_TILE + (int)threadIdx.x / 2;
    const int keys = flash_tokens(args, b);
    const bool token = i < keys;
    const int row = token ? i : 0;
    const bf16* q = args.qkv + ((size_t)b * args.stride + row) * args.OC + bh % args.NH * args.HS;
    const float norm = sqrtf(flash_half_dot(q, q, args.HS));
    const float own_score = flash_half_dot(q, q + args.NH * args.HS, args.HS);      // q_i.k_i
    const float scale2 = args.scale * LOG2E;
    const FlashPlaces<Kind> places = {args, bh};
    const float slope = LOG2E * args.scale * places.slope(row);     // log2 e g_i
    const float least = scale2 * own_score - tau;           // a tile whose bound is below this is skipped
    int low = 0;                                            // tiles below `low` are skipped,
    int high = token ? m : 0;                               // tiles from `high` on are not
    while (low < high) {
        const int n = (low + high) / 2;
        const float score = scale2 * norm * key_norm[(size_t)bh * tiles + n];       // at most
        const float bound = score - slope * places.distance(row, n * FLASH_TILE + FLASH_TILE - 1);
        if (bound < least) { low = n + 1; }
        else { high = n; }
    }
    const float first = -block_max(token ? -(float)low : -(float)m);
    if (threadIdx.x == 0) { span[blockIdx.x] = {(int)first, m}; }
    if (Causal) { return; }
    low = m + 1;                                            // now tiles below `low` are not skipped,
    high = ceil_div(keys, FLASH_TILE);                      // tiles from `high` on are; <= m + 1 where rows are padding
    while (low < high) {
        const int n = (low + high) / 2;
        const float score = scale2 * norm * key_norm[(size_t)gridDim.x + bh * tiles + n];
        const float bound = score - slope * places.distance(n * FLASH_TILE, row);
        if (bound < least) { high = n; }
        else { low = n + 1; }
    }
    const float last = block_max((float)(low - 1));
    if (threadIdx.x == 0) { span[blockIdx.x].last = (int)last; }
}

// span (B*NH,ceil(T/64)); key_norm: scratch, two floats for each of them
template <bool Causal, FlashBias Kind>
void flash_skip(FlashSpan* span, float* key_norm, const FlashArgs& args, float tau, Stream stream) {
    const int tiles = ceil_div(args.T, FLASH_TILE);
    const int BNH = args.B * args.NH;
    const Grid grid((size_t)BNH * tiles, FLASH_THREADS, 0, stream);
    launch(flash_key_norm_kernel<Causal>, grid, key_norm, args);
    launch(flash_key_norm_scan_kernel, Grid((size_t)BNH * (Causal ? 1 : 2), 32, 0, stream), key_norm, tiles, BNH);
    launch(flash_skip_kernel<Causal, Kind>, grid, span, key_norm, args, tau);
}

// The share of tiles that spans (BNH,ceil(T/64)), in host memory, leave alive
inline double flash_live_share(const FlashSpan* span, int BNH, int T, bool causal) {
    const int tiles = ceil_div(T, FLASH_TILE);
    return tile_share(BNH * tiles, tiles, causal, [&](int x) { return span[x].last - span[x].first + 1; });
}
