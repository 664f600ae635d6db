// run/plan.h -- before a run begins: its batches, micro-batches and leaves, and the memory that they take; --help, and
// the banner with the device, the model and the data.
#pragma once

#include "../../attention/choose.cuh"
#include "run.h"

// ----------------------------------------------------------------------------------------------------------
// batches and memory

// Whether this is a plan for ranks that are not started, perhaps on another machine: --check --ranks N
inline bool plans_ahead(const Run& r) {
    return r.o.check && r.trains && comm().size == 1 && r.o.is_given("ranks");
}
inline int planned_ranks(const Run& r) { return plans_ahead(r) ? r.o.ranks : comm().size; }

// The leaves of the tree that sums a step's gradient (ranks/gradients.cuh): 8, or 4, 2 or 1 if 8 does not divide the
// micro-batches. So the bits do not depend on the number of ranks, if each can have 2^k leaves; otherwise it has one. A
// resumed run keeps its leaves.
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
        if (was == 0) { return; }                               // each micro-batch is one
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
    r.micro_batches = r.trains ? r.my_samples / B * r.texts : 0;
    plan_leaves(r);
}

// The bytes that parameters_allocate() will take on this rank; of what ranks share, the largest share
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

// Plans the largest batch that divides the samples of a step and fits into `available` bytes with everything else.
// Returns it, or 0 if none fits. activations(B): bytes for B sequences. Smaller batches need more buffers of gradients.
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

// The bytes that this rank's weights and activations may take: without a GPU, of the memory that the ranks share
inline double memory_available() {
    return (double)device_memory_available() / (ON_GPU ? 1 : comm().local_size) - (double)MATMUL_WORKSPACE;
}

// Chooses --B -1 and --recompute -1, the same on all ranks. activations(B): bytes with r.o.recompute. If no batch fits,
// B is 1, and report_run() refuses the run. Recomputing less takes memory but changes no bit, so it is chosen last.
template <class Bytes> void fit_memory(Run& r, const Parameters& p, double buffers, Bytes activations) {
    const bool least = r.o.recompute < 0;
    if (least) { r.o.recompute = 1; }
    if (r.largest_batch) {
        const int mine = plan_largest_batch(r, p, memory_available(), buffers, activations);
        plan_batch(r, std::max(1, -comm_max(-mine, "the choice of --B")));
        r.o.notes.push_back(strprintf("--B -1 is %d here", r.o.B));
    }
    if (!least || !r.trains || plans_ahead(r)) { return; }
    r.o.recompute = 0;
    const double all = weight_bytes(r, p) + buffers + (double)activations(r.o.B);
    r.o.recompute = comm_max(all > 0.9 * memory_available(), "the choice of --recompute");
}

// Refuses a run that cannot fit, before any allocation. activations: bytes for o.B sequences; buffers: for any B
inline void check_memory(Run& r, const Parameters& p, double activations, double buffers) {
    // 1 the host, which holds the tokens of a step at once: ids, targets, the masked ids, and DeviceBatch's share
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
    if (comm().rank == 0) {
        std::string what = format_bytes(weights) + " for the parameters";
        if (r.trains) { what += ", " + format_bytes(activations) + " of activations"; }
        if (buffers > 0) { what += ", " + format_bytes(buffers) + " of embeddings and their scores"; }
        fprintf(stderr, "memory: %s needed (%s), %s available%s\n", needed.c_str(), what.c_str(), left.c_str(), bound);
    }
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
// (0: no data). A sample is `texts` texts of T tokens; --total_batch counts the tokens of one of them.
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
    check(o.total_batch % ((int64_t)o.B * o.T * ranks) == 0 && o.total_batch / o.T <= INT32_MAX / texts,
          "--total_batch %lld: not a multiple of --B x --T = %d x %d%s = %lld tokens", (long long)o.total_batch, o.B,
          o.T, of_ranks.c_str(), (long long)o.B * o.T * ranks);
    r.samples = (int)(o.total_batch / o.T);
    r.my_samples = r.samples / ranks;
    r.texts = texts;
    plan_batch(r, o.B);
    if (epoch > 0 && o.steps < 0) { o.steps = std::max((int64_t)1, (int64_t)epoch / r.samples); }
    check(o.steps <= INT32_MAX, "--steps: expected at most %d, for which a checkpoint's name has room, got %lld",
          INT32_MAX, (long long)o.steps);
}

// ----------------------------------------------------------------------------------------------------------
// --help

inline std::string gpt2_help() {
    return "Trains, evaluates and samples a GPT-2 with any of these encodings (--pos):\n" + position_help() + "\n" +
           sizes_help(GPT2_FLAG) + "\n"
           "Train on your own text, and save every 500 steps; --resume 1 continues a run:\n"
           "  ./train_gpt2 --train_files a.txt --val_files b.txt --model 4,4,128 --T 256 \\\n"
           "               --steps 2000 --lr 1e-3 --warmup 100 --final_lr 0.1 --pos cable \\\n"
           "               --out run/cable --checkpoint_every 500\n"
           "Measure how far it extrapolates beyond the length it was trained at:\n"
           "  ./train_gpt2 --load run/cable --val_files b.txt --eval_lengths 256,512,1024\n"
           "Write text:\n"
           "  ./train_gpt2 --load run/cable --generate \"Once upon a time\" --top_k 40\n";
}

inline std::string bert_help() {
    return "Trains a BERT with any of these positional encodings (--pos), and evaluates it:\n" + position_help() +
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

inline int print_help(const char* program, const std::string& description, Program flags) {
    printf("%s\ncable.c %s\n%s\n", help_text(program, description, flags).c_str(), VERSION, version_text().c_str());
    return 0;
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
    for (const Shard& s : files.shards) { epoch += s.windows(r.o.T); }      // files.windows() refuses none
    return data_text(r, thousands(files.tokens) + " tokens", epoch);
}

// A note for users who ask for a schedule: with llm.c's default of --final_lr each of them is constant.
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

// Prints a run's banner, and checks that it fits into memory. activations: bytes for o.B sequences; buffers: for any B
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
