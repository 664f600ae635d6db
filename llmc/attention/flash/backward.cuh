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
// Two kernels, each recomputing P and dlogit. The rows of their scores are what a block owns, the columns what it
// meets:
//   dkdv   owns 64 keys      scores = K Q^T   dP = V dout^T   dV += P dout, dK += dlogit Q; the column part of dS
//   dq     owns 64 queries   scores = Q K^T   dP = dout V^T   dQ += dlogit K; dg, the row part of dS, Toeplitz's sums
// Every output has one writer and one order of summation: the same input gives the same bits. Seven products instead of
// five pay for it. Both parts of dS sum the same float32 dlogit.
// docs/attention.md: "Two kernels for the backward", "CABLE: the gradients of S and g", "The row part of dS must stay".
#ifndef LLMC_ATTENTION_FLASH_BACKWARD_CUH
#define LLMC_ATTENTION_FLASH_BACKWARD_CUH

#include <type_traits>

#include "pairs.cuh"

// ----------------------------------------------------------------------------------------------------------
// the two kernels. Shared memory: two owned tiles, two stages of two streamed tiles, two stages of
// FlashQuery, FlashOwnS: 51 KB (HS 64), 99 KB (128), which is what sm_86 has

constexpr size_t flash_backward_shared(int HS) {
    return sizeof(bf16) * 6 * FLASH_TILE * HS + sizeof(FlashQuery) * 2 * FLASH_TILE + sizeof(FlashOwnS);
}
// Streamed rows whose logits are in registers at a time: with all 64 the sums of HS columns would not fit beside them.
constexpr int FLASH_STRIP = 16;
constexpr int flash_backward_blocks(int HS) { return HS == 64 ? 3 : 2; }    // on one SM: 168, 255 registers per thread

// A block owns 64 keys: dk, dv, and dS = the column part of its sum. Rows of the scores are keys, columns are queries.
template <bool Causal, FlashBias Kind, int HS>
__global__ void __launch_bounds__(FLASH_THREADS, flash_backward_blocks(HS))
flash_backward_dkdv_kernel(FlashArgs args, const FlashQueries* queries) {
    constexpr int TILE = FLASH_TILE;
    constexpr int STRIP = FLASH_STRIP;
    constexpr bool cable = flash_is_cable(Kind);
    const FlashBlock block(args, ceil_div(args.T, TILE));
    const int n = block.turn;                               // this block's tile of keys
    const int j0 = n * TILE;
    const int C = args.NH * HS;
    const int lane = threadIdx.x % 32;
    const int row0 = threadIdx.x / 32 * 16;                 // this warp's first key in the tile
    bf16* K_tile = (bf16*)dynamic_shared();                 // (TILE,HS)
    bf16* V_tile = K_tile + TILE * HS;                      // (TILE,HS)
    bf16* streamed = V_tile + TILE * HS;                    // two stages of Q_tile (TILE,HS), dO_tile (TILE,HS)
    FlashQuery* streamed_query = (FlashQuery*)(streamed + 4 * TILE * HS);       // two stages of (TILE)
    FlashOwnS* own_S = (FlashOwnS*)(streamed_query + 2 * TILE);
    // The first tile of queries from m on that meets these keys: a tile is left out if its span ends before them, or
    // begins after them.
    const auto visited = [&](int m) {
        const auto skipped_right = [&] {
            return !Causal && flash_skips(Kind) && block.template end_key_tile<Causal, Kind>(args, m) <= n;
        };
        while (m < block.live_tiles() && (block.first_key_tile(args, m) > n || skipped_right())) { m++; }
        return m;
    };
    const auto fetch = [&](int m, int stage) {              // addresses anew each time: registers are short
        const int i0 = m * TILE;
        bf16* Q_tile = streamed + stage * 2 * TILE * HS;
        flash_load_tile<HS>(Q_tile, block.template qkv<HS>(args, i0, 0), args.OC, args.T - i0);
        flash_load_tile<HS>(Q_tile + TILE * HS, block.template dout<HS>(args, i0), C, args.T - i0);
        const FlashQueries* met = block.template queries<Kind>(queries, m, flash_from<Kind>(m, n));
        FlashQuery* to = streamed_query + stage * TILE;
        if (threadIdx.x < TILE) { cp_async_16(to + threadIdx.x, met->row + threadIdx.x, true); }
        if (cable) { own_S->shift(met, stage); }
        cp_async_commit();
    };

    // 1. the owned keys and values, and the first tile of queries
    flash_load_tile<HS>(K_tile, block.template qkv<HS>(args, j0, 1), args.OC, args.T - j0);
    flash_load_tile<HS>(V_tile, block.template qkv<HS>(args, j0, 2), args.OC, args.T - j0);
    if (cable) { own_S->set(block.template queries<Kind>(queries, n, FROM_CHUNK)); }
    const int first = Causal ? n : 0;
    int m = j0 < block.keys ? visited(first) : block.live_tiles();      // keys that are all padding meet no query
    if (m < block.live_tiles()) { fetch(m, 0); }
    float dS[2] = {0.0f, 0.0f};                             // of the lane's two keys
    float dK[HS / 8][4] = {};                               // of the warp's 16 keys
    float dV[HS / 8][4] = {};
    cp_async_commit();                                      // where no tile of queries was fetched
    cp_async_wait<0>();
    __syncthreads();
    FlashOwned<HS, HS == 64> keys(K_tile, row0);            // dK and dV leave no registers for all fragments
    FlashOwned<HS, HS == 64 && Kind != FlashBias::LogDistance> values(V_tile, row0);

    // The pairs of the owned keys and one tile of queries. `masked`: whether it is on the diagonal or has padding
    const auto step = [&](auto masked, const bf16* Q_tile, int stage) {
        constexpr bool edge = decltype(masked)::value;
        const bf16* dO_tile = Q_tile + TILE * HS;
        const FlashQuery* tile_query = streamed_query + stage * TILE;
        float tile_dS[2] = {0.0f, 0.0f};                    // summed first: docs/attention.md, "Sums of many keys"
        for (int c0 = 0; c0 < TILE; c0 += STRIP) {
            // 3. scores = K Q^T and dP = V dout^T
            float P[STRIP / 8][4];                          // scores, then P
            float dlogit[STRIP / 8][4];                     // dP, then dlogit
            float S[2];
            syncwarp();                                     // without it ptxas unrolls for sm_80 all the same
            flash_scores<HS>(P, keys, Q_tile, c0);
            flash_scores<HS>(dlogit, values, dO_tile, c0);
            UNROLL
            for (int half = 0; half < 2; half++) {          // S of the keys, anew each time: registers are short
                const int row = row0 + lane / 4 + 8 * half;
                S[half] = cable ? own_S->shifted[stage][row] : (float)(j0 + row);
            }
            // 4. P and dlogit, two queries of a key at a time; the column part of dS
            UNROLL
            for (int e = 0; e < STRIP / 8 * 2; e++) {
                const int half = e % 2;
                const int c = c0 + e / 2 * 8 + lane % 4 * 2;                // the first query of the two, in its tile
                const int i = m * TILE + c;
                const int j = j0 + row0 + lane / 4 + 8 * half;
                const FlashQuery query0 = tile_query[c];
                const FlashQuery query1 = tile_query[c + 1];
                const float bias0 = Kind == FlashBias::Toeplitz ? flash_table(args, block.h, i, j) : S[half];
                const float bias1 = Kind == FlashBias::Toeplitz ? flash_table(args, block.h, i + 1, j) : S[half];
                const bool out = edge && j >= block.keys;                   // queries after the end have lse2 = +inf
                float* P_pair = &P[e / 2][2 * half];
                float* dlogit_pair = &dlogit[e / 2][2 * half];
                const FlashPair<Kind> pair(P_pair, dlogit_pair, query0, query1, bias0, bias1, LOG2E * args.scale,
                                           out || (edge && Causal && j > i), out || (edge && Causal && j > i + 1),
                                           args.inside);
                UNROLL
                for (int k = 0; k < 2; k++) {
                    const float g = k == 0 ? query0.g : query1.g;
                    if (Kind == FlashBias::Distance) {      // on a bidirectional diagonal each pair has its own sign
                        const bool negative = edge && !Causal && m == n && j > i + k;
                        tile_dS[half] += g * (negative ? -pair.dlogit[k] : pair.dlogit[k]);
                    }
                    if (Kind == FlashBias::LogDistance) {
                        tile_dS[half] += g * (pair.dlogit[k] * pair.bend[k]);
                    }
                    P_pair[k] = pair.P[k];
                    dlogit_pair[k] = pair.dlogit[k];
                }
            }
            // 5. dV += P dout, dK += dlogit Q (the rows of P and dlogit are keys)
            UNROLL
            for (int k = 0; k < STRIP / 8; k += 2) {
                flash_accumulate<HS>(dV, P[k], P[k + 1], dO_tile, c0 + k * 8);
                flash_accumulate<HS>(dK, dlogit[k], dlogit[k + 1], Q_tile, c0 + k * 8);
            }
        }
        dS[0] += tile_dS[0];
        dS[1] += tile_dS[1];
    };
    for (int stage = 0; m < block.live_tiles(); stage ^= 1) {
        // 2. this tile of queries has arrived, the next one may start
        const int next = visited(m + 1);
        cp_async_wait<0>();
        __syncthreads();                                    // this stage has arrived, and the other is read no more
        if (next < block.live_tiles()) { fetch(next, stage ^ 1); }
        const bf16* Q_tile = streamed + stage * 2 * TILE * HS;
        if (Kind == FlashBias::Distance && !Causal && m == n) {     // sign was -1 so far; this tile is never left out
            dS[0] = -dS[0];
            dS[1] = -dS[1];
        }
        if (m == n || j0 + TILE > block.keys) { step(std::true_type(), Q_tile, stage); }
        else { step(std::false_type(), Q_tile, stage); }
        m = next;
    }
    // 6. store; q was read without its scale (docs/attention.md, "dK carries no scale"). The dq kernel subtracts the
    //    row part from dS
    bf16* dk = args.dqkv + (size_t)(block.b * args.stride + j0) * args.OC + C + block.h * HS;
    flash_store<HS>(dk, args.OC, args.T - j0, K_tile, dK, args.scale);
    flash_store<HS>(dk + C, args.OC, args.T - j0, V_tile, dV, 1.0f);
    UNROLL
    for (int half = 0; half < 2 && cable; half++) {
        const int j = j0 + row0 + lane / 4 + 8 * half;
        const float sum = quad_sum(dS[half]);
        const float unit = Kind == FlashBias::Distance ? LN2 : 2.0f;        // LN2: g was in units of log2
        const size_t to = (size_t)(block.b * args.NH + block.h) * args.stride + j;
        if (lane % 4 == 0 && j < args.T) { args.dS[to] = unit * sum; }
    }
}

// A block owns 64 queries: dq, dg, the row part of dS (subtracted from the column part), or its part of dtable.
template <bool Causal, FlashBias Kind, int HS>
__global__ void __launch_bounds__(FLASH_THREADS, flash_backward_blocks(HS))
flash_backward_dq_kernel(FlashArgs args, const FlashQueries* queries, float* slab) {
    constexpr int TILE = FLASH_TILE;
    constexpr int STRIP = FLASH_STRIP;
    constexpr bool cable = flash_is_cable(Kind);
    const FlashBlock block(args, ceil_div(args.T, TILE));
    const int m = block.tiles - 1 - block.turn;             // this block's tile of queries
    const int i0 = m * TILE;
    const int C = args.NH * HS;
    const int lane = threadIdx.x % 32;
    const int row0 = threadIdx.x / 32 * 16;                 // this warp's first query in the tile
    bf16* Q_tile = (bf16*)dynamic_shared();                 // (TILE,HS)
    bf16* dO_tile = Q_tile + TILE * HS;                     // (TILE,HS)
    bf16* streamed = dO_tile + TILE * HS;                   // two stages of K_tile (TILE,HS), V_tile (TILE,HS)
    FlashQuery* streamed_key = (FlashQuery*)(streamed + 4 * TILE * HS);     // two stages of (TILE): only S is read
    FlashOwnS* own_S = (FlashOwnS*)(streamed_key + 2 * TILE);
    // Toeplitz: Q_tile and dO_tile are in registers by then, and nothing is in streamed_key
    float* own_slab = slab + ((size_t)block.bh * block.tiles + m) * (block.tiles + 1) * TILE;
    const FlashDiagonals diagonals = {(float*)Q_tile, (float*)streamed_key, own_slab};
    const auto fetch = [&](int n, int stage) {
        const int j0 = n * TILE;
        bf16* K_tile = streamed + stage * 2 * TILE * HS;
        flash_load_tile<HS>(K_tile, block.template qkv<HS>(args, j0, 1), args.OC, args.T - j0);
        flash_load_tile<HS>(K_tile + TILE * HS, block.template qkv<HS>(args, j0, 2), args.OC, args.T - j0);
        const FlashQueries* met = block.template queries<Kind>(queries, n, flash_from<Kind>(n, m));
        if (Kind != FlashBias::None && Kind != FlashBias::Toeplitz && threadIdx.x < TILE) {
            cp_async_16(streamed_key + stage * TILE + threadIdx.x, met->row + threadIdx.x, true);
        }
        if (cable) { own_S->shift(met, stage); }
        cp_async_commit();
    };

    // 1. the owned queries with their dout, and the first tile of keys
    const int begin = block.first_key_tile(args, m);
    const int end = block.template end_key_tile<Causal, Kind>(args, m);
    flash_load_tile<HS>(Q_tile, block.template qkv<HS>(args, i0, 0), args.OC, args.T - i0);
    flash_load_tile<HS>(dO_tile, block.template dout<HS>(args, i0), C, args.T - i0);
    const FlashQueries* own_queries = block.template queries<Kind>(queries, m, FROM_CHUNK);
    if (cable) { own_S->set(own_queries); }
    if (begin < end) { fetch(begin, 0); }
    const FlashQuery own[2] = {own_queries->row[row0 + lane / 4], own_queries->row[row0 + lane / 4 + 8]};
    float dQ[HS / 8][4] = {};                               // of the warp's 16 queries
    float row_sum[2] = {0.0f, 0.0f};                        // of the lane's two queries: sum sign dlogit, or sum w
    float dg[2] = {0.0f, 0.0f};
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    FlashOwned<HS, true> rows(Q_tile, row0);                // one sum less than in the other kernel: they fit
    FlashOwned<HS, true> douts(dO_tile, row0);

    // The pairs of the owned queries and the keys of tile n. `masked`: whether it is on the diagonal or has padding
    const auto step = [&](auto masked, int n, const bf16* K_tile, int stage) {
        constexpr bool edge = decltype(masked)::value;
        const FlashQuery* key = streamed_key + stage * TILE;
        FlashQuery row_query[2] = {own[0], own[1]};
        if (cable) {                                        // S counted from what the streamed tile counts from
            row_query[0].S = own_S->shifted[stage][row0 + lane / 4];
            row_query[1].S = own_S->shifted[stage][row0 + lane / 4 + 8];
        }
        float tile_sum[2] = {0.0f, 0.0f};                   // as in the other kernel
        float tile_dg[2] = {0.0f, 0.0f};
        for (int c0 = 0; c0 < TILE; c0 += STRIP) {
            // 3. scores = Q K^T and dP = dout V^T
            float P[STRIP / 8][4];                          // scores; P itself is not needed after dlogit
            float dlogit[STRIP / 8][4];                     // dP, then dlogit
            syncwarp();                                     // as in the other kernel
            flash_scores<HS>(P, rows, K_tile, c0);
            flash_scores<HS>(dlogit, douts, K_tile + TILE * HS, c0);
            // 4. dlogit, two keys of a query at a time; dg, the row part of dS, Toeplitz's tile
            UNROLL
            for (int e = 0; e < STRIP / 8 * 2; e++) {
                const int half = e % 2;
                const int c = c0 + e / 2 * 8 + lane % 4 * 2;                // the first key of the two, in its tile
                const int r = row0 + lane / 4 + 8 * half;
                const int i = i0 + r;
                const int j = n * TILE + c;
                float bias0 = 0.0f;
                float bias1 = 0.0f;
                if (Kind == FlashBias::Toeplitz) {
                    bias0 = flash_table(args, block.h, i, j);
                    bias1 = flash_table(args, block.h, i, j + 1);
                } else if (Kind != FlashBias::None) {
                    bias0 = key[c].S;
                    bias1 = key[c + 1].S;
                }
                const bool masked0 = edge && (j >= block.keys || (Causal && j > i));
                const bool masked1 = edge && (j + 1 >= block.keys || (Causal && j + 1 > i));
                float* dlogit_pair = &dlogit[e / 2][2 * half];
                const FlashPair<Kind> pair(&P[e / 2][2 * half], dlogit_pair, row_query[half], row_query[half], bias0,
                                           bias1, LOG2E * args.scale, masked0, masked1, args.inside);
                UNROLL
                for (int k = 0; k < 2; k++) {
                    if (Kind == FlashBias::Distance) {
                        const bool negative = edge && !Causal && m == n && j + k > i;
                        tile_sum[half] += negative ? -pair.dlogit[k] : pair.dlogit[k];
                        tile_dg[half] -= pair.dlogit[k] * fabsf(pair.distance[k]);
                    }
                    if (Kind == FlashBias::LogDistance) {
                        tile_sum[half] += pair.dlogit[k] * pair.bend[k];
                        tile_dg[half] -= pair.dlogit[k] * pair.by_g[k];
                    }
                    dlogit_pair[k] = pair.dlogit[k];
                }
                if (Kind == FlashBias::Toeplitz) { diagonals.put(r, c, pair.dlogit[0], pair.dlogit[1]); }
            }
            const bool complete = Kind == FlashBias::LogDistance || c0 + STRIP == TILE;     // there registers are short
            UNROLL
            for (int half = 0; half < 2 && complete; half++) {
                dg[half] += tile_dg[half];
                tile_dg[half] = 0.0f;
            }
            // 5. dQ += dlogit K
            UNROLL
            for (int k = 0; k < STRIP / 8; k += 2) {
                flash_accumulate<HS>(dQ, dlogit[k], dlogit[k + 1], K_tile, c0 + k * 8);
            }
        }
        row_sum[0] += tile_sum[0];
        row_sum[1] += tile_sum[1];
    };
    int stage = 0;
    for (int n = begin; n < end; n++, stage ^= 1) {
        // 2. this tile of keys has arrived, the next one may start
        cp_async_wait<0>();
        __syncthreads();            // this stage has arrived; the other is read no more, nor is diagonals.dlogit
        if (n + 1 < end) { fetch(n + 1, stage ^ 1); }
        const bf16* K_tile = streamed + stage * 2 * TILE * HS;
        if (Kind == FlashBias::Distance && !Causal && n == m + 1) {     // sign is -1 from here on: the sum follows it
            row_sum[0] = -row_sum[0];
            row_sum[1] = -row_sum[1];
        }
        if (n == m || (n + 1) * TILE > block.keys) { step(std::true_type(), n, K_tile, stage); }
        else { step(std::false_type(), n, K_tile, stage); }
        if (Kind == FlashBias::Toeplitz) {
            __syncthreads();                                // the tile of dlogit is complete
            diagonals.add(n, n == begin);
        }
    }
    // 6. store
    if (Kind == FlashBias::Toeplitz && begin < end) {       // no tile on the right takes the last diagonals 64 .. 126
        __syncthreads();
        if (threadIdx.x < 63) { diagonals.slab[end * TILE + threadIdx.x] = diagonals.carry[threadIdx.x]; }
    }
    bf16* dq = args.dqkv + (size_t)(block.b * args.stride + i0) * args.OC + block.h * HS;
    flash_store<HS>(dq, args.OC, args.T - i0, Q_tile, dQ, args.scale);
    UNROLL
    for (int half = 0; half < 2 && cable; half++) {
        const int i = i0 + row0 + lane / 4 + 8 * half;
        const float g = own[half].g;
        const float sum = quad_sum(row_sum[half]);
        const float moment = quad_sum(dg[half]);
        const float sign = Causal || end <= m + 1 ? 1.0f : -1.0f;       // that of the last tile: see the loop
        const size_t to = (size_t)(block.b * args.NH + block.h) * args.stride + i;
        if (lane % 4 != 0 || i >= args.T) { continue; }
        // g of Distance is in units of log2: LN2 takes it back
        args.dS[to] -= Kind == FlashBias::Distance ? LN2 * (g * (sign * sum)) : 2.0f * (g * sum);
        args.dg[to] = moment;
    }
}

// ----------------------------------------------------------------------------------------------------------
// launchers

// floats of scratch, 16-byte aligned, that flash_backward wants
inline size_t flash_backward_scratch(FlashBias Kind, int B, int T, int NH) {
    const size_t tiles = (size_t)ceil_div(T, FLASH_TILE);
    const size_t BNH = (size_t)B * NH;
    const size_t queries = BNH * tiles * flash_variants(Kind) * (sizeof(FlashQueries) / sizeof(float));
    const size_t slabs = Kind == FlashBias::Toeplitz ? BNH * tiles * (tiles + 1) * FLASH_TILE : 0;
    return queries + slabs;
}

template <bool Causal, FlashBias Kind, int HS>
void flash_backward_of(const FlashArgs& args, float* scratch, Stream stream) {
    const size_t BNH = (size_t)args.B * args.NH;
    const size_t tiles = (size_t)ceil_div(args.T, FLASH_TILE);
    FlashQueries* queries = (FlashQueries*)scratch;
    float* slab = (float*)(queries + BNH * tiles * flash_variants(Kind));
    const size_t prepare_blocks = BNH * tiles * FLASH_TILE * (HS / 8) / FLASH_THREADS;      // HS/8 threads per query
    const Grid grid(BNH * tiles, FLASH_THREADS, flash_backward_shared(HS), stream);
    launch(flash_backward_prepare_kernel<Kind, HS>, Grid(prepare_blocks, FLASH_THREADS, 0, stream), queries, args);
    launch(flash_backward_dkdv_kernel<Causal, Kind, HS>, grid, args, queries);
    launch(flash_backward_dq_kernel<Causal, Kind, HS>, grid, args, queries, slab);
    if (Kind == FlashBias::Toeplitz) {
        const size_t blocks = (size_t)ceil_div(args.table_entries, FLASH_THREADS);
        launch(flash_backward_table_kernel<Causal>, Grid(BNH * blocks, FLASH_THREADS, 0, stream), args, slab);
    }
}

// Overwrites the q, k and v columns of dqkv; dS and dg (B*NH,stride) at 0 .. T-1, as CableBias::backward leaves them,
// before the suffix sum; dtable (B*NH,table_entries), as ToeplitzBias::backward leaves it. false: these kernels do not
// have this head size, and nothing was done.
template <bool Causal, FlashBias Kind> bool flash_backward(const FlashArgs& args, float* scratch, Stream stream) {
    if (Kind == FlashBias::Toeplitz) {
        const int right = args.table_entries - args.table_zero;             // entries at i = j and to its right
        check(args.table_zero >= args.T - 1 && right >= (Causal ? 1 : args.T), "flash_backward: expected a table that "
              "reaches every distance below T = %d, got %d columns with i = j at %d", args.T, args.table_entries,
              args.table_zero);
    }
    if (args.HS == 64) { flash_backward_of<Causal, Kind, 64>(args, scratch, stream); }
    else if (args.HS == 128) { flash_backward_of<Causal, Kind, 128>(args, scratch, stream); }
    else { return false; }
    return true;
}

#endif
