// attention/flash/backward.cuh -- backward of attention/flash/forward.cuh on the tensor cores: bf16 in and out, float32
// sums.
//
//   P_ij = e^(logit_ij - lse_i)     row_dot_i = dout_i.out_i     dlogit_ij = P_ij (dout_i.v_j - row_dot_i)
//   dv_j = sum_i P_ij dout_i        dk_j = scale sum_i dlogit_ij q_i        dq_i = scale sum_j dlogit_ij k_j
//   and the bias takes sums of dlogit; with sign_ij = 1 where i >= j, else -1:
//     Distance     dS_j += sum_i g_i sign_ij dlogit_ij     dS_i -= g_i sum_j sign_ij dlogit_ij
//                  dg_i = -sum_j dlogit_ij |S_i - S_j|
//     LogDistance  dS_j += 2 sum_i g_i w_ij     dS_i -= 2 g_i sum_j w_ij     w_ij = dlogit_ij a_ij / (1 + a_ij^2)
//                  a_ij = S_i - S_j, and dg_i = -sum_j dlogit_ij log(1 + a_ij^2)
//                  inside: a_ij = g_i (S_i - S_j), and dg_i = -2 sum_j w_ij (S_i - S_j)
//     Toeplitz     dtable[b,h][table_zero + j-i] = sum of dlogit_ij along the diagonal
//     Fire         sums[b,h]: four sums of dlogit_ij for each piece of f, position/fire.cuh
// With args.factor, dlogit in the sums of the bias is f_i dlogit_ij, and moment_i = sum_j B_ij f_i dlogit_ij.
// Two kernels, each recomputing P and dlogit. A block owns the rows of its scores and meets the columns, tile by tile:
//   dkdv   owns keys      scores = K Q^T   dP = V dout^T   dV += P dout, dK += dlogit Q; the column part of dS
//   dq     owns queries   scores = Q K^T   dP = dout V^T   dQ += dlogit K; dg, the row part of dS, the
//                         sums of Toeplitz and Fire
// Every output has one writer and one order of summation: the same input gives the same bits. Seven products instead of
// five pay for it. Both parts of dS sum the same float32 dlogit.
// docs/attention.md: "Two kernels for the backward", "CABLE: the gradients of S and g", "The row part of dS must stay".
#pragma once

#include "dkdv.cuh"
#include "dq.cuh"

// ----------------------------------------------------------------------------------------------------------
// gathers row_dot and the other values of a query for the two kernels: (B*NH,tiles,flash_variants), padded after T

template <FlashBias Kind, int HS>
__global__ void flash_backward_prepare_kernel(FlashQueries* queries, FlashArgs args) {
    constexpr int ROW_THREADS = HS / 8;                     // one per piece of 16 bytes; args.HS / 8 of them have data
    const int piece = threadIdx.x % ROW_THREADS;
    const int rows = round_up(args.T, FLASH_TILE);
    const int C = args.NH * args.HS;
    const size_t row = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / ROW_THREADS;       // of (B,rows,NH)
    const size_t bt = row / args.NH;
    const size_t h = row % args.NH;
    const size_t b = bt / rows;
    const size_t t = bt % rows;
    const size_t bh = b * args.NH + h;
    // 1. row_dot = out.dout: a piece per thread, then the sum over the row's threads
    float row_dot = 0.0f;
    if (b < (size_t)args.B && t < (size_t)args.T && piece * 8 < args.HS) {
        const size_t at = (b * args.T + t) * C + h * args.HS + piece * 8;
        const FlashPiece out = *(const FlashPiece*)(args.out + at);
        const FlashPiece dout = *(const FlashPiece*)(args.dout + at);
        UNROLL
        for (int k = 0; k < 4; k++) {
            row_dot += unpack_lo(out.x[k]) * unpack_lo(dout.x[k]) + unpack_hi(out.x[k]) * unpack_hi(dout.x[k]);
        }
    }
    UNROLL
    for (int o = ROW_THREADS / 2; o > 0; o /= 2) { row_dot += shuffle_xor(row_dot, o); }
    if (b >= (size_t)args.B || piece != 0) { return; }
    // 2. the query, its S counted from the chunk's origin
    FlashQuery query = {-INFINITY, 0.0f, 0.0f, 0.0f};
    if (t < (size_t)args.T) {
        const size_t at = bh * args.stride + t;
        const float lse = args.lse[at];
        if (lse != -INFINITY) {                             // else padding, or a query that has seen no key: P stays 0
            query.start = -lse / args.scale;
            query.minus_dot = -row_dot;
        }
        FlashTerms<Kind>::fill(query, args, bh, h, t);
    }
    FlashQueries* tile = queries + (bh * rows + t) / FLASH_TILE * flash_variants(Kind);
    tile[FROM_CHUNK].row[t % FLASH_TILE] = query;
    if (flash_variants(Kind) == 1) { return; }
    // 3. the same, counted from the tile's first row and from its last
    const float* S = args.S_offset + bh * args.stride;
    const float raw = query.place;
    const int first = (int)t / FLASH_TILE * FLASH_TILE;
    const int last = imin(first + FLASH_TILE, args.T) - 1;
    const float start = query.start;
    const float weight = FlashTerms<Kind>::SIGNED ? query.weight : 0.0f;
    query.place = raw - S[first];                           // for keys on the left
    query.start = start - weight * query.place;
    tile[FROM_FIRST].row[t % FLASH_TILE] = query;
    query.place = raw - S[last];                            // for keys on the right
    query.start = start + weight * query.place;
    tile[FROM_LAST].row[t % FLASH_TILE] = query;
    if (t % FLASH_TILE == 0) {                              // one thread per tile says from what
        const double origin = args.S_origin[bh * ceil_div(args.stride, CABLE_CHUNK) + t / CABLE_CHUNK];
        tile[FROM_CHUNK].from = FlashS::of(origin);
        tile[FROM_FIRST].from = FlashS::of(origin + (double)S[first]);
        tile[FROM_LAST].from = FlashS::of(origin + (double)S[last]);
    }
}

// ----------------------------------------------------------------------------------------------------------
// launchers

// Toeplitz: the number of each head's tiles of queries in one launch of the dq kernel, each with a slab for the sums of
// its diagonals: enough to fill the machine, but at least 32 (2,048 tokens).
constexpr int FLASH_SLABS = 32;
inline int flash_slabs(int BNH, int T) {
    const int enough = ceil_div(2 * FLASH_WAVE, BNH);
    return imin(ceil_div(T, FLASH_TILE), imax(FLASH_SLABS, enough));
}

// floats of scratch, 16-byte aligned, that flash_backward needs
inline size_t flash_backward_scratch(FlashBias Kind, int B, int T, int NH) {
    const size_t tiles = (size_t)ceil_div(T, FLASH_TILE);
    const size_t BNH = (size_t)B * NH;
    const size_t queries = BNH * tiles * flash_variants(Kind) * sizeof(FlashQueries) / sizeof(float);
    const size_t slabs = Kind == FlashBias::Toeplitz ? BNH * flash_slabs(B * NH, T) * (tiles + 1) * FLASH_TILE : 0;
    const size_t sums = Kind == FlashBias::Fire ? BNH * tiles * FIRE_PIECES * FIRE_SUMS : 0;       // float64
    return queries + slabs + 2 * sums;
}

// at_a_time: flash_slabs, or a test's choice
template <bool Causal, FlashBias Kind, int HS, bool Masked = false>
void flash_backward_of(const FlashArgs& args, float* scratch, Stream stream, int at_a_time = 0) {
    const size_t BNH = (size_t)args.B * args.NH;
    const int tiles = ceil_div(args.T, FLASH_TILE);
    FlashQueries* queries = (FlashQueries*)scratch;
    FlashSlabs slabs = {(float*)(queries + BNH * tiles * flash_variants(Kind)), 0, 0};
    const size_t prepare_blocks = BNH * tiles * FLASH_TILE * (HS / 8) / FLASH_THREADS;      // HS/8 threads per query
    constexpr int FREE_DKDV = FlashDkdv<Causal, Kind, HS, Masked>::FREE;    // nvcc: of the form without wgmma
    constexpr int FREE_DQ = FlashDq<Causal, Kind, HS, Masked>::FREE;
    const auto grid = [&](int tiles, int free) {
        return Grid(BNH * tiles, FLASH_THREADS, flash_backward_shared(HS, free >= 0 && !runs_wgmma()), stream);
    };
    launch(flash_backward_prepare_kernel<Kind, HS>, Grid(prepare_blocks, FLASH_THREADS, 0, stream), queries, args);
    launch(flash_backward_dkdv_kernel<Causal, Kind, HS, Masked>, grid(tiles, FREE_DKDV), args, queries);
    const auto launch_dq = [&](int tiles) {
        launch(flash_backward_dq_kernel<Causal, Kind, HS, Masked>, grid(tiles, FREE_DQ), args, queries, slabs);
    };
    if (!FlashTerms<Kind>::DIAGONALS) {
        launch_dq(tiles);
        const double* partial = (const double*)slabs.data;
        if (FlashTerms<Kind>::PIECES) {
            launch(flash_backward_fire_kernel, Grid(BNH, FLASH_THREADS, 0, stream), args.sums, partial, tiles);
        }
        return;
    }
    at_a_time = at_a_time > 0 ? at_a_time : flash_slabs((int)BNH, args.T);
    const size_t table_blocks = BNH * ceil_div(args.table_entries, FLASH_THREADS);
    for (; slabs.first < tiles; slabs.first += at_a_time) {
        slabs.count = imin(at_a_time, tiles - slabs.first);
        launch_dq(slabs.count);
        const Grid columns(table_blocks, FLASH_THREADS, 0, stream);
        launch(flash_backward_table_kernel<Causal, Masked>, columns, args, slabs);
    }
}

// Overwrites the q, k and v columns of dqkv; dS and dg (B*NH,stride) at 0 .. T-1, as CableBias::backward leaves them,
// before the suffix sum; dtable (B*NH,table_entries), as ToeplitzBias::backward leaves it; the first slots of Fire's
// sums: the other slots stay as they are. false: these kernels do not have this head size, and nothing was done.
template <bool Causal, FlashBias Kind> bool flash_backward(const FlashArgs& args, float* scratch, Stream stream) {
    if (FlashTerms<Kind>::DIAGONALS) {
        const int right = args.table_entries - args.table_zero;             // entries at i = j and to its right
        check(args.table_zero >= args.T - 1 && right >= (Causal ? 1 : args.T), "flash_backward: expected a table that "
              "reaches every distance below T = %d, got %d columns with i = j at %d", args.T, args.table_entries,
              args.table_zero);
    }
    if (!flash_head_size(args.HS)) { return false; }
    const bool masked = args.mask.exists();
    if (masked && args.HS <= 64) { flash_backward_of<Causal, Kind, 64, true>(args, scratch, stream); }
    else if (masked) { flash_backward_of<Causal, Kind, 128, true>(args, scratch, stream); }
    else if (args.HS <= 64) { flash_backward_of<Causal, Kind, 64>(args, scratch, stream); }
    else { flash_backward_of<Causal, Kind, 128>(args, scratch, stream); }
    return true;
}
