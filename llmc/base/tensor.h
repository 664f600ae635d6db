// base/tensor.h -- one table for every tensor.
//
// A TensorSpec has a tensor's name, size, initial values and weight decay. A TensorTable lays a list of specs out in
// one allocation, each tensor aligned to 256 bytes, parameters layer by layer. Allocation, initial values, AdamW,
// gradient norms, checkpoints, --check and the tests' comparisons are loops over specs, by name. A FileTensor maps a
// tensor of a checkpoint file to rows of one of these tensors.
#pragma once

#include <cfloat>
#include <optional>

#include "math.h"

enum class Init { Normal, Uniform, Constant, Ramp };
struct InitRule {               // Normal: mean a, std b.  Uniform: [a, b).  Constant: a.  Ramp: a + b i
    Init kind;
    float a, b;
};
inline InitRule normal(float std) { return {Init::Normal, 0.0f, std}; }
inline InitRule uniform(float lo, float hi) { return {Init::Uniform, lo, hi}; }
inline InitRule constant(float value) { return {Init::Constant, value, 0.0f}; }
inline InitRule ramp(float first, float step) { return {Init::Ramp, first, step}; }

// How long an activation is kept. Scratch: all layers share it. Saved: each layer has its own while training. Cached:
// also while generating, because later tokens of a sequence read it. Backward: shared, and exists only while training.
enum class Keep { Scratch, Saved, Cached, Backward };

struct TensorSpec {
    std::string name;                       // "qkvw"
    int layers = 0;                         // L: one for each layer, side by side; 0: one for the model
    size_t rows = 0, cols = 0;              // row-major; cols = 0: a vector of `rows` elements
    InitRule init = {Init::Constant, 0, 0};
    bool decay = false;                     // weight decay: for matrices and embeddings
    float lo = -FLT_MAX, hi = FLT_MAX;      // every update keeps the elements within [lo, hi]
    Keep keep = Keep::Scratch;              // activations only
    size_t element = sizeof(float);         // bytes per element; parameters are float32

    size_t row_size() const { return cols == 0 ? 1 : cols; }
    size_t layer_size() const { return rows * row_size(); }
    size_t size() const { return layer_size() * (size_t)imax(layers, 1); }
    size_t floats() const { return ceil_div(size() * element, sizeof(float)); }     // its space, in float32 elements
};

// A tensor of a checkpoint file: rows row0 .. row0 + rows - 1 of a layer of a spec's tensor, perhaps transposed. Its
// shape in the file is (rows, cols), (cols, rows) if transposed, or (rows) for a vector.
struct FileTensor {
    std::string name;                       // "transformer.h.0.attn.c_attn.weight"
    std::string tensor;                     // "qkvw"
    int layer = 0;
    size_t row0 = 0, rows = 0;
    bool transposed = false;
    std::optional<InitRule> init = {};      // how it starts, if not as the whole tensor does
};

// Where a tensor lies: p(l) is layer l. stride 0: all layers share one place.
template <class T> struct LayerPointer {
    T* base = nullptr;
    size_t stride = 0;
    T* operator()(int layer = 0) const { return base + (size_t)layer * stride; }
    bool saved() const { return stride > 0; }           // each layer has its own place
};

// elements begin .. end - 1
struct Slice {
    size_t begin, end;
    size_t size() const { return end - begin; }
};
// Ranks and the gradient's norm cut a layout at multiples of this many elements, whatever the number of ranks.
constexpr size_t SLICE_UNIT = 16384;

// Elements of a tensor that lie side by side: first .. first + size - 1, counted through all layers, at `at`.
struct TensorPiece { size_t tensor, first, at, size; };

struct TensorTable {
    std::vector<TensorSpec> specs;
    std::vector<size_t> offsets;            // where each tensor's layer 0 begins, in float32 elements
    std::vector<size_t> strides;            // from a layer to the next; 0: the model has one
    std::vector<Slice> blocks;              // of lay_out_by_layer(); none otherwise
    size_t total = 0;                       // float32 elements, alignment gaps included

    void add(const TensorSpec& spec) {
        specs.push_back(spec);
        offsets.push_back(total);
        strides.push_back(spec.layers > 0 ? spec.layer_size() : 0);
        total += round_up(spec.floats(), (size_t)64);
    }
    // where a layer of tensor i begins
    size_t offset(size_t i, int layer = 0) const { return offsets[i] + (size_t)layer * strides[i]; }

    // Lays a model's parameters out in blocks, because a step finishes their gradients block by block. Block 0 has the
    // tensors from `encoding` on, block 1 the tensors that the model has once, block 2 + l the tensors of layer l. Each
    // block is padded to whole SLICE_UNITs.
    void lay_out_by_layer(size_t encoding) {
        const auto close = [&](size_t begin) {
            total = begin + round_up(total - begin, SLICE_UNIT);
            blocks.push_back({begin, total});
        };
        const auto place = [&](size_t i, size_t floats) {
            offsets[i] = total;
            total += round_up(floats, (size_t)64);
        };
        blocks.clear();
        total = 0;
        int layers = 0;
        for (size_t i = encoding; i < specs.size(); i++) { place(i, specs[i].floats()); }
        close(0);
        const size_t whole = total;
        for (size_t i = 0; i < encoding; i++) {
            layers = imax(layers, specs[i].layers);
            if (specs[i].layers == 0) { place(i, specs[i].floats()); }
        }
        close(whole);
        for (int l = 0; l < layers; l++) {
            const size_t begin = total;
            for (size_t i = 0; i < encoding; i++) {
                if (specs[i].layers > 0) { place(i, specs[i].layer_size()); }
            }
            close(begin);
        }
        for (size_t i = 0; i < encoding; i++) {
            if (specs[i].layers == 0) { continue; }
            strides[i] = blocks.back().size();              // all layers are alike; offsets[i] is in the last layer
            offsets[i] -= (size_t)(layers - 1) * strides[i];
        }
    }
    // the pieces of tensors in a slice of the layout, tensor by tensor
    std::vector<TensorPiece> pieces(Slice slice) const {
        std::vector<TensorPiece> all;
        for (size_t i = 0; i < specs.size(); i++) {
            const size_t n = specs[i].layer_size();
            bool open = false;                              // whether the last piece is this tensor's
            for (int l = 0; l < imax(specs[i].layers, 1); l++) {
                const size_t at = offset(i, l);
                const size_t begin = std::max(at, slice.begin), end = std::min(at + n, slice.end);
                if (begin >= end) { continue; }
                if (open && all.back().at + all.back().size == begin) {
                    all.back().size += end - begin;
                } else {
                    all.push_back({i, (size_t)l * n + begin - at, begin, end - begin});
                }
                open = true;
            }
        }
        return all;
    }
    // the tensor's index, or -1
    int find(const std::string& name) const {
        for (size_t i = 0; i < specs.size(); i++) { if (specs[i].name == name) { return (int)i; } }
        return -1;
    }
    int index(const std::string& name) const {
        const int i = find(name);
        if (i < 0) { die(EXIT_BAD_INPUT, "there is no tensor named %s", name.c_str()); }
        return i;
    }
    // where the tensor lies in `data`, an allocation of this layout; null if `data` is
    template <class T> LayerPointer<T> pointer(T* data, const std::string& name) const {
        const size_t i = (size_t)index(name);
        return {data == nullptr ? nullptr : data + offsets[i], strides[i]};
    }
    // the same for a tensor of other elements
    template <class T> LayerPointer<T> pointer_as(float* data, const std::string& name) const {
        const LayerPointer<float> p = pointer(data, name);
        const size_t element = specs[(size_t)index(name)].element;
        check(element == sizeof(T), "%s: expected elements of %zu bytes, got %zu", name.c_str(), sizeof(T), element);
        return {(T*)p.base, p.stride};
    }
    // the number of elements, without gaps
    size_t elements() const {
        size_t n = 0;
        for (const TensorSpec& s : specs) { n += s.size(); }
        return n;
    }
};

// Initial values of `part`, a part of the layout with whole layers of each tensor: data (part), on the host. An element
// is a function of the seed, its tensor's name in the file and its index there, so tensors that two models share start
// equal. Elements without a FileTensor (padding) stay 0.
inline void init_tensors(float* data, Slice part, const TensorTable& table, const std::vector<FileTensor>& files,
                         uint64_t seed) {
    for (const FileTensor& f : files) {
        const size_t tensor = (size_t)table.index(f.tensor);
        const TensorSpec& spec = table.specs[tensor];
        const size_t at = table.offset(tensor, f.layer) + f.row0 * spec.row_size();
        if (at < part.begin || at >= part.end) { continue; }
        float* out = data + (at - part.begin);
        const uint64_t stream = checksum(f.name);
        const InitRule rule = f.init.value_or(spec.init);
        const size_t n = f.rows * spec.row_size();
        OMP(parallel for)
        for (size_t i = 0; i < n; i++) {
            const float a = rule.a, b = rule.b;
            if (rule.kind == Init::Normal) { out[i] = (float)(a + b * normal01(seed, stream, i)); }
            if (rule.kind == Init::Uniform) { out[i] = (float)(a + (b - a) * uniform01(seed, stream, i)); }
            if (rule.kind == Init::Constant) { out[i] = a; }
            if (rule.kind == Init::Ramp) { out[i] = a + b * (float)i; }
        }
    }
}
