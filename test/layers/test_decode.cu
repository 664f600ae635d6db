// test_decode.cu -- attention of one new token, for every encoding, against one row of a dense oracle in double and
// against attention_forward.
//
// The error of the oracle's float32 loops on the same input is the unit of the tolerance, as in test_attention.cu: the
// kernel sums the same terms in another order. If the loops happen to be exact, the unit is the cost of rounding the
// logits.
#include "test/layers/decode_layer.h"
#include "test/oracle.h"

namespace tests {        // so that the header of an encoding may use the same names

namespace {

// attention of the query at t0 by the kernels of a whole text
std::vector<float> forward(const Cache& c, int t0) {
    Array<float> out((size_t)c.s.B * c.C);
    attention_forward<Mask::Causal>(out, nullptr, nullptr, *c.qkv, c.view, c.s.B, 1, t0, Stream(0));
    return out.host();
}

// Both kernels against the oracle. The unit is the error of float32 loops with the oracle's float32 bias, or half an
// ulp of the logits.
void check_row(Cache& c, int t0) {
    INFO(c.config.name << ": t0 " << t0 << ", B " << c.s.B << ", NH " << c.s.NH << ", HS " << c.s.HS);
    std::vector<double> want;
    std::vector<float> plain;
    double logit = 0;
    for (int b = 0; b < c.s.B; b++) {
        const OracleLayer<double> o = c.oracle(c.host_qkv, b, t0 + 1);
        for (int h = 0; h < c.s.NH; h++) {
            const std::vector<double> y = c.row<double>(o, b, h, t0, c.bias(o, c.host_qkv, b, h, t0), logit);
            const std::vector<float> f = c.row<float>(o, b, h, t0, c.float_bias(o, c.host_qkv, b, h, t0), logit);
            want.insert(want.end(), y.begin(), y.end());
            plain.insert(plain.end(), f.begin(), f.end());
        }
    }
    CHECK(worst_difference(plain, want) <= 1e-3 * largest(want));
    check_close("forward", forward(c, t0), want, plain, (1 + logit) * largest(want));
    check_close("decode", c.decode(t0), want, plain, (1 + logit) * largest(want));
}

// the last of t0 + 1 tokens; a few rows of garbage after them
void test_row(Random& random, const std::string& name, Sizes s, int t0) {
    Cache c(name, s, t0 + 1, t0 + 1 + (t0 % 2 == 0 ? 37 : 300), random);
    c.prepare(0, t0 + 1);
    check_row(c, t0);
}

} // namespace

TEST_CASE("decode: one row, every encoding", "[decode][encodings][asan]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) {
        for (int t0 : {0, 1, 63, 64, 127, 128, 129, 255, 256, 257}) { test_row(random, name, {2, 2, 16}, t0); }
    }
}

TEST_CASE("decode: one row of a thousand, every encoding", "[decode][encodings]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) { test_row(random, name, {1, 2, 16}, 1000); }
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

// windows that end inside a split and leave whole ones out, sinks in the first and beyond it
TEST_CASE("decode: a window and sinks, every encoding", "[decode][encodings][mask][asan]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) {
        for (const auto& [mask, t0] : {std::pair<AttentionMask, int>{{1, 0}, 40}, {{100, 0}, 257}, {{30, 5}, 600},
                                       {{200, 300}, 800}, {{256, 0}, 767}}) {
            INFO("window " << mask.window << ", sinks " << mask.sinks);
            Cache c(name, {1, 2, 8}, t0 + 1, t0 + 38, random);
            c.view.mask = mask;
            c.config.tile_skip = TileSkip::Off;             // the bias leaves splits out, too
            c.prepare(0, t0 + 1);
            check_row(c, t0);
            std::vector<float> partial;
            c.decode(t0, &partial);
            int out = 0;                                    // splits that are not read
            for (int split = 0; split <= t0 / DECODE_SPLIT; split++) {
                const int j0 = split * DECODE_SPLIT, last = std::min(j0 + DECODE_SPLIT - 1, t0);
                const bool unseen = j0 >= mask.sinks && last <= t0 - mask.window;
                CHECK((partial[(size_t)split * 10 + 9] == 0) == unseen);
                out += unseen;
            }
            CHECK((t0 < 600 || out > 0 || mask.sinks == 300));
        }
    }
}

// documents that begin inside a split and leave whole ones out, with windows and sinks of theirs
TEST_CASE("decode: documents apart, every encoding", "[decode][encodings][mask][asan]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) {
        for (const auto& [mask, t0] : {std::pair<AttentionMask, int>{{0, 0}, 40}, {{0, 0}, 600}, {{30, 5}, 700}}) {
            INFO("window " << mask.window << ", sinks " << mask.sinks);
            Cache c(name, {2, 1, 8}, t0 + 1, t0 + 38, random);
            c.view.mask = mask;
            c.set_documents(draw_documents(c.s.B, c.stride, 200, (uint64_t)random.integer(0, 1 << 30)));
            c.config.tile_skip = TileSkip::Off;
            c.prepare(0, t0 + 1);
            check_row(c, t0);
        }
    }
}

// as generation does it: a prompt, then token by token through the ends of a tile, a chunk and a split
TEST_CASE("decode: a text token by token, every encoding", "[decode][encodings][asan]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) {
        for (const auto& [prompt, tokens] : {std::pair<int, int>{1, 4}, {125, 131}, {254, 259}}) {
            Cache c(name, {1, 2, 8}, tokens, 300, random);
            c.prepare(0, prompt);
            for (int t0 = prompt; t0 < tokens; t0++) {
                c.prepare(t0, 1);
                check_row(c, t0);
            }
        }
    }
}

TEST_CASE("decode: kcable at its extremes", "[decode]") {
    Random random;
    INFO(random);
    for (const char* name : {"kcable", "kcable:weight=inside", "kcable_nw", "kcable_v1"}) {
        for (int t0 : {120, 300, 301}) {
            Cache c(name, {1, 2, 16}, t0 + 1, t0 + 9, random);
            c.draw_extremes(random);
            c.prepare(0, t0 + 1);
            check_row(c, t0);
        }
    }
}

TEST_CASE("decode: rope's factor on the scores beyond the trained length", "[decode]") {
    Random random;
    INFO(random);
    for (RopeScaling scaling : {RopeScaling::None, RopeScaling::PI, RopeScaling::YaRN, RopeScaling::LongRoPE}) {
        Cache c("rope", {1, 2, 8}, 70, 90, random);
        c.config.scaling = scaling;
        c.config.scaling_factor = 3;
        draw_factors(c.config, 8);
        c.prepare(0, 70);
        // the angles differ from the oracle's: attention_forward is what it is compared with
        const std::vector<float> want = forward(c, 69);
        check_close("decode", c.decode(69), as<double>(want), want, 0, 4 * MULTIPLE);
    }
}

TEST_CASE("decode: rows after the query do not matter, those before it do", "[decode][encodings]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) {
        INFO(name);
        Cache c(name, {2, 2, 8}, 600, 620, random);
        c.prepare(0, 600);
        for (int t0 : {9, 255, 256, 400}) {
            INFO("t0 " << t0);
            c.qkv->set(c.host_qkv);
            c.prepare(0, 600);
            const std::vector<float> whole = c.decode(t0);
            std::vector<float> x = c.qkv->host();
            for (int b = 0; b < c.s.B; b++) {
                for (size_t e = (size_t)(t0 + 1) * c.OC; e < (size_t)c.stride * c.OC; e++) {
                    x[(size_t)b * c.stride * c.OC + e] = NAN;
                }
            }
            c.qkv->set(x);
            CHECK(same_bits(whole, c.decode(t0)));
            // a NaN in the first column of one head's keys, and of its values, in the second sequence: none of the
            // neighbours'
            for (int part : {1, 2}) {
                std::vector<float> broken = x;
                const size_t column = (size_t)part * c.C + c.s.HS;
                broken[((size_t)c.stride + t0 - t0 / 8) * c.OC + column] = NAN;
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

// the sum over splits must be of numbers no larger than 1, for any logits
TEST_CASE("decode: logits of any size", "[decode][asan]") {
    Random random;
    INFO(random);
    const float inf = INFINITY;
    for (const auto& [first, second] :
         {std::pair<float, float>{300, -300}, {-300, 300}, {-90, -90}, {200, 200}, {-inf, 1}, {1, -inf}}) {
        INFO("logits " << first << " in the first split, " << second << " in the second");
        Cache c("none", {1, 1, 4}, 400, 400, random);
        for (int t = 0; t < 400; t++) {
            float* row = &c.host_qkv[(size_t)t * c.OC];
            row[0] = 2.0f;                                  // scale is 1/2
            for (int d = 1; d < 8; d++) { row[d] = 0.0f; }
            row[4] = t < DECODE_SPLIT ? first : second;
        }
        c.qkv->set(c.host_qkv);
        const int begin = first < second ? DECODE_SPLIT : 0;
        const int end = first > second ? DECODE_SPLIT : 400;
        std::vector<double> mean(4);
        for (int t = begin; t < end; t++) {
            for (int d = 0; d < 4; d++) {
                mean[(size_t)d] += (double)c.host_qkv[(size_t)t * c.OC + 8 + d] / (end - begin);
            }
        }
        check_close("mean", c.decode(399), mean, as<float>(mean), 1);
    }
}

TEST_CASE("decode: same bits for any number of threads", "[decode][encodings]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) {
        INFO(name);
        Cache c(name, {2, 3, 24}, 700, 720, random);
        c.prepare(0, 700);
        check_thread_invariance([&] { return c.decode(699); });
    }
}

// ----------------------------------------------------------------------------------------------------------
// the window

namespace {

const char* const windowed[] = {"alibi", "cable", "cable_nw", "cable_v1"};

// In double, of what was left out: its share of the softmax, and how near its likeliest key is to the likeliest of all
void check_left_out(SteepCache& c, int t0, const std::vector<bool>& exactly, const std::vector<bool>& by_default) {
    const size_t splits = (size_t)ceil_div(t0 + 1, DECODE_SPLIT);
    for (int bh = 0; bh < c.s.B * c.s.NH; bh++) {
        INFO("(batch, head) " << bh);
        const OracleLayer<double> o = c.oracle(c.host_qkv, bh / c.s.NH, t0 + 1);
        const std::vector<double> all = c.head(o, bh / c.s.NH, bh % c.s.NH, t0, oracle_bias(o, bh % c.s.NH)).logits;
        const std::vector<double> a(all.end() - (t0 + 1), all.end());
        const double m = *std::max_element(a.begin(), a.end());
        for (bool exact : {true, false}) {
            double sum = 0, lost = 0;
            double nearest = INFINITY;
            for (size_t j = 0; j < a.size(); j++) {
                sum += std::exp(a[j] - m);
                if (!(exact ? exactly : by_default)[(size_t)bh * splits + j / DECODE_SPLIT]) { continue; }
                lost += std::exp(a[j] - m);
                nearest = std::min(nearest, m - a[j]);
            }
            INFO((exact ? "exact: " : "default: ")
                 << lost / sum << " of the sum is lost, the nearest logit is " << nearest << " below");
            CHECK(lost <= (exact ? 1e-30 : std::ldexp(1.0, -24)) * sum);
            CHECK(nearest >= (exact ? 87.4 : 0.69 * (24 + std::log2(t0))));
        }
    }
}

void test_window(Random& random, const std::string& name, Sizes x, int t0, bool far) {
    INFO(name << ": t0 " << t0 << ", B " << x.B << ", NH " << x.NH << ", HS " << x.HS);
    SteepCache c(name, x, t0 + 1, random);
    c.prepare(0, t0 + 1);
    std::vector<float> partial;
    const std::vector<float> off = c.decode_as(TileSkip::Off, t0, &partial);
    CHECK(count(left_out(partial, x, t0)) == 0);
    const std::vector<float> exact = c.decode_as(TileSkip::Exact, t0, &partial);
    const std::vector<bool> exactly = left_out(partial, x, t0);
    CHECK(same_bits(off, exact));
    const std::vector<float> some = c.decode_as(TileSkip::Default, t0, &partial);
    const std::vector<bool> out = left_out(partial, x, t0);
    check_left_out(c, t0, exactly, out);
    CHECK((count(exactly) > 0) == far);
    CHECK((count(out) > count(exactly)) == far);
    // 2^-24 of the sum, above and below the line; and rounding, since it is split elsewhere
    CHECK(worst_difference(some, as<double>(off)) <= (std::ldexp(1.0, -23) + 4 * FLT_EPSILON) * largest(c.qkv->host()));
    if (!far) { CHECK(same_bits(off, some)); }
    const std::vector<float> qkv = c.qkv->host();
    c.qkv->set(without(c, out, t0));
    CHECK(same_bits(some, c.decode_as(TileSkip::Default, t0)));
    c.qkv->set(qkv);
    c.qkv->set(without(c, exactly, t0));
    CHECK(same_bits(off, c.decode_as(TileSkip::Exact, t0)));
}

} // namespace

TEST_CASE("decode: splits that the bias has zeroed are left out", "[decode][asan]") {
    Random random;
    INFO(random);
    for (const char* name : windowed) {
        const int n = name == windowed[0] ? 2600 : 1800;
        test_window(random, name, {n == 1800 ? 2 : 1, 2, 8}, n, true);
        test_window(random, name, {1, 2, 20}, n / DECODE_SPLIT * DECODE_SPLIT - 1, true);
        test_window(random, name, {1, 2, 20}, n / DECODE_SPLIT * DECODE_SPLIT, true);
        test_window(random, name, {1, 2, 8}, 500, false);
    }
}

// only q.k of the query and its own key decides: the last key of the split is 1 beyond the window, or at its very end
TEST_CASE("decode: where the window ends", "[decode][asan]") {
    Random random;
    INFO(random);
    for (TileSkip skip : {TileSkip::Exact, TileSkip::Default}) {
        for (int reach : {700, 701}) {
            const int t0 = DECODE_SPLIT - 1 + reach, T = t0 + 1;
            SteepCache c("alibi", {1, 2, 4}, T, random);
            std::vector<float> x = c.qkv->host();
            const float tau = 0.693147181f * (skip == TileSkip::Exact ? 128.0f : 24.0f + (float)std::log2((double)t0));
            const float at_end = tau - (float)reach / 16;   // exact, as is its difference to tau
            for (int t = 0; t < T; t++) { std::fill_n(&x[(size_t)t * c.OC], 2 * c.C, 0.0f); }
            // times 1/2, the scale
            for (int d = 0; d < 4; d++) { x[(size_t)t0 * c.OC + d] = d == 0 ? 2.0f : 0.0f; }
            REQUIRE(at_end - tau == -(float)reach / 16);
            for (float own : {at_end - 1e-5f, at_end, at_end + 1e-5f, at_end + 0.06f}) {
                INFO("reach " << reach << ", own logit " << own << ", " << own - at_end << " above the end");
                x[(size_t)t0 * c.OC + c.C] = own;
                c.qkv->set(x);
                c.prepare(0, T);
                std::vector<float> partial;
                c.decode_as(skip, t0, &partial);
                const std::vector<bool> out = left_out(partial, {1, 2, 4}, t0);
                CHECK(out[0] == (own > at_end));            // the second split's last key is 256 nearer
                CHECK(count(out) == (own > at_end));
            }
        }
    }
}

// max |k|^2 of each split over the keys so far, which may have come in any pieces
TEST_CASE("decode: the longest key of each split", "[decode][asan]") {
    Random random;
    INFO(random);
    for (const char* name : windowed) {
        Cache c(name, {2, 2, 4}, 530, 540, random);
        const float inf = INFINITY;
        c.host_qkv[(size_t)40 * c.OC + c.C] = 30;           // not the last one of its split
        c.host_qkv[((size_t)c.stride + 300) * c.OC + c.C + 4] = name == windowed[0] ? NAN : -inf;
        c.qkv->set(c.host_qkv);
        int known = 0;
        for (int to : {3, 4, 200, 255, 256, 257, 258, 511, 512, 513, 529, 530}) {
            c.prepare(known, to - known);
            known = to;
            const std::vector<float> acts = c.act_data->host();
            const float* got = acts.data() + c.acts.offsets[(size_t)c.acts.index("key_max")];
            for (int bh = 0; bh < 4; bh++) {
                for (int split = 0; split * DECODE_SPLIT < to; split++) {
                    INFO(name << ": " << to << " keys, (batch, head) " << bh << ", split " << split);
                    double want = 0;
                    bool finite = true;
                    for (int j = split * DECODE_SPLIT; j < std::min(to, (split + 1) * DECODE_SPLIT); j++) {
                        const float* k = &c.host_qkv[((size_t)(bh / 2) * c.stride + j) * c.OC + c.C + bh % 2 * 4];
                        double norm = 0;
                        for (int d = 0; d < 4; d++) { norm += (double)k[d] * k[d]; }
                        finite = finite && norm < INFINITY;
                        want = std::max(want, norm);
                    }
                    const float x = got[bh * ceil_div(c.stride, DECODE_SPLIT) + split];
                    if (finite) { CHECK(std::fabs(x - want) <= 4 * FLT_EPSILON * want); }
                    else { CHECK(x == inf); }
                }
            }
        }
        c.prepare(0, 10);                                   // another text: the first split starts again
        const std::vector<float> acts = c.act_data->host();
        CHECK(acts[c.acts.offsets[(size_t)c.acts.index("key_max")]] < 200);
    }
}

// as generation does it: after a prompt and token by token; keys that are long, of either, are seen at any distance
TEST_CASE("decode: the window token by token", "[decode][asan]") {
    Random random;
    INFO(random);
    for (const char* name : {"cable", "cable_nw", "alibi"}) {
        const Sizes x = {1, 2, 8};
        const int prompt = 600, T = 2570;
        SteepCache c(name, x, T, random);
        for (int t : {300, 700}) {
            for (int e = 0; e < 8; e++) { c.host_qkv[(size_t)t * c.OC + c.C + e] *= 3000; }
        }
        c.qkv->set(c.host_qkv);
        c.prepare(0, prompt);
        for (int t0 = prompt; t0 < T; t0++) {
            c.prepare(t0, 1);
            if (t0 < T - 30) { continue; }
            INFO(name << ", t0 " << t0);
            std::vector<float> partial;
            const std::vector<float> off = c.decode_as(TileSkip::Off, t0);
            CHECK(same_bits(off, c.decode_as(TileSkip::Exact, t0, &partial)));
            const std::vector<bool> out = left_out(partial, x, t0);
            CHECK((out[0] && !out[1] && !out[2]));
            CHECK((out[3] || c.config.name == "alibi"));    // which is 96 below there, at this distance
        }
    }
}

TEST_CASE("decode: no key that is not finite is left out", "[decode][asan]") {
    Random random;
    INFO(random);
    for (float bad : {(float)NAN, INFINITY, -INFINITY, 3e38f}) {
        const Sizes x = {1, 2, 8};
        const int t0 = 1800;
        SteepCache c("cable", x, t0 + 1, random);
        c.host_qkv[(size_t)300 * c.OC + c.C + 3] = bad;     // in the first head
        c.qkv->set(c.host_qkv);
        c.prepare(0, t0 + 1);
        std::vector<float> partial;
        for (TileSkip skip : {TileSkip::Exact, TileSkip::Default}) {
            INFO("a key of " << bad << ", window " << (int)skip);
            const std::vector<float> off = c.decode_as(TileSkip::Off, t0), got = c.decode_as(skip, t0, &partial);
            const std::vector<bool> out = left_out(partial, x, t0);
            CHECK(out[0]);
            CHECK_FALSE(out[1]);
            CHECK(out[8]);
            CHECK(out[9]);
            for (size_t e = 0; e < got.size(); e++) {
                CHECK(std::isnan(got[e]) == std::isnan(off[e]));
                if (skip == TileSkip::Exact && !std::isnan(off[e])) { CHECK(got[e] == off[e]); }
            }
        }
    }
}

// nothing is allocated, and so nothing runs, where no window is
TEST_CASE("decode: who keeps key_max", "[decode]") {
    for (const std::string name : {"alibi", "cable", "cable_nw", "cable_v1", "none", "kcable", "t5", "rope"}) {
        const bool has = std::find(std::begin(windowed), std::end(windowed), name) != std::end(windowed);
        PositionConfig config = parse_position(name, 64);
        for (TileSkip skip : {TileSkip::Off, TileSkip::Exact, TileSkip::Default}) {
            for (bool decodes : {false, true}) {
                INFO(name << ", tile_skip " << (int)skip << ", decodes " << decodes);
                config.tile_skip = skip;
                size_t floats = 0;
                for (const TensorSpec& s : position_tables(config, {2, 3, 8, 2, 1000, true, decodes}).acts) {
                    floats += s.name == "key_max" ? s.size() : 0;
                }
                CHECK(floats == (has && decodes && skip != TileSkip::Off ? 2 * 2 * 3 * 4 : 0));
            }
        }
    }
}

// the scratch of a capacity serves every query in it, and grows with the keys' splits, not with the keys
TEST_CASE("decode: scratch", "[decode]") {
    CHECK(attention_decode_scratch(1, 1, 1, 1) > 0);
    CHECK(attention_decode_scratch(2, 1 << 17, 12, 64) == (size_t)2 * 12 * 512 * 66);
    CHECK(attention_decode_scratch(1, 257, 1, 64) == 2 * attention_decode_scratch(1, 256, 1, 64));
    CHECK(attention_decode_scratch(1 << 10, 1 << 20, 32, 128) > (size_t)UINT32_MAX);
}

} // namespace tests
