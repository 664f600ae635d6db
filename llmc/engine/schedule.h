// engine/schedule.h -- how far each step goes: by its learning rate, or nowhere if the guard skips the update.
#pragma once

#include "../base/math.h"
#include "json.h"

// ----------------------------------------------------------------------------------------------------------
// the learning rate, a pure function of the step, so that a resumed run needs no state
//
//   warm-up:  lr * (step + 1) / warmup         while step < warmup
//   after it: min + f(x) * (lr - min)          min = final_lr * lr, x in [0, 1] the fraction of the decay completed
//     constant  f = 1                          cosine  f = (1 + cos(pi x)) / 2
//     linear    f = 1 - x                      wsd     f = 1 - sqrt(x) over the last 20 % of the steps, 1 before
// As in llm.c, with two exceptions: a constant schedule obeys --warmup, too; and after a warm-up of over 80 % of the
// steps, wsd decays from the peak, where llm.c drops to 1 - sqrt(x) at once.

// `steps` is the length of the run, `final_lr` a fraction of the peak `lr`; steps count from 0.
inline double learning_rate(const std::string& schedule, double lr, int64_t warmup, int64_t steps, double final_lr,
                            int64_t step) {
    check(schedule == "cosine" || schedule == "linear" || schedule == "constant" || schedule == "wsd",
          "--schedule: expected one of cosine|linear|constant|wsd, got '%s'", schedule.c_str());
    if (step < warmup) { return lr * (double)(step + 1) / (double)warmup; }
    const int64_t start = schedule == "wsd" ? std::max(warmup, (int64_t)(0.8 * (double)steps)) : warmup;
    // A run that ends within its warm-up has no decay; after the run's end the last value stays.
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
// no bound. Only accepted values enter the window, so neither a NaN nor a spike can widen it. A skipped update does not
// change the parameters, so repeated spikes on fresh data mean that the level has moved: after LEVEL_SHIFT_STEPS in a
// row the window starts again, empty. The two numbers must be the same on every rank, so that all decide the same.

const int GUARD_WINDOW = 128;
const int LEVEL_SHIFT_STEPS = 8; // spikes in a row that are a new level
const int MAX_BAD_STEPS = 20;    // skipped updates in a row that end the run

// The last 128 accepted values of one quantity.
struct GuardWindow {
    std::vector<double> values;
    int next = 0; // of a full window: the oldest value, overwritten next

    // Summed from the beginning each time, in a fixed order: 128 additions cost nothing, and a running sum would drift.
    double z(double x) const {
        if ((int)values.size() < GUARD_WINDOW) { return NAN; }
        double mean = 0, variance = 0;
        for (double v : values) { mean += v / GUARD_WINDOW; }
        for (double v : values) { variance += (v - mean) * (v - mean) / GUARD_WINDOW; }
        // At least float32's rounding: otherwise, after equal values, a change in the last digit would be a spike.
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

    // Called once a step, after backward and before the update
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

    // JSON's numbers have enough digits for every bit of a double. No value here can be NaN.
    Json to_json() const {
        return {{"loss", loss.to_json()}, {"norm", norm.to_json()}, {"non_finite", non_finite}, {"spikes", spikes},
                {"level_shifts", level_shifts}, {"bad_in_a_row", bad_in_a_row}, {"spikes_in_a_row", spikes_in_a_row}};
    }
    // Everything except the limits, which are flags
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
