// ranks/parameters.cuh -- a model's parameters with their moments, and the update by a step's gradient (gradients.cuh).
//
// The layout has a block for each layer and two for the rest (base/tensor.h). Several ranks exchange block by block:
// each sums the gradient of its slice of every block, updates it, and sends the new weights to the other ranks. It
// holds the moments, and in bf16 builds the float32 weights, of its slices only: ZeRO-1 (Rajbhandari et al. 2020).
// docs/distributed.md shows a step: what runs on which stream, and what waits for what.
#pragma once

#include "../../adamw.cuh"
#include "exchange.cuh"

struct Parameters {
    TensorTable table;                                      // the trainer's own tensors, then the encoding's
    std::vector<FileTensor> files;                          // the same tensors in a checkpoint
    size_t first_position_param = 0, first_position_file = 0;           // indices of the encoding's first in each
    floatX* weights = nullptr;                              // the layers read these: master, or its copy in bf16
    float* master = nullptr;                                // float32 weights: see Exchange::master_at()
    float *m = nullptr, *v = nullptr;                       // AdamW's moments of this rank's slices: moment_at()
    AdamWTable update;                                      // the pieces of these slices
    int leaf = 1;                                           // micro-batches that share a gradient: see gradients.cuh
    std::vector<float*> tree;                               // gradients: tree[k] holds the sum of 2^k leaves, and the
    // last one is being filled
    double* loss_sums = nullptr;                            // one sum of losses per micro-batch of a step
    Stream stream = {};

    // What the exchange with the other ranks needs. One rank owns whole blocks, and has only one stream.
    struct Exchange {
        std::vector<Slice> owned;                           // (blocks) this rank's slice of each block
        std::vector<size_t> in_moments, in_master;          // (blocks) where it begins in m and v, and in master
        bool shares = false;                                // the slices are not whole blocks
        bool shares_master = false;                         // master holds only the slices, too
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

        // Where element `at` of the layout, which this rank owns in block b, is in m and v, and in master
        size_t moment_at(size_t b, size_t at) const { return in_moments[b] + at - owned[b].begin; }
        size_t master_at(size_t b, size_t at) const { return in_master[b] + at - owned[b].begin; }
    } exchange;

    void add_position(const std::vector<TensorSpec>& params) {
        first_position_param = table.specs.size();
        for (const TensorSpec& s : params) { table.add(s); }
    }
    // NAME.weight and NAME.bias of a checkpoint: rows of a layer of two tensors; the weight may be transposed there
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

// Completes the tables: after the trainer's own tensors come those of the encoding.
inline void complete_tables(Parameters& p, const std::vector<TensorSpec>& params,
                            const std::vector<FileTensor>& files) {
    p.add_position(params);
    p.first_position_file = p.files.size();
    p.files.insert(p.files.end(), files.begin(), files.end());
    check_files(p);
    p.table.lay_out_by_layer(p.first_position_param);
}

// Weights of other software may lack the encoding's tensors, and the head where they are an encoder's.
inline std::vector<FileTensor> optional_files(const Parameters& p) {
    std::vector<FileTensor> list(p.files.begin() + (ptrdiff_t)p.first_position_file, p.files.end());
    for (const FileTensor& f : p.files) { if (f.name.rfind("cls.", 0) == 0) { list.push_back(f); } }
    return list;
}

// The number of gradient buffers for a step of `leaves`: one for each level of the tree over them, and one to fill.
inline int gradient_buffers(int leaves) {
    int buffers = 0;
    for (int n = 1; n < 2 * leaves; n *= 2) { buffers++; }
    return buffers;
}

// ----------------------------------------------------------------------------------------------------------
// who holds what

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

// Calls chunk(k, c) for the chunks c of the gradient's norm that are in a rank's slices, in their order: k = 0, 1, ...
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
// For each block in turn calls fill(data, block), which sets the block's float32 weights in data (block) on the device,
// and rounds them to `weights` as update number t did. t = 0: rounds to the nearest
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

// Weights at their initial values; to train (micro_batches > 0) also the moments and the gradients.
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
    // 1 what this rank updates, in one launch: no block can start before the norm of all gradients is known
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

// A forward calls this before it reads the weights of layer l; first with l = -1, for the weights outside the layers.
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
// all ranks have the same weights

constexpr int REPLICA_BLOCKS = 256;

// partial (blocks) = sum_i m_i x_i mod 2^64 over the block's i, where x_i are the bits of data[i]. All m_i are odd, so
// every change of a single element is seen. No two m_i are equal, so an exchange of two elements is likely to be seen.
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

// All ranks must have the same weights. why: what may be wrong otherwise
inline void check_replicas(Parameters& p, const char* why) {
    if (comm().size == 1) { return; }
    settle_weights(p);
    const size_t words = p.table.total * sizeof(floatX) / sizeof(float);
    const std::vector<int> differing = ranks_that_differ(replica_hash((const float*)p.weights, words, p.stream));
    check(differing.empty(), "the parameters differ from rank 0's on rank %s: %s", option_text(differing).c_str(), why);
}
