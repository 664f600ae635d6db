// oracle_positions.h -- what every encoding computes, in double, by nested loops straight from the papers' formulas.
//
// Shares no code with llmc/ on purpose: kernel and reference never share a bug. One object is a layer of one sequence.
#ifndef TEST_ORACLE_POSITIONS_H
#define TEST_ORACLE_POSITIONS_H

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

struct PositionOracle {
    std::string name;                                   // of the encoding, as --pos says it
    bool causal = true;
    int T = 0, NH = 1, C = 0, HS = 0, T_train = 1024;
    std::map<std::string, std::vector<double>> p;       // parameters of this layer by tensor name, row-major
    double theta = 10000, K = 0;                        // rope; t5_clip
    std::string scaling = "none";                       // rope: none, pi, ntk, yarn
    double s = 1;                                       // rope: its factor
    std::vector<double> z, u;                           // (T,NH): cable's projections of x
};

// Raffel et al.: the reference code's bucket of a key at distance n = i - j
inline int oracle_t5_bucket(int n, bool causal) {
    int buckets = 32, offset = 0, distance = n;
    if (!causal) {
        buckets = 16;
        if (n < 0) { offset = 16; }
        distance = std::abs(n);
    } else {
        distance = std::max(n, 0);
    }
    const int exact = buckets / 2;
    if (distance < exact) { return offset + distance; }
    const double logs = std::log((double)distance / exact) / std::log(128.0 / exact) * (buckets - exact);
    return offset + std::min(buckets - 1, exact + (int)(logs + 1e-12));
}

// Press et al.: the authors' recursive get_slopes
inline std::vector<double> oracle_alibi_slopes(int n) {
    int p = 1;
    while (p * 2 <= n) { p *= 2; }
    std::vector<double> slopes;
    for (int i = 0; i < p; i++) { slopes.push_back(std::pow(std::pow(2.0, -8.0 / p), i + 1)); }
    if (p == n) { return slopes; }
    const std::vector<double> twice = oracle_alibi_slopes(2 * p);
    for (int i = 0; (int)slopes.size() < n; i += 2) { slopes.push_back(twice[(size_t)i]); }
    return slopes;
}

inline double oracle_fire(const PositionOracle& o, int h, int i, int j) {
    const double c = std::fabs(o.p.at("fire_c")[0]), L = std::fabs(o.p.at("fire_l")[0]) * 512;
    const double m = std::max(L, (double)(o.causal ? i : std::max(i, j)));
    const double y = std::log(c * std::abs(i - j) + 1) / (std::log(c * m + 1) + 1e-6);
    const std::vector<double> &w1 = o.p.at("fire_w1"), &b1 = o.p.at("fire_b1"), &w2 = o.p.at("fire_w2");
    double f = o.p.at("fire_b2")[(size_t)h];
    for (size_t k = 0; k < 32; k++) { f += w2[(size_t)h * 32 + k] * std::max(0.0, w1[k] * y + b1[k]); }
    return f;
}

// S_t of head h for all t, summed plainly
inline std::vector<double> oracle_cable_S(const PositionOracle& o, int h) {
    std::vector<double> S((size_t)o.T);
    double sum = 0;
    for (int t = 0; t < o.T; t++) {
        const double z = o.z[(size_t)t * o.NH + h];
        sum += o.name == "cable_v1" ? std::log1p(std::exp(-std::fabs(z))) + std::max(z, 0.0) : std::max(z, 0.0);
        S[(size_t)t] = sum;
    }
    return S;
}

inline double oracle_cable(const PositionOracle& o, const std::vector<double>& S, int h, int i, int j) {
    const bool weighted = o.name == "cable" || o.name == "kcable";
    const double u = weighted ? o.u[(size_t)i * o.NH + h] : 0;
    const double g = weighted ? std::log1p(std::exp(-std::fabs(u))) + std::max(u, 0.0) : 1.0;
    const double r = g * std::fabs(S[(size_t)i] - S[(size_t)j]);
    return o.name == "kcable" || o.name == "kcable_nw" ? -std::log(1 + r * r) : -r;
}

// B (T,T) of head h. Causal: only j <= i is meant.
inline std::vector<double> oracle_bias(const PositionOracle& o, int h) {
    const bool alibi = o.name == "alibi", t5 = o.name == "t5", t5_clip = o.name == "t5_clip", fire = o.name == "fire";
    const bool kerple = o.name == "kerple", power = o.name == "kerple_power";
    const bool cable = o.name.find("cable") != std::string::npos;
    const std::vector<double> S = cable ? oracle_cable_S(o, h) : std::vector<double>();
    const double slope = alibi ? oracle_alibi_slopes(o.NH)[(size_t)h] : 0;
    const double r1 = kerple || power ? o.p.at("kerple_r1")[(size_t)h] : 0;
    const double r2 = kerple || power ? o.p.at("kerple_r2")[(size_t)h] : 0;
    const double* r = t5 || t5_clip ? o.p.at("t5").data() : nullptr;
    std::vector<double> B((size_t)o.T * o.T, 0.0);
    for (int i = 0; i < o.T; i++) {
        for (int j = 0; j < (o.causal ? i + 1 : o.T); j++) {
            const int d = i - j, distance = std::abs(d), K = (int)o.K;
            double b = 0;
            if (alibi) { b = -slope * distance; }
            if (t5) { b = r[oracle_t5_bucket(d, o.causal) * o.NH + h]; }
            if (t5_clip) { b = r[(o.causal ? std::min(d, K) : K + std::max(-K, std::min(d, K))) * o.NH + h]; }
            if (kerple) { b = -r1 * std::log(1 + r2 * distance); }
            if (power) { b = d == 0 ? 0.0 : -r1 * std::pow((double)distance, r2); }
            if (fire) { b = oracle_fire(o, h, i, j); }
            if (cable) { b = oracle_cable(o, S, h, i, j); }
            B[(size_t)i * o.T + j] = b;
        }
    }
    return B;
}

// A head's q or k (HS) of position t, turned
inline std::vector<double> oracle_rotate(const PositionOracle& o, const std::vector<double>& x, int t) {
    if (o.name != "rope") { return x; }
    std::vector<double> y = x;
    const double pi = std::acos(-1.0);
    for (int i = 0; i < o.HS / 2; i++) {
        const double plain = std::pow(o.theta, -2.0 * i / o.HS);
        double angle = t * plain;
        if (o.scaling == "pi") { angle = (t / o.s) * plain; }
        if (o.scaling == "ntk" && o.HS > 2) {
            angle = t * std::pow(o.theta * std::pow(o.s, o.HS / (o.HS - 2.0)), -2.0 * i / o.HS);
        }
        if (o.scaling == "yarn") {
            const double r = o.T_train * plain / (2 * pi), gamma = std::min(1.0, std::max(0.0, (r - 1) / 31));
            angle = t * (gamma * plain + (1 - gamma) * plain / o.s);
        }
        const double c = std::cos(angle), s = std::sin(angle), a = x[(size_t)(2 * i)], b = x[(size_t)(2 * i + 1)];
        y[(size_t)(2 * i)] = a * c - b * s;
        y[(size_t)(2 * i + 1)] = a * s + b * c;
    }
    return y;
}

// what q.k is multiplied by besides 1/sqrt(HS)
inline double oracle_score_factor(const PositionOracle& o) {
    return o.name == "rope" && o.scaling == "yarn" ? std::pow(0.1 * std::log(o.s) + 1, 2) : 1.0;
}

// the embedding x (C) of the token at position t, as the model goes on with it
inline std::vector<double> oracle_embed(const PositionOracle& o, const std::vector<double>& x, int t) {
    std::vector<double> y = x;
    for (int c = 0; c < o.C; c++) {
        if (o.name == "learned") { y[(size_t)c] += o.p.at("wpe")[(size_t)t * o.C + c]; }
        if (o.name == "sinusoidal") {
            const double angle = t / std::pow(10000.0, (double)(c / 2 * 2) / o.C);
            y[(size_t)c] = std::sqrt((double)o.C) * x[(size_t)c] + (c % 2 == 0 ? std::sin(angle) : std::cos(angle));
        }
    }
    return y;
}

#endif
