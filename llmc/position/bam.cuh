// position/bam.cuh -- the Bayesian attention mechanism (Bianchessi et al. 2025, arXiv 2505.22842): the logarithm of a
// generalized Gaussian of the distance, whose scale and shape each head learns.
//
//   B_ij = -e^a_h d^b_h     d = |i-j| + 1e-5     da = B     db = B log d
//   backward: the sum of dlogit along each diagonal times these. The update keeps -1 <= b <= 2.
//
// As the authors' program at 5a6579d (github.com/ArthurSBianchessi/BAM, models/bam.py and bam_ssmax.py), which has the
// paper's -|(d - mu) / alpha|^beta with a = -beta log alpha, so that a still counts where beta is 0, and by default
// mu = 0 untrained. At b = 0 all keys are alike, a query's own among them; b < 0 pushes near keys away and hides its
// own; b = 1 is ALiBi with learned slopes. With ssmax the logit is s_h log(n) (q.k / sqrt(HS) + B). a and b start at 0
// as in the paper's release (5a6579d: as ALiBi); the bounds of b are this project's.
#pragma once

#include "kerple.cuh"

// log d of the distance i - j
__host__ __device__ inline float bam_log(int distance) {
    constexpr float LOG_EPS = -11.512925f;                  // log 1e-5, of a query's own key
    const float log_d = fast_log1p(fabsf((float)distance) - 1.0f + 1e-5f);
    return distance == 0 ? LOG_EPS : log_d;
}

// B_ij of head h at distance i - j
struct BamValue {
    const float *a, *b;         // (NH)
    __device__ float operator()(int h, int distance) const { return -fast_exp(a[h] + b[h] * bam_log(distance)); }
};

// dB * dB_ij/da, or dB * dB_ij/db, for sum_diagonals. least: a query's own key with a bias below it has no weight,
// but for a text's first query, which sees no other. Its gradient is 0 then, and B would multiply the rounding by up to
// 1e5 e^a.
template <bool Shape> struct BamTerm {
    BamValue value;
    float least;
    __device__ float operator()(int h, int distance, float dB) const {
        const float B = value(h, distance);
        const float slope = Shape ? B * bam_log(distance) : B;
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
    BamValue value() const { return {a.value, b.value}; }
    void prepare_forward(floatX*, int, int, Start start, Stream stream) const { fill_table(value(), start, stream); }
    void prepare_backward(floatX*, const floatX*, int B, int, Stream stream) const {
        const float least = v.factor == nullptr ? -100.0f : -INFINITY;         // the factor of a first query is 0
        sum_diagonals(a.grad, BamTerm<false>{value(), least}, B, stream);
        sum_diagonals(b.grad, BamTerm<true>{value(), least}, B, stream);
    }
};
