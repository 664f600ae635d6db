// base/floats.h -- floating-point numbers on the host: bf16 as storage, denormals as zero, a test of isfinite.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

// The upper half of a float32. It only stores: both conversions are explicit, and arithmetic is float32.
struct HostBf16 {
    uint16_t bits;
    HostBf16() = default;
    // Rounds to the nearest, ties to even; what is too large becomes infinity, a NaN stays a NaN.
    explicit HostBf16(float x) {
        uint32_t u;
        memcpy(&u, &x, sizeof(u));
        bits = x != x ? 0x7fff : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
    explicit operator float() const {
        const uint32_t u = (uint32_t)bits << 16;
        float x;
        memcpy(&x, &u, sizeof(x));
        return x;
    }
};
static_assert(sizeof(HostBf16) == 2 && std::is_trivial<HostBf16>::value, "bf16 is two bytes of storage");

// A CPU takes a hundred cycles or more for an operation that reads or makes a denormal number (float32: below 2^-126).
// An attention bias that falls with the distance makes millions of them: products of probabilities just above 2^-126.
// No result depends on them, because the numbers they are added to are many powers of two larger. So the two bits set
// here make the floating-point unit round denormal results to zero and read denormal operands as zero. Infinities, NaN
// and all other numbers keep their meaning. In the CUDA build nvcc's -ftz=true does the same.
//
// The bits belong to a thread, and a new thread inherits them from the thread that made it. A program sets them at the
// start of main. launch() (device.h) sets them again in each thread that runs blocks: any library may have made it.
#if defined(__SSE2__)
#include <xmmintrin.h>
constexpr uint64_t FLUSHES = 1u << 15 | 1u << 6;        // MXCSR: flush to zero, denormals are zero
inline uint64_t float_modes() { return _mm_getcsr(); }
inline void set_float_modes(uint64_t modes) { _mm_setcsr((unsigned)modes); }
#elif defined(__aarch64__)
constexpr uint64_t FLUSHES = (uint64_t)1 << 24;         // FPCR.FZ: results and operands
inline uint64_t float_modes() {
    uint64_t now;
    asm volatile("mrs %0, fpcr" : "=r"(now));
    return now;
}
inline void set_float_modes(uint64_t modes) { asm volatile("msr fpcr, %0" :: "r"(modes)); }
#else
constexpr uint64_t FLUSHES = 0;                         // this processor has no such bits
inline uint64_t float_modes() { return 0; }
inline void set_float_modes(uint64_t) {}
#endif
inline void flush_denormals() {
    if ((float_modes() & FLUSHES) != FLUSHES) { set_float_modes(float_modes() | FLUSHES); }
}
// flush_denormals() until the end of a block. The thread may be another library's, so its own bits return.
struct FlushDenormals {
    const uint64_t before = float_modes();
    FlushDenormals() { flush_denormals(); }
    ~FlushDenormals() { set_float_modes(before); }
};

// With -ffast-math isfinite(NaN) may be true, and no guard would work, so a program tests this when it starts.
template <class T> bool isfinite_works_for() {
    volatile T zero = 0;                // volatile: the compiler must not compute what follows
    const T nan = zero / zero, inf = 1 / zero;
    const bool sees = !std::isfinite(nan) && !std::isfinite(inf) && !std::isfinite(-inf) && std::isfinite(zero + 1);
    return sees && std::isnan(nan) && nan != nan;
}
inline bool isfinite_works() { return isfinite_works_for<float>() && isfinite_works_for<double>(); }
