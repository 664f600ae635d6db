// position/bam.cuh -- the Bayesian attention mechanism (Bianchessi et al. 2025, arXiv 2505.22842): the logarithm of a
// generalized Gaussian of the distance, whose scale and shape each head learns.
//
//   B_ij = -e^a_h d^b_h, 0 for d = 0     d = |i-j|     da = B     db = B log d
//   backward: the sum of dlogit along each diagonal times these. The update keeps -1 <= b <= 2.
//
// Read: the authors' program (github.com/ArthurSBianchessi/BAM, README.md and models/bam_ssmax.py), which has the
// paper's -|(d - mu) / alpha|^beta with a = -beta log alpha, so that a still counts where beta is 0, and by default
// mu = 0 untrained. a and b start at 0 as there; the bounds of b are this project's. There d is d + 1e-5: with b < 0
// that would hide a query's own key, and da of a first query, whose only key it is, would be its rounding times 1e5^-b.
// b = 1 is ALiBi with learned slopes; b < 0 pushes near keys away. With ssmax the logit is s_h log(n) q.k + B.
#pragma once

#include "kerple.cuh"

// B_ij of head h at distance i - j
struct BamValue {
    const float *a, *b;         // (NH)
    __device__ float operator()(int h, int distance) const {
        return -fast_exp(a[h]) * power_distance(fabsf((float)distance), b[h]);
    }
};

// dB * dB_ij/da, or dB * dB_ij/db, for sum_diagonals
template <bool Shape> struct BamTerm {
    BamValue value;
    __device__ float operator()(int h, int distance, float dB) const {
        return dB * value(h, distance) * (Shape ? log_distance(fabsf((float)distance)) : 1.0f);
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
        sum_diagonals(a.grad, BamTerm<false>{value()}, B, stream);
        sum_diagonals(b.grad, BamTerm<true>{value()}, B, stream);
    }
};
