// attention_backward.cu -- five ways to the gradients of attention with CABLE's bias. ladder.h says how to build and
// run it.
//
//   dP_ij = dout_i.v_j     row_dot_i = out_i.dout_i     dlogit_ij = P_ij (dP_ij - row_dot_i)     (llmc/attention.cuh)
//   dq_i = scale sum_j dlogit_ij k_j     dk_j = scale sum_i dlogit_ij q_i     dv_j = sum_i P_ij dout_i
//   and since logit_ij = scale q_i.k_j - g_i (S_i - S_j):
//   dg_i = -sum_j dlogit_ij (S_i - S_j)     dS_t = sum_{i>=t} g_i dlogit_it - g_t sum_{j<=t} dlogit_tj
//
// Half of these sums run along the rows of dlogit (dq, dg), the other half along its columns (dk, dv), and dS along
// both. A block can own rows or columns. What it does not own it must add to with atomics, keep for someone else, or
// leave to a second kernel that computes dlogit again. The kernels here have no atomics: the same input gives the
// same bits.
#include "attention.h"

// ----------------------------------------------------------------------------------------------------------
// rung 1: P and dlogit are stored
//
// The forward has kept P, this pass writes dlogit next to it, and then every result is a sum with an owner: a thread
// per element of dq, dk and dv, a thread per token for dS and dg. row_dot is sum_j P_ij dP_ij, what the softmax's
// derivative needs of the whole row; as out_i.dout_i it costs HS multiplications in place of a pass over the row.

// One thread per query
__global__ void row_dot_kernel(Backward p) {
    const GridSpan span = grid_span(p.heads() * p.dims.T);
    for (size_t e = span.begin; e < span.end; e += span.step) {
        const int bh = (int)(e / p.dims.T);
        const int i = (int)(e % p.dims.T);
        p.row_dot[e] = dot(p.out + output_at(p.dims, bh, i), p.d_out(bh, i), p.dims.HS);
    }
}

// One thread per pair
__global__ void dlogit_kernel(Backward p) {
    const int T = p.dims.T;
    const GridSpan span = grid_span(p.heads() * T * T);
    for (size_t e = span.begin; e < span.end; e += span.step) {
        const int j = (int)(e % T);
        const int i = (int)(e / T % T);
        const int bh = (int)(e / T / T);
        if (j > i) { continue; }
        const float dP = dot(p.d_out(bh, i), p.v(bh, j), p.dims.HS);
        p.dlogit[e] = p.P[e] * (dP - p.row_dot[(size_t)bh * T + i]);
    }
}

// One thread per element of q: sums along row t of dlogit for dq, and down column t for dk and dv
__global__ void dqkv_kernel(Backward p) {
    const int T = p.dims.T;
    const int HS = p.dims.HS;
    const GridSpan span = grid_span(p.heads() * T * HS);
    for (size_t e = span.begin; e < span.end; e += span.step) {
        const int d = (int)(e % HS);
        const int t = (int)(e / HS % T);
        const int bh = (int)(e / HS / T);
        const float* dlogit = p.dlogit + (size_t)bh * T * T;
        const float* P = p.P + (size_t)bh * T * T;
        float dq = 0.0f;
        float dk = 0.0f;
        float dv = 0.0f;
        for (int j = 0; j <= t; j++) { dq += dlogit[(size_t)t * T + j] * (float)p.k(bh, j)[d]; }
        for (int i = t; i < T; i++) {
            dk += dlogit[(size_t)i * T + t] * (float)p.q(bh, i)[d];
            dv += P[(size_t)i * T + t] * (float)p.d_out(bh, i)[d];
        }
        p.dqkv[token_at(p.dims, bh, t, 0) + d] = (floatX)(p.dims.scale * dq);
        p.dqkv[token_at(p.dims, bh, t, 1) + d] = (floatX)(p.dims.scale * dk);
        p.dqkv[token_at(p.dims, bh, t, 2) + d] = (floatX)dv;
    }
}

// One thread per token
__global__ void bias_kernel(Backward p) {
    const int T = p.dims.T;
    const GridSpan span = grid_span(p.heads() * T);
    for (size_t e = span.begin; e < span.end; e += span.step) {
        const int t = (int)(e % T);
        const int bh = (int)(e / T);
        const float* g = p.bias.g + (size_t)bh * T;
        const float* dlogit = p.dlogit + (size_t)bh * T * T;
        float row = 0.0f;
        float column = 0.0f;
        float moment = 0.0f;
        for (int j = 0; j <= t; j++) {
            row += dlogit[(size_t)t * T + j];
            moment += dlogit[(size_t)t * T + j] * p.distance(bh, t, j);
        }
        for (int i = t; i < T; i++) { column += g[i] * dlogit[(size_t)i * T + t]; }
        p.dg[e] = -moment;
        p.dS[e] = column - g[t] * row;
    }
}

void attention_backward1(const Backward& p, Stream stream) {
    const size_t rows = p.heads() * p.dims.T;
    launch(row_dot_kernel, Grid::over(rows, stream), p);
    launch(dlogit_kernel, Grid::over(rows * p.dims.T, stream), p);
    launch(dqkv_kernel, Grid::over(rows * p.dims.HS, stream), p);
    launch(bias_kernel, Grid::over(rows, stream), p);
}

// ----------------------------------------------------------------------------------------------------------
// rung 2: P is recomputed from lse
//
// P_ij = e^(logit_ij - lse_i): one number per row is all that the forward has to keep, in place of T. With that, no
// matrix of T x T is left: a block has one query and takes its row of dlogit 64 keys at a time, another
// kernel has one key and its column. Each dlogit is computed twice, once per kernel: seven products of T x T x HS in
// place of five. (In exact arithmetic the row's part of dS is 0. It stays: the rounding of `out` moves every dlogit
// of a row the same way, dS is summed over all later tokens next, and only the two parts together cancel what they
// share: docs/attention.md, "The row part of dS must stay".)

constexpr int PAIRS = 64;                                   // pairs of a block at a time, and its threads

struct Pair { float P, dlogit; };
// P and dlogit of one pair, from the inputs
__device__ inline Pair pair_of(const Backward& p, int bh, int i, int j) {
    const size_t row = (size_t)bh * p.dims.T + i;
    const float score = p.dims.scale * dot(p.q(bh, i), p.k(bh, j), p.dims.HS);
    const float P = fast_exp(score + p.bias.tile(bh, i, j)(0, 0) - p.lse[row]);
    const float dP = dot(p.d_out(bh, i), p.v(bh, j), p.dims.HS);
    return {P, P * (dP - p.row_dot[row])};
}

// One block per key: dk, dv, and the column's part of dS
__global__ void key_kernel(Backward p) {
    const int T = p.dims.T;
    const int HS = p.dims.HS;
    const int bh = (int)blockIdx.x / T;
    const int j = (int)blockIdx.x % T;
    float* P = dynamic_shared();
    float* dlogit = P + PAIRS;
    float* dk = dlogit + PAIRS;                             // (HS), element d is always the same thread's
    float* dv = dk + HS;
    float column = 0.0f;                                    // this thread's share of sum_i g_i dlogit_ij
    for (int d = threadIdx.x; d < HS; d += blockDim.x) {
        dk[d] = 0.0f;
        dv[d] = 0.0f;
    }
    for (int i0 = j; i0 < T; i0 += PAIRS) {
        const int n = imin(PAIRS, T - i0);
        __syncthreads();                                    // the last P and dlogit are read
        // 1. a thread per pair
        for (int r = threadIdx.x; r < n; r += blockDim.x) {
            const Pair x = pair_of(p, bh, i0 + r, j);
            P[r] = x.P;
            dlogit[r] = x.dlogit;
            column += p.bias.g[(size_t)bh * T + i0 + r] * x.dlogit;
        }
        __syncthreads();
        // 2. a thread per element of dk and dv
        for (int d = threadIdx.x; d < HS; d += blockDim.x) {
            for (int r = 0; r < n; r++) {
                dk[d] += dlogit[r] * (float)p.q(bh, i0 + r)[d];
                dv[d] += P[r] * (float)p.d_out(bh, i0 + r)[d];
            }
        }
    }
    for (int d = threadIdx.x; d < HS; d += blockDim.x) {
        p.dqkv[token_at(p.dims, bh, j, 1) + d] = (floatX)(p.dims.scale * dk[d]);
        p.dqkv[token_at(p.dims, bh, j, 2) + d] = (floatX)dv[d];
    }
    column = block_sum(column);
    if (threadIdx.x == 0) { p.dS[blockIdx.x] = column; }
}

// One block per query: dq, dg, and the row's part of dS
__global__ void query_kernel(Backward p) {
    const int T = p.dims.T;
    const int HS = p.dims.HS;
    const int bh = (int)blockIdx.x / T;
    const int i = (int)blockIdx.x % T;
    float* dlogit = dynamic_shared();
    float* dq = dlogit + PAIRS;
    float row = 0.0f;
    float moment = 0.0f;
    for (int d = threadIdx.x; d < HS; d += blockDim.x) { dq[d] = 0.0f; }
    for (int j0 = 0; j0 <= i; j0 += PAIRS) {
        const int n = imin(PAIRS, i + 1 - j0);
        __syncthreads();
        // 1. a thread per pair
        for (int c = threadIdx.x; c < n; c += blockDim.x) {
            dlogit[c] = pair_of(p, bh, i, j0 + c).dlogit;
            row += dlogit[c];
            moment += dlogit[c] * p.distance(bh, i, j0 + c);
        }
        __syncthreads();
        // 2. a thread per element of dq
        for (int d = threadIdx.x; d < HS; d += blockDim.x) {
            for (int c = 0; c < n; c++) { dq[d] += dlogit[c] * (float)p.k(bh, j0 + c)[d]; }
        }
    }
    for (int d = threadIdx.x; d < HS; d += blockDim.x) {
        p.dqkv[token_at(p.dims, bh, i, 0) + d] = (floatX)(p.dims.scale * dq[d]);
    }
    row = block_sum(row);
    moment = block_sum(moment);
    if (threadIdx.x == 0) {
        p.dg[blockIdx.x] = -moment;
        p.dS[blockIdx.x] -= p.bias.g[blockIdx.x] * row;     // key_kernel was here before
    }
}

void attention_backward2(const Backward& p, Stream stream) {
    const size_t rows = p.heads() * p.dims.T, shared = sizeof(float) * (2 * PAIRS + 2 * p.dims.HS);
    launch(row_dot_kernel, Grid::over(rows, stream), p);
    launch(key_kernel, Grid(rows, PAIRS, shared, stream), p);
    launch(query_kernel, Grid(rows, PAIRS, shared, stream), p);
}

// ----------------------------------------------------------------------------------------------------------
// rung 3: a block owns a tile
//
// The same two kernels, but with 32 keys, or 32 queries, per block. What streams past, rows of q and dout or of k and
// v, is loaded into shared memory once and meets 32 owners: 32 times fewer loads.

// One block per 32 keys
__global__ void key_tile_kernel(Backward p, int count) {
    const int T = p.dims.T;
    const int HS = p.dims.HS;
    const int bh = (int)blockIdx.x / count;
    const int j0 = (int)blockIdx.x % count * ROWS;
    float* dK;
    const Tiles tiles = shared_tiles(HS, dK);
    float* dV = dK + ROWS * HS;
    float* column = dV + ROWS * HS;
    for (int e = threadIdx.x; e < 2 * ROWS * HS + ROWS; e += blockDim.x) { dK[e] = 0.0f; }     // and dV, column
    load_keys(tiles, p, bh, j0);
    for (int i0 = j0; i0 < T; i0 += ROWS) {
        __syncthreads();
        load_queries(tiles, p, bh, i0);
        __syncthreads();
        // 1. P and dlogit of 32 x 32 pairs
        pair_tile(tiles, p, bh, i0, j0);
        __syncthreads();
        // 2. dV += P^T dO,  dK += dlogit^T Q
        add_products<true>(dV, tiles.P, tiles.dO, HS);
        add_products<true>(dK, tiles.dlogit, tiles.Q, HS);
        // 3. column += g dlogit, a thread per key
        for (int c = threadIdx.x; c < ROWS; c += blockDim.x) {
            for (int r = 0; r < ROWS && i0 + r < T; r++) {
                column[c] += p.bias.g[(size_t)bh * T + i0 + r] * tiles.dlogit[r * LD + c];
            }
        }
    }
    __syncthreads();
    store_rows(p, dK, bh, j0, 1, p.dims.scale);
    store_rows(p, dV, bh, j0, 2, 1.0f);
    for (int c = threadIdx.x; c < ROWS && j0 + c < T; c += blockDim.x) { p.dS[(size_t)bh * T + j0 + c] = column[c]; }
}

// One block per 32 queries
__global__ void query_tile_kernel(Backward p, int count) {
    const int T = p.dims.T;
    const int HS = p.dims.HS;
    const int bh = (int)blockIdx.x / count;
    const int i0 = (int)blockIdx.x % count * ROWS;
    float* dQ;
    const Tiles tiles = shared_tiles(HS, dQ);
    float* row = dQ + ROWS * HS;
    float* moment = row + ROWS;
    for (int e = threadIdx.x; e < ROWS * HS + 2 * ROWS; e += blockDim.x) { dQ[e] = 0.0f; }      // and row, moment
    load_queries(tiles, p, bh, i0);
    for (int j0 = 0; j0 <= i0; j0 += ROWS) {
        __syncthreads();
        load_keys(tiles, p, bh, j0);
        __syncthreads();
        // 1. P and dlogit once more
        pair_tile(tiles, p, bh, i0, j0);
        __syncthreads();
        // 2. dQ += dlogit K
        add_products<false>(dQ, tiles.dlogit, tiles.K, HS);
        // 3. the row's sum and moment, a thread per query
        const auto bias = p.bias.tile(bh, i0, j0);
        for (int r = threadIdx.x; r < ROWS && i0 + r < T; r += blockDim.x) {
            for (int c = 0; c < ROWS && j0 + c <= i0 + r; c++) {
                row[r] += tiles.dlogit[r * LD + c];
                moment[r] += tiles.dlogit[r * LD + c] * fabsf(bias.difference(r, c));
            }
        }
    }
    __syncthreads();
    store_rows(p, dQ, bh, i0, 0, p.dims.scale);
    for (int r = threadIdx.x; r < ROWS && i0 + r < T; r += blockDim.x) {
        const size_t at = (size_t)bh * T + i0 + r;
        p.dg[at] = -moment[r];
        p.dS[at] -= p.bias.g[at] * row[r];
    }
}

void attention_backward3(const Backward& p, Stream stream) {
    const int HS = p.dims.HS, count = ceil_div(p.dims.T, ROWS);
    const size_t floats = 4 * ROWS * (HS + 1) + 2 * ROWS * LD + 2 * ROWS * HS + 2 * ROWS;
    const Grid grid(p.heads() * count, ROW_THREADS, sizeof(float) * floats, stream);
    launch(row_dot_kernel, Grid::over(p.heads() * p.dims.T, stream), p);
    launch(key_tile_kernel, grid, p, count);
    launch(query_tile_kernel, grid, p, count);
}

// ----------------------------------------------------------------------------------------------------------
// rung 4, shipped for every bias and head size: five products
//
// One block has a whole head: it walks the tiles of keys, for each the tiles of queries, and adds to dq in memory,
// which no other block touches. Each dlogit is computed once, and block_matmul keeps fragments in registers. Five
// products in place of seven, but only B * NH blocks: right for a CPU's cores, too few for a GPU, whose kernel is
// rung 5.

void attention_backward4(const Backward& p, Stream stream) {
    device_zero(p.dS, sizeof(float) * p.heads() * p.dims.T, stream);       // the functor adds
    device_zero(p.dg, sizeof(float) * p.heads() * p.dims.T, stream);
    portable_attention_backward<true>(p.dqkv, p.scratch, p.dout, p.qkv, p.out, p.lse, p.bias, p.dims, p.B, stream);
}

// ----------------------------------------------------------------------------------------------------------
// rung 5, shipped for the biases that FlashBias names: the tensor cores
//
// The two kernels of rung 3, with tiles of 64, products by the tensor cores, and copies that arrive during the work on
// earlier tiles. Seven products need no atomics and no order between blocks; five would. Both parts
// of dS sum the same float32 dlogit, though its products use it in bf16.

#if defined(CUDA_BUILD)
void attention_backward5(const Backward& p, Stream stream) {
    FlashArgs args = flash_args(p.bias, p.dims, p.B, p.qkv);
    args.out = (bf16*)p.out;
    args.lse = (float*)p.lse;
    args.dout = (const bf16*)p.dout;
    args.dqkv = (bf16*)p.dqkv;
    flash_backward<true, KIND>(args, p.scratch, stream);
}
#endif

// ----------------------------------------------------------------------------------------------------------

int main(int argc, char** argv) {
    return run_ladder([&] {
        Ladder ladder(argc, argv, {{"B", 2, 4}, {"T", 200, 1024}, {"NH", 2, 12}, {"HS", 64, 64}});
        // 1. inputs; what a forward leaves
        AttentionProblem problem((size_t)ladder.size(0), ladder.size(1), ladder.size(2), ladder.size(3));
        const AttentionDims& dims = problem.dims;
        const size_t n = problem.n, B = problem.B;
        const size_t C = problem.C, OC = problem.OC;
        const int T = dims.T, HS = dims.HS;
        const Stream stream = device_stream();
        DeviceArray<floatX> out(n * HS), dqkv(problem.qkv.n);
        DeviceArray<float> lse(n), P(n * T), dlogit(n * T), row_dot(n);
        size_t floats = portable_attention_backward_scratch((int)B, T, dims.NH, HS);
#if defined(CUDA_BUILD)
        floats = std::max(floats, flash_backward_scratch(KIND, (int)B, T, dims.NH));
#endif
        DeviceArray<float> scratch(floats);
        portable_attention_forward<true>(out, lse, problem.qkv, problem.bias, dims, (int)B, stream);
        const Backward p = {dqkv, problem.dS, problem.dg, problem.dout, problem.qkv, out, lse, P, dlogit, row_dot,
                            scratch, problem.bias, dims, (int)B};
        launch(probabilities_kernel, Grid::over(n * T, stream), (float*)P, p);
        // 2. what comes out, and what float32 makes of it; out and lse are inputs here, with the roundings they have
        const std::vector<floatX> stored_out = by_heads(out.host(), dims, B, C, 0);
        AttentionOracle<double> want;
        AttentionOracle<float> plain;
        want.backward(problem.oracle_inputs<double>(), numbers<double>(stored_out), numbers<double>(lse.host()));
        plain.backward(problem.oracle_inputs<float>(), numbers<float>(stored_out), lse.host());
        // 3. the rungs
        const auto run = [&](const char* idea, void (*rung)(const Backward&, Stream), const auto& unit,
                             const char* no_gain = "") {
            if (!ladder.begin(idea, no_gain)) { return; }
            for (DeviceArray<float>* a : {&problem.dS, &problem.dg, &dlogit, &row_dot, &scratch}) { poison(*a); }
            poison(dqkv);
            rung(p, stream);
            const std::vector<floatX> rows = dqkv.host();
            ladder.compare("dq", by_heads(rows, dims, B, OC, 0), want.dq, unit.dq);
            ladder.compare("dk", by_heads(rows, dims, B, OC, C), want.dk, unit.dk);
            ladder.compare("dv", by_heads(rows, dims, B, OC, 2 * C), want.dv, unit.dv);
            ladder.compare("dS", problem.dS.host(), want.dS, unit.dS);
            ladder.compare("dg", problem.dg.host(), want.dg, unit.dg);
            // five products, however many a rung computes
            ladder.end([&] { rung(p, stream); }, 5e-12 * (double)n * T * HS, "TFLOP");
        };
        run("P and dlogit are stored", attention_backward1, plain);
        run("P is recomputed from lse", attention_backward2, plain,
            "at this size the cache keeps a matrix of T x T, and two products more cost time");
        run("a block owns a tile", attention_backward3, plain);
        run("shipped: five products", attention_backward4, plain);
#if defined(CUDA_BUILD)
        if (flash_exists(KIND) && flash_head_size(HS)) {
            AttentionOracle<float, bf16> tensor_cores;
            tensor_cores.backward(problem.oracle_inputs<float>(), numbers<float>(stored_out), lse.host());
            run("shipped: the tensor cores", attention_backward5, tensor_cores);
            return ladder.exit_code();
        }
#endif
        ladder.absent("shipped: the tensor cores", "needs a CUDA build in bf16, and HS 64 or 128");
        return ladder.exit_code();
    });
}
