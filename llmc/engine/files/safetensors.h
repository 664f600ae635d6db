// files/safetensors.h -- Hugging Face's tensor file.
//
//   byte 0      uint64  H, the length of the header, little-endian
//   byte 8      JSON    {"__metadata__": {"format": "pt", ...},
//                        "wte.weight": {"dtype": "F32", "shape": [50257, 768], "data_offsets": [0, 154389504]}, ...},
//                       padded with spaces to a multiple of 8 when we write it
//   byte 8 + H          the tensors, row-major, one after the other; data_offsets count from here
//
// The reader trusts nothing: the header must describe the file to the last byte (no gap, overlap or repeated name)
// before memory for a tensor is allocated. The writer streams blocks of rows through a bounded buffer, so that a
// transposed view needs no second copy of the model, and sums what it writes, so that the manifest needs no second
// pass.
#pragma once

#include <functional>

#include "../../base/common.h"
#include "../json.h"

// size and checksum of a file, as a manifest records them
struct FileSum {
    uint64_t bytes = 0;
    uint64_t sum = 0;                   // xxHash3, 64 bits
    bool operator==(const FileSum& o) const { return bytes == o.bytes && sum == o.sum; }
};

// A file being written: summed on the way, fsynced by finish(). An error that unwinds past it closes it silently.
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

// the sum of a file on the disk, read in blocks of 4 MiB
inline FileSum sum_file(const std::string& path) {
    const File f(path);
    XXH3_state_t hash;
    XXH3_64bits_reset(&hash);
    std::vector<char> block(std::min<uint64_t>(f.size, 4u << 20));      // a small file needs no more than its size
    for (uint64_t at = 0; at < f.size; at += block.size()) {
        const size_t n = (size_t)std::min<uint64_t>(block.size(), f.size - at);
        f.read(block.data(), n, at);
        XXH3_64bits_update(&hash, block.data(), n);
    }
    return {f.size, XXH3_64bits_digest(&hash)};
}

// a checksum in a manifest's form: xxHash3's 64 bits
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

// Files as the record lists them
inline Json file_records(const std::vector<std::string>& paths) {
    Json list = Json::array();
    for (const std::string& path : paths) {
        const File file(path);
        list.push_back({{"file", path.substr(path.rfind('/') + 1)}, {"bytes", file.size},
                        {"blocks", sum_text(sampled_sum(file))}});
    }
    return list;
}

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
// reading

struct SafetensorsEntry {
    std::string name, dtype;            // "wte.weight", "F32"
    Shape shape;
    size_t elements = 0;                // the product of the shape
    uint64_t offset = 0;                // in the file (in the data while the header is read)
    uint64_t bytes = 0;
};

// Bytes per element; 0: unknown. Types of skipped buffers (attention masks) count, too: the layout is checked by them.
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
    // One value of the header, {"dtype", "shape", "data_offsets"}; where the tensor lies is checked by read_header().
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
        // 2 the shape; its size may overflow 64 bits, which is an error too
        const Json &shape = j["shape"], &offsets = j["data_offsets"];
        check(shape.is_array() && shape.size() <= 8, "%s: expected a list of at most 8 extents as shape", w);
        for (const Json& extent : shape) {
            check(extent.is_number_unsigned(), "%s: expected non-negative integers in shape", w);
            e.shape.push_back(extent.get<size_t>());
        }
        e.elements = shape_size(e.shape, w);
        e.bytes = checked_mul(e.elements, size, w);
        // 3 the place, which must have the size of the tensor
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
// writing

// A float32 tensor to be written. fill(out, row0, rows) produces rows row0 .. row0 + rows - 1; the first extent of the
// shape counts the rows. It is called in order, and every row is requested once.
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
