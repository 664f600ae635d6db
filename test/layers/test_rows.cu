// test_rows.cu -- gathered, scattered and added rows against plain loops.
#include "test/layers/rows_oracle.h"
#include "test/oracle.h"

TEST_CASE("rows oracle: scatter is the derivative of gather, drow of add_row", "[rows]") {
    Random random;
    INFO(random);
    const size_t N = 5, n = 3;
    const size_t C = 4;
    const std::vector<int> rows = {4, 0, 2};
    std::vector<double> x = as<double>(random.normals(N * C)), row = as<double>(random.normals(C));
    const std::vector<double> dout = as<double>(random.normals(N * C));
    std::vector<double> dx(N * C);
    for (size_t e = 0; e < n * C; e++) { dx[(size_t)rows[e / C] * C + e % C] = dout[e]; }
    auto gathered = [&] {
        double loss = 0;
        for (size_t e = 0; e < n * C; e++) { loss += x[(size_t)rows[e / C] * C + e % C] * dout[e]; }
        return loss;
    };
    auto added = [&] {
        double loss = 0;
        for (size_t e = 0; e < N * C; e++) { loss += (x[e] + row[e % C]) * dout[e]; }
        return loss;
    };
    check_gradient("dinp", gathered, x, dx, random, 20);
    check_gradient("drow", added, row, row_sums(std::vector<double>(C, 0.0), dout, N), random);
}

TEST_CASE("rows: gather and scatter", "[rows][asan]") {
    Random random;
    INFO(random);
    for (size_t C : {1, 33, 96}) {
        test_gather_scatter(random, 1, 1, C);
        test_gather_scatter(random, 57, 9, C);
        test_gather_scatter(random, 57, 57, C);
        test_gather_scatter(random, 57, 0, C);
    }
    test_gather_scatter(random, 1000, 150, 770);
}

TEST_CASE("rows: one row added to all", "[rows][asan]") {
    Random random;
    INFO(random);
    for (size_t N : {1, 2, 37, 70}) {
        for (size_t C : {1, 33, 96}) { test_add_row(random, N, C); }
    }
    test_add_row(random, 2049, 37);         // 64 slabs of 33 rows: the last ones are empty
    test_add_row(random, 300, 770);
}

TEST_CASE("rows: same bits for any number of threads", "[rows]") {
    Random random;
    INFO(random);
    const size_t N = 333, n = 100;
    const size_t C = 130;
    const Array<int> rows(some_rows(random, N, n));
    const Array<float> inp(random.normals(N * C)), row(random.normals(C)), dout(random.normals(N * C));
    const std::vector<float> x = random.normals(N * C);
    check_thread_invariance([&] {
        Array<float> gathered(n * C), scattered(x), added(x), drow(std::vector<float>(C, 0.0f)), scratch(MAX_SLABS * C);
        embedding_forward(gathered, rows, inp, n, (int)C, Stream(0));
        scatter_rows(scattered, dout, rows, n, (int)C, Stream(0));
        add_row(added, row, N, (int)C, Stream(0));
        add_row_sums(drow, scratch, view((const float*)dout, N, C), Stream(0));
        std::vector<float> all = gathered.host();
        for (const Array<float>* a : {&scattered, &added, &drow}) {
            const std::vector<float> v = a->host();
            all.insert(all.end(), v.begin(), v.end());
        }
        return all;
    });
}
