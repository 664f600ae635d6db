// base/matrix.cuh -- a matrix as a view of memory, and the product of two of them by the threads of one block.
#pragma once

#include <type_traits>

#include "device.h"

// Element (r, c) is data[r * row_stride + c * col_stride]. A view owns nothing and copies nothing.
template <class T> struct Matrix {
    T* data;                            // element (0, 0)
    int rows, cols;
    int row_stride, col_stride;         // in elements: from a row to the next, from a column to the next

    __host__ __device__ T& operator()(int r, int c) const {
        return data[(size_t)r * row_stride + (size_t)c * col_stride];
    }
    // where row r begins; for a row-major view
    __host__ __device__ T* row(int r) const { return data + (size_t)r * row_stride; }
    // a matrix that may be written is also one that may be read
    template <class U = T, class = std::enable_if_t<!std::is_const<U>::value>>
    __host__ __device__ operator Matrix<const U>() const {
        return {data, rows, cols, row_stride, col_stride};
    }
};

// (rows, cols), row-major. row_stride: that of the array it is a part of, if that one is wider
template <class T> __host__ __device__ Matrix<T> view(T* data, size_t rows, size_t cols) {
    return {data, (int)rows, (int)cols, (int)cols, 1};
}
template <class T> __host__ __device__ Matrix<T> view(T* data, size_t rows, size_t cols, size_t row_stride) {
    return {data, (int)rows, (int)cols, (int)row_stride, 1};
}
// the same memory, read the other way
template <class T> __host__ __device__ Matrix<T> transposed(const Matrix<T>& m) {
    return {m.data, m.cols, m.rows, m.col_stride, m.row_stride};
}
// the rows r0 .. r0 + rows - 1 and the columns c0 .. c0 + cols - 1 of m, fewer where m ends
template <class T>
__host__ __device__ Matrix<T> block(const Matrix<T>& m, size_t r0, size_t rows, size_t c0, size_t cols) {
    T* data = m.data + r0 * m.row_stride + c0 * m.col_stride;
    return {data, (int)imin(rows, m.rows - r0), (int)imin(cols, m.cols - c0), m.row_stride, m.col_stride};
}

// ----------------------------------------------------------------------------------------------------------
// out = A B by the threads of a block

// One thread's fragment of out, at its upper left corner: RM rows x RN registers of `lanes`, summed over all of A's
// columns. Add: the sum starts at zero too, and is added to out when it is complete. A product of many tiles then has
// one rounding per tile at the size of the whole sum, not one per column of A.
template <bool Add, int RM, int RN>
__device__ __forceinline__ void matmul_fragment(const Matrix<float>& out, const Matrix<const float>& A,
                                                const Matrix<const float>& B) {
    lanes sum[RM][RN];                  // stays in registers for the whole sum
    UNROLL
    for (int m = 0; m < RM; m++) {
        UNROLL
        for (int n = 0; n < RN; n++) { sum[m][n] = lanes{}; }
    }
    // one column of A times one row of B per step: RM + RN loads for RM x RN multiplications
    for (int k = 0; k < A.cols; k++) {
        lanes b[RN];
        UNROLL
        for (int n = 0; n < RN; n++) { b[n] = load_lanes(B.row(k) + n * LANES); }
        UNROLL
        for (int m = 0; m < RM; m++) {
            const float a = A(m, k);
            UNROLL
            for (int n = 0; n < RN; n++) { sum[m][n] = fused_madd(a, b[n], sum[m][n]); }
        }
    }
    UNROLL
    for (int m = 0; m < RM; m++) {
        UNROLL
        for (int n = 0; n < RN; n++) {
            float* to = out.row(m) + n * LANES;
            store_lanes(to, Add ? load_lanes(to) + sum[m][n] : sum[m][n]);
        }
    }
}

// The shape of A: a lower triangle has zeros after its diagonal, an upper one before. The product skips them.
enum class Triangle { None, Lower, Upper };

template <bool Add>
__device__ inline void block_matmul_of(const Matrix<float>& out, const Matrix<const float>& A,
                                       const Matrix<const float>& B, Triangle triangle) {
    constexpr int WIDTH = MICRO_N * LANES;              // columns of a fragment
    const int down = ceil_div(out.rows, MICRO_M);
    const int across = ceil_div(out.cols, WIDTH);
    for (int f = threadIdx.x; f < down * across; f += blockDim.x) {     // the threads take fragments in turn
        const int m = f % down * MICRO_M;
        const int n = f / down * WIDTH;
        const Matrix<float> o = block(out, m, MICRO_M, n, WIDTH);
        const int k0 = triangle == Triangle::Upper ? imin(m, A.cols) : 0;
        const int k1 = triangle == Triangle::Lower ? imin(m + MICRO_M, A.cols) : A.cols;
        const Matrix<const float> a = block(A, m, MICRO_M, k0, k1 - k0);
        const Matrix<const float> b = block(B, k0, k1 - k0, n, WIDTH);
        if (o.rows == MICRO_M && o.cols == WIDTH) {
            matmul_fragment<Add, MICRO_M, MICRO_N>(o, a, b);
            continue;
        }
        for (int i = 0; i < o.rows; i++) {      // at the lower and the right edge: one row and one register at a time
            for (int j = 0; j < o.cols; j += LANES) {
                const Matrix<const float> columns = block(b, 0, b.rows, j, LANES);
                matmul_fragment<Add, 1, 1>(block(o, i, 1, j, LANES), block(a, i, 1, 0, a.cols), columns);
            }
        }
    }
}
// out (M,N) = A (M,K) B (K,N), called by all threads of a block, which synchronize before and after. A may be
// transposed; out and B are row-major, and N is a multiple of LANES: their rows are padded to whole registers.
__device__ inline void block_matmul(const Matrix<float>& out, const Matrix<const float>& A,
                                    const Matrix<const float>& B) {
    block_matmul_of<false>(out, A, B, Triangle::None);
}
// out += A B
__device__ inline void block_matmul_add(const Matrix<float>& out, const Matrix<const float>& A,
                                        const Matrix<const float>& B, Triangle triangle = Triangle::None) {
    block_matmul_of<true>(out, A, B, triangle);
}
