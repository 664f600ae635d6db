// test_layernorm.cu -- layernorm against an oracle in double.
#include "test/layers/layernorm_oracle.h"
#include "test/oracle.h"

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

TEST_CASE("layernorm, small shapes", "[layernorm][asan]") {
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
                      LAYERNORM_EPS, Stream(0));
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
        layernorm_forward(out, mean, rstd, inp, weight, bias, N, (int)C, LAYERNORM_EPS, Stream(0));
        layernorm_backward(dinp, dweight, dbias, scratch, dout, inp, mean, rstd, weight, N, (int)C, Stream(0));
        std::vector<float> all = out.host();
        for (const Array<float>* a : {&mean, &rstd, &dinp, &dweight, &dbias}) {
            const std::vector<float> v = a->host();
            all.insert(all.end(), v.begin(), v.end());
        }
        return all;
    });
}
