// base/ptx.cuh -- PTX instructions around the tensor cores: one function each, named after its instruction.
//
// lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4. A fragment's register holds two bf16, the lower column or
// row in the low half. "(warp)": all 32 lanes call the function together. On the emulator test/simt/simt_ptx.h defines
// the same functions.
#pragma once

#include "device.h"

#if defined(__CUDACC__)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800 && !defined(PRECISION_FP32)
#error "bf16 needs a GPU of compute capability 8.0 or higher; for older ones: make PRECISION=FP32 ARCH=sm_75"
#endif

// ----------------------------------------------------------------------------------------------------------
// arithmetic

// ex2.approx.ftz.f32: 2^x within 2 ulp, 0 for -inf
__device__ inline float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// rcp.approx.ftz.f32: 1 / x within 1 ulp, infinite for 0
__device__ inline float rcp(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// lg2.approx.ftz.f32: log2(x) within 2 ulp, between 0.5 and 2 within 2^-22; -inf for 0, NaN below
__device__ inline float lg2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// cvt.rn.bf16x2.f32: both rounded to the nearest bf16, lo in the low half
__device__ inline uint32_t pack_bf16(float lo, float hi) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
}
__device__ inline float unpack_lo(uint32_t x) { return __uint_as_float(x << 16); }
__device__ inline float unpack_hi(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }

// ----------------------------------------------------------------------------------------------------------
// the lanes of a warp

// shfl.sync.bfly and shfl.sync.idx (warp): x of lane (own ^ bits), x of lane `lane`
__device__ inline float shuffle_xor(float x, int bits) { return __shfl_xor_sync(~0u, x, bits); }
__device__ inline float shuffle(float x, int lane) { return __shfl_sync(~0u, x, lane); }
// vote.sync.ballot and popc (warp): the number of lanes for which it holds
__device__ inline int count_lanes(bool holds) { return __popc(__ballot_sync(~0u, holds)); }

// bar.warp.sync
__device__ inline void syncwarp() { __syncwarp(~0u); }

// ----------------------------------------------------------------------------------------------------------
// matrices

// ldmatrix.sync.aligned.m8n8.x4.shared.b16 (warp): four 8x8 matrices of bf16. Lanes 8m..8m+7 give the 16-byte rows of
// matrix m; r[m] of a lane is row `group`, columns 2 pair and 2 pair + 1 of it.
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row)) : "memory");
}
// The same with .trans: r[m] is column `group`, rows 2 pair and 2 pair + 1 of matrix m.
__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row)) : "memory");
}

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 (warp): d (16,8) += a (16,16) b (16,8)
//   a[0] row group, columns 2 pair, +1    a[1] row group + 8    a[2], a[3] the same rows, columns 2 pair + 8, +9
//   b0   rows 2 pair, +1, column group    b1   rows 2 pair + 8, +9
//   d[0], d[1] row group, columns 2 pair, +1                    d[2], d[3] row group + 8
__device__ inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ----------------------------------------------------------------------------------------------------------
// products of a warpgroup: a block of 128 threads, whose four warps call each function together

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A tile in shared memory: rows of 128 bytes that begin at a multiple of 1,024 bytes. Row r has eight pieces of 16
// bytes, and piece p lies at p ^ (r & 7). wgmma's descriptor has the address and the size of eight rows, in units of 16
// bytes.
struct WgmmaTile {
    uint32_t low;
    __device__ explicit WgmmaTile(const void* p) : low((uint32_t)__cvta_generic_to_shared(p) >> 4) {}
    __device__ uint64_t from(int bytes) const {
        constexpr uint32_t SWIZZLE_128 = 1u << 30, EIGHT_ROWS = 1024 >> 4;
        uint64_t descriptor;
        asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low + bytes / 16), "r"(SWIZZLE_128 | EIGHT_ROWS));
        return descriptor;
    }
};
// wgmma.mma_async.sync.aligned.m64nNk16.f32.bf16.bf16, N = 64 or 32: d (64,N) += a (64,16) b (16,N); warp w has the
// rows 16 w to 16 w + 15. Its operands must not be touched before wgmma_wait.
//   d[n]  columns 8 n .. 8 n + 7 of the warp's rows, in the registers of mma_m16n8k16
//   a     the warp's rows, in the registers of mma_m16n8k16; or row r is 16 numbers of row r of a tile, `at` bytes from
//         its start
//   b     column c is 16 numbers of row c of a tile, `at` bytes from its start. Transposed: row k is row k of the tile
//         that begins at `at`
#define WGMMA(N, d, operands) "{.reg .pred add; setp.ne.b32 add, 1, 0; " \
    "wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" d "}, " operands ";}"
#define WGMMA_D16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_D32 WGMMA_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_1(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define WGMMA_4 WGMMA_1(0), WGMMA_1(1), WGMMA_1(2), WGMMA_1(3)
#define WGMMA_8 WGMMA_4, WGMMA_1(4), WGMMA_1(5), WGMMA_1(6), WGMMA_1(7)
#define WGMMA_A "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
template <bool Transposed>
__device__ inline void wgmma(float (&d)[8][4], const uint32_t (&a)[4], WgmmaTile b, int at) {
    asm volatile(WGMMA("64", WGMMA_D32, "{%32, %33, %34, %35}, %36, add, 1, 1, %37")
                 : WGMMA_8 : WGMMA_A, "l"(b.from(at)), "n"(Transposed));
}
template <bool Transposed>
__device__ inline void wgmma(float (&d)[4][4], const uint32_t (&a)[4], WgmmaTile b, int at) {
    asm volatile(WGMMA("32", WGMMA_D16, "{%16, %17, %18, %19}, %20, add, 1, 1, %21")
                 : WGMMA_4 : WGMMA_A, "l"(b.from(at)), "n"(Transposed));
}
__device__ inline void wgmma(float (&d)[8][4], WgmmaTile a, WgmmaTile b, int at) {
    asm volatile(WGMMA("64", WGMMA_D32, "%32, %33, add, 1, 1, 0, 0")
                 : WGMMA_8 : "l"(a.from(at)), "l"(b.from(at)));
}
__device__ inline void wgmma(float (&d)[4][4], WgmmaTile a, WgmmaTile b, int at) {
    asm volatile(WGMMA("32", WGMMA_D16, "%16, %17, add, 1, 1, 0, 0")
                 : WGMMA_4 : "l"(a.from(at)), "l"(b.from(at)));
}
#undef WGMMA
#undef WGMMA_D16
#undef WGMMA_D32
#undef WGMMA_1
#undef WGMMA_4
#undef WGMMA_8
#undef WGMMA_A
// wgmma.fence: the products that follow see what was written to registers before
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// wgmma.commit_group, wgmma.wait_group 0: waits for all products
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
// fence.proxy.async: after the next barrier, products see what this thread wrote to shared memory, also by cp.async
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#else
struct WgmmaTile { __device__ explicit WgmmaTile(const void*) {} };
template <bool Transposed, int N>
__device__ inline void wgmma(float (&)[N][4], const uint32_t (&)[4], WgmmaTile, int) {}
template <int N> __device__ inline void wgmma(float (&)[N][4], WgmmaTile, WgmmaTile, int) {}
__device__ inline void wgmma_fence() {}
__device__ inline void wgmma_wait() {}
__device__ inline void fence_proxy_async() {}
#endif

// ----------------------------------------------------------------------------------------------------------
// asynchronous copies

// cp.async.cg.shared.global of 16 bytes, both addresses multiples of 16. Not valid: zeros, and `global` is not read
// (src-size 0). A thread sees its own copies after cp_async_wait, other threads' copies after a barrier behind it.
__device__ inline void cp_async_16(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"((uint32_t)__cvta_generic_to_shared(shared)), "l"(global), "r"(valid ? 16 : 0) : "memory");
}
// cp.async.commit_group: the copies since the last commit become a group
__device__ inline void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// cp.async.wait_group N: waits until at most the N newest groups are pending
template <int N> __device__ inline void cp_async_wait() {
    static_assert(N >= 0, "expected a number of groups");
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}

#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || (defined(SIMT) && !defined(SIMT_AMPERE))
constexpr bool HAS_WGMMA = true;
#else
constexpr bool HAS_WGMMA = false;
#endif
// HAS_WGMMA of the code that this GPU runs: on the host the macro above has no architecture
#if defined(__CUDACC__)
static __device__ bool device_has_wgmma = HAS_WGMMA;
inline bool runs_wgmma() {
    static const bool runs = [] {
        bool has = false;
        CUDA_CHECK(cudaMemcpyFromSymbol(&has, device_has_wgmma, sizeof(has)));
        return has;
    }();
    return runs;
}
#else
inline bool runs_wgmma() { return HAS_WGMMA; }
#endif
