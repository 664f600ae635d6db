// test_flash_backward.cu -- the tensor-core backward against a float64 oracle, checked itself by central differences.
//
// Tolerances are not chosen: the oracle runs once more with the kernel's own roundings (out, P and dlogit to bf16,
// results to bf16), and the kernel has to stay near that simulation: within half of the distance between simulation and
// oracle (dq, dk, dv, which end in bf16), a quarter (dS, dg, their suffix sum, dtable, FIRE's sums, float32).
#include "test/simt/flash_problem.h"

namespace {

Doubles suffix_sums(const Doubles& x, int T) {
    Doubles y = x;
    for (size_t i = y.size(); i-- > 1;) { if (i % T != 0) { y[i - 1] += y[i]; } }
    return y;
}
double norm(const Doubles& x) {
    double s = 0;
    for (double y : x) { s += y * y; }
    return std::sqrt(s);
}
// |a - b| relative to want, where want is not (nearly) 0; NaN counts as infinite
double distance(const Doubles& a, const Doubles& b, const Doubles& want) {
    Doubles d(a.size());
    for (size_t i = 0; i < a.size(); i++) { d[i] = a[i] - b[i]; }
    const double error = norm(d) / std::max(norm(want), 0.1 * std::sqrt((double)want.size()));
    return error < INFINITY ? error : INFINITY;
}

struct Worst { double of[8] = {}; };
const char* const RESULT_NAMES[] = {"dq", "dk", "dv", "dS", "dg", "db", "dtable", "FIRE's sums"};

// compares everything that the bias has; the worst share of the allowance goes to `worst`
// chained: the forward's running maximum is not the simulation's, so roundings differ: twice the simulation's error
// from the oracle
void expect_near(const Inputs& p, const Results& got, const Results& simulated, const Results& exact, Worst& worst,
                 bool chained = false) {
    const auto all = [&](const Results& r) {
        return std::vector<Doubles>{r.dq, r.dk, r.dv, r.dS, r.dg, suffix_sums(r.dS, p.s.T), r.dtable, r.fire};
    };
    const std::vector<Doubles> g = all(got);
    const std::vector<Doubles> s = all(simulated);
    const std::vector<Doubles> e = all(exact);
    for (size_t x = 0; x < g.size(); x++) {
        double allowance = x < 3 ? 0.5 : 0.25;          // of dq, dk, dv some roundings to bf16 may fall the other way
        if (chained || (x == 7 && on_gpu)) { allowance = 2; }       // FIRE's sums cancel, and an H100's mma truncates
        if ((x >= 3 && x <= 5 && !p.is_cable()) || (x == 6 && p.Kind != FlashBias::Toeplitz)) { continue; }
        if (x == 7 && p.Kind != FlashBias::Fire) { continue; }
        const double error = distance(g[x], chained ? e[x] : s[x], e[x]);
        const double allowed = allowance * distance(s[x], e[x], e[x]) + (on_gpu ? 2e-5 : 1e-5);
        worst.of[x] = std::max(worst.of[x], error / allowed);
        EXPECT(error <= allowed, "%s: %s is %.3g from the %s; simulation from oracle: %.3g", p.text().c_str(),
               RESULT_NAMES[x], error, chained ? "oracle" : "simulation", distance(s[x], e[x], e[x]));
    }
}
void inform(const Worst& worst) {
    for (int x = 0; x < 8; x++) { if (worst.of[x] > 0) { INFO("%s %.2f", RESULT_NAMES[x], worst.of[x]); } }
}

// the kernels against the oracle, with the oracle's forward
void expect_oracle(const Inputs& p, Worst& worst) {
    const Results exact = oracle(p, Exact);
    expect_near(p, Device(p, &exact).run(), oracle(p, Backward), exact, worst);
}
// problems: a function of flash_problem.h
template <class Problems> void expect_oracle_of(Problems problems) {
    Worst worst;
    uint64_t seed = 40;
    problems([&](const Problem& p) { expect_oracle(Inputs(p, seed += 10), worst); });
    inform(worst);
}

std::vector<Shape> shapes() {
    if (!on_gpu) {
        return {{1, 1, 1, 64},   {1, 17, 2, 64},  {2, 64, 1, 64},  {1, 65, 1, 128},
                {1, 129, 1, 64}, {1, 200, 1, 64}, {1, 130, 1, 128}, {1, 70, 2, 32}, {1, 33, 2, 80}, {1, 66, 2, 96}};
    }
    std::vector<Shape> all;
    for (int HS : {32, 64, 80, 128}) {
        for (int T : {1, 17, 63, 64, 65, 127, 128, 129, 192, 200, 511, 1000}) {
            all.push_back({T < 300 ? 2 : 1, T, 3, HS});
        }
    }
    return all;
}

void against_oracle(FlashBias Kind, bool causal, bool inside = false) {
    Worst worst;
    uint64_t seed = 100;
    for (Shape s : shapes()) {
        Problem p = {Kind, causal, s};
        p.inside = inside;
        // ends inside a tile, and a whole one is masked
        if (s.T == 129 || s.T == 200) { p.kv_len.assign((size_t)s.B, s.T - 50); }
        expect_oracle(Inputs(p, seed += 10), worst);
    }
    inform(worst);
}

// The gradients of FIRE's parameters from the sums of one sequence
struct FireGradients {
    Doubles w1 = Doubles(FIRE_UNITS), b1 = Doubles(FIRE_UNITS), w2;
    double c = 0, L = 0;

    FireGradients(const FireInputs& x, int NH, const Doubles& sums) : w2((size_t)NH * FIRE_UNITS) {
        for (size_t hk = 0; hk < w2.size(); hk++) {
            const size_t h = hk / FIRE_UNITS, k = hk % FIRE_UNITS;
            for (int n = 0; n < FIRE_PIECES; n++) {
                if (!x.is_on(k, n)) { continue; }           // else f has the term w2 (w1 y + b1)
                const double* s = &sums[(h * FIRE_PIECES + n) * FIRE_SUMS];
                w2[hk] += x.w1[k] * s[1] + x.b1[k] * s[0];
                w1[k] += x.w2[hk] * s[1];
                b1[k] += x.w2[hk] * s[0];
                c += x.w2[hk] * x.w1[k] * s[2];
                L -= x.w2[hk] * x.w1[k] * s[3];
            }
        }
    }
};

} // namespace

KERNEL_TEST("flash backward: the oracle against central differences") {
    const double h = 1e-5;
    double worst = 0;
    std::vector<std::pair<FlashBias, bool>> kinds = {{FlashBias::LogDistance, true}};
    for (FlashBias Kind : BIASES) { kinds.push_back({Kind, false}); }
    for (const auto& form : kinds) {
        const FlashBias Kind = form.first;
        for (bool causal : {true, false}) {
            Inputs p({Kind, causal, {1, 9, 2, 8}}, 7);
            p.inside = form.second;
            // no kink within h
            for (size_t t = 0; t < p.S.size(); t++) { p.S[t] = 0.3 * (double)t + 0.1 * std::sin((double)t); }
            const Results r = oracle(p, Exact);
            const auto loss = [&] {
                const Results x = oracle(p, Exact);
                double sum = 0;
                for (size_t i = 0; i < x.out.size(); i++) { sum += x.out[i] * p.dout[i]; }
                return sum;
            };
            Doubles dtable((size_t)2 * 17, 0);              // one sequence: slabs and table agree
            for (size_t i = 0; i < dtable.size(); i++) { dtable[i] = r.dtable[i]; }
            const auto compare_one = [&](double& x, double dx, const char* name, size_t i) {
                const double x0 = x;
                x = x0 + h; const double up = loss();
                x = x0 - h; const double down = loss();
                x = x0;
                const double error = std::fabs((up - down) / (2 * h) - dx);
                worst = std::max(worst, error);
                EXPECT(error < 1e-7, "%s %s[%zu]: %.9g by differences, %.9g analytically", BIAS_NAMES[(int)Kind],
                       name, i, (up - down) / (2 * h), dx);
            };
            const auto compare = [&](Doubles& x, const Doubles& dx, const char* name) {
                for (size_t i = 0; i < x.size(); i += x.size() > 40 ? 7 : 1) { compare_one(x[i], dx[i], name, i); }
            };
            compare(p.q, r.dq, "dq");
            compare(p.k, r.dk, "dk");
            compare(p.v, r.dv, "dv");
            if (p.is_cable()) {
                compare(p.S, r.dS, "dS");
                compare(p.g, r.dg, "dg");
            }
            if (Kind == FlashBias::Toeplitz) { compare(p.table, dtable, "dtable"); }
            if (Kind == FlashBias::Fire) {
                const FireGradients d(p.fire, p.s.NH, r.fire);
                compare(p.fire.w2, d.w2, "w2");
                compare(p.fire.w1, d.w1, "w1");
                compare(p.fire.b1, d.b1, "b1");
                for (auto [x, dx, name] : {std::tuple{&p.fire.c, d.c, "c"}, {&p.fire.L, d.L, "L"}}) {
                    compare_one(*x, dx, name, 0);
                }
            }
        }
    }
    INFO("largest difference %.1e", worst);
}

KERNEL_TEST("flash backward None, causal") { against_oracle(FlashBias::None, true); }
KERNEL_TEST("flash backward None, full") { against_oracle(FlashBias::None, false); }
KERNEL_TEST("flash backward Linear, causal") { against_oracle(FlashBias::Linear, true); }
KERNEL_TEST("flash backward Linear, full") { against_oracle(FlashBias::Linear, false); }
KERNEL_TEST("flash backward Distance, causal") { against_oracle(FlashBias::Distance, true); }
KERNEL_TEST("flash backward Distance, full") { against_oracle(FlashBias::Distance, false); }
KERNEL_TEST("flash backward LogDistance, causal") { against_oracle(FlashBias::LogDistance, true); }
KERNEL_TEST("flash backward LogDistance, full") { against_oracle(FlashBias::LogDistance, false); }
KERNEL_TEST("flash backward LogDistance inside, causal") { against_oracle(FlashBias::LogDistance, true, true); }
KERNEL_TEST("flash backward LogDistance inside, full") { against_oracle(FlashBias::LogDistance, false, true); }
KERNEL_TEST("flash backward Toeplitz, causal") { against_oracle(FlashBias::Toeplitz, true); }
KERNEL_TEST("flash backward Toeplitz, full") { against_oracle(FlashBias::Toeplitz, false); }
KERNEL_TEST("flash backward Fire, causal") { against_oracle(FlashBias::Fire, true); }
KERNEL_TEST("flash backward Fire, full") { against_oracle(FlashBias::Fire, false); }

// Shifting S changes nothing, so dS sums to 0, and so does db_0: the row sums have to cancel what the column sums leak.
KERNEL_TEST("flash backward: dS sums to 0") {
    double worst = 0;
    for (FlashBias Kind : {FlashBias::Distance, FlashBias::LogDistance}) {
        for (bool causal : {true, false}) {
            const Inputs p({Kind, causal, {1, on_gpu ? 1000 : 150, 1, 64}}, 31);
            const Results exact = oracle(p, Exact), r = Device(p, &exact).run();
            const Doubles db = suffix_sums(r.dS, p.s.T);
            const double rms = norm(r.dS) / std::sqrt((double)p.s.T), rms_db = norm(db) / std::sqrt((double)p.s.T);
            double magnitude = 0;
            for (double x : r.dS) { magnitude += std::fabs(x); }
            worst = std::max(worst, std::fabs(db[0]) / rms);
            EXPECT(rms > 0 && std::fabs(db[0]) < 1e-6 * magnitude, "%s: the sum over dS is %.3g, rms %.3g",
                   BIAS_NAMES[(int)Kind], db[0], rms);
            EXPECT(std::fabs(db[0]) < 1e-4 * rms_db, "%s: db_0 is %.3g, rms of db %.3g", BIAS_NAMES[(int)Kind], db[0],
                   rms_db);
        }
    }
    INFO("at most %.1e of rms", worst);
}

// The tiles that some weight of 2^-128 or more is in, and what lies between them and the queries' own
Spans needed_tiles(const Inputs& p, const Results& exact) {
    const int T = p.s.T;
    Spans span;
    for (int bh = 0; bh < p.heads(); bh++) {
        for (int m = 0; m < p.tiles(); m++) {
            FlashSpan s = {m, m};
            for (int i = m * FLASH_TILE; i < std::min(T, (m + 1) * FLASH_TILE); i++) {
                for (int j = 0; j < T; j++) {
                    if (!p.visible(bh, i, j)) { continue; }
                    const double logit = p.score(bh, i, j) + p.bias(bh, i, j) - exact.lse[(size_t)bh * T + i];
                    const int n = j / FLASH_TILE;
                    if (logit >= -128 * std::log(2.0)) { s = {std::min(s.first, n), std::max(s.last, n)}; }
                }
            }
            span.push_back(s);
        }
    }
    return span;
}
KERNEL_TEST("flash backward: tiles whose probabilities are 0 may be skipped, bit by bit") {
    for (bool causal : {true, false}) {
        for (int padding : {0, 60}) {
            Problem steep = {FlashBias::Distance, causal, {1, on_gpu ? 700 : 260, 2, 64}};
            steep.b_mean = steep.b_std = 4;
            if (padding > 0) { steep.kv_len = {steep.s.T - padding}; }
            Inputs p(steep, 41);
            for (double& g : p.g) { g = std::max(g, 0.5); }
            const Results exact = oracle(p, Exact);
            Device device(p, &exact);
            const Results all = device.run();
            p.span = needed_tiles(p, exact);
            const Skipped n = skipped_tiles(p, p.span);
            EXPECT(n.left > 1 && (causal ? n.right == 0 : n.right > 1), "only %d tiles on the left, %d on the right",
                   n.left, n.right);
            EXPECT(same(all, device.run()), "%s, padding %d: skipping changed bits", causal ? "causal" : "full",
                   padding);
            INFO("left %d, right %d", n.left, n.right);
        }
    }
}

KERNEL_TEST("flash backward after the forward: with flash_skip's tiles, tau 128 changes no bit, the default no digit") {
    // g is 1e-4 but from `steep` to `gentle`
    struct Case { FlashBias Kind; Shape s; int keys, steep, gentle; bool left, right; };
    const int T = on_gpu ? 700 : 260;
    const int end = T - 60;
    const int last_all = (T - 1) / 64 * 64;
    const int last = (end - 1) / 64 * 64;
    const Shape s = {1, T, 1, 64};
    const Case cases[] = {{FlashBias::Distance, s, T, 0, T, true, true},
                          {FlashBias::Distance, s, end, 0, T, true, true},
                          {FlashBias::Distance, s, T, 0, 64, false, true},
                          {FlashBias::Distance, s, end, 0, 64, false, true},
                          {FlashBias::Distance, s, T, last_all, T, true, false},
                          {FlashBias::Distance, s, end, last, T, true, false},
                          {FlashBias::Distance, s, end, 0, 0, false, false},
                          {FlashBias::Distance, {1, T, 1, 128}, end, 0, T, true, true},
                          {FlashBias::Linear, {1, 520, 3, 64}, 500, 0, 0, true, true}};
    Worst worst;
    uint64_t seed = 200;
    for (const Case& c : cases) {
        Problem steep = {c.Kind, false, c.s};
        steep.b_mean = steep.b_std = 4;
        if (c.Kind == FlashBias::Linear) { steep.qk = 0.3; }
        if (c.keys < c.s.T) { steep.kv_len = {c.keys}; }
        Inputs p(steep, seed += 10);
        for (int t = 0; t < (int)p.g.size(); t++) {
            p.g[t] = t >= c.steep && t < c.gentle ? std::max(p.g[t], 0.5) : (double)1e-4f;
        }
        Device device(p);
        const Results all = device.run(true);
        p.span = device.spans(128.0f);
        const Skipped n = skipped_tiles(p, p.span);
        EXPECT((n.left > 0) == c.left && (n.right > 0) == c.right,
               "case %d: %d tiles are skipped on the left, %d on the right", (int)(&c - cases), n.left, n.right);
        EXPECT(same(all, device.run(true)), "case %d: skipping changed bits", (int)(&c - cases));
        p.span = device.spans(flash_skip_tau(p.s.T));
        const Results fast = device.run(true);
        p.span.clear();
        expect_near(p, fast, oracle(p, ForwardAndBackward), oracle(p, Exact), worst, true);
    }
    inform(worst);
}

KERNEL_TEST("flash backward: a span leaves out exactly its tiles") {
    expect_oracle_of([](auto run) { given_spans(run); });
}
KERNEL_TEST("flash backward: a window and sinks") { expect_oracle_of([](auto run) { windows_and_sinks(run); }); }
KERNEL_TEST("flash backward: documents apart") { expect_oracle_of([](auto run) { documents_apart(run); }); }
KERNEL_TEST("flash backward: small distances at a large S") {
    expect_oracle_of([](auto run) { small_distances_at_a_large_S(run); });
}
KERNEL_TEST("flash backward: LogDistance at its extremes") {
    expect_oracle_of([](auto run) { log_distance_at_its_extremes(run); });
}

KERNEL_TEST("flash backward: two runs give the same bits") {
    for (FlashBias Kind : BIASES) {
        const Inputs p({Kind, false, on_gpu ? Shape{4, 900, 8, 64} : Shape{1, 70, 2, 64}}, 51);
        const Results any(p);
        Device device(p, &any);                             // out and lse of zeros do as well here
        const Results once = device.run();
        for (int k = 0; k < (on_gpu ? 10 : 1); k++) { EXPECT(same(once, device.run()), "%s", BIAS_NAMES[(int)Kind]); }
    }
}

// With few slabs the dq kernel is launched for a part of the queries at a time; the last part may be smaller
KERNEL_TEST("flash backward Toeplitz: few slabs give the same bits") {
    for (int HS : {64, 128}) {
        for (bool causal : {true, false}) {
            // the second one's last part is all padding
            const Inputs p({FlashBias::Toeplitz, causal, {2, 200, 1, HS}, {200, 100}}, 53);
            const Results any(p);
            Device device(p, &any);
            const Results together = device.run();
            slabs_at_a_time = 2;
            const Results parts = device.run();
            slabs_at_a_time = 0;
            EXPECT(norm(together.dtable) > 0 && same(together, parts), "head size %d, causal %d", HS, causal);
        }
    }
}

// With a slab for every tile it was B NH T T / 64 floats: 13 GB for one text of 131,072 tokens and 12 heads
KERNEL_TEST("flash backward Toeplitz: scratch grows with T, not with T * T") {
    const auto floats = [](int T) { return (double)flash_backward_scratch(FlashBias::Toeplitz, 8, T, 12); };
    for (int T : {8192, 32768, 131072}) {
        const double portable = (double)portable_attention_backward_scratch(8, T, 12, 64);
        EXPECT(floats(2 * T) < 2.0 * floats(T) && floats(T) < portable, "T %d: %.3g floats, twice as long: %.3g; the "
               "portable kernels: %.3g", T, floats(T), floats(2 * T), portable);
    }
    EXPECT(flash_slabs(12, 131072) == 86 && flash_slabs(96, 8192) == 32 && flash_slabs(96, 1000) == 16, "%d %d %d",
           flash_slabs(12, 131072), flash_slabs(96, 8192), flash_slabs(96, 1000));
}

// The first `tokens` tokens of one sequence: of results, of what made them.
Doubles part(const Doubles& x, const Inputs& p, int b, int tokens, size_t width) {
    Doubles y;
    for (size_t bh = (size_t)b * p.s.NH; bh < (size_t)(b + 1) * p.s.NH; bh++) {
        const auto at = x.begin() + bh * p.s.T * width;
        y.insert(y.end(), at, at + tokens * width);
    }
    return y;
}
Results part(const Results& r, const Inputs& p, int b, int tokens) {
    Results y = r;
    const size_t HS = (size_t)p.s.HS;
    const std::pair<Doubles Results::*, size_t> all[] = {{&Results::out, HS}, {&Results::lse, 1}, {&Results::dq, HS},
                                                         {&Results::dk, HS},  {&Results::dv, HS}, {&Results::dS, 1},
                                                         {&Results::dg, 1}};
    for (const auto& [x, width] : all) { y.*x = part(r.*x, p, b, tokens, width); }
    y.dtable.clear();
    for (size_t bh = (size_t)b * p.s.NH; bh < (size_t)(b + 1) * p.s.NH; bh++) {
        const auto zero = r.dtable.begin() + bh * (2 * p.s.T - 1) + p.s.T - 1;
        y.dtable.insert(y.dtable.end(), zero - (tokens - 1), zero + tokens);
    }
    const auto fire = r.fire.begin() + b * p.s.NH * FIRE_SIZE;
    y.fire.assign(fire, fire + p.s.NH * FIRE_SIZE);
    return y;
}
Inputs part(const Inputs& p, int b, int tokens) {
    Inputs y = p;
    y.s.B = 1;
    y.s.T = tokens;
    y.kv_len.clear();
    const size_t HS = (size_t)p.s.HS, chunks = (size_t)ceil_div(p.s.T, CABLE_CHUNK);
    for (Doubles Inputs::*x : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::dout}) {
        y.*x = part(p.*x, p, b, tokens, HS);
    }
    for (Doubles Inputs::* x : {&Inputs::S, &Inputs::g}) { y.*x = part(p.*x, p, b, tokens, 1); }
    y.S_offset = as<float>(part(as<double>(p.S_offset), p, b, tokens, 1));
    y.S_origin.clear();
    y.table.clear();
    for (size_t h = 0; h < (size_t)p.s.NH; h++) {
        const auto origin = p.S_origin.begin() + (b * p.s.NH + h) * chunks;
        const auto zero = p.table.begin() + h * (2 * p.s.T - 1) + p.s.T - 1;
        y.S_origin.insert(y.S_origin.end(), origin, origin + ceil_div(tokens, CABLE_CHUNK));
        y.table.insert(y.table.end(), zero - (tokens - 1), zero + tokens);
    }
    return y;
}

KERNEL_TEST("flash backward after the forward: padding changes no bit of a sequence") {
    for (FlashBias Kind : BIASES) {
        for (bool causal : {true, false}) {
            const int T = on_gpu ? 900 : 160;
            const Inputs p({Kind, causal, {2, T, 2, 64}, {T - 10, 64}}, 91);
            const Results all = Device(p).run(true);
            for (int b = 0; b < p.s.B; b++) {
                const int n = p.kv_len[(size_t)b];
                const Inputs alone = part(p, b, n);
                EXPECT(same(Device(alone).run(true), part(all, p, b, n)), "%s: %d tokens alone, and padded",
                       p.text().c_str(), n);
            }
        }
    }
}

KERNEL_TEST("flash backward: padding and rows without a key get zeros") {
    Worst worst;
    for (FlashBias Kind : BIASES) {
        for (bool causal : {true, false}) {
            Inputs p({Kind, causal, {3, 70, 1, 64}, {0, 3, 69}}, 61);
            p.blind = 66;
            const Results exact = oracle(p, Exact), r = Device(p, &exact).run();
            expect_near(p, r, oracle(p, Backward), exact, worst);
            bool zero = true;
            for (size_t e = 0; e < r.dk.size(); e++) {
                const int b = (int)(e / (70 * 64)), j = (int)(e / 64 % 70);
                if (j >= p.kv_len[(size_t)b]) { zero = zero && r.dk[e] == 0 && r.dv[e] == 0 && r.dq[e] == 0; }
            }
            for (size_t t = 0; t < 70; t++) { zero = zero && r.dS[t] == 0 && r.dg[t] == 0; }
            EXPECT(zero, "%s: a gradient where nothing was seen", BIAS_NAMES[(int)Kind]);
        }
    }
    inform(worst);
}

KERNEL_TEST("flash backward: large biases stay finite") {
    for (FlashBias Kind : {FlashBias::Distance, FlashBias::LogDistance}) {
        for (bool causal : {true, false}) {
            Problem p = {Kind, causal, {1, 140, 1, 64}};
            p.b_mean = p.b_std = 50;
            p.g_mean = 30;
            p.g_std = 10;
            Worst worst;
            expect_oracle(Inputs(p, 71), worst);
        }
    }
}

KERNEL_TEST("flash backward after the forward kernel") {
    Worst worst;
    for (FlashBias Kind : BIASES) {
        for (bool causal : {true, false}) {
            const int T = on_gpu ? 520 : 140;
            const Inputs p({Kind, causal, {1, T, 1, causal ? 64 : 128}}, 81);
            const Results exact = oracle(p, Exact);
            expect_near(p, Device(p).run(true), oracle(p, ForwardAndBackward), exact, worst, true);
        }
    }
    inform(worst);
}

KERNEL_TEST("flash backward refuses what it cannot do") {
    FlashArgs a = {};
    a.HS = 24;
    EXPECT(!(flash_backward<true, FlashBias::None>(a, nullptr, Stream(0))), "head size 24");
    a.T = 10; a.table_zero = 8; a.table_entries = 200;
    const std::string error = error_of([&] { flash_backward<true, FlashBias::Toeplitz>(a, nullptr, Stream(0)); });
    EXPECT(error.find("distance") != std::string::npos, "a table too short: '%s'", error.c_str());
}

#if defined(SIMT)
// How many blocks of each kernel an SM has room for: by the shared memory that its launch asked for, and by its
// registers in dev/ptxas_budget.json. With one block, the tensor cores rest while it waits for a tile. Heads of 128
// have one where two do not fit: the backward has six tiles of 16 KB, the forward five, 512 bytes too many for two on
// an A100.
template <bool Causal, FlashBias Kind, int HS> void expect_blocks(size_t kilobytes, const char* build) {
    const struct { const void* kernel; const char* name; } kernels[] = {
        {(const void*)flash_forward_kernel<Causal, Kind, HS, false>, "flash_forward_kernel"},
        {(const void*)flash_backward_dkdv_kernel<Causal, Kind, HS, false>, "flash_backward_dkdv_kernel"},
        {(const void*)flash_backward_dq_kernel<Causal, Kind, HS, false>, "flash_backward_dq_kernel"}};
    static const std::string budget = read_file("dev/ptxas_budget.json", 1u << 20);
    for (const auto& k : kernels) {
        for (const char* masked : {"false", "true"}) {
            const std::string name = strprintf("\"%s<%s, (FlashBias)%d, %d, %s>\"", k.name, Causal ? "true" : "false",
                                               (int)Kind, HS, masked);
            const size_t row = budget.find(name), at = budget.find("registers", budget.find(build, row));
            const int registers = row == std::string::npos ? 0 : atoi(budget.c_str() + at + strlen("registers\": "));
            EXPECT(registers > 0, "no budget of %s for %s", name.c_str(), build);
            // an SM has 65,536 registers, of which a warp takes 256 at a time, and a block 1 KB more than it asks for
            const size_t by_registers = 65536 / (size_t)(FLASH_THREADS * round_up(imax(registers, 1), 8));
            const size_t by_shared = (kilobytes << 10) / (simt_opted_in[k.kernel] + 1024);
            const size_t expected = HS == 64 || kilobytes >= 228 ? 2 : 1;
            EXPECT(std::min(by_registers, by_shared) >= expected, "%s, %zu KB an SM: %zu blocks by %zu bytes, %zu by "
                   "%d registers; expected %zu", name.c_str(), kilobytes, by_shared, simt_opted_in[k.kernel],
                   by_registers, registers, expected);
        }
    }
}
KERNEL_TEST("flash: blocks on an SM") {
    // This build has the kernels of 9.0. In test_flash_ampere.cu: 8.0, then 8.6, 8.9 and 12.0, then 10.0
    const std::vector<size_t> kilobytes = HAS_WGMMA ? std::vector<size_t>{228} : std::vector<size_t>{164, 100, 228};
    const char* build = HAS_WGMMA ? "sm_90a" : "sm_80";
    for (FlashBias Kind : BIASES) {
        for (bool causal : {true, false}) {
            for (int HS : {64, 128}) {
                const Inputs p({Kind, causal, {1, 1, 1, HS}}, 1);
                Device(p).run(true);
            }
        }
    }
    for (size_t size : kilobytes) {
        for (FlashBias Kind : BIASES) {
            with_kind(Kind, [&](auto K) {
                expect_blocks<true, K.value, 64>(size, build);
                expect_blocks<false, K.value, 64>(size, build);
                expect_blocks<true, K.value, 128>(size, build);
                expect_blocks<false, K.value, 128>(size, build);
            });
        }
    }
}
#endif
