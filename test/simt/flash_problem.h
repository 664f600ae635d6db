// flash_problem.h -- one call of the tensor-core attention: its inputs, a float64 oracle of all that it computes, and
// its arrays as a trainer lays them out.
#pragma once

#include "llmc/attention.cuh"
#include "llmc/attention/flash/backward.cuh"
#include "llmc/attention/flash/forward.cuh"
#include "llmc/position/toeplitz.cuh"

#include "test/layers/attention_oracle.h"
#include "test/simt/fire_inputs.h"
#include "test/simt/kernel_test.h"
#include "test/simt/shared_flash.h"

namespace {

using Doubles = std::vector<double>;
using Spans = std::vector<FlashSpan>;
constexpr FlashBias BIASES[] = {FlashBias::None, FlashBias::Linear, FlashBias::Distance, FlashBias::LogDistance,
                                FlashBias::Toeplitz, FlashBias::Fire};
const char* const BIAS_NAMES[] = {"None", "Linear", "Distance", "LogDistance", "Toeplitz", "Fire"};

// f(K): K.value is Kind
template <class F> auto with_kind(FlashBias Kind, F f) {
    switch (Kind) {
        case FlashBias::None: return f(std::integral_constant<FlashBias, FlashBias::None>());
        case FlashBias::Linear: return f(std::integral_constant<FlashBias, FlashBias::Linear>());
        case FlashBias::Distance: return f(std::integral_constant<FlashBias, FlashBias::Distance>());
        case FlashBias::LogDistance: return f(std::integral_constant<FlashBias, FlashBias::LogDistance>());
        case FlashBias::Fire: return f(std::integral_constant<FlashBias, FlashBias::Fire>());
        default: return f(std::integral_constant<FlashBias, FlashBias::Toeplitz>());
    }
}

struct Shape { int B, T, NH, HS; };

struct Problem {
    FlashBias Kind;
    bool causal;
    Shape s;
    std::vector<int> kv_len = {};                   // empty: none
    // how the inputs are drawn: a factor on q and k; CABLE's b, and the argument of the softplus that g is
    double qk = 1;
    double b_mean = 0.2, b_std = 0.2;
    double g_mean = 0, g_std = 1;
    int step_at = -1;                               // a token whose b is 1e5
    bool inside = false;                            // the weight of LogDistance is inside the logarithm
    int blind = -1;                                 // a query whose lse is given as -inf: it saw no key
    Spans span = {};                                // empty: nothing is left out
    AttentionMask mask = {};
    std::vector<int> documents = {};                // (B,T): where each token's begins

    int heads() const { return s.B * s.NH; }
    int tiles() const { return ceil_div(s.T, FLASH_TILE); }
    int keys(int bh) const { return kv_len.empty() ? s.T : std::min(s.T, kv_len[(size_t)(bh / s.NH)]); }
    bool is_cable() const { return Kind == FlashBias::Distance || Kind == FlashBias::LogDistance; }
    double scale() const { return (float)(1 / std::sqrt((double)s.HS)); }
    bool visible(int bh, int i, int j) const {
        if (i == blind || i >= keys(bh) || j >= keys(bh) || (causal && j > i)) { return false; }
        const int document = documents.empty() ? 0 : documents[(size_t)(bh / s.NH * s.T + i)];
        if (j < document) { return false; }
        if (mask.window > 0 && std::abs(i - j) >= mask.window && j >= document + mask.sinks) { return false; }
        if (span.empty()) { return true; }
        const FlashSpan live = span[(size_t)bh * tiles() + i / FLASH_TILE];
        return j / FLASH_TILE >= live.first && j / FLASH_TILE <= live.last;
    }
    std::string text() const {
        return strprintf("%s %s B %d T %d NH %d HS %d%s", BIAS_NAMES[(int)Kind], causal ? "causal" : "full", s.B, s.T,
                         s.NH, s.HS, kv_len.empty() ? "" : " kv_len");
    }
};

// Press et al. 2022
double slope_of_head(int h, int NH) {
    int power = 1;
    while (2 * power <= NH) { power *= 2; }
    return (float)std::pow(2.0, h < power ? -8.0 * (h + 1) / power : -4.0 * (2 * (h - power) + 1) / power);
}
double bf16_of(double x) { return (double)(float)(bf16)(float)x; }

// Every value is exactly what the kernel reads.
struct Inputs : Problem {
    Doubles q, k, v, dout;                          // (B*NH,T,HS); without dout the oracle is of the forward only
    Doubles S, g;                                   // (B*NH,T)
    std::vector<float> S_offset;                    // (B*NH,T) and what S was made of, in chunks
    Doubles S_origin;                               // (B*NH,chunks)
    Doubles table;                                  // (NH,2T-1) by j - i
    FireInputs fire;

    Inputs(const Problem& p, uint64_t seed) : Problem(p), fire(p.s.NH, seed + 8) {
        const size_t n = (size_t)heads() * s.T, chunks = (size_t)ceil_div(s.T, CABLE_CHUNK);
        const auto draw = [&](uint64_t stream, double factor) {
            Doubles x = as<double>(normals(n * s.HS, seed + stream));
            for (double& e : x) { e = bf16_of(factor * bf16_of(e)); }
            return x;
        };
        q = draw(1, qk);
        k = draw(2, qk);
        v = draw(3, 1);
        dout = draw(4, 1);
        g = as<double>(normals(n, seed + 5, g_std, g_mean));
        for (double& x : g) { x = (float)std::log1p(std::exp(x)); }
        const std::vector<float> b = normals(n, seed + 6, b_std, b_mean);
        S_offset.resize(n);
        S.resize(n);
        S_origin.resize((size_t)heads() * chunks);
        for (size_t bh = 0; bh < (size_t)heads(); bh++) {
            double origin = 0;
            float offset = 0;
            for (size_t t = 0; t < (size_t)s.T; t++) {
                if (t % CABLE_CHUNK == 0) {
                    origin += offset;
                    offset = 0;
                    S_origin[bh * chunks + t / CABLE_CHUNK] = origin;
                }
                offset += (int)t == step_at ? 1e5f : std::max(0.0f, b[bh * s.T + t]);
                S_offset[bh * s.T + t] = offset;
                S[bh * s.T + t] = origin + offset;
            }
        }
        table = as<double>(normals((size_t)s.NH * (2 * s.T - 1), seed + 7));
    }
    double bias(int bh, int i, int j) const {
        const size_t at = (size_t)bh * s.T;
        switch (Kind) {
            case FlashBias::Linear: return -slope_of_head(bh % s.NH, s.NH) * std::abs(i - j);
            case FlashBias::Distance: return -g[at + i] * std::fabs(S[at + i] - S[at + j]);
            case FlashBias::LogDistance: {
                const double a = (inside ? g[at + i] : 1.0) * (S[at + i] - S[at + j]);
                return -(inside ? 1.0 : g[at + i]) * std::log1p(a * a);
            }
            case FlashBias::Toeplitz: return table[(size_t)(bh % s.NH) * (2 * s.T - 1) + s.T - 1 + j - i];
            case FlashBias::Fire: return fire.f(bh % s.NH, fire.y(i, j));
            default: return 0;
        }
    }
    // q_i.k_j over sqrt(HS)
    double score(int bh, int i, int j) const {
        double dot = 0;
        const size_t at = (size_t)bh * s.T;
        for (size_t d = 0; d < (size_t)s.HS; d++) { dot += q[(at + i) * s.HS + d] * k[(at + j) * s.HS + d]; }
        return scale() * dot;
    }
};

constexpr size_t FIRE_SIZE = FIRE_PIECES * FIRE_SUMS;

// layouts as in Inputs; dtable (B*NH,2T-1), fire (B*NH,FIRE_PIECES,FIRE_SUMS)
struct Results {
    Doubles out, lse, dq, dk, dv, dS, dg, dtable, fire;
    explicit Results(const Problem& p) {
        const size_t n = (size_t)p.heads() * p.s.T;
        for (Doubles* x : {&out, &dq, &dk, &dv}) { x->assign(n * p.s.HS, 0); }
        for (Doubles* x : {&lse, &dS, &dg}) { x->assign(n, 0); }
        dtable.assign((size_t)p.heads() * (2 * p.s.T - 1), 0);
        fire.assign((size_t)p.heads() * FIRE_SIZE, 0);
    }
};
bool same(const Results& a, const Results& b) {
    return same_bits(a.out, b.out) && same_bits(a.lse, b.lse) && same_bits(a.dq, b.dq) && same_bits(a.dk, b.dk) &&
           same_bits(a.dv, b.dv) && same_bits(a.dS, b.dS) && same_bits(a.dg, b.dg) && same_bits(a.dtable, b.dtable) &&
           same_bits(a.fire, b.fire);
}

// ----------------------------------------------------------------------------------------------------------
// the oracle

// Float32: plain loops in float32, without the roundings of a kernel
enum Roundings { Exact, Backward, ForwardAndBackward, Float32 };

// += what the bias gets from dlogit of a pair: derivatives of the logit by S_i (by S_j: the same, negated) and by g_i
void add_bias_gradients(Results& r, const Inputs& p, int bh, int i, int j, double dlogit) {
    const size_t at = (size_t)bh * p.s.T;
    const double distance = p.S[at + i] - p.S[at + j], g = p.g[at + i];
    double by_S = 0, by_g = 0;
    if (p.Kind == FlashBias::Distance) {
        by_S = i >= j ? -g : g;
        by_g = -std::fabs(distance);
    }
    if (p.Kind == FlashBias::LogDistance) {
        const double a = p.inside ? g * distance : distance;
        by_S = -2 * g * a / (1 + a * a);
        by_g = p.inside ? -2 * distance * a / (1 + a * a) : -std::log1p(a * a);
    }
    r.dS[at + i] += dlogit * by_S;
    r.dS[at + j] -= dlogit * by_S;
    r.dg[at + i] += dlogit * by_g;
    r.dtable[(size_t)bh * (2 * p.s.T - 1) + p.s.T - 1 + j - i] += dlogit;
    if (p.Kind == FlashBias::Fire) {
        const size_t piece = (size_t)bh * FIRE_PIECES + p.fire.piece(p.fire.y(i, j));
        p.fire.add(&r.fire[piece * FIRE_SUMS], i, j, dlogit);
    }
}
// One head, straight from the equations, or with the roundings of the kernels
void oracle_head(Results& r, const Inputs& p, int bh, Roundings roundings) {
    const size_t T = (size_t)p.s.T, HS = (size_t)p.s.HS;
    const auto of = [&](const Doubles& x) {
        return x.empty() ? x : Doubles(&x[bh * T * HS], &x[bh * T * HS] + T * HS);
    };
    const auto put = [&](Doubles& to, const auto& x) { std::copy(x.begin(), x.end(), &to[bh * x.size()]); };
    const Doubles q = of(p.q), k = of(p.k);
    const Doubles v = of(p.v), dout = of(p.dout);
    Doubles bias(T * T, -INFINITY);
    for (int e = 0; e < (int)bias.size(); e++) {
        const int i = e / p.s.T, j = e % p.s.T;
        if (p.visible(bh, i, j)) { bias[(size_t)e] = p.bias(bh, i, j); }
    }
    const auto keep = [&](const auto& head) {
        put(r.out, head.out);
        put(r.lse, head.lse);
        if (dout.empty()) { return; }
        put(r.dq, head.dq);
        put(r.dk, head.dk);
        put(r.dv, head.dv);
        for (int e = 0; e < (int)bias.size(); e++) {
            if (bias[(size_t)e] == -INFINITY) { continue; }
            const int i = e / p.s.T, j = e % p.s.T;
            add_bias_gradients(r, p, bh, i, j, head.dbias[(size_t)e]);
        }
    };
    if (roundings == Float32) {
        keep(HeadOracle<float>(as<float>(q), as<float>(k), as<float>(v), as<float>(bias), as<float>(dout),
                               (float)p.scale(), T, HS, false));
        return;
    }
    if (roundings == ForwardAndBackward) {
        keep(HeadOracle<double, bf16>(q, k, v, bias, dout, p.scale(), T, HS, false));
        return;
    }
    const HeadOracle<double> exact(q, k, v, bias, roundings == Exact ? dout : Doubles(), p.scale(), T, HS, false);
    if (roundings == Exact) {
        keep(exact);
        return;
    }
    HeadOracle<double, bf16> rounded(q, k, v, bias, {}, p.scale(), T, HS, false);
    Doubles out = rounded.out = exact.out, lse = rounded.lse = exact.lse;       // the forward's are given
    for (double& x : out) { x = bf16_of(x); }
    for (double& x : lse) { x = (float)x; }
    rounded.backward(q, k, v, dout, out, lse);
    keep(rounded);
}
Results oracle(const Inputs& p, Roundings roundings) {
    Results r(p);
#if defined(_OPENMP)                                        // on the hardware's grid this is what takes the time
#pragma omp parallel for schedule(dynamic)
#endif
    for (int bh = 0; bh < p.heads(); bh++) { oracle_head(r, p, bh, roundings); }    // no two share an element of r
    if (roundings != Exact) { for (Doubles* x : {&r.dq, &r.dk, &r.dv}) { for (double& y : *x) { y = bf16_of(y); } } }
    return r;
}

// ----------------------------------------------------------------------------------------------------------
// the kernels

int slabs_at_a_time = 0;                                    // of a Toeplitz bias; 0: the launcher's choice
template <bool Causal> bool launch_backward(const Problem& p, const FlashArgs& args, float* scratch) {
    if (slabs_at_a_time > 0) {
        constexpr FlashBias Kind = FlashBias::Toeplitz;
        if (p.s.HS == 128) { flash_backward_of<Causal, Kind, 128>(args, scratch, Stream(0), slabs_at_a_time); }
        else { flash_backward_of<Causal, Kind, 64>(args, scratch, Stream(0), slabs_at_a_time); }
        return true;
    }
    return with_kind(p.Kind, [&](auto K) { return flash_backward<Causal, K.value>(args, scratch, Stream(0)); });
}
bool launch_forward(const Problem& p, const FlashArgs& args) {
    return with_kind(p.Kind, [&](auto K) {
        return p.causal ? flash_forward<true, K.value>(args, Stream(0))
                        : flash_forward<false, K.value>(args, Stream(0));
    });
}

// The arrays as a trainer lays them out: qkv in rows longer than 3C, capacity beyond T. What is not an input is NaN,
// and so are the keys and values after kv_len, which only the backward reads.
struct Device {
    const Inputs& p;
    int C, OC, stride, chunks, entries;
    DeviceArray<bf16> qkv, out, dout;
    DeviceArray<float> slopes, lse, S, g, table, key_norm;
    DeviceArray<double> origin;
    DeviceArray<int> kv_len, documents;
    DeviceArray<FlashSpan> span;
    FireArrays fire;

    // forward: out and lse, where the forward kernel is not to compute them
    explicit Device(const Inputs& p, const Results* forward = nullptr)
        : p(p), C(p.s.NH * p.s.HS), OC(round_up(3 * C + 2 * p.s.NH, 8)), stride(p.s.T + 7),
          chunks(ceil_div(stride, CABLE_CHUNK)), entries((p.causal ? stride : 2 * stride - 1) + TOEPLITZ_PAD),
          qkv(packed(p)), out((size_t)p.s.B * p.s.T * C), dout(rows(p.dout)), slopes((size_t)p.s.NH),
          lse((size_t)p.heads() * stride), S(over_time(p.S_offset)), g(over_time(p.g)),
          table(tables()), key_norm((size_t)2 * p.heads() * p.tiles()), origin((size_t)p.heads() * chunks),
          kv_len(p.kv_len), documents(p.documents.empty() ? 0 : (size_t)p.s.B * stride), span(key_norm.n / 2),
          fire(p.fire, p.s.NH, stride, p.causal) {
        std::vector<float> m;
        for (int h = 0; h < p.s.NH; h++) { m.push_back((float)slope_of_head(h, p.s.NH)); }
        slopes.set(m);
        if (forward != nullptr) {
            out.set(rows(forward->out));
            lse.set(over_time(forward->lse));
        }
        Doubles origins(origin.n, NAN);
        const size_t used = (size_t)ceil_div(p.s.T, CABLE_CHUNK);
        for (size_t e = 0; e < p.S_origin.size(); e++) { origins[e / used * chunks + e % used] = p.S_origin[e]; }
        origin.set(origins);
        std::vector<int> begins;                            // (B,stride)
        for (int b = 0; b < p.s.B && !p.documents.empty(); b++) {
            begins.insert(begins.end(), p.documents.begin() + b * p.s.T, p.documents.begin() + (b + 1) * p.s.T);
            begins.resize((size_t)((b + 1) * stride), INT_MAX);
        }
        documents.set(begins);
    }
    // element e of (B*NH,T,HS) in rows of `width`; a sequence has `length` rows
    size_t place(size_t e, int length, int width) const {
        const size_t bh = e / p.s.HS / p.s.T, t = e / p.s.HS % p.s.T;
        return (bh / p.s.NH * length + t) * width + bh % p.s.NH * p.s.HS + e % p.s.HS;
    }
    bool is_padding(size_t e) const { return (int)(e / p.s.HS % p.s.T) >= p.keys((int)(e / p.s.HS / p.s.T)); }
    std::vector<bf16> packed(const Inputs& from) const {
        std::vector<bf16> x((size_t)p.s.B * stride * OC, (bf16)NAN);
        for (size_t e = 0; e < from.q.size(); e++) {
            bf16* at = &x[place(e, stride, OC)];
            at[0] = (bf16)(float)from.q[e];
            if (is_padding(e) && p.dout.empty()) { continue; }
            at[C] = (bf16)(float)from.k[e];
            at[2 * C] = (bf16)(float)from.v[e];
        }
        return x;
    }
    // (B,T,C) of (B*NH,T,HS)
    std::vector<bf16> rows(const Doubles& x) const {
        std::vector<bf16> to((size_t)p.s.B * p.s.T * C, (bf16)NAN);
        for (size_t e = 0; e < x.size(); e++) { to[place(e, p.s.T, C)] = (bf16)(float)x[e]; }
        return to;
    }
    // (B*NH,stride) of (B*NH,T)
    template <class X> std::vector<float> over_time(const std::vector<X>& x) const {
        std::vector<float> to((size_t)p.heads() * stride, NAN);
        for (size_t e = 0; e < x.size(); e++) { to[e / p.s.T * stride + e % p.s.T] = (float)x[e]; }
        return to;
    }
    std::vector<float> tables() const {
        std::vector<float> to((size_t)p.s.NH * entries, 1e30f);
        const int T = p.s.T;
        for (size_t h = 0; h < (size_t)p.s.NH; h++) {
            for (int d = -(T - 1); d < (p.causal ? 1 : T); d++) {
                to[h * entries + stride - 1 + d] = (float)p.table[h * (2 * T - 1) + T - 1 + d];
            }
        }
        return to;
    }
    // of the forward; null: what the bias does not use must not be read
    FlashArgs args() {
        FlashArgs a = {};
        a.qkv = qkv.p; a.out = out.p; a.lse = lse.p;
        a.B = p.s.B; a.T = p.s.T; a.stride = stride; a.NH = p.s.NH; a.HS = p.s.HS; a.OC = OC;
        a.scale = (float)p.scale();
        if (!p.kv_len.empty()) { a.kv_len = kv_len.p; }
        if (!p.span.empty()) {
            span.set(p.span);
            a.span = span.p;
        }
        a.mask = p.mask;
        if (!p.documents.empty()) {
            a.mask.end_of_text = 0;
            a.mask.documents = documents.p;
            a.mask = a.mask.within(p.s.T);
        }
        if (p.Kind == FlashBias::Linear) { a.slopes = slopes.p; }
        if (p.is_cable()) {
            a.S_offset = S.p; a.g = g.p; a.S_origin = origin.p;
            a.inside = p.inside;
        }
        if (p.Kind == FlashBias::Toeplitz) {
            a.table = table.p;
            a.table_zero = stride - 1;
            a.table_entries = entries;
        }
        if (p.Kind == FlashBias::Fire) { fire.fill(a); }
        return a;
    }
    Results forward(const FlashArgs& a) {
        out.set(std::vector<bf16>(out.n, (bf16)NAN));
        lse.set(std::vector<float>(lse.n, NAN));
        EXPECT(launch_forward(p, a), "%s: the launcher declines", p.text().c_str());
        Results r(p);
        read_forward(r);
        return r;
    }
    Results forward() { return forward(args()); }
    void read_forward(Results& r) const {
        const std::vector<float> rows = to_float(out.host()), all = lse.host();
        for (size_t e = 0; e < r.out.size(); e++) {
            const float x = rows[place(e, p.s.T, C)];
            r.out[e] = is_padding(e) ? x + 0.0f : x;                // the sign of padding's zero says nothing
        }
        for (int e = 0; e < (int)all.size(); e++) {
            if (e % stride < p.s.T) { r.lse[e / stride * p.s.T + e % stride] = all[e]; }
            else { EXPECT(std::isnan(all[e]), "%s: lse written after T", p.text().c_str()); }
        }
    }
    // chained: out and lse come from the forward kernel, not from the oracle
    Results run(bool chained = false) {
        // 1. the arguments and the kernels
        const int T = p.s.T;
        const size_t BNH = (size_t)p.heads();
        DeviceArray<bf16> d_dqkv(qkv.n);
        DeviceArray<float> d_dS(lse.n), d_dg(lse.n), d_dtable(BNH * entries);
        DeviceArray<float> scratch(flash_backward_scratch(p.Kind, p.s.B, p.s.T, p.s.NH));
        DeviceArray<double> d_sums(BNH * FIRE_SLOTS * FIRE_SIZE);
        FlashArgs a = args();
        if (chained) { forward(a); }
        a.dout = dout.p;
        a.dqkv = d_dqkv.p;
        a.dS = d_dS.p;
        a.dg = d_dg.p;
        a.dtable = d_dtable.p;
        a.sums = d_sums.p;
        EXPECT(p.causal ? launch_backward<true>(p, a, scratch.p) : launch_backward<false>(p, a, scratch.p),
               "%s: the launcher declines", p.text().c_str());
        // 2. the results, and whether anything else was written
        const std::vector<float> dqkv = to_float(d_dqkv.host());
        const std::vector<float> dS = d_dS.host();
        const std::vector<float> dg = d_dg.host();
        const std::vector<float> dtable = d_dtable.host();
        const Doubles sums = d_sums.host();
        scratch.host();
        Results r(p);
        read_forward(r);
        for (size_t e = 0; e < r.dq.size(); e++) {
            const float* row = &dqkv[place(e, stride, OC)];
            r.dq[e] = row[0];
            r.dk[e] = row[C];
            r.dv[e] = row[2 * C];
        }
        bool outside = true;    // everything outside is unchanged; unreachable columns are 0
        for (int e = 0; e < (int)dqkv.size(); e++) {
            if (e % OC >= 3 * C || e / OC % stride >= T) { outside = outside && std::isnan(dqkv[(size_t)e]); }
        }
        for (int e = 0; e < (int)dS.size(); e++) {
            if (e % stride >= T) { outside = outside && std::isnan(dS[(size_t)e]); }
            else if (p.is_cable()) {
                r.dS[(size_t)(e / stride * T + e % stride)] = dS[(size_t)e];
                r.dg[(size_t)(e / stride * T + e % stride)] = dg[(size_t)e];
            }
        }
        for (size_t bh = 0; bh < BNH; bh++) {
            for (int x = 0; x < entries && p.Kind == FlashBias::Toeplitz; x++) {
                const int d = x - (stride - 1);
                const float value = dtable[bh * entries + x];
                if (d > -T && d < (p.causal ? 1 : T)) { r.dtable[bh * (2 * T - 1) + T - 1 + d] = value; }
                else { outside = outside && value == 0; }
            }
            for (size_t e = 0; e < FIRE_SLOTS * FIRE_SIZE && p.Kind == FlashBias::Fire; e++) {
                const double value = sums[bh * FIRE_SLOTS * FIRE_SIZE + e];
                if (e < FIRE_SIZE) { r.fire[bh * FIRE_SIZE + e] = value; }
                else { outside = outside && std::isnan(value); }
            }
        }
        EXPECT(outside, "%s: something was written where nothing belongs", p.text().c_str());
        return r;
    }
    // flash_skip's
    Spans spans(float tau) {
        FlashArgs a = args();
        a.span = nullptr;
        span.set(Spans(span.n, {-1, -1}));
        const auto skip = [&](auto Causal, auto K) {
            flash_skip<Causal.value, K.value>(span.p, key_norm.p, a, tau, Stream(0));
        };
        const auto of = [&](auto K) { p.causal ? skip(std::true_type(), K) : skip(std::false_type(), K); };
        if (p.Kind == FlashBias::Linear) { of(std::integral_constant<FlashBias, FlashBias::Linear>()); }
        else { of(std::integral_constant<FlashBias, FlashBias::Distance>()); }
        return span.host();
    }
};

// ----------------------------------------------------------------------------------------------------------
// problems that both directions have

// tiles of keys that a sequence has left and right of its spans
struct Skipped { int left = 0, right = 0; };
Skipped skipped_tiles(const Problem& p, const Spans& span) {
    Skipped n;
    for (int e = 0; e < (int)span.size(); e++) {
        const int m = e % p.tiles();
        const int live = ceil_div(p.keys(e / p.tiles()), FLASH_TILE);
        if (m >= live) { continue; }
        n.left += span[(size_t)e].first;
        n.right += (p.causal ? m : live - 1) - span[(size_t)e].last;
    }
    return n;
}

// Windows that end inside a tile and at its end, that leave out tiles between them and the sinks, sinks within a tile
// and (bidirectional) to the right of the window
template <class F> void windows_and_sinks(F run) {
    for (FlashBias Kind : BIASES) {
        for (bool causal : {true, false}) {
            for (const AttentionMask mask : {AttentionMask{1, 0}, AttentionMask{30, 3}, AttentionMask{64, 100}}) {
                Problem p = {Kind, causal, {2, 300, 1, 64}, {300, 170}};
                p.mask = mask;
                run(p);
            }
        }
    }
    Problem p = {FlashBias::Distance, false, {1, 230, 1, 80}};
    p.mask = {50, 70};
    p.span = {{0, 1}, {0, 3}, {1, 2}, {0, 3}};
    run(p);
    p = {FlashBias::Distance, true, {1, 250, 1, 80}};
    p.mask = {50, 1};
    p.span = {{0, 0}, {0, 1}, {1, 2}, {0, 3}};
    run(p);
}
template <class F> void documents_apart(F run) {
    for (FlashBias Kind : BIASES) {
        for (const AttentionMask mask : {AttentionMask{}, AttentionMask{30, 3}}) {
            Problem p = {Kind, true, {2, 250, 1, 64}, {250, 170}};
            p.mask = mask;
            p.documents = draw_documents(2, 250, 40, 17);
            run(p);
        }
    }
    Problem p = {FlashBias::Distance, true, {1, 250, 1, 80}};
    p.documents = draw_documents(1, 250, 100, 18);
    p.span = {{0, 0}, {0, 1}, {1, 2}, {0, 3}};
    run(p);
}
// A span is obeyed, not just harmless: with tiles that matter left out, the result is the oracle's that leaves them out
// too.
template <class F> void given_spans(F run) {
    const Spans spans[] = {{{0, 0}, {1, 3}, {0, 2}, {3, 3}}, {{0, 3}, {0, 1}, {2, 2}, {1, 3}},
                           {{0, 2}, {1, 1}, {1, 3}, {0, 3}}};
    for (FlashBias Kind : {FlashBias::Linear, FlashBias::Distance}) {
        for (bool causal : {true, false}) {
            for (const Spans& span : spans) {
                Problem p = {Kind, causal, {1, 230, 1, 64}, {220}};
                p.span = span;
                run(p);
            }
        }
    }
}
// A step within chunk 0 to S = 1e5: the tiles after it have small offsets again, and small distances to its last keys,
// too. With float32 origins these would be off by 2^-8, and the logits by g times that.
template <class F> void small_distances_at_a_large_S(F run) {
    for (FlashBias Kind : {FlashBias::Distance, FlashBias::LogDistance}) {
        for (bool causal : {true, false}) {
            Problem p = {Kind, causal, {1, 270, 1, 64}};
            p.b_mean = p.b_std = 0.03;
            p.g_mean = 5;
            p.step_at = 100;
            run(p);
        }
    }
}
// D to 1e6, g of 100, scores 200 apart: P would be 0 everywhere if the bias were a factor after the exponential
template <class F> void log_distance_at_its_extremes(F run) {
    for (bool inside : {false, true}) {
        for (bool causal : {true, false}) {
            Problem p = {FlashBias::LogDistance, causal, {1, 200, 1, 64}};
            p.inside = inside;
            p.qk = 8;
            p.b_mean = p.b_std = 1e4;
            p.g_mean = 100;
            p.g_std = 0;
            run(p);
        }
    }
}

} // namespace
