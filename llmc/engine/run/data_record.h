// run/data_record.h -- a record of a run's data in its checkpoints, so that it is not resumed on different data.
//
// state.json:  "data": {"train_files": [{"file": "shard_000001.bin", "bytes": 200001024, "blocks": "xxh3:..."}, ...],
//                       "val_files": [...]}
//
// A file is identified by its last name, its size and the checksum of 64 of its blocks, in any directory.
// data/verify.py finds damage between those blocks: it compares whole shards with the manifest beside them.
#pragma once

#include "../json.h"
#include "flag_parser.h"

struct DataFile {
    std::string flag, path;                 // "train_files", and where the file is now
    uint64_t bytes = 0, blocks = 0;         // blocks: see sampled_sum

    Json json() const {
        return {{"file", path.substr(path.rfind('/') + 1)}, {"bytes", bytes},
                {"blocks", strprintf("xxh3:%016llx", (unsigned long long)blocks)}};
    }
};

// The checksum of 64 blocks of 64 KiB, including the first and the last of the file; a small file is read whole.
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

// How the files of a flag differ from those that a checkpoint lists: "shard_000002.bin has gone", or "". `what` names
// the checkpoint in messages.
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

// The files of a run, on the rank that writes its checkpoints.
struct DataRecord {
    std::vector<DataFile> files;
    Names allowed;                          // --allow_change: flags whose files may differ

    explicit DataRecord(const Names& allowed) : allowed(allowed) {}

    // the files of a flag
    void add(const std::string& flag, const std::vector<std::string>& paths) {
        for (const std::string& path : paths) {
            const File file(path);
            files.push_back({flag, path, file.size, sampled_sum(file)});
        }
        check_length(flag, paths.size());
    }

    // state.json's "data"
    Json json() const {
        Json j = Json::object();
        for (const DataFile& f : files) { j[f.flag].push_back(f.json()); }
        return j;
    }

    // Compares with the state.json of the run to be resumed, which `what` names.
    void resume(const Json& state, const std::string& what) const {
        if (!state.contains("data")) { return; }            // written before there was a record
        const Json now = parse_json(json_text(json()), "data");
        for (const auto& item : json_at(state, "data", what).items()) {
            const std::string& flag = item.key();
            if (!now.contains(flag)) { continue; }          // this run does not read them
            const std::string difference = data_difference(item.value(), now.at(flag), what);
            if (difference.empty()) { continue; }
            const bool named = std::find(allowed.begin(), allowed.end(), flag) != allowed.end();
            const std::string finding = "--" + flag + ": since " + what + " was written, " + difference;
            check(named || flag == "val_files", "%s; restore the data, or --allow_change %s", finding.c_str(),
                  flag.c_str());
            say("warning: %s", finding.c_str());
        }
    }

private:
    // If state.json were too long to be read, the checkpoint could not be resumed. It also holds the flags.
    void check_length(const std::string& flag, size_t count) const {
        const uint64_t room = JSON_MAX_BYTES - 300000;
        const uint64_t bytes = json_text(Json{{"data", json()}}, 2).size();
        const auto most = (unsigned long long)(room * files.size() / bytes);
        check(bytes <= room, "--%s: expected at most %llu files, because a checkpoint's list has no room for more, got "
              "%zu; join them into larger ones", flag.c_str(), most, count);
    }
};
