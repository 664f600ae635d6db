// base/reduce.cuh -- sums over the rows of a matrix, in an order that does not depend on the number of threads.
//
// The rows are cut into slabs. Each slab is summed by one block into a row of partial (slabs,C): on a CPU in the order
// of its rows, on a GPU by four warps with every fourth row each, then over the warps. Then the slabs are added up in
// order. The number of slabs depends only on the number of rows.
#pragma once

#include "matrix.cuh"

// A GPU wants many blocks, so there are more slabs and few columns a block; a CPU reads row after row.
constexpr size_t MAX_SLABS = ON_GPU ? 1024 : 64;
// out (C) += the sum over the slabs of partial (slabs,C), whose rows are `stride` apart
void add_slabs(float* out, const float* partial, size_t slabs, size_t stride, size_t C, Stream stream);
// out (C) += the sum of the rows of x (N,C). scratch: MAX_SLABS * C floats
void add_row_sums(float* out, float* scratch, const Matrix<const floatX>& x, Stream stream);

#if !defined(KERNELS_ELSEWHERE)
constexpr int SLAB_WARPS = 4;
__host__ __device__ inline size_t slab_count(size_t rows) { return imin(ceil_div(rows, (size_t)32), MAX_SLABS); }
// of kernels that call slab_sums
inline Grid slab_grid(size_t N, int C, Stream stream) {
    return Grid(slab_count(N) * (ON_GPU ? ceil_div(C, 32 * PACK) : 1), 32 * SLAB_WARPS, 0, stream);
}

// partial[s] is the sum of slab s's rows. rows(i), called once for each, is the pack at element i of (N,C), whose rows
// are `row` elements apart: a kernel that computes and stores it has the sums without reading it again.
template <int P, class Rows> __device__ inline void slab_sums(float* partial, size_t N, int C, int row, Rows rows) {
    const size_t slabs = slab_count(N), pieces = gridDim.x / slabs;         // pieces of the columns
    const size_t slab = blockIdx.x / pieces;
    const size_t length = ceil_div(N, slabs);                   // rows per slab
    const size_t begin = slab * length;
    const size_t end = imin(begin + length, N);
    float* p = partial + slab * C;                              // (C)
#if defined(CUDA_BUILD)
    __shared__ float sums[SLAB_WARPS][32 * PACK];
    const int c0 = (int)(blockIdx.x % pieces) * 32 * PACK;      // this block's columns
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int c = lane * P; c < 32 * PACK; c += 32 * P) {        // once, if P is PACK
        Pack<P> sum = {};                                       // stays in registers
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
#else
    for (int c = threadIdx.x; c < C; c += blockDim.x) { p[c] = 0.0f; }
    for (size_t n = begin; n < end; n++) {
        SIMD
        for (int c = threadIdx.x; c < C; c += blockDim.x) { p[c] += rows(n * row + c).x[0]; }
    }
#endif
}
template <int P> __global__ void slab_sums_kernel(float* partial, Matrix<const floatX> x) {
    slab_sums<P>(partial, x.rows, x.cols, x.row_stride, [&](size_t i) { return load_pack<P>(x.data + i); });
}

// out[c] += sum of partial[s * stride + c] over the slabs s
__global__ void add_slabs_kernel(float* out, const float* partial, size_t slabs, size_t stride, size_t C) {
#if defined(CUDA_BUILD)
    // 32 columns per block: each of its 32 warps sums every 32nd slab
    __shared__ float sums[32][32];                              // of each warp, for each column
    const size_t c = (size_t)blockIdx.x * 32 + threadIdx.x % 32;
    float sum = 0.0f;
    for (size_t s = threadIdx.x / 32; s < slabs && c < C; s += 32) { sum += partial[s * stride + c]; }
    sums[threadIdx.x / 32][threadIdx.x % 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32 || c >= C) { return; }
    // the first warp adds up what they have, in their order
    for (int w = 1; w < 32; w++) { sum += sums[w][threadIdx.x]; }
    out[c] += sum;
#else
    const GridSpan span = grid_span(C);
    for (size_t s = 0; s < slabs; s++) {
        for (size_t c = span.begin; c < span.end; c += span.step) { out[c] += partial[s * stride + c]; }
    }
#endif
}

LAUNCHER void add_slabs(float* out, const float* partial, size_t slabs, size_t stride, size_t C, Stream stream) {
#if defined(CUDA_BUILD)
    const Grid grid(ceil_div(C, (size_t)32), 1024, 0, stream);
#else
    const Grid grid = Grid::over(C, stream);
#endif
    launch(add_slabs_kernel, grid, out, partial, slabs, stride, C);
}

LAUNCHER void add_row_sums(float* out, float* scratch, const Matrix<const floatX>& x, Stream stream) {
    const size_t N = (size_t)x.rows, C = (size_t)x.cols;
    with_pack(C | (size_t)x.row_stride, [&](auto P) {       // PACK, a power of two, divides both or not both
        launch(slab_sums_kernel<P>, slab_grid(N, x.cols, stream), scratch, x);
    });
    add_slabs(out, scratch, slab_count(N), C, C, stream);
}
#endif
