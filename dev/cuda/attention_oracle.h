// attention_oracle.h -- causal attention with CABLE's bias and its gradients, in plain loops over one head after the
// other.
//
//   logit_ij = scale q_i.k_j - g_i (S_i - S_j), j <= i     P = softmax(logit)     out_i = sum_j P_ij v_j
//   dP_ij = dout_i.v_j     row_dot_i = out_i.dout_i     dlogit_ij = P_ij (dP_ij - row_dot_i)
#pragma once

#include "ladder.h"

// No two heads share an element of a result. At the sizes of a GPU this is what takes the ladder's time.
#if defined(_OPENMP)
#define OVER_HEADS _Pragma("omp parallel for schedule(dynamic)")
#else
#define OVER_HEADS
#endif

// q, k, v, dout (heads,T,HS), S, g (heads,T). Only differences of S are rounded to R, as in the kernels.
template <class R> struct OracleInputs {
    size_t heads, T, HS;
    R scale;
    std::vector<R> q, k, v, dout, g;
    std::vector<double> S;
};

// Stored: what P and dlogit are rounded to before they are multiplied by v, dout, k and q: bf16 on the tensor cores
template <class R, class Stored = R> struct AttentionOracle {
    std::vector<R> out, lse;                                // (heads,T,HS), (heads,T)
    std::vector<R> dq, dk, dv, dS, dg;

    static R logit(const OracleInputs<R>& in, size_t at, size_t i, size_t j) {
        R dot = 0;
        for (size_t d = 0; d < in.HS; d++) { dot += in.q[(at + i) * in.HS + d] * in.k[(at + j) * in.HS + d]; }
        return in.scale * dot - in.g[at + i] * (R)(in.S[at + i] - in.S[at + j]);
    }
    void forward(const OracleInputs<R>& in) {
        const size_t HS = in.HS;
        out.assign(in.heads * in.T * HS, 0);
        lse.assign(in.heads * in.T, 0);
        OVER_HEADS
        for (size_t bh = 0; bh < in.heads; bh++) {
            const size_t at = bh * in.T;
            std::vector<R> P(in.T);
            for (size_t i = 0; i < in.T; i++) {
                // 1. logits and the largest of them    2. exponentials and their sum
                R largest = -INFINITY, sum = 0;
                for (size_t j = 0; j <= i; j++) { largest = std::max(largest, P[j] = logit(in, at, i, j)); }
                for (size_t j = 0; j <= i; j++) { sum += P[j] = std::exp(P[j] - largest); }
                // 3. out = P v
                for (size_t j = 0; j <= i; j++) {
                    const R weight = (R)rounded<Stored>(P[j]) / sum;
                    for (size_t d = 0; d < HS; d++) { out[(at + i) * HS + d] += weight * in.v[(at + j) * HS + d]; }
                }
                lse[at + i] = largest + std::log(sum);
            }
        }
    }
    // given_out, given_lse: what the forward has stored
    void backward(const OracleInputs<R>& in, const std::vector<R>& given_out, const std::vector<R>& given_lse) {
        const size_t HS = in.HS;
        for (std::vector<R>* x : {&dq, &dk, &dv}) { x->assign(in.heads * in.T * HS, 0); }
        for (std::vector<R>* x : {&dS, &dg}) { x->assign(in.heads * in.T, 0); }
        OVER_HEADS
        for (size_t bh = 0; bh < in.heads; bh++) {
            const size_t at = bh * in.T;
            for (size_t i = 0; i < in.T; i++) {
                const R *dout = &in.dout[(at + i) * HS], *q = &in.q[(at + i) * HS];
                // 1. row_dot
                R row_dot = 0;
                for (size_t d = 0; d < HS; d++) { row_dot += given_out[(at + i) * HS + d] * dout[d]; }
                for (size_t j = 0; j <= i; j++) {
                    // 2. dP, P and dlogit
                    R dP = 0;
                    for (size_t d = 0; d < HS; d++) { dP += dout[d] * in.v[(at + j) * HS + d]; }
                    const R P = std::exp(logit(in, at, i, j) - given_lse[at + i]);
                    const R dlogit = P * (dP - row_dot);
                    // 3. the products
                    const R P_stored = (R)rounded<Stored>(P), dlogit_stored = (R)rounded<Stored>(dlogit);
                    for (size_t d = 0; d < HS; d++) {
                        dv[(at + j) * HS + d] += P_stored * dout[d];
                        dq[(at + i) * HS + d] += in.scale * dlogit_stored * in.k[(at + j) * HS + d];
                        dk[(at + j) * HS + d] += in.scale * dlogit_stored * q[d];
                    }
                    // 4. the bias -g_i (S_i - S_j): its derivatives by g_i, S_i and S_j
                    dg[at + i] -= dlogit * (R)(in.S[at + i] - in.S[at + j]);
                    dS[at + i] -= in.g[at + i] * dlogit;
                    dS[at + j] += in.g[at + i] * dlogit;
                }
            }
        }
    }
};

// How far the oracle's gradients are from a central difference of its forward, in a random direction of all inputs,
// relative to the sum of the magnitudes that the slope is made of
inline double oracle_error() {
    const size_t heads = 2, T = 13;
    const size_t HS = 5;
    const double h = 1e-5;
    OracleInputs<double> in = {heads, T, HS, 0.4, {}, {}, {}, {}, {}, {}};
    AttentionOracle<double> oracle;
    std::vector<double>* inputs[] = {&in.q, &in.k, &in.v, &in.S, &in.g};
    const std::vector<double>* gradients[] = {&oracle.dq, &oracle.dk, &oracle.dv, &oracle.dS, &oracle.dg};
    std::vector<double> direction[5];
    for (size_t x = 0; x < 5; x++) {
        const size_t size = heads * T * (x < 3 ? HS : 1);
        *inputs[x] = numbers<double>(normals(size, 100 + x));
        direction[x] = numbers<double>(normals(size, 200 + x));
    }
    in.dout = numbers<double>(normals(heads * T * HS, 300));
    oracle.forward(in);
    oracle.backward(in, oracle.out, oracle.lse);
    // 1. the slope that the gradients give
    double slope = 0.0, size = 0.0;
    for (size_t x = 0; x < 5; x++) {
        for (size_t e = 0; e < direction[x].size(); e++) {
            slope += (*gradients[x])[e] * direction[x][e];
            size += std::fabs((*gradients[x])[e] * direction[x][e]);
        }
    }
    // 2. the loss sum(out * dout) on both sides
    double loss[2] = {0.0, 0.0};
    const std::vector<double> at[] = {in.q, in.k, in.v, in.S, in.g};
    for (int side = 0; side < 2; side++) {
        for (size_t x = 0; x < 5; x++) {
            for (size_t e = 0; e < at[x].size(); e++) {
                (*inputs[x])[e] = at[x][e] + (side == 0 ? h : -h) * direction[x][e];
            }
        }
        oracle.forward(in);
        for (size_t e = 0; e < oracle.out.size(); e++) { loss[side] += oracle.out[e] * in.dout[e]; }
    }
    return std::fabs((loss[0] - loss[1]) / (2 * h) - slope) / size;
}
