// Retrieval: figures equal to pytrec_eval's, exact search, files of embeddings, and encoding that forgets no document.
#include <map>
#include <set>

#include "llmc/lab/retrieval.h"
#include "test/catch.h"
#include "test/files.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace {

void use_threads(int n) {
#if defined(_OPENMP)
    omp_set_num_threads(n);
#else
    (void)n;
#endif
}

nlohmann::json fixture() {
    return parse_json<nlohmann::json>(read_file("test/fixtures/retrieval.json"), "retrieval.json");
}

Qrels fixture_qrels(const nlohmann::json& j, const TempDir& dir) {
    std::string text;
    for (const auto& line : j["qrels"]) { text += line.get<std::string>() + "\n"; }
    write_file(dir / "qrels.tsv", text);
    return read_qrels(dir / "qrels.tsv");
}

int refused(const TempDir& dir, const std::string& bytes, const std::string& text) {
    write_file(dir / "qrels.tsv", bytes);
    return throws_with([&] { read_qrels(dir / "qrels.tsv"); }, text);
}

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

void embed_documents(FakeModel& model, FakeActs& acts, const int* ids, const int* lengths, int rows, int T,
                     float* out) {
    CHECK((rows >= 1 && (size_t)rows <= sequences_that_fit(acts, T)));
    for (int r = 0; r < rows; r++) {
        uint64_t h = 0;
        CHECK((lengths[r] >= 2 && lengths[r] <= T));
        for (int t = 0; t < T; t++) {
            if (t < lengths[r]) { h = hash64(h, (uint64_t)ids[r * T + t]); } else { CHECK(ids[r * T + t] == 256); }
        }
        CHECK((ids[r * T] == 257 && ids[r * T + lengths[r] - 1] == 258));
        out[3 * r] = (float)(h & 0xffff);
        out[3 * r + 1] = (float)(h >> 48);
        out[3 * r + 2] = (float)lengths[r];
    }
    model.calls_T.push_back(T);
    model.calls_rows.push_back(rows);
}

} // namespace

TEST_CASE("retrieval: every figure is pytrec_eval's", "[retrieval]") {
    TempDir dir;
    const nlohmann::json j = fixture();
    const Qrels qrels = fixture_qrels(j, dir);
    CHECK(qrels.judgements == j["qrels"].size());
    int compared = 0, ties = 0;
    for (const auto& query : j["run"].items()) {
        const auto judged = qrels.queries.find(query.key());
        REQUIRE((judged != qrels.queries.end()) == j["expected"].contains(query.key()));
        if (judged == qrels.queries.end()) { continue; }
        std::vector<Ranked> found;
        std::set<float> scores;
        for (const auto& row : query.value()) {
            found.push_back({row[1].get<float>(), row[0].get<std::string>()});
            scores.insert(found.back().score);
        }
        ties += scores.size() < found.size();
        const std::vector<int> grades = ranked_grades(found, judged->second);
        const auto& wanted = j["expected"][query.key()];
        INFO("query " << query.key());
        const auto close = [](double a, double b) { return std::abs(a - b) < 1e-12; };
        for (const int k : {1, 3, 10, 100}) {
            CHECK(close(ndcg_at(grades, judged->second, k), wanted[strprintf("ndcg_cut_%d", k)]));
        }
        for (const int k : {1, 5, 10, 100}) {
            CHECK(close(recall_at(grades, judged->second, k), wanted[strprintf("recall_%d", k)]));
        }
        CHECK(close(reciprocal_rank(grades), wanted["recip_rank"]));
        compared++;
        std::reverse(found.begin(), found.end());               // the order in which the hits come decides nothing
        CHECK(ranked_grades(found, judged->second) == grades);
    }
    CHECK(compared == 18);
    CHECK(ties >= 10);
}

TEST_CASE("retrieval: a whole evaluation has pytrec_eval's means", "[retrieval]") {
    TempDir dir;
    const nlohmann::json j = fixture();
    const Qrels qrels = fixture_qrels(j, dir);
    // queries that ranked all documents: documents are axes, scores coordinates
    std::map<std::string, size_t> number;
    Embeddings queries, corpus;
    double ndcg = 0, mrr = 0;
    double recall10 = 0, n = 0;
    for (const auto& query : j["run"].items()) {
        if (query.value().size() != 42 || !j["expected"].contains(query.key())) { continue; }
        for (const auto& row : query.value()) { if (number.size() < 42) { number.emplace(row[0], number.size()); } }
        queries.names.push_back(query.key());
        queries.rows.resize(queries.names.size() * 42);
        for (const auto& row : query.value()) { queries.rows[(queries.size() - 1) * 42 + number.at(row[0])] = row[1]; }
        ndcg += j["expected"][query.key()]["ndcg_cut_10"].get<double>();
        recall10 += j["expected"][query.key()]["recall_10"].get<double>();
        mrr += j["expected"][query.key()]["recip_rank"].get<double>();
        n++;
    }
    REQUIRE(n >= 4);
    queries.C = corpus.C = 42;
    corpus.names.resize(42);
    corpus.rows.assign(42 * 42, 0.0f);
    for (const auto& d : number) {
        corpus.names[d.second] = d.first;
        corpus.rows[43 * d.second] = 3.0f;                      // becomes 1
    }
    const RetrievalScore s = evaluate_retrieval(queries, corpus, qrels, {10, 50});
    CHECK(s.queries == (size_t)n);
    CHECK(std::abs(s.ndcg - ndcg / n) < 1e-12);
    CHECK(std::abs(s.mrr - mrr / n) < 1e-12);
    CHECK(std::abs(s.recall[0].second - recall10 / n) < 1e-12);
    CHECK((s.depth == 50 && s.documents == 42 && s.missing == 0 && s.unjudged == 0 &&
           s.unasked == qrels.queries.size() - s.queries));
}

TEST_CASE("retrieval: bad judgements are refused by line", "[retrieval][asan]") {
    TempDir dir;
    write_file(dir / "qrels.tsv", "q1 0 d1 1\r\nq1\t0\td2\t-1\n  q2 x  d1   2");
    const Qrels q = read_qrels(dir / "qrels.tsv");
    CHECK((q.judgements == 3 && q.queries.at("q1").at("d2") == -1 && q.queries.at("q1").at("d1") == 1 &&
           q.queries.at("q2").at("d1") == 2));
    CHECK(refused(dir, "", "is empty") == 2);
    CHECK(refused(dir, "q 0 d 1\n\nq 0 e 1\n",
                  "qrels.tsv: line 2: expected 'query 0 document grade', got 0 fields") == 2);
    CHECK(refused(dir, "q 0 d 1\nq 0 e\n", "line 2: expected 'query 0 document grade', got 3 fields") == 2);
    CHECK(refused(dir, "q 0 e\n1\n", "line 1: expected 'query 0 document grade', got 3 fields") == 2);
    CHECK(refused(dir, "q 0 d 1 2\n", "got more than 4 fields") == 2);
    CHECK(refused(dir, "q 0 d 1\nq 0 d 2\n", "line 2: document d is judged twice for query q") == 2);
    for (const char* grade : {"x", "1x", "1.0", "0x1", "1001", "-1001", "99999999999999999999", "--1"}) {
        CHECK(refused(dir, strprintf("q 0 d 1\nq 0 e %s\n", grade),
                      strprintf("line 2: expected a grade from -1000 to 1000, a whole number, got '%s'", grade)) == 2);
    }
    CHECK(throws_with([&] { read_qrels(dir / "absent"); }, "absent: cannot open") == 2);
}

TEST_CASE("retrieval: search is exact, ties to the earlier document, on any number of threads", "[retrieval]") {
    struct Shape {
        size_t Q, N;
        int C;
    } shapes[] = {{1, 1, 1}, {3, 5, 7}, {33, 63, 16}, {2, 64, 17}, {70, 300, 33}, {5, 2001, 4}, {31, 257, 48}};
    for (const Shape& s : shapes) {
        std::vector<float> queries(s.Q * (size_t)s.C), documents(s.N * (size_t)s.C);
        // small integers: sums are exact
        for (size_t i = 0; i < queries.size(); i++) { queries[i] = (float)(hash64(1, i) % 5) - 2; }
        for (size_t i = 0; i < documents.size(); i++) { documents[i] = (float)(hash64(2, i) % 5) - 2; }
        for (const int k : {1, 4, 50, (int)s.N + 3}) {
            for (const int threads : {1, 2, 5}) {
                use_threads(threads);
                const auto best = search_top_k(queries.data(), s.Q, documents.data(), s.N, s.C, k);
                REQUIRE(best.size() == s.Q);
                int wrong = 0;
                for (size_t q = 0; q < s.Q; q++) {
                    std::vector<std::pair<int, int>> all;           // (minus the score, document)
                    for (size_t d = 0; d < s.N; d++) {
                        int score = 0;
                        for (int c = 0; c < s.C; c++) {
                            score +=
                                (int)queries[q * (size_t)s.C + (size_t)c] * (int)documents[d * (size_t)s.C + (size_t)c];
                        }
                        all.emplace_back(-score, (int)d);
                    }
                    std::sort(all.begin(), all.end());
                    all.resize(std::min((size_t)k, s.N));
                    REQUIRE(best[q].size() == all.size());
                    for (size_t r = 0; r < all.size(); r++) {
                        wrong += best[q][r].document != all[r].second || best[q][r].score != (float)-all[r].first;
                    }
                }
                CHECK(wrong == 0);
            }
        }
    }
    use_threads(2);
    const float x = 1.0f;
    CHECK(throws_with([&] { search_top_k(&x, 1, &x, 1, 1, 0); },
                      "expected at least 1 document and 1 channel, got 0 and 1") == 2);
    CHECK(throws_with([&] { search_top_k(&x, 1, &x, 0, 1, 1); }, "documents to search, got 0") == 2);
}

TEST_CASE("retrieval: a score depends on its query and document alone", "[retrieval]") {
    for (const int C : {1, 16, 63, 256}) {
        const size_t Q = 40, N = 133;
        const std::vector<float> q = random_rows(Q * (size_t)C, 3), d = random_rows((N + 1) * (size_t)C, 4);
        const auto all = search_top_k(q.data(), Q, d.data(), N, C, (int)N);
        // one further, other blocks and neighbours
        const auto moved = search_top_k(q.data() + C, Q - 1, d.data() + C, N, C, (int)N);
        int wrong = 0, compared = 0;
        double error = 0;
        for (size_t i = 1; i < Q; i++) {
            std::vector<float> score(N + 1, NAN);
            for (const Hit& hit : all[i]) {
                score[(size_t)hit.document] = hit.score;
                double exact = 0, size = 0;
                for (int c = 0; c < C; c++) {
                    const double product =
                        (double)q[i * (size_t)C + (size_t)c] * (double)d[(size_t)hit.document * (size_t)C + (size_t)c];
                    exact += product;
                    size += std::abs(product);
                }
                error = std::max(error, std::abs((double)hit.score - exact) / size);
            }
            for (const Hit& hit : moved[i - 1]) {
                if (hit.document + 1 == (int)N) { continue; }
                compared++;
                wrong += memcmp(&hit.score, &score[(size_t)hit.document + 1], 4) != 0;
            }
        }
        CHECK(wrong == 0);
        CHECK(compared == (int)((Q - 1) * (N - 1)));
        CHECK(error < 4.5e-7);                                  // measured: 1.5e-7
    }
}

// Whether the two files hold e
bool holds(const std::string& path, const std::string& ids, const Embeddings& e) {
    Safetensors file(path);
    Embeddings found = e;
    file.read_f32("embeddings", found.rows.data(), {e.size(), (size_t)e.C});
    std::string names;
    for (const std::string& name : e.names) { names += name + "\n"; }
    return same(found, e) && read_file(ids) == names && file.metadata["ids"] == sum_text(checksum(names));
}

TEST_CASE("retrieval: files of embeddings hold every bit", "[retrieval][asan]") {
    TempDir dir;
    const std::string path = dir / "corpus.safetensors", ids = dir / "corpus.ids";
    const Embeddings e = embeddings(5, random_rows(35, 1), "doc"), other = embeddings(5, random_rows(35, 2), "DOC");
    write_embeddings(path, e, {{"pos", "cable"}});
    CHECK(holds(path, ids, e));
    CHECK(Safetensors(path).metadata["pos"] == "cable");
    CHECK(list_directory(dir.path) == std::vector<std::string>({"corpus.ids", "corpus.safetensors"}));
    CHECK(read_file(ids) == "doc0\ndoc1\ndoc2\ndoc3\ndoc4\ndoc5\ndoc6\n");
    write_embeddings(path, other);                              // over the old ones
    CHECK(holds(path, ids, other));
    CHECK(throws_with([&] { write_embeddings(dir / "x.bin", e); },
                      "x.bin: embeddings go by names that end in .safetensors") == 2);
    CHECK(throws_with([&] { write_embeddings(dir / "none/x.safetensors", e); }, "cannot create") == 2);
    Embeddings bad = e;
    bad.names.pop_back();
    CHECK(throws_with([&] { write_embeddings(path, bad); }, "6 names and 35 values of rows of 5") == 2);
}

TEST_CASE("retrieval: every document is encoded once, whatever the batches", "[retrieval][asan]") {
    TempDir dir;
    std::string text;
    for (uint64_t i = 0; i < 97; i++) {
        text += std::string(1 + hash64(5, i) % 60, (char)('a' + i % 26)) + std::to_string(i) + "\n";
    }
    write_file(dir / "c.txt", text);
    const Documents documents(dir / "c.txt", "--corpus", special_tokens(260));
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
    const Documents groups(dir / "g.txt", "--corpus", special_tokens(260));
    CHECK(throws_with([&] { encode_documents(model, acts, groups, 16); },
                      "expected a collection, got groups of 2 documents") == 2);
}

TEST_CASE("retrieval: means, and what is not in them is counted and said", "[retrieval]") {
    TempDir dir;
    write_file(dir / "qrels.tsv", "q0 0 d0 1\nq1 0 d1 2\nq1 0 gone 1\nq2 0 d5 0\nq7 0 d1 1\nq8 0 d2 1\n");
    const Qrels qrels = read_qrels(dir / "qrels.tsv");
    // cosines: q0 . d0 = 1;  q1 = d2 first, then d1;  q2 has no relevant document;  q3 is not judged
    Embeddings corpus = embeddings(2, {5, 0, 0, 1, 2, 2, -1, 0, 0, -1, -1, -1}, "d");
    Embeddings queries = embeddings(2, {0.5f, 0, 1.0f, 1.5f, 1, 0, 0, 1}, "q");
    const RetrievalScore s = evaluate_retrieval(queries, corpus, qrels, {1, 3});
    CHECK((s.queries == 3 && s.unjudged == 1 && s.hopeless == 1 && s.unasked == 2 && s.missing == 1 &&
           s.documents == 6 && s.depth == 10));
    const double ndcg1 = (2 / std::log2(3.0)) / (2 + 1 / std::log2(3.0));
    CHECK(std::abs(s.ndcg - (1 + ndcg1 + 0) / 3) < 1e-12);
    CHECK(std::abs(s.mrr - (1 + 0.5 + 0) / 3) < 1e-12);
    CHECK(std::abs(s.recall[0].second - 1.0 / 3) < 1e-12);
    CHECK(std::abs(s.recall[1].second - 1.5 / 3) < 1e-12);
    for (size_t i = 0; i < 6; i++) {
        CHECK(std::hypot(corpus.rows[2 * i], corpus.rows[2 * i + 1]) == Approx(1.0).epsilon(1e-6));
    }
    const Json j = report_retrieval(s);
    CHECK(json_text(j).find("{\"kind\":\"retrieval\",\"ndcg@10\":") == 0);
    CHECK((j["ndcg@10"] == s.ndcg && j["recall@1"] == s.recall[0].second && j["recall@3"] == s.recall[1].second &&
           j["mrr"] == s.mrr));
    CHECK((j["queries"] == 3 && j["documents"] == 6 && j["unjudged"] == 1 && j["without_relevant"] == 1 &&
           j["unasked"] == 2 && j["missing"] == 1));

    Embeddings strangers = embeddings(2, {1, 1}, "nobody");
    CHECK(throws_with([&] { evaluate_retrieval(strangers, corpus, qrels); },
                      "qrels.tsv: judges none of the 1 queries") == 2);
    Embeddings wide = embeddings(3, {1, 1, 1}, "q");
    CHECK(throws_with([&] { evaluate_retrieval(wide, corpus, qrels); }, "queries of 3 channels, documents of 2") == 2);
    Embeddings broken = embeddings(2, {1, 1, NAN, 1}, "q");
    CHECK(throws_with([&] { evaluate_retrieval(broken, corpus, qrels); }, "the embedding of q1 is not finite") == 2);
    CHECK(throws_with([&] { evaluate_retrieval(queries, corpus, qrels, {0}); }, "recall at less than 1") == 2);
    Embeddings zero = embeddings(2, {0, 0, 3e30f, 4e30f}, "q");    // a length of 0, and one whose square overflows
    unit_rows(zero);
    CHECK((zero.rows[0] == 0 && zero.rows[1] == 0 && zero.rows[2] == Approx(0.6).epsilon(1e-6) &&
           zero.rows[3] == Approx(0.8).epsilon(1e-6)));
}

TEST_CASE("retrieval: what is found perfectly scores 1", "[retrieval]") {
    TempDir dir;
    std::string text;
    for (int i = 0; i < 200; i += 5) { text += strprintf("q%d 0 d%d 1\n", i / 5, i); }
    write_file(dir / "qrels.tsv", text);
    Embeddings corpus = embeddings(24, random_rows(200 * 24, 8), "d"), queries;
    queries.C = 24;
    for (int i = 0; i < 200; i += 5) {
        queries.names.push_back(strprintf("q%d", i / 5));
        for (int c = 0; c < 24; c++) {
            queries.rows.push_back(2.5f * corpus.rows[(size_t)(i * 24 + c)] +
                                   0.01f * (float)normal01(9, (uint64_t)i, (uint64_t)c));
        }
    }
    const RetrievalScore s = evaluate_retrieval(queries, corpus, read_qrels(dir / "qrels.tsv"));
    CHECK((s.ndcg == 1.0 && s.mrr == 1.0 && s.recall[0].second == 1.0 && s.recall[1].second == 1.0 && s.queries == 40));
}
