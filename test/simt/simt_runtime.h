// simt_runtime.h -- the last part of simt.h: the runtime's calls. The device's memory is the host's, SIMT_MEMORY bytes
// of it.
//
// What a stream is given is done late: when the host waits for it, or asks whether it is done, streams take turns in an
// order drawn by SIMT_SEED. So a missing wait is seen: it finds memory that was not written yet, and what cudaMalloc
// returns is full of NaN.
#pragma once

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorNotReady = 600
};
enum cudaMemcpyKind {
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };
enum cudaDeviceAttr {
    cudaDevAttrClockRate,
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrComputeCapabilityMinor
};
// Done: it ran. Waits: for another stream. Later: for something outside of this process.
enum class SimtTurn { Done, Waits, Later };
struct SimtStream {
    bool blocking = true;                                       // waits for the null stream, and is waited for
    int priority = 0;                                           // the lower the sooner
    std::deque<std::function<SimtTurn()>> queue;
    size_t given = 0;                                           // number of pieces of work so far
    size_t done = 0;
};
using cudaStream_t = SimtStream*;
struct SimtEvent {
    // of the last record. A stream that comes to a record finds it even if the event was destroyed meanwhile.
    std::shared_ptr<double> seconds = std::make_shared<double>(0.0);
    cudaStream_t stream = nullptr;                              // complete once this stream has done so much
    size_t position = 0;
    bool complete() const { return stream == nullptr || stream->done >= position; }
};
using cudaEvent_t = SimtEvent*;
struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem;
    int multiProcessorCount, major, minor;
};

inline const char* cudaGetErrorString(cudaError_t e) {
    switch (e) {
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
        default: return "invalid argument";
    }
}
// A call's error stays the last error until cudaGetLastError() reads it, and the next launch would be blamed for it.
// CUDA says that cudaErrorNotReady is not kept; here it is, so that no code relies on it.
inline cudaError_t simt_last_error = cudaSuccess;
inline cudaError_t simt_error(cudaError_t e) {
    if (e != cudaSuccess) { simt_last_error = e; }
    return e;
}
inline cudaError_t cudaGetLastError() {
    const cudaError_t e = simt_last_error;
    simt_last_error = cudaSuccess;
    return e;
}

template <class... P> cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute, int bytes) {
    if (bytes < 0 || (size_t)bytes > SIMT_MAX_SHARED) { return simt_error(cudaErrorInvalidValue); }
    simt_opted_in[(const void*)kernel] = (size_t)bytes;
    return cudaSuccess;
}

inline std::vector<cudaStream_t> simt_streams;
inline std::recursive_mutex simt_mutex;                         // a checkpoint is written by a thread of its own
// Lets streams drawn at random take turns until `finished`.
template <class F> void simt_run(F finished) {
    const std::lock_guard<std::recursive_mutex> lock(simt_mutex);
    static uint64_t state = strtoull(getenv("SIMT_SEED") != nullptr ? getenv("SIMT_SEED") : "1", nullptr, 10);
    while (!finished()) {
        std::vector<cudaStream_t> busy;
        for (cudaStream_t s : simt_streams) { if (!s->queue.empty()) { busy.push_back(s); } }
        bool stuck = true;
        while (stuck && !busy.empty()) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            const size_t i = (size_t)(state >> 33) % busy.size();
            const cudaStream_t s = busy[i];
            const SimtTurn turn = s->queue.front()();
            stuck = turn == SimtTurn::Waits;
            if (turn == SimtTurn::Done) {
                s->queue.pop_front();
                s->done++;
            }
            busy.erase(busy.begin() + (ptrdiff_t)i);
        }
        if (stuck) { fprintf(stderr, "simt: the streams wait for each other\n"); abort(); }
    }
}
inline void simt_run_all(bool blocking_only) {
    simt_run([=] {
        return std::all_of(simt_streams.begin(), simt_streams.end(), [=](cudaStream_t s) {
            return s->queue.empty() || (blocking_only && !s->blocking);
        });
    });
}
inline void simt_give(cudaStream_t s, const std::function<SimtTurn()>& work) {
    const std::lock_guard<std::recursive_mutex> lock(simt_mutex);
    s->queue.push_back(work);
    s->given++;
}

inline void simt_enqueue(cudaStream_t stream, const std::function<void()>& work) {
    const std::lock_guard<std::recursive_mutex> lock(simt_mutex);
    if (stream == nullptr) {                                    // the null stream: the other ones are done
        simt_run_all(true);
        work();
    } else {
        simt_give(stream, [=] { work(); return SimtTurn::Done; });
    }
}

inline std::map<void*, size_t> simt_allocations;
inline size_t simt_memory() {
    const char* s = getenv("SIMT_MEMORY");
    return s != nullptr ? strtoull(s, nullptr, 10) : (size_t)4 << 30;
}
inline cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
    size_t used = 0;
    for (const auto& a : simt_allocations) { used += a.second; }
    *total = simt_memory();
    *available = *total > used ? *total - used : 0;
    return cudaSuccess;
}
template <class T> cudaError_t cudaMalloc(T** p, size_t bytes) {
    *p = nullptr;
    size_t available, total;
    cudaMemGetInfo(&available, &total);
    void* q = nullptr;
    if (bytes == 0) { return cudaSuccess; }
    if (bytes > available || posix_memalign(&q, 256, bytes) != 0) { return simt_error(cudaErrorMemoryAllocation); }
    memset(q, 0xff, bytes);
    simt_allocations[q] = bytes;
    *p = (T*)q;
    return cudaSuccess;
}
inline cudaError_t cudaFree(void* p) {
    if (p == nullptr) { return cudaSuccess; }
    simt_run_all(false);
    if (simt_allocations.erase(p) == 0) { return simt_error(cudaErrorInvalidValue); }
    free(p);
    return cudaSuccess;
}
inline std::map<const char*, size_t> simt_pinned;
template <class T> cudaError_t cudaMallocHost(T** p, size_t bytes) {
    *p = nullptr;
    *p = (T*)malloc(bytes > 0 ? bytes : 1);
    if (*p != nullptr) { simt_pinned[(const char*)*p] = bytes; }
    return *p != nullptr ? cudaSuccess : simt_error(cudaErrorMemoryAllocation);
}
inline cudaError_t cudaFreeHost(void* p) {
    simt_run_all(false);
    simt_pinned.erase((const char*)p);
    free(p);
    return cudaSuccess;
}
inline bool simt_is_pinned(const void* p) {
    auto after = simt_pinned.upper_bound((const char*)p);
    return after != simt_pinned.begin() && (const char*)p < std::prev(after)->first + std::prev(after)->second;
}
// From and to pinned memory when the stream comes to it. Other memory of the host is read at once, and it is written
// before the call returns.
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t s = nullptr) {
    const auto copy = [=] { if (bytes > 0) { memmove(to, from, bytes); } };
    if (kind == cudaMemcpyHostToDevice && !simt_is_pinned(from)) {
        const std::string read((const char*)from, bytes);
        simt_enqueue(s, [=] { memcpy(to, read.data(), bytes); });
        return cudaSuccess;
    }
    simt_enqueue(s, copy);
    if (kind == cudaMemcpyDeviceToHost && !simt_is_pinned(to)) {
        simt_run([=] { return s == nullptr || s->queue.empty(); });
    }
    return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t s = nullptr) {
    simt_enqueue(s, [=] { if (bytes > 0) { memset(p, value, bytes); } });
    return cudaSuccess;
}
inline cudaError_t cudaMemset(void* p, int value, size_t bytes) { return cudaMemsetAsync(p, value, bytes); }

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) {
    *s = new SimtStream();
    (*s)->blocking = (flags & cudaStreamNonBlocking) == 0;
    simt_streams.push_back(*s);
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithFlags(s, cudaStreamDefault); }
inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned flags, int priority) {
    cudaStreamCreateWithFlags(s, flags);
    (*s)->priority = priority;
    return cudaSuccess;
}
inline cudaError_t cudaStreamGetPriority(cudaStream_t s, int* priority) {
    *priority = s->priority;
    return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    if (s == nullptr) { simt_run_all(true); } else { simt_run([=] { return s->queue.empty(); }); }
    return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t s) {
    cudaStreamSynchronize(s);
    simt_streams.erase(std::find(simt_streams.begin(), simt_streams.end(), s));
    delete s;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() {
    simt_run_all(false);
    return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t* e) { *e = new SimtEvent(); return cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return cudaEventCreate(e); }
inline cudaError_t cudaEventDestroy(cudaEvent_t e) { delete e; return cudaSuccess; }
// A record takes this long by the events' own clock.
inline double simt_record_seconds = 0.0, simt_recorded_seconds = 0.0;
inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s = nullptr) {
    const auto stamp = [seconds = e->seconds] {
        *seconds = wall_seconds() + (simt_recorded_seconds += simt_record_seconds);
    };
    simt_enqueue(s, stamp);
    e->stream = s;
    e->position = s == nullptr ? 0 : s->given;
    return cudaSuccess;
}
// As the event is now: recorded again later, it is another one
inline cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned = 0) {
    const SimtEvent now = *e;
    if (s == nullptr) { simt_run([=] { return now.complete(); }); return cudaSuccess; }
    simt_give(s, [=] { return now.complete() ? SimtTurn::Done : SimtTurn::Waits; });
    return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    simt_run([=] { return e->complete(); });
    return cudaSuccess;
}
// Each query takes a few more turns.
inline cudaError_t cudaEventQuery(cudaEvent_t e) {
    int turns = 3;
    simt_run([&] { return e->complete() || turns-- == 0; });
    return e->complete() ? cudaSuccess : simt_error(cudaErrorNotReady);
}
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
    *ms = (float)(1000 * (*to->seconds - *from->seconds));
    return cudaSuccess;
}

// SIMT_GPUS of them, which are all alike
inline int simt_device = 0;
inline cudaError_t cudaGetDeviceCount(int* n) {
    *n = getenv("SIMT_GPUS") != nullptr ? atoi(getenv("SIMT_GPUS")) : 1;
    return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) { *device = simt_device; return cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) {
    int count;
    cudaGetDeviceCount(&count);
    if (device < 0 || device >= count) { return simt_error(cudaErrorInvalidValue); }
    simt_device = device;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceGetPCIBusId(char* id, int n, int device) {
    snprintf(id, (size_t)n, "0000:%02x:00.0", device);
    return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* v) { *v = 13000; return cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int* v) { *v = 13000; return cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    *p = {"simt (a CPU emulating CUDA)", simt_memory(), 1, 8, 0};
    return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr a, int) {
    switch (a) {
        case cudaDevAttrMultiProcessorCount: *value = 132; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)SIMT_MAX_SHARED; break;
        case cudaDevAttrComputeCapabilityMajor: *value = 8; break;
        case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
        default: *value = 1000000;      // kHz
    }
    return cudaSuccess;
}
