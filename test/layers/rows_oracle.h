// rows_oracle.h -- rows gathered, scattered and added, against plain loops.
#pragma once

#include <algorithm>

#include "test/harness.h"

#include "llmc/embedding.cuh"

// n distinct rows of N, in no order
inline std::vector<int> some_rows(Random& random, size_t N, size_t n) {
    std::vector<int> all(N);
    for (size_t i = 0; i < N; i++) { all[i] = (int)i; }
    std::shuffle(all.begin(), all.end(), random.engine);
    return std::vector<int>(all.begin(), all.begin() + (long)n);
}

inline void test_gather_scatter(Random& random, size_t N, size_t n, size_t C) {
    const std::string at = strprintf(", N %zu, n %zu, C %zu", N, n, C);
    const std::vector<int> rows = some_rows(random, N, n);
    const auto inp = as<floatX>(random.normals(N * C)), dout = as<floatX>(random.normals(n * C));
    const auto before = as<floatX>(random.normals(N * C));
    std::vector<floatX> want(n * C), dwant = before;
    for (size_t k = 0; k < n; k++) {
        for (size_t c = 0; c < C; c++) {
            want[k * C + c] = inp[(size_t)rows[k] * C + c];
            dwant[(size_t)rows[k] * C + c] = dout[k * C + c];
        }
    }
    const Array<int> d_rows(rows);
    Array<floatX> out(n * C), dinp(before);
    embedding_forward(out, d_rows, Array<floatX>(inp), n, (int)C, Stream(0));
    scatter_rows(dinp, Array<floatX>(dout), d_rows, n, (int)C, Stream(0));
    expect(same_bits(out.host(), want), "gather" + at);
    expect(same_bits(dinp.host(), dwant), "scatter, and the other rows as they were" + at);
}

template <class R> std::vector<R> row_sums(const std::vector<R>& before, const std::vector<R>& dout, size_t N) {
    std::vector<R> d = before;
    for (size_t n = 0; n < N; n++) {
        for (size_t c = 0; c < d.size(); c++) { d[c] += dout[n * d.size() + c]; }
    }
    return d;
}

inline void test_add_row(Random& random, size_t N, size_t C) {
    const std::string at = strprintf(", N %zu, C %zu", N, C);
    const auto x = stored(random.normals(N * C)), row = stored(random.normals(C));
    const auto dout = stored(random.normals(N * C)), before = random.normals(C);
    std::vector<float> want(N * C);
    for (size_t e = 0; e < N * C; e++) { want[e] = x[e] + row[e % C]; }
    Array<floatX> out(as<floatX>(x));
    Array<float> drow(before), scratch(MAX_SLABS * C);
    add_row(out, Array<floatX>(as<floatX>(row)), N, (int)C, Stream(0));
    const Array<floatX> d_dout(as<floatX>(dout));
    add_row_sums(drow, scratch, view((const floatX*)d_dout, N, C), Stream(0));
    expect(same_bits(out.host(), as<floatX>(want)), "add_row" + at);
    // partial sums of N terms of size 1 are of size sqrt(N), wherever they end
    check_close("drow" + at, drow.host(), row_sums(as<double>(before), as<double>(dout), N), row_sums(before, dout, N),
                std::sqrt((double)N));
}
