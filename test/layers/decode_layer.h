// decode_layer.h -- one layer that holds a text and decodes the token after it.
#pragma once

#include "test/layer.h"
#include "test/layers/attention_oracle.h"

#include "llmc/attention/decode.cuh"

namespace tests {        // so that the header of an encoding may use the same names

namespace {

struct Sizes { int B, NH, HS; };

// One layer that holds n tokens a sequence in buffers laid out for `stride`.
struct Cache : AttentionLayer {
    std::vector<float> host_qkv;                            // (B,stride,OC), as it was before the encoding prepared it
    std::unique_ptr<Array<floatX>> qkv;

    Cache(const std::string& name, Sizes x, int n, int stride, Random& random)
        : AttentionLayer(name, {x.B, n, x.NH, x.HS}, true, stride, stride, true) {
        fill([&](const TensorSpec& p) {
            for (size_t e = 0; e < p.size(); e++) { host(p.name)[e] = draw(p, random); }
        });
        draw_qkv(random);
        qkv.reset(new Array<floatX>(host_qkv.size()));
        set_qkv(host_qkv);
    }

    // parameters with which a thousand keys still compete: the bias must not reduce the softmax to the nearest keys
    static float draw(const TensorSpec& p, Random& random) {
        if (p.name == "kerple_r1") { return (float)random.uniform(0.1, 0.6); }
        if (p.name == "kerple_r2") { return (float)random.uniform(0.1, 0.5); }
        if (p.name.find("bam") == 0) { return (float)random.uniform(-0.4, 0.4); }
        if (p.name == "fire_c") { return (float)random.uniform(0.05, 0.5); }
        if (p.name == "cope_e") { return 0.1f * random.normal(); }
        if (p.name == "fire_l") { return 0.3f; }              // L is 153.6: some queries are below it, some above
        return draw_parameter(p, random);
    }
    // the padding columns and the rows after the tokens are NaN
    void draw_qkv(Random& random) {
        host_qkv.assign((size_t)s.B * stride * OC, NAN);
        for (int b = 0; b < s.B; b++) {
            for (int t = 0; t < s.T; t++) {
                float* row = &host_qkv[((size_t)b * stride + t) * OC];
                for (int c = 0; c < 3 * C; c++) { row[c] = random.normal(); }
                for (int c = 3 * C; c < 3 * C + tables.extra_columns; c++) {
                    row[c] = 0.2f * random.normal() - (c < 3 * C + s.NH ? 0.2f : 1.0f);
                }
            }
        }
    }
    // D to 1e6, g to 100, scores 200 apart: P would be 0 everywhere, or infinite, if kcable's bias were not in the
    // exponent and in the largest logit of a split
    void draw_extremes(Random& random) {
        for (int t = 0; t < s.B * stride; t++) {
            float* row = &host_qkv[(size_t)t * OC];
            for (int e = 0; e < 2 * C; e++) { row[e] *= 8; }                    // q.k / 4: of std 64
            for (int h = 0; h < s.NH && t % stride < s.T; h++) {
                row[3 * C + h] = random.normal() * (t % 3 == 0 ? 1e-3f : 2e4f);
                const float g = (float)random.uniform(0, 100);
                if (tables.extra_columns > s.NH) { row[3 * C + s.NH + h] = g; }
            }
        }
        set_qkv(host_qkv);
    }
    void set_qkv(const std::vector<float>& x) {
        host_qkv = stored(x);
        qkv->set(as<floatX>(x));
    }
    // the tokens t0 .. t0+n-1, as if they had just been computed
    void prepare(int t0, int count) const {
        position().prepare_forward(*qkv, s.B, count, t0, Stream(0));
    }
    // partial, where given: what the splits left, (B,NH,splits,HS+2)
    std::vector<float> decode(int t0, std::vector<float>* partial = nullptr) const {
        Array<floatX> out((size_t)s.B * C);
        Array<float> scratch(attention_decode_scratch(s.B, stride, s.NH, s.HS));
        attention_decode(out, *qkv, scratch, view, s.B, t0, Stream(0));
        const std::vector<float> left = scratch.host();     // its guards are looked at
        if (partial != nullptr) { *partial = left; }
        return host_floats(out);
    }

    // attention of the query at t0 of one head, by loops over R
    template <class R>
    HeadOracle<R> head(const OracleLayer<double>& o, int b, int h, int t0, const std::vector<R>& bias) const {
        const auto of = [&](int part) { return as<R>(vectors(o, host_qkv, b, h, part)); };
        return HeadOracle<R>(of(0), of(1), of(2), hidden(bias, b, t0 + 1), {}, 1 / std::sqrt((R)s.HS), (size_t)t0 + 1,
                             (size_t)s.HS, true, (size_t)t0);
    }
    // The output (HS) of that query. logit becomes at least the mean magnitude of its logits, weighted by attention.
    template <class R> std::vector<R> row(const OracleLayer<double>& o, int b, int h, int t0,
                                          const std::vector<R>& bias, double& logit) const {
        const HeadOracle<R> x = head(o, b, h, t0, bias);
        double size = 0;
        for (auto a = x.logits.end() - (t0 + 1); a != x.logits.end(); a++) {
            if (*a > -INFINITY) { size += (double)std::exp(*a - x.lse.back()) * std::fabs(*a); }
        }
        logit = std::max(logit, size);
        return std::vector<R>(x.out.end() - s.HS, x.out.end());
    }
};

// A text in which a bias falls by about 0.15 a token (alibi: 1/16 in the first of two heads)
struct SteepCache : Cache {
    SteepCache(const std::string& name, Sizes x, int n, Random& random) : Cache(name, x, n, n + 37, random) {
        for (size_t e = 0; e < host_qkv.size(); e++) {
            const int c = (int)(e % OC);
            if (c < 3 * C || c >= 3 * C + tables.extra_columns || !(host_qkv[e] == host_qkv[e])) { continue; }
            const bool v1 = config.name == "cable_v1";
            const float level = v1 ? -1.8f : 0.1f;
            host_qkv[e] = c >= 3 * C + s.NH ? 1 + 0.3f * random.normal() : level + 0.2f * random.normal();
        }
        set_qkv(host_qkv);
    }
    std::vector<float> decode_as(TileSkip skip, int t0, std::vector<float>* partial = nullptr) {
        config.tile_skip = skip;
        return decode(t0, partial);
    }
};

// which splits decoding left out: [bh * splits + split]
std::vector<bool> left_out(const std::vector<float>& partial, Sizes x, int t0) {
    std::vector<bool> out;
    const size_t row = (size_t)x.HS + 2, splits = (size_t)ceil_div(t0 + 1, DECODE_SPLIT);
    for (size_t e = 0; e < (size_t)x.B * x.NH * splits; e++) {
        out.push_back(partial[e * row + (size_t)x.HS] == -INFINITY && partial[e * row + (size_t)x.HS + 1] == 0);
        expect(!out.back() || std::isnan(partial[e * row]), "a split that is left out writes nothing");
    }
    return out;
}
int count(const std::vector<bool>& x) { return (int)std::count(x.begin(), x.end(), true); }

// NaN for all q, k and v of what was left out
std::vector<float> without(const Cache& c, const std::vector<bool>& out, int t0) {
    std::vector<float> x = host_floats(*c.qkv);
    const int splits = ceil_div(t0 + 1, DECODE_SPLIT);
    for (size_t e = 0; e < x.size(); e++) {
        const int column = (int)(e % c.OC), t = (int)(e / c.OC) % c.stride;
        const int b = (int)(e / c.OC) / c.stride;
        const int bh = b * c.s.NH + column % c.C / c.s.HS;
        if (column < 3 * c.C && t <= t0 && out[(size_t)(bh * splits + t / DECODE_SPLIT)]) { x[e] = NAN; }
    }
    return x;
}

} // namespace

} // namespace tests
