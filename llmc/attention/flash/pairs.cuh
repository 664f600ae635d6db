// attention/flash/pairs.cuh -- what both kernels of backward.cuh are made of: a query as its logits need it, two logits
// with their gradients, the products of owned rows and streamed tiles; and the kernels before and after: queries
// gathered, slabs of Toeplitz's table summed.
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
    float g;            // log2(e) g: Linear, Distance.  g: LogDistance
    float S;            // counted from what its FlashQueries say; Linear: the position
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
// S of the owned rows, counted from what the streamed tile counts from: in shared memory, because registers are short.
// One thread per row, the block's last 64, so that shift() needs no barrier but the one before its values are read.
struct FlashOwnS {
    double exact[FLASH_TILE];
    float shifted[2][FLASH_TILE];                           // of two stages

    // once per block: own is the owned tile's FROM_CHUNK
    __device__ void set(const FlashQueries* own) {
        const int r = (int)threadIdx.x - FLASH_TILE;
        if (r >= 0) { exact[r] = own->from + own->row[r].S; }
    }
    // once per streamed tile, when it is fetched; read after the barrier that says it has arrived
    __device__ void shift(const FlashQueries* streamed, int stage) {
        const int r = (int)threadIdx.x - FLASH_TILE;
        if (r >= 0) { shifted[stage][r] = (float)(exact[r] - streamed->from); }
    }
};

// ----------------------------------------------------------------------------------------------------------
// logits

// Two logits of one owned row, neighbours in the streamed direction: two keys of a query, or two queries of a key.
template <FlashBias Kind> struct FlashPair {
    float P[2];
    float dlogit[2];
    float distance[2];  // S_i - S_j
    float bend[2];      // LogDistance: a / (1 + a^2) of a = h (S_i - S_j), and -dB/dg
    float by_g[2];

    // scores: q.k.  query0, query1: the queries of the two.  bias0, bias1: S_j of their keys, counted from what the
    // query's S is, or the two entries of the table.  inside: LogDistance has h = g and w = 1, else h = 1 and w = g, in
    // B = -w log(1 + (h D)^2)
    __device__ FlashPair(const float* scores, const float* dP, const FlashQuery& query0, const FlashQuery& query1,
                         float bias0, float bias1, float scale2, bool masked0, bool masked1, bool inside) {
        constexpr bool has_distance = Kind != FlashBias::None && Kind != FlashBias::Toeplitz;
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

// The fragments of 16 owned rows as left operand: kept in registers, or read from shared memory where those run out.
template <int HS, bool Resident> struct FlashOwned {
    uint32_t fragment[Resident ? HS / 16 : 1][4];
    const bf16* tile;
    int row0;

    __device__ FlashOwned(const bf16* tile, int row0) : tile(tile), row0(row0) {
        UNROLL
        for (int k = 0; k < HS / 16 && Resident; k++) { flash_load_a<HS>(fragment[k], tile, row0, k); }
    }
};

// sum (16, 8N) = owned rows (16, HS) times the rows row0 .. row0 + 8N - 1 of a tile, transposed (HS, 8N)
template <int HS, bool Resident, int N>
__device__ inline void flash_scores(float (&sum)[N][4], FlashOwned<HS, Resident>& own, const bf16* tile, int row0) {
    UNROLL
    for (int n = 0; n < N; n++) { sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.0f; }
    UNROLL
    for (int k = 0; k < HS / 16; k++) {
        uint32_t b[4];                                      // 16 rows of the tile: two mma
        if (!Resident) { flash_load_a<HS>(own.fragment[0], own.tile, own.row0, k); }
        UNROLL
        for (int n = 0; n < N; n += 2) {
            flash_load_b<HS>(b, tile, row0 + n * 8, k);
            mma_m16n8k16(sum[n], own.fragment[Resident ? k : 0], b[0], b[1]);
            mma_m16n8k16(sum[n + 1], own.fragment[Resident ? k : 0], b[2], b[3]);
        }
    }
}

// sum (16, HS) += weights (16, 16), in two neighbouring results of flash_scores, times 16 rows of a tile
template <int HS>
__device__ inline void flash_accumulate(float (&sum)[HS / 8][4], const float (&left)[4], const float (&right)[4],
                                        const bf16* tile, int row0) {
    // the results that a lane holds are those that it gives as left operand: docs/attention.md, "Tiles and fragments"
    const uint32_t a[4] = {pack_bf16(left[0], left[1]), pack_bf16(left[2], left[3]),
                           pack_bf16(right[0], right[1]), pack_bf16(right[2], right[3])};
    UNROLL
    for (int n = 0; n < HS / 16; n++) {                     // 16 columns of the head: two mma
        uint32_t b[4];
        flash_load_b_trans<HS>(b, tile, row0, n);
        mma_m16n8k16(sum[2 * n], a, b[0], b[1]);
        mma_m16n8k16(sum[2 * n + 1], a, b[2], b[3]);
    }
}

struct alignas(16) FlashPiece {
    uint32_t x[4];                                          // 8 bf16
};

// to (64 rows, HS) = factor * sum, by way of this warp's own 16 rows of a tile that nobody else reads any more
template <int HS>
__device__ inline void flash_store(bf16* to, int stride, int rows, bf16* tile, const float (&sum)[HS / 8][4],
                                   float factor) {
    const int lane = threadIdx.x % 32;
    const int row0 = threadIdx.x / 32 * 16;
    syncwarp();                                             // the warp has read its operands from these rows
    UNROLL
    for (int n = 0; n < HS / 8; n++) {
        bf16* upper = flash_at<HS>(tile, row0 + lane / 4, n) + lane % 4 * 2;
        *(uint32_t*)upper = pack_bf16(factor * sum[n][0], factor * sum[n][1]);
        bf16* lower = flash_at<HS>(tile, row0 + lane / 4 + 8, n) + lane % 4 * 2;
        *(uint32_t*)lower = pack_bf16(factor * sum[n][2], factor * sum[n][3]);
    }
    syncwarp();                                             // the rows are complete
    for (int e = lane; e < 16 * HS / 8; e += 32) {
        const int row = row0 + e / (HS / 8);
        const int piece = e % (HS / 8);
        if (row >= rows) { continue; }
        *(FlashPiece*)(to + (size_t)row * stride + piece * 8) = *(const FlashPiece*)flash_at<HS>(tile, row, piece);
    }
}

// the sum over the four lanes that share a row
__device__ inline float quad_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

// ----------------------------------------------------------------------------------------------------------
// What both kernels must agree on: which sequence and head a block works on, where its rows are, which tiles meet

struct FlashBlock : FlashPlace {
    int b, h;
    int keys;                       // this sequence's tokens, kv_len applied
    int tiles;                      // of 64 rows in T

    // one of `turns` blocks of a head
    __device__ FlashBlock(const FlashArgs& args, int turns) : FlashPlace(args, turns) {
        b = bh / args.NH;
        h = bh % args.NH;
        keys = flash_tokens(args, b);
        tiles = ceil_div(args.T, FLASH_TILE);
    }
    // row t of q (0), k (1), v (2); of dout; of what flash_backward_prepare_kernel wrote
    template <int HS> __device__ const bf16* qkv(const FlashArgs& args, int t, int which) const {
        return args.qkv + (size_t)(b * args.stride + t) * args.OC + (which * args.NH + h) * HS;
    }
    template <int HS> __device__ const bf16* dout(const FlashArgs& args, int t) const {
        return args.dout + ((size_t)(b * args.T + t) * args.NH + h) * HS;
    }
    template <FlashBias Kind>
    __device__ const FlashQueries* queries(const FlashQueries* all, int tile, FlashFrom from) const {
        return all + (size_t)(bh * tiles + tile) * flash_variants(Kind) + from;
    }
    // The queries of tile m meet the tiles of keys from first_key_tile to end_key_tile - 1. The first is asked for with
    // every bias, though only two have spans: without this test ptxas spills in the dkdv kernel of another one
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
// Toeplitz

// B_ij: columns outside the table read its nearest end, and are masked
__device__ inline float flash_table(const FlashArgs& args, int h, int i, int j) {
    const int entry = clamp(args.table_zero + j - i, 0, args.table_entries - 1);
    return args.table[(size_t)h * args.table_entries + entry];
}

// The diagonals of a 64 x 64 tile of dlogit, two per thread: k and k + 64. The latter goes on in the next tile to the
// right as k. docs/attention.md, "The gradient of a Toeplitz table".
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
    // the sums of tile n; first: it has no tile to its left, whose diagonals would go on here
    __device__ void add(int n, bool first) const {
        const int k = threadIdx.x;
        if (k >= 64) { return; }
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

// dtable[b,h] is the sum of the query tiles' slabs, in order; columns that no distance reaches become 0.
template <bool Causal> __global__ void flash_backward_table_kernel(FlashArgs args, const float* slab) {
    const FlashBlock block(args, (int)gridDim.x / (args.B * args.NH));
    const int column = block.turn * blockDim.x + threadIdx.x;
    if (column >= args.table_entries) { return; }
    float sum = 0.0f;
    for (int m = 0; m < block.tiles; m++) {
        const int at = column - args.table_zero + m * FLASH_TILE + 63;      // where the column is in the slab of tile m
        const int begin = block.first_key_tile(args, m);
        const int end = block.template end_key_tile<Causal, FlashBias::Toeplitz>(args, m);
        const bool written = begin < end && at >= begin * FLASH_TILE && at < end * FLASH_TILE + 63;
        if (written) { sum += slab[((size_t)block.bh * block.tiles + m) * (block.tiles + 1) * FLASH_TILE + at]; }
    }
    args.dtable[(size_t)block.bh * args.table_entries + column] = sum;
}

// ----------------------------------------------------------------------------------------------------------
// row_dot, and what else the two kernels want of a query, gathered (B*NH,tiles,flash_variants), rows after T padded

template <FlashBias Kind, int HS>
__global__ void flash_backward_prepare_kernel(FlashQueries* queries, FlashArgs args) {
    constexpr int ROW_THREADS = HS / 8;                     // one per piece of 16 bytes
    const int rows = round_up(args.T, FLASH_TILE);
    const int C = args.NH * HS;
    const size_t row = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / ROW_THREADS;       // of (B,rows,NH)
    const size_t bt = row / args.NH;
    const size_t h = row % args.NH;
    const size_t b = bt / rows;
    const size_t t = bt % rows;
    const size_t bh = b * args.NH + h;
    // 1. row_dot = out.dout: a piece per thread, then the sum over the row's threads
    float row_dot = 0.0f;
    if (b < (size_t)args.B && t < (size_t)args.T) {
        const size_t at = (b * args.T + t) * C + h * HS + threadIdx.x % ROW_THREADS * 8;
        const FlashPiece out = *(const FlashPiece*)(args.out + at);
        const FlashPiece dout = *(const FlashPiece*)(args.dout + at);
        UNROLL
        for (int k = 0; k < 4; k++) {
            row_dot += unpack_lo(out.x[k]) * unpack_lo(dout.x[k]) + unpack_hi(out.x[k]) * unpack_hi(dout.x[k]);
        }
    }
    UNROLL
    for (int o = ROW_THREADS / 2; o > 0; o /= 2) { row_dot += shuffle_xor(row_dot, o); }
    if (b >= (size_t)args.B || threadIdx.x % ROW_THREADS != 0) { return; }
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
