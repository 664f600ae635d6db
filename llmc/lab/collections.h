// lab/collections.h -- the collections of documents of train_bert's flags --pairs, --encode, --corpus and --queries.
#pragma once

#include "retrieval.h"
#include "../engine/run/run.h"

inline std::vector<std::string> file_paths(const Documents& documents) {
    std::vector<std::string> paths;
    for (const DocumentFile& f : documents.files) { paths.push_back(f.shard.path); }
    return paths;
}

// Opened and checked before any work; null without the flag
struct Collections {
    std::unique_ptr<Documents> encode, corpus, queries;
    Qrels qrels;

    // words: the model's vocabulary, for text; null without one
    void open(const Options& o, const SpecialTokens& special, const Tokenizer* words) {
        if (!o.encode.empty()) { encode = std::make_unique<Documents>(o.encode, "--encode", special, 1, words); }
        if (o.corpus.empty()) { return; }
        queries = std::make_unique<Documents>(o.queries, "--queries", special, 1, words);
        corpus = std::make_unique<Documents>(o.corpus, "--corpus", special, 1, words);
        qrels = read_qrels(o.qrels);
    }
    // A collective: all ranks must have the same collections; each reads its share.
    void compare() const {
        for (const Documents* d : {encode.get(), corpus.get(), queries.get()}) {
            if (d != nullptr) { check_same_files(d->flag, file_paths(*d)); }
        }
        if (corpus != nullptr) { check_same_files("--qrels", {qrels.path}); }
    }
};

// The groups of --pairs, at least one query and one positive each
inline std::unique_ptr<Documents> open_pairs(const Options& o, const SpecialTokens& special, const Tokenizer* words) {
    auto pairs = std::make_unique<Documents>(o.pairs, "--pairs", special, 0, words);
    check(pairs->group >= 2, "--pairs %s: expected groups of a query, its positive and negatives, got single documents",
          o.pairs.c_str());
    return pairs;
}

// The vocabulary of a new model if no token file decides it: text is read as bytes, except with --tokenizer.
inline int pairs_vocab(const Options& o) {
    if (o.pairs.size() <= 4 || !ends_with(o.pairs, ".txt")) { return BERT_VOCAB; }               // shards of BERT's ids
    const int V = o.tokenizer.empty() ? 256 : Tokenizer::load(o.tokenizer).vocab_size();
    return V == 256 ? BYTE_VOCAB : V;
}

// Embeddings of a collection, its documents cut to max_tokens
template <class Model> Embeddings encode(Model& model, const Documents& documents, int max_tokens) {
    const int B = std::max(1, EVALUATION_TOKENS / max_tokens);
    auto acts = activations_describe(model, B, max_tokens, Purpose::Evaluate, 0);
    activations_allocate(acts);
    Embeddings e = encode_documents(model, acts, documents, max_tokens);
    acts.release();
    return e;
}

// --encode: rank 0 writes the embeddings into --out
template <class Model> void write_collection(Model& model, const Run& run, const Documents& documents, int max_tokens) {
    const Embeddings e = encode(model, documents, max_tokens);
    if (e.stopped) { return; }
    const std::string path = run.o.out + "/embeddings.safetensors";
    rank0_works([&] {
        write_embeddings(path, e, {{"max_tokens", std::to_string(max_tokens)}, {"pooling", run.o.pooling}});
    }, "embeddings");
    printf("wrote %s: %zu embeddings of %d channels\n", printable(path, LONGEST_MESSAGE).c_str(), e.size(), e.C);
}

// --corpus: searches it for every query, with the texts cut to T tokens, and reports the quality of the answers
template <class Model> void search_collection(Model& model, const Run& run, const Collections& c, int T) {
    if (!reaches(model.config.position, T, strprintf("%8d: ", T))) { return; }
    Embeddings queries = encode(model, *c.queries, T);
    Embeddings corpus = encode(model, *c.corpus, T);
    if (queries.stopped || corpus.stopped) { return; }
    const RetrievalScore score = evaluate_retrieval(queries, corpus, c.qrels);
    if (score.stopped) { return; }
    printf("max length %d\n", T);
    Json j = report_retrieval(score);
    j["T"] = T;
    j["pos"] = model.config.position.name;
    run.log->record(j);
}
