// text/documents.h -- what a BERT reads: tokens, some of them masked, and whole documents as ids [CLS] ... [SEP]: a
// collection of single ones, or groups (a query, its positive, hard negatives).
//
// A shard of documents is one of dataloader.h, with two more header fields:
//
//   byte 20    int32  documents per group; 1: a collection; 0: a stream of tokens, not of whole documents
//   byte 24    int32  documents in the shard
//
// and a document starts at each [CLS]. A file whose name ends in .txt is text: one document per line, or one group per
// line, its documents separated by tabs. Only a model of bytes reads it: each byte is an id. NAME.ids beside NAME.bin
// or NAME.txt holds the names of a collection's documents, one per line.
#pragma once

#include <unordered_set>

#include "../../base/parse.h"
#include "dataloader.h"
#include "tokenizer.h"

// ----------------------------------------------------------------------------------------------------------
// masking: each token that is not special is chosen with probability 0.15. Of the chosen, 80 % become [MASK], 10 % a
// random token, and 10 % stay.                                                 Devlin et al. 2019, section 3.1, task 1

// The sample number of evaluation, which no training sample has. Its positions count in the whole stream of tokens, so
// that windows of any length find the same tokens masked.
constexpr uint64_t EVALUATION_SAMPLE = UINT64_MAX;
constexpr uint64_t MASKING_STREAM = 0x4d4c4d;       // of random numbers that nothing else draws

// ids (n): tokens first .. first + n - 1 of the sample -> inputs (n): the same, masked; targets (n): the token where
// one was chosen, otherwise IGNORE_INDEX. inputs may be ids itself. Returns how many were chosen, possibly 0. The
// choice depends only on (seed, sample, position) and the token: not on the ranks, the batch size or restarts.
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
        // One draw decides both: chosen is [0, share), and of that [0, 0.8) share becomes [MASK], [0.8, 0.9) share a
        // random token, and the rest stays.
        const double draw = uniform01(stream, position);
        const bool choose = draw < share && !special.is_special(id);
        targets[k] = choose ? id : IGNORE_INDEX;
        chosen += choose;
        inputs[k] = id;
        if (!choose || draw >= 0.9 * share) { continue; }
        inputs[k] = special.mask;
        if (draw < 0.8 * share) { continue; }
        inputs[k] = (int)(uniform01(stream, position, 1) * (double)plain);
        for (const int s : skipped) { inputs[k] += inputs[k] >= s; }    // each special id at or below moves it up
    }
    return chosen;
}

// ----------------------------------------------------------------------------------------------------------
// documents

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
    File file;                              // open for the whole run, so that replacing the file does no harm
    bool text = false;                      // its name ends in .txt
    uint64_t first = 0;                     // number of its first document
    std::vector<uint64_t> begin;            // [documents + 1] where each begins, in ids; of text: its first byte
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

    // the number of documents and of groups in all files
    size_t size() const { return (size_t)files.back().first + files.back().documents(); }
    size_t groups() const { return size() / (size_t)group; }

    // the number of ids of document i, [CLS] and [SEP] included
    uint64_t length(size_t i) const {
        const DocumentFile& f = file_of(i);
        const uint64_t span = f.begin[i - f.first + 1] - f.begin[i - f.first];
        return span + f.text;                       // text: plus [CLS] and [SEP], less the tab or newline at its end
    }

    // out (at most max_tokens): document i, cut to max_tokens by leaving out ids before [SEP]. Returns how many.
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

    // Its line in NAME.ids, or for text without such a file its number in the collection, from 0 on
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

    // Calls visit(number, id) for each id of the file in order, and reports its progress every five seconds.
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

    // Both index functions fill f.begin and return the number of documents per group. Ids must be ([CLS] ids [SEP])*.
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
        f.begin.reserve((size_t)documents + 1);             // at most half of the tokens, as checked
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

    // Every line must have the same number of documents, none of them empty; the last newline may be missing. The bytes
    // stay in the file.
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
            // white space separates the fields of qrels, so they could not contain such a name
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

// Groups as a matrix. Row r * groups + g is document r of group g: first all queries, then their positives in the same
// order, then the negatives. So the scores of queries with documents have their positives on the diagonal.
struct GroupBatch {
    int groups = 0, rows = 0;               // rows = groups * documents per group
    int T = 0;                              // of the longest row, rounded up to a multiple of 8, at most max_tokens
    std::vector<int> ids;                   // (rows,T), [PAD] after the end of each row
    std::vector<int> lengths;               // (rows)
    int swapped = 0;                        // groups that were replaced
};

// Adds the texts of group `drawn`, uncut, to `seen`; false, and adds none, if one is there already or twice in it.
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

// Chooses the group for this index of a run. If the batch already holds one of its texts (`seen`), the next group that
// shares none is used instead, counted from a place drawn from (seed, index): a text that appears twice in a batch
// would be its own negative.
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

// Groups first_index .. first_index + count - 1 of a run, by (seed, index of the batch). No text is in a batch twice.
inline void fill_groups(const Documents& documents, uint64_t first_index, int count, uint64_t seed, bool shuffle,
                        int max_tokens, GroupBatch& batch) {
    const uint64_t groups = documents.groups();
    check(count >= 1 && (uint64_t)count <= groups,
          "%s: expected a batch of 1 to %zu groups, which '%s' has, got %d (use a smaller batch, or more data)",
          documents.flag.c_str(), (size_t)groups, documents.pattern.c_str(), count);
    batch = {};
    batch.groups = count;
    batch.rows = count * documents.group;
    std::vector<size_t> which((size_t)batch.rows);          // the number of each row's document
    std::unordered_set<uint64_t> seen;                      // the texts of the batch
    uint64_t longest = 0;
    for (int g = 0; g < count; g++) {
        const uint64_t drawn = choose_group(documents, first_index + (uint64_t)g, seed, shuffle, seen, batch.swapped);
        const size_t first = (size_t)drawn * (size_t)documents.group;       // its first document, the query
        for (int r = 0; r < documents.group; r++) {
            which[(size_t)(r * count + g)] = first + (size_t)r;
            longest = std::max(longest, documents.length(first + (size_t)r));
        }
    }
    // [PAD] fills the rest of each row, so a multiple of 8 costs little, and the kernels are faster
    batch.T = (int)std::min((longest + 7) / 8 * 8, (uint64_t)std::max(max_tokens, 0));
    batch.ids.assign(checked_mul((size_t)batch.rows, (size_t)batch.T, "a batch of groups"), documents.special.pad);
    batch.lengths.resize((size_t)batch.rows);
    for (size_t r = 0; r < which.size(); r++) {
        batch.lengths[r] = documents.read(which[r], max_tokens, batch.ids.data() + r * (size_t)batch.T);
    }
}
