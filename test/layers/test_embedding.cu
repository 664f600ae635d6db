// test_embedding.cu -- the token embedding and the plan of its backward.
#include "test/oracle.h"

#include "llmc/embedding.cuh"

namespace {

// A plan on the device
struct Rows {
    Array<int> rows, first, hot;
    EmbeddingRows on_device;
    explicit Rows(const EmbeddingPlan& plan) : rows(plan.rows), first(plan.first), hot(plan.hot) {
        on_device.rows = rows;
        on_device.first = first;
        on_device.hot = hot;
        on_device.count(plan);
    }
};

void test_embedding(Random& random, size_t N, size_t V, size_t C, bool repeated,
                    int part = EMBEDDING_PART) {
    INFO("N " << N << ", V " << V << ", C " << C << (repeated ? ", one token only" : ""));
    std::vector<int> tokens(N);
    for (int& t : tokens) { t = repeated ? (int)V - 1 : random.integer(0, (int)V - 1); }
    const auto wte = random.normals(V * C);
    const auto dout = random.normals(N * C);
    const auto dwte0 = random.normals(V * C);
    std::vector<float> out(N * C), plain = dwte0;
    std::vector<double> dwte = as<double>(dwte0);
    for (size_t n = 0; n < N; n++) {
        for (size_t c = 0; c < C; c++) {
            out[n * C + c] = wte[(size_t)tokens[n] * C + c];
            dwte[(size_t)tokens[n] * C + c] += dout[n * C + c];
            plain[(size_t)tokens[n] * C + c] += dout[n * C + c];
        }
    }
    EmbeddingPlan plan;
    plan.build(tokens.data(), N, part);
    const Array<int> d_tokens(tokens);
    const Rows rows(plan);
    Array<float> d_out(N * C), d_dwte(dwte0), partial(std::max(plan.hot_parts() * C, (size_t)1));
    embedding_forward(d_out, d_tokens, Array<float>(wte), N, (int)C, Stream(0));
    embedding_backward(d_dwte, partial, Array<float>(dout), d_tokens, rows.on_device, (int)C, Stream(0));
    CHECK(same_bits(d_out.host(), out));
    // partial sums of up to N terms of size 1 are of size sqrt(N), wherever they end
    check_close("dwte", d_dwte.host(), dwte, plain, std::sqrt((double)N));
}

} // namespace

TEST_CASE("embedding, forward and backward", "[embedding][race][asan]") {
    Random random;
    INFO(random);
    for (size_t N : {1, 2, 37}) {
        for (size_t C : {1, 37, 64}) {
            test_embedding(random, N, 11, C, false);
            test_embedding(random, N, 11, C, true);
        }
    }
}

TEST_CASE("embedding, large shapes", "[embedding][asan]") {
    Random random;
    INFO(random);
    test_embedding(random, 1000, 30522, 64, false);
    test_embedding(random, 1000, 3, 770, false);
    test_embedding(random, 1000, 5, 64, true);
}

TEST_CASE("embedding, tokens of thousands of rows in parts", "[embedding][race][asan]") {
    Random random;
    INFO(random);
    for (int part : {1, 7, 64, 999, 1000}) {
        test_embedding(random, 1000, 5, 37, false, part);
        test_embedding(random, 1000, 5, 8, true, part);
    }
    test_embedding(random, 5000, 3, 8, false, 64);
}

TEST_CASE("the embedding's plan groups equal tokens in the order of their rows", "[embedding][asan]") {
    EmbeddingPlan plan;
    const std::vector<int> tokens = {7, 0, 7, 3, 0, 7, 9};
    plan.build(tokens.data(), tokens.size());
    CHECK(plan.rows == std::vector<int>{1, 4, 3, 0, 2, 5, 6});
    CHECK(plan.first == std::vector<int>{0, 2, 3, 6, 7});
    CHECK(plan.parts() == 4);
    CHECK(plan.hot_parts() == 0);
    plan.build(tokens.data(), 2);           // a plan is built again for every micro-batch
    CHECK(plan.rows == std::vector<int>{1, 0});
    CHECK(plan.first == std::vector<int>{0, 1, 2});
    plan.build(tokens.data(), 1);
    CHECK(plan.parts() == 1);
}

TEST_CASE("the embedding's plan cuts the rows of hot tokens into parts, which come first", "[embedding][asan]") {
    EmbeddingPlan plan;
    const std::vector<int> tokens = {7, 0, 7, 3, 0, 7, 9, 7, 9, 9, 7};
    plan.build(tokens.data(), tokens.size(), 2);
    CHECK(plan.rows == std::vector<int>{0, 2, 5, 7, 10, 6, 8, 9, 1, 4, 3});
    CHECK(plan.first == std::vector<int>{0, 2, 4, 5, 7, 8, 10, 11});
    CHECK(plan.hot == std::vector<int>{0, 3, 5});
    CHECK(plan.hot_tokens() == 2);
    CHECK(plan.hot_parts() == 5);
    plan.build(tokens.data(), tokens.size(), 5);            // five rows of token 7 are not more than 5
    CHECK(plan.hot == std::vector<int>{0});
    CHECK(plan.parts() == 4);
}

TEST_CASE("embedding: same bits for any number of threads", "[embedding]") {
    Random random;
    INFO(random);
    const size_t N = 1000, V = 7;
    const size_t C = 64;
    std::vector<int> tokens(N);
    for (int& t : tokens) { t = random.integer(0, (int)V - 1); }
    EmbeddingPlan plan;
    plan.build(tokens.data(), N, 64);                       // all seven are hot
    const Array<int> d_tokens(tokens);
    const Rows rows(plan);
    const Array<float> dout(random.normals(N * C));
    check_thread_invariance([&] {
        Array<float> dwte(std::vector<float>(V * C, 0.0f));
        Array<float> partial(plan.hot_parts() * C);
        embedding_backward(dwte, partial, dout, d_tokens, rows.on_device, (int)C, Stream(0));
        return dwte.host();
    });
}
