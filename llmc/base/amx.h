// base/amx.h -- products of bf16 by AMX, the instructions of some Intel processors that multiply tiles.
//
// A tile register holds 16 rows of 64 bytes: 16 float32, or 16 words of two bf16. One instruction, TDPBF16PS, adds to a
// tile of C (16,16) the product of a tile of A, whose row m has 32 k of A's row m, and a tile of B, whose row p has in
// word n the k 2p and 2p + 1 of B's column n. For each element of C it sums the even k, then the odd k, each by fma in
// ascending order from 0, and adds both together to the element; denormals are zero. base/gemm.h states the same order.
//
// A fragment of C is 2 x 2 tiles, so that each tile that is loaded is used twice.
#pragma once

#include "matrix.cuh"
#include "words.h"

constexpr int TILE = 16;                                // rows of a tile and words of a row
constexpr int TILE_K = 2 * TILE;

#if defined(__AMX_BF16__) || defined(__AMXBF16__)         // the latter: clang++ before 16
#include <sys/syscall.h>
constexpr bool AMX_TILES = true;                        // the compiler knows them

// Whether the kernel lets this process use the tiles: it must be asked once, because their state is large.
inline bool amx_permitted() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    static const bool permitted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
    return permitted;
}

// The registers: 0 to 3 hold the fragment of C, row by row of tiles, 4 and 5 two tiles of A, 6 and 7 two of B. The
// compiler does not know which memory these instructions read and write, so barriers stand between them and its own.
struct AmxTiles {
    static void begin() {
        struct alignas(64) Config {
            uint8_t palette = 1;
            uint8_t start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int t = 0; t < 8; t++) {
            config.row_bytes[t] = 4 * TILE;
            config.rows[t] = TILE;
        }
        _tile_loadconfig(&config);
    }
    static void end() { _tile_release(); }
    // c (32,32), whose rows are `stride` elements apart
    static void load(const float* c, int stride) {
        asm volatile("" ::: "memory");
        _tile_loadd(0, c, 4 * stride);
        _tile_loadd(1, c + TILE, 4 * stride);
        _tile_loadd(2, c + (size_t)TILE * stride, 4 * stride);
        _tile_loadd(3, c + (size_t)TILE * stride + TILE, 4 * stride);
    }
    static void store(float* c, int stride) {
        _tile_stored(0, c, 4 * stride);
        _tile_stored(1, c + TILE, 4 * stride);
        _tile_stored(2, c + (size_t)TILE * stride, 4 * stride);
        _tile_stored(3, c + (size_t)TILE * stride + TILE, 4 * stride);
        asm volatile("" ::: "memory");
    }
    // C += a b for 32 k: two tiles of A, two tiles of B
    static void multiply(const uint32_t* a, const uint32_t* b) {
        _tile_loadd(4, a, 4 * TILE);
        _tile_loadd(6, b, 4 * TILE);
        _tile_loadd(7, b + TILE * TILE, 4 * TILE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + TILE * TILE, 4 * TILE);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
};
#else
constexpr bool AMX_TILES = false;
struct AmxTiles;
inline bool amx_permitted() { return false; }
#endif

// A tile (16 words, 16 columns) = the columns of B (at most 32 k, at most 16 columns); what is missing becomes 0. Its
// rows are k's words, or, Turned, the columns.
template <bool Turned> inline void pack_tile(uint32_t* tile, const Matrix<const bf16>& B) {
    uint32_t edge[TILE][TILE];                          // (columns, words): a tile that is not whole
    Matrix<const bf16> from = B;
    if (B.rows < TILE_K || B.cols < TILE) {
        memset(edge, 0, sizeof(edge));
        for (int c = 0; c < B.cols; c++) {
            for (int k = 0; k < B.rows; k++) { edge[c][k / 2] |= (uint32_t)B(k, c).bits << (k % 2 * 16); }
        }
        from = transposed(view((const bf16*)edge, TILE, TILE_K));
    }
    for (int p = 0; p < TILE; p += LANES) {             // squares of LANES words and columns
        for (int c = 0; c < TILE; c += LANES) {
            lanes x[LANES];
            const bool by_column = from.row_stride == 1;
            for (int i = 0; i < LANES; i++) {
                if (by_column) { x[i] = load_words(&from(2 * p, c + i)); continue; }
                words pairs;
                for (int e = 0; e < LANES; e++) {
                    pairs[e] = from(2 * (p + i), c + e).bits | (uint32_t)from(2 * (p + i) + 1, c + e).bits << 16;
                }
                x[i] = (lanes)pairs;
            }
            if (by_column != Turned) { transpose(x); }
            uint32_t* to = tile + (Turned ? c * TILE + p : p * TILE + c);
            for (int i = 0; i < LANES; i++) { memcpy(to + i * TILE, &x[i], sizeof(lanes)); }
        }
    }
}

// How gemm() packs panels and multiplies them by tiles: of each 32 k of a panel first the tile of rows or columns 0 to
// 15, then that of 16 to 31
template <class Tiles> struct GemmTiles {
    static constexpr int ROWS = 2 * TILE, COLUMNS = 2 * TILE;
    static void begin() { Tiles::begin(); }
    static void end() { Tiles::end(); }
    template <bool Turned> static void pack(float* panel, const Matrix<const bf16>& B) {
        uint32_t* tile = (uint32_t*)panel;
        for (int k = 0; k < B.rows; k += TILE_K) {
            for (int c = 0; c < 2 * TILE; c += TILE, tile += TILE * TILE) {
                pack_tile<Turned>(tile, block(B, k, TILE_K, imin(c, B.cols), TILE));
            }
        }
    }
    static void pack_rows(float* panel, const Matrix<const bf16>& A_T) { pack<true>(panel, A_T); }
    static void pack_columns(float* panel, const Matrix<const bf16>& B) { pack<false>(panel, B); }
    static void multiply(const Matrix<float>& out, const float* a, const float* b, int K) {
        float edge[ROWS * COLUMNS];                     // a fragment that is not whole
        const bool whole = out.rows == ROWS && out.cols == COLUMNS;
        if (!whole) { memset(edge, 0, sizeof(edge)); }
        const Matrix<float> c = whole ? out : view(edge, ROWS, COLUMNS);
        for (int m = 0; m < out.rows && !whole; m++) { memcpy(c.row(m), out.row(m), sizeof(float) * out.cols); }
        Tiles::load(c.data, c.row_stride);
        for (int k = 0; k < K; k += TILE_K) {           // 512 words per panel
            Tiles::multiply((const uint32_t*)a + k * TILE, (const uint32_t*)b + k * TILE);
        }
        Tiles::store(c.data, c.row_stride);
        for (int m = 0; m < out.rows && !whole; m++) { memcpy(out.row(m), c.row(m), sizeof(float) * out.cols); }
    }
};
