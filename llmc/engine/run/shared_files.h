// run/shared_files.h -- what stays the same from a run to the one that resumes it, and from rank to rank. The ranks'
// disks may be different: all must read the same data and model, and share --out, where they save a checkpoint
// together. Otherwise each rank would silently train something else.
//
// A checkpoint records the flags and the data, so that a run is not resumed on different ones:
//
// state.json:  "data": {"train_files": [{"file": "shard_000001.bin", "bytes": 200001024, "blocks": "xxh3:..."}, ...],
//                       "val_files": [...]}
//
// A file is identified by its last name, its size and the checksum of 64 of its blocks, in any directory.
// data/verify.py finds damage between those blocks: it compares whole shards with the manifest beside them.
#pragma once

#include <map>
#include <random>

#include "../files/checkpoint.h"
#include "../json.h"
#include "../ranks/comm.h"
#include "flags.h"

// ----------------------------------------------------------------------------------------------------------
// from run to run: the record of the data, and the flags

// The checksum of `count` blocks of 64 KiB, including the first and the last of the file; a small file is read whole.
inline uint64_t sampled_sum(const File& file, uint64_t count = 64) {
    const uint64_t block = 65536;
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

// Files as the record lists them
inline Json file_records(const std::vector<std::string>& paths) {
    Json list = Json::array();
    for (const std::string& path : paths) {
        const File file(path);
        list.push_back({{"file", path.substr(path.rfind('/') + 1)}, {"bytes", file.size},
                        {"blocks", sum_text(sampled_sum(file))}});
    }
    return list;
}

// Warns, once for each of these (the files of a flag, or null), if a file's contents came before, under any name
template <class... Files> void say_repeated(const Files*... all) {
    std::map<std::pair<uint64_t, uint64_t>, std::pair<std::string, std::string>> found;     // by size and contents
    const auto look = [&](const auto* files) {
        std::string what;
        for (const std::string& path : files != nullptr ? file_paths(*files) : Names()) {
            const File file(path);
            const auto [same, fresh] = found.insert({{file.size, sampled_sum(file, 4)}, {files->flag, path}});
            if (fresh || !what.empty()) { continue; }
            if (sampled_sum(file) != sampled_sum(File(same->second.second))) { continue; }      // alike in 4 blocks
            what = path + " holds the same data as " + same->second.second + " of " + same->second.first;
            if (same->second.first != files->flag) { what += ", so what is measured on it is trained on, too"; }
        }
        if (!what.empty() && comm().rank == 0) { say("warning: %s: %s", files->flag.c_str(), what.c_str()); }
    };
    (look(all), ...);
}

// Adds the files of a flag to the record of a run's data. If state.json, which also holds the flags, were too long to
// be read, the checkpoint could not be resumed.
inline void add_to_record(Json& record, const std::string& flag, const Json& files) {
    record[flag] = files;
    size_t count = 0;
    for (const auto& item : record.items()) { count += item.value().size(); }
    const uint64_t room = JSON_MAX_BYTES - 300000, bytes = json_text(Json{{"data", record}}, 2).size();
    check(bytes <= room, "--%s: expected at most %llu files, because a checkpoint's list has no room for more, got "
          "%zu; join them into larger ones", flag.c_str(), (unsigned long long)(room * count / bytes), files.size());
}

using Facts = std::vector<std::pair<std::string, std::string>>;     // keys and their values

// "lr 0.001, not 0.003": the first fact that is not what it was, or "". The same keys stand at the same places.
inline std::string first_difference(const Facts& now, const Facts& was) {
    const auto value = [](const Facts& facts, size_t i) {
        return i < facts.size() && !facts[i].second.empty() ? printable(facts[i].second, 250) : "absent";
    };
    for (size_t i = 0; i < std::max(now.size(), was.size()); i++) {
        if (i < now.size() && i < was.size() && now[i].second == was[i].second) { continue; }
        return (i < now.size() ? now : was)[i].first + " " + value(now, i) + ", not " + value(was, i);
    }
    return "";
}

// Dies unless every flag marked SAME has the value in `saved`, the options_json of the run that wrote the checkpoint,
// or is named by --allow_change. A flag that the checkpoint does not know must have its default. Call this, and save
// options, after -1 has been replaced by the number that it stands for: a total batch of B*T changes with B.
inline void check_resumed_options(const Options& now, const Json& saved, const std::string& what) {
    // through JSON text, as the saved flags: a path that is not UTF-8 then has U+FFFD in both
    const Json current = parse_json(json_text(options_json(now)), "flags");
    const Json defaults = options_json(Options(now.program));
    check(saved.is_object(), "%s: expected an object of flags", what.c_str());
    Facts is, was;
    for (const OptionRow& row : option_rows(now.program)) {
        if (row.on_resume == FREE || now.may_change(row.name)) { continue; }
        is.push_back({row.name, json_words(current.at(row.name))});
        was.push_back({row.name, json_words(saved.contains(row.name) ? saved.at(row.name) : defaults.at(row.name))});
    }
    const std::string difference = first_difference(is, was), flag = difference.substr(0, difference.find(' '));
    check(difference.empty(), "--%s as in %s: resuming needs the old value, or --allow_change %s", difference.c_str(),
          what.c_str(), flag.c_str());
}

// The files of a flag's record, `what` for messages
inline Facts file_facts(const Json& files, const std::string& what) {
    check(files.is_array(), "%s: data: expected an array of files, got %s", what.c_str(), json_excerpt(files).c_str());
    Facts facts;
    for (const Json& f : files) {
        const std::string size = json_text(json_at(f, "bytes", what)), sum = json_string(f, "blocks", what);
        facts.push_back({strprintf("file %zu is", facts.size() + 1),
                         json_string(f, "file", what) + " of " + size + " bytes (" + sum + ")"});
    }
    return facts;
}

// Compares the record with the state.json of the run to be resumed, which `what` names.
inline void check_resumed_data(const Options& o, const Json& record, const Json& state, const std::string& what) {
    if (!state.contains("data")) { return; }            // written before there was a record
    const Json now = parse_json(json_text(record), "data");
    for (const auto& item : json_at(state, "data", what).items()) {
        const std::string& flag = item.key();
        if (!now.contains(flag)) { continue; }          // this run does not read them
        const std::string difference = first_difference(file_facts(now.at(flag), what), file_facts(item.value(), what));
        if (difference.empty()) { continue; }
        const std::string finding = "--" + flag + ": " + difference + " as in " + what;
        check(o.may_change(flag) || flag == "val_files", "%s; restore the data, or --allow_change %s", finding.c_str(),
              flag.c_str());
        say("warning: %s", finding.c_str());
    }
}

// ----------------------------------------------------------------------------------------------------------
// the same on all ranks, by collectives. A difference is the same error on every rank, with both values in it.

// Dies unless all ranks have these facts, by the same keys: one hash is compared, and where it differs, key after key.
inline void check_same(const Facts& facts) {
    uint64_t hash = 0;
    for (const auto& [key, value] : facts) { hash = checksum(value.data(), value.size(), hash); }
    if (comm_strays(hash).empty()) { return; }
    for (const auto& [key, value] : facts) {
        const std::vector<int> strays = comm_strays(checksum(value));
        if (strays.empty()) { continue; }
        const size_t room = 1024;
        std::string shown = printable(value, 250);          // escaped, at most 4 bytes each
        shown.resize(room);
        std::vector<char> all(room * (size_t)comm().size);
        comm_all_gather(all.data(), shown.data(), room, "comparison of the ranks");
        die(EXIT_BAD_INPUT, "%s: expected the same on all ranks, got %s on rank %d and %s on rank 0", key.c_str(),
            &all[room * (size_t)strays[0]], strays[0], all.data());
    }
}

// The program, as different builds may round, or exchange messages, differently; and all flags but the number of
// threads
inline void check_same_start(const Options& o) {
    if (comm().size == 1) { return; }
    const FileSum sum = sum_file("/proc/self/exe");
    Facts facts = {{"the program", strprintf("a file of %llu bytes, checksum %016llx", (unsigned long long)sum.bytes,
                                             (unsigned long long)sum.sum)}};
    for_each_option(o, [&](const OptionRow& row, const auto& value) {
        if (!(row.programs & o.program) || strcmp(row.name, "threads") == 0) { return; }
        facts.push_back({std::string("--") + row.name, "'" + option_text(value) + "'"});
    });
    check_same(facts);
}

// The files of a flag, by their records or by their paths
inline void check_same_records(const std::string& flag, const Json& files) {
    uint64_t bytes = 0;
    for (const Json& f : files) { bytes += f.at("bytes").get<uint64_t>(); }
    check_same({{flag, strprintf("%zu files, %llu bytes, checksum %08x", files.size(), (unsigned long long)bytes,
                                 (unsigned)checksum(json_text(files)))}});
}
inline void check_same_files(const std::string& flag, const std::vector<std::string>& paths) {
    if (comm().size > 1) { check_same_records(flag, file_records(paths)); }
}

// The model of a flag, which every rank reads; the manifest has the checksum of all its bytes
inline void check_same_model(const std::string& flag, const std::string& path) {
    std::vector<std::string> files;
    for (const std::string name : {"", "/manifest.json", "/state.json", "/config.json", "/model.safetensors",
                                   "/model.safetensors.index.json"}) {
        if (path_exists(path + name) && !is_directory(path + name)) { files.push_back(path + name); }
    }
    check_same_files(flag + " " + path, files);
}

// Dies unless all ranks can write into a directory and see rank 0's file. A network file system may show it late.
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

// ----------------------------------------------------------------------------------------------------------
// a checkpoint

// A collective: saves c as the checkpoint of `step` in `out`, and returns why that failed, "" if it did not. The ranks
// go through the stages together, and each writes its own moments.
inline std::string save_on_ranks(const std::string& out, int step, const Checkpoint& c, int keep, Log& log) {
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
    // 1 the log, and a directory under a temporary name
    stage(first, [&] { log.sync(); save.begin(); });
    // 2 the files, and rank 0 learns the checksums of the other ranks' moments
    stage(true, [&] { sums = save.write_part(comm().rank); });
    if (failure.empty()) {
        std::vector<FileSum> all((size_t)comm().size);
        comm_all_gather(all.data(), &sums.back().second, 1, "checkpoint");
        for (int rank = 1; rank < comm().size && first; rank++) {
            sums.push_back({optimizer_file(rank), all[(size_t)rank]});
        }
    }
    // 3 makes it a checkpoint, and deletes old ones; or takes back what there is
    stage(first, [&] { save.publish(sums); });
    stage(first, [&] { save.retire(keep); });
    if (failure.empty()) { return ""; }
    rank0_works([&] { save.undo(); }, "checkpoint");
    return strprintf("step %d is not saved: ", step) + first_text(first ? save.explain(failure) : "", "checkpoint");
}
