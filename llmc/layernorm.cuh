// layernorm.cuh -- out = (inp - mean) * rstd * weight + bias over the C channels of a row.     Ba et al. 2016, eq. 3-4
//   backward, with n = (inp - mean) * rstd and dn = dout * weight:
//     dinp += rstd * (dn - mean_C(dn) - n * mean_C(dn * n)): the two means are what mean and rstd themselves depend on.
//   saves mean, rstd (N) float32.  dinp, dweight, dbias accumulate.
#ifndef LLMC_LAYERNORM_CUH
#define LLMC_LAYERNORM_CUH

#include "base/reduce.cuh"

// One block a row, of one warp on a GPU: no warp waits for another one. mean and rstd may be null (evaluation).
template <int P>
__global__ void layernorm_forward_kernel(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight, const floatX* bias,
                                         int C, float eps) {
    const size_t row = blockIdx.x;
    const floatX* x = inp + row * C;
    floatX* o = out + row * C;
    float sum = 0.0f;
    for (int c = threadIdx.x * P; c < C; c += blockDim.x * P) {
        const Pack<P> xs = load_pack<P>(x + c);
        UNROLL
        for (int e = 0; e < P; e++) { sum += xs.x[e]; }
    }
    const float m = block_sum(sum) / C;
    float squares = 0.0f;
    for (int c = threadIdx.x * P; c < C; c += blockDim.x * P) {
        const Pack<P> xs = load_pack<P>(x + c);
        UNROLL
        for (int e = 0; e < P; e++) { squares += (xs.x[e] - m) * (xs.x[e] - m); }
    }
    const float s = 1.0f / sqrtf(block_sum(squares) / C + eps);
    for (int c = threadIdx.x * P; c < C; c += blockDim.x * P) {
        Pack<P> xs = load_pack<P>(x + c);
        const Pack<P> w = load_pack<P>(weight + c), b = load_pack<P>(bias + c);
        UNROLL
        for (int e = 0; e < P; e++) { xs.x[e] = (xs.x[e] - m) * s * w.x[e] + b.x[e]; }
        store_pack<P>(o + c, xs);
    }
    if (mean != nullptr && threadIdx.x == 0) {
        mean[row] = m;
        rstd[row] = s;
    }
}

inline void layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight, const floatX* bias, size_t N,
                              int C, float eps, Stream stream) {
    with_pack((size_t)C, [&](auto P) { launch(layernorm_forward_kernel<P>, Grid(N, 32, 0, stream), out, mean, rstd, inp, weight, bias, C, eps); });
}

// One block a slab of rows, of one warp on a GPU; its sums of dweight and dbias, in shared memory, go to partial (slabs, 2C).
template <int P>
__global__ void layernorm_backward_kernel(floatX* dinp, float* partial, const floatX* dout, const floatX* inp, const float* mean,
                                          const float* rstd, const floatX* weight, size_t N, int C) {
    const size_t length = ceil_div(N, (size_t)gridDim.x), begin = blockIdx.x * length, end = begin + length < N ? begin + length : N;
    float *dw = dynamic_shared(), *db = dw + C;             // element e of pack k at e K + k: neighbouring threads, neighbouring banks
    const int K = C / P;
    for (int c = threadIdx.x; c < 2 * C; c += blockDim.x) { dw[c] = 0.0f; }
    __syncthreads();
    for (size_t row = begin; row < end; row++) {
        const floatX *x = inp + row * C, *dy = dout + row * C;
        floatX* dx = dinp + row * C;
        const float m = mean[row], s = rstd[row];
        float sum = 0.0f, sum_n = 0.0f;
        for (int k = threadIdx.x; k < K; k += blockDim.x) {
            const Pack<P> xs = load_pack<P>(x + k * P), dys = load_pack<P>(dy + k * P), w = load_pack<P>(weight + k * P);
            UNROLL
            for (int e = 0; e < P; e++) {
                const float n = (xs.x[e] - m) * s, dn = dys.x[e] * w.x[e];
                sum += dn;
                sum_n += dn * n;
                dw[e * K + k] += dys.x[e] * n;
                db[e * K + k] += dys.x[e];
            }
        }
        const float mean_dn = block_sum(sum) / C, mean_dnn = block_sum(sum_n) / C;
        for (int k = threadIdx.x; k < K; k += blockDim.x) {
            const Pack<P> xs = load_pack<P>(x + k * P), dys = load_pack<P>(dy + k * P), w = load_pack<P>(weight + k * P);
            Pack<P> dxs = load_pack<P>(dx + k * P);
            UNROLL
            for (int e = 0; e < P; e++) {
                const float n = (xs.x[e] - m) * s, dn = dys.x[e] * w.x[e];
                dxs.x[e] += s * (dn - mean_dn - n * mean_dnn);
            }
            store_pack<P>(dx + k * P, dxs);
        }
    }
    __syncthreads();
    partial += (size_t)blockIdx.x * 2 * C;
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        partial[c] = dw[c % P * K + c / P];
        partial[C + c] = db[c % P * K + c / P];
    }
}

// scratch: MAX_SLABS * 2 * C floats
inline void layernorm_backward(floatX* dinp, float* dweight, float* dbias, float* scratch, const floatX* dout, const floatX* inp,
                               const float* mean, const float* rstd, const floatX* weight, size_t N, int C, Stream stream) {
    const size_t slabs = slab_count(N), stride = 2 * (size_t)C;
    with_pack((size_t)C, [&](auto P) {
        launch(layernorm_backward_kernel<P>, Grid(slabs, 32, sizeof(float) * stride, stream), dinp, scratch, dout, inp, mean, rstd, weight, N, C);
    });
    add_slabs(dweight, scratch, slabs, stride, (size_t)C, stream);
    add_slabs(dbias, scratch + C, slabs, stride, (size_t)C, stream);
}

#endif
