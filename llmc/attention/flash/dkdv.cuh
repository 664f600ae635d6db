// attention/flash/dkdv.cuh -- the kernel of attention/flash/backward.cuh whose blocks own keys: dk, dv, and dS = the
// column part of its sum.
#ifndef LLMC_ATTENTION_FLASH_DKDV_CUH
#define LLMC_ATTENTION_FLASH_DKDV_CUH

#include <type_traits>

#include "pairs.cuh"

// Rows of the scores are keys, columns are queries. Masked: args.mask is obeyed.
template <bool Causal, FlashBias Kind, int HS, int Rows, bool Masked>
__device__ __forceinline__ void flash_dkdv_block(const FlashArgs& args, const FlashQueries* queries) {
    constexpr int TILE = FLASH_TILE;
    constexpr int STRIP = FLASH_STRIP;
    constexpr int OWNED = flash_block_rows(Rows);
    constexpr int OWN = Rows / 8;                           // the lane's rows
    constexpr int VIEWS = flash_views<Kind>(Rows);
    constexpr bool cable = flash_is_cable(Kind);
    const int lane = threadIdx.x % 32;
    const int row0 = threadIdx.x / 32 * Rows;               // this warp's first key in the block,
    bf16* K_tile = (bf16*)dynamic_shared();                 // (OWNED,HS)
    bf16* V_tile = K_tile + OWNED * HS;                     // (OWNED,HS)
    bf16* streamed = V_tile + OWNED * HS;                   // two stages of Q_tile (TILE,HS), dO_tile (TILE,HS)
    FlashQuery* streamed_query = (FlashQuery*)(streamed + 4 * TILE * HS);       // two stages of (VIEWS,TILE)
    FlashOwnS<Rows>* own_S = (FlashOwnS<Rows>*)(streamed_query + 2 * OWNED);
    // the block's place: with 32 rows in shared memory, because registers are scarce
    const FlashBlock placed(args, ceil_div(args.T, OWNED), OWNED);
    FlashBlock* shared_block = (FlashBlock*)(own_S + 1);
    if (Rows == 32 && threadIdx.x == 0) { *shared_block = placed; }
    if (Rows == 32) { __syncthreads(); }
    const FlashBlock& block = Rows == 32 ? *shared_block : placed;
    const auto j0 = [&] { return block.first; };
    const auto n0 = [&] { return block.first / TILE; };
    const auto n = [&] { return (block.first + row0) / TILE; };
    // Whether the queries of tile m meet one of the tiles of keys from `low` to `high`: not if their span ends before
    // them, or begins after them
    const auto meets = [&](int m, int low, int high) {
        if (Masked) { return FlashReach::of<Causal>(args, block.bh, m, block.live_tiles()).contains(low); }
        if (Causal && m < low) { return false; }
        if (!Causal && flash_skips(Kind) && block.template end_key_tile<Causal, Kind>(args, m) <= low) { return false; }
        return !flash_skips(Kind) || block.first_key_tile(args, m) <= high;
    };
    const auto visited = [&](int m) {                       // the first one from m on that the block meets
        while (m < block.live_tiles() && !meets(m, n0(), n0() + flash_block_tiles(Rows) - 1)) { m++; }
        return m;
    };
    const auto fetch = [&](int m, int stage) {              // computes addresses again: registers are scarce
        const int i0 = m * TILE;
        bf16* Q_tile = streamed + stage * 2 * TILE * HS;
        flash_load_tile<HS>(Q_tile, block.qkv(args, i0, 0), args.OC, block.columns, args.T - i0);
        const int C = args.NH * block.columns;
        flash_load_tile<HS>(Q_tile + TILE * HS, block.dout(args, i0), C, block.columns, args.T - i0);
        const int view = flash_view<VIEWS>(threadIdx.x);
        const FlashQueries* met = block.template queries<Kind>(queries, m, flash_from<Kind>(m, n0() + view));
        FlashQuery* to = streamed_query + stage * VIEWS * TILE;
        if (threadIdx.x < VIEWS * TILE) { cp_async_16(to + threadIdx.x, met->row + threadIdx.x % TILE, true); }
        if (cable) { own_S->shift(met, stage); }
        cp_async_commit();
    };

    // 1. the owned keys and values, and the first tile of queries
    flash_load_tile<HS, OWNED>(K_tile, block.qkv(args, j0(), 1), args.OC, block.columns, args.T - j0());
    flash_load_tile<HS, OWNED>(V_tile, block.qkv(args, j0(), 2), args.OC, block.columns, args.T - j0());
    if (cable) { own_S->set(block.template own_queries<Kind, VIEWS>(queries, n0())); }
    FlashFire fire;                                         // in the memory of own_S, which only cable uses
    float inv[OWN];                                         // of the lane's keys
    if (Kind == FlashBias::Fire) { fire.stage((FirePiece*)own_S, args, block.h); }
    UNROLL
    for (int own = 0; own < OWN && Kind == FlashBias::Fire; own++) {
        inv[own] = args.inv[j0() + row0 + lane / 4 + 8 * own];
    }
    const int first = Causal ? n0() : 0;
    int m = j0() < block.keys ? visited(first) : block.live_tiles();      // keys that are all padding meet no query
    if (m < block.live_tiles()) { fetch(m, 0); }
    float lane_dS[OWN];
    float* dS = lane_dS;                                    // of the lane's keys, at [own * STEP]
    constexpr int STEP = Rows == 32 ? FLASH_THREADS : 1;    // of 32 rows in shared memory too
    if (Rows == 32) { dS = (float*)((char*)(own_S + 1) + FLASH_BLOCK_BYTES) + threadIdx.x; }
    UNROLL
    for (int own = 0; own < OWN; own++) { dS[own * STEP] = 0.0f; }
    float dK[Rows / 16][HS / 8][4] = {};                    // of the warp's keys
    float dV[Rows / 16][HS / 8][4] = {};
    cp_async_commit();                                      // where no tile of queries was fetched
    cp_async_wait<0>();
    __syncthreads();
    FlashOwned<HS, Rows, flash_keys_kept(Kind, HS, Rows)> keys;         // dK and dV leave no room for all fragments
    FlashOwned<HS, Rows, flash_values_kept(Kind, HS, Rows)> values;
    keys.load(K_tile, row0);
    values.load(V_tile, row0);

    // The pairs of the owned keys and one tile of queries. `masked`: whether it is on the diagonal or has padding
    const auto step = [&](auto masked, const bf16* Q_tile, int stage) {
        constexpr bool edge = decltype(masked)::value;
        const bf16* dO_tile = Q_tile + TILE * HS;
        const FlashQuery* tile_query = streamed_query + (stage * VIEWS + flash_view<VIEWS>(row0)) * TILE;
        float tile_dS[OWN] = {};                            // summed first: docs/attention.md, "Sums of many keys"
        for (int c0 = 0; c0 < TILE; c0 += STRIP) {
            // 3. scores = K Q^T and dP = V dout^T
            float P[Rows / 16][STRIP / 8][4];               // scores, then P
            float dlogit[Rows / 16][STRIP / 8][4];          // dP, then dlogit
            float S[OWN];
            syncwarp();                                     // without it ptxas unrolls for sm_80 all the same
            flash_scores<HS, Rows>(P, keys, K_tile, row0, Q_tile, c0);
            flash_scores<HS, Rows>(dlogit, values, V_tile, row0, dO_tile, c0);
            if (Kind == FlashBias::Fire) {
                float y[Rows * STRIP / 32];
                fire.meet(args, j0() + row0, Rows, m * TILE + c0, STRIP);
                flash_fire_y<Rows, STRIP / 8>(y, args, inv, tile_query + c0, j0() + row0, m * TILE + c0);
                flash_fire_add<Rows>(P, y, fire);
            }
            UNROLL
            for (int own = 0; own < OWN; own++) {           // S of the keys, read again: registers are scarce
                const int row = row0 + lane / 4 + 8 * own;
                S[own] = cable ? own_S->shifted[stage][row] : (float)(j0() + row);
            }
            // 4. P and dlogit, two queries of a key at a time; the column part of dS
            UNROLL
            for (int e = 0; e < STRIP / 8 * OWN; e++) {
                const int own = e % OWN;
                const int at = own % 2 * 2;
                const int c = c0 + e / OWN * 8 + lane % 4 * 2;              // the first query of the two, in its tile
                const int i = m * TILE + c;
                const int j = j0() + row0 + lane / 4 + 8 * own;
                const FlashQuery query0 = tile_query[c];
                const FlashQuery query1 = tile_query[c + 1];
                const float bias0 = Kind == FlashBias::Toeplitz ? flash_table(args, block.h, i, j) : S[own];
                const float bias1 = Kind == FlashBias::Toeplitz ? flash_table(args, block.h, i + 1, j) : S[own];
                const bool out = edge && j >= block.keys;                   // queries after the end have lse2 = +inf
                bool hidden0 = false;
                bool hidden1 = false;
                if (edge && Masked) {
                    hidden0 = args.mask.hides(i, j, flash_begin(args, block.b, i));
                    hidden1 = args.mask.hides(i + 1, j, flash_begin(args, block.b, i + 1));
                }
                float* P_pair = &P[own / 2][e / OWN][at];
                float* dlogit_pair = &dlogit[own / 2][e / OWN][at];
                const FlashPair<Kind> pair(P_pair, dlogit_pair, query0, query1, bias0, bias1, LOG2E * args.scale,
                                           out || hidden0 || (edge && Causal && j > i),
                                           out || hidden1 || (edge && Causal && j > i + 1), args.inside);
                UNROLL
                for (int k = 0; k < 2; k++) {
                    const float g = k == 0 ? query0.g : query1.g;
                    if (Kind == FlashBias::Distance) {      // on a bidirectional diagonal each pair has its own sign
                        const bool negative = edge && !Causal && m == n() && j > i + k;
                        tile_dS[own] += g * (negative ? -pair.dlogit[k] : pair.dlogit[k]);
                    }
                    if (Kind == FlashBias::LogDistance) {
                        tile_dS[own] += g * (pair.dlogit[k] * pair.bend[k]);
                    }
                    P_pair[k] = pair.P[k];
                    dlogit_pair[k] = pair.dlogit[k];
                }
            }
            // 5. dV += P dout, dK += dlogit Q (the rows of P and dlogit are keys)
            UNROLL
            for (int k = 0; k < STRIP / 8; k += 2) {
                flash_accumulate<HS, Rows>(dV, P, k, dO_tile, c0 + k * 8);
                flash_accumulate<HS, Rows>(dK, dlogit, k, Q_tile, c0 + k * 8);
            }
        }
        UNROLL
        for (int own = 0; own < OWN && cable; own++) { dS[own * STEP] += tile_dS[own]; }
    };
    for (int stage = 0; m < block.live_tiles(); stage ^= 1) {
        // 2. this tile of queries has arrived, the next one may start
        const int next = visited(m + 1);                    // found again after the step: registers are scarce
        cp_async_wait<0>();
        __syncthreads();                                    // this stage has arrived, and the other is read no more
        if (next < block.live_tiles()) { fetch(next, stage ^ 1); }
        const bf16* Q_tile = streamed + stage * 2 * TILE * HS;
        UNROLL
        for (int own = 0; own < OWN && Kind == FlashBias::Distance && !Causal; own++) {
            if (m == n()) { dS[own * STEP] = -dS[own * STEP]; }     // sign was -1 so far; this tile is never left out
        }
        if (flash_block_tiles(Rows) == 1 || (n() * TILE < block.keys && meets(m, n(), n()))) {
            if (m == n() || (n() + 1) * TILE > block.keys || (Masked && flash_cuts(args, block.b, m, n()))) {
                step(std::true_type(), Q_tile, stage);
            } else { step(std::false_type(), Q_tile, stage); }
        }
        m = visited(m + 1);
    }
    // 6. store; q was read without its scale (docs/attention.md, "dK carries no scale"). The dq kernel subtracts the
    //    row part from dS
    bf16* dk = args.dqkv + (size_t)(block.b * args.stride + j0()) * args.OC + (args.NH + block.h) * block.columns;
    flash_store<HS, Rows>(dk, args.OC, block.columns, args.T - j0(), K_tile, dK, args.scale);
    flash_store<HS, Rows>(dk + args.NH * block.columns, args.OC, block.columns, args.T - j0(), V_tile, dV, 1.0f);
    UNROLL
    for (int own = 0; own < OWN && cable; own++) {
        const int j = j0() + row0 + lane / 4 + 8 * own;
        const float sum = quad_sum(dS[own * STEP]);
        const float unit = Kind == FlashBias::Distance ? LN2 : 2.0f;        // LN2: g was in units of log2
        const size_t to = (size_t)(block.b * args.NH + block.h) * args.stride + j;
        if (lane % 4 == 0 && j < args.T) { args.dS[to] = unit * sum; }
    }
}

template <bool Causal, FlashBias Kind, int HS, int Rows = flash_backward_rows(HS)>
__global__ void __launch_bounds__(FLASH_THREADS, flash_backward_blocks(HS, Rows))
flash_backward_dkdv_kernel(FlashArgs args, const FlashQueries* queries) {
    flash_dkdv_block<Causal, Kind, HS, Rows, false>(args, queries);
}
template <bool Causal, FlashBias Kind, int HS>
__global__ void __launch_bounds__(FLASH_THREADS, 2)
flash_masked_dkdv_kernel(FlashArgs args, const FlashQueries* queries) {
    flash_dkdv_block<Causal, Kind, HS, FLASH_MASKED_ROWS, true>(args, queries);
}

#endif
