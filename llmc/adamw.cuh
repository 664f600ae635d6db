// adamw.cuh -- AdamW (Loshchilov, Hutter 2019, algorithm 2) on float32 master weights, after the global gradient norm.
//   m = beta1 m + (1 - beta1) g      v = beta2 v + (1 - beta2) g^2
//   w -= lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w), then projected into [lo, hi]
// bf16 builds compute with a bf16 copy of the weights, rounded stochastically (Gupta et al. 2015): a w between two bf16
// numbers becomes either of them, the nearer with the higher probability, so that its mean is w. Rounding to the
// nearest would lose every update that is smaller than half their distance. The draw depends only on (seed, t, tensor,
// element), so a resumed run and every rank round alike.
#pragma once

#include <numeric>
#include <type_traits>

#include "base/math.h"
#include "base/tensor.h"

struct AdamW {
    float lr;               // this update's, from the schedule
    float beta1, beta2;     // decay rates of the two moving averages
    float eps, weight_decay;
    float grad_scale;       // the clipping factor
    int t;                  // 1, 2, ...: updates so far, this one included
    uint64_t seed = 0;      // of the rounding
};

// The key that seeds the rounding of a tensor after update t; tensor: checksum of its name. At t = 0, before the first
// update, it is 0: rounding to the nearest.
__host__ __device__ inline uint64_t rounding_key(uint64_t seed, int t, uint64_t tensor) {
    return t == 0 ? 0 : hash64(seed, tensor, (uint64_t)t) | 1;
}

// A run of elements of one tensor, and its place in each array
struct AdamWPiece {
    size_t weight, master, grad, moment;    // the first element's place in each array; m and v: moment
    size_t size, first;                     // how many elements; the first one's index in its tensor
    size_t block;                           // the first block of the grid that updates them
    uint64_t name;                          // checksum of the tensor's name
    float lo, hi;                           // the tensor's range
    bool decay;
};
// All pieces that a rank updates, kept on the device, so that an update is one launch. Each block of the grid updates
// at most ADAMW_BLOCK elements of one piece.
constexpr int ADAMW_PACK = ON_GPU ? 4 : 1;                      // floats that a thread updates at once: 16 bytes
constexpr size_t ADAMW_BLOCK = ON_GPU ? 256 * 4 * ADAMW_PACK : 16384;       // four packs per thread of a GPU
struct AdamWTable {
    std::vector<AdamWPiece> pieces;         // in the order of their blocks
    AdamWPiece* on_device = nullptr;
    size_t blocks = 0;

    // at: the piece, with its place in weights; master, grad, moment: its places in the other arrays
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
// Rounds the slice's master weights to weights as update t did, after master was initialised, loaded or received.
// weights: in the layout of the table; master (slice). Does nothing if the two are the same array.
void round_weights(floatX* weights, const float* master, const TensorTable& table, Slice slice, uint64_t seed,
                   int t, Stream stream);

// The gradient's norm is equal for any number of threads and ranks: fixed chunks are summed, then added in order.
constexpr size_t NORM_CHUNK = SLICE_UNIT;
// Starts the norm of n gradients; returns how many doubles of partial (on the device) it fills.
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
// The number that (floatX) turns into the copy of w. A bf16 is the upper half of a float32: adding 16 random bits to
// the lower half carries with the probability (w - a) / (b - a), where a and b are w's neighbours in bf16.
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
    // 1 this block's piece: the last with a first block <= blockIdx.x
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
    const float decay = piece.decay ? a.weight_decay : 0.0f;            // 0 for a LayerNorm's weight, for example
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
