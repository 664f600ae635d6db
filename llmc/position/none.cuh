// position/none.cuh -- no positional encoding (NoPE: Haviv et al. 2022, Kazemnejad et al. 2023). The causal mask still
// tells a model something about positions.
#pragma once

#include "encoding.cuh"

struct NoPosition : Encoding {
    using Encoding::Encoding;
};
