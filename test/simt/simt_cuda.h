// simt_cuda.h -- the part of simt.h that runs kernels: CUDA's collectives, shared memory, the launch.
#pragma once

inline void __syncthreads(SIMT_SITE) { simt_barrier("__syncthreads", 0, (int)blockDim.x, file, line); }
inline void __syncwarp(unsigned mask = ~0u, SIMT_SITE) {
    simt_collective("__syncwarp", mask, nullptr, nullptr, nullptr, file, line);
}

// Every lane gives a value and the lane that it wants to read. A lane outside the mask gives none: poison is read.
template <class T> struct SimtShuffle { T value; int from; T result; };
template <class T> T simt_shuffle(const char* what, unsigned mask, T value, int from, const char* file, int line) {
    static_assert(std::is_arithmetic<T>::value, "shuffles move numbers");
    SimtShuffle<T> mine;
    mine.value = value;
    mine.from = from;
    simt_collective(what, mask, &mine, &mine, [](const void* const* in, void* const* out) {
        for (int l = 0; l < 32; l++) {
            if (in[l] == nullptr) { continue; }
            SimtShuffle<T>* to = (SimtShuffle<T>*)out[l];
            const SimtShuffle<T>* source = (const SimtShuffle<T>*)in[to->from];
            memset(&to->result, 0xff, sizeof(T));
            if (source != nullptr) { to->result = source->value; }
        }
    }, file, line);
    return mine.result;
}
inline int simt_lane() { return (int)(threadIdx.x % 32); }
template <class T> T __shfl_sync(unsigned mask, T x, int lane, SIMT_SITE) {
    return simt_shuffle("__shfl_sync", mask, x, lane & 31, file, line);
}
template <class T> T __shfl_xor_sync(unsigned mask, T x, int bits, SIMT_SITE) {
    return simt_shuffle("__shfl_xor_sync", mask, x, (simt_lane() ^ bits) & 31, file, line);
}
template <class T> T __shfl_up_sync(unsigned mask, T x, unsigned by, SIMT_SITE) {
    const int from = simt_lane() - (int)by;
    return simt_shuffle("__shfl_up_sync", mask, x, from < 0 ? simt_lane() : from, file, line);
}
template <class T> T __shfl_down_sync(unsigned mask, T x, unsigned by, SIMT_SITE) {
    const int from = simt_lane() + (int)by;
    return simt_shuffle("__shfl_down_sync", mask, x, from > 31 ? simt_lane() : from, file, line);
}
// bit l: lane l is in the mask and its predicate holds
inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_SITE) {
    struct Vote { int predicate; unsigned result; } mine = {predicate, 0};
    simt_collective("__ballot_sync", mask, &mine, &mine, [](const void* const* in, void* const* out) {
        unsigned votes = 0;
        for (int l = 0; l < 32; l++) {
            votes |= (unsigned)(in[l] != nullptr && ((const Vote*)in[l])->predicate != 0) << l;
        }
        for (int l = 0; l < 32; l++) { if (out[l] != nullptr) { ((Vote*)out[l])->result = votes; } }
    }, file, line);
    return mine.result;
}

// ----------------------------------------------------------------------------------------------------------
// shared memory

struct SimtMemory { char* begin; size_t bytes; };
inline SimtMemory simt_static_shared() {
#if defined(__clang__)
    return {__start_simt_shared, (size_t)(__stop_simt_shared - __start_simt_shared)};
#else
    SimtMemory m = {nullptr, 0};
    dl_iterate_phdr([](struct dl_phdr_info* info, size_t, void* to) {      // the first one is the program
        for (int i = 0; i < info->dlpi_phnum; i++) {
            if (info->dlpi_phdr[i].p_type == PT_TLS) {
                *(SimtMemory*)to = {(char*)info->dlpi_tls_data, info->dlpi_phdr[i].p_memsz};
            }
        }
        return 1;
    }, &m);
    return m;
#endif
}
// true when p .. p+bytes is shared memory of the running block
inline bool simt_is_shared(const void* p, size_t bytes) {
    static const SimtMemory fixed = simt_static_shared();
    auto within = [&](const char* begin, size_t n) {
        return (const char*)p >= begin && (const char*)p + bytes <= begin + n;
    };
    return within(simt.shared, simt.shared_bytes) || within(fixed.begin, fixed.bytes);
}

// ----------------------------------------------------------------------------------------------------------
// launch

inline void simt_block(size_t block, int threads, const char* file, int line) {
    blockIdx.x = (unsigned)block;
    simt.error = nullptr;
    simt_forget_ready();
    memset(simt.waiting, 0, sizeof(simt.waiting));
    for (SimtBarrier& b : simt.barriers) { b.warps.clear(); }
    simt.unfinished = (unsigned)threads;
    for (int i = 0; i < threads; i++) {
        if (i == (int)simt.pool.size()) { simt.pool.push_back(new SimtThread()); }
        SimtThread* t = simt.pool[i];
        if (!t->started) { simt_start(t); }
        t->index = (unsigned)i;
        t->done = false;
        t->copies.clear();
        t->groups = 0;
        t->products.clear();
        t->fenced = t->copied = false;
        simt_wake(t);
    }
    simt_run_ready();
    if (simt.unfinished == 0) { return; }
    std::string what;
    int code = EXIT_DEVICE;
    try {
        if (simt.error) { std::rethrow_exception(simt.error); }
        what = "threads wait for others that do not come" + simt_who_waits();
    } catch (const Error& e) {
        what = e.what();
        code = e.code;
    }
    // their stacks are those of an unfinished kernel
    for (int i = 0; i < threads; i++) { simt.pool[i]->started = false; }
    die_at(file, line, code, "kernel, block %zu of %u, %d threads: %s\n ", block, gridDim.x, threads, what.c_str());
}

// SIMT_LAUNCHES=FILE: which kernels a program ran. At its end FILE gets a line for each place that launched one: how
// often, and where.
struct SimtLaunches {
    const char* path = getenv("SIMT_LAUNCHES");
    std::map<std::string, size_t> counts;

    void count(const char* file, int line) { if (path != nullptr) { counts[strprintf("%s:%d", file, line)]++; } }
    ~SimtLaunches() {
        FILE* f = path != nullptr ? fopen(path, "w") : nullptr;
        if (f == nullptr) { return; }
        for (const auto& place : counts) { fprintf(f, "%zu %s\n", place.second, place.first.c_str()); }
        fclose(f);
    }
};
inline SimtLaunches simt_launches;

// The dynamic shared memory that kernels have requested. Without a request a kernel has 48 kB, static memory included.
inline std::map<const void*, size_t> simt_opted_in;
inline void simt_check_shared(const void* kernel, size_t dynamic_bytes, size_t static_bytes, const char* file,
                              int line) {
    const auto asked = simt_opted_in.find(kernel);
    const bool opted_in = asked != simt_opted_in.end() && dynamic_bytes <= asked->second;
    const size_t most = opted_in ? SIMT_MAX_SHARED : 48 << 10;
    if (dynamic_bytes + static_bytes > most) {
        die_at(file, line, EXIT_DEVICE, "%zu bytes of dynamic and %zu of static shared memory a block: expected at "
               "most %zu in all (%s)", dynamic_bytes, static_bytes, most, opted_in ? "there is no more" :
               "cudaFuncSetAttribute asks for more");
    }
}
// Bytes of static shared memory that the block which has just run has written
inline size_t simt_static_written(SimtMemory m) {
    size_t words = 0;
    for (size_t i = 0; i + 4 <= m.bytes; i += 4) { words += simt_bits<unsigned>(*(const float*)(m.begin + i)) != ~0u; }
    return 4 * words;
}

inline void simt_launch(const void* kernel, size_t blocks, int threads, size_t shared_bytes,
                        const std::function<void()>& body, const char* file, int line) {
    static const SimtMemory fixed = simt_static_shared();
    if (simt.body != nullptr) { die_at(file, line, EXIT_DEVICE, "a kernel cannot launch a kernel"); }
    if (threads < 32 || threads > 1024 || threads % 32 != 0 || shared_bytes > SIMT_MAX_SHARED) {
        die_at(file, line, EXIT_DEVICE,
               "%d threads and %zu bytes of shared memory a block: at most 1024, a multiple of 32, and %zu bytes",
               threads, shared_bytes, SIMT_MAX_SHARED);
    }
    struct Running {
        Running(const std::function<void()>& body) { simt.body = &body; }
        ~Running() { simt.body = nullptr; free(simt.shared); simt.shared = nullptr; simt.shared_bytes = 0; }
    } running(body);
    simt_launches.count(file, line);
    blockDim.x = (unsigned)threads;
    gridDim.x = (unsigned)blocks;
    std::vector<unsigned> order(blocks);
    for (size_t b = 0; b < blocks; b++) { order[b] = (unsigned)b; }
    for (size_t b = blocks; b > 1; b--) { std::swap(order[b - 1], order[simt.draw(b)]); }
    for (size_t b = 0; b < blocks; b++) {
        free(simt.shared);
        simt.shared = nullptr;
        simt.shared_bytes = shared_bytes;
        if (shared_bytes > 0 && posix_memalign((void**)&simt.shared, 1024, shared_bytes) != 0) {
            die(EXIT_OUT_OF_MEMORY, "no %zu bytes for a block's shared memory", shared_bytes);
        }
        if (shared_bytes > 0) { memset(simt.shared, 0xff, shared_bytes); }
        if (fixed.bytes > 0) { memset(fixed.begin, 0xff, fixed.bytes); }
        const unsigned sticky[] = {0, 7, 8};
        simt.sticky = b == 0 ? 8 : sticky[simt.draw(3)];    // 8: one block must show a missing barrier too
        if (b == 0) { simt_check_shared(kernel, shared_bytes, 0, file, line); }
        simt_block(order[b], threads, file, line);
        if (b == 0) { simt_check_shared(kernel, shared_bytes, simt_static_written(fixed), file, line); }
    }
}
