// attention/flash/tiles.cuh -- tiles of 64 rows, as operands of the tensor cores in shared memory.
//
// In all of flash/, lane = threadIdx.x % 32, group = lane / 4 and pair = lane % 4 (base/ptx.cuh). A warp has 16 of its
// block's 64 rows. A lane has its rows group + 8 own (own = 0, 1) and of every 8 columns 2 pair + e (e = 0, 1). An
// array [N][4] holds row group + 8 own, column 8 n + 2 pair + e at [n][own * 2 + e]; an array [FLASH_OWN] has one value
// per row. docs/attention.md, "Tiles and fragments".
#pragma once

#include "../../base/ptx.cuh"
#include "../../cable.cuh"

// The head sizes of these kernels. They compute with 64 or 128 columns, and columns from HS on are zero: below 32 more
// than half of the work would be wasted.
constexpr bool flash_head_size(int HS) { return HS >= 32 && HS <= 128 && HS % 8 == 0; }

// The biases that are made of CABLE's S and g
__host__ __device__ constexpr bool flash_is_cable(FlashBias Kind) {
    return Kind == FlashBias::Distance || Kind == FlashBias::LogDistance;
}
// The first and the last tile of keys that a tile of queries needs; the queries' own tile is never outside
struct alignas(8) FlashSpan {
    int first, last;
};

// All pointers are the device's; null where the bias does not use them. Queries and keys are 0 .. T-1 of each sequence.
struct FlashArgs : FlashBiasArgs {
    const bf16* qkv;            // (B,stride,OC): q at h*HS, k at C + h*HS, v at 2C + h*HS; OC a multiple of 8
    bf16* out;                  // (B,T,C)
    float* lse;                 // (B*NH,stride), natural logarithm; null: not saved
    int B, T, stride, NH, HS, OC;
    float scale;                // > 0
    const int* kv_len;          // (B), or null: the rows after it are padding (choose.cuh)
    const FlashSpan* span;      // (B*NH,ceil(T/64)), or null: no tile is skipped. Causal: `last` is not read
    // backward
    const bf16* dout;           // (B,T,C)
    bf16* dqkv;                 // (B,stride,OC), the q, k, v columns are overwritten
    AttentionMask mask;         // read by the masked kernels, which run if it exists

    // the factor of B for query i of a (batch, head)
    __device__ float factor_of(size_t bh, int i) const { return factor == nullptr ? 1.0f : factor[bh * stride + i]; }
};

// Which sequence and head a block works on, and its turn among the `turns` blocks of that head, the longest first.
// About FLASH_WAVE blocks run at a time, in the order of their numbers. They share few heads, so that L2 holds the keys
// and values that they read: with all heads side by side each block would fetch its tiles from memory.
constexpr int FLASH_WAVE = 512;
struct FlashPlace {
    int bh, turn;
    __device__ FlashPlace(const FlashArgs& args, int turns) {
        const int heads = imax(1, FLASH_WAVE / turns);                      // that run side by side: a group
        const int first = (int)blockIdx.x / (heads * turns) * heads;        // of this block's group
        const int size = imin(heads, args.B * args.NH - first);             // the last one may have fewer
        const int place = (int)blockIdx.x - first * turns;
        bh = first + place % size;
        turn = place / size;
    }
};

constexpr int FLASH_TILE = 64;              // rows of a tile, and of a block: divides CABLE_CHUNK
constexpr int FLASH_ROWS = 16;              // of a warp
constexpr int FLASH_OWN = 2;                // of a lane
constexpr int FLASH_THREADS = FLASH_TILE / FLASH_ROWS * 32;
static_assert(CABLE_CHUNK % FLASH_TILE == 0, "S of the rows that a block owns counts from one origin");

// how many tokens sequence b has before its padding
__device__ inline int flash_tokens(const FlashArgs& args, int b) {
    const int n = args.kv_len == nullptr ? args.T : args.kv_len[b];
    return clamp(n, 0, args.T);
}

// where the document of query i of sequence b begins; the result for i >= T is not used
__device__ inline int flash_begin(const FlashArgs& args, int b, int i) {
    return args.mask.of(b, args.stride).begin(imin(i, args.T - 1));
}

// ----------------------------------------------------------------------------------------------------------
// tiles in shared memory: rows of HS bf16, in pieces of 16 bytes
//
// The first 64 columns of all rows lie before the next 64, as wgmma wants them. Of a row's 8 pieces there, piece p lies
// at p ^ (r & 7): the 8 rows of an ldmatrix, which are in one column of pieces, have different banks.

struct alignas(16) FlashPiece {
    uint32_t x[4];                                          // 8 bf16
};
constexpr int FLASH_COLUMNS = 64;                           // that lie together: 128 bytes of a row
constexpr int FLASH_PART = FLASH_TILE * FLASH_COLUMNS;      // their elements
// element 8 * piece of a row
__device__ inline bf16* flash_at(bf16* tile, int row, int piece) {
    return tile + piece / 8 * FLASH_PART + row * FLASH_COLUMNS + ((piece % 8 ^ (row & 7)) << 3);
}

// Starts the copy of a tile from rows of `columns` elements, `stride` elements apart; rows from n on (n may be <= 0)
// and columns from `columns` on become zero. All threads of the block call it; the caller commits, waits and
// synchronizes.
template <int HS>
__device__ inline void flash_load_tile(bf16* tile, const bf16* from, int stride, int columns, int n) {
    constexpr int PIECES = HS / 8, STEP = FLASH_THREADS / PIECES;   // of a row; rows that the block copies at once
    static_assert(STEP % 8 == 0, "the rows that a thread copies are swizzled alike");
    const int piece = threadIdx.x % PIECES;
    const int row0 = threadIdx.x / PIECES;
    from += row0 * stride + piece * 8;          // registers are scarce: one pointer, also for rows that are not read
    tile = flash_at(tile, row0, piece);
    n = piece * 8 < columns ? n : 0;
    UNROLL
    for (int r = 0; r < FLASH_TILE; r += STEP) {
        cp_async_16(tile + r * FLASH_COLUMNS, from, row0 + r < n);
        from += STEP * stride;
    }
}

// Waits for this thread's copies. After the next barrier the copies of all threads are there, for wgmma too
__device__ inline void flash_wait_copies() {
    cp_async_wait<0>();
    fence_proxy_async();
}

// Operands of mma_m16n8k16 from such a tile; the last index counts 16 columns. row0, n0, k0: multiples of 8.
// Piece 2 k + high of a row, from one address for all k: an address for each k would take registers.
__device__ inline const void* flash_operand(const bf16* tile, int row, int k, int high) {
    const int piece = high ^ (row & 7);                 // for k = 0; the xor with 2 (k % 4) follows, in bytes
    return (const char*)(tile + k / 4 * FLASH_PART + row * FLASH_COLUMNS) + (piece * 16 ^ k % 4 * 32);
}
// A (16 x 16): rows row0 .. row0+15, columns 16k .. 16k+15
__device__ inline void flash_load_a(uint32_t (&r)[4], const bf16* tile, int row0, int k) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(r, flash_operand(tile, row0 + lane % 16, k, lane / 16));
}
// B of two mma (k 16 x n 8 each) where the tile's rows are n: rows n0 .. n0+7 give r[0], r[1], rows n0+8 .. n0+15 r[2],
// r[3]; columns 16k .. 16k+15 are k. (scores = Q K^T: the tile is K.)
__device__ inline void flash_load_b(uint32_t (&r)[4], const bf16* tile, int n0, int k) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(r, flash_operand(tile, n0 + lane / 16 * 8 + lane % 8, k, lane / 8 % 2));
}
// B of two mma where the tile's rows are k: rows k0 .. k0+15; columns 16n .. 16n+7 give r[0], r[1], 16n+8 .. 16n+15
// r[2], r[3]. (out = P V: the tile is V.)
__device__ inline void flash_load_b_trans(uint32_t (&r)[4], const bf16* tile, int k0, int n) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4_trans(r, flash_operand(tile, k0 + lane % 16, n, lane / 16));
}

// Whether products with scores of `columns` columns are Hopper's warpgroup products: a block is a warpgroup, and reads
// its operands where they are. (The forward was wrong with operands in fragments that outlive a turn of its loop: ptxas
// 13.0 gave P their registers.)
__host__ __device__ constexpr bool flash_wgmma(int columns) { return HAS_WGMMA && columns >= 32; }
// bytes from the start of a tile to its k-th 16 columns
__host__ __device__ constexpr int flash_bytes(int k) { return k / 4 * FLASH_PART * (int)sizeof(bf16) + k % 4 * 32; }

// The warp's rows of a tile as left operand, in fragments of 16 columns: the first `Kept` stay in registers, later ones
// are read from shared memory each time. row0: the warp's first row in the tile
template <int HS, int Kept> struct FlashOwned {
    static constexpr int ALL = HS / 16;
    uint32_t fragment[Kept < ALL ? Kept + 1 : ALL][4];

    __device__ void load(const bf16* tile, int row0) {      // once, when the tile has arrived
        UNROLL
        for (int k = 0; k < Kept; k++) { flash_load_a(fragment[k], tile, row0, k); }
    }
    // of columns 16k .. 16k + 15
    __device__ const uint32_t (&use(const bf16* tile, int row0, int k))[4] {
        if (k >= Kept) { flash_load_a(fragment[Kept], tile, row0, k); }
        return fragment[imin(k, Kept)];
    }
};

template <int Columns> struct FlashFragment;

// A warp's (FLASH_ROWS, Columns) as left operand, rounded to bf16. A lane holds the same elements of a result and of a
// left operand: docs/attention.md, "Tiles and fragments"
template <int Columns> struct FlashLeft {
    uint32_t x[Columns / 16][4];

    __device__ explicit FlashLeft(const FlashFragment<Columns>& from) {
        UNROLL
        for (int n = 0; n < Columns / 8; n++) {
            x[n / 2][n % 2 * 2] = pack_bf16(from.x[n][0], from.x[n][1]);
            x[n / 2][n % 2 * 2 + 1] = pack_bf16(from.x[n][2], from.x[n][3]);
        }
    }
};

// The results of a warp's products, float32: (FLASH_ROWS, Columns). Before products wgmma_fence, after them wgmma_wait
template <int Columns> struct FlashFragment {
    static constexpr int N = Columns / 8;
    float x[N][4];

    // the lane's two neighbours in row `own` and the n-th 8 columns
    __device__ float* pair(int own, int n) { return x[n] + own * 2; }
    // all elements of the lane, with the row `own` and the column of each
    static constexpr int SIZE = N * 4;
    __device__ float& operator[](int e) { return x[e / 4][e % 4]; }
    __device__ float operator[](int e) const { return x[e / 4][e % 4]; }
    __device__ static int own(int e) { return e % 4 / 2; }
    __device__ static int column(int e) { return e / 4 * 8 + (int)threadIdx.x % 4 * 2 + e % 2; }

    // += the warp's rows of own_tile, from row0 on, times the transposed rows of `tile`, from `row` on
    template <int HS, int Kept>
    __device__ void add_transposed(FlashOwned<HS, Kept>& owned, const bf16* own_tile, int row0, const bf16* tile,
                                   int row) {
        const WgmmaTile a(own_tile), b(tile + row * FLASH_COLUMNS);
        UNROLL
        for (int k = 0; k < HS / 16; k++) {
            if constexpr (flash_wgmma(Columns) && Kept == 0) {
                wgmma(x, a, b, flash_bytes(k));
            } else if constexpr (flash_wgmma(Columns)) {
                static_assert(Kept == HS / 16, "asynchronous products need a fragment each");
                wgmma<false>(x, owned.use(own_tile, row0, k), b, flash_bytes(k));
            } else {
                const uint32_t (&left)[4] = owned.use(own_tile, row0, k);
                UNROLL
                for (int n = 0; n < N; n += 2) {            // 16 rows of the tile: two mma
                    uint32_t right[4];
                    flash_load_b(right, tile, row + n * 8, k);
                    mma_m16n8k16(x[n], left, right[0], right[1]);
                    mma_m16n8k16(x[n + 1], left, right[2], right[3]);
                }
            }
        }
    }
    // += `weights` times the rows of a tile, from `row` on
    template <int Inner> __device__ void add_product(const FlashLeft<Inner>& weights, const bf16* tile, int row) {
        const WgmmaTile b(tile + row * FLASH_COLUMNS);
        UNROLL
        for (int k = 0; k < Inner / 16; k++) {
            if constexpr (flash_wgmma(Inner)) {
                UNROLL
                for (int c = 0; c < Columns; c += FLASH_COLUMNS) {
                    float (&part)[8][4] = *(float (*)[8][4])x[c / 8];
                    const int rows = 16 * k * FLASH_COLUMNS * (int)sizeof(bf16);
                    wgmma<true>(part, weights.x[k], b, flash_bytes(c / 16) + rows);
                }
            } else {
                UNROLL
                for (int c = 0; c < N / 2; c++) {           // 16 columns: two mma
                    uint32_t right[4];
                    flash_load_b_trans(right, tile, row + 16 * k, c);
                    mma_m16n8k16(x[2 * c], weights.x[k], right[0], right[1]);
                    mma_m16n8k16(x[2 * c + 1], weights.x[k], right[2], right[3]);
                }
            }
        }
    }
    // to (rows, columns) = the block's rows, each times its factor. They go through the warp's rows of a tile, which no
    // other warp reads any more, so that global memory sees stores of 16 bytes
    __device__ void store(bf16* to, int stride, int rows, int columns, bf16* tile, const float (&factor)[FLASH_OWN]) {
        const int lane = threadIdx.x % 32;
        const int row0 = threadIdx.x / 32 * FLASH_ROWS;
        syncwarp();                                         // the warp has read its operands from these rows
        UNROLL
        for (int own = 0; own < FLASH_OWN; own++) {
            UNROLL
            for (int n = 0; n < N; n++) {
                const float* sum = pair(own, n);
                bf16* piece = flash_at(tile, row0 + lane / 4 + 8 * own, n) + lane % 4 * 2;
                *(uint32_t*)piece = pack_bf16(factor[own] * sum[0], factor[own] * sum[1]);
            }
        }
        syncwarp();                                         // the rows are complete
        for (int e = lane; e < FLASH_ROWS * N; e += 32) {         // neighbouring lanes store neighbouring pieces
            const int row = row0 + e / N;
            const int piece = e % N;
            const FlashPiece* from = (const FlashPiece*)flash_at(tile, row, piece);
            if (row < rows && piece * 8 < columns) { *(FlashPiece*)(to + (size_t)row * stride + piece * 8) = *from; }
        }
    }
};

// the sum over the four lanes that share a row
__device__ inline float quad_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

// ----------------------------------------------------------------------------------------------------------
// which tiles meet

// Which tiles of keys a tile of queries meets: sinks_begin .. sinks_end-1, then first .. end-1; none if all the queries
// are padding. Skips: the bias has spans. Masked: args.mask is obeyed, else there are no sinks.
//
// The second range ends with the queries' own tile or, bidirectional, after it. Sinks to the right of the window are
// part of it, so there is no gap. Neither range begins before the document of the tile's first query; the document of
// a later query begins there, or inside the queries' own tile.
struct FlashReach {
    int sinks_begin = 0, sinks_end = 0;
    int first = 0, end = 0;

    // m: the tile of the queries. live: how many tiles have tokens
    template <bool Causal, bool Skips, bool Masked>
    __device__ static FlashReach of(const FlashArgs& args, int bh, int m, int live) {
        FlashReach reach;
        if (m >= live) { return reach; }
        reach.end = Causal ? m + 1 : live;
        if (Masked) {
            const int row = m * FLASH_TILE;
            const int window = args.mask.window;
            const int begin = flash_begin(args, bh / args.NH, row);
            const int sinks = imin(ceil_div(begin + args.mask.sinks, FLASH_TILE), reach.end);
            reach.first = imax(begin, row - window + 1) / FLASH_TILE;
            if (!Causal) { reach.end = imin(live, (row + FLASH_TILE - 1 + window - 1) / FLASH_TILE + 1); }
            reach.end = imax(reach.end, sinks);
            reach.sinks_end = args.mask.sinks > 0 ? imin(sinks, reach.first) : 0;
            reach.sinks_begin = imin(begin / FLASH_TILE, reach.sinks_end);
        }
        if (Skips && args.span != nullptr) {
            const FlashSpan span = args.span[(size_t)bh * ceil_div(args.T, FLASH_TILE) + m];
            reach.sinks_begin = imin(imax(reach.sinks_begin, span.first), reach.sinks_end);
            reach.first = imax(reach.first, span.first);
            if (!Causal) { reach.end = imin(reach.end, span.last + 1); }
        }
        return reach;
    }
    __device__ bool has_sinks() const { return sinks_begin < sinks_end; }
    __device__ int begin() const { return has_sinks() ? sinks_begin : first; }
    __device__ int after(int n) const { return n + 1 == sinks_end ? first : n + 1; }       // the next tile
    __device__ bool gap_after(int n) const { return n + 1 == sinks_end && sinks_end < first; }
    __device__ bool contains(int n) const { return (n >= first && n < end) || (n >= sinks_begin && n < sinks_end); }
};

// The forward's order of these tiles: the queries' own tile, the tiles to its left, the sinks, the tiles to its right.
// For queries in tile 3 of 6: 3 2 1 0 if causal, 3 2 1 0 4 5 if not. Without a mask only the first of them, and the
// tile with the end of the keys, have hidden pairs.
template <bool Causal, bool Skips, bool Masked> struct FlashWalk {
    FlashReach reach;
    int own;                                // the queries' tile
    int left, sinks, count;                 // tiles: own and to its left; sinks; all

    // tokens: of this sequence
    __device__ FlashWalk(const FlashArgs& args, int bh, int own, int tokens) : own(own) {
        reach = FlashReach::of<Causal, Skips, Masked>(args, bh, own, ceil_div(tokens, FLASH_TILE));
        left = reach.end > 0 ? own - reach.first + 1 : 0;
        sinks = reach.sinks_end - reach.sinks_begin;
        count = left + sinks + (reach.end > 0 ? reach.end - own - 1 : 0);
    }
    __device__ int tile(int it) const {
        if ((Causal && !Masked) || it < left) { return own - it; }
        return it < left + sinks ? reach.sinks_end - 1 - (it - left) : own + 1 + (it - left - sinks);
    }
};

// What hides keys from the queries of sequence b: the end of its tokens, the diagonal if Causal, args.mask if Masked
template <bool Causal, bool Masked> struct FlashMask {
    const FlashArgs& args;
    int b, keys;                            // keys: b's tokens

    // where the document of query i begins, for hides()
    __device__ int begin(int i) const { return Masked ? flash_begin(args, b, i) : 0; }
    __device__ bool hides(int i, int j, int begin) const {
        return j >= keys || (Causal && j > i) || (Masked && args.mask.hides(i, j, begin));
    }
    // whether the tiles m of queries and n of keys are on the diagonal or have hidden pairs
    __device__ bool edge(int m, int n) const {
        return m == n || (n + 1) * FLASH_TILE > keys || (Masked && cuts(m, n));
    }
    __device__ bool cuts(int m, int n) const {              // whether args.mask hides some
        const int i0 = m * FLASH_TILE, j0 = n * FLASH_TILE;
        return args.mask.hides_any(i0, i0 + FLASH_TILE, j0, j0 + FLASH_TILE, begin(i0 + FLASH_TILE - 1));
    }
    // Hidden pairs become -inf. i: the lane's first query; j0: the tile's first key; begin: begin() of its queries
    __device__ void hide(FlashFragment<FLASH_TILE>& scores, const int (&begin)[FLASH_OWN], int i, int j0) const {
        const int row = i - j0, end = keys - j0;            // counted from j0: then the columns are constants
        UNROLL
        for (int e = 0; e < scores.SIZE; e++) {
            const int c = scores.column(e);
            const int r = row + 8 * scores.own(e);
            if (c >= end || (Causal && c > r)) { scores[e] = -INFINITY; }
            if (Masked && args.mask.hides(r, c, begin[scores.own(e)] - j0)) { scores[e] = -INFINITY; }
        }
    }
};
