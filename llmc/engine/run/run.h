// run/run.h -- a run of a trainer, except its model: state, batches, weights and checkpoints, the end of a step.
#pragma once

#include "../../base/gpu.h"
#include "../../matmul.cuh"
#include "../model.cuh"
#include "../ranks/gradients.cuh"
#include "../schedule.h"
#include "config.h"
#include "program.h"

// ----------------------------------------------------------------------------------------------------------
// the state of a run: all that resuming needs except the weights and moments

struct RunState {
    int64_t step = 0;           // the next step
    int64_t updates = 0;        // updates applied: AdamW's t, without skipped steps
    uint64_t sample = 0;        // the next sample of the order
    int leaves = 0;             // see plan_leaves()
    Guard guard;

    Json to_json(const Options& options) const {
        Json flags = options_json(options);
        flags["leaves"] = leaves;                               // which was a flag
        return {{"step", step}, {"updates", updates}, {"sample", sample}, {"guard", guard.to_json()},
                {"options", flags}};
    }
    void from_json(const Json& j, const Options& options, const std::string& what) {
        check_resumed_options(options, json_at(j, "options", what), what);
        step = json_int(j, "step", 0, INT32_MAX, what);
        updates = json_int(j, "updates", 0, step, what);
        sample = (uint64_t)json_int(j, "sample", 0, INT64_MAX, what);
        guard.from_json(json_at(j, "guard", what), what);
    }
};

// A run of a trainer: its flags and everything else except the model.
struct Run {
    Options o;
    Gpu gpu;
    bool trains = false;                                        // false: a model is used or checked
    int samples = 0;                                            // in an update
    int my_samples = 0, micro_batches = 0;                      // this rank's share of them
    int texts = 1;                                              // sequences in a sample
    bool largest_batch = false;                                 // --B -1, which is 1 until fit_memory()
    int leaf = 1;                                               // micro-batches that share a gradient
    std::unique_ptr<OutputLock> lock;
    std::string resumed, source;                                // the checkpoint to continue; where weights come from
    std::unique_ptr<Tokenizer> tokenizer;
    std::string data;                                           // for the banner (data_text)
    RunState state;
    Json record = Json::object();                               // of its data (dataloader.h), if it saves
    std::unique_ptr<Log> log;
    std::string diverged;                                       // what look() has caught before this update
    int64_t first_step = 0;
    double step_seconds = 0;                                    // smoothed

    // This rank's i-th sample in the next step (gradients.cuh)
    uint64_t sample(int i) const {
        return (o.overfit ? 0 : state.sample) + (uint64_t)(comm().rank * my_samples + i);
    }
    // Validates, samples, ... between two updates. A result that is not finite ends the run only after the last one.
    template <class Looks> void look(Looks looks) {
        diverged.clear();
        try { looks(); } catch (const Error& e) {
            if (e.code != EXIT_DIVERGED) { throw; }
            diverged = e.what();
            if (comm().rank == 0) { say("warning: before step %lld: %s", (long long)state.step + 1, e.what()); }
        }
    }
    // Whether what is done before every Nth update (0: never) and after the last one is due
    bool due(int64_t every) const { return every > 0 && (state.step >= o.steps || state.step % every == 0); }
};

// ----------------------------------------------------------------------------------------------------------
// before the work: the task and the data

// Whether --eval_lengths names windows of --val_files, and not the lengths of prompts or documents
inline bool evaluates_lengths(const Options& o) {
    return !o.eval_lengths.empty() && o.encode.empty();
}

// Records a flag's files (TokenFiles, Documents or null), the same on all ranks, for the checkpoints of a run.
template <class Files> void record_data(Run& r, const Files* files) {
    const bool saves = r.trains && !r.o.out.empty();
    if (files == nullptr || (!saves && comm().size == 1)) { return; }
    const Doing recording("keeping a record of the data");
    const Json list = file_records(file_paths(*files));
    check_same_records(files->flag, list);
    if (saves) { add_to_record(r.record, files->flag.substr(2), list); }
}

// Decides what this run does. uses: the flags request a use of a trained model; use_flags: their names
inline void begin_run(Run& r, bool uses, const char* use_flags) {
    const Doing looking("looking for a checkpoint");
    const Options& o = r.o;
    const bool plans = o.check && comm().size == 1;             // for ranks that are not started
    check(plans || !o.is_given("ranks") || o.ranks == comm().size, "--ranks %d: a launcher has started %d processes; "
          "leave out one of the two", o.ranks, comm().size);
    check_same_start(o);
    check_before_data(o);
    set_threads(comm_threads(o.threads));
    r.gpu = find_gpu(comm_device());                            // reports an unusable GPU before the work
    comm_connect_devices();
    r.trains = o.resume || o.is_given("steps") ? o.steps != 0 : !uses;
    check(!o.resume || !o.out.empty(), "--resume: give the directory of the run with --out");
    check(r.trains || !o.load.empty() || o.resume, "%s need a model: --load, or --steps to train one first",
          use_flags);
    const bool first = comm().rank == 0;                        // rank 0 reads --out and writes there, for all ranks
    // locks and cleans the directory before it chooses a checkpoint, and reads all bytes of that
    if (o.resume) {
        rank0_works([&] {
            if (!o.check && is_directory(o.out)) {
                r.lock = std::make_unique<OutputLock>(o.out);
                clean_output_directory(o.out);
            }
            r.resumed = find_checkpoint(o.out);
        }, "choice of the checkpoint");
    }
    r.resumed = comm_text(r.resumed, "choice of the checkpoint");
    r.source = r.resumed.empty() ? find_weights(o.load) : r.resumed;
    if (!r.source.empty()) { check_same_model(r.resumed.empty() ? "--load" : "--resume", r.source); }
    check(o.resume != 2 || !r.resumed.empty(),
          "--resume 2: expected a checkpoint in %s, found none; is --out right, and its disk mounted?", o.out.c_str());
    if (o.resume && r.resumed.empty() && first) {
        say("--resume 1: there is no checkpoint in %s; this run starts at step 1", o.out.c_str());
    }
}

// ----------------------------------------------------------------------------------------------------------
// weights and checkpoints

// params: the float32 weights, in the layout of the table
inline Checkpoint checkpoint_view(const Run& r, const Parameters& p, float* params, const Json& config) {
    Checkpoint c;
    c.table = &p.table;
    c.files = &p.files;
    c.params = params;
    c.m = p.m;
    c.v = p.v;
    c.complete = !p.exchange.shares;
    for (size_t b = 0; !c.complete && b < p.exchange.owned.size(); b++) {
        for (TensorPiece piece : p.table.pieces(p.exchange.owned[b])) {
            piece.at = p.exchange.moment_at(b, piece.at);
            c.held.push_back(piece);
        }
    }
    c.config = config;
    c.config["cable_version"] = VERSION;
    const char* commit = commit_of_build();
    // cable_hf.py warns: if a kernel was changed, it computes another model
    if (commit != nullptr && strstr(commit, "-dirty") != nullptr) { c.config["built_from"] = commit; }
    c.state = r.state.to_json(r.o);
    if (!r.record.empty()) { c.state["data"] = r.record; }
    if (config.contains("auto_map")) { c.extra.push_back({HF_FILE, hf_code()}); }
    for (const auto& file : vocabulary_files(r.tokenizer.get(), config)) { c.extra.push_back(file); }
    return c;
}

// The most checkpoints that --out will hold beyond the present ones, which is while the last one is written
inline int64_t checkpoints_to_come(const Run& r) {
    const Options& o = r.o;
    const int64_t every = o.checkpoint_every, keep = o.keep;
    const int64_t saves = r.state.step < o.steps ? ceil_div(o.steps, every) - r.state.step / every : 0;
    if (keep == 0) { return saves; }
    const int64_t old = (int64_t)list_checkpoints(o.out).size();
    return std::min(saves, keep + 1 - std::min(old, keep));
}

// Prepares --out and fills p, allocated for r.micro_batches, with initial values or from a checkpoint or --load.
// config: the model's config.json
inline void load_run(Run& r, Parameters& p, const Json& config) {
    const Doing loading("preparing the weights");
    const Options& o = r.o;
    if (!o.out.empty() && r.trains) {
        rank0_works([&] {
            if (!r.lock) { r.lock = std::make_unique<OutputLock>(o.out); }
            clean_output_directory(o.out);
            check(o.resume || list_checkpoints(o.out).empty(), "--out %s: holds checkpoints of an earlier run; "
                  "continue it with --resume 1, or give another directory", o.out.c_str());
        }, "--out");
    }
    if (!o.out.empty() && r.trains && o.checkpoint_every > 0) { check_shared_directory(o.out); }
    p.leaf = r.leaf;
    const uint64_t seed = (uint64_t)o.seed;
    parameters_allocate(p, seed, r.micro_batches);
    if (!r.resumed.empty()) {
        const Checkpoint c = checkpoint_view(r, p, nullptr, config);
        const CheckpointReader reader(r.resumed, c);
        r.state.from_json(reader.state, o, r.resumed + "/state.json");
        if (comm().rank == 0) { check_resumed_data(o, r.record, reader.state, r.resumed + "/state.json"); }
        const auto fill = [&](float* data, Slice block) { reader.read_parameters(data, block); };
        set_master(p, seed, (int)r.state.updates, fill);
        reader.read_moments();
        printf("resumed from %s\n", printable(r.resumed, LONGEST_MESSAGE).c_str());
    } else if (!o.load.empty()) {
        const WeightReader reader(r.source, p.table, p.files, optional_files(p));
        set_master(p, 0, 0, [&](float* data, Slice block) {
            if (!reader.complete) { fill_initially(p, data, block, seed); }
            reader.read(data, block);
        });
    }
    check_replicas(p, "has it loaded another model?");
    if (r.lock != nullptr && o.checkpoint_every > 0) {
        check_disk_space(o.out, checkpoint_bytes(checkpoint_view(r, p, p.master, config)), checkpoints_to_come(r));
    }
    r.state.guard.skip_loss_z = o.skip_loss_z;
    r.state.guard.skip_norm_z = o.skip_norm_z;
    r.first_step = r.state.step;
    int64_t keep_before = INT64_MAX;                            // a run without training appends to the logs
    if (r.trains) { keep_before = r.resumed.empty() ? -1 : r.state.step; }
    r.log = std::make_unique<Log>();
    rank0_works([&] { r.log = std::make_unique<Log>(o.out, keep_before); }, "the log");
    if (keep_before < 0) { r.log->heading = json_text(config_record(o, config.at("position"))) + "\n"; }
}

// Saves the checkpoint of step r.state.step. must: a failure is an error, otherwise training continues
inline void save_run(Run& r, Parameters& p, const Json& config, bool must) {
    const Doing saving_step("saving a checkpoint");
    const Options& o = r.o;
    const double begun = wall_seconds();
    const int step = (int)r.state.step;
    check_replicas(p, "nothing is saved; a machine that computes wrongly?");
    saving = 1;
    const Checkpoint c = checkpoint_view(r, p, gather_master(p), config);
    const std::string failure = save_on_ranks(o.out, step, c, o.keep, [&] { r.log->sync(); });
    saving = 0;
    check(failure.empty() || !must, "%s", failure.c_str());
    const bool last = step >= o.steps;
    if (last) { not_saved = failure; }
    if (comm().rank > 0) { return; }
    if (failure.empty()) {
        const std::string path = printable(o.out + "/" + step_name(step), LONGEST_MESSAGE);
        printf("saved %s in %.2f s\n", path.c_str(), wall_seconds() - begun);
        return;
    }
    std::string next = "the run finishes its other work first";
    if (!last) {
        const int64_t due = std::min(round_up((int64_t)step + 1, (int64_t)o.checkpoint_every), o.steps);
        next = strprintf("training continues, the next checkpoint is due in %lld steps", (long long)due - step);
    }
    say("warning: %s; %s", failure.c_str(), next.c_str());
}

inline int stopped_by(const Run& r, int signal) {
    const long long step = (long long)r.state.step;
    const std::string where = step >= r.o.steps ? "after the last step" : strprintf("before step %lld", step + 1);
    if (comm().rank == 0) {
        say("stopped by signal %d %s%s", signal, where.c_str(),
            r.o.out.empty() ? "; without --out nothing is kept" : "; continue with --resume 1");
    }
    return EXIT_INTERRUPTED;
}

// Before the update of step r.state.step: saves if that is due. Returns -1 to continue, else the run's exit code.
inline int save_or_leave(Run& r, Parameters& p, const Json& config) {
    const Options& o = r.o;
    const int64_t step = r.state.step;
    const int signal = comm_max((int)stop_signal, "signals");
    const bool last = step >= o.steps, stop = signal != 0;
    const bool saves = !o.out.empty() && step > r.first_step && (r.due(o.checkpoint_every) || stop);
    if (saves) { save_run(r, p, config, stop); }
    if (!stop) { return last ? 0 : -1; }
    return stopped_by(r, signal);
}

// The exit code after the use of a trained model. If a signal has cut it short, the resumed run repeats it. A use whose
// records cannot be written has failed.
inline int leave_use(const Run& r) {
    const int signal = r.trains ? comm_max((int)stop_signal, "signals") : 0;
    if (signal != 0) { return stopped_by(r, signal); }
    rank0_works([&] { if (not_saved.empty()) { r.log->sync(); } }, "the log");     // otherwise that is the error
    release_signals();
    if (!r.diverged.empty()) { die(EXIT_DIVERGED, "%s", r.diverged.c_str()); }
    return 0;
}

// ----------------------------------------------------------------------------------------------------------
// a step; its gradient and its update stand in the trainer's loop

// Begins step r.state.step; --profile measures kernels from here on.
inline StepRecord start_step(const Run& r) {
    StepRecord s;
    s.step = r.state.step;
    if (r.o.profile == s.step + 1) { profile_begin(); }
    s.start = wall_seconds();
    return s;
}

// Whether the update of a step is to be applied; if not, s.skipped says why.
inline bool judge_step(Run& r, Parameters& p, const StepGradient& gradient, StepRecord& s) {
    s.loss = gradient.loss;
    s.norm = gradient.norm;
    if (gradient.targets == 0) {                                // there is nothing to learn or to judge
        s.skipped = "nothing to predict in any sequence of this step";
        return false;
    }
    const Verdict verdict = r.state.guard.judge(s.loss, s.norm);
    s.loss_z = verdict.loss_z;
    s.norm_z = verdict.norm_z;
    if (!verdict.skip) { return true; }
    // a loss that is not finite leaves no gradient that is
    const std::string bad = std::isfinite(s.loss) ? first_bad_tensor(p, gradient.grads) : "";
    s.skipped = verdict.reason + (bad.empty() ? "" : ", first in the gradient of " + bad);
    return false;
}

// Reports a step, whose update is done or skipped, and counts it. tokens: in the step; token_flops: see flops_per_token
// in gpu.h
inline void report_step(Run& r, StepRecord& s, double tokens, double token_flops) {
    const Options& o = r.o;
    const double seconds = wall_seconds() - s.start;
    const std::string kernels = profile.on ? profile_end(s.start) : "";
    r.step_seconds = s.step == r.first_step ? seconds : 0.95 * r.step_seconds + 0.05 * seconds;
    s.ms = 1e3 * seconds;
    s.tok_per_s = tokens / seconds;
    s.mem = (double)device_memory_used();
    if (r.gpu.sms > 0) {
        const double peak = peak_flops(r.gpu, sizeof(floatX) == 2);
        s.mfu = s.tok_per_s / comm().size * token_flops / peak;         // NAN when the peak is unknown
    }
    printf("%s\n", step_line(s, o.steps, r.step_seconds * (double)(o.steps - s.step - 1)).c_str());
    fflush(stdout);
    if (!kernels.empty() && comm().rank == 0) {
        printf("profile of step %lld, by %s\n%s", (long long)s.step + 1, PROFILED_BY, kernels.c_str());
        fflush(stdout);
    }
    r.log->train(s);
    r.state.step++;
    r.state.sample += (uint64_t)r.samples;
    if (r.state.guard.diverged()) {
        die(EXIT_DIVERGED, "%d updates in a row were skipped, the last at step %lld: %s", MAX_BAD_STEPS,
            (long long)s.step + 1, s.skipped.c_str());
    }
}
