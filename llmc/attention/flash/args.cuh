// attention/flash/args.cuh -- what the tensor-core kernels of attention are given.
#pragma once

#include "../../base/ptx.cuh"
#include "../../position/encoding.cuh"

// The head sizes of these kernels. They compute with 64 or 128 columns; those from HS on are zero. Below 32 more than
// half of the work would be wasted.
constexpr bool flash_head_size(int HS) { return HS >= 32 && HS <= 128 && HS % 8 == 0; }

// The biases that are made of CABLE's S and g
__host__ __device__ constexpr bool flash_is_cable(FlashBias Kind) {
    return Kind == FlashBias::Distance || Kind == FlashBias::LogDistance;
}
// The first and the last tile of 64 keys that any of 64 queries needs. The queries' own tile is between the two.
struct alignas(8) FlashSpan {
    int first, last;
};

// All pointers are the device's; null where the bias does not use them. Queries and keys are 0 .. T-1 of each sequence.
struct FlashArgs : FlashBiasArgs {
    const bf16* qkv;            // (B,stride,OC): q at h*HS, k at C + h*HS, v at 2C + h*HS; OC a multiple of 8
    bf16* out;                  // (B,T,C)
    float* lse;                 // (B*NH,stride), natural logarithm; null: not saved
    int B, T, stride, NH, HS, OC;
    float scale;                // > 0
    const int* kv_len;          // (B), or null. Keys >= kv_len[b] are masked; queries from there on get out 0, lse -inf
                                // and no gradient
    const FlashSpan* span;      // (B*NH,ceil(T/64)), or null. Tiles of keys outside it are skipped; causal: `last` is
                                // not read
    // backward
    const bf16* dout;           // (B,T,C)
    bf16* dqkv;                 // (B,stride,OC), the q, k, v columns are overwritten
    // read by the masked kernels, which run if it is not empty
    AttentionMask mask;

    // of query i of a (batch, head): the factor of its bias
    __device__ float factor_of(size_t bh, int i) const { return factor == nullptr ? 1.0f : factor[bh * stride + i]; }
};

// Which sequence and head a block works on, and its turn among the `turns` blocks of that head, the longest first.
//
// Blocks start in the order of their numbers, FLASH_WAVE or so at a time. These should share as few heads as possible,
// so that L2 holds the keys and values that they all read: with all heads side by side it would not, and each tile
// would be fetched from memory once per block that reads it.
constexpr int FLASH_WAVE = 512;
struct FlashPlace {
    int bh, turn;
    __device__ FlashPlace(const FlashArgs& args, int turns) {
        const int heads = imax(1, FLASH_WAVE / turns);                      // of a group
        const int first = (int)blockIdx.x / (heads * turns) * heads;        // of this block's group
        const int size = imin(heads, args.B * args.NH - first);             // the last one may have fewer
        const int place = (int)blockIdx.x - first * turns;
        bh = first + place % size;
        turn = place / size;
    }
};
