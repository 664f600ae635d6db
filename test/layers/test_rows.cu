// test_rows.cu -- gathered, scattered and added rows against plain loops.
#include "test/oracle.h"

#include "llmc/rows.cuh"

namespace {

// n distinct rows of N, in no order
std::vector<int> some_rows(Random& random, size_t N, size_t n) {
    std::vector<int> all(N);
    for (size_t i = 0; i < N; i++) { all[i] = (int)i; }
    std::shuffle(all.begin(), all.end(), random.engine);
    return std::vector<int>(all.begin(), all.begin() + (long)n);
}

void test_gather_scatter(Random& random, size_t N, size_t n, size_t C) {
    INFO("N " << N << ", n " << n << ", C " << C);
    const std::vector<int> rows = some_rows(random, N, n);
    const auto inp = random.normals(N * C);
    const auto dout = random.normals(n * C);
    const auto before = random.normals(N * C);
    std::vector<float> want(n * C), dwant = before;
    for (size_t k = 0; k < n; k++) {
        for (size_t c = 0; c < C; c++) {
            want[k * C + c] = inp[(size_t)rows[k] * C + c];
            dwant[(size_t)rows[k] * C + c] = dout[k * C + c];
        }
    }
    const Array<int> d_rows(rows);
    Array<float> out(n * C), dinp(before);
    gather_rows(out, Array<float>(inp), d_rows, n, (int)C, Stream(0));
    scatter_rows(dinp, Array<float>(dout), d_rows, n, (int)C, Stream(0));
    CHECK(same_bits(out.host(), want));
    CHECK(same_bits(dinp.host(), dwant));               // the other rows as they were
}

template <class R> std::vector<R> row_sums(const std::vector<R>& before, const std::vector<R>& dout, size_t N) {
    std::vector<R> d = before;
    for (size_t n = 0; n < N; n++) {
        for (size_t c = 0; c < d.size(); c++) { d[c] += dout[n * d.size() + c]; }
    }
    return d;
}

void test_add_row(Random& random, size_t N, size_t C) {
    INFO("N " << N << ", C " << C);
    const auto x = random.normals(N * C);
    const auto row = random.normals(C);
    const auto dout = random.normals(N * C);
    const auto before = random.normals(C);
    std::vector<float> want(N * C);
    for (size_t e = 0; e < N * C; e++) { want[e] = x[e] + row[e % C]; }
    Array<float> out(x), drow(before), scratch(MAX_SLABS * C);
    add_row(out, Array<float>(row), N, (int)C, Stream(0));
    add_row_backward(drow, scratch, Array<float>(dout), N, (int)C, Stream(0));
    CHECK(same_bits(out.host(), want));
    // partial sums of N terms of size 1 are of size sqrt(N), wherever they end
    check_close("drow", drow.host(), row_sums(as<double>(before), as<double>(dout), N), row_sums(before, dout, N),
                std::sqrt((double)N));
}

} // namespace

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

TEST_CASE("rows: gather and scatter", "[rows][race][asan]") {
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

TEST_CASE("rows: one row added to all", "[rows][race][asan]") {
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
        gather_rows(gathered, inp, rows, n, (int)C, Stream(0));
        scatter_rows(scattered, dout, rows, n, (int)C, Stream(0));
        add_row(added, row, N, (int)C, Stream(0));
        add_row_backward(drow, scratch, dout, N, (int)C, Stream(0));
        std::vector<float> all = gathered.host();
        for (const Array<float>* a : {&scattered, &added, &drow}) {
            const std::vector<float> v = a->host();
            all.insert(all.end(), v.begin(), v.end());
        }
        return all;
    });
}
