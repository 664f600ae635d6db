// attention/flash/forward.cuh -- attention on the tensor cores: bf16 in and out, float32 sums, head sizes up to 128,
// any T, any bias of FlashBias.
//
//   logit_ij = scale q_i.k_j + B_ij     out = softmax(logit) v     saves lse_i = log sum_j e^(logit_ij)
//
// A block owns 128 queries, 32 per warp, so that a row of scores lives in the four lanes of a quad and each fragment of
// keys and values feeds four mma. It walks tiles of 64 keys: the diagonal first, then leftwards, then (bidirectional)
// rightwards. All is in units of log2, and B costs one fused multiply-add per logit. With scale2 = scale log2 e and
// slope_i = g_i / scale, left of the diagonal
//   x_ij = scale2 (q_i.k_j + slope_i (S_j - S_ref)) + scale2 row_bias_i      row_bias_i = -slope_i (S_i - S_ref)
// and S_ref, S of the tile's key that is nearest to the queries, keeps both terms small where P is not. kcable's
// B, -g_i log2(1 + (S_i - S_j)^2) / log2 e, is in the exponent and in the running maximum like any other: a factor
// (1 + D^2)^-g_i after the exponential would be 0 where the exponential overflows.
// After Dao et al. 2022; docs/attention.md: "One row, tile by tile", "Units of log2", "Where S is counted from".
#ifndef LLMC_ATTENTION_FLASH_FORWARD_CUH
#define LLMC_ATTENTION_FLASH_FORWARD_CUH

#include "bias.cuh"
#include "reach.cuh"
#include "skip.cuh"

// The rows of a warp. HS 128: with 32, just O and the scores take 192 registers, and all biases spill
constexpr int flash_forward_rows(FlashBias, int HS) { return HS == 64 ? 32 : 16; }

// The state of the online softmax: per row the reference of its exponents and this lane's part of the sum of P; the
// output that belongs to them.
template <int HS, int Rows> struct FlashSoftmax {
    float largest[Rows / 8];
    float sum[Rows / 8];
    FlashFragment<Rows, HS> O = {};

    __device__ FlashSoftmax() {
        UNROLL
        for (int own = 0; own < Rows / 8; own++) {
            largest[own] = -INFINITY;
            sum[own] = 0.0f;
        }
    }
};

// Raises the reference of a row if the tile's largest logit exceeds it by more than `slack` units of log2; then the sum
// and the output shrink. With a slack of 8 most tiles leave the output as it is (a P of 2^8 does no harm). Each row
// decides by itself: its neighbour may be padding. On a diagonal that is not the first tile slack is 0: skipping tiles
// needs a reference that is at least the logit of the row's own key.
template <int HS, int Rows>
__device__ inline void flash_rescale(FlashSoftmax<HS, Rows>& softmax, const float (&tile_largest)[Rows / 8],
                                     float slack) {
    bool grows = false;
    UNROLL
    for (int own = 0; own < Rows / 8; own++) { grows |= tile_largest[own] > softmax.largest[own] + slack; }
    if (grows) {
        UNROLL
        for (int own = 0; own < Rows / 8; own++) {
            const float before = softmax.largest[own];
            const float raised = tile_largest[own] > before + slack ? tile_largest[own] : before;
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

// logits over scale (Rows,64) become P, with their sums; sum and output are rescaled where the largest logit has grown.
template <int HS, int Rows>
__device__ inline void flash_exponentials(FlashFragment<Rows, FLASH_TILE>& scores, FlashSoftmax<HS, Rows>& softmax,
                                          const FlashRowBias<Rows>& rows, float scale2, float slack) {
    // 1. the largest logit of each row in this tile
    float tile_largest[Rows / 8];
    UNROLL
    for (int own = 0; own < Rows / 8; own++) {
        float t = scores.pair(own, 0)[0];
        UNROLL
        for (int n = 0; n < 8; n++) { t = fmaxf(t, fmaxf(scores.pair(own, n)[0], scores.pair(own, n)[1])); }
        t = fmaxf(t, shuffle_xor(t, 1));                    // the four lanes of the quad have the row
        t = fmaxf(t, shuffle_xor(t, 2));
        tile_largest[own] = scale2 * (t + rows.row_bias[own]);
    }
    // 2. what was summed so far, relative to it
    flash_rescale<HS, Rows>(softmax, tile_largest, slack);
    // 3. P = 2^(x - largest), x = scale2 (t + row_bias)
    UNROLL
    for (int own = 0; own < Rows / 8; own++) {
        // a row that has seen no key yet has no reference: its logits are -inf, its P is 0
        const float reference = softmax.largest[own] == -INFINITY ? 0.0f : softmax.largest[own];
        const float shift = scale2 * rows.row_bias[own] - reference;
        float tile_sum = 0.0f;                              // of this lane's columns; added up at the end
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

// Stores lse of the warp's rows, and out = O / sum by way of their place in Q_tile
template <int HS, int Rows>
__device__ inline void flash_store_out(const FlashArgs& args, bf16* Q_tile, FlashSoftmax<HS, Rows>& softmax, int bh,
                                       int i0) {
    const int lane = threadIdx.x % 32;
    const int row0 = threadIdx.x / 32 * Rows;
    const int C = args.NH * args.HS;
    float inverse[Rows / 8];
    UNROLL
    for (int own = 0; own < Rows / 8; own++) {
        const float sum = quad_sum(softmax.sum[own]);       // so far each lane had its own columns' part
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

// Q_tile, two stages of K_tile and V_tile; two stages of the bias, S of the queries; FIRE's f
constexpr size_t flash_forward_shared(FlashBias Kind, int HS, int Rows) {
    return sizeof(bf16) * (flash_block_rows(Rows) + 4 * FLASH_TILE) * HS +
           sizeof(float) * (2 * flash_tile_bias_floats(Rows) + flash_block_rows(Rows)) +
           (Kind == FlashBias::Fire ? sizeof(FirePiece) * FIRE_PIECES : 0);
}
constexpr int flash_forward_blocks(int HS, int Rows) { return HS == 64 && Rows == 16 ? 3 : 2; }     // on one SM

// One block per 4 Rows queries of one (batch, head), longest rows first. K, V and the bias's values are fetched one
// tile ahead. Over the whole loop a thread keeps Q (HS Rows / 64 registers) and O (HS Rows / 32), and in each step
// 2 Rows for the scores; the launch bounds leave it 255. Masked: args.mask is obeyed.
template <bool Causal, FlashBias Kind, int HS, int Rows, bool Masked>
__device__ __forceinline__ void flash_forward_block(const FlashArgs& args) {
    constexpr int TILE = FLASH_TILE;
    constexpr int OWNED = flash_block_rows(Rows);
    bf16* Q_tile = (bf16*)dynamic_shared();                 // (OWNED,HS)
    bf16* KV = Q_tile + OWNED * HS;                         // two stages of K_tile (TILE,HS), V_tile (TILE,HS)
    float* tile_biases = (float*)(KV + 4 * TILE * HS);      // two stages of flash_tile_bias_floats
    const int blocks = ceil_div(args.T, OWNED);
    const FlashPlace place(args, blocks);
    const int bh = place.bh;
    const int b = bh / args.NH;
    const int C = args.NH * args.HS;
    const int lane = threadIdx.x % 32;
    const int i0 = (blocks - 1 - place.turn) * OWNED;       // this block's first query,
    const int m0 = i0 / TILE;                               // in the tile m0
    const int row0 = threadIdx.x / 32 * Rows;               // this warp's first row,
    const int m = m0 + row0 / TILE;                         // in the tile m
    const int row = row0 + lane / 4;                        // this lane's first; it has row + 8 own
    const int keys = flash_tokens(args, b);
    using Walk = std::conditional_t<Masked, FlashMaskedWalk<Causal>, FlashWalk<Causal, flash_skips(Kind)>>;
    const Walk walk(args, bh, m0, flash_block_tiles(Rows), m, keys);
    const bf16* q = args.qkv + (size_t)b * args.stride * args.OC + bh % args.NH * args.HS;
    const float scale2 = args.scale * LOG2E;
    FlashTileBias next_bias = {0.0f, 0.0f};                 // this thread's part for the tile that is on its way
    const auto fetch = [&](int n, int stage) {              // starts the copies of tile n
        const bf16* k = q + (size_t)n * TILE * args.OC + C;
        flash_load_tile<HS>(KV + 2 * stage * TILE * HS, k, args.OC, args.HS, keys - n * TILE);
        flash_load_tile<HS>(KV + (2 * stage + 1) * TILE * HS, k + C, args.OC, args.HS, keys - n * TILE);
        cp_async_commit();
        next_bias = flash_fetch_bias<Kind, Rows>(tile_biases + stage * flash_tile_bias_floats(Rows), args, bh, m0, n);
    };
    FlashRowBias<Rows> rows;
    FlashSoftmax<HS, Rows> softmax;
    FlashOwned<HS, Rows, HS / 16> queries;

    // 1. the queries and the first tile of keys are on their way, in one group of copies
    if (walk.count > 0) {
        flash_load_tile<HS, OWNED>(Q_tile, q + (size_t)i0 * args.OC, args.OC, args.HS, args.T - i0);
        fetch(walk.tile(0), 0);
    }
    rows.S = tile_biases + 2 * flash_tile_bias_floats(Rows) + row;
    FlashFire fire = {};
    if (Kind == FlashBias::Fire) { fire.stage((FirePiece*)(rows.S - row + OWNED), args, bh % args.NH); }
    UNROLL
    for (int own = 0; own < Rows / 8; own++) {
        rows.slope[own] = flash_row_slope<Kind>(args, bh, i0 + row + 8 * own);
        rows.inner[own] = flash_row_inner<Kind>(args, bh, i0 + row + 8 * own);
        if (flash_has_S(Kind)) { rows.S[8 * own] = flash_row_S<Kind>(args, bh, i0 + row + 8 * own); }
        if (Masked) { rows.begin[own] = flash_begin(args, b, i0 + row + 8 * own); }
    }
    for (int it = 0; it < walk.count; it++) {
        // 2. this tile has arrived, the next one may start
        const int n = walk.tile(it);
        const int j0 = n * TILE;
        const int stage = it % 2;
        const bf16* K_tile = KV + 2 * stage * TILE * HS;
        const bf16* V_tile = K_tile + TILE * HS;
        float* tile_bias = tile_biases + stage * flash_tile_bias_floats(Rows);
        cp_async_wait<0>();
        flash_put_bias<Kind, Rows>(tile_bias, next_bias);
        __syncthreads();                    // the tile is complete, and no thread still reads the other stage
        if (it == 0) { queries.load(Q_tile, row0); }
        if (it + 1 < walk.count) { fetch(walk.tile(it + 1), 1 - stage); }
        if (!walk.is_own(n)) { continue; }  // only the other half of the block meets this tile
        // 3. scores = Q K^T
        FlashFragment<Rows, TILE> scores;
        scores.multiply_transposed(queries, Q_tile, row0, K_tile, 0);
        // 4. the bias and the masks; then P, with the sums and the output rescaled
        const float* inv = Kind == FlashBias::Fire ? args.inv + j0 : nullptr;
        bool edge = n == m || keys - j0 < TILE;             // on the diagonal, or keys end inside the tile
        if (Masked) { edge = edge || flash_cuts(args, b, m, n); }
        if (Kind == FlashBias::Fire) { fire.meet(args, i0 + row0, Rows, j0, TILE); }
        if (edge) {
            const int at = i0 - j0 + row;
            flash_add_bias<Causal, Kind, true, Rows, Masked>(scores, rows, tile_bias, at, keys - j0, args.mask, j0,
                                                             fire, inv);
        } else {
            flash_add_bias<Causal, Kind, false, Rows, Masked>(scores, rows, tile_bias, 0, 0, args.mask, 0, fire, inv);
        }
        const bool first = Causal || flash_block_tiles(Rows) == 1;      // the warp meets its own tile first
        flash_exponentials<HS, Rows>(scores, softmax, rows, scale2, first || n != m ? 8.0f : 0.0f);
        // 5. O += P V
        UNROLL
        for (int k = 0; k < TILE / 16; k++) { softmax.O.add_product(scores, 2 * k, V_tile, 16 * k); }
    }
    // 6. out and lse; padding is stored like a row that has seen no key
    UNROLL
    for (int own = 0; own < Rows / 8; own++) { softmax.sum[own] = i0 + row + 8 * own < keys ? softmax.sum[own] : 0.0f; }
    flash_store_out<HS, Rows>(args, Q_tile, softmax, bh, i0);
}

template <bool Causal, FlashBias Kind, int HS, int Rows = flash_forward_rows(Kind, HS)>
__global__ void __launch_bounds__(FLASH_THREADS, flash_forward_blocks(HS, Rows)) flash_forward_kernel(FlashArgs args) {
    flash_forward_block<Causal, Kind, HS, Rows, false>(args);
}
template <bool Causal, FlashBias Kind, int HS>
__global__ void __launch_bounds__(FLASH_THREADS, 2) flash_masked_forward_kernel(FlashArgs args) {
    flash_forward_block<Causal, Kind, HS, FLASH_MASKED_ROWS, true>(args);
}

template <bool Causal, FlashBias Kind, int HS> void flash_masked_forward_of(const FlashArgs& args, Stream stream) {
    const size_t blocks = (size_t)args.B * args.NH * ceil_div(args.T, flash_block_rows(FLASH_MASKED_ROWS));
    const Grid grid(blocks, FLASH_THREADS, flash_forward_shared(Kind, HS, FLASH_MASKED_ROWS), stream);
    launch(flash_masked_forward_kernel<Causal, Kind, HS>, grid, args);
}
template <bool Causal, FlashBias Kind, int HS, int Rows = flash_forward_rows(Kind, HS)>
void flash_forward_of(const FlashArgs& args, Stream stream) {
    const size_t blocks = (size_t)args.B * args.NH * ceil_div(args.T, flash_block_rows(Rows));
    const Grid grid(blocks, FLASH_THREADS, flash_forward_shared(Kind, HS, Rows), stream);
    launch(flash_forward_kernel<Causal, Kind, HS, Rows>, grid, args);
}

// false: a head size that these kernels do not have, and nothing was done
template <bool Causal, FlashBias Kind> bool flash_forward(const FlashArgs& args, Stream stream) {
    if (!flash_head_size(args.HS)) { return false; }
    if (args.mask.exists() && args.HS <= 64) { flash_masked_forward_of<Causal, Kind, 64>(args, stream); }
    else if (args.mask.exists()) { flash_masked_forward_of<Causal, Kind, 128>(args, stream); }
    else if (args.HS <= 64) { flash_forward_of<Causal, Kind, 64>(args, stream); }
    else { flash_forward_of<Causal, Kind, 128>(args, stream); }
    return true;
}

#endif
