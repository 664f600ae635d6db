// run/same_on_ranks.h -- what must be the same on all ranks before they work together: the flags, and the data, which
// machines may have each on a disk of its own. Otherwise each rank would train on something else, without a word.
//
// Every function here is a collective. A difference is the same error on every rank, with both values in it.
#ifndef LLMC_RUN_SAME_ON_RANKS_H
#define LLMC_RUN_SAME_ON_RANKS_H

#include "../ranks/comm.h"
#include "data_record.h"

// Dies unless all ranks have this text. `what` names it in the message.
inline void check_same_text(const std::string& what, const std::string& text) {
    struct Shown { uint64_t hash; char text[1024]; };
    if (comm().size == 1) { return; }
    Shown mine = {checksum(text), {}};
    const std::string shown = printable(text, 250);         // at most 4 bytes for each of them
    memcpy(mine.text, shown.data(), std::min(shown.size(), sizeof(mine.text) - 1));
    std::vector<Shown> all((size_t)comm().size);
    comm_all_gather(all.data(), &mine, 1, "comparison of the ranks");
    for (size_t r = 1; r < all.size(); r++) {
        check(all[r].hash == all[0].hash, "%s: expected the same on all ranks, got %s on rank %zu and %s on rank 0",
              what.c_str(), all[r].text, r, all[0].text);
    }
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
    for (size_t i = 0; i < n; i++) {                        // every rank finds the same flag
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

#endif
