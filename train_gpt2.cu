// train_gpt2.cu -- trains, evaluates and samples a GPT-2 with any positional encoding of llmc/positions.h.
//
// Read it from the top: the tensors, the forward as ten numbered calls a block, the head, the backward as the same numbers
// in reverse, the update, and main. Every layer's mathematics is in its own header in llmc/.
#include "llmc/adamw.cuh"
#include "llmc/attention.cuh"
#include "llmc/attention_decode.cuh"
#include "llmc/classifier.cuh"
#include "llmc/embedding.cuh"
#include "llmc/evaluate.h"
#include "llmc/gelu.cuh"
#include "llmc/generate.h"
#include "llmc/gpu.h"
#include "llmc/hellaswag.h"
#include "llmc/layernorm.cuh"
#include "llmc/matmul.cuh"
#include "llmc/run.h"

// ----------------------------------------------------------------------------------------------------------
// the tensors

struct GPT2Config {
    int T = 1024;               // trained sequence length
    int V = 50257, L = 12, NH = 12, C = 768;
    PositionConfig position;
    int Vp() const { return round_up(V, 128); }     // padded vocabulary: rows of wte
};

// OC, the rows of qkvw: q | k | v (C each) | the encoding's columns (cable: w_c, w_s) | padding to a multiple of 8
#define GPT2_PARAMS(X) \
    /* name      layers rows    cols   initial values                        decay */ \
    X(wte,       0,     Vp,     C,     normal(0.02f),                        true)  \
    X(ln1w,      L,     C,      0,     constant(1.0f),                       false) \
    X(ln1b,      L,     C,      0,     constant(0.0f),                       false) \
    X(qkvw,      L,     OC,     C,     normal(0.02f),                        true)  \
    X(qkvb,      L,     OC,     0,     constant(0.0f),                       false) \
    X(attprojw,  L,     C,      C,     normal(0.02f / sqrtf(2.0f * L)),      true)  \
    X(attprojb,  L,     C,      0,     constant(0.0f),                       false) \
    X(ln2w,      L,     C,      0,     constant(1.0f),                       false) \
    X(ln2b,      L,     C,      0,     constant(0.0f),                       false) \
    X(fcw,       L,     4 * C,  C,     normal(0.02f),                        true)  \
    X(fcb,       L,     4 * C,  0,     constant(0.0f),                       false) \
    X(fcprojw,   L,     C,      4 * C, normal(0.02f / sqrtf(2.0f * L)),      true)  \
    X(fcprojb,   L,     C,      0,     constant(0.0f),                       false) \
    X(lnfw,      0,     C,      0,     constant(1.0f),                       false) \
    X(lnfb,      0,     C,      0,     constant(0.0f),                       false)

// The same tensors in a checkpoint: Hugging Face's names; GPT-2's linear weights are stored (in, out)
#define GPT2_FILES(F) \
    /* name                   tensor    row0 rows   transposed */ \
    F("ln_1.weight",          ln1w,     0,   C,     false) \
    F("ln_1.bias",            ln1b,     0,   C,     false) \
    F("attn.c_attn.weight",   qkvw,     0,   3 * C, true)  \
    F("attn.c_attn.bias",     qkvb,     0,   3 * C, false) \
    F("attn.c_proj.weight",   attprojw, 0,   C,     true)  \
    F("attn.c_proj.bias",     attprojb, 0,   C,     false) \
    F("ln_2.weight",          ln2w,     0,   C,     false) \
    F("ln_2.bias",            ln2b,     0,   C,     false) \
    F("mlp.c_fc.weight",      fcw,      0,   4 * C, true)  \
    F("mlp.c_fc.bias",        fcb,      0,   4 * C, false) \
    F("mlp.c_proj.weight",    fcprojw,  0,   C,     true)  \
    F("mlp.c_proj.bias",      fcprojb,  0,   C,     false)

// What a forward leaves behind. N = B * T rows; Scratch is one buffer for all layers, Saved and Cached one a layer.
#define GPT2_ACTS(X) \
    /* type   name       keep                          rows      cols */ \
    X(floatX, encoded,   Keep::Scratch,                N,        C)      \
    X(floatX, ln1,       recompute < 2 ? Keep::Saved : Keep::Scratch, N, C) \
    X(float,  ln1mean,   Keep::Saved,                  N,        0)      \
    X(float,  ln1rstd,   Keep::Saved,                  N,        0)      \
    X(floatX, qkv,       Keep::Cached,                 N,        OC)     \
    X(float,  lse,       Keep::Saved,                  B * NH,   T)      \
    X(float,  attscratch, Keep::Scratch,               attention_floats, 0) \
    X(floatX, atty,      Keep::Saved,                  N,        C)      \
    X(floatX, residual2, Keep::Saved,                  N,        C)      \
    X(floatX, ln2,       recompute < 2 ? Keep::Saved : Keep::Scratch, N, C) \
    X(float,  ln2mean,   Keep::Saved,                  N,        0)      \
    X(float,  ln2rstd,   Keep::Saved,                  N,        0)      \
    X(floatX, fch,       Keep::Saved,                  N,        4 * C)  \
    X(floatX, fchgelu,   recompute < 1 ? Keep::Saved : Keep::Scratch, N, 4 * C) \
    X(floatX, residual3, Keep::Saved,                  N,        C)      \
    X(floatX, lnf,       Keep::Scratch,                N,        C)      \
    X(float,  lnfmean,   Keep::Scratch,                N,        0)      \
    X(float,  lnfrstd,   Keep::Scratch,                N,        0)      \
    X(floatX, logits,    Keep::Scratch,                R,        Vp)     \
    X(float,  losses,    Keep::Scratch,                N,        0)

// Gradients of activations, one buffer each; only while training.
#define GPT2_GRAD_ACTS(X) \
    X(floatX, dresidual, Keep::Scratch,                N,        C)      \
    X(floatX, dln,       Keep::Scratch,                N,        C)      \
    X(floatX, dfch,      Keep::Scratch,                N,        4 * C)  \
    X(floatX, dqkv,      Keep::Scratch,                N,        OC)     \
    X(float,  scratch,   Keep::Scratch,                scratch_floats, 0)

template <class T> struct GPT2Params {
#define X(name, ...) LayerPointer<T> name;
    GPT2_PARAMS(X)
#undef X
};

struct GPT2Acts {
#define X(type, name, ...) LayerPointer<type> name;
    GPT2_ACTS(X)
    GPT2_GRAD_ACTS(X)
#undef X
};

// The activations of one shape, and the tokens they belong to.
struct Activations {
    int B = 0, T = 0, chunk = 0;                        // capacity; rows of logits held at once
    TensorTable table, position_table;
    float *data = nullptr, *position_data = nullptr;
    GPT2Acts a;
    DeviceBatch batch;
    size_t bytes() const { return sizeof(float) * (table.total + position_table.total) + sizeof(int) * ((size_t)4 * B * T + 1); }
};

struct GPT2 {
    GPT2Config config;
    int OC = 0;                                         // width of a qkv row
    TensorTable table;                                  // of the parameters
    std::vector<FileTensor> files;
    float* master = nullptr;                            // float32 weights
    floatX* weights = nullptr;                          // what the layers read: master itself, or its rounded copy in bf16 builds
    GPT2Params<floatX> params;
    float *m = nullptr, *v = nullptr;                   // AdamW's moments
    double *norm_partial = nullptr, *loss_sums = nullptr;   // loss_sums: of the micro-batches of a step
    std::vector<float*> tree;                           // gradient buffers: tree[k] sums 2^k micro-batches, the last is being filled
    Stream stream = {};
};

PositionDims gpt2_position_dims(const GPT2Config& c, int B, int T) {
    PositionDims d;
    d.L = c.L; d.NH = c.NH; d.C = c.C; d.B = B; d.T = T;
    return d;
}

// Fills in the tables of tensors of a model of this configuration; allocates nothing.
void gpt2_describe(GPT2& model, const GPT2Config& config) {
    model.config = config;
    const int V = config.V, Vp = config.Vp(), L = config.L, C = config.C;
    const PositionTables position = position_tables(config.position, gpt2_position_dims(config, 0, 0));
    const int OC = round_up(3 * C + position.extra_columns, 8);
    model.OC = OC;
    model.table = TensorTable();
#define X(name, layers, rows, cols, init, decay) model.table.add({#name, layers, (size_t)(rows), (size_t)(cols), init, decay});
    GPT2_PARAMS(X)
#undef X
    for (const TensorSpec& s : position.params) { model.table.add(s); }
    model.files.clear();
    model.files.push_back({"transformer.wte.weight", "wte", 0, 0, (size_t)V, false});
    for (int l = 0; l < L; l++) {
#define F(name, tensor, row0, rows, transposed) \
        model.files.push_back({"transformer.h." + std::to_string(l) + "." + name, #tensor, l, row0, (size_t)(rows), transposed});
        GPT2_FILES(F)
#undef F
    }
    model.files.push_back({"transformer.ln_f.weight", "lnfw", 0, 0, (size_t)C, false});
    model.files.push_back({"transformer.ln_f.bias", "lnfb", 0, 0, (size_t)C, false});
    model.files.insert(model.files.end(), position.files.begin(), position.files.end());
}

template <class T> void gpt2_point(GPT2Params<T>& p, const TensorTable& table, T* data) {
#define X(name, ...) p.name = table.pointer(data, #name);
    GPT2_PARAMS(X)
#undef X
}

// Weights at their initial values. Training also wants the optimizer's moments and a gradient buffer for each level of
// the tree over the micro-batches of a step.
void gpt2_allocate(GPT2& model, uint64_t seed, int micro_batches) {
    const size_t bytes = sizeof(float) * model.table.total;
    model.master = (float*)device_malloc(bytes);
    model.weights = (floatX*)(sizeof(floatX) == sizeof(float) ? (void*)model.master : device_malloc(sizeof(floatX) * model.table.total));
    gpt2_point(model.params, model.table, model.weights);
    std::vector<float> host(model.table.total);
    init_tensors(host.data(), model.table, model.files, seed);
    copy_to_device(model.master, host.data(), bytes, model.stream);
    round_weights(model.weights, model.master, model.table, seed, 0, model.stream);
    if (micro_batches == 0) { return; }
    model.m = (float*)device_malloc(bytes);
    model.v = (float*)device_malloc(bytes);
    model.norm_partial = (double*)device_malloc(sizeof(double) * ceil_div(model.table.total, NORM_CHUNK));
    model.loss_sums = (double*)device_malloc(sizeof(double) * micro_batches);
    for (int n = 1; n < 2 * micro_batches; n *= 2) { model.tree.push_back((float*)device_malloc(bytes)); }
}

void gpt2_free(GPT2& model) {
    for (float* g : model.tree) { device_free(g); }
    if ((void*)model.weights != (void*)model.master) { device_free(model.weights); }
    for (void* p : {(void*)model.master, (void*)model.m, (void*)model.v, (void*)model.norm_partial,
                    (void*)model.loss_sums}) {
        device_free(p);
    }
    model = GPT2();
}

constexpr size_t LOGITS_BOUND = 32u << 20;      // elements of logits that exist at one time

// The tables of the activations of a (B,T) batch; allocates nothing.
Activations activations_describe(const GPT2& model, int batch, int length, Purpose purpose, int recompute) {
    Activations acts;
    acts.B = batch;
    acts.T = length;
    const GPT2Config& g = model.config;
    const size_t B = (size_t)batch, T = (size_t)length, NH = (size_t)g.NH, C = (size_t)g.C, OC = (size_t)model.OC, Vp = (size_t)g.Vp();
    const size_t N = B * T, R = std::min(N, std::max((size_t)1, LOGITS_BOUND / Vp));
    const size_t scratch_floats = std::max(MAX_SLABS * std::max(OC, 4 * C), attention_backward_scratch(g.position, batch, length, g.NH, g.C / g.NH));
    const size_t attention_floats = std::max(attention_forward_scratch(batch, length, g.NH), attention_decode_scratch(batch, length, g.NH, g.C / g.NH));
    acts.chunk = (int)R;
    auto layers = [&](Keep keep) {
        const bool each = keep == Keep::Cached ? purpose != Purpose::Evaluate : keep == Keep::Saved && purpose == Purpose::Train;
        return each ? g.L : 0;
    };
    auto add = [&](TensorSpec s, size_t element) { s.element = element; acts.table.add(s); };
#define X(type, name, keep, rows, cols) add({#name, layers(keep), rows, cols}, sizeof(type));
    GPT2_ACTS(X)
    if (purpose == Purpose::Train) { GPT2_GRAD_ACTS(X) }
#undef X
    for (TensorSpec s : position_tables(g.position, gpt2_position_dims(g, batch, length)).acts) {
        s.layers = s.layers > 0 ? layers(s.keep) : 0;           // some are the same for all layers
        acts.position_table.add(s);
    }
    return acts;
}

void activations_allocate(Activations& acts) {
    if (acts.bytes() > device_memory_available()) {
        die(EXIT_OUT_OF_MEMORY, "%d x %d tokens want %s of activations, %s are available", acts.B, acts.T, format_bytes((double)acts.bytes()).c_str(),
            format_bytes((double)device_memory_available()).c_str());
    }
    acts.data = (float*)device_malloc(sizeof(float) * acts.table.total);
    acts.position_data = (float*)device_malloc(sizeof(float) * acts.position_table.total);
    acts.batch.allocate((size_t)acts.B * acts.T);
#define X(type, name, ...) if (acts.table.find(#name) >= 0) { acts.a.name = acts.table.pointer_as<type>(acts.data, #name); }
    GPT2_ACTS(X)
    GPT2_GRAD_ACTS(X)
#undef X
}

void activations_free(Activations& acts) {
    device_free(acts.data);
    device_free(acts.position_data);
    acts.batch.release();
    acts = Activations();
}

PositionView position_view(const GPT2& model, const Activations& acts, int layer, int B, int T, float* grads = nullptr) {
    PositionView v;
    v.config = &model.config.position;
    v.L = model.config.L; v.NH = model.config.NH; v.C = model.config.C; v.HS = v.C / v.NH; v.layer = layer;
    v.B = B; v.T = T; v.OC = model.OC;
    v.params = &model.table; v.acts = &acts.position_table;
    v.master = model.master; v.grads = grads; v.act_data = acts.position_data;
    return v;
}

// ----------------------------------------------------------------------------------------------------------
// forward

// The hidden states lnf (B,T,C) of acts.batch, whose positions are t0 .. t0+T-1. While generating, B = 1, rows below t0 are
// already in the cached qkv, and `stride`, the length those buffers are laid out for, is the capacity; otherwise t0 = 0 and
// stride = T.
void gpt2_forward(GPT2& model, Activations& acts, int B, int T, int t0, int stride) {
    const GPT2Params<floatX>& p = model.params;
    const GPT2Acts& a = acts.a;
    const int L = model.config.L, C = model.config.C, OC = model.OC;
    const size_t N = (size_t)B * T;
    const bool one_token = T == 1 && t0 > 0;
    const float eps = 1e-5f;
    Stream s = model.stream;

    embedding_forward(a.encoded(), acts.batch.tokens, p.wte(), N, C, s);                                       // (B,T,C)
    with_position(position_view(model, acts, 0, B, stride), [&](auto pos) { pos.embed_forward(a.encoded(), B, T, t0, s); });
    for (int l = 0; l < L; l++) {
        const floatX* residual = l == 0 ? a.encoded() : a.residual3(l - 1);
        const PositionView view = position_view(model, acts, l, B, stride);
        floatX* new_rows = a.qkv(l) + (size_t)t0 * OC;
        /* 1 */ layernorm_forward(a.ln1(l), a.ln1mean(l), a.ln1rstd(l), residual, p.ln1w(l), p.ln1b(l), N, C, eps, s);
        /* 2 */ matmul_forward(new_rows, a.ln1(l), p.qkvw(l), p.qkvb(l), nullptr, N, C, OC, s);                 // q | k | v | z | u
        /* 3 */ with_position(view, [&](auto pos) { pos.prepare_forward(a.qkv(l), B, T, t0, s); });             // rotate, or S and g
        /* 4 */ if (one_token) { attention_decode(a.atty(l), a.qkv(l), a.attscratch(), view, B, t0, s); }
                else { attention_forward<true>(a.atty(l), a.lse(l), a.attscratch(), a.qkv(l), view, B, T, t0, s); }
        /* 5 */ matmul_forward(a.residual2(l), a.atty(l), p.attprojw(l), p.attprojb(l), residual, N, C, C, s);  // + residual
        /* 6 */ layernorm_forward(a.ln2(l), a.ln2mean(l), a.ln2rstd(l), a.residual2(l), p.ln2w(l), p.ln2b(l), N, C, eps, s);
        /* 7 */ matmul_forward(a.fch(l), a.ln2(l), p.fcw(l), p.fcb(l), nullptr, N, C, 4 * C, s);
        /* 8 */ gelu_forward(a.fchgelu(l), a.fch(l), N * 4 * C, s);
        /* 9 */ matmul_forward(a.residual3(l), a.fchgelu(l), p.fcprojw(l), p.fcprojb(l), a.residual2(l), N, 4 * C, C, s);
    }
    /* 10 */ layernorm_forward(a.lnf(), a.lnfmean(), a.lnfrstd(), a.residual3(L - 1), p.lnfw(), p.lnfb(), N, C, eps, s);
}

// The one step without a mirror: logits, losses and, when `grads` is given, their gradients in dlnf (B,T,C) and dwte, a chunk of
// rows at a time, so that logits never exceed LOGITS_BOUND and no matmul runs twice. dloss is 1 / (targets of the total batch).
void gpt2_head(GPT2& model, Activations& acts, size_t N, const GPT2Params<float>* grads, floatX* dlnf, float dloss) {
    const int V = model.config.V, Vp = model.config.Vp(), C = model.config.C;
    const GPT2Acts& a = acts.a;
    Stream s = model.stream;
    for (size_t n = 0; n < N; n += (size_t)acts.chunk) {
        const size_t rows = std::min((size_t)acts.chunk, N - n);
        const floatX* hidden = a.lnf() + n * C;
        matmul_forward(a.logits(), hidden, model.params.wte(), nullptr, nullptr, rows, C, Vp, s);
        classifier(a.losses() + n, a.logits(), acts.batch.targets + n, dloss, rows, V, Vp, grads != nullptr, s);
        if (grads == nullptr) { continue; }
        matmul_backward(dlnf + n * C, grads->wte(), nullptr, a.scratch(), a.logits(), hidden, model.params.wte(), rows, C, Vp, s);
    }
}

// ----------------------------------------------------------------------------------------------------------
// backward: the forward's numbers in reverse. Gradients of weights add to `grads` (float32, laid out as the parameters).

void gpt2_backward(GPT2& model, Activations& acts, float* grads, int B, int T, int recompute, float dloss) {
    const GPT2Params<floatX>& p = model.params;
    GPT2Params<float> d;
    gpt2_point(d, model.table, grads);
    const GPT2Acts& a = acts.a;
    const int L = model.config.L, C = model.config.C, OC = model.OC;
    const size_t N = (size_t)B * T;
    const float eps = 1e-5f;
    Stream s = model.stream;

    gpt2_head(model, acts, N, &d, a.dln(), dloss);
    device_zero(a.dresidual(), sizeof(floatX) * N * C, s);
    /* 10 */ layernorm_backward(a.dresidual(), d.lnfw(), d.lnfb(), a.scratch(), a.dln(), a.residual3(L - 1), a.lnfmean(), a.lnfrstd(), p.lnfw(), N, C, s);
    for (int l = L - 1; l >= 0; l--) {
        const floatX* residual = l == 0 ? a.encoded() : a.residual3(l - 1);
        const PositionView view = position_view(model, acts, l, B, T, grads);
        if (recompute >= 1) { gelu_forward(a.fchgelu(l), a.fch(l), N * 4 * C, s); }
        if (recompute >= 2) { layernorm_forward(a.ln2(l), a.ln2mean(l), a.ln2rstd(l), a.residual2(l), p.ln2w(l), p.ln2b(l), N, C, eps, s); }
        /* 9 */ matmul_backward(a.dfch(), d.fcprojw(l), d.fcprojb(l), a.scratch(), a.dresidual(), a.fchgelu(l), p.fcprojw(l), N, 4 * C, C, s);
        /* 8 */ gelu_backward(a.dfch(), a.dfch(), a.fch(l), N * 4 * C, s);
        /* 7 */ matmul_backward(a.dln(), d.fcw(l), d.fcb(l), a.scratch(), a.dfch(), a.ln2(l), p.fcw(l), N, C, 4 * C, s);
        /* 6 */ layernorm_backward(a.dresidual(), d.ln2w(l), d.ln2b(l), a.scratch(), a.dln(), a.residual2(l), a.ln2mean(l), a.ln2rstd(l), p.ln2w(l), N, C, s);
        /* 5 */ matmul_backward(a.dln(), d.attprojw(l), d.attprojb(l), a.scratch(), a.dresidual(), a.atty(l), p.attprojw(l), N, C, C, s);
        /* 4 */ attention_backward<true>(a.dqkv(), a.scratch(), a.dln(), a.qkv(l), a.atty(l), a.lse(l), view, B, T, s);
        /* 3 */ with_position(view, [&](auto pos) { pos.prepare_backward(a.dqkv(), a.qkv(l), B, T, s); });
        if (recompute >= 2) { layernorm_forward(a.ln1(l), a.ln1mean(l), a.ln1rstd(l), residual, p.ln1w(l), p.ln1b(l), N, C, eps, s); }
        /* 2 */ matmul_backward(a.dln(), d.qkvw(l), d.qkvb(l), a.scratch(), a.dqkv(), a.ln1(l), p.qkvw(l), N, C, OC, s);
        /* 1 */ layernorm_backward(a.dresidual(), d.ln1w(l), d.ln1b(l), a.scratch(), a.dln(), residual, a.ln1mean(l), a.ln1rstd(l), p.ln1w(l), N, C, s);
    }
    with_position(position_view(model, acts, 0, B, T, grads), [&](auto pos) { pos.embed_backward(a.dresidual(), B, T, s); });
    embedding_backward(d.wte(), a.dresidual(), acts.batch.tokens, acts.batch.rows, acts.batch.first, acts.batch.groups, C, s);
}

// ----------------------------------------------------------------------------------------------------------
// a step

// losses (B,T) on the host: of every target, 0 where ignored
void forward_losses(GPT2& model, Activations& acts, const int* tokens, const int* targets, int B, int T, float* losses) {
    const size_t N = (size_t)B * T;
    acts.batch.load(0, 1, tokens, targets, N, false, model.stream);
    gpt2_forward(model, acts, B, T, 0, T);
    gpt2_head(model, acts, N, nullptr, nullptr, 0.0f);
    copy_to_host(losses, acts.a.losses(), sizeof(float) * N, model.stream);
}

// logits (V) after the last of n tokens at positions t0 ..; what the tokens before left in acts is used
void forward_logits(GPT2& model, Activations& acts, const int* ids, int n, int t0, std::vector<float>& logits) {
    const int C = model.config.C;
    acts.batch.load(0, 1, ids, nullptr, (size_t)n, false, model.stream);
    gpt2_forward(model, acts, 1, n, t0, acts.T);
    matmul_forward(acts.a.logits(), acts.a.lnf() + (size_t)(n - 1) * C, model.params.wte(), nullptr, nullptr, 1, C, model.config.Vp(), model.stream);
    std::vector<floatX> row((size_t)model.config.V);
    copy_to_host(row.data(), acts.a.logits(), sizeof(floatX) * row.size(), model.stream);
    logits.resize(row.size());
    for (size_t v = 0; v < row.size(); v++) { logits[v] = (float)row[v]; }
}

// The mean loss of a step of `micro_batches` x (B,T) tokens, and its gradient. The micro-batches' gradients meet in a binary
// tree over their index, fixed whoever computes them: tree[k] holds the sum of 2^k neighbours until its sibling is done.
float* gpt2_gradient(GPT2& model, Activations& acts, const int* tokens, const int* targets, int micro_batches, int recompute, double* loss) {
    const int B = acts.B, T = acts.T;
    const size_t N = (size_t)B * T, total = model.table.total;
    size_t counted = 0;
    for (size_t n = 0; n < N * micro_batches; n++) { counted += targets[n] != IGNORE_INDEX; }
    const float dloss = counted > 0 ? (float)(1.0 / (double)counted) : 0.0f;
    float*& work = model.tree.back();
    auto add = [&](float* to, const float* from) { launch(add_kernel, Grid::over(total, model.stream), to, from, total); };
    for (int i = 0; i < micro_batches; i++) {
        acts.batch.load((size_t)i, (size_t)micro_batches, tokens + i * N, targets + i * N, N, true, model.stream);
        device_zero(work, sizeof(float) * total, model.stream);
        gpt2_forward(model, acts, B, T, 0, T);
        gpt2_backward(model, acts, work, B, T, recompute, dloss);
        loss_sum(model.loss_sums + i, acts.a.losses(), N, model.stream);
        int k = 0;
        for (; i >> k & 1; k++) {                                   // work is the right sibling of tree[k]
            add(model.tree[k], work);
            std::swap(model.tree[k], work);
        }
        if (i + 1 < micro_batches) { std::swap(model.tree[k], work); }
        else {
            for (int n = i + 1, j = k + 1; n >> j != 0; j++) {      // not a power of two: the subtrees that wait
                if (n >> j & 1) { add(model.tree[j], work); std::swap(model.tree[j], work); }
            }
        }
    }
    std::vector<double> sums((size_t)micro_batches);
    copy_to_host(sums.data(), model.loss_sums, sizeof(double) * sums.size(), model.stream);
    double sum = 0.0;
    for (double x : sums) { sum += x; }
    *loss = counted > 0 ? sum / (double)counted : 0.0;
    return work;
}

void gpt2_update(GPT2& model, const float* grads, const AdamW& adamw) {
    for (size_t i = 0; i < model.table.specs.size(); i++) {
        const size_t o = model.table.offsets[i];
        adamw_update(model.weights + o, model.master + o, grads + o, model.m + o, model.v + o, model.table.specs[i].size(), model.table.specs[i],
                     adamw, model.stream);
    }
}

// ----------------------------------------------------------------------------------------------------------
// main

// "small", "gpt2:medium", "d12" or "L,NH,C" -> L, NH, C
void parse_model(const std::string& text, GPT2Config& c) {
    struct Size { const char *name, *alias; int L, NH, C; };
    static const Size sizes[] = {
        {"tiny", "", 6, 8, 512}, {"small", "d12", 12, 12, 768}, {"medium", "d24", 24, 16, 1024}, {"large", "d36", 36, 20, 1280},
        {"xl", "d48", 48, 25, 1600}, {"", "d6", 6, 6, 384}, {"", "d60", 60, 30, 1920}, {"", "d72", 72, 30, 2880}, {"", "d84", 84, 36, 3456}};
    const std::string name = text.compare(0, 5, "gpt2:") == 0 ? text.substr(5) : text;
    bool found = false;
    for (const Size& s : sizes) {
        if (!name.empty() && (name == s.name || name == s.alias)) { c.L = s.L; c.NH = s.NH; c.C = s.C; found = true; }
    }
    int used = 0;
    if (!found && sscanf(text.c_str(), "%d,%d,%d%n", &c.L, &c.NH, &c.C, &used) == 3) { found = used == (int)text.size(); }
    check(found, "--model %s: wanted tiny, small, medium, large, xl, d6 ... d84, or L,NH,C as in 12,12,768", text.substr(0, 60).c_str());
    check(c.L >= 1 && c.L <= 1024 && c.NH >= 1 && c.C >= 1 && c.C <= 65536 && c.C % c.NH == 0,
          "--model %s: L in 1..1024, C in 1..65536, and NH must divide C", text.c_str());
}

// The model's configuration: from the checkpoint or weights at `path` (if any), the flags and the data, which must agree.
GPT2Config resolve_config(const Options& o, const std::string& path, int data_vocab) {
    GPT2Config c;
    check(o.pos.size() <= 200, "--pos %.40s...: %zu bytes are no name of an encoding", o.pos.c_str(), o.pos.size());
    parse_model(o.model, c);
    c.T = o.T;
    c.V = data_vocab;
    if (path.empty()) {
        c.position = parse_position(o.pos, c.T);
        parse_rope_scaling(o.rope_scaling, c.position);
        return c;
    }
    const Json j = read_config(path);
    const GPT2Config asked = c;
    c.L = (int)json_int(j, "n_layer", 1, 1024, path);
    c.NH = (int)json_int(j, "n_head", 1, 65536, path);
    c.C = (int)json_int(j, "n_embd", 1, 65536, path);
    c.V = (int)json_int(j, "vocab_size", 1, MAX_VOCAB, path);
    const int trained = (int)json_int(j, "n_positions", 1, INT32_MAX, path);
    check(c.C % c.NH == 0, "%s: n_head %d does not divide n_embd %d", path.c_str(), c.NH, c.C);
    check(!o.is_given("model") || (c.L == asked.L && c.NH == asked.NH && c.C == asked.C), "--model %s: %s holds a model of %d,%d,%d",
          o.model.c_str(), path.c_str(), c.L, c.NH, c.C);
    check(data_vocab == 0 || data_vocab == c.V, "%s: the data has a vocabulary of %d, the model in %s one of %d", "--train_files, --val_files",
          data_vocab, path.c_str(), c.V);
    if (!o.is_given("T")) { c.T = trained; }
    if (j.contains("position")) {
        c.position = position_from_json(j["position"], trained, path);
        if (o.is_given("pos")) {
            const std::string wanted = position_text(parse_position(o.pos, trained)), found = position_text(c.position);
            check(wanted == found, "--pos %s: the checkpoint %s was trained with %s", wanted.c_str(), path.c_str(), found.c_str());
        }
    } else {                                                    // somebody else's GPT-2: its own encoding unless another is asked for
        c.position = parse_position(o.is_given("pos") ? o.pos : "learned", trained);
    }
    parse_rope_scaling(o.rope_scaling, c.position);
    return c;
}

Checkpoint checkpoint_view(GPT2& model, const RunState& state, const Options& options) {
    Checkpoint c;
    c.table = &model.table;
    c.files = &model.files;
    c.params = model.master;
    c.m = model.m;
    c.v = model.v;
    c.config = gpt2_config(model.config.V, model.config.position.T_train, model.config.C, model.config.L, model.config.NH,
                           position_json(model.config.position));
    c.state = state.to_json(options);
    return c;
}

// --dump_bias "0,1,To be" -> layer, head and the ids of the text
std::vector<int> parse_dump_bias(const Options& o, const GPT2Config& c, const Tokenizer* tokenizer, int& layer, int& head) {
    int used = 0;
    const bool good = sscanf(o.dump_bias.c_str(), "%d,%d,%n", &layer, &head, &used) == 2 && used > 0;
    check(good && layer >= 0 && layer < c.L && head >= 0 && head < c.NH, "--dump_bias %s: wanted LAYER,HEAD,TEXT with a layer below %d and a "
          "head below %d", o.dump_bias.substr(0, 60).c_str(), c.L, c.NH);
    check(!o.out.empty(), "--dump_bias: give the directory to write to with --out");
    return prompt_ids(o.dump_bias.substr((size_t)used), c.V, tokenizer);
}

// What is to be done with a trained model: --eval_lengths, --hellaswag, --generate, --dump_bias
void use_model(GPT2& model, const Options& o, const TokenFiles* val, const HellaSwag* hellaswag, const Tokenizer* tokenizer, Log& log) {
    if (hellaswag != nullptr) {
        Activations acts = activations_describe(model, o.B, o.T, Purpose::Evaluate, 0);
        activations_allocate(acts);
        report_hellaswag(model, acts, *hellaswag, 0, log);
        activations_free(acts);
    }
    if (!o.eval_lengths.empty()) { evaluate_lengths(model, *val, o.eval_lengths, o.stride, (uint64_t)o.eval_tokens, o.curve, log); }
    if (o.is_given("generate")) {
        const double start = wall_seconds();
        const Sampling sampling{o.temperature, o.top_k, o.top_p, (uint64_t)o.seed};
        generate(model, prompt_ids(o.generate, model.config.V, tokenizer), o.tokens, sampling, tokenizer, stdout);
        fprintf(stderr, "%lld tokens, %.1f tokens/s\n", (long long)o.tokens, (double)o.tokens / (wall_seconds() - start));
    }
    if (!o.dump_bias.empty()) {
        int layer, head;
        const std::vector<int> ids = parse_dump_bias(o, model.config, tokenizer, layer, head);
        std::vector<std::string> labels;
        for (int id : ids) { labels.push_back(tokenizer != nullptr ? tokenizer->decode(id, labels.empty()) : std::to_string(id)); }
        write_bias(model, ids, labels, layer, head, o.out);
    }
}

// Trains from state.step to options.steps; returns the exit code.
int train(GPT2& model, Activations& acts, const Options& o, const Gpu& gpu, RunState& state, const TokenFiles& files, const TokenFiles* val,
          const HellaSwag* hellaswag, const Tokenizer* tokenizer, const std::string& out, Log& log) {
    const int B = acts.B, T = acts.T, samples = (int)(o.total_batch / T), micro_batches = samples / B;
    const int64_t first_step = state.step;
    std::vector<int> tokens((size_t)o.total_batch), targets((size_t)o.total_batch);
    double step_seconds = 0;
    const double C = model.config.C, token_flops = flops_per_token(C * (model.config.V + model.config.L * (model.OC + 9 * C)), model.config.L, (int)C, T, true);
    auto save = [&] {
        log.sync();
        Checkpoint c = checkpoint_view(model, state, o);
        if (tokenizer != nullptr) {
            for (const std::string& f : tokenizer->files) { c.extra.push_back({f.substr(f.rfind('/') + 1), read_file(f)}); }
        }
        printf("saved %s\n", save_checkpoint(out, (int)state.step, c, o.keep, o.major).c_str());
    };
    for (;;) {
        const int64_t step = state.step;
        const bool last = step >= o.steps;
        if (val != nullptr && o.val_every > 0 && (last || step % o.val_every == 0)) {
            const uint64_t limit = o.val_batches < 0 ? 0 : (uint64_t)o.val_batches * B * T;
            const double loss = evaluate(model, acts, *val, T, 0, limit).loss;
            printf("val loss %f\n", loss);
            log.val(step, loss);
            if (hellaswag != nullptr) { report_hellaswag(model, acts, *hellaswag, step, log); }
        }
        if (o.sample_every > 0 && (last || (step > 0 && step % o.sample_every == 0))) {
            printf("generating:\n---\n");
            const int64_t reach = std::min(o.tokens, (int64_t)position_max_length(model.config.position) - 1);
            generate(model, prompt_ids("", model.config.V, tokenizer), reach, {o.temperature, o.top_k, o.top_p, hash64((uint64_t)o.seed, (uint64_t)step)},
                     tokenizer, stdout);
            printf("---\n");
        }
        const bool stop = stop_signal != 0;
        const bool due = o.checkpoint_every > 0 && (last || step % o.checkpoint_every == 0);
        if (!out.empty() && step > first_step && (due || stop)) { save(); }
        if (last) { return 0; }
        if (stop) {
            fprintf(stderr, "stopped by signal %d before step %lld%s\n", (int)stop_signal, (long long)step + 1,
                    out.empty() ? "; without --out nothing is kept" : "; go on with --resume 1");
            return EXIT_INTERRUPTED;
        }
        const double start = wall_seconds();
        fill_batch(files, T, o.overfit ? 0 : state.sample, samples, (uint64_t)o.seed, !o.overfit, tokens.data(), targets.data());
        StepRecord r;
        const float* grads = gpt2_gradient(model, acts, tokens.data(), targets.data(), micro_batches, o.recompute, &r.loss);
        r.norm = gradient_norm(model.norm_partial, grads, model.table.total, model.stream);
        r.step = step;
        r.lr = learning_rate(o.schedule, o.lr, o.warmup, o.steps, o.final_lr, step);
        const Verdict verdict = state.guard.judge(r.loss, r.norm);
        if (verdict.skip) {
            const std::string bad = first_bad_tensor(model.table, grads, model.norm_partial, model.stream);
            r.skipped = verdict.reason + (bad.empty() ? "" : ", first in the gradient of " + bad);
        } else {
            state.updates++;
            const double scale = o.clip > 0 && r.norm > o.clip ? o.clip / r.norm : 1.0;
            gpt2_update(model, grads, {(float)r.lr, (float)o.beta1, (float)o.beta2, (float)o.eps, (float)o.weight_decay, (float)scale,
                                       (int)state.updates, (uint64_t)o.seed});
        }
        const double seconds = wall_seconds() - start;
        step_seconds = step == first_step ? seconds : 0.95 * step_seconds + 0.05 * seconds;
        r.ms = 1e3 * seconds;
        r.tok_per_s = (double)o.total_batch / seconds;
        if (gpu.sms > 0) { r.mfu = model_flops_utilization(r.tok_per_s, token_flops, peak_flops(gpu, sizeof(floatX) == 2)); }
        r.loss_z = verdict.loss_z;
        r.norm_z = verdict.norm_z;
        printf("%s\n", step_line(r, o.steps, step_seconds * (double)(o.steps - step - 1)).c_str());
        fflush(stdout);
        log.train(r);
        state.step++;
        state.sample += (uint64_t)samples;
        if (state.guard.diverged()) {
            die(EXIT_DIVERGED, "%d updates in a row were skipped, the last at step %lld: %s", MAX_BAD_STEPS, (long long)step + 1, r.skipped.c_str());
        }
    }
}

int gpt2_main(int argc, char** argv) {
    Options o = parse_options(argc, argv);
    if (o.help) {
        printf("%s", help_text("train_gpt2", "Trains, evaluates and samples a GPT-2 with any of these positional encodings:\n" + position_help()).c_str());
        return 0;
    }
    set_threads(o.threads);
    const Gpu gpu = o.list ? Gpu() : find_gpu();                // a GPU that cannot be used is reported before the work
    // 1. what to do, and with which data
    const bool uses = !o.eval_lengths.empty() || !o.hellaswag.empty() || o.is_given("generate") || !o.dump_bias.empty();
    const bool trains = o.resume || o.is_given("steps") ? o.steps != 0 : !uses;
    check(!o.resume || !o.out.empty(), "--resume: give the directory of the run with --out");
    check(trains || o.list || o.check || !o.load.empty() || o.resume,
          "--eval_lengths, --hellaswag, --generate and --dump_bias want a model: --load, or --steps to train one first");
    std::unique_ptr<OutputLock> lock;
    if (o.resume && !o.list && !o.check && is_directory(o.out)) {       // held, and put in order, before a checkpoint is chosen
        lock = std::make_unique<OutputLock>(o.out);
        clean_output_directory(o.out);
    }
    const std::string resumed = o.resume ? find_checkpoint(o.out, o.no_fallback) : "", source = resumed.empty() ? o.load : resumed;
    std::unique_ptr<TokenFiles> files, val;
    const bool reads = o.list ? o.is_given("train_files") : trains || o.check;
    if (reads) { files = std::make_unique<TokenFiles>(o.train_files, "--train_files"); }
    const int vocab = files ? files->vocab : 0;
    const bool validates = !o.list && (!o.eval_lengths.empty() || ((trains || o.check) && o.val_every > 0));
    if (validates) { val = std::make_unique<TokenFiles>(o.val_files, "--val_files", vocab); }
    // 2. the model
    GPT2Config config = resolve_config(o, source, files ? vocab : val ? val->vocab : 0);
    if (config.V == 0) { config.V = 50257; }                    // --list without data
    config.position.tile_skip = parse_tile_skip(o.tile_skip);
    o.T = config.T;
    const std::unique_ptr<Tokenizer> tokenizer = o.list ? nullptr : find_tokenizer(o.tokenizer, source, config.V);
    std::unique_ptr<HellaSwag> hellaswag;
    if (!o.list && !o.hellaswag.empty()) { hellaswag = std::make_unique<HellaSwag>(load_hellaswag(o.hellaswag, config.V)); }
    int layer, head;                                                            // what follows is refused before the work, not after it
    if (!o.list && !o.dump_bias.empty()) { parse_dump_bias(o, config, tokenizer.get(), layer, head); }
    if (!o.list && o.is_given("generate")) { prompt_ids(o.generate, config.V, tokenizer.get()); }
    check(o.T <= position_max_length(config.position), "--T %d: %s has no positions beyond %d", o.T, config.position.name.c_str(),
          position_max_length(config.position));
    if (trains && resumed.empty() && config.position.name != "learned") { config.position.T_train = o.T; }
    if (o.total_batch < 0) { o.total_batch = (int64_t)o.B * o.T; }
    check(o.total_batch % ((int64_t)o.B * o.T) == 0 && o.total_batch / o.T <= INT32_MAX,
          "--total_batch %lld: not a multiple of --B x --T = %d x %d = %lld tokens", (long long)o.total_batch, o.B, o.T, (long long)o.B * o.T);
    const int micro_batches = trains || o.check ? (int)(o.total_batch / ((int64_t)o.B * o.T)) : 0;
    if (files && o.steps < 0) { o.steps = std::max((int64_t)1, (int64_t)files->windows(o.T) / (o.total_batch / o.T)); }
    GPT2 model;
    gpt2_describe(model, config);
    Activations acts = activations_describe(model, o.B, o.T, trains || o.check ? Purpose::Train : Purpose::Evaluate, o.recompute);
    if (o.list) { print_tensors(model.table, model.files); return 0; }
    FILE* banner = trains || o.check ? stdout : stderr;         // stdout of a use is its result
    fprintf(banner, "%s  %-17s %s\n  %-17s L %d, NH %d, C %d, V %d: %.1fM parameters\n  %-17s %s\n  %-17s %s\n",
            trains || o.check ? options_banner(o).c_str() : "", "device", gpu_report(gpu).c_str(), "model", config.L, config.NH, config.C,
            config.V, (double)model.table.elements() / 1e6, "encoding", position_text(config.position).c_str(),
            "attention", attention_description(config.position, config.C / config.NH).c_str());
    const double copies = trains || o.check ? 3 + std::ceil(std::log2((double)micro_batches)) + 1 : 1;
    const double weights = (copies * 4.0 + (sizeof(floatX) == 2 ? 2.0 : 0.0)) * (double)model.table.total;
    check_memory(weights, trains || o.check ? (double)acts.bytes() : 0.0, o.B,
                 strprintf("%.0f copies of the parameters, %s of activations", copies, format_bytes((double)acts.bytes()).c_str()));
    if (o.check) { printf("all is well: %lld steps of %lld tokens\n", (long long)o.steps, (long long)o.total_batch); return 0; }
    // 3. the weights
    if (!o.out.empty() && trains) {
        if (!lock) { lock = std::make_unique<OutputLock>(o.out); }
        clean_output_directory(o.out);
        check(o.resume || list_checkpoints(o.out).empty(), "--out %s: holds checkpoints of an earlier run; go on with it by --resume 1, or give "
              "another directory", o.out.c_str());
    }
    RunState state;
    gpt2_allocate(model, (uint64_t)o.seed, micro_batches);
    if (!resumed.empty()) {
        Checkpoint c = checkpoint_view(model, state, o);
        load_checkpoint(resumed, c);
        state.from_json(c.state, o, resumed + "/state.json");
        round_weights(model.weights, model.master, model.table, (uint64_t)o.seed, (int)state.updates, model.stream);
        printf("resumed from %s\n", resumed.c_str());
    } else if (!o.load.empty()) {
        const PositionTables position = position_tables(config.position, gpt2_position_dims(config, 0, 0));
        load_weights(o.load, model.table, model.files, position.files, model.master);
        round_weights(model.weights, model.master, model.table, 0, 0, model.stream);
    }
    if (lock != nullptr && o.checkpoint_every > 0) { check_disk_space(o.out, checkpoint_bytes(checkpoint_view(model, state, o))); }
    state.guard.skip_loss_z = o.skip_loss_z;
    state.guard.skip_norm_z = o.skip_norm_z;
    // 4. the work
    Log log(o.out, trains ? (resumed.empty() ? -1 : state.step) : INT64_MAX);
    int code = 0;
    if (trains) {
        catch_signals();
        activations_allocate(acts);
        code = train(model, acts, o, gpu, state, *files, val.get(), hellaswag.get(), tokenizer.get(), o.out, log);
        activations_free(acts);
        release_signals();
    }
    if (code == 0) { use_model(model, o, val.get(), trains ? nullptr : hellaswag.get(), tokenizer.get(), log); }
    gpt2_free(model);
    return code;
}

int main(int argc, char** argv) {
    wait_politely(argv);
    return run_program(gpt2_main, argc, argv);
}
