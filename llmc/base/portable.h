// base/portable.h -- numbers with the same bits on every machine: log, exp, powers, sin, cos in double; random numbers.
#pragma once

#include "device.h"

// ----------------------------------------------------------------------------------------------------------
// functions
//
// A C library's functions differ in the last bit from one version, and one processor, to the next, and so would the
// initial weights and the tables of encodings that are rounded from them. These are sums and products in a stated
// order. They are off by at most 2 units in the last place (sin and cos by 2^-52, powers of 10,000 by 17 units), as
// test/base/test_device.cu measures.

__host__ __device__ inline double fused_madd(double a, double b, double c) { return __builtin_fma(a, b, c); }

// x rounded to a whole number: above 2^52 neighbouring doubles are 1 apart
__host__ __device__ inline double nearest_whole(double x) { return (x + 6755399441055744.0) - 6755399441055744.0; }
constexpr double LN2_HIGH = 0x1.62e42fefa39efp-1, LN2_LOW = 0x1.abc9e3b39803fp-56;              // ln 2, in two parts
constexpr double HALF_PI_HIGH = 0x1.921fb54442d18p+0, HALF_PI_LOW = 0x1.1a62633145c07p-54;      // pi / 2

// log x. With x = 2^k (1 + f), log x = k ln 2 + log(1 + f), and log(1 + f) = 2 atanh(s) for s = f / (2 + f).
__host__ __device__ inline double portable_log(double x) {
    if (x == 0.0) { return -INFINITY; }
    if (!(x > 0.0 && x < INFINITY)) { return x < 0.0 ? NAN : x; }
    const int64_t root = 0x3fe6a09e667f3bcd;                // sqrt(1/2), from which the exponent is counted
    const int64_t bits = bits_as<int64_t>(x) - root;
    const double k = (double)(bits >> 52);
    const double f = bits_as<double>((bits & 0xfffffffffffff) + root) - 1.0;
    const double s = f / (2.0 + f);
    const double z = s * s;
    double p = 0.0;                                         // 2 atanh(s) / s = 2 + z (2/3 + z (2/5 + ...))
    for (int n = 25; n > 1; n -= 2) { p = fused_madd(p, z, 2.0 / n); }
    const double tail = f - s * (f - z * p);                // log(1 + f), as 2 s = f - s f
    return fused_madd(k, LN2_HIGH, fused_madd(k, LN2_LOW, tail));
}
// log(1 + x) for x >= 0, corrected for what 1 + x loses of x
__host__ __device__ inline double portable_log1p(double x) {
    const double u = 1.0 + x;
    return u < INFINITY ? portable_log(u) + (x - (u - 1.0)) / u : u;
}
// 2^n e^r, |r| < 0.35
__host__ __device__ inline double scaled_exp(double n, double r) {
    double p = 1.0;                                         // e^r = 1 + r (1 + r/2 (1 + r/3 (...)))
    for (int k = 14; k > 0; k--) { p = fused_madd(p, r * (1.0 / k), 1.0); }
    return p * bits_as<double>(((int64_t)n + 1023) << 52);
}
// e^x, for x in [-700, 700]; beyond, that of the nearer end
__host__ __device__ inline double portable_exp(double x) {
    x = x > 700.0 ? 700.0 : x;
    x = x < -700.0 ? -700.0 : x;
    const double n = nearest_whole(x * (1.0 / LN2_HIGH));
    return scaled_exp(n, fused_madd(n, -LN2_LOW, fused_madd(n, -LN2_HIGH, x)));
}
// x^y for x > 0, and 2^x, exact for whole x
__host__ __device__ inline double portable_pow(double x, double y) { return portable_exp(y * portable_log(x)); }
__host__ __device__ inline double portable_exp2(double x) {
    const double n = nearest_whole(x);
    return scaled_exp(n, (x - n) * LN2_HIGH);
}

// the sine of x + quarters pi / 2, |x| < 2^30
__host__ __device__ inline double portable_sin(double x, int quarters = 0) {
    const double n = nearest_whole(x * (1.0 / HALF_PI_HIGH));
    const double r = fused_madd(n, -HALF_PI_LOW, fused_madd(n, -HALF_PI_HIGH, x));      // |r| <= pi/4
    const double z = -r * r;
    double sine = 1.0, cosine = 1.0;
    for (int k = 16; k > 0; k -= 2) { sine = fused_madd(sine, z * (1.0 / (k * (k + 1))), 1.0); }    // of r, / r
    for (int k = 17; k > 0; k -= 2) { cosine = fused_madd(cosine, z * (1.0 / (k * (k + 1))), 1.0); }
    const int64_t turn = (int64_t)n + quarters;
    const double y = turn % 2 == 0 ? r * sine : cosine;
    return (turn & 2) == 0 ? y : -y;
}
__host__ __device__ inline double portable_cos(double x) { return portable_sin(x, 1); }

// log x and log2 x; a GPU has functions of its own, which are faster
__host__ __device__ inline float portable_logf(float x) { return ON_GPU ? logf(x) : (float)portable_log((double)x); }
__host__ __device__ inline float portable_log2f(float x) {
    return ON_GPU ? log2f(x) : (float)(portable_log((double)x) / LN2_HIGH);
}

// ----------------------------------------------------------------------------------------------------------
// random numbers: a value is a pure function of its coordinates, never of a hidden state
//
// hash64(seed, a, b) mixes up to three 64-bit words (the finalizer of SplitMix64, Steele et al. 2014, chained), so the
// draw for (seed, tensor, element) or (seed, epoch, sample) is the same on every machine, thread, rank and restart.

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
