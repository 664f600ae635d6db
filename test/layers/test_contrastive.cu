// test_contrastive.cu -- InfoNCE over cosine similarities against an oracle in double.
#include "test/layers/contrastive_oracle.h"
#include "test/oracle.h"

TEST_CASE("contrastive oracle: its gradient is its loss's derivative", "[contrastive]") {
    Random random;
    INFO(random);
    for (ContrastiveShape s : {ContrastiveShape{1, 1, 3}, ContrastiveShape{3, 3, 5}, ContrastiveShape{2, 5, 4}}) {
        std::vector<double> emb = as<double>(embeddings(random, s));
        const double dloss = 0.3, temperature = 0.2;
        const ContrastiveOracle<double> o(emb, s, temperature, dloss);
        auto loss = [&] {
            double sum = 0;
            for (double l : ContrastiveOracle<double>(emb, s, temperature, dloss).losses) { sum += dloss * l; }
            return sum;
        };
        check_gradient("demb", loss, emb, o.demb, random, 30);
        // and below the bound, where the divisor is constant; the step has to stay below it too
        for (size_t c = 0; c < s.C; c++) { emb[c] *= 1e-14; }
        const ContrastiveOracle<double> tiny(emb, s, temperature, dloss);
        check_gradient("demb of a tiny row", loss, emb, tiny.demb, random, 2, 1e-18);
    }
}

TEST_CASE("distillation: its oracle's gradient is its loss's derivative; the kernels are the oracle",
          "[contrastive][asan]") {
    Random random;
    INFO(random);
    std::vector<double> emb = as<double>(random.normals(3 * 5));
    const std::vector<double> teacher = as<double>(random.normals(3 * 5));
    auto loss = [&] {
        const std::vector<double> losses = DistillOracle<double>(emb, teacher, 5, 0.3).losses;
        return 0.3 * std::accumulate(losses.begin(), losses.end(), 0.0);
    };
    check_gradient("demb", loss, emb, DistillOracle<double>(emb, teacher, 5, 0.3).demb, random, 15);
    for (size_t C : {1, 33, 384, 770}) { test_distill(random, 9, C); }
}

TEST_CASE("contrastive, small shapes", "[contrastive][asan]") {
    Random random;
    INFO(random);
    for (size_t C : {1, 33, 96}) {
        test_contrastive(random, {1, 1, C}, 0.05f);
        test_contrastive(random, {3, 3, C}, 1);
        test_contrastive(random, {3, 8, C}, 0.05f);
    }
}

TEST_CASE("contrastive: tiles that no shape divides", "[contrastive][asan]") {
    Random random;
    INFO(random);
    test_contrastive(random, {17, 131, 259}, 0.05f);
    test_contrastive(random, {129, 257, 40}, 0.05f);
    test_contrastive(random, {8, 72, 770}, 0.02f);
}

TEST_CASE("contrastive: one query and one candidate have loss 0; equal candidates log M", "[contrastive]") {
    Random random;
    INFO(random);
    const ContrastiveResult one = contrastive_of(random.normals(2 * 7), {1, 1, 7}, 0.05f, 1);
    CHECK(one.losses[0] == 0.0f);
    CHECK(largest(one.demb) == 0.0);
    const std::vector<float> row = random.normals(7);
    std::vector<float> emb;
    for (int r = 0; r < 2 + 5; r++) { emb.insert(emb.end(), row.begin(), row.end()); }
    const ContrastiveResult equal = contrastive_of(emb, {2, 5, 7}, 0.05f, 1);
    for (float l : equal.losses) { CHECK(std::fabs(l - std::log(5.0)) <= 2 * FLT_EPSILON * std::log(5.0)); }
}

TEST_CASE("contrastive: the length of an embedding does not matter, its gradient shrinks with it", "[contrastive]") {
    Random random;
    INFO(random);
    const ContrastiveShape s = {3, 7, 33};
    std::vector<float> emb = embeddings(random, s), scaled = emb;
    for (size_t e = 0; e < emb.size(); e++) { scaled[e] = std::ldexp(emb[e], (int)(e / s.C) % 2 == 0 ? 60 : -30); }
    const ContrastiveResult a = contrastive_of(emb, s, 0.05f, 1), b = contrastive_of(scaled, s, 0.05f, 1);
    CHECK(same_bits(a.losses, b.losses));               // powers of two
    bool same = true;
    for (size_t e = 0; e < emb.size(); e++) {
        same = same && b.demb[e] == std::ldexp(a.demb[e], (int)(e / s.C) % 2 == 0 ? -60 : 30);
    }
    CHECK(same);
}

TEST_CASE("contrastive: zero, tiny and huge embeddings", "[contrastive][asan]") {
    Random random;
    INFO(random);
    const ContrastiveShape s = {3, 5, 6};
    std::vector<float> emb = embeddings(random, s);
    for (size_t c = 0; c < s.C; c++) {
        emb[c] = 0.0f;                                  // a query
        emb[2 * s.C + c] *= 2e-13f;                     // of length 5e-13
        emb[4 * s.C + c] *= 1e-12f;
        emb[5 * s.C + c] = 0.0f;                        // a positive
        emb[6 * s.C + c] *= 1e-30f;
        emb[7 * s.C + c] *= 1e30f;                      // its square is beyond float32
    }
    const ContrastiveOracle<double> want(as<double>(emb), s, 0.05, 1.0);
    const ContrastiveResult got = contrastive_of(emb, s, 0.05f, 1);
    for (size_t i = 0; i < s.Q; i++) { CHECK(std::fabs(got.losses[i] - want.losses[i]) <= 20 * 8 * FLT_EPSILON); }
    CHECK(std::fabs(got.losses[0] - std::log(5.0)) <= 2 * FLT_EPSILON * std::log(5.0));
    for (size_t r = 0; r < s.Q + s.M; r++) {            // row by row, as their sizes differ by 10^40
        INFO("row " << r);
        const std::vector<float> d(got.demb.begin() + (long)(r * s.C), got.demb.begin() + (long)((r + 1) * s.C));
        const std::vector<double> w(want.demb.begin() + (long)(r * s.C), want.demb.begin() + (long)((r + 1) * s.C));
        double squares = 0;
        for (size_t c = 0; c < s.C; c++) { squares += (double)emb[r * s.C + c] * emb[r * s.C + c]; }
        // ds is rounded at the size of 1 / temperature, wherever it ends
        CHECK(worst_difference(d, w) <= MULTIPLE * FLT_EPSILON / 2 * 20 / std::max(std::sqrt(squares), 1e-12));
    }
}

TEST_CASE("contrastive: a hopeless query has a finite loss, a NaN embedding a NaN one", "[contrastive]") {
    // query 0's positive is opposite, a negative is equal to it
    const std::vector<float> emb = {1, 0, 0, 1, -1, 0, 0, 1, 1, 0};
    const ContrastiveResult far = contrastive_of(emb, {2, 3, 2}, 1e-3f, 1);
    CHECK(std::fabs(far.losses[0] - 2000) <= 2000 * FLT_EPSILON);
    CHECK(far.losses[1] == 0.0f);
    for (float x : far.demb) { CHECK(std::isfinite(x)); }
    for (float bad : {NAN, INFINITY}) {
        std::vector<float> x = emb;
        x[0] = bad;
        const ContrastiveResult r = contrastive_of(x, {2, 3, 2}, 0.05f, 1);
        CHECK(std::isnan(r.losses[0]));
        CHECK_FALSE(std::isnan(r.losses[1]));
    }
}

TEST_CASE("contrastive refuses what has no positive, and a temperature of 0", "[contrastive]") {
    Array<float> x(64);
    Array<int> place(6);
    CHECK_THROWS_AS(contrastive_forward_backward(x, x, x, x, place, 3, 2, 2, 1, 1, Stream(0)), Error);
    CHECK_THROWS_AS(contrastive_forward_backward(x, x, x, x, place, 2, 2, 2, 0, 1, Stream(0)), Error);
    CHECK_THROWS_AS(contrastive_forward_backward(x, x, x, x, place, 2, 2, 2, NAN, 1, Stream(0)), Error);
}

TEST_CASE("contrastive: same bits for any number of threads", "[contrastive]") {
    Random random;
    INFO(random);
    const ContrastiveShape s = {40, 300, 150};
    const std::vector<float> emb = embeddings(random, s);
    check_thread_invariance([&] {
        ContrastiveResult r = contrastive_of(emb, s, 0.05f, 1);
        r.losses.insert(r.losses.end(), r.demb.begin(), r.demb.end());
        return r.losses;
    });
}
