// test_bert_padding.cu -- what padding may not change.
#include "test/files.h"
#include "test/model/bert_model.h"

TEST_CASE("padding changes neither embeddings nor what is learned", "[bert][padding][encodings]") {
    Random random;
    INFO(random);
    for (const std::string& encoding : encodings_with_fixture("bert")) {
        const Fixture f("bert_" + encoding);
        const int T = 24, V = f.bert.V;
        const int C = f.bert.C;
        const std::vector<int> lengths = {24, 5, 1, 17};
        const int B = (int)lengths.size();
        // V - 1 is [PAD], which stands only after a length
        std::vector<int> ids = draw_tokens(random, (size_t)B * T, V - 1);
        std::vector<int> targets = draw_targets(random, lengths, T, V - 1, 0.3);
        targets[0] = 3;
        for (int n = 0; n < B * T; n++) { if (n % T >= lengths[n / T]) { ids[n] = V - 1; } }
        Gradient narrow_mlm;
        Contrast narrow;
        std::vector<float> narrow_embeddings;
        for (int wide : {T, 37, 64, 70}) {
            if (wide > position_max_length(f.bert.position)) { continue; }
            INFO(encoding << ", padded to " << wide);
            Random same = random;
            Model model(f.bert, 1);
            f.load(model, same);
            Acts acts(model, B, wide);
            const std::vector<int> wide_ids = widened(ids, T, wide, V - 1);
            std::vector<float> embeddings((size_t)B * C);
            embed_documents(model, acts, wide_ids.data(), lengths.data(), B, wide, embeddings.data());
            const Gradient mlm = gradient_of(model, acts, wide_ids, widened(targets, T, wide, IGNORE_INDEX), lengths);
            const Contrast c = contrast_of(model, acts, {2, B, wide, wide_ids, lengths}, 0.2);
            if (wide == T) {
                narrow_mlm = mlm;
                narrow = c;
                narrow_embeddings = embeddings;
            }
            CHECK(same_bits(c.embeddings, embeddings));
            check_same_rows("logits", embeddings, narrow_embeddings);
            check_same_rows("loss", {(float)mlm.loss}, {(float)narrow_mlm.loss});
            check_same_rows("loss", {(float)c.loss}, {(float)narrow.loss});
            check_same_gradient(f, model, mlm.grads, narrow_mlm.grads, BOTH_OFF);
            check_same_gradient(f, model, c.grads, narrow.grads, BOTH_OFF);
            // a row of these is a sum over its tokens, one at a time
            for (const char* name : {"word", "position"}) {
                const std::string full = std::string("bert.embeddings.") + name + "_embeddings.weight";
                if (!f.has("grad." + full)) { continue; }
                const FileTensor& t = model.file(full);
                const std::vector<float> part = part_of(c.grads, model.table, t);
                const std::vector<float> part_mlm = part_of(mlm.grads, model.table, t);
                check_same_rows("grad." + full, part, part_of(narrow.grads, model.table, t));
                check_same_rows("grad." + full, part_mlm, part_of(narrow_mlm.grads, model.table, t));
                // [PAD], and places with nothing but it
                const size_t first = std::string(name) == "word" ? (size_t)V - 1 : (size_t)T;
                CHECK(largest(part) > 0);
                CHECK(largest(std::vector<float>(part.begin() + first * C, part.end())) == 0);
                if (std::string(name) == "position") {
                    CHECK(largest(std::vector<float>(part_mlm.begin() + T * C, part_mlm.end())) == 0);
                }
            }
        }
    }
}

TEST_CASE("what stands after a length is not looked at", "[bert][padding][encodings]") {
    Random random;
    INFO(random);
    for (const std::string& encoding : encodings_with_fixture("bert")) {
        const Fixture f("bert_" + encoding);
        const int T = 24, V = f.bert.V;
        const std::vector<int> lengths = {24, 5, 1, 17};
        const int B = (int)lengths.size();
        const std::vector<int> ids = draw_tokens(random, (size_t)B * T, V),
                               targets = draw_targets(random, lengths, T, V, 0.3);
        Model model(f.bert, 1);
        f.load(model, random);
        Acts acts(model, B, T);
        std::vector<int> noise = ids;
        for (int n = 0; n < B * T; n++) { if (n % T >= lengths[n / T]) { noise[n] = random.integer(0, V - 1); } }
        const Contrast a = contrast_of(model, acts, {2, B, T, ids, lengths}, 0.2);
        const Contrast b = contrast_of(model, acts, {2, B, T, noise, lengths}, 0.2);
        INFO(encoding);
        CHECK(worst_difference(a.grads, as<double>(b.grads)) == 0);
        CHECK(same_bits(gradient_of(model, acts, noise, targets, lengths).grads,
                        gradient_of(model, acts, ids, targets, lengths).grads));
    }
}

// Evaluation's last window has fewer tokens than the rest: its padding must not be attended to.
TEST_CASE("BERT's last window is evaluated on its own tokens alone", "[bert][padding][evaluate]") {
    const int T = 32, total = 39;
    const TempDir dir;
    std::string text;
    for (int i = 0; i <= total; i++) { text += (char)('a' + i * i % 26); }
    write_file(dir / "a.txt", text);
    const TokenFiles files(dir / "a.txt", "--val_files");
    BERTConfig config = small_config("cable", T, 2, 2, 16, BYTE_VOCAB);
    config.special = special_tokens(BYTE_VOCAB);
    config.mask_share = 0.5;
    Model model(config, 1);
    Random random;
    INFO(random);
    std::vector<float> weights = model.host(model.master);
    for (float& x : weights) { x *= 8; }                                    // so that attention matters
    model.set(weights);
    // the mean loss of both windows, the last one `longer` than its tokens
    const auto by_window = [&](int longer) {
        double sum = 0, count = 0;
        for (int start : {0, T}) {
            const int n = std::min(T, total - start), length = n < T ? n + longer : n;
            std::vector<int> stream((size_t)T + 1), tokens((size_t)length), targets((size_t)length);
            files.read((uint64_t)start, (uint64_t)n + 1, stream.data());
            set_targets(model, stream.data(), (uint64_t)start, length, tokens.data(), targets.data());
            std::fill(targets.begin() + n, targets.end(), IGNORE_INDEX);
            Acts acts(model, 1, length, Purpose::Evaluate);
            std::vector<float> losses((size_t)length);
            forward_losses(model, acts, tokens.data(), targets.data(), nullptr, 1, length, losses.data(), nullptr);
            for (float loss : losses) { sum += loss; }
            for (int t : targets) { count += t != IGNORE_INDEX; }
        }
        return sum / count;
    };
    Acts acts(model, 2, T, Purpose::Evaluate);
    const double got = evaluate(model, acts, files, T, 0, total).loss, want = by_window(0);
    const double padded = by_window(T - (total - T));
    INFO("evaluation " << got << ", window by window " << want << ", with the padding " << padded);
    CHECK(std::fabs(padded - want) > 1e-3 * want);
    CHECK(std::fabs(got - want) <= 1e-3 * std::fabs(padded - want));
}

TEST_CASE("lengths of T are no lengths", "[bert][padding]") {
    Random random;
    INFO(random);
    const Fixture f("bert_cable");
    Model model(f.bert, 1);
    f.load(model, random);
    Acts acts(model, f.B, f.T);
    const Gradient a = gradient_of(model, acts, f.inputs, f.targets, {}),
                   b = gradient_of(model, acts, f.inputs, f.targets, {f.T, f.T});
    CHECK(a.loss == b.loss);
    CHECK(same_bits(a.grads, b.grads));
    CHECK(worst_difference(a.grads, as<double>(gradient_of(model, acts, f.inputs, f.targets, f.lengths).grads)) > 0);
}

// Activations of a few long sequences hold more short ones, but not with the same number of tokens: buffers with an
// element per tile or chunk of a sequence would run over into their neighbours.
TEST_CASE("400 short documents share batches, and each has the embedding that it has alone", "[bert][padding]") {
    Random random;
    INFO(random);
    TempDir dir;
    std::string text;
    for (int i = 0; i < 400; i++) { text += std::to_string(i * 7919) + std::string((size_t)i % 7, 'x') + "\n"; }
    write_file(dir / "short.txt", text);
    const Documents documents(dir / "short.txt", "--encode", special_tokens(BYTE_VOCAB));
    const int T = 256;
    for (const std::string pos : {"cable", "none"}) {
        INFO(pos);
        Model model(small_config(pos, T, 2, 2, 16, BYTE_VOCAB), 1);
        std::vector<float> x = random.normals(model.table.total, 0, 0.3);
        model.set(x);
        Acts acts(model, 3, T), one(model, 1, T);
        const Embeddings e = encode_documents(model, acts, documents, T);
        REQUIRE(e.size() == 400);
        const size_t C = (size_t)e.C;
        const Embeddings pieces = encode_documents(model, acts, documents, T, 4);       // means of four tokens each
        int wrong = 0;
        double farthest = 0;
        size_t at = 0;
        for (size_t i = 0; i < 400; i++) {
            std::vector<int> ids((size_t)T);
            std::vector<float> alone(C);
            const int n = documents.read(i, T, ids.data());
            embed_documents(model, one, ids.data(), &n, 1, n, alone.data());
            const std::vector<float> got(e.rows.begin() + (long)(i * C), e.rows.begin() + (long)((i + 1) * C));
            wrong += !same_bits(got, alone);
            for (int t = 0; t < n; t += 4, at++) {
                for (size_t c = 0; c < C; c++) {
                    double mean = 0;
                    for (int k = t; k < imin(t + 4, n); k++) {
                        mean += (double)one.a.ln2(1)[(size_t)k * C + c] / imin(4, n - t);
                    }
                    farthest = std::max(farthest, std::fabs(mean - (double)pieces.rows[at * C + c]));
                }
            }
        }
        CHECK(wrong == 0);
        CHECK((at == pieces.size() && at > 800));
        CHECK(farthest < 2e-6);
    }
}
