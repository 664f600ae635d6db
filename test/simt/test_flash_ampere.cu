// test_flash_ampere.cu -- the tests of the backward, and of the forward before it, with the products that GPUs before
// Hopper have: ldmatrix and mma, and the owned rows in registers. On hardware the other tests show what its GPU has.
#define SIMT_AMPERE
#include "test/simt/test_flash_backward.cu"
