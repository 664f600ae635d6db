// attention/flash/dkdv.cuh -- the kernel of attention/flash/backward.cuh whose blocks own keys: dk, dv, and dS = the
// column part of its sum.
//
//   1. load the owned keys and values, and fetch the first tile of queries; for each tile of queries
//   2.    wait for it, and fetch the next one
//   3.    scores = K Q^T, dP = V dout^T; 16 queries at a time, as are the next two
//   4.    P and dlogit = P (dP - row_dot); the column part of dS
//   5.    dV += P dout, dK += dlogit Q
//   6. store
#pragma once

#include "pairs.cuh"

// A block and its steps. Rows of the scores are keys, columns are queries. Masked: args.mask is obeyed.
template <bool Causal, FlashBias Kind, int HS, bool Masked> struct FlashDkdv {
    static constexpr int FREE = HAS_WGMMA || flash_keys_kept(Kind, HS) == 0 ? -1 : 0;
    using Owner = FlashOwner<Kind, HS, FREE>;
    using Terms = FlashTerms<Kind>;
    static constexpr int STRIP = flash_strip(Kind);
    using Scores = FlashFragment<STRIP>;
    static constexpr int OWN = FLASH_OWN;                   // the lane's rows
    const FlashArgs& args;
    const Owner owner;
    FlashFire fire;
    // Arrays are apart, as in dq.cuh
    struct Owned {                                          // of the owned keys; dK and dV leave no room for all of it
        FlashOwned<HS, flash_keys_kept(Kind, HS)> k;
        FlashOwned<HS, flash_values_kept(Kind, HS)> v;
        float inv[OWN];                                     // Fire
    };
    struct Sums {
        FlashFragment<HS> dK = {};
        FlashFragment<HS> dV = {};
        float dS[OWN] = {};                                 // of the lane's keys
    };

    __device__ FlashDkdv(const FlashArgs& args, const FlashQueries* queries)
        : args(args), owner(args, queries, ceil_div(args.T, FLASH_TILE), false, 0) {}

    __device__ FlashMask<Causal, Masked> mask() const { return {args, owner.block.b, owner.block.keys}; }
    __device__ int end() const { return owner.block.live_tiles(); }       // of the tiles of queries
    // Whether the queries of tile m meet the owned keys: not if their span ends before them, or begins after them
    __device__ bool meets(int m) const {
        const FlashBlock& block = owner.block;
        const int n = owner.tile();
        // any bias tests the span, which only two have: without it ptxas spills for sm_80
        if (Masked) { return FlashReach::of<Causal, true, true>(args, block.bh, m, end()).contains(n); }
        if (!flash_skips(Kind) || args.span == nullptr) { return !Causal || m >= n; }
        const FlashSpan span = args.span[block.bh * block.tiles + m];
        return span.first <= n && n <= (Causal ? m : span.last);
    }
    // the first tile of queries from m on that the block meets
    __device__ int visited(int m) const {
        while (m < end() && !meets(m)) { m++; }
        return m;
    }
    __device__ void fetch(int m, int stage) const { owner.template fetch<FLASH_Q, FLASH_DOUT>(m, stage); }

    // Returns the first tile of queries
    __device__ int load_owned(Owned& own) {
        owner.template load_owned<FLASH_K, FLASH_V>();
        const int first = Causal ? owner.tile() : 0;
        const int m = owner.first() < owner.block.keys ? visited(first) : end();    // all padding: meets no query
        const auto start = [&] {                            // what needs the place of the values
            owner.put_own_S();
            if (Terms::PIECES) { fire.stage((FirePiece*)owner.own_S, args, owner.block.h); }
            if (m < end()) { fetch(m, 0); }
        };
        if (FREE < 0) { start(); }
        UNROLL
        for (int r = 0; r < OWN && Terms::PIECES; r++) {
            own.inv[r] = args.inv[owner.first() + owner.row(r)];
        }
        cp_async_commit();                                  // where no tile of queries was fetched
        flash_wait_copies();
        __syncthreads();
        own.k.load(owner.own_tile(0), owner.row0);
        own.v.load(owner.own_tile(1), owner.row0);
        if (FREE >= 0) {
            __syncthreads();                                // all warps have their rows of K
            start();
        }
        return m;
    }
    // The lane's e-th pair of a strip that begins with query c0 of a tile: two queries of a key. Its row and column in
    // a fragment, and the first query in the tile
    __device__ static int pair_row(int e) { return e % OWN; }
    __device__ static int pair_column(int e) { return e / OWN; }
    __device__ int pair_query(int e, int c0) const { return c0 + pair_column(e) * 8 + owner.lane % 4 * 2; }

    // what the products of the queries of tile m from c0 on start from; Fire: P holds B
    __device__ void start(Scores& P, Scores& dP, const FlashQuery* queries, const float (&place)[OWN], float side,
                          int m, int c0) const {
        UNROLL
        for (int e = 0; e < STRIP / 8 * OWN; e++) {
            const int r = pair_row(e);
            const int c = pair_query(e, c0);
            const int i = m * FLASH_TILE + c;
            const FlashQuery query[2] = {queries[c], queries[c + 1]};
            float key[2] = {place[r], place[r]};
            if (Terms::DIAGONALS) {
                const int j = owner.first() + owner.row(r);
                key[0] = flash_table(args, owner.block.h, i, j);
                key[1] = flash_table(args, owner.block.h, i + 1, j);
            }
            const int n8 = pair_column(e);
            FlashPair<Kind>::start(P.pair(r, n8), dP.pair(r, n8), query, key, side, 1.0f / args.scale);
        }
    }
    // P holds scores and becomes probabilities, dlogit holds dP and becomes P (dP - row_dot): of the queries of tile m
    // from c0 on. Their part of the column part of dS
    template <bool Edge>
    __device__ void take_gradient(Scores& P, Scores& dlogit, float (&tile_dS)[OWN], const FlashQuery* queries,
                                  const float (&place)[OWN], int m, int c0) const {
        UNROLL
        for (int e = 0; e < STRIP / 8 * OWN; e++) {
            const int r = pair_row(e);
            const int c = pair_query(e, c0);
            const int i = m * FLASH_TILE + c;
            const int j = owner.first() + owner.row(r);
            const FlashQuery query[2] = {queries[c], queries[c + 1]};
            bool hidden[2];
            UNROLL
            for (int k = 0; k < 2; k++) {
                hidden[k] = Edge && mask().hides(i + k, j, mask().begin(i + k));
            }
            float* P_pair = P.pair(r, pair_column(e));
            float* dlogit_pair = dlogit.pair(r, pair_column(e));
            const FlashPair<Kind> pair(P_pair, dlogit_pair, query, {place[r], place[r]}, LOG2E * args.scale, hidden,
                                       args.inside);
            UNROLL
            for (int k = 0; k < 2; k++) {
                const bool negative = Edge && !Causal && m == owner.tile() && j > i + k;
                const float turned = negative ? -pair.dlogit[k] : pair.dlogit[k];
                pair.to_key(tile_dS[r], k, pair.dlogit[k], turned, query[k].weight);
                P_pair[k] = pair.P[k];
                dlogit_pair[k] = pair.dlogit[k];
            }
        }
    }
    // The pairs of the owned keys and the queries of tile m. Edge: the tile is on the diagonal or has hidden pairs
    template <bool Edge> __device__ void meet(Sums& sums, Owned& own, const bf16* Q_tile, int m, int stage) {
        const bf16* dO_tile = Q_tile + FLASH_TILE * HS;
        const FlashQuery* queries = owner.met_values(stage);
        const int row = owner.first() + owner.row0;
        const float side = flash_side<Causal, Edge>(m, owner.tile());
        float tile_dS[OWN] = {};                            // summed first: docs/attention.md, "Sums of many keys"
        float place[OWN] = {};                              // of the keys
        UNROLL
        for (int r = 0; r < OWN; r++) {
            if (Terms::SUMS_ROWS) { place[r] = owner.place(owner.row(r), stage); }
            else if (Terms::PLACES) { place[r] = (float)(owner.first() + owner.row(r)); }
        }
        ONE_BY_ONE
        for (int c0 = 0; c0 < FLASH_TILE; c0 += STRIP) {
            // 3. scores = B - lse + K Q^T and dP = V dout^T - row_dot
            Scores P;
            Scores dlogit;
            if (Terms::PIECES) {
                Scores y;
                fire.meet(args, row, FLASH_ROWS, m * FLASH_TILE + c0, STRIP);
                flash_fire_y(y, args, own.inv, queries + c0, row, m * FLASH_TILE + c0);
                fire.apply(P, y);
            }
            start(P, dlogit, queries, place, side, m, c0);
            syncwarp();                                     // without it ptxas unrolls for sm_80 all the same
            wgmma_fence();
            P.add_transposed(own.k, owner.own_tile(0), owner.row0, Q_tile, c0);
            dlogit.add_transposed(own.v, owner.own_tile(1), owner.row0, dO_tile, c0);
            wgmma_wait();
            // 4. P and dlogit = P (dP - row_dot); the column part of dS
            take_gradient<Edge>(P, dlogit, tile_dS, queries, place, m, c0);
            // 5. dV += P dout, dK += dlogit Q: the rows of P and dlogit are keys
            const FlashLeft<STRIP> left_P(P), left_dlogit(dlogit);
            wgmma_fence();
            sums.dV.add_product(left_P, dO_tile, c0);
            sums.dK.add_product(left_dlogit, Q_tile, c0);
            wgmma_wait();
        }
        UNROLL
        for (int r = 0; r < OWN && Terms::SUMS_ROWS; r++) { sums.dS[r] += tile_dS[r]; }
    }
    // Distance: the sign is -1 up to the keys' own tile, which is never left out
    __device__ void turn_sign(Sums& sums, int m) const {
        UNROLL
        for (int r = 0; r < OWN && Terms::SIGNED && !Causal; r++) {
            if (m == owner.tile()) { sums.dS[r] = -sums.dS[r]; }
        }
    }
    // q was read without its scale (docs/attention.md, "dK carries no scale"). The dq kernel subtracts the
    // row part from dS
    __device__ void store(Sums& sums) const {
        const FlashBlock& block = owner.block;
        bf16* dk = args.dqkv + (size_t)(block.b * args.stride + owner.first()) * args.OC +
                   (args.NH + block.h) * block.columns;
        float scale[OWN], one[OWN];
        UNROLL
        for (int r = 0; r < OWN; r++) {
            scale[r] = args.scale;
            one[r] = 1.0f;
        }
        const int rows = args.T - owner.first();
        // both by way of V's tile: other warps may still read values in K's
        sums.dK.store(dk, args.OC, rows, block.columns, owner.own_tile(1), scale);
        sums.dV.store(dk + args.NH * block.columns, args.OC, rows, block.columns, owner.own_tile(1), one);
        UNROLL
        for (int r = 0; r < OWN && Terms::SUMS_ROWS; r++) {
            const int j = owner.first() + owner.row(r);
            const float sum = quad_sum(sums.dS[r]);
            const float unit = Terms::SIGNED ? args.scale : 2.0f;     // g was over scale
            const size_t to = (size_t)block.bh * args.stride + j;
            if (threadIdx.x % 4 == 0 && j < args.T) { args.dS[to] = unit * sum; }
        }
    }
};

// on one SM: on Hopper, where the owned rows are in no registers, most have room for one more
constexpr int flash_dkdv_blocks(FlashBias Kind, int HS) {
    const bool line = Kind == FlashBias::Linear || Kind == FlashBias::Distance;
    return HS == 64 && flash_wgmma(flash_strip(Kind)) && !line ? 4 : flash_backward_blocks(HS);
}
template <bool Causal, FlashBias Kind, int HS, bool Masked>
__global__ void __launch_bounds__(FLASH_THREADS, flash_dkdv_blocks(Kind, HS))
flash_backward_dkdv_kernel(FlashArgs args, const FlashQueries* queries) {
    using Dkdv = FlashDkdv<Causal, Kind, HS, Masked>;
    Dkdv dkdv(args, queries);
    typename Dkdv::Owned own;
    typename Dkdv::Sums sums;
    const FlashBlock& block = dkdv.owner.block;
    // 1. the owned keys and values, and the first tile of queries
    int m = dkdv.load_owned(own);
    for (int stage = 0; m < dkdv.end(); stage ^= 1) {
        // 2. this tile of queries has arrived, the next one may start
        const int next = dkdv.visited(m + 1);
        flash_wait_copies();
        __syncthreads();                                    // this stage has arrived, and the other is read no more
        if (next < dkdv.end()) { dkdv.fetch(next, stage ^ 1); }
        const bf16* Q_tile = dkdv.owner.streamed_tile(stage);
        dkdv.turn_sign(sums, m);
        // 3. to 5., with masks where the tile is on the diagonal or has hidden pairs
        const int n = block.tile;                           // FlashMask::edge; ptxas spills if it is called
        if (m == n || (n + 1) * FLASH_TILE > block.keys || (Masked && dkdv.mask().cuts(m, n))) {
            dkdv.template meet<true>(sums, own, Q_tile, m, stage);
        } else { dkdv.template meet<false>(sums, own, Q_tile, m, stage); }
        m = next;
    }
    // 6. store
    dkdv.store(sums);
}
