// Whole documents: every one is found by its number and cut where it must be; batches of groups; bad files are refused.
#include <set>

#include "llmc/engine/data.h"
#include "test/catch.h"
#include "test/files.h"

namespace {

constexpr int CLS = 101, SEP = 102;
const SpecialTokens BERT = special_tokens(30522), BYTES = special_tokens(260);

// document number i: [CLS], 0 to 40 ids that are its own, [SEP]
std::vector<int> document(size_t i) {
    std::vector<int> ids = {CLS};
    const int n = (int)(hash64(3, i) % 41);
    for (int k = 0; k < n; k++) { ids.push_back(1000 + (int)(hash64(4, i, (uint64_t)k) % 29000)); }
    ids.push_back(SEP);
    return ids;
}

std::string shard_of(const std::vector<int>& ids, int group, int documents, int vocab = 30522, int sep = SEP) {
    return header_bytes({SHARD_MAGIC, SHARD_VERSION, (int)ids.size(), vocab, sep, group, documents}) +
           bytes_of(std::vector<uint16_t>(ids.begin(), ids.end()));
}

std::string shard(size_t first, size_t documents, int group) {
    std::vector<int> ids;
    for (size_t i = first; i < first + documents; i++) {
        const std::vector<int> d = document(i);
        ids.insert(ids.end(), d.begin(), d.end());
    }
    return shard_of(ids, group, (int)documents);
}

std::string names(size_t first, size_t n) {
    std::string s;
    for (size_t i = first; i < first + n; i++) { s += strprintf("doc-%zu\n", i); }
    return s;
}

int refused(const std::string& pattern, const std::string& text, const SpecialTokens& special = BERT, int group = 0) {
    return throws_with([&] { Documents d(pattern, "--encode", special, group); }, text);
}

std::vector<int> read(const Documents& d, size_t i, int max_tokens) {
    std::vector<int> out((size_t)max_tokens, -5);
    const int n = d.read(i, max_tokens, out.data());
    CHECK(std::all_of(out.begin() + n, out.end(), [](int id) { return id == -5; }));
    out.resize((size_t)n);
    return out;
}

// the expected ids of a cut document, from those of the whole
std::vector<int> cut(std::vector<int> ids, int max_tokens) {
    if ((int)ids.size() > max_tokens) {
        ids.resize((size_t)max_tokens);
        ids.back() = SEP;
    }
    return ids;
}

} // namespace

TEST_CASE("documents: a collection of several shards, each document whole or cut", "[documents]") {
    TempDir dir;
    const size_t counts[] = {30, 1, 17};
    size_t first = 0;
    for (int s = 0; s < 3; s++) {
        write_file(dir / strprintf("corpus_%06d.bin", s), shard(first, counts[s], 1));
        write_file(dir / strprintf("corpus_%06d.ids", s), names(first, counts[s]));
        first += counts[s];
    }
    const Documents d(dir / "corpus_*.bin", "--encode", BERT, 1);
    REQUIRE(d.size() == 48);
    CHECK(d.groups() == 48);
    CHECK(d.group == 1);
    for (size_t i = 0; i < 48; i++) {
        const std::vector<int> whole = document(i);
        CHECK(d.length(i) == whole.size());
        CHECK(d.name(i) == strprintf("doc-%zu", i));
        for (const int most : {2, 3, 10, (int)whole.size(), 64}) {
            CHECK(read(d, i, most < 2 ? 2 : most) == cut(whole, most));
        }
    }
    CHECK(throws_with([&] { d.length(48); }, "--encode: document 48 of 48") == 2);
    CHECK(throws_with([&] { read(d, 0, 1); }, "cut to 1 tokens") == 2);
    CHECK(throws_with([&] { d.name(SIZE_MAX); }, "of 48") == 2);
}

TEST_CASE("documents: groups, and files of another kind refused", "[documents]") {
    TempDir dir;
    write_file(dir / "train_0.bin", shard(0, 9, 3));
    write_file(dir / "train_1.bin", shard(9, 6, 3));
    const Documents d(dir / "train_*.bin", "--train", BERT, 3);
    CHECK((d.group == 3 && d.groups() == 5 && d.size() == 15));
    CHECK(read(d, 11, 64) == document(11));
    CHECK(throws_with([&] { d.name(2); },
                      "train_0.bin has no names: " + (dir / "train_0.ids") + " does not exist") == 2);
    CHECK(refused(dir / "train_*.bin", "train_0.bin: expected a collection, got groups of 3 documents", BERT, 1) == 2);
    write_file(dir / "train_2.bin", shard(0, 4, 1));
    CHECK(refused(dir / "train_*.bin",
                  "train_2.bin: expected groups of 3 documents as in " + (dir / "train_0.bin") +
                      ", got a collection") == 2);
    CHECK(refused(dir / "train_0.bin", "expected a vocabulary of 260 with [SEP] = 258, got 30522 with last id 102",
                  BYTES) == 2);
}

TEST_CASE("documents: headers and tokens that contradict each other are refused", "[documents]") {
    TempDir dir;
    const std::string path = dir / "x.bin", good = shard(0, 12, 3);
    const std::string where = "--encode: " + path + ": ";
    write_file(path, good);
    CHECK(Documents(path, "--encode", BERT).groups() == 4);
    // 1, 2 and 4 divide the 12 documents, so they cannot be told from the right one
    for (const int32_t v : hostile_values(3)) {
        write_file(path, good);
        patch_file(path, bytes_of<int32_t>({v}), 20);
        INFO("documents in a group " << v);
        if (v == 1 || v == 2 || v == 4) {
            CHECK(Documents(path, "--encode", BERT).group == v);
        } else {
            CHECK(refused(path, where + "header: expected groups of 1 to 1024 documents, got " +
                          std::to_string(v)) == 2);
        }
    }
    for (const int32_t v : hostile_values(12)) {
        write_file(path, good);
        patch_file(path, bytes_of<int32_t>({v}), 24);
        INFO("documents " << v);
        const bool in_range = v == 1 || v == 11 || v == 13;
        const std::string fault = in_range ? strprintf("%d documents do not divide into groups of 3", v)
                                           : "expected 1 to ";
        CHECK(refused(path, where + "header: " + fault) == 2);
    }
    for (const int32_t v : {9, 15}) {                               // still groups of 3, but not as many as there are
        write_file(path, good);
        patch_file(path, bytes_of<int32_t>({v}), 24);
        const char* found = v == 9 ? "more" : "12";
        CHECK(refused(path, where + strprintf("expected the %d documents that its header says, got %s", v,
                                              found)) == 2);
    }
    write_file(path, shard_of({CLS, 5, SEP}, 0, 0));                // a shard of a stream of tokens
    CHECK(refused(path, "expected groups of 1 to 1024 documents, got 0 (0: a stream of tokens") == 2);
    write_file(path, shard_of({CLS, 5, SEP}, 1, 1, 30522, 101));
    CHECK(refused(path, "expected a vocabulary of 30522 with [SEP] = 102, got 30522 with last id 101") == 2);
    write_file(path, shard_of({CLS, 5, SEP}, 1, 1, 50257, 102));
    CHECK(refused(path, "got 50257 with last id 102") == 2);
    write_file(path, good);
    resize_file(path, good.size() - 2);
    CHECK(refused(path, where + strprintf("expected %zu bytes for the", good.size())) == 2);
    CHECK(refused(dir / "none_*.bin", "--encode: no file matches") == 2);
    // a header that claims more than the file holds is refused before memory is allocated
    write_file(path, header_bytes({SHARD_MAGIC, SHARD_VERSION, INT_MAX, 30522, 102, 1, INT_MAX / 2}));
    CHECK(refused(path, "expected 4294968318 bytes for the 2147483647 tokens") == 2);
}

TEST_CASE("documents: [CLS] and [SEP] in the wrong places are refused", "[documents]") {
    TempDir dir;
    const std::string path = dir / "x.bin", where = "--encode: " + path + ": ";
    // CLS 5 SEP CLS SEP CLS 6 7 SEP, each time with one fault
    const std::vector<int> ids = {CLS, 5, SEP, CLS, SEP, CLS, 6, 7, SEP};
    write_file(path, shard_of(ids, 1, 3));
    const Documents fine(path, "--encode", BERT);
    CHECK((fine.length(0) == 3 && fine.length(1) == 2 && fine.length(2) == 4));
    const struct { size_t at; int id; const char* text; } faults[] = {
        {0, 5, "token 0 is 5 after 102"}, {1, CLS, "token 1 is 101 after 101"}, {2, 5, "token 3 is 101 after 5"},
        {3, 5, "token 3 is 5 after 102"},
        {4, 9, "token 5 is 101 after 9"}, {6, SEP, "token 7 is 7 after 102"},
        {8, 7, "expected [SEP] = 102 at the end, got token 7"},
        {8, CLS, "token 8 is 101 after 7"},
        {7, 30522, "token 7: expected an id from 0 to 30521, got 30522"}};
    for (const auto& f : faults) {
        std::vector<int> bad = ids;
        bad[f.at] = f.id;
        write_file(path, shard_of(bad, 1, 3));
        CHECK(refused(path, where + f.text) == 2);
    }
}

TEST_CASE("documents: more ids than a scan reads at once", "[documents]") {
    TempDir dir;
    std::vector<int> ids;
    std::vector<uint64_t> begin;
    for (uint64_t i = 0; ids.size() < 1000000; i++) {
        begin.push_back(ids.size());
        ids.push_back(CLS);
        for (uint64_t k = hash64(1, i) % 30000; k > 0; k--) { ids.push_back((int)(2000 + (ids.size() % 20011))); }
        ids.push_back(SEP);
    }
    begin.push_back(ids.size());
    write_file(dir / "big.bin", shard_of(ids, 1, (int)begin.size() - 1));
    const Documents d(dir / "big.bin", "--encode", BERT);
    REQUIRE(d.size() == begin.size() - 1);
    for (size_t i = 0; i < d.size(); i++) {
        const std::vector<int> whole(ids.begin() + (long)begin[i], ids.begin() + (long)begin[i + 1]);
        REQUIRE(read(d, i, 40000) == whole);
        REQUIRE(read(d, i, 20000) == cut(whole, 20000));
    }
}

TEST_CASE("documents: one name per document, none twice", "[documents]") {
    TempDir dir;
    write_file(dir / "c_0.bin", shard(0, 3, 1));
    write_file(dir / "c_1.bin", shard(3, 2, 1));
    write_file(dir / "c_0.ids", "a\nb\nc");                          // the last newline may be missing
    write_file(dir / "c_1.ids", "d\ne\n");
    CHECK(Documents(dir / "c_*.bin", "--encode", BERT).name(4) == "e");
    for (const char* bad : {"d\n", "d\ne\nf\n", ""}) {
        write_file(dir / "c_1.ids", bad);
        CHECK(refused(dir / "c_*.bin", "expected 2 names, as " + (dir / "c_1.bin") + " has that many documents") == 2);
    }
    for (const char* bad : {"d\n\n", "d e\nf\n", "d\te\nf\n", "d\r\ne\r\n"}) {
        write_file(dir / "c_1.ids", bad);
        CHECK(refused(dir / "c_*.bin", "expected a name without white space") == 2);
    }
    write_file(dir / "c_1.ids", "d\nb\n");
    CHECK(refused(dir / "c_*.bin", "c_1.ids: the name b appears twice") == 2);
}

TEST_CASE("documents: lines of text are bytes between [CLS] and [SEP]", "[documents]") {
    TempDir dir;
    write_file(dir / "groups.txt", "who\tyou\tme\nwhat\xff\tthis\tthat");
    const Documents d(dir / "groups.txt", "--train", BYTES, 3);
    CHECK((d.size() == 6 && d.groups() == 2));
    CHECK(read(d, 0, 64) == std::vector<int>({257, 'w', 'h', 'o', 258}));
    CHECK(read(d, 2, 64) == std::vector<int>({257, 'm', 'e', 258}));
    CHECK(read(d, 3, 64) == std::vector<int>({257, 'w', 'h', 'a', 't', 255, 258}));
    CHECK(read(d, 5, 64) == std::vector<int>({257, 't', 'h', 'a', 't', 258}));
    CHECK(read(d, 5, 4) == std::vector<int>({257, 't', 'h', 258}));
    CHECK(read(d, 5, 2) == std::vector<int>({257, 258}));
    CHECK(d.length(3) == 7);
    write_file(dir / "a.txt", "one\ntwo\n");
    write_file(dir / "b.txt", "three\n");
    const Documents c(dir / "?.txt", "--encode", BYTES, 1);
    CHECK((c.size() == 3 && c.name(0) == "0" && c.name(2) == "2"));
    CHECK(read(c, 2, 64) == std::vector<int>({257, 't', 'h', 'r', 'e', 'e', 258}));
    write_file(dir / "b.ids", "drei\n");
    write_file(dir / "a.ids", "eins\nzwei\n");
    CHECK(Documents(dir / "?.txt", "--encode", BYTES).name(2) == "drei");
    const std::string a = dir / "a.txt";
    const std::string bytes = a + ": text is read as bytes, and the model has a vocabulary of 30522; ";
    CHECK(throws_with([&] { Documents(a, "--encode", special_tokens(30522)); },
                      bytes + "python3 scripts/text.py encode RUN " + a + " --tokenizer DIR --out OUT") == 2);
    CHECK(throws_with([&] { Documents(a, "--pairs", special_tokens(30522)); },
                      bytes + "make shards of it: python3 data/text.py --encoding bert --pairs lines " + a) == 2);
    const struct { const char* bytes; const char* text; } faults[] = {
        {"a\n\nb\n", "x.txt: line 2 has an empty document"}, {"a\tb\n\tc\n", "line 2 has an empty document"},
        {"\n", "line 1 has an empty"},
        {"a\tb\nc\t\n", "line 2 has an empty document"},
        {"a\tb\nc\n", "line 2: expected 2 documents separated by tabs, as in line 1, got 1"},
        {"a\nb\tc", "line 2: expected 1 documents separated by tabs, as in line 1, got 2"},
        {"a\nb\t", "line 2 has an empty document"}, {"", "is empty"}};
    for (const auto& f : faults) {
        write_file(dir / "x.txt", f.bytes);
        CHECK(refused(dir / "x.txt", f.text, BYTES) == 2);
    }
}

TEST_CASE("documents: a batch of groups is a pure function of seed and index", "[documents][P10]") {
    TempDir dir;
    write_file(dir / "train_0.bin", shard(0, 30, 3));
    write_file(dir / "train_1.bin", shard(30, 12, 3));
    const Documents d(dir / "train_*.bin", "--train", BERT);
    const int total = 14;
    for (const bool shuffle : {true, false}) {
        for (const int max_tokens : {64, 20, 13, 2}) {
            std::vector<std::vector<int>> seen;                     // of an epoch, one group after the other
            for (const int count : {1, 2, 7, 14}) {
                std::vector<std::vector<int>> rows((size_t)total * 3);
                for (int first = 0; first < total; first += count) {
                    GroupBatch b;
                    fill_groups(d, (uint64_t)(first + total * 5), count, 42, shuffle, max_tokens, b);
                    REQUIRE((b.groups == count && b.rows == 3 * count));
                    const int longest = *std::max_element(b.lengths.begin(), b.lengths.end());
                    REQUIRE(b.T == std::min((longest + 7) / 8 * 8, max_tokens));
                    for (int r = 0; r < b.rows; r++) {
                        const int* row = b.ids.data() + r * b.T;
                        const size_t n = (size_t)b.lengths[(size_t)r];
                        CHECK(std::all_of(row + n, row + b.T, [](int id) { return id == BERT.pad; }));
                        rows[(size_t)((first + r % count) * 3 + r / count)].assign(row, row + n);
                    }
                }
                if (seen.empty()) { seen = rows; }
                CHECK(rows == seen);
            }
            std::set<uint64_t> groups;
            for (uint64_t g = 0; g < (uint64_t)total; g++) {
                const uint64_t which = sample_window(g + 70, 14, 42, shuffle);
                groups.insert(which);
                for (size_t r = 0; r < 3; r++) { CHECK(seen[g * 3 + r] == cut(document(which * 3 + r), max_tokens)); }
            }
            CHECK(groups.size() == 14);
        }
    }
    GroupBatch b;
    CHECK(throws_with([&] { fill_groups(d, 0, 15, 42, true, 64, b); },
                      "expected a batch of 1 to 14 groups, which '") == 2);
    CHECK(throws_with([&] { fill_groups(d, 0, 0, 42, true, 64, b); }, "got 0 (use a smaller batch") == 2);
    CHECK(throws_with([&] { fill_groups(d, 0, 2, 42, true, 1, b); }, "cut to 1 tokens") == 2);
}

TEST_CASE("documents: no text is in a batch twice", "[documents]") {
    TempDir dir;
    // 40 groups: every fourth has the query q0, every fifth the positive p0, group 7 its positive as a negative
    std::string text;
    for (int g = 0; g < 40; g++) {
        const std::string own = std::to_string(g);
        const std::string query = g % 4 == 0 ? "q0" : "q" + own;
        const std::string positive = g % 5 == 0 ? "p0" : "p" + own;
        const std::string negative = g == 7 ? positive : "n" + own;
        text += query + "\t" + positive + "\t" + negative + "\n";
    }
    write_file(dir / "groups.txt", text);
    const Documents d(dir / "groups.txt", "--pairs", BYTES, 3);
    int swapped = 0;
    for (const bool shuffle : {true, false}) {
        for (uint64_t first = 0; first < 80; first += 8) {
            GroupBatch b, again;
            fill_groups(d, first, 8, 42, shuffle, 64, b);
            fill_groups(d, first, 8, 42, shuffle, 64, again);
            CHECK((b.ids == again.ids && b.swapped == again.swapped));
            std::set<std::vector<int>> texts;
            for (int r = 0; r < b.rows; r++) { texts.emplace(b.ids.begin() + r * b.T, b.ids.begin() + (r + 1) * b.T); }
            CHECK(texts.size() == 24);
            // as many groups as were counted are not those of the order
            int others = 0;
            for (int g = 0; g < 8; g++) {
                const size_t query = 3 * (size_t)sample_window(first + (uint64_t)g, 40, 42, shuffle);
                const std::vector<int> negative = read(d, query + 2, 64);
                const int* row = b.ids.data() + (16 + g) * b.T;
                others += !std::equal(negative.begin(), negative.end(), row) || query == 21;
            }
            CHECK(others == b.swapped);
            swapped += b.swapped;
        }
    }
    CHECK(swapped > 20);
    GroupBatch b;
    fill_groups(d, 0, 23, 42, true, 64, b);
    CHECK(throws_with([&] { fill_groups(d, 0, 34, 42, true, 64, b); },
                      "too few different texts to fill a batch with none of them twice") == 2);
}

TEST_CASE("documents: a file that shrinks during a run is an error, one that is replaced does no harm", "[documents]") {
    TempDir dir;
    const std::string path = dir / "x.bin";
    write_file(path, shard(0, 20, 1));
    const Documents d(path, "--encode", BERT);
    write_file(path, shard(7, 20, 1));
    CHECK(read(d, 19, 64) == document(19));
    write_file(path, shard(0, 20, 1));
    const Documents shrunk(path, "--encode", BERT);
    resize_file(path, 1030);
    CHECK(throws_with([&] { read(shrunk, 19, 64); }, "x.bin: the file ends at byte") == 2);
}
