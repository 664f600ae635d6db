// position/encoding.cuh -- what a positional encoding is: the struct to derive from, what it is told, its bias functor.
//
// An encoding derives from Encoding and overrides what it does. In the order of a step:
//   declare          its parameters, its arrays, and the columns it wants from the qkv matmul
//   embed_forward    changes the token embeddings                             embed_backward      (learned, sinusoidal)
//   prepare_forward  rotates q and k, scales q, or turns its columns of qkv   prepare_backward    (rope, ssmax, cable;
//                    into what its bias needs                                           the tables of t5 and kerple)
//   bias             a functor, added to the scaled scores inside the attention kernels; its backward receives dlogit
// and, if need be, defaults, hooks and score_factor. The functor is the template argument of a GPU's attention
// kernels, so encodings with the same functor (t5, t5_clip, kerple: ToeplitzBias; none, learned, sinusoidal, rope:
// NoBias) share the compiled kernels. toeplitz.cuh has small examples, cable.cuh a full one; docs/new_encoding.md adds
// three.
//
// declare(t) is the only list of an encoding's tensors. t is PositionTables, which collects the list before anything is
// allocated, or PositionBinder, which sets the encoding's pointers when it is bound to a layer.
#pragma once

#include <climits>
#include <optional>
#include <utility>

#include "../base/math.h"
#include "../base/tensor.h"

// ----------------------------------------------------------------------------------------------------------
// the keys that a query sees (--window, --sinks, --document_mask)

// Of the keys in its range (causal: up to its own; else up to the sequence's end) query i sees the keys j with
//   j >= begin  and  (|i - j| < window  or  j < begin + sinks)          window = 0: all of the document
// `begin` is where its document begins. A query always sees its own key; a window of W adds the W - 1 keys before it
// and, if bidirectional, the W - 1 keys after it. Sinks are a document's first tokens (Xiao et al. 2024). If
// end_of_text is given, in causal models only, each document begins with that token; else a sequence is one document.
// The rule is only for attention: CABLE's sums run on, because only their differences count.
struct AttentionMask {
    int window = 0;
    int sinks = 0;
    int end_of_text = -1;
    const int* documents = nullptr;         // (B,T) on the device: where each token's document begins; null: at 0

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
    // whether query i does not see key j. The mask must exist; begin: begin(i)
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

// documents (B,stride) for the tokens (B,T) at t0 .. t0+T-1: the last end_of_text up to each of them, or 0
void find_documents(int* documents, const int* tokens, int end_of_text, int B, int T, int t0, int stride,
                    Stream stream);

#if !defined(KERNELS_ELSEWHERE)
// One block per sequence, continuing from token t0 - 1. Each thread searches a piece of the tokens, then takes the
// earlier pieces into account.
__global__ void documents_kernel(int* documents, const int* tokens, int T, int t0, int stride, int end_of_text) {
    int* last = (int*)dynamic_shared();                     // (threads): where the last document of each piece begins
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
// what an encoding is told: its hyperparameters, what a run sets for all encodings, the model's shape

// A positive number, or one of the words of `choices`, "plain|sqrt", kept as the word's index. A number of 0 was not
// given; config.json leaves it out.
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
    int kind = 0;                                   // its row in POSITIONS (table.h)
    std::string name = "none";
    Hyperparameters values;

    bool operator==(const EncodingConfig& other) const { return name == other.name && values == other.values; }
    double value(const char* key) const {
        for (const Hyperparameter& h : values) { if (h.key == key) { return h.value; } }
        die(EXIT_BAD_INPUT, "encoding %s has no hyperparameter %s", name.c_str(), key);
    }
};

enum class RopeScaling { None, PI, NTK, YaRN, LongRoPE };
enum class TileSkip { Off, Exact, Default };        // which tiles zeroed by a bias are skipped: flash/bias.cuh

// The encodings of a model, and what a run sets for all of them
struct PositionConfig {
    std::string name = "none";                      // "rope+cable": both in each layer; "rope,none": layers in turn
    std::vector<EncodingConfig> parts = {{}};       // the different ones
    std::vector<std::vector<int>> pattern = {{0}};  // layer l has parts pattern[l % pattern.size()], last step first
    int T_train = 1024;                             // the length the model is, or was, trained at
    RopeScaling scaling = RopeScaling::None;        // config.json's rope_scaling
    double scaling_factor = 0;                      // 0: max(1, T / original_length()) at each length
    int T_original = 0;                             // the length that scaling stretches; 0: T_train
    std::vector<double> short_factor, long_factor;  // LongRoPE: for each pair, up to T_original and beyond
    double other_theta = 0;                         // --rope_theta if the evaluated checkpoint has another; else 0
    TileSkip tile_skip = TileSkip::Default;
    AttentionMask mask;                             // without its window
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
    // how many times original_length() rope is stretched to for T tokens
    double stretch(int T) const {
        if (scaling == RopeScaling::None) { return 1.0; }
        return scaling_factor > 0 ? scaling_factor : std::max(1.0, (double)T / original_length());
    }
};

// The shape of a model's layers. Arrays over time are (B,NH,stride), with room for `stride` tokens of each sequence; T
// is the number of tokens in one call, smaller than stride while a text is generated.
struct PositionShape {
    int L = 0;                                      // layers
    int NH = 0, HS = 0;                             // heads and their size
    int B = 0, stride = 0;                          // 0: only the parameters are needed
    bool causal = true;
    bool decodes = false;                           // attention_decode will read these arrays
    int C() const { return NH * HS; }               // channels
};

// How a checkpoint names tensors: `layer` l `suffix` NAME in layer l, `model` NAME if the model has one
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

// The layer of a running model that an encoding is bound to
struct PositionView : PositionShape {
    const PositionConfig* run = nullptr;            // for all encodings
    const EncodingConfig* config = nullptr;         // this encoding's
    int layer = 0;                                  // counted among the layers that have this encoding
    int columns = 0;                                // of qkv: q, k, v, the encoding's and padding
    int OC = 0;                                     // from a row of qkv to the next
    AttentionMask mask;                             // the run's, with this batch's documents
    float score_factor = 1.0f;                      // from the other encodings of this layer
    // Both (B,NH,stride), null unless ssmax scales the logits (ssmax.cuh). factor multiplies each query's logits: q is
    // multiplied already, attention multiplies the bias. moment: sum_j B_ij dB_ij, left by attention's backward for
    // dfactor.
    float *factor = nullptr, *moment = nullptr;
    const int* kv_len = nullptr;                    // (B) on the device: keys >= kv_len[b] are masked; null: all T keys
    int forgotten = 0;                              // keys of a window whose memory is gone (lab/evaluate.h)
    const TensorTable *params = nullptr, *acts = nullptr;
    size_t first_param = 0, first_act = 0;          // where the encoding's tensors begin in these tables
    float *master = nullptr, *grads = nullptr;      // laid out by params; grads is null while evaluating
    float* act_data = nullptr;                      // laid out by acts

    PositionView(const PositionShape& shape = {}) : PositionShape(shape) {}
    // room: stride of qkv, T of dqkv
    QkvShape qkv_shape(int room) const { return {room, NH, HS, OC}; }
};

// A learned tensor of the current layer; float32 in every build
struct Parameter {
    float* value = nullptr;
    float* grad = nullptr;                          // null while evaluating
};

enum class Per { Layer, Model };                    // one tensor for each layer, or one for all of them

// How a parameter starts, whether it decays, and the bounds that an update keeps
struct ParameterRule {
    InitRule init;
    bool decay = false;
    float lo = -FLT_MAX, hi = FLT_MAX;
};

// An encoding of a model: the layers that have it, and where its tensors begin in the lists below
struct PositionPart {
    std::vector<int> layers;
    size_t first_param = 0, first_act = 0;
    int columns = 0;                                // how many it adds to the qkv matmul, in each of these layers
};

// The tensors that encodings declare, before anything is allocated
struct PositionTables : PositionShape {
    PositionNames names;
    const PositionConfig* run = nullptr;
    const EncodingConfig* config = nullptr;         // the encoding that declares its tensors: the last of `parts`
    std::vector<PositionPart> parts;
    std::vector<int> columns_of;                    // (L): columns of the qkv matmul after the 3C of q, k and v
    int extra_columns = 0;                          // the largest of columns_of
    std::vector<TensorSpec> params, acts;
    std::vector<FileTensor> files;

    explicit PositionTables(const PositionShape& shape = {}) : PositionShape(shape), columns_of((size_t)shape.L) {}

    // A parameter (rows, cols), cols = 0 for a vector. file: the NAME of PositionNames
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
    // `count` more columns of the qkv matmul: x.w + c with w (count,C), c (count), in a checkpoint FILE.weight and
    // FILE.bias. Without the rules w starts like the weights of q, k and v, and c at 0.
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
    // An array that the backward or later tokens of a sequence read: kept while training and generating
    template <class E> void cached(E*&, const char* name, Per per, size_t rows, size_t cols) {
        array(name, per, Keep::Cached, rows, cols, sizeof(E));
    }
    // An array that only the current layer's pass reads: all layers share it
    template <class E> void scratch(E*&, const char* name, size_t rows, size_t cols) {
        array(name, Per::Model, Keep::Scratch, rows, cols, sizeof(E));
    }

private:
    std::string layer_name(int l, const std::string& rest) const {
        return names.layer + std::to_string(l) + names.suffix + rest;
    }
    // A name ends in the number of its encoding, because two may be of one type: kerple,kerple:...
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

// Binds declare(t)'s pointers: takes the tensors in the order in which they were declared, and compares their names.
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
    // this layer of tensor i, whose name must be `name`; null without data
    template <class E> E* pointer(const char* name, const TensorTable& table, float* data, size_t i) const {
        const std::string found = i < table.specs.size() ? table.specs[i].name : "nothing";
        check(found.substr(0, found.find('.')) == name && table.specs[i].element == sizeof(E),      // see spec()
              "--pos %s binds tensor %zu: expected %s, got %s", config->name.c_str(), i, name, found.c_str());
        return data == nullptr ? nullptr : (E*)(data + table.offsets[i]) + (size_t)v.layer * table.strides[i];
    }
};

// ----------------------------------------------------------------------------------------------------------
// the bias functor: B_ij in device code; bh = b * NH + h is a head of a sequence

// The forms of B that the tensor-core kernels (attention/flash) compute
//   None         0
//   Linear       -slopes[h] |i-j|                                   alibi, alibi_random
//   Distance     -g_i |S_i - S_j|, S non-decreasing                 cable, grape_q
//   LogDistance  -g_i log(1 + (S_i - S_j)^2), or `inside`: -log(1 + (g_i (S_i - S_j))^2)         kcable
//   Toeplitz     table[h][table_zero + j - i]                       t5, kerple, bam, sandwich, alibi_trained
//   Fire         f_h(table[table_zero - |i-j|] inv[max(i,j)]), f_h piecewise linear             fire
//   Unknown      any other: attention runs on the portable kernels           cope, cable_signed, grape_k, grape_qk
enum class FlashBias { None, Linear, Distance, LogDistance, Toeplitz, Fire, Unknown };
// The forms that fall without limit, so that whole tiles have weights of 0 (flash/bias.cuh, choose.cuh)
__host__ __device__ constexpr bool flash_skips(FlashBias Kind) {
    return Kind == FlashBias::Linear || Kind == FlashBias::Distance;
}
// The forms that the tensor-core kernels multiply by ssmax's factors, as part of CABLE's g. Other forms would need more
// sums in the backward, or a product for each pair.
__host__ __device__ constexpr bool flash_takes_factor(FlashBias Kind, bool inside) {
    return Kind == FlashBias::None || Kind == FlashBias::Distance || (Kind == FlashBias::LogDistance && !inside);
}
// --tile_skip default, in units of log2: T keys so far below the largest logit are less than 2^-24 of a row's sum
__host__ __device__ inline float flash_skip_tau(int T) { return 24.0f + portable_log2f((float)T); }
// The share of tiles that is computed. rows: tiles of queries, `tiles` of them in each head; live(x): how many tiles of
// keys row x meets, of all or of the causal tiles
template <class Live> double tile_share(int rows, int tiles, bool causal, Live live) {
    double computed = 0.0, all = 0.0;
    for (int x = 0; x < rows; x++) {
        all += causal ? x % tiles + 1 : tiles;
        computed += live(x);
    }
    return all > 0.0 ? computed / all : 1.0;
}

// A piece of Fire's f: value + slope y up to y = end, where the slope grows by bend
struct alignas(16) FirePiece {
    float value, slope, end, bend;
};

constexpr int CABLE_CHUNK = 128;                        // tokens whose S counts from one origin (cable.cuh)

// What the tensor-core kernels read of a bias, and where they leave its gradients. Each form has its own fields.
struct FlashBiasArgs {
    const float* slopes;                    // (NH), Linear
    const float *S_offset, *g;              // (B*NH,stride), Distance and LogDistance; S as in cable.cuh
    const double* S_origin;                 // (B*NH,ceil(stride/128))
    bool inside;                            // LogDistance with g inside the logarithm
    const float* table;                     // (NH,table_entries), Toeplitz
    int table_zero, table_entries;          // the column of i = j; how many columns. Outside, the nearest end is read
    const FirePiece* pieces;                // (NH,33), Fire, whose table is one row, ascending towards both ends
    const float* inv;                       // (T+128), descending
    const float *dpsi, *dnorm;              // like the table, (2,T+128): derivatives, fire.cuh
    float *dS, *dg;                         // (B*NH,stride), overwritten, before the suffix sum
    float* dtable;                          // (B*NH,table_entries), overwritten
    double* sums;                           // Fire: (B*NH,FIRE_SLOTS,33,4); the first slots are overwritten
    const float* factor;                    // (B*NH,stride), which multiplies B; null: 1. Distance, LogDistance
    float* moment;                          // (B*NH,stride), as in PositionView; overwritten
};

// A tile of pairs: the queries i0 .. i0+ni-1 and the keys j0 .. j0+nj-1 of a sequence
struct PairRange { int i0, ni, j0, nj; };

// The base of a functor; a functor is an aggregate, so its initializer begins with {} for this base. Its member
// tile(bh, i0, j0) returns the bias inside one tile of the scores: an object t with t(r, c) = B_ij for i = i0 + r,
// j = j0 + c. Neither the rows nor the columns of a tile cross a multiple of 128. t is vectorized over r (forward) or c
// (backward), so it has no branches and calls no libm.
struct BiasFunctor {
    static constexpr FlashBias flash = FlashBias::Unknown;  // another form: fill() then gives its arrays
    static constexpr bool counts_gates = false;             // B depends on other keys' scores (only cope.cuh)
    void fill(FlashBiasArgs&) const {}
    // dlogit (ni, nj), rows ld apart, in shared memory: the gradient of the loss in the logits of queries i0.. and keys
    // j0.., 0 where masked; may be overwritten. All threads of the block that owns bh call this, once per tile, in a
    // fixed order. The default is right if nothing is learned.
    __device__ void backward(int, int, int, int, int, float*, int) const {}
};

// B = 0
struct NoBias : BiasFunctor {
    static constexpr FlashBias flash = FlashBias::None;
    struct Tile { __device__ float operator()(int, int) const { return 0.0f; } };
    __device__ Tile tile(int, int, int) const { return {}; }
};

// ----------------------------------------------------------------------------------------------------------
// the encoding: its members do nothing unless they are overridden

// What an encoding changes. Encodings of one layer must change different things.
enum PositionHook { CHANGES_EMBEDDINGS = 1, TURNS_QK = 2, ADDS_BIAS = 4, SCALES_Q = 8, COUNTS_GATES = 16 };

struct Encoding {
    static constexpr int hooks = 0;                         // without the two that follow from its bias
    static constexpr bool has_relu = false;                 // its S (cable.cuh) stands still while a ReLU is closed
    PositionView v;
    float* key_max = nullptr;                               // see declare_key_max

    explicit Encoding(const PositionView& view) : v(view) {}

    static Hyperparameters defaults(int /*T_train*/) { return {}; }
    template <class Tensors> void declare(Tensors&) {}

    // x (B,T,C): embeddings of the tokens at t0 .. t0+T-1. t0 > 0 only while generating, with B = 1
    void embed_forward(floatX*, int /*B*/, int /*T*/, int /*t0*/, Stream) const {}
    void embed_backward(floatX* /*dx*/, int /*B*/, int /*T*/, Stream) const {}
    // qkv (B,v.stride,OC): rows t0 .. t0+T-1 of every sequence are new
    void prepare_forward(floatX* /*qkv*/, int /*B*/, int /*T*/, int /*t0*/, Stream) const {}
    // before the attention's backward, with its qkv: zeroes what the bias functor sums into
    void begin_backward(const floatX* /*qkv*/, int /*B*/, int /*T*/, Stream) const {}
    // before the token at t0 reads its keys in splits (attention/decode.cuh); scale: multiplies q.k
    void begin_decode(const floatX* /*qkv*/, int /*B*/, int /*t0*/, int /*splits*/, float /*scale*/, Stream) const {}
    // dqkv holds the gradients of q, k, v; the bias functor's sums are complete. Overwrites dqkv's extra columns.
    void prepare_backward(floatX* /*dqkv*/, const floatX* /*qkv*/, int /*B*/, int /*T*/, Stream) const {}
    NoBias bias() const { return {}; }
    float score_factor(int /*T*/) const { return 1.0f; }                    // multiplies 1/sqrt(HS)
};

// The encoding with its pointers set
template <class Type> Type bind_encoding(const PositionView& view) {
    Type encoding(view);
    PositionBinder binder(view);
    encoding.declare(binder);
    return encoding;
}

// No positional encoding (NoPE: Haviv et al. 2022, Kazemnejad et al. 2023). A causal mask still tells a model something
// about positions.
struct NoPosition : Encoding {
    using Encoding::Encoding;
};

// ----------------------------------------------------------------------------------------------------------
// key_max: the largest norm of a key in each split of a text
//
// Decoding reads the keys in splits and skips a split whose logits cannot matter (attention/decode.cuh). If a bias
// never grows with the distance (alibi, cable), the largest norm in a split and the bias of its last key bound its
// logits.

constexpr int DECODE_SPLIT = 256;       // keys

// key_max (B*NH,ceil(stride/DECODE_SPLIT)): the largest |k_j|^2 of each split, over the keys up to t0 + T - 1. The last
// T keys are new. One block per (batch, head) and split with new keys.
static __global__ void key_max_kernel(float* key_max, const floatX* qkv, QkvShape shape, int T, int t0, int BNH) {
    const auto [stride, NH, HS, OC] = shape;
    const int bh = blockIdx.x % BNH;
    const int split = t0 / DECODE_SPLIT + blockIdx.x / BNH;
    const int j0 = split * DECODE_SPLIT;
    const int begin = imax(j0, t0);
    const int end = imin(j0 + DECODE_SPLIT, t0 + T);
    const floatX* k = qkv + (size_t)(bh / NH) * stride * OC + (NH + bh % NH) * HS;
    key_max += (size_t)bh * ceil_div(stride, DECODE_SPLIT) + split;
    float largest = begin > j0 ? *key_max : 0.0f;
    for (int j = begin + (int)threadIdx.x; j < end; j += blockDim.x) {
        const floatX* k_j = k + (size_t)j * OC;
        float sum = dot(k_j, k_j, HS);
        if (!(sum < INFINITY)) { sum = INFINITY; }          // a NaN too: such a split is never skipped
        largest = sum <= largest ? largest : sum;
    }
    largest = block_max(largest);
    if (threadIdx.x == 0) { *key_max = largest; }
}

// Declares e.key_max if it will be read.
template <class Tensors> void declare_key_max(Encoding& e, Tensors& t) {
    if (!t.decodes || t.run->tile_skip == TileSkip::Off) { return; }
    const size_t splits = ceil_div((size_t)t.stride, (size_t)DECODE_SPLIT);
    t.cached(e.key_max, "key_max", Per::Layer, (size_t)t.B * t.NH, splits);
}

// for prepare_forward
inline void update_key_max(const Encoding& e, const floatX* qkv, int B, int T, int t0, Stream stream) {
    if (e.key_max == nullptr) { return; }
    const PositionView& v = e.v;
    const int BNH = B * v.NH;
    const int splits = (t0 + T - 1) / DECODE_SPLIT - t0 / DECODE_SPLIT + 1;
    const Grid grid((size_t)BNH * splits, T > 32 ? 128 : 32, 0, stream);
    launch(key_max_kernel, grid, e.key_max, qkv, v.qkv_shape(v.stride), T, t0, BNH);
}

// ----------------------------------------------------------------------------------------------------------
// how rope and ssmax walk over the heads of q and k: a block has HEAD_TOKENS tokens of a sequence; up to HEAD_LANES
// neighbouring threads share a head and take its packs of P channels in turn

constexpr int HEAD_TOKENS = 8;
constexpr int HEAD_LANES = 8;

struct HeadWalk {
    size_t b;               // the block's sequence
    int t, tokens;          // its tokens: t .. t + tokens - 1 of the call
    int lanes, lane;        // the number of threads that share a head; this thread's number among them
    int first, step;        // its heads: for (int r = first; r < tokens * (heads of a token); r += step)

    // T: tokens of a sequence; packs: of a head
    __device__ HeadWalk(int T, int packs) {
        const int parts = ceil_div(T, HEAD_TOKENS);
        b = blockIdx.x / parts;
        t = (int)(blockIdx.x % parts) * HEAD_TOKENS;
        tokens = imin(HEAD_TOKENS, T - t);
        lanes = imin(packs, imin((int)blockDim.x, HEAD_LANES));
        lane = threadIdx.x % lanes;
        step = blockDim.x / lanes;
        const int group = threadIdx.x / lanes;
        first = group < step ? group : INT_MAX;             // surplus threads have no head
    }
};

// Calls f(i, h, sum) for each token i and head h of the block. sum: over the head's threads, in their order, of parts
// (tokens,NH,lanes), in shared memory
template <class F> __device__ inline void sum_lanes(const float* parts, const HeadWalk& walk, int NH, F f) {
    __syncthreads();
    for (int k = threadIdx.x; k < walk.tokens * NH; k += blockDim.x) {
        const int i = k % walk.tokens;                      // neighbouring threads store neighbouring tokens
        const int h = k / walk.tokens;
        const float* part = parts + (i * NH + h) * walk.lanes;
        float sum = part[0];
        for (int lane = 1; lane < walk.lanes; lane++) { sum += part[lane]; }
        f(i, h, sum);
    }
}

// the grid of a kernel with a HeadWalk. floats: its dynamic shared memory
inline Grid head_grid(int B, int T, size_t floats, Stream stream, const char* file = __builtin_FILE(),
                      int line = __builtin_LINE()) {
    return Grid((size_t)B * ceil_div(T, HEAD_TOKENS), 256, sizeof(float) * floats, stream, file, line);
}
