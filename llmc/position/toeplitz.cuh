// position/toeplitz.cuh -- biases that depend only on i - j: a table for each head, its gradient summed along
// diagonals.
//
//   B_ij = table[h][T-1 + j - i]: T columns when causal (j <= i), else 2T-1. 128 columns more are what the masked end
//   of a tile may read; their values are finite.
//   backward: the functor sums dlogit along diagonals into one slab dtable[b,h] per block; the encodings sum the slabs
//   over b, in order, into their parameters: kerple with sum_diagonals, t5 in a kernel of its own.
#pragma once

#include "encoding.cuh"

constexpr int TOEPLITZ_PAD = 128;                           // as wide as a tile may be

__host__ __device__ inline int toeplitz_columns(int T, bool causal) { return (causal ? T : 2 * T - 1) + TOEPLITZ_PAD; }

struct ToeplitzBias : BiasFunctor {
    static constexpr FlashBias flash = FlashBias::Toeplitz;
    const float* table;     // (NH,columns)
    float* dtable;          // (B*NH,columns)
    int NH, columns, T;

    struct Tile {
        const float* at;                                    // the entry of the tile's (0, 0)
        __device__ float operator()(int r, int c) const { return at[c - r]; }
    };
    __device__ Tile tile(int bh, int i0, int j0) const {
        return {table + (size_t)(bh % NH) * columns + (T - 1 + j0 - i0)};
    }
    void fill(FlashBiasArgs& args) const {
        args.table = table;
        args.table_zero = T - 1;
        args.table_entries = columns;
        args.dtable = dtable;
    }

    // d[n] is the diagonal c - r = n - (ni-1) of the tile
    __device__ void backward(int bh, int i0, int ni, int j0, int nj, float* dlogit, int ld) const {
        float* d = dtable + (size_t)bh * columns + (T - ni + j0 - i0);
        if (LANES > 1) {                                    // one thread: whole rows, in vectors, then the tile's sums
            float sum[2 * TOEPLITZ_PAD] = {};
            for (int r = 0; r < ni; r++) {
                for (int c = 0; c < nj; c++) { sum[ni - 1 - r + c] += dlogit[r * ld + c]; }
            }
            for (int n = 0; n < ni + nj - 1; n++) { d[n] += sum[n]; }
        } else {                                            // one thread per diagonal
            for (int n = threadIdx.x; n < ni + nj - 1; n += blockDim.x) {
                const int r0 = imax(ni - 1 - n, 0);         // rows in which the diagonal lies inside the tile
                const int r1 = imin(ni, ni + nj - 1 - n);
                float sum = 0.0f;
                for (int r = r0; r < r1; r++) { sum += dlogit[r * ld + n - (ni - 1) + r]; }
                d[n] += sum;
            }
        }
        __syncthreads();                                    // in the next tile other threads have these diagonals
    }
};

// One block per head: table[h] from value(h, i - j)
template <class Value>
static __global__ void toeplitz_fill_kernel(float* table, Value value, int T, int columns) {
    const int h = blockIdx.x;
    for (int n = threadIdx.x; n < columns; n += blockDim.x) { table[(size_t)h * columns + n] = value(h, T - 1 - n); }
}

// One block per head: gradient[h] += sum over the diagonals of term(h, i - j, dB), dB: the gradient of the loss in the
// bias of that diagonal, summed over the batch. In double, because the terms cancel: each row of dlogit sums to 0.
template <class Term>
static __global__ void toeplitz_gradient_kernel(float* gradient, const float* dtable, Term term, int B, int T, int NH,
                                                int columns) {
    const int h = blockIdx.x;
    double sum = 0.0;
    for (int n = threadIdx.x; n < columns - TOEPLITZ_PAD; n += blockDim.x) {           // i - j = T - 1 - n
        float dB = 0.0f;
        for (int b = 0; b < B; b++) { dB += dtable[((size_t)b * NH + h) * columns + n]; }
        sum += (double)term(h, T - 1 - n, dB);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { gradient[h] += (float)sum; }
}

struct Toeplitz : Encoding {
    using Encoding::Encoding;
    float* table = nullptr;                                 // (NH,columns)
    float* dtable = nullptr;                                // (B*NH,columns), a slab for each sequence

    // Per::Model: all layers share the table, and the first one fills it
    template <class Tensors> void declare_table(Tensors& t, Per per) {
        const size_t columns = (size_t)toeplitz_columns(t.stride, t.causal);
        t.cached(table, "bias_table", per, (size_t)t.NH, columns);
        t.scratch(dtable, "dbias_table", (size_t)t.B * t.NH, columns);
    }
    int columns() const { return toeplitz_columns(v.stride, v.causal); }
    // B_ij = value(h, i - j), filled for the longest text when a text begins
    template <class Value> void fill_table(const Value& value, Start start, Stream stream) const {
        if (!start.begins()) { return; }
        launch(toeplitz_fill_kernel<Value>, Grid((size_t)v.NH, 128, 0, stream), table, value, v.stride, columns());
    }
    // Adds to gradient (NH), that of a parameter p of each head. By the chain rule it is the sum over the distances d
    // of dB_d * dvalue(h, d)/dp_h; term(h, d, dB_d) is that product.
    template <class Term> void sum_diagonals(float* gradient, const Term& term, int B, Stream stream) const {
        launch(toeplitz_gradient_kernel<Term>, Grid((size_t)v.NH, 128, 0, stream), gradient, dtable, term, B, v.stride,
               v.NH, columns());
    }
    void begin_backward(const floatX*, int B, int, Stream stream) const {
        device_zero(dtable, sizeof(float) * B * v.NH * columns(), stream);
    }
    ToeplitzBias bias() const { return {{}, table, dtable, v.NH, columns(), v.stride}; }
};
