// lab/validate.h -- the token files of a run, and the validation between two updates of a training.
#pragma once

#include "../engine/run.h"
#include "evaluate.h"

// The token files that the flags name, opened and checked before any work; null where none is read
struct TokenData {
    std::unique_ptr<TokenFiles> train, val;

    // trains: on --train_files; evaluates: a use of the model reads --val_files
    TokenData(const Run& run, bool trains, bool evaluates) {
        const Options& o = run.o;
        if (trains) { train = open_tokens(o, "--train_files"); }
        if (!evaluates && (!trains || o.val_every == 0)) { return; }
        try {
            val = open_tokens(o, "--val_files", train ? train->vocab : 0);
        } catch (const Error& e) {              // an error of the default file says nothing to a user who has others
            const bool all_defaults = trains && !o.is_given("train_files");
            check(o.is_given("val_files") || all_defaults, "no data to %s",
                  evaluates ? "evaluate: give --val_files" : "validate on: give --val_files, or --val_every 0");
            throw;
        }
    }
    // Dies unless the files have a window of every length that will be taken from them.
    void check_lengths(const Run& run) const {
        const Options& o = run.o;
        if (train) { train->windows(o.T); }
        if (train && o.val_every > 0) { evaluated_targets(*val, o.T, 0); }
        if (!evaluates_lengths(o)) { return; }
        evaluated_targets(*val, *std::max_element(o.eval_lengths.begin(), o.eval_lengths.end()),
                          (uint64_t)o.eval_tokens);
    }
    // A collective: all ranks must have the same files. Checkpoints keep a record of them.
    void record(Run& run) const {
        record_data(run, train.get());
        record_data(run, val.get());
    }
    // The files whose header names the model's vocabulary
    const TokenFiles* any() const { return train ? train.get() : val.get(); }
};

// Watches the evaluations with some activations for dead heads.
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
    // A collective: which share of the heads with a ReLU is dead; NAN if there are none
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

// Validates if that is due, with the activations of the training; prints and logs the loss. val: may be null
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
