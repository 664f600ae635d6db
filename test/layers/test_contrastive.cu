// test_contrastive.cu -- InfoNCE over cosine similarities against an oracle in double.
#include "test/oracle.h"

#include "llmc/contrastive.cuh"

namespace {

struct Shape { size_t Q, M, C; };

template <class R> struct ContrastiveOracle {
    std::vector<R> losses, demb;

    // the loss is the sum over queries of dloss * losses
    ContrastiveOracle(const std::vector<R>& emb, Shape s, R temperature, R dloss) : losses(s.Q), demb(emb.size()) {
        const size_t rows = s.Q + s.M, C = s.C;
        std::vector<R> length(rows), n(emb.size()), dn(emb.size());
        for (size_t r = 0; r < rows; r++) {
            R squares = 0;
            for (size_t c = 0; c < C; c++) { squares += emb[r * C + c] * emb[r * C + c]; }
            length[r] = std::sqrt(squares);
            for (size_t c = 0; c < C; c++) { n[r * C + c] = emb[r * C + c] / std::max(length[r], (R)1e-12); }
        }
        for (size_t i = 0; i < s.Q; i++) {
            std::vector<R> score(s.M);
            R largest = -INFINITY, sum = 0;
            for (size_t j = 0; j < s.M; j++) {
                for (size_t c = 0; c < C; c++) { score[j] += n[i * C + c] * n[(s.Q + j) * C + c] / temperature; }
                largest = std::max(largest, score[j]);
            }
            for (R x : score) { sum += std::exp(x - largest); }
            losses[i] = std::log(sum) + largest - score[i];
            for (size_t j = 0; j < s.M; j++) {
                const R ds = dloss * (std::exp(score[j] - largest) / sum - (i == j ? 1 : 0));
                for (size_t c = 0; c < C; c++) {
                    dn[i * C + c] += ds * n[(s.Q + j) * C + c] / temperature;
                    dn[(s.Q + j) * C + c] += ds * n[i * C + c] / temperature;
                }
            }
        }
        // d n_c / d x_k = ([c = k] - x_c x_k / |x|^2) / |x|
        for (size_t r = 0; r < rows; r++) {
            const bool tiny = length[r] <= (R)1e-12;
            R along = 0;
            for (size_t c = 0; c < C; c++) { along += tiny ? 0 : dn[r * C + c] * emb[r * C + c] / length[r]; }
            for (size_t k = 0; k < C; k++) {
                const R d = dn[r * C + k];
                demb[r * C + k] = tiny ? d / (R)1e-12 : (d - along * emb[r * C + k] / length[r]) / length[r];
            }
        }
    }
};

// candidates not far from their queries, so that losses are neither 0 nor all alike
std::vector<float> embeddings(Random& random, Shape s, double noise = 4) {
    std::vector<float> emb = random.normals((s.Q + s.M) * s.C, 0.2);
    for (size_t e = 0; e < s.Q * s.C; e++) { emb[s.Q * s.C + e] = emb[e] + (float)noise * emb[s.Q * s.C + e]; }
    return emb;
}

struct Result { std::vector<float> losses, demb; };
Result run(const std::vector<float>& emb, Shape s, float temperature, float dloss) {
    const int Q = (int)s.Q;
    const int M = (int)s.M;
    const int C = (int)s.C;
    const Array<float> d_emb(emb);
    Array<float> losses(s.Q), demb(emb.size()), scratch(contrastive_scratch(Q, M, C));
    poison_shared();
    contrastive_forward_backward(losses, demb, scratch, d_emb, Q, M, C, temperature, dloss, Stream(0));
    CHECK(same_bits(d_emb.host(), emb));
    scratch.host();                                     // its guards
    return {losses.host(), demb.host()};
}

void test_contrastive(Random& random, Shape s, float temperature) {
    INFO("Q " << s.Q << ", M " << s.M << ", C " << s.C << ", temperature " << temperature);
    const std::vector<float> emb = embeddings(random, s);
    const float dloss = 1.0f / (float)s.Q;
    const ContrastiveOracle<double> want(as<double>(emb), s, (double)temperature, (double)dloss);
    const ContrastiveOracle<float> plain(emb, s, temperature, dloss);
    const Result got = run(emb, s, temperature, dloss);
    // a score of 1 / temperature is rounded at that size
    check_close("losses", got.losses, want.losses, plain.losses, 1 / temperature);
    // ds is rounded at the size of dloss / temperature, wherever it ends, and divided by the length of the row
    double shortest = INFINITY;
    for (size_t r = 0; r < s.Q + s.M; r++) {
        double squares = 0;
        for (size_t c = 0; c < s.C; c++) { squares += (double)emb[r * s.C + c] * emb[r * s.C + c]; }
        shortest = std::min(shortest, std::sqrt(squares));
    }
    check_close("demb", got.demb, want.demb, plain.demb, dloss / temperature / shortest);
}

} // namespace

TEST_CASE("contrastive oracle: its gradient is its loss's derivative", "[contrastive]") {
    Random random;
    INFO(random);
    for (Shape s : {Shape{1, 1, 3}, Shape{3, 3, 5}, Shape{2, 5, 4}}) {
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

TEST_CASE("contrastive, small shapes", "[contrastive][race][asan]") {
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
    const Result one = run(random.normals(2 * 7), {1, 1, 7}, 0.05f, 1);
    CHECK(one.losses[0] == 0.0f);
    CHECK(largest(one.demb) == 0.0);
    const std::vector<float> row = random.normals(7);
    std::vector<float> emb;
    for (int r = 0; r < 2 + 5; r++) { emb.insert(emb.end(), row.begin(), row.end()); }
    const Result equal = run(emb, {2, 5, 7}, 0.05f, 1);
    for (float l : equal.losses) { CHECK(std::fabs(l - std::log(5.0)) <= 2 * FLT_EPSILON * std::log(5.0)); }
}

TEST_CASE("contrastive: the length of an embedding does not matter, its gradient shrinks with it", "[contrastive]") {
    Random random;
    INFO(random);
    const Shape s = {3, 7, 33};
    std::vector<float> emb = embeddings(random, s), scaled = emb;
    for (size_t e = 0; e < emb.size(); e++) { scaled[e] = std::ldexp(emb[e], (int)(e / s.C) % 2 == 0 ? 60 : -30); }
    const Result a = run(emb, s, 0.05f, 1), b = run(scaled, s, 0.05f, 1);
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
    const Shape s = {3, 5, 6};
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
    const Result got = run(emb, s, 0.05f, 1);
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
    const Result far = run(emb, {2, 3, 2}, 1e-3f, 1);
    CHECK(std::fabs(far.losses[0] - 2000) <= 2000 * FLT_EPSILON);
    CHECK(far.losses[1] == 0.0f);
    for (float x : far.demb) { CHECK(std::isfinite(x)); }
    for (float bad : {NAN, INFINITY}) {
        std::vector<float> x = emb;
        x[0] = bad;
        const Result r = run(x, {2, 3, 2}, 0.05f, 1);
        CHECK(std::isnan(r.losses[0]));
        CHECK_FALSE(std::isnan(r.losses[1]));
    }
}

TEST_CASE("contrastive refuses what has no positive, and a temperature of 0", "[contrastive]") {
    Array<float> x(64);
    CHECK_THROWS_AS(contrastive_forward_backward(x, x, x, x, 3, 2, 2, 1, 1, Stream(0)), Error);
    CHECK_THROWS_AS(contrastive_forward_backward(x, x, x, x, 2, 2, 2, 0, 1, Stream(0)), Error);
    CHECK_THROWS_AS(contrastive_forward_backward(x, x, x, x, 2, 2, 2, NAN, 1, Stream(0)), Error);
}

TEST_CASE("contrastive: same bits for any number of threads", "[contrastive]") {
    Random random;
    INFO(random);
    const Shape s = {40, 300, 150};
    const std::vector<float> emb = embeddings(random, s);
    check_thread_invariance([&] {
        Result r = run(emb, s, 0.05f, 1);
        r.losses.insert(r.losses.end(), r.demb.begin(), r.demb.end());
        return r.losses;
    });
}
