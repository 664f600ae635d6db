// layer.h -- one layer of a model that is nothing but attention: what a trainer hands to an encoding, and the oracle of
// one sequence.
#pragma once

#include <memory>

#include "test/harness.h"
#include "test/oracle_positions.h"

#include "llmc/position/table.h"

struct LayerShape { int B, T, NH, HS; };             // T: tokens of a sequence, or of the longest of a batch

// The names in the table. A test that loops over them is tagged [encodings].
inline std::vector<std::string> encodings() {
    std::vector<std::string> names;
    for (const PositionRow& row : position_rows) { names.push_back(row.name); }
    return names;
}

// and several of them in one model, of an even number of layers
inline std::vector<std::string> encodings_of_models() {
    std::vector<std::string> all = encodings();
    all.push_back("none,cable");
#if !defined(FEW_POSITIONS)
    all.push_back("rope+cable_nw");
    all.push_back("alibi+rope:clock=cable");
    all.push_back("ssmax+rope+cable");
    all.push_back("ssmax+cope:npos=5,none");
    all.push_back("ssmax+alibi,ssmax+bam");
    all.push_back("ssmax+kcable:weight=inside,ssmax+fire");
    all.push_back("sinusoidal+kerple+rope:theta=100,sinusoidal+t5_clip:K=9,layers=own");
#endif
    return all;
}

// and the forms of theirs that hyperparameters choose
inline std::vector<std::string> encodings_and_forms() {
    std::vector<std::string> all = encodings();
    for (const std::string form : oracle_forms) {
        const std::string name = form.substr(0, form.find(':'));
        if (std::find(all.begin(), all.end(), name) != all.end()) { all.push_back(form); }
    }
    return all;
}

// Which of causal and bidirectional an encoding has a meaning in
inline std::vector<bool> directions(const std::string& name) {
    const bool causal_only = (encoding_traits(parse_position(name, 64).parts[0]).hooks & COUNTS_GATES) != 0;
    return causal_only ? std::vector<bool>{true} : std::vector<bool>{true, false};
}

// One element of a parameter: normal, or inside its bounds where it has some
inline float draw_parameter(const TensorSpec& p, Random& random) {
    if (p.lo == -FLT_MAX && p.hi == FLT_MAX) { return random.normal(); }
    const double lo = p.lo == -FLT_MAX ? -2.0 : p.lo;
    const double hi = p.hi == FLT_MAX ? 2.0 : p.hi;
    return (float)random.uniform(lo + 0.05 * (hi - lo), hi - 0.05 * (hi - lo));
}

// Gives LongRoPE a factor for each pair of HS channels.
inline void draw_factors(PositionConfig& config, int HS) {
    config.short_factor.clear();
    config.long_factor.clear();
    for (int i = 0; i < HS / 2; i++) {
        config.short_factor.push_back(1 + 0.05 * i);
        config.long_factor.push_back(i == 0 ? 0.5 : 1 + i);
    }
}

// What an oracle is told of a configuration; its sizes, parameters and columns are left to fill in
inline OracleLayer<double> oracle_of(const PositionConfig& config) {
    OracleLayer<double> o;
    o.name = config.name;
    o.T_train = config.T_train;
    o.values.insert(config.parts[0].values.begin(), config.parts[0].values.end());
    const char* scaling[] = {"none", "pi", "ntk", "yarn", "longrope"};
    o.scaling = scaling[(int)config.scaling];
    o.short_factor = config.short_factor;
    o.long_factor = config.long_factor;
    o.stretch = config.scaling_factor > 0 ? config.scaling_factor : 1.0;
    return o;
}

// Arrays over time have room for `stride` tokens. Parameters start at 0: fill() draws them.
struct AttentionLayer {
    LayerShape s;
    bool causal;
    int stride, C, OC;
    PositionConfig config;
    PositionTables tables;
    TensorTable params, acts;
    std::vector<float> host_params;
    std::vector<int> lengths;                   // (B) or empty: all have T tokens
    std::unique_ptr<Array<float>> master, grads, act_data;
    std::unique_ptr<Array<int>> kv_len;
    std::vector<int> documents;                 // (B,stride) or empty: where each token's document begins
    std::unique_ptr<Array<int>> device_documents;
    PositionView view;

    // pos: as --pos says it
    AttentionLayer(const std::string& pos, LayerShape s, bool causal, int stride, int T_train, bool decodes = false)
        : s(s), causal(causal), stride(stride), C(s.NH * s.HS), config(parse_position(pos, T_train)) {
        tables = position_tables(config, {1, s.NH, s.HS, s.B, stride, causal, decodes});
        OC = round_up(3 * C + tables.extra_columns, 8);
        for (const TensorSpec& p : tables.params) { params.add(p); }
        for (const TensorSpec& a : tables.acts) { acts.add(a); }
        host_params.assign(params.total, 0.0f);
        master.reset(new Array<float>(host_params));
        grads.reset(new Array<float>(host_params));
        act_data.reset(new Array<float>(acts.total));
        view = PositionView(tables);
        view.run = &config;
        view.config = &config.parts[0];
        view.OC = OC;
        view.params = &params;
        view.acts = &acts;
        view.master = *master;
        view.grads = *grads;
        view.act_data = *act_data;
    }
    AttentionLayer(const AttentionLayer&) = delete;

    // its encoding, as a model calls it
    LayerPosition position() const {
        LayerPosition p;
        p.views[0] = view;
        p.count = 1;
        return p;
    }
    float* act(const std::string& name) const { return acts.pointer((float*)*act_data, name)(); }
    float* host(const std::string& name) { return params.pointer(host_params.data(), name)(); }

    // draw(spec): the values of one tensor, into host()
    template <class F> void fill(F draw) {
        for (const TensorSpec& p : tables.params) { draw(p); }
        master->set(host_params);
    }
    void set_lengths(const std::vector<int>& all) {
        lengths = all;
        kv_len.reset(new Array<int>(all));
        view.kv_len = *kv_len;
    }
    void set_documents(const std::vector<int>& begin) {
        documents = begin;
        device_documents.reset(new Array<int>(documents));
        view.mask.end_of_text = 0;
        view.mask.documents = *device_documents;
    }
    // AttentionMask's rule, which the oracles have from here
    bool sees(int b, int i, int j) const {
        const int window = view.mask.window;
        const int begin = documents.empty() ? 0 : documents[(size_t)b * stride + i];
        return j >= begin && (window == 0 || (i > j ? i - j : j - i) < window || j - begin < view.mask.sinks);
    }
    // -inf where a query of sequence b does not see a key: bias (T,T)
    template <class R> std::vector<R> hidden(std::vector<R> bias, int b, int T) const {
        for (size_t e = 0; e < bias.size(); e++) {
            if (!sees(b, (int)e / T, (int)e % T)) { bias[e] = -INFINITY; }
        }
        return bias;
    }
    int tokens(int b) const { return lengths.empty() ? s.T : lengths[(size_t)b]; }

    // the first `tokens` tokens of sequence b, with qkv (B,stride,OC) as it was before the encoding prepared it
    OracleLayer<double> oracle(const std::vector<float>& qkv, int b, int tokens) {
        OracleLayer<double> o = oracle_of(config);
        o.causal = causal;
        if (config.scaling_factor == 0) { o.stretch = std::max(1.0, (double)stride / config.T_train); }
        o.T = tokens;
        o.NH = s.NH;
        o.C = C;
        o.HS = s.HS;
        for (const TensorSpec& p : tables.params) { o.params[p.name].assign(host(p.name), host(p.name) + p.size()); }
        o.width = tables.extra_columns;
        for (int t = 0; t < tokens; t++) {
            const float* row = &qkv[((size_t)b * stride + t) * OC + 3 * C];
            o.columns.insert(o.columns.end(), row, row + o.width);
        }
        return o;
    }
    // how many of the `all` tokens of sequence b query i sees
    int seen(int b, int i, int all) const {
        int keys = 0;
        for (int j = 0; j < (causal ? i + 1 : all); j++) { keys += sees(b, i, j); }
        return keys;
    }
    // (HS): part 0, 1, 2 is q, k, v of head h at token t of sequence b, turned if the encoding turns it, and scaled
    std::vector<double> vector(const OracleLayer<double>& o, const std::vector<float>& qkv, int b, int h, int t,
                               int part) const {
        const float* x = &qkv[((size_t)b * stride + t) * OC + part * C + h * s.HS];
        std::vector<double> v(x, x + s.HS);
        const double factor = part == 0 ? oracle_query_factor(o, h, seen(b, t, o.T)) : 1.0;
        for (double& e : v) { e *= factor; }
        return part < 2 ? oracle_rotate(o, v, h, t) : v;
    }
    // (T,HS): q or k of a head as attention takes it
    std::vector<double> vectors(const OracleLayer<double>& o, const std::vector<float>& qkv, int b, int h,
                                int part) const {
        std::vector<double> x;
        for (int t = 0; t < o.T; t++) {
            const std::vector<double> v = vector(o, qkv, b, h, t, part);
            x.insert(x.end(), v.begin(), v.end());
        }
        return x;
    }
    // cope's oracle of a head, of the queries from `first` on
    template <class R>
    CopeHead<R> cope(const OracleLayer<double>& o, const std::vector<float>& qkv, int b, int h, int first = 0) const {
        const R scale = R(oracle_score_factor(o) / std::sqrt((double)s.HS));
        const auto seen_by = [&](int i, int j) { return sees(b, i, j); };
        return CopeHead<R>(as<R>(vectors(o, qkv, b, h, 0)), as<R>(vectors(o, qkv, b, h, 1)),
                           as<R>(o.params.at("cope_e")), scale, (size_t)o.T, (size_t)s.HS, seen_by, (size_t)first);
    }
    // the bias (T,T) of a head
    std::vector<double> bias(const OracleLayer<double>& o, const std::vector<float>& qkv, int b, int h,
                             int first = 0) const {
        return find_oracle(o.name).reads_scores ? cope<double>(o, qkv, b, h, first).bias : oracle_bias(o, h);
    }
    std::vector<float> float_bias(const OracleLayer<double>& o, const std::vector<float>& qkv, int b, int h,
                                  int first = 0) const {
        return find_oracle(o.name).reads_scores ? cope<float>(o, qkv, b, h, first).bias : oracle_bias(rounded(o), h);
    }
};
