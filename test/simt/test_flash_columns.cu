// test_flash_columns.cu -- the tests of the forward and the backward with the bias as columns of the products
// (llmc/attention/flash/columns.cuh). On Hopper they show whether its tensor cores read these columns.
#define FLASH_VARIANT 3
#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <set>

#include "llmc/attention/choose.cuh"
#include "test/layers/attention_oracle.h"
#include "test/simt/fire_inputs.h"
#include "test/simt/kernel_test.h"
#include "test/simt/shared_flash.h"

namespace forward {
#include "test/simt/test_flash_forward.cu"
}
namespace backward {
#include "test/simt/test_flash_backward.cu"
}
