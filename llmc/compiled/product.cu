// compiled/product.cu -- the object of matrix products, contrastive training's included.
#define KERNELS_HERE
#define LAYERS_ELSEWHERE                // rows.cu compiles these
#include "../base/matrix.cuh"
#include "../gelu.cuh"
#undef LAYERS_ELSEWHERE
#include "../contrastive.cuh"
#include "../matmul.cuh"
