// gpu_probes.cu -- small questions to a Hopper GPU whose answers the next kernels depend on. One JSON object per line.
// NOT ONE OF THEM HAS RUN: they were written after the PTX ISA, and compiled.
//
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -I. dev/gpu_probes.cu -ldl -o gpu_probes
//   gpu_probes [--kinds rate,tma] [--skip FILE]    each in a process of its own with 20 s   FILE: keys to leave out
//   gpu_probes --only KEY                          one
//
//   rate      clocks of an SM per instruction of a warp, beside what dev/sass_bound.py assumes
//   wgmma     one m64n64k16 for each layout that a descriptor names; A and B hold small integers, so all bits are known
//   tma       a box of a tensor, at its inside and past its edges, for each swizzle; a copy without a tensor
#include <cuda.h>
#include <dlfcn.h>
#include <functional>
#include <set>
#include <string>
#include <sys/wait.h>
#include <vector>

#include "gpu_probes.cuh"

struct Probe { std::string key; std::function<std::string()> run; };       // run: fields of the JSON object

// ----------------------------------------------------------------------------------------------------------
// TMA: a box of rows x columns from a tensor (ROWS,COLUMNS) in global memory

constexpr int TMA_ROWS = 200, TMA_COLUMNS = 136;
constexpr int TMA_BOX = 64;

// Waits for phase 0 of a barrier, but not forever; true when it has come
__device__ inline bool barrier_wait(uint32_t barrier) {
    for (int tries = 0; tries < 1 << 20; tries++) {
        uint32_t done = 0;
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n"
                     "selp.u32 %0, 1, 0, p;\n}\n" : "=r"(done) : "r"(barrier) : "memory");
        if (done != 0) { return true; }
    }
    return false;
}
__device__ inline void barrier_begin(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

// One warp. out (bytes) is the box as it lies in shared memory; status: 0, or 1 if it has not arrived
__global__ void tma_kernel(bf16* out, int* status, const __grid_constant__ CUtensorMap map, int x, int y, int bytes) {
    extern __shared__ __align__(1024) char probe_memory[];
    __shared__ alignas(8) uint64_t barrier;
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(probe_memory);
    const uint32_t gate = (uint32_t)__cvta_generic_to_shared(&barrier);
    for (int i = threadIdx.x; i < bytes / 2; i += 32) { ((bf16*)probe_memory)[i] = (bf16)-1.0f; }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (threadIdx.x == 0) {
        barrier_begin(gate, bytes);
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
                     "[%1, {%2, %3}], [%4];" :: "r"(at), "l"(&map), "r"(x), "r"(y), "r"(gate) : "memory");
    }
    __syncwarp();
    const bool arrived = barrier_wait(gate);
    if (threadIdx.x == 0) { *status = arrived ? 0 : 1; }
    for (int i = threadIdx.x; i < bytes / 2; i += 32) { out[i] = ((bf16*)probe_memory)[i]; }
}
// the same without a tensor: `bytes` neighbouring bytes
__global__ void bulk_kernel(bf16* out, int* status, const bf16* from, int bytes) {
    extern __shared__ __align__(1024) char probe_memory[];
    __shared__ alignas(8) uint64_t barrier;
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(probe_memory);
    const uint32_t gate = (uint32_t)__cvta_generic_to_shared(&barrier);
    if (threadIdx.x == 0) {
        barrier_begin(gate, bytes);
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :: "r"(at), "l"(from), "r"(bytes), "r"(gate) : "memory");
    }
    __syncwarp();
    const bool arrived = barrier_wait(gate);
    if (threadIdx.x == 0) { *status = arrived ? 0 : 1; }
    for (int i = threadIdx.x; i < bytes / 2; i += 32) { out[i] = ((bf16*)probe_memory)[i]; }
}

struct TmaBuffers {
    bf16* tensor = (bf16*)device_malloc(TMA_ROWS * TMA_COLUMNS * sizeof(bf16));
    bf16* out = (bf16*)device_malloc(TMA_BOX * TMA_BOX * sizeof(bf16));
    int* status = (int*)device_malloc(sizeof(int));
    std::vector<float> values;

    TmaBuffers() {
        std::vector<bf16> rounded;
        for (int i = 0; i < TMA_ROWS * TMA_COLUMNS; i++) {
            values.push_back((float)(i / TMA_COLUMNS * 3 % 251 + 256 * (i % TMA_COLUMNS % 3) % 199));
            rounded.push_back((bf16)values.back());
            values.back() = (float)rounded.back();
        }
        CUDA_CHECK(cudaMemcpy(tensor, rounded.data(), rounded.size() * sizeof(bf16), cudaMemcpyHostToDevice));
    }
    // compares `count` elements of out with expected(i)
    template <class F> std::string compare(size_t count, F expected) {
        CUDA_CHECK(cudaGetLastError());
        int late = 0;
        std::vector<bf16> found(count);
        CUDA_CHECK(cudaMemcpy(&late, status, sizeof(int), cudaMemcpyDeviceToHost));
        CUDA_CHECK(cudaMemcpy(found.data(), out, count * sizeof(bf16), cudaMemcpyDeviceToHost));
        if (late != 0) { return "\"ok\": false, \"error\": \"the copy has not arrived\""; }
        for (size_t i = 0; i < count; i++) {
            if ((float)found[i] != expected(i)) {
                return strprintf("\"ok\": false, \"error\": \"element %zu in shared memory: expected %g, got %g\"", i,
                                 expected(i), (float)found[i]);
            }
        }
        return "\"ok\": true";
    }
};

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// swizzle: bytes of a row of the box, 0 for rows of 128 that are not swizzled; (x, y): the box's first column and row
std::string tma_of(int swizzle, int x, int y) {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW);
    EncodeTiled encode = driver == nullptr ? nullptr : (EncodeTiled)dlsym(driver, "cuTensorMapEncodeTiled");
    if (encode == nullptr) { return "\"ok\": false, \"error\": \"the driver has no cuTensorMapEncodeTiled\""; }
    TmaBuffers buffers;
    const int row = swizzle == 0 ? 128 : swizzle;           // bytes
    const cuuint64_t sizes[2] = {TMA_COLUMNS, TMA_ROWS};
    const cuuint64_t strides[1] = {TMA_COLUMNS * sizeof(bf16)};
    const cuuint32_t box[2] = {(cuuint32_t)row / 2, TMA_BOX};
    const cuuint32_t steps[2] = {1, 1};
    CUtensorMapSwizzle mode = CU_TENSOR_MAP_SWIZZLE_NONE;
    if (swizzle == 32) { mode = CU_TENSOR_MAP_SWIZZLE_32B; }
    if (swizzle == 64) { mode = CU_TENSOR_MAP_SWIZZLE_64B; }
    if (swizzle == 128) { mode = CU_TENSOR_MAP_SWIZZLE_128B; }
    alignas(64) CUtensorMap map;
    const CUresult code = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, buffers.tensor, sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, mode, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (code != CUDA_SUCCESS) { return strprintf("\"ok\": false, \"error\": \"encoding the map: %d\"", (int)code); }
    const int bytes = row * TMA_BOX;
    tma_kernel<<<1, 32, TMA_BOX * 128>>>(buffers.out, buffers.status, map, x, y, bytes);
    return buffers.compare((size_t)bytes / 2, [&](size_t i) {
        const int stored = 2 * (int)i;
        const int at = swizzle == 0 ? stored : stored ^ (stored >> 3 & (swizzle / 16 - 1) * 16);    // its own inverse
        const int column = x + at % row / 2;
        const int line = y + at / row;
        const bool inside = column >= 0 && column < TMA_COLUMNS && line >= 0 && line < TMA_ROWS;
        return inside ? buffers.values[(size_t)line * TMA_COLUMNS + column] : 0.0f;     // outside it is 0
    });
}
std::string bulk_of(int elements) {
    TmaBuffers buffers;
    bulk_kernel<<<1, 32, TMA_BOX * 128>>>(buffers.out, buffers.status, buffers.tensor + 8, 2 * elements);
    return buffers.compare((size_t)elements, [&](size_t i) { return buffers.values[i + 8]; });
}

// ----------------------------------------------------------------------------------------------------------
// all probes

template <int N> void add_rates(std::vector<Probe>& probes) {
    if constexpr (N < (int)(sizeof(RATES) / sizeof(RATES[0]))) {
        constexpr RateRow row = RATES[N];
        probes.push_back({std::string("rate ") + row.name, [row] { return rate_of<row.rate>(row.clocks); }});
        add_rates<N + 1>(probes);
    }
}
std::vector<Probe> all_probes() {
    std::vector<Probe> probes;
    add_rates<0>(probes);
    const WgLayout usual = {128, true};
    for (int swizzle : {0, 32, 64, 128}) {
        const std::string bytes = std::to_string(swizzle);
        const WgLayout k = {swizzle, true}, mn = {swizzle, false};
        probes.push_back({"wgmma A K-major " + bytes, [=] { return wgmma_of<false, 0, 0>(k, usual); }});
        probes.push_back({"wgmma A M-major " + bytes, [=] { return wgmma_of<false, 1, 0>(mn, usual); }});
        probes.push_back({"wgmma B K-major " + bytes, [=] { return wgmma_of<true, 0, 0>(usual, k); }});
        probes.push_back({"wgmma B N-major " + bytes, [=] { return wgmma_of<true, 0, 1>(usual, mn); }});
        probes.push_back({"tma swizzle " + bytes + " inside", [=] { return tma_of(swizzle, 8, 24); }});
        probes.push_back({"tma swizzle " + bytes + " past the end", [=] { return tma_of(swizzle, 120, 170); }});
        probes.push_back({"tma swizzle " + bytes + " before the start", [=] { return tma_of(swizzle, -8, -5); }});
    }
    probes.push_back({"tma without a tensor", [] { return bulk_of(2048); }});
    return probes;
}

// in a process of its own: an address that is wrong, or a copy that never comes, ends that one only
void run_apart(const char* program, const std::string& key) {
    FILE* f = popen(strprintf("timeout 20 '%s' --only '%s' 2>&1", program, key.c_str()).c_str(), "r");
    std::string last;
    for (char line[4096]; f != nullptr && fgets(line, sizeof(line), f) != nullptr;) { last = line; }
    const int status = f == nullptr ? -1 : pclose(f);
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;         // 124: it took too long
    if (code == 0) { printf("%s", last.c_str()); }
    else {
        for (char& c : last) { c = c == '"' || c == '\\' || c == '\n' ? ' ' : c; }
        printf("{\"key\": \"%s\", \"ok\": false, \"error\": \"exit code %d: %s\"}\n", key.c_str(), code, last.c_str());
    }
    fflush(stdout);
}

int main(int argc, char** argv) {
    std::set<std::string> skip;
    std::string only, kinds = "rate,wgmma,tma";
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--kinds") == 0) { kinds = argv[i + 1]; }
        if (strcmp(argv[i], "--only") == 0) { only = argv[i + 1]; }
        FILE* f = strcmp(argv[i], "--skip") == 0 ? fopen(argv[i + 1], "r") : nullptr;
        for (char line[512]; f != nullptr && fgets(line, sizeof(line), f) != nullptr;) {
            line[strcspn(line, "\n")] = '\0';
            skip.insert(line);
        }
        if (f != nullptr) { fclose(f); }
    }
    try {
        for (const Probe& probe : all_probes()) {
            const bool wanted = kinds.find(probe.key.substr(0, probe.key.find(' '))) != std::string::npos;
            if (only.empty() && wanted && skip.count(probe.key) == 0) { run_apart(argv[0], probe.key); }
            if (only == probe.key) { printf("{\"key\": \"%s\", %s}\n", only.c_str(), probe.run().c_str()); }
        }
    } catch (const std::exception& e) {
        fprintf(stderr, "gpu_probes: %s\n", e.what());
        return 1;
    }
    return 0;
}
