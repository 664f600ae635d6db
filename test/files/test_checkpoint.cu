// checkpoint.h, safetensors.h, import.h: a checkpoint is restored bit for bit, no damage goes unnoticed, no kill
// and no failed write costs the checkpoint before, and foreign weights land where they belong.
#include <csignal>

#include <sys/resource.h>
#include <sys/wait.h>

#include "test/checkpoint.h"
#include "test/faults.h"
#include "test/files.h"
#include "llmc/engine/import.h"

namespace {

const int L = 2, NH = 2;
const int C = 8, MAX_T = 6;
const int V = 11, Vp = 16;
const int PAD_ROWS = 4;             // that qkvw and qkvb have after their last used row

const bool in_memory = temporary_in_memory();

struct CaptureStderr : Captured { CaptureStderr() : Captured({2}) {} };

// A value with 7 significant bits, so that bf16 and f16 hold it exactly; every (tensor, layer, row, col) has its own.
float value(int tensor, int l, size_t row, size_t col) {
    const size_t h =
        ((size_t)tensor * 7919 + (size_t)l * 104729 + row * 1299709 + col * 15485863 + 12345) * 2654435761u;
    return (float)((int)(h >> 16 & 127) - 64) / 16.0f;
}

// The 16 tensors of GPT-2 in llm.c's order; rows as llm.c's file has them.
struct Gpt2Tensor { const char *ours, *theirs; bool per_layer; size_t rows, cols; bool transposed; };
const Gpt2Tensor gpt2[16] = {
    {"wte", "wte.weight", false, V, C, false}, {"wpe", "wpe.weight", false, MAX_T, C, false},
    {"ln1w", "ln_1.weight", true, C, 0, false}, {"ln1b", "ln_1.bias", true, C, 0, false},
    {"qkvw", "attn.c_attn.weight", true, 3 * C, C, true}, {"qkvb", "attn.c_attn.bias", true, 3 * C, 0, false},
    {"attprojw", "attn.c_proj.weight", true, C, C, true}, {"attprojb", "attn.c_proj.bias", true, C, 0, false},
    {"ln2w", "ln_2.weight", true, C, 0, false}, {"ln2b", "ln_2.bias", true, C, 0, false},
    {"fcw", "mlp.c_fc.weight", true, 4 * C, C, true}, {"fcb", "mlp.c_fc.bias", true, 4 * C, 0, false},
    {"fcprojw", "mlp.c_proj.weight", true, C, 4 * C, true}, {"fcprojb", "mlp.c_proj.bias", true, C, 0, false},
    {"lnfw", "ln_f.weight", false, C, 0, false}, {"lnfb", "ln_f.bias", false, C, 0, false}};

std::string file_name(const Gpt2Tensor& t, int l, const std::string& prefix) {
    return prefix + (t.per_layer ? "h." + std::to_string(l) + "." : "") + t.theirs;
}

// A GPT-2 with padding rows in wte and qkvw; with CABLE's rows in qkvw, a learned table, both or neither.
struct Model {
    TensorTable table;
    std::vector<FileTensor> files, encoding;
    std::vector<float> params, m, v;

    Model(bool cable, bool learned) {
        for (const Gpt2Tensor& t : gpt2) {
            const std::string name = t.ours;
            if (name == "wpe" && !learned) { continue; }
            TensorSpec s;
            s.name = name; s.layers = t.per_layer ? L : 0; s.cols = t.cols;
            s.rows = name == "wte" ? (size_t)Vp : t.rows;
            if (name == "qkvw" || name == "qkvb") { s.rows += 2 * NH + PAD_ROWS; }
            table.add(s);
            for (int l = 0; l < (t.per_layer ? L : 1); l++) {
                files.push_back({file_name(t, l, "transformer."), name, l, 0, t.rows, t.transposed});
                if (name == "wpe") { encoding.push_back(files.back()); }
            }
        }
        for (int l = 0; cable && l < L; l++) {
            for (size_t k = 0; k < 2; k++) {
                const std::string name = strprintf("transformer.h.%d.attn.cable.%s.", l, k == 0 ? "c" : "s");
                encoding.push_back({name + "weight", "qkvw", l, 3 * C + k * NH, NH, false});
                encoding.push_back({name + "bias", "qkvb", l, 3 * C + k * NH, NH, false});
            }
        }
        for (const FileTensor& f : encoding) { if (f.tensor != "wpe") { files.push_back(f); } }
        params.assign(table.total, 0.0f);
        m = v = params;
    }
    // arbitrary bits in every tensor, NaN among those of the moments; padding rows and gaps keep theirs
    void fill(uint32_t seed) {
        uint32_t x = seed * 747796405u + 1;
        auto next = [&] {
            x = x * 1664525u + 1013904223u;
            float f;
            const uint32_t bits = x;
            memcpy(&f, &bits, 4);
            return f;
        };
        for (const FileTensor& f : files) {
            const FileView view = file_view(table, f);
            for (size_t i = 0; i < view.size(); i++) {
                const float f = next();
                params[view.offset + i] = std::isfinite(f) ? f : (float)i;
            }
        }
        for (size_t i = 0; i < table.specs.size(); i++) {
            for (size_t j = 0; j < table.specs[i].size(); j++) {
                m[table.offsets[i] + j] = next();
                v[table.offsets[i] + j] = next();
            }
        }
    }
    Checkpoint checkpoint(int step = 0) {
        Checkpoint c;
        c.table = &table; c.files = &files; c.params = params.data(); c.m = m.data(); c.v = v.data();
        c.config = gpt2_config(V, MAX_T, C, L, NH, {{"name", "cable"}, {"K", 64.5}});
        c.state = {{"step", step}, {"lr", 0.1}};
        return c;
    }
    const float* at(const char* name, int l) const { return table.pointer((const float*)params.data(), name)(l); }
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * 4) == 0;
}
bool same(const Model& a, const Model& b) {
    return same_bits(a.params, b.params) && same_bits(a.m, b.m) && same_bits(a.v, b.v);
}

Model filled(uint32_t seed) {
    Model model(true, false);
    model.fill(seed);
    return model;
}
std::string save(const std::string& out, int step, uint32_t seed, int keep = 0) {
    Model model = filled(seed);
    return save_checkpoint(out, step, model.checkpoint(step), keep);
}
bool loads_as(const std::string& dir, uint32_t seed) {
    Model wanted = filled(seed), found(true, false);
    Checkpoint c = found.checkpoint();
    load_checkpoint(dir, c);
    return same(wanted, found);
}
bool is_bad(const std::string& dir) {
    try { verify_checkpoint(dir); } catch (const Error& e) { return contains(e.what(), dir); }
    return false;
}
std::vector<std::string> hidden(const std::string& out) {
    std::vector<std::string> names;
    for (const std::string& name : list_directory(out)) { if (name[0] == '.') { names.push_back(name); } }
    return names;
}

void put_byte(const std::string& path, size_t at, char byte) { patch_file(path, std::string(1, byte), at); }

// what one rank of several holds: a slice of the layout, packed
struct Part {
    Model* model;
    std::vector<float> m, v;
    std::vector<TensorPiece> held;
    Part(Model& of, Slice slice, bool filled) : model(&of) {
        for (TensorPiece piece : of.table.pieces(slice)) {
            for (size_t i = 0; i < piece.size; i++) {
                m.push_back(filled ? of.m[piece.at + i] : 0.0f);
                v.push_back(filled ? of.v[piece.at + i] : 0.0f);
            }
            piece.at = m.size() - piece.size;
            held.push_back(piece);
        }
    }
    Checkpoint checkpoint() {
        Checkpoint c = model->checkpoint(5);
        c.m = m.data(); c.v = v.data(); c.complete = false; c.held = held;
        return c;
    }
};

const char* const all_files[] = {"model.safetensors", "config.json", "optimizer_0.state", "state.json",
                                 "manifest.json"};

} // namespace

TEST_CASE("checkpoint: is restored bit for bit, except for padding rows") {
    TempDir out;
    Model model = filled(1);
    Checkpoint c = model.checkpoint(120);
    c.extra.push_back({"vocab.txt", "a\nb\n"});
    const std::string dir = save_checkpoint(out.path, 120, c, 0);
    CHECK(dir == out.path + "/step_00000120");
    CHECK(hidden(out.path).empty());
    CHECK(find_checkpoint(out.path) == dir);
    CHECK(read_file(dir + "/vocab.txt") == "a\nb\n");
    CHECK(verify_checkpoint(dir).size() == 5);
    verify_checkpoint(dir + "/");

    Model found(true, false), wanted = model;
    const FileView rows = file_view(found.table, found.files[0]);       // wte
    for (size_t i = rows.size(); i < (size_t)Vp * C; i++) {
        found.params[rows.offset + i] = wanted.params[rows.offset + i] = 7.0f;
    }
    Checkpoint into = found.checkpoint();
    into.state = Json();
    load_checkpoint(dir, into);
    CHECK(same(found, wanted));
    CHECK(into.state == c.state);

    // the file against the tensors, index by index
    const Safetensors file(dir + "/model.safetensors");
    CHECK(file.metadata["format"] == "pt");
    CHECK(file.entries.size() == model.files.size());
    std::vector<float> wte(V * C), attn(C * 3 * C), cable(NH * C), bias(NH);
    read_f32(file, "transformer.wte.weight", wte.data(), {V, C});
    CHECK(memcmp(wte.data(), model.at("wte", 0), wte.size() * 4) == 0);
    for (int l = 0; l < L; l++) {
        const std::string h = "transformer.h." + std::to_string(l) + ".attn.";
        read_f32(file, h + "c_attn.weight", attn.data(), {C, 3 * C});
        int wrong = 0;
        for (int o = 0; o < 3 * C; o++) {
            for (int i = 0; i < C; i++) {
                wrong += memcmp(&attn[(size_t)(i * 3 * C + o)], &model.at("qkvw", l)[o * C + i], 4) != 0;
            }
        }
        CHECK(wrong == 0);
        read_f32(file, h + "cable.s.weight", cable.data(), {NH, C});
        CHECK(memcmp(cable.data(), model.at("qkvw", l) + (3 * C + NH) * C, cable.size() * 4) == 0);
        read_f32(file, h + "cable.c.bias", bias.data(), {NH});
        CHECK(memcmp(bias.data(), model.at("qkvb", l) + 3 * C, bias.size() * 4) == 0);
    }
    const Safetensors optimizer(dir + "/optimizer_0.state");
    std::vector<float> flat((size_t)Vp * C);
    read_f32(optimizer, "v.wte", flat.data(), {(size_t)Vp * C});
    CHECK(memcmp(flat.data(), model.v.data() + model.table.offsets[0], flat.size() * 4) == 0);
    CHECK(optimizer.metadata["start.wte"] == "0");
}

TEST_CASE("checkpoint: moments that several ranks have written are read by any number of them") {
    Model model = filled(1);
    const size_t total = model.table.total;
    const auto save = [&](const std::string& out, const std::vector<Slice>& slices, size_t listed) {
        FileSums sums;
        std::vector<Part> parts;
        for (const Slice& s : slices) { parts.emplace_back(model, s, true); }
        const Checkpoint first = parts[0].checkpoint();
        CheckpointSave of_first(out, 5, first);
        of_first.begin();
        for (size_t r = 0; r < slices.size(); r++) {
            const Checkpoint c = parts[r].checkpoint();
            for (const auto& file : CheckpointSave(out, 5, c).write_part((int)r)) {
                if (r < listed) { sums.push_back(file); }
            }
        }
        of_first.publish(sums);
        return of_first.path;
    };
    const auto load = [](const std::string& dir) {
        Model found(true, false);
        Checkpoint c = found.checkpoint();
        load_checkpoint(dir, c);
        return found;
    };
    const std::vector<Slice> thirds = {{0, total / 3 + 1}, {total / 3 + 1, 2 * total / 3}, {2 * total / 3, total}};
    TempDir out;
    const std::string dir = save(out.path, thirds, 3);
    CHECK(verify_checkpoint(dir).size() == 6);
    CHECK(same(load(dir), model));
    for (const Slice& half : {Slice{0, total / 2}, Slice{total / 2, total}}) {
        Part wanted(model, half, true), found(model, half, false);
        Model into(true, false);
        Checkpoint c = found.checkpoint();
        c.params = into.params.data();
        load_checkpoint(dir, c);
        CHECK(same_bits(found.m, wanted.m));
        CHECK(same_bits(found.v, wanted.v));
    }
    // a rank's file that the manifest does not list, one that appears twice, and names without a valid number
    TempDir gap, twice;
    throws_with([&] { load(save(gap.path, thirds, 2)); }, "elements in all files, got");
    throws_with([&] { load(save(twice.path, {thirds[0], thirds[1], thirds[1], thirds[2]}, 4)); },
                "(another rank's file is missing, or there twice?)");
    for (const char* name : {"m.qkvb@", "m.qkvb@x", "m.qkvb@-1", "m.qkvb@99999999999999999999", "m.qkvb@100000",
                             "x.qkvb", "m.nothing@0", "m.qkvb"}) {
        INFO(name);
        write_safetensors(dir + "/optimizer_1.state", {{name, {3}, [](float* x, size_t, size_t n) {
            std::fill(x, x + n, 0.0f);
        }}});
        throws_with([&] { load(dir); }, "optimizer_1.state: ");
    }
}

TEST_CASE("checkpoint: matrices larger than a block") {
    TempDir out;
    TensorTable table;
    TensorSpec s;
    s.name = "w"; s.rows = 1100; s.cols = 1500;         // both views exceed 2^20 elements
    table.add(s);
    const std::vector<FileTensor> files = {{"a", "w", 0, 0, 1000, true}, {"b", "w", 0, 1000, 100, false}};
    std::vector<float> w(table.total), back(table.total);
    for (size_t i = 0; i < w.size(); i++) { w[i] = (float)i; }
    Checkpoint c;
    c.table = &table; c.files = &files; c.params = w.data();
    const std::string dir = save_checkpoint(out.path, 0, c, 0);
    c.params = back.data();
    load_checkpoint(dir, c);
    CHECK(memcmp(w.data(), back.data(), (size_t)1100 * 1500 * 4) == 0);
    std::vector<float> row(1000);
    const Safetensors file(dir + "/model.safetensors");
    file.read_elements(file.entry("a"), row.data(), 1499 * 1000, 1000);     // the last row is w's last column
    CHECK(row[999] == (float)(999 * 1500 + 1499));
}

TEST_CASE("checkpoint: every kind of damage to every file is noticed", "[P5][P6]") {
    TempDir out;
    const std::string dir = save(out.path, 5, 1), other = save(out.path, 6, 2);
    int undetected = 0, tried = 0;
    const auto expect_bad = [&] { tried++; undetected += !is_bad(dir); };
    for (const char* name : all_files) {
        const std::string path = dir + "/" + name, text = read_file(path);
        const bool manifest = name == std::string("manifest.json");
        for (size_t at = 0; at < text.size(); at += manifest ? 1 : 5) {
            // every bit of the manifest, and in the other files one bit of every fifth byte
            const int first_bit = manifest ? 0 : (int)(at % 8);
            for (int bit = first_bit; bit < 8; bit += manifest ? 1 : 8) {
                put_byte(path, at, (char)(text[at] ^ 1 << bit));
                expect_bad();
            }
            put_byte(path, at, text[at]);
        }
        for (size_t n = 0; n < text.size(); n += manifest ? 1 : 1 + text.size() / 50) {
            REQUIRE(truncate(path.c_str(), (off_t)n) == 0);
            expect_bad();
            write_text(path, text);
        }
        for (const char* more : {"x", "\n", " ", "{}"}) { write_text(path, text + more); expect_bad(); }
        write_text(path, std::string(1, '\0') + text);
        expect_bad();
        for (const char* second : all_files) {      // exchanged with another file of the checkpoint
            const std::string other_text = read_file(dir + "/" + second);
            if (second == std::string(name)) { continue; }
            write_text(path, other_text);
            write_text(dir + "/" + second, text);
            expect_bad();
            write_text(dir + "/" + second, other_text);
        }
        if (name != std::string("config.json")) {   // and with the same file of another step
            write_text(path, read_file(other + "/" + name));
            expect_bad();
        }
        unlink(path.c_str());
        expect_bad();
        write_text(path, text);
        CHECK_FALSE(is_bad(dir));
    }
    CHECK(tried > 5000);
    CHECK(undetected == 0);
    TempDir::remove(dir);
    io_rename(other, dir);          // a whole directory under another step's name
    throws_with([&] { verify_checkpoint(dir); }, "expected step 5, as the directory is named, got 6");
}

TEST_CASE("checkpoint: manifests that lie or come from elsewhere", "[P5][P6]") {
    TempDir out;
    const std::string dir = save(out.path, 5, 1), path = dir + "/manifest.json";
    const FileSum sum = sum_file(dir + "/model.safetensors"), config = sum_file(dir + "/config.json");
    write_text(path, manifest_text(5, {{"model.safetensors", sum}, {"config.json", config}}));
    throws_with([&] { verify_checkpoint(dir); }, "lacks state.json");
    write_text(path, manifest_text(5, {{"../step_00000005/model.safetensors", sum}}));
    throws_with([&] { verify_checkpoint(dir); }, "is not in the directory");
    write_text(path, "{\"version\": 2, \"step\": 5}");
    throws_with([&] { verify_checkpoint(dir); }, "expected version 1, got 2");
    for (const char* text : {"", "[]", "{}", "{\"version\":1,\"step\":5}",
                             "{\"version\":1,\"step\":5,\"files\":{\"a\":3}}", "{\"version\":1,\"step\":-5}",
                             "{\"version\":1,\"step\":5,\"files\":{\"a\":{\"bytes\":-1,\"checksum\":\"\"}}}"}) {
        INFO(text);
        write_text(path, text);
        throws_with([&] { verify_checkpoint(dir); }, path);
    }
}

TEST_CASE("checkpoint: the newest good one is found, and the bad ones are named", "[P5][P6]") {
    TempDir out;
    CHECK(find_checkpoint(out.path) == "");
    CHECK(find_checkpoint(out.path + "/none") == "");
    for (int step : {10, 9, 100}) { save(out.path, step, (uint32_t)step); }
    for (const char* name : {"/step_1", "/step_0000001x", "/xstep_00000999", "/.tmp_step_00000999"}) {
        io_mkdirs(out.path + name);
    }
    CHECK(list_checkpoints(out.path) == std::vector<int>{9, 10, 100});
    for (const char* name : {"/step_99999999", "/step_100000000"}) { io_mkdirs(out.path + name); }
    CHECK(list_checkpoints(out.path) == std::vector<int>{9, 10, 100, 99999999, 100000000});
    for (const char* name : {"/step_99999999", "/step_100000000"}) { io_rmdir(out.path + name); }
    CHECK(find_checkpoint(out.path) == out.path + "/step_00000100");

    put_byte(out.path + "/step_00000100/optimizer_0.state", 3000, '!');
    {
        CaptureStderr err;
        CHECK(find_checkpoint(out.path) == out.path + "/step_00000010");
        const std::string text = err.text();
        CHECK(contains(text, "step_00000100/optimizer_0.state: expected checksum xxh3:"));
        CHECK(contains(text, "falling back to " + out.path + "/step_00000010"));
    }
    CHECK(loads_as(out.path + "/step_00000010", 10));
    REQUIRE(truncate((out.path + "/step_00000010/model.safetensors").c_str(), 100) == 0);
    CaptureStderr err;
    CHECK(find_checkpoint(out.path) == out.path + "/step_00000009");
    unlink((out.path + "/step_00000009/state.json").c_str());
    throws_with([&] { find_checkpoint(out.path); }, "none of its 3 checkpoints");
    CHECK(contains(err.text(), "as the manifest says, got 100 (truncated?)"));
}

TEST_CASE("checkpoint: one of another model is refused before anything changes") {
    TempDir out;
    const std::string dir = save(out.path, 5, 1);
    const auto refused = [&](Model& into, Checkpoint c, const std::string& message) {
        const Model before = into;
        throws_with([&] { load_checkpoint(dir, c); }, message);
        CHECK(same(before, into));
        CHECK(c.state["step"] == 99);
    };
    Model model = filled(3);
    for (const char* key : {"n_layer", "n_head", "n_embd", "vocab_size"}) {
        Checkpoint c = model.checkpoint(99);
        const int had = c.config[key].get<int>();
        c.config[key] = had + 1;
        refused(model, c, strprintf("%s: expected %d, got %d", key, had + 1, had));
    }
    Checkpoint c = model.checkpoint(99);
    c.config["position"]["name"] = "alibi";
    refused(model, c, "position.name: expected \"alibi\", got \"cable\"");
    c = model.checkpoint(99);
    c.config["position"]["K"] = 65;
    refused(model, c, "position.K: expected 65, got 64.5");
    c.config["position"] = {{"name", "cable"}};
    refused(model, c, "position.K: expected absent, got 64.5");

    Model none(false, false), learned(true, true);
    none.fill(4); learned.fill(5);
    refused(none, none.checkpoint(99), "this model has no transformer.h.0.attn.cable.c.weight");
    refused(learned, learned.checkpoint(99), "no tensor transformer.wpe.weight");
    model.files[1].rows--;
    refused(model, model.checkpoint(99), "ln_1.weight: expected F32 (7), got F32 (8)");
    model.files[1].rows++;
    c = model.checkpoint(99);
    Json starts = optimizer_metadata(c);
    starts["start.qkvw"] = "64";
    write_safetensors(dir + "/optimizer_0.state", optimizer_items(c), starts);
    refused(model, c, "start.qkvw: expected 0");
    unlink((dir + "/optimizer_0.state").c_str());
    refused(model, c, "optimizer_0.state");
    c.m = c.v = nullptr;
    load_checkpoint(dir, c);        // without moments the file is not needed
    CHECK(same_bits(model.params, filled(1).params));
    model.files[0].rows = Vp + 1;
    throws_with([&] { save_checkpoint(out.path, 7, model.checkpoint(), 0); }, "not inside tensor wte");
}

TEST_CASE("checkpoint: old ones are deleted, except for the last and the later ones", "[P5][P6]") {
    TempDir out;
    for (int step = 10; step <= 60; step += 10) { save(out.path, step, 1, 2); }
    CHECK(list_checkpoints(out.path) == std::vector<int>{50, 60});
    save(out.path, 70, 1, 0);                           // 0 keeps all
    CHECK(list_checkpoints(out.path) == std::vector<int>{50, 60, 70});
    save(out.path, 55, 1, 1);                           // a run that fell back does not delete later ones
    CHECK(list_checkpoints(out.path) == std::vector<int>{55, 60, 70});
    save(out.path, 80, 1, 3);
    put_byte(out.path + "/step_00000080/model.safetensors", 2000, '!');
    throws_with([&] { retire_checkpoints(out.path, 80, 1); }, "step_00000080/model.safetensors: expected checksum");
    CHECK(list_checkpoints(out.path) == std::vector<int>{60, 70, 80});
    CHECK(hidden(out.path).empty());
    CaptureStderr err;
    io_hook = [](IoCall* c) {                           // one cannot be deleted: the new one is saved, the rest go
        return strcmp(c->name, "rename") == 0 && contains(c->path, "step_00000060") ? EBUSY : 0;
    };
    save(out.path, 90, 9, 1);
    io_hook = nullptr;
    CHECK(contains(err.text(), "is saved, but old checkpoints could not be deleted"));
    CHECK(list_checkpoints(out.path) == std::vector<int>{60, 90});
    CHECK(loads_as(find_checkpoint(out.path), 9));
    save(out.path, 100, 9, 1);
    CHECK(list_checkpoints(out.path) == std::vector<int>{100});
}

TEST_CASE("checkpoint: what is not a checkpoint in the place of one does not keep others from being deleted",
          "[P5][P6]") {
    TempDir out;
    const auto at = [&](const std::string& name) { return out.path + "/" + name; };
    CaptureStderr err;
    for (int step : {10, 20}) { save(out.path, step, 1); }
    for (const char* name : {"step_00000010/1_Pooling", "step_00000010/1_Pooling/deep"}) { io_mkdir(at(name)); }
    write_text(at("step_00000010/1_Pooling/mine"), "mine");
    REQUIRE(symlink("/none", at("step_00000020/link").c_str()) == 0);
    io_mkdir(at("step_00000003"));
    write_text(at("step_00000004"), "a file");
    REQUIRE(mkfifo(at("step_00000005").c_str(), 0600) == 0);
    REQUIRE(symlink("/none/none", at("step_00000030").c_str()) == 0);       // where a checkpoint is to be
    REQUIRE(symlink("/none/none", at("step_00000006").c_str()) == 0);
    io_mkdir(at(".trash_step_00000007"));                                   // of a run that could not delete it
    io_mkdir(at(".trash_step_00000007/left"));
    clean_output_directory(out.path);
    save(out.path, 30, 2, 1);
    CHECK(list_checkpoints(out.path) == std::vector<int>{30});
    CHECK(loads_as(at("step_00000030"), 2));
    // directories of the user stay, in what was to be deleted
    CHECK(hidden(out.path) == std::vector<std::string>{".trash_step_00000007", ".trash_step_00000010"});
    CHECK(read_file(at(".trash_step_00000010/1_Pooling/mine")) == "mine");
    CHECK(list_directory(at(".trash_step_00000010")) == std::vector<std::string>{"1_Pooling"});
    CHECK(contains(err.text(), "the directory " + at(".trash_step_00000010/1_Pooling") + " in a deleted checkpoint is "
                               "not this run's, and stays"));
    // the next run begins all the same, and a second checkpoint of the same step is not deleted
    CaptureStderr later;
    clean_output_directory(out.path);
    for (int step : {10, 50}) { save(out.path, step, 1); }
    save(out.path, 60, 2, 1);
    CHECK(list_checkpoints(out.path) == std::vector<int>{10, 60});
    CHECK(contains(later.text(), "step_00000060 is saved, but old checkpoints could not be deleted"));
    CHECK(read_file(at(".trash_step_00000010/1_Pooling/mine")) == "mine");
}

TEST_CASE("checkpoint: saving a step again replaces it, and left-overs are removed") {
    TempDir out;
    save(out.path, 5, 1);
    save(out.path, 5, 2);
    CHECK(hidden(out.path).empty());
    CHECK(loads_as(find_checkpoint(out.path), 2));
    io_rename(out.path + "/step_00000005", out.path + "/.old_step_00000005");
    for (const char* name : {"/.tmp_step_00000006", "/.trash_step_00000004"}) {
        write_text((io_mkdirs(out.path + name), out.path + name + "/model.safetensors"), "x");
    }
    write_text(out.path + "/main.log", "kept");
    clean_output_directory(out.path);
    CHECK(hidden(out.path).empty());
    CHECK(read_file(out.path + "/main.log") == "kept");
    CHECK(loads_as(find_checkpoint(out.path), 2));
}

TEST_CASE("checkpoint: a full disk is predicted, and a failing write costs nothing", "[P4]") {
    TempDir out;
    throws_with([&] { check_disk_space(out.path, (uint64_t)1 << 60); },
                out.path + ": a checkpoint needs 1152921.5 TB, but only ");
    for (int64_t count : {1, 2}) {
        std::string said;
        try { check_disk_space(out.path, (uint64_t)1 << 60, count); } catch (const Error& e) { said = e.what(); }
        CHECK(ends_with(said, count == 1 ? " are free on its disk" : "a larger --checkpoint_every save space"));
    }
    Model model = filled(1);
    const Checkpoint c = model.checkpoint();
    const std::string dir = save_checkpoint(out.path, 1, c, 0);
    uint64_t total = 0, largest = 0;
    for (const char* name : all_files) {
        total += File(dir + "/" + name).size;
        largest = std::max(largest, File(dir + "/" + name).size);
    }
    CHECK(checkpoint_bytes(c) >= total);
    CHECK(checkpoint_bytes(c) <= total + (2u << 20));
    Checkpoint bare = c;                                                    // the slack of 1 MiB hides no moment
    bare.m = bare.v = nullptr;
    uint64_t parameters = 0;
    for (const TensorSpec& s : model.table.specs) { parameters += s.size(); }
    CHECK(checkpoint_bytes(c) - checkpoint_bytes(bare) == 2 * sizeof(float) * parameters);
    bare.m = c.m;                                                           // without v
    CHECK(checkpoint_bytes(c) - checkpoint_bytes(bare) == sizeof(float) * parameters);

    struct rlimit old, limit;
    REQUIRE(getrlimit(RLIMIT_FSIZE, &old) == 0);
    const auto handler = signal(SIGXFSZ, SIG_IGN);
    int failed = 0, wrong = 0;
    for (uint64_t n = 0; n < largest; n += 1 + n / 16) {
        limit = old;
        limit.rlim_cur = n;
        REQUIRE(setrlimit(RLIMIT_FSIZE, &limit) == 0);
        std::string message;
        try { save(out.path, 2, 2, 1); } catch (const Error& e) { message = e.what(); }
        setrlimit(RLIMIT_FSIZE, &old);
        failed += contains(message, "cannot write: File too large") && contains(message, out.path);
        wrong +=
            message.empty() || !hidden(out.path).empty() || find_checkpoint(out.path) != dir || !loads_as(dir, 1);
    }
    signal(SIGXFSZ, handler);
    CHECK(failed > 50);
    CHECK(wrong == 0);
    io_hook = [](IoCall* c) { c->bytes -= c->bytes / 2; return 0; };      // a short write, and its rest
    save(out.path, 2, 2, 1);
    io_hook = nullptr;
    CHECK(loads_as(out.path + "/step_00000002", 2));
}

// ----------------------------------------------------------------------------------------------------------
// kills

namespace {

int calls_left = 0;

// Runs f in a child process that is killed before its n-th call that changes the disk, from 0 on. Returns whether there
// was such a call.
template <class F> bool killed_at(int n, F f) {
    const pid_t pid = fork();
    if (pid == 0) {
        calls_left = n;
        io_hook = [](IoCall*) {
            if (calls_left-- == 0) { raise(SIGKILL); }
            return 0;
        };
        try { f(); } catch (...) { _exit(1); }
        _exit(0);
    }
    int status = 0;
    REQUIRE(waitpid(pid, &status, 0) == pid);
    REQUIRE((WIFSIGNALED(status) || WEXITSTATUS(status) == 0));
    return WIFSIGNALED(status);
}

} // namespace

TEST_CASE("checkpoint: after a kill at any call of a save the old or the new one is whole", "[fork]") {
    const bool same_step = GENERATE(false, true);       // false: a new step, and the old one is deleted; true: replaced
    int old_found = 0, new_found = 0;
    int wrong = 0;
    bool killed = true;
    for (int n = 0; killed; n++) {
        TempDir out;
        save(out.path, 1, 1);
        killed = killed_at(n, [&] { save(out.path, same_step ? 1 : 2, 2, 1); });
        std::string before_cleaning = find_checkpoint(out.path);
        clean_output_directory(out.path);
        const std::string dir = find_checkpoint(out.path);
        wrong += !same_step && before_cleaning != dir;
        wrong += !hidden(out.path).empty();
        REQUIRE(!dir.empty());
        // none is half there
        for (int step : list_checkpoints(out.path)) { wrong += is_bad(out.path + "/" + step_name(step)); }
        const bool is_new = loads_as(dir, 2);
        wrong += !is_new && !loads_as(dir, 1);
        wrong += !same_step && is_new != (dir == out.path + "/step_00000002");
        (is_new ? new_found : old_found)++;
        CHECK((killed || is_new));
    }
    CHECK(wrong == 0);
    CHECK(old_found > 20);
    CHECK(new_found > 5);
}

TEST_CASE("checkpoint: the newest one of a run that saves and deletes meanwhile is found and read", "[fork]") {
    TempDir out;
    save(out.path, 1, 1);
    const pid_t pid = fork();
    if (pid == 0) {
        for (int s = 2;; s++) {
            try { save(out.path, s, (uint32_t)s, 1); } catch (...) { _exit(1); }
        }
    }
    CaptureStderr err;
    int failed = 0;
    for (int i = 0; i < 100; i++) {
        try {
            const std::string from = find_weights(out.path);    // --load RUN, and what then is read
            Model model(true, false);
            WeightReader(from, model.table, model.files, model.encoding).read(model.params.data(),
                                                                              {0, model.table.total});
        } catch (const Error& e) { failed++; UNSCOPED_INFO(e.what()); }
    }
    const int last = list_checkpoints(out.path).back();
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    CHECK(last > 20);
    CHECK(failed == 0);
    CHECK(err.text() == "");                                    // none was bad
}

TEST_CASE("checkpoint: --load takes the one that it names, and no other instead", "[checkpoint]") {
    TempDir out;
    save(out.path, 1, 1);
    const auto of = [&](int step) { return out.path + "/" + step_name(step); };
    const std::string absent = of(7);
    CHECK(find_weights(absent) == absent);                      // is then refused as what it is
    const std::string first = find_weights(out.path);
    CHECK(first == of(1));
    save(out.path, 2, 2);
    CHECK(find_weights(first) == first);
}

TEST_CASE("output directory: one run at a time", "[fork][P6]") {
    TempDir dir;
    const std::string out = dir.path + "/a/b";
    {
        OutputLock lock(out);
        CHECK(throws_with([&] { OutputLock second(out); },
                          strprintf("in use by another run (pid %ld)", (long)getpid())) == EXIT_BAD_INPUT);
    }
    OutputLock* again = new OutputLock(out);
    delete again;
    int ready[2];
    REQUIRE(pipe(ready) == 0);
    const pid_t pid = fork();
    if (pid == 0) {
        OutputLock lock(out);
        if (write(ready[1], "x", 1) != 1) { _exit(1); }
        pause();
        _exit(0);
    }
    char x;
    REQUIRE(read(ready[0], &x, 1) == 1);
    throws_with([&] { OutputLock second(out); }, strprintf("pid %ld", (long)pid));
    kill(pid, SIGKILL);
    int status;
    waitpid(pid, &status, 0);
    OutputLock after(out);          // a killed run does not leave a lock
    write_text(dir.path + "/file", "x");
    throws_with([&] { OutputLock lock(dir.path + "/file"); }, "file");
    throws_with([&] { OutputLock lock("/proc/none"); }, "/proc/none");
}

// ----------------------------------------------------------------------------------------------------------
// foreign weights

namespace {

uint16_t to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (uint16_t)(bits >> 16);
}

std::string llmc_bin(int version) {
    int32_t header[256] = {20240326, version, MAX_T, V, L, NH, C, Vp};
    std::string s((const char*)header, sizeof(header));
    for (int t = 0; t < 16; t++) {
        const size_t rows = t == 0 ? (size_t)Vp : gpt2[t].rows, cols = std::max(gpt2[t].cols, (size_t)1);
        for (int l = 0; l < (gpt2[t].per_layer ? L : 1); l++) {
            for (size_t i = 0; i < rows * cols; i++) {
                const float f = value(t, l, i / cols, i % cols);
                const uint16_t b = to_bf16(f);
                if (version == 3) {
                    s.append((const char*)&f, 4);
                } else {
                    s.append((const char*)&b, 2);
                }
            }
        }
    }
    return s;
}

// Hugging Face's GPT-2, with the buffers that old files hold
std::vector<SafetensorsItem> hf_items(const std::string& prefix, bool buffers) {
    std::vector<SafetensorsItem> items;
    for (int l = 0; l < L; l++) {
        for (int t = 0; t < 16; t++) {
            if (l > 0 && !gpt2[t].per_layer) { continue; }
            const bool turned = gpt2[t].transposed;
            const size_t rows = gpt2[t].rows, cols = std::max(gpt2[t].cols, (size_t)1);
            const size_t width = turned ? rows : cols;
            Shape shape = {rows};
            if (gpt2[t].cols > 0) { shape = turned ? Shape{cols, rows} : Shape{rows, cols}; }
            items.push_back({file_name(gpt2[t], l, prefix), shape, [=](float* out, size_t row0, size_t n) {
                for (size_t i = 0; i < n * width; i++) {
                    const size_t r = row0 + i / width, c = i % width;
                    out[i] = turned ? value(t, l, c, r) : value(t, l, r, c);
                }
            }});
        }
        const auto ones = [](float* out, size_t, size_t n) { std::fill(out, out + n, 1.0f); };
        if (!buffers) { continue; }
        items.push_back({strprintf("%sh.%d.attn.bias", prefix.c_str(), l), {1, 1, 1}, ones});
        items.push_back({strprintf("%sh.%d.attn.masked_bias", prefix.c_str(), l), {}, ones});
        if (l == 0) { items.push_back({"lm_head.weight", items[0].shape, items[0].fill}); }     // wte once more
    }
    return items;
}

// how many elements of the 16 tensors are wrong, index by index, and how many other elements lost their 99
int wrong_elements(const Model& model) {
    Model expected = model;
    expected.params.assign(model.params.size(), 99.0f);
    for (int t = 0; t < 16; t++) {
        if (model.table.find(gpt2[t].ours) < 0) { continue; }
        for (int l = 0; l < (gpt2[t].per_layer ? L : 1); l++) {
            float* p = const_cast<float*>(expected.at(gpt2[t].ours, l));
            const size_t cols = std::max(gpt2[t].cols, (size_t)1);
            for (size_t i = 0; i < gpt2[t].rows * cols; i++) { p[i] = value(t, l, i / cols, i % cols); }
        }
    }
    int wrong = 0;
    for (size_t i = 0; i < model.params.size(); i++) { wrong += model.params[i] != expected.params[i]; }
    return wrong;
}

Model nines(bool cable, bool learned) {
    Model model(cable, learned);
    model.params.assign(model.table.total, 99.0f);
    return model;
}
std::string load_into(Model& model, const std::string& path) {
    CaptureStderr err;
    WeightReader(path, model.table, model.files, model.encoding).read(model.params.data(), {0, model.table.total});
    return err.text();
}

// GPT-2's weights fill a model with learned positions, and a CABLE but for the encoding's own tensors. Returns stderr.
std::string fill_both(const std::string& path) {
    Model learned = nines(false, true), cable = nines(true, false);
    CHECK(load_into(learned, path) == "");
    CHECK(wrong_elements(learned) == 0);
    const std::string said = load_into(cable, path);
    CHECK(wrong_elements(cable) == 0);
    CHECK(contains(said, "(wpe) are not used"));
    CHECK(contains(said, "they keep their initial values"));
    return said;
}

} // namespace

TEST_CASE("import: llm.c's .bin, float32 and bf16") {
    TempDir dir;
    const int version = GENERATE(3, 5);
    const std::string path = dir.path + "/model.bin", text = llmc_bin(version);
    write_text(path, text);
    const std::string said = fill_both(path);
    CHECK(contains(said, "lacks transformer.h.0.attn.cable.c.weight"));
    CHECK(contains(said, "and 4 more; they keep their initial values"));
    const size_t lacks = said.find("lacks ");
    CHECK(std::count(said.begin() + (long)lacks, said.end(), ',') == 3);        // four names

    CHECK(read_config(path) == gpt2_config(V, MAX_T, C, L, NH, Json()));

    int accepted = 0;
    for (int field = 0; field < 8; field++) {           // every field of the header, with hostile values
        int32_t right;
        memcpy(&right, &text[(size_t)field * 4], 4);
        for (int32_t hostile : {0, -1, 1, INT32_MAX, INT32_MIN, right + 1, right - 1, 1 << 16, 4}) {
            std::string bytes = text;
            memcpy(&bytes[(size_t)field * 4], &hostile, 4);
            write_text(path, bytes);
            // V may be anything up to Vp, NH any divisor of C; versions 3 and 5 differ in the size of the file
            const bool fine = hostile == right || (field == 3 && hostile >= 1 && hostile <= Vp) ||
                              (field == 5 && hostile >= 1 && C % hostile == 0);
            INFO("field " << field << " = " << hostile);
            if (fine) { LlmcModel model(path); accepted++; continue; }
            CHECK(throws_with([&] { LlmcModel model(path); }, path) == EXIT_BAD_INPUT);
        }
    }
    CHECK(accepted > 3);
    for (size_t n : {(size_t)0, (size_t)3, (size_t)1023, (size_t)1024, text.size() - 1}) {
        write_text(path, text.substr(0, n));
        throws_with([&] { LlmcModel model(path); }, path);
    }
    write_text(path, text + "x");
    throws_with([&] { LlmcModel model(path); }, "bytes for its header");
    // L (12 CC + 13 C) + (Vp + T + 2) C = 2^64, which would wrap to 0: as if the file ended after its header
    const int64_t big_C = 32768, per_layer = 12 * big_C + 13;
    const int64_t big_L = ((int64_t)1 << 49) / per_layer;
    const int64_t big_Vp = ((int64_t)1 << 49) - big_L * per_layer - 3;
    const int32_t wraps[256] = {20240326, 3, 1, 1, (int32_t)big_L, 1, (int32_t)big_C, (int32_t)big_Vp};
    write_text(path, std::string((const char*)wraps, sizeof(wraps)));
    throws_with([&] { LlmcModel model(path); }, "do not fit in the file");
}

TEST_CASE("import: Hugging Face's GPT-2, with and without the prefix and the buffers") {
    TempDir dir;
    const std::string prefix = GENERATE("", "transformer.");
    const bool buffers = GENERATE(false, true);
    const std::string path = dir.path + "/model.safetensors";
    write_safetensors(path, hf_items(prefix, buffers));
    throws_with([&] { read_config(dir.path); }, "expected a config.json beside it");
    write_text(dir.path + "/config.json", gpt2_config(V, MAX_T, C, L, NH, Json()).dump());
    CHECK(read_config(dir.path)["n_layer"] == L);
    CHECK(read_config(path)["vocab_size"] == V);
    for (const std::string& from : {path, dir.path}) { fill_both(from); }
    // the matrix that is tied may have the name of the head, and LayerNorms their old names
    std::vector<SafetensorsItem> items = hf_items(prefix, false);
    for (SafetensorsItem& item : items) {
        const size_t end = item.name.rfind('.');
        const bool norm = contains(item.name, "ln_");
        if (item.name == prefix + "wte.weight") { item.name = "lm_head.weight"; }
        if (norm) { item.name = item.name.substr(0, end) + (ends_with(item.name, "weight") ? ".gamma" : ".beta"); }
    }
    write_safetensors(path, items);
    fill_both(path);
    // the same of a BERT, whose head has a bias, too
    std::vector<SourceTensor> list = {{"cls.predictions.decoder.weight", {2, 3}, false, nullptr},
                                      {"cls.predictions.decoder.bias", {2}, false, nullptr}};
    drop_tied(list, path);
    CHECK(list[0].name == "embeddings.word_embeddings.weight");
    CHECK(list[1].name == "cls.predictions.bias");
}

TEST_CASE("import: foreign weights that do not fit are refused before anything changes") {
    TempDir dir;
    const std::string path = dir.path + "/model.safetensors";
    Model model = nines(true, false);
    const auto refused = [&](const std::vector<SafetensorsItem>& items, const std::string& message) {
        write_safetensors(path, items);
        throws_with([&] { load_into(model, path); }, message);
        CHECK(same_bits(model.params, nines(true, false).params));
    };
    const auto none = [](float* out, size_t, size_t n) { std::fill(out, out + n, 0.0f); };
    std::vector<SafetensorsItem> items = hf_items("", false);
    items.pop_back();
    refused(items, "lacks transformer.h.1.mlp.c_proj.bias");
    items = hf_items("", false);
    items.push_back({"h.2.ln_1.weight", {C}, [](float* out, size_t, size_t n) { std::fill(out, out + n, 1.0f); }});
    refused(items, "tensors that this model does not have: h.2.ln_1.weight");
    items.back().name = "transformer.h.0.ln_1.weight";
    refused(items, "with and without the prefix");
    items = hf_items("", false);
    items[0].shape = {V, 1};
    items[0].fill = none;
    refused(items, "wte.weight: expected shape (11, 8), got (11, 1)");
    for (const Shape& shape : {Shape{V, C}, Shape{1}}) {
        items = hf_items("", false);
        items.push_back({"lm_head.weight", shape, none});           // not tied, even if config.json says so
        refused(items, "lm_head.weight: expected what wte.weight holds");
    }
    throws_with([&] { load_into(model, dir.path + "/none"); }, "cannot open");
    io_mkdirs(dir.path + "/empty");
    throws_with([&] { load_into(model, dir.path + "/empty"); },
                "expected model.safetensors, model.safetensors.index.json or step_* checkpoints, got none of them");
    for (const char* name : {"pytorch_model.bin", "pytorch_model.bin.index.json"}) {
        TempDir pickled;
        write_text(pickled.path + "/" + name, "PK");
        throws_with([&] { load_into(model, pickled.path); }, pickled.path + ": holds " + name + ", which only PyTorch "
                    "reads; convert it by python3 -c \"from transformers import AutoModelForPreTraining as M; M.from_"
                    "pretrained('" + pickled.path + "').save_pretrained('" + pickled.path + "')\"");
    }
    write_text(dir.path + "/text", std::string(2000, 'x'));
    throws_with([&] { load_into(model, dir.path + "/text"); }, "magic");
}

TEST_CASE("import: config.json must be of the model that is computed here") {
    TempDir dir;
    write_safetensors(dir.path + "/model.safetensors", hf_items("", false));
    // 1 as they are published: openai-community/gpt2, -medium and -xl, distilgpt2, bert-base-uncased and -chinese
    const char* gpt2_text = R"({"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "output_past": true, "resid_pdrop": 0.1, "summary_activation": null,
        "summary_first_dropout": 0.1, "summary_proj_to_labels": true, "summary_type": "cls_index",
        "summary_use_proj": true, "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
        "n_special": 0, "predict_special_tokens": true, "vocab_size": 50257, "_num_labels": 1,
        "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}})";
    const char* bert_text = R"({"architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1,
        "directionality": "bidi", "gradient_checkpointing": false, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512, "model_type": "bert", "num_attention_heads": 12, "num_hidden_layers": 12,
        "pad_token_id": 0, "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3,
        "pooler_size_per_head": 128, "pooler_type": "first_token_transform", "position_embedding_type": "absolute",
        "transformers_version": "4.6.0.dev0", "type_vocab_size": 2, "use_cache": true, "vocab_size": 30522})";
    // 2 what transformers computes otherwise, and keys that may be anything
    struct Change { const ConfigKeys& keys; const char *key, *value, *message; };
    const Change changes[] = {
        {GPT2_KEYS, "activation_function", "\"relu\"", "activation_function: expected \"gelu_new\""},
        {GPT2_KEYS, "layer_norm_epsilon", "1e-6", "layer_norm_epsilon: expected 1e-05"},
        {GPT2_KEYS, "scale_attn_weights", "false", "scale_attn_weights: expected true"},
        {GPT2_KEYS, "scale_attn_by_inverse_layer_idx", "true", "scale_attn_by_inverse_layer_idx: expected false"},
        {GPT2_KEYS, "tie_word_embeddings", "false", "tie_word_embeddings: expected true"},
        {GPT2_KEYS, "add_cross_attention", "true", "add_cross_attention: expected false"},
        {GPT2_KEYS, "per_layer_config", "{\"0\": {\"layer_norm_epsilon\": 1}}", "per_layer_config: expected"},
        {GPT2_KEYS, "quantization_config", "{\"bits\": 8}", "quantization_config: expected null"},
        {GPT2_KEYS, "num_hidden_layers", "2", "\"num_hidden_layers\" is not a known key"},    // n_layer's other name
        {GPT2_KEYS, "auto_map", "{}", "\"auto_map\" is not a known key"},
        {GPT2_KEYS, "window", "3", "\"window\" is not a known key"},
        {GPT2_KEYS, "n_inner", "768", "\"n_inner\": expected an integer from 3072 to 3072, got 768"},
        {GPT2_KEYS, "n_ctx n_inner", "0", "\"n_ctx n_inner\" is not a known key"},
        {GPT2_KEYS, "sc\\u001bale", "1", "\"sc\\x1bale\" is not a known key of a gpt2, and may change what"},
        {BERT_KEYS, "hidden_act", "\"gelu_new\"", "hidden_act: expected \"gelu\""},
        {BERT_KEYS, "layer_norm_eps", "1e-5", "layer_norm_eps: expected 1e-12"},
        {BERT_KEYS, "position_embedding_type", "\"relative_key\"", "position_embedding_type: expected \"absolute\""},
        {BERT_KEYS, "is_decoder", "true", "is_decoder: expected false"},
        {BERT_KEYS, "intermediate_size", "768", "\"intermediate_size\": expected an integer from 3072 to 3072, got"},
        {BERT_KEYS, "type_vocab_size", "1", "type_vocab_size: expected 2"},
        {BERT_KEYS, "embedding_size", "128", "\"embedding_size\" is not a known key of a bert"}};
    for (const Change& c : changes) {
        const bool bert = c.keys.type == std::string("bert");
        const std::string text = bert ? bert_text : gpt2_text;
        write_text(dir.path + "/config.json", text);
        CHECK(read_config(dir.path, c.keys)["vocab_size"] == (bert ? 30522 : 50257));
        Json changed = parse_json(text, "");
        changed[parse_json("\"" + std::string(c.key) + "\"", "").get<std::string>()] = parse_json(c.value, "");
        write_text(dir.path + "/config.json", changed.dump());
        INFO(c.key);
        CHECK(throws_with([&] { read_config(dir.path, c.keys); }, c.message) == EXIT_BAD_INPUT);
    }
    // 3 a file that begins with a byte order mark
    write_text(dir.path + "/config.json", "\xEF\xBB\xBF" + std::string(gpt2_text));
    throws_with([&] { read_config(dir.path); }, "config.json: begins with a byte order mark (BOM)");
}

TEST_CASE("import: a checkpoint of ours, named by its directory or its run's, is verified first") {
    TempDir out;
    const std::string dir = save(out.path, 5, 1);
    for (const std::string& from : {dir, out.path, dir + "/model.safetensors"}) {
        Model model(true, false);
        CHECK(load_into(model, from) == "");
        CHECK(same_bits(model.params, filled(1).params));
        CHECK(read_config(from)["position"]["name"] == "cable");
    }
    Model alibi(false, false);
    throws_with([&] { load_into(alibi, dir); }, "tensors that this model does not have: h.0.attn.cable.c.weight");
    put_byte(dir + "/model.safetensors", File(dir + "/model.safetensors").size - 1, '!');
    Model model(true, false);
    throws_with([&] { load_into(model, dir); }, "checksum");
    throws_with([&] { load_into(model, out.path); }, "none of its 1 checkpoints");
    throws_with([&] { load_into(model, dir + "/model.safetensors"); }, "checksum");
}

TEST_CASE("import: a file of weights is compared with the manifest beside it") {
    TempDir out;
    const std::string dir = save(out.path, 5, 1), path = dir + "/model.safetensors";
    const std::string good = read_file(path);
    const auto refused = [&](const std::string& message) {
        Model model(true, false);
        throws_with([&] { load_into(model, path); }, message);
    };
    for (size_t i = 0; i < 86; i++) {                           // a bit of every part of the file
        const size_t at = i * (good.size() - 1) / 85;
        write_text(path, good);
        put_byte(path, at, (char)(good[at] ^ (1 << i % 8)));
        refused("expected checksum");
    }
    write_text(path, good);
    put_byte(dir + "/config.json", 3, '!');                     // what else makes the model
    refused("config.json: expected checksum");
    // without what only training needs, and elsewhere, where no manifest lists it
    const std::string config = read_file(dir + "/config.json");
    ::unlink((dir + "/config.json").c_str());
    refused("config.json: cannot open");
    TempDir alone;
    write_text(alone.path + "/other.safetensors", good);
    write_text(alone.path + "/manifest.json", read_file(dir + "/manifest.json"));
    Model model(true, false);
    CHECK(load_into(model, alone.path + "/other.safetensors") == "");
    CHECK(same_bits(model.params, filled(1).params));
    const std::string again = save(out.path, 6, 1);
    ::unlink((again + "/state.json").c_str());
    ::unlink((again + "/optimizer_0.state").c_str());
    Model weights(true, false);
    CHECK(load_into(weights, again + "/model.safetensors") == "");
    CHECK(same_bits(weights.params, filled(1).params));
}

TEST_CASE("import: a model in several files with their index") {
    TempDir dir;
    const std::string index = dir.path + "/model.safetensors.index.json";
    const std::vector<SafetensorsItem> items = hf_items("transformer.", true);
    const auto shard_name = [](size_t i) { return strprintf("model-%05zu-of-00003.safetensors", i + 1); };
    std::vector<SafetensorsItem> parts[3];
    nlohmann::json map;
    for (size_t i = 0; i < items.size(); i++) {                 // in turns, so that no file has a layer
        parts[i % 3].push_back(items[i]);
        map[items[i].name] = shard_name(i % 3);
    }
    const auto write_shards = [&] {
        for (size_t i = 0; i < 3; i++) { write_safetensors(dir.path + "/" + shard_name(i), parts[i]); }
        write_text(index, nlohmann::json({{"metadata", {{"total_size", 1}}}, {"weight_map", map}}).dump());
    };
    write_shards();
    write_text(dir.path + "/config.json", gpt2_config(V, MAX_T, C, L, NH, Json()).dump());
    CHECK(read_config(dir.path)["n_layer"] == L);
    for (const std::string& from : {dir.path, index}) { fill_both(from); }
    const auto refused = [&](const std::string& message) {
        Model model = nines(false, true);
        throws_with([&] { load_into(model, dir.path); }, message);
        CHECK(same_bits(model.params, nines(false, true).params));
    };
    const auto with_index = [&](const std::string& text, const std::string& message) {
        write_text(index, text);
        refused(message);
        refused(dir.path);
        write_shards();
    };
    const auto with_map = [&](const std::string& name, const nlohmann::json& where, const std::string& message) {
        nlohmann::json changed = map;
        changed[name] = where;
        with_index(nlohmann::json({{"weight_map", changed}}).dump(), message);
    };
    // 1 a shard is missing, is cut short, or holds what is not its own
    const std::string wte = "transformer.wte.weight";
    ::unlink((dir.path + "/" + shard_name(1)).c_str());
    refused("names model-00002-of-00003.safetensors, which does not exist");
    write_shards();
    REQUIRE(truncate((dir.path + "/" + shard_name(1)).c_str(), 100) == 0);
    refused("model-00002-of-00003.safetensors");
    write_shards();
    parts[1].push_back(items[0]);
    write_safetensors(dir.path + "/" + shard_name(1), parts[1]);
    parts[1].pop_back();
    refused("model-00002-of-00003.safetensors: holds " + wte + ", which the index");
    refused("has in model-00001-of-00003.safetensors");
    write_shards();
    // 2 an index that lies
    with_map(wte, shard_name(2), "holds " + wte + ", which the index");
    with_map("transformer.h.9.ln_1.weight", shard_name(2),
             "has no tensor transformer.h.9.ln_1.weight, which the index");
    for (const char* outside : {"../other/model-00001-of-00003.safetensors", "/etc/passwd", "..", "", "config.json",
                                "sub/a.safetensors"}) {
        with_map(wte, outside, wte + ": expected the name of a .safetensors file beside it, got " + outside);
    }
    with_map("a\x1b[2J", "\x1b[2J", "a\\x1b[2J: expected the name of a .safetensors file beside it, got \\x1b[2J");
    with_map(wte, 3, "\"" + wte + "\": expected a string, got 3");
    with_map(wte, "none.safetensors", "names none.safetensors, which does not exist");
    nlohmann::json fewer = map;
    fewer.erase(wte);
    with_index(nlohmann::json({{"weight_map", fewer}}).dump(), "holds " + wte + ", which the index");
    // 3 one that is not an index
    const std::string entry = "\"" + wte + "\": \"" + shard_name(0) + "\"";
    with_index("{\"weight_map\": {" + entry + ", " + entry + "}}", "the key \"" + wte + "\" appears twice");
    with_index("{\"weight_map\": {}, \"weight_map\": {}}", "appears twice");
    with_index("{\"weight_map\": {}}", "expected an object that names tensors");
    with_index("{\"weight_map\": []}", "expected an object that names tensors");
    with_index("{}", "the key \"weight_map\" is missing");
    with_index("[]", "expected an object with the key \"weight_map\"");
    with_index("{", "not valid JSON");
    write_text(index, "");
    REQUIRE(truncate(index.c_str(), JSON_MAX_BYTES + 1) == 0);
    refused("expected a file of at most 4.0 MB");
    // 4 a whole file beside it comes first, as transformers has it
    write_safetensors(dir.path + "/model.safetensors", items);
    Model model = nines(false, true);
    CHECK(load_into(model, dir.path) == "");
    CHECK(wrong_elements(model) == 0);
}

TEST_CASE("config: what transformers reads, and what must agree") {
    const Json gpt2_small = gpt2_config(50257, 1024, 768, 12, 12, Json());
    CHECK(gpt2_small["model_type"] == "gpt2");
    CHECK(gpt2_small["architectures"][0] == "GPT2LMHeadModel");
    CHECK(gpt2_small["activation_function"] == "gelu_new");
    CHECK(gpt2_small["layer_norm_epsilon"] == 1e-5);
    const Json ours = gpt2_config(V, MAX_T, C, L, NH, {{"name", "t5_clip"}, {"K", 64}});
    check_config(ours, ours, "a");
    // transformers itself knows only learned positions
    CHECK(ours["model_type"] == "cable");
    CHECK(ours["auto_map"]["AutoModelForCausalLM"] == "cable_hf.CableForCausalLM");
    CHECK(gpt2_config(V, MAX_T, C, L, NH, {{"name", "learned"}})["model_type"] == "gpt2");
    CHECK(bert_config(260, 64, 8, 2, 2, 0, {{"name", "rope"}})["model_type"] == "cable_bert");
    CHECK_FALSE(bert_config(260, 64, 8, 2, 2, 0, {{"name", "learned"}}).contains("auto_map"));
    Json old = ours;                // an older checkpoint
    old["model_type"] = "gpt2";
    old.erase("auto_map");
    check_config(old, ours, "a");
    old["model_type"] = "cable_bert";
    throws_with([&] { check_config(old, ours, "a"); },
                "model_type: expected \"gpt2\" or \"cable\", got \"cable_bert\"");
    // a foreign model has no encoding to compare
    check_config(gpt2_config(V, 2 * MAX_T, C, L, NH, Json()), ours, "a");
    Json other = ours;
    other["activation_function"] = "relu";
    throws_with([&] { check_config(other, ours, "dir/config.json"); },
                "activation_function: expected \"gelu_new\", which is what is computed here, got \"relu\"");
    other = ours;
    other.erase("n_head");
    throws_with([&] { check_config(other, ours, "dir/config.json"); }, "n_head");
    other = ours;
    other["position"] = "t5_clip";
    throws_with([&] { check_config(other, ours, "dir/config.json"); }, "position: expected an object, got \"t5_clip\"");
}
