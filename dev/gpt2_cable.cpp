// gpt2_cable.cpp -- a whole GPT-2 with CABLE in plain loops: text, loss, every gradient, AdamW, a sample.
//
//   c++ -std=c++17 -O3 -march=native -fopenmp dev/gpt2_cable.cpp -o gpt2_cable && ./gpt2_cable --train_files any.txt
//
// Read it from top to bottom in an evening. Each layer is a function and, below it, its backward, in which "forward:"
// quotes the line that is being differentiated. train_gpt2.cu computes the same numbers from the same flags, with the
// same names, for other encodings, for large models and on a GPU; `make one-file` prints the losses of both.
//
//   B, T   sequences in a batch, tokens in a sequence       N = B * T    tokens in a batch, the rows of a matrix
//   L, NH  layers, heads of attention in each               C = NH * HS  channels of a row, HS in a head
//   V      vocabulary: a token is a byte, so 256            (N,C)        N rows of C numbers, one row after the other
//
// All layers read the residual stream (N,C) and add to it. A head of attention looks back with its own HS channels; the
// model's head turns a row of the stream into V logits, scores that softmax makes probabilities: e^logit / sum of all.
// dx is the gradient of the loss with respect to x, and has the shape of x. Where x is used in several places, their
// gradients add up: so every backward adds to dx (+=), which starts at zero.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#ifndef REAL
#define REAL float      // double is what a test compares with
#endif
typedef REAL real;
typedef std::vector<real> Reals;

// ----------------------------------------------------------------------------------------------------------
// a parameter of the model, and the two loops from which all matrix products are made

struct Parameter {
    std::string name;                       // in a checkpoint
    int rows, cols;                         // (rows,cols); a vector has one column
    bool decays;                            // a matrix
    Reals w, d, m, v;                       // values, gradient, and AdamW's two moving averages
};

inline real dot(const real* a, const real* b, int n) {
    real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) { sum += a[i] * b[i]; }
    return sum;
}
inline void add_scaled(real* y, real a, const real* x, int n) {
#pragma omp simd
    for (int i = 0; i < n; i++) { y[i] += a * x[i]; }
}

// ----------------------------------------------------------------------------------------------------------
// embedding: a token becomes a row of C numbers, which training finds

// out (N,C), tokens (N), wte (V,C)
void embedding_forward(Reals& out, const int* tokens, const Parameter& wte) {
    const int C = wte.cols, N = (int)out.size() / C;
    for (int n = 0; n < N; n++) { std::copy_n(&wte.w[tokens[n] * C], C, &out[n * C]); }
}
void embedding_backward(const Reals& dout, const int* tokens, Parameter& wte) {
    const int C = wte.cols, N = (int)dout.size() / C;
    // forward: out[n] = wte[tokens[n]]. A token's row collects the gradients of all places where the token stands
    for (int n = 0; n < N; n++) { add_scaled(&wte.d[tokens[n] * C], 1, &dout[n * C], C); }
}

// ----------------------------------------------------------------------------------------------------------
// layer normalization: each row gets mean 0 and standard deviation 1, then a learned scale w and shift b per channel

// out, inp (N,C), mean, rstd (N), w, b (C)
void layernorm_forward(Reals& out, Reals& mean, Reals& rstd, const Reals& inp, const Parameter& w, const Parameter& b) {
    const int C = w.rows, N = (int)inp.size() / C;
    for (int n = 0; n < N; n++) {
        const real* x = &inp[n * C];
        real m = 0, variance = 0;
        for (int c = 0; c < C; c++) { m += x[c] / C; }
        for (int c = 0; c < C; c++) { variance += (x[c] - m) * (x[c] - m) / C; }
        mean[n] = m;
        rstd[n] = 1 / std::sqrt(variance + (real)1e-5);         // one over the standard deviation
        for (int c = 0; c < C; c++) { out[n * C + c] = (x[c] - m) * rstd[n] * w.w[c] + b.w[c]; }
    }
}
void layernorm_backward(Reals& dinp, const Reals& dout, const Reals& inp, const Reals& mean, const Reals& rstd,
                        Parameter& w, Parameter& b) {
    const int C = w.rows, N = (int)inp.size() / C;
    Reals norm(C), dnorm(C);
    for (int n = 0; n < N; n++) {
        real dnorm_mean = 0, dnorm_norm_mean = 0;               // over the row, of dnorm and of dnorm * norm
        for (int c = 0; c < C; c++) {
            // forward: out = norm * w + b
            norm[c] = (inp[n * C + c] - mean[n]) * rstd[n];
            dnorm[c] = dout[n * C + c] * w.w[c];
            w.d[c] += dout[n * C + c] * norm[c];
            b.d[c] += dout[n * C + c];
            dnorm_mean += dnorm[c] / C;
            dnorm_norm_mean += dnorm[c] * norm[c] / C;
        }
        // forward: norm = (x - mean) * rstd, where mean and rstd depend on all of x. To shift the whole row, or to
        // stretch it, changes no norm, so the gradient has no part in these two directions
        for (int c = 0; c < C; c++) {
            dinp[n * C + c] += rstd[n] * (dnorm[c] - dnorm_mean - norm[c] * dnorm_norm_mean);
        }
    }
}

// ----------------------------------------------------------------------------------------------------------
// linear: each of the OC outputs is a weighted sum of the C inputs. Most of the time is spent here

// out (N,OC), inp (N,C), w (OC,C), b (OC) or null
void linear_forward(Reals& out, const Reals& inp, const Parameter& w, const Parameter* b) {
    const int C = w.cols, OC = w.rows;
    const int N = (int)inp.size() / C;
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        for (int o = 0; o < OC; o++) {
            out[(size_t)n * OC + o] = dot(&inp[n * C], &w.w[o * C], C) + (b != nullptr ? b->w[o] : 0);
        }
    }
}
void linear_backward(Reals& dinp, const Reals& dout, const Reals& inp, Parameter& w, Parameter* b) {
    const int C = w.cols, OC = w.rows;
    const int N = (int)inp.size() / C;
    // forward: out[n][o] = b[o] + sum over c of inp[n][c] w[o][c]. The input's gradient is a sum over outputs ...
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        for (int o = 0; o < OC; o++) { add_scaled(&dinp[n * C], dout[(size_t)n * OC + o], &w.w[o * C], C); }
    }
    // ... and the weight's a sum over rows. Threads share the outputs, so that no two add to the same number
#pragma omp parallel for
    for (int o = 0; o < OC; o++) {
        for (int n = 0; n < N; n++) {
            const real d = dout[(size_t)n * OC + o];
            add_scaled(&w.d[o * C], d, &inp[n * C], C);
            if (b != nullptr) { b->d[o] += d; }
        }
    }
}

// ----------------------------------------------------------------------------------------------------------
// GELU: x times the probability that a standard normal number is below x, by GPT-2's approximation

const real SQRT_2_PI = (real)0.7978845608028654;                // sqrt(2 / pi)
const real CUBE = (real)0.044715;

void gelu_forward(Reals& out, const Reals& inp) {
    for (size_t i = 0; i < inp.size(); i++) {
        const real x = inp[i];
        out[i] = x / 2 * (1 + std::tanh(SQRT_2_PI * (x + CUBE * x * x * x)));
    }
}
void gelu_backward(Reals& dinp, const Reals& dout, const Reals& inp) {
    for (size_t i = 0; i < inp.size(); i++) {
        const real x = inp[i], t = std::tanh(SQRT_2_PI * (x + CUBE * x * x * x));
        // forward: out = x/2 (1 + tanh u), and tanh' = 1 - tanh^2
        const real du = SQRT_2_PI * (1 + 3 * CUBE * x * x);
        dinp[i] += dout[i] * ((1 + t) / 2 + x / 2 * (1 - t * t) * du);
    }
}

// ----------------------------------------------------------------------------------------------------------
// CABLE: how far apart two tokens are is learned
//
// Each token t adds a step b_t >= 0 to a running sum S. The distance between two tokens is the difference of their
// sums; query i gives it a weight g_i and subtracts it from its score with key j:
//
//   b_t = ReLU(z_t)   S_t = b_0 + ... + b_t   g_t = softplus(u_t)   logit_ij = q_i . k_j / sqrt(HS) - g_i (S_i - S_j)
//
// z and u are linear in the token's row, one number per head. Nothing here is tied to a position's number, so a model
// trained on T tokens can read more. S is float64, because float32 would have lost digits by the 100,000th token.

// S, g (B,NH,T), z, u (N,NH)
void cable_forward(std::vector<double>& S, Reals& g, const Reals& z, const Reals& u, int B, int T) {
    const int NH = (int)z.size() / (B * T);
    for (int bh = 0; bh < B * NH; bh++) {
        double sum = 0;
        for (int t = 0; t < T; t++) {
            const int at = (bh / NH * T + t) * NH + bh % NH;    // of this token and head in z and u
            sum += std::max(z[at], (real)0);
            S[bh * T + t] = sum;
            g[bh * T + t] = std::max(u[at], (real)0) + std::log1p(std::exp(-std::fabs(u[at])));     // log(1 + e^u)
        }
    }
}
void cable_backward(Reals& dz, Reals& du, const std::vector<double>& dS, const Reals& dg, const Reals& z,
                    const Reals& u, int B, int T) {
    const int NH = (int)z.size() / (B * T);
    for (int bh = 0; bh < B * NH; bh++) {
        double db = 0;
        for (int t = T - 1; t >= 0; t--) {
            const int at = (bh / NH * T + t) * NH + bh % NH;
            // forward: S_t = b_0 + ... + b_t. The step b_t is part of S_t and of all later sums: a sum from the end
            db += dS[bh * T + t];
            // forward: b = ReLU(z)
            dz[at] += z[at] > 0 ? (real)db : 0;
            // forward: g = log(1 + e^u), whose derivative is the sigmoid
            du[at] += dg[bh * T + t] / (1 + std::exp(-u[at]));
        }
    }
}

// ----------------------------------------------------------------------------------------------------------
// attention: each token compares its query q with the keys k of the tokens up to itself, and averages their values v by
// how well they match. The heads do this side by side, each with its own HS channels.

// out (N,C), qkv (N,3C): q, k and v of a token; P (B,NH,T,T): the weights, which the backward reads
void attention_forward(Reals& out, Reals& P, const Reals& qkv, const std::vector<double>& S, const Reals& g, int B,
                       int T, int NH) {
    const int C = (int)qkv.size() / (3 * B * T), HS = C / NH;
    const real scale = 1 / std::sqrt((real)HS);
#pragma omp parallel for
    for (int bh = 0; bh < B * NH; bh++) {
        const size_t row0 = (size_t)(bh / NH) * T, head = (size_t)bh * T;       // where b begins in rows, bh in S and g
        const real* q = &qkv[row0 * 3 * C + bh % NH * HS];
        const real *k = q + C, *v = k + C;
        for (int i = 0; i < T; i++) {
            real* p = &P[(head + i) * T];
            real largest = -INFINITY, sum = 0;
            for (int j = 0; j <= i; j++) {                      // no key that comes after the query
                p[j] = scale * dot(q + i * 3 * C, k + j * 3 * C, HS) - g[head + i] * (real)(S[head + i] - S[head + j]);
                largest = std::max(largest, p[j]);
            }
            for (int j = 0; j <= i; j++) {                      // softmax; without `largest`, e^x might overflow
                p[j] = std::exp(p[j] - largest);
                sum += p[j];
            }
            real* o = &out[(row0 + i) * C + bh % NH * HS];
            std::fill_n(o, HS, (real)0);
            for (int j = 0; j <= i; j++) {
                p[j] /= sum;
                add_scaled(o, p[j], v + j * 3 * C, HS);
            }
        }
    }
}
// dS, dg (B,NH,T) collect what all pairs of tokens want of their distance and of its weight.
void attention_backward(Reals& dqkv, std::vector<double>& dS, Reals& dg, const Reals& dout, const Reals& P,
                        const Reals& qkv, const std::vector<double>& S, const Reals& g, int B, int T, int NH) {
    const int C = (int)qkv.size() / (3 * B * T), HS = C / NH;
    const real scale = 1 / std::sqrt((real)HS);
#pragma omp parallel for
    for (int bh = 0; bh < B * NH; bh++) {
        const size_t row0 = (size_t)(bh / NH) * T, head = (size_t)bh * T;
        const real* q = &qkv[row0 * 3 * C + bh % NH * HS];
        const real *k = q + C, *v = k + C;
        real* dq = &dqkv[q - qkv.data()];
        real *dk = dq + C, *dv = dk + C;
        Reals dp((size_t)T);
        for (int i = 0; i < T; i++) {
            const real *p = &P[(head + i) * T], *d = &dout[(row0 + i) * C + bh % NH * HS];
            // forward: out_i = sum over j of p_j v_j
            real mean = 0;                                      // sum over j of p_j dp_j
            for (int j = 0; j <= i; j++) {
                add_scaled(dv + j * 3 * C, p[j], d, HS);
                dp[j] = dot(d, v + j * 3 * C, HS);
                mean += p[j] * dp[j];
            }
            for (int j = 0; j <= i; j++) {
                // forward: p = softmax(logit). A logit raises its own weight and lowers all the rest
                const real dlogit = p[j] * (dp[j] - mean);
                // forward: logit_ij = scale q_i . k_j ...
                add_scaled(dq + i * 3 * C, scale * dlogit, k + j * 3 * C, HS);
                add_scaled(dk + j * 3 * C, scale * dlogit, q + i * 3 * C, HS);
                // forward: ... - g_i (S_i - S_j)
                dg[head + i] -= dlogit * (real)(S[head + i] - S[head + j]);
                dS[head + i] -= g[head + i] * dlogit;
                dS[head + j] += g[head + i] * dlogit;
            }
        }
    }
}

// ----------------------------------------------------------------------------------------------------------
// the loss: minus the logarithm of the probability that the model gives to the token that really follows

// Turns logits (N,V) into their gradient. targets (N), negative where there is no question. Returns the mean loss.
double cross_entropy(Reals& logits, const int* targets, int N) {
    const int V = (int)logits.size() / N;
    const auto count = std::count_if(targets, targets + N, [](int target) { return target >= 0; });
    double loss = 0;
    for (int n = 0; n < N; n++) {
        real* x = &logits[(size_t)n * V];
        if (targets[n] < 0) { std::fill_n(x, V, (real)0); continue; }
        const real largest = *std::max_element(x, x + V);
        const real target = x[targets[n]];
        real sum = 0;
        for (int v = 0; v < V; v++) {
            x[v] = std::exp(x[v] - largest);
            sum += x[v];
        }
        // forward: loss = -log(softmax(x)[target]) = log(sum over v of e^x_v) - x_target
        loss += ((double)std::log(sum) + (double)largest - (double)target) / (double)count;
        for (int v = 0; v < V; v++) { x[v] = (x[v] / sum - (v == targets[n] ? 1 : 0)) / (real)count; }
    }
    return loss;
}

// ----------------------------------------------------------------------------------------------------------
// random numbers: each is a function of (seed, a, b), so that no order of calls matters

uint64_t mix(uint64_t x) {                  // SplitMix64 (Steele et al. 2014): 64 bits become 64 that look random
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}
uint64_t hash(uint64_t seed, uint64_t a, uint64_t b) { return mix(mix(mix(seed) ^ a) ^ b); }
// in [0, 1)
double uniform(uint64_t seed, uint64_t a, uint64_t b) { return (double)(hash(seed, a, b) >> 11) * 0x1p-53; }
// The Box-Muller transform: two uniform numbers are the radius and the angle of a point whose coordinates are normal
double normal(uint64_t seed, uint64_t a, uint64_t b) {
    const double u1 = 1 - uniform(seed, a, 2 * b), u2 = uniform(seed, a, 2 * b + 1);
    return std::sqrt(-2 * std::log(u1)) * std::cos(6.283185307179586 * u2);
}

// Element i of a random order of 0 .. n-1, another in each epoch. A Feistel network, as in ciphers, permutes: each
// round XORs half of the bits with a hash of the other half. What leaves 0 .. n-1 passes through it again.
uint64_t shuffled(uint64_t i, uint64_t n, uint64_t seed, uint64_t epoch) {
    int half = 1;
    while ((1ull << (2 * half)) < n) { half++; }
    const uint64_t mask = (1ull << half) - 1;
    do {
        uint64_t left = i >> half, right = i & mask;
        for (uint64_t round = 0; round < 4; round++) {
            const uint64_t next = left ^ (hash(seed, epoch, right << 2 | round) & mask);
            left = right;
            right = next;
        }
        i = left << half | right;
    } while (i >= n);
    return i;
}

// ----------------------------------------------------------------------------------------------------------
// the model

struct Layer {
    Parameter ln1w, ln1b;                   // (C)
    Parameter qkvw, qkvb;                   // (3C,C), (3C)
    Parameter cw, cb, sw, sb;               // CABLE's z = cw x + cb and u = sw x + sb: (NH,C), (NH)
    Parameter attprojw, attprojb;           // mixes the heads: (C,C), (C)
    Parameter ln2w, ln2b;                   // (C)
    Parameter fcw, fcb, fcprojw, fcprojb;   // the MLP widens and narrows: (4C,C), (4C), (C,4C), (C)
};

struct Model {
    int L, NH, C, V;
    Parameter wte;                          // (V,C): the embedding, and the head that turns rows into logits
    std::vector<Layer> layers;
    Parameter lnfw, lnfb;                   // (C)
    std::vector<Parameter*> all;            // all of the above

    Model(int L, int NH, int C, int V, uint64_t seed) : L(L), NH(NH), C(C), V(V), layers((size_t)L) {
        // Matrices start as normal numbers, LayerNorms as the identity. What adds to the residual stream starts
        // smaller, as 2 L terms add up there
        const double std = 0.02, residual = 0.02 / std::sqrt(2.0 * L);
        const auto make = [&](Parameter& p, const std::string& name, int rows, int cols, double mean, double spread) {
            const size_t n = (size_t)rows * cols;
            p = {"transformer." + name, rows, cols, cols > 1, Reals(n), Reals(n), Reals(n), Reals(n)};
            for (size_t i = 0; i < n && spread > 0; i++) {
                p.w[i] = (real)(float)(spread * normal(seed, all.size(), i));       // the same in double
            }
            if (mean != 0) { std::fill(p.w.begin(), p.w.end(), (real)mean); }
            all.push_back(&p);
        };
        make(wte, "wte.weight", V, C, 0, std);
        for (int l = 0; l < L; l++) {
            const std::string h = "h." + std::to_string(l) + ".";
            Layer& p = layers[l];
            make(p.ln1w, h + "ln_1.weight", C, 1, 1, 0);
            make(p.ln1b, h + "ln_1.bias", C, 1, 0, 0);
            make(p.qkvw, h + "attn.c_attn.weight", 3 * C, C, 0, std);
            make(p.qkvb, h + "attn.c_attn.bias", 3 * C, 1, 0, 0);
            make(p.cw, h + "attn.cable.c.weight", NH, C, 0, std);
            make(p.cb, h + "attn.cable.c.bias", NH, 1, 0, 0);
            make(p.sw, h + "attn.cable.s.weight", NH, C, 0, std);
            make(p.sb, h + "attn.cable.s.bias", NH, 1, 0, 0);
            make(p.attprojw, h + "attn.c_proj.weight", C, C, 0, residual);
            make(p.attprojb, h + "attn.c_proj.bias", C, 1, 0, 0);
            make(p.ln2w, h + "ln_2.weight", C, 1, 1, 0);
            make(p.ln2b, h + "ln_2.bias", C, 1, 0, 0);
            make(p.fcw, h + "mlp.c_fc.weight", 4 * C, C, 0, std);
            make(p.fcb, h + "mlp.c_fc.bias", 4 * C, 1, 0, 0);
            make(p.fcprojw, h + "mlp.c_proj.weight", C, 4 * C, 0, residual);
            make(p.fcprojb, h + "mlp.c_proj.bias", C, 1, 0, 0);
        }
        make(lnfw, "ln_f.weight", C, 1, 1, 0);
        make(lnfb, "ln_f.bias", C, 1, 0, 0);
    }
    Model(const Model&) = delete;           // `all` points into it
};
// GPT-2's checkpoints have these matrices as (inputs,outputs).
bool stored_transposed(const Parameter& p) { return p.decays && p.name.find(".c_") != std::string::npos; }

// What the forward of a layer leaves for its backward; `residual` is the stream that all layers add to.
struct LayerActs {
    Reals ln1, mean1, rstd1, qkv, z, u, g, P, atty, residual2, ln2, mean2, rstd2, fch, fchgelu, residual3;
    std::vector<double> S;
};
struct Acts {
    int B, T;
    Reals encoded, lnf, meanf, rstdf, logits;
    std::vector<LayerActs> layers;

    Acts(const Model& model, int B, int T) : B(B), T(T), layers((size_t)model.L) {
        const size_t N = (size_t)B * T;
        const size_t C = model.C, NH = model.NH;
        for (Reals* x : {&encoded, &lnf}) { x->resize(N * C); }
        for (Reals* x : {&meanf, &rstdf}) { x->resize(N); }
        logits.resize(N * model.V);
        for (LayerActs& a : layers) {
            for (Reals* x : {&a.ln1, &a.atty, &a.residual2, &a.ln2, &a.residual3}) { x->resize(N * C); }
            for (Reals* x : {&a.mean1, &a.rstd1, &a.mean2, &a.rstd2}) { x->resize(N); }
            for (Reals* x : {&a.z, &a.u, &a.g}) { x->resize(N * NH); }
            for (Reals* x : {&a.fch, &a.fchgelu}) { x->resize(N * 4 * C); }
            a.qkv.resize(N * 3 * C);
            a.P.resize(NH * N * T);
            a.S.resize(N * NH);
        }
    }
};

// tokens (B,T) -> a.logits (N,V): what the model expects after each token
void forward(const Model& model, Acts& a, const int* tokens) {
    embedding_forward(a.encoded, tokens, model.wte);
    const Reals* residual = &a.encoded;
    for (int l = 0; l < model.L; l++) {
        const Layer& p = model.layers[l];
        LayerActs& x = a.layers[l];
        // 1 normalize the residual stream
        layernorm_forward(x.ln1, x.mean1, x.rstd1, *residual, p.ln1w, p.ln1b);
        // 2 queries, keys and values; and what CABLE is made from
        linear_forward(x.qkv, x.ln1, p.qkvw, &p.qkvb);
        linear_forward(x.z, x.ln1, p.cw, &p.cb);
        linear_forward(x.u, x.ln1, p.sw, &p.sb);
        // 3 CABLE's sums and weights
        cable_forward(x.S, x.g, x.z, x.u, a.B, a.T);
        // 4 attention
        attention_forward(x.atty, x.P, x.qkv, x.S, x.g, a.B, a.T, model.NH);
        // 5 mix the heads, and add to the residual stream
        linear_forward(x.residual2, x.atty, p.attprojw, &p.attprojb);
        add_scaled(x.residual2.data(), 1, residual->data(), (int)residual->size());
        // 6 normalize again
        layernorm_forward(x.ln2, x.mean2, x.rstd2, x.residual2, p.ln2w, p.ln2b);
        // 7, 8, 9 the MLP widens, bends, narrows, and adds to the residual stream
        linear_forward(x.fch, x.ln2, p.fcw, &p.fcb);
        gelu_forward(x.fchgelu, x.fch);
        linear_forward(x.residual3, x.fchgelu, p.fcprojw, &p.fcprojb);
        add_scaled(x.residual3.data(), 1, x.residual2.data(), (int)x.residual2.size());
        residual = &x.residual3;
    }
    // 10 the last normalization; the head is the embedding once more
    layernorm_forward(a.lnf, a.meanf, a.rstdf, *residual, model.lnfw, model.lnfb);
    linear_forward(a.logits, a.lnf, model.wte, nullptr);
}

// dlogits (N,V) -> adds to the gradients of all parameters: forward's numbers in reverse. dresidual is the gradient of
// the residual stream at the point that has been reached. Steps 5 and 9 add to that stream, so it passes through them
// unchanged; steps 1 and 6 add to it what came through their branch.
void backward(Model& model, const Acts& a, const Reals& dlogits, const int* tokens) {
    const auto zeros = [](const Reals& like) { return Reals(like.size()); };
    Reals dlnf = zeros(a.lnf), dresidual = zeros(a.encoded);
    // 10
    linear_backward(dlnf, dlogits, a.lnf, model.wte, nullptr);
    layernorm_backward(dresidual, dlnf, a.layers.back().residual3, a.meanf, a.rstdf, model.lnfw, model.lnfb);
    for (int l = model.L - 1; l >= 0; l--) {
        Layer& p = model.layers[l];
        const LayerActs& x = a.layers[l];
        const Reals& residual = l == 0 ? a.encoded : a.layers[l - 1].residual3;
        // 9, 8, 7
        Reals dfchgelu = zeros(x.fchgelu), dfch = zeros(x.fch);
        Reals dln2 = zeros(x.ln2);
        linear_backward(dfchgelu, dresidual, x.fchgelu, p.fcprojw, &p.fcprojb);
        gelu_backward(dfch, dfchgelu, x.fch);
        linear_backward(dln2, dfch, x.ln2, p.fcw, &p.fcb);
        // 6
        layernorm_backward(dresidual, dln2, x.residual2, x.mean2, x.rstd2, p.ln2w, p.ln2b);
        // 5
        Reals datty = zeros(x.atty);
        linear_backward(datty, dresidual, x.atty, p.attprojw, &p.attprojb);
        // 4
        Reals dqkv = zeros(x.qkv), dg = zeros(x.g);
        std::vector<double> dS(x.S.size());
        attention_backward(dqkv, dS, dg, datty, x.P, x.qkv, x.S, x.g, a.B, a.T, model.NH);
        // 3
        Reals dz = zeros(x.z), du = zeros(x.u);
        cable_backward(dz, du, dS, dg, x.z, x.u, a.B, a.T);
        // 2
        Reals dln1 = zeros(x.ln1);
        linear_backward(dln1, dqkv, x.ln1, p.qkvw, &p.qkvb);
        linear_backward(dln1, dz, x.ln1, p.cw, &p.cb);
        linear_backward(dln1, du, x.ln1, p.sw, &p.sb);
        // 1
        layernorm_backward(dresidual, dln1, residual, x.mean1, x.rstd1, p.ln1w, p.ln1b);
    }
    embedding_backward(dresidual, tokens, model.wte);
}

// ----------------------------------------------------------------------------------------------------------
// the update

// The norm of all gradients together: the length of the step that they propose
double gradient_norm(const Model& model) {
    double squares = 0;
    for (const Parameter* p : model.all) { for (real d : p->d) { squares += (double)d * d; } }
    return std::sqrt(squares);
}

// AdamW (Loshchilov, Hutter 2019): m and v average the gradient and its square. t: updates from 1. scale: of clipping
void update(Model& model, double lr, double weight_decay, double scale, int t) {
    const real beta1 = (real)0.9, beta2 = (real)0.95;
    const real correction1 = (real)(1 / (1 - std::pow((double)beta1, t)));
    const real correction2 = (real)(1 / (1 - std::pow((double)beta2, t)));
    for (Parameter* p : model.all) {
        const real decay = p->decays ? (real)weight_decay : 0;
        for (size_t i = 0; i < p->w.size(); i++) {
            const real g = p->d[i] * (real)scale;
            p->m[i] = beta1 * p->m[i] + (1 - beta1) * g;
            p->v[i] = beta2 * p->v[i] + (1 - beta2) * g * g;
            // m / sqrt(v) is about 1 where gradients agree, and small where they contradict each other. Both averages
            // began at 0, so their weights add up to 1 - beta^t only: the corrections divide by that
            const real step = p->m[i] * correction1 / (std::sqrt(p->v[i] * correction2) + (real)1e-8);
            p->w[i] -= (real)lr * (step + decay * p->w[i]);
            p->d[i] = 0;                                        // for the next step
        }
    }
}

// ----------------------------------------------------------------------------------------------------------
// the program

[[noreturn]] void stop(const std::string& what) {
    fprintf(stderr, "error: %s\n", what.c_str());
    exit(2);
}

struct Options {
    std::map<std::string, std::string> texts = {
        {"train_files", ""}, {"val_files", ""}, {"model", "2,4,64"}, {"out", ""}, {"generate", "The "}};
    std::map<std::string, double> numbers = {
        {"T", 128}, {"B", 8}, {"steps", 20}, {"lr", 1e-3}, {"warmup", 0}, {"final_lr", 0.1}, {"weight_decay", 0.1},
        {"seed", 42}, {"tokens", 100}};

    Options(int argc, char** argv) {
        for (int i = 1; i < argc; i += 2) {
            const std::string name = std::string(argv[i]).substr(std::min(strlen(argv[i]), (size_t)2));
            char* end = nullptr;
            if (i + 1 < argc && texts.count(name)) { texts[name] = argv[i + 1]; continue; }
            if (i + 1 < argc && numbers.count(name)) { numbers[name] = strtod(argv[i + 1], &end); }
            if (end != nullptr && end != argv[i + 1] && *end == 0) { continue; }
            stop(std::string(argv[i]) + ": expected one of --train_files --val_files --model --out --generate TEXT or "
                 "--T --B --steps --lr --warmup --final_lr --weight_decay --seed --tokens NUMBER");
        }
    }
    const std::string& text(const char* name) const { return texts.at(name); }
    double operator()(const char* name) const { return numbers.at(name); }
};

std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) { stop(path + ": cannot be read"); }
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Warm-up, then half a cosine down to final_lr * lr
double learning_rate(const Options& o, int step) {
    if (step < o("warmup")) { return o("lr") * (step + 1) / o("warmup"); }
    const double x = (step - o("warmup")) / (o("steps") - o("warmup"));         // the part of the decay that is done
    return o("lr") * (o("final_lr") + (1 - o("final_lr")) * (1 + std::cos(3.14159265358979323846 * x)) / 2);
}

// A batch: inputs, targets (B,T). The text is cut into windows of T tokens; an epoch has each of them once, in an order
// that is a function of the seed.
void fill_batch(std::vector<int>& inputs, std::vector<int>& targets, const std::string& text, int T, uint64_t first,
                uint64_t seed) {
    const uint64_t windows = (text.size() - 1) / (uint64_t)T, B = inputs.size() / (size_t)T;
    for (uint64_t b = 0; b < B; b++) {
        const uint64_t window = shuffled((first + b) % windows, windows, seed, (first + b) / windows);
        for (int t = 0; t < T; t++) {
            inputs[b * T + t] = (unsigned char)text[window * T + t];
            targets[b * T + t] = (unsigned char)text[window * T + t + 1];       // the token that follows
        }
    }
}

// The mean loss over the first `count` bytes of a text, read in windows of T tokens
double evaluate(const Model& model, const std::string& text, int T, int count) {
    Acts a(model, 1, T);
    std::vector<int> inputs((size_t)T), targets((size_t)T);
    double sum = 0;
    for (int at = 0; at < count; at += T) {
        for (int t = 0; t < T; t++) {
            inputs[t] = (unsigned char)text[at + t];
            targets[t] = (unsigned char)text[at + t + 1];
        }
        forward(model, a, inputs.data());
        sum += cross_entropy(a.logits, targets.data(), T) * T;
    }
    return sum / count;
}

// Continues a text byte by byte, each drawn with the probability that the model gives it. All that came before is
// computed again for each byte; train_gpt2 keeps its keys and values instead.
std::string generate(const Model& model, std::string text, int count, uint64_t seed) {
    for (int i = 0; i < count; i++) {
        Acts a(model, 1, (int)text.size());
        std::vector<int> tokens;
        for (char c : text) { tokens.push_back((unsigned char)c); }
        forward(model, a, tokens.data());
        const real* x = &a.logits[a.logits.size() - (size_t)model.V];
        const real largest = *std::max_element(x, x + model.V);
        double sum = 0, below = 0;
        for (int v = 0; v < model.V; v++) { sum += std::exp(x[v] - largest); }
        const double drawn = uniform(seed, 'g', (uint64_t)i) * sum;
        int v = 0;
        while (v + 1 < model.V && (below += std::exp(x[v] - largest)) <= drawn) { v++; }
        text += (char)v;
    }
    // a terminal must not obey what a model writes
    std::replace_if(text.begin(), text.end(), [](char c) { return (c < ' ' && c != '\n') || c > '~'; }, '?');
    return text;
}

// A checkpoint for `train_gpt2 --load`: config.json, and the values as safetensors, which is the length of a JSON
// header, the header, and the numbers.
void save(const Model& model, int T, const std::string& directory) {
    std::filesystem::create_directories(directory);
    std::string header;
    std::vector<float> values;
    for (const Parameter* p : model.all) {
        const size_t first = values.size();
        const bool transposed = stored_transposed(*p);
        const int rows = transposed ? p->cols : p->rows;        // as stored
        const int cols = transposed ? p->rows : p->cols;
        for (int r = 0; r < rows; r++) {
            for (int c = 0; c < cols; c++) { values.push_back((float)p->w[transposed ? c * rows + r : r * cols + c]); }
        }
        header += (header.empty() ? "{\"" : ",\"") + p->name + "\":{\"dtype\":\"F32\",\"shape\":[" +
                  std::to_string(rows) + (p->decays ? "," + std::to_string(cols) : "") + "],\"data_offsets\":[" +
                  std::to_string(4 * first) + "," + std::to_string(4 * values.size()) + "]}";
    }
    header += "}";
    const uint64_t length = header.size();
    std::ofstream file(directory + "/model.safetensors", std::ios::binary);
    file.write((const char*)&length, 8);
    file << header;
    file.write((const char*)values.data(), (std::streamsize)(4 * values.size()));
    std::ofstream config(directory + "/config.json");
    config << "{\"model_type\": \"cable\", \"position\": {\"name\": \"cable\"}, \"n_layer\": " << model.L
           << ", \"n_head\": " << model.NH << ", \"n_embd\": " << model.C << ", \"vocab_size\": " << model.V
           << ", \"n_positions\": " << T << "}\n";
    if (!file.flush() || !config.flush()) { stop(directory + ": the checkpoint could not be written"); }
}

int main(int argc, char** argv) {
    const Options o(argc, argv);
    const int B = (int)o("B"), T = (int)o("T");
    const int steps = (int)o("steps");
    const uint64_t seed = (uint64_t)o("seed");
    int L = 0, NH = 0;
    int C = 0;
    sscanf(o.text("model").c_str(), "%d,%d,%d", &L, &NH, &C);
    if (L < 1 || NH < 1 || C < NH || C % NH != 0) {
        stop("--model: expected layers,heads,channels, the last a multiple of the heads, got " + o.text("model"));
    }
    if (B < 1 || T < 1) { stop("--B, --T: expected at least 1"); }
    const std::string text = read_file(o.text("train_files"));
    const std::string val = o.text("val_files").empty() ? "" : read_file(o.text("val_files"));
    if (text.size() <= (size_t)T) { stop(o.text("train_files") + ": expected more than --T bytes"); }
    Model model(L, NH, C, 256, seed);
    Acts acts(model, B, T);
    std::vector<int> inputs((size_t)(B * T)), targets(inputs.size());
    const auto start = std::chrono::steady_clock::now();
    for (int step = 0; step < steps; step++) {
        fill_batch(inputs, targets, text, T, (uint64_t)step * B, seed);
        forward(model, acts, inputs.data());
        const double loss = cross_entropy(acts.logits, targets.data(), B * T);
        backward(model, acts, acts.logits, inputs.data());
        const double norm = gradient_norm(model), lr = learning_rate(o, step);
        update(model, lr, o("weight_decay"), norm > 1 ? 1 / norm : 1, step + 1);        // clipped to a length of 1
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        printf("step %4d/%d | loss %.8f | norm %.3f | lr %.2e | %.0f tok/s | %.0f s left\n", step + 1, steps, loss,
               norm, lr, (step + 1) * B * T / seconds, seconds / (step + 1) * (steps - step - 1));
        fflush(stdout);
    }
    // what CABLE is for: the same text, read in longer and longer windows
    const int longest = 8 * T;
    const int count = val.empty() ? 0 : (int)std::min<size_t>(val.size() - 1, 32768) / longest * longest;
    for (int length = T; count > 0 && length <= longest; length *= 2) {
        printf("loss at T = %5d: %.4f\n", length, evaluate(model, val, length, count));
        fflush(stdout);
    }
    if (o("tokens") > 0) { printf("%s\n", generate(model, o.text("generate"), (int)o("tokens"), seed).c_str()); }
    if (!o.text("out").empty()) { save(model, T, o.text("out")); }
    return 0;
}
