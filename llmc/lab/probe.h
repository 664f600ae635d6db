// lab/probe.h -- how far back a model can look: a passage at some depth of a text, and a question about it at the end.
//
//   kind        planted                                      at the end, the answer in brackets
//   needle      8 tokens of text, then 4 drawn ones          the 8 tokens [the 4]
//   passkey     the same, in a text that repeats 24 tokens   the 8 tokens [the 4]
//   induction   a b                                          a [b]
//   mqar        8 pairs, all 16 tokens different             the pairs in another order: key [value] key [value] ...
//   copy        32 drawn tokens                              the first 8 of them [the rest]
//
// (mqar: multi-query associative recall, Arora et al. 2023; induction: Olsson et al. 2022.) Any vocabulary works: text
// and drawn tokens come from a data set, at places that are a function of (seed, kind, T, depth, example), so every
// model gets the same questions. A prompt fills a window of T + 1 tokens; depth is the passage's place in the text,
// from 0 at its beginning to 1 right before the question. induction's a and mqar's pairs occur nowhere else, so that
// there is one answer. Answers are judged as in lab/tasks.h.
#pragma once

#include "tasks.h"

constexpr double PROBE_DEPTHS[] = {0.0, 0.25, 0.5, 0.75, 1.0};
constexpr uint64_t PROBE_EXAMPLES = 64;         // windows of each length and depth

struct ProbePrompt {
    std::vector<int> tokens, targets;           // (T)
};

// The random choices of one prompt
struct ProbeDraws {
    const TokenFiles& files;
    uint64_t key, count = 0;

    uint64_t below(uint64_t n) { return hash64(key, count++) % n; }
    // n tokens of text from a random place on
    std::vector<int> text(size_t n) {
        check(n <= files.tokens, "--probe: %s has %zu tokens, a prompt takes %zu (use smaller --eval_lengths, or more "
              "data)", files.pattern.c_str(), (size_t)files.tokens, n);
        std::vector<int> ids(n);
        files.read(below(files.tokens - n + 1), n, ids.data());
        return ids;
    }
    // n tokens from n random places
    std::vector<int> tokens(size_t n) {
        std::vector<int> ids;
        while (ids.size() < n) { ids.push_back(text(1)[0]); }
        return ids;
    }
    // n different tokens
    std::vector<int> different(size_t n) {
        std::vector<int> ids;
        while (ids.size() < n) { ids.push_back(free_of(ids, text(1)[0])); }
        return ids;
    }
    // id, or a different token if `taken` has it
    int free_of(const std::vector<int>& taken, int id) {
        for (int attempt = 0; std::find(taken.begin(), taken.end(), id) != taken.end(); attempt++) {
            check(attempt < 10000, "--probe: expected more than %zu different tokens in %s", taken.size(),
                  files.pattern.c_str());
            id = text(1)[0];
        }
        return id;
    }
};

// The planted passage, and the question at the end with its answer marked
struct ProbePassage {
    std::vector<int> planted, asked;
    std::vector<bool> answer;                   // of asked
    std::vector<int> taken;                     // tokens that must occur nowhere else
};

inline ProbePassage probe_passage(const std::string& kind, ProbeDraws& draws) {
    ProbePassage p;
    if (kind == "mqar") {
        const size_t pairs = 8;
        p.taken = draws.different(2 * pairs);   // the keys, then the values
        const uint64_t order = draws.below(1ull << 32);
        for (size_t i = 0; i < pairs; i++) {
            const size_t j = (size_t)permute(i, pairs, order, 0);
            p.planted.insert(p.planted.end(), {p.taken[i], p.taken[pairs + i]});
            p.asked.insert(p.asked.end(), {p.taken[j], p.taken[pairs + j]});
            p.answer.insert(p.answer.end(), {false, true});
        }
        return p;
    }
    size_t given = 8;                           // tokens of the question
    if (kind == "induction") {
        given = 1;
        p.planted = draws.different(2);
        p.taken = {p.planted[0]};
    } else if (kind == "copy") {
        p.planted = draws.tokens(32);
    } else {                                    // needle, passkey
        p.planted = draws.text(given);
        const std::vector<int> value = draws.tokens(4);
        p.planted.insert(p.planted.end(), value.begin(), value.end());
    }
    p.asked = p.planted;
    p.answer.assign(p.asked.size(), true);
    std::fill(p.answer.begin(), p.answer.begin() + (long)given, false);
    return p;
}

// Prompt number `example` of a cell
inline ProbePrompt probe_prompt(const TokenFiles& files, const std::string& kind, int T, double depth, uint64_t seed,
                                uint64_t example) {
    const uint64_t cell = hash64(checksum(kind.data(), kind.size()), (uint64_t)T, (uint64_t)(1000 * depth));
    ProbeDraws draws{files, hash64(seed, cell, example)};
    const ProbePassage p = probe_passage(kind, draws);
    const size_t used = p.planted.size() + p.asked.size();
    check((size_t)T + 1 >= used + 8,
          "--probe %s: expected windows of at least %zu tokens, got %d (--eval_lengths or --T)", kind.c_str(), used + 7,
          T);
    // 1 the text around it
    const size_t around = (size_t)T + 1 - used;
    std::vector<int> text = draws.text(kind == "passkey" ? std::min(around, (size_t)24) : around);
    for (size_t i = 0; text.size() < around; i++) { text.push_back(text[i]); }
    for (int& id : text) { id = draws.free_of(p.taken, id); }
    // 2 the passage in it, and the question after it
    const size_t place = (size_t)std::llround(depth * (double)around);
    std::vector<int> ids(text.begin(), text.begin() + (long)place);
    ids.insert(ids.end(), p.planted.begin(), p.planted.end());
    ids.insert(ids.end(), text.begin() + (long)place, text.end());
    ids.insert(ids.end(), p.asked.begin(), p.asked.end());
    // 3 only the answer is a target
    ProbePrompt prompt{{ids.begin(), ids.end() - 1}, std::vector<int>((size_t)T, IGNORE_INDEX)};
    for (size_t i = 0; i < p.asked.size(); i++) {
        const size_t at = ids.size() - p.asked.size() + i;
        if (p.answer[i]) { prompt.targets[at - 1] = ids[at]; }
    }
    return prompt;
}

// A collective, like evaluate_task: one cell, `examples` prompts at one length and depth
template <class Model, class Acts>
TaskScore evaluate_probe(Model& model, Acts& acts, const TokenFiles& files, const std::string& kind, double depth,
                         uint64_t seed, uint64_t examples) {
    const size_t T = (size_t)acts.T;
    const auto read = [&](uint64_t example, int* tokens, int* targets) {
        const ProbePrompt prompt = probe_prompt(files, kind, (int)T, depth, seed, example);
        std::copy(prompt.tokens.begin(), prompt.tokens.end(), tokens);
        std::copy(prompt.targets.begin(), prompt.targets.end(), targets);
    };
    return score_examples(model, acts, examples, "--probe", read);
}

// Prints a table of the share of right answers at each length and depth, and logs it.
template <class Model, class Log>
void evaluate_probes(Model& model, const TokenFiles& files, const std::string& kind, const std::vector<int>& lengths,
                     uint64_t seed, uint64_t examples, int64_t step, Log& log) {
    const PositionConfig& position = model.config.position;
    printf("%s, trained at %d: right answers by depth, of %llu each\n%-10s %8s", position_text(position).c_str(),
           position.T_train, (unsigned long long)examples, kind.c_str(), "T");
    for (double depth : PROBE_DEPTHS) { printf(" %8.0f%%", 100 * depth); }
    printf("\n");
    for (int T : lengths) {
        if (!reaches(position, T, strprintf("%-10s %8d   ", kind.c_str(), T))) { continue; }
        auto acts = activations_describe(model, std::max(1, EVALUATION_TOKENS / T), T, Purpose::Evaluate, 0);
        activations_allocate(acts);
        printf("%-10s %8d", kind.c_str(), T);
        bool stopped = false;
        for (double depth : PROBE_DEPTHS) {
            const TaskScore s = evaluate_probe(model, acts, files, kind, depth, seed, examples);
            stopped = stopped || s.stopped;
            if (stopped) { break; }
            printf(" %8.1f%%", 100 * s.exact_share());
            fflush(stdout);
            const Json j = {{"kind", "probe"}, {"probe", kind}, {"step", step}, {"depth", depth},
                            {"pos", position.name}, {"T", T}, {"T_train", position.T_train}};
            log.record(with_stretch(with_score(j, s), position, T));
        }
        printf("\n");
        acts.release();
        if (stopped) { return; }
    }
}
