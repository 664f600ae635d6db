// test_classifier.cu -- softmax and cross-entropy against an oracle in double.
#include "test/oracle.h"

#include "llmc/classifier.cuh"

namespace {

template <class R> struct ClassifierOracle {
    std::vector<R> losses, dlogits;

    // the loss is the sum over rows of dloss * losses
    ClassifierOracle(const std::vector<R>& logits, const std::vector<int>& targets, R dloss, size_t V, size_t Vp)
        : losses(targets.size()), dlogits(logits.size()) {
        for (size_t n = 0; n < targets.size(); n++) {
            if (targets[n] == -1) { continue; }
            const R* x = &logits[n * Vp];
            const R m = *std::max_element(x, x + V);
            R sum = 0;
            for (size_t v = 0; v < V; v++) { sum += std::exp(x[v] - m); }
            losses[n] = std::log(sum) + m - x[targets[n]];
            for (size_t v = 0; v < V; v++) {
                dlogits[n * Vp + v] = dloss * (std::exp(x[v] - m) / sum - ((int)v == targets[n] ? 1 : 0));
            }
        }
    }
};

// Each loss to MULTIPLE times the largest error of float32 loops, relative to the loss; a loss below 1 is the logarithm
// of a sum near 1, which float32 has to half an ulp of 1.
void check_losses(const std::vector<float>& got, const std::vector<double>& want, const std::vector<float>& plain) {
    double unit = FLT_EPSILON / 2;
    for (size_t n = 0; n < want.size(); n++) {
        unit = std::max(unit, std::fabs(plain[n] - want[n]) / std::max(1.0, want[n]));
    }
    for (size_t n = 0; n < want.size(); n++) {
        INFO("row " << n << ": loss " << got[n] << ", wanted " << want[n] << "; float32 loops are off by " << unit);
        CHECK(std::fabs(got[n] - want[n]) <= MULTIPLE * unit * std::max(1.0, want[n]));
    }
}

// Padding columns hold garbage: large values, and NaN.
void test_classifier(Random& random, size_t N, size_t V, size_t Vp, double std) {
    INFO("N " << N << ", V " << V << ", Vp " << Vp << ", std " << std);
    std::vector<float> logits = random.normals(N * Vp, 1, std);
    std::vector<int> targets(N);
    for (size_t n = 0; n < N; n++) {
        if (n % 5 == 3) {
            targets[n] = IGNORE_INDEX;
        } else if (n < 2) {
            targets[n] = n == 0 ? (int)V - 1 : 0;
        } else {
            targets[n] = random.integer(0, (int)V - 1);
        }
        for (size_t v = V; v < Vp; v++) { logits[n * Vp + v] = v % 2 == 0 ? NAN : 1e30f; }
    }
    const float dloss = 1.0f / 37;
    const ClassifierOracle<double> want(as<double>(logits), targets, (double)dloss, V, Vp);
    const ClassifierOracle<float> plain(logits, targets, dloss, V, Vp);

    const Array<int> d_targets(targets);
    Array<float> x(logits), losses(N);
    classifier(losses, nullptr, (float*)x, d_targets, dloss, N, (int)V, (int)Vp, false, Stream(0));
    CHECK(same_bits(x.host(), logits));             // evaluation does not change them
    const std::vector<float> first = losses.host();
    check_losses(first, want.losses, plain.losses);
    for (size_t n = 0; n < N; n++) {
        if (targets[n] == IGNORE_INDEX) { CHECK(first[n] == 0.0f); }
    }
    Array<float> losses2(N);
    classifier(losses2, nullptr, (float*)x, d_targets, dloss, N, (int)V, (int)Vp, true, Stream(0));
    CHECK(same_bits(losses2.host(), first));
    const std::vector<float> got = x.host();
    bool padding_is_zero = true;
    for (size_t n = 0; n < N; n++) {
        for (size_t v = V; v < Vp; v++) { padding_is_zero = padding_is_zero && got[n * Vp + v] == 0.0f; }
    }
    CHECK(padding_is_zero);
    check_close("dlogits", got, want.dlogits, plain.dlogits);
}

} // namespace

TEST_CASE("classifier oracle: dlogits is the loss's derivative", "[classifier]") {
    Random random;
    INFO(random);
    const size_t N = 3, V = 7;
    const size_t Vp = 9;
    auto logits = as<double>(random.normals(N * Vp, 0, 2));
    const std::vector<int> targets = {6, -1, 2};
    const double dloss = 0.3;
    const auto o = ClassifierOracle<double>(logits, targets, dloss, V, Vp);
    auto loss = [&] {
        const auto l = ClassifierOracle<double>(logits, targets, dloss, V, Vp).losses;
        return dloss * (l[0] + l[1] + l[2]);
    };
    check_gradient("dlogits", loss, logits, o.dlogits, random, 27);
}

TEST_CASE("classifier, small shapes", "[classifier][race][asan]") {
    Random random;
    INFO(random);
    for (size_t N : {1, 2, 37}) {
        test_classifier(random, N, 1, 1, 1);
        test_classifier(random, N, 29, 128, 2);
        test_classifier(random, N, 37, 37, 5);
        test_classifier(random, N, 128, 128, 1);
    }
}

TEST_CASE("classifier, large vocabularies and many rows", "[classifier][asan]") {
    Random random;
    INFO(random);
    test_classifier(random, 37, 30522, 30592, 1);
    test_classifier(random, 3, 50257, 50304, 3);
    test_classifier(random, 1000, 257, 384, 2);
}

TEST_CASE("classifier: a hit is larger than every other logit of the vocabulary, padding aside", "[classifier]") {
    const float inf = INFINITY;
    const int V = 5, Vp = 8;
    struct Row { std::vector<float> logits; int target; float hit; };
    const std::vector<Row> rows = {
        {{1, 3, 2, 0, -1, 9, inf, NAN}, 1, 1},         // the largest, and larger columns of padding
        {{1, 3, 2, 0, -1, 9, inf, NAN}, 2, 0},
        {{3, 3, 2, 0, -1, 0, 0, 0}, 0, 0},             // ties, the target first and last
        {{3, 3, 2, 0, -1, 0, 0, 0}, 1, 0},
        {{-1, -2, -3, -4, std::nextafter(-1.0f, 0.0f), 0, 0, 0}, 4, 1},
        {{NAN, 1, 2, 3, 4, 0, 0, 0}, 0, 0}};
    for (const Row& row : rows) {
        INFO(row.logits[0] << " " << row.logits[1] << " ..., target " << row.target);
        Array<float> losses(1), hits(1);
        Array<float> x(row.logits);
        classifier(losses, hits, (float*)x, Array<int>(std::vector<int>{row.target}), 1.0f, 1, V, Vp, false, Stream(0));
        CHECK(hits.host()[0] == row.hit);
        if (!(row.logits[0] == row.logits[0])) { continue; }
        // infinite padding does not change the loss
        const ClassifierOracle<double> want(as<double>(row.logits), {row.target}, 1.0, V, Vp);
        check_losses(losses.host(), want.losses, ClassifierOracle<float>(row.logits, {row.target}, 1.0f, V, Vp).losses);
    }
}

TEST_CASE("classifier: logits of 10,000 in size", "[classifier][asan][P21]") {
    Random random;
    INFO(random);
    test_classifier(random, 37, 29, 128, 1e4);
    const size_t V = 5, Vp = 8;
    const std::vector<int> targets = {0, 1, 2, 3, 4};
    std::vector<float> logits;
    for (int n = 0; n < 5; n++) {
        for (float v : {1e4f, -1e4f, 1e4f, 0.0f, -1e4f, NAN, NAN, NAN}) { logits.push_back(v); }
    }
    Array<float> x(logits), losses(5);
    classifier(losses, nullptr, (float*)x, Array<int>(targets), 1.0f, 5, (int)V, (int)Vp, true, Stream(0));
    const std::vector<float> loss = losses.host(), d = x.host();
    const double two = std::log(2.0);
    check_losses(loss, {two, 2e4 + two, two, 1e4 + two, 2e4 + two},
                 ClassifierOracle<float>(logits, targets, 1.0f, V, Vp).losses);
    for (int n = 0; n < 5; n++) {
        for (size_t v = 0; v < Vp; v++) {
            const float p = v == 0 || v == 2 ? 0.5f : 0.0f;
            CHECK(d[n * Vp + v] == p - ((int)v == n ? 1.0f : 0.0f));
        }
    }
}

TEST_CASE("classifier: a NaN or infinite logit is a NaN loss, not a plausible one", "[classifier][P21]") {
    const Array<int> targets(std::vector<int>{0, 0, 0});
    Array<float> x(std::vector<float>{1, NAN, 2, 4, INFINITY, 1, 1, 2, 3}), losses(3);
    classifier(losses, nullptr, (float*)x, targets, 1.0f, 3, 3, 3, false, Stream(0));
    CHECK_FALSE(std::isfinite(losses.host()[0]));
    CHECK_FALSE(std::isfinite(losses.host()[1]));
    CHECK(std::isfinite(losses.host()[2]));
}

TEST_CASE("classifier: same bits for any number of threads", "[classifier]") {
    Random random;
    INFO(random);
    const auto logits = random.normals(77 * 384);
    const Array<int> targets(std::vector<int>(77, 3));
    check_thread_invariance([&] {
        Array<float> x(logits), losses(77);
        classifier(losses, nullptr, (float*)x, targets, 0.1f, 77, 300, 384, true, Stream(0));
        std::vector<float> all = x.host(), l = losses.host();
        all.insert(all.end(), l.begin(), l.end());
        return all;
    });
}

TEST_CASE("the sum of the losses", "[classifier][race][asan]") {
    Random random;
    INFO(random);
    for (size_t N : {1, 37, 3000}) {
        const std::vector<float> losses = random.uniforms(N, 0.0f, 12.0f);
        Array<double> sum(1);
        loss_sum(sum, Array<float>(losses), N, Stream(0));
        CHECK(sum.host()[0] == Approx(std::accumulate(losses.begin(), losses.end(), 0.0)).epsilon(1e-12));
    }
}
