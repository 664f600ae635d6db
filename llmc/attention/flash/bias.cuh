// attention/flash/bias.cuh -- the bias in attention/flash/forward.cuh: what a lane's scores of a tile start from.
#pragma once

#include "tiles.cuh"

// What a lane knows of its rows for the bias
struct FlashRowBias {
    static constexpr int OWN = FLASH_OWN;
    float slope[OWN];           // flash_row_slope
    float inner[OWN];           // flash_row_inner
    int begin[OWN];             // flash_begin, with a mask
    float* S;                   // of row 8 own: flash_row_S; in shared memory, because registers are scarce
    // and of the current tile:
    float from_ref[OWN];        // S_i - S_ref
    float row_bias[OWN];        // what is added to all logits of the row, over scale
};

// Fire's bias of a lane's pairs at 8 keys: psi by row and column; 1 / norm of the later position is the smaller one
template <bool Causal, int OWN>
__device__ inline void flash_fire_row(float (&f)[2 * OWN], const float (&psi)[OWN][2], const float (&row_inv)[OWN],
                                      const float* keys_inv, const FlashFire& fire) {
    float y[2 * OWN];
    UNROLL
    for (int e = 0; e < 2 * OWN; e++) {
        const float inv = row_inv[e / 2];
        y[e] = psi[e / 2][e % 2] * (Causal ? inv : fminf(inv, keys_inv[e % 2]));
    }
    fire.apply(f, y);
}

// scores (FLASH_ROWS,64) become the bias over scale, without row_bias: what the product adds q.k to, so that no logit
// waits for it. Edge: the tile of the own queries and the last one, with pairs on both sides.  keys_inv: args.inv of
// the tile
template <bool Causal, FlashBias Kind, bool Edge>
__device__ inline void flash_start_bias(FlashFragment<FLASH_TILE>& scores, FlashRowBias& rows,
                                        const float* tile_bias, const FlashFire& fire, const float* keys_inv) {
    constexpr bool line = Kind == FlashBias::Linear || Kind == FlashBias::Distance;
    constexpr bool has_S = flash_has_S(Kind);
    constexpr bool has_table = flash_has_table(Kind);
    constexpr int OWN = FLASH_OWN;
    const int column = threadIdx.x % 4 * 2;                 // this lane's first of each 8
    const int row = (int)threadIdx.x / 32 * FLASH_ROWS + (int)threadIdx.x % 32 / 4;     // its first
    const FlashKeyS* keys_S = (const FlashKeyS*)tile_bias;
    // 1. what is the same for all keys
    UNROLL
    for (int own = 0; own < OWN; own++) {
        rows.row_bias[own] = 0.0f;
        rows.from_ref[own] = 0.0f;
        if (has_S) { rows.from_ref[own] = rows.S[8 * own] * keys_S->sign + keys_S->shift[0] + keys_S->shift[1]; }
        if (line && !Edge) { rows.row_bias[own] = -rows.slope[own] * rows.from_ref[own]; }
    }
    // 2. what these keys bring. Tables: row group + 8 meets at column c + 8 the diagonal that row group meets at
    //    column c, so each entry is read once
    const float* entry = tile_bias + (FLASH_TILE - 1) + column - row;
    float table[OWN][2];                                    // of the lane's rows, at these 8 columns
    UNROLL
    for (int own = 0; own + 1 < OWN && has_table; own++) {
        table[own][0] = entry[-8 * own - 8];
        table[own][1] = entry[-8 * own - 7];
    }
    UNROLL
    for (int n = 0; n < 8; n++) {
        const float2 keys = has_S ? *(const float2*)(keys_S->S + 8 * n + column) : float2{0.0f, 0.0f};
        if (has_table) {
            UNROLL
            for (int own = OWN - 1; own > 0; own--) {
                table[own][0] = table[own - 1][0];
                table[own][1] = table[own - 1][1];
            }
            table[0][0] = entry[8 * n];
            table[0][1] = entry[8 * n + 1];
        }
        float f[2 * OWN];
        if (Kind == FlashBias::Fire) {
            flash_fire_row<Causal, OWN>(f, table, rows.slope, keys_inv + 8 * n + column, fire);
        }
        // 3. the bias
        UNROLL
        for (int e = 0; e < 2 * OWN; e++) {
            const int own = e / 2;
            const float key = e % 2 == 0 ? keys.x : keys.y;
            float score = 0.0f;
            if (line && Edge) {                             // keys on both sides: the distance itself
                score = -rows.slope[own] * fabsf(rows.from_ref[own] - key);
            } else if (line) {                              // keys on one side: the rest is row_bias
                score = rows.slope[own] * key;
            } else if (Kind == FlashBias::LogDistance) {
                score = -rows.slope[own] * flash_log(rows.inner[own] * (rows.from_ref[own] - key));
            } else if (Kind == FlashBias::Toeplitz) {
                score = table[own][e % 2];
            } else if (Kind == FlashBias::Fire) {
                score = f[e];
            }
            scores.pair(own, n)[e % 2] = score;
        }
    }
}

// Hidden pairs of an Edge become -inf: columns from nj on, after the end of the keys; if causal those after own_column,
// that of the lane's first row; Masked: those that `mask` hides.  j0: the tile's first key
template <bool Causal, bool Masked>
__device__ inline void flash_hide(FlashFragment<FLASH_TILE>& scores, const FlashRowBias& rows, int own_column, int nj,
                                  const AttentionMask& mask, int j0) {
    UNROLL
    for (int e = 0; e < scores.SIZE; e++) {
        const int c = scores.column(e);
        const int row = own_column + 8 * scores.own(e);
        if (c >= nj || (Causal && c > row)) { scores[e] = -INFINITY; }
        if (Masked && mask.hides(row, c, rows.begin[scores.own(e)] - j0)) { scores[e] = -INFINITY; }
    }
}
