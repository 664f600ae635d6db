// files/checkpoint.h -- a run's state on disk: written whole or not at all, verified before it is used.
//
//   OUT/step_00001000/  model.safetensors        parameters under Hugging Face's names
//                       config.json              the model's shape, transformers' keys plus "position"
//                       optimizer_0.state        m.<tensor>, v.<tensor>: Adam's moments in the internal layout, flat,
//                                                as a safetensors file that no glob for *.safetensors meets
//                       state.json               the trainer's own: step, next sample, guard, options
//                       manifest.json            size and checksum of each of the above, and its own checksum
//
// A checkpoint is written under a temporary name, every file is fsynced, and one rename publishes it. So a killed run
// leaves the old checkpoint or the new one, and left-overs whose names begin with a dot, which the next run removes.
#ifndef LLMC_FILES_CHECKPOINT_H
#define LLMC_FILES_CHECKPOINT_H

#include <memory>

#include "../base/common.h"
#include "../base/json.h"
#include "outdir.h"
#include "safetensors.h"
#include "../base/tensor.h"
#include "weights.h"

// What a checkpoint holds, as views of the trainer's (device) memory. No kernel may still be writing there.
struct Checkpoint {
    const TensorTable* table = nullptr;
    const std::vector<FileTensor>* files = nullptr;                 // the names of the parameters in the file
    float* params = nullptr;                                        // (table->total)
    float *m = nullptr, *v = nullptr;                               // likewise: Adam's moments; may be null
    Json config;                                                    // becomes config.json
    Json state;                                                     // becomes state.json
    std::vector<std::pair<std::string, std::string>> extra;         // further small files: name, contents
};

// The parameters as the items of a safetensors file. Nothing is copied yet: each item fetches its rows from the device
// when write_safetensors() asks for them. FileTensors that are transposed are (out,in) here, as our matmul has them,
// and (in,out) in Hugging Face's GPT-2 file.
inline std::vector<SafetensorsItem> model_items(const Checkpoint& c) {
    auto turned = std::make_shared<std::vector<float>>();           // the transposed matrix that is being written
    std::vector<SafetensorsItem> items;
    for (const FileTensor& f : *c.files) {
        const FileView view = file_view(*c.table, f);
        const float* from = c.params + view.offset;
        if (!view.transposed) {                     // row0 counts rows of the tensor, which lie in one piece
            items.push_back({f.name, view.shape(), [=](float* out, size_t row0, size_t rows) {
                copy_to_host(out, from + row0 * view.cols, rows * view.cols * sizeof(float), Stream(0));
            }});
            continue;
        }
        items.push_back({f.name, view.shape(), [=](float* out, size_t row0, size_t rows) {
            if (row0 == 0) {                        // the first block of this matrix: fetch and transpose all of it
                std::vector<float> host(view.size());
                turned->resize(view.size());
                copy_to_host(host.data(), from, view.size() * sizeof(float), Stream(0));
                transpose_matrix(turned->data(), host.data(), view.rows, view.cols);
            }
            // a row of the file is a column of the tensor: view.rows elements
            memcpy(out, turned->data() + row0 * view.rows, rows * view.rows * sizeof(float));
        }});
    }
    return items;
}

// A tensor's m or v: elements data[offset .. offset + size), a vector "m.<tensor>" in the file, which keeps our layout.
struct MomentView { std::string name; size_t offset, size; float* data; };
// all m, then all v; none of those that are null
inline std::vector<MomentView> moment_views(const Checkpoint& c) {
    std::vector<MomentView> views;
    for (float* data : {c.m, c.v}) {
        for (size_t i = 0; data != nullptr && i < c.table->specs.size(); i++) {
            const TensorSpec& s = c.table->specs[i];
            views.push_back({(data == c.m ? "m." : "v.") + s.name, c.table->offsets[i], s.size(), data});
        }
    }
    return views;
}

constexpr const char* OPTIMIZER_FILE = "optimizer_0.state";
constexpr const char* OLD_OPTIMIZER_FILE = "optimizer_0.safetensors";     // its name in checkpoints of before
// the file of moments that a checkpoint has
inline std::string optimizer_path(const std::string& dir) {
    const std::string path = dir + "/" + OPTIMIZER_FILE, old = dir + "/" + OLD_OPTIMIZER_FILE;
    return path_exists(old) && !path_exists(path) ? old : path;
}

// the moments as the items of a safetensors file
inline std::vector<SafetensorsItem> optimizer_items(const Checkpoint& c) {
    std::vector<SafetensorsItem> items;
    for (const MomentView& view : moment_views(c)) {
        items.push_back({view.name, {view.size}, [view](float* out, size_t first, size_t count) {
            copy_to_host(out, view.data + view.offset + first, count * sizeof(float), Stream(0));
        }});
    }
    return items;
}

// Where each tensor's piece begins in the whole tensor. Always 0 today: the format leaves room for an optimizer that is
// split over ranks, and load_checkpoint() refuses such a piece.
inline Json optimizer_metadata(const Checkpoint& c) {
    Json starts = Json::object();
    for (const TensorSpec& s : c.table->specs) { starts["start." + s.name] = "0"; }
    return starts;
}

// ----------------------------------------------------------------------------------------------------------
// saving

// what a checkpoint takes on disk, rounded up generously: 1 MiB and 256 bytes per tensor for the headers
inline uint64_t checkpoint_bytes(const Checkpoint& c) {
    uint64_t bytes = (1u << 20) + json_text(c.config, 2).size() + json_text(c.state, 2).size() + c.files->size() * 256;
    for (const FileTensor& f : *c.files) { bytes += file_view(*c.table, f).size() * sizeof(float); }
    for (const MomentView& view : moment_views(c)) { bytes += view.size * sizeof(float); }
    for (const auto& file : c.extra) { bytes += file.second.size(); }
    return bytes;
}

// Writes and fsyncs every file of a checkpoint into `dir`, which may not hold any yet, and the directory itself.
inline void write_checkpoint_files(const std::string& dir, int step, const Checkpoint& c) {
    std::vector<std::pair<std::string, FileSum>> sums;
    io_mkdir(dir);
    sums.push_back({"model.safetensors", write_safetensors(dir + "/model.safetensors", model_items(c))});
    sums.push_back({"config.json", write_text(dir + "/config.json", json_text(c.config, 2) + "\n")});
    if (c.m != nullptr || c.v != nullptr) {
        const std::string name = OPTIMIZER_FILE;
        sums.push_back({name, write_safetensors(dir + "/" + name, optimizer_items(c), optimizer_metadata(c))});
    }
    sums.push_back({"state.json", write_text(dir + "/state.json", json_text(c.state, 2) + "\n")});
    for (const auto& file : c.extra) { sums.push_back({file.first, write_text(dir + "/" + file.first, file.second)}); }
    write_text(dir + "/manifest.json", manifest_text(step, sums));      // last, as it sums the others
    io_fsync_directory(dir);
}

// Deletes all but the last `keep` checkpoints up to `step`, which was just saved (keep 0: deletes none). Steps that are
// multiples of `major` stay. Checkpoints after `step` are those that this run fell back from when it resumed; they are
// replaced when it reaches them.
inline void retire_checkpoints(const std::string& out, int step, int keep, int major) {
    std::vector<int> steps = list_checkpoints(out);             // ascending; what is left at the end is deleted
    steps.erase(std::upper_bound(steps.begin(), steps.end(), step), steps.end());
    if (keep <= 0 || steps.size() <= (size_t)keep) { return; }
    steps.resize(steps.size() - (size_t)keep);
    steps.erase(std::remove_if(steps.begin(), steps.end(), [=](int s) { return major > 0 && s % major == 0; }),
                steps.end());
    if (steps.empty()) { return; }
    verify_checkpoint(out + "/" + step_name(step));     // delete nothing before the new one was read back
    std::string failure;                                // one that cannot be deleted does not keep the others
    for (int s : steps) {
        const std::string trash = out + "/.trash_" + step_name(s);      // one rename, so that it never looks half there
        try {
            remove_checkpoint_files(trash);
            io_rename(out + "/" + step_name(s), trash);
            remove_checkpoint_files(trash);
        } catch (const Error& e) {
            failure = e.what();
        }
    }
    check(failure.empty(), "%s", failure.c_str());
}

// Writes OUT/step_<step>, publishes it, then deletes old ones; returns its path. After an error the checkpoints of
// before are still there (and the new one too, if only the fsync of its rename failed).
inline std::string save_checkpoint(const std::string& out, int step, const Checkpoint& c, int keep, int major) {
    const std::string name = step_name(step), path = out + "/" + name;
    const std::string temporary = out + "/.tmp_" + name, old = out + "/.old_" + name;
    bool aside = false;                     // the checkpoint of this name, if there is one, is called `old` now
    bool published = false;                 // the new one has the name
    const uint64_t bytes = checkpoint_bytes(c);
    const uint64_t available = check_disk_space(out, bytes);
    try {
        // 1 write under a temporary name
        remove_checkpoint_files(temporary);
        write_checkpoint_files(temporary, step, c);
        // 2 make room: a rename onto a directory that has files fails
        if (name_is_taken(path)) {
            remove_checkpoint_files(old);
            io_rename(path, old);
            aside = true;
        }
        // 3 publish. A kill between 2 and 3 leaves `old`, which clean_output_directory() puts back.
        io_rename(temporary, path);
        published = true;
        io_fsync_directory(out);
    } catch (const Error& e) {
        try {                               // take back a replacement that the disk did not confirm
            if (aside && published) { io_rename(path, temporary); }
            if (aside) { io_rename(old, path); }
            if (!published) { remove_checkpoint_files(temporary); }
            clean_output_directory(out);    // fsyncs the renames before it removes anything
        } catch (const Error&) {}           // the first error is the one to report
        throw Error(e.code, strprintf("a checkpoint needs %s, %s were free: %s", format_bytes((double)bytes).c_str(),
                                      format_bytes((double)available).c_str(), e.what()));
    }
    try {                                   // 4 now that the new one is safe, delete
        remove_checkpoint_files(old);
        retire_checkpoints(out, step, keep, major);
    } catch (const Error& e) {
        say("warning: %s is saved, but old checkpoints could not be deleted: %s", path.c_str(), e.what());
    }
    return path;
}

// ----------------------------------------------------------------------------------------------------------
// loading

// An error unless the file holds exactly these tensors, all in float32.
inline void check_tensors(const Safetensors& file, const std::vector<std::pair<std::string, Shape>>& wanted) {
    const char* path = file.file.path.c_str();
    for (const auto& want : wanted) {
        const SafetensorsEntry& e = file.entry(want.first);
        check(e.shape == want.second && e.dtype == "F32", "%s: %s: expected F32 %s, got %s %s", path, e.name.c_str(),
              shape_text(want.second).c_str(), e.dtype.c_str(), shape_text(e.shape).c_str());
    }
    for (const SafetensorsEntry& e : file.entries) {
        const bool known =
            std::any_of(wanted.begin(), wanted.end(), [&](const auto& want) { return want.first == e.name; });
        check(known, "%s: expected %zu tensors, got %zu; this model has no %s", path, wanted.size(),
              file.entries.size(), e.name.c_str());
    }
}

// Restores params, m and v bit for bit, and state, from a directory that find_checkpoint() returned. Everything is
// checked, against c.config too unless that is null, before the first element of the trainer's memory changes.
inline void load_checkpoint(const std::string& dir, Checkpoint& c) {
    // 1 check the configuration and the parameters
    const Safetensors model(dir + "/model.safetensors");
    std::vector<std::pair<std::string, Shape>> wanted;
    for (const FileTensor& f : *c.files) { wanted.push_back({f.name, file_view(*c.table, f).shape()}); }
    const std::string config_path = dir + "/config.json", state_path = dir + "/state.json";
    const Json config = read_json(config_path);
    if (!c.config.is_null()) { check_config(config, c.config, config_path); }
    check_tensors(model, wanted);
    // 2 check the moments; a model that is only used has none
    const std::vector<MomentView> moments = moment_views(c);
    std::unique_ptr<Safetensors> optimizer;
    if (!moments.empty()) {
        optimizer = std::make_unique<Safetensors>(optimizer_path(dir));
        std::vector<std::pair<std::string, Shape>> wanted_moments;
        for (const MomentView& view : moments) { wanted_moments.push_back({view.name, {view.size}}); }
        check_tensors(*optimizer, wanted_moments);
        const Json starts = optimizer_metadata(c);
        for (const auto& item : starts.items()) {
            check(json_string(optimizer->metadata, item.key(), optimizer->file.path) == item.value(),
                  "%s: %s: expected 0, as only whole tensors can be loaded", optimizer->file.path.c_str(),
                  item.key().c_str());
        }
    }
    Json state = read_json(state_path);

    // 3 read
    for (const FileTensor& f : *c.files) {
        const SafetensorsEntry& e = model.entry(f.name);
        load_view(c.params, file_view(*c.table, f), f.transposed, [&](float* out, size_t first, size_t count) {
            model.read_elements(e, out, first, count);
        });
    }
    for (const MomentView& view : moments) {
        const SafetensorsEntry& e = optimizer->entry(view.name);
        const FileView flat = {view.offset, view.size, 1, true, false};     // a vector
        load_view(view.data, flat, false,
                  [&](float* out, size_t first, size_t count) { optimizer->read_elements(e, out, first, count); });
    }
    c.state = std::move(state);
}

#endif
