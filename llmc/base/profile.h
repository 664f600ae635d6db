// base/profile.h -- how long each kernel of a step takes (--profile N). For device.h only.
//
// The time of a launch. On a GPU: between two events of its stream, minus the time between two events that have nothing
// between them. On a CPU: by the clock, because the kernel is done when launch() returns. Without --profile a launch
// costs the test of one bool.
#pragma once

#include <map>
#include <tuple>

#if defined(CUDA_BUILD)
constexpr const char* PROFILED_BY = "events";
// The time of one launch
struct ProfileClock {
    cudaEvent_t from = nullptr, to = nullptr;
    cudaEvent_t after = nullptr;
    void start(Stream s) {
        for (cudaEvent_t* e : {&from, &to, &after}) { CUDA_CHECK(cudaEventCreate(e)); }
        CUDA_CHECK(cudaEventRecord(from, s));
    }
    void stop(Stream s) {                                   // the launch has reported its own error
        cudaEventRecord(to, s);
        cudaEventRecord(after, s);
    }
    static double between(cudaEvent_t a, cudaEvent_t b) {
        float ms = 0.0f;
        CUDA_CHECK(cudaEventSynchronize(b));
        CUDA_CHECK(cudaEventElapsedTime(&ms, a, b));
        return ms;
    }
    double milliseconds() const { return between(from, to); }
    double empty() const { return between(to, after); }     // two events with nothing between them
    void release() {
        for (cudaEvent_t e : {from, to, after}) { if (e != nullptr) { cudaEventDestroy(e); } }
    }
};
#else
constexpr const char* PROFILED_BY = "the clock";
// The time of one launch
struct ProfileClock {
    double from = 0.0, to = 0.0;
    void start(Stream) { from = wall_seconds(); }
    void stop(Stream) { to = wall_seconds(); }
    double milliseconds() const { return 1e3 * (to - from); }
    double empty() const { return 0.0; }
    void release() {}
};
#endif

// A launch. Of a product (M,N) = (M,K) (K,N) also the shape, else 0
struct ProfileEntry {
    std::string kernel;
    int M, N, K;
    ProfileClock clock;
};
struct Profile {
    bool on = false;
    int depth = 0;                          // a product counts as one launch, with all launches inside it
    std::vector<ProfileEntry> entries;
};
inline Profile profile;
// Called after each launch with its text, if it is not null: dev/trace.h
inline void (*after_launch)(const char* text, Stream stream) = nullptr;

// Measures a launch while it exists. text: the arguments of launch() as written, kernel first
class ProfiledLaunch {
public:
    ProfiledLaunch(const char* text, Stream stream, int M = 0, int N = 0, int K = 0) : text(text), stream(stream) {
        if (!watched || profile.depth++ > 0 || !profile.on) { return; }
        at = (int)profile.entries.size();
        profile.entries.push_back({std::string(text, strcspn(text, "<, ")), M, N, K, {}});
        profile.entries.back().clock.start(stream);
    }
    ~ProfiledLaunch() {
        if (!watched) { return; }
        profile.depth--;
        if (at >= 0) { profile.entries[(size_t)at].clock.stop(stream); }
        if (after_launch != nullptr && profile.depth == 0) { after_launch(text, stream); }
    }
    ProfiledLaunch(const ProfiledLaunch&) = delete;
    ProfiledLaunch& operator=(const ProfiledLaunch&) = delete;

private:
    const bool watched = profile.on || after_launch != nullptr;     // if not, several threads may launch at once
    const char* text;
    Stream stream;
    int at = -1;                            // its entry; -1: none
};

inline void profile_begin() { profile.on = true; }
// The launches since profile_begin(), as a table with a line for each kernel and shape, in the order of their first
// calls. start: when the step began (wall_seconds). Waits for the device.
inline std::string profile_end(double start) {
    struct Sum { size_t calls = 0; double ms = 0.0; };
    std::map<std::tuple<std::string, int, int, int>, Sum> sums;
    std::vector<const ProfileEntry*> order;
    std::vector<double> empties;                    // measured among the launches, under the same load
    for (const ProfileEntry& e : profile.entries) { empties.push_back(e.clock.empty()); }
    std::sort(empties.begin(), empties.end());
    const double empty = empties.empty() ? 0.0 : empties[empties.size() / 2];       // the median
    double all = 0.0;
    for (ProfileEntry& e : profile.entries) {
        Sum& sum = sums[{e.kernel, e.M, e.N, e.K}];
        if (sum.calls++ == 0) { order.push_back(&e); }
        const double ms = std::max(0.0, e.clock.milliseconds() - empty);
        sum.ms += ms;
        all += ms;
    }
    const double step_ms = 1e3 * (wall_seconds() - start);
    std::string text = strprintf("%-32s %20s %6s %10s %7s %9s\n", "kernel", "M x N x K", "calls", "ms", "share",
                                 "TFLOP/s");
    for (const ProfileEntry* e : order) {
        const Sum& sum = sums[{e->kernel, e->M, e->N, e->K}];
        const bool product = e->M > 0;
        const double flops = 2.0 * e->M * e->N * e->K * (double)sum.calls;
        const std::string shape = product ? strprintf("%dx%dx%d", e->M, e->N, e->K) : "-";
        const std::string rate = product ? strprintf("%.3f", flops / (sum.ms * 1e9)) : "-";
        text += strprintf("%-32s %20s %6zu %10.3f %6.1f%% %9s\n", e->kernel.c_str(), shape.c_str(), sum.calls, sum.ms,
                          100 * sum.ms / step_ms, rate.c_str());
    }
    text += strprintf("%-32s %20s %6s %10.3f %6.1f%% %9s\n", "(host)", "-", "-", step_ms - all,
                      100 * (step_ms - all) / step_ms, "-");
    for (ProfileEntry& e : profile.entries) { e.clock.release(); }
    profile = Profile();
    return text;
}
