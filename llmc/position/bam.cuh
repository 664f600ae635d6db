// position/bam.cuh -- the Bayesian attention mechanism (Bianchessi et al. 2025, arXiv 2505.22842): the logarithm of a
// generalized Gaussian of the distance, whose scale and shape each head learns.
//
//   B_ij = -e^a_h (|i-j| + eps)^b_h     eps = 1e-5     da = B     db = B log(|i-j| + eps)
//   backward: the sum of dlogit along each diagonal times these. The update keeps -1 <= b <= 2.
//
// This is the authors' program (github.com/ArthurSBianchessi/BAM, README.md and models/bam_ssmax.py): the paper's
// -|(d - mu) / alpha|^beta with a = -beta log alpha, so that a still counts where beta is 0, and with mu = 0, which the
// program does not train by default either. The bounds of b are this project's. a and b start at 0, where all keys get
// the same. b = 1 is ALiBi with learned slopes; b < 0 pushes near keys away, a query's own key furthest. With ssmax the
// logit is s_h log(n) q.k + B.
#ifndef LLMC_POSITION_BAM_CUH
#define LLMC_POSITION_BAM_CUH

#include "kerple.cuh"

constexpr float BAM_EPS = 1e-5f;

// log(|i-j| + eps)
__host__ __device__ inline float bam_log(int distance) {
    const float d = fabsf((float)distance);
    return d > 0.0f ? log_distance(d + BAM_EPS) : -11.5129255f;
}

// B_ij of head h at distance i - j
struct BamValue {
    const float *a, *b;         // (NH)
    __device__ float operator()(int h, int distance) const { return -fast_exp(a[h] + b[h] * bam_log(distance)); }
};

// dB * dB_ij/da, or dB * dB_ij/db, for sum_diagonals
template <bool Shape> struct BamTerm {
    BamValue value;
    __device__ float operator()(int h, int distance, float dB) const {
        return dB * value(h, distance) * (Shape ? bam_log(distance) : 1.0f);
    }
};

struct Bam : Toeplitz {
    using Toeplitz::Toeplitz;
    Parameter a, b;                                         // (NH), one pair for each layer

    template <class Tensors> void declare(Tensors& t) {
        t.param(a, "bam_a", "bam.theta_alpha", Per::Layer, (size_t)t.NH, 0, {constant(0)});
        t.param(b, "bam_b", "bam.theta_beta", Per::Layer, (size_t)t.NH, 0, {constant(0), false, -1.0f, 2.0f});
        declare_table(t, Per::Layer);
    }
    BamValue value() const { return {a.value, b.value}; }
    void prepare_forward(floatX*, int, int, Start start, Stream stream) const { fill_table(value(), start, stream); }
    void prepare_backward(floatX*, const floatX*, int B, int, Stream stream) const {
        sum_diagonals(a.grad, BamTerm<false>{value()}, B, stream);
        sum_diagonals(b.grad, BamTerm<true>{value()}, B, stream);
    }
};

#endif
