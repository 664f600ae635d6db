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
#include <vector>

// R is double, the truth, or float: the error that float32 makes without any tricks, which is the unit of the
// tolerances.
template <class R> struct HeadOracle {
    std::vector<R> out, lse;                            // (T,HS), (T)
    std::vector<R> dq, dk, dv, dbias;                   // (T,HS) three times, (T,T)

    // q, k, v, dout (T,HS), bias (T,T); causal: key j counts for query i where j <= i
    HeadOracle(const std::vector<R>& q, const std::vector<R>& k, const std::vector<R>& v, const std::vector<R>& bias,
               const std::vector<R>& dout, R scale, size_t T, size_t HS, bool causal)
        : out(T * HS), lse(T), dq(T * HS), dk(T * HS), dv(T * HS), dbias(T * T) {
        std::vector<R> P(T * T);                        // scores, then logits, then probabilities; 0 where masked
        // the forward pass, one query at a time
        for (size_t i = 0; i < T; i++) {
            const size_t keys = causal ? i + 1 : T;
            // 1. scores = q k^T    2. logits: the scale, the bias and the largest one
            R largest = -INFINITY;
            for (size_t j = 0; j < keys; j++) {
                const R logit = scale * dot(q, i, k, j, HS) + bias[i * T + j];
                P[i * T + j] = logit;
                largest = std::max(largest, logit);
            }
            // 4. exponentials and their sum; relative to the largest logit, so that none overflows. Step 3 of the
            // kernels rescales what earlier tiles have summed; here a row is complete at once
            R sum = 0;
            for (size_t j = 0; j < keys; j++) {
                P[i * T + j] = std::exp(P[i * T + j] - largest);
                sum += P[i * T + j];
            }
            // 5. out = P v    6. P's sum, and lse
            for (size_t j = 0; j < keys; j++) {
                P[i * T + j] /= sum;
                for (size_t d = 0; d < HS; d++) { out[i * HS + d] += P[i * T + j] * v[j * HS + d]; }
            }
            lse[i] = largest + std::log(sum);
        }
        // the backward pass
        for (size_t i = 0; i < T; i++) {
            const size_t keys = causal ? i + 1 : T;
            // 1. row_dot
            const R row_dot = dot(out, i, dout, i, HS);
            for (size_t j = 0; j < keys; j++) {
                // 2. dP    3. dlogit
                const R dP = dot(dout, i, v, j, HS);
                const R dlogit = P[i * T + j] * (dP - row_dot);
                // 4. dv += P^T dout,  dk += dlogit^T q,  dq += dlogit k
                for (size_t d = 0; d < HS; d++) {
                    dv[j * HS + d] += P[i * T + j] * dout[i * HS + d];
                    dk[j * HS + d] += scale * dlogit * q[i * HS + d];
                    dq[i * HS + d] += scale * dlogit * k[j * HS + d];
                }
                // 5. the bias
                dbias[i * T + j] = dlogit;
            }
        }
    }

private:
    // row i of a times row j of b
    static R dot(const std::vector<R>& a, size_t i, const std::vector<R>& b, size_t j, size_t HS) {
        R sum = 0;
        for (size_t d = 0; d < HS; d++) { sum += a[i * HS + d] * b[j * HS + d]; }
        return sum;
    }
};
