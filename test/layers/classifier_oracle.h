// classifier_oracle.h -- softmax and cross-entropy in plain loops, and the kernel against them.
#pragma once

#include "test/harness.h"

#include "llmc/classifier.cuh"

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
inline void check_losses(const std::vector<float>& got, const std::vector<double>& want,
                         const std::vector<float>& plain) {
    double unit = FLT_EPSILON / 2;
    for (size_t n = 0; n < want.size(); n++) {
        unit = std::max(unit, std::fabs(plain[n] - want[n]) / std::max(1.0, want[n]));
    }
    for (size_t n = 0; n < want.size(); n++) {
        expect(std::fabs(got[n] - want[n]) <= MULTIPLE * unit * std::max(1.0, want[n]),
               strprintf("row %zu: loss %.9g, wanted %.9g; float32 loops are off by %g", n, got[n], want[n], unit));
    }
}

// Padding columns hold garbage: large values, and NaN.
inline std::vector<int> classifier_targets(Random& random, size_t N, size_t V) {
    std::vector<int> targets(N);
    for (size_t n = 0; n < N; n++) {
        targets[n] = random.integer(0, (int)V - 1);
        if (n < 2) { targets[n] = n == 0 ? (int)V - 1 : 0; }
        if (n % 5 == 3) { targets[n] = IGNORE_INDEX; }
    }
    return targets;
}
inline void test_classifier(std::vector<float> logits, const std::vector<int>& targets, size_t V, size_t Vp) {
    const size_t N = targets.size();
    const std::string at = strprintf(", N %zu, V %zu, Vp %zu", N, V, Vp);
    for (size_t e = 0; e < logits.size(); e++) { if (e % Vp >= V) { logits[e] = e % 2 == 0 ? NAN : 1e30f; } }
    const std::vector<floatX> given = as<floatX>(logits);
    logits = as<float>(given);
    const float dloss = 1.0f / 37;
    const ClassifierOracle<double> want(as<double>(logits), targets, (double)dloss, V, Vp);
    const ClassifierOracle<float> plain(logits, targets, dloss, V, Vp);

    const Array<int> d_targets(targets);
    Array<floatX> x(given);
    Array<float> losses(N), losses2(N);
    classifier(losses, nullptr, x.p, d_targets, dloss, N, (int)V, (int)Vp, false, Stream(0));
    expect(same_bits(x.host(), given), "evaluation does not change the logits" + at);
    const std::vector<float> first = losses.host();
    check_losses(first, want.losses, plain.losses);
    for (size_t n = 0; n < N; n++) {
        if (targets[n] == IGNORE_INDEX) { expect(first[n] == 0.0f, "the loss of an ignored row" + at); }
    }
    classifier(losses2, nullptr, x.p, d_targets, dloss, N, (int)V, (int)Vp, true, Stream(0));
    expect(same_bits(losses2.host(), first), "the losses of training are evaluation's" + at);
    const std::vector<float> got = host_floats(x);
    bool padding_is_zero = true;
    for (size_t e = 0; e < got.size(); e++) { padding_is_zero = padding_is_zero && (e % Vp < V || got[e] == 0.0f); }
    expect(padding_is_zero, "padding gets zeros" + at);
    check_close("dlogits" + at, x.host(), want.dlogits, plain.dlogits);
}
inline void test_classifier(Random& random, size_t N, size_t V, size_t Vp, double std) {
    test_classifier(random.normals(N * Vp, 1, std), classifier_targets(random, N, V), V, Vp);
}
