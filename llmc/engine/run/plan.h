// run/plan.h -- how a run divides its steps into batches, micro-batches and leaves, and the memory that they take.
#pragma once

#include "run.h"

// A model in training has one base and one factor. Writes the effective value into --rope_scaling, for --resume to
// compare.
inline void plan_rope_scaling(Run& r, PositionConfig& position) {
    if (r.trains) { position.other_theta = 0; }
    if (position.scaling != RopeScaling::None && r.trains && position.scaling_factor == 0) {
        position.scaling_factor = std::max(1.0, (double)r.o.T / position.original_length());
    }
    r.o.rope_scaling = rope_scaling_text(position);
}

// Whether this is a plan for ranks that are not started, perhaps on another machine: --check --ranks N
inline bool plans_ahead(const Run& r) {
    return r.o.check && r.trains && comm().size == 1 && r.o.is_given("ranks");
}
inline int planned_ranks(const Run& r) { return plans_ahead(r) ? r.o.ranks : comm().size; }

// The leaves of the tree that sums a step's gradient (ranks/gradients.cuh): 8, or 4, 2 or 1 if 8 does not divide the
// micro-batches. So the bits do not depend on the number of ranks, if each can have 2^k leaves; otherwise it has one. A
// resumed run keeps its leaves.
inline void plan_leaves(Run& r) {
    const int ranks = planned_ranks(r), all = r.micro_batches * ranks;
    r.leaf = 1;
    r.state.leaves = 0;
    if (!r.trains) { return; }
    int leaves = std::gcd(all, 8);
    if (!r.resumed.empty()) {
        const std::string path = r.resumed + "/state.json";
        const Json saved = json_at(read_json(path), "options", path);
        const int was = saved.contains("leaves") ? (int)json_int(saved, "leaves", 0, INT32_MAX, path) : 0;
        if (was == 0) { return; }                               // each micro-batch is one
        if (all % was == 0) { leaves = was; }                   // else the number of micro-batches has changed
    }
    const int mine = leaves / ranks;
    const bool fits = ranks == 1 || (leaves % ranks == 0 && (mine & (mine - 1)) == 0);
    check(fits || r.resumed.empty() || may_change(r.o, "leaves"), "--resume: the run sums a step's gradient in %d "
          "parts, which %d ranks cannot share; start it on 1 rank, or with --allow_change leaves, for other bits",
          leaves, ranks);
    r.state.leaves = fits ? leaves : ranks;
    r.leaf = all / r.state.leaves;
}

// Micro-batches of B sequences, which divide r.my_samples
inline void plan_batch(Run& r, int B) {
    r.o.B = B;
    r.micro_batches = r.trains ? r.my_samples / B * r.texts : 0;
    plan_leaves(r);
}

// The bytes that parameters_allocate() will take on this rank; of what ranks share, the largest share
inline double weight_bytes(const Run& r, const Parameters& p) {
    const int ranks = r.trains ? planned_ranks(r) : 1;
    const double all = (double)p.table.total, share = (double)largest_share(p.table, ranks);
    const bool rounded = sizeof(floatX) != sizeof(float);       // the float32 weights are a separate array
    const double encoding = ranks > 1 ? (double)p.table.blocks[0].size() : 0.0;
    const double weights = rounded ? sizeof(floatX) * all + 4.0 * (share + encoding) : 4.0 * all;
    if (!r.trains) { return weights; }
    const double buffers = gradient_buffers(r.micro_batches / r.leaf);
    return weights + 8.0 * share + 4.0 * buffers * all;
}

// Plans the largest batch that divides the samples of a step and fits into `available` bytes with everything else.
// Returns it, or 0 if none fits. activations(B): bytes for B sequences. Smaller batches need more buffers of gradients.
template <class Bytes>
int plan_largest_batch(Run& r, const Parameters& p, double available, double buffers, Bytes activations) {
    for (int B = r.my_samples; B >= 1; B--) {
        if (r.my_samples % B != 0) { continue; }
        try {
            plan_batch(r, B);
            if (weight_bytes(r, p) + buffers + (double)activations(B) <= available) { return B; }
        } catch (const Error&) {}                               // the leaves do not fit, or an overflow
    }
    return 0;
}

// The bytes that this rank's weights and activations may take
inline double memory_available() {
    return (double)device_memory_available() / comm_sharing() - (double)MATMUL_WORKSPACE;
}

// Chooses --B -1 and --recompute -1, the same on all ranks. activations(B): bytes with r.o.recompute. If no batch fits,
// B is 1, and report_run() refuses the run. Recomputing less takes memory but changes no bit, so it is chosen last.
template <class Bytes> void fit_memory(Run& r, const Parameters& p, double buffers, Bytes activations) {
    const bool least = r.o.recompute < 0;
    if (least) { r.o.recompute = 1; }
    if (r.largest_batch) {
        const int mine = plan_largest_batch(r, p, memory_available(), buffers, activations);
        plan_batch(r, std::max(1, -comm_max(-mine, "the choice of --B")));
        r.o.notes.push_back(strprintf("--B -1 is %d here", r.o.B));
    }
    if (!least || !r.trains || plans_ahead(r)) { return; }
    r.o.recompute = 0;
    const double all = weight_bytes(r, p) + buffers + (double)activations(r.o.B);
    r.o.recompute = comm_max(all > 0.9 * memory_available(), "the choice of --recompute");
}

// The batches of an update and the number of updates. config: the model's; epoch: the samples of one pass over the data
// (0: no data). A sample is `texts` texts of T tokens; --total_batch counts the tokens of one of them.
template <class Config> void plan_steps(Run& r, Config& config, uint64_t epoch, int texts = 1) {
    Options& o = r.o;
    o.T = config.T;
    config.position.tile_skip = parse_tile_skip(o.tile_skip);
    const int reach = position_max_length(config.position);
    check(o.T <= reach, "--T %d: %s has no positions beyond %d", o.T, config.position.name.c_str(), reach);
    if (r.trains && r.resumed.empty() && !config.position.has("learned")) { config.position.T_train = o.T; }
    plan_rope_scaling(r, config.position);
    o.window = config.position.windows;                             // the effective value, for --resume to compare
    o.sinks = config.position.mask.sinks;
    r.largest_batch = o.B < 0;
    check(o.B > 0 || (r.trains && o.total_batch > 0), "--B -1: takes the most sequences that divide "
          "--total_batch, in training: give both, or a number");
    o.B = std::max(o.B, 1);
    check(!r.largest_batch || !plans_ahead(r), "--check --ranks %d: --B -1 depends on the memory of the machine that "
          "the ranks run on; expected a number", o.ranks);
    check(!o.heads || evaluates_lengths(o), "--heads: expected --eval_lengths, without --encode");
    check(!o.heads || comm().size == 1, "--heads: expected one process, got %d", comm().size);
    check(!o.heads || !ON_GPU, "--heads: this program was built for GPUs; expected train_gpt2 or train_bert, "
          "which read the same checkpoints");
    const int ranks = planned_ranks(r);
    if (o.total_batch < 0) { o.total_batch = (int64_t)o.B * o.T * ranks; }
    const std::string of_ranks = ranks > 1 ? strprintf(" x %d ranks", ranks) : "";
    check(o.total_batch % ((int64_t)o.B * o.T * ranks) == 0 && o.total_batch / o.T <= INT32_MAX / texts,
          "--total_batch %lld: not a multiple of --B x --T = %d x %d%s = %lld tokens", (long long)o.total_batch, o.B,
          o.T, of_ranks.c_str(), (long long)o.B * o.T * ranks);
    r.samples = (int)(o.total_batch / o.T);
    r.my_samples = r.samples / ranks;
    r.texts = texts;
    plan_batch(r, o.B);
    if (epoch > 0 && o.steps < 0) { o.steps = std::max((int64_t)1, (int64_t)epoch / r.samples); }
    check(o.steps <= INT32_MAX, "--steps: expected at most %d, for which a checkpoint's name has room, got %lld",
          INT32_MAX, (long long)o.steps);
}
