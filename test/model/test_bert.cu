// test_bert.cu -- BERT: its table, its gradients against PyTorch's through both heads, padding, splits, recomputation, learning.
//
// The fixtures (dev/hf/make_fixtures.py) hold a small model for every encoding, computed in float64, and for each tensor the
// error that PyTorch makes in float32, which is the unit of the tolerances.
#include <set>

#include "test/fixture.h"

#include "llmc/contrastive.cuh"
#include "llmc/gelu.cuh"
#include "llmc/layernorm.cuh"
#include "llmc/matmul.cuh"
#include "llmc/pooling.cuh"
#include "llmc/use/retrieval.h"
#include "llmc/rows.cuh"
#include "llmc/run/run.h"

namespace {

#define main train_bert_main
#include "train_bert.cu"
#undef main
[[maybe_unused]] const auto program = train_bert_main;

// with its gradient buffers
struct Model : HeldModel<BERT> {
    Model(const BERTConfig& c, int micro_batches, uint64_t seed = 1) {
        bert_describe(*this, c);
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
        inputs = ints("inputs");
        lengths = ints("lengths");
        if (has("targets")) { targets = ints("targets"); }
        B = (int)file.entry("inputs").shape[0];
        T = (int)file.entry("inputs").shape[1];
    }
    void load(Model& model, Random& random) const { model.set(weights(model.table, model.files, random)); }
};

BERTConfig small_config(const std::string& pos, int T, int L = 2, int NH = 2, int C = 16, int V = 29) {
    BERTConfig c;
    c.T = T; c.V = V; c.L = L; c.NH = NH; c.C = C;
    c.position = parse_position(pos, T);
    return c;
}

std::vector<int> draw_tokens(Random& random, size_t n, int V) {
    std::vector<int> x(n);
    for (int& t : x) { t = random.integer(0, V - 1); }
    return x;
}

// About `share` of the tokens of each sequence's length have a target.
std::vector<int> draw_targets(Random& random, const std::vector<int>& lengths, int T, int V, double share) {
    std::vector<int> x(lengths.size() * T, IGNORE_INDEX);
    for (size_t b = 0; b < lengths.size(); b++) {
        for (int t = 0; t < lengths[b]; t++) { if (random.uniform(0, 1) < share) { x[b * T + t] = random.integer(0, V - 1); } }
    }
    return x;
}

// (B,T) as (B,wider): `behind` stands behind each row
std::vector<int> widened(const std::vector<int>& x, int T, int wider, int behind) {
    std::vector<int> y(x.size() / T * wider, behind);
    for (size_t n = 0; n < x.size(); n++) { y[n / T * wider + n % T] = x[n]; }
    return y;
}

// logits (B*T,V) of all tokens, 0 behind a length; lengths may be null
std::vector<float> logits_of(Model& model, Activations& acts, const std::vector<int>& tokens, const int* lengths, int B, int T) {
    const size_t N = (size_t)B * T, V = (size_t)model.config.V, Vp = (size_t)model.config.Vp();
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

// The same rows out of batches of different shapes: the same bits from the portable matmul, while OpenBLAS chooses another kernel
// for another number of rows, and is right to rounding.
void check_same_rows(const Fixture& f, const std::string& name, const std::vector<float>& got, const std::vector<float>& want) {
#if defined(MATMUL_CBLAS)
    f.check_close(name, got, want, 2 * FIXTURE_MULTIPLE);
#else
    INFO(name);
    CHECK(same_bits(got, want));
    (void)f;
#endif
}

struct Gradient { double loss; std::vector<float> grads; };

Gradient gradient_of(Model& model, Activations& acts, const std::vector<int>& tokens, const std::vector<int>& targets, const std::vector<int>& lengths,
                     int micro_batches = 1, int recompute = 0) {
    REQUIRE(tokens.size() == (size_t)acts.B * acts.T * micro_batches);
    const StepGradient g = bert_gradient(model, acts, tokens.data(), targets.data(), lengths.empty() ? nullptr : lengths.data(), micro_batches, recompute);
    return {g.loss, model.host(g.grads)};
}

struct Contrast : Gradient { std::vector<float> embeddings; };

Contrast contrast_of(Model& model, Activations& acts, const GroupBatch& batch, double tau, int recompute = 0) {
    const int Q = batch.groups, C = model.config.C;
    ContrastiveBuffers buffers;
    buffers.allocate(Q, batch.rows - Q, C);
    const StepGradient g = contrastive_gradient(model, acts, buffers, batch, tau, recompute);
    Contrast c;
    c.loss = g.loss;
    c.grads = model.host(g.grads);
    c.embeddings.resize((size_t)batch.rows * C);
    copy_to_host(c.embeddings.data(), buffers.emb, sizeof(float) * c.embeddings.size(), model.stream);
    buffers.release();
    return c;
}

// The fixture's rows in the trainer's order, where document i answers query i; order: row of the batch -> row of the fixture.
GroupBatch group_batch(const Fixture& f, std::vector<int>& order) {
    const std::vector<int> positives = f.ints("positives");
    GroupBatch batch;
    batch.groups = (int)positives.size();
    batch.rows = f.B;
    batch.T = f.T;
    order.clear();
    for (int q = 0; q < batch.groups; q++) { order.push_back(q); }
    for (int p : positives) { order.push_back(batch.groups + p); }
    for (int r = batch.groups; r < f.B; r++) { if (std::find(order.begin(), order.end(), r) == order.end()) { order.push_back(r); } }
    for (int r : order) {
        batch.ids.insert(batch.ids.end(), f.inputs.begin() + r * f.T, f.inputs.begin() + (r + 1) * f.T);
        batch.lengths.push_back(f.lengths[(size_t)r]);
    }
    return batch;
}

// Every gradient against the fixture's, and nothing in padding: the worst that was seen is 2.9 units, and 3.3 with every weight a float32
// beside the fixture's (both of FIRE's MLP, which sums da over whole rows: out's rounding is in D, so that a row of da does not sum to 0). `prefix`: "grad." or "grad.mean."; a tensor the fixture leaves out is 0.
void check_gradients(const Fixture& f, const Model& model, const std::vector<float>& grads, const std::string& prefix,
                     double multiple = FIXTURE_MULTIPLE) {
    std::vector<float> rest = grads;
    for (const FileTensor& t : model.files) {
        if (!f.has(prefix + t.name)) {
            CHECK((prefix != "grad." && starts_with(t.name, "cls.")));
            continue;
        }
        f.check_close(prefix + t.name, part_of(grads, model.table, t), f.read(prefix + t.name), multiple);
        for (size_t e : elements_of(model.table, t)) { rest[e] = 0; }
    }
    CHECK(worst_difference(rest, std::vector<double>(rest.size())) == 0);
}

// Two gradients of the same thing, each of which may be off by FIXTURE_MULTIPLE.
void check_same_gradient(const Fixture& f, const Model& model, const std::vector<float>& got, const std::vector<float>& want,
                         const std::string& prefix = "grad.") {
    for (const FileTensor& t : model.files) {
        if (!f.has(prefix + t.name)) { continue; }
        f.check_close(prefix + t.name, part_of(got, model.table, t), part_of(want, model.table, t), 2 * FIXTURE_MULTIPLE);
    }
}

} // namespace

// ----------------------------------------------------------------------------------------------------------
// the table

TEST_CASE("every tensor of BERT's table is in a checkpoint, but for padding", "[bert][encodings]") {
    for (const std::string& name : encodings()) {
        for (const BERTConfig& c : {small_config(name, 37), small_config(name, 16, 3, 6, 12, 257), small_config(name, 8, 1, 1, 2, 128)}) {
            INFO(name << ", C " << c.C);
            BERT model;
            bert_describe(model, c);
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
                const bool vocabulary = s.name == "wte" || s.name == "decoderb";
                const size_t used = vocabulary ? (size_t)c.V : s.name == "qkvw" || s.name == "qkvb" ? columns : s.rows;
                size_t wrong = 0;
                for (size_t e = 0; e < s.size(); e++) {
                    const int wanted = e / s.row_size() % s.rows < used ? 1 : 0;
                    wrong += covered[model.table.offsets[i] + e] != wanted;
                }
                INFO(s.name);
                CHECK(wrong == 0);
                CHECK(s.rows - used < (vocabulary ? 128 : 8));
            }
        }
    }
}

TEST_CASE("BERT's tensors have transformers' names and shapes", "[bert][encodings]") {
    for (const std::string& encoding : encodings_with_fixture("bert")) {
        const FixtureFile f("bert_" + encoding);           // written from a torch.nn.Module of those names
        BERT model;
        bert_describe(model, Fixture("bert_" + encoding).bert);
        std::set<std::string> ours, theirs;
        for (const FileTensor& t : model.files) {
            ours.insert("param." + t.name);
            if (f.has("param." + t.name)) { CHECK(file_view(model.table, t).shape() == f.file.entry("param." + t.name).shape); }
        }
        for (const SafetensorsEntry& e : f.file.entries) { if (starts_with(e.name, "param.")) { theirs.insert(e.name); } }
        INFO(encoding);
        CHECK(ours == theirs);
    }
}

TEST_CASE("BERT's tensors with learned positions are BertForMaskedLM's, word for word", "[bert]") {
    BERT model;
    bert_describe(model, small_config("learned", 8, 1));
    std::set<std::string> names;
    for (const FileTensor& t : model.files) { names.insert(t.name); }
    const std::set<std::string> wanted = {
        "bert.embeddings.word_embeddings.weight", "bert.embeddings.position_embeddings.weight", "bert.embeddings.token_type_embeddings.weight",
        "bert.embeddings.LayerNorm.weight", "bert.embeddings.LayerNorm.bias", "bert.encoder.layer.0.attention.self.query.weight",
        "bert.encoder.layer.0.attention.self.query.bias", "bert.encoder.layer.0.attention.self.key.weight",
        "bert.encoder.layer.0.attention.self.key.bias", "bert.encoder.layer.0.attention.self.value.weight",
        "bert.encoder.layer.0.attention.self.value.bias", "bert.encoder.layer.0.attention.output.dense.weight",
        "bert.encoder.layer.0.attention.output.dense.bias", "bert.encoder.layer.0.attention.output.LayerNorm.weight",
        "bert.encoder.layer.0.attention.output.LayerNorm.bias", "bert.encoder.layer.0.intermediate.dense.weight",
        "bert.encoder.layer.0.intermediate.dense.bias", "bert.encoder.layer.0.output.dense.weight", "bert.encoder.layer.0.output.dense.bias",
        "bert.encoder.layer.0.output.LayerNorm.weight", "bert.encoder.layer.0.output.LayerNorm.bias", "cls.predictions.bias",
        "cls.predictions.transform.dense.weight", "cls.predictions.transform.dense.bias", "cls.predictions.transform.LayerNorm.weight",
        "cls.predictions.transform.LayerNorm.bias"};
    CHECK(names == wanted);
}

// ----------------------------------------------------------------------------------------------------------
// against PyTorch

TEST_CASE("BERT's logits, loss and every gradient are PyTorch's, for every encoding", "[bert][encodings]") {
    Random random;
    INFO(random);
    for (const std::string& encoding : encodings_with_fixture("bert")) {
        INFO(encoding);
        const Fixture f("bert_" + encoding);
        REQUIRE(f.lengths[1] < f.T);
        Model model(f.bert, 1);
        f.load(model, random);
        Acts acts(model, f.B, f.T);
        f.check_close("logits", logits_of(model, acts, f.inputs, f.lengths.data(), f.B, f.T), f.read("logits"));
        std::vector<float> losses(f.inputs.size(), -1), hits(f.inputs.size(), -1);
        forward_losses(model, acts, f.inputs.data(), f.targets.data(), f.lengths.data(), f.B, f.T, losses.data(), hits.data());
        double sum = 0;
        for (size_t n = 0; n < losses.size(); n++) {
            CHECK((losses[n] == 0.0f) == (f.targets[n] == IGNORE_INDEX));
            CHECK((hits[n] == 0.0f || (hits[n] == 1.0f && f.targets[n] != IGNORE_INDEX)));
            sum += losses[n];
        }
        const Gradient g = gradient_of(model, acts, f.inputs, f.targets, f.lengths);
        f.check_close("loss", {(float)g.loss}, f.read("loss"));
        CHECK(std::fabs(sum / (double)count_targets(f.targets.data(), f.targets.size()) - g.loss) <= 1e-6 * g.loss);
        check_gradients(f, model, g.grads, "grad.");
    }
}

TEST_CASE("BERT's logits beyond the trained length are PyTorch's, for every encoding", "[bert][encodings]") {
    Random random;
    INFO(random);
    for (const std::string& encoding : encodings_with_fixture("bert")) {
        const Fixture f("bert_" + encoding);
        CHECK((encoding != "rope" || f.has("logits.yarn")));
        if (!f.has("inputs.long")) {
            CHECK(position_max_length(f.bert.position) == f.T);
            continue;
        }
        const std::vector<int> inputs = f.ints("inputs.long");
        const int T = (int)f.file.entry("inputs.long").shape[1];
        for (const char* scaling : {"none", "pi", "ntk", "yarn"}) {
            const std::string name = std::string(scaling) == "none" ? "logits.long" : std::string("logits.") + scaling;
            if (!f.has(name)) { continue; }
            INFO(encoding << ", " << name);
            BERTConfig config = f.bert;
            parse_rope_scaling(scaling, config.position);
            Model model(config, 0);
            f.load(model, random);
            Acts acts(model, f.B, T, Purpose::Evaluate);
            f.check_close(name, logits_of(model, acts, inputs, nullptr, f.B, T), f.read(name));
        }
    }
}

// Worst here: 4.5 units, of cable's biases with OpenBLAS; 3.7 in a gradient that is zero exactly (a key's bias under cls), so that
// nothing but rounding is compared.
constexpr double CONTRASTIVE_MULTIPLE = 2 * FIXTURE_MULTIPLE;

TEST_CASE("embeddings, contrastive loss and every gradient of it are PyTorch's, in chunks of any size", "[bert][contrastive]") {
    Random random;
    INFO(random);
    const Fixture f("contrastive_cable");
    const size_t C = (size_t)f.bert.C;
    std::vector<int> order;
    const GroupBatch given = group_batch(f, order);
    for (const Pooling pooling : {Pooling::Mean, Pooling::Cls}) {
        const std::string kind = pooling == Pooling::Mean ? "mean" : "cls";
        Contrast whole;
        for (int rows : {6, 4, 2, 1}) {                                 // in a chunk; 4: the last one is short
            for (int T : {f.T, 40}) {
                INFO(kind << ", " << rows << " rows in a chunk, " << T << " tokens in a row");
                Random same = random;
                Model model(f.bert, ceil_div(f.B, rows));
                model.pooling = pooling;
                f.load(model, same);
                Acts acts(model, rows, T);
                const GroupBatch batch = {given.groups, given.rows, T, widened(given.ids, f.T, T, 0), given.lengths};
                const Contrast c = contrast_of(model, acts, batch, f.read("temperature")[0]);
                std::vector<float> embeddings(c.embeddings.size());
                for (size_t r = 0; r < order.size(); r++) { std::copy_n(&c.embeddings[r * C], C, &embeddings[(size_t)order[r] * C]); }
                f.check_close("embeddings." + kind, embeddings, f.read("embeddings." + kind));
                f.check_close("loss." + kind, {(float)c.loss}, f.read("loss." + kind));
                check_gradients(f, model, c.grads, "grad." + kind + ".", CONTRASTIVE_MULTIPLE);
                if (rows == 6 && T == f.T) { whole = c; }
                check_same_gradient(f, model, c.grads, whole.grads, "grad." + kind + ".");
                check_same_rows(f, "embeddings." + kind, c.embeddings, whole.embeddings);
                check_same_rows(f, "loss." + kind, {(float)c.loss}, {(float)whole.loss});
            }
        }
    }
}

// ----------------------------------------------------------------------------------------------------------
// finite differences, through both heads

namespace {

// The slope of a loss computed in float32, along one weight: central differences over 4 points, whose error is h^4 / 30 times
// the fifth derivative plus the loss's rounding by 1.5 / h.
double slope(Model& model, std::vector<float>& x, size_t e, const std::function<double()>& loss) {
    const float at = x[e], h = 1.0f / 32;
    auto f = [&](float by) {
        x[e] = at + by * h;
        model.set(x);
        return loss();
    };
    const double near = f(1) - f(-1), far = f(2) - f(-2);
    f(0);
    return (8 * near - far) / (12 * h);
}

// The largest element of each of these tensors' gradients against differences.
void check_slopes(Model& model, const std::vector<float>& grads, const std::vector<std::string>& names, const std::function<double()>& loss) {
    std::vector<float> x = model.host(model.master);
    for (const std::string& name : names) {
        size_t e = 0;
        for (size_t i : elements_of(model.table, model.file(name))) { e = e == 0 || std::fabs(grads[i]) > std::fabs(grads[e]) ? i : e; }
        const double got = grads[e], want = slope(model, x, e, loss), relative = std::fabs(got - want) / std::fabs(want);
        if (getenv("CABLE_TEST_ERRORS") != nullptr) { printf("%-56s slope %9.5f, off by %.1e\n", name.c_str(), want, relative); }
        INFO(name << ": differences give " << want << ", the backward pass " << got);
        CHECK(relative <= 1e-2);                // measured: up to 4.2e-3 in 40 seeds, nearly all of it the differences' own error
    }
}

const std::vector<std::string> encoder_tensors = {
    "bert.embeddings.word_embeddings.weight", "bert.embeddings.token_type_embeddings.weight", "bert.embeddings.LayerNorm.weight",
    "bert.encoder.layer.0.attention.self.query.weight", "bert.encoder.layer.1.attention.self.value.weight",
    "bert.encoder.layer.0.output.dense.weight", "bert.encoder.layer.0.attention.output.LayerNorm.bias", "bert.encoder.layer.1.intermediate.dense.weight"};

} // namespace

TEST_CASE("BERT's gradients are differences of its losses, through both heads", "[bert]") {
    Random random;
    INFO(random);
    for (const std::string name : {"cable", "learned"}) {
        const Fixture f("bert_" + name);
        std::vector<std::string> names = encoder_tensors;
        names.push_back(name == "cable" ? "bert.encoder.layer.0.attention.self.cable.c.weight" : "bert.embeddings.position_embeddings.weight");
        Model model(f.bert, 1);
        f.load(model, random);
        Acts acts(model, f.B, f.T);
        std::vector<std::string> head = names;
        for (const char* t : {"bias", "transform.dense.weight", "transform.LayerNorm.weight"}) { head.push_back(std::string("cls.predictions.") + t); }
        check_slopes(model, gradient_of(model, acts, f.inputs, f.targets, f.lengths).grads, head,
                     [&] { return gradient_of(model, acts, f.inputs, f.targets, f.lengths).loss; });
        GroupBatch groups = {2, 6, f.T, draw_tokens(random, 6 * (size_t)f.T, f.bert.V), {5, 9, 37, 1, 24, 16}};
        Model two(f.bert, 1);
        two.set(model.host(model.master));
        Acts six(two, 6, f.T);
        check_slopes(two, contrast_of(two, six, groups, 0.5).grads, names, [&] { return contrast_of(two, six, groups, 0.5).loss; });
    }
}

// ----------------------------------------------------------------------------------------------------------
// padding

TEST_CASE("padding changes neither embeddings nor what is learned", "[bert][padding][encodings]") {
    Random random;
    INFO(random);
    for (const std::string& encoding : encodings_with_fixture("bert")) {
        const Fixture f("bert_" + encoding);
        const int T = 24, V = f.bert.V, C = f.bert.C;
        const std::vector<int> lengths = {24, 5, 1, 17};
        const int B = (int)lengths.size();
        std::vector<int> ids = draw_tokens(random, (size_t)B * T, V - 1);       // V - 1 is [PAD], which stands behind a length alone
        std::vector<int> targets = draw_targets(random, lengths, T, V - 1, 0.3);
        targets[0] = 3;
        for (int n = 0; n < B * T; n++) { if (n % T >= lengths[n / T]) { ids[n] = V - 1; } }
        Gradient narrow_mlm;
        Contrast narrow;
        std::vector<float> narrow_embeddings;
        for (int wide : {T, 37, 64, 70}) {
            if (wide > position_max_length(f.bert.position)) { continue; }
            INFO(encoding << ", padded to " << wide);
            Random same = random;
            Model model(f.bert, 1);
            f.load(model, same);
            Acts acts(model, B, wide);
            const std::vector<int> wide_ids = widened(ids, T, wide, V - 1);
            std::vector<float> embeddings((size_t)B * C);
            embed_documents(model, acts, wide_ids.data(), lengths.data(), B, wide, embeddings.data());
            const Gradient mlm = gradient_of(model, acts, wide_ids, widened(targets, T, wide, IGNORE_INDEX), lengths);
            const Contrast c = contrast_of(model, acts, {2, B, wide, wide_ids, lengths}, 0.2);
            if (wide == T) {
                narrow_mlm = mlm;
                narrow = c;
                narrow_embeddings = embeddings;
            }
            CHECK(same_bits(c.embeddings, embeddings));
            check_same_rows(f, "logits", embeddings, narrow_embeddings);
            check_same_rows(f, "loss", {(float)mlm.loss}, {(float)narrow_mlm.loss});
            check_same_rows(f, "loss", {(float)c.loss}, {(float)narrow.loss});
            check_same_gradient(f, model, mlm.grads, narrow_mlm.grads);
            check_same_gradient(f, model, c.grads, narrow.grads);
            for (const char* name : {"word", "position"}) {             // a row of these is a sum over its tokens, one at a time
                const std::string full = std::string("bert.embeddings.") + name + "_embeddings.weight";
                if (!f.has("param." + full)) { continue; }
                const FileTensor& t = model.file(full);
                const std::vector<float> part = part_of(c.grads, model.table, t), part_mlm = part_of(mlm.grads, model.table, t);
                check_same_rows(f, "grad." + full, part, part_of(narrow.grads, model.table, t));
                check_same_rows(f, "grad." + full, part_mlm, part_of(narrow_mlm.grads, model.table, t));
                const size_t first = std::string(name) == "word" ? (size_t)V - 1 : (size_t)T;       // [PAD], and places with nothing but it
                CHECK(largest(part) > 0);
                CHECK(largest(std::vector<float>(part.begin() + first * C, part.end())) == 0);
                if (std::string(name) == "position") { CHECK(largest(std::vector<float>(part_mlm.begin() + T * C, part_mlm.end())) == 0); }
            }
        }
        // what stands behind a length is not looked at
        Model model(f.bert, 1);
        f.load(model, random);
        Acts acts(model, B, T);
        std::vector<int> noise = ids;
        for (int n = 0; n < B * T; n++) { if (n % T >= lengths[n / T]) { noise[n] = random.integer(0, V - 2); } }
        const Contrast a = contrast_of(model, acts, {2, B, T, ids, lengths}, 0.2), b = contrast_of(model, acts, {2, B, T, noise, lengths}, 0.2);
        INFO(encoding);
        CHECK(worst_difference(a.grads, as<double>(b.grads)) == 0);
        CHECK(same_bits(gradient_of(model, acts, noise, targets, lengths).grads, gradient_of(model, acts, ids, targets, lengths).grads));
    }
}

TEST_CASE("lengths of T are no lengths", "[bert][padding]") {
    Random random;
    INFO(random);
    const Fixture f("bert_cable");
    Model model(f.bert, 1);
    f.load(model, random);
    Acts acts(model, f.B, f.T);
    const Gradient a = gradient_of(model, acts, f.inputs, f.targets, {}), b = gradient_of(model, acts, f.inputs, f.targets, {f.T, f.T});
    CHECK(a.loss == b.loss);
    CHECK(same_bits(a.grads, b.grads));
    CHECK(worst_difference(a.grads, as<double>(gradient_of(model, acts, f.inputs, f.targets, f.lengths).grads)) > 0);
}

// ----------------------------------------------------------------------------------------------------------
// the same, however it is computed

TEST_CASE("recomputing BERT's activations changes no bit", "[bert]") {
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

TEST_CASE("bert: same bits for any number of threads", "[bert]") {
    Random random;
    INFO(random);
    for (const char* name : {"cable", "t5", "fire", "learned"}) {
        const int B = 2, T = 70, V = 300;
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
        std::vector<int> targets = draw_targets(random, lengths, f.T, f.bert.V, 0.3);           // another count in each micro-batch
        std::fill(targets.begin() + (sequences - 1) * f.T, targets.end(), IGNORE_INDEX);        // and none in the last sequence
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
            check_same_gradient(f, model, g.grads, whole.grads);
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
        CHECK(g.loss == 0);
        CHECK(worst_difference(g.grads, std::vector<double>(g.grads.size())) == 0);         // and no NaN
    }
    std::vector<float> losses(none.size(), -1);
    forward_losses(model, acts, f.inputs.data(), none.data(), nullptr, f.B, f.T, losses.data(), nullptr);
    CHECK(worst_difference(losses, std::vector<double>(losses.size())) == 0);
    // a micro-batch of nothing but such tokens changes neither loss nor gradient
    std::vector<int> tokens = f.inputs, targets = f.targets, lengths = f.lengths;
    tokens.insert(tokens.end(), f.inputs.rbegin(), f.inputs.rend());
    targets.resize(2 * targets.size(), IGNORE_INDEX);
    lengths.insert(lengths.end(), {1, 30});
    const Gradient one = gradient_of(model, acts, f.inputs, f.targets, f.lengths), two = gradient_of(model, acts, tokens, targets, lengths, 2);
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
    check_same_gradient(f, model, chunked.grads, once.grads);
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
        CHECK(same_bits(logits_of(model, train, f.inputs, f.lengths.data(), f.B, f.T), logits_of(model, evaluate, f.inputs, f.lengths.data(), f.B, f.T)));
        std::vector<float> a((size_t)f.B * f.bert.C), b(a.size());
        embed_documents(model, train, f.inputs.data(), f.lengths.data(), f.B, f.T, a.data());
        embed_documents(model, evaluate, f.inputs.data(), f.lengths.data(), f.B, f.T, b.data());
        CHECK(same_bits(a, b));
    }
}

// ----------------------------------------------------------------------------------------------------------
// learning

TEST_CASE("BERT learns what is masked in one batch by heart", "[bert]") {
    Random random;
    INFO(random);
    for (const char* name : {"cable", "kcable", "learned", "rope"}) {
        const int B = 2, T = 32, V = 29;
        Model model(small_config(name, T, 2, 2, 32, V), 1, random.seed);
        Acts acts(model, B, T);
        const std::vector<int> lengths = {T, 20}, tokens = draw_tokens(random, B * T, V), targets = draw_targets(random, lengths, T, V, 0.3);
        double loss = 0, first = 0;
        int step = 0;
        for (; step < 200; step++) {
            const StepGradient g = bert_gradient(model, acts, tokens.data(), targets.data(), lengths.data(), 1, 0);
            loss = g.loss;
            if (step == 0) { first = loss; }
            if (loss < 0.1) { break; }
            update_parameters(model, g.grads, {5e-3f, 0.9f, 0.95f, 1e-8f, 0.0f, (float)std::min(1.0, 1.0 / g.norm), step + 1});
        }
        if (getenv("CABLE_TEST_ERRORS") != nullptr) { printf("%s: %d steps\n", name, step); }
        INFO(name << ": from " << first << " to " << loss << " in " << step << " steps");
        CHECK(std::fabs(first - std::log((double)V)) < 0.2);    // small initial weights: all tokens alike
        CHECK(loss < 0.1);
    }
}

TEST_CASE("an update keeps BERT's padding at zero and every tensor within its bounds", "[bert]") {
    Random random;
    INFO(random);
    for (const char* name : {"cable", "kerple_power"}) {
        const int T = 16;
        Model model(small_config(name, T), 1, random.seed);
        Acts acts(model, 2, T);
        const std::vector<int> tokens = draw_tokens(random, 2 * T, 29), targets = draw_targets(random, {T, T}, T, 29, 0.5);
        for (int t = 1; t <= 5; t++) {
            const float* grads = bert_gradient(model, acts, tokens.data(), targets.data(), nullptr, 1, 0).grads;
            update_parameters(model, grads, {1.0f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, t});       // a wild learning rate, to meet the bounds
        }
        std::vector<float> x = model.host(model.master);
        for (size_t i = 0; i < model.table.specs.size(); i++) {
            const TensorSpec& s = model.table.specs[i];
            const float* w = x.data() + model.table.offsets[i];
            CHECK((*std::min_element(w, w + s.size()) >= s.lo && *std::max_element(w, w + s.size()) <= s.hi));
        }
        for (const FileTensor& f : model.files) { for (size_t e : elements_of(model.table, f)) { x[e] = 0; } }
        CHECK(worst_difference(x, std::vector<double>(x.size())) == 0);
    }
}

TEST_CASE("train_bert's main turns an unknown flag into exit code 2", "[bert]") {
    char program[] = "train_bert", flag[] = "--no_such_flag", one[] = "1";
    char* argv[] = {program, flag, one, nullptr};
    CHECK(run_program(bert_main, 3, argv) == EXIT_BAD_INPUT);
}
