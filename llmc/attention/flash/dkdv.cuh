// attention/flash/dkdv.cuh -- the kernel of attention/flash/backward.cuh whose blocks own keys: dk, dv, and dS = the
// column part of its sum.
//
//   1. load the owned keys and values, and fetch the first tile of queries; for each tile of queries
//   2.    wait for it, and fetch the next one
//   3.    scores = K Q^T, dP = V dout^T; 16 queries at a time, as are the next two
//   4.    P and dlogit = P (dP - row_dot); the column part of dS
//   5.    dV += P dout, dK += dlogit Q
//   6. store
#ifndef LLMC_ATTENTION_FLASH_DKDV_CUH
#define LLMC_ATTENTION_FLASH_DKDV_CUH

#include "pairs.cuh"

// A block and its steps. Rows of the scores are keys, columns are queries. Masked: args.mask is obeyed.
template <bool Causal, FlashBias Kind, int HS, int Rows, bool Masked> struct FlashDkdv {
    using Owner = FlashOwner<Kind, HS, Rows>;
    using Scores = FlashFragment<Rows, FLASH_STRIP>;
    static constexpr int OWN = Rows / 8;                    // the lane's rows
    static constexpr bool cable = flash_is_cable(Kind);
    const FlashArgs& args;
    const Owner owner;
    FlashFire fire;
    // Arrays are apart, as in dq.cuh
    struct Owned {                                          // of the owned keys; dK and dV leave no room for all of it
        FlashOwned<HS, Rows, flash_keys_kept(Kind, HS, Rows)> k;
        FlashOwned<HS, Rows, flash_values_kept(Kind, HS, Rows)> v;
        float inv[OWN];                                     // Fire
    };
    struct Sums {
        FlashFragment<Rows, HS> dK = {};
        FlashFragment<Rows, HS> dV = {};
        float lane_dS[OWN];
    };

    __device__ FlashDkdv(const FlashArgs& args, const FlashQueries* queries)
        : args(args), owner(args, queries, ceil_div(args.T, Owner::OWNED), false, 0) {}

    // of the lane's keys; with 32 rows in shared memory, because registers are scarce
    __device__ float& dS(Sums& sums, int r) const {
        return Rows == 32 ? ((float*)owner.shared_rest + threadIdx.x)[r * FLASH_THREADS] : sums.lane_dS[r];
    }
    __device__ int end() const { return owner.block().live_tiles(); }       // of the tiles of queries
    // Whether the queries of tile m meet one of the tiles of keys from `low` to `high`: not if their span ends before
    // them, or begins after them
    __device__ bool meets(int m, int low, int high) const {
        const FlashBlock& block = owner.block();
        if (Masked) { return FlashReach::of<Causal>(args, block.bh, m, block.live_tiles()).contains(low); }
        if (Causal && m < low) { return false; }
        if (!Causal && flash_skips(Kind) && block.template end_key_tile<Causal, Kind>(args, m) <= low) { return false; }
        return !flash_skips(Kind) || block.first_key_tile(args, m) <= high;
    }
    // the first tile of queries from m on that the block meets
    __device__ int visited(int m) const {
        const int n = owner.first_tile();
        while (m < end() && !meets(m, n, n + flash_block_tiles(Rows) - 1)) { m++; }
        return m;
    }
    __device__ void fetch(int m, int stage) const { owner.template fetch<FLASH_Q, FLASH_DOUT>(m, stage); }

    // Returns the first tile of queries
    __device__ int load_owned(Owned& own, Sums& sums) {
        owner.template load_owned<FLASH_K, FLASH_V>();
        if (Kind == FlashBias::Fire) { fire.stage((FirePiece*)owner.own_S, args, owner.block().h); }
        UNROLL
        for (int r = 0; r < OWN && Kind == FlashBias::Fire; r++) {
            own.inv[r] = args.inv[owner.first() + owner.row(r)];
        }
        const int first = Causal ? owner.first_tile() : 0;
        const int m = owner.first() < owner.block().keys ? visited(first) : end();    // all padding: meets no query
        if (m < end()) { fetch(m, 0); }
        UNROLL
        for (int r = 0; r < OWN; r++) { dS(sums, r) = 0.0f; }
        cp_async_commit();                                  // where no tile of queries was fetched
        cp_async_wait<0>();
        __syncthreads();
        own.k.load(owner.own_tile(0), owner.row0);
        own.v.load(owner.own_tile(1), owner.row0);
        return m;
    }
    // P holds scores and becomes probabilities, dlogit holds dP and becomes P (dP - row_dot): of the queries of tile m
    // from c0 on, two queries of a key at a time. Their part of the column part of dS
    template <bool Edge>
    __device__ void take_gradient(Scores& P, Scores& dlogit, float (&tile_dS)[OWN], const FlashQuery* queries,
                                  int m, int c0, int stage) const {
        const int lane = threadIdx.x % 32;
        float place[OWN];                                   // of the keys
        UNROLL
        for (int r = 0; r < OWN; r++) {                     // S is read again: registers are scarce
            place[r] = cable ? owner.place(owner.row(r), stage) : (float)(owner.first() + owner.row(r));
        }
        UNROLL
        for (int e = 0; e < FLASH_STRIP / 8 * OWN; e++) {
            const int r = e % OWN;
            const int c = c0 + e / OWN * 8 + lane % 4 * 2;      // the first query of the two, in its tile
            const int i = m * FLASH_TILE + c;
            const int j = owner.first() + owner.row(r);
            const FlashQuery query[2] = {queries[c], queries[c + 1]};
            float key[2];
            bool hidden[2];
            UNROLL
            for (int k = 0; k < 2; k++) {
                key[k] = Kind == FlashBias::Toeplitz ? flash_table(args, owner.block().h, i + k, j) : place[r];
                const int begins = Edge && Masked ? flash_begin(args, owner.block().b, i + k) : 0;
                hidden[k] = Edge && owner.template hides<Causal, Masked>(i + k, j, begins);
            }
            float* P_pair = P.pair(r, e / OWN);
            float* dlogit_pair = dlogit.pair(r, e / OWN);
            const FlashPair<Kind> pair(P_pair, dlogit_pair, query, key, LOG2E * args.scale, hidden, args.inside);
            UNROLL
            for (int k = 0; k < 2; k++) {
                if (Kind == FlashBias::Distance) {          // on a bidirectional diagonal each pair has its own sign
                    const bool negative = Edge && !Causal && m == owner.tile() && j > i + k;
                    tile_dS[r] += query[k].weight * (negative ? -pair.dlogit[k] : pair.dlogit[k]);
                }
                if (Kind == FlashBias::LogDistance) { tile_dS[r] += query[k].weight * (pair.dlogit[k] * pair.bend[k]); }
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
        float tile_dS[OWN] = {};                            // summed first: docs/attention.md, "Sums of many keys"
        for (int c0 = 0; c0 < FLASH_TILE; c0 += FLASH_STRIP) {
            // 3. scores = K Q^T and dP = V dout^T
            Scores P;
            Scores dlogit;
            syncwarp();                                     // without it ptxas unrolls for sm_80 all the same
            P.multiply_transposed(own.k, owner.own_tile(0), owner.row0, Q_tile, c0);
            dlogit.multiply_transposed(own.v, owner.own_tile(1), owner.row0, dO_tile, c0);
            if (Kind == FlashBias::Fire) {
                Scores y;
                fire.meet(args, row, Rows, m * FLASH_TILE + c0, FLASH_STRIP);
                flash_fire_y(y, args, own.inv, owner.met_values(stage) + c0, row, m * FLASH_TILE + c0);
                flash_fire_add(P, y, fire);
            }
            // 4. P and dlogit = P (dP - row_dot); the column part of dS
            take_gradient<Edge>(P, dlogit, tile_dS, queries, m, c0, stage);
            // 5. dV += P dout, dK += dlogit Q: the rows of P and dlogit are keys
            UNROLL
            for (int k = 0; k < FLASH_STRIP / 8; k += 2) {
                sums.dV.add_product(P, k, dO_tile, c0 + k * 8);
                sums.dK.add_product(dlogit, k, Q_tile, c0 + k * 8);
            }
        }
        UNROLL
        for (int r = 0; r < OWN && cable; r++) { dS(sums, r) += tile_dS[r]; }
    }
    // Distance: the sign is -1 up to the keys' own tile, which is never left out
    __device__ void turn_sign(Sums& sums, int m) const {
        UNROLL
        for (int r = 0; r < OWN && Kind == FlashBias::Distance && !Causal; r++) {
            if (m == owner.tile()) { dS(sums, r) = -dS(sums, r); }
        }
    }
    // q was read without its scale (docs/attention.md, "dK carries no scale"). The dq kernel subtracts the
    // row part from dS
    __device__ void store(Sums& sums) const {
        const FlashBlock& block = owner.block();
        bf16* dk = args.dqkv + (size_t)(block.b * args.stride + owner.first()) * args.OC +
                   (args.NH + block.h) * block.columns;
        float scale[OWN], one[OWN];
        UNROLL
        for (int r = 0; r < OWN; r++) {
            scale[r] = args.scale;
            one[r] = 1.0f;
        }
        const int rows = args.T - owner.first();
        sums.dK.store(dk, args.OC, rows, block.columns, owner.own_tile(0), scale);
        sums.dV.store(dk + args.NH * block.columns, args.OC, rows, block.columns, owner.own_tile(1), one);
        UNROLL
        for (int r = 0; r < OWN && cable; r++) {
            const int j = owner.first() + owner.row(r);
            const float sum = quad_sum(dS(sums, r));
            const float unit = Kind == FlashBias::Distance ? LN2 : 2.0f;    // LN2: g was in units of log2
            const size_t to = (size_t)block.bh * args.stride + j;
            if (threadIdx.x % 4 == 0 && j < args.T) { args.dS[to] = unit * sum; }
        }
    }
};

template <bool Causal, FlashBias Kind, int HS, int Rows, bool Masked>
__device__ __forceinline__ void flash_dkdv_block(const FlashArgs& args, const FlashQueries* queries) {
    using Dkdv = FlashDkdv<Causal, Kind, HS, Rows, Masked>;
    Dkdv dkdv(args, queries);
    typename Dkdv::Owned own;
    typename Dkdv::Sums sums;
    // 1. the owned keys and values, and the first tile of queries
    int m = dkdv.load_owned(own, sums);
    for (int stage = 0; m < dkdv.end(); stage ^= 1) {
        // 2. this tile of queries has arrived, the next one may start
        const int next = dkdv.visited(m + 1);               // found again after the step: registers are scarce
        cp_async_wait<0>();
        __syncthreads();                                    // this stage has arrived, and the other is read no more
        if (next < dkdv.end()) { dkdv.fetch(next, stage ^ 1); }
        const bf16* Q_tile = dkdv.owner.streamed_tile(stage);
        dkdv.turn_sign(sums, m);
        const FlashBlock& block = dkdv.owner.block();
        const int n = dkdv.owner.tile();
        // 3. to 5., with masks where the tile is on the diagonal or has hidden pairs
        if (flash_block_tiles(Rows) == 1 || (n * FLASH_TILE < block.keys && dkdv.meets(m, n, n))) {
            if (m == n || (n + 1) * FLASH_TILE > block.keys || (Masked && flash_cuts(args, block.b, m, n))) {
                dkdv.template meet<true>(sums, own, Q_tile, m, stage);
            } else { dkdv.template meet<false>(sums, own, Q_tile, m, stage); }
        }
        m = dkdv.visited(m + 1);
    }
    // 6. store
    dkdv.store(sums);
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
