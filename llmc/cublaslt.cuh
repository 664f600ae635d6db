// cublaslt.cuh -- matrix products by NVIDIA's cuBLASLt. Only matmul.cuh includes it, after MatmulArgs.
//
// Sums are float32 (without TF32); the bias and the addend are added before the one rounding to the output's type.
// NVIDIA promises equal bits for one library, GPU and algorithm, on one stream with one workspace. The algorithm is the
// heuristic's first, which depends only on the library, the GPU and the shape, so a resumed run has the bits
// of a run that never stopped. (The fastest of its first sixteen made no step faster: docs/results.md, "On a GPU".)
#pragma once

#include <array>
#include <map>
#include <type_traits>

#include <cublasLt.h>

#include "base/matrix.cuh"

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
struct CublasLt {                   // one per process, never destroyed: at exit the driver may be gone first
    cublasLtHandle_t handle = nullptr;
    void* workspace = nullptr;      // of one stream, on which products follow each other
    Stream stream = {};
    std::map<std::array<int, 7>, LtPlan> plans;             // by shape, strides and flags
};
inline CublasLt& cublaslt() {
    static CublasLt lt;
    return lt;
}

// The key of a product's plan
inline std::array<int, 7> lt_key(const MatmulArgs& p) {
    const int transposed = is_transposed(p.A) + 2 * is_transposed(p.B);
    const int arrays = 8 * (p.bias != nullptr) + 16 * (p.added != nullptr);
    const int flags = transposed + 4 * p.into_float + arrays + 32 * (int)p.epilogue;
    return {p.A.rows, p.B.cols, p.A.cols, leading_dimension(p.A), leading_dimension(p.B), flags, p.row};
}
// For messages: "(64,128) = (64,32) x (32,128) transposed + bias, 2-byte floats"
inline std::string product_text(const MatmulArgs& p) {
    auto operand = [](const Matrix<const floatX>& m) {
        return strprintf("(%d,%d)%s", m.rows, m.cols, is_transposed(m) ? " transposed" : "");
    };
    const char* bias = p.bias != nullptr ? " + bias" : "";
    const char* added = p.added != nullptr ? " + an array" : "";
    const char* into = p.into_float ? " into float32" : "";
    const char* epilogue[] = {"", " and its GELU", " times GELU's slope"};
    return strprintf("(%d,%d) = %s x %s%s%s%s, %zu-byte floats%s", p.A.rows, p.B.cols, operand(p.A).c_str(),
                     operand(p.B).c_str(), bias, added, epilogue[(int)p.epilogue], sizeof(floatX), into);
}
// Dies of cuBLASLt's error; `what`: the call
inline void lt_check(cublasStatus_t status, const char* what, const MatmulArgs& p) {
    if (status == CUBLAS_STATUS_SUCCESS) { return; }
    die(status == CUBLAS_STATUS_ALLOC_FAILED ? EXIT_OUT_OF_MEMORY : EXIT_DEVICE,
        "%.*s: %s, in the product %s; CUBLASLT_LOG_LEVEL=2 in the environment makes cuBLASLt say more",
        (int)strcspn(what, "("), what, cublasLtGetStatusString(status), product_text(p).c_str());
}
#define LT_CHECK(call) lt_check(call, #call, p)

// cuBLASLt counts columns first, so it gets out^T = B^T A^T, whose arrays are the same: `first` is B, `second` A.
inline cublasLtMatrixLayout_t lt_layout(const Matrix<const floatX>& m, cudaDataType_t type, const MatmulArgs& p) {
    cublasLtMatrixLayout_t layout = nullptr;
    const int rows = is_transposed(m) ? m.rows : m.cols;        // the array's, columns first
    const int cols = is_transposed(m) ? m.cols : m.rows;
    LT_CHECK(cublasLtMatrixLayoutCreate(&layout, type, (uint64_t)rows, (uint64_t)cols, leading_dimension(m)));
    return layout;
}
// Puts this call's bias and extra into the plan; everything else in a plan depends only on shapes
inline void lt_set_arrays(const LtPlan& plan, const MatmulArgs& p) {
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const void* array) {
        if (array == nullptr) { return; }
        LT_CHECK(cublasLtMatmulDescSetAttribute(plan.op, attribute, &array, sizeof(array)));
    };
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.extra);
}
// Describes p to cuBLASLt: the operation and the three layouts
inline void lt_describe(LtPlan& plan, const MatmulArgs& p) {
    const cudaDataType_t type = std::is_same<floatX, float>::value ? CUDA_R_32F : CUDA_R_16BF;
    const cudaDataType_t out_type = p.into_float ? CUDA_R_32F : type;
    const cublasOperation_t op_first = is_transposed(p.B) ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t op_second = is_transposed(p.A) ? CUBLAS_OP_T : CUBLAS_OP_N;
    LT_CHECK(cublasLtMatmulDescCreate(&plan.op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    LT_CHECK(cublasLtMatmulDescSetAttribute(plan.op, CUBLASLT_MATMUL_DESC_TRANSA, &op_first, sizeof(op_first)));
    LT_CHECK(cublasLtMatmulDescSetAttribute(plan.op, CUBLASLT_MATMUL_DESC_TRANSB, &op_second, sizeof(op_second)));
    const cublasLtEpilogue_t plain = p.bias != nullptr ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    const cublasLtEpilogue_t epilogues[] = {plain, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU};
    const int64_t row = p.row;
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const void* value, size_t bytes) {
        LT_CHECK(cublasLtMatmulDescSetAttribute(plan.op, attribute, value, bytes));
    };
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogues[(int)p.epilogue], sizeof(plain));
    if (p.bias != nullptr) { set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof(type)); }
    if (p.extra != nullptr) { set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &row, sizeof(row)); }
    lt_set_arrays(plan, p);
    plan.first = lt_layout(p.B, type, p);
    plan.second = lt_layout(p.A, type, p);
    LT_CHECK(cublasLtMatrixLayoutCreate(&plan.out, out_type, (uint64_t)p.B.cols, (uint64_t)p.A.rows, p.row));
}

// The plan for all products of p's shape, with the heuristic's first algorithm
inline LtPlan lt_plan(const CublasLt& lt, const MatmulArgs& p) {
    LtPlan plan;
    lt_describe(plan, p);
    cublasLtMatmulPreference_t preference;
    LT_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const void* value, size_t bytes) {
        LT_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, value, bytes));
    };
    // The parts of a split sum stay float32; the excluded schemes would round them to the output's type.
    const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const uint32_t alignment = 16;              // bytes: cublaslt_product has checked this for all pointers
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof(schemes));
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &MATMUL_WORKSPACE, sizeof(MATMUL_WORKSPACE));
    for (auto operand : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                         CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
        prefer(operand, &alignment, sizeof(alignment));
    }
    int count = 0;
    cublasLtMatmulHeuristicResult_t first;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(lt.handle, plan.op, plan.first, plan.second, plan.out,
                                                                 plan.out, preference, 1, &first, &count);
    LT_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) { lt_check(status, "cublasLtMatmulAlgoGetHeuristic", p); }
    plan.supported = status == CUBLAS_STATUS_SUCCESS && count > 0;
    if (plan.supported) {
        plan.algo = first.algo;
    } else {
        const bool plain = p.epilogue == Epilogue::None;
        fprintf(stderr, "warning: cuBLASLt has no algorithm for the product %s; %s it\n", product_text(p).c_str(),
                plain ? "the slow portable kernel computes" : "several kernels compute");
    }
    return plan;
}

// Computes p. Returns false if a row does not start on 16 bytes, which the library's fast kernels need, or if it has no
// algorithm: the portable kernel then computes p, without its epilogue.
inline bool cublaslt_product(const MatmulArgs& p, Stream stream) {
    const int unit = 16 / sizeof(floatX);
    const bool rows = leading_dimension(p.A) % unit == 0 && leading_dimension(p.B) % unit == 0;
    const void* arrays[] = {p.out, p.added, p.A.data, p.B.data, p.bias, p.extra};
    bool aligned = rows && p.B.cols % unit == 0 && p.row % unit == 0;
    for (const void* x : arrays) { aligned = aligned && (uintptr_t)x % 16 == 0; }
    if (!aligned) { return false; }
    CublasLt& lt = cublaslt();
    if (lt.handle == nullptr) {
        LT_CHECK(cublasLtCreate(&lt.handle));
        lt.workspace = device_malloc(MATMUL_WORKSPACE);
        lt.stream = stream;
    }
    check(stream == lt.stream, "expected all matrix products on one stream, because they share a workspace, got two");
    LtPlan& plan = lt.plans[lt_key(p)];
    if (plan.op == nullptr) { plan = lt_plan(lt, p); }      // the first product of this shape
    if (!plan.supported) { return false; }
    lt_set_arrays(plan, p);                                 // the plan may come from another call
    // out = 1 A B + beta added, which is not read if beta is 0
    const float one = 1.0f;
    const float beta = p.added != nullptr ? 1.0f : 0.0f;
    const void* added = p.added != nullptr ? p.added : p.out;
    LT_CHECK(cublasLtMatmul(lt.handle, plan.op, &one, p.B.data, plan.first, p.A.data, plan.second, &beta, added,
                            plan.out, p.out, plan.out, &plan.algo, lt.workspace, MATMUL_WORKSPACE, lt.stream));
    return true;
}
