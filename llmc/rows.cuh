// rows.cuh -- rows picked out of a matrix and put back, and one row added to all.
//   gather_rows: out[k] = inp[rows[k]], the masked positions of MLM.   backward: scatter_rows, dinp[rows[k]] = dout[k]
//   add_row: out[n] += row, BERT's token type embedding.               backward: drow += sum of dout's rows
//   Both save nothing.
#pragma once

#include "base/reduce.cuh"
#include "embedding.cuh"

// out (n,C), inp (N,C), rows (n) all in [0, N): an embedding whose table is inp
void gather_rows(floatX* out, const floatX* inp, const int* rows, size_t n, int C, Stream stream);
// dinp (N,C), dout (n,C), rows (n) all different, since blocks write in any order; the other rows of dinp stay as they
// are
void scatter_rows(floatX* dinp, const floatX* dout, const int* rows, size_t n, int C, Stream stream);
// out (N,C) += row (C)
void add_row(floatX* out, const floatX* row, size_t N, int C, Stream stream);
// drow (C) accumulates; dout (N,C). scratch: MAX_SLABS * C floats
void add_row_backward(float* drow, float* scratch, const floatX* dout, size_t N, int C, Stream stream);

#if !defined(KERNELS_ELSEWHERE)
LAUNCHER void gather_rows(floatX* out, const floatX* inp, const int* rows, size_t n, int C, Stream stream) {
    embedding_forward(out, rows, inp, n, C, stream);
}

// One block per row that is put back.
__global__ void scatter_rows_kernel(floatX* dinp, const floatX* dout, const int* rows, int C) {
    const size_t k = blockIdx.x;
    floatX* row = dinp + (size_t)rows[k] * C;       // (C)
    for (int c = threadIdx.x; c < C; c += blockDim.x) { row[c] = dout[k * C + c]; }
}
LAUNCHER void scatter_rows(floatX* dinp, const floatX* dout, const int* rows, size_t n, int C, Stream stream) {
    launch(scatter_rows_kernel, Grid(n, 128, 0, stream), dinp, dout, rows, C);
}

// One block per row of out.
__global__ void add_row_kernel(floatX* out, const floatX* row, int C) {
    floatX* o = out + (size_t)blockIdx.x * C;       // (C)
    SIMD
    for (int c = threadIdx.x; c < C; c += blockDim.x) { o[c] = (floatX)((float)o[c] + (float)row[c]); }
}
LAUNCHER void add_row(floatX* out, const floatX* row, size_t N, int C, Stream stream) {
    launch(add_row_kernel, Grid(N, 128, 0, stream), out, row, C);
}
LAUNCHER void add_row_backward(float* drow, float* scratch, const floatX* dout, size_t N, int C, Stream stream) {
    add_row_sums(drow, scratch, view(dout, N, (size_t)C), stream);
}
#endif
