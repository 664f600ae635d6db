// attention/flash/dq.cuh -- the kernel of attention/flash/backward.cuh whose blocks own queries: dq, dg, the row part
// of dS (subtracted from the column part), and the sums of Toeplitz's table with the kernel that adds its slabs.
#ifndef LLMC_ATTENTION_FLASH_DQ_CUH
#define LLMC_ATTENTION_FLASH_DQ_CUH

#include <type_traits>

#include "pairs.cuh"

// ----------------------------------------------------------------------------------------------------------
// Toeplitz

// The diagonals of a 64 x 64 tile of dlogit, two for each of 64 threads: k and k + 64. The latter continues as k in the
// next tile to the right. docs/attention.md, "The gradient of a Toeplitz table".
struct FlashDiagonals {
    float* dlogit;                  // (64,64), in the order of at(), which keeps the banks apart
    float* carry;                   // (64): of the last tile, diagonals 64 ..; 127 is none, and 0
    float* slab;                    // ((tiles+1)*64): diagonal k of tile n, j - i = 64 (n - m) + k - 63, at 64 n + k

    // eight rows at the columns 0, 2, 4, 6 are 32 banks, and so are 32 neighbouring columns of one row
    __device__ static int at(int r, int c) { return r * FLASH_TILE + (c ^ ((r & 7) * 8 | (r >> 2 & 1))); }
    __device__ void put(int r, int c, float x0, float x1) const {
        dlogit[at(r, c)] = x0;
        dlogit[at(r, c + 1)] = x1;
    }
    // the sums of tile n; first: no tile to its left, whose diagonals would continue here
    __device__ void add(int n, bool first) const {
        const int k = threadIdx.x % 64;
        float left = 0.0f;
        float right = 0.0f;
        for (int r = 0; r < 64; r++) {                      // neighbouring lanes read neighbouring columns
            const int c = r + k - 63;
            const float x = dlogit[at(r, c & 63)];
            if (c >= 0) { left += x; } else { right += x; }
        }
        slab[n * 64 + k] = first ? left : left + carry[k];
        carry[k] = right;
    }
};

// The slabs (B*NH,count,(tiles+1)*64) of the query tiles from `first` on. One launch has `count` per head: with a slab
// for every tile, scratch would grow with T * T.
struct FlashSlabs {
    float* data;
    int first, count;

    __device__ float* of(int bh, int m, int tiles) const {
        return data + ((size_t)bh * count + m - first) * (tiles + 1) * FLASH_TILE;
    }
};

// dtable[b,h] is the sum of the query tiles' slabs, in order; columns that no distance reaches become 0. Launched after
// each launch of the dq kernel: the first one overwrites, the rest continue the sum.
template <bool Causal, bool Masked>
__device__ __forceinline__ void flash_table_block(const FlashArgs& args, const FlashSlabs& slabs) {
    const FlashBlock block(args, (int)gridDim.x / (args.B * args.NH));
    const int column = block.turn * blockDim.x + threadIdx.x;
    if (column >= args.table_entries) { return; }
    float* total = args.dtable + (size_t)block.bh * args.table_entries + column;
    float sum = slabs.first == 0 ? 0.0f : *total;
    for (int m = slabs.first; m < slabs.first + slabs.count; m++) {
        const int at = column - args.table_zero + m * FLASH_TILE + 63;      // where the column is in the slab of tile m
        const int begin = block.first_key_tile(args, m);
        const int end = block.template end_key_tile<Causal, FlashBias::Toeplitz>(args, m);
        bool written = begin < end && at >= begin * FLASH_TILE && at < end * FLASH_TILE + 63;
        if (Masked) {
            const FlashReach reach = FlashReach::of<Causal>(args, block.bh, m, block.live_tiles());
            const bool sinks = reach.has_sinks() && at >= reach.sinks_begin * FLASH_TILE;
            const bool window = reach.end > 0 && at >= reach.first * FLASH_TILE;
            written = (sinks && at < reach.sinks_end * FLASH_TILE + 63) || (window && at < reach.end * FLASH_TILE + 63);
        }
        if (written) { sum += slabs.of(block.bh, m, block.tiles)[at]; }
    }
    *total = sum;
}
template <bool Causal> __global__ void flash_backward_table_kernel(FlashArgs args, FlashSlabs slabs) {
    flash_table_block<Causal, false>(args, slabs);
}
template <bool Causal> __global__ void flash_masked_table_kernel(FlashArgs args, FlashSlabs slabs) {
    flash_table_block<Causal, true>(args, slabs);
}

// ----------------------------------------------------------------------------------------------------------
// Fire

// Adds the pairs of FlashFire::meet to the warp's sums: dlogit and y as flash_fire_y has them. Masked pairs have dlogit
// 0 and a finite y.
template <int N>
__device__ inline void flash_fire_sum(const FlashFireSums& sums, const FlashFire& fire, const float (&dlogit)[1][N][4],
                                      const float (&y)[4 * N], const FlashArgs& args, const FlashQuery (&own_query)[2],
                                      const FlashQuery* key, int row, int column) {
    const float* dL = args.dnorm + args.table_zero + 1 + TOEPLITZ_PAD;      // by L, of each position's norm: descending
    const int lane = threadIdx.x % 32;
    float d[4 * N];
    float by_c[4 * N];
    float by_L[4 * N];
    UNROLL
    for (int e = 0; e < 4 * N; e++) {
        const FlashQuery& query = own_query[e % 4 / 2];
        const int c = e / 4 * 8 + lane % 4 * 2 + e % 2;
        const int i = row + lane / 4 + e % 4 / 2 * 8;
        const int j = column + c;
        const float inv = fminf(query.g, key[c].g);         // of the later position, as are the next two
        const float dnorm = fmaxf(query.S, key[c].S);
        d[e] = dlogit[0][e / 4][e % 4];
        by_c[e] = (args.dpsi[args.table_zero - FlashFire::distance(args, i, j)] - y[e] * dnorm) * inv;
        by_L[e] = y[e] * inv * dL[imax(i, j)];
    }
    sums.add(fire, d, y, by_c, by_L);
}

// ----------------------------------------------------------------------------------------------------------
// the kernel

// Rows of the scores are queries, columns are keys. Masked: args.mask is obeyed.
template <bool Causal, FlashBias Kind, int HS, int Rows, bool Masked>
__device__ __forceinline__ void flash_dq_block(const FlashArgs& args, const FlashQueries* queries,
                                               const FlashSlabs& slabs) {
    constexpr int TILE = FLASH_TILE;
    constexpr int STRIP = FLASH_STRIP;
    constexpr int OWNED = flash_block_rows(Rows);
    constexpr int OWN = Rows / 8;                           // the lane's rows
    constexpr int VIEWS = flash_views<Kind>(Rows);
    constexpr bool cable = flash_is_cable(Kind);
    const int lane = threadIdx.x % 32;
    const int row0 = threadIdx.x / 32 * Rows;               // the warp's first query in the block
    const int own_tile = row0 / TILE;                       // the tile that holds it, 0 or 1
    bf16* Q_tile = (bf16*)dynamic_shared();                 // (OWNED,HS)
    bf16* dO_tile = Q_tile + OWNED * HS;                    // (OWNED,HS)
    bf16* streamed = dO_tile + OWNED * HS;                  // two stages of K_tile (TILE,HS), V_tile (TILE,HS)
    FlashQuery* streamed_key = (FlashQuery*)(streamed + 4 * TILE * HS);     // two stages of (VIEWS,TILE): S is read
    FlashOwnS<Rows>* own_S = (FlashOwnS<Rows>*)(streamed_key + 2 * OWNED);
    // the block's place: with 32 rows in shared memory, because registers are scarce
    const int from = Kind == FlashBias::Toeplitz ? slabs.first * TILE : 0;
    const int turns = ceil_div(Kind == FlashBias::Toeplitz ? slabs.count * TILE : args.T, OWNED);
    const FlashBlock placed(args, turns, OWNED, true, from);
    FlashBlock* shared_block = (FlashBlock*)(own_S + 1);
    if (Rows == 32 && threadIdx.x == 0) { *shared_block = placed; }
    if (Rows == 32) { __syncthreads(); }
    const FlashBlock& block = Rows == 32 ? *shared_block : placed;
    const auto i0 = [&] { return block.first; };            // this block's first query,
    const auto m0 = [&] { return block.first / TILE; };     // in the tile m0
    const auto m = [&] { return (block.first + row0) / TILE; };             // this warp's tile
    // Toeplitz: Q_tile and dO_tile are in registers by then, and nothing is in streamed_key
    const FlashDiagonals diagonals = {(float*)Q_tile + own_tile * TILE * TILE, (float*)streamed_key + own_tile * TILE,
                                      slabs.of(block.bh, m(), block.tiles)};
    const auto fetch = [&](int n, int stage) {
        const int j0 = n * TILE;
        bf16* K_tile = streamed + stage * 2 * TILE * HS;
        flash_load_tile<HS>(K_tile, block.qkv(args, j0, 1), args.OC, block.columns, args.T - j0);
        flash_load_tile<HS>(K_tile + TILE * HS, block.qkv(args, j0, 2), args.OC, block.columns, args.T - j0);
        const int view = flash_view<VIEWS>(threadIdx.x);
        const FlashQueries* met = block.template queries<Kind>(queries, n, flash_from<Kind>(n, m0() + view));
        FlashQuery* to = streamed_key + stage * VIEWS * TILE;
        if (Kind != FlashBias::None && Kind != FlashBias::Toeplitz && threadIdx.x < VIEWS * TILE) {
            cp_async_16(to + threadIdx.x, met->row + threadIdx.x % TILE, true);
        }
        if (cable) { own_S->shift(met, stage); }
        cp_async_commit();
    };

    // 1. the owned queries with their dout, and the first tile of keys; the block's range of keys, and this warp's
    int block_begin = block.tiles;
    int block_end = 0;
    for (int tile = 0; tile < flash_block_tiles(Rows); tile++) {
        if (m0() + tile >= block.live_tiles()) { continue; }
        block_begin = imin(block_begin, block.first_key_tile(args, m0() + tile));
        block_end = imax(block_end, block.template end_key_tile<Causal, Kind>(args, m0() + tile));
    }
    const bool live = m() < block.live_tiles();
    int begin = live ? block.first_key_tile(args, m()) : 0;
    int end = live ? block.template end_key_tile<Causal, Kind>(args, m()) : 0;
    FlashReach reach;
    if (Masked) {
        reach = FlashReach::of<Causal>(args, block.bh, m(), block.live_tiles());
        block_begin = begin = reach.begin();
        block_end = end = reach.end;
    }
    const auto after = [&](int n) { return Masked ? reach.after(n) : n + 1; };
    flash_load_tile<HS, OWNED>(Q_tile, block.qkv(args, i0(), 0), args.OC, block.columns, args.T - i0());
    flash_load_tile<HS, OWNED>(dO_tile, block.dout(args, i0()), args.NH * block.columns, block.columns, args.T - i0());
    if (cable) { own_S->set(block.template own_queries<Kind, VIEWS>(queries, m0())); }
    if (block_begin < block_end) { fetch(block_begin, 0); }
    FlashFire fire;                                         // in the place of own_S
    if (Kind == FlashBias::Fire) { fire.stage((FirePiece*)own_S, args, block.h); }
    // of the owned queries: with 32 rows in shared memory, because registers are scarce, otherwise the lane's. A tile
    // after T has none: it reads other queries' values and does not use them
    FlashQuery* shared_query = (FlashQuery*)((char*)(own_S + 1) + FLASH_BLOCK_BYTES);      // (OWNED)
    FlashQuery own_query[Rows == 32 ? 1 : OWN];
    if (Rows == 32) {
        const int tile = imin(m0() + (int)threadIdx.x / TILE, block.tiles - 1);
        const FlashQueries* from = block.template queries<Kind>(queries, tile, FROM_CHUNK);
        cp_async_16(shared_query + threadIdx.x, from->row + threadIdx.x % TILE, true);
    } else {
        const FlashQueries* from = block.template queries<Kind>(queries, m(), FROM_CHUNK);
        UNROLL
        for (int own = 0; own < OWN && Rows != 32; own++) { own_query[own] = from->row[row0 + lane / 4 + 8 * own]; }
    }
    float dQ[Rows / 16][HS / 8][4] = {};                    // of the warp's queries
    float row_sum[OWN] = {};                                // of the lane's queries: sum sign dlogit, or sum w
    float dg[OWN] = {};
    float own_inv[OWN];                                     // Fire
    UNROLL
    for (int own = 0; own < OWN && Kind == FlashBias::Fire; own++) { own_inv[own] = own_query[own].g; }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    FlashOwned<HS, Rows, HS / 16> rows;                        // one sum less than in the other kernel: they fit
    FlashOwned<HS, Rows, HS / 16> douts;
    rows.load(Q_tile, row0);
    douts.load(dO_tile, row0);
    // in the place of this warp's rows of Q_tile, which are in registers
    const FlashFireSums fire_sums = {(double*)(Q_tile + row0 * HS)};
    if (Kind == FlashBias::Fire) {
        syncwarp();
        fire_sums.clear();
    }

    // The pairs of the owned queries and the keys of tile n. `masked`: whether it is on the diagonal or has padding
    const auto step = [&](auto masked, int n, const bf16* K_tile, int stage) {
        constexpr bool edge = decltype(masked)::value;
        const FlashQuery* key = streamed_key + (stage * VIEWS + flash_view<VIEWS>(row0)) * TILE;
        float tile_sum[OWN] = {};                           // as in the other kernel
        float tile_dg[OWN] = {};
        for (int c0 = 0; c0 < TILE; c0 += STRIP) {
            // 3. scores = Q K^T and dP = dout V^T
            float P[Rows / 16][STRIP / 8][4];               // scores; P itself is not needed after dlogit
            float dlogit[Rows / 16][STRIP / 8][4];          // dP, then dlogit
            syncwarp();                                     // as in the other kernel
            flash_scores<HS, Rows>(P, rows, Q_tile, row0, K_tile, c0);
            flash_scores<HS, Rows>(dlogit, douts, dO_tile, row0, K_tile + TILE * HS, c0);
            float y[Rows * STRIP / 32];
            if (Kind == FlashBias::Fire) {
                fire.meet(args, i0() + row0, Rows, n * TILE + c0, STRIP);
                flash_fire_y<Rows, STRIP / 8>(y, args, own_inv, key + c0, i0() + row0, n * TILE + c0);
                flash_fire_add<Rows>(P, y, fire);
            }
            // 4. dlogit, two keys of a query at a time; dg, the row part of dS, Toeplitz's tile
            UNROLL
            for (int e = 0; e < STRIP / 8 * OWN; e++) {
                const int own = e / (STRIP / 8);
                const int at = own % 2 * 2;
                const int n8 = e % (STRIP / 8);
                const int c = c0 + n8 * 8 + lane % 4 * 2;                   // the first key of the two, in its tile
                const int r = row0 + lane / 4 + 8 * own;
                const int i = i0() + r;
                const int j = n * TILE + c;
                FlashQuery query = Rows == 32 ? shared_query[r] : own_query[own];
                if (cable) { query.S = own_S->shifted[stage][r]; }          // counted from what the streamed tile is
                float bias0 = 0.0f;
                float bias1 = 0.0f;
                if (Kind == FlashBias::Toeplitz) {
                    bias0 = flash_table(args, block.h, i, j);
                    bias1 = flash_table(args, block.h, i, j + 1);
                } else if (flash_has_S(Kind)) {
                    bias0 = key[c].S;
                    bias1 = key[c + 1].S;
                }
                bool masked0 = edge && (j >= block.keys || (Causal && j > i));
                bool masked1 = edge && (j + 1 >= block.keys || (Causal && j + 1 > i));
                if (edge && Masked) {
                    const int begin = flash_begin(args, block.b, i);        // computed again: registers are scarce
                    masked0 = masked0 || args.mask.hides(i, j, begin);
                    masked1 = masked1 || args.mask.hides(i, j + 1, begin);
                }
                float* dlogit_pair = &dlogit[own / 2][n8][at];
                const FlashPair<Kind> pair(&P[own / 2][n8][at], dlogit_pair, query, query, bias0, bias1,
                                           LOG2E * args.scale, masked0, masked1, args.inside);
                UNROLL
                for (int k = 0; k < 2; k++) {
                    if (Kind == FlashBias::Distance) {
                        const bool negative = edge && !Causal && m() == n && j + k > i;
                        tile_sum[own] += negative ? -pair.dlogit[k] : pair.dlogit[k];
                        tile_dg[own] -= pair.dlogit[k] * fabsf(pair.distance[k]);
                    }
                    if (Kind == FlashBias::LogDistance) {
                        tile_sum[own] += pair.dlogit[k] * pair.bend[k];
                        tile_dg[own] -= pair.dlogit[k] * pair.by_g[k];
                    }
                    dlogit_pair[k] = pair.dlogit[k];
                }
                if (Kind == FlashBias::Toeplitz) { diagonals.put(r % TILE, c, pair.dlogit[0], pair.dlogit[1]); }
            }
            if constexpr (Kind == FlashBias::Fire) {
                flash_fire_sum(fire_sums, fire, dlogit, y, args, own_query, key + c0, i0() + row0, n * TILE + c0);
            }
            const bool complete = Kind == FlashBias::LogDistance || c0 + STRIP == TILE;    // there registers are scarce
            UNROLL
            for (int own = 0; own < OWN && complete; own++) {
                dg[own] += tile_dg[own];
                tile_dg[own] = 0.0f;
            }
            // 5. dQ += dlogit K
            UNROLL
            for (int k = 0; k < STRIP / 8; k += 2) { flash_accumulate<HS, Rows>(dQ, dlogit, k, K_tile, c0 + k * 8); }
        }
        UNROLL
        for (int own = 0; own < OWN; own++) { row_sum[own] += tile_sum[own]; }
    };
    int stage = 0;
    for (int n = block_begin; n < block_end; n = after(n), stage ^= 1) {
        // 2. this tile of keys has arrived, the next one may start
        cp_async_wait<0>();
        __syncthreads();            // this stage has arrived; the other is read no more, nor is diagonals.dlogit
        if (after(n) < block_end) { fetch(after(n), stage ^ 1); }
        const bf16* K_tile = streamed + stage * 2 * TILE * HS;
        const bool met = flash_block_tiles(Rows) == 1 || (n >= begin && n < end);
        UNROLL
        for (int own = 0; own < OWN && Kind == FlashBias::Distance && !Causal; own++) {
            row_sum[own] = n == m() + 1 && met ? -row_sum[own] : row_sum[own];    // sign is -1 from here on: it follows
        }
        if (met) {
            if (n == m() || (n + 1) * TILE > block.keys || (Masked && flash_cuts(args, block.b, m(), n))) {
                step(std::true_type(), n, K_tile, stage);
            } else { step(std::false_type(), n, K_tile, stage); }
        }
        if (Kind == FlashBias::Toeplitz) {
            __syncthreads();                                // the tiles of dlogit are complete
            const bool starts = n == begin || (Masked && n == reach.first && reach.sinks_end < reach.first);
            if (threadIdx.x < OWNED && met) { diagonals.add(n, starts); }
            if (Masked && reach.gap_after(n) && threadIdx.x < 63) {         // as at the end
                diagonals.slab[(n + 1) * TILE + threadIdx.x] = diagonals.carry[threadIdx.x];
            }
        }
    }
    // 6. store
    if (Kind == FlashBias::Toeplitz) {                      // no tile on the right takes the last diagonals 64 .. 126
        __syncthreads();
        if (begin < end && threadIdx.x < OWNED && threadIdx.x % TILE < 63) {
            diagonals.slab[end * TILE + threadIdx.x % TILE] = diagonals.carry[threadIdx.x % TILE];
        }
    }
    if (Kind == FlashBias::Fire) {                          // the warps' sums, before Q_tile takes dQ
        constexpr int SIZE = FIRE_PIECES * FIRE_SUMS;
        double* partial = (double*)slabs.data + ((size_t)block.bh * turns + block.first / OWNED) * SIZE;
        __syncthreads();
        for (int e = threadIdx.x; e < SIZE; e += FLASH_THREADS) {
            double sum = 0.0;
            for (int r = 0; r < OWNED; r += Rows) { sum += ((const double*)(Q_tile + r * HS))[e]; }
            partial[e] = sum;
        }
        __syncthreads();
    }
    bf16* dq = args.dqkv + (size_t)(block.b * args.stride + i0()) * args.OC + block.h * block.columns;
    flash_store<HS, Rows>(dq, args.OC, block.columns, args.T - i0(), Q_tile, dQ, args.scale);
    UNROLL
    for (int own = 0; own < OWN && cable; own++) {
        const int i = i0() + row0 + lane / 4 + 8 * own;
        const float g = Rows == 32 ? shared_query[row0 + lane / 4 + 8 * own].g : own_query[own].g;
        const float sum = quad_sum(row_sum[own]);
        const float moment = quad_sum(dg[own]);
        const float sign = Causal || end <= m() + 1 ? 1.0f : -1.0f;       // that of the last tile: see the loop
        const size_t to = (size_t)(block.b * args.NH + block.h) * args.stride + i;
        if (lane % 4 != 0 || i >= args.T) { continue; }
        // g of Distance is in units of log2: LN2 takes it back
        args.dS[to] -= Kind == FlashBias::Distance ? LN2 * (g * (sign * sum)) : 2.0f * (g * sum);
        args.dg[to] = moment;
    }
}

template <bool Causal, FlashBias Kind, int HS, int Rows = flash_dq_rows(Kind, flash_backward_rows(HS))>
__global__ void __launch_bounds__(FLASH_THREADS, flash_backward_blocks(HS, Rows))
flash_backward_dq_kernel(FlashArgs args, const FlashQueries* queries, FlashSlabs slabs) {
    flash_dq_block<Causal, Kind, HS, Rows, false>(args, queries, slabs);
}
template <bool Causal, FlashBias Kind, int HS>
__global__ void __launch_bounds__(FLASH_THREADS, 2)
flash_masked_dq_kernel(FlashArgs args, const FlashQueries* queries, FlashSlabs slabs) {
    flash_dq_block<Causal, Kind, HS, FLASH_MASKED_ROWS, true>(args, queries, slabs);
}

#endif
