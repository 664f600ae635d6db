// checkpoint.h -- whole checkpoints of one process.
#pragma once

#include "llmc/engine/checkpoint.h"

// As the trainers save; returns the checkpoint's path.
inline std::string save_checkpoint(const std::string& out, int step, const Checkpoint& c, int keep) {
    const std::string failure = save_on_ranks(out, step, c, keep, [] {});
    check(failure.empty(), "%s", failure.c_str());
    return out + "/" + step_name(step);
}
// Restores params, m and v, and state.
inline void load_checkpoint(const std::string& dir, Checkpoint& c) {
    CheckpointReader reader(dir, c);
    reader.read_parameters(c.params, {0, c.table->total});
    reader.read_moments();
    c.state = std::move(reader.state);
}
