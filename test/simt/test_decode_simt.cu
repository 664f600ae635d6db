// test_decode_simt.cu -- decode attention in real blocks of 128 threads: 16-byte loads, groups of values, splits.
//
// Against double loops over the very numbers the kernel reads: q, k and v after the encoding prepared them, biases of
// oracle_positions.cu. So what is left is float32's error, and the rounding of the output where floatX is bf16.
#include "test/oracle_positions.cu"        // a kernel test is one file

#include "llmc/attention/decode.cuh"

#include "test/simt/kernel_test.h"

struct DecodeShape { int B, NH, HS, t0, stride; };

// Of cable's bias: what most tests have; it falls by 0.15 a token; D to 1e6, g to 100 and scores 200 apart
enum class Bias { Gentle, Steep, Extreme };

// One layer with t0 + 1 tokens per sequence; everything else in its buffers is NaN.
struct DecodeLayer {
    DecodeShape s;
    int C, OC;
    PositionConfig config;
    PositionTables tables;
    TensorTable params, acts;
    std::vector<float> host_params, host_qkv;
    DeviceArray<float> *master = nullptr, *act_data = nullptr;
    DeviceArray<floatX>* qkv = nullptr;
    PositionView view;

    DecodeLayer(const std::string& name, DecodeShape s, Bias bias = Bias::Gentle)
        : s(s), C(s.NH * s.HS), config(parse_position(name, s.stride)) {
        tables = position_tables(config, {1, s.NH, s.HS, s.B, s.stride, true, true});
        OC = round_up(3 * C + tables.extra_columns, 8);
        for (const TensorSpec& p : tables.params) { params.add(p); }
        for (const TensorSpec& a : tables.acts) { acts.add(a); }
        host_params.assign(params.total, 0.0f);
        for (size_t p = 0; p < tables.params.size(); p++) {
            const TensorSpec& spec = tables.params[p];
            const bool kerple = spec.name.find("kerple") == 0;
            const std::vector<float> x = normals(spec.size(), 100 + p);
            for (size_t e = 0; e < x.size(); e++) {
                float value = x[e];
                if (kerple) { value = 0.1f + 0.2f * std::fabs(x[e]); }      // both of its parameters are positive
                if (spec.name == "fire_l") { value = 0.3f; }
                if (spec.name == "cope_e") { value = 0.1f * x[e]; }
                host(spec.name)[e] = std::min(std::max(value, spec.lo), spec.hi);
            }
        }
        const std::vector<float> x = normals((size_t)s.B * s.stride * OC, 7);
        host_qkv.assign(x.size(), NAN);
        for (size_t e = 0; e < x.size(); e++) {
            const int t = (int)(e / OC % s.stride), c = (int)(e % OC);
            if (t > s.t0 || c >= 3 * C + tables.extra_columns) { continue; }
            const bool of_S = c < 3 * C + s.NH;              // cable's columns: S's steps, then the weights
            const float gentle_level = of_S ? -0.2f : -1.0f;
            const float steep_level = of_S ? 0.1f : 1.0f;
            float value = 0.2f * x[e] + (bias == Bias::Steep ? steep_level : gentle_level);
            const float extreme_step = t % 3 == 0 ? 0.0f : 2e4f * x[e];
            if (bias == Bias::Extreme) { value = of_S ? extreme_step : 50.0f + 15.0f * x[e]; }
            if (c < 3 * C) { value = bias == Bias::Extreme && c < 2 * C ? 8.0f * x[e] : x[e]; }
            host_qkv[e] = (float)(floatX)value;
        }
        master = new DeviceArray<float>(host_params);
        act_data = new DeviceArray<float>(acts.total);
        qkv = new DeviceArray<floatX>(converted<floatX>(host_qkv));
        view = PositionView(tables);
        view.run = &config;
        view.config = &config.parts[0];
        view.OC = OC;
        view.params = &params;
        view.acts = &acts;
        view.master = master->p;
        view.act_data = act_data->p;
        with_position(view, [&](auto position) { position.prepare_forward(qkv->p, s.B, s.t0 + 1, 0, Stream(0)); });
    }
    DecodeLayer(const DecodeLayer&) = delete;
    ~DecodeLayer() { delete master; delete act_data; delete qkv; }

    float* host(const std::string& name) { return params.pointer(host_params.data(), name)(); }

    // left_out: the splits that were
    std::vector<float> decode(std::vector<bool>* left_out = nullptr) const {
        DeviceArray<floatX> out((size_t)s.B * C);
        DeviceArray<float> scratch(attention_decode_scratch(s.B, s.stride, s.NH, s.HS));
        attention_decode(out.p, qkv->p, scratch.p, view, s.B, s.t0, Stream(0));
        const std::vector<float> partial = scratch.host();  // its guards are looked at
        for (size_t e = (size_t)s.HS;
             left_out != nullptr && e < (size_t)s.B * s.NH * ceil_div(s.t0 + 1, DECODE_SPLIT) * (s.HS + 2);
             e += (size_t)s.HS + 2) {
            left_out->push_back(partial[e] == -INFINITY);
        }
        return to_float(out.host());
    }
    OracleLayer<double> oracle(int b) {
        OracleLayer<double> o;
        o.name = config.name;
        o.values.insert(config.parts[0].values.begin(), config.parts[0].values.end());
        o.T = s.t0 + 1; o.NH = s.NH; o.C = C; o.HS = s.HS; o.T_train = config.T_train;
        for (const TensorSpec& p : tables.params) {
            o.params[p.name] = std::vector<double>(host(p.name), host(p.name) + p.size());
        }
        o.width = tables.extra_columns;
        for (int t = 0; t <= s.t0; t++) {
            const float* row = &host_qkv[((size_t)b * s.stride + t) * OC + 3 * C];
            o.columns.insert(o.columns.end(), row, row + o.width);
        }
        return o;
    }
    std::vector<double> cope_bias(const OracleLayer<double>& o, const std::vector<float>& x, int b, int h) const {
        std::vector<double> qk[2];
        for (int t = 0; t <= s.t0; t++) {
            for (int p = 0; p < 2; p++) {
                const float* row = &x[((size_t)b * s.stride + t) * OC + p * C + h * s.HS];
                qk[p].insert(qk[p].end(), row, row + s.HS);
            }
        }
        return CopeHead<double>(qk[0], qk[1], o.params.at("cope_e"), 1 / std::sqrt((double)s.HS), (size_t)s.t0 + 1,
                                (size_t)s.HS, [](int, int) { return true; }, (size_t)s.t0).bias;
    }
    std::vector<double> want() {
        const std::vector<float> x = to_float(qkv->host());
        std::vector<double> out;
        for (int b = 0; b < s.B; b++) {
            const OracleLayer<double> o = oracle(b);
            for (int h = 0; h < s.NH; h++) {
                const std::vector<double> B = find_oracle(o.name).reads_scores ? cope_bias(o, x, b, h)
                                                                               : oracle_bias(o, h);
                const float* k = &x[(size_t)b * s.stride * OC + C + h * s.HS];
                const float* q = k + (size_t)s.t0 * OC - C;
                const float* v = k + C;
                std::vector<double> a, y((size_t)s.HS);
                for (int j = 0; j <= s.t0; j++) {
                    double dot = 0;
                    for (int d = 0; d < s.HS; d++) { dot += (double)q[d] * k[(size_t)j * OC + d]; }
                    a.push_back(dot / std::sqrt((double)s.HS) + B[(size_t)s.t0 * (s.t0 + 1) + j]);
                }
                const double m = *std::max_element(a.begin(), a.end());
                double sum = 0;
                for (int j = 0; j <= s.t0; j++) {
                    const double e = std::exp(a[(size_t)j] - m);
                    sum += e;
                    for (int d = 0; d < s.HS; d++) { y[(size_t)d] += e * v[(size_t)j * OC + d]; }
                }
                for (double e : y) { out.push_back(e / sum); }
            }
        }
        return out;
    }
};

// Every element: half an ulp of floatX, and float32's error of the sums.
static double test_decode(const std::string& name, DecodeShape s, Bias bias = Bias::Gentle) {
    DecodeLayer layer(name, s, bias);
    const std::vector<float> got = layer.decode();
    const std::vector<double> want = layer.want();
    double largest = 0, worst = 0;
    for (double e : want) { largest = std::max(largest, std::fabs(e)); }
    for (size_t e = 0; e < want.size(); e++) {
        const double half_ulp = std::ldexp(1.0, std::ilogb(want[e]) - (sizeof(floatX) == 2 ? 8 : 24));
        const double error = std::fabs(got[e] - want[e]) - half_ulp;
        worst = error >= 0 || error < 0 ? std::max(worst, error / largest) : INFINITY;
    }
    EXPECT(got.size() == want.size(), "expected %zu elements, got %zu", want.size(), got.size());
    EXPECT(worst <= 1e-5, "%s, B %d, NH %d, HS %d, t0 %d, stride %d: off by %g of the largest element", name.c_str(),
           s.B, s.NH, s.HS, s.t0, s.stride, worst);
    EXPECT(same_bits(got, layer.decode()), "%s, HS %d, t0 %d: other bits in a second run", name.c_str(), s.HS, s.t0);
    return worst;
}

KERNEL_TEST("decode: every encoding") {
    double worst = 0;
    for (const PositionRow& row : position_rows) {
        worst = std::max(worst, test_decode(row.name, {2, 2, 16, 140, 150}));
        worst = std::max(worst, test_decode(row.name, {1, 2, 24, 260, 300}));
    }
    INFO("off by %.1e of the largest element", worst);
}

KERNEL_TEST("decode: ends of tiles and splits") {
    for (int t0 : {0, 1, 63, 64, 127, 128, 129, 255, 256, 257, 600}) { test_decode("cable", {1, 2, 64, t0, t0 + 9}); }
    if (on_gpu) { for (int t0 : {1000, 4095, 4096}) { test_decode("cable", {1, 3, 64, t0, 5000}); } }
}

// P would be 0 everywhere, or infinite, if the bias were not in the exponent and in the largest logit of a split
KERNEL_TEST("decode: kcable at its extremes") {
    double worst = 0;
    for (const char* name : {"kcable", "kcable:weight=inside", "kcable_nw", "kcable_v1"}) {
        for (int t0 : {120, 300, 301}) {
            worst = std::max(worst, test_decode(name, {1, 2, 16, t0, t0 + 9}, Bias::Extreme));
        }
    }
    INFO("off by %.1e of the largest element", worst);
}

// 20: the second head's rows do not start at 16 bytes; 4: a row is less than a piece; 1100: more pieces than threads
KERNEL_TEST("decode: head sizes") {
    for (int HS : {1, 2, 4, 7, 8, 16, 20, 24, 32, 64, 72, 80, 96, 128, 256}) {
        test_decode("alibi", {2, 2, HS, 77, 80});
    }
    test_decode("none", {1, 1, 1100, 40, 41});
}

// Rows that are not whole pieces: what follows them is the next head's.
KERNEL_TEST("decode: a head's NaN stays in it") {
    for (int HS : {4, 7, 20, 24}) {
        DecodeLayer layer("alibi", {1, 2, HS, 40, 41});
        const std::vector<float> before = layer.decode();
        std::vector<float> x = to_float(layer.qkv->host());
        for (int part : {1, 2}) { x[(size_t)7 * layer.OC + part * layer.C + HS] = NAN; }
        layer.qkv->set(converted<floatX>(x));
        const std::vector<float> after = layer.decode();
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
        DecodeLayer layer(name, {1, 2, 16, t0, t0 + 10}, Bias::Steep);
        layer.config.tile_skip = TileSkip::Off;
        const std::vector<float> off = layer.decode();
        layer.config.tile_skip = TileSkip::Exact;
        std::vector<bool> exactly, out;
        const std::vector<float> exact = layer.decode(&exactly);
        EXPECT(same_bits(off, exact), "%s: other bits with the exact window", name);
        layer.config.tile_skip = TileSkip::Default;
        const std::vector<float> got = layer.decode(&out);
        const int n = (int)std::count(out.begin(), out.end(), true);
        const int m = (int)std::count(exactly.begin(), exactly.end(), true);
        EXPECT(n >= m && n > 0 && n < (int)out.size() && (m > 0 || name[0] == 'a'),
               "%s: %d and %d of %zu splits left out", name, n, m, out.size());
        const double allowed = sizeof(floatX) == 2 ? std::ldexp(1.0, -7) : 1e-6;
        const double error = largest_difference(got, off);
        EXPECT(error <= allowed, "%s: off by %g", name, error);
        std::vector<float> x = to_float(layer.qkv->host());
        for (size_t e = 0; e < x.size(); e++) {
            const int c = (int)(e % layer.OC);
            const int t = (int)(e / layer.OC);
            const int splits = (int)out.size() / 2;
            if (c < 3 * layer.C && t <= layer.s.t0 && out[(size_t)(c % layer.C / 16 * splits + t / DECODE_SPLIT)]) {
                x[e] = NAN;
            }
        }
        layer.qkv->set(converted<floatX>(x));
        EXPECT(same_bits(got, layer.decode()), "%s: keys or values outside the window were read", name);
        INFO("%s: %d, by default %d of %zu splits left out", name, m, n, out.size());
    }
}
