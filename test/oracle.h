// oracle.h -- what the tests of layers share: random numbers, arrays that start poisoned, tolerances that are measured.
//
// A layer is tested in three steps. Its oracle is a template over the number type, nested loops straight from the equation.
//   1. oracle<double>'s backward is the derivative of oracle<double>'s forward: check_gradient(), by central differences.
//   2. oracle<float> against oracle<double>: the error that float32 makes on this input, the unit of the tolerance.
//   3. the kernel against oracle<double>: check_close(), which allows a multiple of 2.
#ifndef TEST_ORACLE_H
#define TEST_ORACLE_H

#include <cfloat>
#include <cmath>
#include <functional>
#include <random>

#include "test/catch.h"

#include "llmc/base/device.h"

// The same numbers in every run, so that a red test says something about the change; CABLE_TEST_SEED=7 gives others, and
// CABLE_TEST_SEED=random fresh ones. Put INFO(random) into each test.
struct Random {
    uint64_t seed;
    std::mt19937_64 engine;

    Random() : seed(pick()), engine(seed) {}
    static uint64_t pick() {
        const char* fixed = getenv("CABLE_TEST_SEED");
        if (fixed != nullptr && std::string(fixed) == "random") { return std::random_device()(); }
        return fixed != nullptr ? strtoull(fixed, nullptr, 10) : 20240520;
    }
    double uniform(double lo, double hi) { return std::uniform_real_distribution<double>(lo, hi)(engine); }
    int integer(int lo, int hi) { return std::uniform_int_distribution<int>(lo, hi)(engine); }    // lo .. hi
    float normal() { return (float)std::normal_distribution<double>()(engine); }
    std::vector<float> normals(size_t n, double mean = 0, double std = 1) {
        std::vector<float> x(n);
        std::normal_distribution<double> d(mean, std);
        for (float& e : x) { e = (float)d(engine); }
        return x;
    }
    std::vector<float> uniforms(size_t n, double lo, double hi) {
        std::vector<float> x(n);
        for (float& e : x) { e = (float)uniform(lo, hi); }
        return x;
    }
};
inline std::ostream& operator<<(std::ostream& out, const Random& r) { return out << "CABLE_TEST_SEED=" << r.seed; }

// An array on the device. It starts as NaN (-1 for int), as does a guard on either side, which host() finds unharmed.
template <class T> struct Array {
    static constexpr size_t GUARD = 256 / sizeof(T);
    T* p;
    size_t n;

    explicit Array(size_t n) : p(nullptr), n(n) {
        const std::vector<char> bytes((n + 2 * GUARD) * sizeof(T), (char)0xff);
        p = (T*)device_malloc(bytes.size()) + GUARD;
        copy_to_device(p - GUARD, bytes.data(), bytes.size(), Stream(0));
    }
    Array(const std::vector<T>& v) : Array(v.size()) { set(v); }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    ~Array() { device_free(p - GUARD); }
    operator T*() const { return p; }

    void set(const std::vector<T>& v) {
        if (!v.empty()) { copy_to_device(p, v.data(), v.size() * sizeof(T), Stream(0)); }
    }
    std::vector<T> host() const {
        std::vector<T> all(n + 2 * GUARD);
        copy_to_host(all.data(), p - GUARD, all.size() * sizeof(T), Stream(0));
        for (size_t e = 0; e < GUARD * sizeof(T); e++) {
            const bool before = ((char*)all.data())[e] == (char)0xff, after = ((char*)(all.data() + GUARD + n))[e] == (char)0xff;
            if (!before || !after) { FAIL("a kernel wrote " << (before ? "behind" : "in front of") << " an array of " << n); }
        }
        return std::vector<T>(all.begin() + GUARD, all.end() - GUARD);
    }
};

// NaN into the dynamic shared memory that the next kernels find
static __global__ void poison_shared_kernel(int n) {
    for (int e = threadIdx.x; e < n; e += blockDim.x) { dynamic_shared()[e] = NAN; }
}
inline void poison_shared() {
    const int n = 48 << 10;
    launch(poison_shared_kernel, Grid(64, 64, sizeof(float) * n, Stream(0)), n);
}

template <class R, class T> std::vector<R> as(const std::vector<T>& v) { return std::vector<R>(v.begin(), v.end()); }

template <class T> double largest(const std::vector<T>& v) {
    double m = 0;
    for (T x : v) { m = std::max(m, std::fabs((double)x)); }
    return m;
}

// max |got - want|; infinite when any of it is NaN
template <class T> double worst_difference(const std::vector<T>& got, const std::vector<double>& want) {
    REQUIRE(got.size() == want.size());
    double worst = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const double d = std::fabs((double)got[i] - want[i]);
        if (!(d <= DBL_MAX)) { return INFINITY; }
        worst = std::max(worst, d);
    }
    return worst;
}

// What a kernel may be off by, in units of what float32 loops written straight from the equation are off by on the same input:
// another order of summation, fast_exp's 2 ulp. Where those loops happen to be exact, half an ulp of `scale` is the unit.
constexpr double MULTIPLE = 8;

inline void check_close(const std::string& name, const std::vector<float>& got, const std::vector<double>& want, const std::vector<float>& plain,
                        double scale = 0, double multiple = MULTIPLE) {
    const double unit = std::max(worst_difference(plain, want), FLT_EPSILON / 2 * std::max(largest(want), scale));
    const double worst = worst_difference(got, want), tolerance = multiple * unit;
    if (getenv("CABLE_TEST_ERRORS") != nullptr) {
        printf("%-24s %8zu elements  max %.1e  float32 %.1e  kernel %.1e  = %.2f units\n", name.c_str(), got.size(), largest(want),
               worst_difference(plain, want), worst, worst / (unit > 0 ? unit : 1));
    }
    INFO(name << ": largest value " << largest(want) << ", float32 loops are off by " << worst_difference(plain, want) << ", the kernel by " << worst);
    CHECK(!want.empty());
    CHECK(worst <= tolerance);
}

// gradient = d loss / dx of a double oracle, at some elements (the first and last among them) and, in a random direction, all.
// Central differences over h are off by h^2 f''' / 6 and by the rounding of the loss, about DBL_EPSILON * sum / h with the
// sum of the magnitudes added up in it; with h = 1e-5 both are below 1e-8 of the gradient's size for the layers here.
inline void check_gradient(const std::string& name, const std::function<double()>& loss, std::vector<double>& x,
                           const std::vector<double>& gradient, Random& random, int samples = 8, double h = 1e-5) {
    REQUIRE(x.size() == gradient.size());
    const double size = std::max(largest(gradient), 1e-3);
    for (int k = 0; k < samples; k++) {
        const size_t i = k == 0 ? 0 : k == 1 ? x.size() - 1 : (size_t)random.integer(0, (int)x.size() - 1);
        const double at = x[i];
        x[i] = at + h;
        const double up = loss();
        x[i] = at - h;
        const double down = loss();
        x[i] = at;
        const double rounding = DBL_EPSILON * 100 * std::max(std::fabs(up), 1.0) / h;
        INFO(name << "[" << i << "]: differences give " << (up - down) / (2 * h) << ", the formula " << gradient[i]);
        CHECK(std::fabs((up - down) / (2 * h) - gradient[i]) <= 1e-6 * size + rounding);
    }
    const std::vector<double> at = x;
    std::vector<double> direction(x.size());
    double slope = 0, magnitude = 0;
    for (size_t i = 0; i < x.size(); i++) {
        direction[i] = random.normal() / std::sqrt((double)x.size());
        slope += direction[i] * gradient[i];
        magnitude += std::fabs(direction[i] * gradient[i]);
    }
    for (size_t i = 0; i < x.size(); i++) { x[i] = at[i] + h * direction[i]; }
    const double up = loss();
    for (size_t i = 0; i < x.size(); i++) { x[i] = at[i] - h * direction[i]; }
    const double down = loss();
    x = at;
    INFO(name << " in a random direction: differences give " << (up - down) / (2 * h) << ", the formula " << slope);
    CHECK(std::fabs((up - down) / (2 * h) - slope) <= 1e-6 * std::max(magnitude, size) + DBL_EPSILON * 100 * std::max(std::fabs(up), 1.0) / h);
}

// sum of a * b: the loss whose gradient in a is b
inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
    double s = 0;
    for (size_t i = 0; i < a.size(); i++) { s += a[i] * b[i]; }
    return s;
}

template <class T> bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// Runs f with 1, 2, 3 and 4 threads: the arrays it returns must have the same bits.
template <class F> void check_thread_invariance(F f) {
    set_threads(1);
    const auto first = f();
    for (int threads = 2; threads <= 4; threads++) {
        set_threads(threads);
        INFO(threads << " threads");
        CHECK(same_bits(first, f()));
    }
    set_threads(2);
}

#endif
