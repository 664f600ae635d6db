// lab/embed.h -- uses of a BERT: contrastive training (--pairs), embeddings of a collection (--encode), predictions for
// [MASK] (--predict), and the flags that request them.
//
// Templates over the trainer's model, as in evaluate.h: they also call bert_forward and bert_backward.
#pragma once

#include <numeric>

#include "../contrastive.cuh"
#include "../engine/checkpoint.h"
#include "../engine/data.h"
#include "evaluate.h"

// ids (rows,T), lengths (rows) -> the texts' embeddings out (rows,C), float32 on the device
template <class Model, class Acts>
void bert_embed(float* out, Model& model, Acts& acts, const int* ids, const int* lengths, int rows, int T,
                bool backward) {
    const int L = model.config.L, C = model.config.C;
    load_batch(model, acts, 0, 1, ids, nullptr, lengths, rows, T, backward);
    bert_forward(model, acts, rows, T);
    pooling_forward(out, acts.a.ln2(L - 1), acts.batch.lengths, rows, T, C, model.pooling, model.stream);
}

// The same with out on the host, for rows <= sequences_that_fit(acts, T). Other rows and padding do not change
// an embedding. With piece, which divides T, out (rows,T/piece,C) are the embeddings of pieces of the texts after one
// forward of the whole: late chunking (Guenther et al. 2024). A piece after a text's end has NaN.
template <class Model, class Acts>
void embed_documents(Model& model, Acts& acts, const int* ids, const int* lengths, int rows, int T, float* out,
                     int piece = 0) {
    const int C = model.config.C, per = piece > 0 ? T / piece : 1;
    float* pooled = (float*)acts.a.fch();       // large enough, and no longer used after the forward
    bert_embed(pooled, model, acts, ids, lengths, rows, T, false);
    if (piece > 0) {
        std::vector<int> own;                   // the number of tokens of each piece
        for (int k = 0; k < rows * per; k++) {
            own.push_back(imin(imax(lengths[k / per] - k % per * piece, 0), piece));
        }
        int* device = acts.batch.targets;       // no text has any
        copy_to_device(device, own.data(), sizeof(int) * own.size(), model.stream);
        pooling_forward(pooled, acts.a.ln2(model.config.L - 1), device, rows * per, piece, C, Pooling::Mean,
                        model.stream);
    }
    copy_to_host(out, pooled, sizeof(float) * rows * per * C, model.stream);
}

// A chunk of rows ends before its padding exceeds this many tokens: one more chunk costs about as much.
constexpr size_t CHUNK_PADDING = ON_GPU ? 2048 : 64;

// The mean loss of a step's groups, and its gradient: the whole batch's, as no chunk of rows goes back before the loss
// has all embeddings (Gao et al. 2021). Sorted by length, row k belongs to leaf k % leaves of the gradient's sum, and
// all leaves are cut into the same chunks, of at most B rows. As many of the first chunks as fit in acts keep their
// activations from the forward to the backward; the rest go forward twice, which changes no bit. Ranks share the
// leaves, but each has all embeddings, because the loss of a query depends on the whole batch.
// teacher: the target of each document, (N,C); empty: InfoNCE
template <class Model, class Acts>
StepGradient contrastive_gradient(Model& model, Acts& acts, const ContrastiveBuffers& c, const GroupBatch& batch,
                                  const std::vector<float>& teacher, int B, int leaves, double tau, int recompute) {
    struct Chunk { Acts acts; size_t first; };              // and its first row in c.emb
    const int Q = batch.groups, C = model.config.C;
    const int ranks = comm().size, rank = comm().rank;
    const size_t rows = (size_t)batch.rows, T = (size_t)batch.T;
    const size_t in_leaf = rows / (size_t)leaves;
    check(rows % leaves == 0 && leaves % ranks == 0,
          "expected parts that divide %zu rows and are shared by %d ranks, got %d", rows, ranks, leaves);
    // 1 the order of the rows in c.emb, leaf by leaf, and the chunks of a leaf
    std::vector<size_t> sorted(rows), order(rows);
    std::iota(sorted.begin(), sorted.end(), (size_t)0);
    const auto longer = [&](size_t a, size_t b) { return batch.lengths[a] > batch.lengths[b]; };
    std::stable_sort(sorted.begin(), sorted.end(), longer);
    for (size_t k = 0; k < rows; k++) { order[k % leaves * in_leaf + k / leaves] = sorted[k]; }
    const struct { int B, T; } most = {B, acts.T};
    const bool whole = model.config.position.scaling == RopeScaling::LongRoPE;          // its factors depend on T
    const std::vector<RowBatch> cuts = row_batches(in_leaf, most, [&](size_t k) {       // leaf 0 has the longest
        return whole ? T : std::min(round_up((size_t)batch.lengths[order[k]], (size_t)8), T);
    }, CHUNK_PADDING, (size_t)B);
    // 2 the memory of this rank's chunks
    acts.batch.reserve(rows + rows / ranks * T * DeviceBatch::ints(1));
    int* host = acts.batch.pinned;
    for (size_t r = 0; r < rows; r++) { host[order[r]] = (int)r; }
    copy_to_device_async(c.place, host, sizeof(int) * rows, model.stream);
    host += rows;
    std::vector<Chunk> chunks;
    size_t used = 0, kept = 0;
    for (int leaf = leaves / ranks * rank; leaf < leaves / ranks * (rank + 1); leaf++) {
        for (const RowBatch& cut : cuts) {
            Acts a = activations_describe(model, (int)cut.n, (int)cut.T, Purpose::Train, recompute);
            const size_t floats = a.bytes() / sizeof(float), all = acts.bytes() / sizeof(float);
            check(floats <= all, "a chunk of %zu x %zu tokens: expected at most the room of %d x %d", cut.n, cut.T,
                  acts.B, acts.T);
            const bool fits = kept == chunks.size() && used + floats <= all;
            activations_allocate(a, acts.data + (fits ? used : 0));
            a.batch.pinned = host;
            a.batch.room = DeviceBatch::ints(a.batch.N);
            host += a.batch.room;
            used += fits ? floats : 0;
            kept += fits;
            chunks.push_back({a, leaf * in_leaf + cut.first});
        }
    }
    // 3 embed all rows
    const auto embed = [&](Chunk& chunk) {
        std::vector<int> ids, lengths;
        for (size_t r = chunk.first; r < chunk.first + chunk.acts.B; r++) {
            const auto row = batch.ids.begin() + (ptrdiff_t)(order[r] * T);
            ids.insert(ids.end(), row, row + chunk.acts.T);
            lengths.push_back(batch.lengths[order[r]]);
        }
        bert_embed(c.emb + chunk.first * C, model, chunk.acts, ids.data(), lengths.data(), chunk.acts.B, chunk.acts.T,
                   true);
    };
    std::for_each(chunks.rbegin(), chunks.rend(), embed);
    settle_weights(model);
    share_rows(c.emb, rows / ranks * C, "embeddings of the batch", model.stream);
    // 4 the loss of each query, and the gradient of each embedding
    const float dloss = 1.0f / (float)Q;
    if (teacher.empty()) {
        contrastive_forward_backward(c.losses, c.demb, c.scratch, c.emb, c.place, Q, batch.rows - Q, C, (float)tau,
                                     dloss, model.stream);
    } else {
        std::vector<float> wanted;              // (rows,C), in the order of c.emb
        for (size_t r : order) {
            const auto row = teacher.begin() + (ptrdiff_t)batch.which[r] * C;
            wanted.insert(wanted.end(), row, row + C);
        }
        copy_to_device(c.demb, wanted.data(), sizeof(float) * wanted.size(), model.stream);
        distill_forward_backward(c.losses, c.demb, c.scratch, c.emb, c.place, batch.rows, C, dloss, model.stream);
    }
    loss_sum(model.loss_sums, c.losses, rank == 0 ? (size_t)Q : 0, model.stream);           // counted once
    // 5 back through the model
    const int n = (int)chunks.size();
    model.leaf = (int)cuts.size();
    for (int i = 0; i < n; i++) {
        Chunk& chunk = chunks[(size_t)i];
        Acts& a = chunk.acts;
        if ((size_t)i >= kept) { embed(chunk); }
        float* grads = gradient_begin(model, i, n);
        pooling_backward(a.a.dresidual(), c.demb + chunk.first * C, a.batch.lengths, a.B, a.T, C, model.pooling,
                         model.stream);
        bert_backward(model, a, grads, a.B, a.T, recompute);
        gradient_add(model, i, n);
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

// The length that --encode cuts a document to
inline int encoded_tokens(const Options& o) {
    const int length = o.eval_lengths.empty() ? o.T : o.eval_lengths[0];
    check(o.encode_piece == 0 || length % o.encode_piece == 0, "--encode_piece: expected a divisor of the length of %d "
          "tokens, got %d", length, o.encode_piece);
    return length;
}

// Embeds the documents of a collection, cut to max_tokens, in batches of about equal lengths; with piece, which divides
// max_tokens, each piece of a document, under the names NAME:0, NAME:1, ... The longest come first, so that a lack of
// memory shows at once. A collective: ranks share the batches; each gets all embeddings.
template <class Model, class Acts>
Embeddings encode_documents(Model& model, Acts& acts, const Documents& documents, int max_tokens, int piece = 0) {
    const Phase encoding("encoding documents");
    check(documents.group == 1, "%s: expected a collection, got groups of %d documents", documents.flag.c_str(),
          documents.group);
    check(max_tokens >= 2 && max_tokens <= acts.T, "%s: expected a length of 2 to %d tokens, got %d",
          documents.flag.c_str(), (int)acts.T, max_tokens);
    const size_t N = documents.size(), C = (size_t)model.config.C;
    Embeddings e;
    e.C = (int)C;
    std::vector<int> length(N);
    std::vector<size_t> first(N + 1, 0);                // the first embedding of each document
    for (size_t i = 0; i < N; i++) {
        length[i] = (int)std::min(documents.length(i), (uint64_t)max_tokens);
        const int pieces = piece > 0 ? ceil_div(length[i], piece) : 1;
        for (int k = 0; k < pieces; k++) {
            e.names.push_back(documents.name(i) + (piece > 0 ? strprintf(":%d", k) : ""));
        }
        first[i + 1] = e.size();
    }
    e.rows.resize(checked_mul(e.size(), C, "embeddings"));
    std::vector<size_t> order(N);
    std::iota(order.begin(), order.end(), (size_t)0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return length[a] > length[b]; });
    const std::vector<RowBatch> batches = row_batches(N, acts, [&](size_t i) {
        return std::min(round_up(length[order[i]], piece > 0 ? piece : 8), max_tokens);
    });
    const size_t most = piece > 0 ? (size_t)(max_tokens / piece) : 1;       // embeddings of a document
    Progress progress(documents.flag + ": encoding");
    std::vector<int> ids, lengths;
    std::vector<float> pieces;
    const auto work = [&](const RowBatch& b, float* out) {
        ids.assign(b.n * b.T, documents.special.pad);
        lengths.resize(b.n);
        for (size_t r = 0; r < b.n; r++) {
            lengths[r] = documents.read(order[b.first + r], max_tokens, ids.data() + r * b.T);
        }
        const size_t row = (piece > 0 ? b.T / (size_t)piece : 1) * C;
        pieces.resize(b.n * row);
        embed_documents(model, acts, ids.data(), lengths.data(), (int)b.n, (int)b.T, pieces.data(), piece);
        for (size_t r = 0; r < b.n; r++) { std::copy_n(pieces.data() + r * row, row, out + r * most * C); }
    };
    const auto take = [&](size_t i, const float* row) {
        const size_t d = order[i];
        std::copy_n(row, (first[d + 1] - first[d]) * C, e.rows.begin() + (long)(first[d] * C));
    };
    e.stopped = !share_batches<float>(batches, most * C, progress, work, take);
    check_finite("embeddings", e.rows.data(), e.rows.size());
    return e;
}

// Writes DIR/embeddings.safetensors with "embeddings" (N,C), and DIR/embeddings.ids with the names, one per line. Each
// file appears complete or not at all. The safetensors file has a checksum of the names, which exposes files of two
// different writes. metadata: more strings for the header
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

// ----------------------------------------------------------------------------------------------------------
// flags and data

inline std::string bert_help() {
    return "Trains and evaluates a BERT with any of these encodings (--pos):\n" + position_help() +
           "\n" + sizes_help(BERT_FLAG) + "\n"
           "Train on your own text, and save every 500 steps; --resume 1 continues a run:\n"
           "  ./train_bert --train_files a.txt --val_files b.txt --model 2,4,64 --T 128 \\\n"
           "               --B 16 --steps 1000 --lr 2e-3 --warmup 100 --final_lr 0.1 \\\n"
           "               --pos cable --out run/bert --checkpoint_every 500\n"
           "Measure how far it extrapolates beyond the length it was trained at:\n"
           "  ./train_bert --load run/bert --val_files b.txt --eval_lengths 128,256,512\n"
           "Fill in the blanks:\n"
           "  ./train_bert --load run/bert --predict \"the [MASK]at sat on the mat\"\n";
}

constexpr const char* BERT_USES = "--eval_lengths, --encode and --predict";

// Whether the flags request a use of the model. Refuses flags that contradict each other.
inline bool uses_bert(const Options& o) {
    const bool any_short = std::any_of(o.eval_lengths.begin(), o.eval_lengths.end(), [](int T) { return T < 2; });
    check(o.encode.empty() || !o.out.empty(), "--encode: give the directory to write to with --out");
    check(o.encode_piece == 0 || !o.encode.empty(), "--encode_piece: give the documents with --encode");
    check(o.encode.empty() || !any_short, "--eval_lengths: a document has at least [CLS] and [SEP], so 2 tokens");
    const bool parts = !evaluated_parts(o.dump_bias, o.eval_lengths, o.out, INT_MAX).directory.empty();
    check(o.distill.empty() || !o.pairs.empty(), "--distill: give the texts with --pairs");
    check(o.distill.empty() || !o.is_given("tau"), "--tau: --distill has no temperature");
    check(o.dump_bias.empty() || (parts && o.encode.empty() && comm().size == 1), "--dump_bias: expected LAYER,parts "
          "with --eval_lengths and --out, and one process");
    check(o.pairs.empty() || !o.is_given("val_every") || o.val_every == 0,
          "--val_every: --pairs has no validation; scripts/retrieve.py measures what it learns");
    return !o.encode.empty() || !o.eval_lengths.empty() || o.is_given("predict");
}

// The ids of --predict: a shard's ids; for a model of bytes, the text between [CLS] and [SEP]; else the ids in the text
inline std::vector<int> predict_ids(const Options& o, const SpecialTokens& special) {
    std::vector<int> ids = prompt_in_shard(o.predict, "--predict", special.V);
    if (ids.empty() && special.V == BYTE_VOCAB) { ids = text_ids(o.predict, special); }
    if (ids.empty()) { ids = parse_ids(o.predict, special.V, "--predict", "predict"); }
    check(std::count(ids.begin(), ids.end(), special.mask) > 0, "--predict: there is no [MASK] in the text; its id is "
          "%d", special.mask);
    return ids;
}

// Before the weights are read, refuses lengths and texts that the encoding cannot reach.
template <class Config> void check_reach(const Options& o, const Config& c) {
    const char* name = c.position.name.c_str();
    const int reach = position_max_length(c.position);
    int shortest = 0;                                   // an evaluation skips lengths beyond the reach
    if (!o.eval_lengths.empty()) {
        const auto least = std::min_element(o.eval_lengths.begin(), o.eval_lengths.end());
        shortest = o.encode.empty() ? *least : o.eval_lengths[0];
    }
    check(shortest <= reach, "--eval_lengths: %s has no positions beyond %d, got %d", name, reach, shortest);
    if (!o.is_given("predict")) { return; }
    const size_t n = predict_ids(o, c.special).size();
    check(n <= (size_t)reach, "--predict: %s has no positions beyond %d, got a text of %zu tokens", name, reach, n);
}

inline std::vector<std::string> file_paths(const Documents& documents) {
    std::vector<std::string> paths;
    for (const DocumentFile& f : documents.files) { paths.push_back(f.shard.path); }
    return paths;
}

// Identifies the files of documents
inline std::string texts_sum(const Documents& documents) {
    std::string sums;
    for (const Json& f : file_records(file_paths(documents))) { sums += f.at("blocks").get<std::string>() + " "; }
    return sums;
}

// The groups of --pairs: a query, its positive and perhaps negatives; with --distill single texts
inline std::unique_ptr<Documents> open_pairs(const Options& o, const SpecialTokens& special) {
    auto pairs = std::make_unique<Documents>(o.pairs, "--pairs", special, o.distill.empty() ? 0 : 1);
    check(pairs->group >= 2 || !o.distill.empty(), "--pairs %s: expected groups of a query, its positive and "
          "negatives, got single documents", o.pairs.c_str());
    return pairs;
}

// --distill: the embeddings (N,C) of texts that --encode has written into a directory
inline std::vector<float> read_teacher(const std::string& dir, const Documents& texts, int C) {
    const Safetensors file(dir + "/embeddings.safetensors");
    const SafetensorsEntry& e = file.entry("embeddings");
    check(e.shape == std::vector<size_t>({texts.size(), (size_t)C}), "--distill: %s: expected %zu embeddings of %d "
          "numbers, for the texts of --pairs, got %s", file.file.path.c_str(), texts.size(), C,
          shape_text(e.shape).c_str());
    check(file.metadata.value("texts", "") == texts_sum(texts), "--distill: %s: expected embeddings of the texts of "
          "--pairs %s, got embeddings of other texts; write them with --encode", file.file.path.c_str(),
          texts.pattern.c_str());
    std::vector<float> rows(e.elements);
    file.read_elements(e, rows.data(), 0, e.elements);
    check(std::all_of(rows.begin(), rows.end(), [](float x) { return std::isfinite(x); }), "--distill: %s: expected "
          "finite numbers", file.file.path.c_str());
    return rows;
}

// The vocabulary of a new model that trains on pairs: --tokenizer's; else bytes for text, BERT's for shards
inline int pairs_vocab(const Options& o) {
    if (o.tokenizer.empty()) { return ends_with(o.pairs, ".txt") ? BYTE_VOCAB : BERT_VOCAB; }
    const int V = Tokenizer::load(o.tokenizer).vocab_size();
    return V == 256 ? BYTE_VOCAB : V;
}

// The data that the flags name
struct BERTData : TokenData {
    std::unique_ptr<Documents> pairs;           // to train on instead of `train`, without `val`
    std::vector<float> teacher;                 // (documents,C): --distill's embeddings of them, or empty
    std::unique_ptr<Documents> collection;      // --encode's

    explicit BERTData(const Run& run)
        : TokenData(run, run.trains && run.o.pairs.empty(), evaluates_lengths(run.o)) {}

    // The vocabulary that the data needs, 0 without data. Bytes need BYTE_VOCAB: [CLS], [SEP], [MASK], [PAD], too.
    int vocab() const {
        if (!any()) { return 0; }
        return any()->vocab == 256 ? BYTE_VOCAB : any()->vocab;
    }
    // The samples of one pass over the data: groups of --pairs, or sequences of T tokens
    uint64_t epoch(int T) const {
        if (pairs) { return pairs->groups(); }
        return train ? train->windows(T) : 0;
    }
    // The checks that need the model's vocabulary, its encoding or the batch size
    template <class Config> void check_uses(const Run& run, const Config& c) {
        const Options& o = run.o;
        check(!pairs || (size_t)run.samples <= pairs->groups(), "--total_batch %lld is %d groups at --T %d, but "
              "--pairs %s has %zu", (long long)o.total_batch, run.samples, o.T, o.pairs.c_str(),
              pairs ? pairs->groups() : 0);
        if (pairs && !o.distill.empty()) { teacher = read_teacher(o.distill, *pairs, c.C); }
        if (!o.encode.empty()) {
            encoded_tokens(o);
            collection = std::make_unique<Documents>(o.encode, "--encode", c.special, 1);
        }
        check_reach(o, c);
        evaluated_parts(o.dump_bias, o.eval_lengths, o.out, c.L);       // refuses a layer that is not there
        say_repeated(train.get(), val.get());
        say_repeated(pairs.get());
    }
    void record(Run& run) const {
        TokenData::record(run);
        record_data(run, pairs.get());
        if (!teacher.empty()) { record_files(run, "--distill", {run.o.distill + "/embeddings.safetensors"}); }
        if (collection) { check_same_files("--encode", file_paths(*collection)); }
    }
};

// Settles what settle_config leaves open: the tokenizer, its special tokens, and the pooling.
template <class Config> void resolve_bert(Run& run, Config& c) {
    Options& o = run.o;
    if (c.V == 0) { c.V = pairs_vocab(o); }
    const int words = c.V == BYTE_VOCAB ? 256 : c.V;
    run.tokenizer = find_tokenizer(o.tokenizer, run.source, !run.resumed.empty(), words);
    if (!c.pooling.empty() && !o.is_given("pooling")) { o.pooling = c.pooling; }
    check(o.encode_piece == 0 || o.pooling == "mean", "--encode_piece: a piece has no [CLS]; expected --pooling mean");
    if (!o.pairs.empty() && run.trains) { c.pooling = o.pooling; }
    c.special = run.tokenizer != nullptr ? special_tokens(*run.tokenizer) : special_tokens(c.V);
    c.mask_share = o.mask_share;
}

// ----------------------------------------------------------------------------------------------------------
// --predict and --encode

// A token in print: a byte that is only part of a character as \xe2; without a tokenizer, the id
inline std::string shown_token(const Tokenizer* tokenizer, int id) {
    if (tokenizer == nullptr) { return std::to_string(id); }
    const std::string token = tokenizer->shown(id, true);
    const bool part = token.size() == 1 && (unsigned char)token[0] >= 128;
    return part ? strprintf("\\x%02x", (unsigned char)token[0]) : printable(token);
}

// --predict: prints the five likeliest tokens for each [MASK] of a text, with their probabilities. Of equally likely
// tokens the smaller id comes first.
template <class Model> void predict(Model& model, const Options& o, const Tokenizer* tokenizer) {
    const int V = model.config.V, Vp = model.config.Vp();
    const int mask = model.config.special.mask;
    const std::vector<int> ids = predict_ids(o, model.config.special);
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
    if (prompt_in_shard(o.predict, "--predict", V).empty()) { printf("%s\n", o.predict.c_str()); }
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

// --encode: embeds the documents, cut to max_tokens; rank 0 writes the embeddings into --out
template <class Model> void write_collection(Model& model, const Run& run, const Documents& documents, int max_tokens) {
    const int B = std::max(1, EVALUATION_TOKENS / max_tokens);
    auto acts = activations_describe(model, B, max_tokens, Purpose::Evaluate, 0);
    activations_allocate(acts);
    const Embeddings e = encode_documents(model, acts, documents, max_tokens, run.o.encode_piece);
    acts.release();
    if (e.stopped) { return; }
    rank0_works([&] {
        Json made = {{"max_tokens", std::to_string(max_tokens)}, {"pooling", run.o.pooling},
                     {"texts", texts_sum(documents)}};
        if (run.o.encode_piece > 0) { made["piece"] = std::to_string(run.o.encode_piece); }
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
        write_collection(model, run, *data.collection, encoded_tokens(o));
    } else if (evaluates_lengths(o)) {
        evaluate_lengths(model, *data.val, o.eval_lengths, o.stride, (uint64_t)o.eval_tokens, o.curve,
                         evaluated_parts(o.dump_bias, o.eval_lengths, o.out, model.config.L), *run.log);
    }
    if (o.is_given("predict")) { predict(model, o, with_text(run.tokenizer.get())); }
}
