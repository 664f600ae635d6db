// attention/flash/reach.cuh -- which tiles of keys a block's queries meet, and in which order: all of them or those of
// their spans, or, under an AttentionMask, those of the window and of the sinks.
#pragma once

#include "tiles.cuh"

// The tiles of keys that a block visits, in the order of its loop: for queries in tile 3, with 6 tiles of tokens,
// 3 2 1 0 if causal, 3 2 1 0 4 5 if not, without those outside their span. All but the first, which is the queries'
// own, are free of masks, except at the end of the keys.
template <bool Causal, bool Skips> struct FlashWalk {
    int own, left;                          // the queries' tile; how many tiles it and those to its left are
    int count;                              // of all tiles

    // Skips: the bias has spans.  own: the tile of the block's queries.  tokens: of this sequence
    __device__ FlashWalk(const FlashArgs& args, int bh, int own, int tokens) : own(own) {
        const int end = ceil_div(tokens, FLASH_TILE);
        FlashSpan span = {0, end - 1};
        if (Skips && args.span != nullptr) { span = args.span[(size_t)bh * ceil_div(args.T, FLASH_TILE) + own]; }
        left = own < end ? own - span.first + 1 : 0;        // none: all the queries are padding
        count = left;
        if (!Causal && own < end) { count += span.last - own; }
    }
    __device__ int tile(int it) const { return Causal || it < left ? own - it : own + it - left + 1; }
};

// ----------------------------------------------------------------------------------------------------------
// with a mask

// The tiles sinks_begin .. sinks_end-1 and then first .. end-1. Both ranges end with the queries' own tile, or
// (bidirectional) continue after it. Sinks to the right of the window are part of the second range, so there is no gap.
// Both begin at the document of the tile's first query; documents that begin further right do so in the own tile.
struct FlashReach {
    int sinks_begin = 0, sinks_end = 0;
    int first = 0, end = 0;

    template <bool Causal> __device__ static FlashReach of(const FlashArgs& args, int bh, int m, int live) {
        FlashReach reach;
        if (m >= live) { return reach; }
        const int row = m * FLASH_TILE;
        const int window = args.mask.window;
        const int begin = flash_begin(args, bh / args.NH, row);
        const int sinks = imin(ceil_div(begin + args.mask.sinks, FLASH_TILE), Causal ? m + 1 : live);
        reach.first = imax(begin, row - window + 1) / FLASH_TILE;
        reach.end = Causal ? m + 1 : imin(live, (row + FLASH_TILE - 1 + window - 1) / FLASH_TILE + 1);
        reach.end = imax(reach.end, sinks);
        reach.sinks_end = args.mask.sinks > 0 ? imin(sinks, reach.first) : 0;
        reach.sinks_begin = imin(begin / FLASH_TILE, reach.sinks_end);
        if (args.span != nullptr) {
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

// whether queries of tile m of sequence b do not see all keys of tile n
__device__ inline bool flash_cuts(const FlashArgs& args, int b, int m, int n) {
    const int i0 = m * FLASH_TILE, j0 = n * FLASH_TILE;
    const int begin = flash_begin(args, b, i0 + FLASH_TILE - 1);
    return args.mask.hides_any(i0, i0 + FLASH_TILE, j0, j0 + FLASH_TILE, begin);
}

// FlashWalk with a mask: the queries' own tile, those of the window to its left, the sinks, then those to its right
template <bool Causal> struct FlashMaskedWalk {
    FlashReach reach;
    int own;
    int left, sinks, count;

    __device__ FlashMaskedWalk(const FlashArgs& args, int bh, int own, int tokens) : own(own) {
        reach = FlashReach::of<Causal>(args, bh, own, ceil_div(tokens, FLASH_TILE));
        left = reach.end > 0 ? own - reach.first + 1 : 0;
        sinks = reach.sinks_end - reach.sinks_begin;
        count = left + sinks + (reach.end > 0 ? reach.end - own - 1 : 0);
    }
    __device__ int tile(int it) const {
        if (it < left) { return own - it; }
        return it < left + sinks ? reach.sinks_end - 1 - (it - left) : own + 1 + (it - left - sinks);
    }
};
