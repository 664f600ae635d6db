// embedding_oracle.h -- the token embedding in plain loops, and the kernels against it.
#pragma once

#include "test/harness.h"

#include "llmc/embedding.cuh"

// A plan on the device
struct Rows {
    Array<int> rows, first, hot;
    EmbeddingRows on_device;
    explicit Rows(const EmbeddingPlan& plan) : rows(plan.rows), first(plan.first), hot(plan.hot) {
        on_device.rows = rows;
        on_device.first = first;
        on_device.hot = hot;
        on_device.count(plan);
    }
};

// dwte (V,C) in float32, in the order that llmc/embedding.cuh states: a token's rows one after the other; of a token
// with more than `part` rows, the sums of its parts
inline std::vector<float> embedding_in_order(std::vector<float> dwte, const std::vector<int>& tokens,
                                             const std::vector<float>& dout, size_t C, size_t part) {
    std::vector<float> sum(dwte.size());
    std::vector<size_t> times(dwte.size() / C), seen(times.size());
    for (int t : tokens) { times[(size_t)t]++; }
    for (size_t n = 0; n < tokens.size(); n++) {
        const size_t t = (size_t)tokens[n];
        const bool hot = times[t] > part;
        seen[t]++;
        for (size_t c = 0; c < C; c++) { (hot ? sum : dwte)[t * C + c] += dout[n * C + c]; }
        if (!hot || (seen[t] % part != 0 && seen[t] != times[t])) { continue; }
        for (size_t e = t * C; e < (t + 1) * C; e++) {
            dwte[e] += sum[e];
            sum[e] = 0.0f;
        }
    }
    return dwte;
}

inline void test_embedding(Random& random, size_t N, size_t V, size_t C, bool repeated, int part = EMBEDDING_PART) {
    const std::string at = strprintf(", N %zu, V %zu, C %zu%s", N, V, C, repeated ? ", one token only" : "");
    std::vector<int> tokens(N);
    for (int& t : tokens) { t = repeated ? (int)V - 1 : random.integer(0, (int)V - 1); }
    const auto wte = as<floatX>(random.normals(V * C));
    const auto dout = stored(random.normals(N * C)), dwte0 = random.normals(V * C);
    std::vector<floatX> out(N * C);
    std::vector<float> plain = dwte0;
    std::vector<double> dwte = as<double>(dwte0);
    for (size_t n = 0; n < N; n++) {
        for (size_t c = 0; c < C; c++) {
            out[n * C + c] = wte[(size_t)tokens[n] * C + c];
            dwte[(size_t)tokens[n] * C + c] += dout[n * C + c];
            plain[(size_t)tokens[n] * C + c] += dout[n * C + c];
        }
    }
    EmbeddingPlan plan;
    plan.build(tokens.data(), N, part);
    expect(part != EMBEDDING_PART || (plan.hot_tokens() <= EmbeddingPlan::most_hot_tokens(N) &&
                                      plan.hot_parts() <= EmbeddingPlan::most_hot_parts(N)), "too many parts" + at);
    const Array<int> d_tokens(tokens);
    const Rows rows(plan);
    Array<floatX> d_out(N * C);
    Array<float> d_dwte(dwte0), partial(std::max(plan.hot_parts() * C, (size_t)1));
    embedding_forward(d_out, d_tokens, Array<floatX>(wte), N, (int)C, Stream(0));
    embedding_backward(d_dwte, partial, Array<floatX>(as<floatX>(dout)), d_tokens, rows.on_device, (int)C, Stream(0));
    expect(same_bits(d_out.host(), out), "forward" + at);
    // partial sums of up to N terms of size 1 are of size sqrt(N), wherever they end
    check_close("dwte" + at, d_dwte.host(), dwte, plain, std::sqrt((double)N));
    expect(same_bits(d_dwte.host(), embedding_in_order(dwte0, tokens, dout, C, (size_t)part)),
           "dwte: another order of the sums" + at);
}
