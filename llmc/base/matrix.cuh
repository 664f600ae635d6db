// base/matrix.cuh -- matrices as views of memory: products by the threads of a block, sums over rows.
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
    // a writable matrix passes as a read-only one
    template <class U = T, class = std::enable_if_t<!std::is_const<U>::value>>
    __host__ __device__ operator Matrix<const U>() const {
        return {data, rows, cols, row_stride, col_stride};
    }
};

// (rows, cols), row-major. row_stride: of the wider array that it is a part of
template <class T> __host__ __device__ Matrix<T> view(T* data, size_t rows, size_t cols) {
    return {data, (int)rows, (int)cols, (int)cols, 1};
}
template <class T> __host__ __device__ Matrix<T> view(T* data, size_t rows, size_t cols, size_t row_stride) {
    return {data, (int)rows, (int)cols, (int)row_stride, 1};
}
// the transpose: the same memory, its strides exchanged
template <class T> __host__ __device__ Matrix<T> transposed(const Matrix<T>& m) {
    return {m.data, m.cols, m.rows, m.col_stride, m.row_stride};
}
// the rows r0 .. r0 + rows - 1 and the columns c0 .. c0 + cols - 1 of m, cut off at m's edges
template <class T>
__host__ __device__ Matrix<T> block(const Matrix<T>& m, size_t r0, size_t rows, size_t c0, size_t cols) {
    T* data = m.data + r0 * m.row_stride + c0 * m.col_stride;
    return {data, (int)imin(rows, m.rows - r0), (int)imin(cols, m.cols - c0), m.row_stride, m.col_stride};
}

// ----------------------------------------------------------------------------------------------------------
// out = A B by the threads of a block

// One thread's fragment, the upper left corner of out: RM rows x RN registers of `lanes`, summed over all columns of A.
// Add: the sum still starts at zero and is added to out at the end, so that a product of many tiles is rounded at the
// size of the whole sum once per tile, not once per column of A.
template <bool Add, int RM, int RN>
__device__ __forceinline__ void matmul_fragment(const Matrix<float>& out, const Matrix<const float>& A,
                                                const Matrix<const float>& B) {
    lanes sum[RM][RN];                  // stays in registers
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

// What the product may skip: a lower triangle A is zero after its diagonal, an upper triangle before it.
enum class Triangle { None, Lower, Upper };

// out (M,N) = A (M,K) B (K,N). All threads of a block call it, and synchronize before and after. A may be transposed;
// out and B are row-major with rows padded to whole registers, so N is a multiple of LANES. RM: rows of a fragment
template <bool Add = false, int RM = MICRO_M>
__device__ inline void block_matmul(const Matrix<float>& out, const Matrix<const float>& A,
                                    const Matrix<const float>& B, Triangle triangle = Triangle::None) {
    constexpr int WIDTH = MICRO_N * LANES;              // columns of a fragment
    const int down = ceil_div(out.rows, RM);
    const int across = ceil_div(out.cols, WIDTH);
    for (int f = threadIdx.x; f < down * across; f += blockDim.x) {     // the threads take fragments in turn
        const int m = f % down * RM;
        const int n = f / down * WIDTH;
        const Matrix<float> o = block(out, m, RM, n, WIDTH);
        const int k0 = triangle == Triangle::Upper ? imin(m, A.cols) : 0;
        const int k1 = triangle == Triangle::Lower ? imin(m + RM, A.cols) : A.cols;
        const Matrix<const float> a = block(A, m, RM, k0, k1 - k0);
        const Matrix<const float> b = block(B, k0, k1 - k0, n, WIDTH);
        if (o.rows == RM && o.cols == WIDTH) {
            matmul_fragment<Add, RM, MICRO_N>(o, a, b);
            continue;
        }
        int i = 0;
        if constexpr (RM > 4) {                 // 64 rows are ten fragments of 6 and one of 4
            if (o.rows >= 4 && o.cols == WIDTH) { matmul_fragment<Add, 4, MICRO_N>(o, a, b); i = 4; }
        }
        for (; i < o.rows; i++) {               // at the lower and right edges: single rows and registers
            for (int j = 0; j < o.cols; j += LANES) {
                const Matrix<const float> columns = block(b, 0, b.rows, j, LANES);
                matmul_fragment<Add, 1, 1>(block(o, i, 1, j, LANES), block(a, i, 1, 0, a.cols), columns);
            }
        }
    }
}
// out += A B
__device__ inline void block_matmul_add(const Matrix<float>& out, const Matrix<const float>& A,
                                        const Matrix<const float>& B, Triangle triangle = Triangle::None) {
    block_matmul<true>(out, A, B, triangle);
}

// c (M,width) = A (M,K) B (K,N), N <= width. All threads of a block call it. a, b and c are in shared memory, and the
// rows of c are whole registers. DEPTH columns of A and DEPTH rows of B at a time are copied to a (M,DEPTH) and
// b (DEPTH,width), padded with zeros.
template <int DEPTH, class T>
__device__ inline void block_product(const Matrix<float>& c, const Matrix<const T>& A, const Matrix<const T>& B,
                                     const Matrix<float>& a, const Matrix<float>& b) {
    const int M = A.rows, N = B.cols;
    const int width = b.cols;
    for (int e = threadIdx.x; e < M * width; e += blockDim.x) { c.data[e] = 0.0f; }
    for (int k0 = 0; k0 < A.cols; k0 += DEPTH) {
        const int K = imin(DEPTH, A.cols - k0);
        __syncthreads();                    // c is zero; no thread reads the last slice any more
        for (int e = threadIdx.x; e < M * K; e += blockDim.x) { a(e / K, e % K) = (float)A(e / K, k0 + e % K); }
        for (int e = threadIdx.x; e < K * width; e += blockDim.x) {
            b.data[e] = e % width < N ? (float)B(k0 + e / width, e % width) : 0.0f;
        }
        __syncthreads();                    // this slice is complete
        block_matmul_add(block(c, 0, M, 0, round_up(N, LANES)), block(a, 0, M, 0, K), b);
    }
    __syncthreads();
}

// ----------------------------------------------------------------------------------------------------------
// sums over rows, in the same order for any number of threads
//
// The rows are cut into slabs, whose number depends only on the number of rows. A block sums a slab into a row of
// partial (slabs,C): on a CPU row after row; on a GPU each of four warps sums every fourth row, and the four sums are
// added. Then the slabs are added in order.

// more on a GPU, which needs many blocks; there a block also has few columns
constexpr size_t MAX_SLABS = ON_GPU ? 1024 : 64;
// to (n) += from (n)
void add_to(float* to, const float* from, size_t n, Stream stream);
// own (n), part `me` of `count`, becomes the sum of all parts, by a binary tree of neighbours; inbox (count-1,n): the
// other parts in order
void sum_parts(float* own, const float* inbox, int me, int count, size_t n, Stream stream);
// out (C) += the sum over the slabs of partial (slabs,C), whose rows are `stride` apart
void add_slabs(float* out, const float* partial, size_t slabs, size_t stride, size_t C, Stream stream);
// out (C) += the sum of the rows of x (N,C). scratch: MAX_SLABS * C floats
void add_row_sums(float* out, float* scratch, const Matrix<const floatX>& x, Stream stream);

#if !defined(LAYERS_ELSEWHERE)
constexpr int SLAB_WARPS = 4;
__host__ __device__ inline size_t slab_count(size_t rows) { return imin(ceil_div(rows, (size_t)32), MAX_SLABS); }
// the grid of a kernel that calls slab_sums
inline Grid slab_grid(size_t N, int C, Stream stream) {
    return Grid(slab_count(N) * (ON_GPU ? ceil_div(C, 32 * PACK) : 1), 32 * SLAB_WARPS, 0, stream);
}

// partial[s] = the sum of slab s's rows. rows(i) is called once for each pack of (N,C), at element i; rows are `row`
// elements apart. So a kernel that computes and stores the packs in rows() need not read them again to sum them.
template <int P, class Rows> __device__ inline void slab_sums(float* partial, size_t N, int C, int row, Rows rows) {
    const size_t slabs = slab_count(N), pieces = gridDim.x / slabs;         // pieces of the columns
    const size_t slab = blockIdx.x / pieces;
    const size_t length = ceil_div(N, slabs);                   // rows per slab
    const size_t begin = slab * length;
    const size_t end = imin(begin + length, N);
    float* p = partial + slab * C;                              // (C)
    if constexpr (ON_GPU) {
        __shared__ float sums[SLAB_WARPS][32 * PACK];
        const int c0 = (int)(blockIdx.x % pieces) * 32 * PACK;      // this block's columns
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        for (int c = lane * P; c < 32 * PACK; c += 32 * P) {        // P = PACK: once
            Pack<P> sum = {};
            for (size_t n = begin + warp; n < end && c0 + c < C; n += SLAB_WARPS) {
                const Pack<P> x = rows(n * row + c0 + c);
                UNROLL
                for (int e = 0; e < P; e++) { sum.x[e] += x.x[e]; }
            }
            UNROLL
            for (int e = 0; e < P; e++) { sums[warp][c + e] = sum.x[e]; }
        }
        __syncthreads();
        for (int c = threadIdx.x; c < 32 * PACK && c0 + c < C; c += blockDim.x) {
            float sum = sums[0][c];
            for (int w = 1; w < SLAB_WARPS; w++) { sum += sums[w][c]; }
            p[c0 + c] = sum;
        }
    } else {
        for (int c = threadIdx.x; c < C; c += blockDim.x) { p[c] = 0.0f; }
        for (size_t n = begin; n < end; n++) {
            SIMD
            for (int c = threadIdx.x; c < C; c += blockDim.x) { p[c] += rows(n * row + c).x[0]; }
        }
    }
}
template <int P> __global__ void slab_sums_kernel(float* partial, Matrix<const floatX> x) {
    slab_sums<P>(partial, x.rows, x.cols, x.row_stride, [&](size_t i) { return load_pack<P>(x.data + i); });
}

// out[c] += sum of partial[s * stride + c] over the slabs s
__global__ void add_slabs_kernel(float* out, const float* partial, size_t slabs, size_t stride, size_t C) {
    if constexpr (ON_GPU) {
        // 32 columns per block: each of its 32 warps sums every 32nd slab
        __shared__ float sums[32][32];                              // (warps, columns)
        const size_t c = (size_t)blockIdx.x * 32 + threadIdx.x % 32;
        float sum = 0.0f;
        for (size_t s = threadIdx.x / 32; s < slabs && c < C; s += 32) { sum += partial[s * stride + c]; }
        sums[threadIdx.x / 32][threadIdx.x % 32] = sum;
        __syncthreads();
        if (threadIdx.x >= 32 || c >= C) { return; }
        // the first warp adds the sums of all, in the warps' order
        for (int w = 1; w < 32; w++) { sum += sums[w][threadIdx.x]; }
        out[c] += sum;
    } else {
        const GridSpan span = grid_span(C);
        for (size_t s = 0; s < slabs; s++) {
            for (size_t c = span.begin; c < span.end; c += span.step) { out[c] += partial[s * stride + c]; }
        }
    }
}

LAUNCHER void add_slabs(float* out, const float* partial, size_t slabs, size_t stride, size_t C, Stream stream) {
    const Grid grid = ON_GPU ? Grid(ceil_div(C, (size_t)32), 1024, 0, stream) : Grid::over(C, stream);
    launch(add_slabs_kernel, grid, out, partial, slabs, stride, C);
}

LAUNCHER void add_row_sums(float* out, float* scratch, const Matrix<const floatX>& x, Stream stream) {
    const size_t N = (size_t)x.rows, C = (size_t)x.cols;
    with_pack(C | (size_t)x.row_stride, [&](auto P) {       // PACK is a power of two: it divides both or not both
        launch(slab_sums_kernel<P>, slab_grid(N, x.cols, stream), scratch, x);
    });
    add_slabs(out, scratch, slab_count(N), C, C, stream);
}

__global__ void add_to_kernel(float* to, const float* from, size_t n) {
    const GridSpan s = grid_span(n);
    for (size_t i = s.begin; i < s.end; i += s.step) { to[i] += from[i]; }
}
LAUNCHER void add_to(float* to, const float* from, size_t n, Stream stream) {
    if (n > 0) { launch(add_to_kernel, Grid::over(n, stream), to, from, n); }
}

constexpr int PARTS_LEVELS = 16;            // of the tree of sum_parts
__global__ void sum_parts_kernel(float* own, const float* inbox, int me, int count, size_t n) {
    const GridSpan s = grid_span(n);
    for (size_t e = s.begin; e < s.end; e += s.step) {
        float left[PARTS_LEVELS];           // at level k: the sum of 2^k neighbours that waits for the next 2^k
        float sum = 0.0f;
        for (int i = 0; i < count; i++) {
            const float* part = inbox + n * (size_t)(i - (i > me));
            sum = i == me ? own[e] : part[e];
            UNROLL
            for (int k = 0; k < PARTS_LEVELS; k++) {
                if (i >> k & 1) { sum = left[k] + sum; }
                else if (i + 1 < count) { left[k] = sum; break; }
            }
        }
        own[e] = sum;
    }
}
LAUNCHER void sum_parts(float* own, const float* inbox, int me, int count, size_t n, Stream stream) {
    check(count <= 1 << PARTS_LEVELS, "expected at most %d parts of a sum, got %d", 1 << PARTS_LEVELS, count);
    if (n > 0) { launch(sum_parts_kernel, Grid::over(n, stream), own, inbox, me, count, n); }
}
#endif
