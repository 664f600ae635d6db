// base/denormals.h -- denormal numbers, those below 2^-126 in float32, are zero in every thread of a program.
//
// A CPU takes a hundred cycles or more for an operation that reads or makes one. An attention bias that falls with the
// distance makes millions of them, as products of probabilities just above 2^-126, and they change nothing: they are
// added to numbers that are many powers of two larger. So two bits of the floating-point unit are set, one that rounds
// such a result to zero and one that reads such an operand as zero. Infinities, NaN and all other numbers keep their
// meaning. In the CUDA build nvcc's -ftz=true does the same.
//
// The bits belong to a thread, and a new thread inherits them from the thread that made it. They are set before main,
// and by launch() (device.h) in each thread that runs blocks, because any library may have made it.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

// Sets the bits in the calling thread. On a processor without such bits it does nothing.
inline void flush_denormals() {
#if defined(__SSE2__)
    const unsigned both = 1u << 15 | 1u << 6;           // MXCSR: flush to zero, denormals are zero
    const unsigned now = _mm_getcsr();
    if ((now & both) != both) { _mm_setcsr(now | both); }
#elif defined(__aarch64__)
    const uint64_t both = (uint64_t)1 << 24;            // FPCR.FZ: results and operands
    uint64_t now;
    asm volatile("mrs %0, fpcr" : "=r"(now));
    if ((now & both) != both) { asm volatile("msr fpcr, %0" :: "r"(now | both)); }
#endif
}

// In main's thread, and so in all threads that it will make
static const bool denormals_are_zero = (flush_denormals(), true);
