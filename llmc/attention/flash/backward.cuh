// attention/flash/backward.cuh -- backward of attention_flash.cuh on tensor cores, bf16 in and out, float32 sums.
//
//   with D_i = sum_d dout_i out_i:  P_ij = e^(a_ij - lse_i)   dl_ij = P_ij (dout_i.v_j - D_i)
//   dv = P^T dout    dk = scale dl^T q    dq = scale dl k    and the bias takes sums of dl:
//     Distance     dS_j += sum_i g_i e_ij dl_ij   dS_i -= g_i sum_j e_ij dl_ij   dg_i = -sum_j dl_ij |S_i-S_j|   e_ij = sgn(i-j), 1 at 0
//     LogDistance  dS_j += 2 sum_i g_i^2 w_ij   dS_i -= 2 g_i^2 sum_j w_ij   dg_i = -2 g_i sum_j w_ij (S_i-S_j)
//                  w_ij = dl_ij (S_i-S_j) / (1 + (g_i (S_i-S_j))^2)
//     Toeplitz     dtable[b,h][table_zero + j-i] = sum of dl_ij along the diagonal
// Two kernels, each recomputing P and dl: one owns 64 keys and meets the queries (dk, dv, the key part of dS), one owns 64
// queries and meets the keys (dq, dg, the query part of dS). Every output has one writer and one order of summation: the
// same input gives the same bits. Seven products instead of five pay for it. dl never leaves the registers: the tile's rows
// are the owned ones in both kernels, so a product's result is the next one's left operand. Both parts of dS sum the same
// float32 dl: from an output rounded to bf16 the row sums are not 0, and dropping them ruins the suffix sum of dS.
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
constexpr int FLASH_CHUNK = 16;                         // streamed rows whose logits are in registers at a time
constexpr int flash_backward_blocks(int HS) { return HS == 64 ? 3 : 2; }        // on one multiprocessor: 168, 255 registers a thread

// A block owns 64 keys: dk, dv, and dS = the key part of its sum.
template <bool Causal, FlashBias K, int HS>
__global__ void __launch_bounds__(FLASH_THREADS, flash_backward_blocks(HS))
flash_backward_dkdv_kernel(FlashArgs p, const FlashQueries* queries) {
    constexpr int TILE = FLASH_TILE, CHUNK = FLASH_CHUNK;
    constexpr bool cable = K == FlashBias::Distance || K == FlashBias::LogDistance;
    const FlashBlock at(p);
    const int n = blockIdx.x / (p.B * p.NH), j0 = n * TILE, C = p.NH * HS, lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16;
    bf16 *Kt = (bf16*)dynamic_shared(), *Vt = Kt + TILE * HS, *streamed = Vt + TILE * HS;
    FlashQuery* streamed_query = (FlashQuery*)(streamed + 4 * TILE * HS);
    FlashOwnS* own_S = (FlashOwnS*)(streamed_query + 2 * TILE);
    const auto visited = [&](int m) {
        const auto left_out = [&] { return at.first_key_tile(p, m) > n || (!Causal && flash_skips(K) && at.template end_key_tile<Causal, K>(p, m) <= n); };
        while (m < at.live_tiles() && left_out()) { m++; }
        return m;
    };
    const auto load = [&](int m, int stage) {           // addresses anew each time: registers are short
        const int i0 = m * TILE;
        bf16* Q = streamed + stage * 2 * TILE * HS;
        flash_load_tile<HS>(Q, at.template qkv<HS>(p, i0, 0), p.OC, p.T - i0);
        flash_load_tile<HS>(Q + TILE * HS, at.template dout<HS>(p, i0), C, p.T - i0);
        const FlashQueries* met = at.template queries<K>(queries, m, flash_from<K>(m, n));
        if (threadIdx.x < TILE) { cp_async_16(streamed_query + stage * TILE + threadIdx.x, met->row + threadIdx.x, true); }
        if (cable) { own_S->shift(met, stage); }
        cp_async_commit();
    };
    flash_load_tile<HS>(Kt, at.template qkv<HS>(p, j0, 1), p.OC, p.T - j0);
    flash_load_tile<HS>(Vt, at.template qkv<HS>(p, j0, 2), p.OC, p.T - j0);
    if (cable) { own_S->set(at.template queries<K>(queries, n, FROM_CHUNK)); }
    int m = j0 < at.keys ? visited(Causal ? n : 0) : at.live_tiles();
    if (m < at.live_tiles()) { load(m, 0); }
    float column[2] = {0.0f, 0.0f}, dK[HS / 8][4] = {}, dV[HS / 8][4] = {};
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    FlashOwned<HS, HS == 64> keys(Kt, row0);
    FlashOwned<HS, HS == 64 && K != FlashBias::LogDistance> values(Vt, row0);

    const auto step = [&](auto masked, const bf16* Q, int stage) {
        constexpr bool edge = decltype(masked)::value;
        const bf16* dO = Q + TILE * HS;
        const FlashQuery* tile_query = streamed_query + stage * TILE;
        for (int c0 = 0; c0 < TILE; c0 += CHUNK) {
            float P[CHUNK / 8][4], dl[CHUNK / 8][4], S[2];
            syncwarp();                                 // without it ptxas unrolls for sm_80 all the same
            flash_scores<HS>(P, keys, Q, c0);
            flash_scores<HS>(dl, values, dO, c0);
            UNROLL
            for (int half = 0; half < 2; half++) {              // S of the keys, anew each time: registers are short
                const int row = row0 + lane / 4 + 8 * half;
                S[half] = cable ? own_S->shifted[stage][row] : (float)(j0 + row);
            }
            UNROLL
            for (int e = 0; e < CHUNK / 8 * 2; e++) {
                const int half = e % 2, c = c0 + e / 2 * 8 + lane % 4 * 2, i = m * TILE + c, j = j0 + row0 + lane / 4 + 8 * half;
                const FlashQuery q0 = tile_query[c], q1 = tile_query[c + 1];
                const float bias0 = K == FlashBias::Toeplitz ? flash_table(p, at.h, i, j) : S[half];
                const float bias1 = K == FlashBias::Toeplitz ? flash_table(p, at.h, i + 1, j) : S[half];
                const bool out = edge && j >= at.keys;
                float *s = &P[e / 2][2 * half], *dp = &dl[e / 2][2 * half];
                const FlashPair<K> x(s, dp, q0, q1, bias0, bias1, LOG2E * p.scale, out || (edge && Causal && j > i),
                                     out || (edge && Causal && j > i + 1));
                UNROLL
                for (int k = 0; k < 2; k++) {
                    const float g = k == 0 ? q0.g : q1.g;
                    if (K == FlashBias::Distance) { column[half] += g * (edge && !Causal && m == n && j > i + k ? -x.dl[k] : x.dl[k]); }
                    if (K == FlashBias::LogDistance) { column[half] += g * g * (x.dl[k] * x.r[k] * x.w[k]); }
                    s[k] = x.p[k];
                    dp[k] = x.dl[k];
                }
            }
            UNROLL
            for (int k = 0; k < CHUNK / 8; k += 2) {
                flash_accumulate<HS>(dV, P[k], P[k + 1], dO, c0 + k * 8);
                flash_accumulate<HS>(dK, dl[k], dl[k + 1], Q, c0 + k * 8);
            }
        }
    };
    for (int stage = 0; m < at.live_tiles(); stage ^= 1) {
        const int next = visited(m + 1);
        cp_async_wait<0>();
        __syncthreads();                                // this stage has arrived, and the other is read no more
        if (next < at.live_tiles()) { load(next, stage ^ 1); }
        const bf16* Q = streamed + stage * 2 * TILE * HS;
        if (K == FlashBias::Distance && !Causal && m == n) {            // e was -1 so far; this tile is never left out
            column[0] = -column[0];
            column[1] = -column[1];
        }
        if (m == n || j0 + TILE > at.keys) { step(std::true_type(), Q, stage); }
        else { step(std::false_type(), Q, stage); }
        m = next;
    }
    bf16* dk = p.dqkv + (size_t)(at.b * p.stride + j0) * p.OC + C + at.h * HS;
    flash_store<HS>(dk, p.OC, p.T - j0, Kt, dK, p.scale);
    flash_store<HS>(dk + C, p.OC, p.T - j0, Vt, dV, 1.0f);
    UNROLL
    for (int half = 0; half < 2 && cable; half++) {
        const int j = j0 + row0 + lane / 4 + 8 * half;
        const float sum = quad_sum(column[half]);
        if (lane % 4 == 0 && j < p.T) { p.dS[(size_t)(at.b * p.NH + at.h) * p.stride + j] = (K == FlashBias::Distance ? LN2 : 2.0f) * sum; }
    }
}

// A block owns 64 queries: dq, dg, the query part of dS (added to the key part), or its part of dtable.
template <bool Causal, FlashBias K, int HS>
__global__ void __launch_bounds__(FLASH_THREADS, flash_backward_blocks(HS))
flash_backward_dq_kernel(FlashArgs p, const FlashQueries* queries, float* slab) {
    constexpr int TILE = FLASH_TILE, CHUNK = FLASH_CHUNK;
    constexpr bool cable = K == FlashBias::Distance || K == FlashBias::LogDistance;
    const FlashBlock at(p);
    const int m = at.tiles - 1 - blockIdx.x / (p.B * p.NH), i0 = m * TILE, C = p.NH * HS;
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16;
    bf16 *Qt = (bf16*)dynamic_shared(), *dOt = Qt + TILE * HS, *streamed = dOt + TILE * HS;
    FlashQuery* streamed_key = (FlashQuery*)(streamed + 4 * TILE * HS);
    FlashOwnS* own_S = (FlashOwnS*)(streamed_key + 2 * TILE);
    const FlashDiagonals diagonals = {(float*)Qt, (float*)streamed_key,
                                      slab + ((size_t)at.bh * at.tiles + m) * (at.tiles + 1) * TILE};
    const auto load = [&](int n, int stage) {
        const int j0 = n * TILE;
        bf16* Kt = streamed + stage * 2 * TILE * HS;
        flash_load_tile<HS>(Kt, at.template qkv<HS>(p, j0, 1), p.OC, p.T - j0);
        flash_load_tile<HS>(Kt + TILE * HS, at.template qkv<HS>(p, j0, 2), p.OC, p.T - j0);
        const FlashQueries* met = at.template queries<K>(queries, n, flash_from<K>(n, m));
        if (K != FlashBias::None && K != FlashBias::Toeplitz && threadIdx.x < TILE) {
            cp_async_16(streamed_key + stage * TILE + threadIdx.x, met->row + threadIdx.x, true);
        }
        if (cable) { own_S->shift(met, stage); }
        cp_async_commit();
    };
    const int begin = at.first_key_tile(p, m), end = at.template end_key_tile<Causal, K>(p, m);
    flash_load_tile<HS>(Qt, at.template qkv<HS>(p, i0, 0), p.OC, p.T - i0);
    flash_load_tile<HS>(dOt, at.template dout<HS>(p, i0), C, p.T - i0);
    const FlashQueries* own_queries = at.template queries<K>(queries, m, FROM_CHUNK);
    if (cable) { own_S->set(own_queries); }
    if (begin < end) { load(begin, 0); }
    const FlashQuery own[2] = {own_queries->row[row0 + lane / 4], own_queries->row[row0 + lane / 4 + 8]};
    float dQ[HS / 8][4] = {}, row[2] = {0.0f, 0.0f}, dgi[2] = {0.0f, 0.0f};
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    FlashOwned<HS, true> rows(Qt, row0), douts(dOt, row0);

    const auto step = [&](auto masked, int n, const bf16* Kt, int stage) {
        constexpr bool edge = decltype(masked)::value;
        const FlashQuery* key = streamed_key + stage * TILE;
        FlashQuery row_query[2] = {own[0], own[1]};
        if (cable) {
            row_query[0].S = own_S->shifted[stage][row0 + lane / 4];
            row_query[1].S = own_S->shifted[stage][row0 + lane / 4 + 8];
        }
        for (int c0 = 0; c0 < TILE; c0 += CHUNK) {
            float P[CHUNK / 8][4], dl[CHUNK / 8][4];
            syncwarp();                                 // as in the other kernel
            flash_scores<HS>(P, rows, Kt, c0);
            flash_scores<HS>(dl, douts, Kt + TILE * HS, c0);
            UNROLL
            for (int e = 0; e < CHUNK / 8 * 2; e++) {
                const int half = e % 2, c = c0 + e / 2 * 8 + lane % 4 * 2, r = row0 + lane / 4 + 8 * half, i = i0 + r, j = n * TILE + c;
                float bias0 = 0.0f, bias1 = 0.0f;
                if (K == FlashBias::Toeplitz) {
                    bias0 = flash_table(p, at.h, i, j);
                    bias1 = flash_table(p, at.h, i, j + 1);
                } else if (K != FlashBias::None) {
                    bias0 = key[c].S;
                    bias1 = key[c + 1].S;
                }
                const bool out0 = edge && (j >= at.keys || (Causal && j > i)), out1 = edge && (j + 1 >= at.keys || (Causal && j + 1 > i));
                float* dp = &dl[e / 2][2 * half];
                const FlashPair<K> x(&P[e / 2][2 * half], dp, row_query[half], row_query[half], bias0, bias1, LOG2E * p.scale, out0, out1);
                UNROLL
                for (int k = 0; k < 2; k++) {
                    if (K == FlashBias::Distance) {
                        row[half] += edge && !Causal && m == n && j + k > i ? -x.dl[k] : x.dl[k];
                        dgi[half] -= x.dl[k] * fabsf(x.w[k]);
                    }
                    if (K == FlashBias::LogDistance) {
                        const float w = x.dl[k] * x.r[k] * x.w[k];
                        row[half] += w;
                        dgi[half] -= w * x.w[k];
                    }
                    dp[k] = x.dl[k];
                }
                if (K == FlashBias::Toeplitz) { diagonals.put(r, c, x.dl[0], x.dl[1]); }
            }
            UNROLL
            for (int k = 0; k < CHUNK / 8; k += 2) { flash_accumulate<HS>(dQ, dl[k], dl[k + 1], Kt, c0 + k * 8); }
        }
    };
    int stage = 0;
    for (int n = begin; n < end; n++, stage ^= 1) {
        cp_async_wait<0>();
        __syncthreads();                                // this stage has arrived, and the other is read no more; nor are dl and Qt, dOt
        if (n + 1 < end) { load(n + 1, stage ^ 1); }
        const bf16* Kt = streamed + stage * 2 * TILE * HS;
        if (K == FlashBias::Distance && !Causal && n == m + 1) {        // e is -1 from here on: row is summed with the sign of its last e
            row[0] = -row[0];
            row[1] = -row[1];
        }
        if (n == m || (n + 1) * TILE > at.keys) { step(std::true_type(), n, Kt, stage); }
        else { step(std::false_type(), n, Kt, stage); }
        if (K == FlashBias::Toeplitz) {
            __syncthreads();
            diagonals.add(n, stage, n == begin);
        }
    }
    if (K == FlashBias::Toeplitz && begin < end) {
        __syncthreads();
        if (threadIdx.x < 63) { diagonals.slab[end * TILE + threadIdx.x] = diagonals.carry[(stage ^ 1) * 64 + threadIdx.x]; }
    }
    flash_store<HS>(p.dqkv + (size_t)(at.b * p.stride + i0) * p.OC + at.h * HS, p.OC, p.T - i0, Qt, dQ, p.scale);
    UNROLL
    for (int half = 0; half < 2 && cable; half++) {
        const int i = i0 + row0 + lane / 4 + 8 * half;
        const float g = own[half].g, sum = quad_sum(row[half]), moment = quad_sum(dgi[half]), e = Causal || end <= m + 1 ? 1.0f : -1.0f;
        const size_t to = (size_t)(at.b * p.NH + at.h) * p.stride + i;
        if (lane % 4 != 0 || i >= p.T) { continue; }
        p.dS[to] -= K == FlashBias::Distance ? LN2 * (g * (e * sum)) : 2.0f * (g * g * sum);
        p.dg[to] = K == FlashBias::Distance ? moment : 2.0f * g * moment;
    }
}

// ----------------------------------------------------------------------------------------------------------
// launchers

// floats of scratch, 16-byte aligned, that flash_backward wants
inline size_t flash_backward_scratch(FlashBias K, int B, int T, int NH) {
    const size_t tiles = (size_t)ceil_div(T, FLASH_TILE), BNH = (size_t)B * NH;
    return BNH * tiles * flash_variants(K) * (sizeof(FlashQueries) / sizeof(float)) + (K == FlashBias::Toeplitz ? BNH * tiles * (tiles + 1) * FLASH_TILE : 0);
}

template <bool Causal, FlashBias K, int HS> void flash_backward_of(const FlashArgs& p, float* scratch, Stream stream) {
    const size_t BNH = (size_t)p.B * p.NH, tiles = (size_t)ceil_div(p.T, FLASH_TILE);
    FlashQueries* queries = (FlashQueries*)scratch;
    float* slab = (float*)(queries + BNH * tiles * flash_variants(K));
    const size_t prepare_blocks = BNH * tiles * FLASH_TILE * (HS / 8) / FLASH_THREADS;
    launch(flash_backward_prepare_kernel<K, HS>, Grid(prepare_blocks, FLASH_THREADS, 0, stream), queries, p);
    launch(flash_backward_dkdv_kernel<Causal, K, HS>, Grid(BNH * tiles, FLASH_THREADS, flash_backward_shared(HS), stream), p, queries);
    launch(flash_backward_dq_kernel<Causal, K, HS>, Grid(BNH * tiles, FLASH_THREADS, flash_backward_shared(HS), stream), p, queries, slab);
    if (K == FlashBias::Toeplitz) {
        const size_t blocks = (size_t)ceil_div(p.table_entries, FLASH_THREADS);
        launch(flash_backward_table_kernel<Causal>, Grid(BNH * blocks, FLASH_THREADS, 0, stream), p, slab);
    }
}

// Overwrites the q, k and v columns of dqkv; dS and dg (B*NH,stride) at 0 .. T-1, as CableBias::backward leaves them, before the
// suffix sum; dtable (B*NH,table_entries), as ToeplitzBias::backward leaves it.
// false: no kernel for this head size.
template <bool Causal, FlashBias K> bool flash_backward(const FlashArgs& p, float* scratch, Stream stream) {
    if (K == FlashBias::Toeplitz) {
        check(p.table_zero >= p.T - 1 && p.table_entries - p.table_zero >= (Causal ? 1 : p.T), "flash_backward: a table of %d columns, "
              "i = j at %d, does not reach every distance below T = %d", p.table_entries, p.table_zero, p.T);
    }
    if (p.HS == 64) { flash_backward_of<Causal, K, 64>(p, scratch, stream); }
    else if (p.HS == 128) { flash_backward_of<Causal, K, 128>(p, scratch, stream); }
    else { return false; }
    return true;
}

#endif
