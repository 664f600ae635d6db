// ranks/rendezvous.h -- how ranks that were started without MPI find each other: all connect to rank 0, whose place the
// launcher names. It tells each of them where the others are, and each connects to those of lower numbers.
//
// Whoever connects says first which run it is of, of how many ranks, and which one. Another run's is refused.
#ifndef LLMC_RANKS_RENDEZVOUS_H
#define LLMC_RANKS_RENDEZVOUS_H

#include <memory>

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>

#include "launch.h"
#include "wire_tcp.h"

struct Hello {
    char magic[16] = "cable.c ranks 1";
    char run[96] = "";                      // for messages
    uint64_t run_hash = 0;
    uint64_t machine = 0;                   // the same for ranks of one machine
    int32_t size = 0, rank = 0;
    int32_t port = 0;                       // where it listens to ranks of higher numbers
    int32_t unused = 0;
};
// What rank 0 answers when all are there. A rank whose refusal is empty but whose code is not 0 ends without a word.
struct Answer {
    int32_t code = 0;
    char refusal[508] = "";
};
// ... and then (ranks) of
struct RankPlace {
    char host[64] = "";                     // empty: the host of rank 0
    int32_t port = 0;
    int32_t local_rank = 0, local_size = 0;
    int32_t unused = 0;
};

inline void copy_text(char* to, size_t room, const std::string& text) {
    memset(to, 0, room);
    memcpy(to, text.data(), std::min(text.size(), room - 1));
}

// Two containers on one machine count as two.
inline uint64_t this_machine() {
    char name[256] = "", boot[64] = "";
    gethostname(name, sizeof(name) - 1);
    const int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && read(fd, boot, sizeof(boot) - 1) < 0) { boot[0] = '\0'; }
    if (fd >= 0) { close(fd); }
    return checksum(std::string(name) + " " + boot);
}

// ----------------------------------------------------------------------------------------------------------
// sockets

// Listens on all addresses, or only within this machine; port 0: any that is free. -1 and errno if that cannot be
inline int listen_at(int port, bool local) {
    const int family = local ? AF_INET : AF_INET6;
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    sockaddr_in6 any6 = {};                 // takes IPv4, too
    any6.sin6_family = AF_INET6;
    any6.sin6_port = htons((uint16_t)port);
    sockaddr_in any4 = {};
    any4.sin_family = AF_INET;
    any4.sin_port = any6.sin6_port;
    any4.sin_addr.s_addr = htonl(local ? INADDR_LOOPBACK : INADDR_ANY);
    const auto bound = [&](const void* address, size_t bytes) {
        const int one = 1, zero = 0;
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof(zero));
        return bind(fd, (const sockaddr*)address, (socklen_t)bytes) == 0 && listen(fd, 1024) == 0;
    };
    if (fd >= 0 && !local && bound(&any6, sizeof(any6))) { return fd; }
    if (!local && errno != EADDRINUSE) {    // a machine without IPv6
        if (fd >= 0) { close(fd); }
        fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        local = true;
    }
    if (fd >= 0 && local && bound(&any4, sizeof(any4))) { return fd; }
    const int error = errno;
    if (fd >= 0) { close(fd); }
    errno = error;
    return -1;
}
inline int port_of(int fd) {
    sockaddr_storage a = {};
    socklen_t bytes = sizeof(a);
    getsockname(fd, (sockaddr*)&a, &bytes);
    return ntohs(a.ss_family == AF_INET6 ? ((sockaddr_in6&)a).sin6_port : ((sockaddr_in&)a).sin_port);
}
// the address at the other end; "" if it is this machine
inline std::string peer_of(int fd) {
    sockaddr_storage a = {};
    socklen_t bytes = sizeof(a);
    char host[NI_MAXHOST] = "";
    getpeername(fd, (sockaddr*)&a, &bytes);
    getnameinfo((sockaddr*)&a, bytes, host, sizeof(host), nullptr, 0, NI_NUMERICHOST);
    const std::string name = host;
    const bool loopback = name == "::1" || name.find("127.") == 0 || name.find("::ffff:127.") == 0;
    return loopback ? "" : name;
}
inline void prepare_socket(int fd) {
    const int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));        // notices a machine that is switched off
}

// One attempt, of a second at most. -1, and `why`
inline int try_to_connect(const std::string& host, int port, std::string& why) {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found)) {
        why = gai_strerror(error);
        return -1;
    }
    int fd = -1;
    for (addrinfo* a = found; a != nullptr && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0) { why = strerror(errno); continue; }
        int error = connect(fd, a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
        if (error == EINPROGRESS) {
            pollfd asked = {fd, POLLOUT, 0};
            socklen_t bytes = sizeof(error);
            error = ETIMEDOUT;
            if (poll(&asked, 1, 1000) > 0) { getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes); }
        }
        if (error == 0) { continue; }
        why = strerror(error);
        close(fd);
        fd = -1;
    }
    freeaddrinfo(found);
    return fd;
}
inline int connect_to(int rank, const std::string& host, int port) {
    Deadline deadline("start", rank);
    for (std::string why;;) {
        const int fd = try_to_connect(host, port, why);
        if (fd >= 0) { prepare_socket(fd); return fd; }
        deadline.missing = strprintf("%d at %s:%d (%s)", rank, host.c_str(), port, why.c_str());
        deadline.nap();
        usleep(20000);
    }
}

// All of `bytes`. from: a rank
inline void read_whole(int fd, void* data, size_t bytes, int from, double longer) {
    Deadline deadline("start", from);
    deadline.longer = longer;
    for (size_t at = 0; at < bytes;) {
        const ssize_t n = recv(fd, (char*)data + at, bytes - at, MSG_DONTWAIT);
        if (n > 0) { at += (size_t)n; continue; }
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) { deadline.nap(); continue; }
        die(EXIT_DEVICE, "start: rank %d: rank %d is gone", comm().rank, from);
    }
}
inline void write_whole(int fd, const void* data, size_t bytes, int to) {
    Deadline deadline("start", to);
    for (size_t at = 0; at < bytes;) {
        const ssize_t n = send(fd, (const char*)data + at, bytes - at, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n > 0) { at += (size_t)n; continue; }
        if (errno != EAGAIN && errno != EINTR) { return; }          // whoever is gone will be missed soon
        deadline.nap();
    }
}

// ----------------------------------------------------------------------------------------------------------
// who is who

// Why this is not a rank that is awaited, "" if it is. mine: what this rank says of itself
inline std::string hello_refusal(const Hello& mine, const Hello& theirs, const std::vector<TcpLink>& links) {
    if (memcmp(mine.magic, theirs.magic, sizeof(mine.magic)) != 0) {
        return "expected a rank of this program, got something else, or another version";
    }
    const auto shown = [](const Hello& h) {
        return strprintf("%.*s with %d ranks", (int)sizeof(h.run), h.run, h.size);
    };
    if (theirs.run_hash != mine.run_hash || theirs.size != mine.size) {
        return strprintf("expected a rank of %s, got one of %s", shown(mine).c_str(), shown(theirs).c_str());
    }
    if (theirs.rank <= mine.rank || theirs.rank >= mine.size) {
        return strprintf("expected a rank from %d to %d, got %d", mine.rank + 1, mine.size - 1, theirs.rank);
    }
    if (links[(size_t)theirs.rank].fd >= 0) { return strprintf("rank %d has come before", theirs.rank); }
    return "";
}

// Somebody who has connected, and has said so many bytes of its hello
struct Caller { int fd; Hello hello; size_t got; };

// false: no more comes of this caller, who has been taken for a rank or refused.
inline bool hear_caller(Caller& caller, const Hello& mine, std::vector<Hello>& hellos, TcpWire& wire) {
    const ssize_t n = recv(caller.fd, (char*)&caller.hello + caller.got, sizeof(Hello) - caller.got, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) { return true; }
    if (n <= 0) { close(caller.fd); return false; }
    caller.got += (size_t)n;
    if (caller.got < sizeof(Hello)) { return true; }
    const std::string refusal = hello_refusal(mine, caller.hello, wire.links);
    if (refusal.empty()) {
        wire.links[(size_t)caller.hello.rank].fd = caller.fd;
        hellos[(size_t)caller.hello.rank] = caller.hello;
        return false;
    }
    Answer answer;
    answer.code = EXIT_BAD_INPUT;
    copy_text(answer.refusal, sizeof(answer.refusal), refusal);
    write_whole(caller.fd, &answer, sizeof(answer), -1);
    const std::string from = peer_of(caller.fd);
    say("start: rank %d refused a connection from %s: %s", mine.rank, from.empty() ? "this machine" : from.c_str(),
        refusal.c_str());
    close(caller.fd);
    return false;
}

// Waits until all ranks of higher numbers have said hello.
inline void await_hellos(int listener, const Hello& mine, std::vector<Hello>& hellos, TcpWire& wire) {
    std::vector<Caller> callers;
    for (Deadline deadline("start", -1);; deadline.nap()) {
        for (int fd; (fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0;) {
            prepare_socket(fd);
            callers.push_back({fd, Hello(), 0});
        }
        for (size_t i = callers.size(); i-- > 0;) {
            if (!hear_caller(callers[i], mine, hellos, wire)) { callers.erase(callers.begin() + (ptrdiff_t)i); }
        }
        deadline.missing.clear();
        for (int r = mine.rank + 1; r < mine.size; r++) {
            const std::string comma = deadline.missing.empty() ? "" : ", ";
            if (wire.links[(size_t)r].fd < 0) { deadline.missing += comma + std::to_string(r); }
        }
        if (deadline.missing.empty()) { break; }
    }
    for (const Caller& c : callers) { close(c.fd); }
}

// Rank 0: waits for all, and tells each where the others are. If one does not come, the others end without a word.
inline std::vector<RankPlace> gather_places(int listener, const Hello& mine, TcpWire& wire) {
    const size_t size = wire.links.size();
    std::vector<Hello> hellos(size, mine);
    std::vector<RankPlace> places(size);
    Answer answer;
    try {
        await_hellos(listener, mine, hellos, wire);
    } catch (const Error& e) {
        answer.code = e.code;
        for (const TcpLink& l : wire.links) { if (l.fd >= 0) { write_whole(l.fd, &answer, sizeof(answer), -1); } }
        throw;
    }
    for (size_t r = 0; r < size; r++) {
        RankPlace& p = places[r];
        p.port = hellos[r].port;
        if (r > 0) { copy_text(p.host, sizeof(p.host), peer_of(wire.links[r].fd)); }
        for (size_t other = 0; other < size; other++) {
            if (hellos[other].machine != hellos[r].machine) { continue; }
            p.local_rank += other < r;
            p.local_size++;
        }
    }
    for (size_t r = 1; r < size; r++) {
        write_whole(wire.links[r].fd, &answer, sizeof(answer), (int)r);
        write_whole(wire.links[r].fd, places.data(), sizeof(RankPlace) * size, (int)r);
    }
    return places;
}
// The others learn it from rank 0.
inline std::vector<RankPlace> ask_for_places(const Launch& l, const Hello& mine, TcpWire& wire) {
    std::vector<RankPlace> places(wire.links.size());
    Answer answer;
    int& fd = wire.links[0].fd;
    fd = connect_to(0, l.host, l.port);
    write_whole(fd, &mine, sizeof(mine), 0);
    const double longer = 5;                // rank 0 knows better who is missing
    read_whole(fd, &answer, sizeof(answer), 0, longer);
    if (answer.code != 0 && answer.refusal[0] == '\0') { _exit(answer.code); }
    answer.refusal[sizeof(answer.refusal) - 1] = '\0';
    check(answer.code == 0, "start: rank %d at %s:%d refuses this one: %s", 0, l.host.c_str(), l.port, answer.refusal);
    read_whole(fd, places.data(), sizeof(RankPlace) * places.size(), 0, longer);
    return places;
}

// Sets who this rank is, of how many.
inline Wire* start_tcp(const Launch& l) {
    Comm& c = comm();
    c.rank = l.rank;
    c.size = l.size;
    rlimit files = {};                      // one for each rank
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    auto wire = std::make_unique<TcpWire>((size_t)l.size);
    // 1 who this rank is, and where it listens
    const bool first = l.rank == 0, local = l.host == "127.0.0.1";
    int listener = first ? l.listener : -1;
    if (listener < 0) { listener = listen_at(first ? l.port : 0, local); }
    check(listener >= 0, "start: rank %d cannot listen at port %d: %s (MASTER_PORT + 1, or made of the job's number: "
          "start it with another one)", l.rank, first ? l.port : 0, strerror(errno));
    Hello mine;
    copy_text(mine.run, sizeof(mine.run), l.run);
    mine.run_hash = checksum(l.run);
    mine.machine = this_machine();
    mine.size = l.size;
    mine.rank = l.rank;
    mine.port = port_of(listener);
    // 2 where the others are
    const std::vector<RankPlace> places = first ? gather_places(listener, mine, *wire) : ask_for_places(l, mine, *wire);
    c.local_rank = places[(size_t)c.rank].local_rank;
    c.local_size = places[(size_t)c.rank].local_size;
    // 3 connections with them
    for (int r = 1; r < c.rank; r++) {
        const RankPlace& p = places[(size_t)r];
        int& fd = wire->links[(size_t)r].fd;
        fd = connect_to(r, p.host[0] == '\0' ? l.host : p.host, p.port);
        write_whole(fd, &mine, sizeof(mine), r);
    }
    std::vector<Hello> hellos(wire->links.size());
    if (!first) { await_hellos(listener, mine, hellos, *wire); }
    close(listener);
    return wire.release();
}

#endif
