// engine/run.h -- a run, from its first check to its exit code: all of a trainer that does not depend on its model.
#pragma once

#include <csignal>
#include <new>

#include "../attention/choose.cuh"
#include "../base/gpu.h"
#include "../base/host.h"
#include "../matmul.cuh"
#include "checkpoint.h"
#include "config.h"
#include "data.h"
#include "log.h"
#include "model.cuh"
#include "parameters.cuh"
#include "schedule.h"

// ----------------------------------------------------------------------------------------------------------
// the state of a run

// What resuming needs, apart from the weights and moments
struct RunState {
    int64_t step = 0;           // the next step
    int64_t updates = 0;        // updates applied: AdamW's t, without skipped steps
    uint64_t sample = 0;        // the next sample of the order
    int leaves = 0;             // see plan_leaves()
    Guard guard;

    Json to_json(const Options& options) const {
        Json flags = options_json(options);
        flags["leaves"] = leaves;                               // among the flags, because it was one
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

// A trainer's run: everything except the model
struct Run {
    Options o;
    Gpu gpu;
    bool trains = false;                                        // otherwise a trained model is used
    int samples = 0;                                            // in an update
    int my_samples = 0, micro_batches = 0;                      // this rank's share of them; with --pairs, texts
    bool largest_batch = false;                                 // --B -1, which is 1 until fit_memory()
    int leaf = 1;                                               // micro-batches that share a gradient
    std::unique_ptr<OutputLock> lock;
    std::string resumed, source;                                // the checkpoint to continue; the weights' path
    std::unique_ptr<Tokenizer> tokenizer;
    std::string data;                                           // for the banner (data_text)
    RunState state;
    Json record = Json::object();                               // of its data (data.h), if it saves
    std::unique_ptr<Log> log;
    std::string diverged;                                       // the error that look() has caught last
    std::string not_saved;                                      // why its last checkpoint is missing; "" otherwise
    int64_t first_step = 0;
    double step_seconds = 0;                                    // smoothed

    // This rank's i-th sample in the next step (parameters.cuh)
    uint64_t sample(int i) const {
        return (o.overfit ? 0 : state.sample) + (uint64_t)(comm().rank * my_samples + i);
    }
    // Validates, samples, ... between two updates. A result that is not finite ends the run only after the last update.
    template <class Looks> void look(Looks looks) {
        diverged.clear();
        try { looks(); } catch (const Error& e) {
            if (e.code != EXIT_DIVERGED) { throw; }
            diverged = e.what();
            say_once("warning: before step %lld: %s", (long long)state.step + 1, e.what());
        }
    }
    // Whether work is due that comes before every Nth update (0: never) and after the last
    bool due(int64_t every) const { return every > 0 && (state.step >= o.steps || state.step % every == 0); }
};

// ----------------------------------------------------------------------------------------------------------
// before the work: the task and the data

// Whether --eval_lengths gives lengths of windows of --val_files, not of documents
inline bool evaluates_lengths(const Options& o) {
    return !o.eval_lengths.empty() && o.encode.empty();
}

// Puts a flag's files into the record for checkpoints; an error if the ranks' differ
inline void record_files(Run& r, const std::string& flag, const std::vector<std::string>& paths) {
    const bool saves = r.trains && !r.o.out.empty();
    if (!saves && comm().size == 1) { return; }
    const Phase recording("keeping a record of the data");
    const Json list = file_records(paths);
    check_same_records(flag, list);
    if (saves) { add_to_record(r.record, flag.substr(2), list); }
}
// TokenFiles, Documents or null
template <class Files> void record_data(Run& r, const Files* files) {
    if (files != nullptr) { record_files(r, files->flag, file_paths(*files)); }
}

// Decides between training and use, and finds the weights. uses: flags request a use of a model; use_flags: their names
inline void begin_run(Run& r, bool uses, const char* use_flags) {
    const Phase looking("looking for a checkpoint");
    const Options& o = r.o;
    const bool plans = o.check && comm().size == 1;             // --check --ranks N starts none
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
    // rank 0 locks and cleans --out, then chooses a checkpoint and reads all of its bytes
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
    if (o.resume && r.resumed.empty()) {
        say_once("--resume 1: there is no checkpoint in %s; this run starts at step 1", o.out.c_str());
    }
}

// ----------------------------------------------------------------------------------------------------------
// batches and memory

// --check --ranks N, a plan for ranks that are not started, perhaps on another machine
inline bool plans_ahead(const Run& r) {
    return r.o.check && r.trains && comm().size == 1 && r.o.is_given("ranks");
}
inline int planned_ranks(const Run& r) { return plans_ahead(r) ? r.o.ranks : comm().size; }

// The leaves of the tree that sums a step's gradient (parameters.cuh): 8, or 4, 2 or 1 if 8 does not divide the
// micro-batches. If each rank can have 2^k of them, the bits do not depend on the number of ranks; otherwise each has
// one. A resumed run keeps its leaves.
inline void plan_leaves(Run& r) {
    const int ranks = planned_ranks(r), all = r.micro_batches * ranks;
    r.leaf = 1;
    r.state.leaves = 0;
    if (!r.trains) { return; }
    int leaves = std::gcd(all, 8);
    if (!r.resumed.empty()) {
        const std::string path = r.resumed + "/state.json";
        const Json saved = json_at(read_json(path), "options", path);
        const int was = saved.contains("leaves") ? (int)json_int(saved, "leaves", 0, INT32_MAX, path) : 0;
        if (was == 0) { return; }                               // each micro-batch is a leaf
        if (all % was == 0) { leaves = was; }                   // else the number of micro-batches has changed
    }
    const int mine = leaves / ranks;
    const bool fits = ranks == 1 || (leaves % ranks == 0 && (mine & (mine - 1)) == 0);
    check(fits || r.resumed.empty() || r.o.may_change("leaves"), "--resume: the run sums a step's gradient in %d "
          "parts, which %d ranks cannot share; start it on 1 rank, or with --allow_change leaves, for other bits",
          leaves, ranks);
    r.state.leaves = fits ? leaves : ranks;
    r.leaf = all / r.state.leaves;
}

// Micro-batches of B sequences, which divide r.my_samples
inline void plan_batch(Run& r, int B) {
    r.o.B = B;
    r.micro_batches = r.trains ? r.my_samples / B : 0;
    plan_leaves(r);
}

// The bytes that parameters_allocate() will take on the rank with the largest share
inline double weight_bytes(const Run& r, const Parameters& p) {
    const int ranks = r.trains ? planned_ranks(r) : 1;
    const double all = (double)p.table.total, share = (double)largest_share(p.table, ranks);
    const bool rounded = sizeof(floatX) != sizeof(float);       // the float32 weights are a separate array
    const double encoding = ranks > 1 ? (double)p.table.blocks[0].size() : 0.0;
    const double weights = rounded ? sizeof(floatX) * all + 4.0 * (share + encoding) : 4.0 * all;
    if (!r.trains) { return weights; }
    const double buffers = gradient_buffers(r.micro_batches / r.leaf);
    return weights + 8.0 * share + 4.0 * buffers * all;
}

// Plans the largest batch that divides this rank's samples and fits into `available` bytes; returns it, or 0 if none
// fits. activations(B): bytes for B sequences. (A smaller batch also needs more buffers of gradients.)
template <class Bytes>
int plan_largest_batch(Run& r, const Parameters& p, double available, double buffers, Bytes activations) {
    for (int B = r.my_samples; B >= 1; B--) {
        if (r.my_samples % B != 0) { continue; }
        try {
            plan_batch(r, B);
            if (weight_bytes(r, p) + buffers + (double)activations(B) <= available) { return B; }
        } catch (const Error&) {}                               // the leaves do not fit, or an overflow
    }
    return 0;
}

// The bytes that this rank's weights and activations may take; without a GPU, the ranks of a machine share its memory
inline double memory_available() {
    return (double)device_memory_available() / (ON_GPU ? 1 : comm().local_size) - (double)MATMUL_WORKSPACE;
}

// Replaces --B -1 and --recompute -1, the same on all ranks. activations(B): bytes with r.o.recompute. If no batch
// fits, B is 1, and report_run() refuses the run. --recompute comes last, as it changes no bit. Returns the number of
// sequences whose activations are in memory at once: r.o.B, or up to `most`.
template <class Bytes>
int fit_memory(Run& r, const Parameters& p, double buffers, Bytes activations, int most = 0) {
    const bool least = r.o.recompute < 0;
    if (least) { r.o.recompute = 1; }
    if (r.largest_batch) {
        const int mine = plan_largest_batch(r, p, memory_available(), buffers, activations);
        plan_batch(r, std::max(1, -comm_max(-mine, "the choice of --B")));
        r.o.notes.push_back(strprintf("--B -1 is %d here", r.o.B));
    }
    if (!r.trains || plans_ahead(r)) { return r.o.B; }
    most = std::max(most, r.o.B);
    const double left = 0.9 * memory_available() - weight_bytes(r, p) - buffers;
    if (least) {
        r.o.recompute = 0;
        r.o.recompute = comm_max((double)activations(most) > left, "the choice of --recompute");
    }
    const double fit = left / (double)activations(r.o.B) * r.o.B;
    return fit < most ? std::max(r.o.B, (int)fit) : most;
}

// Refuses a run that cannot fit, before any allocation. Bytes: activations for fit_memory()'s sequences, and buffers
inline void check_memory(Run& r, const Parameters& p, double activations, double buffers) {
    // 1 the host, which holds all tokens of a step: ids, targets, masked ids and DeviceBatch's arrays
    const double tokens = r.trains ? (double)r.micro_batches * r.o.B * r.o.T : 0.0;
    const double on_host = tokens * sizeof(int) * (3.0 + (double)DeviceBatch::ints(1));
    const double host = (double)host_memory_available() / comm().local_size;
    if (on_host > host) {
        die(EXIT_OUT_OF_MEMORY, "the tokens of a step need %s of the host's memory, but %s are available; try a "
            "smaller --total_batch", format_bytes(on_host).c_str(), format_bytes(host).c_str());
    }
    // 2 the device
    const double weights = weight_bytes(r, p), available = memory_available();
    const double bytes = weights + buffers + (r.trains ? activations : 0.0);
    const std::string needed = format_bytes(bytes), left = format_bytes(available);
    const char* bound = ON_GPU ? "" : host_memory().bound;
    std::string what = format_bytes(weights) + " for the parameters";
    if (r.trains) { what += ", " + format_bytes(activations) + " of activations"; }
    if (buffers > 0) { what += ", " + format_bytes(buffers) + " of embeddings and their scores"; }
    say_once("memory: %s needed (%s), %s available%s", needed.c_str(), what.c_str(), left.c_str(), bound);
    if (bytes <= available) { return; }
    const double per_sequence = activations / r.o.B;
    const auto estimate = [&](int B) { return per_sequence * B; };
    const int fits = r.trains ? plan_largest_batch(r, p, available, buffers, estimate) : 0;
    std::string hint = "not even --B 1 would fit; try a smaller --model or --T, or a smaller --total_batch";
    if (fits >= 1) { hint = strprintf("--B %d would fit", fits); }
    die(EXIT_OUT_OF_MEMORY, "the run needs %s of memory, but %s are available%s; %s", needed.c_str(), left.c_str(),
        bound, hint.c_str());
}

// The batches of an update and the number of updates. config: the model's; epoch: the samples of one pass over the data
// (0: no data). A sample is `texts` texts of at most T tokens; --total_batch counts only one.
inline void plan_steps(Run& r, ModelConfig& config, uint64_t epoch, int texts = 1) {
    Options& o = r.o;
    if (o.tile_skip == "exact") { config.position.tile_skip = TileSkip::Exact; }
    if (o.tile_skip == "off") { config.position.tile_skip = TileSkip::Off; }
    r.largest_batch = o.B < 0;
    check(o.B > 0 || (r.trains && o.total_batch > 0), "--B -1: takes the most sequences that divide "
          "--total_batch, in training: give both, or a number");
    o.B = std::max(o.B, 1);
    check(!r.largest_batch || !plans_ahead(r), "--check --ranks %d: --B -1 depends on the memory of the machine that "
          "the ranks run on; expected a number", o.ranks);
    const int ranks = planned_ranks(r);
    if (o.total_batch < 0) { o.total_batch = (int64_t)o.B * o.T * ranks; }
    const std::string of_ranks = ranks > 1 ? strprintf(" x %d ranks", ranks) : "";
    const std::string of_texts = texts > 1 ? strprintf(" x %d texts", texts) : "";
    check(texts == 1 || o.total_batch % o.T == 0, "--total_batch %lld: expected a multiple of --T = %d",
          (long long)o.total_batch, o.T);
    check(o.total_batch % o.T == 0 && o.total_batch / o.T <= INT32_MAX / texts &&
          o.total_batch * texts % ((int64_t)o.B * o.T * ranks) == 0,
          "--total_batch %lld%s: not a multiple of --B x --T = %d x %d%s = %lld tokens", (long long)o.total_batch,
          of_texts.c_str(), o.B, o.T, of_ranks.c_str(), (long long)o.B * o.T * ranks);
    r.samples = (int)(o.total_batch / o.T);
    r.my_samples = r.samples * texts / ranks;
    plan_batch(r, o.B);
    if (epoch > 0 && o.steps < 0) { o.steps = std::max((int64_t)1, (int64_t)epoch / r.samples); }
    check(o.steps <= INT32_MAX, "--steps: expected at most %d, for which a checkpoint's name has room, got %lld",
          INT32_MAX, (long long)o.steps);
}

// ----------------------------------------------------------------------------------------------------------
// the banner

// 305260 -> "305,260"
inline std::string thousands(uint64_t n) {
    std::string s = std::to_string(n);
    for (size_t at = s.size(); at > 3; at -= 3) { s.insert(at - 3, ","); }
    return s;
}

// "305,260 tokens, 74 steps per epoch, 2.70 epochs". size: "305,260 tokens"; epoch: the samples of one pass.
inline std::string data_text(const Run& r, const std::string& size, uint64_t epoch) {
    if (epoch == 0) { return size + strprintf(", too few for one sequence of %d", r.o.T); }
    const double steps = (double)epoch / r.samples;
    const std::string shown = steps < 10 ? strprintf("%.1f", steps) : thousands((uint64_t)steps);
    return strprintf("%s, %s steps per epoch, %.2f epochs", size.c_str(), shown.c_str(), (double)r.o.steps / steps);
}

inline std::string data_text(const Run& r, const TokenFiles& files) {
    uint64_t epoch = 0;
    for (const Shard& s : files.shards) { epoch += s.windows(r.o.T); }      // not files.windows(), which refuses 0
    return data_text(r, thousands(files.tokens) + " tokens", epoch);
}

// A note for users who ask for a schedule: with llm.c's default of --final_lr, every schedule is constant.
inline std::string schedule_note(const Options& o) {
    if (!o.is_given("schedule") || o.schedule == "constant" || o.final_lr < 1) { return ""; }
    const char* after = o.warmup > 0 ? " after the warm-up" : "";
    return strprintf("--schedule %s with --final_lr 1 keeps the learning rate constant%s; --final_lr 0.1 would let it "
                     "decay", o.schedule.c_str(), after);
}

// ", a window of 256 keys, 4 sinks, documents apart"; ", windows of 256,256,0 keys in turn, 0 sinks"; "" without a mask
inline std::string mask_text(const PositionConfig& position) {
    const AttentionMask& mask = position.mask;
    const std::string documents = mask.by_document() ? ", documents apart" : "";
    if (!position.has_window()) { return documents; }
    const char* of_keys = position.windows.size() == 1 ? ", a window of %s keys" : ", windows of %s keys in turn";
    const char* of_sinks = mask.sinks == 1 ? ", %d sink" : ", %d sinks";
    return strprintf(of_keys, option_text(position.windows).c_str()) + strprintf(of_sinks, mask.sinks) + documents;
}

// A note on the cost of an encoding whose bias the tensor-core kernels do not know (FlashBias::Unknown), otherwise "".
inline std::string attention_note(const PositionConfig& position, const Gpu& gpu) {
    const bool bf16_build = sizeof(floatX) == 2, on_gpu = gpu.sms > 0;
    const std::string unknown = unknown_bias(position);
    if (unknown.empty() || (on_gpu && !bf16_build)) { return ""; }
    const std::string what = "no tensor-core kernel knows the form of " + unknown + "'s bias: ";
    const double fast = peak_flops(gpu, true) / 1e12, slow = peak_flops(gpu, false) / 1e12;
    const char* slowly = "attention runs in float32 without tensor cores";
    if (!on_gpu) { return what + "that costs nothing on a CPU, but on a GPU " + slowly; }
    if (!std::isfinite(fast / slow)) { return what + slowly; }
    return what + slowly + strprintf(", at no more than %.0f instead of %.0f TFLOP/s", slow, fast);
}

// --check --ranks N: what each of N ranks holds and sends
inline void report_ranks(const Run& r, const Parameters& p, double activations) {
    const Options& o = r.o;
    const int N = planned_ranks(r);
    const double weights = weight_bytes(r, p);
    const double sent = (double)(N - 1) / N * (double)p.table.total;        // elements, each way
    const double sums = sent * sizeof(float);
    const double back = sent * (double)sizeof(floatX);
    const auto line = [](const char* name, const std::string& text) { printf("%-10s %s\n", name, text.c_str()); };
    printf("as %d ranks, with weights of %zu bytes:\n", N, sizeof(floatX));
    line("batch", strprintf("%d micro-batches of %d sequences on each rank, summed in %d leaves", r.micro_batches, o.B,
                            r.micro_batches / r.leaf * N));
    line("memory", format_bytes(weights + activations) + " on each: " + format_bytes(weights) +
         " for the parameters, " + format_bytes(activations) + " of activations");
    line("traffic", format_bytes(sums + back) + " an update leave each and reach it: " + format_bytes(sums) +
         " of gradients, " + format_bytes(back) + " of new weights");
}

// The end of --check: the table of tensors with their names in a checkpoint. batch: the samples of an update
inline int report_check(const Run& r, const Parameters& p, const std::string& batch) {
    printf("%-12s %7s %10s %8s %12s %6s   in a checkpoint\n", "tensor", "layers", "rows", "cols", "elements", "decay");
    for (const TensorSpec& s : p.table.specs) {
        std::string names;
        for (const FileTensor& f : p.files) {
            if (f.tensor != s.name || f.layer != 0) { continue; }
            names += names.empty() ? "" : ", ";
            names += f.name + (f.transposed ? "^T" : "");
        }
        const std::string layers = s.layers > 0 ? std::to_string(s.layers) : "-";
        const std::string cols = s.cols > 0 ? std::to_string(s.cols) : "-";
        printf("%-12s %7s %10zu %8s %12zu %6s   %s\n", s.name.c_str(), layers.c_str(), s.rows, cols.c_str(), s.size(),
               s.decay ? "yes" : "no", names.c_str());
    }
    size_t in_files = 0;
    for (const FileTensor& f : p.files) { in_files += file_view(p.table, f).size(); }
    printf("%zu elements, %zu of them parameters of the model and the rest padding\n", p.table.elements(), in_files);
    const std::string plan = r.trains ? strprintf(": %lld steps of %s", (long long)r.o.steps, batch.c_str()) : "";
    const int here = ON_GPU ? device_count() : cores_here();
    const char* kind = ON_GPU ? "GPU" : "core";
    const char* plural = here == 1 ? "" : "s";
    const std::string machine = strprintf("; not compared with this machine's %d %s%s and %s", here, kind, plural,
                                          format_bytes((double)device_memory_available()).c_str());
    printf("all is well%s%s\n", plan.c_str(), plans_ahead(r) ? machine.c_str() : "");
    return 0;
}

// Prints a run's banner, and checks that it fits into memory. Bytes: activations for o.B sequences, buffers for any B
inline void report_run(Run& r, const Parameters& p, const ModelConfig& config, size_t activations,
                       size_t buffers = 0) {
    const bool trains = r.trains;
    const PositionConfig& position = config.position;
    const int HS = config.C / config.NH;
    FILE* banner = trains ? stdout : stderr;                    // without training, stdout is for the result
    if (comm().rank == 0) {
        std::string stretch;
        if (position.scaling != RopeScaling::None) {
            stretch = strprintf(", %s of %d tokens", rope_scaling_text(position).c_str(), position.original_length());
        }
        const std::string shape = strprintf("L %d, NH %d, C %d, V %d", config.L, config.NH, config.C, config.V);
        const Names flags = changed_flags(r.o), none = {"all at their defaults; --help lists them"};
        std::string s;
        if (trains) { s += banner_line("flags", flags.empty() ? none : flags); }
        const auto line = [&](const char* label, const std::string& text) {
            if (!text.empty()) { s += banner_line(label, words_of(text)); }
        };
        line("device", gpu_report(r.gpu) + ", " + comm_description());
        line("model", shape + strprintf(": %.1fM parameters", (double)p.table.elements() / 1e6));
        line("encoding", position_text(position) + stretch);        // "rope:theta=10000,p=1, yarn:4 of 1024 tokens"
        line("attention", attention_description(position, HS) + mask_text(position));
        line("data", trains ? r.data : "");
        for (const std::string& note : r.o.notes) { line("note", note); }
        line("note", trains ? schedule_note(r.o) : "");
        line("note", attention_note(position, r.gpu));
        fprintf(banner, "%s", s.c_str());
    }
    check_head_size(position, HS, trains, device_shared_available());
    if (plans_ahead(r)) { return report_ranks(r, p, (double)activations + (double)buffers); }
    check_memory(r, p, (double)activations, (double)buffers);
}

// ----------------------------------------------------------------------------------------------------------
// signals

// Each of STOP_SIGNALS requests a checkpoint and an end after this step. A second SIGINT ends at once, unless a
// checkpoint is being written: the run ends after it anyway.
inline volatile sig_atomic_t saving = 0;        // a checkpoint is being written
inline void catch_signals() {
    saving = 0;
    struct sigaction action = {};
    action.sa_handler = [](int number) {
        if (number == SIGINT && stop_signal != 0 && !saving) {
            signal(SIGINT, SIG_DFL);
            raise(SIGINT);
        }
        stop_signal = number;
    };
    action.sa_flags = SA_RESTART;
    for (int number : STOP_SIGNALS) {
        struct sigaction before = {};
        sigaction(number, nullptr, &before);
        if (number == SIGHUP && before.sa_handler == SIG_IGN) { continue; }     // started by nohup
        sigaction(number, &action, nullptr);
    }
}
inline void release_signals() {
    for (int number : STOP_SIGNALS) { if (signal(number, SIG_DFL) == SIG_IGN) { signal(number, SIG_IGN); } }
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
    // for a warning of cable_hf.py: with a changed kernel, it may compute another model
    if (commit != nullptr && strstr(commit, "-dirty") != nullptr) { c.config["built_from"] = commit; }
    c.state = r.state.to_json(r.o);
    if (!r.record.empty()) { c.state["data"] = r.record; }
    if (config.contains("auto_map")) { c.extra.push_back({HF_FILE, hf_code()}); }
    for (const auto& file : vocabulary_files(r.tokenizer.get(), config)) { c.extra.push_back(file); }
    return c;
}

// The most checkpoints that --out will hold beyond the present ones: while the last is written
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
    const Phase loading("preparing the weights");
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
    int64_t keep_before = INT64_MAX;                            // a use appends to the logs
    if (r.trains) { keep_before = r.resumed.empty() ? -1 : r.state.step; }
    r.log = std::make_unique<Log>();
    rank0_works([&] { r.log = std::make_unique<Log>(o.out, keep_before); }, "the log");
    if (keep_before < 0) { r.log->heading = json_text(config_record(o, config.at("position"))) + "\n"; }
}

// Saves the checkpoint of step r.state.step. After a failure training continues, unless must: then it is an error.
inline void save_run(Run& r, Parameters& p, const Json& config, bool must) {
    const Phase saving_step("saving a checkpoint");
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
    if (last) { r.not_saved = failure; }
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
    say_once("warning: %s; %s", failure.c_str(), next.c_str());
}

// Says that a signal has ended the run, and returns the exit code.
inline int stopped_by(const Run& r, int signal) {
    const long long step = (long long)r.state.step;
    const std::string where = step >= r.o.steps ? "after the last step" : strprintf("before step %lld", step + 1);
    say_once("stopped by signal %d %s%s", signal, where.c_str(),
             r.o.out.empty() ? "; without --out nothing is kept" : "; continue with --resume 1");
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

// The exit code after the use of a trained model. If a signal has cut the use short, a resumed run repeats it; if its
// records cannot be written, it has failed.
inline int leave_use(const Run& r) {
    const int signal = r.trains ? comm_max((int)stop_signal, "signals") : 0;
    if (signal != 0) { return stopped_by(r, signal); }
    rank0_works([&] { if (r.not_saved.empty()) { r.log->sync(); } }, "the log");     // else that is the error
    release_signals();
    if (!r.diverged.empty()) { die(EXIT_DIVERGED, "%s", r.diverged.c_str()); }
    return 0;
}

// ----------------------------------------------------------------------------------------------------------
// a step: what the trainer's loop calls around the gradient and the update

// Begins step r.state.step; --profile measures kernels from here on.
inline StepRecord start_step(const Run& r) {
    StepRecord s;
    s.step = r.state.step;
    if (r.o.profile == s.step + 1) { profile_begin(); }
    s.start = wall_seconds();
    return s;
}

// Whether to apply the update of a step; if not, s.skipped says why.
inline bool judge_step(Run& r, Parameters& p, const StepGradient& gradient, StepRecord& s) {
    s.loss = gradient.loss;
    s.norm = gradient.norm;
    if (gradient.targets == 0) {
        s.skipped = "nothing to predict in any sequence of this step";
        return false;
    }
    const Verdict verdict = r.state.guard.judge(s.loss, s.norm);
    s.loss_z = verdict.loss_z;
    s.norm_z = verdict.norm_z;
    if (!verdict.skip) { return true; }
    // if the loss is not finite, no gradient is
    const std::string bad = std::isfinite(s.loss) ? first_bad_tensor(p, gradient.grads) : "";
    s.skipped = verdict.reason + (bad.empty() ? "" : ", first in the gradient of " + bad);
    return false;
}

// Reports a step, after its update or the decision to skip it, and counts it. token_flops: of a token (model.cuh)
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
    if (!kernels.empty()) {
        printf("profile of step %lld, by %s\n%s", (long long)s.step + 1, PROFILED_BY, kernels.c_str());
    }
    fflush(stdout);
    r.log->train(s);
    r.state.step++;
    r.state.sample += (uint64_t)r.samples;
    if (r.state.guard.diverged()) {
        die(EXIT_DIVERGED, "%d updates in a row were skipped, the last at step %lld: %s", MAX_BAD_STEPS,
            (long long)s.step + 1, s.skipped.c_str());
    }
}

// ----------------------------------------------------------------------------------------------------------
// the program: its errors and its exit code

// Prints an error and returns its code, also when no memory is left.
inline int report_error(int code, const char* message) {
    try { return comm_report(code, message); } catch (const std::bad_alloc&) {}
    fprintf(stderr, "error: %s\n", message);
    return code;
}

// Reports the exception that is being handled; -1: this program never throws its kind.
inline int report_exception() {
    char message[400];
    try {
        throw;
    } catch (const Error& e) {
        return report_error(e.code, e.what());
    } catch (const std::bad_alloc&) {
        snprintf(message, sizeof(message), "out of memory while %s: the host has no more, or `ulimit -v` forbids it",
                 phase);
    } catch (const std::length_error&) {
        snprintf(message, sizeof(message), "out of memory while %s: a size beyond what any machine has", phase);
    } catch (const std::system_error& e) {
        snprintf(message, sizeof(message), "cannot create a thread while %s: %s (limits of memory or of processes?)",
                 phase, e.what());
    } catch (...) {
        return -1;
    }
    return report_error(EXIT_OUT_OF_MEMORY, message);
}

// Reports ends that do not return from main(): an exception in a destructor or in a thread of OpenMP, which nothing can
// catch, and a library's exit(1), which OpenMP calls without memory. They lose no more than a kill.
inline void report_sudden_ends() {
    std::set_terminate([] {
        const int code = std::current_exception() ? report_exception() : -1;
        if (code < 0) { abort(); }
        _exit(code);
    });
    const auto ended = [](int code, void*) {
        if (code != EXIT_FAILURE) { return; }       // this program never exits with 1
        fprintf(stderr, "error: a library ended the program while %s: no memory, or no thread?\n", phase);
        _exit(EXIT_OUT_OF_MEMORY);
    };
    on_exit(ended, nullptr);
}

inline int print_help(const char* program, const std::string& description, Program flags) {
    printf("%s\ncable.c %s\n%s\n", help_text(program, description, flags).c_str(), VERSION, version_text().c_str());
    return 0;
}

// Undoes inherited settings that would break the process. If the caller has closed descriptor 0, 1 or 2, the next file,
// a log or a rank's socket, would become the console: so they are opened, by O_PATH, and reading or writing them still
// fails. While SIGCHLD is ignored no rank can be waited for, and a blocked signal never arrives.
inline void begin_process() {
    for (int fd : {0, 1, 2}) { if (fcntl(fd, F_GETFD) < 0 && open("/", O_PATH) != fd) { _exit(EXIT_DEVICE); } }
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    for (int number : {SIGCHLD, SIGALRM}) { signal(number, SIG_DFL); }
}

// Runs a trainer's main on all ranks and turns what it throws into a message and an exit code.
template <class Main> int run_on_ranks(Main program, Program trainer, int argc, char** argv) {
    try {
        if (!isfinite_works()) {
            die(EXIT_DEVICE, "this binary treats NaN as a number (built with -ffast-math?); build it by make");
        }
        signal(SIGXFSZ, SIG_IGN);               // so that `ulimit -f` causes a write error with a message
        signal(SIGPIPE, SIG_IGN);               // so that `| head` does not end the run
        Run run;
        std::exception_ptr wrong_flags;         // an Error, reported once there are ranks
        try { run.o = parse_options(argc, argv, trainer); } catch (const Error&) {
            wrong_flags = std::current_exception();
        }
        const Options& o = run.o;
        const Names words(argv, argv + argc);
        comm().timeout = o.collective_timeout;
        Launch launch = find_launch();
        if (o.ranks > 1 && !o.help && !o.check && launch.size == 1) { launch = fork_ranks(o.ranks); }
        comm_init(launch, words);
        if (wrong_flags) { std::rethrow_exception(wrong_flags); }
        const int code = program(run);
        check(run.not_saved.empty(), "%s", run.not_saved.c_str());
        const bool printed = fflush(stdout) == 0 && ferror(stdout) == 0;
        const bool trained = run.trains && !o.check;            // then the result is a checkpoint, not stdout
        check(printed || trained, "cannot write to stdout");
        return comm_finish(code);
    } catch (const std::exception&) {
        const int code = report_exception();
        if (code < 0) { throw; }
        return code;
    }
}

// Most of a trainer's main(). Tests call run_on_ranks: the first two calls would change their process.
template <class Main> int run_program(Main program, Program trainer, int argc, char** argv) {
    begin_process();
    report_sudden_ends();
    return run_on_ranks(program, trainer, argc, argv);
}
