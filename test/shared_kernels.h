// shared_kernels.h -- the portable attention kernels of every encoding, compiled once for all tests (test_shared_kernels.cu).
//
// Include it before the first use of attention_forward, attention_backward and attention_decode. Without it every test file that
// calls them would compile some forty kernels of its own.
#ifndef TEST_SHARED_KERNELS_H
#define TEST_SHARED_KERNELS_H

#include "llmc/attention/choose.cuh"

template <class Type> using BiasOf = decltype(std::declval<Type>().bias());

#define X(name, type, help)                                                                                                       \
    extern template void portable_attention_forward<true>(floatX*, float*, const floatX*, const BiasOf<type>&,                    \
                                                          const AttentionDims&, int, Stream);                                     \
    extern template void portable_attention_forward<false>(floatX*, float*, const floatX*, const BiasOf<type>&,                   \
                                                           const AttentionDims&, int, Stream);                                    \
    extern template void portable_attention_backward<true>(floatX*, float*, const floatX*, const floatX*, const floatX*,          \
                                                           const float*, const BiasOf<type>&, const AttentionDims&, int, Stream); \
    extern template void portable_attention_backward<false>(floatX*, float*, const floatX*, const floatX*, const floatX*,         \
                                                            const float*, const BiasOf<type>&, const AttentionDims&, int, Stream);
#if !defined(COMPILE_SHARED_KERNELS) && !defined(CUDA_BUILD)
POSITIONS(X)
#endif
#undef X

#endif
