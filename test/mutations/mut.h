// mut.h -- faults that are chosen when a program runs. tree.py writes `(mut(3) ? (a - b) : (a + b))` into copies of the
// sources and includes this. MUT=3 turns fault 3 on. MUT_REACHED=FILE: byte n becomes 1 when mut(n) is evaluated, in
// this process or in one that it starts; trace/sitecustomize.py does the same for Python.
#pragma once
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

constexpr int MUT_MAX = 4096;       // tree.py's too
inline int mut_on = 0;
inline unsigned char* mut_reached = nullptr;

// Before the constructors of all other globals, which may evaluate mut().
__attribute__((constructor(101))) static void mut_start() {
    if (const char* number = getenv("MUT")) { mut_on = atoi(number); }
    const char* name = getenv("MUT_REACHED");
    const int fd = name == nullptr || mut_reached != nullptr ? -1 : open(name, O_RDWR | O_CLOEXEC);
    if (fd < 0) { return; }
    void* map = mmap(nullptr, MUT_MAX, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (map != MAP_FAILED) { mut_reached = (unsigned char*)map; }
}

#ifdef __SANITIZE_THREAD__          // test_wavefronts counts the accesses that it is told of
__attribute__((noinline, no_sanitize("thread")))
#endif
inline bool mut(int n) {
    if (mut_reached != nullptr) { mut_reached[n] = 1; }
    return n == mut_on;
}
