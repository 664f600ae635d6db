// matmul.cu -- six ways to multiply two matrices on one CPU thread. ladder.h says how to build and run it; only
// the first of its commands is for this one.
//
//   C_mn = sum over k of A_mk B_kn
//
// Each element of A is needed N times and each of B M times. All rungs do the same 2 M N K operations; they differ in
// where the operands are when they are needed: in memory, in a cache, or in a register. (On a GPU the same idea has
// other names: attention_forward.cu climbs there from global to shared memory and to fragments.)
#include "ladder.h"

#include "llmc/matmul.cuh"

using In = Matrix<const float>;
using Out = Matrix<float>;

// ----------------------------------------------------------------------------------------------------------
// rung 1: the equation as it stands
//
// One sum after the other. The inner loop goes down a column of B: each step touches another cache line and uses four
// bytes of it.

void matmul1(const Out& C, const In& A, const In& B) {
    for (int m = 0; m < C.rows; m++) {
        for (int n = 0; n < C.cols; n++) {
            float sum = 0.0f;
            for (int k = 0; k < A.cols; k++) { sum += A(m, k) * B(k, n); }
            C(m, n) = sum;
        }
    }
}

// ----------------------------------------------------------------------------------------------------------
// rung 2: the loops exchanged
//
// Now the inner loop goes along a row of B and a row of C: whole cache lines, and as many columns at a time as a
// register holds. But each element of C is loaded and stored K times, and all of B is read again for each row of A.

void matmul2(const Out& C, const In& A, const In& B) {
    for (int m = 0; m < C.rows; m++) {
        float* c = C.row(m);
        std::fill_n(c, C.cols, 0.0f);
        for (int k = 0; k < A.cols; k++) {
            const float a = A(m, k);
            const float* b = B.row(k);
            SIMD
            for (int n = 0; n < C.cols; n++) { c[n] += a * b[n]; }
        }
    }
}

// ----------------------------------------------------------------------------------------------------------
// rung 3: a fragment of C in registers
//
// A fragment of 4 rows and MICRO_N registers of columns stays in registers for all k: 4 + MICRO_N loads for 4 x MICRO_N
// multiplications of a whole register, and no store. B is read once for each 4 rows.

void matmul3(const Out& C, const In& A, const In& B) { block_matmul<false, 4>(C, A, B); }

// ----------------------------------------------------------------------------------------------------------
// rung 4: a larger fragment
//
// A fused multiply-add takes 4 cycles, and two units start one each in every cycle. A sum waits for its last addition,
// so 4 x 2 sums keep the units busy only if no load is ever late. With 6 rows (AVX-512: 8) there are 12 sums (16) and a
// reserve, and fewer loads for each multiplication. This is block_matmul, the product in attention's tiles.

void matmul4(const Out& C, const In& A, const In& B) { block_matmul(C, A, B); }

// ----------------------------------------------------------------------------------------------------------
// rung 5: blocks
//
// The same on a block of B that stays in the cache while all fragments of its columns pass over it. Their sums are
// added to C once for each block of k.

constexpr int BLOCK_K = 256, BLOCK_N = 128;                 // 128 kB of B

void matmul5(const Out& C, const In& A, const In& B) {
    for (int m = 0; m < C.rows; m++) { std::fill_n(C.row(m), C.cols, 0.0f); }
    for (int n = 0; n < C.cols; n += BLOCK_N) {
        for (int k = 0; k < A.cols; k += BLOCK_K) {
            block_matmul_add(block(C, 0, C.rows, n, BLOCK_N), block(A, 0, A.rows, k, BLOCK_K),
                             block(B, k, BLOCK_K, n, BLOCK_N));
        }
    }
}

// ----------------------------------------------------------------------------------------------------------
// rung 6, shipped: panels
//
// What is left is where A and B lie: the rows of a fragment are K apart, so they compete for the same few places in the
// cache, and a transposed matrix would be read down its columns. gemm() first copies both into panels, in the order in
// which its inner loop reads them. Its fragment is as large as the registers allow, 12 x 32 with AVX-512.

void matmul6(const Out& C, const In& A, const In& B) {
    static std::vector<float> panels;
    panels.resize(gemm_panels(C.rows));
    for (int m = 0; m < C.rows; m++) { std::fill_n(C.row(m), C.cols, 0.0f); }
    gemm(C, A, B, panels.data());
}

// ----------------------------------------------------------------------------------------------------------

template <class R> std::vector<R> oracle(const std::vector<R>& a, const std::vector<R>& b, int M, int N, int K) {
    std::vector<R> c((size_t)M * N);
    for (int m = 0; m < M; m++) {
        for (int k = 0; k < K; k++) {
            for (int n = 0; n < N; n++) { c[(size_t)m * N + n] += a[(size_t)m * K + k] * b[(size_t)k * N + n]; }
        }
    }
    return c;
}

int main(int argc, char** argv) {
    return run_ladder([&] {
        Ladder ladder(argc, argv, {{"M", 252, 252}, {"N", 1024, 1024}, {"K", 1536, 1536}});
        const int M = ladder.size(0), N = ladder.size(1);
        const int K = ladder.size(2);
        check(N % LANES == 0, "N: expected a multiple of %d, the width of a register, got %d", LANES, N);
        const std::vector<float> a = normals((size_t)M * K, 1), b = normals((size_t)K * N, 2);
        const std::vector<double> want = oracle(as<double>(a), as<double>(b), M, N, K);
        const std::vector<float> plain = oracle(a, b, M, N, K);
        const struct {
            const char* idea;
            void (*run)(const Out&, const In&, const In&);
            const char* no_gain = "";
        } rungs[] = {
            {"three loops: the equation as it stands", matmul1},
            {"the loops exchanged: along rows", matmul2},
            {"a fragment of C stays in registers", matmul3, "with AVX2: each sum waits for its own last addition"},
            {"a larger fragment hides the latency", matmul4},
            {"blocks of B stay in the cache", matmul5},
            {"shipped: panels, in the order of the reads", matmul6},
        };
        for (const auto& rung : rungs) {
            if (!ladder.begin(rung.idea, rung.no_gain)) { continue; }
            std::vector<float> c((size_t)M * N, NAN);
            const auto run = [&] { rung.run(view(c.data(), M, N), view(a.data(), M, K), view(b.data(), K, N)); };
            run();
            ladder.compare("C", c, want, plain);
            ladder.end(run, 2e-9 * M * N * K, "GFLOP");
        }
        return ladder.exit_code();
    });
}
