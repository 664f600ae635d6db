// matmul.cuh -- the linear layer: out = inp weight^T + bias + residual, with weight (OC,C).
//   backward: dinp = dout weight;  dweight += dout^T inp;  dbias += sum of dout's rows.     saves nothing.
//
// All three products are a matmul() or matmul_add() of views (base/matrix.cuh). On a CPU base/gemm.h computes the
// output tile by tile, with the same bits for any tiles and threads. Under nvcc cuBLASLt computes whole products, and
// the portable kernel below only products with rows that are not aligned to 16 bytes.
// Bias, residual and product are added in float32 and rounded to floatX once.
#pragma once

#include "base/matrix.cuh"
#include "gelu.cuh"

// Bytes of device memory for the parts of cuBLASLt's split sums, which take 100 MB for the xl model.
constexpr size_t MATMUL_WORKSPACE = ON_GPU ? (size_t)128 << 20 : 0;
// out (N,OC) = inp (N,C) weight (OC,C)^T + bias (OC) + residual (N,OC); bias and residual may be null.
// row: elements from a row of out or residual to the next, 0: OC
void matmul_forward(floatX* out, const Matrix<const floatX>& inp, const Matrix<const floatX>& weight,
                    const floatX* bias, const floatX* residual, Stream stream, int row = 0);
// dinp (N,C) = dout (N,OC) weight (OC,C) + residual (N,C), inp's gradient from elsewhere; residual may be null.
// dweight (OC,C) and dbias (OC) accumulate in float32; dinp and dbias may be null. scratch: MAX_SLABS * OC floats.
// row: elements from a row of dout to the next, 0: OC
void matmul_backward(floatX* dinp, float* dweight, float* dbias, float* scratch, const floatX* dout,
                     const floatX* residual, const Matrix<const floatX>& inp, const Matrix<const floatX>& weight,
                     Stream stream, int row = 0);
// out (M,N) = A (M,K) B (K,N) + bias (N) + residual (M,N); bias and residual may be null. row: as above
void matmul(floatX* out, const Matrix<const floatX>& A, const Matrix<const floatX>& B, const floatX* bias,
            const floatX* residual, Stream stream, int row = 0);
// pre (N,OC) = inp (N,C) weight (OC,C)^T + bias (OC), out (N,OC) = gelu(pre), GPT-2's. fuse allows one call of
// cuBLASLt, with GELU of the float32 sums, if STEP_EPILOGUES has it; returns whether one call did it
bool matmul_gelu_forward(floatX* out, floatX* pre, const Matrix<const floatX>& inp, const Matrix<const floatX>& weight,
                         const floatX* bias, bool fuse, Stream stream);
// matmul_backward, then gelu_backward of inp (N,C) = gelu(pre): dpre (N,C); dpre_sum (C), the gradient of the bias in
// pre, accumulates. One call of cuBLASLt makes dpre if STEP_EPILOGUES has it; returns whether it did.
// scratch: MAX_SLABS * max(OC, C) floats
bool matmul_gelu_backward(floatX* dpre, float* dpre_sum, float* dweight, float* dbias, float* scratch,
                          const floatX* dout, const floatX* pre, const Matrix<const floatX>& inp,
                          const Matrix<const floatX>& weight, Stream stream);
// sum (M,N) += A (M,K) B (K,N)
void matmul_add(float* sum, const Matrix<const floatX>& A, const Matrix<const floatX>& B, Stream stream);
// out (M,N) = A (M,K) B (K,N) + bias (N), like matmul() but in float32 in every build; bias may be null
void matmul_float(float* out, const Matrix<const floatX>& A, const Matrix<const floatX>& B, const floatX* bias,
                  Stream stream);

#if !defined(LAYERS_ELSEWHERE)
// What cuBLASLt may do to a product's float32 sums in registers, before it rounds them; GELU is GPT-2's form
enum class Epilogue {
    None,
    Gelu,                           // extra (M,N) gets A B + bias, rounded, and out the GELU of the sums themselves
    GeluSlope                       // out = A B times GELU's slope at extra (M,N)
};
// out (M,N) = A (M,K) B (K,N) + bias (N) + added (M,N), rounded once; bias and added may be null
struct MatmulArgs {
    void* out;                      // floatX; into_float: float32
    const void* added;              // of out's type; into_float: out or null
    int row;                        // elements from a row of out or added to the next
    Matrix<const floatX> A, B;      // row-major or transposed
    const floatX* bias = nullptr;
    bool into_float = false;
    Epilogue epilogue = Epilogue::None;
    void* extra = nullptr;          // the epilogue's
    int tile_m = 0, tile_n = 0;     // the part of the output that one block of matmul_kernel computes
};

// What is added to element (m,n) of the product
__device__ inline float matmul_addend(const MatmulArgs& p, int m, int n) {
    const size_t at = (size_t)m * p.row + n;
    const float bias = p.bias != nullptr ? (float)p.bias[n] : 0.0f;
    if (p.added == nullptr) { return bias + 0.0f; }
    return bias + (p.into_float ? ((const float*)p.added)[at] : (float)((const floatX*)p.added)[at]);
}

#if defined(CUDA_BUILD)
constexpr int MATMUL_K = 16;                                // depth of a slice of the portable product
constexpr int MATMUL_TILE_M = 64, MATMUL_TILE_N = 64;       // rows and columns of the output per block, at most
constexpr int MATMUL_UNIT_M = MICRO_M, MATMUL_UNIT_N = LANES;       // tiles are multiples of these
inline size_t matmul_shared(int m, int n) { return sizeof(float) * (size_t)((m + n) * MATMUL_K + m * n); }

// A block's tile of the output, from (m0,n0) on: A (M,K) B (K,N), at most (tile_m,tile_n)
__device__ inline void matmul_tile(const MatmulArgs& p, int m0, int n0, const Matrix<const floatX>& A,
                                   const Matrix<const floatX>& B) {
    const int M = A.rows, N = B.cols;
    const int width = round_up(p.tile_n, LANES);
    // 1. the product, by slices of K that fit into shared memory
    const Matrix<float> a = view(dynamic_shared(), M, MATMUL_K);
    const Matrix<float> b = view(dynamic_shared() + p.tile_m * MATMUL_K, MATMUL_K, width);
    const Matrix<float> c = view(b.data + MATMUL_K * width, M, width);
    block_product<MATMUL_K>(c, A, B, a, b);
    // 2. the float32 sum is rounded to floatX once, after bias and residual were added
    for (int m = 0; m < M; m++) {
        for (int n = threadIdx.x; n < N; n += blockDim.x) {
            const size_t at = (size_t)(m0 + m) * p.row + n0 + n;
            const float sum = matmul_addend(p, m0 + m, n0 + n) + c(m, n);
            if (p.into_float) { ((float*)p.out)[at] = sum; }
            else { ((floatX*)p.out)[at] = (floatX)sum; }
        }
    }
}
#else
#define MATMUL_GEMM 1
#include "base/gemm.h"
constexpr int MATMUL_TILE_M = 256, MATMUL_TILE_N = 512;
constexpr int MATMUL_UNIT_M = GEMM_UNIT_M<floatX>, MATMUL_UNIT_N = GEMM_N;
inline size_t matmul_shared(int m, int n) {         // with room for the sums of a bf16 output
    return sizeof(float) * (gemm_panels(m) + (sizeof(floatX) == sizeof(float) ? 0 : (size_t)m * n));
}

inline void matmul_tile(const MatmulArgs& p, int m0, int n0, const Matrix<const floatX>& A,
                        const Matrix<const floatX>& B) {
    const int M = A.rows, N = B.cols;
    // 1. the addends, then the product on top: in place, or in shared memory if out is bf16
    const bool rounds = !p.into_float && sizeof(floatX) != sizeof(float);
    float* panels = dynamic_shared();
    const Matrix<float> whole = view((float*)p.out, p.A.rows, p.B.cols, p.row);
    const Matrix<float> out = rounds ? view(panels + gemm_panels(p.tile_m), M, N) : block(whole, m0, M, n0, N);
    for (int m = 0; m < M && !(p.into_float && p.added != nullptr); m++) {
        for (int n = 0; n < N; n++) { out(m, n) = matmul_addend(p, m0 + m, n0 + n); }
    }
    gemm(out, A, B, panels);
    // 2. the sums are rounded to floatX once
    for (int m = 0; m < M && rounds; m++) {
        floatX* to = (floatX*)p.out + (size_t)(m0 + m) * p.row + n0;
        for (int n = 0; n < N; n++) { to[n] = (floatX)out(m, n); }
    }
}
#endif

// One block per tile of the output, which needs some rows of A and columns of B. The last tiles may be smaller.
__global__ void matmul_kernel(MatmulArgs p) {
    const int tiles_m = ceil_div(p.A.rows, p.tile_m);
    const int m0 = (int)blockIdx.x % tiles_m * p.tile_m;
    const int n0 = (int)blockIdx.x / tiles_m * p.tile_n;
    matmul_tile(p, m0, n0, block(p.A, m0, p.tile_m, 0, p.A.cols), block(p.B, 0, p.B.rows, n0, p.tile_n));
}

// The epilogues that a bf16 build uses, added up: 1 GELU's backward, 2 its forward.
// docs/gpu.md, "Epilogues", says what each does to the bits and to the time.
#if !defined(STEP_EPILOGUES)
#define STEP_EPILOGUES 1
#endif
constexpr int EPILOGUES = ON_GPU && sizeof(floatX) == 2 ? STEP_EPILOGUES : 0;

#if defined(CUDA_BUILD)
#include "cublaslt.cuh"        // the emulator has a stand-in for the library
#else
inline bool cublaslt_product(const MatmulArgs&, Stream) { return false; }
#endif
// p with an epilogue that is bit `which` of EPILOGUES; false: nothing was done
inline bool matmul_with(int which, const MatmulArgs& p, Stream stream) {
    if ((EPILOGUES & which) == 0 || p.A.rows == 0) { return false; }
    const ProfiledLaunch profiled("matmul_kernel", stream, p.A.rows, p.B.cols, p.A.cols);
    return cublaslt_product(p, stream);
}

inline void matmul_launch(MatmulArgs p, Stream stream) {
    const int M = p.A.rows;
    const int N = p.B.cols;
    check(p.A.cols == p.B.rows, "a product of a (%d,%d) and a (%d,%d) matrix", M, p.A.cols, p.B.rows, N);
    if (M == 0 || N == 0) { return; }
    const ProfiledLaunch profiled("matmul_kernel", stream, M, N, p.A.cols);     // cuBLASLt's or the portable one
    if (cublaslt_product(p, stream)) { return; }
    // tiles of equal size, at least 8 of them if that leaves each at least 128 rows or columns
    int down = ceil_div(M, MATMUL_TILE_M);          // tiles in a column of tiles
    int across = ceil_div(N, MATMUL_TILE_N);        // and in a row
    while (down * across < 8) {
        const int m = ceil_div(M, down);
        const int n = ceil_div(N, across);
        if (m < 256 && n < 256) { break; }
        if (m >= n) { down *= 2; } else { across *= 2; }
    }
    p.tile_m = round_up(ceil_div(M, down), MATMUL_UNIT_M);
    p.tile_n = round_up(ceil_div(N, across), MATMUL_UNIT_N);
    const size_t tiles = (size_t)ceil_div(M, p.tile_m) * (size_t)ceil_div(N, p.tile_n);
    launch(matmul_kernel, Grid(tiles, 256, matmul_shared(p.tile_m, p.tile_n), stream), p);
}

LAUNCHER void matmul(floatX* out, const Matrix<const floatX>& A, const Matrix<const floatX>& B, const floatX* bias,
                     const floatX* residual, Stream stream, int row) {
    matmul_launch({out, residual, row == 0 ? B.cols : row, A, B, bias}, stream);
}
LAUNCHER void matmul_add(float* sum, const Matrix<const floatX>& A, const Matrix<const floatX>& B, Stream stream) {
    matmul_launch({sum, sum, B.cols, A, B, nullptr, true}, stream);
}

// One block per row of out.
__global__ void bias_rows_kernel(float* out, const floatX* bias, int N) {
    float* row = out + (size_t)blockIdx.x * N;      // (N)
    for (int n = threadIdx.x; n < N; n += blockDim.x) { row[n] = (float)bias[n]; }
}
LAUNCHER void matmul_float(float* out, const Matrix<const floatX>& A, const Matrix<const floatX>& B, const floatX* bias,
                           Stream stream) {
    if (bias != nullptr && sizeof(floatX) != sizeof(float)) {       // cuBLASLt wants a bias of out's type
        launch(bias_rows_kernel, Grid((size_t)A.rows, 256, 0, stream), out, bias, B.cols);
        return matmul_add(out, A, B, stream);
    }
    matmul_launch({out, nullptr, B.cols, A, B, bias, true}, stream);
}

LAUNCHER void matmul_forward(floatX* out, const Matrix<const floatX>& inp, const Matrix<const floatX>& weight,
                             const floatX* bias, const floatX* residual, Stream stream, int row) {
    matmul(out, inp, transposed(weight), bias, residual, stream, row);
}

LAUNCHER void matmul_backward(floatX* dinp, float* dweight, float* dbias, float* scratch, const floatX* dout,
                              const floatX* residual, const Matrix<const floatX>& inp,
                              const Matrix<const floatX>& weight, Stream stream, int row) {
    const int N = inp.rows, OC = weight.rows;
    const Matrix<const floatX> d = view(dout, N, OC, row == 0 ? OC : row);
    // out = inp weight^T, so dinp sends dout back through weight, and dweight pairs each output with each input
    if (dinp != nullptr) { matmul(dinp, d, weight, nullptr, residual, stream); }
    matmul_add(dweight, transposed(d), inp, stream);
    if (dbias != nullptr) { add_row_sums(dbias, scratch, d, stream); }
}

LAUNCHER bool matmul_gelu_forward(floatX* out, floatX* pre, const Matrix<const floatX>& inp,
                                  const Matrix<const floatX>& weight, const floatX* bias, bool fuse, Stream stream) {
    const MatmulArgs p = {out, nullptr, weight.rows, inp, transposed(weight), bias, false, Epilogue::Gelu, pre};
    if (fuse && matmul_with(2, p, stream)) { return true; }
    matmul_forward(pre, inp, weight, bias, nullptr, stream);
    gelu_forward(out, pre, (size_t)inp.rows * weight.rows, Gelu::Tanh, stream);
    return false;
}
LAUNCHER bool matmul_gelu_backward(floatX* dpre, float* dpre_sum, float* dweight, float* dbias, float* scratch,
                                   const floatX* dout, const floatX* pre, const Matrix<const floatX>& inp,
                                   const Matrix<const floatX>& weight, Stream stream) {
    const int N = inp.rows, C = inp.cols;
    const Matrix<const floatX> d = view(dout, N, weight.rows);
    const MatmulArgs p = {dpre, nullptr, C, d, weight, nullptr, false, Epilogue::GeluSlope, const_cast<floatX*>(pre)};
    const bool fused = matmul_with(1, p, stream);
    matmul_backward(fused ? nullptr : dpre, dweight, dbias, scratch, dout, nullptr, inp, weight, stream);
    if (fused) { add_row_sums(dpre_sum, scratch, view(dpre, N, C), stream); }
    else { gelu_backward(dpre, dpre_sum, scratch, dpre, pre, (size_t)N, C, Gelu::Tanh, stream); }
    return fused;
}
#endif
