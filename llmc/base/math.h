// base/math.h -- functions of numbers: portable functions, random numbers, fast functions for kernels.
#pragma once

#include "device.h"
#include "ptx.cuh"

// ----------------------------------------------------------------------------------------------------------
// portable functions: log, exp, powers, sin, cos in double, with the same bits on every machine
//
// A C library's functions differ in the last bit between versions and processors. So would initial weights and the
// encodings' tables, which are rounded from such results. The functions here are sums and products in a stated order.
// Their error is at most 2 ulp (sin and cos: 2^-52, powers of 10,000: 17 ulp), as test/base/test_device.cu measures.
// They are in double also because a float angle is off by 0.004 at 100,000 radians.

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
// e^x for x in [-700, 700], at which a smaller or larger x is cut off
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

// log x and log2 x; on a GPU its own functions, which are faster
__host__ __device__ inline float portable_logf(float x) { return ON_GPU ? logf(x) : (float)portable_log((double)x); }
__host__ __device__ inline float portable_log2f(float x) {
    return ON_GPU ? log2f(x) : (float)(portable_log((double)x) / LN2_HIGH);
}

// ----------------------------------------------------------------------------------------------------------
// random numbers: pure functions of coordinates, without a hidden state
//
// hash64(seed, a, b) chains the finalizer of SplitMix64 (Steele et al. 2014) over up to three words of 64 bits. So the
// draw for (seed, tensor, element) or (seed, epoch, sample) is the same on every machine, thread and rank, and after
// every restart.

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

// Draw number i of a stream, standard normal (Box and Muller 1958: two uniform numbers give two normal numbers, here
// the draws i and i ^ 1).
inline double normal01(uint64_t seed, uint64_t stream, uint64_t i) {
    const double u1 = 1.0 - uniform01(seed, stream, i & ~1ull);     // in (0, 1]: its logarithm is finite
    const double u2 = uniform01(seed, stream, i | 1ull);
    const double r = std::sqrt(-2.0 * portable_log(u1));
    const double phi = 6.283185307179586476925286766559 * u2;
    return (i & 1) ? r * portable_sin(phi) : r * portable_cos(phi);
}

// The image of i under a pseudo-random permutation of 0 .. n-1, in O(1) memory for any n. A Feistel network permutes
// the numbers of `2 half` bits, whatever its round function is; here it has four rounds. Applied again until the image
// is below n, it permutes 0 .. n-1 (Black and Rogaway 2002).
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

// ----------------------------------------------------------------------------------------------------------
// fast functions: exp, log1p, sigmoid, softplus, the normal distribution, without branches
//
// On a CPU they are polynomials, which the compiler vectorizes; g++ vectorizes libm's functions only under flags that
// break infinities and NaN. A GPU has instructions for 2^x (within 2 ulp) and 1/x (1 ulp), so e^x takes 8 instructions
// instead of 25. "Within a, b": the largest errors on a CPU and on a GPU, measured by test/base/test_device.cu and
// test/simt/test_fastmath.cu.

constexpr float LOG2E = 1.4426950408889634f;            // 2^(LOG2E x) = e^x
constexpr float LN2 = 0.6931471805599453f;

__host__ __device__ inline float bits_to_float(int32_t i) { return bits_as<float>(i); }
__host__ __device__ inline int32_t float_to_bits(float f) { return bits_as<int32_t>(f); }

// fast_reciprocal: 1 / x, within 0.5 ulp, 1 ulp; on a GPU 0 above 2^126
// fast_exp: e^x, within 2 ulp, 5 ulp; 0 below -87.3, -87.34 (so e^-inf is 0), inf above 88.37, 88.73; NaN stays NaN
// rough_exp: e^(x - top). On a GPU it takes one product and 2^x: the error is below 2^-23 (|x| + |top|) + 2^-22.
#if defined(__CUDA_ARCH__) || defined(SIMT)             // code for the GPU
__host__ __device__ inline float fast_reciprocal(float x) { return rcp(x); }
__host__ __device__ inline float fast_exp(float x) {
    // e^x = 2^y 2^rest = 2^y (1 + rest ln 2), y being x / ln 2 rounded to float and rest the error of the rounding
    float y = x * 1.44269502f;
#if defined(__CUDACC__)
    asm("" : "+f"(y));                                      // else the compiler may make -y a second product
#endif
    const float rest = fused_madd(x, 1.92596303e-8f, fused_madd(x, 1.44269502f, -y));
    const float e = ex2(y);
    return fabsf(x) < 88.5f ? fused_madd(e, rest * 0.693147181f, e) : e;        // beyond, there may be inf - inf
}
__host__ __device__ inline float rough_exp(float x, float top) { return ex2(fused_madd(x, LOG2E, -LOG2E * top)); }
#else
__host__ __device__ inline float fast_reciprocal(float x) { return 1.0f / x; }
__host__ __device__ inline float fast_exp(float x) {
    // e^x = 2^n e^r, n being x / ln 2 rounded to a whole number and r = x - n ln 2; e^r is a polynomial. Above 2^23
    // neighbouring floats are 1 apart: adding `shift` rounds, and leaves n in the low bits.
    constexpr float shift = 12582912.0f;                    // 1.5 * 2^23
    const float y = x > 88.8f ? 88.8f : x;                  // a NaN stays
    const float shifted = fused_madd(y, 1.44269504f, shift);
    const float n = shifted - shift;
    float r = fused_madd(n, -0.693359375f, y);              // ln 2 in two parts, so that n ln 2 is exact
    r = fused_madd(n, 2.12194440e-4f, r);
    float p = 1.381458095e-3f;                              // e^r within 3.1e-9, |r| < 0.347; e^0 is 1
    p = fused_madd(p, r, 8.368725485e-3f);
    p = fused_madd(p, r, 4.166838888e-2f);
    p = fused_madd(p, r, 1.666652056e-1f);
    p = fused_madd(p, r, 4.999999344e-1f);
    p = fused_madd(p, r, 1.0f);
    p = fused_madd(p, r, 1.0f);
    const uint32_t exponent = (uint32_t)float_to_bits(shifted) + 127;       // of 2^n
    const float e = p * bits_to_float((int32_t)(exponent << 23));
    return x <= -87.3f ? 0.0f : e;
}
__host__ __device__ inline float rough_exp(float x, float top) { return fast_exp(x - top); }
#endif

// log(1 + x) for x > -0.9, within 4 ulp, 6 ulp; 0 for |x| < 2^-125, as x / 2 is denormal there; NaN stays NaN. The
// steps are portable_log's.
__host__ __device__ inline float fast_log1p(float x) {
    const float u = 1.0f + x;
    const int32_t bits = float_to_bits(u) - 0x3f3504f3;     // the exponent, counted from sqrt(1/2)
    const bool small = x < 0.41f && x > -0.29f;             // there 1 + x would lose the low bits of x
    const int k = small ? 0 : bits >> 23;
    const float f = small ? x : bits_to_float((bits & 0x7fffff) + 0x3f3504f3) - 1.0f;
    const float s = f * fast_reciprocal(2.0f + f);
    const float z = s * s;
    float p = 2.0f / 11.0f;                                 // 2 atanh(s) / s = 2 + 2/3 z + 2/5 z^2 + ...
    p = fused_madd(p, z, 2.0f / 9.0f);
    p = fused_madd(p, z, 2.0f / 7.0f);
    p = fused_madd(p, z, 2.0f / 5.0f);
    p = fused_madd(p, z, 2.0f / 3.0f);
    p = fused_madd(p, z, 2.0f);
    return x == x ? fused_madd((float)k, 0.693147181f, s * p) : x;
}

// 1 / (1 + e^-x), within 4 ulp, 9 ulp; on a GPU 0 below -87.33
__host__ __device__ inline float sigmoid(float x) { return fast_reciprocal(1.0f + fast_exp(-x)); }
// log(1 + e^x), within 8 ulp, 10 ulp, as max(x, 0) + log(1 + e^-|x|), which cannot overflow
__host__ __device__ inline float softplus(float x) {
    const float positive = x > 0.0f ? x : 0.0f;
    return positive + fast_log1p(fast_exp(x > 0.0f ? -x : x));
}

// e^(-x^2/2), within 3 ulp, 5 ulp; 0 beyond |x| = 13.2, where it is below 2^-126
__host__ __device__ inline float gaussian(float x) {
    float y = fabsf(x);
    y = y > 14.0f ? 14.0f : y;                              // infinity would become infinity - infinity; NaN stays NaN
    const float half = 0.5f * y;
    const float square = half * y;
    const float rest = fused_madd(half, y, -square);        // x^2/2 = square + rest
    const float e = fast_exp(-square);
    return fused_madd(-e, rest, e);
}
// The normal distribution function (1 + erf(x/sqrt(2))) / 2, within 8 ulp, 14 ulp. In the left tail, where 1 + erf
// would cancel, it is e^(-x^2/2) t P(t), t = 1 / (1 + 5/16 |x|), with P fitted for the least relative error (1e-8).
// gauss: gaussian(x), which the derivative needs too
__host__ __device__ inline float normal_cdf(float x, float gauss) {
    const float t = fast_reciprocal(fused_madd(0.3125f, fabsf(x), 1.0f));
    float p = -0.0184795838f;
    p = fused_madd(p, t, 0.0884460360f);
    p = fused_madd(p, t, -0.144006297f);
    p = fused_madd(p, t, 0.0647716597f);
    p = fused_madd(p, t, 0.00543312216f);
    p = fused_madd(p, t, 0.0512365662f);
    p = fused_madd(p, t, 0.0915830508f);
    p = fused_madd(p, t, 0.111563280f);
    p = fused_madd(p, t, 0.124788769f);
    p = fused_madd(p, t, 0.124663398f);
    const float tail = gauss * (t * p);
    return x < 0.0f ? tail : 1.0f - tail;
}
