// gelu_oracle.h -- both forms of GELU and their slopes, and the kernels against them.
#pragma once

#include "test/harness.h"

#include "llmc/gelu.cuh"

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

struct GeluForm {
    const char* name;
    double (*exact)(double), (*exact_slope)(double);
    float (*plain)(float), (*plain_slope)(float);
    Gelu kernels;
};
inline const GeluForm GELU_FORMS[] = {
    {"gelu", gelu<double>, gelu_slope<double>, gelu<float>, gelu_slope<float>, Gelu::Tanh},
    {"gelu_erf", gelu_erf<double>, gelu_erf_slope<double>, gelu_erf<float>, gelu_erf_slope<float>, Gelu::Erf},
};

// the error of float32 loops over the whole range: on a few inputs it may be small by luck
inline double plain_error(float (*f)(float), double (*exact)(double)) {
    double worst = 0;
    for (float x = -12.0f; x <= 12.0f; x += 0.007f) { worst = std::max(worst, std::fabs(f(x) - exact(x))); }
    return worst;
}

// inp, dout (rows,C)
inline void test_gelu(Random& random, const GeluForm& form, const std::vector<float>& inp,
                      const std::vector<float>& dout, size_t rows, size_t C) {
    const std::string at = strprintf(": %s, %zu rows, C %zu", form.name, rows, C);
    const size_t N = rows * C;
    const std::vector<float> dbias0 = random.normals(C);
    std::vector<double> want(N), dwant(N), sums = as<double>(dbias0);
    std::vector<float> plain(N), dplain(N), plain_sums = dbias0;
    for (size_t i = 0; i < N; i++) {
        want[i] = form.exact((double)inp[i]);
        plain[i] = form.plain(inp[i]);
        dwant[i] = dout[i] * form.exact_slope((double)inp[i]);
        dplain[i] = dout[i] * form.plain_slope(inp[i]);
    }
    const std::vector<floatX> inp_x = as<floatX>(inp), dout_x = as<floatX>(dout);
    const Array<floatX> d_inp(inp_x), d_dout(dout_x);
    Array<floatX> out(N), dinp(N);
    Array<float> dbias(dbias0), scratch(MAX_SLABS * C);
    gelu_forward(out, d_inp, N, form.kernels, Stream(0));
    gelu_backward(dinp, dbias, scratch, d_dout, d_inp, rows, (int)C, form.kernels, Stream(0));
    const double error = plain_error(form.plain, form.exact);
    const double slope_error = plain_error(form.plain_slope, form.exact_slope);
    check_close("out" + at, out.host(), want, plain, error / (FLT_EPSILON / 2));
    check_close("dinp" + at, dinp.host(), dwant, dplain, largest(dout) * slope_error / (FLT_EPSILON / 2));
    const std::vector<float> dx = host_floats(dinp);        // the sums are of what was rounded, where that is bf16
    for (size_t i = 0; i < N; i++) {
        sums[i % C] += sizeof(floatX) == 2 ? dx[i] : dwant[i];
        plain_sums[i % C] += sizeof(floatX) == 2 ? dx[i] : dplain[i];
    }
    // partial sums of `rows` terms of size 1 are of size sqrt(rows), wherever they end
    check_close("dbias" + at, dbias.host(), sums, plain_sums,
                std::sqrt((double)rows) * largest(dout) * slope_error / (FLT_EPSILON / 2));
    // in place
    Array<floatX> x(inp_x), dy(dout_x);
    Array<float> dbias2(dbias0);
    gelu_forward(x, x, N, form.kernels, Stream(0));
    gelu_backward(dy, dbias2, scratch, dy, d_inp, rows, (int)C, form.kernels, Stream(0));
    expect(same_bits(x.host(), out.host()) && same_bits(dy.host(), dinp.host()), "in place" + at);
    expect(same_bits(dbias2.host(), dbias.host()), "dbias in place" + at);
}
