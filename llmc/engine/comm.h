// engine/comm.h -- the ranks of a run: one process, or several that exchange buffers by MPI, sockets (wire.h) or NCCL.
//
// A run is one rank unless a launcher or the program itself has started several (launch.h). A function that exchanges
// data is a collective: all ranks call it, in the same order. Sums have a fixed shape, so that the number of ranks does
// not change a bit (parameters.cuh). An Error on one rank ends all of them (comm_report). If a rank dies, the launcher
// ends the remaining ranks, or they notice it themselves.
#pragma once

#include <climits>
#include <csignal>
#include <fstream>
#include <future>
#include <thread>

#include "../base/device.h"
#include "../base/host.h"
#include "flags.h"
#include "launch.h"
#include "safetensors.h"
#if defined(USE_NCCL)
#include <nccl.h>               // before wire.h, whose naps let the emulator's streams continue
#endif
#if defined(USE_MPI)
#define OMPI_SKIP_MPICXX 1      // only the C interface
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#endif
#include "wire.h"

// ----------------------------------------------------------------------------------------------------------
// NCCL: device buffers go from GPU to GPU
//
// The communicator does not block, so that the loss of a rank is noticed here and not inside NCCL: calls return at
// once, and are polled together with NCCL's own errors.

constexpr int NCCL_BLOCKS = 16;         // at most; the other multiprocessors are left to the backward
#if defined(USE_NCCL)
constexpr bool HAS_NCCL = true;

// "2.28.9"
inline std::string nccl_version() {
    int v = 0;
    ncclGetVersion(&v);
    return strprintf("%d.%d.%d", v / 10000, v / 100 % 100, v % 100);
}
// the communicator of all ranks; null before nccl_start() and after nccl_stop()
inline ncclComm_t& nccl_comm() { static ncclComm_t c = nullptr; return c; }

// ncclInProgress is not an error: the communicator does not block.
inline void nccl_check(ncclResult_t result, const char* what) {
    if (result == ncclSuccess || result == ncclInProgress) { return; }
    die(EXIT_DEVICE, "%s: rank %d: NCCL: %s (%s); NCCL_DEBUG=WARN tells more", what, comm().rank,
        ncclGetErrorString(result), ncclGetLastError(nccl_comm()));
}
// Waits until NCCL has accepted the last call; no other is allowed before. This takes microseconds, less than a nap.
inline void nccl_settle(const char* what) {
    Deadline deadline(what);
    const double start = wall_seconds();
    for (;;) {
        ncclResult_t state;
        nccl_check(ncclCommGetAsyncError(nccl_comm(), &state), what);      // whether the query worked
        nccl_check(state, what);                                            // and the communicator's own state
        if (state == ncclSuccess) { return; }
        if (wall_seconds() - start > 50e-6) { deadline.nap(); }
    }
}
// The host waits until the device has reached a point. others: the device waits for other ranks, up to the deadline
inline void nccl_wait(const Event& point, bool others, const char* what) {
    Deadline deadline(what);
    for (;;) {
        const cudaError_t state = cudaEventQuery(point.event);
        if (state == cudaSuccess) { return; }
        if (state != cudaErrorNotReady) { CUDA_CHECK(state); }
        cudaGetLastError();                     // cudaErrorNotReady is not an error: clear it
        ncclResult_t error;                     // after an error, another rank's too, the device never arrives
        nccl_check(ncclCommGetAsyncError(nccl_comm(), &error), what);
        nccl_check(error, what);
        if (others) { deadline.nap(); continue; }
        comm().wire->watch(what);
        usleep(50);
    }
}

// The machine and the GPU of this rank, which is the current device
inline uint64_t nccl_place(uint64_t machine) {
    char id[64] = "";
    CUDA_CHECK(cudaDeviceGetPCIBusId(id, sizeof(id) - 1, current_device()));
    return checksum(id, strlen(id), machine);
}
// The communicator's id, which rank 0 makes for all ranks
inline std::string nccl_id() {
    ncclUniqueId id = {};
    nccl_check(ncclGetUniqueId(&id), "NCCL's start");
    return std::string((const char*)&id, sizeof(id));
}
inline void nccl_start(const std::string& text) {
    ncclUniqueId id;
    memcpy(&id, text.data(), sizeof(id));
    comm().nccl = true;
    comm().chunk = 32 << 20;                // links between GPUs are fast only with large messages
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.maxCTAs = NCCL_BLOCKS;
    nccl_check(ncclCommInitRankConfig(&nccl_comm(), comm().size, id, comm().rank, &config), "NCCL's start");
    nccl_settle("NCCL's start");
}
// after an error: does not wait for the other ranks
inline void nccl_abort() {
    if (nccl_comm() != nullptr) { ncclCommAbort(nccl_comm()); }
    nccl_comm() = nullptr;
}
// at the end of a run, on all ranks
inline void nccl_stop() {
    if (nccl_comm() == nullptr) { return; }
    nccl_check(ncclCommFinalize(nccl_comm()), "NCCL's end");
    nccl_settle("NCCL's end");
    nccl_check(ncclCommDestroy(nccl_comm()), "NCCL's end");
    nccl_comm() = nullptr;
}

// comm_exchange() from GPU to GPU. Returns once NCCL has accepted the calls; the stream keeps the order.
inline void nccl_exchange(const Messages& sends, const Messages& receives, const char* what, Stream stream) {
    nccl_check(ncclGroupStart(), what);
    for (const Message& m : receives) {
        if (m.bytes > 0) { nccl_check(ncclRecv(m.data, m.bytes, ncclChar, m.peer, nccl_comm(), stream), what); }
    }
    for (const Message& m : sends) {
        if (m.bytes > 0) { nccl_check(ncclSend(m.data, m.bytes, ncclChar, m.peer, nccl_comm(), stream), what); }
    }
    nccl_check(ncclGroupEnd(), what);
    nccl_settle(what);
}
#else
constexpr bool HAS_NCCL = false;
inline std::string nccl_version() { return ""; }
inline uint64_t nccl_place(uint64_t) { return 0; }
inline std::string nccl_id() { return ""; }
inline void nccl_start(const std::string&) {}
inline void nccl_abort() {}
inline void nccl_stop() {}
inline void nccl_wait(const Event&, bool, const char*) {}
inline void nccl_exchange(const Messages&, const Messages&, const char*, Stream) {}
#endif

// ----------------------------------------------------------------------------------------------------------
// MPI: the wire between ranks that mpirun or srun has started

#if defined(USE_MPI)
// MPI returns errors instead of ending the process (MPI_ERRORS_RETURN), so that they become an Error.
inline void mpi_check(int result, const char* what) {
    if (result == MPI_SUCCESS) { return; }
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(result, text, &length);
    die(EXIT_DEVICE, "%s: rank %d: MPI: %s", what, comm().rank, text);
}

// MPI_Init and MPI_Finalize cannot be polled: SIGALRM ends the process if the other ranks never come.
inline void mpi_too_late(int) {             // in a signal handler: no printf
    const char text[] = "error: MPI_Init or MPI_Finalize: the other ranks did not appear in time\n";
    if (write(2, text, sizeof(text) - 1) < 0) { _exit(EXIT_DEVICE); }
    _exit(EXIT_DEVICE);
}

struct MpiWire : Wire {
    static constexpr int DATA_TAG = 0, ROLL_CALL_TAG = 1;

    MpiWire() : Wire("MPI") {}

    // Polls, because MPI_Wait has no deadline and keeps the core busy.
    void exchange(const Messages& sends, const Messages& receives, const char* what) override {
        std::vector<MPI_Request> started;
        const auto start = [&](auto mpi_call, const Messages& messages) {
            for (const Message& m : messages) {
                if (m.bytes == 0) { continue; }
                check(m.bytes <= INT_MAX, "%s: %zu bytes are too many for a message", what, m.bytes);
                started.emplace_back();
                mpi_check(mpi_call(m.data, (int)m.bytes, MPI_BYTE, m.peer, DATA_TAG, MPI_COMM_WORLD, &started.back()),
                          what);
            }
        };
        start(MPI_Irecv, receives);
        start(MPI_Isend, sends);
        for (MPI_Request& request : started) {
            const auto done = [&] {
                int is = 0;
                mpi_check(MPI_Test(&request, &is, MPI_STATUS_IGNORE), what);
                return is != 0;
            };
            wire_wait(*this, done, what);
        }
    }
    void leave() override {
        signal(SIGALRM, mpi_too_late);
        alarm((unsigned)comm().timeout);
        MPI_Finalize();
        alarm(0);
    }
    void end_all(int code) override {
        usleep(200000);                     // MPICH's mpiexec drops a message that it has not yet passed on
        MPI_Abort(MPI_COMM_WORLD, code);
    }

    void say_waiting(int rank) override {
        MPI_Request said;
        MPI_Isend(nullptr, 0, MPI_BYTE, rank, ROLL_CALL_TAG, MPI_COMM_WORLD, &said);
        MPI_Request_free(&said);            // it has no data, and may arrive at any time
    }
    void hear_waiting(std::vector<char>& heard) override {
        for (int there = 1; there;) {
            MPI_Status status;
            MPI_Iprobe(MPI_ANY_SOURCE, ROLL_CALL_TAG, MPI_COMM_WORLD, &there, &status);
            if (!there) { return; }
            MPI_Recv(nullptr, 0, MPI_BYTE, status.MPI_SOURCE, ROLL_CALL_TAG, MPI_COMM_WORLD, &status);
            heard[(size_t)status.MPI_SOURCE] = 1;
        }
    }
};

// Signals wait while a rank registers with mpirun: if one ended the rank, mpirun might wait forever (PMIx 4.2).
struct SignalsWait {
    sigset_t before;
    SignalsWait() {
        sigset_t held;
        sigemptyset(&held);
        for (int number : STOP_SIGNALS) { sigaddset(&held, number); }
        pthread_sigmask(SIG_BLOCK, &held, &before);
    }
    ~SignalsWait() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
};

// Sets this rank and the number of ranks.
inline Wire* start_mpi() {
    Comm& c = comm();
    const SignalsWait during_start;
    const auto before = signal(SIGALRM, mpi_too_late);
    alarm((unsigned)c.timeout);
    int provided;
    const int result = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
    if (result != MPI_SUCCESS) { die(EXIT_DEVICE, "MPI_Init failed"); }
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &c.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &c.size);
    MPI_Comm here;                          // the ranks of this machine
    mpi_check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, c.rank, MPI_INFO_NULL, &here), "start");
    MPI_Comm_rank(here, &c.local_rank);
    MPI_Comm_size(here, &c.local_size);
    MPI_Comm_free(&here);
    alarm(0);
    signal(SIGALRM, before);
    return new MpiWire();
}
#else
inline Wire* start_mpi() { return nullptr; }
#endif

// ----------------------------------------------------------------------------------------------------------
// start and errors

// A program calls this first; afterwards only rank 0 writes to stdout. program: its name and flags, for messages
inline void comm_init(const Launch& launch, const Names& program) {
    if (launch.size == 1) { return; }
    Comm& c = comm();
    if (launch.mpi) { c.wire = start_mpi(); }
    if (!launch.sockets.empty()) {
        c.wire = new SocketWire(launch.sockets);
        c.rank = c.local_rank = launch.rank;
        c.size = c.local_size = launch.size;
    }
    if (c.wire == nullptr) { refuse_launch(launch, program); }
    c.spins = c.local_size <= sysconf(_SC_NPROCESSORS_ONLN);
    if (c.size != launch.size && launch.rank > 0) { leave_to_rank0(); }
    check(c.size == launch.size, "MPI: expected the %d processes that the launcher started, got %d: is it of another "
          "MPI than the one this program was built with? --ranks needs none", launch.size, c.size);
    if (c.rank != 0 && freopen("/dev/null", "w", stdout) == nullptr) {
        die(EXIT_DEVICE, "/dev/null: %s", strerror(errno));
    }
}

// main() calls this with an Error: it prints the message and ends all ranks with its code. An error that every rank
// finds, such as a bad flag, is reported once, by rank 0: the other ranks give it time to do so.
inline int comm_report(int code, const std::string& message) {
    Comm& c = comm();
    fflush(stdout);
    if (c.rank > 0) {
        signal(SIGTERM, SIG_DFL);           // the launcher sends it once rank 0 has reported
        const double patience = 1 + 0.05 * std::min(c.rank, 20);        // seconds, staggered by rank
        if (c.wire != nullptr) { c.wire->listen(patience); } else { usleep((useconds_t)(1e6 * patience)); }
    }
    const std::string who = c.rank > 0 ? strprintf("rank %d: ", c.rank) : "";
    fprintf(stderr, "error: %s%s\n", who.c_str(), printable(message, 2 * LONGEST_MESSAGE).c_str());
    fflush(stderr);
    if (c.wire == nullptr) { return code; }
    alarm(5);                               // in case the libraries hang as well
    nccl_abort();
    c.wire->end_all(code);
    _exit(code);
}

// The number of threads for set_threads(): `asked` if given; else this rank's share of the cores of its control group,
// and of the machine's if the launcher has not bound it to cores of its own.
inline int comm_threads(int asked) {
    const int local = comm().local_size;
    const bool said = asked > 0 || getenv("OMP_NUM_THREADS") != nullptr;
    const bool bound = max_threads() < sysconf(_SC_NPROCESSORS_ONLN);
    if (ON_GPU || said) { return asked; }
    const double allowed = std::ceil(group_limits().cores) / local;
    return std::max(1, (int)std::min(allowed, (double)(bound ? max_threads() : max_threads() / local)));
}

// ----------------------------------------------------------------------------------------------------------
// collectives on the host, for a few bytes

// all (size * n): the n elements of every rank, in the order of the ranks
template <class T> void comm_all_gather(T* all, const T* mine, size_t n, const char* what) {
    const Comm& c = comm();
    std::copy_n(mine, n, all + n * (size_t)c.rank);
    Messages sends, receives;
    for (int r = 0; r < c.size; r++) {
        if (r == c.rank) { continue; }
        sends.push_back({r, (void*)mine, sizeof(T) * n});
        receives.push_back({r, all + n * (size_t)r, sizeof(T) * n});
    }
    if (c.size > 1) { c.wire->exchange(sends, receives, what); }
}

// the largest x of all ranks, on all of them
inline int comm_max(int x, const char* what) {
    std::vector<int> all((size_t)comm().size);
    comm_all_gather(all.data(), &x, 1, what);
    return *std::max_element(all.begin(), all.end());
}

// Whether any rank has received a signal to stop (stop_signal)
inline bool comm_stops() { return comm_max((int)stop_signal, "signals") != 0; }

// data (bytes): every rank receives rank 0's
inline void comm_broadcast(void* data, size_t bytes, const char* what) {
    const Comm& c = comm();
    Messages sends, receives;
    if (c.rank > 0) { receives.push_back({0, data, bytes}); }
    for (int r = 1; r < c.size && c.rank == 0; r++) { sends.push_back({r, data, bytes}); }
    if (c.size > 1) { c.wire->exchange(sends, receives, what); }
}

// rank 0's text
inline std::string comm_text(std::string text, const char* what) {
    uint64_t length = text.size();          // first, so that the other ranks can make room
    comm_broadcast(&length, sizeof(length), what);
    text.resize(length);
    comm_broadcast(&text[0], length, what);
    return text;
}

// The ranks whose hash is not rank 0's, on all ranks
inline std::vector<int> ranks_that_differ(uint64_t hash) {
    std::vector<uint64_t> all((size_t)comm().size);
    comm_all_gather(all.data(), &hash, 1, "comparison of the ranks");
    std::vector<int> differing;
    for (int r = 1; r < comm().size; r++) { if (all[(size_t)r] != all[0]) { differing.push_back(r); } }
    return differing;
}

// On rank 0 alone: a message that every rank would print
PRINTF_LIKE(1, 2) inline void say_once(const char* fmt, ...) {
    if (comm().rank > 0) { return; }
    va_list ap;
    va_start(ap, fmt);
    const std::string s = vstrprintf(fmt, ap);
    va_end(ap);
    say("%s", s.c_str());
}

// ----------------------------------------------------------------------------------------------------------
// exchanges between devices, for large arrays

// the number of this rank's GPU on its machine; 0 in a CPU build and without a GPU, which find_gpu() reports
inline int comm_device() {
    const int count = device_count();
    return count > 0 ? comm().local_rank % count : 0;       // more ranks than GPUs share them
}

// Why gradients cannot go from GPU to GPU, "" if they can. built: with NCCL; places: of each rank, its machine and GPU
inline std::string nccl_refusal(bool built, const std::vector<uint64_t>& places) {
    if (!built) { return "this program was built without NCCL (give make NCCL_DIR=path, and build again)"; }
    for (size_t r = 1; r < places.size(); r++) {
        const size_t other = (size_t)(std::find(places.begin(), places.end(), places[r]) - places.begin());
        if (other < r) {
            return strprintf("ranks %zu and %zu share a GPU, and NCCL wants one for each rank: start no more ranks on "
                             "a machine than it has GPUs", other, r);
        }
    }
    return "";
}

// A rank's machine: its number of ranks, and this rank's index among them
struct OnMachine { int size, rank; };
// g if the ranks are numbered machine after machine, with g = 2^k > 1 ranks on each of several machines; else 0
inline int ranks_of_each_machine(const std::vector<OnMachine>& ranks) {
    const int size = (int)ranks.size(), g = ranks[0].size;
    bool regular = (g & (g - 1)) == 0 && g > 1 && g < size;
    for (int r = 0; r < size; r++) {
        regular = regular && ranks[(size_t)r].size == g && ranks[(size_t)r].rank == r % g;
    }
    return regular ? g : 0;
}
// Two containers on one machine count as two.
inline uint64_t this_machine() {
    char name[256] = "";
    gethostname(name, sizeof(name) - 1);
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    return checksum(name + (" " + boot));
}
// Called after the device is chosen. Gradients go from GPU to GPU by NCCL, without which several ranks are refused.
// Sets comm().node, too: parameters.cuh then sums on each machine first.
inline void comm_connect_devices() {
    Comm& c = comm();
    const OnMachine here = {c.local_size, c.local_rank};
    std::vector<OnMachine> machines((size_t)c.size);
    comm_all_gather(machines.data(), &here, 1, "start");
    c.node = ranks_of_each_machine(machines);
    if (!ON_GPU || c.size == 1) { return; }
    std::vector<uint64_t> all((size_t)c.size);
    const uint64_t mine = nccl_place(this_machine());
    comm_all_gather(all.data(), &mine, 1, "start");
    const std::string why = nccl_refusal(HAS_NCCL, all);
    check(why.empty(), "%s", why.c_str());
    nccl_start(comm_text(comm().rank == 0 ? nccl_id() : "", "NCCL's start"));
}

// for the start banner
inline std::string comm_description() {
    const Comm& c = comm();
    if (c.size == 1) { return "1 rank"; }
    return strprintf("%d ranks, gradients by %s", c.size, c.nccl ? ("NCCL " + nccl_version()).c_str() : c.wire->name);
}

// Sends and receives all pieces at once. The other rank passes a piece of the same size for each; both skip pieces of 0
// bytes. One call sends at most comm().chunk bytes, and receives at most that many.
inline void comm_exchange(const Messages& sends, const Messages& receives, const char* what, Stream stream) {
    Comm& c = comm();
    for (const Message& m : sends) { c.sent += m.bytes; }
    if (c.nccl) { nccl_exchange(sends, receives, what, stream); } else { c.wire->exchange(sends, receives, what); }
}

// ----------------------------------------------------------------------------------------------------------
// work on some ranks, for which the other ranks wait without a deadline

// A collective. The ranks with `mine` do the work, each in a thread, while their main threads tell the other ranks that
// they are alive. --collective_timeout counts from the last of these ticks, so a disk may be slow, but a stopped rank
// ends the run. The work must not call a collective. Its exception is thrown again on its rank.
template <class Work> void ranks_work(bool mine, Work work, const char* what) {
    if (comm().size == 1) {
        if (mine) { work(); }
        return;
    }
    std::packaged_task<void()> task([device = current_device(), work] {
        use_device(device);                 // a new thread has the first one
        work();
    });
    std::future<void> end = task.get_future();
    if (mine) { std::thread(std::move(task)).detach(); }
    const std::chrono::duration<double> tick(std::min(1.0, comm().timeout / 4));
    try {
        while (comm_max(mine && end.wait_for(tick) != std::future_status::ready, what)) {}
    } catch (const Error& e) {
        // Another rank is gone. An exit in the middle of the work is safe: only a complete checkpoint gets its name.
        if (mine) { _exit(comm_report(e.code, e.what())); }
        throw;
    }
    if (mine) { end.get(); }
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

// ----------------------------------------------------------------------------------------------------------
// what must be equal on all ranks: their program, flags, data and model. A difference is the same error on every rank,
// with both values in it.

// Dies unless all ranks have the same values under the same keys. Compares one hash of all facts, and only if that
// differs, key after key.
inline void check_same(const Facts& facts) {
    uint64_t hash = 0;
    for (const auto& [key, value] : facts) { hash = checksum(value.data(), value.size(), hash); }
    if (ranks_that_differ(hash).empty()) { return; }
    for (const auto& [key, value] : facts) {
        const std::vector<int> differing = ranks_that_differ(checksum(value));
        if (differing.empty()) { continue; }
        const size_t room = 1024;
        std::string shown = printable(value, 250);          // escaped, at most 4 bytes each
        shown.resize(room);
        std::vector<char> all(room * (size_t)comm().size);
        comm_all_gather(all.data(), shown.data(), room, "comparison of the ranks");
        die(EXIT_BAD_INPUT, "%s: expected the same on all ranks, got %s on rank %d and %s on rank 0", key.c_str(),
            &all[room * (size_t)differing[0]], differing[0], all.data());
    }
}

// The program, as two builds may round or exchange differently, and all flags but --threads
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

// The files of a flag, given their records or their paths
inline void check_same_records(const std::string& flag, const Json& files) {
    uint64_t bytes = 0;
    for (const Json& f : files) { bytes += f.at("bytes").get<uint64_t>(); }
    check_same({{flag, strprintf("%zu files, %llu bytes, checksum %08x", files.size(), (unsigned long long)bytes,
                                 (unsigned)checksum(json_text(files)))}});
}
inline void check_same_files(const std::string& flag, const std::vector<std::string>& paths) {
    if (comm().size > 1) { check_same_records(flag, file_records(paths)); }
}

// The model that a flag names, which every rank reads. A checkpoint's manifest stands for all bytes of its files.
inline void check_same_model(const std::string& flag, const std::string& path) {
    std::vector<std::string> files;
    for (const std::string name : {"", "/manifest.json", "/state.json", "/config.json", "/model.safetensors",
                                   "/model.safetensors.index.json"}) {
        if (path_exists(path + name) && !is_directory(path + name)) { files.push_back(path + name); }
    }
    check_same_files(flag + " " + path, files);
}

// ----------------------------------------------------------------------------------------------------------
// the end

// Waits for all ranks and leaves them. Returns the highest of their exit codes, on every rank.
inline int comm_finish(int code) {
    fflush(stdout);
    Comm& c = comm();
    if (c.size == 1) { return code; }
    code = comm_max(code, "end");           // a collective, so that no rank leaves early
    nccl_stop();
    device_free(c.inbox);
    c.wire->leave();
    delete c.wire;
    c = Comm();
    return code;
}
