// ranks/sockets.h -- the connections over which ranks find each other: listening, connecting, whole messages.
#pragma once

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include "wire.h"

// The address in numbers
inline std::string address_text(const sockaddr* a, socklen_t bytes) {
    char host[NI_MAXHOST] = "";
    getnameinfo(a, bytes, host, sizeof(host), nullptr, 0, NI_NUMERICHOST);
    return strncmp(host, "::ffff:", 7) == 0 ? host + 7 : host;
}
inline bool is_loopback(const std::string& host) {
    return host == "localhost" || host == "::1" || host.find("127.") == 0;
}

// -1 and errno on failure
inline int listen_on(const sockaddr* a, socklen_t bytes) {
    const int fd = socket(a->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const int one = 1, zero = 0;
    if (fd < 0) { return -1; }
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (a->sa_family == AF_INET6) { setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof(zero)); }
    if (bind(fd, a, bytes) == 0 && listen(fd, 1024) == 0) { return fd; }
    const int error = errno;
    close(fd);
    errno = error;
    return -1;
}
// Listens at the address that `host` has for the other ranks, or at all addresses of this machine if `host` is not one
// of them, as when /etc/hosts has a machine's own name at 127.0.1.1. port 0: any free one. -1 and errno on failure
inline int listen_at(const std::string& host, int port) {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    std::vector<std::pair<sockaddr_storage, socklen_t>> places;
    if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) == 0) {
        for (addrinfo* a = found; a != nullptr; a = a->ai_next) {
            if (is_loopback(address_text(a->ai_addr, a->ai_addrlen)) && !is_loopback(host)) { continue; }
            places.push_back({{}, a->ai_addrlen});
            memcpy(&places.back().first, a->ai_addr, a->ai_addrlen);
        }
        freeaddrinfo(found);
    }
    if (!places.empty() && (places.size() == 1 || is_loopback(host))) {
        const int fd = listen_on((const sockaddr*)&places.back().first, places.back().second);
        if (fd >= 0 || errno != EADDRNOTAVAIL || is_loopback(host)) { return fd; }     // perhaps a router's
    }
    sockaddr_in6 any6 = {};                 // accepts IPv4, too
    any6.sin6_family = AF_INET6;
    any6.sin6_port = htons((uint16_t)port);
    const int fd = listen_on((const sockaddr*)&any6, sizeof(any6));
    if (fd >= 0 || errno == EADDRINUSE) { return fd; }
    sockaddr_in any4 = {};                  // a machine without IPv6
    any4.sin_family = AF_INET;
    any4.sin_port = any6.sin6_port;
    return listen_on((const sockaddr*)&any4, sizeof(any4));
}
inline int port_of(int fd) {
    sockaddr_storage a = {};
    socklen_t bytes = sizeof(a);
    getsockname(fd, (sockaddr*)&a, &bytes);
    return ntohs(a.ss_family == AF_INET6 ? ((sockaddr_in6&)a).sin6_port : ((sockaddr_in&)a).sin_port);
}
// the address at the other end, or, with getsockname, at this one; "" if it is this machine
inline std::string peer_of(int fd, int (*name)(int, sockaddr*, socklen_t*) = getpeername) {
    sockaddr_storage a = {};
    socklen_t bytes = sizeof(a);
    name(fd, (sockaddr*)&a, &bytes);
    const std::string host = address_text((const sockaddr*)&a, bytes);
    return is_loopback(host) ? "" : host;
}
inline void prepare_socket(int fd) {
    const int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));        // notices a machine that is switched off
}

// One attempt, at most a second long. On failure -1, and `why`
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

// Reads exactly `bytes`. from: a rank; longer: seconds beyond --collective_timeout
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
        if (errno != EAGAIN && errno != EINTR) { return; }          // the next read finds out that the rank is gone
        deadline.nap();
    }
}
