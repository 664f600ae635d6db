// test_positions.cu -- the bias functors of every encoding against test/oracle_positions.cu: values, gradients, and
// tokens that arrive in pieces.
//
// A value may be off by MULTIPLE times the error of the oracle in float32, or by an ulp of the largest one. A gradient
// is a sum over i, j, and may be off by a multiple of float32's epsilon times the root of the sum of its terms'
// squares, which is the size of a sum of that many roundings. CABLE_TEST_ERRORS=1 prints the measured errors.
#undef KERNELS_ELSEWHERE             // calls the functors themselves
#include "test/layer.h"
#include "test/oracle.h"

#include "llmc/engine/config.h"

namespace tests {        // so that the header of an encoding may use the same names

namespace {

constexpr int TILE = 64;

std::vector<float> draws(size_t n, float lo, float hi, uint64_t seed) {
    std::vector<float> x(n);
    for (size_t i = 0; i < n; i++) { x[i] = lo + (hi - lo) * (float)uniform01(seed, 1, i); }
    return x;
}

// B_ij of queries begin .. end-1 and keys 0 .. end-1, by tiles as the attention takes them. out (blocks, T, T)
template <class Bias> __global__ void bias_kernel(float* out, Bias bias, int T, int begin, int end, bool causal) {
    const int bh = blockIdx.x;
    for (int i0 = begin; i0 < end; i0 = (i0 / TILE + 1) * TILE) {
        const int i1 = (i0 / TILE + 1) * TILE < end ? (i0 / TILE + 1) * TILE : end;
        for (int j0 = 0; j0 < (causal ? i1 : end); j0 += TILE) {
            const int nj = end - j0 < TILE ? end - j0 : TILE;
            const auto tile = bias.tile(bh, i0, j0);
            for (int c = 0; c < nj; c++) {
                for (int r = threadIdx.x; r < i1 - i0; r += blockDim.x) {
                    out[((size_t)bh * T + i0 + r) * T + j0 + c] = tile(r, c);
                }
            }
        }
    }
}

// bias.backward over all tiles, in the attention's order. da (blocks, T, T)
template <class Bias> __global__ void walk_kernel(Bias bias, const float* da, int T, bool causal) {
    const int bh = blockIdx.x;
    float* tile = dynamic_shared();
    for (int j0 = 0; j0 < T; j0 += TILE) {
        const int nj = T - j0 < TILE ? T - j0 : TILE;
        for (int i0 = causal ? j0 : 0; i0 < T; i0 += TILE) {
            const int ni = T - i0 < TILE ? T - i0 : TILE;
            __syncthreads();
            for (int r = 0; r < ni; r++) {
                for (int c = threadIdx.x; c < nj; c += blockDim.x) {
                    tile[r * TILE + c] = causal && j0 + c > i0 + r ? 0.0f : da[((size_t)bh * T + i0 + r) * T + j0 + c];
                }
            }
            __syncthreads();
            bias.backward(bh, i0, ni, j0, nj, tile, TILE);
        }
    }
}

std::string configured(const std::string& name, int T) { return name == "t5_clip" && T > 10 ? "t5_clip:K=5" : name; }

// One layer of an encoding with random parameters and inputs
struct Fixture : AttentionLayer {
    std::vector<float> qkv_host;
    std::unique_ptr<Array<float>> qkv;

    Fixture(const std::string& pos, int T_train, LayerShape shape, bool causal, uint64_t seed)
        : AttentionLayer(pos, shape, causal, shape.T, T_train) {
        Random random;
        random.engine.seed(seed);
        fill([&](const TensorSpec& p) {
            const bool bounded = p.lo > -FLT_MAX || p.hi < FLT_MAX;
            for (size_t e = 0; e < p.size(); e++) {
                host(p.name)[e] = bounded ? draw_parameter(p, random) : (float)random.uniform(-1, 1);
            }
            if (p.name == "fire_c") { host(p.name)[0] = -0.13f; }       // only the gradient sees the sign
            if (p.name == "fire_l") { host(p.name)[0] = -0.04f; }       // L = 20.48: both sides of max(L, i)
        });
        qkv_host.resize((size_t)s.B * s.T * OC);
        for (float& x : qkv_host) {     // away from 0, the kink of ReLU
            x = (float)random.uniform(-1.5, 1.5);
            x += x >= 0.0f ? 0.01f : -0.01f;
        }
        qkv.reset(new Array<float>(qkv_host));
    }
    // rows t0 .. t0+n-1 are new
    void prepare(int n, int t0) const { position().prepare_forward(*qkv, s.B, n, t0, Stream(0)); }
    // the bias (B*NH,T,T) of queries begin .. end-1
    std::vector<float> bias(int begin, int end) const {
        Array<float> out((size_t)s.B * s.NH * s.T * s.T);
        with_position(view, [&](auto e) {
            const auto bias = e.bias();
            launch(bias_kernel<std::decay_t<decltype(bias)>>, Grid((size_t)s.B * s.NH, 64, 0, Stream(0)), out.p, bias,
                   s.T, begin, end, causal);
        });
        return out.host();
    }
    std::vector<float> bias() const { return bias(0, s.T); }
    OracleLayer<double> oracle(int b = 0) { return AttentionLayer::oracle(qkv_host, b, s.T); }
};

// Keeps the largest difference, and says where it was
struct Worst {
    double scale = 0, error = 0;
    double wrong = 0, right = 0;
    void see(double got, double want) {
        scale = std::max(scale, std::fabs(want));
        const double e = std::isfinite(got) ? std::fabs(got - want) : INFINITY;
        if (!(e <= error)) { error = e; wrong = got; right = want; }
    }
    double relative(double floor) const { return error / std::max(scale, floor); }
    std::string text() const { return strprintf("got %.9g, wanted %.9g, scale %.3g", wrong, right, scale); }
};

void check_worst(const std::string& what, const Worst& worst, double floor, double tolerance) {
    INFO(what << ": " << worst.text());
    if (getenv("CABLE_TEST_ERRORS") != nullptr) { printf("%-24s %.2e\n", what.c_str(), worst.relative(floor)); }
    CHECK(worst.relative(floor) <= tolerance);
}

void check_values(Fixture& f) {
    const int T = f.s.T, NH = f.s.NH;
    f.prepare(T, 0);
    const std::vector<float> bias = f.bias();
    Worst values, plain;
    bool finite = true;
    for (int bh = 0; bh < f.s.B * NH; bh++) {
        const OracleLayer<double> o = f.oracle(bh / NH);
        const std::vector<double> want = oracle_bias(o, bh % NH);
        const std::vector<float> in_float = oracle_bias(rounded(o), bh % NH);
        for (size_t e = 0; e < want.size(); e++) {
            const int i = (int)e / T, j = (int)e % T;
            const float got = bias[(size_t)bh * T * T + e];
            plain.see(in_float[e], want[e]);
            if (j > i && f.causal) {       // masked: any finite value inside a tile, not computed beyond
                finite = finite && (std::isfinite(got) || j / TILE > i / TILE);
            } else { values.see(got, want[e]); }
        }
    }
    CHECK(finite);
    CHECK(plain.relative(1.0) <= 1e-4);                         // or the oracle's own error would hide everything
    check_worst(f.config.name + " values", values, 1.0, MULTIPLE * std::max(plain.relative(1.0), (double)FLT_EPSILON));
}

// value: the derivative of a loss in x, a number that the layer holds. squares: the sum of the squares of its terms
struct Slope { double value = 0, squares = 0; };
// Adds to s what head h contributes with the loss sum_ij d_ij B_ij, d (T,T).
void add_slope(Slope& s, const OracleLayer<double>& o, double& x, const float* d, int h) {
    const double x0 = x, step = 1e-6 * std::max(1.0, std::fabs(x0));
    x = x0 + step;
    const std::vector<double> up = oracle_bias(o, h);
    x = x0 - step;
    const std::vector<double> down = oracle_bias(o, h);
    x = x0;
    for (size_t e = 0; e < up.size(); e++) {
        const double term = d[e] * (up[e] - down[e]) / (2 * step);
        s.value += term;
        s.squares += term * term;
    }
}

// up to `limit` of n indices, all when there are no more
std::vector<size_t> some(size_t n, size_t limit) {
    std::vector<size_t> out;
    for (size_t i = 0; i < std::min(n, limit); i++) { out.push_back(n <= limit ? i : permute(i, n, 5, n)); }
    return out;
}

// The gradients of a bias in parameters and columns, where every pair counts as much: in attention, those of small
// probability hardly do
void check_gradients(Fixture& f) {
    const size_t T = (size_t)f.s.T, NH = (size_t)f.s.NH;
    std::vector<float> da = draws((size_t)f.s.B * NH * T * T, -1.0f, 1.0f, 77);
    std::vector<OracleLayer<double>> sequences;
    for (int b = 0; b < f.s.B; b++) { sequences.push_back(f.oracle(b)); }
    for (size_t bh = 0; bh < f.s.B * NH; bh++) {            // no query sees its own key where that is far below: bam
        const std::vector<double> B = oracle_bias(sequences[0], (int)(bh % NH));
        for (size_t own = 0; own < T * T; own += T + 1) { da[bh * T * T + own] *= B[own] < -100 ? 0.0f : 1.0f; }
    }
    // the gradients of parameters accumulate, the columns' are overwritten
    f.grads->set(std::vector<float>(f.params.total, 1.0f));
    Array<float> device_da(da), device_dqkv(std::vector<float>(f.qkv_host.size(), NAN));
    with_position(f.view, [&](auto e) {
        e.begin_backward(f.qkv->p, f.s.B, f.s.T, Stream(0));
        const auto bias = e.bias();
        const Grid grid(f.s.B * NH, 64, sizeof(float) * TILE * TILE, Stream(0));
        launch(walk_kernel<std::decay_t<decltype(bias)>>, grid, bias, device_da.p, f.s.T, f.causal);
        e.prepare_backward(device_dqkv.p, f.qkv->p, f.s.B, f.s.T, Stream(0));
    });
    const std::vector<float> grads = f.grads->host(), dqkv = device_dqkv.host();
    for (size_t i = 0; i < f.params.specs.size(); i++) {
        const TensorSpec& spec = f.params.specs[i];
        Worst worst;
        double squares = 0;
        for (size_t e : some(spec.size(), T > 40 ? 8 : 40)) {
            Slope want;
            for (size_t bh = 0; bh < f.s.B * NH; bh++) {
                OracleLayer<double>& o = sequences[bh / NH];
                add_slope(want, o, o.params[spec.name][e], &da[bh * T * T], (int)(bh % NH));
            }
            squares = std::max(squares, want.squares);
            worst.see(grads[f.params.offsets[i] + e] - 1.0f, want.value);
        }
        check_worst(f.config.name + " d" + spec.name, worst, std::max(1.0, std::sqrt(squares)), 16 * FLT_EPSILON);
    }
    Worst columns;
    double squares = 0;
    for (size_t b = 0; b < sequences.size(); b++) {
        OracleLayer<double>& o = sequences[b];
        for (size_t e : some(o.columns.size(), 40)) {
            Slope want;
            for (size_t h = 0; h < NH; h++) { add_slope(want, o, o.columns[e], &da[(b * NH + h) * T * T], (int)h); }
            squares = std::max(squares, want.squares);
            columns.see(dqkv[(b * T + e / o.width) * f.OC + 3 * f.C + e % o.width], want.value);
        }
    }
    check_worst(f.config.name + " dcolumns", columns, std::max(1.0, std::sqrt(squares)), 16 * FLT_EPSILON);
}

} // namespace

// Rotations, embeddings and factors of q: test_attention.cu, which sees each token's
TEST_CASE("every bias agrees with its oracle", "[positions][encodings]") {
    const std::vector<std::string> names = encodings_and_forms();
    const std::string name = names[GENERATE_COPY(range((size_t)0, names.size()))];
    const bool causal = GENERATE(true, false);
    const PositionOracle& kind = find_oracle(name);
    if (!kind.has_bias || kind.reads_scores || (!causal && directions(name).size() == 1)) { return; }
    for (const LayerShape& s : {LayerShape{2, 1, 1, 8}, LayerShape{2, 2, 3, 2}, LayerShape{2, 37, 1, 37},
                                LayerShape{2, 37, 3, 8}, LayerShape{2, 130, 3, 2}}) {
        Fixture f(configured(name, s.T), s.T, s, causal, 10);
        INFO(name << (causal ? " causal" : " bidirectional") << " T " << s.T << " NH " << s.NH << " HS " << s.HS);
        check_values(f);
        check_gradients(f);
    }
}

// As in generation: what the first tokens left behind must be enough for the next.
TEST_CASE("tokens in pieces give what they give at once", "[positions][encodings]") {
    const std::vector<std::string> names = encodings_and_forms();
    const std::string name = names[GENERATE_COPY(range((size_t)0, names.size()))];
    const int T = 300;
    const LayerShape shape = {1, T, 3, 8};
    Fixture whole(configured(name, T), T, shape, true, 20), pieces(configured(name, T), T, shape, true, 20);
    whole.prepare(T, 0);
    const std::vector<float> want = whole.bias(), x = draws((size_t)T * whole.C, -1.0f, 1.0f, 21);
    Array<float> x_whole(x), x_pieces(x);
    whole.position().embed_forward(x_whole, 1, T, 0, Stream(0));
    Worst bias;
    int t0 = 0;
    for (int n : {5, 1, 122, 1, 1, 126, 1, 43}) {           // 128 and 256 are met from below and passed
        pieces.prepare(n, t0);
        float* x_new = x_pieces.p + (size_t)t0 * pieces.C;
        pieces.position().embed_forward(x_new, 1, n, t0, Stream(0));
        const std::vector<float> got = pieces.bias(t0, t0 + n);
        for (int h = 0; h < 3; h++) {
            for (int i = t0; i < t0 + n; i++) {
                const size_t row = ((size_t)h * T + i) * T;
                for (int j = 0; j <= i; j++) { bias.see(got[row + j], want[row + j]); }
            }
        }
        t0 += n;
    }
    REQUIRE(t0 == T);
    INFO(name << ": " << bias.text());
    CHECK(bias.relative(1.0) <= 1e-6);      // a compiler may round the last columns of a tile otherwise than the first
    const std::vector<float> a = whole.act_data->host(), b = pieces.act_data->host();
    for (size_t i = 0; i < whole.acts.specs.size(); i++) {
        const TensorSpec& s = whole.acts.specs[i];
        INFO(s.name);
        if (s.keep != Keep::Cached) { continue; }
        CHECK(memcmp(&a[whole.acts.offsets[i]], &b[whole.acts.offsets[i]], sizeof(float) * s.size()) == 0);
    }
    CHECK(pieces.qkv->host() == whole.qkv->host());
    CHECK(x_pieces.host() == x_whole.host());
}

TEST_CASE("cable's sum is exact enough at 131,072 tokens", "[positions]") {
    const int T = 131072;
    Fixture f("cable_nw", 1024, {1, T, 1, 2}, true, 30);
    f.prepare(T, 0);
    const std::vector<double> S = oracle_cable_S<'r'>(f.oracle(), 0);
    const float *offset = f.act("S_offset"), *origin = f.act("S_origin");
    double relative = 0, absolute = 0;
    double across = 0;
    for (int t = 0; t < T; t++) {
        double from;
        memcpy(&from, &origin[2 * (size_t)(t / 128)], sizeof(from));
        const double error = std::fabs(from + offset[t] - S[(size_t)t]);
        absolute = std::max(absolute, error);
        relative = std::max(relative, S[(size_t)t] > 0 ? error / S[(size_t)t] : error);
        if (t >= 128) {     // a difference as the functor takes it
            double before;
            memcpy(&before, &origin[2 * (size_t)(t / 128 - 1)], sizeof(before));
            const float D = (float)(from - before) + offset[t] - offset[t - 128];
            across = std::max(across, std::fabs(D - (S[(size_t)t] - S[(size_t)t - 128])));
        }
    }
    if (getenv("CABLE_TEST_ERRORS") != nullptr) {
        printf("S: relative %.2e, absolute %.2e; S_t - S_{t-128}: %.2e\n", relative, absolute, across);
    }
    CHECK(relative <= 1e-7);
    CHECK(absolute <= 4e-6);        // half of float32's spacing at an offset of 64 to 128; summed in float32: 2.8e-4
    CHECK(across <= 2e-5);
}

// The gradients of FIRE's MLP by its definition, in double
TEST_CASE("fire's sums are exact enough at 2,048 tokens", "[positions]") {
    // 1. its tables
    const int T = 2048, U = FIRE_UNITS;
    Fixture f("fire", T, {1, T, 1, 2}, false, 31);
    f.prepare(T, 0);
    const OracleLayer<double> o = f.oracle();
    const std::vector<double> &w1 = o.params.at("fire_w1"), &b1 = o.params.at("fire_b1"), &w2 = o.params.at("fire_w2");
    const double c = std::fabs(o.params.at("fire_c")[0]), L = std::fabs(o.params.at("fire_l")[0]) * 512;
    const std::vector<float> da = draws((size_t)T * T, 0.5f, 1.0f, 32);
    std::vector<double> psi((size_t)T), norm(psi);
    double off = 0;
    for (int t = 0; t < T; t++) {
        psi[(size_t)t] = std::log(1 + c * t);
        norm[(size_t)t] = 1 / (std::log(1 + c * std::max(L, (double)t)) + 1e-6);
        const float table = f.act("fire_psi")[T - 1 - t], inverse = f.act("fire_inv")[t];
        off = std::max({off, t > 0 ? std::fabs(table / psi[(size_t)t] - 1) : std::fabs(table),
                        std::fabs(inverse / norm[(size_t)t] - 1)});
    }
    CHECK(off <= 6e-8);             // half a unit in the last place
    // 2. its gradients, by loops over all pairs
    const std::vector<double> zeros((size_t)U);
    std::map<std::string, std::vector<double>> want = {{"fire_w1", zeros}, {"fire_b1", zeros}, {"fire_w2", zeros}};
    want["fire_b2"] = {0.0};
    for (int i = 0; i < T; i++) {
        for (int j = 0; j < T; j++) {
            const double d = da[(size_t)i * T + j], y = psi[(size_t)std::abs(i - j)] * norm[(size_t)std::max(i, j)];
            for (int k = 0; k < U; k++) {
                const double x = w1[(size_t)k] * y + b1[(size_t)k], on = x > 0 ? d : 0;
                want["fire_w2"][(size_t)k] += on * x;
                want["fire_w1"][(size_t)k] += on * w2[(size_t)k] * y;
                want["fire_b1"][(size_t)k] += on * w2[(size_t)k];
            }
            want["fire_b2"][0] += d;
        }
    }
    // 3. the kernels'
    Array<float> device_da(da);
    const Fire fire = bind_encoding<Fire>(f.view);
    fire.begin_backward(nullptr, 1, T, Stream(0));
    launch(walk_kernel<FireBias>, Grid(1, 64, sizeof(float) * TILE * TILE, Stream(0)), fire.bias(), device_da.p, T,
           false);
    fire.prepare_backward(nullptr, nullptr, 1, T, Stream(0));
    const std::vector<float> grads = f.grads->host();
    for (const auto& tensor : want) {
        const size_t first = f.params.offsets[(size_t)f.params.index(tensor.first)];
        double relative = 0;
        for (size_t k = 0; k < tensor.second.size(); k++) {
            const double exact = tensor.second[k];
            relative =
                std::max(relative, exact == 0 ? std::fabs(grads[first + k]) : std::fabs(grads[first + k] / exact - 1));
        }
        if (getenv("CABLE_TEST_ERRORS") != nullptr) {
            printf("fire, T %d: d%s off by %.2e\n", T, tensor.first.c_str(), relative);
        }
        INFO("d" << tensor.first);
        CHECK(relative <= 3e-7);        // 6e-8 is measured, 7e-6 with all of a piece in one float32
    }
}

namespace {

// of each head, by the bias of the second token for the first
std::vector<float> slopes(const char* pos, int NH) {
    Fixture f(pos, 2, {1, 2, NH, 2}, true, 1);
    f.prepare(2, 0);
    const std::vector<float> b = f.bias();
    std::vector<float> m;
    for (int h = 0; h < NH; h++) { m.push_back(-b[(size_t)h * 4 + 2]); }
    return m;
}

} // namespace

TEST_CASE("alibi's slopes", "[positions]") {
    CHECK(slopes("alibi", 1) == std::vector<float>{1.0f / 256});
    CHECK(slopes("alibi", 8) ==
          std::vector<float>{0.5f, 0.25f, 0.125f, 0.0625f, 0.03125f, 0.015625f, 0.0078125f, 0.00390625f});
    CHECK(slopes("alibi", 12) ==
          std::vector<float>{0.5f, 0.25f, 0.125f, 0.0625f, 0.03125f, 0.015625f, 0.0078125f, 0.00390625f,
                             0.70710678118f, 0.35355339059f, 0.17677669529f, 0.08838834764f});
}

TEST_CASE("alibi's random slopes", "[positions]") {
    const int NH = 4000;
    const std::vector<float> m = slopes("alibi_random", NH), again = slopes("alibi_random:seed=42,mean=0.125", NH);
    CHECK(m == again);
    CHECK(slopes("alibi_random:seed=43", 8) != std::vector<float>(m.begin(), m.begin() + 8));
    CHECK(slopes("alibi_random", 8) == std::vector<float>(m.begin(), m.begin() + 8));   // whatever NH is
    const std::vector<float> twice = slopes("alibi_random:mean=0.25", 8);
    for (int h = 0; h < 8; h++) { CHECK(twice[(size_t)h] == 2 * m[(size_t)h]); }
    // An exponential distribution: its mean, its deviation, which equals the mean, and a share of 1/e above it. Five
    // deviations of the estimates: 1, sqrt(2) and 0.48 over sqrt(NH)
    double sum = 0, squares = 0;
    int above = 0;
    for (float x : m) {
        CHECK(x > 0);
        sum += x / 0.125;
        above += x > 0.125;
    }
    for (float x : m) { squares += (x / 0.125 - sum / NH) * (x / 0.125 - sum / NH); }
    CHECK(std::fabs(sum / NH - 1) <= 5 / std::sqrt(NH));
    CHECK(std::fabs(std::sqrt(squares / NH) - 1) <= 5 * std::sqrt(2.0) / std::sqrt(NH));
    CHECK(std::fabs((double)above / NH - std::exp(-1)) <= 5 * 0.48 / std::sqrt(NH));
}

TEST_CASE("t5's buckets", "[positions]") {
    const auto power = [](int base, int exponent) {
        unsigned __int128 x = 1;
        for (int n = 0; n < exponent; n++) { x *= (unsigned)base; }
        return x;
    };
    const int T = 340;
    struct Form { const char* name; int buckets, distance; };
    // of both, some distances that begin a bucket are powers that floating point may miss: 32 and 64; 20, 40, 80, 160
    for (const Form& form : {Form{"t5", 32, 128}, Form{"t5:buckets=20,distance=320", 20, 320}}) {
        for (bool causal : {true, false}) {
            Fixture f(form.name, T, {1, T, 1, 2}, causal, 1);
            f.fill([&](const TensorSpec& p) { std::iota(f.host(p.name), f.host(p.name) + form.buckets, 0.0f); });
            f.prepare(T, 0);
            const std::vector<float> b = f.bias();
            const int side = causal ? form.buckets : form.buckets / 2, exact = side / 2;
            for (int d = 0; d < T; d++) {
                // the last k with exact (distance / exact)^(k / exact) <= d; to the power of `exact`, both sides are
                // whole numbers
                const auto reached = power(std::min(d, form.distance), exact);
                int bucket = d;
                for (int k = 0; k < exact && d >= exact; k++) {
                    bucket = power(form.distance, k) * power(exact, exact - k) <= reached ? exact + k : bucket;
                }
                INFO(form.name << (causal ? " causal" : " bidirectional") << ", distance " << d);
                CHECK(b[(size_t)d * T] == (float)bucket);
                if (!causal) { CHECK(b[(size_t)d] == (float)(d > 0 ? side + bucket : 0)); }
            }
        }
    }
}

TEST_CASE("q.k of rope depends on i - j alone", "[positions]") {
    const int T = 2000, HS = 16;
    Fixture f("rope", T, {1, T, 1, HS}, true, 50);
    for (int t = 1; t < T; t++) { std::copy(&f.qkv_host[0], &f.qkv_host[0] + f.OC, &f.qkv_host[(size_t)t * f.OC]); }
    f.qkv->set(f.qkv_host);
    f.prepare(T, 0);
    const std::vector<float> x = f.qkv->host();
    const auto dot = [&](int i, int j) {
        double sum = 0;
        for (int c = 0; c < HS; c++) { sum += (double)x[(size_t)i * f.OC + c] * x[(size_t)j * f.OC + f.C + c]; }
        return sum;
    };
    Worst worst;
    bool varies = false;
    for (int d : {0, 1, 5, 100, 900}) {
        for (int j = 0; j + d < T; j += 97) { worst.see(dot(j + d, j), dot(d, 0)); }
        varies = varies || std::fabs(dot(d, 0) - dot(0, 0)) > 0.1;
    }
    INFO(worst.text());
    CHECK(worst.relative(1.0) <= 5e-7);
    CHECK(varies);
}

// A float32 f would be off by 1e-3 to 1e-2 at this length.
TEST_CASE("carope starts as rope, even at 131,072 tokens", "[positions]") {
    const int T = 131072;
    for (int HS : {16, 64}) {
        Fixture f("carope", 1024, {1, T, 1, HS}, true, 70);
        float z = 0;
        for (const FileTensor& file : f.tables.files) {
            const bool weight = file.tensor == "qkvw";
            REQUIRE((file.init.has_value() && file.init->kind == Init::Constant));
            CHECK((!weight || file.init->a == 0.0f));       // so that z is the bias for every token
            z = weight ? z : file.init->a;
        }
        for (size_t e = 0; e < f.qkv_host.size(); e++) {
            const int c = (int)(e % (size_t)f.OC);
            f.qkv_host[e] = c < 3 * HS ? (float)(c % 2 == 0) : z;           // each pair of q and k becomes cos, sin
        }
        f.qkv->set(f.qkv_host);
        f.prepare(T, 0);
        const std::vector<float> x = f.qkv->host();
        const long double frequency = 1 / (1 + std::log1p(std::exp((long double)z)));
        CHECK(std::fabs((double)(frequency - std::pow(10000.0L, -2.0L / HS))) <= 1e-8);
        double worst = 0;
        for (int t = T - 1; t >= 0; t -= 1009) {
            for (int c = 0; c < 2 * HS; c += 2) {
                const long double angle = (t + 1) * std::pow(frequency, (long double)(c % HS / 2));
                const float* pair = &x[(size_t)t * f.OC + c];
                worst = std::max(worst, (double)std::hypot(pair[0] - std::cos(angle), pair[1] - std::sin(angle)));
            }
        }
        if (getenv("CABLE_TEST_ERRORS") != nullptr) { printf("carope's angle, heads of %d: %.1e\n", HS, worst); }
        CHECK(worst <= 1e-7);
    }
}

TEST_CASE("each of LongRoPE's factors is in its checksum", "[positions]") {
    PositionConfig config = parse_position("rope", 37);
    config.scaling = RopeScaling::LongRoPE;
    draw_factors(config, 8);
    const std::string text = rope_scaling_text(config);
    for (std::vector<double>* factors : {&config.short_factor, &config.long_factor}) {
        for (double& factor : *factors) {
            const double kept = factor;
            factor = std::nextafter(kept, 2 * kept);
            CHECK(rope_scaling_text(config) != text);
            factor = kept;
        }
    }
    CHECK(rope_scaling_text(config) == text);
}

TEST_CASE("ssmax starts where s log n is 1 on average over the trained length", "[positions]") {
    for (int T : {1, 2, 37, 1024}) {
        for (bool causal : {true, false}) {
            const PositionConfig config = parse_position("ssmax", T);
            const InitRule init = position_tables(config, {1, 1, 1, 0, 0, causal}).params.at(0).init;
            double mean = 0;
            const int tokens = std::max(T, 2);              // a query that sees one key has log n = 0
            for (int i = 0; i < tokens; i++) { mean += std::log(causal ? i + 1.0 : tokens) / tokens; }
            INFO("T " << T << (causal ? " causal" : " bidirectional"));
            REQUIRE(init.kind == Init::Constant);
            CHECK(init.a * mean == Approx(1).epsilon(FLT_EPSILON));
        }
    }
}

TEST_CASE("what encodings refuse", "[positions]") {
    PositionShape d = {1, 2, 5, 1, 4};
    const auto tables = [&](const char* pos) { position_tables(parse_position(pos, 4), d); };
    for (const char* pos : {"rope", "carope"}) {
        CHECK(throws_with([&] { tables(pos); }, "head size must be even") == EXIT_BAD_INPUT);
    }
    d.HS = 4;
    CHECK(throws_with([&] { tables("rope:p=1.5"); }, "at most 1") == EXIT_BAD_INPUT);
    PositionConfig yarn = parse_position("rope:p=0.4", 4);
    yarn.scaling = RopeScaling::YaRN;
    CHECK(throws_with([&] { position_tables(yarn, d); }, "expected rope with p = 1") == EXIT_BAD_INPUT);
    yarn.scaling = RopeScaling::LongRoPE;
    CHECK(throws_with([&] { position_tables(yarn, d); }, "longrope: expected rope with p = 1") == EXIT_BAD_INPUT);
    CHECK(throws_with([&] { tables("t5_clip:K=2.5"); }, "whole number") == EXIT_BAD_INPUT);
    for (const char* K : {"0x10", "inf", "nan", " 5", "5x", "-5", "0", ""}) {
        CHECK(throws_with([&] { parse_position(std::string("t5_clip:K=") + K, 4); },
                          "K: expected a positive number, got '" + std::string(K) + "'") == EXIT_BAD_INPUT);
    }
    CHECK(throws_with([&] { tables("t5:buckets=30"); }, "buckets in fours up to 128, got 30") == EXIT_BAD_INPUT);
    CHECK(throws_with([&] { tables("t5:distance=16"); }, "above half of the 32 buckets") == EXIT_BAD_INPUT);
    CHECK(throws_with([&] { tables("alibi_random:seed=0.5"); }, "a whole seed, got 0.5") == EXIT_BAD_INPUT);
    for (const char* npos : {"1", "4097", "2.5"}) {
        CHECK(throws_with([&] { tables((std::string("cope:npos=") + npos).c_str()); },
                          std::string("a whole number from 2 to 4096, got ") + npos) == EXIT_BAD_INPUT);
    }
    d.causal = false;
    CHECK(throws_with([&] { tables("none,cope"); }, "--pos cope: expected a causal model") == EXIT_BAD_INPUT);
    d.causal = true;
    CHECK(throws_with([&] { tables("sandwich:d=5"); }, "an even d up to 65536, got 5") == EXIT_BAD_INPUT);
    CHECK(throws_with([&] { parse_position("kcable:weight=within", 4); },
                      "weight: expected outside|inside, got 'within'") == EXIT_BAD_INPUT);
    CHECK(position_text(parse_position("kcable", 4)) == "kcable:weight=outside");
    CHECK(position_text(parse_position("kcable:bias=0.5", 4)) == "kcable:weight=outside,bias=0.5");
    CHECK(position_text(parse_position("fox", 4)) == "cable_v1");
    CHECK(parse_position("t5_clip:K=1.6e+1", 4).parts[0].values.at(0).value == 16);
    CHECK(throws_with([&] { parse_position("t5_clip:K=5,K=5", 4); }, "K is given twice") == EXIT_BAD_INPUT);
    Fixture f("learned", 8, {1, 9, 1, 2}, true, 1);
    CHECK(position_max_length(f.config) == 8);
    Array<float> x((size_t)9 * 2);
    const auto embed = [&](int n, int t0) { Learned(f.view).embed_forward(x.p, 1, n, t0, Stream(0)); };
    CHECK(throws_with([&] { embed(9, 0); }, "8 positions") == EXIT_BAD_INPUT);
    CHECK(throws_with([&] { embed(1, 8); }, "position 8") == EXIT_BAD_INPUT);
}

#if !defined(FEW_POSITIONS)
TEST_CASE("several encodings in one model", "[positions]") {
    const auto text = [](const char* pos) { return position_text(parse_position(pos, 8)); };
    const auto refused = [](const char* pos, const char* why) {
        return throws_with([&] { parse_position(pos, 8); }, why) == EXIT_BAD_INPUT;
    };
    // the one with a bias comes first, and a repeated one counts once
    CHECK(text("rope+cable") == "cable+rope:theta=10000,p=1,clock=token");
    CHECK(text("none,t5_clip:K=5,layers=own,none") == "none,t5_clip:K=5,scale=HS,layers=own,none");
    CHECK(text("rope:theta=1e+6+alibi:slopes=geometric") ==
          "alibi:slopes=geometric+rope:theta=1000000,p=1,clock=token");
    CHECK(text("cable,cable") == "cable");
    CHECK(text("ssmax+rope+cable") == "cable+rope:theta=10000,p=1,clock=token+ssmax");
    CHECK(text("cable+rope,rope+cable").find(",rope") == std::string::npos);
    CHECK(parse_position("rope,rope,rope,none", 8).parts.size() == 2);
    CHECK(parse_position("rope,rope:theta=5", 8).parts.size() == 2);
    CHECK(refused("alibi+cable", "alibi and cable both add a bias"));
    CHECK(refused("rope+rope:theta=5", "rope and rope both turn q and k"));
    CHECK(refused("carope+rope", "carope and rope both turn q and k"));
    CHECK(refused("alibi+cope", "alibi and cope both add a bias"));
    CHECK(refused("rope+cope", "rope and cope do not go together"));
    CHECK(refused("cope+rope", "cope and rope do not go together"));
    CHECK(text("cope:npos=8,rope+cable") == "cope:npos=8,cable+rope:theta=10000,p=1,clock=token");
    CHECK(text("ssmax+cope") == "cope:npos=64+ssmax");
    CHECK(refused("ssmax+ssmax", "ssmax and ssmax both scale q"));
    CHECK(refused("learned+sinusoidal", "learned and sinusoidal both change the embeddings"));
    CHECK(refused("none+cable", "none adds nothing"));
    CHECK(refused("learned,none", "all layers have it or none"));
    CHECK(refused("cable,", "expected one of the encodings"));
    CHECK(refused("rope+,none", "expected one of the encodings"));
    CHECK(position_max_length(parse_position("learned+cable,learned", 8)) == 8);
    const PositionShape d = {4, 2, 4};
    for (const char* pos : {"rope:clock=cable+cable", "cable,cable+rope:clock=cable", "cable+carope"}) {
        CHECK(throws_with([&] { position_tables(parse_position(pos, 8), d); }, "have columns of the qkv matmul")
              == EXIT_BAD_INPUT);
    }
    for (const char* pos : {"rope:clock=cable+ssmax", "carope+ssmax"}) {
        CHECK(throws_with([&] { position_tables(parse_position(pos, 8), d); }, "expected no ssmax") == EXIT_BAD_INPUT);
    }
    CHECK_NOTHROW(position_tables(parse_position("rope:clock=cable,cable,alibi+rope:clock=cable", 8), d));
    // each layer has its own columns, and each part the layers that it is in
    PositionTables t = position_tables(parse_position("none,cable,cable_nw,none", 8), d);
    CHECK(t.columns_of == std::vector<int>{0, 4, 2, 0});
    CHECK(t.extra_columns == 4);
    t = position_tables(parse_position("kerple,kerple_power", 8), d);
    CHECK(t.params[0].name == "kerple_r1");
    CHECK(t.params[2].name == "kerple_r1.1");
    CHECK(t.params[2].layers == 2);
    CHECK(throws_with([&] { position_tables(parse_position("t5_clip:K=5,t5_clip:K=6", 8), d); },
                      "two encodings keep a transformer.t5.weight for all layers") == EXIT_BAD_INPUT);
}
#endif

TEST_CASE("the tensors of encodings", "[positions]") {
    const PositionShape d = {2, 3, 4, 0, 0, false};
    const auto names = [&](const char* pos) {
        std::string all;
        const PositionTables t = position_tables(parse_position(pos, 8), d);
        for (const FileTensor& f : t.files) { all += f.layer == 0 ? f.name.substr(strlen("transformer.")) + " " : ""; }
        for (const TensorSpec& s : t.params) {
            all += strprintf("| %s %d %zux%zu%s", s.name.c_str(), s.layers, s.rows, s.cols, s.decay ? " decays" : "");
        }
        return all;
    };
    CHECK(names("learned") == "wpe.weight | wpe 0 8x12 decays");
    CHECK(names("t5") == "t5.weight | t5 0 32x3");
    CHECK(names("t5:buckets=12,distance=40") == "t5.weight | t5 0 12x3");
    CHECK(names("t5_clip") == "t5.weight | t5 0 15x3");
    CHECK(names("t5_clip:layers=own") == "h.0.attn.t5.weight | t5 2 15x3");
    CHECK(names("kerple") == "h.0.attn.kerple.r1 h.0.attn.kerple.r2 | kerple_r1 2 3x0| kerple_r2 2 3x0");
    CHECK(names("bam") == "h.0.attn.bam.scale h.0.attn.bam.shape | bam_a 2 3x0| bam_b 2 3x0");
    CHECK(names("alibi_trained") == "h.0.attn.alibi.r | alibi_r 2 3x0");
    CHECK(position_tables(parse_position("alibi_trained", 8), d).params[0].lo == 0.0f);
    CHECK(names("fire") == "h.0.attn.fire.c h.0.attn.fire.l h.0.attn.fire.mlp.0.weight h.0.attn.fire.mlp.0.bias "
                           "h.0.attn.fire.mlp.2.weight h.0.attn.fire.mlp.2.bias | fire_c 2 1x0| fire_l 2 1x0"
                           "| fire_w1 2 32x1| fire_b1 2 32x0| fire_w2 2 3x32| fire_b2 2 3x0");
    for (const char* name : {"kerple", "kerple_power"}) {
        const PositionTables t = position_tables(parse_position(name, 8), d);
        CHECK(t.params[0].lo == 0.01f);
        CHECK(t.params[1].lo == 0.01f);
        CHECK(t.params[1].hi == (name == std::string("kerple") ? FLT_MAX : 2.0f));
    }
}

TEST_CASE("an encoding binds its arrays by name", "[positions]") {
    const PositionShape shape = {1, 2, 4, 1, 8};
    const PositionConfig config = parse_position("cable", 8);
    TensorTable acts, params;
    for (const TensorSpec& s : position_tables(config, shape).acts) { acts.add(s); }
    PositionView v(shape);
    v.run = &config; v.config = &config.parts[0]; v.params = &params; v.acts = &acts;
    CHECK_NOTHROW(bind_encoding<CableFull>(v));
    std::swap(acts.specs[0].name, acts.specs[2].name);          // two arrays of the same shape
    CHECK(throws_with([&] { bind_encoding<CableFull>(v); }, "--pos cable binds tensor 0: expected S_offset, got g") ==
          EXIT_BAD_INPUT);
}

namespace {

// Two groups of columns; the first one starts open
struct Gated : Encoding {
    using Encoding::Encoding;
    template <class Tensors> void declare(Tensors& t) {
        t.columns("gate", t.NH, constant(4.0f));
        t.columns("key", 2 * t.NH);
    }
};

} // namespace

TEST_CASE("the columns of an encoding start as it says", "[positions][encodings]") {
    PositionTables t(PositionShape{2, 3, 4});
    t.parts = {{{0, 1}}};
    Gated{PositionView()}.declare(t);
    REQUIRE(t.extra_columns == 9);
    TensorSpec weight, bias;                            // as a trainer declares them: (L,OC,C), (L,OC)
    weight.name = "qkvw";
    bias.name = "qkvb";
    weight.layers = bias.layers = 2;
    weight.rows = bias.rows = 48;                       // 3C + 9, rounded up
    weight.cols = 12;
    weight.init = normal(0.02f);
    TensorTable table;
    table.add(weight);
    table.add(bias);
    std::vector<float> x(table.total, 0.0f);
    init_tensors(x.data(), {0, table.total}, table, t.files, 1);
    for (int l = 0; l < 2; l++) {
        const float *w = table.pointer(x.data(), "qkvw")(l), *b = table.pointer(x.data(), "qkvb")(l);
        for (int row = 0; row < 48; row++) {
            INFO("layer " << l << ", row " << row);
            const bool gate = row >= 36 && row < 39, own = row >= 36 && row < 45;
            CHECK(b[row] == (gate ? 4.0f : 0.0f));
            double squares = 0;
            for (int c = 0; c < 12; c++) { squares += (double)w[row * 12 + c] * w[row * 12 + c] / 12; }
            const double rms = std::sqrt(squares);
            // normal, with std 0.02, only in the encoding's rows
            CHECK((own ? rms > 0.005 && rms < 0.05 : rms == 0));
        }
    }
    std::string names;
    for (const FileTensor& f : t.files) {
        names += f.layer == 0 ? f.name.substr(strlen("transformer.h.0.attn.")) + " " : "";
    }
    CHECK(names == "gate.weight gate.bias key.weight key.bias ");
}

} // namespace tests
