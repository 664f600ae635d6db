// Masking: which tokens are chosen, how often, and what they become; the result does not depend on how a sample is cut.
#include <map>

#include "llmc/engine/data.h"
#include "test/catch.h"
#include "test/files.h"

namespace {

struct Masked {
    std::vector<int> inputs, targets;
    int chosen = 0;
    bool operator==(const Masked& o) const { return inputs == o.inputs && targets == o.targets && chosen == o.chosen; }
};

Masked mask(const SpecialTokens& s, const std::vector<int>& ids, uint64_t seed, uint64_t sample, uint64_t first = 0,
            double share = 0.15) {
    Masked m{std::vector<int>(ids.size(), -7), std::vector<int>(ids.size(), -7), 0};
    m.chosen = mask_tokens(s, seed, sample, first, (int)ids.size(), ids.data(), m.inputs.data(),
                           m.targets.data(), share);
    return m;
}

std::vector<int> plain_ids(const SpecialTokens& s, size_t n) {
    std::vector<int> ids;
    for (uint64_t i = 0; ids.size() < n; i++) {
        const int id = (int)(hash64(9, i) % (uint64_t)s.V);
        if (!s.is_special(id)) { ids.push_back(id); }
    }
    return ids;
}

// within five standard deviations of a binomial count
bool binomial(double count, double n, double p) { return std::abs(count - n * p) <= 5 * std::sqrt(n * p * (1 - p)); }

} // namespace

TEST_CASE("mlm: the special tokens of BERT, of bytes and of a vocabulary file", "[mlm]") {
    const SpecialTokens bert = special_tokens(30522), bytes = special_tokens(260);
    CHECK((bert.V == 30522 && bert.pad == 0 && bert.unk == 100 && bert.cls == 101 && bert.sep == 102 &&
           bert.mask == 103));
    CHECK((bytes.V == 260 && bytes.pad == 256 && bytes.unk == -1 && bytes.cls == 257 && bytes.sep == 258 &&
           bytes.mask == 259));
    CHECK(bytes.is_special(256));
    CHECK_FALSE(bytes.is_special(255));
    CHECK(special_tokens(Tokenizer::bytes()).mask == 259);
    CHECK(throws_with([] { special_tokens(256); },
                      "expected a vocabulary of 30522 (BERT) or 260 (bytes), got 256") == 2);
    TempDir dir;
    write_file(dir / "vocab.txt", "a\n[MASK]\n[SEP]\n[UNK]\nb\n[PAD]\n##c\n[CLS]\n[MASK]\n");
    const SpecialTokens own = special_tokens(Tokenizer::load(dir / "vocab.txt"));
    CHECK((own.V == 9 && own.pad == 5 && own.unk == 3 && own.cls == 7 && own.sep == 2 && own.mask == 8));
    for (const char* name : {"[PAD]", "[CLS]", "[SEP]", "[MASK]"}) {
        std::string text;
        for (const char* line : {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"}) {
            if (line != std::string(name)) { text += std::string(line) + "\n"; }
        }
        write_file(dir / "vocab.txt", text);
        CHECK(throws_with([&] { special_tokens(Tokenizer::load(dir / "vocab.txt")); },
                          std::string("has no token ") + name) == 2);
    }
    write_file(dir / "encoder.json", "{\"a\": 0, \"b\": 1}");
    CHECK(throws_with([&] { special_tokens(Tokenizer::load(dir / "encoder.json")); }, "has no token [PAD]") == 2);
    const std::string real = real_data();
    if (!real.empty()) {
        const SpecialTokens s = special_tokens(Tokenizer::load(real + "vocab.txt"));
        CHECK((s.V == bert.V && s.pad == bert.pad && s.unk == bert.unk && s.cls == bert.cls && s.sep == bert.sep &&
               s.mask == bert.mask));
    }
}

TEST_CASE("mlm: 15% are chosen; 80% of them become [MASK], 10% a random token, 10% stay", "[mlm]") {
    for (const int V : {30522, 260}) {
        const SpecialTokens s = special_tokens(V);
        const std::vector<int> ids = plain_ids(s, 400000);
        for (const double share : {0.15, 0.4}) {
            const Masked m = mask(s, ids, 42, 3, 0, share);
            int chosen = 0, masked = 0;
            int other = 0, kept = 0;        // chosen, and now a random token, or the old one
            int wrong = 0;
            for (size_t i = 0; i < ids.size(); i++) {
                const bool hit = m.targets[i] != IGNORE_INDEX;
                wrong += hit ? m.targets[i] != ids[i] : m.inputs[i] != ids[i];
                chosen += hit;
                masked += hit && m.inputs[i] == s.mask;
                kept += hit && m.inputs[i] == ids[i];
                other += hit && m.inputs[i] != ids[i] && m.inputs[i] != s.mask;
            }
            CHECK(wrong == 0);
            CHECK(m.chosen == chosen);
            CHECK(binomial(chosen, (double)ids.size(), share));
            CHECK(binomial(masked, chosen, 0.8));
            const double plain = V - (V == 260 ? 4 : 5);            // a random token is the old one once in `plain`
            CHECK(binomial(kept, chosen, 0.1 + 0.1 / plain));
            CHECK(binomial(other, chosen, 0.1 - 0.1 / plain));
        }
    }
}

TEST_CASE("mlm: special tokens are never chosen or drawn; all others are, equally often", "[mlm]") {
    for (const int V : {30522, 260}) {
        const SpecialTokens s = special_tokens(V);
        std::vector<int> special;
        for (int id = 0; id < V; id++) { if (s.is_special(id)) { special.push_back(id); } }
        CHECK((int)special.size() == (V == 260 ? 4 : 5));
        std::vector<int> ids;
        for (int i = 0; i < 20000; i++) { ids.push_back(special[(size_t)i % special.size()]); }
        const Masked none = mask(s, ids, 1, 1, 0, 1.0);
        CHECK(none.inputs == ids);
        CHECK(none.targets == std::vector<int>(ids.size(), IGNORE_INDEX));
        CHECK(none.chosen == 0);
    }
    const SpecialTokens s = special_tokens(260);
    std::vector<double> count(260, 0.0);
    double draws = 0;
    for (uint64_t sample = 0; sample < 20; sample++) {
        const Masked m = mask(s, std::vector<int>(100000, 'x'), 5, sample, 0, 1.0);
        for (const int id : m.inputs) {
            if (id == s.mask || id == 'x') { continue; }            // a kept x cannot be told from a drawn one
            count[(size_t)id]++;
            draws++;
        }
    }
    double chi2 = 0;
    for (int id = 0; id < 256; id++) {
        const double wanted = id == 'x' ? 0 : draws / 255;
        if (wanted > 0) { chi2 += (count[(size_t)id] - wanted) * (count[(size_t)id] - wanted) / wanted; }
    }
    for (int id = 256; id < 260; id++) { CHECK(count[(size_t)id] == 0); }
    CHECK(std::abs(chi2 - 254) < 5 * std::sqrt(2 * 254.0));          // 254 degrees of freedom
    // plain: 1 and 4, at the edges of runs of special ids
    const SpecialTokens odd{7, 0, 6, 2, 3, 5};
    std::map<int, int> seen;
    for (const int id : mask(odd, std::vector<int>(4000, 4), 5, 0, 0, 1.0).inputs) { seen[id]++; }
    CHECK(seen.size() == 3);
    CHECK((binomial(seen[5], 4000, 0.8) && binomial(seen[1], 4000, 0.05) && binomial(seen[4], 4000, 0.15)));
}

TEST_CASE("mlm: a pure function of seed, sample and position", "[mlm][P10]") {
    const SpecialTokens s = special_tokens(30522);
    const std::vector<int> ids = plain_ids(s, 1000);
    const Masked whole = mask(s, ids, 42, EVALUATION_SAMPLE, 777);
    CHECK(whole == mask(s, ids, 42, EVALUATION_SAMPLE, 777));
    for (const size_t cut : {(size_t)0, (size_t)1, (size_t)500, (size_t)999, (size_t)1000}) {
        const std::vector<int> left(ids.begin(), ids.begin() + (long)cut), right(ids.begin() + (long)cut, ids.end());
        Masked both = mask(s, left, 42, EVALUATION_SAMPLE, 777);
        const Masked rest = mask(s, right, 42, EVALUATION_SAMPLE, 777 + cut);
        both.inputs.insert(both.inputs.end(), rest.inputs.begin(), rest.inputs.end());
        both.targets.insert(both.targets.end(), rest.targets.begin(), rest.targets.end());
        both.chosen += rest.chosen;
        CHECK(both == whole);
    }
    std::vector<int> in_place = ids, targets(ids.size());
    mask_tokens(s, 42, EVALUATION_SAMPLE, 777, 1000, in_place.data(), in_place.data(), targets.data());
    CHECK((in_place == whole.inputs && targets == whole.targets));
    // another seed, sample or position chooses independently: 1000 * 2 * 0.15 * 0.85 = 255 choices differ on average
    const std::pair<const char*, Masked> others[] = {{"seed", mask(s, ids, 43, EVALUATION_SAMPLE, 777)},
                                                     {"sample", mask(s, ids, 42, 0, 777)},
        {"place", mask(s, ids, 42, EVALUATION_SAMPLE, 778)},
        {"far place", mask(s, ids, 42, EVALUATION_SAMPLE, 777 + (1ull << 32))}};
    for (const auto& o : others) {
        INFO(o.first);
        double differ = 0;
        for (size_t i = 0; i < ids.size(); i++) {
            differ += (o.second.targets[i] == IGNORE_INDEX) != (whole.targets[i] == IGNORE_INDEX);
        }
        CHECK(binomial(differ, 1000, 0.255));
    }
    // what a position gets does not depend on the tokens around it
    std::vector<int> changed = ids;
    for (size_t i = 0; i < 1000; i += 2) { changed[i] = s.sep; }
    const Masked m = mask(s, changed, 42, EVALUATION_SAMPLE, 777);
    for (size_t i = 1; i < 1000; i += 2) {
        REQUIRE((m.targets[i] == whole.targets[i] && m.inputs[i] == whole.inputs[i]));
    }
}

TEST_CASE("mlm: golden values, so that later versions can resume a run", "[mlm][P10]") {
    const SpecialTokens s = special_tokens(260);
    std::vector<int> ids(40);
    for (int i = 0; i < 40; i++) { ids[(size_t)i] = 'A' + i; }
    const Masked m = mask(s, ids, 42, 7, 100, 0.5);
    std::string text;
    for (size_t i = 0; i < 40; i++) {
        if (m.targets[i] != IGNORE_INDEX) { text += strprintf("%zu:%d>%d ", i, m.targets[i], m.inputs[i]); }
    }
    CHECK(text == "0:65>259 2:67>259 4:69>69 7:72>259 8:73>259 10:75>259 13:78>259 15:80>259 16:81>259 17:82>259 "
                  "18:83>259 20:85>259 21:86>259 29:94>76 33:98>259 36:101>259 37:102>259 38:103>259 39:104>104 ");
    CHECK(mask(s, {}, 1, 1).chosen == 0);
    CHECK(mask(s, ids, 42, 7, 100, 0.0).chosen == 0);
    CHECK(mask(s, ids, 42, 7, 100, 1.0).chosen == 40);
    CHECK(throws_with([&] { mask(s, ids, 42, 7, 100, 1.5); },
                      "expected a share of the tokens from 0 to 1, got 1.5") == 2);
    CHECK(throws_with([&] { mask(SpecialTokens{}, ids, 42, 7); }, "expected a vocabulary with [MASK]") == 2);
}

TEST_CASE("mlm: a text for --predict is wrapped in [CLS] and [SEP]; [MASK] in it is that token", "[mlm]") {
    const SpecialTokens s = special_tokens(BYTE_VOCAB);
    const auto ids = [&](const std::string& text) { return text_ids(text, s); };
    CHECK(ids("a[MASK]bc[MASK][MASK]") == std::vector<int>{s.cls, 'a', s.mask, 'b', 'c', s.mask, s.mask, s.sep});
    CHECK(ids("[MASK") == std::vector<int>{s.cls, '[', 'M', 'A', 'S', 'K', s.sep});
    CHECK(ids("") == std::vector<int>{s.cls, s.sep});
}
