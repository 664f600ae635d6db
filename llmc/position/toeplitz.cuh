// position/toeplitz.cuh -- biases that depend only on i - j: their table, t5, kerple, bam, sandwich, alibi.
//
//   B_ij = table[h][T-1 + j - i]: T columns if causal (j <= i), else 2T-1. 128 more columns, of finite values, may be
//   read at the masked end of a tile.
//   backward: the functor sums dlogit along diagonals into a slab dtable[b,h]; the encodings sum the slabs over b, in
//   order, into their parameters: t5 by a kernel of its own, the other encodings by sum_diagonals.
#pragma once

#include "../base/math.h"
#include "encoding.cuh"

constexpr int TOEPLITZ_PAD = 128;                           // as wide as a tile may be

__host__ __device__ inline int toeplitz_columns(int T, bool causal) { return (causal ? T : 2 * T - 1) + TOEPLITZ_PAD; }

struct ToeplitzBias : BiasFunctor {
    static constexpr FlashBias flash = FlashBias::Toeplitz;
    const float* table;     // (NH,columns)
    float* dtable;          // (B*NH,columns)
    int NH, columns, T;

    struct Tile {
        const float* at;                                    // the entry of the tile's (0, 0)
        __device__ float operator()(int r, int c) const { return at[c - r]; }
    };
    __device__ Tile tile(int bh, int i0, int j0) const {
        return {table + (size_t)(bh % NH) * columns + (T - 1 + j0 - i0)};
    }
    void fill(FlashBiasArgs& args) const {
        args.table = table;
        args.table_zero = T - 1;
        args.table_entries = columns;
        args.dtable = dtable;
    }

    // d[n]: the tile's diagonal c - r = n - (ni-1)
    __device__ void backward(int bh, int i0, int ni, int j0, int nj, float* dlogit, int ld) const {
        float* d = dtable + (size_t)bh * columns + (T - ni + j0 - i0);
        if (LANES > 1) {                                    // one thread: row by row, in vectors
            float sum[2 * TOEPLITZ_PAD] = {};
            for (int r = 0; r < ni; r++) {
                for (int c = 0; c < nj; c++) { sum[ni - 1 - r + c] += dlogit[r * ld + c]; }
            }
            for (int n = 0; n < ni + nj - 1; n++) { d[n] += sum[n]; }
        } else {                                            // one thread per diagonal
            for (int n = threadIdx.x; n < ni + nj - 1; n += blockDim.x) {
                const int r0 = imax(ni - 1 - n, 0);         // the rows r0 .. r1-1 have a part of the diagonal
                const int r1 = imin(ni, ni + nj - 1 - n);
                float sum = 0.0f;
                for (int r = r0; r < r1; r++) { sum += dlogit[r * ld + n - (ni - 1) + r]; }
                d[n] += sum;
            }
        }
        __syncthreads();                                    // other threads get these diagonals in the next tile
    }
};

// One block per head: table[h] = value(h, i - j)
template <class Value>
static __global__ void toeplitz_fill_kernel(float* table, Value value, int T, int columns) {
    const int h = blockIdx.x;
    for (int n = threadIdx.x; n < columns; n += blockDim.x) { table[(size_t)h * columns + n] = value(h, T - 1 - n); }
}

// One block per head: gradient[h] += sum over the diagonals of value.term(n, h, i - j, dB), dB being the gradient of
// that diagonal's bias, summed over the batch. In double, because the terms cancel: each row of dlogit sums to 0.
template <class Value>
static __global__ void toeplitz_gradient_kernel(float* gradient, const float* dtable, Value value, int n, int B, int T,
                                                int NH, int columns) {
    const int h = blockIdx.x;
    double sum = 0.0;
    for (int at = threadIdx.x; at < columns - TOEPLITZ_PAD; at += blockDim.x) {        // i - j = T - 1 - at
        float dB = 0.0f;
        for (int b = 0; b < B; b++) { dB += dtable[((size_t)b * NH + h) * columns + at]; }
        sum += (double)value.term(n, h, T - 1 - at, dB);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { gradient[h] += (float)sum; }
}

struct Toeplitz : Encoding {
    using Encoding::Encoding;
    float* table = nullptr;                                 // (NH,columns)
    float* dtable = nullptr;                                // (B*NH,columns)

    // Per::Model: all layers share the table, and the first one fills it
    template <class Tensors> void declare_table(Tensors& t, Per per) {
        const size_t columns = (size_t)toeplitz_columns(t.stride, t.causal);
        t.cached(table, "bias_table", per, (size_t)t.NH, columns);
        t.scratch(dtable, "dbias_table", (size_t)t.B * t.NH, columns);
    }
    int columns() const { return toeplitz_columns(v.stride, v.causal); }
    // B_ij = value(h, i - j); filled when a text begins, for the longest text
    template <class Value> void fill_table(const Value& value, int t0, Stream stream) const {
        if (t0 > 0) { return; }
        launch(toeplitz_fill_kernel<Value>, Grid((size_t)v.NH, 128, 0, stream), table, value, v.stride, columns());
    }
    // gradient (NH), of the n-th parameter p of each head, += the sum over the distances d of dB_d * dvalue(h, d)/dp_h,
    // a product that value.term(n, h, d, dB_d) returns.
    template <class Value>
    void sum_diagonals(float* gradient, const Value& value, int B, Stream stream, int n = 0) const {
        launch(toeplitz_gradient_kernel<Value>, Grid((size_t)v.NH, 128, 0, stream), gradient, dtable, value, n, B,
               v.stride, v.NH, columns());
    }
    void begin_backward(const floatX*, int B, int, Stream stream) const {
        device_zero(dtable, sizeof(float) * B * v.NH * columns(), stream);
    }
    ToeplitzBias bias() const { return {{}, table, dtable, v.NH, columns(), v.stride}; }
};

// ----------------------------------------------------------------------------------------------------------
// t5: a learned bias for each class of distances, for all layers or for each layer
//
//   t5 (Raffel et al. 2020, 2.1): B_ij = r[bucket(i-j)][h]. If causal, all `buckets` (32) are for keys before the
//   query, else half of them for either side. Half of a side's buckets are single distances; then buckets grow in
//   equal steps of log(distance) up to `distance` (128), and the last bucket has no end.
//   t5_clip (as the CABLE paper prints it): causal B_ij = r[min(i-j,K)][h], else r[K + clip(i-j,-K,K)][h]. The paper's
//   code has K=256, a table for each layer (layers=own), and divides q.k by sqrt(C) (scale=C), not by sqrt(HS).
//   backward: dr[e][h] += sum over layers, sequences and the diagonals of entry e, which lie side by side.

struct DistanceRange { int lo, hi; };                       // lo <= i - j < hi

// A map of t5: the entry of r for a distance, the distances of an entry
struct T5Buckets {
    static constexpr int MOST = 128;
    int first[MOST + 1];                                    // the smallest distance of each bucket of a side
    int side;                                               // how many buckets a side has
    bool two_sided;

    static Hyperparameters defaults(int) { return {{"buckets", 32}, {"distance", 128}}; }
    static int entries(const EncodingConfig& config, bool) {
        const double n = config.value("buckets");
        const double reach = config.value("distance");
        check(n == 4 * std::floor(n / 4) && n <= MOST, "--pos t5: expected buckets in fours up to %d, got %g", MOST, n);
        check(reach == std::floor(reach) && reach > n / 2 && reach <= 1 << 24,
              "--pos t5: expected a whole distance above half of the %g buckets and at most 2^24, got %g", n, reach);
        return (int)n;
    }
    T5Buckets(const EncodingConfig& config, bool causal) : two_sided(!causal) {
        const int count = entries(config, causal);
        side = causal ? count : count / 2;
        const int exact = side / 2;
        for (int k = 0; k <= MOST; k++) {
            // 1e-9: distances that begin a bucket exactly, such as 16, 32 and 64, must not be lost to rounding
            const double step = (double)(imin(k, side) - exact) / exact;
            const double begin = exact * portable_pow(config.value("distance") / exact, step) - 1e-9;
            const int logarithmic = k < side ? (int)std::ceil(begin) : INT_MAX;
            first[k] = k < exact ? k : logarithmic;
        }
    }
    __device__ int entry(int d) const {
        const int after = two_sided ? -d : 0;               // how far the key is after the query; 0 if causal
        const int distance = d >= 0 ? d : after;
        int k = 0;                                          // how many buckets begin at or before it
        for (int e = 1; e < side; e++) { k += first[e] <= distance; }
        return d < 0 && two_sided ? k + side : k;
    }
    __device__ DistanceRange range(int e) const {
        if (e < side) { return {first[e], first[e + 1]}; }
        const int k = e - side;                             // a bucket of keys after the query: distances below 0
        return {-(first[k + 1] - 1), k == 0 ? 0 : -(first[k] - 1)};
    }
};

struct T5Distances {
    int K, before;                                          // before: entries for keys after the query, 0 if causal

    static Hyperparameters defaults(int T_train) {
        return {{"K", T_train - 1.0}, {"scale", 0, "HS|C"}, {"layers", 0, "shared|own"}};
    }
    static int entries(const EncodingConfig& config, bool causal) {
        const double K = config.value("K");
        check(K == std::floor(K) && K >= 0 && K <= 1 << 24, "--pos t5_clip: K is %g, it must be a whole number "
              "of at most 2^24", K);
        return (int)K * (causal ? 1 : 2) + 1;
    }
    T5Distances(const EncodingConfig& config, bool causal) : K((int)config.value("K")), before(causal ? 0 : K) {}
    __device__ int entry(int d) const { return before + clamp(d, -before, K); }
    __device__ DistanceRange range(int e) const {
        const int d = e - before;                           // the end entries own all distances beyond
        const int lo = e == 0 && before > 0 ? -INT_MAX : d;
        const int hi = d == K ? INT_MAX : d + 1;
        return {lo, hi};
    }
};

// B_ij of head h at distance i - j
template <class Map> struct T5Value {
    const float* r;             // (entries,NH)
    Map map;
    int NH;
    __device__ float operator()(int h, int distance) const { return r[(size_t)map.entry(distance) * NH + h]; }
};

// dr[e][h] += the sum over the diagonals of entry e, sequence by sequence. One block per entry and head.
template <class Map>
static __global__ void t5_backward_kernel(float* dr, const float* dtable, Map map, int B, int T, int NH, int ND) {
    const int e = blockIdx.x / NH;
    const int h = blockIdx.x % NH;
    const DistanceRange range = map.range(e);
    const int lo = imax(range.lo, 1 - T);
    const int hi = imin(range.hi, T);
    const int end = imin(T - lo, ND - TOEPLITZ_PAD);        // columns T - hi .. end-1
    float sum = 0.0f;
    for (int b = 0; b < B; b++) {
        const float* d = dtable + ((size_t)b * NH + h) * ND;
        for (int n = T - hi + (int)threadIdx.x; n < end; n += blockDim.x) { sum += d[n]; }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { dr[(size_t)e * NH + h] += sum; }
}

template <class Map> struct T5Of : Toeplitz {
    using Toeplitz::Toeplitz;
    static constexpr bool clips = std::is_same<Map, T5Distances>::value;
    Parameter r;                                            // (entries,NH)

    static Hyperparameters defaults(int T_train) { return Map::defaults(T_train); }
    template <class Tensors> void declare(Tensors& t) {
        const size_t entries = (size_t)Map::entries(*t.config, t.causal);
        const Per per = own(*t.config) ? Per::Layer : Per::Model;
        t.param(r, "t5", "t5.weight", per, entries, (size_t)t.NH, {normal(0.02f)});
        declare_table(t, per);
    }
    // whether each layer has a table of its own
    static bool own(const EncodingConfig& config) { return clips && config.value("layers") == 1; }
    float score_factor(int) const {
        const bool by_C = clips && v.config->value("scale") == 1;
        return by_C ? sqrtf((float)v.HS / (float)v.C()) : 1.0f;
    }
    void prepare_forward(floatX*, int, int, int t0, Stream stream) const {
        if (v.layer > 0 && !own(*v.config)) { return; }
        fill_table(T5Value<Map>{r.value, Map(*v.config, v.causal), v.NH}, t0, stream);
    }
    void prepare_backward(floatX*, const floatX*, int B, int, Stream stream) const {
        const size_t entries = (size_t)Map::entries(*v.config, v.causal);
        const Map map(*v.config, v.causal);
        launch(t5_backward_kernel<Map>, Grid(entries * v.NH, 32, 0, stream), r.grad, dtable, map, B, v.stride, v.NH,
               columns());
    }
};

using T5 = T5Of<T5Buckets>;
using T5Clip = T5Of<T5Distances>;

// ----------------------------------------------------------------------------------------------------------
// kerple: kernelized relative positions (Chi et al. 2022), two positive scalars for each head and layer
//
//   kerple:        B_ij = -r1 log(1 + r2 |i-j|)     dr1 = -log(1 + r2 d)   dr2 = -r1 d / (1 + r2 d)      d = |i-j|
//   kerple_power:  B_ij = -r1 |i-j|^r2              dr1 = -d^r2            dr2 = -r1 d^r2 log d          0 < r2 <= 2
//   The update keeps r1, r2 >= 0.01 (power: r2 <= 2).

// log(d) and d^p for a whole number d. At d = 0 both are 0; callers multiply the log by d^p.
__host__ __device__ inline float log_distance(float d) { return fast_log1p(d > 1.0f ? d - 1.0f : 0.0f); }
__host__ __device__ inline float power_distance(float d, float p) {
    const float e = fast_exp(p * log_distance(d));
    return d > 0.0f ? e : 0.0f;
}

// B_ij of head h at distance i - j, and dB * dB_ij/dr1 (n = 0) or dB * dB_ij/dr2
template <bool Power> struct KerpleValue {
    const float *r1, *r2;       // (NH)
    __device__ float shape(int h, float d) const { return Power ? power_distance(d, r2[h]) : fast_log1p(r2[h] * d); }
    __device__ float operator()(int h, int distance) const { return -r1[h] * shape(h, fabsf((float)distance)); }
    __device__ float term(int n, int h, int distance, float dB) const {
        const float d = fabsf((float)distance);
        if (n == 0) { return -(dB * shape(h, d)); }
        return -(dB * r1[h] * (Power ? shape(h, d) * log_distance(d) : d / (1.0f + r2[h] * d)));
    }
};

template <bool Power> struct KerpleOf : Toeplitz {
    using Toeplitz::Toeplitz;
    Parameter r1, r2;                                       // (NH), one pair for each layer

    template <class Tensors> void declare(Tensors& t) {
        const size_t NH = (size_t)t.NH;
        t.param(r1, "kerple_r1", "kerple.r1", Per::Layer, NH, 0, {uniform(0, 2), false, 0.01f});
        const float hi = Power ? 2.0f : FLT_MAX;
        t.param(r2, "kerple_r2", "kerple.r2", Per::Layer, NH, 0, {uniform(0, Power ? 2 : 1), false, 0.01f, hi});
        declare_table(t, Per::Layer);
    }
    KerpleValue<Power> value() const { return {r1.value, r2.value}; }
    void prepare_forward(floatX*, int, int, int t0, Stream stream) const { fill_table(value(), t0, stream); }
    void prepare_backward(floatX*, const floatX*, int B, int, Stream stream) const {
        sum_diagonals(r1.grad, value(), B, stream);
        sum_diagonals(r2.grad, value(), B, stream, 1);
    }
};

using Kerple = KerpleOf<false>;
using KerplePower = KerpleOf<true>;

// ----------------------------------------------------------------------------------------------------------
// bam: the Bayesian attention mechanism (Bianchessi et al. 2025, arXiv 2505.22842), the logarithm of a generalized
// Gaussian of the distance, whose scale and shape each head learns
//
//   B_ij = -e^a_h d^b_h     d = |i-j| + 1e-5     da = B     db = B log d
//   The update keeps -1 <= b <= 2.
//
// As in the authors' program at 5a6579d (github.com/ArthurSBianchessi/BAM, models/bam.py and bam_ssmax.py). Its form of
// the paper's -|(d - mu) / alpha|^beta has a = -beta log alpha, so that a still matters at beta = 0; by default mu is 0
// and not trained. At b = 0 all keys are alike, also a query's own; b < 0 pushes near keys away and hides a query's
// own; b = 1 is ALiBi with learned slopes. With ssmax the logit is s_h log(n) (q.k / sqrt(HS) + B). a and b start at 0
// as in the paper's release (5a6579d: as ALiBi); the bounds of b are this project's.

// log d of the distance i - j
__host__ __device__ inline float bam_log(int distance) {
    constexpr float LOG_EPS = -11.512925f;                  // log 1e-5, of a query's own key
    const float log_d = fast_log1p(fabsf((float)distance) - 1.0f + 1e-5f);
    return distance == 0 ? LOG_EPS : log_d;
}

// B_ij of head h at distance i - j, and dB * dB_ij/da (n = 0) or dB * dB_ij/db. least: if the bias of a query's own key
// is lower, the key has no weight (a text's first query sees no other key, so its bias changes nothing). Its gradient
// is 0 then; B would multiply rounding errors by up to 1e5 e^a.
struct BamValue {
    const float *a, *b;         // (NH)
    float least;
    __device__ float operator()(int h, int distance) const { return -fast_exp(a[h] + b[h] * bam_log(distance)); }
    __device__ float term(int n, int h, int distance, float dB) const {
        const float B = (*this)(h, distance);
        const float slope = n == 0 ? B : B * bam_log(distance);
        return distance == 0 && B < least ? 0.0f : dB * slope;
    }
};

struct Bam : Toeplitz {
    using Toeplitz::Toeplitz;
    Parameter a, b;                                         // (NH), one pair for each layer

    template <class Tensors> void declare(Tensors& t) {
        t.param(a, "bam_a", "bam.scale", Per::Layer, (size_t)t.NH, 0, {constant(0)});
        t.param(b, "bam_b", "bam.shape", Per::Layer, (size_t)t.NH, 0, {constant(0), false, -1.0f, 2.0f});
        declare_table(t, Per::Layer);
    }
    // the factor of a first query is 0
    BamValue value() const { return {a.value, b.value, v.factor == nullptr ? -100.0f : -INFINITY}; }
    void prepare_forward(floatX*, int, int, int t0, Stream stream) const { fill_table(value(), t0, stream); }
    void prepare_backward(floatX*, const floatX*, int B, int, Stream stream) const {
        sum_diagonals(a.grad, value(), B, stream);
        sum_diagonals(b.grad, value(), B, stream, 1);
    }
};

// ----------------------------------------------------------------------------------------------------------
// sandwich: products of sinusoidal embeddings as a bias (Chi et al. 2023), nothing learned
//
//   B_ij = (pe_i.pe_j - d/2) / c_h = sum_{k < d/2} (cos((i-j) / 10000^(2k/d)) - 1) / c_h      c_h = 8(h+1)/NH
//
// pe (T,d): the sines and cosines of added.cuh. d is a hyperparameter, 128 as in the paper, not a width of the model.
// Subtracting d/2 changes no probability and makes B_ii = 0. k counts from 0, as in a sinusoidal embedding; a sum over
// k = 1 .. d/2 would be a slightly different bias. B falls about as log |i-j| does, but not steadily, so none of its
// tiles is skipped.

// Toeplitz's table (NH,columns). A distance's cosines are summed once for all heads.
static __global__ void sandwich_table_kernel(float* table, int d, int T, int NH, int columns) {
    const double step = portable_pow(10000.0, -2.0 / d);
    const GridSpan s = grid_span((size_t)columns);
    for (size_t n = s.begin; n < s.end; n += s.step) {
        double angle = fabs((double)(T - 1 - (int)n));      // |i-j|, in radians for k = 0
        double sum = 0.0;
        for (int k = 0; k < d / 2; k++) {
            sum += portable_cos(angle) - 1.0;
            angle *= step;
        }
        for (int h = 0; h < NH; h++) { table[(size_t)h * columns + n] = (float)(sum * NH / (8.0 * (h + 1))); }
    }
}

struct Sandwich : Toeplitz {
    using Toeplitz::Toeplitz;
    static constexpr int MOST = 1 << 16;

    static Hyperparameters defaults(int) { return {{"d", 128}}; }
    template <class Tensors> void declare(Tensors& t) {
        const double d = t.config->value("d");
        check(d == 2 * std::floor(d / 2) && d <= MOST, "--pos sandwich: expected an even d up to %d, got %g", MOST, d);
        declare_table(t, Per::Model);
    }
    void prepare_forward(floatX*, int, int, int t0, Stream stream) const {
        if (v.layer > 0 || t0 > 0) { return; }              // the first layer fills it, once for all tokens
        const int d = (int)v.config->value("d");
        launch(sandwich_table_kernel, Grid::over((size_t)columns(), stream), table, d, v.stride, v.NH, columns());
    }
};

// ----------------------------------------------------------------------------------------------------------
// alibi: attention with linear biases (Press et al. 2022), B_ij = -m_h |i-j|
//
//   alibi:           m_h = 2^(-8(h+1)/NH), nothing learned. When NH is not a power of two: the slopes of the next lower
//                    power p, then every other one of the slopes of 2p. slopes=geometric: 2^(-8(h+1)/NH) for every NH,
//                    as the paper's code. scale: a factor of all slopes, so that a loaded model still sees far.
//   alibi_random:    m_h drawn from the exponential distribution of `mean` as a function of (seed, h), nothing learned.
//                    The paper tried this distribution; the default mean is ours, close to the mean of alibi's slopes.
//   alibi_trained:   B_ij = -r_h m_h |i-j|, m_h as in alibi, r_h >= 0 learned by each layer, from 1 on. As a factor is
//                    learned, steep and flat slopes change at the same rate.

// m_h of alibi; in double, where a whole exponent gives an exact power
__host__ __device__ inline float alibi_slope(int h, int NH, bool geometric = false) {
    int p = 1;
    while (2 * p <= NH) { p *= 2; }                         // the largest power of two up to NH
    if (geometric) { p = NH; }
    return (float)portable_exp2(h < p ? -8.0 * (h + 1) / p : -4.0 * (2 * (h - p) + 1) / p);
}
static __global__ void alibi_slopes_kernel(float* slopes, int NH, bool geometric, float scale) {
    for (int h = threadIdx.x; h < NH; h += blockDim.x) { slopes[h] = scale * alibi_slope(h, NH, geometric); }
}

// m_h of alibi_random
__host__ __device__ inline float alibi_random_slope(int h, uint64_t seed, double mean) {
    return (float)(-mean * portable_log(1.0 - uniform01(seed, (uint64_t)h)));
}
static __global__ void alibi_random_kernel(float* slopes, int NH, uint64_t seed, double mean) {
    for (int h = threadIdx.x; h < NH; h += blockDim.x) { slopes[h] = alibi_random_slope(h, seed, mean); }
}

struct LinearBias : BiasFunctor {
    static constexpr FlashBias flash = FlashBias::Linear;
    const float* slopes;    // (NH)
    int NH;

    struct Tile {
        float slope;
        int between;        // i0 - j0
        __device__ float operator()(int r, int c) const { return -slope * fabsf((float)(between + r - c)); }
    };
    __device__ Tile tile(int bh, int i0, int j0) const { return {slopes[bh % NH], i0 - j0}; }
    void fill(FlashBiasArgs& args) const { args.slopes = slopes; }
};

struct Alibi : Encoding {
    using Encoding::Encoding;
    float* slopes = nullptr;

    static Hyperparameters defaults(int) { return {{"slopes", 0, "press|geometric"}, {"scale"}}; }
    template <class Tensors> void declare(Tensors& t) {
        t.cached(slopes, "alibi_slopes", Per::Model, (size_t)t.NH, 0);
        declare_key_max(*this, t);
    }
    void prepare_forward(floatX* qkv, int B, int T, int t0, Stream stream) const {
        update_key_max(*this, qkv, B, T, t0, stream);
        if (v.layer > 0 || t0 > 0) { return; }              // the first layer fills it, once for all tokens
        const float scale = (float)v.config->value("scale");
        launch(alibi_slopes_kernel, Grid(1, 32, 0, stream), slopes, v.NH, v.config->value("slopes") == 1,
               scale > 0 ? scale : 1.0f);
    }
    LinearBias bias() const { return {{}, slopes, v.NH}; }
};

struct AlibiRandom : Alibi {
    using Alibi::Alibi;

    static Hyperparameters defaults(int) { return {{"seed", 42}, {"mean", 0.125}}; }
    template <class Tensors> void declare(Tensors& t) {
        const double seed = t.config->value("seed");
        check(seed == std::floor(seed) && seed < 0x1p53, "--pos alibi_random: expected a whole seed, got %g", seed);
        Alibi::declare(t);
    }
    void prepare_forward(floatX* qkv, int B, int T, int t0, Stream stream) const {
        update_key_max(*this, qkv, B, T, t0, stream);
        if (v.layer > 0 || t0 > 0) { return; }
        launch(alibi_random_kernel, Grid(1, 32, 0, stream), slopes, v.NH, (uint64_t)v.config->value("seed"),
               v.config->value("mean"));
    }
};

// B_ij of head h at distance i - j, and dB * dB_ij/dr
struct AlibiTrainedValue {
    const float *slopes, *r;    // (NH)
    __device__ float operator()(int h, int distance) const { return -(r[h] * slopes[h]) * fabsf((float)distance); }
    __device__ float term(int, int h, int distance, float dB) const {
        return -(dB * slopes[h]) * fabsf((float)distance);
    }
};

struct AlibiTrained : Toeplitz {
    using Toeplitz::Toeplitz;
    float* slopes = nullptr;                                // (NH), m_h of alibi
    Parameter r;                                            // (NH), for each layer

    template <class Tensors> void declare(Tensors& t) {
        const size_t NH = (size_t)t.NH;
        t.cached(slopes, "alibi_slopes", Per::Model, NH, 0);
        t.param(r, "alibi_r", "alibi.r", Per::Layer, NH, 0, {constant(1), false, 0.0f});
        declare_table(t, Per::Layer);
    }
    AlibiTrainedValue value() const { return {slopes, r.value}; }
    void prepare_forward(floatX*, int, int, int t0, Stream stream) const {
        if (v.layer == 0 && t0 == 0) { launch(alibi_slopes_kernel, Grid(1, 32, 0, stream), slopes, v.NH, false, 1.0f); }
        fill_table(value(), t0, stream);
    }
    void prepare_backward(floatX*, const floatX*, int B, int, Stream stream) const {
        sum_diagonals(r.grad, value(), B, stream);
    }
};
