// test_hellaswag.cu -- the multiple-choice file, and the losses by which an answer is chosen.
#include "test/files.h"

#include "llmc/lab/evaluate.h"

namespace {

// A "model" whose loss of a target is a function of everything before it: a row that is shifted, cut or padded wrongly
// scores otherwise.
struct FakeModel { int calls = 0; size_t largest = 0; };
struct FakeActs { int B, T; };
float fake_loss(const int* before, size_t n, int target) {
    uint64_t h = 1;
    for (size_t i = 0; i < n; i++) { h = hash64(h, (uint64_t)before[i]); }
    return 1.0f + (float)uniform01(h, (uint64_t)target);
}
void forward_losses(FakeModel& model, FakeActs&, const int* tokens, const int* targets, const int*, int B, int T,
                    float* losses, float*) {
    model.calls++;
    model.largest = std::max(model.largest, (size_t)B * T);
    for (int b = 0; b < B; b++) {
        for (int t = 0; t < T; t++) {
            const size_t o = (size_t)b * T + t;
            losses[o] = 0.0f;
            if (targets[o] != IGNORE_INDEX) {
                losses[o] = fake_loss(tokens + (size_t)b * T, (size_t)t + 1, targets[o]);
            }
        }
    }
}

HellaSwag random_set(int n, uint64_t seed, int V, size_t longest) {
    HellaSwag set;
    uint64_t draw = 0;
    auto text = [&] {
        std::vector<int> ids(1 + hash64(seed, draw++) % longest);
        for (int& id : ids) { id = (int)(hash64(seed, draw++) % (uint64_t)V); }
        return ids;
    };
    for (int e = 0; e < n; e++) {
        HellaSwag::Example x;
        x.label = (int)(hash64(seed, draw++) % 4);
        x.context = text();
        for (auto& ending : x.ending) { ending = text(); }
        set.examples.push_back(x);
    }
    return set;
}

std::string file_of(const HellaSwag& set) {
    std::vector<int32_t> header(256, 0);
    header[0] = 20240522; header[1] = 1; header[2] = (int32_t)set.examples.size();
    std::vector<uint16_t> data;
    for (size_t e = 0; e < set.examples.size(); e++) {
        const auto& x = set.examples[e];
        std::vector<uint16_t> d = {65535, 0, (uint16_t)e, (uint16_t)x.label, 4};
        auto add = [&](const std::vector<int>& ids) {
            d.push_back((uint16_t)ids.size());
            d.insert(d.end(), ids.begin(), ids.end());
        };
        add(x.context);
        for (const auto& ending : x.ending) { add(ending); }
        d[1] = (uint16_t)(2 * d.size());
        data.insert(data.end(), d.begin(), d.end());
    }
    return bytes_of(header) + bytes_of(data);
}

} // namespace

TEST_CASE("hellaswag: the file is read as it was written", "[hellaswag]") {
    TempDir dir;
    const HellaSwag set = random_set(9, 5, 300, 12);
    write_file(dir / "h.bin", file_of(set));
    const HellaSwag read = load_hellaswag(dir / "h.bin", 300);
    REQUIRE(read.examples.size() == 9);
    for (size_t e = 0; e < 9; e++) {
        CHECK(read.examples[e].label == set.examples[e].label);
        CHECK(read.examples[e].context == set.examples[e].context);
        for (int k = 0; k < 4; k++) { CHECK(read.examples[e].ending[k] == set.examples[e].ending[k]); }
    }
}

TEST_CASE("hellaswag: damaged files are refused", "[hellaswag]") {
    TempDir dir;
    const std::string path = dir / "h.bin", good = file_of(random_set(5, 6, 300, 12));
    auto refused = [&](const std::string& bytes, const std::string& why) {
        write_file(path, bytes);
        CHECK(throws_with([&] { load_hellaswag(path, 300); }, why) == EXIT_BAD_INPUT);
    };
    CHECK(throws_with([&] { load_hellaswag(dir / "absent", 300); }, "absent") == EXIT_BAD_INPUT);
    refused(good.substr(0, 1000), "expected a header of 1024 bytes, got a file of 1000");
    refused("x" + good.substr(1), "magic");
    refused(good + "ab", "after the last example");
    for (size_t n = 1024; n < good.size(); n += 2) { refused(good.substr(0, n), "example"); }
    // any changed word is refused or still well-formed, and never read beyond the end
    for (size_t at = 1024; at + 2 <= good.size(); at += 2) {
        std::string bad = good;
        bad[at] = (char)0xfe;
        bad[at + 1] = (char)0xff;
        refused(bad, "--hellaswag");
    }
    write_file(path, good);
    CHECK(throws_with([&] { load_hellaswag(path, 100); },
                      "example 0: expected ids below 100, the model's vocabulary, got 265") == EXIT_BAD_INPUT);
}

TEST_CASE("hellaswag: an ending's score is the mean loss of its tokens after its context", "[hellaswag]") {
    const HellaSwag set = random_set(40, 7, 50, 9);
    for (int T : {9, 13, 17, 40}) {                     // 9: contexts are cut; 17: everything fits
        for (int B : {1, 3, 8}) {
            FakeModel model;
            FakeActs acts{B, T};
            const HellaSwagScore s = evaluate_hellaswag(model, acts, set);
            int correct = 0, cut = 0;
            for (size_t e = 0; e < set.examples.size(); e++) {
                const auto& x = set.examples[e];
                size_t best = 0;
                double least = INFINITY;
                bool was_cut = false;
                for (size_t k = 0; k < 4; k++) {
                    const size_t whole = x.context.size() + x.ending[k].size();
                    const size_t drop = whole > (size_t)T + 1 ? whole - T - 1 : 0;
                    was_cut = was_cut || drop > 0;
                    std::vector<int> seen(x.context.begin() + (long)drop, x.context.end());
                    double sum = 0.0;
                    for (int id : x.ending[k]) {
                        sum += fake_loss(seen.data(), seen.size(), id);
                        seen.push_back(id);
                    }
                    const double mean = sum / (double)x.ending[k].size();
                    CHECK(s.nll[4 * e + k] == Approx(mean).epsilon(1e-6));
                    if (mean < least) { least = mean; best = k; }
                }
                correct += (int)best == x.label;
                cut += was_cut;
            }
            CHECK(s.correct == correct);
            CHECK(s.cut == cut);
            CHECK((cut > 0) == (T < 17));
            CHECK(model.largest <= (size_t)B * T);
            if (B > 1) { CHECK(model.calls < 160); }    // rows share a batch
        }
    }
    FakeModel model;
    FakeActs acts{1, 4};
    CHECK(throws_with([&] { evaluate_hellaswag(model, acts, set); }, "does not fit into --T 4") == EXIT_BAD_INPUT);
}

TEST_CASE("hellaswag: a right ending that ties with another one is not a hit", "[hellaswag]") {
    HellaSwag set = random_set(20, 8, 50, 9);
    for (auto& x : set.examples) { for (auto& ending : x.ending) { ending = x.ending[0]; } }
    FakeModel model;
    FakeActs acts{8, 40};
    CHECK(evaluate_hellaswag(model, acts, set).correct == 0);
    for (auto& x : set.examples) { x.label = 0; }           // the first of equals, too
    CHECK(evaluate_hellaswag(model, acts, set).correct == 0);
}

TEST_CASE("hellaswag: llm.c's file of 500 real examples", "[hellaswag]") {
    const char* data = getenv("CABLE_DATA");
    if (data == nullptr || *data == '\0') { WARN("SKIPPED: CABLE_DATA names no directory"); return; }
    const std::string path = data + std::string("/hellaswag_val_500.bin");
    const HellaSwag set = load_hellaswag(path, 50257);
    REQUIRE(set.examples.size() == 500);
    const std::string text = read_file(data + std::string("/hellaswag_val_500.jsonl"));
    size_t at = 0;
    for (const auto& x : set.examples) {
        const size_t end = text.find('\n', at);
        const Json j = parse_json(text.substr(at, end - at), "hellaswag_val_500.jsonl");
        CHECK((int)json_int(j, "label", 0, 3, "hellaswag_val_500.jsonl") == x.label);
        at = end + 1;
    }
}
