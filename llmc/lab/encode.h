// lab/encode.h -- --encode: embeddings of a collection of documents, for scripts/retrieve.py and other searches.
//
// encode_documents is a template over the trainer's model, which calls
//   embed_documents(model, acts, ids, lengths, rows, T, out): out (rows, model.config.C) float32 on the host, from
//   ids (rows,T) with [PAD] after the lengths (rows), rows <= sequences_that_fit(acts, T). Neither the other rows nor
//   the padding change the embedding of a row.
#pragma once

#include <numeric>

#include "../engine/files/outdir.h"
#include "../engine/ranks/exchange.cuh"
#include "../engine/text/documents.h"
#include "evaluate.h"

struct Embeddings {
    int C = 0;
    std::vector<float> rows;                    // (N,C)
    std::vector<std::string> names;             // (N)
    bool stopped = false;                       // by a signal: rows are missing

    size_t size() const { return names.size(); }
};

// The documents of one forward: n from order[first] on, padded to T
struct DocumentBatch { size_t first, n, T; };

// Batches of `order`, the longest documents first, each filled up to the tokens of acts. They do not depend on the
// number of ranks, because the bits of a matrix product may depend on its number of rows.
template <class Acts>
std::vector<DocumentBatch> document_batches(const std::vector<size_t>& order, const std::vector<int>& length,
                                            int max_tokens, const Acts& acts) {
    std::vector<DocumentBatch> batches;
    for (size_t first = 0, n; first < order.size(); first += n) {
        const size_t T = std::min((size_t)ceil_div(length[order[first]], 8) * 8, (size_t)max_tokens);
        n = std::min(order.size() - first, sequences_that_fit(acts, (int)T));
        batches.push_back({first, n, T});
    }
    return batches;
}

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
    uint64_t total = 0, done = 0;
    for (size_t i = 0; i < N; i++) {
        length[i] = (int)std::min(documents.length(i), (uint64_t)max_tokens);
        total += (uint64_t)length[i];
        e.names.push_back(documents.name(i));
    }
    std::vector<size_t> order(N);
    std::iota(order.begin(), order.end(), (size_t)0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return length[a] > length[b]; });
    const std::vector<DocumentBatch> batches = document_batches(order, length, max_tokens, acts);
    size_t most = 0;
    for (const DocumentBatch& b : batches) { most = std::max(most, b.n); }
    Progress progress(documents.flag + ": encoding");
    std::vector<int> ids, lengths;
    const auto work = [&](size_t i, float* out) {
        const DocumentBatch& b = batches[i];
        ids.assign(b.n * b.T, documents.special.pad);
        lengths.resize(b.n);
        for (size_t r = 0; r < b.n; r++) {
            lengths[r] = documents.read(order[b.first + r], max_tokens, ids.data() + r * b.T);
        }
        embed_documents(model, acts, ids.data(), lengths.data(), (int)b.n, (int)b.T, out);
    };
    const auto take = [&](size_t i, const float* embedded) {
        for (size_t r = 0; r < batches[i].n; r++) {
            const size_t document = order[batches[i].first + r];
            std::copy_n(embedded + r * C, C, e.rows.begin() + (long)(document * C));
            done += (uint64_t)length[document];
        }
        progress.update(done, total);
    };
    e.stopped = !share_pieces<float>(batches.size(), most * C, "embeddings", work, take);
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
