// ranks/sums.cuh -- gradients summed over the ranks, in the order in which one rank would sum them.
#ifndef LLMC_RANKS_SUMS_CUH
#define LLMC_RANKS_SUMS_CUH

#include "comm.h"

// to += from
__global__ void comm_add_kernel(float* to, const float* from, size_t n) {
    const GridSpan s = grid_span(n);
    for (size_t i = s.begin; i < s.end; i += s.step) { to[i] += from[i]; }
}

// data (n) becomes its sum over the ranks, with the same bits on all of them. In round `step` = 1, 2, 4, ... rank r, a
// multiple of 2 step, adds what rank r + step has:
//
//     rank  0   1   2   3
//           +<--'   +<--'       step 1
//           +<------'           step 2
//
// This continues the binary tree that each rank has built over its own micro-batches. So if every rank has 2^k of them,
// neighbours in the order of the step, the whole is one tree whatever the number of ranks, and its sum does not depend
// on that number. A library's all-reduce is free to add in another order for another size.
inline void comm_tree_sum(float* data, size_t n, const char* what, Stream stream) {
    Comm& c = comm();
    if (c.size == 1) { return; }
    (void)data; (void)n; (void)what; (void)stream;
#if defined(USE_MPI)
    // one chunk after the other, so that the buffers stay small
    if (c.scratch == nullptr) { c.scratch = (float*)device_malloc(sizeof(float) * c.chunk); }
    for (size_t i = 0; i < n; i += c.chunk) {
        const size_t m = std::min(c.chunk, n - i);
        for (int step = 1; step < c.size; step *= 2) {
            if (c.rank & step) {                            // this rank's part is complete: pass it on
                comm_send(data + i, m, c.rank - step, what, stream);
                break;
            }
            if (c.rank + step >= c.size) { continue; }      // no such rank
            comm_receive(c.scratch, m, c.rank + step, what, stream);
            launch(comm_add_kernel, Grid::over(m, stream), data + i, c.scratch, m);
        }
    }
    // rank 0 has the sum
    for (size_t i = 0; i < n; i += c.chunk) { comm_share(data + i, std::min(c.chunk, n - i), what, stream); }
#if defined(USE_NCCL)
    if (c.nccl) { nccl_wait(stream, what); }
#endif
#endif
}

#endif
