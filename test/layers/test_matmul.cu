// test_matmul.cu -- the tiled product, its bias and residual, its backward, and block_matmul, against plain loops.
#undef KERNELS_ELSEWHERE             // calls the parts of a product themselves
#include "test/amx_stand_in.h"
#include "test/oracle.h"

#include "llmc/matmul.cuh"

namespace {

template <class R> struct MatmulOracle {
    std::vector<R> out, dinp, dweight, dbias;

    MatmulOracle(const std::vector<R>& inp, const std::vector<R>& weight, const std::vector<R>& bias,
                 const std::vector<R>& residual, const std::vector<R>& dout, size_t N, size_t C, size_t OC)
        : out(N * OC), dinp(N * C), dweight(OC * C), dbias(OC) {
        for (size_t n = 0; n < N; n++) {
            for (size_t o = 0; o < OC; o++) {
                const R *x = &inp[n * C], *w = &weight[o * C];
                const R dy = dout[n * OC + o];
                R s = 0;
                for (size_t c = 0; c < C; c++) {
                    s += x[c] * w[c];
                    dinp[n * C + c] += dy * w[c];
                    dweight[o * C + c] += dy * x[c];
                }
                const R b = bias.empty() ? 0 : bias[o];
                out[n * OC + o] = s + b + (residual.empty() ? 0 : residual[n * OC + o]);
                dbias[o] += dy;
            }
        }
    }
};

void test_matmul(Random& random, size_t N, size_t C, size_t OC, bool with_bias, bool with_residual) {
    INFO("N " << N << ", C " << C << ", OC " << OC << ", bias " << with_bias << ", residual " << with_residual);
    const auto inp = random.normals(N * C);
    const auto weight = random.normals(OC * C);
    const auto dout = random.normals(N * OC);
    const auto bias = random.normals(with_bias ? OC : 0, 0, 3);
    const auto residual = random.normals(with_residual ? N * OC : 0, 0, 3);
    const auto dweight0 = random.normals(OC * C), dbias0 = random.normals(OC);
    MatmulOracle<double> want(as<double>(inp), as<double>(weight), as<double>(bias), as<double>(residual),
                              as<double>(dout), N, C, OC);
    MatmulOracle<float> plain(inp, weight, bias, residual, dout, N, C, OC);

    poison_shared();
    const Array<float> d_inp(inp), d_weight(weight), d_bias(bias), d_residual(residual), d_dout(dout);
    Array<float> out(N * OC), dinp(N * C), dweight(dweight0), dbias(dbias0), scratch(MAX_SLABS * OC);
    const floatX* bias_or_null = with_bias ? d_bias.p : nullptr;
    matmul_forward(out, view(d_inp.p, N, C), view(d_weight.p, OC, C), bias_or_null,
                   with_residual ? d_residual.p : nullptr, Stream(0));
    // partial sums of n terms of size 1 are of size sqrt(n), wherever they end
    check_close("matmul out", out.host(), want.out, plain.out, std::sqrt((double)C));

    if (!with_residual) {
        Array<float> whole(std::vector<float>(N * OC, NAN));                    // overwritten
        matmul_float(whole, view(d_inp.p, N, C), transposed(view(d_weight.p, OC, C)), bias_or_null, Stream(0));
        check_close("matmul_float", whole.host(), want.out, plain.out, std::sqrt((double)C));
    }

    matmul_backward(dinp, dweight, with_bias ? dbias.p : nullptr, scratch, d_dout, nullptr, view(d_inp.p, N, C),
                    view(d_weight.p, OC, C),
                    Stream(0));
    // overwritten; the rest accumulate
    check_close("matmul dinp", dinp.host(), want.dinp, plain.dinp, std::sqrt((double)OC));
    for (size_t i = 0; i < OC * C; i++) {
        want.dweight[i] += dweight0[i];
        plain.dweight[i] += dweight0[i];
    }
    check_close("matmul dweight", dweight.host(), want.dweight, plain.dweight, std::sqrt((double)N));
    for (size_t i = 0; i < OC; i++) {
        want.dbias[i] += dbias0[i];
        plain.dbias[i] += dbias0[i];
    }
    if (with_bias) { check_close("matmul dbias", dbias.host(), want.dbias, plain.dbias, std::sqrt((double)N)); }
    else { CHECK(same_bits(dbias.host(), dbias0)); }

    Array<float> dweight2(dweight0);
    matmul_backward(nullptr, dweight2, nullptr, scratch, d_dout, nullptr, view(d_inp.p, N, C), view(d_weight.p, OC, C),
                    Stream(0));
    CHECK(same_bits(dweight.host(), dweight2.host()));                  // dinp may be null
}

// Rows of out, residual and dout with `gap` NaN between them: the same bits as without, and the NaN stay
void test_rows_apart(Random& random, size_t N, size_t C, size_t OC, size_t gap) {
    INFO("N " << N << ", C " << C << ", OC " << OC << ", gap " << gap);
    const Array<float> inp(random.normals(N * C)), weight(random.normals(OC * C)), bias(random.normals(OC));
    const std::vector<float> residual = random.normals(N * OC), dout = random.normals(N * OC);
    struct Results { std::vector<float> out, dinp, dweight, dbias; };
    const auto apart = [&](const std::vector<float>& packed, size_t row) {
        std::vector<float> to(N * row, NAN);
        for (size_t n = 0; n < N; n++) { std::copy_n(&packed[n * OC], OC, &to[n * row]); }
        return to;
    };
    const auto run = [&](size_t row) {
        poison_shared();
        const Array<float> d_residual(apart(residual, row)), d_dout(apart(dout, row));
        Array<float> out(std::vector<float>(N * row, NAN)), dinp(N * C), scratch(MAX_SLABS * OC);
        Array<float> dweight(std::vector<float>(OC * C)), dbias(std::vector<float>(OC, 0.0f));
        const Matrix<const float> x = view(inp.p, N, C), w = view(weight.p, OC, C);
        matmul_forward(out, x, w, bias.p, d_residual.p, Stream(0), (int)row);
        matmul_backward(dinp, dweight, dbias, scratch, d_dout, nullptr, x, w, Stream(0), (int)row);
        return Results{out.host(), dinp.host(), dweight.host(), dbias.host()};
    };
    const Results packed = run(OC), wide = run(OC + gap);
    CHECK(same_bits(wide.out, apart(packed.out, OC + gap)));
    CHECK(same_bits(wide.dinp, packed.dinp));
    CHECK(same_bits(wide.dweight, packed.dweight));
    CHECK(same_bits(wide.dbias, packed.dbias));
}

// block_matmul on its own
template <bool Add> __global__ void block_matmul_kernel(Matrix<float> out, Matrix<const float> A,
                                                        Matrix<const float> B) {
    if (Add) { block_matmul_add(out, A, B); } else { block_matmul(out, A, B); }
}

template <bool Add> void test_block_matmul(Random& random, int M, int N, int K, bool turned) {
    INFO("block_matmul M " << M << ", N " << N << ", K " << K << ", A transposed " << turned << ", += " << Add);
    const int ldb = N + LANES;
    const int ldc = N + 2 * LANES;
    const int lda = (turned ? M : K) + 3;
    const auto A = random.normals((size_t)lda * (turned ? K : M)), B = random.normals((size_t)K * ldb);
    const auto C0 = Add ? random.normals((size_t)M * ldc) : std::vector<float>((size_t)M * ldc, NAN);
    const int a_row = turned ? 1 : lda;
    const int a_col = turned ? lda : 1;
    const Array<float> d_A(A), d_B(B);
    Array<float> d_C(C0);
    const Matrix<float> in_memory = turned ? view(d_A.p, K, M, lda) : view(d_A.p, M, K, lda);
    launch(block_matmul_kernel<Add>, Grid(1, 64, 0, Stream(0)), view(d_C.p, M, N, ldc),
           turned ? transposed(in_memory) : in_memory, view(d_B.p, K, N, ldb));
    const std::vector<float> got = d_C.host();
    bool untouched = true;
    std::vector<float> inside, plain;
    std::vector<double> want;
    for (int m = 0; m < M; m++) {
        for (int n = 0; n < ldc; n++) {
            const size_t e = (size_t)m * ldc + n;
            if (n >= N) {
                untouched = untouched && memcmp(&got[e], &C0[e], sizeof(float)) == 0;
                continue;
            }
            double s = Add ? C0[e] : 0;
            float f = (float)s;
            for (int k = 0; k < K; k++) {
                const float a = A[(size_t)m * a_row + (size_t)k * a_col], b = B[(size_t)k * ldb + n];
                s += (double)a * b;
                f += a * b;
            }
            inside.push_back(got[e]);
            want.push_back(s);
            plain.push_back(f);
        }
    }
    CHECK(untouched);
    check_close("block_matmul", inside, want, plain, std::sqrt((double)K));
}

} // namespace

TEST_CASE("matmul oracle: its backward is its forward's derivative", "[matmul]") {
    Random random;
    INFO(random);
    const size_t N = 3, C = 4;
    const size_t OC = 5;
    auto inp = as<double>(random.normals(N * C));
    auto weight = as<double>(random.normals(OC * C));
    auto bias = as<double>(random.normals(OC));
    const auto dout = as<double>(random.normals(N * OC)), residual = as<double>(random.normals(N * OC));
    const MatmulOracle<double> o(inp, weight, bias, residual, dout, N, C, OC);
    auto loss = [&] { return dot(MatmulOracle<double>(inp, weight, bias, residual, dout, N, C, OC).out, dout); };
    check_gradient("dinp", loss, inp, o.dinp, random);
    check_gradient("dweight", loss, weight, o.dweight, random);
    check_gradient("dbias", loss, bias, o.dbias, random);
}

TEST_CASE("matmul, small shapes", "[matmul][asan]") {
    Random random;
    INFO(random);
    for (size_t N : {1, 2, 37}) {
        for (size_t C : {1, 3, 37}) {
            for (size_t OC : {1, 8, 37}) { test_matmul(random, N, C, OC, (N + C) % 2 == 0, (C + OC) % 3 == 0); }
        }
    }
    test_matmul(random, 70, 20, 65, true, true);
}

TEST_CASE("matmul, every edge of a tile", "[matmul][asan]") {
    Random random;
    INFO(random);
    for (size_t N : {64, 127, 257, 513}) {
        for (size_t OC : {33, 130, 264}) { test_matmul(random, N, 64, OC, true, N % 2 == 0); }
    }
    for (size_t C : {255, 256, 257, 770}) { test_matmul(random, 37, C, 70, false, true); }      // slices of K
    for (int k = 0; k < 12; k++) {
        const size_t N = (size_t)random.integer(1, 300);
        const size_t C = (size_t)random.integer(1, 90);
        const size_t OC = (size_t)random.integer(1, 600);
        test_matmul(random, N, C, OC, k % 2 == 0, k % 3 == 0);
    }
}

TEST_CASE("matmul, rows that are further apart than they are long", "[matmul][asan]") {
    Random random;
    INFO(random);
    for (size_t OC : {8, 37, 264}) {
        for (size_t gap : {1, 8}) { test_rows_apart(random, 130, 20, OC, gap); }
    }
}

TEST_CASE("matmul, large shapes", "[matmul]") {
    Random random;
    INFO(random);
    test_matmul(random, 1000, 64, 770, true, true);
    test_matmul(random, 2, 64, 30522, false, false);                // a head
    test_matmul(random, 1, 770, 2310, true, false);                 // generation
    test_matmul(random, 2600, 20, 37, true, false);                 // more rows than slabs of 32
}

#if defined(MATMUL_GEMM)
// gemm() by the panels of Way, against the order that base/gemm.h states
template <class T, class Way> void check_order(const char* what) {
    Random random;
    INFO(random);
    const auto draw = [&](size_t n) { return as<T>(random.normals(n)); };
    for (int n = 0; n < 60; n++) {
        const int M = n % 4 == 0 ? 1 : random.integer(1, 80), N = random.integer(1, 80);
        const int K = random.integer(1, 600), gap = random.integer(0, 5);
        const bool turned_A = random.integer(0, 1) == 1, turned_B = random.integer(0, 1) == 1;
        INFO(what << ": M " << M << ", N " << N << ", K " << K << ", transposed " << turned_A << turned_B << ", gap "
                  << gap);
        const std::vector<T> a = draw((size_t)(M + gap) * (K + gap)), b = draw((size_t)(K + gap) * (N + gap));
        auto want = random.normals((size_t)M * (N + gap)), got = want;
        const T *pa = a.data(), *pb = b.data();
        const Matrix<const T> A = turned_A ? transposed(view(pa, K, M, M + gap)) : view(pa, M, K, K + gap);
        const Matrix<const T> B = turned_B ? transposed(view(pb, N, K, K + gap)) : view(pb, K, N, N + gap);
        std::vector<float> panels(gemm_panels(M) + 1, NAN);
        gemm_by<Way>(view(got.data(), M, N, N + gap), A, B, panels.data());
        CHECK(std::isnan(panels.back()));
        constexpr bool FLOAT = std::is_same<T, float>::value;
        constexpr int CHAINS = FLOAT ? 1 : 2;
        constexpr int SLICE = FLOAT ? 256 : 32;
        for (int m = 0; m < M; m++) {
            for (int c = 0; c < N; c++) {
                for (int k0 = 0; k0 < K; k0 += SLICE) {
                    float sum[2] = {};
                    for (int k = k0; k < std::min(K, k0 + SLICE); k++) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
                        sum[k % CHAINS] = std::fma((float)A(m, k), (float)B(k, c), sum[k % CHAINS]);
#else
                        sum[k % CHAINS] += (float)A(m, k) * (float)B(k, c);
#endif
                    }
                    want[(size_t)m * (N + gap) + c] += CHAINS == 1 ? sum[0] : sum[0] + sum[1];
                }
            }
        }
        CHECK(same_bits(got, want));                                // and what is beside the output is as it was
    }
}

TEST_CASE("gemm: each sum has the order that base/gemm.h states", "[matmul][asan]") {
    check_order<float, GemmLanes<float>>("float32");
    check_order<bf16, GemmLanes<bf16>>("bf16");
    if (amx_permitted()) { check_order<bf16, GemmTiles<AmxTiles>>("bf16, tiles"); }
}
TEST_CASE("gemm: AMX computes that order", "[matmul]") {
    if (AMX_STAND_IN) { WARN("SKIPPED: this processor has no AMX: plain C stood in for its instructions"); }
    else if (!amx_permitted()) { WARN("SKIPPED: the kernel does not permit AMX"); }
    else { check_order<bf16, GemmTiles<AmxTiles>>("bf16, tiles"); }
}
TEST_CASE("gemm: bf16 tiles and lanes agree on zeros, denormals and infinities", "[matmul]") {
    Random random;
    INFO(random);
    const float odd_ones[] = {0.0f, -0.0f, 1e-40f, -1e-40f, 1.2e-38f, 1e-20f, -1e-20f, 3e38f, INFINITY, 1.0f, -1.0f};
    for (int K : {1, 31, 33, 70}) {
        const int M = 33, N = 47;
        std::vector<bf16> a((size_t)M * K), b((size_t)K * N);
        for (auto* v : {&a, &b}) { for (bf16& x : *v) { x = (bf16)odd_ones[random.integer(0, 10)]; } }
        const bf16 *pa = a.data(), *pb = b.data();
        std::vector<float> lanes_out((size_t)M * N, -0.0f), tiles_out = lanes_out, panels(gemm_panels(M));
        gemm_by<GemmLanes<bf16>>(view(lanes_out.data(), M, N), view(pa, M, K), view(pb, K, N), panels.data());
        gemm_by<GemmTiles<AmxTiles>>(view(tiles_out.data(), M, N), view(pa, M, K), view(pb, K, N), panels.data());
        for (auto* v : {&lanes_out, &tiles_out}) { for (float& x : *v) { x = std::isnan(x) ? NAN : x; } }
        CHECK(same_bits(lanes_out, tiles_out));
    }
}
#endif

TEST_CASE("matmul: same bits for any number of threads", "[matmul]") {
    Random random;
    INFO(random);
    const size_t N = 600, C = 130;
    const size_t OC = 530;
    const Array<float> inp(random.normals(N * C)), weight(random.normals(OC * C));
    const Array<float> bias(random.normals(OC)), residual(random.normals(N * OC));
    const Array<float> dout(random.normals(N * OC));
    check_thread_invariance([&] {
        Array<float> out(N * OC), dinp(N * C), scratch(MAX_SLABS * OC);
        Array<float> dweight(std::vector<float>(OC * C, 0.0f)), dbias(std::vector<float>(OC, 0.0f));
        matmul_forward(out, view(inp.p, N, C), view(weight.p, OC, C), bias, residual, Stream(0));
        matmul_backward(dinp, dweight, dbias, scratch, dout, nullptr, view(inp.p, N, C), view(weight.p, OC, C),
                        Stream(0));
        std::vector<float> all = out.host();
        for (const Array<float>* a : {&dinp, &dweight, &dbias}) {
            const std::vector<float> v = a->host();
            all.insert(all.end(), v.begin(), v.end());
        }
        return all;
    });
}

TEST_CASE("matmul hands a NaN on", "[matmul]") {
    const size_t N = 5, C = 37;
    const size_t OC = 9;
    std::vector<float> inp(N * C, 1.0f);
    inp[2 * C + 30] = NAN;
    Array<float> out(N * OC);
    const Array<float> d_inp(inp), d_weight(std::vector<float>(OC * C, 0.0f));
    matmul_forward(out, view(d_inp.p, N, C), view(d_weight.p, OC, C), nullptr, nullptr, Stream(0));
    const std::vector<float> got = out.host();
    for (size_t i = 0; i < N * OC; i++) { CHECK(std::isnan(got[i]) == (i / OC == 2)); }    // 0 * NaN, too
}

TEST_CASE("block_matmul, every edge of a fragment", "[matmul][asan]") {
    Random random;
    INFO(random);
    for (int M : {1, 2, MICRO_M - 1, MICRO_M, MICRO_M + 1, 2 * MICRO_M, 3 * MICRO_M + 1}) {
        for (int n : {1, MICRO_N - 1, MICRO_N, MICRO_N + 1, 3 * MICRO_N, 3 * MICRO_N + 1}) {
            for (int K : {1, 2, 37}) {
                test_block_matmul<false>(random, M, n * LANES, K, M % 2 == 0);
                test_block_matmul<true>(random, M, n * LANES, K, n % 2 == 0);
            }
        }
    }
}
