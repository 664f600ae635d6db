// ranks/exchange.cuh -- gradients summed over the ranks, in the order in which one rank would sum them.
//
// Each rank owns a slice of an array that all of them hold. It receives the other ranks' values of its slice, adds
// them, and sends the sum to all ranks. So a rank sends (N - 1) / N of the array on the way to the sums, and the same
// amount on the way back, as in a ring; here for N = 3:
//
//     slice   0     1     2                     0     1     2
//     rank 0  sum <-.-----.                     sum --.-----.
//     rank 1  --'   sum <-|        and then     <-'   sum --|
//     rank 2  --'   --'   sum                   <-'   <-'   sum
//
// The owner of a slice adds with the code below. A library would be free to choose the order of the terms by the number
// of ranks. Here it is a binary tree over the ranks, which continues the tree that each rank has built over its own
// micro-batches. So if every rank has 2^k neighbouring micro-batches of the step, the whole is the same tree for any
// number of ranks, and its sum has the same bits.
//
// With several machines of g = 2^k ranks each, the ranks of a machine do this first. Then the ranks that own the same
// slice on all machines do it with their slices, which are g times smaller. It is the same tree, cut at its level k.
#pragma once

#include "../../base/matrix.cuh"
#include "../../base/tensor.h"
#include "comm.h"

// ----------------------------------------------------------------------------------------------------------
// who owns what

// Part i of n of a slice: their sizes differ by at most a unit.
inline Slice slice_part(Slice s, int i, int n) {
    const size_t units = ceil_div(s.size(), SLICE_UNIT);
    const auto cut = [&](size_t k) { return s.begin + std::min(units * k / (size_t)n * SLICE_UNIT, s.size()); };
    return {cut((size_t)i), cut((size_t)i + 1)};
}

// Ranks that exchange with each other: first, first + step, ..., first + (size - 1) step
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
// The slice of n elements that a rank owns
inline Slice exchange_slice(size_t n, int rank) {
    Slice s = {0, n};
    for (const RankGroup& g : exchange_groups(rank)) { s = slice_part(s, g.index(rank), g.size); }
    return s;
}

// ----------------------------------------------------------------------------------------------------------
// the sum

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
// The number of elements of `element` bytes that each rank of a group may send to another one in a turn, and the number
// of turns for all of their parts: a turn receives at most comm().chunk bytes.
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

// Each rank's slice of data, whose elements have `element` bytes, goes to the whole group.
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

// data (n) -> this rank's slice of it is the sum over the ranks; the rest of data is then undefined. With NCCL, this
// and the functions below return before the stream has executed them: see exchange_wait().
inline void exchange_sum(float* data, size_t n, const char* what, Stream stream) {
    Slice s = {0, n};
    for (const RankGroup& g : exchange_groups(comm().rank)) {
        if (g.size > 1) { group_sum(data, s, g, what, stream); }
        s = slice_part(s, g.index(comm().rank), g.size);
    }
}

// data (n): every rank has set its slice, and now gets the rest.
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

// The host waits until the device has reached `end`, after an exchange. The deadline counts from `own`, the end of this
// rank's work before the exchange.
inline void exchange_wait(const Event& own, const Event& end, const char* what) {
    if (!comm().nccl) { return; }
    nccl_wait(own, false, what);
    nccl_wait(end, true, what);
}
// Calls exchange(), which puts an exchange into the stream, and waits for it.
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
// work in pieces: what one process computes, in the order of its pieces

// A collective. work(i, out) computes the result of piece i, of at most `most` elements, on one of the ranks;
// take(i, result) is called on every rank, for every piece, in order. In round k, rank r computes piece k * ranks + r,
// so the pieces of a round are neighbours, which take about the same time. Returns false, on every rank, if a signal
// has stopped one of them: then some pieces were not computed.
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

// rows (ranks * n) on the device: this rank has computed n of them, from rank * n on, and now gets the rest.
inline void share_rows(float* rows, size_t n, const char* what, Stream stream) {
    const size_t ranks = (size_t)comm().size;
    if (ranks == 1) { return; }
    std::vector<Slice> of_rank;
    for (size_t r = 0; r < ranks; r++) { of_rank.push_back({r * n, (r + 1) * n}); }
    const RankGroup all = {0, 1, (int)ranks};
    exchange_now(what, stream, [&] { group_gather((char*)rows, sizeof(float), of_rank, all, what, stream); });
}
