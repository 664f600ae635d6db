// oracle_positions.h -- what the tests ask of the oracles of oracle_positions.cu, which are compiled once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

// One layer of one sequence, as an encoding sees it
template <class R> struct OracleLayer {
    std::string name;                                       // of the encoding, as --pos says it
    bool causal = true;
    int T = 0, NH = 1;                       // tokens, heads, channels, channels per head
    int C = 0, HS = 0;
    int T_train = 1024;
    std::map<std::string, double> values;                   // hyperparameters by name, all that the encoding has
    std::map<std::string, std::vector<R>> params;           // parameters of this layer by tensor name, row-major
    int width = 0;                                          // how many columns of qkv the encoding has,
    std::vector<R> columns;                                 // and what the matmul wrote there, (T,width)
    std::string scaling = "none";                           // --rope_scaling: none, pi, ntk, yarn, longrope,
    double stretch = 1;                                     // its factor,
    std::vector<double> short_factor, long_factor;          // and those of longrope's pairs
    mutable std::vector<std::pair<R, R>> logarithms;        // (T,T), kept by log_of of oracle_positions.cu

    double value(const std::string& key) const { return values.at(key); }
    R parameter(const std::string& tensor, size_t element) const { return params.at(tensor).at(element); }
    R column(int t, int c) const { return columns.at((size_t)t * width + c); }
};

// the same layer in float32
inline OracleLayer<float> rounded(const OracleLayer<double>& o) {
    OracleLayer<float> f;
    f.name = o.name;
    f.causal = o.causal;
    f.T = o.T;
    f.NH = o.NH;
    f.C = o.C;
    f.HS = o.HS;
    f.T_train = o.T_train;
    f.values = o.values;
    for (const auto& tensor : o.params) { f.params[tensor.first].assign(tensor.second.begin(), tensor.second.end()); }
    f.width = o.width;
    f.columns.assign(o.columns.begin(), o.columns.end());
    f.scaling = o.scaling;
    f.stretch = o.stretch;
    f.short_factor = o.short_factor;
    f.long_factor = o.long_factor;
    return f;
}

template <class R> R oracle_softplus(R x) { return std::max(x, R(0)) + std::log1p(std::exp(-std::fabs(x))); }

// An oracle whose type is forgotten
struct PositionOracle {
    std::function<std::vector<double>(const OracleLayer<double>&, int)> bias;
    std::function<std::vector<float>(const OracleLayer<float>&, int)> float_bias;
    std::function<std::vector<double>(const OracleLayer<double>&, const std::vector<double>&, int, int, bool)> rotate;
    std::function<std::vector<double>(const OracleLayer<double>&, const std::vector<double>&, int)> embed;
    std::function<double(const OracleLayer<double>&)> score_factor;
    std::function<double(const OracleLayer<double>&, int, int)> query_factor;
    bool has_bias, slow, reads_scores;
    char cable_step;
};

// of the encoding of this name in --pos
const PositionOracle& find_oracle(const std::string& name);

// What the tests call: the same, for the encoding of the layer
inline std::vector<double> oracle_bias(const OracleLayer<double>& o, int h) { return find_oracle(o.name).bias(o, h); }
inline std::vector<float> oracle_bias(const OracleLayer<float>& o, int h) {
    return find_oracle(o.name).float_bias(o, h);
}
inline double oracle_score_factor(const OracleLayer<double>& o) { return find_oracle(o.name).score_factor(o); }
inline double oracle_query_factor(const OracleLayer<double>& o, int h, int keys) {
    return find_oracle(o.name).query_factor(o, h, keys);
}
// its derivative in x, a number that o holds
inline double oracle_query_slope(OracleLayer<double>& o, double& x, int h, int keys) {
    const double at = x, step = 1e-6;
    x = at + step;
    const double up = oracle_query_factor(o, h, keys);
    x = at - step;
    const double down = oracle_query_factor(o, h, keys);
    x = at;
    return (up - down) / (2 * step);
}
inline std::vector<double> oracle_rotate(const OracleLayer<double>& o, const std::vector<double>& x, int h, int t,
                                         bool back = false) {
    return find_oracle(o.name).rotate(o, x, h, t, back);
}
// the derivative of rotate(x) in z, a column of o
inline std::vector<double> oracle_rotate_slope(OracleLayer<double>& o, double& z, const std::vector<double>& x, int h,
                                               int t) {
    const double at = z, step = 1e-6;
    z = at + step;
    std::vector<double> slope = oracle_rotate(o, x, h, t);
    z = at - step;
    const std::vector<double> down = oracle_rotate(o, x, h, t);
    z = at;
    for (size_t d = 0; d < down.size(); d++) { slope[d] = (slope[d] - down[d]) / (2 * step); }
    return slope;
}
inline std::vector<double> oracle_embed(const OracleLayer<double>& o, const std::vector<double>& x, int t) {
    return find_oracle(o.name).embed(o, x, t);
}

// The forms that hyperparameters select, in addition to the defaults. Tests of all encodings add them.
inline const char* const oracle_forms[] = {"kcable:weight=inside", "alibi:slopes=geometric,scale=0.3",
                                           "t5:buckets=12,distance=40", "t5_clip:K=20,scale=C,layers=own",
                                           "sinusoidal:scale=1,embed=sqrt", "rope:p=0.5",
                                           "rope:clock=cable", "rope:p=0.5,clock=cable", "sandwich:d=6",
                                           "alibi_random:seed=7,mean=0.3", "cope:npos=5"};

// cable's S_t = sum_{k<=t} b_k of head h for all t, summed plainly. Step: b_t is ReLU(z_t) ('r'), softplus(z_t) ('s')
// or tanh(z_t) ('t')
template <char Step, class R> std::vector<R> oracle_cable_S(const OracleLayer<R>& o, int h) {
    std::vector<R> S((size_t)o.T);
    R sum = 0;
    for (int t = 0; t < o.T; t++) {
        const R z = o.column(t, h);
        R b = std::max(z, R(0));
        if (Step == 's') { b = oracle_softplus(z); }
        if (Step == 't') { b = std::tanh(z); }
        sum += b;
        S[(size_t)t] = sum;
    }
    return S;
}

// Press et al.: the slopes of n heads
std::vector<double> oracle_alibi_slopes(int n);

// cope's one head: q, k (T,HS) as attention takes them, e (HS,npos). Sums of gates are float64 for both R.
template <class R> struct CopeHead {
    size_t T, HS, npos;
    R scale;
    std::vector<R> q, k, e;
    std::vector<R> gate, bias;                              // (T,T), 0 where hidden
    std::vector<double> position;                           // before the limit

    // sees(i, j): of j <= i
    template <class Sees>
    CopeHead(const std::vector<R>& q, const std::vector<R>& k, const std::vector<R>& e, R scale, size_t T, size_t HS,
             Sees sees, size_t first = 0)
        : T(T), HS(HS), npos(e.size() / HS), scale(scale), q(q), k(k), e(e), gate(T * T), bias(T * T),
          position(T * T) {
        for (size_t i = first; i < T; i++) {
            for (size_t t = 0; t <= i; t++) {
                R score = 0;
                for (size_t d = 0; d < HS; d++) { score += scale * q[i * HS + d] * k[t * HS + d]; }
                gate[i * T + t] = sees((int)i, (int)t) ? 1 / (1 + std::exp(-score)) : R(0);
            }
            double sum = 0;
            for (size_t j = i + 1; j-- > 0;) {
                sum += gate[i * T + j];
                position[i * T + j] = sum;
                const size_t f = below(i, j);
                const R w = weight(i, j);
                for (size_t d = 0; d < HS; d++) {           // q.((1 - w) e[f] + w e[f + 1])
                    bias[i * T + j] += q[i * HS + d] * ((1 - w) * e[d * npos + f] + w * e[d * npos + f + 1]);
                }
            }
        }
    }
    double limited(size_t i, size_t j) const { return std::min(position[i * T + j], (double)(npos - 1)); }
    size_t below(size_t i, size_t j) const { return std::min((size_t)limited(i, j), npos - 2); }
    R weight(size_t i, size_t j) const { return (R)(limited(i, j) - (double)below(i, j)); }
    // How near a position is to an integer up to npos - 1, where its derivative jumps; but for 0
    double nearest_kink() const {
        double nearest = 1;
        for (double p : position) {
            const double whole = std::round(p);
            if (p > 0 && whole > 0 && whole < npos) { nearest = std::min(nearest, std::fabs(p - whole)); }
        }
        return nearest;
    }
    // dq, dk (T,HS), de (HS,npos) += what dB (T,T), 0 where hidden, is in them
    void backward(const std::vector<R>& dB, std::vector<R>& dq, std::vector<R>& dk, std::vector<R>& de) const {
        for (size_t i = 0; i < T; i++) {
            double through = 0;                             // sum of dp_ij over the j up to t, whose positions count t
            for (size_t j = 0; j <= i; j++) {
                const size_t f = below(i, j);
                const R w = weight(i, j), d_logit = dB[i * T + j];
                R slope = 0;                                // of B_ij in p_ij
                for (size_t d = 0; d < HS; d++) {
                    const R low = e[d * npos + f], high = e[d * npos + f + 1];
                    const R q_d = q[i * HS + d];
                    dq[i * HS + d] += d_logit * ((1 - w) * low + w * high);
                    de[d * npos + f] += d_logit * (1 - w) * q_d;
                    de[d * npos + f + 1] += d_logit * w * q_d;
                    slope += q_d * (high - low);
                }
                through += position[i * T + j] < npos - 1 ? d_logit * slope : R(0);
                const R g = gate[i * T + j], d_score = (R)through * g * (1 - g);
                for (size_t d = 0; d < HS; d++) {
                    dq[i * HS + d] += d_score * scale * k[j * HS + d];
                    dk[j * HS + d] += d_score * scale * q[i * HS + d];
                }
            }
        }
    }
};
