// attention/flash/diagonals.cuh -- the gradient of a Toeplitz table: the sums of dlogit along the diagonals, which the
// kernel of attention/flash/dq.cuh makes for each tile of queries, and the kernel that adds them.
#pragma once

#include "pairs.cuh"

// The diagonals of a 64 x 64 tile of dlogit, two for each of 64 threads: k and k + 64. The latter continues as k in the
// next tile to the right. docs/attention.md, "The gradient of a Toeplitz table".
struct FlashDiagonals {
    float* dlogit;                  // (64,64), in the order of at(), which keeps the banks apart
    float* carry;                   // (64): of the last tile, diagonals 64 ..; 127 is none, and 0
    float* slab;                    // ((tiles+1)*64): diagonal k of tile n, j - i = 64 (n - m) + k - 63, at 64 n + k

    // eight rows at the columns 0, 2, 4, 6 are 32 banks, and so are 32 neighbouring columns of one row
    __device__ static int at(int r, int c) { return r * FLASH_TILE + (c ^ ((r & 7) * 8 | (r >> 2 & 1))); }
    __device__ void put(int r, int c, float x0, float x1) const {
        dlogit[at(r, c)] = x0;
        dlogit[at(r, c + 1)] = x1;
    }
    // the sums of tile n; first: no tile to its left, whose diagonals would continue here
    __device__ void add(int n, bool first) const {
        const int k = threadIdx.x % 64;
        float left = 0.0f;
        float right = 0.0f;
        for (int r = 0; r < 64; r++) {                      // neighbouring lanes read neighbouring columns
            const int c = r + k - 63;
            const float x = dlogit[at(r, c & 63)];
            if (c >= 0) { left += x; } else { right += x; }
        }
        slab[n * 64 + k] = first ? left : left + carry[k];
        carry[k] = right;
    }
    // the last diagonals of tile n, 64 .. 126: there is no tile to its right
    __device__ void end_after(int n) const { slab[(n + 1) * 64 + threadIdx.x % 64] = carry[threadIdx.x % 64]; }
};

// The slabs (B*NH,count,(tiles+1)*64) of `count` query tiles, from tile `first` on. A launch has only these, since with
// a slab for every tile scratch would grow with T * T.
struct FlashSlabs {
    float* data;
    int first, count;

    __device__ float* of(int bh, int m, int tiles) const {
        return data + ((size_t)bh * count + m - first) * (tiles + 1) * FLASH_TILE;
    }
};

// dtable[b,h] is the sum of the query tiles' slabs, in order; columns that no distance reaches become 0. Launched after
// each launch of the dq kernel: the first one overwrites, the rest continue the sum.
template <bool Causal, bool Masked> __global__ void flash_backward_table_kernel(FlashArgs args, FlashSlabs slabs) {
    const FlashBlock block(args, (int)gridDim.x / (args.B * args.NH));
    const int column = block.turn * blockDim.x + threadIdx.x;
    if (column >= args.table_entries) { return; }
    float* total = args.dtable + (size_t)block.bh * args.table_entries + column;
    float sum = slabs.first == 0 ? 0.0f : *total;
    for (int m = slabs.first; m < slabs.first + slabs.count; m++) {
        const int at = column - args.table_zero + m * FLASH_TILE + 63;      // where the column is in the slab of tile m
        const FlashReach reach = FlashReach::of<Causal, false, Masked>(args, block.bh, m, block.live_tiles());
        const bool sinks = reach.has_sinks() && at >= reach.sinks_begin * FLASH_TILE;
        const bool window = reach.end > 0 && at >= reach.first * FLASH_TILE;
        if ((sinks && at < reach.sinks_end * FLASH_TILE + 63) || (window && at < reach.end * FLASH_TILE + 63)) {
            sum += slabs.of(block.bh, m, block.tiles)[at];
        }
    }
    *total = sum;
}
