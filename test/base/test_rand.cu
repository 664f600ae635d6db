// test_rand.cu -- counter-based random numbers and initial values. The seeds are fixed: what is tested are statistics.
#include <map>

#include "test/oracle.h"

#include "llmc/base/math.h"
#include "llmc/base/tensor.h"

TEST_CASE("mix64 is SplitMix64's", "[rand][asan]") {
    // the reference implementation's first three outputs of seed 0, whose state grows by the same odd constant
    CHECK(mix64(0) == 0xe220a8397b1dcdafull);
    CHECK(mix64(0x9e3779b97f4a7c15ull) == 0x6e789e6aa1b965f4ull);
    CHECK(mix64(2 * 0x9e3779b97f4a7c15ull) == 0x06c45d188009454full);
}

TEST_CASE("hash64 tells its words apart", "[rand]") {
    std::map<uint64_t, int> seen;
    for (uint64_t seed = 0; seed < 20; seed++) {
        for (uint64_t a = 0; a < 20; a++) {
            for (uint64_t b = 0; b < 20; b++) { seen[hash64(seed, a, b)]++; }
        }
    }
    CHECK(seen.size() == 8000);
    CHECK(hash64(1, 2, 3) == hash64(1, 2, 3));
}

TEST_CASE("uniform01 is uniform", "[rand]") {
    const int n = 1 << 20, bins = 64;
    std::vector<int> count(bins);
    double sum = 0, lag = 0;
    double before = 0;
    bool inside = true;
    for (int i = 0; i < n; i++) {
        const double u = uniform01(7, 3, (uint64_t)i);
        inside = inside && u >= 0 && u < 1;
        count[(size_t)(u * bins)]++;
        sum += u;
        lag += (u - 0.5) * (before - 0.5);
        before = u;
    }
    CHECK(inside);
    double chi2 = 0;
    for (int c : count) { chi2 += ((double)c - n / bins) * ((double)c - n / bins) / (n / bins); }
    CHECK(std::fabs(chi2 - (bins - 1)) <= 4 * std::sqrt(2.0 * (bins - 1)));            // 4 standard deviations
    CHECK(std::fabs(sum / n - 0.5) <= 4 / std::sqrt(12.0 * n));
    CHECK(std::fabs(lag / n) <= 4 / 12.0 / std::sqrt((double)n));                       // neighbours are independent
}

TEST_CASE("normal01 is standard normal", "[rand]") {
    const int n = 1 << 20;
    double m[5] = {}, pair = 0;
    int beyond2 = 0;
    double previous = 0;
    for (int i = 0; i < n; i++) {
        const double x = normal01(11, 5, (uint64_t)i);
        for (int k = 1; k <= 4; k++) { m[k] += std::pow(x, k) / n; }
        beyond2 += std::fabs(x) > 2;
        if (i & 1) { pair += x * previous; }            // both values of one Box-Muller pair
        previous = x;
    }
    // 4 standard deviations of each moment: E[x^2k] are 1, 3, 15, 105
    const double s = 4 / std::sqrt((double)n);
    CHECK(std::fabs(m[1]) <= s);
    CHECK(std::fabs(m[2] - 1) <= s * std::sqrt(2.0));
    CHECK(std::fabs(m[3]) <= s * std::sqrt(15.0));
    CHECK(std::fabs(m[4] - 3) <= s * std::sqrt(96.0));
    CHECK(std::fabs(beyond2 / (double)n - std::erfc(2 / std::sqrt(2.0))) <= s * 0.21);
    CHECK(std::fabs(pair / (n / 2)) <= s * std::sqrt(2.0));
}

TEST_CASE("permute is a permutation of any length", "[rand][asan]") {
    for (uint64_t n : {1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 255, 1000, 1024, 1025, 4097}) {
        std::vector<int> hit(n);
        for (uint64_t i = 0; i < n; i++) {
            const uint64_t j = permute(i, n, 42, 1);
            REQUIRE(j < n);
            hit[j]++;
        }
        INFO("n " << n);
        CHECK(std::count(hit.begin(), hit.end(), 1) == (long)n);
    }
    CHECK(permute(123456789012ull, 1ull << 40, 1, 1) < (1ull << 40));
}

TEST_CASE("permute: another seed or stream, another order, and none of them the identity", "[rand]") {
    const uint64_t n = 1000;
    int same_seed = 0, same_stream = 0;
    int fixed = 0, next = 0;
    for (uint64_t i = 0; i < n; i++) {
        same_seed += permute(i, n, 1, 1) == permute(i, n, 2, 1);
        same_stream += permute(i, n, 1, 1) == permute(i, n, 1, 2);
        fixed += permute(i, n, 1, 1) == i;
        next += i + 1 < n && permute(i + 1, n, 1, 1) == permute(i, n, 1, 1) + 1;
    }
    // each is Poisson with mean 1
    CHECK(same_seed <= 8);
    CHECK(same_stream <= 8);
    CHECK(fixed <= 8);
    CHECK(next <= 8);
}

TEST_CASE("permute: an order is the same in every version", "[rand]") {
    // by a few lines of Python: the Feistel network of as few bits, an even number and at least 2, as n needs
    const std::vector<std::vector<uint64_t>> orders = {{0, 1}, {0, 1, 2}, {0, 3, 2, 1}, {2, 0, 3, 6, 5, 4, 1}};
    for (const std::vector<uint64_t>& order : orders) {
        for (uint64_t i = 0; i < order.size(); i++) { CHECK(permute(i, order.size(), 42, 1) == order[i]); }
    }
    CHECK(permute(0, 1000, 42, 1) == 719);
    CHECK(permute(12345, 1ull << 40, 42, 1) == 942583428211ull);
}

TEST_CASE("permute is uniform over positions", "[rand]") {
    // the tenth of 1000 places that item 333 lands in, over many streams
    std::vector<int> count(10);
    const int trials = 20000;
    for (int s = 0; s < trials; s++) { count[permute(333, 1000, 9, (uint64_t)s) / 100]++; }
    double chi2 = 0;
    for (int c : count) { chi2 += (c - trials / 10.0) * (c - trials / 10.0) / (trials / 10.0); }
    CHECK(chi2 <= 9 + 4 * std::sqrt(18.0));
}

namespace {

TensorTable table_of(std::initializer_list<TensorSpec> specs) {
    TensorTable t;
    for (const TensorSpec& s : specs) { t.add(s); }
    return t;
}

} // namespace

TEST_CASE("a table lays its tensors out without overlap, each 256-byte aligned", "[tensor][asan]") {
    const TensorTable t = table_of({{"a", 0, 3, 5}, {"b", 4, 7, 0}, {"c", 2, 64, 1}});
    CHECK(t.specs[0].size() == 15);
    CHECK(t.specs[1].size() == 28);
    CHECK(t.specs[2].size() == 128);
    CHECK(t.elements() == 171);
    CHECK(t.total == 64 + 64 + 128);
    for (size_t i = 0; i < 3; i++) {
        CHECK(t.offsets[i] % 64 == 0);
        CHECK((i == 0 || t.offsets[i] >= t.offsets[i - 1] + t.specs[i - 1].size()));
    }
    std::vector<float> data(t.total);
    CHECK(t.pointer(data.data(), "b")(3) == data.data() + t.offsets[1] + 21);
    CHECK(t.pointer(data.data(), "a")(3) == data.data());                   // one for all layers
    CHECK(t.find("d") == -1);
    CHECK(throws_with([&] { t.index("d"); }, "no tensor named d") == EXIT_BAD_INPUT);
}

TEST_CASE("parameters are laid out layer by layer, in blocks of whole units", "[tensor][asan]") {
    const size_t unit = SLICE_UNIT;
    // of the model, of three layers, and an encoding's: one of each layer, and one that all share
    TensorTable t = table_of({{"a", 0, 3, 5}, {"b", 3, 7, 0}, {"c", 3, unit, 2}, {"d", 0, unit, 1}, {"e", 3, 2, 0},
                              {"f", 0, 100, 0}});
    t.lay_out_by_layer(4);
    const std::vector<size_t> sizes = {unit, 2 * unit, 3 * unit, 3 * unit, 3 * unit};
    REQUIRE(t.blocks.size() == sizes.size());
    size_t at = 0;
    for (size_t b = 0; b < sizes.size(); b++) {
        CHECK(t.blocks[b].begin == at);
        CHECK(t.blocks[b].size() == sizes[b]);
        at = t.blocks[b].end;
    }
    CHECK(t.total == at);
    std::vector<int> taken(t.total);
    for (size_t i = 0; i < t.specs.size(); i++) {
        const size_t n = t.specs[i].layer_size();
        for (int l = 0; l < imax(t.specs[i].layers, 1); l++) {
            const size_t from = t.offset(i, l);
            const bool of_encoding = i >= 4, of_model = t.specs[i].layers == 0;
            size_t block = (size_t)l + 2;
            if (of_encoding || of_model) { block = of_model && !of_encoding; }
            CHECK((from % 64 == 0 || i == 4));                          // an encoding's layers are side by side
            CHECK((from >= t.blocks[block].begin && from + n <= t.blocks[block].end));
            for (size_t e = 0; e < n; e++) { taken[from + e]++; }
            CHECK(t.pointer(taken.data(), t.specs[i].name)(l) == taken.data() + from);
        }
    }
    CHECK(*std::max_element(taken.begin(), taken.end()) == 1);
    // the pieces of all slices are all elements, each once, under its number in the tensor
    for (size_t length : {unit, t.total, (size_t)1000}) {
        std::vector<std::vector<int>> found(t.specs.size());
        for (size_t i = 0; i < found.size(); i++) { found[i].resize(t.specs[i].size()); }
        size_t pieces = 0;
        bool right = true;
        for (size_t begin = 0; begin < t.total; begin += length) {
            const Slice slice = {begin, std::min(begin + length, t.total)};
            for (const TensorPiece& p : t.pieces(slice)) {
                right = right && p.at >= slice.begin && p.at + p.size <= slice.end;
                const size_t n = t.specs[p.tensor].layer_size();
                for (size_t e = p.first; e < p.first + p.size; e++) {
                    right = right && p.at + (e - p.first) == t.offset(p.tensor, (int)(e / n)) + e % n;
                    found[p.tensor][e]++;
                }
                pieces++;
            }
        }
        for (const auto& f : found) { right = right && std::count(f.begin(), f.end(), 1) == (ptrdiff_t)f.size(); }
        CHECK(right);
        if (length == t.total) { CHECK(pieces == 3 + 3 + 4); }          // "e" has its layers side by side
    }
}

TEST_CASE("initial values follow the table's rules", "[tensor][asan]") {
    const size_t rows = 1000, cols = 50;
    const TensorTable t = table_of({{"w", 2, rows + 3, cols, normal(0.02f)}, {"u", 0, rows, cols, uniform(-1, 3)},
                                    {"k", 0, 5, 0, constant(7)}});
    const std::vector<FileTensor> files = {{"w0", "w", 0, 0, rows}, {"w1", "w", 1, 0, rows}, {"u", "u", 0, 0, rows},
                                           {"k", "k", 0, 0, 5}};
    std::vector<float> x(t.total, 0.0f);
    init_tensors(x.data(), {0, t.total}, t, files, 5);
    for (int l = 0; l < 2; l++) {
        const float* w = t.pointer(x.data(), "w")(l);
        double sum = 0, squares = 0;
        for (size_t i = 0; i < rows * cols; i++) {
            sum += w[i];
            squares += (double)w[i] * w[i];
        }
        const double n = (double)(rows * cols), std = std::sqrt(squares / n);
        CHECK(std::fabs(sum / n) <= 4 * 0.02 / std::sqrt(n));
        CHECK(std::fabs(std - 0.02) <= 4 * 0.02 / std::sqrt(2 * n));
        // rows that no file names
        for (size_t i = rows * cols; i < (rows + 3) * cols; i++) { CHECK(w[i] == 0.0f); }
    }
    CHECK_FALSE(memcmp(t.pointer(x.data(), "w")(0), t.pointer(x.data(), "w")(1), sizeof(float) * cols) == 0);
    const float* u = t.pointer(x.data(), "u")();
    CHECK((*std::min_element(u, u + rows * cols) >= -1 && *std::max_element(u, u + rows * cols) < 3));
    CHECK((*std::min_element(u, u + rows * cols) < -0.99 && *std::max_element(u, u + rows * cols) > 2.99));
    CHECK(t.pointer(x.data(), "k")()[4] == 7.0f);
}

TEST_CASE("initial values depend on seed and name alone, not on where a tensor lies", "[tensor][asan]") {
    const TensorTable one = table_of({{"w", 0, 10, 8, normal(1)}});
    const TensorTable two = table_of({{"other", 0, 99, 3, normal(1)}, {"big", 2, 20, 8, normal(1)}});
    std::vector<float> a(one.total, 0.0f), b(two.total, 0.0f), c(one.total, 0.0f), d(one.total, 0.0f);
    init_tensors(a.data(), {0, one.total}, one, {{"name", "w", 0, 0, 10}}, 1);
    init_tensors(b.data(), {0, two.total}, two, {{"other", "other", 0, 0, 99}, {"name", "big", 1, 4, 10}}, 1);
    init_tensors(c.data(), {0, one.total}, one, {{"name", "w", 0, 0, 10}}, 2);
    init_tensors(d.data(), {0, one.total}, one, {{"nome", "w", 0, 0, 10}}, 1);
    const float* inside = two.pointer(b.data(), "big")(1) + 4 * 8;
    CHECK(memcmp(a.data(), inside, sizeof(float) * 80) == 0);
    CHECK(inside[-1] == 0.0f);
    CHECK_FALSE(memcmp(a.data(), c.data(), sizeof(float) * 80) == 0);
    CHECK_FALSE(memcmp(a.data(), d.data(), sizeof(float) * 80) == 0);
}
