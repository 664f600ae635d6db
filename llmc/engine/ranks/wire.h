// ranks/wire.h -- how the hosts of a run's ranks reach each other. There are two ways: wire_mpi.h and
// wire_sockets.h.
//
// A rank that waits for another one gives up after comm().timeout seconds, with an Error that names both ranks and what
// they were doing.
#pragma once

#include <sched.h>

#include "../../base/common.h"

// A part of a buffer that goes to, or comes from, another rank
struct Message {
    int peer;
    void* data;
    size_t bytes;
};
using Messages = std::vector<Message>;

// `what` tells in messages what the ranks were doing. The first three are collectives.
struct Wire {
    const char* name;                       // "MPI", "sockets"
    explicit Wire(const char* name) : name(name) {}
    virtual ~Wire() {}

    // all (size * bytes): the bytes of every rank, in the order of the ranks
    virtual void gather(void* all, const void* mine, size_t bytes, const char* what) = 0;
    // Every rank receives rank 0's bytes.
    virtual void broadcast(void* data, size_t bytes, const char* what) = 0;
    // Sends and receives all pieces at once, from and to host memory. None is empty, the other rank passes a piece of
    // the same size for each, and the pieces between two ranks keep their order.
    virtual void exchange(const Messages& sends, const Messages& receives, const char* what) = 0;
    // At the end of a run: waits for all ranks.
    virtual void leave() = 0;

    // Called repeatedly while this rank waits for another one or for its GPU. An Error if a rank is gone.
    virtual void watch(const char* what) { (void)what; }
    // Sleeps this long, or, if the wire can tell, until something arrives.
    virtual void rest(double seconds) { usleep((useconds_t)(1e6 * seconds)); }
    // Gives another rank this much time to end this one.
    virtual void listen(double seconds) { usleep((useconds_t)(1e6 * seconds)); }
    // Ends the other ranks, and perhaps this one.
    virtual void end_all(int code) = 0;

    // For the roll call: tells a rank that this one waits; marks in `heard` (size) the ranks that have told this one
    // so.
    virtual void say_waiting(int rank) = 0;
    virtual void hear_waiting(std::vector<char>& heard) = 0;
};

struct Comm {
    int rank = 0, size = 1;                 // 0 .. size - 1
    int local_rank = 0, local_size = 1;     // among the ranks of this machine
    bool spins = false;                     // a short wait keeps the core, which no other rank uses
    double timeout = 600;                   // seconds that a rank waits for another one: --collective_timeout
    int node = 0;                           // see comm_connect_devices()
    size_t chunk = 4 << 20;                 // the most bytes in one message to a rank; MPI counts in an int
    Wire* wire = nullptr;                   // null if this is the only rank
    char* inbox = nullptr;                  // (chunk, and 4 bytes per rank) on the device: what other ranks have sent
    bool nccl = false;                      // device buffers go from GPU to GPU
    uint64_t sent = 0;                      // bytes of device buffers that this rank has sent
};
inline Comm& comm() { static Comm c; return c; }

// The time spent waiting for one event. A nap counts as at most one second, so that time for which the process was
// stopped (SIGSTOP, a suspended laptop) does not count.
struct Deadline {
    const char* what;
    double waited = 0, last = wall_seconds();
    std::string missing;                    // names of the missing ranks, if known
    explicit Deadline(const char* what) : what(what) {}
    // Called while the event has not happened. by_wire: the event arrives over the wire
    void nap(bool by_wire = false) {
        const Comm& c = comm();
        const double now = wall_seconds();
        waited += std::min(now - last, 1.0);
        last = now;
        if (waited > c.timeout) {
            const std::string others = missing.empty() ? "the other ranks" : "rank " + missing;
            die(EXIT_DEVICE, "%s: rank %d waited %.0f s for %s (--collective_timeout): it hangs, died or needs longer",
                what, c.rank, waited, others.c_str());
        }
        if (c.wire != nullptr) { c.wire->watch(what); }
        // Most waits are short and should end without delay; long ones must not keep a core busy.
        const double pause = waited < 1 ? 50e-6 : 1e-3;
        if (c.spins && waited < 2e-3) { sched_yield(); return; }
        if (by_wire) { c.wire->rest(pause); } else { usleep((useconds_t)(1e6 * pause)); }
    }
};

// Finds out who is missing when a message does not arrive: the sender may itself be waiting for another rank. So a rank
// that has waited for half of --collective_timeout tells all ranks. When its time is up, the ranks that have not told
// it the same during this wait are missing: they have stopped, or are late by more than that half.
struct RollCall {
    Wire& wire;
    std::vector<char> heard;                // (ranks)
    bool called = false;

    // Forgets what was heard during earlier waits.
    explicit RollCall(Wire& wire) : wire(wire), heard((size_t)comm().size) {
        wire.hear_waiting(heard);
        std::fill(heard.begin(), heard.end(), 0);
    }
    // "1, 3": the ranks that are missing, as far as this rank knows after `waited` seconds
    std::string missing(double waited) {
        if (waited < comm().timeout / 2) { return ""; }
        wire.hear_waiting(heard);
        std::string names;
        for (int r = 0; r < comm().size; r++) {
            if (r == comm().rank) { continue; }
            if (!called) { wire.say_waiting(r); }
            if (!heard[(size_t)r]) { names += strprintf("%s%d", names.empty() ? "" : ", ", r); }
        }
        called = true;
        return names;
    }
};

// Waits until done() is true, which depends on other ranks.
template <class Done> void wire_wait(Wire& wire, Done done, const char* what) {
    if (done()) { return; }
    Deadline deadline(what);
    for (RollCall roll_call(wire); !done();) {
        deadline.missing = roll_call.missing(deadline.waited);
        deadline.nap(true);
    }
}
