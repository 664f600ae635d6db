// simt_runtime.h -- the last part of simt.h: the runtime's calls. The device's memory is the host's, SIMT_MEMORY bytes
// of it; a stream can be captured into a graph.
#ifndef TEST_SIMT_RUNTIME_H
#define TEST_SIMT_RUNTIME_H

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901,
    cudaErrorStreamCaptureImplicit = 906,
    cudaErrorGraphExecUpdateFailure = 910
};
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaEventDefault = 0 };
enum cudaDeviceAttr {
    cudaDevAttrClockRate,
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrComputeCapabilityMinor,
    cudaDevAttrMemoryClockRate,
    cudaDevAttrGlobalMemoryBusWidth
};
struct SimtStream {};
using cudaStream_t = SimtStream*;
struct SimtEvent { double seconds; };
using cudaEvent_t = SimtEvent*;
struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
    int multiProcessorCount, major, minor, warpSize, maxThreadsPerBlock, maxThreadsPerMultiProcessor, l2CacheSize;
};

inline const char* cudaGetErrorString(cudaError_t e) {
    switch (e) {
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
        case cudaErrorStreamCaptureImplicit:
            return "operation would make the legacy stream depend on a capturing blocking stream";
        case cudaErrorGraphExecUpdateFailure:
            return "the graph update was not performed because it included changes which violated constraints";
        default: return "invalid argument";
    }
}
inline const char* cudaGetErrorName(cudaError_t e) { return cudaGetErrorString(e); }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaPeekAtLastError() { return cudaSuccess; }

// A stream's work is done at once or, while the stream is captured, recorded with its arguments. Then a call that would
// wait for the capturing stream, or allocate, is an error and spoils the capture; other streams do their work.
enum class SimtWork { Kernel, Copy, Set };
struct SimtGraph { std::vector<std::pair<SimtWork, std::function<void()>>> nodes; };
using cudaGraph_t = SimtGraph*;
using cudaGraphExec_t = SimtGraph*;
struct SimtCapture {
    cudaStream_t stream = nullptr;                                          // the one that is captured
    cudaGraph_t graph = nullptr;
    bool spoiled = false;
    // counts of all graphs so far
    int instantiated = 0;
    int updated = 0;
    int launched = 0;
};
inline SimtCapture simt_capture;
inline cudaError_t simt_waits() {
    if (simt_capture.stream == nullptr) { return cudaSuccess; }
    simt_capture.spoiled = true;
    return cudaErrorStreamCaptureUnsupported;
}
inline cudaError_t simt_enqueue(cudaStream_t stream, SimtWork kind, const std::function<void()>& work) {
    SimtCapture& c = simt_capture;
    if (c.stream != nullptr && stream == nullptr) { c.spoiled = true; return cudaErrorStreamCaptureImplicit; }
    if (c.stream == nullptr || stream != c.stream) { work(); return cudaSuccess; }
    if (c.spoiled) { return cudaErrorStreamCaptureInvalidated; }
    c.graph->nodes.push_back({kind, work});
    return cudaSuccess;
}
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal,
    cudaStreamCaptureModeThreadLocal,
    cudaStreamCaptureModeRelaxed
};
inline cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
    if (s == nullptr || simt_capture.stream != nullptr) { return cudaErrorStreamCaptureUnsupported; }
    simt_capture.stream = s;
    simt_capture.graph = new SimtGraph();
    simt_capture.spoiled = false;
    return cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* graph) {
    *graph = nullptr;
    if (s == nullptr || s != simt_capture.stream) { return cudaErrorInvalidValue; }
    simt_capture.stream = nullptr;
    if (simt_capture.spoiled) { delete simt_capture.graph; return cudaErrorStreamCaptureInvalidated; }
    *graph = simt_capture.graph;
    return cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
    simt_capture.instantiated++;
    *exec = new SimtGraph(*graph);
    return simt_waits();
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) { delete graph; return cudaSuccess; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { delete exec; return cudaSuccess; }
struct cudaGraphExecUpdateResultInfo { int result; const void *errorNode, *errorFromNode; };
// Nodes are in a row here: the topology is how many there are, and of what kind
inline cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph, cudaGraphExecUpdateResultInfo* why) {
    bool same = exec->nodes.size() == graph->nodes.size();
    for (size_t n = 0; same && n < graph->nodes.size(); n++) { same = exec->nodes[n].first == graph->nodes[n].first; }
    *why = {!same, nullptr, nullptr};
    if (!same) { return cudaErrorGraphExecUpdateFailure; }
    simt_capture.updated++;
    *exec = *graph;
    return cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t) {
    if (const cudaError_t e = simt_waits()) { return e; }                   // a graph of graphs: not here
    simt_capture.launched++;
    for (const auto& node : exec->nodes) { node.second(); }
    return cudaSuccess;
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
    if (const cudaError_t e = simt_waits()) { return e; }
    size_t available, total;
    cudaMemGetInfo(&available, &total);
    void* q = nullptr;
    if (bytes == 0) { return cudaSuccess; }
    if (bytes > available || posix_memalign(&q, 256, bytes) != 0) { return cudaErrorMemoryAllocation; }
    memset(q, 0xff, bytes);
    simt_allocations[q] = bytes;
    *p = (T*)q;
    return cudaSuccess;
}
inline cudaError_t cudaFree(void* p) {
    if (p == nullptr) { return cudaSuccess; }
    if (const cudaError_t e = simt_waits()) { return e; }
    if (simt_allocations.erase(p) == 0) { return cudaErrorInvalidValue; }
    free(p);
    return cudaSuccess;
}
template <class T> cudaError_t cudaMallocHost(T** p, size_t bytes) {
    *p = nullptr;
    if (const cudaError_t e = simt_waits()) { return e; }
    *p = (T*)malloc(bytes > 0 ? bytes : 1);
    return *p != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline cudaError_t cudaFreeHost(void* p) { free(p); return cudaSuccess; }
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t s = nullptr) {
    return simt_enqueue(s, SimtWork::Copy, [=] { if (bytes > 0) { memmove(to, from, bytes); } });
}
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t s = nullptr) {
    return simt_enqueue(s, SimtWork::Set, [=] { if (bytes > 0) { memset(p, value, bytes); } });
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, bytes, kind);
}
inline cudaError_t cudaMemset(void* p, int value, size_t bytes) { return cudaMemsetAsync(p, value, bytes); }

inline cudaError_t cudaStreamCreate(cudaStream_t* s) { *s = new SimtStream(); return cudaSuccess; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return cudaStreamCreate(s); }
inline cudaError_t cudaStreamDestroy(cudaStream_t s) { delete s; return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return simt_waits(); }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned = 0) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return simt_waits(); }
inline cudaError_t cudaEventCreate(cudaEvent_t* e) { *e = new SimtEvent(); return cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return cudaEventCreate(e); }
inline cudaError_t cudaEventDestroy(cudaEvent_t e) { delete e; return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t = nullptr) {
    e->seconds = wall_seconds();
    return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return simt_waits(); }
inline cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
    *ms = (float)(1000 * (to->seconds - from->seconds));
    return cudaSuccess;
}

inline cudaError_t cudaGetDeviceCount(int* n) { *n = 1; return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }
inline cudaError_t cudaDriverGetVersion(int* v) { *v = 13000; return cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int* v) { *v = 13000; return cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    *p = {"simt (a CPU emulating CUDA)",
          simt_memory(),
          48 << 10,
          SIMT_MAX_SHARED,
          228 << 10,
          1,
          8,
          0,
          32,
          1024,
          2048,
          1 << 20};
    return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr a, int) {
    switch (a) {
        case cudaDevAttrMultiProcessorCount: *value = 1; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)SIMT_MAX_SHARED; break;
        case cudaDevAttrComputeCapabilityMajor: *value = 8; break;
        case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
        case cudaDevAttrGlobalMemoryBusWidth: *value = 64; break;
        default: *value = 1000000;      // kHz
    }
    return cudaSuccess;
}

#endif
