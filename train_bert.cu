// train_bert.cu -- trains a BERT with any positional encoding of llmc/position/table.h: masked language modelling, and
// contrastive fine-tuning on (query, positive, negatives), whose step is in llmc/lab/embed.h.
//
// Read it beside train_gpt2.cu: the same layers, in another order. BERT is bidirectional, normalizes after each
// residual (post-LN), and predicts only the tokens that were masked.
//
//   N = B * T     rows: the tokens of B sequences of T         L, NH, HS   layers, heads, channels per head
//   C = NH * HS   channels                                     V, Vp       vocabulary, padded to a multiple of 128
//   OC            columns of qkv: 3 C for q, k and v, then the encoding's columns; a row takes qkv_row(OC) elements
//   M, R          rows with a target; rows of the head at a time

// In the order of a run:
#include "llmc/engine/config.h"                     // the model's shape and encoding: flags over config.json
#include "llmc/engine/data.h"                       // the tokens of a step, from shards or text
#include "llmc/engine/model.cuh"                    // a batch on the device, and its activations
#include "llmc/embedding.cuh"                       // the embedding: rows of wte for the tokens and of typew for types
#include "llmc/matmul.cuh"                          // steps 1, 4, 6 and 8, and in the head: matrix products
#include "llmc/position/table.h"                    // step 2: the positional encodings
#include "llmc/attention.cuh"                       // step 3: attention over a sequence
#include "llmc/attention/choose.cuh"                //         the choice between attention's kernels
#include "llmc/layernorm.cuh"                       // steps 5 and 9, after the embedding and in the head: normalization
#include "llmc/gelu.cuh"                            // step 7, and in the head: the nonlinearity
#include "llmc/classifier.cuh"                      // the losses of the logits, and their gradient
#include "llmc/engine/parameters.cuh"               // weights and gradients: memory, sums over micro-batches and ranks
#include "llmc/engine/schedule.h"                   // the learning rate, and the guard that may skip an update
#include "llmc/adamw.cuh"                           // the update
#include "llmc/engine/run.h"                        // the rest of a run: signals, checkpoints, logs, the exit code
#include "llmc/lab/embed.h"                         // contrastive training; uses of the trained model

// ----------------------------------------------------------------------------------------------------------
// the tensors

struct BERTConfig : ModelConfig {                       // T, V, L, NH, C and the encoding: engine/config.h
    SpecialTokens special;                              // [CLS], [SEP], [MASK], [PAD]
    double mask_share = 0.15;                           // of the tokens: masked, and predicted
    static constexpr bool causal = false;               // a token sees the whole sequence
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

// The same tensors in a checkpoint: NAME.weight and NAME.bias, by Hugging Face's names; linear weights are (out, in).
#define BERT_FILES(F) \
    /* name                         weight    bias      row0   rows */ \
    F("attention.self.query",       qkvw,     qkvb,     0,     C)     \
    F("attention.self.key",         qkvw,     qkvb,     C,     C)     \
    F("attention.self.value",       qkvw,     qkvb,     2 * C, C)     \
    F("attention.output.dense",     attprojw, attprojb, 0,     C)     \
    F("attention.output.LayerNorm", ln1w,     ln1b,     0,     C)     \
    F("intermediate.dense",         fcw,      fcb,      0,     4 * C) \
    F("output.dense",               fcprojw,  fcprojb,  0,     C)     \
    F("output.LayerNorm",           ln2w,     ln2b,     0,     C)

// The activations. Scratch: one buffer that all layers share. Saved, Cached: a buffer per layer while training, for the
// backward. Backward: one buffer, only while training. --recompute turns Saved tensors into Scratch, and the backward
// computes them again. The variables in `rows` and `cols` are explained at the top, or in activations_describe.
#define BERT_ACTS(X) \
    /* type   name        keep                                            rows    cols */ \
    X(floatX, encoded,    Keep::Scratch,                                  N,      C)      \
    X(floatX, emb,        Keep::Scratch,                                  N,      C)      \
    X(float,  embmean,    Keep::Scratch,                                  N,      0)      \
    X(float,  embrstd,    Keep::Scratch,                                  N,      0)      \
    X(floatX, qkv,        Keep::Cached,                                   N,      row)    \
    X(float,  lse,        Keep::Saved,                                    B * NH, T)      \
    X(float,  attscratch, Keep::Scratch,                                  attention_floats, 0) \
    X(floatX, atty,       Keep::Saved,                                    N,      C)      \
    X(floatX, sum1,       Keep::Saved,                                    N,      C)      \
    X(floatX, ln1,        recompute < 2 ? Keep::Saved : Keep::Scratch,    N,      C)      \
    X(float,  ln1mean,    Keep::Saved,                                    N,      0)      \
    X(float,  ln1rstd,    Keep::Saved,                                    N,      0)      \
    X(floatX, fch,        Keep::Saved,                                    N,      4 * C)  \
    X(floatX, fchgelu,    recompute < 1 ? Keep::Saved : Keep::Scratch,    N,      4 * C)  \
    X(floatX, sum2,       Keep::Saved,                                    N,      C)      \
    X(floatX, ln2,        Keep::Saved,                                    N,      C)      \
    X(float,  ln2mean,    Keep::Saved,                                    N,      0)      \
    X(float,  ln2rstd,    Keep::Saved,                                    N,      0)      \
    X(floatX, picked,     Keep::Scratch,                                  R,      C)      \
    X(floatX, headh,      Keep::Scratch,                                  R,      C)      \
    X(floatX, headgelu,   Keep::Scratch,                                  R,      C)      \
    X(floatX, headln,     Keep::Scratch,                                  R,      C)      \
    X(float,  headmean,   Keep::Scratch,                                  R,      0)      \
    X(float,  headrstd,   Keep::Scratch,                                  R,      0)      \
    X(floatX, logits,     Keep::Scratch,                                  R,      Vp)     \
    X(float,  losses,     Keep::Scratch,                                  N,      0)      \
    X(float,  hits,       Keep::Scratch,                                  N,      0)      \
    /* gradients of activations, one buffer each for all layers */ \
    X(floatX, dresidual,  Keep::Backward,                                 N,      C)      \
    X(floatX, dsum,       Keep::Backward,                                 N,      C)      \
    X(floatX, datty,      Keep::Backward,                                 N,      C)      \
    X(floatX, dfch,       Keep::Backward,                                 N,      4 * C)  \
    X(floatX, dqkv,       Keep::Backward,                                 N,      row)    \
    X(floatX, dhead,      Keep::Backward,                                 R,      C)      \
    X(floatX, dheadgelu,  Keep::Backward,                                 R,      C)      \
    X(float,  scratch,    Keep::Backward,                                 scratch_floats, 0)

template <class T> struct BERTParams {
#define X(name, ...) LayerPointer<T> name;
    BERT_PARAMS(X)
#undef X
};

struct BERTActs {
#define X(type, name, ...) LayerPointer<type> name;
    BERT_ACTS(X)
#undef X
};

using Activations = ActivationsOf<BERTActs>;

struct BERT : Parameters {
    BERTConfig config;
    int OC = 0;                                         // the largest of all layers
    std::vector<int> columns_of;                        // (L): extra columns of each layer's encoding
    BERTParams<floatX> params;
    Pooling pooling = Pooling::Mean;
    bool trains_head = true;                            // pairs leave it alone
};

// The encoding's tensors. B, T: capacity of the activations; 0: only the parameters are used
PositionTables bert_position(const BERTConfig& c, int B, int T) {
    const PositionNames names = {"bert.encoder.layer.", ".attention.self.", "bert.",
                                 "embeddings.position_embeddings.weight"};
    return position_tables(c.position, position_shape(c, B, T), names);
}

// Fills in the tables of a model's tensors: shapes, initial values, names in files. Allocates nothing.
void bert_describe(BERT& model, const BERTConfig& config) {
    model.config = config;
    const int V = config.V, Vp = config.Vp();
    const int L = config.L, C = config.C;
    const PositionTables position = bert_position(config, 0, 0);
    const int OC = model.OC = qkv_columns(C, position.extra_columns);
    model.columns_of = position.columns_of;
    model.table = TensorTable();
#define X(name, layers, rows, cols, init, decay) \
    model.table.add({#name, layers, (size_t)(rows), (size_t)(cols), init, decay});
    BERT_PARAMS(X)
#undef X
    model.files = {{"bert.embeddings.word_embeddings.weight", "wte", 0, 0, (size_t)V, false},
                   {"bert.embeddings.token_type_embeddings.weight", "typew", 0, 0, 2, false}};
    model.add_files("bert.embeddings.LayerNorm", "embw", "embb", 0, 0, C, false);
    model.add_files("cls.predictions.transform.dense", "headw", "headb", 0, 0, C, false);
    model.add_files("cls.predictions.transform.LayerNorm", "headlnw", "headlnb", 0, 0, C, false);
    model.files.push_back({"cls.predictions.bias", "decoderb", 0, 0, (size_t)V, false});
    for (int l = 0; l < L; l++) {
        const std::string layer = "bert.encoder.layer." + std::to_string(l) + ".";
#define F(name, weight, bias, row0, rows) model.add_files(layer + name, #weight, #bias, l, row0, rows, false);
        BERT_FILES(F)
#undef F
    }
    complete_tables(model, position.params, position.files);
}

// Points p at the tensors in `data`, which is laid out as the table says: weights, or their gradients.
template <class T> void bert_point(BERTParams<T>& p, const TensorTable& table, T* data) {
#define X(name, ...) p.name = table.pointer(data, #name);
    BERT_PARAMS(X)
#undef X
}

// Describes the activations of `batch` sequences of `length` tokens; allocates nothing.
Activations activations_describe(const BERT& model, int batch, int length, Purpose purpose, int recompute) {
    Activations acts;
    acts.set_shape(batch, length, purpose);
    const BERTConfig& g = model.config;
    const int NH = g.NH, C = g.C;
    const int HS = C / NH;
    const int OC = model.OC, row = qkv_row(OC);
    const int Vp = g.Vp();
    const size_t B = (size_t)batch, T = (size_t)length;
    const size_t N = B * T;
    const size_t R = purpose == Purpose::Train && !model.trains_head ? 0 : logit_rows(N, Vp, C, purpose);
    // for one use at a time: column sums, or what the backward of attention or of the embedding needs
    const size_t columns = (size_t)std::max({OC, 4 * C, R > 0 ? Vp : 0});
    const size_t scratch_floats = std::max({MAX_SLABS * columns, embedding_backward_scratch(N, C),
                                            attention_backward_scratch(g.position, batch, length, NH, HS)});
    const size_t attention_floats = attention_forward_scratch(batch, length, NH);
    acts.chunk = (int)R;
#define X(type, name, keep, rows, cols) acts.add(#name, keep, g.L, rows, cols, sizeof(type));
    BERT_ACTS(X)
#undef X
    acts.add_position(bert_position(g, batch, length));
    return acts;
}

// Allocates the activations, or lays them out in `memory`, and points acts.a at them.
void activations_allocate(Activations& acts, float* memory = nullptr) {
    memory == nullptr ? acts.allocate() : acts.place(memory);
#define X(type, name, ...) acts.point(acts.a.name, #name);
    BERT_ACTS(X)
#undef X
}

// ----------------------------------------------------------------------------------------------------------
// forward

// acts.batch.tokens (B,T) -> the hidden states ln2(L-1) (B,T,C).
void bert_forward(BERT& model, Activations& acts, int B, int T) {
    const BERTParams<floatX>& p = model.params;
    const BERTActs& a = acts.a;
    const int L = model.config.L, C = model.config.C;
    const size_t N = (size_t)B * T;
    const float eps = 1e-12f;
    Stream s = model.stream;

    layer_ready(model, -1);                                     // several ranks: wait for the other ranks' updates
    embedding_forward(a.encoded(), acts.batch.tokens, p.wte(), N, C, s);                            // (B,T,C)
    // learned and sinusoidal encodings add a row per position; other encodings do nothing here
    layer_position(model, acts, 0, T).embed_forward(a.encoded(), B, T, 0, s);
    add_row(a.encoded(), p.typew(), N, C, s);                   // every token is of type 0
    layernorm_forward(a.emb(), a.embmean(), a.embrstd(), a.encoded(), p.embw(), p.embb(), N, C, eps, s);
    for (int l = 0; l < L; l++) {
        const floatX* x = l == 0 ? a.emb() : a.ln2(l - 1);                                          // (B,T,C)
        const LayerPosition position = layer_position(model, acts, l, T);
        layer_ready(model, l);
        // 1 one product makes q, k, v and the encoding's columns                                    (B,T,OC)
        matmul_forward(a.qkv(l), view(x, N, C), view(p.qkvw(l), position.columns(), C), p.qkvb(l), nullptr, s,
                       position.row());
        // 2 the encoding prepares what its bias reads: rope rotates q and k, cable sums S over time and finds g
        position.prepare_forward(a.qkv(l), B, T, 0, s);
        // 3 attention to every token of the sequence, in both directions                           (B,T,C)
        attention_forward<Mask::Both>(a.atty(l), a.lse(l), a.attscratch(), a.qkv(l), position.bias(), B, T, 0, s);
        if (acts.watch) { acts.watch(l, position.bias(), a.qkv(l), a.lse(l), B); }
        // 4 mix the heads, and add the block's input                                               (B,T,C)
        matmul_forward(a.sum1(l), view(a.atty(l), N, C), view(p.attprojw(l), C, C), p.attprojb(l), x, s);
        // 5 normalize the sum
        layernorm_forward(a.ln1(l), a.ln1mean(l), a.ln1rstd(l), a.sum1(l), p.ln1w(l), p.ln1b(l), N, C, eps, s);
        // 6 the MLP widens                                                                         (B,T,4C)
        matmul_forward(a.fch(l), view(a.ln1(l), N, C), view(p.fcw(l), 4 * C, C), p.fcb(l), nullptr, s);
        // 7 its nonlinearity: the exact GELU, not GPT-2's approximation
        gelu_forward(a.fchgelu(l), a.fch(l), N * 4 * C, Gelu::Erf, s);
        // 8 the MLP narrows, and its input is added                                                (B,T,C)
        matmul_forward(a.sum2(l), view(a.fchgelu(l), N, 4 * C), view(p.fcprojw(l), C, 4 * C), p.fcprojb(l),
                       a.ln1(l), s);
        // 9 normalize the sum
        layernorm_forward(a.ln2(l), a.ln2mean(l), a.ln2rstd(l), a.sum2(l), p.ln2w(l), p.ln2b(l), N, C, eps, s);
    }
}

// The head of masked language modelling, the one step without a mirror: the losses of the M rows that acts.batch picked
// and, when `grads` is given, their gradients, added to the head's tensors and to dhidden (B,T,C), which the caller has
// zeroed. A chunk of rows goes forward and back before the next one, so only its logits are in memory. Without `grads`
// they are float32, in the same memory. dloss: 1 / number of targets in the total batch.
void bert_head(BERT& model, Activations& acts, size_t M, const BERTParams<float>* grads, floatX* dhidden, float dloss) {
    const int V = model.config.V, Vp = model.config.Vp();
    const int L = model.config.L, C = model.config.C;
    const BERTParams<floatX>& p = model.params;
    const BERTActs& a = acts.a;
    const bool backward = grads != nullptr;
    const float eps = 1e-12f;
    Stream s = model.stream;
    const size_t chunk = (size_t)acts.chunk_of(backward);
    for (size_t n = 0; n < M; n += chunk) {
        const size_t rows = std::min(chunk, acts.batch.picks - n);      // M - n, and padding rows without a target
        float *losses = a.losses() + n, *hits = a.hits() + n;
        const int *picked = acts.batch.picked + n, *targets = acts.batch.targets + n;
        // 1 the hidden states of the masked tokens                                                 (rows,C)
        embedding_forward(a.picked(), picked, a.ln2(L - 1), rows, C, s);
        // 2 3 4 the head's own layer: product, GELU, normalization                                 (rows,C)
        matmul_forward(a.headh(), view(a.picked(), rows, C), view(p.headw(), C, C), p.headb(), nullptr, s);
        gelu_forward(a.headgelu(), a.headh(), rows * C, Gelu::Erf, s);
        layernorm_forward(a.headln(), a.headmean(), a.headrstd(), a.headgelu(), p.headlnw(), p.headlnb(), rows, C,
                          eps, s);
        // 5 logits, with the embedding as weights                                                  (rows,Vp)
        // 6 losses; the logits become their own gradient
        const Matrix<floatX> headln = view(a.headln(), rows, C), wte = view(p.wte(), Vp, C);
        if (!backward) {
            float* x = (float*)a.logits();
            matmul_float(x, headln, transposed(wte), p.decoderb(), s);
            classifier_float(losses, hits, x, targets, rows, V, Vp, s);
            continue;
        }
        matmul_forward(a.logits(), headln, wte, p.decoderb(), nullptr, s);
        classifier(losses, nullptr, a.logits(), targets, dloss, rows, V, Vp, true, s);
        const BERTParams<float>& d = *grads;
        // 5 dlogits -> dhead                                                                       (rows,C)
        matmul_backward(a.dhead(), d.wte(), d.decoderb(), a.scratch(), a.logits(), nullptr,
                        view(a.headln(), rows, C), view(p.wte(), Vp, C), s);
        // 4 3 through the normalization and GELU
        device_zero(a.dheadgelu(), sizeof(floatX) * rows * C, s);
        layernorm_backward(a.dheadgelu(), d.headlnw(), d.headlnb(), a.scratch(), a.dhead(), a.headgelu(), a.headmean(),
                           a.headrstd(), p.headlnw(), rows, C, s);
        gelu_backward(a.dheadgelu(), d.headb(), a.scratch(), a.dheadgelu(), a.headh(), rows, C, Gelu::Erf, s);
        // 2 through the product
        matmul_backward(a.dhead(), d.headw(), nullptr, a.scratch(), a.dheadgelu(), nullptr,
                        view(a.picked(), rows, C), view(p.headw(), C, C), s);
        // 1 back to the rows' places in the batch
        scatter_rows(dhidden, a.dhead(), picked, std::min(rows, M - n), C, s);
    }
}

// ----------------------------------------------------------------------------------------------------------
// backward: the forward's numbers in reverse

// At first dresidual holds the gradient of the hidden states (B,T,C). Weight gradients are added to `grads`, which is
// float32 and laid out as the parameters. layernorm_backward adds to its output, so dsum is zeroed before each call: in
// post-LN the gradient of a sum replaces the gradient of its normalization. From the sum it goes through the branch
// and, as the argument dsum of matmul_backward, around it.
void bert_backward(BERT& model, Activations& acts, float* grads, int B, int T, int recompute) {
    const BERTParams<floatX>& p = model.params;
    BERTParams<float> d;
    bert_point(d, model.table, grads);
    const BERTActs& a = acts.a;
    const int L = model.config.L, C = model.config.C;
    const size_t N = (size_t)B * T, bytes = sizeof(floatX) * N * C;
    const float eps = 1e-12f;
    Stream s = model.stream;

    for (int l = L - 1; l >= 0; l--) {
        const floatX* x = l == 0 ? a.emb() : a.ln2(l - 1);
        const LayerPosition position = layer_position(model, acts, l, T, grads);
        if (recompute >= 1) { gelu_forward(a.fchgelu(l), a.fch(l), N * 4 * C, Gelu::Erf, s); }
        if (recompute >= 2) {
            layernorm_forward(a.ln1(l), a.ln1mean(l), a.ln1rstd(l), a.sum1(l), p.ln1w(l), p.ln1b(l), N, C, eps, s);
        }
        // 9 through the second normalization: dresidual -> dsum                                     (B,T,C)
        device_zero(a.dsum(), bytes, s);
        layernorm_backward(a.dsum(), d.ln2w(l), d.ln2b(l), a.scratch(), a.dresidual(), a.sum2(l), a.ln2mean(l),
                           a.ln2rstd(l), p.ln2w(l), N, C, s);
        // 8 the MLP's second product: dsum -> dfch                                                  (B,T,4C)
        matmul_backward(a.dfch(), d.fcprojw(l), d.fcprojb(l), a.scratch(), a.dsum(), nullptr,
                        view(a.fchgelu(l), N, 4 * C), view(p.fcprojw(l), C, 4 * C), s);
        // 7 through GELU, in place; the gradient of step 6's bias is the sum of its rows
        gelu_backward(a.dfch(), d.fcb(l), a.scratch(), a.dfch(), a.fch(l), N, 4 * C, Gelu::Erf, s);
        // 6 the MLP's first product: dfch, and dsum around the MLP -> dresidual                     (B,T,C)
        matmul_backward(a.dresidual(), d.fcw(l), nullptr, a.scratch(), a.dfch(), a.dsum(),
                        view(a.ln1(l), N, C), view(p.fcw(l), 4 * C, C), s);
        // 5 through the first normalization: dresidual -> dsum
        device_zero(a.dsum(), bytes, s);
        layernorm_backward(a.dsum(), d.ln1w(l), d.ln1b(l), a.scratch(), a.dresidual(), a.sum1(l), a.ln1mean(l),
                           a.ln1rstd(l), p.ln1w(l), N, C, s);
        // 4 the product that mixes the heads: dsum -> datty                                         (B,T,C)
        matmul_backward(a.datty(), d.attprojw(l), d.attprojb(l), a.scratch(), a.dsum(), nullptr,
                        view(a.atty(l), N, C), view(p.attprojw(l), C, C), s);
        // 3 attention: datty -> the q, k and v columns of dqkv, and the sums that step 2 needs       (B,T,OC)
        if (position.new_padding) { device_zero(a.dqkv(), sizeof(floatX) * N * position.row(), s); }
        attention_backward<Mask::Both>(a.dqkv(), a.scratch(), a.datty(), a.qkv(l), a.atty(l), a.lse(l), position.bias(),
                                       B, T, s);
        // 2 the encoding turns these sums into its columns of dqkv, and the gradients of its parameters
        position.prepare_backward(a.dqkv(), a.qkv(l), B, T, s);
        // 1 the product that made q, k, v: dqkv, and dsum around attention -> dresidual             (B,T,C)
        matmul_backward(a.dresidual(), d.qkvw(l), d.qkvb(l), a.scratch(), a.dqkv(), a.dsum(),
                        view(x, N, C), view(p.qkvw(l), position.columns(), C), s, position.row());
        layer_done(model, l);                                   // several ranks: its gradients can be exchanged now
    }
    // the embeddings: through their normalization, then to the type, the positions and the tokens
    device_zero(a.dsum(), bytes, s);
    layernorm_backward(a.dsum(), d.embw(), d.embb(), a.scratch(), a.dresidual(), a.encoded(), a.embmean(), a.embrstd(),
                       p.embw(), N, C, s);
    add_row_sums(d.typew(), a.scratch(), view(a.dsum(), N, C), s);
    layer_position(model, acts, 0, T, grads).embed_backward(a.dsum(), B, T, s);
    embedding_backward(d.wte(), a.scratch(), a.dsum(), acts.batch.tokens, acts.batch.by_token(s), C, s);
}

// ----------------------------------------------------------------------------------------------------------
// a step of masked language modelling

// What evaluation predicts of n tokens of a stream. Where a token stands in the data decides whether it is masked, so
// windows of any length ask for the same tokens.  tokens, targets (n)
void set_targets(const BERT& model, const int* stream, uint64_t start, int n, int* tokens, int* targets) {
    const BERTConfig& c = model.config;
    mask_tokens(c.special, 0, EVALUATION_SAMPLE, start, n, stream, tokens, targets, c.mask_share);
}

// tokens, targets (B,T) -> losses and hits (B,T) on the host, 0 where ignored; hits may be null. lengths (B); null: all
// rows have T tokens
void forward_losses(BERT& model, Activations& acts, const int* tokens, const int* targets, const int* lengths, int B,
                    int T, float* losses, float* hits, int = 0) {
    const size_t N = (size_t)B * T;
    const std::vector<int> picked = load_batch(model, acts, 0, 1, tokens, targets, lengths, B, T, false);
    const size_t M = picked.size();
    std::vector<float> host(M);
    bert_forward(model, acts, B, T);
    bert_head(model, acts, M, nullptr, nullptr, 0.0f);
    for (float* out : {losses, hits}) {
        if (out == nullptr) { continue; }
        const float* on_device = out == losses ? acts.a.losses() : acts.a.hits();
        copy_to_host(host.data(), on_device, sizeof(float) * M, model.stream);
        std::fill(out, out + N, 0.0f);
        for (size_t k = 0; k < M; k++) { out[picked[k]] = host[k]; }
    }
}

// tokens, targets (micro_batches,B,T) of this rank, lengths (micro_batches,B) or null -> the mean loss of the step's
// masked tokens over all ranks, and its gradient
StepGradient bert_gradient(BERT& model, Activations& acts, const int* tokens, const int* targets, const int* lengths,
                           int micro_batches, int recompute) {
    const int B = acts.B, T = acts.T;
    const size_t N = (size_t)B * T;
    const size_t counted = count_targets(targets, N * micro_batches);
    const float dloss = counted > 0 ? (float)(1.0 / (double)counted) : 0.0f;
    for (int i = 0; i < micro_batches; i++) {
        const int* lengths_i = lengths == nullptr ? nullptr : lengths + (size_t)i * B;
        const size_t M = load_batch(model, acts, (size_t)i, (size_t)micro_batches, tokens + i * N, targets + i * N,
                                    lengths_i, B, T, true).size();
        bert_forward(model, acts, B, T);
        float* grads = gradient_begin(model, i, micro_batches);
        BERTParams<float> d;
        bert_point(d, model.table, grads);
        device_zero(acts.a.dresidual(), sizeof(floatX) * N * model.config.C, model.stream);
        bert_head(model, acts, M, &d, acts.a.dresidual(), dloss);
        bert_backward(model, acts, grads, B, T, recompute);
        loss_sum(model.loss_sums + i, acts.a.losses(), M, model.stream);
        gradient_add(model, i, micro_batches);
    }
    return gradient_end(model, micro_batches, counted);
}

// ----------------------------------------------------------------------------------------------------------
// main

// Reads and masks this rank's samples of the step, and computes the gradient
StepGradient masked_step(BERT& model, Activations& acts, const Run& run, const TokenFiles& files, std::vector<int>& ids,
                         std::vector<int>& tokens, std::vector<int>& targets) {
    const Options& o = run.o;
    const int T = acts.T;
    for (int i = 0; i < run.my_samples; i++) {
        const size_t row = (size_t)i * T;
        const uint64_t sample = run.sample(i), seed = (uint64_t)o.seed;
        fill_batch(files, T, sample, 1, seed, !o.overfit, &ids[row], &targets[row]);
        mask_tokens(model.config.special, seed, sample, 0, T, &ids[row], &tokens[row], &targets[row], o.mask_share);
    }
    return bert_gradient(model, acts, tokens.data(), targets.data(), nullptr, run.micro_batches, o.recompute);
}

// Trains from the run's state to o.steps: on masked tokens of data.train, contrastively on groups of data.pairs, or
// towards data.teacher's embeddings of them. Returns the exit code.
int train(BERT& model, Activations& acts, Run& run, const BERTData& data) {
    const Phase training("training");
    const Options& o = run.o;
    const Documents* pairs = data.pairs.get();
    const int T = acts.T;
    const double flops = token_flops(model, T);
    std::vector<int> ids(pairs != nullptr ? 0 : (size_t)run.my_samples * T);            // (my_samples,T)
    std::vector<int> tokens(ids.size()), targets(ids.size());                           // masked ids; the originals
    GroupBatch batch;
    ContrastiveBuffers buffers;
    const auto step_gradient = [&] {
        if (pairs == nullptr) { return masked_step(model, acts, run, *data.train, ids, tokens, targets); }
        const uint64_t first = o.overfit ? 0 : run.state.sample;                    // each rank has the whole batch
        fill_groups(*pairs, first, run.samples, (uint64_t)o.seed, !o.overfit, T, batch);
        const int leaves = run.micro_batches / run.leaf * comm().size;
        return contrastive_gradient(model, acts, buffers, batch, data.teacher, o.B, leaves, o.tau, o.recompute);
    };
    catch_signals();
    activations_allocate(acts);
    if (pairs != nullptr) { buffers.allocate(run.samples, run.samples * (pairs->group - 1), model.config.C); }
    int64_t swapped = 0;                                // groups replaced by this process
    int code;
    for (;;) {
        // 1 validation, if it is due before the update of this step
        if (pairs == nullptr) { run.look([&] { validate(model, acts, run, data.val.get()); }); }
        // 2 a checkpoint if it is due; the end after the last step or on a signal
        code = save_or_leave(run, model, bert_json(model.config));
        if (code >= 0) { break; }
        // 3 the gradient of a batch
        StepRecord step = start_step(run);
        const StepGradient gradient = step_gradient();
        double tokens_done = (double)o.total_batch;
        if (pairs != nullptr) { tokens_done = std::accumulate(batch.lengths.begin(), batch.lengths.end(), 0.0); }
        if (batch.swapped > 0) {
            run.log->record({{"kind", "swap"}, {"step", step.step + run.log->first_update}, {"groups", batch.swapped}});
            swapped += batch.swapped;
        }
        // 4 the update, unless the guard skips it: clip the gradient, then AdamW
        step.lr = learning_rate(o.schedule, o.lr, o.warmup, o.steps, o.final_lr, step.step);
        if (judge_step(run, model, gradient, step)) {
            const double scale = o.clip > 0 && gradient.norm > o.clip ? o.clip / gradient.norm : 1.0;
            const AdamW adamw = {(float)step.lr, (float)o.beta1, (float)o.beta2, (float)o.eps, (float)o.weight_decay,
                                 (float)scale, (int)++run.state.updates, (uint64_t)o.seed};
            update_parameters(model, gradient.grads, adamw);
        }
        // 5 the console and the logs
        report_step(run, step, tokens_done, flops);
    }
    buffers.release();
    acts.release();
    if (swapped > 0) {
        printf("%lld groups were replaced: their batch had one of their texts already\n", (long long)swapped);
    }
    return code;
}

int bert_main(Run& run) {
    Options& o = run.o;
    if (o.help) { return print_help("train_bert", bert_help(), BERT_FLAG); }
    // 1 what to do, and with which data
    begin_run(run, uses_bert(o), BERT_USES);
    BERTData data(run);
    // 2 the model: a checkpoint's config.json, overridden by the flags; the tables of its tensors
    BERTConfig config;
    settle_config(config, o, {run.source, !run.resumed.empty(), run.trains}, data.vocab());
    resolve_bert(run, config);
    if (!o.pairs.empty() && run.trains) { data.pairs = open_pairs(o, config.special); }
    const int group = data.pairs ? data.pairs->group : 1;
    plan_steps(run, config, o.steps < 0 ? data.epoch(config.T) : 0, group);
    BERT model;
    model.pooling = o.pooling == "cls" ? Pooling::Cls : Pooling::Mean;
    model.trains_head = data.pairs == nullptr;
    bert_describe(model, config);
    const Purpose purpose = run.trains ? Purpose::Train : Purpose::Evaluate;
    const size_t buffers = data.pairs ? ContrastiveBuffers::bytes(run.samples, run.samples * (group - 1), config.C) : 0;
    const auto describe = [&](int B) { return activations_describe(model, B, o.T, purpose, o.recompute); };
    const auto bytes = [&](int B) { return describe(B).bytes(); };
    const int most = data.pairs ? run.my_samples * std::min(1.25 * data.pairs->mean_length() / o.T, 1.0) : 0;
    Activations acts = describe(fit_memory(run, model, (double)buffers, bytes, most));
    // 3 refuse now what would fail after hours of work
    data.check_uses(run, config);
    if (data.train) { run.data = data_text(run, *data.train); }
    if (data.pairs) { run.data = data_text(run, thousands(data.epoch(o.T)) + " groups", data.epoch(o.T)); }
    report_run(run, model, config, acts.bytes(), buffers);
    data.check_lengths(run);
    const std::string batch = data.pairs ? strprintf("%d groups", run.samples)
                                         : strprintf("%lld tokens", (long long)o.total_batch);
    if (o.check) { return report_check(run, model, batch); }
    // 4 the weights
    data.record(run);
    load_run(run, model, bert_json(config));
    bert_point(model.params, model.table, model.weights);
    // 5 the work
    int code = run.trains ? train(model, acts, run, data) : 0;
    if (code == 0) {
        use_bert(model, run, data);
        code = leave_use(run);
    }
    parameters_free(model);
    return code;
}

int main(int argc, char** argv) {
    flush_denormals();          // on a CPU, denormal numbers become zero
    wait_politely(argv);        // idle OpenMP threads sleep; for this the program restarts itself once
    return run_program(bert_main, BERT_FLAG, argc, argv);
}
