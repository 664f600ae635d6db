// ranks/comm.h -- the ranks of a run: one process | MPI on host buffers | NCCL between GPUs, which MPI starts.
//
// A run is one rank unless mpirun or srun started it; MPI is not even initialized then. Every function here but comm_report is
// a collective: all ranks call it, in the same order. Sums have a fixed shape, so that ranks change no bit (comm_tree.cuh).
// Whoever waits for another rank gives up after comm().timeout seconds with an Error that names both and what they were at,
// and an Error on one rank ends all of them (comm_report). A rank that dies is noticed by mpirun, which ends the others.
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

struct Comm {
    int rank = 0, size = 1;
    int local_rank = 0, local_size = 1;     // among the ranks of this machine
    double timeout = 600;                   // seconds a rank waits for another one: --collective_timeout
    size_t chunk = 1 << 20;                 // floats in a message; far below the 2^31 that MPI can count
    float* scratch = nullptr;               // on the device: a chunk of another rank's
    float* staging = nullptr;               // on the host, where MPI cannot reach the device: a chunk on its way
    bool nccl = false;                      // device buffers go from GPU to GPU
};
inline Comm& comm() { static Comm c; return c; }

// Adds up the time for which one thing is waited. A process that was stopped and goes on has not waited in between.
struct Deadline {
    const char* what;
    int peer;                               // -1: any of the others
    double waited = 0, last = wall_seconds();
    Deadline(const char* what, int peer) : what(what), peer(peer) {}
    void nap() {
        const double now = wall_seconds();
        waited += std::min(now - last, 1.0);
        last = now;
        if (waited > comm().timeout) {
            die(EXIT_DEVICE, "%s: rank %d waited %.0f s for %s (--collective_timeout): it stands still, died, or needs longer than that",
                what, comm().rank, waited, peer < 0 || peer == comm().rank ? "the other ranks" : strprintf("rank %d", peer).c_str());
        }
        if (waited < 2e-3) { sched_yield(); }
        else { usleep(waited < 1 ? 50 : 1000); }
    }
};

// ----------------------------------------------------------------------------------------------------------
// MPI

#if defined(USE_MPI)
inline void mpi_check(int result, const char* what) {
    if (result == MPI_SUCCESS) { return; }
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(result, text, &length);
    die(EXIT_DEVICE, "%s: rank %d: MPI: %s", what, comm().rank, text);
}
// Polled, since MPI_Wait knows no deadline and would keep the core busy.
inline void mpi_wait(MPI_Request request, const char* what, int peer) {
    Deadline deadline(what, peer);
    for (int done = 0;;) {
        mpi_check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), what);
        if (done) { return; }
        deadline.nap();
    }
}
#endif

#if defined(USE_NCCL)
#include "nccl.h"
#endif

// ----------------------------------------------------------------------------------------------------------
// start and end

// The number of processes that a launcher says it has started; 1 without one
inline int launched_ranks() {
    const char* text = getenv("OMPI_COMM_WORLD_SIZE");                                  // Open MPI's mpirun
    if (text == nullptr) { text = getenv("PMI_SIZE"); }                                 // MPICH's mpiexec, srun --mpi=pmi2
    if (text == nullptr && getenv("PMIX_RANK") != nullptr) { text = getenv("SLURM_STEP_NUM_TASKS"); }   // srun --mpi=pmix
    return text == nullptr ? 1 : std::max(1, atoi(text));
}

#if defined(USE_MPI)
inline void comm_too_late(int) {      // in a signal handler: no printf
    const char text[] = "error: MPI_Init or MPI_Finalize: the other ranks did not appear in time\n";
    if (write(2, text, sizeof(text) - 1) < 0) { _exit(EXIT_DEVICE); }
    _exit(EXIT_DEVICE);
}
#endif

// The first thing a program does. On all ranks but 0 nothing is written to stdout from here on.
inline void comm_init() {
    const int launched = launched_ranks();
    if (launched == 1) { return; }
#if defined(USE_MPI)
    Comm& c = comm();
    const auto before = signal(SIGALRM, comm_too_late);
    alarm((unsigned)c.timeout);
    int provided;
    if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS) { die(EXIT_DEVICE, "MPI_Init failed"); }
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &c.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &c.size);
    MPI_Comm here;
    mpi_check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, c.rank, MPI_INFO_NULL, &here), "start");
    MPI_Comm_rank(here, &c.local_rank);
    MPI_Comm_size(here, &c.local_size);
    MPI_Comm_free(&here);
    alarm(0);
    signal(SIGALRM, before);
    check(c.size == launched, "the launcher started %d processes, MPI sees %d: mpirun and the MPI that this program was built with are not "
          "the same", launched, c.size);
    if (c.rank != 0 && freopen("/dev/null", "w", stdout) == nullptr) { die(EXIT_DEVICE, "/dev/null: %s", strerror(errno)); }
#else
    const char* rank = getenv("OMPI_COMM_WORLD_RANK");
    comm().rank = rank == nullptr ? 0 : atoi(rank);         // so that one of them reports it
    die(EXIT_BAD_INPUT, "started as one of %d processes, but built without MPI: each would train alone; install libopenmpi-dev (or give "
        "make OPENMPI_DIR=path) and build anew", launched);
#endif
}

// What main() does with an Error: the message, once, and the end of all ranks with its code. A mistake that every rank makes,
// such as a bad flag, is rank 0's to tell; another rank gives it time to do so.
inline int comm_report(int code, const std::string& message) {
    Comm& c = comm();
    fflush(stdout);
    if (c.rank > 0) {
        signal(SIGTERM, SIG_DFL);           // by which mpirun ends those that rank 0 has spoken for
        usleep(1000 * (1000 + 50 * (unsigned)std::min(c.rank, 20)));
    }
    fprintf(stderr, "error: %s%s\n", c.rank > 0 ? strprintf("rank %d: ", c.rank).c_str() : "", message.c_str());
    fflush(stderr);
#if defined(USE_MPI)
    if (c.size > 1) {
        alarm(5);                           // should the libraries hang as well
#if defined(USE_NCCL)
        nccl_abort();
#endif
        MPI_Abort(MPI_COMM_WORLD, code);
        _exit(code);
    }
#endif
    return code;
}

// Ranks that share the memory of device_memory_available(); and the number of threads for set_threads: `asked`, or where mpirun
// has bound this rank to no cores of its own, its share of the machine's.
#if defined(CUDA_BUILD)
inline int comm_sharing() { return 1; }
inline int comm_threads(int asked) { return asked; }
#else
inline int comm_sharing() { return comm().local_size; }
inline int comm_threads(int asked) {
    const int local = comm().local_size;
    if (asked > 0 || local == 1 || getenv("OMP_NUM_THREADS") != nullptr || max_threads() < sysconf(_SC_NPROCESSORS_ONLN)) { return asked; }
    return std::max(1, max_threads() / local);
}
#endif

// ----------------------------------------------------------------------------------------------------------
// small things, on the host

// all: n elements of each rank, in their order
template <class T> void comm_all_gather(T* all, const T* mine, size_t n, const char* what) {
    (void)what;
    if (comm().size == 1) { std::copy_n(mine, n, all); return; }
#if defined(USE_MPI)
    check(n <= INT_MAX / sizeof(T) / (size_t)comm().size, "%s: %zu elements a rank are too many to gather", what, n);
    const int bytes = (int)(sizeof(T) * n);
    MPI_Request request;
    mpi_check(MPI_Iallgather(mine, bytes, MPI_BYTE, all, bytes, MPI_BYTE, MPI_COMM_WORLD, &request), what);
    mpi_wait(request, what, -1);
#endif
}

inline int comm_max(int x, const char* what) {
    std::vector<int> all((size_t)comm().size);
    comm_all_gather(all.data(), &x, 1, what);
    return *std::max_element(all.begin(), all.end());
}

// rank 0's bytes become everyone's
inline void comm_broadcast(void* data, size_t bytes, const char* what) {
    (void)data; (void)bytes; (void)what;
#if defined(USE_MPI)
    const size_t piece = sizeof(float) * comm().chunk;
    for (size_t i = 0; comm().size > 1 && i < bytes; i += piece) {
        MPI_Request request;
        mpi_check(MPI_Ibcast((char*)data + i, (int)std::min(piece, bytes - i), MPI_BYTE, 0, MPI_COMM_WORLD, &request), what);
        mpi_wait(request, what, 0);
    }
#endif
}

inline std::string comm_text(std::string text, const char* what) {         // likewise
    uint64_t length = text.size();
    comm_broadcast(&length, sizeof(length), what);
    text.resize(length);
    comm_broadcast(&text[0], length, what);
    return text;
}

// Have all ranks the same parameters? When not, `who` says which have others.
inline bool comm_replicas_agree(uint64_t hash, std::string* who = nullptr) {
    std::vector<uint64_t> all((size_t)comm().size);
    comm_all_gather(all.data(), &hash, 1, "comparison of the replicas");
    std::string strays;
    for (size_t r = 1; r < all.size(); r++) {
        if (all[r] != all[0]) { strays += strprintf("%s%zu", strays.empty() ? "" : ", ", r); }
    }
    if (who != nullptr && !strays.empty()) { *who = "the parameters differ from rank 0's on rank " + strays; }
    return strays.empty();
}

// of n floats on the device
inline uint64_t comm_hash(const float* data, size_t n, Stream stream) {
    std::vector<float> host(std::min(n, comm().chunk));
    uint64_t hash = n;
    for (size_t i = 0; i < n; i += host.size()) {
        const size_t bytes = sizeof(float) * std::min(host.size(), n - i);
        copy_to_host(host.data(), data + i, bytes, stream);
        hash = checksum(host.data(), bytes, hash);
    }
    return hash;
}

// ----------------------------------------------------------------------------------------------------------
// large arrays, on the device

// Which of a machine's GPUs is this rank's; 0 in a CPU build
inline int comm_device() {
#if defined(CUDA_BUILD) && !defined(SIMT)
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) { return 0; }      // find_gpu says why
    return comm().local_rank % count;
#else
    return 0;
#endif
}

// After the device is chosen. NCCL wants a GPU for every rank; ranks that share one exchange through the host.
inline void comm_connect_devices() {
#if defined(USE_NCCL)
    Comm& c = comm();
    if (c.size == 1) { return; }
    char id[64] = "";
    int device = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetPCIBusId(id, sizeof(id) - 1, device));
    char place[256] = "";
    gethostname(place, sizeof(place) - 65);
    strcat(place, id);
    std::vector<uint64_t> all((size_t)c.size);
    const uint64_t mine = checksum(place);
    comm_all_gather(all.data(), &mine, 1, "start");
    std::sort(all.begin(), all.end());
    c.nccl = std::adjacent_find(all.begin(), all.end()) == all.end();
    if (!c.nccl) { return; }
    c.chunk = 16 << 20;
    ncclUniqueId unique = {};
    if (c.rank == 0) { nccl_check(ncclGetUniqueId(&unique), "NCCL's start"); }
    comm_broadcast(&unique, sizeof(unique), "NCCL's start");
    nccl_start(unique);
#endif
}

inline std::string comm_description() {
    const Comm& c = comm();
    if (c.size == 1) { return "1 rank"; }
    return strprintf("%d ranks, gradients by %s", c.size, c.nccl ? "NCCL" : "MPI");
}

#if defined(USE_MPI)
// MPI's buffer for a chunk at `data`: that itself, or the staging buffer of a build whose device it cannot reach
inline float* comm_host_buffer(float* data) {
#if defined(CUDA_BUILD)
    Comm& c = comm();
    if (c.staging == nullptr) { c.staging = (float*)pinned_malloc(sizeof(float) * c.chunk); }
    (void)data;
    return c.staging;
#else
    return data;
#endif
}

inline void comm_send(float* data, size_t n, int to, const char* what, Stream stream) {
#if defined(USE_NCCL)
    if (comm().nccl) { nccl_send(data, n, to, what, stream); return; }
#endif
    float* host = comm_host_buffer(data);
    if (host != data) { copy_to_host(host, data, sizeof(float) * n, stream); }
    MPI_Request request;
    mpi_check(MPI_Isend(host, (int)n, MPI_FLOAT, to, 0, MPI_COMM_WORLD, &request), what);
    mpi_wait(request, what, to);
}

inline void comm_receive(float* data, size_t n, int from, const char* what, Stream stream) {
#if defined(USE_NCCL)
    if (comm().nccl) { nccl_receive(data, n, from, what, stream); return; }
#endif
    float* host = comm_host_buffer(data);
    MPI_Request request;
    mpi_check(MPI_Irecv(host, (int)n, MPI_FLOAT, from, 0, MPI_COMM_WORLD, &request), what);
    mpi_wait(request, what, from);
    if (host != data) { copy_to_device(data, host, sizeof(float) * n, stream); }
}

inline void comm_share(float* data, size_t n, const char* what, Stream stream) {        // rank 0's
#if defined(USE_NCCL)
    if (comm().nccl) { nccl_broadcast(data, n, what, stream); return; }
#endif
    float* host = comm_host_buffer(data);
    if (host != data && comm().rank == 0) { copy_to_host(host, data, sizeof(float) * n, stream); }
    comm_broadcast(host, sizeof(float) * n, what);
    if (host != data && comm().rank != 0) { copy_to_device(data, host, sizeof(float) * n, stream); }
}
#endif

// ----------------------------------------------------------------------------------------------------------
// the end

// Waits for all ranks and leaves MPI; every rank gets the highest of their exit codes.
inline int comm_finish(int code) {
    fflush(stdout);
    Comm& c = comm();
    if (c.size == 1) { return code; }
    code = comm_max(code, "end");
#if defined(USE_NCCL)
    nccl_stop();
#endif
    device_free(c.scratch);
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
