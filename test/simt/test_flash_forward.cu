// test_flash_forward.cu -- the tensor-core attention's forward against float64, for every bias; the bound of
// flash/bias.cuh against what it leaves out; and a quick look at the backward, which test_flash_backward.cu measures.
//
// Tolerances are measured: the exact softmax with its weights rounded to bf16 (what the second matmul is fed) and its
// output rounded to bf16 has some error; the kernel may have twice that. lse: the same with float32 logits.
#include <array>
#include <functional>
#include <set>

#include "llmc/attention/choose.cuh"
#include "test/simt/flash_problem.h"

// Largest difference of finite values; infinite where one of the two is not finite and the other differs
static double lse_difference(const Doubles& got, const Doubles& want) {
    double worst = 0.0;
    for (size_t e = 0; e < want.size(); e++) {
        if (std::isinf(want[e]) && got[e] == want[e]) { continue; }
        const double d = std::fabs(got[e] - want[e]);
        if (!(d <= DBL_MAX)) { return INFINITY; }
        worst = std::max(worst, d);
    }
    return worst;
}
static double largest_finite(const Doubles& v) {
    double x = 0.0;
    for (double e : v) { if (std::isfinite(e)) { x = std::max(x, std::fabs(e)); } }
    return x;
}

struct Worst { double out = 0, largest = 0, lse = 0; };         // shares of what is allowed

static void expect_oracle(const Inputs& p, const Results& y, Worst& worst) {
    const Results want = oracle(p, Exact);
    Doubles rounded = oracle(p, ForwardAndBackward).out;
    for (double& x : rounded) { x = bf16_of(x); }
    const double allowed = 2 * relative_l2(rounded, want.out), error = relative_l2(y.out, want.out);
    const double allowed_largest = 3 * largest_difference(rounded, want.out);
    const double largest = largest_difference(y.out, want.out);
    // float32 logits in another order of operations: several times the error of plain loops, and never less than the
    // result's own ulp
    const double ulp = std::ldexp(largest_finite(want.lse), -22), lse = lse_difference(y.lse, want.lse);
    const double allowed_lse = 4 * (lse_difference(oracle(p, Float32).lse, want.lse) + ulp);
    EXPECT(error <= allowed, "%s: out off by %.3g, allowed %.3g", p.text().c_str(), error, allowed);
    EXPECT(largest <= allowed_largest, "%s: one element of out off by %.3g, allowed %.3g", p.text().c_str(), largest,
           allowed_largest);
    EXPECT(lse <= allowed_lse, "%s: lse off by %.3g, allowed %.3g", p.text().c_str(), lse, allowed_lse);
    if (allowed > 0) { worst.out = std::max(worst.out, error / allowed); }
    if (allowed_largest > 0) { worst.largest = std::max(worst.largest, largest / allowed_largest); }
    if (allowed_lse > 0) { worst.lse = std::max(worst.lse, lse / allowed_lse); }
}
static Inputs inputs(const Problem& p, uint64_t seed) {
    Inputs x(p, seed);
    x.dout.clear();
    return x;
}
static void run_case(const Problem& p, uint64_t seed, Worst& worst) {
    const Inputs x = inputs(p, seed);
    expect_oracle(x, Device(x).forward(), worst);
}
static void report(const Worst& w) {
    INFO("of the allowed error: out %.2f, largest %.2f, lse %.2f", w.out, w.largest, w.lse);
}
// NaN into the keys and values of a tile
static void hide_tile(Inputs& x, int n) {
    for (size_t e = 0; e < x.k.size(); e++) {
        if ((int)(e / x.s.HS % x.s.T) / FLASH_TILE == n) { x.k[e] = x.v[e] = NAN; }
    }
}
// problems: a function of flash_problem.h
template <class Problems> static void run_cases(Problems problems) {
    Worst worst;
    uint64_t seed = 0;
    problems([&](const Problem& p) { run_case(p, seed += 10, worst); });
    report(worst);
}

static void every_length(FlashBias Kind, bool inside = false) {
    Worst worst;
    std::vector<int> lengths = {1, 17, 64, 65, 127, 128, 129, 200};
    if (on_gpu) { lengths.insert(lengths.end(), {192, 257, 512, 1000, 1024}); }
    for (bool causal : {true, false}) {
        for (int T : lengths) {
            Problem p = {Kind, causal, {1, T, T <= 65 || on_gpu ? 3 : 1, 64}};
            p.inside = inside;
            run_case(p, (uint64_t)(1000 * T + 100 * causal), worst);
        }
        for (int T : {17, 129}) {
            run_case({Kind, causal, {1, T, 1, 128}}, (uint64_t)(1000 * T + 100 * causal + 50), worst);
        }
        for (int HS : {32, 80, 96}) {                       // fewer columns than the kernel has
            run_case({Kind, causal, {1, 70, 2, HS}}, (uint64_t)(1000 * HS + 100 * causal + 60), worst);
        }
        if (on_gpu) { run_case({Kind, causal, {3, 1000, 8, 128}}, 77, worst); }
    }
    report(worst);
}
KERNEL_TEST("flash forward: none against float64") { every_length(FlashBias::None); }
KERNEL_TEST("flash forward: linear against float64") { every_length(FlashBias::Linear); }
KERNEL_TEST("flash forward: distance against float64") { every_length(FlashBias::Distance); }
KERNEL_TEST("flash forward: log distance against float64") { every_length(FlashBias::LogDistance); }
KERNEL_TEST("flash forward: log distance, the weight inside") { every_length(FlashBias::LogDistance, true); }
KERNEL_TEST("flash forward: toeplitz against float64") { every_length(FlashBias::Toeplitz); }
KERNEL_TEST("flash forward: fire against float64") { every_length(FlashBias::Fire); }

__global__ void place_kernel(int* out, FlashArgs args, int turns) {
    const FlashPlace place(args, turns);
    if (threadIdx.x == 0) { out[blockIdx.x] = place.bh * turns + place.turn; }
}
KERNEL_TEST("blocks: every head's every turn comes once, few heads at a time, the longest rows first") {
    for (const auto& shape : {std::array<int, 3>{1, 1, 1}, {3, 5, 7}, {64, 12, 16}, {7, 13, 100}, {2, 3, 600}}) {
        const int BNH = shape[0] * shape[1], turns = shape[2];
        const int heads = std::max(1, FLASH_WAVE / turns);
        const size_t blocks = (size_t)BNH * turns;
        FlashArgs args = {};
        args.B = shape[0];
        args.NH = shape[1];
        DeviceArray<int> out(blocks);
        launch(place_kernel, Grid(blocks, 32, 0, Stream(0)), out.p, args, turns);
        const std::vector<int> places = out.host();
        std::vector<int> sorted = places;
        std::sort(sorted.begin(), sorted.end());
        for (size_t k = 0; k < blocks; k++) { EXPECT(sorted[k] == (int)k, "turn %d comes %zu", sorted[k], k); }
        for (size_t begin = 0; begin < blocks; begin += FLASH_WAVE) {
            const size_t end = std::min(begin + FLASH_WAVE, blocks);
            std::set<int> met;
            for (size_t k = begin; k < end; k++) { met.insert(places[k] / turns); }
            EXPECT((int)met.size() <= 2 * heads, "blocks %zu to %zu read %zu heads", begin, end, met.size());
        }
        std::vector<int> last((size_t)BNH, -1);
        for (int place : places) {
            EXPECT(place % turns == last[place / turns] + 1, "turn %d after %d", place % turns, last[place / turns]);
            last[place / turns] = place % turns;
        }
    }
}

KERNEL_TEST("flash forward: sequences that end earlier") {
    Worst worst;
    for (FlashBias Kind : BIASES) {
        for (bool causal : {true, false}) {
            run_case({Kind, causal, {3, 200, 1, 64}, {0, 65, 130}}, 5, worst);
            run_case({Kind, causal, {3, 70, 1, 64}, {1, 64, 75}}, 6, worst);
        }
    }
    run_case({FlashBias::Distance, false, {1, 200, 1, 128}, {100}}, 7, worst);
    report(worst);
}

KERNEL_TEST("flash forward: a window and sinks") { run_cases([](auto run) { windows_and_sinks(run); }); }
KERNEL_TEST("flash forward: documents apart") { run_cases([](auto run) { documents_apart(run); }); }
KERNEL_TEST("flash forward: a span leaves out exactly its tiles") { run_cases([](auto run) { given_spans(run); }); }
KERNEL_TEST("flash forward: small distances at a large S") {
    run_cases([](auto run) { small_distances_at_a_large_S(run); });
}
KERNEL_TEST("flash forward: log distance at its extremes") {
    run_cases([](auto run) { log_distance_at_its_extremes(run); });
}
KERNEL_TEST("flash forward: keys that no window shows are not read") {
    for (FlashBias Kind : BIASES) {
        Problem p = {Kind, true, {1, 330, 1, 64}};
        p.mask = {40, 64};
        Inputs x = inputs(p, 13);
        hide_tile(x, 1);                                    // after the sinks
        const Results y = Device(x).forward();
        for (size_t e = (size_t)192 * p.s.HS; e < y.out.size(); e++) { EXPECT(std::isfinite(y.out[e]), "out %zu", e); }
    }
}

// scores from flat to one-hot, distances from none to steps of 50, weights from e^-30 to 20
KERNEL_TEST("flash forward: scales of q, k, b and g") {
    Worst worst;
    const double b_std[] = {0.0, 0.02, 0.55, 2.0, 50.0};
    for (FlashBias Kind : {FlashBias::Distance, FlashBias::LogDistance}) {
        for (int e = 0; e < 5; e++) {
            Problem p = {Kind, e % 2 == 0, {1, 150, 1, 64}};
            p.b_mean = 0;
            p.b_std = b_std[e];
            run_case(p, 10 + e, worst);
        }
        for (double g : {-30.0, 20.0}) {
            for (bool causal : {true, false}) {
                Problem p = {Kind, causal, {1, 150, 1, 64}};
                p.g_mean = g;
                p.g_std = 0.0;
                run_case(p, 20 + (g > 0), worst);
            }
        }
    }
    for (FlashBias Kind : BIASES) {
        for (double qk : {0.1, 4.0}) {
            Problem p = {Kind, qk < 1.0, {1, 150, 1, 64}};
            p.qk = qk;
            run_case(p, 30, worst);
        }
    }
    report(worst);
}

KERNEL_TEST("flash forward: distance of b = 0 is none, of b = 1 and g = m_h linear, bit by bit") {
    for (bool causal : {true, false}) {
        const Problem none = {FlashBias::None, causal, {2, 200, 1, 64}, {200, 90}};
        const Problem line = {FlashBias::Linear, causal, {1, 200, 3, 64}};
        for (const Problem& p : {none, line}) {
            Problem distance = p;
            distance.Kind = FlashBias::Distance;
            distance.b_std = 0;
            distance.b_mean = p.Kind == FlashBias::None ? 0 : 1;
            Inputs x = inputs(distance, 40);
            for (int e = 0; e < (int)x.g.size() && p.Kind == FlashBias::Linear; e++) {
                x.g[e] = slope_of_head(e / p.s.T % p.s.NH, p.s.NH);
            }
            const Inputs other = inputs(p, 40);
            EXPECT(same(Device(x).forward(), Device(other).forward()), "%s", p.text().c_str());
        }
    }
}

KERNEL_TEST("flash forward: a far distance leaves every query its own value") {
    for (bool causal : {true, false}) {
        Problem p = {FlashBias::Distance, causal, {1, 200, 2, 64}};
        p.b_mean = 1e4;
        p.b_std = 1;
        const Inputs x = inputs(p, 41);
        EXPECT(same_bits(Device(x).forward().out, x.v), "%s", p.text().c_str());
    }
}

KERNEL_TEST("flash forward: the origin of S does not matter, nor the order of the threads, nor that lse is saved") {
    for (bool causal : {true, false}) {
        const Inputs x = inputs({FlashBias::Distance, causal, {1, 200, 1, 64}}, 42);
        Inputs far = x;
        for (double& origin : far.S_origin) { origin += 16777216.0; }   // here float32 counts in twos
        Device device(x);
        const Results y = device.forward();
        EXPECT(same(Device(far).forward(), y), "%s: S shifted", x.text().c_str());
        EXPECT(same(device.forward(), y), "%s: run twice", x.text().c_str());
        FlashArgs a = device.args();
        a.lse = nullptr;
        EXPECT(same_bits(device.forward(a).out, y.out), "%s: without lse", x.text().c_str());
    }
}

KERNEL_TEST("flash forward: other head sizes are declined") {
    const Inputs x = inputs({FlashBias::None, true, {1, 17, 1, 24}}, 43);
    Device device(x);
    EXPECT((!flash_forward<true, FlashBias::None>(device.args(), Stream(0))), "HS 24 accepted");
    for (float e : to_float(device.out.host())) { EXPECT(e != e, "written: %g", (double)e); }
}

// with padding, and with a query that saw no key
KERNEL_TEST("flash backward: every bias, near float64") {
    using Part = std::pair<const char*, Doubles Results::*>;
    for (FlashBias Kind : BIASES) {
        for (bool causal : {true, false}) {
            Inputs p({Kind, causal, {2, 140, 1, 64}, {140, 90}}, 66);
            p.blind = 30;
            std::vector<Part> parts = {{"dq", &Results::dq}, {"dk", &Results::dk}, {"dv", &Results::dv}};
            if (p.is_cable()) { parts.insert(parts.end(), {{"dS", &Results::dS}, {"dg", &Results::dg}}); }
            if (Kind == FlashBias::Toeplitz) { parts.push_back({"dtable", &Results::dtable}); }
            if (Kind == FlashBias::Fire) { parts.push_back({"FIRE's sums", &Results::fire}); }
            const Results want = oracle(p, Exact), got = Device(p, &want).run();
            for (const auto& [name, part] : parts) {
                const double error = relative_l2(got.*part, want.*part);
                EXPECT(error <= 1e-2, "%s: %s is off by %.2g", p.text().c_str(), name, error);
            }
        }
    }
}

// ----------------------------------------------------------------------------------------------------------
// skipped tiles

// log2 of the largest weight, relative to the largest one of its row, among what the spans leave out
static double largest_skipped(const Inputs& p, const Spans& span) {
    double worst = -INFINITY;
    for (int bh = 0; bh < p.heads(); bh++) {
        for (int i = 0; i < p.keys(bh); i++) {
            const FlashSpan live = span[(size_t)bh * p.tiles() + i / FLASH_TILE];
            double skipped = -INFINITY, top = -INFINITY;
            for (int j = 0; j < (p.causal ? i + 1 : p.keys(bh)); j++) {
                const double l = p.score(bh, i, j) + p.bias(bh, i, j);
                top = std::max(top, l);
                if (j / FLASH_TILE < live.first || j / FLASH_TILE > live.last) { skipped = std::max(skipped, l); }
            }
            worst = std::max(worst, (skipped - top) / std::log(2.0));
        }
    }
    return worst;
}

// The spans by the bound of flash/bias.cuh, in float64 and tile by tile
static Spans bounded_spans(const Inputs& p, double tau) {
    Spans span;
    for (int bh = 0; bh < p.heads(); bh++) {
        const int keys = p.keys(bh), live = ceil_div(keys, FLASH_TILE);
        std::vector<double> q_norm(keys, 0.0), k_norm(keys, 0.0);
        for (int e = 0; e < keys * p.s.HS; e++) {
            const size_t at = (size_t)bh * p.s.T * p.s.HS + e;
            q_norm[e / p.s.HS] += p.q[at] * p.q[at];
            k_norm[e / p.s.HS] += p.k[at] * p.k[at];
        }
        for (int m = 0; m < p.tiles(); m++) {
            FlashSpan s = {m, m};
            for (int i = 64 * m; i < std::min(keys, 64 * (m + 1)); i++) {
                const double needed = p.score(bh, i, i) - tau * std::log(2.0);
                const auto skipped = [&](int begin, int end, int nearest) {             // the keys from begin to end
                    const double largest = std::sqrt(*std::max_element(k_norm.begin() + begin, k_norm.begin() + end));
                    return p.scale() * std::sqrt(q_norm[i]) * largest + p.bias(bh, i, nearest) < needed;
                };
                int first = 0, last = p.causal ? m : live - 1;
                while (first < m && skipped(0, 64 * (first + 1), 64 * first + 63)) { first++; }
                while (last > m && skipped(64 * last, keys, 64 * last)) { last--; }
                s = {std::min(s.first, first), std::max(s.last, last)};
            }
            span.push_back(s);
        }
    }
    return span;
}

// flash_skip's spans; they are the oracle's, but for a bound that float32 may round either way
static Spans skip(Device& device, float tau) {
    const Inputs& p = device.p;
    const Spans span = device.spans(tau);
    const Spans less = bounded_spans(p, tau - 0.01), more = bounded_spans(p, tau + 0.01);
    for (size_t e = 0; e < span.size(); e++) {
        const FlashSpan s = span[e];
        const FlashSpan l = less[e];
        const FlashSpan u = more[e];
        EXPECT(u.first <= s.first && s.first <= l.first && l.last <= s.last && s.last <= u.last,
               "%s: tau %.1f: block %zu has tiles %d .. %d, the oracle says %d .. %d",
               p.text().c_str(), (double)tau, e, s.first, s.last, u.first, u.last);
    }
    return span;
}

// what is skipped is not read: tile n may be NaN for the queries that skip it
static void expect_unread(Device& device, const Spans& span, const Results& all, const FlashArgs& a, int n) {
    const Inputs& p = device.p;
    Inputs poisoned = p;
    hide_tile(poisoned, n);
    device.qkv.set(device.packed(poisoned));
    const Doubles without = device.forward(a).out;
    device.qkv.set(device.packed(p));
    for (size_t e = 0; e < without.size(); e++) {
        const int t = (int)(e / p.s.HS % p.s.T), bh = (int)(e / p.s.HS / p.s.T);
        const FlashSpan live = span[(size_t)bh * p.tiles() + t / FLASH_TILE];
        if (n >= live.first && n <= live.last) { continue; }
        EXPECT(without[e] == all.out[e], "%s: row %d reads the skipped tile %d", p.text().c_str(), t, n);
    }
}

// Sides: which ones have tiles to skip
enum Sides { Neither, Left, Right, Both };
static void check_skipping(const Problem& p, uint64_t seed, Sides sides,
                           const std::function<void(Inputs&)>& change = [](Inputs&) {}) {
    Inputs x = inputs(p, seed);
    change(x);
    Device device(x);
    const Results all = device.forward();
    const Spans exact = skip(device, 128.0f);
    const Skipped n = skipped_tiles(p, exact);
    EXPECT((n.left > 0) == (sides == Left || sides == Both) && (n.right > 0) == (sides == Right || sides == Both),
           "%s: %d tiles are skipped on the left, %d on the right", p.text().c_str(), n.left, n.right);
    EXPECT(largest_skipped(x, exact) < -126.0, "%s: tau 128 leaves out 2^%.1f of a row", p.text().c_str(),
           largest_skipped(x, exact));
    FlashArgs a = device.args();
    a.span = device.span.p;
    EXPECT(same(device.forward(a), all), "%s: skipping at tau 128 changes bits", p.text().c_str());
    expect_unread(device, exact, all, a, 0);
    if (!p.causal) { expect_unread(device, exact, all, a, (p.keys(0) - 1) / FLASH_TILE); }

    const float tau = flash_skip_tau(p.s.T);
    const Spans fast = skip(device, tau);
    const double share = flash_live_share(exact.data(), p.heads(), p.s.T, p.causal);
    const double fast_share = flash_live_share(fast.data(), p.heads(), p.s.T, p.causal);
    const int tiles = p.tiles();
    const int all_tiles = p.heads() * (p.causal ? tiles * (tiles + 1) / 2 : tiles * tiles);
    EXPECT(!p.kv_len.empty() || std::fabs((1.0 - share) * all_tiles - (n.left + n.right)) < 1e-9,
           "%s: a share of %.3f, %d tiles of %d are skipped", p.text().c_str(), share, n.left + n.right, all_tiles);
    EXPECT(fast_share <= share, "%s: tau %.1f computes more than tau 128", p.text().c_str(), (double)tau);
    EXPECT(largest_skipped(x, fast) < -tau, "%s: tau %.1f leaves out 2^%.1f of a row", p.text().c_str(), (double)tau,
           largest_skipped(x, fast));
    Worst worst;
    expect_oracle(x, device.forward(a), worst);
    if (!p.causal && sides != Both) { return; }
    INFO("%s: left %d, right %d, live tiles %.2f, %.2f by default", p.text().c_str(), n.left, n.right, share,
         fast_share);
}

KERNEL_TEST("flash skip: tau 128 changes no bit, tau 24 + log2 T no digit") {
    Problem p = {FlashBias::Distance, true, {1, 264, 1, 64}};
    p.b_mean = 0;
    p.b_std = 8.0;
    p.g_mean = 4.0;
    check_skipping(p, 50, Left);
    p.s.B = 2;
    p.kv_len = {150, 0};
    check_skipping(p, 52, Left);
    check_skipping({FlashBias::Linear, true, {1, 520, 3, 64}, {}, 0.1}, 53, Left);
    p = {FlashBias::Distance, true, {2, 2048, 3, 128}};
    p.b_mean = 0;
    p.b_std = 2.0;
    if (on_gpu) { check_skipping(p, 54, Left); }
}

KERNEL_TEST("flash skip: bidirectional, on either side, both, none") {
    Problem p = {FlashBias::Distance, false, {1, 264, 1, 64}};
    p.b_mean = 0;
    p.b_std = 8.0;
    p.g_mean = 4.0;
    for (const std::vector<int>& kv_len : {std::vector<int>{}, {200}, {193}, {192}}) {
        p.kv_len = kv_len;
        const int end = p.keys(0), last = (end - 1) / 64 * 64;
        const auto steep = [&](int from, int to) {    // the other queries' slope is nearly 0
            return [=](Inputs& x) {
                for (int t = 0; t < (int)x.g.size(); t++) {
                    if (t < from || t >= to) { x.g[t] = 1e-4f; }
                }
            };
        };
        const auto long_key = [&](int t) {    // which every bound of tiles that it is among must know
            return [=](Inputs& x) {
                for (size_t e = (size_t)64 * t; e < (size_t)64 * (t + 1); e++) { x.k[e] = 1024 * x.q[e]; }
            };
        };
        check_skipping(p, 51, Both);
        check_skipping(p, 55, Right, steep(0, 64));
        check_skipping(p, 56, Left, steep(last, end));
        check_skipping(p, 57, Neither, steep(0, 0));
        check_skipping(p, 58, Both, long_key(64));
        check_skipping(p, 59, Left, long_key(end - 1));
        check_skipping(p, 65, Right, long_key(0));
    }
    p.s.B = 2;
    p.kv_len = {200, 0};
    check_skipping(p, 60, Both);
    p = {FlashBias::Distance, false, {1, 264, 1, 64}, {250}};
    p.step_at = 128;    // between two tiles: far from all of the one side, near all of the other
    check_skipping(p, 61, Both);
    check_skipping({FlashBias::Linear, false, {1, 520, 3, 64}, {}, 0.1}, 62, Both);
    check_skipping({FlashBias::Linear, false, {1, 520, 1, 64}, {500}, 0.1}, 63, Neither);
    p = {FlashBias::Distance, false, {2, 2048, 3, 128}, {2048, 1500}};
    p.b_mean = 0;
    p.b_std = 2.0;
    if (on_gpu) { check_skipping(p, 64, Both); }
}

// A short slope and long vectors: nothing may be skipped, and a NaN among the keys forbids it too
KERNEL_TEST("flash skip: nothing is skipped without a reason") {
    for (bool causal : {true, false}) {
        Problem p = {FlashBias::Distance, causal, {1, 200, 1, 64}};
        p.b_mean = p.b_std = 0.01;
        const Inputs gentle = inputs(p, 60);
        Device flat(gentle);
        Skipped n = skipped_tiles(p, skip(flat, 128.0f));
        EXPECT(n.left == 0 && n.right == 0, "%d tiles on the left, %d on the right", n.left, n.right);
        p.b_mean = p.b_std = 50;
        const Inputs x = inputs(p, 61);
        Device device(x);
        n = skipped_tiles(p, skip(device, 128.0f));
        EXPECT(n.left > 0 && (causal || n.right > 0), "with steps of 50: %d tiles on the left, %d on the right", n.left,
               n.right);
        for (int t : {3, 198}) {                            // in the first tile, and in the last
            Inputs nan = x;
            nan.k[(size_t)t * p.s.HS] = NAN;
            device.qkv.set(device.packed(nan));
            for (const FlashSpan& s : device.spans(128.0f)) {
                EXPECT(t != 3 || s.first == 0, "tile %d is the first, and a key before it is NaN", s.first);
                EXPECT(t != 198 || causal || s.last == 3, "tile %d is the last, and a key after it is NaN", s.last);
            }
        }
    }
}
