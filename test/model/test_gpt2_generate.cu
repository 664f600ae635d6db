// test_gpt2_generate.cu -- evaluation and generation on top of the trainer's forward: which targets a window scores,
// that a cached token is an uncached one, that draws follow the distribution, and that bias matrices are the oracle's.
#include <array>
#include <csignal>
#include <set>

#include "test/files.h"
#include "test/layer.h"
#include "test/model/gpt2_model.h"
#include "test/oracle_positions.h"

namespace {

constexpr int V = 61, T_TRAIN = 32;

// Weights large enough that every tensor shows in the logits, and encodings whose reach is longer than a tile.
void randomize(GPT2& model, uint64_t seed) {
    std::vector<float> host(model.table.total);
    for (const FileTensor& f : model.files) {
        const TensorSpec& spec = model.table.specs[(size_t)model.table.index(f.tensor)];
        float* out = model.table.pointer(host.data(), f.tensor)(f.layer) + f.row0 * spec.row_size();
        const bool gate = f.name.find("cable.") != std::string::npos;
        for (size_t i = 0; i < f.rows * spec.row_size(); i++) {
            const float x = (float)normal01(seed, checksum(f.name), i);
            const float mean = spec.init.kind == Init::Constant ? spec.init.a : 0.0f;
            out[i] = mean + (gate ? 0.02f : 0.25f) * x;
            if (spec.name == "wte") { out[i] = x; }
            if (spec.name.compare(0, 6, "kerple") == 0) { out[i] = 0.1f + 0.2f * std::fabs(x); }
            if (spec.name == "cope_e") { out[i] = 0.1f * x; }       // steeper, it passes on more of the gates' rounding
            if (spec.name == "fire_l") { out[i] = 0.06f; }          // L = 31: both sides of max(L, i)
            out[i] = std::min(std::max(out[i], spec.lo), spec.hi);
        }
    }
    copy_to_device(model.master, host.data(), sizeof(float) * host.size(), model.stream);
}

// Models this small gain nothing from threads, and threads that wait for one another on a busy machine take long.
struct SingleThread {
    int before = max_threads();
    SingleThread() { set_threads(1); }
    ~SingleThread() { set_threads(before); }
};

struct TinyModel : GPT2 {
    SingleThread single;
    explicit TinyModel(const std::string& pos, int T_train = T_TRAIN) {
        GPT2Config c;
        c.T = T_train;
        c.V = V; c.L = 2; c.NH = 2; c.C = 32;
        c.position = parse_position(pos, T_train);
        gpt2_describe(*this, c);
        parameters_allocate(*this, 7, 0);
        gpt2_point(params, table, weights);
        randomize(*this, 11);
    }
    TinyModel(const TinyModel&) = delete;
    TinyModel& operator=(const TinyModel&) = delete;
    ~TinyModel() { parameters_free(*this); }
};

std::vector<int> random_ids(size_t n, uint64_t seed) {
    std::vector<int> ids(n);
    for (size_t i = 0; i < n; i++) { ids[i] = (int)(hash64(seed, i) % V); }
    return ids;
}

// logits after the last of ids, in activations of just that length that nothing has used before
std::vector<float> uncached_logits(GPT2& model, const std::vector<int>& ids) {
    Activations acts = activations_describe(model, 1, (int)ids.size(), Purpose::Evaluate, 0);
    activations_allocate(acts);
    std::vector<float> logits;
    forward_logits(model, acts, ids.data(), (int)ids.size(), 0, logits);
    acts.release();
    return logits;
}

int likeliest(const std::vector<float>& x) {
    int best = 0;
    for (int i = 1; i < (int)x.size(); i++) { if (x[i] > x[best]) { best = i; } }
    return best;
}

// how far two vectors of logits are apart, in units of float32's eps times the largest of them
double distance_in_eps(const std::vector<float>& a, const std::vector<float>& b) {
    double largest = 0, difference = 0;
    for (size_t i = 0; i < a.size(); i++) {
        largest = std::max(largest, (double)std::fabs(a[i]));
        const double d = std::fabs((double)a[i] - b[i]);
        difference = d <= difference ? difference : d;                  // NaN is carried along
    }
    return difference / (largest * FLT_EPSILON);
}

// a shard of vocabulary V
void write_shard(const std::string& path, const std::vector<int>& ids) {
    write_file(path, header_bytes({SHARD_MAGIC, SHARD_VERSION, (int)ids.size(), V, 0}) +
               bytes_of(std::vector<uint16_t>(ids.begin(), ids.end())));
}

// what f prints on stdout
std::string printed(const std::function<void()>& f) {
    Captured out({STDOUT_FILENO});
    std::string error;
    try { f(); } catch (const Error& e) { error = e.what(); }
    out.end();
    INFO(error);
    REQUIRE(error.empty());
    return out.text();
}

struct Records {
    std::vector<Json> lines;
    void record(const Json& j) { lines.push_back(j); }
};

// ----------------------------------------------------------------------------------------------------------
// evaluation

struct Expected {
    uint64_t windows = 0, tokens = 0;
    double loss = 0;
    std::vector<double> sum, count;
    std::vector<float> each;                    // the loss of every target
};

// From the definition: each target is scored once, by the first window that holds it, given the tokens of that window
// before it. Every loss is a forward of its own over exactly these tokens.
Expected by_definition(GPT2& model, const std::vector<int>& stream, int T, int stride, uint64_t limit) {
    Expected e;
    e.tokens = limit == 0 ? stream.size() - 1 : std::min((uint64_t)stream.size() - 1, limit);
    e.sum.assign((size_t)T, 0.0);
    e.count.assign((size_t)T, 0.0);
    for (int target = 1; target <= (int)e.tokens; target++) {
        int start = 0;
        while (target > start + T) { start += stride; }
        const int n = target - start;
        std::vector<int> targets((size_t)n, IGNORE_INDEX);
        targets.back() = stream[(size_t)target];
        std::vector<float> losses((size_t)n);
        Activations acts = activations_describe(model, 1, n, Purpose::Evaluate, 0);
        activations_allocate(acts);
        forward_losses(model, acts, stream.data() + start, targets.data(), nullptr, 1, n, losses.data(), nullptr);
        acts.release();
        e.loss += losses.back() / (double)e.tokens;
        e.each.push_back(losses.back());
        e.sum[(size_t)n - 1] += losses.back();
        e.count[(size_t)n - 1]++;
        e.windows = (uint64_t)(start / stride) + 1;
    }
    return e;
}

TEST_CASE("evaluate: every target is scored once, with the context its window gives it", "[evaluate][asan]") {
    const int T = 16, strides[] = {0, 1, 5, T - 1, T, 100};
    const TempDir dir;
    const std::vector<int> stream = random_ids(53, 3);
    write_shard(dir / "a_0.bin", {stream.begin(), stream.begin() + 20});     // windows run across files
    write_shard(dir / "a_1.bin", {stream.begin() + 20, stream.end()});
    const TokenFiles files(dir / "a_*.bin", "--val_files");
    const char* pos = GENERATE("cable", "learned", "rope");
    TinyModel model(pos);
    for (int stride : strides) {
        for (uint64_t limit : {0, 16, 17, 31, 33, 1000}) {
            const int B = 1 + (int)limit % 3, step = stride == 0 || stride > T ? T : stride;
            INFO(pos << ", stride " << stride << ", limit " << limit << ", B " << B);
            Activations acts = activations_describe(model, B, T, Purpose::Evaluate, 0);
            activations_allocate(acts);
            std::vector<float> each;
            const Evaluation e = evaluate(model, acts, files, T, stride, limit, &each);
            acts.release();
            const Expected want = by_definition(model, stream, T, step, limit);
            CHECK(e.T == T);
            CHECK(e.stride == step);
            CHECK(e.tokens == want.tokens);
            CHECK(e.windows == want.windows);
            CHECK(std::fabs(e.loss - want.loss) <= 2e-6 * want.loss);
            REQUIRE(each.size() == want.each.size());
            // a small loss is the difference of two large logits, and as inexact as these: 2.3e-7 was measured at 0.017
            const double rounding = FLT_EPSILON * *std::max_element(want.each.begin(), want.each.end());
            for (size_t n = 0; n < each.size(); n++) {
                INFO("target " << n << ", " << std::fabs(each[n] - want.each[n]) / rounding << " roundings");
                CHECK(std::fabs(each[n] - want.each[n]) <= 1e-5 * want.each[n] + rounding);
            }
            REQUIRE(e.curve.size() == (size_t)T);
            for (int t = 0; t < T; t++) {
                INFO("position " << t);
                if (want.count[t] == 0) { CHECK(std::isnan(e.curve[t])); continue; }
                const double mean = want.sum[t] / want.count[t];
                CHECK(std::fabs(e.curve[t] - mean) <= 1e-5 * mean);
            }
        }
    }
}

TEST_CASE("evaluate: data of one window, and data that are shorter", "[evaluate][asan]") {
    const TempDir dir;
    const std::vector<int> stream = random_ids(65, 4);
    write_shard(dir / "a.bin", stream);
    write_shard(dir / "short.bin", {stream.begin(), stream.begin() + 64});
    TinyModel model("cable");
    Activations acts = activations_describe(model, 2, 64, Purpose::Evaluate, 0);
    activations_allocate(acts);
    const TokenFiles files(dir / "a.bin", "--val_files"), less(dir / "short.bin", "--val_files");
    const Expected want = by_definition(model, stream, 64, 64, 0);
    const Evaluation e = evaluate(model, acts, files, 64, 8, 0);
    CHECK(e.windows == 1);
    CHECK(e.tokens == 64);
    CHECK(std::fabs(e.loss - want.loss) <= 2e-6 * want.loss);
    for (int stride : {0, 8}) {
        CHECK(throws_with([&] { evaluate(model, acts, less, 64, stride, 0); },
                          "expected at least 65 tokens to evaluate at T = 64, got 64") == EXIT_BAD_INPUT);
        CHECK(throws_with([&] { evaluate(model, acts, files, 64, stride, 63); },
                          "--eval_tokens: expected at least 64, for a window of --eval_lengths, got 63") ==
              EXIT_BAD_INPUT);
    }
    acts.release();
    std::vector<float> losses((1u << 20) + 1000);               // more than write_safetensors takes at once
    for (size_t i = 0; i < losses.size(); i++) { losses[i] = (float)i; }
    printed([&] { write_token_losses(dir.path, e, losses); });
    const std::string file = read_file(dir / "token_losses_64_8.safetensors");
    CHECK(memcmp(file.data() + file.size() - 4 * losses.size(), losses.data(), 4 * losses.size()) == 0);
}

// ----------------------------------------------------------------------------------------------------------
// tasks

// What greedy decoding writes after `question`: n tokens, each from a forward of its own
std::vector<int> greedy(GPT2& model, std::vector<int> question, int n) {
    const size_t before = question.size();
    for (int i = 0; i < n; i++) { question.push_back(likeliest(uncached_logits(model, question))); }
    return {question.begin() + (long)before, question.end()};
}

struct TaskExample {
    std::vector<int> question, answer;
    bool exact;                             // whether greedy decoding writes the answer
    int hits;                               // tokens of the answer that are the likeliest after the right ones
    double loss;                            // sum over the answer, by softmax in double
};

// Some examples are right, and some are wrong in the first, the last or another token of the answer
std::vector<TaskExample> task_examples(GPT2& model, int count) {
    std::vector<TaskExample> examples;
    for (int k = 0; k < count; k++) {
        const int n = 1 + (int)(hash64(21, (uint64_t)k) % 5);
        TaskExample x = {random_ids(2 + hash64(22, (uint64_t)k) % 9, 100 + (uint64_t)k), {}, false, 0, 0.0};
        x.answer = greedy(model, x.question, n);
        const int places[] = {-1, 0, n - 1, n / 2, -1};
        const int wrong = places[k % 5];
        if (wrong >= 0) { x.answer[(size_t)wrong] = (x.answer[(size_t)wrong] + 1 + k) % V; }
        x.exact = greedy(model, x.question, n) == x.answer;
        std::vector<int> ids = x.question;
        for (int id : x.answer) {
            const std::vector<float> logits = uncached_logits(model, ids);
            double sum = 0.0;
            for (float l : logits) { sum += std::exp((double)l); }
            x.loss += std::log(sum) - logits[(size_t)id];
            x.hits += likeliest(logits) == id;
            ids.push_back(id);
        }
        examples.push_back(x);
    }
    return examples;
}

// What stands before the answer and after it is wrong for greedy decoding, and must not matter.
void write_task(const std::string& path, const std::vector<TaskExample>& examples, int row, int length) {
    std::vector<uint16_t> ids;
    for (const TaskExample& x : examples) {
        for (int id : x.question) { ids.push_back((uint16_t)id); }
        for (int id : x.answer) { ids.push_back((uint16_t)(id | 1 << 15)); }
        for (size_t i = x.question.size() + x.answer.size(); i < (size_t)row; i++) { ids.push_back((uint16_t)(i % V)); }
    }
    write_file(path, header_bytes({SHARD_MAGIC, SHARD_VERSION_ROWS, (int)ids.size(), V, 0, 0, 0, row, length}) +
               bytes_of(ids));
}

TEST_CASE("tasks: an answer is right where greedy decoding writes it", "[evaluate][tasks][asan]") {
    const TempDir dir;
    const char* pos = GENERATE("cable", "learned", "rope");
    const int row = T_TRAIN / 2, count = 45;
    TinyModel model(pos);
    const std::vector<TaskExample> examples = task_examples(model, count);
    write_task(dir / "copy_test_0010.bin", examples, row, 10);
    write_task(dir / "copy_test_0080.bin", examples, 4 * T_TRAIN, 80);          // beyond the reach of learned
    uint64_t exact = 0;
    uint64_t hits = 0, tokens = 0;
    double loss = 0.0;
    for (const TaskExample& x : examples) {
        exact += x.exact;
        hits += (uint64_t)x.hits;
        tokens += x.answer.size();
        loss += x.loss;
    }
    REQUIRE((exact > count / 4 && exact < count / 2));
    const std::vector<TokenFiles> tasks = open_tasks(dir / "*.bin", V);
    REQUIRE(tasks.size() == 2);
    for (int B : {1, 7, 64}) {
        INFO(pos << ", B " << B);
        Activations acts = activations_describe(model, B, row - 1, Purpose::Evaluate, 0);
        activations_allocate(acts);
        const TaskScore s = evaluate_task(model, acts, tasks[0]);
        acts.release();
        CHECK(s.examples == (uint64_t)count);
        CHECK(s.exact == exact);
        CHECK(s.tokens == tokens);
        CHECK(s.hits == hits);
        CHECK(std::fabs(s.loss - loss / (double)tokens) <= 2e-6 * s.loss);      // measured: 3e-7
    }
    Records log;
    const std::string text = printed([&] { evaluate_tasks(model, tasks, 5, log); });
    const bool bounded = position_max_length(model.config.position) < 4 * T_TRAIN;
    REQUIRE(log.lines.size() == (bounded ? 1u : 2u));
    CHECK((text.find("has no positions beyond") != std::string::npos) == bounded);
    CHECK(log.lines[0]["exact"] == exact);
    CHECK(log.lines[0]["exact_share"] == (double)exact / count);
    CHECK(log.lines[0]["accuracy"] == (double)hits / (double)tokens);
    const double shares[] = {(double)exact / count, (double)hits / (double)tokens};
    CHECK(text.find(strprintf(" %.2f%% %7.2f%% ", 100 * shares[0], 100 * shares[1])) != std::string::npos);
    CHECK(log.lines[0]["length"] == 10);
    CHECK(log.lines[0]["file"] == "copy_test_0010.bin");
    for (const Json& line : log.lines) { CHECK(line["exact"] == exact); }       // padding changes no answer
}

TEST_CASE("tasks: a file of the wrong kind is refused", "[evaluate][tasks]") {
    const TempDir dir;
    write_shard(dir / "stream.bin", {1, 2, 3});
    write_task(dir / "empty.bin", {{{1, 2}, {}, false, 0, 0.0}}, 4, 2);
    CHECK(throws_with([&] { open_tasks(dir / "stream.bin", V); }, "expected examples in rows") == EXIT_BAD_INPUT);
    CHECK(throws_with([&] { open_tasks(dir / "empty.bin", V + 1); }, "expected a vocabulary of 62") == EXIT_BAD_INPUT);
    TinyModel model("none");
    const std::vector<TokenFiles> tasks = open_tasks(dir / "empty.bin", V);
    Activations acts = activations_describe(model, 1, 3, Purpose::Evaluate, 0);
    activations_allocate(acts);
    CHECK(throws_with([&] { evaluate_task(model, acts, tasks[0]); }, "example 0 has no answer") == EXIT_BAD_INPUT);
    acts.release();
}

// Takes the records of speed from a log, one after each perplexity of 299 tokens, and checks them.
void check_speeds(Records& log) {
    std::vector<Json> speeds;
    const auto is_speed = [](const Json& j) { return j.at("kind") == "evaluation_speed"; };
    std::copy_if(log.lines.begin(), log.lines.end(), std::back_inserter(speeds), is_speed);
    log.lines.erase(std::remove_if(log.lines.begin(), log.lines.end(), is_speed), log.lines.end());
    REQUIRE(speeds.size() == log.lines.size() / 2);
    for (size_t i = 0; i < speeds.size(); i++) {
        const Json& j = speeds[i];
        const int T = T_TRAIN << i, windows = (int)ceil_div(299, T);
        CHECK(j.at("T") == T);
        CHECK(j.at("B") == std::min(EVALUATION_TOKENS / T, windows));
        CHECK(j.at("tokens") == 299);
        CHECK(j.at("ranks") == 1);
        const double rate = j.at("tok_per_s"), seconds = j.at("ms").get<double>() / 1e3;
        CHECK((seconds > 0 && seconds < 600));
        CHECK(std::fabs(rate * seconds - 299) <= 1e-9 * 299);
        CHECK(j.at("mem").get<double>() >= 1e6);                    // of the whole process
    }
}

TEST_CASE("evaluate: every encoding runs at two and four times the trained length", "[encodings][evaluate][asan]") {
    const TempDir dir;
    write_shard(dir / "a.bin", random_ids(300, 5));
    const TokenFiles files(dir / "a.bin", "--val_files");
    for (const std::string& name : encodings_of_models()) {
        INFO(name);
        TinyModel model(name);
        const bool bounded = position_max_length(model.config.position) < 2 * T_TRAIN;
        Records log;
        const std::string text = printed([&] {
            evaluate_lengths(model, files, {T_TRAIN, 2 * T_TRAIN, 4 * T_TRAIN}, 0, 0, true, {}, log);
        });
        check_speeds(log);
        REQUIRE(log.lines.size() == (bounded ? 2u : 6u));
        for (size_t i = 0; i < log.lines.size(); i++) {
            const Json& j = log.lines[i];
            const int T = T_TRAIN << (i / 2);
            CHECK(j.at("pos") == model.config.position.name);
            CHECK(j.at("T") == T);
            CHECK(j.at("stride") == T);
            if (i % 2 == 0) {
                CHECK(j.at("kind") == "extrapolation");
                CHECK(j.at("T_train") == T_TRAIN);
                CHECK(j.at("tokens") == 299);                       // the same ones at every length
                CHECK(j.at("windows") == ceil_div(299, T));
                const double loss = j.at("loss").get<double>(), ppl = j.at("ppl").get<double>();
                CHECK(loss > 0.5);
                CHECK(loss < 100);
                CHECK(std::fabs(ppl - std::exp(loss)) <= 1e-9 * ppl);
            } else {
                CHECK(j.at("kind") == "curve");
                CHECK(j.at("loss").size() == (size_t)T);
            }
        }
        CHECK((text.find("has no positions beyond 32") != std::string::npos) == bounded);
        if (!bounded) { continue; }
        Records none;
        CHECK(throws_with([&] { evaluate_lengths(model, files, {33, 64}, 0, 0, false, {}, none); },
                          "learned reaches 32 tokens, every length is beyond") == EXIT_BAD_INPUT);
        CHECK(none.lines.empty());
    }
}

// The losses of one window of ids, in pieces or (Purpose::Evaluate) at once; said(acts, t), farthest: see window_losses
template <class Said>
std::vector<float> losses_of(GPT2& model, const std::vector<int>& ids, Purpose purpose, Said said,
                             int* farthest = nullptr) {
    const int T = (int)ids.size() - 1;
    std::vector<float> losses((size_t)T), hits((size_t)T);
    Activations acts = activations_describe(model, 1, T, purpose, 0);
    plan_pieces(model, acts);
    activations_allocate(acts);
    window_losses(model, acts, ids.data(), ids.data() + 1, nullptr, 1, T, losses.data(), hits.data(),
                  [&](int t, int reach) {
        if (farthest != nullptr) { *farthest = reach; }
        said(acts, t);
    });
    acts.release();
    losses.insert(losses.end(), hits.begin(), hits.end());
    return losses;
}
std::vector<float> losses_at_once(GPT2& model, const std::vector<int>& ids) {
    return losses_of(model, ids, Purpose::Evaluate, [](const Activations&, int) {});
}
size_t resident_bytes() {
    size_t all = 0, resident = 0;
    FILE* f = fopen("/proc/self/statm", "r");
    const bool read = f != nullptr && fscanf(f, "%zu %zu", &all, &resident) == 2;
    if (f != nullptr) { fclose(f); }
    REQUIRE(read);
    return resident * (size_t)sysconf(_SC_PAGESIZE);
}

TEST_CASE("pieces: a window has the same bits at once and in pieces, for every encoding", "[encodings][pieces]") {
    std::vector<std::string> all = encodings();
    if (std::find(all.begin(), all.end(), "ssmax") != all.end()) { all.push_back("ssmax+cable"); }
    all.push_back("cable,none");
    const std::string pos = GENERATE_COPY(from_range(all));
    const int T = 2 * PIECE + 1;                            // without care, the last piece would have one token
    TinyModel model(pos, T);
    if (pos == "none") { model.config.position.windows = {700, 90}; }
    model.config.position.mask.sinks = pos == "none" ? 3 : 0;
    const std::vector<int> ids = random_ids((size_t)T + 1, 5);
    std::vector<int> ends;
    const auto in_pieces = losses_of(model, ids, Purpose::Pieces,
                                     [&](Activations&, int t) { ends.push_back(t); });
    INFO(pos);
    CHECK(ends == std::vector<int>{PIECE, 2 * PIECE - KEPT_UNIT, T});
    CHECK(in_pieces == losses_at_once(model, ids));
}

TEST_CASE("pieces: keys that no query visits are forgotten", "[pieces]") {
    const std::string pos = GENERATE("alibi", "cable");
    const int T = 65536;
    TinyModel model(pos);
    const std::vector<int> ids = random_ids((size_t)T + 1, 6);
    const size_t before = resident_bytes();
    size_t most = 0, planned = 0;
    size_t key = 0;
    int kept = 0, farthest = 0;
    const auto in_pieces = losses_of(model, ids, Purpose::Pieces, [&](Activations& acts, int t) {
        most = std::max(most, resident_bytes());
        planned = acts.bytes();
        key = key_bytes(acts);
        REQUIRE(acts.forgotten >= kept);                    // the window was not computed once more
        REQUIRE(t > acts.forgotten);
        kept = acts.forgotten;
    }, &farthest);
    INFO(pos << ": " << (double)(most - before) / T << " bytes a token, " << T - kept << " keys kept");
    CHECK(kept > T / 2);
    CHECK(farthest > 0);
    CHECK(farthest < T - kept);
    CHECK(planned < key * T / 2);
    CHECK(most - before < planned + key * (size_t)std::max(0, T - kept - LEAST_KEPT));
    CHECK(in_pieces == losses_at_once(model, ids));
}

// A model of cable with b = 1/2, and g about 3. Token V - 1 gives g almost 0 in both layers, so that its query sees
// everything.
struct SteepModel : TinyModel {
    SteepModel() : TinyModel("cable") {
        std::vector<float> host(table.total);
        copy_to_host(host.data(), master, sizeof(float) * host.size(), stream);
        const int C = config.C, NH = config.NH;
        float* wte = table.pointer(host.data(), "wte")() + (size_t)(V - 1) * C;
        double length = 0;
        for (int c = 0; c < C; c++) {
            wte[c] = 40.0f * wte[c];
            length += (double)wte[c] * wte[c] / C;
        }
        for (int l = 0; l < config.L; l++) {
            float* w = table.pointer(host.data(), "qkvw")(l) + (size_t)3 * C * C;
            float* bias = table.pointer(host.data(), "qkvb")(l) + 3 * C;
            for (int h = 0; h < NH; h++) {
                bias[h] = 0.5f;                             // b
                bias[NH + h] = 3.0f;                        // g
                for (int c = 0; c < C; c++) {
                    w[(size_t)h * C + c] = 0.0f;
                    w[(size_t)(NH + h) * C + c] = -0.4f * wte[c] / (float)std::sqrt(length);
                }
            }
        }
        copy_to_device(master, host.data(), sizeof(float) * host.size(), stream);
    }
};

TEST_CASE("pieces: a query that needs a forgotten key brings it back", "[pieces]") {
    SteepModel model;
    const int T = 20000;
    std::vector<int> ids = random_ids((size_t)T + 1, 7);
    for (int& id : ids) { id = id == V - 1 ? 0 : id; }
    ids[15000] = V - 1;
    int last = 0, restarts = 0;
    int lost = 0, farthest = 0;
    const auto in_pieces = losses_of(model, ids, Purpose::Pieces, [&](const Activations& acts, int t) {
        restarts += t < last;
        last = t;
        lost = std::max(lost, acts.forgotten);
    }, &farthest);
    CHECK(restarts > 0);
    CHECK(lost > 0);
    CHECK(farthest >= 15000);
    CHECK(in_pieces == losses_at_once(model, ids));
}

TEST_CASE("evaluate: a bias matrix is the oracle's", "[evaluate][asan]") {
    const int T = 133, NH = 2;
    const std::vector<int> ids = random_ids((size_t)T, 6);
    for (const char* pos : {"cable", "kcable_nw", "alibi", "t5_clip:K=70", "kerple"}) {
        TinyModel model(pos);
        Activations acts = activations_describe(model, 1, T, Purpose::Generate, 0);
        activations_allocate(acts);
        std::vector<float> logits;
        forward_logits(model, acts, ids.data(), T, 0, logits);
        for (int layer = 0; layer < 2; layer++) {
            OracleLayer<double> o;
            o.name = model.config.position.name;
            const Hyperparameters& values = model.config.position.parts[0].values;
            o.values.insert(values.begin(), values.end());
            o.T = T; o.NH = NH; o.C = 32; o.HS = 16;
            const size_t OC = (size_t)model.OC;
            std::vector<float> qkv((size_t)T * OC);
            copy_to_host(qkv.data(), acts.a.qkv(layer), sizeof(float) * qkv.size(), model.stream);
            const std::string cable = o.name.find("cable") == std::string::npos ? "" : o.name;
            const int columns = cable == "cable" ? 2 * NH : NH;
            o.width = cable.empty() ? 0 : columns;
            for (size_t t = 0; t < (size_t)T; t++) {
                const float* row = &qkv[t * OC + 3 * 32];
                o.columns.insert(o.columns.end(), row, row + o.width);
            }
            for (const char* name : {"t5", "kerple_r1", "kerple_r2"}) {
                const int index = model.table.find(name);
                if (index < 0) { continue; }
                std::vector<float> host(model.table.specs[(size_t)index].layer_size());
                const float* from = model.table.pointer(model.master, name)(layer);
                copy_to_host(host.data(), from, sizeof(float) * host.size(), model.stream);
                o.params[name].assign(host.begin(), host.end());
            }
            for (int head = 0; head < NH; head++) {
                const PositionView view = layer_position(model, acts, layer, T).bias();
                const std::vector<float> got = bias_matrix(view, head, T, model.stream);
                const std::vector<double> want = oracle_bias(o, head);
                REQUIRE(got.size() == want.size());
                double largest = 0, error = 0;
                for (size_t i = 0; i < got.size(); i++) {
                    largest = std::max(largest, std::fabs(want[i]));
                    const double d = std::fabs(got[i] - (i % T <= i / T ? want[i] : 0.0));
                    error = d <= error ? error : d;
                }
                INFO(pos << ", layer " << layer << ", head " << head << ": error " << error << " of " << largest);
                CHECK(largest > 0.1);
                CHECK(error <= 1e-6 * largest);
            }
        }
        acts.release();
    }
}

TEST_CASE("--dump_bias: encodings without a matrix say so", "[bias]") {
    for (const auto& [name, why] : {std::pair<const char*, const char*>{"rope", "rope adds no bias"},
                                    {"cope", "cope has no matrix to write"}}) {
        TinyModel model(name);
        Activations acts = activations_describe(model, 1, 4, Purpose::Generate, 0);
        activations_allocate(acts);
        const PositionView view = layer_position(model, acts, 0, 4).bias();
        CHECK(throws_with([&] { bias_matrix(view, 0, 4, model.stream); }, why) == EXIT_BAD_INPUT);
        acts.release();
    }
}

// ----------------------------------------------------------------------------------------------------------
// the cache

TEST_CASE("generate: with the cache as without, for every encoding", "[encodings][generate]") {
    const int n = 5;
    double worst = 0;
    for (const std::string& name : encodings_of_models()) {
        TinyModel model(name, 300);
        for (size_t length : {1, 63, 64, 65, 127, 128, 129, 200, 254}) {
            INFO(name << ", prompt of " << length);
            std::vector<int> ids = random_ids(length, length);
            const std::vector<int> text = generate(model, ids, n, {0.0, 0, 1.0, 1}, nullptr, nullptr);
            REQUIRE(text.size() == (size_t)n);
            Activations acts = activations_describe(model, 1, (int)length + n, Purpose::Generate, 0);
            activations_allocate(acts);
            std::vector<float> cached;
            forward_logits(model, acts, ids.data(), (int)length, 0, cached);
            for (int k = 0; k < n; k++) {
                INFO("token " << k);
                const std::vector<float> plain = uncached_logits(model, ids);
                const double distance = distance_in_eps(cached, plain);
                CHECK(distance <= 40);
                worst = std::max(worst, distance);
                const int id = likeliest(plain);
                CHECK(text[(size_t)k] == id);
                ids.push_back(id);
                forward_logits(model, acts, &id, 1, (int)ids.size() - 1, cached);
            }
            acts.release();
        }
    }
    if (getenv("GENERATE_ERRORS") != nullptr) { WARN("logits differ by up to " << worst << " eps of the largest"); }
}

TEST_CASE("generate: a prompt may arrive in pieces", "[encodings][generate][asan]") {
    const int cuts[] = {0, 1, 60, 64, 127, 128, 131, 250, 300};
    const std::vector<int> ids = random_ids(300, 21);
    for (const std::string& name : encodings_of_models()) {
        INFO(name);
        TinyModel model(name, 300);
        std::vector<float> logits;
        const auto in_pieces = [&] {
            Activations acts = activations_describe(model, 1, 330, Purpose::Generate, 0);
            activations_allocate(acts);
            for (int i = 0; i < 8; i++) {
                forward_logits(model, acts, ids.data() + cuts[i], cuts[i + 1] - cuts[i], cuts[i], logits);
            }
            acts.release();
        };
        in_pieces();
        CHECK(distance_in_eps(logits, uncached_logits(model, ids)) <= 40);
        if (model.config.position.has("fire")) { continue; }
        // --window 0,90 --sinks 3
        model.config.position.windows = {0, 90};
        model.config.position.mask.sinks = 3;
        in_pieces();
        const std::vector<float> plain = uncached_logits(model, ids);
        CHECK(distance_in_eps(logits, plain) <= 40);
        model.config.position.windows = {0};
        model.config.position.mask.sinks = 0;
        if (name == "none") { CHECK(distance_in_eps(uncached_logits(model, ids), plain) > 1000); }
        // --document_mask: the last document is all that the last token sees
        const int end_of_text = ids[230];
        const auto last = std::find(ids.rbegin(), ids.rend(), end_of_text).base() - 1;
        const std::vector<float> alone = uncached_logits(model, {last, ids.end()});
        model.config.position.mask.end_of_text = end_of_text;
        in_pieces();
        CHECK(distance_in_eps(logits, alone) <= 40);
        CHECK(distance_in_eps(uncached_logits(model, ids), alone) <= 40);
    }
}

// softplus biases fall by 0.7 a token
TEST_CASE("generate: what is outside of the window", "[generate][asan]") {
    const int prompt = 1020, T = 1030;
    const int HS = 16;
    const std::vector<int> ids = random_ids(T, 23);
    std::vector<float> logits[3];
    for (TileSkip skip : {TileSkip::Off, TileSkip::Exact, TileSkip::Default}) {
        TinyModel model("cable_v1");
        model.config.position.tile_skip = skip;
        Activations acts = activations_describe(model, 1, T, Purpose::Generate, 0);
        activations_allocate(acts);
        std::vector<float>& last = logits[(int)skip];
        forward_logits(model, acts, ids.data(), prompt, 0, last);
        for (int t = prompt; t < T; t++) { forward_logits(model, acts, &ids[(size_t)t], 1, t, last); }
        int left_out = 0;                                       // of the last layer's splits
        const int splits = ceil_div(T, DECODE_SPLIT);
        for (int e = 0; e < 2 * splits; e++) { left_out += acts.a.attscratch()[e * (HS + 2) + HS] == -INFINITY; }
        CHECK(left_out >= (skip == TileSkip::Off ? 0 : 2));
        CHECK(left_out <= (skip == TileSkip::Off ? 0 : 2 * (splits - 1)));
        acts.release();
    }
    CHECK(memcmp(logits[0].data(), logits[1].data(), sizeof(float) * logits[0].size()) == 0);
    CHECK(distance_in_eps(logits[0], logits[2]) <= 40);
}

TEST_CASE("generate: rope stretched by a factor generates as it evaluates", "[generate]") {
    const std::vector<int> ids = random_ids(90, 22);
    TinyModel model("rope");
    const std::vector<float> plain = uncached_logits(model, ids);
    for (const char* scaling : {"pi:4", "ntk:4", "yarn:4"}) {
        INFO(scaling);
        parse_rope_scaling(scaling, model.config.position);
        const std::vector<float> stretched = uncached_logits(model, ids);
        CHECK(distance_in_eps(plain, stretched) > 1e4);
        Activations acts = activations_describe(model, 1, 100, Purpose::Generate, 0);
        activations_allocate(acts);
        std::vector<float> logits;
        forward_logits(model, acts, ids.data(), 40, 0, logits);
        for (int t = 40; t < 90; t++) { forward_logits(model, acts, &ids[(size_t)t], 1, t, logits); }
        acts.release();
        CHECK(distance_in_eps(logits, stretched) <= 40);
    }
}

TEST_CASE("generate: learned positions end where their table does", "[generate][asan]") {
    TinyModel model("learned");
    const std::vector<int> prompt = random_ids(10, 8);
    CHECK(generate(model, prompt, 22, {}, nullptr, nullptr).size() == 22);
    for (int64_t n : {(int64_t)23, (int64_t)INT_MAX, (int64_t)INT64_MAX}) {
        const auto beyond = [&] { generate(model, prompt, n, {}, nullptr, nullptr); };
        CHECK(throws_with(beyond, "learned reaches 32") == EXIT_BAD_INPUT);
    }
    TinyModel cable("cable");
    CHECK(throws_with([&] { generate(cable, prompt, INT_MAX, {}, nullptr, nullptr); }, "--tokens") == EXIT_BAD_INPUT);
}

TEST_CASE("generate: the same seed gives the same text, printed as it comes", "[generate][asan]") {
    TinyModel model("cable");
    const std::vector<int> prompt = {3, 14, 15};
    FILE* out = tmpfile();
    const std::vector<int> a = generate(model, prompt, 12, {8.0, 0, 1.0, 5}, nullptr, out);
    CHECK(a == generate(model, prompt, 12, {8.0, 0, 1.0, 5}, nullptr, nullptr));
    CHECK(a != generate(model, prompt, 12, {8.0, 0, 1.0, 6}, nullptr, nullptr));
    std::string want = "3 14 15";
    for (int id : a) { want += " " + std::to_string(id); }
    rewind(out);
    std::string got(200, '\0');
    got.resize(fread(&got[0], 1, got.size(), out));
    fclose(out);
    CHECK(got == want + "\n");
    // with a token that ends a text, what comes before it
    for (size_t k = 0; k < a.size(); k++) {
        const size_t first = (size_t)(std::find(a.begin(), a.end(), a[k]) - a.begin());
        const std::vector<int> text = generate(model, prompt, 12, {8.0, 0, 1.0, 5, a[k]}, nullptr, nullptr);
        CHECK(text == std::vector<int>(a.begin(), a.begin() + (long)first));
    }
    CHECK(generate(model, prompt, 12, {8.0, 0, 1.0, 5, V}, nullptr, nullptr) == a);
}

// ----------------------------------------------------------------------------------------------------------
// drawing a token

struct Distribution { Sampling sampling; std::vector<double> p; };

// softmax(logits / temperature) over the `keep` likeliest, from the definition
std::vector<double> softmax_of(const std::vector<float>& logits, double temperature, size_t keep) {
    std::vector<std::pair<float, int>> sorted;
    for (int i = 0; i < (int)logits.size(); i++) { sorted.push_back({-logits[(size_t)i], i}); }
    std::sort(sorted.begin(), sorted.end());
    std::vector<double> p(logits.size(), 0.0);
    double sum = 0;
    for (size_t k = 0; k < keep; k++) { sum += p[(size_t)sorted[k].second] = std::exp(-sorted[k].first / temperature); }
    for (double& x : p) { x /= sum; }
    return p;
}

TEST_CASE("generate: draws follow the softmax", "[generate][asan]") {
    std::vector<float> logits(20);
    for (size_t i = 0; i < logits.size(); i++) { logits[i] = (float)normal01(3, 1, i); }
    std::vector<double> p = softmax_of(logits, 1.0, 20);
    std::sort(p.rbegin(), p.rend());
    size_t nucleus = 0;                                         // smallest set of probability 0.8
    for (double sum = 0; sum < 0.8; nucleus++) { sum += p[nucleus]; }
    REQUIRE(nucleus > 3);
    REQUIRE(nucleus < 15);
    std::vector<double> top5 = softmax_of(logits, 1.0, 5);
    std::sort(top5.rbegin(), top5.rend());
    REQUIRE(top5[0] + top5[1] + top5[2] < 0.9);
    REQUIRE(top5[0] + top5[1] + top5[2] + top5[3] > 0.9);
    const Distribution cases[] = {
        {{1.0, 0, 1.0, 0}, softmax_of(logits, 1.0, 20)}, {{0.5, 0, 1.0, 0}, softmax_of(logits, 0.5, 20)},
        {{2.0, 0, 1.0, 0}, softmax_of(logits, 2.0, 20)}, {{1.0, 5, 1.0, 0}, softmax_of(logits, 1.0, 5)},
        {{1.0, 0, 0.8, 0}, softmax_of(logits, 1.0, nucleus)}, {{1.0, 20, 1.0, 0}, softmax_of(logits, 1.0, 20)},
        {{1.0, 5, 0.9, 0}, softmax_of(logits, 1.0, 4)}};       // p counts among the k that are left
    for (const Distribution& d : cases) {
        const int draws = 20000;
        std::vector<int> count(20);
        for (uint64_t i = 0; i < (uint64_t)draws; i++) {
            count[(size_t)sample_token(logits, d.sampling, uniform01(17, 1, i))]++;
        }
        double chi2 = 0;
        int freedom = -1;
        const Sampling& s = d.sampling;
        INFO("temperature " << s.temperature << ", top_k " << s.top_k << ", top_p " << s.top_p);
        for (size_t i = 0; i < 20; i++) {
            if (d.p[i] == 0) { CHECK(count[i] == 0); continue; }
            chi2 += (count[i] - draws * d.p[i]) * (count[i] - draws * d.p[i]) / (draws * d.p[i]);
            freedom++;
        }
        CHECK(chi2 < freedom + 4 * std::sqrt(2.0 * freedom));
    }
}

TEST_CASE("generate: no choice is the likeliest token", "[generate][asan]") {
    std::vector<float> logits = {0.5f, 3.0f, -1.0f, 3.0f, 2.9f};        // a tie goes to the smaller id
    for (double u : {0.0, 0.3, 0.999999, std::nextafter(1.0, 0.0)}) {
        CHECK(sample_token(logits, {0.0, 0, 1.0, 0}, u) == 1);
        CHECK(sample_token(logits, {1.0, 1, 1.0, 0}, u) == 1);
        CHECK(sample_token(logits, {1.0, 0, 1e-6, 0}, u) == 1);
        CHECK(sample_token(logits, {1e-3, 1, 0.5, 0}, u) == 1);
    }
    CHECK(sample_token(logits, {1.0, 0, 1.0, 0}, 0.0) == 0);
    CHECK(sample_token(logits, {1.0, 0, 1.0, 0}, std::nextafter(1.0, 0.0)) == 4);
    for (float& x : logits) { x *= 1e4f; }                              // no overflow, no NaN
    const int id = sample_token(logits, {0.1, 0, 1.0, 0}, 0.2);
    CHECK((id == 1 || id == 3));
}

TEST_CASE("generate: a prompt is bytes or ids", "[generate][asan]") {
    CHECK(prompt_ids("a\xff", 256) == std::vector<int>{97, 255});
    CHECK(prompt_ids("", 256) == std::vector<int>{10});
    CHECK(prompt_ids("", 50257) == std::vector<int>{50256});
    CHECK(prompt_ids(" , ", V) == std::vector<int>{0});
    CHECK(prompt_ids(" 0,60  7,", V) == std::vector<int>{0, 60, 7});
    for (const char* bad : {"61", "-1", "abc", "1x", "3 4 99999999999999999999", "1.5", "0x1"}) {
        INFO(bad);
        CHECK(throws_with([&] { prompt_ids(bad, V); }, "is not a token id below 61") == EXIT_BAD_INPUT);
    }
    CHECK(throws_with([&] { prompt_ids(std::string(10000, 'x'), V); }, "xxx'") == EXIT_BAD_INPUT);
    CHECK(throws_with([&] { prompt_ids("To be", V, nullptr, "--dump_bias", "ids"); },
                      "--dump_bias: 'To' is not a token id below 61; it takes ids, as in \"15496 995\"; for a text: "
                      "python3 scripts/text.py ids RUN \"TEXT\"") == EXIT_BAD_INPUT);
    // an empty one is the tokenizer's end of text
    TempDir dir;
    write_file(dir / "vocab.txt", "[PAD]\n[UNK]\n[SEP]\nto\nbe\n##s\n7\n");
    const Tokenizer words = Tokenizer::load(dir.path);
    CHECK(prompt_ids("6 4", 7, &words) == std::vector<int>{6, 4});
    CHECK(prompt_ids(" ", 7, &words) == std::vector<int>{2});
    const Tokenizer bytes = Tokenizer::bytes();
    CHECK(prompt_ids("1 0", 256, &bytes) == std::vector<int>{'1', ' ', '0'});
    CHECK(prompt_ids("", 256, &bytes) == std::vector<int>{'\n'});
}

TEST_CASE("generate: a prompt in a shard is its ids", "[generate][asan]") {
    TempDir dir;
    write_shard(dir / "p", {7, 60, 0});
    write_file(dir / "wide", header_bytes({SHARD_MAGIC_UINT32, SHARD_VERSION_UINT32, 1, 70001, 0}) +
                                 std::string("\x70\x11\x01\0", 4));
    write_file(dir / "text", "1 2 3");
    Options o;
    o.generate = "@" + (dir / "p");
    CHECK(prompt_of(o, V, nullptr) == std::vector<int>{7, 60, 0});
    CHECK(prompt_of(o, 256, nullptr) == std::vector<int>{7, 60, 0});
    CHECK(throws_with([&] { prompt_of(o, 60, nullptr); }, "p: expected ids below 60, got 60") == EXIT_BAD_INPUT);
    CHECK(prompt_in_shard("@" + (dir / "wide"), "--predict", 70001) == std::vector<int>{70000});
    o.generate = "@" + (dir / "text");
    CHECK(prompt_of(o, V, nullptr) == std::vector<int>{1, 2, 3});
    for (const char* text : {"", "@", "p", "@@p", "@/", "@/dev/null"}) {
        INFO(text);
        CHECK(prompt_in_shard(text, "--predict", V).empty());
    }
    write_file(dir / "cut", read_file(dir / "p", 4096).substr(0, 1027));
    CHECK(throws_with([&] { prompt_in_shard("@" + (dir / "cut"), "--predict", V); },
                      "--predict: " + (dir / "cut") + ": expected 1030 bytes") == EXIT_BAD_INPUT);
}

// ----------------------------------------------------------------------------------------------------------
// main, in this process: what the sanitizers should see of it

int run_main(std::vector<std::string> args) {
    const SingleThread single;
    args.insert(args.begin(), "train_gpt2");
    std::vector<char*> argv;
    for (std::string& a : args) { argv.push_back(&a[0]); }
    argv.push_back(nullptr);
    int code = -1;
    printed([&] { code = run_on_ranks(gpt2_main, GPT2_FLAG, (int)args.size(), argv.data()); });
    for (int number : {SIGINT, SIGTERM, SIGUSR1}) { std::signal(number, SIG_DFL); }
    return code;
}

TEST_CASE("generate: main trains, resumes, evaluates, dumps and generates", "[generate][asan]") {
    const TempDir dir;
    const std::vector<int> stream = random_ids(400, 9);
    write_shard(dir / "train.bin", stream);
    CHECK(run_main({"--help"}) == 0);
    CHECK(run_main({"--lr", "abc"}) == EXIT_BAD_INPUT);
    for (const char* pos : {"cable", "fire", "learned", "t5"}) {
        INFO(pos);
        const std::string out = dir / pos;
        const std::vector<std::string> base = {
            "-i", dir / "train.bin", "-j", dir / "train.bin", "--model", "1,2,16", "--T", "16", "--B", "2",
            "--total_batch", "96", "--pos", pos, "--sample_every", "2", "--val_every", "2", "--recompute", "2",
            "--checkpoint_every", "2", "--keep", "1", "--tokens", "5", "--steps", "3", "--out", out};
        auto with = [&](std::vector<std::string> more) {
            more.insert(more.begin(), base.begin(), base.end());
            return more;
        };
        CHECK(run_main(base) == 0);
        CHECK(run_main(base) == EXIT_BAD_INPUT);
        CHECK(run_main(with({"--resume", "1", "--eval_lengths", "8,16,64", "--stride", "8", "--curve"})) == 0);
        CHECK(run_main({"--load", out, "--generate", "3 4", "--tokens", "10"}) == 0);
        if (std::string(pos) == "learned") { continue; }
        CHECK(run_main({"--load", out, "--dump_bias", "0,1,3 4 5", "--out", out}) == 0);
        CHECK(path_exists(out + "/bias_0_1.json"));
    }
}

}  // namespace
