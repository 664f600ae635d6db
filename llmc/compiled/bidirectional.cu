// compiled/bidirectional.cu -- the object of bidirectional attention, for train_bert.
#define KERNELS_HERE
#define KERNELS_ELSEWHERE               // encodings.cu compiles the biases
#include "../attention/any_bias.cuh"
#undef KERNELS_ELSEWHERE
#include "../attention/choose.cuh"

template decltype(attention_forward<Mask::Both>) attention_forward<Mask::Both>;
template decltype(attention_backward<Mask::Both>) attention_backward<Mask::Both>;
