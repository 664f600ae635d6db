// lab/tasks.h -- tasks with one right answer (copy, sort, addition, ...): the share of a file's examples whose whole
// answer is right.
//
// The files are those of data/tasks.py: examples in rows, with the tokens of the answer marked (text/dataloader.h). An
// answer is right if each of its tokens has the greatest logit, without a tie, given the right tokens before it. This
// is so exactly if greedy decoding writes this answer, because the two agree up to the first wrong token. So one
// forward pass measures the same as a generation.
#pragma once

#include "../engine/ranks/exchange.cuh"
#include "evaluate.h"

struct TaskScore {
    uint64_t examples = 0, exact = 0;
    uint64_t tokens = 0, hits = 0;              // of the answers, and the right ones among them
    double loss = 0;                            // mean over the tokens of the answers, in nats
    bool stopped = false;                       // by a signal
    double exact_share() const { return (double)exact / (double)examples; }
};

// The files of a pattern, one TokenFiles each, because each has its own length
inline std::vector<TokenFiles> open_tasks(const std::string& pattern, int V) {
    const Doing opening("opening the tasks");
    std::vector<TokenFiles> tasks;
    for (const std::string& path : expand_pattern(pattern)) {
        tasks.emplace_back(path, "--tasks", V, true);
        check(tasks.back().row > 0, "--tasks %s: expected examples in rows, as data/tasks.py writes them, got a stream "
              "of tokens", path.c_str());
    }
    return tasks;
}

// One example's tokens, and the model's result
struct TaskResult { double loss; float tokens, hits; };

// results (n): for the examples from `first` on, those of a row each
template <class Model, class Acts>
void answer_examples(Model& model, Acts& acts, const TokenFiles& files, size_t first, size_t n, TaskResult* results) {
    const size_t T = (size_t)acts.T;
    std::vector<int> tokens(n * T), targets(n * T);
    std::vector<float> losses(n * T), hits(n * T);
    for (size_t b = 0; b < n; b++) { files.window(first + b, (int)T, &tokens[b * T], &targets[b * T]); }
    forward_losses(model, acts, tokens.data(), targets.data(), nullptr, (int)n, (int)T, losses.data(), hits.data());
    for (size_t b = 0; b < n; b++) {
        TaskResult r = {0.0, 0.0f, 0.0f};
        for (size_t at = b * T; at < (b + 1) * T; at++) {
            if (targets[at] == IGNORE_INDEX) { continue; }
            r.loss += losses[at];
            r.tokens++;
            r.hits += hits[at];
        }
        results[b] = r;
    }
}

// A collective: the ranks share the batches, which do not depend on the number of ranks.
template <class Model, class Acts> TaskScore evaluate_task(Model& model, Acts& acts, const TokenFiles& files) {
    TaskScore score;
    const uint64_t examples = score.examples = files.windows(files.row - 1);
    const size_t B = (size_t)acts.B, batches = (size_t)ceil_div(examples, (uint64_t)B);
    const auto in_batch = [&](size_t i) { return (size_t)std::min((uint64_t)B, examples - i * B); };
    Progress progress("answers");
    const auto work = [&](size_t i, TaskResult* out) { answer_examples(model, acts, files, i * B, in_batch(i), out); };
    const auto take = [&](size_t i, const TaskResult* results) {
        for (size_t b = 0; b < in_batch(i); b++) {
            const TaskResult& r = results[b];
            check(r.tokens > 0, "--tasks %s: example %zu has no answer", files.pattern.c_str(), i * B + b);
            score.exact += r.hits == r.tokens;
            score.tokens += (uint64_t)r.tokens;
            score.hits += (uint64_t)r.hits;
            score.loss += r.loss;
        }
        progress.update(i * B + in_batch(i), examples);
    };
    score.stopped = !share_pieces<TaskResult>(batches, B, "tasks", work, take);
    score.loss /= (double)score.tokens;
    check_finite("--tasks " + files.pattern, &score.loss, !score.stopped);
    return score;
}

inline Json task_json(const TaskScore& s, const TokenFiles& files, const PositionConfig& position, int64_t step) {
    const std::string name = files.pattern.substr(files.pattern.rfind('/') + 1);
    const Json j = {{"kind", "task"}, {"step", step}, {"file", name}, {"length", files.shards[0].length},
                    {"pos", position.name}, {"T", files.row - 1}, {"T_train", position.T_train},
                    {"examples", s.examples}, {"exact", s.exact}, {"exact_share", s.exact_share()},
                    {"tokens", s.tokens}, {"accuracy", (double)s.hits / (double)s.tokens}, {"loss", s.loss}};
    return with_stretch(j, position, files.row - 1);
}

// Prints a table of the files' scores, and logs it. A file beyond the encoding's reach prints "-" and why.
template <class Model, class Log>
void evaluate_tasks(Model& model, const std::vector<TokenFiles>& tasks, int64_t step, Log& log) {
    const PositionConfig& position = model.config.position;
    printf("%s, trained at %d\n%-24s %7s %7s %8s %8s %8s %8s\n", position_text(position).c_str(), position.T_train,
           "task", "length", "T", "examples", "exact", "tokens", "loss");
    for (const TokenFiles& files : tasks) {
        const int T = files.row - 1, length = files.shards[0].length;
        const std::string name = files.pattern.substr(files.pattern.rfind('/') + 1);
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
