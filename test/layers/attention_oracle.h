// attention_oracle.h -- attention of one head in plain loops, with the T x T matrices that the kernels never build.
//
// Read this first, then llmc/attention.cuh, which takes the same steps a tile at a time and uses the same names.
//
//   logit_ij = scale q_i.k_j + B_ij     P_ij = softmax_j(logit_ij)     out_i = sum_j P_ij v_j
//   lse_i = log sum_j e^(logit_ij)
//
// and, for a loss whose gradient in out is dout:
//
//   dP_ij = dout_i.v_j                       out_i is a sum over j of P_ij v_j
//   row_dot_i = sum_j P_ij dP_ij             = out_i.dout_i, which needs no row of P
//   dlogit_ij = P_ij (dP_ij - row_dot_i)     since softmax changes by P_ij ([j = k] - P_ik) with logit_ik
//   dv_j = sum_i P_ij dout_i                 dq_i = scale sum_j dlogit_ij k_j
//   dB_ij = dlogit_ij                        dk_j = scale sum_i dlogit_ij q_i
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

// R is double, the truth, or float: the error that float32 makes without any tricks, which is the unit of the
// tolerances. Stored: what P and dlogit are rounded to before they are multiplied by v, dout, k and q, and out, too:
// bf16 on the tensor cores, which keep lse in float32.
template <class R, class Stored = R> struct HeadOracle {
    static constexpr bool rounds = !std::is_same<R, Stored>::value;
    size_t T, HS;
    bool causal;
    R scale;
    std::vector<R> logits;                              // (T,T), those that count
    std::vector<R> out, lse;                            // (T,HS), (T); of a query that sees no key 0, and -inf
    std::vector<R> dq, dk, dv, dbias;                   // (T,HS) three times, (T,T)

    // q, k, v, dout (T,HS), bias (T,T), -inf where a key is hidden; causal: key j counts for query i where j <= i.
    // Without dout only the forward pass; first: of the queries from this one on
    HeadOracle(const std::vector<R>& q, const std::vector<R>& k, const std::vector<R>& v, const std::vector<R>& bias,
               const std::vector<R>& dout, R scale, size_t T, size_t HS, bool causal, size_t first = 0)
        : T(T), HS(HS), causal(causal), scale(scale), logits(T * T), out(T * HS), lse(T), dq(T * HS), dk(T * HS),
          dv(T * HS), dbias(T * T) {
        for (size_t i = first; i < T; i++) { forward_row(q, k, v, bias, i); }
        if (dout.empty()) { return; }
        std::vector<R> kept_out = out, kept_lse = lse;
        for (R& x : kept_out) { x = stored(x); }
        for (R& x : kept_lse) { x = rounds ? (R)(float)x : x; }
        backward(q, k, v, dout, kept_out, kept_lse);
    }

    // kept_out, kept_lse: what the forward has left
    void backward(const std::vector<R>& q, const std::vector<R>& k, const std::vector<R>& v, const std::vector<R>& dout,
                  const std::vector<R>& kept_out, const std::vector<R>& kept_lse) {
        for (size_t i = 0; i < T; i++) {
            if (kept_lse[i] == -INFINITY) { continue; }
            // 1. row_dot
            const R row_dot = dot(kept_out, i, dout, i);
            for (size_t j = 0; j < keys(i); j++) {
                // 2. P, from lse    3. dP and dlogit
                const R P = std::exp(logits[i * T + j] - kept_lse[i]);
                const R dlogit = P * (dot(dout, i, v, j) - row_dot);
                // 4. dv += P^T dout,  dk += dlogit^T q,  dq += dlogit k
                for (size_t d = 0; d < HS; d++) {
                    dv[j * HS + d] += stored(P) * dout[i * HS + d];
                    dk[j * HS + d] += scale * stored(dlogit) * q[i * HS + d];
                    dq[i * HS + d] += scale * stored(dlogit) * k[j * HS + d];
                }
                // 5. the bias
                dbias[i * T + j] = dlogit;
            }
        }
    }

private:
    size_t keys(size_t i) const { return causal ? i + 1 : T; }
    void forward_row(const std::vector<R>& q, const std::vector<R>& k, const std::vector<R>& v,
                     const std::vector<R>& bias, size_t i) {
        // 1. scores = q k^T    2. logits: the scale, the bias and the largest one
        R largest = -INFINITY, sum = 0;
        for (size_t j = 0; j < keys(i); j++) {
            logits[i * T + j] = scale * dot(q, i, k, j) + bias[i * T + j];
            largest = std::max(largest, logits[i * T + j]);
        }
        lse[i] = largest;
        if (largest == -INFINITY) { return; }
        // 4. the sum of the exponentials; relative to the largest logit, so that none overflows. Step 3 of the kernels
        // rescales what earlier tiles have summed; here a row is complete at once
        for (size_t j = 0; j < keys(i); j++) { sum += std::exp(logits[i * T + j] - largest); }
        // 5. out = P v    6. lse
        for (size_t j = 0; j < keys(i); j++) {
            const R P = stored(std::exp(logits[i * T + j] - largest)) / sum;
            for (size_t d = 0; d < HS; d++) { out[i * HS + d] += P * v[j * HS + d]; }
        }
        lse[i] = largest + std::log(sum);
    }
    static R stored(R x) {
        if constexpr (rounds) { return (R)(float)(Stored)(float)x; }
        return x;
    }
    // row i of a times row j of b
    R dot(const std::vector<R>& a, size_t i, const std::vector<R>& b, size_t j) const {
        R sum = 0;
        for (size_t d = 0; d < HS; d++) { sum += a[i * HS + d] * b[j * HS + d]; }
        return sum;
    }
};
