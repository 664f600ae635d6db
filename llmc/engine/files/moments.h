// files/moments.h -- Adam's moments in a checkpoint: optimizer_RANK.state, a safetensors file for each rank that holds
// a part of them. Any number of ranks can read the files of any other number.
#pragma once

#include <map>
#include <memory>
#include <tuple>

#include "../../base/tensor.h"
#include "outdir.h"
#include "safetensors.h"
#include "weights.h"

// The moments that this process holds of the tensors of a table, in (device) memory
struct Moments {
    const TensorTable* table = nullptr;
    float *m = nullptr, *v = nullptr;                               // may be null
    bool complete = true;                                           // true: all, in the layout of `table`
    std::vector<TensorPiece> held;                                  // false: these pieces
};

// Elements first .. first + size - 1 of a tensor's m or v, in the order of its layers. In the file they are a vector
// "m.<tensor>" if they are all of it, otherwise "m.<tensor>@<first>".
struct MomentRun {
    std::string name;                   // "m.<tensor>"
    size_t first, size;
    size_t whole;                       // elements of the tensor
    float* data;
    std::vector<TensorPiece> pieces;    // their places in data, in order

    bool all() const { return size == whole; }
    std::string file_name() const { return all() ? name : name + "@" + std::to_string(first); }
    // Calls f(where, from, n) for the pieces of elements begin .. end - 1 of the tensor: n of them at `where`, the
    // first being number `from`
    template <class F> void each(size_t begin, size_t end, F f) const {
        for (const TensorPiece& p : pieces) {
            const size_t from = std::max(begin, p.first), to = std::min(end, p.first + p.size);
            if (from < to) { f(data + p.at + (from - p.first), from, to - from); }
        }
    }
};
// all m, then all v; null ones are left out
inline std::vector<MomentRun> moment_runs(const Moments& c) {
    std::vector<TensorPiece> held = c.complete ? c.table->pieces({0, c.table->total}) : c.held;
    const auto before = [](const TensorPiece& a, const TensorPiece& b) {
        return std::tie(a.tensor, a.first) < std::tie(b.tensor, b.first);
    };
    std::sort(held.begin(), held.end(), before);
    std::vector<MomentRun> runs;
    for (float* data : {c.m, c.v}) {
        size_t last = SIZE_MAX;                             // the tensor of the last run
        for (size_t i = 0; data != nullptr && i < held.size(); i++) {
            const TensorPiece& p = held[i];
            const TensorSpec& s = c.table->specs[p.tensor];
            if (p.tensor != last || runs.back().first + runs.back().size != p.first) {
                runs.push_back({(data == c.m ? "m." : "v.") + s.name, p.first, 0, s.size(), data, {}});
            }
            last = p.tensor;
            runs.back().size += p.size;
            runs.back().pieces.push_back(p);
        }
    }
    return runs;
}

inline std::string optimizer_file(int rank) { return strprintf("optimizer_%d.state", rank); }
constexpr const char* OLD_OPTIMIZER_FILE = "optimizer_0.safetensors";     // its name in old checkpoints
// the files of moments in a checkpoint, from its manifest
inline std::vector<std::string> optimizer_paths(const std::string& dir) {
    std::vector<std::string> paths;
    int step;
    for (const auto& file : read_manifest(dir + "/manifest.json", step)) {
        const std::string& name = file.first;
        const bool moments = starts_with(name, "optimizer_") && ends_with(name, ".state");
        if (moments || name == OLD_OPTIMIZER_FILE) { paths.push_back(dir + "/" + name); }
    }
    check(!paths.empty(), "%s: has no optimizer_0.state, without which training cannot continue", dir.c_str());
    return paths;
}

// the moments as the items of a safetensors file
inline std::vector<SafetensorsItem> optimizer_items(const Moments& c) {
    std::vector<SafetensorsItem> items;
    for (const MomentRun& run : moment_runs(c)) {
        items.push_back({run.file_name(), {run.size}, [run](float* out, size_t first, size_t count) {
            const size_t begin = run.first + first;
            run.each(begin, begin + count, [&](const float* data, size_t from, size_t n) {
                copy_to_host(out + (from - begin), data, n * sizeof(float), Stream(0));
            });
        }});
    }
    return items;
}

// For old readers: where a tensor begins that is complete in the file
inline Json optimizer_metadata(const Moments& c) {
    Json starts = Json::object();
    for (const MomentRun& run : moment_runs(c)) {
        if (run.all()) { starts["start." + run.name.substr(2)] = "0"; }
    }
    return starts;
}

// The moments in the files of a checkpoint, from any number of ranks, each with any part of each tensor.
struct StoredMoments {
    struct Run { const Safetensors* file; const SafetensorsEntry* entry; size_t first, size; };
    std::vector<std::unique_ptr<Safetensors>> files;
    std::map<std::string, std::vector<Run>> runs;           // by "m.<tensor>", in order

    // An error unless they are exactly the elements of the tensors in c's table
    StoredMoments(const std::string& dir, const Moments& c) {
        for (const std::string& path : optimizer_paths(dir)) {
            files.push_back(std::make_unique<Safetensors>(path));
            for (const SafetensorsEntry& e : files.back()->entries) { add(*files.back(), e, c); }
        }
        for (const char* kind : {"m.", "v."}) {
            for (const TensorSpec& s : c.table->specs) { check_whole(kind + s.name, s.size()); }
        }
    }
    // the elements of one of this process's runs
    void read(const MomentRun& run) const {
        const size_t block = COPY_BLOCK;
        std::vector<float> host;
        for (const Run& r : runs.at(run.name)) {
            const size_t begin = std::max(run.first, r.first), end = std::min(run.first + run.size, r.first + r.size);
            for (size_t at = begin; at < end; at += block) {
                const size_t n = std::min(block, end - at);
                host.resize(n);
                r.file->read_elements(*r.entry, host.data(), at - r.first, n);
                run.each(at, at + n, [&](float* data, size_t from, size_t count) {
                    copy_to_device(data, host.data() + (from - at), count * sizeof(float), Stream(0));
                });
            }
        }
    }

private:
    void add(const Safetensors& file, const SafetensorsEntry& e, const Moments& c) {
        const char *path = file.file.path.c_str(), *name = e.name.c_str();
        // 1 its name
        const size_t sign = e.name.rfind('@');
        const std::string whole = e.name.substr(0, sign);
        const bool moment = starts_with(whole, "m.") || starts_with(whole, "v.");
        const int tensor = moment ? c.table->find(whole.substr(2)) : -1;
        check(tensor >= 0, "%s: expected moments of the model's %zu tensors; this model has no %s", path,
              c.table->specs.size(), name);
        size_t first = 0;
        if (sign != std::string::npos) {
            const std::string number = e.name.substr(sign + 1);
            const bool good = !number.empty() && number.size() < 19 &&
                              number.find_first_not_of("0123456789") == std::string::npos;
            check(good, "%s: %s: expected the number of its first element after '@'", path, name);
            first = (size_t)strtoull(number.c_str(), nullptr, 10);
        }
        const std::string start = "start." + whole.substr(2);
        check(!file.metadata.contains(start) || json_string(file.metadata, start, file.file.path) == "0",
              "%s: %s: expected 0", path, start.c_str());
        // 2 its elements
        const size_t size = c.table->specs[(size_t)tensor].size();
        const bool inside = e.shape.size() == 1 && first <= size && e.shape[0] <= size - first &&
                            (sign != std::string::npos || e.shape[0] == size);
        const std::string of = sign == std::string::npos ? "" : strprintf(" of %zu at the most", size - first);
        check(inside && e.dtype == "F32", "%s: %s: expected F32 %s%s, got %s %s", path, name,
              shape_text({size - first}).c_str(), of.c_str(), e.dtype.c_str(), shape_text(e.shape).c_str());
        runs[whole].push_back({&file, &e, first, e.shape[0]});
    }
    void check_whole(const std::string& name, size_t size) {
        std::vector<Run>& all = runs[name];
        std::sort(all.begin(), all.end(), [](const Run& a, const Run& b) { return a.first < b.first; });
        size_t at = 0;
        const char* path = files[0]->file.path.c_str();
        check(!all.empty(), "%s: %s is missing", path, name.c_str());
        for (const Run& run : all) {
            check(run.first == at, "%s: %s: expected its element %zu next, got %zu (another rank's file is missing, or "
                  "there twice?)", run.file->file.path.c_str(), name.c_str(), at, run.first);
            at += run.size;
        }
        check(at == size, "%s: %s: expected %zu elements in all files, got %zu", path, name.c_str(), size, at);
    }
};
