// simt_ptx.h -- the functions of llmc/base/ptx.cuh for the emulator: what each instruction means, from the PTX ISA's
// tables. Their comments there say what they do. The last part of simt.h.
#pragma once


// ----------------------------------------------------------------------------------------------------------
// arithmetic

inline float flush_to_zero(float x) { return fabsf(x) < FLT_MIN ? copysignf(0.0f, x) : x; }

// The instructions' results are off by as much as the PTX ISA lets them, so that no test is easier than hardware: y,
// computed from x, with -most .. most ulp added, always the same for the same x. SIMT_MATH=N: other errors.
inline float simt_off(float y, float x, int most) {
    static const uint32_t seed = getenv("SIMT_MATH") != nullptr ? (uint32_t)atoi(getenv("SIMT_MATH")) : 1;
    if (!(fabsf(y) >= 2 * FLT_MIN && fabsf(y) < FLT_MAX / 2)) { return flush_to_zero(y); }
    uint32_t draw = (__float_as_uint(x) ^ seed * 0x9E3779B9u) * 0x85EBCA6Bu;
    draw = (draw ^ draw >> 15) * 0xC2B2AE35u;
    return __uint_as_float(__float_as_uint(y) + (draw >> 16) % (2 * (unsigned)most + 1) - (unsigned)most);
}

// ex2.approx.ftz.f32: 2^x within 2 ulp, 0 for -inf, 1 for 0
inline float ex2(float x) {
    x = flush_to_zero(x);
    const float y = exp2f(x);
    return x == 0.0f ? y : simt_off(y, x, 2);
}
// rcp.approx.ftz.f32: 1 / x within 1 ulp, infinite for 0
inline float rcp(float x) {
    x = flush_to_zero(x);
    return simt_off(1.0f / x, x, 1);
}
// lg2.approx.ftz.f32: log2(x) within 2 ulp, between 0.5 and 2 within 2^-22; -inf for 0, NaN below
inline float lg2(float x) {
    return flush_to_zero(log2f(flush_to_zero(x)));
}

// cvt.rn.bf16x2.f32: both rounded to the nearest bf16, lo in the low half
inline uint32_t pack_bf16(float lo, float hi) {
    return (uint32_t)__nv_bfloat16(lo).bits | (uint32_t)__nv_bfloat16(hi).bits << 16;
}
inline float unpack_lo(uint32_t x) { return __uint_as_float(x << 16); }
inline float unpack_hi(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }

// ----------------------------------------------------------------------------------------------------------
// warp and block

// shfl.sync.bfly, shfl.sync.idx over the whole warp: the value of lane (own ^ bits), of lane `lane`
inline float shuffle_xor(float x, int bits, SIMT_SITE) { return __shfl_xor_sync(~0u, x, bits, file, line); }
inline float shuffle(float x, int lane, SIMT_SITE) { return __shfl_sync(~0u, x, lane, file, line); }
// vote.sync.ballot and popc: for how many lanes it holds
inline int count_lanes(bool holds, SIMT_SITE) { return __builtin_popcount(__ballot_sync(~0u, holds, file, line)); }

// bar.warp.sync
inline void syncwarp(SIMT_SITE) { __syncwarp(~0u, file, line); }

// ----------------------------------------------------------------------------------------------------------
// matrices

// the row as it was when this lane arrived: other lanes may still write it
struct LdmatrixRequest { uint16_t row[8]; uint32_t* r; };
template <bool Trans> void ldmatrix_perform(const void* const* in, void* const* out) {
    for (int l = 0; l < 32; l++) {
        for (int m = 0; m < 4; m++) {
            uint32_t half[2];
            for (int e = 0; e < 2; e++) {
                const int row = Trans ? 2 * (l % 4) + e : l / 4;
                const int column = Trans ? l / 4 : 2 * (l % 4) + e;
                half[e] = ((const LdmatrixRequest*)in[8 * m + row])->row[column];
            }
            ((LdmatrixRequest*)out[l])->r[m] = half[0] | half[1] << 16;
        }
    }
}
inline void ldmatrix(const char* what, uint32_t* r, const void* row, SimtPerform perform, const char* file, int line) {
    if ((uintptr_t)row % 16 != 0 || !simt_is_shared(row, 16)) {
        simt_fail(file, line,
                  strprintf("%s: %p is not a 16-byte row of this block's shared memory (thread %u)", what, row,
                            threadIdx.x));
    }
    LdmatrixRequest request;
    memcpy(request.row, row, 16);
    request.r = r;
    simt_collective(what, ~0u, &request, &request, perform, file, line);
}

// ldmatrix.sync.aligned.m8n8.x4.shared.b16 (warp): four 8x8 matrices of bf16. Lanes 8m..8m+7 give the 16-byte rows of
// matrix m; r[m] of a lane is row `group`, columns 2 pair and 2 pair + 1 of it.
inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, SIMT_SITE) {
    ldmatrix("ldmatrix_x4", r, row, ldmatrix_perform<false>, file, line);
}
// The same with .trans: r[m] is column `group`, rows 2 pair and 2 pair + 1 of matrix m.
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, SIMT_SITE) {
    ldmatrix("ldmatrix_x4_trans", r, row, ldmatrix_perform<true>, file, line);
}

struct MmaRequest { const uint32_t* a; uint32_t b[2]; float* d; };
inline void mma_perform(const void* const* in, void* const* out) {
    float A[16][16], B[16][8];
    for (int l = 0; l < 32; l++) {
        const MmaRequest* q = (const MmaRequest*)in[l];
        const int group = l / 4, pair = l % 4;
        for (int e = 0; e < 2; e++) {
            auto half = [&](uint32_t x) { return e == 0 ? unpack_lo(x) : unpack_hi(x); };
            for (int i = 0; i < 4; i++) { A[group + 8 * (i % 2)][2 * pair + e + 8 * (i / 2)] = half(q->a[i]); }
            for (int i = 0; i < 2; i++) { B[2 * pair + e + 8 * i][group] = half(q->b[i]); }
        }
    }
    for (int l = 0; l < 32; l++) {
        float* d = ((MmaRequest*)out[l])->d;
        for (int i = 0; i < 4; i++) {
            const int row = l / 4 + 8 * (i / 2), column = 2 * (l % 4) + i % 2;
            double sum = d[i];
            for (int k = 0; k < 16; k++) { sum += (double)A[row][k] * B[k][column]; }
            d[i] = (float)sum;
        }
    }
}

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 (warp): d (16,8) += a (16,16) b (16,8)
//   a[0] row group, columns 2 pair, +1    a[1] row group + 8    a[2], a[3] the same rows, columns 2 pair + 8, +9
//   b0   rows 2 pair, +1, column group    b1   rows 2 pair + 8, +9
//   d[0], d[1] row group, columns 2 pair, +1                    d[2], d[3] row group + 8
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, SIMT_SITE) {
    MmaRequest request = {a, {b0, b1}, d};
    simt_collective("mma_m16n8k16", ~0u, &request, &request, mma_perform, file, line);
}

// ----------------------------------------------------------------------------------------------------------
// products of a warpgroup: performed when the warp waits, with what registers and shared memory hold by then

// no_sanitize_thread: wavefronts.h counts what lanes access
__attribute__((no_sanitize_thread)) inline float wgmma_read(const char* tile, int row, int column) {
    const uintptr_t at = (uintptr_t)tile + (uintptr_t)(row * 128 + column * 2);
    return unpack_lo(*(const uint16_t*)(at ^ (at >> 7 & 7) << 4));          // the swizzle of 128 bytes
}
inline void wgmma_perform(const void* const* in, void* const*) {
    const SimtProduct& product = *(const SimtProduct*)in[0];
    const auto b = [&](int k, int column) {
        return product.transposed ? wgmma_read(product.b, k, column) : wgmma_read(product.b, column, k);
    };
    uint32_t from_tile[32][4];
    for (int l = 0; l < 32 && product.a_tile != nullptr; l++) {
        for (int i = 0; i < 4; i++) {
            const int row = product.row0 + l / 4 + 8 * (i % 2), k = 2 * (l % 4) + 8 * (i / 2);
            from_tile[l][i] = pack_bf16(wgmma_read(product.a_tile, row, k), wgmma_read(product.a_tile, row, k + 1));
        }
    }
    for (int n = 0; n < product.columns; n += 8) {
        MmaRequest requests[32];
        const void* mma_in[32];
        void* mma_out[32];
        for (int l = 0; l < 32; l++) {
            const SimtProduct& own = *(const SimtProduct*)in[l];
            const int k = 2 * (l % 4), c = n + l / 4;
            const uint32_t* a = product.a_tile != nullptr ? from_tile[l] : own.a;
            const uint32_t low = pack_bf16(b(k, c), b(k + 1, c));
            const uint32_t high = pack_bf16(b(k + 8, c), b(k + 9, c));
            requests[l] = {a, {low, high}, own.d + n / 2};
            mma_in[l] = mma_out[l] = &requests[l];
        }
        mma_perform(mma_in, mma_out);
    }
}
struct WgmmaTile {
    const char* start;
    explicit WgmmaTile(const void* p) : start((const char*)p) {}
};
inline void wgmma_start(float* d, const uint32_t* a, WgmmaTile a_tile, WgmmaTile b, int at, int columns,
                        bool transposed, const char* file, int line) {
    SimtThread* t = simt.current;
    if (!t->fenced) { simt_fail(file, line, "wgmma: expected wgmma_fence since the last wait"); }
    if (t->copied) { simt_fail(file, line, "wgmma: expected fence_proxy_async after cp_async_wait"); }
    const auto expect_tile = [&](const char* tile, int rows) {
        if ((uintptr_t)tile % 1024 != 0 || !simt_is_shared(tile, (size_t)rows * 128)) {
            simt_fail(file, line, strprintf("wgmma: expected a tile of %d rows in shared memory, got %p", rows, tile));
        }
    };
    expect_tile(b.start, transposed ? at / 128 + 16 : columns);
    if (a == nullptr) { expect_tile(a_tile.start, 64); }
    t->products.push_back({d, a, a == nullptr ? a_tile.start + at : nullptr, b.start + at, columns,
                           (int)threadIdx.x / 32 * 16, transposed});
}
template <bool Transposed, int N>
void wgmma(float (&d)[N][4], const uint32_t (&a)[4], WgmmaTile b, int at, SIMT_SITE) {
    wgmma_start(&d[0][0], a, b, b, at, N * 8, Transposed, file, line);
}
template <int N> void wgmma(float (&d)[N][4], WgmmaTile a, WgmmaTile b, int at, SIMT_SITE) {
    wgmma_start(&d[0][0], nullptr, a, b, at, N * 8, false, file, line);
}
inline void wgmma_fence() { simt.current->fenced = true; }
inline void wgmma_wait(SIMT_SITE) {
    SimtThread* t = simt.current;
    for (SimtProduct& product : t->products) {
        simt_collective("wgmma", ~0u, &product, &product, wgmma_perform, file, line);
    }
    t->products.clear();
    t->fenced = false;
}
inline void fence_proxy_async() { simt.current->copied = false; }

// ----------------------------------------------------------------------------------------------------------
// asynchronous copies

// cp.async.cg.shared.global, 16 bytes, both addresses aligned to it; zeros when !valid (src-size 0: `global` is not
// read then). The thread's own copy is there after cp_async_wait, the other threads' after a barrier that follows their
// wait.
inline void cp_async_16(void* shared, const void* global, bool valid, SIMT_SITE) {
    if ((uintptr_t)shared % 16 != 0 || (valid && (uintptr_t)global % 16 != 0) || !simt_is_shared(shared, 16)) {
        simt_fail(file, line,
                  strprintf("cp_async_16 from %p to %p: not aligned to 16, or not to this block's shared memory",
                            global, shared));
    }
    SimtThread* t = simt.current;
    SimtCopy copy = {(char*)shared, t->groups, {}};
    if (valid) { memcpy(copy.data, global, 16); }
    t->copies.push_back(copy);
    memset(shared, 0xff, 16);
}
// cp.async.commit_group: the copies since the last one are a group
inline void cp_async_commit() {
    simt.current->groups++;
}
// cp.async.wait_group N: at most the N newest groups are pending
template <int N> inline void cp_async_wait() {
    static_assert(N >= 0, "a number of groups");
    SimtThread* t = simt.current;
    size_t kept = 0;
    for (const SimtCopy& copy : t->copies) {
        if (copy.group >= t->groups - N) { t->copies[kept++] = copy; continue; }
        memcpy(copy.to, copy.data, 16);
        t->copied = true;
    }
    t->copies.resize(kept);
}
