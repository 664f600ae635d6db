// sha256.h -- SHA-256 (FIPS 180-4): results that fixtures and scripts give as hashes.
#pragma once

#include <array>

#include "llmc/base/common.h"

// Call update() for each piece of the data in its order, then hex() once.
struct Sha256 {
    // The standard's constants: the first 32 bits of the fractional parts of the square roots of the first 8 primes ...
    std::array<uint32_t, 8> h = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    uint64_t bytes = 0;                     // so far
    uint8_t rest[64];                       // the bytes % 64 that are not a whole block yet

    void update(const uint8_t* data, size_t n) {
        const size_t held = (size_t)(bytes % 64);
        bytes += n;
        if (held > 0) {
            const size_t take = std::min(n, 64 - held);
            memcpy(rest + held, data, take);
            data += take;
            n -= take;
            if (held + take < 64) { return; }
            add_block(rest);
        }
        for (; n >= 64; n -= 64, data += 64) { add_block(data); }
        if (n > 0) { memcpy(rest, data, n); }
    }

    // 64 hexadecimal digits, as sha256sum prints them
    std::string hex() {
        const uint64_t bits = 8 * bytes;
        const uint8_t one[64] = {0x80};     // the padding: a one, zeros up to 56 bytes of a block, and the length
        const size_t held = (size_t)(bytes % 64);
        update(one, held < 56 ? 56 - held : 120 - held);
        uint8_t length[8];
        for (int i = 0; i < 8; i++) { length[i] = (uint8_t)(bits >> (56 - 8 * i)); }
        update(length, sizeof length);
        std::string s;
        for (const uint32_t word : h) { s += strprintf("%08x", (unsigned)word); }
        return s;
    }

private:
    static uint32_t turn(uint32_t x, int n) { return x >> n | x << (32 - n); }

    // ... and of the cube roots of the first 64 primes
    static constexpr uint32_t K[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

    void add_block(const uint8_t* block) {
        uint32_t w[64];
        for (int i = 0; i < 16; i++) {
            const uint8_t* b = block + 4 * i;
            w[i] = (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | (uint32_t)b[3];
        }
        for (int i = 16; i < 64; i++) {
            const uint32_t a = w[i - 15], b = w[i - 2];
            w[i] = w[i - 16] + (turn(a, 7) ^ turn(a, 18) ^ a >> 3) + w[i - 7] + (turn(b, 17) ^ turn(b, 19) ^ b >> 10);
        }
        std::array<uint32_t, 8> s = h;      // the working variables a ... h
        for (int i = 0; i < 64; i++) {
            const uint32_t choice = (s[4] & s[5]) ^ (~s[4] & s[6]);
            const uint32_t majority = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
            const uint32_t first = s[7] + (turn(s[4], 6) ^ turn(s[4], 11) ^ turn(s[4], 25)) + choice + K[i] + w[i];
            const uint32_t second = (turn(s[0], 2) ^ turn(s[0], 13) ^ turn(s[0], 22)) + majority;
            s = {first + second, s[0], s[1], s[2], s[3] + first, s[4], s[5], s[6]};
        }
        for (size_t i = 0; i < 8; i++) { h[i] += s[i]; }
    }
};
