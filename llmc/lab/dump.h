// lab/dump.h -- the parts of attention's weights, in files: --dump_bias.
//
//   LAYER,HEAD     bias_LAYER_HEAD.json: the matrix B_ij of a text, for scripts/plot.py
//   LAYER,parts    parts_T_WINDOW_LAYER.safetensors: everything that a weight depends on, for scripts/heads.py and
//                  explorer.py; of a text, or of each window of --eval_lengths. For n tokens and each head H:
//     H.q, H.k (n,HS)    as attention reads them, after the encoding's prepare_forward; q times the scale of the scores
//     H.lse (n)          the weight of a visible key is e^(q_i.k_j + factor_i B_ij - lse_i)
//     H.factor (n)       only with ssmax; otherwise it is 1
//   and, unless B is 0, one of these forms of it:
//     H.S_offset (n), H.S_origin (3,ceil(n/128)), H.g (n)    CABLE's, as in cable.cuh; the float64 origin is the sum of
//                        three float32
//     H.by_distance (2n-1)       B_ij at i - j = 1-n .. n-1, if it depends on that only; causal: 0 where j > i
//     H.z (n,npos)               cope's, as in cope.cuh
//     H.rows (n,n)               any other B_ij; causal: 0 where j > i
//   begins (n), with a document mask: where each token's document begins. The metadata has what else B and the mask
//   depend on.
#pragma once

#include <map>

#include "../attention/any_bias.cuh"
#include "../engine/safetensors.h"
#include "../engine/model.cuh"

// Copies `count` elements from the device.
template <class T> std::vector<T> on_host(const T* device, size_t count, Stream stream) {
    std::vector<T> host(count);
    copy_to_host(host.data(), device, sizeof(T) * count, stream);
    return host;
}

// The bias (T,T) that a head of a layer adds to its scores of a text. The activations behind `view` have seen the text.
inline std::vector<float> bias_matrix(const PositionView& view, int head, int T, Stream stream) {
    const EncodingTraits traits = encoding_traits(*view.config);
    check(traits.form != FlashBias::None, "--dump_bias: %s adds no bias to the scores", view.config->name.c_str());
    check((traits.hooks & COUNTS_GATES) == 0, "--dump_bias: %s has no matrix to write: its biases depend on the scores "
          "of other keys, and are not kept", view.config->name.c_str());
    std::vector<float> matrix = bias_rows(view, head, 0, T, T, stream);
    if (view.factor == nullptr) { return matrix; }
    const std::vector<float> factor = on_host(view.factor + (size_t)head * T, (size_t)T, stream);
    for (size_t e = 0; e < matrix.size(); e++) { matrix[e] *= factor[e / (size_t)T]; }
    return matrix;
}

// ----------------------------------------------------------------------------------------------------------
// parts

// A tensor of a file, from numbers in memory
inline SafetensorsItem whole_tensor(const std::string& name, Shape shape, const std::vector<float>& data) {
    const size_t row = data.size() / (size_t)shape[0];
    const auto fill = [=](float* out, size_t row0, size_t rows) {
        std::copy_n(data.begin() + (long)(row0 * row), rows * row, out);
    };
    return {name, shape, fill};
}

// Adds to the file's items B of (batch, head) bh, over n tokens
inline void add_bias_items(std::vector<SafetensorsItem>& items, const std::string& prefix, const PositionView& view,
                           int bh, size_t n, Stream stream) {
    const EncodingTraits traits = encoding_traits(*view.config);
    const FlashBiasArgs args = bias_arrays(view);
    if (args.S_offset != nullptr) {
        const size_t at = (size_t)bh * view.stride, chunks = ceil_div(n, (size_t)CABLE_CHUNK);
        const size_t first = (size_t)bh * ceil_div((size_t)view.stride, (size_t)CABLE_CHUNK);
        std::vector<double> origin = on_host(args.S_origin + first, chunks, stream);
        std::vector<float> parts;
        for (int part = 0; part < 3; part++) {
            for (double& x : origin) {
                parts.push_back((float)x);
                x -= (double)parts.back();
            }
        }
        items.push_back(whole_tensor(prefix + "S_offset", {n}, on_host(args.S_offset + at, n, stream)));
        items.push_back(whole_tensor(prefix + "S_origin", {3, chunks}, parts));
        items.push_back(whole_tensor(prefix + "g", {n}, on_host(args.g + at, n, stream)));
    } else if (traits.hooks & COUNTS_GATES) {
        size_t z_at = view.first_act;                       // index among the tensors of all encodings
        while (view.acts->specs[z_at].name.find("cope_z") == std::string::npos) { z_at++; }
        const size_t npos = view.acts->specs[z_at].cols;
        const float* z = view.act_data + view.acts->offsets[z_at] + (size_t)bh * view.stride * npos;
        items.push_back(whole_tensor(prefix + "z", {n, npos}, on_host(z, n * npos, stream)));
    } else if (traits.form == FlashBias::Linear || traits.form == FlashBias::Toeplitz) {
        const std::vector<float> first = bias_rows(view, bh, 0, 1, (int)n, stream);
        const std::vector<float> last = bias_rows(view, bh, (int)n - 1, 1, (int)n, stream);
        std::vector<float> by_distance(first.rbegin(), first.rend());
        by_distance.insert(by_distance.end(), last.rbegin() + 1, last.rend());
        items.push_back(whole_tensor(prefix + "by_distance", {2 * n - 1}, by_distance));
    } else if (traits.form != FlashBias::None) {
        items.push_back({prefix + "rows", {n, n}, [=](float* out, size_t row0, size_t rows) {
            const std::vector<float> some = bias_rows(view, bh, (int)row0, (int)rows, (int)n, stream);
            std::copy(some.begin(), some.end(), out);
        }});
    }
}

// Writes the parts of sequence b, which has n tokens. qkv, lse: the batch's, after attention; documents may be null
inline void write_parts(const std::string& path, const PositionView& view, const floatX* qkv, const float* lse,
                        const int* documents, int layer, int b, size_t n, Stream stream) {
    const size_t HS = (size_t)view.HS, OC = (size_t)view.OC;
    const size_t first = (size_t)b * view.stride;           // row of qkv
    const float scale = view.score_factor * score_factor(view) / sqrtf((float)view.HS);
    const std::vector<floatX> all = on_host(qkv + first * OC, n * OC, stream);
    std::vector<SafetensorsItem> items;
    for (int h = 0; h < view.NH; h++) {
        const int bh = b * view.NH + h;
        const size_t at = (size_t)bh * view.stride;
        const std::string prefix = std::to_string(h) + ".";
        std::vector<float> q, k;
        for (size_t e = 0; e < n * HS; e++) {
            const floatX* of = &all[e / HS * OC + (size_t)h * HS + e % HS];
            q.push_back((float)of[0] * scale);
            k.push_back((float)of[view.C()]);
        }
        items.push_back(whole_tensor(prefix + "q", {n, HS}, q));
        items.push_back(whole_tensor(prefix + "k", {n, HS}, k));
        items.push_back(whole_tensor(prefix + "lse", {n}, on_host(lse + at, n, stream)));
        if (view.factor != nullptr) {
            items.push_back(whole_tensor(prefix + "factor", {n}, on_host(view.factor + at, n, stream)));
        }
        add_bias_items(items, prefix, view, bh, n, stream);
    }
    if (documents != nullptr) {
        const std::vector<int> begins = on_host(documents + first, n, stream);
        items.push_back(whole_tensor("begins", {n}, std::vector<float>(begins.begin(), begins.end())));
    }
    const EncodingTraits traits = encoding_traits(*view.config);
    const auto text = [](int number) { return std::to_string(number); };
    const Json about = {{"layer", text(layer)}, {"heads", text(view.NH)}, {"T", text(view.stride)},
                        {"causal", text(view.causal)}, {"window", text(view.mask.window)},
                        {"sinks", text(view.mask.sinks)}, {"inside", text(bias_arrays(view).inside)},
                        {"log", text(traits.form == FlashBias::LogDistance)}, {"relu", text(traits.has_relu)}};
    write_whole(path, [&](const std::string& to) { write_safetensors(to, items, about); });
}

// Where --dump_bias LAYER,parts writes
struct PartsTo {
    std::string directory;                                  // "": nowhere
    int layer = -1;                                         // BIAS_ALL: all layers
};

// From now on, forward passes with these activations write the parts of their sequences.
template <class Acts> void watch_parts(Acts& acts, const PartsTo& to, Stream stream) {
    if (to.directory.empty()) { return; }
    io_mkdirs(to.directory);
    const auto watch = [=, &acts, windows = std::map<int, int>()](int l, const PositionView& view, const floatX* qkv,
                                                                  const float* lse, int B) mutable {
        for (int b = 0; b < B && (to.layer < 0 || l == to.layer); b++) {
            const std::string name = strprintf("/parts_%d_%d_%d.safetensors", acts.T, windows[l]++, l);
            write_parts(to.directory + name, view, qkv, lse, acts.documents, l, b, (size_t)acts.watched_lengths[b],
                        stream);
        }
    };
    acts.watch = watch;
}

// ----------------------------------------------------------------------------------------------------------
// --dump_bias

// What stands in place of a layer (only "all") or a head in --dump_bias
enum BiasChoice { BIAS_ALL = -1, BIAS_MEAN = -2, BIAS_PARTS = -3 };
constexpr const char* BIAS_WORDS[] = {"all", "mean", "parts"};

inline std::string bias_name(int choice) { return choice < 0 ? BIAS_WORDS[-1 - choice] : std::to_string(choice); }

// "3", "all" or, for a head, "mean" or "parts" -> choice; false if it is none of them
inline bool parse_bias_choice(const std::string& text, int count, bool head, int& choice) {
    for (choice = BIAS_ALL; choice >= (head ? BIAS_PARTS : BIAS_ALL); choice--) {
        if (text == bias_name(choice)) { return true; }
    }
    return parse_value(text, between(0, count - 1), choice);
}

inline Json json_matrix(const std::vector<float>& matrix, int T) {
    Json rows = Json::array();
    for (auto row = matrix.begin(); row != matrix.end(); row += T) { rows.push_back(std::vector<float>(row, row + T)); }
    return rows;
}

// Where --dump_bias LAYER,parts writes the windows of --eval_lengths; nowhere if these flags are not given
inline PartsTo evaluated_parts(const std::string& dump, const std::vector<int>& lengths, const std::string& out,
                               int L) {
    PartsTo to;
    const size_t comma = std::min(dump.find(','), dump.size());
    const std::string head = dump.substr(comma);
    const bool parts = (head == ",parts" || head == ",parts,") && !lengths.empty();
    if (!parts) { return to; }
    check(parse_bias_choice(dump.substr(0, comma), L, false, to.layer),
          "--dump_bias: expected LAYER,parts with a layer below %d, got '%s'", L, printable(dump).c_str());
    to.directory = out;
    return to;
}

// Writes bias_LAYER_HEAD.json: j and, as "tokens", the text's tokens in print
inline void write_bias_file(Json j, const std::vector<std::string>& labels, int layer, int head,
                            const std::string& directory) {
    j["tokens"] = labels;
    const std::string path = directory + "/bias_" + bias_name(layer) + "_" + bias_name(head) + ".json";
    io_mkdirs(directory);
    write_text_whole(path, json_text(j) + "\n");
    printf("wrote %s\n", printable(path, LONGEST_MESSAGE).c_str());
}

// Returns activations that have seen the text `ids`. If `parts` has a directory, they wrote its parts there
template <class Model> auto read_text(Model& model, const std::vector<int>& ids, const PartsTo& parts) {
    const int T = (int)ids.size();
    auto acts = activations_describe(model, 1, T, Purpose::Generate, 0);
    activations_allocate(acts);
    acts.watched_lengths = &T;
    watch_parts(acts, parts, model.stream);
    std::vector<float> logits;
    forward_logits(model, acts, ids.data(), T, 0, logits);
    check_finite("logits", logits.data(), logits.size());
    acts.watch = nullptr;
    acts.watched_lengths = nullptr;
    return acts;
}

// Writes the bias over the tokens `ids`, for scripts/plot.py: a matrix, or a list of them for several layers or heads
template <class Model>
void write_bias(Model& model, const std::vector<int>& ids, const std::vector<std::string>& labels, int layer, int head,
                const std::string& directory) {
    const int T = (int)ids.size(), NH = model.config.NH;
    auto acts = read_text(model, ids, {});
    Json matrices = Json::array();
    for (int l = std::max(layer, 0); l < (layer == BIAS_ALL ? model.config.L : layer + 1); l++) {
        const PositionView view = layer_position(model, acts, l, T).bias();
        std::vector<double> mean(head == BIAS_MEAN ? (size_t)T * T : 0);
        for (int h = std::max(head, 0); h < (head < 0 ? NH : head + 1); h++) {
            const std::vector<float> matrix = bias_matrix(view, h, T, model.stream);
            for (size_t i = 0; i < mean.size(); i++) { mean[i] += matrix[i] / NH; }
            if (mean.empty()) { matrices.push_back({{"layer", l}, {"head", h}, {"bias", json_matrix(matrix, T)}}); }
        }
        if (mean.empty()) { continue; }
        matrices.push_back({{"layer", l}, {"head", "mean"}, {"bias", json_matrix({mean.begin(), mean.end()}, T)}});
    }
    acts.release();
    Json j = {{"pos", model.config.position.name}};
    if (layer == BIAS_ALL || head == BIAS_ALL) { j["matrices"] = matrices; }
    else { j.update(matrices[0]); }
    write_bias_file(j, labels, layer, head, directory);
}
