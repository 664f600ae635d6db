// compiled/rows.cu -- the object of the kernels that walk rows or elements.
#define KERNELS_HERE
#include "../adamw.cuh"
#include "../classifier.cuh"
#include "../embedding.cuh"
#include "../gelu.cuh"
#include "../layernorm.cuh"
