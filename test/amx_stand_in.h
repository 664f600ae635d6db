// amx_stand_in.h -- the five intrinsics of llmc/base/gemm.h in plain C, after the pseudocode of Intel's manual
// (Software Developer's Manual, volume 2, TDPBF16PS). To be read before gemm.h, which then believes that it has AMX:
//
//     g++ -include test/amx_stand_in.h -DPRECISION_BF16 ...
//
// Where the compiler has the instructions they are used, and this file changes nothing.
#pragma once

#if defined(__AMX_BF16__) || defined(__AMXBF16__)
constexpr bool AMX_STAND_IN = false;
#else
constexpr bool AMX_STAND_IN = true;
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#define __AMX_BF16__ 1

struct AmxStandIn {
    uint16_t row_bytes[8];
    uint8_t rows[8];
    unsigned char tile[8][16][64];
    bool configured;

    void configure(const void* config) {
        const unsigned char* from = (const unsigned char*)config;
        if (from[0] != 1) { abort(); }                              // the palette
        memcpy(row_bytes, from + 16, sizeof(row_bytes));
        memcpy(rows, from + 48, sizeof(rows));
        memset(tile, 0, sizeof(tile));
        configured = true;
    }
    void release() { configured = false; }
    void load(int t, const void* from, ptrdiff_t stride) {
        if (!configured) { abort(); }                               // the instruction would fault
        for (int r = 0; r < rows[t]; r++) { memcpy(tile[t][r], (const char*)from + r * stride, row_bytes[t]); }
    }
    void store(int t, void* to, ptrdiff_t stride) const {
        if (!configured) { abort(); }
        for (int r = 0; r < rows[t]; r++) { memcpy((char*)to + r * stride, tile[t][r], row_bytes[t]); }
    }
    float bf16_at(int t, int r, int i) const {
        uint16_t half;
        memcpy(&half, tile[t][r] + 2 * i, sizeof(half));
        const uint32_t bits = (uint32_t)half << 16;
        float x;
        memcpy(&x, &bits, sizeof(x));
        return x;
    }
    void dot(int c, int a, int b) {
        for (int m = 0; m < rows[c]; m++) {
            for (int n = 0; n < row_bytes[c] / 4; n++) {
                float even = 0.0f, odd = 0.0f, sum;
                for (int k = 0; k < row_bytes[a] / 4; k++) {
                    even = __builtin_fmaf(bf16_at(a, m, 2 * k), bf16_at(b, k, 2 * n), even);
                    odd = __builtin_fmaf(bf16_at(a, m, 2 * k + 1), bf16_at(b, k, 2 * n + 1), odd);
                }
                memcpy(&sum, tile[c][m] + 4 * n, sizeof(sum));
                sum += even + odd;
                memcpy(tile[c][m] + 4 * n, &sum, sizeof(sum));
            }
        }
    }
};
inline thread_local AmxStandIn amx_stand_in;

#undef _tile_dpbf16ps
#undef _tile_loadd
#undef _tile_stored
#define _tile_loadconfig(config) amx_stand_in.configure(config)
#define _tile_release() amx_stand_in.release()
#define _tile_loadd(t, from, stride) amx_stand_in.load(t, from, stride)
#define _tile_stored(t, to, stride) amx_stand_in.store(t, to, stride)
#define _tile_dpbf16ps(c, a, b) amx_stand_in.dot(c, a, b)
#define syscall(number, code, feature) ((void)(code), (void)(feature), 0L)      // the kernel permits it
#endif
