// simt.h -- the CUDA build's kernels on the CPU: what a block of threads does, warp by warp, and the part of the
// runtime that device.h uses. Only for g++ or clang++, which read it first: -include test/simt/simt.h.
//
// The threads of a block are fibers on one system thread. One runs until it waits at a barrier or in a warp collective;
// which of the ready ones runs next is random (SIMT_SEED=7 gives another order). So faults are seen:
//   shared memory      is allocated again before each block, with exactly the requested size, so that
//                      AddressSanitizer sees past its end. It is filled, like static shared memory and what cudaMalloc
//                      gives, with 0xFF: NaN in float and bf16
//   warp collectives   are complete when every lane of the mask waits at the same line; if no thread can run and some
//                      wait, the launch fails with an Error that says who waits where
//   cp.async           poisons its destination when it is issued and writes it when its group is waited for
//   approximations     (ex2, rcp) are off by as much as the PTX ISA lets them, each argument by another amount
//                      (SIMT_MATH=7 gives other errors)
// Blocks run one after the other in random order. What a stream is given is done late (simt_runtime.h).
// SIMT_LAUNCHES=FILE says which kernels a program launched, and how often. wavefronts.h counts bank conflicts.
#pragma once

#if defined(__CUDACC__)
#error "simt.h stands in for nvcc; build with g++ -include test/simt/simt.h"
#endif
#define SIMT 1

#include <cfloat>
#include <chrono>
#include <cmath>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include <link.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "../../llmc/base/common.h"
#include "../../llmc/base/floats.h"

#if defined(__SANITIZE_ADDRESS__)
#define SIMT_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SIMT_ASAN 1
#endif
#endif
#if defined(SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__ inline
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
// Static shared memory has to be found to be poisoned. clang++ puts it into a section; g++ cannot do so in templates,
// and there it is the program's only thread-local storage.
#if defined(__clang__)
#define __shared__ static __attribute__((section("simt_shared")))
extern "C" __attribute__((weak)) char __start_simt_shared[], __stop_simt_shared[];
#else
#define __shared__ static thread_local
#endif

// where a collective was called, for messages: the last two parameters of each
#define SIMT_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// ----------------------------------------------------------------------------------------------------------
// types

struct dim3 { unsigned x = 1, y = 1, z = 1; };
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
template <class To, class From> To simt_bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To y;
    memcpy(&y, &x, sizeof(y));
    return y;
}
inline unsigned __float_as_uint(float x) { return simt_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return simt_bits<float>(x); }

using bf16 = HostBf16;
using __nv_bfloat16 = bf16;

#include "simt_fibers.h"
#include "simt_cuda.h"
#include "simt_runtime.h"
#include "simt_ptx.h"
