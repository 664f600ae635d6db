// attention_oracle.h -- causal attention with CABLE's bias and its gradients: HeadOracle of test/layers, over one head
// after the other, and what dlogit is in S and g. A mistake here would make the shipped rungs wrong, which test/layers
// compares with an oracle of its own.
//
//   logit_ij = scale q_i.k_j - g_i (S_i - S_j), j <= i     dg_i, dS_i, dS_j: dlogit_ij times its derivatives
#pragma once

#include "ladder.h"
#include "test/layers/attention_oracle.h"

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

    R distance(size_t bh, size_t i, size_t j) const { return (R)(S[bh * T + i] - S[bh * T + j]); }
};

template <class R, class Stored = R> struct AttentionOracle {
    std::vector<R> out, lse;                                // (heads,T,HS), (heads,T)
    std::vector<R> dq, dk, dv, dS, dg;

    void forward(const OracleInputs<R>& in) {
        out.assign(in.heads * in.T * in.HS, 0);
        lse.assign(in.heads * in.T, 0);
        OVER_HEADS
        for (size_t bh = 0; bh < in.heads; bh++) {
            const HeadOracle<R, Stored> head = head_of(in, bh);
            put(out, head.out, bh);
            put(lse, head.lse, bh);
        }
    }
    // given_out, given_lse: what the forward has stored
    void backward(const OracleInputs<R>& in, const std::vector<R>& given_out, const std::vector<R>& given_lse) {
        const size_t T = in.T, n = in.T * in.HS;
        for (std::vector<R>* x : {&dq, &dk, &dv}) { x->assign(in.heads * n, 0); }
        for (std::vector<R>* x : {&dS, &dg}) { x->assign(in.heads * T, 0); }
        OVER_HEADS
        for (size_t bh = 0; bh < in.heads; bh++) {
            HeadOracle<R, Stored> head = head_of(in, bh);
            head.backward(of(in.q, bh, n), of(in.k, bh, n), of(in.v, bh, n), of(in.dout, bh, n), of(given_out, bh, n),
                          of(given_lse, bh, T));
            put(dq, head.dq, bh);
            put(dk, head.dk, bh);
            put(dv, head.dv, bh);
            for (size_t i = 0; i < T; i++) {
                for (size_t j = 0; j <= i; j++) {
                    const R dlogit = head.dbias[i * T + j], g = in.g[bh * T + i];
                    dg[bh * T + i] -= dlogit * in.distance(bh, i, j);
                    dS[bh * T + i] -= g * dlogit;
                    dS[bh * T + j] += g * dlogit;
                }
            }
        }
    }

private:
    // n elements of a head, and back
    static std::vector<R> of(const std::vector<R>& x, size_t bh, size_t n) {
        return std::vector<R>(x.begin() + bh * n, x.begin() + (bh + 1) * n);
    }
    static void put(std::vector<R>& to, const std::vector<R>& x, size_t bh) {
        std::copy(x.begin(), x.end(), to.begin() + bh * x.size());
    }
    static HeadOracle<R, Stored> head_of(const OracleInputs<R>& in, size_t bh) {
        const size_t T = in.T, n = in.T * in.HS;
        std::vector<R> bias(T * T);
        for (size_t i = 0; i < T; i++) {
            for (size_t j = 0; j <= i; j++) { bias[i * T + j] = -in.g[bh * T + i] * in.distance(bh, i, j); }
        }
        return {of(in.q, bh, n), of(in.k, bh, n), of(in.v, bh, n), bias, {}, in.scale, T, in.HS, true};
    }
};
