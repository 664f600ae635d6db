// faults.c -- system calls that fail when they are told to: preloaded into a trainer (LD_PRELOAD=build/faults.so), or
// linked into a test, whose io_hook (faults.h) sees each call that changes the disk.
//
//   FAULTS='CALL:N:WHAT[:always] ...'      the N-th CALL since main() began goes wrong, with `always` also every one
//                                          after it; the first is reported on stderr. N = 0: it is only counted
//   FAULT_COUNTS=FILE                      gets the number of calls that each of the faults has seen, in 8 bytes each
//
// CALL: a name of faults.h; memory (also for a thread), flock, statvfs, waitpid, clock.
// WHAT: an errno. statvfs:N:0 answers with a file system of 0 blocks, clock:N:WHAT with this time in seconds.
#define _GNU_SOURCE
#undef _FORTIFY_SOURCE          // it makes the headers define open()
#undef _FILE_OFFSET_BITS        // 64: open() in this file would be open64()
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "faults.h"

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
enum { MOST = 4, FILES = 256 };

struct Fault { char call[16]; long n, what; int always; };
static struct Fault faults[MOST];
static int planted;
static atomic_long own_counts[MOST], *counts = own_counts;

// The fault that strikes this call, or NULL
static const struct Fault* struck(const char* call, const char* path) {
    const struct Fault* hit = NULL;
    for (int i = 0; i < planted; i++) {
        const struct Fault* f = &faults[i];
        if (strcmp(f->call, call) != 0) { continue; }
        const long n = atomic_fetch_add(&counts[i], 1) + 1;
        if (n == f->n) { dprintf(STDERR_FILENO, "FAULTS: %s number %ld, %s\n", call, n, path); }
        if (n == f->n || (f->always && f->n > 0 && n > f->n)) { hit = f; }
    }
    return hit;
}

// ----------------------------------------------------------------------------------------------------------
// what changes the disk

int (*io_hook)(struct IoCall*);

// -1 and errno if the call is to fail, else 0
static int fails(struct IoCall* c) {
    int error = 0;
    if (io_hook != NULL) {
        error = io_hook(c);
    } else {
        const struct Fault* f = struck(c->name, c->path);
        error = f == NULL ? 0 : (int)f->what;
    }
    if (error != 0) { errno = error; }
    return error != 0 ? -1 : 0;
}
static int path_fails(const char* name, const char* path, const char* to) {
    struct IoCall c = {name, path, to, NULL, 0};
    return fails(&c);
}

static char paths[FILES][PATH_MAX];         // of the descriptors that were opened to change something; "": others
static const char* path_of(int fd) { return fd >= 0 && fd < FILES ? paths[fd] : ""; }
static int file_fails(const char* name, int fd) {
    return path_of(fd)[0] == '\0' ? 0 : path_fails(name, path_of(fd), "");
}

static int opened(int (*real)(const char*, int, ...), const char* path, int flags, mode_t mode) {
    const int device = strncmp(path, "/proc/", 6) == 0 ||
                       (strncmp(path, "/dev/", 5) == 0 && strncmp(path, "/dev/shm/", 9) != 0);
    const int changes = !device && ((flags & (O_ACCMODE | O_CREAT | O_DIRECTORY)) != 0);
    if (changes && path_fails("open", path, "") != 0) { return -1; }
    const int fd = real(path, flags, mode);
    if (changes && fd >= FILES) { _exit(99); }
    if (changes && fd >= 0) { snprintf(paths[fd], PATH_MAX, "%s", path); }
    return fd;
}
static mode_t mode_of(int flags, va_list more) { return (flags & O_CREAT) != 0 ? va_arg(more, mode_t) : 0; }
#define OPEN(name) \
    int name(const char* path, int flags, ...) { \
        va_list more; \
        va_start(more, flags); \
        const mode_t mode = mode_of(flags, more); \
        va_end(more); \
        return opened(REAL(name), path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
int __open_2(const char* path, int flags) { return opened(REAL(open), path, flags, 0); }       // by _FORTIFY_SOURCE
int __open64_2(const char* path, int flags) { return opened(REAL(open64), path, flags, 0); }

ssize_t write(int fd, const void* data, size_t bytes) {
    struct IoCall c = {"write", path_of(fd), "", data, bytes};
    return c.path[0] != '\0' && fails(&c) != 0 ? -1 : REAL(write)(fd, data, c.bytes);
}
int fsync(int fd) { return file_fails("fsync", fd) != 0 ? -1 : REAL(fsync)(fd); }
int ftruncate(int fd, off_t size) { return file_fails("truncate", fd) != 0 ? -1 : REAL(ftruncate)(fd, size); }
int ftruncate64(int fd, off64_t size) { return file_fails("truncate", fd) != 0 ? -1 : REAL(ftruncate64)(fd, size); }
int close(int fd) {                         // as in Linux, the file is closed even if close() fails
    const int error = file_fails("close", fd) != 0 ? errno : 0;
    if (path_of(fd)[0] != '\0') { paths[fd][0] = '\0'; }
    if (REAL(close)(fd) != 0) { return -1; }
    if (error != 0) { errno = error; }
    return error != 0 ? -1 : 0;
}
int rename(const char* from, const char* to) {
    return path_fails("rename", from, to) != 0 ? -1 : REAL(rename)(from, to);
}
int unlink(const char* path) { return path_fails("unlink", path, "") != 0 ? -1 : REAL(unlink)(path); }
int rmdir(const char* path) { return path_fails("rmdir", path, "") != 0 ? -1 : REAL(rmdir)(path); }
int mkdir(const char* path, mode_t mode) { return path_fails("mkdir", path, "") != 0 ? -1 : REAL(mkdir)(path, mode); }

#if !defined(LINKED)
// ----------------------------------------------------------------------------------------------------------
// memory and threads

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

static int no_memory(void) {
    const struct Fault* f = struck("memory", "");
    if (f != NULL) { errno = (int)f->what; }
    return f != NULL;
}
void* malloc(size_t bytes) { return no_memory() ? NULL : __libc_malloc(bytes); }
void* calloc(size_t n, size_t bytes) { return no_memory() ? NULL : __libc_calloc(n, bytes); }
void* realloc(void* p, size_t bytes) { return no_memory() ? NULL : __libc_realloc(p, bytes); }
void* memalign(size_t alignment, size_t bytes) { return no_memory() ? NULL : __libc_memalign(alignment, bytes); }
void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }
int posix_memalign(void** p, size_t alignment, size_t bytes) {
    void* memory = memalign(alignment, bytes);
    if (memory == NULL) { return ENOMEM; }
    *p = memory;
    return 0;
}
int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument) {
    return no_memory() ? EAGAIN : REAL(pthread_create)(thread, attributes, start, argument);
}

// ----------------------------------------------------------------------------------------------------------
// services that a system may lack

static int lacks(const char* call) {
    const struct Fault* f = struck(call, "");
    if (f != NULL) { errno = (int)f->what; }
    return f != NULL;
}
int flock(int fd, int how) { return lacks("flock") ? -1 : REAL(flock)(fd, how); }
int statvfs(const char* path, struct statvfs* s) {
    if (!lacks("statvfs")) { return REAL(statvfs)(path, s); }
    memset(s, 0, sizeof(*s));
    return errno != 0 ? -1 : 0;
}
pid_t waitpid(pid_t pid, int* status, int how) { return lacks("waitpid") ? -1 : REAL(waitpid)(pid, status, how); }
int clock_gettime(clockid_t clock, struct timespec* t) {
    static __typeof__(&clock_gettime) real;
    if (real == NULL) { real = REAL(clock_gettime); }
    const int result = real(clock, t);
    const struct Fault* f = clock == CLOCK_REALTIME ? struck("clock", "") : NULL;
    if (f != NULL) { t->tv_sec = f->what; }
    return result;
}

// ----------------------------------------------------------------------------------------------------------
// $FAULTS

static const char CALLS[] = " open write truncate fsync close rename unlink rmdir mkdir "
                            "memory flock statvfs waitpid clock ";

static void plant(const char* text) {
    while (*text != '\0') {
        struct Fault f = {0};
        char what[24] = "", often[8] = "once";
        char *end = what, name[20];
        int read = 0;
        const int fields = sscanf(text, "%15[a-z]:%ld:%23[^: ]%n:%7[a-z]%n", f.call, &f.n, what, &read, often, &read);
        f.always = strcmp(often, "always") == 0;
        f.what = strtol(what, &end, 10);
        snprintf(name, sizeof(name), " %s ", f.call);
        const int known = strstr(CALLS, name) != NULL && *end == '\0';
        const int repeats = f.always || strcmp(often, "once") == 0, ends = text[read] == '\0' || text[read] == ' ';
        if (fields < 3 || f.n < 0 || !known || !repeats || !ends || planted == MOST) {
            dprintf(STDERR_FILENO, "FAULTS: expected CALL:N:WHAT[:always], got %s\n", text);
            _exit(99);
        }
        faults[planted++] = f;
        text += read + (text[read] == ' ');
    }
}

static int (*real_main)(int, char**, char**);
static int planted_main(int argc, char** argv, char** environment) {
    const char* path = getenv("FAULT_COUNTS");
    if (path != NULL) {
        const int fd = REAL(open)(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
        if (fd < 0 || REAL(ftruncate)(fd, sizeof(own_counts)) != 0) { _exit(99); }
        counts = mmap(NULL, sizeof(own_counts), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        REAL(close)(fd);
        if (counts == MAP_FAILED) { _exit(99); }
    }
    plant(getenv("FAULTS") == NULL ? "" : getenv("FAULTS"));
    return real_main(argc, argv, environment);
}
int __libc_start_main(int (*main)(int, char**, char**), int argc, char** argv, void (*init)(void), void (*fini)(void),
                      void (*rtld_fini)(void), void* stack_end) {
    int (*start)(int (*)(int, char**, char**), int, char**, void (*)(void), void (*)(void), void (*)(void), void*);
    *(void**)&start = dlsym(RTLD_NEXT, "__libc_start_main");
    real_main = main;
    return start(planted_main, argc, argv, init, fini, rtld_fini, stack_end);
}
#endif
