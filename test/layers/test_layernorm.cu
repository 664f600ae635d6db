// test_layernorm.cu -- layernorm against an oracle in double.
#include "test/oracle.h"

#include "llmc/layernorm.cuh"

namespace {

constexpr float EPS = 1e-5f;

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
            const R s = 1 / std::sqrt(v + (R)EPS);
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

void test_layernorm(Random& random, size_t N, size_t C) {
    INFO("N " << N << ", C " << C);
    const auto inp = random.normals(N * C, 0.5, 2);
    const auto weight = random.normals(C, 1, 0.5);
    const auto bias = random.normals(C);
    const auto dout = random.normals(N * C);
    const auto dinp0 = random.normals(N * C);
    const auto dweight0 = random.normals(C);
    const auto dbias0 = random.normals(C);
    const auto x = as<double>(inp);
    const auto w = as<double>(weight);
    const auto b = as<double>(bias);
    const auto dy = as<double>(dout);
    const LayernormOracle<double> want(x, w, b, dy, N, C);
    const LayernormOracle<float> plain(inp, weight, bias, dout, N, C);

    Array<float> out(N * C), mean(N), rstd(N), scratch(MAX_SLABS * 2 * C);
    Array<float> dinp(dinp0), dweight(dweight0), dbias(dbias0);
    const Array<float> d_inp(inp), d_weight(weight), d_bias(bias), d_dout(dout);
    layernorm_forward(out, mean, rstd, d_inp, d_weight, d_bias, N, (int)C, EPS, Stream(0));
    check_close("out", out.host(), want.out, plain.out);
    check_close("mean", mean.host(), want.mean, plain.mean, largest(inp));
    check_close("rstd", rstd.host(), want.rstd, plain.rstd);

    Array<float> out2(N * C);
    layernorm_forward(out2, nullptr, nullptr, d_inp, d_weight, d_bias, N, (int)C, EPS, Stream(0));
    CHECK(same_bits(out.host(), out2.host()));

    // dinp, dweight, dbias accumulate: the sum is rounded at its own size
    layernorm_backward(dinp, dweight, dbias, scratch, d_dout, d_inp, mean, rstd, d_weight, N, (int)C, Stream(0));
    auto accumulated = [&](const char* name, const Array<float>& got, const std::vector<float>& before,
                           std::vector<double> sum,
                           std::vector<float> plain_sum, double scale) {
        for (size_t i = 0; i < sum.size(); i++) {
            sum[i] += before[i];
            plain_sum[i] += before[i];
        }
        check_close(name, got.host(), sum, plain_sum, scale);
    };
    // dn - mean(dn) is rounded at the size of dn even where it is 0 (C = 1, where rstd is 316), then multiplied by rstd
    accumulated("dinp", dinp, dinp0, want.dinp, plain.dinp, largest(want.rstd) * largest(dout) * largest(weight));
    // partial sums of N terms of size 1 are of size sqrt(N), wherever they end
    accumulated("dweight", dweight, dweight0, want.dweight, plain.dweight, std::sqrt((double)N));
    accumulated("dbias", dbias, dbias0, want.dbias, plain.dbias, std::sqrt((double)N));
}

} // namespace

TEST_CASE("layernorm oracle: its backward is its forward's derivative", "[layernorm]") {
    Random random;
    INFO(random);
    const size_t N = 3, C = 7;
    std::vector<double> inp = as<double>(random.normals(N * C));
    std::vector<double> weight = as<double>(random.normals(C));
    std::vector<double> bias = as<double>(random.normals(C));
    const std::vector<double> dout = as<double>(random.normals(N * C));
    const LayernormOracle<double> o(inp, weight, bias, dout, N, C);
    auto loss = [&] { return dot(LayernormOracle<double>(inp, weight, bias, dout, N, C).out, dout); };
    check_gradient("dinp", loss, inp, o.dinp, random, 21);
    check_gradient("dweight", loss, weight, o.dweight, random);
    check_gradient("dbias", loss, bias, o.dbias, random);
}

TEST_CASE("layernorm, small shapes", "[layernorm][race][asan]") {
    Random random;
    INFO(random);
    for (size_t N : {1, 2, 37}) {
        for (size_t C : {1, 37, 64}) { test_layernorm(random, N, C); }
    }
    test_layernorm(random, 70, 5);          // three slabs
}

TEST_CASE("layernorm, large shapes", "[layernorm][asan]") {
    Random random;
    INFO(random);
    test_layernorm(random, 1000, 770);
    test_layernorm(random, 2049, 37);       // 64 slabs of 33 rows: the last ones are empty
    test_layernorm(random, 37, 770);
}

TEST_CASE("layernorm keeps a small variance beside a large mean", "[layernorm]") {
    Random random;
    INFO(random);
    const size_t C = 770;
    const auto inp = random.normals(C, 1000, 0.1);
    const auto ones = std::vector<float>(C, 1.0f);
    const auto zeros = std::vector<float>(C, 0.0f);
    const LayernormOracle<double> want(as<double>(inp), as<double>(ones), as<double>(zeros), as<double>(zeros), 1, C);
    Array<float> out(C);
    layernorm_forward(out, nullptr, nullptr, Array<float>(inp), Array<float>(ones), Array<float>(zeros), 1, (int)C,
                      EPS, Stream(0));
    // the mean is off by its last bit, 6e-5 of 1000, divided by the deviation of 0.1; E[x^2] - E[x]^2: by 60 %
    CHECK(worst_difference(out.host(), want.out) <= 2 * 1000 * FLT_EPSILON / 0.1);
}

TEST_CASE("layernorm: same bits for any number of threads", "[layernorm]") {
    Random random;
    INFO(random);
    const size_t N = 333, C = 130;
    const Array<float> inp(random.normals(N * C)), weight(random.normals(C));
    const Array<float> bias(random.normals(C)), dout(random.normals(N * C));
    check_thread_invariance([&] {
        Array<float> out(N * C), mean(N), rstd(N), scratch(MAX_SLABS * 2 * C);
        const std::vector<float> zeros(C, 0.0f);
        Array<float> dinp(std::vector<float>(N * C, 0.0f)), dweight(zeros), dbias(zeros);
        layernorm_forward(out, mean, rstd, inp, weight, bias, N, (int)C, EPS, Stream(0));
        layernorm_backward(dinp, dweight, dbias, scratch, dout, inp, mean, rstd, weight, N, (int)C, Stream(0));
        std::vector<float> all = out.host();
        for (const Array<float>* a : {&mean, &rstd, &dinp, &dweight, &dbias}) {
            const std::vector<float> v = a->host();
            all.insert(all.end(), v.begin(), v.end());
        }
        return all;
    });
}
