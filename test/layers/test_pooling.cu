// test_pooling.cu -- pooling against an oracle in double.
#include "test/layers/pooling_oracle.h"
#include "test/oracle.h"

TEST_CASE("pooling oracle: its backward is its forward's derivative", "[pooling]") {
    Random random;
    INFO(random);
    const size_t B = 3, T = 5;
    const size_t C = 4;
    const std::vector<int> lengths = {5, 1, 3};
    std::vector<double> inp = as<double>(random.normals(B * T * C));
    const std::vector<double> dout = as<double>(random.normals(B * C));
    for (Pooling kind : {Pooling::Mean, Pooling::Cls}) {
        const PoolingOracle<double> o(inp, dout, lengths, T, C, kind);
        auto loss = [&] { return dot(PoolingOracle<double>(inp, dout, lengths, T, C, kind).out, dout); };
        check_gradient("dinp", loss, inp, o.dinp, random, 60);
    }
}

TEST_CASE("pooling, forward and backward", "[pooling][asan]") {
    Random random;
    INFO(random);
    for (Pooling kind : {Pooling::Mean, Pooling::Cls}) {
        for (size_t C : {1, 33, 96, 300}) {
            test_pooling(random, {1}, 1, C, kind);
            test_pooling(random, {17}, 17, C, kind);
            test_pooling(random, {17, 1, 6}, 17, C, kind);
        }
    }
}

TEST_CASE("pooling, large shapes", "[pooling][asan]") {
    Random random;
    INFO(random);
    test_pooling(random, {128, 1, 77, 127}, 128, 770, Pooling::Mean);
    test_pooling(random, {128, 1, 77, 127}, 128, 770, Pooling::Cls);
    test_pooling(random, {3000, 2999}, 3000, 40, Pooling::Mean);
}

TEST_CASE("pooling: more padding, or another place in the batch, gives the same bits", "[pooling]") {
    Random random;
    INFO(random);
    const size_t C = 97;
    const std::vector<int> lengths = {13, 1, 40, 33};
    std::vector<std::vector<float>> sequence, alone;
    for (int length : lengths) {
        sequence.push_back(random.normals((size_t)length * C));
        Array<float> out(C);
        const Array<int> d_length(std::vector<int>{length});
        pooling_forward(out, Array<float>(sequence.back()), d_length, 1, length, (int)C, Pooling::Mean, Stream(0));
        alone.push_back(out.host());
    }
    for (size_t T : {40, 41, 96}) {
        std::vector<float> inp(lengths.size() * T * C, NAN);
        for (size_t b = 0; b < lengths.size(); b++) {
            std::copy(sequence[b].begin(), sequence[b].end(), inp.begin() + (long)(b * T * C));
        }
        Array<float> out(lengths.size() * C);
        pooling_forward(out, Array<float>(inp), Array<int>(lengths), (int)lengths.size(), (int)T, (int)C,
                        Pooling::Mean, Stream(0));
        const std::vector<float> got = out.host();
        for (size_t b = 0; b < lengths.size(); b++) {
            INFO("T " << T << ", sequence " << b);
            CHECK(same_bits(std::vector<float>(got.begin() + (long)(b * C), got.begin() + (long)((b + 1) * C)),
                            alone[b]));
        }
    }
}

TEST_CASE("pooling: same bits for any number of threads", "[pooling]") {
    Random random;
    INFO(random);
    const size_t B = 9, T = 50;
    const size_t C = 300;
    const Array<int> lengths(std::vector<int>{50, 1, 3, 49, 20, 31, 7, 8, 50});
    const Array<float> inp(random.normals(B * T * C)), dout(random.normals(B * C));
    check_thread_invariance([&] {
        Array<float> out(B * C), dinp(B * T * C);
        pooling_forward(out, inp, lengths, (int)B, (int)T, (int)C, Pooling::Mean, Stream(0));
        pooling_backward(dinp, dout, lengths, (int)B, (int)T, (int)C, Pooling::Mean, Stream(0));
        std::vector<float> all = out.host(), d = dinp.host();
        all.insert(all.end(), d.begin(), d.end());
        return all;
    });
}
