// attention/flash/forward.cuh -- attention on the tensor cores: bf16, float32 sums, head sizes 64 and 128, any T, any bias of FlashBias.
//
//   a_ij = scale q_i.k_j + B_ij     out = softmax(a) v     saves lse = log sum_j e^(a_ij)          Dao et al. 2022; attention.md, 3, 6, 8
//
// A block owns 64 queries (16 a warp, so a row lives in the four lanes of a quad) and walks tiles of 64 keys: the diagonal first,
// then leftwards, then (bidirectional) rightwards. Everything is in units of log2; B enters as one FFMA a logit:
//   x_ij = c (s_ij + G_i (S_j - S_ref)) + c rho_i,  rho_i = -G_i (S_i - S_ref),  c = scale log2 e,  G = g / scale,  left of the diagonal,
// and S_ref, the key of the tile nearest to the queries, keeps both terms small where P is not.
#ifndef LLMC_ATTENTION_FLASH_FORWARD_CUH
#define LLMC_ATTENTION_FLASH_FORWARD_CUH

#include "skip.cuh"
#include "tiles.cuh"

// The tiles of block m in the order of its loop. All tiles but the first are free of masks, and on one side of the queries,
// except the end of the keys.
struct FlashWalk {
    int start, left, count;
    __device__ FlashWalk(const FlashArgs& p, bool causal, bool skips, int bh, int m, int tokens) {
        const int end = ceil_div(tokens, FLASH_TILE);
        const size_t at = (size_t)bh * ceil_div(p.T, FLASH_TILE) + m;
        const int first = p.span == nullptr ? 0 : p.span[at].first;
        const int last = causal ? m : !skips || p.span == nullptr ? end - 1 : p.span[at].last;
        start = m;
        left = m < end ? m - first + 1 : 0;                 // none: all the queries are padding
        count = left + (m < end ? last - m : 0);
    }
    __device__ int tile(int it) const { return it < left ? start - it : start + it - left + 1; }
};

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
        if (LINE || K == FlashBias::LogDistance) { u[r] = S[r] + side[FLASH_TILE] + side[FLASH_TILE + 1]; }
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
// output alone (p <= 2^8 does no harm); then the sum and the output shrink. Each row by itself: its neighbour may be padding.
template <int HS> __device__ inline void flash_rescale(float (&o)[HS / 8][4], float (&M)[2], float (&sum)[2], const float (&top)[2]) {
    if (top[0] > M[0] + 8.0f || top[1] > M[1] + 8.0f) {
        UNROLL
        for (int r = 0; r < 2; r++) {
            const float raised = top[r] > M[r] + 8.0f ? top[r] : M[r], shrink = raised == -INFINITY ? 1.0f : ex2(M[r] - raised);
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
    const int keys = flash_tokens(p, b);
    const FlashWalk walk(p, Causal, flash_skips(K), bh, m, keys);
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
    UNROLL
    for (int r = 0; r < 2; r++) { sum[r] = i0 + row + 8 * r < keys ? sum[r] : 0.0f; }       // padding: stored as a row without a key
    flash_store<HS>(p, Q, o, M, sum, bh, i0);
}

// false: a head size these kernels do not have, nothing was done
template <bool Causal, FlashBias K> bool flash_forward(const FlashArgs& p, Stream stream) {
    const Grid grid((size_t)p.B * p.NH * ceil_div(p.T, FLASH_TILE), FLASH_THREADS,
                    p.HS == 64 ? flash_forward_shared<64>() : flash_forward_shared<128>(), stream);
    if (p.HS == 64) { launch(flash_forward_kernel<Causal, K, 64>, grid, p); }
    else if (p.HS == 128) { launch(flash_forward_kernel<Causal, K, 128>, grid, p); }
    return flash_head_size(p.HS);
}

#endif
