// attention/flash/tiles.cuh -- what the tensor-core kernels of attention share: tiles in shared memory as operands of
// mma, and what a tile of keys brings for the bias.
//
// In all of flash/, lane = threadIdx.x % 32, group = lane / 4 and pair = lane % 4 (base/ptx.cuh). A warp owns 16 rows
// of its block's tile. Of these a lane has the rows group and group + 8, `half` 0 and 1, and of every 8 columns the two
// 2 pair + e, e = 0 or 1. An array [N][4] of such a warp holds row group + 8 half, column 8 n + 2 pair + e at
// [n][2 half + e]; an array [2] has one value per half. docs/attention.md, "Tiles and fragments".
#ifndef LLMC_ATTENTION_FLASH_TILES_CUH
#define LLMC_ATTENTION_FLASH_TILES_CUH

#include "../../position/cable.cuh"
#include "args.cuh"

constexpr int FLASH_TILE = 64;              // queries of a block, keys of a tile: divides CABLE_CHUNK
constexpr int FLASH_THREADS = 128;          // four warps of 16 rows
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

// tokens of sequence b that are not padding
__device__ inline int flash_tokens(const FlashArgs& args, int b) {
    const int n = args.kv_len == nullptr ? args.T : args.kv_len[b];
    return clamp(n, 0, args.T);
}

// ----------------------------------------------------------------------------------------------------------
// tiles in shared memory: rows of HS bf16, in pieces of 16 bytes; piece p of row r lies at p ^ (r & 7), so that the
// eight rows of one ldmatrix, all in one column of pieces, fall into different banks

// element 8 * piece of a row
template <int HS> __device__ inline bf16* flash_at(bf16* tile, int row, int piece) {
    return tile + row * HS + ((piece ^ (row & 7)) << 3);
}
template <int HS> __device__ inline const bf16* flash_at(const bf16* tile, int row, int piece) {
    return tile + row * HS + ((piece ^ (row & 7)) << 3);
}

// Starts the copy of `Rows` rows of HS elements, `stride` elements apart in global memory; rows >= n become zero (n may
// be <= 0). All `Threads` threads of the block call it; the caller commits, waits and synchronizes.
template <int HS, int Rows = FLASH_TILE, int Threads = FLASH_THREADS>
__device__ inline void flash_load_tile(bf16* tile, const bf16* from, int stride, int n) {
    constexpr int PIECES = HS / 8, STEP = Threads / PIECES;     // of a row; rows that the block copies at a time
    static_assert(Threads % PIECES == 0 && Rows % STEP == 0, "each thread copies one column of pieces");
    const int piece = threadIdx.x % PIECES;
    const int row0 = threadIdx.x / PIECES;
    from += row0 * stride + piece * 8;          // registers are short: one pointer, also for rows that are not read
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
// A (16 x 16) of the transposed tile: the tile's rows k0 .. k0+15 are A's columns, its columns 16m .. 16m+15 A's rows
template <int LD> __device__ inline void flash_load_a_trans(uint32_t (&r)[4], const bf16* tile, int k0, int m) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4_trans(r, flash_operand<LD>(tile, k0 + lane / 16 * 8 + lane % 8, m, lane / 8 % 2));
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

// ----------------------------------------------------------------------------------------------------------
// what a tile of keys brings for the bias: 128 floats in shared memory, one per thread
//   Linear, Distance, LogDistance: [t] S_j - S_ref of key j0 + t (t < 64)
//                                  [64] + [65] what makes S_i - S_ref of the row's S
//   Toeplitz:                      [t] B / scale at j - i = j0 - i0 + t - 63

constexpr int FLASH_TILE_BIAS = 128;

// The key of tile n (64 keys) from which S is counted: the nearest to the queries of tile m. On the diagonal there is
// none (-1), and S counts from its chunk: the difference of two neighbours is then exact. docs/attention.md, "Where S
// is counted from".
__device__ inline int flash_reference(int n, int m) {
    if (n == m) { return -1; }
    return n < m ? n * FLASH_TILE + FLASH_TILE - 1 : n * FLASH_TILE;
}

// S of row i as the tiles want it: of Linear the position in its tile, of CABLE the offset in its chunk
template <FlashBias Kind> __device__ inline float flash_row_S(const FlashArgs& args, int bh, int i, int i0) {
    if (Kind == FlashBias::Linear) { return (float)(i - i0); }
    if (!flash_is_cable(Kind)) { return 0.0f; }
    return args.S_offset[(size_t)bh * args.stride + (i < args.T ? i : 0)];
}
// What a row's distances are multiplied by to be in the unit of the score, q.k without its scale. LogDistance: what its
// logarithms, in units of log2, are
template <FlashBias Kind> __device__ inline float flash_row_slope(const FlashArgs& args, int bh, int i) {
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

// Thread t's value, in two parts that are subtracted when they have arrived: no warp waits for the loads of the next
// tile.
struct FlashTileBias {
    float value, minus;
};
// queries from i0, keys from j0; reference: a key, or -1
template <FlashBias Kind>
__device__ inline FlashTileBias flash_tile_bias(const FlashArgs& args, int bh, int i0, int j0, int reference, int t) {
    if (Kind == FlashBias::None) { return {0.0f, 0.0f}; }
    if (Kind == FlashBias::Linear) {                        // S is the position
        if (t < FLASH_TILE) { return {(float)(j0 + t - reference), 0.0f}; }
        return {(float)(t == FLASH_TILE ? i0 - reference : 0), 0.0f};
    }
    if (Kind == FlashBias::Toeplitz) {
        const int entry = clamp(args.table_zero + j0 - i0 + t - (FLASH_TILE - 1), 0, args.table_entries - 1);
        return {args.table[(size_t)(bh % args.NH) * args.table_entries + entry] / args.scale, 0.0f};
    }
    const float* S = args.S_offset + (size_t)bh * args.stride;
    const float S_reference = reference < 0 ? 0.0f : S[reference];
    if (t < FLASH_TILE) { return {S[j0 + t < args.T ? j0 + t : j0], S_reference}; }
    if (t > FLASH_TILE + 1) { return {0.0f, 0.0f}; }
    // Origins and S_ref are added in float64 and handed over in two float32 parts: they cancel in a tile next to the
    // queries', and in one to the right of it the first part cancels with the row's S.
    const double* origin = args.S_origin + (size_t)bh * ceil_div(args.stride, CABLE_CHUNK);
    const double shift = origin[i0 / CABLE_CHUNK] - origin[j0 / CABLE_CHUNK] - (double)S_reference;
    const float high = (float)shift;
    return {t == FLASH_TILE ? high : (float)(shift - (double)high), 0.0f};
}

#endif
