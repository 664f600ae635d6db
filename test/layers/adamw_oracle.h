// adamw_oracle.h -- AdamW and the gradient norm in plain loops, and the kernels against them.
#pragma once

#include "test/harness.h"

#include "llmc/adamw.cuh"

// Loshchilov and Hutter 2019, algorithm 2, and the projection
template <class R> struct AdamWOracle {
    std::vector<R> w, m, v;

    explicit AdamWOracle(const std::vector<R>& w) : w(w), m(w.size()), v(w.size()) {}
    void step(const std::vector<float>& grads, const AdamW& a, bool decay, float lo, float hi) {
        for (size_t i = 0; i < w.size(); i++) {
            const R g = (R)a.grad_scale * (R)grads[i];
            const R b1 = (R)a.beta1;
            const R b2 = (R)a.beta2;
            m[i] = b1 * m[i] + (1 - b1) * g;
            v[i] = b2 * v[i] + (1 - b2) * g * g;
            const R m_hat = m[i] / (1 - std::pow(b1, (R)a.t)), v_hat = v[i] / (1 - std::pow(b2, (R)a.t));
            w[i] -= (R)a.lr * (m_hat / (std::sqrt(v_hat) + (R)a.eps) + (decay ? (R)a.weight_decay * w[i] : 0));
            w[i] = std::min((R)hi, std::max((R)lo, w[i]));
        }
    }
};

// adamw_update of one tensor
inline void update_one(floatX* weights, float* master, const float* grads, float* m, float* v, size_t n,
                       const TensorSpec& spec, const AdamW& a) {
    AdamWTable table;
    table.add(spec, {0, 0, 0, n}, 0, 0, 0);
    table.upload(Stream(0));
    adamw_update(weights, master, grads, m, v, table, a, Stream(0));
    table.release();
}

// ten steps
inline void test_adamw(Random& random, size_t n, bool decay, float lo, float hi) {
    const std::string at = strprintf(", n %zu%s, within [%g, %g]", n, decay ? ", decay" : "", lo, hi);
    TensorSpec spec;
    spec.name = "w";
    spec.decay = decay;
    spec.lo = lo;
    spec.hi = hi;
    const auto w0 = random.uniforms(n, std::max(lo, -2.0f), std::min(hi, 2.0f));
    AdamWOracle<double> want(as<double>(w0));
    AdamWOracle<float> plain(w0);
    Array<floatX> weights(n);
    Array<float> w(w0), m(std::vector<float>(n, 0.0f)), v(std::vector<float>(n, 0.0f));
    bool projected = false;
    for (int t = 1; t <= 10; t++) {
        std::vector<float> grads = random.normals(n, 0.3, std::pow(10.0, t % 4 - 2));
        if (n > 2) { grads[1] = 0; }
        const AdamW a = {0.05f, 0.9f, 0.95f, 1e-8f, 0.1f, t % 3 == 0 ? 0.25f : 1.0f, t};
        update_one(weights, w, Array<float>(grads), m, v, n, spec, a);
        want.step(grads, a, decay, lo, hi);
        plain.step(grads, a, decay, lo, hi);
        for (double x : want.w) { projected = projected || x == lo || x == hi; }
    }
    // ten steps of about three roundings each, at the size of w on its way and of the gradients' share in m and v
    const double roundings = std::sqrt(30.0);
    check_close("adamw w" + at, w.host(), want.w, plain.w, roundings * std::max(largest(w0), largest(want.w)));
    check_close("adamw m" + at, m.host(), want.m, plain.m, roundings * std::max(1.0, largest(want.m)));
    check_close("adamw v" + at, v.host(), want.v, plain.v, roundings * largest(want.v));
    // in bf16 by a draw, to one of two neighbours
    expect(relative_l2(host_floats(weights), w.host()) <= (sizeof(floatX) == 2 ? 8e-3 : 0), "the weights" + at);
    if (n >= 1000) { expect(projected == (lo > -1e3f || hi < 1e3f), "the bounds were met" + at); }
}

inline void test_gradient_norm(Random& random, size_t n) {
    const auto grads = random.normals(n);
    double want = 0;
    float plain = 0;
    for (float g : grads) {
        want += (double)g * g;
        plain += g * g;
    }
    want = std::sqrt(want);
    Array<double> partial(ceil_div(n, NORM_CHUNK));
    const double got = gradient_norm(partial, Array<float>(grads), n, Stream(0));
    // a chunk is summed in float32, in an order of its own, the chunks in double
    expect(std::fabs(got - want) <= std::max(MULTIPLE * std::fabs(std::sqrt((double)plain) - want),
                                             FLT_EPSILON * want * std::sqrt((double)NORM_CHUNK) / 2),
           strprintf("n %zu: norm %g, wanted %g, a float32 sum gives %g", n, got, want, std::sqrt(plain)));
}
