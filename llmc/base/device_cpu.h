// base/device_cpu.h -- a CPU as the device: a block is one thread. For device.h only.
#pragma once

#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>

#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "host.h"

struct BlockIndex { unsigned x; };
inline thread_local BlockIndex blockIdx, gridDim;
constexpr size_t ROW_SIZES = 1;                         // products take any number of rows
constexpr int PACK = 1;                                 // the compiler vectorizes loops over single elements

// ----------------------------------------------------------------------------------------------------------
// the threads of a block

// There is one: a barrier does nothing, and a sum over the threads is the thread's own value.
#define __shared__
struct BlockExtent { static constexpr unsigned x = 1; };
struct OneThread { static constexpr unsigned x = 0; };
constexpr OneThread threadIdx;
inline void __syncthreads() {}
// `lanes` is a SIMD register: arithmetic is elementwise, a float is broadcast. block_matmul keeps MICRO_M x MICRO_N
// registers of sums. More than 8 are best: two units start an FMA each in every cycle, and an FMA takes 4 cycles.
#if defined(__AVX512F__)
constexpr int LANES = 16, MICRO_M = 8;                  // 16 of 32 registers hold sums
#elif defined(__AVX__)
constexpr int LANES = 8, MICRO_M = 6;                   // 12 of 16
#else
constexpr int LANES = 4, MICRO_M = 4;                   // 8
#endif
constexpr int MICRO_N = 2;
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t lane_words __attribute__((vector_size(4 * LANES)));
// memcpy: p need not be aligned; it becomes one unaligned load or store
__forceinline__ lanes load_lanes(const float* p) {
    lanes v;
    memcpy(&v, p, sizeof(v));
    return v;
}
__forceinline__ lanes load_lanes(const bf16* p) {
    typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
    halves h;
    memcpy(&h, p, sizeof(h));
    return (lanes)(__builtin_convertvector(h, lane_words) << 16);
}
__forceinline__ void store_lanes(float* p, lanes v) { memcpy(p, &v, sizeof(v)); }
// a * b + c in each lane, rounded once
__forceinline__ lanes fused_madd(float a, lanes b, lanes c) {
#if defined(__AVX512F__)
    return (lanes)_mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (lanes)_mm256_fmadd_ps(_mm256_set1_ps(a), (__m256)b, (__m256)c);
#elif defined(__ARM_FEATURE_FMA)
    return (lanes)vfmaq_n_f32((float32x4_t)c, (float32x4_t)b, a);
#else
    for (int i = 0; i < LANES; i++) { c[i] = __builtin_fmaf(a, b[i], c[i]); }
    return c;
#endif
}
template <class T, class Op> T block_reduce(T x, T, Op) { return x; }
template <class T> T warp_sum(T x) { return x; }
template <class T> T block_scan(T x) { return x; }
constexpr BlockExtent blockDim;

struct GridSpan {
    size_t begin, end;
    static constexpr size_t step = 1;
};
// one contiguous piece per block
inline GridSpan grid_span(size_t n) {
    const size_t pieces = (size_t)gridDim.x * blockDim.x;
    const size_t piece = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    const size_t length = round_up(ceil_div(n, pieces), (size_t)64);    // whole cache lines: threads do not share one
    const size_t begin = imin(piece * length, n);
    return {begin, imin(begin + length, n)};
}

// ----------------------------------------------------------------------------------------------------------
// memory

// The dynamic shared memory of the block that this thread runs
struct SharedBuffer {
    char* data = nullptr;
    size_t capacity = 0;
    // returns whether there was memory: an exception cannot leave a parallel region
    bool reserve(size_t bytes) {
        if (bytes <= capacity) { return true; }
        free(data);
        data = (char*)aligned_alloc(256, round_up(bytes, (size_t)256));
        capacity = data == nullptr ? 0 : bytes;
        pthread_setspecific(key(), data);
        return data != nullptr;
    }
    // The key frees the buffer when its thread ends. A destructor would have to be registered, and the C library ends
    // the program if it has no memory for that.
    static pthread_key_t key() {
        static const pthread_key_t made = [] {
            pthread_key_t k;
            if (pthread_key_create(&k, free) != 0) { die(EXIT_OUT_OF_MEMORY, "the system has no thread keys left"); }
            return k;
        }();
        return made;
    }
};
inline thread_local SharedBuffer shared_buffer;
inline float* dynamic_shared() { return (float*)shared_buffer.data; }
inline void prefetch(const void* p) { __builtin_prefetch(p); }

// Zeroed. Large arrays start on a multiple of 2 MB, so that the kernel can use huge pages.
inline void* device_malloc(size_t bytes) {
    const size_t page = bytes >= (2u << 20) ? (2u << 20) : 256;         // 256: what cudaMalloc aligns to
    const size_t size = round_up(imax(bytes, (size_t)1), page);
    void* p = aligned_alloc(page, size);
    if (p == nullptr) {
        die(EXIT_OUT_OF_MEMORY, "cannot allocate %s; try a smaller --B, --T or --model",
            format_bytes((double)bytes).c_str());
    }
    // one entry of the processor's address cache instead of 512
    if (page > 256) { madvise(p, size, MADV_HUGEPAGE); }
    memset(p, 0, size);
    return p;
}
inline void device_free(void* p) { free(p); }
// Addresses that read as zero and take memory only once they are written.
inline void* device_reserve(size_t bytes) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* p = mmap(nullptr, imax(bytes, (size_t)1), PROT_READ | PROT_WRITE, flags, -1, 0);
    if (p == MAP_FAILED) {
        die(EXIT_OUT_OF_MEMORY, "cannot reserve %s of addresses (ulimit -v?)", format_bytes((double)bytes).c_str());
    }
    return p;
}
inline void device_unreserve(void* p, size_t bytes) { munmap(p, imax(bytes, (size_t)1)); }
// Gives the whole pages of p[0 .. end-1] back; they read as zero. The pages of p[0 .. begin-1] were given back before.
inline void device_forget(char* p, size_t begin, size_t end) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t from = imax(round_up((size_t)p, page), ((size_t)p + begin) / page * page);
    const size_t to = ((size_t)p + end) / page * page;
    if (from < to) { madvise((void*)from, to - from, MADV_DONTNEED); }
}
// bytes = 0: p may be null
inline void device_zero(void* p, size_t bytes, Stream) { if (bytes > 0) { memset(p, 0, bytes); } }
inline void copy_to_device(void* to, const void* from, size_t bytes, Stream) {
    if (bytes > 0) { memcpy(to, from, bytes); }
}
inline void copy_to_host(void* to, const void* from, size_t bytes, Stream s) { copy_to_device(to, from, bytes, s); }
inline void copy_on_device(void* to, const void* from, size_t bytes, Stream s) { copy_to_device(to, from, bytes, s); }
inline void copy_to_device_async(void* to, const void* from, size_t bytes, Stream s) {
    copy_to_device(to, from, bytes, s);
}
// Not zeroed: pages take memory when they are first used.
inline void* pinned_malloc(size_t bytes) {
    void* p = malloc(imax(bytes, (size_t)1));
    if (p == nullptr) { die(EXIT_OUT_OF_MEMORY, "cannot allocate %s", format_bytes((double)bytes).c_str()); }
    return p;
}
inline void pinned_free(void* p) { free(p); }

// ----------------------------------------------------------------------------------------------------------
// the machine

inline Stream device_stream() { return nullptr; }
inline Stream second_stream() { return nullptr; }
struct Event {          // all work is done when its call returns
    void record(Stream) {}
    void hold(Stream) const {}
    void release() {}
};
inline int device_count() { return 0; }
inline int current_device() { return 0; }
inline void use_device(int) {}

#if defined(_OPENMP)
inline int max_threads() { return omp_get_max_threads(); }
// n: 0 keeps OpenMP's number. If OpenMP cannot make its threads, it ends the program without a hint, so the same number
// of threads is tried here first.
inline void set_threads(int n) {
    if (n > 0) { omp_set_num_threads(n); }
    const int others = omp_get_max_threads() - 1;
    std::vector<std::thread> threads;
    std::mutex mutex;
    bool failed = false;
    {
        const std::lock_guard<std::mutex> all_are_there(mutex);     // all threads wait until the last is made
        try {
            threads.reserve((size_t)others);
            for (int i = 0; i < others; i++) {
                threads.emplace_back([&] { const std::lock_guard<std::mutex> turn(mutex); });
            }
        } catch (const std::system_error&) {
            failed = true;
        }
    }
    for (std::thread& t : threads) { t.join(); }
    if (failed) {
        die(EXIT_OUT_OF_MEMORY, "expected %d threads, got %zu (limits of memory or of processes?); --threads sets "
            "their number", others + 1, threads.size() + 1);
    }
}
// A waiting OpenMP thread spins, which makes a run several times slower if anything else runs on the machine. Only an
// environment variable changes that, and OpenMP reads it before main: so the program sets it and starts itself again.
inline void wait_politely(char** argv) {
    if (getenv("OMP_WAIT_POLICY") != nullptr || getenv("GOMP_SPINCOUNT") != nullptr) { return; }
    if (setenv("OMP_WAIT_POLICY", "passive", 1) != 0) { return; }       // else the program would start forever
    // by its path: the kernel names a process after its file, and "exe" would say nothing
    char path[4096] = {};
    if (readlink("/proc/self/exe", path, sizeof(path) - 1) > 0) { execv(path, argv); }
    execv("/proc/self/exe", argv);          // the file was deleted; if this fails too, the program continues as it is
}
#else
inline int max_threads() { return 1; }
inline void set_threads(int) {}
inline void wait_politely(char**) {}
#endif

// of a block; ordinary memory here
inline size_t device_shared_available() { return SIZE_MAX; }
inline int device_processors() { return 1; }                // a GPU's SMs
inline size_t device_memory_available() { return host_memory_available(); }
// the process's peak
inline size_t device_memory_used() {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (size_t)usage.ru_maxrss * 1024;
}
inline std::string device_description() {
    const char* plural = max_threads() == 1 ? "" : "s";
    const double cores = group_limits().cores;
    const std::string allowed = cores > max_threads() ? "" : strprintf(" for %g cores of its control group", cores);
    const char* stored = sizeof(floatX) == sizeof(float) ? "" : ", bf16 storage";
    return strprintf("CPU, %d thread%s%s, %d-wide float32%s", max_threads(), plural, allowed.c_str(), LANES, stored);
}

// ----------------------------------------------------------------------------------------------------------
// a launch

// a parallel loop over the blocks; a block is one call of the kernel
template <class... P, class... A>
void start_kernel(const char*, const Grid& grid, void (*kernel)(P...), A... args) {
    const int blocks = (int)grid.blocks;
    [[maybe_unused]] const int chunk = imax(1, blocks / (max_threads() * 4));   // blocks that a thread takes at once
    const auto block = [=] { kernel(static_cast<P>(args)...); };
    SharedBuffer::key();                // made here: inside the parallel region an error would end the program
    std::atomic<bool> lacks_memory = false;
    OMP(parallel if (blocks > 1))
    {
        const FlushDenormals flush;     // any library may have made this thread
        OMP(for schedule(dynamic, chunk))
        for (int b = 0; b < blocks; b++) {
            if (!shared_buffer.reserve(grid.shared_bytes)) {
                lacks_memory = true;
                continue;
            }
            gridDim.x = (unsigned)blocks;
            blockIdx.x = (unsigned)b;
            block();
        }
    }
    if (lacks_memory) { die(EXIT_OUT_OF_MEMORY, "cannot allocate %zu bytes for a block's scratch", grid.shared_bytes); }
}
