// test_embedding.cu -- the token embedding and the plan of its backward.
#include "test/layers/embedding_oracle.h"
#include "test/oracle.h"

TEST_CASE("embedding, forward and backward", "[embedding][asan]") {
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

TEST_CASE("embedding, tokens of thousands of rows in parts", "[embedding][asan]") {
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
