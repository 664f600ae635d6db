// files/checkpoint.h -- a run's state on disk: written whole or not at all, verified before it is used.
//
//   OUT/step_00001000/  model.safetensors        parameters under Hugging Face's names
//                       config.json              the model's shape, transformers' keys plus "position"
//                       optimizer_0.state        m.<tensor>, v.<tensor>: Adam's moments, tensor by tensor, flat, as a
//                                                safetensors file that no glob for *.safetensors meets; of ranks that
//                                                share them one file each, with m.<tensor>@<its first element>
//                       state.json               the trainer's own: step, next sample, guard, options
//                       manifest.json            size and checksum of each of the above, and its own checksum
//
// A checkpoint is written under a temporary name, every file is fsynced, and one rename publishes it. So a killed run
// leaves the old checkpoint or the new one, and left-overs whose names begin with a dot, which the next run removes.
#pragma once

#include <memory>

#include "../../base/common.h"
#include "../json.h"
#include "outdir.h"
#include "moments.h"
#include "safetensors.h"
#include "weights.h"

// What a checkpoint holds, as views of the trainer's (device) memory. No kernel may still be writing there.
struct Checkpoint : Moments {
    const std::vector<FileTensor>* files = nullptr;                 // the names of the parameters in the file
    float* params = nullptr;                                        // (table->total)
    Json config;                                                    // becomes config.json
    Json state;                                                     // becomes state.json
    std::vector<std::pair<std::string, std::string>> extra;         // further small files: name, contents
};

// The parameters as the items of a safetensors file. Nothing is copied yet: each item fetches its rows from the device
// when write_safetensors() wants them. FileTensors that are transposed are (out,in) here, as our matmul has them,
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

// ----------------------------------------------------------------------------------------------------------
// saving

// the size of a checkpoint on disk, rounded up generously: 1 MiB and 256 bytes per tensor for the headers
inline uint64_t checkpoint_bytes(const Checkpoint& c) {
    uint64_t bytes = (1u << 20) + json_text(c.config, 2).size() + json_text(c.state, 2).size() + c.files->size() * 256;
    for (const FileTensor& f : *c.files) { bytes += file_view(*c.table, f).size() * sizeof(float); }
    for (const float* moments : {c.m, c.v}) {
        for (const TensorSpec& s : c.table->specs) { bytes += moments == nullptr ? 0 : s.size() * sizeof(float); }
    }
    for (const auto& file : c.extra) { bytes += file.second.size(); }
    return bytes;
}

// Deletes all but the last `keep` checkpoints up to `step`, which was just saved (keep 0: deletes none). Checkpoints
// after `step` are those that this run fell back from when it resumed; they are replaced when it reaches them.
inline void retire_checkpoints(const std::string& out, int step, int keep) {
    std::vector<int> steps = list_checkpoints(out);             // ascending; what is left at the end is deleted
    steps.erase(std::upper_bound(steps.begin(), steps.end(), step), steps.end());
    if (keep <= 0 || steps.size() <= (size_t)keep) { return; }
    steps.resize(steps.size() - (size_t)keep);
    verify_checkpoint(out + "/" + step_name(step));     // delete nothing before the new one was read back
    std::string failure;                                // after a failure the remaining ones are deleted all the same
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

using FileSums = std::vector<std::pair<std::string, FileSum>>;

// Writes the checkpoint OUT/step_<step>. Rank 0 calls begin() and publish(); every rank that holds moments calls
// write_part(). After an error, call undo(): the earlier checkpoints are still there (and the new one too, if only the
// fsync of its rename failed).
struct CheckpointSave {
    std::string out, path, temporary, old;
    int step;
    const Checkpoint& c;
    uint64_t bytes = 0, available = 0;      // needed, and free on the disk
    bool aside = false;                     // an existing checkpoint of this name has been renamed to `old`
    bool published = false;                 // the new one has its name

    CheckpointSave(const std::string& out, int step, const Checkpoint& c)
        : out(out), path(out + "/" + step_name(step)), temporary(out + "/.tmp_" + step_name(step)),
          old(out + "/.old_" + step_name(step)), step(step), c(c) {}

    // 1 makes a directory under a temporary name
    void begin() {
        bytes = checkpoint_bytes(c);
        available = check_disk_space(out, bytes);
        remove_checkpoint_files(temporary);
        io_mkdir(temporary);
    }
    // 2 writes and fsyncs a rank's files; rank 0 has all but the other ranks' moments
    FileSums write_part(int rank) const {
        FileSums sums;
        const auto add = [&](const std::string& name, auto write) {
            sums.push_back({name, write(temporary + "/" + name)});
        };
        const auto add_text = [&](const std::string& name, const std::string& text) {
            add(name, [&](const std::string& to) { return write_text(to, text); });
        };
        if (rank == 0) {
            add("model.safetensors", [&](const std::string& to) { return write_safetensors(to, model_items(c)); });
            add_text("config.json", json_text(c.config, 2) + "\n");
        }
        if (c.m != nullptr || c.v != nullptr) {
            add(optimizer_file(rank), [&](const std::string& to) {
                return write_safetensors(to, optimizer_items(c), optimizer_metadata(c));
            });
        }
        if (rank > 0) { return sums; }
        add_text("state.json", json_text(c.state, 2) + "\n");
        for (const auto& file : c.extra) { add_text(file.first, file.second); }
        return sums;
    }
    // 3 makes it a checkpoint; sums: of all files
    void publish(const FileSums& sums) {
        write_text(temporary + "/manifest.json", manifest_text(step, sums));        // last, as it sums the rest
        io_fsync_directory(temporary);
        if (name_is_taken(path)) {          // make room: a rename onto a directory that has files fails
            remove_checkpoint_files(old);
            io_rename(path, old);
            aside = true;
        }
        io_rename(temporary, path);         // a kill here leaves `old`, which clean_output_directory() puts back
        published = true;
        io_fsync_directory(out);
    }
    // 4 now that the new one is safe, deletes old ones
    void retire(int keep) const {
        try {
            remove_checkpoint_files(old);
            retire_checkpoints(out, step, keep);
        } catch (const Error& e) {
            say("warning: %s is saved, but old checkpoints could not be deleted: %s", path.c_str(), e.what());
        }
    }
    // removes what has been written, and a replacement that the disk did not confirm
    void undo() {
        if (available == 0) { return; }     // begin() has not started
        try {
            if (aside && published) { io_rename(path, temporary); }
            if (aside) { io_rename(old, path); }
            if (!published) { remove_checkpoint_files(temporary); }
            clean_output_directory(out);    // fsyncs the renames before it removes anything
        } catch (const Error&) {}           // the first error is the one to report
    }
    std::string explain(const std::string& error) const {
        if (available == 0) { return error; }
        return strprintf("a checkpoint needs %s, %s were free: %s", format_bytes((double)bytes).c_str(),
                         format_bytes((double)available).c_str(), error.c_str());
    }
};

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

// A directory that find_checkpoint() returned, for a model with c's tensors. Everything is checked, against c.config
// too unless that is null, before the first element of the trainer's memory changes.
struct CheckpointReader {
    const Checkpoint& c;
    Safetensors model;
    std::vector<MomentRun> moments;
    std::unique_ptr<StoredMoments> stored;
    Json state;

    CheckpointReader(const std::string& dir, const Checkpoint& c)
        : c(c), model(dir + "/model.safetensors"), moments(moment_runs(c)) {
        // 1 the configuration and the parameters
        std::vector<std::pair<std::string, Shape>> wanted;
        for (const FileTensor& f : *c.files) { wanted.push_back({f.name, file_view(*c.table, f).shape()}); }
        const std::string config_path = dir + "/config.json";
        const Json config = read_json(config_path);
        if (!c.config.is_null()) { check_config(config, c.config, config_path); }
        check_tensors(model, wanted);
        // 2 the moments; a model that is only used has none
        if (!moments.empty()) { stored = std::make_unique<StoredMoments>(dir, c); }
        state = read_json(dir + "/state.json");
    }
    // data (part), on the device: the parameters of a part of the layout; it contains whole layers of each tensor
    void read_parameters(float* data, Slice part) const {
        for (const FileTensor& f : *c.files) {
            load_view(data, part, file_view(*c.table, f), f.transposed, [&](float* out, size_t first, size_t count) {
                model.read_elements(model.entry(f.name), out, first, count);
            }, model.file.path, f.name);
        }
    }
    void read_moments() const {
        for (const MomentRun& run : moments) { stored->read(run); }
    }
};
