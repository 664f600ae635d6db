// attention/flash/forward.cuh -- attention on the tensor cores: bf16 in and out, float32 sums, head sizes 64 and 128,
// any T, any bias of FlashBias.
//
//   logit_ij = scale q_i.k_j + B_ij     out = softmax(logit) v     saves lse_i = log sum_j e^(logit_ij)
//
// A block owns 64 queries, 16 per warp, so that a row of scores lives in the four lanes of a quad. It walks tiles of 64
// keys: the diagonal first, then leftwards, then (bidirectional) rightwards. All is in units of log2, and B costs one
// fused multiply-add per logit. With scale2 = scale log2 e and slope_i = g_i / scale, left of the diagonal
//   x_ij = scale2 (q_i.k_j + slope_i (S_j - S_ref)) + scale2 row_bias_i      row_bias_i = -slope_i (S_i - S_ref)
// and S_ref, S of the tile's key that is nearest to the queries, keeps both terms small where P is not. kcable's
// B, -g_i log2(1 + (S_i - S_j)^2) / log2 e, is in the exponent and in the running maximum like any other: a factor
// (1 + D^2)^-g_i after the exponential would be 0 where the exponential overflows.
// After Dao et al. 2022; docs/attention.md: "One row, tile by tile", "Units of log2", "Where S is counted from".
#ifndef LLMC_ATTENTION_FLASH_FORWARD_CUH
#define LLMC_ATTENTION_FLASH_FORWARD_CUH

#include "skip.cuh"
#include "tiles.cuh"

// The tiles of keys that the queries of tile m visit, in the order of the loop: with m = 3 and 6 tiles of tokens 3 2 1
// 0 if causal, 3 2 1 0 4 5 if not, without those outside the span. All but the first lie on one side of the queries and
// are free of masks, except at the end of the keys.
struct FlashWalk {
    int start;                              // the first tile, m
    int left;                               // how many tiles the first and those to its left are
    int count;                              // of all tiles

    // skips: the bias has spans.  tokens: of this sequence
    __device__ FlashWalk(const FlashArgs& args, bool causal, bool skips, int bh, int m, int tokens) {
        const int end = ceil_div(tokens, FLASH_TILE);
        const size_t at = (size_t)bh * ceil_div(args.T, FLASH_TILE) + m;
        const int first = args.span == nullptr ? 0 : args.span[at].first;
        int last = m;
        if (!causal) { last = !skips || args.span == nullptr ? end - 1 : args.span[at].last; }
        start = m;
        left = m < end ? m - first + 1 : 0;                 // none: all the queries are padding
        count = left + (m < end ? last - m : 0);
    }
    __device__ int tile(int it) const { return it < left ? start - it : start + it - left + 1; }
};

// What a lane knows of its two rows for the bias
struct FlashRowBias {
    float slope[2];             // flash_row_slope
    float inner[2];             // flash_row_inner
    float S[2];                 // flash_row_S
    // and of the tile in hand:
    float from_ref[2];          // S_i - S_ref
    float row_bias[2];          // what is added to all logits of the row, over scale
};

// The state of the online softmax: per row the reference of its exponents and this lane's part of the sum of P; the
// output that belongs to them, of the warp's 16 rows.
template <int HS> struct FlashSoftmax {
    float largest[2] = {-INFINITY, -INFINITY};
    float sum[2] = {0.0f, 0.0f};
    float O[HS / 8][4] = {};
};

// scores (16,64), q.k as mma leaves it, become logits over scale, but for row_bias. Edge: the diagonal tile and the
// last one, with pairs on both sides and masks: columns after own_column, that of the lane's upper row, are masked if
// causal, columns from nj on are after the end of the keys. Otherwise `right` says on which side of the queries the
// tile lies.
template <bool Causal, FlashBias Kind, bool Edge>
__device__ inline void flash_add_bias(float (&scores)[8][4], FlashRowBias& rows, const float* tile_bias, bool right,
                                      int own_column, int nj) {
    constexpr bool line = Kind == FlashBias::Linear || Kind == FlashBias::Distance;
    const int column = threadIdx.x % 4 * 2;                 // this lane's first of each 8
    float slope[2];                 // negative on the right, where S_j - S_ref grows with the distance to the queries
    UNROLL
    for (int half = 0; half < 2; half++) {
        rows.row_bias[half] = 0.0f;
        rows.from_ref[half] = 0.0f;
        slope[half] = right ? -rows.slope[half] : rows.slope[half];
        if (line || Kind == FlashBias::LogDistance) {
            rows.from_ref[half] = rows.S[half] + tile_bias[FLASH_TILE] + tile_bias[FLASH_TILE + 1];
        }
        if (line && !Edge) { rows.row_bias[half] = -slope[half] * rows.from_ref[half]; }
    }
    // Toeplitz: row group + 8 meets at column c + 8 the diagonal that row group meets at column c, so each entry is
    // read once.
    const float* entry = tile_bias + (FLASH_TILE - 1) + column - (threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);
    float before[2] = {0.0f, 0.0f};                         // the entries of 8 columns ago
    if (Kind == FlashBias::Toeplitz) {
        before[0] = entry[-8];
        before[1] = entry[-7];
    }
    UNROLL
    for (int n = 0; n < 8; n++) {
        constexpr bool has_S = line || Kind == FlashBias::LogDistance;
        const float2 keys = has_S ? *(const float2*)(tile_bias + 8 * n + column) : float2{0.0f, 0.0f};  // S_j - S_ref
        UNROLL
        for (int e = 0; e < 2; e++) {
            const int c = 8 * n + column + e;
            const float key = e == 0 ? keys.x : keys.y;
            if (line && Edge) {                             // keys on both sides: the distance itself
                scores[n][e] -= rows.slope[0] * fabsf(rows.from_ref[0] - key);
                scores[n][2 + e] -= rows.slope[1] * fabsf(rows.from_ref[1] - key);
            } else if (line) {                              // keys on one side: the rest is row_bias
                scores[n][e] += slope[0] * key;
                scores[n][2 + e] += slope[1] * key;
            } else if (Kind == FlashBias::LogDistance) {
                scores[n][e] -= rows.slope[0] * flash_log(rows.inner[0] * (rows.from_ref[0] - key));
                scores[n][2 + e] -= rows.slope[1] * flash_log(rows.inner[1] * (rows.from_ref[1] - key));
            } else if (Kind == FlashBias::Toeplitz) {
                const float bias = entry[8 * n + e];
                scores[n][e] += bias;
                scores[n][2 + e] += before[e];
                before[e] = bias;
            }
            if (Edge) {
                if (c >= nj || (Causal && c > own_column)) { scores[n][e] = -INFINITY; }
                if (c >= nj || (Causal && c > own_column + 8)) { scores[n][2 + e] = -INFINITY; }
            }
        }
    }
}

// Raises the reference of a row where the tile asks for it: only by more than 8 units of log2, so that most tiles leave
// the output alone (a P of 2^8 does no harm); then the sum and the output shrink. Each row by itself: its neighbour may
// be padding.
template <int HS> __device__ inline void flash_rescale(FlashSoftmax<HS>& softmax, const float (&tile_largest)[2]) {
    if (tile_largest[0] > softmax.largest[0] + 8.0f || tile_largest[1] > softmax.largest[1] + 8.0f) {
        UNROLL
        for (int half = 0; half < 2; half++) {
            const float before = softmax.largest[half];
            const float raised = tile_largest[half] > before + 8.0f ? tile_largest[half] : before;
            const float shrink = raised == -INFINITY ? 1.0f : ex2(before - raised);
            softmax.largest[half] = raised;
            softmax.sum[half] *= shrink;
            UNROLL
            for (int n = 0; n < HS / 8; n++) {
                softmax.O[n][2 * half] *= shrink;
                softmax.O[n][2 * half + 1] *= shrink;
            }
        }
    }
    syncwarp();                             // the branch is a quad's; what follows is the warp's
}

// logits over scale (16,64) become P, with their sums; sum and output are rescaled where the largest logit has grown.
template <int HS>
__device__ inline void flash_exponentials(float (&scores)[8][4], FlashSoftmax<HS>& softmax, const FlashRowBias& rows,
                                          float scale2) {
    // 1. the largest logit of each row in this tile
    float tile_largest[2];
    UNROLL
    for (int half = 0; half < 2; half++) {
        float t = scores[0][2 * half];
        UNROLL
        for (int n = 0; n < 8; n++) { t = fmaxf(t, fmaxf(scores[n][2 * half], scores[n][2 * half + 1])); }
        t = fmaxf(t, shuffle_xor(t, 1));                    // the four lanes of the quad have the row
        t = fmaxf(t, shuffle_xor(t, 2));
        tile_largest[half] = scale2 * (t + rows.row_bias[half]);
    }
    // 2. what was summed so far, relative to it
    flash_rescale<HS>(softmax, tile_largest);
    // 3. P = 2^(x - largest), x = scale2 (t + row_bias)
    UNROLL
    for (int half = 0; half < 2; half++) {
        // a row that has seen no key yet has no reference: its logits are -inf, its P is 0
        const float reference = softmax.largest[half] == -INFINITY ? 0.0f : softmax.largest[half];
        const float shift = scale2 * rows.row_bias[half] - reference;
        float tile_sum = 0.0f;                              // of this lane's columns; added up at the end
        UNROLL
        for (int n = 0; n < 8; n++) {
            float& p0 = scores[n][2 * half];
            float& p1 = scores[n][2 * half + 1];
            p0 = ex2(scale2 * p0 + shift);
            p1 = ex2(scale2 * p1 + shift);
            tile_sum += p0 + p1;
        }
        softmax.sum[half] += tile_sum;
    }
}

// Stores out = O / sum and lse of the warp's 16 rows. O goes through the warp's own rows of Q_tile, which nobody reads
// any more, so that global memory sees 16-byte stores.
template <int HS>
__device__ inline void flash_store_out(const FlashArgs& args, bf16* Q_tile, FlashSoftmax<HS>& softmax, int bh, int i0) {
    const int lane = threadIdx.x % 32;
    const int row0 = threadIdx.x / 32 * 16;
    const int C = args.NH * HS;
    const int b = bh / args.NH, h = bh % args.NH;
    UNROLL
    for (int half = 0; half < 2; half++) {
        float& sum = softmax.sum[half];
        sum += shuffle_xor(sum, 1);                         // so far each lane had its own columns' part
        sum += shuffle_xor(sum, 2);
        const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;      // 0: padding, or a row without a key
        const int row = row0 + lane / 4 + 8 * half;
        if (args.lse != nullptr && lane % 4 == 0 && i0 + row < args.T) {
            float* lse = args.lse + (size_t)bh * args.stride + i0 + row;
            *lse = sum > 0.0f ? softmax.largest[half] * LN2 + logf(sum) : -INFINITY;
        }
        UNROLL
        for (int n = 0; n < HS / 8; n++) {                  // four bytes of each piece are this lane's
            uint32_t* piece = (uint32_t*)flash_at<HS>(Q_tile, row, n);
            piece[lane % 4] = pack_bf16(softmax.O[n][2 * half] * inverse, softmax.O[n][2 * half + 1] * inverse);
        }
    }
    syncwarp();                                             // the rows are complete: the other lanes read them
    UNROLL
    for (int e = lane; e < 16 * HS / 8; e += 32) {          // neighbouring lanes, neighbouring pieces
        const int row = row0 + e / (HS / 8);
        const int piece = e % (HS / 8);
        if (i0 + row < args.T) {
            bf16* to = args.out + ((size_t)b * args.T + i0 + row) * C + h * HS + piece * 8;
            *(uint4*)to = *(const uint4*)flash_at<HS>(Q_tile, row, piece);
        }
    }
}

// Q_tile, two stages of K_tile and V_tile; two stages of tile_bias
constexpr size_t flash_forward_shared(int HS) {
    return sizeof(bf16) * 5 * FLASH_TILE * HS + sizeof(float) * 2 * FLASH_TILE_BIAS;
}

// One block per 64 queries of one (batch, head), longest rows first. K, V and the bias's values are fetched one tile
// ahead. Over the whole loop a thread keeps Q_fragment (HS/4 registers) and O (HS/2), and in each step 32 for the
// scores; the launch bounds leave it 168 (HS 64: three blocks per SM) or 255 (HS 128: two).
template <bool Causal, FlashBias Kind, int HS>
__global__ void __launch_bounds__(FLASH_THREADS, HS == 64 ? 3 : 2) flash_forward_kernel(FlashArgs args) {
    constexpr int TILE = FLASH_TILE;
    bf16* Q_tile = (bf16*)dynamic_shared();                 // (TILE,HS)
    bf16* KV = Q_tile + TILE * HS;                          // two stages of K_tile (TILE,HS), V_tile (TILE,HS)
    float* tile_biases = (float*)(KV + 4 * TILE * HS);      // two stages of (FLASH_TILE_BIAS)
    const int tiles = ceil_div(args.T, TILE);
    const FlashPlace place(args, tiles);
    const int bh = place.bh;
    const int b = bh / args.NH;
    const int C = args.NH * HS;
    const int thread = threadIdx.x;
    const int lane = thread % 32;
    const int m = tiles - 1 - place.turn;                   // this block's tile of queries
    const int i0 = m * TILE;
    const int row0 = thread / 32 * 16;                      // this warp's first row,
    const int row = row0 + lane / 4;                        // this lane's first of two: row and row + 8
    const int keys = flash_tokens(args, b);
    const FlashWalk walk(args, Causal, flash_skips(Kind), bh, m, keys);
    const bf16* q = args.qkv + (size_t)b * args.stride * args.OC + bh % args.NH * HS;
    const float scale2 = args.scale * LOG2E;
    FlashTileBias next_bias = {0.0f, 0.0f};                 // this thread's value for the tile that is on its way
    const auto fetch = [&](int n, int stage) {              // starts the copies of tile n
        const bf16* k = q + (size_t)n * TILE * args.OC + C;
        flash_load_tile<HS>(KV + 2 * stage * TILE * HS, k, args.OC, keys - n * TILE);
        flash_load_tile<HS>(KV + (2 * stage + 1) * TILE * HS, k + C, args.OC, keys - n * TILE);
        cp_async_commit();
        next_bias = flash_tile_bias<Kind>(args, bh, i0, n * TILE, flash_reference(n, m), thread);
    };
    FlashRowBias rows;
    FlashSoftmax<HS> softmax;
    uint32_t Q_fragment[HS / 16][4];                        // the warp's 16 queries, for the whole loop

    // 1. the queries and the first tile of keys are on their way, in one group of copies
    if (walk.count > 0) {
        flash_load_tile<HS>(Q_tile, q + (size_t)i0 * args.OC, args.OC, args.T - i0);
        fetch(walk.tile(0), 0);
    }
    UNROLL
    for (int half = 0; half < 2; half++) {
        rows.slope[half] = flash_row_slope<Kind>(args, bh, i0 + row + 8 * half);
        rows.inner[half] = flash_row_inner<Kind>(args, bh, i0 + row + 8 * half);
        rows.S[half] = flash_row_S<Kind>(args, bh, i0 + row + 8 * half, i0);
    }
    for (int it = 0; it < walk.count; it++) {
        // 2. this tile has arrived, the next one may start
        const int n = walk.tile(it);
        const int j0 = n * TILE;
        const int stage = it % 2;
        const bf16* K_tile = KV + 2 * stage * TILE * HS;
        const bf16* V_tile = K_tile + TILE * HS;
        float* tile_bias = tile_biases + stage * FLASH_TILE_BIAS;
        cp_async_wait<0>();
        if (Kind != FlashBias::None) { tile_bias[thread] = next_bias.value - next_bias.minus; }
        __syncthreads();                    // the tile is there, and nobody reads the other stage any more
        if (it == 0) {
            UNROLL
            for (int k = 0; k < HS / 16; k++) { flash_load_a<HS>(Q_fragment[k], Q_tile, row0, k); }
        }
        if (it + 1 < walk.count) { fetch(walk.tile(it + 1), 1 - stage); }
        // 3. scores = Q K^T
        float scores[8][4] = {};
        UNROLL
        for (int k = 0; k < HS / 16; k++) {
            UNROLL
            for (int c = 0; c < 4; c++) {                   // 16 keys: two mma
                uint32_t K_fragment[4];
                flash_load_b<HS>(K_fragment, K_tile, 16 * c, k);
                mma_m16n8k16(scores[2 * c], Q_fragment[k], K_fragment[0], K_fragment[1]);
                mma_m16n8k16(scores[2 * c + 1], Q_fragment[k], K_fragment[2], K_fragment[3]);
            }
        }
        // 4. the bias and the masks; then P, with the sums and the output rescaled
        const bool edge = n == m || keys - j0 < TILE;       // on the diagonal, or keys end inside the tile
        if (edge) { flash_add_bias<Causal, Kind, true>(scores, rows, tile_bias, false, i0 - j0 + row, keys - j0); }
        else { flash_add_bias<Causal, Kind, false>(scores, rows, tile_bias, n > m, 0, 0); }
        flash_exponentials<HS>(scores, softmax, rows, scale2);
        // 5. O += P V: the results of two neighbouring mma, rounded to bf16, are the left operand of the next
        UNROLL
        for (int k = 0; k < TILE / 16; k++) {
            const float (&left)[4] = scores[2 * k];
            const float (&right)[4] = scores[2 * k + 1];
            const uint32_t P[4] = {pack_bf16(left[0], left[1]), pack_bf16(left[2], left[3]),
                                   pack_bf16(right[0], right[1]), pack_bf16(right[2], right[3])};
            UNROLL
            for (int c = 0; c < HS / 16; c++) {             // 16 columns of the head: two mma
                uint32_t V_fragment[4];
                flash_load_b_trans<HS>(V_fragment, V_tile, 16 * k, c);
                mma_m16n8k16(softmax.O[2 * c], P, V_fragment[0], V_fragment[1]);
                mma_m16n8k16(softmax.O[2 * c + 1], P, V_fragment[2], V_fragment[3]);
            }
        }
    }
    // 6. out and lse; padding is stored like a row that has seen no key
    UNROLL
    for (int half = 0; half < 2; half++) { softmax.sum[half] = i0 + row + 8 * half < keys ? softmax.sum[half] : 0.0f; }
    flash_store_out<HS>(args, Q_tile, softmax, bh, i0);
}

// false: a head size that these kernels do not have, and nothing was done
template <bool Causal, FlashBias Kind> bool flash_forward(const FlashArgs& args, Stream stream) {
    const size_t blocks = (size_t)args.B * args.NH * ceil_div(args.T, FLASH_TILE);
    const Grid grid(blocks, FLASH_THREADS, flash_forward_shared(args.HS), stream);
    if (args.HS == 64) { launch(flash_forward_kernel<Causal, Kind, 64>, grid, args); }
    else if (args.HS == 128) { launch(flash_forward_kernel<Causal, Kind, 128>, grid, args); }
    return flash_head_size(args.HS);
}

#endif
