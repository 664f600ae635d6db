// engine/import.h -- initial weights from elsewhere: a Hugging Face GPT-2 or BERT (a directory, .safetensors, or
// several with their index), llm.c's model .bin (version 3 float32, version 5 bf16), or one of our checkpoints.
//
// A source becomes a list of named tensors with their readers. Names are compared without the prefixes "transformer."
// and "bert.". Everything is validated before the first parameter changes.
#pragma once

#include <map>
#include <memory>
#include <set>

#include "../base/common.h"
#include "checkpoint.h"
#include "safetensors.h"

struct SourceTensor {
    std::string name;           // as strip_prefix() has it: "h.0.attn.c_attn.weight"
    Shape shape;                // in the file
    bool internal_layout;       // matrices are (out,in), as ours; otherwise see FileTensor
    ReadElements read;          // converts to float32
};

// ----------------------------------------------------------------------------------------------------------
// llm.c's .bin
//
//   byte 0      int32  magic: 20240326
//   byte 4      int32  version: 3 (float32) or 5 (bf16)
//   byte 8      int32  maximal T, V, L, NH, C, Vp (V padded to a multiple of 128)
//   byte 1024          16 tensors in the order of blocks(), each for all layers: (L,3C,C) and so on, row-major

struct LlmcModel {
    File file;
    int version, max_T, V, L, NH, C;
    int Vp;                     // rows of wte in the file; the first V are used

    explicit LlmcModel(const std::string& path) : file(path) {
        const char* p = path.c_str();
        int32_t header[256];
        refuse_stand_in(path);
        check(file.size >= sizeof(header), "%s: expected an llm.c model, which has a header of %zu bytes, got %zu", p,
              sizeof(header), (size_t)file.size);
        file.read(header, sizeof(header), 0);
        check(header[0] == 20240326, "%s: expected magic number 20240326 (a GPT-2 of llm.c), got %d", p, header[0]);
        version = header[1];
        check(version == 3 || version == 5, "%s: expected version 3 (float32) or 5 (bf16), got %d", p, version);
        // 1 the header
        int* const fields[] = {&max_T, &V, &L, &NH, &C, &Vp};
        const char* names[] = {"max_seq_len", "vocab_size", "num_layers", "num_heads", "channels", "padded_vocab_size"};
        for (int i = 0; i < 6; i++) {
            *fields[i] = header[2 + i];
            check(header[2 + i] >= 1, "%s: header: %s: expected at least 1, got %d", p, names[i], header[2 + i]);
        }
        check(C % NH == 0, "%s: header: channels %d is not a multiple of num_heads %d", p, C, NH);
        check(V <= Vp, "%s: header: vocab_size %d exceeds padded_vocab_size %d", p, V, Vp);
        // 2 the tensors must fill the file exactly
        size_t elements = 0;
        for (const Block& b : blocks()) {
            const size_t n = checked_mul(b.layers, checked_mul(b.rows, b.cols, p), p);
            // one by one, so that the sum below cannot overflow
            check(n <= file.size, "%s: header: %zu elements of %s do not fit in the file of %zu bytes", p, n, b.name,
                  (size_t)file.size);
            elements += n;
        }
        const size_t want = checked_mul(elements, version == 3 ? 4 : 2, p) + sizeof(header);
        check(file.size == want,
              "%s: expected %zu bytes for its header (version %d, L %d, NH %d, C %d, Vp %d, T %d), got %zu", p, want,
              version, L, NH, C, Vp, max_T, (size_t)file.size);
    }

    // The tensors under Hugging Face's names; this object must outlive their readers.
    std::vector<SourceTensor> tensors() const {
        std::vector<SourceTensor> list;
        size_t at = 0;                              // where the tensor begins, in elements
        for (const Block& b : blocks()) {
            for (size_t l = 0; l < b.layers; l++, at += b.rows * b.cols) {
                const std::string name = b.per_layer ? "h." + std::to_string(l) + "." + b.name : b.name;
                const size_t start = at;
                const size_t rows = name == "wte.weight" ? (size_t)V : b.rows;      // the padding is not read
                const Shape shape = b.cols == 1 ? Shape{rows} : Shape{rows, b.cols};
                list.push_back({name, shape, true, [this, start](float* out, size_t first, size_t count) {
                    read(out, start + first, count);
                }});
            }
        }
        return list;
    }

private:
    struct Block { const char* name; bool per_layer; size_t layers, rows, cols; };      // cols 1: a vector

    // the tensors in the order of the file
    std::vector<Block> blocks() const {
        const size_t c = (size_t)C, l = (size_t)L;
        return {{"wte.weight", false, 1, (size_t)Vp, c}, {"wpe.weight", false, 1, (size_t)max_T, c},
                {"ln_1.weight", true, l, c, 1}, {"ln_1.bias", true, l, c, 1},
                {"attn.c_attn.weight", true, l, 3 * c, c}, {"attn.c_attn.bias", true, l, 3 * c, 1},
                {"attn.c_proj.weight", true, l, c, c}, {"attn.c_proj.bias", true, l, c, 1},
                {"ln_2.weight", true, l, c, 1}, {"ln_2.bias", true, l, c, 1},
                {"mlp.c_fc.weight", true, l, 4 * c, c}, {"mlp.c_fc.bias", true, l, 4 * c, 1},
                {"mlp.c_proj.weight", true, l, c, 4 * c}, {"mlp.c_proj.bias", true, l, c, 1},
                {"ln_f.weight", false, 1, c, 1}, {"ln_f.bias", false, 1, c, 1}};
    }
    void read(float* out, size_t first, size_t count) const {
        const char* dtype = version == 3 ? "F32" : "BF16";
        read_as_float(file, dtype, 1024 + first * safetensors_dtype_size(dtype), out, count);
    }
};

// ----------------------------------------------------------------------------------------------------------
// any source

using SafetensorsFiles = std::map<std::string, std::unique_ptr<Safetensors>>;       // by name
struct WeightSource {
    std::string path;                           // the file, or the index of several
    SafetensorsFiles safetensors;               // either these
    std::unique_ptr<LlmcModel> bin;             // or this
};

constexpr const char *WEIGHTS_FILE = "model.safetensors", *INDEX_FILE = "model.safetensors.index.json";
constexpr size_t MAX_SHARDS = 512;              // each is an open file

// The files of a split model. Every tensor is in the file that the index names, and in no other:
// {"metadata": {...}, "weight_map": {"wte.weight": "model-00001-of-00002.safetensors", ...}}
inline SafetensorsFiles open_shards(const std::string& index) {
    const char* p = index.c_str();
    refuse_stand_in(index);
    const auto j = parse_json<nlohmann::json>(read_file(index, JSON_MAX_BYTES), index);
    const nlohmann::json& map = json_at(j, "weight_map", index);
    check(map.is_object() && !map.empty(), "%s: weight_map: expected an object that names tensors, got %s", p,
          json_excerpt(map).c_str());
    const std::string dir = index.substr(0, index.rfind('/') + 1);
    SafetensorsFiles files;
    for (const auto& item : map.items()) {
        const std::string name = json_string(map, item.key(), index);
        check(name.find('/') == std::string::npos && ends_with(name, ".safetensors"),
              "%s: %s: expected the name of a .safetensors file beside it, got %s", p, printable(item.key()).c_str(),
              printable(name).c_str());
        files[name] = nullptr;
    }
    check(files.size() <= MAX_SHARDS, "%s: expected at most %zu files, got %zu", p, MAX_SHARDS, files.size());
    for (const auto& [name, file] : files) {
        check(path_exists(dir + name), "%s: names %s, which does not exist", p, printable(name).c_str());
    }
    for (auto& [name, file] : files) {
        file = std::make_unique<Safetensors>(dir + name);
        for (const SafetensorsEntry& e : file->entries) {
            const auto where = map.find(e.name);
            const std::string listed = where != map.end() ? where->get<std::string>() : "nowhere";
            check(listed == name, "%s: holds %s, which the index %s has in %s", (dir + name).c_str(),
                  printable(e.name).c_str(), p, printable(listed).c_str());
        }
    }
    for (const auto& item : map.items()) {
        const std::string name = item.value().get<std::string>();
        check(files[name]->find(item.key()) != nullptr, "%s: has no tensor %s, which the index %s has there",
              (dir + name).c_str(), printable(item.key()).c_str(), p);
    }
    return files;
}

// The source that --load names: the newest good checkpoint of a run if `path` is its --out, otherwise `path`. If the
// run has deleted a checkpoint that an earlier call found, the newest takes its place.
inline std::string find_weights(const std::string& path) {
    static std::set<std::string> found;
    refuse_hub_name(path);
    const bool gone = found.count(path) > 0 && !path_exists(path);
    const std::string run = gone ? path.substr(0, path.rfind('/')) : path;
    const bool model = path_exists(path + "/" + WEIGHTS_FILE) || path_exists(path + "/" + INDEX_FILE);
    if (model || list_checkpoints(run).empty()) { return path; }
    return *found.insert(find_checkpoint(run)).first;
}

// Opens a path from find_weights(). verify: compares a checkpoint of ours with its manifest
inline WeightSource open_found(const std::string& dir, bool verify) {
    WeightSource s;
    s.path = dir;
    if (is_directory(dir)) {
        const bool whole = path_exists(dir + "/" + WEIGHTS_FILE), split = path_exists(dir + "/" + INDEX_FILE);
        for (const char* name : {"pytorch_model.bin", "pytorch_model.bin.index.json"}) {
            check(whole || split || !path_exists(dir + "/" + name), "%s: holds %s, which only PyTorch reads; convert it"
                  " by python3 -c \"from transformers import AutoModelForPreTraining as M; M.from_pretrained('%s')."
                  "save_pretrained('%s')\"", dir.c_str(), name, dir.c_str(), dir.c_str());
        }
        for (const std::string& name : whole || split ? Names() : list_directory(dir)) {       // nanoGPT's ckpt.pt
            const bool other = ends_with(name, ".pt") || ends_with(name, ".pth") || ends_with(name, ".gguf");
            if (other && !is_directory(dir + "/" + name)) { refuse_stand_in(dir + "/" + name); }
        }
        check(whole || split,
              "%s: expected model.safetensors, model.safetensors.index.json or step_* checkpoints, got none of them "
              "(--load takes a checkpoint, a Hugging Face directory with safetensors files, or llm.c's .bin)",
              dir.c_str());
        if (verify && path_exists(dir + "/manifest.json")) { verify_checkpoint(dir); }
        s.path = dir + "/" + (whole ? WEIGHTS_FILE : INDEX_FILE);
    } else if (verify) {
        verify_weights_file(s.path);
    }
    // any other name must be of a file of llm.c's
    if (ends_with(s.path, ".safetensors")) {
        s.safetensors[s.path] = std::make_unique<Safetensors>(s.path);
    } else if (ends_with(s.path, ".safetensors.index.json")) {
        s.safetensors = open_shards(s.path);
    } else {
        s.bin = std::make_unique<LlmcModel>(s.path);
    }
    return s;
}

// Recognizes `path` and opens it.
inline WeightSource open_weights(const std::string& path, bool verify) {
    for (int tries = 1;; tries++) {
        const std::string found = find_weights(path);
        try {
            return open_found(found, verify);
        } catch (const Error&) {
            if (path_exists(found) || tries == 10) { throw; }       // else its run has deleted it in the meantime
        }
    }
}

// A tensor's name for comparison: without prefix, and with today's name for the gamma and beta of the first BERTs.
inline std::string strip_prefix(std::string name) {
    for (const char* prefix : {"transformer.", "bert."}) {
        if (starts_with(name, prefix)) { name = name.substr(strlen(prefix)); }
    }
    if (ends_with(name, ".gamma")) { return name.substr(0, name.size() - strlen("gamma")) + "weight"; }
    if (ends_with(name, ".beta")) { return name.substr(0, name.size() - strlen("beta")) + "bias"; }
    return name;
}

// Tensors in Hugging Face's files that are not parameters here: causal masks, and the heads of other tasks
inline bool is_skipped(const std::string& name) {
    const bool mask = ends_with(name, ".attn.bias") || ends_with(name, ".attn.masked_bias");
    const bool positions = name == "embeddings.position_ids";
    const bool other_task = starts_with(name, "pooler.") || starts_with(name, "cls.seq_relationship.");
    return mask || positions || other_task;
}

inline std::vector<SourceTensor>::iterator find_tensor(std::vector<SourceTensor>& list, const std::string& name) {
    return std::find_if(list.begin(), list.end(), [&](const SourceTensor& t) { return t.name == name; });
}

// Tensors of an output layer, each with the tensor that it repeats
const std::map<std::string, std::string> TIED = {
    {"lm_head.weight", "wte.weight"}, {"cls.predictions.decoder.weight", "embeddings.word_embeddings.weight"},
    {"cls.predictions.decoder.bias", "cls.predictions.bias"}};

// Removes repetitions of tensors from the list; an error if the two differ, as in another model. A repetition without
// its tensor gets the tensor's name.
inline void drop_tied(std::vector<SourceTensor>& list, const std::string& path) {
    for (const auto& [name, of] : TIED) {
        const auto head = find_tensor(list, name), kept = find_tensor(list, of);
        if (head == list.end()) { continue; }
        if (kept == list.end()) {
            head->name = of;
            continue;
        }
        bool same = head->shape == kept->shape;
        const size_t total = same ? shape_size(head->shape, name.c_str()) : 0;
        std::vector<float> a(std::min(total, COPY_BLOCK)), b(a.size());
        for (size_t at = 0; same && at < total; at += a.size()) {
            const size_t n = std::min(a.size(), total - at);
            head->read(a.data(), at, n);
            kept->read(b.data(), at, n);
            same = memcmp(a.data(), b.data(), sizeof(float) * n) == 0 ||            // a NaN is not equal to itself
                   std::equal(a.begin(), a.begin() + (ptrdiff_t)n, b.begin());
        }
        check(same, "%s: %s: expected what %s holds, as the model has one tensor for both; the two differ",
              path.c_str(), name.c_str(), of.c_str());
        list.erase(head);
    }
}

// the tensors of a source, which must outlive their readers
inline std::vector<SourceTensor> source_tensors(const WeightSource& s) {
    if (s.bin) { return s.bin->tensors(); }
    std::vector<SourceTensor> list;
    for (const auto& item : s.safetensors) {
        const Safetensors* file = item.second.get();
        for (const SafetensorsEntry& e : file->entries) {
            const std::string name = strip_prefix(e.name);
            if (is_skipped(name)) { continue; }
            // two tensors whose names differ only by the prefix would overwrite each other
            check(find_tensor(list, name) == list.end(), "%s: holds %s with and without the prefix transformer. or "
                  "bert.", s.path.c_str(), printable(name).c_str());
            check(e.dtype == "F32" || e.dtype == "F16" || e.dtype == "BF16",
                  "%s: %s: expected F32, F16 or BF16, got %s", file->file.path.c_str(), printable(e.name).c_str(),
                  e.dtype.c_str());
            list.push_back({name, e.shape, false, [file, &e](float* out, size_t first, size_t count) {
                file->read_elements(e, out, first, count);
            }});
        }
    }
    drop_tied(list, s.path);
    return list;
}

// "a, b, c and 4 more"
inline std::string name_list(const std::vector<std::string>& names) {
    std::string s;
    for (size_t i = 0; i < names.size() && i < 4; i++) { s += (i > 0 ? ", " : "") + printable(names[i]); }
    return names.size() <= 4 ? s : s + strprintf(" and %zu more", names.size() - 4);
}

// The weights at `path` for a model with these tensors. Tensors in `optional` may be missing and then keep their
// initial values; learned positions are dropped if the model has another encoding. Both are reported.
struct WeightReader {
    struct Found { std::string name; FileView view; ReadElements read; };       // view.transposed: as the source has it
    WeightSource source;
    std::vector<Found> found;
    bool complete = true;                           // none is missing

    WeightReader(const std::string& path, const TensorTable& table, const std::vector<FileTensor>& files,
                 const std::vector<FileTensor>& optional)
        : source(open_weights(path, true)) {
        const char* p = source.path.c_str();
        std::vector<SourceTensor> tensors = source_tensors(source);
        std::vector<std::string> kept, missing, unknown;
        // 1 find each tensor of the model in the source, and remove it from `tensors`
        for (const FileTensor& f : files) {
            const std::string name = strip_prefix(f.name);
            const auto t = find_tensor(tensors, name);
            if (t == tensors.end()) {
                const auto same = [&](const FileTensor& o) { return o.name == f.name; };
                const bool may = std::any_of(optional.begin(), optional.end(), same);
                (may ? kept : missing).push_back(f.name);
                continue;
            }
            FileView view = file_view(table, f);
            view.transposed = f.transposed && !t->internal_layout;
            check(t->shape == view.shape(), "%s: %s: expected shape %s, got %s", p, name.c_str(),
                  shape_text(view.shape()).c_str(), shape_text(t->shape).c_str());
            found.push_back({f.name, view, t->read});
            tensors.erase(t);
        }
        check(missing.empty(), "%s: lacks %s", p, name_list(missing).c_str());
        // 2 of the remaining tensors, only learned positions may be left out
        for (const SourceTensor& t : tensors) {
            if (t.name == "wpe.weight" || t.name == "embeddings.position_embeddings.weight") {
                say("%s: its learned positions (wpe) are not used, as the model has another encoding; --pos learned "
                    "uses them", p);
            } else {
                unknown.push_back(t.name);
            }
        }
        check(unknown.empty(), "%s: holds tensors that this model does not have: %s", p, name_list(unknown).c_str());
        if (!kept.empty()) { say("%s: lacks %s; they keep their initial values", p, name_list(kept).c_str()); }
        complete = kept.empty();
    }
    // data (part), on the device: the parameters of a part of the layout, which contains whole layers of each tensor
    void read(float* data, Slice part) const {
        for (const Found& f : found) { load_view(data, part, f.view, f.read, source.path, f.name); }
    }
};

// The config.json of the weights at `path`: from a directory, from beside a .safetensors file, or made from the header
// of a .bin.
inline Json read_config(const std::string& path, const ConfigKeys& keys = GPT2_KEYS) {
    const WeightSource source = open_weights(path, false);
    if (source.bin) {                               // llm.c's, whose header has the shape
        return gpt2_config(source.bin->V, source.bin->max_T, source.bin->C, source.bin->L, source.bin->NH, Json());
    }
    const std::string config = source.path.substr(0, source.path.find_last_of('/') + 1) + "config.json";
    check(path_exists(config), "%s: expected a config.json beside it, with the model's shape", source.path.c_str());
    const Json j = read_json(config);
    check(j.is_object(), "%s: expected an object with the model's shape, got %s", config.c_str(),
          json_excerpt(j).c_str());
    check_model_type(j, keys, config);
    check_computed(j, keys, config);
    for (const char* key : {keys.L, keys.NH, keys.C, keys.V, keys.T}) { json_int(j, key, 1, INT32_MAX, config); }
    const int64_t hidden = 4 * json_int(j, keys.C, 1, INT32_MAX, config);       // channels of the MLP
    for (const char* key : {"n_inner", "intermediate_size"}) {
        if (j.contains(key) && !j[key].is_null()) { json_int(j, key, hidden, hidden, config); }
    }
    return j;
}
