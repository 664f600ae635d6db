// bert_model.h -- train_bert's model for the tests of it: the trainer itself, in a namespace of each file's own,
// without its main.
//
// The fixtures (dev/hf/make_fixtures.py) hold a small model for every encoding, computed in float64, and for each
// tensor the error that PyTorch makes in float32, which is the unit of the tolerances.
#pragma once

#include "test/fixture.h"

#include "llmc/gelu.cuh"
#include "llmc/layernorm.cuh"
#include "llmc/engine/run.h"
#include "llmc/lab/embed.h"

namespace {

// Its main is not called, so the compiler leaves out the program around the model.
#define main __attribute__((unused)) train_bert_main
#include "train_bert.cu"
#undef main

// with its gradient buffers
struct Model : HeldModel<BERT> {
    Model(const BERTConfig& c, int micro_batches, uint64_t seed = 1, int micro_batches_of_a_leaf = 1) {
        bert_describe(*this, c);
        leaf = micro_batches_of_a_leaf;
        parameters_allocate(*this, seed, micro_batches);
        bert_point(params, table, weights);
    }
    const FileTensor& file(const std::string& name) const {
        for (const FileTensor& f : files) { if (f.name == name) { return f; } }
        FAIL("no tensor " << name);
        return files[0];
    }
};

using Acts = HeldActs<BERT, Activations>;

struct Fixture : FixtureFile {
    BERTConfig bert;
    std::vector<int> inputs, lengths, targets;
    int B, T;

    explicit Fixture(const std::string& name) : FixtureFile(name) {
        bert.L = number("num_hidden_layers");
        bert.NH = number("num_attention_heads");
        bert.C = number("hidden_size");
        bert.V = number("vocab_size");
        bert.T = number("max_position_embeddings");
        bert.position = position_from_json(config["position"], bert.T, "fixture");
        mask_from_json(bert.position, config, "fixture");
        inputs = ints("inputs");
        lengths = ints("lengths");
        if (has("targets")) { targets = ints("targets"); }
        B = (int)file.entry("inputs").shape[0];
        T = (int)file.entry("inputs").shape[1];
    }
    void load(Model& model, Random& random) const { model.set(weights(model.table, model.files, random)); }
};

inline BERTConfig small_config(const std::string& pos, int T, int L = 2, int NH = 2, int C = 16, int V = 29) {
    BERTConfig c;
    c.T = T;
    c.V = V;
    c.L = L;
    c.NH = NH;
    c.C = C;
    c.position = parse_position(pos, T);
    return c;
}

// About `share` of the tokens of each sequence's length have a target.
inline std::vector<int> draw_targets(Random& random, const std::vector<int>& lengths, int T, int V, double share) {
    std::vector<int> x(lengths.size() * T, IGNORE_INDEX);
    for (size_t b = 0; b < lengths.size(); b++) {
        for (int t = 0; t < lengths[b]; t++) {
            if (random.uniform(0, 1) < share) { x[b * T + t] = random.integer(0, V - 1); }
        }
    }
    return x;
}

// (B,T) as (B,wider): `padding` follows each row
inline std::vector<int> widened(const std::vector<int>& x, int T, int wider, int padding) {
    std::vector<int> y(x.size() / T * wider, padding);
    for (size_t n = 0; n < x.size(); n++) { y[n / T * wider + n % T] = x[n]; }
    return y;
}

// logits (B*T,V) of all tokens, 0 after a length; lengths may be null
inline std::vector<float> logits_of(Model& model, Activations& acts, const std::vector<int>& tokens, const int* lengths,
                                    int B, int T) {
    const size_t N = (size_t)B * T, V = (size_t)model.config.V;
    const size_t Vp = (size_t)model.config.Vp();
    std::vector<float> losses(N), padded(N * Vp), logits;
    REQUIRE(acts.chunk >= (int)N);
    forward_losses(model, acts, tokens.data(), std::vector<int>(N, 0).data(), lengths, B, T, losses.data(), nullptr);
    copy_to_host(padded.data(), acts.a.logits(), sizeof(float) * padded.size(), model.stream);
    for (size_t n = 0; n < N; n++) {
        logits.insert(logits.end(), padded.begin() + n * Vp, padded.begin() + n * Vp + V);
        if (lengths != nullptr && (int)(n % T) >= lengths[n / T]) { std::fill(logits.end() - V, logits.end(), 0.0f); }
    }
    return logits;
}

// The same rows out of batches of different shapes
inline void check_same_rows(const std::string& name, const std::vector<float>& got, const std::vector<float>& want) {
    INFO(name);
    CHECK(same_bits(got, want));
}

constexpr double BOTH_OFF = 2 * FIXTURE_MULTIPLE;       // of two gradients that may both be off by that

struct Gradient { double loss; std::vector<float> grads; };

inline Gradient gradient_of(Model& model, Activations& acts, const std::vector<int>& tokens,
                            const std::vector<int>& targets, const std::vector<int>& lengths, int micro_batches = 1,
                            int recompute = 0) {
    REQUIRE(tokens.size() == (size_t)acts.B * acts.T * micro_batches);
    const StepGradient g = bert_gradient(model, acts, tokens.data(), targets.data(),
                                         lengths.empty() ? nullptr : lengths.data(), micro_batches, recompute);
    return {g.loss, model.host(g.grads)};
}

struct Contrast : Gradient { std::vector<float> embeddings; };

// pooled_chunks: the calls of pooling_forward_kernel. B: a chunk has room for B rows; 0: for acts.B
inline int pooled_chunks = 0;
inline Contrast contrast_of(Model& model, Activations& acts, const GroupBatch& batch, double tau, int recompute = 0,
                            int B = 0, int leaves = 1, const std::vector<float>& teacher = {}) {
    const int Q = batch.groups, C = model.config.C;
    ContrastiveBuffers buffers;
    buffers.allocate(Q, batch.rows - Q, C);
    const std::vector<char> poison(acts.bytes(), (char)0xff);           // NaN: a step needs no zeros there
    copy_to_device(acts.data, poison.data(), poison.size(), model.stream);
    acts.used_memory = true;
    const int leaf = model.leaf;
    pooled_chunks = 0;
    after_launch = [](const char* text, Stream) { pooled_chunks += starts_with(text, "pooling_forward_kernel"); };
    const StepGradient g = contrastive_gradient(model, acts, buffers, batch, teacher, B > 0 ? B : acts.B,
                                                leaves, tau, recompute);
    after_launch = nullptr;
    model.leaf = leaf;
    Contrast c;
    c.loss = g.loss;
    c.grads = model.host(g.grads);
    std::vector<float> rows((size_t)batch.rows * C);
    std::vector<int> place((size_t)batch.rows);
    copy_to_host(rows.data(), buffers.emb, sizeof(float) * rows.size(), model.stream);
    copy_to_host(place.data(), buffers.place, sizeof(int) * place.size(), model.stream);
    buffers.release();
    for (int p : place) { c.embeddings.insert(c.embeddings.end(), &rows[(size_t)p * C], &rows[(size_t)p * C] + C); }
    return c;
}

// rows (n,C): row k of x becomes row order[k]
inline std::vector<float> reordered(const std::vector<float>& x, const std::vector<int>& order, size_t C) {
    std::vector<float> y(x.size());
    for (size_t k = 0; k < order.size(); k++) { std::copy_n(&x[k * C], C, &y[(size_t)order[k] * C]); }
    return y;
}

// The fixture's rows in the trainer's order, where document i answers query i; order: row of the batch -> row of the
// fixture.
inline GroupBatch group_batch(const Fixture& f, std::vector<int>& order) {
    const std::vector<int> positives = f.ints("positives");
    GroupBatch batch;
    batch.groups = (int)positives.size();
    batch.rows = f.B;
    batch.T = f.T;
    order.clear();
    for (int q = 0; q < batch.groups; q++) { order.push_back(q); }
    for (int p : positives) { order.push_back(batch.groups + p); }
    for (int r = batch.groups; r < f.B; r++) {
        if (std::find(order.begin(), order.end(), r) == order.end()) { order.push_back(r); }
    }
    for (int r : order) {
        batch.ids.insert(batch.ids.end(), f.inputs.begin() + r * f.T, f.inputs.begin() + (r + 1) * f.T);
        batch.lengths.push_back(f.lengths[(size_t)r]);
    }
    return batch;
}

} // namespace
