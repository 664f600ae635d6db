// compiled/encodings.cu -- the object of the encodings: their kernels, and their biases for attention to call.
#define KERNELS_HERE
#define LAYERS_ELSEWHERE
#include "../position/table.h"
#include "../attention/any_bias.cuh"
