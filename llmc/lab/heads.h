// lab/heads.h -- inside attention: where each head looks (--heads), and the biases of a text's scores (--dump_bias).
//
// --heads takes a second pass over the scores of each layer, from the lse that its attention has stored, in memory that
// grows with T and not with T x T. With P_ij = e^(logit_ij - lse_i) and the mean over all queries i of all windows:
//   sinks(n)   = mean sum_{j < n} P_ij                      the weight of the first n keys of a window
//   entropy    = mean -sum_j P_ij log P_ij                  nats
//   distance   = mean sum_j P_ij |i - j|
//   window90   = the smallest W for which the keys inside --window W, |i - j| < W, have 90 % of all weight
//   live_tiles = the share of tiles of 64 queries and 64 keys (causal: of those on and below the diagonal) in which a
//                weight is above 2^-24 / T: without the rest no sum of a row would change in float32
#pragma once

#include "../attention/any_bias.cuh"
#include "../engine/files/safetensors.h"
#include "../engine/model.cuh"

constexpr int LIVE_TILE = 64;                   // a multiple of ATTENTION_TILE
constexpr int HEAD_SINKS = 16;                  // keys whose weights are summed one by one

// The kernel's sums for one (batch, head): these, and then the weight at each distance, (T)
enum HeadSum { ENTROPY_SUM, LIVE_SUM, SINK_SUMS, DISTANCE_SUMS = SINK_SUMS + HEAD_SINKS };

// The sums of a layer's heads over windows of T tokens, counting lengths[b] of them: sums (B*NH,DISTANCE_SUMS+T), live
// (B*NH,ceil(T/LIVE_TILE)), qkv (B,T,OC) after the encoding's prepare_forward, lse (B,NH,T) from attention_forward
void head_sums(double* sums, float* live, const floatX* qkv, const float* lse, const PositionView& layer,
               const int* lengths, int B, int T, Stream stream);

#if !defined(KERNELS_ELSEWHERE)
// One block per (batch, head), so that every sum has one writer and one order; of one thread, as only a CPU runs it.
template <bool Causal, bool LastFirst, class Bias>
__global__ void head_sums_kernel(double* sums, float* live, const floatX* qkv, const float* lse, Bias bias,
                                 AttentionDims dims, float least) {
    constexpr int TILE = ATTENTION_TILE;
    const int HS = dims.HS;
    const int width = dims.padded_HS();
    const int bh = blockIdx.x;
    const Visits<Causal, LastFirst> visits(dims, bh);       // cope wants the last first
    const int T = visits.tokens;
    const int live_tiles = ceil_div(dims.stride, LIVE_TILE);
    float* Q_T = dynamic_shared();                          // (HS, TILE)
    float* K_tile = Q_T + HS * TILE;                        // (TILE, width)
    float* P = K_tile + TILE * width;                       // (keys, queries): scores, then weights
    float* entropy = P + TILE * TILE;                       // of each query, and its largest weight, in this tile
    float* largest = entropy + TILE;
    const floatX* of_head = qkv + (size_t)(bh / dims.NH) * dims.stride * dims.OC + bh % dims.NH * HS;
    const Matrix<const floatX> q = view(of_head, T, HS, dims.OC);
    const Matrix<const floatX> k = view(of_head + dims.C(), T, HS, dims.OC);
    sums += (size_t)bh * (DISTANCE_SUMS + dims.stride);
    live += (size_t)bh * live_tiles;                        // the largest weight of each tile in these rows
    lse += (size_t)bh * dims.stride;
    for (int e = 0; e < DISTANCE_SUMS + dims.stride; e++) { sums[e] = 0.0; }
    for (int i0 = 0; i0 < T; i0 += TILE) {
        const int ni = imin(TILE, T - i0);
        load_tile_transposed(Q_T, block(q, i0, ni, 0, HS), dims.scale);
        for (int n = 0; i0 % LIVE_TILE == 0 && n < live_tiles; n++) { live[n] = 0.0f; }
        for (const PairTile<Causal>& t : visits.keys_of(i0, ni)) {
            const int j0 = t.j0;
            const int nj = t.nj;
            load_tile(K_tile, block(k, j0, nj, 0, HS), 1.0f);
            // 1. scores = k q^T, as in attention_forward_kernel
            block_matmul(view(P, nj, round_up(ni, LANES), TILE), view(K_tile, nj, HS, width), view(Q_T, HS, TILE));
            // 2. weights; a SIMD lane per query sums its entropy
            t.hide(transposed(view(P, nj, ni, TILE)));
            add_bias(bias, view(P, nj, ni, TILE), bh, t, dims.factors(bh, i0));
            for (int r = 0; r < ni; r++) { entropy[r] = largest[r] = 0.0f; }
            for (int c = 0; c < nj; c++) {
                SIMD
                for (int r = 0; r < ni; r++) {
                    float log_p = P[c * TILE + r] - lse[i0 + r];
                    log_p = log_p < LEAST_LOGIT ? LEAST_LOGIT : log_p;
                    const float p = fast_exp(log_p);
                    P[c * TILE + r] = p;
                    entropy[r] -= p * log_p;
                    largest[r] = p > largest[r] ? p : largest[r];
                }
            }
            // 3. by distance: the diagonals r - c. The tiles on the diagonal have each distance twice
            const auto diagonal = [&](int d) {
                float sum = 0.0f;
                for (int r = imax(0, d); r < imin(ni, nj + d); r++) { sum += P[(r - d) * TILE + r]; }
                return sum;
            };
            for (int d = 1 - nj; d < ni; d++) {
                const int distance = i0 > j0 ? i0 - j0 + d : j0 - i0 - d;
                if (i0 != j0) { sums[DISTANCE_SUMS + distance] += diagonal(d); }
                else if (d >= 0) { sums[DISTANCE_SUMS + d] += diagonal(d) + (d > 0 ? diagonal(-d) : 0.0f); }
            }
            // 4. by key, the sinks
            for (int c = 0; j0 == 0 && c < imin(HEAD_SINKS, nj); c++) {
                float sum = 0.0f;
                for (int r = 0; r < ni; r++) { sum += P[c * TILE + r]; }
                sums[SINK_SUMS + c] += sum;
            }
            for (int r = 0; r < ni; r++) {
                sums[ENTROPY_SUM] += entropy[r];
                live[j0 / LIVE_TILE] = fmaxf(live[j0 / LIVE_TILE], largest[r]);
            }
        }
        // 5. the tiles of these 64 queries
        if ((i0 + TILE) % LIVE_TILE > 0 && i0 + TILE < T) { continue; }
        for (int n = 0; n < live_tiles; n++) { sums[LIVE_SUM] += live[n] > least ? 1.0 : 0.0; }
    }
}

LAUNCHER void head_sums([[maybe_unused]] double* sums, [[maybe_unused]] float* live, [[maybe_unused]] const floatX* qkv,
                        [[maybe_unused]] const float* lse, const PositionView& layer, const int* lengths, int B, int T,
                        Stream stream) {
    with_bias(layer, [&](auto bias) {
        AttentionDims dims = attention_dims(layer, T, 0);
        dims.kv_len = lengths;
        const size_t tile = ATTENTION_TILE, width = (size_t)dims.padded_HS();
        const size_t shared = sizeof(float) * (tile * dims.HS + tile * width + tile * tile + 2 * tile);
        const Grid grid((size_t)B * layer.NH, ATTENTION_THREADS, shared, stream);
        if constexpr (!ON_GPU) {
            using Bias = decltype(bias);
            auto kernel = layer.causal ? head_sums_kernel<true, false, Bias> : head_sums_kernel<false, false, Bias>;
            if (encoding_traits(*layer.config).hooks & COUNTS_GATES) { kernel = head_sums_kernel<true, true, Bias>; }
            launch(kernel, grid, sums, live, qkv, lse, bias, dims, 0x1p-24f / (float)T);
        }
    });
}
#endif

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
    bool has_relu = false;                      // of its encoding, see Encoding

    explicit HeadStatistics(int T) : sinks(HEAD_SINKS), by_distance((size_t)T) {}
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
    bool dead() const { return has_relu && S.most == 0; }                       // S has never moved
};

// The statistics of all heads of a model at one length, on a CPU only: run/plan.h refuses --heads elsewhere.
template <bool Causal> struct HeadWatch {
    int NH, T;
    std::vector<HeadStatistics> heads;          // (L,NH)
    std::vector<double> sums;                   // see head_sums_kernel, for one layer and B windows of T tokens
    std::vector<float> live;

    HeadWatch(int L, int NH, int B, int T)
        : NH(NH), T(T), heads((size_t)L * NH, HeadStatistics(T)), sums((size_t)B * NH * (DISTANCE_SUMS + T)),
          live((size_t)B * NH * ceil_div(T, LIVE_TILE)) {}

    // Adds the results of layer l, from what head_sums takes.
    void add(int l, const PositionView& layer, const floatX* qkv, const float* lse, int B, const int* lengths,
             Stream stream) {
        head_sums(sums.data(), live.data(), qkv, lse, layer, lengths, B, T, stream);
        const FlashBiasArgs args = bias_arrays(layer);
        if (args.S_offset != nullptr) { add_ranges(l, args, B, lengths); }
        for (int bh = 0; bh < B * NH; bh++) {
            const double* of_head = sums.data() + (size_t)bh * (DISTANCE_SUMS + (size_t)T);
            HeadStatistics& head = heads[(size_t)(l * NH + bh % NH)];
            const uint64_t n = (uint64_t)lengths[bh / NH], tiles = ceil_div(n, (uint64_t)LIVE_TILE);
            head.has_relu = encoding_traits(*layer.config).has_relu;
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
    for (int n : {1, 4, HEAD_SINKS}) { sinks[std::to_string(n)] = head.of_sinks(n); }
    by_distance.push_back(head.weight(0, 1));
    for (size_t d = 1; d < head.by_distance.size(); d *= 2) { by_distance.push_back(head.weight(d, 2 * d)); }
    Json j = {{"kind", "head"}, {"pos", position.name}, {"T", T}, {"T_train", position.T_train}, {"stride", stride},
              {"layer", layer}, {"head", h}, {"queries", head.queries}, {"sink_weight", sinks},
              {"entropy", head.entropy / (double)head.queries}, {"distance", head.distance()},
              {"window90", head.window90()}, {"live_tiles", head.live_tiles()}, {"by_distance", by_distance}};
    if (head.g.count > 0) { j.update({{"b", head.b.json()}, {"g", head.g.json()}, {"S", head.S.json()}}); }
    if (head.has_relu) { j["dead"] = head.dead(); }
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

// ----------------------------------------------------------------------------------------------------------
// --dump_bias

// The bias that one head of one layer adds to its scores over a text: (T,T), from activations that have seen the text.
std::vector<float> bias_matrix(const PositionView& view, int head, int T, Stream stream);
#if !defined(KERNELS_ELSEWHERE)
// out (T,T): B_ij for j <= i, times the query's factor if there are factors, 0 elsewhere.  One block a row.
template <class Bias>
__global__ void bias_matrix_kernel(float* out, Bias bias, const float* factor, int bh, int T) {
    const int i = blockIdx.x;
    const float factor_i = factor == nullptr ? 1.0f : factor[(size_t)bh * T + i];
    for (int j0 = 0; j0 < T; j0 += ATTENTION_TILE) {
        const auto tile = bias.tile(bh, i, j0);
        for (int c = threadIdx.x; c < ATTENTION_TILE && j0 + c < T; c += blockDim.x) {
            out[(size_t)i * T + j0 + c] = j0 + c <= i ? factor_i * tile(0, c) : 0.0f;
        }
    }
}

LAUNCHER std::vector<float> bias_matrix(const PositionView& view, int head, int T, Stream stream) {
    std::vector<float> host((size_t)T * T);
    const EncodingTraits traits = encoding_traits(*view.config);
    check(traits.form != FlashBias::None, "--dump_bias: %s adds no bias to the scores", view.config->name.c_str());
    check((traits.hooks & COUNTS_GATES) == 0, "--dump_bias: %s has no matrix to write: its biases depend on the scores "
          "of other keys, and are not kept", view.config->name.c_str());
    with_bias(view, [&](auto bias) {
        if constexpr (!decltype(bias)::counts_gates) {
            float* out = (float*)device_malloc(sizeof(float) * T * T);
            const Grid grid((size_t)T, 128, 0, stream);
            launch(bias_matrix_kernel<decltype(bias)>, grid, out, bias, view.factor, head, T);
            copy_to_host(host.data(), out, sizeof(float) * T * T, stream);
            device_free(out);
        }
    });
    return host;
}
#endif

// Which matrices --dump_bias writes.
enum BiasChoice { BIAS_ALL = -1, BIAS_MEAN = -2, BIAS_PARTS = -3 };     // of layers or heads; the last two of heads
constexpr const char* BIAS_WORDS[] = {"all", "mean", "parts"};

inline std::string bias_name(int choice) { return choice < 0 ? BIAS_WORDS[-1 - choice] : std::to_string(choice); }

// "3", "all" or, for heads, "mean" or "parts"
inline bool parse_bias_choice(const std::string& text, int count, bool head, int& choice) {
    for (choice = BIAS_ALL; choice >= (head ? BIAS_PARTS : BIAS_ALL); choice--) {
        if (text == bias_name(choice)) { return true; }
    }
    return parse_value(text, between(0, count - 1), choice);
}

inline Json json_matrix(const std::vector<float>& matrix, int T) {
    Json rows = Json::array();
    for (auto row = matrix.begin(); row != matrix.end(); row += T) { rows.push_back(std::vector<float>(row, row + T)); }
    return rows;
}

// What the weights of one head are made of, over a text of T tokens: softmax of q_i.k_j + B_ij over the visible keys.
//   q, k (T,HS)   as attention reads them, after the encoding's prepare_forward; q times the scale of the scores
//   window        of this layer, 0: none
// and B, unless it is 0:
//   S_offset (T), S_origin (ceil(T/128)), g (T), log, inside       cable and kcable, as in cable.cuh, g times a factor
//   by_distance (T)                                                B_ij at the distances i - j = 0 .. T-1
//   rows (T,T)                                                     any other, or with ssmax, as bias_matrix has it
inline Json bias_parts(const PositionView& view, const floatX* qkv, int head, int T, Stream stream) {
    Json j = Json::object();
    const auto numbers = [&](auto* device, size_t count) {
        std::vector<std::decay_t<decltype(*device)>> host(count);
        copy_to_host(host.data(), device, sizeof(*device) * count, stream);
        return host;
    };
    const FlashBias form = encoding_traits(*view.config).form;
    const size_t HS = (size_t)view.HS, row = (size_t)view.OC;
    const float scale = view.score_factor * score_factor(view) / sqrtf((float)view.HS);
    const auto all = numbers(qkv, (size_t)T * row);
    std::vector<float> q, k;
    for (size_t t = 0; t < (size_t)T; t++) {
        const floatX* of = &all[t * row + (size_t)head * HS];
        for (size_t c = 0; c < HS; c++) {
            q.push_back((float)of[c] * scale);
            k.push_back((float)of[(size_t)view.C() + c]);
        }
    }
    j = {{"q", q}, {"k", k}, {"window", view.mask.window}};
    const FlashBiasArgs args = bias_arrays(view);
    if (args.S_offset != nullptr && (view.factor == nullptr || !args.inside)) {
        const size_t at = (size_t)head * T, chunks = ceil_div((size_t)T, (size_t)CABLE_CHUNK);
        j["S_offset"] = numbers(args.S_offset + at, (size_t)T);
        j["S_origin"] = numbers(args.S_origin + (size_t)head * chunks, chunks);
        std::vector<float> g = numbers(args.g + at, (size_t)T);
        if (view.factor != nullptr) {
            const std::vector<float> factor = numbers(view.factor + at, (size_t)T);
            for (size_t t = 0; t < g.size(); t++) { g[t] *= factor[t]; }
        }
        j["g"] = g;
        j["log"] = form == FlashBias::LogDistance;
        j["inside"] = args.inside;
    } else if (form != FlashBias::None) {
        const std::vector<float> matrix = bias_matrix(view, head, T, stream);
        const bool line = form == FlashBias::Linear || form == FlashBias::Toeplitz;
        const std::vector<float> last_row(matrix.rbegin(), matrix.rbegin() + T);
        if (line && view.factor == nullptr) { j["by_distance"] = last_row; }
        else { j["rows"] = json_matrix(matrix, T); }
    }
    return j;
}

// Writes DIRECTORY/bias_LAYER_HEAD.json for scripts/plot.py: the bias over the tokens `ids`, which are shown as
// `labels`: one matrix, or a list of them if there are several layers or heads. HEAD "parts", for scripts/explorer.py:
// bias_parts of each head instead, which every encoding but cope has.
template <class Model>
void write_bias(Model& model, const std::vector<int>& ids, const std::vector<std::string>& labels, int layer, int head,
                const std::string& directory) {
    const int T = (int)ids.size(), NH = model.config.NH;
    auto acts = activations_describe(model, 1, T, Purpose::Generate, 0);
    activations_allocate(acts);
    std::vector<float> logits;
    forward_logits(model, acts, ids.data(), T, 0, logits);
    check_finite("logits", logits.data(), logits.size());
    Json matrices = Json::array();
    for (int l = std::max(layer, 0); l < (layer == BIAS_ALL ? model.config.L : layer + 1); l++) {
        const PositionView view = layer_position(model, acts, l, T).bias();
        std::vector<double> mean(head == BIAS_MEAN ? (size_t)T * T : 0);
        for (int h = std::max(head, 0); h < (head < 0 ? NH : head + 1); h++) {
            Json one = {{"layer", l}, {"head", h}};
            if (head == BIAS_PARTS) {
                one.update(bias_parts(view, acts.a.qkv(l), h, T, model.stream));
            } else {
                const std::vector<float> matrix = bias_matrix(view, h, T, model.stream);
                for (size_t i = 0; i < mean.size(); i++) { mean[i] += matrix[i] / NH; }
                one["bias"] = json_matrix(matrix, T);
            }
            if (mean.empty()) { matrices.push_back(one); }
        }
        if (mean.empty()) { continue; }
        matrices.push_back({{"layer", l}, {"head", "mean"}, {"bias", json_matrix({mean.begin(), mean.end()}, T)}});
    }
    Json j = {{"pos", model.config.position.name}, {"tokens", labels}};
    if (head == BIAS_PARTS) {                               // which keys are visible: position/tensors.cuh
        const AttentionMask& mask = model.config.position.mask;
        std::vector<int> begins(mask.by_document() ? (size_t)T : 0);
        copy_to_host(begins.data(), acts.documents, sizeof(int) * begins.size(), model.stream);
        j.update({{"sinks", mask.sinks}, {"begins", begins}});
    }
    acts.release();
    if (layer == BIAS_ALL || head == BIAS_ALL || head == BIAS_PARTS) { j["matrices"] = matrices; }
    else { for (const char* key : {"layer", "head", "bias"}) { j[key] = matrices[0][key]; } }
    const std::string path = directory + "/bias_" + bias_name(layer) + "_" + bias_name(head) + ".json";
    io_mkdirs(directory);
    write_text_whole(path, json_text(j) + "\n");
    printf("wrote %s\n", printable(path, LONGEST_MESSAGE).c_str());
}
