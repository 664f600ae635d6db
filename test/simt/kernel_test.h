// kernel_test.h -- tests of kernels without a test library: one text for the emulator (g++ -DSIMT) and for the
// hardware (nvcc).
//
//   KERNEL_TEST("what it shows") {                      a test; it fails by EXPECT or by throwing
//       DeviceArray<float> x(normals(n, 1)), y(n);      y starts as NaN, with guards on both sides that host() looks at
//       launch(kernel, Grid(blocks, 64, 0, Stream(0)), y.p, x.p);
//       EXPECT(relative_l2(y.host(), want) < 1e-6, "T %d", T);
//       INFO("error %g", error);                        printed after the test's name
//   }
//   program [FILTER] [--list]                           FILTER: part of the name; exit code 1 if any test fails
// A failed test prints each false EXPECT above its line.
//
// Includes of a test come first: this file defines main.
#pragma once

#include "test/harness.h"

#if defined(SIMT)
constexpr bool on_gpu = false;              // shapes are small and every fault that the emulator can see is planted
#else
constexpr bool on_gpu = true;
#endif
#if defined(SIMT_ASAN)
constexpr bool with_asan = true;
#else
constexpr bool with_asan = false;
#endif

// ----------------------------------------------------------------------------------------------------------
// registry

struct KernelTest { const char* name; void (*run)(); };
inline std::vector<KernelTest>& kernel_tests() { static std::vector<KernelTest> all; return all; }
inline bool add_kernel_test(const char* name, void (*run)()) { kernel_tests().push_back({name, run}); return true; }
inline std::string kernel_test_info;     // of the running test
inline int kernel_test_failures = 0, kernel_test_expectations = 0;
struct KernelTestSkipped { std::string why; };

#define KERNEL_TEST_JOIN_(a, b) a##b
#define KERNEL_TEST_JOIN(a, b) KERNEL_TEST_JOIN_(a, b)
#define KERNEL_TEST(name) KERNEL_TEST_(name, KERNEL_TEST_JOIN(kernel_test_, __LINE__))
#define KERNEL_TEST_(name, function)                                                    \
    static void function();                                                            \
    static const bool KERNEL_TEST_JOIN(function, _added) = add_kernel_test(name, function); \
    static void function()

PRINTF_LIKE(3, 4) inline void kernel_test_fail(const char* place, const char* condition, const char* fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    const std::string s = vstrprintf(fmt, ap);
    va_end(ap);
    if (++kernel_test_failures <= 10) { printf("    %s: %s is false: %s\n", place, condition, s.c_str()); }
}
#define KERNEL_TEST_TEXT_(x) #x
#define KERNEL_TEST_TEXT(x) KERNEL_TEST_TEXT_(x)
// EXPECT(cond, fmt, ...): the message says what was found; the test continues
#define EXPECT(cond, ...) \
    (kernel_test_expectations++, \
     (cond) ? (void)0 : kernel_test_fail(__FILE__ ":" KERNEL_TEST_TEXT(__LINE__), #cond, __VA_ARGS__))
#define INFO(...) (kernel_test_info += (kernel_test_info.empty() ? "" : "; ") + strprintf(__VA_ARGS__))
// SKIP(why): ends the test, which then counts as neither passed nor failed
#define SKIP(...) throw KernelTestSkipped{strprintf(__VA_ARGS__)}

inline void expect(bool ok, const std::string& what) { EXPECT(ok, "%s", what.c_str()); }
inline void poison_shared() {}                              // the emulator has done it

// ----------------------------------------------------------------------------------------------------------
// data

template <class To, class From> std::vector<To> converted(const std::vector<From>& v) { return as<To>(v); }
// bf16 <-> float: what a kernel that stores bf16 is given and what it gave
inline std::vector<bf16> to_bf16(const std::vector<float>& v) { return as<bf16>(v); }
inline std::vector<float> to_float(const std::vector<bf16>& v) { return as<float>(v); }
inline const std::vector<float>& to_float(const std::vector<float>& v) { return v; }
inline std::vector<float> rounded_to_bf16(const std::vector<float>& v) { return to_float(to_bf16(v)); }

// The message of the Error that `f` throws, empty if it throws none
template <class F> std::string error_of(F f) {
    try { f(); } catch (const Error& e) { return e.what(); }
    return "";
}

// ----------------------------------------------------------------------------------------------------------
// main

struct KernelTestResult { std::string name, status, info; double ms; };

inline KernelTestResult run_kernel_test(const KernelTest& test) {
    KernelTestResult r = {test.name, "ok", "", 0};
    kernel_test_info.clear();
    kernel_test_failures = kernel_test_expectations = 0;
    const double start = wall_seconds();
    try {
        test.run();
        CUDA_CHECK(cudaDeviceSynchronize());
        if (kernel_test_expectations == 0) { kernel_test_fail(test.name, "EXPECT", "the test expects nothing"); }
    } catch (const KernelTestSkipped& s) {
        r.status = "skipped";
        kernel_test_info = s.why;
    } catch (const std::exception& e) {
        kernel_test_fail(test.name, "no Error", "%s", e.what());
    }
    r.ms = 1000 * (wall_seconds() - start);
    r.info = kernel_test_info;
    if (kernel_test_failures > 0) { r.status = "FAILED"; r.info = ""; }
    return r;
}

int main(int argc, char** argv) {
    flush_denormals();
    std::string filter;
    bool list = false;
    for (int i = 1; i < argc; i++) {
        const std::string a = argv[i];
        if (a == "--list") { list = true; }
        else if (a.compare(0, 2, "--") != 0) { filter = a; }
        else {
            fprintf(stderr, "unknown option %s; usage: %s [FILTER] [--list]\n", argv[i], argv[0]);
            return 2;
        }
    }
    int failed = 0, run = 0;
    bool whole = false;     // the filter is a complete name: only that test runs, not longer names that begin with it
    for (const KernelTest& test : kernel_tests()) { whole = whole || test.name == filter; }
    for (const KernelTest& test : kernel_tests()) {
        if (whole ? test.name != filter : std::string(test.name).find(filter) == std::string::npos) { continue; }
        run++;
        if (list) { printf("%s\n", test.name); continue; }
        const KernelTestResult r = run_kernel_test(test);
        printf("%-64s %-7s %8.1f ms  %s\n", r.name.c_str(), r.status.c_str(), r.ms, r.info.c_str());
        fflush(stdout);
        failed += r.status == "FAILED";
        // a broken context fails everything after it
        if (on_gpu && r.status == "FAILED" && cudaGetLastError() != cudaSuccess) { break; }
    }
    if (run == 0) { fprintf(stderr, "no test's name contains '%s'\n", filter.c_str()); return 1; }
    return failed > 0 ? 1 : 0;
}
