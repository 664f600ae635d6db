// matmul.cuh -- out = inp weight^T + bias (+ residual), row-major, weight (OC,C) as in a linear layer.
//   backward: dinp = dout weight;  dweight += dout^T inp;  dbias += sum of dout's rows.     saves nothing.
//
// One kernel serves all three products: operands come with a row and a column stride, the output is cut into tiles whose
// sizes depend on the shapes alone, so the bits do not depend on the number of threads. A tile is one single-threaded
// CBLAS call where CBLAS was found (USE_CBLAS), and the portable blocked product below otherwise. Under nvcc the products
// go to cuBLASLt, and to the portable kernel only where rows are not 16-byte aligned. Whoever computes it, bias and
// residual are added to the float32 sum, which is rounded to floatX once.
#ifndef LLMC_MATMUL_CUH
#define LLMC_MATMUL_CUH

#include "device.h"

#if defined(__CUDACC__)
#define MATMUL_CUBLASLT 1           // a test defines it where a double of the library is
#endif
#if defined(MATMUL_CUBLASLT)
#include "cublaslt.cuh"
#endif
#if defined(USE_CBLAS) && !defined(CUDA_BUILD) && !defined(RACE_THREADS)
#include <cblas.h>
#define MATMUL_CBLAS 1
#endif

// One thread's fragment of block_matmul: RM rows x RN registers of `lanes`, accumulated over all of K.
template <bool Accumulate, int RM, int RN>
__device__ __forceinline__ void matmul_fragment(float* C, int ldc, const float* A, int a_row, int a_col, const float* B, int ldb, int K) {
    lanes acc[RM][RN];
    UNROLL
    for (int m = 0; m < RM; m++) {
        UNROLL
        for (int n = 0; n < RN; n++) { acc[m][n] = Accumulate ? load_lanes(C + m * ldc + n * LANES) : lanes{}; }
    }
    for (int k = 0; k < K; k++) {
        lanes b[RN];
        UNROLL
        for (int n = 0; n < RN; n++) { b[n] = load_lanes(B + (size_t)k * ldb + n * LANES); }
        UNROLL
        for (int m = 0; m < RM; m++) {
            const float a = A[(size_t)m * a_row + (size_t)k * a_col];
            UNROLL
            for (int n = 0; n < RN; n++) { acc[m][n] += a * b[n]; }
        }
    }
    UNROLL
    for (int m = 0; m < RM; m++) {
        UNROLL
        for (int n = 0; n < RN; n++) { store_lanes(C + m * ldc + n * LANES, acc[m][n]); }
    }
}

// C (M,N) = or += A (M,K) B (K,N), by all threads of a block; A[m * a_row + k * a_col], B and C row-major. N counts whole
// `lanes`, so B's and C's rows are padded to multiples of LANES. The caller synchronizes before and after.
template <bool Accumulate>
__device__ inline void block_matmul(float* C, int ldc, const float* A, int a_row, int a_col, const float* B, int ldb, int M, int N, int K) {
    constexpr int WIDTH = MICRO_N * LANES;
    const int down = ceil_div(M, MICRO_M), across = ceil_div(N, WIDTH);
    for (int f = threadIdx.x; f < down * across; f += blockDim.x) {
        const int m = f % down * MICRO_M, n = f / down * WIDTH;
        const float* a = A + (size_t)m * a_row;
        float* c = C + (size_t)m * ldc + n;
        if (m + MICRO_M <= M && n + WIDTH <= N) {
            matmul_fragment<Accumulate, MICRO_M, MICRO_N>(c, ldc, a, a_row, a_col, B + n, ldb, K);
        } else {
            for (int i = 0; i < MICRO_M && m + i < M; i++) {
                for (int j = 0; j < WIDTH && n + j < N; j += LANES) {
                    matmul_fragment<Accumulate, 1, 1>(c + i * ldc + j, ldc, a + (size_t)i * a_row, a_row, a_col, B + n + j, ldb, K);
                }
            }
        }
    }
}

// A matrix product out (M,N) = A (M,K) B (K,N) with strides, plus what is added to it.
struct MatmulArgs {
    floatX* out_x;              // the output is floatX (activations) ...
    float* out_f;               // ... or float32 (gradients of weights), accumulated into
    const floatX *A, *B;
    size_t a_row, a_col, b_row, b_col;
    const floatX *bias, *residual;
    size_t M, N, K;
    size_t tile_m, tile_n;
};

constexpr int MATMUL_K = LANES > 1 ? 256 : 16;              // depth of a packed slice of the portable product
constexpr int MATMUL_TILE_M = LANES > 1 ? 256 : 64, MATMUL_TILE_N = LANES > 1 ? 512 : 64;

// What is added to element (m,n) of the product: the sum of bias and residual
__device__ inline float matmul_addend(const MatmulArgs& p, size_t m, size_t n) {
    return (p.bias != nullptr ? (float)p.bias[n] : 0.0f) + (p.residual != nullptr ? (float)p.residual[m * p.N + n] : 0.0f);
}

// One block a tile of the output.
__global__ void matmul_kernel(MatmulArgs p) {
    const size_t tiles_m = ceil_div(p.M, p.tile_m), m0 = blockIdx.x % tiles_m * p.tile_m, n0 = blockIdx.x / tiles_m * p.tile_n;
    const int M = (int)(p.tile_m < p.M - m0 ? p.tile_m : p.M - m0), N = (int)(p.tile_n < p.N - n0 ? p.tile_n : p.N - n0);
    const floatX *A = p.A + m0 * p.a_row, *B = p.B + n0 * p.b_col;
#if defined(MATMUL_CBLAS)
    float* out = (p.out_f != nullptr ? p.out_f : p.out_x) + m0 * p.N + n0;
    const bool add = p.out_f != nullptr || p.bias != nullptr || p.residual != nullptr;
    for (int m = 0; m < M && p.out_f == nullptr && add; m++) {  // what it is added to: float32, here
        for (int n = 0; n < N; n++) { out[m * p.N + n] = matmul_addend(p, m0 + m, n0 + n); }
    }
    // a matrix of one row or column has both strides 1; CBLAS wants its rows to be as long as a row is
    const size_t lda = p.a_col == 1 ? std::max(p.a_row, p.K) : p.a_col, ldb = p.b_col == 1 ? std::max(p.b_row, p.N) : p.b_col;
    cblas_sgemm(CblasRowMajor, p.a_col == 1 ? CblasNoTrans : CblasTrans, p.b_col == 1 ? CblasNoTrans : CblasTrans, M, N, (int)p.K, 1.0f,
                A, (int)lda, B, (int)ldb, add ? 1.0f : 0.0f, out, (int)p.N);
#else
    // the product, slice by slice of K, from operands packed into shared memory: a (M,K), b (K,N), c (M,N)
    const int ldb = round_up((int)p.tile_n, LANES);
    float *a = dynamic_shared(), *b = a + p.tile_m * MATMUL_K, *c = b + (size_t)MATMUL_K * ldb;
    for (int e = threadIdx.x; e < M * ldb; e += blockDim.x) { c[e] = 0.0f; }
    for (size_t k0 = 0; k0 < p.K; k0 += MATMUL_K) {
        const int K = (int)(p.K - k0 < MATMUL_K ? p.K - k0 : MATMUL_K);
        __syncthreads();
        for (int e = threadIdx.x; e < M * K; e += blockDim.x) { a[e / K * MATMUL_K + e % K] = (float)A[e / K * p.a_row + (k0 + e % K) * p.a_col]; }
        for (int e = threadIdx.x; e < K * ldb; e += blockDim.x) {
            b[e] = e % ldb < N ? (float)B[(k0 + e / ldb) * p.b_row + e % ldb * p.b_col] : 0.0f;
        }
        __syncthreads();
        block_matmul<true>(c, ldb, a, MATMUL_K, 1, b, ldb, M, round_up(N, LANES), K);
    }
    __syncthreads();
    for (int m = 0; m < M; m++) {
        for (int n = threadIdx.x; n < N; n += blockDim.x) {
            const size_t o = (m0 + m) * p.N + n0 + n;
            if (p.out_f != nullptr) { p.out_f[o] += c[m * ldb + n]; }
            else { p.out_x[o] = (floatX)(matmul_addend(p, m0 + m, n0 + n) + c[m * ldb + n]); }
        }
    }
#endif
}

inline void matmul(MatmulArgs p, Stream stream) {
    if (p.M == 0 || p.N == 0) { return; }
#if defined(MATMUL_CUBLASLT)
    const bool into_float = p.out_f != nullptr;
    void* out = into_float ? (void*)p.out_f : (void*)p.out_x;
    const void* added = into_float ? (const void*)p.out_f : (const void*)p.residual;
    const size_t lda = p.a_col == 1 ? p.a_row : p.a_col, ldb = p.b_col == 1 ? p.b_row : p.b_col;
    if (cublaslt_product({out, added, p.A, p.B, p.bias, p.M, p.N, p.K, lda, ldb, p.a_col != 1, p.b_col != 1, into_float}, stream)) { return; }
#endif
    // tiles of equal size, at least 8 of them where that leaves 128 rows or columns
    size_t down = ceil_div(p.M, (size_t)MATMUL_TILE_M), across = ceil_div(p.N, (size_t)MATMUL_TILE_N);
    while (down * across < 8) {
        const size_t m = ceil_div(p.M, down), n = ceil_div(p.N, across);
        if (m < 256 && n < 256) { break; }
        if (m >= n) { down *= 2; } else { across *= 2; }
    }
    p.tile_m = round_up(ceil_div(p.M, down), (size_t)MICRO_M);
    p.tile_n = round_up(ceil_div(p.N, across), (size_t)LANES);
    size_t shared = 0;
#if defined(MATMUL_CBLAS)
    static const int once = (openblas_set_num_threads(1), 0);  // the tiles are what runs in parallel
    (void)once;
#else
    shared = sizeof(float) * (p.tile_m * MATMUL_K + MATMUL_K * p.tile_n + p.tile_m * p.tile_n);
#endif
    launch(matmul_kernel, Grid(ceil_div(p.M, p.tile_m) * ceil_div(p.N, p.tile_n), 256, shared, stream), p);
}

// Whether products take the same algorithms in every run, or those that this run measures to be fastest (cublaslt.cuh)
inline void matmul_deterministic(bool same) {
#if defined(MATMUL_CUBLASLT)
    cublaslt_is_tuned = !same;
#else
    (void)same;                     // there is but one
#endif
}

// out (N,OC) = inp (N,C) weight (OC,C)^T + bias (OC) + residual (N,OC); bias and residual may be null
inline void matmul_forward(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, const floatX* residual, size_t N,
                           int C, int OC, Stream stream) {
    matmul({out, nullptr, inp, weight, (size_t)C, 1, 1, (size_t)C, bias, residual, N, (size_t)OC, (size_t)C, 0, 0}, stream);
}

// Sums over rows, of anything: partial (slabs, C) in a fixed order, then the slabs in a fixed order. On a GPU there are more slabs,
// and few columns a block, for there to be many blocks; and a thread keeps its column's sum in a register, where a CPU's reads
// row after row.
#if defined(CUDA_BUILD)
constexpr size_t MAX_SLABS = 1024, ROW_SUM_COLUMNS = 256;
#else
constexpr size_t MAX_SLABS = 64, ROW_SUM_COLUMNS = (size_t)1 << 31;
#endif
inline size_t slab_count(size_t rows) { const size_t s = ceil_div(rows, (size_t)32); return s < MAX_SLABS ? s : MAX_SLABS; }

// One block a slab of rows and a piece of the columns; partial[s] is the sum of slab s's rows, from the first to the last.
__global__ void row_sum_kernel(float* partial, const floatX* dout, size_t N, int OC, size_t slabs) {
    const size_t slab = blockIdx.x % slabs, length = ceil_div(N, slabs), begin = slab * length, end = begin + length < N ? begin + length : N;
    const size_t c0 = blockIdx.x / slabs * ROW_SUM_COLUMNS, c1 = c0 + ROW_SUM_COLUMNS < (size_t)OC ? c0 + ROW_SUM_COLUMNS : (size_t)OC;
    float* p = partial + slab * OC;
#if defined(CUDA_BUILD)
    for (size_t c = c0 + threadIdx.x; c < c1; c += blockDim.x) {            // the sum stays in a register
        float sum = 0.0f;
        for (size_t n = begin; n < end; n++) { sum += (float)dout[n * OC + c]; }
        p[c] = sum;
    }
#else
    for (size_t c = c0 + threadIdx.x; c < c1; c += blockDim.x) { p[c] = 0.0f; }
    for (size_t n = begin; n < end; n++) {
        for (size_t c = c0 + threadIdx.x; c < c1; c += blockDim.x) { p[c] += (float)dout[n * OC + c]; }
    }
#endif
}

// out[c] += sum of partial[s * stride + c] over the slabs s
__global__ void slab_sum_kernel(float* out, const float* partial, size_t slabs, size_t stride, size_t C) {
#if defined(CUDA_BUILD)
    // 32 columns a block: each of its 8 warps sums every eighth slab
    __shared__ float sums[8][32];
    const size_t c = (size_t)blockIdx.x * 32 + threadIdx.x % 32;
    float sum = 0.0f;
    for (size_t s = threadIdx.x / 32; s < slabs && c < C; s += 8) { sum += partial[s * stride + c]; }
    sums[threadIdx.x / 32][threadIdx.x % 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32 || c >= C) { return; }
    for (int w = 1; w < 8; w++) { sum += sums[w][threadIdx.x]; }
    out[c] += sum;
#else
    const GridSpan span = grid_span(C);
    for (size_t s = 0; s < slabs; s++) {
        for (size_t c = span.begin; c < span.end; c += span.step) { out[c] += partial[s * stride + c]; }
    }
#endif
}
inline Grid slab_sum_grid(size_t C, Stream stream) {
#if defined(CUDA_BUILD)
    return Grid(ceil_div(C, (size_t)32), 256, 0, stream);
#else
    return Grid::over(C, stream);
#endif
}

// dinp (N,C), dweight (OC,C) and dbias (OC) accumulated in float32; dinp and dbias may be null. residual (N,C) or null is added to
// dinp: the gradient that reaches inp by another way. scratch: MAX_SLABS * OC floats
inline void matmul_backward(floatX* dinp, float* dweight, float* dbias, float* scratch, const floatX* dout, const floatX* inp,
                            const floatX* weight, size_t N, int C, int OC, Stream stream, const floatX* residual = nullptr) {
    const size_t c = (size_t)C, oc = (size_t)OC;
    if (dinp != nullptr) { matmul({dinp, nullptr, dout, weight, oc, 1, c, 1, nullptr, residual, N, c, oc, 0, 0}, stream); }
    matmul({nullptr, dweight, dout, inp, 1, oc, c, 1, nullptr, nullptr, oc, c, N, 0, 0}, stream);
    if (dbias != nullptr) {
        const size_t slabs = slab_count(N);
        launch(row_sum_kernel, Grid(slabs * ceil_div(oc, ROW_SUM_COLUMNS), 256, 0, stream), scratch, dout, N, OC, slabs);
        launch(slab_sum_kernel, slab_sum_grid(oc, stream), dbias, scratch, slabs, oc, oc);
    }
}

#endif
