// position/cope.cuh -- contextual position encoding (CoPE, Golovneva et al. 2024): a key's position is a count of the
// keys that the query chooses to count.
//
//   g_ij = sigmoid(s_ij)                     s_ij: the score, q_i.k_j / sqrt(HS). g_ij = 0 where i does not see j
//   p_ij = min(sum of g_it for t = j .. i, npos - 1)
//   B_ij = q_i.e[p_ij]                       e (HS,npos), one for each layer and all its heads, linear between integers
//
// The gates take the scaled score and q.e is not divided by sqrt(HS), as in the authors' program with --cope-nodiv.
// With z_i = e^T q_i, computed once for each query, f = floor(p_ij) and w = p_ij - f:
//
//   B_ij = z_i[f] + w (z_i[f+1] - z_i[f])
//   backward: dz_i[f] += (1 - w) dlogit_ij     dz_i[f+1] += w dlogit_ij     dq_i += e dz_i     de += sum_i q_i dz_i^T
//     dp_ij = dlogit_ij (z_i[f+1] - z_i[f]), 0 at the last position
//     ds_it = dlogit_it + g_it (1 - g_it) sum of dp_ij for j <= t
//
// B depends on the scores of other keys, so the portable attention kernels give this functor whole tiles of scores
// (counts_gates). The forward takes the keys from the query downwards and sums their gates. The backward takes them
// upwards: it subtracts each gate from the forward's total, and sums dp. The sums are float64, because a position is a
// difference of two sums over the text, and rows of dlogit cancel. Causal models only: keys after a query are not
// counted.
#pragma once

#include "../base/matrix.cuh"
#include "encoding.cuh"

constexpr int COPE_TILE = 128;                      // as wide as a tile of the attention kernels may be
constexpr int COPE_ROWS = LANES > 1 ? 8 : 1;        // a block sums the gradients of this many rows of e
constexpr int COPE_MOST = 4096;                     // positions; a block keeps COPE_ROWS doubles for each

struct CopeBias : BiasFunctor {
    static constexpr bool counts_gates = true;
    const float* z;             // (B*NH,T,npos)
    float* dz;
    double* total;              // (B*NH,T): the sum of a query's gates
    double *rest, *dgate;       // (B*NH,T), in the backward: the sum of gates still to come; the sum of dp so far
    const double* split_gates;  // (B*NH,ceil(T/DECODE_SPLIT)), while decoding
    int npos, T;

    struct Tile { __device__ float operator()(int, int) const { return 0.0f; } };
    __device__ Tile tile(int, int, int) const { return {}; }        // add_bias has added B to the scores

    // The position for a count, and the interval in which it lies. A NaN becomes the last position; its score is NaN
    // anyway.
    __device__ float limit(double count) const { return (float)(count < npos - 1 ? count : npos - 1); }
    __device__ int interval(float position) const { return imin((int)position, npos - 2); }
    __device__ float at(const float* z_i, float position) const {
        const int f = interval(position);
        return z_i[f] + (position - (float)f) * (z_i[f + 1] - z_i[f]);
    }
};

// Overloads of any_bias.cuh's functions. scores (keys, queries) += B; a hidden key's score is -inf, so its gate is 0.
// The tiles of a query come from its own key downwards. Each thread has some of the queries.
__device__ inline void add_bias(const CopeBias& bias, const Matrix<float>& scores, int bh, const PairRange& t,
                                const float*) {
    const size_t first = (size_t)bh * bias.T + t.i0;
    double* count = bias.total + first;
    const float* z = bias.z + first * bias.npos;
    for (int r = threadIdx.x; r < t.ni && t.j0 + t.nj >= t.i0 + t.ni; r += blockDim.x) { count[r] = 0.0; }
    for (int c = t.nj - 1; c >= 0; c--) {
        float* row = scores.row(c);
        SIMD
        for (int r = threadIdx.x; r < t.ni; r += blockDim.x) {
            count[r] += (double)sigmoid(row[r]);
            row[r] += bias.at(z + (size_t)r * bias.npos, bias.limit(count[r]));
        }
    }
}

// One query and the keys of a split, for decoding. A hidden key has no gate here either.
__device__ inline void add_row_bias(const CopeBias& bias, float* scores, float* room, int bh, int i, int j0, int nj,
                                    float) {
    const int splits = i / DECODE_SPLIT + 1;
    const double* gates = bias.split_gates + (size_t)bh * ceil_div(bias.T, DECODE_SPLIT);
    double count = 0.0;                                     // of the splits closer to the query
    for (int s = j0 / DECODE_SPLIT + 1 + (int)threadIdx.x; s < splits; s += blockDim.x) { count += gates[s]; }
    count = block_sum(count);
    SIMD
    for (int c = threadIdx.x; c < nj; c += blockDim.x) { room[c] = sigmoid(scores[c]); }
    __syncthreads();
    for (int c = nj - 1; c >= 0 && threadIdx.x == 0; c--) {
        count += (double)room[c];
        room[c] = bias.limit(count);
    }
    __syncthreads();
    const float* z = bias.z + ((size_t)bh * bias.T + i) * bias.npos;
    for (int c = threadIdx.x; c < nj; c += blockDim.x) { scores[c] += bias.at(z, room[c]); }
}

// P (queries, keys) has scores and becomes probabilities; dscore has dP and becomes the gradient of the scores. lse,
// row_dot: of the tile's queries. The tiles of a query come upwards to its own key. Each thread has some of the
// queries.
__device__ inline void take_gradient(const CopeBias& bias, const Matrix<float>& P, const Matrix<float>& dscore, int bh,
                                     const PairRange& t, const float* lse, const float* row_dot, const float*) {
    const int npos = bias.npos;
    for (int r = threadIdx.x; r < t.ni; r += blockDim.x) {
        const size_t row = (size_t)bh * bias.T + t.i0 + r;
        const float* z_i = bias.z + row * npos;
        float* p = P.row(r);
        float* ds = dscore.row(r);
        float gate[COPE_TILE], place[COPE_TILE], slope[COPE_TILE];
        const int seen = imin(t.nj, t.i0 + r + 1 - t.j0);
        // 1. gates, positions, logits
        SIMD
        for (int c = 0; c < seen; c++) { gate[c] = sigmoid(p[c]); }
        double count = bias.rest[row];
        for (int c = 0; c < seen; c++) {
            place[c] = bias.limit(count);
            const int f = bias.interval(place[c]);
            slope[c] = count < npos - 1 ? z_i[f + 1] - z_i[f] : 0.0f;
            p[c] += bias.at(z_i, place[c]);
            count -= (double)gate[c];
        }
        bias.rest[row] = count;
        // 2. P = e^(logit - lse) and dlogit = P (dP - row_dot)
        SIMD
        for (int c = 0; c < seen; c++) {
            p[c] = fast_exp(p[c] - lse[r]);
            ds[c] = p[c] * (ds[c] - row_dot[r]);
        }
        for (int c = seen; c < t.nj; c++) {
            p[c] = 0.0f;
            ds[c] = 0.0f;
        }
        // 3. dz, by runs of keys in one interval, and the gradient that the scores get through their gates
        float* dz_i = bias.dz + row * npos;
        double through = bias.dgate[row];
        for (int c = 0; c < seen;) {
            const int f = bias.interval(place[c]);
            float low = 0.0f, high = 0.0f;
            for (; c < seen && bias.interval(place[c]) == f; c++) {
                const float w = place[c] - (float)f;
                low += (1.0f - w) * ds[c];
                high += w * ds[c];
                through += (double)(ds[c] * slope[c]);
                ds[c] += (float)through * (gate[c] * (1.0f - gate[c]));
            }
            dz_i[f] += low;
            dz_i[f + 1] += high;
        }
        bias.dgate[row] = through;
    }
}

// z (B*NH,stride,npos) of the tokens from t0 on. One block per token; shared memory: npos floats
static __global__ void cope_forward_kernel(float* z, const floatX* qkv, const float* e, int T, int t0, int stride,
                                           int NH, int HS, int OC, int npos) {
    const size_t b = blockIdx.x / T;
    const size_t t = (size_t)(blockIdx.x % T + t0);
    float* sum = dynamic_shared();
    for (int h = 0; h < NH; h++) {
        const floatX* q = qkv + (b * stride + t) * OC + h * HS;
        for (int n = threadIdx.x; n < npos; n += blockDim.x) { sum[n] = 0.0f; }
        for (int d = 0; d < HS; d++) {
            const float q_d = (float)q[d];
            SIMD
            for (int n = threadIdx.x; n < npos; n += blockDim.x) { sum[n] += q_d * e[d * npos + n]; }
        }
        float* z_h = z + ((b * NH + h) * stride + t) * npos;
        for (int n = threadIdx.x; n < npos; n += blockDim.x) { z_h[n] = sum[n]; }
    }
}

// dq += e dz. One block per token; after a sequence's end dz is 0.
static __global__ void cope_dq_kernel(floatX* dqkv, const float* dz, const float* e, int T, int NH, int HS, int OC,
                                      int npos) {
    const size_t b = blockIdx.x / T;
    const size_t t = blockIdx.x % T;
    floatX* dq = dqkv + (b * T + t) * OC;
    for (int c = threadIdx.x; c < NH * HS; c += blockDim.x) {
        const float* dz_h = dz + ((b * NH + c / HS) * T + t) * npos;
        const float* e_d = e + c % HS * npos;
        const auto sum = sums_over<1>(0, npos, 1, [&](float* s, int n) { s[0] += dz_h[n] * e_d[n]; });
        dq[c] = (floatX)((float)dq[c] + sum.x[0]);
    }
}

// parts (B*NH,HS,npos): q^T dz of each sequence and head. One block per COPE_ROWS channels, with COPE_ROWS * npos
// doubles of shared memory
static __global__ void cope_de_kernel(float* parts, const floatX* qkv, const float* dz, const int* kv_len, int T,
                                      int NH, int HS, int OC, int npos) {
    const int groups = ceil_div(HS, COPE_ROWS);
    const int bh = blockIdx.x / groups;
    const int d0 = blockIdx.x % groups * COPE_ROWS;
    const int rows = imin(COPE_ROWS, HS - d0);
    const int tokens = kv_len == nullptr ? T : clamp(kv_len[bh / NH], 0, T);
    double* sum = (double*)dynamic_shared();
    for (int x = threadIdx.x; x < rows * npos; x += blockDim.x) { sum[x] = 0.0; }
    __syncthreads();
    for (int t = 0; t < tokens; t++) {
        const floatX* q = qkv + ((size_t)(bh / NH) * T + t) * OC + bh % NH * HS + d0;
        const float* dz_t = dz + ((size_t)bh * T + t) * npos;
        for (int k = 0; k < rows; k++) {
            const double q_d = (double)(float)q[k];
            SIMD
            for (int n = threadIdx.x; n < npos; n += blockDim.x) { sum[k * npos + n] += q_d * (double)dz_t[n]; }
        }
    }
    __syncthreads();
    float* part = parts + ((size_t)bh * HS + d0) * npos;
    for (int x = threadIdx.x; x < rows * npos; x += blockDim.x) { part[x] = (float)sum[x]; }
}
// de (HS,npos) += the parts, in order
static __global__ void cope_reduce_kernel(float* de, const float* parts, int BNH, int count) {
    const GridSpan s = grid_span((size_t)count);
    for (size_t x = s.begin; x < s.end; x += s.step) {
        double sum = 0.0;
        for (int bh = 0; bh < BNH; bh++) { sum += (double)parts[(size_t)bh * count + x]; }
        de[x] += (float)sum;
    }
}

// gates (BNH,ceil(stride/DECODE_SPLIT)): the sum of the gates of the query at t0 over each split. One block per split
// and (batch, head), as in attention/decode.cuh, with the query in shared memory
static __global__ void cope_split_gates_kernel(double* gates, const floatX* qkv, int t0, AttentionMask mask,
                                               int stride, int NH, int HS, int OC, float scale, int BNH) {
    const int bh = blockIdx.x % BNH;
    const int split = blockIdx.x / BNH;
    const int j0 = split * DECODE_SPLIT;
    const int end = imin(j0 + DECODE_SPLIT, t0 + 1);
    float* query = dynamic_shared();
    const floatX* q = qkv + (size_t)(bh / NH) * stride * OC + bh % NH * HS;
    const floatX* k = q + NH * HS;
    mask = mask.of((size_t)(bh / NH), stride);
    const int begin = mask.begin(t0);
    for (int d = threadIdx.x; d < HS; d += blockDim.x) { query[d] = scale * (float)q[(size_t)t0 * OC + d]; }
    __syncthreads();
    double sum = 0.0;
    for (int j = j0 + (int)threadIdx.x; j < end; j += blockDim.x) {
        if (mask.exists() && mask.hides(t0, j, begin)) { continue; }
        const floatX* k_j = k + (size_t)j * OC;
        sum += (double)sigmoid(dot(query, k_j, HS));
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { gates[(size_t)bh * ceil_div(stride, DECODE_SPLIT) + split] = sum; }
}

struct Cope : Encoding {
    using Encoding::Encoding;
    Parameter e;                                            // (HS,npos)
    float *z = nullptr, *dz = nullptr;                      // (B*NH,T,npos)
    float* parts = nullptr;                                 // (B*NH,HS,npos)
    double *total = nullptr, *split_gates = nullptr;        // (B*NH,T), (B*NH,ceil(T/DECODE_SPLIT))
    double *rest = nullptr, *dgate = nullptr;               // (B*NH,T)

    static Hyperparameters defaults(int) { return {{"npos", 64}}; }
    static int positions(const EncodingConfig& config) {
        const double n = config.value("npos");
        check(n == std::floor(n) && n >= 2 && n <= COPE_MOST, "--pos cope: npos: expected a whole number from 2 to %d, "
              "got %g", COPE_MOST, n);
        return (int)n;
    }
    template <class Tensors> void declare(Tensors& t) {
        const size_t BNH = (size_t)t.B * t.NH, T = (size_t)t.stride;
        const size_t npos = (size_t)positions(*t.config), HS = (size_t)t.HS;
        t.param(e, "cope_e", "cope.e", Per::Layer, HS, npos, {constant(0.0f)});
        t.cached(total, "cope_total", Per::Layer, BNH, T);
        t.scratch(z, "cope_z", BNH * T, npos);
        t.scratch(dz, "cope_dz", BNH * T, npos);
        t.scratch(rest, "cope_rest", BNH, T);
        t.scratch(dgate, "cope_dgate", BNH, T);
        t.scratch(parts, "cope_de", BNH * HS, npos);
        if (t.decodes) { t.scratch(split_gates, "cope_split_gates", BNH, ceil_div(T, (size_t)DECODE_SPLIT)); }
    }
    int npos() const { return positions(*v.config); }
    void prepare_forward(floatX* qkv, int B, int T, int t0, Stream stream) const {
        const Grid grid((size_t)B * T, 64, sizeof(float) * npos(), stream);
        launch(cope_forward_kernel, grid, z, qkv, e.value, T, t0, v.stride, v.NH, v.HS, v.OC, npos());
    }
    void begin_backward(const floatX* qkv, int B, int T, Stream stream) const {
        const size_t rows = (size_t)B * v.NH * T;
        const Grid grid((size_t)B * T, 64, sizeof(float) * npos(), stream);        // z was another layer's meanwhile
        launch(cope_forward_kernel, grid, z, qkv, e.value, T, 0, v.stride, v.NH, v.HS, v.OC, npos());
        device_zero(dz, sizeof(float) * rows * npos(), stream);
        copy_on_device(rest, total, sizeof(double) * rows, stream);
        device_zero(dgate, sizeof(double) * rows, stream);
    }
    void prepare_backward(floatX* dqkv, const floatX* qkv, int B, int T, Stream stream) const {
        const int BNH = B * v.NH, n = npos();
        launch(cope_dq_kernel, Grid((size_t)B * T, 64, 0, stream), dqkv, dz, e.value, T, v.NH, v.HS, v.OC, n);
        const Grid grid((size_t)BNH * ceil_div(v.HS, COPE_ROWS), 64, sizeof(double) * COPE_ROWS * n, stream);
        launch(cope_de_kernel, grid, parts, qkv, dz, v.kv_len, T, v.NH, v.HS, v.OC, n);
        const int count = v.HS * n;
        launch(cope_reduce_kernel, Grid::over((size_t)count, stream), e.grad, parts, BNH, count);
    }
    void begin_decode(const floatX* qkv, int B, int t0, int splits, float scale, Stream stream) const {
        const Grid grid((size_t)B * v.NH * splits, 128, sizeof(float) * v.HS, stream);
        launch(cope_split_gates_kernel, grid, split_gates, qkv, t0, v.mask.within(v.stride), v.stride, v.NH, v.HS,
               v.OC, scale, B * v.NH);
    }
    CopeBias bias() const {
        return {{}, z, dz, total, rest, dgate, split_gates, npos(), v.stride};
    }
};
