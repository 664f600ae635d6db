// fma.cu -- the limit of every product on this CPU: GFLOP/s of multiply-adds that wait for nothing. dev/bench/bench.py
// builds it and runs it between the other measurements.
#include <algorithm>

#include "llmc/base/device.h"

int main() {
    constexpr int SUMS = 12;                                    // which hide an addition's latency
    constexpr int STEPS = 100000, PIECES = 40;
    float left[SUMS * LANES] = {};                              // a result that is read
    double fastest = 1e30;
    int threads = 1;
    for (int p = 0; p < PIECES; p++) {
        const double start = wall_seconds();
#pragma omp parallel
        {
            volatile float unknown = 0.5f;                      // so that the compiler computes nothing itself
            const float a = unknown;
            const lanes b = lanes{} + a;
            lanes sum[SUMS];
            for (int i = 0; i < SUMS; i++) { sum[i] = b * unknown; }
            for (int k = 0; k < STEPS; k++) {
                UNROLL
                for (int i = 0; i < SUMS; i++) { sum[i] = fused_madd(a, b, sum[i]); }
            }
#pragma omp single
            {
                threads = omp_get_num_threads();
                for (int i = 0; i < SUMS; i++) { store_lanes(left + i * LANES, sum[i]); }
            }
        }
        fastest = std::min(fastest, wall_seconds() - start);
    }
    check(left[0] > 0.0f && left[SUMS * LANES - 1] > 0.0f, "expected sums above 0, got %g", (double)left[0]);
    printf("%.1f GFLOP/s, %d threads\n", 2e-9 * SUMS * LANES * STEPS * threads / fastest, threads);
    return 0;
}
