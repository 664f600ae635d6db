// engine/log.h -- the log of a run: its lines on the console, in main.log and in log.jsonl.
#pragma once

#include <ctime>
#include <set>

#include "../base/device.h"
#include "safetensors.h"
#include "flags.h"
#include "json.h"

// ----------------------------------------------------------------------------------------------------------
// the console: a line of at most 79 columns for each step, the same columns in every line

// A step as it is logged and printed. A negative mfu or mem is left out; an mfu of NAN is printed as "n/a", not logged.
struct StepRecord {
    int64_t step = 0;               // from 0
    double start = 0;               // wall_seconds()
    double loss = 0, lr = 0;
    double norm = 0;                // of the gradient, before clipping
    double ms = 0, tok_per_s = 0;
    double loss_z = NAN, norm_z = NAN;
    double mfu = -1, mem = -1;      // fraction of the device's peak; bytes
    std::string skipped;            // why the update was not applied; "" if it was
};

// x in `width` columns, with as many decimals as fit: 0.512, 29.55, 295.5, 12345
inline std::string fixed_width(double x, int width) {
    int decimals = width - 2;
    while (decimals > 0 && (int)strprintf("%.*f", decimals, x).size() > width) { decimals--; }
    return strprintf("%*.*f", width, decimals, x);
}
// A rate in five columns: " 3318", "12.3k", " 425k", "1.27M"
inline std::string rate_text(double rate) {
    if (rate < 9999.5) { return strprintf("%5.0f", rate); }
    return rate < 999500 ? fixed_width(rate / 1e3, 4) + "k" : fixed_width(rate / 1e6, 4) + "M";
}
// A z-score in six columns: " +1.2z"; blank in a run's first 128 steps, which have none
inline std::string z_text(double z) {
    const int decimals = std::fabs(z) < 9.95 ? 1 : 0;
    return std::isnan(z) ? "" : strprintf("%6s", strprintf(" %+.*fz", decimals, z).c_str());
}
// The time left, in at most three columns up to 99 days: 42s, 75m, 27h, 12d
inline std::string time_left(double seconds) {
    if (seconds < 99.5) { return strprintf("%.0fs", seconds); }
    if (seconds < 99.5 * 60) { return strprintf("%.0fm", seconds / 60); }
    return seconds < 99.5 * 3600 ? strprintf("%.0fh", seconds / 3600) : strprintf("%.0fd", seconds / 86400);
}
// The beginning of a console line after `done` steps
inline std::string step_text(int64_t done, int64_t steps) {
    const std::string total = std::to_string(steps);
    return strprintf("step %*lld/%s | ", std::max(4, (int)total.size()), (long long)done, total.c_str());
}

// step  1000/18865 | loss 3.424958 +1.2z | norm 0.512 |  425k tok/s 41% MFU | 75m
// The loss stands in llm.c's columns, which scripts read. Steps count from 1: a step is done when its line appears. The
// learning rate, milliseconds and the norm's z-score are in log.jsonl.
inline std::string step_line(const StepRecord& r, int64_t steps, double seconds_left) {
    const std::string mfu = std::isfinite(r.mfu) ? strprintf("%3.0f%% MFU", 100 * r.mfu) : " n/a MFU";
    return step_text(r.step + 1, steps) + "loss " + fixed_width(r.loss, 8) + z_text(r.loss_z) +
           " | norm " + fixed_width(r.norm, 5) + " | " + rate_text(r.tok_per_s) + " tok/s" + (r.mfu < 0 ? "" : mfu) +
           " | " + time_left(seconds_left) + (r.skipped.empty() ? "" : "\n  SKIPPED: " + r.skipped);
}

// step   20/74 | val loss 5.270009
// Validation comes before an update, so the step is the number of updates so far. tokens: predicted ones
inline std::string val_line(int64_t step, int64_t steps, double loss, uint64_t tokens) {
    if (tokens == 0) { return step_text(step, steps) + "no val loss: nothing to predict"; }
    return step_text(step, steps) + "val loss " + fixed_width(loss, 8);
}

// ----------------------------------------------------------------------------------------------------------
// the logs: <out>/main.log in llm.c's format, and <out>/log.jsonl with one object per line
//
//   main.log    s:12 tel:4.1234    s:12 trl:4.2345 lr:0.000300 norm:1.23           (steps count from 0, as in llm.c)
//   log.jsonl   {"kind":"config","encoding":...,"flags":{...}}                     first, if the run trains
//               {"kind":"train","step":12,"loss":...,"time":...}   {"kind":"val","step":12,"loss":...,"time":...}   ...
//
// Two runs with the same flags have equal main.logs, and log.jsonls that differ in times and memory only. The
// checkpoint of step s holds the state before update s, so a resumed run cuts every line of step s and later: in the
// end the files have each line once, as if the run had never stopped. A line is one write(); if a kill leaves a part of
// one, the part is cut, too.

// The step of a line of main.log or log.jsonl; -1: none, and it stays; -2: it is damaged, and cut
inline int64_t main_log_step(const std::string& line) {
    long long step = -1;
    return sscanf(line.c_str(), "s:%lld ", &step) == 1 && step >= 0 ? (int64_t)step : -1;
}
inline int64_t json_log_step(const std::string& line) {
    const nlohmann::json j = parse_json_line(line);
    if (!j.is_object()) { return -2; }
    return j.contains("step") && j["step"].is_number_integer() ? j["step"].get<int64_t>() : -1;
}

// Keeps in the file at `path` only whole lines of steps before `step` or without a step; true if it cut any.
template <class F> bool cut_log(const std::string& path, int64_t step, F step_of) {
    const File file(path);
    std::string kept;
    each_line(file, [&](const std::string& line) {
        const int64_t s = step_of(line);
        if (s == -1 || (s >= 0 && s < step)) { kept += line + "\n"; }
    });
    if (kept.size() == file.size) { return false; }
    write_text_whole(path, kept);               // so that a kill here does not lose the log
    return true;
}

// A file to which whole lines are appended.
struct LogFile {
    std::string path, pending;  // pending: lines that could not be written, retried with the next line
    int fd = -1;
    off_t torn = -1;            // if a part of a line is at the end: where it begins
    bool synced = true;         // no line since the last fsync

    void open(const std::string& file, bool keep) {
        path = file;
        fd = io_open(path, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | (keep ? 0 : O_TRUNC));
        check(fd >= 0, "%s: cannot open the log: %s", path.c_str(), strerror(errno));
    }
    // A failure does not end the run: it is reported once, and the next line tries again.
    void append(const std::string& line) {
        if (fd < 0) { return; }
        const bool failing = !pending.empty();
        pending += line + "\n";
        synced = false;
        try { flush(); } catch (const Error& e) {
            if (!failing) { say("warning: %s; the run continues, and retries with each new line", e.what()); }
        }
    }
    // Writes the pending lines. A part of a line that a failed write leaves is removed, now or by the next call.
    void flush() {
        if (fd < 0 || pending.empty()) { return; }
        check(torn < 0 || io_truncate(fd, (size_t)torn), "%s: cannot truncate: %s", path.c_str(),
              strerror(errno));
        torn = -1;
        const off_t before = lseek(fd, 0, SEEK_END);
        try { io_write(fd, pending.data(), pending.size(), path); } catch (const Error&) {
            if (!io_truncate(fd, (size_t)before)) { torn = before; }
            throw;
        }
        pending.clear();
    }
    LogFile() = default;
    LogFile(const LogFile&) = delete;
    LogFile& operator=(const LogFile&) = delete;
    ~LogFile() { if (fd >= 0) { ::close(fd); } }
};

// Now, in UTC: 2026-01-31T23:59:59.123Z
inline std::string utc_time() {
    timespec now = {};
    clock_gettime(CLOCK_REALTIME, &now);
    now.tv_sec = std::clamp(now.tv_sec, (time_t)0, (time_t)253402300799);   // 1970 to 9999: a year has four digits
    char text[32];
    strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S", gmtime(&now.tv_sec));
    return strprintf("%s.%03ldZ", text, now.tv_nsec / 1000000);
}

// Renames the logs of an earlier run, if they hold anything, to the first .N that is free for both.
inline void set_aside(const std::string& main_path, const std::string& json_path) {
    const auto holds = [](const std::string& p) { return path_exists(p) && File(p).size > 0; };
    if (!holds(main_path) && !holds(json_path)) { return; }
    int n = 1;
    std::string suffix = ".1";
    while (path_exists(main_path + suffix) || path_exists(json_path + suffix)) { suffix = "." + std::to_string(++n); }
    for (const std::string& p : {main_path, json_path}) { if (path_exists(p)) { io_rename(p, p + suffix); } }
    say("warning: the logs of an earlier run, which has no checkpoint here, are now %s and %s",
        (main_path + suffix).c_str(), (json_path + suffix).c_str());
}

// Both logs. With an empty `out` (no --out, or not rank 0) its functions do nothing.
struct Log {
    LogFile main_log, json_log;
    std::string heading;                // lines to write before the first record
    std::set<std::string> stepless;     // the records of log.jsonl without a step: evaluations
    int64_t first_update = 1;           // step of the first update in log.jsonl; 0 in an earlier version's log

    // resume_step: the first step to come; < 0: new logs, and an earlier run's become main.log.1 and log.jsonl.1
    explicit Log(const std::string& out = "", int64_t resume_step = -1) {
        if (out.empty()) { return; }
        io_mkdirs(out);
        const std::string main_path = out + "/main.log", json_path = out + "/log.jsonl";
        for (const std::string& path : {main_path, json_path}) {
            struct stat st;                             // a symbolic link's target is not ours
            check(lstat(path.c_str(), &st) != 0 || S_ISREG(st.st_mode), "%s: expected a file to write the log to, got "
                  "%s; move it away", path.c_str(), S_ISLNK(st.st_mode) ? "a symbolic link" : "something else");
        }
        const auto json_step = [&](const std::string& line) {
            const int64_t step = json_log_step(line);
            const bool update = line.find("\"train\"") == 8 || line.find("\"swap\"") == 8;          // after {"kind":
            if (update && step >= 0) { return step - (first_update = step == 0 ? 0 : first_update); }
            if (step == -1 && resume_step < INT64_MAX) { stepless.insert(untimed(parse_json_line(line))); }
            return step;
        };
        if (resume_step >= 0) {
            if (path_exists(main_path)) { cut_log(main_path, resume_step, main_log_step); }
            if (path_exists(json_path)) { cut_log(json_path, resume_step, json_step); }
        } else {
            set_aside(main_path, json_path);
        }
        main_log.open(main_path, resume_step >= 0);
        json_log.open(json_path, resume_step >= 0);
    }

    void train(const StepRecord& r) {
        main_log.append(strprintf("s:%lld trl:%.4f lr:%.6f norm:%.2f", (long long)r.step, r.loss, r.lr, r.norm));
        Json j = {{"kind", "train"}, {"step", r.step + first_update}, {"loss", r.loss}, {"lr", r.lr}, {"norm", r.norm},
                  {"ms", r.ms}, {"tok_per_s", r.tok_per_s}};
        if (r.mfu >= 0) { j["mfu"] = r.mfu; }
        if (r.mem >= 0) { j["mem"] = r.mem; }
        if (!r.skipped.empty()) { j["skipped"] = r.skipped; }
        record(j);
    }

    // tokens: predicted ones; without any the loss is null in log.jsonl. dead_heads: the share of heads whose S never
    // moves (lab/evaluate.h); NAN for encodings without S
    void val(int64_t step, double loss, double accuracy, uint64_t tokens, double dead_heads = NAN) {
        if (tokens > 0) { main_log.append(strprintf("s:%lld tel:%.4f", (long long)step, loss)); }
        Json j = {{"kind", "val"}, {"step", step}, {"loss", loss}, {"accuracy", accuracy}};
        if (!std::isnan(dead_heads)) { j["dead_heads"] = dead_heads; }
        record(j);
    }

    void hellaswag(int64_t step, double accuracy) {
        main_log.append(strprintf("s:%lld eval:%.4f", (long long)step, accuracy));
        record({{"kind", "hellaswag"}, {"step", step}, {"acc_norm", accuracy}});
    }

    // Writes an object with a "kind", and the time. A record without a step is not written twice, as repeating a
    // finished run evaluates again. NaN becomes null.
    void record(Json j) {
        if (!stepless.empty() && stepless.count(untimed(j)) > 0) { return; }
        j["time"] = utc_time();
        json_log.append(heading + json_text(j));
        heading.clear();
    }

    // a record without the values that differ between two equal runs
    static std::string untimed(nlohmann::json j) {
        for (const char* key : {"ms", "tok_per_s", "mfu", "mem", "time"}) { j.erase(key); }
        return json_text(j);
    }

    // Called before a checkpoint is published, so that after a power failure the log has all of its steps, and at the
    // end, as an evaluation without its record on the disk has failed
    void sync() {
        for (LogFile* f : {&main_log, &json_log}) {
            f->flush();
            if (!f->synced) { io_fsync(f->fd, f->path); }
            f->synced = true;
        }
    }
};

// ----------------------------------------------------------------------------------------------------------
// the build and the flags, which are log.jsonl's first line

// The program's version, for --help and config.json (cable_version); docs/CONTRIBUTING.md says what is stable
inline constexpr const char* VERSION = "1.0.0";

// The commit, which the Makefile links in
extern "C" __attribute__((weak)) const char build_commit[];
inline const char* commit_of_build() {          // nullptr: not linked in
    const char* commit = build_commit;
    return commit;
}

// "commit 25e689e1ab, float32, CPU, compiler 12.2.0"
inline std::string version_text() {
    const char* commit = commit_of_build();
    const char* precision = sizeof(floatX) == 2 ? "bf16" : "float32";
    return strprintf("commit %s, %s, %s, compiler %s", commit != nullptr ? commit : "unknown", precision,
                     ON_GPU ? "CUDA" : "CPU", __VERSION__);
}

// The first record of a training's log.jsonl, which --config reads
inline Json config_record(const Options& o, const Json& encoding) {
    Json flags = options_json(o);
    flags.erase("config");                      // its flags are listed themselves
    const char* commit = commit_of_build();
    return {{"kind", "config"}, {"commit", commit != nullptr ? Json(commit) : Json()}, {"time", utc_time()},
            {"encoding", encoding}, {"flags", flags}};
}
