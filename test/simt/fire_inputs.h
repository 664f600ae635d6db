// fire_inputs.h -- FIRE's parameters for the tests of the tensor-core kernels: f and its derivatives in double,
// straight from the definition, and what the kernels read, made by the encoding's own kernels.
#pragma once

#include <algorithm>
#include <cmath>

#include "llmc/attention/flash/tiles.cuh"
#include "llmc/position/fire.cuh"
#include "test/simt/kernel_test.h"

struct FireInputs {
    double c = 0.3, L = 40.5;                       // positions on both sides of L
    std::vector<double> w1, b1, w2, b2;             // float values: (32), (32), (NH,32), (NH)

    // 24 breaks where y is, the other units on or off everywhere
    FireInputs(int NH, uint64_t seed) {
        c = (float)c;
        L = (float)(L / 512) * 512.0;
        const std::vector<float> x = normals(3 * FIRE_UNITS, seed);
        const std::vector<float> w = normals((size_t)NH * (FIRE_UNITS + 1), seed + 1);
        for (size_t k = 0; k < FIRE_UNITS; k++) {
            const double at = k < 24 ? 0.95 * (k + 0.5) / 24 + 0.01 * std::tanh(x[k]) : 1.5 + std::fabs(x[k]);
            const float slope = (0.2f + std::fabs(x[FIRE_UNITS + k])) * (x[2 * FIRE_UNITS + k] < 0 ? -1.0f : 1.0f);
            w1.push_back(slope);
            b1.push_back((float)(-at * slope));
        }
        w2.assign(w.begin(), w.begin() + NH * FIRE_UNITS);
        b2.assign(w.begin() + NH * FIRE_UNITS, w.end());
    }

    static double psi(double a, double x) { return std::log1p(a * x); }
    double norm(int t) const { return psi(c, std::max(L, (double)t)) + 1e-6; }      // of the later position
    double y(int i, int j) const { return psi(c, std::abs(i - j)) / norm(std::max(i, j)); }
    double f(int h, double y) const {
        double sum = b2[(size_t)h];
        for (size_t k = 0; k < FIRE_UNITS; k++) {
            sum += w2[(size_t)h * FIRE_UNITS + k] * std::max(0.0, w1[k] * y + b1[k]);
        }
        return sum;
    }
    int piece(double y) const {
        int n = 0;
        for (size_t k = 0; k < FIRE_UNITS; k++) {
            const double at = -b1[k] / w1[k];
            n += at > 0 && at < 1 && at <= y;
        }
        return n;
    }
    bool is_on(size_t k, int piece) const {         // in the middle of it
        std::vector<double> ends = {0.0, 1.0};
        for (size_t n = 0; n < FIRE_UNITS; n++) {
            const double at = -b1[n] / w1[n];
            if (at > 0 && at < 1) { ends.push_back(at); }
        }
        std::sort(ends.begin(), ends.end());
        return (size_t)piece + 1 < ends.size() && w1[k] * (ends[piece] + ends[piece + 1]) / 2 + b1[k] > 0;
    }
    // s (4) += what a pair adds to the sums of its piece
    void add(double* s, int i, int j, double dlogit) const {
        const double d = std::abs(i - j);
        const double x = std::max(L, (double)std::max(i, j)), n = norm(std::max(i, j));
        const double by_c = (d / (1 + c * d) - y(i, j) * x / (1 + c * x)) / n;
        const double norm_by_L = std::max(i, j) < L ? c / (1 + c * x) : 0.0;
        s[0] += dlogit;
        s[1] += dlogit * y(i, j);
        s[2] += dlogit * by_c;
        s[3] += dlogit * y(i, j) / n * norm_by_L;
    }
};

// On the device, for texts of up to T tokens
struct FireArrays {
    int NH, T, columns;
    DeviceArray<float> c, l, w1, b1, w2, b2, psi, inv, dpsi, dnorm;
    DeviceArray<FirePiece> pieces;

    static std::vector<float> floats(const std::vector<double>& x) { return std::vector<float>(x.begin(), x.end()); }
    FireArrays(const FireInputs& x, int NH, int T, bool causal)
        : NH(NH), T(T), columns(toeplitz_columns(T, causal)), c(std::vector<float>{-(float)x.c}),
          l(std::vector<float>{(float)(x.L / 512)}), w1(floats(x.w1)), b1(floats(x.b1)), w2(floats(x.w2)),
          b2(floats(x.b2)), psi((size_t)columns), inv((size_t)T + TOEPLITZ_PAD), dpsi((size_t)columns),
          dnorm((size_t)2 * (T + TOEPLITZ_PAD)), pieces((size_t)NH * FIRE_PIECES) {
        const Grid one(1, 128, sizeof(int) * FIRE_UNITS, Stream(0));
        const Grid heads((size_t)NH, 64, sizeof(int) * FIRE_UNITS, Stream(0));
        launch(fire_forward_kernel, one, psi.p, inv.p, c.p, l.p, T, columns);
        launch(fire_slopes_kernel, one, dpsi.p, dnorm.p, c.p, l.p, T, columns);
        launch(fire_pieces_kernel, heads, pieces.p, w1.p, b1.p, w2.p, b2.p);
        CUDA_CHECK(cudaDeviceSynchronize());
    }
    void fill(FlashArgs& a) const {
        a.table = psi.p;
        a.table_zero = T - 1;
        a.table_entries = columns;
        a.inv = inv.p;
        a.dpsi = dpsi.p;
        a.dnorm = dnorm.p;
        a.pieces = pieces.p;
    }
};
