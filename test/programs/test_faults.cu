// test_faults.cu -- what a run keeps when the disk fails, the power goes or the process is killed, at every system call
// in turn.
//
// io_hook (test/faults.h) sees each call that changes the disk. Here it lets the n-th fail, ends the run there, or
// writes all of them down for a model of a disk that loses whatever was not fsynced. CABLE_CRASH_IMAGES=100000 tries
// that many of its states.
#include <csignal>
#include <random>
#include <set>

#include <sys/wait.h>

#include "test/checkpoint.h"
#include "test/faults.h"
#include "test/files.h"
#include "test/model/gpt2_model.h"
#include "test/oracle.h"

namespace {

// ----------------------------------------------------------------------------------------------------------
// the hook

struct Operation { std::string name, path, to, data; };

// Kill: the process is killed. Dead: no call changes the disk any more, as after a kill, but the process lives.
enum class Strike { None, Error, Half, HalfThenError, Interrupt, Kill, Dead };
struct Hook {
    Strike strike = Strike::None;
    long n = 0, count = 0;          // the call that is struck
    int error = 0;
    bool always = false;            // and those after it
    long interrupted = 0;
    bool torn = false, dead = false;
    bool tracing = false;
    std::vector<Operation> trace;
    bool struck() const { return count >= n; }
} hook;

int strike(IoCall& c) {
    if (hook.interrupted > 0) { return --hook.interrupted > 0 ? EINTR : 0; }
    const long number = __atomic_add_fetch(&hook.count, 1, __ATOMIC_RELAXED);      // a thread may write, too
    const bool first = number == hook.n, hit = first || (hook.always && number > hook.n);
    const bool write = strcmp(c.name, "write") == 0 && c.bytes > 1;
    if (!hit || hook.strike == Strike::None) { return 0; }
    if (hook.strike == Strike::Kill || hook.strike == Strike::Dead) {
        if (!write || hook.torn) {
            if (hook.strike == Strike::Kill) { raise(SIGKILL); }
            hook.dead = true;
            return EIO;
        }
        hook.torn = true;           // in the middle of a write: the call after it is never made
        hook.n++;
        c.bytes /= 2;
        return 0;
    }
    if (write && (hook.strike == Strike::Half || (hook.strike == Strike::HalfThenError && first))) {
        c.bytes /= 2;
        return 0;
    }
    if (hook.strike == Strike::Half) { return 0; }
    if (hook.strike == Strike::Interrupt) { hook.interrupted = 3; return EINTR; }       // three times in a row
    return hook.error;
}
int test_hook(IoCall* c) {
    const int error = strike(*c);
    const std::string data((const char*)c->data, c->data == nullptr ? 0 : c->bytes);
    const bool lost = error != 0 && !hook.dead && strcmp(c->name, "fsync") == 0;
    if (hook.tracing && (error == 0 || lost)) { hook.trace.push_back({lost ? "lost" : c->name, c->path, c->to, data}); }
    return error;
}

void check_none(const std::vector<std::string>& wrong) {
    for (size_t i = 0; i < std::min(wrong.size(), (size_t)5); i++) { UNSCOPED_INFO(wrong[i]); }
    CHECK(wrong.size() == 0);
}

// The hook is in place as long as this lives.
struct Planted {
    explicit Planted(Strike strike, long n = 0, int error = 0, bool always = false) {
        hook = Hook();
        hook.strike = strike; hook.n = n; hook.error = error;
        hook.always = always || strike == Strike::Dead;
        hook.tracing = strike == Strike::None || strike == Strike::Dead;
        io_hook = test_hook;
    }
    ~Planted() { io_hook = nullptr; }
};

// ----------------------------------------------------------------------------------------------------------
// a small checkpoint

const bool in_memory = temporary_in_memory();

struct Quiet : Captured { Quiet() : Captured({1, 2}) {} };

// Two tensors that take a few sectors of a disk; what it holds is a function of `seed`.
struct Tiny {
    TensorTable table;
    std::vector<FileTensor> files;
    std::vector<float> params, m, v;
    explicit Tiny(int seed) {
        TensorSpec w, b;
        w.name = "w"; w.rows = 9; w.cols = 40;
        b.name = "b"; b.rows = 70;
        table.add(w);
        table.add(b);
        files = {{"w", "w", 0, 0, 9, true}, {"b", "b", 0, 0, 70, false}};
        for (std::vector<float>* x : {&params, &m, &v}) { x->assign(table.total, 0.0f); }
        for (size_t t = 0; seed != 0 && t < 2; t++) {
            for (size_t i = table.offsets[t]; i < table.offsets[t] + table.specs[t].size(); i++) {
                params[i] = (float)hash64((uint64_t)seed, i);
                m[i] = (float)hash64((uint64_t)seed, i + 1000);
                v[i] = (float)hash64((uint64_t)seed, i + 2000);
            }
        }
    }
    Checkpoint checkpoint(int seed) {
        Checkpoint c;
        c.table = &table; c.files = &files; c.params = params.data(); c.m = m.data(); c.v = v.data();
        c.config = {{"n_embd", 40}};
        c.state = {{"seed", seed}};
        c.extra.push_back({"vocab.txt", strprintf("a word of %d\n", seed)});
        return c;
    }
};

enum { NOTHING = 0, OLD = 1, NEW = 2, MIXTURE = 3 };            // NOTHING, OLD, NEW: also the seed

void save(const std::string& out, int step, int seed, int keep = 0) {
    Tiny t(seed);
    save_checkpoint(out, step, t.checkpoint(seed), keep);
}

int state_of(const std::string& dir) {
    Tiny found(NOTHING);
    Checkpoint c = found.checkpoint(NOTHING);
    c.config = Json();
    load_checkpoint(dir, c);
    const int seed = c.state.at("seed").get<int>();
    static const Tiny wanted[] = {Tiny(NOTHING), Tiny(OLD), Tiny(NEW)};
    if (seed < OLD || seed > NEW || read_file(dir + "/vocab.txt") != strprintf("a word of %d\n", seed)) {
        return MIXTURE;
    }
    const Tiny& expected = wanted[seed];
    const bool same = found.params == expected.params && found.m == expected.m && found.v == expected.v;
    return same ? seed : MIXTURE;
}
// What the next run finds, and leaves: NOTHING, OLD, NEW, MIXTURE, or minus that where rubbish stays behind.
int next_start(const std::string& out) {
    const OutputLock lock(out);
    clean_output_directory(out);
    int found = NOTHING;
    const std::string dir = find_checkpoint(out);
    if (!dir.empty()) { found = dir == out + "/" + step_name(list_checkpoints(out).back()) ? state_of(dir) : MIXTURE; }
    for (const std::string& name : list_directory(out)) {
        if (name != ".lock" && step_of_name(name) < 0) { return -found - 1; }
    }
    return found;
}

// A save beside existing checkpoints: a new step, after which the old one is deleted; the same step again; the first
// one.
enum Scene { NEXT_STEP, SAME_STEP, FIRST_STEP };
const Scene scenes[] = {NEXT_STEP, SAME_STEP, FIRST_STEP};
void before_save(Scene scene, const std::string& out) {
    if (scene == FIRST_STEP) { return; }
    io_mkdirs(out);
    save(out, 1, OLD);
}
void save_scene(Scene scene, const std::string& out) {
    const OutputLock lock(out);
    clean_output_directory(out);
    save(out, scene == NEXT_STEP ? 2 : 1, NEW, 1);
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------
// failing calls

TEST_CASE("faults: whichever call fails, once or for good, the old checkpoint or the new one is there",
          "[faults][P3]") {
    const struct { Strike strike; int error; bool survived; } kinds[] = {
        {Strike::Error, ENOSPC, false}, {Strike::Error, EIO, false}, {Strike::Error, EDQUOT, false},
        {Strike::HalfThenError, ENOSPC, false}, {Strike::Half, 0, true}, {Strike::Interrupt, 0, true}};
    int cases = 0, refused = 0;
    std::vector<std::string> wrong;
    for (const Scene scene : scenes) {
        for (const auto& kind : kinds) {
            for (const bool always : {false, true}) {
                for (long n = 1;; n++) {
                    TempDir place;
                    const std::string out = place / "a/out";
                    std::string message;
                    int found = MIXTURE;
                    bool clean = false;
                    {
                        const Quiet quiet;
                        before_save(scene, out);
                        {
                            const Planted planted(kind.strike, n, kind.error, always);
                            try { save_scene(scene, out); } catch (const Error& e) { message = e.what(); }
                            clean = !hook.struck();
                        }
                        if (scene == NEXT_STEP && !message.empty() && state_of(out + "/step_00000001") != OLD) {
                            wrong.push_back("old is gone: " + message);
                        }
                        try { found = next_start(out); } catch (const Error&) {}
                    }
                    cases++;
                    refused += !message.empty();
                    // not saved, with a message that has the reason, or saved
                    const int before = scene == FIRST_STEP ? NOTHING : OLD;
                    bool good = found == NEW || (!message.empty() && found == before);
                    good = good && (message.empty() || contains(message, strerror(kind.error)));
                    good = good && (message.empty() || !(kind.survived || clean));
                    if (!good) {
                        wrong.push_back(strprintf("scene %d, error %d%s, call %ld: found %d: %s", scene, kind.error,
                                                  always ? " for good" : "", n, found, message.c_str()));
                    }
                    if (clean) { CHECK(n > 30); break; }
                }
            }
        }
    }
    INFO(cases << " cases, " << refused << " of them not saved");
    CHECK(cases > 1500);
    CHECK(refused > 500);
    check_none(wrong);
}

// ----------------------------------------------------------------------------------------------------------
// power failures

namespace {

// A disk that promises no more than POSIX: the data of a file, and the names in a directory, survive a power failure if
// the file or the directory was fsynced after the change. Anything else may be lost, each written sector independently,
// in any order. A directory whose fsync failed has forgotten its changes, and a later fsync that succeeds does not
// bring them back.
struct Disk {
    struct Write { size_t at; std::string bytes; };
    struct Inode {
        bool directory = false;
        std::string synced;                     // a file
        std::vector<Write> written;             // since then
        std::map<std::string, int> names;       // a directory, as the program sees it
    };
    struct Change {
        int directory;
        std::string from, to;           // from, if any, goes; to, if any, becomes `inode`
        int inode;
        bool synced, lost = false;
    };
    std::vector<Inode> inodes = {Inode()};
    std::vector<Change> changes;
    std::map<std::string, size_t> length;       // of files being written
    std::string root;

    // Begins with what lies under `root`, all of it on the disk.
    explicit Disk(const std::string& root) : root(root) { inodes[0].directory = true; adopt(root, 0); }
    void adopt(const std::string& path, int at) {
        for (const std::string& name : list_directory(path)) {
            const std::string full = path + "/" + name;
            const int child = link(at, name, is_directory(full), true);
            if (is_directory(full)) { adopt(full, child); } else { inodes[(size_t)child].synced = read_file(full); }
        }
    }
    int link(int at, const std::string& name, bool directory, bool synced) {
        inodes.push_back(Inode());
        inodes.back().directory = directory;
        const int child = (int)inodes.size() - 1;
        inodes[(size_t)at].names[name] = child;
        changes.push_back({at, "", name, child, synced});
        return child;
    }
    // "root/a/b" -> the inode of a, or -1, and the name b
    std::pair<int, std::string> place(const std::string& path) const {
        int at = 0;
        std::string rest = path.substr(std::min(path.size(), root.size() + 1));
        while (!rest.empty() && rest.back() == '/') { rest.pop_back(); }
        for (size_t slash; at >= 0 && (slash = rest.find('/')) != std::string::npos; rest = rest.substr(slash + 1)) {
            at = child(at, rest.substr(0, slash));
        }
        return {at, rest};
    }
    int child(int at, const std::string& name) const {
        if (name.empty()) { return at; }
        const auto found = inodes[(size_t)at].names.find(name);
        return found == inodes[(size_t)at].names.end() ? -1 : found->second;
    }

    void apply(const Operation& op) {
        const auto where = place(op.path);
        const int at = where.first, inode = at < 0 ? -1 : child(at, where.second);
        if (op.path.size() < root.size() || at < 0) { return; }                             // mkdir -p of what is above
        if (op.name == "mkdir" && inode < 0) { link(at, where.second, true, false); }
        // a file that is opened again is truncated: see truncate
        if (op.name == "open" && inode < 0) { link(at, where.second, false, false); }
        if (op.name == "write") { inodes[(size_t)inode].written.push_back({size_of(inode), op.data}); }
        if (op.name == "truncate") { inodes[(size_t)inode] = Inode(); }                     // only ever of .lock
        if (op.name == "fsync") { sync(inode); }
        for (Change& c : changes) { c.lost = c.lost || (op.name == "lost" && c.directory == inode && !c.synced); }
        if (op.name == "rename" || op.name == "unlink" || op.name == "rmdir") {
            const std::string to = op.name == "rename" ? place(op.to).second : "";
            inodes[(size_t)at].names.erase(where.second);
            if (!to.empty()) { inodes[(size_t)at].names[to] = inode; }
            changes.push_back({at, where.second, to, inode, false});
        }
    }
    size_t size_of(int inode) const {
        size_t size = inodes[(size_t)inode].synced.size();
        for (const Write& w : inodes[(size_t)inode].written) { size = std::max(size, w.at + w.bytes.size()); }
        return size;
    }
    void sync(int inode) {
        Inode& i = inodes[(size_t)inode];
        for (Change& c : changes) { c.synced = c.synced || (c.directory == inode && !c.lost); }
        for (const Write& w : i.written) { put(i.synced, w.at, w.bytes); }
        i.written.clear();
    }
    static void put(std::string& file, size_t at, const std::string& bytes) {
        if (file.size() < at + bytes.size()) { file.resize(at + bytes.size()); }
        file.replace(at, bytes.size(), bytes);
    }

    // The disk after a power failure: path -> contents, a directory ends in /. luck: chance that an unsynced change
    // survives
    using Image = std::map<std::string, std::string>;
    template <class Random> Image crash(Random& random, double luck) const {
        const auto kept = [&] { return (double)(random() % 1000) < 1000 * luck; };
        std::vector<std::map<std::string, int>> names(inodes.size());
        for (const Change& c : changes) {
            if (!c.synced && !kept()) { continue; }
            auto& directory = names[(size_t)c.directory];
            if (!c.from.empty()) {
                const auto found = directory.find(c.from);
                const auto target = directory.find(c.to);
                // not over a directory with files
                const bool blocked = target != directory.end() && !names[(size_t)target->second].empty();
                if (found == directory.end() || found->second != c.inode || blocked) { continue; }
                directory.erase(found);
            }
            if (!c.to.empty()) { directory[c.to] = c.inode; }
        }
        Image image;
        list(names, 0, "", image, kept);
        return image;
    }
    template <class Kept>
    void list(const std::vector<std::map<std::string, int>>& names, int at, const std::string& path, Image& image,
              Kept kept) const {
        for (const auto& entry : names[(size_t)at]) {
            const Inode& inode = inodes[(size_t)entry.second];
            const std::string name = path + "/" + entry.first;
            if (inode.directory) {
                image[name + "/"] = "";
                list(names, entry.second, name, image, kept);
                continue;
            }
            std::string contents = inode.synced;
            // the length is there before the data
            if (!inode.written.empty() && kept()) { contents.resize(size_of(entry.second)); }
            for (const Write& w : inode.written) {
                for (size_t begin = 0; begin < w.bytes.size();) {
                    const size_t n = std::min(512 - (w.at + begin) % 512, w.bytes.size() - begin);
                    if (kept()) { put(contents, w.at + begin, w.bytes.substr(begin, n)); }
                    begin += n;
                }
            }
            image[name] = contents;
        }
    }
};

void restore(const Disk::Image& image, const std::string& root) {
    for (const auto& entry : image) {           // a directory sorts before what is in it
        if (entry.first.back() == '/') { mkdir((root + entry.first).c_str(), 0755); continue; }
        const int fd = ::open((root + entry.first).c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
        const bool done =
            fd >= 0 && ::write(fd, entry.second.data(), entry.second.size()) == (ssize_t)entry.second.size();
        if (fd >= 0) { ::close(fd); }
        if (!done) { die(EXIT_BAD_INPUT, "cannot write %s%s", root.c_str(), entry.first.c_str()); }
    }
}

// Tries `samples` power failures after each operation from `first` on; allowed: bits of the states that may be found,
// those after the last operation apart. Returns the number of different images.
struct Crashes {
    std::vector<std::string> wrong;
    std::mt19937 random{1};
    size_t images = 0;
    int found[4] = {};

    void run(const std::string& what, const Disk& start, const std::vector<Operation>& trace, size_t first, int samples,
             int allowed, int allowed_at_end) {
        Disk disk = start;
        std::set<uint64_t> seen;
        for (size_t done = 0; done <= trace.size(); done++) {
            if (done > 0) { disk.apply(trace[done - 1]); }
            for (int i = 0; done >= first && i < samples; i++) {
                const double kept = i < 2 ? (double)i : (double)(1 + i % 5) / 6;
                const Disk::Image image = disk.crash(random, kept);
                const bool end = done == trace.size();
                uint64_t sum = end ? 1 : 0;
                for (const auto& e : image) {
                    sum = checksum(e.first.data(), e.first.size(), checksum(e.second.data(), e.second.size(), sum));
                }
                if (!seen.insert(sum).second) { continue; }
                images++;
                TempDir place;
                restore(image, place.path);
                int state = MIXTURE;
                std::string why;
                try { state = next_start(place / "a/out"); } catch (const Error& e) { why = e.what(); }
                if (state >= 0) { found[state]++; }
                if (state < 0 || !((end ? allowed_at_end : allowed) >> state & 1)) {
                    const Operation last = done == 0 ? Operation() : trace[done - 1];
                    wrong.push_back(strprintf("%s, after %zu of %zu calls (%s %s), sample %d: found %d %s",
                                              what.c_str(), done, trace.size(), last.name.c_str(), last.path.c_str(), i,
                                              state, why.c_str()));
                }
            }
        }
    }
};

int crash_samples(int usual) {
    const char* text = getenv("CABLE_CRASH_IMAGES");
    return text == nullptr ? usual : std::max(usual, (int)((double)usual * strtod(text, nullptr) / 2000));
}

}  // namespace

TEST_CASE("faults: the power fails anywhere in a save, the old checkpoint or the new one is there", "[faults][P2]") {
    Crashes crashes;
    for (const Scene scene : scenes) {
        TempDir place;
        const std::string out = place / "a/out";
        if (scene != FIRST_STEP) { io_mkdirs(out); }
        before_save(scene, out);
        const Disk disk(place.path);
        std::vector<Operation> trace;
        {
            const Planted traced(Strike::None);
            save_scene(scene, out);
            trace = hook.trace;
        }
        REQUIRE(trace.size() > 40);
        const int before = scene == FIRST_STEP ? NOTHING : OLD;
        crashes.run(strprintf("scene %d", scene), disk, trace, 0, crash_samples(150), 1 << before | 1 << NEW, 1 << NEW);
        // and the manifest, which vouches for the other files, is begun when they are on the disk
        std::vector<std::string> files;
        for (const Operation& op : trace) {
            if (op.name == "fsync" && contains(op.path, ".tmp_step_")) { files.push_back(op.path); }
        }
        REQUIRE(files.size() == 7);
        CHECK(contains(files[5], "manifest.json"));
    }
    INFO(crashes.images << " states: " << crashes.found[OLD] << " old, " << crashes.found[NEW] << " new");
    CHECK(crashes.images >= 2000);
    CHECK(crashes.found[OLD] > 200);
    CHECK(crashes.found[NEW] > 100);
    check_none(crashes.wrong);
}

TEST_CASE("faults: the power fails while a save that failed, or the run after a killed one, tidies up",
          "[faults][P2]") {
    Crashes crashes;
    for (const Strike kind : {Strike::Dead, Strike::Error}) {
        for (const Scene scene : scenes) {
            bool struck = true;
            for (long n = 1; struck; n++) {
                TempDir place;
                const std::string out = place / "a/out";
                before_save(scene, out);
                const Disk disk(place.path);
                std::vector<Operation> trace;
                size_t first = 0;
                int state = MIXTURE;
                {
                    const Quiet quiet;
                    const Planted planted(kind, n, EIO);
                    hook.tracing = true;
                    struck = false;
                    try {
                        save_scene(scene, out);
                    } catch (const Error&) {
                        struck = true;
                    }
                    struck = struck || hook.struck();
                    first = kind == Strike::Dead ? hook.trace.size() : (size_t)n - 1;
                    hook.strike = Strike::None;
                    hook.dead = false;
                    state = next_start(out);
                    trace = hook.trace;
                }
                const int before = scene == FIRST_STEP ? NOTHING : OLD;
                CHECK((state == NEW || (struck && state == before)));
                // the checkpoint from which the next run continues stays
                const bool kill = kind == Strike::Dead;
                const int either = 1 << before | 1 << NEW;
                crashes.run(strprintf("scene %d, %s at call %ld", scene, kill ? "killed" : "error", n), disk, trace,
                            std::min(first, trace.size()), crash_samples(kill ? 5 : 3), either,
                            kill ? 1 << state : either);
            }
        }
    }
    INFO(crashes.images << " states: " << crashes.found[OLD] << " old, " << crashes.found[NEW] << " new");
    CHECK(crashes.found[OLD] > 200);
    CHECK(crashes.found[NEW] > 100);
    check_none(crashes.wrong);
}

// ----------------------------------------------------------------------------------------------------------
// whole runs

namespace {

// A run of train_gpt2 in this process: 6 steps, a checkpoint at every second one.
struct Training : TempDir {
    std::string text;                   // what it printed
    int threads = max_threads();

    Training() {
        std::string words;
        for (int i = 0; i < 60; i++) {
            const char* others = i % 3 == 0 ? "sees what " : "came before it.\n";
            words += i % 7 == 0 ? "a cable " : others;
        }
        write_file(*this / "train.txt", words);
    }
    ~Training() { set_threads(threads); }
    std::string out() const { return *this / "out"; }
    std::string step_dir(int step) const { return out() + "/" + step_name(step); }

    std::vector<std::string> words(const std::vector<std::string>& more) const {
        std::vector<std::string> w = {
            "train_gpt2", "--train_files", *this / "train.txt", "--out", out(), "--model", "1,2,16", "--T", "16",
            "--B", "1", "--steps", "6", "--checkpoint_every", "2", "--keep", "2", "--val_every", "0",
            "--sample_every", "0", "--threads", "1", "--resume", "1"};
        w.insert(w.end(), more.begin(), more.end());
        return w;
    }
    int run(const std::vector<std::string>& more = {}) {
        const Quiet quiet;
        const int code = trains(more);
        text = quiet.text();
        return code;
    }
    int trains(const std::vector<std::string>& more) {
        std::vector<std::string> w = words(more);
        std::vector<char*> argv;
        for (std::string& s : w) { argv.push_back(&s[0]); }
        return run_on_ranks(gpt2_main, GPT2_FLAG, (int)argv.size(), argv.data());
    }
    // Runs in a child process that is killed at its n-th call. Returns whether there was such a call.
    bool killed_at(long n) {
        const Quiet quiet;
        const pid_t pid = fork();
        if (pid == 0) {
            const Planted planted(Strike::Kill, n);
            const int code = trains({});
            fflush(nullptr);
            _exit(code);
        }
        int status = 0;
        const bool waited = waitpid(pid, &status, 0) == pid;
        text = quiet.text();
        if (!waited || (WIFEXITED(status) && WEXITSTATUS(status) != 0)) { die(EXIT_DEVICE, "%s", text.c_str()); }
        return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    }
    // everything that a checkpoint holds but the flags, which name directories
    std::string bits(int step) const {
        Json state = parse_json(read_file(step_dir(step) + "/state.json"), "state");
        state.erase("options");
        state.erase("data");                                // mtime and inode
        return read_file(step_dir(step) + "/model.safetensors") +
               read_file(step_dir(step) + "/optimizer_0.state") + json_text(state);
    }
    int last_saved() const {
        const size_t at = text.rfind("saved ");
        return at == std::string::npos ? 0 : atoi(text.c_str() + text.find("step_", at) + 5);
    }
    size_t count(const std::string& what) const {
        size_t n = 0;
        for (size_t at = 0; (at = text.find(what, at)) != std::string::npos; at++) { n++; }
        return n;
    }
};

// The outcome of a run that was never disturbed.
struct Reference {
    std::string bits, log;
    long calls;
    Reference() {
        Training t;
        const Planted counted(Strike::Error);       // at no call
        const int code = t.run();
        INFO(t.text);
        REQUIRE(code == 0);
        calls = hook.count;
        bits = t.bits(6);
        log = read_file(t.out() + "/main.log");
        REQUIRE(std::count(log.begin(), log.end(), '\n') == 6);
    }
    // "", or what is wrong with t, resumed in peace after the step `least` had been saved
    std::string resumed(Training& t, int least) const {
        const bool there = path_exists(t.step_dir(least)) || path_exists(t.out() + "/.old_" + step_name(least));
        if (least > 0 && !there) { return strprintf("step %d is gone", least); }
        const int code = t.run();
        if (code != 0) { return strprintf("exit code %d: ", code) + t.text; }
        if (least > 0 && !contains(t.text, "resumed from ")) { return "it began anew"; }
        if (t.bits(6) != bits) { return "other bits"; }
        if (read_file(t.out() + "/main.log") != log) { return "another main.log: " + read_file(t.out() + "/main.log"); }
        for (const std::string& name : list_directory(t.out())) {
            // a run that ended before its first checkpoint leaves logs, which the next one keeps as .1, .2, ...
            const size_t end = name.find_last_not_of("0123456789");
            const std::string log_name = end < name.size() - 1 && name[end] == '.' ? name.substr(0, end) : name;
            const bool is_log = log_name == "main.log" || log_name == "log.jsonl";
            if (name != ".lock" && !is_log && step_of_name(name) < 0) { return "left behind: " + name; }
        }
        std::vector<int> steps = list_checkpoints(t.out());
        return steps.back() == 6 ? "" : "step 6 is not the last";
    }
};

}  // namespace

TEST_CASE("faults: a run killed at any call, and again while it resumes, ends with the same bits", "[faults][P1]") {
    const Reference reference;
    std::vector<std::string> wrong;
    long n = 1;
    for (bool killed = true; killed; n++) {
        Training t;
        killed = t.killed_at(n);
        int least = t.last_saved();
        if (killed) {
            t.killed_at(1 + n * 5 % 40);
            least = std::max(least, t.last_saved());
        }
        const std::string what = reference.resumed(t, least);
        if (!what.empty()) { wrong.push_back(strprintf("call %ld: ", n) + what); }
    }
    CHECK(n > reference.calls);
    CHECK(n > 150);
    check_none(wrong);
}

TEST_CASE("faults: a run whose disk fails at any call goes on, or says that it is not saved", "[faults][P3]") {
    const Reference reference;
    std::vector<std::string> wrong;
    const int errors[] = {ENOSPC, EIO, EDQUOT};
    int went_on = 0, refused = 0;
    for (const bool always : {false, true}) {
        for (long n = 1; n <= reference.calls; n += always ? 2 : 1) {
            Training t;
            int code;
            {
                const Planted planted(always && n % 4 == 3 ? Strike::HalfThenError : Strike::Error, n, errors[n % 3],
                                      always);
                code = t.run();
            }
            std::string what;
            const int saved = t.last_saved();
            const size_t steps = t.count(" tok/s "), warnings = t.count("warning: step ");
            if (code == 0 && (saved != 6 || t.bits(6) != reference.bits)) { what = "exit code 0, but not saved"; }
            if (code != 0 && code != EXIT_BAD_INPUT) { what = strprintf("exit code %d", code); }
            if (code != 0 && !contains(t.text, "error: ")) { what = "no word about it"; }
            if (steps > 0 && steps != 6) { what = "training stopped"; }
            if (!always && code != 0 && steps > 0 && !contains(t.text, "error: step 6 is not saved: ")) {
                what = "it ended before its last step";
            }
            went_on += warnings > 0 && code == 0;
            refused += code != 0;
            const bool named =
                contains(t.text, "is not saved: a checkpoint needs 1.") && contains(t.text, " were free: ");
            const bool log = contains(t.text, "is not saved: " + t.out() + "/main.log: ") ||
                             contains(t.text, "is not saved: " + t.out() + "/log.jsonl: ");
            if (warnings > 0 && !named && !log) { what = "the space wanted and free is not named: " + t.text; }
            if (what.empty()) { what = reference.resumed(t, saved); }
            if (!what.empty()) {
                wrong.push_back(strprintf("call %ld%s: ", n, always ? " and after" : "") + what);
            }
        }
    }
    INFO(reference.calls << " calls, " << refused << " runs not saved");
    CHECK(went_on > 50);
    CHECK(refused > 50);
    check_none(wrong);
}

TEST_CASE("faults: signals in other calls and short writes change nothing", "[faults][P3]") {
    const Reference reference;
    for (const Strike strike : {Strike::Interrupt, Strike::Half}) {
        Training t;
        const Planted planted(strike, 1, 0, true);
        CHECK(t.run() == 0);
        CHECK(hook.count > reference.calls / 2);
        CHECK_FALSE(contains(t.text, "warning"));
        CHECK(t.bits(6) == reference.bits);
        CHECK(read_file(t.out() + "/main.log") == reference.log);
    }
}

TEST_CASE("faults: training continues after a failed save", "[faults][P4]") {
    const Reference reference;
    const long n = reference.calls / 4;         // in the first of the three saves, among its files
    Training t;
    {
        const Planted planted(Strike::Error, n, ENOSPC);
        CHECK(t.run() == 0);
        CHECK(t.count(" tok/s ") == 6);
        CHECK(contains(t.text, "warning: step 2 is not saved: a checkpoint needs 1."));
        CHECK(contains(t.text, strerror(ENOSPC)));
        CHECK(contains(t.text, t.out() + "/.tmp_step_00000002/"));
        CHECK(contains(t.text, "training continues, the next checkpoint is due in 2 steps"));
        CHECK(contains(t.text, "saved " + t.step_dir(4)));
        CHECK_FALSE(path_exists(t.step_dir(2)));
    }
    Training v;
    {                                           // of the last checkpoint: the run does its other work
        const Planted planted(Strike::Error, reference.calls * 3 / 4, EIO, true);
        CHECK(v.run({"--eval_lengths", "8,16", "--val_files", v / "train.txt"}) == EXIT_BAD_INPUT);
    }
    INFO(v.text);
    CHECK(contains(v.text, "warning: step 6 is not saved: "));
    CHECK(contains(v.text, "error: step 6 is not saved: "));
    CHECK(v.text.find("error: ") > v.text.find("      16       16 "));
    CHECK(reference.resumed(v, 4) == "");
}

// What is on the disk, step by step, by the rule of retire_checkpoints
TEST_CASE("faults: how many checkpoints there will be is known at the start", "[faults][P4]") {
    Random random;
    INFO(random);
    for (int n = 0; n < 2000; n++) {
        const TempDir out;
        Run r;
        r.o.out = out.path;
        r.o.checkpoint_every = random.integer(1, 5);
        r.o.keep = random.integer(0, 4);
        r.o.steps = random.integer(0, 60);
        r.state.step = random.integer(0, 40);
        std::vector<int> disk;                      // as an earlier run with the same flags has left it
        const auto due = [&](int step) { return step == r.o.steps || step % r.o.checkpoint_every == 0; };
        const auto save = [&](int step) {
            disk.push_back(step);
            const size_t most = disk.size();
            const size_t old = r.o.keep > 0 && most > (size_t)r.o.keep ? most - (size_t)r.o.keep : 0;
            disk.erase(disk.begin(), disk.begin() + (long)old);
            return most;
        };
        for (int step = 1; step <= r.state.step; step++) { if (due(step)) { save(step); } }
        for (int step : disk) { io_mkdir(out.path + "/" + step_name(step)); }
        const size_t before = disk.size();
        size_t most = before;
        for (int step = (int)r.state.step + 1; step <= r.o.steps; step++) {
            if (due(step)) { most = std::max(most, save(step)); }
        }
        INFO("every " << r.o.checkpoint_every << ", keep " << r.o.keep << ", steps " << r.o.steps << " from "
                      << r.state.step);
        CHECK(checkpoints_to_come(r) == (int64_t)(most - before));
    }
}
