// layernorm.cuh -- out = (inp - mean) * rstd * weight + bias over the C channels of a row.    Ba et al. 2016, eq. 3-4
//   backward, with n = (inp - mean) * rstd and dn = dout * weight:
//     dinp += rstd * (dn - mean_C(dn) - n * mean_C(dn * n))
//     The two means are there because mean and rstd depend on inp too: the output does not follow a change of the
//     input that shifts or stretches the whole row.
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

#if !defined(KERNELS_ELSEWHERE)
// One block per row; on a GPU a block is one warp, so no warp waits for another.
template <int P>
__global__ void layernorm_forward_kernel(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                                         const floatX* bias, int C, float eps) {
    const size_t row = blockIdx.x;
    const floatX* x = inp + row * C;        // (C): this block's row
    floatX* o = out + row * C;              // (C)
    // 1. the mean. The threads of the block take packs of P neighbouring channels in turn; warp_sum adds up what
    // they have found and gives every one of them the total.
    const int packs = C / P;
    const auto sum = sums_over<1>(threadIdx.x, packs, blockDim.x, [&](float* s, int k) {
        const Pack<P> xs = load_pack<P>(x + k * P);
        UNROLL
        for (int e = 0; e < P; e++) { s[0] += xs.x[e]; }
    });
    const float m = warp_sum(sum.x[0]) / C;                         // the same number in every thread
    // 2. the variance, from the differences: sum(x^2) - C m^2 would cancel
    const auto squares = sums_over<1>(threadIdx.x, packs, blockDim.x, [&](float* s, int k) {
        const Pack<P> xs = load_pack<P>(x + k * P);
        UNROLL
        for (int e = 0; e < P; e++) { s[0] = fused_madd(xs.x[e] - m, xs.x[e] - m, s[0]); }
    });
    const float s = 1.0f / sqrtf(warp_sum(squares.x[0]) / C + eps);     // 1 / standard deviation
    // 3. the output: normalised, then scaled and shifted per channel
    for (int c = threadIdx.x * P; c < C; c += blockDim.x * P) {
        Pack<P> xs = load_pack<P>(x + c);
        const Pack<P> w = load_pack<P>(weight + c);
        const Pack<P> b = load_pack<P>(bias + c);
        UNROLL
        for (int e = 0; e < P; e++) { xs.x[e] = (xs.x[e] - m) * s * w.x[e] + b.x[e]; }
        store_pack<P>(o + c, xs);
    }
    if (mean != nullptr && threadIdx.x == 0) {      // what the backward pass needs
        mean[row] = m;
        rstd[row] = s;
    }
}

LAUNCHER void layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                                const floatX* bias, size_t N, int C, float eps, Stream stream) {
    with_pack((size_t)C, [&](auto P) {
        launch(layernorm_forward_kernel<P>, Grid(N, 32, 0, stream), out, mean, rstd, inp, weight, bias, C, eps);
    });
}

// One block per slab of rows, which its warps take in turn; on a CPU a block is one thread. Their sums of dweight and
// dbias are collected in shared memory, added up and go to partial (slabs,2C).
//
// Every row adds to the same C numbers of dweight and dbias. If each block added its rows to them in memory, the order
// would be that in which the blocks happen to finish, and two runs would differ in their last bits. So each warp has
// sums of its own, each block a row of partial, and add_slabs() adds these up in their order.
template <int P>
__global__ void layernorm_backward_kernel(floatX* dinp, float* partial, const floatX* dout, const floatX* inp,
                                          const float* mean, const float* rstd, const floatX* weight, size_t N, int C) {
    const size_t length = ceil_div(N, (size_t)gridDim.x);       // rows per slab
    const size_t begin = blockIdx.x * length;
    const size_t end = imin(begin + length, N);
    const int packs = C / P;
    const int lanes = imin((int)blockDim.x, 32);
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int warps = ceil_div((int)blockDim.x, 32);
    float* sums = dynamic_shared();         // (warps,2,C)
    float* dw = sums + warp * 2 * C;        // here and in db, element e of pack k is at e * packs + k: neighbouring
    float* db = dw + C;                     // threads, other banks
    for (int c = threadIdx.x; c < warps * 2 * C; c += blockDim.x) { sums[c] = 0.0f; }
    __syncthreads();
    for (size_t row = begin + warp; row < end; row += warps) {
        const floatX* x = inp + row * C;
        const floatX* dy = dout + row * C;
        floatX* dx = dinp + row * C;
        const float m = mean[row];
        const float s = rstd[row];
        // 1. the two means, and this row's part of dweight and dbias. No two threads share an element of dw, db:
        // a thread takes the same channels in every row.
        const auto sum = sums_over<2>(lane, packs, lanes, [&](float* of, int k) {
            const Pack<P> xs = load_pack<P>(x + k * P);
            const Pack<P> dys = load_pack<P>(dy + k * P);
            const Pack<P> w = load_pack<P>(weight + k * P);
            UNROLL
            for (int e = 0; e < P; e++) {
                const float n = (xs.x[e] - m) * s;
                const float dn = dys.x[e] * w.x[e];
                of[0] += dn;
                of[1] = fused_madd(dn, n, of[1]);
                dw[e * packs + k] = fused_madd(dys.x[e], n, dw[e * packs + k]);
                db[e * packs + k] += dys.x[e];
            }
        });
        const float mean_dn = warp_sum(sum.x[0]) / C;       // removes what a shift of the whole row would change
        const float mean_dnn = warp_sum(sum.x[1]) / C;      // removes what stretching it would change
        // 2. dinp, which accumulates: the residual stream has a gradient already
        for (int k = lane; k < packs; k += lanes) {
            const Pack<P> xs = load_pack<P>(x + k * P);
            const Pack<P> dys = load_pack<P>(dy + k * P);
            const Pack<P> w = load_pack<P>(weight + k * P);
            Pack<P> dxs = load_pack<P>(dx + k * P);
            UNROLL
            for (int e = 0; e < P; e++) {
                const float n = (xs.x[e] - m) * s;
                const float dn = dys.x[e] * w.x[e];
                dxs.x[e] += s * (dn - mean_dn - n * mean_dnn);
            }
            store_pack<P>(dx + k * P, dxs);
        }
    }
    // 3. the slab's sums: over the warps, in their order, and back in the order of the channels
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
    with_pack((size_t)C, [&](auto P) {
        // four warps hide the latency of memory, if their sums fit into the default shared memory
        const size_t each = sizeof(float) * stride, room = 48 << 10;
        int warps = 4;
        while (warps > 1 && each * warps > room) { warps /= 2; }
        const Grid grid(slabs, 32 * warps, each * warps, stream);
        launch(layernorm_backward_kernel<P>, grid, dinp, scratch, dout, inp, mean, rstd, weight, N, C);
    });
    add_slabs(dweight, scratch, slabs, stride, (size_t)C, stream);
    add_slabs(dbias, scratch + C, slabs, stride, (size_t)C, stream);
}
#endif
