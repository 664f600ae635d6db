// test_device.cu -- the elementary functions' errors, launch, grid_span, the block's sums, and errors.
#include "test/files.h"
#include "test/oracle.h"

#include <map>
#include <thread>

#include "llmc/base/math.h"
#include "llmc/base/common.h"
#include "llmc/base/host.h"

namespace {

// |got - want| in units of the last place of the float32 nearest to want
double ulps(float got, double want) {
    const float nearest = (float)want;
    const double unit = std::nextafter(std::fabs(nearest), INFINITY) - (double)std::fabs(nearest);
    const double d = std::fabs(got - want) / unit;
    return d <= DBL_MAX ? d : INFINITY;                 // NaN counts as wrong
}

// the largest error of f over every `stride`th float32 of lo .. hi (same sign), from a random one on
template <class F, class G> double worst_ulps(F f, G exact, float lo, float hi, Random& random, int stride = 499) {
    int32_t a = float_to_bits(lo), b = float_to_bits(hi);
    if (a > b) { std::swap(a, b); }
    double worst = 0;
    for (int64_t i = (int64_t)a + random.integer(0, stride - 1); i <= b; i += stride) {
        const float x = bits_to_float((int32_t)i);
        worst = std::max(worst, ulps(f(x), exact((double)x)));
    }
    for (float x : {lo, hi}) { worst = std::max(worst, ulps(f(x), exact((double)x))); }
    if (getenv("CABLE_TEST_ERRORS") != nullptr) { printf("%.9g .. %.9g: %.3f ulp\n", lo, hi, worst); }
    return worst;
}

constexpr float TINY = FLT_MIN;

// Every index that a grid of this kernel visits is counted.
__global__ void count_kernel(int* counts, size_t n) {
    const GridSpan s = grid_span(n);
    for (size_t i = s.begin; i < s.end; i += s.step) { counts[i]++; }
}

__global__ void block_kernel(int* block, int* grid) {
    if (threadIdx.x == 0) {
        block[blockIdx.x] = (int)blockIdx.x;
        grid[blockIdx.x] = (int)gridDim.x;
    }
}

// sum, double sum, max, and whether every thread's prefix is right; twice, so that the second call meets the first's
// leftovers
__global__ void reduce_kernel(float* out) {
    const float x = (float)(threadIdx.x + 1);
    for (int round = 0; round < 2; round++) {
        const float sum = block_sum(x);
        const float largest = block_max(x);
        const float lowest = block_max(-x);
        const float prefix = block_scan(x);
        const double exact = block_sum((double)x);
        const float wrong = block_sum(prefix == x * (x + 1) / 2 ? 0.0f : 1.0f);
        float* o = out + 6 * (2 * blockIdx.x + round);
        if (threadIdx.x == blockDim.x - 1) {
            o[0] = sum;
            o[1] = largest;
            o[2] = lowest;
            o[3] = (float)exact;
            o[4] = wrong;
            o[5] = (float)blockDim.x;
        }
    }
}

__global__ void shared_kernel(float* out, int n) {
    float* s = dynamic_shared();
    for (int i = threadIdx.x; i < n; i += blockDim.x) { s[i] = (float)(i + (int)blockIdx.x); }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) { out[blockIdx.x * n + i] = s[n - 1 - i]; }
}

} // namespace

TEST_CASE("fast_exp is within 2 ulp, and right at the ends", "[device]") {
    Random random;
    INFO(random);
    auto f = [](float x) { return fast_exp(x); };
    auto exact = [](double x) { return std::exp(x); };
    CHECK(worst_ulps(f, exact, TINY, 88.37f, random) <= 2);
    CHECK(worst_ulps(f, exact, -TINY, std::nextafter(-87.3f, 0.0f), random) <= 2);
    CHECK(fast_exp(0.0f) == 1.0f);
    CHECK(fast_exp(-0.0f) == 1.0f);
    CHECK(fast_exp(1e-40f) == 1.0f);
    for (float x : {-87.3f, -87.4f, -88.0f, -100.0f, -1e10f, -FLT_MAX, -INFINITY}) { CHECK(fast_exp(x) == 0.0f); }
    for (float x : {88.8f, 100.0f, 1e10f, FLT_MAX, INFINITY}) { CHECK(fast_exp(x) == INFINITY); }
    CHECK(std::isnan(fast_exp(NAN)));
    CHECK(std::isnan(fast_exp(-NAN)));
    // monotone where it matters most: the largest score of a row has weight exactly 1, no other more
    CHECK(fast_exp(-1e-7f) <= 1.0f);
}

TEST_CASE("fast_log1p is within 4 ulp", "[device]") {
    Random random;
    INFO(random);
    auto f = [](float x) { return fast_log1p(x); };
    auto exact = [](double x) { return std::log1p(x); };
    CHECK(worst_ulps(f, exact, 2 * TINY, 0.5f, random) <= 4);
    CHECK(worst_ulps(f, exact, 0.5f, FLT_MAX, random) <= 4);
    CHECK(worst_ulps(f, exact, -2 * TINY, -0.899f, random) <= 4);
    CHECK(fast_log1p(0.0f) == 0.0f);
    CHECK(std::isnan(fast_log1p(NAN)));
}

TEST_CASE("sigmoid is within 4 ulp, softplus within 8", "[device]") {
    Random random;
    INFO(random);
    auto sigmoid_f = [](float x) { return sigmoid(x); };
    auto sigmoid_exact = [](double x) { return 1 / (1 + std::exp(-x)); };
    CHECK(worst_ulps(sigmoid_f, sigmoid_exact, TINY, 1000, random) <= 4);
    CHECK(worst_ulps(sigmoid_f, sigmoid_exact, -TINY, -87, random) <= 4);
    CHECK(sigmoid(-1000.0f) == 0.0f);
    CHECK(sigmoid(INFINITY) == 1.0f);
    CHECK(sigmoid(-INFINITY) == 0.0f);
    CHECK(std::isnan(sigmoid(NAN)));
    auto softplus_f = [](float x) { return softplus(x); };
    auto softplus_exact = [](double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); };
    CHECK(worst_ulps(softplus_f, softplus_exact, TINY, FLT_MAX, random) <= 8);
    CHECK(worst_ulps(softplus_f, softplus_exact, -TINY, -86, random) <= 8);
    CHECK(softplus(-1000.0f) == 0.0f);
    CHECK(std::isnan(softplus(NAN)));
}

TEST_CASE("gaussian is within 3 ulp, normal_cdf within 8, in the left tail too", "[device]") {
    Random random;
    INFO(random);
    auto gauss = [](float x) { return gaussian(x); };
    auto gauss_exact = [](double x) { return std::exp(-x * x / 2); };
    CHECK(worst_ulps(gauss, gauss_exact, TINY, 13.2f, random) <= 3);
    CHECK(worst_ulps(gauss, gauss_exact, -TINY, -13.2f, random) <= 3);
    auto cdf = [](float x) { return normal_cdf(x, gaussian(x)); };
    auto cdf_exact = [](double x) { return std::erfc(-x / std::sqrt(2.0)) / 2; };
    CHECK(worst_ulps(cdf, cdf_exact, TINY, FLT_MAX, random) <= 8);
    CHECK(worst_ulps(cdf, cdf_exact, -TINY, -12.9f, random) <= 8);     // beyond, the share itself is below FLT_MIN
    CHECK(cdf(0.0f) == 0.5f);
    for (float x : {-13.3f, -14.0f, -1e3f, -1e30f, -INFINITY}) { CHECK(cdf(x) == 0.0f); }
    for (float x : {13.3f, 14.0f, 1e3f, 1e30f, INFINITY}) { CHECK(cdf(x) == 1.0f); }
    CHECK(std::isnan(gaussian(NAN)));
    CHECK(std::isnan(cdf(NAN)));
}

TEST_CASE("fused_madd rounds once", "[device]") {
    const float a = 1.0f + FLT_EPSILON;
    CHECK(fused_madd(a, a, -(1.0f + 2 * FLT_EPSILON)) == FLT_EPSILON * FLT_EPSILON);
}

TEST_CASE("log, exp, powers, sin and cos in double are within 2 ulp, and the same bits on every machine", "[device]") {
    std::vector<double> results;
    double log_error = 0.0, log1p_error = 0.0;
    double exp_error = 0.0, sin_error = 0.0;
    double pow_error = 0.0;
    const auto add = [&](double& worst, double got, long double want, double unit) {
        worst = std::max(worst, (double)(std::fabs((long double)got - want) / unit));
        results.push_back(got);
    };
    const auto ulp = [](long double want) { return std::ldexp(1.0, std::ilogb((double)want) - 52); };
    for (int n = 0; n < 100000; n++) {
        const double u = uniform01(1, (uint64_t)n), near_one = 0.7 + 0.7 * u;
        const double e = 80.0 * uniform01(2, (uint64_t)n) - 40.0, x = portable_exp(e);
        const double angle = (n % 2 == 0 ? 10.0 : 1e7) * (2.0 * u - 1.0);
        add(exp_error, x, std::exp((long double)e), ulp(std::exp((long double)e)));
        add(exp_error, portable_exp2(e), std::exp2((long double)e), ulp(std::exp2((long double)e)));
        for (double y : {x, near_one}) {
            add(log_error, portable_log(y), std::log((long double)y), ulp(std::log((long double)y)));
        }
        add(log1p_error, portable_log1p(x), std::log1p((long double)x), ulp(std::log1p((long double)x)));
        add(sin_error, portable_sin(angle), std::sin((long double)angle), 0x1p-52);
        add(sin_error, portable_cos(angle), std::cos((long double)angle), 0x1p-52);
        const long double power = std::pow(10000.0L, -(long double)u);
        add(pow_error, portable_pow(10000.0, -u), power, ulp(power));
    }
    CAPTURE(log_error, log1p_error, exp_error, sin_error, pow_error);
    CHECK(log_error <= 2);
    CHECK(log1p_error <= 2);
    CHECK(exp_error <= 2);
    CHECK(sin_error <= 1);
    CHECK(pow_error <= 17);                     // y log x, up to 9.2, is off by 2 ulp of 2^-49 each, and exp by 1
    // the hash of all results, which g++ and clang++ compute for x86-64 and for Arm
    CHECK(checksum(results.data(), sizeof(double) * results.size()) == 0x7fb28b576820f18f);
    CHECK(portable_log(1.0) == 0.0);
    CHECK(portable_log(0.0) == -INFINITY);
    CHECK(portable_log(INFINITY) == INFINITY);
    CHECK(std::isnan(portable_log(NAN)));
    CHECK(std::isnan(portable_log(-1.0)));
    CHECK(portable_exp2(-8.0) == 1.0 / 256);
}

TEST_CASE("sums_over has one order on every CPU, and max_over passes over NaN", "[device][asan]") {
    Random random;
    for (int n : {0, 1, 15, 16, 17, 31, 32, 100, 1000}) {
        std::vector<float> x(n), y(n);
        for (int c = 0; c < n; c++) {
            x[c] = random.normal();
            y[c] = random.normal();
        }
        // as device.h states it: 16 sums, of every 16th element, and a tree
        float dot[16] = {}, sum[16] = {};
        for (int c = 0; c < n; c++) {
            const float product = x[c] * y[c];
            dot[c % 16] += product;
            sum[c % 16] += x[c];
        }
        for (float* s : {dot, sum}) {
            for (int half : {8, 4, 2, 1}) {
                for (int way = 0; way < half; way++) { s[way] += s[way + half]; }
            }
        }
        const auto got = sums_over<2>(0, n, 1, [&](float* s, int c) {
            s[0] += x[c] * y[c];
            s[1] += x[c];
        });
        CAPTURE(n);
        CHECK(got.x[0] == dot[0]);
        CHECK(got.x[1] == sum[0]);
        const auto term = [&](int c) { return c % 7 == 3 ? NAN : x[c]; };
        float largest = -INFINITY;
        for (int c = 0; c < n; c++) { largest = c % 7 != 3 ? std::max(largest, x[c]) : largest; }
        CHECK(max_over(0, n, 1, term) == largest);
    }
}

TEST_CASE("NaN and infinity keep their meaning under this binary's flags", "[device][asan][P21]") {
    volatile float zero = 0.0f;
    const float nan = zero / zero, infinity = 1.0f / zero;
    CHECK_FALSE(std::isfinite(nan));
    CHECK_FALSE(std::isfinite(infinity));
    CHECK(std::isnan(nan));
    CHECK_FALSE(nan == nan);
    CHECK(nan != nan);
    CHECK_FALSE(nan < 1.0f);
    CHECK_FALSE(nan >= 1.0f);
    CHECK(-infinity < -FLT_MAX);
    const std::vector<float> x = {1.0f, nan, 2.0f};
    bool finite = true;
    for (float v : x) { finite = finite && std::isfinite(v); }
    CHECK_FALSE(finite);
}

TEST_CASE("grid_span covers every index exactly once", "[device][asan]") {
    for (size_t blocks : {1, 2, 3, 7, 64}) {
        for (size_t n : {0, 1, 2, 63, 64, 65, 127, 1000, 4096, 10007}) {
            Array<int> counts(std::vector<int>(n, 0));
            launch(count_kernel, Grid(blocks, 128, 0, Stream(0)), counts.p, n);
            const std::vector<int> got = counts.host();
            INFO("n " << n << ", blocks " << blocks);
            CHECK(std::count(got.begin(), got.end(), 1) == (long)n);
        }
    }
}

TEST_CASE("Grid::over covers every index exactly once", "[device][asan]") {
    for (size_t n : {0, 1, 16383, 16384, 16385, 100000, 1 << 20}) {
        Array<int> counts(std::vector<int>(n, 0));
        launch(count_kernel, Grid::over(n, Stream(0)), counts.p, n);
        const std::vector<int> got = counts.host();
        INFO("n " << n);
        CHECK(std::count(got.begin(), got.end(), 1) == (long)n);
    }
}

TEST_CASE("launch visits every block", "[device][asan]") {
    for (size_t blocks : {1, 2, 3, 33, 257}) {
        Array<int> block(blocks), grid(blocks);
        launch(block_kernel, Grid(blocks, 32, 0, Stream(0)), block.p, grid.p);
        const std::vector<int> b = block.host(), g = grid.host();
        for (size_t i = 0; i < blocks; i++) {
            CHECK(b[i] == (int)i);
            CHECK(g[i] == (int)blocks);
        }
    }
    Array<int> untouched(1);
    launch(block_kernel, Grid(0, 32, 0, Stream(0)), untouched.p, untouched.p);
    CHECK(untouched.host()[0] == -1);
}

TEST_CASE("launch refuses a grid that no launch can have, and names the caller", "[device][asan]") {
    int* null = nullptr;
    CHECK(throws_with([&] { launch(block_kernel, Grid((size_t)1 << 31, 32, 0, Stream(0)), null, null); },
                      "expected at most 2147483647 blocks, got 2147483648  [test/base/test_device.cu") == EXIT_DEVICE);
}

TEST_CASE("block_sum, block_max and block_scan", "[device][asan]") {
    Array<float> out(3 * 12);
    launch(reduce_kernel, Grid(3, 128, 0, Stream(0)), out.p);
    const std::vector<float> o = out.host();
    for (size_t k = 0; k < o.size(); k += 6) {
        const float n = o[k + 5];
        CHECK(n >= 1);
        CHECK(o[k] == n * (n + 1) / 2);
        CHECK(o[k + 1] == n);
        CHECK(o[k + 2] == -1);
        CHECK(o[k + 3] == n * (n + 1) / 2);
        CHECK(o[k + 4] == 0);
    }
}

TEST_CASE("every block has its own dynamic shared memory", "[device][asan]") {
    for (int n : {1, 37, 5000}) {
        const size_t blocks = 9;
        Array<float> out(blocks * n);
        launch(shared_kernel, Grid(blocks, 64, sizeof(float) * n, Stream(0)), out.p, n);
        const std::vector<float> got = out.host();
        bool right = true;
        for (size_t i = 0; i < got.size(); i++) {
            right = right && got[i] == (float)(n - 1 - (int)(i % n) + (int)(i / n));
        }
        INFO("n " << n);
        CHECK(right);
    }
}

TEST_CASE("device memory comes zeroed and aligned, and is copied both ways", "[device][asan]") {
    for (size_t n : {1, 37, 1 << 20}) {
        float* p = (float*)device_malloc(n * sizeof(float));
        CHECK((uintptr_t)p % 256 == 0);
        std::vector<float> host(n, 1.0f), back(n);
        copy_to_host(host.data(), p, n * sizeof(float), Stream(0));
        CHECK(largest(host) == 0);
        for (size_t i = 0; i < n; i++) { host[i] = (float)i; }
        copy_to_device(p, host.data(), n * sizeof(float), Stream(0));
        copy_to_host(back.data(), p, n * sizeof(float), Stream(0));
        CHECK(same_bits(host, back));
        device_zero(p, sizeof(float), Stream(0));
        copy_to_host(back.data(), p, n * sizeof(float), Stream(0));
        CHECK(back[0] == 0.0f);
        CHECK(back[n - 1] == (n > 1 ? (float)(n - 1) : 0.0f));
        device_free(p);
    }
}

// no sanitizer: they stop at such a request
TEST_CASE("memory that there is not is an error with a hint", "[device]") {
    CHECK(throws_with([] { device_malloc((size_t)1 << 60); }, "try a smaller --B") == EXIT_OUT_OF_MEMORY);
}

TEST_CASE("errors carry their code and message, and those of the device a place", "[common][asan]") {
    CHECK(throws_with([] { check(1 + 1 == 3, "%s: %d is wrong", "file.bin", 2); },
                      "file.bin: 2 is wrong") == EXIT_BAD_INPUT);
    CHECK(throws_with([] { die(EXIT_DEVICE, "x"); }, "x  [test/base/test_device.cu:") == EXIT_DEVICE);
    try { check(false, "x"); } catch (const Error& e) { CHECK(std::string(e.what()) == "x"); }      // of the user's
    CHECK(throws_with([] { die(EXIT_DIVERGED, "loss is %g", 1.5); }, "loss is 1.5") == EXIT_DIVERGED);
    CHECK_NOTHROW(check(true, "never"));
    CHECK(checked_mul(1u << 31, 1u << 31, "x") == (size_t)1 << 62);
    CHECK(throws_with([] { checked_mul((size_t)1 << 40, (size_t)1 << 40, "tensor w"); }, "tensor w") == EXIT_BAD_INPUT);
    CHECK(strprintf("%s %d", std::string(5000, 'a').c_str(), 7).size() == 5002);
}

TEST_CASE("small helpers", "[common][asan]") {
    CHECK(ceil_div(7, 4) == 2);
    CHECK(ceil_div(8, 4) == 2);
    CHECK(round_up(1, 64) == 64);
    CHECK(round_up(64, 64) == 64);
    CHECK(format_bytes(999) == "999 B");
    CHECK(format_bytes(1.25e9) == "1.2 GB");
    CHECK(format_duration(9) == "9s");
    CHECK(format_duration(252) == "4m12s");
    CHECK(format_duration(7380) == "2h03m");
}

namespace {

// 1 where denormal numbers count, 2 where infinity or NaN have lost their meaning. volatile: computed at run time
__host__ __device__ float denormals_seen() {
    volatile float small = 1e-30f;
    volatile float denormal = bits_to_float(1 << 22);   // 5.9e-39
    volatile float zero = 0.0f;
    volatile float huge = 3e38f;
    const bool made = small * small != 0.0f || FLT_MIN * (0.5f + zero) != 0.0f;     // results below 2^-126
    const bool read = denormal * huge != 0.0f;          // an operand below it
    const float infinity = huge * huge;
    const float nan = infinity * zero;
    const bool meaning = infinity > huge && 1.0f / zero > huge && nan != nan && FLT_MIN * (1.0f + zero) > 0.0f;
    float seen = 0.0f;
    if (made || read) { seen += 1.0f; }
    if (!meaning) { seen += 2.0f; }
    return seen;
}
__global__ void denormal_kernel(float* seen) {
    if (threadIdx.x == 0) { seen[blockIdx.x] = denormals_seen(); }
}

#if !defined(CUDA_BUILD) && defined(__SSE2__)
// what a thread has that a library made before main
void count_denormals() { _mm_setcsr(_mm_getcsr() & ~(1u << 15 | 1u << 6)); }
#endif

}

TEST_CASE("a denormal product in every thread is 0", "[device][denormals]") {
    const size_t blocks = 4096;
    CHECK(denormals_seen() == 0.0f);                    // main's thread, before any kernel
    Array<float> seen(blocks);
    launch(denormal_kernel, Grid(blocks, 64, 0, Stream(0)), seen.p);
    CHECK(largest(seen.host()) == 0);
#if !defined(CUDA_BUILD)
    float of_thread = 1.0f;
    std::thread([&] { of_thread = denormals_seen(); }).join();
    CHECK(of_thread == 0.0f);
#if defined(__SSE2__)
    // launch() sets the bits in threads that do not have them. Some are lost in all threads of the pool.
#if defined(_OPENMP)
#pragma omp parallel
#endif
    count_denormals();
    CHECK(denormals_seen() == 1.0f);                    // the test sees what it looks for
    launch(denormal_kernel, Grid(blocks, 64, 0, Stream(0)), seen.p);
    CHECK(largest(seen.host()) == 0);
    flush_denormals();
#endif
#endif
}

TEST_CASE("control groups: memory and cores of every version, level and mount", "[device]") {
    struct Case {
        std::string groups;                             // /proc/self/cgroup
        std::map<std::string, std::string> files;       // below /sys/fs/cgroup/
        double memory, cores;
    };
    const std::string none = "9223372036854771712\n", stat1 = "inactive_file 300\ntotal_inactive_file 500\n";
    const Case cases[] = {
        {"0::/\n", {}, INFINITY, INFINITY},
        {"0::/\n", {{"memory.max", "max\n"}, {"memory.current", "7\n"}, {"cpu.max", "max 100000\n"}}, INFINITY,
         INFINITY},
        {"0::/\n", {{"memory.max", "9000\n"}, {"memory.current", "2000\n"}, {"cpu.max", "150000 100000\n"},
                    {"memory.stat", "anon 5\nworkingset_inactive_file 9\ninactive_file 100\nactive_file 30\n"}},
         7130, 1.5},
        {"0::/a/b\n", {{"a/memory.max", "9000\n"}, {"a/memory.current", "8000\n"}, {"a/cpu.max", "300000 100000\n"},
                       {"a/b/memory.max", "5000\n"}, {"a/b/memory.current", "10\n"}, {"a/b/cpu.max", "max 9\n"}},
         1000, 3},
        {"0::/a/b\n", {{"a/b/memory.max", "500\n"}, {"a/b/memory.current", "600\n"}, {"a/b/cpu.max", "5 10\n"},
                       {"a/memory.max", "max\n"}, {"c/memory.max", "1\n"}}, 0, 0.5},
        {"0::/docker/1a2b\n", {{"memory.max", "5000\n"}, {"memory.current", "1\n"}, {"cpu.max", "20 10\n"}}, 4999, 2},
        {"0::/../other\n", {{"memory.max", "5000\n"}}, 5000, INFINITY},
        {"5:memory:/a\n4:cpu,cpuacct:/b\n3:name=systemd:/a\n0::/\n",
         {{"memory/memory.limit_in_bytes", none}, {"memory/a/memory.limit_in_bytes", "8000\n"},
          {"memory/a/memory.usage_in_bytes", "2000\n"}, {"memory/a/memory.stat", stat1},
          {"memory/b/memory.limit_in_bytes", "1\n"}, {"cpu,cpuacct/cpu.cfs_quota_us", "-1\n"},
          {"cpu,cpuacct/cpu.cfs_period_us", "100000\n"}, {"cpu,cpuacct/b/cpu.cfs_quota_us", "250000\n"},
          {"cpu,cpuacct/b/cpu.cfs_period_us", "100000\n"}}, 6500, 2.5},
        {"4:cpuacct,cpu:/docker/1a2b\n5:memory:/docker/1a2b\n",
         {{"cpu/cpu.cfs_quota_us", "50\n"}, {"cpu/cpu.cfs_period_us", "100\n"},
          {"memory/memory.limit_in_bytes", "10\n"}}, 10, 0.5},
        {"2:cpu:/\n0::/user.slice\n", {{"unified/user.slice/memory.max", "1\n"}, {"cpu/cpu.cfs_quota_us", "-1\n"},
                                      {"cpu/cpu.cfs_period_us", "100\n"}}, INFINITY, INFINITY},
        {"nonsense\n:\n1:\n0::relative\n\n", {{"relative/memory.max", "1\n"}}, INFINITY, INFINITY},
    };
    for (const Case& c : cases) {
        INFO(c.groups);
        const TempDir root;
        io_mkdirs(root / "proc/self");
        write_file(root / "proc/self/cgroup", c.groups);
        for (const auto& file : c.files) {
            const std::string path = root / ("sys/fs/cgroup/" + file.first);
            io_mkdirs(path.substr(0, path.rfind('/')));
            write_file(path, file.second);
        }
        const GroupLimits limits = group_limits(root.path);
        CHECK(limits.memory == c.memory);
        CHECK(limits.cores == c.cores);
    }
    const TempDir empty;
    CHECK(group_limits(empty.path).memory == INFINITY);
}
