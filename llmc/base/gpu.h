// base/gpu.h -- the GPU: what it is, how fast it can be, how much of that a model uses (MFU), why there is none.
//
// Peak = SMs x clock x floating-point operations per SM and clock. The driver knows the first two; a table here has the
// third for each compute capability: dense products (no 2:4 sparsity) with float32 sums, an FMA counted as 2.
#pragma once

#include <cmath>

#include "ptx.cuh"

struct Gpu {
    std::string name;
    int major = 0, minor = 0;           // compute capability
    int sms = 0;
    int khz = 0;                        // the highest clock that the driver allows
    size_t memory = 0;                  // bytes
    double bandwidth = 0;               // of the memory, bytes a second, by its clock and width
    int driver = 0;                     // the newest CUDA version that the driver supports: 12040 for 12.4
    int runtime = 0;                    // the CUDA version of this build
    bool wgmma = true;                  // whether the code for it uses wgmma
};

// Operations per SM and clock. A GeForce board's tensor cores sum in float32 at half the speed of the same chip on
// other boards. tensor_khz: the clock behind the published bf16 peak, for boards that cannot hold their highest clock
// while the tensor cores are busy; 0: the highest clock. A GPU whose highest clock is lower still has a lower peak.
struct GpuRates {
    int major, minor;                           // compute capability
    int bf16, bf16_geforce, fp32, tensor_khz;
};
constexpr GpuRates GPU_RATES[] = {              // no figure was found for 8.7, 10.3, 11.0, 12.1
    {8,  0,  2048, 2048, 128, 0},               // A100, A30
    {8,  6,  1024, 512,  256, 0},               // A10, A40, RTX A6000; GeForce RTX 30
    {8,  9,  1024, 512,  256, 0},               // L4, L40S, RTX 6000 Ada; GeForce RTX 40
    {9,  0,  4096, 4096, 256, 1830000},         // H100, H200
    {10, 0,  8192, 8192, 256, 1850000},         // B200
    {12, 0,  1024, 512,  256, 0},               // RTX PRO 6000 Blackwell; GeForce RTX 50
};

// FLOP/s of dense products with float32 sums, of bf16 or float32 (not TF32) numbers; NAN when unknown
inline double peak_flops(const Gpu& gpu, bool bf16) {
    // an H20's tensor cores are an H100's, slowed down
    if (gpu.name.find("H20") != std::string::npos && gpu.name.find("H200") == std::string::npos) { return NAN; }
    for (const GpuRates& r : GPU_RATES) {
        if (r.major != gpu.major || r.minor != gpu.minor || gpu.sms <= 0 || gpu.khz <= 0) { continue; }
        const bool geforce = gpu.name.find("GeForce") != std::string::npos;
        const int khz = bf16 && r.tensor_khz > 0 ? imin(r.tensor_khz, gpu.khz) : gpu.khz;
        const int bf16_rate = geforce ? r.bf16_geforce : r.bf16;
        return 1e3 * khz * gpu.sms * (bf16 ? bf16_rate : r.fp32);
    }
    return NAN;
}

// How many of T keys a query sees on average. Causal: its own key and the earlier keys, else all; with a window of W
// only keys closer than W, and the sinks. Documents are ignored, because they depend on the data.
inline double keys_per_query(int T, bool causal, int window, int sinks) {
    double seen = 0;
    for (int64_t i = 0; i < T; i++) {
        const int64_t reach = window > 0 ? window : T;
        const int64_t first = std::max<int64_t>(0, i - reach + 1);
        const int64_t last = causal ? i : std::min<int64_t>(T - 1, i + reach - 1);
        const int64_t sinks_before = std::min<int64_t>(sinks, first);
        const int64_t sinks_after = causal ? 0 : std::max<int64_t>(0, std::min(sinks, T) - 1 - last);
        seen += (double)(last - first + 1 + sinks_before + sinks_after);
    }
    return seen / T;
}

// FLOPs of training on one token, recomputation not counted: Chowdhery et al. 2022 (PaLM), appendix B, but with the
// keys that are seen instead of all. matmul_weights: how many weights multiply a token's vector (the tied embedding
// once, as the head; lookup tables not at all), each in one FMA of the forward and two of the backward. Attention has
// two products of C numbers for each key seen, and the backward twice as many: 12 C FLOPs per key and layer.
inline double flops_per_token(double matmul_weights, int L, int C, double keys) {
    return 6.0 * matmul_weights + 12.0 * L * C * keys;
}

inline std::string cuda_version(int v) { return strprintf("%d.%d", v / 1000, v % 1000 / 10); }
inline std::string gpu_text(const Gpu& g) {
    auto tera = [](double x) { return std::isnan(x) ? std::string("n/a") : strprintf("%.0f", x / 1e12); };
    const std::string bf16 = tera(peak_flops(g, true));
    const std::string fp32 = tera(peak_flops(g, false));
    const char* slow = g.major == 9 && !g.wgmma ? "; attention without wgmma: make train_gpt2cu ARCH=sm_90a" : "";
    return strprintf("%s, sm_%d%d, %d SMs at %.2f GHz, %s at %.2f TB/s, peak %s bf16 and %s float32 TFLOP/s, CUDA %s, "
                     "driver for %s%s", g.name.c_str(), g.major, g.minor, g.sms, 1e-6 * g.khz,
                     format_bytes((double)g.memory).c_str(), 1e-12 * g.bandwidth, bf16.c_str(), fp32.c_str(),
                     cuda_version(g.runtime).c_str(), cuda_version(g.driver).c_str(), slow);
}

// ----------------------------------------------------------------------------------------------------------
// why a GPU cannot be used

// The ARCH of this GPU for `make`. From 9.0 on, some instructions exist only in the "a" architectures.
inline std::string gpu_arch(const Gpu& g) { return strprintf("sm_%d%d%s", g.major, g.minor, g.major >= 9 ? "a" : ""); }

// Whether the driver has to compile the binary's PTX for this GPU. built_for: its architectures as nvcc lists them:
// "800,900"
inline bool gpu_compiles(const Gpu& g, const char* built_for) {
    int newest = 0;
    for (const char* p = built_for; *p != '\0'; p += strcspn(p, ","), p += *p == ',') {
        newest = imax(newest, atoi(p) / 100);
    }
    return g.major > newest;
}

// g: what is known of the GPU so far; words: CUDA's error
[[noreturn]] inline void die_of_gpu(const Gpu& g, const char* words) {
    std::string help = "nvidia-smi should list one, CUDA_VISIBLE_DEVICES not hide it, a container have --gpus all";
    if (g.major >= 8) { help = "another process may hold it: nvidia-smi; or make train_gpt2cu ARCH=" + gpu_arch(g); }
    const bool old_driver = 0 < g.driver && g.driver < g.runtime;
    if (old_driver) { help += "; the driver may be too old: update it, or build with its CUDA: make NVCC=path"; }
    const char* failure = g.major >= 8 ? "cannot use the GPU" : "expected a GPU of compute capability 8.0 or newer";
    const std::string got = g.major == 0 ? "none" : strprintf("%s of %d.%d", g.name.c_str(), g.major, g.minor);
    const std::string driver = g.driver == 0 ? "no driver" : "driver for " + cuda_version(g.driver);
    die(EXIT_DEVICE, "%s, got %s (%s; CUDA %s, %s): %s; ./train_gpt2 runs without a GPU", failure, got.c_str(), words,
        cuda_version(g.runtime).c_str(), driver.c_str(), help.c_str());
}

#if defined(__CUDACC__)
#define GPU_TEXT(...) #__VA_ARGS__
#define GPU_TEXT_OF(...) GPU_TEXT(__VA_ARGS__)          // its argument expanded first

// Any kernel would do: all have the same architectures
__global__ void gpu_probe_kernel(int* out) {
    if (out != nullptr) { *out = 1; }
}

// The GPU of this process; dies with a hint if it cannot be used. This must be the first call to the device.
inline Gpu find_gpu(int device = 0) {
    Gpu g;
    auto must = [&](cudaError_t e) { if (e != cudaSuccess) { die_of_gpu(g, cudaGetErrorString(e)); } };
    must(cudaRuntimeGetVersion(&g.runtime));
    must(cudaDriverGetVersion(&g.driver));
    int count = 0;
    must(cudaGetDeviceCount(&count));
    must(device < count ? cudaSuccess : cudaErrorNoDevice);
    cudaDeviceProp properties;
    must(cudaGetDeviceProperties(&properties, device));
    g.name = properties.name;
    g.memory = properties.totalGlobalMem;
    must(cudaDeviceGetAttribute(&g.major, cudaDevAttrComputeCapabilityMajor, device));
    must(cudaDeviceGetAttribute(&g.minor, cudaDevAttrComputeCapabilityMinor, device));
    must(cudaDeviceGetAttribute(&g.sms, cudaDevAttrMultiProcessorCount, device));
    must(cudaDeviceGetAttribute(&g.khz, cudaDevAttrClockRate, device));
    int memory_khz = 0, bits = 0;
    must(cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, device));
    must(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device));
    g.bandwidth = 2e3 * memory_khz * bits / 8;                      // two transfers a clock
    must(cudaSetDevice(device));
    if (gpu_compiles(g, GPU_TEXT_OF(__CUDA_ARCH_LIST__)) && device == 0) {
        fprintf(stderr, "notice: this binary has no code for %s: the driver compiles its kernels now, which takes "
                "minutes at the first start; make train_gpt2cu ARCH=%s does it beforehand\n", g.name.c_str(),
                gpu_arch(g).c_str());
    }
    must(cudaFree(nullptr));                                        // makes the context
    cudaFuncAttributes attributes;
    must(cudaFuncGetAttributes(&attributes, gpu_probe_kernel));     // fails if no code was compiled for this GPU
    g.wgmma = runs_wgmma();
    return g;
}
inline std::string gpu_report(const Gpu& g) { return gpu_text(g); }
#else
inline Gpu find_gpu(int device = 0) {
    use_device(device);
    return Gpu();
}
inline std::string gpu_report(const Gpu&) { return device_description(); }
#endif
