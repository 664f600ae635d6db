// ranks/share.h -- work in pieces, shared among the ranks: what one process computes, in the order of its pieces.
#ifndef LLMC_ENGINE_RANKS_SHARE_H
#define LLMC_ENGINE_RANKS_SHARE_H

#include "exchange.cuh"

// A collective. work(i, out) computes the result of piece i, of at most `most` elements, on one of the ranks;
// take(i, result) is called on every rank, for every piece, in their order. In round k, rank r computes piece
// k * ranks + r, so that the pieces that are neighbours, and so about equally large, take their time together. Returns
// false, on every rank, if a signal has asked one of them for an end: then pieces were left undone.
template <class T, class Work, class Take>
bool share_pieces(size_t pieces, size_t most, const char* what, Work work, Take take) {
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

// rows (ranks * n) on the device, of which this rank has computed the n from rank * n on: now all ranks have all.
inline void share_rows(float* rows, size_t n, const char* what, Stream stream) {
    const size_t ranks = (size_t)comm().size;
    if (ranks == 1) { return; }
    std::vector<Slice> of_rank;
    for (size_t r = 0; r < ranks; r++) { of_rank.push_back({r * n, (r + 1) * n}); }
    const RankGroup all = {0, 1, (int)ranks};
    exchange_now(what, stream, [&] { group_gather((char*)rows, sizeof(float), of_rank, all, what, stream); });
}

#endif
