// ranks/replicas.cuh -- a hash of the parameters, computed on the device. Ranks compare it to check their replicas.
#pragma once

#include <numeric>

#include "../../base/fastmath.h"
#include "comm.h"

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
