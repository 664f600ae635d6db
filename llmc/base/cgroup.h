// base/cgroup.h -- what the control groups of this process allow, such as a container's: /proc/meminfo and the number
// of cores are those of the whole machine.
#pragma once

#include <cmath>
#include <sstream>

#include "common.h"

struct GroupLimits {
    double memory = INFINITY;               // bytes that may still be taken
    double cores = INFINITY;
};

// The kernel's files say that they are empty.
inline std::string kernel_text(const std::string& path) {
    std::string text;
    char block[4096];
    FILE* f = fopen(path.c_str(), "r");
    for (size_t n; f != nullptr && (n = fread(block, 1, sizeof(block), f)) > 0;) { text.append(block, n); }
    if (f != nullptr) { fclose(f); }
    return text;
}

// Lowers the limits to those of the group whose files are in `dir`. They are named by version 2 or 1. A limit of "max"
// or -1, and a file that does not exist, limit nothing.
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
