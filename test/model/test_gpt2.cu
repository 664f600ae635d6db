// test_gpt2.cu -- the model's table of tensors, its initial values, and its logits, loss and gradients against
// PyTorch's.
#include "test/model/gpt2_model.h"

namespace {

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
    check_gradients(f, model, grads);
}

} // namespace

TEST_CASE("GPT-2's weights decay, and nothing else", "[gpt2]") {
    GPT2 model;
    gpt2_describe(model, small_config("cable", 37));
    std::string names;
    for (const TensorSpec& s : model.table.specs) { names += s.decay ? s.name + " " : ""; }
    CHECK(names == "wte qkvw attprojw fcw fcprojw ");
}

TEST_CASE("every tensor of the table is in a checkpoint, but for padding", "[gpt2][encodings]") {
    for (const std::string& name : encodings()) {
        for (const GPT2Config& c :
             {small_config(name, 37), small_config(name, 16, 3, 6, 12, 257), small_config(name, 8, 1, 1, 2, 128)}) {
            INFO(name << ", C " << c.C);
            GPT2 model;
            gpt2_describe(model, c);
            check_coverage(model, c, {"wte"});
        }
    }
}

TEST_CASE("initial values: names shared by two encodings start equal, padding at zero", "[gpt2]") {
    Model a(small_config("cable", 37), 0, 7), b(small_config("rope", 37), 0, 7), c(small_config("rope", 37), 0, 8);
    const std::vector<float> xa = a.host(a.master), xb = b.host(b.master);
    const std::vector<float> xc = c.host(c.master);
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
    const size_t n = 64 * 16;               // of a layer
    auto rms = [&](const char* name) {
        double s = 0;
        for (int l = 0; l < 2; l++) {
            const float* w = a.table.pointer(xa.data(), name)(l);
            for (size_t e = 0; e < n; e++) { s += (double)w[e] * w[e] / (double)(2 * n); }
        }
        return std::sqrt(s);
    };
    CHECK(std::fabs(rms("fcw") / 0.02 - 1) <= 4 / std::sqrt(2.0 * 2 * n));
    CHECK(std::fabs(rms("fcprojw") / 0.01 - 1) <= 4 / std::sqrt(2.0 * 2 * n));
}

TEST_CASE("logits, loss and every gradient are PyTorch's, for every encoding", "[gpt2][encodings]") {
    Random random;
    INFO(random);
    for (const std::string& name : models_with_fixture("gpt2")) { test_fixture(random, name); }
}

TEST_CASE("logits beyond the trained length are PyTorch's, for every encoding", "[gpt2][encodings]") {
    Random random;
    INFO(random);
    for (const std::string& encoding : models_with_fixture("gpt2")) {
        const Fixture f(encoding);
        CHECK((encoding != "rope" || f.has("logits.yarn")));
        if (f.file.find("inputs.long") == nullptr) {
            CHECK(position_max_length(f.gpt2.position) == f.T);
            continue;
        }
        const std::vector<int> inputs = read_i32(f.file, "inputs.long");
        const int T = (int)f.file.entry("inputs.long").shape[1];
        for (const char* scaling : {"none", "pi", "ntk", "yarn"}) {
            const std::string name = std::string(scaling) == "none" ? "logits.long" : std::string("logits.") + scaling;
            if (f.file.find(name) == nullptr) { continue; }
            INFO(encoding << ", " << name);
            GPT2Config config = f.gpt2;
            parse_rope_scaling(scaling, config.position);
            Model model(config, 0);
            f.load(model, random);
            Acts acts(model, 1, T, Purpose::Evaluate);
            const std::vector<float> got =
                logits_of(model, acts, inputs, std::vector<int>((size_t)T, IGNORE_INDEX), 1, T);
            f.check_close(name, got, f.read(name));
            if (name == "logits.long" && encoding == "rope") {
                CHECK(f.error_units("logits.pi", got, f.read("logits.pi")) > 100);        // the scalings do differ
            }
        }
    }
}

TEST_CASE("a tensor without a row among the files is an error: it would never be saved", "[gpt2]") {
    GPT2 model;
    gpt2_describe(model, small_config("cable", 16));
    CHECK_NOTHROW(check_files(model));
    TensorSpec lost;
    lost.name = "lost_and_found";
    lost.rows = 3;
    model.table.add(lost);
    CHECK(throws_with([&] { check_files(model); }, "lost_and_found") == EXIT_BAD_INPUT);
    model.files.push_back({"transformer.lost_and_found", "lost_and_found", 0, 0, 3, false});
    CHECK_NOTHROW(check_files(model));
}
