// test_classifier.cu -- softmax and cross-entropy against an oracle in double.
#include "test/layers/classifier_oracle.h"
#include "test/oracle.h"

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

TEST_CASE("classifier, small shapes", "[classifier][asan]") {
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

TEST_CASE("the sum of the losses", "[classifier][asan]") {
    Random random;
    INFO(random);
    for (size_t N : {1, 37, 3000}) {
        const std::vector<float> losses = random.uniforms(N, 0.0f, 12.0f);
        Array<double> sum(1);
        loss_sum(sum, Array<float>(losses), N, Stream(0));
        CHECK(sum.host()[0] == Approx(std::accumulate(losses.begin(), losses.end(), 0.0)).epsilon(1e-12));
    }
}
