// shared_kernels.cu -- the kernels that shared_kernels.h declares, for every encoding.
#undef SHARED_KERNELS
#include "test/shared_kernels.h"

// Several encodings share a functor, and an explicit instantiation could be named only once. An address can be taken
// twice.
#define X(name, type, help) \
    (const void*)&portable_attention_forward<true, BiasOf<type>>, \
    (const void*)&portable_attention_forward<false, BiasOf<type>>, \
    (const void*)&portable_attention_backward<true, BiasOf<type>>, \
    (const void*)&portable_attention_backward<false, BiasOf<type>>,
extern const void* const shared_kernels[];
const void* const shared_kernels[] = {POSITIONS(X)};
#undef X
