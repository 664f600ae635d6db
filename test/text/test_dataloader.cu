// Token shards, text as bytes and the order of samples: right values at every offset, and bad files are refused.
#include <set>

#include <glob.h>

#include "llmc/engine/data.h"
#include "test/catch.h"
#include "test/files.h"

namespace {

// the ids of shard number `shard`: below 300, neighbours differ
int id_at(int shard, uint64_t i) { return (int)((i * 7 + i / 5 + (uint64_t)shard * 31) % 300); }

std::string shard_bytes(int shard, int tokens, int vocab = 300, int eot = 299) {
    std::vector<uint16_t> ids((size_t)tokens);
    for (size_t i = 0; i < ids.size(); i++) { ids[i] = (uint16_t)id_at(shard, i); }
    return header_bytes({SHARD_MAGIC, SHARD_VERSION, tokens, vocab, eot}) + bytes_of(ids);
}

int refused(const std::string& pattern, const std::string& text, int wanted_vocab = 0) {
    return throws_with([&] { TokenFiles files(pattern, "--train_files", wanted_vocab); }, text);
}

std::vector<int> window_of(const TokenFiles& files, uint64_t w, int T) {   // inputs, then targets
    std::vector<int> ids(2 * (size_t)T, -1);
    files.window(w, T, ids.data(), ids.data() + T);
    return ids;
}

// what the C library makes of a pattern
std::vector<std::string> globbed(const std::string& pattern) {
    glob_t g = {};
    std::vector<std::string> paths;
    if (glob(pattern.c_str(), GLOB_TILDE, nullptr, &g) == 0) { paths.assign(g.gl_pathv, g.gl_pathv + g.gl_pathc); }
    globfree(&g);
    std::sort(paths.begin(), paths.end());
    return paths;
}

int open_descriptors() { return (int)list_directory("/proc/self/fd").size(); }

} // namespace

TEST_CASE("shards: a pattern names the files that it names in a shell", "[data][P8]") {
    TempDir dir;
    for (const char* name : {"a1", "a2", "b1", ".hidden"}) {
        io_mkdirs(dir / name);
        for (const char* file : {"x1.bin", "x2.bin", "x10.bin", "y.txt", ".x3.bin", "[x].bin"}) {
            write_file(dir / name + "/" + file, "");
        }
    }
    REQUIRE(symlink("nowhere", (dir / "a1/x4.bin").c_str()) == 0);
    setenv("HOME", dir.path.c_str(), 1);
    size_t found = 0;
    for (const char* rest : {"/a1/*.bin", "/a?/x?.bin", "/*/x[12].bin", "/[!a]*/*", "/a*//x1.bin", "/*/.x*",
                             "/a1/x\\1.bin", "/*/nothing", "/a1/[x].bin", "/*/*/*", "/a*/", "/*/[[]x].bin",
                             "/b1/x1.bin*"}) {
        for (const std::string& start : {dir.path, std::string("~")}) {
            const std::string pattern = start + rest;
            INFO(pattern);
            const std::vector<std::string> expected = globbed(pattern);
            found += expected.size();
            if (!path_exists(dir.path + rest)) {            // its own name otherwise
                if (expected.empty()) { CHECK(throws_with([&] { expand_pattern(pattern); }, "no file matches") == 2); }
                else { CHECK(expand_pattern(pattern) == expected); }
            }
        }
    }
    CHECK(found > 60);
}

TEST_CASE("shards: what has the name of a pattern's part is meant by it", "[data]") {
    TempDir dir;
    const std::vector<std::string> named = {"my [d]", "a*", "w?y", "{x}", "~", "b\\c", "[!z]", "[", "c[*"};
    for (const std::string& name : {"my d", "ab", "way", "y", "1"}) { io_mkdirs(dir / name); }
    for (const std::string& in : named) {
        for (const char* file : {"/s_0.txt", "/s_1.txt", "/.s_2.txt", "/[e]/s_3.txt"}) {
            io_mkdirs(dir / in + "/[e]");
            write_file(dir / in + file, "");
            write_file(dir / "1/s_0.txt", "");
        }
    }
    char* const before = getcwd(nullptr, 0);
    REQUIRE(chdir(dir.path.c_str()) == 0);          // relative, too: ~ is then the directory of that name
    for (const std::string& start : {dir.path + "/", std::string()}) {
        for (const std::string& name : named) {
            const std::string in = start + name;
            INFO(in);
            CHECK(expand_pattern(in + "/s_*.txt") == std::vector<std::string>{in + "/s_0.txt", in + "/s_1.txt"});
            CHECK(expand_pattern(in + "/[e]/*") == std::vector<std::string>{in + "/[e]/s_3.txt"});
            CHECK(expand_pattern(in + "/*/s_?.txt") == std::vector<std::string>{in + "/[e]/s_3.txt"});
        }
    }
    io_mkdirs("[12]");                              // where the name leads nowhere, a pattern after all
    CHECK(expand_pattern("[12]/s_*") == std::vector<std::string>{"1/s_0.txt"});
    REQUIRE(chdir(before) == 0);
    free(before);
}

TEST_CASE("shards: every window and every stretch of the stream holds the right ids", "[data][P8]") {
    TempDir dir;
    const int tokens[] = {50, 7, 1, 23};
    std::vector<int> stream;
    for (int s = 0; s < 4; s++) {
        write_file(dir / strprintf("train_%06d.bin", 3 + s), shard_bytes(s, tokens[s]));
        for (int i = 0; i < tokens[s]; i++) { stream.push_back(id_at(s, (uint64_t)i)); }
    }
    const TokenFiles files(dir / "train_*.bin", "--train_files");
    CHECK(files.vocab == 300);
    CHECK(files.eot == 299);
    REQUIRE(files.tokens == 81);
    for (const int T : {1, 2, 5, 6, 7, 22, 49}) {
        uint64_t w = 0;
        for (int s = 0; s < 4; s++) {
            for (int begin = 0; begin + T + 1 <= tokens[s]; begin += T, w++) {
                const std::vector<int> ids = window_of(files, w, T);
                for (int t = 0; t < T; t++) {
                    REQUIRE(ids[(size_t)t] == id_at(s, (uint64_t)(begin + t)));
                    REQUIRE(ids[(size_t)(T + t)] == id_at(s, (uint64_t)(begin + t + 1)));
                }
            }
        }
        CHECK(files.windows(T) == w);
        CHECK(throws_with([&] { window_of(files, w, T); }, strprintf("window %zu of %zu", (size_t)w, (size_t)w)) == 2);
    }
    for (size_t start = 0; start <= stream.size(); start++) {
        for (size_t n = 0; start + n <= stream.size(); n++) {
            std::vector<int> out(n);
            files.read(start, n, out.data());
            REQUIRE(std::equal(out.begin(), out.end(), stream.begin() + (long)start));
        }
    }
    int out[2];
    CHECK(throws_with([&] { files.read(80, 2, out); }, "which has 81") == 2);
    CHECK(throws_with([&] { files.read(UINT64_MAX, 2, out); }, "which has 81") == 2);
    CHECK(throws_with([&] { files.windows(50); },
                      "expected a file of at least 51 tokens for T = 50, got at most 50") == 2);
    CHECK(throws_with([&] { files.windows(0); }, "T: expected at least 1, got 0") == 2);
    CHECK(throws_with([&] { files.windows(INT_MAX); }, "at least 2147483648 tokens") == 2);
}

TEST_CASE("shards: a read of several chunks holds the right ids, at each width", "[data][P8]") {
    TempDir dir;
    const uint64_t n = 6 * 16384 + 100;                         // 6, 12 and 24 chunks of 16 KiB
    std::vector<uint8_t> bytes;
    std::vector<uint16_t> narrow;
    std::vector<uint32_t> wide;
    const auto id = [](uint64_t i) { return (i * 7 + i / 251) % 251; };         // no two chunks are equal
    for (uint64_t i = 0; i < n; i++) {
        bytes.push_back((uint8_t)id(i));
        narrow.push_back((uint16_t)id(i));
        wide.push_back((uint32_t)id(i));
    }
    write_file(dir / "1.txt", bytes_of(bytes));
    write_file(dir / "2.bin", header_bytes({SHARD_MAGIC, 1, (int)n}) + bytes_of(narrow));
    write_file(dir / "4.bin", header_bytes({SHARD_MAGIC_UINT32, SHARD_VERSION_UINT32, (int)n}) + bytes_of(wide));
    for (const char* name : {"1.txt", "2.bin", "4.bin"}) {
        INFO(name);
        const TokenFiles files(dir / name, "--train_files");
        REQUIRE(files.tokens == n);
        std::vector<int> out(n - 3);
        files.read(3, out.size(), out.data());
        size_t wrong = 0;
        for (size_t i = 0; i < out.size(); i++) { wrong += (uint64_t)out[i] != id(i + 3); }
        CHECK(wrong == 0);
    }
}

TEST_CASE("shards: the vocabulary of the header, or GPT-2's and llama-3's where it names none", "[data][P8]") {
    TempDir dir;
    std::vector<uint16_t> narrow(20000, 50256);
    write_file(dir / "gpt2.bin", header_bytes({SHARD_MAGIC, 1, 20000}) + bytes_of(narrow));
    const TokenFiles gpt2(dir / "gpt2.bin", "--train_files", 50257);
    CHECK(gpt2.vocab == 50257);
    CHECK(gpt2.eot == 50256);
    CHECK(window_of(gpt2, 1, 9999) == std::vector<int>(2 * 9999, 50256));      // more than one chunk
    narrow[15000] = 50257;
    write_file(dir / "gpt2.bin", header_bytes({SHARD_MAGIC, 1, 20000}) + bytes_of(narrow));
    const TokenFiles bad(dir / "gpt2.bin", "--train_files");
    std::vector<int> out(20000);
    const std::string text = "gpt2.bin: token 15000: expected an id from 0 to 50256, got 50257";
    CHECK(throws_with([&] { window_of(bad, 1, 9999); }, text) == 2);
    CHECK(throws_with([&] { bad.read(0, 20000, out.data()); }, text) == 2);
    CHECK(window_of(bad, 0, 9999)[0] == 50256);

    std::vector<uint32_t> wide = {0, 128255, 70000, 128000, 1};
    write_file(dir / "llama.bin", header_bytes({SHARD_MAGIC_UINT32, 7, 5}) + bytes_of(wide));
    const TokenFiles llama(dir / "llama.bin", "--train_files");
    CHECK(llama.vocab == 128256);
    CHECK(llama.eot == 128000);
    CHECK(window_of(llama, 0, 4) == std::vector<int>({0, 128255, 70000, 128000, 128255, 70000, 128000, 1}));
    wide[2] = 0x80000000u;                          // negative as an int
    write_file(dir / "llama.bin", header_bytes({SHARD_MAGIC_UINT32, 7, 5}) + bytes_of(wide));
    const TokenFiles negative(dir / "llama.bin", "--train_files");
    CHECK(throws_with([&] { window_of(negative, 0, 4); },
                      "token 2: expected an id from 0 to 128255, got 2147483648") == 2);
}

TEST_CASE("shards: hostile headers are refused, naming flag and file", "[data][P8]") {
    TempDir dir;
    const std::string path = dir / "x.bin", good = shard_bytes(0, 100);
    const std::string where = "--train_files: " + path + ": ";
    write_file(path, good);
    CHECK(TokenFiles(path, "--train_files").tokens == 100);
    const int32_t field[] = {SHARD_MAGIC, SHARD_VERSION, 100, 300, 299};
    const char* text[] = {"magic number", "version", "tokens", "vocabulary", "end-of-text"};
    for (int f = 0; f < 5; f++) {
        for (const int32_t v : hostile_values(field[f])) {
            INFO("field " << f << " = " << v);
            write_file(path, good);
            patch_file(path, bytes_of<int32_t>({v}), 4 * (uint64_t)f);
            const bool fine = v == field[f] || (f == 3 && v == 301) || (f == 4 && v >= 0 && v < 300);
            if (fine) {
                CHECK(TokenFiles(path, "--train_files").tokens == 100);
                continue;
            }
            CHECK(refused(path, where) == 2);
            const bool below_eot = f == 3 && v > 0 && v < 300;
            CHECK(refused(path, below_eot ? strprintf("end-of-text id from 0 to %d (the vocabulary), got 299", v - 1)
                          : text[f]) == 2);
        }
    }
    write_file(path, header_bytes({SHARD_MAGIC_UINT32, 7, 1, INT_MAX, 0}) + std::string(4, '\0'));
    CHECK(refused(path, where + "header: expected a vocabulary of 1 to 1048576, got 2147483647") == 2);
    write_file(path, header_bytes({SHARD_MAGIC, 1, 0}));
    CHECK(refused(path, where + "header: expected 1 to 2147483647 tokens, got 0") == 2);
    write_file(path, header_bytes({SHARD_MAGIC_UINT32, 1, 1}) + std::string(4, '\0'));
    CHECK(refused(path, where + "expected version 7, got 1") == 2);
}

TEST_CASE("shards: truncated, oversized, empty or no file at all", "[data][P8]") {
    TempDir dir;
    const std::string path = dir / "x.bin", good = shard_bytes(0, 100);
    const std::string where = "--train_files: " + path + ": ";
    for (const size_t bytes : {0, 1, 1023}) {
        write_file(path, good.substr(0, bytes));
        CHECK(refused(path, where + strprintf("expected a token shard, which has a header of 1024 bytes, got %zu",
                                              bytes)) == 2);
    }
    for (const size_t bytes : {1024, 1025, 1222, 1223, 1225, 1226, 4096}) {
        write_file(path, good);
        resize_file(path, bytes);
        CHECK(refused(path, where + strprintf("expected 1224 bytes for the 100 tokens of its header, got %zu",
                                              bytes)) == 2);
    }
    write_file(dir / "empty.txt", "");
    CHECK(refused(dir / "empty.txt", "empty.txt: the file is empty") == 2);
    write_file(dir / "utf16.txt", std::string("\xff\xfe" "a\0", 4));
    CHECK(refused(dir / "utf16.txt", "utf16.txt: expected UTF-8, got UTF-16") == 2);
    CHECK(refused(dir / "nothing_*.bin", "--train_files: no file matches '") == 2);
    CHECK(refused("", "no file matches ''") == 2);
    CHECK(refused(dir.path, "not a regular file") == 2);
    io_mkdirs(dir / "directory.txt");
    CHECK(refused(dir / "*.txt", "directory.txt: not a regular file") == 2);
    alarm(60);                                          // ends the test if it waits for a writer of the FIFO
    for (const char* name : {"fifo.txt", "fifo.bin"}) {
        REQUIRE(mkfifo((dir / name).c_str(), 0600) == 0);
        CHECK(refused(dir / name, strprintf("%s: not a regular file", name)) == 2);
    }
    alarm(0);
}

TEST_CASE("shards: all have one vocabulary", "[data][P8]") {
    TempDir dir;
    write_file(dir / "a.bin", shard_bytes(0, 100));
    write_file(dir / "b.bin", shard_bytes(1, 100, 301));
    const std::string wanted = "b.bin: expected a vocabulary of 300 with end-of-text id 299 as in " + (dir / "a.bin");
    CHECK(refused(dir / "?.bin", wanted + ", got 301 with 299") == 2);
    write_file(dir / "b.bin", shard_bytes(1, 100, 300, 0));
    CHECK(refused(dir / "?.bin", wanted + ", got 300 with 0") == 2);
    write_file(dir / "b.bin", shard_bytes(1, 100));
    CHECK(TokenFiles(dir / "?.bin", "--train_files", 300).tokens == 200);
    CHECK(refused(dir / "?.bin", "a.bin: expected a vocabulary of 256, got 300", 256) == 2);
}

TEST_CASE("text: every byte is a token; names are sorted and may contain wildcards", "[data]") {
    TempDir dir;
    std::string all(256, '\0');
    for (int i = 0; i < 256; i++) { all[(size_t)i] = (char)i; }
    write_file(dir / "b[1].txt", all);
    write_file(dir / "B.txt", "xyz");
    write_file(dir / "a.txt", "ab");
    const TokenFiles one(dir / "b[1].txt", "--train_files");
    CHECK(one.vocab == 256);
    CHECK(one.eot == -1);
    const std::vector<int> ids = window_of(one, 0, 255);
    for (int i = 0; i < 255; i++) {
        REQUIRE(ids[(size_t)i] == i);
        REQUIRE(ids[(size_t)(255 + i)] == i + 1);
    }
    const TokenFiles files(dir / "*.txt", "--train_files");
    REQUIRE(files.tokens == 261);
    int out[6];
    files.read(0, 6, out);
    CHECK(std::vector<int>(out, out + 6) == std::vector<int>({'x', 'y', 'z', 'a', 'b', 0}));
}

TEST_CASE("shards: a file that shrinks or is replaced during a run is an error", "[data][P8]") {
    TempDir dir;
    const std::string path = dir / "x.bin";
    write_file(path, shard_bytes(0, 100));
    const TokenFiles open(path, "--train_files"), closed(path, "--train_files");
    CHECK(window_of(open, 0, 33)[1] == id_at(0, 1));
    resize_file(path, 1024 + 2 * 66 + 1);
    CHECK(window_of(open, 0, 33)[1] == id_at(0, 1));
    CHECK(throws_with([&] { window_of(open, 1, 33); }, "x.bin: the file ends at byte 1157, expected 1 more") == 2);
    CHECK(throws_with([&] { window_of(closed, 0, 33); },
                      "x.bin: expected 1224 bytes as at the start of the run, got 1157") == 2);
    write_file(path, shard_bytes(0, 101));
    CHECK(throws_with([&] { window_of(closed, 0, 33); },
                      "x.bin: expected 1224 bytes as at the start of the run, got 1226") == 2);
    ::unlink(path.c_str());
    CHECK(throws_with([&] { window_of(closed, 0, 33); }, "x.bin: cannot open") == 2);
    write_file(path, shard_bytes(0, 100));
    CHECK(window_of(closed, 2, 33)[32] == id_at(0, 98));
}

TEST_CASE("shards: any number of files with a bounded number of descriptors", "[data][P8]") {
    TempDir dir;
    for (int s = 0; s < 700; s++) { write_file(dir / strprintf("%04d.bin", s), shard_bytes(s, 5)); }
    const int before = open_descriptors();
    const TokenFiles files(dir / "*.bin", "--train_files");
    REQUIRE(files.windows(4) == 700);
    CHECK(open_descriptors() == before);
    int wrong = 0;
    for (uint64_t i = 0; i < 2100; i++) {
        const uint64_t w = sample_window(i, 700, 1, true);
        wrong += window_of(files, w, 4)[0] != id_at((int)w, 0);
    }
    CHECK(wrong == 0);
    CHECK(open_descriptors() <= before + 256);
}

// A file of examples in rows; the answers are of 1 to 3 tokens from the middle of a row on. Wide ids are above 40000.
template <class Id = uint16_t>
std::string rows_bytes(int rows, int row, int vocab, std::vector<int32_t> header = {}) {
    const bool wide = sizeof(Id) == 4;
    const int magic = wide ? SHARD_MAGIC_UINT32 : SHARD_MAGIC;
    const int mark = wide ? 1 << 30 : 1 << 15;
    if (header.empty()) { header = {magic, SHARD_VERSION_ROWS, rows * row, vocab, 0, 0, 0, row, 3}; }
    std::vector<Id> ids;
    for (int r = 0; r < rows; r++) {
        for (int t = 0; t < row; t++) {
            const bool answer = t > 0 && t >= row / 2 && t < row / 2 + 1 + r % 3;
            const int id = id_at(r, (uint64_t)t) + wide * 40000;
            ids.push_back((Id)(id + answer * mark));
        }
    }
    return header_bytes(header) + bytes_of(ids);
}

TEST_CASE("shards: an example in a row is a sample, and only its answer is a target", "[data][tasks][P8]") {
    TempDir dir;
    const int rows = 11, row = 9;
    const int T = row - 1;
    for (const int base : {40000, 0}) {
        for (const char* name : {"a.bin", "b.bin"}) {
            write_file(dir / name, base > 0 ? rows_bytes<uint32_t>(rows, row, 50257) : rows_bytes(rows, row, 300));
        }
        const TokenFiles files(dir / "?.bin", "--train_files", 0, true);
        CHECK(files.row == row);
        CHECK(files.shards[0].length == 3);
        REQUIRE(files.windows(T) == 2 * rows);
        for (int w = 0; w < 2 * rows; w++) {
            const int r = w % rows;
            const std::vector<int> ids = window_of(files, (uint64_t)w, T);
            for (int t = 0; t < T; t++) {
                const bool answer = t + 1 >= row / 2 && t + 1 < row / 2 + 1 + r % 3;
                INFO("row " << w << ", token " << t << " of ids from " << base);
                CHECK(ids[(size_t)t] == base + id_at(r, (uint64_t)t));
                CHECK(ids[(size_t)(T + t)] == (answer ? base + id_at(r, (uint64_t)t + 1) : IGNORE_INDEX));
            }
        }
    }
    const TokenFiles files(dir / "?.bin", "--train_files", 0, true);
    CHECK(throws_with([&] { files.windows(T + 1); }, "expected --T 8, as the examples stand in rows of 9 tokens") == 2);
    CHECK(throws_with([&] { files.windows(T / 2); }, "expected --T 8") == 2);
    // rows are refused unless they are requested, and are never mixed with streams
    CHECK(refused(dir / "a.bin", "expected a stream of tokens, got examples of a task in rows") == 2);
    const auto refused_rows = [&](const std::string& text) {
        return throws_with([&] { TokenFiles mixed(dir / "?.bin", "--train_files", 0, true); }, text);
    };
    write_file(dir / "b.bin", rows_bytes(rows, row + 1, 300));
    CHECK(refused_rows("expected rows of 9 tokens") == 2);
    write_file(dir / "b.bin", shard_bytes(0, 99, 300, 0));
    CHECK(refused_rows("got 0 (0: a stream)") == 2);
    // damaged headers and ids
    for (const int bad : {0, 1, 8, -9, 1 << 30}) {
        write_file(dir / "b.bin", rows_bytes(rows, row, 0, {SHARD_MAGIC, 2, rows * row, 300, 0, 0, 0, bad, 3}));
        CHECK(refused_rows("expected rows of at least 2 tokens") == 2);
    }
    write_file(dir / "b.bin", rows_bytes(rows, row, 40000));
    CHECK(refused_rows("expected a vocabulary of 1 to 32768") == 2);
    write_file(dir / "a.bin", rows_bytes(rows, row, 290));
    const TokenFiles bad(dir / "a.bin", "--train_files", 0, true);
    CHECK(throws_with([&] { for (int r = 0; r < rows; r++) { window_of(bad, (uint64_t)r, T); } },
                      "expected an id from 0 to 289") == 2);
}

TEST_CASE("shards: 64-bit offsets in files of 2.2, 4.2, 8.4 and 9 GB", "[data][P8]") {
    TempDir dir;
    const struct { const char* name; int tokens, magic, version, width; } table[] = {
        {"2.2GB.bin", 1100000000, SHARD_MAGIC, 1, 2}, {"4.2GB.bin", 2100000000, SHARD_MAGIC, 1, 2},
        {"largest.bin", INT_MAX, SHARD_MAGIC, 1, 2}, {"8.4GB.bin", 2100000000, SHARD_MAGIC_UINT32, 7, 4}};
    for (const auto& row : table) {
        INFO(row.name);
        const std::string path = dir / row.name;
        const int T = 1000;
        const uint64_t windows = ((uint64_t)row.tokens - 1) / T, begin = (windows - 1) * T;
        write_file(path, header_bytes({row.magic, row.version, row.tokens}));
        resize_file(path, 1024 + (uint64_t)row.tokens * (uint64_t)row.width);
        patch_file(path, std::string("\x34\x12", 2), 1024 + begin * (uint64_t)row.width);
        patch_file(path, std::string("\x78\x56", 2), 1024 + (begin + T) * (uint64_t)row.width);
        const TokenFiles files(path, "--train_files");
        REQUIRE(files.windows(T) == windows);
        std::vector<int> wanted(2 * T, 0);
        wanted[0] = 0x1234;
        wanted[2 * T - 1] = 0x5678;
        CHECK(window_of(files, windows - 1, T) == wanted);
        int id = 0;
        files.read(begin + T, 1, &id);
        CHECK(id == 0x5678);
        ::unlink(path.c_str());
    }
    write_file(dir / "claims.bin", header_bytes({SHARD_MAGIC, 1, INT_MIN}));         // 2^31 tokens, as a signed field
    resize_file(dir / "claims.bin", 1024 + (1ull << 32));
    CHECK(refused(dir / "claims.bin", "header: expected 1 to 2147483647 tokens, got -2147483648") == 2);
    write_file(dir / "9GB.txt", "");
    resize_file(dir / "9GB.txt", 9000000001ull);
    patch_file(dir / "9GB.txt", "A", 9000000000ull);
    patch_file(dir / "9GB.txt", "B", 9000000000ull - 1000);
    const TokenFiles text(dir / "9GB.txt", "--train_files");
    REQUIRE(text.windows(1000) == 9000000);
    const std::vector<int> ids = window_of(text, 8999999, 1000);
    CHECK(ids[0] == 'B');
    CHECK(ids[1999] == 'A');
}

TEST_CASE("order: every epoch is another permutation of all windows", "[data][P10]") {
    for (const uint64_t n : {1, 2, 3, 7, 1000, 4097}) {
        INFO("windows " << n);
        std::set<std::vector<uint64_t>> orders;
        for (const uint64_t seed : {42, 43}) {
            for (uint64_t epoch = 0; epoch < 3; epoch++) {
                std::vector<uint64_t> order, sorted;
                for (uint64_t i = 0; i < n; i++) { order.push_back(sample_window(epoch * n + i, n, seed, true)); }
                orders.insert(order);
                sorted = order;
                std::sort(sorted.begin(), sorted.end());
                bool every = true;
                for (uint64_t i = 0; i < n; i++) { every = every && sorted[i] == i; }
                CHECK(every);
                for (uint64_t i = 0; i < n; i++) { CHECK_FALSE(sample_window(epoch * n + i, n, seed, false) != i); }
            }
        }
        if (n >= 1000) { CHECK(orders.size() == 6); }
    }
    // the first windows of 7,000 epochs: 1,000 each, standard deviation 29
    int count[7] = {};
    for (uint64_t epoch = 0; epoch < 7000; epoch++) { count[sample_window(epoch * 7, 7, 42, true)]++; }
    for (const int c : count) { CHECK(abs(c - 1000) < 150); }
    CHECK(throws_with([&] { sample_window(0, 0, 42, true); }, "expected at least 1 sample") == 2);
}

TEST_CASE("order: the stream of samples does not depend on how it is cut into batches", "[data][P10]") {
    TempDir dir;
    write_file(dir / "a.bin", shard_bytes(0, 200));
    write_file(dir / "b.bin", shard_bytes(1, 150));
    const TokenFiles files(dir / "?.bin", "--train_files");
    const int T = 8, total = 120;                       // 24 + 18 windows: almost three epochs
    REQUIRE(files.windows(T) == 42);
    for (const bool shuffle : {false, true}) {
        std::vector<int> inputs(total * T), targets(total * T);
        fill_batch(files, T, 0, total, 42, shuffle, inputs.data(), targets.data());
        for (const int count : {1, 7, 16}) {
            std::vector<int> x(total * T), y(total * T);
            for (int i = 0; i < total; i += count) {
                const int n = std::min(count, total - i);
                fill_batch(files, T, (uint64_t)i, n, 42, shuffle, x.data() + i * T, y.data() + i * T);
            }
            CHECK(x == inputs);
            CHECK(y == targets);
        }
        const std::vector<int> first = window_of(files, shuffle ? sample_window(100, 42, 42, true) : 100 % 42, T);
        CHECK(std::equal(first.begin(), first.begin() + T, inputs.begin() + 100 * T));
        CHECK(std::equal(first.begin() + T, first.end(), targets.begin() + 100 * T));
    }
}

TEST_CASE("real data: tiny Shakespeare's shards", "[data][real]") {
    const std::string data = real_data();
    if (data.empty()) { return; }
    const TokenFiles train(data + "tiny_shakespeare_train.bin", "--train_files");
    const TokenFiles val(data + "tiny_shakespeare_val.bin", "--val_files");
    CHECK(train.tokens == 305260);
    CHECK(val.tokens == 32768);
    CHECK(train.vocab == 50257);
    CHECK(train.eot == 50256);
    CHECK(train.windows(1024) == 298);
    int ids[6];
    val.read(0, 6, ids);                                // <|endoftext|>First Citizen:\nBefore we
    CHECK(std::vector<int>(ids, ids + 6) == std::vector<int>({50256, 5962, 22307, 25, 198, 8421}));
    std::vector<int> all(train.tokens);
    train.read(0, train.tokens, all.data());            // every id is checked on the way
    CHECK(std::count(all.begin(), all.end(), 50256) > 1000);
    CHECK(TokenFiles(data + "input.txt", "--train_files").tokens == 1115394);
}
