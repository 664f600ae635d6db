// ladder.h -- what the ladders of this folder share: sizes from the command line, arrays, closeness, time, the table.
//
// A ladder computes one thing in several ways, its rungs, from the plainest kernel to the shipped one. Each rung adds
// one idea to the rung before it, is compared with an oracle in double, and is timed, but not by the emulator.
//
//   layernorm_backward [RUNG [SIZE...]]         RUNG 0: all of them; exit code 1 if any rung is wrong
//
// One source, three builds (`make ladders` makes and runs all; docs/new_kernel.md says what each is for):
//   g++ -std=c++17 -O3 -march=native -fno-math-errno -fopenmp -I. -x c++ dev/cuda/layernorm_backward.cu -o ladder
//   g++ -std=c++17 -O1 -include test/simt/simt.h -Itest/simt -I. -x c++ dev/cuda/layernorm_backward.cu -o ladder
//   nvcc -std=c++17 -O3 -Xcompiler -fopenmp -I. -arch=sm_90a dev/cuda/layernorm_backward.cu -o ladder
#pragma once

#include "test/harness.h"

// A rung starts with NaN where it is to write, so that an element which it leaves out is found.
template <class T> void poison(DeviceArray<T>& a) { a.set(std::vector<T>(a.n, (T)NAN)); }

// n normal draws, rounded to floatX: what is rounded before the oracle sees it is not an error of the kernel
inline std::vector<floatX> inputs(size_t n, uint64_t stream, double std = 1.0, double mean = 0.0) {
    return as<floatX>(normals(n, stream, std, mean));
}
// what the oracle computes with; bf16 converts to float only
template <class R, class T> std::vector<R> numbers(const std::vector<T>& v) { return as<R>(as<float>(v)); }

// ----------------------------------------------------------------------------------------------------------
// closeness

// The distance of 1 from the next number
inline double ulp(double) { return DBL_EPSILON; }
inline double ulp(float) { return FLT_EPSILON; }
#if defined(CUDA_BUILD)
inline double ulp(bf16) { return 0x1p-7; }
#endif
// x as T keeps it: bf16 keeps 8 bits of a float's 24
template <class T> double rounded(double x) { return as_double((T)(float)x); }
template <> inline double rounded<double>(double x) { return x; }

inline double root_mean_square(const std::vector<double>& v) {
    return relative_l2(v, std::vector<double>(v.size())) / std::sqrt((double)v.size());
}

// How much worse a rung may be than the oracle written in float32 on the same input: it sums in another order, and
// fast_exp is off by 2 ulp. Correct rungs measured at most 3.1 at many sizes, and the faults that were planted 9 and
// more.
constexpr double RUNG_MULTIPLE = 4.0;

// ----------------------------------------------------------------------------------------------------------
// the program

// A size on the command line: its name, and its default on a CPU (where the emulator takes its time) and on a GPU
struct Size { const char* name; int small, large; };

struct Ladder {
    std::vector<Size> sizes;
    int only = 0;                               // the rung to run; 0: all
    int rung = 0;
    std::string idea, no_gain, header, row;
    bool rung_is_wrong = false, any_is_wrong = false;
    int ran = 0;

    Ladder(int argc, char** argv, const std::vector<Size>& wanted) : sizes(wanted) {
        std::string usage = strprintf("usage: %s [RUNG", argv[0]);
        for (const Size& s : sizes) { usage += strprintf(" [%s", s.name); }
        usage += std::string(sizes.size() + 1, ']') + ", RUNG 0: all of them";
        check(argc <= (int)sizes.size() + 2, "expected at most %zu arguments, got %d; %s", sizes.size() + 1, argc - 1,
              usage.c_str());
        for (int a = 1; a < argc; a++) {
            char* end;
            const long value = strtol(argv[a], &end, 10);
            const long least = a == 1 ? 0 : 1;
            check(*end == '\0' && end != argv[a] && value >= least && value <= INT32_MAX,
                  "expected a number of at least %ld, got '%s'; %s", least, argv[a], usage.c_str());
            if (a == 1) { only = (int)value; }
            else { sizes[(size_t)a - 2].small = sizes[(size_t)a - 2].large = (int)value; }
        }
        printf("%s on %s, elements are %s", argv[0], device_description().c_str(),
               sizeof(floatX) == 2 ? "bf16" : "float32");
        for (size_t s = 0; s < sizes.size(); s++) { printf(", %s %d", sizes[s].name, size(s)); }
        printf("\n");
        printf("largest error (as a multiple of what the oracle is off by in float32: at most %g)\n\n", RUNG_MULTIPLE);
    }
    int size(size_t s) const {
#if defined(__CUDACC__)
        return sizes[s].large;
#else
        return sizes[s].small;
#endif
    }

    // true if the next rung is to run. why: it gains no time on a CPU
    bool begin(const char* what, const char* why = "") {
        rung++;
        idea = what;
        no_gain = why;
        row = "";
        rung_is_wrong = false;
        return only == 0 || only == rung;
    }
    // `plain` is the oracle in float32, which measures what float32 costs on this input; T is how the kernel stores
    // the result
    template <class T, class R>
    void compare(const char* name, const std::vector<T>& got, const std::vector<double>& want,
                 const std::vector<R>& plain) {
        check(got.size() == want.size() && !want.empty(), "expected %zu elements, got %zu", want.size(), got.size());
        std::vector<double> off(want.size()), plain_off(want.size());
        for (size_t i = 0; i < want.size(); i++) {
            off[i] = as_double(got[i]) - want[i];
            plain_off[i] = rounded<T>((double)plain[i]) - want[i];
        }
        // where the float32 oracle is exact by luck, the rounding of the results themselves is the unit, or of what
        // they are sums of: all inputs are about 1
        const double spacing = std::exp2(std::floor(std::log2(std::max(largest(want), DBL_MIN)))) * ulp(T());
        const double unit = std::max({largest(plain_off), spacing / 2, FLT_EPSILON / 2.0});
        const double unit_rms = std::max({root_mean_square(plain_off), root_mean_square(want) * ulp(T()) / 8,
                                          FLT_EPSILON / 8.0});
        // the largest finds one wrong element, the root mean square a small error of all of them
        const double worst = largest_difference(got, want);
        const double times = std::max(worst / unit, root_mean_square(off) / unit_rms);
        rung_is_wrong = rung_is_wrong || !(times <= RUNG_MULTIPLE);
        if (ran == 0) { header += strprintf("%-15s ", name); }
        const char* form = times < 100 ? "%.1e (%.2f)" : "%.1e (%.0e)";
        row += strprintf("%-15s ", strprintf(form, worst, times).c_str());
    }
    // The rung's line. run: launches the rung once more, for the time; work: how many 1e9 `unit`s it reads and
    // writes, or computes
    template <class F> void end(F run, double work, const char* unit) {
        if (ran++ == 0) { printf("  %-46s%s\n", "rung", header.c_str()); }
        printf("%d %-46s%s%s", rung, idea.c_str(), row.c_str(), rung_is_wrong ? "WRONG" : "ok");
        const double ms = milliseconds(run);
        if (ms > 0) { printf("  %8.3f ms  %7.4g %s/s", ms, work / ms * 1e3, unit); }
#if !defined(CUDA_BUILD)
        if (!no_gain.empty()) { printf("\n  no time gained on a CPU: %s", no_gain.c_str()); }
#endif
        printf("\n");
        fflush(stdout);
        any_is_wrong = any_is_wrong || rung_is_wrong;
    }
    // the line of a rung that this build or these sizes do not have
    void absent(const char* what, const char* why) {
        if (begin(what)) { printf("%d %-46s%s\n", rung, what, why), ran++; }
    }
    int exit_code() const {
        check(ran > 0, "expected a rung from 1 to %d, got %d", rung, only);
        return any_is_wrong ? 1 : 0;
    }

#if defined(__CUDACC__)
    // the median of 20 runs after 3 to warm up; the inputs may be in the L2 cache
    template <class F> double milliseconds(F run) {
        const Stream stream = device_stream();
        cudaEvent_t from, to;
        CUDA_CHECK(cudaEventCreate(&from));
        CUDA_CHECK(cudaEventCreate(&to));
        std::vector<float> times;
        for (int r = 0; r < 23; r++) {
            CUDA_CHECK(cudaEventRecord(from, stream));
            run();
            CUDA_CHECK(cudaEventRecord(to, stream));
            CUDA_CHECK(cudaEventSynchronize(to));
            float ms;
            CUDA_CHECK(cudaEventElapsedTime(&ms, from, to));
            if (r >= 3) { times.push_back(ms); }
        }
        CUDA_CHECK(cudaEventDestroy(from));
        CUDA_CHECK(cudaEventDestroy(to));
        std::sort(times.begin(), times.end());
        return times[times.size() / 2];
    }
#elif defined(SIMT)
    // the emulator's time says nothing
    template <class F> double milliseconds(F) { return 0; }
#else
    // the least of 0.2 seconds of runs
    template <class F> double milliseconds(F run) {
        double best = INFINITY;
        for (const double begin = wall_seconds(); best == INFINITY || wall_seconds() - begin < 0.2;) {
            const double from = wall_seconds();
            run();
            best = std::min(best, wall_seconds() - from);
        }
        return 1e3 * best;
    }
#endif
};

// main of a ladder: an Error becomes its message and its exit code
template <class F> int run_ladder(F ladder) {
    flush_denormals();
    try {
        return ladder();
    } catch (const Error& e) {
        fprintf(stderr, "%s\n", e.what());
        return e.code;
    }
}
