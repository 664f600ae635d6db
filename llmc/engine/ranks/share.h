// ranks/share.h -- work in pieces, shared among the ranks: what one process computes, in the order of its pieces.
#pragma once

#include "exchange.cuh"

// A collective. work(i, out) computes the result of piece i, of at most `most` elements, on one of the ranks;
// take(i, result) is called on every rank, for every piece, in order. In round k, rank r computes piece k * ranks + r,
// so the pieces of a round are neighbours, which take about the same time. Returns false, on every rank, if a signal
// has stopped one of them: then some pieces were not computed.
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

// rows (ranks * n) on the device: this rank has computed n of them, from rank * n on, and now gets the rest.
inline void share_rows(float* rows, size_t n, const char* what, Stream stream) {
    const size_t ranks = (size_t)comm().size;
    if (ranks == 1) { return; }
    std::vector<Slice> of_rank;
    for (size_t r = 0; r < ranks; r++) { of_rank.push_back({r * n, (r + 1) * n}); }
    const RankGroup all = {0, 1, (int)ranks};
    exchange_now(what, stream, [&] { group_gather((char*)rows, sizeof(float), of_rank, all, what, stream); });
}
