// test_adamw.cu -- AdamW over several steps and the gradient norm against oracles in double.
#include "test/layers/adamw_oracle.h"
#include "test/oracle.h"

#include "llmc/engine/parameters.cuh"

TEST_CASE("adamw, ten steps", "[adamw][asan]") {
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

TEST_CASE("adamw of many tensors: one launch, with the bits of one launch each", "[adamw][asan]") {
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

TEST_CASE("gradient norm", "[adamw][asan]") {
    Random random;
    INFO(random);
    for (size_t n : {(size_t)1, (size_t)37, NORM_CHUNK - 1, NORM_CHUNK, NORM_CHUNK + 1, 2 * NORM_CHUNK + 4711}) {
        test_gradient_norm(random, n);
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

TEST_CASE("add_to adds", "[adamw][asan]") {
    Random random;
    INFO(random);
    const size_t n = 16384 + 77;
    const auto a = random.normals(n), b = random.normals(n);
    Array<float> to(a);
    add_to(to, Array<float>(b), n, Stream(0));
    const std::vector<float> got = to.host();
    std::vector<float> want(n);
    for (size_t i = 0; i < n; i++) { want[i] = a[i] + b[i]; }
    CHECK(same_bits(got, want));
}

TEST_CASE("sum_parts has the bits of neighbours added, then pairs of them", "[adamw][asan]") {
    Random random;
    INFO(random);
    const size_t n = 1000 + 77;
    for (int count : {1, 2, 3, 4, 5, 6, 7, 8, 13, 33}) {
        std::vector<std::vector<float>> parts;
        for (int i = 0; i < count; i++) { parts.push_back(random.normals(n)); }
        auto sums = parts;
        for (size_t step = 1; step < sums.size(); step *= 2) {
            for (size_t i = 0; i + step < sums.size(); i += 2 * step) {
                for (size_t e = 0; e < n; e++) { sums[i][e] += sums[i + step][e]; }
            }
        }
        for (int me : {0, count / 2, count - 1}) {
            std::vector<float> others;
            for (int i = 0; i < count; i++) {
                if (i != me) { others.insert(others.end(), parts[(size_t)i].begin(), parts[(size_t)i].end()); }
            }
            Array<float> own(parts[(size_t)me]);
            sum_parts(own, Array<float>(others), me, count, n, Stream(0));
            INFO("part " << me << " of " << count);
            CHECK(same_bits(own.host(), sums[0]));
        }
    }
}
