// harness.h -- shared by all numerical tests, with Catch2 (oracle.h) and on the emulated GPU (simt/kernel_test.h):
// arrays on the device that start poisoned, random numbers, closeness. A failure here throws an Error.
//
// A scene that both run (test/layers/*_oracle.h) reports by expect(), which each of the two defines.
#pragma once

#include <cfloat>
#include <cmath>
#include <ostream>
#include <random>

#include "llmc/base/device.h"
#include "llmc/base/math.h"

// ----------------------------------------------------------------------------------------------------------
// arrays

// An array of n elements on the device. Without values it is poisoned with 0xff bytes: NaN in float and bf16, -1 in
// int. The 256 bytes on either side are poisoned too, and host() checks that no kernel wrote there.
template <class T> struct DeviceArray {
    static constexpr size_t GUARD = 256;    // bytes; what lies between the guards is aligned to 256
    char* base;
    T* p;
    size_t n;

    explicit DeviceArray(size_t n)
        : base((char*)device_malloc(n * sizeof(T) + 2 * GUARD)), p((T*)(base + GUARD)), n(n) {
        const std::vector<char> poison(n * sizeof(T) + 2 * GUARD, (char)0xff);
        copy_to_device(base, poison.data(), poison.size(), Stream(0));
    }
    DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) { set(values); }
    DeviceArray(const DeviceArray&) = delete;
    DeviceArray& operator=(const DeviceArray&) = delete;
    ~DeviceArray() { device_free(base); }
    operator T*() const { return p; }

    void set(const std::vector<T>& values) {
        check(values.size() == n, "an array of %zu elements: expected as many values, got %zu", n, values.size());
        if (n > 0) { copy_to_device(p, values.data(), n * sizeof(T), Stream(0)); }
    }
    // the values; an Error at the caller's line if a kernel wrote past either end. Inlined, g++ 12 warns of sizes.
    __attribute__((noinline))
    std::vector<T> host(const char* file = __builtin_FILE(), int line = __builtin_LINE()) const {
        std::vector<unsigned char> bytes(n * sizeof(T) + 2 * GUARD);
        copy_to_host(bytes.data(), base, bytes.size(), Stream(0));
        for (size_t e = 0; e < bytes.size(); e++) {
            const bool guard = e < GUARD || e >= bytes.size() - GUARD;
            if (guard && bytes[e] != 0xff) {
                const char* where = e < GUARD ? "before" : "after";
                die_at(file, line, EXIT_DEVICE, "a kernel wrote %s an array of %zu", where, n);
            }
        }
        std::vector<T> values(n);
        if (n > 0) { memcpy((void*)values.data(), bytes.data() + GUARD, n * sizeof(T)); }
        return values;
    }
};

template <class T> using Array = DeviceArray<T>;

// bf16 converts to float only
template <class T> double as_double(T x) { return (double)(float)x; }
inline double as_double(double x) { return x; }
inline double as_double(int x) { return x; }

template <class To, class From> std::vector<To> as(const std::vector<From>& v) {
    std::vector<To> w(v.size());
    for (size_t i = 0; i < v.size(); i++) { w[i] = (To)v[i]; }
    return w;
}

// ----------------------------------------------------------------------------------------------------------
// random numbers

// The same numbers in every run, so that a red test says something about the change. CABLE_TEST_SEED=7 gives different
// ones, and CABLE_TEST_SEED=random fresh ones. Put INFO(random) into each test with Catch2.
struct Random {
    uint64_t seed;
    std::mt19937_64 engine;

    Random() : seed(pick()), engine(seed) {}
    static uint64_t pick() {
        const char* fixed = getenv("CABLE_TEST_SEED");
        if (fixed == nullptr) { return 20240520; }
        return std::string(fixed) == "random" ? std::random_device()() : strtoull(fixed, nullptr, 10);
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

// n normal draws of one fixed seed. Each stream has its own, so other draws of a test do not change them.
inline std::vector<float> normals(size_t n, uint64_t stream, double std = 1.0, double mean = 0.0) {
    std::vector<float> v(n);
    for (size_t i = 0; i < n; i++) { v[i] = (float)(mean + std * normal01(20240520, stream, i)); }
    return v;
}

// (B,stride): where the document of each token begins. A document has `tokens` tokens on average; a sequence starts
// with the rest of one.
inline std::vector<int> draw_documents(int B, int stride, int tokens, uint64_t stream) {
    std::vector<int> documents((size_t)B * stride, 0);
    for (size_t e = 0; e < documents.size(); e++) {
        const int t = (int)(e % (size_t)stride);
        if (t > 0) { documents[e] = hash64(stream, e) % (uint64_t)tokens == 0 ? t : documents[e - 1]; }
    }
    return documents;
}

// ----------------------------------------------------------------------------------------------------------
// closeness

template <class T> double largest(const std::vector<T>& v) {
    double m = 0;
    for (T x : v) { m = std::max(m, std::fabs(as_double(x))); }
    return m;
}

// max |got - want|; infinite when any of it is NaN or infinite, or the sizes differ
template <class T, class U> double largest_difference(const std::vector<T>& got, const std::vector<U>& want) {
    if (got.size() != want.size()) { return INFINITY; }
    double worst = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const double d = std::fabs(as_double(got[i]) - as_double(want[i]));
        if (!(d <= DBL_MAX)) { return INFINITY; }
        worst = std::max(worst, d);
    }
    return worst;
}

// |got - want| / |want| over all elements; infinite when any of it is NaN or infinite, or the sizes differ
template <class T, class U> double relative_l2(const std::vector<T>& got, const std::vector<U>& want) {
    if (got.size() != want.size()) { return INFINITY; }
    double error = 0, norm = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const double w = as_double(want[i]);
        const double d = as_double(got[i]) - w;
        error += d * d;
        norm += w * w;
    }
    if (!(error <= DBL_MAX)) { return INFINITY; }
    return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

template <class T> bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// x as floatX keeps it: what a kernel is given and its oracle computes with
inline std::vector<float> stored(const std::vector<float>& x) { return as<float>(as<floatX>(x)); }
template <class T> std::vector<float> host_floats(const DeviceArray<T>& a) { return as<float>(a.host()); }

// ----------------------------------------------------------------------------------------------------------
// scenes

void expect(bool ok, const std::string& what);
void poison_shared();               // NaN into the shared memory that the next kernels find

// The tolerated error of a kernel (another order of summation, fast_exp's 2 ulp), in units of the error of float32
// loops written straight from the equation, on the same input. If those happen to be exact, the unit is half an ulp of
// `scale`. A result in bf16 may be off by half its own ulp, too.
constexpr double MULTIPLE = 8;

template <class T>
void check_close(const std::string& name, const std::vector<T>& got, const std::vector<double>& want,
                 const std::vector<float>& plain, double scale = 0, double multiple = MULTIPLE) {
    const double unit = std::max(largest_difference(plain, want), FLT_EPSILON / 2 * std::max(largest(want), scale));
    double worst = got.size() == want.size() && !want.empty() ? 0 : INFINITY;
    for (size_t i = 0; i < want.size() && worst < INFINITY; i++) {
        const double half_ulp = sizeof(T) == 2 ? std::ldexp(1.0, std::max(std::ilogb(want[i]), -126) - 8) : 0.0;
        const double off = std::fabs(as_double(got[i]) - want[i]) - half_ulp;
        worst = off <= DBL_MAX ? std::max(worst, off) : INFINITY;
    }
    if (getenv("CABLE_TEST_ERRORS") != nullptr) {
        printf("%-24s %8zu elements  max %.1e  float32 %.1e  kernel %.1e  = %.2f units\n", name.c_str(), got.size(),
               largest(want), largest_difference(plain, want), worst, worst / (unit > 0 ? unit : 1));
    }
    expect(worst <= multiple * unit, strprintf("%s: largest value %g; float32 loops are off by %g, the kernel by %g",
                                               name.c_str(), largest(want), largest_difference(plain, want), worst));
}
