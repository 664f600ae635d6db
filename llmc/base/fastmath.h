// base/fastmath.h -- exp, log1p, sigmoid, softplus and the normal distribution, branch-free and fast.
//
// On a CPU they are polynomials that a compiler can vectorize; libm's functions g++ vectorizes only under flags that
// break infinities and NaN. A GPU has instructions for 2^x and 1/x, which are off by 2 and 1 ulp at most: there e^x is
// 8 instructions instead of 25. Errors are stated as "CPU ulp, GPU ulp"; test/base/test_device.cu and
// test/simt/test_fastmath.cu measure them.
#pragma once

#include "ptx.cuh"

constexpr float LOG2E = 1.4426950408889634f;            // 2^(LOG2E x) = e^x

__host__ __device__ inline float bits_to_float(int32_t i) { return bits_as<float>(i); }
__host__ __device__ inline int32_t float_to_bits(float f) { return bits_as<int32_t>(f); }

// fast_reciprocal: 1 / x, within 0.5 ulp, 1 ulp; on a GPU 0 above 2^126
// fast_exp: e^x, within 2 ulp, 5 ulp; 0 below -87.3, -87.34 (so e^-inf is 0), inf above 88.37, 88.73; NaN stays NaN
// rough_exp: e^(x - top). On a GPU it takes one product and 2^x: the error is below 2^-23 (|x| + |top|) + 2^-22.
#if defined(__CUDA_ARCH__) || defined(SIMT)             // code that runs on the GPU, which the host's does not
__host__ __device__ inline float fast_reciprocal(float x) { return rcp(x); }
__host__ __device__ inline float fast_exp(float x) {
    // e^x = 2^y 2^rest = 2^y (1 + rest ln 2): y is x / ln 2 rounded, and rest what was lost by that
    float y = x * 1.44269502f;
#if defined(__CUDACC__)
    asm("" : "+f"(y));                                      // -y is y's sign, not a second product
#endif
    const float rest = fused_madd(x, 1.92596303e-8f, fused_madd(x, 1.44269502f, -y));
    const float e = ex2(y);
    return fabsf(x) < 88.5f ? fused_madd(e, rest * 0.693147181f, e) : e;        // beyond, there may be inf - inf
}
__host__ __device__ inline float rough_exp(float x, float top) { return ex2(fused_madd(x, LOG2E, -LOG2E * top)); }
#else
__host__ __device__ inline float fast_reciprocal(float x) { return 1.0f / x; }
__host__ __device__ inline float fast_exp(float x) {
    // With n = x / ln 2 rounded and r = x - n ln 2, e^x = 2^n e^r: the power of two is a matter of bits, and e^r a
    // polynomial. Above 2^23 neighbouring floats are 1 apart, so the sum with `shift` rounds, and its low bits are n.
    constexpr float shift = 12582912.0f;                    // 1.5 * 2^23
    const float y = x > 88.8f ? 88.8f : x;                  // a NaN stays
    const float shifted = fused_madd(y, 1.44269504f, shift);
    const float n = shifted - shift;
    float r = fused_madd(n, -0.693359375f, y);              // ln 2 in two parts, so that n ln 2 is exact
    r = fused_madd(n, 2.12194440e-4f, r);
    float p = 1.381458095e-3f;                              // e^r within 3.1e-9 of it, |r| < 0.347; e^0 is 1
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

// log(1 + x) for x > -0.9, within 4 ulp, 6 ulp; 0 for |x| < 2^-125, whose half is a denormal number; NaN stays NaN.
// With 1 + x = 2^k (1 + f), log(1 + x) = k ln 2 + log(1 + f), and log(1 + f) = 2 atanh(s) for s = f / (2 + f).
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
    y = y > 14.0f ? 14.0f : y;                              // infinity would give infinity - infinity; NaN stays NaN
    const float half = 0.5f * y;
    const float square = half * y;
    const float rest = fused_madd(half, y, -square);        // x^2/2 = square + rest
    const float e = fast_exp(-square);
    return fused_madd(-e, rest, e);
}
// The normal distribution function (1 + erf(x/sqrt(2))) / 2, within 8 ulp, 14 ulp, even in the left tail, where
// 1 - erf would cancel: there it is e^(-x^2/2) t P(t) with t = 1 / (1 + 5/16 |x|), P fitted for the least relative
// error (1e-8).
// gauss: gaussian(x), which callers that need the derivative have already
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
