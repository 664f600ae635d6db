// --encode: files of embeddings, and encoding that forgets no document.
#include "llmc/lab/embed.h"
#include "test/catch.h"
#include "test/files.h"

namespace {

std::vector<float> random_rows(size_t n, uint64_t seed) {
    std::vector<float> x(n);
    for (size_t i = 0; i < n; i++) { x[i] = (float)normal01(seed, 1, i); }
    return x;
}

Embeddings embeddings(int C, const std::vector<float>& rows, const std::string& prefix) {
    Embeddings e{C, rows, {}};
    for (size_t i = 0; i < rows.size() / (size_t)C; i++) { e.names.push_back(prefix + std::to_string(i)); }
    return e;
}

bool same(const Embeddings& a, const Embeddings& b) { return a.C == b.C && a.names == b.names && a.rows == b.rows; }

// A model whose embedding of a document says which ids it has, in which order and how many.
struct FakeModel { struct { int C = 3; } config; std::vector<int> calls_T, calls_rows; };
struct FakeActs { int B, T; };

// A piece has its document's embedding, with its own number.
void embed_documents(FakeModel& model, FakeActs& acts, const int* ids, const int* lengths, int rows, int T, float* out,
                     int piece) {
    CHECK((rows >= 1 && (size_t)rows <= sequences_that_fit(acts, T)));
    for (int r = 0; r < rows; r++) {
        uint64_t h = 0;
        CHECK((lengths[r] >= 2 && lengths[r] <= T));
        for (int t = 0; t < T; t++) {
            if (t < lengths[r]) { h = hash64(h, (uint64_t)ids[r * T + t]); } else { CHECK(ids[r * T + t] == 256); }
        }
        CHECK((ids[r * T] == 257 && ids[r * T + lengths[r] - 1] == 258));
        for (int k = 0; k < (piece > 0 ? T / piece : 1); k++, out += 3) {
            out[0] = (float)(h & 0xffff);
            out[1] = (float)(h >> 48);
            out[2] = (float)(lengths[r] + 1000 * k);
        }
    }
    model.calls_T.push_back(T);
    model.calls_rows.push_back(rows);
}

// Whether the two files of a directory hold e
bool holds(const std::string& dir, const Embeddings& e) {
    Safetensors file(dir + "/embeddings.safetensors");
    Embeddings found = e;
    read_f32(file, "embeddings", found.rows.data(), {e.size(), (size_t)e.C});
    std::string names;
    for (const std::string& name : e.names) { names += name + "\n"; }
    return same(found, e) && read_file(dir + "/embeddings.ids") == names &&
           file.metadata["ids"] == sum_text(checksum(names));
}

} // namespace

TEST_CASE("encode: files of embeddings hold every bit", "[encode][asan]") {
    TempDir dir;
    const Embeddings e = embeddings(5, random_rows(35, 1), "doc"), other = embeddings(5, random_rows(35, 2), "DOC");
    write_embeddings(dir.path, e, {{"pos", "cable"}});
    CHECK(holds(dir.path, e));
    CHECK(Safetensors(dir / "embeddings.safetensors").metadata["pos"] == "cable");
    CHECK(list_directory(dir.path) == std::vector<std::string>({"embeddings.ids", "embeddings.safetensors"}));
    CHECK(read_file(dir / "embeddings.ids") == "doc0\ndoc1\ndoc2\ndoc3\ndoc4\ndoc5\ndoc6\n");
    write_embeddings(dir.path, other);                          // over the old ones
    CHECK(holds(dir.path, other));
    CHECK(throws_with([&] { write_embeddings(dir / "none", e); }, "cannot create") == 2);
    Embeddings bad = e;
    bad.names.pop_back();
    CHECK(throws_with([&] { write_embeddings(dir.path, bad); }, "6 names and 35 values of rows of 5") == 2);
}

TEST_CASE("encode: a batch of rows ends where it has no room, or too much padding", "[encode]") {
    const std::vector<size_t> lengths = {200, 200, 192, 24, 16, 16};
    const auto sizes = [&](const FakeActs& acts, size_t padding) {
        std::vector<size_t> found;
        for (const RowBatch& b : row_batches(lengths.size(), acts, [&](size_t i) { return lengths[i]; }, padding)) {
            found.insert(found.end(), {b.first, b.n, b.T});
        }
        return found;
    };
    CHECK(sizes({6, 256}, SIZE_MAX) == std::vector<size_t>({0, 6, 200}));
    CHECK(sizes({6, 256}, 64) == std::vector<size_t>({0, 3, 200, 3, 3, 24}));
    CHECK(sizes({6, 256}, 8) == std::vector<size_t>({0, 3, 200, 3, 2, 24, 5, 1, 16}));
    CHECK(sizes({2, 256}, 64) == std::vector<size_t>({0, 2, 200, 2, 1, 192, 3, 3, 24}));
}

TEST_CASE("encode: every document once, whatever the batches", "[encode][asan]") {
    TempDir dir;
    std::string text;
    for (uint64_t i = 0; i < 97; i++) {
        text += std::string(1 + hash64(5, i) % 60, (char)('a' + i % 26)) + std::to_string(i) + "\n";
    }
    write_file(dir / "c.txt", text);
    const Documents documents(dir / "c.txt", "--encode", special_tokens(260));
    for (const int max_tokens : {64, 40, 9, 2}) {
        Embeddings first;
        for (const FakeActs shape : {FakeActs{1, 64}, FakeActs{3, 64}, FakeActs{40, 100}, FakeActs{97, 64}}) {
            FakeModel model;
            FakeActs acts = shape;
            const Embeddings e = encode_documents(model, acts, documents, max_tokens);
            REQUIRE((e.C == 3 && e.size() == 97 && e.names[96] == "96"));
            for (size_t i = 0; i < 97; i++) {
                CHECK(e.rows[3 * i + 2] == (float)std::min(documents.length(i), (uint64_t)max_tokens));
            }
            if (first.C == 0) { first = e; }
            CHECK(same(e, first));
            if (max_tokens == 40) {
                FakeModel other;
                const Embeddings pieces = encode_documents(other, acts, documents, 40, 10);
                size_t at = 0;
                for (size_t i = 0; i < 97; i++) {
                    for (int k = 0; k * 10 < e.rows[3 * i + 2]; k++, at++) {
                        CHECK(pieces.names[at] == strprintf("%zu:%d", i, k));
                        CHECK(pieces.rows[3 * at + 2] == e.rows[3 * i + 2] + 1000.0f * (float)k);
                    }
                }
                CHECK((pieces.size() == at && at > 250));
            }
            CHECK(std::is_sorted(model.calls_T.rbegin(), model.calls_T.rend()));
            CHECK(std::accumulate(model.calls_rows.begin(), model.calls_rows.end(), 0) == 97);
            for (size_t i = 0; i < model.calls_T.size(); i++) {
                CHECK((model.calls_T[i] % 8 == 0 || model.calls_T[i] == max_tokens));
            }
            for (size_t i = 0; i + 1 < model.calls_T.size(); i++) {
                CHECK((size_t)model.calls_rows[i] == sequences_that_fit(acts, model.calls_T[i]));
            }
        }
    }
    // of 200 tokens there are 6 pieces of 33, but 4 tiles of 64 and 2 chunks of 128
    CHECK(sequences_that_fit(FakeActs{1, 200}, 33) == 2);
    CHECK(sequences_that_fit(FakeActs{3, 64}, 40) == 3);            // 4 by the tokens
    CHECK(sequences_that_fit(FakeActs{1, 192}, 65) == 1);           // 2 by the tokens, 2 by chunks
    CHECK(sequences_that_fit(FakeActs{1, 200}, 120) == 1);          // 2 by tiles, 2 by chunks
    CHECK(sequences_that_fit(FakeActs{3, 128}, 64) == 3);           // 6 by the tokens and tiles
    CHECK(sequences_that_fit(FakeActs{1, 64}, 64) == 1);
    FakeModel model;
    FakeActs acts{4, 16};
    CHECK(throws_with([&] { encode_documents(model, acts, documents, 17); },
                      "expected a length of 2 to 16 tokens, got 17") == 2);
    write_file(dir / "g.txt", "a\tb\n");
    const Documents groups(dir / "g.txt", "--encode", special_tokens(260));
    CHECK(throws_with([&] { encode_documents(model, acts, groups, 16); },
                      "expected a collection, got groups of 2 documents") == 2);
}
