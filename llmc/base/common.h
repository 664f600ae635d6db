// base/common.h -- what every file here needs: errors with an exit code, files, values as text.
#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

// The signal that told a training run to save and end, 0: none yet (run.h sets it). Long loops look at it between two
// batches; the resumed run finishes them.
inline volatile sig_atomic_t stop_signal = 0;
// How batch systems and terminals end a run
inline const int STOP_SIGNALS[] = {SIGINT, SIGTERM, SIGUSR1, SIGHUP, SIGXCPU};

// main() prints the message and exits with the code. Thrown, so that files are closed and locks released, and so that a
// test can compare the message.
struct Error : std::runtime_error {
    int code;
    Error(int code, const std::string& message) : std::runtime_error(message), code(code) {}
};

// What the main thread is doing ("training"), for the message of an allocation that fails
inline const char* phase = "starting";
// Sets `phase` until the end of a block; an exception leaves it set, for the message.
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
    va_list again;                      // each vsnprintf uses one up
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

// Text from any source, made safe to print. Control characters are escaped unless `kept` has them, also U+0080 to
// U+009F, in UTF-8 or as single bytes, because some terminals obey them. Beyond `most` bytes the middle is left out.
inline std::string printable(const std::string& s, size_t most = 60, const char* kept = "") {
    std::string p;
    const size_t last = most / 4;               // how many bytes are shown after the gap
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
        size_t n = 0;                           // UTF-8: how many bytes follow the character's first
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

// printf to the user: one line on stderr, safe to print
PRINTF_LIKE(1, 2) inline void say(const char* fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    const std::string s = vstrprintf(fmt, ap);
    va_end(ap);
    fprintf(stderr, "%s\n", printable(s, LONGEST_MESSAGE).c_str());
}

// Throws an Error. A failure of the device has the place in the source in its message.
[[noreturn]] PRINTF_LIKE(4, 5) inline void die_at(const char* file, int line, int code, const char* fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    std::string s = vstrprintf(fmt, ap);
    va_end(ap);
    throw Error(code, printable(s, LONGEST_MESSAGE) + (code == EXIT_DEVICE ? strprintf("  [%s:%d]", file, line) : ""));
}

// die(code, "where: what is wrong: expected X, got Y (hint)", ...); check(condition, ...) does it for bad input
#define die(code, ...) die_at(__FILE__, __LINE__, code, __VA_ARGS__)
#define check(cond, ...) ((cond) ? (void)0 : die_at(__FILE__, __LINE__, EXIT_BAD_INPUT, __VA_ARGS__))

// ----------------------------------------------------------------------------------------------------------
// time, sizes and checksums

constexpr int IGNORE_INDEX = -1;    // a target that has neither loss nor gradient

// seconds since an arbitrary moment; never set back, so a difference is a duration
inline double wall_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// "2h03m", "4m12s", "9s", for progress lines
inline std::string format_duration(double seconds) {
    const long s = seconds < 0 ? 0 : (long)(seconds + 0.5);
    if (s >= 3600) { return strprintf("%ldh%02ldm", s / 3600, s / 60 % 60); }
    if (s >= 60) { return strprintf("%ldm%02lds", s / 60, s % 60); }
    return strprintf("%lds", s);
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

// XXH3, 64 bits: finds damage in checkpoints and shards; an adversary could forge it
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

// A regular file, open for reading. Each read gives its offset (pread), so threads may share a File.
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

    // Reads all of `bytes` from `offset`, or dies with the byte at which the file ended.
    void read(void* data, uint64_t bytes, uint64_t offset) const {
        char* out = (char*)data;
        while (bytes > 0) {
            // Linux reads at most 2 GB in one call
            const ssize_t n = pread(fd, out, std::min(bytes, (uint64_t)1 << 30), (off_t)offset);
            if (n < 0 && errno == EINTR) { continue; }                  // a signal came first
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

// All of a small file (JSON, vocabularies); `limit` bounds the allocation.
inline std::string read_file(const std::string& path, uint64_t limit = 64u << 20) {
    File f(path);
    check(f.size <= limit, "%s: expected a file of at most %s, got %s", path.c_str(),
          format_bytes((double)limit).c_str(), format_bytes((double)f.size).c_str());
    std::string s(f.size, '\0');
    if (f.size > 0) { f.read(&s[0], f.size, 0); }
    return s;
}

constexpr size_t LONGEST_LINE = 64000000;   // bytes of a line of a log; --curve at a million tokens writes 20 MB

// Calls f for each whole line of a file. An error names the line.
template <class F> void each_line(const File& file, F f) {
    std::string block;                      // the file from `begin` on
    size_t number = 1;
    for (uint64_t begin = 0, at = 1; at > 0; begin += at) {
        block.resize((size_t)std::min<uint64_t>(LONGEST_LINE, file.size - begin));
        file.read(&block[0], block.size(), begin);
        at = 0;
        try {
            for (size_t end; (end = block.find('\n', at)) != std::string::npos; at = end + 1, number++) {
                f(block.substr(at, end - at));
            }
            check(at > 0 || block.size() < LONGEST_LINE, "longer than %zu bytes, as no line of a log is", LONGEST_LINE);
        } catch (const Error& e) {
            die(e.code, "%s: line %zu: %s; remove the line or move the file away", file.path.c_str(), number, e.what());
        }
    }
}

// ----------------------------------------------------------------------------------------------------------
// writing files: everything that changes the disk goes through these functions, so that a test can make them fail

// The result of a system call, repeated while signals interrupt it; negative, with errno, if it failed
template <class Call> auto io_call(Call call) {
    auto result = call();
    while (result < 0 && errno == EINTR) { result = call(); }
    return result;
}
inline int io_open(const std::string& path, int flags) {
    return io_call([&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0644); });
}
inline bool io_truncate(int fd, size_t bytes) { return io_call([&] { return ::ftruncate(fd, (off_t)bytes); }) == 0; }

// Whether `error` says that the file system of `path` lacks a service, as Lustre, CIFS and FUSE may. Then the work
// continues, after one warning per `loss`, the guarantee that no longer holds.
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
// From now on the file's contents survive a power failure; its name needs io_fsync_directory.
inline void io_fsync(int fd, const std::string& path) {
    const bool synced = io_call([&] { return ::fsync(fd); }) == 0;
    check(synced || lacks_service(errno, path, "a power failure may lose what was saved last"), "%s: cannot fsync: %s",
          path.c_str(), strerror(errno));
}
// Opens a file that is empty, new or not.
inline int io_create(const std::string& path) {
    const int fd = io_open(path, O_WRONLY | O_CREAT | O_TRUNC);
    check(fd >= 0, "%s: cannot create: %s", path.c_str(), strerror(errno));
    return fd;
}
// Writes all of `bytes`, in as many calls as it takes.
inline void io_write(int fd, const void* data, size_t bytes, const std::string& path) {
    const char* p = (const char*)data;
    while (bytes > 0) {
        const ssize_t n = io_call([&] { return ::write(fd, p, std::min(bytes, (size_t)1 << 30)); });
        check(n > 0, "%s: cannot write: %s", path.c_str(), n < 0 ? strerror(errno) : "no progress");
        p += n; bytes -= (size_t)n;
    }
}
// Linux has closed the file even if close() fails, so it is not repeated after EINTR.
inline void io_close(int fd, const std::string& path) {
    check(::close(fd) == 0 || errno == EINTR, "%s: cannot close: %s", path.c_str(), strerror(errno));
}
// Replaces `to` in one step: a reader always finds the old file or the new file.
inline void io_rename(const std::string& from, const std::string& to) {
    const bool done = io_call([&] { return ::rename(from.c_str(), to.c_str()); }) == 0;
    check(done, "cannot rename %s to %s: %s", from.c_str(), to.c_str(), strerror(errno));
}
// From now on a rename in the directory survives a power failure.
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
// mkdir -p. Each directory that it makes is synced to the disk, through its parent.
inline void io_mkdirs(const std::string& path) {
    for (size_t i = 1; i <= path.size(); i++) {
        if ((i < path.size() && path[i] != '/') || path[i - 1] == '/') { continue; }
        const std::string part = path.substr(0, i);
        const size_t slash = part.rfind('/');
        if (io_mkdir(part)) { io_fsync_directory(slash == std::string::npos ? "." : part.substr(0, slash + 1)); }
    }
}

// ----------------------------------------------------------------------------------------------------------
// what a flag or a hyperparameter may be

// The bounds of a number or of each number in a list, or the choices of a text. A choice may end in an optional factor,
// "pi[:s]" admits pi and pi:4, or in an optional path, "[:FILE]".
struct Range {
    double lo = -INFINITY, hi = INFINITY;
    bool or_minus_one = false;              // -1 is allowed too: "work it out" or "all"
    bool takes_value = true;                // false: a switch
    const char* choices = nullptr;          // "a|b|c"
};

// How a row of the flag table writes a range
inline Range any() { return {}; }
inline Range between(double lo, double hi) { return {lo, hi}; }
inline Range at_least(double lo) { return {lo}; }
inline Range minus_one_or(double lo) { return {lo, INFINITY, true}; }
inline Range one_of(const char* choices) { return {-INFINITY, INFINITY, false, true, choices}; }
inline Range a_switch() { return {-INFINITY, INFINITY, false, false}; }

// The types that a flag may have in addition to bool, int, int64_t and double
using Text = std::string;
using Ints = std::vector<int>;                              // "1,2,3"
using Names = std::vector<std::string>;
inline bool is_in(const Names& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
}

// ----------------------------------------------------------------------------------------------------------
// a value as text

inline std::string option_text(const std::string& v) { return v; }
inline std::string option_text(bool v) { return v ? "1" : "0"; }
inline std::string option_text(int v) { return std::to_string(v); }
inline std::string option_text(int64_t v) { return std::to_string(v); }
inline std::string option_text(double v) { return strprintf("%.9g", v); }      // as many digits as a float32 has
template <class E> std::string option_text(const std::vector<E>& v) {
    std::string s;
    for (const E& e : v) { s += (s.empty() ? "" : ",") + option_text(e); }
    return s;
}

// what kind of value a flag takes, for messages and --help
inline std::string option_kind(const Text&) { return "text"; }
inline std::string option_kind(bool) { return "0 or 1"; }
inline std::string option_kind(int) { return "an int"; }
inline std::string option_kind(int64_t) { return "an integer"; }
inline std::string option_kind(double) { return "a number"; }
inline std::string option_kind(const Ints&) { return "ints joined by commas or blanks, each"; }
inline std::string option_kind(const Names&) { return "names joined by commas"; }

// "an integer >= 1 or -1", for messages and --help
template <class V> std::string option_wanted(const Range& r, const V& value) {
    if (r.choices) { return std::string("one of ") + r.choices; }
    std::string s = option_kind(value);
    if (std::isfinite(r.hi)) { return s + strprintf(" from %.10g to %.10g", r.lo, r.hi); }
    if (std::isfinite(r.lo)) { s += strprintf(" >= %.10g", r.lo); }
    return s + (r.or_minus_one ? " or -1" : "");
}

// ----------------------------------------------------------------------------------------------------------
// text as a value: each function returns whether `text`, all of it, is a value in the range

inline bool in_range(double v, const Range& r) { return (v >= r.lo && v <= r.hi) || (r.or_minus_one && v == -1); }

inline bool parse_value(const std::string& text, const Range& r, double& value) {
    // strtod itself would also take " 5", "nan", "infinity" and hexadecimal
    if (text.empty() || text.find_first_not_of("0123456789+-.eE") != std::string::npos) { return false; }
    char* end = nullptr;
    value = strtod(text.c_str(), &end);
    return *end == '\0' && std::isfinite(value) && in_range(value, r);
}

inline bool parse_value(const std::string& text, const Range& r, int64_t& value) {
    // strtoll itself would also take " 5" and "+5"; errno: the number does not fit in 64 bits
    if (text.empty() || text.find_first_not_of("0123456789-") != std::string::npos) { return false; }
    char* end = nullptr;
    errno = 0;
    value = (int64_t)strtoll(text.c_str(), &end, 10);
    return *end == '\0' && end != text.c_str() && errno == 0 && in_range((double)value, r);
}

inline bool parse_value(const std::string& text, const Range& r, int& value) {
    int64_t wide = 0;                                       // a cast would cut off a number that is too large
    const bool good = parse_value(text, r, wide) && wide >= INT32_MIN && wide <= INT32_MAX;
    value = good ? (int)wide : 0;
    return good;
}

inline bool parse_value(const std::string& text, const Range&, bool& value) {
    value = text == "1";
    return text == "0" || text == "1";
}

// one of the range's choices, or any text if it has none
inline bool parse_value(const std::string& text, const Range& r, std::string& value) {
    value = text;
    for (const char* at = r.choices; at; at = strchr(at, '|'), at = at ? at + 1 : nullptr) {
        const std::string choice(at, strcspn(at, "|["));        // without its "[:s]"
        if (text == choice) { return true; }
        double factor;
        const char* more = at + choice.size();
        if (*more != '[' || text.compare(0, choice.size() + 1, choice + ":") != 0) { continue; }
        const std::string rest = text.substr(choice.size() + 1);
        const bool path = strncmp(more, "[:FILE]", 7) == 0;
        if (path ? !rest.empty() : parse_value(rest, at_least(1), factor)) { return true; }
    }
    return r.choices == nullptr;
}

// a list: each item is in the range
template <class E> bool parse_value(const std::string& text, const Range& r, std::vector<E>& value) {
    value.clear();
    for (size_t at = 0; at <= text.size();) {
        const size_t end = std::min(text.find(',', at), text.size());
        E item;
        if (end == at || !parse_value(text.substr(at, end - at), r, item)) { return false; }
        value.push_back(item);
        at = end + 1;
    }
    return true;            // an empty text and a comma at the end have failed as empty items
}

// ----------------------------------------------------------------------------------------------------------
// words: split, wrapped, and the nearest to a mistyped one

constexpr size_t HELP_COLUMNS = 80, CONSOLE_COLUMNS = 100;

inline Names words_of(const std::string& text) {
    Names words;
    for (size_t at = 0; at < text.size(); at = std::min(text.find(' ', at), text.size()) + 1) {
        words.push_back(text.substr(at, text.find(' ', at) - at));
    }
    return words;
}

// Joins pieces of text with spaces, from column `at` on. A piece beyond `columns` begins a new line at column `indent`.
inline std::string wrapped(const Names& pieces, size_t at, size_t indent, size_t columns = HELP_COLUMNS) {
    std::string s;
    for (const std::string& piece : pieces) {
        const bool first = s.empty(), fits = at + 1 + piece.size() <= columns;
        if (!first) { s += fits ? " " : "\n" + std::string(indent, ' '); }
        if (!first) { at = fits ? at + 1 : indent; }
        s += piece;
        at += piece.size();
    }
    return s;
}

// Levenshtein's distance, by rows of its table
inline size_t edit_distance(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); j++) { row[j] = j; }
    for (size_t i = 1; i <= a.size(); i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); j++) {
            const size_t change = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = std::min(change, std::min(row[j - 1], row[j]) + 1);
        }
    }
    return row[b.size()];
}

// "did you mean cable? ": the nearest of the words, "" if none is near
inline std::string did_you_mean(const std::string& text, const Names& words) {
    std::string nearest;
    size_t least = std::min((size_t)4, text.size() / 2 + 1);    // with more changes it is another word
    for (const std::string& word : words) {
        const size_t distance = edit_distance(text.substr(0, 40), word);
        if (distance < least) { least = distance; nearest = "did you mean " + word + "? "; }
    }
    return nearest;
}

// ----------------------------------------------------------------------------------------------------------
// stand-ins: users give a Git LFS pointer, a web page, PyTorch's weights, an archive or a name on the Hugging Face hub.
// Every reader asks here first, so that the error names what was given and says how to get the file itself.

// Dies if the file begins like a stand-in. text: any text is right, so only a pointer is refused
inline void refuse_stand_in(const std::string& path, bool text = false) {
    const File file(path);
    std::string head((size_t)std::min(file.size, (uint64_t)512), '\0');
    file.read(&head[0], head.size(), 0);
    const char *pointer = "a Git LFS pointer; git lfs pull, or on the hub hf download OWNER/NAME, gets the file",
               *page = "the page of a server; curl -L with the address of the file gets it (on the hub /resolve/, not "
                       "/blob/), or hf download OWNER/NAME", *packed = "a compressed file; decompress it",
               *pickle = "a pickle, as torch.save() writes weights; docs/checkpoints.md (Weights of PyTorch) has the "
                         "lines that convert it";
    const std::pair<const char*, const char*> known[] = {       // in lower case
        {"version https://git-lfs", pointer}, {"<!doctype", page}, {"<html", page}, {"<head", page}, {"<?xml", page},
        {"{\"error\":\"", page}, {"entry not found", page}, {"invalid username", page}, {"found. redirect", page},
        {"temporary redirect", page}, {"pk\x03\x04", "a zip archive; unzip it"}, {"\x1f\x8b\x08", packed},
        {"\x28\xb5\x2f\xfd", packed}, {"\xfd" "7zxz", packed}, {"bzh91ay&sy", packed}, {"\x93numpy", "a NumPy array"},
        {"par1\x15", "a Parquet table; data/text.py makes shards of it"}, {"\x89hdf", "an HDF5 file; use safetensors"},
        {"gguf\x03", "a GGUF of llama.cpp; use the safetensors that it was made from"}};
    std::string start = head.substr(std::min(head.find_first_not_of(" \t\r\n\xEF\xBB\xBF"), head.size()));
    for (char& c : start) { c = (char)(c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c); }
    const char* found = nullptr;
    for (const auto& [begin, what] : known) { found = starts_with(start, begin) ? what : found; }
    const auto holds = [&](const char* name) { return head.find(name) != std::string::npos; };
    const bool zip = starts_with(head, "PK\x03\x04");           // the name of its first file follows
    if (zip && holds(".npy")) { found = "NumPy arrays (.npz)"; }
    // PyTorch before 1.6 wrote no zip; a safetensors file, which begins with its header's length, has zeros from byte 4
    const bool old = head.size() > 8 && head[0] == '\x80' && head[1] >= 2 && head[1] <= 5 &&
                     head.compare(4, 4, std::string(4, '\0')) != 0;
    if (old || (zip && (holds("data.pkl") || holds(".format_version")))) { found = pickle; }
    check(found == nullptr || (text && found != pointer), "%s: expected the file itself, got %s", path.c_str(), found);
}

// Dies if the path of a model or a tokenizer is a name on the hub or the root of the hub's cache.
inline void refuse_hub_name(const std::string& path) {
    const std::string inside = ends_with(path, "/snapshots") ? path : path + "/snapshots";
    const bool cache = !path.empty() && is_directory(inside) && !list_directory(inside).empty();
    check(!cache, "%s: expected a model, got the root of its cache; give %s/%s", path.c_str(), inside.c_str(),
          cache ? list_directory(inside).back().c_str() : "");
    const std::string hub = "https://huggingface.co/", name = path.substr(path.find(hub) == 0 ? hub.size() : 0);
    const size_t slash = name.find('/');                        // OWNER/NAME, or NAME
    bool local = path_exists(path) || name.empty() || !isalnum((unsigned char)name[0]) || slash != name.rfind('/') ||
                 name_is_taken(name.substr(0, slash));
    for (const char* end : {".safetensors", ".bin", ".json", ".txt"}) { local = local || ends_with(name, end); }
    check(local, "%s: there is no such file or directory; a model on the hub: pip install huggingface_hub; hf download "
          "%s --local-dir %s", path.c_str(), name.c_str(), name.substr(slash + 1).c_str());
}
