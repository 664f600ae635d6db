// engine/safetensors.h -- a model in Hugging Face's files: model.safetensors, and config.json.
#pragma once

#include <functional>

#include "../base/common.h"
#include "../base/tensor.h"
#include "json.h"

// ----------------------------------------------------------------------------------------------------------
// files and their checksums

struct FileSum {
    uint64_t bytes = 0;
    uint64_t sum = 0;                   // xxHash3, 64 bits
    bool operator==(const FileSum& o) const { return bytes == o.bytes && sum == o.sum; }
};

// A file being written: summed on the way, fsynced by finish(); the destructor closes it after an error.
struct OutputFile {
    std::string path;
    int fd;                             // -1 once finish() has closed it
    uint64_t bytes = 0;                 // written so far
    XXH3_state_t hash;                  // of all bytes so far

    explicit OutputFile(const std::string& path) : path(path), fd(io_create(path)) { XXH3_64bits_reset(&hash); }
    OutputFile(const OutputFile&) = delete;
    OutputFile& operator=(const OutputFile&) = delete;
    ~OutputFile() { if (fd >= 0) { ::close(fd); } }

    void write(const void* data, size_t n) {
        io_write(fd, data, n, path);
        XXH3_64bits_update(&hash, data, n);
        bytes += n;
    }
    FileSum finish() {
        io_fsync(fd, path);
        const int closing = fd;
        fd = -1;                        // first, so that the destructor does not close it again if closing fails
        io_close(closing, path);
        return {bytes, XXH3_64bits_digest(&hash)};
    }
};

// Writes and fsyncs a small file.
inline FileSum write_text(const std::string& path, const std::string& text) {
    OutputFile f(path);
    f.write(text.data(), text.size());
    return f.finish();
}

// Replaces `path` by a file that write(TEMPORARY) makes. If that fails, `path` is unchanged.
template <class Write> void write_whole(const std::string& path, Write write) {
    const std::string temporary = path + ".tmp";
    if (name_is_taken(temporary)) { io_unlink(temporary); }     // it may be a symbolic link
    try {
        write(temporary);
        io_rename(temporary, path);
    } catch (const Error&) {
        ::unlink(temporary.c_str());
        throw;
    }
    const size_t slash = path.rfind('/');
    io_fsync_directory(slash == std::string::npos ? "." : path.substr(0, slash + 1));
}
inline void write_text_whole(const std::string& path, const std::string& text) {
    write_whole(path, [&](const std::string& temporary) { write_text(temporary, text); });
}

// the size and checksum of a file on the disk
inline FileSum sum_file(const std::string& path) {
    const File f(path);
    XXH3_state_t hash;
    XXH3_64bits_reset(&hash);
    std::vector<char> block(std::min<uint64_t>(f.size, 4u << 20));      // 4 MiB, or the whole of a small file
    for (uint64_t at = 0; at < f.size; at += block.size()) {
        const size_t n = (size_t)std::min<uint64_t>(block.size(), f.size - at);
        f.read(block.data(), n, at);
        XXH3_64bits_update(&hash, block.data(), n);
    }
    return {f.size, XXH3_64bits_digest(&hash)};
}

// a checksum as a manifest has it
inline std::string sum_text(uint64_t sum) { return strprintf("xxh3:%016llx", (unsigned long long)sum); }

// The checksum of `count` blocks of 64 KiB, including the first and the last of the file; a small file is read whole.
inline uint64_t sampled_sum(const File& file, uint64_t count = 64) {
    const uint64_t block = 65536;
    std::vector<uint8_t> bytes(block);
    uint64_t sum = 0;
    if (file.size <= block * count) {
        bytes.resize(file.size);
        file.read(bytes.data(), file.size, 0);
        return checksum(bytes.data(), bytes.size());
    }
    const uint64_t last = file.size - block;
    for (uint64_t i = 0; i < count; i++) {
        file.read(bytes.data(), block, last / (count - 1) * i + last % (count - 1) * i / (count - 1));
        sum = checksum(bytes.data(), block, sum);
    }
    return sum;
}

// Files as the record of a run's data lists them (data.h)
inline Json file_records(const std::vector<std::string>& paths) {
    Json list = Json::array();
    for (const std::string& path : paths) {
        const File file(path);
        list.push_back({{"file", path.substr(path.rfind('/') + 1)}, {"bytes", file.size},
                        {"blocks", sum_text(sampled_sum(file))}});
    }
    return list;
}

// ----------------------------------------------------------------------------------------------------------
// shapes

using Shape = std::vector<size_t>;      // (): a scalar

// "(50257, 768)"
inline std::string shape_text(const Shape& shape) {
    std::string s = "(";
    for (size_t i = 0; i < shape.size(); i++) { s += (i > 0 ? ", " : "") + std::to_string(shape[i]); }
    return s + ")";
}

// the number of elements; an overflow is an error that names `what`
inline size_t shape_size(const Shape& shape, const char* what) {
    size_t n = 1;
    for (size_t extent : shape) { n = checked_mul(n, extent, what); }
    return n;
}

// ----------------------------------------------------------------------------------------------------------
// reading a safetensors file
//
//   byte 0      uint64  H, the length of the header, little-endian
//   byte 8      JSON    {"__metadata__": {"format": "pt", ...},
//                        "wte.weight": {"dtype": "F32", "shape": [50257, 768], "data_offsets": [0, 154389504]}, ...},
//                       padded with spaces to a multiple of 8 when we write it
//   byte 8 + H          the tensors, row-major, one after the other; data_offsets count from here
//
// The reader trusts nothing: before memory for a tensor is allocated, the header must describe the file to the last
// byte without gap, overlap or repeated name.

struct SafetensorsEntry {
    std::string name, dtype;            // "wte.weight", "F32"
    Shape shape;
    size_t elements = 0;                // the product of the shape
    uint64_t offset = 0;                // in the file; while read_header() works, in the data
    uint64_t bytes = 0;
};

// Bytes per element; 0: unknown. The types of skipped tensors (attention masks) count in the check of the layout.
inline size_t safetensors_dtype_size(const std::string& dtype) {
    static const struct { const char* name; size_t size; } dtypes[] = {
        {"F64", 8}, {"I64", 8}, {"U64", 8}, {"F32", 4}, {"I32", 4}, {"U32", 4}, {"F16", 2}, {"BF16", 2}, {"I16", 2},
        {"U16", 2}, {"I8", 1}, {"U8", 1}, {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};
    for (const auto& d : dtypes) { if (dtype == d.name) { return d.size; } }
    return 0;
}

// 1 sign bit, 5 bits of exponent (bias 15), 10 of mantissa
inline float f16_to_float(uint16_t h) {
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    const float sign = h & 0x8000 ? -1.0f : 1.0f;
    // zero and subnormal: mantissa / 1024 * 2^-14
    if (exponent == 0) { return sign * ldexpf((float)mantissa, -24); }
    if (exponent == 31) { return mantissa == 0 ? sign * INFINITY : NAN; }
    return sign * ldexpf((float)(1024 + mantissa), exponent - 25);          // (1 + mantissa / 1024) * 2^(exponent - 15)
}

// out (n): n elements of F32, BF16 or F16 at a byte offset, converted to float32 in bounded pieces.
inline void read_as_float(const File& file, const std::string& dtype, uint64_t offset, float* out, size_t n) {
    if (dtype == "F32") { file.read(out, n * 4, offset); return; }          // little-endian, as the machine
    std::vector<uint16_t> half(std::min(n, (size_t)1 << 20));
    for (size_t at = 0; at < n; at += half.size()) {
        const size_t piece = std::min(half.size(), n - at);
        file.read(half.data(), piece * 2, offset + at * 2);
        for (size_t i = 0; i < piece; i++) {
            const uint32_t upper = (uint32_t)half[i] << 16;         // bf16 is the upper half of a float32
            if (dtype == "BF16") { memcpy(&out[at + i], &upper, 4); } else { out[at + i] = f16_to_float(half[i]); }
        }
    }
}

struct Safetensors {
    File file;
    std::vector<SafetensorsEntry> entries;      // in the order of the file
    Json metadata = Json::object();             // "__metadata__": strings

    explicit Safetensors(const std::string& path) : file(path) { read_header(); }

    // the tensor of that name, or null
    const SafetensorsEntry* find(const std::string& name) const {
        for (const SafetensorsEntry& e : entries) { if (e.name == name) { return &e; } }
        return nullptr;
    }
    // the tensor of that name, which must exist
    const SafetensorsEntry& entry(const std::string& name) const {
        const SafetensorsEntry* e = find(name);
        check(e != nullptr, "%s: has no tensor %s", file.path.c_str(), name.c_str());
        return *e;
    }
    // out (count): elements first .. first + count - 1 as float32
    void read_elements(const SafetensorsEntry& e, float* out, size_t first, size_t count) const {
        check(e.dtype == "F32" || e.dtype == "BF16" || e.dtype == "F16", "%s: %s: expected F32, BF16 or F16, got %s",
              file.path.c_str(), e.name.c_str(), e.dtype.c_str());
        check(first <= e.elements && count <= e.elements - first,
              "%s: %s: cannot read %zu elements from element %zu on, it has %zu", file.path.c_str(), e.name.c_str(),
              count, first, e.elements);
        read_as_float(file, e.dtype, e.offset + first * safetensors_dtype_size(e.dtype), out, count);
    }

private:
    // One value of the header, {"dtype", "shape", "data_offsets"}; read_header() checks the places of all tensors.
    SafetensorsEntry read_entry(const std::string& name, const Json& j) const {
        const std::string what = file.path + ": tensor " + name.substr(0, 200);
        const char* w = what.c_str();
        check(j.is_object() && j.size() == 3 && j.contains("dtype") && j.contains("shape") &&
                  j.contains("data_offsets"),
              "%s: expected dtype, shape and data_offsets in the header, and nothing else", w);
        SafetensorsEntry e;
        e.name = name;
        // 1 the type
        check(j["dtype"].is_string(), "%s: expected a string as dtype", w);
        e.dtype = j["dtype"].get<std::string>();
        const size_t size = safetensors_dtype_size(e.dtype);
        check(size > 0, "%s: unknown dtype %s", w, e.dtype.substr(0, 20).c_str());
        // 2 the shape; an overflow of its size is an error
        const Json &shape = j["shape"], &offsets = j["data_offsets"];
        check(shape.is_array() && shape.size() <= 8, "%s: expected a list of at most 8 extents as shape", w);
        for (const Json& extent : shape) {
            check(extent.is_number_unsigned(), "%s: expected non-negative integers in shape", w);
            e.shape.push_back(extent.get<size_t>());
        }
        e.elements = shape_size(e.shape, w);
        e.bytes = checked_mul(e.elements, size, w);
        // 3 the place, as large as the tensor
        check(offsets.is_array() && offsets.size() == 2 && offsets[0].is_number_unsigned() &&
                  offsets[1].is_number_unsigned(),
              "%s: expected two non-negative integers as data_offsets", w);
        const uint64_t begin = offsets[0].get<uint64_t>(), end = offsets[1].get<uint64_t>();
        check(begin <= end && end <= file.size, "%s: data_offsets %zu, %zu are not inside the file of %zu bytes", w,
              (size_t)begin, (size_t)end, (size_t)file.size);
        check(end - begin == e.bytes, "%s: expected data_offsets that span the %zu bytes of %s %s, got %zu", w,
              (size_t)e.bytes, e.dtype.c_str(), shape_text(e.shape).c_str(), (size_t)(end - begin));
        e.offset = begin;
        return e;
    }

    void read_header() {
        const char* path = file.path.c_str();
        refuse_stand_in(path);
        check(file.size >= 8, "%s: expected a safetensors file, got %zu bytes", path, (size_t)file.size);
        unsigned char raw[8];
        file.read(raw, 8, 0);
        uint64_t length = 0;                    // little-endian
        for (int i = 7; i >= 0; i--) { length = length << 8 | raw[i]; }
        // the format's own reader accepts 100 MB; the 1,800 tensors of the largest model here need 0.2 MB
        check(length <= JSON_MAX_BYTES && length <= file.size - 8,
              "%s: a header of %zu bytes does not fit in the file of %zu bytes, or exceeds %s (truncated, or not a "
              "safetensors file?)", path, (size_t)length, (size_t)file.size, format_bytes(JSON_MAX_BYTES).c_str());
        std::string text((size_t)length, '\0');
        if (length > 0) { file.read(&text[0], length, 8); }
        const Json header = parse_json(text, file.path);
        check(header.is_object(), "%s: expected a JSON object as header", path);
        for (const auto& item : header.items()) {
            if (item.key() != "__metadata__") { entries.push_back(read_entry(item.key(), item.value())); continue; }
            metadata = item.value();
            check(metadata.is_object(), "%s: expected an object as __metadata__", path);
            for (const Json& value : metadata) {
                check(value.is_string(), "%s: expected strings in __metadata__", path);
            }
        }
        // sorted by offset, each tensor must begin where the one before ends, and the last must end where the file does
        std::stable_sort(entries.begin(), entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
            return a.offset != b.offset ? a.offset < b.offset : a.bytes < b.bytes;      // empty tensors first
        });
        uint64_t at = 0, begin = 8 + length;            // in the data; where the data begins
        for (SafetensorsEntry& e : entries) {
            check(e.offset == at, "%s: tensor %s: expected it to begin at byte %zu of the data, where the one before "
                  "ends, got %zu", path, e.name.substr(0, 200).c_str(), (size_t)at, (size_t)e.offset);
            at += e.bytes;
            e.offset += begin;                          // from here on in the file
        }
        check(at == file.size - begin, "%s: expected the %zu bytes of data that the header describes, got %zu", path,
              (size_t)at, (size_t)(file.size - begin));
    }
};

// ----------------------------------------------------------------------------------------------------------
// writing a safetensors file: blocks of rows pass through a bounded buffer, so that a transposed view needs no second
// copy of the model, and are summed on the way, so that the manifest needs no second pass

// A float32 tensor to be written; the first extent of its shape counts its rows. fill(out, row0, rows) gives rows
// row0 .. row0 + rows - 1: it is called for each row once, in order.
struct SafetensorsItem {
    std::string name;
    Shape shape;
    std::function<void(float* out, size_t row0, size_t rows)> fill;
};

// the JSON header of a file that has these items one after the other
inline std::string safetensors_header(const std::vector<SafetensorsItem>& items, const Json& metadata) {
    Json header;
    header["__metadata__"]["format"] = "pt";
    for (const auto& kv : metadata.items()) { header["__metadata__"][kv.key()] = kv.value(); }
    uint64_t at = 0;
    for (const SafetensorsItem& item : items) {
        const uint64_t end = at + shape_size(item.shape, item.name.c_str()) * sizeof(float);
        header[item.name] = {{"dtype", "F32"}, {"shape", item.shape}, {"data_offsets", {at, end}}};
        at = end;
    }
    std::string text = json_text(header);
    text.resize((text.size() + 7) / 8 * 8, ' ');        // so that the data is aligned when the file is mapped
    return text;
}

// Writes and fsyncs the file. `metadata`: strings in addition to "format".
inline FileSum write_safetensors(const std::string& path, const std::vector<SafetensorsItem>& items,
                                 const Json& metadata = Json::object()) {
    const std::string header = safetensors_header(items, metadata);
    OutputFile file(path);
    unsigned char length[8];
    for (int i = 0; i < 8; i++) { length[i] = (unsigned char)((uint64_t)header.size() >> 8 * i); }
    file.write(length, 8);
    file.write(header.data(), header.size());
    std::vector<float> block;
    for (const SafetensorsItem& item : items) {
        const size_t rows = item.shape.empty() ? 1 : item.shape[0];
        // elements per row; rows are written in blocks of about 2^20 elements, or one by one if they are larger
        const size_t row = rows == 0 ? 0 : shape_size(item.shape, item.name.c_str()) / rows;
        if (row == 0) { continue; }                     // an empty tensor
        const size_t step = std::min(rows, std::max((size_t)1, ((size_t)1 << 20) / row));
        block.resize(std::max(block.size(), step * row));
        for (size_t r = 0; r < rows; r += step) {
            const size_t n = std::min(step, rows - r);
            item.fill(block.data(), r, n);
            file.write(block.data(), n * row * sizeof(float));
        }
    }
    return file.finish();
}

// ----------------------------------------------------------------------------------------------------------
// views: a tensor of a file inside a tensor of the model

// The place of a FileTensor in the table's layout: (rows,cols) from element `offset` on
struct FileView {
    size_t offset, rows, cols;
    bool is_vector, transposed;         // in the file

    size_t size() const { return rows * cols; }
    // the shape in the file
    Shape shape() const {
        if (is_vector) { return {rows}; }
        return transposed ? Shape{cols, rows} : Shape{rows, cols};
    }
};

// the place of a FileTensor in the table's layout; an error if it is not inside its tensor
inline FileView file_view(const TensorTable& table, const FileTensor& f) {
    const size_t i = (size_t)table.index(f.tensor);
    const TensorSpec& s = table.specs[i];
    const bool inside = f.layer >= 0 && f.layer < std::max(s.layers, 1) && f.row0 <= s.rows &&
        f.rows <= s.rows - f.row0;
    // a vector cannot be transposed
    check(inside && !(f.transposed && s.cols == 0), "file tensor %s is not inside tensor %s", f.name.c_str(),
          s.name.c_str());
    return {table.offset(i, f.layer) + f.row0 * s.row_size(), f.rows, s.row_size(), s.cols == 0, f.transposed};
}

// out (cols,rows) = in (rows,cols)^T, in tiles: row by row, every write would touch a new cache line
inline void transpose_matrix(float* out, const float* in, size_t rows, size_t cols) {
    const size_t tile = 32;
    for (size_t r0 = 0; r0 < rows; r0 += tile) {
        for (size_t c0 = 0; c0 < cols; c0 += tile) {
            for (size_t c = c0; c < std::min(cols, c0 + tile); c++) {
                for (size_t r = r0; r < std::min(rows, r0 + tile); r++) { out[c * rows + r] = in[r * cols + c]; }
            }
        }
    }
}

constexpr size_t COPY_BLOCK = (size_t)1 << 20;      // elements that pass through host memory at a time

// out (count): elements first .. first + count - 1 of a tensor, in the order of the file
using ReadElements = std::function<void(float* out, size_t first, size_t count)>;

// Fills the view from a tensor of a file, through read(), if data (part) holds it. A transposed matrix is in host
// memory as a whole. An error if a weight is not finite; path, name: of the tensor, for the message
inline void load_view(float* data, Slice part, const FileView& view, const ReadElements& read, const std::string& path,
                      const std::string& name) {
    if (view.offset < part.begin || view.offset >= part.end) { return; }
    const bool transposed = view.transposed;
    const size_t block = transposed ? view.size() : std::min(view.size(), COPY_BLOCK);
    std::vector<float> host(block);                         // in the file's order
    std::vector<float> turned(transposed ? block : 0);      // in the device's order
    for (size_t at = 0; at < view.size(); at += block) {
        const size_t n = std::min(block, view.size() - at);
        read(host.data(), at, n);
        for (size_t i = 0; i < n; i++) {
            if (std::isfinite(host[i])) { continue; }
            die(EXIT_DIVERGED, "%s: %s: element %zu: expected a finite weight, got %g (of a run that diverged?)",
                path.c_str(), name.c_str(), at + i, host[i]);
        }
        if (transposed) { transpose_matrix(turned.data(), host.data(), view.cols, view.rows); }     // (cols,rows) in
        const float* from = transposed ? turned.data() : host.data();
        copy_to_device(data + (view.offset - part.begin) + at, from, n * sizeof(float), Stream(0));
    }
}

// ----------------------------------------------------------------------------------------------------------
// config.json

// transformers' names for a model's extents and type.
// type: "model_type" with learned positions, which transformers itself computes, and in old checkpoints;
// cable: "model_type" with any other encoding, which the named classes of HF_FILE compute
struct ConfigKeys { const char *type, *cable, *L, *NH, *C, *V, *T, *config_class, *base_class, *head, *head_class; };
constexpr ConfigKeys GPT2_KEYS = {
    .type = "gpt2", .cable = "cable",
    .L = "n_layer", .NH = "n_head", .C = "n_embd", .V = "vocab_size", .T = "n_positions",
    .config_class = "CableConfig", .base_class = "CableModel",
    .head = "AutoModelForCausalLM", .head_class = "CableForCausalLM"};
constexpr ConfigKeys BERT_KEYS = {
    .type = "bert", .cable = "cable_bert",
    .L = "num_hidden_layers", .NH = "num_attention_heads", .C = "hidden_size", .V = "vocab_size",
    .T = "max_position_embeddings", .config_class = "CableBertConfig", .base_class = "CableBertModel",
    .head = "AutoModelForMaskedLM", .head_class = "CableBertForMaskedLM"};

// The models in Python, written beside the weights. Since config.json's auto_map names its classes, transformers runs
// this file with trust_remote_code=True, and refuses the model without.
constexpr const char* HF_FILE = "cable_hf.py";
inline const char* hf_code() {
    static const char text[] =
#include "../../dev/hf/cable_encodings.py"
#include "../../dev/hf/cable_hf.py"
        ;
    return text + 1;        // without the first quote, which makes R"py( a string in Python
}

// Adds our keys to transformers' configuration: "position" (null: left out), and the keys of `mask`.
inline Json with_encoding(Json j, const ConfigKeys& keys, const Json& position, const Json& mask) {
    j.update(mask);
    if (!position.is_null()) { j["position"] = position; }
    const bool learned = position.is_null() || position.value("name", "") == "learned";
    if (learned && mask.empty()) { return j; }              // transformers itself computes this model
    const std::string module = std::string(HF_FILE, strlen(HF_FILE) - strlen("py"));        // "cable_hf."
    j["model_type"] = keys.cable;
    j["architectures"] = Json::array({keys.head_class});
    j["auto_map"] = {{"AutoConfig", module + keys.config_class}, {"AutoModel", module + keys.base_class},
                     {keys.head, module + keys.head_class}};
    return j;
}

// transformers' configuration of a GPT-2, with our "position" (null: left out) and the keys of `mask`, as "window"
inline Json gpt2_config(int V, int n_positions, int n_embd, int n_layer, int n_head, const Json& position,
                        const Json& mask = Json::object()) {
    const Json j = {{"model_type", "gpt2"}, {"architectures", Json::array({"GPT2LMHeadModel"})}, {"vocab_size", V},
              {"n_positions", n_positions}, {"n_ctx", n_positions}, {"n_embd", n_embd}, {"n_layer", n_layer},
              {"n_head", n_head}, {"n_inner", nullptr}, {"activation_function", "gelu_new"},
              {"layer_norm_epsilon", 1e-5}, {"initializer_range", 0.02}, {"resid_pdrop", 0.0}, {"embd_pdrop", 0.0},
              {"attn_pdrop", 0.0}, {"scale_attn_weights", true}, {"use_cache", true}, {"tie_word_embeddings", true},
              {"bos_token_id", nullptr}, {"eos_token_id", nullptr}, {"torch_dtype", "float32"}};
    return with_encoding(j, GPT2_KEYS, position, mask);
}

// the same for a BERT for masked language modelling; pad: the id of [PAD]
inline Json bert_config(int V, int T, int C, int L, int NH, int pad, const Json& position,
                        const Json& mask = Json::object()) {
    const Json j = {{"model_type", "bert"}, {"architectures", Json::array({"BertForMaskedLM"})}, {"vocab_size", V},
              {"max_position_embeddings", T}, {"hidden_size", C}, {"num_hidden_layers", L}, {"num_attention_heads", NH},
              {"intermediate_size", 4 * C}, {"hidden_act", "gelu"}, {"type_vocab_size", 2}, {"layer_norm_eps", 1e-12},
              {"initializer_range", 0.02}, {"hidden_dropout_prob", 0.0}, {"attention_probs_dropout_prob", 0.0},
              {"pad_token_id", pad}, {"tie_word_embeddings", true}, {"position_embedding_type", "absolute"},
              {"torch_dtype", "float32"}};
    return with_encoding(j, BERT_KEYS, position, mask);
}

// An error if the configuration is another trainer's.
inline void check_model_type(const Json& j, const ConfigKeys& keys, const std::string& what) {
    if (!j.contains("model_type")) { return; }
    const Json& type = j["model_type"];
    check(type == keys.type || type == keys.cable, "%s: model_type: expected \"%s\" or \"%s\", got %s (a model of the "
          "other trainer?)", what.c_str(), keys.type, keys.cable, json_excerpt(type).c_str());
}

// Every key of config.json is in one of these lists; any other key is refused, because it may change what the model
// computes. The lists cover what GPT2Config, BertConfig and PretrainedConfig of transformers 2 to 5 write.
//
// 1 keys that change the result, with the values for which transformers computes what our kernels compute
inline const Json& computed_values() {
    static const Json table = parse_json(R"json({
        "activation_function": ["gelu_new", "gelu_pytorch_tanh"],   "hidden_act": ["gelu"],
        "layer_norm_epsilon": [1e-5],                               "layer_norm_eps": [1e-12],
        "scale_attn_weights": [true],                               "scale_attn_by_inverse_layer_idx": [false],
        "position_embedding_type": ["absolute"],                    "tie_word_embeddings": [true],
        "is_decoder": [false],                                      "is_encoder_decoder": [false],
        "add_cross_attention": [false],                             "causal": [true],
        "pruned_heads": [{}, null],                                 "per_layer_config": [{}, null],
        "type_vocab_size": [2],
        "quantization_config": [null],                              "cross_attention_hidden_size": [null]
    })json", "computed_values");
    return table;
}
// 2 keys that change nothing here: extents are checked by the tensors' shapes, and dropout matters only in training,
// which has none here
constexpr const char* HARMLESS_KEYS =
    // extents, files, types of numbers, and the history of the model
    " n_ctx n_inner intermediate_size model_type architectures transformers_version _name_or_path"
    " name_or_path _commit_hash torch_dtype dtype use_bfloat16 reorder_and_upcast_attn chunk_size_feed_forward"
    " attn_implementation _attn_implementation _attn_implementation_internal _attn_implementation_autoset"
    " gradient_checkpointing torchscript xla_device tf_legacy_loss tie_encoder_decoder built_from cable_version"
    " n_special predict_special_tokens"
    // training
    " initializer_range resid_pdrop embd_pdrop attn_pdrop hidden_dropout_prob attention_probs_dropout_prob"
    // the results of a call
    " use_cache output_past output_attentions output_hidden_states output_scores return_dict return_dict_in_generate"
    // tokens
    " bos_token_id eos_token_id eos_token_ids pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix"
    // the heads of other tasks
    " summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj classifier_dropout"
    " directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type"
    " id2label label2id num_labels _num_labels problem_type finetuning_task task_specific_params"
    // generation
    " do_sample early_stopping max_length min_length num_beams num_beam_groups num_return_sequences temperature top_k"
    " top_p typical_p diversity_penalty repetition_penalty length_penalty exponential_decay_length_penalty"
    " no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens"
    " forced_bos_token_id forced_eos_token_id remove_invalid_values ";
// 3 keys of ours, checked by their readers; a file without "position" is not ours
constexpr const char* OUR_KEYS =
    " position encoding_version rope_scaling rope_theta window sinks document_mask vocab_softmax vocab_used pooling"
    " auto_map ";

// An error if transformers would compute from this configuration anything that this program does not.
inline void check_computed(const Json& j, const ConfigKeys& keys, const std::string& what) {
    std::string free = HARMLESS_KEYS;
    for (const char* key : {keys.L, keys.NH, keys.C, keys.V, keys.T}) { free += key + std::string(" "); }
    if (j.contains("position")) { free += OUR_KEYS; }
    check_keys(j, computed_values(), free, std::string("a ") + keys.type, "what the model computes", what);
}

// "position" without rope's base, which is not compared: no tensor depends on it, and --rope_theta may change it.
inline Json without_theta(Json position) {
    if (position.is_object()) { position.erase("theta"); }
    if (position.is_structured()) { for (Json& item : position) { item = without_theta(item); } }
    return position;
}

// An error unless the configuration `found` fits `wanted`; without a "position", as other software writes it, it does.
inline void check_config(const Json& found, const Json& wanted, const std::string& what) {
    const ConfigKeys& keys = wanted.contains(BERT_KEYS.C) ? BERT_KEYS : GPT2_KEYS;
    check_model_type(found, keys, what);
    for (const char* key : {keys.L, keys.NH, keys.C, keys.V}) {
        const int64_t have = json_int(found, key, 1, INT32_MAX, what);
        const int64_t want = json_int(wanted, key, 1, INT32_MAX, "the model");
        check(have == want, "%s: %s: expected %lld, got %lld (--model)", what.c_str(), key, (long long)want,
              (long long)have);
    }
    check_computed(found, keys, what);
    if (!found.contains("position") || !wanted.contains("position")) { return; }
    // the encoding: its name and all hyperparameters
    const Json have = without_theta(found["position"]), want = without_theta(wanted["position"]);
    check(have.is_object() && want.is_object(), "%s: position: expected an object, got %s", what.c_str(),
          json_excerpt(have).c_str());
    check(have.contains("name"), "%s: position: expected a name, got %s", what.c_str(), json_excerpt(have).c_str());
    for (const auto& item : have.items()) {
        const std::string key = item.key();
        const std::string w = want.contains(key) ? json_excerpt(want[key]) : "absent";
        check(want.contains(key) && item.value() == want[key], "%s: position.%s: expected %s, got %s (--pos)",
              what.c_str(), key.c_str(), w.c_str(), json_excerpt(item.value()).c_str());
    }
}
