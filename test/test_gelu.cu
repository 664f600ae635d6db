// test_gelu.cu -- GELU (tanh) against an oracle in double.
#include "oracle.h"

#include "../llmc/gelu.cuh"

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

// what float32 loops are off by over the whole range: few inputs may be lucky ones
double plain_error(float (*f)(float), double (*exact)(double)) {
    double worst = 0;
    for (float x = -12.0f; x <= 12.0f; x += 0.007f) { worst = std::max(worst, std::fabs(f(x) - exact(x))); }
    return worst;
}

void test_gelu(const std::vector<float>& inp, const std::vector<float>& dout) {
    const size_t N = inp.size();
    std::vector<double> want(N), dwant(N);
    std::vector<float> plain(N), dplain(N);
    for (size_t i = 0; i < N; i++) {
        want[i] = gelu((double)inp[i]);
        plain[i] = gelu(inp[i]);
        dwant[i] = dout[i] * gelu_slope((double)inp[i]);
        dplain[i] = dout[i] * gelu_slope(inp[i]);
    }
    const Array<float> d_inp(inp), d_dout(dout);
    Array<float> out(N), dinp(N);
    gelu_forward(out, d_inp, N, Stream(0));
    gelu_backward(dinp, d_dout, d_inp, N, Stream(0));
    static const double error = plain_error(gelu<float>, gelu<double>), slope_error = plain_error(gelu_slope<float>, gelu_slope<double>);
    check_close("gelu", out.host(), want, plain, error / (FLT_EPSILON / 2));
    check_close("gelu backward", dinp.host(), dwant, dplain, largest(dout) * slope_error / (FLT_EPSILON / 2));
    // in place
    Array<float> x(inp), dy(dout);
    gelu_forward(x, x, N, Stream(0));
    gelu_backward(dy, dy, d_inp, N, Stream(0));
    CHECK(same_bits(x.host(), out.host()));
    CHECK(same_bits(dy.host(), dinp.host()));
}

} // namespace

TEST_CASE("gelu oracle: its slope is its derivative", "[gelu]") {
    for (double x = -6; x <= 6; x += 0.37) {
        CHECK(std::fabs((gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5 - gelu_slope(x)) <= 1e-9);
    }
}

TEST_CASE("gelu, forward and backward", "[gelu][race][asan]") {
    Random random;
    INFO(random);
    for (size_t N : {1, 2, 37, 1000}) {
        INFO("N " << N);
        test_gelu(random.normals(N, 0, 2), random.normals(N));
    }
}

TEST_CASE("gelu over several blocks, and the whole range", "[gelu][asan]") {
    Random random;
    INFO(random);
    for (size_t N : {16384, 16385, 100003}) {
        INFO("N " << N);
        test_gelu(random.uniforms(N, -12, 12), random.normals(N));
    }
    test_gelu({0.0f, -0.0f, 1e-30f, -1e-30f, 30.0f, -30.0f, 1e3f, -1e3f, 1e10f, -1e10f}, std::vector<float>(10, 1.0f));
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
    // u is rounded five times and reaches 9, e^u turns that into a relative error of 9 * 5 / 2 ulp; 1 + tanh would lose everything
    CHECK(worst <= 9 * 5 * FLT_EPSILON / 2 + 4 * FLT_EPSILON);
}

TEST_CASE("gelu hands a NaN on", "[gelu]") {
    Array<float> out(3), dinp(3);
    const Array<float> inp(std::vector<float>{1.0f, NAN, 2.0f}), dout(std::vector<float>{1.0f, 1.0f, 1.0f});
    gelu_forward(out, inp, 3, Stream(0));
    gelu_backward(dinp, dout, inp, 3, Stream(0));
    CHECK(std::isnan(out.host()[1]));
    CHECK(std::isnan(dinp.host()[1]));
    CHECK_FALSE(std::isnan(out.host()[2]));
}
