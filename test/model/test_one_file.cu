// test_one_file.cu -- the loss and every gradient of dev/gpt2_cable.cpp are PyTorch's, and its loops in float64 are
// closer. That it trains as train_gpt2 does, test/scripts/test_one_file.py shows.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>

#include "test/catch.h"
#include "test/files.h"

#include "llmc/engine/files/safetensors.h"

#define main __attribute__((unused)) one_file_main
namespace single {
#include "dev/gpt2_cable.cpp"
}
#undef main
#undef REAL
#define REAL double
#define main __attribute__((unused)) one_file_main
namespace exact {
#include "dev/gpt2_cable.cpp"
}
#undef main

namespace {

// As in test/fixture.h: the fixture's unit of error is PyTorch's own in float32.
constexpr double MULTIPLE = 4;

std::vector<float> read(const Safetensors& file, const std::string& name) {
    std::vector<float> x(file.entry(name).elements);
    file.read_elements(file.entry(name), x.data(), 0, x.size());
    return x;
}

// Sets the fixture's weights, takes the gradient of its batch, and returns the largest error of a gradient, in units.
template <class Model, class Acts, class Transposed, class Step>
double worst_gradient(const Safetensors& f, Model& model, Acts& acts, Transposed transposed, Step step) {
    const auto at = [&](const auto& p, size_t i) {          // where element i of the file is in the parameter
        return transposed(p) ? i % (size_t)p.rows * (size_t)p.cols + i / (size_t)p.rows : i;
    };
    for (auto* p : model.all) {
        const std::vector<float> values = read(f, "param." + p->name);
        REQUIRE(values.size() == p->w.size());
        for (size_t i = 0; i < values.size(); i++) { p->w[at(*p, i)] = values[i]; }
    }
    std::vector<int> inputs = read_i32(f, "inputs"), targets = read_i32(f, "targets");
    const double loss = step(model, acts, inputs, targets);
    const double want = read(f, "loss")[0];
    double worst = std::fabs(loss - want) / (read(f, "error.loss")[0] * want);
    for (auto* p : model.all) {
        const std::vector<float> grad = read(f, "grad." + p->name);
        double largest = 0, difference = 0;
        for (size_t i = 0; i < grad.size(); i++) {
            largest = std::max(largest, (double)std::fabs(grad[i]));
            difference = std::max(difference, std::fabs((double)p->d[at(*p, i)] - (double)grad[i]));
        }
        const double units = difference / (read(f, "error." + p->name)[0] * largest);
        INFO(p->name);
        CHECK(units <= MULTIPLE);
        worst = std::max(worst, units);
    }
    return worst;
}

} // namespace

TEST_CASE("one file: loss and every gradient are PyTorch's", "[one_file]") {
    std::string fixture = __FILE__;
    fixture = fixture.substr(0, fixture.rfind("model/")) + "fixtures/gpt2_cable.safetensors";
    const Safetensors f(path_exists(fixture) ? fixture : "test/fixtures/gpt2_cable.safetensors");
    const int B = (int)f.entry("inputs").shape[0], T = (int)f.entry("inputs").shape[1];
    single::Model model(2, 2, 8, 16, 1);
    single::Acts acts(model, B, T);
    const double in_float = worst_gradient(f, model, acts, single::stored_transposed,
                                           [](auto& m, auto& a, auto& x, auto& y) {
        single::forward(m, a, x.data());
        const double loss = single::cross_entropy(a.logits, y.data(), (int)y.size());
        single::backward(m, a, a.logits, x.data());
        return loss;
    });
    exact::Model exact_model(2, 2, 8, 16, 1);
    exact::Acts exact_acts(exact_model, B, T);
    const double in_double = worst_gradient(f, exact_model, exact_acts, exact::stored_transposed,
                                            [](auto& m, auto& a, auto& x, auto& y) {
        exact::forward(m, a, x.data());
        const double loss = exact::cross_entropy(a.logits, y.data(), (int)y.size());
        exact::backward(m, a, a.logits, x.data());
        return loss;
    });
    INFO("units of PyTorch's float32 error: " << in_float << " in float32, " << in_double << " in float64");
    CHECK(in_float <= MULTIPLE);
    CHECK(in_double < in_float);
}
