// test_gpt2_differences.cu -- the whole model's gradients against finite differences of its loss, for every encoding.
//
// The fixtures compare with PyTorch, which does not know a new encoding yet. This test needs nothing but the model:
// the backward pass must be the derivative of the forward pass, right or wrong.
#include "test/model/gpt2_model.h"

namespace tests {        // so that the header of an encoding may use the same names

namespace {

// Weights far from their initial ones, so that every tensor counts, and within their bounds
void draw_weights(Model& model, Random& random) {
    std::vector<float> x(model.table.total);
    for (const FileTensor& f : model.files) {
        const TensorSpec& s = model.table.specs[(size_t)model.table.index(f.tensor)];
        const InitRule rule = f.init.value_or(s.init);
        const float mean = rule.kind == Init::Constant ? rule.a : 0.0f;
        float spread = mean == 0.0f ? 0.2f : 0.2f * mean;
        if (f.tensor == "qkvw") { spread = 0.4f; }                              // attention far from uniform
        if (f.tensor == "wte") { spread = 0.5f; }                               // rows on which layernorm is not steep
        const bool bounded = s.lo > -FLT_MAX || s.hi < FLT_MAX;
        for (size_t e : elements_of(model.table, f)) {
            x[e] = bounded ? draw_parameter(s, random) : mean + spread * random.normal();
        }
    }
    model.set(x);
}

// What is added to a model without an encoding
std::vector<FileTensor> own_tensors(const Model& model, const GPT2Config& config) {
    GPT2Config plain = config;
    plain.position = parse_position("none", config.T);
    GPT2 none;
    gpt2_describe(none, plain);
    std::set<std::string> shared;
    for (const FileTensor& f : none.files) { shared.insert(f.name); }
    std::vector<FileTensor> own;
    for (const FileTensor& f : model.files) { if (shared.count(f.name) == 0) { own.push_back(f); } }
    return own;
}

// The mean loss, in double from the tokens' float32 losses
double mean_loss(Model& model, Acts& acts, const std::vector<int>& tokens, const std::vector<int>& targets) {
    std::vector<float> losses(tokens.size());
    forward_losses(model, acts, tokens.data(), targets.data(), nullptr, acts.B, acts.T, losses.data(), nullptr);
    double sum = 0;
    for (float l : losses) { sum += l; }
    return sum / (double)losses.size();
}

// f's slope at a weight: central differences over 4 points, off by h^4 / 30 times the fifth derivative and by the
// rounding of f times 1.5 / h. bend: how much steeper f is to the right than to the left.
struct Slope { double value, bend; };
Slope slope_of(Model& model, std::vector<float>& x, size_t e, float h, const std::function<double()>& f) {
    const float at = x[e];
    auto moved = [&](float by) {
        x[e] = at + by * h;
        model.set(x);
        return f();
    };
    const double right = moved(1), left = moved(-1);
    const double far = moved(2) - moved(-2);
    const double middle = moved(0);
    return {(8 * (right - left) - far) / (12 * h), (right + left - 2 * middle) / h};
}

constexpr size_t TRIES = 96;        // cable_signed has a kink wherever two of its sums are equal

// The element with the largest gradient. Where f has a kink near it (the ReLU of cable and fire), it bends, or its
// differences over h and h/2 disagree. Such differences say nothing of the gradient: then the next element.
void check_tensor(Model& model, std::vector<float>& x, const std::vector<float>& grads, std::vector<size_t> elements,
                  double loss, const std::function<double()>& f) {
    float size = 0;
    for (size_t e : elements) { size = std::max(size, std::fabs(x[e])); }
    std::sort(elements.begin(), elements.end(),
              [&](size_t a, size_t b) { return std::fabs(grads[a]) > std::fabs(grads[b]); });
    const float h = std::min(1.0f, size) / 128;
    const double rounding = 0.5 / h * FLT_EPSILON * loss;       // measured: 0.3 of it, where the slope is 0
    bool known = false;
    for (size_t k = 0; k < std::min<size_t>(elements.size(), TRIES) && !known; k++) {
        const double got = grads[elements[k]];
        const Slope want = slope_of(model, x, elements[k], h, f), nearer = slope_of(model, x, elements[k], h / 2, f);
        known = std::fabs(nearer.value - want.value) <= 1e-2 * std::fabs(want.value) + 2 * rounding
             && std::fabs(nearer.bend) <= 0.1 * std::fabs(want.value) + 8 * rounding;
        if (!known) { continue; }
        const double off = std::fabs(got - want.value);
        if (getenv("CABLE_TEST_ERRORS") != nullptr) {
            printf("slope %9.5f, off by %.1e of it, %.2f of rounding\n", want.value, off / std::fabs(want.value),
                   off / rounding);
        }
        INFO("differences give " << want.value << ", the backward pass " << got);
        CHECK(off <= 5e-2 * std::fabs(want.value) + 16 * rounding);         // a bend that was not seen
    }
    CHECK((known || elements.size() < TRIES));                  // a scalar may sit on a kink
}

void check_gradients(const GPT2Config& config, Random& random) {
    const int B = 2;
    Model model(config, 1);
    draw_weights(model, random);
    Acts acts(model, B, config.T);
    const std::vector<int> tokens = draw_tokens(random, (size_t)B * config.T, config.V);
    const std::vector<int> targets = draw_tokens(random, tokens.size(), config.V);
    double loss = 0;
    const std::vector<float> grads = gradient_of(model, acts, tokens, targets, 1, 0, &loss);
    CHECK(std::fabs(mean_loss(model, acts, tokens, targets) - loss) <= 1e-6 * loss);
    std::vector<FileTensor> checked = own_tensors(model, config);
    for (const FileTensor& f : model.files) {
        for (const char* part :
             {"wte.weight", "h.0.ln_1.weight", "h.0.attn.c_attn.weight", "h.1.attn.c_proj.weight"}) {
            if (ends_with(f.name, part)) { checked.push_back(f); }
        }
    }
    std::vector<float> x = model.host(model.master);
    for (const FileTensor& f : checked) {
        INFO(config.position.name << ", " << f.name);
        check_tensor(model, x, grads, elements_of(model.table, f), loss,
                     [&] { return mean_loss(model, acts, tokens, targets); });
    }
}

} // namespace

TEST_CASE("gpt2: gradients are differences of the whole model's loss, every encoding", "[gpt2][encodings]") {
    Random random;
    INFO(random);
    for (const std::string& name : encodings_of_models()) { check_gradients(small_config(name, 24), random); }
}

TEST_CASE("gpt2: documents apart have the losses that they have alone, every encoding", "[gpt2][encodings][mask]") {
    Random random;
    INFO(random);
    const int B = 2, T = 75;
    const int end_of_text = 3;
    for (const std::string& name : encodings_of_models()) {
        GPT2Config config = small_config(name, T);
        if (config.position.has("fire")) { continue; }      // positions that do not start again: refused
        config.position.mask.end_of_text = end_of_text;
        Model model(config, 1);
        draw_weights(model, random);
        Acts acts(model, B, T);
        std::vector<int> tokens = draw_tokens(random, (size_t)B * T, config.V - 1);
        for (int& token : tokens) { token += token == end_of_text ? 1 : 0; }
        const std::vector<int> targets = draw_tokens(random, tokens.size(), config.V);
        const std::vector<int> begins = {0, 9, 10, 66, T, T + 70, B * T};     // the third one is longer than a tile
        for (int begin : begins) {
            if (begin > 0 && begin < B * T && begin != T) { tokens[(size_t)begin] = end_of_text; }
        }
        std::vector<float> packed(tokens.size()), alone(tokens.size());
        forward_losses(model, acts, tokens.data(), targets.data(), nullptr, B, T, packed.data(), nullptr);
        model.config.position.mask.end_of_text = -1;
        for (size_t d = 0; d + 1 < begins.size(); d++) {
            const int begin = begins[d], n = begins[d + 1] - begin;
            Acts own(model, 1, n);
            forward_losses(model, own, &tokens[(size_t)begin], &targets[(size_t)begin], nullptr, 1, n,
                           &alone[(size_t)begin], nullptr);
        }
        INFO(name << ": off by " << worst_difference(packed, as<double>(alone)));
        CHECK(worst_difference(packed, as<double>(alone)) <= 3e-5 * largest(alone));
    }
    for (const char* name : {"cable", "learned"}) {
        const std::vector<std::string> all = encodings();
        if (std::find(all.begin(), all.end(), name) == all.end()) { continue; }
        GPT2Config config = small_config(name, 24);
        config.position.mask.end_of_text = end_of_text;
        check_gradients(config, random);
    }
}

} // namespace tests
