// lab/embed.h -- embeddings of texts by a BERT, and the gradient of their contrastive loss.
//
// Templates over the trainer's model: they call bert_forward and bert_backward.
#pragma once

#include "../contrastive.cuh"
#include "../engine/model.cuh"
#include "../engine/text/documents.h"
#include "../pooling.cuh"

// ids (rows,T) with lengths (rows) -> out (rows,C) float32, on the device: their embeddings
template <class Model, class Acts>
void bert_embed(float* out, Model& model, Acts& acts, size_t slot, size_t of, const int* ids, const int* lengths,
                int rows, int T, bool backward) {
    const int L = model.config.L, C = model.config.C;
    load_batch(model, acts, slot, of, ids, nullptr, lengths, rows, T, backward);
    bert_forward(model, acts, rows, T);
    pooling_forward(out, acts.a.ln2(L - 1), acts.batch.lengths, rows, T, C, model.pooling, model.stream);
}

// The same with out on the host
template <class Model, class Acts>
void embed_documents(Model& model, Acts& acts, const int* ids, const int* lengths, int rows, int T, float* out) {
    float* pooled = (float*)acts.a.fch();       // which the forward has read for the last time, and which is larger
    bert_embed(pooled, model, acts, 0, 1, ids, lengths, rows, T, false);
    copy_to_host(out, pooled, sizeof(float) * rows * model.config.C, model.stream);
}

// The mean loss of a step's groups, and its gradient. All rows are embedded first, a chunk of acts.B at a time; then
// the loss gives the gradient of every embedding, and each chunk is run again, forward and backward. So memory does not
// grow with the batch, and its gradient is that of one large batch (Gao et al. 2021). A rank has as many chunks as each
// other one, neighbours in their order; it gets all embeddings, as the loss of a query sees the whole batch.
template <class Model, class Acts>
StepGradient contrastive_gradient(Model& model, Acts& acts, const ContrastiveBuffers& c, const GroupBatch& batch,
                                  double tau, int recompute) {
    const int Q = batch.groups, rows = batch.rows;
    const int C = model.config.C, T = batch.T;
    const int ranks = comm().size, chunks = ceil_div(rows, acts.B) / ranks;                 // of this rank
    const int begin = comm().rank * chunks * acts.B;                                        // its first row
    check(ranks == 1 || ranks * chunks * acts.B == rows, "--pairs: %d ranks do not divide %d rows in chunks of %d",
          ranks, rows, acts.B);
    auto embed = [&](int i, bool backward) {
        const int first = begin + i * acts.B, n = std::min(acts.B, rows - first);
        const size_t slot = (size_t)(backward && chunks > 1 ? chunks + i : i);
        const int *ids = batch.ids.data() + (size_t)first * T, *lengths = batch.lengths.data() + first;
        bert_embed(c.emb + (size_t)first * C, model, acts, slot, 2 * (size_t)chunks, ids, lengths, n, T, backward);
        return n;
    };
    // 1 embed every row: a single chunk can stay where it is for the backward
    for (int i = 0; i < chunks; i++) { embed(i, chunks == 1); }
    share_rows(c.emb, (size_t)rows / (size_t)ranks * C, "embeddings of the batch", model.stream);
    // 2 the loss of each query, and the gradient of each embedding
    const float dloss = 1.0f / (float)Q;
    contrastive_forward_backward(c.losses, c.demb, c.scratch, c.emb, Q, rows - Q, C, (float)tau, dloss, model.stream);
    loss_sum(model.loss_sums, c.losses, comm().rank == 0 ? (size_t)Q : 0, model.stream);    // counted once
    // 3 each chunk again, and back through the model
    for (int i = 0; i < chunks; i++) {
        const int first = begin + i * acts.B, n = chunks == 1 ? std::min(acts.B, rows) : embed(i, true);
        float* grads = gradient_begin(model, i, chunks);
        const float* demb = c.demb + (size_t)first * C;                             // (n,C)
        pooling_backward(acts.a.dresidual(), demb, acts.batch.lengths, n, T, C, model.pooling, model.stream);
        bert_backward(model, acts, grads, n, T, recompute);
        gradient_add(model, i, chunks);
    }
    return gradient_end(model, 1, (size_t)Q);
}
