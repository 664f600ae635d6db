// base/device_cuda.h -- a GPU as the device, in the simt build an emulated one. For device.h only.
#pragma once

constexpr int LANES = 1;                    // a CPU's SIMD register is one float of one thread here
using lanes = float;
template <class T> __device__ inline lanes load_lanes(const T* p) { return (float)*p; }
__device__ inline void store_lanes(float* p, lanes v) { *p = v; }
__device__ inline void prefetch(const void*) {}             // only a CPU does
constexpr int MICRO_M = 4;                  // block_matmul: rows and columns of one thread's fragment
constexpr int MICRO_N = 4;
constexpr size_t ROW_SIZES = 256;           // row counts that vary from step to step become a multiple of it
constexpr int PACK = 16 / sizeof(floatX);   // 16 bytes, the most that one load instruction moves

// The shared memory that a block has without a request, and the most of it that our kernels declare as static
constexpr size_t STATIC_AND_DYNAMIC = 48 << 10, MOST_STATIC = 4 << 10;

// ----------------------------------------------------------------------------------------------------------
// the threads of a grid and of a block

// The elements of this thread: for (size_t i = s.begin; i < s.end; i += s.step)
struct GridSpan { size_t begin, end, step; };
__device__ inline GridSpan grid_span(size_t n) {
    return {(size_t)blockIdx.x * blockDim.x + threadIdx.x, n, (size_t)gridDim.x * blockDim.x};
}

// The sum over the lanes of the warp, returned to each; all of them must call it.
template <class T> __device__ inline T warp_sum(T x) {
    for (int o = 16; o > 0; o /= 2) { x += __shfl_xor_sync(~0u, x, o); }
    return x;
}
// op over the x of all threads of the block, returned to each; all of them must call it.
template <class T, class Op> __device__ inline T block_reduce(T x, T identity, Op op) {
    __shared__ T partial[32];                               // of each warp; a block has at most 1,024 threads
    // 1 inside a warp: each exchange doubles the number of lanes in x
    for (int o = 16; o > 0; o /= 2) { x = op(x, __shfl_xor_sync(~0u, x, o)); }
    // 2 over the warps: each warp reduces all partial results
    __syncthreads();                                        // the readers of the last call are done
    if (threadIdx.x % 32 == 0) { partial[threadIdx.x / 32] = x; }
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : identity;
    for (int o = 16; o > 0; o /= 2) { x = op(x, __shfl_xor_sync(~0u, x, o)); }
    return x;
}
// Inclusive prefix sum over the threads of the block, in thread order.
template <class T> __device__ inline T block_scan(T x) {
    __shared__ T warp_total[32];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    // 1 inside a warp: after the step with offset o, x is the sum over up to 2o lanes ending in this one
    for (int o = 1; o < 32; o *= 2) {
        const T y = __shfl_up_sync(~0u, x, o);
        if (lane >= o) { x += y; }
    }
    // 2 add the totals of the warps before
    __syncthreads();                                        // the readers of the last call are done
    if (lane == 31) { warp_total[warp] = x; }
    __syncthreads();
    T before = 0;
    for (int w = 0; w < warp; w++) { before += warp_total[w]; }
    return before + x;
}

// ----------------------------------------------------------------------------------------------------------
// errors

// The last launch, for messages: a fault inside a kernel is reported by a later call, the first that waits for it.
inline const char* last_text = nullptr;                     // the arguments of launch() as written, kernel first
inline Grid last_grid(0, 0, 0, nullptr);
inline std::string last_launch_text() {
    const Grid& g = last_grid;
    if (last_text == nullptr) { return ""; }
    return strprintf("; the last kernel was %.*s of %s:%d, %zu blocks of %d threads with %zu bytes of dynamic shared "
                     "memory; with CUDA_LAUNCH_BLOCKING=1 in the environment it is the one that failed",
                     (int)strcspn(last_text, "<, "), last_text, g.file, g.line, g.blocks, g.threads, g.shared_bytes);
}

#define CUDA_CHECK(call) cuda_check(call, #call, __FILE__, __LINE__)
inline void cuda_check(cudaError_t e, const char* what, const char* file, int line) {
    if (e == cudaSuccess) { return; }
    cudaGetLastError();                     // reported here, so that the next launch does not report it
    const char* error = cudaGetErrorString(e);
    if (e == cudaErrorMemoryAllocation) { die_at(file, line, EXIT_OUT_OF_MEMORY, "%s: %s", what, error); }
    die_at(file, line, EXIT_DEVICE, "%s: %s%s", what, error, last_launch_text().c_str());
}

// ----------------------------------------------------------------------------------------------------------
// a launch

template <class... P, class... A>
void start_kernel(const char* text, const Grid& grid, void (*kernel)(P...), A... args) {
    last_text = text;
    last_grid = grid;
    if (grid.shared_bytes > STATIC_AND_DYNAMIC - MOST_STATIC) {         // more has to be requested
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)grid.shared_bytes),
                   "shared memory of the kernel", grid.file, grid.line);
    }
#if defined(SIMT)
    // the emulator runs the threads as fibers, when the stream reaches the kernel
    const auto run = [=] {
        const auto block = [=] { kernel(static_cast<P>(args)...); };
        simt_launch((const void*)kernel, grid.blocks, grid.threads, grid.shared_bytes, block, grid.file, grid.line);
    };
    simt_enqueue(grid.stream, run);
#else
    kernel<<<(unsigned)grid.blocks, grid.threads, grid.shared_bytes, grid.stream>>>(static_cast<P>(args)...);
#endif
    cuda_check(cudaGetLastError(), "kernel launch", grid.file, grid.line);
}

// ----------------------------------------------------------------------------------------------------------
// memory

// Zeroed. 0 bytes become 1: an encoding may have no arrays.
inline void* device_malloc(size_t bytes) {
    void* p;
    const size_t size = imax(bytes, (size_t)1);
    const cudaError_t e = cudaMalloc(&p, size);
    if (e == cudaErrorMemoryAllocation) {
        cudaGetLastError();                 // as in cuda_check()
        size_t available = 0, total = 0;
        cudaMemGetInfo(&available, &total);
        die(EXIT_OUT_OF_MEMORY, "cannot allocate %s on the GPU, %s of %s are available; try a smaller --B, --T or "
            "--model", format_bytes((double)size).c_str(), format_bytes((double)available).c_str(),
            format_bytes((double)total).c_str());
    }
    cuda_check(e, "cudaMalloc", __FILE__, __LINE__);
    CUDA_CHECK(cudaMemset(p, 0, size));
    return p;
}
inline void device_free(void* p) { cudaFree(p); }
inline void* device_reserve(size_t bytes) { return device_malloc(bytes); }
inline void device_unreserve(void* p, size_t) { device_free(p); }
inline void device_forget(char*, size_t, size_t) {}
// copy_to_device and copy_to_host return when the copy is done; the other functions return before.
inline void device_zero(void* p, size_t bytes, Stream s) { CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, s)); }
inline void copy_to_device(void* to, const void* from, size_t bytes, Stream s) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, s));
    CUDA_CHECK(cudaStreamSynchronize(s));
}
inline void copy_to_host(void* to, const void* from, size_t bytes, Stream s) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, s));
    CUDA_CHECK(cudaStreamSynchronize(s));
}
inline void copy_on_device(void* to, const void* from, size_t bytes, Stream s) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, s));
}
// Host memory for copy_to_device_async: it must not change until the copy is done.
inline void* pinned_malloc(size_t bytes) {
    void* p;
    CUDA_CHECK(cudaMallocHost(&p, bytes));
    return p;
}
inline void pinned_free(void* p) { cudaFreeHost(p); }
inline void copy_to_device_async(void* to, const void* pinned, size_t bytes, Stream s) {
    CUDA_CHECK(cudaMemcpyAsync(to, pinned, bytes, cudaMemcpyHostToDevice, s));
}

// ----------------------------------------------------------------------------------------------------------
// streams

inline Stream new_stream() {
    Stream s;
    CUDA_CHECK(cudaStreamCreate(&s));
    return s;
}
// The stream of this process's work. It and the null stream wait for each other; unlike the null stream it runs beside
// second_stream().
inline Stream device_stream() { static const Stream s = new_stream(); return s; }
// The stream of the exchange between ranks. High priority: a free SM takes its blocks before waiting ones of
// device_stream().
inline Stream second_stream() {
    static const Stream s = [] {
        int least = 0, greatest = 0;
        Stream first;
        CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
        CUDA_CHECK(cudaStreamCreateWithPriority(&first, cudaStreamDefault, greatest));
        return first;
    }();
    return s;
}

// A point in a stream's work
struct Event {
    cudaEvent_t event = nullptr;
    void record(Stream s) {
        if (event == nullptr) { CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)); }
        CUDA_CHECK(cudaEventRecord(event, s));
    }
    // Work added to s from now on waits for the recorded point, if there is one.
    void hold(Stream s) const {
        if (event != nullptr) { CUDA_CHECK(cudaStreamWaitEvent(s, event, 0)); }
    }
    void release() {
        if (event != nullptr) { cudaEventDestroy(event); }
        event = nullptr;
    }
};

// ----------------------------------------------------------------------------------------------------------
// the machine

inline size_t device_memory_available() {
    size_t available, total;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return available;
}
// bytes in use on the device, by all processes
inline size_t device_memory_used() {
    size_t available, total;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return total - available;
}
// the device of this thread
inline int current_device() {
    int device = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    return device;
}
inline void use_device(int device) { CUDA_CHECK(cudaSetDevice(device)); }
// the shared memory that a block can have, in bytes: static plus dynamic
inline size_t device_shared_available() {
    int bytes = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, current_device()));
    return (size_t)bytes;
}
inline int device_processors() {            // its SMs
    int count = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, current_device()));
    return count;
}
inline int max_threads() { return 1; }
inline int device_count() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}
inline void set_threads(int) {}
inline void wait_politely(char**) {}
inline std::string device_description() {
    cudaDeviceProp p;
    CUDA_CHECK(cudaGetDeviceProperties(&p, 0));
    return strprintf("%s, %d SMs, %s", p.name, p.multiProcessorCount, format_bytes((double)p.totalGlobalMem).c_str());
}
