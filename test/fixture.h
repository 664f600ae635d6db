// fixture.h -- a small model that PyTorch has computed (dev/hf/make_fixtures.py), and how far a trainer is from it.
#pragma once

#include <set>

#include "test/files.h"
#include "test/layer.h"
#include "test/oracle.h"

#include "llmc/engine/model.cuh"
#include "llmc/engine/config.h"
#include "llmc/engine/run.h"

// A trainer's model and activations, freed at the end
template <class Trained> struct HeldModel : Trained {
    ~HeldModel() { parameters_free(*this); }
    std::vector<float> host(const float* device) const {
        std::vector<float> x(this->table.total);
        copy_to_host(x.data(), device, sizeof(float) * x.size(), this->stream);
        return x;
    }
    void set(const std::vector<float>& x) {
        copy_to_device(this->master, x.data(), sizeof(float) * x.size(), this->stream);
    }
};
template <class Trained, class Activations> struct HeldActs : Activations {
    HeldActs(const Trained& model, int B, int T, Purpose purpose = Purpose::Train, int recompute = 0)
        : Activations(activations_describe(model, B, T, purpose, recompute)) {
        activations_allocate(*this);
    }
    ~HeldActs() { this->release(); }
};

// The elements of an internal tensor that a tensor of a file is, in the file's order
inline std::vector<size_t> elements_of(const TensorTable& table, const FileTensor& f) {
    const size_t index = (size_t)table.index(f.tensor);
    const TensorSpec& s = table.specs[index];
    const size_t cols = s.row_size();
    const size_t at = table.offset(index, f.layer) + f.row0 * cols;
    std::vector<size_t> e;
    for (size_t a = 0; a < (f.transposed ? cols : f.rows); a++) {
        const size_t inner = f.transposed ? f.rows : cols;
        for (size_t b = 0; b < inner; b++) { e.push_back(at + (f.transposed ? b * cols + a : a * cols + b)); }
    }
    return e;
}

// x, laid out as the parameters: the elements of a tensor of a file
inline std::vector<float> part_of(const std::vector<float>& x, const TensorTable& table, const FileTensor& f) {
    std::vector<float> part;
    for (size_t e : elements_of(table, f)) { part.push_back(x[e]); }
    return part;
}

// The fixture's values were rounded to float32, and its error is the worst of 8 runs in another order of summation than
// ours.
constexpr double FIXTURE_MULTIPLE = 4;

struct FixtureFile {
    Safetensors file;
    Safetensors cable;              // the model with cable, which has the parameters that others share with it
    Json config;

    explicit FixtureFile(const std::string& name)
        : file(path(name)), cable(path(starts_with(name, "gpt2") ? "gpt2_cable" : "bert_cable")) {
        config = parse_json(file.metadata["config"].get<std::string>(), file.file.path);
    }
    static std::string path(const std::string& name) {
        std::string directory = __FILE__;
        directory = directory.substr(0, directory.rfind('/')) + "/fixtures";
        return (is_directory(directory) ? directory : "test/fixtures") + "/" + name + ".safetensors";
    }
    int number(const char* key) const { return (int)json_int(config, key, 1, 1000, "fixture"); }
    std::string position() const { return config.at("position").at("name").get<std::string>(); }
    bool has(const std::string& name) const { return file.find(name) != nullptr; }
    std::vector<int> ints(const std::string& name) const { return read_i32(file, name); }
    std::vector<float> read(const std::string& name) const { return read(file, name); }
    static std::vector<float> read(const Safetensors& from, const std::string& name) {
        std::vector<float> x(from.entry(name).elements);
        from.read_elements(from.entry(name), x.data(), 0, x.size());
        return x;
    }
    // The parameters; padding gets values too, which nothing may depend on.
    std::vector<float> weights(const TensorTable& table, const std::vector<FileTensor>& files, Random& random) const {
        std::vector<float> x = random.normals(table.total);
        for (const FileTensor& f : files) {
            const std::vector<size_t> at = elements_of(table, f);
            const std::string name = "param." + f.name;
            const std::vector<float> values = read(has(name) ? file : cable, name);
            REQUIRE(values.size() == at.size());
            for (size_t i = 0; i < at.size(); i++) { x[at[i]] = values[i]; }
        }
        return x;
    }
    // Whether the exact gradient is zero, because the softmax ignores what all scores of a row share. Its error is then
    // absolute.
    bool exactly_zero(const std::string& name) const {
        const bool turned = position() == "rope" || position() == "carope";
        return ends_with(name, "fire.mlp.2.bias") || (ends_with(name, ".self.key.bias") && !turned);
    }
    // The distance of `got` from `want`, in units of PyTorch's float32 error on the fixture's input. On another input a
    // gradient may be small by luck, although the terms of its sum are not, so the unit is at least the fixture's own.
    double error_units(const std::string& name, const std::vector<float>& got, const std::vector<float>& want) const {
        const std::string error = "error." + (starts_with(name, "grad.") ? name.substr(5) : name);
        const double largest_value = has(name) ? std::max(largest(want), largest(read(name))) : largest(want);
        const double scale = exactly_zero(name) || largest_value == 0 ? 1.0 : largest_value;
        const double units = worst_difference(got, as<double>(want)) / (read(error)[0] * scale);
        if (getenv("CABLE_TEST_ERRORS") != nullptr) {
            printf("%-14s %-50s %.2f units\n", position().c_str(), name.c_str(), units);
        }
        return units;
    }
    void check_close(const std::string& name, const std::vector<float>& got, const std::vector<float>& want,
                     double multiple = FIXTURE_MULTIPLE) const {
        const double units = error_units(name, got, want);
        INFO(file.file.path << ", " << name << ": off by this many times PyTorch's error in float32");
        CHECK(units <= multiple);
    }
};

// whether the fixture leaves a tensor out; only one whose name begins with `absent` may be
inline bool left_out(const FixtureFile& f, const std::string& prefix, const std::string& name, const char* absent) {
    if (f.has(prefix + name)) { return false; }
    INFO(prefix << name << " is not in " << f.file.file.path);
    CHECK((absent != nullptr && starts_with(name, absent)));
    return true;
}

// Every gradient against the fixture's, and nothing in padding; a tensor that the fixture leaves out is 0. `prefix`:
// "grad." or "grad.mean.".
template <class Model>
void check_gradients(const FixtureFile& f, const Model& model, const std::vector<float>& grads,
                     double multiple = FIXTURE_MULTIPLE, const std::string& prefix = "grad.",
                     const char* absent = nullptr) {
    std::vector<float> rest = grads;
    for (const FileTensor& t : model.files) {
        if (left_out(f, prefix, t.name, absent)) { continue; }
        f.check_close(prefix + t.name, part_of(grads, model.table, t), f.read(prefix + t.name), multiple);
        for (size_t e : elements_of(model.table, t)) { rest[e] = 0; }
    }
    CHECK(worst_difference(rest, std::vector<double>(rest.size())) == 0);
}

// Two gradients of the same thing: the same to the fixture's rounding, tensor by tensor
template <class Model>
void check_same_gradient(const FixtureFile& f, const Model& model, const std::vector<float>& got,
                         const std::vector<float>& want, double multiple = FIXTURE_MULTIPLE,
                         const std::string& prefix = "grad.", const char* absent = nullptr) {
    for (const FileTensor& t : model.files) {
        if (left_out(f, prefix, t.name, absent)) { continue; }
        f.check_close(prefix + t.name, part_of(got, model.table, t), part_of(want, model.table, t), multiple);
    }
}

// Every element of the table is in one tensor of a file, but for padding; vocabulary: the tensors with a row per token
template <class Model, class Config>
void check_coverage(const Model& model, const Config& c, const std::set<std::string>& vocabulary) {
    std::vector<int> covered(model.table.total);
    std::set<std::string> names;
    size_t columns = 3 * (size_t)c.C;
    for (const FileTensor& f : model.files) {
        for (size_t e : elements_of(model.table, f)) { covered[e]++; }
        names.insert(f.name);
        if (f.tensor == "qkvw") { columns = std::max(columns, f.row0 + f.rows); }
    }
    CHECK(names.size() == model.files.size());
    for (size_t i = 0; i < model.table.specs.size(); i++) {
        const TensorSpec& s = model.table.specs[i];
        const bool of_tokens = vocabulary.count(s.name) != 0;
        // the rest of a tensor is padding: of the vocabulary, and after the columns of qkv
        size_t used = s.rows;
        if (of_tokens) { used = (size_t)c.V; }
        if (s.name == "qkvw" || s.name == "qkvb") { used = columns; }
        size_t wrong = 0;
        for (size_t e = 0; e < s.size(); e++) {
            const int wanted = e / s.row_size() % s.rows < used ? 1 : 0;
            wrong += covered[model.table.offset(i, (int)(e / s.layer_size())) + e % s.layer_size()] != wanted;
        }
        INFO(s.name);
        CHECK(wrong == 0);
        CHECK(s.rows - used < (of_tokens ? 128 : 8));
    }
}

// Every tensor is within its bounds, and padding is 0.
template <class Model> void check_bounds(const Model& model) {
    std::vector<float> x = model.host(model.master);
    for (size_t i = 0; i < model.table.specs.size(); i++) {
        const TensorSpec& s = model.table.specs[i];
        for (int l = 0; l < std::max(s.layers, 1); l++) {
            const float *w = x.data() + model.table.offset(i, l), *end = w + s.layer_size();
            CHECK((*std::min_element(w, end) >= s.lo && *std::max_element(w, end) <= s.hi));
        }
    }
    for (const FileTensor& f : model.files) { for (size_t e : elements_of(model.table, f)) { x[e] = 0; } }
    CHECK(worst_difference(x, std::vector<double>(x.size())) == 0);
}

inline std::vector<int> draw_tokens(Random& random, size_t n, int V) {
    std::vector<int> x(n);
    for (int& t : x) { t = random.integer(0, V - 1); }
    return x;
}

// The encodings that have a fixture, such as "gpt2_cable" for the family "gpt2". A new one may have none yet: that is
// reported once, and is not a failure.
inline std::vector<std::string> encodings_with_fixture(const std::string& family) {
    static std::set<std::string> said;
    std::vector<std::string> names;
    std::vector<std::string> all = encodings();
#if !defined(FEW_POSITIONS)
    all.push_back("layers");                                // several encodings
    all.push_back("clock");                                 // rope:clock=cable
#endif
    for (const std::string& name : all) {
        const bool has_row = name != "layers" && name != "clock";
        if (family == "bert" && has_row && directions(name).size() == 1) { continue; }
        const std::string fixture = family + "_" + name;
        if (path_exists(FixtureFile::path(fixture))) {
            names.push_back(name);
        } else if (said.insert(fixture).second) {
            printf("missing: test/fixtures/%s.safetensors, so %s is not compared with PyTorch; dev/hf/make_fixtures.py "
                   "writes it once dev/hf/cable_encodings.py knows the encoding\n", fixture.c_str(),
                   name.c_str());
        }
    }
    CHECK(std::find(names.begin(), names.end(), "cable") != names.end());       // the paper's own is never missing
    return names;
}

// and cable with a window and sinks; several encodings with documents apart
inline std::vector<std::string> models_with_fixture(const std::string& family) {
    std::vector<std::string> names = encodings_with_fixture(family);
    names.push_back("window");
#if !defined(FEW_POSITIONS)
    if (family == "gpt2") { names.push_back("documents"); }
#endif
    return names;
}

// A NaN that the n-th launch whose text begins with `kernel` leaves at `where`; blamed: the tensor that is named for it
struct PlantedNan { std::string kernel; int n; float* where; std::string blamed; };

// gradient(): the gradient of a step, in which each NaN in turn is planted
template <class Gradient>
void check_blame(Parameters& p, const std::vector<PlantedNan>& planted, Gradient gradient) {
    static PlantedNan now;
    for (const PlantedNan& nan : planted) {
        now = nan;
        after_launch = [](const char* text, Stream stream) {
            const float x = NAN;
            if (starts_with(text, now.kernel.c_str()) && --now.n == 0) {
                copy_to_device(now.where, &x, sizeof(x), stream);
            }
        };
        const StepGradient g = gradient();
        after_launch = nullptr;
        INFO(nan.kernel << " " << nan.n);
        CHECK(now.n <= 0);
        CHECK(std::isfinite(g.loss));
        CHECK(std::isnan(g.norm));
        CHECK(first_bad_tensor(p, g.grads) == nan.blamed);
    }
    CHECK(first_bad_tensor(p, gradient().grads).empty());
}
