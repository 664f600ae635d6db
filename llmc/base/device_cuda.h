// base/device_cuda.h -- what device.h promises, in CUDA's words; the simt build reads it too. Included by device.h alone.
#ifndef LLMC_BASE_DEVICE_CUDA_H
#define LLMC_BASE_DEVICE_CUDA_H

using Stream = cudaStream_t;
constexpr int LANES = 1;
using lanes = float;
__device__ inline lanes load_lanes(const float* p) { return *p; }
__device__ inline void store_lanes(float* p, lanes v) { *p = v; }
constexpr int MICRO_M = 4, MICRO_N = 4;     // block_matmul: rows x lanes of a thread's fragment
constexpr int PACK = 16 / sizeof(floatX);

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

// The last kernel that was launched: what goes wrong in a kernel is only told by a later call that waits for it.
struct LastLaunch { const void* kernel; const char* file; int line; size_t blocks; int threads; size_t shared_bytes; };
inline LastLaunch last_launch = {};
inline std::string last_launch_text() {
    const LastLaunch& k = last_launch;
    if (k.file == nullptr) { return ""; }
    const char* name = nullptr;
#if !defined(SIMT) && CUDART_VERSION >= 12030
    if (cudaFuncGetName(&name, k.kernel) != cudaSuccess) { name = nullptr; }
#endif
    return strprintf("; the last kernel was %s%sthat of %s:%d, %zu blocks of %d threads with %zu bytes of dynamic shared memory; with "
                     "CUDA_LAUNCH_BLOCKING=1 in the environment it is the one that failed", name != nullptr ? name : "", name != nullptr ? ", " : "",
                     k.file, k.line, k.blocks, k.threads, k.shared_bytes);
}

#define CUDA_CHECK(call) cuda_check(call, #call, __FILE__, __LINE__)
inline void cuda_check(cudaError_t e, const char* what, const char* file, int line) {
    if (e == cudaErrorMemoryAllocation) { die_at(file, line, EXIT_OUT_OF_MEMORY, "%s: %s", what, cudaGetErrorString(e)); }
    if (e != cudaSuccess) { die_at(file, line, EXIT_DEVICE, "%s: %s%s", what, cudaGetErrorString(e), last_launch_text().c_str()); }
}
inline void* device_malloc(size_t bytes) {
    void* p;
    const size_t size = bytes > 0 ? bytes : 1;          // an encoding may have no arrays
    const cudaError_t e = cudaMalloc(&p, size);
    if (e == cudaErrorMemoryAllocation) {
        size_t available = 0, total = 0;
        cudaMemGetInfo(&available, &total);
        die(EXIT_OUT_OF_MEMORY, "cannot allocate %s on the GPU, %s of %s are available; try a smaller --B, --T or --model",
            format_bytes((double)size).c_str(), format_bytes((double)available).c_str(), format_bytes((double)total).c_str());
    }
    cuda_check(e, "cudaMalloc", __FILE__, __LINE__);
    CUDA_CHECK(cudaMemset(p, 0, size));
    return p;
}
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
// The stream of a model, one of the process. It waits for the null stream's work, and the null stream for its own, but unlike that
// one it can be recorded.
inline Stream device_stream() {
    static const Stream stream = [] { Stream s; CUDA_CHECK(cudaStreamCreate(&s)); return s; }();
    return stream;
}
// A step's work on a stream, recorded and then launched at once: its many small kernels no longer wait for the host. A step that is
// the last one with other arguments updates the recording. It must not wait, allocate or be the first to run a kernel.
struct StepGraph {
    cudaGraphExec_t exec = nullptr;

    StepGraph() = default;
    StepGraph(const StepGraph&) = delete;
    ~StepGraph() { if (exec != nullptr) { cudaGraphExecDestroy(exec); } }
    template <class F> void run(Stream s, F step) {
        if (s == nullptr) { step(); return; }
        cudaGraph_t graph = nullptr;
        CUDA_CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        try { step(); }
        catch (...) { cudaStreamEndCapture(s, &graph); cudaGetLastError(); throw; }
        CUDA_CHECK(cudaStreamEndCapture(s, &graph));
        cudaGraphExecUpdateResultInfo why;
        if (exec != nullptr && cudaGraphExecUpdate(exec, graph, &why) != cudaSuccess) {     // another number of launches
            cudaGetLastError();
            CUDA_CHECK(cudaGraphExecDestroy(exec));
            exec = nullptr;
        }
        if (exec == nullptr) { CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0)); }
        CUDA_CHECK(cudaGraphDestroy(graph));
        CUDA_CHECK(cudaGraphLaunch(exec, s));
    }
};
inline size_t device_memory_available() { size_t available, total; CUDA_CHECK(cudaMemGetInfo(&available, &total)); return available; }
// bytes of a block
inline size_t device_shared_available() {
    int device = 0, bytes = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return (size_t)bytes;
}
inline void set_threads(int) {}
inline void wait_politely(char**) {}
inline std::string device_description() {
    cudaDeviceProp p;
    CUDA_CHECK(cudaGetDeviceProperties(&p, 0));
    return strprintf("%s, %d SMs, %s", p.name, p.multiProcessorCount, format_bytes((double)p.totalGlobalMem).c_str());
}

#endif
