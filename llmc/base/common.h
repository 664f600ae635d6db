// base/common.h -- errors with an exit code, text formatting, files, checksums; nothing about tensors or devices.
//
// Everything that changes the disk goes through the io_* functions below, so that a test has one place to make it fail.
#pragma once

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#define XXH_VECTOR 0   // plain C, which the compiler vectorizes: xxHash's AVX-512 path warns under g++ 12
#include <xxhash.h>

// ----------------------------------------------------------------------------------------------------------
// errors

// The exit codes of every program in this repository. 0 is success.
enum ExitCode { EXIT_BAD_INPUT = 2, EXIT_DIVERGED = 3, EXIT_OUT_OF_MEMORY = 4, EXIT_DEVICE = 5, EXIT_INTERRUPTED = 75 };

// The signal after which a training run must save and end, 0 = none (run.h sets it). Long loops look at it
// between two batches; the resumed run does what they leave undone.
inline volatile sig_atomic_t stop_signal = 0;
// The signals with which batch systems and terminals end a run
inline const int STOP_SIGNALS[] = {SIGINT, SIGTERM, SIGUSR1, SIGHUP, SIGXCPU};

// An error for main(), which prints the message and exits with the code. It is thrown, so that files are closed and
// locks released, and so that a test can compare the message.
struct Error : std::runtime_error {
    int code;
    Error(int code, const std::string& message) : std::runtime_error(message), code(code) {}
};

// What the main thread is doing ("training"), for the message of an allocation that fails
inline const char* phase = "starting";
// Sets it until the end of a block; after an exception it stays.
struct Phase {
    const char* before = phase;
    explicit Phase(const char* what) { phase = what; }
    ~Phase() { if (std::uncaught_exceptions() == 0) { phase = before; } }
};

#define PRINTF_LIKE(fmt, args) __attribute__((format(printf, fmt, args)))

inline bool starts_with(const std::string& s, const char* start) { return s.compare(0, strlen(start), start) == 0; }
inline bool ends_with(const std::string& s, const char* end) {
    const size_t n = strlen(end);
    return s.size() >= n && s.compare(s.size() - n, n, end) == 0;
}

// vsnprintf twice: once to learn the length, once to write
inline std::string vstrprintf(const char* fmt, va_list ap) {
    va_list again;                      // a va_list can be walked only once
    va_copy(again, ap);
    const int n = vsnprintf(nullptr, 0, fmt, ap);
    if (n < 0 && errno == ENOMEM) { throw std::bad_alloc(); }
    std::string s((size_t)(n > 0 ? n : 0), '\0');
    if (n > 0) { vsnprintf(&s[0], (size_t)n + 1, fmt, again); }
    va_end(again);
    return s;
}

// printf into a std::string
PRINTF_LIKE(1, 2) inline std::string strprintf(const char* fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    std::string s = vstrprintf(fmt, ap);
    va_end(ap);
    return s;
}

// Text from any source, made safe to print: control characters are escaped (also U+0080 to U+009F, in UTF-8 or as
// single bytes, which some terminals obey) unless `kept` has them; the middle of more than `most` bytes is left out.
inline std::string printable(const std::string& s, size_t most = 60, const char* kept = "") {
    std::string p;
    const size_t last = most / 4;               // bytes of the end that are shown
    bool cut = s.size() > most;
    for (size_t i = 0; i < s.size(); i++) {
        if (cut && i >= most - last) {
            cut = false;
            i = s.size() - last;
            while (i < s.size() && ((unsigned char)s[i] & 0xC0) == 0x80) { i++; }       // not inside a character
            p += strprintf("... (%zu bytes) ...", s.size());
            if (i == s.size()) { break; }
        }
        const unsigned char c = (unsigned char)s[i];
        size_t n = 0;                           // bytes that continue this character; UTF-8 has at most 3 of them
        if (c >= 0xC2 && c < 0xF5) { n = 1 + (c >= 0xE0) + (c >= 0xF0); }
        bool whole = (c < 0x80 || n > 0) && i + n < s.size();
        for (size_t k = 1; whole && k <= n; k++) { whole = ((unsigned char)s[i + k] & 0xC0) == 0x80; }
        const bool control = c < 32 || c == 127 || (c == 0xC2 && whole && (unsigned char)s[i + 1] < 0xA0);
        if (!whole || (control && (c == 0 || strchr(kept, c) == nullptr))) { p += strprintf("\\x%02x", c); continue; }
        p.append(s, i, n + 1);
        i += n;
    }
    return p;
}
constexpr size_t LONGEST_MESSAGE = 1500;        // bytes

// One line on stderr, for the user: printf, safe to print
PRINTF_LIKE(1, 2) inline void say(const char* fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    const std::string s = vstrprintf(fmt, ap);
    va_end(ap);
    fprintf(stderr, "%s\n", printable(s, LONGEST_MESSAGE).c_str());
}

// Throws an Error with the message, safe to print, and for failures of the device the place in the source.
[[noreturn]] PRINTF_LIKE(4, 5) inline void die_at(const char* file, int line, int code, const char* fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    std::string s = vstrprintf(fmt, ap);
    va_end(ap);
    throw Error(code, printable(s, LONGEST_MESSAGE) + (code == EXIT_DEVICE ? strprintf("  [%s:%d]", file, line) : ""));
}

// die(code, "where: what is wrong: expected X, got Y (hint)", ...), and its common form for bad input
#define die(code, ...) die_at(__FILE__, __LINE__, code, __VA_ARGS__)
#define check(cond, ...) ((cond) ? (void)0 : die_at(__FILE__, __LINE__, EXIT_BAD_INPUT, __VA_ARGS__))

// ----------------------------------------------------------------------------------------------------------
// small helpers

constexpr int IGNORE_INDEX = -1;    // a target without loss and gradient

// seconds since an arbitrary moment; never goes back, so differences are durations
inline double wall_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// "1.2 GB", for messages about memory and disk
inline std::string format_bytes(double bytes) {
    const char* unit[] = {"B", "kB", "MB", "GB", "TB"};
    int u = 0;
    while (bytes >= 1000 && u < 4) { bytes /= 1000; u++; }      // decimal units, as disks are sold in
    return strprintf(u == 0 ? "%.0f %s" : "%.1f %s", bytes, unit[u]);
}

// a * b in 64 bits; an overflow is an error that names what was being computed
inline size_t checked_mul(size_t a, size_t b, const char* what) {
    size_t r;
    check(!__builtin_mul_overflow(a, b, &r), "%s: %zu x %zu does not fit in 64 bits", what, a, b);
    return r;
}

// XXH3, 64 bits: of checkpoints and shards, against damage and not against an adversary
inline uint64_t checksum(const void* data, size_t bytes, uint64_t seed = 0) {
    return XXH3_64bits_withSeed(data, bytes, seed);
}
inline uint64_t checksum(const std::string& s) { return checksum(s.data(), s.size()); }

// ----------------------------------------------------------------------------------------------------------
// reading files

// false also if a directory of the path is missing or may not be searched
inline bool path_exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }
// like path_exists, but true for a dangling symbolic link
inline bool name_is_taken(const std::string& path) {
    struct stat st;
    return lstat(path.c_str(), &st) == 0;
}
inline bool is_directory(const std::string& path) {
    struct stat st;
    return stat(path.c_str(), &st) == 0 && S_ISDIR(st.st_mode);
}

// A regular file opened for reading, and its size. All reads give their offset (pread), so threads may share one File.
struct File {
    std::string path;                   // for messages
    int fd = -1;
    uint64_t size = 0;                  // in bytes

    explicit File(const std::string& path) : path(path) {
        fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);   // O_NONBLOCK: opening a FIFO must not hang
        check(fd >= 0, "%s: cannot open: %s", path.c_str(), strerror(errno));
        struct stat st;
        const bool regular = fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
        if (!regular) {
            ::close(fd);
            die(EXIT_BAD_INPUT, "%s: not a regular file", path.c_str());
        }
        size = (uint64_t)st.st_size;
    }
    File(File&& f) noexcept : path(std::move(f.path)), fd(f.fd), size(f.size) { f.fd = -1; }
    ~File() { if (fd >= 0) { ::close(fd); } }

    // All of `bytes` from `offset`, or an Error that says at which byte the file ended.
    void read(void* data, uint64_t bytes, uint64_t offset) const {
        char* out = (char*)data;
        while (bytes > 0) {
            // Linux reads at most 2 GB in one call
            const ssize_t n = pread(fd, out, std::min(bytes, (uint64_t)1 << 30), (off_t)offset);
            if (n < 0 && errno == EINTR) { continue; }                  // a signal came first: ask again
            check(n >= 0, "%s: cannot read %zu bytes at offset %zu: %s", path.c_str(), (size_t)bytes, (size_t)offset,
                  strerror(errno));
            check(n > 0, "%s: the file ends at byte %zu, expected %zu more (is it truncated?)",
                  path.c_str(), (size_t)offset, (size_t)bytes);
            out += n; offset += (uint64_t)n; bytes -= (uint64_t)n;
        }
    }
};

// the names in a directory, sorted, without . and ..
inline std::vector<std::string> list_directory(const std::string& path) {
    DIR* dir = opendir(path.c_str());
    const int code = errno == ENOMEM ? EXIT_OUT_OF_MEMORY : EXIT_BAD_INPUT;
    if (dir == nullptr) { die(code, "%s: cannot list directory: %s", path.c_str(), strerror(errno)); }
    std::vector<std::string> names;
    while (struct dirent* e = readdir(dir)) {
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0) { names.push_back(e->d_name); }
    }
    closedir(dir);
    std::sort(names.begin(), names.end());
    return names;
}

// The whole of a file that is known to be small (JSON, vocabularies); `limit` bounds the allocation.
inline std::string read_file(const std::string& path, uint64_t limit = 64u << 20) {
    File f(path);
    check(f.size <= limit, "%s: expected a file of at most %s, got %s", path.c_str(),
          format_bytes((double)limit).c_str(), format_bytes((double)f.size).c_str());
    std::string s(f.size, '\0');
    if (f.size > 0) { f.read(&s[0], f.size, 0); }
    return s;
}

// ----------------------------------------------------------------------------------------------------------
// writing files

// Makes a system call, and repeats it if a signal interrupted it; negative, and errno, if it failed
template <class Call> auto io_call(Call call) {
    auto result = call();
    while (result < 0 && errno == EINTR) { result = call(); }
    return result;
}
inline int io_open(const std::string& path, int flags) {
    return io_call([&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0644); });
}
inline bool io_truncate(int fd, size_t bytes) { return io_call([&] { return ::ftruncate(fd, (off_t)bytes); }) == 0; }

// Whether `error` says that the file system of `path` lacks a service, as Lustre, CIFS and FUSE may: then the work
// continues after one warning for each `loss`, which says what no longer holds.
inline bool lacks_service(int error, const std::string& path, const char* loss) {
    static std::string warned;
    const bool lacks = error == ENOSYS || error == ENOTSUP || error == ENOLCK || error == EINVAL || error == EBADF;
    if (!lacks || warned.find(loss) != std::string::npos) { return lacks; }
    warned += loss;
    say("warning: %s: not supported by its file system (%s), so %s", path.c_str(), strerror(error), loss);
    return true;
}

// The functions below fail with an Error that names the path and the reason.
inline void io_unlink(const std::string& path) {
    const bool done = io_call([&] { return ::unlink(path.c_str()); }) == 0;
    check(done, "%s: cannot remove: %s", path.c_str(), strerror(errno));
}
inline void io_rmdir(const std::string& path) {
    const bool done = io_call([&] { return ::rmdir(path.c_str()); }) == 0;
    check(done, "%s: cannot remove the directory: %s", path.c_str(), strerror(errno));
}
// After this the file's contents survive a power failure; its name needs io_fsync_directory.
inline void io_fsync(int fd, const std::string& path) {
    const bool synced = io_call([&] { return ::fsync(fd); }) == 0;
    check(synced || lacks_service(errno, path, "a power failure may lose what was saved last"), "%s: cannot fsync: %s",
          path.c_str(), strerror(errno));
}
// Opens a new, empty file; an old one of that name is emptied.
inline int io_create(const std::string& path) {
    const int fd = io_open(path, O_WRONLY | O_CREAT | O_TRUNC);
    check(fd >= 0, "%s: cannot create: %s", path.c_str(), strerror(errno));
    return fd;
}
// All of `bytes`, in as many calls as it takes.
inline void io_write(int fd, const void* data, size_t bytes, const std::string& path) {
    const char* p = (const char*)data;
    while (bytes > 0) {
        const ssize_t n = io_call([&] { return ::write(fd, p, std::min(bytes, (size_t)1 << 30)); });
        check(n > 0, "%s: cannot write: %s", path.c_str(), n < 0 ? strerror(errno) : "no progress");
        p += n; bytes -= (size_t)n;
    }
}
// Linux has closed the file even if close() fails, so do not close it again after EINTR.
inline void io_close(int fd, const std::string& path) {
    check(::close(fd) == 0 || errno == EINTR, "%s: cannot close: %s", path.c_str(), strerror(errno));
}
// Replaces `to` in one step: readers see the old file or the new one, and never none.
inline void io_rename(const std::string& from, const std::string& to) {
    const bool done = io_call([&] { return ::rename(from.c_str(), to.c_str()); }) == 0;
    check(done, "cannot rename %s to %s: %s", from.c_str(), to.c_str(), strerror(errno));
}
// After this a rename in the directory survives a power failure.
inline void io_fsync_directory(const std::string& path) {
    const int fd = io_open(path, O_RDONLY | O_DIRECTORY);
    check(fd >= 0, "%s: cannot open directory: %s", path.c_str(), strerror(errno));
    try { io_fsync(fd, path); } catch (...) { ::close(fd); throw; }
    io_close(fd, path);
}
// True if it made the directory, false if the directory existed.
inline bool io_mkdir(const std::string& path) {
    const bool made = io_call([&] { return ::mkdir(path.c_str(), 0755); }) == 0;
    check(made || (errno == EEXIST && is_directory(path)), "%s: cannot create directory: %s", path.c_str(),
          strerror(errno));
    return made;
}
// mkdir -p. Levels may exist already; those that it makes are synced to the disk together with their parent.
inline void io_mkdirs(const std::string& path) {
    for (size_t i = 1; i <= path.size(); i++) {
        if ((i < path.size() && path[i] != '/') || path[i - 1] == '/') { continue; }
        const std::string part = path.substr(0, i);
        const size_t slash = part.rfind('/');
        if (io_mkdir(part)) { io_fsync_directory(slash == std::string::npos ? "." : part.substr(0, slash + 1)); }
    }
}
