// attention_flash_backward.cuh -- backward of attention_flash.cuh on tensor cores, bf16 in and out, float32 sums.
//
//   with D_i = sum_d dout_i out_i:  P_ij = e^(a_ij - lse_i)   dl_ij = P_ij (dout_i.v_j - D_i)
//   dv = P^T dout    dk = scale dl^T q    dq = scale dl k    and the bias takes sums of dl:
//     Distance     dS_j += sum_i g_i e_ij dl_ij   dS_i -= g_i sum_j e_ij dl_ij   dg_i = -sum_j dl_ij |S_i-S_j|   e_ij = sgn(i-j), 1 at 0
//     LogDistance  dS_j += 2 sum_i g_i^2 w_ij   dS_i -= 2 g_i^2 sum_j w_ij   dg_i = -2 g_i sum_j w_ij (S_i-S_j)
//                  w_ij = dl_ij (S_i-S_j) / (1 + (g_i (S_i-S_j))^2)
//     Toeplitz     dtable[b,h][table_zero + j-i] = sum of dl_ij along the diagonal
// Two kernels, each recomputing P and dl: one owns 64 keys and meets the queries (dk, dv, the key part of dS), one owns 64
// queries and meets the keys (dq, dg, the query part of dS). Every output has one writer and one order of summation: the
// same input gives the same bits. Seven products instead of five pay for it. dl never leaves the registers: the tile's rows
// are the owned ones in both kernels, so a product's result is the next one's left operand. Both parts of dS sum the same
// float32 dl: from an output rounded to bf16 the row sums are not 0, and dropping them ruins the suffix sum of dS.
#ifndef LLMC_ATTENTION_FLASH_BACKWARD_CUH
#define LLMC_ATTENTION_FLASH_BACKWARD_CUH

#include <type_traits>

#include "attention_flash.cuh"

// A query as its logits need it, logits in units of log 2. A row without a key, and the rows behind T, have lse2 = +inf: P = 0.
struct alignas(16) FlashQuery {
    float lse2, D;
    float g;            // log2(e) g: Linear, Distance.  g: LogDistance
    float S;            // S_offset; Linear: the position
};

struct alignas(16) FlashChunk { uint32_t x[4]; };

// Two logits of one owned row, neighbours in the streamed direction.
template <FlashBias K> struct FlashPair {
    float p[2], dl[2];
    float w[2];         // S_i - S_j
    float r[2];         // LogDistance: 1 / (1 + (g w)^2)

    // bias: S_j of the two keys, from the origin that S_i has, or the two entries of the table
    __device__ FlashPair(const float* s, const float* dp, const FlashQuery& q0, const FlashQuery& q1, float bias0, float bias1,
                         float scale2, bool masked0, bool masked1) {
        constexpr bool distance = K != FlashBias::None && K != FlashBias::Toeplitz;
        float x[2] = {scale2 * s[0] - q0.lse2, scale2 * s[1] - q1.lse2};
        if (distance) {
            w[0] = q0.S - bias0;
            w[1] = q1.S - bias1;
        }
        if (K == FlashBias::Linear || K == FlashBias::Distance) {
            x[0] -= q0.g * fabsf(w[0]);
            x[1] -= q1.g * fabsf(w[1]);
        }
        if (K == FlashBias::Toeplitz) {
            x[0] += LOG2E * bias0;
            x[1] += LOG2E * bias1;
        }
        p[0] = masked0 ? 0.0f : ex2(x[0]);
        p[1] = masked1 ? 0.0f : ex2(x[1]);
        if (K == FlashBias::LogDistance) {                  // one reciprocal for two; 1e9: their product stays finite
            const float a0 = fminf(q0.g * fabsf(w[0]), 1e9f), a1 = fminf(q1.g * fabsf(w[1]), 1e9f);
            const float b0 = 1.0f + a0 * a0, b1 = 1.0f + a1 * a1, inverse = rcp(b0 * b1);
            r[0] = inverse * b1;
            r[1] = inverse * b0;
            p[0] *= r[0];
            p[1] *= r[1];
        }
        dl[0] = p[0] * (dp[0] - q0.D);
        dl[1] = p[1] * (dp[1] - q1.D);
    }
};

// The fragments of 16 owned rows as left operand: kept in registers, or read from shared memory where those run out.
template <int HS, bool Resident> struct FlashOwned {
    uint32_t fragment[Resident ? HS / 16 : 1][4];
    const bf16* tile;
    int row0;
    __device__ FlashOwned(const bf16* tile, int row0) : tile(tile), row0(row0) {
        UNROLL
        for (int k = 0; k < HS / 16 && Resident; k++) { flash_load_a<HS>(fragment[k], tile, row0, k); }
    }
};

// sum (16, 8N) = owned rows times the rows row0 .. of a tile, transposed
template <int HS, bool Resident, int N>
__device__ inline void flash_scores(float (&sum)[N][4], FlashOwned<HS, Resident>& own, const bf16* tile, int row0) {
    UNROLL
    for (int n = 0; n < N; n++) { sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.0f; }
    UNROLL
    for (int k = 0; k < HS / 16; k++) {
        uint32_t b[4];
        if (!Resident) { flash_load_a<HS>(own.fragment[0], own.tile, own.row0, k); }
        UNROLL
        for (int n = 0; n < N; n += 2) {
            flash_load_b<HS>(b, tile, row0 + n * 8, k);
            mma_m16n8k16(sum[n], own.fragment[Resident ? k : 0], b[0], b[1]);
            mma_m16n8k16(sum[n + 1], own.fragment[Resident ? k : 0], b[2], b[3]);
        }
    }
}

// sum (16, HS) += weights (16, 16), in two neighbouring pieces of what flash_scores gives, times 16 rows of a tile
template <int HS>
__device__ inline void flash_accumulate(float (&sum)[HS / 8][4], const float (&left)[4], const float (&right)[4], const bf16* tile,
                                        int row0) {
    const uint32_t a[4] = {pack_bf16(left[0], left[1]), pack_bf16(left[2], left[3]), pack_bf16(right[0], right[1]),
                           pack_bf16(right[2], right[3])};
    UNROLL
    for (int n = 0; n < HS / 16; n++) {
        uint32_t b[4];
        flash_load_b_trans<HS>(b, tile, row0, n);
        mma_m16n8k16(sum[2 * n], a, b[0], b[1]);
        mma_m16n8k16(sum[2 * n + 1], a, b[2], b[3]);
    }
}

// to (64 rows, HS) = factor * sum, by way of this warp's own 16 rows of a tile that nobody else reads any more
template <int HS>
__device__ inline void flash_store(bf16* to, int stride, int rows, bf16* tile, const float (&sum)[HS / 8][4], float factor) {
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16;
    syncwarp();
    UNROLL
    for (int n = 0; n < HS / 8; n++) {
        *(uint32_t*)(flash_at<HS>(tile, row0 + lane / 4, n) + lane % 4 * 2) = pack_bf16(factor * sum[n][0], factor * sum[n][1]);
        *(uint32_t*)(flash_at<HS>(tile, row0 + lane / 4 + 8, n) + lane % 4 * 2) = pack_bf16(factor * sum[n][2], factor * sum[n][3]);
    }
    syncwarp();
    for (int e = lane; e < 16 * HS / 8; e += 32) {
        const int row = row0 + e / (HS / 8), chunk = e % (HS / 8);
        if (row < rows) { *(FlashChunk*)(to + (size_t)row * stride + chunk * 8) = *(const FlashChunk*)flash_at<HS>(tile, row, chunk); }
    }
}

__device__ inline float quad_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

// What both kernels must agree on
struct FlashBlock {
    int bh, b, h, keys, tiles;      // keys: of this sequence, kv_len applied;  tiles: of 64 rows in T
    __device__ FlashBlock(const FlashArgs& p) : bh(blockIdx.x % (p.B * p.NH)) {
        b = bh / p.NH;
        h = bh % p.NH;
        keys = p.kv_len == nullptr ? p.T : p.kv_len[b] < p.T ? p.kv_len[b] : p.T;
        tiles = ceil_div(p.T, FLASH_TILE);
    }
    // row t of q (0), k (1), v (2); of dout; of what flash_backward_prepare_kernel wrote
    template <int HS> __device__ const bf16* qkv(const FlashArgs& p, int t, int which) const {
        return p.qkv + ((size_t)b * p.stride + t) * p.OC + (which * p.NH + h) * HS;
    }
    template <int HS> __device__ const bf16* dout(const FlashArgs& p, int t) const {
        return p.dout + (((size_t)b * p.T + t) * p.NH + h) * HS;
    }
    __device__ const FlashQuery* query(const FlashQuery* all, int t) const { return all + (size_t)bh * tiles * FLASH_TILE + t; }
    __device__ int first_key_tile(const FlashArgs& p, int m) const {
        return p.first_tile == nullptr ? 0 : p.first_tile[(size_t)bh * tiles + m];
    }
    template <bool Causal> __device__ int end_key_tile(int m) const {
        const int end = ceil_div(keys, FLASH_TILE);
        return Causal && m + 1 < end ? m + 1 : end;
    }
};

// S origin of the chunk of query tile m minus that of key tile n: exact at any T
template <FlashBias K> __device__ inline float flash_between(const FlashArgs& p, int bh, int m, int n) {
    if (K != FlashBias::Distance && K != FlashBias::LogDistance) { return 0.0f; }
    const double* origin = p.S_origin + (size_t)bh * ceil_div(p.stride, CABLE_CHUNK);
    return (float)(origin[m * FLASH_TILE / CABLE_CHUNK] - origin[n * FLASH_TILE / CABLE_CHUNK]);
}

__device__ inline float flash_table(const FlashArgs& p, int h, int i, int j) {
    const int n = p.table_zero + j - i, last = p.table_entries - 1;
    return p.table[(size_t)h * p.table_entries + (n < 0 ? 0 : n < last ? n : last)];
}

// ----------------------------------------------------------------------------------------------------------
// D, and what else the two kernels want of a query, gathered (B*NH, tiles*64), rows behind T padded

template <FlashBias K, int HS> __global__ void flash_backward_prepare_kernel(FlashQuery* query, FlashArgs p) {
    constexpr int LANES_ROW = HS / 8;                   // 16 bytes a thread
    const int rows = round_up(p.T, FLASH_TILE), C = p.NH * HS;
    const size_t row = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES_ROW;
    const size_t bt = row / p.NH, h = row % p.NH, b = bt / rows, t = bt % rows, bh = b * p.NH + h;
    float D = 0.0f;
    if (b < (size_t)p.B && t < (size_t)p.T) {
        const size_t at = (b * p.T + t) * C + h * HS + threadIdx.x % LANES_ROW * 8;
        const FlashChunk o = *(const FlashChunk*)(p.out + at), dout = *(const FlashChunk*)(p.dout + at);
        UNROLL
        for (int k = 0; k < 4; k++) { D += unpack_lo(o.x[k]) * unpack_lo(dout.x[k]) + unpack_hi(o.x[k]) * unpack_hi(dout.x[k]); }
    }
    UNROLL
    for (int o = LANES_ROW / 2; o > 0; o /= 2) { D += shuffle_xor(D, o); }
    if (b >= (size_t)p.B || threadIdx.x % LANES_ROW != 0) { return; }
    FlashQuery q = {INFINITY, 0.0f, 0.0f, 0.0f};
    if (t < (size_t)p.T) {
        const size_t at = bh * p.stride + t;
        const float lse = p.lse[at];
        if (lse != -INFINITY) {
            q.lse2 = LOG2E * lse;
            q.D = D;
        }
        if (K == FlashBias::Linear) {
            q.g = LOG2E * alibi_slope((int)h, p.NH);
            q.S = (float)t;
        }
        if (K == FlashBias::Distance || K == FlashBias::LogDistance) {
            q.g = K == FlashBias::Distance ? LOG2E * p.g[at] : p.g[at];
            q.S = p.S_offset[at];
        }
    }
    query[bh * rows + t] = q;
}

// ----------------------------------------------------------------------------------------------------------
// the two kernels. Shared memory: two owned tiles, two stages of two streamed tiles, two stages of FlashQuery: 50 KB (HS 64), 98 KB (128)

constexpr size_t flash_backward_shared(int HS) { return sizeof(bf16) * 6 * FLASH_TILE * HS + sizeof(FlashQuery) * 2 * FLASH_TILE; }
constexpr int FLASH_CHUNK = 16;                         // streamed rows whose logits are in registers at a time
// Blocks on one multiprocessor. Three leave 168 registers a thread: what sm_90 needs; older targets spill there.
constexpr int flash_backward_blocks(int HS) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    return HS > 0 ? 2 : 0;
#else
    return HS == 64 ? 3 : 2;
#endif
}

// A block owns 64 keys: dk, dv, and dS = the key part of its sum.
template <bool Causal, FlashBias K, int HS>
__global__ void __launch_bounds__(FLASH_THREADS, flash_backward_blocks(HS))
flash_backward_dkdv_kernel(FlashArgs p, const FlashQuery* query) {
    constexpr int TILE = FLASH_TILE, CHUNK = FLASH_CHUNK;
    constexpr bool cable = K == FlashBias::Distance || K == FlashBias::LogDistance;
    const FlashBlock at(p);
    const int n = blockIdx.x / (p.B * p.NH), j0 = n * TILE, C = p.NH * HS, lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16;
    bf16 *Kt = (bf16*)dynamic_shared(), *Vt = Kt + TILE * HS, *streamed = Vt + TILE * HS;
    FlashQuery* streamed_query = (FlashQuery*)(streamed + 4 * TILE * HS);
    const auto visited = [&](int m) {
        while (m < at.tiles && at.first_key_tile(p, m) > n) { m++; }
        return m;
    };
    const auto load = [&](int m, int stage) {           // addresses anew each time: registers are short
        const int i0 = m * TILE;
        bf16* Q = streamed + stage * 2 * TILE * HS;
        flash_load_tile<HS>(Q, at.template qkv<HS>(p, i0, 0), p.OC, p.T - i0);
        flash_load_tile<HS>(Q + TILE * HS, at.template dout<HS>(p, i0), C, p.T - i0);
        if (threadIdx.x < TILE) { cp_async_16(streamed_query + stage * TILE + threadIdx.x, at.query(query, i0 + threadIdx.x), true); }
        cp_async_commit();
    };
    flash_load_tile<HS>(Kt, at.template qkv<HS>(p, j0, 1), p.OC, p.T - j0);
    flash_load_tile<HS>(Vt, at.template qkv<HS>(p, j0, 2), p.OC, p.T - j0);
    int m = j0 < at.keys ? visited(Causal ? n : 0) : at.tiles;
    if (m < at.tiles) { load(m, 0); }
    float Sj[2] = {0.0f, 0.0f}, column[2] = {0.0f, 0.0f}, dK[HS / 8][4] = {}, dV[HS / 8][4] = {};
    UNROLL
    for (int half = 0; half < 2; half++) {
        const int j = j0 + row0 + lane / 4 + 8 * half;
        if (K == FlashBias::Linear) { Sj[half] = (float)j; }
        if (cable) { Sj[half] = p.S_offset[(size_t)at.bh * p.stride + (j < p.T ? j : p.T - 1)]; }
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    FlashOwned<HS, HS == 64> keys(Kt, row0);
    FlashOwned<HS, HS == 64 && K != FlashBias::LogDistance> values(Vt, row0);

    const auto step = [&](auto masked, const bf16* Q, const FlashQuery* tile_query) {
        constexpr bool edge = decltype(masked)::value;
        const bf16* dO = Q + TILE * HS;
        const float between = flash_between<K>(p, at.bh, m, n), sign = Causal || m >= n ? 1.0f : -1.0f;
        const float S[2] = {Sj[0] - between, Sj[1] - between};
        float sum[2] = {0.0f, 0.0f};
        for (int c0 = 0; c0 < TILE; c0 += CHUNK) {
            float P[CHUNK / 8][4], dl[CHUNK / 8][4];
            flash_scores<HS>(P, keys, Q, c0);
            flash_scores<HS>(dl, values, dO, c0);
            UNROLL
            for (int e = 0; e < CHUNK / 8 * 2; e++) {
                const int half = e % 2, c = c0 + e / 2 * 8 + lane % 4 * 2, i = m * TILE + c, j = j0 + row0 + lane / 4 + 8 * half;
                const FlashQuery q0 = tile_query[c], q1 = tile_query[c + 1];
                const float bias0 = K == FlashBias::Toeplitz ? flash_table(p, at.h, i, j) : S[half];
                const float bias1 = K == FlashBias::Toeplitz ? flash_table(p, at.h, i + 1, j) : S[half];
                const bool out = edge && j >= at.keys;
                float *s = &P[e / 2][2 * half], *dp = &dl[e / 2][2 * half];
                const FlashPair<K> x(s, dp, q0, q1, bias0, bias1, LOG2E * p.scale, out || (edge && Causal && j > i),
                                     out || (edge && Causal && j > i + 1));
                UNROLL
                for (int k = 0; k < 2; k++) {
                    const float g = k == 0 ? q0.g : q1.g;
                    if (K == FlashBias::Distance) { sum[half] += g * (edge && !Causal && m == n && j > i + k ? -x.dl[k] : x.dl[k]); }
                    if (K == FlashBias::LogDistance) { sum[half] += g * g * (x.dl[k] * x.r[k] * x.w[k]); }
                    s[k] = x.p[k];
                    dp[k] = x.dl[k];
                }
            }
            UNROLL
            for (int k = 0; k < CHUNK / 8; k += 2) {
                flash_accumulate<HS>(dV, P[k], P[k + 1], dO, c0 + k * 8);
                flash_accumulate<HS>(dK, dl[k], dl[k + 1], Q, c0 + k * 8);
            }
        }
        column[0] += K == FlashBias::Distance ? sign * sum[0] : sum[0];
        column[1] += K == FlashBias::Distance ? sign * sum[1] : sum[1];
    };
    for (int stage = 0; m < at.tiles; stage ^= 1) {
        const int next = visited(m + 1);
        cp_async_wait<0>();
        __syncthreads();                                // this stage has arrived, and the other is read no more
        if (next < at.tiles) { load(next, stage ^ 1); }
        const bf16* Q = streamed + stage * 2 * TILE * HS;
        if (m == n || j0 + TILE > at.keys) { step(std::true_type(), Q, streamed_query + stage * TILE); }
        else { step(std::false_type(), Q, streamed_query + stage * TILE); }
        m = next;
    }
    bf16* dk = p.dqkv + ((size_t)at.b * p.stride + j0) * p.OC + C + at.h * HS;
    flash_store<HS>(dk, p.OC, p.T - j0, Kt, dK, p.scale);
    flash_store<HS>(dk + C, p.OC, p.T - j0, Vt, dV, 1.0f);
    UNROLL
    for (int half = 0; half < 2 && cable; half++) {
        const int j = j0 + row0 + lane / 4 + 8 * half;
        const float sum = quad_sum(column[half]);
        if (lane % 4 == 0 && j < p.T) { p.dS[(size_t)at.bh * p.stride + j] = (K == FlashBias::Distance ? LN2 : 2.0f) * sum; }
    }
}

// Toeplitz: the diagonals of a 64 x 64 tile of dl, a thread each. Diagonals 64.. go on in the next tile to the right as 0..
struct FlashDiagonals {
    float* dl;                      // (64,64), column c at c ^ 8 (r & 7)
    float* carry;                   // (2,64)
    float* slab;                    // ((tiles+1)*64): diagonal k of tile n, j - i = 64 (n - m) + k - 63, at 64 n + k
    __device__ void put(int r, int c, float x0, float x1) const {
        float* to = dl + r * FLASH_TILE + (c ^ (r & 7) * 8);
        to[0] = x0;
        to[1] = x1;
    }
    __device__ void add(int n, int stage, bool first) const {
        const int k = threadIdx.x, r0 = k < 63 ? 63 - k : 0, r1 = k < 63 ? 64 : 127 - k;
        float sum = 0.0f;
        for (int r = r0; r < r1; r++) { sum += dl[r * FLASH_TILE + ((r + k - 63) ^ (r & 7) * 8)]; }
        if (k >= 64) { carry[stage * 64 + k - 64] = sum; }      // k = 127 is no diagonal: 0
        else { slab[n * 64 + k] = first ? sum : sum + carry[(stage ^ 1) * 64 + k]; }
    }
};

// A block owns 64 queries: dq, dg, the query part of dS (added to the key part), or its part of dtable.
template <bool Causal, FlashBias K, int HS>
__global__ void __launch_bounds__(FLASH_THREADS, flash_backward_blocks(HS))
flash_backward_dq_kernel(FlashArgs p, const FlashQuery* query, float* slab) {
    constexpr int TILE = FLASH_TILE, CHUNK = FLASH_CHUNK;
    constexpr bool cable = K == FlashBias::Distance || K == FlashBias::LogDistance;
    const FlashBlock at(p);
    const int m = at.tiles - 1 - blockIdx.x / (p.B * p.NH), i0 = m * TILE, C = p.NH * HS;
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16;
    bf16 *Qt = (bf16*)dynamic_shared(), *dOt = Qt + TILE * HS, *streamed = dOt + TILE * HS;
    FlashQuery* streamed_key = (FlashQuery*)(streamed + 4 * TILE * HS);
    const FlashDiagonals diagonals = {(float*)Qt, (float*)streamed_key,
                                      slab + ((size_t)at.bh * at.tiles + m) * (at.tiles + 1) * TILE};
    const auto load = [&](int n, int stage) {
        const int j0 = n * TILE;
        bf16* Kt = streamed + stage * 2 * TILE * HS;
        flash_load_tile<HS>(Kt, at.template qkv<HS>(p, j0, 1), p.OC, p.T - j0);
        flash_load_tile<HS>(Kt + TILE * HS, at.template qkv<HS>(p, j0, 2), p.OC, p.T - j0);
        if (K != FlashBias::None && K != FlashBias::Toeplitz && threadIdx.x < TILE) {
            cp_async_16(streamed_key + stage * TILE + threadIdx.x, at.query(query, j0 + threadIdx.x), true);
        }
        cp_async_commit();
    };
    const int begin = at.first_key_tile(p, m), end = at.template end_key_tile<Causal>(m);
    flash_load_tile<HS>(Qt, at.template qkv<HS>(p, i0, 0), p.OC, p.T - i0);
    flash_load_tile<HS>(dOt, at.template dout<HS>(p, i0), C, p.T - i0);
    if (begin < end) { load(begin, 0); }
    const FlashQuery own[2] = {*at.query(query, i0 + row0 + lane / 4), *at.query(query, i0 + row0 + lane / 4 + 8)};
    float dQ[HS / 8][4] = {}, row[2] = {0.0f, 0.0f}, dgi[2] = {0.0f, 0.0f};
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    FlashOwned<HS, true> queries(Qt, row0), douts(dOt, row0);

    const auto step = [&](auto masked, int n, const bf16* Kt, const FlashQuery* key) {
        constexpr bool edge = decltype(masked)::value;
        const float between = flash_between<K>(p, at.bh, m, n), sign = Causal || m >= n ? 1.0f : -1.0f;
        FlashQuery row_query[2] = {own[0], own[1]};
        row_query[0].S += between;
        row_query[1].S += between;
        float sum[2] = {0.0f, 0.0f};
        for (int c0 = 0; c0 < TILE; c0 += CHUNK) {
            float P[CHUNK / 8][4], dl[CHUNK / 8][4];
            flash_scores<HS>(P, queries, Kt, c0);
            flash_scores<HS>(dl, douts, Kt + TILE * HS, c0);
            UNROLL
            for (int e = 0; e < CHUNK / 8 * 2; e++) {
                const int half = e % 2, c = c0 + e / 2 * 8 + lane % 4 * 2, r = row0 + lane / 4 + 8 * half, i = i0 + r, j = n * TILE + c;
                float bias0 = 0.0f, bias1 = 0.0f;
                if (K == FlashBias::Toeplitz) {
                    bias0 = flash_table(p, at.h, i, j);
                    bias1 = flash_table(p, at.h, i, j + 1);
                } else if (K != FlashBias::None) {
                    bias0 = key[c].S;
                    bias1 = key[c + 1].S;
                }
                const bool out0 = edge && (j >= at.keys || (Causal && j > i)), out1 = edge && (j + 1 >= at.keys || (Causal && j + 1 > i));
                float* dp = &dl[e / 2][2 * half];
                const FlashPair<K> x(&P[e / 2][2 * half], dp, row_query[half], row_query[half], bias0, bias1, LOG2E * p.scale, out0, out1);
                UNROLL
                for (int k = 0; k < 2; k++) {
                    if (K == FlashBias::Distance) {
                        sum[half] += edge && !Causal && m == n && j + k > i ? -x.dl[k] : x.dl[k];
                        dgi[half] -= x.dl[k] * fabsf(x.w[k]);
                    }
                    if (K == FlashBias::LogDistance) {
                        const float w = x.dl[k] * x.r[k] * x.w[k];
                        sum[half] += w;
                        dgi[half] -= w * x.w[k];
                    }
                    dp[k] = x.dl[k];
                }
                if (K == FlashBias::Toeplitz) { diagonals.put(r, c, x.dl[0], x.dl[1]); }
            }
            UNROLL
            for (int k = 0; k < CHUNK / 8; k += 2) { flash_accumulate<HS>(dQ, dl[k], dl[k + 1], Kt, c0 + k * 8); }
        }
        row[0] += K == FlashBias::Distance ? sign * sum[0] : sum[0];
        row[1] += K == FlashBias::Distance ? sign * sum[1] : sum[1];
    };
    int stage = 0;
    for (int n = begin; n < end; n++, stage ^= 1) {
        cp_async_wait<0>();
        __syncthreads();                                // this stage has arrived, and the other is read no more; nor are dl and Qt, dOt
        if (n + 1 < end) { load(n + 1, stage ^ 1); }
        const bf16* Kt = streamed + stage * 2 * TILE * HS;
        if (n == m || (n + 1) * TILE > at.keys) { step(std::true_type(), n, Kt, streamed_key + stage * TILE); }
        else { step(std::false_type(), n, Kt, streamed_key + stage * TILE); }
        if (K == FlashBias::Toeplitz) {
            __syncthreads();
            diagonals.add(n, stage, n == begin);
        }
    }
    if (K == FlashBias::Toeplitz && begin < end) {
        __syncthreads();
        if (threadIdx.x < 63) { diagonals.slab[end * TILE + threadIdx.x] = diagonals.carry[(stage ^ 1) * 64 + threadIdx.x]; }
    }
    flash_store<HS>(p.dqkv + ((size_t)at.b * p.stride + i0) * p.OC + at.h * HS, p.OC, p.T - i0, Qt, dQ, p.scale);
    UNROLL
    for (int half = 0; half < 2 && cable; half++) {
        const int i = i0 + row0 + lane / 4 + 8 * half;
        const float g = own[half].g, sum = quad_sum(row[half]), moment = quad_sum(dgi[half]);
        if (lane % 4 != 0 || i >= p.T) { continue; }
        p.dS[(size_t)at.bh * p.stride + i] -= K == FlashBias::Distance ? LN2 * (g * sum) : 2.0f * (g * g * sum);
        p.dg[(size_t)at.bh * p.stride + i] = K == FlashBias::Distance ? moment : 2.0f * g * moment;
    }
}

// Toeplitz: dtable[b,h] is the sum of the query tiles' slabs, in order; columns that no distance reaches become 0.
template <bool Causal> __global__ void flash_backward_table_kernel(FlashArgs p, const float* slab) {
    const FlashBlock at(p);
    const int column = blockIdx.x / (p.B * p.NH) * blockDim.x + threadIdx.x;
    if (column >= p.table_entries) { return; }
    float sum = 0.0f;
    for (int m = 0; m < at.tiles; m++) {
        const int x = column - p.table_zero + m * FLASH_TILE + 63;
        const int begin = at.first_key_tile(p, m), end = at.template end_key_tile<Causal>(m);
        const bool written = begin < end && x >= begin * FLASH_TILE && x < end * FLASH_TILE + 63;
        if (written) { sum += slab[((size_t)at.bh * at.tiles + m) * (at.tiles + 1) * FLASH_TILE + x]; }
    }
    p.dtable[(size_t)at.bh * p.table_entries + column] = sum;
}

// ----------------------------------------------------------------------------------------------------------
// launchers

// floats of scratch, 16-byte aligned, that flash_backward wants
inline size_t flash_backward_scratch(FlashBias K, int B, int T, int NH) {
    const size_t tiles = (size_t)ceil_div(T, FLASH_TILE), BNH = (size_t)B * NH;
    return BNH * tiles * FLASH_TILE * 4 + (K == FlashBias::Toeplitz ? BNH * tiles * (tiles + 1) * FLASH_TILE : 0);
}

template <bool Causal, FlashBias K, int HS> void flash_backward_of(const FlashArgs& p, float* scratch, Stream stream) {
    const size_t BNH = (size_t)p.B * p.NH, tiles = (size_t)ceil_div(p.T, FLASH_TILE);
    FlashQuery* query = (FlashQuery*)scratch;
    float* slab = scratch + BNH * tiles * FLASH_TILE * 4;
    const size_t prepare_blocks = BNH * tiles * FLASH_TILE * (HS / 8) / FLASH_THREADS;
    launch(flash_backward_prepare_kernel<K, HS>, Grid(prepare_blocks, FLASH_THREADS, 0, stream), query, p);
    launch(flash_backward_dkdv_kernel<Causal, K, HS>, Grid(BNH * tiles, FLASH_THREADS, flash_backward_shared(HS), stream), p, query);
    launch(flash_backward_dq_kernel<Causal, K, HS>, Grid(BNH * tiles, FLASH_THREADS, flash_backward_shared(HS), stream), p, query, slab);
    if (K == FlashBias::Toeplitz) {
        const size_t blocks = (size_t)ceil_div(p.table_entries, FLASH_THREADS);
        launch(flash_backward_table_kernel<Causal>, Grid(BNH * blocks, FLASH_THREADS, 0, stream), p, slab);
    }
}

// Overwrites the q, k and v columns of dqkv; dS and dg (B*NH,stride) at 0 .. T-1, as CableBias::backward leaves them, before the
// suffix sum; dtable (B*NH,table_entries), as ToeplitzBias::backward leaves it.
// false: no kernel for this head size.
template <bool Causal, FlashBias K> bool flash_backward(const FlashArgs& p, float* scratch, Stream stream) {
    if (K == FlashBias::Toeplitz) {
        check(p.table_zero >= p.T - 1 && p.table_entries - p.table_zero >= (Causal ? 1 : p.T), "flash_backward: a table of %d columns, "
              "i = j at %d, does not reach every distance below T = %d", p.table_entries, p.table_zero, p.T);
    }
    if (p.HS == 64) { flash_backward_of<Causal, K, 64>(p, scratch, stream); }
    else if (p.HS == 128) { flash_backward_of<Causal, K, 128>(p, scratch, stream); }
    else { return false; }
    return true;
}

#endif
