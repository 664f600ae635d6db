// test_heads.cu -- the statistics of --heads against loops over T x T matrices in double precision.
#include "test/layer.h"
#include "test/layers/attention_oracle.h"
#include "test/oracle.h"

#include "llmc/attention/choose.cuh"
#include "llmc/lab/heads.h"

namespace tests {        // so that the header of an encoding may use the same names

namespace {

// What one head attends to, from the whole matrix P of weights; sums over its queries
template <class R> struct HeadLoops {
    R entropy = 0;
    std::vector<R> sinks, by_distance;                      // (HEAD_SINKS), (T)
    std::vector<R> tiles;                                   // the largest weight of each tile that the range has

    // q, k (tokens,HS), bias (tokens,tokens), -inf where a query does not see a key
    void add(const std::vector<R>& q, const std::vector<R>& k, const std::vector<R>& bias, R scale, int tokens, int HS,
             bool causal) {
        const HeadOracle<R> head(q, k, k, bias, {}, scale, (size_t)tokens, (size_t)HS, causal);
        const int side = ceil_div(tokens, LIVE_TILE);
        std::vector<R> most((size_t)side * side);
        for (int i = 0; i < tokens; i++) {
            const int keys = causal ? i + 1 : tokens;
            for (int j = 0; j < keys; j++) {
                const R p = std::exp(head.logits[(size_t)i * tokens + j] - head.lse[(size_t)i]);
                entropy -= p > 0 ? p * std::log(p) : 0;
                by_distance[(size_t)std::abs(i - j)] += p;
                if (j < HEAD_SINKS) { sinks[(size_t)j] += p; }
                R& tile = most[(size_t)(i / LIVE_TILE * side + j / LIVE_TILE)];
                tile = std::max(tile, p);
            }
        }
        for (int m = 0; m < side; m++) {
            for (int n = 0; n < (causal ? m + 1 : side); n++) { tiles.push_back(most[(size_t)(m * side + n)]); }
        }
    }
    explicit HeadLoops(int T) : sinks(HEAD_SINKS), by_distance((size_t)T) {}
};

struct Statistics : AttentionLayer {
    std::vector<float> qkv;
    std::vector<HeadStatistics> got;
    std::vector<int> moved;                                 // (NH), of find_moved

    // dead: a head whose ReLU is closed for each token of the windows, and open for the padding behind; or -1
    Statistics(const std::string& pos, LayerShape shape, bool causal, const AttentionMask& mask,
               const std::vector<int>& lengths, Random& random, int document = 0, int dead = -1)
        : AttentionLayer(pos, shape, causal, shape.T, shape.T), qkv(random.normals((size_t)s.B * s.T * OC)) {
        fill([&](const TensorSpec& p) {
            for (size_t e = 0; e < p.size(); e++) { host(p.name)[e] = draw_parameter(p, random); }
        });
        for (int n = 0; dead >= 0 && n < s.B * s.T; n++) {
            float& z = qkv[(size_t)n * OC + 3 * C + dead];
            z = std::copysign(z, n % s.T < lengths[(size_t)(n / s.T)] ? -1.0f : 1.0f);
        }
        view.mask = mask;
        set_lengths(lengths);
        if (document > 0) { set_documents(draw_documents(s.B, s.T, document, (uint64_t)random.integer(0, 1 << 30))); }
        if (causal) { run<true>(); } else { run<false>(); }
    }
    template <bool Causal> void run() {
        Array<float> prepared(qkv), out((size_t)s.B * s.T * C), lse((size_t)s.B * s.NH * s.T);
        position().prepare_forward(prepared, s.B, s.T, 0, Stream(0));
        attention_forward<Causal>(out, lse, nullptr, prepared, view, s.B, s.T, 0, Stream(0));
        view.kv_len = nullptr;                              // a causal model has no lengths of its own
        HeadWatch<Causal> watch(1, s.NH, s.B, s.T);
        poison_shared();
        watch.add(0, view, prepared, lse, s.B, lengths.data(), Stream(0));
        got = watch.heads;
        if (!encoding_traits(*view.config).has_relu) { return; }
        Array<int> found(std::vector<int>((size_t)s.NH, 0));
        find_moved(found.p, view, s.B, lengths.back(), Stream(0));
        moved = found.host();
    }

    void check_head(int h) {
        HeadLoops<double> want(s.T);
        HeadLoops<float> plain(s.T);
        int queries = 0;
        for (int b = 0; b < s.B; b++) {
            const OracleLayer<double> o = oracle(qkv, b, tokens(b));
            const std::vector<double> q = vectors(o, qkv, b, h, 0), k = vectors(o, qkv, b, h, 1);
            const double scale = oracle_score_factor(o) / std::sqrt((double)s.HS);
            want.add(q, k, hidden(bias(o, qkv, b, h), b, o.T), scale, o.T, s.HS, causal);
            plain.add(as<float>(q), as<float>(k), hidden(float_bias(o, qkv, b, h), b, o.T), (float)scale, o.T, s.HS,
                      causal);
            queries += o.T;
        }
        const HeadStatistics& head = got[(size_t)h];
        CHECK(head.queries == (uint64_t)queries);
        CHECK(head.tiles == want.tiles.size());
        check_close("entropy", std::vector<float>{(float)head.entropy}, {want.entropy}, {plain.entropy});
        check_close("sinks", as<float>(head.sinks), want.sinks, plain.sinks);
        check_close("by_distance", as<float>(head.by_distance), want.by_distance, plain.by_distance);
        check_sums(head, want, plain, queries);
        if (find_oracle(config.name).cable_step != 0) { check_ranges(head, h); }
    }
    // what follows from the sums
    void check_sums(const HeadStatistics& head, const HeadLoops<double>& want, const HeadLoops<float>& plain,
                    int queries) const {
        double distance = 0, sinks = 0;
        double error = 0, relative = 0;                     // of float32
        std::vector<double> within = {0};                   // (T+1): the weight of |i - j| < W
        for (int d = 0; d < s.T; d++) {
            distance += d * want.by_distance[(size_t)d] / queries;
            within.push_back(within.back() + want.by_distance[(size_t)d] / queries);
            error += MULTIPLE * std::fabs(plain.by_distance[(size_t)d] - want.by_distance[(size_t)d]) / queries;
        }
        CHECK(std::fabs(within.back() - 1) <= 1e-12);
        CHECK(std::fabs(head.weight(0, (size_t)s.T) - 1) <= error);
        CHECK(std::fabs(head.distance() - distance) <= s.T * error);
        for (int j = 0; j < 4; j++) { sinks += want.sinks[(size_t)j] / queries; }
        CHECK(std::fabs(head.of_sinks(4) - sinks) <= error);
        const int W = head.window90();
        CHECK(within[(size_t)W] >= 0.9 - error);
        CHECK(within[(size_t)W - 1] < 0.9 + error);
        // tiles whose largest weight is as close to the limit as float32 is off may be either
        for (size_t n = 0; n < want.tiles.size(); n++) {
            if (want.tiles[n] < 0x1p-60) { continue; }
            relative = std::max(relative, std::fabs(plain.tiles[n] / want.tiles[n] - 1));
        }
        const double least = 0x1p-24 / s.T;
        const auto above = [&](double limit) {
            return (double)std::count_if(want.tiles.begin(), want.tiles.end(), [&](double p) { return p > limit; });
        };
        CHECK(head.live <= above(least * (1 - MULTIPLE * relative)));
        CHECK(head.live >= above(least * (1 + MULTIPLE * relative)));
    }
    // b, g and S of one of CABLE's encodings, from the columns of qkv: {least, mean, most} of each
    template <class R> std::vector<double> ranges(int h) const {
        const auto step = [kind = find_oracle(config.name).cable_step](R z) {
            if (kind == 't') { return std::tanh(z); }
            return kind == 's' ? oracle_softplus(z) : std::max(z, R(0));
        };
        const bool weighted = tables.extra_columns > s.NH;
        ValueRange b, g, S;
        for (int n = 0; n < s.B; n++) {
            R sum = 0;
            for (int t = 0; t < tokens(n); t++) {
                const float* column = &qkv[((size_t)n * s.T + t) * OC + 3 * C + h];
                const R z = column[0], before = sum;
                sum += step(z);
                b.add(sum - before);
                g.add(weighted ? oracle_softplus((R)column[s.NH]) : R(1));
            }
            S.add(sum);
        }
        std::vector<double> all;
        for (const ValueRange& r : {b, g, S}) { for (double x : r.json()) { all.push_back(x); } }
        return all;
    }
    void check_ranges(const HeadStatistics& head, int h) const {
        std::vector<float> mine;
        for (const ValueRange& r : {head.b, head.g, head.S}) { for (double x : r.json()) { mine.push_back((float)x); } }
        check_close("b, g, S", mine, ranges<double>(h), as<float>(ranges<float>(h)));
    }
};

} // namespace

TEST_CASE("heads: every encoding's statistics are those of the T x T matrix", "[heads][encodings]") {
    Random random;
    INFO(random);
    const int T = 512;
    for (const std::string& name : encodings_and_forms()) {
        for (bool causal : directions(name)) {
            const AttentionMask mask = causal ? AttentionMask{} : AttentionMask{100, 4};
            INFO(name << (causal ? ", causal" : ", bidirectional, a window of 100 and 4 sinks"));
            Statistics layer(name, {1, T, 2, 16}, causal, mask, {T}, random);
            layer.check_head(1);
        }
    }
}

TEST_CASE("heads: windows that end early, and several of them", "[heads][asan]") {
    Random random;
    INFO(random);
    for (bool causal : {true, false}) {
        for (const AttentionMask mask : {AttentionMask{}, AttentionMask{40, 3}}) {
            INFO((causal ? "causal" : "bidirectional") << ", window " << mask.window);
            Statistics layer("cable", {3, 150, 2, 8}, causal, mask, {1, 77, 150}, random);
            for (int h : {0, 1}) { layer.check_head(h); }
            if (!causal) { continue; }
            INFO("documents of 30 tokens");
            Statistics apart("cable", {3, 150, 2, 8}, causal, mask, {1, 77, 150}, random, 30);
            for (int h : {0, 1}) { apart.check_head(h); }
        }
    }
}

TEST_CASE("heads: one whose ReLU is closed for every token is dead", "[heads]") {
    Random random;
    INFO(random);
    for (const char* name : {"cable", "kcable", "cable_v1", "cable_signed", "grape_q"}) {
        INFO(name);
        const bool relu = encoding_traits(parse_position(name, 64).parts[0]).has_relu;
        Statistics layer(name, {3, 150, 2, 8}, true, {}, {150, 150, 77}, random, 0, 1);
        CHECK(layer.got[0].dead() == false);
        CHECK(layer.got[1].dead() == relu);
        CHECK(layer.moved == (relu ? std::vector<int>{HAS_MOVED, IS_DEAD} : std::vector<int>()));
    }
}

} // namespace tests
