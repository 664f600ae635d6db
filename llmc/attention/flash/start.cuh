// attention/flash/start.cuh -- what the scores of the forward start from: B over scale, so that the product may add q.k
// to it and no logit waits for an addition.
//
// A FlashStart is a block's bias. Its `shared` has two stages of what a tile of keys brings, then what stays:
//   rows   once: the lane's rows i and i + 8
//   fetch  starts this thread's loads of what the keys of tile n bring; no warp waits for them
//   put    puts it into the tile's stage, when it has arrived
//   meet   once a tile, before its pairs. Edge: the queries' own tile and the last one, with pairs on both sides
//   pairs  B over scale, without row_bias, of the lane's four pairs at the k-th 8 keys
#pragma once

#include "fire.cuh"

constexpr int FLASH_STAGE = 2 * FLASH_TILE;                 // floats
// The lane's first row of the block, and its first column of each 8
__device__ inline int flash_lane_row() { return (int)threadIdx.x / 32 * FLASH_ROWS + (int)threadIdx.x % 32 / 4; }
__device__ inline int flash_lane_column() { return (int)threadIdx.x % 4 * 2; }

// None: B = 0
template <FlashBias Kind> struct FlashStart {
    static constexpr int SHARED = 0;                        // floats
    static constexpr bool EDGE = false;                     // whether pairs of an Edge are computed in another way
    float row_bias[FLASH_OWN] = {};                         // what is added to all logits of a row, over scale

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
    __device__ float slope(int i) const { return g(i) / args.scale; }       // of |S_i - S_j|, in the unit of q.k
};
template <> struct FlashPlaces<FlashBias::Linear> {         // S_i = i
    const FlashArgs& args;
    const int bh;

    __device__ float distance(int i, int j) const { return (float)(i - j); }
    __device__ float slope(int) const { return args.slopes[bh % args.NH] / args.scale; }
};

// What a tile of keys brings. S_ref is S of flash_reference
struct FlashKeyS {
    float S[FLASH_TILE];        // sign (S_j - S_ref)
    float shift[2];             // what makes sign (S_i - S_ref) of the row's sign S_i, in two parts
    float sign;                 // -1 right of the queries: there S_j - S_ref grows with the distance to them
    float unused;
};
static_assert(sizeof(FlashKeyS) <= sizeof(float) * FLASH_STAGE, "room for it");

// The key of tile n from which S is counted: the nearest to the queries of tile m. On the diagonal there is none (-1),
// and S counts from its chunk: the difference of two neighbours is then exact. docs/attention.md, "Where S is counted
// from".
__device__ inline int flash_reference(int n, int m) {
    if (n == m) { return -1; }
    return n < m ? n * FLASH_TILE + FLASH_TILE - 1 : n * FLASH_TILE;
}

template <FlashBias Kind> struct FlashDistances {
    static constexpr int SHARED = 2 * FLASH_STAGE + FLASH_TILE;
    const FlashPlaces<Kind> places;
    const int m;                                            // the queries' tile
    float* stages;
    float* S;                                               // of the row 8 own: registers are scarce
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

// CABLE's: S and g are arrays
template <FlashBias Kind> struct FlashCable : FlashDistances<Kind> {
    float S_far = 0.0f, S_near = 0.0f;                      // the thread's key and S_ref, or the other way round
    double key_origin = 0.0;                                // what they are counted from
    const double origin;                                    // and the queries
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
        S_far = n > m ? S_ref : S_key;
        S_near = n > m ? S_key : S_ref;
        key_origin = t == 0 ? places.origin(j0) : 0.0;
    }
    __device__ void put(int stage, const FlashArgs&, int n) const {
        const int t = threadIdx.x;
        FlashKeyS* to = this->stage(stage);
        if (t >= FLASH_TILE) { return; }
        to->S[t] = S_far - S_near;
        if (t > 0) { return; }
        to->sign = n > m ? -1.0f : 1.0f;
        // Origins and S_ref are added in float64 and handed over in two float32 parts: they cancel in a tile next to
        // the queries', and in one to the right of it the first part cancels with the row's S.
        const double shift = origin - key_origin - (double)(n > m ? S_far : S_near);
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
// B, -g_i log2(1 + (S_i - S_j)^2) / log2 e, is in the exponent and in the running maximum like any other: a factor (1 +
// D^2)^-g_i after the exponential would be 0 where the exponential overflows.
template <> struct FlashStart<FlashBias::LogDistance> : FlashCable<FlashBias::LogDistance> {
    static constexpr bool EDGE = false;
    float inner[FLASH_OWN];                                 // of the distances inside the logarithm
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
// Toeplitz, Fire: functions of j - i, from a table. A tile of keys brings the entries [t] of j - i = j0 - i0 + t - 63

template <FlashBias Kind> struct FlashTable {
    static constexpr bool EDGE = false;
    const int m, h;                                         // the queries' tile, the head
    float* stages;
    float value = 0.0f;                                     // the thread's entry of the tile that is on its way
    const float* entry;                                     // of the lane's first row and column of the current tile
    // Row group + 8 meets at column c + 8 the diagonal that row group meets at column c, so each entry is read once
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
// The table is psi; its pieces lie behind the stages
template <> struct FlashStart<FlashBias::Fire> : FlashTable<FlashBias::Fire> {
    static constexpr int SHARED = 2 * FLASH_STAGE + (int)(sizeof(FirePiece) / sizeof(float)) * FIRE_PIECES;
    FlashFire fire = {};
    const float* key_inv = nullptr;                         // 1 / norm of the lane's first key of the current tile
    float inv[FLASH_OWN];                                   // of its rows
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
    // psi by row and column; 1 / norm of the later position is the smaller one
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
