// cable_scan.cu -- four ways to compute CABLE's cumulative sum over time and its gradient. ladder.h says how to build
// and run it.
//
//   b_t = ReLU(z_t)     S_t = sum_{u<=t} b_u                                       (llmc/cable.cuh)
//   backward, given dS: db_t = sum_{u>=t} dS_u     dz_t = db_t [z_t > 0]
//
// A sum over time looks serial, for every S_t needs the one before it. It is not: addition is associative, so pieces
// can be summed on their own and joined later. In float32 that is only nearly true, and every addition rounds. The
// attention biases are differences S_i - S_j of large sums, so the way of summing also decides how exact they are.
#include "ladder.h"

#include "llmc/cable.cuh"

// What a rung is given. z of head h is column 3C + h of qkv, and dz the same column of dqkv: neighbours in time lie a
// row of OC elements apart. A rung leaves S as S_origin[t / 128] + S_offset[t].
struct Scan {
    float* S_offset;            // (B,NH,T)
    double* S_origin;           // (B,NH,chunks)
    floatX* dqkv;               // (B,T,OC)
    float *dS, *db;             // (B,NH,T): db is scratch
    double* carry;              // (B,NH,chunks), scratch
    float *g, *dg;              // (B,NH,T): CABLE's weights, which only the shipped kernel knows
    const floatX* qkv;          // (B,T,OC)
    int B, T, NH, C, OC;

    __host__ __device__ size_t heads() const { return (size_t)B * NH; }
    __host__ __device__ int chunks() const { return ceil_div(T, CABLE_CHUNK); }
    // where z of (batch, head) bh begins in qkv and dz in dqkv
    __host__ __device__ size_t column(size_t bh) const { return bh / NH * T * OC + 3 * C + bh % NH; }
};

__device__ inline float relu(float x) { return x > 0.0f ? x : 0.0f; }

// ----------------------------------------------------------------------------------------------------------
// rung 1: serial, the equation as it stands
//
// One thread per (batch, head) walks through time, adding. B * NH threads is all the parallelism there is, each waiting
// for one load after the other; and a long float32 sum loses what the bits of its growing size cannot hold.

__global__ void forward_serial_kernel(Scan p) {
    const GridSpan heads = grid_span(p.heads());
    for (size_t bh = heads.begin; bh < heads.end; bh += heads.step) {
        const floatX* z = p.qkv + p.column(bh);
        float S = 0.0f;
        for (int t = 0; t < p.T; t++) {
            S += relu((float)z[(size_t)t * p.OC]);
            p.S_offset[bh * p.T + t] = S;
        }
        for (int c = 0; c < p.chunks(); c++) { p.S_origin[bh * p.chunks() + c] = 0.0; }
    }
}

__global__ void backward_serial_kernel(Scan p) {
    const GridSpan heads = grid_span(p.heads());
    for (size_t bh = heads.begin; bh < heads.end; bh += heads.step) {
        const floatX* z = p.qkv + p.column(bh);
        floatX* dz = p.dqkv + p.column(bh);
        float db = 0.0f;
        for (int t = p.T - 1; t >= 0; t--) {                // b_t is in every later S: the sum runs backwards
            db += p.dS[bh * p.T + t];
            dz[(size_t)t * p.OC] = (floatX)((float)z[(size_t)t * p.OC] > 0.0f ? db : 0.0f);
        }
    }
}

void cable_scan1(const Scan& p, Stream stream) {
    const Grid grid(ceil_div(p.heads(), (size_t)32), 32, 0, stream);
    launch(forward_serial_kernel, grid, p);
    launch(backward_serial_kernel, grid, p);
}

// ----------------------------------------------------------------------------------------------------------
// rung 2: a block scans one token per thread
//
// block_scan gives thread t the sum of the values of threads 0 .. t in log2(32) steps: in step o, lane l adds what lane
// l - o holds (Hillis and Steele 1986). More additions than rung 1 in all, but 5 steps for 32 tokens in place of 32,
// and the loads of all threads are on their way together.

__global__ void forward_block_kernel(Scan p) {
    const size_t bh = blockIdx.x;
    const floatX* z = p.qkv + p.column(bh);
    float before = 0.0f;                                    // S of the last token of the pass before
    for (int base = 0; base < p.T; base += blockDim.x) {
        const int t = base + (int)threadIdx.x;
        const float b = t < p.T ? relu((float)z[(size_t)t * p.OC]) : 0.0f;
        const float S = before + block_scan(b);             // all threads take part, those after the end with 0
        if (t < p.T) { p.S_offset[bh * p.T + t] = S; }
        before += block_sum(b);
    }
    for (int c = threadIdx.x; c < p.chunks(); c += blockDim.x) { p.S_origin[bh * p.chunks() + c] = 0.0; }
}

__global__ void backward_block_kernel(Scan p) {
    const size_t bh = blockIdx.x;
    const floatX* z = p.qkv + p.column(bh);
    floatX* dz = p.dqkv + p.column(bh);
    float after = 0.0f;
    for (int base = 0; base < p.T; base += blockDim.x) {
        const int t = p.T - 1 - base - (int)threadIdx.x;    // from the last token to the first
        const float dS = t >= 0 ? p.dS[bh * p.T + t] : 0.0f;
        const float db = after + block_scan(dS);
        if (t >= 0) { dz[(size_t)t * p.OC] = (floatX)((float)z[(size_t)t * p.OC] > 0.0f ? db : 0.0f); }
        after += block_sum(dS);
    }
}

void cable_scan2(const Scan& p, Stream stream) {
    const Grid grid(p.heads(), 128, 0, stream);
    launch(forward_block_kernel, grid, p);
    launch(backward_block_kernel, grid, p);
}

// ----------------------------------------------------------------------------------------------------------
// rung 3: chunks, with float64 origins
//
// A block scans one chunk of 128 tokens and knows nothing of the rest; then one thread per head adds up the totals of
// the chunks, the origins. So time is parallel too, and the serial part is 128 times shorter: short enough for float64.
// S_i - S_j = float(origin_i - origin_j) + offset_i - offset_j is as good at token 100,000 as it was at token 100, for
// the offsets never grow beyond a chunk's, and the large numbers cancel before anything is rounded to float32. (On a
// CPU `cable_scan 0 1 70000 1` shows it: S is off by 0.15 in rungs 1 and 2, by 0.0001 here, and by 3e-6 in rung 4.)

// One block per chunk of a (batch, head)
__global__ void forward_chunk_kernel(Scan p) {
    const size_t bh = blockIdx.x / p.chunks();
    const int chunk = (int)(blockIdx.x % p.chunks());
    const int end = imin((chunk + 1) * CABLE_CHUNK, p.T);
    const floatX* z = p.qkv + p.column(bh);
    float before = 0.0f;                                    // a GPU's block has a thread per token, and one pass
    for (int base = chunk * CABLE_CHUNK; base < end; base += blockDim.x) {
        const int t = base + (int)threadIdx.x;
        const float b = t < end ? relu((float)z[(size_t)t * p.OC]) : 0.0f;
        const float S = before + block_scan(b);
        if (t < end) { p.S_offset[bh * p.T + t] = S; }
        if (t == end - 1) { p.S_origin[blockIdx.x] = (double)S; }       // the chunk's total, for the next kernel
        before += block_sum(b);
    }
}

// totals (B,NH,chunks) become sums of the totals of all earlier chunks (Step 1), or of all later ones (Step -1)
template <int Step> __global__ void origins_kernel(double* totals, size_t heads, int chunks) {
    const GridSpan span = grid_span(heads);
    for (size_t bh = span.begin; bh < span.end; bh += span.step) {
        double sum = 0.0;
        for (int k = 0; k < chunks; k++) {
            double& at = totals[bh * chunks + (Step > 0 ? k : chunks - 1 - k)];
            const double total = at;
            at = sum;
            sum += total;
        }
    }
}

__global__ void backward_chunk_kernel(Scan p) {
    const size_t bh = blockIdx.x / p.chunks();
    const int begin = (int)(blockIdx.x % p.chunks()) * CABLE_CHUNK;
    const int end = imin(begin + CABLE_CHUNK, p.T);
    float after = 0.0f;
    for (int base = 0; base < end - begin; base += blockDim.x) {
        const int t = end - 1 - base - (int)threadIdx.x;
        const float dS = t >= begin ? p.dS[bh * p.T + t] : 0.0f;
        const float db = after + block_scan(dS);
        if (t >= begin) { p.db[bh * p.T + t] = db; }        // of only this chunk's tokens
        if (t == begin) { p.carry[blockIdx.x] = (double)db; }
        after += block_sum(dS);
    }
}

// One thread per token: what the later chunks add to db, and dz
__global__ void join_kernel(Scan p) {
    const GridSpan span = grid_span(p.heads() * p.T);
    for (size_t e = span.begin; e < span.end; e += span.step) {
        const size_t bh = e / p.T;
        const size_t t = e % p.T;
        const size_t at = p.column(bh) + t * p.OC;
        const float db = (float)(p.carry[bh * p.chunks() + t / CABLE_CHUNK] + (double)p.db[e]);
        p.dqkv[at] = (floatX)((float)p.qkv[at] > 0.0f ? db : 0.0f);
    }
}

void cable_scan3(const Scan& p, Stream stream) {
    const Grid chunks(p.heads() * p.chunks(), CABLE_CHUNK, 0, stream);
    const Grid heads(ceil_div(p.heads(), (size_t)32), 32, 0, stream);
    launch(forward_chunk_kernel, chunks, p);
    launch(origins_kernel<1>, heads, p.S_origin, p.heads(), p.chunks());
    launch(backward_chunk_kernel, chunks, p);
    launch(origins_kernel<-1>, heads, p.carry, p.heads(), p.chunks());
    launch(join_kernel, Grid::over(p.heads() * p.T, stream), p);
}

// ----------------------------------------------------------------------------------------------------------
// rung 4, shipped: a forward that can be resumed, a backward in one launch
//
// The chunks and origins of rung 3, but the forward can continue at any token t0: it sums the chunk of the token before
// once more, so a prefill, then token after token, gives the S of one long call. The backward has one block per (batch,
// head) that takes its chunks in turn: the long texts of evaluation, with few heads, have no backward. Both scan in
// float64: an error of a chunk's total would enter all later origins, and dS, whose sum is 0, cancels.

void cable_scan4(const Scan& p, Stream stream) {
    const Grid grid(p.heads(), CABLE_CHUNK, 0, stream);
    const QkvShape shape = {p.T, p.NH, p.C / p.NH, p.OC};
    cable_forward(p.S_offset, p.S_origin, p.g, p.qkv, shape, p.B, p.T, 0, CableStep::Relu, false, stream);
    launch(cable_backward_kernel, grid, p.dqkv, p.dS, p.dg, p.qkv, shape, CableStep::Relu, false);
}

// ----------------------------------------------------------------------------------------------------------

// S and dz from z and dS (heads,T). Every `chunk` tokens the running sum is added to a double and begins again at 0. It
// is rounded to R after each token; wide: it is double, and only S - origin and dz are rounded to R.
template <class R> struct Oracle {
    std::vector<double> S;
    std::vector<R> dz;

    Oracle(const std::vector<R>& z, const std::vector<R>& dS, size_t heads, size_t T, size_t chunk,
           bool wide = false)
        : S(heads * T), dz(heads * T) {
        for (size_t bh = 0; bh < heads; bh++) {
            const auto sum = [&](double a, R b) { return wide ? a + (double)b : (double)(R)(a + (double)b); };
            double origin = 0.0, offset = 0.0;
            double later = 0.0, db = 0.0;
            for (size_t k = 0; k < T; k++) {
                const size_t t = bh * T + k;
                if (k % chunk == 0) { origin += offset, offset = 0; }
                offset = sum(offset, z[t] > 0 ? z[t] : 0);
                S[t] = origin + (double)(R)offset;
            }
            for (size_t k = T; k-- > 0;) {
                const size_t t = bh * T + k;
                if (k % chunk == chunk - 1) { later += db, db = 0; }
                db = sum(db, dS[t]);
                dz[t] = z[t] > 0 ? (R)(later + db) : 0;
            }
        }
    }
};

// x (heads,T) <-> column 3C + h of rows (B,T,OC)
std::vector<floatX> columns_of(const Scan& p, const std::vector<floatX>& x) {
    std::vector<floatX> rows((size_t)p.B * p.T * p.OC);
    for (size_t e = 0; e < x.size(); e++) { rows[p.column(e / p.T) + e % p.T * p.OC] = x[e]; }
    return rows;
}
std::vector<floatX> from_columns(const Scan& p, const std::vector<floatX>& rows) {
    std::vector<floatX> x(p.heads() * p.T);
    for (size_t e = 0; e < x.size(); e++) { x[e] = rows[p.column(e / p.T) + e % p.T * p.OC]; }
    return x;
}

int main(int argc, char** argv) {
    return run_ladder([&] {
        Ladder ladder(argc, argv, {{"B", 2, 8}, {"T", 1000, 8192}, {"NH", 3, 12}});
        Scan p = {};
        p.B = ladder.size(0), p.T = ladder.size(1), p.NH = ladder.size(2);
        p.C = 64 * p.NH;                                    // the q, k and v columns, which are not read here
        p.OC = round_up(3 * p.C + p.NH, 8);
        const size_t n = p.heads() * p.T, chunks = p.heads() * p.chunks();
        // 1. inputs
        const auto z = inputs(n, 1);
        const auto dS0 = normals(n, 2);
        DeviceArray<floatX> qkv(columns_of(p, z)), dqkv(qkv.n);
        DeviceArray<float> S_offset(n), dS(n), db(n), g(n), dg(n);
        DeviceArray<double> S_origin(chunks), carry(chunks);
        p.S_offset = S_offset, p.S_origin = S_origin, p.dqkv = dqkv, p.dS = dS, p.db = db, p.carry = carry;
        p.g = g, p.dg = dg, p.qkv = qkv;
        // 2. what comes out, and what float32 makes of it in one long sum and in chunks
        const Oracle<double> want(numbers<double>(z), numbers<double>(dS0), p.heads(), (size_t)p.T, (size_t)p.T);
        const Oracle<float> whole(numbers<float>(z), dS0, p.heads(), (size_t)p.T, (size_t)p.T);
        const Oracle<float> chunked(numbers<float>(z), dS0, p.heads(), (size_t)p.T, CABLE_CHUNK);
        const Oracle<float> wide(numbers<float>(z), dS0, p.heads(), (size_t)p.T, CABLE_CHUNK, true);
        // 3. the rungs
        const struct {
            const char* idea;
            void (*run)(const Scan&, Stream);
            const Oracle<float>& plain;
            const char* no_gain;
        } rungs[] = {
            {"serial: the equation as it stands", cable_scan1, whole, ""},
            {"a block scans one token per thread", cable_scan2, whole, "this is rung 1: a block is one thread"},
            {"chunks, with float64 origins", cable_scan3, chunked, "more work, and its few cores were busy"},
            {"shipped: one launch, which can be resumed", cable_scan4, wide, ""},
        };
        for (const auto& rung : rungs) {
            if (!ladder.begin(rung.idea, rung.no_gain)) { continue; }
            for (DeviceArray<float>* a : {&S_offset, &db, &g, &dg}) { poison(*a); }
            for (DeviceArray<double>* a : {&S_origin, &carry}) { poison(*a); }
            poison(dqkv);
            dS.set(dS0);
            rung.run(p, device_stream());
            const auto offset = S_offset.host();
            const auto origin = S_origin.host();
            std::vector<double> S(n);
            for (size_t e = 0; e < n; e++) {
                S[e] = origin[e / p.T * p.chunks() + e % p.T / CABLE_CHUNK] + (double)offset[e];
            }
            ladder.compare("S", S, want.S, rung.plain.S);
            ladder.compare("dz", from_columns(p, dqkv.host()), want.dz, rung.plain.dz);
            ladder.end([&] { rung.run(p, device_stream()); }, 1e-9 * (double)n, "Gtoken");
        }
        return ladder.exit_code();
    });
}
