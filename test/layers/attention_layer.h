// attention_layer.h -- a layer of attention with any encoding, and the same in double and in float32 loops over T x T
// matrices.
//
// The heads are attention_oracle.h's, their biases oracle_positions.cu's. A gradient in an encoding's parameters or
// columns is the sum over i, j of the oracle's dB_ij times dB_ij/dparameter, by central differences of the bias.
//
// Tolerances come only from the oracles: the float32 loops and the float32 bias have no tricks, so their error on the
// same input is what float32 costs (check_close in test/oracle.h allows MULTIPLE times that).
#pragma once

#include <numeric>

#include "test/layer.h"
#include "test/layers/attention_oracle.h"

#include "llmc/attention/choose.cuh"

// T tokens at a capacity of `stride`
struct Layer : AttentionLayer {
    std::vector<float> factors;                             // (B,NH,T) or empty
    std::unique_ptr<Array<float>> device_factors, moments;

    Layer(const std::string& pos, LayerShape s, bool causal, Random& random, int stride = 0, int T_train = 0)
        : AttentionLayer(pos, s, causal, stride > 0 ? stride : s.T,
                         T_train > 0 ? T_train : imax(stride, s.T)) {
        fill([&](const TensorSpec& p) { draw(p, random); });
    }

    void draw(const TensorSpec& p, Random& random) {
        for (size_t e = 0; e < p.size(); e++) { host(p.name)[e] = draw_parameter(p, random); }
        const float sign = random.integer(0, 1) ? 1.0f : -1.0f;
        if (p.name == "fire_c") { host(p.name)[0] = sign * (float)random.uniform(0.05, 0.5); }
        // at small T, L = 512 |l| lies among the positions, but on none of them: there max(L, i) has no derivative
        if (p.name == "fire_l") { host(p.name)[0] = sign * (stride < 100 ? stride / 2 + 0.5f : 300.5f) / 512; }
        if (p.name == "fire_b1") { keep_off_fire_kinks(random); }
        for (size_t e = 0; e < p.size() && p.name == "cope_e"; e++) { host(p.name)[e] *= 0.3f; }
        // the bias of a query's own key has (1e-5)^b, beside which float32 loops lose every other score
        for (size_t e = 0; e < p.size() && p.name == "bam_b"; e++) {
            host(p.name)[e] = std::max(-0.4f, host(p.name)[e]);
        }
    }
    // float32, double and the differences of through_bias must agree on which units of fire are on: none is near its
    // kink
    void keep_off_fire_kinks(Random& random) {
        const double c = std::fabs(host("fire_c")[0]), L = std::fabs(host("fire_l")[0]) * 512;
        std::vector<double> inputs;                     // of the units
        for (int i = 0; i < stride; i++) {
            const double whole = std::log(c * std::max(L, (double)i) + 1) + 1e-6;
            for (int d = 0; d < stride; d++) { inputs.push_back(std::log(c * d + 1) / whole); }
        }
        for (size_t k = 0; k < 32; k++) {
            double nearest = 0;
            while (nearest < 3e-5) {
                host("fire_b1")[k] = random.normal();
                nearest = 1;
                const double w = host("fire_w1")[k], b = host("fire_b1")[k];
                for (const double y : inputs) { nearest = std::min(nearest, std::fabs(w * y + b)); }
            }
        }
    }

    // q, k, v and the encoding's columns; the padding columns, the rows after T and q, k, v of padding tokens are NaN
    std::vector<float> draw_qkv(Random& random) {
        std::vector<float> x = draw_any_qkv(random);
        while (cope_kink(x) < (s.T < 10 ? 2e-3 : 1e-5)) { x = draw_any_qkv(random); }
        return x;
    }
    // how near a position of cope's is to a kink; a short sequence is what the oracle's differences are taken of
    double cope_kink(const std::vector<float>& qkv) {
        double nearest = 1;
        for (int bh = 0; bh < s.B * s.NH && params.find("cope_e") >= 0; bh++) {
            const OracleLayer<double> o = oracle(qkv, bh / s.NH, tokens(bh / s.NH));
            nearest = std::min(nearest, cope<double>(o, qkv, bh / s.NH, bh % s.NH).nearest_kink());
        }
        return nearest;
    }
    std::vector<float> draw_any_qkv(Random& random) const {
        std::vector<float> x((size_t)s.B * stride * OC, NAN);
        for (int b = 0; b < s.B; b++) {
            for (int t = 0; t < s.T; t++) {
                for (int c = 0; c < 3 * C + tables.extra_columns; c++) {
                    float v = random.normal();
                    while (c >= 3 * C && std::fabs(v) < 1e-3f) { v = random.normal(); }     // off ReLU's kink
                    x[((size_t)b * stride + t) * OC + c] = c < 3 * C && t >= tokens(b) ? NAN : v;
                }
            }
        }
        return x;
    }

    std::vector<float> draw_dout(Random& random) const {        // NaN where nothing may read
        std::vector<float> x = random.normals((size_t)s.B * s.T * C);
        for (size_t e = 0; e < x.size(); e++) { x[e] = (int)(e / C % s.T) < tokens((int)(e / C / s.T)) ? x[e] : NAN; }
        return x;
    }

    // Draws the factors by which attention multiplies the bias, as ssmax in the same layer would set them: 0 for a
    // query that sees one key.
    void draw_factors(Random& random) {
        for (int e = 0; e < s.B * s.NH * s.T; e++) {
            factors.push_back(seen(e / s.T / s.NH, e % s.T, s.T) == 1 ? 0.0f : (float)random.uniform(0.3, 2));
        }
        device_factors.reset(new Array<float>(factors));
        moments.reset(new Array<float>(factors.size()));
        view.factor = *device_factors;
        view.moment = *moments;
    }
    // x (tokens,tokens) of a head, row by row times its factor
    template <class R> std::vector<R> times_factor(std::vector<R> x, int b, int h, int tokens) const {
        for (size_t e = 0; e < x.size() && !factors.empty(); e++) {
            x[e] *= R(factors[((size_t)b * s.NH + h) * s.T + e / (size_t)tokens]);
        }
        return x;
    }

    template <Mask Keys> void forward(floatX* out, float* lse, floatX* qkv, int t0, int n) const {
        position().prepare_forward(qkv, s.B, n, t0, Stream(0));
        attention_forward<Keys>(out, lse, nullptr, qkv, view, s.B, n, t0, Stream(0));
    }
    void forward(floatX* out, float* lse, floatX* qkv, int t0, int n) const {
        if (causal) { forward<Mask::Causal>(out, lse, qkv, t0, n); } else { forward<Mask::Both>(out, lse, qkv, t0, n); }
    }
    // up to the sums of the bias functor, which prepare_backward then turns into gradients in place
    void backward_scores(floatX* dqkv, float* scratch, const floatX* dout, const floatX* qkv, const floatX* out,
                         const float* lse) const {
        if (causal) { attention_backward<Mask::Causal>(dqkv, scratch, dout, qkv, out, lse, view, s.B, s.T, Stream(0)); }
        else { attention_backward<Mask::Both>(dqkv, scratch, dout, qkv, out, lse, view, s.B, s.T, Stream(0)); }
    }
    void backward(floatX* dqkv, float* scratch, const floatX* dout, const floatX* qkv, const floatX* out,
                  const float* lse) const {
        backward_scores(dqkv, scratch, dout, qkv, out, lse);
        position().prepare_backward(dqkv, qkv, s.B, s.T, Stream(0));
    }
    size_t backward_scratch() const { return attention_backward_scratch(config, s.B, s.T, s.NH, s.HS); }
};

// every result of a layer by double and float32 loops; dqkv (B,T,OC) with zeros in the padding, grads in the layout of
// the table. Each sequence is computed by itself, at its own length; everything after its end is 0.
struct LayerOracle {
    std::vector<double> out, lse, dqkv, grads, slopes;      // slopes: the largest |dB_ij / dparameter|
    std::vector<float> plain_out, plain_lse, plain_dqkv, plain_grads;
    std::vector<double> dqkv_sizes, grad_sizes;             // of the encoding's own: the sums of the terms' magnitudes
    std::vector<double> moments;                            // (B,NH): the sums of dB_ij B_ij, and of their magnitudes
    std::vector<double> moment_sizes;

    LayerOracle(Layer& l, const std::vector<float>& qkv, const std::vector<float>& dout, bool with_gradients = true) {
        const size_t B = (size_t)l.s.B, T = (size_t)l.s.T;
        const size_t C = (size_t)l.C;
        out.resize(B * T * C);
        plain_out.resize(B * T * C);
        lse.resize(B * l.s.NH * T);
        plain_lse.resize(B * l.s.NH * T);
        dqkv.resize(B * T * l.OC);
        plain_dqkv.resize(B * T * l.OC);
        dqkv_sizes.resize(B * T * l.OC);
        grads.resize(l.params.total);
        slopes.resize(l.params.total);
        grad_sizes.resize(l.params.total);
        plain_grads.resize(l.params.total);
        for (int b = 0; b < l.s.B; b++) {
            OracleLayer<double> o = l.oracle(qkv, b, l.tokens(b));
            for (int h = 0; h < l.s.NH; h++) { one_head(l, o, qkv, dout, b, h, with_gradients); }
        }
    }

private:
    void one_head(Layer& l, OracleLayer<double>& o, const std::vector<float>& qkv, const std::vector<float>& dout,
                  int b, int h, bool with_gradients) {
        const size_t T = (size_t)o.T, HS = (size_t)l.s.HS;
        const size_t C = (size_t)l.C;
        const std::vector<double> q = l.vectors(o, qkv, b, h, 0), k = l.vectors(o, qkv, b, h, 1);
        const std::vector<double> v = l.vectors(o, qkv, b, h, 2);
        std::vector<double> dy;
        for (size_t t = 0; t < T; t++) {
            for (size_t d = 0; d < HS; d++) { dy.push_back(dout[((size_t)b * l.s.T + t) * C + h * HS + d]); }
        }
        const double scale = oracle_score_factor(o) / std::sqrt((double)HS);
        const std::vector<double> bias = l.hidden(l.times_factor(l.bias(o, qkv, b, h), b, h, o.T), b, o.T);
        HeadOracle<double> want(q, k, v, bias, dy, scale, T, HS, l.causal);
        const std::vector<float> f32_bias = l.hidden(l.times_factor(l.float_bias(o, qkv, b, h), b, h, o.T), b, o.T);
        HeadOracle<float> plain(as<float>(q), as<float>(k), as<float>(v), f32_bias, as<float>(dy), (float)scale,
                                      T, HS, l.causal);
        if (find_oracle(o.name).reads_scores) { through_scores(l, o, qkv, want, plain, b, h); }
        store(l, o, want, plain, b, h);
        sum_moments(l, o, want.dbias, bias);
        want.dbias = l.times_factor(want.dbias, b, h, o.T);        // from here on of B
        plain.dbias = l.times_factor(plain.dbias, b, h, o.T);
        if (with_gradients) { through_queries(l, o, qkv, want, plain, b, h); }
        if (with_gradients && !find_oracle(o.name).has_bias) { through_rotation(l, o, qkv, want, plain, b, h); }
        if (!with_gradients || !find_oracle(o.name).has_bias) { return; }
        for (size_t p = 0; p < l.tables.params.size(); p++) {
            std::vector<double>& tensor = o.params[l.tables.params[p].name];
            const double step = l.tables.params[p].name == "fire_l" ? 1e-9 : 1e-7;
            for (size_t e = 0; e < tensor.size(); e++) {
                const size_t at = l.params.offsets[p] + e;
                slopes[at] = std::max(slopes[at], through_bias(o, tensor[e], h, want, plain, grads[at],
                                                               plain_grads[at], grad_sizes[at], step));
            }
        }
        for (size_t e = 0; e < o.columns.size(); e++) {
            const size_t t = e / (size_t)o.width, c = e % (size_t)o.width;
            if (c % (size_t)l.s.NH != (size_t)h) { continue; }              // another head's
            const size_t at = ((size_t)b * l.s.T + t) * l.OC + 3 * C + c;
            through_bias(o, o.columns[e], h, want, plain, dqkv[at], plain_dqkv[at], dqkv_sizes[at]);
        }
    }
    void sum_moments(const Layer& l, const OracleLayer<double>& o, const std::vector<double>& dbias,
                     const std::vector<double>& bias) {
        moments.push_back(0);
        moment_sizes.push_back(0);
        for (size_t e = 0; e < bias.size() && !l.factors.empty(); e++) {
            const bool seen = !std::isinf(bias[e]) && (!l.causal || e % (size_t)o.T <= e / (size_t)o.T);
            moments.back() += seen ? dbias[e] * bias[e] : 0;
            moment_sizes.back() += seen ? std::fabs(dbias[e] * bias[e]) : 0;
        }
    }
    // += what goes through cope's gates and positions, and the gradient of its embeddings
    void through_scores(const Layer& l, const OracleLayer<double>& o, const std::vector<float>& qkv,
                        HeadOracle<double>& want, HeadOracle<float>& plain, int b, int h) {
        const CopeHead<double> exact = l.cope<double>(o, qkv, b, h);
        CopeHead<double> sizes = exact;
        std::vector<double> de(exact.e.size()), magnitudes = want.dbias, unused(want.dq.size());
        for (std::vector<double>* x : {&sizes.q, &magnitudes}) { for (double& e : *x) { e = std::fabs(e); } }
        sizes.backward(magnitudes, unused, unused, grad_sizes);         // the encoding's only parameter
        std::vector<float> plain_de(de.size());
        exact.backward(want.dbias, want.dq, want.dk, de);
        l.cope<float>(o, qkv, b, h).backward(plain.dbias, plain.dq, plain.dk, plain_de);
        for (size_t e = 0; e < de.size(); e++) {
            grads[e] += de[e];
            plain_grads[e] += plain_de[e];
            slopes[e] = std::max(slopes[e], largest(exact.q));
        }
    }
    // the results of one head to their places in those of the layer
    void store(const Layer& l, const OracleLayer<double>& o, const HeadOracle<double>& want,
               const HeadOracle<float>& plain, int b, int h) {
        const size_t T = (size_t)o.T, stride = (size_t)l.s.T;
        const size_t HS = (size_t)l.s.HS, C = (size_t)l.C;
        const std::vector<double>* d64[] = {&want.dq, &want.dk, &want.dv};
        const std::vector<float>* d32[] = {&plain.dq, &plain.dk, &plain.dv};
        for (size_t t = 0; t < T; t++) {
            lse[((size_t)b * l.s.NH + h) * stride + t] = want.lse[t];
            plain_lse[((size_t)b * l.s.NH + h) * stride + t] = plain.lse[t];
            for (size_t d = 0; d < HS; d++) {
                out[((size_t)b * stride + t) * C + h * HS + d] = want.out[t * HS + d];
                plain_out[((size_t)b * stride + t) * C + h * HS + d] = plain.out[t * HS + d];
            }
            for (size_t part = 0; part < 3; part++) {
                std::vector<double> x(d64[part]->begin() + t * HS, d64[part]->begin() + (t + 1) * HS);
                std::vector<double> f(d32[part]->begin() + t * HS, d32[part]->begin() + (t + 1) * HS);
                if (part < 2) {             // turned back
                    x = oracle_rotate(o, x, h, (int)t, true);
                    f = oracle_rotate(o, f, h, (int)t, true);
                }
                if (part == 0) {            // and scaled
                    const double factor = oracle_query_factor(o, h, l.seen(b, (int)t, o.T));
                    for (double& e : x) { e *= factor; }
                    for (double& e : f) { e *= factor; }
                }
                for (size_t d = 0; d < HS; d++) {
                    const size_t at = ((size_t)b * stride + t) * l.OC + part * C + h * HS + d;
                    dqkv[at] = x[d];
                    plain_dqkv[at] = (float)f[d];
                }
            }
        }
    }
    // += sum of dq'_i.q_i dfactor_i/dx for each parameter x, where q'_i = factor_i q_i
    void through_queries(Layer& l, OracleLayer<double>& o, const std::vector<float>& qkv,
                         const HeadOracle<double>& want, const HeadOracle<float>& plain, int b, int h) {
        const size_t HS = (size_t)l.s.HS;
        for (size_t p = 0; p < l.tables.params.size(); p++) {
            std::vector<double>& tensor = o.params[l.tables.params[p].name];
            for (size_t e = 0; e < tensor.size(); e++) {
                if (oracle_query_slope(o, tensor[e], h, 2) == 0) { continue; }
                for (int t = 0; t < o.T; t++) {
                    const double slope = oracle_query_slope(o, tensor[e], h, l.seen(b, t, o.T));
                    if (slope == 0) { continue; }
                    const size_t at = l.params.offsets[p] + e;
                    const float* q = &qkv[((size_t)b * l.stride + t) * l.OC + h * HS];
                    for (size_t d = 0; d < HS; d++) {       // who scales q does not turn it
                        grads[at] += want.dq[t * HS + d] * q[d] * slope;
                        plain_grads[at] += plain.dq[t * HS + d] * q[d] * (float)slope;
                    }
                    slopes[at] = std::max(slopes[at], std::fabs(slope));
                }
            }
        }
    }
    // += sum of dq'_t.dq'_t/dz for each column z that rotates q, and the same of k: of one head, from its own token on
    void through_rotation(const Layer& l, OracleLayer<double>& o, const std::vector<float>& qkv,
                          const HeadOracle<double>& want, const HeadOracle<float>& plain, int b, int h) {
        const size_t HS = (size_t)l.s.HS;
        for (size_t e = (size_t)h; e < o.columns.size(); e += (size_t)o.width) {
            const size_t own = e / (size_t)o.width, at = ((size_t)b * l.s.T + own) * l.OC + 3 * l.C + e % o.width;
            for (size_t t = own; t < (size_t)o.T; t++) {
                for (size_t part = 0; part < 2; part++) {
                    const float* x = &qkv[((size_t)b * l.stride + t) * l.OC + part * l.C + h * HS];
                    const auto dx = (part == 0 ? want.dq : want.dk).begin() + t * HS;
                    const auto plain_dx = (part == 0 ? plain.dq : plain.dk).begin() + t * HS;
                    const std::vector<double> slope = oracle_rotate_slope(o, o.columns[e], {x, x + HS}, h, (int)t);
                    const double term = std::inner_product(slope.begin(), slope.end(), dx, 0.0);
                    dqkv[at] += term;
                    dqkv_sizes[at] += std::fabs(term);
                    plain_dqkv[at] += (float)std::inner_product(slope.begin(), slope.end(), plain_dx, 0.0);
                }
            }
        }
    }
    // += sum of dB_ij * dB_ij/dx; returns the largest |dB_ij/dx|
    static double through_bias(const OracleLayer<double>& o, double& x, int h, const HeadOracle<double>& want,
                               const HeadOracle<float>& plain, double& gradient, float& plain_gradient, double& size,
                               double step = 1e-7) {
        const double at = x;
        double steepest = 0;
        x = at + step;
        const std::vector<double> up = oracle_bias(o, h);
        x = at - step;
        const std::vector<double> down = oracle_bias(o, h);
        x = at;
        for (size_t e = 0; e < up.size(); e++) {
            const double slope = (up[e] - down[e]) / (2 * step);
            gradient += want.dbias[e] * slope;
            size += std::fabs(want.dbias[e] * slope);
            plain_gradient += plain.dbias[e] * (float)slope;
            steepest = std::max(steepest, std::fabs(slope));
        }
        return steepest;
    }
};

// columns first .. first + n - 1 of rows of `width`
template <class T> std::vector<T> columns(const std::vector<T>& x, size_t width, size_t first, size_t n) {
    std::vector<T> y;
    for (size_t r = 0; r < x.size() / width; r++) {
        y.insert(y.end(), x.begin() + r * width + first, x.begin() + r * width + first + n);
    }
    return y;
}

inline std::string layer_text(const std::string& pos, LayerShape s, bool causal, const std::vector<int>& lengths) {
    std::string t = strprintf("%s: B %d, T %d, NH %d, HS %d, %s", pos.c_str(), s.B, s.T, s.NH, s.HS,
                              causal ? "causal" : "bidirectional");
    for (size_t b = 0; b < lengths.size(); b++) { t += strprintf("%s %d", b == 0 ? ", lengths" : "", lengths[b]); }
    return t;
}
