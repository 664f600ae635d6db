// test_gelu.cu -- both forms of GELU against oracles in double.
#include "test/oracle.h"

#include "llmc/gelu.cuh"

namespace {

template <class R> R gelu(R x) {
    const R u = std::sqrt((R)2 / (R)M_PI) * (x + (R)0.044715 * x * x * x);
    return x / 2 * (1 + std::tanh(u));
}
template <class R> R gelu_slope(R x) {
    const R u = std::sqrt((R)2 / (R)M_PI) * (x + (R)0.044715 * x * x * x), t = std::tanh(u);
    const R du = std::sqrt((R)2 / (R)M_PI) * (1 + 3 * (R)0.044715 * x * x);
    return (1 + t) / 2 + x / 2 * (1 - t * t) * du;
}

// BERT's: x Phi(x), and its slope Phi(x) + x phi(x)
template <class R> R gelu_erf(R x) { return x * std::erfc(-x / std::sqrt((R)2)) / 2; }
template <class R> R gelu_erf_slope(R x) {
    return std::erfc(-x / std::sqrt((R)2)) / 2 + x * std::exp(-x * x / 2) / std::sqrt(2 * (R)M_PI);
}

struct Form {
    const char* name;
    double (*exact)(double), (*exact_slope)(double);
    float (*plain)(float), (*plain_slope)(float);
    void (*forward)(floatX*, const floatX*, size_t, Stream);
    void (*backward)(floatX*, float*, float*, const floatX*, const floatX*, size_t, int, Stream);
};
const Form FORMS[] = {
    {"gelu", gelu<double>, gelu_slope<double>, gelu<float>, gelu_slope<float>, gelu_forward, gelu_backward},
    {"gelu_erf", gelu_erf<double>, gelu_erf_slope<double>, gelu_erf<float>, gelu_erf_slope<float>, gelu_erf_forward,
     gelu_erf_backward},
};

// the error of float32 loops over the whole range: on a few inputs it may be small by luck
double plain_error(float (*f)(float), double (*exact)(double)) {
    double worst = 0;
    for (float x = -12.0f; x <= 12.0f; x += 0.007f) { worst = std::max(worst, std::fabs(f(x) - exact(x))); }
    return worst;
}

// inp, dout (rows,C)
void test_gelu(Random& random, const Form& form, const std::vector<float>& inp, const std::vector<float>& dout,
               size_t rows, size_t C) {
    INFO(form.name << ", " << rows << " rows, C " << C);
    const size_t N = inp.size();
    REQUIRE(rows * C == N);
    const std::vector<float> dbias0 = random.normals(C);
    std::vector<double> want(N), dwant(N), sums = as<double>(dbias0);
    std::vector<float> plain(N), dplain(N), plain_sums = dbias0;
    for (size_t i = 0; i < N; i++) {
        want[i] = form.exact((double)inp[i]);
        plain[i] = form.plain(inp[i]);
        dwant[i] = dout[i] * form.exact_slope((double)inp[i]);
        dplain[i] = dout[i] * form.plain_slope(inp[i]);
        sums[i % C] += dwant[i];
        plain_sums[i % C] += dplain[i];
    }
    const Array<float> d_inp(inp), d_dout(dout);
    Array<float> out(N), dinp(N), dbias(dbias0), scratch(MAX_SLABS * C);
    form.forward(out, d_inp, N, Stream(0));
    form.backward(dinp, dbias, scratch, d_dout, d_inp, rows, (int)C, Stream(0));
    const double error = plain_error(form.plain, form.exact);
    const double slope_error = plain_error(form.plain_slope, form.exact_slope);
    check_close(form.name, out.host(), want, plain, error / (FLT_EPSILON / 2));
    check_close(form.name + std::string(" backward"), dinp.host(), dwant, dplain,
                largest(dout) * slope_error / (FLT_EPSILON / 2));
    // partial sums of `rows` terms of size 1 are of size sqrt(rows), wherever they end
    check_close(form.name + std::string(" bias"), dbias.host(), sums, plain_sums,
                std::sqrt((double)rows) * largest(dout) * slope_error / (FLT_EPSILON / 2));
    // in place
    Array<float> x(inp), dy(dout), dbias2(dbias0);
    form.forward(x, x, N, Stream(0));
    form.backward(dy, dbias2, scratch, dy, d_inp, rows, (int)C, Stream(0));
    CHECK(same_bits(x.host(), out.host()));
    CHECK(same_bits(dy.host(), dinp.host()));
    CHECK(same_bits(dbias2.host(), dbias.host()));
}

} // namespace

TEST_CASE("gelu oracle: its slope is its derivative", "[gelu]") {
    for (const Form& form : FORMS) {
        INFO(form.name);
        for (double x = -6; x <= 6; x += 0.37) {
            CHECK(std::fabs((form.exact(x + 1e-5) - form.exact(x - 1e-5)) / 2e-5 - form.exact_slope(x)) <= 1e-9);
        }
    }
}

TEST_CASE("gelu, forward and backward", "[gelu][race][asan]") {
    Random random;
    INFO(random);
    for (const auto& [N, C] : {std::pair<size_t, size_t>(1, 1), {1, 37}, {40, 25}, {37, 1}}) {
        for (const Form& form : FORMS) {
            test_gelu(random, form, random.normals(N * C, 0, 2), random.normals(N * C), N, C);
        }
    }
}

TEST_CASE("gelu over several blocks, and the whole range", "[gelu][asan]") {
    Random random;
    INFO(random);
    for (const auto& [N, C] : {std::pair<size_t, size_t>(2, 16384), {16385, 1}, {2100, 48}}) {
        for (const Form& form : FORMS) {
            test_gelu(random, form, random.uniforms(N * C, -12, 12), random.normals(N * C), N, C);
        }
    }
    for (const Form& form : FORMS) {
        test_gelu(random, form, {0.0f, -0.0f, 1e-30f, -1e-30f, 30.0f, -30.0f, 1e3f, -1e3f, 1e10f, -1e10f},
                  std::vector<float>(10, 1.0f), 1, 10);
    }
}

TEST_CASE("gelu keeps its relative precision in the negative tail", "[gelu]") {
    std::vector<float> x, got;
    for (float v = -5.0f; v < -1.0f; v += 0.003f) { x.push_back(v); }
    Array<float> out(x.size());
    gelu_forward(out, Array<float>(x), x.size(), Stream(0));
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
    gelu_erf_forward(out, Array<float>(x), N, Stream(0));
    gelu_erf_backward(slope, dbias, scratch, Array<float>(std::vector<float>(N, 1.0f)), Array<float>(x), 1, (int)N,
                      Stream(0));
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
    for (const Form& form : FORMS) {
        INFO(form.name);
        Array<float> out(3), dinp(3), dbias(3), scratch(MAX_SLABS * 3);
        const Array<float> inp(std::vector<float>{1.0f, NAN, 2.0f}), dout(std::vector<float>{1.0f, 1.0f, 1.0f});
        form.forward(out, inp, 3, Stream(0));
        form.backward(dinp, dbias, scratch, dout, inp, 1, 3, Stream(0));
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
        gelu_backward(dinp, dbias, scratch, dout, inp, N, (int)C, Stream(0));
        std::vector<float> all = dinp.host(), sums = dbias.host();
        all.insert(all.end(), sums.begin(), sums.end());
        return all;
    });
}
