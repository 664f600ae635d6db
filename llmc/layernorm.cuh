// layernorm.cuh -- out = (inp - mean) * rstd * weight + bias over the C channels of a row.    Ba et al. 2016, eq. 3-4
//   backward, with n = (inp - mean) * rstd and dn = dout * weight:
//     dinp += rstd * (dn - mean_C(dn) - n * mean_C(dn * n))
//     The two means are there because mean and rstd depend on inp: shifting or stretching a whole row does not change
//     the output.
//   saves mean, rstd (N) float32.  dinp, dweight, dbias accumulate.
#pragma once

#include "base/matrix.cuh"

// out, inp (N,C), mean, rstd (N) or null (evaluation), weight, bias (C)
void layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                       const floatX* bias, size_t N, int C, float eps, Stream stream);
// dinp, dout, inp (N,C), dweight, dbias, weight (C), mean, rstd (N). scratch: MAX_SLABS * 2 * C floats
void layernorm_backward(floatX* dinp, float* dweight, float* dbias, float* scratch, const floatX* dout,
                        const floatX* inp, const float* mean, const float* rstd, const floatX* weight, size_t N,
                        int C, Stream stream);

#if !defined(LAYERS_ELSEWHERE)
// A lane has the packs lane, lane + lanes, ... of a row. On a GPU it loads up to ROW_KEPT packs at once and keeps them
// in registers; KEPT is their number. KEPT is 0 on a CPU and for longer rows: each step reads the row from the cache.
constexpr int ROW_KEPT = ON_GPU ? 4 : 0;
template <int P, int KEPT> struct RowPacks {
    const floatX* row;                              // (C)
    PackWords<P, floatX> kept[imax(KEPT, 1)];

    __device__ RowPacks(const floatX* row, int lane, int packs) : row(row) {
        UNROLL
        for (int j = 0; j < KEPT; j++) {
            if (lane + 32 * j < packs) { kept[j] = load_words<P>(row + (lane + 32 * j) * P); }
        }
    }
    // the lane's pack number j, number k of the row
    __device__ Pack<P> operator()(int j, int k) const {
        return KEPT > 0 ? unpack(kept[j]) : load_pack<P>(row + k * P);
    }
};
// Calls f(j, k) for each pack of a lane
template <int KEPT, class F> __device__ __forceinline__ void each_pack(int lane, int packs, int lanes, F f) {
    if constexpr (KEPT > 0) {
        UNROLL
        for (int j = 0; j < KEPT; j++) {
            if (lane + 32 * j < packs) { f(j, lane + 32 * j); }
        }
    } else {
        for (int k = lane; k < packs; k += lanes) { f(0, k); }
    }
}
// N sums over the packs of a lane: add(s, j, k) adds a pack to s[0] .. s[N - 1]
template <int KEPT, int N, class Add>
__device__ __forceinline__ Sums<N> row_sums(int lane, int packs, int lanes, Add add) {
    if constexpr (KEPT > 0) {
        Sums<N> sums;
        each_pack<KEPT>(lane, packs, lanes, [&](int j, int k) { add(sums.x, j, k); });
        return sums;
    } else {
        return sums_over<N>(lane, packs, lanes, [&](float* s, int k) { add(s, 0, k); });
    }
}
// Calls f with the P and the KEPT for rows of C channels
template <int KEPT = ROW_KEPT, class F> void with_row(int C, F f) {
    const auto call = [&](auto P) { f(P, std::integral_constant<int, KEPT>()); };
    if constexpr (KEPT == 0) {
        with_pack((size_t)C, call);
    } else {
        constexpr int WIDTH = 32 * PACK;            // channels that a warp takes at once
        const bool fits = C % PACK == 0 && ceil_div(C, WIDTH) == KEPT;
        if (fits) { call(std::integral_constant<int, PACK>()); } else { with_row<KEPT - 1>(C, f); }
    }
}

// One block per row; on a GPU a block is one warp, so no warp waits for another.
template <int P, int KEPT>
__global__ void layernorm_forward_kernel(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                                         const floatX* bias, int C, float eps) {
    const size_t row = blockIdx.x;
    const int lane = threadIdx.x;
    const int lanes = blockDim.x;
    const int packs = C / P;
    const RowPacks<P, KEPT> x(inp + row * C, lane, packs);      // this block's row
    floatX* o = out + row * C;                                  // (C)
    // 1. the mean: warp_sum gives every lane the sum over all lanes
    const auto sum = row_sums<KEPT, 1>(lane, packs, lanes, [&](float* s, int j, int k) {
        const Pack<P> xs = x(j, k);
        UNROLL
        for (int e = 0; e < P; e++) { s[0] += xs.x[e]; }
    });
    const float m = warp_sum(sum.x[0]) / C;
    // 2. the variance, from the differences: sum(x^2) - C m^2 would cancel
    const auto squares = row_sums<KEPT, 1>(lane, packs, lanes, [&](float* s, int j, int k) {
        const Pack<P> xs = x(j, k);
        UNROLL
        for (int e = 0; e < P; e++) { s[0] = fused_madd(xs.x[e] - m, xs.x[e] - m, s[0]); }
    });
    const float s = 1.0f / sqrtf(warp_sum(squares.x[0]) / C + eps);     // 1 / standard deviation
    // 3. the output: normalised, then scaled and shifted per channel
    each_pack<KEPT>(lane, packs, lanes, [&](int j, int k) {
        Pack<P> xs = x(j, k);
        const Pack<P> w = load_pack<P>(weight + k * P);
        const Pack<P> b = load_pack<P>(bias + k * P);
        UNROLL
        for (int e = 0; e < P; e++) { xs.x[e] = (xs.x[e] - m) * s * w.x[e] + b.x[e]; }
        store_pack<P>(o + k * P, xs);
    });
    if (mean != nullptr && lane == 0) {     // what the backward pass needs
        mean[row] = m;
        rstd[row] = s;
    }
}

LAUNCHER void layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                                const floatX* bias, size_t N, int C, float eps, Stream stream) {
    with_row(C, [&](auto P, auto KEPT) {
        launch(layernorm_forward_kernel<P, KEPT>, Grid(N, 32, 0, stream), out, mean, rstd, inp, weight, bias, C, eps);
    });
}

// One block per slab of rows, which its warps take in turn; on a CPU a block is one thread. Every row adds to the same
// C numbers of dweight and dbias. If blocks added to them in memory as they finish, two runs would differ in their last
// bits. So each warp has its own sums, in registers (KEPT > 0) or in shared memory, each block has a row of partial
// (slabs,2C), and add_slabs() adds the rows in their order.
template <int P, int KEPT>
__global__ __launch_bounds__(128, KEPT > 3 ? 3 : 4) void layernorm_backward_kernel(
    floatX* dinp, float* partial, const floatX* dout, const floatX* inp, const float* mean, const float* rstd,
    const floatX* weight, size_t N, int C) {
    const size_t length = ceil_div(N, (size_t)gridDim.x);       // rows per slab
    const size_t begin = blockIdx.x * length;
    const size_t end = imin(begin + length, N);
    const int packs = C / P;
    const int lanes = imin((int)blockDim.x, 32);
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int warps = ceil_div((int)blockDim.x, 32);
    float* sums = dynamic_shared();         // (warps,2,C)
    float* dw = sums + warp * 2 * C;        // element e of pack k is at e * packs + k, so that neighbouring threads
    float* db = dw + C;                     // have different banks
    Pack<P> kept_dw[imax(KEPT, 1)] = {};    // the lane's own sums, if it keeps its packs
    Pack<P> kept_db[imax(KEPT, 1)] = {};
    if constexpr (KEPT == 0) {
        for (int c = threadIdx.x; c < warps * 2 * C; c += blockDim.x) { sums[c] = 0.0f; }
        __syncthreads();
    }
    const RowPacks<P, KEPT> w(weight, lane, packs);
    for (size_t row = begin + warp; row < end; row += warps) {
        floatX* to = dinp + row * C;
        const RowPacks<P, KEPT> x(inp + row * C, lane, packs);
        const RowPacks<P, KEPT> dy(dout + row * C, lane, packs);
        const RowPacks<P, KEPT> dx(to, lane, packs);
        const float m = mean[row];
        const float s = rstd[row];
        // 1. the two means, and this row's part of dweight and dbias. No two threads share an element of dw, db:
        // a thread takes the same channels in every row.
        const auto sum = row_sums<KEPT, 2>(lane, packs, lanes, [&](float* of, int j, int k) {
            const Pack<P> xs = x(j, k);
            const Pack<P> dys = dy(j, k);
            const Pack<P> ws = w(j, k);
            UNROLL
            for (int e = 0; e < P; e++) {
                const float n = (xs.x[e] - m) * s;
                const float dn = dys.x[e] * ws.x[e];
                of[0] += dn;
                of[1] = fused_madd(dn, n, of[1]);
                float& dw_of = KEPT > 0 ? kept_dw[j].x[e] : dw[e * packs + k];
                float& db_of = KEPT > 0 ? kept_db[j].x[e] : db[e * packs + k];
                dw_of = fused_madd(dys.x[e], n, dw_of);
                db_of += dys.x[e];
            }
        });
        const float mean_dn = warp_sum(sum.x[0]) / C;       // removes what a shift of the whole row would change
        const float mean_dnn = warp_sum(sum.x[1]) / C;      // removes what stretching it would change
        // 2. dinp, which accumulates: the residual stream has a gradient already
        each_pack<KEPT>(lane, packs, lanes, [&](int j, int k) {
            const Pack<P> xs = x(j, k);
            const Pack<P> dys = dy(j, k);
            const Pack<P> ws = w(j, k);
            Pack<P> dxs = dx(j, k);
            UNROLL
            for (int e = 0; e < P; e++) {
                const float n = (xs.x[e] - m) * s;
                const float dn = dys.x[e] * ws.x[e];
                dxs.x[e] += s * (dn - mean_dn - n * mean_dnn);
            }
            store_pack<P>(to + k * P, dxs);
        });
    }
    if constexpr (KEPT > 0) {
        each_pack<KEPT>(lane, packs, lanes, [&](int j, int k) {
            UNROLL
            for (int e = 0; e < P; e++) {
                dw[e * packs + k] = kept_dw[j].x[e];
                db[e * packs + k] = kept_db[j].x[e];
            }
        });
    }
    // 3. the slab's sums: warp by warp, stored in the order of the channels again
    __syncthreads();
    partial += (size_t)blockIdx.x * 2 * C;          // (2C): dweight, then dbias
    for (int c = threadIdx.x; c < 2 * C; c += blockDim.x) {
        const int channel = c % C;
        const float* from = sums + (c - channel) + channel % P * packs + channel / P;
        float sum = from[0];
        for (int w = 1; w < warps; w++) { sum += from[w * 2 * C]; }
        partial[c] = sum;
    }
}

LAUNCHER void layernorm_backward(floatX* dinp, float* dweight, float* dbias, float* scratch, const floatX* dout,
                                 const floatX* inp, const float* mean, const float* rstd, const floatX* weight,
                                 size_t N, int C, Stream stream) {
    const size_t slabs = slab_count(N), stride = 2 * (size_t)C;
    with_row(C, [&](auto P, auto KEPT) {
        // four warps hide the latency of memory, if their sums fit into the default shared memory
        const size_t each = sizeof(float) * stride, room = 48 << 10;
        int warps = 4;
        while (warps > 1 && each * warps > room) { warps /= 2; }
        const Grid grid(slabs, 32 * warps, each * warps, stream);
        launch(layernorm_backward_kernel<P, KEPT>, grid, dinp, scratch, dout, inp, mean, rstd, weight, N, C);
    });
    add_slabs(dweight, scratch, slabs, stride, (size_t)C, stream);
    add_slabs(dbias, scratch + C, slabs, stride, (size_t)C, stream);
}
#endif
