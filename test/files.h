// files.h -- temporary directories and files for tests, and the place of the real data.
#pragma once

#include <climits>

#include "test/catch.h"

// A fresh directory, removed with everything in it at the end of the test.
struct TempDir {
    std::string path;

    TempDir() {
        const char* base = getenv("TMPDIR");
        path = std::string(base != nullptr && *base != '\0' ? base : "/tmp") + "/cable_test_XXXXXX";
        if (mkdtemp(&path[0]) == nullptr) { die(EXIT_BAD_INPUT, "cannot make %s: %s", path.c_str(), strerror(errno)); }
    }
    TempDir(const TempDir&) = delete;
    TempDir& operator=(const TempDir&) = delete;
    ~TempDir() { remove(path); }

    std::string operator/(const std::string& name) const { return path + "/" + name; }

    static void remove(const std::string& path) {
        struct stat st;
        if (lstat(path.c_str(), &st) != 0) { return; }
        if (S_ISDIR(st.st_mode)) {
            for (const std::string& name : list_directory(path)) { remove(path + "/" + name); }
            ::rmdir(path.c_str());
        } else {
            ::unlink(path.c_str());
        }
    }
};

// The directories of a program that saves hundreds of times: in memory where possible, as a disk would have to keep up
inline bool temporary_in_memory() { return access("/dev/shm", W_OK) == 0 && setenv("TMPDIR", "/dev/shm", 1) == 0; }

// Replaces the file: a fresh inode, as a rename would give it.
inline void write_file(const std::string& path, const std::string& bytes) {
    ::unlink(path.c_str());
    const int fd = io_create(path);
    io_write(fd, bytes.data(), bytes.size(), path);
    io_close(fd, path);
}

// A whole tensor of a Safetensors file: as float32, which must have this shape, and of integers
template <class Tensors>
void read_f32(const Tensors& file, const std::string& name, float* out, const std::vector<size_t>& shape) {
    const auto& e = file.entry(name);
    CHECK(e.shape == shape);
    file.read_elements(e, out, 0, e.elements);
}
template <class Tensors> std::vector<int32_t> read_i32(const Tensors& file, const std::string& name) {
    const auto& e = file.entry(name);
    CHECK(e.dtype == "I32");
    std::vector<int32_t> out(e.elements);
    file.file.read(out.data(), e.bytes, e.offset);
    return out;
}

// What is written to these descriptors until end()
struct Captured {
    std::vector<std::pair<int, int>> saved;                 // a descriptor and a copy of what it was
    FILE* file = tmpfile();

    explicit Captured(const std::vector<int>& descriptors) {
        fflush(nullptr);
        for (int fd : descriptors) {
            saved.push_back({fd, dup(fd)});
            dup2(fileno(file), fd);
        }
    }
    Captured(const Captured&) = delete;
    ~Captured() { end(); fclose(file); }
    void end() {
        fflush(nullptr);
        for (const auto& was : saved) { dup2(was.second, was.first); ::close(was.second); }
        saved.clear();
    }
    std::string text() const {
        fflush(nullptr);
        std::string s((size_t)lseek(fileno(file), 0, SEEK_END), '\0');
        const ssize_t n = pread(fileno(file), &s[0], s.size(), 0);
        return s.substr(0, n < 0 ? 0 : (size_t)n);
    }
};

// Makes an existing file this long; what is new is a hole that takes no disk.
inline void resize_file(const std::string& path, uint64_t bytes) {
    const bool done = truncate(path.c_str(), (off_t)bytes) == 0;
    if (!done) { die(EXIT_BAD_INPUT, "cannot resize %s: %s", path.c_str(), strerror(errno)); }
}

// Writes into an existing file.
inline void patch_file(const std::string& path, const std::string& bytes, uint64_t offset) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
    const bool done = fd >= 0 && pwrite(fd, bytes.data(), bytes.size(), (off_t)offset) == (ssize_t)bytes.size();
    if (fd >= 0) { ::close(fd); }
    if (!done) { die(EXIT_BAD_INPUT, "cannot patch %s: %s", path.c_str(), strerror(errno)); }
}

// "a|b|c"
inline std::string joined(const std::vector<std::string>& parts) {
    std::string out;
    for (const std::string& p : parts) { out += (out.empty() ? "" : "|") + p; }
    return out;
}

// The values as they lie in memory.
template <class T> std::string bytes_of(const std::vector<T>& values) {
    return std::string((const char*)values.data(), values.size() * sizeof(T));
}

// A 1024-byte header of int32, the rest of it zeros.
inline std::string header_bytes(std::vector<int32_t> fields) {
    fields.resize(256);
    return bytes_of(fields);
}

// Values that a hostile header field might hold in place of v.
inline std::vector<int32_t> hostile_values(int32_t v) { return {0, -1, 1, INT_MAX, INT_MIN, v - 1, v + 1}; }

// The directory of real data, with a / at its end; "" and a visible note when there is none.
inline std::string real_data() {
    const char* directory = getenv("CABLE_DATA");
    if (directory == nullptr || *directory == '\0') {
        WARN("SKIPPED: CABLE_DATA is not set");
        return "";
    }
    return std::string(directory) + "/";
}
