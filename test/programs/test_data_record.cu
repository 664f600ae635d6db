// test_data_record.cu -- the data is summed in the background, and whoever has to wait for it goes on with that itself.
#include "llmc/run/data_record.h"
#include "test/catch.h"
#include "test/files.h"

TEST_CASE("data record: the blocks that are compared at the start begin and end the file", "[data_record]") {
    TempDir dir;
    for (const size_t bytes : {65536 * 64 + 1, 65536 * 70}) {
        std::string text(bytes, 'a');
        write_file(dir / "a.txt", text);
        const uint64_t sum = sampled_sum(File(dir / "a.txt"));
        for (const size_t at : {(size_t)0, (size_t)65535, bytes - 65536, bytes - 1}) {
            text[at] = 'b';
            write_file(dir / "a.txt", text);
            CHECK(sampled_sum(File(dir / "a.txt")) != sum);
            text[at] = 'a';
        }
    }
}

TEST_CASE("data record: who waits takes over from the thread, wherever it is, and the sums are those of the files",
          "[data_record]") {
    TempDir dir;
    std::vector<std::string> paths, sums;
    for (const size_t bytes : {20000000, 0, 1, 7000000}) {
        std::string text(bytes, 'a');
        for (size_t i = 0; i < bytes; i += 101) { text[i] = (char)(i % 251); }
        paths.push_back(dir / strprintf("%zu.txt", paths.size()));
        write_file(paths.back(), text);
        Sha256 sum;
        sum.update((const uint8_t*)text.data(), bytes);
        sums.push_back(sum.hex());
    }
    const auto threads = [] { return list_directory("/proc/self/task").size(); };
    const size_t before = threads();
    for (const double begun : {0.0, 0.02, 30.0}) {              // seconds that the thread has for itself
        DataRecord record{Names()};
        record.add("train_files", paths);
        record.start();
        for (const double until = wall_seconds() + begun; wall_seconds() < until && !record.wait(0);) { usleep(1000); }
        int slices = 0;
        while (!record.wait(0.002)) {
            slices++;
            REQUIRE(threads() == before);
        }
        CHECK((slices > 0 || begun > 0));
        for (size_t i = 0; i < paths.size(); i++) { CHECK(record.files[i].sha256 == sums[i]); }
    }
}
