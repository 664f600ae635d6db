// ranks/patience.h -- work of one rank that the others wait for, however long it takes.
#ifndef LLMC_RANKS_PATIENCE_H
#define LLMC_RANKS_PATIENCE_H

#include <future>

#include "comm.h"

// A collective. Rank 0 does the work, in a thread, and its main thread tells the others all the while that it lives. So
// --collective_timeout counts from the last of these ticks: a disk may be slow, but a rank that has stopped ends the
// run. The work calls no collective. What it throws is thrown on rank 0.
template <class Work> void rank0_works(Work work, const char* what) {
    Comm& c = comm();
    if (c.size == 1) { work(); return; }
    std::future<void> result;
    if (c.rank == 0) {
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

#endif
