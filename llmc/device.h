// device.h -- the one place that knows which build this is.
//
//   build   compiler              a block is                            macro
//   CUDA    nvcc                  its real threads                      __CUDACC__, CUDA_BUILD
//   simt    g++                   its real threads, as fibers           SIMT, CUDA_BUILD (the CUDA branches; test/simt/simt.h)
//   CPU     g++ or clang++        one thread; blocks over OpenMP        -
//   race    g++ -fsanitize=thread RACE_THREADS real threads             RACE_THREADS
//
// Kernels are written once, in CUDA's words. A row kernel is one block a row and strides by threadIdx.x, blockDim.x;
// an elementwise kernel walks grid_span(N). Threads of a block cooperate only through block_sum, block_max,
// block_scan, block_matmul (matmul.cuh) and __syncthreads. No float atomics: the same input gives the same bits.
#ifndef LLMC_DEVICE_H
#define LLMC_DEVICE_H

#include <cmath>
#include <cstring>

#include "common.h"

#if defined(__CUDACC__)
#define CUDA_BUILD 1
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#elif defined(SIMT)
#define CUDA_BUILD 1
#include "simt.h"
#else
#define __global__ inline
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#endif

// Storage of parameters and activations; sums are float32 everywhere. `bf16` on a GPU unless built with PRECISION=FP32.
#if defined(CUDA_BUILD)
using bf16 = __nv_bfloat16;
#endif
#if defined(CUDA_BUILD) && !defined(PRECISION_FP32)
using floatX = bf16;
#else
using floatX = float;
#endif

// Before a loop. UNROLL: of constant length, all of it. SIMD: no iteration reads what another one writes, so the CPU may
// take several at once (on a GPU they are different threads' anyway).
#if defined(CUDA_BUILD) && !defined(SIMT)
#define UNROLL _Pragma("unroll")
#define SIMD
#elif defined(__clang__)
#define UNROLL _Pragma("unroll")
#define SIMD _Pragma("clang loop vectorize(assume_safety)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#define SIMD _Pragma("GCC ivdep")
#endif

template <class T> __host__ __device__ constexpr T ceil_div(T a, T b) { return (a + b - 1) / b; }
template <class T> __host__ __device__ constexpr T round_up(T a, T b) { return ceil_div(a, b) * b; }

#if defined(CUDA_BUILD)
// ----------------------------------------------------------------------------------------------------------
// CUDA, and simt in its words

using Stream = cudaStream_t;
constexpr int LANES = 1;
using lanes = float;
__device__ inline lanes load_lanes(const float* p) { return *p; }
__device__ inline void store_lanes(float* p, lanes v) { *p = v; }
constexpr int MICRO_M = 4, MICRO_N = 4;     // block_matmul: rows x lanes of a thread's fragment

#if defined(SIMT)
inline float* dynamic_shared() { return (float*)simt_dynamic_shared(); }
#else
extern __shared__ float4 dynamic_shared_memory[];
__device__ inline float* dynamic_shared() { return (float*)dynamic_shared_memory; }
#endif

// First and step of the elements this thread owns, end is common: for (size_t i = s.begin; i < s.end; i += s.step)
struct GridSpan { size_t begin, end, step; };
__device__ inline GridSpan grid_span(size_t n) {
    return {(size_t)blockIdx.x * blockDim.x + threadIdx.x, n, (size_t)gridDim.x * blockDim.x};
}

// Sum (max) over the threads of the block, known to all of them; every thread must call it.
template <class T, class Op> __device__ inline T block_reduce(T x, T identity, Op op) {
    __shared__ T partial[32];
    for (int o = 16; o > 0; o /= 2) { x = op(x, __shfl_xor_sync(~0u, x, o)); }
    __syncthreads();                                        // the last call's readers are done
    if (threadIdx.x % 32 == 0) { partial[threadIdx.x / 32] = x; }
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : identity;
    for (int o = 16; o > 0; o /= 2) { x = op(x, __shfl_xor_sync(~0u, x, o)); }
    return x;
}
template <class T> __device__ inline T block_sum(T x) { return block_reduce(x, (T)0, [](T a, T b) { return a + b; }); }
__device__ inline float block_max(float x) { return block_reduce(x, -INFINITY, [](float a, float b) { return fmaxf(a, b); }); }
// Inclusive prefix sum over the threads of the block, in thread order.
template <class T> __device__ inline T block_scan(T x) {
    __shared__ T warp_total[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int o = 1; o < 32; o *= 2) { const T y = __shfl_up_sync(~0u, x, o); if (lane >= o) { x += y; } }
    __syncthreads();
    if (lane == 31) { warp_total[warp] = x; }
    __syncthreads();
    T before = 0;
    for (int w = 0; w < warp; w++) { before += warp_total[w]; }
    return before + x;
}

#define CUDA_CHECK(call) cuda_check(call, #call, __FILE__, __LINE__)
inline void cuda_check(cudaError_t e, const char* what, const char* file, int line) {
    if (e == cudaErrorMemoryAllocation) { die_at(file, line, EXIT_OUT_OF_MEMORY, "%s: %s", what, cudaGetErrorString(e)); }
    if (e != cudaSuccess) { die_at(file, line, EXIT_DEVICE, "%s: %s", what, cudaGetErrorString(e)); }
}
inline void* device_malloc(size_t bytes) { void* p; CUDA_CHECK(cudaMalloc(&p, bytes)); CUDA_CHECK(cudaMemset(p, 0, bytes)); return p; }
inline void device_free(void* p) { cudaFree(p); }
inline void device_zero(void* p, size_t bytes, Stream s) { CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, s)); }
inline void copy_to_device(void* to, const void* from, size_t bytes, Stream s) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, s));
    CUDA_CHECK(cudaStreamSynchronize(s));
}
inline void copy_to_host(void* to, const void* from, size_t bytes, Stream s) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, s));
    CUDA_CHECK(cudaStreamSynchronize(s));
}
// Host memory that the device copies from while the host goes on; it must not change before the stream has passed the copy.
inline void* pinned_malloc(size_t bytes) { void* p; CUDA_CHECK(cudaMallocHost(&p, bytes)); return p; }
inline void pinned_free(void* p) { cudaFreeHost(p); }
inline void copy_to_device_async(void* to, const void* pinned, size_t bytes, Stream s) {
    CUDA_CHECK(cudaMemcpyAsync(to, pinned, bytes, cudaMemcpyHostToDevice, s));
}
inline size_t device_memory_available() { size_t available, total; CUDA_CHECK(cudaMemGetInfo(&available, &total)); return available; }
inline void set_threads(int) {}
inline void wait_politely(char**) {}
inline std::string device_description() {
    cudaDeviceProp p;
    CUDA_CHECK(cudaGetDeviceProperties(&p, 0));
    return strprintf("%s, %d SMs, %s", p.name, p.multiProcessorCount, format_bytes((double)p.totalGlobalMem).c_str());
}

#else
// ----------------------------------------------------------------------------------------------------------
// CPU and race
#include <sys/mman.h>
#if defined(_OPENMP)
#include <omp.h>
#endif

struct NoStream;
using Stream = NoStream*;
struct BlockIndex { unsigned x; };
inline thread_local BlockIndex blockIdx, gridDim;

#if defined(RACE_THREADS)
#include <pthread.h>
#include <thread>
#define __shared__ static
struct BlockExtent { static constexpr unsigned x = RACE_THREADS; };
inline thread_local BlockIndex threadIdx;
inline pthread_barrier_t race_barrier;
inline void __syncthreads() { pthread_barrier_wait(&race_barrier); }
constexpr int LANES = 1;
using lanes = float;
inline lanes load_lanes(const float* p) { return *p; }
inline void store_lanes(float* p, lanes v) { *p = v; }
constexpr int MICRO_M = 4, MICRO_N = 4;
template <class T, class Op> T block_reduce(T x, Op op) {
    static T partial[RACE_THREADS];
    __syncthreads();
    partial[threadIdx.x] = x;
    __syncthreads();
    T r = partial[0];
    for (int t = 1; t < RACE_THREADS; t++) { r = op(r, partial[t]); }
    return r;
}
template <class T> T block_sum(T x) { return block_reduce(x, [](T a, T b) { return a + b; }); }
inline float block_max(float x) { return block_reduce(x, [](float a, float b) { return a > b ? a : b; }); }
template <class T> T block_scan(T x) {
    static T partial[RACE_THREADS];
    __syncthreads();
    partial[threadIdx.x] = x;
    __syncthreads();
    T r = 0;
    for (unsigned t = 0; t <= threadIdx.x; t++) { r += partial[t]; }
    return r;
}
#else
#define __shared__
struct BlockExtent { static constexpr unsigned x = 1; };
struct OneThread { static constexpr unsigned x = 0; };
constexpr OneThread threadIdx;
inline void __syncthreads() {}
// `lanes` is one SIMD register: arithmetic on it is element by element, a float operand is broadcast
#if defined(__AVX512F__)
constexpr int LANES = 16, MICRO_M = 8, MICRO_N = 2;
#elif defined(__AVX__)
constexpr int LANES = 8, MICRO_M = 4, MICRO_N = 2;
#else
constexpr int LANES = 4, MICRO_M = 4, MICRO_N = 2;
#endif
typedef float lanes __attribute__((vector_size(4 * LANES)));
__forceinline__ lanes load_lanes(const float* p) { lanes v; memcpy(&v, p, sizeof(v)); return v; }
__forceinline__ void store_lanes(float* p, lanes v) { memcpy(p, &v, sizeof(v)); }
template <class T> T block_sum(T x) { return x; }
inline float block_max(float x) { return x; }
template <class T> T block_scan(T x) { return x; }
#endif
constexpr BlockExtent blockDim;

struct GridSpan { size_t begin, end; static constexpr size_t step = 1; };
inline GridSpan grid_span(size_t n) { // a contiguous piece a thread
    const size_t pieces = (size_t)gridDim.x * blockDim.x, piece = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    const size_t length = round_up(ceil_div(n, pieces), (size_t)64);
    const size_t begin = piece * length < n ? piece * length : n;
    return {begin, begin + length < n ? begin + length : n};
}

// the dynamic shared memory of the running block: one buffer a thread (CPU), one in all (race: one block at a time)
struct SharedBuffer {
    char* data = nullptr;
    size_t capacity = 0;
    void reserve(size_t bytes) {
        if (bytes <= capacity) { return; }
        free(data);
        data = (char*)aligned_alloc(256, round_up(bytes, (size_t)256));
        capacity = data == nullptr ? 0 : bytes;
        if (data == nullptr) { die(EXIT_OUT_OF_MEMORY, "no %zu bytes for a block's scratch", bytes); }
    }
    ~SharedBuffer() { free(data); }
};
#if defined(RACE_THREADS)
inline SharedBuffer shared_buffer;
#else
inline thread_local SharedBuffer shared_buffer;
#endif
inline float* dynamic_shared() { return (float*)shared_buffer.data; }

// Large arrays start on a 2 MB page, so that the kernel can back them with huge ones. Memory comes zeroed.
inline void* device_malloc(size_t bytes) {
    const size_t page = bytes >= (2u << 20) ? (2u << 20) : 256, size = round_up(bytes > 0 ? bytes : 1, page);
    void* p = aligned_alloc(page, size);
    if (p == nullptr) { die(EXIT_OUT_OF_MEMORY, "cannot allocate %s; try a smaller --B, --T or --model", format_bytes((double)bytes).c_str()); }
#if defined(MADV_HUGEPAGE)
    if (page > 256) { madvise(p, size, MADV_HUGEPAGE); }
#endif
    memset(p, 0, size);
    return p;
}
inline void device_free(void* p) { free(p); }
inline void device_zero(void* p, size_t bytes, Stream) { if (bytes > 0) { memset(p, 0, bytes); } }     // p may be null then
inline void copy_to_device(void* to, const void* from, size_t bytes, Stream) { if (bytes > 0) { memcpy(to, from, bytes); } }
inline void copy_to_host(void* to, const void* from, size_t bytes, Stream) { if (bytes > 0) { memcpy(to, from, bytes); } }
inline void* pinned_malloc(size_t bytes) { return malloc(bytes > 0 ? bytes : 1); }
inline void pinned_free(void* p) { free(p); }
inline void copy_to_device_async(void* to, const void* pinned, size_t bytes, Stream s) { copy_to_device(to, pinned, bytes, s); }

#if defined(_OPENMP) && !defined(RACE_THREADS)
inline int max_threads() { return omp_get_max_threads(); }
inline void set_threads(int n) { if (n > 0) { omp_set_num_threads(n); } }
// A waiting OpenMP thread spins, and with anything else running on the machine that costs several times the work. Only the
// environment, read before main, changes it: so start anew with it, once.
inline void wait_politely(char** argv) {
    if (getenv("OMP_WAIT_POLICY") != nullptr || getenv("GOMP_SPINCOUNT") != nullptr) { return; }
    setenv("OMP_WAIT_POLICY", "passive", 1);
    execv("/proc/self/exe", argv);          // returns only if it cannot, and then we go on as we are
}
#else
inline void wait_politely(char**) {}
inline int max_threads() { return 1; }
inline void set_threads(int) {}
#endif
// MemAvailable of the kernel; where there is none, all of the machine's memory
inline size_t device_memory_available() {
    size_t kilobytes = 0;
    char line[128];
    FILE* f = fopen("/proc/meminfo", "r");
    while (f != nullptr && fgets(line, sizeof(line), f) != nullptr) {
        if (sscanf(line, "MemAvailable: %zu kB", &kilobytes) == 1) { break; }
    }
    if (f != nullptr) { fclose(f); }
    return kilobytes > 0 ? kilobytes * 1024 : (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
}
inline std::string device_description() {
#if defined(RACE_THREADS)
    return strprintf("CPU, race build, %d threads a block", RACE_THREADS);
#else
    return strprintf("CPU, %d thread%s, %d-wide float32", max_threads(), max_threads() == 1 ? "" : "s", LANES);
#endif
}
#endif

// ----------------------------------------------------------------------------------------------------------
// launch: the only way to start a kernel

struct Grid {
    size_t blocks;
    int threads;            // a power of two >= 32; a CPU block has one thread whatever this says
    size_t shared_bytes;
    Stream stream;
    const char* file;       // the call site, for the error message
    int line;
    Grid(size_t blocks, int threads, size_t shared_bytes, Stream stream, const char* file = __builtin_FILE(), int line = __builtin_LINE())
        : blocks(blocks), threads(threads), shared_bytes(shared_bytes), stream(stream), file(file), line(line) {}
    // the grid of an elementwise kernel over n elements
    static Grid over(size_t n, Stream stream, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
#if defined(CUDA_BUILD)
        const size_t per_block = 256 * 4;
#else
        const size_t per_block = 16384;
#endif
        return Grid(ceil_div(n, per_block), 256, 0, stream, file, line);
    }
};

template <class... P, class... A> void launch(void (*kernel)(P...), const Grid& grid, A... args) {
    static_assert(sizeof...(P) == sizeof...(A), "launch: the kernel takes another number of arguments");
    if (grid.blocks == 0) { return; }
    if (grid.blocks > 0x7fffffff) { die_at(grid.file, grid.line, EXIT_BAD_INPUT, "a grid of %zu blocks is too large", grid.blocks); }
#if defined(SIMT)
    simt_launch(grid.blocks, grid.threads, grid.shared_bytes, [=] { kernel(static_cast<P>(args)...); }, grid.file, grid.line);
#elif defined(CUDA_BUILD)
    if (grid.shared_bytes > 48 << 10) {
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)grid.shared_bytes),
                   "shared memory of the kernel", grid.file, grid.line);
    }
    kernel<<<(unsigned)grid.blocks, grid.threads, grid.shared_bytes, grid.stream>>>(static_cast<P>(args)...);
    cuda_check(cudaGetLastError(), "kernel launch", grid.file, grid.line);
#elif defined(RACE_THREADS)
    shared_buffer.reserve(grid.shared_bytes);
    pthread_barrier_init(&race_barrier, nullptr, RACE_THREADS);
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < RACE_THREADS; t++) {
        threads.emplace_back([=] {
            threadIdx.x = t;
            gridDim.x = (unsigned)grid.blocks;
            for (unsigned b = 0; b < grid.blocks; b++) {
                blockIdx.x = b;
                kernel(static_cast<P>(args)...);
                __syncthreads();
            }
        });
    }
    for (std::thread& t : threads) { t.join(); }
    pthread_barrier_destroy(&race_barrier);
#else
    const int blocks = (int)grid.blocks;
    int chunk = blocks / (max_threads() * 4);
    if (chunk < 1) { chunk = 1; }
    (void)chunk;
#if defined(_OPENMP)
#pragma omp parallel for schedule(dynamic, chunk) if (blocks > 1)
#endif
    for (int b = 0; b < blocks; b++) {
        shared_buffer.reserve(grid.shared_bytes);
        gridDim.x = (unsigned)blocks;
        blockIdx.x = (unsigned)b;
        kernel(static_cast<P>(args)...);
    }
#endif
}

#endif
