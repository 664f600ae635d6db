// attention/flash/pairs.cuh -- the parts of both kernels of backward.cuh: a query as its logits need it, two logits
// with their gradients, the products of owned rows and streamed tiles; and the kernel that gathers the queries before
// them.
//
// "Owned" is the tile of 64 rows that a block keeps, "streamed" are the tiles that pass by it. In one kernel the keys
// are owned and the queries streamed, in the other the queries are owned.
#ifndef LLMC_ATTENTION_FLASH_PAIRS_CUH
#define LLMC_ATTENTION_FLASH_PAIRS_CUH

#include "forward.cuh"

// ----------------------------------------------------------------------------------------------------------
// queries, and where their S is counted from

// A query as its logits need it, logits in units of log2. Padding, and the rows after T, have lse2 = +inf: P = 0.
struct alignas(16) FlashQuery {
    float lse2;         // log2(e) lse
    float row_dot;
    float g;            // log2(e) g: Linear, Distance.  g: LogDistance.  1 / norm of the position: Fire
    float S;            // counted from what its FlashQueries say.  Linear: the position.  Fire: its norm's derivative
};

// The queries of a tile, and from what their S is counted: the chunk's origin, the tile's first row or its last,
// whichever of these two is nearer to the tile that meets it. Then S_i and S_j differ in sign, or neither has lost a
// bit, and nothing cancels. docs/attention.md, "Where S is counted from".
enum FlashFrom { FROM_CHUNK, FROM_FIRST, FROM_LAST };
struct alignas(16) FlashQueries {
    FlashQuery row[FLASH_TILE];
    double from, unused;                                    // S of the token that it is counted from; 16 bytes
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
// S of the owned rows, from the same origin as the streamed tile's; in shared memory, because registers are scarce.
// One thread per row, the block's last ones, so that shift() needs no barrier but the one before its values are read.
template <int Rows> struct FlashOwnS {
    double exact[flash_block_rows(Rows)];
    float shifted[2][flash_block_rows(Rows)];               // of two stages

    __device__ static int row() { return (int)threadIdx.x - (FLASH_THREADS - flash_block_rows(Rows)); }     // or < 0
    // once per block: own is the FROM_CHUNK of the tile of row()
    __device__ void set(const FlashQueries* own) {
        if (row() >= 0) { exact[row()] = own->from + own->row[row() % FLASH_TILE].S; }
    }
    // once per streamed tile, when it is fetched; read after the barrier that says it has arrived
    __device__ void shift(const FlashQueries* streamed, int stage) {
        if (row() >= 0) { shifted[stage][row()] = (float)(exact[row()] - streamed->from); }
    }
};

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

    // scores: q.k.  query0, query1: the queries of the two.  bias0, bias1: S_j of their keys, counted from what the
    // query's S is, or the two entries of the table; Fire's B is in the scores.  inside: LogDistance has h = g and
    // w = 1, else h = 1 and w = g, in B = -w log(1 + (h D)^2)
    __device__ FlashPair(const float* scores, const float* dP, const FlashQuery& query0, const FlashQuery& query1,
                         float bias0, float bias1, float scale2, bool masked0, bool masked1, bool inside) {
        constexpr bool has_distance = flash_has_S(Kind);
        float x[2] = {scale2 * scores[0] - query0.lse2, scale2 * scores[1] - query1.lse2};      // log2 P
        if (has_distance) {
            distance[0] = query0.S - bias0;
            distance[1] = query1.S - bias1;
        }
        if (Kind == FlashBias::Linear || Kind == FlashBias::Distance) {
            x[0] -= query0.g * fabsf(distance[0]);
            x[1] -= query1.g * fabsf(distance[1]);
        }
        if (Kind == FlashBias::Toeplitz) {
            x[0] += LOG2E * bias0;
            x[1] += LOG2E * bias1;
        }
        if (Kind == FlashBias::LogDistance) {               // one reciprocal for two; 1e9: their product stays finite
            const float a0 = fmaxf(-1e9f, fminf(1e9f, (inside ? query0.g : 1.0f) * distance[0]));
            const float a1 = fmaxf(-1e9f, fminf(1e9f, (inside ? query1.g : 1.0f) * distance[1]));
            const float u0 = 1.0f + a0 * a0;
            const float u1 = 1.0f + a1 * a1;
            const float log0 = lg2(u0);
            const float log1 = lg2(u1);
            const float both = rcp(u0 * u1);
            bend[0] = a0 * (both * u1);
            bend[1] = a1 * (both * u0);
            by_g[0] = inside ? 2.0f * bend[0] * distance[0] : LN2 * log0;
            by_g[1] = inside ? 2.0f * bend[1] * distance[1] : LN2 * log1;
            x[0] -= (inside ? 1.0f : query0.g) * log0;
            x[1] -= (inside ? 1.0f : query1.g) * log1;
        }
        P[0] = masked0 ? 0.0f : ex2(x[0]);
        P[1] = masked1 ? 0.0f : ex2(x[1]);
        dlogit[0] = P[0] * (dP[0] - query0.row_dot);
        dlogit[1] = P[1] * (dP[1] - query1.row_dot);
    }
};

// ----------------------------------------------------------------------------------------------------------
// products of owned rows and streamed tiles

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

// sum (Rows, 8N) = the warp's owned rows, from row0 on, times the rows from `row` on of a tile, transposed (HS, 8N)
template <int HS, int Rows, int Kept, int N>
__device__ inline void flash_scores(float (&sum)[Rows / 16][N][4], FlashOwned<HS, Rows, Kept>& owned,
                                    const bf16* owned_tile, int row0, const bf16* tile, int row) {
    UNROLL
    for (int e = 0; e < Rows / 16 * N; e++) {
        float (&x)[4] = sum[e / N][e % N];
        x[0] = x[1] = x[2] = x[3] = 0.0f;
    }
    UNROLL
    for (int k = 0; k < HS / 16; k++) {
        owned.use(owned_tile, row0, k);
        UNROLL
        for (int n = 0; n < N; n += 2) {                    // 16 rows of the tile: two mma per group
            uint32_t b[4];
            flash_load_b<HS>(b, tile, row + n * 8, k);
            UNROLL
            for (int group = 0; group < Rows / 16; group++) {
                mma_m16n8k16(sum[group][n], owned(group, k), b[0], b[1]);
                mma_m16n8k16(sum[group][n + 1], owned(group, k), b[2], b[3]);
            }
        }
    }
}

// sum (Rows, HS) += weights (Rows, 16), two neighbouring results of flash_scores from n on, times 16 rows of a tile
template <int HS, int Rows, int N>
__device__ inline void flash_accumulate(float (&sum)[Rows / 16][HS / 8][4], const float (&weights)[Rows / 16][N][4],
                                        int n, const bf16* tile, int row) {
    // the results that a lane holds are those that it gives as left operand: docs/attention.md, "Tiles and fragments"
    uint32_t a[Rows / 16][4];
    UNROLL
    for (int group = 0; group < Rows / 16; group++) {
        const float (&left)[4] = weights[group][n];
        const float (&right)[4] = weights[group][n + 1];
        a[group][0] = pack_bf16(left[0], left[1]);
        a[group][1] = pack_bf16(left[2], left[3]);
        a[group][2] = pack_bf16(right[0], right[1]);
        a[group][3] = pack_bf16(right[2], right[3]);
    }
    UNROLL
    for (int c = 0; c < HS / 16; c++) {                     // 16 columns of the head: two mma per group
        uint32_t b[4];
        flash_load_b_trans<HS>(b, tile, row, c);
        UNROLL
        for (int group = 0; group < Rows / 16; group++) {
            mma_m16n8k16(sum[group][2 * c], a[group], b[0], b[1]);
            mma_m16n8k16(sum[group][2 * c + 1], a[group], b[2], b[3]);
        }
    }
}

// Fire: y of the pairs of FlashFire::meet, in the order of flash_scores. Rows and columns begin at these positions
template <int Rows, int N>
__device__ inline void flash_fire_y(float (&y)[Rows * N / 4], const FlashArgs& args, const float (&row_inv)[Rows / 8],
                                    const FlashQuery* streamed, int row, int column) {
    const int lane = threadIdx.x % 32;
    UNROLL
    for (int e = 0; e < Rows * N / 4; e++) {
        const int own = e / (4 * N) * 2 + e % 4 / 2;
        const int c = e / 4 % N * 8 + lane % 4 * 2 + e % 2;
        // 1 / norm of the later position is the smaller one
        const float inv = fminf(row_inv[own], streamed[c].g);
        y[e] = FlashFire::psi(args, row + lane / 4 + 8 * own, column + c) * inv;
    }
}
template <int Rows, int N>
__device__ inline void flash_fire_add(float (&scores)[Rows / 16][N][4], const float (&y)[Rows * N / 4],
                                      const FlashFire& fire) {
    float f[Rows * N / 4];
    fire.apply(f, y);
    UNROLL
    for (int e = 0; e < Rows * N / 4; e++) { scores[e / (4 * N)][e / 4 % N][e % 4] += f[e]; }
}

struct alignas(16) FlashPiece {
    uint32_t x[4];                                          // 8 bf16
};

// to (the block's rows, columns) = factor * sum, by way of this warp's own rows of a tile that nobody else reads any
// more
template <int HS, int Rows>
__device__ inline void flash_store(bf16* to, int stride, int columns, int rows, bf16* tile,
                                   const float (&sum)[Rows / 16][HS / 8][4], float factor) {
    const int lane = threadIdx.x % 32;
    const int row0 = threadIdx.x / 32 * Rows;
    syncwarp();                                             // the warp has read its operands from these rows
    UNROLL
    for (int own = 0; own < Rows / 8; own++) {
        UNROLL
        for (int n = 0; n < HS / 8; n++) {
            const float* x = sum[own / 2][n] + own % 2 * 2;
            bf16* piece = flash_at<HS>(tile, row0 + lane / 4 + 8 * own, n) + lane % 4 * 2;
            *(uint32_t*)piece = pack_bf16(factor * x[0], factor * x[1]);
        }
    }
    syncwarp();                                             // the rows are complete
    for (int e = lane; e < Rows * HS / 8; e += 32) {
        const int row = row0 + e / (HS / 8);
        const int piece = e % (HS / 8);
        if (row >= rows || piece * 8 >= columns) { continue; }
        *(FlashPiece*)(to + (size_t)row * stride + piece * 8) = *(const FlashPiece*)flash_at<HS>(tile, row, piece);
    }
}

// the sum over the four lanes that share a row
__device__ inline float quad_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

// ----------------------------------------------------------------------------------------------------------
// The two kernels. A block owns 64 or 128 rows, 16 or 32 per warp: one or two tiles. A warp leaves out the streamed
// tiles that only the block's other tile meets. Shared memory: two owned tiles, two stages of two streamed tiles, two
// stages of FlashQuery per owned tile, FlashOwnS. With 32 rows per warp registers are scarce, so shared memory also
// holds the block's place, the owned queries (dq) and the lanes' dS (dkdv): 72 KB (HS 64). HS 128: 99 KB, all that
// sm_86 has

// The rows of a warp. HS 128: with 32, just dK and dV would take 256 registers, and the tiles 128 KB
constexpr int flash_backward_rows(int HS) { return HS == 64 ? 32 : 16; }
// In the dq kernel. Fire: beside 32 there is no room for y and its derivatives
constexpr int flash_dq_rows(FlashBias Kind, int Rows) { return Kind == FlashBias::Fire ? 16 : Rows; }
constexpr size_t FLASH_BLOCK_BYTES = 32;                    // a FlashBlock, rounded up
constexpr size_t flash_backward_shared(int HS, int Rows) {
    return sizeof(bf16) * (2 * flash_block_rows(Rows) + 4 * FLASH_TILE) * HS +
           sizeof(FlashQuery) * (Rows == 32 ? 3 : 2) * flash_block_rows(Rows) +
           (Rows == 32 ? sizeof(FlashOwnS<32>) + FLASH_BLOCK_BYTES : sizeof(FlashOwnS<16>));
}
// Streamed rows whose logits are in registers at a time: with all 64 the sums of HS columns would not fit beside them.
constexpr int FLASH_STRIP = 16;
// on one SM: 168, 255 registers per thread
constexpr int flash_backward_blocks(int HS, int Rows) { return HS == 64 && Rows == 16 ? 3 : 2; }

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
            query.g = LOG2E * args.slopes[h];
            query.S = (float)t;
        }
        if (Kind == FlashBias::Fire) {
            query.g = args.inv[t];
            query.S = args.dnorm[t];
        }
        if (flash_is_cable(Kind)) {
            query.g = Kind == FlashBias::Distance ? LOG2E * args.g[at] : args.g[at];
            query.S = args.S_offset[at];
        }
    }
    FlashQueries* tile = queries + (bh * rows + t) / FLASH_TILE * flash_variants(Kind);
    tile[FROM_CHUNK].row[t % FLASH_TILE] = query;
    if (flash_variants(Kind) == 1) { return; }
    // 3. the same, counted from the tile's first row and from its last
    const float* S = args.S_offset + bh * args.stride;
    const float raw = query.S;
    const int first = (int)t / FLASH_TILE * FLASH_TILE;
    const int last = imin(first + FLASH_TILE, args.T) - 1;
    query.S = raw - S[first];
    tile[FROM_FIRST].row[t % FLASH_TILE] = query;
    query.S = raw - S[last];
    tile[FROM_LAST].row[t % FLASH_TILE] = query;
    if (t % FLASH_TILE == 0) {                              // one thread per tile says from what
        const double origin = args.S_origin[bh * ceil_div(args.stride, CABLE_CHUNK) + t / CABLE_CHUNK];
        tile[FROM_CHUNK].from = origin;
        tile[FROM_FIRST].from = origin + S[first];
        tile[FROM_LAST].from = origin + S[last];
    }
}

#endif
