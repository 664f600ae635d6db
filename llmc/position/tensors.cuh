// position/tensors.cuh -- what an encoding is told: which keys a token sees (--window, --sinks, --document_mask), and
// the model; and its tensors. Its declare(t) lists them once, and is called with either of two t: PositionTables
// collects the list before anything is allocated; PositionBinder goes through it again, and sets the pointers of an
// encoding that is bound to a layer.
#pragma once

#include <optional>
#include <utility>

#include "../base/tensor.h"

// ----------------------------------------------------------------------------------------------------------
// the keys that a query sees

// Which of the keys in its range (causal, or all up to the sequence's end) a query sees, `begin` being where its
// document begins:
//   j >= begin  and  (|i - j| < window  or  j < begin + sinks)          window = 0: all of the document
// A window of W shows a causal query its own key and the W - 1 before it, a bidirectional one W - 1 on either side;
// sinks are the first tokens (Xiao et al. 2024). A query always sees its own key. Documents are told apart in causal
// models alone, where end_of_text is given: each begins with that token. Otherwise a sequence is one document. The rule
// is only for attention: CABLE's sums run on, as only their differences count.
struct AttentionMask {
    int window = 0;
    int sinks = 0;
    int end_of_text = -1;
    const int* documents = nullptr;         // (B,T) on the device: where each token's begins; null: at 0

    __host__ __device__ bool by_document() const { return end_of_text >= 0; }
    __host__ __device__ bool exists() const { return window > 0 || by_document(); }
    // The mask for this many tokens: none if it would hide nothing. If it exists, its window is not 0.
    __host__ __device__ AttentionMask within(int tokens) const {
        AttentionMask mask = *this;
        if (window > 0 && window < tokens && sinks < tokens) { return mask; }
        mask.window = by_document() ? tokens : 0;
        mask.sinks = 0;
        return mask;
    }
    // the mask of sequence b
    __device__ AttentionMask of(size_t b, int stride) const {
        AttentionMask mask = *this;
        if (documents != nullptr) { mask.documents += b * stride; }
        return mask;
    }
    __device__ int begin(int i) const { return documents == nullptr ? 0 : documents[i]; }
    __device__ int position(int i) const { return i - begin(i); }       // in the document
    // whether query i does not see key j. For a mask that exists; begin: begin(i)
    __host__ __device__ bool hides(int i, int j, int begin) const {
        return j < begin || (j >= begin + sinks && (j <= i - window || j >= i + window));
    }
    // whether no query of i0 .. i1-1 sees a key of j0 .. j1-1; begin: begin(i0)
    __host__ __device__ bool hides_all(int i0, int i1, int j0, int j1, int begin) const {
        return j1 <= begin || (j0 >= begin + sinks && (j1 - 1 <= i0 - window || j0 >= i1 - 1 + window));
    }
    // whether a query of i0 .. i1-1 does not see a key of j0 .. j1-1 in its range; begin: begin(i1-1)
    __host__ __device__ bool hides_any(int i0, int i1, int j0, int j1, int begin) const {
        const int after_sinks = begin + sinks;
        return j0 < begin ||
               (j1 > after_sinks && (imax(j0, after_sinks) <= i1 - 1 - window || j1 - 1 >= i0 + window));
    }
};

// documents (B,stride) from tokens (B,T) at t0 .. t0+T-1: of each token, the last end_of_text up to it, or 0
void find_documents(int* documents, const int* tokens, int end_of_text, int B, int T, int t0, int stride,
                    Stream stream);

#if !defined(KERNELS_ELSEWHERE)
// One block per sequence: where the documents of the tokens t0 .. t0+T-1 begin, continuing from t0 - 1. Each thread
// searches a piece of them, and then combines it with the earlier pieces.
__global__ void documents_kernel(int* documents, const int* tokens, int T, int t0, int stride, int end_of_text) {
    int* last = (int*)dynamic_shared();                     // (threads): the last document that begins in each piece
    documents += (size_t)blockIdx.x * stride + t0;
    tokens += (size_t)blockIdx.x * T;
    const int piece = ceil_div(T, (int)blockDim.x);
    const int begin = imin((int)threadIdx.x * piece, T);
    const int end = imin(begin + piece, T);
    int document = 0;
    for (int t = begin; t < end; t++) { document = tokens[t] == end_of_text ? t0 + t : document; }
    last[threadIdx.x] = document;
    document = t0 > 0 ? documents[-1] : 0;
    __syncthreads();
    for (int before = 0; before < (int)threadIdx.x; before++) { document = imax(document, last[before]); }
    for (int t = begin; t < end; t++) {
        document = tokens[t] == end_of_text ? t0 + t : document;
        documents[t] = document;
    }
}

LAUNCHER void find_documents(int* documents, const int* tokens, int end_of_text, int B, int T, int t0, int stride,
                             Stream stream) {
    const int threads = 128;
    const Grid grid((size_t)B, threads, sizeof(int) * threads, stream);
    launch(documents_kernel, grid, documents, tokens, T, t0, stride, end_of_text);
}
#endif

// ----------------------------------------------------------------------------------------------------------
// what a model is told of positions: its encodings, and what holds for all of them

// A number, positive where --pos gives it, or one of the words of `choices`, "plain|sqrt", kept as the word's number.
// config.json has all but a number of 0, which was not given.
struct Hyperparameter {
    std::string key;
    double value = 0;
    const char* choices = nullptr;
    bool given = false;                             // --pos named it
    bool written() const { return choices != nullptr || value > 0; }

    operator std::pair<const std::string, double>() const { return {key, value}; }
    bool operator==(const Hyperparameter& other) const { return key == other.key && value == other.value; }
};
using Hyperparameters = std::vector<Hyperparameter>;

// One encoding: "t5_clip:K=64"
struct EncodingConfig {
    int kind = 0;                                   // its row in POSITIONS, position/table.h
    std::string name = "none";
    Hyperparameters values;

    bool operator==(const EncodingConfig& other) const { return name == other.name && values == other.values; }
    double value(const char* key) const {
        for (const Hyperparameter& h : values) { if (h.key == key) { return h.value; } }
        die(EXIT_BAD_INPUT, "encoding %s has no hyperparameter %s", name.c_str(), key);
    }
};

enum class RopeScaling { None, PI, NTK, YaRN, LongRoPE };
enum class TileSkip { Off, Exact, Default };        // of tiles that the bias has zeroed: attention/flash/bias.cuh

// The encodings of a model, and what a run says of all of them
struct PositionConfig {
    std::string name = "none";                      // of all encodings: "rope+cable" in one layer, "rope,none" in turns
    std::vector<EncodingConfig> parts = {{}};       // the different ones
    std::vector<std::vector<int>> pattern = {{0}};  // layer l has pattern[l % pattern.size()], last step first
    int T_train = 1024;                             // the length the model is, or was, trained at
    RopeScaling scaling = RopeScaling::None;        // config.json's rope_scaling
    double scaling_factor = 0;                      // 0: max(1, T / original_length()) at each length
    int T_original = 0;                             // the length that is stretched; 0: T_train
    std::vector<double> short_factor, long_factor;  // of LongRoPE, for each pair, up to that length and beyond it
    double other_theta = 0;                         // --rope_theta, where the evaluated checkpoint has another; else 0
    TileSkip tile_skip = TileSkip::Default;
    AttentionMask mask;                             // but for its window
    std::vector<int> windows = {0};                 // layer l has windows[l % windows.size()]; 0: no window

    bool has(const char* encoding) const {
        return std::any_of(parts.begin(), parts.end(), [&](const EncodingConfig& c) { return c.name == encoding; });
    }
    bool has_window() const { return *std::max_element(windows.begin(), windows.end()) > 0; }
    AttentionMask mask_of(int layer) const {
        AttentionMask of_layer = mask;
        of_layer.window = windows[(size_t)layer % windows.size()];
        return of_layer;
    }
    int original_length() const { return T_original > 0 ? T_original : T_train; }
    // how much longer than that rope is made for T tokens
    double stretch(int T) const {
        if (scaling == RopeScaling::None) { return 1.0; }
        return scaling_factor > 0 ? scaling_factor : std::max(1.0, (double)T / original_length());
    }
};

// ----------------------------------------------------------------------------------------------------------
// what an encoding is told, and what it declares

// The shape of a model's layers. Arrays over time are (B,NH,stride): a sequence has room for `stride` tokens. T is
// always the tokens of one call, which are fewer while a text is generated.
struct PositionShape {
    int L = 0;                                      // layers
    int NH = 0, HS = 0;                             // heads and their size
    int B = 0, stride = 0;                          // 0: only the parameters are needed
    bool causal = true;
    bool decodes = false;                           // attention_decode will run over these arrays
    int C() const { return NH * HS; }               // channels
};

// How a checkpoint names the tensors: those of layer l begin with LAYER + l + SUFFIX, those of the model with MODEL.
struct PositionNames {
    const char* layer = "transformer.h.";
    const char* suffix = ".attn.";
    const char* model = "transformer.";
    const char* wpe = "wpe.weight";
};

// Rows of qkv (B,stride,OC): q, k and v of NH heads of size HS, then the encoding's columns
struct QkvShape {
    int stride, NH, HS, OC;
    __host__ __device__ int C() const { return NH * HS; }
};

// An encoding is bound to one layer of a running model.
struct PositionView : PositionShape {
    const PositionConfig* run = nullptr;            // what holds for all encodings
    const EncodingConfig* config = nullptr;         // this one
    int layer = 0;                                  // which of the layers that have it this is
    int columns = 0;                                // of qkv: q, k, v, the encodings' and padding
    int OC = 0;                                     // from a row of qkv to the next
    AttentionMask mask;                             // the run's, with this batch's documents
    float score_factor = 1.0f;                      // of the other encodings of this layer
    // Both (B,NH,stride), null where no encoding scales the logits (ssmax.cuh). factor: of each query's logits; q is
    // multiplied already. moment: the sum over a row of B_ij dB_ij, which attention's backward leaves for dfactor.
    float *factor = nullptr, *moment = nullptr;
    const int* kv_len = nullptr;                    // (B) on the device: keys >= kv_len[b] are masked; null: all T keys
    int forgotten = 0;                              // keys of a window whose memory is gone (lab/pieces.h)
    const TensorTable *params = nullptr, *acts = nullptr;
    size_t first_param = 0, first_act = 0;          // of the encoding's own, in these tables
    float *master = nullptr, *grads = nullptr;      // laid out by params; grads is null while evaluating
    float* act_data = nullptr;                      // laid out by acts

    PositionView(const PositionShape& shape = {}) : PositionShape(shape) {}
    // room: stride; or T, of a call's dqkv
    QkvShape qkv_shape(int room) const { return {room, NH, HS, OC}; }
};

// A learned tensor of the current layer; float32 in every build
struct Parameter {
    float* value = nullptr;
    float* grad = nullptr;                          // null while evaluating
};

enum class Per { Layer, Model };                    // one tensor for each layer, or one for all of them

// How a parameter starts and what an update keeps it within
struct ParameterRule {
    InitRule init;
    bool decay = false;
    float lo = -FLT_MAX, hi = FLT_MAX;
};

// One of the encodings of a model: the layers that have it, and where its tensors begin in the two lists
struct PositionPart {
    std::vector<int> layers;
    size_t first_param = 0, first_act = 0;
    int columns = 0;                                // of the qkv matmul, in each of these layers
};

struct PositionTables : PositionShape {
    PositionNames names;
    const PositionConfig* run = nullptr;
    const EncodingConfig* config = nullptr;         // the encoding that declares its tensors: the last of `parts`
    std::vector<PositionPart> parts;
    std::vector<int> columns_of;                    // (L): of the qkv matmul, after the 3C of q, k and v
    int extra_columns = 0;                          // the most of them
    std::vector<TensorSpec> params, acts;
    std::vector<FileTensor> files;

    explicit PositionTables(const PositionShape& shape = {}) : PositionShape(shape), columns_of((size_t)shape.L) {}

    // A parameter (rows, cols), cols = 0 for a vector. `file`: its name in a checkpoint, after the layer's or model's
    void param(Parameter&, const char* name, const char* file, Per per, size_t rows, size_t cols,
               const ParameterRule& rule) {
        TensorSpec s = spec(name, per, rows, cols);
        s.init = rule.init;
        s.decay = rule.decay;
        s.lo = rule.lo;
        s.hi = rule.hi;
        params.push_back(s);
        if (per == Per::Model) { files.push_back({std::string(names.model) + file, s.name, 0, 0, rows, false}); }
        for (int n = 0; n < s.layers; n++) {
            files.push_back({layer_name(parts.back().layers[(size_t)n], file), s.name, n, 0, rows, false});
        }
    }
    // `count` more columns of the qkv matmul: x.w + c with w (count,C), c (count). In a checkpoint FILE.weight and
    // FILE.bias; weights start like the weights of q, k and v, and biases at 0, unless these rules differ
    void columns(const std::string& file, int count, std::optional<InitRule> bias_init = std::nullopt,
                 std::optional<InitRule> weight_init = std::nullopt) {
        for (int l : parts.back().layers) {
            int& columns = columns_of[(size_t)l];
            check(columns == parts.back().columns, "--pos %s: %s and another encoding both have columns of the qkv "
                  "matmul, and a layer has room for one that does", run->name.c_str(), config->name.c_str());
            const size_t row0 = (size_t)(3 * C() + columns);
            files.push_back({layer_name(l, file + ".weight"), "qkvw", l, row0, (size_t)count, false, weight_init});
            files.push_back({layer_name(l, file + ".bias"), "qkvb", l, row0, (size_t)count, false, bias_init});
            columns += count;
            extra_columns = std::max(extra_columns, columns);
        }
        parts.back().columns += count;
    }
    // An array that later tokens of a sequence read: kept while training and generating
    template <class E> void cached(E*&, const char* name, Per per, size_t rows, size_t cols) {
        array(name, per, Keep::Cached, rows, cols, sizeof(E));
    }
    // An array that no later call reads, shared by the layers
    template <class E> void scratch(E*&, const char* name, size_t rows, size_t cols) {
        array(name, Per::Model, Keep::Scratch, rows, cols, sizeof(E));
    }

private:
    std::string layer_name(int l, const std::string& rest) const {
        return names.layer + std::to_string(l) + names.suffix + rest;
    }
    // Names end in the number of the encoding, as two may be the same: kerple,kerple:...
    TensorSpec spec(const char* name, Per per, size_t rows, size_t cols) const {
        TensorSpec s;
        s.name = parts.size() > 1 ? name + ("." + std::to_string(parts.size() - 1)) : name;
        s.layers = per == Per::Layer ? (int)parts.back().layers.size() : 0;
        s.rows = rows;
        s.cols = cols;
        return s;
    }
    void array(const char* name, Per per, Keep keep, size_t rows, size_t cols, size_t element) {
        acts.push_back(spec(name, per, rows, cols));
        acts.back().keep = keep;
        acts.back().element = element;
    }
};

// Takes the tensors of the tables in the order in which they were declared, and compares their names.
struct PositionBinder : PositionShape {
    const PositionView& v;
    const PositionConfig* run;
    const EncodingConfig* config;
    PositionNames names;
    size_t next_param, next_act;

    explicit PositionBinder(const PositionView& v)
        : PositionShape(v), v(v), run(v.run), config(v.config), next_param(v.first_param), next_act(v.first_act) {}

    void param(Parameter& p, const char* name, const char*, Per, size_t, size_t, const ParameterRule&) {
        p.value = pointer<float>(name, *v.params, v.master, next_param);
        p.grad = pointer<float>(name, *v.params, v.grads, next_param++);
    }
    void columns(const char*, int, std::optional<InitRule> = std::nullopt, std::optional<InitRule> = std::nullopt) {}
    template <class E> void cached(E*& p, const char* name, Per, size_t, size_t) {
        p = pointer<E>(name, *v.acts, v.act_data, next_act++);
    }
    template <class E> void scratch(E*& p, const char* name, size_t, size_t) {
        p = pointer<E>(name, *v.acts, v.act_data, next_act++);
    }

private:
    // this layer of tensor i, which has that name; null where there is no data
    template <class E> E* pointer(const char* name, const TensorTable& table, float* data, size_t i) const {
        const std::string found = i < table.specs.size() ? table.specs[i].name : "nothing";
        check(found.substr(0, found.find('.')) == name && table.specs[i].element == sizeof(E),      // see spec()
              "--pos %s binds tensor %zu: expected %s, got %s", config->name.c_str(), i, name, found.c_str());
        return data == nullptr ? nullptr : (E*)(data + table.offsets[i]) + (size_t)v.layer * table.strides[i];
    }
};
