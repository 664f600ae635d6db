// base/host.h -- the CPU: bfloat16, denormal numbers, how much memory this process may use, how many cores.
#pragma once

#include <cmath>
#include <fstream>
#include <sstream>
#include <type_traits>

#include <sys/resource.h>

#include "common.h"

// ----------------------------------------------------------------------------------------------------------
// floating-point numbers

// The upper half of a float32, as storage. There is no arithmetic in it, so both conversions are explicit.
struct HostBf16 {
    uint16_t bits;
    HostBf16() = default;
    // Rounds to the nearest, ties to even. Above the largest number is infinity; a NaN stays one.
    explicit HostBf16(float x) {
        uint32_t u;
        memcpy(&u, &x, sizeof(u));
        bits = x != x ? 0x7fff : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
    explicit operator float() const {
        const uint32_t u = (uint32_t)bits << 16;
        float x;
        memcpy(&x, &u, sizeof(x));
        return x;
    }
};
static_assert(sizeof(HostBf16) == 2 && std::is_trivial<HostBf16>::value, "bf16 is two bytes of storage");

// A CPU takes a hundred cycles or more for an operation that reads or makes a denormal number, one below 2^-126 in
// float32. An attention bias that falls with the distance makes millions of them, as products of probabilities just
// above 2^-126, and they change nothing: they are added to numbers that are many powers of two larger. So two bits of
// the floating-point unit are set, one that rounds such a result to zero and one that reads such an operand as zero.
// Infinities, NaN and all other numbers keep their meaning. In the CUDA build nvcc's -ftz=true does the same.
//
// The bits belong to a thread, and a new thread inherits them from the thread that made it. A program sets them at the
// start of main, and launch() (device.h) in each thread that runs blocks, because any library may have made it.
#if defined(__SSE2__)
#include <xmmintrin.h>
constexpr uint64_t FLUSHES = 1u << 15 | 1u << 6;        // MXCSR: flush to zero, denormals are zero
inline uint64_t float_modes() { return _mm_getcsr(); }
inline void set_float_modes(uint64_t modes) { _mm_setcsr((unsigned)modes); }
#elif defined(__aarch64__)
constexpr uint64_t FLUSHES = (uint64_t)1 << 24;         // FPCR.FZ: results and operands
inline uint64_t float_modes() {
    uint64_t now;
    asm volatile("mrs %0, fpcr" : "=r"(now));
    return now;
}
inline void set_float_modes(uint64_t modes) { asm volatile("msr fpcr, %0" :: "r"(modes)); }
#else
constexpr uint64_t FLUSHES = 0;                         // this processor has no such bits
inline uint64_t float_modes() { return 0; }
inline void set_float_modes(uint64_t) {}
#endif
inline void flush_denormals() {
    if ((float_modes() & FLUSHES) != FLUSHES) { set_float_modes(float_modes() | FLUSHES); }
}
// Until the end of a block; then the thread, which may be another library's, has its own bits again.
struct FlushDenormals {
    const uint64_t before = float_modes();
    FlushDenormals() { flush_denormals(); }
    ~FlushDenormals() { set_float_modes(before); }
};

// Compiled with -ffast-math, isfinite(NaN) may be true, and no guard works: a program tests this at its start.
template <class T> bool isfinite_works_for() {
    volatile T zero = 0; // volatile: computed when the program runs, not when it is compiled
    const T nan = zero / zero, inf = 1 / zero;
    const bool sees = !std::isfinite(nan) && !std::isfinite(inf) && !std::isfinite(-inf) && std::isfinite(zero + 1);
    return sees && std::isnan(nan) && nan != nan;
}
inline bool isfinite_works() { return isfinite_works_for<float>() && isfinite_works_for<double>(); }

// ----------------------------------------------------------------------------------------------------------
// limits: /proc/meminfo and the number of cores are the machine's; a container's control group may allow less

// All of a file whose size the kernel gives as 0; "" if there is none
inline std::string kernel_text(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
}

struct GroupLimits {
    double memory = INFINITY;               // bytes that may still be taken
    double cores = INFINITY;
};

// Lowers the limits to what the group in `dir` (version 2 or 1) has. "max", -1 or a missing file limits nothing.
inline void lower_limits(GroupLimits& limits, const std::string& dir) {
    const struct { const char *limit, *used, *cached[2]; } versions[] = {
        {"memory.max", "memory.current", {"active_file", "inactive_file"}},
        {"memory.limit_in_bytes", "memory.usage_in_bytes", {"total_active_file", "total_inactive_file"}}};
    double quota, period;
    for (const auto& names : versions) {
        double limit, left, cached;
        if (sscanf(kernel_text(dir + names.limit).c_str(), "%lf", &limit) != 1) { continue; }
        left = limit - atof(kernel_text(dir + names.used).c_str());
        const std::string stat = "\n" + kernel_text(dir + "memory.stat");
        for (const char* name : names.cached) {             // the page cache is counted as used, but may be dropped
            const size_t at = stat.find(strprintf("\n%s ", name));
            if (at != std::string::npos && sscanf(&stat[at], "%*s %lf", &cached) == 1) { left += cached; }
        }
        limits.memory = std::min(limits.memory, std::max(0.0, std::min(left, limit)));
    }
    const std::string old = kernel_text(dir + "cpu.cfs_quota_us") + " " + kernel_text(dir + "cpu.cfs_period_us");
    for (const std::string& text : {kernel_text(dir + "cpu.max"), old}) {
        if (sscanf(text.c_str(), "%lf %lf", &quota, &period) != 2 || quota <= 0 || period <= 0) { continue; }
        limits.cores = std::min(limits.cores, quota / period);
    }
}

// The limits of all groups of this process and of the groups above them. A line of /proc/self/cgroup is "0::/a/b" in
// version 2, and "4:cpu,cpuacct:/a/b" in version 1, whose controllers are mounted apart. A container may see only its
// own group, mounted in place of the root: then the directory of the path does not exist, and the walk up finds it.
// root: of the file system
inline GroupLimits group_limits(const std::string& root = "") {
    GroupLimits limits;
    std::istringstream lines(kernel_text(root + "/proc/self/cgroup"));
    for (std::string line; std::getline(lines, line);) {
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos || line[second + 1] != '/') { continue; }
        const std::string controllers = line.substr(first + 1, second - first - 1);
        std::vector<std::string> mounts = {controllers};    // under this name, or the name of one of them
        for (const std::string one : {"memory", "cpu"}) {
            if (("," + controllers + ",").find("," + one + ",") != std::string::npos) { mounts.push_back(one); }
        }
        for (const std::string& mount : mounts) {
            for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
                lower_limits(limits, root + "/sys/fs/cgroup/" + mount + path + "/");
                if (path.empty()) { break; }
            }
        }
    }
    return limits;
}

// The bytes of host memory that the process may still take: MemAvailable of /proc/meminfo (without it, all of the
// machine's), or less if its control group or `ulimit -v` allows less.
struct HostMemory { size_t bytes; const char* bound; };         // bound: by what, for messages
inline HostMemory host_memory() {
    size_t kilobytes = 0, pages = 0;
    const std::string info = "\n" + kernel_text("/proc/meminfo"), statm = kernel_text("/proc/self/statm");
    const size_t at = info.find("\nMemAvailable:"), page = (size_t)sysconf(_SC_PAGESIZE);
    if (at == std::string::npos || sscanf(&info[at], " MemAvailable: %zu kB", &kilobytes) != 1) { kilobytes = 0; }
    HostMemory m = {kilobytes > 0 ? kilobytes * 1024 : (size_t)sysconf(_SC_PHYS_PAGES) * page, ""};
    const double group = group_limits().memory;
    if (group < (double)m.bytes) { m = {(size_t)group, " in its control group"}; }
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) { return m; }
    const size_t taken = sscanf(statm.c_str(), "%zu", &pages) == 1 ? pages * page : 0, allowed = (size_t)limit.rlim_cur;
    const size_t left = allowed > taken ? allowed - taken : 0;
    return left < m.bytes ? HostMemory{left, " under `ulimit -v`"} : m;
}
inline size_t host_memory_available() { return host_memory().bytes; }
