// lab/tasks.h -- texts with a right answer: tasks whose whole answer counts (--tasks), and multiple choice by
// likelihood (--hellaswag). One forward pass over a text scores each token of its answer given the right ones before.
#pragma once

#include "evaluate.h"

// Of one row: sums over the tokens of its answer
struct AnswerScore {
    double loss;                                // in nats
    float tokens, hits;                         // hits: tokens that have the greatest logit, without a tie
};

// Scores the rows of all batches. read(row, T, tokens, targets) fills a row (T): the tokens, and the targets that are
// its answer; take(row, score) is called in the order of the rows. Returns false if a signal has stopped it.
template <class Model, class Acts, class Read, class Take>
bool score_answers(Model& model, Acts& acts, const std::vector<RowBatch>& batches, const char* label, Read read,
                   Take take) {
    const auto work = [&](const RowBatch& b, AnswerScore* scores) {
        const size_t T = b.T;
        std::vector<int> tokens(b.n * T, 0), targets(b.n * T, IGNORE_INDEX);
        std::vector<float> losses(b.n * T), hits(b.n * T);
        for (size_t r = 0; r < b.n; r++) { read(b.first + r, T, &tokens[r * T], &targets[r * T]); }
        forward_losses(model, acts, tokens.data(), targets.data(), nullptr, (int)b.n, (int)T, losses.data(),
                       hits.data());
        for (size_t r = 0; r < b.n; r++) {
            AnswerScore& score = scores[r] = {0.0, 0.0f, 0.0f};
            for (size_t at = r * T; at < (r + 1) * T; at++) {
                if (targets[at] == IGNORE_INDEX) { continue; }
                score.loss += losses[at];
                score.tokens++;
                score.hits += hits[at];
            }
        }
    };
    Progress progress(label);
    return share_batches<AnswerScore>(batches, 1, progress, work, take);
}

// ----------------------------------------------------------------------------------------------------------
// --tasks: the share of a file's examples whose whole answer is right (copy, sort, addition, ...)
//
// data/tasks.py writes the files: examples in rows, with the tokens of the answer marked (text/dataloader.h). An
// answer is right if each of its tokens is a hit. This is so exactly if greedy decoding writes this answer, because the
// two agree up to the first wrong token.

struct TaskScore {
    uint64_t examples = 0, exact = 0;
    uint64_t tokens = 0, hits = 0;              // of the answers, and the right ones among them
    double loss = 0;                            // mean over the tokens of the answers, in nats
    bool stopped = false;                       // by a signal
    double exact_share() const { return (double)exact / (double)examples; }
};

// The files of a pattern, one TokenFiles each, because each has its own length
inline std::vector<TokenFiles> open_tasks(const std::string& pattern, int V) {
    const Phase opening("opening the tasks");
    std::vector<TokenFiles> tasks;
    for (const std::string& path : expand_pattern(pattern)) {
        tasks.emplace_back(path, "--tasks", V, true);
        check(tasks.back().row > 0, "--tasks %s: expected examples in rows, as data/tasks.py writes them, got a stream "
              "of tokens", path.c_str());
    }
    return tasks;
}

// "copy_20.bin"
inline std::string task_name(const TokenFiles& files) { return files.pattern.substr(files.pattern.rfind('/') + 1); }

template <class Model, class Acts> TaskScore evaluate_task(Model& model, Acts& acts, const TokenFiles& files) {
    TaskScore score;
    score.examples = files.windows(files.row - 1);
    const auto batches = row_batches(score.examples, acts, [&](size_t) { return acts.T; });
    const auto read = [&](size_t i, size_t T, int* tokens, int* targets) { files.window(i, (int)T, tokens, targets); };
    score.stopped = !score_answers(model, acts, batches, "tasks", read, [&](size_t i, const AnswerScore* s) {
        check(s->tokens > 0, "--tasks %s: example %zu has no answer", files.pattern.c_str(), i);
        score.exact += s->hits == s->tokens;
        score.tokens += (uint64_t)s->tokens;
        score.hits += (uint64_t)s->hits;
        score.loss += s->loss;
    });
    score.loss /= (double)score.tokens;
    check_finite("--tasks " + files.pattern, &score.loss, !score.stopped);
    return score;
}

inline Json task_json(const TaskScore& s, const TokenFiles& files, const PositionConfig& position, int64_t step) {
    const Json j = {{"kind", "task"}, {"step", step}, {"file", task_name(files)}, {"length", files.shards[0].length},
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
        const std::string name = task_name(files);
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

// ----------------------------------------------------------------------------------------------------------
// --hellaswag (Zellers et al. 2019): which of four endings does the model expect?
//
//   score of an ending = mean over its tokens of -log p(token | context, ending before it); the lowest wins: "acc_norm"
// The file is llm.c's: 1024-byte header of int32 (20240522, 1, examples, bytes of the longest), then uint16, an example
//   65535 | bytes, this prefix included | index | label | 4 | n | context (n) | 4 x (n | ending (n))

constexpr int HELLASWAG_MAGIC = 20240522, HELLASWAG_ENDINGS = 4;

struct HellaSwag {
    struct Example {
        int label = 0;
        std::vector<int> context, ending[HELLASWAG_ENDINGS];
    };
    std::string path;
    std::vector<Example> examples;
};

// Every field is checked; a damaged file is an Error that names the example.
inline HellaSwag load_hellaswag(const std::string& path, int V) {
    const Phase reading("reading HellaSwag");
    HellaSwag set;
    set.path = path;
    refuse_stand_in(path);
    const std::string bytes = read_file(path, 1u << 30);
    const char* name = path.c_str();
    int32_t header[4];
    check(bytes.size() >= 1024, "--hellaswag %s: expected a header of 1024 bytes, got a file of %zu", name,
          bytes.size());
    memcpy(header, bytes.data(), sizeof(header));
    check(header[0] == HELLASWAG_MAGIC && header[1] == 1,
          "--hellaswag %s: expected magic and version %d, 1 (llm.c's multiple-choice file, as data/hellaswag.py "
          "writes it), got %d, %d", name, HELLASWAG_MAGIC, header[0], header[1]);
    check(header[2] >= 1 && bytes.size() > 1024 && bytes.size() % 2 == 0, "--hellaswag %s: %d examples in %zu bytes",
          name, header[2], bytes.size());
    std::vector<uint16_t> data((bytes.size() - 1024) / 2);
    memcpy(data.data(), bytes.data() + 1024, 2 * data.size());
    size_t at = 0;
    for (int e = 0; e < header[2]; e++) {
        check(data.size() - at >= 6, "--hellaswag %s: the file ends inside example %d of %d (is it truncated?)", name,
              e, header[2]);
        const size_t words = data[at + 1] / 2, end = at + words;
        const bool good = data[at] == 65535 && data[at + 1] % 2 == 0 && words >= 6 && end <= data.size() &&
                          data[at + 2] == (e & 0xffff) && data[at + 3] < HELLASWAG_ENDINGS &&
                          data[at + 4] == HELLASWAG_ENDINGS;
        check(good, "--hellaswag %s: example %d of %d is damaged", name, e, header[2]);
        HellaSwag::Example x;
        x.label = data[at + 3];
        at += 5;
        for (int k = -1; k < HELLASWAG_ENDINGS; k++) {
            check(at < end && data[at] >= 1 && at + data[at] < end,
                  "--hellaswag %s: example %d of %d: a text without tokens, or beyond its end", name, e, header[2]);
            std::vector<int>& text = k < 0 ? x.context : x.ending[k];
            text.assign(data.begin() + (long)at + 1, data.begin() + (long)(at + 1 + data[at]));
            for (int id : text) {
                check(id < V, "--hellaswag %s: example %d: expected ids below %d, the model's vocabulary, got %d", name,
                      e, V, id);
            }
            at += 1 + text.size();
        }
        check(at == end, "--hellaswag %s: example %d of %d is damaged", name, e, header[2]);
        set.examples.push_back(x);
    }
    check(at == data.size(), "--hellaswag %s: %zu bytes after the last example", name, 2 * (data.size() - at));
    return set;
}

struct HellaSwagScore {
    int correct = 0, examples = 0;
    int cut = 0;                                // examples whose context was cut at its beginning, to fit into T
    std::vector<float> nll;                     // (examples,4): mean over the ending's tokens
    bool stopped = false;                       // by a signal, before the end
    double accuracy() const { return (double)correct / examples; }
};

// One ending after its context, which is cut to leave room for it: tokens[context ..] are the targets.
struct HellaSwagRow {
    std::vector<int> tokens;
    int context;
};

// Four rows an example, of at most T + 1 tokens each: the last one is only a target. Counts the contexts that are cut.
inline std::vector<HellaSwagRow> hellaswag_rows(const HellaSwag& set, int T, int& cut) {
    std::vector<HellaSwagRow> rows;
    cut = 0;
    for (const auto& x : set.examples) {
        bool shortened = false;
        for (const std::vector<int>& ending : x.ending) {
            const int room = T + 1 - (int)ending.size();
            check(room >= 1, "--hellaswag %s: an ending of %zu tokens does not fit into --T %d", set.path.c_str(),
                  ending.size(), T);
            const int context = std::min(room, (int)x.context.size());
            shortened = shortened || context < (int)x.context.size();
            HellaSwagRow row{{x.context.end() - context, x.context.end()}, context};
            row.tokens.insert(row.tokens.end(), ending.begin(), ending.end());
            rows.push_back(row);
        }
        cut += shortened;
    }
    return rows;
}

template <class Model, class Acts> HellaSwagScore evaluate_hellaswag(Model& model, Acts& acts, const HellaSwag& set) {
    HellaSwagScore score;
    score.examples = (int)set.examples.size();
    const std::vector<HellaSwagRow> rows = hellaswag_rows(set, acts.T, score.cut);
    const auto batches = row_batches(rows.size(), acts, [&](size_t i) { return rows[i].tokens.size() - 1; });
    const auto read = [&](size_t i, size_t, int* tokens, int* targets) {
        const HellaSwagRow& row = rows[i];
        std::copy(row.tokens.begin(), row.tokens.end() - 1, tokens);
        std::copy(row.tokens.begin() + row.context, row.tokens.end(), targets + row.context - 1);
    };
    score.stopped = !score_answers(model, acts, batches, "HellaSwag", read, [&](size_t, const AnswerScore* s) {
        score.nll.push_back((float)(s->loss / (double)s->tokens));
    });
    check_finite("HellaSwag", score.nll.data(), score.nll.size());
    for (int e = 0; e < score.examples && !score.stopped; e++) {
        const float* nll = score.nll.data() + (size_t)HELLASWAG_ENDINGS * e;
        const float right = nll[set.examples[(size_t)e].label];             // a tie is not an answer
        score.correct += std::count_if(nll, nll + HELLASWAG_ENDINGS, [&](float x) { return !(x > right); }) == 1;
    }
    return score;
}

// each_example: log.jsonl also gets the score of every ending
template <class Model, class Acts, class Log>
void report_hellaswag(Model& model, Acts& acts, const HellaSwag& set, int64_t step, bool each_example, Log& log) {
    const HellaSwagScore s = evaluate_hellaswag(model, acts, set);
    if (s.stopped) { return; }
    for (int e = 0; e < s.examples && each_example; e++) {
        const float* nll = s.nll.data() + (size_t)HELLASWAG_ENDINGS * e;
        log.record({{"kind", "hellaswag_example"}, {"step", step}, {"example", e},
                    {"label", set.examples[(size_t)e].label},
                    {"nll", std::vector<float>(nll, nll + HELLASWAG_ENDINGS)}});
    }
    printf("HellaSwag: %d/%d = %f%s\n", s.correct, s.examples, s.accuracy(),
           s.cut > 0 ? strprintf("   (%d contexts cut to %d tokens)", s.cut, acts.T).c_str() : "");
    fflush(stdout);
    log.hellaswag(step, s.accuracy());
}
