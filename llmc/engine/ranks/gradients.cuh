// ranks/gradients.cuh -- the sum of a step's gradients over its micro-batches, n on each of N ranks, in an order that
// does not depend on N.
//
// The micro-batches of a rank are neighbours. Backward adds p.leaf of them up in one buffer, a leaf; a binary tree sums
// the rank's leaves and continues over the ranks, once a step.
#pragma once

#include "parameters.cuh"

// ----------------------------------------------------------------------------------------------------------
// a step's gradient: for each micro-batch i of n, forward, gradient_begin, backward into the memory that it returns,
// gradient_add; then gradient_end

// the gradient of this rank's slices, on the device (gradient_at); its norm, and the mean loss over `targets`
struct StepGradient {
    float* grads;
    double norm, loss;
    size_t targets;
};

// The levels of the subtrees that a finished leaf is added to: its sibling at each level, until the sum is a left child
// itself. After the last leaf, if the leaves are not a power of two, also the remaining subtrees to the left.
inline std::vector<size_t> siblings_of(int leaf, int leaves) {
    std::vector<size_t> found;
    int k = 0;
    for (; leaf >> k & 1; k++) { found.push_back((size_t)k); }
    for (int j = k + 1; leaf + 1 == leaves && leaves >> j != 0; j++) {
        if (leaves >> j & 1) { found.push_back((size_t)j); }
    }
    return found;
}

// The memory to which micro-batch i of this rank's n adds its gradient; it is 0 for the first one of a leaf.
inline float* gradient_begin(Parameters& p, int i, int n) {
    const int leaves = n / p.leaf;
    p.exchange.closing = i + 1 == n;
    if (p.exchange.closing) { p.exchange.siblings = siblings_of(leaves - 1, leaves); }
    if (i % p.leaf == 0) { device_zero(p.tree.back(), sizeof(float) * p.table.total, p.stream); }
    return p.tree.back();
}

constexpr const char* SUM_OF_GRADIENTS = "sum of the gradients";

// The last gradient of block b is complete: adds it to the other leaves' sum, and starts the sum over the ranks.
inline void sum_block(Parameters& p, size_t b) {
    Parameters::Exchange& x = p.exchange;
    const Slice block = p.table.blocks[b], own = x.owned[b];
    float* sum = p.tree.back();
    for (size_t k : x.siblings) {
        add_to(p.tree[k] + block.begin, sum + block.begin, block.size(), p.stream);
        sum = p.tree[k];
    }
    if (comm().size > 1) {
        x.own_work.record(p.stream);
        x.own_work.hold(x.stream);
        exchange_sum(sum + block.begin, block.size(), SUM_OF_GRADIENTS, x.stream);
    }
    gradient_norm_begin(x.norm_partial + own.begin / NORM_CHUNK, sum + own.begin, own.size(), x.stream);
}

// A backward calls this for each layer l, from the last to the first, once its gradients are complete.
inline void layer_done(Parameters& p, int l) { if (p.exchange.closing) { sum_block(p, (size_t)l + 2); } }

// Micro-batch i of this rank's n is done. Leaves are summed in a binary tree over their index: tree[k] holds the sum of
// 2^k neighbours until its sibling is done. After the last one tree.back() has the sum over all ranks.
inline void gradient_add(Parameters& p, int i, int n) {
    if ((i + 1) % p.leaf != 0) { return; }
    float*& leaf = p.tree.back();
    if (p.exchange.closing) {
        for (size_t outside_layers : {0, 1}) { sum_block(p, outside_layers); }
        if (!p.exchange.siblings.empty()) { std::swap(p.tree[p.exchange.siblings.back()], leaf); }
        return;
    }
    const std::vector<size_t> siblings = siblings_of(i / p.leaf, n / p.leaf);
    for (size_t k : siblings) {
        add_to(p.tree[k], leaf, p.table.total, p.stream);
        std::swap(p.tree[k], leaf);
    }
    std::swap(p.tree[siblings.size()], leaf);
}

// The number of targets in a step, over all micro-batches and ranks: the divisor of the sum of losses. n: this rank's
inline size_t count_targets(const int* targets, size_t n) {
    size_t counted = 0;
    for (size_t i = 0; i < n; i++) { counted += targets[i] != IGNORE_INDEX; }
    std::vector<size_t> all((size_t)comm().size);
    comm_all_gather(all.data(), &counted, 1, "number of targets");
    return std::accumulate(all.begin(), all.end(), (size_t)0);
}

// The step's gradient, and its mean loss from the sums that loss_sum has left for each micro-batch (NAN without
// targets). Only here the host waits for the device during a step.
inline StepGradient gradient_end(Parameters& p, int micro_batches, size_t counted) {
    Parameters::Exchange& x = p.exchange;
    StepGradient g = {p.tree.back(), 0.0, NAN, counted};
    const size_t n = (size_t)micro_batches, ranks = (size_t)comm().size;
    const size_t chunks = p.table.total / NORM_CHUNK;
    // 1 wait
    if (ranks > 1) {
        settle_weights(p);
        x.summed.record(x.stream);
        exchange_wait(x.own_work, x.summed, SUM_OF_GRADIENTS);
        x.summed.hold(p.stream);
    }
    std::vector<double> sums(chunks + n);
    copy_to_host(sums.data(), x.norm_partial, sizeof(double) * sums.size(), p.stream);
    // 2 gather from all ranks: the losses of their micro-batches, and their slices' chunks of the norm
    const size_t each = n + largest_share(p.table, (int)ranks) / NORM_CHUNK;
    std::vector<double> mine(sums.begin() + (ptrdiff_t)chunks, sums.end()), all(each * ranks);
    mine.resize(each);
    for_each_norm_chunk(p.table, comm().rank, [&](size_t k, size_t c) { mine[n + k] = sums[c]; });
    comm_all_gather(all.data(), mine.data(), each, "losses");
    double loss = 0.0;
    for (size_t i = 0; i < n * ranks; i++) {                    // in their order in the step
        loss += all[i / n * each + i % n];
    }
    for (size_t r = 0; r < ranks; r++) {
        for_each_norm_chunk(p.table, (int)r, [&](size_t k, size_t c) { sums[c] = all[r * each + n + k]; });
    }
    g.norm = gradient_norm_end(sums.data(), chunks);
    if (counted > 0) { g.loss = loss / (double)counted; }
    return g;
}

// The tensor whose gradient is the first that is not finite in the order of the backward, for the message of a skipped
// update; "" if there is none. What the backward computes after it inherits the fault: wte, its last tensor, always
// does. It walks the table of tensors, which has the order of the forward, from the end. In attention q, k and v come
// before the encoding, which inherits what is wrong with all of the layer's scores.
inline std::string first_bad_tensor(Parameters& p, const float* grads) {
    const TensorTable& table = p.table;
    const int qkvw = table.find("qkvw");
    std::vector<std::tuple<int, int, bool, size_t>> forward;        // the layer; in it the tensor; its file
    for (size_t f = 0; f < p.files.size(); f++) {
        const std::string& name = p.files[f].name;
        const int tensor = (int)table.index(p.files[f].tensor), layers = table.specs[(size_t)tensor].layers;
        const bool encoding = f >= p.first_position_file;
        int layer = !encoding && tensor > qkvw ? INT_MAX : -1;      // after or before all layers
        if (layers > 0) { layer = atoi(name.c_str() + name.find_first_of("0123456789")); }      // "transformer.h.3."
        forward.emplace_back(layer, encoding ? std::min(layers, 1) * qkvw : tensor, !encoding, f);
    }
    std::sort(forward.begin(), forward.end());
    int bad = -1;
    for (int n = (int)forward.size(); n-- > 0 && bad < 0;) {
        const FileTensor& f = p.files[std::get<3>(forward[(size_t)n])];
        const size_t i = (size_t)table.index(f.tensor), row = table.specs[i].row_size();
        const size_t at = table.offset(i, f.layer) + f.row0 * row;
        for (const Slice& own : p.exchange.owned) {
            const size_t begin = std::max(at, own.begin), end = std::min(at + f.rows * row, own.end);
            if (begin >= end) { continue; }
            const double norm = gradient_norm(p.exchange.norm_partial, grads + begin, end - begin, p.stream);
            if (!std::isfinite(norm)) { bad = n; }
        }
    }
    bad = comm_max(bad, "the tensor that is not finite");
    if (bad < 0) { return ""; }
    const auto& [layer, tensor, attends, file] = forward[(size_t)bad];
    const FileTensor& f = p.files[file];
    const bool once = layer < 0 || layer == INT_MAX;
    return f.tensor + (once ? "" : strprintf(" of layer %d", layer)) + " (" + f.name + ")";
}
