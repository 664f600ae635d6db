// attention/flash/columns.cuh -- a bias -g_i |S_i - S_j| as 16 more columns of the product q.k.
//
// The keys of a tile beside the queries' own are all on one side of them. With S counted from the query that is nearest
// to the keys, the edge of its tile, both terms of
//   B_ij / scale = weight_i place_j + start_i      weight_i = g_i / scale      place_j = -|S_j - S_edge|
//                                                  start_i = -weight_i |S_i - S_edge|, in the backward - lse_i / scale
// have one sign, so that nothing cancels. Each factor is a sum of three bf16, x = x1 + x2 + x3, which have the 24 bits
// of a float32. Six columns give the product of two factors but for x2 y3, x3 y2 and x3 y3, 2^-26 of it:
//   query     w3 w1 w2 w1 w1 w2  b1 b2 | b3 d1 d2 d3  0  0  0  0      w weight, b start, d -row_dot
//   key       p1 p1 p2 p2 p3 p1   1  1 |  1  0  0  0  0  0  0  0      p place
//   dot        0  0  0  0  0  0   0  0 |  0  1  1  1  0  0  0  0      what the product dout.v starts from, with a query
// The first 8 columns as right operand make the sums of dlogit_ij place_j and dlogit_ij over keys, or of weight_i
// dlogit_ij over queries. A lane has the columns 2 pair and 2 pair + 1 of them, and needs only the former. So both
// kernels of the backward sum the dlogit that the products read, rounded to bf16. docs/attention.md, "The bias as
// columns".
//
// Four such groups of 16 columns lie side by side in a tile of 64.
#pragma once

#include "tiles.cuh"

// Which passes do so, on Hopper: 0 none, 1 the forward, 2 the backward, 3 both. No GPU has said yet which is faster.
#if !defined(FLASH_VARIANT)
#define FLASH_VARIANT 0
#endif
enum FlashPass { FLASH_FORWARD = 1, FLASH_BACKWARD = 2 };
__host__ __device__ constexpr bool flash_may_have_columns(FlashPass pass, FlashBias Kind) {
    return (Kind == FlashBias::Linear || Kind == FlashBias::Distance) && (FLASH_VARIANT & pass) != 0;
}
__host__ __device__ constexpr bool flash_columns(FlashPass pass, FlashBias Kind) {
    return flash_may_have_columns(pass, Kind) && flash_wgmma(FLASH_TILE);
}
// their bytes of shared memory
inline size_t flash_columns_shared(FlashPass pass, FlashBias Kind) {
    return flash_may_have_columns(pass, Kind) && runs_wgmma() ? sizeof(bf16) * FLASH_PART : 0;
}
constexpr uint32_t FLASH_ONE = 0x3f80;      // 1 as bf16, in the low half

// x as three numbers that round to the bf16 whose sum it is
struct FlashThree {
    float x1, x2, x3;
    __device__ explicit FlashThree(float x) : x1(x) {
        x2 = x1 - unpack_lo(pack_bf16(x1, x1));
        x3 = x2 - unpack_lo(pack_bf16(x2, x2));
    }
};
// Piece 0 or 1 of a row of a group: flash_at, for a group that is no constant
__device__ inline FlashPiece* flash_column_piece(bf16* columns, int row, int group, int piece) {
    return (FlashPiece*)((char*)(columns + row * FLASH_COLUMNS) + ((piece ^ (row & 7)) * 16 ^ group * 32));
}
// As operand, the rows from `row` on
__device__ inline WgmmaTile flash_column_operand(const bf16* columns, int row, int group) {
    return WgmmaTile(columns + row * FLASH_COLUMNS, group * 32);
}
// The two pieces of a query
struct FlashQueryColumns {
    FlashPiece piece[2];
    FlashQueryColumns() = default;
    __device__ FlashQueryColumns(float weight, float start, float minus_dot) {
        const FlashThree w(weight), b(start), d(minus_dot);
        piece[0] = {{pack_bf16(w.x3, w.x1), pack_bf16(w.x2, w.x1), pack_bf16(w.x1, w.x2), pack_bf16(b.x1, b.x2)}};
        piece[1] = {{pack_bf16(b.x3, d.x1), pack_bf16(d.x2, d.x3), 0, 0}};
    }
    __device__ void put(bf16* columns, int row, int group) const {
        *flash_column_piece(columns, row, group, 0) = piece[0];
        *flash_column_piece(columns, row, group, 1) = piece[1];
    }
};
// The pieces of a key. The second one is the same for all
__device__ inline void flash_put_key(bf16* columns, int row, int group, float place) {
    const FlashThree p(place);
    *flash_column_piece(columns, row, group, 0) = {
        {pack_bf16(p.x1, p.x1), pack_bf16(p.x2, p.x2), pack_bf16(p.x3, p.x1), FLASH_ONE << 16 | FLASH_ONE}};
}
__device__ inline FlashPiece flash_key_end() { return {{FLASH_ONE, 0, 0, 0}}; }

// scores = the products of two groups of columns: of the block's rows, and of the rows from `row` on
template <int N>
__device__ inline void flash_set_columns(FlashFragment<N>& scores, const bf16* columns, int own, int other, int row) {
    wgmma_set(scores.x, flash_column_operand(columns, 0, own), flash_column_operand(columns, row, other), 0);
}
// sums = dlogit times the first 8 columns of a group, in the rows from `row` on
template <int Inner>
__device__ inline void flash_set_sums(FlashFragment<8>& sums, const FlashLeft<Inner>& dlogit, const bf16* columns,
                                      int group, int row) {
    const WgmmaTile b = flash_column_operand(columns, row, group);
    wgmma_set<true>(sums.x, dlogit.x[0], b, 0);
    UNROLL
    for (int k = 1; k < Inner / 16; k++) {
        wgmma<true>(sums.x, dlogit.x[k], b, 16 * k * FLASH_COLUMNS * (int)sizeof(bf16));
    }
}

// S of a token, in two parts that may cancel with another's: so they are subtracted in float64
struct FlashPlaced {
    float offset;
    double origin;
    __device__ double S() const { return origin + (double)offset; }
    __device__ float minus(double S) const { return (float)(origin - S + (double)offset); }
};
// of the tokens of a (batch, head)
template <FlashBias Kind> struct FlashPlaces {
    const float* offset;
    const double* origin;
    const int last;

    __device__ FlashPlaces(const FlashArgs& args, int bh)
        : offset(args.S_offset + (size_t)bh * args.stride),
          origin(args.S_origin + (size_t)bh * ceil_div(args.stride, CABLE_CHUNK)), last(args.T - 1) {}
    // row `row` of tile m; after T: the last token
    __device__ FlashPlaced at(int m, int row) const {
        if (Kind == FlashBias::Linear) { return {(float)row, (double)(m * FLASH_TILE)}; }
        return {offset[imin(m * FLASH_TILE + row, last)], origin[(unsigned)m / (CABLE_CHUNK / FLASH_TILE)]};
    }
    // S of the edge of tile m: of its first row, for keys on the left, or of its last
    __device__ double edge(int m, bool right) const { return at(m, right ? FLASH_TILE - 1 : 0).S(); }
};

// ----------------------------------------------------------------------------------------------------------
// the forward

// The columns for the queries of tile m: 0 and 1 are the stages of the keys, 2 meets keys on the left, 3 on the right
template <bool Causal, FlashBias Kind> struct FlashForwardColumns {
    static constexpr bool USED = flash_columns(FLASH_FORWARD, Kind);
    bf16* tile;
    int m;
    const FlashPlaces<Kind> places;
    double left, right;                                     // the queries' edges
    FlashPlaced key;                                        // the thread's, of the tile that is on its way

    __device__ FlashForwardColumns(bf16* tile, const FlashArgs& args, int bh, int m)
        : tile(tile), m(m), places(args, bh), left(USED ? places.edge(m, false) : 0.0),
          right(USED && !Causal ? places.edge(m, true) : 0.0), key() {}
    __device__ bf16* end() const { return tile + (USED ? FLASH_PART : 0); }
    __device__ void fetch(int n) {
        if (USED) { key = places.at(n, (int)threadIdx.x % FLASH_TILE); }
    }
    // what stays: the queries, and the end of the keys
    __device__ void put_queries(const FlashArgs& args, int bh) const {
        const int row = (int)threadIdx.x % FLASH_TILE;
        const int half = (int)threadIdx.x / FLASH_TILE;     // of the threads: each has a stage, and a side
        if (!USED) { return; }
        *flash_column_piece(tile, row, half, 1) = flash_key_end();
        if (Causal && half > 0) { return; }
        const float weight = flash_row_slope<Kind>(args, bh, m * FLASH_TILE + row);
        const float start = -weight * fabsf(places.at(m, row).minus(half == 0 ? left : right));
        FlashQueryColumns(weight, start, 0.0f).put(tile, row, 2 + half);
    }
    // the keys of tile n, when S of them has arrived
    __device__ void put_keys(int n, int stage) const {
        if (!USED || threadIdx.x >= FLASH_TILE) { return; }
        flash_put_key(tile, threadIdx.x, stage, -fabsf(key.minus(Causal || n < m ? left : right)));
    }
    // scores = B / scale of tile n
    __device__ void start(FlashFragment<FLASH_TILE>& scores, int n, int stage) const {
        wgmma_fence();
        flash_set_columns(scores, tile, Causal || n < m ? 2 : 3, stage, 0);
    }
};

// ----------------------------------------------------------------------------------------------------------
// the backward

// The queries of a tile, as keys on the left [0] and on the right [1] meet them, and S of these edges
struct alignas(16) FlashTileColumns {
    FlashQueryColumns row[2][FLASH_TILE];
    double edge[2];
};
// What the tile's query `row` has in it. start = -inf, P = 0, becomes a finite number: 0 times infinity would be NaN
template <FlashBias Kind>
__device__ inline void flash_prepare_columns(FlashTileColumns* tile, const FlashArgs& args, int bh, int m, int row,
                                             float weight, float start, float minus_dot) {
    const FlashPlaces<Kind> places(args, bh);
    UNROLL
    for (int right = 0; right < 2; right++) {
        const double edge = places.edge(m, right);
        const float all = fmaxf(start, -1e30f) - weight * fabsf(places.at(m, row).minus(edge));
        tile->row[right][row] = FlashQueryColumns(weight, all, minus_dot);
        if (row == 0) { tile->edge[right] = edge; }
    }
}
// The second piece of what makes -row_dot of a query
__device__ inline FlashPiece flash_dot_end() { return {{FLASH_ONE << 16, FLASH_ONE << 16 | FLASH_ONE, 0, 0}}; }
