// attention_forward.cu -- five ways to attention with CABLE's bias. ladder.h says how to build and run it.
//
//   logit_ij = scale q_i.k_j - g_i (S_i - S_j), j <= i     P_ij = softmax_j(logit_ij)     out_i = sum_j P_ij v_j
//   lse_i = log sum_j e^(logit_ij), for the backward                                  (llmc/attention.cuh)
//
// There are T x T numbers between the inputs and the output, and HS multiplications for each. A kernel is slow
// because it writes those numbers down, or because it loads its inputs again for each of them. The rungs do away with
// one after the other.
#include "attention.h"

// What a rung is given
struct Forward {
    floatX* out;                // (B,T,C)
    float* lse;                 // (B,NH,T)
    float* scores;              // (B,NH,T,T), scratch of rungs 1 and 2
    const floatX* qkv;          // (B,T,OC)
    Bias bias;
    AttentionDims dims;
    int B;

    __host__ __device__ size_t heads() const { return (size_t)B * dims.NH; }
};

// ----------------------------------------------------------------------------------------------------------
// rung 1: three passes over a matrix of T x T
//
// Scores, softmax, output, each a kernel with a thread per result (softmax: a block per row). It is the equation, and
// easy to trust. But every logit goes to memory and comes back, twice, 4 T^2 bytes per head each time; and a thread
// loads 2 HS numbers for HS multiplications, so that it mostly waits for memory.

// One thread per logit
__global__ void scores_by_threads_kernel(Forward p) {
    const int T = p.dims.T;
    const GridSpan span = grid_span(p.heads() * T * T);
    for (size_t e = span.begin; e < span.end; e += span.step) {
        const int j = (int)(e % T);
        const int i = (int)(e / T % T);
        const int bh = (int)(e / T / T);
        if (j > i) { continue; }                            // a later key: its logit is never read
        const floatX* q = p.qkv + token_at(p.dims, bh, i, 0);
        const floatX* k = p.qkv + token_at(p.dims, bh, j, 1);
        p.scores[e] = p.dims.scale * dot(q, k, p.dims.HS) + p.bias.tile(bh, i, j)(0, 0);
    }
}

// One block per row: scores become P, and 0 after the diagonal
__global__ void softmax_kernel(Forward p) {
    const int T = p.dims.T;
    const int i = (int)(blockIdx.x % T);
    float* row = p.scores + (size_t)blockIdx.x * T;
    // 1. the largest logit
    float largest = -INFINITY;
    for (int j = threadIdx.x; j <= i; j += blockDim.x) { largest = fmaxf(largest, row[j]); }
    largest = block_max(largest);
    // 2. the exponentials and their sum
    float sum = 0.0f;
    for (int j = threadIdx.x; j <= i; j += blockDim.x) {
        row[j] = fast_exp(row[j] - largest);                // at most 1: the largest logit never overflows
        sum += row[j];
    }
    sum = block_sum(sum);
    // 3. P, and lse for the backward
    for (int j = threadIdx.x; j < T; j += blockDim.x) { row[j] = j <= i ? row[j] / sum : 0.0f; }
    if (threadIdx.x == 0) { p.lse[blockIdx.x] = largest + logf(sum); }
}

// One thread per element of the output
__global__ void out_by_threads_kernel(Forward p) {
    const int T = p.dims.T;
    const int HS = p.dims.HS;
    const GridSpan span = grid_span(p.heads() * T * HS);
    for (size_t e = span.begin; e < span.end; e += span.step) {
        const int d = (int)(e % HS);
        const int i = (int)(e / HS % T);
        const int bh = (int)(e / HS / T);
        const float* P = p.scores + (e / HS) * T;
        float sum = 0.0f;
        for (int j = 0; j <= i; j++) { sum += P[j] * (float)p.qkv[token_at(p.dims, bh, j, 2) + d]; }
        p.out[output_at(p.dims, bh, i) + d] = (floatX)sum;
    }
}

void attention_forward1(const Forward& p, Stream stream) {
    const size_t rows = p.heads() * p.dims.T;
    launch(scores_by_threads_kernel, Grid::over(rows * p.dims.T, stream), p);
    launch(softmax_kernel, Grid(rows, 128, 0, stream), p);
    launch(out_by_threads_kernel, Grid::over(rows * p.dims.HS, stream), p);
}

// ----------------------------------------------------------------------------------------------------------
// rung 2: tiles in shared memory
//
// A block computes 32 x 32 scores. It loads 32 rows of q and 32 of k once, and every row serves 32 times: 32 times
// fewer loads from memory. The products with v likewise. The matrix of T x T is still written and read.

// scores (ROWS, LD) = the logits of the queries from i0 and the keys from j0; -inf where there is no such pair
__device__ inline void score_tile(float* scores, const float* Q_tile, const float* K_tile, const Forward& p, int bh,
                                  int i0, int j0) {
    const auto tile = p.bias.tile(bh, i0, j0);
    for (int e = threadIdx.x; e < ROWS * ROWS; e += blockDim.x) {
        const int r = e / ROWS;
        const int c = e % ROWS;                             // the lanes of a warp: one query, 32 keys
        const bool visible = j0 + c <= i0 + r && i0 + r < p.dims.T;
        const float score = dot(Q_tile + r * (p.dims.HS + 1), K_tile + c * (p.dims.HS + 1), p.dims.HS);
        scores[r * LD + c] = visible ? p.dims.scale * score + tile(r, c) : -INFINITY;
    }
}

// One block per tile of scores
__global__ void scores_by_tiles_kernel(Forward p, int tiles) {
    const int HS = p.dims.HS;
    const int T = p.dims.T;
    const int bh = (int)blockIdx.x / tiles / tiles;
    const int i0 = (int)blockIdx.x / tiles % tiles * ROWS;
    const int j0 = (int)blockIdx.x % tiles * ROWS;
    if (j0 > i0) { return; }                                // the whole tile is after the diagonal
    float* Q_tile = dynamic_shared();
    float* K_tile = Q_tile + ROWS * (HS + 1);
    float* scores = K_tile + ROWS * (HS + 1);
    // 1. 32 rows of q and of k
    load_rows(Q_tile, p.qkv + token_at(p.dims, bh, i0, 0), p.dims.OC, T - i0, HS);
    load_rows(K_tile, p.qkv + token_at(p.dims, bh, j0, 1), p.dims.OC, T - j0, HS);
    __syncthreads();
    // 2. 32 x 32 scores, still in shared memory
    score_tile(scores, Q_tile, K_tile, p, bh, i0, j0);
    __syncthreads();
    // 3. what is not after the diagonal goes to memory
    for (int e = threadIdx.x; e < ROWS * ROWS; e += blockDim.x) {
        const int i = i0 + e / ROWS;
        const int j = j0 + e % ROWS;
        if (i < T && j <= i) { p.scores[((size_t)bh * T + i) * T + j] = scores[e / ROWS * LD + e % ROWS]; }
    }
}

// One block per 32 queries, which walks their keys
__global__ void out_by_tiles_kernel(Forward p, int tiles) {
    const int HS = p.dims.HS;
    const int T = p.dims.T;
    const int bh = (int)blockIdx.x / tiles;
    const int i0 = (int)blockIdx.x % tiles * ROWS;
    float* V_tile = dynamic_shared();
    float* P = V_tile + ROWS * (HS + 1);
    float* O_tile = P + ROWS * LD;
    for (int e = threadIdx.x; e < ROWS * HS; e += blockDim.x) { O_tile[e] = 0.0f; }
    for (int j0 = 0; j0 <= i0; j0 += ROWS) {
        __syncthreads();
        load_rows(V_tile, p.qkv + token_at(p.dims, bh, j0, 2), p.dims.OC, T - j0, HS);
        for (int e = threadIdx.x; e < ROWS * ROWS; e += blockDim.x) {
            const int i = i0 + e / ROWS;
            const int j = j0 + e % ROWS;
            const bool inside = i < T && j < T;
            P[e / ROWS * LD + e % ROWS] = inside ? p.scores[((size_t)bh * T + i) * T + j] : 0.0f;
        }
        __syncthreads();
        add_products<false>(O_tile, P, V_tile, HS);         // O += P v
    }
    for (int e = threadIdx.x; e < ROWS * HS && i0 + e / HS < T; e += blockDim.x) {
        p.out[output_at(p.dims, bh, i0 + e / HS) + e % HS] = (floatX)O_tile[e];
    }
}

void attention_forward2(const Forward& p, Stream stream) {
    const int tiles = ceil_div(p.dims.T, ROWS);
    const size_t tile = sizeof(float) * ROWS * (p.dims.HS + 1), square = sizeof(float) * ROWS * LD;
    launch(scores_by_tiles_kernel, Grid(p.heads() * tiles * tiles, ROW_THREADS, 2 * tile + square, stream), p, tiles);
    launch(softmax_kernel, Grid(p.heads() * p.dims.T, 128, 0, stream), p);
    launch(out_by_tiles_kernel, Grid(p.heads() * tiles, ROW_THREADS, 2 * tile + square, stream), p, tiles);
}

// ----------------------------------------------------------------------------------------------------------
// rung 3: online softmax
//
// To divide by a sum of exponentials one needs all logits, but the division can wait. Over the keys seen so far, keep
//   largest = max logit      sum = sum e^(logit - largest)      O = sum e^(logit - largest) v
// and when a tile has a larger logit, multiply sum and O by e^(largest before - largest now) (Milakov and Gimelshein
// 2018). A tile of scores then lives in shared memory and dies there: no T x T matrix, and T is as long as you like.

// One block per 32 queries
__global__ void online_softmax_kernel(Forward p, int tiles) {
    const int HS = p.dims.HS;
    const int T = p.dims.T;
    const int bh = (int)blockIdx.x / tiles;
    const int i0 = (int)blockIdx.x % tiles * ROWS;
    float* Q_tile = dynamic_shared();
    float* K_tile = Q_tile + ROWS * (HS + 1);
    float* V_tile = K_tile + ROWS * (HS + 1);
    float* O_tile = V_tile + ROWS * (HS + 1);
    float* P = O_tile + ROWS * (HS + 1);
    float* largest = P + ROWS * LD;                         // one of each row
    float* sum = largest + ROWS;
    float* shrink = sum + ROWS;
    load_rows(Q_tile, p.qkv + token_at(p.dims, bh, i0, 0), p.dims.OC, T - i0, HS);
    for (int e = threadIdx.x; e < ROWS * HS; e += blockDim.x) { O_tile[e] = 0.0f; }
    for (int r = threadIdx.x; r < ROWS; r += blockDim.x) {
        largest[r] = -INFINITY;
        sum[r] = 0.0f;
    }
    for (int j0 = 0; j0 <= i0; j0 += ROWS) {
        __syncthreads();
        load_rows(K_tile, p.qkv + token_at(p.dims, bh, j0, 1), p.dims.OC, T - j0, HS);
        load_rows(V_tile, p.qkv + token_at(p.dims, bh, j0, 2), p.dims.OC, T - j0, HS);
        __syncthreads();
        // 1. logits
        score_tile(P, Q_tile, K_tile, p, bh, i0, j0);
        __syncthreads();
        // 2. a thread per row: the new largest logit, the exponentials, their sum
        for (int r = threadIdx.x; r < ROWS && i0 + r < T; r += blockDim.x) {
            const float before = largest[r];
            for (int c = 0; c < ROWS; c++) { largest[r] = fmaxf(largest[r], P[r * LD + c]); }
            shrink[r] = fast_exp(before - largest[r]);      // 0 at the first tile, where `before` is -inf
            sum[r] *= shrink[r];
            for (int c = 0; c < ROWS; c++) {
                P[r * LD + c] = fast_exp(P[r * LD + c] - largest[r]);
                sum[r] += P[r * LD + c];
            }
        }
        __syncthreads();
        // 3. O = shrink O + P v
        for (int e = threadIdx.x; e < ROWS * HS && i0 + e / HS < T; e += blockDim.x) { O_tile[e] *= shrink[e / HS]; }
        add_products<false>(O_tile, P, V_tile, HS);
    }
    // 4. the division that could wait
    for (int e = threadIdx.x; e < ROWS * HS && i0 + e / HS < T; e += blockDim.x) {
        p.out[output_at(p.dims, bh, i0 + e / HS) + e % HS] = (floatX)(O_tile[e] / sum[e / HS]);
    }
    for (int r = threadIdx.x; r < ROWS && i0 + r < T; r += blockDim.x) {
        p.lse[(size_t)bh * T + i0 + r] = largest[r] + logf(sum[r]);
    }
}

void attention_forward3(const Forward& p, Stream stream) {
    const int tiles = ceil_div(p.dims.T, ROWS);
    const size_t floats = 4 * ROWS * (p.dims.HS + 1) + ROWS * LD + 3 * ROWS;
    launch(online_softmax_kernel, Grid(p.heads() * tiles, ROW_THREADS, sizeof(float) * floats, stream), p, tiles);
}

// ----------------------------------------------------------------------------------------------------------
// rung 4, shipped for every bias and head size: fragments in registers
//
// In rung 3 a multiplication costs two loads from shared memory. block_matmul gives each thread 4 x 4 results (a CPU
// core: 4 x 2 SIMD registers), and eight loads serve sixteen multiplications.

void attention_forward4(const Forward& p, Stream stream) {
    portable_attention_forward<true>(p.out, p.lse, p.qkv, p.bias, p.dims, p.B, stream);
}

// ----------------------------------------------------------------------------------------------------------
// rung 5, shipped for the biases that FlashBias names: the tensor cores
//
// One instruction of a warp multiplies 16 x 16 by 16 x 8 in bf16 and adds in float32. The fragments are laid out so
// that the scores of one product are, in the same registers, the left operand of the next; tiles arrive by
// asynchronous copies while the tile before is in work; and O is only rescaled when `largest` grows by more than 2^8.
// P is rounded to bf16 for its product with v, which is nearly all of this rung's error.

#if defined(CUDA_BUILD)
void attention_forward5(const Forward& p, Stream stream) {
    FlashArgs args = flash_args(p.bias, p.dims, p.B, p.qkv);
    args.out = (bf16*)p.out;
    args.lse = p.lse;
    flash_forward<true, KIND>(args, stream);
}
#endif

// ----------------------------------------------------------------------------------------------------------

int main(int argc, char** argv) {
    return run_ladder([&] {
        Ladder ladder(argc, argv, {{"B", 2, 4}, {"T", 200, 1024}, {"NH", 2, 12}, {"HS", 64, 64}});
        // 1. inputs; what comes out; what float32 makes of it
        AttentionProblem problem((size_t)ladder.size(0), ladder.size(1), ladder.size(2), ladder.size(3));
        const AttentionDims& dims = problem.dims;
        AttentionOracle<double> want;
        AttentionOracle<float> plain;
        want.forward(problem.oracle_inputs<double>());
        plain.forward(problem.oracle_inputs<float>());
        DeviceArray<floatX> out(problem.n * dims.HS);
        DeviceArray<float> lse(problem.n), scores(problem.n * dims.T);
        const Forward p = {out, lse, scores, problem.qkv, problem.bias, dims, (int)problem.B};
        // 2. the rungs
        const auto run = [&](const char* idea, void (*rung)(const Forward&, Stream), const auto& unit,
                             const char* no_gain = "") {
            if (!ladder.begin(idea, no_gain)) { return; }
            poison(out);
            poison(lse);
            poison(scores);
            rung(p, device_stream());
            ladder.compare("out", by_heads(out.host(), dims, problem.B, problem.C, 0), want.out, unit.out);
            ladder.compare("lse", lse.host(), want.lse, unit.lse);
            // 2 HS multiplications and additions for each of two products, for half of the T x T pairs
            ladder.end([&] { rung(p, device_stream()); }, 2e-12 * (double)problem.n * dims.T * dims.HS, "TFLOP");
        };
        run("three passes over a matrix of T x T", attention_forward1, plain);
        run("tiles in shared memory", attention_forward2, plain, "the cache has the rows that rung 1 reads again");
        run("online softmax", attention_forward3, plain, "at this size the cache keeps a matrix of T x T");
        run("shipped: fragments in registers", attention_forward4, plain);
#if defined(CUDA_BUILD)
        if (flash_exists(KIND) && flash_head_size(dims.HS)) {
            AttentionOracle<float, bf16> tensor_cores;
            tensor_cores.forward(problem.oracle_inputs<float>());
            run("shipped: the tensor cores", attention_forward5, tensor_cores);
            return ladder.exit_code();
        }
#endif
        ladder.absent("shipped: the tensor cores", "needs a CUDA build in bf16, and HS 64 or 128");
        return ladder.exit_code();
    });
}
