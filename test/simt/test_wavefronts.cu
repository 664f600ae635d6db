// test_wavefronts.cu -- the tensor-core attention has no bank conflicts in shared memory; and what is counted is right.
#include "llmc/attention/flash/backward.cuh"
#include "llmc/attention/flash/forward.cuh"
#if defined(SIMT)
#include "test/simt/wavefronts.h"
#endif
#include "test/simt/fire_inputs.h"
#include "test/simt/kernel_test.h"

#if !defined(SIMT)
KERNEL_TEST("wavefronts") { throw KernelTestSkipped{"counted by the emulator only"}; }
#else
using Lines = std::map<std::string, Wavefronts>;

// ----------------------------------------------------------------------------------------------------------
// the count

// Lane l touches the words from l * stride on
typedef float Words __attribute__((vector_size(16)));         // g++ would store the parts of a struct one by one
template <class T> __global__ void stride_kernel(int stride) { *(T*)(dynamic_shared() + threadIdx.x * stride) = T(); }
__global__ void one_word_kernel() { dynamic_shared()[0] = 0.0f; }
template <class... A> static Wavefronts total(void (*kernel)(A...), A... args) {
    Wavefronts sum;
    for (const auto& line : count_wavefronts([&] {
        launch(kernel, Grid(3, 64, 8192, Stream(0)), args...);
        CUDA_CHECK(cudaDeviceSynchronize());
    })) {
        sum.instructions += line.second.instructions;
        sum.taken += line.second.taken;
        sum.least += line.second.least;
    }
    return sum;
}
KERNEL_TEST("wavefronts: strides") {
    struct Case { const char* what; Wavefronts found; size_t each, least; } cases[] = {
        {"neighbours", total(stride_kernel<float>, 1), 1, 1}, {"stride 2", total(stride_kernel<float>, 2), 2, 1},
        {"stride 32", total(stride_kernel<float>, 32), 32, 1}, {"stride 33", total(stride_kernel<float>, 33), 1, 1},
        {"the same word", total(one_word_kernel), 1, 1}, {"16 bytes", total(stride_kernel<Words>, 4), 4, 4},
        {"16 bytes, stride 8", total(stride_kernel<Words>, 8), 8, 4},
        {"16 bytes, stride 32", total(stride_kernel<Words>, 32), 32, 4},
    };
    for (const Case& c : cases) {
        const Wavefronts& w = c.found;              // 3 blocks of 2 warps
        EXPECT(w.instructions == 6 && w.taken == 6 * c.each && w.least == 6 * c.least,
               "%s: %zu instructions, %zu wavefronts, %zu at least", c.what, w.instructions, w.taken, w.least);
    }
}

// ----------------------------------------------------------------------------------------------------------
// attention

// counted: at most as many wavefronts beyond the least are no conflicts of the hardware's
static size_t expect_no_conflicts(const char* what, const Lines& lines, size_t counted = 0) {
    size_t taken = 0, least = 0;
    std::string conflicts;
    for (const auto& line : lines) {
        const Wavefronts& w = line.second;
        taken += w.taken;
        least += w.least;
        if (w.taken == w.least) { continue; }
        conflicts += strprintf("; %s: %zu instructions, %zu wavefronts instead of %zu", line.first.c_str(),
                               w.instructions, w.taken, w.least);
    }
    EXPECT(taken <= least + counted, "%s: %zu wavefronts, expected at most %zu%s", what, taken, least + counted,
           conflicts.c_str());
    EXPECT(taken > 1000, "%s: %zu wavefronts", what, taken);
    return taken;
}
template <FlashBias Kind, int HS> static void measure() {
    const int T = flash_is_cable(Kind) ? 128 : 192, OC = round_up(3 * HS, 64);
    const auto sums = [&](uint64_t seed) { return normals((size_t)T, seed); };
    DeviceArray<bf16> qkv(converted<bf16>(normals((size_t)T * OC, 1))), out((size_t)T * HS), dqkv((size_t)T * OC);
    DeviceArray<bf16> dout(converted<bf16>(normals((size_t)T * HS, 2)));
    DeviceArray<float> lse(T), table(sums(3)), dtable(T), scratch(flash_backward_scratch(Kind, 1, T, 1));
    DeviceArray<float> S(sums(4)), g(sums(5)), dS(T), dg(T), slopes(std::vector<float>{0.5f});
    DeviceArray<double> origin(std::vector<double>{0.0});
    FlashArgs a = {};
    a.slopes = slopes.p;
    a.S_offset = S.p; a.S_origin = origin.p; a.g = g.p; a.dS = dS.p; a.dg = dg.p;
    a.table = table.p; a.dtable = dtable.p; a.table_entries = T; a.table_zero = T - 1;
    const FireArrays fire(FireInputs(1, 5), 1, T, true);
    DeviceArray<double> fire_sums((size_t)FIRE_SLOTS * FIRE_PIECES * FIRE_SUMS);
    if (Kind == FlashBias::Fire) { fire.fill(a); }
    a.sums = fire_sums.p;
    a.qkv = qkv.p; a.out = out.p; a.lse = lse.p; a.dout = dout.p; a.dqkv = dqkv.p;
    a.B = 1; a.T = T; a.stride = T; a.NH = 1; a.HS = HS; a.OC = OC;
    a.scale = 0.125f;
    const size_t forward = expect_no_conflicts("forward", count_wavefronts([&] {
        EXPECT((flash_forward<true, Kind>(a, Stream(0))), "head size %d", HS);
        CUDA_CHECK(cudaDeviceSynchronize());
    }));
    const size_t backward = expect_no_conflicts("backward", count_wavefronts([&] {
        EXPECT((flash_backward<true, Kind>(a, scratch.p, Stream(0))), "head size %d", HS);
        CUDA_CHECK(cudaDeviceSynchronize());
    // cable: g++ makes two stores of S in two parts (16 in all), and the lane that also copies S of a tile's edge has
    // its later copies counted beside its neighbours' next ones (9)
    }), flash_is_cable(Kind) ? 16 + 9 : 0);
    INFO("T %d: forward %zu, backward %zu wavefronts", T, forward, backward);
}
KERNEL_TEST("wavefronts: none, head size 64") { measure<FlashBias::None, 64>(); }
KERNEL_TEST("wavefronts: none, head size 128") { measure<FlashBias::None, 128>(); }
KERNEL_TEST("wavefronts: alibi") { measure<FlashBias::Linear, 64>(); }
KERNEL_TEST("wavefronts: cable") { measure<FlashBias::Distance, 64>(); }
KERNEL_TEST("wavefronts: kcable") { measure<FlashBias::LogDistance, 64>(); }
KERNEL_TEST("wavefronts: toeplitz") { measure<FlashBias::Toeplitz, 64>(); }
KERNEL_TEST("wavefronts: fire") { measure<FlashBias::Fire, 64>(); }
#endif
