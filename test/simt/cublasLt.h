// cublasLt.h -- a double of cuBLASLt for the emulator: the calls that llmc/cublaslt.cuh makes, with their meaning,
// on the host.
//
// It computes what the library's reference documents: column-major D = op(A) op(B) + beta C (+ bias over the rows of
// D), summed in float32 and rounded once, and of the epilogues GELU with the values before it and GELU's gradient. It
// refuses what the library refuses: sizes and strides that do not fit each other, an attribute of the wrong length,
// pointers less aligned than was promised, an algorithm that was found for another product. Its candidates add up in
// different orders, so that who takes another one gets other bits.
#if !defined(SIMT)
#include_next <cublasLt.h>          // the hardware has the library itself
#elif !defined(TEST_CUBLASLT_DOUBLE_H)
#define TEST_CUBLASLT_DOUBLE_H

#include "llmc/base/device.h"

enum cublasStatus_t {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_ALLOC_FAILED = 3,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_NOT_SUPPORTED = 15
};
enum cudaDataType_t { CUDA_R_32F = 0, CUDA_R_16BF = 14 };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68 };
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum cublasLtEpilogue_t {
    CUBLASLT_EPILOGUE_DEFAULT = 1,
    CUBLASLT_EPILOGUE_BIAS = 4,
    CUBLASLT_EPILOGUE_GELU_AUX_BIAS = 164,
    CUBLASLT_EPILOGUE_DGELU = 192
};
enum cublasLtReductionScheme_t {
    CUBLASLT_REDUCTION_SCHEME_NONE = 0,
    CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2,
    CUBLASLT_REDUCTION_SCHEME_MASK = 7
};
enum cublasLtMatmulDescAttributes_t {
    CUBLASLT_MATMUL_DESC_TRANSA = 3,
    CUBLASLT_MATMUL_DESC_TRANSB,
    CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
    CUBLASLT_MATMUL_DESC_BIAS_POINTER,
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER = 11,
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD,
    CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE = 26
};
enum cublasLtMatmulPreferenceAttributes_t {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES
};

struct LtDoubleDesc {
    int op_a = CUBLAS_OP_N;
    int op_b = CUBLAS_OP_N;
    int epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    int bias_type = -1;
    const void* bias = nullptr;
    const void* aux = nullptr;                                              // what GELU is given, of the output's type
    int64_t aux_ld = 0;

    bool has_bias() const { return epilogue == CUBLASLT_EPILOGUE_BIAS || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS; }
    bool has_aux() const { return epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS || epilogue == CUBLASLT_EPILOGUE_DGELU; }
};
struct LtDoubleLayout { int type; uint64_t rows, columns; int64_t ld; };
struct LtDoublePreference {
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_MASK, alignment[4] = {256, 256, 256, 256};
    uint64_t workspace = 0;
};
struct cublasLtMatmulAlgo_t { uint64_t data[8]; };                          // which product, which candidate
struct cublasLtMatmulHeuristicResult_t {
    cublasLtMatmulAlgo_t algo;
    cublasStatus_t state;
    int reserved[4];
};
using cublasLtHandle_t = int*;
using cublasLtMatmulDesc_t = LtDoubleDesc*;
using cublasLtMatrixLayout_t = LtDoubleLayout*;
using cublasLtMatmulPreference_t = LtDoublePreference*;

constexpr int LT_DOUBLE_CANDIDATES = 3;
// What a test sees, and decides
struct LtDouble {
    int handles = 0;
    int heuristics = 0;
    int products = 0;
    int preferences = 0;
    uint64_t candidate = 0;                                                 // of the last product
    uint32_t schemes = 0;                                                   // of the last heuristic
    bool supports = true;                                                   // false: the heuristic finds nothing
    cublasStatus_t fails = CUBLAS_STATUS_SUCCESS;                           // what cublasLtMatmul returns
    std::string refused;                                                    // why the last call was
};
inline LtDouble lt_double;
inline cublasStatus_t lt_refuse(const char* why) {
    lt_double.refused = why;
    return CUBLAS_STATUS_INVALID_VALUE;
}

inline const char* cublasLtGetStatusString(cublasStatus_t s) {
    if (s == CUBLAS_STATUS_SUCCESS) { return "success"; }
    if (s == CUBLAS_STATUS_NOT_SUPPORTED) { return "not supported"; }
    return lt_double.refused.empty() ? "an error" : lt_double.refused.c_str();
}
inline cublasStatus_t cublasLtCreate(cublasLtHandle_t* h) {
    *h = &lt_double.handles;
    lt_double.handles++;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t, cudaDataType_t scale) {
    *d = new LtDoubleDesc();
    return scale == CUDA_R_32F ? CUBLAS_STATUS_SUCCESS : lt_refuse("the scale is not float32");
}
inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a,
                                                     const void* value, size_t bytes) {
    void* wide = nullptr;
    if (a == CUBLASLT_MATMUL_DESC_BIAS_POINTER) { wide = &d->bias; }
    if (a == CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER) { wide = &d->aux; }
    if (a == CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD) { wide = &d->aux_ld; }
    if (bytes != (wide != nullptr ? 8u : 4u)) { return lt_refuse("an attribute of the wrong length"); }
    if (wide != nullptr) { memcpy(wide, value, 8); return CUBLAS_STATUS_SUCCESS; }
    int* to = nullptr;
    switch (a) {
        case CUBLASLT_MATMUL_DESC_TRANSA: to = &d->op_a; break;
        case CUBLASLT_MATMUL_DESC_TRANSB: to = &d->op_b; break;
        case CUBLASLT_MATMUL_DESC_EPILOGUE: to = &d->epilogue; break;
        case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: to = &d->bias_type; break;
        default: break;
    }
    if (to == nullptr) { return lt_refuse("an unknown attribute"); }
    memcpy(to, value, 4);
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* l, cudaDataType_t type, uint64_t rows,
                                                 uint64_t columns, int64_t ld) {
    *l = new LtDoubleLayout{type, rows, columns, ld};
    return ld >= (int64_t)rows ? CUBLAS_STATUS_SUCCESS : lt_refuse("a leading dimension below the rows");
}
inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) {
    *p = new LtDoublePreference();
    lt_double.preferences++;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
    delete p;
    lt_double.preferences--;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                           cublasLtMatmulPreferenceAttributes_t a, const void* value,
                                                           size_t bytes) {
    void* to = nullptr;
    switch (a) {
        case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: to = &p->workspace; break;
        case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: to = &p->schemes; break;
        default: to = &p->alignment[a - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES]; break;
    }
    if (bytes != (a == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? 8u : 4u)) {
        return lt_refuse("a preference of the wrong length");
    }
    memcpy(to, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

inline uint64_t lt_signature(const LtDoubleDesc& d, const LtDoubleLayout& a, const LtDoubleLayout& b,
                             const LtDoubleLayout& c) {
    std::string s = strprintf("%d %d %d", d.op_a, d.op_b, d.epilogue);
    for (const LtDoubleLayout* l : {&a, &b, &c}) {
        s += strprintf(" %d %zu %zu %zu", l->type, (size_t)l->rows, (size_t)l->columns, (size_t)l->ld);
    }
    return checksum(s);
}
inline cublasStatus_t lt_fits(const LtDoubleDesc& d, const LtDoubleLayout& a, const LtDoubleLayout& b,
                              const LtDoubleLayout& c) {
    const bool turn_a = d.op_a == CUBLAS_OP_T;
    const bool turn_b = d.op_b == CUBLAS_OP_T;
    const uint64_t m = turn_a ? a.columns : a.rows;
    const uint64_t k = turn_a ? a.rows : a.columns;
    const uint64_t k2 = turn_b ? b.columns : b.rows;
    const uint64_t n = turn_b ? b.rows : b.columns;
    if (k != k2 || m != c.rows || n != c.columns) { return lt_refuse("sizes that do not fit each other"); }
    if (a.type != b.type || (a.type == CUDA_R_32F && c.type != CUDA_R_32F)) {
        return lt_refuse("types that are not supported together");
    }
    if (d.has_bias() && d.bias_type != c.type) {
        return lt_refuse("a bias of another type than the output");
    }
    if (d.has_aux() && (d.aux_ld % 8 != 0 || d.aux_ld < (int64_t)c.rows)) {
        return lt_refuse("rows of GELU's input that are too short, or not of whole 8 elements");
    }
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
                                                     cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                                     cublasLtMatrixLayout_t out, cublasLtMatmulPreference_t p,
                                                     int wanted, cublasLtMatmulHeuristicResult_t* found, int* count) {
    lt_double.heuristics++;
    lt_double.schemes = p->schemes;
    *count = 0;
    if (c->ld != out->ld || c->type != out->type || lt_fits(*d, *a, *b, *out) != CUBLAS_STATUS_SUCCESS) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (!lt_double.supports) { return CUBLAS_STATUS_NOT_SUPPORTED; }
    for (uint32_t x : p->alignment) { if (x > 16) { return lt_refuse("more alignment was promised than there is"); } }
    for (; *count < wanted && *count < LT_DOUBLE_CANDIDATES; ++*count) {
        found[*count] = {};
        found[*count].algo = {{lt_signature(*d, *a, *b, *out), (uint64_t)*count, p->workspace, 0, 0, 0, 0, 0}};
    }
    return CUBLAS_STATUS_SUCCESS;
}
inline float lt_load(const void* p, int type, size_t i) {
    return type == CUDA_R_32F ? ((const float*)p)[i] : (float)((const bf16*)p)[i];
}
inline void lt_store(void* p, int type, size_t i, float x) {
    if (type == CUDA_R_32F) { ((float*)p)[i] = x; } else { ((bf16*)p)[i] = (bf16)x; }
}
inline float lt_gelu(float x) {
    return 0.5f * x * (1.0f + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
}
inline float lt_gelu_slope(float x) {
    const float t = std::tanh(0.7978845608f * (x + 0.044715f * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.7978845608f * (1.0f + 3.0f * 0.044715f * x * x);
}
// candidate: in how many parts, and one more, a sum is split
inline void lt_multiply(const LtDoubleDesc& d, uint64_t candidate, float alpha, const void* A, const LtDoubleLayout& a,
                        const void* B, const LtDoubleLayout& b, float beta, const void* C, const LtDoubleLayout& c,
                        void* D, const LtDoubleLayout& out) {
    const uint64_t m = out.rows;
    const uint64_t n = out.columns;
    const uint64_t k = d.op_a == CUBLAS_OP_T ? a.rows : a.columns;
    for (uint64_t i = 0; i < m; i++) {
        for (uint64_t j = 0; j < n; j++) {
            float sums[LT_DOUBLE_CANDIDATES] = {};
            for (uint64_t l = 0; l < k; l++) {
                sums[l % (candidate + 1)] += lt_load(A, a.type, d.op_a == CUBLAS_OP_T ? i * a.ld + l : l * a.ld + i) *
                                             lt_load(B, b.type, d.op_b == CUBLAS_OP_T ? l * b.ld + j : j * b.ld + l);
            }
            float sum = alpha * (sums[0] + sums[1] + sums[2]);
            if (beta != 0.0f) { sum += beta * lt_load(C, c.type, j * c.ld + i); }
            if (d.has_bias()) { sum += lt_load(d.bias, d.bias_type, i); }
            const uint64_t at = j * d.aux_ld + i;
            if (d.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) {
                lt_store((void*)d.aux, out.type, at, sum);
                sum = lt_gelu(sum);
            }
            if (d.epilogue == CUBLASLT_EPILOGUE_DGELU) { sum *= lt_gelu_slope(lt_load(d.aux, out.type, at)); }
            lt_store(D, out.type, j * out.ld + i, sum);
        }
    }
}
// What it is told, the descriptions and alpha and beta on the host, is read at the call; the arrays when the stream
// gets there.
inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t d, const void* alpha, const void* A,
                                     cublasLtMatrixLayout_t a, const void* B, cublasLtMatrixLayout_t b,
                                     const void* beta, const void* C, cublasLtMatrixLayout_t c, void* D,
                                     cublasLtMatrixLayout_t out, const cublasLtMatmulAlgo_t* algo, void* workspace,
                                     size_t workspace_bytes, Stream stream) {
    lt_double.products++;
    lt_double.candidate = algo->data[1];
    if (lt_double.fails != CUBLAS_STATUS_SUCCESS) { return lt_double.fails; }
    if (algo->data[0] != lt_signature(*d, *a, *b, *out)) { return lt_refuse("an algorithm of another product"); }
    if (workspace == nullptr || algo->data[2] > workspace_bytes) {
        return lt_refuse("less workspace than was promised");
    }
    const void* bias = d->has_bias() ? d->bias : nullptr;
    const void* aux = d->has_aux() ? d->aux : nullptr;
    if (d->has_aux() && aux == nullptr) { return lt_refuse("no array for GELU's input"); }
    for (const void* x : {A, B, C, (const void*)D, bias, aux}) {
        if ((uintptr_t)x % 16 != 0) { return lt_refuse("a pointer that is not aligned"); }
    }
    const auto run = [=, candidate = algo->data[1], d = *d, a = *a, b = *b, c = *c, out = *out,
                      alpha = *(const float*)alpha, beta = *(const float*)beta] {
        lt_multiply(d, candidate, alpha, A, a, B, b, beta, C, c, D, out);
    };
    simt_enqueue(stream, run);
    return CUBLAS_STATUS_SUCCESS;
}

#endif
