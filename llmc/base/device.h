// base/device.h -- the one place that knows which build this is.
//
//   build   compiler              a block is                             macros
//   CUDA    nvcc                  its real threads                       __CUDACC__, CUDA_BUILD
//   simt    g++                   its real threads, as fibers            SIMT, CUDA_BUILD (-include test/simt/simt.h)
//   CPU     g++ or clang++        one thread; blocks spread over OpenMP  -
//
// Kernels are written once, in CUDA's words. A row kernel has one block per row, whose threads stride over the columns;
// an elementwise kernel walks grid_span(N). The threads of a block cooperate only through block_sum, block_max,
// block_scan, block_matmul (matrix.cuh) and __syncthreads. There are no float atomics: the same input gives the same
// bits.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "common.h"
#include "floats.h"

#if defined(__CUDACC__)
#define CUDA_BUILD 1
#include <cuda_bf16.h>
#include <cuda_runtime.h>
using bf16 = __nv_bfloat16;
using Stream = cudaStream_t;
constexpr bool ON_GPU = true;
extern __shared__ __align__(1024) float4 dynamic_shared_memory[];      // wgmma needs this alignment
__device__ inline float* dynamic_shared() { return (float*)dynamic_shared_memory; }
#elif defined(SIMT)                 // by test/simt/simt.h, which defines bf16 too
#define CUDA_BUILD 1
using Stream = cudaStream_t;
constexpr bool ON_GPU = true;
inline float* dynamic_shared() { return (float*)simt_dynamic_shared(); }
#else
using bf16 = HostBf16;
using Stream = struct NoStream*;    // always null
constexpr bool ON_GPU = false;
#define __global__ inline
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#endif

// A layer's header declares its launchers first; kernels and launchers follow. `make` compiles these in llmc/compiled,
// whose files define KERNELS_HERE. All other files are compiled with KERNELS_ELSEWHERE: they see only the declarations
// and are linked with those objects, so that an edit of a kernel compiles one small object. In CUDA only rows.cu and
// product.cu are objects. There a trainer is compiled with LAYERS_ELSEWHERE, which hides the kernels of these two, and
// contains the other kernels itself. Without a macro everything is compiled in one piece.
#if defined(KERNELS_HERE)
#define LAUNCHER inline __attribute__((used))           // in the object even if nothing there calls it
#else
#define LAUNCHER inline
#endif
#if defined(KERNELS_ELSEWHERE)
#define LAYERS_ELSEWHERE
#endif

// Parameters and activations are stored as floatX, sums are float32. make PRECISION=BF16 or FP32 chooses it; the
// default is bf16 on a GPU and float32 on a CPU.
#if defined(PRECISION_BF16) || (defined(CUDA_BUILD) && !defined(PRECISION_FP32))
using floatX = bf16;
#else
using floatX = float;
#endif

// Written before a loop. UNROLL: its length is constant; unroll it completely. ONE_BY_ONE: do not unroll it. SIMD: its
// iterations are independent, so a CPU may run several at once; on a GPU they belong to different threads anyway.
#if defined(CUDA_BUILD) && !defined(SIMT)
#define UNROLL _Pragma("unroll")
#define ONE_BY_ONE _Pragma("unroll 1")
#define SIMD
#elif defined(__clang__)
#define UNROLL _Pragma("unroll")
#define ONE_BY_ONE _Pragma("unroll 1")
#define SIMD _Pragma("clang loop vectorize(assume_safety)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#define ONE_BY_ONE _Pragma("GCC unroll 1")
#define SIMD _Pragma("GCC ivdep") _Pragma("GCC unroll 1")      // unrolled loops are not vectorized
#endif

// OMP(parallel for): an OpenMP directive, nothing in a build without OpenMP
#if defined(_OPENMP)
#include <omp.h>
#define OMP_PRAGMA(...) _Pragma(#__VA_ARGS__)
#define OMP(...) OMP_PRAGMA(omp __VA_ARGS__)
#else
#define OMP(...)
#endif

// a * b + c, rounded once. A CPU's compiler fuses nothing by itself (-ffp-contract=off) and reorders no sum: the source
// decides the bits.
__host__ __device__ inline float fused_madd(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// the same bits, read as another type
template <class To, class From> __host__ __device__ inline To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To y;
    memcpy(&y, &x, sizeof(y));
    return y;
}

// ----------------------------------------------------------------------------------------------------------
// whole numbers

// ceil_div(n, size): how many tiles of this size cover n;  round_up(n, size): where the last tile ends
template <class T> __host__ __device__ constexpr T ceil_div(T a, T b) { return (a + b - 1) / b; }
template <class T> __host__ __device__ constexpr T round_up(T a, T b) { return ceil_div(a, b) * b; }
// whole numbers only: a comparison of floats has to say what it does with a NaN
template <class T> __host__ __device__ constexpr T imin(T a, T b) { return a < b ? a : b; }
template <class T> __host__ __device__ constexpr T imax(T a, T b) { return a > b ? a : b; }
template <class T> __host__ __device__ constexpr T clamp(T x, T lo, T hi) { return imin(imax(x, lo), hi); }

// ----------------------------------------------------------------------------------------------------------
// launch: the only way to start a kernel
//
//   launch(gelu_forward_kernel<P>, Grid::over(N / P, stream), out, inp, N);
//
// The arguments are converted to the types of the kernel's parameters; a wrong number of arguments does not compile. An
// error names the line of the call, and --profile the kernel as that line spells it.
#define launch(...) launch_kernel(#__VA_ARGS__, __VA_ARGS__)

struct Grid {
    size_t blocks;
    int threads;            // a power of two >= 32; a CPU's blocks have one thread all the same
    size_t shared_bytes;    // of dynamic shared memory per block
    Stream stream;          // null on a CPU
    const char* file;       // with `line`: the call, for error messages
    int line;
    Grid(size_t blocks, int threads, size_t shared_bytes, Stream stream, const char* file = __builtin_FILE(),
         int line = __builtin_LINE())
        : blocks(blocks), threads(threads), shared_bytes(shared_bytes), stream(stream), file(file), line(line) {}
    // the grid of an elementwise kernel over n elements
    static Grid over(size_t n, Stream stream, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        const size_t per_block = ON_GPU ? 256 * 4 : 16384;      // four elements per thread; on a CPU 64 kB of float32
        return Grid(ceil_div(n, per_block), 256, 0, stream, file, line);
    }
};

#if defined(CUDA_BUILD)
#include "device_cuda.h"
#else
#include "device_cpu.h"
#endif
#include "profile.h"

// text: the source text of launch()'s arguments
template <class... P, class... A>
void launch_kernel(const char* text, void (*kernel)(P...), const Grid& grid, A... args) {
    static_assert(sizeof...(P) == sizeof...(A), "launch: the kernel has another number of parameters");
    if (grid.blocks == 0) { return; }
    if (grid.blocks > INT32_MAX) {
        die_at(grid.file, grid.line, EXIT_DEVICE, "expected at most %d blocks, got %zu", INT32_MAX, grid.blocks);
    }
    const ProfiledLaunch profiled(text, grid.stream);
    start_kernel(text, grid, kernel, args...);
}

// The sum (maximum) over the threads of the block, returned to each; all of them must call it.
template <class T> __device__ inline T block_sum(T x) {
    return block_reduce(x, (T)0, [](T a, T b) { return a + b; });
}
__device__ inline float block_max(float x) {
    return block_reduce(x, -INFINITY, [](float a, float b) { return fmaxf(a, b); });
}

// ----------------------------------------------------------------------------------------------------------
// packs

// P neighbouring elements as float32. A GPU loads or stores them by one instruction, from an address that is a multiple
// of their size; PACK elements have 16 bytes. A CPU's compiler vectorizes by itself, so there PACK is 1.
template <int P> struct Pack { float x[P]; };
// A pack as memory holds it. A bf16 is the upper half of a float32, so two instructions unpack a word of two bf16.
template <int P, class T> struct alignas(imin(P * sizeof(T), (size_t)16)) PackWords {
    static constexpr bool PAIRS = sizeof(T) == 2 && P % 2 == 0;
    std::conditional_t<PAIRS, uint32_t, T> x[PAIRS ? P / 2 : P];

    __device__ __forceinline__ float get(int e) const {
        if constexpr (PAIRS) { return bits_as<float>(e % 2 == 0 ? x[e / 2] << 16 : x[e / 2] & 0xffff0000u); }
        else { return (float)x[e]; }
    }
    __device__ __forceinline__ void set(int e, T value) {       // element 0 first
        if constexpr (!PAIRS) { x[e] = value; }
        else if (e % 2 == 0) { x[e / 2] = bits_as<uint16_t>(value); }
        else { x[e / 2] |= (uint32_t)bits_as<uint16_t>(value) << 16; }
    }
};
template <int P, class T> __device__ __forceinline__ Pack<P> unpack(PackWords<P, T> words) {
    Pack<P> pack;
    UNROLL
    for (int e = 0; e < P; e++) { pack.x[e] = words.get(e); }
    return pack;
}
template <int P, class T> __device__ __forceinline__ PackWords<P, T> load_words(const T* p) {
    return *(const PackWords<P, T>*)p;
}
template <int P, class T> __device__ __forceinline__ Pack<P> load_pack(const T* p) {
    return unpack(load_words<P>(p));
}
// returns the stored numbers, rounded to T
template <int P, class T> __device__ __forceinline__ Pack<P> store_pack(T* p, Pack<P> pack) {
    PackWords<P, T> words;
    UNROLL
    for (int e = 0; e < P; e++) { words.set(e, (T)pack.x[e]); }
    if constexpr (sizeof(words) == 8) { *(uint64_t*)p = bits_as<uint64_t>(words); }     // nvcc would store twice
    else { *(PackWords<P, T>*)p = words; }
    return unpack(words);
}
// Calls f with the P for rows of n elements, or an array: PACK if every row begins at a multiple of 16 bytes, else 1.
template <class F> void with_pack(size_t n, F f) {
    if (n % PACK == 0) { f(std::integral_constant<int, PACK>()); }
    else { f(std::integral_constant<int, 1>()); }
}

// ----------------------------------------------------------------------------------------------------------
// sums and maxima by one thread, over c = first, first + step, ... below end
//
// A CPU's thread has a whole row, with step 1. It keeps 16 sums, one for each c % 16, and adds them in a tree, so the
// order depends neither on the width of a register nor on the compiler.

constexpr int WAYS = 16;
template <int N> struct Sums { float x[N] = {}; };
// N sums at once: add(s, c) adds the terms of c to s[0] .. s[N - 1]
template <int N, class Add> __device__ __forceinline__ Sums<N> sums_over(int first, int end, int step, Add add) {
    Sums<N> sums;
    int c = first;
    if constexpr (LANES > 1) {
        lanes all[N][WAYS / LANES] = {};
        float x[N][WAYS];
        for (; c + WAYS <= end; c += WAYS) {
            SIMD
            for (int way = 0; way < WAYS; way++) {
                Sums<N> of_c;
                add(of_c.x, c + way);
                for (int n = 0; n < N; n++) { x[n][way] = of_c.x[n]; }
            }
            for (int n = 0; n < N; n++) {
                UNROLL
                for (int r = 0; r < WAYS / LANES; r++) { all[n][r] += load_lanes(x[n] + r * LANES); }
            }
        }
        memcpy(x, all, sizeof(x));
        for (int way = 0; c < end; way++, c++) {
            Sums<N> of_c;
            add(of_c.x, c);
            for (int n = 0; n < N; n++) { x[n][way] += of_c.x[n]; }
        }
        for (int n = 0; n < N; n++) {
            for (int half = WAYS / 2; half > 0; half /= 2) {
                for (int way = 0; way < half; way++) { x[n][way] += x[n][way + half]; }
            }
            sums.x[n] = x[n][0];
        }
    } else {
        for (; c < end; c += step) { add(sums.x, c); }
    }
    return sums;
}
// sum over c < n of a_c b_c
template <class A, class B> __device__ __forceinline__ float dot(const A* a, const B* b, int n) {
    return sums_over<1>(0, n, 1, [&](float* s, int c) { s[0] += (float)a[c] * (float)b[c]; }).x[0];
}
// the largest term that is not a NaN; -infinity if there is none
template <class Term> __device__ __forceinline__ float max_over(int first, int end, int step, Term term) {
    float largest = -INFINITY;
    int c = first;
    if constexpr (LANES > 1) {
        float x[WAYS];
        lanes all[WAYS / LANES];
        for (lanes& a : all) { a = lanes{} - INFINITY; }
        for (; c + WAYS <= end; c += WAYS) {
            SIMD
            for (int way = 0; way < WAYS; way++) { x[way] = term(c + way); }
            UNROLL
            for (int r = 0; r < WAYS / LANES; r++) {
                const lanes t = load_lanes(x + r * LANES);
                all[r] = t > all[r] ? t : all[r];
            }
        }
        memcpy(x, all, sizeof(x));
        for (float t : x) { largest = t > largest ? t : largest; }
    }
    for (; c < end; c += step) {
        const float t = term(c);
        largest = t > largest ? t : largest;
    }
    return largest;
}
