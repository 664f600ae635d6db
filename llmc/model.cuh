// model.cuh -- what every trainer's model is made of: its parameters with their moments and gradients, the activations
// of one shape, and the sum of a step's gradients, whose order no split into micro-batches or ranks changes.
#ifndef LLMC_MODEL_CUH
#define LLMC_MODEL_CUH

#include "adamw.cuh"
#include "classifier.cuh"
#include "ranks/exchange.cuh"
#include "embedding.cuh"
#include "position/table.h"

// ----------------------------------------------------------------------------------------------------------
// parameters

struct Parameters {
    TensorTable table;                                      // the trainer's own tensors, then the encoding's
    size_t first_position_param = 0;                        // where those begin
    std::vector<FileTensor> files;                          // the same tensors in a checkpoint

    void add_position(const std::vector<TensorSpec>& params) {
        first_position_param = table.specs.size();
        for (const TensorSpec& s : params) { table.add(s); }
    }
    float* master = nullptr;                                // float32 weights
    floatX* weights = nullptr;                              // what the layers read: master, or its copy in bf16
    float *m = nullptr, *v = nullptr;                       // AdamW's moments
    double* norm_partial = nullptr;                         // partial sums of gradient_norm, one per chunk
    double* loss_sums = nullptr;                            // after them: one sum of losses per micro-batch of a step
    int leaf = 1;                                           // micro-batches whose gradients share a buffer
    // gradient buffers: tree[k] holds the sum of 2^k leaves, the last one is being filled
    std::vector<float*> tree;
    Stream stream = {};
};

// A tensor that no FileTensor names would be lost in every checkpoint.
inline void check_files(const Parameters& p) {
    for (const TensorSpec& s : p.table.specs) {
        const auto named = [&](const FileTensor& f) { return f.tensor == s.name; };
        check(std::any_of(p.files.begin(), p.files.end(), named),
              "tensor %s has no row in the trainer's table of files, so it would never be saved: add one",
              s.name.c_str());
    }
}

// Buffers of gradients that a step of so many leaves takes: one a level of the tree over them, and one to fill.
inline int gradient_buffers(int leaves) {
    int buffers = 0;
    for (int n = 1; n < 2 * leaves; n *= 2) { buffers++; }
    return buffers;
}

// Weights at their initial values; to train (micro_batches > 0) also the moments and the gradients.
inline void parameters_allocate(Parameters& p, uint64_t seed, int micro_batches) {
    const size_t bytes = sizeof(float) * p.table.total;
    p.stream = device_stream();
    p.master = (float*)device_malloc(bytes);
    const bool rounded = sizeof(floatX) != sizeof(float);
    p.weights = (floatX*)(rounded ? device_malloc(sizeof(floatX) * p.table.total) : (void*)p.master);
    std::vector<float> host(p.table.total);
    init_tensors(host.data(), p.table, p.files, seed);
    copy_to_device(p.master, host.data(), bytes, p.stream);
    round_weights(p.weights, p.master, p.table, seed, 0, p.stream);
    if (micro_batches == 0) { return; }
    p.m = (float*)device_malloc(bytes);
    p.v = (float*)device_malloc(bytes);
    const size_t chunks = ceil_div(p.table.total, NORM_CHUNK);
    p.norm_partial = (double*)device_malloc(sizeof(double) * (chunks + (size_t)micro_batches));
    p.loss_sums = p.norm_partial + chunks;
    const int buffers = gradient_buffers(micro_batches / p.leaf);
    for (int k = 0; k < buffers; k++) { p.tree.push_back((float*)device_malloc(bytes)); }
}

inline void parameters_free(Parameters& p) {
    for (float* g : p.tree) { device_free(g); }
    if ((void*)p.weights != (void*)p.master) { device_free(p.weights); }
    for (void* x : {(void*)p.master, (void*)p.m, (void*)p.v, (void*)p.norm_partial}) { device_free(x); }
}

// ----------------------------------------------------------------------------------------------------------
// a step's gradient: for each micro-batch i of n, gradient_begin, backward into what it returns, gradient_add; then
// gradient_end. A leaf is p.leaf micro-batches, which backward adds up in one buffer; a tree sums the leaves.

// on the device; its norm and the mean loss of so many targets
struct StepGradient {
    float* grads;
    double norm, loss;
    size_t targets;
};

// the buffer that micro-batch i adds its gradient to; zeroed for the first one of a leaf
inline float* gradient_begin(Parameters& p, int i) {
    if (i % p.leaf == 0) { device_zero(p.tree.back(), sizeof(float) * p.table.total, p.stream); }
    return p.tree.back();
}

// Micro-batch i of this rank's n is done. Leaves meet in a binary tree over their index: tree[k] holds the sum of 2^k
// neighbours until its sibling is done. After the last one, the sum of all, the other ranks' too, is in tree.back().
inline void gradient_add(Parameters& p, int i, int n) {
    if ((i + 1) % p.leaf != 0) { return; }
    i /= p.leaf;
    n /= p.leaf;
    float*& work = p.tree.back();
    auto add = [&](float*& to) {                                    // work is the right sibling of `to`
        add_to(to, work, p.table.total, p.stream);
        std::swap(to, work);
    };
    int k = 0;
    for (; i >> k & 1; k++) { add(p.tree[(size_t)k]); }
    if (i + 1 < n) {
        std::swap(p.tree[(size_t)k], work);
        return;
    }
    for (int j = k + 1; n >> j != 0; j++) {                         // not a power of two: the subtrees that wait
        if (n >> j & 1) { add(p.tree[(size_t)j]); }
    }
    exchange_sum(work, p.table.total, "sum of the gradients", p.stream);
    exchange_gather(work, p.table.total, "sum of the gradients", p.stream);
}

// Number of targets in a step, over all micro-batches of all ranks: what the sum of losses is divided by. n: of this
// rank
inline size_t count_targets(const int* targets, size_t n) {
    size_t counted = 0;
    for (size_t i = 0; i < n; i++) { counted += targets[i] != IGNORE_INDEX; }
    std::vector<size_t> all((size_t)comm().size);
    comm_all_gather(all.data(), &counted, 1, "number of targets");
    return std::accumulate(all.begin(), all.end(), (size_t)0);
}

// The step's gradient, and its mean loss from the sums that loss_sum left for each micro-batch (NAN when nothing
// was asked for): the one time in a step that the host waits for the device.
inline StepGradient gradient_end(Parameters& p, int micro_batches, size_t counted) {
    StepGradient g = {p.tree.back(), 0.0, NAN, counted};
    const size_t n = (size_t)micro_batches;
    const size_t chunks = gradient_norm_begin(p.norm_partial, g.grads, p.table.total, p.stream);
    std::vector<double> sums(chunks + n), losses(n * (size_t)comm().size);
    copy_to_host(sums.data(), p.norm_partial, sizeof(double) * sums.size(), p.stream);
    g.norm = gradient_norm_end(sums.data(), chunks);
    comm_all_gather(losses.data(), sums.data() + chunks, n, "losses");
    if (counted > 0) { g.loss = std::accumulate(losses.begin(), losses.end(), 0.0) / (double)counted; }
    return g;
}

inline void update_parameters(Parameters& p, const float* grads, const AdamW& adamw) {
    for (size_t i = 0; i < p.table.specs.size(); i++) {
        const size_t o = p.table.offsets[i];
        const TensorSpec& s = p.table.specs[i];
        adamw_update(p.weights + o, p.master + o, grads + o, p.m + o, p.v + o, s.size(), s, adamw, p.stream);
    }
}

// The name of the first tensor whose gradient is not finite, for the message of a skipped update.
inline std::string first_bad_tensor(Parameters& p, const float* grads) {
    for (size_t i = 0; i < p.table.specs.size(); i++) {
        const TensorSpec& s = p.table.specs[i];
        const double norm = gradient_norm(p.norm_partial, grads + p.table.offsets[i], s.size(), p.stream);
        if (!std::isfinite(norm)) { return s.name; }
    }
    return "";
}

// ----------------------------------------------------------------------------------------------------------
// the tokens of a batch

// The tokens of micro-batches on their way to the device. Each micro-batch of a step has its own slot of pinned memory,
// so that the host runs ahead of the device; a slot may be filled again once the host has waited for the stream (the
// step's end).
struct DeviceBatch {
    size_t N = 0;                                           // capacity in tokens
    size_t groups = 0;                                      // distinct tokens of the batch: see EmbeddingPlan
    int *tokens = nullptr, *targets = nullptr;              // on the device: (N) each
    int *rows = nullptr, *first = nullptr;                  // the plan: (N), (N+1)
    int *picked = nullptr, *lengths = nullptr;              // rows that have a target (N); tokens of each sequence (N)
    int* pinned = nullptr;                                  // (slots, ints(N))
    size_t slots = 0;

    static size_t ints(size_t N) { return 6 * N + 1; }
    void allocate(size_t capacity) {
        N = capacity;
        tokens = (int*)device_malloc(sizeof(int) * ints(N));
        targets = tokens + N;
        rows = targets + N;
        first = rows + N;
        picked = first + N + 1;
        lengths = picked + N;
    }
    void release() {
        device_free(tokens);
        pinned_free(pinned);
        *this = DeviceBatch();
    }
    // n tokens; targets may be null, and then, or without `backward`, there is no plan
    void load(size_t slot, size_t of, const int* host_tokens, const int* host_targets, size_t n, bool backward,
              Stream stream) {
        if (slots < of) {
            pinned_free(pinned);
            pinned = (int*)pinned_malloc(sizeof(int) * ints(N) * of);
            slots = of;
        }
        copy(tokens, slot, host_tokens, n, stream);
        if (host_targets != nullptr) { copy(targets, slot, host_targets, n, stream); }
        if (!backward) { return; }
        EmbeddingPlan plan;
        plan.build(host_tokens, n);
        copy(rows, slot, plan.rows.data(), n, stream);
        copy(first, slot, plan.first.data(), plan.first.size(), stream);
        groups = plan.groups();
    }
    // Of the batch just loaded, where only some rows have a target: these, and their targets (n each); and how long
    // each of B sequences is (null: all of them full).
    void pick(size_t slot, const int* host_picked, const int* host_targets, size_t n, const int* host_lengths, size_t B,
              Stream stream) {
        copy(picked, slot, host_picked, n, stream);
        copy(targets, slot, host_targets, n, stream);
        if (host_lengths != nullptr) { copy(lengths, slot, host_lengths, B, stream); }
    }

private:
    // an array's place in pinned memory is its place on the device
    void copy(int* to, size_t slot, const int* from, size_t count, Stream stream) {
        check(count <= N + 1, "a batch of %zu values, laid out for %zu", count, N);         // `first` has N + 1
        int* at = pinned + slot * ints(N) + (to - tokens);
        std::copy(from, from + count, at);
        copy_to_device_async(to, at, sizeof(int) * count, stream);
    }
};

// ----------------------------------------------------------------------------------------------------------
// activations

enum class Purpose { Train, Evaluate, Generate };
// Elements of logits that are held at one time. A GPU likes long products.
constexpr size_t LOGITS_BOUND = (sizeof(floatX) == 2 ? 256u : 32u) << 20;

// A row of logits in float32 takes so many rows of floatX.
constexpr size_t FLOAT_ROWS = sizeof(float) / sizeof(floatX);
// Rows of a buffer for the logits of N tokens. Training holds them as floatX; evaluation, also that between two steps
// of training, takes the same memory for FLOAT_ROWS times fewer rows of float32.
inline size_t logit_rows(size_t N, size_t Vp, Purpose purpose) {
    const size_t wanted = purpose == Purpose::Train ? N : FLOAT_ROWS * N;
    return std::max(FLOAT_ROWS, std::min(wanted, LOGITS_BOUND / Vp));
}

// how many layers' worth of an activation exist
inline int kept_layers(Keep keep, Purpose purpose, int L) {
    const bool saved = keep == Keep::Saved && purpose == Purpose::Train;
    const bool cached = keep == Keep::Cached && purpose != Purpose::Evaluate;
    return saved || cached ? L : 0;
}

// The activations of one shape, and the tokens they belong to. Pointers: the trainer's struct of them, made from its
// table.
template <class Pointers> struct ActivationsOf {
    int B = 0, T = 0;                                       // capacity
    int chunk = 0;                                          // rows of logits held at once, as floatX
    bool decodes = false;                                   // attention_decode runs over them
    TensorTable table, position_table;
    float *data = nullptr, *position_data = nullptr;
    Pointers a;
    DeviceBatch batch;
    const int* kv_len = nullptr;                            // batch.lengths when sequences end before T, else null

    size_t bytes() const {
        const size_t floats = table.total + position_table.total, ints = DeviceBatch::ints((size_t)B * T);
        return sizeof(float) * floats + sizeof(int) * ints;
    }
    int chunk_of(bool backward) const { return backward ? chunk : chunk / (int)FLOAT_ROWS; }
    void add(TensorSpec s, size_t element) {
        s.element = element;
        table.add(s);
    }
    void add_position(const std::vector<TensorSpec>& acts, Purpose purpose, int L) {
        for (TensorSpec s : acts) {
            s.layers = s.layers > 0 ? kept_layers(s.keep, purpose, L) : 0;      // some are the same for all layers
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
        data = (float*)device_malloc(sizeof(float) * table.total);
        position_data = (float*)device_malloc(sizeof(float) * position_table.total);
        batch.allocate((size_t)B * T);
    }
    void release() {
        device_free(data);
        device_free(position_data);
        batch.release();
        *this = ActivationsOf();
    }
};

// How many sequences of T tokens fit into activations of acts.B of acts.T. More and shorter ones of as many tokens may
// not: some buffers have an element for each tile of 64 or chunk of 128 tokens of a sequence, the last of which may be
// short.
template <class Acts> size_t sequences_that_fit(const Acts& acts, int T) {
    size_t n = SIZE_MAX;
    for (int piece : {1, 64, 128}) { n = std::min(n, (size_t)acts.B * ceil_div(acts.T, piece) / ceil_div(T, piece)); }
    return n;
}

// An encoding bound to a layer of a model whose activations are laid out for (B,T). grads: null while evaluating
template <class Model, class Acts>
PositionView position_view(const Model& model, const Acts& acts, int layer, int B, int T, float* grads = nullptr) {
    PositionView v;
    v.config = &model.config.position;
    v.L = model.config.L;
    v.NH = model.config.NH;
    v.C = model.config.C;
    v.HS = v.C / v.NH;
    v.layer = layer;
    v.B = B;
    v.T = T;
    v.OC = model.OC;
    v.causal = model.config.causal;
    v.decodes = acts.decodes;
    v.kv_len = acts.kv_len;
    v.params = &model.table;
    v.first_param = model.first_position_param;
    v.acts = &acts.position_table;
    v.master = model.master;
    v.grads = grads;
    v.act_data = acts.position_data;
    return v;
}

#endif
