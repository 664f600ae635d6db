// ranks/gradients.cuh -- the sum of a step's gradients over its micro-batches, on one rank or several.
#ifndef LLMC_RANKS_GRADIENTS_CUH
#define LLMC_RANKS_GRADIENTS_CUH

#include "parameters.cuh"

// ----------------------------------------------------------------------------------------------------------
// a step's gradient: for each micro-batch i of n, gradient_begin, backward into what it returns, gradient_add; then
// gradient_end. A leaf is p.leaf micro-batches, which backward adds up in one buffer; a tree sums the leaves.

// on the device, of what this rank updates; its norm and the mean loss of so many targets
struct StepGradient {
    float* grads;
    double norm, loss;
    size_t targets;
};

// The buffer that micro-batch i of this rank's n adds its gradient to; zeroed for the first one of a leaf
inline float* gradient_begin(Parameters& p, int i, int n) {
    if (i % p.leaf == 0) { device_zero(p.tree.back(), sizeof(float) * p.table.total, p.stream); }
    p.closing = i + 1 == n;
    if (p.closing) {
        // The last leaf meets the subtrees that wait for it: a sibling at each level until it is a left one itself, and
        // from there on, if the leaves are not a power of two, the subtrees further left.
        const int leaves = n / p.leaf, last = leaves - 1;
        p.siblings.clear();
        int k = 0;
        for (; last >> k & 1; k++) { p.siblings.push_back((size_t)k); }
        for (int j = k + 1; leaves >> j != 0; j++) {
            if (leaves >> j & 1) { p.siblings.push_back((size_t)j); }
        }
        std::fill(p.summed.begin(), p.summed.end(), 0);
    }
    return p.tree.back();
}

constexpr const char* SUM_OF_GRADIENTS = "sum of the gradients";

// The last micro-batch has left its gradient of block b: it is added to that of the other leaves, and sets out for the
// sum over the ranks.
inline void sum_block(Parameters& p, size_t b) {
    const Slice block = p.table.blocks[b], own = p.owned[b];
    float* sum = p.tree.back();
    for (size_t k : p.siblings) {
        add_to(p.tree[k] + block.begin, sum + block.begin, block.size(), p.stream);
        sum = p.tree[k];
    }
    p.summed[b] = 1;
    if (comm().size > 1) {
        p.own_work.record(p.stream);
        p.own_work.hold(p.exchange_stream);
        exchange_sum(sum + block.begin, block.size(), SUM_OF_GRADIENTS, p.exchange_stream);
        if (!p.shares) { exchange_gather(sum + block.begin, block.size(), SUM_OF_GRADIENTS, p.exchange_stream); }
    }
    double* const partial = p.norm_partial + own.begin / NORM_CHUNK;
    gradient_norm_begin(partial, sum + own.begin, own.size(), p.exchange_stream);
}
// Called by a backward that will add nothing more to the gradients of layer l
inline void layer_done(Parameters& p, int l) {
    if (p.closing) { sum_block(p, (size_t)l + 2); }
}

// Micro-batch i of this rank's n is done. Leaves meet in a binary tree over their index: tree[k] holds the sum of 2^k
// neighbours until its sibling is done. After the last one, the sum of all, the other ranks' too, is in tree.back().
inline void gradient_add(Parameters& p, int i, int n) {
    if ((i + 1) % p.leaf != 0) { return; }
    float*& work = p.tree.back();
    if (i + 1 == n) {
        for (size_t b = 0; b < p.summed.size(); b++) { if (!p.summed[b]) { sum_block(p, b); } }
        if (!p.siblings.empty()) { std::swap(p.tree[p.siblings.back()], work); }
        p.closing = false;
        return;
    }
    int k = 0;
    for (const int leaf = i / p.leaf; leaf >> k & 1; k++) {
        add_to(p.tree[(size_t)k], work, p.table.total, p.stream);
        std::swap(p.tree[(size_t)k], work);
    }
    std::swap(p.tree[(size_t)k], work);
}

// Number of targets in a step, over all micro-batches of all ranks: what the sum of losses is divided by. n: of this
// rank
inline size_t count_targets(const int* targets, size_t n) {
    size_t counted = 0;
    for (size_t i = 0; i < n; i++) { counted += targets[i] != IGNORE_INDEX; }
    std::vector<size_t> all((size_t)comm().size);
    comm_all_gather(all.data(), &counted, 1, "number of targets");
    return std::accumulate(all.begin(), all.end(), (size_t)0);
}

// The step's gradient, and its mean loss from the sums that loss_sum left for each micro-batch (NAN when nothing
// was asked for): the one time in a step that the host waits for the device.
inline StepGradient gradient_end(Parameters& p, int micro_batches, size_t counted) {
    StepGradient g = {p.tree.back(), 0.0, NAN, counted};
    const size_t n = (size_t)micro_batches, ranks = (size_t)comm().size;
    const size_t chunks = p.table.total / NORM_CHUNK;
    // 1 wait
    if (ranks > 1) {
        settle_weights(p);
        p.summed_all.record(p.exchange_stream);
        exchange_wait(p.own_work, p.summed_all, SUM_OF_GRADIENTS);
        p.summed_all.hold(p.stream);
    }
    std::vector<double> sums(chunks + n);
    copy_to_host(sums.data(), p.norm_partial, sizeof(double) * sums.size(), p.stream);
    // 2 what the ranks have: their micro-batches' losses, and the norm's chunks of their slices
    const size_t each = n + p.norm_chunks;
    std::vector<double> mine(sums.begin() + (ptrdiff_t)chunks, sums.end()), all(each * ranks);
    const auto order = p.norm_order.begin() + (ptrdiff_t)((size_t)comm().rank * p.norm_chunks);
    for (size_t c = 0; c < p.norm_chunks; c++) { mine.push_back(order[c] < chunks ? sums[order[c]] : 0.0); }
    comm_all_gather(all.data(), mine.data(), each, "losses");
    double loss = 0.0;
    for (size_t r = 0; r < ranks; r++) {
        const double* of_rank = &all[r * each];
        for (size_t i = 0; i < n; i++) { loss += of_rank[i]; }
        for (size_t c = 0; c < p.norm_chunks; c++) {
            const size_t chunk = p.norm_order[r * p.norm_chunks + c];
            if (chunk < chunks) { sums[chunk] = of_rank[n + c]; }
        }
    }
    g.norm = gradient_norm_end(sums.data(), chunks);
    if (counted > 0) { g.loss = loss / (double)counted; }
    return g;
}

// The name of the first tensor whose gradient is not finite, for the message of a skipped update.
inline std::string first_bad_tensor(Parameters& p, const float* grads) {
    size_t bad = p.table.specs.size();
    for (const Slice& own : p.owned) {
        for (const TensorPiece& piece : p.table.pieces(own)) {
            if (piece.tensor >= bad) { continue; }
            const double norm = gradient_norm(p.norm_partial, grads + piece.at, piece.size, p.stream);
            if (!std::isfinite(norm)) { bad = piece.tensor; }
        }
    }
    bad = (size_t)-comm_max(-(int)bad, "the tensor that is not finite");
    return bad < p.table.specs.size() ? p.table.specs[bad].name : "";
}

#endif
