// test_layers.cu -- the layers' kernels with blocks of real threads, against plain loops in double, straight from the
// equations. Shapes are small and odd: rows that no tile divides, sequences that cross a chunk of CABLE's sum. Both
// precisions: a bf16 result may be off by its rounding, everything before it is float32.
#include "llmc/adamw.cuh"
#include "llmc/classifier.cuh"
#include "llmc/contrastive.cuh"
#include "llmc/embedding.cuh"
#include "llmc/gelu.cuh"
#include "llmc/layernorm.cuh"
#include "llmc/engine/model.cuh"
#include "llmc/pooling.cuh"
#include "llmc/rows.cuh"
#include "test/simt/kernel_test.h"

static const Stream stream = nullptr;
constexpr bool stores_bf16 = sizeof(floatX) == 2;
constexpr double EXACT = 3e-6, ROUNDED = stores_bf16 ? 4e-3 : EXACT;      // float32 results; floatX results

using Doubles = std::vector<double>;
// what the kernel is given and the oracle computes with: normal draws that floatX holds
static std::vector<floatX> inputs(size_t n, uint64_t stream_, double std = 1.0) {
    return converted<floatX>(normals(n, stream_, std));
}
static Doubles doubles(const std::vector<floatX>& v) { return converted<double>(converted<float>(v)); }
static Doubles doubles(const DeviceArray<floatX>& a) { return doubles(a.host()); }

#define EXPECT_CLOSE(got, want, tolerance) do {                                                             \
        const double error_ = relative_l2(got, want);                                                       \
        EXPECT(error_ <= (tolerance), "relative error %.2e, at most %.0e", error_, (double)(tolerance));     \
    } while (0)

// ----------------------------------------------------------------------------------------------------------

// three numbers per thread, one call right after the other: what a call leaves in shared memory must not reach the next
// one
__global__ void block_kernel(float* out, const float* x) {
    const int t = threadIdx.x;
    const int n = blockDim.x;
    for (int round = 0; round < 3; round++) {
        const float mine = x[(blockIdx.x * 3 + round) * n + t];
        float* o = out + ((size_t)(blockIdx.x * 3 + round) * n + t) * 4;
        o[0] = block_scan(mine);
        o[1] = block_scan(-mine);
        o[2] = block_sum(mine);
        o[3] = block_max(mine);
    }
}
KERNEL_TEST("block_sum, block_max, block_scan") {
    for (int threads : {32, 64, 256, 1024}) {
        const int blocks = 4, rows = blocks * 3;
        const std::vector<float> x = normals((size_t)rows * threads, 1);
        DeviceArray<float> in(x), out(4 * x.size());
        launch(block_kernel, Grid(blocks, threads, 0, stream), out.p, in.p);
        Doubles want(4 * x.size());
        for (int r = 0; r < rows; r++) {
            double sum = 0, largest = -INFINITY;
            for (int t = 0; t < threads; t++) {
                sum += x[r * threads + t];
                largest = std::max(largest, (double)x[r * threads + t]);
                want[4 * (r * threads + t)] = sum;
                want[4 * (r * threads + t) + 1] = -sum;
            }
            for (int t = 0; t < threads; t++) {
                want[4 * (r * threads + t) + 2] = sum;
                want[4 * (r * threads + t) + 3] = largest;
            }
        }
        EXPECT_CLOSE(out.host(), want, EXACT);
    }
}

KERNEL_TEST("an error of CUDA names the call site, the last kernel and its shape; out of memory, how much there is") {
    DeviceArray<float> in(normals(192, 1)), out(4 * 192);
    launch(block_kernel, Grid(2, 32, 64, stream), out.p, in.p);
    const std::string error = error_of([] { cuda_check(cudaErrorInvalidValue, "a call", "some.cu", 7); });
    for (const char* part : {"a call: ", "test_layers.cu:", "2 blocks of 32 threads with 64 bytes", "some.cu:7"}) {
        EXPECT(error.find(part) != std::string::npos, "%s is not in: %s", part, error.c_str());
    }
    const std::string memory = error_of([] { device_malloc((size_t)1 << 50); });
    EXPECT(memory.find("cannot allocate") == 0 && memory.find("are available; try a smaller --B") != std::string::npos,
           "%s", memory.c_str());
    device_free(device_malloc(0));
    launch(block_kernel, Grid(2, 32, 0, stream), out.p, in.p);      // which is not to be blamed for what failed before
}

#if defined(SIMT)
KERNEL_TEST("a profile's times are without those of the events themselves") {
    DeviceArray<float> in(normals(192, 1)), out(4 * 192);
    simt_record_seconds = 1000.0;
    profile_begin();
    for (int k = 0; k < 3; k++) { launch(block_kernel, Grid(2, 32, 0, stream), out.p, in.p); }
    const double milliseconds = profile.entries[0].clock.milliseconds();
    const std::string text = profile_end(wall_seconds());
    simt_record_seconds = 0.0;
    double found = -1.0;
    sscanf(text.c_str() + text.find("block_kernel"), "%*s %*s %*s %lf", &found);
    EXPECT(milliseconds >= 1e6, "expected records that take 1000 s, got %g ms", milliseconds);
    EXPECT(found >= 0.0 && found < 5e5, "three launches: %g ms\n%s", found, text.c_str());
}
#endif
// static shared memory counts, too, and block_kernel has some
KERNEL_TEST("shared memory: up to 48 kB, and more") {
    for (size_t bytes = 48 << 10; bytes + 2048 > 48 << 10; bytes -= 128) {
        DeviceArray<float> in(normals(192, 1)), out(4 * 192);
        launch(block_kernel, Grid(2, 32, bytes, stream), out.p, in.p);
    }
    DeviceArray<float> in(normals(192, 1)), out(4 * 192);
    const size_t all = device_shared_available();
    launch(block_kernel, Grid(2, 32, all - MOST_STATIC, stream), out.p, in.p);
    CUDA_CHECK(cudaDeviceSynchronize());
    EXPECT(!error_of([&] { launch(block_kernel, Grid(2, 32, all, stream), out.p, in.p); }).empty(),
           "%zu bytes of dynamic shared memory and some static", all);
    // the portable attention has none, and on sm_75 its backward needs all 64 kB
    DeviceArray<floatX> rows(inputs(64, 1)), row(inputs(32, 2));
    launch(add_row_kernel, Grid(2, 32, all, stream), rows.p, row.p, 32);
    CUDA_CHECK(cudaDeviceSynchronize());
}

static void check_layernorm(int N, int C) {
    const float eps = 1e-5f;
    DeviceArray<floatX> inp(inputs(N * C, 1)), weight(inputs(C, 2)), bias(inputs(C, 3)), out(N * C);
    DeviceArray<floatX> dout(inputs(N * C, 4)), dinp(inputs(N * C, 5));
    DeviceArray<float> mean(N), rstd(N), dweight(normals(C, 6)), dbias(normals(C, 7)), scratch(MAX_SLABS * 2 * C);
    const Doubles x = doubles(inp);
    const Doubles w = doubles(weight);
    const Doubles b = doubles(bias);
    const Doubles dy = doubles(dout);
    Doubles dx = doubles(dinp);
    Doubles dw = converted<double>(dweight.host());
    Doubles db = converted<double>(dbias.host());
    Doubles y(N * C);
    Doubles m(N);
    Doubles s(N);
    for (int n = 0; n < N; n++) {
        const double *xn = &x[n * C], *dyn = &dy[n * C];
        double variance = 0;
        double mean_d = 0;
        double mean_dn = 0;
        for (int c = 0; c < C; c++) { m[n] += xn[c] / C; }
        for (int c = 0; c < C; c++) { variance += (xn[c] - m[n]) * (xn[c] - m[n]) / C; }
        s[n] = 1 / std::sqrt(variance + eps);
        for (int c = 0; c < C; c++) {
            const double norm = (xn[c] - m[n]) * s[n];
            y[n * C + c] = norm * w[c] + b[c];
            dw[c] += dyn[c] * norm;
            db[c] += dyn[c];
            mean_d += dyn[c] * w[c] / C;
            mean_dn += dyn[c] * w[c] * norm / C;
        }
        for (int c = 0; c < C; c++) {
            dx[n * C + c] += s[n] * (dyn[c] * w[c] - mean_d - (xn[c] - m[n]) * s[n] * mean_dn);
        }
    }
    layernorm_forward(out.p, mean.p, rstd.p, inp.p, weight.p, bias.p, N, C, eps, stream);
    EXPECT_CLOSE(out.host(), y, ROUNDED);
    EXPECT_CLOSE(mean.host(), m, EXACT);
    EXPECT_CLOSE(rstd.host(), s, EXACT);
    layernorm_backward(dinp.p, dweight.p, dbias.p, scratch.p, dout.p, inp.p, mean.p, rstd.p, weight.p, N, C, stream);
    EXPECT_CLOSE(dinp.host(), dx, ROUNDED);
    EXPECT_CLOSE(dweight.host(), dw, EXACT);
    EXPECT_CLOSE(dbias.host(), db, EXACT);
}
KERNEL_TEST("layernorm") {
    // rows on 16 bytes and not; more slabs than slab_sum has warps
    for (int C : {1, 48, 300, 520, 2000, 6144}) { check_layernorm(C == 48 ? 300 : 3, C); }
}

// value(x) and its slope
template <class Value, class Forward, class Backward>
static void check_gelu(int N, int C, Value value, Forward forward, Backward backward) {
    DeviceArray<floatX> inp(inputs(N * C, 1, 3.0)), dout(inputs(N * C, 2)), out(N * C), dinp(N * C);
    DeviceArray<float> dbias(normals(C, 3)), scratch(MAX_SLABS * C);
    const Doubles x = doubles(inp), dy = doubles(dout);
    Doubles y(N * C), dx(N * C), db = converted<double>(dbias.host());
    for (int i = 0; i < N * C; i++) {
        const auto [v, slope] = value(x[i]);
        y[i] = v;
        dx[i] = dy[i] * slope;
    }
    forward(out.p, inp.p, N * C, stream);
    backward(dinp.p, dbias.p, scratch.p, dout.p, inp.p, N, C, stream);
    EXPECT_CLOSE(out.host(), y, ROUNDED);
    EXPECT_CLOSE(dinp.host(), dx, ROUNDED);
    const Doubles stored = doubles(dinp);                                   // the sums are of what was rounded
    for (int i = 0; i < N * C; i++) { db[i % C] += stored[i]; }
    EXPECT_CLOSE(dbias.host(), db, EXACT);
}
static std::pair<double, double> gelu_oracle(double x) {
    const double k = std::sqrt(2 / M_PI), t = std::tanh(k * (x + 0.044715 * x * x * x));
    return {0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x)};
}
static std::pair<double, double> gelu_erf_oracle(double x) {
    const double cdf = std::erfc(-x / std::sqrt(2.0)) / 2;
    return {x * cdf, cdf + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI)};
}
// by elements and by packs, one row and several slabs of them, columns of one block and of several
KERNEL_TEST("gelu and its bias gradient") {
    for (const auto& [N, C] : {std::pair(1, 1500), {3, 520}, {70, 75}, {100, 264}}) {
        check_gelu(N, C, gelu_oracle, gelu_forward, gelu_backward);
        check_gelu(N, C, gelu_erf_oracle, gelu_erf_forward, gelu_erf_backward);
    }
}

// N tokens, from 0 to V - 2; token 2 has `more` more rows.
static void check_embedding(int C, int more) {
    const int V = 7, N = 41 + more;
    std::vector<int> token(N);
    for (int n = 0; n < N; n++) { token[n] = n % 41 == n ? (int)(hash64(1, n) % (V - 1)) : 2; }
    std::swap(token[3], token[N - 1]);
    DeviceArray<int> tokens(token);
    DeviceArray<floatX> wte(inputs(V * C, 1)), dout(inputs(N * C, 2)), out(N * C);
    DeviceArray<float> dwte(normals(V * C, 3)), partial(embedding_backward_scratch(N, C) + 1);
    const Doubles w = doubles(wte), dy = doubles(dout);
    const std::vector<float> before = dwte.host();
    Doubles y(N * C), dw = converted<double>(before);
    for (int n = 0; n < N; n++) {
        for (int c = 0; c < C; c++) {
            y[n * C + c] = w[token[n] * C + c];
            dw[token[n] * C + c] += dy[n * C + c];
        }
    }
    // the order of the float32 sums: a token's rows one after the other; of a hot token, the sums of its parts
    std::vector<float> ordered = before, part(V * C);
    std::vector<int> times(V), seen(V);
    for (int t : token) { times[t]++; }
    for (int n = 0; n < N; n++) {
        const int t = token[n], at = t * C;
        seen[t]++;
        const bool hot = times[t] > EMBEDDING_PART;
        for (int c = at; c < at + C; c++) { (hot ? part : ordered)[c] += (float)dy[n * C + c - at]; }
        if (!hot || (seen[t] % EMBEDDING_PART != 0 && seen[t] != times[t])) { continue; }
        for (int c = at; c < at + C; c++) {
            ordered[c] += part[c];
            part[c] = 0.0f;
        }
    }
    EmbeddingPlan plan;
    plan.build(token.data(), N);
    DeviceArray<int> rows(plan.rows), first(plan.first), hot(plan.hot);
    EmbeddingRows of_tokens;
    of_tokens.rows = rows.p;
    of_tokens.first = first.p;
    of_tokens.hot = hot.p;
    of_tokens.count(plan);
    EXPECT((int)plan.hot_tokens() == (more > 0), "%zu hot tokens", plan.hot_tokens());
    EXPECT(plan.hot_tokens() <= EmbeddingPlan::most_hot_tokens(N), "%zu hot tokens", plan.hot_tokens());
    EXPECT(plan.hot_parts() <= EmbeddingPlan::most_hot_parts(N), "%zu hot parts", plan.hot_parts());
    embedding_forward(out.p, tokens.p, wte.p, N, C, stream);
    embedding_backward(dwte.p, partial.p, dout.p, tokens.p, of_tokens, C, stream);
    EXPECT_CLOSE(out.host(), y, 0);
    EXPECT_CLOSE(dwte.host(), dw, EXACT);
    EXPECT(dwte.host() == ordered, "dwte: another order of the sums");
}

KERNEL_TEST("embedding") { for (int C : {150, 152}) { check_embedding(C, 0); } }
KERNEL_TEST("embedding with a hot token") { for (int C : {150, 152}) { check_embedding(C, 2600); } }

KERNEL_TEST("rows gathered, scattered and added") {
    const int N = 41;
    const int n = 9;
    const int C = 150;
    std::vector<int> row(n);
    for (int k = 0; k < n; k++) { row[k] = (k * 23 + 5) % N; }             // distinct: 23 and 41 have no common divisor
    DeviceArray<int> rows(row);
    DeviceArray<floatX> inp(inputs(N * C, 1)), dout(inputs(n * C, 2)), out(n * C), dinp(inputs(N * C, 3)),
        type(inputs(C, 4));
    Doubles y(n * C), dx = doubles(dinp), sum = doubles(inp);
    const Doubles x = doubles(inp);
    const Doubles dy = doubles(dout);
    const Doubles w = doubles(type);
    for (int e = 0; e < n * C; e++) {
        y[e] = x[row[e / C] * C + e % C];
        dx[row[e / C] * C + e % C] = dy[e];
    }
    gather_rows(out.p, inp.p, rows.p, n, C, stream);
    scatter_rows(dinp.p, dout.p, rows.p, n, C, stream);
    EXPECT_CLOSE(out.host(), y, 0);
    EXPECT_CLOSE(dinp.host(), dx, 0);
    DeviceArray<float> drow(normals(C, 5)), scratch(MAX_SLABS * C);
    Doubles d = converted<double>(drow.host());
    for (int e = 0; e < N * C; e++) {
        sum[e] += w[e % C];
        d[e % C] += x[e];
    }
    add_row_backward(drow.p, scratch.p, inp.p, N, C, stream);
    add_row(inp.p, type.p, N, C, stream);
    EXPECT_CLOSE(inp.host(), sum, ROUNDED);
    EXPECT_CLOSE(drow.host(), d, EXACT);
}

static void check_pooling(Pooling kind) {
    const int T = 70, C = 300;
    const std::vector<int> length = {70, 1, 33};
    const int B = (int)length.size();
    std::vector<floatX> x = inputs(B * T * C, 1);
    for (int e = 0; e < B * T * C; e++) { x[e] = e / C % T < length[e / C / T] ? x[e] : (floatX)NAN; }
    DeviceArray<floatX> inp(x), dinp(B * T * C);
    DeviceArray<float> out(B * C), dout(normals(B * C, 2));
    DeviceArray<int> lengths(length);
    Doubles y(B * C), dx(B * T * C);
    const Doubles dy = converted<double>(dout.host());
    for (int b = 0; b < B; b++) {
        const int rows = kind == Pooling::Mean ? length[b] : 1;
        for (int e = 0; e < rows * C; e++) {
            y[b * C + e % C] += (double)(float)x[b * T * C + e] / rows;
            dx[b * T * C + e] = dy[b * C + e % C] / rows;
        }
    }
    pooling_forward(out.p, inp.p, lengths.p, B, T, C, kind, stream);
    pooling_backward(dinp.p, dout.p, lengths.p, B, T, C, kind, stream);
    EXPECT_CLOSE(out.host(), y, EXACT);
    EXPECT_CLOSE(dinp.host(), dx, ROUNDED);
}
KERNEL_TEST("pooling: the mean over a sequence, its first token") {
    check_pooling(Pooling::Mean);
    check_pooling(Pooling::Cls);
}

static void check_contrastive(int Q, int M, int C) {
    const int R = Q + M;
    const float temperature = 0.25f, dloss = 0.125f;
    DeviceArray<float> emb(normals(R * C, 1)), losses(Q), demb(R * C), scratch(contrastive_scratch(Q, M, C));
    const Doubles x = converted<double>(emb.host());
    Doubles n(R * C), length(R), dn(R * C), dx(R * C), loss(Q);
    for (int e = 0; e < R * C; e++) { length[e / C] += x[e] * x[e]; }
    for (int e = 0; e < R * C; e++) { n[e] = x[e] / std::sqrt(length[e / C]); }
    for (int i = 0; i < Q; i++) {
        Doubles s(M);
        double sum = 0;
        for (int j = 0; j < M; j++) {
            for (int c = 0; c < C; c++) { s[j] += n[i * C + c] * n[(Q + j) * C + c] / temperature; }
            sum += std::exp(s[j]);
        }
        loss[i] = std::log(sum) - s[i];
        for (int e = 0; e < M * C; e++) {
            const double ds = dloss * (std::exp(s[e / C]) / sum - (i == e / C)) / temperature;
            dn[i * C + e % C] += ds * n[Q * C + e];
            dn[Q * C + e] += ds * n[i * C + e % C];
        }
    }
    for (int r = 0; r < R; r++) {
        double along = 0;
        for (int c = 0; c < C; c++) { along += dn[r * C + c] * n[r * C + c]; }
        for (int c = 0; c < C; c++) { dx[r * C + c] = (dn[r * C + c] - along * n[r * C + c]) / std::sqrt(length[r]); }
    }
    contrastive_forward_backward(losses.p, demb.p, scratch.p, emb.p, Q, M, C, temperature, dloss, stream);
    EXPECT_CLOSE(losses.host(), loss, EXACT);
    EXPECT_CLOSE(demb.host(), dx, EXACT);
}
KERNEL_TEST("contrastive loss") {
    check_contrastive(3, 5, 7);
    check_contrastive(5, 70, 37);           // two tiles of candidates
}

// whose products would else have another number of rows at every step, and cuBLASLt look for another algorithm
KERNEL_TEST("a head's rows are cut into equal parts of whole tiles") {
    for (size_t N : {1000, 5336, 5337, 65536, 100000}) {
        const size_t most = LOGITS_BOUND / 50304, rows = logit_rows(N, 50304, Purpose::Train);
        const size_t parts = ceil_div(N, rows);
        EXPECT(N <= most ? rows == N : rows <= most && rows % 128 == 0, "%zu tokens: %zu rows", N, rows);
        EXPECT(parts * rows - N < 128 * parts, "%zu tokens: %zu rows", N, rows);
    }
}
KERNEL_TEST("masked rows come in few numbers, the last of them without a target") {
    const size_t N = 1000;
    DeviceBatch batch;
    batch.allocate(N);
    const std::vector<int> tokens(N, 1);
    struct Case { size_t targets, rows; };
    for (const Case& c : {Case{0, 0}, {1, 256}, {150, 256}, {256, 256}, {257, 512}, {800, 1000}, {1000, 1000}}) {
        std::vector<int> picked, targets;
        for (size_t k = 0; k < c.targets; k++) {
            picked.push_back((int)k);
            targets.push_back((int)k + 7);
        }
        batch.load(0, 1, tokens.data(), nullptr, N, stream);
        batch.pick(0, picked, targets, N, nullptr, 1, stream);
        EXPECT(batch.picks == c.rows, "%zu targets: %zu rows", c.targets, batch.picks);
        std::vector<int> rows(N), wanted(N);
        copy_to_host(rows.data(), batch.picked, sizeof(int) * batch.picks, stream);
        copy_to_host(wanted.data(), batch.targets, sizeof(int) * batch.picks, stream);
        for (size_t k = 0; k < batch.picks; k++) {
            const int row = k < c.targets ? (int)k : 0;
            const int target = k < c.targets ? (int)k + 7 : IGNORE_INDEX;
            EXPECT(rows[k] == row && wanted[k] == target, "row %zu of %zu is row %d with target %d", k,
                   batch.picks, rows[k], wanted[k]);
        }
    }
    batch.release();
}

KERNEL_TEST("classifier") {
    const int N = 5;
    const int V = 1300;
    const int Vp = 1344;
    const float dloss = 0.125f;
    const std::vector<int> target = {0, V - 1, IGNORE_INDEX, 700, 31};
    std::vector<floatX> logit = inputs(N * Vp, 1, 3.0);
    // relative to these targets, dloss / sum would be denormal and the sum infinite
    logit[3 * Vp + target[3]] = (floatX)-76.0f;
    logit[4 * Vp + target[4]] = (floatX)-200.0f;
    DeviceArray<int> targets(target);
    DeviceArray<floatX> logits(logit);
    DeviceArray<float> losses(N);
    const Doubles x = doubles(logit);
    Doubles loss(N), dx(N * Vp);
    for (int n = 0; n < N; n++) {
        if (target[n] == IGNORE_INDEX) { continue; }
        double sum = 0;
        for (int v = 0; v < V; v++) { sum += std::exp(x[n * Vp + v]); }
        loss[n] = std::log(sum) - x[n * Vp + target[n]];
        for (int v = 0; v < V; v++) { dx[n * Vp + v] = dloss * (std::exp(x[n * Vp + v]) / sum - (v == target[n])); }
    }
    classifier(losses.p, nullptr, logits.p, targets.p, dloss, N, V, Vp, false, stream);
    EXPECT_CLOSE(losses.host(), loss, EXACT);
    EXPECT(same_bits(logits.host(), logit), "evaluation changed the logits");
    classifier(losses.p, nullptr, logits.p, targets.p, dloss, N, V, Vp, true, stream);
    EXPECT_CLOSE(losses.host(), loss, EXACT);
    EXPECT_CLOSE(logits.host(), dx, ROUNDED);
}

KERNEL_TEST("logits that round to one bf16 number are told apart by evaluation; padding is never the largest") {
    const int V = 1300, Vp = 1344;
    const int C = 8;
    std::vector<float> h(C, 0.0f);
    std::vector<float> w(Vp * C, 0.0f);
    std::vector<float> b(Vp, 0.0f);
    h[0] = h[1] = 1;
    for (int v = 0; v < Vp; v++) { w[v * C] = v < V ? 1.0f : 100.0f; }
    const int larger = 700;
    w[larger * C + 1] = 1 / 1024.0f;                        // 1 + 2^-10 is 1 in bf16
    b[3] = 1 / 2048.0f;
    std::vector<float> seven = b;                           // and a bias that makes another one the largest
    seven[7] = 1 / 512.0f;
    DeviceArray<floatX> lnf(converted<floatX>(h)), wte(converted<floatX>(w));
    DeviceArray<float> logits(Vp), losses(1), hits(1);
    for (int target : {larger, 3, 0, 7}) {
        for (const auto& bias : {b, seven}) {
            DeviceArray<floatX> add(converted<floatX>(bias));
            DeviceArray<int> targets(std::vector<int>{target});
            matmul_float(logits.p, view(lnf.p, 1, C), transposed(view(wte.p, Vp, C)), add.p, stream);
            classifier(losses.p, hits.p, logits.p, targets.p, 1.0f, 1, V, Vp, false, stream);
            const int best = bias[7] > 0 ? 7 : larger;
            EXPECT(hits.host()[0] == (target == best), "target %d, the largest is %d: hit %g", target, best,
                   hits.host()[0]);
        }
    }
    matmul_float(logits.p, view(lnf.p, 1, C), transposed(view(wte.p, Vp, C)), nullptr, stream);
    EXPECT(logits.host()[larger] == 1 + 1 / 1024.0f && logits.host()[3] == 1, "without a bias: %.9g, %.9g",
           logits.host()[larger], logits.host()[3]);
}

static void check_matmul(int N, int C, int OC) {
    DeviceArray<floatX> inp(inputs(N * C, 1)), weight(inputs(OC * C, 2)), bias(inputs(OC, 3)),
        residual(inputs(N * OC, 4));
    DeviceArray<floatX> out(N * OC), both(N * OC), dout(inputs(N * OC, 5)), dinp(N * C);
    DeviceArray<float> dweight(normals(OC * C, 6)), dbias(normals(OC, 7)), scratch(MAX_SLABS * OC);
    const Doubles x = doubles(inp);
    const Doubles w = doubles(weight);
    const Doubles b = doubles(bias);
    const Doubles r = doubles(residual);
    const Doubles dy = doubles(dout);
    Doubles dw = converted<double>(dweight.host());
    Doubles db = converted<double>(dbias.host());
    Doubles y(N * OC), yb(N * OC), dx(N * C);
    for (int n = 0; n < N; n++) {
        for (int o = 0; o < OC; o++) {
            for (int c = 0; c < C; c++) {
                y[n * OC + o] += x[n * C + c] * w[o * C + c];
                dx[n * C + c] += dy[n * OC + o] * w[o * C + c];
                dw[o * C + c] += dy[n * OC + o] * x[n * C + c];
            }
            yb[n * OC + o] = y[n * OC + o] + b[o] + r[n * OC + o];
            db[o] += dy[n * OC + o];
        }
    }
    matmul_forward(out.p, view(inp.p, N, C), view(weight.p, OC, C), nullptr, nullptr, stream);
    EXPECT_CLOSE(out.host(), y, ROUNDED);
    matmul_forward(both.p, view(inp.p, N, C), view(weight.p, OC, C), bias.p, residual.p, stream);
    EXPECT_CLOSE(both.host(), yb, ROUNDED);
    matmul_backward(dinp.p, dweight.p, dbias.p, scratch.p, dout.p, nullptr, view(inp.p, N, C), view(weight.p, OC, C),
                    stream);
    EXPECT_CLOSE(dinp.host(), dx, ROUNDED);
    EXPECT_CLOSE(dweight.host(), dw, EXACT);
    EXPECT_CLOSE(dbias.host(), db, EXACT);
}
KERNEL_TEST("matmul") {
    check_matmul(1, 1, 1);
    check_matmul(70, 35, 67);
    check_matmul(33, 64, 10);
}

KERNEL_TEST("adamw and the gradient norm") {
    const size_t n = NORM_CHUNK + 1234;
    TensorSpec spec;
    spec.name = "w"; spec.decay = true; spec.lo = -1.5f; spec.hi = 1.5f;
    const AdamW a = {0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.5f, 3};
    DeviceArray<float> master(normals(n, 1)), grads(normals(n, 2)), m(normals(n, 3)), v(std::vector<float>(n, 0.25f));
    DeviceArray<floatX> weights(n);
    DeviceArray<double> partial(ceil_div(n, NORM_CHUNK));
    Doubles w = converted<double>(master.host()), wm = converted<double>(m.host()), wv(n, 0.25);
    const Doubles g = converted<double>(grads.host());
    double squares = 0;
    for (size_t i = 0; i < n; i++) {
        squares += g[i] * g[i];
        wm[i] = 0.9 * wm[i] + 0.1 * 0.5 * g[i];
        wv[i] = 0.95 * wv[i] + 0.05 * 0.25 * g[i] * g[i];
        const double mean = wm[i] / (1 - 0.9 * 0.9 * 0.9);
        const double square = wv[i] / (1 - 0.95 * 0.95 * 0.95);
        w[i] -= 0.01 * (mean / (std::sqrt(square) + 1e-8) + 0.1 * w[i]);
        w[i] = std::min(1.5, std::max(-1.5, w[i]));
    }
    const double norm = gradient_norm(partial.p, grads.p, n, stream);
    EXPECT(std::fabs(norm / std::sqrt(squares) - 1) < EXACT, "norm %g, not %g", norm, std::sqrt(squares));
    AdamWTable table;
    table.add(spec, {0, 0, 0, n}, 0, 0, 0);
    table.upload(stream);
    adamw_update(weights.p, master.p, grads.p, m.p, v.p, table, a, stream);
    table.release();
    EXPECT_CLOSE(master.host(), w, EXACT);
    EXPECT_CLOSE(m.host(), wm, EXACT);
    EXPECT_CLOSE(v.host(), wv, EXACT);
    EXPECT_CLOSE(weights.host(), w, 2 * ROUNDED);          // rounded stochastically
}

// ----------------------------------------------------------------------------------------------------------
// what is done to q and k, and documents

// Two sequences of 13 tokens, in rows that hold more
struct Queries {
    static constexpr int B = 2, T = 13;
    static constexpr int NH = 3;
    int HS, C, OC;
    PositionConfig config;
    PositionView view;
    Queries(const char* name, int HS)
        : HS(HS), C(NH * HS), OC(round_up(3 * C, 8)), config(parse_position(name, 64)), view({1, NH, HS, B}) {
        view.run = &config;
        view.config = &config.parts[0];
        view.OC = OC;
    }
    size_t at(int b, int stride, int t, int head) const { return ((size_t)b * stride + t) * OC + (size_t)head * HS; }
};

static void check_rope(int HS, const char* name) {
    const Queries x(name, HS);
    const int stride = 20, t0 = 5;
    const int R = Rope::turned(x.config.parts[0], HS);
    Rope rope(x.view);
    DeviceArray<float> table(normals((size_t)stride * R, 1));
    rope.table = table.p;
    const std::vector<float> angle = table.host();
    for (float sign : {1.0f, -1.0f}) {
        DeviceArray<floatX> qkv(inputs((size_t)x.B * stride * x.OC, 2));
        Doubles want = doubles(qkv);
        for (int row = 0; row < x.B * x.T; row++) {
            const int t = t0 + row % x.T;
            for (int h = 0; h < 2 * x.NH; h++) {
                double* v = &want[x.at(row / x.T, stride, t, h)];
                for (int i = 0; i < R; i += 2) {
                    const double c = angle[(size_t)t * R + i], s = sign * angle[(size_t)t * R + i + 1];
                    const double x0 = v[i], x1 = v[i + 1];
                    v[i] = x0 * c - x1 * s;
                    v[i + 1] = x0 * s + x1 * c;
                }
            }
        }
        rope.turn(qkv.p, x.B, x.T, t0, stride, sign, stream);
        EXPECT_CLOSE(qkv.host(), want, ROUNDED);
    }
}
// heads by pairs and by packs, of more packs than threads share one, and not turned to their end
KERNEL_TEST("rope: the turns of q and k") {
    for (int HS : {20, 64, 80}) { for (const char* name : {"rope", "rope:p=0.5"}) { check_rope(HS, name); } }
}

static void check_ssmax(int HS, bool causal) {
    Queries x("ssmax", HS);
    const int N = x.B * x.T;
    const std::vector<int> lengths = {Queries::T, 9};
    DeviceArray<int> kv_len(lengths);
    x.view.causal = causal;
    x.view.stride = x.T;
    x.view.kv_len = kv_len.p;
    SSMax ssmax(x.view);
    DeviceArray<float> s(std::vector<float>{0.3f, 0.5f, 0.7f}), ds(normals(x.NH, 1)), dots((size_t)x.NH * N);
    ssmax.s = {s.p, ds.p};
    ssmax.dots = dots.p;
    DeviceArray<float> factors((size_t)x.NH * N), moments(normals((size_t)x.NH * N, 4));
    ssmax.factors = factors.p;
    ssmax.v.moment = moments.p;
    const std::vector<float> left = moments.host();
    Doubles factor_of(left.size());                         // (B,NH,T)
    DeviceArray<floatX> qkv(inputs((size_t)N * x.OC, 2)), dqkv(inputs((size_t)N * x.OC, 3));
    const Doubles scaled = doubles(qkv);
    const std::vector<float> size = s.host();
    Doubles q = scaled, dq = doubles(dqkv);
    Doubles sum = converted<double>(ds.host());
    for (int row = 0; row < N; row++) {
        const int b = row / x.T, t = row % x.T;
        const int seen = causal ? t + 1 : lengths[(size_t)b];
        for (int h = 0; h < x.NH; h++) {
            const double factor = t < lengths[(size_t)b] ? size[(size_t)h] * std::log((double)seen) : 0;
            const size_t first = x.at(b, x.T, t, h), at = (size_t)(b * x.NH + h) * x.T + t;
            factor_of[at] = factor;
            sum[(size_t)h] += left[at] / size[(size_t)h];
            for (size_t e = first; e < first + HS; e++) {
                if (factor > 0) { sum[(size_t)h] += dq[e] * scaled[e] / size[(size_t)h]; }
                q[e] *= factor;
                dq[e] *= factor;
            }
        }
    }
    ssmax.prepare_backward(dqkv.p, qkv.p, x.B, x.T, stream);
    EXPECT_CLOSE(dqkv.host(), dq, ROUNDED);
    EXPECT_CLOSE(ds.host(), sum, EXACT);
    ssmax.prepare_forward(qkv.p, x.B, x.T, 0, stream);
    EXPECT_CLOSE(qkv.host(), q, ROUNDED);
    EXPECT_CLOSE(factors.host(), factor_of, EXACT);
}
KERNEL_TEST("ssmax: q and its gradient times s log n, the factors and the gradient of s") {
    for (int HS : {20, 64, 80}) { for (bool causal : {true, false}) { check_ssmax(HS, causal); } }
}

// Tokens that all threads have a piece of, the last one a shorter one; then some that continue the text
KERNEL_TEST("documents: each token knows where its own begins") {
    const int B = 2, stride = 1040;
    const int end_of_text = 7;
    for (int T : {1, 100, 1000}) {
        for (int t0 : {0, 40}) {
            for (int rare : {2, 40, 900}) {
                std::vector<int> tokens, want(B * stride, -1), before(B * stride, -1);
                for (int b = 0; b < B; b++) {
                    int begin = 0;
                    if (t0 > 0) { before[b * stride + t0 - 1] = begin = want[b * stride + t0 - 1] = 11 + b; }
                    for (int t = t0; t < t0 + T; t++) {
                        const bool ends = uniform01(1, (uint64_t)(T + t0 + rare), tokens.size()) * rare < 1;
                        tokens.push_back(ends ? end_of_text : 8);
                        if (ends) { begin = t; }
                        want[b * stride + t] = begin;
                    }
                }
                DeviceArray<int> documents(before), ids(tokens);
                find_documents(documents.p, ids.p, end_of_text, B, T, t0, stride, stream);
                EXPECT(documents.host() == want, "T %d, t0 %d, every %dth", T, t0, rare);
            }
        }
    }
}

// ----------------------------------------------------------------------------------------------------------
// CABLE's sums

static double softplus_oracle(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }
static double sigmoid_oracle(double x) { return 1 / (1 + std::exp(-x)); }

static void check_cable(bool softplus_b, bool weighted) {
    const int B = 2;
    const int NH = 3;
    const int C = 6;
    const int T = 150;
    const int OC = round_up(3 * C + 2 * NH, 8);
    const int BNH = B * NH;
    const int chunks = ceil_div(T, CABLE_CHUNK);
    DeviceArray<floatX> qkv(inputs(B * T * OC, 1)), dqkv(inputs(B * T * OC, 2));
    DeviceArray<float> S_offset(BNH * T), g(BNH * T), dS(normals(BNH * T, 3)), dg(normals(BNH * T, 4));
    DeviceArray<double> S_origin(BNH * chunks);
    const Doubles x = doubles(qkv);
    const Doubles dSi = converted<double>(dS.host());
    const Doubles dgi = converted<double>(dg.host());
    Doubles S(BNH * T), G(BNH * T), dx = doubles(dqkv);
    for (int bh = 0; bh < BNH; bh++) {
        double sum = 0, after = 0;
        auto at = [&](int t) { return (size_t)(bh / NH * T + t) * OC + 3 * C + bh % NH; };
        for (int t = 0; t < T; t++) {
            sum += softplus_b ? softplus_oracle(x[at(t)]) : std::max(0.0, x[at(t)]);
            S[bh * T + t] = sum;
            G[bh * T + t] = weighted ? softplus_oracle(x[at(t) + NH]) : 1;
        }
        for (int t = T - 1; t >= 0; t--) {
            after += dSi[bh * T + t];
            dx[at(t)] = after * (softplus_b ? sigmoid_oracle(x[at(t)]) : x[at(t)] > 0);
            if (weighted) { dx[at(t) + NH] = dgi[bh * T + t] * sigmoid_oracle(x[at(t) + NH]); }
        }
    }
    auto computed = [&] {
        const std::vector<float> offset = S_offset.host();
        const std::vector<double> origin = S_origin.host();
        Doubles got(BNH * T);
        for (int i = 0; i < BNH * T; i++) { got[i] = origin[i / T * chunks + i % T / CABLE_CHUNK] + offset[i]; }
        return got;
    };
    const Grid grid(BNH, 128, 0, stream);
    launch(cable_forward_kernel, grid, S_offset.p, S_origin.p, g.p, qkv.p, T, 0, T, NH, C, OC, softplus_b, weighted);
    const Doubles whole = computed();
    EXPECT_CLOSE(whole, S, EXACT);
    EXPECT_CLOSE(g.host(), G, EXACT);
    // a second call continues from token 96, with the same bits
    launch(cable_forward_kernel, grid, S_offset.p, S_origin.p, g.p, qkv.p, T - 97, 97, T, NH, C, OC, softplus_b,
           weighted);
    EXPECT(computed() == whole, "S continued is not S at once");
    launch(cable_backward_kernel, grid, dqkv.p, dS.p, dg.p, qkv.p, T, NH, C, OC, softplus_b, weighted);
    EXPECT_CLOSE(dqkv.host(), dx, ROUNDED);
}
KERNEL_TEST("cable: its sums and their gradients") {
    check_cable(false, true);
    check_cable(false, false);
    check_cable(true, false);
}
