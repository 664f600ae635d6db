// test_bert_steps.cu -- a step of BERT, however it is computed: recomputation, threads, micro-batches, chunks.
#include "test/model/bert_model.h"

TEST_CASE("recomputing BERT's activations changes no bit", "[bert][P11]") {
    Random random;
    INFO(random);
    for (const char* name : {"cable", "fire", "sinusoidal"}) {
        const Fixture f(std::string("bert_") + name);
        Gradient first;
        Contrast first_contrast;
        size_t before = SIZE_MAX;
        for (int recompute : {0, 1, 2}) {
            Random same = random;
            Model model(f.bert, 1);
            f.load(model, same);
            Acts acts(model, f.B, f.T, Purpose::Train, recompute);
            const Gradient g = gradient_of(model, acts, f.inputs, f.targets, f.lengths, 1, recompute);
            const Contrast c = contrast_of(model, acts, {1, f.B, f.T, f.inputs, f.lengths}, 0.2, recompute);
            INFO(name << ", recompute " << recompute);
            if (recompute == 0) {
                first = g;
                first_contrast = c;
            }
            CHECK(g.loss == first.loss);
            CHECK(same_bits(g.grads, first.grads));
            CHECK(same_bits(c.grads, first_contrast.grads));
            CHECK(acts.bytes() < before);           // and saves memory
            before = acts.bytes();
        }
    }
}

TEST_CASE("bert: same bits for any number of threads", "[bert][P11]") {
    Random random;
    INFO(random);
    for (const char* name : {"cable", "t5", "fire", "learned"}) {
        const int B = 2, T = 70;
        const int V = 300;
        Model model(small_config(name, T, 2, 4, 32, V), 2, random.seed);
        Acts acts(model, B, T);
        const std::vector<int> lengths = {70, 33, 64, 1}, tokens = draw_tokens(random, 2 * B * (size_t)T, V);
        const std::vector<int> targets = draw_targets(random, lengths, T, V, 0.2);
        check_thread_invariance([&] {
            const Gradient g = gradient_of(model, acts, tokens, targets, lengths, 2);
            const Contrast c = contrast_of(model, acts, {2, 4, T, tokens, lengths}, 0.1);
            std::vector<float> all = g.grads;
            all.insert(all.end(), c.grads.begin(), c.grads.end());
            all.push_back((float)g.loss);
            all.push_back((float)c.loss);
            return all;
        });
    }
}

TEST_CASE("however BERT's batch is cut into micro-batches, loss and gradient are the same to rounding", "[bert]") {
    Random random;
    INFO(random);
    const Fixture f("bert_cable");
    for (int sequences : {4, 6, 7, 8}) {
        std::vector<int> lengths;
        for (int b = 0; b < sequences; b++) { lengths.push_back(random.integer(1, f.T)); }
        lengths[0] = f.T;
        const std::vector<int> tokens = draw_tokens(random, (size_t)sequences * f.T, f.bert.V);
        // another count in each micro-batch
        std::vector<int> targets = draw_targets(random, lengths, f.T, f.bert.V, 0.3);
        // and none in the last sequence
        std::fill(targets.begin() + (sequences - 1) * f.T, targets.end(), IGNORE_INDEX);
        Gradient whole;
        for (int micro_batches : {1, 2, 3, 4, 6, 7, 8}) {
            if (sequences % micro_batches != 0) { continue; }
            Random same = random;
            Model model(f.bert, micro_batches);
            f.load(model, same);
            Acts acts(model, sequences / micro_batches, f.T);
            const Gradient g = gradient_of(model, acts, tokens, targets, lengths, micro_batches);
            INFO(micro_batches << " micro-batches of " << sequences / micro_batches);
            if (micro_batches == 1) { whole = g; }
            f.check_close("loss", {(float)g.loss}, {(float)whole.loss});
            check_same_gradient(f, model, g.grads, whole.grads, BOTH_OFF);
            CHECK(same_bits(gradient_of(model, acts, tokens, targets, lengths, micro_batches).grads, g.grads));
        }
    }
}

TEST_CASE("a batch in which nothing is masked has loss 0 and gradient 0", "[bert][asan]") {
    Random random;
    INFO(random);
    const Fixture f("bert_cable");
    Model model(f.bert, 2);
    f.load(model, random);
    Acts acts(model, f.B, f.T);
    const std::vector<int> none(f.inputs.size(), IGNORE_INDEX);
    for (const std::vector<int>& lengths : {f.lengths, std::vector<int>()}) {
        const Gradient g = gradient_of(model, acts, f.inputs, none, lengths);
        CHECK(std::isnan(g.loss));
        CHECK(worst_difference(g.grads, std::vector<double>(g.grads.size())) == 0);         // and no NaN
    }
    std::vector<float> losses(none.size(), -1);
    forward_losses(model, acts, f.inputs.data(), none.data(), nullptr, f.B, f.T, losses.data(), nullptr);
    CHECK(worst_difference(losses, std::vector<double>(losses.size())) == 0);
    // a micro-batch of nothing but such tokens changes neither loss nor gradient
    std::vector<int> tokens = f.inputs, targets = f.targets;
    std::vector<int> lengths = f.lengths;
    tokens.insert(tokens.end(), f.inputs.rbegin(), f.inputs.rend());
    targets.resize(2 * targets.size(), IGNORE_INDEX);
    lengths.insert(lengths.end(), {1, 30});
    const Gradient one = gradient_of(model, acts, f.inputs, f.targets, f.lengths),
                   two = gradient_of(model, acts, tokens, targets, lengths, 2);
    CHECK(two.loss == one.loss);
    CHECK(worst_difference(two.grads, as<double>(one.grads)) == 0);
}

TEST_CASE("BERT's head in chunks is the head at once", "[bert][asan]") {
    Random random;
    INFO(random);
    const Fixture f("bert_none");
    Model model(f.bert, 1);
    f.load(model, random);
    Acts acts(model, f.B, f.T);
    const Gradient once = gradient_of(model, acts, f.inputs, f.targets, f.lengths);
    acts.chunk = 5;                             // of 12 targets
    const Gradient chunked = gradient_of(model, acts, f.inputs, f.targets, f.lengths);
    f.check_close("loss", {(float)chunked.loss}, {(float)once.loss});
    check_same_gradient(f, model, chunked.grads, once.grads, BOTH_OFF);
}

TEST_CASE("evaluation's logits and embeddings have training's bits, in less memory", "[bert]") {
    Random random;
    INFO(random);
    for (const char* name : {"cable", "fire", "learned"}) {
        const Fixture f(std::string("bert_") + name);
        Model model(f.bert, 1);
        f.load(model, random);
        Acts train(model, f.B, f.T), evaluate(model, f.B, f.T, Purpose::Evaluate);
        CHECK(evaluate.bytes() < train.bytes());
        CHECK(same_bits(logits_of(model, train, f.inputs, f.lengths.data(), f.B, f.T),
                        logits_of(model, evaluate, f.inputs, f.lengths.data(), f.B, f.T)));
        std::vector<float> a((size_t)f.B * f.bert.C), b(a.size());
        embed_documents(model, train, f.inputs.data(), f.lengths.data(), f.B, f.T, a.data());
        embed_documents(model, evaluate, f.inputs.data(), f.lengths.data(), f.B, f.T, b.data());
        CHECK(same_bits(a, b));
    }
}

TEST_CASE("bert: a NaN of the backward is blamed on the layer and the tensor where it began", "[bert][blame]") {
    Random random;
    const int B = 2, T = 9;
    const int C = 16, V = 29;
    Model model(small_config("cable", T, 3), 1, random.seed);
    Acts acts(model, B, T);
    const std::vector<int> tokens = draw_tokens(random, B * T, V), targets = draw_targets(random, {T, T}, T, V, 0.5);
    const BERTActs& a = acts.a;
    const std::string layer = "bert.encoder.layer.1.";
    check_blame(model, {
        {"classifier_kernel", 1, a.logits(), "decoderb (cls.predictions.bias)"},
        {"layernorm_backward_kernel", 2, a.dsum(), "fcprojb of layer 2 (bert.encoder.layer.2.output.dense.bias)"},
        {"gelu_backward_kernel", 3, a.dfch(), "fcw of layer 1 (" + layer + "intermediate.dense.weight)"},
        {"layernorm_backward_kernel", 5, a.dsum(), "attprojb of layer 1 (" + layer + "attention.output.dense.bias)"},
        {"attention_backward", 2, a.dqkv() + C, "qkvb of layer 1 (" + layer + "attention.self.key.bias)"},
        {"cable_backward_kernel", 2, a.dqkv() + 3 * C, "qkvb of layer 1 (" + layer + "attention.self.cable.c.bias)"},
        {"layernorm_backward_kernel", 8, a.dsum(), "typew (bert.embeddings.token_type_embeddings.weight)"}},
        [&] { return bert_gradient(model, acts, tokens.data(), targets.data(), nullptr, 1, 0); });
}

TEST_CASE("an update keeps BERT's padding at zero and every tensor within its bounds", "[bert]") {
    Random random;
    INFO(random);
    for (const char* name : {"cable", "kerple_power"}) {
        const int T = 16;
        Model model(small_config(name, T), 1, random.seed);
        Acts acts(model, 2, T);
        const std::vector<int> tokens = draw_tokens(random, 2 * T, 29),
                               targets = draw_targets(random, {T, T}, T, 29, 0.5);
        for (int t = 1; t <= 5; t++) {
            const float* grads = bert_gradient(model, acts, tokens.data(), targets.data(), nullptr, 1, 0).grads;
            // a wild learning rate, to meet the bounds
            update_parameters(model, grads, {1.0f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, t});
        }
        check_bounds(model);
    }
}
