// attention/choose_cpu.cuh -- builds for a CPU choose nothing. But causal attention skips the tiles of keys that the
// bias has already zeroed: they are found before it runs, and neither read nor computed.
//
// The bound is flash/bias.cuh's, in natural units. With j the last key of tile n, all logits of query i in the
// tiles 0 .. n are at most |scale q_i| max|k| + f_i B_ij, and its largest logit is at least that of its own key, which
// has no bias. Tiles more than tau below that are skipped. tau = 128 ln 2: fast_exp would return 0 for each of their
// keys, and as the query's own tile is the first one of attention's loop, no bit differs. docs/attention.md, "Skipping
// tiles with a bound".
#pragma once

#include "visits.cuh"

// floats for first_key and key_norm
inline size_t tile_skip_scratch(int B, int T, int NH) { return (size_t)2 * B * NH * ceil_div(T, ATTENTION_TILE); }

// first_key (B*NH,tiles): the first key that a tile of queries visits, not before dims.forgotten. key_norm, the same
// shape: the longest key of the tiles 0 .. n. Those of the tokens before t0 are there. One block per (batch, head)
template <class Bias>
__global__ void attention_skip_kernel(int* first_key, float* key_norm, const floatX* qkv, Bias bias, AttentionDims dims,
                                      float tau) {
    constexpr int TILE = ATTENTION_TILE;
    const int bh = blockIdx.x;
    const int b = bh / dims.NH;
    const int HS = dims.HS;
    const int T = dims.tokens(b);
    const int tiles = ceil_div(dims.stride, TILE);          // of the whole capacity
    const int begin = dims.t0 / TILE;                       // the new ones
    const int end = ceil_div(dims.t0 + dims.T, TILE);
    const floatX* q = qkv + (size_t)b * dims.stride * dims.OC + bh % dims.NH * HS;
    const floatX* k = q + dims.C();
    first_key += (size_t)bh * tiles;
    key_norm += (size_t)bh * tiles;

    // 1. the longest key of the tiles up to n
    for (int n = begin; n < end; n++) {
        float largest = 0.0f;
        for (int j = n * TILE; j < imin((n + 1) * TILE, T); j++) {
            const floatX* row = k + (size_t)j * dims.OC;
            float sum = dot(row, row, HS);
            if (!(sum < INFINITY)) { sum = INFINITY; }      // a NaN too: such a tile is never skipped
            largest = sum <= largest ? largest : sum;
        }
        key_norm[n] = n > 0 ? fmaxf(key_norm[n - 1], sqrtf(largest)) : sqrtf(largest);
    }
    // 2. the first tile that one of the 64 queries needs. The bound grows with n, so each query searches by bisection
    // among the tiles that the queries before it would skip.
    for (int m = begin; m < end; m++) {
        int first = m;
        for (int i = m * TILE; i < imin((m + 1) * TILE, T); i++) {
            const floatX* row = q + (size_t)i * dims.OC;
            const floatX* own_key = k + (size_t)i * dims.OC;
            const float length = dims.scale * sqrtf(dot(row, row, HS));
            const float least = dims.scale * dot(row, own_key, HS) - tau;
            const float* factor = dims.factors(bh, i);
            int low = dims.forgotten / TILE;
            int probe = first - 1;                          // mostly nothing before `first` is needed
            while (low < first) {
                const float B = bias.tile(bh, m * TILE, probe * TILE)(i - m * TILE, TILE - 1);
                const float bound = length * key_norm[probe] + (factor == nullptr ? B : *factor * B);
                if (bound < least) { low = probe + 1; }
                else { first = probe; }
                probe = (low + first) / 2;
            }
        }
        first_key[m] = first * TILE;
    }
}

// Sets dims.first_key where a causal bias zeroes tiles.
template <bool Causal, class Bias>
void skip_tiles(AttentionDims& dims, float* scratch, const floatX* qkv, const PositionView& v, const Bias& bias, int B,
                Stream stream) {
    const int whole = v.decodes ? dims.T : dims.stride;     // tokens of the prompt, or of the whole window
    if (!Causal || scratch == nullptr || dims.t0 + dims.T > whole || !skips_tiles(whole, v)) { return; }
    int* first_key = (int*)scratch;
    float* key_norm = scratch + tile_skip_scratch(B, dims.stride, dims.NH) / 2;
    const float tau = 0.693147181f * tile_skip_tau(whole, v.run->tile_skip);
    const Grid grid((size_t)B * dims.NH, ATTENTION_THREADS, 0, stream);
    launch(attention_skip_kernel<Bias>, grid, first_key, key_norm, qkv, bias, dims, tau);
    dims.first_key = first_key;
}

inline bool uses_flash(const PositionConfig&, int) { return false; }
template <bool Causal, class... Arguments> bool choose_forward(const Arguments&...) { return false; }
template <bool Causal, class... Arguments> bool choose_backward(const Arguments&...) { return false; }
LAUNCHER size_t attention_backward_scratch(const PositionConfig&, int B, int T, int NH, int HS) {
    return portable_attention_backward_scratch(B, T, NH, HS) + tile_skip_scratch(B, T, NH);
}
// see live_tile_share
inline double chosen_share(const float* scratch, const PositionView& v, int T, Stream stream) {
    if (!v.causal) { return 1.0; }
    const int tiles = ceil_div(T, ATTENTION_TILE);
    std::vector<int> first_key((size_t)v.NH * tiles);
    copy_to_host(first_key.data(), scratch, sizeof(int) * first_key.size(), stream);
    return tile_share(v.NH * tiles, tiles, true, [&](int x) { return x % tiles + 1 - first_key[x] / ATTENTION_TILE; });
}
