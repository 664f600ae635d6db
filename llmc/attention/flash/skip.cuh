// attention/flash/skip.cuh -- tiles of keys that the bias has already zeroed (Linear, Distance): found before attention runs, never computed.
//
// S grows with j, so for the keys j of the tiles 0 .. n left of the query, and (bidirectional) of the tiles from n on right of it,
//   x_ij <= c |q_i| max |k_j| - log2 e g_i (S_i - S_end(n)),  which grows with n,
//   x_ij <= c |q_i| max |k_j| - log2 e g_i (S_begin(n) - S_i),  which falls with n,
// and the row's maximum is at least the logit of its own key, which carries no bias and is in the first tile of the loop. A tile
// whose bound is tau units of log2 below that adds nothing: tau = 128: ex2 returns +0 for each of its keys, no bit differs;
// tau = 24 + log2 T: what is lost of a row's sum is below 2^-24 of it.
#ifndef LLMC_ATTENTION_FLASH_SKIP_CUH
#define LLMC_ATTENTION_FLASH_SKIP_CUH

#include "tiles.cuh"

inline float flash_skip_tau(int T) { return 24.0f + log2f((float)T); }

// sum over half a row of x_d y_d, the other half by the neighbouring thread; known to both
__device__ inline float flash_half_dot(const bf16* x, const bf16* y, int HS) {
    float sum = 0.0f;
    for (int d = threadIdx.x % 2 * 8; d < HS; d += 16) {
        const uint4 a = *(const uint4*)(x + d), c = *(const uint4*)(y + d);
        sum += unpack_lo(a.x) * unpack_lo(c.x) + unpack_hi(a.x) * unpack_hi(c.x) + unpack_lo(a.y) * unpack_lo(c.y) + unpack_hi(a.y) * unpack_hi(c.y);
        sum += unpack_lo(a.z) * unpack_lo(c.z) + unpack_hi(a.z) * unpack_hi(c.z) + unpack_lo(a.w) * unpack_lo(c.w) + unpack_hi(a.w) * unpack_hi(c.w);
    }
    return sum + shuffle_xor(sum, 1);
}

// key_norm (B*NH,tiles): max |k_j| of each tile, 0 behind the last key; bidirectional: twice. One block a tile
template <bool Causal> __global__ void flash_key_norm_kernel(float* key_norm, FlashArgs p) {
    const int tiles = ceil_div(p.T, FLASH_TILE), bh = blockIdx.x / tiles, n = blockIdx.x % tiles, j = n * FLASH_TILE + (int)threadIdx.x / 2;
    const int b = bh / p.NH;
    const bool token = j < flash_tokens(p, b);
    const bf16* k = p.qkv + ((size_t)b * p.stride + (token ? j : 0)) * p.OC + (p.NH + bh % p.NH) * p.HS;
    const float norm = sqrtf(flash_half_dot(k, k, p.HS));
    const float largest = block_max(!token ? 0.0f : norm < INFINITY ? norm : INFINITY);     // a NaN too: then nothing is skipped
    if (threadIdx.x == 0) {
        key_norm[blockIdx.x] = largest;
        if (!Causal) { key_norm[gridDim.x + blockIdx.x] = largest; }
    }
}

// key_norm becomes the maximum over the tiles 0 .. n, the second one that over the tiles from n on; one warp a (batch, head)
__global__ void flash_key_norm_scan_kernel(float* key_norm, int tiles, int BNH) {
    const int lane = threadIdx.x;
    const bool mirrored = (int)blockIdx.x >= BNH;
    float before = 0.0f;
    key_norm += (size_t)blockIdx.x * tiles;
    for (int base = 0; base < tiles; base += 32) {
        const bool exists = base + lane < tiles;
        const int n = mirrored ? tiles - 1 - (base + lane) : base + lane;
        float x = fmaxf(before, exists ? key_norm[n] : 0.0f);
        for (int o = 1; o < 32; o *= 2) { x = fmaxf(x, shuffle(x, lane >= o ? lane - o : lane)); }
        if (exists) { key_norm[n] = x; }
        before = shuffle(x, 31);
    }
}

// S_i - S_j
template <FlashBias K> __device__ inline float flash_distance(const FlashArgs& p, int bh, int i, int j) {
    if (K == FlashBias::Linear) { return (float)(i - j); }
    const float* S = p.S_offset + (size_t)bh * p.stride;
    const double* origin = p.S_origin + (size_t)bh * ceil_div(p.stride, CABLE_CHUNK);
    return (float)(origin[i / CABLE_CHUNK] - origin[j / CABLE_CHUNK]) + (S[i] - S[j]);
}

// the span of 64 queries, by one block: the least `first` of its rows and the greatest `last`, each found by bisection
template <bool Causal, FlashBias K> __global__ void flash_skip_kernel(FlashSpan* span, const float* key_norm, FlashArgs p, float tau) {
    static_assert(flash_skips(K), "nothing to skip");
    const int tiles = ceil_div(p.T, FLASH_TILE), bh = blockIdx.x / tiles, m = blockIdx.x % tiles, b = bh / p.NH;
    const int i = m * FLASH_TILE + (int)threadIdx.x / 2, keys = flash_tokens(p, b);
    const bool token = i < keys;
    const int row = token ? i : 0;
    const bf16* q = p.qkv + ((size_t)b * p.stride + row) * p.OC + bh % p.NH * p.HS;
    const float norm = sqrtf(flash_half_dot(q, q, p.HS)), score = flash_half_dot(q, q + p.NH * p.HS, p.HS);
    const float c = p.scale * LOG2E, slope = LOG2E * p.scale * flash_row_slope<K>(p, bh, row), least = c * score - tau;
    int low = 0, high = token ? m : 0;                      // tiles below `low` are skipped, tiles from `high` on are not
    while (low < high) {
        const int n = (low + high) / 2;
        const float bound = c * norm * key_norm[(size_t)bh * tiles + n] - slope * flash_distance<K>(p, bh, row, n * FLASH_TILE + FLASH_TILE - 1);
        if (bound < least) { low = n + 1; }
        else { high = n; }
    }
    const float first = -block_max(token ? -(float)low : -(float)m);
    if (threadIdx.x == 0) { span[blockIdx.x] = {(int)first, m}; }
    if (Causal) { return; }
    low = m + 1;                                            // tiles below `low` are not skipped, tiles from `high` on are
    high = ceil_div(keys, FLASH_TILE);                      // at most m + 1 where rows are padding
    while (low < high) {
        const int n = (low + high) / 2;
        const float bound = c * norm * key_norm[(size_t)gridDim.x + bh * tiles + n] - slope * flash_distance<K>(p, bh, n * FLASH_TILE, row);
        if (bound < least) { high = n; }
        else { low = n + 1; }
    }
    const float last = block_max((float)(low - 1));
    if (threadIdx.x == 0) { span[blockIdx.x].last = (int)last; }
}

// span (B*NH,ceil(T/64)); key_norm: scratch, two floats for each of them
template <bool Causal, FlashBias K> void flash_skip(FlashSpan* span, float* key_norm, const FlashArgs& p, float tau, Stream stream) {
    const int tiles = ceil_div(p.T, FLASH_TILE), BNH = p.B * p.NH;
    const Grid grid((size_t)BNH * tiles, FLASH_THREADS, 0, stream);
    launch(flash_key_norm_kernel<Causal>, grid, key_norm, p);
    launch(flash_key_norm_scan_kernel, Grid((size_t)BNH * (Causal ? 1 : 2), 32, 0, stream), key_norm, tiles, BNH);
    launch(flash_skip_kernel<Causal, K>, grid, span, key_norm, p, tau);
}

// the share of the tiles (causal: of the causal ones) that is computed; span in host memory
inline double flash_live_share(const FlashSpan* span, int BNH, int T, bool causal) {
    const int tiles = ceil_div(T, FLASH_TILE);
    double live = 0.0, all = 0.0;
    for (int x = 0; x < BNH * tiles; x++) {
        all += causal ? x % tiles + 1 : tiles;
        live += span[x].last - span[x].first + 1;
    }
    return all > 0.0 ? live / all : 1.0;
}

#endif
