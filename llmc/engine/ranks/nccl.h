// ranks/nccl.h -- device buffers from GPU to GPU. Only comm.h includes it.
//
// The communicator does not block, so that a rank that is gone is noticed here and not inside NCCL: calls return at
// once, and what they started is polled together with NCCL's own errors.
#ifndef LLMC_ENGINE_RANKS_NCCL_H
#define LLMC_ENGINE_RANKS_NCCL_H

#include <nccl.h>

constexpr int NCCL_BLOCKS = 16;         // at most; the other multiprocessors are left to the backward

// the communicator of all ranks; null before nccl_start() and after nccl_stop()
inline ncclComm_t& nccl_comm() { static ncclComm_t c = nullptr; return c; }

// ncclInProgress is not an error: the communicator does not block.
inline void nccl_check(ncclResult_t result, const char* what) {
    if (result == ncclSuccess || result == ncclInProgress) { return; }
    die(EXIT_DEVICE, "%s: rank %d: NCCL: %s (%s); NCCL_DEBUG=WARN tells more", what, comm().rank,
        ncclGetErrorString(result), ncclGetLastError(nccl_comm()));
}
// Waits until NCCL has accepted the last call; only then the next one is allowed.
inline void nccl_settle(const char* what, int peer) {
    Deadline deadline(what, peer);
    for (;;) {
        ncclResult_t state;
        nccl_check(ncclCommGetAsyncError(nccl_comm(), &state), what);      // whether the query worked
        nccl_check(state, what);                                            // and the communicator's own state
        if (state == ncclSuccess) { return; }
        deadline.nap();
    }
}
// The host waits until the device has reached a point. others: it waits for other ranks, so there is a deadline.
inline void nccl_wait(const Event& point, bool others, const char* what) {
    Deadline deadline(what, -1);
    for (;;) {
        const cudaError_t state = cudaEventQuery(point.event);
        if (state == cudaSuccess) { return; }
        if (state != cudaErrorNotReady) { CUDA_CHECK(state); }
        cudaGetLastError();                     // cudaErrorNotReady is not an error: clear it
        ncclResult_t error;                     // perhaps another rank's: then the device would never arrive
        nccl_check(ncclCommGetAsyncError(nccl_comm(), &error), what);
        nccl_check(error, what);
        if (others) { deadline.nap(); continue; }
        comm().wire->watch(what);
        usleep(50);
    }
}

// id: made by rank 0 and known to all. The GPU of this rank is the current device.
inline void nccl_start(const ncclUniqueId& id) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.maxCTAs = NCCL_BLOCKS;
    nccl_check(ncclCommInitRankConfig(&nccl_comm(), comm().size, id, comm().rank, &config), "NCCL's start");
    nccl_settle("NCCL's start", -1);
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
    nccl_settle("NCCL's end", -1);
    nccl_check(ncclCommDestroy(nccl_comm()), "NCCL's end");
    nccl_comm() = nullptr;
}

// comm_exchange() from GPU to GPU. Returns once NCCL has accepted the calls; the stream keeps the order.
inline void nccl_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives, const char* what,
                          Stream stream) {
    nccl_check(ncclGroupStart(), what);
    for (const Message& m : receives) {
        if (m.bytes > 0) { nccl_check(ncclRecv(m.data, m.bytes, ncclChar, m.peer, nccl_comm(), stream), what); }
    }
    for (const Message& m : sends) {
        if (m.bytes > 0) { nccl_check(ncclSend(m.data, m.bytes, ncclChar, m.peer, nccl_comm(), stream), what); }
    }
    nccl_check(ncclGroupEnd(), what);
    nccl_settle(what, -1);
}

#endif
