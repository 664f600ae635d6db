// ranks/patience.h -- work of some ranks that the others wait for, however long it takes.
#ifndef LLMC_RANKS_PATIENCE_H
#define LLMC_RANKS_PATIENCE_H

#include <future>

#include "comm.h"

// A collective. The ranks for which `mine` holds do the work, each in a thread, and their main threads tell the others
// all the while that they live. So --collective_timeout counts from the last of these ticks: a disk may be slow, but a
// rank that has stopped ends the run. The work calls no collective. What it throws is thrown on its rank.
template <class Work> void ranks_work(bool mine, Work work, const char* what) {
    Comm& c = comm();
    if (c.size == 1) {
        if (mine) { work(); }
        return;
    }
    std::future<void> result;
    if (mine) {
#if defined(CUDA_BUILD) && !defined(SIMT)
        int device = 0;                     // the current one of this thread
        CUDA_CHECK(cudaGetDevice(&device));
        result = std::async(std::launch::async, [device, work] {
            CUDA_CHECK(cudaSetDevice(device));
            work();
        });
#else
        result = std::async(std::launch::async, work);
#endif
    }
    const auto tick = std::chrono::duration<double>(std::min(1.0, c.timeout / 4));
    const auto works = [&] { return result.valid() && result.wait_for(tick) != std::future_status::ready; };
    try {
        while (comm_max(works(), what)) {}
    } catch (const Error& e) {
        // Another rank is gone. The disk is not waited for: a checkpoint gets its name only when it is whole.
        if (result.valid()) { _exit(comm_report(e.code, e.what())); }
        throw;
    }
    if (result.valid()) { result.get(); }
}

template <class Work> void rank0_works(Work work, const char* what) { ranks_work(comm().rank == 0, work, what); }

// The text of the lowest rank that has one, on all ranks; of a long one, its beginning
inline std::string first_text(const std::string& mine, const char* what) {
    struct Line { char text[2000]; } line = {};
    snprintf(line.text, sizeof(line.text), "%s", mine.c_str());
    std::vector<Line> all((size_t)comm().size);
    comm_all_gather(all.data(), &line, 1, what);
    for (const Line& l : all) { if (l.text[0] != 0) { return comm().size == 1 ? mine : l.text; } }
    return "";
}

#endif
