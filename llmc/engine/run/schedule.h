// run/schedule.h -- the learning rate as a pure function of the step, so that a resumed run needs no state to continue.
//
//   warm-up:  lr * (step + 1) / warmup         while step < warmup
//   after it: min + f(x) * (lr - min)          min = final_lr * lr, x in [0, 1] the part of the decay already done
//     constant  f = 1                          cosine  f = (1 + cos(pi x)) / 2
//     linear    f = 1 - x                      wsd     f = 1 - sqrt(x) over the last 20 % of the steps, 1 before
// As in llm.c, except that a constant schedule with --warmup warms up, too (no flag is silently ignored), and that wsd
// with a warm-up beyond 80 % of the steps decays from the peak at its end, where llm.c drops to 1 - sqrt(x) at once.
#pragma once

#include "../../base/libm.h"

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
