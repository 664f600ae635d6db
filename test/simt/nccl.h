// nccl.h -- stands in for NCCL on the emulated GPU: what llmc/ranks/nccl.h uses of it, over MPI.
//
// It is as strict and as slow as the real one may be. A communicator that does not block needs some time, drawn at
// random, to accept each call, and refuses the next one before. Messages are exchanged when the stream comes to them,
// and both sides' types and sizes must agree.
//
//   SIMT_GPUS=N               GPUs of the machine; each rank of it needs one of its own
//   SIMT_NCCL=fail:K|hang:K   the K-th group of messages of this rank fails, or never ends
//   SIMT_NCCL_RANK=R          only rank R does that
#ifndef TEST_SIMT_NCCL_H
#define TEST_SIMT_NCCL_H

#include <memory>

#include <mpi.h>

enum ncclResult_t {
    ncclSuccess = 0,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7
};
enum ncclDataType_t { ncclChar = 0, ncclFloat = 7 };
struct ncclUniqueId { char internal[128]; };
struct ncclConfig_t { int blocking; };
#define NCCL_CONFIG_INITIALIZER { 1 }
#define NCCL_MAJOR 2
#define NCCL_MINOR 18
#define NCCL_VERSION_CODE 21800

struct SimtMessage {
    void* data;
    size_t bytes;
    int peer, type;
    bool send;
    cudaStream_t stream;
};
struct SimtNccl {
    int rank, size;
    bool blocking;
    int polls = 0;                                  // until the last call is accepted
    ncclResult_t state = ncclSuccess;               // what came after
    uint64_t draws = 0;
    int groups = 0;                                 // of messages, so far
    int depth = 0;                                  // of ncclGroupStart
    std::vector<SimtMessage> pending = {};
    bool finalized = false;
};
using ncclComm_t = SimtNccl*;
inline ncclComm_t simt_nccl = nullptr;              // the group calls name no communicator

inline const char* ncclGetErrorString(ncclResult_t e) {
    switch (e) {
        case ncclSuccess: return "no error";
        case ncclInProgress: return "NCCL operation in progress";
        case ncclInvalidUsage: return "invalid usage";
        case ncclInvalidArgument: return "invalid argument";
        case ncclRemoteError: return "remote process exited or there was a network error";
        default: return "internal error";
    }
}
inline const char* ncclGetLastError(ncclComm_t) { return "the emulated NCCL"; }

// The host of a real machine is not needed for its GPU to go on: here the streams take turns while it waits for MPI.
extern "C" inline __attribute__((used)) int MPI_Test(MPI_Request* request, int* done, MPI_Status* status) {
    int turns = 3;
    const auto idle = [](cudaStream_t s) { return s->queue.empty(); };
    simt_run([&] { return turns-- == 0 || std::all_of(simt_streams.begin(), simt_streams.end(), idle); });
    return PMPI_Test(request, done, status);
}

// The last call was accepted, or (a communicator that does not block) will be soon.
inline ncclResult_t simt_accept(ncclComm_t c) {
    const char* seed = getenv("SIMT_SEED");
    const uint64_t key = seed != nullptr ? strtoull(seed, nullptr, 10) : 1;
    c->draws++;
    c->polls = c->blocking ? 0 : (int)(hash64(key, c->draws) % 4);
    return c->polls > 0 ? ncclInProgress : c->state;
}
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* state) {
    if (c == nullptr) { return ncclInvalidArgument; }
    *state = c->polls > 0 ? ncclInProgress : c->state;
    if (c->polls > 0) { c->polls--; }
    return ncclSuccess;
}
inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    memset(id->internal, 77, sizeof(id->internal));
    return ncclSuccess;
}
inline ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
    if (id.internal[5] != 77 || rank < 0 || rank >= size) { return ncclInvalidArgument; }
    *c = simt_nccl = new SimtNccl{rank, size, config->blocking != 0};
    return simt_accept(*c);
}
inline ncclResult_t ncclCommFinalize(ncclComm_t c) {
    if (c->polls > 0) { return ncclInvalidUsage; }
    c->finalized = true;
    return simt_accept(c);
}
inline ncclResult_t ncclCommDestroy(ncclComm_t c) {
    if (c->polls > 0 || !c->finalized) { return ncclInvalidUsage; }
    delete c;
    return ncclSuccess;
}
inline ncclResult_t ncclCommAbort(ncclComm_t) { return ncclSuccess; }

// One group of messages on its way: all are started when the stream comes to them
struct SimtExchange {
    std::vector<SimtMessage> messages;
    std::vector<MPI_Request> requests;
    bool hangs = false;

    SimtTurn turn(ncclComm_t c) {
        const int tag = 1000;                               // and the type, so that other types never meet
        if (hangs) { return SimtTurn::Later; }
        for (size_t i = requests.size(); i < messages.size(); i++) {
            const SimtMessage& m = messages[i];
            requests.push_back(MPI_REQUEST_NULL);
            if (m.send) {
                MPI_Isend(m.data, (int)m.bytes, MPI_BYTE, m.peer, tag + m.type, MPI_COMM_WORLD, &requests.back());
            } else {
                MPI_Irecv(m.data, (int)m.bytes, MPI_BYTE, m.peer, tag + m.type, MPI_COMM_WORLD, &requests.back());
            }
        }
        for (size_t i = 0; i < messages.size(); i++) {
            if (requests[i] == MPI_REQUEST_NULL) { continue; }
            MPI_Status status;
            int done = 0, bytes = 0;
            const int error = PMPI_Test(&requests[i], &done, &status);
            if (error == MPI_SUCCESS && !done) { return SimtTurn::Later; }
            if (error == MPI_SUCCESS && !messages[i].send) { MPI_Get_count(&status, MPI_BYTE, &bytes); }
            const bool same = messages[i].send || bytes == (int)messages[i].bytes;
            if (error != MPI_SUCCESS || !same) { c->state = ncclInvalidUsage; }         // of another size
            requests[i] = MPI_REQUEST_NULL;
        }
        return SimtTurn::Done;
    }
};
inline ncclResult_t ncclGroupStart() {
    if (simt_nccl->polls > 0) { return ncclInvalidUsage; }
    simt_nccl->depth++;
    return ncclSuccess;
}
inline ncclResult_t ncclGroupEnd() {
    ncclComm_t c = simt_nccl;
    if (c->depth-- != 1) { return ncclSuccess; }
    std::map<cudaStream_t, SimtExchange> exchanges;
    for (const SimtMessage& m : c->pending) { exchanges[m.stream].messages.push_back(m); }
    c->pending.clear();
    c->groups++;
    const char *plan = getenv("SIMT_NCCL"), *who = getenv("SIMT_NCCL_RANK");
    char kind[8] = "";
    int at = 0;
    if (plan != nullptr && (who == nullptr || atoi(who) == c->rank)) { sscanf(plan, "%7[a-z]:%d", kind, &at); }
    if (at == c->groups && strcmp(kind, "fail") == 0) { c->state = ncclRemoteError; }
    for (auto& e : exchanges) {
        e.second.hangs = at == c->groups && strcmp(kind, "hang") == 0;
        const auto exchange = std::make_shared<SimtExchange>(e.second);
        simt_give(e.first, [=] { return exchange->turn(c); });
    }
    return simt_accept(c);
}
inline ncclResult_t simt_message(const SimtMessage& m, ncclComm_t c) {
    if (c->polls > 0 || m.stream == nullptr) { return ncclInvalidUsage; }
    if (m.peer < 0 || m.peer >= c->size || m.bytes > INT_MAX) { return ncclInvalidArgument; }
    const bool alone = c->depth == 0;
    if (alone) { ncclGroupStart(); }
    c->pending.push_back(m);
    return alone ? ncclGroupEnd() : ncclSuccess;
}
inline ncclResult_t ncclSend(const void* data, size_t n, ncclDataType_t type, int peer, ncclComm_t c, cudaStream_t s) {
    return simt_message({(void*)data, n * (type == ncclFloat ? 4 : 1), peer, type, true, s}, c);
}
inline ncclResult_t ncclRecv(void* data, size_t n, ncclDataType_t type, int peer, ncclComm_t c, cudaStream_t s) {
    return simt_message({data, n * (type == ncclFloat ? 4 : 1), peer, type, false, s}, c);
}

#endif
