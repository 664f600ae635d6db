// lab/inspect.h -- the matrix that an encoding adds to the scores of a text, and what a text's attention is made of
// (--dump_bias).
#pragma once

#include "../attention/choose.cuh"
#include "../engine/json.h"
#include "../engine/files/checkpoint.h"
#include "generate.h"

// out (T,T): B_ij for j <= i, times the query's factor if there are factors, 0 elsewhere.  One block a row.
template <class Bias>
__global__ void bias_matrix_kernel(float* out, Bias bias, const float* factor, int bh, int T) {
    const int i = blockIdx.x;
    const float factor_i = factor == nullptr ? 1.0f : factor[(size_t)bh * T + i];
    for (int j0 = 0; j0 < T; j0 += ATTENTION_TILE) {
        const auto tile = bias.tile(bh, i, j0);
        for (int c = threadIdx.x; c < ATTENTION_TILE && j0 + c < T; c += blockDim.x) {
            out[(size_t)i * T + j0 + c] = j0 + c <= i ? factor_i * tile(0, c) : 0.0f;
        }
    }
}

// The bias that one head of one layer adds to its scores over a text: (T,T), from activations that have seen the text.
inline std::vector<float> bias_matrix(const PositionView& view, int head, int T, Stream stream) {
    std::vector<float> host((size_t)T * T);
    with_position(view, [&](auto position) {
        const auto bias = position.bias();
        check(bias.flash != FlashBias::None, "--dump_bias: %s adds no bias to the scores", view.config->name.c_str());
        check(!bias.counts_gates, "--dump_bias: %s has no matrix to write: its biases depend on the scores of other "
              "keys, and are not kept", view.config->name.c_str());
        if constexpr (!decltype(position.bias())::counts_gates) {
            using Bias = std::decay_t<decltype(bias)>;
            float* out = (float*)device_malloc(sizeof(float) * T * T);
            launch(bias_matrix_kernel<Bias>, Grid((size_t)T, 128, 0, stream), out, bias, view.factor, head, T);
            copy_to_host(host.data(), out, sizeof(float) * T * T, stream);
            device_free(out);
        }
    });
    return host;
}

// Which matrices --dump_bias writes.
enum BiasChoice { BIAS_ALL = -1, BIAS_MEAN = -2, BIAS_PARTS = -3 };     // of layers or heads; the last two of heads
constexpr const char* BIAS_WORDS[] = {"all", "mean", "parts"};

inline std::string bias_name(int choice) { return choice < 0 ? BIAS_WORDS[-1 - choice] : std::to_string(choice); }

// "3", "all" or, for heads, "mean" or "parts"
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

// The mean over all heads of one layer: (T,T)
inline std::vector<float> mean_bias_matrix(const PositionView& view, int NH, int T, Stream stream) {
    std::vector<double> sum((size_t)T * T, 0.0);
    for (int head = 0; head < NH; head++) {
        const std::vector<float> one = bias_matrix(view, head, T, stream);
        for (size_t i = 0; i < sum.size(); i++) { sum[i] += one[i] / NH; }
    }
    return {sum.begin(), sum.end()};
}

// What the weights of one head are made of, over a text of T tokens: softmax of q_i.k_j + B_ij over the visible keys.
//   q, k (T,HS)   as attention reads them, after the encoding's prepare_forward; q times the scale of the scores
//   window        of this layer, 0: none
// and B, unless it is 0:
//   S_offset (T), S_origin (ceil(T/128)), g (T), log, inside       cable and kcable, as in cable.cuh, g times a factor
//   by_distance (T)                                                B_ij at the distances i - j = 0 .. T-1
//   rows (T,T)                                                     any other, or with ssmax, as bias_matrix has it
inline Json bias_parts(const PositionView& view, const floatX* qkv, int head, int T, Stream stream) {
    Json j = Json::object();
    const auto numbers = [&](auto* device, size_t count) {
        std::vector<std::decay_t<decltype(*device)>> host(count);
        copy_to_host(host.data(), device, sizeof(*device) * count, stream);
        return host;
    };
    with_position(view, [&](auto position) {
        const auto bias = position.bias();
        using Bias = std::decay_t<decltype(bias)>;
        const size_t HS = (size_t)view.HS, row = (size_t)view.OC;
        const float scale = attention_dims(position, T, 0).scale;
        const auto all = numbers(qkv, (size_t)T * row);
        std::vector<float> q, k;
        for (size_t t = 0; t < (size_t)T; t++) {
            const floatX* of = &all[t * row + (size_t)head * HS];
            for (size_t c = 0; c < HS; c++) {
                q.push_back((float)of[c] * scale);
                k.push_back((float)of[(size_t)view.C() + c]);
            }
        }
        j = {{"q", q}, {"k", k}, {"window", view.mask.window}};
        FlashBiasArgs args = {};
        bias.fill(args);
        if (args.S_offset != nullptr && (view.factor == nullptr || !args.inside)) {
            const size_t at = (size_t)head * T, chunks = ceil_div((size_t)T, (size_t)CABLE_CHUNK);
            j["S_offset"] = numbers(args.S_offset + at, (size_t)T);
            j["S_origin"] = numbers(args.S_origin + (size_t)head * chunks, chunks);
            std::vector<float> g = numbers(args.g + at, (size_t)T);
            if (view.factor != nullptr) {
                const std::vector<float> factor = numbers(view.factor + at, (size_t)T);
                for (size_t t = 0; t < g.size(); t++) { g[t] *= factor[t]; }
            }
            j["g"] = g;
            j["log"] = Bias::flash == FlashBias::LogDistance;
            j["inside"] = args.inside;
        } else if (Bias::flash != FlashBias::None) {
            const std::vector<float> matrix = bias_matrix(view, head, T, stream);
            const bool line = Bias::flash == FlashBias::Linear || Bias::flash == FlashBias::Toeplitz;
            if (line && view.factor == nullptr) {
                j["by_distance"] = std::vector<float>(matrix.rbegin(), matrix.rbegin() + T);    // of the last query
            } else {
                j["rows"] = json_matrix(matrix, T);
            }
        }
    });
    return j;
}

// Writes DIRECTORY/bias_LAYER_HEAD.json for scripts/plot.py: the bias over the tokens `ids`, which are shown as
// `labels`: one matrix, or a list of them if there are several layers or heads. HEAD "parts", for scripts/explorer.py:
// bias_parts of each head instead, which every encoding but cope has.
template <class Model>
void write_bias(Model& model, const std::vector<int>& ids, const std::vector<std::string>& labels, int layer, int head,
                const std::string& directory) {
    const int T = (int)ids.size(), NH = model.config.NH;
    auto acts = activations_describe(model, 1, T, Purpose::Generate, 0);
    activations_allocate(acts);
    std::vector<float> logits;
    forward_logits(model, acts, ids.data(), T, 0, logits);
    check_finite("logits", logits.data(), logits.size());
    Json matrices = Json::array();
    for (int l = std::max(layer, 0); l < (layer == BIAS_ALL ? model.config.L : layer + 1); l++) {
        const PositionView view = layer_position(model, acts, l, T).bias();
        if (head == BIAS_MEAN) {
            const std::vector<float> mean = mean_bias_matrix(view, NH, T, model.stream);
            matrices.push_back({{"layer", l}, {"head", "mean"}, {"bias", json_matrix(mean, T)}});
            continue;
        }
        for (int h = std::max(head, 0); h < (head < 0 ? NH : head + 1); h++) {
            Json one = {{"layer", l}, {"head", h}};
            if (head == BIAS_PARTS) { one.update(bias_parts(view, acts.a.qkv(l), h, T, model.stream)); }
            else { one["bias"] = json_matrix(bias_matrix(view, h, T, model.stream), T); }
            matrices.push_back(one);
        }
    }
    Json j = {{"pos", model.config.position.name}, {"tokens", labels}};
    if (head == BIAS_PARTS) {                               // which keys are visible: position/documents.cuh
        const AttentionMask& mask = model.config.position.mask;
        std::vector<int> begins(mask.by_document() ? (size_t)T : 0);
        copy_to_host(begins.data(), acts.documents, sizeof(int) * begins.size(), model.stream);
        j.update({{"sinks", mask.sinks}, {"begins", begins}});
    }
    acts.release();
    if (layer == BIAS_ALL || head == BIAS_ALL || head == BIAS_PARTS) {
        j["matrices"] = matrices;
    } else {
        for (const char* key : {"layer", "head", "bias"}) { j[key] = matrices[0][key]; }
    }
    const std::string path = directory + "/bias_" + bias_name(layer) + "_" + bias_name(head) + ".json";
    io_mkdirs(directory);
    write_text_whole(path, json_text(j) + "\n");
    printf("wrote %s\n", printable(path, LONGEST_MESSAGE).c_str());
}
