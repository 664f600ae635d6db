// layernorm_backward.cu -- five ways to the gradients of a layernorm. ladder.h says how to build and run it.
//
//   n = (inp - mean) * rstd     dn = dout * weight                                       (llmc/layernorm.cuh)
//   dinp    += rstd * (dn - mean_C(dn) - n * mean_C(dn * n))      a sum over the columns of each row
//   dweight += sum_N(dout * n)     dbias += sum_N(dout)           sums over the rows of each column
//
// The two kinds of sums run across each other: the order that reads memory well for one is bad for the other. The layer
// computes almost nothing, so a kernel is as fast as its way of reading memory.
#include "ladder.h"

#include "test/layers/layernorm_oracle.h"

// What a rung is given. dinp, dout, inp (N,C), dweight, dbias, weight (C), mean, rstd (N); scratch: MAX_SLABS * 2 * C
// floats
struct Layernorm {
    floatX* dinp;
    float *dweight, *dbias, *scratch;
    const floatX *dout, *inp;
    const float *mean, *rstd;
    const floatX* weight;
    size_t N;
    int C;
};

// ----------------------------------------------------------------------------------------------------------
// rung 1: whoever owns a result computes it
//
// One thread per row for dinp and one per column for dweight and dbias. Every result has one writer, so there is
// nothing to synchronize, and no atomics whose order would change the bits from run to run. But the threads of a warp
// read addresses that are a row apart, 32 transactions for one load; and the second kernel has only C threads, for a
// machine that wants 100,000.

// One thread per row
__global__ void dinp_by_threads_kernel(Layernorm p) {
    const GridSpan rows = grid_span(p.N);
    for (size_t row = rows.begin; row < rows.end; row += rows.step) {
        const floatX* x = p.inp + row * p.C;
        const floatX* dy = p.dout + row * p.C;
        const float m = p.mean[row];
        const float s = p.rstd[row];
        float sum = 0.0f;                                   // of dn
        float sum_n = 0.0f;                                 // of dn * n
        for (int c = 0; c < p.C; c++) {
            const float dn = (float)dy[c] * (float)p.weight[c];
            sum += dn;
            sum_n += dn * ((float)x[c] - m) * s;
        }
        for (int c = 0; c < p.C; c++) {
            const float n = ((float)x[c] - m) * s;
            const float dn = (float)dy[c] * (float)p.weight[c];
            floatX& dx = p.dinp[row * p.C + c];
            dx = (floatX)((float)dx + s * (dn - sum / p.C - n * (sum_n / p.C)));
        }
    }
}

// One thread per column, which walks down all rows: neighbouring threads read neighbouring columns
__global__ void dweight_by_threads_kernel(Layernorm p) {
    const GridSpan columns = grid_span((size_t)p.C);
    for (size_t c = columns.begin; c < columns.end; c += columns.step) {
        float dw = 0.0f;
        float db = 0.0f;
        for (size_t row = 0; row < p.N; row++) {
            const float dy = (float)p.dout[row * p.C + c];
            dw += dy * ((float)p.inp[row * p.C + c] - p.mean[row]) * p.rstd[row];
            db += dy;
        }
        p.dweight[c] += dw;
        p.dbias[c] += db;
    }
}

void layernorm_backward1(const Layernorm& p, Stream stream) {
    launch(dinp_by_threads_kernel, Grid(ceil_div(p.N, (size_t)64), 64, 0, stream), p);
    launch(dweight_by_threads_kernel, Grid(ceil_div((size_t)p.C, (size_t)64), 64, 0, stream), p);
}

// ----------------------------------------------------------------------------------------------------------
// rung 2: neighbouring threads read neighbouring addresses
//
// A block is one warp and has one row: its 32 lanes read 32 neighbours, which is one transaction. The price is that
// each lane knows a part of the sum only; block_sum adds the parts by five shuffles, without shared memory. dweight
// is still rung 1's.

__global__ void dinp_by_warps_kernel(Layernorm p) {
    const size_t row = blockIdx.x;
    const floatX* x = p.inp + row * p.C;
    const floatX* dy = p.dout + row * p.C;
    const float m = p.mean[row];
    const float s = p.rstd[row];
    float sum = 0.0f;
    float sum_n = 0.0f;
    for (int c = threadIdx.x; c < p.C; c += blockDim.x) {   // lane, lane + 32, ...; on a CPU a block has one thread
        const float dn = (float)dy[c] * (float)p.weight[c];
        sum += dn;
        sum_n += dn * ((float)x[c] - m) * s;
    }
    const float mean_dn = block_sum(sum) / p.C;
    const float mean_dnn = block_sum(sum_n) / p.C;
    for (int c = threadIdx.x; c < p.C; c += blockDim.x) {
        const float n = ((float)x[c] - m) * s;
        const float dn = (float)dy[c] * (float)p.weight[c];
        floatX& dx = p.dinp[row * p.C + c];
        dx = (floatX)((float)dx + s * (dn - mean_dn - n * mean_dnn));
    }
}

void layernorm_backward2(const Layernorm& p, Stream stream) {
    launch(dinp_by_warps_kernel, Grid(p.N, 32, 0, stream), p);
    launch(dweight_by_threads_kernel, Grid(ceil_div((size_t)p.C, (size_t)64), 64, 0, stream), p);
}

// ----------------------------------------------------------------------------------------------------------
// rung 3: a long sum is cut into slabs, and the slabs are added in their order
//
// N rows become slab_count(N) slabs, each summed by a block of its own into a row of scratch (slabs,2C); then
// add_slabs adds those rows up. That is as parallel as atomicAdd, and the order of every sum is fixed: the same input
// gives the same bits.

// One block per slab
__global__ void dweight_by_slabs_kernel(Layernorm p) {
    const size_t length = ceil_div(p.N, (size_t)gridDim.x);         // rows of a slab
    const size_t begin = blockIdx.x * length;
    const size_t end = imin(begin + length, p.N);
    float* dw = p.scratch + (size_t)blockIdx.x * 2 * p.C;
    float* db = dw + p.C;
    for (int c = threadIdx.x; c < p.C; c += blockDim.x) {
        float sum_dw = 0.0f;
        float sum_db = 0.0f;
        for (size_t row = begin; row < end; row++) {
            const float dy = (float)p.dout[row * p.C + c];
            sum_dw += dy * ((float)p.inp[row * p.C + c] - p.mean[row]) * p.rstd[row];
            sum_db += dy;
        }
        dw[c] = sum_dw;
        db[c] = sum_db;
    }
}

void layernorm_backward3(const Layernorm& p, Stream stream) {
    const size_t slabs = slab_count(p.N), stride = 2 * (size_t)p.C;
    launch(dinp_by_warps_kernel, Grid(p.N, 32, 0, stream), p);
    launch(dweight_by_slabs_kernel, Grid(slabs, 256, 0, stream), p);
    add_slabs(p.dweight, p.scratch, slabs, stride, (size_t)p.C, stream);
    add_slabs(p.dbias, p.scratch + p.C, slabs, stride, (size_t)p.C, stream);
}

// ----------------------------------------------------------------------------------------------------------
// rung 4: read once
//
// Both kernels of rung 3 read all of dout and inp. When a block has a slab of whole rows, it meets every element that
// either sum needs: it takes dinp's sums along the row and keeps the slab's dweight and dbias in shared memory, where
// column c always belongs to the same thread. Half the traffic is gone. The second loop over a row finds it in the
// cache.

// One block, of one warp, per slab
__global__ void fused_kernel(Layernorm p) {
    const size_t length = ceil_div(p.N, (size_t)gridDim.x);
    const size_t begin = blockIdx.x * length;
    const size_t end = imin(begin + length, p.N);
    float* dw = dynamic_shared();                                   // (C)
    float* db = dw + p.C;
    for (int c = threadIdx.x; c < 2 * p.C; c += blockDim.x) { dw[c] = 0.0f; }
    __syncthreads();
    for (size_t row = begin; row < end; row++) {
        const floatX* x = p.inp + row * p.C;
        const floatX* dy = p.dout + row * p.C;
        const float m = p.mean[row];
        const float s = p.rstd[row];
        // 1. both sums along the row, and this row's part of the sums down the columns
        float sum = 0.0f;
        float sum_n = 0.0f;
        for (int c = threadIdx.x; c < p.C; c += blockDim.x) {
            const float n = ((float)x[c] - m) * s;
            const float dn = (float)dy[c] * (float)p.weight[c];
            sum += dn;
            sum_n += dn * n;
            dw[c] += (float)dy[c] * n;
            db[c] += (float)dy[c];
        }
        const float mean_dn = block_sum(sum) / p.C;
        const float mean_dnn = block_sum(sum_n) / p.C;
        // 2. dinp
        for (int c = threadIdx.x; c < p.C; c += blockDim.x) {
            const float n = ((float)x[c] - m) * s;
            const float dn = (float)dy[c] * (float)p.weight[c];
            floatX& dx = p.dinp[row * p.C + c];
            dx = (floatX)((float)dx + s * (dn - mean_dn - n * mean_dnn));
        }
    }
    // 3. the slab's row of scratch
    float* partial = p.scratch + (size_t)blockIdx.x * 2 * p.C;
    for (int c = threadIdx.x; c < p.C; c += blockDim.x) {
        partial[c] = dw[c];
        partial[p.C + c] = db[c];
    }
}

void layernorm_backward4(const Layernorm& p, Stream stream) {
    const size_t slabs = slab_count(p.N), stride = 2 * (size_t)p.C;
    launch(fused_kernel, Grid(slabs, 32, sizeof(float) * stride, stream), p);
    add_slabs(p.dweight, p.scratch, slabs, stride, (size_t)p.C, stream);
    add_slabs(p.dbias, p.scratch + p.C, slabs, stride, (size_t)p.C, stream);
}

// ----------------------------------------------------------------------------------------------------------
// rung 5, shipped: 16 bytes per instruction
//
// The same as rung 4, except that a thread loads a Pack of eight bf16 at a time: an eighth of the instructions for
// the same bytes. Then a pack's eight columns belong to one thread. A row of up to 1,024 channels stays in registers,
// and so do the sums of dweight and dbias; a longer row has its sums in shared memory, where the lanes of a warp meet
// in different banks. On a CPU a Pack has one element, and the compiler vectorizes the loop by itself.

void layernorm_backward5(const Layernorm& p, Stream stream) {
    layernorm_backward(p.dinp, p.dweight, p.dbias, p.scratch, p.dout, p.inp, p.mean, p.rstd, p.weight, p.N, p.C,
                       stream);
}

// ----------------------------------------------------------------------------------------------------------

// sums + before
template <class R, class T> std::vector<R> added(std::vector<R> sums, const std::vector<T>& before) {
    for (size_t e = 0; e < sums.size(); e++) { sums[e] += (R)(float)before[e]; }
    return sums;
}

int main(int argc, char** argv) {
    return run_ladder([&] {
        Ladder ladder(argc, argv, {{"N", 300, 8192}, {"C", 96, 768}});
        const size_t N = (size_t)ladder.size(0), C = (size_t)ladder.size(1);
        // 1. inputs, as the forward leaves them. The gradients do not start at 0, because kernels add to them
        const auto inp = inputs(N * C, 1, 2.0, 0.5);
        const auto dout = inputs(N * C, 2), dinp0 = inputs(N * C, 3);
        const auto weight = inputs(C, 4, 0.5, 1.0), bias = inputs(C, 5);
        const auto sums0 = normals(C, 6);
        DeviceArray<floatX> d_inp(inp), d_dout(dout), d_weight(weight), d_bias(bias), out(N * C), dinp(N * C);
        DeviceArray<float> mean(N), rstd(N), dweight(C), dbias(C), scratch(MAX_SLABS * 2 * C);
        layernorm_forward(out, mean, rstd, d_inp, d_weight, d_bias, N, (int)C, LAYERNORM_EPS, device_stream());
        // 2. what they should become, and what float32 makes of it
        const LayernormOracle<double> want(numbers<double>(inp), numbers<double>(weight), numbers<double>(bias),
                                           numbers<double>(dout), N, C);
        const LayernormOracle<float> plain(numbers<float>(inp), numbers<float>(weight), numbers<float>(bias),
                                           numbers<float>(dout), N, C);
        // 3. the rungs
        const struct { const char* idea; void (*run)(const Layernorm&, Stream); const char* no_gain; } rungs[] = {
            {"whoever owns a result computes it", layernorm_backward1, ""},
            {"neighbouring threads, neighbouring addresses", layernorm_backward2,
             "a block is one thread, which reads a row in order, as in rung 1"},
            {"slabs, added in their order", layernorm_backward3, ""},
            {"read once", layernorm_backward4, ""},
            {"shipped: 16 bytes per instruction", layernorm_backward5, ""},
        };
        const Layernorm p = {dinp, dweight, dbias, scratch, d_dout, d_inp, mean, rstd, d_weight, N, (int)C};
        for (const auto& rung : rungs) {
            if (!ladder.begin(rung.idea, rung.no_gain)) { continue; }
            dinp.set(dinp0);
            dweight.set(sums0);
            dbias.set(sums0);
            poison(scratch);
            rung.run(p, device_stream());
            ladder.compare("dinp", dinp.host(), added(want.dinp, dinp0), added(plain.dinp, dinp0));
            ladder.compare("dweight", dweight.host(), added(want.dweight, sums0), added(plain.dweight, sums0));
            ladder.compare("dbias", dbias.host(), added(want.dbias, sums0), added(plain.dbias, sums0));
            // the least traffic there can be: inp, dout and dinp are read, dinp is written
            ladder.end([&] { rung.run(p, device_stream()); }, 4e-9 * (double)(N * C * sizeof(floatX)), "GB");
        }
        return ladder.exit_code();
    });
}
