// lab/encode.h -- embeddings of texts by a BERT: the gradient of their contrastive loss (--pairs), and those of a
// collection of documents, for scripts/retrieve.py and other searches (--encode).
//
// Templates over the trainer's model: they call bert_forward and bert_backward.
#pragma once

#include <numeric>

#include "../contrastive.cuh"
#include "../engine/files/outdir.h"
#include "../engine/text/documents.h"
#include "evaluate.h"

// ids (rows,T) with lengths (rows) -> out (rows,C) float32, on the device: their embeddings
template <class Model, class Acts>
void bert_embed(float* out, Model& model, Acts& acts, size_t slot, size_t of, const int* ids, const int* lengths,
                int rows, int T, bool backward) {
    const int L = model.config.L, C = model.config.C;
    load_batch(model, acts, slot, of, ids, nullptr, lengths, rows, T, backward);
    bert_forward(model, acts, rows, T);
    pooling_forward(out, acts.a.ln2(L - 1), acts.batch.lengths, rows, T, C, model.pooling, model.stream);
}

// The same with out on the host, for rows <= sequences_that_fit(acts, T). Neither the other rows nor the padding change
// the embedding of a row.
template <class Model, class Acts>
void embed_documents(Model& model, Acts& acts, const int* ids, const int* lengths, int rows, int T, float* out) {
    float* pooled = (float*)acts.a.fch();       // which the forward has read for the last time, and which is larger
    bert_embed(pooled, model, acts, 0, 1, ids, lengths, rows, T, false);
    copy_to_host(out, pooled, sizeof(float) * rows * model.config.C, model.stream);
}

// The mean loss of a step's groups, and its gradient. All rows are embedded first, a chunk of acts.B at a time; then
// the loss gives the gradient of every embedding, and each chunk is run again, forward and backward. So memory does not
// grow with the batch, and its gradient equals one large batch's (Gao et al. 2021). A rank has as many chunks as each
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

// ----------------------------------------------------------------------------------------------------------
// --encode

struct Embeddings {
    int C = 0;
    std::vector<float> rows;                    // (N,C)
    std::vector<std::string> names;             // (N)
    bool stopped = false;                       // by a signal: rows are missing

    size_t size() const { return names.size(); }
};

// Embeds the documents of a collection, cut to max_tokens. Those of a batch have about the same length. The longest
// come first, so that a lack of memory shows at once. A collective: the ranks share the batches, and each gets all
// embeddings.
template <class Model, class Acts>
Embeddings encode_documents(Model& model, Acts& acts, const Documents& documents, int max_tokens) {
    const Doing encoding("encoding documents");
    check(documents.group == 1, "%s: expected a collection, got groups of %d documents", documents.flag.c_str(),
          documents.group);
    check(max_tokens >= 2 && max_tokens <= acts.T, "%s: expected a length of 2 to %d tokens, got %d",
          documents.flag.c_str(), (int)acts.T, max_tokens);
    const size_t N = documents.size(), C = (size_t)model.config.C;
    Embeddings e;
    e.C = (int)C;
    e.rows.resize(checked_mul(N, C, "embeddings"));
    std::vector<int> length(N);
    for (size_t i = 0; i < N; i++) {
        length[i] = (int)std::min(documents.length(i), (uint64_t)max_tokens);
        e.names.push_back(documents.name(i));
    }
    std::vector<size_t> order(N);
    std::iota(order.begin(), order.end(), (size_t)0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return length[a] > length[b]; });
    const std::vector<RowBatch> batches = row_batches(N, acts, [&](size_t i) {
        return std::min(round_up(length[order[i]], 8), max_tokens);
    });
    Progress progress(documents.flag + ": encoding");
    std::vector<int> ids, lengths;
    const auto work = [&](const RowBatch& b, float* out) {
        ids.assign(b.n * b.T, documents.special.pad);
        lengths.resize(b.n);
        for (size_t r = 0; r < b.n; r++) {
            lengths[r] = documents.read(order[b.first + r], max_tokens, ids.data() + r * b.T);
        }
        embed_documents(model, acts, ids.data(), lengths.data(), (int)b.n, (int)b.T, out);
    };
    const auto take = [&](size_t i, const float* row) { std::copy_n(row, C, e.rows.begin() + (long)(order[i] * C)); };
    e.stopped = !share_batches<float>(batches, C, progress, work, take);
    check_finite("embeddings", e.rows.data(), e.rows.size());
    return e;
}

// Writes DIR/embeddings.safetensors with "embeddings" (N,C), and DIR/embeddings.ids with the names, one per line. Each
// file appears complete or not at all, and the first one has a checksum of the names, so that a mixture of two writes
// is noticed. metadata: more strings for the header
inline void write_embeddings(const std::string& dir, const Embeddings& e, const Json& metadata = Json::object()) {
    check(e.C >= 1 && e.rows.size() == e.size() * (size_t)e.C, "%s: %zu names and %zu values of rows of %d",
          dir.c_str(), e.size(), e.rows.size(), e.C);
    std::string text;
    for (const std::string& name : e.names) { text += name + "\n"; }
    const size_t C = (size_t)e.C;
    const auto fill = [&](float* out, size_t row0, size_t rows) {
        std::copy_n(e.rows.begin() + (long)(row0 * C), rows * C, out);
    };
    write_whole(dir + "/embeddings.ids", [&](const std::string& to_ids) {
        Json all = metadata;
        all["ids"] = sum_text(write_text(to_ids, text).sum);
        write_whole(dir + "/embeddings.safetensors", [&](const std::string& to) {
            write_safetensors(to, {{"embeddings", {e.size(), C}, fill}}, all);
        });
    });
}
