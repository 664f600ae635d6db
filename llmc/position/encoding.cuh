// position/encoding.cuh -- what a positional encoding is: the struct to derive from, its tensors, its bias functor.
//
// An encoding is one struct that derives from Encoding and overrides what it does, in the order of a step:
//   declare          its parameters, its arrays, and the columns it wants from the qkv matmul
//   embed_forward    changes the token embeddings                             embed_backward      (learned, sinusoidal)
//   prepare_forward  rotates q and k, scales q, or turns its columns of qkv   prepare_backward    (rope, ssmax, cable;
//                    into what its bias needs                                           the tables of t5 and kerple)
//   bias             a functor, added to the scaled scores inside the attention kernels; its backward receives dlogit
// and, if need be, defaults, max_length and score_factor. The functor is the template argument of the attention
// kernels, so encodings that share one (t5, t5_clip, kerple: ToeplitzBias; none, learned, sinusoidal, rope: NoBias)
// share the compiled kernels. alibi.cuh is a small example, cable.cuh the full one; docs/new_encoding.md adds one step
// by step.
#ifndef LLMC_POSITION_ENCODING_CUH
#define LLMC_POSITION_ENCODING_CUH

#include <climits>
#include <optional>
#include <utility>

#include "../base/fastmath.h"
#include "../base/tensor.h"
#include "documents.cuh"

enum class RopeScaling { None, PI, NTK, YaRN, LongRoPE };
enum class TileSkip { Off, Exact, Default };        // of tiles that the bias has zeroed: attention/flash/skip.cuh

// A number, positive where --pos gives it, or one of the words of `choices`, "plain|sqrt", kept as the word's number.
// All are written to config.json; a file without the key is of a time before it, and means `old`.
struct Hyperparameter {
    std::string key;
    double value = 0;
    std::optional<double> old = std::nullopt;       // none: the same as the default
    const char* choices = nullptr;
    bool given = false;                             // --pos named it

    operator std::pair<const std::string, double>() const { return {key, value}; }
    bool operator==(const Hyperparameter& other) const { return key == other.key && value == other.value; }
};

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

    bool operator==(const AttentionMask& other) const {
        return window == other.window && sinks == other.sinks && end_of_text == other.end_of_text;
    }
    __host__ __device__ bool by_document() const { return end_of_text >= 0; }
    __host__ __device__ bool exists() const { return window > 0 || by_document(); }
    // the mask of this many tokens: none, where it hides nothing; what is not 0 is a window, if there is a mask
    __host__ __device__ AttentionMask within(int tokens) const {
        AttentionMask mask = *this;
        if (window > 0 && window < tokens && sinks < tokens) { return mask; }
        mask.window = by_document() ? tokens : 0;
        mask.sinks = 0;
        return mask;
    }
    // that of sequence b
    __device__ AttentionMask of(size_t b, int stride) const {
        AttentionMask mask = *this;
        if (documents != nullptr) { mask.documents += b * stride; }
        return mask;
    }
    __device__ int begin(int i) const { return documents == nullptr ? 0 : documents[i]; }
    __device__ int position(int i) const { return i - begin(i); }       // in the document
    // Of a mask that exists. begin: that of i
    __host__ __device__ bool hides(int i, int j, int begin) const {
        return j < begin || (j >= begin + sinks && (j <= i - window || j >= i + window));
    }
    // whether no query of i0 .. i1-1 sees a key of j0 .. j1-1; begin: that of i0
    __host__ __device__ bool hides_all(int i0, int i1, int j0, int j1, int begin) const {
        return j1 <= begin || (j0 >= begin + sinks && (j1 - 1 <= i0 - window || j0 >= i1 - 1 + window));
    }
    // whether one of them does not see one of these in its range; begin: that of the last query
    __host__ __device__ bool hides_any(int i0, int i1, int j0, int j1, int begin) const {
        const int after_sinks = begin + sinks;
        return j0 < begin ||
               (j1 > after_sinks && (imax(j0, after_sinks) <= i1 - 1 - window || j1 - 1 >= i0 + window));
    }
};

// What --pos and --rope_scaling say. `values` are the encoding's hyperparameters: stored in config.json, printed at
// start.
struct PositionConfig {
    int kind = 0;                                   // its row in POSITIONS, position/table.h
    std::string name = "none";
    int T_train = 1024;                             // the length the model is, or was, trained at
    std::vector<Hyperparameter> values;
    RopeScaling scaling = RopeScaling::None;        // config.json's rope_scaling; not part of the encoding's identity
    double scaling_factor = 0;                      // 0: max(1, T / original_length()) at each length
    int T_original = 0;                             // the length that is stretched; 0: T_train
    std::vector<double> short_factor, long_factor;  // of LongRoPE, for each pair, up to that length and beyond it
    double other_theta = 0;                         // --rope_theta, where the evaluated checkpoint has another; else 0
    TileSkip tile_skip = TileSkip::Default;         // not part of it either
    AttentionMask mask;                             // nor this, which config.json keeps
    // Several encodings, "rope+cable" in one layer or "rope,none" in turns (position/table.h): `name` is this text, and
    // layer l has the parts pattern[l % pattern.size()], the last step first. Empty: this is one.
    std::vector<PositionConfig> parts;
    std::vector<std::vector<int>> pattern;

    // Calls f(encoding) for each of them
    template <class F> void each(F f) const {
        if (parts.empty()) { f(*this); }
        for (const PositionConfig& part : parts) { f(part); }
    }
    bool has(const char* encoding) const {
        bool found = false;
        each([&](const PositionConfig& c) { found = found || c.name == encoding; });
        return found;
    }
    // Tells the parts what holds for all of them.
    void settle_parts() {
        for (PositionConfig& part : parts) {
            part.T_train = T_train;
            part.T_original = T_original;
            part.scaling = scaling;
            part.scaling_factor = scaling_factor;
            part.short_factor = short_factor;
            part.long_factor = long_factor;
            part.tile_skip = tile_skip;
            part.mask = mask;
        }
    }
    int original_length() const { return T_original > 0 ? T_original : T_train; }
    // how much longer than that rope is made for T tokens
    double stretch(int T) const {
        if (scaling == RopeScaling::None) { return 1.0; }
        return scaling_factor > 0 ? scaling_factor : std::max(1.0, (double)T / original_length());
    }
    double value(const char* key) const {
        for (const Hyperparameter& h : values) { if (h.key == key) { return h.value; } }
        die(EXIT_BAD_INPUT, "encoding %s has no hyperparameter %s", name.c_str(), key);
    }
};

// The shapes an encoding may depend on, and how the model's checkpoint names its tensors.
struct PositionDims {
    int L = 0;                                      // layers
    int NH = 0, C = 0;                              // heads, channels
    int B = 0, T = 0;                               // capacity of the activations; 0: only the parameters are needed
    bool causal = true;
    bool decodes = false;                           // attention_decode will run over these activations
    std::string layer_prefix = "transformer.h.", layer_suffix = ".attn.";
    std::string model_prefix = "transformer.";
    std::string wpe_name = "transformer.wpe.weight";

    std::string layer_name(int l, const std::string& rest) const {
        return layer_prefix + std::to_string(l) + layer_suffix + rest;
    }
};

// An encoding is bound to one layer of a running model. Arrays over time are (B, NH, T) with the stride T given here,
// which exceeds the tokens of a call while generating.
struct PositionView {
    const PositionConfig* config = nullptr;
    int L = 0, layer = 0;                           // the layers that have it, and which of them this is
    int NH = 0, HS = 0;                             // heads and their size
    int C = 0, OC = 0;                              // NH * HS, and the width of a row of qkv
    int B = 0, T = 0;                               // capacity of the activations
    bool causal = true, decodes = false;
    AttentionMask mask;                             // of --window and --sinks
    float score_factor = 1.0f;                      // of the other encodings of this layer
    std::string suffix;                             // of its tensors' names
    const int* kv_len = nullptr;                    // (B) on the device: keys >= kv_len[b] are masked; null: all T keys
    const TensorTable *params = nullptr, *acts = nullptr;
    size_t first_param = 0;                         // of the encoding's own, in params
    float *master = nullptr, *grads = nullptr;      // laid out by params; grads is null while evaluating
    float* act_data = nullptr;                      // laid out by acts
};

// ----------------------------------------------------------------------------------------------------------
// the tensors of an encoding. Its declare(t) lists them once, and is called with either of two t: PositionTables
// collects the list before anything is allocated, PositionBinder then sets the pointers of an encoding that is bound to
// a layer.

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

struct PositionTables {
    PositionDims dims;
    const PositionConfig* config = nullptr;
    std::vector<int> columns_of;                    // (L): of the qkv matmul, after the 3C of q, k and v
    int extra_columns = 0;                          // the most of them
    std::vector<int> layers;                        // those that have the current encoding
    std::string suffix;                             // of its tensors' names
    std::vector<TensorSpec> params, acts;
    std::vector<FileTensor> files;

    // A parameter (rows, cols), cols = 0 for a vector. `file`: its name in a checkpoint; Per::Layer: after the layer's
    // prefix
    void param(Parameter&, const char* name, const std::string& file, Per per, size_t rows, size_t cols,
               const ParameterRule& rule) {
        TensorSpec s;
        s.name = name + suffix;
        s.layers = per == Per::Layer ? (int)layers.size() : 0;
        s.rows = rows;
        s.cols = cols;
        s.init = rule.init;
        s.decay = rule.decay;
        s.lo = rule.lo;
        s.hi = rule.hi;
        params.push_back(s);
        if (per == Per::Model) { files.push_back({file, s.name, 0, 0, rows, false}); }
        for (int n = 0; n < s.layers; n++) {
            files.push_back({dims.layer_name(layers[(size_t)n], file), s.name, n, 0, rows, false});
        }
    }
    // `count` more columns of the qkv matmul: x.w + c with w (count,C), c (count). In a checkpoint FILE.weight and
    // FILE.bias; weights start as those of q, k and v do, biases at 0 unless `bias_init` says otherwise
    void columns(const std::string& file, int count, std::optional<InitRule> bias_init = std::nullopt) {
        for (int l : layers) {
            int& columns = columns_of[(size_t)l];
            const size_t row0 = (size_t)(3 * dims.C + columns);
            files.push_back({dims.layer_name(l, file + ".weight"), "qkvw", l, row0, (size_t)count, false});
            files.push_back({dims.layer_name(l, file + ".bias"), "qkvb", l, row0, (size_t)count, false, bias_init});
            columns += count;
            extra_columns = std::max(extra_columns, columns);
        }
    }
    // An array that later tokens of a sequence read: kept while training and generating
    template <class E> void cached(E*&, const char* name, Per per, size_t rows, size_t cols) {
        array<E>(name, per == Per::Layer ? (int)layers.size() : 0, Keep::Cached, rows, cols);
    }
    // An array that no later call reads, shared by the layers
    template <class E> void scratch(E*&, const char* name, size_t rows, size_t cols) {
        array<E>(name, 0, Keep::Scratch, rows, cols);
    }

private:
    template <class E> void array(const char* name, int of_layers, Keep keep, size_t rows, size_t cols) {
        TensorSpec s;
        s.name = name + suffix;
        s.layers = of_layers;
        s.rows = rows;
        s.cols = cols;
        s.keep = keep;
        s.element = sizeof(E);
        acts.push_back(s);
    }
};

struct PositionBinder {
    const PositionView& v;
    PositionDims dims;
    const PositionConfig* config;
    size_t next_param, next_act = 0;

    explicit PositionBinder(const PositionView& v) : v(v), config(v.config), next_param(v.first_param) {
        dims.L = v.L;
        dims.NH = v.NH;
        dims.C = v.C;
        dims.B = v.B;
        dims.T = v.T;
        dims.causal = v.causal;
        dims.decodes = v.decodes;
    }
    void param(Parameter& p, const char* name, const std::string&, Per, size_t, size_t, const ParameterRule&) {
        p.value = pointer<float>(*v.params, v.master, next_param, name);
        p.grad = pointer<float>(*v.params, v.grads, next_param, name);
    }
    void columns(const std::string&, int, std::optional<InitRule> = std::nullopt) {}
    template <class E> void cached(E*& p, const char* name, Per, size_t, size_t) {
        p = pointer<E>(*v.acts, v.act_data, next_act, name);
    }
    template <class E> void scratch(E*& p, const char* name, size_t, size_t) {
        p = pointer<E>(*v.acts, v.act_data, next_act, name);
    }

private:
    // the current layer of the tensor with this name, from this index on; null where there is no data
    template <class E> E* pointer(const TensorTable& table, float* data, size_t& index, const char* name) const {
        while (index < table.specs.size() && table.specs[index].name != name + v.suffix) { index++; }
        check(index < table.specs.size(), "tensor %s is not where it was declared", name);
        if (data == nullptr) { return nullptr; }
        return (E*)(data + table.offsets[index]) + (size_t)v.layer * table.strides[index];
    }
};

// ----------------------------------------------------------------------------------------------------------
// the bias functor: B_ij in device code. Rows and tiles belong to one (batch, head) pair bh = b * NH + h.

// The forms of B that the tensor-core kernels (attention/flash) know
//   None         0
//   Linear       -slopes[h] |i-j|                                   alibi, alibi_random
//   Distance     -g_i |S_i - S_j|, S non-decreasing                 cable
//   LogDistance  -g_i log(1 + (S_i - S_j)^2), or `inside`: -log(1 + (g_i (S_i - S_j))^2)         kcable
//   Toeplitz     table[h][table_zero + j - i]                       t5, kerple, sandwich, alibi_trained
//   Fire         f_h(table[table_zero - |i-j|] inv[max(i,j)]), f_h piecewise linear             fire
//   Unknown      any other (cope): attention runs on the portable kernels, in every build
enum class FlashBias { None, Linear, Distance, LogDistance, Toeplitz, Fire, Unknown };
// The biases that decay without end, so that whole tiles have weights of 0 (flash/skip.cuh, attention/skip.cuh). The
// rest have heavy tails.
__host__ __device__ constexpr bool flash_skips(FlashBias Kind) {
    return Kind == FlashBias::Linear || Kind == FlashBias::Distance;
}
// of --tile_skip default, in units of log2: T keys that are so far below the largest are less than 2^-24 of a row's sum
__host__ __device__ inline float flash_skip_tau(int T) { return 24.0f + log2f((float)T); }

// A piece of Fire's f: value + slope y up to y = end, where the slope grows by bend
struct alignas(16) FirePiece {
    float value, slope, end, bend;
};

// What those kernels read of a bias, and where they leave its gradients; each form uses its own part.
struct FlashBiasArgs {
    const float* slopes;                    // (NH), Linear
    const float *S_offset, *g;              // (B*NH,stride), Distance and LogDistance; S as in cable.cuh
    const double* S_origin;                 // (B*NH,ceil(stride/128))
    bool inside;                            // LogDistance: g is inside the logarithm
    const float* table;                     // (NH,table_entries), Toeplitz
    int table_zero, table_entries;          // the column of i = j; columns outside the table read its nearest end
    const FirePiece* pieces;                // (NH,33), Fire; its table is one row, ascending towards both ends
    const float* inv;                       // (T+128), descending
    const float *dpsi, *dnorm;              // as the table, (2,T+128): derivatives, position/fire.cuh
    float *dS, *dg;                         // (B*NH,stride), overwritten, before the suffix sum
    float* dtable;                          // (B*NH,table_entries), overwritten
    double* sums;                           // Fire: (B*NH,FIRE_SLOTS,33,4); the first slots are overwritten
};

// To derive a functor from; being an aggregate, its initializer then begins with {} for this base. It has a member
// tile(bh, i0, j0), which returns the bias inside one tile of the score matrix: an object whose (r, c) is B_ij for i =
// i0 + r, j = j0 + c. Neither the rows nor the columns of a tile cross a multiple of 128. It is vectorized over r
// (forward) or c (backward): no branches, no libm.
struct BiasFunctor {
    static constexpr FlashBias flash = FlashBias::Unknown;  // or the form it has; fill() then says with which arrays
    static constexpr bool counts_gates = false;             // B depends on the scores of other keys: only cope.cuh
    void fill(FlashBiasArgs&) const {}
    // dlogit (ni, nj), row stride ld: the gradient of the loss in the logits of queries i0.. and keys j0.., zero where
    // masked. In shared memory; called by all threads of the one block that owns bh, once per tile, in a fixed order.
    // May overwrite dlogit. The default is right where nothing is learned.
    __device__ void backward(int, int, int, int, int, float*, int) const {}
};

// B = 0
struct NoBias : BiasFunctor {
    static constexpr FlashBias flash = FlashBias::None;
    struct Tile { __device__ float operator()(int, int) const { return 0.0f; } };
    __device__ Tile tile(int, int, int) const { return {}; }
};

// ----------------------------------------------------------------------------------------------------------
// the encoding: what does nothing unless it is overridden

struct Encoding {
    PositionView v;
    float* key_max = nullptr;                               // see key_max.cuh

    explicit Encoding(const PositionView& view) : v(view) {}

    static void defaults(PositionConfig&) {}                                // sets `values`; they may depend on T_train
    template <class Tensors> void declare(Tensors&) {}
    static int max_length(const PositionConfig&) { return INT_MAX; }        // longest sequence it can encode

    // x (B,T,C): embeddings of the tokens at t0 .. t0+T-1. t0 > 0 only while generating, with B = 1
    void embed_forward(floatX*, int /*B*/, int /*T*/, Start, Stream) const {}
    void embed_backward(floatX* /*dx*/, int /*B*/, int /*T*/, Stream) const {}
    // qkv (B,v.T,OC): rows t0 .. t0+T-1 of every sequence are new
    void prepare_forward(floatX* /*qkv*/, int /*B*/, int /*T*/, Start, Stream) const {}
    // dqkv holds the gradients of q, k, v; the bias functor's sums are complete. Overwrites dqkv's extra columns.
    void prepare_backward(floatX* /*dqkv*/, const floatX* /*qkv*/, int /*B*/, int /*T*/, Stream) const {}
    // before the attention's backward: zeroes what the bias functor sums into
    void zero_bias_gradient(int /*B*/, int /*T*/, Stream) const {}
    void begin_backward(const floatX* /*qkv*/, int /*B*/, int /*T*/, Stream) const {}       // around the portable
    void end_backward(floatX* /*dqkv*/, const floatX* /*qkv*/, int, int, Stream) const {}   // attention's, on its q, k
    void begin_decode(const floatX* /*qkv*/, int /*B*/, Start, int /*splits*/, float /*scale*/, Stream) const {}
    NoBias bias() const { return {}; }
    float score_factor(int /*T*/) const { return 1.0f; }                    // multiplies 1/sqrt(HS)
    static constexpr bool scales_queries = false;           // prepare_forward multiplies q by numbers and does no more
    static constexpr bool causal_only = false;              // it has no meaning for a key after the query
};

// The encoding, its pointers set
template <class Type> Type bind_encoding(const PositionView& view) {
    Type encoding(view);
    PositionBinder binder(view);
    encoding.declare(binder);
    return encoding;
}

#endif
