// safetensors.h: what is written is read back bit for bit, and no hostile header gets past the reader.
#include <cmath>

#include <sys/resource.h>
#include <sys/wait.h>

#include "llmc/engine/safetensors.h"
#include "test/catch.h"
#include "test/files.h"

namespace {

// a file with this header and this many bytes of data
std::string with_header(const std::string& header, size_t data_bytes) {
    std::string s(8, '\0');
    for (int i = 0; i < 8; i++) { s[(size_t)i] = (char)(header.size() >> 8 * i); }
    return s + header + std::string(data_bytes, 'x');
}

// the header of one tensor
std::string one(const char* dtype, const char* shape, const char* offsets) {
    return strprintf("{\"a\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":%s}}", dtype, shape, offsets);
}

} // namespace

TEST_CASE("safetensors: a round trip keeps every bit, in bounded blocks") {
    TempDir dir;
    const std::string path = dir.path + "/a.safetensors";
    // a matrix of more than one block of 2^20 elements and of arbitrary bits, a vector, a scalar and an empty tensor
    const size_t rows = 3000, cols = 700;
    std::vector<float> big(rows * cols);
    for (size_t i = 0; i < big.size(); i++) {
        const uint32_t bits = (uint32_t)i * 2654435761u;
        memcpy(&big[i], &bits, 4);
    }
    size_t largest = 0, next_row = 0;
    std::vector<SafetensorsItem> items = {
        {"big", {rows, cols}, [&](float* out, size_t r0, size_t n) {
            CHECK(r0 == next_row);
            next_row = r0 + n;
            largest = std::max(largest, n * cols);
            memcpy(out, &big[r0 * cols], n * cols * 4);
        }},
        {"empty", {0, 5}, [](float*, size_t, size_t) { FAIL("asked for the rows of an empty tensor"); }},
        {"vector", {5}, [](float* out, size_t r0, size_t n) {
            for (size_t i = 0; i < n; i++) { out[i] = (float)(r0 + i); }
        }},
        {"scalar", {}, [](float* out, size_t, size_t) { *out = 2.5f; }}};
    const FileSum sum = write_safetensors(path, items, {{"start.big", "7"}});
    CHECK(largest <= (size_t)1 << 20);
    CHECK(next_row == rows);
    const std::string raw = read_file(path);
    CHECK(sum.bytes == raw.size());
    CHECK(sum.sum == checksum(raw));
    CHECK(sum == sum_file(path));
    CHECK((unsigned char)raw[0] % 8 == 0);       // the data begins at a multiple of 8

    const Safetensors file(path);
    REQUIRE(file.entries.size() == 4);
    CHECK(file.metadata["format"] == "pt");
    CHECK(file.metadata["start.big"] == "7");
    std::vector<float> read(big.size());
    read_f32(file, "big", read.data(), {rows, cols});
    CHECK(memcmp(read.data(), big.data(), big.size() * 4) == 0);
    file.read_elements(file.entry("big"), read.data(), 1234567, 8);
    CHECK(memcmp(read.data(), &big[1234567], 32) == 0);
    float v[5], s;
    read_f32(file, "vector", v, {5});
    CHECK(v[0] == 0.0f);
    CHECK(v[4] == 4.0f);
    read_f32(file, "scalar", &s, {});
    CHECK(s == 2.5f);
    throws_with([&] { read_f32(file, "other", v, {5}); }, "no tensor other");
    throws_with([&] { file.read_elements(file.entry("vector"), v, 3, 3); },
                "cannot read 3 elements from element 3 on, it has 5");
}

TEST_CASE("safetensors: other dtypes are converted to float32 or integers") {
    TempDir dir;
    const std::string path = dir.path + "/a.safetensors";
    const uint16_t half[8] = {0x3c00, 0xc000, 0x0001, 0x03ff, 0x7bff, 0xfc00, 0x7e00, 0xb555};
    const float half_wanted[8] = {1, -2, 5.9604644775390625e-8f, 6.097555160522461e-5f,
                                  65504, -INFINITY, NAN, -0.333251953125f};
    const uint16_t brain[4] = {0x3f80, 0xc000, 0x7f80, 0x0001};
    const float brain_wanted[4] = {1, -2, INFINITY, 9.18354961579912115600575419705e-41f};
    const int32_t i32[2] = {-5, INT32_MAX};
    const int64_t i64[2] = {INT64_MIN, 7};
    std::string header =
        "{\"h\":{\"dtype\":\"F16\",\"shape\":[2,4],\"data_offsets\":[0,16]},"
        "\"b\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[16,24]},"
        "\"l\":{\"dtype\":\"I64\",\"shape\":[2],\"data_offsets\":[32,48]},"     // not in the order of the data
        "\"i\":{\"dtype\":\"I32\",\"shape\":[2],\"data_offsets\":[24,32]}}";
    std::string bytes = with_header(header, 0);
    bytes.append((const char*)half, 16)
        .append((const char*)brain, 8)
        .append((const char*)i32, 8)
        .append((const char*)i64, 16);
    write_text(path, bytes);
    const Safetensors file(path);
    float out[8];
    read_f32(file, "h", out, {2, 4});
    for (int i = 0; i < 8; i++) {
        INFO(i);
        CHECK((std::isnan(half_wanted[i]) ? std::isnan(out[i]) : memcmp(&out[i], &half_wanted[i], 4) == 0));
    }
    read_f32(file, "b", out, {4});
    CHECK(memcmp(out, brain_wanted, 16) == 0);
    CHECK(read_i32(file, "i") == std::vector<int32_t>(i32, i32 + 2));
    throws_with([&] { read_f32(file, "i", out, {2}); }, "i: expected F32, BF16 or F16, got I32");
}

TEST_CASE("safetensors: hostile headers are refused", "[P7]") {
    TempDir dir;
    const std::string path = dir.path + "/hostile.safetensors";
    const std::string good = one("F32", "[2,3]", "[0,24]");
    write_text(path, with_header(good, 24));
    CHECK(Safetensors(path).entries.size() == 1);       // what the table below varies is good itself
    std::string long_header = with_header(good, 24);
    std::string huge_header = long_header, all_ones = long_header;
    long_header[0] = (char)(good.size() + 25);
    huge_header[4] = 1;
    for (int i = 0; i < 8; i++) { all_ones[(size_t)i] = (char)0xff; }
    const std::string two = "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
                            "\"%s\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[%d,%d]}}";
    // 1 the whole table of bad files
    const struct { std::string bytes; const char* message; } table[] = {
        {"", "expected a safetensors file, got 0 bytes"},
        {std::string(7, '\0'), "expected a safetensors file, got 7 bytes"},
        {long_header, "does not fit in the file"},
        {huge_header, "a header of 4294967"},
        {all_ones, "a header of 18446744073709551615 bytes does not fit"},
        {with_header("", 0), "not valid JSON"},
        {with_header("[]", 0), "expected a JSON object"},
        {with_header(good.substr(0, good.size() - 1), 24), "not valid JSON"},
        {with_header(good + "}", 24), "not valid JSON"},
        {with_header(std::string(100000, '['), 0), "deeper"},
        {with_header(good, 23), "expected the 24 bytes of data that the header describes, got 23"},
        {with_header(one("F32", "[20,3]", "[0,240]"), 23), "data_offsets 0, 240 are not inside the file of"},
        {with_header(good, 0), "describes, got 0"},
        {with_header(good, 25), "expected the 24 bytes of data that the header describes, got 25"},
        {with_header("{}", 4), "expected the 0 bytes of data that the header describes, got 4"},
        {with_header(one("F31", "[2,3]", "[0,24]"), 24), "unknown dtype F31"},
        {with_header(one("", "[2,3]", "[0,24]"), 24), "unknown dtype"},
        {with_header(one("F64", "[2,3]", "[0,24]"), 24),
         "expected data_offsets that span the 48 bytes of F64 (2, 3), got 24"},
        {with_header(one("F32", "[2,4]", "[0,24]"), 24), "span the 32 bytes"},
        {with_header(one("F32", "[-2,-3]", "[0,24]"), 24), "non-negative integer"},
        {with_header(one("F32", "[2.0,3]", "[0,24]"), 24), "non-negative integer"},
        {with_header(one("F32", "[\"2\",3]", "[0,24]"), 24), "non-negative integer"},
        {with_header(one("F32", "6", "[0,24]"), 24), "expected a list of at most 8"},
        {with_header(one("F32", "[1,1,1,1,1,1,1,2,3]", "[0,24]"), 24), "expected a list of at most 8"},
        {with_header(one("F32", "[4294967296,4294967296]", "[0,24]"), 24), "does not fit in 64 bits"},
        {with_header(one("F32", "[4611686018427387905]", "[0,4]"), 4), "does not fit in 64 bits"},
        {with_header(one("F32", "[99999999999999999999]", "[0,24]"), 24), "non-negative integer"},
        {with_header(one("F32", "[2,3]", "[24,0]"), 24), "data_offsets 24, 0"},
        {with_header(one("F32", "[2,3]", "[-24,0]"), 24), "non-negative integers"},
        {with_header(one("F32", "[2,3]", "[0,24,48]"), 24), "two non-negative integers"},
        {with_header(one("F32", "[2,3]", "[0,24.0]"), 24), "two non-negative integers"},
        {with_header(one("F32", "[2,3]", "[4,28]"), 28),
         "expected it to begin at byte 0 of the data, where the one before ends, got 4"},
        {with_header(one("F32", "[2,3]", "[18446744073709551600,18446744073709551615]"), 24),
         "data_offsets 18446744073709551600"},
        {with_header("{\"a\":{\"shape\":[2,3],\"data_offsets\":[0,24]}}", 24),
         "expected dtype, shape and data_offsets"},
        {with_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0,24],\"x\":1}}", 24), "nothing else"},
        {with_header("{\"a\":3}", 0), "expected dtype, shape and data_offsets"},
        {with_header("{\"a\":{\"dtype\":4,\"shape\":[6],\"data_offsets\":[0,24]}}", 24), "expected a string as dtype"},
        {with_header(strprintf(two.c_str(), "a", 4, 8), 8), "twice"},
        {with_header(strprintf(two.c_str(), "a", 0, 4), 4), "twice"},
        {with_header(strprintf(two.c_str(), "b", 0, 4), 4),
         "expected it to begin at byte 4 of the data, where the one before ends, got 0"},
        {with_header(strprintf(two.c_str(), "b", 8, 12), 12),
         "begin at byte 4 of the data, where the one before ends, got 8"},
        {with_header("{\"__metadata__\":3}", 0), "expected an object as __metadata__"},
        {with_header("{\"__metadata__\":{\"format\":3}}", 0), "expected strings in __metadata__"},
    };
    // 2 each is refused with its message, which names the file
    for (const auto& row : table) {
        INFO(row.bytes.substr(0, 200));
        write_text(path, row.bytes);
        CHECK(throws_with([&] { Safetensors file(path); }, row.message) == EXIT_BAD_INPUT);
        throws_with([&] { Safetensors file(path); }, path);
    }
    // 3 a good file that is truncated anywhere
    for (size_t n = 0; n < with_header(good, 24).size(); n++) {
        write_text(path, with_header(good, 24).substr(0, n));
        throws_with([&] { Safetensors file(path); }, path);
    }
    // 4 what is not a file
    throws_with([&] { Safetensors file(dir.path); }, "not a regular file");
    throws_with([&] { Safetensors file(dir.path + "/none"); }, "cannot open");
    const std::string fifo = dir.path + "/fifo";
    REQUIRE(mkfifo(fifo.c_str(), 0600) == 0);
    throws_with([&] { Safetensors file(fifo); }, "not a regular file");
}

TEST_CASE("safetensors: a hostile header takes neither memory nor time", "[fork][P7]") {
    TempDir dir;
    const std::string path = dir.path + "/hostile.safetensors";
    std::string lists = "{\"a\":[", keys = "{";
    std::string numbers = "[0", nested = "[";
    while (lists.size() < 3900000) { lists += "[],"; }
    for (int i = 0; keys.size() < 3900000; i++) { keys += strprintf("\"%d\":{},", i); }
    while (numbers.size() < 3900000) { numbers += ",0"; }
    while (nested.size() < 3900000) { nested += "{\"a\":{\"b\":[[]]}},"; }
    // the size that a file claims, and may have: holes take no disk
    write_text(path, with_header("", 0));
    patch_file(path, std::string("\x01\xE1\xF5\x05\0\0\0\0", 8), 0);               // 100,000,001
    resize_file(path, 8 + 100000001);
    throws_with([&] { Safetensors file(path); }, "a header of 100000001 bytes does not fit");
    for (const std::string& text : {std::string(), lists + "[]]}", keys + "\"a\":{}}", numbers + "]", nested + "[]]"}) {
        INFO(text.substr(0, 50));
        if (!text.empty()) { write_text(path, with_header(text, 0)); }      // else the one above
        const pid_t pid = fork();
        if (pid == 0) {
            struct rusage before, after;
            getrusage(RUSAGE_SELF, &before);
            bool refused = false;
            try { Safetensors file(path); } catch (const Error& e) { refused = e.code == EXIT_BAD_INPUT; }
            getrusage(RUSAGE_SELF, &after);
            const bool small = after.ru_maxrss - before.ru_maxrss < 64 * 1024;      // kB; measured: at most 22 MB
            const bool quick = after.ru_utime.tv_sec - before.ru_utime.tv_sec < 10; // measured: at most 2.3 s
            _exit(refused && small && quick ? 0 : 1);
        }
        int status = -1;
        REQUIRE(waitpid(pid, &status, 0) == pid);
        CHECK(WIFEXITED(status));
        CHECK(WEXITSTATUS(status) == 0);
    }
}

TEST_CASE("files: what cannot be renamed or removed is named") {
    throws_with([] { io_rename("/nonexistent/a", "/tmp/b"); }, "cannot rename /nonexistent/a to /tmp/b: No such file");
    throws_with([] { io_unlink("/nonexistent/a"); }, "/nonexistent/a: cannot remove: No such file");
    throws_with([] { io_rmdir("/nonexistent/a"); }, "/nonexistent/a: cannot remove the directory: No such file");
}

TEST_CASE("safetensors: a write that fails says so") {
    throws_with([] { write_safetensors("/nonexistent/a.safetensors", {}); }, "cannot create");
    if (!path_exists("/dev/full")) { return; }
    std::vector<SafetensorsItem> items = {
        {"a", {4}, [](float* out, size_t, size_t n) { std::fill(out, out + n, 1.0f); }}};
    throws_with([&] { write_safetensors("/dev/full", items); }, "cannot write: No space left on device");
}
