// lab/evaluate.h -- perplexity at any length, and the loss by position.
//
// The stream of tokens is cut into windows of T, `stride` apart. With stride T they do not overlap, and each token sees
// the tokens before it in its window. With a smaller stride each window scores only tokens that no earlier window has
// scored, so every token but the first T sees at least T - stride tokens of context. Every length scores the same
// tokens.
//
// Templates over the trainer's model. They call, with its types:
//   activations_describe(model, B, T, Purpose, recompute), activations_allocate,
//   set_targets(model, stream, start, n, tokens, targets): the model's inputs and targets for the tokens
//     stream[0 .. n-1], where stream[0] is token number `start` of the data (stream[n] exists, too), and
//   forward_losses(model, acts, tokens, targets, lengths, B, T, losses, hits): the loss of each of B * T targets, 0
//     where ignored, and whether it was the likeliest token; row b has lengths[b] tokens; lengths (all T) and hits may
//     be null
#pragma once

#include "../engine/json.h"
#include "../engine/files/safetensors.h"
#include "../engine/model.cuh"
#include "../engine/ranks/exchange.cuh"
#include "../engine/run/config.h"
#include "../engine/run/config_json.h"
#include "../engine/text/dataloader.h"
#include "heads.h"
#include "pieces.h"

constexpr int EVALUATION_TOKENS = ON_GPU ? 32768 : 2048;        // in a batch

// Whether the encoding has T positions; if not, says so in a row of a table that begins with `row`
inline bool reaches(const PositionConfig& position, int T, const std::string& row) {
    const int reach = position_max_length(position);
    if (T > reach) { printf("%s%s has no positions beyond %d\n", row.c_str(), position.name.c_str(), reach); }
    return T <= reach;
}

// One line that says how far a long loop is: rewritten in place on a terminal, a line every ten seconds elsewhere.
struct Progress {
    std::string label;
    double start = wall_seconds(), last = start;
    bool terminal = isatty(STDERR_FILENO) == 1, shown = false;
    explicit Progress(const std::string& label) : label(label) {}
    // reach: how many tokens queries have looked back at most; 0 is not shown
    void update(uint64_t done, uint64_t total, int reach = 0) {
        const double now = wall_seconds();
        if (comm().rank > 0 || done == 0 || now - last < (terminal ? 0.5 : 10.0)) { return; }
        last = now;
        shown = true;
        const double eta = (now - start) / (double)done * (double)(total - done);
        const char *before = terminal ? "\r" : "";
        const char *after = terminal ? "   " : "\n";
        const double percent = 100.0 * (double)done / (double)total;
        const std::string far = reach > 0 ? strprintf(", looking back up to %d tokens", reach) : "";
        fprintf(stderr, "%s%s: %.0f%%, ETA %s%s%s", before, label.c_str(), percent, format_duration(eta).c_str(),
                far.c_str(), after);
    }
    ~Progress() { if (shown && terminal) { fprintf(stderr, "\r%*s\r", (int)label.size() + 70, ""); } }
};

// The rows of one forward: n from `first` on, padded to T, the length of the longest
struct RowBatch { size_t first, n, T; };

// Batches of `rows` rows, in their order, each filled up to the tokens of acts; length(i): of a row. They do not depend
// on the number of ranks, because the bits of a matrix product may depend on its number of rows.
template <class Acts, class Length>
std::vector<RowBatch> row_batches(size_t rows, const Acts& acts, Length length) {
    std::vector<RowBatch> batches;
    for (RowBatch b = {0, 0, 0}; b.first < rows; b = {b.first + b.n, 0, 0}) {
        for (; b.first + b.n < rows; b.n++) {
            const size_t longest = std::max(b.T, (size_t)length(b.first + b.n));
            if (b.n > 0 && b.n + 1 > sequences_that_fit(acts, (int)longest)) { break; }
            b.T = longest;
        }
        batches.push_back(b);
    }
    return batches;
}

// A collective: the ranks share the batches. work(batch, results) computes the results of a batch, `width` elements a
// row; take(row, result) is called on every rank, for every row, in order. Returns false if a signal has stopped it.
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

struct Evaluation {
    int T = 0, stride = 0;
    int B = 0;                                  // windows in a rank's batch
    uint64_t windows = 0, tokens = 0;
    double seconds = 0;                         // from the first window to the last
    int last_rank = 0;                          // the rank that has computed the last windows
    double loss = 0, accuracy = 0;              // means over the scored tokens, the loss in nats; NAN without tokens
    std::vector<double> curve;                  // (T): mean loss of the targets at each position of a window
    bool stopped = false;                       // by a signal: the fields above are not valid
};

// Window w of an evaluation of `total` targets: its T tokens and targets, without targets that the window before it has
// scored or that are beyond the end. Returns its number of tokens.  stream (T+1): scratch
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

// The targets of an evaluation: the first `limit` of the stream (0: all). Dies unless they fill a window of T, as the
// loss of a shorter one is not that at T.
inline uint64_t evaluated_targets(const TokenFiles& files, int T, uint64_t limit) {
    check(files.tokens > (uint64_t)T, "%s: '%s': expected at least %zu tokens to evaluate at T = %d, got %zu (use a "
          "smaller T, or more data)", files.flag.c_str(), files.pattern.c_str(), (size_t)T + 1, T,
          (size_t)files.tokens);
    check(limit == 0 || limit >= (uint64_t)T, "--eval_tokens: expected at least %d, for a window of --eval_lengths, "
          "got %zu", T, (size_t)limit);
    return limit > 0 ? std::min(limit, files.tokens - 1) : files.tokens - 1;
}

// Scores evaluated_targets() in windows of T; acts holds at least one of them.
// token_losses: if not null, gets the loss of every target, in order
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
    // results (b.n,2,T): of each window the losses, minus infinity where there is no target, and the hits
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
    const auto take = [&](size_t, const float* result) {                                // in the stream's order
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

// A record of log.jsonl, with rope's stretch at this length, its base if not the checkpoint's, and the window, if any
inline Json with_stretch(Json record, const PositionConfig& position, int T) {
    const Json stretch = rope_scaling_json(position, T);
    if (!stretch.is_null()) { record["rope_scaling"] = stretch; }
    if (position.other_theta > 0) { record["rope_theta"] = position.other_theta; }
    record.update(mask_json(position));
    if (position.mask.by_document()) { record["document_mask"] = true; }
    return record;
}
inline Json evaluation_json(const Evaluation& e, const PositionConfig& position) {
    const Json j = {{"kind", "extrapolation"}, {"pos", position.name}, {"T", e.T}, {"T_train", position.T_train},
                    {"stride", e.stride}, {"windows", e.windows}, {"tokens", e.tokens}, {"loss", e.loss},
                    {"ppl", std::exp(e.loss)}, {"accuracy", e.accuracy}};
    return with_stretch(j, position, e.T);
}
inline Json curve_json(const Evaluation& e, const PositionConfig& position) {
    const Json j = {{"kind", "curve"}, {"pos", position.name}, {"T", e.T}, {"stride", e.stride}, {"windows", e.windows},
                    {"loss", e.curve}};
    return with_stretch(j, position, e.T);
}
// The speed of an evaluation: the time, the scored tokens per second, and the memory in bytes, as in a train record
inline Json speed_json(const Evaluation& e, const PositionConfig& position, double mem) {
    const Json j = {{"kind", "evaluation_speed"}, {"pos", position.name}, {"T", e.T}, {"stride", e.stride}, {"B", e.B},
                    {"ranks", comm().size}, {"tokens", e.tokens}, {"ms", 1e3 * e.seconds},
                    {"tok_per_s", (double)e.tokens / e.seconds}, {"mem", mem}};
    return with_stretch(j, position, e.T);
}

// DIRECTORY/token_losses_T_STRIDE.safetensors: `losses` (tokens) in nats, from the data's second token on
inline void write_token_losses(const std::string& directory, const Evaluation& e, const std::vector<float>& losses) {
    if (comm().rank > 0) { return; }
    const std::string path = directory + strprintf("/token_losses_%d_%d.safetensors", e.T, e.stride);
    io_mkdirs(directory);
    write_whole(path, [&](const std::string& to) {
        write_safetensors(to, {whole_tensor("losses", {losses.size()}, losses)});
    });
    printf("%17s wrote %s\n", "", printable(path, LONGEST_MESSAGE).c_str());
}

// Prints a table of the perplexity at each length, and logs it; if requested, also the loss by position and what the
// weights are made of. A length beyond the encoding's reach prints "-" and why. losses_to: the directory of
// write_token_losses, or ""
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
        const double live = live_shares[(size_t)e.last_rank];       // the last windows', as on one rank
        acts.release();
        if (e.stopped) { return; }
        if (e.tokens == 0) {
            printf("%8d %8d %10llu %12d   no loss: nothing to predict\n", e.T, e.stride,
                   (unsigned long long)e.windows, 0);
            log.record(evaluation_json(e, position));
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
        log.record(evaluation_json(e, position));
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
