// test_encodings.cu -- attention with every encoding of the table in the CUDA build: on the tensor cores where the form
// of its bias is known and the heads are large enough, else on the portable kernels. One layer, forward and backward,
// against plain loops in double.
//
// The loops get the bf16 numbers that the kernels read. What are left are the roundings to bf16 on the way, each by at
// most 2^-9 of a value: of q and k as the encoding has prepared them, of the probabilities, of out (and so of row_dot),
// and of the results. They come to 2^-8 of a result, or more where q and k were prepared, and to less in an encoding's
// own gradients, so the tolerances are 2^-7 and 2^-8 or 2^-9: a bias or a gradient that is wrong by a fifth is seen.
#include "test/layers/attention_layer.h"
#include "test/oracle_positions.cu"        // a kernel test is one file

#include "test/simt/kernel_test.h"
#include "test/simt/shared_flash.h"

namespace tests {        // so that the header of an encoding may use the same names

constexpr int T = 70, NH = 2;                   // two tiles, the second one not full
constexpr double BF16 = 1.0 / 256;

// How far a result is off, relative to its size; a gradient of the encoding's own: to the magnitudes that were summed
struct Deviation {
    std::string what;
    double value, tolerance;
};

static std::vector<Deviation> deviations(Layer& l, Random& random) {
    const auto in_bf16 = [](const std::vector<float>& x) { return to_float(as<floatX>(x)); };
    const std::vector<float> qkv = in_bf16(l.draw_qkv(random)), dout = in_bf16(l.draw_dout(random));
    const LayerOracle want(l, qkv, dout);
    const Array<floatX> device_dout(as<floatX>(dout));
    Array<floatX> device_qkv(as<floatX>(qkv)), device_out(dout.size()), device_dqkv(qkv.size());
    Array<float> device_lse(want.lse.size()), scratch(l.backward_scratch());
    l.forward(device_out, device_lse, device_qkv, 0, l.s.T);
    l.backward(device_dqkv, scratch, device_dout, device_qkv, device_out, device_lse);
    const std::vector<float> out = to_float(device_out.host()), dqkv = to_float(device_dqkv.host());
    const std::vector<float> lse = device_lse.host(), grads = l.grads->host();
    const size_t C = (size_t)l.C, OC = (size_t)l.OC;
    const size_t extra = (size_t)l.tables.extra_columns;
    const bool has_bias = find_oracle(l.config.name).has_bias;
    const double roundings = (has_bias ? 2 : 3) * BF16;
    std::vector<Deviation> found = {{"out", relative_l2(out, want.out), roundings}};
    const char* names[] = {"dq", "dk", "dv"};
    for (size_t p = 0; p < 3; p++) {
        found.push_back({names[p], relative_l2(columns(dqkv, OC, p * C, C), columns(want.dqkv, OC, p * C, C)),
                         roundings});
    }
    if (has_bias) {
        found.push_back({"lse", largest_difference(lse, want.lse) / std::max(1.0, largest(want.lse)), 1e-5});
    }
    const auto own = [&](const std::string& what, double tolerance, const auto& got, const auto& exact,
                         const auto& sizes) {
        if (largest(sizes) > 0) { found.push_back({what, largest_difference(got, exact) / largest(sizes), tolerance}); }
    };
    // measured: up to 2e-3, with factors 3.3e-3 with the gates of docs/new_encoding.md
    own("the columns' gradient", BF16, columns(dqkv, OC, 3 * C, extra), columns(want.dqkv, OC, 3 * C, extra),
        columns(want.dqkv_sizes, OC, 3 * C, extra));
    for (size_t p = 0; p < l.tables.params.size(); p++) {
        const auto part = [&](const auto& x) {
            const auto first = x.begin() + (long)l.params.offsets[p];
            return std::decay_t<decltype(x)>(first, first + (long)l.params.specs[p].size());
        };
        own("d" + l.params.specs[p].name, BF16 / 2, part(grads), part(want.grads), part(want.grad_sizes));
    }
    for (size_t bh = 0; bh < want.moments.size() && !l.factors.empty(); bh++) {
        double sum = 0;
        for (int t = 0; t < l.s.T; t++) { sum += l.moments->host()[bh * l.s.T + t]; }
        found.push_back({"the sum of the moments", std::fabs(sum - want.moments[bh]) / want.moment_sizes[bh],
                         BF16 / 2});
    }
    return found;
}

static void every_encoding(const std::function<LayerShape(const PositionOracle&)>& shape) {
    for (const std::string& name : encodings_and_forms()) {
        double worst = 0;
        for (bool scaled : {false, true}) {
            const PositionOracle& oracle = find_oracle(name.substr(0, name.find(':')));
            if (scaled && (!oracle.has_bias || oracle.reads_scores)) { continue; }
            for (bool causal : directions(name)) {
                Random random;
                Layer layer(name, shape(oracle), causal, random);
                if (scaled) { layer.draw_factors(random); }
                const std::string text = layer_text(name, layer.s, causal, {}) + (scaled ? ", with factors" : "");
                for (const Deviation& d : deviations(layer, random)) {
                    EXPECT(d.value <= d.tolerance, "%s: %s is off by %.2g, expected at most %.2g", text.c_str(),
                           d.what.c_str(), d.value, d.tolerance);
                    worst = std::max(worst, d.value / d.tolerance);
                }
            }
        }
        INFO("%s: %.2f of the tolerance", name.c_str(), worst);
    }
}

KERNEL_TEST("attention on the GPU, every encoding, forward and backward") {
    every_encoding([](const PositionOracle&) { return LayerShape{1, T, NH, 64}; });
}
KERNEL_TEST("portable attention on the GPU, every encoding, forward and backward, over two chunks of CABLE's sum") {
    every_encoding([](const PositionOracle& oracle) { return LayerShape{2, oracle.slow ? 35 : 135, 1, 8}; });
}

KERNEL_TEST("attention on the GPU: head sizes without tensor-core kernels are portable, and the banner says so") {
    for (const PositionRow& row : position_rows) {
        const PositionConfig config = parse_position(row.name, T);
        const bool known = encoding_traits(config.parts[0]).form != FlashBias::Unknown;
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
    view.run = &config;
    view.config = &config.parts[0];
    view.NH = NH;
    Alibi position(view);
    position.slopes = slopes.p;
    const auto bias = position.bias();
    AttentionDims dims = {tokens, 0, tokens, NH, size, 3 * NH * size, 1.0f};
    for (const bool forward : {true, false}) {
        const DeviceArray<float> scratch(attention_backward_scratch(config, 1, tokens, NH, size));
        const bool chosen = forward
            ? choose_forward<true>(out.p, lse.p, scratch.p, qkv.p, view, bias, dims, 1, Stream(0))
            : choose_backward<true>(dqkv.p, scratch.p, out.p, qkv.p, out.p, lse.p, view, bias, dims, 1,
                                    Stream(0));
        size_t written = 0;
        for (const float x : scratch.host()) { written += !std::isnan(x); }
        EXPECT(!chosen && written == 0, "%s: chosen %d, %zu floats of scratch are written",
               forward ? "forward" : "backward", chosen, written);
    }
}

} // namespace tests
