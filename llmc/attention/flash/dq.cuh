// attention/flash/dq.cuh -- the kernel of attention/flash/backward.cuh whose blocks own queries: dq, dg, the row part
// of dS (subtracted from the column part), and the sums of Toeplitz's table.
//
//   1. load the owned queries with their dout, and fetch the first tile of keys; for each tile of keys
//   2.    wait for it, and fetch the next one
//   3.    scores = Q K^T, dP = dout V^T; 16 keys at a time, as are the next two
//   4.    dlogit = P (dP - row_dot), and what the bias sums of it
//   5.    dQ += dlogit K
//   6. store
#pragma once

#include "diagonals.cuh"

// A block and its steps. Rows of the scores are queries, columns are keys. Masked: args.mask is obeyed.
template <bool Causal, FlashBias Kind, int HS, bool Masked> struct FlashDq {
    static constexpr int FREE = HAS_WGMMA ? -1 : 1;         // Fire's sums are in the place of q
    using Owner = FlashOwner<Kind, HS, FREE>;
    using Terms = FlashTerms<Kind>;
    static constexpr int STRIP = flash_strip(Kind);
    using Scores = FlashFragment<STRIP>;
    static constexpr int OWN = FLASH_OWN;                   // the lane's rows
    // whether the products read q and dout where they are; Toeplitz needs their place
    static constexpr bool IN_PLACE = flash_wgmma(STRIP) && !Terms::DIAGONALS;
    const FlashArgs& args;
    const Owner owner;
    const FlashDiagonals diagonals;                         // Toeplitz
    FlashFire fire;
    FlashFireSums fire_sums;
    const FlashReach reach;                                 // the tiles of keys that the block meets
    // Arrays are apart: the compiler promotes the members above to registers only if no array is beside them.
    struct Owned {                                          // of the owned queries
        FlashOwned<HS, IN_PLACE ? 0 : HS / 16> q, dout;     // one sum less than in the other kernel: they fit
        FlashQuery query[OWN];                              // the lane's
    };
    struct Sums {
        FlashFragment<HS> dQ = {};
        float row[OWN] = {};                                // of dlogit over its sign, or of w
        float dg[OWN] = {};
    };

    __device__ FlashDq(const FlashArgs& args, const FlashQueries* queries, const FlashSlabs& slabs)
        : args(args), owner(args, queries, PART ? slabs.count : ceil_div(args.T, FLASH_TILE), true,
                            PART ? slabs.first : 0),
          diagonals(find_diagonals(slabs)),
          reach(FlashReach::of<Causal, flash_skips(Kind), Masked>(args, owner.block.bh, owner.tile(),
                                                                  owner.block.live_tiles())) {}
    static constexpr bool PART = Terms::DIAGONALS;       // a launch has the queries of slabs.count tiles
    // in the place of q and dout, which are in registers by then, and after the tiles, where no values are needed
    __device__ FlashDiagonals find_diagonals(const FlashSlabs& slabs) const {
        const FlashBlock& block = owner.block;
        return {(float*)owner.own_tile(0), (float*)owner.streamed_tile(2), slabs.of(block.bh, block.tile, block.tiles)};
    }
    __device__ FlashMask<Causal, Masked> mask() const { return {args, owner.block.b, owner.block.keys}; }
    __device__ int after(int n) const { return Masked ? reach.after(n) : n + 1; }
    __device__ void fetch(int n, int stage) const { owner.template fetch<FLASH_K, FLASH_V>(n, stage); }
    __device__ void load_owned(Owned& own) {
        const auto start = [&] {                            // what needs the place of the values
            owner.put_own_S();
            if (reach.end > 0) { fetch(reach.begin(), 0); }
            if (Terms::PIECES) { fire.stage((FirePiece*)owner.own_S, args, owner.block.h); }
        };
        owner.template load_owned<FLASH_Q, FLASH_DOUT>();
        if (FREE < 0) { start(); }
        const FlashQueries* from = owner.block.template queries<Kind>(owner.queries, owner.tile(), FROM_CHUNK);
        UNROLL
        for (int r = 0; r < OWN; r++) { own.query[r] = from->row[owner.row(r)]; }
        cp_async_commit();
        flash_wait_copies();
        __syncthreads();
        own.q.load(owner.own_tile(0), owner.row0);
        own.dout.load(owner.own_tile(1), owner.row0);
        // in the place of q, as the diagonals are
        fire_sums.of = (double*)(owner.own_tile(0) + owner.row0 * FLASH_COLUMNS);
        if (Terms::PIECES) {
            syncwarp();
            fire_sums.clear();
        }
        if (FREE >= 0) {
            __syncthreads();                                // all warps have their rows of q and dout
            start();
        }
    }
    // The lane's e-th pair of a strip that begins with key c0 of a tile: two keys of a query. Its row and column in a
    // fragment, and the first key in the tile
    __device__ static int pair_row(int e) { return e / (STRIP / 8); }
    __device__ static int pair_column(int e) { return e % (STRIP / 8); }
    __device__ int pair_key(int e, int c0) const { return c0 + pair_column(e) * 8 + owner.lane % 4 * 2; }
    // what the products of the keys of tile n from c0 on start from; Fire: P holds B
    __device__ void start(Scores& P, Scores& dP, const FlashQuery (&queries)[OWN], const FlashQuery* keys, float side,
                          int n, int c0) const {
        UNROLL
        for (int e = 0; e < STRIP / 8 * OWN; e++) {
            const int r = pair_row(e);
            const int c = pair_key(e, c0);
            float key[2];
            UNROLL
            for (int k = 0; k < 2; k++) {
                if (Terms::PLACES) { key[k] = keys[c + k].place; }
                if (Terms::DIAGONALS) {
                    key[k] = flash_table(args, owner.block.h, owner.first() + owner.row(r), n * FLASH_TILE + c + k);
                }
            }
            const int n8 = pair_column(e);
            const FlashQuery query[2] = {queries[r], queries[r]};
            FlashPair<Kind>::start(P.pair(r, n8), dP.pair(r, n8), query, key, side, 1.0f / args.scale);
        }
    }
    // P holds scores, dlogit holds dP - row_dot and becomes P (dP - row_dot): of the keys of tile n from c0 on. Their
    // part of the sums over the tile; Toeplitz's tile
    template <bool Edge>
    __device__ void take_gradient(Scores& P, Scores& dlogit, const FlashQuery (&queries)[OWN], const FlashQuery* keys,
                                  float (&tile_sum)[OWN], float (&tile_dg)[OWN], float side, int n, int c0) const {
        UNROLL
        for (int e = 0; e < STRIP / 8 * OWN; e++) {
            const int lane_row = pair_row(e);
            const int n8 = pair_column(e);
            const int r = owner.row(lane_row);
            const int c = pair_key(e, c0);
            const int i = owner.first() + r;
            const int j = n * FLASH_TILE + c;
            const FlashQuery& query = queries[lane_row];
            const int begin = Edge ? mask().begin(i) : 0;
            float key[2];
            bool hidden[2];
            UNROLL
            for (int k = 0; k < 2; k++) {
                if (Terms::PLACES) { key[k] = keys[c + k].place; }
                hidden[k] = Edge && mask().hides(i, j + k, begin);
            }
            float* dlogit_pair = dlogit.pair(lane_row, n8);
            const FlashPair<Kind> pair(P.pair(lane_row, n8), dlogit_pair, {query, query}, key, LOG2E * args.scale,
                                       hidden, args.inside);
            UNROLL
            for (int k = 0; k < 2; k++) {
                const bool negative = Edge && !Causal && owner.tile() == n && j + k > i;
                const float turned = negative ? -pair.dlogit[k] : pair.dlogit[k];
                pair.to_query(tile_sum[lane_row], tile_dg[lane_row], k, pair.dlogit[k], turned, key[k], side);
                dlogit_pair[k] = pair.dlogit[k];
            }
            if (Terms::DIAGONALS) { diagonals.put(r, c, pair.dlogit[0], pair.dlogit[1]); }
        }
    }
    // The pairs of the owned queries and the keys of tile n. Edge: the tile is on the diagonal or has hidden pairs
    template <bool Edge> __device__ void meet(Sums& sums, Owned& own, const bf16* K_tile, int n, int stage) {
        const bf16* V_tile = K_tile + FLASH_TILE * HS;
        const FlashQuery* keys = owner.met_values(stage);
        const int row = owner.first() + owner.row0;
        const float side = flash_side<Causal, Edge>(owner.tile(), n);
        float tile_sum[OWN] = {};                           // summed first: docs/attention.md, "Sums of many keys"
        float tile_dg[OWN] = {};
        FlashQuery queries[OWN];                            // the lane's, as these keys meet them
        UNROLL
        for (int r = 0; r < OWN; r++) {
            queries[r] = own.query[r];
            if (!Terms::SUMS_ROWS) { continue; }
            queries[r].place = owner.place(owner.row(r), stage);
            if (Terms::SIGNED) { queries[r].start -= side * queries[r].weight * queries[r].place; }
        }
        ONE_BY_ONE
        for (int c0 = 0; c0 < FLASH_TILE; c0 += STRIP) {
            // 3. scores = B - lse + Q K^T and dP = dout V^T - row_dot
            Scores P;
            Scores dlogit;
            Scores y;                                       // Fire
            if (Terms::PIECES) {
                fire.meet(args, row, FLASH_ROWS, n * FLASH_TILE + c0, STRIP);
                const float inv[OWN] = {own.query[0].weight, own.query[1].weight};
                flash_fire_y(y, args, inv, keys + c0, row, n * FLASH_TILE + c0);
                fire.apply(P, y);
            }
            start(P, dlogit, queries, keys, side, n, c0);
            syncwarp();                                     // without it ptxas unrolls for sm_80 all the same
            wgmma_fence();
            P.add_transposed(own.q, owner.own_tile(0), owner.row0, K_tile, c0);
            dlogit.add_transposed(own.dout, owner.own_tile(1), owner.row0, V_tile, c0);
            wgmma_wait();
            // 4. dlogit = P (dP - row_dot), and what the bias sums of it
            take_gradient<Edge>(P, dlogit, queries, keys, tile_sum, tile_dg, side, n, c0);
            if constexpr (Terms::PIECES) {
                flash_fire_sum(fire_sums, fire, dlogit, y, args, own.query, keys + c0, row, n * FLASH_TILE + c0);
            }
            UNROLL                                          // early, because registers are scarce
            for (int r = 0; r < OWN && Terms::SUMS_ROWS && !Terms::SIGNED; r++) {
                sums.dg[r] += tile_dg[r];
                tile_dg[r] = 0.0f;
            }
            // 5. dQ += dlogit K
            const FlashLeft<STRIP> left(dlogit);
            wgmma_fence();
            sums.dQ.add_product(left, K_tile, c0);
            wgmma_wait();
        }
        UNROLL
        for (int r = 0; r < OWN; r++) {
            sums.row[r] += tile_sum[r];
            Terms::finish(sums.dg[r], tile_dg[r], tile_sum[r], queries[r].place, side);
        }
    }
    // Distance: the sign is -1 from the tile after the queries' own on, and sums.row follows it
    __device__ void turn_sign(Sums& sums, int n) const {
        UNROLL
        for (int r = 0; r < OWN && Terms::SIGNED && !Causal; r++) {
            sums.row[r] = n == owner.tile() + 1 ? -sums.row[r] : sums.row[r];
        }
    }
    // Toeplitz: the diagonals of tile n
    __device__ void add_diagonals(int n) const {
        __syncthreads();                                    // the tile of dlogit is complete
        const bool starts = n == reach.begin() || (Masked && n == reach.first && reach.sinks_end < reach.first);
        if (threadIdx.x < FLASH_TILE) { diagonals.add(n, starts); }
        if (Masked && reach.gap_after(n) && threadIdx.x < 63) { diagonals.end_after(n); }
    }
    // no tile on the right takes the last diagonals
    __device__ void store_diagonals() const {
        __syncthreads();
        if (reach.end > 0 && threadIdx.x < 63) { diagonals.end_after(reach.end - 1); }
    }
    // the warps' sums
    __device__ void store_fire(double* partial) const {
        constexpr int SIZE = FIRE_PIECES * FIRE_SUMS;
        partial += ((size_t)owner.block.bh * owner.block.tiles + owner.tile()) * SIZE;
        __syncthreads();
        for (int e = threadIdx.x; e < SIZE; e += FLASH_THREADS) {
            double sum = 0.0;
            for (int r = 0; r < FLASH_TILE; r += FLASH_ROWS) {
                sum += ((const double*)(owner.own_tile(0) + r * FLASH_COLUMNS))[e];
            }
            partial[e] = sum;
        }
        __syncthreads();                                    // dQ takes their place
    }
    __device__ void store_dq(Sums& sums) const {
        const FlashBlock& block = owner.block;
        bf16* dq = args.dqkv + (size_t)(block.b * args.stride + owner.first()) * args.OC + block.h * block.columns;
        float factor[OWN];
        UNROLL
        for (int r = 0; r < OWN; r++) { factor[r] = args.scale; }
        sums.dQ.store(dq, args.OC, args.T - owner.first(), block.columns, owner.own_tile(0), factor);
    }
    __device__ void store_row_sums(const Sums& sums, const Owned& own) const {
        UNROLL
        for (int r = 0; r < OWN && Terms::SUMS_ROWS; r++) {
            const int i = owner.first() + owner.row(r);
            const float g = own.query[r].weight;
            const float sum = quad_sum(sums.row[r]);
            const float moment = quad_sum(sums.dg[r]);
            const bool left = Causal || reach.end <= owner.tile() + 1;
            const float sign = left ? 1.0f : -1.0f;         // of the last tile: see turn_sign
            const size_t to = (size_t)owner.block.bh * args.stride + i;
            if (owner.lane % 4 != 0 || i >= args.T) { continue; }
            // g of Distance is over scale
            args.dS[to] -= Terms::SIGNED ? args.scale * (g * (sign * sum)) : 2.0f * (g * sum);
            args.dg[to] = args.factor_of(owner.block.bh, i) * moment;
            const float weight = Terms::SIGNED ? args.scale * g : g;
            if (args.moment != nullptr) { args.moment[to] = weight * moment; }
        }
    }
};

template <bool Causal, FlashBias Kind, int HS, bool Masked>
__global__ void __launch_bounds__(FLASH_THREADS, flash_backward_blocks(HS))
flash_backward_dq_kernel(FlashArgs args, const FlashQueries* queries, FlashSlabs slabs) {
    using Dq = FlashDq<Causal, Kind, HS, Masked>;
    Dq dq(args, queries, slabs);
    typename Dq::Owned own;
    typename Dq::Sums sums;
    // 1. the owned queries with their dout, and the first tile of keys
    dq.load_owned(own);
    int stage = 0;
    for (int n = dq.reach.begin(); n < dq.reach.end; n = dq.after(n), stage ^= 1) {
        // 2. this tile of keys has arrived, the next one may start
        flash_wait_copies();
        __syncthreads();            // this stage has arrived; the other is read no more, nor is diagonals.dlogit
        if (dq.after(n) < dq.reach.end) { dq.fetch(dq.after(n), stage ^ 1); }
        const bf16* K_tile = dq.owner.streamed_tile(stage);
        dq.turn_sign(sums, n);
        // 3. to 5., with masks where the tile is on the diagonal or has hidden pairs
        if (dq.mask().edge(dq.owner.tile(), n)) { dq.template meet<true>(sums, own, K_tile, n, stage); }
        else { dq.template meet<false>(sums, own, K_tile, n, stage); }
        if (Dq::Terms::DIAGONALS) { dq.add_diagonals(n); }
    }
    // 6. store
    if (Dq::Terms::DIAGONALS) { dq.store_diagonals(); }
    if (Dq::Terms::PIECES) { dq.store_fire((double*)slabs.data); }
    dq.store_dq(sums);
    dq.store_row_sums(sums, own);
}
