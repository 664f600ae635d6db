// test_decode_simt.cu -- decode attention in real blocks of 128 threads: 16-byte loads, groups of values, splits.
//
// Against double loops over the very numbers the kernel reads: q, k and v after the encoding prepared them, biases of
// oracle_positions.cu. So what is left is float32's error, and the rounding of the output where floatX is bf16.
#include "test/oracle_positions.cu"        // a kernel test is one file

#include "test/layers/decode_layer.h"
#include "test/simt/kernel_test.h"

namespace tests {        // so that the header of an encoding may use the same names

namespace {

// The output of the query at t0 from q, k and v as the encoding has prepared them
std::vector<double> wanted(Cache& c, int t0) {
    const std::vector<float> x = host_floats(*c.qkv);
    const size_t n = (size_t)t0 + 1, HS = (size_t)c.s.HS;
    std::vector<double> all;
    for (int bh = 0; bh < c.s.B * c.s.NH; bh++) {
        const int b = bh / c.s.NH, h = bh % c.s.NH;
        const OracleLayer<double> o = c.oracle(c.host_qkv, b, t0 + 1);
        std::vector<double> part[3];
        for (size_t e = 0; e < 3 * n * HS; e++) {
            const size_t row = (size_t)b * c.stride + e / HS % n, column = e / HS / n * c.C + h * HS + e % HS;
            part[e / HS / n].push_back(x[row * c.OC + column]);
        }
        const double scale = 1 / std::sqrt((double)HS);
        const std::vector<double> bias =
            find_oracle(o.name).reads_scores
                ? CopeHead<double>(part[0], part[1], o.params.at("cope_e"), scale, n, HS,
                                   [](int, int) { return true; }, (size_t)t0).bias
                : oracle_bias(o, h);
        const HeadOracle<double> y(part[0], part[1], part[2], bias, {}, scale, n, HS, true, (size_t)t0);
        all.insert(all.end(), y.out.end() - (long)HS, y.out.end());
    }
    return all;
}

// Every element: half an ulp of floatX, and float32's error of the sums.
double check_decode(Cache& c, int t0) {
    c.prepare(0, t0 + 1);
    const std::vector<float> got = c.decode(t0);
    const std::vector<double> want = wanted(c, t0);
    double worst = 0;
    for (size_t e = 0; e < want.size(); e++) {
        const double half_ulp = std::ldexp(1.0, std::ilogb(want[e]) - (sizeof(floatX) == 2 ? 8 : 24));
        const double error = std::fabs(got[e] - want[e]) - half_ulp;
        worst = error >= 0 || error < 0 ? std::max(worst, error / largest(want)) : INFINITY;
    }
    EXPECT(got.size() == want.size(), "expected %zu elements, got %zu", want.size(), got.size());
    EXPECT(worst <= 1e-5, "%s, B %d, NH %d, HS %d, t0 %d, stride %d: off by %g of the largest element",
           c.config.name.c_str(), c.s.B, c.s.NH, c.s.HS, t0, c.stride, worst);
    EXPECT(same_bits(got, c.decode(t0)), "%s, HS %d, t0 %d: other bits in a second run", c.config.name.c_str(), c.s.HS,
           t0);
    return worst;
}
double test_decode(const std::string& name, Sizes x, int t0, int stride) {
    Random random;
    Cache c(name, x, t0 + 1, stride, random);
    return check_decode(c, t0);
}

} // namespace

KERNEL_TEST("decode: every encoding") {
    double worst = 0;
    for (const PositionRow& row : position_rows) {
        worst = std::max(worst, test_decode(row.name, {2, 2, 16}, 140, 150));
        worst = std::max(worst, test_decode(row.name, {1, 2, 24}, 260, 300));
    }
    INFO("off by %.1e of the largest element", worst);
}

KERNEL_TEST("decode: ends of tiles and splits") {
    for (int t0 : {0, 1, 63, 64, 127, 128, 129, 255, 256, 257, 600}) { test_decode("cable", {1, 2, 64}, t0, t0 + 9); }
    if (on_gpu) { for (int t0 : {1000, 4095, 4096}) { test_decode("cable", {1, 3, 64}, t0, 5000); } }
}

KERNEL_TEST("decode: kcable at its extremes") {
    double worst = 0;
    for (const char* name : {"kcable", "kcable:weight=inside", "kcable_nw", "kcable_v1"}) {
        for (int t0 : {120, 300, 301}) {
            Random random;
            Cache c(name, {1, 2, 16}, t0 + 1, t0 + 9, random);
            c.draw_extremes(random);
            worst = std::max(worst, check_decode(c, t0));
        }
    }
    INFO("off by %.1e of the largest element", worst);
}

// 20: the second head's rows do not start at 16 bytes; 4: a row is less than a piece; 1100: more pieces than threads
KERNEL_TEST("decode: head sizes") {
    for (int HS : {1, 2, 4, 7, 8, 16, 20, 24, 32, 64, 72, 80, 96, 128, 256}) {
        test_decode("alibi", {2, 2, HS}, 77, 80);
    }
    test_decode("none", {1, 1, 1100}, 40, 41);
}

// Rows that are not whole pieces: what follows them is the next head's.
KERNEL_TEST("decode: a head's NaN stays in it") {
    for (int HS : {4, 7, 20, 24}) {
        Random random;
        Cache c("alibi", {1, 2, HS}, 41, 41, random);
        c.prepare(0, 41);
        const std::vector<float> before = c.decode(40);
        std::vector<float> x = host_floats(*c.qkv);
        for (int part : {1, 2}) { x[(size_t)7 * c.OC + part * c.C + HS] = NAN; }
        c.set_qkv(x);
        const std::vector<float> after = c.decode(40);
        for (int d = 0; d < HS; d++) {
            EXPECT(after[(size_t)d] == before[(size_t)d], "HS %d: [%d] of the first head was %g, now %g", HS, d,
                   before[(size_t)d], after[(size_t)d]);
            EXPECT(std::isnan(after[(size_t)(HS + d)]), "HS %d: [%d] of the second head is %g", HS, d,
                   after[(size_t)(HS + d)]);
        }
    }
}

// A split that is left out: none of its blocks reads k or v, the combination does not read what they did not write (NaN
// here), and the bits are those of reading all. The default: what 2^-24 of the sum can do.
KERNEL_TEST("decode: splits outside the window") {
    for (const char* name : {"cable", "cable_v1", "alibi"}) {
        const int t0 = on_gpu ? 4000 : 1300;
        const Sizes x = {1, 2, 16};
        Random random;
        SteepCache c(name, x, t0 + 1, random);
        c.prepare(0, t0 + 1);
        std::vector<float> partial;
        const std::vector<float> off = c.decode_as(TileSkip::Off, t0);
        EXPECT(same_bits(off, c.decode_as(TileSkip::Exact, t0, &partial)), "%s: other bits with the exact window",
               name);
        const int m = count(left_out(partial, x, t0));
        const std::vector<float> got = c.decode_as(TileSkip::Default, t0, &partial);
        const std::vector<bool> out = left_out(partial, x, t0);
        const int n = count(out);
        EXPECT(n >= m && n > 0 && n < (int)out.size() && (m > 0 || name[0] == 'a'),
               "%s: %d and %d of %zu splits left out", name, n, m, out.size());
        const double allowed = sizeof(floatX) == 2 ? std::ldexp(1.0, -7) : 1e-6;
        const double error = largest_difference(got, off);
        EXPECT(error <= allowed, "%s: off by %g", name, error);
        c.set_qkv(without(c, out, t0));
        EXPECT(same_bits(got, c.decode_as(TileSkip::Default, t0)), "%s: keys or values outside the window were read",
               name);
        INFO("%s: %d, by default %d of %zu splits left out", name, m, n, out.size());
    }
}

} // namespace tests
