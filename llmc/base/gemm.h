// base/gemm.h -- the product of two matrices on a CPU, by one thread.
//
//   out_mn += sum over k of A_mk B_kn
//
// The order of each sum is fixed; it depends neither on the width of a register nor on tiles or threads. k is cut into
// slices of GEMM_K. A slice's sum starts at 0 and takes its k in ascending order, sum = fma(A_mk, B_kn, sum), and the
// slices are added to out one after the other.
//
// Slices are first copied into panels, GEMM_M rows of A or GEMM_N columns of B wide, whose elements lie in the order in
// which the inner loop reads them. So a transposed matrix costs no more than any other. The inner loop keeps a fragment
// of out, GEMM_M x GEMM_N, in registers: for each k it loads a row of B's panel and multiplies it by GEMM_M numbers of
// A's. One panel of B at a time stays in the first-level cache, and those of A come from the second. dev/cuda/matmul.cu
// climbs here from three plain loops.
#ifndef LLMC_BASE_GEMM_H
#define LLMC_BASE_GEMM_H

#include <utility>

#include "matrix.cuh"

constexpr int GEMM_K = 256;                             // the only number that the sums depend on
#if defined(__AVX512F__)
constexpr int GEMM_M = 12;                              // 24 of the 32 registers hold sums
#elif defined(__AVX__)
constexpr int GEMM_M = 6;                               // 12 of 16
#else
constexpr int GEMM_M = 4;                               // 8 of 16, or of Arm's 32
#endif
constexpr int GEMM_N = 2 * LANES;

// Floats that gemm() packs into, for an output of at most M rows
inline size_t gemm_panels(int M) { return (size_t)GEMM_K * (round_up(M, GEMM_M) + GEMM_N); }

// ----------------------------------------------------------------------------------------------------------
// packing

// The lanes I of a and b, where b's are counted after a's
template <int... I> inline lanes choose_lanes(lanes a, lanes b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, I...);
#else
    typedef int numbers __attribute__((vector_size(4 * LANES)));
    return __builtin_shuffle(a, b, numbers{I...});
#endif
}
// One step of transposing x, a matrix (LANES, LANES): in each square of 2 APART x 2 APART two corners change places.
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

// panel (K, WIDTH) = the columns of B (K, at most WIDTH); what is missing becomes 0. May write LANES floats too many.
template <int WIDTH> inline void pack_panel(float* panel, const Matrix<const float>& B) {
    constexpr int COLUMNS = WIDTH < LANES ? WIDTH : LANES;      // that are transposed together
    static_assert(WIDTH % COLUMNS == 0, "a store would overwrite what the one before has put into the next row");
    const int K = B.rows;
    const bool whole = B.cols == WIDTH;
    int k = 0;
    if (whole && B.col_stride == 1) {
        for (; k < K; k++) { memcpy(panel + k * WIDTH, B.row(k), sizeof(float) * WIDTH); }
    }
    if (whole && B.row_stride == 1) {
        for (; k + LANES <= K; k += LANES) {
            for (int c0 = 0; c0 < WIDTH; c0 += COLUMNS) {
                lanes x[LANES] = {};
                UNROLL
                for (int c = 0; c < COLUMNS; c++) { x[c] = load_lanes(&B(k, c0 + c)); }
                exchange_corners<1>(x, std::make_integer_sequence<int, LANES>());
                UNROLL
                for (int i = 0; i < LANES; i++) { store_lanes(panel + (k + i) * WIDTH + c0, x[i]); }
            }
        }
    }
    for (; k < K; k++) {
        for (int c = 0; c < WIDTH; c++) { panel[k * WIDTH + c] = c < B.cols ? B(k, c) : 0.0f; }
    }
}

// ----------------------------------------------------------------------------------------------------------
// the product

// out, at most (ROWS, REGISTERS * LANES), += a^T b for panels a (K,GEMM_M) and b (K,GEMM_N)
template <int ROWS, int REGISTERS>
inline void gemm_fragment(const Matrix<float>& out, const float* a, const float* b, int K) {
    lanes sum[ROWS][REGISTERS];
    UNROLL
    for (int m = 0; m < ROWS; m++) {
        UNROLL
        for (int n = 0; n < REGISTERS; n++) { sum[m][n] = lanes{}; }
    }
    for (int k = 0; k < K; k++) {
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

// The same for one row a (1,K) and LANES columns of B whose k lie side by side, as when a token meets weight^T during
// generation. B is read only once, so it is transposed in registers and not packed.
inline lanes gemm_one_row(const Matrix<const float>& a, const Matrix<const float>& B) {
    lanes sum = {};
    int k = 0;
    for (; k + LANES <= B.rows; k += LANES) {
        lanes x[LANES];
        UNROLL
        for (int c = 0; c < LANES; c++) { x[c] = load_lanes(&B(k, c)); }
        exchange_corners<1>(x, std::make_integer_sequence<int, LANES>());
        UNROLL
        for (int i = 0; i < LANES; i++) { sum = fused_madd(a(0, k + i), x[i], sum); }
    }
    for (; k < B.rows; k++) {
        lanes x;
        for (int c = 0; c < LANES; c++) { x[c] = B(k, c); }
        sum = fused_madd(a(0, k), x, sum);
    }
    return sum;
}

template <int ROWS> inline void gemm_rows(const Matrix<float>& out, const float* a, const float* b, int K) {
    if (out.cols > LANES) { gemm_fragment<ROWS, 2>(out, a, b, K); } else { gemm_fragment<ROWS, 1>(out, a, b, K); }
}

// out (M,N), row-major, += A (M,K) B (K,N). panels: gemm_panels(M) floats
inline void gemm(const Matrix<float>& out, const Matrix<const float>& A, const Matrix<const float>& B, float* panels) {
    const int M = out.rows, N = out.cols;
    float* a = panels;
    float* b = panels + (size_t)GEMM_K * round_up(M, GEMM_M);
    for (int k0 = 0; k0 < A.cols; k0 += GEMM_K) {
        const int K = imin(GEMM_K, A.cols - k0);
        int n = 0;
        for (; M == 1 && B.row_stride == 1 && n + LANES <= N; n += LANES) {
            float* to = out.data + n;
            store_lanes(to, load_lanes(to) + gemm_one_row(block(A, 0, 1, k0, K), block(B, k0, K, n, LANES)));
        }
        for (int m = 0; m < M && n < N; m += GEMM_M) {
            pack_panel<GEMM_M>(a + m * GEMM_K, transposed(block(A, m, GEMM_M, k0, K)));
        }
        for (; n < N; n += GEMM_N) {
            pack_panel<GEMM_N>(b, block(B, k0, K, n, GEMM_N));
            for (int m = 0; m < M; m += GEMM_M) {
                const Matrix<float> fragment = block(out, m, GEMM_M, n, GEMM_N);
                if (fragment.rows > 4) { gemm_rows<GEMM_M>(fragment, a + m * GEMM_K, b, K); }
                else if (fragment.rows > 1) { gemm_rows<4>(fragment, a + m * GEMM_K, b, K); }
                else { gemm_rows<1>(fragment, a + m * GEMM_K, b, K); }
            }
        }
    }
}

#endif
