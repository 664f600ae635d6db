// layernorm.cuh -- out = (inp - mean) * rstd * weight + bias over the C channels of a row.    Ba et al. 2016, eq. 3-4
//   backward, with n = (inp - mean) * rstd and dn = dout * weight:
//     dinp += rstd * (dn - mean_C(dn) - n * mean_C(dn * n))
//     The two means are there because mean and rstd depend on inp too: the output does not follow a change of the
//     input that shifts or stretches the whole row.
//   saves mean, rstd (N) float32.  dinp, dweight, dbias accumulate.
#ifndef LLMC_LAYERNORM_CUH
#define LLMC_LAYERNORM_CUH

#include "base/reduce.cuh"

// One block per row; on a GPU a block is one warp, so no warp waits for another. mean and rstd may be null
// (evaluation).
template <int P>
__global__ void layernorm_forward_kernel(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                                         const floatX* bias, int C, float eps) {
    const size_t row = blockIdx.x;
    const floatX* x = inp + row * C;
    floatX* o = out + row * C;
    // 1. the mean
    float sum = 0.0f;
    for (int c = threadIdx.x * P; c < C; c += blockDim.x * P) {
        const Pack<P> xs = load_pack<P>(x + c);
        UNROLL
        for (int e = 0; e < P; e++) { sum += xs.x[e]; }
    }
    const float m = block_sum(sum) / C;
    // 2. the variance, from the differences: sum(x^2) - C m^2 would cancel
    float squares = 0.0f;
    for (int c = threadIdx.x * P; c < C; c += blockDim.x * P) {
        const Pack<P> xs = load_pack<P>(x + c);
        UNROLL
        for (int e = 0; e < P; e++) { squares += (xs.x[e] - m) * (xs.x[e] - m); }
    }
    const float s = 1.0f / sqrtf(block_sum(squares) / C + eps);
    // 3. the output
    for (int c = threadIdx.x * P; c < C; c += blockDim.x * P) {
        Pack<P> xs = load_pack<P>(x + c);
        const Pack<P> w = load_pack<P>(weight + c);
        const Pack<P> b = load_pack<P>(bias + c);
        UNROLL
        for (int e = 0; e < P; e++) { xs.x[e] = (xs.x[e] - m) * s * w.x[e] + b.x[e]; }
        store_pack<P>(o + c, xs);
    }
    if (mean != nullptr && threadIdx.x == 0) {
        mean[row] = m;
        rstd[row] = s;
    }
}

// out, inp (N,C), mean, rstd (N), weight, bias (C)
inline void layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                              const floatX* bias, size_t N, int C, float eps, Stream stream) {
    with_pack((size_t)C, [&](auto P) {
        const auto kernel = layernorm_forward_kernel<P>;
        launch(kernel, Grid(N, 32, 0, stream), out, mean, rstd, inp, weight, bias, C, eps);
    });
}

// One block per slab of rows; on a GPU a block is one warp. Its sums of dweight and dbias are collected in shared
// memory and go to partial (slabs,2C).
template <int P>
__global__ void layernorm_backward_kernel(floatX* dinp, float* partial, const floatX* dout, const floatX* inp,
                                          const float* mean, const float* rstd, const floatX* weight, size_t N, int C) {
    const size_t length = ceil_div(N, (size_t)gridDim.x);
    const size_t begin = blockIdx.x * length;
    const size_t end = imin(begin + length, N);
    const int packs = C / P;
    float* dw = dynamic_shared();           // element e of pack k at e * packs + k: neighbouring threads, other banks
    float* db = dw + C;
    for (int c = threadIdx.x; c < 2 * C; c += blockDim.x) { dw[c] = 0.0f; }
    __syncthreads();
    for (size_t row = begin; row < end; row++) {
        const floatX* x = inp + row * C;
        const floatX* dy = dout + row * C;
        floatX* dx = dinp + row * C;
        const float m = mean[row];
        const float s = rstd[row];
        // 1. the two means, and this row's part of dweight and dbias
        float sum = 0.0f;
        float sum_n = 0.0f;
        for (int k = threadIdx.x; k < packs; k += blockDim.x) {
            const Pack<P> xs = load_pack<P>(x + k * P);
            const Pack<P> dys = load_pack<P>(dy + k * P);
            const Pack<P> w = load_pack<P>(weight + k * P);
            UNROLL
            for (int e = 0; e < P; e++) {
                const float n = (xs.x[e] - m) * s;
                const float dn = dys.x[e] * w.x[e];
                sum += dn;
                sum_n += dn * n;
                dw[e * packs + k] += dys.x[e] * n;
                db[e * packs + k] += dys.x[e];
            }
        }
        const float mean_dn = block_sum(sum) / C;
        const float mean_dnn = block_sum(sum_n) / C;
        // 2. dinp
        for (int k = threadIdx.x; k < packs; k += blockDim.x) {
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
    __syncthreads();
    partial += (size_t)blockIdx.x * 2 * C;
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        partial[c] = dw[c % P * packs + c / P];
        partial[C + c] = db[c % P * packs + c / P];
    }
}

// dinp, dout, inp (N,C), dweight, dbias, weight (C), mean, rstd (N). scratch: MAX_SLABS * 2 * C floats
inline void layernorm_backward(floatX* dinp, float* dweight, float* dbias, float* scratch, const floatX* dout,
                               const floatX* inp, const float* mean, const float* rstd, const floatX* weight, size_t N,
                               int C, Stream stream) {
    const size_t slabs = slab_count(N), stride = 2 * (size_t)C;
    with_pack((size_t)C, [&](auto P) {
        const auto kernel = layernorm_backward_kernel<P>;
        const Grid grid(slabs, 32, sizeof(float) * stride, stream);
        launch(kernel, grid, dinp, scratch, dout, inp, mean, rstd, weight, N, C);
    });
    add_slabs(dweight, scratch, slabs, stride, (size_t)C, stream);
    add_slabs(dbias, scratch + C, slabs, stride, (size_t)C, stream);
}

#endif
