// ranks/wire_mpi.h -- the wire between ranks that mpirun or srun has prepared for MPI. Only comm.h includes it.
#pragma once

#include <climits>
#include <csignal>

#define OMPI_SKIP_MPICXX 1      // only the C interface
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include "wire.h"

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

// If a signal ends a rank while it registers with mpirun, mpirun may wait forever (PMIx 4.2): signals wait until then.
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
