// attention/flash/fire.cuh -- FIRE's bias inside the tensor-core kernels: f of y_ij = psi(|i-j|) / norm(max(i,j)), f
// piecewise linear (position/fire.cuh), and the sums of dlogit that its gradients are made of.
//
// y is monotonic in the distance and in the later position, so the pairs of a few rows and columns lie between the y of
// two corners. A warp counts the breaks below each (a lane has one of the 32). Then with `base` the piece of the lower
// corner
//   f(y) = line of piece `base` + sum over the breaks t between the corners of bend_t max(0, y - t)
// is a loop without a branch that differs between lanes, and seldom has more than one turn: docs/attention.md, "FIRE on
// the tensor cores".
#pragma once

#include "../../position/fire.cuh"
#include "tiles.cuh"

static_assert(FIRE_UNITS == 32, "a lane of a warp has one break");
static_assert(FIRE_SUMS == 4, "flash_warp_sums");

// f of one head, and the pieces of the current pairs
struct FlashFire {
    const FirePiece* piece;         // (FIRE_PIECES) in shared memory, over the scale: in the unit of q.k
    float end;                      // of the piece that has the lane's number
    int base, last;                 // the first and the last piece of the current pairs

    // All threads of the block call it; the pieces may be read after the next barrier.
    __device__ void stage(FirePiece* to, const FlashArgs& args, int h) {
        const FirePiece* from = args.pieces + (size_t)h * FIRE_PIECES;
        piece = to;
        end = from[threadIdx.x % 32].end;
        constexpr int FLOATS = sizeof(FirePiece) / sizeof(float);
        for (int e = threadIdx.x; e < FLOATS * FIRE_PIECES; e += blockDim.x) {      // all but `end` are values of B
            const float x = ((const float*)from)[e];
            ((float*)to)[e] = e % FLOATS == 2 ? x : x / args.scale;
        }
    }
    // psi at the distance of two positions; masked pairs may be further apart than any two tokens
    __device__ static int distance(const FlashArgs& args, int i, int j) {
        return imin(i > j ? i - j : j - i, args.table_zero);
    }
    __device__ static float psi(const FlashArgs& args, int i, int j) {
        return args.table[args.table_zero - distance(args, i, j)];
    }
    // Called by a whole warp before it takes the pairs of these rows and columns; either may be the queries
    __device__ void meet(const FlashArgs& args, int row, int rows, int column, int columns) {
        const int row_end = row + rows - 1;
        const int column_end = column + columns - 1;
        const int gap = imax(0, imax(row - column_end, column - row_end));          // the smallest distance
        const int early = imax(row, column);                                        // the smallest later position
        const float low = psi(args, gap, 0) * args.inv[imax(row_end, column_end)];
        const float high = psi(args, imax(row_end - column, column_end - row), 0) * args.inv[early];
        base = count_lanes(end <= low);
        last = count_lanes(end <= high);
    }
    // f of each y, over the scale: arrays, or fragments
    template <class Values> __device__ void apply(Values& f, const Values& y) const {
        constexpr int N = sizeof(Values) / sizeof(float);
        const FirePiece line = piece[base];
        UNROLL
        for (int e = 0; e < N; e++) { f[e] = line.value + line.slope * y[e]; }
        for (int k = base; k < last; k++) {
            const FirePiece kink = piece[k];
            UNROLL
            for (int e = 0; e < N; e++) { f[e] += kink.bend * fmaxf(0.0f, y[e] - kink.end); }
        }
    }
};

// sums over the warp: lane l returns that of x[l % 4]
__device__ inline float flash_warp_sums(const float (&x)[4]) {
    const bool odd = threadIdx.x % 2 == 1;
    const bool upper = threadIdx.x / 2 % 2 == 1;
    float a = (odd ? x[1] : x[0]);
    float b = (odd ? x[3] : x[2]);
    a += shuffle_xor(odd ? x[0] : x[1], 1);                 // of two lanes: each has two of the four sums
    b += shuffle_xor(odd ? x[2] : x[3], 1);
    float sum = upper ? b : a;
    sum += shuffle_xor(upper ? a : b, 2);                   // of four lanes: each has one
    UNROLL
    for (int o = 4; o < 32; o *= 2) { sum += shuffle_xor(sum, o); }
    return sum;
}

// What a warp sums over its queries and all their keys, in shared memory: for each piece dlogit, dlogit y, dlogit
// dy/d|c|, -dlogit dy/dL. Each of the lanes 0 to 3 holds one of the four, in float64, because the terms cancel: each
// row of dlogit sums to 0.
struct FlashFireSums {
    double* of;                     // (FIRE_PIECES,FIRE_SUMS)

    __device__ void clear() const {
        for (int e = threadIdx.x % 32; e < FIRE_PIECES * FIRE_SUMS; e += 32) { of[e] = 0.0; }
        syncwarp();
    }
    // The pairs of FlashFire::meet. All are counted for the first piece; break by break, what is above it moves on.
    template <class Values>
    __device__ void add(const FlashFire& fire, const Values& dlogit, const Values& y, const Values& by_c,
                        const Values& by_L) const {
        const int lane = threadIdx.x % 32;
        for (int k = fire.base; k <= fire.last; k++) {
            const float above = k == fire.base ? -INFINITY : fire.piece[k - 1].end;
            float sum[FIRE_SUMS] = {};
            UNROLL
            for (int e = 0; e < Values::SIZE; e++) {
                const float d = y[e] >= above ? dlogit[e] : 0.0f;
                sum[0] += d;
                sum[1] += d * y[e];
                sum[2] += d * by_c[e];
                sum[3] += d * by_L[e];
            }
            const double moved = (double)flash_warp_sums(sum);
            if (lane >= FIRE_SUMS) { continue; }
            of[k * FIRE_SUMS + lane] += moved;
            if (k > fire.base) { of[(k - 1) * FIRE_SUMS + lane] -= moved; }
        }
        syncwarp();
    }
};

// sums (B*NH,FIRE_SLOTS,FIRE_PIECES,FIRE_SUMS): each head's first slot becomes the sum of its blocks' partial sums, in
// order. One block per head.
static __global__ void flash_backward_fire_kernel(double* sums, const double* partial, int blocks) {
    const size_t size = (size_t)FIRE_PIECES * FIRE_SUMS;
    for (size_t e = threadIdx.x; e < size; e += blockDim.x) {
        double sum = 0.0;
        for (int n = 0; n < blocks; n++) { sum += partial[((size_t)blockIdx.x * blocks + n) * size + e]; }
        sums[blockIdx.x * FIRE_SLOTS * size + e] = sum;
    }
}
