// attention/flash/bias.cuh -- the forms of a bias: what scores start from, what gradients sum, which tiles stay alive.
//
// The forward has FlashStart, B over scale, from which its product starts; the two kernels of the backward have
// FlashTerms, made for each pair of logits. FlashPlaces knows S of a token.
#pragma once

#include "../../position/fire.cuh"
#include "tiles.cuh"

// ----------------------------------------------------------------------------------------------------------
// the forward
//
// A FlashStart is a block's bias. Its shared memory has two stages with the values of a tile of keys, then the values
// of the block. Its steps:
//   rows   once: takes the lane's rows i and i + 8
//   fetch  starts to load the thread's values for the keys of tile n; no warp waits for them
//   put    stores the loaded values in the tile's stage
//   meet   once a tile, before its pairs. Edge: the queries' own tile and the last tile, with keys on both sides
//   pairs  B over scale, without row_bias, of the lane's four pairs at the k-th 8 keys

constexpr int FLASH_STAGE = 2 * FLASH_TILE;                 // floats
// The lane's first row of the block, and its first column of each 8
__device__ inline int flash_lane_row() { return (int)threadIdx.x / 32 * FLASH_ROWS + (int)threadIdx.x % 32 / 4; }
__device__ inline int flash_lane_column() { return (int)threadIdx.x % 4 * 2; }

// None: B = 0
template <FlashBias Kind> struct FlashStart {
    static constexpr int SHARED = 0;                        // floats
    static constexpr bool EDGE = false;                     // whether the pairs of an Edge differ
    float row_bias[FLASH_OWN] = {};                         // added to all logits of a row, over scale

    __device__ FlashStart(const FlashArgs&, int, int, float*) {}
    __device__ void rows(const FlashArgs&, int) {}
    __device__ void fetch(const FlashArgs&, int) {}
    __device__ void put(int, const FlashArgs&, int) const {}
    template <bool Edge> __device__ void meet(const FlashArgs&, int, int) {}
    template <bool Causal, bool Edge> __device__ void pairs(float (&x)[4], int) const {
        x[0] = x[1] = x[2] = x[3] = 0.0f;
    }
};

// ----------------------------------------------------------------------------------------------------------
// Linear, Distance, LogDistance: functions of S_i - S_j

// S of the tokens of a (batch, head), in the two parts of cable.cuh
template <FlashBias Kind> struct FlashPlaces {
    const FlashArgs& args;
    const int bh;

    __device__ double origin(int i) const {                 // of the chunk of token i
        return args.S_origin[(size_t)bh * ceil_div(args.stride, CABLE_CHUNK) + i / CABLE_CHUNK];
    }
    __device__ float offset(int i) const { return args.S_offset[(size_t)bh * args.stride + i]; }
    __device__ float distance(int i, int j) const { return (float)(origin(i) - origin(j)) + (offset(i) - offset(j)); }
    __device__ float g(int i) const { return args.factor_of(bh, i) * args.g[(size_t)bh * args.stride + i]; }
    __device__ float slope(int i) const { return g(i) / args.scale; }       // of -|S_i - S_j|, over scale
};
template <> struct FlashPlaces<FlashBias::Linear> {         // S_i = i
    const FlashArgs& args;
    const int bh;

    __device__ float distance(int i, int j) const { return (float)(i - j); }
    __device__ float slope(int) const { return args.slopes[bh % args.NH] / args.scale; }
};

// A stage: the values of a tile of keys. S_ref: S of flash_reference
struct FlashKeyS {
    float S[FLASH_TILE];        // sign (S_j - S_ref)
    float shift[2];             // sign S_i + shift = sign (S_i - S_ref); in two parts
    float sign;                 // -1 right of the queries, where S_j - S_ref grows with the distance
    float unused;
};
static_assert(sizeof(FlashKeyS) <= sizeof(float) * FLASH_STAGE, "room for it");

// The key of tile n from which S is counted: the nearest to the queries of tile m. On the diagonal it is none (-1): S
// counts from its chunk, and the difference of two neighbours is exact. docs/attention.md, "Where S is counted from".
__device__ inline int flash_reference(int n, int m) {
    if (n == m) { return -1; }
    return n < m ? n * FLASH_TILE + FLASH_TILE - 1 : n * FLASH_TILE;
}

template <FlashBias Kind> struct FlashDistances {
    static constexpr int SHARED = 2 * FLASH_STAGE + FLASH_TILE;
    const FlashPlaces<Kind> places;
    const int m;                                            // the queries' tile
    float* stages;
    float* S;                                               // S[8 own]: of the lane's row, in shared memory
    const FlashKeyS* keys;                                  // of the current tile
    float slope[FLASH_OWN];
    float from_ref[FLASH_OWN];                              // sign (S_i - S_ref) of the current tile
    float row_bias[FLASH_OWN] = {};

    __device__ FlashDistances(const FlashArgs& args, int bh, int m, float* shared)
        : places{args, bh}, m(m), stages(shared), S(shared + 2 * FLASH_STAGE + flash_lane_row()), keys(nullptr) {}
    __device__ FlashKeyS* stage(int stage) const { return (FlashKeyS*)(stages + stage * FLASH_STAGE); }
    template <bool Edge> __device__ void meet(const FlashArgs&, int stage, int) {
        keys = this->stage(stage);
        UNROLL
        for (int own = 0; own < FLASH_OWN; own++) {
            from_ref[own] = S[8 * own] * keys->sign + keys->shift[0] + keys->shift[1];
        }
    }
    // sign (S_j - S_ref) of the lane's two keys
    __device__ float2 pair(int k) const { return *(const float2*)(keys->S + 8 * k + flash_lane_column()); }
};

// Distance, LogDistance: S and g are arrays of CABLE
template <FlashBias Kind> struct FlashCable : FlashDistances<Kind> {
    float S_left = 0.0f, S_right = 0.0f;                    // S of the thread's key and S_ref, by position
    double key_origin = 0.0;                                // from which S of the keys is counted
    const double origin;                                    // from which S of the queries is counted
    using FlashDistances<Kind>::places, FlashDistances<Kind>::m;

    __device__ FlashCable(const FlashArgs& args, int bh, int m, float* shared)
        : FlashDistances<Kind>(args, bh, m, shared), origin(this->places.origin(m * FLASH_TILE)) {}
    __device__ void put_row(int own, const FlashArgs& args, int i) {
        this->S[8 * own] = places.offset(i < args.T ? i : 0);
    }
    __device__ void fetch(const FlashArgs& args, int n) {
        const int t = threadIdx.x;
        if (t >= FLASH_TILE) { return; }
        const int j0 = n * FLASH_TILE;
        const int reference = imin(flash_reference(n, m), args.T - 1);
        const float S_key = places.offset(j0 + t < args.T ? j0 + t : j0);
        const float S_ref = reference < 0 ? 0.0f : places.offset(reference);
        S_left = n > m ? S_ref : S_key;
        S_right = n > m ? S_key : S_ref;
        key_origin = t == 0 ? places.origin(j0) : 0.0;
    }
    __device__ void put(int stage, const FlashArgs&, int n) const {
        const int t = threadIdx.x;
        FlashKeyS* to = this->stage(stage);
        if (t >= FLASH_TILE) { return; }
        to->S[t] = S_left - S_right;
        if (t > 0) { return; }
        to->sign = n > m ? -1.0f : 1.0f;
        // Origins and S_ref are added in float64 and stored in two float32 parts: they cancel in a tile next to the
        // queries', and in a tile to its right the first part cancels with the row's S.
        const double shift = origin - key_origin - (double)(n > m ? S_left : S_right);
        to->shift[0] = to->sign * (float)shift;
        to->shift[1] = to->sign * (float)(shift - (double)(float)shift);
    }
};

// B / scale = -slope_i |S_i - S_j|. For keys on one side that is slope_i sign (S_j - S_ref) + row_bias_i, with
// row_bias_i = -slope_i sign (S_i - S_ref): both terms are small where P is not 0
template <class Distances> struct FlashLine : Distances {
    static constexpr bool EDGE = true;
    using Distances::Distances, Distances::slope, Distances::from_ref, Distances::row_bias;

    template <bool Edge> __device__ void meet(const FlashArgs& args, int stage, int n) {
        Distances::template meet<Edge>(args, stage, n);
        UNROLL
        for (int own = 0; own < FLASH_OWN; own++) { row_bias[own] = Edge ? 0.0f : -slope[own] * from_ref[own]; }
    }
    template <bool Causal, bool Edge> __device__ void pairs(float (&x)[4], int k) const {
        const float2 keys = this->pair(k);
        UNROLL
        for (int e = 0; e < 4; e++) {
            const float key = e % 2 == 0 ? keys.x : keys.y;
            x[e] = Edge ? -slope[e / 2] * fabsf(from_ref[e / 2] - key) : slope[e / 2] * key;
        }
    }
};
template <> struct FlashStart<FlashBias::Linear> : FlashLine<FlashDistances<FlashBias::Linear>> {
    using FlashLine::FlashLine;

    __device__ void rows(const FlashArgs&, int i) {
        UNROLL
        for (int own = 0; own < FLASH_OWN; own++) {
            slope[own] = places.slope(i);
            S[8 * own] = (float)((i + 8 * own) % FLASH_TILE);
        }
    }
    __device__ void fetch(const FlashArgs&, int) {}
    __device__ void put(int stage, const FlashArgs& args, int n) const {
        const int t = threadIdx.x;
        if (t >= FLASH_TILE) { return; }
        FlashKeyS* to = this->stage(stage);
        const int reference = imin(flash_reference(n, m), args.T - 1);
        const int j = n * FLASH_TILE + t;
        to->S[t] = (float)(n > m ? reference - j : j - reference);
        if (t > 0) { return; }
        to->sign = n > m ? -1.0f : 1.0f;
        to->shift[0] = to->sign * (float)(m * FLASH_TILE - reference);
        to->shift[1] = 0.0f;
    }
};
template <> struct FlashStart<FlashBias::Distance> : FlashLine<FlashCable<FlashBias::Distance>> {
    using FlashLine::FlashLine;

    __device__ void rows(const FlashArgs& args, int i) {
        UNROLL
        for (int own = 0; own < FLASH_OWN; own++) {
            slope[own] = i + 8 * own < args.T ? places.slope(i + 8 * own) : 0.0f;
            put_row(own, args, i + 8 * own);
        }
    }
};

// log2(1 + a^2), finite for any a
__device__ inline float flash_log(float a) {
    a = fminf(fabsf(a), 1e18f);
    return lg2(1.0f + a * a);
}
// B = -g_i log2(1 + D^2) / log2 e, D = S_i - S_j, is added to the exponent like any bias: a factor (1 + D^2)^-g_i after
// the exponential would be 0 where the exponential overflows.
template <> struct FlashStart<FlashBias::LogDistance> : FlashCable<FlashBias::LogDistance> {
    static constexpr bool EDGE = false;
    float inner[FLASH_OWN];                                 // the factor of D inside the logarithm
    using FlashCable::FlashCable;

    __device__ void rows(const FlashArgs& args, int i) {
        UNROLL
        for (int own = 0; own < FLASH_OWN; own++) {
            const float g = i + 8 * own < args.T ? places.g(i + 8 * own) : 0.0f;
            slope[own] = (args.inside ? 1.0f : g) * (LN2 / args.scale);
            inner[own] = args.inside ? g : 1.0f;
            put_row(own, args, i + 8 * own);
        }
    }
    template <bool Causal, bool Edge> __device__ void pairs(float (&x)[4], int k) const {
        const float2 keys = pair(k);
        UNROLL
        for (int e = 0; e < 4; e++) {
            const int own = e / 2;
            x[e] = -slope[own] * flash_log(inner[own] * (from_ref[own] - (e % 2 == 0 ? keys.x : keys.y)));
        }
    }
};

// ----------------------------------------------------------------------------------------------------------
// Toeplitz, Fire: functions of j - i, from a table. Entry t of a stage is for j - i = j0 - i0 + t - 63

template <FlashBias Kind> struct FlashTable {
    static constexpr bool EDGE = false;
    const int m, h;                                         // the queries' tile, the head
    float* stages;
    float value = 0.0f;                                     // the thread's entry for the next tile
    const float* entry;                                     // of the lane's first row and column of the current tile
    // Row group + 8 at column c + 8 has the diagonal of row group at column c, so each entry is read once
    float at[FLASH_OWN][2];                                 // entries of the lane's rows, at these 8 columns
    float row_bias[FLASH_OWN] = {};

    __device__ FlashTable(const FlashArgs& args, int bh, int m, float* shared)
        : m(m), h(bh % args.NH), stages(shared), entry(nullptr) {}
    // table: of table_entries
    __device__ void fetch_entry(const FlashArgs& args, const float* table, int n) {
        const int place = args.table_zero + (n - m) * FLASH_TILE + (int)threadIdx.x - (FLASH_TILE - 1);
        value = table[clamp(place, 0, args.table_entries - 1)];
    }
    __device__ void put_entry(int stage, float x) const { stages[stage * FLASH_STAGE + threadIdx.x] = x; }
    template <bool Edge> __device__ void meet(const FlashArgs&, int stage, int) {
        entry = stages + stage * FLASH_STAGE + (FLASH_TILE - 1) + flash_lane_column() - flash_lane_row();
        at[0][0] = entry[-8];
        at[0][1] = entry[-7];
    }
    __device__ void next(int k) {
        at[1][0] = at[0][0];
        at[1][1] = at[0][1];
        at[0][0] = entry[8 * k];
        at[0][1] = entry[8 * k + 1];
    }
};
template <> struct FlashStart<FlashBias::Toeplitz> : FlashTable<FlashBias::Toeplitz> {
    static constexpr int SHARED = 2 * FLASH_STAGE;
    using FlashTable::FlashTable;

    __device__ void rows(const FlashArgs&, int) {}
    __device__ void fetch(const FlashArgs& args, int n) {
        fetch_entry(args, args.table + (size_t)h * args.table_entries, n);
    }
    __device__ void put(int stage, const FlashArgs& args, int) const { put_entry(stage, value / args.scale); }
    template <bool Causal, bool Edge> __device__ void pairs(float (&x)[4], int k) {
        next(k);
        UNROLL
        for (int e = 0; e < 4; e++) { x[e] = at[e / 2][e % 2]; }
    }
};

// ----------------------------------------------------------------------------------------------------------
// the backward: queries, and where their S is counted from

// A query as its logits need it, logits over scale, like q.k. Padding, and the rows after T, have start = -inf: P = 0.
struct alignas(16) FlashQuery {
    float start;        // -lse / scale; Distance: plus the part of B that all keys share, unless they are the own tile
    float minus_dot;    // -row_dot
    float weight;       // of its distances. Linear: slope / scale.  Distance: g / scale.  LogDistance: g.  Fire: 1/norm
                        // g is times the query's factor
    float place;        // S, counted from FlashQueries::from. Linear: the position.  Fire: the norm's derivative
};

// The queries of a tile, with S counted from the chunk's origin, or from the tile's first or last row, whichever is
// nearer to the tile that meets it: S_i and S_j then differ in sign, or neither has lost a bit, and nothing cancels.
// docs/attention.md, "Where S is counted from".
enum FlashFrom { FROM_CHUNK, FROM_FIRST, FROM_LAST };
struct alignas(8) FlashS {              // S in two parts: a difference has only the rounding of its own size
    float high, low;
    __device__ static FlashS of(double S) { return {(float)S, (float)(S - (double)(float)S)}; }
    __device__ float minus(const FlashS& other) const { return (high - other.high) + (low - other.low); }
};
struct alignas(16) FlashQueries {
    FlashQuery row[FLASH_TILE];
    FlashS from, unused;                                    // S of that token or origin; padded to 16 bytes
};
// On which side of the queries of tile m the keys of tile n are: 1 left, -1 right, 0 both. Edge: m and n may be equal
template <bool Causal, bool Edge> __device__ inline float flash_side(int m, int n) {
    if (Edge && m == n) { return 0.0f; }
    return Causal || n < m ? 1.0f : -1.0f;
}

// ----------------------------------------------------------------------------------------------------------
// the backward: B in two logits, and the sums of their gradients

// B_ij: columns outside the table read its nearest end, and are masked
__device__ inline float flash_table(const FlashArgs& args, int h, int i, int j) {
    const int entry = clamp(args.table_zero + j - i, 0, args.table_entries - 1);
    return args.table[(size_t)h * args.table_entries + entry];
}

// The bias of two neighbouring logits of an owned row: two keys of a query, or two queries of a key. None: no bias.
//   start      the value from which a logit's product starts, over scale, so that the tensor cores add it.
//              key: the key's place, counted like its query's. side: flash_side. unit: 1 / scale
//   gradient   adds the terms of log2 P that start left out, and keeps their derivatives for the sums
//   to_query   dq kernel: adds dlogit to the sums over a tile of keys: `sum`, for the row part of dS, and dg
//   to_key     dkdv kernel: adds dlogit to the column part of dS
//   finish     adds a tile's sums to dg of a query
//   fill       weight and place of query t, S counted from its chunk
// turned: dlogit, or -dlogit where i < j on a bidirectional diagonal, where each pair has its own sign
template <FlashBias Kind> struct FlashTerms {
    // what the kernels do for the bias
    static constexpr bool PLACES = false;                   // start reads the key's place
    static constexpr bool SUMS_ROWS = false;                // dlogit is summed by rows and columns: dS, dg
    static constexpr bool SIGNED = false;                   // in these sums pairs with i < j have the other sign
    static constexpr bool DIAGONALS = false;                // dlogit is summed along the diagonals of a table
    static constexpr bool PIECES = false;                   // dlogit is summed by the pieces of Fire's f
    float distance[2];                                      // SUMS_ROWS: S_i - S_j

    __device__ static float start(float, const FlashQuery& query, float, float, float) { return query.start; }
    __device__ void gradient(float (&)[2], const FlashQuery (&)[2], bool) {}
    __device__ void to_query(float&, float&, int, float, float, float, float) const {}
    __device__ void to_key(float&, int, float, float, float) const {}
    __device__ static void finish(float&, float, float, float, float) {}
    __device__ static void fill(FlashQuery&, const FlashArgs&, size_t /*bh*/, size_t /*h*/, size_t /*t*/) {}
};
template <> struct FlashTerms<FlashBias::Linear> : FlashTerms<FlashBias::None> {
    static constexpr bool PLACES = true;
    __device__ static void fill(FlashQuery& query, const FlashArgs& args, size_t, size_t h, size_t t) {
        query.weight = args.slopes[h] / args.scale;
        query.place = (float)t;
    }
    __device__ static float start(float, const FlashQuery& query, float key, float, float) {
        return query.start - query.weight * fabsf(query.place - key);
    }
};
template <> struct FlashTerms<FlashBias::Toeplitz> : FlashTerms<FlashBias::None> {
    static constexpr bool DIAGONALS = true;
    __device__ static float start(float, const FlashQuery& query, float entry, float, float unit) {
        return query.start + unit * entry;
    }
};
template <> struct FlashTerms<FlashBias::Fire> : FlashTerms<FlashBias::None> {
    static constexpr bool PIECES = true;
    __device__ static void fill(FlashQuery& query, const FlashArgs& args, size_t, size_t, size_t t) {
        query.weight = args.inv[t];
        query.place = args.dnorm[t];
    }
    __device__ static float start(float B, const FlashQuery& query, float, float, float) { return B + query.start; }
};
template <> struct FlashTerms<FlashBias::Distance> : FlashTerms<FlashBias::None> {
    static constexpr bool PLACES = true, SUMS_ROWS = true;
    static constexpr bool SIGNED = true;
    __device__ static void fill(FlashQuery& query, const FlashArgs& args, size_t bh, size_t, size_t t) {
        query.weight = args.factor_of(bh, (int)t) * args.g[bh * args.stride + t] / args.scale;
        query.place = args.S_offset[bh * args.stride + t];
    }
    __device__ static float start(float, const FlashQuery& query, float key, float side, float) {
        float score = query.start;
        if (side == 0.0f) { score -= query.weight * fabsf(query.place - key); }
        else { score += side * query.weight * key; }
        return score;
    }
    __device__ void to_query(float& sum, float& dg, int k, float dlogit, float turned, float key, float side) const {
        sum += turned;
        dg += dlogit * (side == 0.0f ? -fabsf(distance[k]) : key);
    }
    __device__ void to_key(float& dS, int, float, float turned, float weight) const { dS += weight * turned; }
    // keys on one side: -sum dlogit |S_i - S_j| = side (sum dlogit S_j - S_i sum dlogit)
    __device__ static void finish(float& all, float dg, float sum, float place, float side) {
        all += side == 0.0f ? dg : side * (dg - place * sum);
    }
};
template <> struct FlashTerms<FlashBias::LogDistance> : FlashTerms<FlashBias::None> {
    static constexpr bool PLACES = true, SUMS_ROWS = true;
    float bend[2];                                          // a / (1 + a^2) of a = h (S_i - S_j)
    float by_g[2];                                          // -dB/dg

    __device__ static void fill(FlashQuery& query, const FlashArgs& args, size_t bh, size_t, size_t t) {
        query.weight = args.factor_of(bh, (int)t) * args.g[bh * args.stride + t];
        query.place = args.S_offset[bh * args.stride + t];
    }

    // -w log(1 + (h D)^2), with h = g and w = 1 if inside, else h = 1 and w = g. Two quotients share a reciprocal; 1e9
    // keeps the product of their divisors finite
    __device__ void gradient(float (&x)[2], const FlashQuery (&query)[2], bool inside) {
        float a[2], u[2], log[2];
        UNROLL
        for (int k = 0; k < 2; k++) {
            a[k] = fmaxf(-1e9f, fminf(1e9f, (inside ? query[k].weight : 1.0f) * distance[k]));
            u[k] = 1.0f + a[k] * a[k];
            log[k] = lg2(u[k]);
        }
        const float both = rcp(u[0] * u[1]);
        UNROLL
        for (int k = 0; k < 2; k++) {
            bend[k] = a[k] * (both * u[1 - k]);
            by_g[k] = inside ? 2.0f * bend[k] * distance[k] : LN2 * log[k];
            x[k] -= (inside ? 1.0f : query[k].weight) * log[k];
        }
    }
    __device__ void to_query(float& sum, float& dg, int k, float dlogit, float, float, float) const {
        sum += dlogit * bend[k];
        dg -= dlogit * by_g[k];
    }
    __device__ void to_key(float& dS, int k, float dlogit, float, float weight) const {
        dS += weight * (dlogit * bend[k]);
    }
};

// How many FlashQueries each tile has, and which of them an owned tile meets
__host__ __device__ constexpr int flash_variants(FlashBias Kind) { return flash_is_cable(Kind) ? 3 : 1; }
template <FlashBias Kind> __device__ inline FlashFrom flash_from(int streamed, int owned) {
    if (flash_variants(Kind) == 1 || streamed == owned) { return FROM_CHUNK; }
    return streamed > owned ? FROM_FIRST : FROM_LAST;
}

// ----------------------------------------------------------------------------------------------------------
// Fire in both passes: f of y_ij = psi(|i-j|) / norm(max(i,j)), f piecewise linear (position/fire.cuh), and the sums of
// dlogit that its gradients are made of
//
// y is monotonic in the distance and in the later position, so for a few rows and columns y lies between its values at
// two corners. A warp counts the breaks below both (each lane has one of the 32 breaks). With `base` the piece of the
// lower corner
//   f(y) = line of piece `base` + sum over the breaks t between the corners of bend_t max(0, y - t)
// is a loop in which no lanes diverge, and seldom has more than one turn: docs/attention.md, "FIRE on the tensor
// cores".

static_assert(FIRE_UNITS == 32, "a lane of a warp has one break");
static_assert(FIRE_SUMS == 4, "flash_warp_sums");

// f of one head, and the pieces of the current pairs
struct FlashFire {
    const FirePiece* piece;         // (FIRE_PIECES) in shared memory, over the scale: in the unit of q.k
    float end;                      // of the lane's piece
    int base, last;                 // the first and the last piece of the current pairs

    // All threads of the block call it; the pieces may be read after the next barrier.
    __device__ void stage(FirePiece* to, const FlashArgs& args, int h) {
        const FirePiece* from = args.pieces + (size_t)h * FIRE_PIECES;
        piece = to;
        end = from[threadIdx.x % 32].end;
        constexpr int FLOATS = sizeof(FirePiece) / sizeof(float);
        for (int e = threadIdx.x; e < FLOATS * FIRE_PIECES; e += blockDim.x) {      // all but `end` are values of B
            const float x = ((const float*)from)[e];
            ((float*)to)[e] = e % FLOATS == 2 ? x : x / args.scale;
        }
    }
    // psi of the distance of two positions, cut off: masked pairs may be further apart than any two tokens
    __device__ static int distance(const FlashArgs& args, int i, int j) {
        return imin(i > j ? i - j : j - i, args.table_zero);
    }
    __device__ static float psi(const FlashArgs& args, int i, int j) {
        return args.table[args.table_zero - distance(args, i, j)];
    }
    // A whole warp calls it before the pairs of these rows and columns; rows or columns may be the queries
    __device__ void meet(const FlashArgs& args, int row, int rows, int column, int columns) {
        const int row_end = row + rows - 1;
        const int column_end = column + columns - 1;
        const int gap = imax(0, imax(row - column_end, column - row_end));          // the smallest distance
        const int early = imax(row, column);                                        // the smallest later position
        const float low = psi(args, gap, 0) * args.inv[imax(row_end, column_end)];
        const float high = psi(args, imax(row_end - column, column_end - row), 0) * args.inv[early];
        base = count_lanes(end <= low);
        last = count_lanes(end <= high);
    }
    // f of each y, over the scale: arrays, or fragments
    template <class Values> __device__ void apply(Values& f, const Values& y) const {
        constexpr int N = sizeof(Values) / sizeof(float);
        const FirePiece line = piece[base];
        UNROLL
        for (int e = 0; e < N; e++) { f[e] = line.value + line.slope * y[e]; }
        for (int k = base; k < last; k++) {
            const FirePiece kink = piece[k];
            UNROLL
            for (int e = 0; e < N; e++) { f[e] += kink.bend * fmaxf(0.0f, y[e] - kink.end); }
        }
    }
};

// sums over the warp: lane l returns the sum of x[l % 4]
__device__ inline float flash_warp_sums(const float (&x)[4]) {
    const bool odd = threadIdx.x % 2 == 1;
    const bool upper = threadIdx.x / 2 % 2 == 1;
    float a = (odd ? x[1] : x[0]);
    float b = (odd ? x[3] : x[2]);
    a += shuffle_xor(odd ? x[0] : x[1], 1);                 // of two lanes: each has two of the four sums
    b += shuffle_xor(odd ? x[2] : x[3], 1);
    float sum = upper ? b : a;
    sum += shuffle_xor(upper ? a : b, 2);                   // of four lanes: each has one
    UNROLL
    for (int o = 4; o < 32; o *= 2) { sum += shuffle_xor(sum, o); }
    return sum;
}

// A warp's sums over its queries and all their keys, in shared memory: for each piece dlogit, dlogit y, dlogit dy/d|c|,
// -dlogit dy/dL. Lanes 0 to 3 add one of the four each, in float64, because the terms cancel: each row of dlogit sums
// to 0.
struct FlashFireSums {
    double* of;                     // (FIRE_PIECES,FIRE_SUMS)

    __device__ void clear() const {
        for (int e = threadIdx.x % 32; e < FIRE_PIECES * FIRE_SUMS; e += 32) { of[e] = 0.0; }
        syncwarp();
    }
    // Adds the pairs of FlashFire::meet: all to the first piece; then, break by break, pairs above it move on.
    template <class Values>
    __device__ void add(const FlashFire& fire, const Values& dlogit, const Values& y, const Values& by_c,
                        const Values& by_L) const {
        const int lane = threadIdx.x % 32;
        for (int k = fire.base; k <= fire.last; k++) {
            const float above = k == fire.base ? -INFINITY : fire.piece[k - 1].end;
            float sum[FIRE_SUMS] = {};
            UNROLL
            for (int e = 0; e < Values::SIZE; e++) {
                const float d = y[e] >= above ? dlogit[e] : 0.0f;
                sum[0] += d;
                sum[1] += d * y[e];
                sum[2] += d * by_c[e];
                sum[3] += d * by_L[e];
            }
            const double moved = (double)flash_warp_sums(sum);
            if (lane >= FIRE_SUMS) { continue; }
            of[k * FIRE_SUMS + lane] += moved;
            if (k > fire.base) { of[(k - 1) * FIRE_SUMS + lane] -= moved; }
        }
        syncwarp();
    }
};

// sums (B*NH,FIRE_SLOTS,FIRE_PIECES,FIRE_SUMS): a head's first slot becomes the sum of its blocks' partial sums, in
// order. One block per head.
static __global__ void flash_backward_fire_kernel(double* sums, const double* partial, int blocks) {
    const size_t size = (size_t)FIRE_PIECES * FIRE_SUMS;
    for (size_t e = threadIdx.x; e < size; e += blockDim.x) {
        double sum = 0.0;
        for (int n = 0; n < blocks; n++) { sum += partial[((size_t)blockIdx.x * blocks + n) * size + e]; }
        sums[blockIdx.x * FIRE_SLOTS * size + e] = sum;
    }
}

// The table is psi; the pieces of f lie behind the stages
template <> struct FlashStart<FlashBias::Fire> : FlashTable<FlashBias::Fire> {
    static constexpr int SHARED = 2 * FLASH_STAGE + (int)(sizeof(FirePiece) / sizeof(float)) * FIRE_PIECES;
    FlashFire fire = {};
    const float* key_inv = nullptr;                         // 1 / norm of the lane's first key of the current tile
    float inv[FLASH_OWN];                                   // 1 / norm of the lane's rows
    using FlashTable::FlashTable;

    __device__ void rows(const FlashArgs& args, int i) {
        fire.stage((FirePiece*)(stages + 2 * FLASH_STAGE), args, h);
        UNROLL
        for (int own = 0; own < FLASH_OWN; own++) { inv[own] = args.inv[imin(i + 8 * own, args.T)]; }
    }
    __device__ void fetch(const FlashArgs& args, int n) { fetch_entry(args, args.table, n); }
    __device__ void put(int stage, const FlashArgs&, int) const { put_entry(stage, value); }
    template <bool Edge> __device__ void meet(const FlashArgs& args, int stage, int n) {
        const int row0 = m * FLASH_TILE + (int)threadIdx.x / 32 * FLASH_ROWS;
        fire.meet(args, row0, FLASH_ROWS, n * FLASH_TILE, FLASH_TILE);
        key_inv = args.inv + n * FLASH_TILE + flash_lane_column();
        FlashTable::template meet<Edge>(args, stage, n);
    }
    // y; of two 1 / norm the later position has the smaller
    template <bool Causal, bool Edge> __device__ void pairs(float (&x)[4], int k) {
        next(k);
        float y[4];
        UNROLL
        for (int e = 0; e < 4; e++) {
            y[e] = at[e / 2][e % 2] * (Causal ? inv[e / 2] : fminf(inv[e / 2], key_inv[8 * k + e % 2]));
        }
        fire.apply(x, y);
    }
};

// y of the pairs of FlashFire::meet; row, column: the first position of each. row_inv: 1 / norm of the lane's rows
template <int Columns>
__device__ inline void flash_fire_y(FlashFragment<Columns>& y, const FlashArgs& args, const float (&row_inv)[FLASH_OWN],
                                    const FlashQuery* streamed, int row, int column) {
    const int group = threadIdx.x % 32 / 4;
    UNROLL
    for (int e = 0; e < y.SIZE; e++) {
        const int own = y.own(e);
        const int c = y.column(e);
        // of two 1 / norm the later position has the smaller
        const float inv = fminf(row_inv[own], streamed[c].weight);
        y[e] = FlashFire::psi(args, row + group + 8 * own, column + c) * inv;
    }
}

// Adds the pairs of FlashFire::meet to the warp's sums. Hidden pairs have dlogit 0 and a finite y.
template <int Columns>
__device__ inline void flash_fire_sum(const FlashFireSums& sums, const FlashFire& fire,
                                      const FlashFragment<Columns>& dlogit, const FlashFragment<Columns>& y,
                                      const FlashArgs& args, const FlashQuery (&own_query)[2], const FlashQuery* key,
                                      int row, int column) {
    const float* dL = args.dnorm + args.table_zero + 1 + TOEPLITZ_PAD;      // d norm / dL of each position: descending
    FlashFragment<Columns> by_c;
    FlashFragment<Columns> by_L;
    UNROLL
    for (int e = 0; e < y.SIZE; e++) {
        const FlashQuery& query = own_query[y.own(e)];
        const int c = y.column(e);
        const int i = row + (int)threadIdx.x % 32 / 4 + 8 * y.own(e);
        const int j = column + c;
        const float inv = fminf(query.weight, key[c].weight);       // of the later position, as are the next two
        const float dnorm = fmaxf(query.place, key[c].place);
        by_c[e] = (args.dpsi[args.table_zero - FlashFire::distance(args, i, j)] - y[e] * dnorm) * inv;
        by_L[e] = y[e] * inv * dL[imax(i, j)];
    }
    sums.add(fire, dlogit, y, by_c, by_L);
}

// ----------------------------------------------------------------------------------------------------------
// Linear, Distance: tiles of keys that the bias has zeroed are found before attention runs, and not read
//
// S grows with j, so with scale2 = scale log2 e, in units of log2 and for all keys j of the tiles 0 .. n left of query
// i, and (bidirectional) of the tiles from n on right of it,
//   x_ij <= scale2 |q_i| max |k_j| - log2 e g_i (S_i - S_end(n)),      which grows with n,
//   x_ij <= scale2 |q_i| max |k_j| - log2 e g_i (S_begin(n) - S_i),    which falls with n,
// and the row's maximum is at least the logit of its own key, which has no bias and is in the first tile of the loop. A
// tile whose bound is more than tau below that is skipped. tau = 128: ex2 would return +0 for each of its keys, so no
// bit differs; tau = 24 + log2 T: a row's sum loses less than 2^-24 of itself. docs/attention.md, "Skipping tiles with
// a bound".

// 1. for each tile n, the longest key of the tiles up to n and of those from n on

// sum_d x_d y_d of four elements, in two words of two bf16
__device__ inline float flash_words_dot(uint32_t x0, uint32_t x1, uint32_t y0, uint32_t y1) {
    return unpack_lo(x0) * unpack_lo(y0) + unpack_hi(x0) * unpack_hi(y0) + unpack_lo(x1) * unpack_lo(y1) +
           unpack_hi(x1) * unpack_hi(y1);
}
// sum_d x_d y_d of a row of HS, half by this thread and half by its neighbour; both get the whole sum
__device__ inline float flash_half_dot(const bf16* x, const bf16* y, int HS) {
    float sum = 0.0f;
    for (int d = threadIdx.x % 2 * 8; d < HS; d += 16) {
        const uint4 a = *(const uint4*)(x + d);
        const uint4 b = *(const uint4*)(y + d);
        sum += flash_words_dot(a.x, a.y, b.x, b.y);
        sum += flash_words_dot(a.z, a.w, b.z, b.w);
    }
    return sum + shuffle_xor(sum, 1);
}

// key_norm (B*NH,tiles), bidirectional twice: max |k_j| of each tile, 0 after the last key. One block per tile.
template <bool Causal> __global__ void flash_key_norm_kernel(float* key_norm, FlashArgs args) {
    const int tiles = ceil_div(args.T, FLASH_TILE);
    const int bh = blockIdx.x / tiles;
    const int n = blockIdx.x % tiles;
    const int j = n * FLASH_TILE + (int)threadIdx.x / 2;    // two threads per key
    const int b = bh / args.NH;
    const bool token = j < flash_tokens(args, b);
    const size_t row = (size_t)b * args.stride + (token ? j : 0);
    const bf16* k = args.qkv + row * args.OC + (args.NH + bh % args.NH) * args.HS;
    float norm = sqrtf(flash_half_dot(k, k, args.HS));
    norm = norm < INFINITY ? norm : INFINITY;               // a NaN too: then nothing is skipped
    const float largest = block_max(token ? norm : 0.0f);
    if (threadIdx.x == 0) {
        key_norm[blockIdx.x] = largest;
        if (!Causal) { key_norm[gridDim.x + blockIdx.x] = largest; }
    }
}

// The first key_norm becomes the maximum over the tiles 0 .. n, the second over the tiles from n on. One warp per
// (batch, head) and direction, 32 tiles at a time.
__global__ void flash_key_norm_scan_kernel(float* key_norm, int tiles, int BNH) {
    const int lane = threadIdx.x;
    const bool mirrored = (int)blockIdx.x >= BNH;
    float before = 0.0f;                                    // the maximum over all tiles before these 32
    key_norm += (size_t)blockIdx.x * tiles;
    for (int base = 0; base < tiles; base += 32) {
        const bool exists = base + lane < tiles;
        const int n = mirrored ? tiles - 1 - (base + lane) : base + lane;
        float x = fmaxf(before, exists ? key_norm[n] : 0.0f);
        // after step o a lane has the maximum over the 2 o lanes up to its own
        for (int o = 1; o < 32; o *= 2) { x = fmaxf(x, shuffle(x, lane >= o ? lane - o : lane)); }
        if (exists) { key_norm[n] = x; }
        before = shuffle(x, 31);
    }
}

// 2. the spans

// One block per span of 64 queries, two threads per query: the union of the spans that the rows find by bisection.
template <bool Causal, FlashBias Kind>
__global__ void flash_skip_kernel(FlashSpan* span, const float* key_norm, FlashArgs args, float tau) {
    static_assert(flash_skips(Kind), "nothing to skip");
    const int tiles = ceil_div(args.T, FLASH_TILE);
    const int bh = blockIdx.x / tiles;
    const int m = blockIdx.x % tiles;                       // the tile of the queries
    const int b = bh / args.NH;
    const int i = m * FLASH_TILE + (int)threadIdx.x / 2;
    const int keys = flash_tokens(args, b);
    const bool token = i < keys;
    const int row = token ? i : 0;
    const bf16* q = args.qkv + ((size_t)b * args.stride + row) * args.OC + bh % args.NH * args.HS;
    const float norm = sqrtf(flash_half_dot(q, q, args.HS));
    const float own_score = flash_half_dot(q, q + args.NH * args.HS, args.HS);      // q_i.k_i
    const float scale2 = args.scale * LOG2E;
    const FlashPlaces<Kind> places = {args, bh};
    const float slope = LOG2E * args.scale * places.slope(row);     // log2 e g_i
    const float least = scale2 * own_score - tau;           // a tile whose bound is below this is skipped
    int low = 0;                                            // tiles below `low` are skipped,
    int high = token ? m : 0;                               // tiles from `high` on are not
    while (low < high) {
        const int n = (low + high) / 2;
        const float score = scale2 * norm * key_norm[(size_t)bh * tiles + n];       // at most
        const float bound = score - slope * places.distance(row, n * FLASH_TILE + FLASH_TILE - 1);
        if (bound < least) { low = n + 1; }
        else { high = n; }
    }
    const float first = -block_max(token ? -(float)low : -(float)m);
    if (threadIdx.x == 0) { span[blockIdx.x] = {(int)first, m}; }
    if (Causal) { return; }
    low = m + 1;                                            // now tiles below `low` are not skipped,
    high = ceil_div(keys, FLASH_TILE);                      // tiles from `high` on are; <= m + 1 where rows are padding
    while (low < high) {
        const int n = (low + high) / 2;
        const float score = scale2 * norm * key_norm[(size_t)gridDim.x + bh * tiles + n];
        const float bound = score - slope * places.distance(n * FLASH_TILE, row);
        if (bound < least) { high = n; }
        else { low = n + 1; }
    }
    const float last = block_max((float)(low - 1));
    if (threadIdx.x == 0) { span[blockIdx.x].last = (int)last; }
}

// span (B*NH,ceil(T/64)); key_norm: scratch, two floats per span
template <bool Causal, FlashBias Kind>
void flash_skip(FlashSpan* span, float* key_norm, const FlashArgs& args, float tau, Stream stream) {
    const int tiles = ceil_div(args.T, FLASH_TILE);
    const int BNH = args.B * args.NH;
    const Grid grid((size_t)BNH * tiles, FLASH_THREADS, 0, stream);
    launch(flash_key_norm_kernel<Causal>, grid, key_norm, args);
    launch(flash_key_norm_scan_kernel, Grid((size_t)BNH * (Causal ? 1 : 2), 32, 0, stream), key_norm, tiles, BNH);
    launch(flash_skip_kernel<Causal, Kind>, grid, span, key_norm, args, tau);
}

// The share of tiles that spans (BNH,ceil(T/64)), in host memory, leave alive
inline double flash_live_share(const FlashSpan* span, int BNH, int T, bool causal) {
    const int tiles = ceil_div(T, FLASH_TILE);
    return tile_share(BNH * tiles, tiles, causal, [&](int x) { return span[x].last - span[x].first + 1; });
}
