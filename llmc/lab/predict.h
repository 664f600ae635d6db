// lab/predict.h -- a masked language model's predictions for the [MASK]s of a text (--predict).
//
// Template over the trainer's model: calls activations_* and forward_losses as evaluate.h does.
#pragma once

#include <numeric>

#include "../engine/model.cuh"
#include "../engine/text/documents.h"

// The `most` likeliest ids, the likeliest first, and of equal ones the smaller first.  x (V)
inline std::vector<int> likeliest(const std::vector<float>& x, size_t most) {
    std::vector<int> order(x.size());
    std::iota(order.begin(), order.end(), 0);
    const auto likelier = [&](int a, int b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
    most = std::min(most, order.size());
    std::partial_sort(order.begin(), order.begin() + (long)most, order.end(), likelier);
    order.resize(most);
    return order;
}

// A token as it can be printed: a byte that is only part of a character as \xe2, an id without a token as <30600>
inline std::string shown_token(const Tokenizer& tokenizer, int id) {
    if (id >= tokenizer.vocab_size()) { return strprintf("<%d>", id); }
    const std::string token = tokenizer.decode(id, true);
    const bool part = token.size() == 1 && (unsigned char)token[0] >= 128;
    return part ? strprintf("\\x%02x", (unsigned char)token[0]) : printable(token);
}

// A vector of V logits for each [MASK] among the ids of one sequence
template <class Model, class Acts>
std::vector<std::vector<float>> masked_logits(Model& model, Acts& acts, const std::vector<int>& ids) {
    const int V = model.config.V, Vp = model.config.Vp();
    const int mask = model.config.special.mask, most = acts.chunk_of(false);
    const size_t M = (size_t)std::count(ids.begin(), ids.end(), mask);
    check(M <= (size_t)most, "--predict: expected at most %d [MASK]s at once, got %zu", most, M);
    std::vector<int> targets;
    for (int id : ids) { targets.push_back(id == mask ? 0 : IGNORE_INDEX); }
    std::vector<float> losses(ids.size()), rows(M * (size_t)Vp);
    forward_losses(model, acts, ids.data(), targets.data(), nullptr, 1, (int)ids.size(), losses.data(), nullptr);
    copy_to_host(rows.data(), acts.a.logits(), sizeof(float) * rows.size(), model.stream);
    std::vector<std::vector<float>> logits;
    for (auto row = rows.begin(); row != rows.end(); row += Vp) {
        logits.emplace_back(row, row + V);
        check_finite("logits", logits.back().data(), logits.back().size());
    }
    return logits;
}

// Prints the five likeliest tokens for each [MASK] of a text, with their probabilities: softmax over the V logits.
template <class Model> void predict(Model& model, const std::string& text, const Tokenizer& tokenizer) {
    const std::vector<int> ids = text_ids(text, model.config.special, tokenizer);
    auto acts = activations_describe(model, 1, (int)ids.size(), Purpose::Evaluate, 0);
    activations_allocate(acts);
    const std::vector<std::vector<float>> logits = masked_logits(model, acts, ids);
    acts.release();
    printf("%s\n", text.c_str());
    for (size_t k = 0; k < logits.size(); k++) {
        const std::vector<float>& x = logits[k];
        const std::vector<int> order = likeliest(x, 5);
        const double largest = x[order[0]];
        double sum = 0;
        for (float v : x) { sum += std::exp(v - largest); }
        printf("  [MASK] %zu:", k + 1);
        for (int id : order) {
            printf("  %s %.1f%%", shown_token(tokenizer, id).c_str(), 100 * std::exp(x[id] - largest) / sum);
        }
        printf("\n");
    }
    fflush(stdout);
}
