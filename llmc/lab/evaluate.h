// lab/evaluate.h -- how good a model is: perplexity at any length, the loss by position, tasks, HellaSwag.
//
// Ranks share batches of rows. A row is a window of a data set (perplexity, also in validation while training), or a
// text with a right answer (tasks, HellaSwag).
//
// Templates over the trainer's model. They call, with its types:
//   activations_describe(model, B, T, Purpose, recompute), activations_allocate(acts)
//   set_targets(model, stream, start, n, tokens, targets): the inputs and targets for stream[0 .. n-1]; stream[0] is
//     token number `start` of the data, and stream[n] exists too
//   forward_losses(model, acts, tokens, targets, lengths, B, T, losses, hits): of B * T targets the losses, 0 where
//     ignored, and whether each was the likeliest token. Row b has lengths[b] tokens. lengths (all T) and hits may be
//     null
#pragma once

#include "../attention/choose.cuh"
#include "../engine/config.h"
#include "../engine/data.h"
#include "../engine/json.h"
#include "../engine/model.cuh"
#include "../engine/parameters.cuh"
#include "../engine/run.h"
#include "../engine/safetensors.h"
#include "dump.h"

// ----------------------------------------------------------------------------------------------------------
// batches of rows, shared by the ranks

constexpr int EVALUATION_TOKENS = ON_GPU ? 32768 : 2048;        // in a batch

// The progress of a long loop: one line, rewritten in place, on a terminal; elsewhere a new line every ten seconds.
struct Progress {
    std::string label;
    double start = wall_seconds(), last = start;
    bool terminal = isatty(STDERR_FILENO) == 1, shown = false;
    explicit Progress(const std::string& label) : label(label) {}
    // reach: how far queries have looked back at most; 0 is not shown
    void update(uint64_t done, uint64_t total, int reach = 0) {
        const double now = wall_seconds();
        if (comm().rank > 0 || done == 0 || now - last < (terminal ? 0.5 : 10.0)) { return; }
        last = now;
        shown = true;
        const double share = (double)done / (double)total;
        const std::string eta = format_duration((now - start) * (1 - share) / share);
        const std::string far = reach > 0 ? strprintf(", looking back up to %d tokens", reach) : "";
        fprintf(stderr, "%s%s: %.0f%%, ETA %s%s%s", terminal ? "\r" : "", label.c_str(), 100 * share, eta.c_str(),
                far.c_str(), terminal ? "   " : "\n");
    }
    ~Progress() { if (shown && terminal) { fprintf(stderr, "\r%*s\r", (int)label.size() + 70, ""); } }
};

// The rows of one forward: n rows from `first` on, padded to T, the longest row's length
struct RowBatch { size_t first, n, T; };

// `rows` rows in batches, in order: each batch has as many as acts has room for, but at most `most`, and at most
// `padding` tokens that fill up rows shorter than earlier ones. length(i): tokens in row i. The number of ranks changes
// no batch, because the bits of a matrix product may depend on its number of rows.
template <class Acts, class Length>
std::vector<RowBatch> row_batches(size_t rows, const Acts& acts, Length length, size_t padding = SIZE_MAX,
                                  size_t most = SIZE_MAX) {
    std::vector<RowBatch> batches;
    for (RowBatch b = {0, 0, 0}; b.first < rows; b = {b.first + b.n, 0, 0}) {
        for (size_t padded = 0; b.first + b.n < rows; b.n++) {
            const size_t tokens = length(b.first + b.n), longest = std::max(b.T, tokens);
            padded += longest - tokens;
            const size_t room = std::min(most, (size_t)sequences_that_fit(acts, (int)longest));
            if (b.n > 0 && (padded > padding || b.n + 1 > room)) { break; }
            b.T = longest;
        }
        batches.push_back(b);
    }
    return batches;
}

// A collective: each rank computes some of the batches by work(batch, results), with `width` results per row; then
// every rank calls take(row, result) for all rows, in order. Returns false if a signal has stopped it.
template <class R, class Work, class Take>
bool share_batches(const std::vector<RowBatch>& batches, size_t width, Progress& progress, Work work, Take take) {
    size_t most = 0;
    uint64_t total = 0, done = 0;
    for (const RowBatch& b : batches) {
        most = std::max(most, b.n * width);
        total += b.n * b.T;
    }
    const auto compute = [&](size_t i, R* results) { work(batches[i], results); };
    const auto take_all = [&](size_t i, const R* results) {
        const RowBatch& b = batches[i];
        for (size_t r = 0; r < b.n; r++) { take(b.first + r, results + r * width); }
        progress.update(done += b.n * b.T, total);
    };
    return distribute_pieces<R>(batches.size(), most, progress.label.c_str(), compute, take_all);
}

// ----------------------------------------------------------------------------------------------------------
// the losses of one window: a long one in pieces, in memory that hardly grows with its length
//
// A causal forward may take a window in pieces. Each piece continues from the keys and values of the earlier pieces,
// with the same bits as one forward. If in every layer the bias makes the weights of distant keys 0 (choose.cuh), old
// keys are forgotten. How far back later queries will look is not known, so KEPT_REACHES times the farthest look so far
// is kept. A query that visits the oldest kept key may have needed a forgotten one: then the window starts again, and
// more keys are kept.

constexpr int KEPT_REACHES = 2, LEAST_KEPT = 8192;
constexpr int KEPT_UNIT = 256;              // keys forgotten at a time: whole tiles, whole chunks of cable's sums

// Whether windows of T tokens are computed in pieces. Not on a GPU: the tensor-core kernels take whole windows only.
template <class Model> bool in_pieces(const Model& model, int T) {
    return model.config.causal && !ON_GPU && T > PIECE;
}
// Whether keys can be forgotten: attention skips tiles in every layer
template <class Model, class Acts> bool forgets(const Model& model, const Acts& acts) {
    for (int l = 0; l < model.config.L; l++) {
        const PositionView v = layer_position(model, acts, l, acts.T).bias();
        if (!skips_tiles(acts.T, v)) { return false; }
    }
    return true;
}

// How far the queries t0 .. t0 + n - 1 look back at most, from the end of their tile to the first key that it visits.
// INT_MAX: that key may be forgotten
template <class Model, class Acts> int longest_reach(const Model& model, const Acts& acts, int t0, int n) {
    const int NH = model.config.NH, tiles = ceil_div(acts.T, ATTENTION_TILE);
    const int from = t0 / ATTENTION_TILE, to = ceil_div(t0 + n, ATTENTION_TILE);
    std::vector<int> first((size_t)(to - from));                // attention/choose.cuh leaves it in attscratch
    int reach = 0;
    for (int row = 0; row < model.config.L * NH; row++) {
        const int* found = (const int*)acts.a.attscratch(row / NH) + (size_t)(row % NH) * tiles + from;
        copy_to_host(first.data(), found, sizeof(int) * first.size(), model.stream);
        for (int m = from; m < to; m++) {
            const int key = first[(size_t)(m - from)];
            if (acts.forgotten > 0 && key <= acts.forgotten) { return INT_MAX; }
            reach = imax(reach, (m + 1) * ATTENTION_TILE - key);
        }
    }
    return reach;
}

// Calls f(table, data, i) for the tensors with a row or a column per key: qkv, lse, the encoding's cached arrays
template <class Acts, class F> void each_over_keys(Acts& acts, F f) {
    for (const char* name : {"qkv", "lse"}) { f(acts.table, acts.data, (size_t)acts.table.find(name)); }
    for (size_t i = 0; i < acts.position_table.specs.size(); i++) {
        const TensorSpec& s = acts.position_table.specs[i];
        if (s.keep == Keep::Cached && s.cols == (size_t)acts.T) { f(acts.position_table, acts.position_data, i); }
    }
}
// The bytes that one key takes in these tensors
template <class Acts> size_t key_bytes(Acts& acts) {
    size_t bytes = 0;
    each_over_keys(acts, [&](const TensorTable& table, float*, size_t i) {
        bytes += table.specs[i].size() * table.specs[i].element;
    });
    return bytes / (size_t)acts.T;
}
// Returns the memory of the keys before `end` to the system.
template <class Acts> void forget(Acts& acts, int end) {
    each_over_keys(acts, [&](const TensorTable& table, float* data, size_t i) {
        const TensorSpec& s = table.specs[i];
        const size_t rows = s.rows == (size_t)acts.T ? 1 : s.rows;      // each row has all keys
        const size_t key = s.layer_size() / rows / (size_t)acts.T * s.element;
        for (size_t r = 0; r < rows * (size_t)imax(s.layers, 1); r++) {
            char* layer = (char*)(data + table.offsets[i]) + r / rows * table.strides[i] * s.element;
            device_forget(layer + r % rows * key * (size_t)acts.T, (size_t)acts.forgotten * key, (size_t)end * key);
        }
    });
    acts.forgotten = end;
}

// Called before acts is allocated: sets acts.lost, the bytes of the keys that will be forgotten
template <class Model, class Acts> void plan_pieces(const Model& model, Acts& acts) {
    if (!acts.reserved() || !forgets(model, acts)) { return; }
    acts.lost = key_bytes(acts) * (size_t)imax(0, acts.T - LEAST_KEPT - acts.piece);
}
// Dies unless `keep` keys of a window fit into memory.
template <class Acts> void check_kept(Acts& acts, int keep) {
    const size_t wanted = key_bytes(acts) * (size_t)imin(keep, acts.T), left = device_memory_available();
    if (wanted <= left) { return; }
    die(EXIT_OUT_OF_MEMORY, "%d tokens: their queries look back so far that %d keys must be kept, which "
        "need %s, but %s are available", acts.T, keep, format_bytes((double)wanted).c_str(),
        format_bytes((double)left).c_str());
}

// forward_losses(), or for Purpose::Pieces the same for one window, in pieces: then progress(t, reach) is called when t
// tokens are done. reach: how far their queries have looked back at most; 0 if no tile is skipped
template <class Model, class Acts, class F>
void window_losses(Model& model, Acts& acts, const int* tokens, const int* targets, const int* lengths, int B, int T,
                   float* losses, float* hits, F progress) {
    if (acts.purpose != Purpose::Pieces) {
        return forward_losses(model, acts, tokens, targets, lengths, B, T, losses, hits);
    }
    const bool loses = forgets(model, acts);
    int keep = LEAST_KEPT, t0 = 0;
    int farthest = 0;
    while (t0 < T) {
        const int left = T - t0, n = imin(left, acts.piece) - (left == acts.piece + 1 ? KEPT_UNIT : 0);
        forward_losses(model, acts, tokens + t0, targets + t0, nullptr, 1, n, losses + t0, hits + t0, t0);
        t0 += n;
        const int reach = loses ? longest_reach(model, acts, t0 - n, n) : 0;
        farthest = reach == INT_MAX ? farthest : imax(farthest, reach);
        progress(t0, farthest);
        if (!loses) { continue; }
        if (reach == INT_MAX) {                                 // start again
            keep *= 2;
            check_kept(acts, keep);
            acts.forgotten = t0 = 0;
            continue;
        }
        if (KEPT_REACHES * reach > keep) { check_kept(acts, keep = KEPT_REACHES * reach); }
        const int end = (t0 - keep) / KEPT_UNIT * KEPT_UNIT;
        if (end > acts.forgotten) { forget(acts, end); }
    }
    forget(acts, T);
    acts.forgotten = 0;
}

// ----------------------------------------------------------------------------------------------------------
// perplexity at any length, with the loss by position
//
// The stream of tokens is cut into windows of T, `stride` apart. With stride T they do not overlap, and each token sees
// the tokens before it in its window. With a smaller stride each window scores only tokens that no earlier window has
// scored, so every token but the first T sees at least T - stride tokens of context. Every length scores the same
// tokens.

// Whether the encoding has T positions. If not, prints `row`, the begin of a table's row, and why
inline bool reaches(const PositionConfig& position, int T, const std::string& row) {
    const int reach = position_max_length(position);
    if (T > reach) { printf("%s%s has no positions beyond %d\n", row.c_str(), position.name.c_str(), reach); }
    return T <= reach;
}

struct Evaluation {
    int T = 0, stride = 0;
    int B = 0;                                  // windows in a rank's batch
    uint64_t windows = 0, tokens = 0;
    double seconds = 0;                         // from the first window to the last
    int last_rank = 0;                          // the rank that computed the last windows
    double loss = 0, accuracy = 0;              // means over the scored tokens, the loss in nats; NAN without tokens
    std::vector<double> curve;                  // (T): mean loss of the targets at each position of a window
    bool stopped = false;                       // by a signal: the fields above are not valid
};

// Reads the T tokens and targets of window w. Targets that the window before has scored, or beyond the first `total`,
// are ignored. Returns the number of tokens that the data has for it.  stream (T+1): scratch
template <class Model>
int read_window(Model& model, const TokenFiles& files, const Evaluation& e, uint64_t w, uint64_t total,
                std::vector<int>& stream, int* tokens, int* targets) {
    const uint64_t start = w * e.stride, n = std::min((uint64_t)e.T, total - start);
    const uint64_t first = w == 0 ? 0 : (uint64_t)(e.T - e.stride);
    std::fill(stream.begin(), stream.end(), 0);
    files.read(start, n + 1, stream.data());
    set_targets(model, stream.data(), start, e.T, tokens, targets);
    for (int t = 0; t < e.T; t++) {
        targets[t] = (uint64_t)t < n && (uint64_t)t >= first ? targets[t] : IGNORE_INDEX;
    }
    return (int)n;
}

// The number of targets to score: the first `limit` of the stream (0: all). Dies unless they fill a window of T: in a
// shorter window the loss would not be the loss at T.
inline uint64_t evaluated_targets(const TokenFiles& files, int T, uint64_t limit) {
    check(files.tokens > (uint64_t)T, "%s: '%s': expected at least %zu tokens to evaluate at T = %d, got %zu (use a "
          "smaller T, or more data)", files.flag.c_str(), files.pattern.c_str(), (size_t)T + 1, T,
          (size_t)files.tokens);
    check(limit == 0 || limit >= (uint64_t)T, "--eval_tokens: expected at least %d, for a window of --eval_lengths, "
          "got %zu", T, (size_t)limit);
    return limit > 0 ? std::min(limit, files.tokens - 1) : files.tokens - 1;
}

// Scores evaluated_targets() in windows of T; acts has room for one window or more.
// token_losses: gets the loss of every target, in order; may be null
template <class Model, class Acts>
Evaluation evaluate(Model& model, Acts& acts, const TokenFiles& files, int T, int stride, uint64_t limit,
                    std::vector<float>* token_losses = nullptr) {
    const Phase evaluating("evaluating");
    const uint64_t total = evaluated_targets(files, T, limit);
    Evaluation e;
    e.T = T;
    e.stride = stride > 0 && stride < T ? stride : T;
    e.windows = 1 + ceil_div(total - T, (uint64_t)e.stride);
    const std::vector<RowBatch> batches = row_batches(e.windows, acts, [&](size_t) { return T; });
    e.B = (int)batches[0].n;
    e.last_rank = (int)((batches.size() - 1) % (size_t)comm().size);
    std::vector<int> stream((size_t)T + 1), tokens((size_t)e.B * T), targets((size_t)e.B * T), lengths((size_t)e.B);
    acts.watched_lengths = lengths.data();
    std::vector<float> losses((size_t)e.B * T), hits((size_t)e.B * T);
    std::vector<double> sum((size_t)T, 0.0);
    std::vector<uint64_t> count((size_t)T, 0);
    Progress progress(strprintf("evaluating at T = %d", T));
    const double begin = wall_seconds();
    // results (b.n,2,T): for each window its losses, -INFINITY where there is no target, then its hits
    const auto work = [&](const RowBatch& b, float* results) {
        for (size_t r = 0; r < b.n; r++) {
            lengths[r] = read_window(model, files, e, b.first + r, total, stream, &tokens[r * T], &targets[r * T]);
        }
        const auto end = targets.begin() + (long)(b.n * T);
        if (std::any_of(targets.begin(), end, [](int t) { return t != IGNORE_INDEX; })) {
            window_losses(model, acts, tokens.data(), targets.data(), lengths.data(), (int)b.n, T, losses.data(),
                          hits.data(), [&](int t, int reach) {
                progress.update(b.first * T + (uint64_t)t, e.windows * T, reach);
            });
        }
        for (size_t n = 0; n < b.n * T; n++) {
            float* result = results + n / T * 2 * T + n % T;
            result[0] = targets[n] == IGNORE_INDEX ? -INFINITY : losses[n];
            result[T] = hits[n];
        }
    };
    const auto take = [&](size_t, const float* result) {                                // in the order of the stream
        for (int t = 0; t < T; t++) {
            if (result[t] == -INFINITY) { continue; }
            sum[t] += result[t];
            if (token_losses != nullptr) { token_losses->push_back(result[t]); }
            e.accuracy += result[T + t];
            count[t]++;
        }
    };
    e.stopped = !share_batches<float>(batches, 2 * (size_t)T, progress, work, take);
    if (e.stopped) { return e; }
    e.seconds = wall_seconds() - begin;
    for (uint64_t n : count) { e.tokens += n; }
    for (int t = 0; t < T; t++) { e.curve.push_back(count[t] > 0 ? sum[t] / (double)count[t] : NAN); }
    for (double s : sum) { e.loss += s / (double)e.tokens; }        // NAN without tokens: masking may draw none
    e.accuracy /= (double)e.tokens;
    check_finite(strprintf("the loss at T = %d", T), &e.loss, e.tokens > 0);
    return e;
}

// A record of log.jsonl, with settings that change a model without training: rope's stretch at T, its base, the masks
inline Json with_stretch(Json record, const PositionConfig& position, int T) {
    const Json stretch = rope_scaling_json(position, T);
    if (!stretch.is_null()) { record["rope_scaling"] = stretch; }
    if (position.other_theta > 0) { record["rope_theta"] = position.other_theta; }
    record.update(mask_json(position));
    if (position.mask.by_document()) { record["document_mask"] = true; }
    return record;
}
inline Json evaluation_json(const Evaluation& e, const PositionConfig& position) {
    return with_stretch({{"kind", "extrapolation"}, {"pos", position.name}, {"T", e.T}, {"T_train", position.T_train},
                         {"stride", e.stride}, {"windows", e.windows}, {"tokens", e.tokens}, {"loss", e.loss},
                         {"ppl", std::exp(e.loss)}, {"accuracy", e.accuracy}}, position, e.T);
}
inline Json curve_json(const Evaluation& e, const PositionConfig& position) {
    return with_stretch({{"kind", "curve"}, {"pos", position.name}, {"T", e.T}, {"stride", e.stride},
                         {"windows", e.windows}, {"loss", e.curve}}, position, e.T);
}
// mem: bytes, as in a train record
inline Json speed_json(const Evaluation& e, const PositionConfig& position, double mem) {
    return with_stretch({{"kind", "evaluation_speed"}, {"pos", position.name}, {"T", e.T}, {"stride", e.stride},
                         {"B", e.B}, {"ranks", comm().size}, {"tokens", e.tokens}, {"ms", 1e3 * e.seconds},
                         {"tok_per_s", (double)e.tokens / e.seconds}, {"mem", mem}}, position, e.T);
}

// DIRECTORY/token_losses_T_STRIDE.safetensors: `losses` (tokens) in nats; the first is the data's second token's
inline void write_token_losses(const std::string& directory, const Evaluation& e, const std::vector<float>& losses) {
    if (comm().rank > 0) { return; }
    const std::string path = directory + strprintf("/token_losses_%d_%d.safetensors", e.T, e.stride);
    io_mkdirs(directory);
    write_whole(path, [&](const std::string& to) {
        write_safetensors(to, {whole_tensor("losses", {losses.size()}, losses)});
    });
    printf("%17s wrote %s\n", "", printable(path, LONGEST_MESSAGE).c_str());
}

// Prints and logs a table of the perplexity at each length; with `curve` also the loss by position. A length beyond the
// encoding's reach prints "-" and why. parts, losses_to: where to write lab/dump.h's parts and the losses of tokens
template <class Model, class Log>
void evaluate_lengths(Model& model, const TokenFiles& files, const std::vector<int>& lengths, int stride,
                      uint64_t limit, bool curve, const PartsTo& parts, Log& log, const std::string& losses_to = "") {
    const PositionConfig& position = model.config.position;
    const int reach = position_max_length(position);
    check(*std::min_element(lengths.begin(), lengths.end()) <= reach,
          "--eval_lengths: %s reaches %d tokens, every length is beyond that", position.name.c_str(), reach);
    printf("%s, trained at %d\n%8s %8s %10s %12s %10s %10s\n", position_text(position).c_str(), position.T_train, "T",
           "stride", "windows", "tokens", "loss", "ppl");
    for (int T : lengths) {
        if (!reaches(position, T, strprintf("%8d %8s   ", T, "-"))) { continue; }
        const int B = std::max(1, EVALUATION_TOKENS / T);
        const bool whole = !in_pieces(model, T) || !parts.directory.empty();
        const Purpose purpose = whole ? Purpose::Evaluate : Purpose::Pieces;
        auto acts = activations_describe(model, B, T, purpose, 0);
        plan_pieces(model, acts);
        activations_allocate(acts);
        watch_parts(acts, parts, model.stream);
        std::vector<float> token_losses;
        std::vector<float>* wanted = losses_to.empty() ? nullptr : &token_losses;
        const Evaluation e = evaluate(model, acts, files, T, stride, limit, wanted);
        const double mem = (double)device_memory_used();
        const PositionView last = layer_position(model, acts, model.config.L - 1, T).bias();
        const double mine = live_tile_share(acts.a.attscratch(model.config.L - 1), last, T, model.stream);
        std::vector<double> live_shares((size_t)comm().size);
        comm_all_gather(live_shares.data(), &mine, 1, "live tiles");
        const double live = live_shares[(size_t)e.last_rank];       // of the last windows, as on one rank
        acts.release();
        if (e.stopped) { return; }
        log.record(evaluation_json(e, position));
        if (e.tokens == 0) {
            printf("%8d %8d %10llu %12d   no loss: nothing to predict\n", e.T, e.stride,
                   (unsigned long long)e.windows, 0);
            continue;
        }
        const std::string more = !model.config.causal ? strprintf("   %.2f%% right", 100 * e.accuracy) : "";
        printf("%8d %8d %10llu %12llu %10.4f %10.4f%s\n", e.T, e.stride, (unsigned long long)e.windows,
               (unsigned long long)e.tokens, e.loss, std::exp(e.loss), more.c_str());
        if (live < 1.0) {
            const bool exact = position.tile_skip == TileSkip::Exact;
            printf("%17s last layer: %.1f%% of the tiles live; the rest %s\n", "", 100 * live,
                   exact ? "have weights of 0" : "weigh less than 2^-24 of a row");
        }
        fflush(stdout);
        log.record(speed_json(e, position, mem));
        if (!losses_to.empty()) { write_token_losses(losses_to, e, token_losses); }
        if (!curve) { continue; }
        log.record(curve_json(e, position));
        const int columns = std::min(T, 8);
        for (int c = 0; c < columns; c++) {
            const int from = (int)((int64_t)T * c / columns), to = (int)((int64_t)T * (c + 1) / columns);
            double mean = 0;
            int n = 0;
            for (int t = from; t < to; t++) { if (std::isfinite(e.curve[t])) { mean += e.curve[t]; n++; } }
            printf("%17s positions %d-%d: loss %.4f\n", "", from, to - 1, n > 0 ? mean / n : NAN);
        }
    }
}

// ----------------------------------------------------------------------------------------------------------
// validation while training

// The token files that the flags name, opened before any work; null where none is read
struct TokenData {
    std::unique_ptr<TokenFiles> train, val;

    // trains: --train_files is read; evaluates: a use of the model reads --val_files
    TokenData(const Run& run, bool trains, bool evaluates) {
        const Options& o = run.o;
        if (trains) { train = open_tokens(o, "--train_files"); }
        if (!evaluates && (!trains || o.val_every == 0)) { return; }
        try {
            val = open_tokens(o, "--val_files", train ? train->vocab : 0);
        } catch (const Error& e) {              // the default file's error would not help a user with other files
            const bool all_defaults = trains && !o.is_given("train_files");
            check(o.is_given("val_files") || all_defaults, "no data to %s",
                  evaluates ? "evaluate: give --val_files" : "validate on: give --val_files, or --val_every 0");
            throw;
        }
    }
    // Dies unless the files fill a window of each length that the run uses.
    void check_lengths(const Run& run) const {
        const Options& o = run.o;
        if (train) { train->windows(o.T); }
        if (train && o.val_every > 0) { evaluated_targets(*val, o.T, 0); }
        if (!evaluates_lengths(o)) { return; }
        evaluated_targets(*val, *std::max_element(o.eval_lengths.begin(), o.eval_lengths.end()),
                          (uint64_t)o.eval_tokens);
    }
    // A collective: dies unless all ranks have the same files. Checkpoints keep a record of the files.
    void record(Run& run) const {
        record_data(run, train.get());
        record_data(run, val.get());
    }
    // The files whose header names the model's vocabulary
    const TokenFiles* any() const { return train ? train.get() : val.get(); }
};

// Finds dead heads while the evaluations with `acts` run: heads whose ReLU is closed for every token.
template <class Acts> struct DeadHeads {
    Acts& acts;
    Stream stream;
    size_t count;                                           // layers times heads
    int* states;                                            // (L,NH), on the device

    template <class Model>
    DeadHeads(Model& model, Acts& acts)
        : acts(acts), stream(model.stream), count((size_t)model.config.L * model.config.NH),
          states((int*)device_malloc(sizeof(int) * count)) {
        device_zero(states, sizeof(int) * count, stream);
        acts.watch = [this](int l, const PositionView& layer, const floatX*, const float*, int B) {
            if (!encoding_traits(*layer.config).has_relu) { return; }
            find_moved(states + (size_t)l * layer.NH, layer, B, this->acts.watched_lengths[B - 1], stream);
        };
    }
    DeadHeads(const DeadHeads&) = delete;
    ~DeadHeads() {
        acts.watch = nullptr;
        device_free(states);
    }
    // A collective: the share of dead heads among the heads with a ReLU; NAN without such heads
    double share() const {
        std::vector<int> mine(count), all(count * (size_t)comm().size);
        copy_to_host(mine.data(), states, sizeof(int) * count, stream);
        comm_all_gather(all.data(), mine.data(), count, "dead heads");
        int heads = 0, dead = 0;
        for (size_t i = 0; i < count; i++) {
            for (size_t of_rank = i; of_rank < all.size(); of_rank += count) { mine[i] = imax(mine[i], all[of_rank]); }
            heads += mine[i] != HAS_NO_RELU;
            dead += mine[i] == IS_DEAD;
        }
        return heads > 0 ? (double)dead / heads : NAN;
    }
};

// If a validation is due, prints and logs its loss. acts: training's; val: may be null
template <class Model, class Acts> void validate(Model& model, Acts& acts, Run& run, const TokenFiles* val) {
    const Options& o = run.o;
    if (val == nullptr || !run.due(o.val_every)) { return; }
    const uint64_t limit = o.val_batches < 0 ? 0 : (uint64_t)o.val_batches * acts.B * acts.T;
    const DeadHeads<Acts> dead(model, acts);
    const Evaluation e = evaluate(model, acts, *val, acts.T, 0, limit);
    if (e.stopped) { return; }
    const double dead_heads = dead.share();
    const bool shows_hits = !model.config.causal && e.tokens > 0;
    const std::string right = shows_hits ? strprintf(" | %.2f%% right", 100 * e.accuracy) : "";
    const std::string idle = dead_heads > 0 ? strprintf(" | %.1f%% of heads dead", 100 * dead_heads) : "";
    printf("%s%s%s\n", val_line(run.state.step, o.steps, e.loss, e.tokens).c_str(), right.c_str(), idle.c_str());
    run.log->val(run.state.step, e.loss, e.accuracy, e.tokens, dead_heads);
}

// ----------------------------------------------------------------------------------------------------------
// texts with a right answer
//
// One forward pass over a text scores each token of its answer, given the right tokens before it.

// Sums over the tokens of a row's answer
struct AnswerScore {
    double loss;                                // in nats
    float tokens, hits;                         // hits: tokens with the greatest logit, without a tie
};

// Scores the rows of all batches. read(row, T, tokens, targets) fills in a row's tokens (T) and, where its answer is,
// its targets (T); take(row, score) is called in the order of the rows. Returns false if a signal has stopped it.
template <class Model, class Acts, class Read, class Take>
bool score_answers(Model& model, Acts& acts, const std::vector<RowBatch>& batches, const char* label, Read read,
                   Take take) {
    const auto work = [&](const RowBatch& b, AnswerScore* scores) {
        const size_t T = b.T;
        std::vector<int> tokens(b.n * T, 0), targets(b.n * T, IGNORE_INDEX);
        std::vector<float> losses(b.n * T), hits(b.n * T);
        for (size_t r = 0; r < b.n; r++) { read(b.first + r, T, &tokens[r * T], &targets[r * T]); }
        forward_losses(model, acts, tokens.data(), targets.data(), nullptr, (int)b.n, (int)T, losses.data(),
                       hits.data());
        for (size_t r = 0; r < b.n; r++) {
            AnswerScore& score = scores[r] = {0.0, 0.0f, 0.0f};
            for (size_t at = r * T; at < (r + 1) * T; at++) {
                if (targets[at] == IGNORE_INDEX) { continue; }
                score.loss += losses[at];
                score.tokens++;
                score.hits += hits[at];
            }
        }
    };
    Progress progress(label);
    return share_batches<AnswerScore>(batches, 1, progress, work, take);
}

// ----------------------------------------------------------------------------------------------------------
// --tasks (copy, sort, addition, ...): the share of a file's examples whose whole answer is right
//
// data/tasks.py writes the files: examples in rows, with the tokens of the answer marked (engine/data.h). An answer is
// right if each of its tokens is a hit. Then, and only then, greedy decoding would write the same answer.

struct TaskScore {
    uint64_t examples = 0, exact = 0;
    uint64_t tokens = 0, hits = 0;              // of all answers, and how many are right
    double loss = 0;                            // mean over the tokens of the answers, in nats
    bool stopped = false;                       // by a signal
    double exact_share() const { return (double)exact / (double)examples; }
};

// A TokenFiles for each file of a pattern, because each file has its own length
inline std::vector<TokenFiles> open_tasks(const std::string& pattern, int V) {
    const Phase opening("opening the tasks");
    std::vector<TokenFiles> tasks;
    for (const std::string& path : expand_pattern(pattern)) {
        tasks.emplace_back(path, "--tasks", V, true);
        check(tasks.back().row > 0, "--tasks %s: expected examples in rows, as data/tasks.py writes them, got a stream "
              "of tokens", path.c_str());
    }
    return tasks;
}

// "copy_20.bin"
inline std::string task_name(const TokenFiles& files) { return files.pattern.substr(files.pattern.rfind('/') + 1); }

template <class Model, class Acts> TaskScore evaluate_task(Model& model, Acts& acts, const TokenFiles& files) {
    TaskScore score;
    score.examples = files.windows(files.row - 1);
    const auto batches = row_batches(score.examples, acts, [&](size_t) { return acts.T; });
    const auto read = [&](size_t i, size_t T, int* tokens, int* targets) { files.window(i, (int)T, tokens, targets); };
    score.stopped = !score_answers(model, acts, batches, "tasks", read, [&](size_t i, const AnswerScore* s) {
        check(s->tokens > 0, "--tasks %s: example %zu has no answer", files.pattern.c_str(), i);
        score.exact += s->hits == s->tokens;
        score.tokens += (uint64_t)s->tokens;
        score.hits += (uint64_t)s->hits;
        score.loss += s->loss;
    });
    score.loss /= (double)score.tokens;
    check_finite("--tasks " + files.pattern, &score.loss, !score.stopped);
    return score;
}

inline Json task_json(const TaskScore& s, const TokenFiles& files, const PositionConfig& position, int64_t step) {
    return with_stretch({{"kind", "task"}, {"step", step}, {"file", task_name(files)},
                         {"length", files.shards[0].length}, {"pos", position.name}, {"T", files.row - 1},
                         {"T_train", position.T_train}, {"examples", s.examples}, {"exact", s.exact},
                         {"exact_share", s.exact_share()}, {"tokens", s.tokens},
                         {"accuracy", (double)s.hits / (double)s.tokens}, {"loss", s.loss}}, position, files.row - 1);
}

// Prints and logs a table of the files' scores. A file beyond the encoding's reach prints why.
template <class Model, class Log>
void evaluate_tasks(Model& model, const std::vector<TokenFiles>& tasks, int64_t step, Log& log) {
    const PositionConfig& position = model.config.position;
    printf("%s, trained at %d\n%-24s %7s %7s %8s %8s %8s %8s\n", position_text(position).c_str(), position.T_train,
           "task", "length", "T", "examples", "exact", "tokens", "loss");
    for (const TokenFiles& files : tasks) {
        const int T = files.row - 1, length = files.shards[0].length;
        const std::string name = task_name(files);
        if (!reaches(position, T, strprintf("%-24s %7d %7d   ", name.c_str(), length, T))) { continue; }
        auto acts = activations_describe(model, std::max(1, EVALUATION_TOKENS / T), T, Purpose::Evaluate, 0);
        activations_allocate(acts);
        const TaskScore s = evaluate_task(model, acts, files);
        acts.release();
        if (s.stopped) { return; }
        printf("%-24s %7d %7d %8llu %7.2f%% %7.2f%% %8.4f\n", name.c_str(), length, T, (unsigned long long)s.examples,
               100 * s.exact_share(), 100.0 * (double)s.hits / (double)s.tokens, s.loss);
        fflush(stdout);
        log.record(task_json(s, files, position, step));
    }
}

// ----------------------------------------------------------------------------------------------------------
// --hellaswag (Zellers et al. 2019): which of four endings does the model expect?
//
//   score of an ending = mean over its tokens of -log p(token | context, ending before it); the lowest wins: "acc_norm"
// The file is llm.c's: a header of 1024 bytes, int32 (20240522, 1, examples, bytes of the longest), then for each
// example uint16: 65535 | the bytes of these fields | index | label | 4 | n | context (n) | 4 x (n | ending (n))

constexpr int HELLASWAG_MAGIC = 20240522, HELLASWAG_ENDINGS = 4;

struct HellaSwag {
    struct Example {
        int label = 0;
        std::vector<int> context, ending[HELLASWAG_ENDINGS];
    };
    std::string path;
    std::vector<Example> examples;
};

// Every field is checked; a damaged file is an Error that names the example.
inline HellaSwag load_hellaswag(const std::string& path, int V) {
    const Phase reading("reading HellaSwag");
    HellaSwag set;
    set.path = path;
    refuse_stand_in(path);
    const std::string bytes = read_file(path, 1u << 30);
    const char* name = path.c_str();
    int32_t header[4];
    check(bytes.size() >= 1024, "--hellaswag %s: expected a header of 1024 bytes, got a file of %zu", name,
          bytes.size());
    memcpy(header, bytes.data(), sizeof(header));
    check(header[0] == HELLASWAG_MAGIC && header[1] == 1,
          "--hellaswag %s: expected magic and version %d, 1 (llm.c's multiple-choice file, as data/hellaswag.py "
          "writes it), got %d, %d", name, HELLASWAG_MAGIC, header[0], header[1]);
    check(header[2] >= 1 && bytes.size() > 1024 && bytes.size() % 2 == 0, "--hellaswag %s: %d examples in %zu bytes",
          name, header[2], bytes.size());
    std::vector<uint16_t> data((bytes.size() - 1024) / 2);
    memcpy(data.data(), bytes.data() + 1024, 2 * data.size());
    size_t at = 0;
    for (int e = 0; e < header[2]; e++) {
        check(data.size() - at >= 6, "--hellaswag %s: the file ends inside example %d of %d (is it truncated?)", name,
              e, header[2]);
        const size_t words = data[at + 1] / 2, end = at + words;
        const bool good = data[at] == 65535 && data[at + 1] % 2 == 0 && words >= 6 && end <= data.size() &&
                          data[at + 2] == (e & 0xffff) && data[at + 3] < HELLASWAG_ENDINGS &&
                          data[at + 4] == HELLASWAG_ENDINGS;
        check(good, "--hellaswag %s: example %d of %d is damaged", name, e, header[2]);
        HellaSwag::Example x;
        x.label = data[at + 3];
        at += 5;
        for (int k = -1; k < HELLASWAG_ENDINGS; k++) {
            check(at < end && data[at] >= 1 && at + data[at] < end,
                  "--hellaswag %s: example %d of %d: a text without tokens, or beyond its end", name, e, header[2]);
            std::vector<int>& text = k < 0 ? x.context : x.ending[k];
            text.assign(data.begin() + (long)at + 1, data.begin() + (long)(at + 1 + data[at]));
            for (int id : text) {
                check(id < V, "--hellaswag %s: example %d: expected ids below %d, the model's vocabulary, got %d", name,
                      e, V, id);
            }
            at += 1 + text.size();
        }
        check(at == end, "--hellaswag %s: example %d of %d is damaged", name, e, header[2]);
        set.examples.push_back(x);
    }
    check(at == data.size(), "--hellaswag %s: %zu bytes after the last example", name, 2 * (data.size() - at));
    return set;
}

struct HellaSwagScore {
    int correct = 0, examples = 0;
    int cut = 0;                                // examples whose context lost its beginning, to fit into T
    std::vector<float> nll;                     // (examples,4): mean over the ending's tokens
    bool stopped = false;                       // by a signal, before the end
    double accuracy() const { return (double)correct / examples; }
};

// A context, cut to leave room for its ending, and the ending: tokens[context ..] are the targets.
struct HellaSwagRow {
    std::vector<int> tokens;
    int context;
};

// Four rows per example, of at most T + 1 tokens: the last token is only a target. cut: examples with a cut context
inline std::vector<HellaSwagRow> hellaswag_rows(const HellaSwag& set, int T, int& cut) {
    std::vector<HellaSwagRow> rows;
    cut = 0;
    for (const auto& x : set.examples) {
        bool shortened = false;
        for (const std::vector<int>& ending : x.ending) {
            const int room = T + 1 - (int)ending.size();
            check(room >= 1, "--hellaswag %s: an ending of %zu tokens does not fit into --T %d", set.path.c_str(),
                  ending.size(), T);
            const int context = std::min(room, (int)x.context.size());
            shortened = shortened || context < (int)x.context.size();
            HellaSwagRow row{{x.context.end() - context, x.context.end()}, context};
            row.tokens.insert(row.tokens.end(), ending.begin(), ending.end());
            rows.push_back(row);
        }
        cut += shortened;
    }
    return rows;
}

template <class Model, class Acts> HellaSwagScore evaluate_hellaswag(Model& model, Acts& acts, const HellaSwag& set) {
    HellaSwagScore score;
    score.examples = (int)set.examples.size();
    const std::vector<HellaSwagRow> rows = hellaswag_rows(set, acts.T, score.cut);
    const auto batches = row_batches(rows.size(), acts, [&](size_t i) { return rows[i].tokens.size() - 1; });
    const auto read = [&](size_t i, size_t, int* tokens, int* targets) {
        const HellaSwagRow& row = rows[i];
        std::copy(row.tokens.begin(), row.tokens.end() - 1, tokens);
        std::copy(row.tokens.begin() + row.context, row.tokens.end(), targets + row.context - 1);
    };
    score.stopped = !score_answers(model, acts, batches, "HellaSwag", read, [&](size_t, const AnswerScore* s) {
        score.nll.push_back((float)(s->loss / (double)s->tokens));
    });
    check_finite("HellaSwag", score.nll.data(), score.nll.size());
    for (int e = 0; e < score.examples && !score.stopped; e++) {
        const float* nll = score.nll.data() + (size_t)HELLASWAG_ENDINGS * e;
        const float right = nll[set.examples[(size_t)e].label];             // a tie is not an answer
        score.correct += std::count_if(nll, nll + HELLASWAG_ENDINGS, [&](float x) { return !(x > right); }) == 1;
    }
    return score;
}

// each_example: also log the score of every ending
template <class Model, class Acts, class Log>
void report_hellaswag(Model& model, Acts& acts, const HellaSwag& set, int64_t step, bool each_example, Log& log) {
    const HellaSwagScore s = evaluate_hellaswag(model, acts, set);
    if (s.stopped) { return; }
    for (int e = 0; e < s.examples && each_example; e++) {
        const float* nll = s.nll.data() + (size_t)HELLASWAG_ENDINGS * e;
        log.record({{"kind", "hellaswag_example"}, {"step", step}, {"example", e},
                    {"label", set.examples[(size_t)e].label},
                    {"nll", std::vector<float>(nll, nll + HELLASWAG_ENDINGS)}});
    }
    printf("HellaSwag: %d/%d = %f%s\n", s.correct, s.examples, s.accuracy(),
           s.cut > 0 ? strprintf("   (%d contexts cut to %d tokens)", s.cut, acts.T).c_str() : "");
    fflush(stdout);
    log.hellaswag(step, s.accuracy());
}
