// base/reduce.cuh -- sums over the rows of a matrix, in an order that does not depend on the number of threads.
//
// The rows are cut into slabs. Each slab is summed by one block, in the order of its rows, into a row of partial
// (slabs,C); then the slabs are added up in order. The number of slabs depends only on the number of rows.
#ifndef LLMC_BASE_REDUCE_CUH
#define LLMC_BASE_REDUCE_CUH

#include "device.h"

// A GPU wants many blocks, so there are more slabs and few columns a block; a CPU reads row after row.
#if defined(CUDA_BUILD)
constexpr size_t MAX_SLABS = 1024;
constexpr size_t ROW_SUM_COLUMNS = 256;
#else
constexpr size_t MAX_SLABS = 64;
constexpr size_t ROW_SUM_COLUMNS = (size_t)1 << 31;
#endif
inline size_t slab_count(size_t rows) { return imin(ceil_div(rows, (size_t)32), MAX_SLABS); }

// One block per slab and piece of the columns: partial[s] is the sum of slab s's rows, from the first to the last.
__global__ void slab_sums_kernel(float* partial, const floatX* rows, size_t N, int C, size_t slabs) {
    const size_t slab = blockIdx.x % slabs;
    const size_t length = ceil_div(N, slabs);                   // rows per slab
    const size_t begin = slab * length;
    const size_t end = imin(begin + length, N);
    const size_t c0 = blockIdx.x / slabs * ROW_SUM_COLUMNS;     // this block's columns
    const size_t c1 = imin(c0 + ROW_SUM_COLUMNS, (size_t)C);
    float* p = partial + slab * C;                              // (C)
#if defined(CUDA_BUILD)
    for (size_t c = c0 + threadIdx.x; c < c1; c += blockDim.x) {            // the sum stays in a register
        float sum = 0.0f;
        for (size_t n = begin; n < end; n++) { sum += (float)rows[n * C + c]; }
        p[c] = sum;
    }
#else
    for (size_t c = c0 + threadIdx.x; c < c1; c += blockDim.x) { p[c] = 0.0f; }
    for (size_t n = begin; n < end; n++) {
        for (size_t c = c0 + threadIdx.x; c < c1; c += blockDim.x) { p[c] += (float)rows[n * C + c]; }
    }
#endif
}

// out[c] += sum of partial[s * stride + c] over the slabs s
__global__ void add_slabs_kernel(float* out, const float* partial, size_t slabs, size_t stride, size_t C) {
#if defined(CUDA_BUILD)
    // 32 columns per block: each of its 8 warps sums every eighth slab
    __shared__ float sums[8][32];                               // of each warp, for each column
    const size_t c = (size_t)blockIdx.x * 32 + threadIdx.x % 32;
    float sum = 0.0f;
    for (size_t s = threadIdx.x / 32; s < slabs && c < C; s += 8) { sum += partial[s * stride + c]; }
    sums[threadIdx.x / 32][threadIdx.x % 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32 || c >= C) { return; }
    // the first warp adds up what the eight have, in their order
    for (int w = 1; w < 8; w++) { sum += sums[w][threadIdx.x]; }
    out[c] += sum;
#else
    const GridSpan span = grid_span(C);
    for (size_t s = 0; s < slabs; s++) {
        for (size_t c = span.begin; c < span.end; c += span.step) { out[c] += partial[s * stride + c]; }
    }
#endif
}

// out (C) += the sum over the slabs of partial (slabs,C), whose rows are `stride` apart
inline void add_slabs(float* out, const float* partial, size_t slabs, size_t stride, size_t C, Stream stream) {
#if defined(CUDA_BUILD)
    const Grid grid(ceil_div(C, (size_t)32), 256, 0, stream);
#else
    const Grid grid = Grid::over(C, stream);
#endif
    launch(add_slabs_kernel, grid, out, partial, slabs, stride, C);
}

// out (C) += the sum of rows (N,C). scratch: MAX_SLABS * C floats
inline void add_row_sums(float* out, float* scratch, const floatX* rows, size_t N, int C, Stream stream) {
    const size_t slabs = slab_count(N), columns = (size_t)C;
    const Grid grid(slabs * ceil_div(columns, ROW_SUM_COLUMNS), 256, 0, stream);
    launch(slab_sums_kernel, grid, scratch, rows, N, C, slabs);
    add_slabs(out, scratch, slabs, columns, columns, stream);
}

#endif
