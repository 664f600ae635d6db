// run/log.h -- what a run leaves to plot: <out>/main.log in llm.c's format and <out>/log.jsonl, one object a line.
//
//   main.log    s:12 tel:4.1234    s:12 trl:4.2345 lr:0.000300 norm:1.23           (steps count from 0)
//   log.jsonl   {"kind":"train","step":12,"loss":...}   {"kind":"val","step":12,"loss":...}   ...
//
// The checkpoint of step s holds the state before update s. A run resumed from it repeats all of step s (validation
// when due, then the update), so resuming cuts every line of step s and later: the files end up with each line once, as
// if the run had never stopped. A line goes out in one write(); if a kill does tear the last one, it is cut too.
#ifndef LLMC_RUN_LOG_H
#define LLMC_RUN_LOG_H

#include <cmath>

#include "../base/common.h"
#include "../base/gpu.h"
#include "../base/json.h"

// One update, as it is logged and printed. Negative mfu or mem are left out; an mfu of NAN is "n/a", and not logged.
struct StepRecord {
    int64_t step = 0; // from 0
    double loss = 0, lr = 0, norm = 0, ms = 0, tok_per_s = 0;
    double loss_z = NAN, norm_z = NAN;
    double mfu = -1, mem = -1; // fraction of the device's peak; bytes
    std::string skipped;       // why the update was not applied; empty = it was
};

inline std::string format_z(double z) { return std::isnan(z) ? "+nan" : strprintf("%+.2f", z); }

// The line on stdout. Scripts read llm.c's columns, so everything new comes after them; the step shown counts from 1.
inline std::string step_line(const StepRecord& r, int64_t steps, double eta_seconds) {
    std::string s = strprintf("step %4lld/%lld | loss %7.6f (%sz)| norm %6.4f (%sz)| lr %.2e | %.2f ms | ",
                              (long long)r.step + 1, (long long)steps, r.loss, format_z(r.loss_z).c_str(), r.norm,
                              format_z(r.norm_z).c_str(), r.lr, r.ms);
    if (!(r.mfu < 0)) { s += mfu_text(r.mfu) + " MFU | "; }
    s += strprintf("%.0f tok/s | ETA %s", r.tok_per_s, format_duration(eta_seconds).c_str());
    if (!r.skipped.empty()) { s += " | SKIPPED: " + r.skipped; }
    return s;
}

// The step that a line of main.log or log.jsonl belongs to; -1: to none, it stays; -2: it is damaged, it goes.
inline int64_t main_log_step(const std::string& line) {
    long long step = -1;
    return sscanf(line.c_str(), "s:%lld ", &step) == 1 && step >= 0 ? (int64_t)step : -1;
}
inline int64_t json_log_step(const std::string& line) {
    const Json j = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!j.is_object()) { return -2; }
    const auto step = j.find("step");
    return step != j.end() && step->is_number_integer() ? step->get<int64_t>() : -1;
}

// Leaves the whole lines of steps before `step` (and those of no step) in the file at `path`; true if any had to go.
inline bool cut_log(const std::string& path, int64_t step, int64_t (*step_of)(const std::string&)) {
    const std::string text = read_file(path, UINT64_MAX);
    std::string kept;
    for (size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1) {
        const int64_t s = step_of(text.substr(at, end - at));
        if (s == -1 || (s >= 0 && s < step)) { kept.append(text, at, end - at + 1); }
    }
    if (kept == text) { return false; }
    const std::string temporary = path + ".tmp"; // replaced by a rename: a kill here must not lose the log
    const int fd = io_create(temporary);
    io_write(fd, kept.data(), kept.size(), temporary);
    io_fsync(fd, temporary);
    io_close(fd, temporary);
    io_rename(temporary, path);
    const size_t slash = path.rfind('/');       // what is appended from here on is to be found after a power failure
    io_fsync_directory(slash == std::string::npos ? "." : path.substr(0, slash + 1));
    return true;
}

// A file that is only ever appended to, in whole lines.
struct LogFile {
    std::string path, pending; // pending: lines that a full disk refused, tried again with the next one
    int fd = -1;
    off_t torn = -1;           // the end of the last whole line, if more is there

    void open(const std::string& file, bool keep) {
        path = file;
        fd = io_open(path, O_WRONLY | O_CREAT | O_APPEND | (keep ? 0 : O_TRUNC));
        check(fd >= 0, "%s: cannot open the log: %s", path.c_str(), strerror(errno));
    }
    // A run must not end because its log cannot be written: a failure is reported once, and tried again with the next line.
    void append(const std::string& line) {
        if (fd < 0) { return; }
        const bool failing = !pending.empty();
        pending += line + "\n";
        try { flush(); } catch (const Error& e) {
            if (!failing) { fprintf(stderr, "warning: %s; the run goes on, its log is kept and written when it can be\n", e.what()); }
        }
    }
    // What a failed write leaves of a line is taken back, if need be the next time.
    void flush() {
        if (fd < 0 || pending.empty()) { return; }
        check(torn < 0 || io_truncate(fd, (size_t)torn, path), "%s: cannot truncate: %s", path.c_str(), strerror(errno));
        torn = -1;
        const off_t before = lseek(fd, 0, SEEK_END);
        try { io_write(fd, pending.data(), pending.size(), path); } catch (const Error&) {
            if (!io_truncate(fd, (size_t)before, path)) { torn = before; }
            throw;
        }
        pending.clear();
    }
    LogFile() = default;
    LogFile(const LogFile&) = delete;
    LogFile& operator=(const LogFile&) = delete;
    ~LogFile() { if (fd >= 0) { ::close(fd); } }
};

// With an empty `out` (no --out, or not the rank that logs) everything here does nothing.
struct Log {
    LogFile main_log, json_log;

    // resume_step < 0 starts the logs anew; otherwise the run goes on with this step.
    explicit Log(const std::string& out, int64_t resume_step = -1) {
        if (out.empty()) { return; }
        io_mkdirs(out);
        const std::string main_path = out + "/main.log", json_path = out + "/log.jsonl";
        if (resume_step >= 0) {
            if (path_exists(main_path)) { cut_log(main_path, resume_step, main_log_step); }
            if (path_exists(json_path)) { cut_log(json_path, resume_step, json_log_step); }
        }
        main_log.open(main_path, resume_step >= 0);
        json_log.open(json_path, resume_step >= 0);
    }

    void train(const StepRecord& r) {
        main_log.append(strprintf("s:%lld trl:%.4f lr:%.6f norm:%.2f", (long long)r.step, r.loss, r.lr, r.norm));
        Json j = {{"kind", "train"}, {"step", r.step}, {"loss", r.loss}, {"lr", r.lr}, {"norm", r.norm}, {"ms", r.ms},
                  {"tok_per_s", r.tok_per_s}};
        if (r.mfu >= 0) { j["mfu"] = r.mfu; }
        if (r.mem >= 0) { j["mem"] = r.mem; }
        if (!r.skipped.empty()) { j["skipped"] = r.skipped; }
        record(j);
    }

    void val(int64_t step, double loss, double accuracy) {
        main_log.append(strprintf("s:%lld tel:%.4f", (long long)step, loss));
        record({{"kind", "val"}, {"step", step}, {"loss", loss}, {"accuracy", accuracy}});
    }

    void hellaswag(int64_t step, double accuracy) {
        main_log.append(strprintf("s:%lld eval:%.4f", (long long)step, accuracy));
        record({{"kind", "hellaswag"}, {"step", step}, {"acc_norm", accuracy}});
    }

    // Any other object with a "kind". Its "step" lets resuming tell whether it stays. NaN is written as null.
    void record(const Json& j) { json_log.append(json_text(j)); }

    // Before a checkpoint is published: after a power failure the log must not be shorter than the checkpoint is new.
    void sync() {
        for (LogFile* f : {&main_log, &json_log}) {
            f->flush();
            if (f->fd >= 0) { io_fsync(f->fd, f->path); }
        }
    }
};

#endif
