// attention/flash/tiles.cuh -- what the tensor-core kernels of attention share: tiles in shared memory as operands of
// mma, and what a tile of keys brings for the bias.
//
// In all of flash/, lane = threadIdx.x % 32, group = lane / 4 and pair = lane % 4 (base/ptx.cuh). A warp owns `Rows`
// rows, 16 or 32, of its block's 64 or 128: with 32 a fragment that is read from shared memory feeds twice as many mma.
// Of these rows a lane has group + 8 own, own = 0 .. Rows/8 - 1, and of every 8 columns the two 2 pair + e, e = 0 or 1.
// An array [Rows/16][N][4] holds row group + 8 own, column 8 n + 2 pair + e at [own / 2][n][own % 2 * 2 + e]; an array
// [Rows/8] has one value per row. docs/attention.md, "Tiles and fragments".
#ifndef LLMC_ATTENTION_FLASH_TILES_CUH
#define LLMC_ATTENTION_FLASH_TILES_CUH

#include "../../cable.cuh"
#include "args.cuh"
#include "fire.cuh"

constexpr int FLASH_TILE = 64;              // rows of a tile that is streamed: divides CABLE_CHUNK
constexpr int FLASH_THREADS = 128;          // four warps of `Rows` rows
// rows that a block owns, and the tiles that these are: 1, or 2 in one chunk. A warp's rows are all in one tile
__host__ __device__ constexpr int flash_block_rows(int Rows) { return FLASH_THREADS / 32 * Rows; }
__host__ __device__ constexpr int flash_block_tiles(int Rows) { return flash_block_rows(Rows) / FLASH_TILE; }
static_assert(CABLE_CHUNK % flash_block_rows(32) == 0, "S of the rows that a block owns counts from one origin");
constexpr float LN2 = 0.6931471805599453f;

// tokens of sequence b that are not padding
__device__ inline int flash_tokens(const FlashArgs& args, int b) {
    const int n = args.kv_len == nullptr ? args.T : args.kv_len[b];
    return clamp(n, 0, args.T);
}

// where the document of query i of sequence b begins; queries after the last one are not used
__device__ inline int flash_begin(const FlashArgs& args, int b, int i) {
    return args.mask.of(b, args.stride).begin(imin(i, args.T - 1));
}

// ----------------------------------------------------------------------------------------------------------
// tiles in shared memory: rows of HS bf16, in pieces of 16 bytes; piece p of row r lies at p ^ (r & 7), so that the
// eight rows of one ldmatrix, all in one column of pieces, fall into different banks

struct alignas(16) FlashPiece {
    uint32_t x[4];                                          // 8 bf16
};
// element 8 * piece of a row
template <int HS> __device__ inline bf16* flash_at(bf16* tile, int row, int piece) {
    return tile + row * HS + ((piece ^ (row & 7)) << 3);
}

// Starts the copy of `Rows` rows of `columns` elements, `stride` elements apart in global memory; rows >= n become zero
// (n may be <= 0), and so do columns .. HS-1. All `Threads` threads of the block call it; the caller commits, waits and
// synchronizes.
template <int HS, int Rows = FLASH_TILE, int Threads = FLASH_THREADS>
__device__ inline void flash_load_tile(bf16* tile, const bf16* from, int stride, int columns, int n) {
    constexpr int PIECES = HS / 8, STEP = Threads / PIECES;     // of a row; rows that the block copies at a time
    static_assert(Threads % PIECES == 0 && Rows % STEP == 0, "each thread copies one column of pieces");
    const int piece = threadIdx.x % PIECES;
    const int row0 = threadIdx.x / PIECES;
    from += row0 * stride + piece * 8;          // registers are scarce: one pointer, also for rows that are not read
    n = piece * 8 < columns ? n : 0;
    UNROLL
    for (int r = 0; r < Rows; r += STEP) {
        cp_async_16(flash_at<HS>(tile, row0 + r, piece), from, row0 + r < n);
        from += STEP * stride;
    }
}

// Operands of mma_m16n8k16 from such a tile; the last index counts 16 columns. LD: the tile's row length; row0, n0, k0:
// multiples of 8. Piece 2 k + high of a row, from an address that is the same for all k: one for each k would take
// registers.
template <int LD> __device__ inline const void* flash_operand(const bf16* tile, int row, int k, int high) {
    const int piece = high ^ (row & 7);                 // for k = 0; the xor with 2 (k % 4) follows, in bytes
    return (const char*)(tile + row * LD + k / 4 * 64) + (piece * 16 ^ k % 4 * 32);
}
// A (16 x 16): rows row0 .. row0+15, columns 16k .. 16k+15
template <int LD> __device__ inline void flash_load_a(uint32_t (&r)[4], const bf16* tile, int row0, int k) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(r, flash_operand<LD>(tile, row0 + lane % 16, k, lane / 16));
}
// B of two mma (k 16 x n 8 each) where the tile's rows are n: rows n0 .. n0+7 give r[0], r[1], rows n0+8 .. n0+15 r[2],
// r[3]; columns 16k .. 16k+15 are k. (scores = Q K^T: the tile is K.)
template <int LD> __device__ inline void flash_load_b(uint32_t (&r)[4], const bf16* tile, int n0, int k) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(r, flash_operand<LD>(tile, n0 + lane / 16 * 8 + lane % 8, k, lane / 8 % 2));
}
// B of two mma where the tile's rows are k: rows k0 .. k0+15; columns 16n .. 16n+7 give r[0], r[1], 16n+8 .. 16n+15
// r[2], r[3]. (out = P V: the tile is V.)
template <int LD> __device__ inline void flash_load_b_trans(uint32_t (&r)[4], const bf16* tile, int k0, int n) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4_trans(r, flash_operand<LD>(tile, k0 + lane % 16, n, lane / 16));
}

// The fragments of a warp's rows as left operand, 16 columns each: the first `Kept` stay in registers, the rest are
// read from shared memory each time. row0: the warp's first row in the tile
template <int HS, int Rows, int Kept> struct FlashOwned {
    static constexpr int ALL = HS / 16;
    uint32_t fragment[Rows / 16][Kept < ALL ? Kept + 1 : ALL][4];

    __device__ void load(const bf16* tile, int row0) {      // once, when the tile has arrived
        UNROLL
        for (int k = 0; k < Kept; k++) { load_columns(tile, row0, k); }
    }
    __device__ void use(const bf16* tile, int row0, int k) {        // before the mma of columns 16k .. 16k + 15
        if (k >= Kept) { load_columns(tile, row0, k); }
    }
    __device__ const uint32_t (&operator()(int group, int k) const)[4] { return fragment[group][imin(k, Kept)]; }

  private:
    __device__ void load_columns(const bf16* tile, int row0, int k) {
        UNROLL
        for (int group = 0; group < Rows / 16; group++) {
            flash_load_a<HS>(fragment[group][imin(k, Kept)], tile, row0 + 16 * group, k);
        }
    }
};

// The results of mma, float32: (Rows, Columns) of a warp. A lane's part has its rows group + 8 own and of every 8
// columns its two
template <int Rows, int Columns> struct FlashFragment {
    static constexpr int GROUPS = Rows / 16;                // of 16 rows: the height of an mma
    static constexpr int N = Columns / 8;
    float x[GROUPS][N][4];

    // the lane's two neighbours in row `own` and the n-th 8 columns
    __device__ float* pair(int own, int n) { return x[own / 2][n] + own % 2 * 2; }
    // all of the lane's part, with the row `own` and the column of each
    static constexpr int SIZE = GROUPS * N * 4;
    __device__ float& operator[](int e) { return x[e / (4 * N)][e / 4 % N][e % 4]; }
    __device__ float operator[](int e) const { return x[e / (4 * N)][e / 4 % N][e % 4]; }
    __device__ static int own(int e) { return e / (4 * N) * 2 + e % 4 / 2; }
    __device__ static int column(int e) { return e / 4 % N * 8 + (int)threadIdx.x % 4 * 2 + e % 2; }

    __device__ void clear() {
        UNROLL
        for (int e = 0; e < SIZE; e++) { (*this)[e] = 0.0f; }
    }
    // = the owned rows times the rows from `row` on of a tile, transposed
    template <int HS, int Kept>
    __device__ void multiply_transposed(FlashOwned<HS, Rows, Kept>& owned, const bf16* own_tile, int row0,
                                        const bf16* tile, int row) {
        clear();
        UNROLL
        for (int k = 0; k < HS / 16; k++) {
            owned.use(own_tile, row0, k);
            UNROLL
            for (int n = 0; n < N; n += 2) {                // 16 rows of the tile: two mma per group
                uint32_t b[4];
                flash_load_b<HS>(b, tile, row + n * 8, k);
                UNROLL
                for (int group = 0; group < GROUPS; group++) {
                    mma_m16n8k16(x[group][n], owned(group, k), b[0], b[1]);
                    mma_m16n8k16(x[group][n + 1], owned(group, k), b[2], b[3]);
                }
            }
        }
    }
    // += 16 columns of `weights`, from 8 n on, rounded to bf16, times the 16 rows from `row` on of a tile. What a lane
    // holds of a result is what it gives as left operand: docs/attention.md, "Tiles and fragments"
    template <int Inner>
    __device__ void add_product(const FlashFragment<Rows, Inner>& weights, int n, const bf16* tile, int row) {
        uint32_t a[GROUPS][4];
        UNROLL
        for (int group = 0; group < GROUPS; group++) {
            const float (&left)[4] = weights.x[group][n];
            const float (&right)[4] = weights.x[group][n + 1];
            a[group][0] = pack_bf16(left[0], left[1]);
            a[group][1] = pack_bf16(left[2], left[3]);
            a[group][2] = pack_bf16(right[0], right[1]);
            a[group][3] = pack_bf16(right[2], right[3]);
        }
        UNROLL
        for (int c = 0; c < N / 2; c++) {                   // 16 columns: two mma per group
            uint32_t b[4];
            flash_load_b_trans<Columns>(b, tile, row, c);
            UNROLL
            for (int group = 0; group < GROUPS; group++) {
                mma_m16n8k16(x[group][2 * c], a[group], b[0], b[1]);
                mma_m16n8k16(x[group][2 * c + 1], a[group], b[2], b[3]);
            }
        }
    }
    // to (rows, columns) = the block's rows, each times its factor, by way of the warp's own rows of a tile that nobody
    // else reads any more: global memory sees stores of 16 bytes
    __device__ void store(bf16* to, int stride, int rows, int columns, bf16* tile, const float (&factor)[Rows / 8]) {
        const int lane = threadIdx.x % 32;
        const int row0 = threadIdx.x / 32 * Rows;
        syncwarp();                                         // the warp has read its operands from these rows
        UNROLL
        for (int own = 0; own < Rows / 8; own++) {
            UNROLL
            for (int n = 0; n < N; n++) {
                const float* sum = pair(own, n);
                bf16* piece = flash_at<Columns>(tile, row0 + lane / 4 + 8 * own, n) + lane % 4 * 2;
                *(uint32_t*)piece = pack_bf16(factor[own] * sum[0], factor[own] * sum[1]);
            }
        }
        syncwarp();                                         // the rows are complete
        for (int e = lane; e < Rows * N; e += 32) {         // neighbouring lanes, neighbouring pieces
            const int row = row0 + e / N;
            const int piece = e % N;
            const FlashPiece* from = (const FlashPiece*)flash_at<Columns>(tile, row, piece);
            if (row < rows && piece * 8 < columns) { *(FlashPiece*)(to + (size_t)row * stride + piece * 8) = *from; }
        }
    }
};

// the sum over the four lanes that share a row
__device__ inline float quad_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

// ----------------------------------------------------------------------------------------------------------
// What a tile of keys brings for the bias, in shared memory:
//   Linear, Distance, LogDistance: a FlashKeyS for each of the tiles that the block owns: S counts from another key
//                                  where a tile meets itself
//   Toeplitz:                      [t] B / scale at j - i = j0 - i0 + t - (rows of the block - 1)
//   Fire:                          [t] psi at that distance
__host__ __device__ constexpr bool flash_has_S(FlashBias Kind) {
    return Kind == FlashBias::Linear || flash_is_cable(Kind);
}
__host__ __device__ constexpr bool flash_has_table(FlashBias Kind) {
    return Kind == FlashBias::Toeplitz || Kind == FlashBias::Fire;
}
struct FlashKeyS {
    float S[FLASH_TILE];        // sign (S_j - S_ref)
    float shift[2];             // what makes sign (S_i - S_ref) of the row's sign S_i, in two parts
    float sign;                 // -1 right of the queries: there S_j - S_ref grows with the distance to them
    float unused;
};
__host__ __device__ constexpr int flash_tile_bias_floats(int Rows) {
    const int keys = (int)(sizeof(FlashKeyS) / sizeof(float)) * flash_block_tiles(Rows);
    const int table = flash_block_rows(Rows) + FLASH_TILE;
    return keys > table ? keys : table;
}

// The key of tile n (64 keys) from which S is counted: the nearest to the queries of tile m. On the diagonal there is
// none (-1), and S counts from its chunk: the difference of two neighbours is then exact. docs/attention.md, "Where S
// is counted from".
__device__ inline int flash_reference(int n, int m) {
    if (n == m) { return -1; }
    return n < m ? n * FLASH_TILE + FLASH_TILE - 1 : n * FLASH_TILE;
}

// S of row i for the tiles: for Linear the position in its tile, for CABLE the offset in its chunk
template <FlashBias Kind> __device__ inline float flash_row_S(const FlashArgs& args, int bh, int i) {
    if (Kind == FlashBias::Linear) { return (float)(i % FLASH_TILE); }
    if (!flash_is_cable(Kind)) { return 0.0f; }
    return args.S_offset[(size_t)bh * args.stride + (i < args.T ? i : 0)];
}
// What a row's distances are multiplied by to be in the unit of the score, q.k without its scale. LogDistance: what its
// logarithms, in units of log2, are. Fire: what its psi is multiplied by
template <FlashBias Kind> __device__ inline float flash_row_slope(const FlashArgs& args, int bh, int i) {
    if (Kind == FlashBias::Fire) { return args.inv[imin(i, args.T)]; }
    if (Kind == FlashBias::Linear) { return args.slopes[bh % args.NH] / args.scale; }
    if (!flash_is_cable(Kind) || i >= args.T) { return 0.0f; }
    const float g = args.g[(size_t)bh * args.stride + i];
    if (Kind == FlashBias::Distance) { return g / args.scale; }
    return (args.inside ? 1.0f : g) * (LN2 / args.scale);
}
// LogDistance: what the distances inside the logarithm are multiplied by
template <FlashBias Kind> __device__ inline float flash_row_inner(const FlashArgs& args, int bh, int i) {
    if (Kind != FlashBias::LogDistance || i >= args.T || !args.inside) { return 1.0f; }
    return args.g[(size_t)bh * args.stride + i];
}
// log2(1 + a^2), finite for any a
__device__ inline float flash_log(float a) {
    a = fminf(fabsf(a), 1e18f);
    return lg2(1.0f + a * a);
}

// What a thread brings, in two parts that are subtracted when they have arrived: no warp waits for the loads of the
// next tile. Toeplitz, Fire: entries t and t + 128.
struct FlashTileBias {
    float value, minus;
};
// This thread's, of a block that owns queries from tile m0 on; keys of tile n. `to`: the stage of that tile, where the
// first threads leave the shifts at once
template <FlashBias Kind, int Rows>
__device__ inline FlashTileBias flash_fetch_bias(float* to, const FlashArgs& args, int bh, int m0, int n) {
    constexpr bool has_S = flash_has_S(Kind);
    constexpr int tiles = flash_block_tiles(Rows);
    const int t = threadIdx.x;
    const int i0 = m0 * FLASH_TILE;
    const int j0 = n * FLASH_TILE;
    if (flash_has_table(Kind)) {
        const float* table = args.table;
        const float unit = Kind == FlashBias::Toeplitz ? args.scale : 1.0f;
        if (Kind == FlashBias::Toeplitz) { table += (size_t)(bh % args.NH) * args.table_entries; }
        const int first = args.table_zero + j0 - i0 + t - (flash_block_rows(Rows) - 1);
        const float value = table[clamp(first, 0, args.table_entries - 1)] / unit;
        if (tiles == 1) { return {value, 0.0f}; }
        return {value, table[clamp(first + FLASH_THREADS, 0, args.table_entries - 1)] / unit};
    }
    if (!has_S || t >= tiles * FLASH_TILE) { return {0.0f, 0.0f}; }
    const float* S = flash_is_cable(Kind) ? args.S_offset + (size_t)bh * args.stride : nullptr;
    if (t < tiles * 2) {                                    // the shifts: two parts for each tile that is owned
        FlashKeyS* tile = (FlashKeyS*)to + t / 2;
        const int reference = imin(flash_reference(n, m0 + t / 2), args.T - 1);     // a tile may begin after T
        float high = (float)(i0 + t / 2 * FLASH_TILE - reference);          // Linear: S is the position
        float low = 0.0f;
        if (flash_is_cable(Kind)) {
            // Origins and S_ref are added in float64 and handed over in two float32 parts: they cancel in a tile next
            // to the queries', and in one to the right of it the first part cancels with the row's S.
            const double* origin = args.S_origin + (size_t)bh * ceil_div(args.stride, CABLE_CHUNK);
            const double S_reference = reference < 0 ? 0.0 : (double)S[reference];
            const double shift = origin[i0 / CABLE_CHUNK] - origin[j0 / CABLE_CHUNK] - S_reference;
            high = (float)shift;
            low = (float)(shift - (double)high);
        }
        tile->sign = n > m0 + t / 2 ? -1.0f : 1.0f;
        tile->shift[t % 2] = tile->sign * (t % 2 == 0 ? high : low);
    }
    const int reference = imin(flash_reference(n, m0 + t / FLASH_TILE), args.T - 1);
    const int j = j0 + t % FLASH_TILE;
    const bool right = n > m0 + t / FLASH_TILE;
    if (Kind == FlashBias::Linear) { return {(float)(right ? reference - j : j - reference), 0.0f}; }
    const float S_key = S[j < args.T ? j : j0];
    const float S_reference = reference < 0 ? 0.0f : S[reference];
    return right ? FlashTileBias{S_reference, S_key} : FlashTileBias{S_key, S_reference};
}
// when they have arrived
template <FlashBias Kind, int Rows> __device__ inline void flash_put_bias(float* to, const FlashTileBias& bias) {
    const int t = threadIdx.x;
    if (flash_has_table(Kind)) {
        to[t] = bias.value;
        if (t < flash_tile_bias_floats(Rows) - FLASH_THREADS) { to[FLASH_THREADS + t] = bias.minus; }
    } else if (Kind != FlashBias::None && t < flash_block_tiles(Rows) * FLASH_TILE) {
        ((FlashKeyS*)to)[t / FLASH_TILE].S[t % FLASH_TILE] = bias.value - bias.minus;
    }
}

#endif
