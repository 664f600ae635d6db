// oracle.h -- what the tests of layers share: tolerances that are measured, gradients against finite differences.
//
// A layer is tested in three steps. Its oracle is a template over the number type: plain loops, as the equation says.
//   1. oracle<double>'s backward is the derivative of its forward: check_gradient(), by central differences.
//   2. oracle<float> against oracle<double>: the error that float32 makes on this input, the unit of the tolerance.
//   3. the kernel against oracle<double>: check_close() allows a multiple of that unit.
#pragma once

#include <functional>

#include "test/catch.h"
#include "test/harness.h"

// NaN into the dynamic shared memory that the next kernels find
static __global__ void poison_shared_kernel(int n) {
    for (int e = threadIdx.x; e < n; e += blockDim.x) { dynamic_shared()[e] = NAN; }
}
inline void poison_shared() {
    const int n = 48 << 10;
    launch(poison_shared_kernel, Grid(16, 64, sizeof(float) * n, Stream(0)), n);     // for each thread some
}

// max |got - want|; infinite when any of it is NaN
template <class T> double worst_difference(const std::vector<T>& got, const std::vector<double>& want) {
    REQUIRE(got.size() == want.size());
    return largest_difference(got, want);
}

inline void expect(bool ok, const std::string& what) {
    INFO(what);
    CHECK(ok);
}

// gradient = d loss / dx of a double oracle: at some elements, the first and last among them, and along a random
// direction of all. Central differences over h are off by h^2 f''' / 6 and by the rounding of the loss, about
// DBL_EPSILON * sum / h with the sum of the magnitudes added up in it. With h = 1e-5 both are below 1e-8 of the
// gradient's size for the layers here.
inline void check_gradient(const std::string& name, const std::function<double()>& loss, std::vector<double>& x,
                           const std::vector<double>& gradient, Random& random, int samples = 8, double h = 1e-5) {
    REQUIRE(x.size() == gradient.size());
    const double size = std::max(largest(gradient), 1e-3);
    for (int k = 0; k < samples; k++) {
        size_t i = k == 0 ? 0 : x.size() - 1;
        if (k >= 2) { i = (size_t)random.integer(0, (int)x.size() - 1); }
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
    const double rounding = DBL_EPSILON * 100 * std::max(std::fabs(up), 1.0) / h;
    CHECK(std::fabs((up - down) / (2 * h) - slope) <= 1e-6 * std::max(magnitude, size) + rounding);
}

// sum of a * b: the loss whose gradient in a is b
inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
    double s = 0;
    for (size_t i = 0; i < a.size(); i++) { s += a[i] * b[i]; }
    return s;
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
