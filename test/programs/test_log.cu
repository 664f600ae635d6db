// test_log.cu -- main.log and log.jsonl: their formats, and that resuming leaves every line once.
#include <sys/resource.h>
#include <csignal>

#include "test/faults.h"
#include "test/files.h"
#include "llmc/engine/log.h"

namespace {
StepRecord record_of(int64_t step) {
    StepRecord r;
    r.step = step;
    r.loss = 1.0 + 1.0 / (double)(step + 1);
    r.lr = 3e-4;
    r.norm = 0.5;
    r.ms = 10;
    r.tok_per_s = 1000;
    return r;
}

// What a trainer logs from step `from` to the end, where the loop does validation, then saves, then updates.
void run(Log& log, int64_t from, int64_t stop, int64_t steps) {
    for (int64_t s = from; s <= steps && s < stop; s++) {
        if (s % 4 == 0 || s == steps) { log.val(s, 2.0 + (double)s, 0.5, 9); }
        if (s < steps) { log.train(record_of(s)); }
    }
}

void append_bytes(const std::string& path, const std::string& bytes) {
    FILE* f = fopen(path.c_str(), "ab");
    REQUIRE(f != nullptr);
    fwrite(bytes.data(), 1, bytes.size(), f);
    fclose(f);
}

// log.jsonl without the times at the ends of its lines
std::string untimed(const TempDir& dir) {
    const std::string begin = ",\"time\":\"", time = "2026-01-31T23:59:59.123Z\"";
    std::string text = read_file(dir.path + "/log.jsonl");
    for (size_t at; (at = text.find(begin)) != std::string::npos;) { text.erase(at, (begin + time).size()); }
    return text;
}
} // namespace

TEST_CASE("log: the formats", "[log]") {
    TempDir dir;
    {
        Log log(dir.path);
        log.val(0, 5.25, 0.25, 9);
        StepRecord r = record_of(0);
        log.train(r);
        r.step = 12;
        r.mfu = 0.5;
        r.mem = 1e9;
        r.skipped = "non-finite loss";
        r.loss = NAN;
        log.train(r);
        log.record({{"kind", "eval"}, {"step", 13}, {"T", 64}, {"ppl", 5.5}});
    }
    CHECK(read_file(dir.path + "/main.log") == "s:0 tel:5.2500\n"
                                               "s:0 trl:2.0000 lr:0.000300 norm:0.50\n"
                                               "s:12 trl:nan lr:0.000300 norm:0.50\n");
    CHECK(untimed(dir) ==
          R"({"kind":"val","step":0,"loss":5.25,"accuracy":0.25})" "\n"
          R"({"kind":"train","step":1,"loss":2.0,"lr":0.0003,"norm":0.5,"ms":10.0,"tok_per_s":1000.0})" "\n"
          R"({"kind":"train","step":13,"loss":null,"lr":0.0003,"norm":0.5,"ms":10.0,"tok_per_s":1000.0,"mfu":0.5,)"
          R"("mem":1000000000.0,"skipped":"non-finite loss"})" "\n"
          R"({"kind":"eval","step":13,"T":64,"ppl":5.5})" "\n");
}

TEST_CASE("log: a validation that asked nothing has no loss", "[log]") {
    TempDir dir;
    { Log log(dir.path); log.val(3, NAN, NAN, 0); }
    CHECK(read_file(dir.path + "/main.log").empty());
    CHECK(untimed(dir) == "{\"kind\":\"val\",\"step\":3,\"loss\":null,\"accuracy\":null}\n");
    CHECK(val_line(3, 10, NAN, 0) == "step    3/10 | no val loss: nothing to predict");
}

TEST_CASE("log: no directory, no files, no failure", "[log]") {
    Log log("");
    log.val(0, 1.0, 0.5, 9);
    log.train(record_of(0));
    log.sync();
    CHECK(log.main_log.fd == -1);
}

TEST_CASE("log: a new run starts both files anew, a directory is made when it is missing", "[log]") {
    TempDir dir;
    { Log log(dir.path); run(log, 0, 100, 10); }
    { Log log(dir.path); log.val(0, 1.0, 0.5, 9); }
    CHECK(read_file(dir.path + "/main.log") == "s:0 tel:1.0000\n");
    CHECK(untimed(dir) == "{\"kind\":\"val\",\"step\":0,\"loss\":1.0,\"accuracy\":0.5}\n");
    const std::string deep = dir.path + "/a";
    { Log log(deep + "/b"); }
    CHECK(path_exists(deep + "/b/main.log"));
    for (const char* f : {"/b/main.log", "/b/log.jsonl"}) { io_unlink(deep + f); }
    io_rmdir(deep + "/b");
    io_rmdir(deep);
    throws_with([&] { Log log(dir.path + "/main.log"); }, "main.log");
}

TEST_CASE("log: killed anywhere and resumed from any earlier step, the files equal an uninterrupted run's", "[log]") {
    const int64_t steps = 10;
    TempDir whole;
    { Log log(whole.path); run(log, 0, 100, steps); }
    for (int64_t killed = 0; killed <= steps + 1; killed++) {
        for (int64_t resumed = 0; resumed <= std::min(killed, steps); resumed++) {
            for (const char* torn : {"", "s:1", "s:3 tr", "{\"kind\":\"train\",\"step\":2,\"lo", "\n"}) {
                TempDir dir;
                { Log log(dir.path); run(log, 0, killed, steps); }
                if (strcmp(torn, "\n") != 0) {
                    append_bytes(dir.path + "/main.log", torn);
                    append_bytes(dir.path + "/log.jsonl", torn);
                }
                { Log log(dir.path, resumed); run(log, resumed, 100, steps); }
                INFO("killed before step " << killed << ", resumed at " << resumed << ", torn '" << torn << "'");
                REQUIRE(read_file(dir.path + "/main.log") == read_file(whole.path + "/main.log"));
                REQUIRE(untimed(dir) == untimed(whole));
                REQUIRE(list_directory(dir.path).size() == 2); // no temporary file stays
            }
        }
    }
}

TEST_CASE("log: one that counts updates from 0, as earlier versions did, resumes and counts on", "[log]") {
    TempDir whole;
    { Log log(whole.path); run(log, 0, 100, 10); }
    std::string old = untimed(whole);                   // the same run's, by an earlier version
    for (int step = 1; step <= 10; step++) {
        const std::string line = "{\"kind\":\"train\",\"step\":", now = line + std::to_string(step);
        REQUIRE(contains(old, now));
        old.replace(old.find(now), now.size(), line + std::to_string(step - 1));
    }
    for (int64_t resumed = 0; resumed <= 10; resumed++) {
        TempDir dir;
        write_file(dir / "log.jsonl", old);
        write_file(dir / "main.log", read_file(whole / "main.log"));
        { Log log(dir.path, resumed); run(log, resumed, 100, 10); }
        INFO("resumed at " << resumed);
        CHECK(untimed(dir) == old);
        CHECK(read_file(dir / "main.log") == read_file(whole / "main.log"));
    }
}

TEST_CASE("log: lines of no step stay on resuming, damaged ones go", "[log]") {
    TempDir dir;
    {
        Log log(dir.path);
        run(log, 0, 3, 10);
        log.record({{"kind", "note"}});
        log.record({{"kind", "eval"}, {"step", 3}});
    }
    append_bytes(dir.path + "/log.jsonl", "{\"kind\":\"tra\n" + std::string(5, '\0') + "\n");
    append_bytes(dir.path + "/main.log", "by hand\ns:7 eval:0.3000\n");
    { Log log(dir.path, 2); }
    CHECK(read_file(dir.path + "/main.log") ==
          "s:0 tel:2.0000\ns:0 trl:2.0000 lr:0.000300 norm:0.50\ns:1 trl:1.5000 lr:0.000300 norm:0.50\nby hand\n");
    const std::string text = untimed(dir);
    CHECK(std::count(text.begin(), text.end(), '\n') == 4);
    CHECK(text.find("\"note\"") != std::string::npos);
    CHECK(text.find("\"eval\"") == std::string::npos);
}

TEST_CASE("log: a line that no log has is refused by its number, in little memory", "[log]") {
    TempDir dir;
    { Log log(dir.path); run(log, 0, 3, 10); }
    const std::string json_log = dir.path + "/log.jsonl", main_log = dir.path + "/main.log";
    const std::string ours = read_file(json_log), main_ours = read_file(main_log);
    const auto refused = [&](const std::string& path, const std::string& line, const std::string& why) {
        INFO(line.substr(0, 20));
        write_file(path, ours + line + "\n" + ours);
        CHECK_THROWS_WITH(Log(dir.path, 2), Catch::Contains(path + ": line 5: ") && Catch::Contains(why));
        CHECK(read_file(path) == ours + line + "\n" + ours);                    // nothing is lost
        write_file(path, path == json_log ? ours : main_ours);
    };
    const size_t many = 100000;
    std::string objects;
    for (size_t i = 0; i < many; i++) { objects += "{\"a\":"; }
    refused(json_log, std::string(33, '[') + std::string(33, ']'), "nested deeper than 32 levels");
    refused(json_log, objects + "1" + std::string(many, '}'), "nested deeper");
    refused(json_log, "{\"a\":1,\"a\":2}", "appears twice");
    for (const std::string& path : {json_log, main_log}) {
        refused(path, std::string(LONGEST_LINE + 1, 'x'), "longer");
        const int fd = io_open(path, O_WRONLY);             // a hole: the disk has nothing of it
        io_truncate(fd, (size_t)2000000000);
        ::close(fd);
        const double begun = wall_seconds();
        CHECK_THROWS_WITH(Log(dir.path, 2), Catch::Contains("longer"));
        CHECK(wall_seconds() < begun + 5);
        CHECK(File(path).size == 2000000000);
        write_file(path, path == json_log ? ours : main_ours);
    }
    // 90,000 keys of a record without a step, and brackets without an end, which are damage
    std::string keys = "{\"kind\":\"note\"";
    for (int i = 0; i < 90000; i++) { keys += strprintf(",\"%x\":1", i); }
    keys += "}\n";
    // the losses of a long window, as --curve records them
    std::string curve = "{\"kind\":\"curve\",\"loss\":[0.5";
    for (int i = 0; i < 300000; i++) { curve += ",1.25"; }
    curve += "]}\n";
    write_file(json_log, ours + keys + std::string(many, '[') + "\n" + curve);
    { Log log(dir.path, 100); }
    CHECK(read_file(json_log) == ours + keys + curve);
}

TEST_CASE("log: what a symbolic link leads to is never written to", "[log]") {
    TempDir dir, other;
    const std::string target = other.path + "/precious", out = dir.path;
    const auto refused = [&](int64_t resume_step) {
        try { Log log(out, resume_step); } catch (const Error& e) {
            CHECK(contains(e.what(), "expected a file to write the log to, got"));
            return e.code;
        }
        return 0;
    };
    alarm(60);                                          // opening a FIFO could hang
    for (const char* name : {"/main.log", "/log.jsonl"}) {
        const std::string path = out + name;
        for (const char* text : {"s:5 trl:1.0\n", ""}) {
            io_close(io_create(target), target);
            const int fd = io_create(target);
            io_write(fd, text, strlen(text), target);
            io_close(fd, target);
            REQUIRE(symlink(target.c_str(), path.c_str()) == 0);
            for (int64_t step : {(int64_t)-1, (int64_t)0, (int64_t)3, INT64_MAX}) { CHECK(refused(step) == 2); }
            CHECK(read_file(target) == text);
            io_unlink(path);
        }
        REQUIRE(symlink("/none/none", path.c_str()) == 0);
        CHECK(refused(-1) == 2);
        io_unlink(path);
        REQUIRE(mkfifo(path.c_str(), 0600) == 0);
        CHECK(refused(-1) == 2);
        io_unlink(path);
    }
    alarm(0);
    // the file that replaces a log that is cut
    {
        Log log(out);
        run(log, 0, INT64_MAX, 8);
    }
    const int fd = io_create(target);
    io_write(fd, "mine", 4, target);
    io_close(fd, target);
    REQUIRE(symlink(target.c_str(), (out + "/main.log.tmp").c_str()) == 0);
    { Log log(out, 3); }
    CHECK(read_file(target) == "mine");
    CHECK(!contains(read_file(out + "/main.log"), "s:3 "));
}

TEST_CASE("log: a finished run that is repeated has its evaluations once", "[log]") {
    TempDir dir;
    const Json one = {{"kind", "extrapolation"}, {"T", 16}, {"loss", 2.5}};
    const Json two = {{"kind", "extrapolation"}, {"T", 32}, {"loss", 2.25}};
    for (int repeated = 0; repeated < 3; repeated++) {
        Log log(dir.path, repeated == 0 ? -1 : 8);
        run(log, repeated == 0 ? 0 : 8, INT64_MAX, 8);
        log.record(one);
        log.record({{"kind", "evaluation_speed"}, {"T", 16}, {"ms", 2.5 + repeated}, {"tok_per_s", 7 + repeated},
                    {"mem", 9 + repeated}});
        if (repeated == 2) { log.record(two); }                             // only the last time
    }
    const std::string text = untimed(dir);
    for (const Json& j : {one, two}) {
        const size_t at = text.find(json_text(j) + "\n");
        REQUIRE(at != std::string::npos);
        CHECK(text.find(json_text(j), at + 1) == std::string::npos);
    }
    const size_t speed = text.find("evaluation_speed");                     // of the first time, and no other
    REQUIRE(speed != std::string::npos);
    CHECK(contains(text.substr(speed), "\"ms\":2.5"));
    CHECK(text.find("evaluation_speed", speed + 1) == std::string::npos);
    { Log(dir.path, INT64_MAX).record(one); }                               // a use of the model adds to the log
    CHECK(untimed(dir) == text + json_text(one) + "\n");
}

TEST_CASE("log: resuming into a directory without logs starts them", "[log]") {
    TempDir dir;
    { Log log(dir.path, 5); log.val(5, 1.0, 0.5, 9); }
    CHECK(read_file(dir.path + "/main.log") == "s:5 tel:1.0000\n");
}

TEST_CASE("log: a full disk tears no line and loses none", "[log]") {
    TempDir dir, whole;
    { Log log(whole.path); run(log, 0, 100, 20); }
    signal(SIGXFSZ, SIG_IGN); // a write beyond the limit then fails with EFBIG, after a short write up to it
    rlimit old;
    getrlimit(RLIMIT_FSIZE, &old);
    std::string main_text;
    {
        Log log(dir.path);
        run(log, 0, 8, 20);
        rlimit tight = old;
        tight.rlim_cur = read_file(dir.path + "/main.log").size() + 10; // room for the start of a line
        setrlimit(RLIMIT_FSIZE, &tight);
        run(log, 8, 12, 20);
        setrlimit(RLIMIT_FSIZE, &old);
        main_text = read_file(dir.path + "/main.log");
        run(log, 12, 100, 20);
    }
    signal(SIGXFSZ, SIG_DFL);
    CHECK(main_text.back() == '\n');
    CHECK(main_text.find("s:8 ") == std::string::npos);
    CHECK(read_file(dir.path + "/main.log") == read_file(whole.path + "/main.log"));
    CHECK(untimed(dir) == untimed(whole));
}

TEST_CASE("log: the step line has the loss in llm.c's columns", "[log]") {
    StepRecord r = record_of(0);
    r.loss = 5.270009;
    r.norm = 29.5471;
    const std::string line = step_line(r, 10, 75);
    CHECK(line == "step    1/10 | loss 5.270009 | norm 29.55 |  1000 tok/s | 75s");
    CHECK(line.substr(20, 8) == "5.270009");                    // where llm.c's loss checker reads
    r.loss_z = -1.234;
    r.norm_z = 12.6;
    r.mfu = 0.414;
    r.skipped = "spike";
    CHECK(step_line(r, 10, 119) ==
          "step    1/10 | loss 5.270009 -1.2z | norm 29.55 |  1000 tok/s 41% MFU | 2m\n"
          "  SKIPPED: spike");
    r.mfu = NAN;                                                // a GPU of unknown peak
    CHECK(contains(step_line(r, 10, 0), " tok/s n/a MFU |"));
    CHECK(val_line(1000, 18865, 10.98765432, 9) == "step  1000/18865 | val loss 10.98765");
}

TEST_CASE("log: the step line is aligned and has at most 79 columns", "[log]") {
    const int64_t steps = 18865;
    size_t separators[5] = {};
    for (double scale : {1e-3, 0.03, 0.4, 1.0, 7.0, 60.0, 900.0}) {
        for (double z : {-9.0, 0.0, 3.3, 42.0}) {
            StepRecord r = record_of(9999);
            r.loss = 0.1 + 10 * scale / 900;
            r.norm = scale;
            r.lr = scale / 1000;
            r.tok_per_s = 2000 * scale;
            r.mfu = 0.001 + scale / 1200;
            r.loss_z = r.norm_z = z;
            const std::string line = step_line(r, steps, 3000 * scale);
            INFO(line);
            CHECK(line.size() <= 79);
            size_t at = 0;
            for (size_t& s : separators) {                      // the same columns in every line
                at = line.find(" | ", at + 1);
                if (&s == separators + 4) { CHECK(at == std::string::npos); break; }
                CHECK((s == 0 || s == at));
                s = at;
            }
        }
    }
    StepRecord nothing = record_of(0);                          // without a window there is no z-score, not even "nan"
    CHECK_FALSE(contains(step_line(nothing, 10, 0), "z |"));
    CHECK_FALSE(contains(step_line(nothing, 10, 0), "nan"));
}

namespace {

std::vector<std::string> calls;
int note_call(IoCall* c) {
    calls.push_back(c->name);
    return 0;
}

} // namespace

TEST_CASE("log: what is kept of it is on the disk before it takes the log's place", "[log]") {
    const TempDir dir;
    const std::string path = dir.path + "/main.log", text = "s:0 a\ns:1 b\ns:2 c\n";
    const int fd = io_create(path);
    io_write(fd, text.data(), text.size(), path);
    io_close(fd, path);
    calls.clear();
    io_hook = note_call;
    const bool cut = cut_log(path, 2, main_log_step);
    io_hook = nullptr;
    CHECK(cut);
    CHECK(read_file(path) == "s:0 a\ns:1 b\n");
    const auto rename = std::find(calls.begin(), calls.end(), "rename");
    REQUIRE(rename != calls.end());
    CHECK(std::find(calls.begin(), rename, "fsync") != rename);
    CHECK(std::find(rename, calls.end(), "fsync") != calls.end());          // of the directory
}
