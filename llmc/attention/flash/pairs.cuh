// attention/flash/pairs.cuh -- the parts of both kernels of backward.cuh: a query as its logits need it, two logits
// with their gradients, a block's rows and its shared memory.
//
// "Owned" is the tile that a block keeps, "streamed" are the tiles that pass by it. In one kernel the keys are owned
// and the queries streamed, in the other the queries are owned.
#pragma once

#include "fire.cuh"
#include "reach.cuh"

// ----------------------------------------------------------------------------------------------------------
// queries, and where their S is counted from

// A query as its logits need it, logits over scale, like q.k. Padding, and the rows after T, have start = -inf: P = 0.
struct alignas(16) FlashQuery {
    float start;        // -lse / scale. Distance, but for keys of the own tile: and what of B is the same for all keys
    float minus_dot;    // -row_dot
    float weight;       // of its distances. Linear: slope / scale.  Distance: g / scale.  LogDistance: g.  Fire: 1/norm
                        // g is times the query's factor
    float place;        // S, counted from what its FlashQueries say. Linear: the position.  Fire: the norm's derivative
};

// The queries of a tile, and from what their S is counted: the chunk's origin, the tile's first row or its last,
// whichever of these two is nearer to the tile that meets it. Then S_i and S_j differ in sign, or neither has lost a
// bit, and nothing cancels. docs/attention.md, "Where S is counted from".
enum FlashFrom { FROM_CHUNK, FROM_FIRST, FROM_LAST };
struct alignas(8) FlashS {              // S in two parts: a difference has only the rounding of its own size
    float high, low;
    __device__ static FlashS of(double S) { return {(float)S, (float)(S - (double)(float)S)}; }
    __device__ float minus(const FlashS& other) const { return (high - other.high) + (low - other.low); }
};
struct alignas(16) FlashQueries {
    FlashQuery row[FLASH_TILE];
    FlashS from, unused;                                    // S of the token that it is counted from; 16 bytes
};
// On which side of the queries of tile m the keys of tile n are: 1 left, -1 right, 0 both. Edge: m and n may be equal
template <bool Causal, bool Edge> __device__ inline float flash_side(int m, int n) {
    if (Edge && m == n) { return 0.0f; }
    return Causal || n < m ? 1.0f : -1.0f;
}

// ----------------------------------------------------------------------------------------------------------
// logits

// B_ij: columns outside the table read its nearest end, and are masked
__device__ inline float flash_table(const FlashArgs& args, int h, int i, int j) {
    const int entry = clamp(args.table_zero + j - i, 0, args.table_entries - 1);
    return args.table[(size_t)h * args.table_entries + entry];
}

// A bias in two logits of one owned row, neighbours in the streamed direction: two keys of a query, or two queries of a
// key. None has nothing in them.
//   start      what the product of a pair starts from, q.k over scale, so that the tensor cores are busy meanwhile.
//              key: the key's place, counted from what its query's is. side: flash_side. unit: 1 / scale
//   gradient   what start left out of log2 P, and what the sums need of it
//   to_query   adds dlogit to the dq kernel's sums over a tile of keys: `sum`, of the row part of dS, and dg
//   to_key     adds it to the column part of dS, in the dkdv kernel
//   finish     dg of a query from both sums, when the tile is done
//   fill       weight and place of query t, S counted from its chunk
// turned: dlogit, or -dlogit where i < j on a bidirectional diagonal: there each pair has its own sign
template <FlashBias Kind> struct FlashTerms {
    // What the kernels do for it
    static constexpr bool PLACES = false;                   // start needs the place of a key
    static constexpr bool SUMS_ROWS = false;                // dlogit is summed by rows and columns: dS, dg
    static constexpr bool SIGNED = false;                   // and i < j counts with the other sign
    static constexpr bool DIAGONALS = false;                // dlogit is summed along the diagonals of a table
    static constexpr bool PIECES = false;                   // and by the pieces of Fire's f
    float distance[2];                                      // SUMS_ROWS: S_i - S_j

    __device__ static float start(float, const FlashQuery& query, float, float, float) { return query.start; }
    __device__ void gradient(float (&)[2], const FlashQuery (&)[2], bool) {}
    __device__ void to_query(float&, float&, int, float, float, float, float) const {}
    __device__ void to_key(float&, int, float, float, float) const {}
    __device__ static void finish(float&, float, float, float, float) {}
    __device__ static void fill(FlashQuery&, const FlashArgs&, size_t /*bh*/, size_t /*h*/, size_t /*t*/) {}
};
template <> struct FlashTerms<FlashBias::Linear> : FlashTerms<FlashBias::None> {
    static constexpr bool PLACES = true;
    __device__ static void fill(FlashQuery& query, const FlashArgs& args, size_t, size_t h, size_t t) {
        query.weight = args.slopes[h] / args.scale;
        query.place = (float)t;
    }
    __device__ static float start(float, const FlashQuery& query, float key, float, float) {
        return query.start - query.weight * fabsf(query.place - key);
    }
};
template <> struct FlashTerms<FlashBias::Toeplitz> : FlashTerms<FlashBias::None> {
    static constexpr bool DIAGONALS = true;
    __device__ static float start(float, const FlashQuery& query, float entry, float, float unit) {
        return query.start + unit * entry;
    }
};
template <> struct FlashTerms<FlashBias::Fire> : FlashTerms<FlashBias::None> {
    static constexpr bool PIECES = true;
    __device__ static void fill(FlashQuery& query, const FlashArgs& args, size_t, size_t, size_t t) {
        query.weight = args.inv[t];
        query.place = args.dnorm[t];
    }
    __device__ static float start(float B, const FlashQuery& query, float, float, float) { return B + query.start; }
};
template <> struct FlashTerms<FlashBias::Distance> : FlashTerms<FlashBias::None> {
    static constexpr bool PLACES = true, SUMS_ROWS = true;
    static constexpr bool SIGNED = true;
    __device__ static void fill(FlashQuery& query, const FlashArgs& args, size_t bh, size_t, size_t t) {
        query.weight = args.factor_of(bh, (int)t) * args.g[bh * args.stride + t] / args.scale;
        query.place = args.S_offset[bh * args.stride + t];
    }
    __device__ static float start(float, const FlashQuery& query, float key, float side, float) {
        float score = query.start;
        if (side == 0.0f) { score -= query.weight * fabsf(query.place - key); }
        else { score += side * query.weight * key; }
        return score;
    }
    __device__ void to_query(float& sum, float& dg, int k, float dlogit, float turned, float key, float side) const {
        sum += turned;
        dg += dlogit * (side == 0.0f ? -fabsf(distance[k]) : key);
    }
    __device__ void to_key(float& dS, int, float, float turned, float weight) const { dS += weight * turned; }
    // keys on one side: -sum dlogit |S_i - S_j| = side (sum dlogit S_j - S_i sum dlogit)
    __device__ static void finish(float& all, float dg, float sum, float place, float side) {
        all += side == 0.0f ? dg : side * (dg - place * sum);
    }
};
template <> struct FlashTerms<FlashBias::LogDistance> : FlashTerms<FlashBias::None> {
    static constexpr bool PLACES = true, SUMS_ROWS = true;
    float bend[2];                                          // a / (1 + a^2) of a = h (S_i - S_j)
    float by_g[2];                                          // -dB/dg

    __device__ static void fill(FlashQuery& query, const FlashArgs& args, size_t bh, size_t, size_t t) {
        query.weight = args.factor_of(bh, (int)t) * args.g[bh * args.stride + t];
        query.place = args.S_offset[bh * args.stride + t];
    }

    // inside: h = g and w = 1, else h = 1 and w = g, in -w log(1 + (h D)^2). One reciprocal for two; 1e9: their product
    // stays finite
    __device__ void gradient(float (&x)[2], const FlashQuery (&query)[2], bool inside) {
        float a[2], u[2], log[2];
        UNROLL
        for (int k = 0; k < 2; k++) {
            a[k] = fmaxf(-1e9f, fminf(1e9f, (inside ? query[k].weight : 1.0f) * distance[k]));
            u[k] = 1.0f + a[k] * a[k];
            log[k] = lg2(u[k]);
        }
        const float both = rcp(u[0] * u[1]);
        UNROLL
        for (int k = 0; k < 2; k++) {
            bend[k] = a[k] * (both * u[1 - k]);
            by_g[k] = inside ? 2.0f * bend[k] * distance[k] : LN2 * log[k];
            x[k] -= (inside ? 1.0f : query[k].weight) * log[k];
        }
    }
    __device__ void to_query(float& sum, float& dg, int k, float dlogit, float, float, float) const {
        sum += dlogit * bend[k];
        dg -= dlogit * by_g[k];
    }
    __device__ void to_key(float& dS, int k, float dlogit, float, float weight) const {
        dS += weight * (dlogit * bend[k]);
    }
};

// How many FlashQueries each tile has, and which one an owned tile meets
__host__ __device__ constexpr int flash_variants(FlashBias Kind) { return flash_is_cable(Kind) ? 3 : 1; }
template <FlashBias Kind> __device__ inline FlashFrom flash_from(int streamed, int owned) {
    if (flash_variants(Kind) == 1 || streamed == owned) { return FROM_CHUNK; }
    return streamed > owned ? FROM_FIRST : FROM_LAST;
}

// Two logits with their gradients
template <FlashBias Kind> struct FlashPair : FlashTerms<Kind> {
    float P[2];
    float dlogit[2];

    // scores: Fire's hold B
    __device__ static void start(float* scores, float* dP, const FlashQuery (&query)[2], const float (&key)[2],
                                 float side, float unit) {
        UNROLL
        for (int k = 0; k < 2; k++) {
            dP[k] = query[k].minus_dot;
            scores[k] = FlashTerms<Kind>::start(scores[k], query[k], key[k], side, unit);
        }
    }
    // scores, dP: the products
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
// Fire

// y of the pairs of FlashFire::meet; rows and columns begin at these positions. row_inv: of the lane's rows
template <int Columns>
__device__ inline void flash_fire_y(FlashFragment<Columns>& y, const FlashArgs& args, const float (&row_inv)[FLASH_OWN],
                                    const FlashQuery* streamed, int row, int column) {
    const int group = threadIdx.x % 32 / 4;
    UNROLL
    for (int e = 0; e < y.SIZE; e++) {
        const int own = y.own(e);
        const int c = y.column(e);
        // 1 / norm of the later position is the smaller one
        const float inv = fminf(row_inv[own], streamed[c].weight);
        y[e] = FlashFire::psi(args, row + group + 8 * own, column + c) * inv;
    }
}

// Adds the pairs of FlashFire::meet to the warp's sums. Hidden pairs have dlogit 0 and a finite y.
template <int Columns>
__device__ inline void flash_fire_sum(const FlashFireSums& sums, const FlashFire& fire,
                                      const FlashFragment<Columns>& dlogit, const FlashFragment<Columns>& y,
                                      const FlashArgs& args, const FlashQuery (&own_query)[2], const FlashQuery* key,
                                      int row, int column) {
    const float* dL = args.dnorm + args.table_zero + 1 + TOEPLITZ_PAD;      // by L, of each position's norm: descending
    FlashFragment<Columns> by_c;
    FlashFragment<Columns> by_L;
    UNROLL
    for (int e = 0; e < y.SIZE; e++) {
        const FlashQuery& query = own_query[y.own(e)];
        const int c = y.column(e);
        const int i = row + (int)threadIdx.x % 32 / 4 + 8 * y.own(e);
        const int j = column + c;
        const float inv = fminf(query.weight, key[c].weight);       // of the later position, as are the next two
        const float dnorm = fmaxf(query.place, key[c].place);
        by_c[e] = (args.dpsi[args.table_zero - FlashFire::distance(args, i, j)] - y[e] * dnorm) * inv;
        by_L[e] = y[e] * inv * dL[imax(i, j)];
    }
    sums.add(fire, dlogit, y, by_c, by_L);
}

// ----------------------------------------------------------------------------------------------------------
// The two kernels. A block owns a tile. Shared memory: two owned tiles, two stages of two streamed tiles, and the
// values: two stages of FlashQueries, and of each owned row S, or Fire's pieces in its place. That is 51 KB (HS 64), or
// 99 KB (HS 128), all that sm_86 has. Without wgmma an owned tile is free when its rows are in registers: the values
// lie in it, and after the tiles there is only FlashDiagonals::carry: 48 KB (HS 64), and sm_86 has room for two.
constexpr size_t FLASH_OWN_BYTES = std::max(sizeof(FlashS) * FLASH_TILE, sizeof(FirePiece) * FIRE_PIECES);
constexpr size_t FLASH_VALUES = sizeof(FlashQueries) * 2 + FLASH_OWN_BYTES;
static_assert(FLASH_VALUES <= sizeof(bf16) * FLASH_TILE * 64, "an owned tile has room for them");
constexpr size_t flash_backward_shared(int HS, bool free) {
    return sizeof(bf16) * 6 * FLASH_TILE * HS + (free ? sizeof(float) * FLASH_TILE : FLASH_VALUES);
}
// Streamed rows whose logits are in registers at a time: with all 64 the sums of HS columns would not fit beside them.
// On Hopper the owned rows take no registers. Fire's y needs room
__host__ __device__ constexpr int flash_strip(FlashBias Kind) {
    return Kind != FlashBias::Fire && flash_wgmma(32) ? 32 : 16;
}
// on one SM: 168, 255 registers per thread
constexpr int flash_backward_blocks(int HS) { return HS == 64 ? 3 : 2; }

// How many fragments of K and V fit into the dkdv kernel's registers beside dK and dV
__host__ __device__ constexpr int flash_keys_kept(FlashBias Kind, int HS) {
    return HS == 64 && !flash_wgmma(flash_strip(Kind)) ? 4 : 0;
}
__host__ __device__ constexpr int flash_values_kept(FlashBias Kind, int HS) {
    return flash_is_cable(Kind) ? 0 : flash_keys_kept(Kind, HS);
}

// ----------------------------------------------------------------------------------------------------------
// What both kernels must agree on: which sequence and head a block works on, where its rows are, which tiles meet

struct FlashBlock : FlashPlace {
    int b, h;
    int keys;                       // this sequence's tokens, kv_len applied
    int tiles;                      // of 64 rows in T
    int tile;                       // that it owns
    int columns;                    // of a head

    // one of `turns` blocks of a head; the first one owns the tile `from`
    __device__ FlashBlock(const FlashArgs& args, int turns, bool last_first = false, int from = 0)
        : FlashPlace(args, turns) {
        tile = from + (last_first ? turns - 1 - turn : turn);
        b = bh / args.NH;
        h = bh % args.NH;
        keys = flash_tokens(args, b);
        tiles = ceil_div(args.T, FLASH_TILE);
        columns = args.HS;
    }
    // row t of q (0), k (1), v (2); of dout; of what flash_backward_prepare_kernel wrote
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

// A block's rows, its shared memory, and the copies into it. Free: the owned tile in which the values lie, or -1
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
    // the values of a streamed tile as the block meets them, and S of an owned row, counted from the same token
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
    // Called by the whole block when the owned tiles are read no more, or if the values have a place of their own
    __device__ void put_own_S() const {
        if (FlashTerms<Kind>::SUMS_ROWS && threadIdx.x < FLASH_TILE) {
            const FlashQueries* own = block.template queries<Kind>(queries, tile(), FROM_CHUNK);
            const double from = (double)own->from.high + (double)own->from.low;
            own_S[threadIdx.x] = FlashS::of(from + (double)own->row[threadIdx.x].place);
        }
    }
    // A streamed tile
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
