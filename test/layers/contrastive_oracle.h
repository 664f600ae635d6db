// contrastive_oracle.h -- InfoNCE over cosine similarities in plain loops, and the kernels against them.
#pragma once

#include "test/harness.h"

#include "llmc/contrastive.cuh"

struct ContrastiveShape { size_t Q, M, C; };

template <class R> struct ContrastiveOracle {
    std::vector<R> losses, demb;

    // the loss is the sum over queries of dloss * losses
    ContrastiveOracle(const std::vector<R>& emb, ContrastiveShape s, R temperature, R dloss)
        : losses(s.Q), demb(emb.size()) {
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

// distillation: the loss is the sum over rows of dloss * losses; emb, teacher (R,C)
template <class R> struct DistillOracle {
    std::vector<R> losses, demb;

    DistillOracle(const std::vector<R>& emb, const std::vector<R>& teacher, size_t C, R dloss) : demb(emb.size()) {
        for (size_t first = 0; first < emb.size(); first += C) {
            const R *x = &emb[first], *t = &teacher[first];
            const auto dot = [&](const R* a, const R* b) { return std::inner_product(a, a + C, b, (R)0); };
            const R of_x = std::sqrt(dot(x, x)), of_t = std::sqrt(dot(t, t));
            const R cosine = dot(x, t) / of_x / of_t;
            losses.push_back(1 - cosine);
            for (size_t c = 0; c < C; c++) { demb[first + c] = -dloss * (t[c] / of_t - cosine * x[c] / of_x) / of_x; }
        }
    }
};

// candidates not far from their queries, so that losses are neither 0 nor all alike
inline std::vector<float> embeddings(Random& random, ContrastiveShape s, double noise = 4) {
    std::vector<float> emb = random.normals((s.Q + s.M) * s.C, 0.2);
    for (size_t e = 0; e < s.Q * s.C; e++) { emb[s.Q * s.C + e] = emb[e] + (float)noise * emb[s.Q * s.C + e]; }
    return emb;
}

struct ContrastiveResult { std::vector<float> losses, demb; };
// The rows of emb and demb stand in a random order. teacher: of each row; empty: InfoNCE
inline ContrastiveResult contrastive_of(const std::vector<float>& emb, ContrastiveShape s, float temperature,
                                        float dloss, const std::vector<float>& teacher = {}) {
    const int Q = (int)s.Q;
    const int M = (int)s.M;
    const int C = (int)s.C;
    std::vector<int> places(s.Q + s.M);
    std::iota(places.begin(), places.end(), 0);
    const auto draw = [](int row) { return hash64(1, (uint64_t)row); };
    std::sort(places.begin(), places.end(), [&](int a, int b) { return draw(a) < draw(b); });
    const auto moved = [&](const std::vector<float>& x, bool back) {
        std::vector<float> y(x.size());
        for (size_t r = 0; r < places.size(); r++) {
            size_t from = r * s.C, to = (size_t)places[r] * s.C;
            if (back) { std::swap(from, to); }
            std::copy_n(&x[from], s.C, &y[to]);
        }
        return y;
    };
    const Array<float> d_emb(moved(emb, false));
    const Array<int> place(places);
    Array<float> losses(s.Q), scratch(contrastive_scratch(Q, M, C));
    const Array<float> demb(teacher.empty() ? std::vector<float>(emb.size(), NAN) : moved(teacher, false));
    poison_shared();
    if (teacher.empty()) {
        contrastive_forward_backward(losses, demb, scratch, d_emb, place, Q, M, C, temperature, dloss, Stream(0));
    } else {
        distill_forward_backward(losses, demb, scratch, d_emb, place, Q, C, dloss, Stream(0));
    }
    expect(same_bits(d_emb.host(), moved(emb, false)), "the embeddings are as they were");
    scratch.host();                                     // its guards
    return {losses.host(), moved(demb.host(), true)};
}

inline void test_contrastive(Random& random, ContrastiveShape s, float temperature) {
    const std::string at = strprintf(", Q %zu, M %zu, C %zu, temperature %g", s.Q, s.M, s.C, temperature);
    const std::vector<float> emb = embeddings(random, s);
    const float dloss = 1.0f / (float)s.Q;
    const ContrastiveOracle<double> want(as<double>(emb), s, (double)temperature, (double)dloss);
    const ContrastiveOracle<float> plain(emb, s, temperature, dloss);
    const ContrastiveResult got = contrastive_of(emb, s, temperature, dloss);
    // a score of 1 / temperature is rounded at that size
    check_close("losses" + at, got.losses, want.losses, plain.losses, 1 / temperature);
    // ds is rounded at the size of dloss / temperature, wherever it ends, and divided by the length of the row
    double shortest = INFINITY;
    for (size_t r = 0; r < s.Q + s.M; r++) {
        double squares = 0;
        for (size_t c = 0; c < s.C; c++) { squares += (double)emb[r * s.C + c] * emb[r * s.C + c]; }
        shortest = std::min(shortest, std::sqrt(squares));
    }
    check_close("demb" + at, got.demb, want.demb, plain.demb, dloss / temperature / shortest);
}

inline void test_distill(Random& random, size_t R, size_t C) {
    const std::string at = strprintf(", R %zu, C %zu", R, C);
    const std::vector<float> emb = random.normals(R * C, 0.2), teacher = random.normals(R * C, 3);
    const float dloss = 1.0f / (float)R;
    const DistillOracle<double> want(as<double>(emb), as<double>(teacher), C, (double)dloss);
    const DistillOracle<float> plain(emb, teacher, C, dloss);
    const ContrastiveResult got = contrastive_of(emb, {R, 0, C}, 1, dloss, teacher);
    check_close("losses" + at, got.losses, want.losses, plain.losses, 1);
    double shortest = INFINITY;
    for (size_t r = 0; r < R; r++) {
        const float* x = &emb[r * C];
        shortest = std::min(shortest, std::sqrt(std::inner_product(x, x + C, x, 0.0)));
    }
    check_close("demb" + at, got.demb, want.demb, plain.demb, dloss / shortest);
}
