// test_attention.cu -- attention with every encoding, in both directions, against a dense oracle in double.
//
// The oracle holds the T x T matrices that the kernels never build. Biases come from oracle_positions.h; a gradient in an
// encoding's parameters is the sum over i, j of the oracle's dB_ij times dB_ij/dparameter, by central differences of the bias.
#include "test/layer.h"

#include "llmc/attention/choose.cuh"

namespace {

// One head: q, k, v (T,HS), bias (T,T); out (T,HS), lse (T) and, of the loss sum of out * dout, the gradients
template <class R> struct HeadOracle {
    std::vector<R> out, lse, dq, dk, dv, dbias;

    HeadOracle(const std::vector<R>& q, const std::vector<R>& k, const std::vector<R>& v, const std::vector<R>& bias, const std::vector<R>& dout,
               R scale, size_t T, size_t HS, bool causal) : out(T * HS), lse(T), dq(T * HS), dk(T * HS), dv(T * HS), dbias(T * T) {
        std::vector<R> P(T), dP(T);
        for (size_t i = 0; i < T; i++) {
            const size_t end = causal ? i + 1 : T;
            R m = -INFINITY, sum = 0, D = 0;
            for (size_t j = 0; j < end; j++) {
                P[j] = 0;
                for (size_t d = 0; d < HS; d++) { P[j] += q[i * HS + d] * k[j * HS + d]; }
                P[j] = scale * P[j] + bias[i * T + j];
                m = std::max(m, P[j]);
            }
            for (size_t j = 0; j < end; j++) { sum += std::exp(P[j] - m); }
            lse[i] = m + std::log(sum);
            for (size_t j = 0; j < end; j++) {
                P[j] = std::exp(P[j] - m) / sum;
                dP[j] = 0;
                for (size_t d = 0; d < HS; d++) {
                    out[i * HS + d] += P[j] * v[j * HS + d];
                    dP[j] += dout[i * HS + d] * v[j * HS + d];
                    dv[j * HS + d] += P[j] * dout[i * HS + d];
                }
                D += P[j] * dP[j];
            }
            for (size_t j = 0; j < end; j++) {
                const R da = P[j] * (dP[j] - D);
                dbias[i * T + j] = da;
                for (size_t d = 0; d < HS; d++) {
                    dq[i * HS + d] += scale * da * k[j * HS + d];
                    dk[j * HS + d] += scale * da * q[i * HS + d];
                }
            }
        }
    }
};

// T tokens at a capacity of `stride`
struct Layer : AttentionLayer {
    Layer(const std::string& name, Shape s, bool causal, Random& random, int stride = 0, int T_train = 0)
        : AttentionLayer(name, s, causal, stride > 0 ? stride : s.T, T_train > 0 ? T_train : stride > 0 ? stride : s.T) {
        fill([&](const TensorSpec& p) { draw(p, random); });
    }

    void draw(const TensorSpec& p, Random& random) {
        for (size_t e = 0; e < p.size(); e++) { host(p.name)[e] = random.normal(); }
        if (p.name == "kerple_r1" || p.name == "kerple_r2") {
            for (size_t e = 0; e < p.size(); e++) { host(p.name)[e] = (float)random.uniform(0.1, 1.9); }
        }
        if (p.name == "fire_c") { host(p.name)[0] = (float)random.uniform(0.05, 0.5) * (random.integer(0, 1) ? 1 : -1); }
        // at small T, L = 512 |l| lies among the positions, but on none of them: there max(L, i) has no derivative
        if (p.name == "fire_l") { host(p.name)[0] = (stride < 100 ? stride / 2 + 0.5f : 300.5f) / 512 * (random.integer(0, 1) ? 1 : -1); }
        if (p.name == "fire_b1") { keep_off_fire_kinks(random); }
    }
    // float32, double and the differences of through_bias must agree on which units of fire are on: none is near its kink
    void keep_off_fire_kinks(Random& random) {
        const double c = std::fabs(host("fire_c")[0]), L = std::fabs(host("fire_l")[0]) * 512;
        for (size_t k = 0; k < 32; k++) {
            double nearest = 0;
            while (nearest < 3e-5) {
                host("fire_b1")[k] = random.normal();
                nearest = 1;
                for (int i = 0; i < stride; i++) {
                    for (int d = 0; d < stride; d++) {
                        const double y = std::log(c * d + 1) / (std::log(c * std::max(L, (double)i) + 1) + 1e-6);
                        nearest = std::min(nearest, std::fabs(host("fire_w1")[k] * y + host("fire_b1")[k]));
                    }
                }
            }
        }
    }

    // q, k, v and the encoding's columns; the padding columns, the rows behind T and q, k, v of padding tokens are NaN
    std::vector<float> draw_qkv(Random& random) const {
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

    std::vector<float> draw_dout(Random& random) const {        // NaN where nobody may look
        std::vector<float> x = random.normals((size_t)s.B * s.T * C);
        for (size_t e = 0; e < x.size(); e++) { x[e] = (int)(e / C % s.T) < tokens((int)(e / C / s.T)) ? x[e] : NAN; }
        return x;
    }

    template <bool Causal> void forward(float* out, float* lse, float* qkv, int t0, int n) const {
        with_position(view, [&](auto position) { position.prepare_forward(qkv, s.B, n, t0, Stream(0)); });
        attention_forward<Causal>(out, lse, nullptr, qkv, view, s.B, n, t0, Stream(0));
    }
    void forward(float* out, float* lse, float* qkv, int t0, int n) const {
        if (causal) { forward<true>(out, lse, qkv, t0, n); } else { forward<false>(out, lse, qkv, t0, n); }
    }
    // up to the sums of the bias functor, which prepare_backward then turns into gradients in place
    void backward_scores(float* dqkv, float* scratch, const float* dout, const float* qkv, const float* out, const float* lse) const {
        if (causal) { attention_backward<true>(dqkv, scratch, dout, qkv, out, lse, view, s.B, s.T, Stream(0)); }
        else { attention_backward<false>(dqkv, scratch, dout, qkv, out, lse, view, s.B, s.T, Stream(0)); }
    }
    void backward(float* dqkv, float* scratch, const float* dout, const float* qkv, const float* out, const float* lse) const {
        backward_scores(dqkv, scratch, dout, qkv, out, lse);
        with_position(view, [&](auto position) { position.prepare_backward(dqkv, qkv, s.B, s.T, Stream(0)); });
    }
};

// (T,HS): part 0, 1, 2 is q, k, v of head h of sequence b, turned if the encoding turns it
std::vector<double> head(const Layer& l, const PositionOracle& o, const std::vector<float>& qkv, int b, int h, int part) {
    std::vector<double> x;
    for (int t = 0; t < o.T; t++) {
        const std::vector<double> v = l.vector(o, qkv, b, h, t, part);
        x.insert(x.end(), v.begin(), v.end());
    }
    return x;
}

// The bias as float32 loops have it: what an encoding computes from sums and logarithms is rounded on the way.
std::vector<float> plain_bias(const PositionOracle& o, const std::vector<double>& bias, int h) {
    std::vector<float> B = as<float>(bias), S((size_t)o.T);
    const size_t T = (size_t)o.T;
    float sum = 0;
    auto softplus = [](float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))); };
    for (size_t t = 0; t < T && !o.z.empty(); t++) {
        const float z = (float)o.z[t * o.NH + h];
        sum += o.name == "cable_v1" ? softplus(z) : std::max(z, 0.0f);
        S[t] = sum;
    }
    for (size_t e = 0; e < T * T; e++) {
        const int i = (int)(e / T), j = (int)(e % T);
        if (!o.z.empty()) {
            const float r = (o.u.empty() ? 1.0f : softplus((float)o.u[(size_t)i * o.NH + h])) * std::fabs(S[(size_t)i] - S[(size_t)j]);
            B[e] = o.name[0] == 'k' ? -std::log(1 + r * r) : -r;
        }
        if (o.name == "fire") {
            const float c = std::fabs((float)o.p.at("fire_c")[0]), L = std::fabs((float)o.p.at("fire_l")[0]) * 512;
            const float y = std::log(c * std::abs(i - j) + 1) / (std::log(c * std::max(L, (float)(o.causal ? i : std::max(i, j))) + 1) + 1e-6f);
            B[e] = (float)o.p.at("fire_b2")[(size_t)h];
            for (size_t k = 0; k < 32; k++) {
                B[e] += (float)o.p.at("fire_w2")[h * 32 + k] * std::max(0.0f, (float)o.p.at("fire_w1")[k] * y + (float)o.p.at("fire_b1")[k]);
            }
        }
    }
    return B;
}

// every result of a layer by double and float32 loops; dqkv (B,T,OC) with zeros in the padding, grads as the table lays them out.
// A sequence is computed as if it were alone, with as many tokens as it has: behind them all is 0.
struct LayerOracle {
    std::vector<double> out, lse, dqkv, grads, slopes;      // slopes: the largest |dB_ij / dparameter|
    std::vector<float> plain_out, plain_lse, plain_dqkv, plain_grads;

    LayerOracle(Layer& l, const std::vector<float>& qkv, const std::vector<float>& dout, bool with_gradients = true) {
        const size_t B = (size_t)l.s.B, T = (size_t)l.s.T, C = (size_t)l.C;
        out.resize(B * T * C); plain_out.resize(B * T * C);
        lse.resize(B * l.s.NH * T); plain_lse.resize(B * l.s.NH * T);
        dqkv.resize(B * T * l.OC); plain_dqkv.resize(B * T * l.OC);
        grads.resize(l.params.total); slopes.resize(l.params.total); plain_grads.resize(l.params.total);
        for (int b = 0; b < l.s.B; b++) {
            PositionOracle o = l.oracle(qkv, b, l.tokens(b));
            for (int h = 0; h < l.s.NH; h++) { one_head(l, o, qkv, dout, b, h, with_gradients); }
        }
    }

private:
    void one_head(Layer& l, PositionOracle& o, const std::vector<float>& qkv, const std::vector<float>& dout, int b, int h, bool with_gradients) {
        const size_t T = (size_t)o.T, stride = (size_t)l.s.T, HS = (size_t)l.s.HS, C = (size_t)l.C;
        const std::vector<double> q = head(l, o, qkv, b, h, 0), k = head(l, o, qkv, b, h, 1), v = head(l, o, qkv, b, h, 2), bias = oracle_bias(o, h);
        std::vector<double> dy;
        for (size_t t = 0; t < T; t++) {
            for (size_t d = 0; d < HS; d++) { dy.push_back(dout[((size_t)b * stride + t) * C + h * HS + d]); }
        }
        const double scale = oracle_score_factor(o) / std::sqrt((double)HS);
        const HeadOracle<double> want(q, k, v, bias, dy, scale, T, HS, l.causal);
        const HeadOracle<float> plain(as<float>(q), as<float>(k), as<float>(v), plain_bias(o, bias, h), as<float>(dy), (float)scale, T, HS, l.causal);
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
                    x = oracle_rotate(o, x, -(int)t);
                    f = oracle_rotate(o, f, -(int)t);
                }
                for (size_t d = 0; d < HS; d++) {
                    dqkv[((size_t)b * stride + t) * l.OC + part * C + h * HS + d] = x[d];
                    plain_dqkv[((size_t)b * stride + t) * l.OC + part * C + h * HS + d] = (float)f[d];
                }
            }
        }
        if (!with_gradients) { return; }
        for (size_t p = 0; p < l.tables.params.size(); p++) {
            const std::string& name = l.tables.params[p].name;
            if (name == "wpe") { continue; }            // not the attention's
            for (size_t e = 0; e < o.p[name].size(); e++) {
                const size_t at = l.params.offsets[p] + e;
                slopes[at] = std::max(slopes[at], through_bias(o, o.p[name][e], h, want, plain, grads[at], plain_grads[at], name == "fire_l" ? 1e-9 : 1e-7));
            }
        }
        for (size_t t = 0; t < T && !o.z.empty(); t++) {
            const size_t column = ((size_t)b * stride + t) * l.OC + 3 * C + h;
            through_bias(o, o.z[t * l.s.NH + h], h, want, plain, dqkv[column], plain_dqkv[column]);
            if (!o.u.empty()) { through_bias(o, o.u[t * l.s.NH + h], h, want, plain, dqkv[column + l.s.NH], plain_dqkv[column + l.s.NH]); }
        }
    }
    // += sum of dB_ij * dB_ij/dx; returns the largest |dB_ij/dx|
    static double through_bias(const PositionOracle& o, double& x, int h, const HeadOracle<double>& want, const HeadOracle<float>& plain,
                               double& gradient, float& plain_gradient, double step = 1e-7) {
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
            plain_gradient += plain.dbias[e] * (float)slope;
            steepest = std::max(steepest, std::fabs(slope));
        }
        return steepest;
    }
};

// columns first .. first + n - 1 of rows of `width`
template <class T> std::vector<T> columns(const std::vector<T>& x, size_t width, size_t first, size_t n) {
    std::vector<T> y;
    for (size_t r = 0; r < x.size() / width; r++) { y.insert(y.end(), x.begin() + r * width + first, x.begin() + r * width + first + n); }
    return y;
}

// Behind a sequence's end out is 0, lse is -inf, which becomes 0 here, and all gradients are 0.
void check_padding(const Layer& l, const std::vector<float>& out, std::vector<float>& lse, const std::vector<float>& dqkv) {
    const size_t T = (size_t)l.s.T, C = (size_t)l.C, OC = (size_t)l.OC, NH = (size_t)l.s.NH, columns = 3 * C + (size_t)l.tables.extra_columns;
    size_t wrong = 0;
    for (size_t bt = 0; bt < (size_t)l.s.B * T; bt++) {
        if (bt % T < (size_t)l.tokens((int)(bt / T))) { continue; }
        for (size_t c = 0; c < C; c++) { wrong += out[bt * C + c] != 0; }
        for (size_t c = 0; c < columns; c++) { wrong += dqkv[bt * OC + c] != 0; }
        for (size_t h = 0; h < NH; h++) {
            float& x = lse[(bt / T * NH + h) * T + bt % T];
            wrong += x != -INFINITY;
            x = 0;
        }
    }
    CHECK(wrong == 0);
}

std::string text(const std::string& name, Shape s, bool causal, const std::vector<int>& lengths) {
    std::string t = strprintf("%s: B %d, T %d, NH %d, HS %d, %s", name.c_str(), s.B, s.T, s.NH, s.HS, causal ? "causal" : "bidirectional");
    for (size_t b = 0; b < lengths.size(); b++) { t += strprintf("%s %d", b == 0 ? ", lengths" : "", lengths[b]); }
    return t;
}

// lengths: of the sequences, which differ; none: all have T tokens
void test_layer(Random& random, const std::string& name, Shape s, bool causal, const std::vector<int>& lengths = {}) {
    INFO(text(name, s, causal, lengths));
    Layer l(name, s, causal, random);
    if (!lengths.empty()) { l.set_lengths(lengths); }
    const std::vector<float> qkv = l.draw_qkv(random), dout = l.draw_dout(random);
    const LayerOracle o(l, qkv, dout);
    poison_shared();
    Array<float> d_qkv(qkv), out(dout.size()), lse((size_t)s.B * s.NH * s.T), dqkv(qkv.size());
    Array<float> scratch(attention_backward_scratch(l.config, s.B, s.T, s.NH, s.HS));
    l.forward(out, lse, d_qkv, 0, s.T);
    // P = e^(a - lse) is off by half an ulp of a. A row of da, P (dP - D), is rounded at the size of dP = dout.v even where it
    // cancels to 0, and goes on to dq times k / sqrt(HS).
    const double scores = std::max(1.0, largest(o.lse)), scale = largest(dout) * largest(qkv) * scores;
    check_close("out", out.host(), o.out, o.plain_out, largest(o.out) * scores);
    l.backward(dqkv, scratch, Array<float>(dout), d_qkv, out, lse);
    const std::vector<float> got = dqkv.host();
    std::vector<float> got_lse = lse.host();
    check_padding(l, out.host(), got_lse, got);
    check_close("lse", got_lse, o.lse, o.plain_lse, 1.0);
    const char* names[] = {"dq", "dk", "dv"};
    const size_t C = (size_t)l.C, OC = (size_t)l.OC, NH = (size_t)s.NH;
    for (size_t p = 0; p < 3; p++) {
        check_close(names[p], columns(got, OC, p * C, C), columns(o.dqkv, OC, p * C, C), columns(o.plain_dqkv, OC, p * C, C), scale);
    }
    for (size_t at = 3 * C; at < 3 * C + (size_t)l.tables.extra_columns; at += NH) {
        check_close(at == 3 * C ? "dz" : "du", columns(got, OC, at, NH), columns(o.dqkv, OC, at, NH), columns(o.plain_dqkv, OC, at, NH), scale);
    }
    const std::vector<float> grads = l.grads->host();
    for (size_t p = 0; p < l.tables.params.size(); p++) {
        const size_t first = l.params.offsets[p], n = l.params.specs[p].size();
        auto part = [&](const auto& x) { return std::decay_t<decltype(x)>(x.begin() + first, x.begin() + first + n); };
        const std::vector<double> want = part(o.grads);
        // what the sums over all i, j cancel from: sqrt(T) rows, each of the size of dP times the slope
        check_close("d" + l.params.specs[p].name, part(grads), want, part(o.plain_grads), scale * largest(part(o.slopes)) * std::sqrt((double)s.T * s.B));
    }
}

// A sequence that arrives in pieces, as in generation, against the oracle and against the same in one call.
void test_pieces(Random& random, const std::string& name, int stride, const std::vector<int>& pieces) {
    Shape s = {1, 0, 2, 8};
    for (int n : pieces) { s.T += n; }
    INFO(name << ", T " << s.T);
    Layer l(name, s, true, random, stride);                 // capacity beyond the tokens; the rows behind them are NaN
    const std::vector<float> qkv = l.draw_qkv(random);
    Array<float> whole(qkv), out((size_t)s.T * l.C), lse((size_t)s.NH * l.stride);
    l.forward(out, lse, whole, 0, s.T);
    l.act_data->set(std::vector<float>(l.acts.total, NAN)); // anew: rows arrive piece by piece, later ones are not there yet
    std::vector<float> so_far(qkv.size(), NAN), got;
    Array<float> cached(so_far);
    int t0 = 0;
    for (int n : pieces) {
        so_far = cached.host();
        std::copy(qkv.begin() + t0 * l.OC, qkv.begin() + (t0 + n) * l.OC, so_far.begin() + t0 * l.OC);
        cached.set(so_far);
        Array<float> piece((size_t)n * l.C);
        l.forward(piece, nullptr, cached, t0, n);
        const std::vector<float> p = piece.host();
        got.insert(got.end(), p.begin(), p.end());
        t0 += n;
    }
    // tiles are cut elsewhere, so sums have another order: what float32 loops in the oracle are off by is the unit
    const LayerOracle o(l, qkv, std::vector<float>((size_t)s.T * l.C, 0.0f), false);
    check_close("in pieces", got, o.out, o.plain_out);
    check_close("at once", out.host(), o.out, o.plain_out);
}

// dqkv (B,T,columns_of): without what lies behind the encoding's columns
struct Bits { std::vector<float> out, lse, dqkv; };
size_t columns_of(const Layer& l) { return (size_t)(3 * l.C + l.tables.extra_columns); }
Bits run_bits(const Layer& l, const std::vector<float>& qkv, const std::vector<float>& dout) {
    Array<float> d_qkv(qkv), out(dout.size()), lse((size_t)l.s.B * l.s.NH * l.s.T), dqkv(qkv.size());
    Array<float> scratch(attention_backward_scratch(l.config, l.s.B, l.s.T, l.s.NH, l.s.HS));
    l.forward(out, lse, d_qkv, 0, l.s.T);
    l.backward(dqkv, scratch, Array<float>(dout), d_qkv, out, lse);
    return {out.host(), lse.host(), columns(dqkv.host(), (size_t)l.OC, 0, columns_of(l))};
}

std::vector<std::string> encodings() {
    std::vector<std::string> names;
    for (const PositionRow& row : position_rows) { names.push_back(row.name); }
    return names;
}

} // namespace

TEST_CASE("attention oracle: its backward is its forward's derivative", "[attention]") {
    Random random;
    INFO(random);
    const size_t T = 5, HS = 3;
    for (bool causal : {true, false}) {
        auto q = as<double>(random.normals(T * HS)), k = as<double>(random.normals(T * HS)), v = as<double>(random.normals(T * HS));
        auto bias = as<double>(random.normals(T * T));
        const auto dout = as<double>(random.normals(T * HS));
        auto run = [&] { return HeadOracle<double>(q, k, v, bias, dout, 0.7, T, HS, causal); };
        auto loss = [&] { return dot(run().out, dout); };
        const HeadOracle<double> o = run();
        check_gradient("dq", loss, q, o.dq, random, 15);
        check_gradient("dk", loss, k, o.dk, random, 15);
        check_gradient("dv", loss, v, o.dv, random, 15);
        check_gradient("dbias", loss, bias, o.dbias, random, 25);
    }
}

// The whole chain by differences of a loss: dqkv, the encoding's columns, its parameters. The oracle of oracles.
TEST_CASE("attention oracle: gradients through every encoding are the loss's derivative", "[attention]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) {
        for (bool causal : {true, false}) {
            INFO(name << (causal ? ", causal" : ", bidirectional"));
            const Shape s = {2, 6, 2, 4};
            Layer l(name, s, causal, random);
            l.set_lengths({6, 4});
            const std::vector<float> qkv = l.draw_qkv(random), dout = l.draw_dout(random);
            const LayerOracle o(l, qkv, dout);
            auto loss = [&](const std::vector<float>& x) {
                const std::vector<double> out = LayerOracle(l, x, dout, false).out;
                double sum = 0;
                for (size_t e = 0; e < out.size(); e++) { sum += std::isnan(dout[e]) ? 0 : out[e] * dout[e]; }
                return sum;
            };
            // float32 inputs: a step of 2^-11 is exact in them, and off by its square, 2e-7, times a third derivative
            const float step = 0x1p-11f;
            for (int k = 0; k < 12; k++) {
                const size_t row = (size_t)random.integer(0, s.B * s.T - 1), c = (size_t)random.integer(0, 3 * l.C + l.tables.extra_columns - 1), e = row * l.OC + c;
                if (c >= (size_t)3 * l.C && std::fabs(qkv[e]) < 2 * step) { continue; }
                if (std::isnan(qkv[e])) { continue; }           // of a padding token
                std::vector<float> up = qkv, down = qkv;
                up[e] += step;
                down[e] -= step;
                const double slope = (loss(up) - loss(down)) / ((double)up[e] - down[e]);
                INFO("column " << c << " of row " << row << ": differences give " << slope << ", the oracle " << o.dqkv[e]);
                CHECK(std::fabs(slope - o.dqkv[e]) <= 2e-5 * std::max(1.0, largest(o.dqkv)));
            }
        }
    }
}

TEST_CASE("attention, small shapes, every encoding, both directions", "[attention][race][asan]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) {
        const bool slow = name == "fire";                   // its oracle: an MLP for each i, j and parameter
        for (bool causal : {true, false}) {
            test_layer(random, name, slow ? Shape{1, 15, 2, 8} : Shape{1, 37, 2, 8}, causal);
            test_layer(random, name, {2, 5, 3, 4}, causal);
            test_layer(random, name, {1, 1, 1, 2}, causal);
        }
    }
}

TEST_CASE("attention, every encoding, both directions, across tiles and chunks", "[attention]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) {
        for (bool causal : {true, false}) {
            test_layer(random, name, {1, 2, 3, 64}, causal);
            test_layer(random, name, name == "fire" ? Shape{1, 67, 1, 16} : Shape{1, 130, 2, 16}, causal);
        }
    }
}

TEST_CASE("attention, sequences that end earlier, every encoding, both directions", "[attention][race][asan]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) {
        for (bool causal : {true, false}) {
            if (name != "fire") { test_layer(random, name, {4, 37, 2, 8}, causal, {37, 1, 20, 32}); }
            test_layer(random, name, {4, 5, 1, 4}, causal, {5, 1, 3, 0});
        }
    }
}

TEST_CASE("attention, sequences that end in other tiles, every encoding, both directions", "[attention]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) {
        for (bool causal : {true, false}) {
            test_layer(random, name, name == "fire" ? Shape{2, 70, 1, 16} : Shape{3, 150, 1, 16}, causal,
                       name == "fire" ? std::vector<int>{66, 30} : std::vector<int>{129, 64, 150});
        }
    }
}

// Forward, dqkv and lse of each sequence have the bits that they have alone, whatever pads it, and however much.
TEST_CASE("attention: padding changes no bit of a sequence", "[attention][asan]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) {
        for (bool causal : {true, false}) {
            for (const std::vector<int>& lengths : {std::vector<int>{40, 1, 17, 31}, {150, 129, 64, 97}}) {
                for (int T : {lengths[0], lengths[0] + 1, 202}) {
                    const Shape s = {(int)lengths.size(), T, 2, 24};
                    INFO(text(name, s, causal, lengths));
                    Layer l(name, s, causal, random, 0, 202);
                    l.set_lengths(lengths);
                    const std::vector<float> qkv = l.draw_qkv(random), dout = l.draw_dout(random);
                    const Bits padded = run_bits(l, qkv, dout);
                    for (size_t b = 0; b < lengths.size(); b++) {
                        Layer one(name, {1, lengths[b], s.NH, s.HS}, causal, random, 0, 202);
                        one.fill([&](const TensorSpec& p) {         // the longer table of learned positions begins with the shorter
                            std::copy(l.host(p.name), l.host(p.name) + p.size(), one.host(p.name));
                        });
                        const size_t n = (size_t)lengths[b];
                        const auto mine = [&](const std::vector<float>& x, size_t width) {
                            return std::vector<float>(x.begin() + b * T * width, x.begin() + (b * T + n) * width);
                        };
                        const Bits alone = run_bits(one, mine(qkv, (size_t)l.OC), mine(dout, (size_t)l.C));
                        INFO("sequence " << b);
                        CHECK(same_bits(alone.out, mine(padded.out, (size_t)l.C)));
                        CHECK(alone.dqkv == mine(padded.dqkv, columns_of(l)));      // -fno-signed-zeros: 0 is -0
                        for (size_t h = 0; h < (size_t)s.NH; h++) {
                            const float *x = &padded.lse[(b * s.NH + h) * T], *y = &alone.lse[h * n];
                            CHECK(memcmp(x, y, n * sizeof(float)) == 0);
                        }
                    }
                }
            }
        }
    }
}

TEST_CASE("attention, every head size", "[attention][asan]") {
    Random random;
    INFO(random);
    for (bool causal : {true, false}) {
        for (int HS : {1, 8, 16, 37, 64}) {
            for (int T : {2, 64, 65, 130}) { test_layer(random, "none", {2, T, 1, HS}, causal); }
            test_layer(random, "cable", {1, 65, 1, HS}, causal);
        }
    }
}

TEST_CASE("attention across chunks of the cumulative sum", "[attention]") {
    Random random;
    INFO(random);
    test_layer(random, "cable", {1, 270, 1, 37}, true);
    test_layer(random, "kcable", {1, 260, 1, 5}, false);
}

TEST_CASE("every encoding's token embeddings, forward and backward, whole and from t0 on", "[attention][race][asan]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) {
        for (const Shape& s : {Shape{2, 37, 1, 8}, Shape{1, 1, 1, 6}, Shape{3, 2, 5, 2}}) {
            INFO(name << ": B " << s.B << ", T " << s.T << ", C " << s.NH * s.HS);
            Layer l(name, s, true, random, s.T + 3);
            const size_t C = (size_t)l.C, T = (size_t)s.T;
            const PositionOracle o = l.oracle(l.draw_qkv(random), 0, s.T);
            const std::vector<float> x = random.normals(s.B * T * C), dy = random.normals(s.B * T * C);
            for (int t0 : {0, 3}) {
                const size_t B = t0 == 0 ? (size_t)s.B : 1;
                const std::vector<float> in(x.begin(), x.begin() + B * T * C);
                std::vector<double> want;
                for (size_t row = 0; row < B * T; row++) {
                    const std::vector<double> y = oracle_embed(o, std::vector<double>(in.begin() + row * C, in.begin() + (row + 1) * C), t0 + (int)(row % T));
                    want.insert(want.end(), y.begin(), y.end());
                }
                Array<float> out(in);
                with_position(l.view, [&](auto position) { position.embed_forward(out, (int)B, s.T, t0, Stream(0)); });
                // one product and one sum, each rounded once; sines are rounded to float32
                check_close("embedded", out.host(), want, as<float>(want), 2 * largest(want), 1);
            }
            Array<float> dx(dy);
            with_position(l.view, [&](auto position) { position.embed_backward(dx, s.B, s.T, Stream(0)); });
            const double scale = name == "sinusoidal" ? std::sqrt((double)C) : 1.0;
            std::vector<double> dx_want, dwpe(l.params.total);
            for (size_t e = 0; e < dy.size(); e++) {
                dx_want.push_back(scale * dy[e]);
                if (name == "learned") { dwpe[e / C % T * C + e % C] += dy[e]; }
            }
            check_close("dx", dx.host(), dx_want, as<float>(dx_want), 2 * largest(dx_want), 1);
            if (name == "learned") { check_close("dwpe", l.grads->host(), dwpe, as<float>(dwpe), s.B * largest(dwpe), 1); }
        }
    }
}

TEST_CASE("attention in pieces equals attention at once, every encoding", "[attention][asan]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) { test_pieces(random, name, 171, {5, 1, 1, 50, 20, 1, 60, 1, 11}); }
}

TEST_CASE("attention in pieces, a short text", "[attention][race]") {
    Random random;
    INFO(random);
    for (const char* name : {"cable", "t5", "rope"}) { test_pieces(random, name, 45, {5, 1, 30, 4}); }
}

TEST_CASE("rope's scalings beyond the trained length", "[attention][asan]") {
    Random random;
    INFO(random);
    const Shape s = {1, 64, 2, 8};
    for (const char* scaling : {"none", "pi", "ntk", "yarn"}) {
        for (double factor : {0.0, 3.0}) {
            INFO(scaling << ", factor " << factor);
            Layer l("rope", s, true, random, 0, 37);
            l.config.scaling = std::string(scaling) == "pi" ? RopeScaling::PI : std::string(scaling) == "ntk" ? RopeScaling::NTK
                             : std::string(scaling) == "yarn" ? RopeScaling::YaRN : RopeScaling::None;
            l.config.scaling_factor = factor;
            const std::vector<float> qkv = l.draw_qkv(random);
            Array<float> out((size_t)s.T * l.C), d_qkv(qkv);
            l.forward(out, nullptr, d_qkv, 0, s.T);
            PositionOracle o = l.oracle(qkv, 0, s.T);
            o.scaling = scaling;
            o.s = factor > 0 ? factor : 64.0 / 37;
            std::vector<double> want((size_t)s.T * l.C);
            std::vector<float> plain((size_t)s.T * l.C);
            const std::vector<double> zeros((size_t)s.T * s.HS), bias = oracle_bias(o, 0);
            const double scale = oracle_score_factor(o) / std::sqrt((double)s.HS);
            for (int h = 0; h < s.NH; h++) {
                const auto q = head(l, o, qkv, 0, h, 0), k = head(l, o, qkv, 0, h, 1), v = head(l, o, qkv, 0, h, 2);
                const HeadOracle<double> a(q, k, v, bias, zeros, scale, s.T, s.HS, true);
                const HeadOracle<float> f(as<float>(q), as<float>(k), as<float>(v), as<float>(bias), as<float>(zeros), (float)scale, s.T, s.HS, true);
                for (int e = 0; e < s.T * s.HS; e++) {
                    want[(size_t)(e / s.HS) * l.C + h * s.HS + e % s.HS] = a.out[(size_t)e];
                    plain[(size_t)(e / s.HS) * l.C + h * s.HS + e % s.HS] = f.out[(size_t)e];
                }
            }
            check_close("out", out.host(), want, plain);
        }
    }
}

TEST_CASE("attention: same bits for any number of threads", "[attention]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) {
        INFO(name);
        const Shape s = {2, 130, 2, 16};
        Layer l(name, s, true, random);
        const std::vector<float> qkv = l.draw_qkv(random);
        const Array<float> dout(random.normals((size_t)s.B * s.T * l.C));
        check_thread_invariance([&] {
            l.grads->set(std::vector<float>(l.params.total, 0.0f));
            Array<float> d_qkv(qkv), out(dout.n), lse((size_t)s.B * s.NH * s.T), dqkv(qkv.size());
            Array<float> scratch(attention_backward_scratch(l.config, s.B, s.T, s.NH, s.HS));
            l.forward(out, lse, d_qkv, 0, s.T);
            l.backward(dqkv, scratch, dout, d_qkv, out, lse);
            std::vector<float> all = out.host();
            for (const std::vector<float>& x : {lse.host(), columns(dqkv.host(), l.OC, 0, 3 * l.C + l.tables.extra_columns), l.grads->host()}) {
                all.insert(all.end(), x.begin(), x.end());
            }
            return all;
        });
    }
}

TEST_CASE("nothing in attention grows with the square of T", "[attention][asan]") {
    const int T = 1 << 14, NH = 4, HS = 32;
    const AttentionDims small = {T, 0, T, NH, HS, 3 * NH * HS, 1.0f}, large = {4 * T, 0, 4 * T, NH, HS, 3 * NH * HS, 1.0f};
    CHECK(attention_forward_shared(small) == attention_forward_shared(large));
    CHECK(attention_backward_shared(small) == attention_backward_shared(large));
    CHECK(attention_backward_scratch(PositionConfig(), 2, 4 * T, NH, HS) == 4 * attention_backward_scratch(PositionConfig(), 2, T, NH, HS));
    for (const std::string& name : encodings()) {
        auto floats = [&](int length) {
            PositionDims d;
            d.L = 1; d.NH = NH; d.C = NH * HS; d.B = 2; d.T = length;
            size_t n = 0;
            const PositionTables tables = position_tables(parse_position(name, T), d);
            for (const TensorSpec& spec : tables.acts) { n += spec.size(); }
            return n;
        };
        INFO(name);
        CHECK(floats(4 * T) <= 4 * floats(T));
    }
}

namespace {

// out of a layer whose qkv is given; `edit` may change S_offset, S_origin and g between prepare and attention
template <class F> std::vector<float> run_layer(const Layer& l, const std::vector<float>& qkv, F edit) {
    Array<float> d_qkv(qkv), out((size_t)l.s.B * l.s.T * l.C);
    with_position(l.view, [&](auto position) { position.prepare_forward(d_qkv, l.s.B, l.s.T, 0, Stream(0)); });
    edit();
    if (l.causal) { attention_forward<true>(out, nullptr, nullptr, d_qkv, l.view, l.s.B, l.s.T, 0, Stream(0)); }
    else { attention_forward<false>(out, nullptr, nullptr, d_qkv, l.view, l.s.B, l.s.T, 0, Stream(0)); }
    return out.host();
}

// the qkv of one layer as another has it: the same q, k, v, the encoding's columns from z(h), u(h)
template <class Z, class U> std::vector<float> with_columns(const Layer& to, const Layer& from, const std::vector<float>& qkv, Z z, U u) {
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
        const Shape s = {2, 150, 3, 16};
        Layer none("none", s, causal, random), cable("cable", s, causal, random), nw("cable_nw", s, causal, random), alibi("alibi", s, causal, random);
        Layer kcable("kcable", s, causal, random), kcable_nw("kcable_nw", s, causal, random), v1("cable_v1", s, causal, random);
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
            const std::vector<float> got = run_layer(cable, with_columns(cable, none, qkv, is(1.0f), drawn), [&] { set_g(cable, as<float>(slopes)); });
            CHECK(same_bits(got, run_layer(alibi, qkv, nothing)));
        }
        SECTION(causal ? "a huge b leaves each token itself, causal" : "a huge b leaves each token itself") {
            std::vector<float> v;
            for (size_t r = 0; r < (size_t)s.B * s.T; r++) { v.insert(v.end(), qkv.begin() + r * none.OC + 2 * none.C, qkv.begin() + r * none.OC + 3 * none.C); }
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
            const Shape s = {2, 150, 2, 16};
            Layer l(name, s, causal, random);
            Array<float> qkv(l.draw_qkv(random)), out((size_t)s.B * s.T * l.C), lse((size_t)s.B * s.NH * s.T), dqkv(qkv.n);
            Array<float> scratch(attention_backward_scratch(l.config, s.B, s.T, s.NH, s.HS));
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

TEST_CASE("rope's scores depend on i - j alone", "[attention][asan]") {
    Random random;
    INFO(random);
    const Shape s = {1, 200, 2, 16};
    Layer l("rope", s, true, random);
    std::vector<float> qkv((size_t)s.T * l.OC, 0.0f);
    const std::vector<float> row = random.normals(2 * l.C);
    for (int t = 0; t < s.T; t++) { std::copy(row.begin(), row.end(), qkv.begin() + t * l.OC); }    // the same q and k everywhere
    Array<float> d_qkv(qkv);
    with_position(l.view, [&](auto position) { position.prepare_forward(d_qkv, 1, s.T, 0, Stream(0)); });
    const std::vector<float> turned = d_qkv.host();
    CHECK_FALSE(same_bits(turned, qkv));
    for (int h = 0; h < s.NH; h++) {
        double size = 0, worst = 0;
        auto score = [&](int i, int j) {
            double a = 0, norm = 0;
            for (int d = 0; d < s.HS; d++) {
                const double x = turned[(size_t)i * l.OC + h * s.HS + d], y = turned[(size_t)j * l.OC + l.C + h * s.HS + d];
                a += x * y;
                norm += std::fabs(x * y);
            }
            size = std::max(size, norm);
            return a;
        };
        for (int distance : {0, 1, 7, 100, 150}) {
            const double first = score(distance, 0);
            for (int j = 1; j + distance < s.T; j++) { worst = std::max(worst, std::fabs(score(j + distance, j) - first)); }
        }
        // each component of q and k is two products of a rounded sine or cosine, and a rounded sum
        CHECK(worst <= 8 * FLT_EPSILON * size);
        CHECK(std::fabs(score(7, 0) - score(0, 0)) > 1e-3);
    }
}

TEST_CASE("attention hands a NaN on, to the rows that see it", "[attention]") {
    Random random;
    INFO(random);
    const Shape s = {1, 70, 1, 8};
    Layer l("none", s, true, random);
    std::vector<float> qkv = l.draw_qkv(random);
    qkv[40 * l.OC + l.C + 3] = NAN;         // a key
    Array<float> d_qkv(qkv), out((size_t)s.T * l.C);
    l.forward(out, nullptr, d_qkv, 0, s.T);
    const std::vector<float> got = out.host();
    for (int t = 0; t < s.T; t++) { CHECK(std::isnan(got[(size_t)t * l.C]) == (t >= 40)); }
}

TEST_CASE("attention: heads too large for a block's shared memory are refused", "[attention]") {
    const PositionConfig fire = parse_position("fire", 128);
    AttentionDims p = {};
    p.HS = 64;
    const size_t limit = attention_backward_shared(p);
    REQUIRE(attention_forward_shared(p) < limit);
    for (int HS : {8, 63, 64}) { CHECK_NOTHROW(check_head_size(fire, HS, true, limit)); }
    CHECK_NOTHROW(check_head_size(fire, 65, false, limit));
    try {
        check_head_size(fire, 65, true, limit);
        FAIL("65 fits");
    } catch (const Error& e) {
        CHECK(e.code == EXIT_BAD_INPUT);
        const std::string words = e.what();
        INFO(words);
        CHECK(words.find("heads of 65 need ") != std::string::npos);
        CHECK(words.find("at most 64 fit") != std::string::npos);
    }
}
