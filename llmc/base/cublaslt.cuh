// base/cublaslt.cuh -- matrix products by NVIDIA's cuBLASLt; matmul.cuh, its one user, includes it where that library
// exists.
//
// Sums are float32 (without TF32). The bias and what else is added join them before the one rounding to the output's
// type. The same bits: NVIDIA promises them for the same library, GPU and algorithm, on one stream with one workspace.
// The algorithm is the first that the heuristic names, a function of the library, the GPU and the shape. So a run that
// is resumed repeats the run that never stopped. With cublaslt_is_tuned it is the fastest of the first eight, measured
// when a shape is first seen; the next run may choose another one, and then its bits differ. The bias's gradient is not
// fused (BGRADB): its order of summation would be the library's, and it would overwrite, not add. GELU is not fused:
// the backward wants the values before it, so the fused product would write both arrays too and save one read of fch.
// It would also take GELU of sums that were not rounded, while the backward differentiates at the rounded ones.
#ifndef LLMC_BASE_CUBLASLT_CUH
#define LLMC_BASE_CUBLASLT_CUH

#include <array>
#include <map>
#include <type_traits>

#include <cublasLt.h>

#include "matrix.cuh"

inline bool cublaslt_is_tuned = false;                      // --deterministic 0 sets it

// out (M,N) = A (M,K) B (K,N) + bias (N) + added (M,N); bias and added may be null, added may be out
struct LtProduct {
    void* out;
    const void* added;              // of out's type
    Matrix<const floatX> A, B;      // row-major or transposed
    const floatX* bias;
    bool into_float;                // out is float32; else floatX

    int M() const { return A.rows; }
    int N() const { return B.cols; }
    int K() const { return A.cols; }
};
inline bool is_transposed(const Matrix<const floatX>& m) { return m.col_stride != 1; }
// the length of a row of the array
inline int leading_dimension(const Matrix<const floatX>& m) { return is_transposed(m) ? m.col_stride : m.row_stride; }

// How products of one shape are computed
struct LtPlan {
    cublasLtMatmulDesc_t op = nullptr;
    cublasLtMatrixLayout_t first = nullptr;
    cublasLtMatrixLayout_t second = nullptr;
    cublasLtMatrixLayout_t out = nullptr;
    cublasLtMatmulAlgo_t algo = {};
    bool supported = false;                                 // false: the library has no algorithm for it
};
// Scratch memory that an algorithm may use, for split sums
constexpr size_t LT_WORKSPACE = (size_t)32 << 20;
struct CublasLt {                   // one per process, never destroyed: at exit the driver may be gone first
    cublasLtHandle_t handle = nullptr;
    void* workspace = nullptr;      // of one stream, on which products follow each other
    Stream stream = {};
    std::map<std::array<int, 7>, LtPlan> plans;             // by shape, strides and flags
};

// For messages: "(64,128) = (64,32) x (32,128) transposed + bias, 2-byte floats"
inline std::string product_text(const LtProduct& p) {
    auto operand = [](const Matrix<const floatX>& m) {
        return strprintf("(%d,%d)%s", m.rows, m.cols, is_transposed(m) ? " transposed" : "");
    };
    const char* bias = p.bias != nullptr ? " + bias" : "";
    const char* added = p.added != nullptr ? " + an array" : "";
    const char* into = p.into_float ? " into float32" : "";
    return strprintf("(%d,%d) = %s x %s%s%s, %zu-byte floats%s", p.M(), p.N(), operand(p.A).c_str(),
                     operand(p.B).c_str(), bias, added, sizeof(floatX), into);
}
// An error where cuBLASLt reports one; `what`: the call
inline void lt_check(cublasStatus_t status, const char* what, const LtProduct& p) {
    if (status == CUBLAS_STATUS_SUCCESS) { return; }
    die(status == CUBLAS_STATUS_ALLOC_FAILED ? EXIT_OUT_OF_MEMORY : EXIT_DEVICE,
        "%.*s: %s, in the product %s; CUBLASLT_LOG_LEVEL=2 in the environment makes cuBLASLt say more",
        (int)strcspn(what, "("), what, cublasLtGetStatusString(status), product_text(p).c_str());
}
#define LT_CHECK(call) lt_check(call, #call, p)

// Starts the product by one algorithm: out = 1 A B + beta added
inline cublasStatus_t lt_run(const CublasLt& lt, const LtPlan& plan, const cublasLtMatmulAlgo_t& algo,
                             const LtProduct& p) {
    const float one = 1.0f;
    const float beta = p.added != nullptr ? 1.0f : 0.0f;
    const void* added = p.added != nullptr ? p.added : p.out;       // with beta = 0 it is not read
    return cublasLtMatmul(lt.handle, plan.op, &one, p.B.data, plan.first, p.A.data, plan.second, &beta, added,
                          plan.out, p.out, plan.out, &algo, lt.workspace, LT_WORKSPACE, lt.stream);
}

// The index of the fastest candidate. They write to scratch memory; what is in it does not matter to the time.
inline int lt_fastest(const CublasLt& lt, const LtPlan& plan, const cublasLtMatmulHeuristicResult_t* candidates,
                      int count, LtProduct p) {
    void* scratch = device_malloc((size_t)p.M() * p.N() * (p.into_float ? sizeof(float) : sizeof(floatX)));
    p.out = scratch;
    if (p.added != nullptr) { p.added = scratch; }
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    int best = 0;
    float best_ms = INFINITY;
    for (int k = 0; k < count; k++) {
        const cublasLtMatmulAlgo_t& algo = candidates[k].algo;
        lt_check(lt_run(lt, plan, algo, p), "cublasLtMatmul", p);       // the first run also loads the kernel
        CUDA_CHECK(cudaEventRecord(begin, lt.stream));
        for (int r = 0; r < 5; r++) { lt_check(lt_run(lt, plan, algo, p), "cublasLtMatmul", p); }
        CUDA_CHECK(cudaEventRecord(end, lt.stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        float ms = 0.0f;
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (ms < best_ms) {
            best = k;
            best_ms = ms;
        }
    }
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    device_free(scratch);
    return best;
}

// cuBLASLt counts columns first, so it is asked for out^T = B^T A^T, whose arrays are the same: `first` is B, `second`
// A.
inline cublasLtMatrixLayout_t lt_layout(const Matrix<const floatX>& m, cudaDataType_t type, const LtProduct& p) {
    cublasLtMatrixLayout_t layout = nullptr;
    const int rows = is_transposed(m) ? m.rows : m.cols;        // the array's, columns first
    const int cols = is_transposed(m) ? m.cols : m.rows;
    LT_CHECK(cublasLtMatrixLayoutCreate(&layout, type, (uint64_t)rows, (uint64_t)cols, leading_dimension(m)));
    return layout;
}
// The bias of this call; all else of a plan depends on shapes alone
inline void lt_set_bias(const LtPlan& plan, const LtProduct& p) {
    LT_CHECK(cublasLtMatmulDescSetAttribute(plan.op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p.bias, sizeof(p.bias)));
}
// Sets what cuBLASLt wants to know of p: the operation and the three layouts
inline void lt_describe(LtPlan& plan, const LtProduct& p) {
    const cudaDataType_t type = std::is_same<floatX, float>::value ? CUDA_R_32F : CUDA_R_16BF;
    const cudaDataType_t out_type = p.into_float ? CUDA_R_32F : type;
    const cublasOperation_t op_first = is_transposed(p.B) ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t op_second = is_transposed(p.A) ? CUBLAS_OP_T : CUBLAS_OP_N;
    LT_CHECK(cublasLtMatmulDescCreate(&plan.op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    LT_CHECK(cublasLtMatmulDescSetAttribute(plan.op, CUBLASLT_MATMUL_DESC_TRANSA, &op_first, sizeof(op_first)));
    LT_CHECK(cublasLtMatmulDescSetAttribute(plan.op, CUBLASLT_MATMUL_DESC_TRANSB, &op_second, sizeof(op_second)));
    if (p.bias != nullptr) {
        const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        LT_CHECK(cublasLtMatmulDescSetAttribute(plan.op, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue)));
        LT_CHECK(cublasLtMatmulDescSetAttribute(plan.op, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof(type)));
        lt_set_bias(plan, p);
    }
    plan.first = lt_layout(p.B, type, p);
    plan.second = lt_layout(p.A, type, p);
    LT_CHECK(cublasLtMatrixLayoutCreate(&plan.out, out_type, (uint64_t)p.N(), (uint64_t)p.M(), p.N()));
}

// How p is computed, and all products of the same shape
inline LtPlan lt_plan(const CublasLt& lt, const LtProduct& p) {
    LtPlan plan;
    lt_describe(plan, p);
    cublasLtMatmulPreference_t preference;
    LT_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const void* value, size_t bytes) {
        LT_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, value, bytes));
    };
    // A split sum is kept in float32 and added up in a step of its own; the schemes that are left out round its parts
    // to the output's type.
    const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const uint32_t alignment = 16;              // bytes: what cublaslt_product has checked of all pointers
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof(schemes));
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &LT_WORKSPACE, sizeof(LT_WORKSPACE));
    for (auto operand : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                         CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
        prefer(operand, &alignment, sizeof(alignment));
    }
    cublasLtMatmulHeuristicResult_t found[8];
    int count = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(lt.handle, plan.op, plan.first, plan.second, plan.out, plan.out, preference,
                                       cublaslt_is_tuned ? 8 : 1, found, &count);
    LT_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) { lt_check(status, "cublasLtMatmulAlgoGetHeuristic", p); }
    plan.supported = status == CUBLAS_STATUS_SUCCESS && count > 0;
    if (plan.supported) {
        plan.algo = found[cublaslt_is_tuned ? lt_fastest(lt, plan, found, count, p) : 0].algo;
    } else {
        fprintf(stderr, "warning: cuBLASLt has no algorithm for the product %s; the slow portable kernel computes it\n",
                product_text(p).c_str());
    }
    return plan;
}

// Computes p, or returns false where the portable kernel has to: its fast kernels want rows that start on 16 bytes.
inline bool cublaslt_product(const LtProduct& p, Stream stream) {
    const int unit = 16 / sizeof(floatX);
    const int lda = leading_dimension(p.A);
    const int ldb = leading_dimension(p.B);
    const void* arrays[] = {p.out, p.added, p.A.data, p.B.data, p.bias};
    bool aligned = lda % unit == 0 && ldb % unit == 0 && p.N() % unit == 0;
    for (const void* x : arrays) { aligned = aligned && (uintptr_t)x % 16 == 0; }
    if (!aligned) { return false; }
    static CublasLt lt;
    if (lt.handle == nullptr) {
        LT_CHECK(cublasLtCreate(&lt.handle));
        lt.workspace = device_malloc(LT_WORKSPACE);
        lt.stream = stream;
    }
    check(stream == lt.stream, "expected all matrix products on one stream, because they share a workspace, got two");
    const int transposed = is_transposed(p.A) + 2 * is_transposed(p.B);
    const int flags = transposed + 4 * p.into_float + 8 * (p.bias != nullptr) + 16 * (p.added != nullptr);
    LtPlan& plan = lt.plans[{p.M(), p.N(), p.K(), lda, ldb, flags, cublaslt_is_tuned}];
    if (plan.op == nullptr) { plan = lt_plan(lt, p); }
    if (!plan.supported) { return false; }
    if (p.bias != nullptr) { lt_set_bias(plan, p); }        // the plan may be another call's
    lt_check(lt_run(lt, plan, plan.algo, p), "cublasLtMatmul", p);
    return true;
}

#endif
