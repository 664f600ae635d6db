// starve.c -- memory that fails when it is told to: preloaded by attack.py into a trainer.
//
//   STARVE=N:once|always:COUNTS    of the requests for memory or a thread since main() began, the N-th (or it and all
//                                  after it) finds nothing; 0: none fails. COUNTS: a file that counts them, in 8 bytes
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

static long failing;                    // N
static int always;
static atomic_long* count;              // in COUNTS; null before main()

static int fails(void) {
    if (count == NULL) { return 0; }
    const long n = atomic_fetch_add(count, 1) + 1;
    if (n != failing && !(always && failing > 0 && n > failing)) { return 0; }
    errno = ENOMEM;
    return 1;
}

void* malloc(size_t bytes) { return fails() ? NULL : __libc_malloc(bytes); }
void* calloc(size_t n, size_t bytes) { return fails() ? NULL : __libc_calloc(n, bytes); }
void* realloc(void* p, size_t bytes) { return fails() ? NULL : __libc_realloc(p, bytes); }
void* memalign(size_t alignment, size_t bytes) { return fails() ? NULL : __libc_memalign(alignment, bytes); }
void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }
int posix_memalign(void** p, size_t alignment, size_t bytes) {
    void* memory = memalign(alignment, bytes);
    if (memory == NULL) { return ENOMEM; }
    *p = memory;
    return 0;
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument) {
    static int (*create)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
    if (create == NULL) { *(void**)&create = dlsym(RTLD_NEXT, "pthread_create"); }
    return fails() ? EAGAIN : create(thread, attributes, start, argument);
}

static int (*real_main)(int, char**, char**);
static int counted_main(int argc, char** argv, char** environment) {
    char often[8] = "", path[4096] = "";
    const char* text = getenv("STARVE");
    if (text != NULL && sscanf(text, "%ld:%7[a-z]:%4095s", &failing, often, path) == 3) {
        always = strcmp(often, "always") == 0;
        const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
        if (fd < 0 || ftruncate(fd, sizeof(*count)) != 0) { _exit(99); }
        void* shared = mmap(NULL, sizeof(*count), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (shared == MAP_FAILED) { _exit(99); }
        count = shared;
    }
    return real_main(argc, argv, environment);
}

int __libc_start_main(int (*main)(int, char**, char**), int argc, char** argv, void (*init)(void), void (*fini)(void),
                      void (*rtld_fini)(void), void* stack_end) {
    int (*start)(int (*)(int, char**, char**), int, char**, void (*)(void), void (*)(void), void (*)(void), void*);
    *(void**)&start = dlsym(RTLD_NEXT, "__libc_start_main");
    real_main = main;
    return start(counted_main, argc, argv, init, fini, rtld_fini, stack_end);
}
