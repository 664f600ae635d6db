// test_adamw.cu -- AdamW over several steps and the gradient norm against oracles in double.
#include "test/oracle.h"

#include "llmc/adamw.cuh"
#include "llmc/engine/ranks/exchange.cuh"

namespace {

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
void update_one(float* weights, float* master, const float* grads, float* m, float* v, size_t n, const TensorSpec& spec,
                const AdamW& a) {
    AdamWTable table;
    table.add(spec, {0, 0, 0, n}, 0, 0, 0);
    table.upload(Stream(0));
    adamw_update(weights, master, grads, m, v, table, a, Stream(0));
    table.release();
}

void test_adamw(Random& random, size_t n, bool decay, float lo, float hi) {
    INFO("n " << n << (decay ? ", decay" : "") << ", within [" << lo << ", " << hi << "]");
    TensorSpec spec;
    spec.decay = decay;
    spec.lo = lo;
    spec.hi = hi;
    const auto w0 = random.uniforms(n, std::max(lo, -2.0f), std::min(hi, 2.0f));
    AdamWOracle<double> want(as<double>(w0));
    AdamWOracle<float> plain(w0);
    Array<float> w(w0), m(std::vector<float>(n, 0.0f)), v(std::vector<float>(n, 0.0f));
    bool projected = false;
    for (int t = 1; t <= 10; t++) {
        std::vector<float> grads = random.normals(n, 0.3, std::pow(10.0, t % 4 - 2));
        if (n > 2) { grads[1] = 0; }
        const AdamW a = {0.05f, 0.9f, 0.95f, 1e-8f, 0.1f, t % 3 == 0 ? 0.25f : 1.0f, t};
        update_one(w, w, Array<float>(grads), m, v, n, spec, a);
        want.step(grads, a, decay, lo, hi);
        plain.step(grads, a, decay, lo, hi);
        for (double x : want.w) { projected = projected || x == lo || x == hi; }
    }
    // ten steps of about three roundings each, at the size of w on its way and of the gradients' share in m and v
    const double roundings = std::sqrt(30.0);
    check_close("adamw w", w.host(), want.w, plain.w, roundings * std::max(largest(w0), largest(want.w)));
    check_close("adamw m", m.host(), want.m, plain.m, roundings * std::max(1.0, largest(want.m)));
    check_close("adamw v", v.host(), want.v, plain.v, roundings * largest(want.v));
    if (n >= 1000) { CHECK(projected == (lo > -1e3f || hi < 1e3f)); }   // the bounds were met
}

} // namespace

TEST_CASE("adamw, ten steps", "[adamw][race][asan]") {
    Random random;
    INFO(random);
    for (size_t n : {1, 2, 37, 1000}) {
        for (bool decay : {false, true}) {
            test_adamw(random, n, decay, -FLT_MAX, FLT_MAX);
            test_adamw(random, n, decay, 0.01f, FLT_MAX);
            test_adamw(random, n, decay, 0.01f, 2.0f);
        }
    }
}

TEST_CASE("adamw over several blocks", "[adamw][asan]") {
    Random random;
    INFO(random);
    test_adamw(random, 3 * 16384 + 5, true, -FLT_MAX, FLT_MAX);
}

TEST_CASE("adamw's first step is lr towards the sign of the gradient, less where that is near eps", "[adamw]") {
    const std::vector<float> grads = {1e-3f, -1e-3f, 1e3f, -1e3f, 0.0f};
    const std::vector<float> w0(5, 1.0f);
    const float eps = 2.5e-4f;      // a quarter of the smallest gradient, whose weight moves by lr / 1.25
    Array<float> w(w0), m(std::vector<float>(5, 0.0f)), v(std::vector<float>(5, 0.0f));
    update_one(w, w, Array<float>(grads), m, v, 5, TensorSpec(), {0.01f, 0.9f, 0.999f, eps, 0.1f, 1.0f, 1});
    const std::vector<float> got = w.host(), want = {0.992f, 1.008f, 0.99f, 1.01f, 1.0f};
    for (size_t i = 0; i < 5; i++) { CHECK(std::fabs(got[i] - want[i]) <= 4 * FLT_EPSILON); }
}

TEST_CASE("adamw writes weights and master alike", "[adamw]") {
    Random random;
    INFO(random);
    const size_t n = 100;
    const auto w0 = random.normals(n);
    Array<float> weights(n), master(w0), m(std::vector<float>(n, 0.0f)), v(std::vector<float>(n, 0.0f));
    update_one(weights, master, Array<float>(random.normals(n)), m, v, n, TensorSpec(),
               {0.01f, 0.9f, 0.95f, 1e-8f, 0.0f, 1.0f, 1});
    CHECK(same_bits(weights.host(), master.host()));
    CHECK_FALSE(same_bits(master.host(), w0));
}

TEST_CASE("adamw of many tensors: one launch, with the bits of one launch each", "[adamw][race][asan]") {
    Random random;
    INFO(random);
    std::vector<TensorSpec> specs;
    AdamWTable all;
    size_t at = 0, m_at = 0;
    for (size_t n : {(size_t)1, (size_t)37, ADAMW_BLOCK - 1, ADAMW_BLOCK, ADAMW_BLOCK + 1, (size_t)2,
                     2 * ADAMW_BLOCK + 77}) {
        TensorSpec spec;
        spec.name = "tensor " + std::to_string(specs.size());
        spec.decay = specs.size() % 2 == 0;
        if (specs.size() % 3 == 1) { spec.lo = 0.01f; }
        if (specs.size() % 3 == 2) { spec.hi = 0.5f; }
        all.add(spec, {specs.size(), 5 * specs.size(), at, n}, at + 3, at + 1, m_at);    // the arrays are laid out
        specs.push_back(spec);                                                           // in different ways
        at += round_up(n, (size_t)64);
        m_at += n;
    }
    const size_t total = at + 3;
    const Array<float> grads(random.normals(total));
    const auto w0 = random.normals(total), m0 = random.normals(m_at);
    const auto v0 = random.uniforms(m_at, 0.0f, 1.0f);
    const AdamW a = {0.05f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.25f, 3};
    Array<float> weights(w0), master(w0), m(m0), v(v0);
    all.upload(Stream(0));
    profile_begin();
    adamw_update(weights, master, grads, m, v, all, a, Stream(0));
    CHECK(profile.entries.size() == 1);
    profile_end(wall_seconds());
    Array<float> weights1(w0), master1(w0), m1(m0), v1(v0);
    for (size_t i = 0; i < specs.size(); i++) {
        const AdamWPiece& p = all.pieces[i];
        update_one(weights1 + p.weight, master1 + p.master, grads + p.grad, m1 + p.moment, v1 + p.moment, p.size,
                   specs[i], a);
    }
    CHECK(same_bits(weights.host(), weights1.host()));
    CHECK(same_bits(master.host(), master1.host()));
    CHECK(same_bits(m.host(), m1.host()));
    CHECK(same_bits(v.host(), v1.host()));
    all.release();
}

TEST_CASE("gradient norm", "[adamw][race][asan]") {
    Random random;
    INFO(random);
    for (size_t n : {(size_t)1, (size_t)37, NORM_CHUNK - 1, NORM_CHUNK, NORM_CHUNK + 1, 2 * NORM_CHUNK + 4711}) {
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
        INFO("n " << n << ": norm " << got << ", wanted " << want << ", a float32 sum gives " << std::sqrt(plain));
        // a chunk is summed in float32, in an order of its own, the chunks in double
        CHECK(std::fabs(got - want) <= std::max(MULTIPLE * std::fabs(std::sqrt((double)plain) - want),
                                                FLT_EPSILON * want * std::sqrt((double)NORM_CHUNK) / 2));
    }
}

TEST_CASE("gradient norm: NaN and infinity show", "[adamw][P14]") {
    for (float bad : {NAN, INFINITY, -INFINITY}) {
        std::vector<float> grads(2 * NORM_CHUNK + 9, 1.0f);
        grads[NORM_CHUNK + 3] = bad;
        Array<double> partial(3);
        CHECK_FALSE(std::isfinite(gradient_norm(partial, Array<float>(grads), grads.size(), Stream(0))));
    }
}

TEST_CASE("gradient norm and update: same bits for any number of threads", "[adamw]") {
    Random random;
    INFO(random);
    const size_t n = 7 * NORM_CHUNK + 333;
    const Array<float> grads(random.normals(n));
    const auto w0 = random.normals(n);
    check_thread_invariance([&] {
        Array<double> partial(8);
        Array<float> w(w0), m(std::vector<float>(n, 0.0f)), v(std::vector<float>(n, 0.0f));
        const double norm = gradient_norm(partial, grads, n, Stream(0));
        TensorSpec spec;
        spec.decay = true;
        update_one(w, w, grads, m, v, n, spec, {0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, (float)(1 / norm), 3});
        std::vector<double> all = as<double>(w.host());
        all.push_back(norm);
        return all;
    });
}

TEST_CASE("add_to_kernel adds", "[adamw][race][asan]") {
    Random random;
    INFO(random);
    const size_t n = 16384 + 77;
    const auto a = random.normals(n), b = random.normals(n);
    Array<float> to(a);
    launch(add_to_kernel, Grid::over(n, Stream(0)), to.p, Array<float>(b).p, n);
    const std::vector<float> got = to.host();
    std::vector<float> want(n);
    for (size_t i = 0; i < n; i++) { want[i] = a[i] + b[i]; }
    CHECK(same_bits(got, want));
}
