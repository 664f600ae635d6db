// test_gpt2.cu -- the whole model: its table, its gradients against PyTorch's, a step's tree, recomputation, learning.
//
// The fixtures (dev/hf/make_fixtures.py) hold a small model for every encoding, computed in float64, and for each tensor the
// error that PyTorch makes in float32, which is the unit of the tolerances.
#include <map>
#include <set>

#include "test/fixture.h"

#include "llmc/adamw.cuh"
#include "llmc/classifier.cuh"
#include "llmc/embedding.cuh"
#include "llmc/use/evaluate.h"
#include "llmc/gelu.cuh"
#include "llmc/use/generate.h"
#include "llmc/layernorm.cuh"
#include "llmc/matmul.cuh"
#include "llmc/run/run.h"

namespace {

#define main train_gpt2_main
#include "train_gpt2.cu"
#undef main
[[maybe_unused]] const auto program = train_gpt2_main;

// with its gradient buffers
struct Model : HeldModel<GPT2> {
    Model(const GPT2Config& c, int micro_batches, uint64_t seed = 1) {
        gpt2_describe(*this, c);
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
        inputs = ints("inputs");
        targets = ints("targets");
        B = (int)file.entry("inputs").shape[0];
        T = (int)file.entry("inputs").shape[1];
    }
    void load(Model& model, Random& random) const { model.set(weights(model.table, model.files, random)); }
};

// logits (B*T,V) of a forward, and its losses
std::vector<float> logits_of(Model& model, Activations& acts, const std::vector<int>& tokens, const std::vector<int>& targets, int B, int T,
                             std::vector<float>* losses = nullptr) {
    const size_t N = (size_t)B * T, V = (size_t)model.config.V, Vp = (size_t)model.config.Vp();
    std::vector<float> l(N), padded(N * Vp), logits;
    REQUIRE(acts.chunk >= (int)N);
    forward_losses(model, acts, tokens.data(), targets.data(), nullptr, B, T, l.data(), nullptr);
    copy_to_host(padded.data(), acts.a.logits(), sizeof(float) * padded.size(), model.stream);
    for (size_t n = 0; n < N; n++) { logits.insert(logits.end(), padded.begin() + n * Vp, padded.begin() + n * Vp + V); }
    if (losses != nullptr) { *losses = l; }
    return logits;
}

std::vector<float> gradient_of(Model& model, Activations& acts, const std::vector<int>& tokens, const std::vector<int>& targets,
                               int micro_batches, int recompute, double* loss) {
    const StepGradient g = gpt2_gradient(model, acts, tokens.data(), targets.data(), micro_batches, recompute);
    *loss = g.loss;
    return model.host(g.grads);
}

GPT2Config small_config(const std::string& pos, int T, int L = 2, int NH = 2, int C = 16, int V = 29) {
    GPT2Config c;
    c.T = T; c.V = V; c.L = L; c.NH = NH; c.C = C;
    c.position = parse_position(pos, T);
    return c;
}

std::vector<int> draw_tokens(Random& random, size_t n, int V) {
    std::vector<int> x(n);
    for (int& t : x) { t = random.integer(0, V - 1); }
    return x;
}

void test_fixture(Random& random, const std::string& name) {
    INFO(name);
    const Fixture f(name);
    Model model(f.gpt2, 1);
    f.load(model, random);
    Acts acts(model, f.B, f.T);
    std::vector<float> losses;
    f.check_close("logits", logits_of(model, acts, f.inputs, f.targets, f.B, f.T, &losses), f.read("logits"));
    for (size_t n = 0; n < losses.size(); n++) { CHECK((losses[n] == 0.0f) == (f.targets[n] == IGNORE_INDEX)); }
    double loss = 0;
    const std::vector<float> grads = gradient_of(model, acts, f.inputs, f.targets, 1, 0, &loss);
    f.check_close("loss", {(float)loss}, f.read("loss"));
    std::vector<bool> named(grads.size());
    for (const FileTensor& t : model.files) {
        std::vector<float> got;
        for (size_t e : elements_of(model.table, t)) {
            got.push_back(grads[e]);
            named[e] = true;
        }
        f.check_close("grad." + t.name, got, f.read("grad." + t.name));
    }
    bool padding_is_zero = true;
    for (size_t e = 0; e < grads.size(); e++) { padding_is_zero = padding_is_zero && (named[e] || grads[e] == 0.0f); }
    CHECK(padding_is_zero);
}

} // namespace

TEST_CASE("every tensor of the table is in a checkpoint, but for padding", "[gpt2][encodings]") {
    for (const std::string& name : encodings()) {
        for (const GPT2Config& c : {small_config(name, 37), small_config(name, 16, 3, 6, 12, 257), small_config(name, 8, 1, 1, 2, 128)}) {
            INFO(name << ", C " << c.C);
            GPT2 model;
            gpt2_describe(model, c);
            std::vector<int> covered(model.table.total);
            std::set<std::string> names;
            for (const FileTensor& f : model.files) {
                for (size_t e : elements_of(model.table, f)) { covered[e]++; }
                names.insert(f.name);
            }
            CHECK(names.size() == model.files.size());
            size_t columns = 3 * (size_t)c.C;
            for (const FileTensor& f : model.files) {
                if (f.tensor == "qkvw") { columns = std::max(columns, f.row0 + f.rows); }
            }
            for (size_t i = 0; i < model.table.specs.size(); i++) {
                const TensorSpec& s = model.table.specs[i];
                const size_t used = s.name == "wte" ? (size_t)c.V : s.name == "qkvw" || s.name == "qkvb" ? columns : s.rows;
                size_t wrong = 0;
                for (size_t e = 0; e < s.size(); e++) {
                    const int wanted = e / s.row_size() % s.rows < used ? 1 : 0;
                    wrong += covered[model.table.offsets[i] + e] != wanted;
                }
                INFO(s.name);
                CHECK(wrong == 0);
                CHECK(s.rows - used < (s.name == "wte" ? 128 : 8));
            }
        }
    }
}

TEST_CASE("initial values: names shared by two encodings start equal, padding at zero", "[gpt2]") {
    Model a(small_config("cable", 37), 0, 7), b(small_config("rope", 37), 0, 7), c(small_config("rope", 37), 0, 8);
    const std::vector<float> xa = a.host(a.master), xb = b.host(b.master), xc = c.host(c.master);
    std::map<std::string, std::vector<size_t>> at;
    for (const FileTensor& f : a.files) { at[f.name] = elements_of(a.table, f); }
    size_t differs = 0, moved = 0;
    for (const FileTensor& f : b.files) {
        const std::vector<size_t> eb = elements_of(b.table, f), &ea = at[f.name];
        REQUIRE(ea.size() == eb.size());
        for (size_t i = 0; i < ea.size(); i++) {
            differs += xa[ea[i]] != xb[eb[i]];
            moved += xb[eb[i]] != xc[eb[i]];
        }
    }
    CHECK(differs == 0);
    CHECK(moved > 1000);                    // another seed, other values
    const float* wte = a.table.pointer(xa.data(), "wte")();
    for (size_t e = 29 * 16; e < 128 * 16; e++) { CHECK(wte[e] == 0.0f); }
    // residual projections are smaller: 0.02 / sqrt(2L)
    auto rms = [&](const char* name, size_t n) {
        const float* w = a.table.pointer(xa.data(), name)();
        double s = 0;
        for (size_t e = 0; e < n; e++) { s += (double)w[e] * w[e] / (double)n; }
        return std::sqrt(s);
    };
    CHECK(std::fabs(rms("fcw", 2 * 64 * 16) / 0.02 - 1) <= 4 / std::sqrt(2.0 * 2 * 64 * 16));
    CHECK(std::fabs(rms("fcprojw", 2 * 64 * 16) / 0.01 - 1) <= 4 / std::sqrt(2.0 * 2 * 64 * 16));
}

TEST_CASE("logits, loss and every gradient are PyTorch's, for every encoding", "[gpt2][encodings]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings_with_fixture("gpt2")) { test_fixture(random, name); }
}

TEST_CASE("logits beyond the trained length are PyTorch's, for every encoding", "[gpt2][encodings]") {
    Random random;
    INFO(random);
    for (const std::string& encoding : encodings_with_fixture("gpt2")) {
        const Fixture f(encoding);
        CHECK((encoding != "rope" || f.has("logits.yarn")));
        if (f.file.find("inputs.long") == nullptr) {
            CHECK(position_max_length(f.gpt2.position) == f.T);
            continue;
        }
        const std::vector<int> inputs = f.file.read_i32("inputs.long");
        const int T = (int)f.file.entry("inputs.long").shape[1];
        for (const char* scaling : {"none", "pi", "ntk", "yarn"}) {
            const std::string name = std::string(scaling) == "none" ? "logits.long" : std::string("logits.") + scaling;
            if (f.file.find(name) == nullptr) { continue; }
            INFO(encoding << ", " << name);
            GPT2Config config = f.gpt2;
            parse_rope_scaling(scaling, config.position);
            Model model(config, 0);
            f.load(model, random);
            Acts acts(model, f.B, T, Purpose::Evaluate);
            const std::vector<int> ignored((size_t)f.B * T, IGNORE_INDEX);
            const std::vector<float> got = logits_of(model, acts, inputs, ignored, f.B, T);
            f.check_close(name, got, f.read(name));
            if (name == "logits.long" && encoding == "rope") {
                CHECK(f.error_units("logits.pi", got, f.read("logits.pi")) > 100);        // the scalings do differ
            }
        }
    }
}

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
    const std::vector<float> none = gradient_of(model, acts, f.inputs, std::vector<int>(f.targets.size(), IGNORE_INDEX), 1, 0, &all_ignored);
    CHECK(all_ignored == 0);
    CHECK(largest(none) == 0);
    CHECK(worst_difference(none, std::vector<double>(none.size())) == 0);           // and no NaN
}

TEST_CASE("however a batch is cut into micro-batches, loss and gradient are the same to rounding", "[gpt2]") {
    Random random;
    INFO(random);
    const Fixture f("cable");
    for (int sequences : {4, 6, 7, 8}) {
        const size_t N = (size_t)sequences * f.T;
        const std::vector<int> inputs = draw_tokens(random, N, f.gpt2.V);
        std::vector<int> targets = draw_tokens(random, N, f.gpt2.V);
        for (size_t n = 0; n < N; n += 3 + n / 20) { targets[n] = IGNORE_INDEX; }       // another count in each micro-batch
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
            for (const FileTensor& t : model.files) {
                std::vector<float> got;
                std::vector<float> want;
                for (size_t e : elements_of(model.table, t)) {
                    got.push_back(grads[e]);
                    want.push_back(whole[e]);
                }
                f.check_close("grad." + t.name, got, want);
            }
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
    // alone, a micro-batch's gradient is n times its share in n: a power of two, which is exact
    std::vector<std::vector<float>> g;
    double loss = 0;
    for (int i = 0; i < 8; i++) {
        const std::vector<int> x(inputs.begin() + i * T, inputs.begin() + (i + 1) * T), y(targets.begin() + i * T, targets.begin() + (i + 1) * T);
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
    const std::vector<float> four = add(add(g[0], g[1]), add(g[2], g[3])), eight = add(four, add(add(g[4], g[5]), add(g[6], g[7])));
    CHECK(worst_difference(gradient_of(model, acts, inputs, targets, 2, 0, &loss), as<double>(scaled(add(g[0], g[1]), 0.5f))) == 0);
    CHECK(worst_difference(gradient_of(model, acts, inputs, targets, 4, 0, &loss), as<double>(scaled(four, 0.25f))) == 0);
    CHECK(worst_difference(gradient_of(model, acts, inputs, targets, 8, 0, &loss), as<double>(scaled(eight, 0.125f))) == 0);
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
    for (const FileTensor& t : model.files) {
        std::vector<float> a, b;
        for (size_t e : elements_of(model.table, t)) {
            a.push_back(chunked[e]);
            b.push_back(once[e]);
        }
        f.check_close("grad." + t.name, a, b);
    }
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
        CHECK(same_bits(logits_of(model, train, f.inputs, f.targets, f.B, f.T), logits_of(model, evaluate, f.inputs, f.targets, f.B, f.T)));
    }
}

TEST_CASE("a model learns one batch by heart", "[gpt2]") {
    Random random;
    INFO(random);
    for (const char* name : {"cable", "kcable", "rope", "fire"}) {
        const int B = 2, T = 32, V = 29;
        Model model(small_config(name, T, 2, 2, 32, V), 1, random.seed);
        Acts acts(model, B, T);
        std::vector<int> tokens = draw_tokens(random, B * T, V);
        tokens[T] = (tokens[0] + 1) % V;            // the same first token with two targets could not be learned
        const std::vector<int> targets = draw_tokens(random, B * T, V);
        double loss = 0, first = 0;
        int step = 0;
        for (; step < 300; step++) {
            const StepGradient g = gpt2_gradient(model, acts, tokens.data(), targets.data(), 1, 0);
            loss = g.loss;
            if (step == 0) { first = loss; }
            if (loss < 0.05) { break; }
            update_parameters(model, g.grads, {5e-3f, 0.9f, 0.95f, 1e-8f, 0.0f, (float)std::min(1.0, 1.0 / g.norm), step + 1});
        }
        if (getenv("CABLE_TEST_ERRORS") != nullptr) { printf("%s: %d steps\n", name, step); }
        INFO(name << ": from " << first << " to " << loss << " in " << step << " steps");
        CHECK(std::fabs(first - std::log((double)V)) < 0.2);    // small initial weights: all tokens alike
        CHECK(loss < 0.05);
    }
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
            update_parameters(model, grads, {1.0f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, t});       // a wild learning rate, to meet the bounds
        }
        const std::vector<float> x = model.host(model.master);
        std::vector<bool> named(x.size());
        for (const FileTensor& f : model.files) {
            for (size_t e : elements_of(model.table, f)) { named[e] = true; }
        }
        bool padding_is_zero = true;
        for (size_t e = 0; e < x.size(); e++) { padding_is_zero = padding_is_zero && (named[e] || x[e] == 0.0f); }
        CHECK(padding_is_zero);
        for (size_t i = 0; i < model.table.specs.size(); i++) {
            const TensorSpec& s = model.table.specs[i];
            const float* w = x.data() + model.table.offsets[i];
            CHECK((*std::min_element(w, w + s.size()) >= s.lo && *std::max_element(w, w + s.size()) <= s.hi));
        }
    }
}

TEST_CASE("main turns an unknown flag into exit code 2", "[gpt2]") {
    char program[] = "train_gpt2", flag[] = "--no_such_flag", one[] = "1";
    char* argv[] = {program, flag, one, nullptr};
    CHECK(run_program(gpt2_main, 3, argv) == EXIT_BAD_INPUT);
}
