// text/dataloader.h -- token shards and plain text as streams of ids, and the order in which samples are drawn.
//
// A file is a shard (1024-byte header of int32: magic, version, tokens, vocabulary, end-of-text id; then uint16 ids, or
// uint32 ids in llama-3's) or, when its name ends in .txt, raw bytes: each byte an id, vocabulary 256. A sample is a
// window of T + 1 tokens at stride T inside one shard: T inputs, and T targets shifted by one. Which window is sample
// number i is a pure function of (seed, i), so that neither ranks nor batch sizes nor restarts change the order.
#ifndef LLMC_TEXT_DATALOADER_H
#define LLMC_TEXT_DATALOADER_H

#include <memory>

#include <glob.h>

#include "../base/common.h"
#include "../base/rand.h"

constexpr int SHARD_HEADER_BYTES = 1024;
constexpr int SHARD_MAGIC = 20240520, SHARD_VERSION = 1;                // uint16; GPT-2's unless the header differs
constexpr int SHARD_MAGIC_UINT32 = 20240801, SHARD_VERSION_UINT32 = 7;  // uint32; llama-3's likewise
constexpr int MAX_VOCAB = 1 << 20;          // a model may be sized by this header field: a hostile one must not get far

struct Shard {
    std::string path;
    uint64_t file_bytes = 0, first_byte = 0, tokens = 0;
    int width = 0;                          // bytes an id
    int vocab = 0, eot = -1;

    uint64_t windows(int T) const { return tokens == 0 ? 0 : (tokens - 1) / (uint64_t)T; }
};

// Everything about a file that can be checked without reading its tokens; allocates nothing.
inline Shard inspect_shard(const std::string& path) {
    const File file(path);
    Shard s;
    s.path = path;
    s.file_bytes = file.size;
    const char* name = path.c_str();
    if (path.size() >= 4 && path.compare(path.size() - 4, 4, ".txt") == 0) {
        check(file.size > 0, "%s: is empty", name);
        s.tokens = file.size;
        s.width = 1;
        s.vocab = 256;
        return s;
    }
    check(file.size >= SHARD_HEADER_BYTES, "%s: %zu bytes, but a token shard starts with a header of %d (a text file "
          "must be named .txt)", name, (size_t)file.size, SHARD_HEADER_BYTES);
    int32_t header[5];                      // magic, version, tokens, vocabulary, end-of-text
    file.read(header, sizeof header, 0);
    const bool wide = header[0] == SHARD_MAGIC_UINT32;
    check(wide || header[0] == SHARD_MAGIC, "%s: magic number %d, wanted %d: not a token shard (raw uint16 without a "
          "header must be converted, and a text file must be named .txt)", name, header[0], SHARD_MAGIC);
    const int version = wide ? SHARD_VERSION_UINT32 : SHARD_VERSION;
    check(header[1] == version, "%s: version %d, wanted %d", name, header[1], version);
    check(header[2] > 0, "%s: the header says %d tokens, wanted 1 to %d", name, header[2], INT32_MAX);
    s.first_byte = SHARD_HEADER_BYTES;
    s.tokens = (uint64_t)header[2];
    s.width = wide ? 4 : 2;
    const uint64_t wanted = s.first_byte + s.tokens * (uint64_t)s.width;
    check(file.size == wanted, "%s: %zu bytes, but the %d tokens of its header make %zu (truncated, or still being "
          "written?)", name, (size_t)file.size, header[2], (size_t)wanted);
    const bool unnamed = header[3] == 0 && header[4] == 0;
    s.vocab = !unnamed ? header[3] : wide ? 128256 : 50257;
    s.eot = !unnamed ? header[4] : wide ? 128000 : 50256;
    const int largest = wide ? MAX_VOCAB : 65536;
    check(s.vocab >= 1 && s.vocab <= largest, "%s: the header says a vocabulary of %d, wanted 1 to %d", name, s.vocab,
          largest);
    check(s.eot >= 0 && s.eot < s.vocab, "%s: the header says end-of-text id %d, wanted 0 to %d (its vocabulary)", name,
          s.eot, s.vocab - 1);
    return s;
}

// The files that a glob(3) pattern names, in byte order whatever the locale.
inline std::vector<std::string> expand_pattern(const std::string& pattern) {
    if (path_exists(pattern)) { return {pattern}; }             // a name may hold [ or *
    glob_t g;
    const int r = glob(pattern.c_str(), GLOB_TILDE, nullptr, &g);
    std::vector<std::string> paths;
    if (r == 0) { paths.assign(g.gl_pathv, g.gl_pathv + g.gl_pathc); }
    globfree(&g);
    check(r == 0 || r == GLOB_NOMATCH, "cannot expand '%s' (out of memory, or a directory cannot be read)",
          pattern.c_str());
    check(!paths.empty(), "no file matches '%s' (quote a pattern, so that the shell leaves it alone)", pattern.c_str());
    std::sort(paths.begin(), paths.end());
    return paths;
}

// The shards of one split. For one thread at a time: file descriptors are cached.
struct TokenFiles {
    std::string pattern, flag;              // flag: "--train_files", for messages
    std::vector<Shard> shards;
    int vocab = 0, eot = -1;                // eot: -1 in text
    uint64_t tokens = 0;                    // of all shards

    // Every file is opened and checked here. wanted_vocab: refuse another vocabulary (0: any).
    TokenFiles(const std::string& pattern, const char* flag, int wanted_vocab = 0) : pattern(pattern), flag(flag) {
        try {
            for (const std::string& path : expand_pattern(pattern)) { add(inspect_shard(path), wanted_vocab); }
        } catch (const Error& e) {
            throw Error(e.code, this->flag + ": " + e.what());
        }
        slots.resize(std::min(shards.size(), (size_t)MAX_OPEN));
    }

    // Number of samples in an epoch.
    uint64_t windows(int T) const {
        check(T >= 1, "T = %d, wanted at least 1", T);
        uint64_t n = 0, longest = 0;
        for (const Shard& s : shards) {
            n += s.windows(T);
            longest = std::max(longest, s.tokens);
        }
        check(n > 0, "%s: the longest file of '%s' has %zu tokens, but a window at T = %d takes %zu (a smaller --T, or "
              "more data)", flag.c_str(), pattern.c_str(), (size_t)longest, T, (size_t)T + 1);
        return n;
    }

    // inputs, targets (T): window w, 0 <= w < windows(T)
    void window(uint64_t w, int T, int* inputs, int* targets) const {
        const uint64_t total = windows(T);
        check(w < total, "%s: window %zu of %zu at T = %d", flag.c_str(), (size_t)w, (size_t)total, T);
        size_t s = 0;
        for (; w >= shards[s].windows(T); s++) { w -= shards[s].windows(T); }
        std::vector<int> ids((size_t)T + 1);
        read_shard(s, w * (uint64_t)T, ids.size(), ids.data());
        std::copy(ids.begin(), ids.end() - 1, inputs);
        std::copy(ids.begin() + 1, ids.end(), targets);
    }

    // out (n): tokens start .. start + n - 1 of all shards in a row
    void read(uint64_t start, uint64_t n, int* out) const {
        check(start <= tokens && n <= tokens - start, "%s: %zu tokens from token %zu of '%s', which has %zu",
              flag.c_str(), (size_t)n, (size_t)start, pattern.c_str(), (size_t)tokens);
        size_t s = 0;
        for (; n > 0 && start >= shards[s].tokens; s++) { start -= shards[s].tokens; }
        for (; n > 0; s++, start = 0) {
            const uint64_t count = std::min(n, shards[s].tokens - start);
            read_shard(s, start, count, out);
            out += count;
            n -= count;
        }
    }

private:
    static constexpr int MAX_OPEN = 256;    // of the usual 1024 descriptors; FineWeb has 1,000 shards
    struct Slot { size_t shard = 0; std::unique_ptr<File> file; };
    mutable std::vector<Slot> slots;        // shard s may be open in slot s % size

    void add(const Shard& s, int wanted_vocab) {
        check(wanted_vocab == 0 || s.vocab == wanted_vocab, "%s: vocabulary of %d, wanted %d (tokens of another "
              "tokenizer?)", s.path.c_str(), s.vocab, wanted_vocab);
        if (!shards.empty()) {
            check(s.vocab == vocab && s.eot == eot, "%s: vocabulary of %d with end-of-text id %d, but %s has %d with "
                  "%d (all files must be of one tokenizer)", s.path.c_str(), s.vocab, s.eot, shards[0].path.c_str(),
                  vocab, eot);
        }
        vocab = s.vocab;
        eot = s.eot;
        tokens += s.tokens;
        shards.push_back(s);
    }

    const File& open(size_t s) const {
        Slot& slot = slots[s % slots.size()];
        if (slot.file == nullptr || slot.shard != s) {
            slot.file.reset();              // closed before the next one is opened
            auto file = std::make_unique<File>(shards[s].path);
            check(file->size == shards[s].file_bytes, "%s: %zu bytes, but it had %zu when the run started (replaced "
                  "while running?)", shards[s].path.c_str(), (size_t)file->size, (size_t)shards[s].file_bytes);
            slot.file = std::move(file);
            slot.shard = s;
        }
        return *slot.file;
    }

    // ids (n) as int; returns the largest, as unsigned, so that one comparison a chunk checks them all
    template <class Id> static uint32_t widen(const Id* ids, uint64_t n, int* out) {
        uint32_t largest = 0;
        for (uint64_t i = 0; i < n; i++) {
            out[i] = (int)ids[i];
            largest = std::max(largest, (uint32_t)ids[i]);
        }
        return largest;
    }

    void read_shard(size_t s, uint64_t start, uint64_t n, int* out) const {
        const Shard& shard = shards[s];
        const File& file = open(s);
        union { uint8_t u8[16384]; uint16_t u16[8192]; uint32_t u32[4096]; } chunk;
        const uint64_t step = sizeof chunk / (uint64_t)shard.width;
        for (uint64_t i = 0; i < n; i += step) {
            const uint64_t count = std::min(step, n - i);
            file.read(&chunk, count * (uint64_t)shard.width, shard.first_byte + (start + i) * (uint64_t)shard.width);
            const uint32_t largest = shard.width == 1 ? widen(chunk.u8, count, out + i)
                                   : shard.width == 2 ? widen(chunk.u16, count, out + i)
                                                      : widen(chunk.u32, count, out + i);
            if (largest < (uint32_t)vocab) { continue; }
            uint64_t bad = i;
            while ((uint32_t)out[bad] < (uint32_t)vocab) { bad++; }
            die(EXIT_BAD_INPUT, "%s: token %zu has id %u, but the vocabulary is V = %d (corrupt, or of another "
                "tokenizer)", shard.path.c_str(), (size_t)(start + bad), (unsigned)out[bad], vocab);
        }
    }
};

// Which of `windows` windows is sample number `index` of a run: each epoch is a permutation of its own.
inline uint64_t sample_window(uint64_t index, uint64_t windows, uint64_t seed, bool shuffle) {
    check(windows > 0, "an epoch of no samples");
    return shuffle ? permute(index % windows, windows, seed, index / windows) : index % windows;
}

// inputs, targets (count, T): samples first_index .. first_index + count - 1 of the run
inline void fill_batch(const TokenFiles& files, int T, uint64_t first_index, int count, uint64_t seed, bool shuffle,
                       int* inputs, int* targets) {
    const uint64_t windows = files.windows(T);
    for (int i = 0; i < count; i++) {
        const size_t row = (size_t)i * (size_t)T;
        files.window(sample_window(first_index + (uint64_t)i, windows, seed, shuffle), T, inputs + row, targets + row);
    }
}

#endif
