// test_adamw.cu -- the bf16 copy of the weights: rounded without bias, by a draw that a resumed run repeats.
#include "llmc/adamw.cuh"
#include "test/simt/kernel_test.h"

#if defined(PRECISION_FP32)
#error "float32 builds have no copy to round"
#endif

static std::vector<float> rounded(const std::vector<float>& master, uint64_t seed, int t, const char* name = "w") {
    TensorTable table;
    table.add({name, 0, master.size(), 0});
    DeviceArray<float> from(master);
    DeviceArray<bf16> to(master.size());
    round_weights(to.p, from.p, table, {0, table.total}, seed, t, Stream(0));
    return to_float(to.host());
}

KERNEL_TEST("rounding is unbiased and goes to a neighbour") {
    const size_t n = 20000;
    for (float part : {0.1f, 0.5f, 0.8f}) {    // bf16 has 8 bits: the neighbours of 1 + part/128 are 1 and 1 + 1/128
        for (float sign : {1.0f, -1.0f}) {
            const std::vector<float> r = rounded(std::vector<float>(n, sign * (1.0f + part / 128)), 7, 3);
            size_t up = 0;
            for (float x : r) {
                EXPECT(x == sign || x == sign * (1.0f + 1.0f / 128), "%g is not a neighbour of %g", x,
                       1.0f + part / 128);
                up += x != sign;
            }
            const double sigma = std::sqrt(n * part * (1 - part));
            EXPECT(std::abs((double)up - n * part) < 5 * sigma, "%zu of %zu rounded away from 0, expected %.0f +- %.0f",
                   up, n, n * part, sigma);
        }
    }
}

KERNEL_TEST("the draw depends on seed, update, tensor and element, and on nothing else") {
    const std::vector<float> w(5000, 1.0f + 0.5f / 128);
    const std::vector<float> r = rounded(w, 7, 3);
    EXPECT(r == rounded(w, 7, 3), "two roundings differ");
    auto agreement = [&](const std::vector<float>& other) {
        size_t same = 0;
        for (size_t i = 0; i < w.size(); i++) { same += r[i] == other[i]; }
        return (double)same / (double)w.size();
    };
    EXPECT(std::abs(agreement(rounded(w, 8, 3)) - 0.5) < 0.05, "another seed: %g agree", agreement(rounded(w, 8, 3)));
    EXPECT(std::abs(agreement(rounded(w, 7, 4)) - 0.5) < 0.05, "another update: %g agree", agreement(rounded(w, 7, 4)));
    EXPECT(std::abs(agreement(rounded(w, 7, 3, "v")) - 0.5) < 0.05, "another tensor: %g agree",
           agreement(rounded(w, 7, 3, "v")));
}

KERNEL_TEST("t = 0 rounds to the nearest; exact values, infinities and NaN stay") {
    const std::vector<float> w = {1.0f + 0.4f / 128, 1.0f + 0.6f / 128, 0.0f, -0.0f, 3.0f,
                                  INFINITY,          -INFINITY,         NAN,  1e-30f};
    const std::vector<float> nearest = rounded(w, 7, 0), drawn = rounded(w, 7, 5);
    EXPECT(nearest[0] == 1.0f && nearest[1] == 1.0f + 1.0f / 128, "%g, %g", nearest[0], nearest[1]);
    for (const auto& r : {nearest, drawn}) {
        EXPECT(r[2] == 0.0f && r[3] == 0.0f && r[4] == 3.0f, "%g %g %g", r[2], r[3], r[4]);
        EXPECT(r[5] == INFINITY && r[6] == -INFINITY && r[7] != r[7], "%g %g %g", r[5], r[6], r[7]);
        EXPECT(std::abs(r[8] / 1e-30f - 1.0f) < 1.0f / 128, "%g", r[8]);
    }
}

KERNEL_TEST("what a resumed run rounds is what the update left, and updates below bf16's resolution are not lost") {
    // two tensors, one of them in two layers that are not side by side, cut where another rank's slice would begin
    TensorTable table;
    table.add({"v", 0, 1000, 0});
    table.add({"w", 2, 1500, 0});
    table.strides[1] += 64;
    table.total += 64;
    const size_t n = table.total, cut = 1024 + 1500 + 64 + 76;
    AdamWTable all;
    for (const Slice slice : {Slice{0, cut}, Slice{cut, n}}) {
        for (const TensorPiece& piece : table.pieces(slice)) {
            all.add(table.specs[piece.tensor], piece, piece.at, piece.at, piece.at);
        }
    }
    EXPECT(all.pieces.size() == 4, "%zu pieces", all.pieces.size());
    all.upload(Stream(0));
    const std::vector<float> ones(n, 1.0f);
    DeviceArray<float> master(ones), grads(ones), m(std::vector<float>(n, 0.0f)), v(std::vector<float>(n, 0.0f));
    DeviceArray<bf16> weights(to_bf16(ones)), anew(to_bf16(ones));
    for (int t = 1; t <= 3; t++) {
        const AdamW a = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.0f, 1.0f, t, 11};
        adamw_update(weights.p, master.p, grads.p, m.p, v.p, all, a, Stream(0));
    }
    all.release();
    EXPECT(!error_of([&] { all.add(table.specs[0], {0, 0, 2, 8}, 2, 2, 2); }).empty(), "a piece that begins at 2");
    round_weights(anew.p, master.p, table, {0, n}, 11, 3, Stream(0));
    std::vector<float> w = to_float(weights.host());
    EXPECT(w == to_float(anew.host()), "rounding the master weights again gives other bits");
    w.resize(1000);
    double mean = 0.0;
    for (float x : w) { mean += x; }
    mean /= (double)w.size();
    // three steps of 1e-3 with constant gradients; half a unit in the last place below 1 is 2e-3, so one step rounds
    // back to 1
    EXPECT(std::abs(mean - 0.997) < 6e-4, "the mean is %g after three steps of 1e-3 from 1", mean);
}
