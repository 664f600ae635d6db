// comm_program.cu -- what test_ranks.py starts: each run tests one mode, on as many ranks as its launcher gives.
//
//   comm_program sums [SEED]      slices; the tree over ranks and micro-batches, against a recursive sum of all leaves
//   comm_program gradients [SEED] the sum of a step's gradients, and the bytes that it sends
//   comm_program small            gather, max, broadcast, replicas, pieces and rows that are shared
//   comm_program self             one rank, whose NCCL sends to itself: it starts, exchanges, and is ended or aborted
//   comm_program wait SECONDS     sums without end, with --collective_timeout SECONDS; the caller is expected to end it
//   comm_program throw RANK|all   an Error on one rank while the rest sum, or the same on all
//   comm_program exit RANK CODE   one rank ends with CODE, the rest with 0
//   comm_program MODE... --ranks N    multiplies itself, as a trainer does
#include "llmc/base/gpu.h"
#include "llmc/engine/parameters.cuh"
#include "llmc/engine/launch.h"

// Leaf i of element j: exponents spread over 2^-12 .. 2^12, so that every order of additions rounds differently
float leaf(uint64_t seed, size_t i, size_t j) {
    const uint64_t key[3] = {seed, i, j}, h = checksum(key, sizeof(key));
    const float mantissa = 1.0f + (float)(h & 0x7fffff) / 8388608.0f;
    return ldexpf(h >> 63 ? -mantissa : mantissa, (int)(h >> 32 & 0xff) % 25 - 12);
}

// The sum of leaves lo .. hi - 1: the left subtree has 2^k leaves, the largest power of two below their number
float tree_of_leaves(const std::vector<float>& leaves, size_t lo, size_t hi) {
    if (hi - lo == 1) { return leaves[lo]; }
    size_t left = 1;
    while (2 * left < hi - lo) { left *= 2; }
    return tree_of_leaves(leaves, lo, lo + left) + tree_of_leaves(leaves, lo + left, hi);
}

void expect(bool good, const char* what, size_t n, size_t m) {
    if (!good) { die(1, "%s: wrong for n %zu, %zu micro-batches per rank", what, n, m); }
}

bool same_bits(float a, float b) { return memcmp(&a, &b, sizeof(float)) == 0; }

// Slices are whole units, one after the other, that differ by a unit at most; on two levels by one at each.
void test_slices() {
    const int size = comm().size;
    const size_t unit = SLICE_UNIT;
    for (size_t n : {(size_t)0, (size_t)1, unit - 1, unit, unit + 1, 3 * unit + 17, 1000 * unit}) {
        std::vector<Slice> slices;
        size_t sum = 0, at = 0;
        size_t longest = 0, shortest = SIZE_MAX;
        for (int r = 0; r < size; r++) {
            slices.push_back(exchange_slice(n, r));
            sum += slices.back().size();
            longest = std::max(longest, slices.back().size());
            shortest = std::min(shortest, slices.back().size());
        }
        expect(sum == n && longest - shortest <= 2 * SLICE_UNIT, "the sizes of the slices", n, 1);
        std::sort(slices.begin(), slices.end(), [](Slice a, Slice b) { return a.begin < b.begin; });
        for (const Slice& s : slices) {
            if (s.size() == 0) { continue; }
            expect(s.begin == at && s.begin % SLICE_UNIT == 0, "where a slice begins", n, 1);
            at = s.end;
        }
        expect(at == n, "the last slice's end", n, 1);
    }
}

void test_sum(uint64_t seed, size_t n, size_t m) {
    const Comm& c = comm();
    Stream stream = {};
    std::vector<float> mine(n), found(n);
    size_t in_order_differs = 0;
    std::vector<float> leaves(m * (size_t)c.size), part(m), expected(n);
    for (size_t j = 0; j < n; j++) {
        float in_order = 0;
        for (size_t i = 0; i < leaves.size(); i++) { leaves[i] = leaf(seed, i, j); in_order += leaves[i]; }
        std::copy_n(leaves.begin() + (ptrdiff_t)(m * (size_t)c.rank), m, part.begin());
        mine[j] = tree_of_leaves(part, 0, m);
        expected[j] = tree_of_leaves(leaves, 0, leaves.size());
        in_order_differs += in_order != expected[j];
    }
    float* data = (float*)device_malloc(sizeof(float) * (n + 1));
    copy_to_device(data, mine.data(), sizeof(float) * n, stream);
    const float guard = 12345.0f;
    copy_to_device(data + n, &guard, sizeof(float), stream);
    // this rank's slice has the sum, and then all of it
    const Slice slice = exchange_slice(n, c.rank);
    const uint64_t sent = c.sent;
    static size_t launches;
    launches = 0;
    after_launch = [](const char*, Stream) { launches++; };
    exchange_now("sum", stream, [&] { exchange_sum(data, n, "sum", stream); });
    after_launch = nullptr;
    size_t turns = 0;
    Slice whole = {0, n};
    for (const RankGroup& g : exchange_groups(c.rank)) {
        if (g.size > 1) { turns += exchange_turns(group_parts(whole, g), sizeof(float)).count; }
        whole = slice_part(whole, g.index(c.rank), g.size);
    }
    expect(launches <= turns, "one launch a turn", n, m);
    copy_to_host(found.data(), data, sizeof(float) * n, stream);
    expect(std::equal(&found[slice.begin], &found[slice.end], &expected[slice.begin], same_bits), "exchange_sum", n, m);
    exchange_now("sum", stream, [&] { exchange_gather(data, n, "sum", stream); });
    copy_to_host(found.data(), data, sizeof(float) * n, stream);
    expect(std::equal(found.begin(), found.end(), expected.begin(), same_bits), "exchange_gather", n, m);
    // a rank sends 2 (N - 1) / N of the array, apart from slices that are a unit longer
    const double ring = 2.0 * (c.size - 1) / c.size * (double)n, units = (double)SLICE_UNIT * c.size;
    expect((double)(c.sent - sent) <= sizeof(float) * (ring + units), "the bytes sent", n, m);
    float after;
    copy_to_host(&after, data + n, sizeof(float), stream);
    expect(after == guard, "the guard after the data", n, m);
    if (n > 100 && leaves.size() > 3) { expect(in_order_differs > n / 10, "another order of additions", n, m); }
    expect(ranks_that_differ(checksum(found.data(), sizeof(float) * n)).empty(), "the same on all ranks", n, m);
    device_free(data);
}

// the buffer, whose size it is, is allocated again
void set_chunk(size_t chunk) {
    Comm& c = comm();
    device_free(c.inbox);
    c.inbox = nullptr;
    c.chunk = chunk;
}

// Flat, and as if there were machines of 2 and 4 ranks
void test_sums(uint64_t seed) {
    for (int node : {0, 2, 4}) {
        if (node > 0 && (comm().size % node != 0 || node == comm().size)) { continue; }
        comm().node = node;
        test_slices();
        set_chunk(4000);                                        // messages of a few floats, in many turns
        for (size_t n : {0, 1, 1017}) {
            for (size_t m : {1, 2, 8}) { test_sum(seed + n, n, m); }
        }
        set_chunk(100000);
        for (size_t n : {SLICE_UNIT - 1, SLICE_UNIT, SLICE_UNIT + 1, 3 * SLICE_UNIT + 17}) { test_sum(seed + n, n, 2); }
        set_chunk(Comm().chunk);
        test_sum(seed, comm().chunk / sizeof(float) + 77, 1);
    }
}

// Parameters without a model, for L layers, in blocks of one to two units
struct Bare : Parameters {
    Bare(int L, int micro_batches, int micro_batches_of_a_leaf) {
        table.add({"rest", 0, SLICE_UNIT + 100, 0});
        table.add({"layers", L, 300, 64});
        add_position({{"encoding", L, 77, 0}});
        files = {{"rest", "rest", 0, 0, SLICE_UNIT + 100, false}};
        first_position_file = 1 + (size_t)L;
        for (const char* name : {"layers", "encoding"}) {
            const size_t rows = table.specs[(size_t)table.index(name)].rows;
            for (int l = 0; l < L; l++) { files.push_back({strprintf("h.%d.", l) + name, name, l, 0, rows, false}); }
        }
        table.lay_out_by_layer(first_position_param);
        leaf = micro_batches_of_a_leaf;
        parameters_allocate(*this, 1, micro_batches);
    }
};

// Element j of micro-batch i's gradient: a leaf, but drawn faster
float gradient(uint64_t seed, size_t i, size_t j) {
    static const std::vector<float> pool = [] {
        std::vector<float> x(100003);
        for (size_t k = 0; k < x.size(); k++) { x[k] = leaf(1, 0, k); }
        return x;
    }();
    return pool[((seed + i) * 31337 + j) % pool.size()];
}
float sum_in_order(const std::vector<float>& x) { return std::accumulate(x.begin(), x.end(), 0.0f); }

// The sum of element j over a step: the micro-batches of a leaf in their order, the leaves in a tree
float sum_of_step(uint64_t seed, size_t micro_batches, size_t leaves, size_t j) {
    const size_t each = micro_batches / leaves;
    std::vector<float> sums;
    for (size_t first = 0; first < micro_batches; first += each) {
        std::vector<float> group;
        for (size_t i = first; i < first + each; i++) { group.push_back(gradient(seed, i, j)); }
        sums.push_back(sum_in_order(group));
    }
    return tree_of_leaves(sums, 0, sums.size());
}

// In the order of the forward, which is not the table's, each rank gets an element that is not finite at the end of its
// part of a tensor, except in a tensor that depends on the rank: all ranks name the last tensor with such an element.
void test_bad_tensor(Parameters& p, float* grads) {
    const int L = p.table.specs[1].layers;
    const float bad = INFINITY;
    std::vector<std::pair<Slice, std::string>> forward;
    for (int l = 0; l < L; l++) {
        for (const size_t i : {(size_t)2, (size_t)1}) {         // the encoding, then the rest of its layer
            const size_t at = p.table.offset(i, l);
            const char* name = p.table.specs[i].name.c_str();
            forward.push_back({{at, at + p.table.specs[i].layer_size()},
                               strprintf("%s of layer %d (h.%d.%s)", name, l, l, name)});
        }
    }
    forward.push_back({{p.table.offset(0), p.table.offset(0) + p.table.specs[0].size()}, "rest (rest)"});
    expect(first_bad_tensor(p, grads).empty(), "a tensor that is finite", 1, 1);
    int mine = -1;                                              // the last of this rank
    for (int t = 0; t < (int)forward.size(); t++) {
        const Slice tensor = forward[(size_t)t].first;
        for (const Slice& own : p.exchange.owned) {
            const size_t begin = std::max(tensor.begin, own.begin), end = std::min(tensor.end, own.end);
            if (begin >= end || t == comm().rank % (int)forward.size()) { continue; }
            copy_to_device(grads + end - 1, &bad, sizeof(bad), p.stream);
            mine = t;
        }
        const int last = comm_max(mine, "the last tensor");
        const std::string name = last < 0 ? "" : forward[(size_t)last].second;
        expect(first_bad_tensor(p, grads) == name, "the tensor that is not finite", (size_t)last, (size_t)t);
    }
}

// Steps of n micro-batches on each rank, in `leaves` leaves (0: each is one). The second must not depend on the first.
void test_steps(int steps, uint64_t seed, int L, int n, int leaves) {
    const Comm& c = comm();
    const size_t size = (size_t)c.size, rank = (size_t)c.rank;
    const size_t all = (size_t)n * size;
    const size_t cut = leaves == 0 ? all : (size_t)leaves;
    Bare p(L, n, (int)(all / cut));
    const size_t total = p.table.total;
    float* given = (float*)device_malloc(sizeof(float) * total * (size_t)n);
    std::vector<float> host(total);
    std::vector<double> losses((size_t)n);
    for (int step = 0; step < steps; step++, seed += 1000) {
        const auto loss_of = [&](size_t i) { return (double)gradient(seed, i, total) / (1.0 + (double)i); };
        double loss = 0;
        for (size_t i = 0; i < all; i++) { loss += loss_of(i); }
        for (size_t i = 0; i < (size_t)n; i++) {
            const size_t number = rank * (size_t)n + i;
            for (size_t j = 0; j < total; j++) { host[j] = gradient(seed, number, j); }
            copy_to_device(given + i * total, host.data(), sizeof(float) * total, p.stream);
            losses[i] = loss_of(number);
        }
        copy_to_device(p.loss_sums, losses.data(), sizeof(double) * losses.size(), p.stream);
        const uint64_t sent = c.sent;
        for (int i = 0; i < n; i++) {
            float* grads = gradient_begin(p, i, n);
            const auto add = [&](size_t b) {
                const Slice block = p.table.blocks[b];
                add_to(grads + block.begin, given + (size_t)i * total + block.begin, block.size(), p.stream);
            };
            add(1);                                             // as the head does
            for (int l = L - 1; l >= 0; l--) {
                add((size_t)l + 2);
                layer_done(p, l);
            }
            add(0);
            gradient_add(p, i, n);
        }
        const StepGradient g = gradient_end(p, n, 1);
        size_t leaves_rank = 0;                                 // floats of one exchange
        for (size_t b = 0; b < p.exchange.owned.size(); b++) {
            const Slice own = p.exchange.owned[b], block = p.table.blocks[b];
            leaves_rank += block.size() - block_slice(block, c.rank).size();
            copy_to_host(host.data(), g.grads + own.begin, sizeof(float) * own.size(), p.stream);
            for (size_t j = 0; j < own.size(); j += 1 + (j + seed) % 41) {
                const float wanted = sum_of_step(seed, all, cut, own.begin + j);
                expect(same_bits(host[j], wanted), "a step's sum", (size_t)L, (size_t)n);
            }
        }
        expect(g.loss == loss, "a step's loss", (size_t)L, (size_t)n);
        expect(ranks_that_differ(checksum(&g.norm, sizeof(g.norm))).empty(), "a step's norm", (size_t)L, (size_t)n);
        const bool counted = c.sent - sent == sizeof(float) * leaves_rank;
        expect(c.node > 0 || counted, "the bytes of a step", (size_t)L, (size_t)n);
        test_bad_tensor(p, g.grads);
    }
    device_free(given);
    parameters_free(p);                     // not after an error, as that would wait for what is on its way
}

void test_gradients(uint64_t seed) {
    const int size = comm().size;
    test_steps(2, seed, 3, 4, 0);
    if (comm().node > 0) { return; }
    test_steps(1, seed, 1, 2, size);
    test_steps(1, seed, 1, 6, 2 * size);
    if (size == 1) { test_steps(1, seed, 2, 3, 0); }
}

// Ranks of one machine are numbered in their order.
void test_machines() {
    char name[256] = "";
    gethostname(name, sizeof(name) - 1);
    const uint64_t mine = checksum(std::string(name));
    std::vector<uint64_t> all((size_t)comm().size);
    comm_all_gather(all.data(), &mine, 1, "machines");
    const auto here = [&](size_t ranks) { return (int)std::count(all.begin(), all.begin() + (ptrdiff_t)ranks, mine); };
    expect(comm().local_rank == here((size_t)comm().rank), "local_rank", 1, 1);
    expect(comm().local_size == here(all.size()), "local_size", 1, 1);
}

void test_small() {
    const int rank = comm().rank, size = comm().size;
    for (size_t n : {0, 1, 5, 1000}) {
        std::vector<double> mine(n), all(n * (size_t)size, -1.0);
        for (size_t i = 0; i < n; i++) { mine[i] = 1.0 / (1.0 + (double)i + 1000.0 * rank); }
        comm_all_gather(all.data(), mine.data(), n, "gather");
        for (size_t i = 0; i < all.size(); i++) {
            expect(all[i] == 1.0 / (1.0 + (double)(i % n) + 1000.0 * (double)(i / n)), "comm_all_gather", n, 1);
        }
    }
    expect(comm_max(100 - rank, "max") == 100 && comm_max(-rank - 1, "max") == -1, "comm_max", 1, 1);
    expect(comm_max(rank == size - 1 ? 7 : 0, "max") == 7, "comm_max of one", 1, 1);
    for (size_t n : {0, 1, 3999, 4000, 4001, 20000}) {
        comm().chunk = 4000;
        std::vector<char> text(n + 1);
        for (size_t i = 0; i < n; i++) { text[i] = (char)(rank == 0 ? i % 101 : 255); }
        text[n] = 'x';
        comm_broadcast(text.data(), n, "broadcast");
        for (size_t i = 0; i < n; i++) { expect(text[i] == (char)(i % 101), "comm_broadcast", n, 1); }
        expect(text[n] == 'x', "the guard after a broadcast", n, 1);
    }
    std::vector<float> replica(2500, 0.25f);
    const auto differing = [&] { return ranks_that_differ(checksum(replica.data(), sizeof(float) * replica.size())); };
    expect(differing().empty(), "equal replicas", 1, 1);
    // the lowest bit of one weight of one rank
    for (size_t i : {(size_t)0, (size_t)999, (size_t)1000, replica.size() - 1}) {
        const float good = replica[i];
        if (rank == size - 1) { replica[i] = nextafterf(good, 1.0f); }
        const std::vector<int> none, last = {size - 1};
        expect(differing() == (size > 1 ? last : none), "a replica that drifted", i, 1);
        replica[i] = good;
    }
}

// Pieces come back in their order, each from the rank whose turn it was; a signal to one rank ends it for all.
void test_pieces(size_t pieces, size_t stop_at) {
    const size_t rank = (size_t)comm().rank, size = (size_t)comm().size;
    std::vector<size_t> done;
    const auto work = [&](size_t i, size_t* out) {
        if (i == stop_at) { stop_signal = SIGTERM; }
        out[0] = i * i;
        out[1] = rank;
    };
    const auto take = [&](size_t i, const size_t* out) {
        expect(out[0] == i * i && out[1] == i % size, "distribute_pieces", i, pieces);
        done.push_back(i);
    };
    const bool whole = distribute_pieces<size_t>(pieces, 2, "pieces", work, take);
    stop_signal = 0;
    const size_t last_round = std::min(pieces, (stop_at / size + 1) * size);
    const size_t expected = stop_at < pieces ? last_round : pieces;
    expect(whole == (expected == pieces) && done.size() == expected, "distribute_pieces", expected, pieces);
    for (size_t i = 0; i < done.size(); i++) { expect(done[i] == i, "the order of the pieces", i, pieces); }
}

// n values of each rank, in messages of at most 1000 floats in all
void test_rows(size_t n) {
    const size_t rank = (size_t)comm().rank, size = (size_t)comm().size;
    std::vector<float> rows(n * size + 1, -1.0f);
    const auto value = [&](size_t i) { return (float)i + 0.5f; };
    for (size_t i = rank * n; i < (rank + 1) * n; i++) { rows[i] = value(i); }
    float* data = (float*)device_malloc(sizeof(float) * rows.size());
    copy_to_device(data, rows.data(), sizeof(float) * rows.size(), Stream());
    share_rows(data, n, "rows", Stream());
    copy_to_host(rows.data(), data, sizeof(float) * rows.size(), Stream());
    for (size_t i = 0; i < n * size; i++) { expect(rows[i] == value(i), "share_rows", n, size); }
    expect(rows.back() == -1.0f, "the guard after the rows", n, size);
    device_free(data);
}

void test_share() {
    for (size_t pieces : {0, 1, 2, 3, 8, 13}) {
        for (size_t stop_at : {(size_t)0, (size_t)4, (size_t)12, (size_t)1000}) { test_pieces(pieces, stop_at); }
    }
    set_chunk(4000);
    for (size_t n : {0, 1, 166, 1000, 1001, 5003}) { test_rows(n); }
    // more than what connections hold: no rank may wait for another one to read
    set_chunk(32 << 20);
    test_rows(comm().chunk / sizeof(float) / (size_t)std::max(1, comm().size - 1));
    set_chunk(Comm().chunk);
}

#if defined(USE_NCCL)
// As between ranks: a communicator that does not block, made and ended twice, and aborted
void test_self() {
    check(comm().size == 1, "self: expected one rank, got %d", comm().size);
    const size_t n = 100003;
    const Stream stream = device_stream();
    std::vector<float> sent(n), received(n);
    for (size_t i = 0; i < n; i++) { sent[i] = leaf(1, i, i); }
    float* data = (float*)device_malloc(2 * sizeof(float) * n);
    Event end;
    for (bool aborts : {false, true, false}) {
        nccl_start(nccl_id());
        copy_to_device(data, sent.data(), sizeof(float) * n, stream);
        device_zero(data + n, sizeof(float) * n, stream);
        nccl_exchange({{0, data, sizeof(float) * n}}, {{0, data + n, sizeof(float) * n}}, "self", stream);
        if (aborts) {
            nccl_abort();
        } else {
            end.record(stream);
            nccl_wait(end, true, "self");
            copy_to_host(received.data(), data + n, sizeof(float) * n, stream);
            expect(std::equal(sent.begin(), sent.end(), received.begin(), same_bits), "what NCCL brought", n, 1);
            nccl_stop();
        }
        expect(nccl_comm() == nullptr, "the end of NCCL", n, 1);
    }
    end.release();
    device_free(data);
#if defined(SIMT)
    // the wait for NCCL to accept a call is shorter than a nap
    nccl_start(nccl_id());
    const int naps = simt_naps;
    for (int i = 0; i < 20; i++) { nccl_settle("self"); nccl_exchange({}, {}, "self", stream); }
    expect(simt_naps - naps < 10, "a nap for each call", (size_t)(simt_naps - naps), 1);
    nccl_stop();
#endif
}
#endif

// Work of its own, during which a rank watches the other ranks
[[noreturn]] void work_for_ever() {
    fprintf(stderr, "rank %d is process %d\n", comm().rank, (int)getpid());
    for (;; usleep(1000)) { comm().wire->watch("own work"); }
}

[[noreturn]] void sum_for_ever() {
    const char* what = "sum of the gradients";
    std::vector<float> ones(5000, 1.0f);
    comm().chunk = 4000;
    for (int i = 0;; i++) {
        exchange_now(what, Stream(), [&] {
            exchange_sum(ones.data(), ones.size(), what, Stream());
            exchange_gather(ones.data(), ones.size(), what, Stream());
        });
        comm_max(i, "stop signals");
        if (i == 3) { fprintf(stderr, "rank %d is process %d\n", comm().rank, (int)getpid()); }
    }
}

int run(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "";
    const std::string value = argc > 2 ? argv[2] : "";
    printf("%s\n", comm_description().c_str());
    find_gpu(comm_device());
    comm_connect_devices();
    if (mode == "sums") {
        test_sums(value.empty() ? 1 : strtoull(value.c_str(), nullptr, 10));
    } else if (mode == "gradients") {
        for (int node : {0, 2}) {                               // flat, and as if there were machines of 2 ranks
            if (node > 0 && (comm().size % node != 0 || node == comm().size)) { continue; }
            comm().node = node;
            test_gradients(value.empty() ? 1 : strtoull(value.c_str(), nullptr, 10));
        }
    } else if (mode == "small") {
        test_machines();
        test_small();
        test_share();
    } else if (mode == "self") {
#if defined(USE_NCCL)
        test_self();
#else
        die(EXIT_BAD_INPUT, "self: this program was built without NCCL");
#endif
    } else if (mode == "wait") {
        comm().timeout = atof(value.c_str());
        sum_for_ever();
    } else if (mode == "work") {
        work_for_ever();
    } else if (mode == "throw") {
        if (value == "all") { die(EXIT_BAD_INPUT, "a mistake of all"); }
        if (comm().rank == atoi(value.c_str())) { die(EXIT_OUT_OF_MEMORY, "a mistake of one"); }
        sum_for_ever();
    } else if (mode == "exit") {
        return comm().rank == atoi(value.c_str()) ? atoi(argv[3]) : 0;
    } else {
        die(EXIT_BAD_INPUT, "expected sums, gradients, small, self, wait, work, throw or exit, got '%s'", mode.c_str());
    }
    printf("ok\n");
    return 0;
}

int main(int argc, char** argv) {
    flush_denormals();
    try {
        const Names words(argv, argv + argc);
        Launch launch = find_launch();
        if (launch.size == 1 && argc > 3 && words[(size_t)argc - 2] == "--ranks") {
            launch = fork_ranks(atoi(argv[argc - 1]));
        }
        comm_init(launch, words);
        return comm_finish(run(argc, argv));
    } catch (const Error& e) { return comm_report(e.code, e.what()); }
}
