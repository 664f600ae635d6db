// base/gemm.h -- the product of two matrices on a CPU, by one thread.
//
//   out_mn += sum over k of A_mk B_kn          A and B are float32 or bf16, out is float32
//
// The order of each sum is fixed; it does not depend on the width of a register, on tiles or on threads. k is cut into
// slices, whose sums are added to out one after the other.
//   float32   A slice has 256 k. Its sum starts at 0 and takes its k in ascending order, sum = fma(A_mk, B_kn, sum).
//   bf16      A slice has 32 k, the last slice filled up with zeros. Its even k have a sum, its odd k another, and both
//             are added, as an instruction of AMX does it (below); other processors do it in float32.
//
// GEMM_K of the k at a time are copied into panels of GEMM_M rows of A or GEMM_N columns of B, whose elements lie in
// the order in which the inner loop reads them, so that a transposed matrix costs no more. The inner loop keeps a
// fragment of out, GEMM_M x GEMM_N, in registers: for each k it loads a row of B's panel and multiplies it by GEMM_M
// numbers of A's panel. One panel of B stays in the first-level cache; the panels of A come from the second.
// dev/cuda/matmul.cu climbs here from three plain loops.
#pragma once

#include <utility>

#include "matrix.cuh"

constexpr int GEMM_K = 256;
// The bits depend only on these numbers: the k of a slice, the sums that take them in turn, and the multiple to which
// zeros extend K
template <class T> constexpr int GEMM_SLICE = sizeof(T) == sizeof(float) ? GEMM_K : 32;
template <class T> constexpr int GEMM_CHAINS = sizeof(float) / sizeof(T);
template <class T> constexpr int GEMM_MULTIPLE = sizeof(T) == sizeof(float) ? 1 : GEMM_SLICE<T>;
// Sums take 24 of AVX-512's 32 registers (16 lanes), 12 of AVX's 16 registers (8 lanes), else 8
constexpr int GEMM_M = LANES == 4 ? 4 : 3 * LANES / 4;
constexpr int GEMM_N = 2 * LANES;
constexpr int WIDEST_PANEL = 32;

// The floats that gemm() needs for its panels, for at most M rows of output
inline size_t gemm_panels(int M) { return (size_t)GEMM_K * (M + 2 * WIDEST_PANEL); }

// ----------------------------------------------------------------------------------------------------------
// registers of 32-bit words, and squares of words transposed in registers. A word is a float32, or two neighbouring
// bf16 with the first in the lower half.

// LANES words
template <class T> inline lanes load_words(const T* p) { return load_lanes((const float*)p); }
// Element E of each word, as float32
template <class T, int E> inline lanes element(lanes x) {
    if constexpr (sizeof(T) == sizeof(float)) { return x; }
    return (lanes)(E == 0 ? (lane_words)x << 16 : (lane_words)x & 0xffff0000u);
}
// The lanes I of a and b; b's lanes are counted from LANES on
template <int... I> inline lanes choose_lanes(lanes a, lanes b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, I...);
#else
    typedef int numbers __attribute__((vector_size(4 * LANES)));
    return __builtin_shuffle(a, b, numbers{I...});
#endif
}
// One step of transposing x (LANES, LANES): in each square of 2 APART x 2 APART the off-diagonal corners change places.
template <int APART, int... I> inline void exchange_corners(lanes (&x)[LANES], std::integer_sequence<int, I...> all) {
    UNROLL
    for (int i = 0; i < LANES; i++) {
        if (i & APART) { continue; }
        const lanes a = x[i];
        const lanes b = x[i + APART];
        x[i] = choose_lanes<(I & APART ? LANES + I - APART : I)...>(a, b);
        x[i + APART] = choose_lanes<(I & APART ? LANES + I : I + APART)...>(a, b);
    }
    if constexpr (2 * APART < LANES) { exchange_corners<2 * APART>(x, all); }
}
inline void transpose(lanes (&x)[LANES]) { exchange_corners<1>(x, std::make_integer_sequence<int, LANES>()); }

// ----------------------------------------------------------------------------------------------------------
// packing

template <int WIDTH> inline void copy_row(float* to, const float* from) { memcpy(to, from, sizeof(float) * WIDTH); }
template <int WIDTH> inline void copy_row(float* to, const bf16* from) {
    int c = 0;
    for (; c + LANES <= WIDTH; c += LANES) { store_lanes(to + c, load_lanes(from + c)); }
    for (; c < WIDTH; c++) { to[c] = (float)from[c]; }
}

// panel (K, WIDTH), float32 = B (K, at most WIDTH), filled up with zeros, and K with it to a GEMM_MULTIPLE. May write
// LANES floats too many.
template <int WIDTH, class T> inline void pack_panel(float* panel, const Matrix<const T>& B) {
    constexpr int COLUMNS = WIDTH < LANES ? WIDTH : LANES;      // transposed together
    constexpr int CHAINS = GEMM_CHAINS<T>;
    static_assert(WIDTH % COLUMNS == 0, "a store would overwrite the next row, which is there already");
    const int K = B.rows;
    const bool whole = B.cols == WIDTH;
    int k = 0;
    if (whole && B.col_stride == 1) {
        for (; k < K; k++) { copy_row<WIDTH>(panel + k * WIDTH, B.row(k)); }
    }
    if (whole && B.row_stride == 1) {
        for (; k + LANES * CHAINS <= K; k += LANES * CHAINS) {
            for (int c0 = 0; c0 < WIDTH; c0 += COLUMNS) {
                lanes x[LANES] = {};
                UNROLL
                for (int c = 0; c < COLUMNS; c++) { x[c] = load_words(&B(k, c0 + c)); }
                transpose(x);
                UNROLL
                for (int i = 0; i < LANES; i++) {
                    float* to = panel + (k + i * CHAINS) * WIDTH + c0;
                    store_lanes(to, element<T, 0>(x[i]));
                    if constexpr (CHAINS == 2) { store_lanes(to + WIDTH, element<T, 1>(x[i])); }
                }
            }
        }
    }
    for (; k < round_up(K, GEMM_MULTIPLE<T>); k++) {
        for (int c = 0; c < WIDTH; c++) { panel[k * WIDTH + c] = k < K && c < B.cols ? (float)B(k, c) : 0.0f; }
    }
}

// ----------------------------------------------------------------------------------------------------------
// the product of two panels

// sum (ROWS, REGISTERS * LANES) = a^T b over every STEPth row of the panels a (K,GEMM_M) and b (K,GEMM_N)
template <int STEP, int ROWS, int REGISTERS>
__forceinline__ void gemm_sum(lanes (&sum)[ROWS][REGISTERS], const float* a, const float* b, int K) {
    UNROLL
    for (int m = 0; m < ROWS; m++) {
        UNROLL
        for (int n = 0; n < REGISTERS; n++) { sum[m][n] = lanes{}; }
    }
    for (int k = 0; k < K; k += STEP) {
        lanes row[REGISTERS];
        UNROLL
        for (int n = 0; n < REGISTERS; n++) { row[n] = load_lanes(b + k * GEMM_N + n * LANES); }
        UNROLL
        for (int m = 0; m < ROWS; m++) {
            const float factor = a[k * GEMM_M + m];
            UNROLL
            for (int n = 0; n < REGISTERS; n++) { sum[m][n] = fused_madd(factor, row[n], sum[m][n]); }
        }
    }
}
// out, at most (ROWS, REGISTERS * LANES), += sum
template <int ROWS, int REGISTERS>
__forceinline__ void add_fragment(const Matrix<float>& out, const lanes (&sum)[ROWS][REGISTERS]) {
    UNROLL
    for (int m = 0; m < ROWS; m++) {
        if (m == out.rows) { break; }
        UNROLL
        for (int n = 0; n < REGISTERS; n++) {
            const int columns = imin(LANES, out.cols - n * LANES);
            float* to = out.row(m) + n * LANES;
            if (columns == LANES) {
                store_lanes(to, load_lanes(to) + sum[m][n]);
                continue;
            }
            for (int c = 0; c < columns; c++) { to[c] += sum[m][n][c]; }
        }
    }
}
// out, at most (ROWS, REGISTERS * LANES), += a^T b for panels a (K,GEMM_M) and b (K,GEMM_N) of elements T
template <class T, int ROWS, int REGISTERS>
inline void gemm_fragment(const Matrix<float>& out, const float* a, const float* b, int K) {
    lanes sum[ROWS][REGISTERS];
    if constexpr (sizeof(T) == sizeof(float)) {
        gemm_sum<1>(sum, a, b, K);
        add_fragment(out, sum);
        return;
    }
    for (int k = 0; k < K; k += GEMM_SLICE<T>) {
        lanes odd[ROWS][REGISTERS];
        gemm_sum<2>(sum, a + k * GEMM_M, b + k * GEMM_N, GEMM_SLICE<T>);
        gemm_sum<2>(odd, a + (k + 1) * GEMM_M, b + (k + 1) * GEMM_N, GEMM_SLICE<T>);
        UNROLL
        for (int m = 0; m < ROWS; m++) {
            UNROLL
            for (int n = 0; n < REGISTERS; n++) { sum[m][n] += odd[m][n]; }
        }
        add_fragment(out, sum);
    }
}
template <class T, int ROWS> inline void gemm_rows(const Matrix<float>& out, const float* a, const float* b, int K) {
    if (out.cols > LANES) { gemm_fragment<T, ROWS, 2>(out, a, b, K); } else { gemm_fragment<T, ROWS, 1>(out, a, b, K); }
}

// a B for one slice, a (1,K) being one row and B's k lying side by side, LANES columns of them: a token times weight^T
// during generation. B is read once, so it is transposed in registers instead of packed.
template <class T> inline lanes gemm_one_row(const Matrix<const T>& a, const Matrix<const T>& B) {
    constexpr int CHAINS = GEMM_CHAINS<T>;
    lanes sum[CHAINS] = {};
    int k = 0;
    for (; k + LANES * CHAINS <= B.rows; k += LANES * CHAINS) {
        lanes x[LANES];
        UNROLL
        for (int c = 0; c < LANES; c++) { x[c] = load_words(&B(k, c)); }
        transpose(x);
        UNROLL
        for (int i = 0; i < LANES; i++) {
            sum[0] = fused_madd((float)a(0, k + i * CHAINS), element<T, 0>(x[i]), sum[0]);
            if constexpr (CHAINS == 2) {
                sum[1] = fused_madd((float)a(0, k + i * CHAINS + 1), element<T, 1>(x[i]), sum[1]);
            }
        }
    }
    for (; k < round_up(B.rows, GEMM_MULTIPLE<T>); k++) {
        const bool exists = k < B.rows;
        lanes x;
        for (int c = 0; c < LANES; c++) { x[c] = exists ? (float)B(k, c) : 0.0f; }
        sum[k % CHAINS] = fused_madd(exists ? (float)a(0, k) : 0.0f, x, sum[k % CHAINS]);
    }
    return CHAINS == 2 ? sum[0] + sum[CHAINS - 1] : sum[0];
}

// gemm_by()'s way with SIMD registers
template <class T> struct GemmLanes {
    static constexpr int ROWS = GEMM_M, COLUMNS = GEMM_N;
    static void begin() {}
    static void end() {}
    static void pack_rows(float* panel, const Matrix<const T>& A_T) { pack_panel<ROWS>(panel, A_T); }
    static void pack_columns(float* panel, const Matrix<const T>& B) { pack_panel<COLUMNS>(panel, B); }
    static void multiply(const Matrix<float>& out, const float* a, const float* b, int K) {
        K = round_up(K, GEMM_MULTIPLE<T>);
        if (out.rows > 4) { gemm_rows<T, ROWS>(out, a, b, K); }
        else if (out.rows > 1) { gemm_rows<T, 4>(out, a, b, K); }
        else { gemm_rows<T, 1>(out, a, b, K); }
    }
};

// ----------------------------------------------------------------------------------------------------------
// bf16 by AMX, the instructions of some Intel processors that multiply tiles
//
// A tile register holds 16 rows of 64 bytes: 16 float32, or 16 words of two bf16. One instruction, TDPBF16PS,
// multiplies a tile of A by a tile of B and adds the product to a tile of C (16,16). Row m of A's tile is 32 k of A's
// row m; word n of row p of B's tile is the k 2p and 2p + 1 of B's column n. For each element of C the even k have a
// sum, and the odd k another, each by fma in ascending order from 0; the two are added, then added to the element.
// Denormals are zero. A fragment of C is 2 x 2 tiles, so that each loaded tile is used twice.

constexpr int TILE = 16;                                // rows of a tile and words of a row
constexpr int TILE_K = 2 * TILE;

#if defined(__AMX_BF16__) || defined(__AMXBF16__)       // the latter: clang++ before 16
#include <sys/syscall.h>
constexpr bool AMX_TILES = true;                        // the compiler can use them

// Whether the kernel lets this process use the tiles. It must be asked once, because it then saves their large state.
inline bool amx_permitted() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    static const bool permitted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
    return permitted;
}

// Registers 0 to 3 hold the fragment of C, row by row of tiles, 4 and 5 two tiles of A, 6 and 7 two tiles of B. The
// compiler does not know which memory these instructions use, so barriers separate them from ordinary reads and writes.
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

// A tile of 16 x 16 words = B (at most 32 k, at most 16 columns), filled up with zeros. A row of the tile has a word of
// k of all columns, or, Turned, all words of a column.
template <bool Turned> inline void pack_tile(uint32_t* tile, const Matrix<const bf16>& B) {
    uint32_t edge[TILE][TILE];                          // (columns, words): the tile if it is not whole
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
                lane_words pairs;
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

// gemm_by()'s way with tiles. A panel has for each 32 k the tile of rows or columns 0 to 15, then 16 to 31
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
        float edge[ROWS * COLUMNS];                     // the fragment if it is not whole
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

// ----------------------------------------------------------------------------------------------------------
// the product of whole matrices

// A multiple of this many rows fills all panels
template <class T> constexpr int GEMM_UNIT_M = std::is_same<T, bf16>::value && AMX_TILES ? 2 * TILE : GEMM_M;
// gemm() with GemmLanes or GemmTiles as the Way to pack panels and to multiply them
template <class Way, class T>
inline void gemm_by(const Matrix<float>& out, const Matrix<const T>& A, const Matrix<const T>& B, float* panels) {
    const int M = out.rows, N = out.cols;
    float* a = panels;
    float* b = panels + (size_t)GEMM_K * round_up(M, Way::ROWS);
    Way::begin();
    for (int k0 = 0; k0 < A.cols; k0 += GEMM_K) {
        const int K = imin(GEMM_K, A.cols - k0);
        int n = 0;
        for (; M == 1 && B.row_stride == 1 && n + LANES <= N; n += LANES) {
            float* to = out.data + n;
            for (int k = k0; k < k0 + K; k += GEMM_SLICE<T>) {
                const Matrix<const T> b_slice = block(B, k, GEMM_SLICE<T>, n, LANES);
                store_lanes(to, load_lanes(to) + gemm_one_row(block(A, 0, 1, k, GEMM_SLICE<T>), b_slice));
            }
        }
        for (int m = 0; m < M && n < N; m += Way::ROWS) {
            Way::pack_rows(a + m * GEMM_K, transposed(block(A, m, Way::ROWS, k0, K)));
        }
        for (; n < N; n += Way::COLUMNS) {
            Way::pack_columns(b, block(B, k0, K, n, Way::COLUMNS));
            for (int m = 0; m < M; m += Way::ROWS) {
                Way::multiply(block(out, m, Way::ROWS, n, Way::COLUMNS), a + m * GEMM_K, b, K);
            }
        }
    }
    Way::end();
}

// out (M,N), row-major, += A (M,K) B (K,N). panels: gemm_panels(M) floats
template <class T>
inline void gemm(const Matrix<float>& out, const Matrix<const T>& A, const Matrix<const T>& B, float* panels) {
    if constexpr (std::is_same<T, bf16>::value && AMX_TILES) {
        if (amx_permitted()) { return gemm_by<GemmTiles<AmxTiles>>(out, A, B, panels); }
    }
    gemm_by<GemmLanes<T>>(out, A, B, panels);
}
