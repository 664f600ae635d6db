// ranks/patience.h -- work on some ranks, for which the other ranks wait without a deadline.
#pragma once

#include <future>
#include <thread>

#include "comm.h"

// Does the work in a detached thread. An exception goes into the future.
template <class Work> std::future<void> in_thread(Work work) {
    std::packaged_task<void()> task([device = current_device(), work] {
        use_device(device);                 // a new thread has the first one
        work();
    });
    std::future<void> end = task.get_future();
    std::thread(std::move(task)).detach();
    return end;
}

// A collective: whether the thread of any rank is still at work. `thread`: this rank's, or none. wait: first give it
// some time. An exception of the thread is thrown again on its rank.
inline bool threads_work(std::future<void>& thread, bool wait, const char* what) {
    const std::chrono::duration<double> patience(wait ? std::min(1.0, comm().timeout / 4) : 0.0);
    const bool works = thread.valid() && thread.wait_for(patience) != std::future_status::ready;
    try {
        if (comm_max(works, what)) { return true; }
    } catch (const Error& e) {
        // Another rank is gone. Do not wait for the disk: a checkpoint gets its name only when it is complete.
        if (thread.valid()) { _exit(comm_report(e.code, e.what())); }
        throw;
    }
    if (thread.valid()) { thread.get(); }
    return false;
}

// A collective. The ranks with `mine` do the work, each in a thread, and meanwhile their main threads tell the other
// ranks that they are alive. So --collective_timeout counts from the last of these ticks: a disk may be slow, but a
// stopped rank ends the run. The work must not call a collective. An exception is thrown again on its rank.
template <class Work> void ranks_work(bool mine, Work work, const char* what) {
    if (comm().size == 1) {
        if (mine) { work(); }
        return;
    }
    std::future<void> thread;
    if (mine) { thread = in_thread(work); }
    while (threads_work(thread, true, what)) {}
}

template <class Work> void rank0_works(Work work, const char* what) { ranks_work(comm().rank == 0, work, what); }

// The text of the lowest rank that has one, on all ranks; a long one is cut
inline std::string first_text(const std::string& mine, const char* what) {
    struct Line { char text[2000]; } line = {};
    snprintf(line.text, sizeof(line.text), "%s", mine.c_str());
    std::vector<Line> all((size_t)comm().size);
    comm_all_gather(all.data(), &line, 1, what);
    for (const Line& l : all) { if (l.text[0] != 0) { return comm().size == 1 ? mine : l.text; } }
    return "";
}
