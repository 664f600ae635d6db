// files/outdir.h -- the output directory of a run: its lock, and the names and manifests of its checkpoints.
//
//   OUT/.lock             held by the run that writes here
//   OUT/step_00001000/    a checkpoint, published whole by one rename; its manifest.json covers every byte of it
//   OUT/.tmp_step_*       being written     } left-overs once their run is dead,
//   OUT/.trash_step_*     being deleted     } which clean_output_directory() removes
//   OUT/.old_step_*       being replaced    } (or puts back)
//
//   manifest.json         {"format", "version", "step", "files": {NAME: {"bytes", "checksum"}, ...}, "checksum"}
#pragma once

#include <sys/file.h>
#include <sys/statvfs.h>

#include "../../base/common.h"
#include "../json.h"
#include "safetensors.h"

// Makes the directory if needed, and keeps other runs out of it for as long as the object lives. The kernel releases an
// flock when its process dies, however it dies, so that a killed run never leaves a stale lock.
struct OutputLock {
    std::string path;                   // OUT/.lock
    int fd = -1;                        // holds the lock while it is open

    explicit OutputLock(const std::string& out) : path(out + "/.lock") {
        io_mkdirs(out);
        fd = io_open(path, O_RDWR | O_CREAT | O_NOFOLLOW);
        check(fd >= 0 || errno != ELOOP, "%s: expected a file, got a symbolic link; remove it", path.c_str());
        check(fd >= 0, "%s: the output directory is not writable: %s (--out)", out.c_str(), strerror(errno));
        try { take(out); } catch (...) { ::close(fd); throw; }
    }
    OutputLock(const OutputLock&) = delete;
    OutputLock& operator=(const OutputLock&) = delete;
    ~OutputLock() { ::close(fd); }      // the file stays: without it, two runs could lock two files of one name

private:
    // Locks, or says who holds the lock: its pid is in the file.
    void take(const std::string& out) {
        const bool locked = flock(fd, LOCK_EX | LOCK_NB) == 0;      // NB: an error instead of waiting
        if (!locked && !lacks_service(errno, path, "nothing keeps a second run out of this directory")) {
            check(errno == EWOULDBLOCK, "%s: cannot lock: %s", path.c_str(), strerror(errno));
            char owner[32] = {};
            const ssize_t n = pread(fd, owner, sizeof(owner) - 1, 0);
            die(EXIT_BAD_INPUT, "%s is in use by another run (pid %ld); wait for it or give another --out", out.c_str(),
                n > 0 ? strtol(owner, nullptr, 10) : 0L);
        }
        const std::string pid = std::to_string((long)getpid()) + "\n";
        check(io_truncate(fd, 0), "%s: cannot write: %s", path.c_str(), strerror(errno));
        io_write(fd, pid.data(), pid.size(), path);
    }
};

// ----------------------------------------------------------------------------------------------------------
// verifying

// The program's: --help and config.json (cable_version) have it; docs/CONTRIBUTING.md says what is stable
inline constexpr const char* VERSION = "1.0.0";
inline constexpr int MANIFEST_VERSION = 1;

// 8 digits, so that byte order is the order of the steps; more if a step needs them
inline std::string step_name(int step) { return strprintf("step_%08d", step); }

// the inverse of step_name(); -1 for a name that it does not produce ("step_1", "step_00000001.old")
inline int step_of_name(const std::string& name) {
    if (name.compare(0, 5, "step_") != 0 || name.size() < 13 || name.size() > 15) { return -1; }    // 8 to 10 digits
    if (name.find_first_not_of("0123456789", 5) != std::string::npos) { return -1; }
    const long step = strtol(name.c_str() + 5, nullptr, 10);
    return step <= INT32_MAX && step_name((int)step) == name ? (int)step : -1;
}

// the steps that have a checkpoint directory in `out`, oldest first
inline std::vector<int> list_checkpoints(const std::string& out) {
    std::vector<int> steps;
    if (!is_directory(out)) { return steps; }
    for (const std::string& name : list_directory(out)) {
        if (step_of_name(name) >= 0) { steps.push_back(step_of_name(name)); }
    }
    std::sort(steps.begin(), steps.end());
    return steps;
}

using FileSums = std::vector<std::pair<std::string, FileSum>>;       // a file's name, its size and checksum

// The manifest's own checksum covers the text before it, and the text must be exactly what this program would write. So
// no bit of the manifest can change unnoticed either.
inline std::string manifest_text(int step, const FileSums& sums) {
    Json j = {
        {"format", "cable.c checkpoint"}, {"version", MANIFEST_VERSION}, {"step", step}, {"files", Json::object()}};
    for (const auto& file : sums) {
        j["files"][file.first] = {{"bytes", file.second.bytes}, {"checksum", sum_text(file.second.sum)}};
    }
    j["checksum"] = sum_text(checksum(json_text(j, 1)));
    return json_text(j, 1) + "\n";
}

// The names, sizes and checksums of the files that a verified manifest lists, and its step.
inline FileSums read_manifest(const std::string& path, int& step) {
    const std::string text = read_file(path, JSON_MAX_BYTES);
    const Json j = parse_json(text, path);
    const int version = (int)json_int(j, "version", 0, INT32_MAX, path);
    check(version == MANIFEST_VERSION, "%s: expected version %d, got %d", path.c_str(), MANIFEST_VERSION, version);
    step = (int)json_int(j, "step", 0, INT32_MAX, path);
    check(j.contains("files") && j["files"].is_object(), "%s: expected an object as \"files\"", path.c_str());
    FileSums listed;
    for (const auto& item : j["files"].items()) {
        // "../../etc/passwd" would be a file that the checkpoint does not own
        check(item.key().find('/') == std::string::npos, "%s: the file %s is not in the directory", path.c_str(),
              item.key().c_str());
        const std::string sum = json_string(item.value(), "checksum", path);
        const uint64_t bytes = (uint64_t)json_int(item.value(), "bytes", 0, INT64_MAX, path);
        const uint64_t value = sum.size() < 5 ? 0 : strtoull(sum.c_str() + 5, nullptr, 16);     // after "xxh3:"
        listed.push_back({item.key(), {bytes, value}});
    }
    check(manifest_text(step, listed) == text, "%s: its checksum does not match its contents (damaged, or edited?)",
          path.c_str());
    return listed;
}

// Reads the whole checkpoint and compares it with its manifest. model_alone: without the files that only training
// needs. Returns the names of its files.
inline std::vector<std::string> verify_checkpoint(const std::string& dir, bool model_alone = false) {
    const std::string path = dir + "/manifest.json";
    int step = 0;
    const FileSums listed = read_manifest(path, step);
    // A manifest must describe the step in its directory's name, so that no step is mistaken for another.
    const size_t slash = dir.find_last_not_of('/');
    const int named = step_of_name(dir.substr(0, slash + 1).substr(dir.rfind('/', slash) + 1));
    check(named < 0 || named == step, "%s: expected step %d, as the directory is named, got %d", path.c_str(), named,
          step);
    std::vector<std::string> names;
    for (const auto& [name, sum] : listed) {
        const std::string file = dir + "/" + name;
        names.push_back(name);
        if (model_alone && (name == "state.json" || starts_with(name, "optimizer_"))) { continue; }
        const uint64_t size = File(file).size;              // first, as it costs nothing
        if (size != sum.bytes) { refuse_stand_in(file); }
        check(size == sum.bytes, "%s: expected %zu bytes, as the manifest says, got %zu (truncated?)", file.c_str(),
              (size_t)sum.bytes, (size_t)size);
        const FileSum found = sum_file(file);
        check(found == sum, "%s: expected checksum %s, as the manifest says, got %s (damaged?)", file.c_str(),
              sum_text(sum.sum).c_str(), sum_text(found.sum).c_str());
    }
    for (const char* must : {"model.safetensors", "config.json", "state.json"}) {
        check(std::find(names.begin(), names.end(), must) != names.end(), "%s: lacks %s", path.c_str(), must);
    }
    return names;
}

// The same for the path of a checkpoint's weights. Does nothing if no manifest beside the file lists it.
inline void verify_weights_file(const std::string& path) {
    const size_t slash = path.rfind('/');
    const std::string dir = slash == std::string::npos ? "." : path.substr(0, slash);
    const std::string manifest = dir + "/manifest.json", name = path.substr(slash + 1);
    if (!path_exists(path) || !path_exists(manifest)) { return; }
    int step = 0;
    for (const auto& file : read_manifest(manifest, step)) {
        if (file.first == name) { verify_checkpoint(dir, true); }
    }
}

// 0: the name is free
inline ino_t inode_of(const std::string& path) {
    struct stat st;
    return stat(path.c_str(), &st) == 0 ? st.st_ino : 0;
}

// The newest checkpoint in `out` that verifies, "" if there are none. A bad one is reported, and the next older one is
// tried; it is an error if all are bad. If a run deletes or replaces the one being read, the directory is listed again.
inline std::string find_checkpoint(const std::string& out) {
    std::vector<int> steps = list_checkpoints(out);
    int lists = 1;
    for (size_t i = steps.size(); i-- > 0;) {               // the newest first
        const std::string dir = out + "/" + step_name(steps[i]);
        const ino_t inode = inode_of(dir);
        try {
            verify_checkpoint(dir);
            if (i + 1 < steps.size()) { say("warning: falling back to %s", dir.c_str()); }
            return dir;
        } catch (const Error& e) {
            if ((inode == 0 || inode_of(dir) != inode) && lists++ < 100) {
                steps = list_checkpoints(out);
                i = steps.size();
                continue;
            }
            say("warning: checkpoint %s is bad: %s", dir.c_str(), e.what());
        }
    }
    check(steps.empty(), "%s: none of its %zu checkpoints is good; the reasons are above", out.c_str(), steps.size());
    return "";
}

// ----------------------------------------------------------------------------------------------------------
// tidying

// Removes a directory and the files in it, or a symbolic link to one. A directory in it is the user's and stays, with a
// warning.
inline void remove_checkpoint_files(const std::string& dir) {
    struct stat st;
    if (lstat(dir.c_str(), &st) != 0) { return; }
    if (!S_ISDIR(st.st_mode)) { io_unlink(dir); return; }       // the link, not what it points to
    std::string below;
    for (const std::string& name : list_directory(dir)) {
        const std::string path = dir + "/" + name;
        const bool ours = lstat(path.c_str(), &st) != 0 || !S_ISDIR(st.st_mode);
        if (ours) { io_unlink(path); } else { below = path; }
    }
    if (below.empty()) { io_rmdir(dir); return; }
    say("warning: the directory %s in a deleted checkpoint is not this run's, and stays; move it away", below.c_str());
}

// Removes what a killed run has left; for the holder of the OutputLock. A checkpoint that was set aside gets its name
// back if its replacement was never published.
inline void clean_output_directory(const std::string& out) {
    // The killed run may have renamed without an fsync. Confirm the rename before the replaced checkpoint is removed.
    io_fsync_directory(out);
    for (const std::string& name : list_directory(out)) {
        const bool aside = starts_with(name, ".old_step_");
        const std::string published = out + "/" + name.substr(std::min((size_t)5, name.size()));    // without ".old_"
        if (aside && !name_is_taken(published)) {
            io_rename(out + "/" + name, published);
        } else if (aside || starts_with(name, ".tmp_step_") || starts_with(name, ".trash_step_")) {
            remove_checkpoint_files(out + "/" + name);
        }
    }
    io_fsync_directory(out);
}

constexpr uint64_t SPACE_UNKNOWN = UINT64_MAX;
// The free bytes of the disk that `out` is on; an error if `count` checkpoints of `bytes` each do not fit.
inline uint64_t check_disk_space(const std::string& out, uint64_t bytes, int64_t count = 1) {
    struct statvfs st = {};
    int error = statvfs(out.c_str(), &st) == 0 ? 0 : errno;
    if (error == 0 && st.f_blocks == 0) { error = ENOSYS; }             // what FUSE answers for an unknown size
    if (lacks_service(error, out, "the free space of the disk is not known")) { return SPACE_UNKNOWN; }
    check(error == 0, "%s: cannot tell the free space: %s", out.c_str(), strerror(error));
    const uint64_t available = (uint64_t)st.f_bavail * st.f_frsize;     // without root's reserve
    const double wanted = (double)bytes * (double)count;
    const std::string who = count == 1 ? "a checkpoint needs" : strprintf("%lld checkpoints need", (long long)count);
    const char* hint = count == 1 ? "" : "; --keep and a larger --checkpoint_every save space";
    check((double)available >= wanted, "%s: %s %s, but only %s are free on its disk%s", out.c_str(), who.c_str(),
          format_bytes(wanted).c_str(), format_bytes((double)available).c_str(), hint);
    return available;
}
