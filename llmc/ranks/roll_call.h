// ranks/roll_call.h -- who is missing when MPI does not bring what a rank waits for. Included by comm.h alone.
//
// A rank may wait for one that is itself waiting. So each that has waited for half of --collective_timeout says so to
// all others. When its time is up, those from whom it has not heard the same during this wait are missing: they have
// stopped, or came too late by more than that half.
#ifndef LLMC_RANKS_ROLL_CALL_H
#define LLMC_RANKS_ROLL_CALL_H

constexpr int ROLL_CALL_TAG = 1;            // comm_exchange() has 0

struct RollCall {
    std::vector<char> heard;                // (ranks)
    bool called = false;

    RollCall() { listen(); heard.clear(); } // what was said during an earlier wait, which came to its end after all

    void listen() {
        heard.resize((size_t)comm().size);
        for (int there = 1; there;) {
            MPI_Status status;
            MPI_Iprobe(MPI_ANY_SOURCE, ROLL_CALL_TAG, MPI_COMM_WORLD, &there, &status);
            if (!there) { continue; }
            MPI_Recv(nullptr, 0, MPI_BYTE, status.MPI_SOURCE, ROLL_CALL_TAG, MPI_COMM_WORLD, &status);
            heard[(size_t)status.MPI_SOURCE] = 1;
        }
    }
    // "1, 3": the ranks that are missing, as far as this rank knows after so many seconds
    std::string missing(double waited) {
        if (waited < comm().timeout / 2) { return ""; }
        listen();
        std::string names;
        for (int r = 0; r < comm().size; r++) {
            if (r == comm().rank) { continue; }
            MPI_Request said;
            if (!called) {
                MPI_Isend(nullptr, 0, MPI_BYTE, r, ROLL_CALL_TAG, MPI_COMM_WORLD, &said);
                MPI_Request_free(&said);    // it has no data, and may arrive whenever it does
            }
            if (!heard[(size_t)r]) { names += strprintf("%s%d", names.empty() ? "" : ", ", r); }
        }
        called = true;
        return names;
    }
};

#endif
