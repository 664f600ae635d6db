// engine/data.h -- what models read: shards of tokens or plain text, the order of samples, masked tokens, documents.
#pragma once

#include <map>
#include <memory>
#include <unordered_set>

#include <fnmatch.h>

#include "../base/common.h"
#include "../base/math.h"
#include "comm.h"
#include "vocabulary.h"

// ----------------------------------------------------------------------------------------------------------
// streams of ids
//
// A file whose name ends in .txt is raw bytes: each byte is an id, the vocabulary is 256. Any other file is a shard in
// llm.c's layout, little-endian:
//
//   byte 0     int32  magic: 20240520 for uint16 ids, 20240801 for uint32 ids (llama-3)
//   byte 4     int32  version: 1 for uint16, 7 for uint32
//   byte 8     int32  number of tokens
//   byte 12    int32  vocabulary    } both 0, as llm.c writes them: GPT-2's
//   byte 16    int32  end-of-text id} (50257 and 50256), or llama-3's for uint32
//   byte 20           zeros, or the fields of a shard of documents or examples, below
//   byte 1024         the ids
//
// A shard of version 2 holds examples of a task instead of a stream, one in each row:
//
//   byte 28    int32  tokens in a row, to which the example is padded
//   byte 32    int32  length of the examples, in symbols of the task; 0: it varies
//   byte 1024         the ids, below 2^15 (uint32: 2^30), plus that number if the token belongs to the answer
//
// A sample is a window of T + 1 tokens at stride T inside one shard: T inputs, and T targets shifted by one. In rows, a
// sample is a row, and only its answer is a target. The window of sample i is a pure function of (seed, i), so ranks,
// batch sizes and restarts do not change the order.

constexpr int SHARD_HEADER_BYTES = 1024;
constexpr int SHARD_MAGIC = 20240520, SHARD_VERSION = 1;                // uint16 ids
constexpr int SHARD_VERSION_ROWS = 2;
constexpr int SHARD_MAGIC_UINT32 = 20240801, SHARD_VERSION_UINT32 = 7;  // uint32 ids
constexpr int MAX_VOCAB = 1 << 20;          // bounds a header field that sizes the model

struct Shard {
    std::string path;
    uint64_t file_bytes = 0;
    uint64_t first_byte = 0;                // of the ids: 1024; in text 0
    uint64_t tokens = 0;
    int width = 0;                          // bytes per id: 1, 2 or 4
    int vocab = 0, eot = -1;
    int row = 0;                            // tokens in a row; 0: a stream of tokens
    int length = 0;                         // of the examples in rows

    int answer_bit() const { return width == 2 ? 1 << 15 : 1 << 30; }
    // W windows of T + 1 tokens at stride T take W * T + 1 tokens.
    uint64_t windows(int T) const {
        if (row > 0) { return T == row - 1 ? tokens / (uint64_t)row : 0; }
        return tokens == 0 ? 0 : (tokens - 1) / (uint64_t)T;
    }
};

// Checks a file as far as possible without its tokens. rows: accept examples in rows
inline Shard inspect_shard(const std::string& path, bool rows = false) {
    const File file(path);
    Shard s;
    s.path = path;
    s.file_bytes = file.size;
    const char* name = path.c_str();
    refuse_stand_in(path, ends_with(path, ".txt"));
    // 1 text: each byte is a token
    if (ends_with(path, ".txt")) {
        check(file.size > 0, "%s: the file is empty", name);
        char mark[2] = {};
        file.read(mark, file.size > 1 ? 2 : 0, 0);
        const bool utf16 = memcmp(mark, "\xff\xfe", 2) == 0 || memcmp(mark, "\xfe\xff", 2) == 0;
        check(!utf16, "%s: expected UTF-8, got UTF-16 (convert it: iconv -f UTF-16 -t UTF-8)", name);
        s.tokens = file.size;
        s.width = 1;
        s.vocab = 256;
        return s;
    }
    check(file.size >= SHARD_HEADER_BYTES, "%s: expected a token shard, which has a header of %d bytes, got %zu bytes "
          "(is it text? then name it .txt)", name, SHARD_HEADER_BYTES, (size_t)file.size);
    // 2 a shard: its header
    int32_t header[9];                      // magic, version, tokens, vocabulary, end-of-text id, ...
    file.read(header, sizeof header, 0);
    const bool wide = header[0] == SHARD_MAGIC_UINT32;
    check(wide || header[0] == SHARD_MAGIC, "%s: expected a token shard with magic number %d, got %d (is it text? then "
          "name it .txt; ids without a header must be converted)", name, SHARD_MAGIC, header[0]);
    const int version = wide ? SHARD_VERSION_UINT32 : SHARD_VERSION;
    const bool in_rows = header[1] == SHARD_VERSION_ROWS;
    check(in_rows || header[1] == version, "%s: expected version %d, got %d", name, version, header[1]);
    check(!in_rows || rows, "%s: expected a stream of tokens, got examples of a task in rows (version %d), which "
          "train_gpt2 takes in --train_files and --tasks", name, header[1]);
    check(header[2] > 0, "%s: header: expected 1 to %d tokens, got %d", name, INT32_MAX, header[2]);
    s.first_byte = SHARD_HEADER_BYTES;
    s.tokens = (uint64_t)header[2];
    s.width = wide ? 4 : 2;
    // 3 the size of the file, the vocabulary and the rows
    const uint64_t bytes = s.first_byte + s.tokens * (uint64_t)s.width;
    check(file.size == bytes, "%s: expected %zu bytes for the %d tokens of its header, got %zu (truncated, or still "
          "being written?)", name, (size_t)bytes, header[2], (size_t)file.size);
    s.vocab = header[3];
    s.eot = header[4];
    if (s.vocab == 0 && s.eot == 0) {       // a shard of llm.c, which has one tokenizer per width
        s.vocab = wide ? 128256 : 50257;
        s.eot = wide ? 128000 : 50256;
    }
    int largest = wide ? MAX_VOCAB : 65536;                 // the range of the ids
    if (in_rows) {
        s.row = header[7];
        s.length = header[8];
        largest = std::min(largest, s.answer_bit());
        check(s.row >= 2 && header[2] % s.row == 0 && s.length >= 0, "%s: header: expected rows of at least 2 tokens "
              "that divide the %d of the file, got %d, of length %d", name, header[2], s.row, s.length);
    }
    check(s.vocab >= 1 && s.vocab <= largest, "%s: header: expected a vocabulary of 1 to %d, got %d", name, largest,
          s.vocab);
    check(s.eot >= 0 && s.eot < s.vocab, "%s: header: expected an end-of-text id from 0 to %d (the vocabulary), got %d",
          name, s.vocab - 1, s.eot);
    return s;
}

// Adds the paths that consist of `start`, "" or a directory and its slash, and a match of `pattern`. Between slashes, a
// name that exists stands for itself, and is a pattern only if it leads to no file. (glob(3) has no such rule, and ends
// the program if an allocation fails.)
inline void match_pattern(const std::string& start, const std::string& pattern, std::vector<std::string>& paths) {
    const size_t slash = pattern.find('/'), found = paths.size();
    const std::string part = pattern.substr(0, slash);
    const auto take = [&](const std::string& path) {
        if (slash == std::string::npos) {
            if (name_is_taken(path)) { paths.push_back(path); }
        } else if (path == start || is_directory(path)) {
            match_pattern(path + "/", pattern.substr(slash + 1), paths);
        }
    };
    take(start + part);
    if (paths.size() > found || part.find_first_of("*?[\\") == std::string::npos) { return; }
    for (const std::string& name : list_directory(start.empty() ? "." : start)) {
        if (fnmatch(part.c_str(), name.c_str(), FNM_PERIOD) == 0) { take(start + name); }
    }
}

// The files that match a pattern, in byte order in any locale: * ? [...] as in a shell, and ~/ at its start.
inline std::vector<std::string> expand_pattern(const std::string& pattern) {
    std::vector<std::string> paths;
    match_pattern("", pattern, paths);
    const char* home = getenv("HOME");
    if (paths.empty() && starts_with(pattern, "~/") && home != nullptr) {
        match_pattern(home + std::string("/"), pattern.substr(2), paths);
    }
    check(!paths.empty(), "no file matches '%s' (quote a pattern, so that the shell leaves it alone)", pattern.c_str());
    std::sort(paths.begin(), paths.end());
    return paths;
}

// out (n): ids (n) as int. Returns the largest, so that one comparison checks a chunk. bits: without the answers' mark
template <class Id> uint32_t widen(const Id* ids, uint64_t n, int* out, uint32_t bits = ~0u) {
    uint32_t largest = 0;
    for (uint64_t i = 0; i < n; i++) {
        out[i] = (int)ids[i];
        largest = std::max(largest, (uint32_t)ids[i] & bits);
    }
    return largest;
}

// out (n): tokens start .. start + n - 1 of a shard, read in chunks of 16 KiB, which fit into the L1 cache
inline void read_ids(const File& file, const Shard& shard, uint64_t start, uint64_t n, int* out) {
    union { uint8_t u8[16384]; uint16_t u16[8192]; uint32_t u32[4096]; } chunk;
    const uint64_t step = sizeof chunk / (uint64_t)shard.width;
    const uint32_t bits = shard.row > 0 ? (uint32_t)shard.answer_bit() - 1 : ~0u;
    for (uint64_t i = 0; i < n; i += step) {
        const uint64_t count = std::min(step, n - i);
        file.read(&chunk, count * (uint64_t)shard.width, shard.first_byte + (start + i) * (uint64_t)shard.width);
        uint32_t largest = 0;
        switch (shard.width) {
            case 1: largest = widen(chunk.u8, count, out + i); break;
            case 2: largest = widen(chunk.u16, count, out + i, bits); break;
            default: largest = widen(chunk.u32, count, out + i, bits);
        }
        if (largest < (uint32_t)shard.vocab) { continue; }
        uint64_t bad = i;                           // the first bad id, for the message
        while (((uint32_t)out[bad] & bits) < (uint32_t)shard.vocab) { bad++; }
        die(EXIT_BAD_INPUT, "%s: token %zu: expected an id from 0 to %d, got %u (corrupt, or of another tokenizer?)",
            shard.path.c_str(), (size_t)(start + bad), shard.vocab - 1, (unsigned)out[bad] & bits);
    }
}

// The shards of one split (training or validation). For one thread at a time: open files are cached.
struct TokenFiles {
    std::string pattern, flag;              // flag: "--train_files", for messages
    std::vector<Shard> shards;              // in byte order of their paths
    int vocab = 0, eot = -1;                // of all shards; eot: -1 in text
    int row = 0;                            // of all shards: tokens in a row; 0: streams
    uint64_t tokens = 0;                    // of all shards

    // Opens and checks every file. wanted_vocab: refuse another vocabulary (0: any). rows: accept examples in rows
    TokenFiles(const std::string& pattern, const char* flag, int wanted_vocab = 0, bool rows = false)
        : pattern(pattern), flag(flag) {
        try {
            for (const std::string& path : expand_pattern(pattern)) { add(inspect_shard(path, rows), wanted_vocab); }
        } catch (const Error& e) {
            throw Error(e.code, this->flag + ": " + e.what());
        }
        slots.resize(std::min(shards.size(), (size_t)MAX_OPEN));
    }

    // the number of samples in an epoch
    uint64_t windows(int T) const {
        check(T >= 1, "T: expected at least 1, got %d", T);
        check(row == 0 || T == row - 1, "%s: '%s': expected --T %d, as the examples stand in rows of %d tokens, got %d",
              flag.c_str(), pattern.c_str(), row - 1, row, T);
        uint64_t n = 0, longest = 0;
        for (const Shard& s : shards) {
            n += s.windows(T);
            longest = std::max(longest, s.tokens);
        }
        check(n > 0, "%s: '%s': expected a file of at least %zu tokens for T = %d, got at most %zu (use a smaller --T, "
              "or more data)", flag.c_str(), pattern.c_str(), (size_t)T + 1, T, (size_t)longest);
        return n;
    }

    // inputs, targets (T): window w, 0 <= w < windows(T). In rows, only the answer is a target.
    void window(uint64_t w, int T, int* inputs, int* targets) const {
        const uint64_t total = windows(T);
        check(w < total, "%s: window %zu of %zu at T = %d", flag.c_str(), (size_t)w, (size_t)total, T);
        size_t s = 0;                       // the shard that holds the window, w its number there
        for (; w >= shards[s].windows(T); s++) { w -= shards[s].windows(T); }
        std::vector<int> ids((size_t)T + 1);        // inputs are all but the last, targets all but the first
        read_ids(open(s), shards[s], w * (uint64_t)(row > 0 ? row : T), ids.size(), ids.data());
        std::copy(ids.begin(), ids.end() - 1, inputs);
        std::copy(ids.begin() + 1, ids.end(), targets);
        for (int t = 0; t < T && row > 0; t++) {
            const int answer = shards[s].answer_bit();
            inputs[t] &= answer - 1;
            targets[t] = (targets[t] & answer) != 0 ? targets[t] - answer : IGNORE_INDEX;
        }
    }

    // out (n): tokens start .. start + n - 1 of all shards, one after the other
    void read(uint64_t start, uint64_t n, int* out) const {
        check(start <= tokens && n <= tokens - start, "%s: %zu tokens from token %zu of '%s', which has %zu",
              flag.c_str(), (size_t)n, (size_t)start, pattern.c_str(), (size_t)tokens);
        size_t s = 0;
        for (; n > 0 && start >= shards[s].tokens; s++) { start -= shards[s].tokens; }
        for (; n > 0; s++, start = 0) {
            const uint64_t count = std::min(n, shards[s].tokens - start);
            read_ids(open(s), shards[s], start, count, out);
            out += count;
            n -= count;
        }
    }

private:
    static constexpr int MAX_OPEN = 256;    // FineWeb has 1,000 shards, and a process usually 1,024 descriptors
    struct Slot { size_t shard = 0; std::unique_ptr<File> file; };
    mutable std::vector<Slot> slots;        // shard s is open in slot s % size or not at all

    // All shards of a split must have the same vocabulary.
    void add(const Shard& s, int wanted_vocab) {
        check(wanted_vocab == 0 || s.vocab == wanted_vocab, "%s: expected a vocabulary of %d, got %d (tokens of "
              "another tokenizer?)", s.path.c_str(), wanted_vocab, s.vocab);
        if (!shards.empty()) {
            check(s.vocab == vocab && s.eot == eot, "%s: expected a vocabulary of %d with end-of-text id %d as in %s, "
                  "got %d with %d (all files must be of one tokenizer)", s.path.c_str(), vocab, eot,
                  shards[0].path.c_str(), s.vocab, s.eot);
            check(s.row == row, "%s: expected rows of %d tokens as in %s, got %d (0: a stream)", s.path.c_str(), row,
                  shards[0].path.c_str(), s.row);
        }
        vocab = s.vocab;
        eot = s.eot;
        row = s.row;
        tokens += s.tokens;
        shards.push_back(s);
    }

    // the file of shard s, opened if necessary; it must be the one that was checked at the start
    const File& open(size_t s) const {
        Slot& slot = slots[s % slots.size()];
        if (slot.file == nullptr || slot.shard != s) {
            slot.file.reset();              // close before the next one is opened, so that MAX_OPEN holds
            auto file = std::make_unique<File>(shards[s].path);
            check(file->size == shards[s].file_bytes, "%s: expected %zu bytes as at the start of the run, got %zu "
                  "(replaced while running?)", shards[s].path.c_str(), (size_t)shards[s].file_bytes,
                  (size_t)file->size);
            slot.file = std::move(file);
            slot.shard = s;
        }
        return *slot.file;
    }
};

// The ids of the shard that a flag names by @FILE, for a model of V tokens; none if its value is anything else
inline std::vector<int> prompt_in_shard(const std::string& value, const char* flag, int V) {
    constexpr uint64_t MAX_PROMPT_IDS = 1u << 24;
    const std::string path = starts_with(value, "@") ? value.substr(1) : "";
    struct stat st;
    int32_t magic = 0;
    if (stat(path.c_str(), &st) != 0 || !S_ISREG(st.st_mode) || st.st_size < (off_t)sizeof magic) { return {}; }
    File(path).read(&magic, sizeof magic, 0);
    if (magic != SHARD_MAGIC && magic != SHARD_MAGIC_UINT32) { return {}; }
    const TokenFiles shard(path, flag);
    check(shard.tokens <= MAX_PROMPT_IDS, "%s: %s: expected at most %zu tokens, got %zu", flag, path.c_str(),
          (size_t)MAX_PROMPT_IDS, (size_t)shard.tokens);
    std::vector<int> ids((size_t)shard.tokens);
    shard.read(0, shard.tokens, ids.data());
    for (const int id : ids) { check(id < V, "%s: %s: expected ids below %d, got %d", flag, path.c_str(), V, id); }
    return ids;
}

// The number of the window that is sample `index` of a run. Each epoch is a new permutation of all windows; without
// shuffle they come in order.
inline uint64_t sample_window(uint64_t index, uint64_t windows, uint64_t seed, bool shuffle) {
    check(windows > 0, "an epoch: expected at least 1 sample, got none");
    return shuffle ? permute(index % windows, windows, seed, index / windows) : index % windows;
}

// inputs, targets (count,T): samples first_index .. first_index + count - 1 of the run. Each rank reads its own rows.
inline void fill_batch(const TokenFiles& files, int T, uint64_t first_index, int count, uint64_t seed, bool shuffle,
                       int* inputs, int* targets) {
    const uint64_t windows = files.windows(T);
    for (int i = 0; i < count; i++) {
        const size_t row = (size_t)i * (size_t)T;
        files.window(sample_window(first_index + (uint64_t)i, windows, seed, shuffle), T, inputs + row, targets + row);
    }
}

// ----------------------------------------------------------------------------------------------------------
// the files that a flag names

// The command that writes the files of this pattern, "" if no script of data/ does
inline std::string data_command(const std::string& pattern, Program program) {
    struct Script { const char *directory, *name, *for_bert; };
    const Script scripts[] = {{"data/tinyshakespeare/", "tinyshakespeare.py", " --encoding bert"},
                              {"data/edu_fineweb10B/", "fineweb_edu.py", " --encoding bert"},
                              {"data/wikitext103/", "wikitext.py", " --encoding bert"},
                              {"data/mldr_en/", "mldr.py", ""}, {"data/msmarco/", "msmarco.py", ""}};
    for (const Script& s : scripts) {
        if (pattern.find(s.directory) == std::string::npos) { continue; }
        return std::string("python3 data/") + s.name + (program == BERT_FLAG ? s.for_bert : "");
    }
    return "";
}

// The files of a flag; only GPT-2's training takes rows. If there are none, the message names the script for them.
inline std::unique_ptr<TokenFiles> open_tokens(const Options& o, const char* flag, int vocab = 0) {
    const Phase opening("opening the data");
    const std::string& pattern = strcmp(flag, "--val_files") == 0 ? o.val_files : o.train_files;
    const std::string command = data_command(pattern, o.program);
    try {
        if (!command.empty()) { expand_pattern(pattern); }
    } catch (const Error& e) {
        die(e.code, "%s %s: no such file; this writes it: %s", flag, pattern.c_str(), command.c_str());
    }
    return std::make_unique<TokenFiles>(pattern, flag, vocab, o.program == GPT2_FLAG && &pattern == &o.train_files);
}

inline std::vector<std::string> file_paths(const TokenFiles& files) {
    std::vector<std::string> paths;
    for (const Shard& s : files.shards) { paths.push_back(s.path); }
    return paths;
}

// ----------------------------------------------------------------------------------------------------------
// the record of a run's data in its checkpoints, by which --resume refuses other data
//
// state.json:  "data": {"train_files": [{"file": "shard_000001.bin", "bytes": 200001024, "blocks": "xxh3:..."}, ...],
//                       "val_files": [...]}
//
// A file is identified by its name without the directory, its size and the checksum of 64 of its blocks. For damage
// between those blocks, data/verify.py compares whole shards with the manifest beside them.

// Warns if a file repeats the contents of an earlier one, once for each argument, the files of a flag or null.
template <class... Files> void say_repeated(const Files*... all) {
    std::map<std::pair<uint64_t, uint64_t>, std::pair<std::string, std::string>> found;     // by size and contents
    const auto look = [&](const auto* files) {
        std::string what;
        for (const std::string& path : files != nullptr ? file_paths(*files) : Names()) {
            const File file(path);
            const auto [same, fresh] = found.insert({{file.size, sampled_sum(file, 4)}, {files->flag, path}});
            if (fresh || !what.empty()) { continue; }
            if (sampled_sum(file) != sampled_sum(File(same->second.second))) { continue; }      // equal in 4
            what = path + " holds the same data as " + same->second.second + " of " + same->second.first;
            if (same->second.first != files->flag) { what += ", so what is measured on it is trained on, too"; }
        }
        if (!what.empty()) { say_once("warning: %s: %s", files->flag.c_str(), what.c_str()); }
    };
    (look(all), ...);
}

// Adds the files of a flag to the record. An error if state.json, which also holds the flags, would become too long to
// be read by --resume.
inline void add_to_record(Json& record, const std::string& flag, const Json& files) {
    record[flag] = files;
    size_t count = 0;
    for (const auto& item : record.items()) { count += item.value().size(); }
    const uint64_t room = JSON_MAX_BYTES - 300000, bytes = json_text(Json{{"data", record}}, 2).size();
    check(bytes <= room, "--%s: expected at most %llu files, because a checkpoint's list has no room for more, got "
          "%zu; join them into larger ones", flag.c_str(), (unsigned long long)(room * count / bytes), files.size());
}

// The files of a flag's record as facts to compare
inline Facts file_facts(const Json& files, const std::string& what) {
    check(files.is_array(), "%s: data: expected an array of files, got %s", what.c_str(), json_excerpt(files).c_str());
    Facts facts;
    for (const Json& f : files) {
        const std::string size = json_text(json_at(f, "bytes", what)), sum = json_string(f, "blocks", what);
        facts.push_back({strprintf("file %zu is", facts.size() + 1),
                         json_string(f, "file", what) + " of " + size + " bytes (" + sum + ")"});
    }
    return facts;
}

// An error if the record differs from that in `state`, the state.json of the run to be resumed, which `what` names
inline void check_resumed_data(const Options& o, const Json& record, const Json& state, const std::string& what) {
    if (!state.contains("data")) { return; }            // written before there was a record
    const Json now = parse_json(json_text(record), "data");
    for (const auto& item : json_at(state, "data", what).items()) {
        const std::string& flag = item.key();
        if (!now.contains(flag)) { continue; }          // this run does not read them
        const std::string difference = first_difference(file_facts(now.at(flag), what), file_facts(item.value(), what));
        if (difference.empty()) { continue; }
        const std::string finding = "--" + flag + ": " + difference + " as in " + what;
        check(o.may_change(flag) || flag == "val_files", "%s; restore the data, or --allow_change %s", finding.c_str(),
              flag.c_str());
        say("warning: %s", finding.c_str());
    }
}

// ----------------------------------------------------------------------------------------------------------
// masked tokens: each token that is not special is chosen with probability 0.15; of these, 80 % become [MASK], 10 % a
// random token, and 10 % stay.                                                 Devlin et al. 2019, section 3.1, task 1

// The sample number in evaluation, where positions count in the whole stream, so that windows of any length find the
// same tokens masked
constexpr uint64_t EVALUATION_SAMPLE = UINT64_MAX;
constexpr uint64_t MASKING_STREAM = 0x4d4c4d;       // keeps the draws apart from all others

// ids (n): tokens first .. first + n - 1 of the sample -> inputs (n): masked; targets (n): the chosen tokens, otherwise
// IGNORE_INDEX. inputs may be ids itself. Returns the number of chosen tokens, possibly 0. The choice depends only on
// (seed, sample, position) and the token, not on ranks, batch size or restarts.
inline int mask_tokens(const SpecialTokens& special, uint64_t seed, uint64_t sample, uint64_t first, int n,
                       const int* ids, int* inputs, int* targets, double share = 0.15) {
    check(share >= 0.0 && share <= 1.0, "masking: expected a share of the tokens from 0 to 1, got %g", share);
    const std::vector<int> skipped = special.ids();         // random tokens are drawn from the plain ones
    const int plain = special.V - (int)skipped.size();
    check(special.mask >= 0 && plain >= 1,
          "masking: expected a vocabulary with [MASK] and at least one plain token, got one of %d ids", special.V);
    const uint64_t stream = hash64(seed, MASKING_STREAM, sample);
    int chosen = 0;
    for (int k = 0; k < n; k++) {
        const uint64_t position = first + (uint64_t)k;
        const int id = ids[k];
        // One draw decides: below 0.8 share [MASK], below 0.9 share a random token, below share chosen but unchanged
        const double draw = uniform01(stream, position);
        const bool choose = draw < share && !special.is_special(id);
        targets[k] = choose ? id : IGNORE_INDEX;
        chosen += choose;
        inputs[k] = id;
        if (!choose || draw >= 0.9 * share) { continue; }
        inputs[k] = special.mask;
        if (draw < 0.8 * share) { continue; }
        inputs[k] = (int)(uniform01(stream, position, 1) * (double)plain);
        for (const int s : skipped) { inputs[k] += inputs[k] >= s; }    // skip the special ids
    }
    return chosen;
}

// ----------------------------------------------------------------------------------------------------------
// documents, ids [CLS] ... [SEP]: a collection of them, or groups (a query, its positive, hard negatives)
//
// A shard of documents has two more header fields:
//
//   byte 20    int32  documents per group; 1: a collection; 0: a stream of tokens, not of whole documents
//   byte 24    int32  documents in the shard
//
// and a document starts at each [CLS]. A file whose name ends in .txt has a document in each line, or a group,
// separated by tabs. Only a model of bytes reads it: each byte is an id. NAME.ids beside NAME.bin or NAME.txt has the
// names of a collection's documents, one per line.

// The ids of a text of bytes between [CLS] and [SEP]; "[MASK]" in the text is that token.
inline std::vector<int> text_ids(const std::string& text, const SpecialTokens& special) {
    std::vector<int> ids = {special.cls};
    for (size_t at = 0; at <= text.size();) {
        const size_t mask = text.find("[MASK]", at);
        for (size_t i = at; i < std::min(mask, text.size()); i++) { ids.push_back((unsigned char)text[i]); }
        if (mask == std::string::npos) { break; }
        ids.push_back(special.mask);
        at = mask + strlen("[MASK]");
    }
    ids.push_back(special.sep);
    return ids;
}

constexpr int MAX_GROUP = 1024;

struct DocumentFile {
    Shard shard;
    File file;                              // stays open, so that replacing it does no harm
    bool text = false;                      // its name ends in .txt
    uint64_t first = 0;                     // number of its first document
    std::vector<uint64_t> begin;            // [documents + 1] the id (in text: the byte) where each begins
    std::vector<std::string> names;         // [documents], or none

    size_t documents() const { return begin.empty() ? 0 : begin.size() - 1; }
};

// Safe for any number of threads: nothing changes after the constructor.
struct Documents {
    std::string pattern, flag;              // flag: "--encode", for messages
    SpecialTokens special;
    int group = 0;                          // documents per group
    std::vector<DocumentFile> files;        // in byte order of their paths

    // Opens and checks every file and reads it once as a whole. wanted_group: refuse another size of group (0: any).
    Documents(const std::string& pattern, const char* flag, const SpecialTokens& special, int wanted_group = 0)
        : pattern(pattern), flag(flag), special(special) {
        const Phase opening("reading the documents");
        try {
            const std::vector<std::string> paths = expand_pattern(pattern);
            check(paths.size() <= MAX_FILES, "expected at most %zu files, got %zu", MAX_FILES, paths.size());
            std::unordered_set<std::string> names;              // of all documents: each may appear once
            for (const std::string& path : paths) { add(path, wanted_group, names); }
        } catch (const Error& e) {
            throw Error(e.code, this->flag + ": " + e.what());
        }
    }

    // documents, groups in all files
    size_t size() const { return (size_t)files.back().first + files.back().documents(); }
    size_t groups() const { return size() / (size_t)group; }

    double mean_length() const {
        double ids = 0;
        for (const DocumentFile& f : files) { ids += (double)f.shard.tokens + (f.text ? (double)f.documents() : 0); }
        return ids / (double)size();
    }
    // the number of ids of document i, [CLS] and [SEP] included
    uint64_t length(size_t i) const {
        const DocumentFile& f = file_of(i);
        const uint64_t span = f.begin[i - f.first + 1] - f.begin[i - f.first];
        return span + f.text;                       // text: plus [CLS] and [SEP], less the tab or newline at its end
    }

    // out (at most max_tokens): document i, cut before [SEP] if it is longer. Returns the number of ids.
    int read(size_t i, int max_tokens, int* out) const {
        check(max_tokens >= 2, "%s: documents are cut to %d tokens, expected at least 2, for [CLS] and [SEP]",
              flag.c_str(), max_tokens);
        const DocumentFile& f = file_of(i);
        const int n = (int)std::min(length(i), (uint64_t)max_tokens);       // [CLS] and [SEP] always stay
        const uint64_t begin = f.begin[i - f.first] + !f.text;      // a shard has [CLS] itself, text has not
        read_ids(f.file, f.shard, begin, (uint64_t)n - 2, out + 1);  // n - 2 ids between [CLS] and [SEP]
        out[0] = special.cls;
        out[n - 1] = special.sep;
        return n;
    }

    // The name in NAME.ids; in text without that file, the number in the collection, from 0 on
    std::string name(size_t i) const {
        const DocumentFile& f = file_of(i);
        if (!f.names.empty()) { return f.names[i - f.first]; }
        check(f.text, "%s: %s has no names: %s does not exist", flag.c_str(), f.shard.path.c_str(),
              ids_path(f.shard.path).c_str());
        return std::to_string(i);
    }

    // "x.bin" -> "x.ids"
    static std::string ids_path(const std::string& path) { return path.substr(0, path.size() - 4) + ".ids"; }

private:
    static constexpr size_t MAX_FILES = 512;        // all are open at once; a process usually has 1,024 descriptors

    // the last file whose first document is not after i
    const DocumentFile& file_of(size_t i) const {
        check(i < size(), "%s: document %zu of %zu", flag.c_str(), i, size());
        auto after = std::upper_bound(files.begin(), files.end(), (uint64_t)i,
                                      [](uint64_t at, const DocumentFile& f) { return at < f.first; });
        return *--after;
    }

    // Opens, checks and indexes one file.
    void add(const std::string& path, int wanted_group, std::unordered_set<std::string>& names) {
        DocumentFile f{inspect_shard(path), File(path), false, 0, {}, {}};
        const char* name = path.c_str();
        f.text = f.shard.width == 1;
        f.first = files.empty() ? 0 : files.back().first + files.back().documents();
        check(f.file.size == f.shard.file_bytes, "%s: its size changed while it was opened", name);
        const int found = f.text ? index_text(f) : index_shard(f);
        const int wanted = files.empty() ? wanted_group : group;
        const std::string as_in = files.empty() ? "" : " as in " + files[0].shard.path;
        check(wanted == 0 || found == wanted, "%s: expected %s%s, got %s", name, group_text(wanted).c_str(),
              as_in.c_str(), group_text(found).c_str());
        group = found;
        if (group == 1 && path_exists(ids_path(path))) { read_names(f, names); }
        files.push_back(std::move(f));
    }

    static std::string group_text(int n) {
        return n == 1 ? "a collection" : strprintf("groups of %d documents", n);
    }

    // Calls visit(number, id) for each id of the file in order; reports the progress every five seconds.
    template <class F> void scan(const DocumentFile& f, F visit) const {
        const double start = wall_seconds();
        double last = start;
        const uint64_t step = 1 << 18;                      // ids that are held at a time
        std::vector<int> ids((size_t)std::min(step, f.shard.tokens));
        for (uint64_t at = 0; at < f.shard.tokens; at += step) {
            const uint64_t n = std::min(step, f.shard.tokens - at);
            read_ids(f.file, f.shard, at, n, ids.data());
            for (uint64_t k = 0; k < n; k++) { visit(at + k, ids[(size_t)k]); }
            const double now = wall_seconds();
            if (now - last < 5.0) { continue; }
            last = now;
            const double done = (double)(at + n) / (double)f.shard.tokens;
            say("%s: indexing %s: %.0f%%, ETA %s", flag.c_str(), f.shard.path.c_str(), 100 * done,
                format_duration((now - start) * (1 - done) / done).c_str());
        }
    }

    // Both index functions fill f.begin and return the number of documents per group. A shard is ([CLS] ids [SEP])*.
    int index_shard(DocumentFile& f) const {
        const char* name = f.shard.path.c_str();
        int32_t header[7];
        f.file.read(header, sizeof header, 0);
        const int in_group = header[5], documents = header[6];
        check(f.shard.vocab <= special.V && f.shard.eot == special.sep,
              "%s: expected a vocabulary of %d with [SEP] = %d, got %d with last id %d (tokens of another tokenizer?)",
              name, special.V, special.sep, f.shard.vocab, f.shard.eot);
        check(in_group >= 1 && in_group <= MAX_GROUP, "%s: header: expected groups of 1 to %d documents, got %d (0: a "
              "stream of tokens, not of whole documents)", name, MAX_GROUP, in_group);
        const uint64_t most = f.shard.tokens / 2;               // each has at least [CLS] and [SEP]
        check(documents >= 1 && (uint64_t)documents <= most, "%s: header: expected 1 to %zu documents in %zu tokens, "
              "got %d", name, (size_t)most, (size_t)f.shard.tokens, documents);
        check(documents % in_group == 0, "%s: header: %d documents do not divide into groups of %d", name, documents,
              in_group);
        f.begin.reserve((size_t)documents + 1);
        int before = special.sep;                           // as if a document ended before the first
        scan(f, [&](uint64_t at, int id) {
            check((id == special.cls) == (before == special.sep), "%s: token %zu is %d after %d: expected [CLS] = %d "
                  "at the start and after each [SEP] = %d, and nowhere else", name, (size_t)at, id, before,
                  special.cls, special.sep);
            check(id != special.cls || f.begin.size() < (size_t)documents,
                  "%s: expected the %d documents that its header says, got more", name, documents);
            if (id == special.cls) { f.begin.push_back(at); }
            before = id;
        });
        check(before == special.sep, "%s: expected [SEP] = %d at the end, got token %d inside a document", name,
              special.sep, before);
        check(f.begin.size() == (size_t)documents, "%s: expected the %d documents that its header says, got %zu", name,
              documents, f.begin.size());
        f.begin.push_back(f.shard.tokens);                  // the end of the last
        return in_group;
    }

    // Every line must have the same number of documents, none of them empty; the last newline may be missing.
    int index_text(DocumentFile& f) const {
        const char* name = f.shard.path.c_str();
        const char* shards = "make shards of it: python3 data/text.py --encoding bert --pairs lines";
        const char* instead = flag == "--encode" ? "python3 scripts/text.py encode RUN" : shards;
        check(special.V == BYTE_VOCAB, "%s: text is read as bytes, and the model has a vocabulary of %d; %s %s "
              "--tokenizer DIR --out OUT", name, special.V, instead, name);
        size_t line = 1, in_line = 0;                       // documents of this line so far
        size_t in_group = 0;                                // documents of line 1
        f.begin.push_back(0);
        const auto end_of_document = [&](uint64_t at) {
            check(at > f.begin.back(), "%s: line %zu has an empty document", name, line);
            f.begin.push_back(at + 1);                      // after the tab or newline
            in_line++;
        };
        const auto end_of_line = [&] {
            if (line == 1) { in_group = in_line; }
            check(in_line == in_group, "%s: line %zu: expected %zu documents separated by tabs, as in line 1, got %zu",
                  name, line, in_group, in_line);
            check(in_line <= (size_t)MAX_GROUP, "%s: line %zu: expected at most %d documents, got %zu", name, line,
                  MAX_GROUP, in_line);
            in_line = 0;
            line++;
        };
        int last = '\n';
        scan(f, [&](uint64_t at, int c) {
            last = c;
            if (c == '\n' || c == '\t') { end_of_document(at); }
            if (c == '\n') { end_of_line(); }
        });
        if (last != '\n') {
            end_of_document(f.shard.tokens);
            end_of_line();
        }
        return (int)in_group;
    }

    // f.names: the lines of NAME.ids
    static void read_names(DocumentFile& f, std::unordered_set<std::string>& seen) {
        const std::string path = ids_path(f.shard.path);
        refuse_stand_in(path);
        const std::string text = read_file(path, 1u << 30);
        f.names.reserve(std::min(f.documents(), text.size()));
        for (size_t begin = 0; begin < text.size();) {
            const size_t end = std::min(text.find('\n', begin), text.size());
            f.names.push_back(text.substr(begin, end - begin));
            const std::string& s = f.names.back();
            // white space separates the fields of qrels
            check(!s.empty() && s.find_first_of(" \t\r\v\f") == std::string::npos,
                  "%s: line %zu: expected a name without white space, got '%.80s'", path.c_str(), f.names.size(),
                  s.c_str());
            check(seen.insert(s).second, "%s: the name %.80s appears twice", path.c_str(), s.c_str());
            begin = end + 1;
        }
        check(f.names.size() == f.documents(), "%s: expected %zu names, as %s has that many documents, got %zu",
              path.c_str(), f.documents(), f.shard.path.c_str(), f.names.size());
    }
};

// Groups as a matrix. Row r * groups + g is document r of group g: all queries, then their positives in the same order,
// then the negatives. So the positives stand on the diagonal of the scores of queries with documents.
struct GroupBatch {
    int groups = 0, rows = 0;               // rows = groups * documents per group
    int T = 0;                              // of the longest row, rounded up to a multiple of 8, at most max_tokens
    std::vector<int> ids;                   // (rows,T), [PAD] after the end of each row
    std::vector<int> lengths;               // (rows)
    std::vector<size_t> which = {};         // (rows): the numbers of their documents
    int swapped = 0;                        // groups that were replaced
};

// Adds the uncut texts of group `drawn` to `seen`; false, without adding any, if one is there already or twice in it
inline bool add_texts(const Documents& documents, uint64_t drawn, std::unordered_set<uint64_t>& seen) {
    std::vector<uint64_t> texts;
    std::vector<int> ids;
    for (int r = 0; r < documents.group; r++) {
        const size_t i = (size_t)drawn * (size_t)documents.group + (size_t)r;
        ids.resize((size_t)std::min(documents.length(i), (uint64_t)INT_MAX));
        documents.read(i, (int)ids.size(), ids.data());
        uint64_t text = ids.size();
        for (int id : ids) { text = hash64(text, (uint64_t)id); }
        if (seen.count(text) > 0 || std::find(texts.begin(), texts.end(), text) != texts.end()) { return false; }
        texts.push_back(text);
    }
    seen.insert(texts.begin(), texts.end());
    return true;
}

// The group at this index of a run. If the batch already holds one of its texts (`seen`), which would be its own
// negative, the next group that shares none takes its place, counted from a draw by (seed, index).
inline uint64_t choose_group(const Documents& documents, uint64_t index, uint64_t seed, bool shuffle,
                             std::unordered_set<uint64_t>& seen, int& swapped) {
    const uint64_t groups = documents.groups(), drawn = sample_window(index, groups, seed, shuffle);
    if (add_texts(documents, drawn, seen)) { return drawn; }
    swapped++;
    for (uint64_t k = 0; k < groups; k++) {
        const uint64_t next = (hash64(seed, index) % groups + k) % groups;
        if (add_texts(documents, next, seen)) { return next; }
    }
    die(EXIT_BAD_INPUT, "%s: '%s' has too few different texts to fill a batch with none of them twice; use a smaller "
        "batch, or more data", documents.flag.c_str(), documents.pattern.c_str());
}

// Groups first_index .. first_index + count - 1 of a run. No text appears twice in a batch.
inline void fill_groups(const Documents& documents, uint64_t first_index, int count, uint64_t seed, bool shuffle,
                        int max_tokens, GroupBatch& batch) {
    const uint64_t groups = documents.groups();
    check(count >= 1 && (uint64_t)count <= groups,
          "%s: expected a batch of 1 to %zu groups, which '%s' has, got %d (use a smaller batch, or more data)",
          documents.flag.c_str(), (size_t)groups, documents.pattern.c_str(), count);
    batch = {};
    batch.groups = count;
    batch.rows = count * documents.group;
    batch.which.resize((size_t)batch.rows);
    std::unordered_set<uint64_t> seen;                      // the texts of the batch
    uint64_t longest = 0;
    for (int g = 0; g < count; g++) {
        const uint64_t drawn = choose_group(documents, first_index + (uint64_t)g, seed, shuffle, seen, batch.swapped);
        const size_t first = (size_t)drawn * (size_t)documents.group;       // its first document, the query
        for (int r = 0; r < documents.group; r++) {
            batch.which[(size_t)(r * count + g)] = first + (size_t)r;
            longest = std::max(longest, documents.length(first + (size_t)r));
        }
    }
    // a multiple of 8 makes the kernels faster, and the added [PAD]s cost little
    batch.T = (int)std::min((longest + 7) / 8 * 8, (uint64_t)std::max(max_tokens, 0));
    batch.ids.assign(checked_mul((size_t)batch.rows, (size_t)batch.T, "a batch of groups"), documents.special.pad);
    batch.lengths.resize((size_t)batch.rows);
    for (size_t r = 0; r < batch.which.size(); r++) {
        batch.lengths[r] = documents.read(batch.which[r], max_tokens, batch.ids.data() + r * (size_t)batch.T);
    }
}
