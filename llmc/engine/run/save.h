// run/save.h -- saves a checkpoint on all ranks, while training waits.
#pragma once

#include "../files/checkpoint.h"
#include "../ranks/patience.h"
#include "log.h"

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
