// test_flash_long.cu -- the tensor-core attention against the portable kernels, which test_encodings.cu holds against
// float64: lengths for which a float64 oracle takes too long, and as many heads as a batch has. Bounds: twice the error
// measured where bf16 is stored; for float32 sums (1e-6 at T = 150) what a longer sum may add. And what float32 costs
// in a sum over very many keys.
#include "llmc/attention/choose.cuh"

#include "test/simt/kernel_test.h"
#include "test/simt/shared_flash.h"

namespace {

const Stream stream = nullptr;
using Floats = std::vector<float>;

template <class Bias> struct Case {
    int B;
    int T;
    int NH;
    int HS;
    int C = NH * HS;
    int OC = round_up(3 * C + 2 * NH, 8);
    int BNH = B * NH;
    size_t tokens = (size_t)B * T, rows = (size_t)BNH * T;
    DeviceArray<bf16> qkv, dout, out[2], dqkv[2];
    DeviceArray<float> lse[2], S_offset, g, dS[2], dg[2], table, dtable[2];
    DeviceArray<double> S_origin;

    Case(int B, int T, int NH, int HS, bool causal)
        : B(B), T(T), NH(NH), HS(HS), qkv(to_bf16(normals((size_t)B * T * OC, 1))),
          dout(to_bf16(normals((size_t)B * T * C, 2))), out{DeviceArray<bf16>(tokens * C),
                                                            DeviceArray<bf16>(tokens * C)},
          dqkv{DeviceArray<bf16>(tokens * OC), DeviceArray<bf16>(tokens * OC)}, lse{DeviceArray<float>(rows),
                                                                                    DeviceArray<float>(rows)},
          S_offset(rows), g(rows), dS{zeros(rows), zeros(rows)}, dg{zeros(rows), zeros(rows)},
          table(normals((size_t)NH * toeplitz_columns(T, causal), 3)),
          dtable{zeros((size_t)BNH * toeplitz_columns(T, causal)), zeros((size_t)BNH * toeplitz_columns(T, causal))},
          S_origin((size_t)BNH * ceil_div(T, CABLE_CHUNK)) {
        cable_forward(S_offset.p, S_origin.p, g.p, (const floatX*)qkv.p, {T, NH, HS, OC}, B, T, 0, CableStep::Relu,
                      true, stream);
    }
    static DeviceArray<float> zeros(size_t n) { return DeviceArray<float>(Floats(n, 0.0f)); }
    // side 0: portable, 1: tensor cores
    Bias bias(int side, bool causal, const float* slopes) {
        if constexpr (std::is_same<Bias, NoBias>::value) { return {}; }
        else if constexpr (std::is_same<Bias, LinearBias>::value) { return {{}, slopes, NH};
        } else if constexpr (std::is_same<Bias, ToeplitzBias>::value) {
            return {{}, table.p, dtable[side].p, NH, toeplitz_columns(T, causal), T};
        } else {
            Bias bias = {};
            (CableBias&)bias = {{}, S_offset.p, g.p, S_origin.p, dS[side].p, dg[side].p, T,
                                (int)ceil_div(T, CABLE_CHUNK)};
            return bias;
        }
    }
};

// columns first .. first + n - 1 of rows of OC
Floats columns(const std::vector<bf16>& v, int OC, int first, int n) {
    Floats x;
    for (size_t r = 0; r < v.size() / (size_t)OC; r++) {
        for (int c = first; c < first + n; c++) { x.push_back((float)v[r * OC + c]); }
    }
    return x;
}

template <bool Causal, class Bias> void compare(const char* name, int B, int T, int NH, int HS) {
    constexpr FlashBias Kind = Bias::flash;
    Case<Bias> x(B, T, NH, HS, Causal);
    DeviceArray<float> slopes((size_t)NH), portable_scratch(portable_attention_backward_scratch(B, T, NH, HS));
    launch(alibi_slopes_kernel, Grid(1, 32, 0, stream), slopes.p, NH, false, 1.0f);
    const AttentionDims dims = {T, 0, T, NH, HS, x.OC, 1 / sqrtf((float)HS)};
    const Bias portable = x.bias(0, Causal, slopes.p);
    const floatX *qkv = (const floatX*)x.qkv.p, *dout = (const floatX*)x.dout.p;
    floatX *out = (floatX*)x.out[0].p, *dqkv = (floatX*)x.dqkv[0].p;
    portable_attention_forward<Causal>(out, x.lse[0].p, qkv, portable, dims, B, stream);
    portable_attention_backward<Causal>(dqkv, portable_scratch.p, dout, qkv, out, x.lse[0].p, portable, dims, B,
                                        stream);

    FlashArgs f = flash_args(x.bias(1, Causal, slopes.p), dims, B, qkv);
    f.out = x.out[1].p;
    f.lse = x.lse[1].p;
    EXPECT((flash_forward<Causal, Kind>(f, stream)), "head size %d declined", HS);
    f.out = x.out[0].p; f.lse = x.lse[0].p; f.dout = x.dout.p; f.dqkv = x.dqkv[1].p;        // the same forward for both
    DeviceArray<float> scratch(flash_backward_scratch(Kind, B, T, NH));
    EXPECT((flash_backward<Causal, Kind>(f, scratch.p, stream)), "head size %d declined", HS);

    const auto near = [&](const char* what, const Floats& got, const Floats& want, double allowed) {
        const double error = relative_l2(got, want);
        EXPECT(error <= allowed, "%s %s T %d: %s off by %.2e, at most %.0e", name, Causal ? "causal" : "full", T, what,
               error, allowed);
        INFO("%s %.1e", what, error);
    };
    near("out", to_float(x.out[1].host()), to_float(x.out[0].host()), 5e-3);
    EXPECT(largest_difference(x.lse[1].host(), x.lse[0].host()) < 1e-3, "%s T %d: lse off by %g", name, T,
           largest_difference(x.lse[1].host(), x.lse[0].host()));
    const char* const parts[] = {"dq", "dk", "dv"};
    const std::vector<bf16> got = x.dqkv[1].host(), want = x.dqkv[0].host();
    for (int k = 0; k < 3; k++) {
        near(parts[k], columns(got, x.OC, k * x.C, x.C), columns(want, x.OC, k * x.C, x.C), k == 2 ? 4e-3 : 6e-3);
    }
    if constexpr (Kind == FlashBias::Distance || Kind == FlashBias::LogDistance) {
        near("dS", x.dS[1].host(), x.dS[0].host(), 1e-4);
        near("dg", x.dg[1].host(), x.dg[0].host(), 1e-4);
    }
    if constexpr (Kind == FlashBias::Toeplitz) { near("dtable", x.dtable[1].host(), x.dtable[0].host(), 1e-4); }
    const Floats once = to_float(x.out[1].host());          // a race shows in some run
    f.out = x.out[1].p; f.lse = x.lse[1].p;
    for (int k = 1; k < (on_gpu ? 20 : 2); k++) {
        flash_forward<Causal, Kind>(f, stream);
        EXPECT(same_bits(to_float(x.out[1].host()), once), "%s T %d: run %d gives other bits", name, T, k + 1);
    }
}

template <class Bias> void lengths(const char* name) {
    if (!on_gpu) {
        compare<true, Bias>(name, 1, 150, 2, 64);
        compare<false, Bias>(name, 1, 130, 1, 64);
        return;
    }
    compare<true, Bias>(name, 2, 2049, 12, 64);
    compare<false, Bias>(name, 1, 1000, 3, 128);
    compare<true, Bias>(name, 1, 4096, 3, 64);
}

} // namespace

KERNEL_TEST("flash against the portable kernels: none") { lengths<NoBias>("none"); }
KERNEL_TEST("flash against the portable kernels: alibi") { lengths<LinearBias>("alibi"); }
KERNEL_TEST("flash against the portable kernels: cable") { lengths<CableBias>("cable"); }
KERNEL_TEST("flash against the portable kernels: kcable") { lengths<KCableBias>("kcable"); }
KERNEL_TEST("flash against the portable kernels: toeplitz") { lengths<ToeplitzBias>("toeplitz"); }

KERNEL_TEST("flash attention has all arguments of attention") {
    const int length = 7;
    const float factor = 1;
    float moment = 0;
    const AttentionDims dims = {96, 0, 128, 2, 64, 400, 0.5f, &length, nullptr, 0, {50, 7}, &factor, &moment};
    const FlashArgs a = flash_args(NoBias(), dims, 3, nullptr);
    EXPECT(a.B == 3 && a.T == 96 && a.stride == 128 && a.NH == 2 && a.HS == 64 && a.OC == 400 && a.scale == 0.5f,
           "other shapes");
    EXPECT(a.kv_len == &length && a.mask.window == 50 && a.mask.sinks == 7, "other keys");
    EXPECT(a.factor == &factor && a.moment == &moment, "another factor");
}

// The last query's keys are all the same but two, whose logits are 1.375 higher: the exponentials of the rest are one
// rounded number, and a float32 chain over them makes the same error at each step. Each kernel begins with one of the
// two. A single block of the tensor-core kernel, the first, has the last 64 queries.
KERNEL_TEST("attention: the sum of the exponentials of 32,768 equal keys") {
    constexpr int T = 32768;
    constexpr int HS = 64;
    constexpr int OC = 3 * HS;
    std::vector<bf16> host((size_t)T * OC, bf16(0.0f));
    host[(size_t)(T - 1) * OC] = bf16(1.0f);                // q; the scale is 1/8
    for (size_t j : {0, T - 1}) { host[j * OC + HS] = bf16(11.0f); }
    const double want = std::log(2.0 * std::exp(1.375) + (T - 2));
    const AttentionDims dims = {T, 0, T, 1, HS, OC, 0.125f};
    AttentionDims last = dims;                              // the portable kernel: only the last query
    last.T = 1;
    last.t0 = T - 1;
    DeviceArray<bf16> qkv(host), out((size_t)T * HS);
    DeviceArray<float> lse((size_t)T), portable_lse((size_t)T);
    portable_attention_forward<true>((floatX*)out.p, portable_lse.p, (const floatX*)qkv.p, NoBias(), last, 1, stream);
    FlashArgs args = flash_args(NoBias(), dims, 1, (const floatX*)qkv.p);
    args.out = out.p;
    args.lse = lse.p;
    constexpr FlashBias None = FlashBias::None;
    const size_t shared = flash_forward_shared<None>(HS);
    launch(flash_forward_kernel<true, FlashBias::None, HS, false>, Grid(1, FLASH_THREADS, shared, stream), args);
    const double portable = std::fabs(portable_lse.host()[T - 1] - want);
    const double flash = std::fabs(lse.host()[T - 1] - want);
    INFO("lse off by %.1e (portable), %.1e (tensor cores)", portable, flash);
    EXPECT(portable <= 1.5e-5, "%.1e", portable);           // measured: 4.9e-6; without a sum per tile 2.6e-4
    EXPECT(flash <= 1.3e-5, "%.1e", flash);                 // measured: 4.4e-6; without a sum per tile 5.3e-5
}

// The sums that CABLE takes of dlogit, over 16,320 queries or keys. q and k are 0, and g or S, so that P = 1 / T. Of v
// and dout only the first element is not 0, and row_dot is 0 as out is: dlogit_ij = c v / T everywhere. The first block
// of one kernel has the keys 0 .. 63, that of the other the last 64 queries.
KERNEL_TEST("flash backward: dS and dg of 16,320 equal pairs") {
    constexpr int T = 16320;
    constexpr int HS = 64;
    constexpr int OC = 3 * HS;
    constexpr float c = 1.3828125f;                         // bf16 has it, and v
    constexpr float v = 1.1484375f;
    constexpr float distance = 1.23f;
    const FlashBias Kind = FlashBias::Distance;
    std::vector<bf16> qkv((size_t)T * OC, bf16(0.0f)), dout((size_t)T * HS, bf16(0.0f));
    Floats S((size_t)T, 0.0f);
    for (size_t t = 0; t < T; t++) {
        qkv[t * OC + 2 * HS] = bf16(v);
        dout[t * HS] = bf16(c);
        if (t >= T - FLASH_TILE) { S[t] = distance; }
    }
    DeviceArray<bf16> d_qkv(qkv), d_dout(dout), out(std::vector<bf16>(dout.size(), bf16(0.0f))), dqkv(qkv.size());
    DeviceArray<float> lse(Floats((size_t)T, (float)std::log((double)T))), dS((size_t)T), dg((size_t)T);
    DeviceArray<float> scratch(flash_backward_scratch(Kind, 1, T, 1));
    DeviceArray<double> S_origin(std::vector<double>((size_t)ceil_div(T, CABLE_CHUNK), 0.0));
    const auto run = [&](float g, const Floats& sums) {
        const DeviceArray<float> d_g(Floats((size_t)T, g)), d_S(sums);
        FlashArgs args = {};
        args.B = args.NH = 1; args.T = args.stride = T; args.HS = HS; args.OC = OC; args.scale = 0.125f;
        args.qkv = d_qkv.p; args.dout = d_dout.p; args.out = out.p; args.lse = lse.p; args.dqkv = dqkv.p;
        args.S_offset = d_S.p; args.S_origin = S_origin.p; args.g = d_g.p; args.dS = dS.p; args.dg = dg.p;
        FlashQueries* queries = (FlashQueries*)scratch.p;
        dS.set(Floats((size_t)T, 0.0f));
        const Grid one(1, FLASH_THREADS, flash_backward_shared(HS, false), stream);
        const Grid tiles((size_t)T / FLASH_TILE, FLASH_THREADS, 0, stream);
        launch(flash_backward_prepare_kernel<Kind, HS>, tiles, queries, args);
        launch(flash_backward_dkdv_kernel<false, Kind, HS, false>, one, args, queries);
        launch(flash_backward_dq_kernel<false, Kind, HS, false>, one, args, queries, FlashSlabs());
    };
    double column = 0.0;
    double row = 0.0;
    double of_g = 0.0;
    run(1.0f, Floats((size_t)T, 0.0f));
    for (int t = 0; t < FLASH_TILE; t++) {                  // i >= j counts with one sign, i < j with the other
        const double want = (double)c * v * (T - 2 * t) / T;
        column = std::max(column, std::fabs(dS.host()[(size_t)t] / want - 1.0));
        row = std::max(row, std::fabs(dS.host()[(size_t)(T - 1 - t)] / -want - 1.0));
    }
    run(0.0f, S);
    for (int t = T - FLASH_TILE; t < T; t++) {
        const double want = -(double)c * v * distance * (T - FLASH_TILE) / T;
        of_g = std::max(of_g, std::fabs(dg.host()[(size_t)t] / want - 1.0));
    }
    INFO("columns of dS off by %.1e, rows %.1e, dg %.1e", column, row, of_g);
    EXPECT(column <= 3e-6, "%.1e", column);                 // measured: 7.5e-7; without a sum per tile 1.8e-5
    EXPECT(row <= 5e-6, "%.1e", row);                       // 1.2e-6; 2.2e-5
    EXPECT(of_g <= 1e-5, "%.1e", of_g);                     // 2.9e-6; 2.3e-5
}
