// base/bf16.h -- bfloat16 where the compiler is not nvcc: the upper half of a float32, as storage. There is no
// arithmetic in it, so both conversions are explicit.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

struct bf16 {
    uint16_t bits;
    bf16() = default;
    // Rounds to the nearest, ties to even. Above the largest number is infinity; a NaN stays one.
    explicit bf16(float x) {
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
static_assert(sizeof(bf16) == 2 && std::is_trivial<bf16>::value, "bf16 is two bytes of storage");
