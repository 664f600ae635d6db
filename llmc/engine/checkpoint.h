// engine/checkpoint.h -- a run's state on disk: written whole or not at all, verified before it is used.
//
//   OUT/step_00001000/  model.safetensors        parameters under Hugging Face's names
//                       config.json              the model's shape, transformers' keys plus "position"
//                       optimizer_RANK.state     the rank's part of Adam's moments (a safetensors file, under a name
//                                                that no glob for *.safetensors meets)
//                       state.json               the trainer's own: step, next sample, guard, options
//                       manifest.json            size and checksum of each of the above, and its own checksum
//
// A checkpoint is written under a temporary name, every file is fsynced, and one rename publishes it. So a killed run
// leaves the old checkpoint or the new one, whole.
#pragma once

#include <map>
#include <memory>
#include <random>
#include <tuple>

#include <sys/file.h>
#include <sys/statvfs.h>

#include "../base/common.h"
#include "comm.h"
#include "json.h"
#include "safetensors.h"

// ----------------------------------------------------------------------------------------------------------
// the output directory of a run
//
//   OUT/.lock             held by the run that writes here
//   OUT/step_00001000/    a checkpoint
//   OUT/.tmp_step_*       a checkpoint that is being written    } if its run is dead, clean_output_directory()
//   OUT/.trash_step_*     ... deleted                           } removes it,
//   OUT/.old_step_*       ... replaced                          } or gives it its name back

// Makes the directory if needed, and keeps other runs out of it while the object lives. The kernel releases an flock
// when its process dies, so a killed run leaves no stale lock.
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

// at least 8 digits, so that byte order is the order of the steps
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

// ----------------------------------------------------------------------------------------------------------
// verifying: manifest.json
//
//   {"format", "version", "step", "files": {NAME: {"bytes", "checksum"}, ...}, "checksum"}

inline constexpr int MANIFEST_VERSION = 1;

using FileSums = std::vector<std::pair<std::string, FileSum>>;       // by name

// The manifest's own checksum covers the text before it, and a reader expects exactly this text, so that no bit of the
// manifest can change unnoticed.
inline std::string manifest_text(int step, const FileSums& sums) {
    Json j = {
        {"format", "cable.c checkpoint"}, {"version", MANIFEST_VERSION}, {"step", step}, {"files", Json::object()}};
    for (const auto& file : sums) {
        j["files"][file.first] = {{"bytes", file.second.bytes}, {"checksum", sum_text(file.second.sum)}};
    }
    j["checksum"] = sum_text(checksum(json_text(j, 1)));
    return json_text(j, 1) + "\n";
}

// The files that a manifest lists, and its step; an error if it is damaged.
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

// Reads a whole checkpoint and compares it with its manifest. model_alone: skips the contents of files that only
// training needs. Returns the names of all files.
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
        const uint64_t size = File(file).size;              // before the checksum, as it costs nothing
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

// Verifies the checkpoint whose weights are at `path`; does nothing if no manifest beside the file lists it.
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

// The newest good checkpoint in `out`; "" if there are none. Bad ones are reported and skipped; it is an error if all
// are bad. If a run deletes or replaces a checkpoint while it is read, the directory is listed again.
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

// Removes a directory and its files, or a symbolic link to a directory. A directory inside is the user's: it stays,
// with a warning.
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

// Removes the left-overs of a killed run; for the holder of the OutputLock. A checkpoint that was set aside gets its
// name back if its replacement was never published.
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
// The free bytes on the disk of `out`; an error if `count` checkpoints of `bytes` each do not fit
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

// ----------------------------------------------------------------------------------------------------------
// the contents of a checkpoint

// Views of the trainer's device memory, where no kernel may still be writing, and the small files
struct Checkpoint {
    const TensorTable* table = nullptr;
    const std::vector<FileTensor>* files = nullptr;                 // the names of the parameters in the file
    float* params = nullptr;                                        // (table->total)
    float *m = nullptr, *v = nullptr;                               // Adam's moments; may be null
    bool complete = true;                                           // m and v hold all moments, in table's layout
    std::vector<TensorPiece> held;                                  // otherwise these pieces
    Json config, state;                                             // config.json, state.json
    std::vector<std::pair<std::string, std::string>> extra;         // further small files: name, contents
};

// The parameters as the items of a safetensors file, which fetch their rows from the device when they are written.
// Transposed matrices are (out,in) on the device, as our matmul wants them, and (in,out) in Hugging Face's GPT-2.
inline std::vector<SafetensorsItem> model_items(const Checkpoint& c) {
    auto turned = std::make_shared<std::vector<float>>();           // the transposed matrix that is being written
    std::vector<SafetensorsItem> items;
    for (const FileTensor& f : *c.files) {
        const FileView view = file_view(*c.table, f);
        const float* from = c.params + view.offset;
        if (!view.transposed) {
            items.push_back({f.name, view.shape(), [=](float* out, size_t row0, size_t rows) {
                copy_to_host(out, from + row0 * view.cols, rows * view.cols * sizeof(float), Stream(0));
            }});
            continue;
        }
        items.push_back({f.name, view.shape(), [=](float* out, size_t row0, size_t rows) {
            if (row0 == 0) {                        // rows are written in order: transpose all at the first
                std::vector<float> host(view.size());
                turned->resize(view.size());
                copy_to_host(host.data(), from, view.size() * sizeof(float), Stream(0));
                transpose_matrix(turned->data(), host.data(), view.rows, view.cols);
            }
            // a row of the file is a column of the tensor: view.rows elements
            memcpy(out, turned->data() + row0 * view.rows, rows * view.rows * sizeof(float));
        }});
    }
    return items;
}

// Adam's moments, optimizer_RANK.state: each rank writes its part, which any number of ranks can read.

// Elements first .. first + size - 1 of a tensor's m or v, in the order of its layers. In the file they are a vector:
// "m.<tensor>" if this is the whole tensor, otherwise "m.<tensor>@<first>"
struct MomentRun {
    std::string name;                   // "m.<tensor>"
    size_t first, size;
    size_t whole;                       // elements of the tensor
    float* data;
    std::vector<TensorPiece> pieces;    // their places in data, in order

    bool all() const { return size == whole; }
    std::string file_name() const { return all() ? name : name + "@" + std::to_string(first); }
    // Calls f(data, from, n) for each piece of elements begin .. end - 1: n elements, the first of them number `from`
    template <class F> void each(size_t begin, size_t end, F f) const {
        for (const TensorPiece& p : pieces) {
            const size_t from = std::max(begin, p.first), to = std::min(end, p.first + p.size);
            if (from < to) { f(data + p.at + (from - p.first), from, to - from); }
        }
    }
};
// all m, then all v; null ones are left out
inline std::vector<MomentRun> moment_runs(const Checkpoint& c) {
    std::vector<TensorPiece> held = c.complete ? c.table->pieces({0, c.table->total}) : c.held;
    const auto before = [](const TensorPiece& a, const TensorPiece& b) {
        return std::tie(a.tensor, a.first) < std::tie(b.tensor, b.first);
    };
    std::sort(held.begin(), held.end(), before);
    std::vector<MomentRun> runs;
    for (float* data : {c.m, c.v}) {
        size_t last = SIZE_MAX;                             // the tensor of the last run
        for (size_t i = 0; data != nullptr && i < held.size(); i++) {
            const TensorPiece& p = held[i];
            const TensorSpec& s = c.table->specs[p.tensor];
            if (p.tensor != last || runs.back().first + runs.back().size != p.first) {
                runs.push_back({(data == c.m ? "m." : "v.") + s.name, p.first, 0, s.size(), data, {}});
            }
            last = p.tensor;
            runs.back().size += p.size;
            runs.back().pieces.push_back(p);
        }
    }
    return runs;
}

inline std::string optimizer_file(int rank) { return strprintf("optimizer_%d.state", rank); }

// the moments as the items of a safetensors file
inline std::vector<SafetensorsItem> optimizer_items(const Checkpoint& c) {
    std::vector<SafetensorsItem> items;
    for (const MomentRun& run : moment_runs(c)) {
        items.push_back({run.file_name(), {run.size}, [run](float* out, size_t first, size_t count) {
            const size_t begin = run.first + first;
            run.each(begin, begin + count, [&](const float* data, size_t from, size_t n) {
                copy_to_host(out + (from - begin), data, n * sizeof(float), Stream(0));
            });
        }});
    }
    return items;
}

// For old readers: the first element, 0, of each tensor that is complete in the file
inline Json optimizer_metadata(const Checkpoint& c) {
    Json starts = Json::object();
    for (const MomentRun& run : moment_runs(c)) {
        if (run.all()) { starts["start." + run.name.substr(2)] = "0"; }
    }
    return starts;
}

// ----------------------------------------------------------------------------------------------------------
// saving

// the most bytes that a checkpoint takes on the disk, with 1 MiB and 256 bytes per tensor for headers
inline uint64_t checkpoint_bytes(const Checkpoint& c) {
    uint64_t bytes = (1u << 20) + json_text(c.config, 2).size() + json_text(c.state, 2).size() + c.files->size() * 256;
    for (const FileTensor& f : *c.files) { bytes += file_view(*c.table, f).size() * sizeof(float); }
    const size_t moments = (c.m != nullptr) + (c.v != nullptr);
    for (const TensorSpec& s : c.table->specs) { bytes += moments * s.size() * sizeof(float); }
    for (const auto& file : c.extra) { bytes += file.second.size(); }
    return bytes;
}

// Deletes all but the last `keep` checkpoints up to `step`, which was just saved (keep 0: none). Later ones are bad:
// this run fell back from them when it resumed, and replaces them when it reaches their steps.
inline void retire_checkpoints(const std::string& out, int step, int keep) {
    std::vector<int> steps = list_checkpoints(out);             // ascending; in the end the ones to delete
    steps.erase(std::upper_bound(steps.begin(), steps.end(), step), steps.end());
    if (keep <= 0 || steps.size() <= (size_t)keep) { return; }
    steps.resize(steps.size() - (size_t)keep);
    verify_checkpoint(out + "/" + step_name(step));     // delete nothing before the new one was read back
    std::string failure;                                // after a failure the remaining ones are deleted all the same
    for (int s : steps) {
        const std::string trash = out + "/.trash_" + step_name(s);      // one rename, so that it never looks half there
        try {
            remove_checkpoint_files(trash);
            io_rename(out + "/" + step_name(s), trash);
            remove_checkpoint_files(trash);
        } catch (const Error& e) {
            failure = e.what();
        }
    }
    check(failure.empty(), "%s", failure.c_str());
}

// Writes the checkpoint OUT/step_<step>. Rank 0 calls begin(), publish() and retire(); every rank that holds moments
// calls write_part(). After an error call undo(): earlier checkpoints stay, the new one too if only its fsync failed.
struct CheckpointSave {
    std::string out, path, temporary, old;
    int step;
    const Checkpoint& c;
    uint64_t bytes = 0, available = 0;      // needed, and free on the disk; 0: begin() has not asked
    bool aside = false;                     // an existing checkpoint of this name has been renamed to `old`
    bool published = false;                 // the new one has its name

    CheckpointSave(const std::string& out, int step, const Checkpoint& c)
        : out(out), path(out + "/" + step_name(step)), temporary(out + "/.tmp_" + step_name(step)),
          old(out + "/.old_" + step_name(step)), step(step), c(c) {}

    // 1 makes a directory under a temporary name
    void begin() {
        bytes = checkpoint_bytes(c);
        available = check_disk_space(out, bytes);
        remove_checkpoint_files(temporary);
        io_mkdir(temporary);
    }
    // 2 writes and fsyncs a rank's moments, and on rank 0 all other files
    FileSums write_part(int rank) const {
        FileSums sums;
        const auto add_text = [&](const std::string& name, const std::string& text) {
            if (rank == 0) { sums.push_back({name, write_text(temporary + "/" + name, text)}); }
        };
        const auto add_tensors = [&](const std::string& name, const auto& items, const Json& metadata) {
            sums.push_back({name, write_safetensors(temporary + "/" + name, items, metadata)});
        };
        if (rank == 0) { add_tensors("model.safetensors", model_items(c), Json::object()); }
        add_text("config.json", json_text(c.config, 2) + "\n");
        if (c.m != nullptr || c.v != nullptr) {
            add_tensors(optimizer_file(rank), optimizer_items(c), optimizer_metadata(c));
        }
        add_text("state.json", json_text(c.state, 2) + "\n");
        for (const auto& file : c.extra) { add_text(file.first, file.second); }
        return sums;
    }
    // 3 publishes the checkpoint. sums: of all files
    void publish(const FileSums& sums) {
        write_text(temporary + "/manifest.json", manifest_text(step, sums));        // last: it vouches for the others
        io_fsync_directory(temporary);
        if (name_is_taken(path)) {          // make room: a rename onto a directory that has files fails
            remove_checkpoint_files(old);
            io_rename(path, old);
            aside = true;
        }
        io_rename(temporary, path);         // a kill here leaves `old`, which clean_output_directory() puts back
        published = true;
        io_fsync_directory(out);
    }
    // 4 deletes old checkpoints, now that the new one is safe
    void retire(int keep) const {
        try {
            remove_checkpoint_files(old);
            retire_checkpoints(out, step, keep);
        } catch (const Error& e) {
            say("warning: %s is saved, but old checkpoints could not be deleted: %s", path.c_str(), e.what());
        }
    }
    // Removes the new files; if the disk has not confirmed a replacement, the replaced checkpoint comes back.
    void undo() {
        if (available == 0) { return; }     // begin() has not started
        try {
            if (aside && published) { io_rename(path, temporary); }
            if (aside) { io_rename(old, path); }
            if (!published) { remove_checkpoint_files(temporary); }
            clean_output_directory(out);    // fsyncs the renames before it removes anything
        } catch (const Error&) {}           // the first error is the one to report
    }
    std::string explain(const std::string& error) const {
        if (available == 0 || available == SPACE_UNKNOWN) { return error; }
        return strprintf("a checkpoint needs %s, %s were free: %s", format_bytes((double)bytes).c_str(),
                         format_bytes((double)available).c_str(), error.c_str());
    }
};

// Dies unless all ranks can write into a directory and see rank 0's file, which a network file system may show late.
inline void check_shared_directory(const std::string& out) {
    if (comm().size == 1) { return; }
    const std::string path = out + "/.tmp_step_shared";         // a name that clean_output_directory() removes
    const std::string text = comm_text(std::to_string(std::random_device()()), "the probe of --out");
    rank0_works([&] { write_text(path, text); }, "the probe of --out");
    const double end = wall_seconds() + std::min(10.0, comm().timeout / 2);
    const auto shared = [&] { return path_exists(path) && read_file(path) == text && access(out.c_str(), W_OK) == 0; };
    while (!shared() && wall_seconds() < end) { usleep(20000); }
    std::vector<char> all((size_t)comm().size);
    const char mine = shared();
    comm_all_gather(all.data(), &mine, 1, "the probe of --out");
    if (comm().rank == 0) { io_unlink(path); }
    const size_t blind = (size_t)(std::find(all.begin(), all.end(), 0) - all.begin());
    check(blind == all.size(), "--out %s: rank %zu cannot write there, or cannot read what rank 0 has written: "
          "expected a directory that all ranks share, as each saves its part of the moments there", out.c_str(), blind);
}

// A collective: saves c as the checkpoint of `step` in `out`. Returns the error, "" if there was none. The ranks go
// through the stages together. sync_log(): fsyncs the log, which must reach `step`
template <class Sync>
std::string save_on_ranks(const std::string& out, int step, const Checkpoint& c, int keep, Sync sync_log) {
    const bool first = comm().rank == 0;
    CheckpointSave save(out, step, c);
    FileSums sums;
    std::string failure;
    // The ranks with `works` do this stage, unless an earlier one has failed.
    const auto stage = [&](bool works, auto work) {
        if (!failure.empty()) { return; }
        std::string mine;
        const auto guarded = [&] {
            try {
                work();
            } catch (const Error& e) {
                if (e.code != EXIT_BAD_INPUT) { throw; }        // a failed device is a different error
                mine = (first ? "" : strprintf("rank %d: ", comm().rank)) + e.what();
            }
        };
        ranks_work(works, guarded, "checkpoint");
        failure = first_text(mine, "checkpoint");
    };
    // 1 the log; a directory under a temporary name
    stage(first, [&] { sync_log(); save.begin(); });
    // 2 the files; rank 0 collects the checksums of the other ranks' moments
    stage(true, [&] { sums = save.write_part(comm().rank); });
    if (failure.empty()) {
        std::vector<FileSum> all((size_t)comm().size);
        comm_all_gather(all.data(), &sums.back().second, 1, "checkpoint");
        for (int rank = 1; rank < comm().size && first; rank++) {
            sums.push_back({optimizer_file(rank), all[(size_t)rank]});
        }
    }
    // 3 publish it and delete old ones; on failure, undo
    stage(first, [&] { save.publish(sums); });
    stage(first, [&] { save.retire(keep); });
    if (failure.empty()) { return ""; }
    rank0_works([&] { save.undo(); }, "checkpoint");
    return strprintf("step %d is not saved: ", step) + first_text(first ? save.explain(failure) : "", "checkpoint");
}

// ----------------------------------------------------------------------------------------------------------
// loading

// An error unless the file holds exactly these tensors, all in float32.
inline void check_tensors(const Safetensors& file, const std::vector<std::pair<std::string, Shape>>& wanted) {
    const char* path = file.file.path.c_str();
    for (const auto& want : wanted) {
        const SafetensorsEntry& e = file.entry(want.first);
        check(e.shape == want.second && e.dtype == "F32", "%s: %s: expected F32 %s, got %s %s", path, e.name.c_str(),
              shape_text(want.second).c_str(), e.dtype.c_str(), shape_text(e.shape).c_str());
    }
    for (const SafetensorsEntry& e : file.entries) {
        const bool known =
            std::any_of(wanted.begin(), wanted.end(), [&](const auto& want) { return want.first == e.name; });
        check(known, "%s: expected %zu tensors, got %zu; this model has no %s", path, wanted.size(),
              file.entries.size(), e.name.c_str());
    }
}

// The moments in a checkpoint's files, which any number of ranks have written, each with any part of each tensor
struct StoredMoments {
    struct Run { const Safetensors* file; const SafetensorsEntry* entry; size_t first, size; };
    std::vector<std::unique_ptr<Safetensors>> files;
    std::map<std::string, std::vector<Run>> runs;           // by "m.<tensor>", in order

    // An error unless the files hold each element of c's tensors exactly once
    StoredMoments(const std::string& dir, const Checkpoint& c) {
        int step;
        for (const auto& [name, sum] : read_manifest(dir + "/manifest.json", step)) {
            const bool old = name == "optimizer_0.safetensors";     // its name in old checkpoints
            if (!old && !(starts_with(name, "optimizer_") && ends_with(name, ".state"))) { continue; }
            files.push_back(std::make_unique<Safetensors>(dir + "/" + name));
            for (const SafetensorsEntry& e : files.back()->entries) { add(*files.back(), e, c); }
        }
        check(!files.empty(), "%s: has no optimizer_0.state, without which training cannot continue", dir.c_str());
        for (const char* kind : {"m.", "v."}) {
            for (const TensorSpec& s : c.table->specs) { check_whole(kind + s.name, s.size()); }
        }
    }
    // Sets the elements of a run on the device.
    void read(const MomentRun& run) const {
        std::vector<float> host;
        for (const Run& r : runs.at(run.name)) {
            const size_t begin = std::max(run.first, r.first), end = std::min(run.first + run.size, r.first + r.size);
            for (size_t at = begin; at < end; at += COPY_BLOCK) {
                const size_t n = std::min(COPY_BLOCK, end - at);
                host.resize(n);
                r.file->read_elements(*r.entry, host.data(), at - r.first, n);
                run.each(at, at + n, [&](float* data, size_t from, size_t count) {
                    copy_to_device(data, host.data() + (from - at), count * sizeof(float), Stream(0));
                });
            }
        }
    }

private:
    void add(const Safetensors& file, const SafetensorsEntry& e, const Checkpoint& c) {
        const char *path = file.file.path.c_str(), *name = e.name.c_str();
        // 1 its name
        const size_t sign = e.name.rfind('@');
        const std::string whole = e.name.substr(0, sign);
        const bool moment = starts_with(whole, "m.") || starts_with(whole, "v.");
        const int tensor = moment ? c.table->find(whole.substr(2)) : -1;
        check(tensor >= 0, "%s: expected moments of the model's %zu tensors; this model has no %s", path,
              c.table->specs.size(), name);
        int64_t number = 0;
        check(sign == std::string::npos || parse_value(e.name.substr(sign + 1), at_least(0), number),
              "%s: %s: expected the number of its first element after '@'", path, name);
        const size_t first = (size_t)number;
        const std::string start = "start." + whole.substr(2);
        check(!file.metadata.contains(start) || json_string(file.metadata, start, file.file.path) == "0",
              "%s: %s: expected 0", path, start.c_str());
        // 2 its elements
        const size_t size = c.table->specs[(size_t)tensor].size();
        const bool inside = e.shape.size() == 1 && first <= size && e.shape[0] <= size - first &&
                            (sign != std::string::npos || e.shape[0] == size);
        const std::string of = sign == std::string::npos ? "" : strprintf(" of %zu at the most", size - first);
        check(inside && e.dtype == "F32", "%s: %s: expected F32 %s%s, got %s %s", path, name,
              shape_text({size - first}).c_str(), of.c_str(), e.dtype.c_str(), shape_text(e.shape).c_str());
        runs[whole].push_back({&file, &e, first, e.shape[0]});
    }
    void check_whole(const std::string& name, size_t size) {
        std::vector<Run>& all = runs[name];
        std::sort(all.begin(), all.end(), [](const Run& a, const Run& b) { return a.first < b.first; });
        size_t at = 0;
        const char* path = files[0]->file.path.c_str();
        check(!all.empty(), "%s: %s is missing", path, name.c_str());
        for (const Run& run : all) {
            check(run.first == at, "%s: %s: expected its element %zu next, got %zu (another rank's file is missing, or "
                  "there twice?)", run.file->file.path.c_str(), name.c_str(), at, run.first);
            at += run.size;
        }
        check(at == size, "%s: %s: expected %zu elements in all files, got %zu", path, name.c_str(), size, at);
    }
};

// Reads a directory that find_checkpoint() returned into c's memory. The constructor checks everything, also c.config
// unless it is null, before the first element changes.
struct CheckpointReader {
    const Checkpoint& c;
    Safetensors model;
    std::vector<MomentRun> moments;
    std::unique_ptr<StoredMoments> stored;
    Json state;

    CheckpointReader(const std::string& dir, const Checkpoint& c)
        : c(c), model(dir + "/model.safetensors"), moments(moment_runs(c)) {
        // 1 the configuration and the parameters
        std::vector<std::pair<std::string, Shape>> wanted;
        for (const FileTensor& f : *c.files) { wanted.push_back({f.name, file_view(*c.table, f).shape()}); }
        const std::string config_path = dir + "/config.json";
        const Json config = read_json(config_path);
        if (!c.config.is_null()) { check_config(config, c.config, config_path); }
        check_tensors(model, wanted);
        // 2 the moments, which only training needs
        if (!moments.empty()) { stored = std::make_unique<StoredMoments>(dir, c); }
        state = read_json(dir + "/state.json");
    }
    // data (part), on the device: the parameters of a part of the layout, which contains whole layers of each tensor
    void read_parameters(float* data, Slice part) const {
        for (const FileTensor& f : *c.files) {
            const SafetensorsEntry& e = model.entry(f.name);
            const auto read = [&](float* out, size_t at, size_t count) { model.read_elements(e, out, at, count); };
            load_view(data, part, file_view(*c.table, f), read, model.file.path, f.name);
        }
    }
    void read_moments() const {
        for (const MomentRun& run : moments) { stored->read(run); }
    }
};
