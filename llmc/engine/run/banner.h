// run/banner.h -- what a trainer prints before a run: --help, or the device, model and data, and what they cost.
#pragma once

#include "../../attention/choose.cuh"
#include "config.h"
#include "plan.h"
#include "program.h"

// ----------------------------------------------------------------------------------------------------------
// --help, and the sizes that --model knows by name

inline const std::vector<ModelSize> gpt2_sizes = {      // name, L, NH, C
    {"tiny", 6, 8, 512}, {"small", 12, 12, 768}, {"medium", 24, 16, 1024}, {"large", 36, 20, 1280},
    {"xl", 48, 25, 1600}, {"d6", 6, 6, 384}, {"d12", 12, 12, 768}, {"d24", 24, 16, 1024}, {"d36", 36, 20, 1280},
    {"d48", 48, 25, 1600}, {"d60", 60, 30, 1920}, {"d72", 72, 30, 2880}, {"d84", 84, 36, 3456}};

inline const std::vector<ModelSize> bert_sizes = {      // name, L, NH, C
    {"tiny", 2, 2, 128}, {"mini", 4, 4, 256}, {"small", 4, 8, 512}, {"base", 12, 12, 768}};

inline std::string gpt2_help() {
    return "Trains, evaluates and samples a GPT-2 with any of these encodings (--pos):\n" + position_help() + "\n" +
           sizes_help(gpt2_sizes) + "\n"
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
           "\n" + sizes_help(bert_sizes) + "\n"
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
    printf("%s\n%s\n", help_text(program, description, flags).c_str(), version_text().c_str());
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

// "rope:theta=10000,p=1, yarn:4 of 1024 tokens"
inline std::string encoding_text(const PositionConfig& position) {
    std::string s = position_text(position);
    if (position.scaling == RopeScaling::None) { return s; }
    return s + strprintf(", %s of %d tokens", rope_scaling_text(position).c_str(), position.original_length());
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

// The table of the tensors, with their names in a checkpoint
inline void print_tensors(const TensorTable& table, const std::vector<FileTensor>& files) {
    printf("%-12s %7s %10s %8s %12s %6s   in a checkpoint\n", "tensor", "layers", "rows", "cols", "elements", "decay");
    for (const TensorSpec& s : table.specs) {
        std::string names;
        for (const FileTensor& f : files) {
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
    for (const FileTensor& f : files) { in_files += f.rows * table.specs[(size_t)table.index(f.tensor)].row_size(); }
    printf("%zu elements, %zu of them parameters of the model and the rest padding\n", table.elements(), in_files);
}

// The end of --check: the tensors, and that all is well. batch: the samples of an update
inline int report_check(const Run& r, const Parameters& p, const std::string& batch) {
    const std::string plan = r.trains ? strprintf(": %lld steps of %s", (long long)r.o.steps, batch.c_str()) : "";
    print_tensors(p.table, p.files);
    printf("all is well%s\n", plan.c_str());
    return 0;
}

// Prints the banner of a run, and checks that it fits into memory. activations: bytes for o.B sequences; buffers: bytes
// that do not depend on B
template <class Config>
void report_run(Run& r, const Parameters& p, const Config& config, size_t activations, size_t buffers = 0) {
    const bool trains = r.trains;
    FILE* banner = trains ? stdout : stderr;                    // without training, stdout is for the result
    if (comm().rank == 0) {
        const std::string shape = strprintf("L %d, NH %d, C %d, V %d", config.L, config.NH, config.C, config.V);
        const Names flags = changed_flags(r.o), none = {"all at their defaults; --help lists them"};
        std::string s;
        if (trains) { s += banner_line("flags", flags.empty() ? none : flags); }
        s += banner_line("device", gpu_report(r.gpu) + ", " + comm_description());
        s += banner_line("model", shape + strprintf(": %.1fM parameters", (double)p.table.elements() / 1e6));
        s += banner_line("encoding", encoding_text(config.position));
        s += banner_line("attention", attention_description(config.position, config.C / config.NH) +
                                      mask_text(config.position));
        if (trains) { s += banner_line("data", r.data); }
        for (const std::string& note : r.o.notes) { s += banner_line("note", note); }
        for (const std::string& note : {trains ? schedule_note(r.o) : "", attention_note(config.position, r.gpu)}) {
            if (!note.empty()) { s += banner_line("note", note); }
        }
        fprintf(banner, "%s", s.c_str());
    }
    check_head_size(config.position, config.C / config.NH, trains, device_shared_available());
    if (plans_ahead(r)) {
        report_ranks(r, p, (double)activations + (double)buffers);
        return;
    }
    const double weights = weight_bytes(r, p);
    std::string what = format_bytes(weights) + " for the parameters";
    if (trains) { what += ", " + format_bytes((double)activations) + " of activations"; }
    if (buffers > 0) { what += ", " + format_bytes((double)buffers) + " of embeddings and their scores"; }
    // bytes for each token of this rank's step: ids, targets, the masked ids, and DeviceBatch's share
    const double tokens = trains ? (double)r.micro_batches * r.o.B * r.o.T : 0.0;
    check_host_memory(tokens * sizeof(int) * (3.0 + (double)DeviceBatch::ints(1)));
    const double per_sequence = (double)activations / r.o.B;
    const double needed = weights + (double)buffers + (trains ? (double)activations : 0.0);
    check_memory(needed, memory_available(), what, [&](double available) {
        const auto estimate = [&](int B) { return per_sequence * B; };
        return trains ? plan_largest_batch(r, p, available, (double)buffers, estimate) : 0;
    });
}
