// ranks/nccl.h -- device buffers from GPU to GPU. Only comm.h includes it.
//
// The communicator does not block, so that a rank that is gone is noticed here and not inside NCCL: calls return at
// once, and what they started is polled together with NCCL's own errors.
#pragma once

#include "../../base/device.h"

#include <nccl.h>               // first: while wire.h naps, the emulator's streams continue
#include "wire.h"

constexpr bool HAS_NCCL = true;

// such as 2.28.9
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
// Waits until NCCL has accepted the last call, before which no other is allowed: microseconds, less than a nap.
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
// The host waits until the device has reached a point. others: it waits for other ranks, so there is a deadline.
inline void nccl_wait(const Event& point, bool others, const char* what) {
    Deadline deadline(what);
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

// The machine and the GPU of this rank, which is the current device
inline uint64_t nccl_place(uint64_t machine) {
    char id[64] = "";
    CUDA_CHECK(cudaDeviceGetPCIBusId(id, sizeof(id) - 1, current_device()));
    return checksum(id, strlen(id), machine);
}
// What rank 0 makes and all ranks must know
inline std::string nccl_id() {
    ncclUniqueId id = {};
    nccl_check(ncclGetUniqueId(&id), "NCCL's start");
    return std::string((const char*)&id, sizeof(id));
}
inline void nccl_start(const std::string& text) {
    ncclUniqueId id;
    memcpy(&id, text.data(), sizeof(id));
    comm().nccl = true;
    comm().chunk = 32 << 20;                // GPUs' links need larger messages
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
