// base/rand.h -- counter-based random numbers: a value is a pure function of its coordinates, never of a hidden state.
//
// hash64(seed, a, b) mixes up to three 64-bit words (the finalizer of SplitMix64, Steele et al. 2014, chained), so the
// draw for (seed, tensor, element) or (seed, epoch, sample) is the same on every machine, thread and rank, and after a
// restart.
#pragma once

#include "libm.h"

__host__ __device__ inline uint64_t mix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}
__host__ __device__ inline uint64_t hash64(uint64_t seed, uint64_t a, uint64_t b = 0) {
    return mix64(mix64(mix64(seed) ^ a) ^ b);
}

// uniform in [0, 1), with 53 bits
__host__ __device__ inline double uniform01(uint64_t seed, uint64_t a, uint64_t b = 0) {
    return (double)(hash64(seed, a, b) >> 11) * 0x1p-53;
}

// The standard normal draw number i of a stream (Box and Muller 1958: two uniform numbers give two normal ones, and
// neighbours i, i ^ 1 share them).
inline double normal01(uint64_t seed, uint64_t stream, uint64_t i) {
    const double u1 = 1.0 - uniform01(seed, stream, i & ~1ull);     // in (0, 1], so that its logarithm is finite
    const double u2 = uniform01(seed, stream, i | 1ull);
    const double r = std::sqrt(-2.0 * portable_log(u1));
    const double phi = 6.283185307179586476925286766559 * u2;
    return (i & 1) ? r * portable_sin(phi) : r * portable_cos(phi);
}

// The image of i under a pseudo-random permutation of 0 .. n-1, in O(1) memory for any n. A Feistel network of four
// rounds is a permutation of the numbers of `2 half` bits, whatever its round function is; where it leaves 0 .. n-1, it
// is applied again until it comes back (Black and Rogaway 2002), which is again a permutation.
inline uint64_t permute(uint64_t i, uint64_t n, uint64_t seed, uint64_t stream) {
    int half = 1;
    while ((1ull << (2 * half)) < n) { half++; }
    const uint64_t mask = (1ull << half) - 1;
    do {
        uint64_t left = i >> half;
        uint64_t right = i & mask;
        for (uint64_t round = 0; round < 4; round++) {
            const uint64_t next = left ^ (hash64(seed, stream, right << 2 | round) & mask);
            left = right;
            right = next;
        }
        i = left << half | right;
    } while (i >= n);
    return i;
}
