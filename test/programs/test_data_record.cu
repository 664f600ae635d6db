// test_data_record.cu -- the checksum of a file's blocks, and how many files a checkpoint can list.
#include "llmc/engine/data.h"
#include "test/catch.h"
#include "test/files.h"

TEST_CASE("data record: the blocks that are compared at the start begin and end the file", "[data_record]") {
    TempDir dir;
    for (const size_t bytes : {65536 + 5, 65536 * 64 + 1, 65536 * 70}) {
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

TEST_CASE("data record: the first difference", "[data_record]") {
    const Facts was = {{"lr", "0.003"}, {"pairs", ""}, {"T", "16"}};
    const auto differs = [&](const char* lr, const char* pairs) {
        return first_difference({{"lr", lr}, {"pairs", pairs}, {"T", "16"}}, was);
    };
    CHECK(differs("0.003", "") == "");
    CHECK(differs("0.001", "") == "lr 0.001, not 0.003");
    CHECK(differs("0.001", "x") == "lr 0.001, not 0.003");
    CHECK(differs("0.003", "x\n") == "pairs x\\x0a, not absent");
    CHECK(first_difference({was[0], was[1]}, was) == "T absent, not 16");
    CHECK(first_difference(was, {was[0], was[1]}) == "T 16, not absent");
    CHECK(first_difference({}, {}) == "");
    // the files of a flag: contents, size, number, order and types
    const auto files = [](std::vector<const char*> list) {
        Json j = Json::array();
        for (const char* f : list) { j.push_back({{"file", f}, {"bytes", 7}, {"blocks", std::string("sum of ") + f}}); }
        return file_facts(j, "state.json");
    };
    CHECK(first_difference(files({"b", "a"}), files({"a", "b"})) ==
          "file 1 is b of 7 bytes (sum of b), not a of 7 bytes (sum of a)");
    CHECK(first_difference(files({"a"}), files({"a", "b"})) == "file 2 is absent, not b of 7 bytes (sum of b)");
    CHECK(throws_with([] { file_facts(Json(1), "state.json"); }, "state.json: data: expected an array of files, got 1")
          == EXIT_BAD_INPUT);
    CHECK(throws_with([] { file_facts(Json::array({Json::object()}), "state.json"); }, "\"bytes\"") == EXIT_BAD_INPUT);
}

TEST_CASE("data record: more files than a checkpoint can list are refused", "[data_record]") {
    const TempDir dir;
    const std::string path = dir / (std::string(240, 'x') + ".bin");
    write_file(path, "one");
    const auto add = [&](Json& record, const char* flag, size_t files) {
        add_to_record(record, flag, file_records(std::vector<std::string>(files, path)));
    };
    Json many, record;
    std::string said;
    try { add(many, "train_files", 12000); } catch (const Error& e) { said = e.what(); }
    int most = 0, got = 0;
    REQUIRE(sscanf(said.c_str(), "--train_files: expected at most %d files, because a checkpoint's list has no room "
                   "for more, got %d; join them", &most, &got) == 2);
    CHECK(got == 12000);
    add(record, "train_files", (size_t)most - 100);         // this many fit
    const std::string text = json_text(Json{{"data", record}}, 2);
    CHECK(text.size() < JSON_MAX_BYTES - 250000);
    CHECK(text.size() > JSON_MAX_BYTES - 500000);
    CHECK(parse_json(text, "state").at("data").at("train_files").size() == (size_t)most - 100);
    // the files of all flags together
    CHECK(throws_with([&] { add(record, "val_files", 1000); }, "--val_files: expected at most") == EXIT_BAD_INPUT);
}
