// lab/use_bert.h -- the flags of train_bert that choose its data or use a trained model: what they exclude, the files
// that they name, and the work. Templates over the trainer's model, as in evaluate.h.
#pragma once

#include <numeric>

#include "encode.h"
#include "validate.h"

// ----------------------------------------------------------------------------------------------------------
// flags and data

constexpr const char* BERT_USES = "--eval_lengths, --encode and --predict";

// Whether the flags request one of these. Flags that make no sense together are refused first.
inline bool uses_bert(const Options& o) {
    const auto too_short = [](int T) { return T < 2; };
    const bool any_short = std::any_of(o.eval_lengths.begin(), o.eval_lengths.end(), too_short);
    check(o.encode.empty() || !o.out.empty(), "--encode: give the directory to write to with --out");
    check(o.encode.empty() || !any_short, "--eval_lengths: a document has at least [CLS] and [SEP], so 2 tokens");
    check(!o.is_given("predict") || o.predict.find("[MASK]") != std::string::npos,
          "--predict: there is no [MASK] in the text");
    check(o.pairs.empty() || !o.is_given("val_every") || o.val_every == 0,
          "--val_every: --pairs has no validation; scripts/retrieve.py measures what it learns");
    return !o.encode.empty() || !o.eval_lengths.empty() || o.is_given("predict");
}

// Lengths and a text that the encoding cannot reach are refused before the weights are read.
template <class Config> void check_reach(const Options& o, const Config& c, const Tokenizer* tokenizer) {
    const char* name = c.position.name.c_str();
    const int reach = position_max_length(c.position);
    int shortest = 0;                                   // --encode takes the first length, the rest all that fit
    if (!o.eval_lengths.empty()) {
        const auto least = std::min_element(o.eval_lengths.begin(), o.eval_lengths.end());
        shortest = o.encode.empty() ? *least : o.eval_lengths[0];
    }
    check(shortest <= reach, "--eval_lengths: %s has no positions beyond %d, got %d", name, reach, shortest);
    if (!o.is_given("predict")) { return; }
    check(tokenizer != nullptr && tokenizer->cannot_encode.empty(),
          "--predict: a text wants a vocabulary; give it with --tokenizer");
    const size_t n = text_ids(o.predict, c.special, *tokenizer).size();
    check(n <= (size_t)reach, "--predict: %s has no positions beyond %d, got a text of %zu tokens", name, reach, n);
}

inline std::vector<std::string> file_paths(const Documents& documents) {
    std::vector<std::string> paths;
    for (const DocumentFile& f : documents.files) { paths.push_back(f.shard.path); }
    return paths;
}

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

// The data that the flags name
struct BERTData : TokenData {
    std::unique_ptr<Documents> pairs;           // to train on instead of `train`, without `val`
    std::unique_ptr<Documents> collection;      // of --encode

    explicit BERTData(const Run& run)
        : TokenData(run, run.trains && run.o.pairs.empty(), evaluates_lengths(run.o)) {}

    // The vocabulary that the data wants of the model, 0: there is no data. That of bytes has [CLS], [SEP], [MASK],
    // [PAD] too.
    int vocab() const {
        if (!any()) { return 0; }
        return any()->vocab == 256 ? BYTE_VOCAB : any()->vocab;
    }
    // The samples of one pass over the data: groups of --pairs, or sequences of T tokens
    uint64_t epoch(int T) const {
        if (pairs) { return pairs->groups(); }
        return train ? train->windows(T) : 0;
    }
    // What needs the model's vocabulary, its encoding or the batch is checked as soon as these are known.
    template <class Config> void check_uses(const Run& run, const Config& c) {
        const Options& o = run.o;
        check(!pairs || (size_t)run.samples <= pairs->groups(), "--total_batch %lld is %d groups at --T %d, but "
              "--pairs %s has %zu", (long long)o.total_batch, run.samples, o.T, o.pairs.c_str(),
              pairs ? pairs->groups() : 0);
        if (!o.encode.empty()) {
            collection = std::make_unique<Documents>(o.encode, "--encode", c.special, 1, run.tokenizer.get());
        }
        check_reach(o, c, run.tokenizer.get());
    }
    void record(Run& run) const {
        TokenData::record(run);
        record_data(run, pairs.get());
        if (collection) { check_same_files("--encode", file_paths(*collection)); }
    }
};

// Settles what resolve_config leaves open: the tokenizer, its special tokens, and the pooling.
template <class Config> void resolve_bert(Run& run, Config& c) {
    Options& o = run.o;
    if (c.V == 0) { c.V = pairs_vocab(o); }
    const int words = c.V == BYTE_VOCAB ? 256 : c.V;
    run.tokenizer = find_tokenizer(o.tokenizer, run.source, !run.resumed.empty(), words);
    if (!run.source.empty() && !o.is_given("pooling")) {
        const Json j = read_config(run.source, BERT_KEYS);
        if (j.contains("pooling")) {
            set_option(o, "pooling", run.source + ": pooling", json_string(j, "pooling", run.source));
            c.pooling = o.pooling;
        }
    }
    if (!o.pairs.empty() && run.trains) { c.pooling = o.pooling; }
    c.special = run.tokenizer != nullptr ? special_tokens(*run.tokenizer) : special_tokens(c.V);
    c.mask_share = o.mask_share;
}

// ----------------------------------------------------------------------------------------------------------
// the work

// A token as it can be printed: a byte that is only part of a character as \xe2
inline std::string shown_token(const Tokenizer& tokenizer, int id) {
    const std::string token = tokenizer.shown(id, true);
    const bool part = token.size() == 1 && (unsigned char)token[0] >= 128;
    return part ? strprintf("\\x%02x", (unsigned char)token[0]) : printable(token);
}

// --predict: prints the five likeliest tokens for each [MASK] of a text, with their probabilities, a softmax over the V
// logits. Of equally likely tokens the smaller id comes first.
template <class Model> void predict(Model& model, const std::string& text, const Tokenizer& tokenizer) {
    const int V = model.config.V, Vp = model.config.Vp();
    const int mask = model.config.special.mask;
    const std::vector<int> ids = text_ids(text, model.config.special, tokenizer);
    const int T = (int)ids.size();
    auto acts = activations_describe(model, 1, T, Purpose::Evaluate, 0);
    activations_allocate(acts);
    const int masks = (int)std::count(ids.begin(), ids.end(), mask), most = acts.chunk_of(false);
    check(masks <= most, "--predict: expected at most %d [MASK]s at once, got %d", most, masks);
    std::vector<int> targets, order((size_t)V);
    for (int id : ids) { targets.push_back(id == mask ? 0 : IGNORE_INDEX); }
    std::vector<float> losses(ids.size()), logits((size_t)masks * Vp);
    forward_losses(model, acts, ids.data(), targets.data(), nullptr, 1, T, losses.data(), nullptr);
    copy_to_host(logits.data(), acts.a.logits(), sizeof(float) * logits.size(), model.stream);
    acts.release();
    printf("%s\n", text.c_str());
    for (int k = 0; k < masks; k++) {
        const float* x = &logits[(size_t)k * Vp];
        check_finite("logits", x, (size_t)V);
        const auto likelier = [&](int a, int b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + imin(5, V), order.end(), likelier);
        double sum = 0;
        for (int id = 0; id < V; id++) { sum += std::exp((double)x[id] - x[order[0]]); }
        printf("  [MASK] %d:", k + 1);
        for (int i = 0; i < imin(5, V); i++) {
            const double share = std::exp((double)x[order[i]] - x[order[0]]) / sum;
            printf("  %s %.1f%%", shown_token(tokenizer, order[i]).c_str(), 100 * share);
        }
        printf("\n");
    }
    fflush(stdout);
}

// --encode: the documents are cut to max_tokens, and rank 0 writes their embeddings into --out
template <class Model> void write_collection(Model& model, const Run& run, const Documents& documents, int max_tokens) {
    const int B = std::max(1, EVALUATION_TOKENS / max_tokens);
    auto acts = activations_describe(model, B, max_tokens, Purpose::Evaluate, 0);
    activations_allocate(acts);
    const Embeddings e = encode_documents(model, acts, documents, max_tokens);
    acts.release();
    if (e.stopped) { return; }
    rank0_works([&] {
        Json made = {{"max_tokens", std::to_string(max_tokens)}, {"pooling", run.o.pooling}};
        const std::string weights = run.source + (is_directory(run.source) ? "/model.safetensors" : "");
        if (path_exists(weights)) { made["weights"] = sum_text(sampled_sum(File(weights))); }
        write_embeddings(run.o.out, e, made);
    }, "embeddings");
    const std::string path = printable(run.o.out + "/embeddings.safetensors", LONGEST_MESSAGE);
    printf("wrote %s: %zu embeddings of %d channels\n", path.c_str(), e.size(), e.C);
}

// Does what the flags request of a trained model.
template <class Model> void use_bert(Model& model, const Run& run, const BERTData& data) {
    const Options& o = run.o;
    if (data.collection) {
        write_collection(model, run, *data.collection, o.eval_lengths.empty() ? o.T : o.eval_lengths[0]);
    } else if (evaluates_lengths(o)) {
        evaluate_lengths(model, *data.val, o.eval_lengths, o.stride, (uint64_t)o.eval_tokens, o.curve, o.heads,
                         *run.log);
    }
    if (o.is_given("predict")) { predict(model, o.predict, *run.tokenizer); }
}
