// ranks/rendezvous.h -- how ranks that were started without MPI find each other: all connect to rank 0, whose address
// the launcher gives. It sends each rank the addresses of all ranks, and each connects to those of lower numbers.
//
// The listener sends a random number, and the rank that connects answers with a hash of that number and the run's
// secret, which a stranger can neither compute nor replay. It also sends the name of its run, the number of ranks, and
// its own. Rank 0 proves in the same way that it knows the secret. Later traffic is not encrypted.
#pragma once

#include <memory>

#include <sys/random.h>
#include <sys/resource.h>

#include "../sha256.h"
#include "launch.h"
#include "sockets.h"
#include "wire_tcp.h"

// The listener's first message
struct Greeting {
    char magic[16] = "cable.c ranks 2";
    char drawn[32] = "";
};
struct Hello {
    char proof[64] = "";                    // answers the number in the greeting
    char drawn[32] = "";                    // rank 0 must answer this one
    char run[96] = "";                      // for messages
    uint64_t run_hash = 0;
    uint64_t machine = 0;                   // the same for ranks of one machine
    int32_t size = 0, rank = 0;
    int32_t port = 0;                       // where it listens for ranks of higher numbers
    int32_t unused = 0;
};
// Rank 0's answer once all ranks have come. A rank that gets a code but no refusal ends without a message.
struct Answer {
    char proof[64] = "";                    // none in a refusal
    int32_t code = 0;
    char refusal[444] = "";
};
// followed by one of these for each rank
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

// 32 random hexadecimal digits
inline std::string random_text() {
    uint64_t drawn[2];
    check(getrandom(drawn, sizeof(drawn), 0) == (ssize_t)sizeof(drawn), "getrandom: %s", strerror(errno));
    return strprintf("%016llx%016llx", (unsigned long long)drawn[0], (unsigned long long)drawn[1]);
}
inline void draw(char (&to)[32]) { memcpy(to, random_text().data(), sizeof(to)); }

// The answer to a drawn number, which only ranks that know the secret can compute
inline void prove(char (&proof)[64], const std::string& secret, const char (&drawn)[32]) {
    Sha256 sum;
    sum.update((const uint8_t*)secret.data(), secret.size());
    sum.update((const uint8_t*)drawn, sizeof(drawn));
    memcpy(proof, sum.hex().data(), sizeof(proof));
}
// Its time does not depend on where they differ.
inline bool proves(const char (&proof)[64], const std::string& secret, const char (&drawn)[32]) {
    char expected[64];
    prove(expected, secret, drawn);
    int differ = 0;
    for (size_t i = 0; i < sizeof(proof); i++) { differ |= proof[i] ^ expected[i]; }
    return differ == 0;
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
// who is who

// A connection that has got its number and has sent `got` bytes of its hello
struct Caller { int fd; Greeting told; Hello hello; size_t got; };

// Why the caller is not an expected rank, "" if it is. mine: this rank's own hello. Strangers learn nothing.
inline std::string hello_refusal(const Hello& mine, const Caller& caller, const std::string& secret,
                                 const std::vector<TcpLink>& links) {
    const Hello& theirs = caller.hello;
    if (!proves(theirs.proof, secret, caller.told.drawn)) {
        return "expected a rank that knows the run's secret (CABLE_SECRET), got another one, or another program";
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
    if (links[(size_t)theirs.rank].fd >= 0) { return strprintf("rank %d is connected already", theirs.rank); }
    return "";
}

// false: the caller is done with, accepted as a rank or refused.
inline bool hear_caller(Caller& caller, const Hello& mine, const std::string& secret, std::vector<Hello>& hellos,
                        TcpWire& wire) {
    const ssize_t n = recv(caller.fd, (char*)&caller.hello + caller.got, sizeof(Hello) - caller.got, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) { return true; }
    if (n <= 0) { close(caller.fd); return false; }
    caller.got += (size_t)n;
    if (caller.got < sizeof(Hello)) { return true; }
    const std::string refusal = hello_refusal(mine, caller, secret, wire.links);
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
inline void await_hellos(int listener, const Hello& mine, const std::string& secret, std::vector<Hello>& hellos,
                         TcpWire& wire) {
    std::vector<Caller> callers;
    for (Deadline deadline("start", -1);; deadline.nap()) {
        for (int fd; (fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0;) {
            prepare_socket(fd);
            callers.push_back({fd, Greeting(), Hello(), 0});
            draw(callers.back().told.drawn);
            write_whole(fd, &callers.back().told, sizeof(Greeting), -1);
            if (callers.size() <= wire.links.size() + 64) { continue; }
            close(callers[0].fd);           // a silent connection does not block a rank
            callers.erase(callers.begin());
        }
        for (size_t i = callers.size(); i-- > 0;) {
            if (!hear_caller(callers[i], mine, secret, hellos, wire)) { callers.erase(callers.begin() + (ptrdiff_t)i); }
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

// Rank 0: waits for all ranks, and sends them all addresses. If one does not come, the rest end without a message.
inline std::vector<RankPlace> gather_places(int listener, const Hello& mine, const std::string& secret,
                                            TcpWire& wire) {
    const size_t size = wire.links.size();
    std::vector<Hello> hellos(size, mine);
    std::vector<RankPlace> places(size);
    Answer answer;
    const auto say_answer = [&](size_t r) {
        prove(answer.proof, secret, hellos[r].drawn);
        write_whole(wire.links[r].fd, &answer, sizeof(answer), (int)r);
    };
    try {
        await_hellos(listener, mine, secret, hellos, wire);
    } catch (const Error& e) {
        answer.code = e.code;
        for (size_t r = 1; r < size; r++) { if (wire.links[r].fd >= 0) { say_answer(r); } }
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
        say_answer(r);
        write_whole(wire.links[r].fd, places.data(), sizeof(RankPlace) * size, (int)r);
    }
    return places;
}
// The other ranks get them from rank 0.
inline std::vector<RankPlace> ask_for_places(const Launch& l, const Hello& mine, TcpWire& wire) {
    std::vector<RankPlace> places(wire.links.size());
    Answer answer;
    const int fd = wire.links[0].fd;
    const double longer = 5;                // rank 0 knows better who is missing
    read_whole(fd, &answer, sizeof(answer), 0, longer);
    answer.refusal[sizeof(answer.refusal) - 1] = '\0';
    check(proves(answer.proof, l.secret, mine.drawn), "start: rank 0 at %s:%d refuses this one: %s", l.host.c_str(),
          l.port, answer.refusal[0] == '\0' ? "it does not know the run's secret" : answer.refusal);
    if (answer.code != 0) { _exit(answer.code); }
    read_whole(fd, places.data(), sizeof(RankPlace) * places.size(), 0, longer);
    return places;
}

// Connects to a rank and waits for its greeting, but not for long: another program may have its port.
inline Greeting greet(int& fd, int rank, const std::string& host, int port) {
    Greeting g;
    fd = connect_to(rank, host, port);
    const double patience = 10;
    bool is = true;
    try {
        read_whole(fd, &g, sizeof(g), rank, std::min(0.0, patience - comm().timeout));
        is = memcmp(g.magic, Greeting().magic, sizeof(g.magic)) == 0;
    } catch (const Error&) { is = false; }
    check(is, "start: rank %d: expected rank %d at %s:%d, got no greeting: another program, or another version of "
          "this one, may have the port", comm().rank, rank, host.c_str(), port);
    return g;
}

// Sets this rank and the number of ranks.
inline Wire* start_tcp(const Launch& l) {
    Comm& c = comm();
    c.rank = l.rank;
    c.size = l.size;
    check(l.size <= 1 << 16, "start: expected at most %d ranks, got %d", 1 << 16, l.size);
    const bool known = is_loopback(l.host) || l.secret.size() >= 16;
    if (!known && l.rank > 0) { leave_to_rank0(); }
    check(known, "start: strangers could join the ranks at %s: give them all a secret of 16 characters or more, by "
          "CABLE_SECRET in the environment: export CABLE_SECRET=$(openssl rand -hex 16)", l.host.c_str());
    rlimit files = {};                      // one for each rank
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    auto wire = std::make_unique<TcpWire>((size_t)l.size);
    // 1 this rank's hello; it listens at the address by which it has reached rank 0
    const bool first = l.rank == 0;
    Hello mine;
    int listener = l.listener;
    if (first && listener < 0) { listener = listen_at(l.host, l.port); }
    if (!first) {
        int& fd = wire->links[0].fd;
        const Greeting g = greet(fd, 0, l.host, l.port);
        prove(mine.proof, l.secret, g.drawn);
        const std::string here = peer_of(fd, getsockname);
        listener = listen_at(here.empty() ? l.host : here, 0);
    }
    check(listener >= 0, "start: rank %d cannot listen at port %d: %s (MASTER_PORT + 1, or made of the job's number: "
          "start it with another one)", l.rank, first ? l.port : 0, strerror(errno));
    draw(mine.drawn);
    copy_text(mine.run, sizeof(mine.run), l.run);
    mine.run_hash = checksum(l.run);
    mine.machine = this_machine();
    mine.size = l.size;
    mine.rank = l.rank;
    mine.port = port_of(listener);
    if (!first) { write_whole(wire->links[0].fd, &mine, sizeof(mine), 0); }
    // 2 the addresses of all ranks
    const std::vector<RankPlace> places = first ? gather_places(listener, mine, l.secret, *wire)
                                                : ask_for_places(l, mine, *wire);
    c.local_rank = places[(size_t)c.rank].local_rank;
    c.local_size = places[(size_t)c.rank].local_size;
    // 3 the connections
    for (int r = 1; r < c.rank; r++) {
        const RankPlace& p = places[(size_t)r];
        int& fd = wire->links[(size_t)r].fd;
        const Greeting g = greet(fd, r, p.host[0] == '\0' ? l.host : p.host, p.port);
        prove(mine.proof, l.secret, g.drawn);
        write_whole(fd, &mine, sizeof(mine), r);
    }
    std::vector<Hello> hellos(wire->links.size());
    if (!first) { await_hellos(listener, mine, l.secret, hellos, *wire); }
    close(listener);
    return wire.release();
}
