// gpt2_model.h -- train_gpt2's model for the tests of it: the trainer itself, in a namespace of each file's own,
// without its main.
//
// The fixtures (dev/hf/make_fixtures.py) hold a small model for every encoding, computed in float64, and for each
// tensor the error that PyTorch makes in float32, which is the unit of the tolerances.
#pragma once

#include <functional>
#include <map>

#include "test/fixture.h"

#include "llmc/attention/decode.cuh"
#include "llmc/gelu.cuh"
#include "llmc/layernorm.cuh"
#include "llmc/engine/run.h"
#include "llmc/lab/generate.h"

namespace {

// Its main is not called, so the compiler leaves out the program around the model.
#define main __attribute__((unused)) train_gpt2_main
#include "train_gpt2.cu"
#undef main

// with its gradient buffers
struct Model : HeldModel<GPT2> {
    Model(const GPT2Config& c, int micro_batches, uint64_t seed = 1, int micro_batches_of_a_leaf = 1) {
        gpt2_describe(*this, c);
        leaf = micro_batches_of_a_leaf;
        parameters_allocate(*this, seed, micro_batches);
        gpt2_point(params, table, weights);
    }
};

using Acts = HeldActs<GPT2, Activations>;

struct Fixture : FixtureFile {
    GPT2Config gpt2;
    std::vector<int> inputs, targets;
    int B, T;

    explicit Fixture(const std::string& name) : FixtureFile("gpt2_" + name) {
        gpt2.L = number("n_layer");
        gpt2.NH = number("n_head");
        gpt2.C = number("n_embd");
        gpt2.V = number("vocab_size");
        gpt2.T = number("n_positions");
        gpt2.position = position_from_json(config["position"], gpt2.T, "fixture");
        mask_from_json(gpt2.position, config, "fixture");
        inputs = ints("inputs");
        targets = ints("targets");
        B = (int)file.entry("inputs").shape[0];
        T = (int)file.entry("inputs").shape[1];
    }
    void load(Model& model, Random& random) const { model.set(weights(model.table, model.files, random)); }
};

// logits (B*T,V) of a forward, and its losses
inline std::vector<float> logits_of(Model& model, Activations& acts, const std::vector<int>& tokens,
                                    const std::vector<int>& targets, int B, int T,
                                    std::vector<float>* losses = nullptr) {
    const size_t N = (size_t)B * T, V = (size_t)model.config.V;
    const size_t Vp = (size_t)model.config.Vp();
    std::vector<float> l(N), padded(N * Vp), logits;
    REQUIRE(acts.chunk >= (int)N);
    forward_losses(model, acts, tokens.data(), targets.data(), nullptr, B, T, l.data(), nullptr);
    copy_to_host(padded.data(), acts.a.logits(), sizeof(float) * padded.size(), model.stream);
    for (size_t n = 0; n < N; n++) {
        logits.insert(logits.end(), padded.begin() + n * Vp, padded.begin() + n * Vp + V);
    }
    if (losses != nullptr) { *losses = l; }
    return logits;
}

inline std::vector<float> gradient_of(Model& model, Activations& acts, const std::vector<int>& tokens,
                                      const std::vector<int>& targets, int micro_batches, int recompute, double* loss) {
    const StepGradient g = gpt2_gradient(model, acts, tokens.data(), targets.data(), micro_batches, recompute);
    *loss = g.loss;
    return model.host(g.grads);
}

inline GPT2Config small_config(const std::string& pos, int T, int L = 2, int NH = 2, int C = 16, int V = 29) {
    GPT2Config c;
    c.T = T;
    c.V = V;
    c.L = L;
    c.NH = NH;
    c.C = C;
    c.position = parse_position(pos, T);
    return c;
}

} // namespace
