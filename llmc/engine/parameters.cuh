// engine/parameters.cuh -- a model's parameters: how ranks share them, sum their gradients, update them.
#pragma once

#include "../base/matrix.cuh"
#include "../base/tensor.h"
#include "../adamw.cuh"
#include "comm.h"

// ----------------------------------------------------------------------------------------------------------
// the exchange: gradients are summed over the ranks in the order in which one rank would sum them
//
// Each rank owns a slice of an array that all of them hold. It receives the other ranks' values of its slice, adds
// them, and sends the sum to all ranks. Each way, a rank sends (N - 1) / N of the array, as in a ring; here for N = 3:
//
//     slice   0     1     2                     0     1     2
//     rank 0  sum <-.-----.                     sum --.-----.
//     rank 1  --'   sum <-|        and then     <-'   sum --|
//     rank 2  --'   --'   sum                   <-'   <-'   sum
//
// A library could choose the order of the terms by the number of ranks. Here it is a binary tree over the ranks, which
// continues each rank's tree over its own micro-batches. So if every rank has 2^k neighbouring micro-batches of the
// step, the tree is the same for any number of ranks, and its sum has the same bits.
//
// With several machines of g = 2^k ranks each, the ranks of a machine do this first. Then the ranks that own the same
// slice on all machines do it with their slices, which are g times smaller: the same tree, cut at level k.

// Part i of a slice in n parts, whose sizes differ by at most SLICE_UNIT
inline Slice slice_part(Slice s, int i, int n) {
    const size_t units = ceil_div(s.size(), SLICE_UNIT);
    const auto cut = [&](size_t k) { return s.begin + std::min(units * k / (size_t)n * SLICE_UNIT, s.size()); };
    return {cut((size_t)i), cut((size_t)i + 1)};
}

// Ranks that exchange with each other: first, first + step, ..., first + (size - 1) * step
struct RankGroup {
    int first, step, size;
    int rank(int i) const { return first + i * step; }
    int index(int rank) const { return (rank - first) / step; }
};
// The groups of a rank, in the order in which they sum
inline std::vector<RankGroup> exchange_groups(int rank) {
    const int size = comm().size, node = comm().node;
    if (node <= 1 || node >= size) { return {{0, 1, size}}; }
    return {{rank - rank % node, 1, node}, {rank % node, node, size / node}};
}
// A rank's slice of n elements
inline Slice exchange_slice(size_t n, int rank) {
    Slice s = {0, n};
    for (const RankGroup& g : exchange_groups(rank)) { s = slice_part(s, g.index(rank), g.size); }
    return s;
}

// The parts of slice `whole` that the ranks of a group own
inline std::vector<Slice> group_parts(Slice whole, const RankGroup& g) {
    std::vector<Slice> parts;
    for (int i = 0; i < g.size; i++) { parts.push_back(slice_part(whole, i, g.size)); }
    return parts;
}
// The k-th `piece` elements of a slice
inline Slice slice_piece(Slice s, size_t piece, size_t k) {
    return {std::min(s.begin + k * piece, s.end), std::min(s.begin + (k + 1) * piece, s.end)};
}
// The exchange of a group in turns, each of which receives at most comm().chunk bytes: the elements, of `element`
// bytes, that a rank sends to another in a turn, and the number of turns
struct Turns { size_t piece, count; };
inline Turns exchange_turns(const std::vector<Slice>& parts, size_t element) {
    const size_t piece = std::max((size_t)1, comm().chunk / element / (parts.size() - 1));
    size_t longest = 0;
    for (const Slice& part : parts) { longest = std::max(longest, part.size()); }
    return {piece, ceil_div(longest, piece)};
}

// Slice `whole` of data -> this rank's part of it, summed over the group
inline void group_sum(float* data, Slice whole, const RankGroup& g, const char* what, Stream stream) {
    Comm& c = comm();
    const size_t me = (size_t)g.index(c.rank);
    const std::vector<Slice> slices = group_parts(whole, g);
    const Turns turns = exchange_turns(slices, sizeof(float));
    if (c.inbox == nullptr) { c.inbox = (char*)device_malloc(c.chunk + sizeof(float) * (size_t)c.size); }
    for (size_t k = 0; k < turns.count; k++) {
        const Slice mine = slice_piece(slices[me], turns.piece, k);
        const size_t n = mine.size();
        float* const inbox = (float*)c.inbox;
        // 1 receive the group's values of this slice
        std::vector<Message> sends, receives;
        for (size_t i = 0; i < slices.size(); i++) {
            if (i == me) { continue; }
            const Slice theirs = slice_piece(slices[i], turns.piece, k);
            sends.push_back({g.rank((int)i), data + theirs.begin, sizeof(float) * theirs.size()});
            receives.push_back({g.rank((int)i), inbox + n * receives.size(), sizeof(float) * n});
        }
        comm_exchange(sends, receives, what, stream);
        // 2 the tree
        sum_parts(data + mine.begin, inbox, (int)me, (int)slices.size(), n, stream);
    }
}

// Each rank's slice of data goes to the whole group. element: bytes of an element
inline void group_gather(char* data, size_t element, const std::vector<Slice>& slices, const RankGroup& g,
                         const char* what, Stream stream) {
    const size_t me = (size_t)g.index(comm().rank);
    const Turns turns = exchange_turns(slices, element);
    for (size_t k = 0; k < turns.count; k++) {
        const Slice mine = slice_piece(slices[me], turns.piece, k);
        std::vector<Message> sends, receives;
        for (size_t i = 0; i < slices.size(); i++) {
            if (i == me) { continue; }
            const Slice theirs = slice_piece(slices[i], turns.piece, k);
            sends.push_back({g.rank((int)i), data + element * mine.begin, element * mine.size()});
            receives.push_back({g.rank((int)i), data + element * theirs.begin, element * theirs.size()});
        }
        comm_exchange(sends, receives, what, stream);
    }
}

// data (n) -> this rank's slice is the sum over the ranks; the other elements are undefined. With NCCL, this function
// and exchange_gather() return before the stream has executed them: see exchange_wait().
inline void exchange_sum(float* data, size_t n, const char* what, Stream stream) {
    Slice s = {0, n};
    for (const RankGroup& g : exchange_groups(comm().rank)) {
        if (g.size > 1) { group_sum(data, s, g, what, stream); }
        s = slice_part(s, g.index(comm().rank), g.size);
    }
}

// data (n): every rank has set its slice, and receives the others.
template <class T> void exchange_gather(T* data, size_t n, const char* what, Stream stream) {
    Slice s = {0, n};
    std::vector<std::pair<RankGroup, Slice>> levels;
    for (const RankGroup& g : exchange_groups(comm().rank)) {
        levels.push_back({g, s});
        s = slice_part(s, g.index(comm().rank), g.size);
    }
    for (size_t l = levels.size(); l-- > 0;) {                  // the last group's parts are the smallest
        const RankGroup& g = levels[l].first;
        if (g.size > 1) { group_gather((char*)data, sizeof(T), group_parts(levels[l].second, g), g, what, stream); }
    }
}

// The host waits until the device has reached `end`, after an exchange. The deadline counts from `own`, when this
// rank's work before the exchange is done.
inline void exchange_wait(const Event& own, const Event& end, const char* what) {
    if (!comm().nccl) { return; }
    nccl_wait(own, false, what);
    nccl_wait(end, true, what);
}
// Calls exchange(), which puts an exchange into the stream, and waits until it is done.
template <class Exchange> void exchange_now(const char* what, Stream stream, Exchange exchange) {
    Event own, end;
    own.record(stream);
    exchange();
    end.record(stream);
    exchange_wait(own, end, what);
    own.release();
    end.release();
}

// ----------------------------------------------------------------------------------------------------------
// work in pieces: the ranks share it, and all take the results in the order of the pieces

// A collective. work(i, out) computes the result of piece i, of at most `most` elements, on one of the ranks;
// take(i, result) is called on every rank, for every piece, in order. In round k, rank r computes piece k * ranks + r:
// neighbours, which take about the same time. If a signal stops a rank, returns false on all, with pieces missing.
template <class T, class Work, class Take>
bool distribute_pieces(size_t pieces, size_t most, const char* what, Work work, Take take) {
    const size_t ranks = (size_t)comm().size, rank = (size_t)comm().rank;
    std::vector<T> mine(most), all(most * ranks);
    for (size_t round = 0; round < pieces; round += ranks) {
        if (comm_stops()) { return false; }
        if (round + rank < pieces) { work(round + rank, mine.data()); }
        comm_all_gather(all.data(), mine.data(), most, what);
        for (size_t r = 0; r < ranks && round + r < pieces; r++) { take(round + r, all.data() + r * most); }
    }
    return true;
}

// rows (ranks * n) on the device: this rank has computed n of them, from rank * n on, and receives the others.
inline void share_rows(float* rows, size_t n, const char* what, Stream stream) {
    const size_t ranks = (size_t)comm().size;
    if (ranks == 1) { return; }
    std::vector<Slice> of_rank;
    for (size_t r = 0; r < ranks; r++) { of_rank.push_back({r * n, (r + 1) * n}); }
    const RankGroup all = {0, 1, (int)ranks};
    exchange_now(what, stream, [&] { group_gather((char*)rows, sizeof(float), of_rank, all, what, stream); });
}

// ----------------------------------------------------------------------------------------------------------
// a model's parameters
//
// The layout has a block for each layer and two for tensors outside them (base/tensor.h). Several ranks exchange block
// by block: each sums the gradient of its slice of every block, updates it, and sends the new weights to the other
// ranks. It holds the moments, and in bf16 builds the float32 weights, of its slices only: ZeRO-1 (Rajbhandari et al.
// 2020). docs/distributed.md shows a step: what runs on which stream, and what waits for what.

struct Parameters {
    TensorTable table;                                      // the trainer's own tensors, then the encoding's
    std::vector<FileTensor> files;                          // the same tensors in a checkpoint
    size_t first_position_param = 0, first_position_file = 0;           // where the encoding's begin in each
    floatX* weights = nullptr;                              // the layers read these: master, or its copy in bf16
    float* master = nullptr;                                // float32 weights: see Exchange::master_at()
    float *m = nullptr, *v = nullptr;                       // AdamW's moments of this rank's slices: moment_at()
    AdamWTable update;                                      // the pieces of these slices
    int leaf = 1;                                           // micro-batches that share a gradient
    std::vector<float*> tree;                               // gradients: sums of 2^k leaves; the last is being filled
    double* loss_sums = nullptr;                            // one sum of losses per micro-batch of a step
    Stream stream = {};

    // What the exchange with the other ranks needs. One rank owns whole blocks, and has only one stream.
    struct Exchange {
        std::vector<Slice> owned;                           // (blocks) this rank's slice of each block
        std::vector<size_t> in_moments, in_master;          // (blocks) where that begins in m and v, and in master
        bool shares = false;                                // m and v hold only the slices
        bool shares_master = false;                         // so does master
        Stream stream = {};
        double* norm_partial = nullptr;                     // partial sums of gradient_norm, one per chunk
        // the current step
        bool closing = false;                               // this backward is the step's last
        std::vector<size_t> siblings;                       // the buffers to which this leaf's sum will be added
        Event own_work, summed;                             // before and after the last sum over the ranks
        // the previous update
        bool gathers = false;                               // the gather of its weights is not finished
        Event updated, gathered;
        std::vector<Event> ready;                           // (blocks) this rank has its new weights

        // The index in m and v, and in master, of the layout's element `at`, which this rank owns in block b
        size_t moment_at(size_t b, size_t at) const { return in_moments[b] + at - owned[b].begin; }
        size_t master_at(size_t b, size_t at) const { return in_master[b] + at - owned[b].begin; }
    } exchange;

    void add_position(const std::vector<TensorSpec>& params) {
        first_position_param = table.specs.size();
        for (const TensorSpec& s : params) { table.add(s); }
    }
    // NAME.weight and NAME.bias of a checkpoint: the same rows of two tensors' layer; transposed: the weight, there
    void add_files(const std::string& name, const char* weight, const char* bias, int layer, int row0, int rows,
                   bool transposed) {
        files.push_back({name + ".weight", weight, layer, (size_t)row0, (size_t)rows, transposed});
        files.push_back({name + ".bias", bias, layer, (size_t)row0, (size_t)rows, false});
    }
};

// A tensor without a FileTensor would be missing in every checkpoint.
inline void check_files(const Parameters& p) {
    for (const TensorSpec& s : p.table.specs) {
        const auto named = [&](const FileTensor& f) { return f.tensor == s.name; };
        check(std::any_of(p.files.begin(), p.files.end(), named),
              "tensor %s has no row in the trainer's table of files, so it would never be saved: add one",
              s.name.c_str());
    }
}

// Completes the tables: the encoding's tensors follow the trainer's own.
inline void complete_tables(Parameters& p, const std::vector<TensorSpec>& params,
                            const std::vector<FileTensor>& files) {
    p.add_position(params);
    p.first_position_file = p.files.size();
    p.files.insert(p.files.end(), files.begin(), files.end());
    check_files(p);
    p.table.lay_out_by_layer(p.first_position_param);
}

// The tensors that weights of other software may lack: the encoding's, and BERT's head
inline std::vector<FileTensor> optional_files(const Parameters& p) {
    std::vector<FileTensor> list(p.files.begin() + (ptrdiff_t)p.first_position_file, p.files.end());
    for (const FileTensor& f : p.files) { if (f.name.rfind("cls.", 0) == 0) { list.push_back(f); } }
    return list;
}

// The number of gradient buffers for `leaves` leaves: one for each level of their tree, and one to fill
inline int gradient_buffers(int leaves) {
    int buffers = 0;
    for (int n = 1; n < 2 * leaves; n *= 2) { buffers++; }
    return buffers;
}

// ----------------------------------------------------------------------------------------------------------
// memory: the slices that each rank holds

// A rank's slice of a block of the layout
inline Slice block_slice(const Slice& block, int rank) {
    const Slice s = exchange_slice(block.size(), rank);
    return {block.begin + s.begin, block.begin + s.end};
}

// The size of the largest rank's slices
inline size_t largest_share(const TensorTable& table, int ranks) {
    size_t n = 0;
    for (const Slice& block : table.blocks) { n += ceil_div(block.size() / SLICE_UNIT, (size_t)ranks) * SLICE_UNIT; }
    return n;
}

// Plans the slices; without training, a rank holds everything.
inline void plan_slices(Parameters& p, bool trains) {
    Parameters::Exchange& x = p.exchange;
    x.shares = trains && comm().size > 1;
    x.shares_master = x.shares && sizeof(floatX) != sizeof(float);
    size_t held = 0, master = 0;
    for (const Slice& block : p.table.blocks) {
        const bool whole = x.owned.empty() || !x.shares_master;         // the encoding reads master's block 0
        x.owned.push_back(x.shares ? block_slice(block, comm().rank) : block);
        const Slice own = x.owned.back();
        x.in_moments.push_back(held);
        x.in_master.push_back(whole ? own.begin : master);
        held += own.size();
        master += whole ? block.size() : own.size();
    }
    x.ready.resize(x.owned.size());
}

// Calls chunk(k, c), k = 0, 1, ..., for each chunk c of the gradient's norm in a rank's slices, in order.
template <class F> void for_each_norm_chunk(const TensorTable& table, int rank, F chunk) {
    size_t k = 0;
    for (const Slice& block : table.blocks) {
        const Slice own = block_slice(block, rank);
        for (size_t at = own.begin; at < own.end; at += NORM_CHUNK) { chunk(k++, at / NORM_CHUNK); }
    }
}

// Memory for all float32 weights of block b between two steps: in master, or, if this rank holds only a part of master,
// in a buffer of gradients.
inline float* whole_master(Parameters& p, size_t b) {
    return (p.exchange.shares_master ? p.tree.back() : p.master) + p.table.blocks[b].begin;
}
// For each block, fill(data, block) sets its float32 weights in data (block) on the device; they are rounded to
// `weights` as update t did, or to the nearest if t is 0.
template <class Fill> void set_master(Parameters& p, uint64_t seed, int t, Fill fill) {
    for (size_t b = 0; b < p.exchange.owned.size(); b++) {
        const Slice block = p.table.blocks[b], held = b == 0 ? block : p.exchange.owned[b];
        float* const data = whole_master(p, b);
        fill(data, block);
        round_weights(p.weights, data, p.table, block, seed, t, p.stream);
        if (!p.exchange.shares_master) { continue; }
        const float* from = data + (held.begin - block.begin);
        copy_on_device(p.master + p.exchange.master_at(b, held.begin), from, sizeof(float) * held.size(), p.stream);
    }
}
// data (block), on the device: the initial values of a block
inline void fill_initially(const Parameters& p, float* data, Slice block, uint64_t seed) {
    std::vector<float> host(block.size());
    init_tensors(host.data(), block, p.table, p.files, seed);
    copy_to_device(data, host.data(), sizeof(float) * host.size(), p.stream);
}

// The pieces that this rank updates. Their places do not change, so AdamW's table is written once.
inline void plan_update(Parameters& p) {
    for (size_t b = 0; b < p.exchange.owned.size(); b++) {
        for (const TensorPiece& piece : p.table.pieces(p.exchange.owned[b])) {
            p.update.add(p.table.specs[piece.tensor], piece, p.exchange.master_at(b, piece.at), piece.at,
                         p.exchange.moment_at(b, piece.at));
        }
    }
    p.update.upload(p.stream);
}

// Weights with their initial values; to train (micro_batches > 0) also moments and gradients
inline void parameters_allocate(Parameters& p, uint64_t seed, int micro_batches) {
    const size_t total = p.table.total, micro = (size_t)micro_batches;
    const auto floats = [](size_t n) { return (float*)device_malloc(sizeof(float) * n); };
    p.stream = device_stream();
    p.exchange.stream = comm().size > 1 ? second_stream() : p.stream;
    plan_slices(p, micro_batches > 0);
    const Parameters::Exchange& x = p.exchange;
    const size_t last = x.owned.back().size(), moments = x.in_moments.back() + last;
    p.master = floats(x.shares_master ? x.in_master.back() + last : total);
    p.weights = sizeof(floatX) == sizeof(float) ? (floatX*)p.master : (floatX*)device_malloc(sizeof(floatX) * total);
    if (micro_batches > 0) {
        p.m = floats(moments);
        p.v = floats(moments);
        p.exchange.norm_partial = (double*)device_malloc(sizeof(double) * (total / NORM_CHUNK + micro));
        p.loss_sums = p.exchange.norm_partial + total / NORM_CHUNK;        // one copy to the host has both
        plan_update(p);
        const int buffers = gradient_buffers(micro_batches / p.leaf);
        for (int k = 0; k < buffers; k++) { p.tree.push_back(floats(total)); }
    }
    set_master(p, seed, 0, [&](float* data, Slice block) { fill_initially(p, data, block, seed); });
}

inline void parameters_free(Parameters& p) {
    Parameters::Exchange& x = p.exchange;
    for (float* g : p.tree) { device_free(g); }
    if ((void*)p.weights != (void*)p.master) { device_free(p.weights); }
    for (void* array : {(void*)p.master, (void*)p.m, (void*)p.v, (void*)x.norm_partial}) { device_free(array); }
    p.update.release();
    for (Event* e : {&x.own_work, &x.summed, &x.updated, &x.gathered}) { e->release(); }
    for (Event& e : x.ready) { e.release(); }
}

// ----------------------------------------------------------------------------------------------------------
// the update

inline void update_parameters(Parameters& p, const float* grads, const AdamW& adamw) {
    Parameters::Exchange& x = p.exchange;
    // 1 this rank's slices, in one launch: no block could start before the norm of all gradients is known
    adamw_update(p.weights, p.master, grads, p.m, p.v, p.update, adamw, x.stream);
    if (comm().size == 1) { return; }
    x.updated.record(x.stream);
    x.updated.hold(p.stream);                   // the gradient's memory may be used again
    // 2 the other ranks' slices, in the order in which a forward reads them
    for (size_t i = 0; i < x.owned.size(); i++) {
        const size_t b = i < 2 ? 1 - i : i;
        const Slice block = p.table.blocks[b];
        if (b == 0) {
            exchange_gather(p.master + block.begin, block.size(), "weights", x.stream);
            round_weights(p.weights, p.master + block.begin, p.table, block, adamw.seed, adamw.t, x.stream);
        } else {
            exchange_gather(p.weights + block.begin, block.size(), "weights", x.stream);
        }
        x.ready[b].record(x.stream);
    }
    x.gathered.record(x.stream);
    x.gathers = true;
}

// A forward calls this before it reads the weights of layer l, and first with -1, for weights outside the layers.
inline void layer_ready(Parameters& p, int l) {
    if (!p.exchange.gathers) { return; }
    for (size_t b = l < 0 ? 0 : (size_t)l + 2; b < (size_t)l + 3; b++) { p.exchange.ready[b].hold(p.stream); }
}

// The host waits for the gather of the weights.
inline void settle_weights(Parameters& p) {
    Parameters::Exchange& x = p.exchange;
    if (!x.gathers) { return; }
    exchange_wait(x.updated, x.gathered, "weights");
    x.gathered.hold(p.stream);
    x.gathers = false;
}

// A collective between two steps: all float32 weights, in the layout of the table
inline float* gather_master(Parameters& p) {
    settle_weights(p);
    for (size_t b = 0; p.exchange.shares_master && b < p.exchange.owned.size(); b++) {
        const Slice block = p.table.blocks[b], held = b == 0 ? block : p.exchange.owned[b];
        float* const whole = whole_master(p, b);
        copy_on_device(whole + (held.begin - block.begin), p.master + p.exchange.master_at(b, held.begin),
                       sizeof(float) * held.size(), p.stream);
        if (b > 0) {
            exchange_now("weights", p.stream, [&] { exchange_gather(whole, block.size(), "weights", p.stream); });
        }
    }
    return whole_master(p, 0);
}

// ----------------------------------------------------------------------------------------------------------
// a step's gradient: for each micro-batch i of a rank's n: forward, gradient_begin, backward into the memory that it
// returns, gradient_add; then gradient_end
//
// Backward adds p.leaf neighbouring micro-batches up in one buffer, a leaf. A binary tree sums the leaves of a rank and
// continues over the ranks, once a step.

// the gradient of this rank's slices, on the device; its norm, and the mean loss over `targets`
struct StepGradient {
    float* grads;
    double norm, loss;
    size_t targets;
};

// The levels of the subtrees that a finished leaf is added to: its left sibling at each level until the sum has none.
// The last leaf, if the number of leaves is not a power of two, also gets the remaining subtrees to the left.
inline std::vector<size_t> siblings_of(int leaf, int leaves) {
    std::vector<size_t> found;
    int k = 0;
    for (; leaf >> k & 1; k++) { found.push_back((size_t)k); }
    for (int j = k + 1; leaf + 1 == leaves && leaves >> j != 0; j++) {
        if (leaves >> j & 1) { found.push_back((size_t)j); }
    }
    return found;
}

// The memory to which micro-batch i of this rank's n adds its gradient, zeroed at the beginning of a leaf
inline float* gradient_begin(Parameters& p, int i, int n) {
    const int leaves = n / p.leaf;
    p.exchange.closing = i + 1 == n;
    if (p.exchange.closing) { p.exchange.siblings = siblings_of(leaves - 1, leaves); }
    if (i % p.leaf == 0) { device_zero(p.tree.back(), sizeof(float) * p.table.total, p.stream); }
    return p.tree.back();
}

constexpr const char* SUM_OF_GRADIENTS = "sum of the gradients";

// Adds the last leaf's gradient of block b to the sum of the other leaves, and starts the sum over the ranks.
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

// Ends micro-batch i of this rank's n. tree[k] holds the sum of 2^k neighbouring leaves until its sibling is done;
// after the last leaf, tree.back() has the sum over all ranks.
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

// The number of targets in a step, on all ranks, by which the sum of losses is divided. n: this rank's tokens
inline size_t count_targets(const int* targets, size_t n) {
    size_t counted = 0;
    for (size_t i = 0; i < n; i++) { counted += targets[i] != IGNORE_INDEX; }
    std::vector<size_t> all((size_t)comm().size);
    comm_all_gather(all.data(), &counted, 1, "number of targets");
    return std::accumulate(all.begin(), all.end(), (size_t)0);
}

// The step's gradient, and its mean loss from the micro-batches' sums in loss_sums (NAN without targets). Only here
// does the host wait for the device during a step.
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

// The tensor whose gradient is the first in the order of the backward that is not finite, for the message of a skipped
// update; "" if all are finite. Later gradients inherit the fault: the last, wte's, always does. The table has the
// order of the forward, so this walks it from the end. Of a layer's attention, q, k and v come before the encoding,
// which inherits a fault of any score.
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

// ----------------------------------------------------------------------------------------------------------
// the check that all ranks have the same weights

constexpr int REPLICA_BLOCKS = 256;

// partial (blocks) = sum_i m_i x_i mod 2^64 over the block's i, where x_i are the bits of data[i]. All m_i are odd, so
// every change of a single element is seen; all differ, so an exchange of two elements is likely to be seen.
__global__ void replica_hash_kernel(unsigned long long* partial, const float* data, size_t n) {
    const GridSpan span = grid_span(n);
    unsigned long long sum = 0;
    for (size_t i = span.begin; i < span.end; i += span.step) {
        unsigned long long m = (i + 1) * 0x9e3779b97f4a7c15ull;
        m ^= m >> 29;
        sum += (m | 1) * (unsigned)float_to_bits(data[i]);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { partial[blockIdx.x] = sum; }
}

// the hash of n floats on the device; the same for any number of blocks and threads
inline uint64_t replica_hash(const float* data, size_t n, Stream stream) {
    std::vector<unsigned long long> partial(REPLICA_BLOCKS);
    const size_t bytes = partial.size() * sizeof(partial[0]);
    auto device_partial = (unsigned long long*)device_malloc(bytes);
    launch(replica_hash_kernel, Grid(REPLICA_BLOCKS, 256, 0, stream), device_partial, data, n);
    copy_to_host(partial.data(), device_partial, bytes, stream);
    device_free(device_partial);
    return std::accumulate(partial.begin(), partial.end(), (uint64_t)n);
}

// An error unless all ranks have the same weights. why: the likely cause, for the message
inline void check_replicas(Parameters& p, const char* why) {
    if (comm().size == 1) { return; }
    settle_weights(p);
    const size_t words = p.table.total * sizeof(floatX) / sizeof(float);
    const std::vector<int> differing = ranks_that_differ(replica_hash((const float*)p.weights, words, p.stream));
    check(differing.empty(), "the parameters differ from rank 0's on rank %s: %s", option_text(differing).c_str(), why);
}
