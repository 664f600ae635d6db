// test_positions.cu -- the bias functors of every encoding against test/oracle_positions.cu: values, gradients, and
// tokens that arrive in pieces.
//
// A value may be off by MULTIPLE times the error of the oracle in float32, or by an ulp of the largest one. A gradient
// is a sum over i, j, and may be off by a multiple of float32's epsilon times the root of the sum of its terms'
// squares, which is the size of a sum of that many roundings. POSITION_ERRORS=1 prints the measured errors.
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

// Two layers of an encoding with random parameters and inputs; layer 1 is the one that is looked at.
struct Fixture {
    PositionConfig config;
    PositionTables tables;
    TensorTable params, acts;
    int B, T, NH, HS, C, OC;
    std::vector<float> master_host, qkv_host;
    std::unique_ptr<Array<float>> master, grads, act, qkv;

    Fixture(const PositionConfig& config, int B, int T, int NH, int HS, bool causal, uint64_t seed)
        : config(config), B(B), T(T), NH(NH), HS(HS), C(NH * HS) {
        tables = position_tables(this->config, {2, NH, HS, B, T, causal});
        OC = 3 * C + tables.extra_columns;
        for (const TensorSpec& s : tables.params) { params.add(s); }
        for (TensorSpec s : tables.acts) {
            s.layers = s.keep == Keep::Scratch ? 0 : s.layers;
            acts.add(s);
        }
        Random random;
        random.engine.seed(seed);
        const auto draw = [&](float lo, float hi) { return (float)random.uniform(lo, hi); };
        master_host.assign(params.total + 1, 0.0f);
        for (size_t i = 0; i < params.specs.size(); i++) {
            const TensorSpec& s = params.specs[i];
            for (size_t e = 0; e < s.size(); e++) {
                float& x = master_host[params.offsets[i] + e];
                x = s.lo > -FLT_MAX || s.hi < FLT_MAX ? draw_parameter(s, random) : draw(-1.0f, 1.0f);
                if (s.name == "fire_c") { x = e == 0 ? 0.2f : -0.13f; }     // only the gradient sees the sign
                if (s.name == "fire_l") { x = e == 0 ? 1.0f : -0.04f; }     // L = 20.48: both sides of max(L, i)
            }
        }
        qkv_host.resize((size_t)B * T * OC);
        for (float& x : qkv_host) {     // away from 0, the kink of ReLU
            x = draw(-1.5f, 1.5f);
            x += x >= 0.0f ? 0.01f : -0.01f;
        }
        master.reset(new Array<float>(master_host));
        grads.reset(new Array<float>(std::vector<float>(params.total + 1, 1.0f)));
        act.reset(new Array<float>(acts.total + 1));
        qkv.reset(new Array<float>(qkv_host));
    }
    PositionView view(int layer = 1) const {
        PositionView v(tables);
        v.run = &config; v.config = &config.parts[0]; v.layer = layer; v.OC = OC;
        v.params = &params; v.acts = &acts;
        v.master = master->p; v.grads = grads->p; v.act_data = act->p;
        return v;
    }
    // rows t0 .. t0+n-1 are new; layer 0 goes first, as in a model
    void prepare(int n, int t0) {
        Array<float> other(qkv_host);
        with_position(view(0), [&](auto e) { e.prepare_forward(other.p, B, n, t0, Stream(0)); });
        with_position(view(1), [&](auto e) { e.prepare_forward(qkv->p, B, n, t0, Stream(0)); });
    }
    // the bias (B*NH,T,T) of queries begin .. end-1
    std::vector<float> bias(int begin, int end) const {
        Array<float> out((size_t)B * NH * T * T);
        with_position(view(), [&](auto e) {
            const auto bias = e.bias();
            launch(bias_kernel<std::decay_t<decltype(bias)>>, Grid((size_t)B * NH, 64, 0, Stream(0)), out.p, bias, T,
                   begin, end, tables.causal);
        });
        return out.host();
    }
    std::vector<float> bias() const { return bias(0, T); }
    // of the heads of q, and after them those of k
    double query_factor(const OracleLayer<double>& o, int h, int t) const {
        const int keys = o.causal ? t + 1 : T;
        return h < NH ? oracle_query_factor(o, h, keys) : 1.0;
    }

    OracleLayer<double> oracle(int b = 0) const {
        OracleLayer<double> o = oracle_of(config);
        o.causal = tables.causal;
        o.T = T;
        o.NH = NH;
        o.C = C;
        o.HS = HS;
        for (size_t i = 0; i < params.specs.size(); i++) {
            const TensorSpec& s = params.specs[i];
            const float* first = &master_host[params.offsets[i] + (s.layers > 0 ? s.layer_size() : 0)];
            o.params[s.name].assign(first, first + s.layer_size());
        }
        if (config.scaling_factor == 0) { o.stretch = std::max(1.0, (double)T / config.T_train); }
        o.width = tables.extra_columns;
        for (int t = 0; t < T; t++) {
            const float* row = &qkv_host[((size_t)b * T + t) * OC + 3 * C];
            o.columns.insert(o.columns.end(), row, row + o.width);
        }
        return o;
    }
};

PositionConfig configured(const std::string& name, int T) {
    return parse_position(name == "t5_clip" && T > 10 ? "t5_clip:K=5" : name, T);
}

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

#define CHECK_WORST(worst, floor, tolerance) do { \
        INFO((worst).text()); \
        measured[what] = std::max(measured[what], (worst).relative(floor)); \
        CHECK((worst).relative(floor) <= (tolerance)); \
    } while (0)
std::map<std::string, double> measured;     // printed when POSITION_ERRORS is set, to choose tolerances by

// What float32 loses of S costs an angle as much, and twice as much where LongRoPE turns twice as fast.
double clock_error(const Fixture& f) {
    Worst S;
    for (int bh = 0; bh < f.B * f.NH && f.oracle().values.count("clock") > 0 && f.oracle().width > 0; bh++) {
        const OracleLayer<double> o = f.oracle(bh / f.NH);
        const std::vector<double> want = oracle_cable_S<'r'>(o, bh % f.NH);
        const std::vector<float> plain = oracle_cable_S<'r'>(rounded(o), bh % f.NH);
        for (size_t t = 0; t < want.size(); t++) { S.see(plain[t], want[t]); }
    }
    for (int e = 0; e < f.B * f.NH * f.HS / 2 * f.T && f.config.name == "carope"; e++) {
        const int bh = e / f.T / (f.HS / 2), i = e / f.T % (f.HS / 2);
        const OracleLayer<double> o = f.oracle(bh / f.NH);
        S.see(oracle_carope_angle(rounded(o), bh % f.NH, i, e % f.T), oracle_carope_angle(o, bh % f.NH, i, e % f.T));
    }
    return 2 * MULTIPLE * S.error;
}

// The values, and that v does not change
void check_forward(Fixture& f) {
    f.prepare(f.T, 0);
    const std::vector<float> qkv = f.qkv->host(), bias = f.bias();
    Worst values, plain, rotated, rest;
    bool finite = true;
    for (int b = 0; b < f.B; b++) {
        const OracleLayer<double> o = f.oracle(b);
        for (int h = 0; h < f.NH; h++) {
            const std::vector<double> want = oracle_bias(o, h);
            const std::vector<float> in_float = oracle_bias(rounded(o), h);
            for (size_t e = 0; e < want.size(); e++) { plain.see(in_float[e], want[e]); }
            for (int i = 0; i < f.T; i++) {
                for (int j = 0; j < f.T; j++) {
                    const float got = bias[(((size_t)b * f.NH + h) * f.T + i) * f.T + j];
                    if (j > i && f.tables.causal) {       // masked: any finite value inside a tile, not computed beyond
                        finite = finite && (std::isfinite(got) || j / TILE > i / TILE);
                    } else {
                        values.see(got, want[(size_t)i * f.T + j]);
                    }
                }
            }
        }
        for (int t = 0; t < f.T; t++) {
            const size_t row = ((size_t)b * f.T + t) * f.OC;
            for (int h = 0; h < 2 * f.NH; h++) {
                const float* x = &f.qkv_host[row + (size_t)h * f.HS];
                std::vector<double> want = oracle_rotate(o, std::vector<double>(x, x + f.HS), h % f.NH, t);
                for (double& e : want) { e *= f.query_factor(o, h, t); }
                for (int c = 0; c < f.HS; c++) { rotated.see(qkv[row + (size_t)h * f.HS + c], want[(size_t)c]); }
            }
            for (int c = 2 * f.C; c < f.OC; c++) { rest.see(qkv[row + c], f.qkv_host[row + c]); }
        }
    }
    CHECK(finite);
    std::string what = f.config.name + " values";
    CHECK(plain.relative(1.0) <= 1e-4);                         // or the oracle's own error would hide everything
    CHECK_WORST(values, 1.0, MULTIPLE * std::max(plain.relative(1.0), (double)FLT_EPSILON));
    what = "rotation";
    CHECK_WORST(rotated, 1.0, 3e-7 + clock_error(f));
    CHECK(rest.error == 0.0);
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

// The derivative in x, a parameter, through the factors of the queries; dqkv before prepare_backward
void add_query_slope(Slope& s, const Fixture& f, OracleLayer<double>& o, double& x, const std::vector<float>& dqkv) {
    for (int row = 0; row < f.B * f.T; row++) {
        for (int h = 0; h < f.NH; h++) {
            const double slope = oracle_query_slope(o, x, h, o.causal ? row % f.T + 1 : f.T);
            for (int d = 0; d < f.HS && slope != 0; d++) {
                const size_t at = (size_t)row * f.OC + h * f.HS + d;
                const double term = (double)dqkv[at] * f.qkv_host[at] * slope;
                s.value += term;
                s.squares += term * term;
            }
        }
    }
}

// The derivative in z, a column of sequence b, through the rotation of q and k; dqkv before prepare_backward
void add_rotation_slope(Slope& s, const Fixture& f, OracleLayer<double>& o, double& z, const std::vector<float>& dqkv,
                        int b) {
    for (int e = 0; e < f.T * 2 * f.NH; e++) {
        const int t = e / (2 * f.NH), h = e % (2 * f.NH);
        const size_t at = ((size_t)b * f.T + t) * f.OC + (size_t)h * f.HS, end = at + f.HS;
        const std::vector<double> x(&f.qkv_host[at], &f.qkv_host[0] + end), dx(&dqkv[at], &dqkv[0] + end);
        const double term = dot(oracle_rotate_slope(o, z, x, h % f.NH, t), dx);
        s.value += term;
        s.squares += term * term;
    }
}

void check_parameter_gradients(Fixture& f, const std::vector<float>& da, const std::vector<float>& dqkv) {
    const std::vector<float> grads = f.grads->host();
    std::vector<OracleLayer<double>> sequences;
    for (int b = 0; b < f.B; b++) { sequences.push_back(f.oracle(b)); }
    const bool has_bias = find_oracle(f.config.name).has_bias;
    for (size_t i = 0; i < f.params.specs.size(); i++) {
        const TensorSpec& s = f.params.specs[i];
        const size_t layer = s.layers > 0 ? s.layer_size() : 0;
        Worst worst;
        double squares = 0;
        for (size_t e : some(s.layer_size(), f.T > 40 ? 8 : 40)) {
            Slope want;
            for (int bh = 0; bh < f.B * f.NH && has_bias; bh++) {
                OracleLayer<double>& o = sequences[(size_t)(bh / f.NH)];
                add_slope(want, o, o.params[s.name][e], &da[(size_t)bh * f.T * f.T], bh % f.NH);
            }
            add_query_slope(want, f, sequences[0], sequences[0].params[s.name][e], dqkv);
            squares = std::max(squares, want.squares);
            // they were 1 before, and accumulate
            worst.see(grads[f.params.offsets[i] + layer + e] - 1.0f, want.value);
        }
        const std::string what = f.config.name + " d" + s.name;
        INFO(what);
        CHECK_WORST(worst, std::max(1.0, std::sqrt(squares)), 16 * FLT_EPSILON);
        bool untouched = true;
        for (size_t e = 0; e < layer; e++) { untouched = untouched && grads[f.params.offsets[i] + e] == 1.0f; }
        CHECK(untouched);                                                       // layer 0
    }
}

void check_input_gradients(const Fixture& f, const std::vector<float>& da, const std::vector<float>& before,
                           const std::vector<float>& after) {
    Worst columns, rotated, v;
    double squares = 0;
    for (int b = 0; b < f.B; b++) {
        OracleLayer<double> o = f.oracle(b);
        for (size_t e : some(o.columns.size(), 40)) {
            const size_t t = e / (size_t)o.width, c = e % (size_t)o.width;
            Slope want;
            for (int h = 0; h < f.NH; h++) {
                add_slope(want, o, o.columns[e], &da[((size_t)b * f.NH + h) * f.T * f.T], h);
            }
            if (!find_oracle(o.name).has_bias) { add_rotation_slope(want, f, o, o.columns[e], before, b); }
            squares = std::max(squares, want.squares);
            columns.see(after[((size_t)b * f.T + t) * f.OC + 3 * f.C + c], want.value);
        }
        for (int t = 0; t < f.T; t++) {
            const size_t row = ((size_t)b * f.T + t) * f.OC;
            for (int c = 0; c < f.HS; c++) {    // the rotation is linear: its columns are the images of unit vectors
                std::vector<double> unit((size_t)f.HS, 0.0);
                unit[(size_t)c] = 1.0;
                for (int h = 0; h < 2 * f.NH; h++) {
                    const std::vector<double> image = oracle_rotate(o, unit, h % f.NH, t);
                    double want = 0;
                    for (int k = 0; k < f.HS; k++) { want += before[row + (size_t)h * f.HS + k] * image[(size_t)k]; }
                    rotated.see(after[row + (size_t)h * f.HS + c], want * f.query_factor(o, h, t));
                }
            }
            for (int c = 2 * f.C; c < 3 * f.C; c++) { v.see(after[row + c], before[row + c]); }
        }
    }
    std::string what = f.config.name + " dcolumns";
    CHECK_WORST(columns, std::max(1.0, std::sqrt(squares)), 16 * FLT_EPSILON + clock_error(f));
    what = "rotation back";
    CHECK_WORST(rotated, 1.0, 3e-7 + clock_error(f));
    CHECK(v.error == 0.0);
}

void check_backward(Fixture& f) {
    std::vector<float> da = draws((size_t)f.B * f.NH * f.T * f.T, -1.0f, 1.0f, 77);
    for (int h = 0; h < f.NH && find_oracle(f.config.name).has_bias && !find_oracle(f.config.name).reads_scores; h++) {
        const std::vector<double> B = oracle_bias(f.oracle(), h);
        for (size_t i = 0; i < (size_t)f.T; i++) {      // no query sees its own key there: bam
            const size_t own = i * f.T + i;
            for (int b = 0; b < f.B && B[own] < -100; b++) { da[((size_t)b * f.NH + h) * f.T * f.T + own] = 0; }
        }
    }
    std::vector<float> dqkv = draws(f.qkv_host.size(), -1.0f, 1.0f, 78);
    for (int row = 0; row < f.B * f.T; row++) {         // the extra columns are overwritten, not added to
        for (int c = 3 * f.C; c < f.OC; c++) { dqkv[(size_t)row * f.OC + c] = NAN; }
    }
    Array<float> device_da(da), device_dqkv(dqkv);
    with_position(f.view(), [&](auto e) {
        e.begin_backward(f.qkv->p, f.B, f.T, Stream(0));
        const auto bias = e.bias();
        const Grid grid((size_t)f.B * f.NH, 64, sizeof(float) * TILE * TILE, Stream(0));
        launch(walk_kernel<std::decay_t<decltype(bias)>>, grid, bias, device_da.p, f.T, f.tables.causal);
        e.prepare_backward(device_dqkv.p, f.qkv->p, f.B, f.T, Stream(0));
    });
    check_parameter_gradients(f, da, dqkv);
    check_input_gradients(f, da, dqkv, device_dqkv.host());
}

struct Sizes { int T, NH, HS; };

} // namespace

TEST_CASE("every encoding agrees with its oracle", "[positions][encodings]") {
    const std::vector<std::string> names = encodings_and_forms();
    const size_t kind = GENERATE_COPY(range((size_t)0, names.size()));
    const bool causal = GENERATE(true, false);
    const std::string name = names[kind];
    if (!causal && directions(name).size() == 1) { return; }
    for (const Sizes& s : {Sizes{1, 1, 8}, Sizes{2, 3, 2}, Sizes{37, 1, 37}, Sizes{37, 3, 8}, Sizes{130, 3, 2}}) {
        if ((name == "carope" || name.substr(0, 4) == "rope") && s.HS % 2 != 0) { continue; }
        Fixture f(configured(name, s.T), 2, s.T, s.NH, s.HS, causal, 10 + (uint64_t)kind);
        INFO(name << (causal ? " causal" : " bidirectional") << " T " << s.T << " NH " << s.NH << " HS " << s.HS);
        check_forward(f);
        check_backward(f);
    }
    if (getenv("POSITION_ERRORS") != nullptr && kind == names.size() - 1 && !causal) {
        for (const auto& m : measured) { printf("%-24s %.2e\n", m.first.c_str(), m.second); }
    }
}

// As in generation: what the first tokens left behind must be enough for the next.
TEST_CASE("tokens in pieces give what they give at once", "[positions][encodings]") {
    const std::vector<std::string> names = encodings_and_forms();
    const std::string name = names[GENERATE_COPY(range((size_t)0, names.size()))];
    const int T = 300;
    Fixture whole(configured(name, T), 1, T, 3, 8, true, 20), pieces(configured(name, T), 1, T, 3, 8, true, 20);
    whole.prepare(T, 0);
    const std::vector<float> want = whole.bias(), x = draws((size_t)T * whole.C, -1.0f, 1.0f, 21);
    Array<float> x_whole(x), x_pieces(x);
    with_position(whole.view(), [&](auto e) { e.embed_forward(x_whole.p, 1, T, 0, Stream(0)); });
    Worst bias;
    int t0 = 0;
    for (int n : {5, 1, 122, 1, 1, 126, 1, 43}) {           // 128 and 256 are met from below and passed
        pieces.prepare(n, t0);
        float* x_new = x_pieces.p + (size_t)t0 * pieces.C;
        with_position(pieces.view(), [&](auto e) { e.embed_forward(x_new, 1, n, t0, Stream(0)); });
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
    const std::vector<float> a = whole.act->host(), b = pieces.act->host();
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
    const PositionConfig config = parse_position("cable_nw", 1024);
    Fixture f(config, 1, T, 1, 2, true, 30);
    f.prepare(T, 0);
    const std::vector<double> S = oracle_cable_S<'r'>(f.oracle(), 0);
    const TensorTable& a = f.acts;
    const std::vector<float> act = f.act->host();
    const size_t offset = a.offsets[(size_t)a.index("S_offset")] + (size_t)T;      // layer 1
    const size_t origin = a.offsets[(size_t)a.index("S_origin")] + 2 * (size_t)T / 128;
    double relative = 0, absolute = 0;
    double across = 0;
    for (int t = 0; t < T; t++) {
        double from;
        memcpy(&from, &act[origin + 2 * (size_t)(t / 128)], sizeof(from));
        const double error = std::fabs(from + act[offset + (size_t)t] - S[(size_t)t]);
        absolute = std::max(absolute, error);
        relative = std::max(relative, S[(size_t)t] > 0 ? error / S[(size_t)t] : error);
        if (t >= 128) {     // a difference as the functor takes it
            double before;
            memcpy(&before, &act[origin + 2 * (size_t)(t / 128 - 1)], sizeof(before));
            const float D = (float)(from - before) + act[offset + (size_t)t] - act[offset + (size_t)t - 128];
            across = std::max(across, std::fabs(D - (S[(size_t)t] - S[(size_t)t - 128])));
        }
    }
    if (getenv("POSITION_ERRORS") != nullptr) {
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
    Fixture f(parse_position("fire", T), 1, T, 1, 2, false, 31);
    f.prepare(T, 0);
    const OracleLayer<double> o = f.oracle();
    const std::vector<double> &w1 = o.params.at("fire_w1"), &b1 = o.params.at("fire_b1"), &w2 = o.params.at("fire_w2");
    const double c = std::fabs(o.params.at("fire_c")[0]), L = std::fabs(o.params.at("fire_l")[0]) * 512;
    const std::vector<float> act = f.act->host(), da = draws((size_t)T * T, 0.5f, 1.0f, 32);
    const auto table_of = [&](const char* name) {
        return &act[(size_t)(f.acts.pointer(f.act->p, name)(1) - f.act->p)];
    };
    std::vector<double> psi((size_t)T), norm(psi);
    double off = 0;
    for (int t = 0; t < T; t++) {
        psi[(size_t)t] = std::log(1 + c * t);
        norm[(size_t)t] = 1 / (std::log(1 + c * std::max(L, (double)t)) + 1e-6);
        const float table = table_of("fire_psi")[T - 1 - t], inverse = table_of("fire_inv")[t];
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
    f.grads->set(std::vector<float>(f.params.total + 1));
    const Fire fire = bind_encoding<Fire>(f.view());
    fire.begin_backward(nullptr, 1, T, Stream(0));
    launch(walk_kernel<FireBias>, Grid(1, 64, sizeof(float) * TILE * TILE, Stream(0)), fire.bias(), device_da.p, T,
           false);
    fire.prepare_backward(nullptr, nullptr, 1, T, Stream(0));
    const std::vector<float> grads = f.grads->host();
    for (const auto& tensor : want) {
        // of layer 1
        const size_t first = f.params.offsets[(size_t)f.params.index(tensor.first)] + tensor.second.size();
        double relative = 0;
        for (size_t k = 0; k < tensor.second.size(); k++) {
            const double exact = tensor.second[k];
            relative =
                std::max(relative, exact == 0 ? std::fabs(grads[first + k]) : std::fabs(grads[first + k] / exact - 1));
        }
        if (getenv("POSITION_ERRORS") != nullptr) {
            printf("fire, T %d: d%s off by %.2e\n", T, tensor.first.c_str(), relative);
        }
        INFO("d" << tensor.first);
        CHECK(relative <= 3e-7);        // 6e-8 is measured, 7e-6 with all of a piece in one float32
    }
}

namespace {

// of each head, by the bias of the second token for the first
std::vector<float> slopes(const char* pos, int NH) {
    Fixture f(parse_position(pos, 2), 1, 2, NH, 2, true, 1);
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
            Fixture f(parse_position(form.name, T), 1, T, 1, 2, causal, 1);
            for (int e = 0; e < form.buckets; e++) { f.master_host[f.params.offsets[0] + (size_t)e] = (float)e; }
            f.master->set(f.master_host);
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
    Fixture f(parse_position("rope", T), 1, T, 1, HS, true, 50);
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

// A float32 sum of frequencies would be off by more at this length.
TEST_CASE("carope starts as rope, even at 131,072 tokens", "[positions]") {
    const int T = 131072, HS = 8;
    std::vector<std::vector<float>> turned;
    for (const char* pos : {"rope", "carope"}) {
        Fixture f(parse_position(pos, 1024), 1, T, 1, HS, true, 70);
        const std::vector<float> first(&f.qkv_host[0], &f.qkv_host[0] + 2 * HS);            // every token's q and k
        float z = 0;
        for (const FileTensor& file : f.tables.files) {
            const bool weight = file.tensor == "qkvw";
            REQUIRE((file.init.has_value() && file.init->kind == Init::Constant));
            CHECK((!weight || file.init->a == 0.0f));       // so that z is the bias for every token
            z = weight ? z : file.init->a;
        }
        for (int t = 0; t < T; t++) {
            std::copy(first.begin(), first.end(), &f.qkv_host[(size_t)t * f.OC]);
            if (f.OC > 3 * HS) { f.qkv_host[(size_t)t * f.OC + 3 * HS] = z; }
        }
        f.qkv->set(f.qkv_host);
        f.prepare(T, 0);
        const std::vector<float> x = f.qkv->host();
        turned.emplace_back();
        for (int i = 0; i < T; i += 31) {                   // q.k by pair, of each query with a key some way before it
            for (int j : {i, i - 1, i - 100, i / 3, 0}) {
                for (int c = 0; c < HS && j >= 0; c += 2) {
                    const float *q = &x[(size_t)i * f.OC + c], *k = &x[(size_t)j * f.OC + HS + c];
                    turned.back().push_back(q[0] * k[0] + q[1] * k[1]);
                }
            }
        }
    }
    Worst worst;
    for (size_t e = 0; e < turned[0].size(); e++) { worst.see(turned[1][e], turned[0][e]); }
    INFO(worst.text());
    if (getenv("POSITION_ERRORS") != nullptr) { printf("carope at its start: %.2e\n", worst.error); }
    CHECK(worst.error <= 1e-3);
}

TEST_CASE("rope's scalings", "[positions]") {
    for (RopeScaling scaling : {RopeScaling::PI, RopeScaling::NTK, RopeScaling::YaRN, RopeScaling::LongRoPE}) {
        for (const auto& [clock, s] : {std::pair<const char*, double>{"token", 0.0}, {"token", 4.0}, {"cable", 4.0}}) {
            // 20: s = 1; 160: more pairs than a launch takes
            for (const Sizes& shape : {Sizes{130, 1, 2}, Sizes{130, 2, 16}, Sizes{20, 2, 16}, Sizes{37, 2, 16},
                                       Sizes{40, 1, 160}}) {
                PositionConfig config = parse_position(std::string("rope:theta=5000,clock=") + clock, 37);
                config.scaling = scaling;
                config.scaling_factor = s;
                draw_factors(config, shape.HS);
                Fixture f(config, 1, shape.T, shape.NH, shape.HS, true, 60);
                const OracleLayer<double> o = f.oracle();
                INFO(o.scaling << " stretch " << o.stretch << " T " << shape.T << " HS " << shape.HS);
                check_forward(f);
                if (o.width > 0) { check_backward(f); }
                CHECK(Rope(f.view()).score_factor(shape.T) == Approx(oracle_score_factor(o)).epsilon(1e-6));
            }
        }
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
    PositionConfig longrope = parse_position("rope", 4);
    longrope.scaling = RopeScaling::LongRoPE;
    draw_factors(longrope, 4);
    CHECK_NOTHROW(position_tables(longrope, d));
    longrope.T_original = 1;
    CHECK(throws_with([&] { position_tables(longrope, d); }, "at least 2 tokens, got 1") == EXIT_BAD_INPUT);
    longrope.T_original = 4;
    for (std::vector<double>* factors : {&longrope.short_factor, &longrope.long_factor}) {
        const std::vector<double> kept = *factors;
        factors->push_back(1);
        CHECK(throws_with([&] { position_tables(longrope, d); }, "2 numbers, one for each pair of a head's 4 channels")
              == EXIT_BAD_INPUT);
        *factors = kept;
    }
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
    Fixture f(parse_position("learned", 8), 1, 9, 1, 2, true, 1);
    CHECK(position_max_length(f.config) == 8);
    Array<float> x((size_t)9 * 2);
    const auto embed = [&](int n, int t0) { Learned(f.view()).embed_forward(x.p, 1, n, t0, Stream(0)); };
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
