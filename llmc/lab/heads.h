// lab/heads.h -- where each head of a model looks (--heads): a second pass over the scores of each layer, from the lse
// that its attention has stored, in memory that grows with T and not with T x T.
//
// With P_ij = e^(logit_ij - lse_i) and the mean over all queries i of all windows:
//   sinks(n)   = mean sum_{j < n} P_ij                      the weight of the first n keys of a window
//   entropy    = mean -sum_j P_ij log P_ij                  nats
//   distance   = mean sum_j P_ij |i - j|
//   window90   = the smallest W for which the keys inside --window W, |i - j| < W, have 90 % of all weight
//   live_tiles = the share of tiles of 64 queries and 64 keys (causal: of those on and below the diagonal) in which a
//                weight is above 2^-24 / T: without the rest no sum of a row would change in float32
#pragma once

#include "../attention/choose.cuh"
#include "../engine/json.h"
#include "../engine/model.cuh"

constexpr int LIVE_TILE = 64;                   // a multiple of ATTENTION_TILE
constexpr int HEAD_SINKS = 16;                  // keys whose weights are summed one by one
constexpr int SHOWN_SINKS[] = {1, 4, HEAD_SINKS};

// The kernel's sums for one (batch, head): these, and then the weight at each distance, (T)
enum HeadSum { ENTROPY_SUM, LIVE_SUM, SINK_SUMS, DISTANCE_SUMS = SINK_SUMS + HEAD_SINKS };

inline size_t head_sums_shared(const AttentionDims& dims) {
    const size_t tile = ATTENTION_TILE, width = (size_t)dims.padded_HS();
    return sizeof(float) * (tile * dims.HS + tile * width + tile * tile + 2 * tile);
}

// sums (B*NH,DISTANCE_SUMS+stride), live (B*NH,ceil(stride/LIVE_TILE)), qkv (B,stride,OC), lse (B,NH,stride). One block
// per (batch, head), so that every sum has one writer and one order.
template <bool Causal, class Bias>
__global__ void head_sums_kernel(double* sums, float* live, const floatX* qkv, const float* lse, Bias bias,
                                 AttentionDims dims, float least) {
    constexpr int TILE = ATTENTION_TILE;
    const int HS = dims.HS;
    const int OC = dims.OC;
    const int width = dims.padded_HS();
    const int bh = blockIdx.x;
    const int b = bh / dims.NH;
    const int h = bh % dims.NH;
    const Visits<Causal, Bias::counts_gates> visits(dims, bh);
    const int T = visits.tokens;
    const int live_tiles = ceil_div(dims.stride, LIVE_TILE);
    float* Q_T = dynamic_shared();                          // (HS, TILE)
    float* K_tile = Q_T + HS * TILE;                        // (TILE, width)
    float* P = K_tile + TILE * width;                       // (keys, queries): scores, then weights
    float* entropy = P + TILE * TILE;                       // of each query, and its largest weight, in this tile
    float* largest = entropy + TILE;
    const Matrix<const floatX> q = view(qkv + (size_t)b * dims.stride * OC + h * HS, T, HS, OC);
    const Matrix<const floatX> k = view(q.data + dims.C(), T, HS, OC);
    sums += (size_t)bh * (DISTANCE_SUMS + dims.stride);
    live += (size_t)bh * live_tiles;                        // the largest weight of each tile in these rows
    lse += (size_t)bh * dims.stride;
    for (int e = threadIdx.x; e < DISTANCE_SUMS + dims.stride; e += blockDim.x) { sums[e] = 0.0; }
    for (int i0 = 0; i0 < T; i0 += TILE) {
        const int ni = imin(TILE, T - i0);
        __syncthreads();
        load_tile_transposed(Q_T, block(q, i0, ni, 0, HS), dims.scale);
        for (int n = threadIdx.x; i0 % LIVE_TILE == 0 && n < live_tiles; n += blockDim.x) { live[n] = 0.0f; }
        for (const PairTile<Causal>& t : visits.keys_of(i0, ni)) {
            const int j0 = t.j0;
            const int nj = t.nj;
            __syncthreads();
            load_tile(K_tile, block(k, j0, nj, 0, HS), 1.0f);
            __syncthreads();
            // 1. scores = k q^T, as in attention_forward_kernel
            block_matmul(view(P, nj, round_up(ni, LANES), TILE), view(K_tile, nj, HS, width), view(Q_T, HS, TILE));
            __syncthreads();
            // 2. weights; a thread or SIMD lane per query sums its entropy
            t.hide(transposed(view(P, nj, ni, TILE)));
            add_bias(view(P, nj, ni, TILE), bias, bh, t, dims.factors(bh, i0));
            for (int r = threadIdx.x; r < ni; r += blockDim.x) {
                entropy[r] = 0.0f;
                largest[r] = 0.0f;
            }
            for (int c = 0; c < nj; c++) {
                SIMD
                for (int r = threadIdx.x; r < ni; r += blockDim.x) {
                    float log_p = P[c * TILE + r] - lse[i0 + r];
                    log_p = log_p < LEAST_LOGIT ? LEAST_LOGIT : log_p;
                    const float p = fast_exp(log_p);
                    P[c * TILE + r] = p;
                    entropy[r] -= p * log_p;
                    largest[r] = p > largest[r] ? p : largest[r];
                }
            }
            __syncthreads();
            // 3. by distance: a thread per diagonal r - c. The tiles on the diagonal have each distance twice
            const auto diagonal = [&](int d) {
                float sum = 0.0f;
                for (int r = imax(0, d); r < imin(ni, nj + d); r++) { sum += P[(r - d) * TILE + r]; }
                return sum;
            };
            for (int d = (int)threadIdx.x - (nj - 1); d < ni; d += blockDim.x) {
                const int distance = i0 > j0 ? i0 - j0 + d : j0 - i0 - d;
                if (i0 != j0) { sums[DISTANCE_SUMS + distance] += diagonal(d); }
                else if (d >= 0) { sums[DISTANCE_SUMS + d] += diagonal(d) + (d > 0 ? diagonal(-d) : 0.0f); }
            }
            // 4. by key, the sinks
            for (int c = threadIdx.x; j0 == 0 && c < imin(HEAD_SINKS, nj); c += blockDim.x) {
                float sum = 0.0f;
                for (int r = 0; r < ni; r++) { sum += P[c * TILE + r]; }
                sums[SINK_SUMS + c] += sum;
            }
            for (int r = 0; r < ni && threadIdx.x == 0; r++) {
                sums[ENTROPY_SUM] += entropy[r];
                live[j0 / LIVE_TILE] = fmaxf(live[j0 / LIVE_TILE], largest[r]);
            }
        }
        // 5. the tiles of these 64 queries
        __syncthreads();
        if (threadIdx.x > 0 || ((i0 + TILE) % LIVE_TILE > 0 && i0 + TILE < T)) { continue; }
        for (int n = 0; n < live_tiles; n++) { sums[LIVE_SUM] += live[n] > least ? 1.0 : 0.0; }
    }
}

// Smallest, largest and mean of the added values
struct ValueRange {
    double least = INFINITY, most = -INFINITY;
    double sum = 0;
    uint64_t count = 0;

    void add(double x) {
        least = std::min(least, x);
        most = std::max(most, x);
        sum += x;
        count++;
    }
    Json json() const { return {least, sum / (double)count, most}; }
};

// Statistics of one head of one layer, over the windows so far
struct HeadStatistics {
    uint64_t queries = 0, tiles = 0;
    double entropy = 0, live = 0;               // sums over queries, over tiles
    std::vector<double> sinks, by_distance;     // (HEAD_SINKS), (T): sums over queries
    ValueRange b, g, S;                         // CABLE's: b and g of all tokens, S of each window's last token

    double of_sinks(int n) const { return std::accumulate(sinks.begin(), sinks.begin() + n, 0.0) / (double)queries; }
    double distance() const {
        double sum = 0;
        for (size_t d = 0; d < by_distance.size(); d++) { sum += (double)d * by_distance[d]; }
        return sum / (double)queries;
    }
    // the weight at the distances from .. to - 1
    double weight(size_t from, size_t to) const {
        double sum = 0;
        for (size_t d = from; d < std::min(to, by_distance.size()); d++) { sum += by_distance[d]; }
        return sum / (double)queries;
    }
    int window90() const {
        const double enough = 0.9 * weight(0, by_distance.size());
        double sum = 0;
        size_t W = 0;
        while (W < by_distance.size() && sum < enough) { sum += by_distance[W++] / (double)queries; }
        return (int)W;
    }
    double live_tiles() const { return live / (double)tiles; }
};

// The statistics of all heads of a model at one length. Only a CPU build computes them (run/plan.h refuses --heads
// elsewhere), for any model's checkpoint.
template <bool Causal> struct HeadWatch {
    int NH, T;
    std::vector<HeadStatistics> heads;          // (L,NH)
    std::vector<double> sums;                   // see head_sums_kernel, for one layer and B windows of T tokens
    std::vector<float> live;

    HeadWatch(int L, int NH, int B, int T)
        : NH(NH), T(T), heads((size_t)L * NH), sums((size_t)B * NH * (DISTANCE_SUMS + T)),
          live((size_t)B * NH * ceil_div(T, LIVE_TILE)) {
        for (HeadStatistics& head : heads) {
            head.sinks.assign(HEAD_SINKS, 0.0);
            head.by_distance.assign((size_t)T, 0.0);
        }
    }

    // Adds the results of layer l for B windows of T tokens, where only the first lengths[b] count: qkv (B,T,OC) after
    // the encoding's prepare_forward, and lse (B,NH,T) from attention_forward.
    void add([[maybe_unused]] int l, const PositionView& layer, [[maybe_unused]] const floatX* qkv,
             [[maybe_unused]] const float* lse, int B, [[maybe_unused]] const int* lengths,
             [[maybe_unused]] Stream stream) {
        with_position(layer, [&](auto position) {
            if constexpr (!ON_GPU) {
                const auto bias = position.bias();
                using Bias = std::decay_t<decltype(bias)>;
                AttentionDims dims = attention_dims(position, T, 0);
                dims.kv_len = lengths;
                const float least = 0x1p-24f / (float)T;
                const Grid grid((size_t)B * NH, ATTENTION_THREADS, head_sums_shared(dims), stream);
                launch(head_sums_kernel<Causal, Bias>, grid, sums.data(), live.data(), qkv, lse, bias, dims, least);
                if constexpr (std::is_base_of_v<CableBias, Bias>) {
                    FlashBiasArgs args = {};
                    bias.fill(args);
                    add_ranges(l, args, B, lengths);
                }
            }
        });
        for (int bh = 0; bh < B * NH; bh++) {
            const double* of_head = sums.data() + (size_t)bh * (DISTANCE_SUMS + (size_t)T);
            HeadStatistics& head = heads[(size_t)(l * NH + bh % NH)];
            const uint64_t n = (uint64_t)lengths[bh / NH], tiles = ceil_div(n, (uint64_t)LIVE_TILE);
            head.queries += n;
            head.tiles += Causal ? tiles * (tiles + 1) / 2 : tiles * tiles;
            head.entropy += of_head[ENTROPY_SUM];
            head.live += of_head[LIVE_SUM];
            for (size_t j = 0; j < HEAD_SINKS; j++) { head.sinks[j] += of_head[SINK_SUMS + j]; }
            for (size_t d = 0; d < (size_t)T; d++) { head.by_distance[d] += of_head[DISTANCE_SUMS + d]; }
        }
    }

private:
    // b, g and S of CABLE's encodings
    void add_ranges(int l, const FlashBiasArgs& args, int B, const int* lengths) {
        const size_t chunks = ceil_div((size_t)T, (size_t)CABLE_CHUNK);
        for (size_t bh = 0; bh < (size_t)B * NH; bh++) {
            HeadStatistics& head = heads[(size_t)l * NH + bh % NH];
            double before = 0;
            for (size_t t = 0; t < (size_t)lengths[bh / NH]; t++) {
                const double S = args.S_origin[bh * chunks + t / CABLE_CHUNK] + args.S_offset[bh * T + t];
                head.b.add(S - before);
                head.g.add(args.g[bh * T + t]);
                before = S;
            }
            head.S.add(before);
        }
    }
};

// A record of log.jsonl, for windows `stride` apart; by_distance: the weight at the distances 0, 1, 2-3, 4-7, ...
inline Json head_json(const HeadStatistics& head, int layer, int h, const PositionConfig& position, int T,
                      int stride) {
    Json sinks = Json::object(), by_distance = Json::array();
    for (int n : SHOWN_SINKS) { sinks[std::to_string(n)] = head.of_sinks(n); }
    by_distance.push_back(head.weight(0, 1));
    for (size_t d = 1; d < head.by_distance.size(); d *= 2) { by_distance.push_back(head.weight(d, 2 * d)); }
    Json j = {{"kind", "head"}, {"pos", position.name}, {"T", T}, {"T_train", position.T_train}, {"stride", stride},
              {"layer", layer}, {"head", h}, {"queries", head.queries}, {"sink_weight", sinks},
              {"entropy", head.entropy / (double)head.queries}, {"distance", head.distance()},
              {"window90", head.window90()}, {"live_tiles", head.live_tiles()}, {"by_distance", by_distance}};
    if (head.g.count > 0) {
        j["b"] = head.b.json();
        j["g"] = head.g.json();
        j["S"] = head.S.json();
    }
    return j;
}

// Makes evaluations with these activations add up the statistics of all heads.
template <class Model, class Acts> auto watch_heads(Model& model, Acts& acts, int B, int T) {
    constexpr bool causal = std::decay_t<decltype(model.config)>::causal;
    auto watch = std::make_unique<HeadWatch<causal>>(model.config.L, model.config.NH, B, T);
    acts.watch = [&model, &acts, to = watch.get()](int l, const PositionView& layer, const floatX* qkv,
                                                   const float* lse, int rows) {
        to->add(l, layer, qkv, lse, rows, acts.watched_lengths, model.stream);
    };
    return watch;
}
