// shared_kernels.h -- the portable attention kernels of every encoding, compiled once for all tests.
//
// With -DSHARED_KERNELS the kernels are only declared here, and the program is linked with shared_kernels.cu. Without
// it every test file that calls them compiles some forty kernels of its own.
#pragma once

#include "llmc/attention/choose.cuh"

template <class Type> using BiasOf = decltype(std::declval<Type>().bias());

#if defined(SHARED_KERNELS)
#define FORWARD(Causal, Type) \
    extern template void portable_attention_forward<Causal>( \
        floatX*, float*, const floatX*, const BiasOf<Type>&, const AttentionDims&, int, Stream);
#define BACKWARD(Causal, Type) \
    extern template void portable_attention_backward<Causal>( \
        floatX*, float*, const floatX*, const floatX*, const floatX*, const float*, const BiasOf<Type>&, \
        const AttentionDims&, int, Stream);
#define X(name, type, help) FORWARD(true, type) FORWARD(false, type) BACKWARD(true, type) BACKWARD(false, type)
POSITIONS(X)
#undef X
#undef BACKWARD
#undef FORWARD
#endif
