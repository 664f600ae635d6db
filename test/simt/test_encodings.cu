// test_encodings.cu -- attention with every encoding of the table in the CUDA build: on the tensor cores where the form
// of its bias is known, else on the portable kernels. One layer, forward and backward, against plain loops in double.
//
// The loops get the bf16 numbers that the kernels read, q and k as the encoding has prepared them. What is left are the
// roundings to bf16 on the way, each by at most 2^-9 of a value: of the probabilities, of out (and so of row_dot), and
// of the results. They come to 2^-8 of a result, and to less in an encoding's own gradients, so the tolerances are 2^-7
// and 2^-9: a bias or a gradient that is wrong by a fifth is seen.
#include <memory>

#include "test/layers/attention_oracle.h"
#include "test/oracle_positions.cu"        // a kernel test is one file

#include "llmc/attention/choose.cuh"

#include "test/simt/kernel_test.h"
#include "test/simt/shared_flash.h"

namespace tests {        // so that the header of an encoding may use the same names

constexpr int B = 1, T = 70;                    // two tiles, the second one not full
constexpr int NH = 2, HS = 64;
constexpr int C = NH * HS;
constexpr double BF16 = 1.0 / 256;

// How far a result is off, relative to its size; a gradient of the encoding's own: to the magnitudes that were summed
struct Deviation {
    const char* what;
    double value, tolerance;
};

struct Layer {
    bool causal;
    PositionConfig config;
    PositionTables tables;
    TensorTable params, acts;
    int OC = 0;
    OracleLayer<double> oracle;
    std::unique_ptr<DeviceArray<float>> master, grads, act_data;
    std::unique_ptr<DeviceArray<floatX>> qkv, dout;
    PositionView view;
    std::vector<float> factors;                             // (NH,T) or empty: ssmax's, of the bias
    DeviceArray<float> device_factors{(size_t)NH * T}, moments{(size_t)NH * T};

    Layer(const std::string& name, bool causal, bool scaled = false) : causal(causal), config(parse_position(name, T)) {
        tables = position_tables(config, {1, NH, HS, B, T, causal});
        OC = round_up(3 * C + tables.extra_columns, 8);
        for (const TensorSpec& p : tables.params) { params.add(p); }
        for (const TensorSpec& a : tables.acts) { acts.add(a); }
        master = std::make_unique<DeviceArray<float>>(draw_parameters());
        grads = std::make_unique<DeviceArray<float>>(std::vector<float>(params.total, 0.0f));
        act_data = std::make_unique<DeviceArray<float>>(acts.total);
        qkv = std::make_unique<DeviceArray<floatX>>(converted<floatX>(normals((size_t)B * T * OC, 7)));
        dout = std::make_unique<DeviceArray<floatX>>(converted<floatX>(normals((size_t)B * T * C, 8)));
        view = PositionView(tables);
        view.run = &config;
        view.config = &config.parts[0];
        view.OC = OC;
        view.params = &params;
        view.acts = &acts;
        view.master = master->p;
        view.grads = grads->p;
        view.act_data = act_data->p;
        describe();
        for (int e = 0; e < NH * T && scaled; e++) {
            factors.push_back(causal && e % T == 0 ? 0.0f : 0.25f + 0.25f * (float)(e % 5));     // 0: it sees one key
        }
        if (!scaled) { return; }
        device_factors.set(factors);
        view.factor = device_factors.p;
        view.moment = moments.p;
    }
    // x (T,T) of head h, row by row times its factor
    std::vector<double> times_factor(std::vector<double> x, int h) const {
        for (size_t e = 0; e < x.size() && !factors.empty(); e++) { x[e] *= factors[(size_t)h * T + e / T]; }
        return x;
    }

    // normal, or inside the bounds that an update keeps
    std::vector<float> draw_parameters() const {
        std::vector<float> x(params.total);
        for (size_t p = 0; p < tables.params.size(); p++) {
            const TensorSpec& spec = tables.params[p];
            const std::vector<float> drawn = normals(spec.size(), 100 + p, 0.5);
            for (size_t e = 0; e < drawn.size(); e++) {
                float value = spec.name == "fire_l" ? 0.1f : drawn[e];
                if (spec.lo > -FLT_MAX) { value = spec.lo + fabsf(value); }
                x[params.offsets[p] + e] = std::min(value, spec.hi);
            }
        }
        return x;
    }
    // the oracle's view of the layer
    void describe() {
        oracle.name = config.name;
        oracle.causal = causal;
        oracle.T = T;
        oracle.NH = NH;
        oracle.C = C;
        oracle.HS = HS;
        oracle.T_train = config.T_train;
        oracle.values.insert(config.parts[0].values.begin(), config.parts[0].values.end());
        const std::vector<float> values = master->host(), x = to_float(qkv->host());
        for (size_t p = 0; p < tables.params.size(); p++) {
            const float* first = &values[params.offsets[p]];
            oracle.params[tables.params[p].name].assign(first, first + tables.params[p].size());
        }
        oracle.width = tables.extra_columns;
        for (int t = 0; t < T; t++) {
            const float* row = &x[(size_t)t * OC + 3 * C];
            oracle.columns.insert(oracle.columns.end(), row, row + oracle.width);
        }
    }

    // what the kernels make of it: out (T,C), dqkv (T,OC)
    template <bool Causal> void run(std::vector<float>& out, std::vector<float>& dqkv) {
        DeviceArray<floatX> device_out((size_t)T * C), device_dqkv((size_t)T * OC);
        DeviceArray<float> lse((size_t)NH * T), scratch(attention_backward_scratch(config, B, T, NH, HS));
        const floatX* dy = dout->p;
        Stream s(0);
        with_position(view, [&](auto position) { position.prepare_forward(qkv->p, B, T, 0, s); });
        attention_forward<Causal>(device_out.p, lse.p, nullptr, qkv->p, view, B, T, 0, s);
        attention_backward<Causal>(device_dqkv.p, scratch.p, dy, qkv->p, device_out.p, lse.p, view, B, T, s);
        with_position(view, [&](auto position) { position.prepare_backward(device_dqkv.p, qkv->p, B, T, s); });
        out = to_float(device_out.host());
        dqkv = to_float(device_dqkv.host());
    }
};

// columns first .. first + HS - 1 of rows of `width`
static std::vector<double> part(const std::vector<float>& x, int width, int first) {
    std::vector<double> y;
    for (int t = 0; t < T; t++) {
        const float* row = &x[(size_t)t * width + first];
        y.insert(y.end(), row, row + HS);
    }
    return y;
}

// The gradient in a number x of the oracle, by central differences of the bias: the sum of dB_ij * dB_ij/dx.
// `size` gets the sum of the magnitudes.
static double through_bias(const OracleLayer<double>& o, double& x, const std::vector<std::vector<double>>& dB,
                           double& size) {
    const double at = x, step = o.name == "fire" ? 1e-9 : 1e-7;
    double gradient = 0;
    for (int h = 0; h < NH; h++) {
        x = at + step;
        const std::vector<double> up = oracle_bias(o, h);
        x = at - step;
        const std::vector<double> down = oracle_bias(o, h);
        x = at;
        for (size_t e = 0; e < up.size(); e++) {
            const double term = dB[(size_t)h][e] * (up[e] - down[e]) / (2 * step);
            gradient += term;
            size += std::fabs(term);
        }
    }
    return gradient;
}

// The same by differences of the rotation of q and k, x (T,OC) before it: the sum of dx'_t.dx'_t/dz
static double through_rotation(OracleLayer<double>& o, double& z, const std::vector<float>& x, int width,
                               const std::vector<std::vector<double>>& dx, double& size) {
    double gradient = 0;
    for (int e = 0; e < T * 2 * NH; e++) {
        const int t = e / (2 * NH), head = e % (2 * NH);        // of q, then of k
        const float* row = &x[(size_t)t * width + head * HS];
        const auto d = dx[(size_t)head].begin() + t * HS;
        const double term = oracle_rotate_slope(o, z, {row, row + HS}, {d, d + HS}, head % NH, t);
        gradient += term;
        size += std::fabs(term);
    }
    return gradient;
}

// cope's oracle of a head; for another encoding one that is not used
static CopeHead<double> cope_of(const OracleLayer<double>& o, const std::vector<double>& q,
                                const std::vector<double>& k, double scale) {
    const auto e = o.params.find("cope_e");
    return CopeHead<double>(q, k, e == o.params.end() ? std::vector<double>((size_t)2 * HS) : e->second, scale, T, HS,
                            [](int, int) { return true; });
}
// Adds its part to the gradients of a head; de gets that of the embeddings, sizes the magnitudes that it sums.
static void add_cope(CopeHead<double> cope, HeadOracle<double>& want, std::vector<double>& de,
                     std::vector<double>& sizes) {
    de.resize(cope.e.size());
    sizes.resize(de.size());
    std::vector<double> magnitudes = want.dbias, unused((size_t)T * HS);
    cope.backward(want.dbias, want.dq, want.dk, de);
    for (double& x : magnitudes) { x = std::fabs(x); }
    for (double& x : cope.q) { x = std::fabs(x); }
    cope.backward(magnitudes, unused, unused, sizes);
}

static Deviation of_embeddings(const std::vector<float>& got, const std::vector<double>& de,
                               const std::vector<double>& sizes) {
    const double largest = *std::max_element(sizes.begin(), sizes.end());
    return {"a parameter's gradient", largest_difference(got, de) / largest, BF16 / 2};
}

// through(z, size): the gradient in a column. scaled: with factors more of dlogit's roundings remain, 3.3e-3 with the
// gates of docs/new_encoding.md
template <class F>
static Deviation of_columns(OracleLayer<double>& o, const std::vector<float>& dqkv, int OC, bool scaled, F through) {
    double worst = 0, largest = 0;
    for (size_t e = 0; e < o.columns.size(); e++) {
        const size_t t = e / (size_t)o.width, c = e % (size_t)o.width;
        double size = 0;
        const double want = through(o.columns[e], size);
        worst = std::max(worst, std::fabs(dqkv[t * OC + 3 * C + c] - want));
        largest = std::max(largest, size);
    }
    return {"the columns' gradient", worst / largest, scaled ? BF16 : BF16 / 2};
}

// The moments of head h, which add up to the sum of dB_ij B_ij
static Deviation of_moments(const Layer& layer, int h, const std::vector<double>& dlogit,
                            const std::vector<double>& logit) {
    const std::vector<float> moments = layer.moments.host();
    double got = 0, want = 0;
    double size = 0;
    for (int t = 0; t < T; t++) { got += moments[(size_t)h * T + t]; }
    for (size_t e = 0; e < logit.size(); e++) {
        if (layer.causal && e % T > e / T) { continue; }
        want += dlogit[e] * logit[e];
        size += std::fabs(dlogit[e] * logit[e]);
    }
    return {"the sum of the moments", std::fabs(got - want) / size, BF16 / 2};
}

static std::vector<Deviation> deviations(Layer& layer) {
    std::vector<float> out, dqkv;
    const std::vector<float> unturned = to_float(layer.qkv->host());
    if (layer.causal) { layer.run<true>(out, dqkv); } else { layer.run<false>(out, dqkv); }
    const std::vector<float> x = to_float(layer.qkv->host()), dy = to_float(layer.dout->host());
    OracleLayer<double>& o = layer.oracle;
    std::vector<Deviation> found;
    std::vector<std::vector<double>> dB, dqk((size_t)2 * NH);
    std::vector<double> de, sizes;                          // of cope's embeddings
    for (int h = 0; h < NH; h++) {
        const double scale = oracle_score_factor(o) / std::sqrt((double)HS);
        const std::vector<double> q = part(x, layer.OC, h * HS);
        const std::vector<double> k = part(x, layer.OC, C + h * HS);
        const std::vector<double> v = part(x, layer.OC, 2 * C + h * HS);
        const CopeHead<double> cope = cope_of(o, q, k, scale);
        const bool reads_scores = find_oracle(o.name).reads_scores;
        const std::vector<double> bias = layer.times_factor(reads_scores ? cope.bias : oracle_bias(o, h), h);
        HeadOracle<double> want(q, k, v, bias, part(dy, C, h * HS), scale, T, HS, layer.causal);
        dB.push_back(layer.times_factor(want.dbias, h));
        if (!layer.factors.empty()) { found.push_back(of_moments(layer, h, want.dbias, bias)); }
        dqk[(size_t)h] = want.dq;
        dqk[(size_t)(NH + h)] = want.dk;
        if (reads_scores) { add_cope(cope, want, de, sizes); }
        found.push_back({"out", relative_l2(part(out, C, h * HS), want.out), 2 * BF16});
        const std::vector<double>* gradients[] = {&want.dq, &want.dk, &want.dv};
        const char* names[] = {"dq", "dk", "dv"};
        for (int p = 0; p < 3; p++) {
            std::vector<double> turned;                     // back by the angle that q and k were turned by
            for (int t = 0; t < T; t++) {
                const std::vector<double> row(gradients[p]->begin() + t * HS, gradients[p]->begin() + (t + 1) * HS);
                std::vector<double> y = p < 2 ? oracle_rotate(o, row, h, t, true) : row;
                const int keys = layer.causal ? t + 1 : T;
                const double factor = p == 0 ? oracle_query_factor(o, h, keys) : 1.0;
                for (double& e : y) { e *= factor; }
                turned.insert(turned.end(), y.begin(), y.end());
            }
            found.push_back({names[p], relative_l2(part(dqkv, layer.OC, p * C + h * HS), turned), 2 * BF16});
        }
    }
    const std::vector<float> grads = layer.grads->host();
    if (!de.empty()) { found.push_back(of_embeddings(grads, de, sizes)); }
    const bool has_bias = find_oracle(o.name).has_bias;
    for (size_t p = 0; has_bias && p < layer.tables.params.size(); p++) {
        double worst = 0, largest = 0;
        std::vector<double>& tensor = o.params[layer.tables.params[p].name];
        for (size_t e = 0; e < tensor.size(); e++) {
            double size = 0;
            const double want = through_bias(o, tensor[e], dB, size);
            worst = std::max(worst, std::fabs(grads[layer.params.offsets[p] + e] - want));
            largest = std::max(largest, size);
        }
        found.push_back({"a parameter's gradient", worst / largest, BF16 / 2});
    }
    if (o.width > 0) {
        found.push_back(of_columns(o, dqkv, layer.OC, !layer.factors.empty(), [&](double& z, double& size) {
            return has_bias ? through_bias(o, z, dB, size) : through_rotation(o, z, unturned, layer.OC, dqk, size);
        }));
    }
    return found;
}

KERNEL_TEST("attention on the GPU, every encoding, forward and backward") {
    std::vector<const char*> names(std::begin(oracle_forms), std::end(oracle_forms));
#if defined(FEW_POSITIONS)
    names.clear();
#endif
    for (const PositionRow& row : position_rows) { names.push_back(row.name); }
    for (const char* name : names) {
        double worst = 0;
        for (int form = 0; form < 4; form++) {
            const bool causal = form % 2 == 0, scaled = form >= 2;
            bool skip = scaled && (!find_oracle(name).has_bias || find_oracle(name).reads_scores);
            with_position_type(parse_position(name, T).parts[0], [&](auto type) {
                skip = skip || (!causal && BiasOf<typename decltype(type)::type>::counts_gates);
            });
            if (skip) { continue; }
            Layer layer(name, causal, scaled);
            for (const Deviation& d : deviations(layer)) {
                const char* direction = causal ? "causal" : "bidirectional";
                EXPECT(d.value <= d.tolerance, "%s%s, %s: %s is off by %.2g, expected at most %.2g", name,
                       scaled ? " with factors" : "", direction, d.what, d.value, d.tolerance);
                worst = std::max(worst, d.value / d.tolerance);
            }
        }
        INFO("%s: %.2f of the tolerance", name, worst);
    }
}

KERNEL_TEST("attention on the GPU: head sizes without tensor-core kernels are portable, and the banner says so") {
    for (const PositionRow& row : position_rows) {
        const PositionConfig config = parse_position(row.name, T);
        const bool known = find_flash_bias(config.parts[0]) != FlashBias::Unknown;
        for (int size : {24, 32, 64, 100, 120, 128, 136, 256}) {
            const bool wanted = known && size >= 32 && size <= 128 && size % 8 == 0;
            const std::string text = attention_description(config, size);
            EXPECT(uses_flash(config, size) == wanted && (text == "tensor-core kernels, bf16") == wanted,
                   "%s, head size %d: '%s'", row.name, size, text.c_str());
            const bool reason = text.find(strprintf("not %d: ", size)) != std::string::npos;
            EXPECT(reason == (known && !wanted), "%s, head size %d: '%s'", row.name, size, text.c_str());
        }
    }
    // 256, in the 227 KB that a block has on an H100: the forward fits, the backward does not
    const PositionConfig none = parse_position("none", T);
    check_head_size(none, 256, false, 227 << 10);
    check_head_size(none, 250, true, 227 << 10);
    const std::string error = error_of([&] { check_head_size(none, 256, true, 227 << 10); });
    EXPECT(error.find("at most 250 fit") != std::string::npos, "'%s'", error.c_str());
}

// Their q and k need not begin on 16 bytes, as the kernels that look for tiles to skip expect
KERNEL_TEST("attention on the GPU: heads without tensor-core kernels have no tiles looked for") {
    const int tokens = TILE_SKIP_T, size = 20;
    const DeviceArray<floatX> qkv(std::vector<floatX>((size_t)tokens * 3 * NH * size)), out(qkv.n), dqkv(qkv.n);
    const DeviceArray<float> slopes({0.25f, 0.5f}), lse((size_t)NH * tokens);
    const PositionConfig config = parse_position("alibi", tokens);
    PositionView view = {};
    view.NH = NH;
    Alibi position(view);
    position.slopes = slopes.p;
    AttentionDims dims = {tokens, 0, tokens, NH, size, 3 * NH * size, 1.0f};
    for (const bool forward : {true, false}) {
        const DeviceArray<float> scratch(attention_backward_scratch(config, 1, tokens, NH, size));
        const bool chosen = forward
            ? choose_forward<true>(out.p, lse.p, scratch.p, qkv.p, position, dims, 1, Stream(0))
            : choose_backward<true>(dqkv.p, scratch.p, out.p, qkv.p, out.p, lse.p, position, dims, 1, Stream(0));
        size_t written = 0;
        for (const float x : scratch.host()) { written += !std::isnan(x); }
        EXPECT(!chosen && written == 0, "%s: chosen %d, %zu floats of scratch are written",
               forward ? "forward" : "backward", chosen, written);
    }
}

} // namespace tests
