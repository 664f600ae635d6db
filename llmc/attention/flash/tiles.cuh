// attention/flash/tiles.cuh -- what the tensor-core kernels of attention share: tiles in shared memory as operands of mma, and what a tile of keys brings for the bias.
#ifndef LLMC_ATTENTION_FLASH_TILES_CUH
#define LLMC_ATTENTION_FLASH_TILES_CUH

#include "../../position/cable.cuh"
#include "args.cuh"

// ----------------------------------------------------------------------------------------------------------
// tiles in shared memory: rows of HS bf16, in chunks of 16 bytes; chunk c of row r lies at c ^ (r & 7), so that the eight rows of
// one ldmatrix, all in one column, fall into different banks

constexpr int FLASH_TILE = 64;              // queries of a block, keys of a tile: divides CABLE_CHUNK
constexpr int FLASH_THREADS = 128;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

// the element 8 * chunk of a row
template <int HS> __device__ inline bf16* flash_at(bf16* tile, int row, int chunk) { return tile + row * HS + ((chunk ^ (row & 7)) << 3); }
template <int HS> __device__ inline const bf16* flash_at(const bf16* tile, int row, int chunk) {
    return tile + row * HS + ((chunk ^ (row & 7)) << 3);
}

// Starts the copy of `Rows` rows of HS elements, `stride` elements apart in global memory; rows >= n become zero (n may be <= 0).
// All `Threads` threads of the block call it; the caller commits, waits and synchronizes.
template <int HS, int Rows = FLASH_TILE, int Threads = FLASH_THREADS>
__device__ inline void flash_load_tile(bf16* tile, const bf16* from, int stride, int n) {
    constexpr int CHUNKS = HS / 8, STEP = Threads / CHUNKS;
    static_assert(Threads % CHUNKS == 0 && Rows % STEP == 0, "each thread copies one column of chunks");
    const int chunk = threadIdx.x % CHUNKS, row0 = threadIdx.x / CHUNKS;
    from += row0 * stride + chunk * 8;                  // registers are short: one pointer, also for rows that are not read
    UNROLL
    for (int r = 0; r < Rows; r += STEP) {
        cp_async_16(flash_at<HS>(tile, row0 + r, chunk), from, row0 + r < n);
        from += STEP * stride;
    }
}

// Operands of mma_m16n8k16 from such a tile; the second index counts 16 columns. LD: the tile's row length; row0, n0, k0: multiples
// of 8. Chunk 2 k + high of a row, from an address that is the same for all k: each k's own would take registers.
template <int LD> __device__ inline const void* flash_operand(const bf16* tile, int row, int k, int high) {
    const int chunk = high ^ (row & 7);
    return (const char*)(tile + row * LD + k / 4 * 64) + (chunk * 16 ^ k % 4 * 32);
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
// B of two mma (k 16 x n 8 each) where the tile's rows are n: rows n0 .. n0+7 give r[0], r[1], rows n0+8 .. n0+15 r[2], r[3];
// columns 16k .. 16k+15 are k. (S = Q K^T: the tile is K.)
template <int LD> __device__ inline void flash_load_b(uint32_t (&r)[4], const bf16* tile, int n0, int k) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(r, flash_operand<LD>(tile, n0 + lane / 16 * 8 + lane % 8, k, lane / 8 % 2));
}
// B of two mma where the tile's rows are k: rows k0 .. k0+15; columns 16n .. 16n+7 give r[0], r[1], 16n+8 .. 16n+15 r[2], r[3].
// (O = P V: the tile is V.)
template <int LD> __device__ inline void flash_load_b_trans(uint32_t (&r)[4], const bf16* tile, int k0, int n) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4_trans(r, flash_operand<LD>(tile, k0 + lane % 16, n, lane / 16));
}

// tokens of sequence b that are no padding
__device__ inline int flash_tokens(const FlashArgs& p, int b) {
    const int n = p.kv_len == nullptr ? p.T : p.kv_len[b];
    return n < 0 ? 0 : n < p.T ? n : p.T;
}

// ----------------------------------------------------------------------------------------------------------
// what a tile of keys brings for the bias: 128 floats in shared memory, one a thread
//   Linear, Distance, LogDistance: [t] S_j - S_ref of key j0 + t (t < 64),  [64] + [65]: what makes S_i - S_ref of the row's S
//   Toeplitz: [t] B / scale at j - i = j0 - i0 + t - 63

constexpr int FLASH_SIDE = 128;

// The key of tile n (64 keys) from which S is counted: the nearest to the queries of block m. On the diagonal none (-1), S is the
// chunk's: the difference of two neighbours is then exact.
__device__ inline int flash_reference(int n, int m) { return n == m ? -1 : n < m ? n * FLASH_TILE + FLASH_TILE - 1 : n * FLASH_TILE; }

// S of row i as the tiles want it, and the factor of its distances in units of the score (LogDistance: g itself)
template <FlashBias K> __device__ inline float flash_row_S(const FlashArgs& p, int bh, int i, int i0) {
    if (K == FlashBias::Linear) { return (float)(i - i0); }
    return K == FlashBias::Distance || K == FlashBias::LogDistance ? p.S_offset[(size_t)bh * p.stride + (i < p.T ? i : 0)] : 0.0f;
}
template <FlashBias K> __device__ inline float flash_row_slope(const FlashArgs& p, int bh, int i) {
    if (K == FlashBias::Linear) { return p.slopes[bh % p.NH] / p.scale; }
    if (K != FlashBias::Distance && K != FlashBias::LogDistance) { return 0.0f; }
    return i < p.T ? p.g[(size_t)bh * p.stride + i] / (K == FlashBias::Distance ? p.scale : 1.0f) : 0.0f;
}

// Thread t's value, in two parts that are subtracted when they have arrived: no warp waits for the loads of the next tile.
struct FlashSide { float value, minus; };
template <FlashBias K> __device__ inline FlashSide flash_side(const FlashArgs& p, int bh, int i0, int j0, int reference, int t) {
    if (K == FlashBias::Linear) { return {(float)(t < FLASH_TILE ? j0 + t - reference : t == FLASH_TILE ? i0 - reference : 0), 0.0f}; }
    if (K == FlashBias::Toeplitz) {
        int at = p.table_zero + j0 - i0 + t - (FLASH_TILE - 1);
        at = at < 0 ? 0 : at < p.table_entries ? at : p.table_entries - 1;
        return {p.table[(size_t)(bh % p.NH) * p.table_entries + at] / p.scale, 0.0f};
    }
    if (K == FlashBias::None) { return {0.0f, 0.0f}; }
    const float* S = p.S_offset + (size_t)bh * p.stride;
    const float S_reference = reference < 0 ? 0.0f : S[reference];
    if (t < FLASH_TILE) { return {S[j0 + t < p.T ? j0 + t : j0], S_reference}; }
    if (t > FLASH_TILE + 1) { return {0.0f, 0.0f}; }
    // origins and S_ref together in float64, and in two parts: next to the tile they cancel, to its right the first with the row's S
    const double* origin = p.S_origin + (size_t)bh * ceil_div(p.stride, CABLE_CHUNK);
    const double shift = origin[i0 / CABLE_CHUNK] - origin[j0 / CABLE_CHUNK] - (double)S_reference;
    const float high = (float)shift;
    return {t == FLASH_TILE ? high : (float)(shift - (double)high), 0.0f};
}

#endif
