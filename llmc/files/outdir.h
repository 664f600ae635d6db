// files/outdir.h -- the output directory of a run: its lock, its checkpoints' names and manifests, which of them to believe.
//
//   OUT/.lock             held by the run that writes here
//   OUT/step_00001000/    a checkpoint, published whole by one rename; manifest.json covers its every byte
//   OUT/.tmp_step_*  .trash_step_*  .old_step_*   being written, deleted, replaced: rubbish once their run is dead
#ifndef LLMC_FILES_OUTDIR_H
#define LLMC_FILES_OUTDIR_H

#include <sys/file.h>
#include <sys/statvfs.h>

#include "../base/common.h"
#include "../base/json.h"
#include "safetensors.h"

// Makes the directory if need be and holds it against other runs for as long as the object lives.
struct OutputLock {
    std::string path;
    int fd = -1;

    explicit OutputLock(const std::string& out) : path(out + "/.lock") {
        io_mkdirs(out);
        fd = io_open(path, O_RDWR | O_CREAT);
        check(fd >= 0, "%s: the output directory is not writable: %s (--out)", out.c_str(), strerror(errno));
        try { take(out); } catch (...) { ::close(fd); throw; }
    }
    OutputLock(const OutputLock&) = delete;
    OutputLock& operator=(const OutputLock&) = delete;
    ~OutputLock() { ::close(fd); }      // the file stays: removing it would let two runs lock two files of one name

private:
    void take(const std::string& out) {
        if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
            check(errno == EWOULDBLOCK, "%s: cannot lock: %s", path.c_str(), strerror(errno));
            char owner[32] = {};
            const ssize_t n = pread(fd, owner, sizeof(owner) - 1, 0);
            die(EXIT_BAD_INPUT, "%s is in use by another run (pid %ld); wait for it or give another --out", out.c_str(),
                n > 0 ? strtol(owner, nullptr, 10) : 0L);
        }
        const std::string pid = std::to_string((long)getpid()) + "\n";
        check(io_truncate(fd, 0, path), "%s: cannot write: %s", path.c_str(), strerror(errno));
        io_write(fd, pid.data(), pid.size(), path);
    }
};

// ----------------------------------------------------------------------------------------------------------
// verifying

inline constexpr int MANIFEST_VERSION = 1;

inline std::string step_name(int step) { return strprintf("step_%08d", step); }

// step_name's inverse; -1 for any name that it does not give
inline int step_of_name(const std::string& name) {
    if (name.compare(0, 5, "step_") != 0 || name.size() < 13 || name.size() > 15) { return -1; }
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

inline std::string sum_text(uint64_t sum) { return strprintf("xxh3:%016llx", (unsigned long long)sum); }

// The manifest's own checksum covers the text in front of it, and the text must be the one we would write: so no bit of
// the manifest can change unnoticed either.
inline std::string manifest_text(int step, const std::vector<std::pair<std::string, FileSum>>& sums) {
    Json j = {
        {"format", "cable.c checkpoint"}, {"version", MANIFEST_VERSION}, {"step", step}, {"files", Json::object()}};
    for (const auto& file : sums) {
        j["files"][file.first] = {{"bytes", file.second.bytes}, {"checksum", sum_text(file.second.sum)}};
    }
    j["checksum"] = sum_text(checksum(json_text(j, 1)));
    return json_text(j, 1) + "\n";
}

// The manifest's file names, after every one of the files was found to be what the manifest says.
inline std::vector<std::string> verify_checkpoint(const std::string& dir) {
    const std::string path = dir + "/manifest.json", text = read_file(path);
    const Json j = parse_json(text, path);
    const int version = (int)json_int(j, "version", 0, INT32_MAX, path);
    check(version == MANIFEST_VERSION, "%s: version %d, but this program reads version %d", path.c_str(), version,
          MANIFEST_VERSION);
    const int step = (int)json_int(j, "step", 0, INT32_MAX, path);
    check(j.contains("files") && j["files"].is_object(), "%s: has no list of files", path.c_str());
    std::vector<std::pair<std::string, FileSum>> listed;
    for (const auto& item : j["files"].items()) {
        check(item.key().find('/') == std::string::npos, "%s: the file name %s leaves the directory", path.c_str(),
              item.key().c_str());
        const std::string sum = json_string(item.value(), "checksum", path);
        const uint64_t bytes = (uint64_t)json_int(item.value(), "bytes", 0, INT64_MAX, path);
        listed.push_back({item.key(), {bytes, sum.size() < 5 ? 0 : strtoull(sum.c_str() + 5, nullptr, 16)}});
    }
    check(manifest_text(step, listed) == text, "%s: its checksum does not fit its contents: it was damaged or edited",
          path.c_str());
    const size_t slash = dir.find_last_not_of('/');
    const int named = step_of_name(dir.substr(0, slash + 1).substr(dir.rfind('/', slash) + 1));
    check(named < 0 || named == step, "%s: describes step %d, but the directory is that of step %d", path.c_str(), step,
          named);
    std::vector<std::string> names;
    for (const auto& file : listed) {
        const std::string name = dir + "/" + file.first;
        const uint64_t size = File(name).size;
        check(size == file.second.bytes, "%s: has %zu bytes, but the manifest says %zu: truncated or damaged",
              name.c_str(), (size_t)size, (size_t)file.second.bytes);
        const FileSum found = sum_file(name);
        check(found == file.second, "%s: checksum %s, but the manifest says %s: the file is damaged", name.c_str(),
              sum_text(found.sum).c_str(), sum_text(file.second.sum).c_str());
        names.push_back(file.first);
    }
    for (const char* must : {"model.safetensors", "config.json", "state.json"}) {
        check(std::find(names.begin(), names.end(), must) != names.end(), "%s: does not list %s", path.c_str(), must);
    }
    return names;
}

// The newest checkpoint in `out` that verifies, "" when there is none at all. A bad one is reported and the next older
// one tried; with no_fallback it is an error, as it is when all are bad.
inline std::string find_checkpoint(const std::string& out, bool no_fallback) {
    const std::vector<int> steps = list_checkpoints(out);
    for (size_t i = steps.size(); i-- > 0;) {
        const std::string dir = out + "/" + step_name(steps[i]);
        try {
            verify_checkpoint(dir);
            if (i + 1 < steps.size()) { fprintf(stderr, "warning: falling back to %s\n", dir.c_str()); }
            return dir;
        } catch (const Error& e) {
            if (no_fallback) { die(e.code, "the newest checkpoint is bad and --no_fallback is given: %s", e.what()); }
            fprintf(stderr, "warning: checkpoint %s is bad: %s\n", dir.c_str(), e.what());
        }
    }
    check(steps.empty(), "%s: none of its %zu checkpoints verifies; the reasons are above", out.c_str(), steps.size());
    return "";
}

// ----------------------------------------------------------------------------------------------------------
// tidying

// Removes a directory and the files in it, or a symbolic link to one.
inline void remove_checkpoint_files(const std::string& dir) {
    struct stat st;
    if (lstat(dir.c_str(), &st) != 0) { return; }
    if (!S_ISDIR(st.st_mode)) { io_unlink(dir); return; }
    for (const std::string& name : list_directory(dir)) { io_unlink(dir + "/" + name); }
    io_rmdir(dir);
}

// Removes what a killed run left behind; for the holder of the OutputLock. A checkpoint that was set aside in order to
// be replaced goes back when its replacement never came.
inline void clean_output_directory(const std::string& out) {
    io_fsync_directory(out);        // a rename that the killed run did not see confirmed is, before what it replaced goes
    for (const std::string& name : list_directory(out)) {
        const bool aside = name.compare(0, 10, ".old_step_") == 0;
        if (aside && !path_exists(out + "/" + name.substr(5))) {
            io_rename(out + "/" + name, out + "/" + name.substr(5));
        } else if (aside || name.compare(0, 10, ".tmp_step_") == 0 || name.compare(0, 12, ".trash_step_") == 0) {
            remove_checkpoint_files(out + "/" + name);
        }
    }
    io_fsync_directory(out);
}

// The free bytes of the disk under `out`; an error when it cannot take `count` checkpoints of so many bytes.
inline uint64_t check_disk_space(const std::string& out, uint64_t bytes, int64_t count = 1) {
    struct statvfs st;
    check(statvfs(out.c_str(), &st) == 0, "%s: cannot ask for free space: %s", out.c_str(), strerror(errno));
    const uint64_t available = (uint64_t)st.f_bavail * st.f_frsize;
    const double wanted = (double)bytes * (double)count;
    const std::string who = count == 1 ? "a checkpoint needs" : strprintf("%lld checkpoints need", (long long)count);
    check((double)available >= wanted, "%s: %s %s, but only %s are free on its disk%s", out.c_str(), who.c_str(), format_bytes(wanted).c_str(),
          format_bytes((double)available).c_str(), count == 1 ? "" : "; --keep and a larger --checkpoint_every save space");
    return available;
}

#endif
