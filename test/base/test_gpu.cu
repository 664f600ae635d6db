// test_gpu.cu -- peaks against the published ones, the work of a token against a count, and the message if there is
// no GPU.
#include "test/catch.h"

#include "llmc/base/gpu.h"

namespace {

Gpu gpu(const char* name, int major, int minor, int sms, double mhz) {
    Gpu g;
    g.name = name;
    g.major = major;
    g.minor = minor;
    g.sms = sms;
    g.khz = (int)(1000 * mhz);
    g.memory = (size_t)80e9;
    g.bandwidth = 3.352e12;
    g.driver = 12080;
    g.runtime = 13000;
    return g;
}

// Products of a forward and a backward, counted one by one: an FMA is two operations.
double counted_flops(int L, int C, int T, int V, int OC, bool causal) {
    double flops = 0;
    auto product = [&](double rows, double in, double out, int times) { flops += 2 * rows * in * out * times; };
    for (int l = 0; l < L; l++) {
        // qkv and the projection: out, dinp, dweight
        for (int width : {OC, C}) { product(T, C, width, 3); }
        product(T, C, 4 * C, 3);
        product(T, 4 * C, C, 3);
        for (int i = 0; i < T; i++) {
            const double keys = causal ? i + 1 : T;
            product(1, C, keys, 3);                                             // scores; dq, dk
            product(1, keys, C, 3);                                             // their values; dP, dv
        }
    }
    product(T, C, V, 3);
    return flops;
}

} // namespace

TEST_CASE("gpu: the peaks are the published ones", "[gpu]") {
    // SMs and clocks are the boards'; the peaks NVIDIA's, dense, with float32 sums, in TFLOP/s
    struct { const char* name; int major, minor, sms; double mhz, bf16, fp32, within; } boards[] = {
        {"NVIDIA A100-SXM4-80GB",         8,  0, 108, 1410, 312,   19.5, 0.005},
        {"NVIDIA A10",                    8,  6, 72,  1695, 125,   31.2, 0.005},
        {"NVIDIA A40",                    8,  6, 84,  1740, 149.7, 37.4, 0.005},
        {"NVIDIA GeForce RTX 3090",       8,  6, 82,  1695, 71,    35.6, 0.005},
        {"NVIDIA GeForce RTX 4090",       8,  9, 128, 2520, 165.2, 82.6, 0.005},
        {"NVIDIA L4",                     8,  9, 58,  2040, 121,   30.3, 0.005},
        {"NVIDIA H100 80GB HBM3",         9,  0, 132, 1980, 989,   66.9, 0.005},
        {"NVIDIA H200",                   9,  0, 132, 1980, 989,   66.9, 0.005},
        {"NVIDIA B200",                   10, 0, 148, 1965, 2250,  75,   0.01},
        {"NVIDIA GeForce RTX 5090",       12, 0, 170, 2407, 209.5, 104.8, 0.005},
        {"NVIDIA RTX PRO 6000 Blackwell", 12, 0, 188, 2617, 503.8, 126,  0.005},
    };
    for (const auto& b : boards) {
        const Gpu g = gpu(b.name, b.major, b.minor, b.sms, b.mhz);
        INFO(b.name << ": " << peak_flops(g, true) / 1e12 << " and " << peak_flops(g, false) / 1e12);
        CHECK(std::fabs(peak_flops(g, true) / 1e12 - b.bf16) <= b.within * b.bf16);
        CHECK(std::fabs(peak_flops(g, false) / 1e12 - b.fp32) <= b.within * b.fp32);
    }
    // half the SMs, as a slice of a GPU has them; a clock that was set lower
    const double whole = peak_flops(gpu("NVIDIA H100", 9, 0, 132, 1980), true);
    CHECK(peak_flops(gpu("NVIDIA H100", 9, 0, 66, 1980), true) == whole / 2);
    CHECK(peak_flops(gpu("NVIDIA H100", 9, 0, 132, 915), true) == Approx(989.43e12 / 2).epsilon(1e-4));
}

TEST_CASE("gpu: an unknown GPU has no peak and no MFU", "[gpu]") {
    CHECK(std::isnan(peak_flops(gpu("NVIDIA Future", 13, 0, 200, 2000), true)));
    // of the H100's capability, not of its speed
    CHECK(std::isnan(peak_flops(gpu("NVIDIA H20", 9, 0, 78, 1980), true)));
    CHECK(std::isnan(peak_flops(gpu("Tesla V100-SXM2-16GB", 7, 0, 80, 1530), false)));
    CHECK(std::isnan(peak_flops(gpu("NVIDIA H100", 9, 0, 132, 0), true)));             // a driver that tells no clock
    CHECK(std::isnan(peak_flops(Gpu(), true)));
}

TEST_CASE("gpu: the work of a token is what a step counts", "[gpu]") {
    for (bool causal : {true, false}) {
        for (int T : {1, 2, 64, 257}) {
            const int L = 3, C = 48;
            const int V = 101, OC = 3 * C + 8;
            const double weights = (double)V * C + L * ((double)OC * C + 9.0 * C * C);
            const double counted = counted_flops(L, C, T, V, OC, causal);
            const double keys = keys_per_query(T, causal, 0, 0);
            CHECK(T * flops_per_token(weights, L, C, keys) == Approx(counted).epsilon(1e-12));
        }
    }
    // GPT-2 124M at 1024 tokens: 6 x 123.5M weights and 12 x 12 x 768 x 512.5
    CHECK(flops_per_token(123.53e6, 12, 768, 512.5) == Approx(797.86e6).epsilon(1e-4));
}

TEST_CASE("gpu: keys outside the window are no work", "[gpu]") {
    for (bool causal : {true, false}) {
        for (int T : {1, 2, 9, 64}) {
            for (int window : {0, 1, 3, 8, 9, 200, 1 << 30}) {
                for (int sinks : {0, 1, 4, 70}) {
                    if (sinks > 0 && window == 0) { continue; }
                    INFO(T << " tokens, window " << window << "+" << sinks << (causal ? ", causal" : ""));
                    double seen = 0;
                    for (int i = 0; i < T; i++) {
                        for (int j = 0; j < (causal ? i + 1 : T); j++) {
                            seen += window == 0 || std::abs(i - j) < window || j < sinks;
                        }
                    }
                    CHECK(keys_per_query(T, causal, window, sinks) == Approx(seen / T).epsilon(1e-12));
                }
            }
        }
    }
}

TEST_CASE("gpu: its line", "[gpu]") {
    CHECK(gpu_text(gpu("NVIDIA H200", 9, 0, 132, 1980)) ==
          "NVIDIA H200, sm_90, 132 SMs at 1.98 GHz, 80.0 GB at 3.35 TB/s, peak 989 bf16 and 67 float32 TFLOP/s, "
          "CUDA 13.0, driver for 12.8");
    CHECK(gpu_text(gpu("NVIDIA Future", 13, 1, 200, 2000)) ==
          "NVIDIA Future, sm_131, 200 SMs at 2.00 GHz, 80.0 GB at 3.35 TB/s, peak n/a bf16 and n/a float32 TFLOP/s, "
          "CUDA 13.0, driver for 12.8");
    for (int major : {8, 9, 10}) {                          // what only a Hopper has is missed on a Hopper only
        Gpu g = gpu("NVIDIA Test", major, 0, 132, 1980);
        g.wgmma = false;
        const std::string line = gpu_text(g), slow = "; attention without wgmma: make train_gpt2cu ARCH=sm_90a";
        CHECK((line.find(slow) != std::string::npos) == (major == 9));
    }
#if !defined(CUDA_BUILD)
    CHECK(gpu_report(find_gpu()) == device_description());
    CHECK(std::isnan(peak_flops(find_gpu(), true)));
#endif
}

TEST_CASE("gpu: which start compiles all kernels", "[gpu]") {
    const struct { int major, minor; const char* built_for; bool compiles; } starts[] = {
        {8, 0, "800,900", false}, {8, 9, "800,900", false}, {9, 0, "800,900", false}, {12, 0, "1200", false},
        {9, 0, "1000", false},                              // too old for it: it cannot be used
        {10, 0, "800,900", true}, {12, 1, "800,900", true}, {9, 0, "800", true}};
    for (const auto& s : starts) {
        INFO(s.major << "." << s.minor << " of " << s.built_for);
        CHECK(gpu_compiles(gpu("NVIDIA Test", s.major, s.minor, 1, 1), s.built_for) == s.compiles);
    }
}

TEST_CASE("gpu: a failure has CUDA's words and what to do", "[gpu]") {
    Gpu none, old = gpu("", 0, 0, 0, 0), used = gpu("NVIDIA H100", 9, 0, 132, 1980);
    none.runtime = none.driver = 13000;
    auto fail = [](const Gpu& g) { return [=] { die_of_gpu(g, "CUDA's words"); }; };
    CHECK(throws_with(fail(none), "expected a GPU of compute capability 8.0 or newer, got none (CUDA's words; CUDA "
                      "13.0, driver for 13.0): nvidia-smi should list one, CUDA_VISIBLE_DEVICES not ") == EXIT_DEVICE);
    none.driver = 0;                                        // no driver at all
    CHECK(throws_with(fail(none), "CUDA 13.0, no driver): nvidia-smi should list one") == EXIT_DEVICE);
    CHECK(throws_with(fail(old), "the driver may be too old: update it, or build with its CUDA") == EXIT_DEVICE);
    used.driver = 13000;
    CHECK(throws_with(fail(used), "cannot use the GPU, got NVIDIA H100 of 9.0 (CUDA's words; CUDA 13.0, driver for "
                      "13.0): another process may hold it: nvidia-smi; or make train_gpt2cu ARCH=sm_90a; ") ==
          EXIT_DEVICE);
    const Gpu turing = gpu("Tesla T4", 7, 5, 40, 1590);
    CHECK(throws_with(fail(turing), "got Tesla T4 of 7.5 (CUDA's words; CUDA 13.0, driver for 12.8): nvidia-smi ") ==
          EXIT_DEVICE);
    CHECK(throws_with(fail(turing), "./train_gpt2 runs without a GPU") == EXIT_DEVICE);
    CHECK(gpu_arch(gpu("x", 8, 9, 1, 1)) == "sm_89");
    CHECK(gpu_arch(gpu("x", 10, 0, 1, 1)) == "sm_100a");
}
