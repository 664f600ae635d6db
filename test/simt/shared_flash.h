// shared_flash.h -- the tensor-core attention on the emulator, compiled once (shared_flash.cu) for its tests and for
// the trainers: all forms of the bias, causal and not, take g++ a minute. With nvcc each file compiles its own.
#pragma once

#include "llmc/attention/flash/backward.cuh"
#include "llmc/attention/flash/forward.cuh"

#define FLASH_OF(Extern, Causal, Kind) \
    Extern template bool flash_forward<Causal, Kind>(const FlashArgs&, Stream); \
    Extern template bool flash_backward<Causal, Kind>(const FlashArgs&, float*, Stream); \
    Extern template void flash_backward_of<Causal, Kind, 64>(const FlashArgs&, float*, Stream, int); \
    Extern template void flash_backward_of<Causal, Kind, 128>(const FlashArgs&, float*, Stream, int);
#if defined(FEW_POSITIONS)
#define FLASH_KINDS(Extern, Causal) \
    FLASH_OF(Extern, Causal, FlashBias::None) FLASH_OF(Extern, Causal, FlashBias::Distance)
#else
#define FLASH_KINDS(Extern, Causal) \
    FLASH_OF(Extern, Causal, FlashBias::None) FLASH_OF(Extern, Causal, FlashBias::Linear) \
    FLASH_OF(Extern, Causal, FlashBias::Distance) FLASH_OF(Extern, Causal, FlashBias::LogDistance) \
    FLASH_OF(Extern, Causal, FlashBias::Toeplitz) FLASH_OF(Extern, Causal, FlashBias::Fire)
#endif
#if defined(SIMT) && !defined(SIMT_AMPERE)
FLASH_KINDS(extern, true)
FLASH_KINDS(extern, false)
#endif
