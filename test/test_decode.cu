// test_decode.cu -- attention of one new token, for every encoding, against one row of a dense oracle in double and against
// attention_forward.
//
// What attention_forward is off by on the same input is the unit of the tolerance: both are float32 sums of the same terms, in
// another order. Where it happens to be exact, the unit is what rounding the logits costs. That attention_forward itself is right
// is test_attention.cu's business; here it only has to be near.
#include "layer.h"

#include "../llmc/attention.cuh"
#include "../llmc/attention_decode.cuh"

namespace {

struct Sizes { int B, NH, HS; };

// One layer that holds n tokens a sequence in buffers laid out for `stride`.
struct Cache : AttentionLayer {
    std::vector<float> host_qkv;                            // (B,stride,OC), as it was before the encoding prepared it
    std::unique_ptr<Array<float>> qkv;

    Cache(const std::string& name, Sizes x, int n, int stride, Random& random)
        : AttentionLayer(name, {x.B, n, x.NH, x.HS}, true, stride, stride) {
        fill([&](const TensorSpec& p) {
            for (size_t e = 0; e < p.size(); e++) { host(p.name)[e] = draw(p.name, random); }
        });
        draw_qkv(random);
        qkv.reset(new Array<float>(host_qkv));
    }

    // parameters with which a thousand keys still compete: a bias must not leave the query alone with its neighbours
    static float draw(const std::string& name, Random& random) {
        if (name == "kerple_r1") { return (float)random.uniform(0.1, 0.6); }
        if (name == "kerple_r2") { return (float)random.uniform(0.1, 0.5); }
        if (name == "fire_c") { return (float)random.uniform(0.05, 0.5); }
        if (name == "fire_l") { return 0.3f; }              // L is 153.6: some queries are below it, some above
        return random.normal();
    }
    // the padding columns and the rows behind the tokens are NaN
    void draw_qkv(Random& random) {
        host_qkv.assign((size_t)s.B * stride * OC, NAN);
        for (int b = 0; b < s.B; b++) {
            for (int t = 0; t < s.T; t++) {
                float* row = &host_qkv[((size_t)b * stride + t) * OC];
                for (int c = 0; c < 3 * C; c++) { row[c] = random.normal(); }
                for (int c = 3 * C; c < 3 * C + tables.extra_columns; c++) { row[c] = 0.2f * random.normal() - (c < 3 * C + s.NH ? 0.2f : 1.0f); }
            }
        }
    }
    // the tokens t0 .. t0+n-1, as if they had just been computed
    void prepare(int t0, int count) const {
        with_position(view, [&](auto position) { position.prepare_forward(*qkv, s.B, count, t0, Stream(0)); });
    }
    std::vector<float> decode(int t0) const {
        Array<float> out((size_t)s.B * C), scratch(attention_decode_scratch(s.B, stride, s.NH, s.HS));
        attention_decode(out, *qkv, scratch, view, s.B, t0, Stream(0));
        scratch.host();                                     // its guards
        return out.host();
    }
    std::vector<float> forward(int t0) const {
        Array<float> out((size_t)s.B * C);
        attention_forward<true>(out, nullptr, nullptr, *qkv, view, s.B, 1, t0, Stream(0));
        return out.host();
    }

    // out (B,C) of the query at t0, in double; logit: the mean magnitude of a logit, by weight, in the worst head
    std::vector<double> want(int t0, double& logit) {
        std::vector<double> out;
        logit = 0;
        for (int b = 0; b < s.B; b++) {
            const PositionOracle o = oracle(host_qkv, b, t0 + 1);
            for (int h = 0; h < s.NH; h++) {
                const std::vector<double> all = oracle_bias(o, h), bias(all.end() - (t0 + 1), all.end());
                const std::vector<double> y = row(o, b, h, t0, bias, logit);
                // cable's distances are differences of sums over up to a chunk of 128 tokens
                if (!o.z.empty()) { logit = std::max(logit, oracle_cable_S(o, h)[(size_t)std::min(t0, 127)]); }
                out.insert(out.end(), y.begin(), y.end());
            }
        }
        return out;
    }
    std::vector<double> row(const PositionOracle& o, int b, int h, int t0, const std::vector<double>& bias, double& logit) const {
        auto at = [&](int t, int part) { return vector(o, host_qkv, b, h, t, part); };
        const std::vector<double> q = at(t0, 0);
        std::vector<double> a, y((size_t)s.HS);
        for (int j = 0; j <= t0; j++) { a.push_back(dot(q, at(j, 1)) / std::sqrt((double)s.HS) + bias[(size_t)j]); }
        const double m = *std::max_element(a.begin(), a.end());
        double sum = 0, size = 0;
        for (int j = 0; j <= t0; j++) {
            const std::vector<double> v = at(j, 2);
            const double e = std::exp(a[(size_t)j] - m);
            for (size_t d = 0; d < v.size(); d++) { y[d] += e * v[d]; }
            sum += e;
            size += e * std::fabs(a[(size_t)j]);
        }
        logit = std::max(logit, size / sum);
        for (double& e : y) { e /= sum; }
        return y;
    }
};

void check_row(Cache& c, int t0) {
    INFO(c.config.name << ": t0 " << t0 << ", B " << c.s.B << ", NH " << c.s.NH << ", HS " << c.s.HS);
    double logit;
    const std::vector<double> want = c.want(t0, logit);
    const std::vector<float> forward = c.forward(t0);
    CHECK(worst_difference(forward, want) <= 2e-5 * largest(want));
    check_close("decode", c.decode(t0), want, forward, (1 + logit) * largest(want));
}

// the last of t0 + 1 tokens; a few rows of garbage behind them
void test_row(Random& random, const std::string& name, Sizes s, int t0) {
    Cache c(name, s, t0 + 1, t0 + 1 + (t0 % 2 == 0 ? 37 : 300), random);
    c.prepare(0, t0 + 1);
    check_row(c, t0);
}

} // namespace

TEST_CASE("decode: one row, every encoding", "[decode][asan]") {
    Random random;
    INFO(random);
    for (const PositionRow& row : position_rows) {
        for (int t0 : {0, 1, 63, 64, 127, 128, 129, 255, 256, 257}) { test_row(random, row.name, {2, 2, 16}, t0); }
    }
}

TEST_CASE("decode: one row of a thousand, every encoding", "[decode]") {
    Random random;
    INFO(random);
    for (const PositionRow& row : position_rows) { test_row(random, row.name, {1, 2, 16}, 1000); }
}

// sizes that fill no register or no 16 bytes, one, several, and more pieces than a block has threads
TEST_CASE("decode: every head size", "[decode][asan]") {
    Random random;
    INFO(random);
    for (int HS : {1, 2, 5, 7, 8, 16, 24, 31, 32, 33, 37, 64, 80, 128, 200, 1100}) {
        for (int t0 : {0, 5, 300}) { test_row(random, "none", {2, 1, HS}, t0); }
        test_row(random, "cable", {2, HS > 200 ? 1 : 3, HS}, 260);
    }
}

// a batch that is cut elsewhere than the heads; OC wider than its columns; few tokens, since ThreadSanitizer is slow
TEST_CASE("decode: one row, small shapes", "[decode][race]") {
    Random random;
    INFO(random);
    for (const PositionRow& row : position_rows) {
        test_row(random, row.name, {3, 2, 4}, 6);
        test_row(random, row.name, {1, 1, 24}, 0);
    }
    for (const char* name : {"cable", "kcable", "t5", "alibi"}) { test_row(random, name, {1, 2, 24}, 270); }
}

// as generation does it: a prompt, then token by token through the ends of a tile, a chunk and a split
TEST_CASE("decode: a text token by token, every encoding", "[decode][asan]") {
    Random random;
    INFO(random);
    for (const PositionRow& row : position_rows) {
        for (const auto& [prompt, tokens] : {std::pair<int, int>{1, 4}, {125, 131}, {254, 259}}) {
            Cache c(row.name, {1, 2, 8}, tokens, 300, random);
            c.prepare(0, prompt);
            for (int t0 = prompt; t0 < tokens; t0++) {
                c.prepare(t0, 1);
                check_row(c, t0);
            }
        }
    }
}

TEST_CASE("decode: rope's factor on the scores beyond the trained length", "[decode]") {
    Random random;
    INFO(random);
    for (RopeScaling scaling : {RopeScaling::None, RopeScaling::PI, RopeScaling::YaRN}) {
        Cache c("rope", {1, 2, 8}, 70, 90, random);
        c.config.scaling = scaling;
        c.config.scaling_factor = 3;
        c.prepare(0, 70);
        // the angles differ from the oracle's: attention_forward is what it is compared with
        const std::vector<float> forward = c.forward(69);
        check_close("decode", c.decode(69), as<double>(forward), forward, 0, 4 * MULTIPLE);
    }
}

TEST_CASE("decode: rows behind the query do not matter, those before it do", "[decode]") {
    Random random;
    INFO(random);
    for (const PositionRow& row : position_rows) {
        INFO(row.name);
        Cache c(row.name, {2, 2, 8}, 600, 620, random);
        c.prepare(0, 600);
        for (int t0 : {9, 255, 256, 400}) {
            INFO("t0 " << t0);
            c.qkv->set(c.host_qkv);
            c.prepare(0, 600);
            const std::vector<float> whole = c.decode(t0);
            std::vector<float> x = c.qkv->host();
            for (int b = 0; b < c.s.B; b++) {
                for (size_t e = (size_t)(t0 + 1) * c.OC; e < (size_t)c.stride * c.OC; e++) { x[(size_t)b * c.stride * c.OC + e] = NAN; }
            }
            c.qkv->set(x);
            CHECK(same_bits(whole, c.decode(t0)));
            // a NaN in the first column of one head's keys, and of its values, in the second sequence: none of the neighbours'
            for (int part : {1, 2}) {
                std::vector<float> broken = x;
                const size_t column = (size_t)part * c.C + c.s.HS;
                broken[((size_t)c.stride + t0 / 2) * c.OC + column] = NAN;
                c.qkv->set(broken);
                const std::vector<float> y = c.decode(t0);
                for (size_t e = 0; e < y.size(); e++) {
                    const bool hit = e / c.s.HS == 3 && (part == 1 || e % c.s.HS == 0);
                    CHECK(std::isnan(y[e]) == hit);
                }
            }
        }
    }
}

// the sum over splits must be of numbers no larger than 1, whatever the logits are
TEST_CASE("decode: logits of any size", "[decode][asan]") {
    Random random;
    INFO(random);
    const float inf = INFINITY;
    for (const auto& [first, second] : {std::pair<float, float>{300, -300}, {-300, 300}, {-90, -90}, {200, 200}, {-inf, 1}, {1, -inf}}) {
        INFO("logits " << first << " in the first split, " << second << " in the second");
        Cache c("none", {1, 1, 4}, 400, 400, random);
        for (int t = 0; t < 400; t++) {
            float* row = &c.host_qkv[(size_t)t * c.OC];
            row[0] = 2.0f;                                  // scale is 1/2
            for (int d = 1; d < 8; d++) { row[d] = 0.0f; }
            row[4] = t < DECODE_SPLIT ? first : second;
        }
        c.qkv->set(c.host_qkv);
        const int begin = first < second ? DECODE_SPLIT : 0, end = first > second ? DECODE_SPLIT : 400;
        std::vector<double> mean(4);
        for (int t = begin; t < end; t++) {
            for (int d = 0; d < 4; d++) { mean[(size_t)d] += (double)c.host_qkv[(size_t)t * c.OC + 8 + d] / (end - begin); }
        }
        check_close("mean", c.decode(399), mean, as<float>(mean), 1);
    }
}

TEST_CASE("decode: same bits for any number of threads", "[decode]") {
    Random random;
    INFO(random);
    for (const PositionRow& row : position_rows) {
        INFO(row.name);
        Cache c(row.name, {2, 3, 24}, 700, 720, random);
        c.prepare(0, 700);
        check_thread_invariance([&] { return c.decode(699); });
    }
}

// the scratch of a capacity serves every query in it, and grows with the keys' splits, not with the keys
TEST_CASE("decode: scratch", "[decode]") {
    CHECK(attention_decode_scratch(1, 1, 1, 1) > 0);
    CHECK(attention_decode_scratch(2, 1 << 17, 12, 64) == (size_t)2 * 12 * 512 * 66);
    CHECK(attention_decode_scratch(1, 257, 1, 64) == 2 * attention_decode_scratch(1, 256, 1, 64));
    CHECK(attention_decode_scratch(1 << 10, 1 << 20, 32, 128) > (size_t)UINT32_MAX);
}
