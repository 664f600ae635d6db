// run/data_record.h -- what a run has learned from, kept in its checkpoints, so that it is not resumed on other data.
//
// state.json:  "data": {"train_files": [{"file": "shard_000001.bin", "bytes": 200001024, "blocks": "xxh3:...",
//                                        "sha256": "...", "mtime": ..., "inode": ...}, ...], "val_files": [...]}
//
// A file is known by its last name, its size and its contents, wherever it lies. 64 blocks of it are compared when a
// run starts. The whole of it is summed by a thread in the background, whose verdict is there before the first
// checkpoint: it is compared with the manifest that data/ leaves beside the shards, and with the run to be resumed. A
// resumed run takes that sum from the checkpoint as long as size, time and inode have not changed.
#ifndef LLMC_RUN_DATA_RECORD_H
#define LLMC_RUN_DATA_RECORD_H

#include <atomic>
#include <mutex>
#include <thread>

#include <sched.h>

#include "../base/json.h"
#include "../base/sha256.h"
#include "../use/progress.h"
#include "flag_parser.h"

struct DataFile {
    std::string flag, path;                 // "train_files", and where the file is now
    uint64_t bytes = 0, blocks = 0;         // blocks: see sampled_sum
    int64_t mtime = 0;                      // in ns
    uint64_t inode = 0;
    std::string sha256;                     // of all of it; "" until it is known
    std::string listed;                     // what the manifest beside it says of it; "": nothing
    std::string resumed;                    // what the checkpoint says that the run is resumed from

    std::string name() const { return path.substr(path.rfind('/') + 1); }
    Json json() const {
        return {{"file", name()}, {"bytes", bytes}, {"blocks", strprintf("xxh3:%016llx", (unsigned long long)blocks)},
                {"sha256", sha256}, {"mtime", mtime}, {"inode", inode}};
    }
};

// The checksum of 64 blocks of 64 KiB, the first and the last of the file among them; of all of a small file.
inline uint64_t sampled_sum(const File& file) {
    const uint64_t block = 65536, count = 64;
    std::vector<uint8_t> bytes(block);
    uint64_t sum = 0;
    if (file.size <= block * count) {
        bytes.resize(file.size);
        file.read(bytes.data(), file.size, 0);
        return checksum(bytes.data(), bytes.size());
    }
    const uint64_t last = file.size - block;
    for (uint64_t i = 0; i < count; i++) {
        file.read(bytes.data(), block, last / (count - 1) * i + last % (count - 1) * i / (count - 1));
        sum = checksum(bytes.data(), block, sum);
    }
    return sum;
}

// How the files of a flag differ from those that a checkpoint lists, "" if they do not: "shard_000002.bin has gone".
// `what` names the checkpoint in messages.
inline std::string data_difference(const Json& was, const Json& is, const std::string& what) {
    check(was.is_array(), "%s: data: expected an array of files, got %s", what.c_str(), json_excerpt(was).c_str());
    std::set<std::string> before, now;
    for (const Json& f : was) { before.insert(json_string(f, "file", what)); }
    for (const Json& f : is) { now.insert(json_string(f, "file", what)); }
    for (const std::string& name : before) { if (now.count(name) == 0) { return name + " has gone"; } }
    for (const std::string& name : now) { if (before.count(name) == 0) { return name + " was added"; } }
    if (was.size() != is.size()) { return strprintf("%zu files became %zu", was.size(), is.size()); }
    for (size_t i = 0; i < is.size(); i++) {
        const std::string name = json_string(is[i], "file", what);
        if (json_string(was[i], "file", what) != name) { return "the order of the files has changed"; }
        const Json &old_size = json_at(was[i], "bytes", what), &size = json_at(is[i], "bytes", what);
        if (old_size != size) {
            return name + " has changed from " + json_excerpt(old_size) + " to " + json_excerpt(size) + " bytes";
        }
        if (json_at(was[i], "blocks", what) != json_at(is[i], "blocks", what)) { return name + " has other contents"; }
    }
    return "";
}

// {"shard_000001.bin": its sha256} of the manifest.json that data/ has left in a directory; empty if there is none.
inline std::map<std::string, std::string> listed_sums(const std::string& directory) {
    std::map<std::string, std::string> sums;
    const std::string path = directory + "/manifest.json";
    if (!path_exists(path)) { return sums; }
    const Json manifest = read_json(path);
    if (!manifest.is_object() || !manifest.contains("shards")) { return sums; }    // of something else
    for (const Json& shard : manifest["shards"]) {
        sums[json_string(shard, "file", path)] = json_string(shard, "sha256", path);
    }
    return sums;
}

// The files of a run, on the rank that writes its checkpoints.
struct DataRecord {
    std::vector<DataFile> files;
    Names allowed;                          // --allow_change: flags whose files may differ

    explicit DataRecord(const Names& allowed) : allowed(allowed) {}
    DataRecord(const DataRecord&) = delete;
    DataRecord& operator=(const DataRecord&) = delete;
    ~DataRecord() {
        stopping = true;
        if (reader.joinable()) { reader.join(); }
    }

    // the files of a flag
    void add(const std::string& flag, const std::vector<std::string>& paths) {
        std::map<std::string, std::map<std::string, std::string>> manifests;        // by directory
        for (const std::string& path : paths) {
            const File file(path);
            struct stat st = {};
            check(fstat(file.fd, &st) == 0, "%s: cannot stat: %s", path.c_str(), strerror(errno));
            DataFile f;
            f.flag = flag;
            f.path = path;
            f.bytes = file.size;
            f.blocks = sampled_sum(file);
            f.mtime = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
            f.inode = (uint64_t)st.st_ino;
            const size_t slash = path.rfind('/');
            const std::string directory = slash == std::string::npos ? "." : path.substr(0, slash);
            if (manifests.count(directory) == 0) { manifests[directory] = listed_sums(directory); }
            f.listed = manifests[directory][f.name()];
            files.push_back(f);
        }
        check_length(flag, paths.size());
    }

    // state.json's "data"
    Json json() const {
        const std::lock_guard<std::mutex> lock(mutex);
        Json j = Json::object();
        for (const DataFile& f : files) { j[f.flag].push_back(f.json()); }
        return j;
    }

    // Compares with the state.json of the run to be resumed, which `what` names, and takes over the sums it has.
    void resume(const Json& state, const std::string& what) {
        if (!state.contains("data")) { return; }            // written before there was a record
        const Json now = parse_json(json_text(json()), "data");
        for (const auto& item : json_at(state, "data", what).items()) {
            const std::string& flag = item.key();
            const Json& was = item.value();
            if (!now.contains(flag)) { continue; }          // this run does not read them
            const Json& is = now.at(flag);
            const std::string difference = data_difference(was, is, what);
            if (!difference.empty()) {
                judge(flag, "since " + what + " was written, " + difference);
                continue;
            }
            size_t i = 0;
            for (DataFile& f : files) {
                if (f.flag != flag) { continue; }
                const Json& old = was[i];
                f.resumed = json_string(old, "sha256", what);
                const bool untouched = json_at(old, "mtime", what) == is[i].at("mtime") &&
                                       json_at(old, "inode", what) == is[i].at("inode");
                if (untouched) { f.sha256 = f.resumed; }
                i++;
            }
        }
    }

    // Begins to read the files in the background.
    void start() {
        const Doing starting("starting the thread that checks the data");
        for (const DataFile& f : files) { total += f.sha256.empty() ? f.bytes : 0; }
        reading = true;
        reader = std::thread([this] {
            const sched_param priority = {};
            sched_setscheduler(0, SCHED_IDLE, &priority);       // only what time training leaves over
            read_until(INFINITY);
        });
    }

    // Whether all is read; dies when a file that was read is not what it should be. With `seconds`, the caller has
    // nothing better to do: it goes on for that long where the thread was, which may hardly run on a busy machine.
    bool wait(double seconds) {
        const Doing checking("checking the data");
        if (seconds > 0 && reader.joinable()) {
            stopping = true;
            reader.join();
            stopping = false;
        }
        std::unique_lock<std::mutex> lock(mutex);
        if (seconds > 0 && reading) {
            lock.unlock();
            read_until(wall_seconds() + seconds);
            lock.lock();
        }
        const bool read = !reading;
        std::vector<std::pair<std::string, std::string>> found;
        found.swap(findings);
        const std::string error = failure;
        if (starved) { throw std::bad_alloc(); }
        lock.unlock();
        check(error.empty(), "%s", error.c_str());
        for (const auto& finding : found) { judge(finding.first, finding.second); }
        if (seconds > 0 && !read) { progress.update(bytes_read, total); }
        return read;
    }

private:
    mutable std::mutex mutex;               // of all that the thread shares: files[].sha256 and what follows
    bool reading = false;                   // there is more to read
    std::vector<std::pair<std::string, std::string>> findings;      // flag, what is wrong with a file
    std::string failure;                    // why the thread ended early
    bool starved = false;                   // or that it found no memory
    std::atomic<bool> stopping{false};
    std::atomic<uint64_t> bytes_read{0};
    uint64_t total = 0;                     // bytes to read
    std::thread reader;
    size_t current = 0;                     // where the reading is: in this file; `at` of its bytes are in `sum`
    std::unique_ptr<File> file;
    uint64_t at = 0;
    Sha256 sum;
    Progress progress{"checking the data before the first checkpoint"};

    // A checkpoint whose state.json is too long to be read could not be resumed. The flags are in there too, and the
    // 64 digits of each file's sum are still to come.
    void check_length(const std::string& flag, size_t count) const {
        const uint64_t room = JSON_MAX_BYTES - 300000;
        const uint64_t bytes = json_text(Json{{"data", json()}}, 2).size() + 64 * files.size();
        const auto most = (unsigned long long)(room * files.size() / bytes);
        check(bytes <= room, "--%s: expected at most %llu files, for which a checkpoint's list of them has room, got "
              "%zu; join them into larger ones", flag.c_str(), most, count);
    }

    // An error, or where the user has allowed it, or for validation data, a message.
    void judge(const std::string& flag, const std::string& finding) const {
        const bool named = std::find(allowed.begin(), allowed.end(), flag) != allowed.end();
        check(named || flag == "val_files", "--%s: %s; restore the data, or --allow_change %s", flag.c_str(),
              finding.c_str(), flag.c_str());
        say("warning: --%s: %s", flag.c_str(), finding.c_str());
    }

    void read_until(double time) {
        std::string error;
        bool no_memory = false;
        try {
            for (; current < files.size(); current++) {
                if (files[current].sha256.empty() && !read_one(files[current], time)) { return; }
            }
        } catch (const Error& e) {
            error = e.what();
        } catch (const std::bad_alloc&) {
            no_memory = true;
        }
        const std::lock_guard<std::mutex> lock(mutex);
        failure.swap(error);
        starved = no_memory;
        reading = false;
    }

    // Sums a file, or continues; false if it was told to stop, or the time has come.
    bool read_one(DataFile& f, double time) {
        if (at == 0) {
            file = std::make_unique<File>(f.path);
            sum = Sha256();
        }
        std::vector<uint8_t> bytes(1 << 18);
        while (at < f.bytes) {
            if (stopping || wall_seconds() >= time) { return false; }
            const uint64_t n = std::min((uint64_t)bytes.size(), f.bytes - at);
            file->read(bytes.data(), n, at);
            sum.update(bytes.data(), n);
            at += n;
            bytes_read += n;
        }
        at = 0;
        const std::string hex = sum.hex();
        const std::lock_guard<std::mutex> lock(mutex);
        f.sha256 = hex;
        if (!f.listed.empty() && hex != f.listed) {
            findings.push_back({f.flag, f.path + ": expected sha256 " + f.listed + ", as manifest.json beside it says, "
                                "got " + hex + " (damaged, or changed after it was made?)"});
        }
        if (!f.resumed.empty() && hex != f.resumed) {
            findings.push_back({f.flag, f.path + " has other contents than when the run began: expected sha256 " +
                                f.resumed + ", got " + hex});
        }
        return true;
    }
};

#endif
