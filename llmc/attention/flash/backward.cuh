// attention/flash/backward.cuh -- backward of attention/flash/forward.cuh on the tensor cores: bf16, float32 sums.
//
//   P_ij = e^(logit_ij - lse_i)     row_dot_i = dout_i.out_i     dlogit_ij = P_ij (dout_i.v_j - row_dot_i)
//   dv_j = sum_i P_ij dout_i        dk_j = scale sum_i dlogit_ij q_i        dq_i = scale sum_j dlogit_ij k_j
//   and the bias's gradients are sums of dlogit; with sign_ij = 1 where i >= j, else -1:
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
// Every output has one writer and one order of summation, so equal inputs give equal bits. The price: seven products
// instead of five. Both parts of dS sum the same float32 dlogit.
// docs/attention.md: "Two kernels for the backward", "CABLE: the gradients of S and g", "The row part of dS must stay".
#pragma once

#include "bias.cuh"

// ----------------------------------------------------------------------------------------------------------
// prepare: FlashQueries with row_dot, for the two kernels: (B*NH,tiles,flash_variants), padded after T. One block per
// tile; the heads of a tile are neighbours, as their rows of out and dout are

template <FlashBias Kind, int HS>
__global__ void flash_backward_prepare_kernel(FlashQueries* queries, FlashArgs args) {
    constexpr int ROW_THREADS = HS / 8;                     // of a row, a piece of 16 bytes each; args.HS / 8 have data
    constexpr int STEP = FLASH_THREADS / ROW_THREADS;       // rows at a time
    __shared__ float row_dots[FLASH_TILE];
    const int tiles = ceil_div(args.T, FLASH_TILE);
    const int h = (int)blockIdx.x % args.NH;
    const int first = (int)blockIdx.x / args.NH % tiles * FLASH_TILE;
    const int b = (int)blockIdx.x / args.NH / tiles;
    const int bh = b * args.NH + h;
    // 1. row_dot = out.dout: of each piece, then summed over the row's threads
    const int piece = threadIdx.x % ROW_THREADS;
    const int row0 = threadIdx.x / ROW_THREADS;
    size_t at = ((size_t)(b * args.T + first + row0) * args.NH + h) * args.HS + piece * 8;
    for (int r = row0; r < row0 + FLASH_TILE; r += STEP, at += STEP * args.NH * args.HS) {
        float row_dot = 0.0f;
        if (first + r < args.T && piece * 8 < args.HS) {
            const FlashPiece out = *(const FlashPiece*)(args.out + at);
            const FlashPiece dout = *(const FlashPiece*)(args.dout + at);
            UNROLL
            for (int k = 0; k < 4; k++) {
                row_dot += unpack_lo(out.x[k]) * unpack_lo(dout.x[k]) + unpack_hi(out.x[k]) * unpack_hi(dout.x[k]);
            }
        }
        UNROLL
        for (int o = ROW_THREADS / 2; o > 0; o /= 2) { row_dot += shuffle_xor(row_dot, o); }
        if (piece == 0) { row_dots[r] = row_dot; }
    }
    __syncthreads();
    if (threadIdx.x >= FLASH_TILE) { return; }
    // 2. a thread's query, its S counted from the chunk's origin
    FlashQuery query = {-INFINITY, 0.0f, 0.0f, 0.0f};
    const int r = threadIdx.x;
    const int t = first + r;
    if (t < args.T) {
        const float lse = args.lse[(size_t)bh * args.stride + t];
        if (lse != -INFINITY) {                             // else padding, or a query without keys: P stays 0
            query.start = -lse / args.scale;
            query.minus_dot = -row_dots[r];
        }
        FlashTerms<Kind>::fill(query, args, bh, h, t);
    }
    FlashQueries* tile = queries + ((size_t)bh * tiles + first / FLASH_TILE) * flash_variants(Kind);
    tile[FROM_CHUNK].row[r] = query;
    if (flash_variants(Kind) == 1) { return; }
    // 3. the same, counted from the tile's first row and from its last
    const float* S = args.S_offset + (size_t)bh * args.stride;
    const float raw = query.place;
    const int last = imin(first + FLASH_TILE, args.T) - 1;
    const float start = query.start;
    const float weight = FlashTerms<Kind>::SIGNED ? query.weight : 0.0f;
    query.place = raw - S[first];                           // for keys on the left
    query.start = start - weight * query.place;
    tile[FROM_FIRST].row[r] = query;
    query.place = raw - S[last];                            // for keys on the right
    query.start = start + weight * query.place;
    tile[FROM_LAST].row[r] = query;
    if (r == 0) {                                           // one thread stores these origins
        const double origin = args.S_origin[(size_t)bh * ceil_div(args.stride, CABLE_CHUNK) + first / CABLE_CHUNK];
        tile[FROM_CHUNK].from = FlashS::of(origin);
        tile[FROM_FIRST].from = FlashS::of(origin + (double)S[first]);
        tile[FROM_LAST].from = FlashS::of(origin + (double)S[last]);
    }
}

// ----------------------------------------------------------------------------------------------------------
// two logits of one owned row

template <FlashBias Kind> struct FlashPair : FlashTerms<Kind> {
    float P[2];
    float dlogit[2];

    // Sets the values from which the products start. Fire: scores hold B
    __device__ static void start(float* scores, float* dP, const FlashQuery (&query)[2], const float (&key)[2],
                                 float side, float unit) {
        UNROLL
        for (int k = 0; k < 2; k++) {
            dP[k] = query[k].minus_dot;
            scores[k] = FlashTerms<Kind>::start(scores[k], query[k], key[k], side, unit);
        }
    }
    // from the products, scores and dP
    __device__ FlashPair(const float* scores, const float* dP, const FlashQuery (&query)[2], const float (&key)[2],
                         float scale2, const bool (&hidden)[2], bool inside) {
        float x[2];                                         // log2 P
        UNROLL
        for (int k = 0; k < 2; k++) {
            x[k] = scale2 * scores[k];
            if (this->SUMS_ROWS) { this->distance[k] = query[k].place - key[k]; }
        }
        this->gradient(x, query, inside);
        UNROLL
        for (int k = 0; k < 2; k++) { P[k] = hidden[k] ? 0.0f : ex2(x[k]); }
        UNROLL
        for (int k = 0; k < 2; k++) { dlogit[k] = P[k] * dP[k]; }
    }
};

// ----------------------------------------------------------------------------------------------------------
// the two kernels' shared memory and registers
//
// A block owns a tile of keys, or of queries, and streams the tiles that meet it. In shared memory are two owned tiles,
// two stages of two streamed tiles, and the values: two stages of FlashQueries, then S of the owned rows or Fire's
// pieces. That is 51 KB (HS 64), or 99 KB (HS 128), all that sm_86 has. Without wgmma the owned rows are in registers,
// so the values take the place of an owned tile, and only FlashDiagonals::carry follows the tiles: 48 KB (HS 64), and
// sm_86 has room for two blocks.

constexpr size_t FLASH_OWN_BYTES = std::max(sizeof(FlashS) * FLASH_TILE, sizeof(FirePiece) * FIRE_PIECES);
constexpr size_t FLASH_VALUES = sizeof(FlashQueries) * 2 + FLASH_OWN_BYTES;
static_assert(FLASH_VALUES <= sizeof(bf16) * FLASH_TILE * 64, "an owned tile has room for the values");
constexpr size_t flash_backward_shared(int HS, bool free) {
    return sizeof(bf16) * 6 * FLASH_TILE * HS + (free ? sizeof(float) * FLASH_TILE : FLASH_VALUES);
}
// How many streamed rows have their logits in registers at a time: beside all 64 the sums of HS columns would not fit.
// On Hopper 32 fit, because the owned rows take no registers; but not with Fire's y
__host__ __device__ constexpr int flash_strip(FlashBias Kind) {
    return Kind != FlashBias::Fire && flash_wgmma(32) ? 32 : 16;
}
// blocks on one SM: 3 or 2 leave 168 or 255 registers per thread
constexpr int flash_backward_blocks(int HS) { return HS == 64 ? 3 : 2; }

// How many fragments of K and V fit into the dkdv kernel's registers beside dK and dV
__host__ __device__ constexpr int flash_keys_kept(FlashBias Kind, int HS) {
    return HS == 64 && !flash_wgmma(flash_strip(Kind)) ? 4 : 0;
}
__host__ __device__ constexpr int flash_values_kept(FlashBias Kind, int HS) {
    return flash_is_cable(Kind) ? 0 : flash_keys_kept(Kind, HS);
}

// ----------------------------------------------------------------------------------------------------------
// what both kernels share: where a block's rows are, and how they are loaded

struct FlashBlock : FlashPlace {
    int b, h;
    int keys;                       // this sequence's tokens, kv_len applied
    int tiles;                      // of 64 rows in T
    int tile;                       // that it owns
    int columns;                    // of a head

    // one of `turns` blocks of a head, which own the tiles from `from` on
    __device__ FlashBlock(const FlashArgs& args, int turns, bool last_first = false, int from = 0)
        : FlashPlace(args, turns) {
        tile = from + (last_first ? turns - 1 - turn : turn);
        b = bh / args.NH;
        h = bh % args.NH;
        keys = flash_tokens(args, b);
        tiles = ceil_div(args.T, FLASH_TILE);
        columns = args.HS;
    }
    // row t of q (0), k (1) or v (2); row t of dout; a tile of flash_backward_prepare_kernel's
    __device__ const bf16* qkv(const FlashArgs& args, int t, int which) const {
        return args.qkv + (size_t)(b * args.stride + t) * args.OC + (which * args.NH + h) * columns;
    }
    __device__ const bf16* dout(const FlashArgs& args, int t) const {
        return args.dout + ((size_t)(b * args.T + t) * args.NH + h) * columns;
    }
    template <FlashBias Kind>
    __device__ const FlashQueries* queries(const FlashQueries* all, int tile, FlashFrom from) const {
        return all + (size_t)(bh * tiles + tile) * flash_variants(Kind) + from;
    }
    __device__ int live_tiles() const { return ceil_div(keys, FLASH_TILE); }
};

// A block's rows, its shared memory, and the copies into it. Free: which owned tile the values overwrite, or -1
enum FlashInput { FLASH_Q, FLASH_K, FLASH_V, FLASH_DOUT };
template <FlashBias Kind, int HS, int Free> struct FlashOwner {
    static constexpr int TILE_SIZE = FLASH_TILE * HS;
    const int lane = threadIdx.x % 32;
    const int row0 = threadIdx.x / 32 * FLASH_ROWS;         // the warp's first row in the block
    const FlashArgs& args;
    const FlashQueries* queries;
    const FlashBlock block;
    bf16* own;                                              // two tiles
    bf16* streamed;                                         // two stages of two tiles
    FlashQueries* values;                                   // of the streamed rows: two stages
    FlashS* own_S;                                          // (FLASH_TILE)

    // one of `turns` blocks of a head
    __device__ FlashOwner(const FlashArgs& args, const FlashQueries* queries, int turns, bool last_first, int from)
        : args(args), queries(queries), block(args, turns, last_first, from) {
        own = (bf16*)dynamic_shared();
        streamed = own + 2 * TILE_SIZE;
        values = (FlashQueries*)(Free >= 0 ? own_tile(Free) : streamed_tile(2));
        own_S = (FlashS*)(values + 2);
    }
    __device__ bf16* own_tile(int which) const { return own + which * TILE_SIZE; }
    __device__ bf16* streamed_tile(int stage) const { return streamed + stage * 2 * TILE_SIZE; }
    __device__ int tile() const { return block.tile; }
    __device__ int first() const { return block.tile * FLASH_TILE; }                // of the block's rows
    __device__ int row(int own) const { return row0 + lane / 4 + 8 * own; }         // the lane's
    // the values of a streamed tile, and S of an owned row, counted from the same token
    __device__ const FlashQuery* met_values(int stage) const { return values[stage].row; }
    __device__ float place(int row, int stage) const { return own_S[row].minus(values[stage].from); }

    // Starts the copy of a tile
    template <FlashInput Input> __device__ void load(bf16* to, int tile) const {
        const int t = tile * FLASH_TILE;
        const bf16* from = Input == FLASH_DOUT ? block.dout(args, t) : block.qkv(args, t, Input);
        const int stride = Input == FLASH_DOUT ? args.NH * block.columns : args.OC;
        flash_load_tile<HS>(to, from, stride, block.columns, args.T - t);
    }
    template <FlashInput First, FlashInput Second> __device__ void load_owned() const {
        load<First>(own_tile(0), tile());
        load<Second>(own_tile(1), tile());
    }
    // The whole block calls it when own_S is free: with Free >= 0 after the owned tile was read
    __device__ void put_own_S() const {
        if (FlashTerms<Kind>::SUMS_ROWS && threadIdx.x < FLASH_TILE) {
            const FlashQueries* own = block.template queries<Kind>(queries, tile(), FROM_CHUNK);
            const double from = (double)own->from.high + (double)own->from.low;
            own_S[threadIdx.x] = FlashS::of(from + (double)own->row[threadIdx.x].place);
        }
    }
    // Starts the copies of a streamed tile and its values
    template <FlashInput First, FlashInput Second> __device__ void fetch(int streamed, int stage) const {
        using Terms = FlashTerms<Kind>;
        constexpr bool has_values = First == FLASH_Q || Terms::PLACES || Terms::PIECES;
        load<First>(streamed_tile(stage), streamed);
        load<Second>(streamed_tile(stage) + TILE_SIZE, streamed);
        const FlashFrom side = flash_from<Kind>(streamed, tile());
        const FlashQueries* from = block.template queries<Kind>(queries, streamed, side);
        const int row = threadIdx.x;
        if (has_values && row < FLASH_TILE) {
            cp_async_16(values[stage].row + row, from->row + row, true);
            if (Terms::SUMS_ROWS && row == 0) { cp_async_16(&values[stage].from, &from->from, true); }
        }
        cp_async_commit();
    }
};

// ----------------------------------------------------------------------------------------------------------
// dkdv: blocks own keys; dk, dv, and dS = the column part of its sum
//
//   1. load the owned keys and values, and fetch the first tile of queries; for each tile of queries
//   2.    wait for it, and fetch the next one
//   3.    scores = K Q^T, dP = V dout^T; 16 queries at a time, as are the next two
//   4.    P and dlogit = P (dP - row_dot); the column part of dS
//   5.    dV += P dout, dK += dlogit Q
//   6. store

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
    // Arrays are apart, as in FlashDq
    struct Owned {                                          // of the owned keys: as many as fit beside dK and dV
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
    // Whether the queries of tile m meet the owned keys, which may be outside the queries' span
    __device__ bool meets(int m) const {
        const FlashBlock& block = owner.block;
        const int n = owner.tile();
        // Skips = true for every bias, though only two have spans: else ptxas spills for sm_80
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
        const auto start = [&] {                            // what goes where the values are
            owner.put_own_S();
            if (Terms::PIECES) { fire.stage((FirePiece*)owner.own_S, args, owner.block.h); }
            if (m < end()) { fetch(m, 0); }
        };
        if (FREE < 0) { start(); }
        UNROLL
        for (int r = 0; r < OWN && Terms::PIECES; r++) {
            own.inv[r] = args.inv[owner.first() + owner.row(r)];
        }
        cp_async_commit();                                  // if no tile of queries was fetched
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
    // The lane's e-th pair in the strip from query c0 on: two queries of a key. Its row and column in a fragment, its
    // first query in the tile
    __device__ static int pair_row(int e) { return e % OWN; }
    __device__ static int pair_column(int e) { return e / OWN; }
    __device__ int pair_query(int e, int c0) const { return c0 + pair_column(e) * 8 + owner.lane % 4 * 2; }

    // Sets the starts of the products with a strip of tile m's queries, from c0 on. Fire: P holds B
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
    // P holds scores and becomes probabilities, dlogit holds dP - row_dot and becomes P (dP - row_dot), for a strip of
    // tile m's queries, from c0 on. Adds to tile_dS, the column part of dS
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
    // dK lacks q's scale (docs/attention.md, "dK carries no scale"). The dq kernel subtracts the row part from dS
    __device__ void store(Sums& sums) const {
        const FlashBlock& block = owner.block;
        bf16* dk = args.dqkv + (size_t)(block.b * args.stride + owner.first()) * args.OC +
                   (args.NH + block.h) * block.columns;
        const float scale[OWN] = {args.scale, args.scale}, one[OWN] = {1.0f, 1.0f};
        const int rows = args.T - owner.first();
        // both by way of V's tile: other warps may still read values in K's tile
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

// blocks on one SM: most have room for one more on Hopper, where the owned rows take no registers
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
        const int n = block.tile;                           // FlashMask::edge inlined: a call makes ptxas spill
        if (m == n || (n + 1) * FLASH_TILE > block.keys || (Masked && dkdv.mask().cuts(m, n))) {
            dkdv.template meet<true>(sums, own, Q_tile, m, stage);
        } else { dkdv.template meet<false>(sums, own, Q_tile, m, stage); }
        m = next;
    }
    // 6. store
    dkdv.store(sums);
}

// ----------------------------------------------------------------------------------------------------------
// the gradient of a Toeplitz table: the dq kernel sums along the diagonals of a tile of queries, a kernel adds the sums

// The diagonals of a 64 x 64 tile of dlogit, k and k + 64 for each of 64 threads. Diagonal k + 64 continues as k in the
// next tile to the right. docs/attention.md, "The gradient of a Toeplitz table".
struct FlashDiagonals {
    float* dlogit;                  // (64,64), in the order of at(), which keeps the banks apart
    float* carry;                   // (64): diagonals 64 .. of the last tile; 127 is none: 0
    float* slab;                    // ((tiles+1)*64): diagonal k of tile n, j - i = 64 (n - m) + k - 63, at 64 n + k

    // eight rows at the columns 0, 2, 4, 6 have 32 banks, and so have 32 neighbouring columns of a row
    __device__ static int at(int r, int c) { return r * FLASH_TILE + (c ^ ((r & 7) * 8 | (r >> 2 & 1))); }
    __device__ void put(int r, int c, float x0, float x1) const {
        dlogit[at(r, c)] = x0;
        dlogit[at(r, c + 1)] = x1;
    }
    // the sums of tile n; first: no tile to its left has diagonals that continue here
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
    // the diagonals 64 .. 126 of tile n, which has no right neighbour to finish them
    __device__ void end_after(int n) const { slab[(n + 1) * 64 + threadIdx.x % 64] = carry[threadIdx.x % 64]; }
};

// The slabs (B*NH,count,(tiles+1)*64) of one launch, for `count` tiles of queries from `first` on: slabs for all tiles
// would grow with T * T.
struct FlashSlabs {
    float* data;
    int first, count;

    __device__ float* of(int bh, int m, int tiles) const {
        return data + ((size_t)bh * count + m - first) * (tiles + 1) * FLASH_TILE;
    }
};

// dtable[b,h] is the sum of the query tiles' slabs, in order; columns that no distance reaches become 0. Launched after
// each launch of the dq kernel: the first overwrites, later launches continue the sum.
template <bool Causal, bool Masked> __global__ void flash_backward_table_kernel(FlashArgs args, FlashSlabs slabs) {
    const FlashBlock block(args, (int)gridDim.x / (args.B * args.NH));
    const int column = block.turn * blockDim.x + threadIdx.x;
    if (column >= args.table_entries) { return; }
    float* total = args.dtable + (size_t)block.bh * args.table_entries + column;
    float sum = slabs.first == 0 ? 0.0f : *total;
    for (int m = slabs.first; m < slabs.first + slabs.count; m++) {
        const int at = column - args.table_zero + m * FLASH_TILE + 63;      // the column's place in the slab of tile m
        const FlashReach reach = FlashReach::of<Causal, false, Masked>(args, block.bh, m, block.live_tiles());
        const bool sinks = reach.has_sinks() && at >= reach.sinks_begin * FLASH_TILE;
        const bool window = reach.end > 0 && at >= reach.first * FLASH_TILE;
        if ((sinks && at < reach.sinks_end * FLASH_TILE + 63) || (window && at < reach.end * FLASH_TILE + 63)) {
            sum += slabs.of(block.bh, m, block.tiles)[at];
        }
    }
    *total = sum;
}

// ----------------------------------------------------------------------------------------------------------
// dq: blocks own queries; dq, dg, the row part of dS (subtracted from the column part), the sums of Toeplitz's table
//
//   1. load the owned queries with their dout, and fetch the first tile of keys; for each tile of keys
//   2.    wait for it, and fetch the next one
//   3.    scores = Q K^T, dP = dout V^T; 16 keys at a time, as are the next two
//   4.    dlogit = P (dP - row_dot), and what the bias sums of it
//   5.    dQ += dlogit K
//   6. store

// A block and its steps. Rows of the scores are queries, columns are keys. Masked: args.mask is obeyed.
template <bool Causal, FlashBias Kind, int HS, bool Masked> struct FlashDq {
    static constexpr int FREE = HAS_WGMMA ? -1 : 1;         // not 0: Fire's sums take the place of q
    using Owner = FlashOwner<Kind, HS, FREE>;
    using Terms = FlashTerms<Kind>;
    static constexpr int STRIP = flash_strip(Kind);
    using Scores = FlashFragment<STRIP>;
    static constexpr int OWN = FLASH_OWN;                   // the lane's rows
    // whether the products read q and dout in shared memory, where Toeplitz has its diagonals
    static constexpr bool IN_PLACE = flash_wgmma(STRIP) && !Terms::DIAGONALS;
    const FlashArgs& args;
    const Owner owner;
    const FlashDiagonals diagonals;                         // Toeplitz
    FlashFire fire;
    FlashFireSums fire_sums;
    const FlashReach reach;                                 // the tiles of keys that the block meets
    // Arrays are apart: the compiler promotes the members above to registers only if no array is beside them.
    struct Owned {                                          // of the owned queries
        FlashOwned<HS, IN_PLACE ? 0 : HS / 16> q, dout;     // both fit: dkdv has one sum more
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
    static constexpr bool PART = Terms::DIAGONALS;       // a launch computes slabs.count tiles of queries, not all
    // dlogit overwrites q and dout, which are in registers; carry follows the tiles, where Toeplitz has no values
    __device__ FlashDiagonals find_diagonals(const FlashSlabs& slabs) const {
        const FlashBlock& block = owner.block;
        return {(float*)owner.own_tile(0), (float*)owner.streamed_tile(2), slabs.of(block.bh, block.tile, block.tiles)};
    }
    __device__ FlashMask<Causal, Masked> mask() const { return {args, owner.block.b, owner.block.keys}; }
    __device__ int after(int n) const { return Masked ? reach.after(n) : n + 1; }
    __device__ void fetch(int n, int stage) const { owner.template fetch<FLASH_K, FLASH_V>(n, stage); }
    __device__ void load_owned(Owned& own) {
        const auto start = [&] {                            // what goes where the values are
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
        // overwrites q, as diagonals do
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
    // The lane's e-th pair in the strip from key c0 on: two keys of a query. Its row and column in a fragment, its
    // first key in the tile
    __device__ static int pair_row(int e) { return e / (STRIP / 8); }
    __device__ static int pair_column(int e) { return e % (STRIP / 8); }
    __device__ int pair_key(int e, int c0) const { return c0 + pair_column(e) * 8 + owner.lane % 4 * 2; }
    // Sets the starts of the products with a strip of tile n's keys, from c0 on. Fire: P holds B
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
    // P holds scores, dlogit holds dP - row_dot and becomes P (dP - row_dot), for a strip of tile n's keys, from c0 on.
    // Adds to tile_sum and tile_dg; Toeplitz: stores the tile of dlogit
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
    // the last tile has no right neighbour to finish its upper diagonals: store them here
    __device__ void store_diagonals() const {
        __syncthreads();
        if (reach.end > 0 && threadIdx.x < 63) { diagonals.end_after(reach.end - 1); }
    }
    // Fire: the sum over the warps
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
        const float scale[OWN] = {args.scale, args.scale};
        sums.dQ.store(dq, args.OC, args.T - owner.first(), block.columns, owner.own_tile(0), scale);
    }
    __device__ void store_row_sums(const Sums& sums, const Owned& own) const {
        UNROLL
        for (int r = 0; r < OWN && Terms::SUMS_ROWS; r++) {
            const int i = owner.first() + owner.row(r);
            const float g = own.query[r].weight;
            const float sum = quad_sum(sums.row[r]);
            const float moment = quad_sum(sums.dg[r]);
            const bool left = Causal || reach.end <= owner.tile() + 1;
            const float sign = left ? 1.0f : -1.0f;         // the last tile's: see turn_sign
            const size_t to = (size_t)owner.block.bh * args.stride + i;
            if (owner.lane % 4 != 0 || i >= args.T) { continue; }
            // Distance: g is over scale
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

// ----------------------------------------------------------------------------------------------------------
// launchers

// Toeplitz: how many tiles of queries of each head, with a slab each, a launch of the dq kernel has: enough to fill the
// machine, but at least 32 (2,048 tokens).
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
    constexpr int FREE_DKDV = FlashDkdv<Causal, Kind, HS, Masked>::FREE;    // nvcc: of the form without wgmma
    constexpr int FREE_DQ = FlashDq<Causal, Kind, HS, Masked>::FREE;
    const auto grid = [&](int tiles, int free) {
        return Grid(BNH * tiles, FLASH_THREADS, flash_backward_shared(HS, free >= 0 && !runs_wgmma()), stream);
    };
    launch(flash_backward_prepare_kernel<Kind, HS>, Grid(BNH * tiles, FLASH_THREADS, 0, stream), queries, args);
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

// Overwrites the q, k and v columns of dqkv, and the sums of the functors' backward(): dS and dg (B*NH,stride) at 0 ..
// T-1, before the suffix sum; dtable (B*NH,table_entries); the first slots of Fire's sums, whose other slots stay as
// they are. false: these kernels do not have this head size, and nothing was done.
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
