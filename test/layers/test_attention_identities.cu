// test_attention_identities.cu -- what the papers say of their encodings: where one is another, and what does not
// change.
#include "test/layers/attention_layer.h"
#include "test/oracle.h"

namespace {

// out of a layer whose qkv is given; `edit` may change S_offset, S_origin and g between prepare and attention
template <class F> std::vector<float> run_layer(const Layer& l, const std::vector<float>& qkv, F edit) {
    Array<float> d_qkv(qkv), out((size_t)l.s.B * l.s.T * l.C);
    l.position().prepare_forward(d_qkv, l.s.B, l.s.T, 0, Stream(0));
    edit();
    if (l.causal) { attention_forward<Mask::Causal>(out, nullptr, nullptr, d_qkv, l.view, l.s.B, l.s.T, 0, Stream(0)); }
    else { attention_forward<Mask::Both>(out, nullptr, nullptr, d_qkv, l.view, l.s.B, l.s.T, 0, Stream(0)); }
    return out.host();
}

// the qkv of one layer as another has it: the same q, k, v, the encoding's columns from z(h), u(h)
template <class Z, class U>
std::vector<float> with_columns(const Layer& to, const Layer& from, const std::vector<float>& qkv, Z z, U u) {
    std::vector<float> x(qkv.size() / from.OC * to.OC, NAN);
    for (size_t r = 0; r < qkv.size() / from.OC; r++) {
        for (int c = 0; c < 3 * to.C; c++) { x[r * to.OC + c] = qkv[r * from.OC + c]; }
        for (int h = 0; h < to.s.NH && to.tables.extra_columns > 0; h++) {
            x[r * to.OC + 3 * to.C + h] = z(r, h);
            if (to.tables.extra_columns > to.s.NH) { x[r * to.OC + 3 * to.C + to.s.NH + h] = u(r, h); }
        }
    }
    return x;
}

void set_g(const Layer& l, const std::vector<float>& per_head) {
    std::vector<float> g;
    for (int bh = 0; bh < l.s.B * l.s.NH; bh++) { g.insert(g.end(), l.stride, per_head[(size_t)(bh % l.s.NH)]); }
    copy_to_device(l.act("g"), g.data(), g.size() * sizeof(float), Stream(0));
}

} // namespace

TEST_CASE("cable's identities", "[attention][asan]") {
    Random random;
    INFO(random);
    for (bool causal : {true, false}) {
        const LayerShape s = {2, 150, 3, 16};
        Layer none("none", s, causal, random), alibi("alibi", s, causal, random);
        Layer cable("cable", s, causal, random), nw("cable_nw", s, causal, random), v1("cable_v1", s, causal, random);
        Layer kcable("kcable", s, causal, random), kcable_nw("kcable_nw", s, causal, random);
        const std::vector<float> qkv = none.draw_qkv(random), z = random.normals((size_t)s.B * s.T * s.NH);
        auto drawn = [&](size_t r, int h) { return z[r * s.NH + h]; };
        auto is = [](float value) { return [value](size_t, int) { return value; }; };
        auto nothing = [] {};
        INFO((causal ? "causal" : "bidirectional"));

        SECTION(causal ? "b = 0 is no encoding, causal" : "b = 0 is no encoding") {
            const std::vector<float> want = run_layer(none, qkv, nothing);
            for (const Layer* l : {&cable, &nw, &kcable, &kcable_nw}) {
                CHECK(same_bits(run_layer(*l, with_columns(*l, none, qkv, is(-3.0f), drawn), nothing), want));
            }
        }
        SECTION(causal ? "nw is g = 1, causal" : "nw is g = 1") {
            auto one = [&](const Layer& l) { return [&l, &s] { set_g(l, std::vector<float>((size_t)s.NH, 1.0f)); }; };
            CHECK(same_bits(run_layer(cable, with_columns(cable, none, qkv, drawn, drawn), one(cable)),
                            run_layer(nw, with_columns(nw, none, qkv, drawn, drawn), nothing)));
            CHECK(same_bits(run_layer(kcable, with_columns(kcable, none, qkv, drawn, drawn), one(kcable)),
                            run_layer(kcable_nw, with_columns(kcable_nw, none, qkv, drawn, drawn), nothing)));
        }
        SECTION(causal ? "b = 1 and alibi's slopes as g is alibi, causal" : "b = 1 and alibi's slopes as g is alibi") {
            const std::vector<double> slopes = oracle_alibi_slopes(s.NH);
            auto set_slopes = [&] { set_g(cable, as<float>(slopes)); };
            const std::vector<float> got =
                run_layer(cable, with_columns(cable, none, qkv, is(1.0f), drawn), set_slopes);
            CHECK(same_bits(got, run_layer(alibi, qkv, nothing)));
        }
        SECTION(causal ? "a huge b leaves each token itself, causal" : "a huge b leaves each token itself") {
            std::vector<float> v;
            for (size_t r = 0; r < (size_t)s.B * s.T; r++) {
                const auto row = qkv.begin() + r * none.OC;
                v.insert(v.end(), row + 2 * none.C, row + 3 * none.C);
            }
            for (const Layer* l : {&cable, &nw, &v1}) {
                CHECK(same_bits(run_layer(*l, with_columns(*l, none, qkv, is(1e6f), is(1.0f)), nothing), v));
            }
        }
    }
}

TEST_CASE("cable: the gradients of S sum to zero over time", "[attention][asan]") {
    Random random;
    INFO(random);
    for (const char* name : {"cable", "cable_nw", "kcable", "kcable_nw", "cable_v1"}) {
        for (bool causal : {true, false}) {
            const LayerShape s = {2, 150, 2, 16};
            Layer l(name, s, causal, random);
            Array<float> qkv(l.draw_qkv(random)), dqkv(qkv.n);
            Array<float> out((size_t)s.B * s.T * l.C), lse((size_t)s.B * s.NH * s.T);
            Array<float> scratch(l.backward_scratch());
            l.forward(out, lse, qkv, 0, s.T);
            l.backward_scores(dqkv, scratch, Array<float>(random.normals(out.n)), qkv, out, lse);
            std::vector<float> dS((size_t)s.B * s.NH * s.T);
            copy_to_host(dS.data(), l.act("dS"), dS.size() * sizeof(float), Stream(0));
            for (int bh = 0; bh < s.B * s.NH; bh++) {
                double sum = 0, squares = 0;
                for (int t = 0; t < s.T; t++) {
                    const double d = dS[(size_t)bh * s.T + t];
                    sum += d;
                    squares += d * d;
                }
                INFO(name << ", " << bh << ": sum " << sum << ", rms " << std::sqrt(squares / s.T));
                CHECK(squares > 0);
                // each of T terms is a sum of T roundings of its own size: sqrt(T * T) of them
                CHECK(std::fabs(sum) <= 2 * FLT_EPSILON * s.T * std::sqrt(squares / s.T));
            }
        }
    }
}

// The slope of the oracle's embeddings at one element of a parameter, summed over the batch with weights dy (B,T,C).
// Central differences, which are exact here but for rounding: every embedding is linear in its parameters.
static double through_embedding(OracleLayer<double>& o, double& x, const std::vector<float>& dy) {
    const size_t C = (size_t)o.C, T = (size_t)o.T;
    const double at = x;
    double slope = 0;
    for (double step : {1.0, -1.0}) {
        x = at + step;
        for (size_t t = 0; t < T; t++) {
            const std::vector<double> y = oracle_embed(o, std::vector<double>(C), (int)t);
            for (size_t e = t * C; e < dy.size(); e += T * C) {
                for (size_t c = 0; c < C; c++) { slope += step / 2 * y[c] * dy[e + c]; }
            }
        }
    }
    x = at;
    return slope;
}

TEST_CASE("every encoding's token embeddings, forward and backward, whole and from t0 on",
          "[attention][encodings][asan]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) {
        for (const LayerShape& s : {LayerShape{2, 37, 1, 8}, LayerShape{1, 1, 1, 6}, LayerShape{3, 2, 5, 2}}) {
            INFO(name << ": B " << s.B << ", T " << s.T << ", C " << s.NH * s.HS);
            Layer l(name, s, true, random, s.T + 3);
            const size_t C = (size_t)l.C, T = (size_t)s.T;
            OracleLayer<double> o = l.oracle(l.draw_qkv(random), 0, s.T);
            const std::vector<float> x = random.normals(s.B * T * C), dy = random.normals(s.B * T * C);
            for (int t0 : {0, 3}) {
                const size_t B = t0 == 0 ? (size_t)s.B : 1;
                const std::vector<float> in(x.begin(), x.begin() + B * T * C);
                std::vector<double> want;
                for (size_t row = 0; row < B * T; row++) {
                    const std::vector<double> embedding(in.begin() + row * C, in.begin() + (row + 1) * C);
                    const std::vector<double> y = oracle_embed(o, embedding, t0 + (int)(row % T));
                    want.insert(want.end(), y.begin(), y.end());
                }
                Array<float> out(in);
                l.position().embed_forward(out, (int)B, s.T, t0, Stream(0));
                // one product and one sum, each rounded once; sines are rounded to float32
                check_close("embedded", out.host(), want, as<float>(want), 2 * largest(want), 1);
            }
            Array<float> dx(dy);
            l.position().embed_backward(dx, s.B, s.T, Stream(0));
            std::vector<double> dx_want;
            for (size_t e = 0; e < dy.size(); e++) {            // an embedding is linear in x, channel by channel
                const int t = (int)(e / C % T);
                const double slope = oracle_embed(o, std::vector<double>(C, 1.0), t)[e % C] -
                                     oracle_embed(o, std::vector<double>(C), t)[e % C];
                dx_want.push_back(slope * dy[e]);
            }
            check_close("dx", dx.host(), dx_want, as<float>(dx_want), 2 * largest(dx_want), 1);
            const std::vector<float> grads = l.grads->host();
            for (size_t p = 0; p < l.tables.params.size(); p++) {
                std::vector<double>& tensor = o.params[l.tables.params[p].name];
                std::vector<double> want;
                for (double& element : tensor) { want.push_back(through_embedding(o, element, dy)); }
                const auto first = grads.begin() + l.params.offsets[p];
                check_close("d" + l.tables.params[p].name, std::vector<float>(first, first + want.size()), want,
                            as<float>(want), s.B * largest(want), 1);
            }
        }
    }
}
