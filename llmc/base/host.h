// base/host.h -- the limits of this process: its memory, its cores.
//
// /proc/meminfo and the number of cores are the machine's; a container's control group may allow less.
#pragma once

#include <fstream>
#include <sstream>

#include <sys/resource.h>

#include "common.h"

// The contents of a file of /proc or /sys, whose size the kernel gives as 0; "" if it does not exist
inline std::string kernel_text(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
}

struct GroupLimits {
    double memory = INFINITY;               // bytes that are left
    double cores = INFINITY;
};

// Lowers the limits to the limits of the group in `dir`, of version 2 or 1. "max", -1 or a missing file limits nothing.
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
        for (const char* name : names.cached) {             // "used" includes the page cache, which may be dropped
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

// The lowest limits of this process's groups and of the groups above them. A line of /proc/self/cgroup is "0::/a/b" in
// version 2, "4:cpu,cpuacct:/a/b" in version 1, where each controller has its own mount. A container may see its own
// group mounted as the root: then the path does not exist, and the walk up to the root finds the group.
// root: where the file system begins, for tests
inline GroupLimits group_limits(const std::string& root = "") {
    GroupLimits limits;
    std::istringstream lines(kernel_text(root + "/proc/self/cgroup"));
    for (std::string line; std::getline(lines, line);) {
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos || line[second + 1] != '/') { continue; }
        const std::string controllers = line.substr(first + 1, second - first - 1);
        std::vector<std::string> mounts = {controllers};    // the mount is named after all of them or after one
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

// How much host memory the process may still take: MemAvailable of /proc/meminfo (all memory if the kernel does not
// say), or less if its control group or `ulimit -v` allows less. bound: which of the two does, for messages
struct HostMemory { size_t bytes; const char* bound; };
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
