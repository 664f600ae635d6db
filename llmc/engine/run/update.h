// run/update.h -- an update: its learning rate; the guard that skips it if it is not finite, or, with --skip_loss_z or
// --skip_norm_z, a spike; and its record, on the console and in the logs.
#pragma once

#include <ctime>
#include <set>

#include "../../base/parse.h"
#include "../../base/portable.h"
#include "../files/safetensors.h"

// ----------------------------------------------------------------------------------------------------------
// the learning rate is a pure function of the step, so that a resumed run needs no state to continue.
//
//   warm-up:  lr * (step + 1) / warmup         while step < warmup
//   after it: min + f(x) * (lr - min)          min = final_lr * lr, x in [0, 1] the part of the decay already done
//     constant  f = 1                          cosine  f = (1 + cos(pi x)) / 2
//     linear    f = 1 - x                      wsd     f = 1 - sqrt(x) over the last 20 % of the steps, 1 before
// As in llm.c, except that a constant schedule with --warmup warms up, too (no flag is silently ignored), and that wsd
// with a warm-up beyond 80 % of the steps decays from the peak at its end, where llm.c drops to 1 - sqrt(x) at once.

// `steps` is the length of the run, `final_lr` a fraction of the peak `lr`; steps count from 0.
inline double learning_rate(const std::string& schedule, double lr, int64_t warmup, int64_t steps, double final_lr,
                            int64_t step) {
    check(schedule == "cosine" || schedule == "linear" || schedule == "constant" || schedule == "wsd",
          "--schedule: expected one of cosine|linear|constant|wsd, got '%s'", schedule.c_str());
    if (step < warmup) { return lr * (double)(step + 1) / (double)warmup; }
    const int64_t start = schedule == "wsd" ? std::max(warmup, (int64_t)(0.8 * (double)steps)) : warmup;
    // If the run ends within its warm-up there is no decay; after its end the last value stays.
    double x = 0.0, f = 1.0;
    if (step >= start) { x = step < steps ? (double)(step - start) / (double)(steps - start) : 1.0; }
    if (schedule == "cosine") { f = 0.5 * (1.0 + portable_cos(3.14159265358979323846 * x)); }
    if (schedule == "linear") { f = 1.0 - x; }
    if (schedule == "wsd") { f = 1.0 - std::sqrt(x); }
    const double min_lr = final_lr * lr;
    return min_lr + f * (lr - min_lr);
}

// ----------------------------------------------------------------------------------------------------------
// the guard
//
// A value's z-score is its distance, in standard deviations, from the mean of the 128 accepted values before it (nan
// until there are 128). llm.c includes the value itself in the window, which bounds z by sqrt(127) = 11.3; here z has
// no bound. Only accepted steps enter the window, so neither a NaN nor a spike can widen it. Nor can it lock up. A
// skipped update does not change the parameters, so spike after spike on fresh data means that the level has moved and
// the window is out of date: after LEVEL_SHIFT_STEPS of them in a row it starts again, empty. Every rank must pass the
// same two numbers, reduced over all ranks, so that all decide the same.

const int GUARD_WINDOW = 128;
const int LEVEL_SHIFT_STEPS = 8; // this many spikes in a row are a new level
const int MAX_BAD_STEPS = 20;    // skipped updates in a row that end the run

// The last 128 accepted values of one quantity.
struct GuardWindow {
    std::vector<double> values;
    int next = 0; // the oldest value, overwritten next, once the window is full

    // Summed from the beginning each time, in a fixed order: 128 additions cost nothing, and a running sum would drift.
    double z(double x) const {
        if ((int)values.size() < GUARD_WINDOW) { return NAN; }
        double mean = 0, variance = 0;
        for (double v : values) { mean += v / GUARD_WINDOW; }
        for (double v : values) { variance += (v - mean) * (v - mean) / GUARD_WINDOW; }
        // At least float32's rounding: after a window of equal values, a change in the last digit would be a spike.
        const double deviation = std::max(std::sqrt(variance), 1e-6 * std::fabs(mean));
        return deviation > 0 ? (x - mean) / deviation : 0.0;
    }
    void push(double x) {
        if ((int)values.size() < GUARD_WINDOW) { values.push_back(x); return; }
        values[(size_t)next] = x;
        next = (next + 1) % GUARD_WINDOW;
    }

    Json to_json() const { return {{"values", values}, {"next", next}}; }
    static GuardWindow from_json(const Json& j, const std::string& what) {
        GuardWindow w;
        const Json saved = json_at(j, "values", what);
        check(saved.is_array() && (int)saved.size() <= GUARD_WINDOW, "%s: \"values\": expected an array of at most %d, "
              "got %s", what.c_str(), GUARD_WINDOW, json_excerpt(saved).c_str());
        for (const Json& v : saved) {
            check(v.is_number(), "%s: \"values\": expected numbers, got %s", what.c_str(), json_excerpt(v).c_str());
            w.values.push_back(v.get<double>());
        }
        w.next = (int)json_int(j, "next", 0, (int)w.values.size() == GUARD_WINDOW ? GUARD_WINDOW - 1 : 0, what);
        return w;
    }
};

struct Verdict {
    bool skip = false;
    std::string reason;      // empty unless skip
    double loss_z = NAN, norm_z = NAN;      // nan while unknown
};

struct Guard {
    double skip_loss_z = 0, skip_norm_z = 0; // limits from the flags, 0 = off
    GuardWindow loss, norm;
    // counts over the whole run
    int64_t non_finite = 0, spikes = 0;
    int64_t level_shifts = 0;
    int bad_in_a_row = 0, spikes_in_a_row = 0;

    // Call once a step, after backward and before the update. If the result has `skip`, do not apply the update.
    Verdict judge(double step_loss, double step_norm) {
        Verdict v;
        const auto skip = [&](int64_t& count, const std::string& reason) {
            count++;
            bad_in_a_row++;
            v.skip = true;
            v.reason = reason;
            return v;
        };
        if (!std::isfinite(step_loss) || !std::isfinite(step_norm)) {
            const char* bad = std::isfinite(step_loss) ? "grad norm" : "loss";
            return skip(non_finite, strprintf("non-finite %s (loss %g, grad norm %g)", bad, step_loss, step_norm));
        }
        v.loss_z = loss.z(step_loss);
        v.norm_z = norm.z(step_norm);
        const bool loss_spike = skip_loss_z > 0 && v.loss_z > skip_loss_z; // a z of nan is not a spike
        const bool norm_spike = skip_norm_z > 0 && v.norm_z > skip_norm_z;
        if (loss_spike || norm_spike) {
            spikes_in_a_row++;
            if (spikes_in_a_row < LEVEL_SHIFT_STEPS) {
                const std::string of_loss = strprintf("loss %g has z %+.2f > --skip_loss_z %g", step_loss, v.loss_z,
                                                      skip_loss_z);
                const std::string of_norm = strprintf("grad norm %g has z %+.2f > --skip_norm_z %g", step_norm,
                                                      v.norm_z, skip_norm_z);
                return skip(spikes, "spike: " + (loss_spike ? of_loss : of_norm));
            }
            if (loss_spike) { loss = GuardWindow(); }
            if (norm_spike) { norm = GuardWindow(); }
            level_shifts++;
        }
        loss.push(step_loss);
        norm.push(step_norm);
        bad_in_a_row = spikes_in_a_row = 0;
        return v;
    }

    bool diverged() const { return bad_in_a_row >= MAX_BAD_STEPS; }         // then stop with EXIT_DIVERGED

    // JSON keeps every bit of a double: it writes enough digits. No value here can be NaN.
    Json to_json() const {
        return {{"loss", loss.to_json()}, {"norm", norm.to_json()}, {"non_finite", non_finite}, {"spikes", spikes},
                {"level_shifts", level_shifts}, {"bad_in_a_row", bad_in_a_row}, {"spikes_in_a_row", spikes_in_a_row}};
    }
    // Everything but the limits, which belong to the flags.
    void from_json(const Json& j, const std::string& what) {
        loss = GuardWindow::from_json(json_at(j, "loss", what), what + ": loss");
        norm = GuardWindow::from_json(json_at(j, "norm", what), what + ": norm");
        non_finite = json_int(j, "non_finite", 0, INT32_MAX, what);
        spikes = json_int(j, "spikes", 0, INT32_MAX, what);
        level_shifts = json_int(j, "level_shifts", 0, INT32_MAX, what);
        bad_in_a_row = (int)json_int(j, "bad_in_a_row", 0, MAX_BAD_STEPS, what);
        spikes_in_a_row = (int)json_int(j, "spikes_in_a_row", 0, LEVEL_SHIFT_STEPS, what);
    }
};

// ----------------------------------------------------------------------------------------------------------
// the console: a line of at most 79 columns for each step, the same columns in every line

// One update, as it is logged and printed. A negative mfu or mem is left out; an mfu of NAN is "n/a", and not logged.
struct StepRecord {
    int64_t step = 0; // from 0
    double start = 0; // wall_seconds()
    double loss = 0, lr = 0;
    double norm = 0;                // of the gradient, before clipping
    double ms = 0, tok_per_s = 0;
    double loss_z = NAN, norm_z = NAN;
    double mfu = -1, mem = -1; // fraction of the device's peak; bytes
    std::string skipped;       // why the update was not applied; empty if it was
};

// x in `width` columns, with as many decimals as they have room for: 0.512, 29.55, 295.5, 12345
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
// The time that is left, in at most three columns up to 99 days: 42s, 75m, 27h, 12d
inline std::string time_left(double seconds) {
    if (seconds < 99.5) { return strprintf("%.0fs", seconds); }
    if (seconds < 99.5 * 60) { return strprintf("%.0fm", seconds / 60); }
    return seconds < 99.5 * 3600 ? strprintf("%.0fh", seconds / 3600) : strprintf("%.0fd", seconds / 86400);
}
// The beginning of a console line: `done` of the run's steps are done
inline std::string step_text(int64_t done, int64_t steps) {
    const std::string total = std::to_string(steps);
    return strprintf("step %*lld/%s | ", std::max(4, (int)total.size()), (long long)done, total.c_str());
}

// step  1000/18865 | loss 3.424958 +1.2z | norm 0.512 |  425k tok/s 41% MFU | 75m
// The loss stands in llm.c's columns, which scripts read. The step counts from 1: it is done when its line appears. The
// learning rate, the milliseconds and the norm's z-score are in log.jsonl.
inline std::string step_line(const StepRecord& r, int64_t steps, double seconds_left) {
    const std::string mfu = std::isfinite(r.mfu) ? strprintf("%3.0f%% MFU", 100 * r.mfu) : " n/a MFU";
    return step_text(r.step + 1, steps) + "loss " + fixed_width(r.loss, 8) + z_text(r.loss_z) +
           " | norm " + fixed_width(r.norm, 5) + " | " + rate_text(r.tok_per_s) + " tok/s" + (r.mfu < 0 ? "" : mfu) +
           " | " + time_left(seconds_left) + (r.skipped.empty() ? "" : "\n  SKIPPED: " + r.skipped);
}

// step   20/74 | val loss 5.270009
// Validation happens before an update, so the step is the number of updates so far. tokens: predicted tokens
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
// Two runs of the same flags have equal main.logs, bit for bit, and log.jsonls that differ in times and memory only.
// The checkpoint of step s holds the state before update s. A run resumed from it repeats all of step s, so resuming
// cuts every line of step s and later: in the end the files have each line once, as if the run had never stopped. A
// line is one write(); if a kill leaves only part of the last one, it is cut too.

// The step of a line of main.log or log.jsonl; -1: it has none, and stays; -2: it is damaged, and is cut.
inline int64_t main_log_step(const std::string& line) {
    long long step = -1;
    return sscanf(line.c_str(), "s:%lld ", &step) == 1 && step >= 0 ? (int64_t)step : -1;
}
inline int64_t json_log_step(const std::string& line) {
    const nlohmann::json j = parse_json_line(line);
    if (!j.is_object()) { return -2; }
    return j.contains("step") && j["step"].is_number_integer() ? j["step"].get<int64_t>() : -1;
}

// Keeps only whole lines of steps before `step`, and those without a step, in the file at `path`; true if it cut any.
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
    std::string path, pending; // pending: lines that did not fit on the disk, retried with the next one
    int fd = -1;
    off_t torn = -1;           // the end of the last whole line, if a part of one follows
    bool synced = true;        // no line since the last fsync

    void open(const std::string& file, bool keep) {
        path = file;
        fd = io_open(path, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | (keep ? 0 : O_TRUNC));
        check(fd >= 0, "%s: cannot open the log: %s", path.c_str(), strerror(errno));
    }
    // A run does not end because its log cannot be written: a failure is reported once, and the next line tries again.
    void append(const std::string& line) {
        if (fd < 0) { return; }
        const bool failing = !pending.empty();
        pending += line + "\n";
        synced = false;
        try { flush(); } catch (const Error& e) {
            if (!failing) { say("warning: %s; the run continues, and retries with each new line", e.what()); }
        }
    }
    // Removes the part of a line that a failed write has left, now or before the next line.
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
    now.tv_sec = std::clamp(now.tv_sec, (time_t)0, (time_t)253402300799);   // of 1970 to 9999: four digits of a year
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

// With an empty `out` (no --out, or not the rank that logs) these functions do nothing.
struct Log {
    LogFile main_log, json_log;
    std::string heading;                                // lines to write before the first record
    std::set<std::string> stepless;                     // the records of log.jsonl without a step: evaluations
    int64_t first_update = 1;   // step of the first update in log.jsonl; 0 in a log that an earlier version began

    // resume_step: the run continues with it; < 0: new logs, and an earlier run's become main.log.1 and so on
    explicit Log(const std::string& out = "", int64_t resume_step = -1) {
        if (out.empty()) { return; }
        io_mkdirs(out);
        const std::string main_path = out + "/main.log", json_path = out + "/log.jsonl";
        for (const std::string& path : {main_path, json_path}) {
            struct stat st;                             // the target of a symbolic link belongs to something else
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

    // tokens: predicted tokens; without any there is no loss, which is null in log.jsonl. dead_heads: the share of the
    // heads whose S never moves (lab/validate.h), NAN for encodings without such an S
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

    // Any other object with a "kind", and the time. Resuming uses its "step" to decide whether it stays. A record
    // without a step is not written twice: repeating a finished run evaluates again. NaN becomes null.
    void record(Json j) {
        if (!stepless.empty() && stepless.count(untimed(j)) > 0) { return; }
        j["time"] = utc_time();
        json_log.append(heading + json_text(j));
        heading.clear();
    }

    // without what differs from one run to the next
    static std::string untimed(nlohmann::json j) {
        for (const char* key : {"ms", "tok_per_s", "mfu", "mem", "time"}) { j.erase(key); }
        return json_text(j);
    }

    // Called before a checkpoint is published, so that after a power failure the log has all steps of the checkpoint,
    // and at the end, because an evaluation has failed if its record is not on the disk.
    void sync() {
        for (LogFile* f : {&main_log, &json_log}) {
            f->flush();
            if (!f->synced) { io_fsync(f->fd, f->path); }
            f->synced = true;
        }
    }
};
