// layernorm.cuh -- out = (inp - mean) * rstd * weight + bias over the C channels of a row.     Ba et al. 2016, eq. 3-4
//   backward, with n = (inp - mean) * rstd and dn = dout * weight:
//     dinp += rstd * (dn - mean_C(dn) - n * mean_C(dn * n)): the two means are what mean and rstd themselves depend on.
//   saves mean, rstd (N) float32.  dinp, dweight, dbias accumulate.
#ifndef LLMC_LAYERNORM_CUH
#define LLMC_LAYERNORM_CUH

#include "matmul.cuh"

// One block a row. mean and rstd may be null (evaluation).
__global__ void layernorm_forward_kernel(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight, const floatX* bias,
                                         int C, float eps) {
    const size_t row = blockIdx.x;
    const floatX* x = inp + row * C;
    floatX* o = out + row * C;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) { sum += (float)x[c]; }
    const float m = block_sum(sum) / C;
    float squares = 0.0f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) { const float d = (float)x[c] - m; squares += d * d; }
    const float s = 1.0f / sqrtf(block_sum(squares) / C + eps);
    for (int c = threadIdx.x; c < C; c += blockDim.x) { o[c] = (floatX)(((float)x[c] - m) * s * (float)weight[c] + (float)bias[c]); }
    if (mean != nullptr && threadIdx.x == 0) {
        mean[row] = m;
        rstd[row] = s;
    }
}

inline void layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight, const floatX* bias, size_t N,
                              int C, float eps, Stream stream) {
    launch(layernorm_forward_kernel, Grid(N, 256, 0, stream), out, mean, rstd, inp, weight, bias, C, eps);
}

// One block a slab of rows; its sums of dweight and dbias go to partial (slabs, 2C).
__global__ void layernorm_backward_kernel(floatX* dinp, float* partial, const floatX* dout, const floatX* inp, const float* mean,
                                          const float* rstd, const floatX* weight, size_t N, int C) {
    const size_t length = ceil_div(N, (size_t)gridDim.x), begin = blockIdx.x * length, end = begin + length < N ? begin + length : N;
    float *dw = partial + (size_t)blockIdx.x * 2 * C, *db = dw + C;
    for (int c = threadIdx.x; c < 2 * C; c += blockDim.x) { dw[c] = 0.0f; }
    __syncthreads();
    for (size_t row = begin; row < end; row++) {
        const floatX *x = inp + row * C, *dy = dout + row * C;
        floatX* dx = dinp + row * C;
        const float m = mean[row], s = rstd[row];
        float sum = 0.0f, sum_n = 0.0f;
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            const float n = ((float)x[c] - m) * s, dn = (float)dy[c] * (float)weight[c];
            sum += dn;
            sum_n += dn * n;
            dw[c] += (float)dy[c] * n;
            db[c] += (float)dy[c];
        }
        const float mean_dn = block_sum(sum) / C, mean_dnn = block_sum(sum_n) / C;
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            const float n = ((float)x[c] - m) * s, dn = (float)dy[c] * (float)weight[c];
            dx[c] = (floatX)((float)dx[c] + s * (dn - mean_dn - n * mean_dnn));
        }
    }
}

// scratch: MAX_SLABS * 2 * C floats
inline void layernorm_backward(floatX* dinp, float* dweight, float* dbias, float* scratch, const floatX* dout, const floatX* inp,
                               const float* mean, const float* rstd, const floatX* weight, size_t N, int C, Stream stream) {
    const size_t slabs = slab_count(N), stride = 2 * (size_t)C;
    launch(layernorm_backward_kernel, Grid(slabs, 256, 0, stream), dinp, scratch, dout, inp, mean, rstd, weight, N, C);
    launch(slab_sum_kernel, slab_sum_grid((size_t)C, stream), dweight, scratch, slabs, stride, (size_t)C);
    launch(slab_sum_kernel, slab_sum_grid((size_t)C, stream), dbias, scratch + C, slabs, stride, (size_t)C);
}

#endif
