// train_gpt2.cu -- trains, evaluates and samples a GPT-2 with any positional encoding of llmc/position/table.h.
//
// Read it from the top: the tensors, the forward as ten numbered steps, the head, the backward as the same numbers in
// reverse, the update, and main. Each layer's mathematics is in its own header of llmc/.
//
//   N = B * T     rows: the tokens of B sequences of T         L, NH, HS   layers, heads, channels per head
//   C = NH * HS   channels of the residual stream              V, Vp       vocabulary, padded to a multiple of 128
//   OC            columns of qkv: 3 C for q, k and v, then the encoding's columns; a row takes qkv_row(OC) elements

// In the order of a run:
#include "llmc/engine/config.h"                     // the model's shape and encoding: flags over config.json
#include "llmc/engine/data.h"                       // the tokens of a step, from shards or text
#include "llmc/engine/model.cuh"                    // a batch on the device, and its activations
#include "llmc/embedding.cuh"                       // the embedding: a row of wte for each token
#include "llmc/layernorm.cuh"                       // steps 1, 6 and 10: normalization
#include "llmc/matmul.cuh"                          // steps 2, 5, 7 and 9, and the logits: matrix products
#include "llmc/position/table.h"                    // step 3: the positional encodings
#include "llmc/attention.cuh"                       // step 4: attention over a sequence
#include "llmc/attention/decode.cuh"                //         attention of a new token to the tokens before it
#include "llmc/attention/choose.cuh"                //         the choice between attention's kernels
#include "llmc/gelu.cuh"                            // step 8: the nonlinearity
#include "llmc/classifier.cuh"                      // the losses of the logits, and their gradient
#include "llmc/engine/parameters.cuh"               // weights and gradients: memory, sums over micro-batches and ranks
#include "llmc/engine/schedule.h"                   // the learning rate, and the guard that may skip an update
#include "llmc/adamw.cuh"                           // the update
#include "llmc/engine/run.h"                        // the rest of a run: signals, checkpoints, logs, the exit code
#include "llmc/lab/generate.h"                      // uses of the trained model: evaluation, generation

// ----------------------------------------------------------------------------------------------------------
// the tensors

struct GPT2Config : ModelConfig {                       // T, V, L, NH, C and the encoding: engine/config.h
    static constexpr bool causal = true;                // a token sees itself and earlier tokens
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

// The same tensors in a checkpoint: NAME.weight and NAME.bias, by Hugging Face's names. GPT-2's linear weights are
// stored (in, out) there. Only the q, k and v rows of qkvw are listed here: the encoding names its own columns.
#define GPT2_FILES(F) \
    /* name           weight    bias      row0 rows   transposed */ \
    F("ln_1",         ln1w,     ln1b,     0,   C,     false) \
    F("attn.c_attn",  qkvw,     qkvb,     0,   3 * C, true)  \
    F("attn.c_proj",  attprojw, attprojb, 0,   C,     true)  \
    F("ln_2",         ln2w,     ln2b,     0,   C,     false) \
    F("mlp.c_fc",     fcw,      fcb,      0,   4 * C, true)  \
    F("mlp.c_proj",   fcprojw,  fcprojb,  0,   C,     true)

// The activations. Scratch: one buffer that all layers share. Saved: a buffer per layer while training, for the
// backward. Cached: a buffer per layer while training and generating, for later tokens. Backward: one buffer, only
// while training. --recompute turns Saved tensors into Scratch, and the backward computes them again. The variables in
// `rows` and `cols` are explained at the top, or in activations_describe.
#define GPT2_ACTS(X) \
    /* type   name        keep                                            rows    cols */ \
    X(int,    documents,  Keep::Scratch,                                  document_rows, 0) \
    X(floatX, encoded,    Keep::Scratch,                                  N,      C)      \
    X(floatX, ln1,        recompute < 2 ? Keep::Saved : Keep::Scratch,    N,      C)      \
    X(float,  ln1mean,    Keep::Saved,                                    N,      0)      \
    X(float,  ln1rstd,    Keep::Saved,                                    N,      0)      \
    X(floatX, qkv,        Keep::Cached,                                   B * T,  row)    \
    X(float,  lse,        Keep::Saved,                                    B * NH, T)      \
    X(float,  attscratch, in_pieces ? Keep::Cached : Keep::Scratch,       attention_floats, 0) \
    X(floatX, atty,       Keep::Saved,                                    N,      C)      \
    X(floatX, residual2,  Keep::Saved,                                    N,      C)      \
    X(floatX, ln2,        recompute < 2 ? Keep::Saved : Keep::Scratch,    N,      C)      \
    X(float,  ln2mean,    Keep::Saved,                                    N,      0)      \
    X(float,  ln2rstd,    Keep::Saved,                                    N,      0)      \
    X(floatX, fch,        Keep::Saved,                                    N,      4 * C)  \
    X(floatX, fchgelu,    recompute < 1 ? Keep::Saved : Keep::Scratch,    N,      4 * C)  \
    X(floatX, residual3,  Keep::Saved,                                    N,      C)      \
    X(floatX, lnf,        Keep::Scratch,                                  N,      C)      \
    X(float,  lnfmean,    Keep::Scratch,                                  N,      0)      \
    X(float,  lnfrstd,    Keep::Scratch,                                  N,      0)      \
    X(floatX, logits,     Keep::Scratch,                                  R,      Vp)     \
    X(float,  losses,     Keep::Scratch,                                  N,      0)      \
    X(float,  hits,       Keep::Scratch,                                  N,      0)      \
    /* gradients of activations, one buffer each for all layers */ \
    X(floatX, dresidual,  Keep::Backward,                                 N,      C)      \
    X(floatX, dln,        Keep::Backward,                                 N,      C)      \
    X(floatX, dfch,       Keep::Backward,                                 N,      4 * C)  \
    X(floatX, dqkv,       Keep::Backward,                                 N,      row)    \
    X(float,  scratch,    Keep::Backward,                                 scratch_floats, 0)

template <class T> struct GPT2Params {
#define X(name, ...) LayerPointer<T> name;
    GPT2_PARAMS(X)
#undef X
};

struct GPT2Acts {
#define X(type, name, ...) LayerPointer<type> name;
    GPT2_ACTS(X)
#undef X
    LayerPointer<floatX> datty;                         // dln's memory: step 4 reads datty before step 2 writes dln
};

using Activations = ActivationsOf<GPT2Acts>;

struct GPT2 : Parameters {
    GPT2Config config;
    int OC = 0;                                         // the largest of all layers
    std::vector<int> columns_of;                        // (L): extra columns of each layer's encoding
    GPT2Params<floatX> params;
};

// Fills in the tables of a model's tensors: shapes, initial values, names in files. Allocates nothing.
void gpt2_describe(GPT2& model, const GPT2Config& config) {
    model.config = config;
    const int Vp = config.Vp();
    const int L = config.L, C = config.C;
    const PositionTables position = position_tables(config.position, position_shape(config, 0, 0));
    const int OC = model.OC = qkv_columns(C, position.extra_columns);
    model.columns_of = position.columns_of;
    model.table = TensorTable();
#define X(name, layers, rows, cols, init, decay) \
    model.table.add({#name, layers, (size_t)(rows), (size_t)(cols), init, decay});
    GPT2_PARAMS(X)
#undef X
    model.files = {{"transformer.wte.weight", "wte", 0, 0, (size_t)config.classes(), false}};
    for (int l = 0; l < L; l++) {
        const std::string layer = "transformer.h." + std::to_string(l) + ".";
#define F(name, weight, bias, row0, rows, transposed) \
        model.add_files(layer + name, #weight, #bias, l, row0, rows, transposed);
        GPT2_FILES(F)
#undef F
    }
    model.add_files("transformer.ln_f", "lnfw", "lnfb", 0, 0, C, false);
    complete_tables(model, position.params, position.files);
}

// Points p at the tensors in `data`, which is laid out as the table says: weights, or their gradients.
template <class T> void gpt2_point(GPT2Params<T>& p, const TensorTable& table, T* data) {
#define X(name, ...) p.name = table.pointer(data, #name);
    GPT2_PARAMS(X)
#undef X
}

// Describes the activations of `batch` sequences of `length` tokens; allocates nothing. tokens: how many tokens of each
// sequence a forward takes; 0: set_shape() decides
Activations activations_describe(const GPT2& model, int batch, int length, Purpose purpose, int recompute,
                                 int tokens = 0) {
    Activations acts;
    acts.set_shape(batch, length, purpose, tokens);
    const GPT2Config& g = model.config;
    const int NH = g.NH, C = g.C;
    const int HS = C / NH;
    const int OC = model.OC, row = qkv_row(OC);
    const int Vp = g.Vp();
    const size_t B = (size_t)batch, T = (size_t)length;
    const size_t N = B * (size_t)acts.piece;                                    // see Purpose::Pieces
    const size_t R = logit_rows(N, Vp, C, purpose);                             // rows of logits at a time
    // for one use at a time: column sums, or what the backward of attention or of the embedding needs
    const size_t scratch_floats = std::max({MAX_SLABS * std::max(OC, 4 * C), embedding_backward_scratch(N, C),
                                            attention_backward_scratch(g.position, batch, length, NH, HS)});
    const size_t attention_floats = attention_scratch(batch, length, NH, HS);
    const bool in_pieces = purpose == Purpose::Pieces;                // lab/evaluate.h reads attscratch(l)
    const size_t document_rows = g.position.mask.by_document() ? B * T : 0;
    acts.chunk = (int)R;
#define X(type, name, keep, rows, cols) acts.add(#name, keep, g.L, rows, cols, sizeof(type));
    GPT2_ACTS(X)
#undef X
    acts.add_position(position_tables(g.position, position_shape(g, batch, length, acts.decodes())));
    return acts;
}

// Allocates the activations, and points acts.a at them.
void activations_allocate(Activations& acts) {
    acts.allocate();
#define X(type, name, ...) acts.point(acts.a.name, #name);
    GPT2_ACTS(X)
#undef X
    acts.a.datty = acts.a.dln;
}

// ----------------------------------------------------------------------------------------------------------
// forward

// acts.batch.tokens (B,T), at positions t0 .. t0 + T - 1 -> the hidden states lnf (B,T,C). t0 > 0 continues a sequence
// (B = 1) whose first t0 tokens are in the cached qkv: in generation, and in evaluation in pieces.
void gpt2_forward(GPT2& model, Activations& acts, int B, int T, int t0) {
    const GPT2Params<floatX>& p = model.params;
    const GPT2Acts& a = acts.a;
    const int L = model.config.L, C = model.config.C;
    const size_t N = (size_t)B * T;
    const float eps = 1e-5f;
    Stream s = model.stream;

    find_documents(model, acts, B, T, t0);                      // with --document_mask: which keys a token sees
    layer_ready(model, -1);                                     // several ranks: wait for the other ranks' updates
    embedding_forward(a.encoded(), acts.batch.tokens, p.wte(), N, C, s);                            // (B,T,C)
    // learned and sinusoidal encodings add a row per position; other encodings do nothing here
    layer_position(model, acts, 0, T).embed_forward(a.encoded(), B, T, t0, s);
    for (int l = 0; l < L; l++) {
        const floatX* residual = l == 0 ? a.encoded() : a.residual3(l - 1);                         // (B,T,C)
        const LayerPosition position = layer_position(model, acts, l, T);
        const int OC = position.columns(), row = position.row();
        layer_ready(model, l);
        // 1 normalize the residual stream
        layernorm_forward(a.ln1(l), a.ln1mean(l), a.ln1rstd(l), residual, p.ln1w(l), p.ln1b(l), N, C, eps, s);
        // 2 one product makes q, k, v and the encoding's columns                                    (B,T,OC)
        floatX* new_rows = a.qkv(l) + (size_t)t0 * row;                     // after the rows of earlier tokens
        matmul_forward(new_rows, view(a.ln1(l), N, C), view(p.qkvw(l), OC, C), p.qkvb(l), nullptr, s, row);
        // 3 the encoding prepares what its bias reads: rope rotates q and k, cable sums S over time and finds g
        position.prepare_forward(a.qkv(l), B, T, t0, s);
        // 4 attention: softmax(q k^T / sqrt(HS) + bias) v, heads side by side                       (B,T,C)
        attention(a.atty(l), a.lse(l), a.attscratch(l), a.qkv(l), position.bias(), B, T, t0, s);
        if (acts.watch) { acts.watch(l, position.bias(), a.qkv(l), a.lse(l), B); }
        // 5 mix the heads, and add to the residual stream                                          (B,T,C)
        matmul_forward(a.residual2(l), view(a.atty(l), N, C), view(p.attprojw(l), C, C), p.attprojb(l), residual, s);
        // 6 normalize again
        layernorm_forward(a.ln2(l), a.ln2mean(l), a.ln2rstd(l), a.residual2(l), p.ln2w(l), p.ln2b(l), N, C, eps, s);
        // 7 the MLP widens, and 8 its nonlinearity. They are fused only without --recompute, which repeats 8 from the
        // rounded result of 7: after a fused kernel that would change bits                         (B,T,4C)
        matmul_gelu_forward(a.fchgelu(l), a.fch(l), view(a.ln2(l), N, C), view(p.fcw(l), 4 * C, C), p.fcb(l),
                            a.fchgelu.saved(), s);
        // 9 the MLP narrows, and adds to the residual stream                                       (B,T,C)
        matmul_forward(a.residual3(l), view(a.fchgelu(l), N, 4 * C), view(p.fcprojw(l), C, 4 * C), p.fcprojb(l),
                       a.residual2(l), s);
    }
    // 10 the last normalization, before the head                                                   (B,T,C)
    layernorm_forward(a.lnf(), a.lnfmean(), a.lnfrstd(), a.residual3(L - 1), p.lnfw(), p.lnfb(), N, C, eps, s);
}

// The one step without a mirror: lnf -> logits = lnf wte^T -> losses (B,T) and, when `grads` is given, their gradients
// dlnf (B,T,C) and dwte (Vp,C). A chunk of rows goes forward and back before the next one, so only its logits are in
// memory (LOGITS_BOUND), and no product runs twice. Without `grads` the logits are float32, in the same memory.
// dloss: 1 / number of targets in the total batch.
void gpt2_head(GPT2& model, Activations& acts, size_t N, const GPT2Params<float>* grads, floatX* dlnf, float dloss) {
    const int classes = model.config.classes(), Vp = model.config.Vp();
    const int C = model.config.C;
    const GPT2Acts& a = acts.a;
    const Matrix<floatX> wte = view(model.params.wte(), Vp, C);                 // also the head's weights
    const bool backward = grads != nullptr;
    Stream s = model.stream;
    const size_t chunk = (size_t)acts.chunk_of(backward);
    for (size_t n = 0; n < N; n += chunk) {
        const size_t rows = std::min(chunk, N - n);
        const Matrix<floatX> lnf = view(a.lnf() + n * C, rows, C);
        const Matrix<floatX> logits = view(a.logits(), rows, Vp);               // after classifier(): their gradient
        const int* targets = acts.batch.targets + n;
        float *losses = a.losses() + n, *hits = a.hits() + n;
        if (!backward) {
            float* x = (float*)a.logits();
            matmul_float(x, lnf, transposed(wte), nullptr, s);                  // (rows,Vp)
            classifier_float(losses, hits, x, targets, rows, classes, Vp, s);
            continue;
        }
        matmul(logits.data, lnf, transposed(wte), nullptr, nullptr, s);         // (rows,Vp)
        classifier(losses, nullptr, logits.data, targets, dloss, rows, classes, Vp, true, s);
        matmul(dlnf + n * C, logits, wte, nullptr, nullptr, s);                 // (rows,C)
        matmul_add(grads->wte(), transposed(logits), lnf, s);                   // (Vp,C)
    }
}

// ----------------------------------------------------------------------------------------------------------
// backward: the forward's numbers in reverse

// At first dln holds the gradient of the hidden states lnf (B,T,C). Weight gradients are added to `grads`, which is
// float32 and laid out as the parameters. dresidual (B,T,C) is the gradient of the residual stream, carried from step
// to step: it passes steps 5 and 9 unchanged, because they add to the stream, and steps 1 and 6 add their gradients.
void gpt2_backward(GPT2& model, Activations& acts, float* grads, int B, int T, int recompute) {
    const GPT2Params<floatX>& p = model.params;
    GPT2Params<float> d;
    gpt2_point(d, model.table, grads);
    const GPT2Acts& a = acts.a;
    const int L = model.config.L, C = model.config.C;
    const size_t N = (size_t)B * T;
    const float eps = 1e-5f;
    Stream s = model.stream;

    device_zero(a.dresidual(), sizeof(floatX) * N * C, s);
    // 10 the last normalization
    layernorm_backward(a.dresidual(), d.lnfw(), d.lnfb(), a.scratch(), a.dln(), a.residual3(L - 1), a.lnfmean(),
                       a.lnfrstd(), p.lnfw(), N, C, s);
    for (int l = L - 1; l >= 0; l--) {
        const floatX* residual = l == 0 ? a.encoded() : a.residual3(l - 1);
        const LayerPosition position = layer_position(model, acts, l, T, grads);
        const int OC = position.columns(), row = position.row();
        if (recompute >= 1) { gelu_forward(a.fchgelu(l), a.fch(l), N * 4 * C, Gelu::Tanh, s); }
        if (recompute >= 2) {
            layernorm_forward(a.ln2(l), a.ln2mean(l), a.ln2rstd(l), a.residual2(l), p.ln2w(l), p.ln2b(l), N, C, eps, s);
        }
        // 9 the MLP's second product, and 8 through GELU: dresidual -> dfch                         (B,T,4C)
        // The sum of the rows of dfch is the gradient of step 7's bias
        matmul_gelu_backward(a.dfch(), d.fcb(l), d.fcprojw(l), d.fcprojb(l), a.scratch(), a.dresidual(), a.fch(l),
                             view(a.fchgelu(l), N, 4 * C), view(p.fcprojw(l), C, 4 * C), s);
        // 7 the MLP's first product: dfch -> dln                                                    (B,T,C)
        matmul_backward(a.dln(), d.fcw(l), nullptr, a.scratch(), a.dfch(), nullptr,
                        view(a.ln2(l), N, C), view(p.fcw(l), 4 * C, C), s);
        // 6 through the second normalization, added to dresidual
        layernorm_backward(a.dresidual(), d.ln2w(l), d.ln2b(l), a.scratch(), a.dln(), a.residual2(l), a.ln2mean(l),
                           a.ln2rstd(l), p.ln2w(l), N, C, s);
        // 5 the product that mixes the heads: dresidual -> datty                                    (B,T,C)
        matmul_backward(a.datty(), d.attprojw(l), d.attprojb(l), a.scratch(), a.dresidual(), nullptr,
                        view(a.atty(l), N, C), view(p.attprojw(l), C, C), s);
        // 4 attention: datty -> the q, k and v columns of dqkv, and the sums that step 3 needs       (B,T,OC)
        if (position.new_padding) { device_zero(a.dqkv(), sizeof(floatX) * N * row, s); }
        attention_backward<Mask::Causal>(a.dqkv(), a.scratch(), a.datty(), a.qkv(l), a.atty(l), a.lse(l),
                                         position.bias(), B, T, s);
        // 3 the encoding turns these sums into its columns of dqkv, and the gradients of its parameters
        position.prepare_backward(a.dqkv(), a.qkv(l), B, T, s);
        if (recompute >= 2) {
            layernorm_forward(a.ln1(l), a.ln1mean(l), a.ln1rstd(l), residual, p.ln1w(l), p.ln1b(l), N, C, eps, s);
        }
        // 2 the product that made q, k, v: dqkv -> dln                                              (B,T,C)
        matmul_backward(a.dln(), d.qkvw(l), d.qkvb(l), a.scratch(), a.dqkv(), nullptr,
                        view(a.ln1(l), N, C), view(p.qkvw(l), OC, C), s, row);
        // 1 through the first normalization, added to dresidual
        layernorm_backward(a.dresidual(), d.ln1w(l), d.ln1b(l), a.scratch(), a.dln(), residual, a.ln1mean(l),
                           a.ln1rstd(l), p.ln1w(l), N, C, s);
        layer_done(model, l);                                   // several ranks: its gradients can be exchanged now
    }
    // dresidual is now the gradient of the embeddings; rows of equal tokens are summed in a fixed order
    layer_position(model, acts, 0, T, grads).embed_backward(a.dresidual(), B, T, s);
    embedding_backward(d.wte(), a.scratch(), a.dresidual(), acts.batch.tokens, acts.batch.by_token(s), C, s);
}

// ----------------------------------------------------------------------------------------------------------
// a step

// What evaluation predicts: the token after each of n tokens of a stream. tokens, targets (n)
void set_targets(const GPT2&, const int* stream, uint64_t, int n, int* tokens, int* targets) {
    std::copy(stream, stream + n, tokens);
    std::copy(stream + 1, stream + n + 1, targets);
}

// tokens, targets (B,T) -> losses (B,T), 0 where ignored, and hits (B,T), 1 where the target was the likeliest token;
// all on the host, hits may be null. No row needs its length: no token sees a later one.
// t0: the position of the first token, above 0 only in pieces of a window
void forward_losses(GPT2& model, Activations& acts, const int* tokens, const int* targets, const int*, int B, int T,
                    float* losses, float* hits, int t0 = 0) {
    const size_t N = (size_t)B * T;
    settle_weights(model);
    acts.batch.load(0, 1, tokens, targets, N, model.stream);
    gpt2_forward(model, acts, B, T, t0);
    gpt2_head(model, acts, N, nullptr, nullptr, 0.0f);
    copy_to_host(losses, acts.a.losses(), sizeof(float) * N, model.stream);
    if (hits != nullptr) { copy_to_host(hits, acts.a.hits(), sizeof(float) * N, model.stream); }
}

// tokens, targets (micro_batches,B,T) of this rank -> the mean loss of the step over all ranks, and its gradient. Each
// micro-batch is divided by the number of targets in the whole step, so the gradients of micro-batches are just added.
StepGradient gpt2_gradient(GPT2& model, Activations& acts, const int* tokens, const int* targets, int micro_batches,
                           int recompute) {
    const int B = acts.B, T = acts.T;
    const size_t N = (size_t)B * T;
    const size_t counted = count_targets(targets, N * micro_batches);
    const float dloss = counted > 0 ? (float)(1.0 / (double)counted) : 0.0f;
    for (int i = 0; i < micro_batches; i++) {
        acts.batch.load((size_t)i, (size_t)micro_batches, tokens + i * N, targets + i * N, N, model.stream);
        gpt2_forward(model, acts, B, T, 0);
        float* grads = gradient_begin(model, i, micro_batches);
        GPT2Params<float> d;
        gpt2_point(d, model.table, grads);
        gpt2_head(model, acts, N, &d, acts.a.dln(), dloss);
        gpt2_backward(model, acts, grads, B, T, recompute);
        loss_sum(model.loss_sums + i, acts.a.losses(), N, model.stream);
        gradient_add(model, i, micro_batches);
    }
    return gradient_end(model, micro_batches, counted);
}

// ----------------------------------------------------------------------------------------------------------
// main

// Trains from the run's state to o.steps; returns the exit code.
int train(GPT2& model, Activations& acts, Run& run, const GPT2Data& data) {
    const Phase training("training");
    const Options& o = run.o;
    const int T = acts.T;
    const double flops = token_flops(model, T);
    std::vector<int> tokens((size_t)run.my_samples * T), targets(tokens.size());        // (my_samples,T): this rank's
    catch_signals();
    activations_allocate(acts);
    for (;;) {
        // 1 what is due before the update of this step: validation, and a sample
        run.look([&] {
            validate(model, acts, run, data.val.get());
            if (data.hellaswag && run.due(o.val_every)) {
                report_hellaswag(model, acts, *data.hellaswag, run.state.step, false, *run.log);
            }
            if (run.due(o.sample_every) && run.state.step > 0) { print_sample(model, run); }
        });
        // 2 a checkpoint if it is due; the end after the last step or on a signal
        const int code = save_or_leave(run, model, gpt2_json(model.config, run.tokenizer.get()));
        if (code >= 0) { acts.release(); return code; }
        // 3 the gradient of a batch
        StepRecord step = start_step(run);
        fill_batch(*data.train, T, run.sample(0), run.my_samples, (uint64_t)o.seed, !o.overfit, tokens.data(),
                   targets.data());
        const StepGradient gradient = gpt2_gradient(model, acts, tokens.data(), targets.data(), run.micro_batches,
                                                    o.recompute);
        // 4 the update, unless the guard skips it: clip the gradient, then AdamW
        step.lr = learning_rate(o.schedule, o.lr, o.warmup, o.steps, o.final_lr, step.step);
        if (judge_step(run, model, gradient, step)) {
            const double scale = o.clip > 0 && gradient.norm > o.clip ? o.clip / gradient.norm : 1.0;
            const AdamW adamw = {(float)step.lr, (float)o.beta1, (float)o.beta2, (float)o.eps, (float)o.weight_decay,
                                 (float)scale, (int)++run.state.updates, (uint64_t)o.seed};
            update_parameters(model, gradient.grads, adamw);
        }
        // 5 the console and the logs
        report_step(run, step, (double)o.total_batch, flops);
    }
}

int gpt2_main(Run& run) {
    Options& o = run.o;
    if (o.help) { return print_help("train_gpt2", gpt2_help(), GPT2_FLAG); }
    // 1 what to do, and with which data
    begin_run(run, uses_gpt2(o), GPT2_USES);
    GPT2Data data(run);
    // 2 the model: a checkpoint's config.json, overridden by the flags; the tables of its tensors
    GPT2Config config;
    settle_config(config, o, {run.source, !run.resumed.empty(), run.trains, data.end_of_text()}, data.vocab());
    plan_steps(run, config, data.train && o.steps < 0 ? data.train->windows(config.T) : 0);
    GPT2 model;
    gpt2_describe(model, config);
    const Purpose purpose = run.trains ? Purpose::Train : Purpose::Evaluate;
    const auto describe = [&](int B) { return activations_describe(model, B, o.T, purpose, o.recompute); };
    fit_memory(run, model, 0.0, [&](int B) { return describe(B).bytes(); });
    Activations acts = describe(o.B);
    // 3 refuse now what would fail after hours of work
    run.tokenizer = find_tokenizer(o.tokenizer, run.source, !run.resumed.empty(), config.V);
    data.check_uses(run, config);
    if (data.train) { run.data = data_text(run, *data.train); }
    report_run(run, model, config, acts.bytes());
    data.check_lengths(run);
    if (o.check) { return report_check(run, model, strprintf("%lld tokens", (long long)o.total_batch)); }
    // 4 the weights
    data.record(run);
    load_run(run, model, gpt2_json(config, run.tokenizer.get()));
    gpt2_point(model.params, model.table, model.weights);
    // 5 the work
    int code = run.trains ? train(model, acts, run, data) : 0;
    if (code == 0) {
        use_gpt2(model, run, data);
        code = leave_use(run);
    }
    parameters_free(model);
    return code;
}

int main(int argc, char** argv) {
    flush_denormals();          // on a CPU, denormal numbers become zero
    wait_politely(argv);        // idle OpenMP threads sleep; for this the program restarts itself once
    return run_program(gpt2_main, GPT2_FLAG, argc, argv);
}
