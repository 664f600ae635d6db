// pooling_oracle.h -- pooling in plain loops, and the kernels against it.
#pragma once

#include "test/harness.h"

#include "llmc/contrastive.cuh"

template <class R> struct PoolingOracle {
    std::vector<R> out, dinp;

    PoolingOracle(const std::vector<R>& inp, const std::vector<R>& dout, const std::vector<int>& lengths, size_t T,
                  size_t C, Pooling kind)
        : out(lengths.size() * C), dinp(inp.size()) {
        for (size_t b = 0; b < lengths.size(); b++) {
            const size_t length = kind == Pooling::Cls ? 1 : (size_t)lengths[b];
            for (size_t c = 0; c < C; c++) {
                R sum = 0;
                for (size_t t = 0; t < length; t++) { sum += inp[(b * T + t) * C + c]; }
                out[b * C + c] = sum / (R)length;
                for (size_t t = 0; t < length; t++) { dinp[(b * T + t) * C + c] = dout[b * C + c] / (R)length; }
            }
        }
    }
};

// The padding holds NaN.
inline void test_pooling(Random& random, const std::vector<int>& lengths, size_t T, size_t C, Pooling kind) {
    const size_t B = lengths.size();
    const std::string at = strprintf(", B %zu, T %zu, C %zu, %s", B, T, C, kind == Pooling::Mean ? "mean" : "cls");
    std::vector<float> inp = stored(random.normals(B * T * C, 0.3));
    const std::vector<float> dout = random.normals(B * C);
    for (size_t e = 0; e < inp.size(); e++) {
        if ((int)(e / C % T) >= lengths[e / C / T]) { inp[e] = NAN; }
    }
    const PoolingOracle<double> want(as<double>(inp), as<double>(dout), lengths, T, C, kind);
    const PoolingOracle<float> plain(inp, dout, lengths, T, C, kind);
    const Array<int> d_lengths(lengths);
    Array<float> out(B * C);
    Array<floatX> dinp(B * T * C);                      // starts as NaN: all of it must be overwritten
    poison_shared();
    pooling_forward(out, Array<floatX>(as<floatX>(inp)), d_lengths, (int)B, (int)T, (int)C, kind, Stream(0));
    pooling_backward(dinp, Array<float>(dout), d_lengths, (int)B, (int)T, (int)C, kind, Stream(0));
    // partial sums are of the size of the inputs at least, wherever they end
    check_close("pooling" + at, out.host(), want.out, plain.out, kind == Pooling::Mean ? 1 : 0);
    check_close("pooling backward" + at, dinp.host(), want.dinp, plain.dinp);
    const std::vector<float> d = host_floats(dinp);
    bool zero = true;
    for (size_t e = 0; e < d.size(); e++) {
        if ((int)(e / C % T) >= (kind == Pooling::Cls ? 1 : lengths[e / C / T])) { zero = zero && d[e] == 0.0f; }
    }
    expect(zero, "padding gets zeros" + at);
}
