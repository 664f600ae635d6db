// use/inspect.h -- what an encoding adds to the scores of a text, as a matrix (--dump_bias).
#ifndef LLMC_USE_INSPECT_H
#define LLMC_USE_INSPECT_H

#include "../attention/choose.cuh"
#include "../base/json.h"
#include "../files/checkpoint.h"
#include "../model.cuh"

// out (T,T): B_ij for j <= i, 0 elsewhere.  One block a row.
template <class Bias> __global__ void bias_matrix_kernel(float* out, Bias bias, int bh, int T) {
    const int i = blockIdx.x;
    for (int j0 = 0; j0 < T; j0 += ATTENTION_TILE) {
        const auto tile = bias.tile(bh, i, j0);
        for (int c = threadIdx.x; c < ATTENTION_TILE && j0 + c < T; c += blockDim.x) {
            out[(size_t)i * T + j0 + c] = j0 + c <= i ? tile(0, c) : 0.0f;
        }
    }
}

// The bias that one head of one layer adds to its scores over a text: (T,T), from activations that have seen the text.
inline std::vector<float> bias_matrix(const PositionView& view, int head, int T, Stream stream) {
    std::vector<float> host((size_t)T * T);
    with_position(view, [&](auto position) {
        const auto bias = position.bias();
        check(bias.flash != FlashBias::None, "--dump_bias: %s adds no bias to the scores", view.config->name.c_str());
        float* out = (float*)device_malloc(sizeof(float) * T * T);
        launch(bias_matrix_kernel<std::decay_t<decltype(bias)>>, Grid((size_t)T, 128, 0, stream), out, bias, head, T);
        copy_to_host(host.data(), out, sizeof(float) * T * T, stream);
        device_free(out);
    });
    return host;
}

// Writes DIRECTORY/bias_LAYER_HEAD.json for scripts/plot.py: the bias over the tokens `ids`, which are shown as
// `labels`.
template <class Model>
void write_bias(Model& model, const std::vector<int>& ids, const std::vector<std::string>& labels, int layer, int head,
                const std::string& directory) {
    const int T = (int)ids.size();
    auto acts = activations_describe(model, 1, T, Purpose::Generate, 0);
    activations_allocate(acts);
    std::vector<float> logits;
    forward_logits(model, acts, ids.data(), T, 0, logits);
    const std::vector<float> bias = bias_matrix(position_view(model, acts, layer, 1, T), head, T, model.stream);
    acts.release();
    Json j = {{"pos", model.config.position.name}, {"layer", layer}, {"head", head}, {"tokens", labels},
              {"bias", Json::array()}};
    for (auto row = bias.begin(); row != bias.end(); row += T) {
        j["bias"].push_back(std::vector<float>(row, row + T));
    }
    const std::string path = directory + strprintf("/bias_%d_%d.json", layer, head);
    io_mkdirs(directory);
    write_text(path, json_text(j) + "\n");
    printf("wrote %s\n", path.c_str());
}

#endif
