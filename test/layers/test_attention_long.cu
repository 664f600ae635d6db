// test_attention_long.cu -- sums over very many keys: what float32 costs at 131,072 of them, forward and backward.
#include "test/layers/attention_layer.h"
#include "test/oracle.h"

#include "llmc/attention/decode.cuh"

namespace {

constexpr int LONG_T = 131072;

// A query whose keys are all the same but one, whose logit is 1.23 above the rest. Then every exponential but one is
// e^-1.23, and a single float32 chain adds the same rounded number to a growing sum, with the same error at each step.
struct EqualKeys {
    Layer l;
    std::vector<float> qkv;
    std::vector<double> out;                                // (HS), in double
    double lse;

    EqualKeys(int keys, Random& random) : l("none", {1, 1, 1, 8}, true, random, keys), qkv((size_t)keys * l.OC) {
        const size_t HS = (size_t)l.s.HS, other = (size_t)keys / 3;
        std::vector<double> sums(HS);
        double sum = 0;
        qkv[(size_t)(keys - 1) * l.OC] = 1.0f;              // q; all other elements of q and k are 0
        qkv[other * l.OC + HS] = 1.23f * std::sqrt((float)HS);
        for (size_t j = 0; j < (size_t)keys; j++) {
            const double e = std::exp(qkv[j * l.OC + HS] / std::sqrt((double)HS));
            sum += e;
            for (size_t d = 0; d < HS; d++) {
                float& v = qkv[j * l.OC + 2 * HS + d];
                v = 1.0f + random.normal();
                sums[d] += e * v;
            }
        }
        for (double x : sums) { out.push_back(x / sum); }
        lse = std::log(sum);
    }
};

// A bidirectional layer whose backward sums T terms that are all the same, or that cancel: q = (x, 0, ..) and k_j =
// s_j (0, y, 0, ..) with s_j = 1, -1, 1, .., so that all scores are 0 and P = 1 / T; v_j = s_j a; no bias. dout_i = c,
// so that row_dot = 0 and dlogit_ij = s_j c.a / T, or dout_i = s_i c and dlogit_ij = s_i s_j c.a / T.
struct Alternating {
    static constexpr int T = 8160, HS = 4;
    static constexpr float c[HS] = {1.23f, 0.7f, -0.9f, 1.1f};
    static constexpr float a[HS] = {0.9f, -0.3f, 0.4f, 1.3f};
    static constexpr float x = 1.37f;
    static constexpr float y = 0.77f;
    Layer l;
    double ca = 0;
    std::vector<float> dqkv;

    Alternating(const std::string& name, Random& random, bool dout_alternates) : l(name, {1, T, 1, HS}, false, random) {
        l.fill([&](const TensorSpec& p) { std::fill_n(l.host(p.name), p.size(), 0.0f); });
        std::vector<float> qkv((size_t)T * l.OC), dout((size_t)T * HS);
        for (int d = 0; d < HS; d++) { ca += (double)c[d] * a[d]; }
        for (size_t t = 0; t < T; t++) {
            const float sign = sign_of(t);
            qkv[t * l.OC] = x;
            qkv[t * l.OC + HS + 1] = sign * y;
            for (size_t d = 0; d < HS; d++) {
                qkv[t * l.OC + 2 * HS + d] = sign * a[d];
                dout[t * HS + d] = (dout_alternates ? sign : 1.0f) * c[d];
            }
            if (l.tables.extra_columns > 0) { qkv[t * l.OC + 3 * HS] = -1.0f; }         // cable's b is 0
        }
        Array<float> d_qkv(qkv), out(dout.size()), lse((size_t)T), d_dqkv(qkv.size()), scratch(l.backward_scratch());
        l.forward(out, lse, d_qkv, 0, T);
        l.backward_scores(d_dqkv, scratch, Array<float>(dout), d_qkv, out, lse);
        dqkv = columns(d_dqkv.host(), (size_t)l.OC, 0, 3 * HS);
    }
    static float sign_of(size_t t) { return t % 2 == 0 ? 1.0f : -1.0f; }
    std::vector<float> act(const char* name, size_t n) const {
        std::vector<float> values(n);
        copy_to_host(values.data(), l.act(name), n * sizeof(float), Stream(0));
        return values;
    }
};

// the largest error of out, relative to the largest element
double relative_error(const std::vector<float>& got, const std::vector<double>& want) {
    return worst_difference(got, want) / largest(want);
}

} // namespace

TEST_CASE("attention: one query over 131,072 keys", "[attention][decode]") {
    Random random;
    INFO(random);
    EqualKeys x(LONG_T, random);
    Array<float> qkv(x.qkv), out((size_t)x.l.C), lse((size_t)LONG_T);
    x.l.forward(out, lse, qkv, LONG_T - 1, 1);
    const double forward = relative_error(out.host(), x.out);
    const double sum = std::fabs(lse.host()[LONG_T - 1] - x.lse);
    Array<float> decoded((size_t)x.l.C), scratch(attention_decode_scratch(1, LONG_T, 1, x.l.s.HS));
    attention_decode(decoded, qkv, scratch, x.l.view, 1, LONG_T - 1, Stream(0));
    const double decode = relative_error(decoded.host(), x.out);
    INFO("forward: out " << forward << ", lse " << sum << "; decode: out " << decode);
    // measured: 1.2e-5, 1.1e-5, 1.5e-6; without a sum per tile 1.2e-3, 1.2e-3, 1.5e-6
    CHECK(forward <= 4e-5);
    CHECK(sum <= 4e-5);
    CHECK(decode <= 6e-6);
}

TEST_CASE("attention: the backward's sums over 8,160 queries and keys", "[attention]") {
    using A = Alternating;
    Random random;
    const A run("none", random, false);
    std::vector<double> dq, dk, dv;
    for (size_t t = 0; t < A::T; t++) {
        for (size_t d = 0; d < A::HS; d++) {
            dq.push_back(d == 1 ? run.ca * A::y / 2 : 0);           // the scale is 1/2
            dk.push_back(d == 0 ? A::sign_of(t) * run.ca * A::x / 2 : 0);
            dv.push_back(A::c[d]);
        }
    }
    const std::vector<double>* const want[] = {&dq, &dk, &dv};
    for (size_t part = 0; part < 3; part++) {
        INFO("dq, dk, dv: part " << part);
        const std::vector<float> got = columns(run.dqkv, 3 * A::HS, part * A::HS, A::HS);
        CHECK(relative_error(got, *want[part]) <= 4e-6);    // measured: 9e-7; without a sum per tile 1e-5 to 7e-5
    }
}

// dS_j: its column is seen with one sign by the queries after it, with the other by those before it
TEST_CASE("cable: dS over 8,160 queries", "[attention]") {
    using A = Alternating;
    Random random;
    const A run("cable", random, false);
    const double g = std::log(2.0);
    std::vector<double> want;
    for (size_t t = 0; t < A::T; t++) {
        const double row = t % 2 == 0 ? 2.0 / A::T : 0.0;
        want.push_back(g * run.ca * (A::sign_of(t) * ((double)A::T - 2.0 * (double)t) / A::T - row));
    }
    CHECK(relative_error(run.act("dS", A::T), want) <= 5e-6);       // measured: 1.3e-6; without a sum per tile 4.5e-5
}

// the gradient of a bias that depends only on j - i sums a diagonal of dlogit
TEST_CASE("t5: the diagonals of 8,160 queries", "[attention]") {
    using A = Alternating;
    Random random;
    const A run("t5", random, true);
    std::vector<double> want;
    for (int delta = 1 - A::T; delta < A::T; delta++) {
        want.push_back(A::sign_of((size_t)std::abs(delta)) * run.ca * (A::T - std::abs(delta)) / A::T);
    }
    const std::vector<float> got = run.act("dbias_table", 2 * A::T - 1);
    CHECK(relative_error(got, want) <= 1e-5);               // measured: 2.6e-6; without a sum per tile 4.5e-5
}
