// test_embedding.cu -- the token embedding and the plan of its backward.
#include "test/oracle.h"

#include "llmc/embedding.cuh"

namespace {

void test_embedding(Random& random, size_t N, size_t V, size_t C, bool repeated) {
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
    plan.build(tokens.data(), N);
    const Array<int> d_tokens(tokens), rows(plan.rows), first(plan.first);
    Array<float> d_out(N * C), d_dwte(dwte0);
    embedding_forward(d_out, d_tokens, Array<float>(wte), N, (int)C, Stream(0));
    embedding_backward(d_dwte, Array<float>(dout), d_tokens, rows, first, plan.groups(), (int)C, Stream(0));
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

TEST_CASE("the embedding's plan groups equal tokens in the order of their rows", "[embedding][asan]") {
    EmbeddingPlan plan;
    const std::vector<int> tokens = {7, 0, 7, 3, 0, 7, 9};
    plan.build(tokens.data(), tokens.size());
    CHECK(plan.rows == std::vector<int>{1, 4, 3, 0, 2, 5, 6});
    CHECK(plan.first == std::vector<int>{0, 2, 3, 6, 7});
    CHECK(plan.groups() == 4);
    plan.build(tokens.data(), 2);           // a plan is built anew for every micro-batch
    CHECK(plan.rows == std::vector<int>{1, 0});
    CHECK(plan.first == std::vector<int>{0, 1, 2});
    plan.build(tokens.data(), 1);
    CHECK(plan.groups() == 1);
}

TEST_CASE("embedding: same bits for any number of threads", "[embedding]") {
    Random random;
    INFO(random);
    const size_t N = 500, V = 7;
    const size_t C = 64;
    std::vector<int> tokens(N);
    for (int& t : tokens) { t = random.integer(0, (int)V - 1); }
    EmbeddingPlan plan;
    plan.build(tokens.data(), N);
    const Array<int> d_tokens(tokens), rows(plan.rows), first(plan.first);
    const Array<float> dout(random.normals(N * C));
    check_thread_invariance([&] {
        Array<float> dwte(std::vector<float>(V * C, 0.0f));
        embedding_backward(dwte, dout, d_tokens, rows, first, plan.groups(), (int)C, Stream(0));
        return dwte.host();
    });
}
