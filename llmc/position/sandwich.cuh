// position/sandwich.cuh -- products of sinusoidal embeddings as a bias (Sandwich: Chi et al. 2023), nothing learned.
//
//   B_ij = (pe_i.pe_j - d/2) / c_h = sum_{k < d/2} (cos((i-j) / 10000^(2k/d)) - 1) / c_h      c_h = 8(h+1)/NH
//
// pe (T,d) are the sines and cosines of sinusoidal.cuh. d is a hyperparameter, 128 as in the paper, and no width of the
// model. The d/2 changes no probability, and makes B_ii = 0. k counts from 0, as in a sinusoidal embedding; a sum over
// k = 1 .. d/2 would be a slightly different bias. B falls about as log |i-j| does, but not steadily, so no tile of it
// is skipped.
#pragma once

#include "toeplitz.cuh"

// table (NH,columns), laid out as in toeplitz.cuh. The cosines of a distance are summed once for all heads, in double
// because a float angle is off by 0.004 at a distance of 100,000.
static __global__ void sandwich_table_kernel(float* table, int d, int T, int NH, int columns) {
    const double step = portable_pow(10000.0, -2.0 / d);
    const GridSpan s = grid_span((size_t)columns);
    for (size_t n = s.begin; n < s.end; n += s.step) {
        double angle = fabs((double)(T - 1 - (int)n));      // |i-j|, in radians for k = 0
        double sum = 0.0;
        for (int k = 0; k < d / 2; k++) {
            sum += portable_cos(angle) - 1.0;
            angle *= step;
        }
        for (int h = 0; h < NH; h++) { table[(size_t)h * columns + n] = (float)(sum * NH / (8.0 * (h + 1))); }
    }
}

struct Sandwich : Toeplitz {
    using Toeplitz::Toeplitz;
    static constexpr int MOST = 1 << 16;

    static Hyperparameters defaults(int) { return {{"d", 128}}; }
    template <class Tensors> void declare(Tensors& t) {
        const double d = t.config->value("d");
        check(d == 2 * std::floor(d / 2) && d <= MOST, "--pos sandwich: expected an even d up to %d, got %g", MOST, d);
        declare_table(t, Per::Model);
    }
    void prepare_forward(floatX*, int, int, Start start, Stream stream) const {
        if (v.layer > 0 || !start.begins()) { return; }     // the first layer fills it, once for all tokens
        const int d = (int)v.config->value("d");
        launch(sandwich_table_kernel, Grid::over((size_t)columns(), stream), table, d, v.stride, v.NH, columns());
    }
};
