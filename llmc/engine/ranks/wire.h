// ranks/wire.h -- how the hosts of a run's ranks reach each other: by MPI (wire_mpi.h), or, with --ranks N, by the
// sockets below.
//
// A rank that waits for another one gives up after comm().timeout seconds, with an Error that names both ranks and what
// they were doing.
#pragma once

#include <deque>

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

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

// ----------------------------------------------------------------------------------------------------------
// the sockets between the processes of --ranks N: a pair for each two of them, made before they are forked (launch.h).
// Nobody else can reach them, and nobody listens.
//
// They send frames: a head, followed by its number of bytes if the kind is Data. A rank that waits for anything reads
// what arrives from any rank and sends what it can, so that no two ranks ever wait for each other to read.

struct Frame {
    // Waiting: for the roll call; End: an error, which its rank has reported; Bye: the end of the run
    enum Kind : uint32_t { Data, Waiting, End, Bye };
    Kind kind;
    int32_t code;           // of an End: the exit code
    uint64_t bytes;         // of Data
};

// The way to another rank
struct Link {
    int fd = -1;
    bool gone = false;                      // its process has ended: no more frames arrive
    bool bye = false;                       // the peer leaves, but reads until this rank leaves, too
    bool waiting = false;                   // the peer has sent Waiting
    // to send: frames with their data; `sent` bytes of the first one have left
    std::deque<std::pair<Frame, const char*>> leaving;
    size_t sent = 0;
    bool stuck = false;                     // sending is over: a frame has left in part, or the peer does not read
    // Received: `got` bytes of a frame. Data go to the receiver's buffer, or are kept until there is one.
    Frame frame = {};
    size_t got = 0;
    std::vector<char> body;
    bool keep = false;                      // this frame's data go into body
    std::deque<std::vector<char>> kept;
    std::deque<Message> wanted;
};

struct SocketWire : Wire {
    std::vector<Link> links;                // (ranks); this rank's own is not used

    // sockets (ranks)
    explicit SocketWire(const std::vector<int>& sockets) : Wire("sockets"), links(sockets.size()) {
        for (size_t r = 0; r < sockets.size(); r++) { links[r].fd = sockets[r]; }
    }
    ~SocketWire() override {
        for (Link& l : links) { if (l.fd >= 0) { close(l.fd); } }
    }

    // ------------------------------------------------------------------------------------------------------
    // what arrives

    void check_size(int rank, size_t expected, size_t got) {
        if (expected == got) { return; }
        die(EXIT_DEVICE, "rank %d: expected %zu bytes from rank %d, got %zu: they do not do the same", comm().rank,
            expected, rank, got);
    }
    // The oldest kept data go to the oldest waiting receive.
    void hand_over(int rank) {
        Link& l = links[(size_t)rank];
        for (; !l.kept.empty() && !l.wanted.empty(); l.kept.pop_front(), l.wanted.pop_front()) {
            check_size(rank, l.wanted.front().bytes, l.kept.front().size());
            std::copy(l.kept.front().begin(), l.kept.front().end(), (char*)l.wanted.front().data);
        }
    }
    void frame_begins(int rank) {
        Link& l = links[(size_t)rank];
        if (l.frame.kind != Frame::Data) { return; }
        l.keep = l.wanted.empty() || !l.kept.empty();
        if (l.keep) { l.body.resize(l.frame.bytes); return; }
        check_size(rank, l.wanted.front().bytes, l.frame.bytes);
    }
    void frame_ends(int rank) {
        Link& l = links[(size_t)rank];
        l.got = 0;
        l.waiting = l.waiting || l.frame.kind == Frame::Waiting;
        l.bye = l.bye || l.frame.kind == Frame::Bye;
        if (l.frame.kind == Frame::End) {        // as if MPI_Abort had ended this process
            fflush(stdout);
            _exit(l.frame.code);
        }
        if (l.frame.kind != Frame::Data) { return; }
        if (!l.keep) { l.wanted.pop_front(); return; }
        l.kept.push_back(std::move(l.body));
        hand_over(rank);
    }
    void receive(int rank) {
        Link& l = links[(size_t)rank];
        const size_t head = sizeof(Frame);
        while (!l.gone) {
            char* to = (char*)&l.frame + l.got;
            size_t room = head - l.got;
            if (l.got >= head) {
                to = (l.keep ? l.body.data() : (char*)l.wanted.front().data) + (l.got - head);
                room = head + l.frame.bytes - l.got;
            }
            const ssize_t n = recv(l.fd, to, room, MSG_DONTWAIT);
            if (n < 0 && errno == EINTR) { continue; }
            if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) { return; }
            if (n <= 0) { l.gone = true; return; }
            l.got += (size_t)n;
            if (l.got == head) { frame_begins(rank); }
            const size_t after = l.frame.kind == Frame::Data ? l.frame.bytes : 0;
            if (l.got >= head && l.got == head + after) { frame_ends(rank); }
        }
    }

    // ------------------------------------------------------------------------------------------------------
    // what leaves

    void post(int rank, Frame::Kind kind, int code = 0, const void* data = nullptr, size_t bytes = 0) {
        links[(size_t)rank].leaving.push_back({{kind, code, bytes}, (const char*)data});
    }
    void send_some(int rank) {
        Link& l = links[(size_t)rank];
        const size_t head = sizeof(Frame);
        while (!l.stuck && !l.leaving.empty()) {
            const auto& [frame, data] = l.leaving.front();
            iovec parts[2] = {{(char*)&frame + std::min(l.sent, head), head - std::min(l.sent, head)}, {}};
            const size_t of_data = l.sent - std::min(l.sent, head);
            if (frame.bytes > 0) { parts[1] = {(char*)data + of_data, frame.bytes - of_data}; }
            msghdr message = {};
            message.msg_iov = parts;
            message.msg_iovlen = 2;
            const ssize_t n = sendmsg(l.fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (n < 0 && errno == EINTR) { continue; }
            if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) { return; }
            if (n < 0) {
                receive(rank);              // the peer's last frames, perhaps its error
                l.gone = l.stuck = true;
                return;
            }
            l.sent += (size_t)n;
            if (l.sent < head + frame.bytes) { continue; }
            l.leaving.pop_front();
            l.sent = 0;
        }
    }

    // Reads from and writes to every rank without blocking. Waits at most this many milliseconds for the first event.
    void turn(int patience = 0) {
        std::vector<pollfd> asked;
        std::vector<int> ranks;
        for (int r = 0; r < comm().size; r++) {
            const Link& l = links[(size_t)r];
            const int in = l.gone ? 0 : POLLIN;
            const int out = l.leaving.empty() || l.stuck ? 0 : POLLOUT;
            if (r == comm().rank || in + out == 0) { continue; }
            asked.push_back({l.fd, (short)(in + out), 0});
            ranks.push_back(r);
        }
        if (poll(asked.data(), asked.size(), patience) <= 0) { return; }
        for (size_t i = 0; i < asked.size(); i++) {
            if (asked[i].revents & ~POLLOUT) { receive(ranks[i]); }
            if (asked[i].revents & (POLLOUT | POLLERR | POLLHUP)) { send_some(ranks[i]); }
        }
    }
    // wants: a rank that has said Bye is missing, too
    void check_gone(const char* what, bool wants) {
        for (int r = 0; r < comm().size; r++) {
            const Link& l = links[(size_t)r];
            if (r == comm().rank || !l.gone) { continue; }
            const bool needed = wants && (!l.wanted.empty() || !l.leaving.empty());
            if (l.bye && !needed) { continue; }
            die(EXIT_DEVICE, "%s: rank %d has died", what, r);
        }
    }

    // After an Error the buffers of an exchange may no longer exist.
    void abandon() {
        for (Link& l : links) {
            l.stuck = l.stuck || l.sent > 0;
            l.leaving.clear();
            l.wanted.clear();
            const bool amid = l.got >= sizeof(Frame) && l.frame.kind == Frame::Data;
            if (amid && !l.keep) { l.body.resize(l.frame.bytes); }
            l.keep = true;
        }
    }

    // ------------------------------------------------------------------------------------------------------
    // the wire

    void exchange(const Messages& sends, const Messages& receives, const char* what) override {
        for (const Message& m : receives) {
            links[(size_t)m.peer].wanted.push_back(m);
            hand_over(m.peer);
        }
        for (const Message& m : sends) { post(m.peer, Frame::Data, 0, m.data, m.bytes); }
        const auto done = [&] {
            turn();
            check_gone(what, true);
            return std::all_of(links.begin(), links.end(),
                               [](const Link& l) { return l.wanted.empty() && l.leaving.empty(); });
        };
        try {
            wire_wait(*this, done, what);
        } catch (const Error&) {
            abandon();
            throw;
        }
    }
    void gather(void* all, const void* mine, size_t bytes, const char* what) override {
        Messages sends, receives;
        if (bytes == 0) { return; }
        memcpy((char*)all + bytes * (size_t)comm().rank, mine, bytes);
        for (int r = 0; r < comm().size; r++) {
            if (r == comm().rank) { continue; }
            sends.push_back({r, (void*)mine, bytes});
            receives.push_back({r, (char*)all + bytes * (size_t)r, bytes});
        }
        exchange(sends, receives, what);
    }
    void broadcast(void* data, size_t bytes, const char* what) override {
        Messages sends, receives;
        if (bytes == 0) { return; }
        if (comm().rank > 0) { receives.push_back({0, data, bytes}); }
        for (int r = 1; r < comm().size && comm().rank == 0; r++) { sends.push_back({r, data, bytes}); }
        exchange(sends, receives, what);
    }
    // Closing at once would lose data that are still on their way to a slower rank.
    void leave() override {
        const auto others = [&](auto holds) {
            turn();
            for (size_t r = 0; r < links.size(); r++) {
                if ((int)r != comm().rank && !holds(links[r])) { return false; }
            }
            return true;
        };
        for (int r = 0; r < comm().size; r++) { if (r != comm().rank) { post(r, Frame::Bye); } }
        const auto sent = [](const Link& l) { return l.leaving.empty() || l.stuck; };
        wire_wait(*this, [&] { return others(sent); }, "end");
        for (Link& l : links) { if (l.fd >= 0) { shutdown(l.fd, SHUT_WR); } }
        wire_wait(*this, [&] { return others([](const Link& l) { return l.gone; }); }, "end");
    }

    void watch(const char* what) override {
        turn();
        check_gone(what, false);
    }
    void rest(double) override { turn(100); }
    void listen(double seconds) override {
        const double end = wall_seconds() + seconds;
        try {
            for (; wall_seconds() < end; usleep(1000)) { turn(); }
        } catch (const Error&) {}           // there is one already
    }
    void end_all(int code) override {
        for (int r = 0; r < comm().size; r++) { if (r != comm().rank) { post(r, Frame::End, code); } }
        const double end = wall_seconds() + 1;
        for (bool left = true; left && wall_seconds() < end; usleep(1000)) {
            left = false;
            for (size_t r = 0; r < links.size(); r++) {
                send_some((int)r);
                left = left || !(links[r].leaving.empty() || links[r].stuck);
            }
        }
    }

    void say_waiting(int rank) override { post(rank, Frame::Waiting); }
    void hear_waiting(std::vector<char>& heard) override {
        turn();
        for (size_t r = 0; r < heard.size(); r++) {
            heard[r] = heard[r] || links[r].waiting;
            links[r].waiting = false;
        }
    }
};
