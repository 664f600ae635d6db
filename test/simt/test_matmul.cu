// test_matmul.cu -- the products of a CUDA build, by the portable kernel and by cuBLASLt: the library itself on a GPU,
// and on the emulator its stand-in cublasLt.h, which records its calls.
#define STEP_EPILOGUES 3            // all
#include "llmc/matmul.cuh"
#include "test/layers/gelu_oracle.h"
#include "test/simt/kernel_test.h"

constexpr int BITS = sizeof(floatX) == 4 ? 24 : 8;              // of a significand

// Whether got is want, rounded once: off by half a unit of the last place, and by the error of a float32 sum whose
// terms have the absolute sum `size`
static bool rounded_once(float got, double want, double size, int bits) {
    int e;
    std::frexp(want, &e);
    return std::fabs(got - want) <= std::ldexp(0.5, e - bits) + 1e-6 * size;
}

struct Product {
    size_t N, C, OC;
    // what floatX can hold; the last two are float32
    std::vector<float> inp, weight, bias, residual, dout, dweight, dbias;
    std::vector<floatX> out, dinp;
    std::vector<float> new_dweight, new_dbias;
    bool with_bias, with_residual;

    Product(size_t N, size_t C, size_t OC, bool with_bias, bool with_residual, uint64_t stream = 0)
        : N(N), C(C), OC(OC), inp(draw(N * C, stream + 1)), weight(draw(OC * C, stream + 2)),
          bias(draw(OC, stream + 3, 10)), residual(draw(N * OC, stream + 4, 10)), dout(draw(N * OC, stream + 5)),
          dweight(normals(OC * C, stream + 6)), dbias(normals(OC, stream + 7)), with_bias(with_bias),
          with_residual(with_residual) {}
    static std::vector<float> draw(size_t n, uint64_t stream, double std = 1) {
        return to_float(converted<floatX>(normals(n, stream, std)));
    }
    static std::vector<floatX> x(const std::vector<float>& v) { return converted<floatX>(v); }

    // (N,OC) in rows that are `row` apart, with NaN between them; and out of them
    std::vector<float> wide(const std::vector<float>& v, size_t row) const {
        std::vector<float> to(N * row, NAN);
        for (size_t n = 0; n < N; n++) { std::copy_n(&v[n * OC], OC, &to[n * row]); }
        return to;
    }
    // gap: elements between the rows of out, residual and dout
    void run(Stream stream = Stream(0), size_t gap = 0) {
        const size_t row = OC + gap;
        const DeviceArray<floatX> d_inp(x(inp)), d_weight(x(weight)), d_bias(x(bias)),
            d_residual(x(wide(residual, row))), d_dout(x(wide(dout, row)));
        DeviceArray<floatX> d_out(x(std::vector<float>(N * row, NAN))), d_dinp(N * C);
        DeviceArray<float> d_dweight(dweight), d_dbias(dbias), scratch(MAX_SLABS * OC);
        const Matrix<floatX> inp_ = view(d_inp.p, N, C), weight_ = view(d_weight.p, OC, C);
        const floatX* bias_ = with_bias ? d_bias.p : nullptr;
        const floatX* residual_ = with_residual ? d_residual.p : nullptr;
        matmul_forward(d_out.p, inp_, weight_, bias_, residual_, stream, (int)row);
        matmul_backward(d_dinp.p, d_dweight.p, d_dbias.p, scratch.p, d_dout.p, nullptr, inp_, weight_, stream,
                        (int)row);
        const std::vector<floatX> rows = d_out.host();
        size_t untouched = 0;
        out.clear();
        for (size_t n = 0; n < N; n++) {
            out.insert(out.end(), &rows[n * row], &rows[n * row] + OC);
            for (size_t c = OC; c < row; c++) { untouched += std::isnan((float)rows[n * row + c]); }
        }
        EXPECT(untouched == N * gap, "%zu of %zu elements between rows are as before", untouched, N * gap);
        dinp = d_dinp.host();
        new_dweight = d_dweight.host();
        new_dbias = d_dbias.host();
    }
    // Finds the first element that is not what the loops say. terms(add): calls add(x) for each term of the element's
    // sum.
    std::string wrong;
    template <class F> void compare(const char* name, size_t row, size_t column, float got, int bits, F terms) {
        double want = 0, size = 0;
        terms([&](double x) { want += x; size += std::fabs(x); });
        if (wrong.empty() && !rounded_once(got, want, size, bits)) {
            wrong = strprintf("%s(%zu,%zu): expected %.9g, got %.9g", name, row, column, want, got);
        }
    }
    void expect_right() {
        wrong.clear();
        for (size_t n = 0; n < N; n++) {
            for (size_t o = 0; o < OC; o++) {
                compare("out", n, o, (float)out[n * OC + o], BITS, [&](auto add) {
                    if (with_bias) { add(bias[o]); }
                    if (with_residual) { add(residual[n * OC + o]); }
                    for (size_t c = 0; c < C; c++) { add((double)inp[n * C + c] * weight[o * C + c]); }
                });
            }
            for (size_t c = 0; c < C; c++) {
                compare("dinp", n, c, (float)dinp[n * C + c], BITS, [&](auto add) {
                    for (size_t o = 0; o < OC; o++) { add((double)dout[n * OC + o] * weight[o * C + c]); }
                });
            }
        }
        for (size_t o = 0; o < OC; o++) {
            for (size_t c = 0; c < C; c++) {
                compare("dweight", o, c, new_dweight[o * C + c], 24, [&](auto add) {
                    add(dweight[o * C + c]);
                    for (size_t n = 0; n < N; n++) { add((double)dout[n * OC + o] * inp[n * C + c]); }
                });
            }
            compare("dbias", o, 0, new_dbias[o], 24, [&](auto add) {
                add(dbias[o]);
                for (size_t n = 0; n < N; n++) { add(dout[n * OC + o]); }
            });
        }
        EXPECT(wrong.empty(), "N %zu, C %zu, OC %zu%s%s: %s", N, C, OC, with_bias ? ", bias" : "",
               with_residual ? ", residual" : "", wrong.c_str());
    }
};

KERNEL_TEST("a matmul is right and rounded once, where rows are aligned and where they are not") {
    struct Shape { size_t N, C, OC; };
    const Shape shapes[] = {{1, 64, 72}, {37, 16, 24}, {70, 40, 8},   {33, 20, 24}, {33, 24, 20},
                  {5, 7, 9},   {1, 1, 1},    {130, 8, 264}, {70, 9, 70}};
    uint64_t stream = 0;
    for (const auto& s : shapes) {
        for (int k = 0; k < 4; k++) {
            Product p(s.N, s.C, s.OC, k % 2 == 1, k / 2 == 1, stream += 10);
            for (size_t gap : {0, 8, 3}) {                          // aligned, aligned, and not
                p.run(Stream(0), gap);
                p.expect_right();
            }
        }
    }
}

// The double, or the library, may round what is between the sum and the result in float32.
static double apart(const std::vector<floatX>& got, const std::vector<double>& want) {
    return relative_l2(to_float(got), want);
}
KERNEL_TEST("GELU with its product: of the float32 sums forwards, of their rounded copy backwards") {
    const size_t N = 70, C = 40;
    const size_t OC = 24;
    const auto draw = [](size_t n, uint64_t stream, double std) { return Product::x(Product::draw(n, stream, std)); };
    const DeviceArray<floatX> inp(draw(N * C, 300, 1.0)), weight(draw(OC * C, 301, 0.1));
    const DeviceArray<floatX> bias(draw(OC, 302, 0.3));
    const DeviceArray<floatX> dout(draw(N * C, 303, 1.0)), weight2(draw(C * OC, 304, 1.0));
    DeviceArray<floatX> out(N * OC), pre(N * OC);
    DeviceArray<floatX> dpre(N * OC);
    DeviceArray<float> dpre_sum(std::vector<float>(OC, 0.0f)), dweight2(std::vector<float>(C * OC, 0.0f));
    DeviceArray<float> scratch(MAX_SLABS * C);
    const bool whole =
        matmul_gelu_forward(out.p, pre.p, view(inp.p, N, C), view(weight.p, OC, C), bias.p, true, Stream(0));
    EXPECT(whole == (sizeof(floatX) == 2), "only bf16 products have epilogues");
    if (!whole) { return; }
    const std::vector<float> x = to_float(inp.host()), w = to_float(weight.host());
    const std::vector<float> b = to_float(bias.host());
    const std::vector<float> dy = to_float(dout.host()), w2 = to_float(weight2.host());
    std::vector<double> sums(N * OC), gelus, of_rounded, slopes(N * OC);
    for (size_t i = 0; i < N * OC; i++) {
        sums[i] = b[i % OC];
        for (size_t c = 0; c < C; c++) { sums[i] += (double)x[i / OC * C + c] * w[i % OC * C + c]; }
    }
    const std::vector<float> rounded = to_float(pre.host());
    for (double s : sums) { gelus.push_back(gelu(s)); }
    for (float s : rounded) { of_rounded.push_back(gelu((double)s)); }
    EXPECT(apart(pre.host(), sums) < 3e-3, "the sums are off by %g", apart(pre.host(), sums));
    EXPECT(apart(out.host(), gelus) < 3e-3, "their GELU is off by %g", apart(out.host(), gelus));
    EXPECT(apart(out.host(), gelus) < apart(out.host(), of_rounded), "it is nearer to the rounded sums' GELU");
    // backwards: dout (N,C) weight2 (C,OC), times the slope
    EXPECT(matmul_gelu_backward(dpre.p, dpre_sum.p, dweight2.p, nullptr, scratch.p, dout.p, pre.p,
                                view(out.p, N, OC), view(weight2.p, C, OC), Stream(0)), "not in one call");
    std::vector<double> slope_sums(OC);
    for (size_t i = 0; i < N * OC; i++) {
        for (size_t c = 0; c < C; c++) { slopes[i] += (double)dy[i / OC * C + c] * w2[c * OC + i % OC]; }
        slopes[i] *= gelu_slope((double)rounded[i]);
        slope_sums[i % OC] += slopes[i];
    }
    EXPECT(apart(dpre.host(), slopes) < 3e-3, "the gradient is off by %g", apart(dpre.host(), slopes));
    EXPECT(relative_l2(dpre_sum.host(), slope_sums) < 3e-3, "its sum is off by %g",
           relative_l2(dpre_sum.host(), slope_sums));
    // the same shapes without an epilogue have plans of their own
    matmul_forward(out.p, view(inp.p, N, C), view(weight.p, OC, C), bias.p, nullptr, Stream(0));
    EXPECT(apart(out.host(), sums) < 3e-3, "the plain product is off by %g", apart(out.host(), sums));
}

KERNEL_TEST("a matmul of a model's size") {
    if (!on_gpu) { SKIP("for the hardware"); }
    Product p(257, 768, 2304 + 24, true, true);          // the loops of 1000 rows take 16 s
    p.run();
    p.expect_right();
}

KERNEL_TEST("a matmul gives the same bits again") {
    for (size_t C : {64, 20}) {
        const size_t N = on_gpu ? 8192 : 70;
        const size_t OC = on_gpu ? 768 : 72;
        Product p(N, on_gpu ? 12 * C : C, OC, true, true);
        p.run();
        Product q = p;
        q.run();
        EXPECT(same_bits(p.out, q.out) && same_bits(p.dinp, q.dinp), "C %zu: out, dinp", p.C);
        EXPECT(same_bits(p.new_dweight, q.new_dweight) && same_bits(p.new_dbias, q.new_dbias), "C %zu: dweight, dbias",
               p.C);
    }
}

KERNEL_TEST("a NaN in a row of a matmul stays in its row") {
    Product p(9, 16, 24, true, true);
    p.inp[2 * 16 + 5] = NAN;
    p.run();
    for (size_t i = 0; i < p.out.size(); i++) {
        EXPECT(std::isnan((float)p.out[i]) == (i / p.OC == 2), "element %zu is %g", i, (float)p.out[i]);
    }
}

KERNEL_TEST("products on a second stream are refused, because they share a workspace") {
    Product p(8, 16, 24, true, true);
    p.run();
    cudaStream_t other;
    CUDA_CHECK(cudaStreamCreate(&other));
    const std::string message = error_of([&] { p.run(other); });
    EXPECT(message.find("on one stream") != std::string::npos, "'%s'", message.c_str());
    CUDA_CHECK(cudaStreamDestroy(other));
}

#if defined(SIMT)
KERNEL_TEST("cuBLASLt is asked once a shape, and given each call's own bias") {
    Product p(19, 32, 40, true, false, 100), q(19, 32, 40, true, false, 200);
    const LtDouble before = lt_double;
    p.run();
    EXPECT(lt_double.products - before.products == 3 && lt_double.heuristics - before.heuristics == 3,
           "%d products, %d heuristics", lt_double.products - before.products,
           lt_double.heuristics - before.heuristics);
    q.run();
    EXPECT(lt_double.products - before.products == 6 && lt_double.heuristics - before.heuristics == 3,
           "%d products, %d heuristics", lt_double.products - before.products,
           lt_double.heuristics - before.heuristics);
    q.expect_right();
    EXPECT(lt_double.handles == 1 && lt_double.preferences == 0, "%d handles, %d preferences are left",
           lt_double.handles, lt_double.preferences);
    EXPECT(lt_double.schemes == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, "the reductions allowed are %u",
           lt_double.schemes);
    EXPECT(lt_double.candidate == 0, "the heuristic's candidate %d was taken", (int)lt_double.candidate);
}

KERNEL_TEST("cuBLASLt is left alone where rows are not aligned") {
    const int before = lt_double.products;
    Product(6, 13, 24, true, true).run();       // C
    EXPECT(lt_double.products == before, "%d products", lt_double.products - before);
    Product p(6, 16, 24, true, false);
    const DeviceArray<floatX> inp(Product::x(p.inp)), weight(Product::x(p.weight)), out(p.N * p.OC + 1);
    // a pointer
    matmul_forward(out.p + 1, view(inp.p, p.N, 16), view(weight.p, 24, 16), nullptr, nullptr, Stream(0));
    EXPECT(lt_double.products == before, "%d products", lt_double.products - before);
}

KERNEL_TEST("where cuBLASLt has no algorithm the portable kernel computes") {
    lt_double.supports = false;
    Product p(11, 16, 32, true, true);
    const int before = lt_double.products;
    p.run();
    lt_double.supports = true;
    p.run();                                                    // and it is not asked again
    EXPECT(lt_double.products == before, "%d products", lt_double.products - before);
    p.expect_right();
    lt_double.supports = false;                                 // nor is an epilogue of another shape
    const DeviceArray<floatX> x(Product::x(p.inp));
    DeviceArray<floatX> out(64);
    DeviceArray<float> sums(std::vector<float>(8, 0.0f)), dweight(std::vector<float>(64, 0.0f));
    DeviceArray<float> scratch(MAX_SLABS * 8);
    const bool fused = matmul_gelu_backward(out.p, sums.p, dweight.p, nullptr, scratch.p, x.p, x.p, view(x.p, 8, 8),
                                            view(x.p, 8, 8), Stream(0));
    EXPECT(!fused, "an epilogue without an algorithm");
    lt_double.supports = true;
}

KERNEL_TEST("an error of cuBLASLt names the product") {
    Product p(12, 16, 32, true, true);
    lt_double.refused.clear();
    lt_double.fails = CUBLAS_STATUS_INVALID_VALUE;
    const std::string message = error_of([&] { p.run(); });
    lt_double.fails = CUBLAS_STATUS_SUCCESS;
    const char* begin = "cublasLtMatmul: an error, in the product "
                        "(12,32) = (12,16) x (16,32) transposed + bias + an array";
    EXPECT(message.find(begin) == 0, "'%s'", message.c_str());
}
#endif
