// attention/flash/pairs.cuh -- what both kernels of attention_flash_backward.cuh are made of: a query as its logits need it, two
// logits with their gradients, the products of owned rows and streamed tiles; and the kernels before and after: queries gathered,
// slabs of Toeplitz's table summed.
#ifndef LLMC_ATTENTION_FLASH_PAIRS_CUH
#define LLMC_ATTENTION_FLASH_PAIRS_CUH

#include "forward.cuh"

// A query as its logits need it, logits in units of log 2. Padding, and the rows behind T, have lse2 = +inf: P = 0.
struct alignas(16) FlashQuery {
    float lse2, D;
    float g;            // log2(e) g: Linear, Distance.  g: LogDistance
    float S;            // S_offset, from what its FlashQueries say; Linear: the position
};

// The queries of a tile, and from what their S is counted: the chunk's origin, the tile's first row or its last, whichever of
// these two is nearer to the tile that meets it. Then S_i and S_j differ in sign, or neither has lost a bit, and nothing cancels.
enum FlashFrom { FROM_CHUNK, FROM_FIRST, FROM_LAST };
struct alignas(16) FlashQueries {
    FlashQuery row[FLASH_TILE];
    double from, unused;
};
// How many of them each tile has, and which one an owned tile meets
__host__ __device__ constexpr int flash_variants(FlashBias K) { return K == FlashBias::Distance || K == FlashBias::LogDistance ? 3 : 1; }
template <FlashBias K> __device__ inline FlashFrom flash_from(int streamed, int owned) {
    return flash_variants(K) == 1 || streamed == owned ? FROM_CHUNK : streamed > owned ? FROM_FIRST : FROM_LAST;
}
// S of the owned rows, counted from what the streamed tile counts from: in shared memory, for registers are short. A thread a row,
// the block's last 64, so that `shift` needs no barrier but the one before `at`.
struct FlashOwnS {
    double exact[FLASH_TILE];
    float shifted[2][FLASH_TILE];               // of two stages

    __device__ void set(const FlashQueries* own) {
        const int r = (int)threadIdx.x - FLASH_TILE;
        if (r >= 0) { exact[r] = own->from + own->row[r].S; }
    }
    __device__ void shift(const FlashQueries* streamed, int stage) {
        const int r = (int)threadIdx.x - FLASH_TILE;
        if (r >= 0) { shifted[stage][r] = (float)(exact[r] - streamed->from); }
    }
};

struct alignas(16) FlashChunk { uint32_t x[4]; };

// Two logits of one owned row, neighbours in the streamed direction.
template <FlashBias K> struct FlashPair {
    float p[2], dl[2];
    float w[2];         // S_i - S_j
    float r[2];         // LogDistance: 1 / (1 + (g w)^2)

    // bias: S_j of the two keys, counted from what q's S is, or the two entries of the table
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
    int bh, b, h, keys, tiles;      // keys: this sequence's tokens, kv_len applied;  tiles: of 64 rows in T
    __device__ FlashBlock(const FlashArgs& p) : bh(blockIdx.x % (p.B * p.NH)) {
        b = bh / p.NH;
        h = bh % p.NH;
        keys = flash_tokens(p, b);
        tiles = ceil_div(p.T, FLASH_TILE);
    }
    // row t of q (0), k (1), v (2); of dout; of what flash_backward_prepare_kernel wrote
    template <int HS> __device__ const bf16* qkv(const FlashArgs& p, int t, int which) const {
        return p.qkv + (size_t)(b * p.stride + t) * p.OC + (which * p.NH + h) * HS;
    }
    template <int HS> __device__ const bf16* dout(const FlashArgs& p, int t) const {
        return p.dout + ((size_t)(b * p.T + t) * p.NH + h) * HS;
    }
    template <FlashBias K> __device__ const FlashQueries* queries(const FlashQueries* all, int tile, FlashFrom from) const {
        return all + (size_t)(bh * tiles + tile) * flash_variants(K) + from;
    }
    // asked for every bias, though only two have spans: without this test ptxas spills in another one's dkdv kernel
    __device__ int first_key_tile(const FlashArgs& p, int m) const {
        return p.span == nullptr ? 0 : p.span[bh * tiles + m].first;
    }
    __device__ int live_tiles() const { return ceil_div(keys, FLASH_TILE); }
    template <bool Causal, FlashBias K> __device__ int end_key_tile(const FlashArgs& p, int m) const {
        if (m >= live_tiles()) { return 0; }
        return Causal ? m + 1 : !flash_skips(K) || p.span == nullptr ? live_tiles() : p.span[bh * tiles + m].last + 1;
    }
};

__device__ inline float flash_table(const FlashArgs& p, int h, int i, int j) {
    const int n = p.table_zero + j - i, last = p.table_entries - 1;
    return p.table[(size_t)h * p.table_entries + (n < 0 ? 0 : n < last ? n : last)];
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

// ----------------------------------------------------------------------------------------------------------
// D, and what else the two kernels want of a query, gathered (B*NH,tiles,flash_variants), rows behind T padded

template <FlashBias K, int HS> __global__ void flash_backward_prepare_kernel(FlashQueries* queries, FlashArgs p) {
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
            q.g = LOG2E * p.slopes[h];
            q.S = (float)t;
        }
        if (K == FlashBias::Distance || K == FlashBias::LogDistance) {
            q.g = K == FlashBias::Distance ? LOG2E * p.g[at] : p.g[at];
            q.S = p.S_offset[at];
        }
    }
    FlashQueries* tile = queries + (bh * rows + t) / FLASH_TILE * flash_variants(K);
    tile[FROM_CHUNK].row[t % FLASH_TILE] = q;
    if (flash_variants(K) == 1) { return; }
    const float *S = p.S_offset + bh * p.stride, raw = q.S;
    const int first = (int)t / FLASH_TILE * FLASH_TILE, last = first + FLASH_TILE < p.T ? first + FLASH_TILE - 1 : p.T - 1;
    q.S = raw - S[first];
    tile[FROM_FIRST].row[t % FLASH_TILE] = q;
    q.S = raw - S[last];
    tile[FROM_LAST].row[t % FLASH_TILE] = q;
    if (t % FLASH_TILE == 0) {
        const double origin = p.S_origin[bh * ceil_div(p.stride, CABLE_CHUNK) + t / CABLE_CHUNK];
        tile[FROM_CHUNK].from = origin;
        tile[FROM_FIRST].from = origin + S[first];
        tile[FROM_LAST].from = origin + S[last];
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
        const int begin = at.first_key_tile(p, m), end = at.template end_key_tile<Causal, FlashBias::Toeplitz>(p, m);
        const bool written = begin < end && x >= begin * FLASH_TILE && x < end * FLASH_TILE + 63;
        if (written) { sum += slab[((size_t)at.bh * at.tiles + m) * (at.tiles + 1) * FLASH_TILE + x]; }
    }
    p.dtable[(size_t)at.bh * p.table_entries + column] = sum;
}

#endif
