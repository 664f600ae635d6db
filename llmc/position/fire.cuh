// position/fire.cuh -- functional interpolation of relative positions (Li et al. 2024).
//
//   B_ij = f_h(y_ij)     y_ij = psi(|i-j|) / (psi(max(L, i)) + 1e-6)     psi(x) = log(|c| x + 1)     L = |l| * 512
//   f = w2 ReLU(w1 y + b1) + b2: an MLP 1 -> 32 -> NH.     Bidirectional: max(L, i, j).
//   There is no T x T array: psi is a table over the distance, laid out as in toeplitz.cuh, and inv, which is
//   1 / (psi(max(L,t)) + 1e-6), a table over t.
//
//   backward: f is piecewise linear in y, with a break where a unit turns on or off, and y is monotonic in j on either
//   side of the diagonal. So a row of dlogit is a few runs, each in one piece of f. For each head and piece the sums
//   over i, j of
//     dlogit     dlogit y     dlogit dy/d|c|     -dlogit dy/dL
//   are enough: a unit's gradients are sums over the pieces in which it is on. At L = max(i, j) dy/dL counts as 0.
//
// An entry of the tables is in up to T terms of every sum, so its rounding does not average out: the tables are
// computed in float64 and rounded once. A sum has B T T / 2 terms, and in float32 it would soon lose small terms: a run
// is summed in float32, the runs in float64.
#pragma once

#include "toeplitz.cuh"

constexpr int FIRE_UNITS = 32;
constexpr int FIRE_PIECES = FIRE_UNITS + 1;     // of f, between the breaks
constexpr int FIRE_SUMS = 4;                    // per piece
constexpr int FIRE_SLOTS = LANES > 1 ? 1 : 64;  // this many threads of a block sum, each into its own slot
constexpr float FIRE_LENGTH = 512.0f;

__device__ inline float relu(float x) { return x > 0.0f ? x : 0.0f; }
__device__ inline float sign_of(float x) {
    const float negative = x < 0.0f ? -1.0f : 0.0f;
    return x > 0.0f ? 1.0f : negative;
}
__device__ inline float fire_length(const float* l) { return fabsf(*l) * FIRE_LENGTH; }

__device__ inline double fire_psi(float a, float x) { return portable_log1p((double)a * (double)x); }

// psi (ND) over the distance, inv (T+128) over the later position
static __global__ void fire_forward_kernel(float* psi, float* inv, const float* c, const float* l, int T, int ND) {
    const float a = fabsf(*c);
    const float L = fire_length(l);
    GridSpan s = grid_span((size_t)ND);
    for (size_t n = s.begin; n < s.end; n += s.step) { psi[n] = (float)fire_psi(a, fabsf((float)(T - 1 - (int)n))); }
    s = grid_span((size_t)(T + TOEPLITZ_PAD));
    for (size_t t = s.begin; t < s.end; t += s.step) {
        const float x = (float)t > L ? (float)t : L;
        inv[t] = (float)(1.0 / (fire_psi(a, x) + 1e-6));
    }
}

// Where unit k turns on or off, w1 y + b1 = 0, for a y in (0, 1); NaN or outside if nowhere
__device__ inline float fire_break(const float* w1, const float* b1, int k) { return -b1[k] / w1[k]; }
// the rank of unit k's break among all breaks, ascending; -1 if it has none
__device__ inline int fire_rank(const float* w1, const float* b1, int k) {
    const float at = fire_break(w1, b1, k);
    int rank = 0;
    for (int n = 0; n < FIRE_UNITS; n++) {
        const float other = fire_break(w1, b1, n);
        rank += other > 0.0f && (other < at || (other == at && n < k));
    }
    return at > 0.0f && at < 1.0f ? rank : -1;
}

// breaks (32) ascending, the unused ones infinite. One block.
static __global__ void fire_breaks_kernel(float* breaks, const float* w1, const float* b1) {
    for (int k = threadIdx.x; k < FIRE_UNITS; k += blockDim.x) { breaks[k] = INFINITY; }
    __syncthreads();
    for (int k = threadIdx.x; k < FIRE_UNITS; k += blockDim.x) {
        const int rank = fire_rank(w1, b1, k);
        if (rank >= 0) { breaks[rank] = fire_break(w1, b1, k); }
    }
}

// The pieces lo .. hi-1 in which unit k is on; without a break, all pieces or none
struct FireSpan {
    int lo, hi;
    // rank: fire_rank(w1, b1, k)
    __device__ FireSpan(float w1, float b1, int rank) {
        const int lo_broken = w1 > 0.0f ? rank + 1 : 0;
        const int lo_whole = 0.5f * w1 + b1 > 0.0f ? 0 : FIRE_PIECES;
        lo = rank >= 0 ? lo_broken : lo_whole;
        hi = rank >= 0 && w1 < 0.0f ? rank + 1 : FIRE_PIECES;
    }
};

// pieces (NH,FIRE_PIECES): f for the tensor-core kernels. One block per head; shared memory: the ranks
static __global__ void fire_pieces_kernel(FirePiece* pieces, const float* w1, const float* b1, const float* w2,
                                          const float* b2) {
    int* rank = (int*)dynamic_shared();                     // (32)
    const int h = blockIdx.x;
    for (int k = threadIdx.x; k < FIRE_UNITS; k += blockDim.x) { rank[k] = fire_rank(w1, b1, k); }
    __syncthreads();
    for (int n = threadIdx.x; n < FIRE_PIECES; n += blockDim.x) {
        double value = b2[h];
        double slope = 0.0;
        FirePiece piece = {0.0f, 0.0f, INFINITY, 0.0f};
        for (int k = 0; k < FIRE_UNITS; k++) {
            const FireSpan on(w1[k], b1[k], rank[k]);
            const double w = w2[h * FIRE_UNITS + k];
            if (rank[k] == n) {                             // here it turns on or off
                piece.end = fire_break(w1, b1, k);
                piece.bend = (float)(w * fabs((double)w1[k]));
            }
            if (n < on.lo || n >= on.hi) { continue; }
            value += w * b1[k];
            slope += w * w1[k];
        }
        piece.value = (float)value;
        piece.slope = (float)slope;
        pieces[h * FIRE_PIECES + n] = piece;
    }
}

// dpsi (ND): the derivative of psi by |c|; dnorm (2,T+128): the derivatives of psi(max(L,t)) by |c| and by L
static __global__ void fire_slopes_kernel(float* dpsi, float* dnorm, const float* c, const float* l, int T, int ND) {
    const float a = fabsf(*c);
    const float L = fire_length(l);
    GridSpan s = grid_span((size_t)ND);
    for (size_t n = s.begin; n < s.end; n += s.step) {
        const float d = fabsf((float)(T - 1 - (int)n));
        dpsi[n] = d / (a * d + 1.0f);
    }
    s = grid_span((size_t)(T + TOEPLITZ_PAD));
    for (size_t t = s.begin; t < s.end; t += s.step) {
        const float x = (float)t > L ? (float)t : L;
        dnorm[t] = x / (a * x + 1.0f);
        dnorm[T + TOEPLITZ_PAD + t] = (float)t < L ? a / (a * x + 1.0f) : 0.0f;
    }
}

struct FireBias : BiasFunctor {
    static constexpr FlashBias flash = FlashBias::Fire;
    const float *psi, *inv;                     // (ND), (T+128)
    const float *w1, *b1, *w2, *b2;             // (32), (32), (NH,32), (NH)
    const float *dpsi, *dnorm, *breaks;         // (ND), (2,T+128), (32)
    double* sums;                               // (B*NH,FIRE_SLOTS,FIRE_PIECES,FIRE_SUMS)
    const FirePiece* pieces;                    // (NH,FIRE_PIECES)
    int NH, T, columns;

    struct Tile {
        const float *psi, *inv_i, *inv_j;
        int between;                            // i0 - j0
        float b2, w1[FIRE_UNITS], b1[FIRE_UNITS], w2[FIRE_UNITS];   // copies: a store to the scores cannot change them
        // unrolled, so that the compiler vectorizes the loop around it; in four parts, whose sums overlap
        template <size_t... k>
        __device__ __forceinline__ float part(float y, int from, std::index_sequence<k...>) const {
            return (0.0f + ... + (w2[from + k] * relu(w1[from + k] * y + b1[from + k])));
        }
        __device__ __forceinline__ float operator()(int r, int c) const {
            const float a = inv_i[r], b = inv_j[c];
            const float y = psi[c - r] * (between + r >= c ? a : b);
            const auto eight = std::make_index_sequence<FIRE_UNITS / 4>();
            return b2 + ((part(y, 0, eight) + part(y, 8, eight)) + (part(y, 16, eight) + part(y, 24, eight)));
        }
    };
    __device__ Tile tile(int bh, int i0, int j0) const {
        const int h = bh % NH;
        Tile t;
        t.psi = psi + (T - 1 + j0 - i0);
        t.inv_i = inv + i0;
        t.inv_j = inv + j0;
        t.between = i0 - j0;
        t.b2 = b2[h];
        for (int k = 0; k < FIRE_UNITS; k++) {
            t.w1[k] = w1[k];
            t.b1[k] = b1[k];
            t.w2[k] = w2[h * FIRE_UNITS + k];
        }
        return t;
    }

    void fill(FlashBiasArgs& args) const {
        args.table = psi;
        args.table_zero = T - 1;
        args.table_entries = columns;
        args.inv = inv;
        args.dpsi = dpsi;
        args.dnorm = dnorm;
        args.pieces = pieces;
        args.sums = sums;
    }

    __device__ float y(int i, int j) const { return psi[T - 1 + j - i] * inv[i > j ? i : j]; }

    // Adds the keys j .. end-1 of query i, all in one piece, to the piece's sums s. d (end - j): their dlogit
    __device__ void add_run(double* s, const float* d, int i, int j, int end) const {
        const float* psi_i = psi + (T - 1 - i);
        const float* dpsi_i = dpsi + (T - 1 - i);
        const float* dL = dnorm + T + TOEPLITZ_PAD;
        const float inv_i = inv[i];
        const float dnorm_i = dnorm[i];
        const float dL_i = dL[i];
        const auto run = sums_over<FIRE_SUMS>(j, end, 1, [&](float* of, int k) {
            const float inv_k = inv[k];
            const float dnorm_k = dnorm[k];
            const float dL_k = dL[k];
            const float n = k > i ? inv_k : inv_i;          // of the later position, max(i, k)
            const float m = k > i ? dnorm_k : dnorm_i;
            const float l = k > i ? dL_k : dL_i;
            const float yk = psi_i[k] * n;                  // y_ik
            const float dlogit = d[k - j];
            of[0] += dlogit;
            of[1] += dlogit * yk;
            of[2] += dlogit * ((dpsi_i[k] - yk * m) * n);       // dy/d|c|, of the quotient psi / norm
            of[3] += dlogit * (yk * n * l);                     // -dy/dL
        });
        for (int q = 0; q < FIRE_SUMS; q++) { s[q] += run.x[q]; }
    }

    // One thread per row.
    __device__ void backward(int bh, int i0, int ni, int j0, int nj, float* dlogit, int ld) const {
        const int threads = imin((int)blockDim.x, FIRE_SLOTS);
        for (int r = threadIdx.x; r < ni && (int)threadIdx.x < threads; r += threads) {
            double* s = sums + ((size_t)bh * FIRE_SLOTS + threadIdx.x) * FIRE_PIECES * FIRE_SUMS;
            const int i = i0 + r;
            for (int j = j0; j < j0 + nj;) {
                // the piece of y_ij, and the keys from j on that are in it
                const bool past = j <= i;                   // y falls with j up to the diagonal, and then rises
                const float yj = y(i, j);
                int piece = 0;
                for (int k = 0; k < FIRE_UNITS; k++) { piece += breaks[k] <= yj; }
                int lo = j + 1, hi = past && i + 1 < j0 + nj ? i + 1 : j0 + nj;
                while (lo < hi) {                           // the run's end, by bisection
                    const int mid = (lo + hi) / 2;
                    const bool same = past ? piece == 0 || y(i, mid) >= breaks[piece - 1]
                                           : piece == FIRE_UNITS || y(i, mid) < breaks[piece];
                    if (same) { lo = mid + 1; } else { hi = mid; }
                }
                add_run(s + piece * FIRE_SUMS, dlogit + r * ld + (j - j0), i, j, lo);
                j = lo;
            }
        }
        __syncthreads();
    }
};

// One block per head: adds all sequences and slots, into the first slot of the first sequence.
static __global__ void fire_reduce_kernel(double* sums, int B, int NH) {
    const size_t block = (size_t)FIRE_PIECES * FIRE_SUMS;   // of one slot
    const size_t h = blockIdx.x;
    for (size_t n = threadIdx.x; n < block; n += blockDim.x) {
        double sum = 0.0;
        for (size_t b = 0; b < (size_t)B; b++) {
            const double* s = sums + (b * NH + h) * FIRE_SLOTS * block + n;
            for (size_t slot = 0; slot < FIRE_SLOTS; slot++) { sum += s[slot * block]; }
        }
        sums[h * FIRE_SLOTS * block + n] = sum;
    }
}

struct FireWeights { float *c, *l, *w1, *b1, *w2, *b2; };

// One block. A unit belongs to one thread, so each element of the gradients has one owner.
static __global__ void fire_backward_kernel(FireWeights d, const double* sums, FireWeights p, int NH) {
    double dc = 0.0;
    double dL = 0.0;
    for (int k = threadIdx.x; k < FIRE_UNITS; k += blockDim.x) {
        const float w1 = p.w1[k];
        const float b1 = p.b1[k];
        const FireSpan span(w1, b1, fire_rank(p.w1, p.b1, k));
        double dw1 = 0.0;
        double db1 = 0.0;
        for (int h = 0; h < NH; h++) {
            const double* s = sums + (size_t)h * FIRE_SLOTS * FIRE_PIECES * FIRE_SUMS;
            const double w2 = p.w2[h * FIRE_UNITS + k];
            double on[FIRE_SUMS] = {};                      // the sums of the pieces in which the unit is on
            double all = 0.0;
            for (int n = 0; n < FIRE_PIECES; n++) {
                const bool is_on = n >= span.lo && n < span.hi;
                for (int q = 0; q < FIRE_SUMS; q++) { on[q] += is_on ? s[n * FIRE_SUMS + q] : 0.0; }
                all += s[n * FIRE_SUMS];
            }
            // where the unit is on, f has the term w2 (w1 y + b1)
            d.w2[h * FIRE_UNITS + k] += (float)(w1 * on[1] + b1 * on[0]);
            dw1 += w2 * on[1];
            db1 += w2 * on[0];
            dc += w2 * w1 * on[2];                          // df/dy = w2 w1, times dy/d|c|
            dL -= w2 * w1 * on[3];
            if (k == 0) { d.b2[h] += (float)all; }
        }
        d.w1[k] += (float)dw1;
        d.b1[k] += (float)db1;
    }
    dc = block_sum(dc);
    dL = block_sum(dL);
    if (threadIdx.x == 0) {
        *d.c += (float)dc * sign_of(*p.c);                  // d|c|/dc
        *d.l += (float)dL * (FIRE_LENGTH * sign_of(*p.l));
    }
}

struct Fire : Encoding {
    using Encoding::Encoding;
    Parameter c, l;                                                             // scalars
    Parameter w1, b1, w2, b2;                                                   // (32,1), (32), (NH,32), (NH)
    float *psi = nullptr, *inv = nullptr;                                       // (columns), (T+128)
    float *dpsi = nullptr, *dnorm = nullptr;                                    // (columns), (2,T+128)
    float* breaks = nullptr;                                                    // (32)
    double* sums = nullptr;                                 // (B*NH,FIRE_SLOTS,FIRE_PIECES,FIRE_SUMS)
    FirePiece* pieces = nullptr;                            // (NH,FIRE_PIECES), CUDA builds

    template <class Tensors> void declare(Tensors& t) {
        const size_t NH = (size_t)t.NH, U = FIRE_UNITS;
        const float bound = 1.0f / std::sqrt((float)FIRE_UNITS);
        t.param(c, "fire_c", "fire.c", Per::Layer, 1, 0, {constant(0.1f)});
        t.param(l, "fire_l", "fire.l", Per::Layer, 1, 0, {constant(1.0f)});
        t.param(w1, "fire_w1", "fire.mlp.0.weight", Per::Layer, U, 1, {uniform(-1, 1)});
        t.param(b1, "fire_b1", "fire.mlp.0.bias", Per::Layer, U, 0, {uniform(-1, 1)});
        t.param(w2, "fire_w2", "fire.mlp.2.weight", Per::Layer, NH, U, {uniform(-bound, bound)});
        t.param(b2, "fire_b2", "fire.mlp.2.bias", Per::Layer, NH, 0, {uniform(-bound, bound)});
        const size_t columns = (size_t)toeplitz_columns(t.stride, t.causal);
        const size_t padded_T = (size_t)(t.stride + TOEPLITZ_PAD);
        t.cached(psi, "fire_psi", Per::Layer, columns, 0);
        t.cached(inv, "fire_inv", Per::Layer, padded_T, 0);
        t.cached(pieces, "fire_pieces", Per::Layer, NH, FIRE_PIECES);
        t.scratch(dpsi, "fire_dpsi", columns, 0);
        t.scratch(dnorm, "fire_dnorm", 2, padded_T);
        t.scratch(breaks, "fire_breaks", U, 0);
        t.scratch(sums, "fire_sums", (size_t)t.B * NH, (size_t)FIRE_SLOTS * FIRE_PIECES * FIRE_SUMS);
    }
    int columns() const { return toeplitz_columns(v.stride, v.causal); }
    Grid grid(Stream stream) const { return Grid::over((size_t)(columns() + TOEPLITZ_PAD), stream); }

    void prepare_forward(floatX*, int, int, int t0, Stream stream) const {
        if (t0 > 0) { return; }                             // filled once, for the longest text
        launch(fire_forward_kernel, grid(stream), psi, inv, c.value, l.value, v.stride, columns());
        if (LANES > 1) { return; }
        const Grid heads((size_t)v.NH, 64, sizeof(int) * FIRE_UNITS, stream);
        launch(fire_pieces_kernel, heads, pieces, w1.value, b1.value, w2.value, b2.value);
    }
    void begin_backward(const floatX*, int B, int, Stream stream) const {
        const size_t count = (size_t)B * v.NH * FIRE_SLOTS * FIRE_PIECES * FIRE_SUMS;
        device_zero(sums, sizeof(double) * count, stream);
        launch(fire_breaks_kernel, Grid(1, 32, 0, stream), breaks, w1.value, b1.value);
        launch(fire_slopes_kernel, grid(stream), dpsi, dnorm, c.value, l.value, v.stride, columns());
    }
    void prepare_backward(floatX*, const floatX*, int B, int, Stream stream) const {
        const FireWeights values = {c.value, l.value, w1.value, b1.value, w2.value, b2.value};
        const FireWeights grads = {c.grad, l.grad, w1.grad, b1.grad, w2.grad, b2.grad};
        launch(fire_reduce_kernel, Grid((size_t)v.NH, 128, 0, stream), sums, B, v.NH);
        launch(fire_backward_kernel, Grid(1, 32, 0, stream), grads, sums, values, v.NH);
    }
    FireBias bias() const {
        return {{}, psi, inv, w1.value, b1.value, w2.value, b2.value, dpsi, dnorm, breaks, sums, pieces,
                v.NH, v.stride, columns()};
    }
};
