// lab/use_gpt2.h -- the flags of train_gpt2 that use a trained model: what they exclude, the files that they name, and
// the work. Templates over the trainer's model, as in evaluate.h and generate.h.
#pragma once

#include "generate.h"
#include "tasks.h"
#include "validate.h"

constexpr const char* GPT2_USES = "--eval_lengths, --hellaswag, --tasks, --generate and --dump_bias";

// Whether the flags request one of these. Flags that make no sense together are refused first.
inline bool uses_gpt2(const Options& o) {
    const bool writes = o.is_given("generate") || !o.dump_bias.empty();
    check(comm().size == 1 || !writes, "--generate, --dump_bias: expected one process, got %d: a text is written token "
          "by token, which %d would only repeat; start it as one", comm().size, comm().size);
    check(!o.token_losses || !o.eval_lengths.empty(), "--token_losses: expected --eval_lengths, for losses to write");
    check(!o.token_losses || !o.out.empty(), "--token_losses: give the directory to write to with --out");
    return writes || !o.eval_lengths.empty() || !o.hellaswag.empty() || !o.tasks.empty();
}

// Whether --dump_bias LAYER,HEAD[,TEXT] has no text: it shows the first --T tokens of --val_files then.
inline bool dumps_data(const Options& o) {
    const std::string& s = o.dump_bias;
    const size_t first = s.find(',');
    return first != std::string::npos && s.find(',', first + 1) >= s.size() - 1;        // the last comma, or none
}

// --dump_bias "0,1,To be" -> layer, head and the ids of the text
template <class Config>
std::vector<int> parse_dump_bias(const Options& o, const Config& c, const Tokenizer* tokenizer, const TokenFiles* val,
                                 int& layer, int& head) {
    const std::string& s = o.dump_bias;
    const size_t first = s.find(','), second = s.find(',', first + 1);
    const bool good = first != std::string::npos && parse_bias_choice(s.substr(0, first), c.L, false, layer) &&
                      parse_bias_choice(s.substr(first + 1, second - first - 1), c.NH, true, head);
    check(good, "--dump_bias: expected LAYER,HEAD[,TEXT] with a layer below %d and a head below %d, got '%s'", c.L,
          c.NH, printable(s).c_str());
    check(!o.out.empty(), "--dump_bias: give the directory to write to with --out");
    if (!dumps_data(o)) { return prompt_ids(s.substr(second + 1), c.V, tokenizer); }
    std::vector<int> ids((size_t)std::min<uint64_t>(val->tokens, (uint64_t)o.T));
    val->read(0, ids.size(), ids.data());
    return ids;
}

// The data that the flags name
struct GPT2Data : TokenData {
    std::unique_ptr<HellaSwag> hellaswag;
    std::vector<TokenFiles> tasks;              // a file each

    explicit GPT2Data(const Run& run)
        : TokenData(run, run.trains, !run.o.eval_lengths.empty() || dumps_data(run.o)) {}

    int vocab() const { return any() ? any()->vocab : 0; }              // 0: there is no data
    int end_of_text() const { return any() ? any()->eot : -1; }         // begins a document; -1: unknown
    // What needs the model's vocabulary or its shape is checked as soon as these are known.
    template <class Config> void check_uses(const Run& run, const Config& c) {
        const Options& o = run.o;
        if (!o.tasks.empty()) { tasks = open_tasks(o.tasks, c.V); }
        if (!o.hellaswag.empty()) { hellaswag = std::make_unique<HellaSwag>(load_hellaswag(o.hellaswag, c.V)); }
        int layer, head;
        if (!o.dump_bias.empty()) { parse_dump_bias(o, c, run.tokenizer.get(), val.get(), layer, head); }
        if (o.is_given("generate")) { prompt_ids(o.generate, c.V, run.tokenizer.get()); }
    }
    void record(Run& run) const {
        TokenData::record(run);
        if (hellaswag) { check_same_files("--hellaswag", {hellaswag->path}); }
        for (const TokenFiles& files : tasks) { check_same_files("--tasks", file_paths(files)); }
    }
};

template <class Model> void dump_bias(Model& model, const Run& run, const TokenFiles* val) {
    const Tokenizer* tokenizer = run.tokenizer.get();
    int layer, head;
    const std::vector<int> ids = parse_dump_bias(run.o, model.config, tokenizer, val, layer, head);
    std::vector<std::string> labels;
    for (int id : ids) {
        labels.push_back(tokenizer != nullptr ? tokenizer->shown(id, labels.empty()) : std::to_string(id));
    }
    write_bias(model, ids, labels, layer, head, run.o.out);
}

template <class Model> void generate_text(Model& model, const Run& run) {
    const Options& o = run.o;
    const Sampling sampling{o.temperature, o.top_k, o.top_p, (uint64_t)o.seed};
    const double start = wall_seconds();
    const std::vector<int> prompt = prompt_ids(o.generate, model.config.V, run.tokenizer.get());
    generate(model, prompt, o.tokens, sampling, run.tokenizer.get(), stdout);
    fprintf(stderr, "%lld tokens, %.1f tokens/s\n", (long long)o.tokens, (double)o.tokens / (wall_seconds() - start));
}

// A sample of what the model writes by itself, different at every step
template <class Model> void print_sample(Model& model, const Run& run) {
    const Options& o = run.o;
    const int64_t reach = position_max_length(model.config.position);
    const uint64_t seed = hash64((uint64_t)o.seed, (uint64_t)run.state.step);
    const std::vector<int> prompt = prompt_ids("", model.config.V, run.tokenizer.get());
    const Sampling sampling{o.temperature, o.top_k, o.top_p, seed};
    printf("generating:\n---\n");
    generate(model, prompt, std::min(o.tokens, reach - 1), sampling, run.tokenizer.get(), stdout);
    printf("---\n");
}

// Does what the flags request of a trained model. Training has reported HellaSwag already.
template <class Model> void use_gpt2(Model& model, const Run& run, const GPT2Data& data) {
    const Options& o = run.o;
    if (data.hellaswag && !run.trains) {
        auto acts = activations_describe(model, o.B, o.T, Purpose::Evaluate, 0);
        activations_allocate(acts);
        report_hellaswag(model, acts, *data.hellaswag, 0, true, *run.log);
        acts.release();
    }
    if (evaluates_lengths(o)) {
        evaluate_lengths(model, *data.val, o.eval_lengths, o.stride, (uint64_t)o.eval_tokens, o.curve, o.heads,
                         *run.log, o.token_losses ? o.out : "");
    }
    if (!data.tasks.empty()) { evaluate_tasks(model, data.tasks, run.state.step, *run.log); }
    if (o.is_given("generate")) { generate_text(model, run); }
    if (!o.dump_bias.empty()) { dump_bias(model, run, data.val.get()); }
}
