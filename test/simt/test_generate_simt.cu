// test_generate_simt.cu -- the CUDA trainer's generation, token by token, and the batch that it reads.
#define main static __attribute__((unused)) train_gpt2_main      // not called: its program is not compiled
#include "train_gpt2.cu"
#undef main
#include "test/simt/kernel_test.h"
#include "test/simt/shared_flash.h"

// a model with steep biases, so that there is something outside the window
struct SmallModel : GPT2 {
    SmallModel(const char* position, TileSkip skip) {
        GPT2Config c;
        c.T = 64; c.V = 61; c.L = 2; c.NH = 2; c.C = 32;
        c.position = parse_position(position, 64);
        c.position.tile_skip = skip;
        gpt2_describe(*this, c);
        parameters_allocate(*this, 7, 0);
        stream = device_stream();
        gpt2_point(params, table, weights);
        std::vector<float> x(table.total);
        for (const FileTensor& f : files) {
            const TensorSpec& spec = table.specs[(size_t)table.index(f.tensor)];
            float* to = table.pointer(x.data(), f.tensor)(f.layer) + f.row0 * spec.row_size();
            const std::vector<float> draws =
                normals(f.rows * spec.row_size(), checksum(f.name), spec.name == "wte" ? 1.0 : 0.15);
            for (size_t i = 0; i < draws.size(); i++) {
                to[i] = (spec.init.kind == Init::Constant ? spec.init.a : 0.0f) + draws[i];
            }
        }
        copy_to_device(master, x.data(), sizeof(float) * x.size(), stream);
        round_weights(weights, master, table, {0, table.total}, 1, 0, stream);
    }
    ~SmallModel() { parameters_free(*this); }
};

static std::vector<int> draws(size_t n) {
    std::vector<int> ids(n);
    for (size_t i = 0; i < n; i++) { ids[i] = (int)(hash64(3, i) % 61); }
    return ids;
}

// logits (1+tokens,V) after a prompt and one token after the other; left_out: splits of the last layer that were
static std::vector<float> token_by_token(SmallModel& model, int prompt, int tokens, int* left_out = nullptr) {
    const std::vector<int> ids = draws((size_t)(prompt + tokens));
    Activations acts = activations_describe(model, 1, prompt + tokens, Purpose::Generate, 0);
    activations_allocate(acts);
    std::vector<float> logits, all;
    forward_logits(model, acts, ids.data(), prompt, 0, logits);
    all = logits;
    for (int k = 0; k < tokens; k++) {
        forward_logits(model, acts, &ids[(size_t)(prompt + k)], 1, prompt + k, logits);
        all.insert(all.end(), logits.begin(), logits.end());
    }
    if (left_out != nullptr) {
        const int HS = 16, splits = ceil_div(prompt + tokens, DECODE_SPLIT);
        std::vector<float> partial((size_t)2 * splits * (HS + 2));
        copy_to_host(partial.data(), acts.a.attscratch(), sizeof(float) * partial.size(), model.stream);
        for (int e = 0; e < 2 * splits; e++) { *left_out += partial[(size_t)(e * (HS + 2) + HS)] == -INFINITY; }
    }
    acts.release();
    return all;
}

KERNEL_TEST("generate: token by token, the logits of the whole text, every encoding") {
    std::vector<const char*> names;
    for (const PositionRow& row : position_rows) { names.push_back(row.name); }
#if !defined(FEW_POSITIONS)
    names.push_back("rope:clock=cable");
#endif
    for (const char* name : names) {
        SmallModel model(name, TileSkip::Default);
        const std::vector<float> whole = token_by_token(model, 64, 0);
        std::vector<float> last = token_by_token(model, 60, 4);
        last.erase(last.begin(), last.end() - (long)whole.size());
        const double off = largest_difference(last, whole);
        const double size = largest_difference(whole, std::vector<float>(whole.size()));
        EXPECT(off <= size / 64, "%s: logits of up to %g differ by %g", name, size, off);
        INFO("%s: %g of %g", name, off, size);
    }
}

// through the end of a split: one more, and one of them outside the window
KERNEL_TEST("generate: the window") {
    std::vector<float> logits[3];
    for (TileSkip skip : {TileSkip::Off, TileSkip::Exact, TileSkip::Default}) {
        SmallModel model("cable_v1", skip);
        int left_out = 0;
        logits[(int)skip] = token_by_token(model, 509, 5, &left_out);
        EXPECT((left_out > 0) == (skip != TileSkip::Off), "window %d: %d splits left out", (int)skip, left_out);
        INFO("%d left out", left_out);
    }
    EXPECT(same_bits(logits[0], logits[1]), "the exact window changes the logits");
    const double off = largest_difference(logits[0], logits[2]);
    const double size = largest_difference(logits[0], std::vector<float>(logits[0].size()));
    EXPECT(off <= size / 64, "the window changes logits of up to %g by %g", size, off);
}

// every array of a batch, a hot token's among them, in its own memory; and of a first batch that the stream has still
// to take when the host writes the second one
KERNEL_TEST("a batch on the device is that of the host") {
    const size_t N = 300;
    std::vector<int> ids(N), targets = draws(N);
    for (size_t n = 0; n < N; n++) { ids[n] = n % 4 == 0 ? (int)(n % 61) : 7 + (int)(n % 3); }
    DeviceBatch batch;
    batch.allocate(N);
    EmbeddingPlan plan;
    std::vector<int> first;
    int* first_tokens = (int*)device_malloc(sizeof(int) * N);
    for (size_t slot : {0, 1}) {
        std::rotate(ids.begin(), ids.begin() + 5, ids.end());
        plan.build(ids.data(), N);
        batch.load(slot, 2, ids.data(), targets.data(), N, device_stream());
        batch.by_token(device_stream());
        if (slot > 0) { continue; }
        first = ids;
        copy_on_device(first_tokens, batch.tokens, sizeof(int) * N, device_stream());
    }
    const auto same = [&](const int* device, const std::vector<int>& want) {
        std::vector<int> got(want.size());
        copy_to_host(got.data(), device, sizeof(int) * got.size(), device_stream());
        return got == want;
    };
    EXPECT(same(first_tokens, first), "the first batch's tokens");
    EXPECT(plan.hot_tokens() == 3 && batch.plan.hot_tokens == 3, "%zu hot tokens", batch.plan.hot_tokens);
    EXPECT(plan.parts() == batch.plan.parts && plan.hot_parts() == batch.plan.hot_parts, "%zu parts", batch.plan.parts);
    EXPECT(same(batch.tokens, ids) && same(batch.targets, targets), "tokens, targets");
    EXPECT(same(batch.plan.rows, plan.rows) && same(batch.plan.first, plan.first), "rows, first");
    EXPECT(same(batch.plan.hot, plan.hot), "hot");
    device_free(first_tokens);
    batch.release();
}

// Two logits that bf16 cannot tell apart: the normalized states are (1, 1, 0 ...), and the embeddings of 5 and 6 give
// 1 + 2^-9 and 1. The evaluation and the likeliest next token are computed from float32 logits.
KERNEL_TEST("evaluation and generation have float32 logits") {
    SmallModel model("none", TileSkip::Off);
    std::vector<float> x(model.table.total);
    copy_to_host(x.data(), model.master, sizeof(float) * x.size(), model.stream);
    const int C = 32, V = 61;
    const int T = 16;
    float *lnfw = model.table.pointer(x.data(), "lnfw")(0), *lnfb = model.table.pointer(x.data(), "lnfb")(0);
    float* wte = model.table.pointer(x.data(), "wte")(0);
    for (int c = 0; c < C; c++) {
        lnfw[c] = 0;
        lnfb[c] = c < 2 ? 1.0f : 0.0f;
        for (int v = 0; v < V; v++) { if (c < 2) { wte[v * C + c] = 0; } }
    }
    wte[5 * C] = wte[6 * C] = 1;
    wte[5 * C + 1] = 1.0f / 512;
    copy_to_device(model.master, x.data(), sizeof(float) * x.size(), model.stream);
    round_weights(model.weights, model.master, model.table, {0, model.table.total}, 1, 0, model.stream);
    Activations acts = activations_describe(model, 1, T, Purpose::Generate, 0);
    activations_allocate(acts);
    const std::vector<int> ids = draws(T), fives((size_t)T, 5), sixes((size_t)T, 6);
    std::vector<float> losses((size_t)T), hits((size_t)T), others((size_t)T), logits;
    forward_losses(model, acts, ids.data(), fives.data(), nullptr, 1, T, losses.data(), hits.data());
    const double z = std::exp(1 + 1.0 / 512) + std::exp(1.0) + (V - 2);
    for (int t = 0; t < T; t++) {
        const double error = losses[(size_t)t] - (std::log(z) - 1 - 1.0 / 512);
        EXPECT(hits[(size_t)t] == 1 && std::fabs(error) < 2e-6, "token %d: hit %g, the loss is off by %g", t,
               hits[(size_t)t], error);
    }
    forward_losses(model, acts, ids.data(), sixes.data(), nullptr, 1, T, others.data(), hits.data());
    EXPECT(hits == std::vector<float>((size_t)T, 0.0f), "6 is never the likeliest");
    forward_logits(model, acts, ids.data(), T, 0, logits);
    EXPECT(logits[5] == 1 + 1.0f / 512 && logits[6] == 1, "logits %.9g and %.9g", logits[5], logits[6]);
    acts.release();
}
