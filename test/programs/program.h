// program.h -- a trainer from the outside, as a user meets it: flags, a process for each run, and what it leaves on the
// disk.
#pragma once

#include <csignal>
#include <map>

#include <sys/wait.h>

#include "test/catch.h"
#include "test/files.h"
#include "llmc/engine/log.h"
#include "llmc/engine/json.h"
#include "llmc/base/math.h"
#include "llmc/engine/safetensors.h"

// Flags and values; set() replaces, because a flag given twice is an error. A switch has the value "".
struct Flags {
    std::vector<std::pair<std::string, std::string>> list;

    Flags set(const std::string& flag, const std::string& value = "") const {
        Flags f = *this;
        for (auto& item : f.list) { if (item.first == flag) { item.second = value; return f; } }
        f.list.push_back({flag, value});
        return f;
    }
    // "--lr 1e-3 --check --steps -1"; a value may have blanks, as the path of a temporary directory
    Flags with(const std::string& words) const {
        Flags f = *this;
        std::string flag, value;
        size_t at = 0;
        while ((at = words.find_first_not_of(' ', at)) != std::string::npos) {
            const std::string word = words.substr(at, words.find(' ', at) - at);
            const bool is_flag = word.size() > 1 && word[0] == '-' && !isdigit((unsigned char)word[1]);
            if (is_flag) { flag = word; }
            value += (value.empty() ? "" : " ") + word;
            if (is_flag) { value = ""; }
            f = f.set(flag, value);
            at += word.size();
        }
        return f;
    }
    Flags without(const std::string& flag) const {
        Flags f;
        for (const auto& item : list) { if (item.first != flag) { f.list.push_back(item); } }
        return f;
    }
    std::vector<std::string> words() const {
        std::vector<std::string> w;
        for (const auto& item : list) {
            w.push_back(item.first);
            if (!item.second.empty()) { w.push_back(item.second); }
        }
        return w;
    }
};

struct Outcome { int code; std::string out, err; };     // code: 128 + number when a signal ended it

// The binary of `name`, "train_gpt2": $TRAIN_GPT2, or ./train_gpt2
inline std::string find_program(const std::string& name) {
    std::string variable = name;
    for (char& c : variable) { c = (char)toupper((unsigned char)c); }
    const char* path = getenv(variable.c_str());
    return path != nullptr && *path != '\0' ? path : "./" + name;
}

// A run in the background
struct Process {
    pid_t pid = -1;
    std::string out, err;

    Process(const std::string& program, const std::vector<std::string>& args, const std::string& log)
        : out(log + ".out"), err(log + ".err") {
        std::vector<std::string> words = args;
        words.insert(words.begin(), program);
        std::vector<char*> argv;
        for (std::string& w : words) { argv.push_back(&w[0]); }
        argv.push_back(nullptr);
        setenv("OMP_WAIT_POLICY", "passive", 1);            // threads that spin would starve the other tests' runs
        const int fds[] = {io_create(out), io_create(err)};
        pid = fork();
        if (pid == 0) {
            dup2(fds[0], STDOUT_FILENO);
            dup2(fds[1], STDERR_FILENO);
            for (int number : {SIGHUP, SIGINT}) { signal(number, SIG_DFL); }    // nohup and background jobs ignore them
            alarm(600);                                     // a run that hangs fails, it does not hang the tests
            execv(argv[0], argv.data());
            _exit(127);
        }
        for (int fd : fds) { ::close(fd); }
        REQUIRE(pid > 0);
    }
    Process(const Process&) = delete;
    Process& operator=(const Process&) = delete;
    ~Process() { if (pid > 0) { kill(pid, SIGKILL); wait(); } }

    Outcome wait() {
        int status = 0;
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
        pid = -1;
        return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_file(out), read_file(err)};
    }
    bool running() const {
        siginfo_t info = {};
        return waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0;
    }
    // until the file has at least this many lines, or the run ends
    void wait_for_lines(const std::string& path, size_t lines) const {
        while (running()) {
            if (path_exists(path)) {
                const std::string text = read_file(path);
                if ((size_t)std::count(text.begin(), text.end(), '\n') >= lines) { return; }
            }
            usleep(1000);
        }
    }
};

// text with something to learn in it
inline std::string words(size_t bytes, uint64_t seed) {
    static const char* const list[] = {"the", "cable", "of", "a", "token", "sees",
                                       "what", "came", "before", "it", "and", "sums"};
    std::string s;
    for (uint64_t i = 0; s.size() < bytes; i++) {
        s += std::string(list[hash64(seed, i) % 12]) + (i % 9 == 8 ? ".\n" : " ");
    }
    return s;
}

// A directory in which a program runs.
struct Place : TempDir {
    std::string program;
    Flags base;                                             // of a run that takes a few milliseconds
    int runs = 0;

    explicit Place(const std::string& name) : program(find_program(name)) {
        INFO("expected " << program << " (make " << name << ")");
        REQUIRE(access(program.c_str(), X_OK) == 0);
    }
    Outcome run(const Flags& flags) {
        Process p(program, flags.words(), *this / ("run" + std::to_string(runs++)));
        const Outcome o = p.wait();
        UNSCOPED_INFO("exit code " << o.code << "\nstderr: " << o.err.substr(0, 2000));
        return o;
    }
    // A model's losses on val.txt; a flag given here replaces what is set.
    Outcome evaluate(const std::string& model, const std::string& flags) {
        const Outcome o = run(Flags().set("--load", model).set("--val_files", *this / "val.txt")
                                  .with("--eval_lengths 24,96 --threads 2").with(flags));
        REQUIRE(o.code == 0);
        return o;
    }
    // the program with these flags, for a shell
    std::string command(const Flags& flags) const {
        std::string line = program;
        for (const std::string& word : flags.words()) { line += " '" + word + "'"; }
        return line;
    }
    std::string out() const { return path + "/out"; }
};

inline std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    for (size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1) {
        lines.push_back(text.substr(at, end - at));
    }
    return lines;
}

inline std::string step_dir(const std::string& out, int step) { return out + strprintf("/step_%08d", step); }

// Everything of a checkpoint that must be the same to the bit; the state without the flags, which name directories.
inline std::map<std::string, std::string> bits(const std::string& dir) {
    std::map<std::string, std::string> m;
    for (const char* name : {"model.safetensors", "optimizer_0.state", "config.json"}) {
        m[name] = read_file(dir + "/" + name);
    }
    Json state = parse_json(read_file(dir + "/state.json"), dir);
    state.erase("options");
    if (state.contains("data")) {                           // the place and date of a file do not belong to the run
        for (auto& flag : state["data"].items()) {
            for (Json& file : flag.value()) {
                file.erase("mtime");
                file.erase("inode");
            }
        }
    }
    m["state.json"] = json_text(state);
    return m;
}

inline void check_same(const std::map<std::string, std::string>& a, const std::map<std::string, std::string>& b) {
    for (const auto& file : a) {
        INFO(file.first);
        const bool same = file.second == b.at(file.first);
        CHECK(same);
        if (!same && file.first == "state.json") { CHECK(file.second == b.at(file.first)); }
    }
}

inline std::vector<Json> json_lines(const std::string& path) {
    std::vector<Json> records;
    const std::string text = read_file(path);
    REQUIRE((text.empty() || text.back() == '\n'));
    for (const std::string& line : lines_of(text)) { records.push_back(parse_json(line, path)); }  // dies on a torn one
    return records;
}

// without the time, so that the records of two runs compare
inline std::vector<Json> of_kind(const std::vector<Json>& lines, const std::string& kind) {
    std::vector<Json> found;
    for (const Json& j : lines) { if (j.at("kind") == kind) { found.push_back(j); } }
    for (Json& j : found) { j.erase("time"); }
    return found;
}

// log.jsonl without what is timed and the record of the flags
inline std::string untimed_log(const std::string& out) {
    std::string s;
    for (const Json& j : json_lines(out + "/log.jsonl")) {
        if (j.at("kind") != "config") { s += Log::untimed(j) + "\n"; }
    }
    return s;
}

inline std::vector<double> losses(const std::string& out) {
    std::vector<double> x;
    for (const Json& j : of_kind(json_lines(out + "/log.jsonl"), "train")) {
        x.push_back(j.at("loss").is_number() ? j.at("loss").get<double>() : NAN);
    }
    return x;
}

inline void check_each_step_once(const std::string& out, int steps) {
    const std::vector<Json> train = of_kind(json_lines(out + "/log.jsonl"), "train");
    REQUIRE(train.size() == (size_t)steps);
    for (int i = 0; i < steps; i++) { CHECK(train[(size_t)i].at("step") == i + 1); }
}

// the float32 payload of a safetensors file
inline std::vector<float> values_of(const std::string& path) {
    const std::string bytes = read_file(path);
    uint64_t header = 0;
    memcpy(&header, bytes.data(), 8);
    std::vector<float> x((bytes.size() - 8 - header) / 4);
    memcpy(x.data(), bytes.data() + 8 + header, x.size() * 4);
    return x;
}

inline std::string flipped(std::string bytes, size_t at) { bytes[at] = (char)(bytes[at] ^ 4); return bytes; }

// ----------------------------------------------------------------------------------------------------------

// Tests of both trainers. A run of 200 steps with a guard that skips some updates, so that steps and updates differ
inline Flags resumable(const Flags& flags) {
    return flags.with("--weight_decay 0.1 --steps 200 --checkpoint_every 150 --val_every 50 --skip_loss_z 1")
        .with("--skip_norm_z 0.5 --schedule constant --warmup 10");
}
// Leaves that run, which is resumed in the middle, in out().
inline void check_resumes(Place& place, const Flags& some) {
    const Flags flags = resumable(some);
    REQUIRE(place.run(flags).code == 0);
    const auto unbroken = bits(step_dir(place.out(), 200)), part = bits(step_dir(place.out(), 150));
    const std::string log = untimed_log(place.out()), main_log = read_file(place.out() + "/main.log");
    check_each_step_once(place.out(), 200);
    const Json state = parse_json(unbroken.at("state.json"), "state");
    REQUIRE(state.at("updates").get<int>() < 200);                                  // it did skip
    CHECK(state.at("guard").at("spikes").get<int>() + state.at("updates").get<int>() == 200);
    TempDir::remove(step_dir(place.out(), 200));
    const Outcome o = place.run(flags.set("--resume", "1"));
    REQUIRE(o.code == 0);
    CHECK(contains(o.out, "resumed from " + step_dir(place.out(), 150)));
    check_same(unbroken, bits(step_dir(place.out(), 200)));
    check_same(part, bits(step_dir(place.out(), 150)));
    CHECK(untimed_log(place.out()) == log);
    CHECK(read_file(place.out() + "/main.log") == main_log);
}

inline void check_same_on_any_threads(Place& place) {
    // shapes that no tile divides, several slabs of rows, five micro-batches
    const Flags flags = place.base.with("--T 37 --B 3 --total_batch 555 --model 2,2,40 --steps 6");
    const auto train = [&](const std::string& change) {
        const std::string out = place / change;
        INFO(change);
        REQUIRE(place.run(flags.with(change).set("--out", out)).code == 0);
        return out;
    };
    const std::string first = train("--threads 2");
    const auto a = bits(step_dir(first, 6));
    for (const char* change : {"--threads 1", "--threads 4", "--recompute 0", "--recompute 2"}) {
        INFO(change);
        check_same(a, bits(step_dir(train(change), 6)));
    }
    for (const char* change : {"--B 1", "--B 5", "--B 15"}) {
        INFO(change);
        const std::vector<double> x = losses(first), y = losses(train(change));
        REQUIRE((x.size() == 6 && y.size() == 6));
        for (size_t i = 0; i < 6; i++) { CHECK(std::fabs(x[i] - y[i]) <= 2e-6 * x[i]); }
    }
    CHECK(bits(step_dir(train("--seed 43"), 6)).at("model.safetensors") != a.at("model.safetensors"));
}

inline void check_overfits(Place& place, const std::string& flags) {
    for (const char* pos : {"cable", "rope"}) {
        INFO(pos);
        const std::string out = place / pos;
        REQUIRE(place.run(place.base.set("--pos", pos).with("-a 1 --lr 1e-2 --final_lr 0.1 --B 2 --val_every 0")
                              .with("--checkpoint_every 0").with(flags).set("--out", out)).code == 0);
        const std::vector<double> x = losses(out);
        CHECK(x[0] > 5);
        CHECK(x.back() < 0.1);
    }
}

// Runs the program with $FAULTS (test/faults.c), which must strike.
inline Outcome run_with_faults(Place& place, const Flags& flags, const char* faults) {
    setenv("LD_PRELOAD", "build/faults.so", 1);
    setenv("FAULTS", faults, 1);
    const Outcome o = place.run(flags);
    unsetenv("LD_PRELOAD");
    unsetenv("FAULTS");
    CHECK(contains(o.err, "FAULTS: "));
    return o;
}

// A use of a model whose result does not fit on the disk has failed, and --out has not changed.
inline void check_lost(Place& place, const Flags& use, const std::string& out) {
    const auto contents = [&] {
        std::map<std::string, std::string> files;
        for (const std::string& name : list_directory(out)) { files[name] = read_file(out + "/" + name); }
        return files;
    };
    REQUIRE(place.run(use.set("--out", out)).code == 0);
    const auto before = contents();
    const Outcome o = run_with_faults(place, use.set("--out", out), "write:1:28:always");         // ENOSPC
    INFO(use.words().back() << ": " << o.err);
    CHECK(o.code == EXIT_BAD_INPUT);
    CHECK(contains(o.err, "error: " + out));
    CHECK(contains(o.err, "cannot write: No space left on device"));
    CHECK(contents() == before);
}

// ----------------------------------------------------------------------------------------------------------

struct Refusal { Flags flags; std::vector<std::string> said; };

inline void check_refused(Place& place, const Refusal& r) {
    std::string line;
    for (const std::string& w : r.flags.words()) { line += " " + w.substr(0, 80); }
    INFO(line);
    const Outcome o = place.run(r.flags);
    INFO(o.err.substr(0, 1000));
    CHECK(o.code == EXIT_BAD_INPUT);
    CHECK(o.err.size() < 2000);
    CHECK(contains(o.err, "error: "));
    for (const std::string& part : r.said) {
        INFO("wanted: " << part);
        CHECK(contains(o.err, part));
    }
}

// ----------------------------------------------------------------------------------------------------------

// Copies a checkpoint from before optimizer_0.state into a new directory.
inline void copy_old_checkpoint(const std::string& from, const std::string& to) {
    io_mkdirs(to);
    for (const char* file : {"config.json", "manifest.json", "model.safetensors", "optimizer_0.safetensors",
                             "state.json"}) {
        write_file(to + "/" + file, read_file(from + "/" + file));
    }
}

// test/fixtures/old_<program>/step_00000020 is a checkpoint from before model_type "cable" and optimizer_0.state.
// Resumed, it must continue like an unbroken run of today: with its weights, its moments and its place in the data.
inline void check_old_checkpoint(const std::string& program) {
    Place place(program);
    std::string text;
    for (int i = 0; i < 60; i++) { text += "the cable of a token sees what came before it and sums\n"; }
    write_file(place / "text.txt", text);
    const std::string name = "/step_00000020";
    copy_old_checkpoint("test/fixtures/old_" + program + name, place.out() + name);
    Flags flags = Flags().set("--train_files", place / "text.txt")
        .with("--val_every 0 --B 2 --T 16 --lr 1e-2 --threads 1 --checkpoint_every 40 --model 1,2,8 --steps 40");
    if (program == "train_gpt2") { flags = flags.set("--sample_every", "0"); }
    const Flags resume = flags.with("--resume 1 --allow_change train_files,steps").set("--out", place.out());
    REQUIRE(place.run(resume).code == 0);
    REQUIRE(place.run(flags.set("--out", place / "unbroken")).code == 0);
    const std::vector<double> found = losses(place.out()), wanted = losses(place / "unbroken");
    REQUIRE(found.size() == 20);
    REQUIRE(wanted.size() == 40);
    // 0 where it was written; without the moments, 0.03 to 1
    for (size_t i = 0; i < 20; i++) { CHECK(std::fabs(found[i] - wanted[20 + i]) < 1e-3); }
    // only the weights, named by the checkpoint or by the run
    const std::string dir = place.out() + name;
    CHECK_FALSE(contains(read_file(dir + "/config.json"), "cable_version"));
    CHECK(contains(read_file(step_dir(place.out(), 40) + "/config.json"), "\"cable_version\": \"1.0.0\""));
    for (const std::string& load : {dir, dir + "/model.safetensors"}) {
        const Flags use = flags.without("--out").set("--load", load).without("--model");
        REQUIRE(place.run(use.with("--steps 1 --checkpoint_every 0").set("--out", place / "loaded")).code == 0);
        CHECK(std::fabs(losses(place / "loaded")[0] - wanted[0]) > 1);          // trained, not fresh
    }
}
