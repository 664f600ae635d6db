// test_fastmath.cu -- the errors of math.h on a GPU, over every 4093rd float32, on hardware over every 127th.
// FLOATS=all: over each, which the oracle takes ten minutes for on a core, and the emulator half an hour.
#include "llmc/base/math.h"
#include "test/simt/kernel_test.h"

static const Stream stream = nullptr;
enum Function { EXP, LOG1P, SIGMOID, SOFTPLUS, GAUSSIAN, CDF, FUNCTIONS };
static const char* const NAMES[FUNCTIONS] = {"exp", "log1p", "sigmoid", "softplus", "gaussian", "cdf"};

__device__ inline float fast(int function, float x) {
    switch (function) {
        case EXP: return fast_exp(x);
        case LOG1P: return fast_log1p(x);
        case SIGMOID: return sigmoid(x);
        case SOFTPLUS: return softplus(x);
        case GAUSSIAN: return gaussian(x);
        default: return normal_cdf(x, gaussian(x));
    }
}
static double exact(int function, double x) {
    switch (function) {
        case EXP: return std::exp(x);
        case LOG1P: return std::log1p(x);
        case SIGMOID: return 1 / (1 + std::exp(-x));
        case SOFTPLUS: return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x)));
        case GAUSSIAN: return std::exp(-x * x / 2);
        default: return std::erfc(-x / std::sqrt(2.0)) / 2;
    }
}
// y[i] = the function of the float whose bits are first + i step
__global__ void function_kernel(float* y, int function, uint32_t first, uint32_t step, size_t n) {
    const GridSpan s = grid_span(n);
    for (size_t i = s.begin; i < s.end; i += s.step) {
        y[i] = fast(function, bits_to_float((int32_t)(first + (uint32_t)i * step)));
    }
}
// |got - want| in units of the last place of the float32 nearest to want
static double ulps(float got, double want) {
    const float nearest = (float)want;
    const double unit = std::nextafter(std::fabs(nearest), INFINITY) - (double)std::fabs(nearest);
    const double d = std::fabs(got - want) / unit;
    return d <= DBL_MAX ? d : INFINITY;                 // NaN counts as wrong
}

// The range in which a function must have its error; beyond it, the limits that its comment states. Over all floats on
// the emulator, whose instructions have the largest error that a GPU's may have, the worst errors of exp, log1p,
// sigmoid and softplus are 4.89, 5.20, 8.08 and 9.18 ulp.
struct Interval { Function function; float from, to; double most; };
static const Interval RANGES[] = {
    {EXP, -87.33f, 88.37f, 5}, {LOG1P, -0.899f, FLT_MAX, 6}, {SIGMOID, -87.0f, FLT_MAX, 9},
    {SOFTPLUS, -86.0f, FLT_MAX, 10}, {GAUSSIAN, -13.2f, 13.2f, 5}, {CDF, -12.9f, FLT_MAX, 14},
};
KERNEL_TEST("fast functions: errors over their whole range") {
    const char* floats = getenv("FLOATS");
    const bool all = floats != nullptr && strcmp(floats, "all") == 0;
    const uint32_t usual = on_gpu ? 127 : 4093;
    const uint32_t step = all ? 1 : usual;
    const size_t chunk = 1 << 20;
    DeviceArray<float> out(chunk);
    std::string errors;
    for (const Interval& r : RANGES) {
        double worst = 0;
        float where = 0;
        for (uint64_t first = 0; first < (uint64_t)1 << 32; first += chunk * step) {
            const size_t n = std::min(chunk, (size_t)ceil_div(((uint64_t)1 << 32) - first, (uint64_t)step));
            const Grid grid(on_gpu ? 1024 : 1, 32, 0, stream);
            launch(function_kernel, grid, out.p, (int)r.function, (uint32_t)first, step, n);
            const std::vector<float> y = out.host();
            for (size_t i = 0; i < n; i++) {
                const float x = bits_to_float((int32_t)((uint32_t)first + (uint32_t)i * step));
                const bool held = x >= r.from && x <= r.to && fabsf(x) >= 2 * FLT_MIN;
                if (x != x) { EXPECT(y[i] != y[i], "%s of NaN is %g", NAMES[r.function], y[i]); }
                if (!held) { continue; }
                const double error = ulps(y[i], exact(r.function, x));
                if (!(error <= worst)) { worst = error; where = x; }
            }
        }
        EXPECT(worst <= r.most, "%s is off by %.2f ulp at %.9g", NAMES[r.function], worst, where);
        errors += strprintf("%s %.2f ", NAMES[r.function], worst);
    }
    INFO("ulp: %s", errors.c_str());
}
KERNEL_TEST("fast functions: beyond their range") {
    struct Case { Function function; float x, want; };
    const float inf = INFINITY;
    const std::vector<Case> cases = {
        {EXP, 0.0f, 1.0f}, {EXP, -0.0f, 1.0f}, {EXP, 1e-40f, 1.0f}, {EXP, -87.4f, 0.0f}, {EXP, -1e10f, 0.0f},
        {EXP, -FLT_MAX, 0.0f}, {EXP, -inf, 0.0f}, {EXP, 88.8f, inf}, {EXP, 89.0f, inf}, {EXP, FLT_MAX, inf},
        {EXP, inf, inf}, {LOG1P, 0.0f, 0.0f}, {SIGMOID, -1000.0f, 0.0f}, {SIGMOID, inf, 1.0f}, {SIGMOID, -inf, 0.0f},
        {SOFTPLUS, -1000.0f, 0.0f}, {SOFTPLUS, 1000.0f, 1000.0f}, {GAUSSIAN, 14.0f, 0.0f}, {GAUSSIAN, -inf, 0.0f},
        {CDF, -13.3f, 0.0f}, {CDF, -inf, 0.0f}, {CDF, 13.3f, 1.0f}, {CDF, inf, 1.0f},
    };
    DeviceArray<float> out(1);
    for (const Case& c : cases) {
        const uint32_t bits = (uint32_t)float_to_bits(c.x);
        launch(function_kernel, Grid(1, 32, 0, stream), out.p, (int)c.function, bits, 0u, (size_t)1);
        const float got = out.host()[0];
        const bool right = got == c.want || (c.want == 1.0f && fabsf(got - 1.0f) < 1e-7f);      // rcp(1) may be off
        EXPECT(right, "%s of %g is %.9g, expected %g", NAMES[c.function], c.x, got, c.want);
    }
}
