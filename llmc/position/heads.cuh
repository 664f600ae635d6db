// position/heads.cuh -- how rope and ssmax walk over the heads of q and k: a block has HEAD_TOKENS tokens of a
// sequence, up to HEAD_LANES neighbouring threads share a head, and each of them takes packs of P channels.
#pragma once

#include "documents.cuh"

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
