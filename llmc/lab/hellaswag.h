// lab/hellaswag.h -- multiple choice by likelihood (HellaSwag, Zellers et al. 2019): which of four endings does the
// model expect?
//
//   score of an ending = mean over its tokens of -log p(token | context, ending before it); the lowest wins: "acc_norm"
// The file is llm.c's: 1024-byte header of int32 (20240522, 1, examples, bytes of the longest), then uint16, an example
//   65535 | bytes, this prefix included | index | label | 4 | n | context (n) | 4 x (n | ending (n))
#pragma once

#include "../engine/ranks/exchange.cuh"
#include "evaluate.h"

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
    const Doing reading("reading HellaSwag");
    HellaSwag set;
    set.path = path;
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

// The rows of one forward: n from `first` on, padded to T, the length of the longest
struct HellaSwagBatch { size_t first, n, T; };

// Fills each batch up to the tokens of acts. The batches do not depend on the number of ranks, because the bits of a
// matrix product may depend on its number of rows.
template <class Acts>
std::vector<HellaSwagBatch> hellaswag_batches(const std::vector<HellaSwagRow>& rows, const Acts& acts) {
    std::vector<HellaSwagBatch> batches;
    for (size_t first = 0, n; first < rows.size(); first += n) {
        size_t T = 0;
        for (n = 0; first + n < rows.size(); n++) {
            const size_t longest = std::max(T, rows[first + n].tokens.size() - 1);
            if (n > 0 && n + 1 > sequences_that_fit(acts, (int)longest)) { break; }
            T = longest;
        }
        batches.push_back({first, n, T});
    }
    return batches;
}

// nll (batch.n): the mean loss of each row's ending
template <class Model, class Acts>
void score_endings(Model& model, Acts& acts, const std::vector<HellaSwagRow>& rows, const HellaSwagBatch& batch,
                   float* nll) {
    const size_t n = batch.n, T = batch.T;
    std::vector<int> tokens(n * T, 0), targets(n * T, IGNORE_INDEX);
    std::vector<float> losses(n * T);
    for (size_t r = 0; r < n; r++) {
        const HellaSwagRow& row = rows[batch.first + r];
        for (size_t t = 0; t + 1 < row.tokens.size(); t++) {
            tokens[r * T + t] = row.tokens[t];
            if ((int)t + 1 >= row.context) { targets[r * T + t] = row.tokens[t + 1]; }
        }
    }
    forward_losses(model, acts, tokens.data(), targets.data(), nullptr, (int)n, (int)T, losses.data(), nullptr);
    for (size_t r = 0; r < n; r++) {
        double sum = 0.0;
        for (size_t t = 0; t < T; t++) { sum += losses[r * T + t]; }                // 0 where ignored
        const HellaSwagRow& row = rows[batch.first + r];
        nll[r] = (float)(sum / (double)(row.tokens.size() - (size_t)row.context));
    }
}

// A collective: the ranks share the batches.
template <class Model, class Acts> HellaSwagScore evaluate_hellaswag(Model& model, Acts& acts, const HellaSwag& set) {
    HellaSwagScore score;
    score.examples = (int)set.examples.size();
    const std::vector<HellaSwagRow> rows = hellaswag_rows(set, acts.T, score.cut);
    const std::vector<HellaSwagBatch> batches = hellaswag_batches(rows, acts);
    size_t most = 0;
    for (const HellaSwagBatch& b : batches) { most = std::max(most, b.n); }
    Progress progress("HellaSwag");
    const auto work = [&](size_t i, float* nll) { score_endings(model, acts, rows, batches[i], nll); };
    const auto take = [&](size_t i, const float* nll) {
        score.nll.insert(score.nll.end(), nll, nll + batches[i].n);
        progress.update(score.nll.size(), rows.size());
    };
    score.stopped = !share_pieces<float>(batches.size(), most, "HellaSwag", work, take);
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
