// test_attention.cu -- attention with every encoding, in both directions, against the dense oracle of
// attention_oracle.h.
#include <numeric>

#include "test/layers/attention_layer.h"
#include "test/oracle.h"

namespace {

// After a sequence's end out is 0, lse is -inf, which becomes 0 here, and all gradients are 0.
void check_padding(const Layer& l, const std::vector<float>& out, std::vector<float>& lse,
                   const std::vector<float>& dqkv) {
    const size_t T = (size_t)l.s.T, C = (size_t)l.C;
    const size_t OC = (size_t)l.OC, NH = (size_t)l.s.NH;
    const size_t columns = 3 * C + (size_t)l.tables.extra_columns;
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

// The error of float32 loops must be far below the values, or the tolerance that follows would accept anything.
void check_result(const std::string& name, const std::vector<float>& got, const std::vector<double>& want,
                  const std::vector<float>& plain, double scale = 0) {
    INFO(name << ": float32 loops are off by " << worst_difference(plain, want) << ", too much to measure by");
    CHECK(worst_difference(plain, want) <= 1e-3 * std::max(largest(want), scale));
    check_close(name, got, want, plain, scale);
}

// dq, dk, dv, then the encoding's columns. scale: of a row of dlogit before it cancels
void check_dqkv(const Layer& l, const LayerOracle& o, const std::vector<float>& got, double scale) {
    const size_t C = (size_t)l.C, OC = (size_t)l.OC;
    const char* names[] = {"dq", "dk", "dv"};
    for (size_t p = 0; p < 3; p++) {
        check_result(names[p], columns(got, OC, p * C, C), columns(o.dqkv, OC, p * C, C),
                     columns(o.plain_dqkv, OC, p * C, C), scale);
    }
    for (size_t c = 0; c < (size_t)l.tables.extra_columns; c++) {
        const size_t at = 3 * C + c;
        check_result("dcolumn " + std::to_string(c), columns(got, OC, at, 1), columns(o.dqkv, OC, at, 1),
                     columns(o.plain_dqkv, OC, at, 1), scale);
    }
}

// lengths: of the sequences, which differ; none: all have T tokens
void check_layer(Layer& l, const std::vector<float>& qkv, const std::vector<float>& dout) {
    const LayerShape s = l.s;
    const LayerOracle o(l, qkv, dout);
    poison_shared();
    Array<float> d_qkv(qkv), out(dout.size()), lse((size_t)s.B * s.NH * s.T);
    Array<float> dqkv(qkv.size()), scratch(l.backward_scratch());
    l.forward(out, lse, d_qkv, 0, s.T);
    // P = e^(logit - lse) is off by half an ulp of the logit. A row of dlogit, P (dP - row_dot), is rounded at the size
    // of dP = dout.v even where it cancels to 0, and reaches dq multiplied by k / sqrt(HS).
    const double logits = std::max(1.0, largest(o.lse));
    const double scale = largest(dout) * largest(qkv) * logits;
    check_result("out", out.host(), o.out, o.plain_out, largest(o.out) * logits);
    l.backward(dqkv, scratch, Array<float>(dout), d_qkv, out, lse);
    const std::vector<float> got = dqkv.host();
    std::vector<float> got_lse = lse.host();
    check_padding(l, out.host(), got_lse, got);
    check_result("lse", got_lse, o.lse, o.plain_lse, 1.0);
    check_dqkv(l, o, got, scale);
    for (size_t bh = 0; bh < o.moments.size() && !l.factors.empty(); bh++) {
        const std::vector<float> rows = l.moments->host();
        const double sum = std::accumulate(rows.begin() + (long)bh * s.T, rows.begin() + (long)(bh + 1) * s.T, 0.0);
        INFO("moment " << sum << ", expected " << o.moments[bh] << " of terms that add up to " << o.moment_sizes[bh]);
        CHECK(std::fabs(sum - o.moments[bh]) <= 1e-5 * o.moment_sizes[bh] * logits);
    }
    const std::vector<float> grads = l.grads->host();
    for (size_t p = 0; p < l.tables.params.size(); p++) {
        const size_t first = l.params.offsets[p], n = l.params.specs[p].size();
        auto part = [&](const auto& x) { return std::decay_t<decltype(x)>(x.begin() + first, x.begin() + first + n); };
        // what the sums over all i, j cancel from: sqrt(T) rows, each of the size of dP times the slope
        const double cancelled = scale * largest(part(o.slopes)) * std::sqrt((double)s.T * s.B);
        check_result("d" + l.params.specs[p].name, part(grads), part(o.grads), part(o.plain_grads), cancelled);
    }
}
// The gradients of the layer's oracle are the differences of its loss.
void check_oracle(Layer& l, Random& random) {
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
        const size_t row = (size_t)random.integer(0, l.s.B * l.s.T - 1);
        const size_t c = (size_t)random.integer(0, 3 * l.C + l.tables.extra_columns - 1);
        const size_t e = row * l.OC + c;
        if (c >= (size_t)3 * l.C && std::fabs(qkv[e]) < 2 * step) { continue; }
        if (std::isnan(qkv[e])) { continue; }               // of a padding token
        std::vector<float> up = qkv, down = qkv;
        up[e] += step;
        down[e] -= step;
        const double slope = (loss(up) - loss(down)) / ((double)up[e] - down[e]);
        INFO("column " << c << " of row " << row << ": differences give " << slope << ", the oracle " << o.dqkv[e]);
        CHECK(std::fabs(slope - o.dqkv[e]) <= 2e-5 * std::max(1.0, largest(o.dqkv)));
    }
}

void test_layer(Random& random, const std::string& name, LayerShape s, bool causal,
                const std::vector<int>& lengths = {}, AttentionMask mask = {}) {
    INFO(layer_text(name, s, causal, lengths) << ", window " << mask.window << ", sinks " << mask.sinks);
    Layer l(name, s, causal, random);
    if (!lengths.empty()) { l.set_lengths(lengths); }
    l.view.mask = mask;
    const std::vector<float> qkv = l.draw_qkv(random);
    check_layer(l, qkv, l.draw_dout(random));
}

} // namespace

TEST_CASE("attention oracle: its backward is its forward's derivative", "[attention]") {
    Random random;
    INFO(random);
    const size_t T = 5, HS = 3;
    for (bool causal : {true, false}) {
        auto q = as<double>(random.normals(T * HS)), k = as<double>(random.normals(T * HS));
        auto v = as<double>(random.normals(T * HS));
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
TEST_CASE("attention oracle: gradients through every encoding are the loss's derivative", "[attention][encodings]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings_and_forms()) {
        for (bool causal : directions(name)) {
            INFO(name << (causal ? ", causal" : ", bidirectional"));
            Layer l(name, {2, 6, 2, 4}, causal, random);
            l.set_lengths({6, 4});
            check_oracle(l, random);
        }
    }
}

// The angles of the backward are those of the forward, and yarn's factor on the scores is in dq and dk. Trained at 37
// tokens, in which the first pair of 16 channels makes 6 turns: yarn leaves it some of its speed. A factor of 0 is that
// of the length; 160 channels are more pairs than a launch takes.
TEST_CASE("attention: rope's scalings, forward and backward", "[attention]") {
    Random random;
    INFO(random);
    struct Case { const char* pos; LayerShape shape; double factor; };
    const Case cases[] = {{"rope", {2, 6, 2, 4}, 3}, {"rope", {2, 70, 2, 16}, 3}, {"rope", {1, 130, 1, 2}, 0},
                          {"rope", {1, 20, 2, 16}, 0}, {"rope:theta=5000", {1, 40, 1, 160}, 4},
                          {"rope:clock=cable", {1, 37, 2, 16}, 4}};
    for (RopeScaling scaling : {RopeScaling::PI, RopeScaling::NTK, RopeScaling::YaRN, RopeScaling::LongRoPE}) {
        for (bool causal : {true, false}) {
            for (const Case& c : cases) {
                INFO("scaling " << (int)scaling << ", " << layer_text(c.pos, c.shape, causal, {}));
                Layer l(c.pos, c.shape, causal, random, 0, 37);
                l.config.scaling = scaling;
                l.config.scaling_factor = c.factor;
                draw_factors(l.config, c.shape.HS);
                if (c.shape.B > 1) { l.set_lengths({c.shape.T, c.shape.T - 2}); }
                if (c.shape.T < 10) { check_oracle(l, random); continue; }
                const std::vector<float> qkv = l.draw_qkv(random);
                check_layer(l, qkv, l.draw_dout(random));
            }
        }
    }
}

TEST_CASE("attention, small shapes, every encoding, both directions", "[attention][encodings][asan]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings_and_forms()) {
        const bool slow = find_oracle(name).slow;
        for (bool causal : directions(name)) {
            test_layer(random, name, slow ? LayerShape{1, 15, 2, 8} : LayerShape{1, 37, 2, 8}, causal);
            test_layer(random, name, {2, 5, 3, 4}, causal);
            test_layer(random, name, {1, 1, 1, 2}, causal);
        }
    }
}

TEST_CASE("attention, every encoding, both directions, across tiles and chunks", "[attention][encodings]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) {
        for (bool causal : directions(name)) {
            test_layer(random, name, {1, 2, 3, 64}, causal);
            if (find_oracle(name).slow) { test_layer(random, name, {1, 67, 1, 16}, causal); }
            else { test_layer(random, name, {1, 130, 2, 16}, causal); }
        }
    }
}

TEST_CASE("attention, sequences that end earlier, every encoding, both directions",
          "[attention][encodings][asan]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings_and_forms()) {
        for (bool causal : directions(name)) {
            if (!find_oracle(name).slow) { test_layer(random, name, {4, 37, 2, 8}, causal, {37, 1, 20, 32}); }
            test_layer(random, name, {4, 5, 1, 4}, causal, {5, 1, 3, 0});
        }
    }
}

TEST_CASE("attention, sequences that end in other tiles, every encoding, both directions", "[attention][encodings]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) {
        for (bool causal : directions(name)) {
            if (find_oracle(name).slow) { test_layer(random, name, {2, 70, 1, 16}, causal, {66, 30}); }
            else { test_layer(random, name, {3, 150, 1, 16}, causal, {129, 64, 150}); }
        }
    }
}

// Distances of 1e6, g of 100 and scores 200 apart: kcable's bias is thousands, and its weights overflow or vanish
// unless bias and score are added before exp.
TEST_CASE("attention: kcable at its extremes", "[attention]") {
    Random random;
    INFO(random);
    for (const char* name : {"kcable", "kcable:weight=inside", "kcable_nw", "kcable_v1"}) {
        for (bool causal : {true, false}) {
            INFO(name << (causal ? ", causal" : ", bidirectional"));
            Layer l(name, {1, 150, 1, 16}, causal, random);
            std::vector<float> qkv = l.draw_qkv(random);
            for (int t = 0; t < 150; t++) {
                float* row = &qkv[(size_t)t * l.OC];
                for (int c = 0; c < 2 * l.C; c++) { row[c] *= 8; }                  // q.k / 4: of std 64
                row[3 * l.C] *= t % 3 == 0 ? 1e-3f : 2e4f;
                if (l.tables.extra_columns > 1) { row[3 * l.C + 1] = 100.0f * (float)random.uniform(0, 1); }
            }
            check_layer(l, qkv, l.draw_dout(random));
        }
    }
}

// What is left of ssmax in attention; q is any. The gradient of its s: test_gpt2_differences.cu
TEST_CASE("attention: every bias times a factor of each query", "[attention][encodings]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings_and_forms()) {
        if (!find_oracle(name).has_bias || find_oracle(name).reads_scores) { continue; }
        for (bool causal : directions(name)) {
            const int many = find_oracle(name).slow ? 35 : 70;
            for (const LayerShape& s : {LayerShape{2, 5, 3, 4}, LayerShape{2, many, 1, 8}}) {
                INFO(layer_text(name, s, causal, {}));
                Layer l(name, s, causal, random);
                l.set_lengths({s.T, s.T - 2});
                l.draw_factors(random);
                const std::vector<float> qkv = l.draw_qkv(random);
                check_layer(l, qkv, l.draw_dout(random));
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

// The distances 20, 40, 80 and 160 begin a bucket, and are powers that floating point may miss.
TEST_CASE("attention: t5's buckets other than the default ones", "[attention]") {
    Random random;
    INFO(random);
    for (bool causal : {true, false}) { test_layer(random, "t5:buckets=20,distance=320", {1, 170, 1, 4}, causal); }
}

// ----------------------------------------------------------------------------------------------------------
// windows and sinks

TEST_CASE("attention oracle: with a window and sinks its backward is its forward's derivative", "[attention][mask]") {
    Random random;
    INFO(random);
    for (const char* name : {"none", "cable", "t5"}) {
        for (bool causal : {true, false}) {
            for (const AttentionMask mask : {AttentionMask{1, 0}, AttentionMask{2, 0}, AttentionMask{2, 2}}) {
                Layer l(name, {2, 6, 2, 4}, causal, random);
                l.view.mask = mask;
                check_oracle(l, random);
                if (!causal) { continue; }
                l.set_documents(draw_documents(l.s.B, l.stride, 3, (uint64_t)random.integer(0, 1 << 30)));
                check_oracle(l, random);
            }
        }
    }
}

// Sequences that begin in the middle of a document, and documents of one token
TEST_CASE("attention: documents apart, every encoding", "[attention][encodings][mask][asan]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) {
        const bool slow = find_oracle(name).slow;
        for (const AttentionMask mask : {AttentionMask{}, AttentionMask{5, 2}}) {
            for (int length : {4, 40}) {
                const int T = slow ? 21 : 2 * length + 61;
                INFO(name << ", window " << mask.window << ", documents of " << length);
                Layer l(name, {2, T, 1, 8}, true, random);
                l.set_lengths({T, T - 6});
                l.view.mask = mask;
                l.set_documents(draw_documents(l.s.B, l.stride, length, (uint64_t)random.integer(0, 1 << 30)));
                const std::vector<float> qkv = l.draw_qkv(random);
                check_layer(l, qkv, l.draw_dout(random));
            }
        }
    }
}

// Windows that end inside a tile and at its end, that leave whole tiles out, sinks in one tile and beyond it
TEST_CASE("attention: a window and sinks, every encoding, both directions", "[attention][encodings][mask][asan]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings()) {
        const bool slow = find_oracle(name).slow;
        for (bool causal : directions(name)) {
            test_layer(random, name, {1, 21, 2, 8}, causal, {}, {1, 0});
            test_layer(random, name, {2, 37, 2, 8}, causal, {37, 20}, {7, 3});
            if (slow) { continue; }
            test_layer(random, name, {1, 130, 1, 16}, causal, {}, {5, 0});
            test_layer(random, name, {1, 130, 1, 16}, causal, {}, {33, 40});
            test_layer(random, name, {2, 110, 1, 16}, causal, {110, 65}, {32, 1});
        }
    }
}
