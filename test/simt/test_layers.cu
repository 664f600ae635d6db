// test_layers.cu -- the layers' kernels with blocks of real threads, against plain loops in double, straight from the
// equations. Shapes are small and odd: rows that no tile divides, sequences that cross a chunk of CABLE's sum. Both
// precisions: a bf16 result may be off by its rounding, everything before it is float32.
#include "llmc/engine/model.cuh"
#include "test/layers/adamw_oracle.h"
#include "test/layers/classifier_oracle.h"
#include "test/layers/contrastive_oracle.h"
#include "test/layers/embedding_oracle.h"
#include "test/layers/gelu_oracle.h"
#include "test/layers/layernorm_oracle.h"
#include "test/layers/pooling_oracle.h"
#include "test/layers/rows_oracle.h"
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

// the scenes of test/layers, on shapes that a block of threads cuts in other ways -------------------------------------

KERNEL_TEST("layernorm") {
    Random random;
    // rows on 16 bytes and not; of 1 to 4 packs a lane, and longer; more slabs than slab_sum has warps
    for (size_t C : {1, 48, 300, 400, 520, 1024, 2000, 6144}) { test_layernorm(random, C == 48 ? 300 : 3, C); }
}
// by elements and by packs, one row and several slabs of them, columns of one block and of several
KERNEL_TEST("gelu and its bias gradient") {
    Random random;
    for (const auto& [N, C] : {std::pair<size_t, size_t>(1, 1500), {3, 520}, {70, 75}, {100, 264}}) {
        for (const GeluForm& form : GELU_FORMS) {
            test_gelu(random, form, stored(random.normals(N * C, 0, 3)), stored(random.normals(N * C)), N, C);
        }
    }
}
KERNEL_TEST("embedding, and with a hot token") {
    Random random;
    for (size_t C : {150, 152}) {
        test_embedding(random, 41, 7, C, false);
        test_embedding(random, 2641, 7, C, true);
    }
}
KERNEL_TEST("rows gathered, scattered and added") {
    Random random;
    test_gather_scatter(random, 41, 9, 150);
    test_add_row(random, 41, 150);
}
KERNEL_TEST("pooling: the mean over a sequence, its first token") {
    Random random;
    for (Pooling kind : {Pooling::Mean, Pooling::Cls}) { test_pooling(random, {70, 1, 33}, 70, 300, kind); }
}
KERNEL_TEST("contrastive loss") {
    Random random;
    test_contrastive(random, {3, 5, 7}, 0.25f);
    test_contrastive(random, {5, 70, 37}, 0.25f);           // two tiles of candidates
    test_distill(random, 5, 300);
}
KERNEL_TEST("classifier") {
    Random random;
    const size_t V = 1300, Vp = 1344;
    std::vector<float> logits = random.normals(5 * Vp, 0, 3);
    // relative to these targets, dloss / sum would be denormal and the sum infinite
    logits[3 * Vp + 700] = -76.0f;
    logits[4 * Vp + 31] = -200.0f;
    test_classifier(logits, {0, (int)V - 1, IGNORE_INDEX, 700, 31}, V, Vp);
}
KERNEL_TEST("adamw and the gradient norm") {
    Random random;
    test_adamw(random, NORM_CHUNK + 1234, true, -1.5f, 1.5f);
    test_gradient_norm(random, NORM_CHUNK + 1234);
}

// whose products would else have another number of rows at every step, and cuBLASLt look for another algorithm
KERNEL_TEST("a head's rows are cut into equal parts of whole tiles, as many as the processors or a multiple of them") {
    for (size_t N : {1000, 5336, 6337, 65536, 100000}) {
        for (size_t C : {768, 1024, 1280}) {
            const size_t most = LOGITS_BOUND / 50304, all = 132;
            const size_t rows = logit_rows(N, 50304, C, Purpose::Train, (int)all);
            const size_t parts = ceil_div(N, rows), tiles = ceil_div(rows, (size_t)128) * ceil_div(C, (size_t)256);
            EXPECT(N <= most ? rows == N : rows <= most && rows % 128 == 0, "%zu tokens: %zu rows", N, rows);
            EXPECT(parts * rows - N < 128 * parts, "%zu tokens: %zu rows", N, rows);
            if (!stores_bf16 || N < 65536) { continue; }
            EXPECT(tiles <= all && tiles > all - 8, "C %zu: %zu tiles", C, tiles);
        }
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
            classifier_float(losses.p, hits.p, logits.p, targets.p, 1, V, Vp, stream);
            const int best = bias[7] > 0 ? 7 : larger;
            EXPECT(hits.host()[0] == (target == best), "target %d, the largest is %d: hit %g", target, best,
                   hits.host()[0]);
        }
    }
    matmul_float(logits.p, view(lnf.p, 1, C), transposed(view(wte.p, Vp, C)), nullptr, stream);
    EXPECT(logits.host()[larger] == 1 + 1 / 1024.0f && logits.host()[3] == 1, "without a bias: %.9g, %.9g",
           logits.host()[larger], logits.host()[3]);
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
    const int T = 300;                                      // three chunks
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
    const CableStep step = softplus_b ? CableStep::Softplus : CableStep::Relu;
    const QkvShape shape = {T, NH, C / NH, OC};
    cable_forward(S_offset.p, S_origin.p, g.p, qkv.p, shape, B, T, 0, step, weighted, stream);
    const Doubles whole = computed();
    EXPECT_CLOSE(whole, S, EXACT);
    EXPECT_CLOSE(g.host(), G, EXACT);
    // a second call continues from token t0 - 1, with the same bits
    for (int t0 : {97, 128}) {
        S_origin.set(Doubles(BNH * chunks, NAN));
        cable_forward(S_offset.p, S_origin.p, g.p, qkv.p, shape, B, t0, 0, step, weighted, stream);
        cable_forward(S_offset.p, S_origin.p, g.p, qkv.p, shape, B, T - t0, t0, step, weighted, stream);
        EXPECT(computed() == whole, "S continued from %d is not S at once", t0);
    }
    launch(cable_backward_kernel, Grid(BNH, 128, 0, stream), dqkv.p, dS.p, dg.p, qkv.p, shape, step, weighted);
    EXPECT_CLOSE(dqkv.host(), dx, ROUNDED);
}
KERNEL_TEST("streams: the exchange comes before the step's own work") {
    int own = 0, exchange = 0;
    CUDA_CHECK(cudaStreamGetPriority(device_stream(), &own));
    CUDA_CHECK(cudaStreamGetPriority(second_stream(), &exchange));
    EXPECT(exchange < own, "priorities %d and %d: the lower one comes first", exchange, own);
}
KERNEL_TEST("cable: its sums and their gradients") {
    check_cable(false, true);
    check_cable(false, false);
    check_cable(true, false);
}
