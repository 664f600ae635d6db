// adamw.cuh -- AdamW (Loshchilov, Hutter 2019, algorithm 2) on float32 master weights, after the global gradient norm.
//   m = beta1 m + (1 - beta1) g      v = beta2 v + (1 - beta2) g^2
//   w -= lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w), then projected into [lo, hi]
// bf16 builds compute with a bf16 copy of the weights, rounded stochastically (Gupta et al. 2015): a w between two bf16
// numbers becomes either of them, the nearer one with the higher probability, so that its mean is w. An update smaller
// than their distance, which rounding to the nearest would lose every time, is then not lost on average. The draw is a
// function of (seed, t, tensor, element), so a resumed run and every rank round alike.
#pragma once

#include <numeric>
#include <type_traits>

#include "base/math.h"
#include "base/tensor.h"

struct AdamW {
    float lr;               // this update's, from the schedule
    float beta1, beta2;     // of the two moving averages
    float eps, weight_decay;
    float grad_scale;       // the factor by which clipping shortens the gradient
    int t;                  // 1, 2, ...: updates so far, this one included
    uint64_t seed = 0;      // of the rounding
};

// The key from which the random rounding of a tensor's elements after update t follows; tensor: checksum of its name.
// At t = 0, for weights as they were loaded, it is 0, which means rounding to the nearest.
__host__ __device__ inline uint64_t rounding_key(uint64_t seed, int t, uint64_t tensor) {
    return t == 0 ? 0 : hash64(seed, tensor, (uint64_t)t) | 1;
}

// Neighbouring elements of one tensor, and where they are in each array
struct AdamWPiece {
    size_t weight, master, grad, moment;    // places of the first one in adamw_update's arrays
    size_t size, first;                     // how many, and the first one's index in its tensor
    size_t block;                           // the first block of the grid that updates them
    uint64_t name;                          // checksum of the tensor's name
    float lo, hi;                           // the tensor's range
    bool decay;
};
// All pieces that a rank updates, written once and then kept on the device, so that an update is one launch. Each block
// of the grid has ADAMW_BLOCK elements of one piece.
constexpr int ADAMW_PACK = ON_GPU ? 4 : 1;                      // floats that a thread updates at once: 16 bytes
constexpr size_t ADAMW_BLOCK = ON_GPU ? 256 * 4 * ADAMW_PACK : 16384;       // four packs per thread of a GPU
struct AdamWTable {
    std::vector<AdamWPiece> pieces;         // in the order of their blocks
    AdamWPiece* on_device = nullptr;
    size_t blocks = 0;

    // at: the piece of its tensor, and its place in weights; the other places follow from it
    void add(const TensorSpec& spec, const TensorPiece& at, size_t master, size_t grad, size_t moment) {
        check((at.at | master | grad | moment) % ADAMW_PACK == 0, "a piece of %s does not begin on a pack of %d floats",
              spec.name.c_str(), ADAMW_PACK);
        pieces.push_back({at.at, master, grad, moment, at.size, at.first, blocks, checksum(spec.name), spec.lo, spec.hi,
                          spec.decay});
        blocks += ceil_div(at.size, ADAMW_BLOCK);
    }
    void upload(Stream stream) {
        on_device = (AdamWPiece*)device_malloc(sizeof(AdamWPiece) * pieces.size());
        copy_to_device(on_device, pieces.data(), sizeof(AdamWPiece) * pieces.size(), stream);
    }
    void release() {
        device_free(on_device);
        *this = AdamWTable();
    }
};

// Updates everything in the table. weights may be master itself (float32 builds).
void adamw_update(floatX* weights, float* master, const float* grads, float* m, float* v, const AdamWTable& table,
                  const AdamW& a, Stream stream);
// Rounds a slice of the layout to weights as update number t did, after master was initialised, loaded or received.
// weights: in the layout of the table; master (slice). Does nothing if the two are the same array.
void round_weights(floatX* weights, const float* master, const TensorTable& table, Slice slice, uint64_t seed,
                   int t, Stream stream);

// The norm of the gradient, the same for any threads and ranks: squares are summed over fixed chunks, then in order.
constexpr size_t NORM_CHUNK = SLICE_UNIT;
// Starts the norm of n gradients; returns how many doubles of partial, on the device, it fills.
size_t gradient_norm_begin(double* partial, const float* grads, size_t n, Stream stream);
// The norm, from partial on the host
inline double gradient_norm_end(const double* partial, size_t chunks) {
    return std::sqrt(std::accumulate(partial, partial + chunks, 0.0));
}
// sqrt of the sum of squares of n gradients; partial: ceil(n / NORM_CHUNK) doubles on the device
inline double gradient_norm(double* partial, const float* grads, size_t n, Stream stream) {
    std::vector<double> host(gradient_norm_begin(partial, grads, n, stream));
    copy_to_host(host.data(), partial, host.size() * sizeof(double), stream);
    return gradient_norm_end(host.data(), host.size());
}

#if !defined(LAYERS_ELSEWHERE)
// What (floatX) rounds to the copy of w. A bf16 is the upper half of a float32. Adding 16 random bits to the lower half
// carries into the upper one with a probability that is w's place between its two neighbours.
__device__ inline float draw_copy(float w, uint64_t key, size_t i) {
    const uint32_t bits = (uint32_t)float_to_bits(w);
    const uint32_t random = (uint32_t)(mix64(key ^ i) >> 48);
    const bool draws = sizeof(floatX) == 2 && key != 0;
    const bool rounds = draws && (bits & 0x7f800000) != 0x7f800000;         // infinities and NaN stay what they are
    return rounds ? bits_to_float((int32_t)((bits + random) & 0xffff0000u)) : w;
}

// correction1, correction2: 1 / (1 - beta1^t), 1 / (1 - beta2^t)
__global__ void adamw_kernel(floatX* weights, float* master, const float* grads, float* m, float* v,
                             const AdamWPiece* pieces, int count, AdamW a, float correction1, float correction2) {
    // 1 this block's piece: the last one that begins at it or before it
    int at = 0;
    for (int end = count; end - at > 1;) {
        const int middle = (at + end) / 2;
        if (pieces[middle].block <= blockIdx.x) { at = middle; } else { end = middle; }
    }
    const AdamWPiece piece = pieces[at];
    weights += piece.weight;
    master += piece.master;
    grads += piece.grad;
    m += piece.moment;
    v += piece.moment;
    const float decay = piece.decay ? a.weight_decay : 0.0f;            // none of a LayerNorm's weight, for example
    const uint64_t key = rounding_key(a.seed, a.t, piece.name);
    const size_t begin = (blockIdx.x - piece.block) * ADAMW_BLOCK;
    const size_t end = imin(begin + ADAMW_BLOCK, piece.size);
    const auto update = [&](auto width, size_t i) {                     // elements i .. i + P - 1
        constexpr int P = decltype(width)::value;
        const Pack<P> gs = load_pack<P>(grads + i);
        Pack<P> ms = load_pack<P>(m + i);
        Pack<P> vs = load_pack<P>(v + i);
        Pack<P> ws = load_pack<P>(master + i);
        Pack<P> copies;
        UNROLL
        for (int e = 0; e < P; e++) {
            // 2 the moving averages of the gradient and of its square
            const float g = gs.x[e] * a.grad_scale;
            const float mi = a.beta1 * ms.x[e] + (1.0f - a.beta1) * g;
            const float vi = a.beta2 * vs.x[e] + (1.0f - a.beta2) * g * g;
            ms.x[e] = mi;
            vs.x[e] = vi;
            // 3 the step, in float32, with both averages corrected for having started at 0
            float w = ws.x[e];
            w -= a.lr * (mi * correction1 / (sqrtf(vi * correction2) + a.eps) + decay * w);
            // 4 into the tensor's range (an encoding may need a weight of at least 0)
            w = w < piece.lo ? piece.lo : w;
            w = w > piece.hi ? piece.hi : w;
            ws.x[e] = w;
            // 5 and the copy that the layers compute with
            copies.x[e] = draw_copy(w, key, piece.first + i + e);
        }
        store_pack<P>(m + i, ms);
        store_pack<P>(v + i, vs);
        store_pack<P>(master + i, ws);
        store_pack<P>(weights + i, copies);
    };
    const size_t packed = begin + (end - begin) / ADAMW_PACK * ADAMW_PACK;
    for (size_t i = begin + threadIdx.x * ADAMW_PACK; i < packed; i += blockDim.x * ADAMW_PACK) {
        update(std::integral_constant<int, ADAMW_PACK>(), i);
    }
    ONE_BY_ONE
    for (size_t i = packed + threadIdx.x; i < end; i += blockDim.x) { update(std::integral_constant<int, 1>(), i); }
}

LAUNCHER void adamw_update(floatX* weights, float* master, const float* grads, float* m, float* v,
                           const AdamWTable& table, const AdamW& a, Stream stream) {
    const float correction1 = (float)(1.0 / (1.0 - portable_pow((double)a.beta1, a.t)));
    const float correction2 = (float)(1.0 / (1.0 - portable_pow((double)a.beta2, a.t)));
    launch(adamw_kernel, Grid(table.blocks, 256, 0, stream), weights, master, grads, m, v, table.on_device,
           (int)table.pieces.size(), a, correction1, correction2);
}

__global__ void round_weights_kernel(floatX* weights, const float* master, size_t n, size_t first, uint64_t key) {
    const GridSpan s = grid_span(n);
    for (size_t i = s.begin; i < s.end; i += s.step) { weights[i] = (floatX)draw_copy(master[i], key, first + i); }
}
LAUNCHER void round_weights(floatX* weights, const float* master, const TensorTable& table, Slice slice, uint64_t seed,
                            int t, Stream stream) {
    if ((const void*)(weights + slice.begin) == (const void*)master) { return; }
    for (const TensorPiece& piece : table.pieces(slice)) {
        const uint64_t key = rounding_key(seed, t, checksum(table.specs[piece.tensor].name));
        launch(round_weights_kernel, Grid::over(piece.size, stream), weights + piece.at,
               master + (piece.at - slice.begin), piece.size, piece.first, key);
    }
}

// One block per chunk.
__global__ void norm_kernel(double* partial, const float* grads, size_t n) {
    const size_t begin = (size_t)blockIdx.x * NORM_CHUNK;
    const size_t end = imin(begin + NORM_CHUNK, n);
    const float* g = grads + begin;
    const auto squares = sums_over<1>(threadIdx.x, (int)(end - begin), blockDim.x, [&](float* s, int i) {
        s[0] = fused_madd(g[i], g[i], s[0]);
    });
    const float sum = block_sum(squares.x[0]);
    if (threadIdx.x == 0) { partial[blockIdx.x] = (double)sum; }
}
LAUNCHER size_t gradient_norm_begin(double* partial, const float* grads, size_t n, Stream stream) {
    const size_t chunks = ceil_div(n, NORM_CHUNK);
    launch(norm_kernel, Grid(chunks, 256, 0, stream), partial, grads, n);
    return chunks;
}
#endif
