// compiled/causal.cu -- the object of causal attention, for train_gpt2.
#define KERNELS_HERE
#define KERNELS_ELSEWHERE               // encodings.cu compiles the biases
#include "../attention/any_bias.cuh"
#undef KERNELS_ELSEWHERE
#include "../attention/decode.cuh"

template decltype(attention_forward<Mask::Causal>) attention_forward<Mask::Causal>;
template decltype(attention_backward<Mask::Causal>) attention_backward<Mask::Causal>;
