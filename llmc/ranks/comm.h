// ranks/comm.h -- the ranks of a run: one process, or several that exchange buffers by MPI (host) or NCCL (device).
//
// A run is one rank unless mpirun or srun started it; MPI is not even initialized then. Every function here except
// comm_report is a collective: all ranks call it, in the same order. Sums have a fixed shape, so that the number of
// ranks does not change a bit (exchange.cuh). A rank that waits for another one gives up after comm().timeout seconds,
// with an Error that names both ranks and what they were doing. An Error on one rank ends all of them (comm_report).
// If a rank dies, mpirun notices it and ends the others.
#ifndef LLMC_RANKS_COMM_H
#define LLMC_RANKS_COMM_H

#include <climits>
#include <csignal>

#include <sched.h>

#include "../base/device.h"

#if defined(USE_MPI)
#define OMPI_SKIP_MPICXX 1      // the C interface alone
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#endif
#include "launch.h"

struct Comm {
    int rank = 0, size = 1;                 // 0 .. size - 1
    int local_rank = 0, local_size = 1;     // among the ranks of this machine
    double timeout = 600;                   // seconds that a rank waits for another one: --collective_timeout
    int node = 0;                           // see comm_find_nodes()
    size_t chunk = 4 << 20;                 // bytes that are on their way to a rank at a time; MPI counts in an int
    char* inbox = nullptr;                  // (chunk and 4 bytes per rank) on the device: what other ranks have sent
    char* staging = nullptr;                // on the host, where MPI cannot read the device: on its way
    bool nccl = false;                      // device buffers go from GPU to GPU
    uint64_t sent = 0;                      // bytes of device buffers that this rank has sent
};
inline Comm& comm() { static Comm c; return c; }

// The time spent waiting for one event. A nap counts as at most one second, so that a process that was stopped
// (SIGSTOP, a suspended laptop) and goes on has not waited in between.
struct Deadline {
    const char* what;
    int peer;                               // -1: any of the others
    double waited = 0, last = wall_seconds();
    std::string missing;                    // the ranks that are, if that is known
    Deadline(const char* what, int peer) : what(what), peer(peer) {}
    // Called each time that the event has not happened yet.
    void nap() {
        const double now = wall_seconds();
        waited += std::min(now - last, 1.0);
        last = now;
        if (waited > comm().timeout) {
            const bool any = peer < 0 || peer == comm().rank;
            std::string others = any ? "the other ranks" : strprintf("rank %d", peer);
            if (!missing.empty()) { others = "rank " + missing; }
            die(EXIT_DEVICE, "%s: rank %d waited %.0f s for %s (--collective_timeout): it hangs, died or needs longer",
                what, comm().rank, waited, others.c_str());
        }
        // Short waits are the rule and must be noticed at once; long ones must not keep a core busy.
        if (waited < 2e-3) { sched_yield(); return; }
        usleep(waited < 1 ? 50 : 1000);
    }
};

// ----------------------------------------------------------------------------------------------------------
// MPI

#if defined(USE_MPI)
// MPI returns errors instead of ending the process (MPI_ERRORS_RETURN), so that they become an Error.
inline void mpi_check(int result, const char* what) {
    if (result == MPI_SUCCESS) { return; }
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(result, text, &length);
    die(EXIT_DEVICE, "%s: rank %d: MPI: %s", what, comm().rank, text);
}
#include "roll_call.h"
// Polls, because MPI_Wait has no deadline and keeps the core busy.
inline void mpi_wait(MPI_Request request, const char* what, int peer) {
    Deadline deadline(what, peer);
    RollCall roll_call;
    for (int done = 0;;) {
        mpi_check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), what);
        if (done) { return; }
        deadline.missing = roll_call.missing(deadline.waited);
        deadline.nap();
    }
}
#endif

// A piece of a device buffer on its way to or from another rank
struct Message {
    int peer;
    void* data;
    size_t bytes;
};

#if defined(USE_NCCL)
#include "nccl.h"
#endif

// ----------------------------------------------------------------------------------------------------------
// start and end

// The first thing that a program does. From here on only rank 0 writes to stdout. The environment says whether a
// launcher has started several ranks, so that a single process never initializes MPI. program: its name and its flags,
// for messages
inline void comm_init(const Names& program) {
    const Launch launch = find_launch();
    if (launch.size == 1) { return; }
#if defined(USE_MPI)
    if (!launch.mpi) { refuse_launch(launch, true, program); }
    Comm& c = comm();
    // 1 start MPI
    const auto before = signal(SIGALRM, comm_too_late);
    alarm((unsigned)c.timeout);
    int provided;
    const int result = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
    if (result != MPI_SUCCESS) { die(EXIT_DEVICE, "MPI_Init failed"); }
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &c.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &c.size);
    // 2 who runs on this machine
    MPI_Comm here;
    mpi_check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, c.rank, MPI_INFO_NULL, &here), "start");
    MPI_Comm_rank(here, &c.local_rank);
    MPI_Comm_size(here, &c.local_size);
    MPI_Comm_free(&here);
    alarm(0);
    signal(SIGALRM, before);
    // 3 Otherwise each process would take itself for the only one, train on all of the data and fight for --out.
    check(c.size == launch.size, "MPI: expected the %d processes that the launcher started, got %d (is mpirun of "
          "another MPI than the one this program was built with?)", launch.size, c.size);
    if (c.rank != 0 && freopen("/dev/null", "w", stdout) == nullptr) {
        die(EXIT_DEVICE, "/dev/null: %s", strerror(errno));
    }
#else
    refuse_launch(launch, false, program);
#endif
}

// What main() does with an Error: it prints the message and ends all ranks with its code. An error that every rank
// finds, such as a bad flag, is reported once, by rank 0: the other ranks give it time to do so.
inline int comm_report(int code, const std::string& message) {
    Comm& c = comm();
    fflush(stdout);
    if (c.rank > 0) {
        signal(SIGTERM, SIG_DFL);           // by which mpirun ends this rank once rank 0 has reported
        usleep(1000 * (1000 + 50 * (unsigned)std::min(c.rank, 20)));        // 1 s and more, another for each rank
    }
    const std::string who = c.rank > 0 ? strprintf("rank %d: ", c.rank) : "";
    fprintf(stderr, "error: %s%s\n", who.c_str(), printable(message, 2 * LONGEST_MESSAGE).c_str());
    fflush(stderr);
#if defined(USE_MPI)
    if (c.size > 1) {
        alarm(5);                           // in case the libraries hang as well
#if defined(USE_NCCL)
        nccl_abort();
#endif
        MPI_Abort(MPI_COMM_WORLD, code);    // ends all ranks
        _exit(code);                        // should it return
    }
#endif
    return code;
}

// comm_sharing: how many ranks share the memory that device_memory_available() reports. comm_threads: the number of
// threads for set_threads(); `asked`, or if mpirun has not bound this rank to cores of its own, its share of the
// machine.
#if defined(CUDA_BUILD)
inline int comm_sharing() { return 1; }
inline int comm_threads(int asked) { return asked; }
#else
inline int comm_sharing() { return comm().local_size; }
inline int comm_threads(int asked) {
    const int local = comm().local_size;
    const bool said = asked > 0 || getenv("OMP_NUM_THREADS") != nullptr;
    const bool bound = max_threads() < sysconf(_SC_NPROCESSORS_ONLN);
    if (said || bound || local == 1) { return asked; }
    return std::max(1, max_threads() / local);
}
#endif

// ----------------------------------------------------------------------------------------------------------
// small things, on the host

// all (size * n): the n elements of every rank, in the order of the ranks
template <class T> void comm_all_gather(T* all, const T* mine, size_t n, const char* what) {
    (void)what;
    if (comm().size == 1) { std::copy_n(mine, n, all); return; }
#if defined(USE_MPI)
    check(n <= INT_MAX / sizeof(T) / (size_t)comm().size, "%s: %zu elements per rank are too many to gather", what, n);
    const int bytes = (int)(sizeof(T) * n);
    MPI_Request request;
    mpi_check(MPI_Iallgather(mine, bytes, MPI_BYTE, all, bytes, MPI_BYTE, MPI_COMM_WORLD, &request), what);
    mpi_wait(request, what, -1);
#endif
}

// the largest x of all ranks, on all of them
inline int comm_max(int x, const char* what) {
    std::vector<int> all((size_t)comm().size);
    comm_all_gather(all.data(), &x, 1, what);
    return *std::max_element(all.begin(), all.end());
}

// Has a signal asked any rank for an end? (stop_signal)
inline bool comm_stops() { return comm_max((int)stop_signal, "signals") != 0; }

// data (bytes): every rank receives rank 0's
inline void comm_broadcast(void* data, size_t bytes, const char* what) {
    (void)data; (void)bytes; (void)what;
#if defined(USE_MPI)
    const size_t piece = comm().chunk;
    for (size_t i = 0; comm().size > 1 && i < bytes; i += piece) {
        MPI_Request request;
        const int count = (int)std::min(piece, bytes - i);
        mpi_check(MPI_Ibcast((char*)data + i, count, MPI_BYTE, 0, MPI_COMM_WORLD, &request), what);
        mpi_wait(request, what, -1);
    }
#endif
}

// rank 0's text
inline std::string comm_text(std::string text, const char* what) {
    uint64_t length = text.size();          // first, so that the others know how much comes
    comm_broadcast(&length, sizeof(length), what);
    text.resize(length);
    comm_broadcast(&text[0], length, what);
    return text;
}

// Whether all ranks have the same parameters, by their hash. If not, `who` says which ranks differ.
inline bool comm_replicas_agree(uint64_t hash, std::string* who = nullptr) {
    std::vector<uint64_t> all((size_t)comm().size);
    comm_all_gather(all.data(), &hash, 1, "comparison of the replicas");
    std::string strays;
    for (size_t r = 1; r < all.size(); r++) {       // every rank compares, and comes to the same result
        if (all[r] != all[0]) { strays += strprintf("%s%zu", strays.empty() ? "" : ", ", r); }
    }
    if (who != nullptr && !strays.empty()) { *who = "the parameters differ from rank 0's on rank " + strays; }
    return strays.empty();
}

// the hash of n floats on the device
inline uint64_t comm_hash(const float* data, size_t n, Stream stream) {
    std::vector<float> host(std::min(n, comm().chunk / sizeof(float)));
    uint64_t hash = n;                      // each chunk's hash is the seed of the next
    for (size_t i = 0; i < n; i += host.size()) {
        const size_t bytes = sizeof(float) * std::min(host.size(), n - i);
        copy_to_host(host.data(), data + i, bytes, stream);
        hash = checksum(host.data(), bytes, hash);
    }
    return hash;
}

// ----------------------------------------------------------------------------------------------------------
// large arrays, on the device

// which of the machine's GPUs this rank uses; 0 in a CPU build
inline int comm_device() {
#if defined(CUDA_BUILD)
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) { return 0; }      // find_gpu() says why
    return comm().local_rank % count;       // more ranks than GPUs share them
#else
    return 0;
#endif
}

// comm().node = g when the ranks are numbered machine after machine with g = 2^k of them on each, and there are several
// machines; else 0. exchange.cuh then sums on each machine first.
inline void comm_find_nodes() {
    Comm& c = comm();
    const int mine[2] = {c.local_size, c.local_rank}, g = c.local_size;
    std::vector<int> all(2 * (size_t)c.size);
    comm_all_gather(all.data(), mine, 2, "start");
    bool regular = (g & (g - 1)) == 0 && g > 1 && g < c.size;
    for (int r = 0; r < c.size; r++) {
        regular = regular && all[2 * (size_t)r] == g && all[2 * (size_t)r + 1] == r % g;
    }
    c.node = comm_max(!regular, "start") ? 0 : g;
}

// Called after the device is chosen. Gradients go from GPU to GPU by NCCL, and where that cannot be they go through the
// host, a hundred times slower, only if that was asked for.
inline void comm_connect_devices(bool through_host) {
    comm_find_nodes();
    (void)through_host;
#if defined(CUDA_BUILD)
    Comm& c = comm();
    if (c.size == 1 || through_host) { return; }
    const char* hint = "--host_exchange 1 sends the gradients through the host, which is much slower";
    std::vector<uint64_t> all((size_t)c.size);
    bool built = false;
#if defined(USE_NCCL)
    built = true;
    char id[64] = "";
    int device = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetPCIBusId(id, sizeof(id) - 1, device));
    char place[256] = "";                   // machine and GPU: two ranks with the same one share it
    gethostname(place, sizeof(place) - 65);
    strcat(place, id);
    const uint64_t mine = checksum(place);
    comm_all_gather(all.data(), &mine, 1, "start");
#endif
    const std::string why = nccl_refusal(built, all);
    check(why.empty(), "%s; %s", why.c_str(), hint);
#if defined(USE_NCCL)
    c.nccl = true;
    c.chunk = 32 << 20;                     // larger messages suit the GPUs' links
    ncclUniqueId unique = {};
    try {
        if (c.rank == 0) { nccl_check(ncclGetUniqueId(&unique), "NCCL's start"); }
        comm_broadcast(&unique, sizeof(unique), "NCCL's start");
        nccl_start(unique);
    } catch (const Error& e) { die(e.code, "%s; %s", e.what(), hint); }
#endif
#endif
}

// for the start banner
inline std::string comm_description() {
    const Comm& c = comm();
    if (c.size == 1) { return "1 rank"; }
#if defined(CUDA_BUILD)
    return strprintf("%d ranks, gradients %s", c.size, c.nccl ? "by NCCL" : "through the host by MPI");
#else
    return strprintf("%d ranks, gradients by MPI", c.size);
#endif
}

#if defined(USE_MPI)
// Sends and receives them all at once. Each has its counterpart of the same size on the other rank; one of no bytes is
// left out on both. No more than comm().chunk bytes are sent, or received, by one call.
inline void comm_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives, const char* what,
                          Stream stream) {
    Comm& c = comm();
    for (const Message& m : sends) { c.sent += m.bytes; }
#if defined(USE_NCCL)
    if (c.nccl) { nccl_exchange(sends, receives, what, stream); return; }
#endif
#if defined(CUDA_BUILD)
    // MPI does not read the device: messages pass through the host, what is received first
    if (c.staging == nullptr) { c.staging = (char*)pinned_malloc(2 * (c.chunk + sizeof(float) * (size_t)c.size)); }
    char* host = c.staging;
    const auto buffer = [&](const Message& m) { host += m.bytes; return host - m.bytes; };
#else
    const auto buffer = [](const Message& m) { return (char*)m.data; };
#endif
    std::vector<std::pair<MPI_Request, int>> started;           // and the peer
    std::vector<char*> received;
    for (const Message& m : receives) {
        MPI_Request request;
        received.push_back(buffer(m));
        if (m.bytes == 0) { continue; }
        mpi_check(MPI_Irecv(received.back(), (int)m.bytes, MPI_BYTE, m.peer, 0, MPI_COMM_WORLD, &request), what);
        started.push_back({request, m.peer});
    }
    for (const Message& m : sends) {
        MPI_Request request;
        char* from = buffer(m);
        if (m.bytes == 0) { continue; }
        if (from != m.data) { copy_to_host(from, m.data, m.bytes, stream); }
        mpi_check(MPI_Isend(from, (int)m.bytes, MPI_BYTE, m.peer, 0, MPI_COMM_WORLD, &request), what);
        started.push_back({request, m.peer});
    }
    for (const auto& s : started) { mpi_wait(s.first, what, s.second); }
    for (size_t i = 0; i < receives.size(); i++) {
        const Message& m = receives[i];
        if (received[i] != m.data) { copy_to_device(m.data, received[i], m.bytes, stream); }
    }
}
#endif

// ----------------------------------------------------------------------------------------------------------
// the end

// Waits for all ranks and leaves MPI. Returns the highest of their exit codes, on every rank.
inline int comm_finish(int code) {
    fflush(stdout);
    Comm& c = comm();
    if (c.size == 1) { return code; }
    code = comm_max(code, "end");           // a collective, so that nobody leaves before the others
#if defined(USE_NCCL)
    nccl_stop();
#endif
    device_free(c.inbox);
    pinned_free(c.staging);
#if defined(USE_MPI)
    signal(SIGALRM, comm_too_late);
    alarm((unsigned)c.timeout);
    MPI_Finalize();
    alarm(0);
#endif
    c = Comm();
    return code;
}

#endif
