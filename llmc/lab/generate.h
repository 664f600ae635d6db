// lab/generate.h -- uses of a trained GPT-2: generated text, evaluations, dumps, and the flags that request them.
//
// A text grows by one token at a time. The cache of earlier tokens is the forward's own: each layer's rows of qkv, and
// the encoding's cached arrays (CABLE's S). A new token is a forward of one row at position t0.
// Templates over the trainer's model, as in evaluate.h: they also call gpt2_forward.
#pragma once

#include <numeric>

#include "../engine/run.h"
#include "../engine/vocabulary.h"
#include "../matmul.cuh"
#include "evaluate.h"

constexpr size_t LONG_PROMPT = 4096;    // tokens: a message explains the wait for the first new token
constexpr uint64_t MAX_PROMPT = 16u << 20;      // bytes of a file

struct Sampling {
    double temperature = 1.0;       // 0: the likeliest token
    int top_k = 0;                  // draw among the k likeliest; 0: among all
    double top_p = 1.0;             // draw among the likeliest whose probabilities sum to p
    uint64_t seed = 42;
    int stop = -1;                  // ends the text; -1: no token does
};

// u uniform in [0, 1) -> a token. Ties go to the smaller id.
inline int sample_token(const std::vector<float>& logits, const Sampling& s, double u) {
    const int V = (int)logits.size();
    if (s.temperature == 0.0) { return (int)(std::max_element(logits.begin(), logits.end()) - logits.begin()); }
    std::vector<int> order(V);
    std::iota(order.begin(), order.end(), 0);
    const int keep = s.top_k > 0 && s.top_k < V ? s.top_k : V;
    const auto likelier = [&](int a, int b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); };
    if (keep < V || s.top_p < 1.0) { std::partial_sort(order.begin(), order.begin() + keep, order.end(), likelier); }
    const double largest = *std::max_element(logits.begin(), logits.end());
    std::vector<double> p(keep);
    double sum = 0;
    for (int k = 0; k < keep; k++) { sum += p[k] = portable_exp((logits[order[k]] - largest) / s.temperature); }
    int last = keep - 1;
    if (s.top_p < 1.0) {
        double nucleus = 0;
        for (int k = 0; k < keep; k++) {
            nucleus += p[k];
            if (nucleus >= s.top_p * sum) { last = k; sum = nucleus; break; }
        }
    }
    double at = 0;
    for (int k = 0; k < last; k++) {
        at += p[k];
        if (u * sum < at) { return order[k]; }
    }
    return order[last];
}

// The prompt of --generate: its text, or the text in @FILE
inline std::string prompt_text(const Options& o) {
    if (!starts_with(o.generate, "@")) { return o.generate; }
    const std::string rest = o.generate.substr(1);
    if (starts_with(rest, "@")) { return rest; }
    check(path_exists(rest), "--generate %s: there is no such file (@@ begins a text that begins with @)",
          o.generate.c_str());
    refuse_stand_in(rest, true);
    return read_file(rest, MAX_PROMPT);
}

// The ids of a prompt: its bytes or, unless the vocabulary is bytes, the ids that it lists ("15496 995"). An empty
// prompt becomes a newline, or the end-of-text id.
inline std::vector<int> prompt_ids(const std::string& text, int V, const Tokenizer* tokenizer = nullptr,
                                   const char* flag = "--generate", const char* command = "generate") {
    std::vector<int> ids;
    if (V == 256) {
        for (const char c : text.empty() ? std::string("\n") : text) { ids.push_back((unsigned char)c); }
        return ids;
    }
    ids = parse_ids(text, V, flag, command);
    if (ids.empty()) { ids.push_back(std::max(stop_token(V, tokenizer), 0)); }
    return ids;
}

// The ids of --generate's prompt, which may come from a shard
inline std::vector<int> prompt_of(const Options& o, int V, const Tokenizer* tokenizer) {
    const std::vector<int> ids = prompt_in_shard(o.generate, "--generate", V);
    return ids.empty() ? prompt_ids(prompt_text(o), V, tokenizer) : ids;
}

// ids (n), at positions t0 .. t0 + n - 1 -> logits (V) of the next token. acts holds the cache of the t0 tokens before.
template <class Model, class Acts>
void forward_logits(Model& model, Acts& acts, const int* ids, int n, int t0, std::vector<float>& logits) {
    const int C = model.config.C, Vp = model.config.Vp();
    settle_weights(model);
    acts.batch.load(0, 1, ids, nullptr, (size_t)n, model.stream);
    gpt2_forward(model, acts, 1, n, t0);
    const Matrix<floatX> last = view(acts.a.lnf() + (size_t)(n - 1) * C, 1, C);
    const Matrix<floatX> wte = view(model.params.wte(), Vp, C);
    matmul_float((float*)acts.a.logits(), last, transposed(wte), nullptr, model.stream);            // (1,Vp)
    logits.resize((size_t)model.config.V);
    copy_to_host(logits.data(), acts.a.logits(), sizeof(float) * logits.size(), model.stream);
}

// Continues the prompt by n tokens, or to the end of the text. Returns the new tokens, and prints prompt and tokens to
// `out` (null: silent): as text, or without a tokenizer as ids.
template <class Model>
std::vector<int> generate(Model& model, const std::vector<int>& prompt, int64_t n, const Sampling& sampling,
                          const Tokenizer* tokenizer, FILE* out) {
    const Phase generating("generating");
    const int64_t reach = position_max_length(model.config.position);
    check(n <= reach - (int64_t)prompt.size(),
          "--generate: %zu tokens of prompt and %lld more, but %s reaches %lld; give a shorter prompt, or a smaller "
          "--tokens", prompt.size(), (long long)n, model.config.position.name.c_str(), (long long)reach);
    const size_t most = prompt.size() + (size_t)n;
    auto acts = activations_describe(model, 1, (int)most, Purpose::Generate, 0, (int)prompt.size());
    if (prompt.size() >= LONG_PROMPT && (double)acts.bytes() > memory_available()) {
        die(EXIT_OUT_OF_MEMORY, "--generate: a prompt of %zu tokens needs %s of memory, more than is available; give a "
            "shorter one", prompt.size(), format_bytes((double)acts.bytes()).c_str());
    }
    activations_allocate(acts);
    std::vector<int> ids = prompt;
    std::vector<float> logits;
    size_t read = 0;                                        // number of ids that the cache has
    Utf8Stream text;
    auto print = [&](int id, bool first) {
        if (out == nullptr) { return; }
        // printable(): a model of bytes writes control characters, too, which ring the bell or move the cursor
        const std::string number = strprintf("%s%d", first ? "" : " ", id);
        const std::string next = tokenizer != nullptr ? text.push(tokenizer->shown(id, first)) : number;
        fputs(printable(next, SIZE_MAX, "\n\t").c_str(), out);
        fflush(out);
    };
    for (size_t i = 0; i < ids.size(); i++) { print(ids[i], i == 0); }
    if (out != nullptr && prompt.size() >= LONG_PROMPT) {
        say("reading %zu tokens of prompt at once; the time that it takes grows with their square", prompt.size());
    }
    while (ids.size() < most && stop_signal == 0) {
        const size_t count = ids.size() - read;
        forward_logits(model, acts, &ids[read], (int)count, (int)read, logits);
        read += count;
        check_finite("logits", logits.data(), logits.size());
        const double u = uniform01(sampling.seed, checksum("generate"), (uint64_t)(read - prompt.size()));
        const int next = sample_token(logits, sampling, u);
        if (next == sampling.stop) { break; }
        ids.push_back(next);
        print(next, false);
    }
    if (out != nullptr) { fprintf(out, "%s\n", text.flush().c_str()); }
    acts.release();
    return std::vector<int>(ids.begin() + (long)prompt.size(), ids.end());
}

// ----------------------------------------------------------------------------------------------------------
// the flags and what they request

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

constexpr const char* GPT2_USES = "--eval_lengths, --hellaswag, --tasks, --generate and --dump_bias";

// Whether the flags request a use of the model. Refuses flags that contradict each other.
inline bool uses_gpt2(const Options& o) {
    const bool writes = o.is_given("generate") || !o.dump_bias.empty();
    check(comm().size == 1 || !writes, "--generate, --dump_bias: expected one process, got %d: a text is written token "
          "by token, which %d would only repeat; start it as one", comm().size, comm().size);
    check(!o.token_losses || !o.eval_lengths.empty(), "--token_losses: expected --eval_lengths, for losses to write");
    check(!o.token_losses || !o.out.empty(), "--token_losses: give the directory to write to with --out");
    return writes || !o.eval_lengths.empty() || !o.hellaswag.empty() || !o.tasks.empty();
}

// Whether --dump_bias LAYER,HEAD[,TEXT] has no text: then it shows the first --T tokens of --val_files.
inline bool dumps_data(const Options& o) {
    const std::string& s = o.dump_bias;
    const size_t first = s.find(',');
    return first != std::string::npos && s.find(',', first + 1) >= s.size() - 1;        // the last comma, or none
}

// --dump_bias "0,1,To be" -> layer, head, and the ids of its text or of --val_files
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
    if (!dumps_data(o)) { return prompt_ids(s.substr(second + 1), c.V, tokenizer, "--dump_bias", "ids"); }
    std::vector<int> ids((size_t)std::min<uint64_t>(val->tokens, (uint64_t)o.T));
    val->read(0, ids.size(), ids.data());
    return ids;
}

// The data that the flags name
struct GPT2Data : TokenData {
    std::unique_ptr<HellaSwag> hellaswag;
    std::vector<TokenFiles> tasks;              // one per file

    explicit GPT2Data(const Run& run)
        : TokenData(run, run.trains, !run.o.eval_lengths.empty() || dumps_data(run.o)) {}

    int vocab() const { return any() ? any()->vocab : 0; }              // 0: there is no data
    int end_of_text() const { return any() ? any()->eot : -1; }         // begins a document; -1: unknown
    // The checks that need the model's vocabulary or shape
    template <class Config> void check_uses(const Run& run, const Config& c) {
        const Options& o = run.o;
        if (!o.tasks.empty()) { tasks = open_tasks(o.tasks, c.V); }
        if (!o.hellaswag.empty()) { hellaswag = std::make_unique<HellaSwag>(load_hellaswag(o.hellaswag, c.V)); }
        say_repeated(train.get(), val.get());
        int layer, head;
        if (!o.dump_bias.empty()) { parse_dump_bias(o, c, run.tokenizer.get(), val.get(), layer, head); }
        if (o.is_given("generate")) { prompt_of(o, c.V, run.tokenizer.get()); }
    }
    void record(Run& run) const {
        TokenData::record(run);
        if (hellaswag) { check_same_files("--hellaswag", {hellaswag->path}); }
        for (const TokenFiles& files : tasks) { check_same_files("--tasks", file_paths(files)); }
    }
};

template <class Model> void dump_bias(Model& model, const Run& run, const TokenFiles* val) {
    int layer, head;
    const std::vector<int> ids = parse_dump_bias(run.o, model.config, run.tokenizer.get(), val, layer, head);
    const Tokenizer* tokenizer = with_text(run.tokenizer.get());
    std::vector<std::string> labels;
    for (int id : ids) {
        labels.push_back(tokenizer != nullptr ? tokenizer->shown(id, labels.empty()) : std::to_string(id));
    }
    if (head != BIAS_PARTS) { return write_bias(model, ids, labels, layer, head, run.o.out); }
    const PartsTo evaluated = evaluated_parts(run.o.dump_bias, run.o.eval_lengths, run.o.out, model.config.L);
    if (evaluated.directory.empty()) { read_text(model, ids, {run.o.out, layer}).release(); }
    write_bias_file({{"pos", model.config.position.name}}, labels, layer, head, run.o.out);
}

template <class Model> void generate_text(Model& model, const Run& run) {
    const Options& o = run.o;
    const Tokenizer* tokenizer = run.tokenizer.get();
    const int stop = o.stop_at_eot ? stop_token(model.config.V, tokenizer) : -1;
    const Sampling sampling{o.temperature, o.top_k, o.top_p, (uint64_t)o.seed, stop};
    const double start = wall_seconds();
    const std::vector<int> prompt = prompt_of(o, model.config.V, tokenizer);
    const size_t n = generate(model, prompt, o.tokens, sampling, with_text(tokenizer), stdout).size();
    const char* end = stop_signal == 0 && (int64_t)n < o.tokens ? ", up to the end of the text" : "";
    fprintf(stderr, "%zu tokens%s, %.1f tokens/s\n", n, end, (double)n / (wall_seconds() - start));
}

// Prints a text without a prompt; each step draws another one
template <class Model> void print_sample(Model& model, const Run& run) {
    const Options& o = run.o;
    const int64_t reach = position_max_length(model.config.position);
    const uint64_t seed = hash64((uint64_t)o.seed, (uint64_t)run.state.step);
    const std::vector<int> prompt = prompt_ids("", model.config.V, run.tokenizer.get());
    const Sampling sampling{o.temperature, o.top_k, o.top_p, seed};
    printf("generating:\n---\n");
    generate(model, prompt, std::min(o.tokens, reach - 1), sampling, with_text(run.tokenizer.get()), stdout);
    printf("---\n");
}

// Does what the flags request of a trained model. After training, HellaSwag has been reported already.
template <class Model> void use_gpt2(Model& model, const Run& run, const GPT2Data& data) {
    const Options& o = run.o;
    if (data.hellaswag && !run.trains) {
        auto acts = activations_describe(model, o.B, o.T, Purpose::Evaluate, 0);
        activations_allocate(acts);
        report_hellaswag(model, acts, *data.hellaswag, 0, true, *run.log);
        acts.release();
    }
    if (evaluates_lengths(o)) {
        evaluate_lengths(model, *data.val, o.eval_lengths, o.stride, (uint64_t)o.eval_tokens, o.curve,
                         evaluated_parts(o.dump_bias, o.eval_lengths, o.out, model.config.L), *run.log,
                         o.token_losses ? o.out : "");
    }
    if (!data.tasks.empty()) { evaluate_tasks(model, data.tasks, run.state.step, *run.log); }
    if (o.is_given("generate")) { generate_text(model, run); }
    if (!o.dump_bias.empty()) { dump_bias(model, run, data.val.get()); }
}
