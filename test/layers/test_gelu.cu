// test_gelu.cu -- both forms of GELU against oracles in double.
#include "test/layers/gelu_oracle.h"
#include "test/oracle.h"

TEST_CASE("gelu oracle: its slope is its derivative", "[gelu]") {
    for (const GeluForm& form : GELU_FORMS) {
        INFO(form.name);
        for (double x = -6; x <= 6; x += 0.37) {
            CHECK(std::fabs((form.exact(x + 1e-5) - form.exact(x - 1e-5)) / 2e-5 - form.exact_slope(x)) <= 1e-9);
        }
    }
}

TEST_CASE("gelu, forward and backward", "[gelu][asan]") {
    Random random;
    INFO(random);
    for (const auto& [N, C] : {std::pair<size_t, size_t>(1, 1), {1, 37}, {40, 25}, {37, 1}}) {
        for (const GeluForm& form : GELU_FORMS) {
            test_gelu(random, form, random.normals(N * C, 0, 2), random.normals(N * C), N, C);
        }
    }
}

TEST_CASE("gelu over several blocks, and the whole range", "[gelu][asan]") {
    Random random;
    INFO(random);
    for (const auto& [N, C] : {std::pair<size_t, size_t>(2, 16384), {16385, 1}, {2100, 48}}) {
        for (const GeluForm& form : GELU_FORMS) {
            test_gelu(random, form, random.uniforms(N * C, -12, 12), random.normals(N * C), N, C);
        }
    }
    for (const GeluForm& form : GELU_FORMS) {
        test_gelu(random, form, {0.0f, -0.0f, 1e-30f, -1e-30f, 30.0f, -30.0f, 1e3f, -1e3f, 1e10f, -1e10f},
                  std::vector<float>(10, 1.0f), 1, 10);
    }
}

TEST_CASE("gelu keeps its relative precision in the negative tail", "[gelu]") {
    std::vector<float> x, got;
    for (float v = -5.0f; v < -1.0f; v += 0.003f) { x.push_back(v); }
    Array<float> out(x.size());
    gelu_forward(out, Array<float>(x), x.size(), Gelu::Tanh, Stream(0));
    got = out.host();
    double worst = 0;
    for (size_t i = 0; i < x.size(); i++) {
        const double v = x[i], want = v / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
        worst = std::max(worst, std::fabs(got[i] / want - 1));
    }
    // u is rounded five times and reaches 9, e^u turns that into a relative error of 9 * 5 / 2 ulp; 1 + tanh would lose
    // everything
    CHECK(worst <= 9 * 5 * FLT_EPSILON / 2 + 4 * FLT_EPSILON);
}

TEST_CASE("gelu_erf keeps its relative precision, in the left tail and in its slope", "[gelu]") {
    std::vector<float> x;
    for (float v = -12.8f; v < 12.8f; v += 0.0013f) { x.push_back(v); }
    const size_t N = x.size();
    Array<float> out(N), slope(N), dbias(N), scratch(MAX_SLABS * N);
    gelu_forward(out, Array<float>(x), N, Gelu::Erf, Stream(0));
    gelu_backward(slope, dbias, scratch, Array<float>(std::vector<float>(N, 1.0f)), Array<float>(x), 1, (int)N,
                  Gelu::Erf, Stream(0));
    const std::vector<float> got = out.host(), got_slope = slope.host();
    double worst = 0, worst_slope = 0;
    for (size_t i = 0; i < N; i++) {
        const double v = x[i];
        const double cdf = std::erfc(-v / std::sqrt(2.0)) / 2;
        const double density = v * std::exp(-v * v / 2) / std::sqrt(2 * M_PI);
        worst = std::max(worst, std::fabs(got[i] / (v * cdf) - 1));
        worst_slope = std::max(worst_slope,
                               std::fabs(got_slope[i] - (cdf + density)) / std::max(cdf, std::fabs(density)));
    }
    if (getenv("CABLE_TEST_ERRORS") != nullptr) {
        printf("gelu_erf: relative error %.2f ulp of 1, slope %.2f\n", worst / FLT_EPSILON, worst_slope / FLT_EPSILON);
    }
    // measured: 2.6 times 2^-23, both; the slope's is relative to the larger of its terms, which cancel at x = -0.75
    CHECK(worst <= 5 * FLT_EPSILON);
    CHECK(worst_slope <= 5 * FLT_EPSILON);
}

TEST_CASE("gelu hands a NaN on", "[gelu]") {
    for (const GeluForm& form : GELU_FORMS) {
        INFO(form.name);
        Array<float> out(3), dinp(3), dbias(3), scratch(MAX_SLABS * 3);
        const Array<float> inp(std::vector<float>{1.0f, NAN, 2.0f}), dout(std::vector<float>{1.0f, 1.0f, 1.0f});
        gelu_forward(out, inp, 3, form.kernels, Stream(0));
        gelu_backward(dinp, dbias, scratch, dout, inp, 1, 3, form.kernels, Stream(0));
        CHECK(std::isnan(out.host()[1]));
        CHECK(std::isnan(dinp.host()[1]));
        CHECK_FALSE(std::isnan(out.host()[2]));
    }
}

TEST_CASE("gelu: same bits for any number of threads", "[gelu]") {
    Random random;
    INFO(random);
    const size_t N = 200, C = 77;
    const Array<float> inp(random.normals(N * C)), dout(random.normals(N * C));
    check_thread_invariance([&] {
        Array<float> dinp(N * C), dbias(C), scratch(MAX_SLABS * C);
        gelu_backward(dinp, dbias, scratch, dout, inp, N, (int)C, Gelu::Tanh, Stream(0));
        std::vector<float> all = dinp.host(), sums = dbias.host();
        all.insert(all.end(), sums.begin(), sums.end());
        return all;
    });
}
