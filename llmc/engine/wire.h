// engine/wire.h -- how the hosts of a run's ranks reach each other: by MPI (comm.h) or, with --ranks N, by sockets.
//
// A rank that waits for another gives up after comm().timeout seconds, with an Error that names both and their work.
#pragma once

#include <deque>

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include "../base/common.h"

// A part of a buffer for, or from, another rank
struct Message {
    int peer;
    void* data;
    size_t bytes;
};
using Messages = std::vector<Message>;

// A connection of the ranks. what: their work, for messages
struct Wire {
    const char* name;                       // "MPI", "sockets"
    explicit Wire(const char* name) : name(name) {}
    virtual ~Wire() {}

    // Sends and receives all pieces at once, from and to host memory. For each the other rank passes a piece of the
    // same size; pieces of 0 bytes are skipped, and the pieces between two ranks keep their order.
    virtual void exchange(const Messages& sends, const Messages& receives, const char* what) = 0;
    // At the end of a run: waits for all ranks.
    virtual void leave() = 0;

    // Called repeatedly while this rank waits for another or for its GPU. An Error if a rank is gone.
    virtual void watch(const char* what) { (void)what; }
    // Sleeps this long, or, if the wire can tell, until something arrives.
    virtual void rest(double seconds) { usleep((useconds_t)(1e6 * seconds)); }
    // Gives another rank this much time to end this one.
    virtual void listen(double seconds) { usleep((useconds_t)(1e6 * seconds)); }
    // Ends the other ranks, and perhaps this one.
    virtual void end_all(int code) = 0;

    // For MissingRanks: tells a rank that this rank waits; marks in `heard` (size) the ranks that have told this rank.
    virtual void say_waiting(int rank) = 0;
    virtual void hear_waiting(std::vector<char>& heard) = 0;
};

struct Comm {
    int rank = 0, size = 1;                 // 0 .. size - 1
    int local_rank = 0, local_size = 1;     // among the ranks of this machine
    bool spins = false;                     // a short wait keeps its core, as each rank has one
    double timeout = 600;                   // seconds that a rank waits for another: --collective_timeout
    int node = 0;                           // see comm_connect_devices()
    size_t chunk = 4 << 20;                 // the most bytes in one message to a rank; MPI counts in an int
    Wire* wire = nullptr;                   // null if this is the only rank
    char* inbox = nullptr;                  // (chunk, and 4 bytes per rank) on the device, for received values
    bool nccl = false;                      // device buffers go from GPU to GPU
    uint64_t sent = 0;                      // bytes of device buffers that this rank has sent
};
inline Comm& comm() { static Comm c; return c; }

// The time spent waiting for an event. A nap counts as one second at most, so that a stop of the process (SIGSTOP, a
// suspended laptop) does not count.
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

// Finds out who is missing when a message does not arrive; its sender may itself wait for another rank. So a rank that
// has waited for half of --collective_timeout tells all ranks. At the end of the time, the ranks that have not told it
// the same are missing: they have stopped, or are late by more than that half.
struct MissingRanks {
    Wire& wire;
    std::vector<char> heard;                // (ranks)
    bool called = false;

    // Forgets what was heard during earlier waits.
    explicit MissingRanks(Wire& wire) : wire(wire), heard((size_t)comm().size) {
        wire.hear_waiting(heard);
        std::fill(heard.begin(), heard.end(), 0);
    }
    // "1, 3": the missing ranks, as far as this rank knows after `waited` seconds
    std::string names(double waited) {
        if (waited < comm().timeout / 2) { return ""; }
        wire.hear_waiting(heard);
        std::string text;
        for (int r = 0; r < comm().size; r++) {
            if (r == comm().rank) { continue; }
            if (!called) { wire.say_waiting(r); }
            if (!heard[(size_t)r]) { text += strprintf("%s%d", text.empty() ? "" : ", ", r); }
        }
        called = true;
        return text;
    }
};

// Waits until done() is true, which depends on other ranks.
template <class Done> void wire_wait(Wire& wire, Done done, const char* what) {
    if (done()) { return; }
    Deadline deadline(what);
    for (MissingRanks missing(wire); !done();) {
        deadline.missing = missing.names(deadline.waited);
        deadline.nap(true);
    }
}

// ----------------------------------------------------------------------------------------------------------
// the sockets between the processes of --ranks N: a pair for each two of them, made before the fork (launch.h), so that
// no other process can reach them.
//
// They carry packets, which the kernel keeps apart: a head and, in Data, a piece of a message. A rank that waits for
// anything also reads and sends packets, so that no two ranks wait for each other to read.

struct PacketHead {
    // Waiting: for MissingRanks; End: an error, which its rank has reported; Close: the end of the run
    enum Kind : uint32_t { Data, Waiting, End, Close };
    Kind kind;
    int32_t code;           // of an End: the exit code
    uint64_t bytes;         // of the whole message
};
constexpr size_t PACKET = 32768;            // bytes of a message in a packet, at most

// The way to another rank
struct Link {
    int fd = -1;
    bool gone = false;                      // its process has ended: no more packets arrive
    bool closed = false;                    // its last packet has arrived
    bool waiting = false;                   // the peer has sent Waiting
    std::deque<std::pair<PacketHead, const char*>> leaving;     // messages to send
    size_t sent = 0;                        // bytes of the first that have left
    std::deque<Message> wanted;             // messages to receive
    size_t got = 0;                         // bytes of the first that have arrived
    std::deque<std::pair<PacketHead, std::vector<char>>> kept;  // packets that arrived before their message was wanted
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
    // Calls f(rank, link) for each of the other ranks.
    template <class F> void each(F f) {
        for (int r = 0; r < comm().size; r++) { if (r != comm().rank) { f(r, links[(size_t)r]); } }
    }

    // n bytes of the first wanted message have arrived: in piece, or, if that is null, already in their place.
    void arrived(int rank, const PacketHead& head, const char* piece, size_t n) {
        Link& l = links[(size_t)rank];
        const Message m = l.wanted.front();
        if (head.bytes != m.bytes) {
            die(EXIT_DEVICE, "rank %d: expected %zu bytes from rank %d, got %zu: they do not do the same", comm().rank,
                m.bytes, rank, (size_t)head.bytes);
        }
        if (piece != nullptr) { memcpy((char*)m.data + l.got, piece, n); }
        l.got += n;
        if (l.got < m.bytes) { return; }
        l.wanted.pop_front();
        l.got = 0;
    }
    void receive(int rank) {
        Link& l = links[(size_t)rank];
        while (!l.gone) {
            const bool wanted = !l.wanted.empty() && l.kept.empty();
            std::vector<char> piece(wanted ? 0 : PACKET);
            PacketHead head;
            iovec parts[2] = {{&head, sizeof(head)}, {piece.data(), piece.size()}};
            if (wanted) { parts[1] = {(char*)l.wanted.front().data + l.got, l.wanted.front().bytes - l.got}; }
            msghdr message = {};
            message.msg_iov = parts;
            message.msg_iovlen = 2;
            const ssize_t n = recvmsg(l.fd, &message, MSG_DONTWAIT);
            if (n < 0 && (errno == EINTR || errno == ECONNRESET)) { continue; }     // reset: its last packets follow
            if (n < 0 && errno == EAGAIN) { return; }
            if (n <= 0) { l.gone = true; return; }
            l.waiting = l.waiting || head.kind == PacketHead::Waiting;
            l.closed = l.closed || head.kind == PacketHead::Close;
            if (head.kind == PacketHead::End) {      // as if MPI_Abort had ended this process
                fflush(stdout);
                _exit(head.code);
            }
            if (head.kind != PacketHead::Data) { continue; }
            if (wanted) { arrived(rank, head, nullptr, (size_t)n - sizeof(head)); continue; }
            piece.resize((size_t)n - sizeof(head));
            l.kept.push_back({head, std::move(piece)});
        }
    }
    void post(int rank, PacketHead::Kind kind, int code = 0, const void* data = nullptr, size_t bytes = 0) {
        links[(size_t)rank].leaving.push_back({{kind, code, bytes}, (const char*)data});
    }
    void send_some(int rank) {
        Link& l = links[(size_t)rank];
        while (!l.gone && !l.leaving.empty()) {
            auto& [head, data] = l.leaving.front();
            const size_t piece = std::min(PACKET, head.bytes - l.sent);
            iovec parts[2] = {{&head, sizeof(head)}, {(char*)data + l.sent, piece}};
            msghdr message = {};
            message.msg_iov = parts;
            message.msg_iovlen = 2;
            const ssize_t n = sendmsg(l.fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (n < 0 && errno == EINTR) { continue; }
            if (n < 0 && errno == EAGAIN) { return; }
            if (n < 0) {
                receive(rank);              // the peer's last packets, perhaps its error
                l.gone = true;
                return;
            }
            l.sent += piece;
            if (l.sent < head.bytes) { continue; }
            l.leaving.pop_front();
            l.sent = 0;
        }
    }

    // Reads from and writes to every rank without blocking, after at most `patience` milliseconds for the first event.
    void turn(int patience = 0) {
        std::vector<pollfd> asked;
        std::vector<int> ranks;
        each([&](int r, const Link& l) {
            if (l.gone) { return; }
            asked.push_back({l.fd, (short)(l.leaving.empty() ? POLLIN : POLLIN | POLLOUT), 0});
            ranks.push_back(r);
        });
        if (poll(asked.data(), asked.size(), patience) <= 0) { return; }
        for (size_t i = 0; i < asked.size(); i++) {
            if (asked[i].revents & ~POLLOUT) { receive(ranks[i]); }
            if (asked[i].revents & POLLOUT) { send_some(ranks[i]); }
        }
    }
    // An Error if a rank has died or, if `wants`, has closed while a message to or from it is missing
    void check_gone(const char* what, bool wants) {
        each([&](int r, const Link& l) {
            const bool needed = wants && (!l.wanted.empty() || !l.leaving.empty());
            if (l.gone && (needed || !l.closed)) { die(EXIT_DEVICE, "%s: rank %d has died", what, r); }
        });
    }

    void exchange(const Messages& sends, const Messages& receives, const char* what) override {
        for (const Message& m : receives) {
            Link& l = links[(size_t)m.peer];
            if (m.bytes > 0) { l.wanted.push_back(m); }
            for (; !l.kept.empty() && !l.wanted.empty(); l.kept.pop_front()) {
                const auto& [head, piece] = l.kept.front();
                arrived(m.peer, head, piece.data(), piece.size());
            }
        }
        for (const Message& m : sends) { if (m.bytes > 0) { post(m.peer, PacketHead::Data, 0, m.data, m.bytes); } }
        const auto done = [&] {
            turn();
            check_gone(what, true);
            return std::all_of(links.begin(), links.end(),
                               [](const Link& l) { return l.wanted.empty() && l.leaving.empty(); });
        };
        try {
            wire_wait(*this, done, what);
        } catch (const Error&) {            // the buffers may soon no longer exist
            for (Link& l : links) {
                l.leaving.clear();
                l.wanted.clear();
                l.sent = l.got = 0;
            }
            throw;
        }
    }
    void leave() override {
        each([&](int r, Link&) { post(r, PacketHead::Close); });
        const auto done = [&] {
            turn();
            bool all = true;
            each([&](int, const Link& l) { all = all && l.leaving.empty() && l.closed; });
            return all;
        };
        wire_wait(*this, done, "end");
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
        } catch (const Error&) {}           // this rank has an error already
    }
    void end_all(int code) override {
        each([&](int r, Link&) { post(r, PacketHead::End, code); });
        const double end = wall_seconds() + 1;
        for (bool left = true; left && wall_seconds() < end; usleep(1000)) {
            left = false;
            each([&](int r, const Link& l) {
                send_some(r);
                left = left || !(l.leaving.empty() || l.gone);
            });
        }
    }

    void say_waiting(int rank) override { post(rank, PacketHead::Waiting); }
    void hear_waiting(std::vector<char>& heard) override {
        turn();
        each([&](int r, Link& l) {
            heard[(size_t)r] = heard[(size_t)r] || l.waiting;
            l.waiting = false;
        });
    }
};
