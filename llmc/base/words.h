// base/words.h -- registers of words of 32 bits, a float32 or two bf16, and squares of them transposed without memory.
//
// The two bf16 of a word are neighbours in memory; the first one is the lower half. Included only where a block is one
// thread (device_cpu.h).
#pragma once

#include <utility>

#include "device.h"

typedef uint32_t words __attribute__((vector_size(4 * LANES)));

// LANES words
template <class T> inline lanes load_words(const T* p) {
    lanes x;
    memcpy(&x, p, sizeof(x));
    return x;
}
// Element E of each word, as float32
template <class T, int E> inline lanes element(lanes x) {
    if constexpr (sizeof(T) == sizeof(float)) { return x; }
    return (lanes)(E == 0 ? (words)x << 16 : (words)x & 0xffff0000u);
}
// The lanes I of a and b, where b's are counted after a's
template <int... I> inline lanes choose_lanes(lanes a, lanes b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, I...);
#else
    typedef int numbers __attribute__((vector_size(4 * LANES)));
    return __builtin_shuffle(a, b, numbers{I...});
#endif
}
// One step of transposing x, a matrix (LANES, LANES): in each square of 2 APART x 2 APART two corners change places.
template <int APART, int... I> inline void exchange_corners(lanes (&x)[LANES], std::integer_sequence<int, I...> all) {
    UNROLL
    for (int i = 0; i < LANES; i++) {
        if (i & APART) { continue; }
        const lanes a = x[i];
        const lanes b = x[i + APART];
        x[i] = choose_lanes<(I & APART ? LANES + I - APART : I)...>(a, b);
        x[i + APART] = choose_lanes<(I & APART ? LANES + I : I + APART)...>(a, b);
    }
    if constexpr (2 * APART < LANES) { exchange_corners<2 * APART>(x, all); }
}
inline void transpose(lanes (&x)[LANES]) { exchange_corners<1>(x, std::make_integer_sequence<int, LANES>()); }
