// train_bert.cu -- trains a BERT with any positional encoding of llmc/position/table.h: masked language modelling,
// contrastive fine-tuning on (query, positive, negatives), and retrieval with the embeddings that come out of it.
//
// Read it beside train_gpt2.cu: the same layers, in another order. BERT is bidirectional, normalises after each
// residual (post-LN), and predicts only the tokens that were masked.
#include "llmc/attention/choose.cuh"
#include "llmc/contrastive.cuh"
#include "llmc/gelu.cuh"
#include "llmc/layernorm.cuh"
#include "llmc/matmul.cuh"
#include "llmc/model.cuh"
#include "llmc/pooling.cuh"
#include "llmc/rows.cuh"
#include "llmc/run/run.h"
#include "llmc/text/documents.h"
#include "llmc/text/mlm.h"
#include "llmc/use/evaluate.h"
#include "llmc/use/retrieval.h"

// ----------------------------------------------------------------------------------------------------------
// the tensors

struct BERTConfig {
    int T = 512;                // trained sequence length
    int V = 30522, L = 12, NH = 12, C = 768;
    PositionConfig position;
    SpecialTokens special;
    double mask_share = 0.15;
    std::string pooling;        // that contrastive training has used; empty: none yet
    static constexpr bool causal = false;
    int Vp() const { return round_up(V, 128); }     // padded vocabulary: rows of wte
};

// OC, the rows of qkvw: q | k | v (C each) | the encoding's columns (cable: w_c, w_s) | padding to a multiple of 8
#define BERT_PARAMS(X) \
    /* name      layers rows    cols   initial values    decay */ \
    X(wte,       0,     Vp,     C,     normal(0.02f),    true)  \
    X(typew,     0,     2,      C,     normal(0.02f),    true)  \
    X(embw,      0,     C,      0,     constant(1.0f),   false) \
    X(embb,      0,     C,      0,     constant(0.0f),   false) \
    X(qkvw,      L,     OC,     C,     normal(0.02f),    true)  \
    X(qkvb,      L,     OC,     0,     constant(0.0f),   false) \
    X(attprojw,  L,     C,      C,     normal(0.02f),    true)  \
    X(attprojb,  L,     C,      0,     constant(0.0f),   false) \
    X(ln1w,      L,     C,      0,     constant(1.0f),   false) \
    X(ln1b,      L,     C,      0,     constant(0.0f),   false) \
    X(fcw,       L,     4 * C,  C,     normal(0.02f),    true)  \
    X(fcb,       L,     4 * C,  0,     constant(0.0f),   false) \
    X(fcprojw,   L,     C,      4 * C, normal(0.02f),    true)  \
    X(fcprojb,   L,     C,      0,     constant(0.0f),   false) \
    X(ln2w,      L,     C,      0,     constant(1.0f),   false) \
    X(ln2b,      L,     C,      0,     constant(0.0f),   false) \
    X(headw,     0,     C,      C,     normal(0.02f),    true)  \
    X(headb,     0,     C,      0,     constant(0.0f),   false) \
    X(headlnw,   0,     C,      0,     constant(1.0f),   false) \
    X(headlnb,   0,     C,      0,     constant(0.0f),   false) \
    X(decoderb,  0,     Vp,     0,     constant(0.0f),   false)

// The same tensors in a checkpoint: Hugging Face's names; BERT's linear weights are stored (out, in), as ours
#define BERT_FILES(F) \
    /* name                             tensor    row0   rows */ \
    F("attention.self.query.weight",         qkvw,     0,     C)     \
    F("attention.self.query.bias",           qkvb,     0,     C)     \
    F("attention.self.key.weight",           qkvw,     C,     C)     \
    F("attention.self.key.bias",             qkvb,     C,     C)     \
    F("attention.self.value.weight",         qkvw,     2 * C, C)     \
    F("attention.self.value.bias",           qkvb,     2 * C, C)     \
    F("attention.output.dense.weight",       attprojw, 0,     C)     \
    F("attention.output.dense.bias",         attprojb, 0,     C)     \
    F("attention.output.LayerNorm.weight",   ln1w,     0,     C)     \
    F("attention.output.LayerNorm.bias",     ln1b,     0,     C)     \
    F("intermediate.dense.weight",           fcw,      0,     4 * C) \
    F("intermediate.dense.bias",             fcb,      0,     4 * C) \
    F("output.dense.weight",                 fcprojw,  0,     C)     \
    F("output.dense.bias",                   fcprojb,  0,     C)     \
    F("output.LayerNorm.weight",             ln2w,     0,     C)     \
    F("output.LayerNorm.bias",               ln2b,     0,     C)
#define BERT_MODEL_FILES(F) \
    F("bert.embeddings.word_embeddings.weight",        wte,      0, V) \
    F("bert.embeddings.token_type_embeddings.weight",  typew,    0, 2) \
    F("bert.embeddings.LayerNorm.weight",              embw,     0, C) \
    F("bert.embeddings.LayerNorm.bias",                embb,     0, C)
#define BERT_HEAD_FILES(F) \
    F("cls.predictions.transform.dense.weight",        headw,    0, C) \
    F("cls.predictions.transform.dense.bias",          headb,    0, C) \
    F("cls.predictions.transform.LayerNorm.weight",    headlnw,  0, C) \
    F("cls.predictions.transform.LayerNorm.bias",      headlnb,  0, C) \
    F("cls.predictions.bias",                          decoderb, 0, V)

// What a forward leaves behind. N = B * T rows, R those of the head at a time; Scratch is one buffer for all layers,
// Saved one a layer.
#define BERT_ACTS(X) \
    /* type   name       keep            rows      cols */ \
    X(floatX, encoded,   Keep::Scratch,  N,        C)      \
    X(floatX, emb,       Keep::Scratch,  N,        C)      \
    X(float,  embmean,   Keep::Scratch,  N,        0)      \
    X(float,  embrstd,   Keep::Scratch,  N,        0)      \
    X(floatX, qkv,       Keep::Cached,   N,        OC)     \
    X(float,  lse,       Keep::Saved,    B * NH,   T)      \
    X(float,  attscratch, Keep::Scratch, attention_floats, 0) \
    X(floatX, atty,      Keep::Saved,    N,        C)      \
    X(floatX, sum1,      Keep::Saved,    N,        C)      \
    X(floatX, ln1,       recompute < 2 ? Keep::Saved : Keep::Scratch, N, C) \
    X(float,  ln1mean,   Keep::Saved,    N,        0)      \
    X(float,  ln1rstd,   Keep::Saved,    N,        0)      \
    X(floatX, fch,       Keep::Saved,    N,        4 * C)  \
    X(floatX, fchgelu,   recompute < 1 ? Keep::Saved : Keep::Scratch, N, 4 * C) \
    X(floatX, sum2,      Keep::Saved,    N,        C)      \
    X(floatX, ln2,       Keep::Saved,    N,        C)      \
    X(float,  ln2mean,   Keep::Saved,    N,        0)      \
    X(float,  ln2rstd,   Keep::Saved,    N,        0)      \
    X(floatX, picked,    Keep::Scratch,  R,        C)      \
    X(floatX, headh,     Keep::Scratch,  R,        C)      \
    X(floatX, headgelu,  Keep::Scratch,  R,        C)      \
    X(floatX, headln,    Keep::Scratch,  R,        C)      \
    X(float,  headmean,  Keep::Scratch,  R,        0)      \
    X(float,  headrstd,  Keep::Scratch,  R,        0)      \
    X(floatX, logits,    Keep::Scratch,  R,        Vp)     \
    X(float,  losses,    Keep::Scratch,  N,        0)      \
    X(float,  hits,      Keep::Scratch,  N,        0)

// Gradients of activations, one buffer each; only while training.
#define BERT_GRAD_ACTS(X) \
    X(floatX, dresidual, Keep::Scratch,  N,        C)      \
    X(floatX, dsum,      Keep::Scratch,  N,        C)      \
    X(floatX, datty,     Keep::Scratch,  N,        C)      \
    X(floatX, dfch,      Keep::Scratch,  N,        4 * C)  \
    X(floatX, dqkv,      Keep::Scratch,  N,        OC)     \
    X(floatX, dhead,     Keep::Scratch,  R,        C)      \
    X(floatX, dheadgelu, Keep::Scratch,  R,        C)      \
    X(float,  scratch,   Keep::Scratch,  scratch_floats, 0)

template <class T> struct BERTParams {
#define X(name, ...) LayerPointer<T> name;
    BERT_PARAMS(X)
#undef X
};

struct BERTActs {
#define X(type, name, ...) LayerPointer<type> name;
    BERT_ACTS(X)
    BERT_GRAD_ACTS(X)
#undef X
};

using Activations = ActivationsOf<BERTActs>;

struct BERT : Parameters {
    BERTConfig config;
    int OC = 0;                                         // width of a qkv row
    BERTParams<floatX> params;
    Pooling pooling = Pooling::Mean;
};

PositionDims bert_position_dims(const BERTConfig& c, int B, int T) {
    PositionDims d;
    d.L = c.L; d.NH = c.NH; d.C = c.C; d.B = B; d.T = T;
    d.causal = false;
    d.layer_prefix = "bert.encoder.layer.";
    d.layer_suffix = ".attention.self.";
    d.model_prefix = "bert.";
    d.wpe_name = "bert.embeddings.position_embeddings.weight";
    return d;
}

// Fills in the tables of tensors of a model of this configuration; allocates nothing.
void bert_describe(BERT& model, const BERTConfig& config) {
    model.config = config;
    const int V = config.V, Vp = config.Vp(), L = config.L, C = config.C;
    const PositionTables position = position_tables(config.position, bert_position_dims(config, 0, 0));
    const int OC = round_up(3 * C + position.extra_columns, 8);
    model.OC = OC;
    model.table = TensorTable();
#define X(name, layers, rows, cols, init, decay) model.table.add({#name, layers, (size_t)(rows), (size_t)(cols), init, decay});
    BERT_PARAMS(X)
#undef X
    model.add_position(position.params);
    model.files.clear();
#define F(name, tensor, row0, rows) model.files.push_back({name, #tensor, 0, (size_t)(row0), (size_t)(rows), false});
    BERT_MODEL_FILES(F)
    BERT_HEAD_FILES(F)
#undef F
    for (int l = 0; l < L; l++) {
#define F(name, tensor, row0, rows) \
        model.files.push_back({"bert.encoder.layer." + std::to_string(l) + "." + name, #tensor, l, (size_t)(row0), (size_t)(rows), false});
        BERT_FILES(F)
#undef F
    }
    model.files.insert(model.files.end(), position.files.begin(), position.files.end());
    check_files(model);
}

// What may be missing in weights from elsewhere: the encoding's tensors, and the head, which an encoder alone does not
// have.
std::vector<FileTensor> optional_files(const BERT& model) {
    std::vector<FileTensor> list = position_tables(model.config.position, bert_position_dims(model.config, 0, 0)).files;
    for (const FileTensor& f : model.files) { if (starts_with(f.name, "cls.")) { list.push_back(f); } }
    return list;
}

template <class T> void bert_point(BERTParams<T>& p, const TensorTable& table, T* data) {
#define X(name, ...) p.name = table.pointer(data, #name);
    BERT_PARAMS(X)
#undef X
}

// The tables of the activations of a (B,T) batch; allocates nothing.
Activations activations_describe(const BERT& model, int batch, int length, Purpose purpose, int recompute) {
    Activations acts;
    acts.B = batch;
    acts.T = length;
    const BERTConfig& g = model.config;
    const size_t B = (size_t)batch, T = (size_t)length, NH = (size_t)g.NH, C = (size_t)g.C, OC = (size_t)model.OC, Vp = (size_t)g.Vp();
    const size_t N = B * T, R = std::min(N, std::max((size_t)1, LOGITS_BOUND / Vp));
    const size_t widest = std::max(std::max(OC, 4 * C), Vp);
    const size_t scratch_floats = std::max(MAX_SLABS * widest, attention_backward_scratch(g.position, batch, length, g.NH, g.C / g.NH));
    const size_t attention_floats = attention_forward_scratch(batch, length, g.NH);
    acts.chunk = (int)R;
#define X(type, name, keep, rows, cols) acts.add({#name, kept_layers(keep, purpose, g.L), rows, cols}, sizeof(type));
    BERT_ACTS(X)
    if (purpose == Purpose::Train) { BERT_GRAD_ACTS(X) }
#undef X
    acts.add_position(position_tables(g.position, bert_position_dims(g, batch, length)).acts, purpose, g.L);
    return acts;
}

void activations_allocate(Activations& acts) {
    acts.allocate();
#define X(type, name, ...) acts.point(acts.a.name, #name);
    BERT_ACTS(X)
    BERT_GRAD_ACTS(X)
#undef X
}

// ----------------------------------------------------------------------------------------------------------
// forward

// The hidden states ln2(L-1) (B,T,C) of acts.batch.
void bert_forward(BERT& model, Activations& acts, int B, int T) {
    const BERTParams<floatX>& p = model.params;
    const BERTActs& a = acts.a;
    const int L = model.config.L, C = model.config.C, OC = model.OC;
    const size_t N = (size_t)B * T;
    const float eps = 1e-12f;
    Stream s = model.stream;

    embedding_forward(a.encoded(), acts.batch.tokens, p.wte(), N, C, s);                                       // (B,T,C)
    with_position(position_view(model, acts, 0, B, T), [&](auto pos) { pos.embed_forward(a.encoded(), B, T, 0, s); });
    add_row(a.encoded(), p.typew(), N, C, s);                                                                  // all tokens are of type 0
    layernorm_forward(a.emb(), a.embmean(), a.embrstd(), a.encoded(), p.embw(), p.embb(), N, C, eps, s);
    for (int l = 0; l < L; l++) {
        const floatX* x = l == 0 ? a.emb() : a.ln2(l - 1);
        const PositionView position = position_view(model, acts, l, B, T);
        /* 1 */ matmul_forward(a.qkv(l), view(x, N, C), view(p.qkvw(l), OC, C), p.qkvb(l), nullptr, s);         // q | k | v | z | u
        /* 2 */ with_position(position, [&](auto pos) { pos.prepare_forward(a.qkv(l), B, T, 0, s); });             // rotate, or S and g
        /* 3 */ attention_forward<false>(a.atty(l), a.lse(l), a.attscratch(), a.qkv(l), position, B, T, 0, s);
        /* 4 */ matmul_forward(a.sum1(l), view(a.atty(l), N, C), view(p.attprojw(l), C, C), p.attprojb(l), x, s);      // + residual
        /* 5 */ layernorm_forward(a.ln1(l), a.ln1mean(l), a.ln1rstd(l), a.sum1(l), p.ln1w(l), p.ln1b(l), N, C, eps, s);
        /* 6 */ matmul_forward(a.fch(l), view(a.ln1(l), N, C), view(p.fcw(l), 4 * C, C), p.fcb(l), nullptr, s);
        /* 7 */ gelu_erf_forward(a.fchgelu(l), a.fch(l), N * 4 * C, s);
        /* 8 */ matmul_forward(a.sum2(l), view(a.fchgelu(l), N, 4 * C), view(p.fcprojw(l), C, 4 * C), p.fcprojb(l), a.ln1(l), s);
        /* 9 */ layernorm_forward(a.ln2(l), a.ln2mean(l), a.ln2rstd(l), a.sum2(l), p.ln2w(l), p.ln2b(l), N, C, eps, s);
    }
}

// The head of masked language modelling, the one step without a mirror: losses of the M rows that acts.batch picked
// and, when `grads` is given, their gradients in dhidden (B,T,C), zeroed by the caller, and in the head's tensors; a
// chunk of rows at a time. dloss is 1 / (targets of the total batch).
void bert_head(BERT& model, Activations& acts, size_t M, const BERTParams<float>* grads, floatX* dhidden, float dloss) {
    const int V = model.config.V, Vp = model.config.Vp(), L = model.config.L, C = model.config.C;
    const BERTParams<floatX>& p = model.params;
    const BERTActs& a = acts.a;
    const float eps = 1e-12f;
    Stream s = model.stream;
    for (size_t n = 0; n < M; n += (size_t)acts.chunk) {
        const size_t rows = std::min((size_t)acts.chunk, M - n);
        const int* picked = acts.batch.picked + n;
        /* 1 */ gather_rows(a.picked(), a.ln2(L - 1), picked, rows, C, s);
        /* 2 */ matmul_forward(a.headh(), view(a.picked(), rows, C), view(p.headw(), C, C), p.headb(), nullptr, s);
        /* 3 */ gelu_erf_forward(a.headgelu(), a.headh(), rows * C, s);
        /* 4 */ layernorm_forward(a.headln(), a.headmean(), a.headrstd(), a.headgelu(), p.headlnw(), p.headlnb(), rows, C, eps, s);
        /* 5 */ matmul_forward(a.logits(), view(a.headln(), rows, C), view(p.wte(), Vp, C), p.decoderb(), nullptr, s);
        /* 6 */ classifier(a.losses() + n, a.hits() + n, a.logits(), acts.batch.targets + n, dloss, rows, V, Vp, grads != nullptr, s);
        if (grads == nullptr) { continue; }
        const BERTParams<float>& d = *grads;
        /* 5 */ matmul_backward(a.dhead(), d.wte(), d.decoderb(), a.scratch(), a.logits(), nullptr,
                                view(a.headln(), rows, C), view(p.wte(), Vp, C), s);
        device_zero(a.dheadgelu(), sizeof(floatX) * rows * C, s);
        /* 4 */ layernorm_backward(a.dheadgelu(), d.headlnw(), d.headlnb(), a.scratch(), a.dhead(), a.headgelu(), a.headmean(), a.headrstd(),
                                   p.headlnw(), rows, C, s);
        /* 3 */ gelu_erf_backward(a.dheadgelu(), a.dheadgelu(), a.headh(), rows * C, s);
        /* 2 */ matmul_backward(a.dhead(), d.headw(), d.headb(), a.scratch(), a.dheadgelu(), nullptr,
                                view(a.picked(), rows, C), view(p.headw(), C, C), s);
        /* 1 */ scatter_rows(dhidden, a.dhead(), picked, rows, C, s);
    }
}

// ----------------------------------------------------------------------------------------------------------
// backward: the forward's numbers in reverse. dresidual holds the gradient of the hidden states; gradients of weights
// add to `grads` (float32, laid out as the parameters).

void bert_backward(BERT& model, Activations& acts, float* grads, int B, int T, int recompute) {
    const BERTParams<floatX>& p = model.params;
    BERTParams<float> d;
    bert_point(d, model.table, grads);
    const BERTActs& a = acts.a;
    const int L = model.config.L, C = model.config.C, OC = model.OC;
    const size_t N = (size_t)B * T, bytes = sizeof(floatX) * N * C;
    const float eps = 1e-12f;
    Stream s = model.stream;

    for (int l = L - 1; l >= 0; l--) {
        const floatX* x = l == 0 ? a.emb() : a.ln2(l - 1);
        const PositionView position = position_view(model, acts, l, B, T, grads);
        if (recompute >= 1) { gelu_erf_forward(a.fchgelu(l), a.fch(l), N * 4 * C, s); }
        if (recompute >= 2) { layernorm_forward(a.ln1(l), a.ln1mean(l), a.ln1rstd(l), a.sum1(l), p.ln1w(l), p.ln1b(l), N, C, eps, s); }
        device_zero(a.dsum(), bytes, s);
        /* 9 */ layernorm_backward(a.dsum(), d.ln2w(l), d.ln2b(l), a.scratch(), a.dresidual(), a.sum2(l), a.ln2mean(l), a.ln2rstd(l), p.ln2w(l), N, C, s);
        /* 8 */ matmul_backward(a.dfch(), d.fcprojw(l), d.fcprojb(l), a.scratch(), a.dsum(), nullptr,
                                view(a.fchgelu(l), N, 4 * C), view(p.fcprojw(l), C, 4 * C), s);
        /* 7 */ gelu_erf_backward(a.dfch(), a.dfch(), a.fch(l), N * 4 * C, s);
        /* 6 */ matmul_backward(a.dresidual(), d.fcw(l), d.fcb(l), a.scratch(), a.dfch(), a.dsum(),
                                view(a.ln1(l), N, C), view(p.fcw(l), 4 * C, C), s);
        device_zero(a.dsum(), bytes, s);
        /* 5 */ layernorm_backward(a.dsum(), d.ln1w(l), d.ln1b(l), a.scratch(), a.dresidual(), a.sum1(l), a.ln1mean(l), a.ln1rstd(l), p.ln1w(l), N, C, s);
        /* 4 */ matmul_backward(a.datty(), d.attprojw(l), d.attprojb(l), a.scratch(), a.dsum(), nullptr,
                                view(a.atty(l), N, C), view(p.attprojw(l), C, C), s);
        /* 3 */ attention_backward<false>(a.dqkv(), a.scratch(), a.datty(), a.qkv(l), a.atty(l), a.lse(l), position, B, T, s);
        /* 2 */ with_position(position, [&](auto pos) { pos.prepare_backward(a.dqkv(), a.qkv(l), B, T, s); });
        /* 1 */ matmul_backward(a.dresidual(), d.qkvw(l), d.qkvb(l), a.scratch(), a.dqkv(), a.dsum(),
                                view(x, N, C), view(p.qkvw(l), OC, C), s);
    }
    device_zero(a.dsum(), bytes, s);
    layernorm_backward(a.dsum(), d.embw(), d.embb(), a.scratch(), a.dresidual(), a.encoded(), a.embmean(), a.embrstd(), p.embw(), N, C, s);
    add_row_backward(d.typew(), a.scratch(), a.dsum(), N, C, s);
    with_position(position_view(model, acts, 0, B, T, grads), [&](auto pos) { pos.embed_backward(a.dsum(), B, T, s); });
    embedding_backward(d.wte(), a.dsum(), acts.batch.tokens, acts.batch.rows, acts.batch.first, acts.batch.groups, C, s);
}

// ----------------------------------------------------------------------------------------------------------
// a step of masked language modelling

// Loads (B,T) tokens and the rows that have a target; lengths (B) or null: all T. Returns how many targets there are.
size_t load_batch(BERT& model, Activations& acts, size_t slot, size_t of, const int* tokens, const int* targets, const int* lengths, int B, int T,
                  bool backward, std::vector<int>& picked) {
    const size_t N = (size_t)B * T;
    std::vector<int> wanted;
    picked.clear();
    for (size_t n = 0; n < N && targets != nullptr; n++) {
        if (targets[n] == IGNORE_INDEX) { continue; }
        picked.push_back((int)n);
        wanted.push_back(targets[n]);
    }
    acts.batch.load(slot, of, tokens, nullptr, N, backward, model.stream);
    acts.batch.pick(slot, picked.data(), wanted.data(), wanted.size(), lengths, (size_t)B, model.stream);
    acts.kv_len = lengths != nullptr ? acts.batch.lengths : nullptr;
    return wanted.size();
}

// what is asked about the tokens of a stream: those that its positions choose, whatever the window
void set_targets(const BERT& model, const int* stream, uint64_t start, int n, int* tokens, int* targets) {
    mask_tokens(model.config.special, 0, EVALUATION_SAMPLE, start, n, stream, tokens, targets, model.config.mask_share);
}

// losses and hits (B,T) on the host, 0 where nothing is asked; hits may be null. lengths (B) or null: all T
void forward_losses(BERT& model, Activations& acts, const int* tokens, const int* targets, const int* lengths, int B, int T, float* losses, float* hits) {
    std::vector<int> picked;
    const size_t N = (size_t)B * T, M = load_batch(model, acts, 0, 1, tokens, targets, lengths, B, T, false, picked);
    std::vector<float> host(M);
    bert_forward(model, acts, B, T);
    bert_head(model, acts, M, nullptr, nullptr, 0.0f);
    for (float* out : {losses, hits}) {
        if (out == nullptr) { continue; }
        copy_to_host(host.data(), out == losses ? acts.a.losses() : acts.a.hits(), sizeof(float) * M, model.stream);
        std::fill(out, out + N, 0.0f);
        for (size_t k = 0; k < M; k++) { out[picked[k]] = host[k]; }
    }
}

// The mean loss of a step of `micro_batches` x (B,T) tokens over its masked ones, and its gradient.
StepGradient bert_gradient(BERT& model, Activations& acts, const int* tokens, const int* targets, const int* lengths, int micro_batches,
                           int recompute) {
    const int B = acts.B, T = acts.T;
    const size_t N = (size_t)B * T, counted = count_targets(targets, N * micro_batches);
    const float dloss = counted > 0 ? (float)(1.0 / (double)counted) : 0.0f;
    std::vector<int> picked;
    for (int i = 0; i < micro_batches; i++) {
        const size_t M = load_batch(model, acts, (size_t)i, (size_t)micro_batches, tokens + i * N, targets + i * N,
                                    lengths == nullptr ? nullptr : lengths + (size_t)i * B, B, T, true, picked);
        float* grads = gradient_begin(model);
        BERTParams<float> d;
        bert_point(d, model.table, grads);
        bert_forward(model, acts, B, T);
        device_zero(acts.a.dresidual(), sizeof(floatX) * N * model.config.C, model.stream);
        bert_head(model, acts, M, &d, acts.a.dresidual(), dloss);
        bert_backward(model, acts, grads, B, T, recompute);
        loss_sum(model.loss_sums + i, acts.a.losses(), M, model.stream);
        gradient_add(model, i, micro_batches);
    }
    return gradient_end(model, micro_batches, counted);
}

// ----------------------------------------------------------------------------------------------------------
// contrastive fine-tuning and embeddings

// out (rows,C) float32, on the device: the embeddings of ids (rows,T) with lengths (rows)
void bert_embed(float* out, BERT& model, Activations& acts, size_t slot, size_t of, const int* ids, const int* lengths, int rows, int T, bool backward) {
    std::vector<int> none;
    load_batch(model, acts, slot, of, ids, nullptr, lengths, rows, T, backward, none);
    bert_forward(model, acts, rows, T);
    pooling_forward(out, acts.a.ln2(model.config.L - 1), acts.batch.lengths, rows, T, model.config.C, model.pooling, model.stream);
}

// out (rows,C) on the host
void embed_documents(BERT& model, Activations& acts, const int* ids, const int* lengths, int rows, int T, float* out) {
    float* pooled = (float*)acts.a.fch();       // which nobody reads any more, and which is larger
    bert_embed(pooled, model, acts, 0, 1, ids, lengths, rows, T, false);
    copy_to_host(out, pooled, sizeof(float) * rows * model.config.C, model.stream);
}

// What a step of contrastive learning holds besides the activations of a chunk: embeddings and their gradients, of all
// rows.
struct ContrastiveBuffers {
    float *emb = nullptr, *demb = nullptr, *losses = nullptr, *scratch = nullptr;
    static size_t bytes(int Q, int M, int C) { return sizeof(float) * (2 * (size_t)(Q + M) * C + Q + contrastive_scratch(Q, M, C)); }
    void allocate(int Q, int M, int C) {
        emb = (float*)device_malloc(bytes(Q, M, C));
        demb = emb + (size_t)(Q + M) * C;
        losses = demb + (size_t)(Q + M) * C;
        scratch = losses + Q;
    }
    void release() { device_free(emb); }
};

// The mean loss of a step's groups, and its gradient. All rows are embedded first, a chunk of acts.B at a time; then
// the loss gives the gradient of every embedding, and each chunk is run again, forward and backward. So memory does not
// grow with the batch, and its gradient is that of one large batch (Gao et al. 2021).
StepGradient contrastive_gradient(BERT& model, Activations& acts, const ContrastiveBuffers& c, const GroupBatch& batch, double tau, int recompute) {
    const int Q = batch.groups, rows = batch.rows, C = model.config.C, T = batch.T, chunks = ceil_div(rows, acts.B);
    auto embed = [&](int i, bool backward) {
        const int first = i * acts.B, n = std::min(acts.B, rows - first);
        const size_t slot = (size_t)(backward && chunks > 1 ? chunks + i : i);
        bert_embed(c.emb + (size_t)first * C, model, acts, slot, 2 * (size_t)chunks, batch.ids.data() + (size_t)first * T,
                   batch.lengths.data() + first, n, T, backward);
        return n;
    };
    for (int i = 0; i < chunks; i++) { embed(i, chunks == 1); }
    contrastive_forward_backward(c.losses, c.demb, c.scratch, c.emb, Q, rows - Q, C, (float)tau, 1.0f / (float)Q, model.stream);
    loss_sum(model.loss_sums, c.losses, (size_t)Q, model.stream);
    for (int i = 0; i < chunks; i++) {
        const int n = chunks == 1 ? rows : embed(i, true);
        float* grads = gradient_begin(model);
        pooling_backward(acts.a.dresidual(), c.demb + (size_t)i * acts.B * C, acts.batch.lengths, n, T, C, model.pooling, model.stream);
        bert_backward(model, acts, grads, n, T, recompute);
        gradient_add(model, i, chunks);
    }
    return gradient_end(model, 1, (size_t)Q);
}

// ----------------------------------------------------------------------------------------------------------
// main

const std::vector<ModelSize> bert_sizes = {{"tiny", 2, 2, 128}, {"mini", 4, 4, 256}, {"small", 4, 8, 512}, {"base", 12, 12, 768}};

// With the pooling that --pairs trained, if it did, so that retrieval and encoding take no other one unasked.
Json bert_json(const BERTConfig& c) {
    Json j = bert_config(c.V, c.position.T_train, c.C, c.L, c.NH, c.special.pad, position_json(c.position));
    if (!c.pooling.empty()) { j["pooling"] = c.pooling; }
    return j;
}

// logits (masked, V): of the tokens of one sequence that are [MASK]
std::vector<std::vector<float>> masked_logits(BERT& model, Activations& acts, const std::vector<int>& ids) {
    const int V = model.config.V, Vp = model.config.Vp();
    std::vector<int> targets, picked;
    for (int id : ids) { targets.push_back(id == model.config.special.mask ? 0 : IGNORE_INDEX); }
    const size_t M = load_batch(model, acts, 0, 1, ids.data(), targets.data(), nullptr, 1, (int)ids.size(), false, picked);
    check(M <= (size_t)acts.chunk, "--predict: %zu [MASK]s at once, at most %d are possible", M, acts.chunk);
    bert_forward(model, acts, 1, (int)ids.size());
    bert_head(model, acts, M, nullptr, nullptr, 0.0f);
    std::vector<floatX> rows(M * (size_t)Vp);
    copy_to_host(rows.data(), acts.a.logits(), sizeof(floatX) * rows.size(), model.stream);
    std::vector<std::vector<float>> logits;
    for (size_t k = 0; k < M; k++) { logits.emplace_back(rows.begin() + (long)(k * Vp), rows.begin() + (long)(k * Vp + V)); }
    return logits;
}

// --predict: the five likeliest tokens for each [MASK]
void predict(BERT& model, const std::string& text, const Tokenizer& tokenizer) {
    const std::vector<int> ids = text_ids(text, model.config.special, tokenizer);
    Activations acts = activations_describe(model, 1, (int)ids.size(), Purpose::Evaluate, 0);
    activations_allocate(acts);
    const std::vector<std::vector<float>> logits = masked_logits(model, acts, ids);
    acts.release();
    printf("%s\n", text.c_str());
    for (size_t k = 0; k < logits.size(); k++) {
        const std::vector<float>& x = logits[k];
        std::vector<int> order(x.size());
        std::iota(order.begin(), order.end(), 0);
        const int most = std::min(5, (int)x.size());
        std::partial_sort(order.begin(), order.begin() + most, order.end(), [&](int a, int b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
        const double largest = x[order[0]];
        double sum = 0;
        for (float v : x) { sum += std::exp(v - largest); }
        printf("  [MASK] %zu:", k + 1);
        for (int i = 0; i < most; i++) {
            const std::string token = order[i] < tokenizer.vocab_size() ? tokenizer.decode(order[i], true) : strprintf("<%d>", order[i]);
            const bool part = token.size() == 1 && (unsigned char)token[0] >= 128;      // of a character
            const std::string shown = part ? strprintf("\\x%02x", (unsigned char)token[0]) : printable(token);
            printf("  %s %.1f%%", shown.c_str(), 100 * std::exp(x[order[i]] - largest) / sum);
        }
        printf("\n");
    }
    fflush(stdout);
}

// Lengths and a text that the encoding cannot reach are refused before the weights are read.
void check_reach(const Options& o, const BERTConfig& c, const Tokenizer* tokenizer) {
    const int reach = position_max_length(c.position), shortest = o.eval_lengths.empty() ? 0 :
        o.encode.empty() ? *std::min_element(o.eval_lengths.begin(), o.eval_lengths.end()) : o.eval_lengths[0];
    const size_t text = o.is_given("predict") ? text_ids(o.predict, c.special, *tokenizer).size() : 0;
    check(shortest <= reach, "--eval_lengths: %s has no positions beyond %d, and %d are wanted", c.position.name.c_str(), reach, shortest);
    check(text <= (size_t)reach, "--predict: the text is %zu tokens, but %s has no positions beyond %d", text, c.position.name.c_str(), reach);
}

// Embeddings of a collection, its documents cut to max_tokens
Embeddings encode(BERT& model, const Documents& documents, int max_tokens) {
    Activations acts = activations_describe(model, std::max(1, EVALUATION_TOKENS / max_tokens), max_tokens, Purpose::Evaluate, 0);
    activations_allocate(acts);
    Embeddings e = encode_documents(model, acts, documents, max_tokens);
    acts.release();
    return e;
}

// The collections that are asked for, opened and checked before any work
struct Collections {
    std::unique_ptr<Documents> encode, corpus, queries;
    Qrels qrels;
    Collections(const Options& o, const SpecialTokens& special) {
        if (!o.encode.empty()) { encode = std::make_unique<Documents>(o.encode, "--encode", special, 1); }
        if (o.corpus.empty()) { return; }
        queries = std::make_unique<Documents>(o.queries, "--queries", special, 1);
        corpus = std::make_unique<Documents>(o.corpus, "--corpus", special, 1);
        qrels = read_qrels(o.qrels);
    }
};

// What is to be done with a trained model: --eval_lengths, --encode, --corpus, --predict
void use_model(BERT& model, const Run& run, const TokenFiles* val, const Collections& collections) {
    const Options& o = run.o;
    const std::vector<int> lengths = o.eval_lengths.empty() ? std::vector<int>{o.T} : o.eval_lengths;
    if (!o.eval_lengths.empty() && collections.corpus == nullptr && collections.encode == nullptr) {
        evaluate_lengths(model, *val, o.eval_lengths, o.stride, (uint64_t)o.eval_tokens, o.curve, *run.log);
    }
    if (collections.encode != nullptr) {
        const Embeddings e = encode(model, *collections.encode, lengths[0]);
        const std::string path = o.out + "/embeddings.safetensors";
        write_embeddings(path, e, {{"max_tokens", std::to_string(lengths[0])}, {"pooling", o.pooling}});
        printf("wrote %s: %zu embeddings of %d channels\n", path.c_str(), e.size(), e.C);
    }
    for (int T : lengths) {
        if (collections.corpus == nullptr) { break; }
        if (T > position_max_length(model.config.position)) {
            printf("%8d: %s has no positions beyond %d\n", T, model.config.position.name.c_str(), position_max_length(model.config.position));
            continue;
        }
        Embeddings queries = encode(model, *collections.queries, T), corpus = encode(model, *collections.corpus, T);
        printf("max length %d\n", T);
        Json j = report_retrieval(evaluate_retrieval(queries, corpus, collections.qrels));
        j["T"] = T;
        j["pos"] = model.config.position.name;
        run.log->record(j);
    }
    if (o.is_given("predict")) { predict(model, o.predict, *run.tokenizer); }
}

// Trains from the run's state to o.steps; returns the exit code. `pairs`: contrastively on these, else on masked tokens
// of `files`.
int train(BERT& model, Activations& acts, Run& run, const TokenFiles* files, const TokenFiles* val, const Documents* pairs) {
    const Options& o = run.o;
    const int B = acts.B, T = acts.T;
    std::vector<int> ids(pairs != nullptr ? 0 : (size_t)run.my_samples * T), tokens(ids.size()), targets(ids.size());
    const double C = model.config.C, token_flops = flops_per_token(model.config.L * C * (model.OC + 9 * C), model.config.L, (int)C, T, false);
    GroupBatch batch;
    ContrastiveBuffers buffers;
    if (pairs != nullptr) { buffers.allocate(run.samples, run.samples * (pairs->group - 1), (int)C); }
    int code;
    for (;;) {
        const int64_t step = run.state.step;
        if (val != nullptr && o.val_every > 0 && (step >= o.steps || step % o.val_every == 0)) {
            const uint64_t limit = o.val_batches < 0 ? 0 : (uint64_t)o.val_batches * B * T;
            const Evaluation e = evaluate(model, acts, *val, T, 0, limit);
            printf("%s | %.2f%% right\n", val_line(step, o.steps, e.loss).c_str(), 100 * e.accuracy);
            run.log->val(step, e.loss, e.accuracy);
        }
        code = save_or_leave(run, model, bert_json(model.config));
        if (code >= 0) { break; }
        const double start = wall_seconds();
        const uint64_t sample = run.first_sample();
        double tokens_done = (double)o.total_batch;
        StepGradient gradient;
        if (pairs != nullptr) {
            fill_groups(*pairs, sample, run.samples, (uint64_t)o.seed, !o.overfit, T, batch);
            gradient = contrastive_gradient(model, acts, buffers, batch, o.tau, o.recompute);
            tokens_done = std::accumulate(batch.lengths.begin(), batch.lengths.end(), 0.0);
        } else {
            fill_batch(*files, T, sample, run.my_samples, (uint64_t)o.seed, !o.overfit, ids.data(), targets.data());
            for (int i = 0; i < run.my_samples; i++) {
                const size_t row = (size_t)i * T;
                mask_tokens(model.config.special, (uint64_t)o.seed, sample + (uint64_t)i, 0, T, &ids[row], &tokens[row], &targets[row], o.mask_share);
            }
            gradient = bert_gradient(model, acts, tokens.data(), targets.data(), nullptr, run.micro_batches, o.recompute);
        }
        finish_step(run, model, gradient, start, tokens_done, token_flops);
    }
    buffers.release();
    return code;
}

std::string bert_help() {
    return "Trains a BERT with any of these positional encodings (--pos), and evaluates it:\n" + position_help() + "\n" +
           sizes_help(bert_sizes) + "\n"
           "Train on your own text, and save every 500 steps; --resume 1 continues an interrupted run:\n"
           "  ./train_bert --train_files a.txt --val_files b.txt --model 2,4,64 --T 128 --B 16 --steps 1000 \\\n"
           "               --lr 2e-3 --warmup 100 --final_lr 0.1 --pos cable --out run/bert --checkpoint_every 500\n"
           "Measure how far it extrapolates beyond the length it was trained at:\n"
           "  ./train_bert --load run/bert/step_00001000 --val_files b.txt --eval_lengths 128,256,512\n"
           "Fill in the blanks:\n"
           "  ./train_bert --load run/bert/step_00001000 --predict \"the [MASK]at sat on the mat\"\n";
}

int bert_main(int argc, char** argv) {
    Run run;
    Options& o = run.o;
    o = parse_options(argc, argv, BERT_FLAG);
    if (o.help) {
        printf("%s", help_text("train_bert", bert_help(), BERT_FLAG).c_str());
        return 0;
    }
    // 1. what to do, and with which data
    check(o.corpus.empty() == o.queries.empty() && o.corpus.empty() == o.qrels.empty(), "--corpus, --queries and --qrels go together");
    check(o.encode.empty() || !o.out.empty(), "--encode: give the directory to write to with --out");
    check((o.encode.empty() && o.corpus.empty()) || std::none_of(o.eval_lengths.begin(), o.eval_lengths.end(), [](int T) { return T < 2; }),
          "--eval_lengths: a document has at least [CLS] and [SEP], so 2 tokens");
    check(!o.is_given("predict") || o.predict.find("[MASK]") != std::string::npos, "--predict: there is no [MASK] in the text");
    check(o.pairs.empty() || !o.is_given("val_every") || o.val_every == 0, "--val_every: --pairs has no validation; --corpus, --queries and --qrels "
          "measure what it learns");
    check(comm().size == 1 || (o.pairs.empty() && o.encode.empty() && o.corpus.empty() && !o.is_given("predict")),
          "--pairs, --encode, --corpus, --predict: with one process, not with mpirun");
    begin_run(run, !o.eval_lengths.empty() || !o.encode.empty() || !o.corpus.empty() || o.is_given("predict"),
              "--eval_lengths, --encode, --corpus and --predict");
    std::unique_ptr<TokenFiles> files, val;
    const bool reads = o.list ? o.is_given("train_files") : run.trains && o.pairs.empty();
    if (reads) { files = open_tokens(o, "--train_files"); }
    const bool evaluates = !o.eval_lengths.empty() && o.corpus.empty() && o.encode.empty();
    const bool validates = !o.list && (evaluates || (run.trains && o.pairs.empty() && o.val_every > 0));
    if (validates) { val = open_tokens(o, "--val_files", files ? files->vocab : 0); }
    const int vocab = files ? files->vocab : val ? val->vocab : 0;
    // 2. the model
    BERTConfig config;
    parse_model(o.model, "bert:", bert_sizes, config);
    config = resolve_config(o, config, run.source, vocab == 256 ? BYTE_VOCAB : vocab, BERT_KEYS);
    if (config.V == 0) { config.V = o.pairs.size() > 4 && o.pairs.compare(o.pairs.size() - 4, 4, ".txt") == 0 ? BYTE_VOCAB : BERT_VOCAB; }
    run.tokenizer = o.list ? nullptr : find_tokenizer(o.tokenizer, run.source, config.V == BYTE_VOCAB ? 256 : config.V);
    if (!run.source.empty() && !o.is_given("pooling")) {
        const Json j = read_config(run.source, BERT_KEYS);
        if (j.contains("pooling")) { set_option(o, "pooling", run.source + ": pooling", json_string(j, "pooling", run.source)); config.pooling = o.pooling; }
    }
    if (!o.pairs.empty() && run.trains) { config.pooling = o.pooling; }
    config.special = run.tokenizer != nullptr ? special_tokens(*run.tokenizer) : special_tokens(config.V);
    config.mask_share = o.mask_share;
    std::unique_ptr<Documents> pairs;
    if (!o.pairs.empty() && !o.list && run.trains) {
        pairs = std::make_unique<Documents>(o.pairs, "--pairs", config.special);
        check(pairs->group >= 2, "--pairs %s: single documents; groups of a query, its positive and negatives are wanted", o.pairs.c_str());
    }
    const bool counts = o.steps < 0 && (pairs != nullptr || files != nullptr);
    plan_steps(run, config, !counts ? 0 : pairs != nullptr ? pairs->groups() : files->windows(config.T));
    if (pairs != nullptr) {
        check((size_t)run.samples <= pairs->groups(), "--total_batch %lld is %d groups at --T %d, but --pairs %s has %zu", (long long)o.total_batch,
              run.samples, o.T, o.pairs.c_str(), pairs->groups());
        run.micro_batches = ceil_div(run.samples * pairs->group, o.B);
    }
    std::unique_ptr<Collections> collections;
    if (!o.list) { collections = std::make_unique<Collections>(o, config.special); }
    check(!o.is_given("predict") || o.list || (run.tokenizer != nullptr && run.tokenizer->cannot_encode.empty()),
          "--predict: a text wants a vocabulary; give it with --tokenizer");
    if (!o.list) { check_reach(o, config, run.tokenizer.get()); }
    BERT model;
    model.pooling = o.pooling == "cls" ? Pooling::Cls : Pooling::Mean;
    bert_describe(model, config);
    Activations acts = activations_describe(model, o.B, o.T, run.trains ? Purpose::Train : Purpose::Evaluate, o.recompute);
    if (o.list) { print_tensors(model.table, model.files); return 0; }
    const size_t buffers = pairs != nullptr ? ContrastiveBuffers::bytes(run.samples, run.samples * (pairs->group - 1), config.C) : 0;
    if (files != nullptr) { run.data = data_text(run, thousands(files->tokens) + " tokens", epoch_samples(*files, o.T)); }
    if (pairs != nullptr) { run.data = data_text(run, thousands(pairs->groups()) + " groups", pairs->groups()); }
    report_run(run, model, config, acts.bytes(), buffers);
    if (files != nullptr) { files->windows(o.T); }              // one at least, before anything is written
    if (o.check) { return report_check(run, pairs != nullptr ? strprintf("%d groups", run.samples) : strprintf("%lld tokens", (long long)o.total_batch)); }
    // 3. the weights
    load_run(run, model, bert_json(config), optional_files(model));
    bert_point(model.params, model.table, model.weights);
    // 4. the work
    int code = 0;
    if (run.trains) {
        catch_signals();
        activations_allocate(acts);
        code = train(model, acts, run, files.get(), pairs != nullptr ? nullptr : val.get(), pairs.get());
        acts.release();
        release_signals();
    }
    if (code == 0) { use_model(model, run, val.get(), *collections); }
    parameters_free(model);
    return code;
}

int main(int argc, char** argv) {
    wait_politely(argv);
    return run_program(bert_main, argc, argv);
}
