// test_gpt2_steps.cu -- a step's gradient, however it is computed: recomputation, threads, micro-batches, chunks.
#include "test/model/gpt2_model.h"

TEST_CASE("recomputing activations changes no bit", "[gpt2]") {
    Random random;
    INFO(random);
    for (const char* name : {"cable", "fire", "sinusoidal"}) {
        const Fixture f(name);
        std::vector<float> first;
        double first_loss = 0;
        size_t before = SIZE_MAX;
        for (int recompute : {0, 1, 2}) {
            Random same = random;
            Model model(f.gpt2, 1);
            f.load(model, same);
            Acts acts(model, f.B, f.T, Purpose::Train, recompute);
            double loss = 0;
            const std::vector<float> grads = gradient_of(model, acts, f.inputs, f.targets, 1, recompute, &loss);
            INFO(name << ", recompute " << recompute);
            if (recompute == 0) {
                first = grads;
                first_loss = loss;
            }
            CHECK(loss == first_loss);
            CHECK(same_bits(grads, first));
            CHECK(acts.bytes() < before);           // and saves memory
            before = acts.bytes();
        }
    }
}

TEST_CASE("gpt2: same bits for any number of threads", "[gpt2]") {
    Random random;
    INFO(random);
    for (const char* name : {"cable", "t5", "learned"}) {
        Model model(small_config(name, 70, 2, 4, 32, 300), 2, random.seed);
        Acts acts(model, 2, 70);
        const std::vector<int> tokens = draw_tokens(random, 280, 300), targets = draw_tokens(random, 280, 300);
        check_thread_invariance([&] {
            double loss = 0;
            std::vector<float> all = gradient_of(model, acts, tokens, targets, 2, 0, &loss);
            all.push_back((float)loss);
            return all;
        });
    }
}

TEST_CASE("ignored targets count nowhere", "[gpt2]") {
    Random random;
    INFO(random);
    const Fixture f("cable");
    Model model(f.gpt2, 2);
    f.load(model, random);
    Acts acts(model, f.B, f.T);
    double loss = -1, all_ignored = -1;
    // a micro-batch of nothing but ignored targets changes neither loss nor gradient
    std::vector<int> inputs = f.inputs, targets = f.targets;
    inputs.insert(inputs.end(), f.inputs.rbegin(), f.inputs.rend());
    targets.resize(2 * targets.size(), IGNORE_INDEX);
    const std::vector<float> one = gradient_of(model, acts, f.inputs, f.targets, 1, 0, &loss);
    double two_loss = 0;
    const std::vector<float> two = gradient_of(model, acts, inputs, targets, 2, 0, &two_loss);
    CHECK(two_loss == loss);
    CHECK(worst_difference(two, as<double>(one)) == 0);
    const std::vector<float> none =
        gradient_of(model, acts, f.inputs, std::vector<int>(f.targets.size(), IGNORE_INDEX), 1, 0, &all_ignored);
    CHECK(std::isnan(all_ignored));
    CHECK(largest(none) == 0);
    CHECK(worst_difference(none, std::vector<double>(none.size())) == 0);           // and no NaN
}

// Each encoding's backward adds to its parameters' gradients, too.
TEST_CASE("gpt2: micro-batches of a leaf are added up in one buffer", "[gpt2][encodings]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings_with_fixture("gpt2")) {
        const Fixture f(name);
        std::vector<float> whole;
        for (int leaf : {1, 2, 4}) {
            Random same = random;
            Model model(f.gpt2, 4, 1, leaf);
            f.load(model, same);
            CHECK(model.tree.size() == (size_t)(leaf == 1 ? 3 : 3 - leaf / 2));
            Acts acts(model, f.B, f.T);
            std::vector<int> inputs, targets;
            for (int i = 0; i < 4; i++) {                   // the fixture's batch, shifted by a token in each
                inputs.insert(inputs.end(), f.inputs.begin(), f.inputs.end());
                std::rotate(inputs.end() - (ptrdiff_t)f.inputs.size(), inputs.end() - 1 - i, inputs.end());
                targets.insert(targets.end(), f.targets.begin(), f.targets.end());
            }
            double loss = 0;
            const std::vector<float> grads = gradient_of(model, acts, inputs, targets, 4, 0, &loss);
            if (leaf == 1) { whole = grads; }
            INFO(name << ", leaves of " << leaf);
            check_same_gradient(f, model, grads, whole);
        }
    }
}

TEST_CASE("however a batch is cut into micro-batches, loss and gradient are the same to rounding", "[gpt2]") {
    Random random;
    INFO(random);
    const Fixture f("cable");
    for (int sequences : {4, 6, 7, 8}) {
        const size_t N = (size_t)sequences * f.T;
        const std::vector<int> inputs = draw_tokens(random, N, f.gpt2.V);
        std::vector<int> targets = draw_tokens(random, N, f.gpt2.V);
        // another count in each micro-batch
        for (size_t n = 0; n < N; n += 3 + n / 20) { targets[n] = IGNORE_INDEX; }
        std::vector<float> whole;
        double whole_loss = 0;
        for (int micro_batches : {1, 2, 3, 4, 6, 7, 8}) {
            if (sequences % micro_batches != 0) { continue; }
            Random same = random;
            Model model(f.gpt2, micro_batches);
            f.load(model, same);
            Acts acts(model, sequences / micro_batches, f.T);
            double loss = 0;
            const std::vector<float> grads = gradient_of(model, acts, inputs, targets, micro_batches, 0, &loss);
            INFO(micro_batches << " micro-batches of " << sequences / micro_batches);
            if (micro_batches == 1) {
                whole = grads;
                whole_loss = loss;
            }
            CHECK(std::fabs(loss - whole_loss) <= FIXTURE_MULTIPLE * f.read("error.loss")[0] * whole_loss);
            check_same_gradient(f, model, grads, whole);
        }
    }
}

TEST_CASE("micro-batches meet in a binary tree, to the bit", "[gpt2]") {
    Random random;
    INFO(random);
    const int T = 20;
    Model model(small_config("cable", T), 8, random.seed);
    Acts acts(model, 1, T);
    const std::vector<int> inputs = draw_tokens(random, 8 * T, 29), targets = draw_tokens(random, 8 * T, 29);
    // by itself a micro-batch's gradient is n times its share in n: a power of two, which is exact
    std::vector<std::vector<float>> g;
    double loss = 0;
    for (int i = 0; i < 8; i++) {
        const std::vector<int> x(inputs.begin() + i * T, inputs.begin() + (i + 1) * T),
            y(targets.begin() + i * T, targets.begin() + (i + 1) * T);
        g.push_back(gradient_of(model, acts, x, y, 1, 0, &loss));
    }
    auto add = [](std::vector<float> a, const std::vector<float>& b) {
        for (size_t e = 0; e < a.size(); e++) { a[e] += b[e]; }
        return a;
    };
    auto scaled = [](std::vector<float> a, float by) {
        for (float& x : a) { x *= by; }
        return a;
    };
    const std::vector<float> four = add(add(g[0], g[1]), add(g[2], g[3])),
                             eight = add(four, add(add(g[4], g[5]), add(g[6], g[7])));
    CHECK(worst_difference(gradient_of(model, acts, inputs, targets, 2, 0, &loss),
                           as<double>(scaled(add(g[0], g[1]), 0.5f))) == 0);
    CHECK(worst_difference(gradient_of(model, acts, inputs, targets, 4, 0, &loss), as<double>(scaled(four, 0.25f))) ==
          0);
    CHECK(worst_difference(gradient_of(model, acts, inputs, targets, 8, 0, &loss), as<double>(scaled(eight, 0.125f))) ==
          0);
}

TEST_CASE("a head in chunks is the head at once", "[gpt2]") {
    Random random;
    INFO(random);
    const Fixture f("none");
    Model model(f.gpt2, 1);
    f.load(model, random);
    Acts acts(model, f.B, f.T);
    double loss = 0, chunked_loss = 0;
    const std::vector<float> once = gradient_of(model, acts, f.inputs, f.targets, 1, 0, &loss);
    acts.chunk = 5;
    const std::vector<float> chunked = gradient_of(model, acts, f.inputs, f.targets, 1, 0, &chunked_loss);
    CHECK(std::fabs(loss - chunked_loss) <= FIXTURE_MULTIPLE * f.read("error.loss")[0] * loss);
    check_same_gradient(f, model, chunked, once);
}

TEST_CASE("gpt2: a padded softmax is the softmax of a vocabulary of as many rows", "[gpt2][vocab_softmax]") {
    Random random;
    INFO(random);
    const int B = 2, T = 9;
    GPT2Config padded = small_config("cable", T), wide = small_config("cable", T, 2, 2, 16, 128);
    const GPT2Config used = padded;
    padded.padded_softmax = true;
    REQUIRE((padded.V == 29 && padded.Vp() == 128));
    Model a(padded, 1), b(wide, 1), c(used, 1);
    std::vector<float> weights = b.host(b.master);
    a.set(weights);
    b.set(weights);
    c.set(weights);
    const std::vector<int> tokens = draw_tokens(random, B * T, 29), targets = draw_tokens(random, B * T, 29);
    Acts acts_a(a, B, T, Purpose::Train, 0), acts_b(b, B, T, Purpose::Train, 0), acts_c(c, B, T, Purpose::Train, 0);
    double loss_a, loss_b, loss_c;
    const std::vector<float> da = gradient_of(a, acts_a, tokens, targets, 1, 0, &loss_a);
    const std::vector<float> db = gradient_of(b, acts_b, tokens, targets, 1, 0, &loss_b);
    gradient_of(c, acts_c, tokens, targets, 1, 0, &loss_c);
    CHECK(loss_a == loss_b);
    CHECK(da == db);
    CHECK(loss_a > loss_c + 0.5);                           // log(128 / 29) is 1.5
    const size_t first_unused = a.table.offsets[0] + (size_t)29 * 16;
    CHECK(std::any_of(&da[first_unused], &da[first_unused + 16], [](float x) { return x != 0; }));
    CHECK(a.files[0].rows == 128);
}

TEST_CASE("evaluation's logits have training's bits", "[gpt2]") {
    Random random;
    INFO(random);
    for (const char* name : {"cable", "fire", "learned"}) {
        const Fixture f(name);
        Model model(f.gpt2, 1);
        f.load(model, random);
        Acts train(model, f.B, f.T), evaluate(model, f.B, f.T, Purpose::Evaluate);
        CHECK(evaluate.bytes() < train.bytes());
        CHECK(same_bits(logits_of(model, train, f.inputs, f.targets, f.B, f.T),
                        logits_of(model, evaluate, f.inputs, f.targets, f.B, f.T)));
    }
}

TEST_CASE("gpt2: a NaN of the backward is blamed on the layer and the tensor where it began", "[gpt2][blame]") {
    Random random;
    const int B = 2, T = 9;
    Model model(small_config("cable", T, 3), 1, random.seed);
    Acts acts(model, B, T);
    const std::vector<int> tokens = draw_tokens(random, B * T, 29), targets = draw_tokens(random, B * T, 29);
    const GPT2Acts& a = acts.a;
    const int C = 16;
    float* dwte = model.tree.back() + model.table.offset((size_t)model.table.index("wte"));
    check_blame(model, {
        {"classifier_kernel", 1, a.logits(), "lnfb (transformer.ln_f.bias)"},
        {"layernorm_backward_kernel", 1, a.dresidual(), "fcprojb of layer 2 (transformer.h.2.mlp.c_proj.bias)"},
        {"gelu_backward_kernel", 2, a.dfch() + C, "fcw of layer 1 (transformer.h.1.mlp.c_fc.weight)"},
        {"layernorm_backward_kernel", 4, a.dresidual(), "attprojb of layer 1 (transformer.h.1.attn.c_proj.bias)"},
        {"attention_backward", 2, a.dqkv() + C, "qkvb of layer 1 (transformer.h.1.attn.c_attn.bias)"},
        {"cable_backward_kernel", 3, a.dqkv() + 3 * C, "qkvb of layer 0 (transformer.h.0.attn.cable.c.bias)"},
        {"cable_backward_kernel", 2, a.dqkv() + 3 * C + 2, "qkvb of layer 1 (transformer.h.1.attn.cable.s.bias)"},
        {"embedding_backward_kernel", 1, dwte, "wte (transformer.wte.weight)"}},
        [&] { return gpt2_gradient(model, acts, tokens.data(), targets.data(), 1, 0); });
}

TEST_CASE("an update keeps padding at zero and every tensor within its bounds", "[gpt2]") {
    Random random;
    INFO(random);
    for (const char* name : {"cable", "kerple_power"}) {
        const int T = 16;
        Model model(small_config(name, T), 1, random.seed);
        Acts acts(model, 2, T);
        const std::vector<int> tokens = draw_tokens(random, 2 * T, 29), targets = draw_tokens(random, 2 * T, 29);
        for (int t = 1; t <= 5; t++) {
            const float* grads = gpt2_gradient(model, acts, tokens.data(), targets.data(), 1, 0).grads;
            // a wild learning rate, to meet the bounds
            update_parameters(model, grads, {1.0f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, t});
        }
        check_bounds(model);
    }
}

TEST_CASE("the banner says which bias no tensor-core kernel knows, on a CPU too", "[gpt2]") {
    const Gpu none;
    const std::string note = attention_note(parse_position("cope", 64), none);
    INFO(note);
    CHECK(note.find("cope's bias: that costs nothing on a CPU, but on a GPU attention runs") != std::string::npos);
    CHECK(attention_note(parse_position("cable", 64), none).empty());
}
