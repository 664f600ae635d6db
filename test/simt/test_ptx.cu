// test_ptx.cu -- every function of ptx.cuh against the index formulas of the PTX ISA, written out here a second time,
// element by element. The same tests on a GPU show that the emulator does what the hardware does. Then faults are
// planted, each beside its correct twin, and the emulator has to tell the two apart. The hardware may let them pass, so
// there they are skipped.
#include <sys/wait.h>

#include "llmc/base/ptx.cuh"
#include "test/simt/kernel_test.h"

static const Stream stream = nullptr;

static void only_emulated() { if (on_gpu) { SKIP("the hardware may let this fault pass"); } }

// ----------------------------------------------------------------------------------------------------------
// matrices

// 32 rows of 8 numbers, row r in place (r * 5) % 32: only the addresses say which matrix a row belongs to
template <bool Trans> __global__ void ldmatrix_kernel(uint32_t* out) {
    __shared__ uint4 memory[32];
    uint16_t (*rows)[8] = (uint16_t (*)[8])memory;
    const int lane = threadIdx.x;
    for (int c = 0; c < 8; c++) { rows[lane * 5 % 32][c] = (uint16_t)(100 * lane + c); }
    __syncthreads();
    uint32_t r[4];
    if (Trans) { ldmatrix_x4_trans(r, rows[lane * 5 % 32]); } else { ldmatrix_x4(r, rows[lane * 5 % 32]); }
    for (int m = 0; m < 4; m++) { out[4 * lane + m] = r[m]; }
}
template <bool Trans> static void check_ldmatrix() {
    DeviceArray<uint32_t> out(128);
    launch(ldmatrix_kernel<Trans>, Grid(1, 32, 0, stream), out.p);
    const std::vector<uint32_t> r = out.host();
    for (int m = 0; m < 4; m++) {
        for (int i = 0; i < 8; i++) {
            for (int j = 0; j < 8; j++) {       // element (i, j) of matrix m and its one owner
                const int lane = Trans ? 4 * j + i / 2 : 4 * i + j / 2;
                const int half = Trans ? i % 2 : j % 2;
                const unsigned got = r[4 * lane + m] >> (16 * half) & 0xffff, want = (unsigned)(100 * (8 * m + i) + j);
                EXPECT(got == want, "matrix %d element (%d,%d): lane %d half %d has %u, not %u", m, i, j, lane, half,
                       got, want);
            }
        }
    }
}
KERNEL_TEST("ldmatrix_x4: each element has the owner that the ISA gives it") { check_ldmatrix<false>(); }
KERNEL_TEST("ldmatrix_x4_trans: each element has the owner that the ISA gives it") { check_ldmatrix<true>(); }

// d (16,8) += A (16,16) B (16,8), fragments by the ISA's formulas; WrongRow plants a[1] and a[2] exchanged
template <bool WrongRow> __global__ void mma_kernel(float* D, const float* A, const float* B) {
    const int lane = threadIdx.x;
    const int groupID = lane >> 2;
    const int threadID_in_group = lane % 4;
    float a_element[8], b_element[4], d[4];
    for (int i = 0; i < 8; i++) {
        const int row = (i < 2 || (i >= 4 && i < 6)) ? groupID : groupID + 8;
        const int col = threadID_in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
        a_element[i] = A[row * 16 + col];
    }
    for (int i = 0; i < 4; i++) {
        const int row = threadID_in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0);
        b_element[i] = B[row * 8 + groupID];
    }
    for (int i = 0; i < 4; i++) { d[i] = D[(i < 2 ? groupID : groupID + 8) * 8 + threadID_in_group * 2 + (i & 1)]; }
    uint32_t a[4], b[2];
    for (int i = 0; i < 4; i++) {
        a[WrongRow && i % 3 != 0 ? 3 - i : i] = pack_bf16(a_element[2 * i], a_element[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) { b[i] = pack_bf16(b_element[2 * i], b_element[2 * i + 1]); }
    mma_m16n8k16(d, a, b[0], b[1]);
    for (int i = 0; i < 4; i++) { D[(i < 2 ? groupID : groupID + 8) * 8 + threadID_in_group * 2 + (i & 1)] = d[i]; }
}
static std::vector<double> product(std::vector<double> d, const std::vector<float>& A, const std::vector<float>& B,
                                   int M, int N, int K) {
    for (int m = 0; m < M; m++) {
        for (int n = 0; n < N; n++) {
            for (int k = 0; k < K; k++) { d[m * N + n] += (double)A[m * K + k] * B[k * N + n]; }
        }
    }
    return d;
}
// whole numbers that bf16 holds exactly and whose products add up exactly in float32, in any order
static std::vector<float> whole_numbers(size_t n, uint64_t stream_) {
    std::vector<float> v(n);
    for (size_t i = 0; i < n; i++) { v[i] = (float)(int)(hash64(7, stream_, i) % 257) - 128.0f; }
    return v;
}
template <bool WrongRow>
static double mma_error(const std::vector<float>& A, const std::vector<float>& B, const std::vector<float>& D) {
    DeviceArray<float> a(A), b(B), d(D);
    launch(mma_kernel<WrongRow>, Grid(1, 32, 0, stream), d.p, a.p, b.p);
    return relative_l2(d.host(), product(converted<double>(D), A, B, 16, 8, 16));
}
KERNEL_TEST("mma_m16n8k16: exact on whole numbers") {
    const std::vector<float> A = whole_numbers(256, 1);
    const std::vector<float> B = whole_numbers(128, 2);
    const std::vector<float> D = whole_numbers(128, 3);
    const double error = mma_error<false>(A, B, D);
    EXPECT(error == 0, "error %g", error);
    const double wrong = mma_error<true>(A, B, D);
    EXPECT(wrong > 0.1, "a fragment with two registers exchanged passes: error %g", wrong);
}
KERNEL_TEST("mma_m16n8k16: float32 sums of bf16 products") {
    const double error =
        mma_error<false>(rounded_to_bf16(normals(256, 1)), rounded_to_bf16(normals(128, 2)), normals(128, 3));
    EXPECT(error < 1e-6, "error %g", error);
    INFO("error %.1e", error);
}

// d (64,N) += A (64,16) B (16,N) by a warpgroup. The tiles are written element by element, where the ISA's swizzle of
// 128 bytes wants them: bits 4 to 6 of the address are xored with its bits 7 to 9. All else in them is NaN.
enum Wgmma { A_IN_REGISTERS, B_TRANSPOSED, BOTH_IN_TILES };
enum WgmmaFault { NO_FAULT, READ_EARLY, OVERWRITTEN_EARLY, NO_FENCE };
__device__ inline void put_swizzled(char* tile, int row, int column, float x) {
    const int at = row * 128 + column * 2;
    *(bf16*)(tile + (at ^ (at >> 7 & 7) << 4)) = (bf16)x;
}
template <Wgmma Form, int N, WgmmaFault Fault>
__global__ void wgmma_kernel(float* D, float* has_wgmma, const float* A, const float* B, int k0) {
    char* a_tile = (char*)dynamic_shared();                         // (64,64); A at the columns from k0 on
    char* b_tile = a_tile + 64 * 128;                               // transposed: B at the rows from k0 on
    const int group = threadIdx.x % 32 / 4;
    const int pair = threadIdx.x % 4;
    const int row0 = threadIdx.x / 32 * 16 + group;
    for (int e = threadIdx.x; e < 64 * 64; e += 128) {
        put_swizzled(a_tile, e / 64, e % 64, NAN);
        put_swizzled(b_tile, e / 64, e % 64, NAN);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < 64 * 16; e += 128) { put_swizzled(a_tile, e / 16, k0 + e % 16, A[e]); }
    for (int e = threadIdx.x; e < 16 * N; e += 128) {
        if (Form == B_TRANSPOSED) { put_swizzled(b_tile, k0 + e / N, e % N, B[e]); }
        else { put_swizzled(b_tile, e % N, k0 + e / N, B[e]); }
    }
    fence_proxy_async();
    __syncthreads();
    uint32_t a[4];
    for (int i = 0; i < 4; i++) {
        const float* from = A + (row0 + i % 2 * 8) * 16 + i / 2 * 8 + 2 * pair;
        a[i] = pack_bf16(from[0], from[1]);
    }
    float d[N / 8][4];
    const auto at = [&](int n, int i) { return (row0 + i / 2 * 8) * N + 8 * n + 2 * pair + i % 2; };
    for (int n = 0; n < N / 8; n++) {
        for (int i = 0; i < 4; i++) { d[n][i] = D[at(n, i)]; }
    }
    if (Fault != NO_FENCE) { wgmma_fence(); }
    const WgmmaTile b(b_tile);
    if constexpr (Form == A_IN_REGISTERS) { wgmma<false>(d, a, b, 2 * k0); }
    else if constexpr (Form == B_TRANSPOSED) { wgmma<true>(d, a, b, 128 * k0); }
    else { wgmma(d, WgmmaTile(a_tile), b, 2 * k0); }
    if (Fault == OVERWRITTEN_EARLY) { a[3] = 0; }
    if (Fault != READ_EARLY) { wgmma_wait(); }
    for (int n = 0; n < N / 8; n++) {
        for (int i = 0; i < 4; i++) { D[at(n, i)] = d[n][i]; }
    }
    if (Fault == READ_EARLY) { wgmma_wait(); }
    if (threadIdx.x == 0) { *has_wgmma = HAS_WGMMA ? 1.0f : 0.0f; }
}
template <Wgmma Form, int N, WgmmaFault Fault = NO_FAULT> static double wgmma_error(int k0) {
    const std::vector<float> A = whole_numbers(64 * 16, 1), B = whole_numbers(16 * N, 2);
    const std::vector<float> D = whole_numbers(64 * N, 3);
    DeviceArray<float> a(A), b(B), d(D), has_wgmma(1);
    launch(wgmma_kernel<Form, N, Fault>, Grid(1, 128, 2 * 64 * 128, stream), d.p, has_wgmma.p, a.p, b.p, k0);
    const std::vector<float> found = d.host();
    if (has_wgmma.host()[0] == 0.0f) { SKIP("this GPU has no wgmma"); }
    return relative_l2(found, product(converted<double>(D), A, B, 64, N, 16));
}
KERNEL_TEST("wgmma: exact on whole numbers, from registers and tiles, at each of a tile's four places") {
    for (int k0 = 0; k0 < 64; k0 += 16) {
        const double errors[] = {wgmma_error<A_IN_REGISTERS, 64>(k0), wgmma_error<A_IN_REGISTERS, 32>(k0),
                                 wgmma_error<B_TRANSPOSED, 64>(k0),   wgmma_error<B_TRANSPOSED, 32>(k0),
                                 wgmma_error<BOTH_IN_TILES, 64>(k0),  wgmma_error<BOTH_IN_TILES, 32>(k0)};
        for (int i = 0; i < 6; i++) { EXPECT(errors[i] == 0, "k0 %d, form %d: error %g", k0, i, errors[i]); }
    }
}
KERNEL_TEST("planted: wgmma's result is read before the wait, its operand overwritten, the fence left out") {
    only_emulated();
    const double early = wgmma_error<A_IN_REGISTERS, 64, READ_EARLY>(0);
    EXPECT(early > 0.1, "a result that is read before the wait passes: error %g", early);
    const double overwritten = wgmma_error<A_IN_REGISTERS, 64, OVERWRITTEN_EARLY>(0);
    EXPECT(overwritten > 0.1, "an operand that is overwritten before the wait passes: error %g", overwritten);
    const std::string unfenced = error_of([] { wgmma_error<A_IN_REGISTERS, 64, NO_FENCE>(0); });
    EXPECT(unfenced.find("expected wgmma_fence") != std::string::npos, "the message is: %s", unfenced.c_str());
}

// C (16,16) = Q (16,64) K (16,64)^T through ldmatrix, O (16,64) = C V (16,64) through ldmatrix.trans: rows of 128 bytes
// whose 16-byte pieces are permuted by the row. Fault 1: the reader forgets the permutation. Fault 2: no barrier after
// the writes.
template <int Fault> __global__ void tile_kernel(float* C, float* O, const bf16* Q, const bf16* K, const bf16* V) {
    bf16* q = (bf16*)dynamic_shared();
    bf16* k = q + 16 * 64;
    bf16* v = k + 16 * 64;
    const int lane = threadIdx.x;
    const int group = lane / 4;
    const int pair = lane % 4;
    for (int e = lane; e < 16 * 64; e += 32) {
        const int at = e / 64 * 64 + ((e / 8 % 8) ^ (e / 64 % 8)) * 8 + e % 8;
        q[at] = Q[e]; k[at] = K[e]; v[at] = V[e];
    }
    if (Fault != 2) { __syncthreads(); }
    auto at = [&](bf16* m, int row, int column) {
        return m + row * 64 + (Fault == 1 ? column / 8 : (column / 8) ^ (row % 8)) * 8;
    };
    float c[2][4] = {};
    for (int kk = 0; kk < 64; kk += 16) {
        uint32_t a[4], b[4];
        ldmatrix_x4(a, at(q, lane % 16, kk + lane / 16 * 8));
        ldmatrix_x4(b, at(k, lane % 8 + lane / 16 * 8, kk + lane / 8 % 2 * 8));
        mma_m16n8k16(c[0], a, b[0], b[1]);
        mma_m16n8k16(c[1], a, b[2], b[3]);
    }
    for (int n = 0; n < 2; n++) {
        for (int i = 0; i < 4; i++) { C[(group + i / 2 * 8) * 16 + n * 8 + 2 * pair + i % 2] = c[n][i]; }
    }
    uint32_t p[4];
    for (int i = 0; i < 4; i++) { p[i] = pack_bf16(c[i / 2][i % 2 * 2], c[i / 2][i % 2 * 2 + 1]); }
    for (int d = 0; d < 64; d += 16) {
        uint32_t b[4];
        float o[2][4] = {};
        ldmatrix_x4_trans(b, at(v, lane % 16, d + lane / 16 * 8));
        mma_m16n8k16(o[0], p, b[0], b[1]);
        mma_m16n8k16(o[1], p, b[2], b[3]);
        for (int n = 0; n < 2; n++) {
            for (int i = 0; i < 4; i++) { O[(group + i / 2 * 8) * 64 + d + n * 8 + 2 * pair + i % 2] = o[n][i]; }
        }
    }
}
template <int Fault> static double tile_error() {
    const std::vector<float> Q = rounded_to_bf16(normals(1024, 1)), K = rounded_to_bf16(normals(1024, 2));
    const std::vector<float> V = rounded_to_bf16(normals(1024, 3));
    DeviceArray<bf16> q(to_bf16(Q)), k(to_bf16(K)), v(to_bf16(V));
    DeviceArray<float> c(256), o(1024);
    launch(tile_kernel<Fault>, Grid(1, 32, 3 * 16 * 64 * sizeof(bf16), stream), c.p, o.p, q.p, k.p, v.p);
    std::vector<float> Kt(64 * 16);
    for (int e = 0; e < 1024; e++) { Kt[e % 64 * 16 + e / 64] = K[e]; }
    const std::vector<double> C = product(std::vector<double>(256), Q, Kt, 16, 16, 64);
    const std::vector<double> O = product(std::vector<double>(1024), rounded_to_bf16(c.host()), V, 16, 64, 16);
    return std::max(relative_l2(c.host(), C), relative_l2(o.host(), O));
}
KERNEL_TEST("ldmatrix and mma together: Q K^T, then C V") {
    const double error = tile_error<0>();
    EXPECT(error < 1e-6, "error %g", error);
    INFO("error %.1e", error);
}
KERNEL_TEST("planted: the reader forgets the swizzle, or the barrier before ldmatrix") {
    const double swizzle = tile_error<1>();
    EXPECT(swizzle > 0.1, "error %g", swizzle);
    only_emulated();
    const double barrier = tile_error<2>();
    EXPECT(barrier > 0.1, "error %g", barrier);
}

// ----------------------------------------------------------------------------------------------------------
// arithmetic

__global__ void function_kernel(float* y, const float* x, int n, int which) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        if (which == 0) { y[i] = ex2(x[i]); }
        if (which == 1) { y[i] = rcp(x[i]); }
        if (which == 2) { y[i] = lg2(x[i]); }
    }
}
static std::vector<float> function_of(const std::vector<float>& x, int which) {
    DeviceArray<float> in(x), out(x.size());
    launch(function_kernel, Grid(1, 128, 0, stream), out.p, in.p, (int)x.size(), which);
    return out.host();
}
KERNEL_TEST("ex2, rcp, lg2: errors and special values") {
    std::vector<float> x(4096), positive(4096);
    for (size_t i = 0; i < x.size(); i++) {
        x[i] = (float)(252.0 * uniform01(1, 2, i) - 126.0);
        positive[i] = (float)std::exp2(i % 4 == 0 ? 0.02 * x[i] / 126.0 : 0.99 * x[i]);
    }
    const std::vector<float> e = function_of(x, 0);
    const std::vector<float> r = function_of(positive, 1);
    const std::vector<float> l = function_of(positive, 2);
    double worst[3] = {};
    for (size_t i = 0; i < x.size(); i++) {
        const double log = std::log2((double)positive[i]);
        worst[0] = std::max(worst[0], std::fabs(e[i] / std::exp2((double)x[i]) - 1) * 0x1p23);
        worst[1] = std::max(worst[1], std::fabs(r[i] * (double)positive[i] - 1) * 0x1p23);
        worst[2] = std::max(worst[2], std::fabs(l[i] - log) / std::max(1.0, std::fabs(log)) * 0x1p23);
    }
    EXPECT(worst[0] <= 3, "ex2 is off by %g ulp", worst[0]);
    EXPECT(worst[1] <= 2, "rcp is off by %g ulp", worst[1]);
    EXPECT(worst[2] <= 3, "lg2 is off by %g times 2^-23", worst[2]);
    INFO("ulp: ex2 %.2f, rcp %.2f, lg2 %.2f", worst[0], worst[1], worst[2]);
    const std::vector<float> special = {0.0f,    -0.0f,   INFINITY,   -INFINITY, 1.0f,  1e-40f,
                                        -1e-40f, -130.0f, 0x1.8p126f, -1.0f,     130.0f};
    const float want[3][11] = {{1, 1, INFINITY, 0, 2, 1, 1, 0, INFINITY, 0.5f, INFINITY},
                               {INFINITY, -INFINITY, 0, -0.0f, 1, INFINITY, -INFINITY, -1 / 130.0f, 0, -1, 1 / 130.0f},
                               {-INFINITY, -INFINITY, INFINITY, NAN, 0, -INFINITY, -INFINITY, NAN, 126.5849625f, NAN,
                                7.022367813f}};
    for (int which = 0; which < 3; which++) {
        const std::vector<float> got = function_of(special, which);
        for (size_t i = 0; i < special.size(); i++) {
            const float w = want[which][i], g = got[i];
            const bool exact = std::isinf(w) || w == 0;
            bool good = std::fabs(g / w - 1) < 1e-6;
            if (exact) { good = g == w && std::signbit(g) == std::signbit(w); }
            if (std::isnan(w)) { good = std::isnan(g); }
            EXPECT(good, "function %d of %g: expected %g, got %g", which, special[i], w, g);
        }
    }
}

__global__ void pack_kernel(uint32_t* packed, float* lo, float* hi, float* converted, const float* x, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        packed[i] = pack_bf16(x[i], -x[i]);
        lo[i] = unpack_lo(packed[i]);
        hi[i] = unpack_hi(packed[i]);
        converted[i] = (float)(bf16)x[i];
    }
}
KERNEL_TEST("pack_bf16, unpack and bf16 itself: the nearest, ties to even") {
    std::vector<float> x = {0.0f,          1.0f,    0x1.01p0f, 0x1.03p0f, 0x1.010002p0f,
                            0x1.00fffep0f, FLT_MAX, FLT_MIN,   1e-40f,    INFINITY};
    for (uint64_t i = 0; i < 4096; i++) {       // any bits, every other one halfway between two bf16
        const uint32_t u = (uint32_t)hash64(3, i), bits = i % 2 == 0 ? u : (u & 0xffff0000u) | 0x8000u;
        float f;
        memcpy(&f, &bits, 4);
        if (std::isfinite(f)) { x.push_back(f); }
    }
    DeviceArray<float> in(x), lo(x.size()), hi(x.size()), direct(x.size());
    DeviceArray<uint32_t> packed(x.size());
    launch(pack_kernel, Grid(1, 64, 0, stream), packed.p, lo.p, hi.p, direct.p, in.p, (int)x.size());
    const std::vector<float> l = lo.host();
    const std::vector<float> h = hi.host();
    const std::vector<float> d = direct.host();
    for (size_t i = 0; i < x.size(); i++) {
        uint32_t u;
        memcpy(&u, &x[i], 4);
        // the two neighbours in magnitude, the upper one as a double: it may be beyond the largest bf16
        const uint32_t below_bits = u & 0xffff0000u, next_bits = below_bits - 0x10000u;
        float below, next;
        memcpy(&below, &below_bits, 4);
        memcpy(&next, &next_bits, 4);
        const int exponent = std::max(std::ilogb(below == 0 ? FLT_MIN : below), -126);
        const double above = below + std::copysign(std::ldexp(1.0, exponent - 7), (double)x[i]);
        const double down = std::fabs(x[i] - (double)below), up = std::fabs(above - x[i]);
        const bool odd = (u >> 16 & 1) != 0;
        double want = down < up || (down == up && !odd) ? (double)below : above;
        if (std::isinf(x[i])) { want = (double)x[i]; }
        if (std::fabs(want) >= 0x1p128) { want = std::copysign(INFINITY, want); }
        EXPECT(l[i] == want && h[i] == -want && d[i] == want, "%a becomes %a, %a and %a, not %a", x[i], l[i], h[i],
               d[i], want);
    }
    // also those that bf16 cuts or rounds away
    const uint32_t nan_bits[4] = {0x7fc00000u, 0x7f800001u, 0xffffffffu, 0xff800001u};
    std::vector<float> nans(4);
    memcpy(nans.data(), nan_bits, sizeof(nan_bits));
    DeviceArray<float> nan_in(nans), nan_lo(4), nan_hi(4), nan_direct(4);
    DeviceArray<uint32_t> nan_packed(4);
    launch(pack_kernel, Grid(1, 64, 0, stream), nan_packed.p, nan_lo.p, nan_hi.p, nan_direct.p, nan_in.p, 4);
    for (const auto* array : {&nan_lo, &nan_hi, &nan_direct}) {
        for (const float nan : array->host()) { EXPECT(std::isnan(nan), "NaN became %g", nan); }
    }
}

// ----------------------------------------------------------------------------------------------------------
// warp and block

__global__ void shuffle_kernel(float* f, int* n) {
    const int lane = threadIdx.x % 32;
    const int i = threadIdx.x;
    f[4 * i] = shuffle_xor((float)i, 5);
    f[4 * i + 1] = shuffle(i + 0.5f, (lane * 7 + 3) % 32);
    f[4 * i + 2] = (float)__shfl_up_sync(~0u, (double)i, 3);
    f[4 * i + 3] = __shfl_down_sync(~0u, (float)i, 3);
    n[2 * i] = __shfl_xor_sync(~0u, -i, 31);
    n[2 * i + 1] = __shfl_sync(~0u, -i, 9) + 1000 * count_lanes(lane % 5 == 2 || i == 64);
    syncwarp();
    // half of a warp has a mask of its own
    const unsigned half = lane < 16 ? 0xffffu : 0xffff0000u;
    if (lane < 16) {
        n[2 * i] += 1000 * __shfl_xor_sync(half, 1, 8);
    } else {
        n[2 * i] += 1000 * __shfl_xor_sync(half, 2, 8);
    }
}
KERNEL_TEST("shuffles: every lane reads the lane that it names") {
    DeviceArray<float> f(4 * 96);
    DeviceArray<int> n(2 * 96);
    launch(shuffle_kernel, Grid(1, 96, 0, stream), f.p, n.p);
    const std::vector<float> F = f.host();
    const std::vector<int> N = n.host();
    for (int i = 0; i < 96; i++) {
        const int lane = i % 32, base = i - lane;
        EXPECT(F[4 * i] == (float)(base + (lane ^ 5)), "thread %d: xor gives %g", i, F[4 * i]);
        EXPECT(F[4 * i + 1] == base + (lane * 7 + 3) % 32 + 0.5f, "thread %d: idx gives %g", i, F[4 * i + 1]);
        EXPECT(F[4 * i + 2] == (float)(lane < 3 ? i : i - 3), "thread %d: up gives %g", i, F[4 * i + 2]);
        EXPECT(F[4 * i + 3] == (float)(lane > 28 ? i : i + 3), "thread %d: down gives %g", i, F[4 * i + 3]);
        EXPECT(N[2 * i] == -(base + (lane ^ 31)) + (lane < 16 ? 1000 : 2000), "thread %d: int xor gives %d", i,
               N[2 * i]);
        EXPECT(N[2 * i + 1] == -(base + 9) + (i < 64 ? 6000 : 7000), "thread %d: int idx and count_lanes give %d", i,
               N[2 * i + 1]);
    }
}

// ----------------------------------------------------------------------------------------------------------
// cp.async

enum class CopyFault { None, NoWait, WrongCount, NoBarrier, RefilledEarly };

// out = in, rows of one 16-byte piece a thread through a ring of two buffers, the next row under way while this one is
// read, by another thread than the one that copied it; pieces from `valid` on are zeros
template <CopyFault F> __global__ void ring_kernel(float* out, const float* in, int rows, int valid) {
    float4* ring = (float4*)dynamic_shared();
    const int n = blockDim.x;
    const int t = threadIdx.x;
    const float4 *from = (const float4*)in + (size_t)blockIdx.x * rows * n;
    float4 *to = (float4*)out + (size_t)blockIdx.x * rows * n;
    auto fetch = [&](int row) {
        if (row < rows) { cp_async_16(ring + row % 2 * n + t, t < valid ? from + row * n + t : nullptr, t < valid); }
        cp_async_commit();
    };
    fetch(0);
    for (int row = 0; row < rows; row++) {
        fetch(row + 1);
        if (F != CopyFault::NoWait) { cp_async_wait<F == CopyFault::WrongCount ? 2 : 1>(); }
        if (F != CopyFault::NoBarrier) { __syncthreads(); }
        to[row * n + t] = ring[row % 2 * n + (n - 1 - t)];
        if (F != CopyFault::RefilledEarly) { __syncthreads(); }
    }
}
template <CopyFault F> static int ring_mismatches() {
    const int blocks = 4;
    const int rows = 5;
    const int n = 64;
    const int valid = 50;
    std::vector<float> x(blocks * rows * n * 4);
    for (size_t i = 0; i < x.size(); i++) { x[i] = (float)i; }
    DeviceArray<float> in(x), out(x.size());
    launch(ring_kernel<F>, Grid(blocks, n, 2 * n * 16, stream), out.p, in.p, rows, valid);
    const std::vector<float> y = out.host();
    int wrong = 0;
    for (size_t i = 0; i < x.size(); i++) {
        const size_t piece = i / 4 % n, source = n - 1 - piece;
        const float want = (int)source < valid ? x[i / (4 * n) * 4 * n + source * 4 + i % 4] : 0.0f;
        wrong += !(y[i] == want);
    }
    return wrong;
}
KERNEL_TEST("cp.async: a ring of two buffers, zeros where not valid") {
    const int wrong = ring_mismatches<CopyFault::None>();
    EXPECT(wrong == 0, "%d floats are wrong", wrong);
}
KERNEL_TEST("planted: cp.async without a wait, with a wait too short, without a barrier, into a buffer that is read") {
    only_emulated();
    const int wrong[] = {ring_mismatches<CopyFault::NoWait>(), ring_mismatches<CopyFault::WrongCount>(),
                         ring_mismatches<CopyFault::NoBarrier>(), ring_mismatches<CopyFault::RefilledEarly>()};
    for (int i = 0; i < 4; i++) { EXPECT(wrong[i] > 0, "fault %d is not seen", i); }
}

// group g of three brings 10 + g; after wait<1> the third is still under way, and what was never committed is so after
// wait<0>
__global__ void groups_kernel(float* out, const float* in) {
    float4* s = (float4*)dynamic_shared();
    for (int g = 0; g < 3; g++) {
        cp_async_16(s + g, in + 4 * g, true);
        cp_async_commit();
    }
    cp_async_16(s + 3, in + 12, true);
    cp_async_wait<1>();
    for (int g = 0; g < 4; g++) { out[g] = s[g].x; }
    cp_async_wait<0>();
    for (int g = 0; g < 4; g++) { out[4 + g] = s[g].w; }
    cp_async_commit();
    cp_async_wait<0>();
    out[8] = s[3].z;
}
KERNEL_TEST("cp.async: wait<N> leaves exactly the N newest groups") {
    only_emulated();
    DeviceArray<float> in(std::vector<float>{10, 10, 10, 10, 11, 11, 11, 11, 12, 12, 12, 12, 13, 13, 13, 13}), out(9);
    // one thread's view: the lanes of a warp do the same
    launch(groups_kernel, Grid(1, 32, 64, stream), out.p, in.p);
    const std::vector<float> y = out.host();
    EXPECT(y[0] == 10 && y[1] == 11, "the two oldest are %g %g", y[0], y[1]);
    EXPECT(std::isnan(y[2]) && std::isnan(y[3]), "the newest is %g, the uncommitted %g", y[2], y[3]);
    EXPECT(y[6] == 12 && std::isnan(y[7]), "after wait<0> the newest is %g, the uncommitted %g", y[6], y[7]);
    EXPECT(y[8] == 13, "committed and waited for: %g", y[8]);
}

// ----------------------------------------------------------------------------------------------------------
// faults of the block: what a kernel may do wrong without any instruction of ptx.cuh

enum class BlockFault { None, NoBarrier, NoWarpBarrier, UnwrittenStatic, UnwrittenDynamic };
template <BlockFault F> __global__ void exchange_kernel(float* out) {
    __shared__ float fixed[128];
    float* s = dynamic_shared();
    const int t = threadIdx.x;
    const int n = blockDim.x;
    const int across = n - 1 - t;
    const int in_warp = t ^ 31;
    if (F != BlockFault::UnwrittenStatic || t != 5) { fixed[t] = 10000.0f + t; }
    if (F != BlockFault::UnwrittenDynamic || t != 5) { s[t] = 20000.0f + t; }
    if (F != BlockFault::NoWarpBarrier) { syncwarp(); }
    out[3 * t] = s[in_warp];
    if (F != BlockFault::NoBarrier) { __syncthreads(); }
    out[3 * t + 1] = fixed[across];
    out[3 * t + 2] = s[across];
}
template <BlockFault F> static int exchange_mismatches(bool only_nan = false) {
    const int n = 128;
    DeviceArray<float> out(3 * n);
    launch(exchange_kernel<F>, Grid(1, n, n * sizeof(float), stream), out.p);
    const std::vector<float> y = out.host();
    int wrong = 0;
    for (int t = 0; t < n; t++) {
        const float want[3] = {20000.0f + (t ^ 31), 10000.0f + (n - 1 - t), 20000.0f + (n - 1 - t)};
        for (int k = 0; k < 3; k++) { wrong += only_nan ? std::isnan(y[3 * t + k]) : !(y[3 * t + k] == want[k]); }
    }
    return wrong;
}
KERNEL_TEST("shared memory, static and dynamic: exchanged through barriers") {
    const int wrong = exchange_mismatches<BlockFault::None>();
    EXPECT(wrong == 0, "%d values are wrong", wrong);
}
KERNEL_TEST("planted: no __syncthreads after writing shared memory, no __syncwarp between lanes") {
    only_emulated();
    const int block = exchange_mismatches<BlockFault::NoBarrier>();
    const int warp = exchange_mismatches<BlockFault::NoWarpBarrier>();
    EXPECT(block > 0 && warp > 0, "%d and %d values are wrong", block, warp);
}
KERNEL_TEST("planted: shared memory that nobody wrote") {
    only_emulated();
    const int fixed = exchange_mismatches<BlockFault::UnwrittenStatic>(true);
    const int dynamic = exchange_mismatches<BlockFault::UnwrittenDynamic>(true);
    EXPECT(fixed == 1, "static: %d values are NaN, 1 should be", fixed);
    EXPECT(dynamic == 2, "dynamic: %d values are NaN, 2 should be", dynamic);
}

enum class Divergence {
    None,
    SomeSkip,
    SomeReturn,
    Loops,
    TwoShuffles,
    TwoBarriers,
    BarrierInABranch,
    EarlyReturn,
    ForeignMask,
    Misaligned,
    NotShared
};
template <Divergence D> __global__ void divergent_kernel(float* out) {
    const int t = threadIdx.x;
    const int lane = t % 32;
    float x = (float)t;
    if (D == Divergence::SomeReturn && t == 40) { return; }
    if (D == Divergence::EarlyReturn && t >= 32) { return; }
    if (D != Divergence::SomeSkip || lane < 20) { x += shuffle_xor(x, 1); }
    for (int k = 0; D == Divergence::Loops && k < 1 + (t == 7); k++) { x += shuffle(x, 0); }
    if (D == Divergence::TwoShuffles) {
        if (lane < 16) { x += shuffle_xor(x, 16); }
        else { x -= shuffle_xor(x, 16); }
    }
    if (D == Divergence::ForeignMask) { x += __shfl_sync(0xffu, x, 0); }
    if (D == Divergence::BarrierInABranch && lane != 3) { __syncthreads(); }
    if (D == Divergence::TwoBarriers) {
        if (t < 32) { __syncthreads(); }
        else { __syncthreads(); }
    }
    uint32_t r[4];
    if (D == Divergence::Misaligned) { ldmatrix_x4(r, (char*)dynamic_shared() + 8); x += (float)r[0]; }
    if (D == Divergence::NotShared) { ldmatrix_x4(r, out); x += (float)r[0]; }
    __syncthreads();
    out[t] = x;
}
template <Divergence D> static std::string divergence_error() {
    DeviceArray<float> out(64);
    return error_of([&] { launch(divergent_kernel<D>, Grid(1, 64, 64, stream), out.p); });
}
static bool says(const std::string& message, std::vector<const char*> words) {
    for (const char* w : words) { if (message.find(w) == std::string::npos) { return false; } }
    return true;
}
KERNEL_TEST("planted: divergence is an Error that says who waits where") {
    only_emulated();
    const struct { const char* what; std::string error; std::vector<const char*> words;
    } cases[] = {
        {"lanes 20-31 skip a shuffle",
         divergence_error<Divergence::SomeSkip>(),
         {"block 0 of 1", "warp 1: lanes 0-19: waiting in __shfl_xor_sync", "lanes 20-31: waiting in __syncthreads"}},
        {"one lane returns",
         divergence_error<Divergence::SomeReturn>(),
         {"warp 0: lanes 0-31: waiting in __syncthreads", "warp 1: lanes 8: returned", "test_ptx.cu"}},
        {"one lane loops once more", divergence_error<Divergence::Loops>(), {"lanes 7: waiting in __shfl_sync"}},
        {"two shuffles in two branches",
         divergence_error<Divergence::TwoShuffles>(),
         {"lanes 0-15: waiting in __shfl_xor_sync", "lanes 16-31: waiting in __shfl_xor_sync"}},
        {"a barrier in a branch",
         divergence_error<Divergence::BarrierInABranch>(),
         {"lanes 3: waiting in __syncthreads"}},
        {"warps at different barriers", divergence_error<Divergence::TwoBarriers>(), {"different __syncthreads"}},
        {"a warp returns before a barrier",
         divergence_error<Divergence::EarlyReturn>(),
         {"warp 0: lanes 0-31: waiting in __syncthreads", "returned: warps 1"}},
        {"a mask without the caller", divergence_error<Divergence::ForeignMask>(), {"mask 0x000000ff"}},
        {"a misaligned row", divergence_error<Divergence::Misaligned>(), {"ldmatrix_x4", "16-byte"}},
        {"a row in global memory", divergence_error<Divergence::NotShared>(), {"ldmatrix_x4", "shared memory"}},
    };
    for (const auto& c : cases) {
        EXPECT(!c.error.empty(), "%s: not seen", c.what);
        EXPECT(says(c.error, c.words), "%s: the message is: %s", c.what, c.error.c_str());
    }
    const std::string good = divergence_error<Divergence::None>();
    EXPECT(good.empty(), "the correct kernel after them: %s", good.c_str());
}

KERNEL_TEST("launch: bad grids, a write past an array") {
    only_emulated();
    for (const Grid& bad : {Grid(1, 48, 0, stream), Grid(1, 2048, 0, stream), Grid(1, 64, 300000, stream)}) {
        const std::string error = error_of([&] { launch(exchange_kernel<BlockFault::None>, bad, (float*)nullptr); });
        EXPECT(!error.empty(), "%d threads, %zu bytes of shared memory: no error", bad.threads, bad.shared_bytes);
    }
    DeviceArray<float> out(3 * 128 - 1);
    launch(exchange_kernel<BlockFault::None>, Grid(1, 128, 512, stream), out.p);
    EXPECT(says(error_of([&] { out.host(); }), {"after an array of 383"}), "the write after the array was not seen");
}

__global__ void overrun_kernel(float* out, int beyond) { out[threadIdx.x] = dynamic_shared()[threadIdx.x + beyond]; }
// true when a child that launches it is ended by AddressSanitizer
static bool dies_of_overrun(int beyond) {
    const pid_t child = fork();
    check(child >= 0, "fork: %s", strerror(errno));
    if (child == 0) {
        if (freopen("/dev/null", "w", stderr) == nullptr) { _exit(3); }
        DeviceArray<float> out(32);
        launch(overrun_kernel, Grid(1, 32, 32 * sizeof(float), stream), out.p, beyond);
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
KERNEL_TEST("planted: a read past dynamic shared memory") {
    only_emulated();
    if (!with_asan) { SKIP("seen by AddressSanitizer only: build with -fsanitize=address"); }
    EXPECT(!dies_of_overrun(0), "the correct kernel dies");
    EXPECT(dies_of_overrun(1), "not seen");
}
