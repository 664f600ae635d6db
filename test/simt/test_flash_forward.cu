// test_flash_forward.cu -- the tensor-core attention's forward against float64, for every bias; and the bound of
// flash/bias.cuh against what it leaves out.
//
// Tolerances are measured: the exact softmax with its weights rounded to bf16 (what the second matmul is fed) and its
// output rounded to bf16 has some error; the kernel may have twice that. lse: the same with float32 logits.
#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <set>

#include "llmc/attention/choose.cuh"
#include "test/layers/attention_oracle.h"
#include "test/simt/fire_inputs.h"
#include "test/simt/kernel_test.h"
#include "test/simt/shared_flash.h"

constexpr FlashBias BIASES[] = {FlashBias::None, FlashBias::Linear, FlashBias::Distance, FlashBias::LogDistance,
                                FlashBias::Toeplitz, FlashBias::Fire};
static const char* name_of(FlashBias Kind) {
    const char* names[] = {"none", "linear", "distance", "log distance", "toeplitz", "fire"};
    return names[(int)Kind];
}

struct Problem {
    FlashBias Kind;
    bool causal;
    int B, T, NH, HS;
    std::vector<int> kv_len = {};
    double qk = 1.0;
    double b_mean = 0.0;
    double b_std = 0.55;
    double g_mean = 0.0;
    double g_std = 1.0;
    double origin = 0.0;
    int spare = 3;                              // positions after T in every array over time
    bool inside = false;                        // the weight of log distance is inside the logarithm
    int step_at = -1;                           // a token whose b is 1e5
    std::vector<FlashSpan> span = {};           // what args() gives the kernel, and the oracle obeys
    AttentionMask mask = {};                    // likewise
    std::vector<int> documents = {};            // (B,stride): where each token's begins

    int stride() const { return T + spare; }
    int C() const { return NH * HS; }
    int OC() const { return round_up(3 * C() + 2 * NH, 8); }
    int chunks() const { return ceil_div(stride(), 128); }
    int entries() const { return (causal ? stride() : 2 * stride() - 1) + 128; }
    float scale() const { return (float)(1.0 / std::sqrt((double)HS)); }
    int keys(int b) const { return kv_len.empty() ? T : std::min(T, kv_len[b]); }
    std::string text() const {
        return strprintf("%s %s B %d T %d NH %d HS %d%s", name_of(Kind), causal ? "causal" : "full", B, T, NH, HS,
                         kv_len.empty() ? "" : " kv_len");
    }
};

struct Inputs {
    std::vector<float> qkv, S, g, table;        // qkv holds bf16 values
    std::vector<double> origin;
    FireInputs fire = FireInputs(1, 1);
};

// What no kernel may read is NaN: the columns after q, k and v, the rows after T, the keys and values after kv_len.
static Inputs make_inputs(const Problem& p, uint64_t seed) {
    Inputs x;
    const int C = p.C();
    const int OC = p.OC();
    const int stride = p.stride();
    x.qkv = rounded_to_bf16(normals((size_t)p.B * stride * OC, seed));
    for (int b = 0; b < p.B; b++) {
        for (int t = 0; t < stride; t++) {
            float* row = &x.qkv[((size_t)b * stride + t) * OC];
            for (int c = 0; c < OC; c++) {
                if (c < 2 * C) { row[c] = (float)(bf16)(float)(row[c] * p.qk); }
                if (t >= p.T || c >= 3 * C || (c >= C && t >= p.keys(b))) { row[c] = NAN; }
            }
        }
    }
    const int BNH = p.B * p.NH;
    const std::vector<float> zc = normals((size_t)BNH * stride, seed + 1, p.b_std, p.b_mean);
    const std::vector<float> zs = normals(zc.size(), seed + 2, p.g_std, p.g_mean);
    x.S.assign(zc.size(), NAN);
    x.g.assign(zc.size(), NAN);
    x.origin.assign((size_t)BNH * p.chunks(), p.origin);
    for (int bh = 0; bh < BNH; bh++) {
        double origin = p.origin;
        float offset = 0.0f;
        for (int t = 0; t < p.T; t++) {
            if (t % 128 == 0) {
                // so that a shift of all origins is exact
                origin += std::ldexp(std::round(std::ldexp((double)offset, 20)), -20);
                offset = 0.0f;
                x.origin[(size_t)bh * p.chunks() + t / 128] = origin;
            }
            offset += t == p.step_at ? 1e5f : std::max(zc[(size_t)bh * stride + t], 0.0f);
            x.S[(size_t)bh * stride + t] = offset;
            x.g[(size_t)bh * stride + t] = (float)std::log1p(std::exp((double)zs[(size_t)bh * stride + t]));
        }
    }
    x.table = normals((size_t)p.NH * p.entries(), seed + 3);
    x.fire = FireInputs(p.NH, seed + 4);
    return x;
}

// ----------------------------------------------------------------------------------------------------------
// oracle

static double slope_of_head(int h, int NH) {    // Press et al. 2022
    int power = 1;
    while (2 * power <= NH) { power *= 2; }
    return h < power ? std::pow(2.0, -8.0 * (h + 1) / power)
                     : std::pow(2.0, -8.0 * (2 * (h - power) + 1) / (2 * power));
}
static double bias_of(const Problem& p, const Inputs& x, int bh, int i, int j) {
    const int h = bh % p.NH;
    auto S = [&](int t) {
        return x.origin[(size_t)bh * p.chunks() + t / 128] + (double)x.S[(size_t)bh * p.stride() + t];
    };
    const double g = x.g[(size_t)bh * p.stride() + i];
    switch (p.Kind) {
        case FlashBias::None: return 0.0;
        case FlashBias::Linear: return -slope_of_head(h, p.NH) * std::abs(i - j);
        case FlashBias::Distance: return -g * std::fabs(S(i) - S(j));
        case FlashBias::LogDistance: {
            const double a = (p.inside ? g : 1.0) * (S(i) - S(j));
            return -(p.inside ? 1.0 : g) * std::log1p(a * a);
        }
        case FlashBias::Toeplitz: return x.table[(size_t)h * p.entries() + p.stride() - 1 + j - i];
        case FlashBias::Fire: return x.fire.f(h, x.fire.y(i, j));
        case FlashBias::Unknown: break;
    }
    return NAN;
}

struct Outputs { std::vector<float> out, lse; };
struct Oracle {
    std::vector<double> out, lse;       // (B,T,C), (B*NH,T)
    Outputs rounded;                    // the simulation
};

static bool visible(const Problem& p, int bh, int i, int j) {
    const int keys = p.keys(bh / p.NH);
    const int document = p.documents.empty() ? 0 : p.documents[(size_t)(bh / p.NH * p.stride() + i)];
    const bool outside = p.mask.window > 0 && std::abs(i - j) >= p.mask.window && j >= document + p.mask.sinks;
    if (i >= keys || j >= keys || (p.causal && j > i) || j < document || outside) { return false; }
    const FlashSpan all = {0, INT_MAX};
    const FlashSpan live = p.span.empty() ? all : p.span[(size_t)bh * ceil_div(p.T, 64) + i / 64];
    return j / 64 >= live.first && j / 64 <= live.last;
}
// One head in float64, and simulated with a kernel's roundings: out with bf16's, lse with those of float32 logits
static void oracle_head(Oracle& y, const Problem& p, const Inputs& x, int bh) {
    const size_t T = (size_t)p.T, HS = (size_t)p.HS;
    std::vector<double> part[3], bias(T * T, -INFINITY);
    for (size_t e = 0; e < 3 * T * HS; e++) {               // values after kv_len are NaN, and weigh nothing
        const size_t t = e / HS % T, n = e / HS / T;
        const float z = x.qkv[((size_t)(bh / p.NH) * p.stride() + t) * p.OC() + n * p.C() + bh % p.NH * HS + e % HS];
        part[n].push_back((int)t < p.keys(bh / p.NH) ? z : 0.0);
    }
    for (int e = 0; e < (int)bias.size(); e++) {
        if (visible(p, bh, e / p.T, e % p.T)) { bias[(size_t)e] = bias_of(p, x, bh, e / p.T, e % p.T); }
    }
    const HeadOracle<double> exact(part[0], part[1], part[2], bias, {}, p.scale(), T, HS, false);
    const HeadOracle<double, bf16> simulated(part[0], part[1], part[2], bias, {}, p.scale(), T, HS, false);
    const HeadOracle<float> rough(as<float>(part[0]), as<float>(part[1]), as<float>(part[2]), as<float>(bias), {},
                                  p.scale(), T, HS, false);
    for (size_t t = 0; t < T; t++) {
        y.lse[bh * T + t] = exact.lse[t];
        y.rounded.lse[bh * T + t] = rough.lse[t];
        for (size_t d = 0; d < HS; d++) {
            const size_t at = ((size_t)(bh / p.NH) * T + t) * p.C() + bh % p.NH * HS + d;
            y.out[at] = exact.out[t * HS + d];
            y.rounded.out[at] = (float)(bf16)(float)simulated.out[t * HS + d];
        }
    }
}
static Oracle oracle(const Problem& p, const Inputs& x) {
    Oracle y;
    y.out.assign((size_t)p.B * p.T * p.C(), 0.0);
    y.lse.assign((size_t)p.B * p.NH * p.T, -INFINITY);
    y.rounded.out.assign(y.out.size(), 0.0f);
    y.rounded.lse.assign(y.lse.size(), -INFINITY);
#if defined(_OPENMP)                                        // on the hardware's grid this is what takes the time
#pragma omp parallel for schedule(dynamic)
#endif
    for (int bh = 0; bh < p.B * p.NH; bh++) { oracle_head(y, p, x, bh); }       // no two share an element of y
    return y;
}

// ----------------------------------------------------------------------------------------------------------
// the kernel

template <bool Causal> static bool launch_forward(FlashBias Kind, const FlashArgs& a) {
    switch (Kind) {
        case FlashBias::None: return flash_forward<Causal, FlashBias::None>(a, Stream(0));
        case FlashBias::Linear: return flash_forward<Causal, FlashBias::Linear>(a, Stream(0));
        case FlashBias::Distance: return flash_forward<Causal, FlashBias::Distance>(a, Stream(0));
        case FlashBias::LogDistance: return flash_forward<Causal, FlashBias::LogDistance>(a, Stream(0));
        case FlashBias::Toeplitz: return flash_forward<Causal, FlashBias::Toeplitz>(a, Stream(0));
        case FlashBias::Fire: return flash_forward<Causal, FlashBias::Fire>(a, Stream(0));
        case FlashBias::Unknown: break;
    }
    return false;
}

struct Device {
    const Problem& p;
    DeviceArray<bf16> qkv, out;
    DeviceArray<float> lse, slopes, S, g, table, key_norm;
    DeviceArray<double> origin;
    DeviceArray<int> kv_len, documents;
    DeviceArray<FlashSpan> span;
    FireArrays fire;
    Device(const Problem& p, const Inputs& x)
        : p(p), qkv(to_bf16(x.qkv)), out((size_t)p.B * p.T * p.C()), lse((size_t)p.B * p.NH * p.stride()),
          slopes(slopes_of(p)), S(x.S), g(x.g), table(x.table), key_norm((size_t)2 * p.B * p.NH * ceil_div(p.T, 64)),
          origin(x.origin), kv_len(p.kv_len), documents(p.documents), span(key_norm.n / 2),
          fire(x.fire, p.NH, p.stride(), p.causal) {
        if (!p.span.empty()) { span.set(p.span); }
    }
    static std::vector<float> slopes_of(const Problem& p) {
        std::vector<float> slopes;
        for (int h = 0; h < p.NH; h++) { slopes.push_back((float)slope_of_head(h, p.NH)); }
        return slopes;
    }
    FlashArgs args() {
        FlashArgs a = {};                       // null: what the bias does not use must not be read
        a.qkv = qkv.p;
        a.out = out.p;
        a.lse = lse.p;
        a.B = p.B;
        a.T = p.T;
        a.stride = p.stride();
        a.NH = p.NH;
        a.HS = p.HS;
        a.OC = p.OC();
        a.scale = p.scale();
        if (!p.kv_len.empty()) { a.kv_len = kv_len.p; }
        if (!p.span.empty()) { a.span = span.p; }
        a.mask = p.mask;
        if (!p.documents.empty()) {
            a.mask.end_of_text = 0;
            a.mask.documents = documents.p;
            a.mask = a.mask.within(p.T);
        }
        if (p.Kind == FlashBias::Linear) { a.slopes = slopes.p; }
        if (p.Kind == FlashBias::Distance || p.Kind == FlashBias::LogDistance) {
            a.S_offset = S.p;
            a.g = g.p;
            a.S_origin = origin.p;
            a.inside = p.inside;
        }
        if (p.Kind == FlashBias::Toeplitz) {
            a.table = table.p;
            a.table_zero = p.stride() - 1;
            a.table_entries = p.entries();
        }
        if (p.Kind == FlashBias::Fire) { fire.fill(a); }
        return a;
    }
    Outputs run(const FlashArgs& a) {
        out.set(std::vector<bf16>(out.n, (bf16)NAN));
        lse.set(std::vector<float>(lse.n, NAN));
        EXPECT(p.causal ? launch_forward<true>(p.Kind, a) : launch_forward<false>(p.Kind, a),
               "%s: the launcher declines", p.text().c_str());
        Outputs y = {to_float(out.host()), {}};
        const std::vector<float> all = lse.host();
        for (size_t e = 0; e < all.size(); e++) {
            if ((int)(e % p.stride()) < p.T) { y.lse.push_back(all[e]); }
            else { EXPECT(all[e] != all[e], "%s: lse written after T", p.text().c_str()); }
        }
        return y;
    }
    Outputs run() { return run(args()); }
};

// Largest difference of finite values; infinite where one of the two is not finite and the other differs
static double lse_difference(const std::vector<float>& got, const std::vector<double>& want) {
    double worst = 0.0;
    for (size_t e = 0; e < want.size(); e++) {
        if (std::isinf(want[e]) && got[e] == want[e]) { continue; }
        const double d = std::fabs(got[e] - want[e]);
        if (!(d <= DBL_MAX)) { return INFINITY; }
        worst = std::max(worst, d);
    }
    return worst;
}
static double largest_finite(const std::vector<double>& v) {
    double x = 0.0;
    for (double e : v) { if (std::isfinite(e)) { x = std::max(x, std::fabs(e)); } }
    return x;
}

struct Worst { double out = 0, largest = 0, lse = 0; };         // shares of what is allowed

static void expect_oracle(const Problem& p, const Outputs& y, const Oracle& want, Worst& worst) {
    const double allowed = 2 * relative_l2(want.rounded.out, want.out), error = relative_l2(y.out, want.out);
    const double allowed_largest = 3 * largest_difference(want.rounded.out, want.out);
    const double largest = largest_difference(y.out, want.out);
    // float32 logits in another order of operations: several times the simulation's error, and never less than the
    // result's own ulp
    const double ulp = std::ldexp(largest_finite(want.lse), -22), lse = lse_difference(y.lse, want.lse);
    const double allowed_lse = 4 * (lse_difference(want.rounded.lse, want.lse) + ulp);
    EXPECT(error <= allowed, "%s: out off by %.3g, allowed %.3g", p.text().c_str(), error, allowed);
    EXPECT(largest <= allowed_largest, "%s: one element of out off by %.3g, allowed %.3g", p.text().c_str(), largest,
           allowed_largest);
    EXPECT(lse <= allowed_lse, "%s: lse off by %.3g, allowed %.3g", p.text().c_str(), lse, allowed_lse);
    if (allowed > 0) { worst.out = std::max(worst.out, error / allowed); }
    if (allowed_largest > 0) { worst.largest = std::max(worst.largest, largest / allowed_largest); }
    if (allowed_lse > 0) { worst.lse = std::max(worst.lse, lse / allowed_lse); }
}
static void run_case(const Problem& p, uint64_t seed, Worst& worst) {
    const Inputs x = make_inputs(p, seed);
    expect_oracle(p, Device(p, x).run(), oracle(p, x), worst);
}
static void report(const Worst& w) {
    INFO("of the allowed error: out %.2f, largest %.2f, lse %.2f", w.out, w.largest, w.lse);
}

static void every_length(FlashBias Kind, bool inside = false) {
    Worst worst;
    std::vector<int> lengths = {1, 17, 64, 65, 127, 128, 129, 200};
    if (on_gpu) { lengths.insert(lengths.end(), {192, 257, 512, 1000, 1024}); }
    for (bool causal : {true, false}) {
        for (int T : lengths) {
            Problem p = {Kind, causal, 1, T, T <= 65 || on_gpu ? 3 : 1, 64};
            p.inside = inside;
            run_case(p, (uint64_t)(1000 * T + 100 * causal), worst);
        }
        for (int T : {17, 129}) {
            run_case({Kind, causal, 1, T, 1, 128}, (uint64_t)(1000 * T + 100 * causal + 50), worst);
        }
        for (int HS : {32, 80, 96}) {                       // fewer columns than the kernel has
            run_case({Kind, causal, 1, 70, 2, HS}, (uint64_t)(1000 * HS + 100 * causal + 60), worst);
        }
        if (on_gpu) { run_case({Kind, causal, 3, 1000, 8, 128}, 77, worst); }
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
            run_case({Kind, causal, 3, 200, 1, 64, {0, 65, 130}}, 5, worst);
            run_case({Kind, causal, 3, 70, 1, 64, {1, 64, 75}}, 6, worst);
        }
    }
    run_case({FlashBias::Distance, false, 1, 200, 1, 128, {100}}, 7, worst);
    report(worst);
}

// Windows that end inside a tile and at its end, that leave out tiles between them and the sinks, sinks within a tile
// and (bidirectional) to the right of the window
KERNEL_TEST("flash forward: a window and sinks") {
    Worst worst;
    for (FlashBias Kind : BIASES) {
        for (bool causal : {true, false}) {
            for (const AttentionMask mask : {AttentionMask{1, 0}, AttentionMask{30, 3}, AttentionMask{64, 100}}) {
                Problem p = {Kind, causal, 2, 300, 1, 64, {300, 170}};
                p.mask = mask;
                run_case(p, 11, worst);
            }
        }
    }
    Problem p = {FlashBias::Distance, true, 1, 250, 1, 80};
    p.mask = {50, 1};
    p.span = {{0, 0}, {0, 1}, {1, 2}, {0, 3}};
    run_case(p, 12, worst);
    report(worst);
}
KERNEL_TEST("flash forward: documents apart") {
    Worst worst;
    for (FlashBias Kind : BIASES) {
        for (const AttentionMask mask : {AttentionMask{}, AttentionMask{30, 3}}) {
            Problem p = {Kind, true, 2, 250, 1, 64, {250, 170}};
            p.mask = mask;
            p.documents = draw_documents(2, p.stride(), 40, 17);
            run_case(p, 14, worst);
        }
    }
    Problem p = {FlashBias::Distance, true, 1, 250, 1, 80};
    p.documents = draw_documents(1, p.stride(), 100, 18);
    p.span = {{0, 0}, {0, 1}, {1, 2}, {0, 3}};
    run_case(p, 15, worst);
    report(worst);
}
KERNEL_TEST("flash forward: keys that no window shows are not read") {
    for (FlashBias Kind : BIASES) {
        Problem p = {Kind, true, 1, 330, 1, 64};
        p.mask = {40, 64};
        Inputs x = make_inputs(p, 13);
        for (int t = 64; t < 128; t++) {                    // a tile of keys and values: after the sinks
            std::fill_n(x.qkv.begin() + t * p.OC() + p.C(), 2 * p.C(), NAN);
        }
        const Outputs y = Device(p, x).run();
        for (size_t e = 192 * (size_t)p.C(); e < y.out.size(); e++) { EXPECT(std::isfinite(y.out[e]), "out %zu", e); }
    }
}

// A step to S = 1e5 within chunk 0: the distances between what follows it in the chunk and the next chunk are small
// again. In float32 origins they would be off by 2^-8, and the logits by g times that.
KERNEL_TEST("flash forward: small distances at a large S") {
    Worst worst;
    for (FlashBias Kind : {FlashBias::Distance, FlashBias::LogDistance}) {
        for (bool causal : {true, false}) {
            Problem p = {Kind, causal, 1, 270, 1, 64};
            p.b_std = 0.05;
            p.g_mean = 5.0;
            p.step_at = 100;
            run_case(p, 8, worst);
        }
    }
    report(worst);
}

// scores from flat to one-hot, distances from none to steps of 50, weights from e^-30 to 20
KERNEL_TEST("flash forward: scales of q, k, b and g") {
    Worst worst;
    const double b_std[] = {0.0, 0.02, 0.55, 2.0, 50.0};
    for (FlashBias Kind : {FlashBias::Distance, FlashBias::LogDistance}) {
        for (int e = 0; e < 5; e++) {
            Problem p = {Kind, e % 2 == 0, 1, 150, 1, 64};
            p.b_std = b_std[e];
            run_case(p, 10 + e, worst);
        }
        for (double g : {-30.0, 20.0}) {
            for (bool causal : {true, false}) {
                Problem p = {Kind, causal, 1, 150, 1, 64};
                p.g_mean = g;
                p.g_std = 0.0;
                run_case(p, 20 + (g > 0), worst);
            }
        }
    }
    for (FlashBias Kind : BIASES) {
        for (double qk : {0.1, 4.0}) {
            Problem p = {Kind, qk < 1.0, 1, 150, 1, 64};
            p.qk = qk;
            run_case(p, 30, worst);
        }
    }
    report(worst);
}

// D to 1e6, g of 100, scores 200 apart: P would be 0 everywhere if the bias were a factor after the exponential
KERNEL_TEST("flash forward: log distance at its extremes") {
    Worst worst;
    for (bool inside : {false, true}) {
        for (bool causal : {true, false}) {
            Problem p = {FlashBias::LogDistance, causal, 1, 200, 1, 64};
            p.inside = inside;
            p.qk = 8.0;
            p.b_std = 2e4;
            p.g_mean = 100.0;
            p.g_std = 0.0;
            run_case(p, 40, worst);
        }
    }
    report(worst);
}

static bool same(const Outputs& a, const Outputs& b) { return same_bits(a.out, b.out) && same_bits(a.lse, b.lse); }

KERNEL_TEST("flash forward: distance of b = 0 is none, of b = 1 and g = m_h linear, bit by bit") {
    for (bool causal : {true, false}) {
        const Problem none = {FlashBias::None, causal, 2, 200, 1, 64, {200, 90}};
        const Problem line = {FlashBias::Linear, causal, 1, 200, 3, 64};
        for (const Problem& p : {none, line}) {
            Problem distance = p;
            distance.Kind = FlashBias::Distance;
            distance.b_std = 0.0;
            distance.b_mean = p.Kind == FlashBias::None ? 0.0 : 1.0;
            Inputs x = make_inputs(distance, 40);
            for (int e = 0; e < (int)x.g.size() && p.Kind == FlashBias::Linear; e++) {
                x.g[e] = (float)slope_of_head(e / p.stride() % p.NH, p.NH);
            }
            EXPECT(same(Device(distance, x).run(), Device(p, x).run()), "%s", p.text().c_str());
        }
    }
}

KERNEL_TEST("flash forward: a far distance leaves every query its own value") {
    for (bool causal : {true, false}) {
        Problem p = {FlashBias::Distance, causal, 1, 200, 2, 64};
        p.b_mean = 1e4;
        p.b_std = 1.0;
        const Inputs x = make_inputs(p, 41);
        std::vector<float> v;
        for (int t = 0; t < p.T; t++) {
            const float* row = &x.qkv[(size_t)t * p.OC() + 2 * p.C()];
            v.insert(v.end(), row, row + p.C());
        }
        EXPECT(same_bits(Device(p, x).run().out, v), "%s", p.text().c_str());
    }
}

KERNEL_TEST("flash forward: the origin of S does not matter, nor the order of the threads, nor that lse is saved") {
    for (bool causal : {true, false}) {
        Problem p = {FlashBias::Distance, causal, 1, 200, 1, 64}, far = p;
        far.origin = 16777216.0;                                    // here float32 counts in twos
        Device device(p, make_inputs(p, 42));
        const Outputs y = device.run();
        EXPECT(same(Device(far, make_inputs(far, 42)).run(), y), "%s: S shifted", p.text().c_str());
        EXPECT(same(device.run(), y), "%s: run twice", p.text().c_str());
        FlashArgs a = device.args();
        a.lse = nullptr;
        EXPECT(same_bits(device.run(a).out, y.out), "%s: without lse", p.text().c_str());
    }
}

KERNEL_TEST("flash forward: other head sizes are declined") {
    const Problem p = {FlashBias::None, true, 1, 17, 1, 24};
    Device device(p, make_inputs(p, 43));
    EXPECT((!flash_forward<true, FlashBias::None>(device.args(), Stream(0))), "HS 24 accepted");
    for (float x : to_float(device.out.host())) { EXPECT(x != x, "written: %g", (double)x); }
}

// ----------------------------------------------------------------------------------------------------------
// skipped tiles

// q_i.k_j over sqrt(HS)
static double score_of(const Problem& p, const Inputs& x, int bh, int i, int j) {
    const float* base = &x.qkv[(size_t)(bh / p.NH) * p.stride() * p.OC() + bh % p.NH * p.HS];
    double dot = 0.0;
    for (int d = 0; d < p.HS; d++) {
        dot += (double)base[(size_t)i * p.OC() + d] * base[(size_t)j * p.OC() + p.C() + d];
    }
    return p.scale() * dot;
}

// log2 of the largest weight, relative to the largest one of its row, among what the spans leave out
static double largest_skipped(const Problem& p, const Inputs& x, const std::vector<FlashSpan>& span) {
    double worst = -INFINITY;
    for (int bh = 0; bh < p.B * p.NH; bh++) {
        for (int i = 0; i < p.T; i++) {
            const int tokens = p.keys(bh / p.NH);
            const int visible = p.causal ? i + 1 : tokens;
            const int keys = i >= tokens ? 0 : visible;
            const FlashSpan live = span[(size_t)bh * ceil_div(p.T, 64) + i / 64];
            double skipped = -INFINITY, top = -INFINITY;
            for (int j = 0; j < keys; j++) {
                const double l = score_of(p, x, bh, i, j) + bias_of(p, x, bh, i, j);
                top = std::max(top, l);
                if (j / 64 < live.first || j / 64 > live.last) { skipped = std::max(skipped, l); }
            }
            if (keys > 0) { worst = std::max(worst, (skipped - top) / std::log(2.0)); }
        }
    }
    return worst;
}

// The spans by the bound of flash/bias.cuh, in float64 and tile by tile
static std::vector<FlashSpan> bounded_spans(const Problem& p, const Inputs& x, double tau) {
    std::vector<FlashSpan> span;
    for (int bh = 0; bh < p.B * p.NH; bh++) {
        const int keys = p.keys(bh / p.NH), live = ceil_div(keys, 64);
        const float* base = &x.qkv[(size_t)(bh / p.NH) * p.stride() * p.OC() + bh % p.NH * p.HS];
        std::vector<double> q_norm(keys, 0.0), k_norm(keys, 0.0);
        for (int t = 0; t < keys; t++) {
            for (int d = 0; d < p.HS; d++) {
                q_norm[t] += std::pow(base[(size_t)t * p.OC() + d], 2);
                k_norm[t] += std::pow(base[(size_t)t * p.OC() + p.C() + d], 2);
            }
        }
        for (int m = 0; m < ceil_div(p.T, 64); m++) {
            FlashSpan s = {m, m};
            for (int i = 64 * m; i < std::min(keys, 64 * (m + 1)); i++) {
                const double needed = score_of(p, x, bh, i, i) - tau * std::log(2.0);
                const auto skipped = [&](int begin, int end, int nearest) {             // the keys from begin to end
                    const double largest = std::sqrt(*std::max_element(k_norm.begin() + begin, k_norm.begin() + end));
                    return p.scale() * std::sqrt(q_norm[i]) * largest + bias_of(p, x, bh, i, nearest) < needed;
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

template <bool Causal> static std::vector<FlashSpan> spans(Device& device, float tau) {
    const FlashArgs a = device.args();
    device.span.set(std::vector<FlashSpan>(device.span.n, {-1, -1}));
    if (device.p.Kind == FlashBias::Linear) {
        flash_skip<Causal, FlashBias::Linear>(device.span.p, device.key_norm.p, a, tau, Stream(0));
    } else {
        flash_skip<Causal, FlashBias::Distance>(device.span.p, device.key_norm.p, a, tau, Stream(0));
    }
    return device.span.host();
}
// flash_skip's spans; they are the oracle's, but for a bound that float32 may round either way
static std::vector<FlashSpan> skip(Device& device, const Inputs& x, float tau) {
    const Problem& p = device.p;
    const std::vector<FlashSpan> span = p.causal ? spans<true>(device, tau) : spans<false>(device, tau);
    const std::vector<FlashSpan> less = bounded_spans(p, x, tau - 0.01), more = bounded_spans(p, x, tau + 0.01);
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
static void expect_unread(Device& device, const Inputs& x, const std::vector<FlashSpan>& span, const Outputs& all,
                          const FlashArgs& a, int n) {
    const Problem& p = device.p;
    Inputs poisoned = x;
    for (size_t t = 0; t < (size_t)p.B * p.stride(); t++) {
        if ((int)(t % p.stride()) / 64 == n) { std::fill_n(&poisoned.qkv[t * p.OC() + p.C()], 2 * p.C(), NAN); }
    }
    device.qkv.set(to_bf16(poisoned.qkv));
    const std::vector<float> without = device.run(a).out;
    device.qkv.set(to_bf16(x.qkv));
    for (size_t e = 0; e < without.size(); e++) {
        const int t = (int)(e / p.C() % p.T), bh = (int)(e / p.C() / p.T) * p.NH + (int)(e % p.C()) / p.HS;
        const FlashSpan live = span[(size_t)bh * ceil_div(p.T, 64) + t / 64];
        if (n >= live.first && n <= live.last) { continue; }
        EXPECT(without[e] == all.out[e], "%s: row %d reads the skipped tile %d", p.text().c_str(), t, n);
    }
}

// tiles of keys that a sequence has left and right of its spans
struct Skipped { int left = 0, right = 0; };
static Skipped skipped_tiles(const Problem& p, const std::vector<FlashSpan>& span) {
    Skipped n;
    for (int e = 0; e < (int)span.size(); e++) {
        const int tiles = ceil_div(p.T, 64);
        const int m = e % tiles;
        const int live = ceil_div(p.keys(e / tiles / p.NH), 64);
        if (m >= live) { continue; }
        n.left += span[e].first;
        n.right += (p.causal ? m : live - 1) - span[e].last;
    }
    return n;
}

// Sides: which ones have tiles to skip
enum Sides { Neither, Left, Right, Both };
static void check_skipping(const Problem& p, uint64_t seed, Sides sides,
                           const std::function<void(Inputs&)>& change = [](Inputs&) {}) {
    Inputs x = make_inputs(p, seed);
    change(x);
    Device device(p, x);
    const Outputs all = device.run();
    const std::vector<FlashSpan> exact = skip(device, x, 128.0f);
    const Skipped n = skipped_tiles(p, exact);
    EXPECT((n.left > 0) == (sides == Left || sides == Both) && (n.right > 0) == (sides == Right || sides == Both),
           "%s: %d tiles are skipped on the left, %d on the right", p.text().c_str(), n.left, n.right);
    EXPECT(largest_skipped(p, x, exact) < -126.0, "%s: tau 128 leaves out 2^%.1f of a row", p.text().c_str(),
           largest_skipped(p, x, exact));
    FlashArgs a = device.args();
    a.span = device.span.p;
    Outputs some = device.run(a), every = all;
    for (Outputs* y : {&some, &every}) {    // the sign of a zero that padding gets depends on what it has seen
        for (size_t e = 0; e < y->out.size(); e++) {
            if ((int)(e / p.C() % p.T) >= p.keys((int)(e / p.C() / p.T))) { y->out[e] += 0.0f; }
        }
    }
    EXPECT(same(some, every), "%s: skipping at tau 128 changes bits", p.text().c_str());
    expect_unread(device, x, exact, all, a, 0);
    if (!p.causal) { expect_unread(device, x, exact, all, a, (p.keys(0) - 1) / 64); }

    const float tau = flash_skip_tau(p.T);
    const std::vector<FlashSpan> fast = skip(device, x, tau);
    const double share = flash_live_share(exact.data(), p.B * p.NH, p.T, p.causal);
    const double fast_share = flash_live_share(fast.data(), p.B * p.NH, p.T, p.causal);
    const int tiles = ceil_div(p.T, 64);
    const int all_tiles = p.B * p.NH * (p.causal ? tiles * (tiles + 1) / 2 : tiles * tiles);
    EXPECT(!p.kv_len.empty() || std::fabs((1.0 - share) * all_tiles - (n.left + n.right)) < 1e-9,
           "%s: a share of %.3f, %d tiles of %d are skipped", p.text().c_str(), share, n.left + n.right, all_tiles);
    EXPECT(fast_share <= share, "%s: tau %.1f computes more than tau 128", p.text().c_str(), (double)tau);
    EXPECT(largest_skipped(p, x, fast) < -tau, "%s: tau %.1f leaves out 2^%.1f of a row", p.text().c_str(), (double)tau,
           largest_skipped(p, x, fast));
    Worst worst;
    expect_oracle(p, device.run(a), oracle(p, x), worst);
    if (!p.causal && sides != Both) { return; }
    INFO("%s: left %d, right %d, live tiles %.2f, %.2f by default", p.text().c_str(), n.left, n.right, share,
         fast_share);
}

KERNEL_TEST("flash skip: tau 128 changes no bit, tau 24 + log2 T no digit") {
    Problem p = {FlashBias::Distance, true, 1, 264, 1, 64};
    p.b_std = 8.0;
    p.g_mean = 4.0;
    check_skipping(p, 50, Left);
    p.B = 2;
    p.kv_len = {150, 0};
    check_skipping(p, 52, Left);
    check_skipping({FlashBias::Linear, true, 1, 520, 3, 64, {}, 0.1}, 53, Left);
    p = {FlashBias::Distance, true, 2, 2048, 3, 128};
    p.b_std = 2.0;
    if (on_gpu) { check_skipping(p, 54, Left); }
}

KERNEL_TEST("flash skip: bidirectional, on either side, both, none") {
    Problem p = {FlashBias::Distance, false, 1, 264, 1, 64};
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
                for (float* q = &x.qkv[t * p.OC()]; q < &x.qkv[t * p.OC() + 64]; q++) { q[64] = 1024.0f * q[0]; }
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
    p.B = 2;
    p.kv_len = {200, 0};
    check_skipping(p, 60, Both);
    p = {FlashBias::Distance, false, 1, 264, 1, 64, {250}};
    p.step_at = 128;    // between two tiles: far from all of the one side, near all of the other
    check_skipping(p, 61, Both);
    check_skipping({FlashBias::Linear, false, 1, 520, 3, 64, {}, 0.1}, 62, Both);
    check_skipping({FlashBias::Linear, false, 1, 520, 1, 64, {500}, 0.1}, 63, Neither);
    p = {FlashBias::Distance, false, 2, 2048, 3, 128, {2048, 1500}};
    p.b_std = 2.0;
    if (on_gpu) { check_skipping(p, 64, Both); }
}

// A span is obeyed, not just harmless: with tiles that matter left out, the result is the oracle's that leaves them out
// too.
KERNEL_TEST("flash forward: a span leaves out exactly its tiles") {
    Worst worst;
    const std::vector<FlashSpan> spans[] = {
        {{0, 0}, {1, 3}, {0, 2}, {3, 3}}, {{0, 3}, {0, 1}, {2, 2}, {1, 3}}, {{0, 2}, {1, 1}, {1, 3}, {0, 3}}};
    for (FlashBias Kind : {FlashBias::Linear, FlashBias::Distance}) {
        for (bool causal : {true, false}) {
            for (const std::vector<FlashSpan>& span : spans) {
                Problem p = {Kind, causal, 1, 230, 1, 64, {220}};
                p.span = span;
                run_case(p, 65, worst);
            }
        }
    }
    report(worst);
}

// A short slope and long vectors: nothing may be skipped, and a NaN among the keys forbids it too
KERNEL_TEST("flash skip: nothing is skipped without a reason") {
    for (bool causal : {true, false}) {
        Problem p = {FlashBias::Distance, causal, 1, 200, 1, 64};
        p.b_std = 0.01;
        Inputs x = make_inputs(p, 60);
        Device device(p, x);
        Skipped n = skipped_tiles(p, skip(device, x, 128.0f));
        EXPECT(n.left == 0 && n.right == 0, "%d tiles on the left, %d on the right", n.left, n.right);
        p.b_std = 50.0;
        x = make_inputs(p, 61);
        device.S.set(x.S);
        device.origin.set(x.origin);
        device.g.set(x.g);
        device.qkv.set(to_bf16(x.qkv));
        n = skipped_tiles(p, skip(device, x, 128.0f));
        EXPECT(n.left > 0 && (causal || n.right > 0), "with steps of 50: %d tiles on the left, %d on the right", n.left,
               n.right);
        for (int t : {3, 198}) {                            // in the first tile, and in the last
            Inputs nan = x;
            nan.qkv[(size_t)t * p.OC() + p.C()] = NAN;
            device.qkv.set(to_bf16(nan.qkv));
            for (const FlashSpan& s : causal ? spans<true>(device, 128.0f) : spans<false>(device, 128.0f)) {
                EXPECT(t != 3 || s.first == 0, "tile %d is the first, and a key before it is NaN", s.first);
                EXPECT(t != 198 || causal || s.last == 3, "tile %d is the last, and a key after it is NaN", s.last);
            }
        }
    }
}
