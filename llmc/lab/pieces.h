// lab/pieces.h -- the losses of a window of any length, in memory that hardly grows with it.
//
// A causal forward may take a window in pieces. Each continues from the keys and values of those before it, with the
// same bits as one forward. If the biases of all layers zero distant keys (attention/choose_cpu.cuh), keys that no
// query will visit are forgotten. Which ones a later query visits is not known in advance: KEPT_REACHES times the
// longest way back to a visited key so far are kept. If a query visits the very first of those, it may need an earlier
// one; then the window is computed once more, and more keys are kept.
#pragma once

#include "../attention/choose.cuh"
#include "../engine/model.cuh"

constexpr int KEPT_REACHES = 2, LEAST_KEPT = 8192;
constexpr int KEPT_UNIT = 256;              // keys; whole chunks of cable's sums and whole tiles

// Whether windows of T tokens go through a model in pieces. On a GPU only whole ones take the tensor-core kernels.
template <class Model> bool in_pieces(const Model& model, int T) {
    return model.config.causal && !ON_GPU && T > PIECE;
}
// Whether every layer's attention skips tiles, so that keys can be forgotten
template <class Model, class Acts> bool forgets(const Model& model, const Acts& acts) {
    for (int l = 0; l < model.config.L; l++) {
        const PositionView v = layer_position(model, acts, l, acts.T).bias();
        if (!skips_tiles(acts.T, v)) { return false; }
    }
    return true;
}

// The longest way back from a query t0 .. t0 + n - 1 to the first key that its tile visits; INT_MAX if that may be lost
template <class Model, class Acts> int longest_reach(const Model& model, const Acts& acts, int t0, int n) {
    const int NH = model.config.NH, tiles = ceil_div(acts.T, ATTENTION_TILE);
    const int from = t0 / ATTENTION_TILE, to = ceil_div(t0 + n, ATTENTION_TILE);
    std::vector<int> first((size_t)(to - from));                // attention/choose_cpu.cuh leaves it in attscratch
    int reach = 0;
    for (int row = 0; row < model.config.L * NH; row++) {
        const int* found = (const int*)acts.a.attscratch(row / NH) + (size_t)(row % NH) * tiles + from;
        copy_to_host(first.data(), found, sizeof(int) * first.size(), model.stream);
        for (int m = from; m < to; m++) {
            const int key = first[(size_t)(m - from)];
            if (acts.forgotten > 0 && key <= acts.forgotten) { return INT_MAX; }
            reach = imax(reach, (m + 1) * ATTENTION_TILE - key);
        }
    }
    return reach;
}

// Calls f(table, data, i) for the tensors with a row or a column for each key: qkv, lse, and the encoding's over time
template <class Acts, class F> void each_over_keys(Acts& acts, F f) {
    for (const char* name : {"qkv", "lse"}) { f(acts.table, acts.data, (size_t)acts.table.find(name)); }
    for (size_t i = 0; i < acts.position_table.specs.size(); i++) {
        const TensorSpec& s = acts.position_table.specs[i];
        if (s.keep == Keep::Cached && s.cols == (size_t)acts.T) { f(acts.position_table, acts.position_data, i); }
    }
}
// The bytes of one key in all of them
template <class Acts> size_t key_bytes(Acts& acts) {
    size_t bytes = 0;
    each_over_keys(acts, [&](const TensorTable& table, float*, size_t i) {
        bytes += table.specs[i].size() * table.specs[i].element;
    });
    return bytes / (size_t)acts.T;
}
// Gives back the memory of the keys before `end`.
template <class Acts> void forget(Acts& acts, int end) {
    each_over_keys(acts, [&](const TensorTable& table, float* data, size_t i) {
        const TensorSpec& s = table.specs[i];
        const size_t rows = s.rows == (size_t)acts.T ? 1 : s.rows;      // each has all keys
        const size_t key = s.layer_size() / rows / (size_t)acts.T * s.element;
        for (size_t r = 0; r < rows * (size_t)imax(s.layers, 1); r++) {
            char* layer = (char*)(data + table.offsets[i]) + r / rows * table.strides[i] * s.element;
            device_forget(layer + r % rows * key * (size_t)acts.T, (size_t)acts.forgotten * key, (size_t)end * key);
        }
    });
    acts.forgotten = end;
}

// Called before acts is allocated: what it will not need at the same time
template <class Model, class Acts> void plan_pieces(const Model& model, Acts& acts) {
    if (!acts.reserved() || !forgets(model, acts)) { return; }
    acts.lost = key_bytes(acts) * (size_t)imax(0, acts.T - LEAST_KEPT - acts.piece);
}
// Dies if `keep` keys of a window do not fit into memory.
template <class Acts> void check_kept(Acts& acts, int keep) {
    const size_t wanted = key_bytes(acts) * (size_t)imin(keep, acts.T), left = device_memory_available();
    if (wanted <= left) { return; }
    die(EXIT_OUT_OF_MEMORY, "%d tokens: their queries look back so far that %d keys must be kept, which "
        "need %s, but %s are available", acts.T, keep, format_bytes((double)wanted).c_str(),
        format_bytes((double)left).c_str());
}

// As forward_losses() for one window of T tokens, in pieces if acts is of pieces. said(t, reach) is called when t
// tokens are done; reach: how many tokens their queries have looked back at most, 0 if no tile is skipped.
template <class Model, class Acts, class Said>
void window_losses(Model& model, Acts& acts, const int* tokens, const int* targets, const int* lengths, int B, int T,
                   float* losses, float* hits, Said said) {
    if (acts.purpose != Purpose::Pieces) {
        return forward_losses(model, acts, tokens, targets, lengths, B, T, losses, hits);
    }
    const bool loses = forgets(model, acts);
    int keep = LEAST_KEPT, t0 = 0;
    int farthest = 0;
    while (t0 < T) {
        const int left = T - t0, n = imin(left, acts.piece) - (left == acts.piece + 1 ? KEPT_UNIT : 0);
        forward_losses(model, acts, tokens + t0, targets + t0, nullptr, 1, n, losses + t0, hits + t0, t0);
        t0 += n;
        const int reach = loses ? longest_reach(model, acts, t0 - n, n) : 0;
        farthest = reach == INT_MAX ? farthest : imax(farthest, reach);
        said(t0, farthest);
        if (!loses) { continue; }
        if (reach == INT_MAX) {                                 // once more, from the beginning
            keep *= 2;
            check_kept(acts, keep);
            acts.forgotten = t0 = 0;
            continue;
        }
        if (KEPT_REACHES * reach > keep) { check_kept(acts, keep = KEPT_REACHES * reach); }
        const int end = (t0 - keep) / KEPT_UNIT * KEPT_UNIT;
        if (end > acts.forgotten) { forget(acts, end); }
    }
    forget(acts, T);
    acts.forgotten = 0;
}
