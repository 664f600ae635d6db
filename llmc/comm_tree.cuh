// comm_tree.cuh -- gradients summed over the ranks, in the order in which one rank would sum them.
#ifndef LLMC_COMM_TREE_CUH
#define LLMC_COMM_TREE_CUH

#include "comm.h"

// to += from
__global__ void comm_add_kernel(float* to, const float* from, size_t n) {
    const GridSpan s = grid_span(n);
    for (size_t i = s.begin; i < s.end; i += s.step) { to[i] += from[i]; }
}

// Which of a machine's GPUs is this rank's; 0 in a CPU build
inline int comm_device() {
#if defined(CUDA_BUILD) && !defined(SIMT)
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) { return 0; }      // find_gpu says why
    return comm().local_rank % count;
#else
    return 0;
#endif
}

// After the device is chosen. NCCL wants a GPU for every rank; ranks that share one exchange through the host.
inline void comm_connect_devices() {
#if defined(USE_NCCL)
    Comm& c = comm();
    if (c.size == 1) { return; }
    char id[64] = "";
    int device = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetPCIBusId(id, sizeof(id) - 1, device));
    char place[256] = "";
    gethostname(place, sizeof(place) - 65);
    strcat(place, id);
    std::vector<uint64_t> all((size_t)c.size);
    const uint64_t mine = checksum(place);
    comm_all_gather(all.data(), &mine, 1, "start");
    std::sort(all.begin(), all.end());
    c.nccl = std::adjacent_find(all.begin(), all.end()) == all.end();
    if (!c.nccl) { return; }
    c.chunk = 16 << 20;
    ncclUniqueId unique = {};
    if (c.rank == 0) { nccl_check(ncclGetUniqueId(&unique), "NCCL's start"); }
    comm_broadcast(&unique, sizeof(unique), "NCCL's start");
    nccl_start(unique);
#endif
}

inline std::string comm_description() {
    const Comm& c = comm();
    if (c.size == 1) { return "1 rank"; }
    return strprintf("%d ranks, gradients by %s", c.size, c.nccl ? "NCCL" : "MPI");
}

#if defined(USE_MPI)
// MPI's buffer for a chunk at `data`: that itself, or the staging buffer of a build whose device it cannot reach
inline float* comm_host_buffer(float* data) {
#if defined(CUDA_BUILD)
    Comm& c = comm();
    if (c.staging == nullptr) { c.staging = (float*)pinned_malloc(sizeof(float) * c.chunk); }
    (void)data;
    return c.staging;
#else
    return data;
#endif
}

inline void comm_send(float* data, size_t n, int to, const char* what, Stream stream) {
#if defined(USE_NCCL)
    if (comm().nccl) { nccl_send(data, n, to, what, stream); return; }
#endif
    float* host = comm_host_buffer(data);
    if (host != data) { copy_to_host(host, data, sizeof(float) * n, stream); }
    MPI_Request request;
    mpi_check(MPI_Isend(host, (int)n, MPI_FLOAT, to, 0, MPI_COMM_WORLD, &request), what);
    mpi_wait(request, what, to);
}

inline void comm_receive(float* data, size_t n, int from, const char* what, Stream stream) {
#if defined(USE_NCCL)
    if (comm().nccl) { nccl_receive(data, n, from, what, stream); return; }
#endif
    float* host = comm_host_buffer(data);
    MPI_Request request;
    mpi_check(MPI_Irecv(host, (int)n, MPI_FLOAT, from, 0, MPI_COMM_WORLD, &request), what);
    mpi_wait(request, what, from);
    if (host != data) { copy_to_device(data, host, sizeof(float) * n, stream); }
}

inline void comm_share(float* data, size_t n, const char* what, Stream stream) {        // rank 0's
#if defined(USE_NCCL)
    if (comm().nccl) { nccl_broadcast(data, n, what, stream); return; }
#endif
    float* host = comm_host_buffer(data);
    if (host != data && comm().rank == 0) { copy_to_host(host, data, sizeof(float) * n, stream); }
    comm_broadcast(host, sizeof(float) * n, what);
    if (host != data && comm().rank != 0) { copy_to_device(data, host, sizeof(float) * n, stream); }
}
#endif

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
