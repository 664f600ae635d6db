// attention_flash.cuh -- attention on the tensor cores: bf16, float32 sums, head sizes 64 and 128, any T, any bias of FlashBias.
//
//   a_ij = scale q_i.k_j + B_ij     out = softmax(a) v     saves lse = log sum_j e^(a_ij)          Dao et al. 2022; attention.md, 3, 6, 8
//
// A block owns 64 queries (16 a warp, so a row lives in the four lanes of a quad) and walks tiles of 64 keys: the diagonal first,
// then leftwards, then (bidirectional) rightwards. Everything is in units of log2; B enters as one FFMA a logit:
//   x_ij = c (s_ij + G_i (S_j - S_ref)) + c rho_i,  rho_i = -G_i (S_i - S_ref),  c = scale log2 e,  G = g / scale,  left of the diagonal,
// and S_ref, the key of the tile nearest to the queries, keeps both terms small where P is not.
#ifndef LLMC_ATTENTION_FLASH_CUH
#define LLMC_ATTENTION_FLASH_CUH

#include "position/alibi.cuh"
#include "position/cable.cuh"
#include "ptx.cuh"

// Linear: B = -m_h |i-j| (alibi)    Distance: -g_i |S_i-S_j| (cable)    LogDistance: -log(1 + (g_i (S_i-S_j))^2) (kcable)
// Toeplitz: table[h][table_zero + j - i] (t5, kerple)
enum class FlashBias { None, Linear, Distance, LogDistance, Toeplitz };

// All pointers are the device's; null where the bias does not use them. Queries and keys are 0 .. T-1 of each sequence.
struct FlashArgs {
    const bf16* qkv;            // (B,stride,OC): q at h*HS, k at C + h*HS, v at 2C + h*HS; OC a multiple of 8
    bf16* out;                  // (B,T,C)
    float* lse;                 // (B*NH,stride), natural logarithm; null: not saved
    int B, T, stride, NH, HS, OC;
    float scale;                // > 0
    const int* kv_len;          // (B) or null: keys >= kv_len[b] are masked; rows without a key: out 0, lse -inf
    const float *S_offset, *g;  // (B*NH,stride)
    const double* S_origin;     // (B*NH,ceil(stride/128))
    const float* table;         // (NH,table_entries)
    int table_zero, table_entries;      // table_zero: the column of i = j; columns outside the table read its nearest end
    const int* first_tile;      // (B*NH,ceil(T/64)) or null: for these 64 queries, tiles of 64 keys below it are skipped
    // backward
    const bf16* dout;           // (B,T,C)
    bf16* dqkv;                 // (B,stride,OC), the q, k, v columns are overwritten
    const float* D;             // (B*NH,stride) sum_d dout out
    float *dS, *dg, *dtable;    // overwritten: dS, dg (B*NH,stride), before the suffix sum; dtable: partial sums
};

// ----------------------------------------------------------------------------------------------------------
// tiles in shared memory: rows of HS bf16, in chunks of 16 bytes; chunk c of row r lies at c ^ (r & 7), so that the eight rows of
// one ldmatrix, all in one column, fall into different banks

constexpr int FLASH_TILE = 64;              // queries of a block, keys of a tile: divides CABLE_CHUNK
constexpr int FLASH_THREADS = 128;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

// the element 8 * chunk of a row
template <int HS> __device__ inline bf16* flash_at(bf16* tile, int row, int chunk) { return tile + row * HS + ((chunk ^ (row & 7)) << 3); }
template <int HS> __device__ inline const bf16* flash_at(const bf16* tile, int row, int chunk) {
    return tile + row * HS + ((chunk ^ (row & 7)) << 3);
}

// Starts the copy of `Rows` rows of HS elements, `stride` elements apart in global memory; rows >= n become zero (n may be <= 0).
// All `Threads` threads of the block call it; the caller commits, waits and synchronizes.
template <int HS, int Rows = FLASH_TILE, int Threads = FLASH_THREADS>
__device__ inline void flash_load_tile(bf16* tile, const bf16* from, int stride, int n) {
    constexpr int CHUNKS = HS / 8, STEP = Threads / CHUNKS;
    static_assert(Threads % CHUNKS == 0 && Rows % STEP == 0, "each thread copies one column of chunks");
    const int chunk = threadIdx.x % CHUNKS, row0 = threadIdx.x / CHUNKS;
    UNROLL
    for (int r = 0; r < Rows; r += STEP) {
        const int row = r + row0;
        const bool valid = row < n;
        cp_async_16(flash_at<HS>(tile, row, chunk), from + (valid ? (size_t)row * stride + chunk * 8 : 0), valid);
    }
}

// Operands of mma_m16n8k16 from such a tile; the second index counts 16 columns. LD: the tile's row length.
// A (16 x 16): rows row0 .. row0+15, columns 16k .. 16k+15
template <int LD> __device__ inline void flash_load_a(uint32_t (&r)[4], const bf16* tile, int row0, int k) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(r, flash_at<LD>(tile, row0 + lane % 16, 2 * k + lane / 16));
}
// A (16 x 16) of the transposed tile: the tile's rows k0 .. k0+15 are A's columns, its columns 16m .. 16m+15 A's rows
template <int LD> __device__ inline void flash_load_a_trans(uint32_t (&r)[4], const bf16* tile, int k0, int m) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4_trans(r, flash_at<LD>(tile, k0 + lane / 16 * 8 + lane % 8, 2 * m + lane / 8 % 2));
}
// B of two mma (k 16 x n 8 each) where the tile's rows are n: rows n0 .. n0+7 give r[0], r[1], rows n0+8 .. n0+15 r[2], r[3];
// columns 16k .. 16k+15 are k. (S = Q K^T: the tile is K.)
template <int LD> __device__ inline void flash_load_b(uint32_t (&r)[4], const bf16* tile, int n0, int k) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(r, flash_at<LD>(tile, n0 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
}
// B of two mma where the tile's rows are k: rows k0 .. k0+15; columns 16n .. 16n+7 give r[0], r[1], 16n+8 .. 16n+15 r[2], r[3].
// (O = P V: the tile is V.)
template <int LD> __device__ inline void flash_load_b_trans(uint32_t (&r)[4], const bf16* tile, int k0, int n) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4_trans(r, flash_at<LD>(tile, k0 + lane % 16, 2 * n + lane / 16));
}

// ----------------------------------------------------------------------------------------------------------
// what a tile of keys brings for the bias: 128 floats in shared memory, one a thread
//   Linear, Distance, LogDistance: [t] S_j - S_ref of key j0 + t (t < 64),  [64], [65]: S_i - S_ref = (S_local of row i - [64]) + [65]
//   Toeplitz: [t] B / scale at j - i = j0 - i0 + t - 63

constexpr int FLASH_SIDE = 128;

// the key of tile n (64 keys) from which S is counted: the nearest to the queries of block m
__device__ inline int flash_reference(int n, int m) { return n < m ? n * FLASH_TILE + FLASH_TILE - 1 : n * FLASH_TILE; }

// S of row i as the tiles want it, and the factor of its distances in units of the score (LogDistance: g itself)
template <FlashBias K> __device__ inline float flash_row_S(const FlashArgs& p, int bh, int i, int i0) {
    if (K == FlashBias::Linear) { return (float)(i - i0); }
    return K == FlashBias::Distance || K == FlashBias::LogDistance ? p.S_offset[(size_t)bh * p.stride + (i < p.T ? i : 0)] : 0.0f;
}
template <FlashBias K> __device__ inline float flash_row_slope(const FlashArgs& p, int bh, int i) {
    if (K == FlashBias::Linear) { return alibi_slope(bh % p.NH, p.NH) / p.scale; }
    if (K != FlashBias::Distance && K != FlashBias::LogDistance) { return 0.0f; }
    return i < p.T ? p.g[(size_t)bh * p.stride + i] / (K == FlashBias::Distance ? p.scale : 1.0f) : 0.0f;
}

// Thread t's value, in two parts that are subtracted when they have arrived: no warp waits for the loads of the next tile.
struct FlashSide { float value, minus; };
template <FlashBias K> __device__ inline FlashSide flash_side(const FlashArgs& p, int bh, int i0, int j0, int reference, int t) {
    if (K == FlashBias::Linear) { return {(float)(t < FLASH_TILE ? j0 + t - reference : t == FLASH_TILE ? reference - i0 : 0), 0.0f}; }
    if (K == FlashBias::Toeplitz) {
        int at = p.table_zero + j0 - i0 + t - (FLASH_TILE - 1);
        at = at < 0 ? 0 : at < p.table_entries ? at : p.table_entries - 1;
        return {p.table[(size_t)(bh % p.NH) * p.table_entries + at] / p.scale, 0.0f};
    }
    if (K == FlashBias::None) { return {0.0f, 0.0f}; }
    const float* S = p.S_offset + (size_t)bh * p.stride;
    if (t < FLASH_TILE) { return {S[j0 + t < p.T ? j0 + t : reference], S[reference]}; }
    if (t == FLASH_TILE) { return {S[reference], 0.0f}; }
    const double* origin = p.S_origin + (size_t)bh * ceil_div(p.stride, CABLE_CHUNK);
    return {t == FLASH_TILE + 1 ? (float)(origin[i0 / CABLE_CHUNK] - origin[j0 / CABLE_CHUNK]) : 0.0f, 0.0f};
}

// ----------------------------------------------------------------------------------------------------------
// forward

// The tiles of block m in the order of its loop. All tiles but the first are free of masks, and on one side of the queries,
// except the end of the keys.
struct FlashWalk {
    int start, left, count;
    __device__ FlashWalk(const FlashArgs& p, bool causal, int bh, int m, int keys) {
        const int last = ceil_div(keys, FLASH_TILE) - 1;
        const int first = p.first_tile == nullptr ? 0 : p.first_tile[(size_t)bh * ceil_div(p.T, FLASH_TILE) + m];
        start = m < last ? m : last;
        left = keys > 0 ? start - (first < start ? first : start) + 1 : 0;
        count = left + (causal || keys <= 0 ? 0 : last - start);
    }
    __device__ int tile(int it) const { return it < left ? start - it : start + it - left + 1; }
};

// keys of sequence b that are not masked
__device__ inline int flash_keys(const FlashArgs& p, int b) {
    const int n = p.kv_len == nullptr ? p.T : p.kv_len[b];
    return n < 0 ? 0 : n < p.T ? n : p.T;
}

// s (16 x 64 of a warp, as mma leaves it) becomes t: the logit over scale, but for rho, which is constant along a row of the tile.
// u: S_i - S_ref. General: on both sides of the diagonal, with masks: columns > row (causal) and >= limit.
template <bool Causal, FlashBias K, bool General>
__device__ inline void flash_bias(float (&s)[8][4], float (&rho)[2], float (&u)[2], const float (&slope)[2], const float (&S)[2],
                                  const float* side, bool right, int row, int limit) {
    constexpr bool LINE = K == FlashBias::Linear || K == FlashBias::Distance;
    const int column = threadIdx.x % 4 * 2;
    float factor[2];
    UNROLL
    for (int r = 0; r < 2; r++) {
        rho[r] = 0.0f;
        u[r] = 0.0f;
        factor[r] = right ? -slope[r] : slope[r];
        if (LINE || K == FlashBias::LogDistance) { u[r] = (S[r] - side[FLASH_TILE]) + side[FLASH_TILE + 1]; }
        if (LINE && !General) { rho[r] = -factor[r] * u[r]; }
    }
    // the lower row, 8 below, meets at column + 8 the diagonal that the upper one meets at column
    const float* diagonal = side + (FLASH_TILE - 1) + column - (threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);
    float before[2] = {0.0f, 0.0f};
    if (K == FlashBias::Toeplitz) { before[0] = diagonal[-8]; before[1] = diagonal[-7]; }
    UNROLL
    for (int n = 0; n < 8; n++) {
        const float2 keys = LINE ? *(const float2*)(side + 8 * n + column) : float2{0.0f, 0.0f};
        UNROLL
        for (int e = 0; e < 2; e++) {
            const int c = 8 * n + column + e;
            const float key = e == 0 ? keys.x : keys.y;
            if (LINE && General) {
                s[n][e] -= slope[0] * fabsf(u[0] - key);
                s[n][2 + e] -= slope[1] * fabsf(u[1] - key);
            } else if (LINE) {
                s[n][e] += factor[0] * key;
                s[n][2 + e] += factor[1] * key;
            } else if (K == FlashBias::Toeplitz) {
                const float at = diagonal[8 * n + e];
                s[n][e] += at;
                s[n][2 + e] += before[e];
                before[e] = at;
            }
            if (General) {
                if (c >= limit || (Causal && c > row)) { s[n][e] = -INFINITY; }
                if (c >= limit || (Causal && c > row + 8)) { s[n][2 + e] = -INFINITY; }
            }
        }
    }
}

// 1 / (1 + a^2) of two keys by one reciprocal; |a| is bounded so that the product of the two stays finite
__device__ inline void flash_log_factors(float& r0, float& r1, float a0, float a1) {
    a0 = fminf(fabsf(a0), 1e9f);
    a1 = fminf(fabsf(a1), 1e9f);
    const float q0 = 1.0f + a0 * a0, q1 = 1.0f + a1 * a1, both = rcp(q0 * q1);
    r0 = both * q1;
    r1 = both * q0;
}

// Raises the reference M of a row where the tile asks for it: only by more than 8 units of log2, so that most tiles leave the
// output alone (p <= 2^8 does no harm); then the sum and the output shrink.
template <int HS> __device__ inline void flash_rescale(float (&o)[HS / 8][4], float (&M)[2], float (&sum)[2], const float (&top)[2]) {
    if (top[0] > M[0] + 8.0f || top[1] > M[1] + 8.0f) {
        UNROLL
        for (int r = 0; r < 2; r++) {
            const float raised = fmaxf(M[r], top[r]), shrink = raised == -INFINITY ? 1.0f : ex2(M[r] - raised);
            M[r] = raised;
            sum[r] *= shrink;
            UNROLL
            for (int n = 0; n < HS / 8; n++) {
                o[n][2 * r] *= shrink;
                o[n][2 * r + 1] *= shrink;
            }
        }
    }
    syncwarp();                             // the branch is a quad's; what follows is the warp's
}

// t becomes p, with the sums of p and the output rescaled where M moved. scale: c of the file's head
template <FlashBias K, int HS>
__device__ inline void flash_softmax(float (&s)[8][4], float (&o)[HS / 8][4], float (&M)[2], float (&sum)[2], const float (&rho)[2],
                                     const float (&u)[2], const float (&slope)[2], const float* side, float scale) {
    float top[2], shift[2];
    UNROLL
    for (int r = 0; r < 2; r++) {
        float t = s[0][2 * r];
        UNROLL
        for (int n = 0; n < 8; n++) { t = fmaxf(t, fmaxf(s[n][2 * r], s[n][2 * r + 1])); }
        t = fmaxf(t, shuffle_xor(t, 1));
        t = fmaxf(t, shuffle_xor(t, 2));
        top[r] = scale * (t + rho[r]);
    }
    flash_rescale<HS>(o, M, sum, top);
    UNROLL
    for (int r = 0; r < 2; r++) {
        shift[r] = scale * rho[r] - (M[r] == -INFINITY ? 0.0f : M[r]);
        UNROLL
        for (int n = 0; n < 8; n++) {
            float &p0 = s[n][2 * r], &p1 = s[n][2 * r + 1];
            p0 = ex2(scale * p0 + shift[r]);
            p1 = ex2(scale * p1 + shift[r]);
            if (K == FlashBias::LogDistance) {
                const float2 keys = *(const float2*)(side + 8 * n + threadIdx.x % 4 * 2);
                float r0, r1;
                flash_log_factors(r0, r1, slope[r] * (u[r] - keys.x), slope[r] * (u[r] - keys.y));
                p0 *= r0;
                p1 *= r1;
            }
            sum[r] += p0 + p1;
        }
    }
}

// The warp's 16 rows of the output, over the sum, through its own rows of Q's tile, so that global memory sees 16-byte stores.
template <int HS>
__device__ inline void flash_store(const FlashArgs& p, bf16* tile, float (&o)[HS / 8][4], const float (&M)[2], float (&sum)[2], int bh, int i0) {
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16, C = p.NH * HS, b = bh / p.NH, h = bh % p.NH;
    UNROLL
    for (int r = 0; r < 2; r++) {
        sum[r] += shuffle_xor(sum[r], 1);
        sum[r] += shuffle_xor(sum[r], 2);
        const float inverse = sum[r] > 0.0f ? 1.0f / sum[r] : 0.0f;
        const int row = row0 + lane / 4 + 8 * r;
        if (p.lse != nullptr && lane % 4 == 0 && i0 + row < p.T) {
            p.lse[(size_t)bh * p.stride + i0 + row] = sum[r] > 0.0f ? M[r] * LN2 + logf(sum[r]) : -INFINITY;
        }
        UNROLL
        for (int n = 0; n < HS / 8; n++) {
            ((uint32_t*)flash_at<HS>(tile, row, n))[lane % 4] = pack_bf16(o[n][2 * r] * inverse, o[n][2 * r + 1] * inverse);
        }
    }
    syncwarp();
    UNROLL
    for (int e = lane; e < 16 * HS / 8; e += 32) {
        const int row = row0 + e / (HS / 8), chunk = e % (HS / 8);
        if (i0 + row < p.T) {
            *(uint4*)(p.out + ((size_t)b * p.T + i0 + row) * C + h * HS + chunk * 8) = *(const uint4*)flash_at<HS>(tile, row, chunk);
        }
    }
}

template <int HS> constexpr size_t flash_forward_shared() { return sizeof(bf16) * 5 * FLASH_TILE * HS + sizeof(float) * 2 * FLASH_SIDE; }

// One block 64 queries of one (batch, head), longest rows first. K, V and the bias's values are fetched one tile ahead.
template <bool Causal, FlashBias K, int HS>
__global__ void __launch_bounds__(FLASH_THREADS, HS == 64 ? 3 : 2) flash_forward_kernel(FlashArgs p) {
    constexpr int TILE = FLASH_TILE;
    bf16 *Q = (bf16*)dynamic_shared(), *KV = Q + TILE * HS;                 // KV: two stages of K, V
    float* sides = (float*)(KV + 4 * TILE * HS);
    const int BNH = p.B * p.NH, bh = blockIdx.x % BNH, b = bh / p.NH, C = p.NH * HS, t = threadIdx.x, lane = t % 32;
    const int m = ceil_div(p.T, TILE) - 1 - (int)(blockIdx.x / BNH), i0 = m * TILE, row0 = t / 32 * 16, row = row0 + lane / 4;
    const int keys = flash_keys(p, b);
    const FlashWalk walk(p, Causal, bh, m, keys);
    const bf16* q = p.qkv + (size_t)b * p.stride * p.OC + bh % p.NH * HS;
    const float scale = p.scale * LOG2E;
    FlashSide next_side = {0.0f, 0.0f};
    auto fetch = [&](int n, int stage) {
        const bf16* k = q + (size_t)n * TILE * p.OC + C;
        flash_load_tile<HS>(KV + 2 * stage * TILE * HS, k, p.OC, keys - n * TILE);
        flash_load_tile<HS>(KV + (2 * stage + 1) * TILE * HS, k + C, p.OC, keys - n * TILE);
        cp_async_commit();
        next_side = flash_side<K>(p, bh, i0, n * TILE, flash_reference(n, m), t);
    };
    float slope[2], S[2], M[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, o[HS / 8][4] = {};
    uint32_t a[HS / 16][4];
    if (walk.count > 0) {
        flash_load_tile<HS>(Q, q + (size_t)i0 * p.OC, p.OC, p.T - i0);
        fetch(walk.tile(0), 0);
    }
    UNROLL
    for (int r = 0; r < 2; r++) {
        slope[r] = flash_row_slope<K>(p, bh, i0 + row + 8 * r);
        S[r] = flash_row_S<K>(p, bh, i0 + row + 8 * r, i0);
    }
    for (int it = 0; it < walk.count; it++) {
        const int n = walk.tile(it), j0 = n * TILE, stage = it % 2;
        const bf16 *Kt = KV + 2 * stage * TILE * HS, *Vt = Kt + TILE * HS;
        float* side = sides + stage * FLASH_SIDE;
        cp_async_wait<0>();
        if (K != FlashBias::None) { side[t] = next_side.value - next_side.minus; }
        __syncthreads();                                    // the tile is there, and nobody reads the other stage any more
        if (it == 0) {
            UNROLL
            for (int k = 0; k < HS / 16; k++) { flash_load_a<HS>(a[k], Q, row0, k); }
        }
        if (it + 1 < walk.count) { fetch(walk.tile(it + 1), 1 - stage); }
        float s[8][4] = {}, rho[2], u[2];
        UNROLL
        for (int k = 0; k < HS / 16; k++) {
            UNROLL
            for (int c = 0; c < 4; c++) {
                uint32_t w[4];
                flash_load_b<HS>(w, Kt, 16 * c, k);
                mma_m16n8k16(s[2 * c], a[k], w[0], w[1]);
                mma_m16n8k16(s[2 * c + 1], a[k], w[2], w[3]);
            }
        }
        if (n == m || keys - j0 < TILE) { flash_bias<Causal, K, true>(s, rho, u, slope, S, side, false, i0 - j0 + row, keys - j0); }
        else { flash_bias<Causal, K, false>(s, rho, u, slope, S, side, n > m, 0, 0); }
        flash_softmax<K, HS>(s, o, M, sum, rho, u, slope, side, scale);
        UNROLL
        for (int k = 0; k < TILE / 16; k++) {               // the accumulators of two neighbouring mma are the A operand of the next
            const uint32_t P[4] = {pack_bf16(s[2 * k][0], s[2 * k][1]), pack_bf16(s[2 * k][2], s[2 * k][3]),
                                   pack_bf16(s[2 * k + 1][0], s[2 * k + 1][1]), pack_bf16(s[2 * k + 1][2], s[2 * k + 1][3])};
            UNROLL
            for (int c = 0; c < HS / 16; c++) {
                uint32_t w[4];
                flash_load_b_trans<HS>(w, Vt, 16 * k, c);
                mma_m16n8k16(o[2 * c], P, w[0], w[1]);
                mma_m16n8k16(o[2 * c + 1], P, w[2], w[3]);
            }
        }
    }
    flash_store<HS>(p, Q, o, M, sum, bh, i0);
}

// false: a head size these kernels do not have, nothing was done
template <bool Causal, FlashBias K> bool flash_forward(const FlashArgs& p, Stream stream) {
    const Grid grid((size_t)p.B * p.NH * ceil_div(p.T, FLASH_TILE), FLASH_THREADS,
                    p.HS == 64 ? flash_forward_shared<64>() : flash_forward_shared<128>(), stream);
    if (p.HS == 64) { launch(flash_forward_kernel<Causal, K, 64>, grid, p); }
    else if (p.HS == 128) { launch(flash_forward_kernel<Causal, K, 128>, grid, p); }
    return p.HS == 64 || p.HS == 128;
}

// ----------------------------------------------------------------------------------------------------------
// tiles that the bias has already zeroed (Linear, Distance). S grows with j, so for j in the tiles 0 .. n
//   x_ij <= c |q_i| max |k_j| - log2 e g_i (S_i - S_end(n)),  which grows with n,
// and the row's maximum is at least the logit of its last key j* = min(i, keys - 1), a key of the first tile of the loop. A tile
// whose bound is tau units of log2 below that adds nothing: tau = 128: ex2 returns +0 for each of its keys, no bit differs;
// tau = 24 + log2 T: what is lost of a row's sum is below 2^-24 of it.

inline float flash_skip_tau(int T) { return 24.0f + log2f((float)T); }

// sum over half a row of x_d y_d, the other half by the neighbouring thread; known to both
__device__ inline float flash_half_dot(const bf16* x, const bf16* y, int HS) {
    float sum = 0.0f;
    for (int d = threadIdx.x % 2 * 8; d < HS; d += 16) {
        const uint4 a = *(const uint4*)(x + d), c = *(const uint4*)(y + d);
        sum += unpack_lo(a.x) * unpack_lo(c.x) + unpack_hi(a.x) * unpack_hi(c.x) + unpack_lo(a.y) * unpack_lo(c.y) + unpack_hi(a.y) * unpack_hi(c.y);
        sum += unpack_lo(a.z) * unpack_lo(c.z) + unpack_hi(a.z) * unpack_hi(c.z) + unpack_lo(a.w) * unpack_lo(c.w) + unpack_hi(a.w) * unpack_hi(c.w);
    }
    return sum + shuffle_xor(sum, 1);
}

// key_norm (B*NH,tiles): max |k_j| of each tile; one block a tile
__global__ void flash_key_norm_kernel(float* key_norm, FlashArgs p) {
    const int tiles = ceil_div(p.T, FLASH_TILE), bh = blockIdx.x / tiles, n = blockIdx.x % tiles, j = n * FLASH_TILE + (int)threadIdx.x / 2;
    const bf16* k = p.qkv + ((size_t)(bh / p.NH) * p.stride + (j < p.T ? j : 0)) * p.OC + (p.NH + bh % p.NH) * p.HS;
    const float norm = sqrtf(flash_half_dot(k, k, p.HS));
    const float largest = block_max(norm < INFINITY ? norm : INFINITY);        // a NaN too: then nothing is skipped
    if (threadIdx.x == 0) { key_norm[blockIdx.x] = largest; }
}

// key_norm becomes the maximum over the tiles 0 .. n; one warp a (batch, head)
__global__ void flash_key_norm_scan_kernel(float* key_norm, int tiles) {
    const int lane = threadIdx.x;
    float before = 0.0f;
    key_norm += (size_t)blockIdx.x * tiles;
    for (int base = 0; base < tiles; base += 32) {
        float x = fmaxf(before, base + lane < tiles ? key_norm[base + lane] : 0.0f);
        for (int o = 1; o < 32; o *= 2) { x = fmaxf(x, shuffle(x, lane >= o ? lane - o : lane)); }
        if (base + lane < tiles) { key_norm[base + lane] = x; }
        before = shuffle(x, 31);
    }
}

// S_i - S_j
template <FlashBias K> __device__ inline float flash_distance(const FlashArgs& p, int bh, int i, int j) {
    if (K == FlashBias::Linear) { return (float)(i - j); }
    const float* S = p.S_offset + (size_t)bh * p.stride;
    const double* origin = p.S_origin + (size_t)bh * ceil_div(p.stride, CABLE_CHUNK);
    return (float)(origin[i / CABLE_CHUNK] - origin[j / CABLE_CHUNK]) + (S[i] - S[j]);
}

// first_tile of 64 queries, by one block: the least over its rows, each found by bisection
template <FlashBias K> __global__ void flash_skip_kernel(int* first_tile, const float* key_norm, FlashArgs p, float tau) {
    static_assert(K == FlashBias::Linear || K == FlashBias::Distance, "the other biases have heavy tails: nothing to skip");
    const int tiles = ceil_div(p.T, FLASH_TILE), bh = blockIdx.x / tiles, m = blockIdx.x % tiles, b = bh / p.NH;
    const int i = m * FLASH_TILE + (int)threadIdx.x / 2, row = i < p.T ? i : 0, keys = flash_keys(p, b);
    const int last = (keys > 0 ? keys : 1) - 1, nearest = row < last ? row : last, C = p.NH * p.HS;
    const bf16* q = p.qkv + (size_t)b * p.stride * p.OC + bh % p.NH * p.HS;
    const bf16 *qi = q + (size_t)row * p.OC, *k = q + (size_t)nearest * p.OC + C;
    const float norm = sqrtf(flash_half_dot(qi, qi, p.HS)), score = flash_half_dot(qi, k, p.HS);
    const float c = p.scale * LOG2E, slope = LOG2E * p.scale * flash_row_slope<K>(p, bh, row);
    const float least = c * score - slope * flash_distance<K>(p, bh, row, nearest) - tau;
    const int start = m < last / FLASH_TILE ? m : last / FLASH_TILE;
    int low = 0, high = i < p.T ? start : 0;                // tiles below `low` are skipped, tiles from `high` on are not
    while (low < high) {
        const int n = (low + high) / 2;
        const float bound = c * norm * key_norm[(size_t)bh * tiles + n] - slope * flash_distance<K>(p, bh, row, n * FLASH_TILE + FLASH_TILE - 1);
        if (bound < least) { low = n + 1; }
        else { high = n; }
    }
    const float first = -block_max(i < p.T ? -(float)low : -INFINITY);
    if (threadIdx.x == 0) { first_tile[blockIdx.x] = (int)first; }
}

// first_tile (B*NH,ceil(T/64)); key_norm: as many floats of scratch
template <FlashBias K> void flash_skip(int* first_tile, float* key_norm, const FlashArgs& p, float tau, Stream stream) {
    const int tiles = ceil_div(p.T, FLASH_TILE);
    const Grid grid((size_t)p.B * p.NH * tiles, FLASH_THREADS, 0, stream);
    launch(flash_key_norm_kernel, grid, key_norm, p);
    launch(flash_key_norm_scan_kernel, Grid((size_t)p.B * p.NH, 32, 0, stream), key_norm, tiles);
    launch(flash_skip_kernel<K>, grid, first_tile, key_norm, p, tau);
}

// the share of (causal) tiles that is computed; first_tile in host memory
inline double flash_live_share(const int* first_tile, int BNH, int T, bool causal) {
    const int tiles = ceil_div(T, FLASH_TILE);
    double live = 0.0, all = 0.0;
    for (int x = 0; x < BNH * tiles; x++) {
        const int visited = causal ? x % tiles + 1 : tiles;
        all += visited;
        live += visited - first_tile[x];
    }
    return all > 0.0 ? live / all : 1.0;
}

#endif
