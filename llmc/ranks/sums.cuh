// ranks/sums.cuh -- gradients summed over the ranks, in the order in which one rank would sum them.
#ifndef LLMC_RANKS_SUMS_CUH
#define LLMC_RANKS_SUMS_CUH

#include "comm.h"

// to += from
__global__ void comm_add_kernel(float* to, const float* from, size_t n) {
    const GridSpan s = grid_span(n);
    for (size_t i = s.begin; i < s.end; i += s.step) { to[i] += from[i]; }
}

// data (n) becomes its sum over the ranks, the same bits on all of them. Rank r adds what r + 1 has, then r + 2, r + 4, ...: the
// binary tree that one rank builds over its micro-batches. So when every rank has 2^k micro-batches, neighbours in the step's
// order, no number of ranks changes the sum. Where NCCL and MPI are free to choose, they take another order for another size.
inline void comm_tree_sum(float* data, size_t n, const char* what, Stream stream) {
    Comm& c = comm();
    if (c.size == 1) { return; }
    (void)data; (void)n; (void)what; (void)stream;
#if defined(USE_MPI)
    if (c.scratch == nullptr) { c.scratch = (float*)device_malloc(sizeof(float) * c.chunk); }
    for (size_t i = 0; i < n; i += c.chunk) {
        const size_t m = std::min(c.chunk, n - i);
        for (int step = 1; step < c.size; step *= 2) {
            if (c.rank & step) { comm_send(data + i, m, c.rank - step, what, stream); break; }
            if (c.rank + step >= c.size) { continue; }
            comm_receive(c.scratch, m, c.rank + step, what, stream);
            launch(comm_add_kernel, Grid::over(m, stream), data + i, c.scratch, m);
        }
    }
    for (size_t i = 0; i < n; i += c.chunk) { comm_share(data + i, std::min(c.chunk, n - i), what, stream); }
#if defined(USE_NCCL)
    if (c.nccl) { nccl_wait(stream, what); }
#endif
#endif
}

#endif
