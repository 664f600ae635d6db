// nccl.h -- stands in for NCCL on the emulated GPU: what engine/comm.h uses of it, over files. The unique id is the
// name of their directory.
//
// It is as strict and as slow as the real one may be. A communicator that does not block needs some time, drawn at
// random, to accept each call, and refuses the next one before. Messages are exchanged when the stream comes to them,
// and both sides' types and sizes must agree.
//
//   SIMT_GPUS=N               GPUs of the machine; each rank of it needs one of its own
//   SIMT_NCCL=fail:K|hang:K   the K-th group of messages of this rank fails, or never ends
//   SIMT_NCCL_RANK=R          only rank R does that
#pragma once

#include <memory>

#include <fcntl.h>
#include <poll.h>
#include <sched.h>

#include "llmc/base/math.h"

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
struct ncclConfig_t { int blocking, maxCTAs; };
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_INITIALIZER { 1, NCCL_CONFIG_UNDEF_INT }

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
    bool aborted = false;
    std::string directory = "";
    std::map<std::string, int> numbers = {};        // of messages so far, by sender, receiver, type and way
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

// A real GPU does not need the host to continue. Here the streams take turns while the host naps, as it does when it
// waits for another rank.
inline int simt_naps = 0;
inline void simt_nap() {
    int turns = 3;
    simt_naps++;
    const auto idle = [](cudaStream_t s) { return s->queue.empty(); };
    simt_run([&] { return turns-- == 0 || std::all_of(simt_streams.begin(), simt_streams.end(), idle); });
}
inline int simt_sched_yield() { simt_nap(); return sched_yield(); }
inline int simt_usleep(useconds_t microseconds) { simt_nap(); return usleep(microseconds); }
inline int simt_poll(pollfd* asked, nfds_t n, int most) { simt_nap(); return poll(asked, n, std::min(most, 1)); }
#define sched_yield simt_sched_yield
#define poll simt_poll
#define usleep simt_usleep

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
inline ncclResult_t ncclGetVersion(int* version) { *version = 22809; return ncclSuccess; }
inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    *id = {};
    strcpy(id->internal, access("/dev/shm", W_OK) == 0 ? "/dev/shm/simt_nccl.XXXXXX" : "/tmp/simt_nccl.XXXXXX");
    return mkdtemp(id->internal) != nullptr ? ncclSuccess : ncclInternalError;
}
inline ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
    if (access(id.internal, W_OK) != 0 || rank < 0 || rank >= size) { return ncclInvalidArgument; }
    const int most = 32;                            // blocks: the real library chooses, unless it gets a limit
    if (config->maxCTAs < 1 || config->maxCTAs > most) { return ncclInvalidArgument; }
    *c = simt_nccl = new SimtNccl{rank, size, config->blocking != 0};
    simt_nccl->directory = id.internal;
    return simt_accept(*c);
}
inline ncclResult_t ncclCommFinalize(ncclComm_t c) {
    if (c->polls > 0) { return ncclInvalidUsage; }
    c->finalized = true;
    return simt_accept(c);
}
inline ncclResult_t ncclCommDestroy(ncclComm_t c) {
    if (c->polls > 0 || !c->finalized) { return ncclInvalidUsage; }
    rmdir(c->directory.c_str());                    // unless a slower rank has still to read something
    delete c;
    return ncclSuccess;
}
inline ncclResult_t ncclCommAbort(ncclComm_t c) {
    if (access(c->directory.c_str(), W_OK) == 0) {  // no other rank was faster
        for (const std::string& name : list_directory(c->directory)) { unlink((c->directory + "/" + name).c_str()); }
        rmdir(c->directory.c_str());
    }
    c->aborted = true;                              // it stays, for the messages that are on their way
    return ncclSuccess;
}

// One group of messages on its way. Each is sent or received by a turn of its own, drawn at random.
struct SimtExchange {
    std::vector<SimtMessage> messages;
    std::vector<std::string> files;                         // one for each, named when the group is complete
    bool hangs = false;

    void send(const SimtMessage& m, const std::string& file) {
        const std::string partial = file + ".partial";
        const int fd = open(partial.c_str(), O_WRONLY | O_CREAT | O_EXCL, 0600);
        io_write(fd, m.data, m.bytes, partial);
        close(fd);
        io_rename(partial, file);
    }
    SimtTurn turn(ncclComm_t c) {
        if (c->aborted) { return SimtTurn::Done; }
        if (hangs) { return SimtTurn::Later; }
        c->draws++;
        const size_t first = (size_t)(hash64(99, c->draws) % messages.size());
        for (size_t k = 0; k < messages.size(); k++) {
            const size_t i = (first + k) % messages.size();
            if (files[i].empty() || (!messages[i].send && access(files[i].c_str(), R_OK) != 0)) { continue; }
            if (messages[i].send) {
                try { send(messages[i], files[i]); } catch (const Error&) {     // an aborted rank took the directory
                    c->state = ncclRemoteError;
                    return SimtTurn::Later;
                }
            } else {
                const std::string text = read_file(files[i], 1u << 30);
                if (text.size() != messages[i].bytes) { c->state = ncclInvalidUsage; }      // of another size
                memcpy(messages[i].data, text.data(), std::min(text.size(), messages[i].bytes));
                unlink(files[i].c_str());
            }
            files[i].clear();
            break;
        }
        const bool all = std::all_of(files.begin(), files.end(), [](const std::string& f) { return f.empty(); });
        return all ? SimtTurn::Done : SimtTurn::Later;
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
    for (const SimtMessage& m : c->pending) {
        int from = m.peer, to = c->rank;
        if (m.send) { std::swap(from, to); }
        const std::string name = strprintf("%s/%d.%d.%d", c->directory.c_str(), from, to, m.type);
        exchanges[m.stream].messages.push_back(m);
        const int number = c->numbers[name + (m.send ? " sent" : " received")]++;       // a rank may send to itself
        exchanges[m.stream].files.push_back(name + "." + std::to_string(number));
    }
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
