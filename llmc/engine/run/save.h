// run/save.h -- saves a checkpoint; the run waits for it, or continues to train (--checkpoint_async).
//
// The ranks go through its stages together. Threads do the slow work of the disk; only the main threads call
// collectives, and they meet when the threads of a stage have ended:
//
//     Begin     rank 0 syncs the log and makes a directory under a temporary name; always waited for
//     Write     each rank writes its part: from a snapshot, if training continues meanwhile
//     Publish   rank 0 makes it a checkpoint
//     Retire    rank 0 deletes old ones
//     Undo      after an error, rank 0 takes back what there is
#ifndef LLMC_ENGINE_RUN_SAVE_H
#define LLMC_ENGINE_RUN_SAVE_H

#include "../files/checkpoint.h"
#include "../ranks/patience.h"
#include "log.h"
#include "program.h"

// Room in the host's memory for what a rank saves of the weights and moments
struct Snapshot {
    size_t weights, moments;                // floats
    float* params = nullptr;
    float *m = nullptr, *v = nullptr;

    Snapshot(size_t weights, size_t moments) : weights(weights), moments(moments) {
        const auto floats = [](size_t n) { return (float*)pinned_malloc(sizeof(float) * imax(n, (size_t)1)); };
        params = floats(weights);
        m = floats(moments);
        v = floats(moments);
    }
    Snapshot(const Snapshot&) = delete;
    Snapshot& operator=(const Snapshot&) = delete;
    ~Snapshot() { for (float* x : {params, m, v}) { pinned_free(x); } }

    // Copies the arrays of c, which then refers to the copy
    void take(Checkpoint& c) const {
        if (weights > 0) { fetch_floats(params, c.params, weights, c.on_host); }
        if (moments > 0) {
            fetch_floats(m, c.m, moments, c.on_host);
            fetch_floats(v, c.v, moments, c.on_host);
        }
        c.params = params;
        c.m = m;
        c.v = v;
        c.on_host = true;
    }
};

struct SaveInHand : std::enable_shared_from_this<SaveInHand> {
    enum Stage { Begin, Write, Publish, Retire, Undo, Done };
    Stage stage = Begin;
    const TensorTable table;                // a copy: if an error ends the run, a thread may outlive the model
    const std::vector<FileTensor> files;
    Checkpoint c;
    CheckpointSave save;
    const int keep;
    const bool first = comm().rank == 0, shares;
    const std::shared_ptr<Snapshot> snapshot;       // null if training waits
    FileSums sums;
    std::string failure;                    // why it is not saved, on all ranks
    double begun = 0, waited = 0;           // the time, and the seconds that training waited

    SaveInHand(const Options& o, int step, const Checkpoint& of, bool shares, std::shared_ptr<Snapshot> snapshot)
        : table(*of.table), files(*of.files), c(of), save(o.out, step, c), keep(o.keep), shares(shares),
          snapshot(std::move(snapshot)) {
        c.table = &table;
        c.files = &files;
    }

    // These two are collectives. log: to be synced
    void begin(Log& log, double since) {
        begun = since;
        saving = 1;
        start(Begin, first, [this, &log] { log.sync(); save.begin(); });
        while (!stage_is_done(true)) {}
        if (failure.empty() && snapshot) { snapshot->take(c); }
        next();
        waited = wall_seconds() - begun;
    }
    // Continues as far as the disk has come, or to the end. True: it is saved, or there is a failure
    bool go_on(bool to_the_end) {
        const double from = wall_seconds();
        while (stage != Done) {
            if (stage_is_done(to_the_end)) { next(); } else if (!to_the_end) { break; }
        }
        waited += wall_seconds() - from;
        if (stage == Done) { saving = 0; }
        return stage == Done;
    }
    void say_saved() const {
        const std::string held_up = snapshot ? strprintf("; training waited %.2f s", waited) : "";
        printf("saved %s in %.2f s%s\n", printable(save.path, LONGEST_MESSAGE).c_str(), wall_seconds() - begun,
               held_up.c_str());
    }

private:
    std::future<void> thread;               // this rank's, if it has one in this stage
    std::string mine;                       // why it failed

    template <class Work> void start(Stage s, bool works, Work work) {
        stage = s;
        thread = std::future<void>();
        if (!works) { return; }
        const auto guarded = [self = shared_from_this(), work] {
            try {
                work();
            } catch (const Error& e) {
                if (e.code != EXIT_BAD_INPUT) { throw; }        // a failed device is a different error
                self->mine = (self->first ? "" : strprintf("rank %d: ", comm().rank)) + e.what();
            }
        };
        if (snapshot || comm().size > 1) { thread = in_thread(guarded); } else { guarded(); }
    }
    bool stage_is_done(bool wait) {
        if (threads_work(thread, wait, "checkpoint")) { return false; }
        const std::string text = first_text(mine, "checkpoint");
        if (failure.empty()) { failure = text; }
        return true;
    }
    void next() {
        if (stage == Retire || stage == Undo) {
            if (stage == Undo) {
                failure = strprintf("step %d is not saved: ", save.step) +
                          first_text(first ? save.explain(failure) : "", "checkpoint");
            }
            stage = Done;
        } else if (!failure.empty()) {
            start(Undo, first, [this] { save.undo(); });
        } else if (stage == Begin) {
            start(Write, first || shares, [this] { sums = save.write_part(comm().rank); });
        } else if (stage == Write) {
            if (shares) { gather_sums(); }
            start(Publish, first, [this] { save.publish(sums); });
        } else {
            start(Retire, first, [this] { save.retire(keep); });
        }
    }
    // Adds the checksums of the other ranks' files of moments to rank 0's own
    void gather_sums() {
        std::vector<FileSum> all((size_t)comm().size);
        comm_all_gather(all.data(), &sums.back().second, 1, "checkpoint");
        for (int rank = 1; rank < comm().size && first; rank++) {
            sums.push_back({optimizer_file(rank), all[(size_t)rank]});
        }
    }
};

#endif
