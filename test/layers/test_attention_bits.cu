// test_attention_bits.cu -- what must not change attention's bits: padding, threads, skipped tiles; its memory.
#include "test/layers/attention_layer.h"
#include "test/oracle.h"

#include "llmc/attention/any_bias.cuh"
#include "llmc/attention/decode.cuh"
#undef KERNELS_ELSEWHERE
#include "llmc/attention.cuh"           // how much shared memory its kernels take

namespace {

constexpr int MOST_TOKENS = 1 << 30;

// dqkv (B,T,columns_of): without what lies after the encoding's columns
struct Bits {
    std::vector<float> out, lse, dqkv;
    double live = 1.0;                                      // share of the tiles that the forward computed
};
size_t columns_of(const Layer& l) { return (size_t)(3 * l.C + l.tables.extra_columns); }
Bits run_bits(const Layer& l, const std::vector<float>& qkv, const std::vector<float>& dout) {
    Array<float> d_qkv(qkv), out(dout.size()), lse((size_t)l.s.B * l.s.NH * l.s.T), dqkv(qkv.size());
    Array<float> scratch(l.backward_scratch());
    l.forward(out, lse, d_qkv, 0, l.s.T);
    l.backward(dqkv, scratch, Array<float>(dout), d_qkv, out, lse);
    return {out.host(), lse.host(), columns(dqkv.host(), (size_t)l.OC, 0, columns_of(l))};
}
// of a causal layer with scratch for the forward too, which may then skip tiles
Bits run_skipping(Layer& l, TileSkip skip, const std::vector<float>& qkv, const std::vector<float>& dout) {
    l.config.tile_skip = skip;
    Array<float> d_qkv(qkv), out(dout.size()), lse((size_t)l.s.B * l.s.NH * l.s.T), dqkv(qkv.size());
    Array<float> scratch(l.backward_scratch()), tiles(attention_forward_scratch(l.s.B, l.s.T, l.s.NH));
    l.position().prepare_forward(d_qkv, l.s.B, l.s.T, 0, Stream(0));
    attention_forward<Mask::Causal>(out, lse, tiles, d_qkv, l.view, l.s.B, l.s.T, 0, Stream(0));
    l.backward(dqkv, scratch, Array<float>(dout), d_qkv, out, lse);
    const double live = live_tile_share(tiles, l.view, l.s.T, Stream(0));
    return {out.host(), lse.host(), columns(dqkv.host(), (size_t)l.OC, 0, columns_of(l)), live};
}

} // namespace

// T keys that each weigh 2^-tau of the largest are 2^-24 of a row together: less would be seen, more would be slow.
TEST_CASE("attention: how far below the largest a skipped key is", "[attention]") {
    for (int T : {1, 64, 2048, 100000}) {
        CHECK(std::fabs(flash_skip_tau(T) - (24 + std::log2(T))) < 1e-5);
        CHECK(tile_skip_tau(T, TileSkip::Default) == flash_skip_tau(T));
        CHECK(tile_skip_tau(T, TileSkip::Exact) == 128);        // an exponent that float32 does not have
    }
}

// Forward, dqkv and lse of each sequence have the bits of that sequence by itself, with any amount of any padding.
TEST_CASE("attention: padding changes no bit of a sequence", "[attention][encodings]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) {
        for (bool causal : directions(name)) {
            for (const std::vector<int>& lengths : {std::vector<int>{40, 1, 17, 31}, {150, 129, 64, 97}}) {
                for (int T : {lengths[0], lengths[0] + 1, 202}) {
                    const LayerShape s = {(int)lengths.size(), T, 2, 24};
                    INFO(layer_text(name, s, causal, lengths));
                    Layer l(name, s, causal, random, 0, 202);
                    l.set_lengths(lengths);
                    const std::vector<float> qkv = l.draw_qkv(random), dout = l.draw_dout(random);
                    const Bits padded = run_bits(l, qkv, dout);
                    for (size_t b = 0; b < lengths.size(); b++) {
                        Layer one(name, {1, lengths[b], s.NH, s.HS}, causal, random, 0, 202);
                        // the longer table of learned positions begins with the shorter
                        one.fill([&](const TensorSpec& p) {
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

TEST_CASE("attention: same bits for any number of threads", "[attention][encodings]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) {
        INFO(name);
        const LayerShape s = {2, 130, 2, 16};
        Layer l(name, s, true, random);
        const std::vector<float> qkv = l.draw_qkv(random);
        const Array<float> dout(random.normals((size_t)s.B * s.T * l.C));
        check_thread_invariance([&] {
            l.grads->set(std::vector<float>(l.params.total, 0.0f));
            Array<float> d_qkv(qkv), out(dout.n), lse((size_t)s.B * s.NH * s.T), dqkv(qkv.size());
            Array<float> scratch(l.backward_scratch());
            l.forward(out, lse, d_qkv, 0, s.T);
            l.backward(dqkv, scratch, dout, d_qkv, out, lse);
            std::vector<float> all = out.host();
            const std::vector<float> known = columns(dqkv.host(), (size_t)l.OC, 0, columns_of(l));
            for (const std::vector<float>& x : {lse.host(), known, l.grads->host()}) {
                all.insert(all.end(), x.begin(), x.end());
            }
            return all;
        });
    }
}

// Tiles that the bias has zeroed may be skipped; a far key that is long enough to matter keeps its tile.
TEST_CASE("attention: --tile_skip exact changes no bit, default hardly any", "[attention][encodings]") {
    Random random;
    INFO(random);
    const LayerShape s = {2, TILE_SKIP_T + 450, 2, 16};
    for (const std::string& name : encodings()) {
        const bool skips = flash_skips(encoding_traits(parse_position(name, s.T).parts[0]).form);
        if (!skips && name != "none") { continue; }
        for (bool far_key : {false, true}) {
            INFO(name << ", far key " << far_key);
            Layer l(name, s, true, random);
            l.set_lengths({s.T, 801});
            std::vector<float> qkv = l.draw_qkv(random);
            const std::vector<float> dout = l.draw_dout(random);
            for (size_t t = 0; name == "grape_q" && t < (size_t)s.B * s.T; t++) {       // about as steep as alibi
                for (int h = 0; h < s.NH; h++) { qkv[t * l.OC + 3 * l.C + h] += 3.0f; }
            }
            for (size_t d = 0; far_key && d < (size_t)l.C; d++) {       // a key that the last 70 queries look for
                qkv[10 * l.OC + l.C + d] = 5.0f;
                for (size_t t = (size_t)s.T - 70; t < (size_t)s.T; t++) { qkv[t * l.OC + d] = 100.0f; }
            }
            const Bits off = run_skipping(l, TileSkip::Off, qkv, dout);
            const Bits exact = run_skipping(l, TileSkip::Exact, qkv, dout);
            const Bits some = run_skipping(l, TileSkip::Default, qkv, dout);
            CHECK(off.live == 1.0);
            CHECK((exact.live < 1.0) == skips);
            CHECK((some.live < exact.live) == skips);
            CHECK(same_bits(exact.out, off.out));
            CHECK(same_bits(exact.lse, off.lse));
            CHECK((exact.dqkv == off.dqkv));                // -fno-signed-zeros: 0 is -0
            // what is left out of a row's sum is below 2^-24 of it
            CHECK(relative_l2(some.out, off.out) <= 1e-7);
            CHECK(relative_l2(some.dqkv, off.dqkv) <= 1e-7);
            if (!far_key) { continue; }
            qkv[10 * l.OC + l.C] = NAN;
            for (TileSkip skip : {TileSkip::Exact, TileSkip::Default}) {
                CHECK(std::isnan(run_skipping(l, skip, qkv, dout).out[((size_t)s.T - 1) * l.C]));
            }
        }
    }
}

// as many keys as there are, hidden by nothing, and one less; whole tiles that no query sees are not read
TEST_CASE("attention: a window as long as the text changes no bit", "[attention][encodings][mask]") {
    Random random;
    INFO(random);
    const LayerShape s = {1, 130, 2, 16};
    for (const std::string& name : encodings()) {
        for (bool causal : directions(name)) {
            INFO(layer_text(name, s, causal, {}));
            Layer l(name, s, causal, random);
            std::vector<float> qkv = l.draw_qkv(random);
            const std::vector<float> dout = l.draw_dout(random);
            const Bits all = run_bits(l, qkv, dout);
            for (const AttentionMask mask : {AttentionMask{s.T, 0}, AttentionMask{MOST_TOKENS, 3},
                                             AttentionMask{1, s.T}}) {
                l.view.mask = mask;
                const Bits same = run_bits(l, qkv, dout);
                CHECK(same_bits(same.out, all.out));
                CHECK(same_bits(same.lse, all.lse));
                CHECK((same.dqkv == all.dqkv));             // -fno-signed-zeros: 0 is -0
            }
            l.view.mask = {s.T - 1, 0};
            CHECK((name != "none" || !same_bits(run_bits(l, qkv, dout).out, all.out)));
            l.view.mask = {20, 0};
            for (int t = 0; t < ATTENTION_TILE; t++) {      // keys and values
                std::fill_n(qkv.begin() + t * l.OC + l.C, 2 * l.C, NAN);
            }
            const std::vector<float> out = run_bits(l, qkv, dout).out;
            for (size_t e = (size_t)(2 * ATTENTION_TILE) * l.C; e < out.size(); e++) { REQUIRE(std::isfinite(out[e])); }
        }
    }
}

TEST_CASE("attention: a window, sinks and skipped tiles; any number of threads", "[attention][mask]") {
    Random random;
    INFO(random);
    const LayerShape s = {1, TILE_SKIP_T + 450, 2, 16};
    for (const char* name : {"alibi", "cable"}) {
        Layer l(name, s, true, random);
        l.view.mask = {1500, 40};
        const std::vector<float> qkv = l.draw_qkv(random);
        const std::vector<float> dout = l.draw_dout(random);
        const Bits off = run_skipping(l, TileSkip::Off, qkv, dout);
        const Bits exact = run_skipping(l, TileSkip::Exact, qkv, dout);
        CHECK(same_bits(exact.out, off.out));
        CHECK((exact.dqkv == off.dqkv));
        check_thread_invariance([&] { return run_skipping(l, TileSkip::Default, qkv, dout).dqkv; });
    }
}

TEST_CASE("nothing in attention grows with the square of T", "[attention][encodings][asan]") {
    const int T = 1 << 14;
    const int NH = 4, HS = 32;
    const AttentionDims small = {T, 0, T, NH, HS, 3 * NH * HS, 1.0f};
    const AttentionDims large = {4 * T, 0, 4 * T, NH, HS, 3 * NH * HS, 1.0f};
    CHECK(attention_forward_shared(small) == attention_forward_shared(large));
    CHECK(attention_backward_shared(small) == attention_backward_shared(large));
    const auto scratch = [](int length) { return attention_backward_scratch(PositionConfig(), 2, length, NH, HS); };
    CHECK(scratch(4 * T) == 4 * scratch(T));
    for (const std::string& name : encodings()) {
        auto floats = [&](int length) {
            size_t n = 0;
            const PositionConfig config = parse_position(name, T);
            for (const TensorSpec& spec : position_tables(config, {1, NH, HS, 2, length}).acts) { n += spec.size(); }
            return n;
        };
        INFO(name);
        CHECK(floats(4 * T) <= 4 * floats(T));
    }
}

TEST_CASE("attention hands a NaN on, to the rows that see it", "[attention]") {
    Random random;
    INFO(random);
    const LayerShape s = {1, 70, 1, 8};
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
