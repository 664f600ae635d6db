// position/toeplitz.cuh -- biases that depend only on i - j: a table for each head, its gradient summed along
// diagonals; and three encodings that need little more: kerple, bam and sandwich.
//
//   B_ij = table[h][T-1 + j - i]: T columns when causal (j <= i), else 2T-1. 128 columns more are what the masked end
//   of a tile may read; their values are finite.
//   backward: the functor sums dlogit along diagonals into one slab dtable[b,h] per block; the encodings sum the slabs
//   over b, in order, into their parameters: kerple with sum_diagonals, t5 in a kernel of its own.
#pragma once

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

    // d[n] is the diagonal c - r = n - (ni-1) of the tile
    __device__ void backward(int bh, int i0, int ni, int j0, int nj, float* dlogit, int ld) const {
        float* d = dtable + (size_t)bh * columns + (T - ni + j0 - i0);
        if (LANES > 1) {                                    // one thread: whole rows, in vectors, then the tile's sums
            float sum[2 * TOEPLITZ_PAD] = {};
            for (int r = 0; r < ni; r++) {
                for (int c = 0; c < nj; c++) { sum[ni - 1 - r + c] += dlogit[r * ld + c]; }
            }
            for (int n = 0; n < ni + nj - 1; n++) { d[n] += sum[n]; }
        } else {                                            // one thread per diagonal
            for (int n = threadIdx.x; n < ni + nj - 1; n += blockDim.x) {
                const int r0 = imax(ni - 1 - n, 0);         // rows in which the diagonal lies inside the tile
                const int r1 = imin(ni, ni + nj - 1 - n);
                float sum = 0.0f;
                for (int r = r0; r < r1; r++) { sum += dlogit[r * ld + n - (ni - 1) + r]; }
                d[n] += sum;
            }
        }
        __syncthreads();                                    // in the next tile other threads have these diagonals
    }
};

// One block per head: table[h] from value(h, i - j)
template <class Value>
static __global__ void toeplitz_fill_kernel(float* table, Value value, int T, int columns) {
    const int h = blockIdx.x;
    for (int n = threadIdx.x; n < columns; n += blockDim.x) { table[(size_t)h * columns + n] = value(h, T - 1 - n); }
}

// One block per head: gradient[h] += sum over the diagonals of value.term(n, h, i - j, dB), dB: the gradient of the
// loss in the bias of that diagonal, summed over the batch. In double, because the terms cancel: each row of dlogit
// sums to 0.
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
    float* dtable = nullptr;                                // (B*NH,columns), a slab for each sequence

    // Per::Model: all layers share the table, and the first one fills it
    template <class Tensors> void declare_table(Tensors& t, Per per) {
        const size_t columns = (size_t)toeplitz_columns(t.stride, t.causal);
        t.cached(table, "bias_table", per, (size_t)t.NH, columns);
        t.scratch(dtable, "dbias_table", (size_t)t.B * t.NH, columns);
    }
    int columns() const { return toeplitz_columns(v.stride, v.causal); }
    // B_ij = value(h, i - j), filled for the longest text when a text begins
    template <class Value> void fill_table(const Value& value, Start start, Stream stream) const {
        if (!start.begins()) { return; }
        launch(toeplitz_fill_kernel<Value>, Grid((size_t)v.NH, 128, 0, stream), table, value, v.stride, columns());
    }
    // Adds to gradient (NH) of the n-th parameter p of each head. By the chain rule it is the sum over the distances d
    // of dB_d * dvalue(h, d)/dp_h; value.term(n, h, d, dB_d) is that product.
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
// kerple: kernelized relative positions (Chi et al. 2022): two positive scalars for each head and layer.
//
//   kerple:        B_ij = -r1 log(1 + r2 |i-j|)     dr1 = -log(1 + r2 d)   dr2 = -r1 d / (1 + r2 d)      d = |i-j|
//   kerple_power:  B_ij = -r1 |i-j|^r2              dr1 = -d^r2            dr2 = -r1 d^r2 log d          0 < r2 <= 2
//   backward: the sum of dlogit along each diagonal times these. The update keeps r1, r2 >= 0.01 (power: r2 <= 2).

// log(d) and d^p for a whole number d, taken as 1 and 0 at d = 0, where every caller multiplies log by d^p
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
    void prepare_forward(floatX*, int, int, Start start, Stream stream) const { fill_table(value(), start, stream); }
    void prepare_backward(floatX*, const floatX*, int B, int, Stream stream) const {
        sum_diagonals(r1.grad, value(), B, stream);
        sum_diagonals(r2.grad, value(), B, stream, 1);
    }
};

using Kerple = KerpleOf<false>;
using KerplePower = KerpleOf<true>;

// ----------------------------------------------------------------------------------------------------------
// bam: the Bayesian attention mechanism (Bianchessi et al. 2025, arXiv 2505.22842): the logarithm of a generalized
// Gaussian of the distance, whose scale and shape each head learns.
//
//   B_ij = -e^a_h d^b_h     d = |i-j| + 1e-5     da = B     db = B log d
//   backward: the sum of dlogit along each diagonal times these. The update keeps -1 <= b <= 2.
//
// As the authors' program at 5a6579d (github.com/ArthurSBianchessi/BAM, models/bam.py and bam_ssmax.py), which has the
// paper's -|(d - mu) / alpha|^beta with a = -beta log alpha, so that a still counts where beta is 0, and by default
// mu = 0 untrained. At b = 0 all keys are alike, a query's own among them; b < 0 pushes near keys away and hides its
// own; b = 1 is ALiBi with learned slopes. With ssmax the logit is s_h log(n) (q.k / sqrt(HS) + B). a and b start at 0
// as in the paper's release (5a6579d: as ALiBi); the bounds of b are this project's.

// log d of the distance i - j
__host__ __device__ inline float bam_log(int distance) {
    constexpr float LOG_EPS = -11.512925f;                  // log 1e-5, of a query's own key
    const float log_d = fast_log1p(fabsf((float)distance) - 1.0f + 1e-5f);
    return distance == 0 ? LOG_EPS : log_d;
}

// B_ij of head h at distance i - j, and dB * dB_ij/da (n = 0) or dB * dB_ij/db. least: a query's own key with a bias
// below it has no weight, but for a text's first query, which sees no other. Its gradient is 0 then, and B would
// multiply the rounding by up to 1e5 e^a.
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
    void prepare_forward(floatX*, int, int, Start start, Stream stream) const { fill_table(value(), start, stream); }
    void prepare_backward(floatX*, const floatX*, int B, int, Stream stream) const {
        sum_diagonals(a.grad, value(), B, stream);
        sum_diagonals(b.grad, value(), B, stream, 1);
    }
};

// ----------------------------------------------------------------------------------------------------------
// sandwich: products of sinusoidal embeddings as a bias (Sandwich: Chi et al. 2023), nothing learned.
//
//   B_ij = (pe_i.pe_j - d/2) / c_h = sum_{k < d/2} (cos((i-j) / 10000^(2k/d)) - 1) / c_h      c_h = 8(h+1)/NH
//
// pe (T,d) are the sines and cosines of added.cuh. d is a hyperparameter, 128 as in the paper, and no width of the
// model. The d/2 changes no probability, and makes B_ii = 0. k counts from 0, as in a sinusoidal embedding; a sum over
// k = 1 .. d/2 would be a slightly different bias. B falls about as log |i-j| does, but not steadily, so no tile of it
// is skipped.

// table (NH,columns), laid out as above. The cosines of a distance are summed once for all heads, in double
// because a float angle is off by 0.004 at a distance of 100,000.
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
    void prepare_forward(floatX*, int, int, Start start, Stream stream) const {
        if (v.layer > 0 || !start.begins()) { return; }     // the first layer fills it, once for all tokens
        const int d = (int)v.config->value("d");
        launch(sandwich_table_kernel, Grid::over((size_t)columns(), stream), table, d, v.stride, v.NH, columns());
    }
};
