// gpu_probes.cu -- the rates of a Hopper GPU's instructions: clocks of an SM per instruction of a warp, beside what
// dev/sass_bound.py assumes. One JSON object per line. NONE OF THIS HAS RUN: it was only compiled.
//
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -I. dev/gpu_probes.cu -o gpu_probes
//   gpu_probes [--skip FILE]                       FILE: keys to leave out
//
// 32 warps on each SM repeat one instruction; the clocks from the first warp's start to the last one's end are counted.
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "llmc/base/ptx.cuh"

constexpr int RATE_WARPS = 32;
constexpr int RATE_LOOPS = 64;
constexpr int RATE_EACH = 16;               // instructions of a loop, independent of each other
constexpr int RATE_SHARED = 16384;          // bytes

enum class Rate { Mma, Ldmatrix, Lds32, Lds64Quad, Lds128Quad, Lds128, Sts128, Shuffle, Ex2, Ffma, Imad, Logic, Fmax,
                  Pack };
struct RateRow { Rate rate; const char* name; float clocks; };
// clocks: what dev/sass_bound.py counts (its test compares). Quad: lanes with the same lane % 4 read the same words; it
// has one wavefront per 4 bytes of width there, and hardware may merge them.
constexpr RateRow RATES[] = {
    {Rate::Mma, "HMMA.16816.F32.BF16", 1.6f}, {Rate::Ldmatrix, "LDSM.16.M88.4", 4.0f}, {Rate::Lds32, "LDS", 1.0f},
    {Rate::Lds64Quad, "LDS.64 quad", 2.0f},   {Rate::Lds128Quad, "LDS.128 quad", 4.0f}, {Rate::Lds128, "LDS.128", 4.0f},
    {Rate::Sts128, "STS.128", 4.0f},          {Rate::Shuffle, "SHFL.BFLY", 1.0f},       {Rate::Ex2, "MUFU.EX2", 2.0f},
    {Rate::Ffma, "FFMA", 0.25f},              {Rate::Imad, "IMAD", 0.5f},               {Rate::Logic, "LOP3.LUT", 0.5f},
    {Rate::Fmax, "FMNMX", 0.5f},              {Rate::Pack, "F2FP.BF16.F32.PACK_AB", 0.5f}};

// One instruction on x (a value of chain e) and shared memory from `at` on
template <Rate R> __device__ inline void rate_step(float& x, float (&sum)[4], uint32_t at, uint32_t (&a)[4]) {
    uint32_t bits = __float_as_uint(x);
    uint32_t v[4] = {};                     // what is loaded, always 0: the next address depends on it, or else ptxas
    const uint32_t next = at + bits;        // would do each load once and be done
    if (R == Rate::Mma) { mma_m16n8k16(sum, a, a[0], a[1]); }
    if (R == Rate::Ldmatrix) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(next));
    }
    if (R == Rate::Lds32) { asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v[0]) : "r"(next)); }
    if (R == Rate::Lds64Quad) {
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(next));
    }
    if (R == Rate::Lds128Quad || R == Rate::Lds128) {
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(next));
    }
    bits ^= v[0] ^ v[1] ^ v[2] ^ v[3];
    if (R == Rate::Sts128) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" :: "r"(at), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
    }
    if (R == Rate::Shuffle) { asm volatile("shfl.sync.bfly.b32 %0, %0, 1, 31, -1;" : "+r"(bits)); }
    if (R == Rate::Ex2) { asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x)); }
    if (R == Rate::Ffma) { asm volatile("fma.rn.ftz.f32 %0, %0, %1, %2;" : "+f"(x) : "f"(sum[0]), "f"(sum[1])); }
    if (R == Rate::Imad) { asm volatile("mad.lo.s32 %0, %0, %1, %2;" : "+r"(bits) : "r"(a[0]), "r"(a[1])); }
    if (R == Rate::Logic) { asm volatile("lop3.b32 %0, %0, %1, %2, 0xe8;" : "+r"(bits) : "r"(a[0]), "r"(a[1])); }
    if (R == Rate::Fmax) { asm volatile("max.ftz.f32 %0, %0, %1;" : "+f"(x) : "f"(sum[0])); }
    if (R == Rate::Pack) { asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(x), "f"(sum[0])); }
    if (R != Rate::Ex2 && R != Rate::Ffma && R != Rate::Fmax) { x = __uint_as_float(bits); }
}

// where a lane's access begins, in bytes
__device__ inline uint32_t rate_offset(Rate rate, int lane) {
    if (rate == Rate::Lds32) { return lane * 4; }
    if (rate == Rate::Lds64Quad) { return lane % 4 * 8; }
    if (rate == Rate::Lds128Quad) { return lane % 4 * 16; }
    return lane * 16;                       // 512 neighbouring bytes: no bank conflict
}

template <Rate R>
__global__ void __launch_bounds__(32 * RATE_WARPS) rate_kernel(unsigned long long* clocks, float* sink, float zero) {
    __shared__ alignas(128) char memory[RATE_SHARED];
    __shared__ unsigned long long first;
    __shared__ unsigned long long last;
    for (int i = threadIdx.x; i < RATE_SHARED / 4; i += blockDim.x) { ((float*)memory)[i] = 0.0f; }
    if (threadIdx.x == 0) {
        first = ~0ull;
        last = 0;
    }
    float x[RATE_EACH];
    float sum[RATE_EACH / 2][4] = {};
    uint32_t a[4] = {threadIdx.x, 0, 0, 0};
    for (int e = 0; e < RATE_EACH; e++) { x[e] = R == Rate::Shuffle ? (float)threadIdx.x : zero; }
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(memory) + rate_offset(R, threadIdx.x % 32);
    __syncthreads();
    const unsigned long long begin = clock64();
    for (int loop = 0; loop < RATE_LOOPS; loop++) {
        UNROLL
        for (int e = 0; e < RATE_EACH; e++) { rate_step<R>(x[e], sum[e % (RATE_EACH / 2)], at + e % 8 * 512, a); }
    }
    const unsigned long long end = clock64();
    atomicMin(&first, begin);
    atomicMax(&last, end);
    __syncthreads();
    if (threadIdx.x == 0) { clocks[blockIdx.x] = last - first; }
    float all = (float)(a[0] + a[1] + a[2] + a[3]);         // keeps what was computed
    for (int e = 0; e < RATE_EACH; e++) { all += x[e] + sum[e / 2][e % 4]; }
    if (all == 12345.0f) { sink[0] = all; }
}

template <Rate R> double rate_of() {
    int sms = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    unsigned long long* clocks = (unsigned long long*)device_malloc((size_t)sms * sizeof(unsigned long long));
    float* sink = (float*)device_malloc(sizeof(float));
    std::vector<unsigned long long> found((size_t)sms);
    double least = 1e30;
    for (int k = 0; k < 5; k++) {                           // the first ones warm up
        rate_kernel<R><<<sms, 32 * RATE_WARPS>>>(clocks, sink, 0.0f);
        CUDA_CHECK(cudaMemcpy(found.data(), clocks, found.size() * sizeof(found[0]), cudaMemcpyDeviceToHost));
        for (unsigned long long c : found) { least = std::min(least, (double)c); }
    }
    return least / ((double)RATE_WARPS * RATE_LOOPS * RATE_EACH);
}

// All rates from the N-th row on
template <int N> void print_rates(const std::set<std::string>& skip) {
    if constexpr (N < (int)(sizeof(RATES) / sizeof(RATES[0]))) {
        constexpr RateRow row = RATES[N];
        const std::string key = std::string("rate ") + row.name;
        if (skip.count(key) == 0) {
            printf("{\"key\": \"%s\", \"ok\": true, \"clocks\": %.3f, \"assumed\": %.3f}\n", key.c_str(),
                   rate_of<row.rate>(), row.clocks);
            fflush(stdout);
        }
        print_rates<N + 1>(skip);
    }
}

int main(int argc, char** argv) {
    std::set<std::string> skip;
    std::ifstream file(argc == 3 && strcmp(argv[1], "--skip") == 0 ? argv[2] : "");
    for (std::string line; std::getline(file, line);) { skip.insert(line); }
    try {
        print_rates<0>(skip);
    } catch (const std::exception& e) {
        fprintf(stderr, "gpu_probes: %s\n", e.what());
        return 1;
    }
    return 0;
}
