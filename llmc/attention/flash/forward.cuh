// attention/flash/forward.cuh -- attention on the tensor cores: bf16 in and out, float32 sums, heads of 32 to 128.
//
//   logit_ij = scale q_i.k_j + B_ij     out = softmax(logit) v     lse_i = log sum_j e^(logit_ij)
//
// A block owns 64 queries, a warp 16 of them, so that a row of scores lies in the four lanes of a quad. For each tile
// of 64 keys (FlashWalk: the queries' own tile first, then leftwards, then rightwards), with scale2 = scale log2 e:
//   scores = B / scale (FlashStart)     += Q K^T     hide     P = 2^(scale2 (scores + row_bias) - largest)
//   O += P V, rescaled when the row's largest logit has grown by more than 2^8
// The product starts from B / scale, so that no logit waits for an addition; row_bias is the part of B that all keys of
// a tile share. Meanwhile K, V and the bias's values of the next tile are fetched into the other stage.
// After Dao et al. 2022. docs/attention.md: "One row, tile by tile", "Units of log2", "Where S is counted from".
#pragma once

#include "bias.cuh"

// scores (FLASH_ROWS,64) become B / scale for the keys of tile n
template <bool Causal, bool Edge, FlashBias Kind>
__device__ inline void flash_start_scores(FlashFragment<FLASH_TILE>& scores, FlashStart<Kind>& bias,
                                          const FlashArgs& args, int stage, int n) {
    bias.template meet<Edge>(args, stage, n);
    UNROLL
    for (int k = 0; k < scores.N; k++) { bias.template pairs<Causal, Edge>(scores.x[k], k); }
}

// ----------------------------------------------------------------------------------------------------------
// the kernel

// The state of the online softmax: each row's reference of exponents, this lane's part of the sum of P, and O.
template <int HS> struct FlashSoftmax {
    float largest[FLASH_OWN] = {-INFINITY, -INFINITY};
    float sum[FLASH_OWN] = {};
    FlashFragment<HS> O = {};
};

constexpr float FLASH_SLACK = 8.0f;

// Raises the reference of a row if the tile's largest logit exceeds it by more than FLASH_SLACK units of log2, and
// shrinks its sum and O. Most tiles leave O as it is (a P of 2^8 does no harm). Each row decides for itself: its
// neighbour may be padding.
template <int HS>
__device__ inline void flash_rescale(FlashSoftmax<HS>& softmax, const float (&tile_largest)[FLASH_OWN]) {
    bool grows = false;
    UNROLL
    for (int own = 0; own < FLASH_OWN; own++) { grows |= tile_largest[own] > softmax.largest[own] + FLASH_SLACK; }
    if (grows) {
        UNROLL
        for (int own = 0; own < FLASH_OWN; own++) {
            const float before = softmax.largest[own];
            const float raised = tile_largest[own] > before + FLASH_SLACK ? tile_largest[own] : before;
            const float shrink = raised == -INFINITY ? 1.0f : ex2(before - raised);
            softmax.largest[own] = raised;
            softmax.sum[own] *= shrink;
            UNROLL
            for (int n = 0; n < HS / 8; n++) {
                float* O = softmax.O.pair(own, n);
                O[0] *= shrink;
                O[1] *= shrink;
            }
        }
    }
    syncwarp();                             // the branch is a quad's; what follows is the warp's
}

// scores (FLASH_ROWS,64), logits / scale without row_bias, become P, whose sums are added to softmax.sum
template <int HS>
__device__ inline void flash_exponentials(FlashFragment<FLASH_TILE>& scores, FlashSoftmax<HS>& softmax,
                                          const float (&row_bias)[FLASH_OWN], float scale2) {
    // 1. the largest logit of each row in this tile
    float tile_largest[FLASH_OWN];
    UNROLL
    for (int own = 0; own < FLASH_OWN; own++) {
        float t = scores.pair(own, 0)[0];
        UNROLL
        for (int n = 0; n < 8; n++) { t = fmaxf(t, fmaxf(scores.pair(own, n)[0], scores.pair(own, n)[1])); }
        t = fmaxf(t, shuffle_xor(t, 1));                    // the four lanes of the quad have the row
        t = fmaxf(t, shuffle_xor(t, 2));
        tile_largest[own] = scale2 * (t + row_bias[own]);
    }
    // 2. earlier sums, relative to it
    flash_rescale(softmax, tile_largest);
    // 3. P = 2^(x - largest), x = scale2 (t + row_bias)
    UNROLL
    for (int own = 0; own < FLASH_OWN; own++) {
        // a row that has seen no key yet has no reference: its logits are -inf, its P is 0
        const float reference = softmax.largest[own] == -INFINITY ? 0.0f : softmax.largest[own];
        const float shift = scale2 * row_bias[own] - reference;
        float tile_sum = 0.0f;                              // of this lane's columns; quad_sum adds at the end
        UNROLL
        for (int n = 0; n < 8; n++) {
            float* P = scores.pair(own, n);
            P[0] = ex2(scale2 * P[0] + shift);
            P[1] = ex2(scale2 * P[1] + shift);
            tile_sum += P[0] + P[1];
        }
        softmax.sum[own] += tile_sum;
    }
}

// Stores lse of the warp's rows, and out = O / sum by way of the rows' place in Q_tile
template <int HS>
__device__ inline void flash_store_out(const FlashArgs& args, bf16* Q_tile, FlashSoftmax<HS>& softmax, int bh, int i0) {
    const int lane = threadIdx.x % 32;
    const int row0 = threadIdx.x / 32 * FLASH_ROWS;
    const int C = args.NH * args.HS;
    float inverse[FLASH_OWN];
    UNROLL
    for (int own = 0; own < FLASH_OWN; own++) {
        const float sum = quad_sum(softmax.sum[own]);       // each lane has the part of its own columns
        inverse[own] = sum > 0.0f ? 1.0f / sum : 0.0f;      // 0: padding, or a row without a key
        const int i = i0 + row0 + lane / 4 + 8 * own;
        if (args.lse != nullptr && lane % 4 == 0 && i < args.T) {
            const float lse = softmax.largest[own] * LN2 + logf(sum);
            args.lse[(size_t)bh * args.stride + i] = sum > 0.0f ? lse : -INFINITY;
        }
    }
    bf16* out = args.out + ((size_t)(bh / args.NH) * args.T + i0) * C + bh % args.NH * args.HS;
    softmax.O.store(out, C, args.T - i0, args.HS, Q_tile, inverse);
}

// Q_tile, two stages of K_tile and V_tile, the bias
template <FlashBias Kind> constexpr size_t flash_forward_shared(int HS) {
    return sizeof(bf16) * 5 * FLASH_TILE * HS + sizeof(float) * FlashStart<Kind>::SHARED;
}
// blocks on one SM: 4, 3 or 2 leave 128, 168 or 255 registers per thread
constexpr int flash_forward_blocks(int HS) {
    if (HS != 64) { return 2; }
    return flash_wgmma(FLASH_TILE) ? 4 : 3;
}

// One block per 64 queries of one (batch, head), longest rows first. K, V and the bias's values are fetched one tile
// ahead. Over the whole loop a thread keeps O (HS / 2 registers) and, except on Hopper, Q (HS / 4), and in each step
// the scores (32). Masked: args.mask is obeyed.
template <bool Causal, FlashBias Kind, int HS, bool Masked>
__global__ void __launch_bounds__(FLASH_THREADS, flash_forward_blocks(HS)) flash_forward_kernel(FlashArgs args) {
    constexpr int TILE = FLASH_TILE;
    bf16* Q_tile = (bf16*)dynamic_shared();                 // (TILE,HS)
    bf16* KV = Q_tile + TILE * HS;                          // two stages of K_tile (TILE,HS), V_tile (TILE,HS)
    const int blocks = ceil_div(args.T, TILE);
    const FlashPlace place(args, blocks);
    const int bh = place.bh;
    const int b = bh / args.NH;
    const int C = args.NH * args.HS;
    const int lane = threadIdx.x % 32;
    const int m = blocks - 1 - place.turn;                  // the tile of this block's queries,
    const int i0 = m * TILE;                                // which begins here
    const int row0 = threadIdx.x / 32 * FLASH_ROWS;         // this warp's first
    const int row = row0 + lane / 4;                        // this lane's first; it has row + 8 own
    const int keys = flash_tokens(args, b);
    const FlashMask<Causal, Masked> mask = {args, b, keys};
    const FlashWalk<Causal, flash_skips(Kind), Masked> walk(args, bh, m, keys);
    const bf16* q = args.qkv + (size_t)b * args.stride * args.OC + bh % args.NH * args.HS;
    const float scale2 = args.scale * LOG2E;
    FlashStart<Kind> bias(args, bh, m, (float*)(KV + 4 * TILE * HS));
    const auto fetch = [&](int n, int stage) {              // starts the copies of tile n
        const bf16* k = q + (size_t)n * TILE * args.OC + C;
        flash_load_tile<HS>(KV + 2 * stage * TILE * HS, k, args.OC, args.HS, keys - n * TILE);
        flash_load_tile<HS>(KV + (2 * stage + 1) * TILE * HS, k + C, args.OC, args.HS, keys - n * TILE);
        cp_async_commit();
        bias.fetch(args, n);
    };
    FlashSoftmax<HS> softmax;
    constexpr bool in_place = flash_wgmma(TILE);        // the products read Q_tile
    FlashOwned<HS, in_place ? 0 : HS / 16> queries;

    // 1. the queries and the first tile of keys are on their way, in one group of copies
    if (walk.count > 0) {
        flash_load_tile<HS>(Q_tile, q + (size_t)i0 * args.OC, args.OC, args.HS, args.T - i0);
        fetch(walk.tile(0), 0);
    }
    bias.rows(args, i0 + row);
    int begin[FLASH_OWN] = {};                              // of the documents of the lane's queries
    UNROLL
    for (int own = 0; own < FLASH_OWN; own++) { begin[own] = mask.begin(i0 + row + 8 * own); }
    if constexpr (!in_place) {
        flash_wait_copies();
        __syncthreads();
        queries.load(Q_tile, row0);
    }
    for (int it = 0; it < walk.count; it++) {
        // 2. this tile has arrived, the next one may start
        const int n = walk.tile(it);
        const int stage = it % 2;
        const bf16* K_tile = KV + 2 * stage * TILE * HS;
        const bf16* V_tile = K_tile + TILE * HS;
        bias.put(stage, args, n);
        flash_wait_copies();
        __syncthreads();                    // the tile is complete, and no thread still reads the other stage
        if (it + 1 < walk.count) { fetch(walk.tile(it + 1), 1 - stage); }
        // 3. scores = the bias + Q K^T; the masks
        FlashFragment<TILE> scores;
        const bool edge = mask.edge(m, n);
        if (bias.EDGE && edge) { flash_start_scores<Causal, true>(scores, bias, args, stage, n); }
        else { flash_start_scores<Causal, false>(scores, bias, args, stage, n); }
        wgmma_fence();
        scores.add_transposed(queries, Q_tile, row0, K_tile, 0);
        wgmma_wait();
        if (edge) { mask.hide(scores, begin, i0 + row, n * TILE); }
        // 4. P, with the sums and the output rescaled
        flash_exponentials(scores, softmax, bias.row_bias, scale2);
        // 5. O += P V
        const FlashLeft<TILE> P(scores);
        wgmma_fence();
        softmax.O.add_product(P, V_tile, 0);
        wgmma_wait();
    }
    // 6. out and lse; padding is stored like a row that has seen no key
    UNROLL
    for (int own = 0; own < FLASH_OWN; own++) {
        if (i0 + row + 8 * own >= keys) { softmax.sum[own] = 0.0f; }
    }
    flash_store_out(args, Q_tile, softmax, bh, i0);
}

template <bool Causal, FlashBias Kind, int HS> void flash_forward_of(const FlashArgs& args, Stream stream) {
    const size_t blocks = (size_t)args.B * args.NH * ceil_div(args.T, FLASH_TILE);
    const Grid grid(blocks, FLASH_THREADS, flash_forward_shared<Kind>(HS), stream);
    if (args.mask.exists()) { launch(flash_forward_kernel<Causal, Kind, HS, true>, grid, args); }
    else { launch(flash_forward_kernel<Causal, Kind, HS, false>, grid, args); }
}

// false: these kernels do not have this head size, and nothing was done
template <bool Causal, FlashBias Kind> bool flash_forward(const FlashArgs& args, Stream stream) {
    if (!flash_head_size(args.HS)) { return false; }
    if (args.HS <= 64) { flash_forward_of<Causal, Kind, 64>(args, stream); }
    else { flash_forward_of<Causal, Kind, 128>(args, stream); }
    return true;
}
