// position/t5.cuh -- a learned bias for each class of distances, shared by all layers or for each.
//
//   t5 (Raffel et al. 2020, 2.1): B_ij = r[bucket(i-j)][h]; `buckets` (32): half of a side's are single distances, the
//   rest grow to `distance` (128) in equal steps of log(distance), the last is open. Causal: all of them for the past;
//   else half of them a side.
//   t5_clip (as the CABLE paper prints it): B_ij = r[min(i-j,K)][h], else r[K + clip(i-j,-K,K)][h]. The paper's code
//   has K=256, a table for each layer (layers=own), and divides q.k by sqrt(C) (scale=C), not by sqrt(HS).
//   backward: dr[e][h] += sum over layers, sequences and the diagonals of entry e; an entry owns a run of distances.
#pragma once

#include "toeplitz.cuh"

struct DistanceRange { int lo, hi; };                       // lo <= i - j < hi

// Which entry of r a distance has, and which distances an entry has.
struct T5Buckets {
    static constexpr int MOST = 128;
    int first[MOST + 1];                                    // smallest distance of each bucket of one side
    int side;                                               // buckets of one side
    bool two_sided;

    static Hyperparameters defaults(int) { return {{"buckets", 32}, {"distance", 128}}; }
    static int entries(const EncodingConfig& config, bool) {
        const double n = config.value("buckets");
        const double reach = config.value("distance");
        check(n == 4 * std::floor(n / 4) && n <= MOST, "--pos t5: expected buckets in fours up to %d, got %g", MOST, n);
        check(reach == std::floor(reach) && reach > n / 2 && reach <= 1 << 24,
              "--pos t5: expected a whole distance above half of the %g buckets and at most 2^24, got %g", n, reach);
        return (int)n;
    }
    T5Buckets(const EncodingConfig& config, bool causal) : two_sided(!causal) {
        const int count = entries(config, causal);
        side = causal ? count : count / 2;
        const int exact = side / 2;
        for (int k = 0; k <= MOST; k++) {
            // distances that begin a bucket exactly, such as 16, 32 and 64, must not be lost to rounding
            const double step = (double)(imin(k, side) - exact) / exact;
            const double begin = exact * portable_pow(config.value("distance") / exact, step) - 1e-9;
            const int logarithmic = k < side ? (int)std::ceil(begin) : INT_MAX;
            first[k] = k < exact ? k : logarithmic;
        }
    }
    __device__ int entry(int d) const {
        const int after = two_sided ? -d : 0;               // how far after the query; causal: there is no such key
        const int distance = d >= 0 ? d : after;
        int k = 0;                                          // how many buckets begin at this distance or before it
        for (int e = 1; e < side; e++) { k += first[e] <= distance; }
        return d < 0 && two_sided ? k + side : k;
    }
    __device__ DistanceRange range(int e) const {
        if (e < side) { return {first[e], first[e + 1]}; }
        const int k = e - side;                             // a bucket of keys after the query: distances below 0
        return {-(first[k + 1] - 1), k == 0 ? 0 : -(first[k] - 1)};
    }
};

struct T5Distances {
    int K, before;                                          // before: K entries for the future, 0 when causal

    static Hyperparameters defaults(int T_train) {
        return {{"K", T_train - 1.0}, {"scale", 0, {}, "HS|C"}, {"layers", 0, {}, "shared|own"}};
    }
    static int entries(const EncodingConfig& config, bool causal) {
        const double K = config.value("K");
        check(K == std::floor(K) && K >= 0 && K <= 1 << 24, "--pos t5_clip: K is %g, it must be a whole number "
              "of at most 2^24", K);
        return (int)K * (causal ? 1 : 2) + 1;
    }
    T5Distances(const EncodingConfig& config, bool causal) : K((int)config.value("K")), before(causal ? 0 : K) {}
    __device__ int entry(int d) const { return before + clamp(d, -before, K); }
    __device__ DistanceRange range(int e) const {
        const int d = e - before;                           // the two ends stand for all distances beyond them
        const int lo = e == 0 && before > 0 ? -INT_MAX : d;
        const int hi = d == K ? INT_MAX : d + 1;
        return {lo, hi};
    }
};

// B_ij of head h at distance i - j
template <class Map> struct T5Value {
    const float* r;             // (entries,NH)
    Map map;
    int NH;
    __device__ float operator()(int h, int distance) const { return r[(size_t)map.entry(distance) * NH + h]; }
};

// One block per entry and head.
template <class Map>
static __global__ void t5_backward_kernel(float* dr, const float* dtable, Map map, int B, int T, int NH, int ND) {
    const int e = blockIdx.x / NH;
    const int h = blockIdx.x % NH;
    const DistanceRange range = map.range(e);
    const int lo = imax(range.lo, 1 - T);
    const int hi = imin(range.hi, T);
    const int end = imin(T - lo, ND - TOEPLITZ_PAD);        // columns T - hi .. end-1
    // an entry's gradient is the sum over the diagonals it stands for, batch by batch
    float sum = 0.0f;
    for (int b = 0; b < B; b++) {
        const float* d = dtable + ((size_t)b * NH + h) * ND;
        for (int n = T - hi + (int)threadIdx.x; n < end; n += blockDim.x) { sum += d[n]; }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { dr[(size_t)e * NH + h] += sum; }
}

template <class Map> struct T5Of : Toeplitz {
    using Toeplitz::Toeplitz;
    static constexpr bool clips = std::is_same<Map, T5Distances>::value;
    Parameter r;                                            // (entries,NH)

    static Hyperparameters defaults(int T_train) { return Map::defaults(T_train); }
    template <class Tensors> void declare(Tensors& t) {
        const size_t entries = (size_t)Map::entries(*t.config, t.causal);
        const Per per = own(*t.config) ? Per::Layer : Per::Model;
        t.param(r, "t5", "t5.weight", per, entries, (size_t)t.NH, {normal(0.02f)});
        declare_table(t, per);
    }
    // a table for each layer
    static bool own(const EncodingConfig& config) { return clips && config.value("layers") == 1; }
    float score_factor(int) const {
        const bool by_C = clips && v.config->value("scale") == 1;
        return by_C ? sqrtf((float)v.HS / (float)v.C()) : 1.0f;
    }
    void prepare_forward(floatX*, int, int, Start start, Stream stream) const {
        if (v.layer > 0 && !own(*v.config)) { return; }
        fill_table(T5Value<Map>{r.value, Map(*v.config, v.causal), v.NH}, start, stream);
    }
    void prepare_backward(floatX*, const floatX*, int B, int, Stream stream) const {
        const size_t entries = (size_t)Map::entries(*v.config, v.causal);
        const Map map(*v.config, v.causal);
        launch(t5_backward_kernel<Map>, Grid(entries * v.NH, 32, 0, stream), r.grad, dtable, map, B, v.stride, v.NH,
               columns());
    }
};

using T5 = T5Of<T5Buckets>;
using T5Clip = T5Of<T5Distances>;
