// run/same_on_ranks.h -- checks that all ranks have the same program and flags, and the same data, model and --out,
// which may lie on different disks. Otherwise each rank would silently train something else.
//
// Every function here is a collective. A difference is the same error on every rank, with both values in it.
#pragma once

#include <numeric>
#include <random>

#include "../../base/fastmath.h"
#include "../files/outdir.h"
#include "../ranks/parameters.cuh"
#include "../ranks/patience.h"
#include "data_record.h"

using Facts = std::vector<std::pair<std::string, std::string>>;     // keys, the same on all ranks, and their values

// Dies unless all ranks have these facts: one hash is compared, and where it differs, key after key.
inline void check_same(const Facts& facts) {
    const size_t ranks = (size_t)comm().size, room = 1024;
    const auto stray = [&](uint64_t mine) {                 // the first rank that differs from rank 0; ranks: none
        std::vector<uint64_t> all(ranks);
        comm_all_gather(all.data(), &mine, 1, "comparison of the ranks");
        return (size_t)(std::find_if(all.begin(), all.end(), [&](uint64_t h) { return h != all[0]; }) - all.begin());
    };
    uint64_t hash = 0;
    for (const auto& [key, value] : facts) { hash = checksum(value.data(), value.size(), hash); }
    if (ranks == 1 || stray(hash) == ranks) { return; }
    for (const auto& [key, value] : facts) {
        const size_t r = stray(checksum(value));
        if (r == ranks) { continue; }
        std::string shown = printable(value, 250);          // escaped, at most 4 bytes each
        shown.resize(room);
        std::vector<char> all(room * ranks);
        comm_all_gather(all.data(), shown.data(), room, "comparison of the ranks");
        die(EXIT_BAD_INPUT, "%s: expected the same on all ranks, got %s on rank %zu and %s on rank 0", key.c_str(),
            &all[room * r], r, all.data());
    }
}

// The program, as different builds may round, or exchange messages, differently; and all flags but the number of
// threads
inline void check_same_start(const Options& o) {
    if (comm().size == 1) { return; }
    const FileSum sum = sum_file("/proc/self/exe");
    Facts facts = {{"the program", strprintf("a file of %llu bytes, checksum %016llx", (unsigned long long)sum.bytes,
                                             (unsigned long long)sum.sum)}};
    for_each_option(o, [&](const OptionRow& row, const auto& value) {
        if (!(row.programs & o.program) || strcmp(row.name, "threads") == 0) { return; }
        facts.push_back({std::string("--") + row.name, "'" + option_text(value) + "'"});
    });
    check_same(facts);
}

// The files of a flag: their number, names, sizes and sampled contents
inline void check_same_files(const std::string& flag, const std::vector<std::string>& paths) {
    if (comm().size == 1) { return; }
    uint64_t sum = paths.size(), bytes = 0;
    for (const std::string& path : paths) {
        const File file(path);
        const uint64_t facts[] = {sum, checksum(path.substr(path.rfind('/') + 1)), file.size, sampled_sum(file)};
        sum = checksum(facts, sizeof(facts));
        bytes += file.size;
    }
    check_same({{flag, strprintf("%zu files, %llu bytes, checksum %08x", paths.size(), (unsigned long long)bytes,
                                 (unsigned)sum)}});
}

// The model of a flag, which every rank reads; the manifest has the checksum of all its bytes
inline void check_same_model(const std::string& flag, const std::string& path) {
    std::vector<std::string> files;
    for (const std::string name : {"", "/manifest.json", "/state.json", "/config.json", "/model.safetensors",
                                   "/model.safetensors.index.json"}) {
        if (path_exists(path + name) && !is_directory(path + name)) { files.push_back(path + name); }
    }
    check_same_files(flag + " " + path, files);
}

// ----------------------------------------------------------------------------------------------------------
// the weights

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
    std::string who;
    settle_weights(p);
    const size_t words = p.table.total * sizeof(floatX) / sizeof(float);
    const bool agree = comm_replicas_agree(replica_hash((const float*)p.weights, words, p.stream), &who);
    check(agree, "%s: %s", who.c_str(), why);
}

// ----------------------------------------------------------------------------------------------------------
// --out

// Dies unless all ranks can write into a directory and see what rank 0 has written there. A network file system may
// show it late.
inline void check_shared_directory(const std::string& out) {
    if (comm().size == 1) { return; }
    const std::string path = out + "/.tmp_step_shared";         // a name that clean_output_directory() removes
    const std::string text = comm_text(std::to_string(std::random_device()()), "the probe of --out");
    rank0_works([&] { write_text(path, text); }, "the probe of --out");
    const double end = wall_seconds() + std::min(10.0, comm().timeout / 2);
    const auto shared = [&] { return path_exists(path) && read_file(path) == text && access(out.c_str(), W_OK) == 0; };
    while (!shared() && wall_seconds() < end) { usleep(20000); }
    std::vector<char> all((size_t)comm().size);
    const char mine = shared();
    comm_all_gather(all.data(), &mine, 1, "the probe of --out");
    if (comm().rank == 0) { io_unlink(path); }
    const size_t blind = (size_t)(std::find(all.begin(), all.end(), 0) - all.begin());
    check(blind == all.size(), "--out %s: rank %zu cannot write there, or cannot read what rank 0 has written: "
          "expected a directory that all ranks share, as each saves its part of the moments there", out.c_str(), blind);
}
