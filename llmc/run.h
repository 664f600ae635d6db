// run.h -- what every trainer's main does around its model: the encoding in config.json, the state of a run, memory before
// it is allocated, signals, --list, and errors that become exit codes.
#ifndef LLMC_RUN_H
#define LLMC_RUN_H

#include <csignal>
#include <new>

#include "adamw.cuh"
#include "args.h"
#include "checkpoint.h"
#include "generate.h"
#include "guard.h"
#include "import.h"
#include "log.h"
#include "schedule.h"

// ----------------------------------------------------------------------------------------------------------
// the encoding in config.json: {"name": "t5_clip", "K": 1023}

inline Json position_json(const PositionConfig& position) {
    Json j = {{"name", position.name}};
    for (const auto& kv : position.values) { j[kv.first] = kv.second; }
    return j;
}
inline PositionConfig position_from_json(const Json& j, int T_train, const std::string& what) {
    std::string text = json_string(j, "name", what);
    char separator = ':';
    for (const auto& item : j.items()) {
        if (item.key() == "name") { continue; }
        text += strprintf("%c%s=%.17g", separator, item.key().c_str(), json_number(j, item.key(), what));
        separator = ',';
    }
    return parse_position(text, T_train);
}

// --rope_scaling ntk:4 -> how, and the factor s (0: T / T_train at each length)
inline void parse_rope_scaling(const std::string& text, PositionConfig& position) {
    const size_t colon = text.find(':');
    const std::string kind = text.substr(0, colon);
    position.scaling = kind == "pi" ? RopeScaling::PI : kind == "ntk" ? RopeScaling::NTK : kind == "yarn" ? RopeScaling::YaRN : RopeScaling::None;
    position.scaling_factor = colon == std::string::npos ? 0.0 : strtod(text.c_str() + colon + 1, nullptr);
    check(position.scaling == RopeScaling::None || position.name == "rope", "--rope_scaling %s: the encoding is %s, only rope can be stretched",
          text.c_str(), position.name.c_str());
}

inline TileSkip parse_tile_skip(const std::string& text) {
    return text == "off" ? TileSkip::Off : text == "exact" ? TileSkip::Exact : TileSkip::Default;
}

// The tokenizer of a model: --tokenizer, or the one its checkpoint carries, or its bytes; null: ids are all there is.
inline std::unique_ptr<Tokenizer> find_tokenizer(const std::string& flag, const std::string& source, int V) {
    std::string path = flag;
    if (path.empty() && V == 256) { return std::make_unique<Tokenizer>(Tokenizer::bytes()); }
    const std::vector<int> steps = list_checkpoints(source);
    const std::string dir = steps.empty() ? source : source + "/" + step_name(steps.back());
    for (const char* name : {"encoder.json", "vocab.json", "vocab.txt", "gpt2_tokenizer.bin"}) {
        if (path.empty() && is_directory(dir) && path_exists(dir + "/" + name)) { path = dir + "/" + name; }
    }
    if (path.empty()) { return nullptr; }
    auto tokenizer = std::make_unique<Tokenizer>(Tokenizer::load(path));
    check(tokenizer->vocab_size() == V, "--tokenizer %s: %d tokens, the model has %d", path.c_str(), tokenizer->vocab_size(), V);
    return tokenizer;
}

// ----------------------------------------------------------------------------------------------------------
// the state of a run: all that resuming needs besides the weights and moments

struct RunState {
    int64_t step = 0;           // the next step
    int64_t updates = 0;        // updates applied: AdamW's t. A skipped step does not count
    uint64_t sample = 0;        // the next sample of the order
    Guard guard;

    Json to_json(const Options& options) const {
        return {{"step", step}, {"updates", updates}, {"sample", sample}, {"guard", guard.to_json()}, {"options", options_json(options)}};
    }
    void from_json(const Json& j, const Options& options, const std::string& what) {
        check_resumed_options(options, json_at(j, "options", what), what);
        step = json_int(j, "step", 0, INT64_MAX, what);
        updates = json_int(j, "updates", 0, step, what);
        sample = (uint64_t)json_int(j, "sample", 0, INT64_MAX, what);
        guard.from_json(json_at(j, "guard", what), what);
    }
};

// ----------------------------------------------------------------------------------------------------------
// memory, signals, tensors, errors

// Refuses what cannot fit before anything is allocated: `fixed` bytes whatever the batch, `activations` for B sequences.
inline void check_memory(double fixed, double activations, int B, const std::string& what) {
    const double available = (double)device_memory_available(), bytes = fixed + activations;
    fprintf(stderr, "memory: %s wanted (%s), %s available\n", format_bytes(bytes).c_str(), what.c_str(), format_bytes(available).c_str());
    if (bytes <= available) { return; }
    const int fits = activations > 0 ? (int)std::floor((available - fixed) / (activations / B)) : 0;
    const std::string hint = fits >= 1 ? strprintf("a --B of %d would fit", fits) :
        "not even --B 1 would fit; try a smaller --model or --T, or a --total_batch of fewer micro-batches";
    die(EXIT_OUT_OF_MEMORY, "the run wants %s of memory, %s are available; %s", format_bytes(bytes).c_str(), format_bytes(available).c_str(),
        hint.c_str());
}

// The first SIGINT, SIGTERM or SIGUSR1 asks for a checkpoint and an end after this step; a second SIGINT ends at once.
inline volatile sig_atomic_t stop_signal = 0;
inline void catch_signals() {
    struct sigaction action = {};
    action.sa_handler = [](int number) { stop_signal = number; };
    action.sa_flags = (int)(SA_RESETHAND | SA_RESTART);
    for (int number : {SIGINT, SIGTERM, SIGUSR1}) { sigaction(number, &action, nullptr); }
}
inline void release_signals() { for (int number : {SIGINT, SIGTERM, SIGUSR1}) { signal(number, SIG_DFL); } }

// --list
inline void print_tensors(const TensorTable& table, const std::vector<FileTensor>& files) {
    printf("%-12s %7s %10s %8s %12s %6s   in a checkpoint\n", "tensor", "layers", "rows", "cols", "elements", "decay");
    for (const TensorSpec& s : table.specs) {
        std::string names;
        for (const FileTensor& f : files) {
            if (f.tensor == s.name && f.layer == 0) { names += (names.empty() ? "" : ", ") + f.name + (f.transposed ? "^T" : ""); }
        }
        printf("%-12s %7s %10zu %8s %12zu %6s   %s\n", s.name.c_str(), s.layers > 0 ? std::to_string(s.layers).c_str() : "-", s.rows,
               s.cols > 0 ? std::to_string(s.cols).c_str() : "-", s.size(), s.decay ? "yes" : "no", names.c_str());
    }
    size_t in_files = 0;
    for (const FileTensor& f : files) { in_files += f.rows * table.specs[(size_t)table.index(f.tensor)].row_size(); }
    printf("%zu elements, %zu of them parameters of the model and the rest padding\n", table.elements(), in_files);
}

// The name of the first tensor whose gradient is not finite, for the message of a skipped update.
inline std::string first_bad_tensor(const TensorTable& table, const float* grads, double* norm_partial, Stream stream) {
    for (size_t i = 0; i < table.specs.size(); i++) {
        if (!std::isfinite(gradient_norm(norm_partial, grads + table.offsets[i], table.specs[i].size(), stream))) { return table.specs[i].name; }
    }
    return "";
}

// Runs a program and turns what it throws into a message and an exit code.
template <class Program> int run_program(Program program, int argc, char** argv) {
    try {
        if (!isfinite_works()) { die(EXIT_DEVICE, "this binary takes NaN for a number (built with -ffast-math?); build it with the Makefile"); }
        return program(argc, argv);
    } catch (const Error& e) {
        fflush(stdout);
        fprintf(stderr, "error: %s\n", e.what());
        return e.code;
    } catch (const std::bad_alloc&) {
        fprintf(stderr, "error: out of memory\n");
        return EXIT_OUT_OF_MEMORY;
    }
}

#endif
