// run/same_on_ranks.h -- checks that all ranks have the same program and flags, and the same data, model and --out,
// which may lie on different disks. Otherwise each rank would silently train something else.
//
// Every function here is a collective. A difference is the same error on every rank, with both values in it.
#pragma once

#include <random>

#include "../files/outdir.h"
#include "../ranks/parameters.cuh"
#include "../ranks/patience.h"
#include "../ranks/replicas.cuh"
#include "data_record.h"

// Dies unless all ranks have this text. `what` names it in the message.
inline void check_same_text(const std::string& what, const std::string& text) {
    struct Shown { uint64_t hash; char text[1024]; };
    if (comm().size == 1) { return; }
    Shown mine = {checksum(text), {}};
    const std::string shown = printable(text, 250);         // escaped, at most 4 bytes each
    memcpy(mine.text, shown.data(), std::min(shown.size(), sizeof(mine.text) - 1));
    std::vector<Shown> all((size_t)comm().size);
    comm_all_gather(all.data(), &mine, 1, "comparison of the ranks");
    for (size_t r = 1; r < all.size(); r++) {
        check(all[r].hash == all[0].hash, "%s: expected the same on all ranks, got %s on rank %zu and %s on rank 0",
              what.c_str(), all[r].text, r, all[0].text);
    }
}

// Different builds may round, or exchange messages, differently.
inline void check_same_program() {
    if (comm().size == 1) { return; }
    const FileSum sum = sum_file("/proc/self/exe");
    check_same_text("the program", strprintf("a file of %llu bytes, checksum %016llx", (unsigned long long)sum.bytes,
                                             (unsigned long long)sum.sum));
}

// All flags but the number of threads
inline void check_same_flags(const Options& o) {
    if (comm().size == 1) { return; }
    Names names, values;
    std::vector<uint64_t> mine;
    for_each_option(o, [&](const OptionRow& row, const auto& value) {
        if (!(row.programs & o.program) || strcmp(row.name, "threads") == 0) { return; }
        names.push_back(std::string("--") + row.name);
        values.push_back("'" + option_text(value) + "'");
        mine.push_back(checksum(values.back()));
    });
    const size_t n = mine.size();
    std::vector<uint64_t> all(n * (size_t)comm().size);
    comm_all_gather(all.data(), mine.data(), n, "comparison of the ranks");
    for (size_t i = 0; i < n; i++) {                        // all ranks report the same flag
        bool same = true;
        for (size_t r = 1; r < (size_t)comm().size; r++) { same = same && all[r * n + i] == all[i]; }
        if (!same) { check_same_text(names[i], values[i]); }
    }
}

// The files of a flag: their number, names, sizes and sampled contents
inline void check_same_files(const std::string& flag, const std::vector<std::string>& paths) {
    if (comm().size == 1) { return; }
    uint64_t sum = paths.size(), bytes = 0;
    for (const std::string& path : paths) {
        const File file(path);
        const uint64_t facts[] = {sum, checksum(path.substr(path.rfind('/') + 1)), file.size, sampled_sum(file)};
        sum = checksum(facts, sizeof(facts));
        bytes += file.size;
    }
    check_same_text(flag, strprintf("%zu files, %llu bytes, checksum %08x", paths.size(), (unsigned long long)bytes,
                                    (unsigned)sum));
}

// The model of a flag, which every rank reads; the manifest has the checksum of all its bytes
inline void check_same_model(const std::string& flag, const std::string& path) {
    if (comm().size == 1) { return; }
    uint64_t sum = 0;
    for (const std::string name : {"", "/manifest.json", "/config.json", "/model.safetensors",
                                   "/model.safetensors.index.json"}) {
        if (!path_exists(path + name) || is_directory(path + name)) { continue; }
        const File file(path + name);
        const uint64_t facts[] = {sum, checksum(name), file.size, sampled_sum(file)};
        sum = checksum(facts, sizeof(facts));
    }
    check_same_text(flag, sum == 0 ? "no model at " + path
                                   : strprintf("%s, checksum %016llx", path.c_str(), (unsigned long long)sum));
}

// state: the run's, with its flags
inline void check_same_loaded(const Parameters& p, Json state) {
    if (comm().size == 1) { return; }
    const size_t words = p.table.total * sizeof(floatX) / sizeof(float);
    const uint64_t hash = replica_hash((const float*)p.weights, words, p.stream);
    state.erase("options");
    check_same_text("what was loaded", strprintf("weights %016llx, state ", (unsigned long long)hash) +
                                       json_text(state));
}

// Dies unless all ranks can write into a directory and see what rank 0 has written there. A network file system may
// show it late.
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
