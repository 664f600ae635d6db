// engine/model.cuh -- the activations of a model, of either trainer: one shape, with the tokens of a batch.
#pragma once

#include <functional>

#include "../base/gpu.h"
#include "../classifier.cuh"
#include "../embedding.cuh"
#include "parameters.cuh"
#include "../position/table.h"

// ----------------------------------------------------------------------------------------------------------
// the tokens of a batch

// Copies the tokens of micro-batches to the device. Each micro-batch of a step has its own slot of pinned memory, so
// that the host runs ahead of the device; the slots are free again at the end of the step, when the host has waited.
struct DeviceBatch {
    size_t N = 0;                                           // capacity in tokens
    int *tokens = nullptr, *targets = nullptr;              // on the device: (N) each
    EmbeddingRows plan;                                     // (N), (N+1), (most_hot_tokens+1)
    int *picked = nullptr, *lengths = nullptr;              // rows that have a target (N); tokens of each sequence (N)
    int* pinned = nullptr;                                  // (slots, ints(N))
    size_t room = 0;                                        // ints of it

    static size_t ints(size_t N) { return 6 * N + 2 + EmbeddingPlan::most_hot_tokens(N); }
    void allocate(size_t capacity) { lay_out(capacity, (int*)device_malloc(sizeof(int) * ints(capacity))); }
    void lay_out(size_t capacity, int* memory) {
        N = capacity;
        tokens = memory;
        targets = tokens + N;
        plan.rows = targets + N;
        plan.first = plan.rows + N;
        picked = plan.first + N + 1;
        lengths = picked + N;
        plan.hot = lengths + N;
    }
    void release() {
        device_free(tokens);
        pinned_free(pinned);
        *this = DeviceBatch();
    }
    void reserve(size_t count) {
        if (room >= count) { return; }
        pinned_free(pinned);
        pinned = (int*)pinned_malloc(sizeof(int) * count);
        room = count;
    }
    // n tokens; targets may be null
    void load(size_t slot, size_t of, const int* host_tokens, const int* host_targets, size_t n, Stream stream) {
        reserve(of * ints(N));
        loaded = {slot, n};
        copy(tokens, slot, host_tokens, n, stream);
        if (host_targets != nullptr) { copy(targets, slot, host_targets, n, stream); }
    }
    // Sorts the loaded rows by token, for the end of the backward: late, while the device is busy with the layers
    const EmbeddingRows& by_token(Stream stream) {
        const auto [slot, n] = loaded;
        EmbeddingPlan built;
        built.build(pinned + slot * ints(N), n);
        copy(plan.rows, slot, built.rows.data(), n, stream);
        copy(plan.first, slot, built.first.data(), built.first.size(), stream);
        copy(plan.hot, slot, built.hot.data(), built.hot.size(), stream);
        plan.count(built);
        return plan;
    }
    // Copies the indices and targets of the rows, of `of` loaded ones, that have a target, and the lengths of the B
    // sequences (null: all full). Rows without a target pad them to `picks`, so that products have few different sizes.
    size_t picks = 0;
    void pick(size_t slot, std::vector<int> host_picked, std::vector<int> host_targets, size_t of,
              const int* host_lengths, size_t B, Stream stream) {
        picks = imin(round_up(host_picked.size(), ROW_SIZES), of);
        host_picked.resize(picks, 0);
        host_targets.resize(picks, IGNORE_INDEX);
        copy(picked, slot, host_picked.data(), picks, stream);
        copy(targets, slot, host_targets.data(), picks, stream);
        if (host_lengths != nullptr) { copy(lengths, slot, host_lengths, B, stream); }
    }

private:
    std::pair<size_t, size_t> loaded;                       // the slot, and its tokens

    // an array has the same offset in pinned memory and on the device
    void copy(int* to, size_t slot, const int* from, size_t count, Stream stream) {
        check(count <= N + 1, "a batch of %zu values, laid out for %zu", count, N);         // `first` has N + 1
        int* at = pinned + slot * ints(N) + (to - tokens);
        std::copy(from, from + count, at);
        copy_to_device_async(to, at, sizeof(int) * count, stream);
    }
};

// ----------------------------------------------------------------------------------------------------------
// activations

// Pieces: evaluates windows of T tokens in pieces of at most PIECE (lab/evaluate.h)
enum class Purpose { Train, Evaluate, Pieces, Generate };
constexpr int PIECE = 2048;
// Elements of logits in memory at a time. A GPU needs long products.
constexpr size_t LOGITS_BOUND = (sizeof(floatX) == 2 ? 256u + 32u * ON_GPU : 32u) << 20;

// The rows of floatX that a row of float32 takes
constexpr size_t FLOAT_ROWS = sizeof(float) / sizeof(floatX);
// How many rows of floatX the buffer for the logits of N tokens has. Evaluation keeps logits in float32, FLOAT_ROWS
// times fewer rows of them in the same buffer, also between two steps of training. processors: of the GPU
inline size_t logit_rows(size_t N, size_t Vp, size_t C, Purpose purpose, int processors = device_processors()) {
    const size_t wanted = purpose == Purpose::Train ? N : FLOAT_ROWS * N;
    const size_t most = std::max(FLOAT_ROWS, std::min(wanted, LOGITS_BOUND / Vp));
    // A CPU keeps the order of its sums.
    if (PACK == 1 || wanted <= most || most < 128) { return most; }
    // A GPU gets equal parts, in whole tiles of its products, 128 x 256. The gradient (rows,C) of the hidden states has
    // the fewest tiles: a multiple of the processors, if that many fit.
    const size_t across = ceil_div(C, (size_t)256);
    const size_t turns = most / 128 * across / (size_t)processors;      // of all processors
    const size_t fits = turns * (size_t)processors / across;            // in a column of tiles
    const size_t down = fits == 0 ? most / 128 : fits;
    return round_up(ceil_div(wanted, ceil_div(wanted, down * 128)), (size_t)128);
}

// The shape of a model for its encodings, with arrays over time of (B,NH,stride)
template <class Config>
PositionShape position_shape(const Config& c, int B, int stride, bool decodes = false) {
    return {c.L, c.NH, c.C / c.NH, B, stride, Config::causal, decodes};
}

// The activations of one shape, and their tokens. Pointers: the trainer's struct of them, made from its table.
template <class Pointers> struct ActivationsOf {
    int B = 0, T = 0;                                       // capacity
    int piece = 0;                                          // tokens of a sequence that one forward takes: T, or fewer
    Purpose purpose = Purpose::Train;
    int forgotten = 0;                                      // see PositionView
    size_t lost = 0;                                        // bytes of forgotten keys, not in memory
    int chunk = 0;                                          // rows of logits held at once, as floatX
    TensorTable table, position_table;
    std::vector<PositionPart> position_parts;               // the encodings' places in position_table
    float *data = nullptr, *position_data = nullptr;
    bool used_memory = false;                               // may hold anything
    Pointers a;
    DeviceBatch batch;
    const int* kv_len = nullptr;                            // batch.lengths when sequences end before T, else null
    const int* documents = nullptr;                         // (B,T): begin of each token's document
    // Called for each layer after its attention (lab/dump.h, lab/evaluate.h), with the layer, its qkv, lse and B; and
    // the lengths of the B windows, on the host
    std::function<void(int, const PositionView&, const floatX*, const float*, int)> watch;
    const int* watched_lengths = nullptr;

    // tokens: of a forward; 0: all, or PIECE if the purpose is Pieces
    void set_shape(int batch, int length, Purpose use, int tokens = 0) {
        B = batch;
        T = length;
        purpose = use;
        piece = reserved() ? imin(T, PIECE) : T;
        if (tokens > 0) { piece = tokens; }
    }
    // Whether memory backs them only where they are written
    bool reserved() const { return purpose == Purpose::Pieces; }
    // Whether attention_decode runs over them
    bool decodes() const { return purpose == Purpose::Generate; }
    // The room of arrays over time in a forward of n tokens, which later ones may continue
    int stride(int n) const { return reserved() || decodes() ? T : n; }
    size_t bytes() const {
        const size_t floats = table.total + position_table.total, ints = DeviceBatch::ints((size_t)B * piece);
        return sizeof(float) * (floats + round_up(ints, (size_t)64)) - lost;        // chunks lie side by side
    }
    int chunk_of(bool backward) const { return backward ? chunk : chunk / (int)FLOAT_ROWS; }
    // the number of L layers for which an activation is kept
    int kept_layers(Keep keep, int L) const {
        const bool saved = keep == Keep::Saved && purpose == Purpose::Train;
        const bool cached = keep == Keep::Cached && purpose != Purpose::Evaluate;
        return saved || cached ? L : 0;
    }
    void add(const char* name, Keep keep, int L, size_t rows, size_t cols, size_t element) {
        if (keep == Keep::Backward && purpose != Purpose::Train) { return; }
        TensorSpec s = {name, kept_layers(keep, L), rows, cols};
        s.element = element;
        table.add(s);
    }
    void add_position(const PositionTables& position) {
        position_parts = position.parts;
        for (TensorSpec s : position.acts) {
            s.layers = kept_layers(s.keep, s.layers);
            position_table.add(s);
        }
    }
    template <class T> void point(LayerPointer<T>& p, const char* name) {
        if (table.find(name) >= 0) { p = table.pointer_as<T>(data, name); }
    }
    void allocate() {
        if (bytes() > device_memory_available()) {
            die(EXIT_OUT_OF_MEMORY, "%d x %d tokens need %s of activations, but %s are available", B, T,
                format_bytes((double)bytes()).c_str(), format_bytes((double)device_memory_available()).c_str());
        }
        const auto memory = reserved() ? device_reserve : device_malloc;
        place((float*)memory(bytes() + lost), false);
    }
    // Lays them out in memory that has been used.
    void place(float* memory, bool used = true) {
        data = memory;
        used_memory = used;
        position_data = data + table.total;
        batch.lay_out((size_t)B * piece, (int*)(position_data + position_table.total));
    }
    void release() {
        if (reserved()) { device_unreserve(data, bytes() + lost); }
        else { device_free(data); }
        pinned_free(batch.pinned);
        *this = ActivationsOf();
    }
};

// Loads (B,T) tokens and targets; returns the rows that have a target. targets: may be null; lengths (B) or null: all T
template <class Model, class Acts>
std::vector<int> load_batch(Model& model, Acts& acts, size_t slot, size_t of, const int* tokens, const int* targets,
                            const int* lengths, int B, int T, bool backward) {
    const size_t N = (size_t)B * T;
    std::vector<int> picked, wanted;
    for (size_t n = 0; n < N && targets != nullptr; n++) {
        if (targets[n] == IGNORE_INDEX) { continue; }
        picked.push_back((int)n);
        wanted.push_back(targets[n]);
    }
    if (!backward) { settle_weights(model); }
    acts.batch.load(slot, of, tokens, nullptr, N, model.stream);
    acts.batch.pick(slot, picked, wanted, N, lengths, (size_t)B, model.stream);
    acts.kv_len = lengths != nullptr ? acts.batch.lengths : nullptr;
    return picked;
}

// --document_mask: finds where the documents of the loaded tokens begin.
template <class Model, class Acts> void find_documents(const Model& model, Acts& acts, int B, int T, int t0) {
    const AttentionMask& mask = model.config.position.mask;
    if (!mask.by_document()) { return; }
    find_documents(acts.a.documents(), acts.batch.tokens, mask.end_of_text, B, T, t0, acts.stride(T), model.stream);
    acts.documents = acts.a.documents();
}

// Dies unless the n numbers of a result are finite.
template <class T> void check_finite(const std::string& what, const T* x, size_t n) {
    const T* bad = std::find_if(x, x + n, [](T v) { return !std::isfinite(v); });
    if (bad == x + n) { return; }
    die(EXIT_DIVERGED, "%s: expected finite numbers, got %g: the model has diverged, or its weights are too large",
        what.c_str(), (double)*bad);
}

// Operations per token of training, for the MFU. The weights of a layer's products: qkv OC C, attention's output C C,
// the MLP 8 C C. GPT-2's head has C V; BERT's, which only masked tokens reach, is not counted.
template <class Model> double token_flops(const Model& model, int T) {
    const auto& c = model.config;
    const double C = c.C, head = c.causal ? C * c.V : 0.0;
    double keys = 0.0;                                      // of the average layer
    for (int l = 0; l < c.L; l++) {
        const AttentionMask mask = c.position.mask_of(l);
        keys += keys_per_query(T, c.causal, mask.window, mask.sinks) / c.L;
    }
    return flops_per_token(head + c.L * C * (model.OC + 9 * C), c.L, c.C, keys);
}

// The number of sequences of T tokens that fit into activations for acts.B of acts.T. As many tokens in shorter
// sequences may not fit: some buffers have an element per tile of 64 or chunk of 128 tokens, and the last may be short.
template <class Acts> size_t sequences_that_fit(const Acts& acts, int T) {
    size_t n = SIZE_MAX;
    for (int piece : {1, 64, 128}) { n = std::min(n, (size_t)acts.B * ceil_div(acts.T, piece) / ceil_div(T, piece)); }
    return n;
}

// Columns of qkv, the rows of qkvw: q, k, v, the encodings' own, padding to a multiple of 8
inline int qkv_columns(int C, int extra_columns) { return round_up(3 * C + extra_columns, 8); }
// The distance of two rows of qkv: on a GPU each begins on a cache line of 128 bytes
inline int qkv_row(int columns) { return ON_GPU ? round_up(columns, 128 / (int)sizeof(floatX)) : columns; }

// The encodings of a layer, for a forward of T tokens a sequence. grads: null while evaluating
template <class Model, class Acts>
LayerPosition layer_position(const Model& model, const Acts& acts, int layer, int T, float* grads = nullptr) {
    const PositionConfig& run = model.config.position;
    const std::vector<int>& here = run.pattern[(size_t)layer % run.pattern.size()];
    const int extra_columns = model.columns_of[(size_t)layer];
    PositionView common(position_shape(model.config, acts.B, acts.stride(T), acts.decodes()));
    common.run = &run;
    common.columns = qkv_columns(common.C(), extra_columns);
    common.OC = qkv_row(common.columns);
    common.kv_len = acts.kv_len;
    common.forgotten = acts.forgotten;
    common.mask = run.mask_of(layer);
    common.mask.documents = acts.documents;
    common.params = &model.table;
    common.acts = &acts.position_table;
    common.master = model.master;
    common.grads = grads;
    common.act_data = acts.position_data;
    LayerPosition all;
    all.new_padding = (run.pattern.size() > 1 || acts.used_memory) && common.columns > 3 * common.C() + extra_columns;
    for (auto part = here.rbegin(); part != here.rend(); ++part) {      // the last step comes first: position_step()
        const PositionPart& tensors = acts.position_parts[(size_t)*part];
        PositionView& v = all.views[(size_t)all.count++] = common;
        v.config = &run.parts[(size_t)*part];
        v.layer = (int)(std::find(tensors.layers.begin(), tensors.layers.end(), layer) - tensors.layers.begin());
        v.first_param = model.first_position_param + tensors.first_param;
        v.first_act = tensors.first_act;
        common.score_factor *= score_factor(v);
    }
    PositionView &scale = all.views[0], &bias = all.views[(size_t)all.count - 1];
    if ((encoding_traits(*bias.config).hooks & (ADDS_BIAS | COUNTS_GATES)) == ADDS_BIAS) { share_factors(bias, scale); }
    return all;
}
