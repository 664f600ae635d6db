// layernorm_oracle.h -- layernorm in plain loops, and the kernels against it.
#pragma once

#include "test/harness.h"

#include "llmc/layernorm.cuh"

constexpr float LAYERNORM_EPS = 1e-5f;

template <class R> struct LayernormOracle {
    std::vector<R> out, mean, rstd, dinp, dweight, dbias;

    LayernormOracle(const std::vector<R>& inp, const std::vector<R>& weight, const std::vector<R>& bias,
                    const std::vector<R>& dout, size_t N, size_t C)
        : out(N * C), mean(N), rstd(N), dinp(N * C), dweight(C), dbias(C) {
        for (size_t n = 0; n < N; n++) {
            const R *x = &inp[n * C], *dy = &dout[n * C];
            R m = 0, v = 0;
            for (size_t c = 0; c < C; c++) { m += x[c] / (R)C; }
            for (size_t c = 0; c < C; c++) { v += (x[c] - m) * (x[c] - m) / (R)C; }
            const R s = 1 / std::sqrt(v + (R)LAYERNORM_EPS);
            mean[n] = m;
            rstd[n] = s;
            for (size_t c = 0; c < C; c++) { out[n * C + c] = (x[c] - m) * s * weight[c] + bias[c]; }
            // d out_c / d x_k = w_c (s [c = k] - s / C - (x_c - m) s^3 (x_k - m) / C), summed with dy_c
            R a = 0, b = 0;
            for (size_t c = 0; c < C; c++) {
                a += dy[c] * weight[c];
                b += dy[c] * weight[c] * (x[c] - m);
                dweight[c] += dy[c] * (x[c] - m) * s;
                dbias[c] += dy[c];
            }
            for (size_t k = 0; k < C; k++) {
                dinp[n * C + k] = s * dy[k] * weight[k] - s * a / (R)C - s * s * s * (x[k] - m) * b / (R)C;
            }
        }
    }
};

inline void test_layernorm(Random& random, size_t N, size_t C) {
    const std::string at = strprintf(", N %zu, C %zu", N, C);
    const auto inp = stored(random.normals(N * C, 0.5, 2)), weight = stored(random.normals(C, 1, 0.5));
    const auto bias = stored(random.normals(C)), dout = stored(random.normals(N * C));
    const auto dinp0 = stored(random.normals(N * C));
    const auto dweight0 = random.normals(C);
    const auto dbias0 = random.normals(C);
    const auto x = as<double>(inp);
    const auto w = as<double>(weight);
    const auto b = as<double>(bias);
    const auto dy = as<double>(dout);
    const LayernormOracle<double> want(x, w, b, dy, N, C);
    const LayernormOracle<float> plain(inp, weight, bias, dout, N, C);

    Array<floatX> out(N * C), dinp(as<floatX>(dinp0));
    Array<float> mean(N), rstd(N), scratch(MAX_SLABS * 2 * C), dweight(dweight0), dbias(dbias0);
    const Array<floatX> d_inp(as<floatX>(inp)), d_weight(as<floatX>(weight)), d_bias(as<floatX>(bias));
    const Array<floatX> d_dout(as<floatX>(dout));
    layernorm_forward(out, mean, rstd, d_inp, d_weight, d_bias, N, (int)C, LAYERNORM_EPS, Stream(0));
    check_close("out" + at, out.host(), want.out, plain.out);
    check_close("mean" + at, mean.host(), want.mean, plain.mean, largest(inp));
    check_close("rstd" + at, rstd.host(), want.rstd, plain.rstd);

    Array<floatX> out2(N * C);
    layernorm_forward(out2, nullptr, nullptr, d_inp, d_weight, d_bias, N, (int)C, LAYERNORM_EPS, Stream(0));
    expect(same_bits(out.host(), out2.host()), "without mean and rstd" + at);

    // dinp, dweight, dbias accumulate: the sum is rounded at its own size
    layernorm_backward(dinp, dweight, dbias, scratch, d_dout, d_inp, mean, rstd, d_weight, N, (int)C, Stream(0));
    const auto accumulated = [&](const std::string& name, const auto& got, const std::vector<float>& before,
                                 std::vector<double> sum, std::vector<float> plain_sum, double scale) {
        for (size_t i = 0; i < sum.size(); i++) {
            sum[i] += before[i];
            plain_sum[i] += before[i];
        }
        check_close(name + at, got.host(), sum, plain_sum, scale);
    };
    // dn - mean(dn) is rounded at the size of dn even where it is 0 (C = 1, where rstd is 316), then multiplied by rstd
    accumulated("dinp", dinp, dinp0, want.dinp, plain.dinp, largest(want.rstd) * largest(dout) * largest(weight));
    // partial sums of N terms of size 1 are of size sqrt(N), wherever they end
    accumulated("dweight", dweight, dweight0, want.dweight, plain.dweight, std::sqrt((double)N));
    accumulated("dbias", dbias, dbias0, want.dbias, plain.dbias, std::sqrt((double)N));
}
