// run/plans.h -- --plans FILE: cuBLASLt's algorithms for the matrix products, measured once and kept.
//
// {"format": "matmul plans 1", "plans": [{"gpu": "NVIDIA H200, 132 SMs, cuBLASLt 130001",
//                                         "shape": "65536x2328x768 ...", "product": "(65536,2328) = ...",
//                                         "algorithm": [8 numbers], "ms": 0.31, "first_ms": 0.34}, ...],
//  "checksum": "xxh3:..."}
//
// The same file gives the same bits. A product without an entry uses the library's first choice, as all products do
// without a file. Training measures the missing products before its first step: it computes one gradient to collect
// them, rank 0 measures them, and all ranks use its results.
#ifndef LLMC_ENGINE_RUN_PLANS_H
#define LLMC_ENGINE_RUN_PLANS_H

#include "run.h"

// The entry of state.json for the plans of a run, which a resumed run must also have; "": the library's first choices
constexpr const char* PLANS_KEY = "plans";

// Dies if the resumed run had other plans, unless --allow_change plans. now: the entry of state.json
inline void check_resumed_plans(const Run& r, const std::string& now) {
    const bool allowed = may_change(r.o, PLANS_KEY);
    const auto text = [](const std::string& s) { return s.empty() ? std::string("none") : s; };
    check(r.resumed.empty() || allowed || now == r.state.plans,
          "--plans: the run to be resumed had %s, this one has %s, and its bits would differ; give the file that it "
          "had, or --allow_change plans", text(r.state.plans).c_str(), text(now).c_str());
}

#if defined(MATMUL_CUBLASLT)
inline std::string plans_text(const std::vector<LtChoice>& choices) {
    Json plans = Json::array();
    for (const LtChoice& c : choices) {
        plans.push_back({{"gpu", c.place}, {"shape", c.shape}, {"product", c.product}, {"algorithm", c.algorithm},
                         {"ms", c.ms}, {"first_ms", c.first_ms}});
    }
    const std::string sum = sum_text(checksum(json_text(plans)));
    const Json file = {{"format", "matmul plans 1"}, {"plans", plans}, {"checksum", sum}};
    return json_text(file, 1) + "\n";
}
inline std::vector<LtChoice> parse_plans(const std::string& text, const std::string& path) {
    const Json file = parse_json(text, path);
    const std::string format = json_string(file, "format", path);
    check(format == "matmul plans 1", "%s: expected \"format\": \"matmul plans 1\", got \"%.40s\"", path.c_str(),
          format.c_str());
    const Json& plans = json_at(file, "plans", path);
    check(plans.is_array(), "%s: \"plans\": expected an array, got %s", path.c_str(), json_excerpt(plans).c_str());
    check(json_string(file, "checksum", path) == sum_text(checksum(json_text(plans))),
          "%s: the checksum is wrong, the file is damaged; without it the plans are measured again", path.c_str());
    std::vector<LtChoice> choices;
    for (const Json& j : plans) {
        const Json& numbers = json_at(j, "algorithm", path);
        LtChoice c = {json_string(j, "gpu", path), json_string(j, "shape", path), json_string(j, "product", path), {},
                      json_number(j, "ms", path), json_number(j, "first_ms", path)};
        check(numbers.is_array() && numbers.size() == c.algorithm.size(), "%s: \"algorithm\": expected %zu numbers, "
              "got %s", path.c_str(), c.algorithm.size(), json_excerpt(numbers).c_str());
        for (size_t i = 0; i < numbers.size(); i++) {
            check(numbers[i].is_number_unsigned(), "%s: \"algorithm\": expected whole numbers, got %s", path.c_str(),
                  json_excerpt(numbers[i]).c_str());
            c.algorithm[i] = numbers[i].get<uint64_t>();
        }
        choices.push_back(c);
    }
    return choices;
}

// Rank 0's --plans, on all ranks; empty if training will write the file
inline std::vector<LtChoice> read_plans(const Run& r) {
    const std::string& path = r.o.plans;
    const bool there = comm().rank == 0 && path_exists(path);
    check(comm().rank > 0 || there || r.trains, "--plans %s: no such file; a training with --plans writes it",
          path.c_str());
    const std::string text = comm_text(there ? read_file(path, JSON_MAX_BYTES) : "", "plans");
    return text.empty() ? std::vector<LtChoice>() : parse_plans(text, path);
}
// From now on, uses those that were measured with this GPU and library.
inline void use_plans(const Run& r, const std::vector<LtChoice>& choices) {
    const std::string place = lt_place(r.gpu);
    std::vector<LtChoice> mine;
    for (const LtChoice& c : choices) { if (c.place == place) { mine.push_back(c); } }
    lt_know(mine);
}
inline void begin_plans(const Run& r) { if (!r.o.plans.empty()) { use_plans(r, read_plans(r)); } }

// Measures the products of a step that have no plan yet; returns the plans of all of them
inline std::vector<LtChoice> tune_plans(const Run& r) {
    const double begun = wall_seconds();
    double first = 0, now = 0;
    size_t measured = 0;
    const auto say_one = [&](size_t done, size_t of, const LtChoice& c, int calls) {
        printf("plan %zu/%zu: %s: %.3f ms, the first choice %.3f ms, %d a step\n", done, of, c.product.c_str(), c.ms,
               c.first_ms, calls);
        fflush(stdout);
        first += calls * c.first_ms;
        now += calls * c.ms;
        measured++;
    };
    const std::vector<LtChoice> plans = lt_tune(lt_place(r.gpu), say_one);
    if (measured > 0) {
        printf("%zu products were measured in %.1f s: %.2f ms of a step, %.2f by the first choices\n", measured,
               wall_seconds() - begun, now, first);
    }
    return plans;
}

// "27 plans for NVIDIA H200, ..., xxh3:...": everything that decides the bits, and not the times
inline std::string plans_summary(const std::vector<LtChoice>& plans) {
    std::string text;
    for (const LtChoice& c : plans) {
        text += c.shape;
        text.append((const char*)c.algorithm.data(), sizeof(c.algorithm));
    }
    const char* place = plans.empty() ? "nothing" : plans[0].place.c_str();
    return strprintf("%zu plans for %s, %s", plans.size(), place, sum_text(checksum(text)).c_str());
}

// Adds the new plans to the file, which may have plans for other shapes, GPUs and libraries.
inline void add_to_file(const std::string& path, const std::vector<LtChoice>& plans) {
    std::vector<LtChoice> all;
    if (path_exists(path)) { all = parse_plans(read_file(path, JSON_MAX_BYTES), path); }
    const size_t before = all.size();
    for (const LtChoice& c : plans) {
        const auto is_c = [&](const LtChoice& x) { return x.place == c.place && x.shape == c.shape; };
        if (std::none_of(all.begin(), all.end(), is_c)) { all.push_back(c); }
    }
    if (all.size() == before) { return; }
    write_text_whole(path, plans_text(all));
}

// Called before the first step of a training. gradient(): computes that of the step; the result is not used.
template <class Gradient> void settle_plans(Run& r, Gradient gradient) {
    const Options& o = r.o;
    if (r.state.step >= o.steps) { return; }
    if (o.plans.empty()) {
        check_resumed_plans(r, "");
        r.state.plans = "";
        return;
    }
    const Doing choosing("choosing the algorithms of the matrix products");
    std::vector<LtChoice> plans;
    gradient();
    const auto tune = [&] { plans = tune_plans(r); };
    rank0_works(tune, "choice of the matrix products' algorithms");
    plans = parse_plans(comm_text(plans_text(plans), "plans"), "plans");
    use_plans(r, plans);
    const std::string now = plans_summary(plans);
    check_resumed_plans(r, now);
    r.state.plans = now;
    if (comm().rank == 0) { add_to_file(o.plans, plans); }
}
#else
inline void begin_plans(const Run& r) {
    check(r.o.plans.empty(), "--plans: this program was built for CPUs, whose products have no plans; expected "
          "train_gpt2cu or train_bertcu");
}
template <class Gradient> void settle_plans(Run& r, Gradient) {
    check_resumed_plans(r, "");
    r.state.plans = "";
}
#endif

#endif
