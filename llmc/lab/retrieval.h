// lab/retrieval.h -- embeddings of collections, exact search by cosine similarity, and the quality of the results
// (trec.h).
//
// encode_documents is a template over the trainer's model, which calls
//   embed_documents(model, acts, ids, lengths, rows, T, out): out (rows, model.config.C) float32 on the host, from
//   ids (rows,T) with [PAD] after the lengths (rows), rows <= sequences_that_fit(acts, T). Neither the other rows nor
//   the padding change the embedding of a row.
#pragma once

#include <numeric>
#include <unordered_set>

#include "../engine/ranks/share.h"
#include "../engine/text/documents.h"
#include "evaluate.h"
#include "../engine/files/outdir.h"
#include "../engine/text/trec.h"

// ----------------------------------------------------------------------------------------------------------
// embeddings

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

// "x.safetensors" -> "x.ids"
inline std::string embeddings_ids(const std::string& path) {
    const std::string end = ".safetensors";
    check(path.size() > end.size() && ends_with(path, end.c_str()),
          "%s: embeddings go by names that end in %s", path.c_str(), end.c_str());
    return path.substr(0, path.size() - end.size()) + ".ids";
}

// Writes x.safetensors with "embeddings" (N,C), and x.ids with the names, one per line. Each file appears complete or
// not at all, and the first one has a checksum of the names, so that a mixture of two writes is noticed. metadata: more
// strings for the header
inline void write_embeddings(const std::string& path, const Embeddings& e, const Json& metadata = Json::object()) {
    const std::string ids = embeddings_ids(path);
    check(e.C >= 1 && e.rows.size() == e.size() * (size_t)e.C, "%s: %zu names and %zu values of rows of %d",
          path.c_str(), e.size(), e.rows.size(), e.C);
    std::string text;
    for (const std::string& name : e.names) { text += name + "\n"; }
    const size_t C = (size_t)e.C;
    const auto fill = [&](float* out, size_t row0, size_t rows) {
        std::copy_n(e.rows.begin() + (long)(row0 * C), rows * C, out);
    };
    write_whole(ids, [&](const std::string& to_ids) {
        Json all = metadata;
        all["ids"] = sum_text(write_text(to_ids, text).sum);
        write_whole(path, [&](const std::string& to) {
            write_safetensors(to, {{"embeddings", {e.size(), C}, fill}}, all);
        });
    });
}

// ----------------------------------------------------------------------------------------------------------
// search

// Rows are divided by their lengths (at least 1e-12, as in training), so that dot products are cosine similarities.
inline void unit_rows(Embeddings& e) {
    for (size_t i = 0; i < e.size(); i++) {
        float* row = e.rows.data() + i * (size_t)e.C;
        double squares = 0.0;
        for (int c = 0; c < e.C; c++) { squares += (double)row[c] * (double)row[c]; }
        check(std::isfinite(squares), "the embedding of %s is not finite", e.names[i].c_str());
        const float scale = (float)(1.0 / std::max(std::sqrt(squares), 1e-12));
        for (int c = 0; c < e.C; c++) { row[c] *= scale; }
    }
}

struct Hit { float score; int document; };

// a ranks before b: an order without ties, so that the first k do not depend on how threads share the documents
inline bool ranks_before(const Hit& a, const Hit& b) {
    return a.score > b.score || (a.score == b.score && a.document < b.document);
}

constexpr int SEARCH_LANES = 16, SEARCH_ROWS = 4;
constexpr int SEARCH_QUERIES = 32, SEARCH_PARTS = 64;
// added lane by lane, for registers of any width
typedef float SearchLanes __attribute__((vector_size(4 * SEARCH_LANES)));

// out[j] = q . d[j] (C), by the same instructions for each, so that a score does not depend on the neighbours
inline void dot_products(float* out, const float* q, const float* const* d, int C) {
    SearchLanes sums[SEARCH_ROWS] = {};
    int c = 0;
    for (; c + SEARCH_LANES <= C; c += SEARCH_LANES) {
        SearchLanes x, y;
        memcpy(&x, q + c, sizeof x);
        for (int j = 0; j < SEARCH_ROWS; j++) {
            memcpy(&y, d[j] + c, sizeof y);
            sums[j] += x * y;
        }
    }
    for (int j = 0; j < SEARCH_ROWS; j++) {
        float sum = 0.0f;
        for (int l = 0; l < SEARCH_LANES; l++) { sum += sums[j][l]; }
        for (int t = c; t < C; t++) { sum += q[t] * d[j][t]; }
        out[j] = sum;
    }
}

// Keeps the first k of all offered hits, in a heap whose front is the last of them.
inline void offer(std::vector<Hit>& heap, size_t k, const Hit& hit) {
    if (heap.size() == k) {
        if (!ranks_before(hit, heap.front())) { return; }
        std::pop_heap(heap.begin(), heap.end(), ranks_before);
        heap.back() = hit;
    } else {
        heap.push_back(hit);
    }
    std::push_heap(heap.begin(), heap.end(), ranks_before);
}

// heaps [queries]: the documents first .. last - 1 against `queries` queries
inline void search_part(std::vector<Hit>* heaps, size_t k, const float* queries, size_t count,
                        const float* documents, size_t first, size_t last, int C) {
    for (size_t d0 = first; d0 < last; d0 += SEARCH_ROWS) {
        const float* rows[SEARCH_ROWS];
        for (size_t j = 0; j < SEARCH_ROWS; j++) { rows[j] = documents + std::min(d0 + j, last - 1) * (size_t)C; }
        for (size_t q = 0; q < count; q++) {
            float scores[SEARCH_ROWS];
            dot_products(scores, queries + q * (size_t)C, rows, C);
            for (size_t j = 0; j < SEARCH_ROWS && d0 + j < last; j++) {
                offer(heaps[q], k, {scores[j], (int)(d0 + j)});
            }
        }
    }
}

// hits (count, most): the first `most` of the N documents for each of the queries (count, C), count <= SEARCH_QUERIES
inline void search_block(Hit* hits, size_t most, const float* queries, size_t count, const float* documents, size_t N,
                         int C) {
    const size_t parts = std::min((size_t)SEARCH_PARTS, ceil_div(N, (size_t)SEARCH_ROWS));
    std::vector<std::vector<Hit>> heaps(parts * SEARCH_QUERIES);
    for (auto& heap : heaps) { heap.reserve(std::min(most, N / parts + 2)); }
#if defined(_OPENMP)
#pragma omp parallel for schedule(dynamic)
#endif
    for (size_t p = 0; p < parts; p++) {
        search_part(&heaps[p * SEARCH_QUERIES], most, queries, count, documents, N * p / parts, N * (p + 1) / parts, C);
    }
    for (size_t q = 0; q < count; q++) {
        std::vector<Hit> best;
        for (size_t p = 0; p < parts; p++) {
            for (const Hit& hit : heaps[p * SEARCH_QUERIES + q]) { offer(best, most, hit); }
        }
        std::sort(best.begin(), best.end(), ranks_before);
        std::copy(best.begin(), best.end(), hits + q * most);
    }
}

// The first min(k, N) documents of each query by dot product, and of equal ones the earlier document first, in an exact
// search. queries (Q,C), documents (N,C). A collective: the ranks share the queries. Empty if a signal stopped it.
inline std::vector<std::vector<Hit>> search_top_k(const float* queries, size_t Q, const float* documents, size_t N,
                                                  int C, int k) {
    check(k >= 1 && C >= 1, "expected at least 1 document and 1 channel, got %d and %d", k, C);
    check(N >= 1 && N <= INT32_MAX, "expected 1 to %d documents to search, got %zu", INT32_MAX, N);
    const size_t most = std::min((size_t)k, N), block = SEARCH_QUERIES;
    std::vector<std::vector<Hit>> best;
    Progress progress("searching");
    const auto work = [&](size_t i, Hit* hits) {
        const size_t count = std::min(block, Q - i * block);
        search_block(hits, most, queries + i * block * (size_t)C, count, documents, N, C);
    };
    const auto take = [&](size_t, const Hit* hits) {
        for (size_t end = std::min(best.size() + block, Q); best.size() < end; hits += most) {
            best.emplace_back(hits, hits + most);
        }
        progress.update(best.size(), Q);
    };
    const bool whole = share_pieces<Hit>(ceil_div(Q, block), block * most, "hits of the search", work, take);
    if (!whole) { best.clear(); }
    return best;
}

// ----------------------------------------------------------------------------------------------------------
// the result

struct RetrievalScore {
    size_t queries = 0, documents = 0;          // queries: the judged ones, over which the means run
    int depth = 0;                              // number of ranks in the results
    size_t unjudged = 0;                        // queries without an entry in the qrels: in no mean
    size_t hopeless = 0;                        // judged, but no document relevant: 0 in the means, as in pytrec_eval
    size_t unasked = 0;                         // queries of the qrels that were not given
    size_t missing = 0;                         // relevant documents of the queries that are not in the collection
    double ndcg = 0.0, mrr = 0.0;               // ndcg: at 10
    std::vector<std::pair<int, double>> recall; // (k, recall@k)
    std::string qrels;
    bool stopped = false;                       // by a signal: the fields above are not valid
};

constexpr int NDCG_RANKS = 10;

// queries and corpus become unit vectors. Only ranks down to the largest cutoff count, also for MRR.
inline RetrievalScore evaluate_retrieval(Embeddings& queries, Embeddings& corpus, const Qrels& qrels,
                                         const std::vector<int>& cutoffs = {10, 100}) {
    check(queries.C == corpus.C, "queries of %d channels, documents of %d: encoded by different models?", queries.C,
          corpus.C);
    check(std::all_of(cutoffs.begin(), cutoffs.end(), [](int k) { return k >= 1; }), "recall at less than 1 document");
    RetrievalScore s;
    s.qrels = qrels.path;
    s.documents = corpus.size();
    s.depth = NDCG_RANKS;
    for (const int k : cutoffs) { s.depth = std::max(s.depth, k); s.recall.emplace_back(k, 0.0); }
    unit_rows(queries);
    unit_rows(corpus);
    const auto hits = search_top_k(queries.rows.data(), queries.size(), corpus.rows.data(), corpus.size(), corpus.C,
                                   s.depth);
    s.stopped = hits.empty();
    if (s.stopped) { return s; }
    const std::unordered_set<std::string> known(corpus.names.begin(), corpus.names.end());
    for (size_t q = 0; q < queries.size(); q++) {
        const auto judged = qrels.queries.find(queries.names[q]);
        if (judged == qrels.queries.end()) { s.unjudged++; continue; }
        std::vector<Ranked> found;
        for (const Hit& hit : hits[q]) { found.push_back({hit.score, corpus.names[(size_t)hit.document]}); }
        const std::vector<int> grades = ranked_grades(found, judged->second);
        size_t relevant = 0;
        for (const auto& j : judged->second) {
            relevant += j.second > 0;
            s.missing += j.second > 0 && known.count(j.first) == 0;
        }
        s.hopeless += relevant == 0;
        s.queries++;
        s.ndcg += ndcg_at(grades, judged->second, NDCG_RANKS);
        s.mrr += reciprocal_rank(grades);
        for (auto& r : s.recall) { r.second += recall_at(grades, judged->second, r.first); }
    }
    check(s.queries > 0, "%s: judges none of the %zu queries (the qrels of another collection?)", qrels.path.c_str(),
          queries.size());
    s.unasked = qrels.queries.size() - s.queries;
    s.ndcg /= (double)s.queries;
    s.mrr /= (double)s.queries;
    for (auto& r : s.recall) { r.second /= (double)s.queries; }
    return s;
}

// Prints a table, with notes on the queries that it covers. The record is for the log.
inline Json report_retrieval(const RetrievalScore& s) {
    printf("%10s %10s %9s", "queries", "documents", "nDCG@10");
    for (const auto& r : s.recall) { printf(" %10s", strprintf("recall@%d", r.first).c_str()); }
    printf(" %9s\n%10zu %10zu %9.4f", strprintf("MRR@%d", s.depth).c_str(), s.queries, s.documents, s.ndcg);
    for (const auto& r : s.recall) { printf(" %10.4f", r.second); }
    printf(" %9.4f\n", s.mrr);
    const struct { size_t n; const char* what; } notes[] = {
        {s.unjudged, "queries without judgements, left out"},
        {s.hopeless, "queries without a relevant document, counted as 0"},
        {s.unasked, "judged queries that were not asked"},
        {s.missing, "relevant documents that are not in the collection"}};
    for (const auto& note : notes) {
        if (note.n > 0) { printf("%s: %s: %zu\n", printable(s.qrels, LONGEST_MESSAGE).c_str(), note.what, note.n); }
    }
    fflush(stdout);
    Json j = {{"kind", "retrieval"}, {"ndcg@10", s.ndcg}};
    for (const auto& r : s.recall) { j[strprintf("recall@%d", r.first)] = r.second; }
    const Json rest = {{"mrr", s.mrr}, {"depth", s.depth}, {"queries", s.queries}, {"documents", s.documents},
                       {"unjudged", s.unjudged}, {"without_relevant", s.hopeless},
                       {"unasked", s.unasked}, {"missing", s.missing}};
    j.update(rest);
    return j;
}
