// attention/flash/pairs.cuh -- the parts of both kernels of backward.cuh: a query as its logits need it, two logits
// with their gradients, a block's rows and its shared memory; and the kernel that gathers the queries before them.
//
// "Owned" is the tile of 64 rows that a block keeps, "streamed" are the tiles that pass by it. In one kernel the keys
// are owned and the queries streamed, in the other the queries are owned.
#ifndef LLMC_ATTENTION_FLASH_PAIRS_CUH
#define LLMC_ATTENTION_FLASH_PAIRS_CUH

#include "reach.cuh"
#include "skip.cuh"

// ----------------------------------------------------------------------------------------------------------
// queries, and where their S is counted from

// A query as its logits need it, logits in units of log2. Padding, and the rows after T, have lse2 = +inf: P = 0.
struct alignas(16) FlashQuery {
    float lse2;         // log2(e) lse
    float row_dot;
    float weight;       // of its distances. Linear: log2(e) slope.  Distance: log2(e) g.  LogDistance: g.  Fire: 1/norm
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
// How many of them each tile has, and which one an owned tile meets
__host__ __device__ constexpr int flash_variants(FlashBias Kind) { return flash_is_cable(Kind) ? 3 : 1; }
template <FlashBias Kind> __device__ inline FlashFrom flash_from(int streamed, int owned) {
    if (flash_variants(Kind) == 1 || streamed == owned) { return FROM_CHUNK; }
    return streamed > owned ? FROM_FIRST : FROM_LAST;
}
// For these biases a streamed tile is stored once for each tile that the block owns: the two count S from different
// ends if one of them meets itself. The view of a row of the block, or the one that a thread fetches
template <FlashBias Kind> __host__ __device__ constexpr int flash_views(int Rows) {
    return flash_is_cable(Kind) ? flash_block_tiles(Rows) : 1;
}
template <int Views> __device__ inline int flash_view(int row) { return Views == 1 ? 0 : row / FLASH_TILE; }

// ----------------------------------------------------------------------------------------------------------
// logits

// B_ij: columns outside the table read its nearest end, and are masked
__device__ inline float flash_table(const FlashArgs& args, int h, int i, int j) {
    const int entry = clamp(args.table_zero + j - i, 0, args.table_entries - 1);
    return args.table[(size_t)h * args.table_entries + entry];
}

// Two logits of one owned row, neighbours in the streamed direction: two keys of a query, or two queries of a key.
template <FlashBias Kind> struct FlashPair {
    float P[2];
    float dlogit[2];
    float distance[2];  // S_i - S_j
    float bend[2];      // LogDistance: a / (1 + a^2) of a = h (S_i - S_j), and -dB/dg
    float by_g[2];

    // scores: q.k; Fire's B is in them.  key: the keys' places, counted from what their queries' are; Toeplitz: entries
    // of the table.  inside: LogDistance has h = g and w = 1, else h = 1 and w = g, in B = -w log(1 + (h D)^2)
    __device__ FlashPair(const float* scores, const float* dP, const FlashQuery (&query)[2], const float (&key)[2],
                         float scale2, const bool (&hidden)[2], bool inside) {
        float x[2];                                         // log2 P
        UNROLL
        for (int k = 0; k < 2; k++) {
            x[k] = scale2 * scores[k] - query[k].lse2;
            if (flash_has_S(Kind)) { distance[k] = query[k].place - key[k]; }
            if (Kind == FlashBias::Linear || Kind == FlashBias::Distance) {
                x[k] -= query[k].weight * fabsf(distance[k]);
            }
            if (Kind == FlashBias::Toeplitz) { x[k] += LOG2E * key[k]; }
        }
        if (Kind == FlashBias::LogDistance) {               // one reciprocal for two; 1e9: their product stays finite
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
        UNROLL
        for (int k = 0; k < 2; k++) { P[k] = hidden[k] ? 0.0f : ex2(x[k]); }
        UNROLL
        for (int k = 0; k < 2; k++) { dlogit[k] = P[k] * (dP[k] - query[k].row_dot); }
    }
};

// ----------------------------------------------------------------------------------------------------------
// Fire

// y of the pairs of FlashFire::meet; rows and columns begin at these positions. row_inv: of the lane's rows
template <int Rows, int Columns>
__device__ inline void flash_fire_y(FlashFragment<Rows, Columns>& y, const FlashArgs& args,
                                    const float (&row_inv)[Rows / 8], const FlashQuery* streamed, int row, int column) {
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
template <int Rows, int Columns>
__device__ inline void flash_fire_add(FlashFragment<Rows, Columns>& scores, const FlashFragment<Rows, Columns>& y,
                                      const FlashFire& fire) {
    FlashFragment<Rows, Columns> f;
    fire.apply(f, y);
    UNROLL
    for (int e = 0; e < y.SIZE; e++) { scores[e] += f[e]; }
}

// ----------------------------------------------------------------------------------------------------------
// The two kernels. A block owns 64 or 128 rows, 16 or 32 per warp: one or two tiles. A warp leaves out the streamed
// tiles that only the block's other tile meets. Shared memory: two owned tiles, two stages of two streamed tiles, two
// stages of FlashQueries per owned tile, and of each owned row S, or Fire's pieces in its place. With 32 rows per warp
// registers are scarce, so shared memory also holds the block's place, the owned queries (dq) and the lanes' dS (dkdv):
// 72 KB (HS 64). HS 128: 99 KB, all that sm_86 has

// The rows of a warp. HS 128: with 32, just dK and dV would take 256 registers, and the tiles 128 KB
constexpr int flash_backward_rows(int HS) { return HS == 64 ? 32 : 16; }
// In the dq kernel. Fire: beside 32 there is no room for y and its derivatives
constexpr int flash_dq_rows(FlashBias Kind, int Rows) { return Kind == FlashBias::Fire ? 16 : Rows; }
constexpr size_t FLASH_BLOCK_BYTES = 32;                    // a FlashBlock, rounded up
__host__ __device__ constexpr size_t flash_own_bytes(int Rows) {
    const size_t S = sizeof(FlashS) * flash_block_rows(Rows), fire = sizeof(FirePiece) * FIRE_PIECES;
    return S > fire ? S : fire;
}
constexpr size_t flash_backward_shared(int HS, int Rows) {
    return sizeof(bf16) * (2 * flash_block_rows(Rows) + 4 * FLASH_TILE) * HS +
           sizeof(FlashQueries) * 2 * flash_block_tiles(Rows) + flash_own_bytes(Rows) +
           (Rows == 32 ? FLASH_BLOCK_BYTES + sizeof(FlashQuery) * flash_block_rows(Rows) : 0);
}
// Streamed rows whose logits are in registers at a time: with all 64 the sums of HS columns would not fit beside them.
constexpr int FLASH_STRIP = 16;
// on one SM: 168, 255 registers per thread
constexpr int flash_backward_blocks(int HS, int Rows) { return HS == 64 && Rows == 16 ? 3 : 2; }

// How many fragments of K and V fit into the dkdv kernel's registers beside dK and dV
__host__ __device__ constexpr int flash_keys_kept(FlashBias Kind, int HS, int Rows) {
    if (HS != 64) { return 0; }
    if (Rows == 32 && Kind == FlashBias::Fire) { return 3; }
    return Rows == 16 || Kind != FlashBias::LogDistance ? 4 : 2;
}
__host__ __device__ constexpr int flash_values_kept(FlashBias Kind, int HS, int Rows) {
    if (HS != 64 || Kind == FlashBias::LogDistance) { return 0; }
    if (Rows == 16) { return 4; }
    if (Kind == FlashBias::None) { return 3; }
    return Kind == FlashBias::Linear ? 1 : 0;
}

// ----------------------------------------------------------------------------------------------------------
// What both kernels must agree on: which sequence and head a block works on, where its rows are, which tiles meet

struct FlashBlock : FlashPlace {
    int b, h;
    int keys;                       // this sequence's tokens, kv_len applied
    int tiles;                      // of 64 rows in T
    int first;                      // of the rows that it owns
    int columns;                    // of a head

    // one of `turns` blocks of a head; each owns `rows` rows, the first one those from `from` on
    __device__ FlashBlock(const FlashArgs& args, int turns, int rows = 0, bool last_first = false, int from = 0)
        : FlashPlace(args, turns) {
        first = from + (last_first ? turns - 1 - turn : turn) * rows;
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
    // this thread's view of the tiles from `tile` on that the block owns; one of them may lie after T, and is not used
    template <FlashBias Kind, int Views>
    __device__ const FlashQueries* own_queries(const FlashQueries* all, int tile) const {
        return queries<Kind>(all, imin(tile + flash_view<Views>(threadIdx.x), tiles - 1), FROM_CHUNK);
    }
    // The queries of tile m meet the tiles of keys from first_key_tile to end_key_tile - 1. Every bias tests the first
    // one, although only two have spans: without this test ptxas spills in the dkdv kernel of another bias
    __device__ int first_key_tile(const FlashArgs& args, int m) const {
        return args.span == nullptr ? 0 : args.span[bh * tiles + m].first;
    }
    __device__ int live_tiles() const { return ceil_div(keys, FLASH_TILE); }
    template <bool Causal, FlashBias Kind> __device__ int end_key_tile(const FlashArgs& args, int m) const {
        if (m >= live_tiles()) { return 0; }
        if (Causal) { return m + 1; }
        return !flash_skips(Kind) || args.span == nullptr ? live_tiles() : args.span[bh * tiles + m].last + 1;
    }
};

// A block's rows, its shared memory, and the copies into it
enum FlashInput { FLASH_Q, FLASH_K, FLASH_V, FLASH_DOUT };
template <FlashBias Kind, int HS, int Rows> struct FlashOwner {
    static constexpr int OWNED = flash_block_rows(Rows);
    static constexpr int VIEWS = flash_views<Kind>(Rows);
    static constexpr int TILE_SIZE = FLASH_TILE * HS;
    const int lane = threadIdx.x % 32;
    const int row0 = threadIdx.x / 32 * Rows;               // the warp's first row in the block
    const FlashArgs& args;
    const FlashQueries* queries;
    const FlashBlock placed;
    bf16* own;                                              // two tiles (OWNED,HS)
    bf16* streamed;                                         // two stages of two tiles (64,HS)
    FlashQueries* values;                                   // of the streamed rows: two stages of VIEWS
    FlashS* own_S;                                          // (OWNED)
    // with 32 rows per warp, because registers are scarce: the block's place, and FLASH_THREADS more values
    FlashBlock* shared_block;
    void* shared_rest;

    // one of `turns` blocks of a head
    __device__ FlashOwner(const FlashArgs& args, const FlashQueries* queries, int turns, bool last_first, int from)
        : args(args), queries(queries), placed(args, turns, OWNED, last_first, from) {
        own = (bf16*)dynamic_shared();
        streamed = own + 2 * OWNED * HS;
        values = (FlashQueries*)(streamed + 4 * TILE_SIZE);
        own_S = (FlashS*)(values + 2 * flash_block_tiles(Rows));
        shared_block = (FlashBlock*)((char*)own_S + flash_own_bytes(Rows));
        shared_rest = (char*)shared_block + FLASH_BLOCK_BYTES;
        if (Rows == 32 && threadIdx.x == 0) { *shared_block = placed; }
        if (Rows == 32) { __syncthreads(); }
    }
    __device__ bf16* own_tile(int which) const { return own + which * OWNED * HS; }
    __device__ bf16* streamed_tile(int stage) const { return streamed + stage * 2 * TILE_SIZE; }
    __device__ const FlashBlock& block() const { return Rows == 32 ? *shared_block : placed; }
    __device__ int first() const { return block().first; }                  // of the block's rows,
    __device__ int first_tile() const { return block().first / FLASH_TILE; }        // in this tile
    __device__ int tile() const { return (block().first + row0) / FLASH_TILE; }     // the warp's
    __device__ int row(int own) const { return row0 + lane / 4 + 8 * own; }         // the lane's
    // whether query i does not see key j. Masked: its document begins at `begin`
    template <bool Causal, bool Masked> __device__ bool hides(int i, int j, int begin) const {
        return j >= block().keys || (Causal && j > i) || (Masked && args.mask.hides(i, j, begin));
    }
    // the values of a streamed tile as this warp's rows meet them, and S of an owned row, counted from the same token
    __device__ const FlashQueries& met_queries(int stage) const {
        return values[stage * VIEWS + flash_view<VIEWS>(row0)];
    }
    __device__ const FlashQuery* met_values(int stage) const { return met_queries(stage).row; }
    __device__ float place(int row, int stage) const { return own_S[row].minus(met_queries(stage).from); }
    // where they come from, for this thread to fetch
    __device__ const FlashQueries* met(int tile) const {
        const FlashFrom from = flash_from<Kind>(tile, first_tile() + flash_view<VIEWS>(threadIdx.x));
        return block().template queries<Kind>(queries, tile, from);
    }

    // Starts the copy of rows from t on
    template <FlashInput Input, int Count> __device__ void load(bf16* to, int t) const {
        const bf16* from = Input == FLASH_DOUT ? block().dout(args, t) : block().qkv(args, t, Input);
        const int stride = Input == FLASH_DOUT ? args.NH * block().columns : args.OC;
        flash_load_tile<HS, Count>(to, from, stride, block().columns, args.T - t);
    }
    template <FlashInput First, FlashInput Second> __device__ void load_owned() const {
        load<First, OWNED>(own_tile(0), first());
        load<Second, OWNED>(own_tile(1), first());
        if (flash_is_cable(Kind) && threadIdx.x < OWNED) {
            const FlashQueries* own = block().template own_queries<Kind, VIEWS>(queries, first_tile());
            const double from = (double)own->from.high + (double)own->from.low;
            own_S[threadIdx.x] = FlashS::of(from + (double)own->row[threadIdx.x % FLASH_TILE].place);
        }
    }
    // A streamed tile; computes addresses again, because registers are scarce
    template <FlashInput First, FlashInput Second> __device__ void fetch(int tile, int stage) const {
        constexpr bool has_values = First == FLASH_Q || (Kind != FlashBias::None && Kind != FlashBias::Toeplitz);
        load<First, FLASH_TILE>(streamed_tile(stage), tile * FLASH_TILE);
        load<Second, FLASH_TILE>(streamed_tile(stage) + TILE_SIZE, tile * FLASH_TILE);
        const FlashQueries* from = met(tile);
        FlashQueries* to = values + stage * VIEWS + flash_view<VIEWS>(threadIdx.x);
        const int row = threadIdx.x % FLASH_TILE;
        if (has_values && threadIdx.x < VIEWS * FLASH_TILE) {
            cp_async_16(to->row + row, from->row + row, true);
            if (flash_is_cable(Kind) && row == 0) { cp_async_16(&to->from, &from->from, true); }
        }
        cp_async_commit();
    }
};

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
    FlashQuery query = {INFINITY, 0.0f, 0.0f, 0.0f};
    if (t < (size_t)args.T) {
        const size_t at = bh * args.stride + t;
        const float lse = args.lse[at];
        if (lse != -INFINITY) {                             // else padding, or a query that has seen no key: P stays 0
            query.lse2 = LOG2E * lse;
            query.row_dot = row_dot;
        }
        if (Kind == FlashBias::Linear) {
            query.weight = LOG2E * args.slopes[h];
            query.place = (float)t;
        }
        if (Kind == FlashBias::Fire) {
            query.weight = args.inv[t];
            query.place = args.dnorm[t];
        }
        if (flash_is_cable(Kind)) {
            query.weight = Kind == FlashBias::Distance ? LOG2E * args.g[at] : args.g[at];
            query.place = args.S_offset[at];
        }
    }
    FlashQueries* tile = queries + (bh * rows + t) / FLASH_TILE * flash_variants(Kind);
    tile[FROM_CHUNK].row[t % FLASH_TILE] = query;
    if (flash_variants(Kind) == 1) { return; }
    // 3. the same, counted from the tile's first row and from its last
    const float* S = args.S_offset + bh * args.stride;
    const float raw = query.place;
    const int first = (int)t / FLASH_TILE * FLASH_TILE;
    const int last = imin(first + FLASH_TILE, args.T) - 1;
    query.place = raw - S[first];
    tile[FROM_FIRST].row[t % FLASH_TILE] = query;
    query.place = raw - S[last];
    tile[FROM_LAST].row[t % FLASH_TILE] = query;
    if (t % FLASH_TILE == 0) {                              // one thread per tile says from what
        const double origin = args.S_origin[bh * ceil_div(args.stride, CABLE_CHUNK) + t / CABLE_CHUNK];
        tile[FROM_CHUNK].from = FlashS::of(origin);
        tile[FROM_FIRST].from = FlashS::of(origin + (double)S[first]);
        tile[FROM_LAST].from = FlashS::of(origin + (double)S[last]);
    }
}

#endif
