// position/toeplitz.cuh -- biases that depend on i - j alone: a table a head, the gradient summed along diagonals.
//
//   B_ij = table[h][T-1 + j - i]: T columns when causal (j <= i), else 2T-1. 128 columns more are what the masked end
//   of a tile may read; their values are finite.
//   backward: the functor sums da along diagonals into one slab dtable[b,h] a block; the encodings (t5, kerple) sum the
//   slabs over b, in order, into their parameters.
#ifndef LLMC_POSITION_TOEPLITZ_CUH
#define LLMC_POSITION_TOEPLITZ_CUH

#include "none.cuh"

constexpr int TOEPLITZ_PAD = 128;

__host__ __device__ inline int toeplitz_columns(int T, bool causal) { return (causal ? T : 2 * T - 1) + TOEPLITZ_PAD; }

struct ToeplitzBias {
    static constexpr bool has_bias = true, has_gradient = true;
    const float* table;     // (NH,ND)
    float* dtable;          // (B*NH,ND)
    int NH, ND, T;

    struct Tile {
        const float* at;
        __device__ float operator()(int r, int c) const { return at[c - r]; }
    };
    __device__ Tile tile(int bh, int i0, int j0) const { return {table + (size_t)(bh % NH) * ND + (T - 1 + j0 - i0)}; }

    // d[k] is the diagonal c - r = k - (ni-1) of the tile
    __device__ void backward(int bh, int i0, int ni, int j0, int nj, float* da, int ld) const {
        float* d = dtable + (size_t)bh * ND + (T - ni + j0 - i0);
        if (LANES > 1) {                                    // one thread: whole rows, in vectors
            for (int r = 0; r < ni; r++) {
                for (int c = 0; c < nj; c++) { d[ni - 1 - r + c] += da[r * ld + c]; }
            }
        } else {                                            // a thread a diagonal
            for (int k = threadIdx.x; k < ni + nj - 1; k += blockDim.x) {
                const int r0 = k < ni ? ni - 1 - k : 0, r1 = k < nj ? ni : ni + nj - 1 - k;
                float sum = 0.0f;
                for (int r = r0; r < r1; r++) { sum += da[r * ld + k - (ni - 1) + r]; }
                d[k] += sum;
            }
        }
        __syncthreads();                                    // the next tile has the same diagonals in other hands
    }
};

struct Toeplitz : NoPosition {
    using NoPosition::NoPosition;

    // layers = 0: the table is shared by all layers
    static void table_specs(const PositionDims& d, int layers, PositionTables& t) {
        const size_t ND = (size_t)toeplitz_columns(d.T, d.causal);
        const size_t NH = (size_t)d.NH;
        t.acts.push_back({"bias_table", layers, NH, ND, constant(0), false, -FLT_MAX, FLT_MAX, Keep::Cached});
        t.acts.push_back({"dbias_table", layers, (size_t)d.B * d.NH, ND});
    }
    int columns() const { return toeplitz_columns(v.T, v.causal); }
    void zero_bias_gradient(int B, int, Stream stream) const {
        device_zero(v.act("dbias_table"), sizeof(float) * B * v.NH * columns(), stream);
    }
    ToeplitzBias bias() const { return {v.act("bias_table"), v.act("dbias_table"), v.NH, columns(), v.T}; }
};

#endif
