// text/documents.h -- whole documents, alone (a collection) or in groups (a query, its positive, hard negatives), as ids [CLS] ... [SEP].
//
// A file is a BERT shard whose header says how many documents are in a group ([5]; 1: a collection) and in the shard ([6]): a document
// starts at each [CLS]. Or, when its name ends in .txt, lines of text that are read as bytes: a document a line, or the documents of a
// group with tabs between them. NAME.ids beside NAME.bin or NAME.txt has the names of a collection's documents, one a line.
#ifndef LLMC_TEXT_DOCUMENTS_H
#define LLMC_TEXT_DOCUMENTS_H

#include <unordered_set>

#include "dataloader.h"
#include "mlm.h"

constexpr int MAX_GROUP = 1024;

struct DocumentFile {
    Shard shard;
    File file;                              // open for as long as the run: a file replaced meanwhile is none of ours
    bool text = false;
    uint64_t first = 0;                     // number of its first document
    std::vector<uint64_t> begin;            // [documents + 1] in ids: where each begins; behind one of text is a tab or newline
    std::vector<std::string> names;         // [documents], or none

    size_t documents() const { return begin.empty() ? 0 : begin.size() - 1; }
};

// For any number of threads: nothing changes after the constructor.
struct Documents {
    std::string pattern, flag;              // flag: "--queries", for messages
    SpecialTokens special;
    int group = 0;                          // documents in one
    std::vector<DocumentFile> files;

    // Every file is opened, checked and read once from its first byte to its last. wanted_group: refuse another size (0: any).
    Documents(const std::string& pattern, const char* flag, const SpecialTokens& special, int wanted_group = 0)
        : pattern(pattern), flag(flag), special(special) {
        try {
            const std::vector<std::string> paths = expand_pattern(pattern);
            check(paths.size() <= MAX_FILES, "%zu files, at most %zu can be open at once", paths.size(), MAX_FILES);
            for (const std::string& path : paths) { add(path, wanted_group); }
            check_names();
        } catch (const Error& e) {
            throw Error(e.code, this->flag + ": " + e.what());
        }
    }

    size_t size() const { return (size_t)files.back().first + files.back().documents(); }
    size_t groups() const { return size() / (size_t)group; }

    // ids of document i, [CLS] and [SEP] among them
    uint64_t length(size_t i) const {
        const DocumentFile& f = file_of(i);
        const uint64_t span = f.begin[i - f.first + 1] - f.begin[i - f.first];
        return f.text ? span + 1 : span;            // of text: without what stands behind it, and with its frame
    }

    // out (at most max_tokens): document i, cut to max_tokens by leaving out what is in front of [SEP]. Returns how many.
    int read(size_t i, int max_tokens, int* out) const {
        check(max_tokens >= 2, "%s: documents cut to %d tokens, wanted at least [CLS] and [SEP]", flag.c_str(), max_tokens);
        const DocumentFile& f = file_of(i);
        const int n = (int)std::min(length(i), (uint64_t)max_tokens);
        const uint64_t begin = f.begin[i - f.first] + !f.text;
        read_ids(f, begin, (uint64_t)n - 2, out + 1);
        out[0] = special.cls;
        out[n - 1] = special.sep;
        return n;
    }

    // Its line in NAME.ids; of text without such a file its number in the collection, from 0 on.
    std::string name(size_t i) const {
        const DocumentFile& f = file_of(i);
        if (!f.names.empty()) { return f.names[i - f.first]; }
        check(f.text, "%s: %s has no names: %s is not there", flag.c_str(), f.shard.path.c_str(), ids_path(f.shard.path).c_str());
        return std::to_string(i);
    }

    // "x.bin" -> "x.ids"
    static std::string ids_path(const std::string& path) { return path.substr(0, path.size() - 4) + ".ids"; }

private:
    static constexpr size_t MAX_FILES = 512;        // of the usual 1024 descriptors

    const DocumentFile& file_of(size_t i) const {
        check(i < size(), "%s: document %zu of %zu", flag.c_str(), i, size());
        auto after = std::upper_bound(files.begin(), files.end(), (uint64_t)i,
                                      [](uint64_t at, const DocumentFile& f) { return at < f.first; });
        return *--after;
    }

    void add(const std::string& path, int wanted_group) {
        DocumentFile f{inspect_shard(path), File(path), false, 0, {}, {}};
        const char* name = path.c_str();
        f.text = f.shard.width == 1;
        f.first = files.empty() ? 0 : files.back().first + files.back().documents();
        check(f.file.size == f.shard.file_bytes, "%s: changed its size while it was opened", name);
        const int found = f.text ? index_text(f) : index_shard(f);
        check(wanted_group == 0 || found == wanted_group, "%s: %s found, %s wanted", name, group_text(found).c_str(),
              group_text(wanted_group).c_str());
        check(files.empty() || found == group, "%s: %s found, but %s has %s", name, group_text(found).c_str(),
              files.empty() ? "" : files[0].shard.path.c_str(), group_text(group).c_str());
        group = found;
        if (group == 1 && path_exists(ids_path(path))) { read_names(f); }
        files.push_back(std::move(f));
    }

    static std::string group_text(int n) { return n == 1 ? "a collection" : strprintf("groups of %d documents", n); }

    // Calls visit(number, id) for all ids in their order, and says now and then how far it is.
    template <class F> void scan(const DocumentFile& f, F visit) const {
        double last = wall_seconds();
        const double start = last;
        const uint64_t step = 1 << 18;
        std::vector<int> ids((size_t)std::min(step, f.shard.tokens));
        for (uint64_t at = 0; at < f.shard.tokens; at += step) {
            const uint64_t n = std::min(step, f.shard.tokens - at);
            read_ids(f, at, n, ids.data());
            for (uint64_t k = 0; k < n; k++) { visit(at + k, ids[(size_t)k]); }
            const double now = wall_seconds();
            if (now - last < 5.0) { continue; }
            last = now;
            const double done = (double)(at + n) / (double)f.shard.tokens;
            fprintf(stderr, "%s: indexing %s: %.0f%%, ETA %s\n", flag.c_str(), f.shard.path.c_str(), 100 * done,
                    format_duration((now - start) * (1 - done) / done).c_str());
        }
    }

    // Returns the documents in a group, as all functions named so.
    int index_shard(DocumentFile& f) const {
        const char* name = f.shard.path.c_str();
        int32_t header[7];
        f.file.read(header, sizeof header, 0);
        const int in_group = header[5], documents = header[6];
        check(f.shard.vocab == special.V && f.shard.eot == special.sep, "%s: vocabulary of %d with last id %d, wanted %d with [SEP] = %d "
              "(tokens of another tokenizer?)", name, f.shard.vocab, f.shard.eot, special.V, special.sep);
        check(in_group >= 1 && in_group <= MAX_GROUP, "%s: the header says groups of %d documents, wanted 1 to %d (0: a stream of tokens, "
              "not of whole documents)", name, in_group, MAX_GROUP);
        check(documents >= 1 && (uint64_t)documents <= f.shard.tokens / 2, "%s: the header says %d documents in %zu tokens, wanted 1 to %zu",
              name, documents, (size_t)f.shard.tokens, (size_t)(f.shard.tokens / 2));
        check(documents % in_group == 0, "%s: the header says %d documents in groups of %d", name, documents, in_group);
        f.begin.reserve((size_t)documents + 1);
        int before = special.sep;
        scan(f, [&](uint64_t at, int id) {
            check((id == special.cls) == (before == special.sep), "%s: token %zu is %d behind %d: [CLS] = %d wanted at the start and behind "
                  "each [SEP] = %d, and nowhere else", name, (size_t)at, id, before, special.cls, special.sep);
            check(id != special.cls || f.begin.size() < (size_t)documents, "%s: more than the %d documents that its header says", name,
                  documents);
            if (id == special.cls) { f.begin.push_back(at); }
            before = id;
        });
        check(before == special.sep, "%s: ends with token %d inside a document, wanted [SEP] = %d", name, before, special.sep);
        check(f.begin.size() == (size_t)documents, "%s: %zu documents, but its header says %d", name, f.begin.size(), documents);
        f.begin.push_back(f.shard.tokens);
        return in_group;
    }

    int index_text(DocumentFile& f) const {
        const char* name = f.shard.path.c_str();
        check(special.V == BYTE_VOCAB, "%s: text is read as bytes, but the vocabulary is %d and not bytes' %d: make a shard of it "
              "(data/mldr.py, data/msmarco.py)", name, special.V, BYTE_VOCAB);
        f.begin.push_back(0);
        size_t line = 1, in_line = 0, in_group = 0;
        auto end_of_line = [&] {
            if (line == 1) { in_group = in_line; }
            check(in_line == in_group && in_line <= (size_t)MAX_GROUP, "%s: line %zu has %zu documents with tabs between them, wanted %zu as in "
                  "line 1, at most %d", name, line, in_line, in_group, MAX_GROUP);
            in_line = 0;
            line++;
        };
        auto end_of_document = [&](uint64_t at) {
            check(at > f.begin.back(), "%s: line %zu has an empty document", name, line);
            f.begin.push_back(at + 1);
            in_line++;
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

    // out (n): ids begin .. begin + n - 1 of a file
    static void read_ids(const DocumentFile& f, uint64_t begin, uint64_t n, int* out) {
        const size_t width = (size_t)f.shard.width;
        unsigned char chunk[16384];
        const uint64_t step = sizeof chunk / width;
        for (uint64_t i = 0; i < n; i += step) {
            const uint64_t count = std::min(step, n - i);
            f.file.read(chunk, count * width, f.shard.first_byte + (begin + i) * width);
            uint32_t largest = 0;
            for (uint64_t k = 0; k < count; k++) {
                const unsigned char* c = chunk + k * width;             // little-endian, as everywhere
                const uint32_t id = width == 1 ? c[0] : width == 2 ? (uint32_t)(c[0] | c[1] << 8)
                                                                   : c[0] | (uint32_t)c[1] << 8 | (uint32_t)c[2] << 16 | (uint32_t)c[3] << 24;
                largest = std::max(largest, id);
                out[i + k] = (int)id;
            }
            check(largest < (uint32_t)f.shard.vocab, "%s: id %u among tokens %zu to %zu, but the vocabulary is V = %d (corrupt, or of another "
                  "tokenizer)", f.shard.path.c_str(), largest, (size_t)(begin + i), (size_t)(begin + i + count - 1), f.shard.vocab);
        }
    }

    static void read_names(DocumentFile& f) {
        const std::string path = ids_path(f.shard.path), text = read_file(path, 1u << 30);
        f.names.reserve(std::min(f.documents(), text.size()));
        for (size_t begin = 0; begin < text.size();) {
            const size_t end = std::min(text.find('\n', begin), text.size());
            f.names.push_back(text.substr(begin, end - begin));
            const std::string& s = f.names.back();
            check(!s.empty() && s.find_first_of(" \t\r\v\f") == std::string::npos, "%s: line %zu, '%.80s', is no name: white space, or empty",
                  path.c_str(), f.names.size(), s.c_str());
            begin = end + 1;
        }
        check(f.names.size() == f.documents(), "%s: %zu names, but %s has %zu documents", path.c_str(), f.names.size(), f.shard.path.c_str(),
              f.documents());
    }

    // One name would be found, and counted, twice.
    void check_names() const {
        std::unordered_set<std::string> seen;
        for (const DocumentFile& f : files) {
            for (const std::string& s : f.names) {
                check(seen.insert(s).second, "%s: the name %.80s is there twice", ids_path(f.shard.path).c_str(), s.c_str());
            }
        }
    }
};

// Groups as a matrix. Row r * groups + g is document r of group g: the queries, then their positives in the same order, then negatives.
struct GroupBatch {
    int groups = 0, rows = 0, T = 0;        // T: of the longest row, rounded up to 8 where max_tokens lets it
    std::vector<int> ids;                   // (rows,T), [PAD] behind each row
    std::vector<int> lengths;               // (rows)
};

// Groups first_index .. first_index + count - 1 of a run: which they are is a pure function of (seed, index). No group is there twice
// unless an epoch ends among them.
inline void fill_groups(const Documents& documents, uint64_t first_index, int count, uint64_t seed, bool shuffle, int max_tokens,
                        GroupBatch& batch) {
    const uint64_t groups = documents.groups();
    check(count >= 1 && (uint64_t)count <= groups, "%s: a batch of %d groups, '%s' has %zu (a smaller batch, or more data)",
          documents.flag.c_str(), count, documents.pattern.c_str(), (size_t)groups);
    batch.groups = count;
    batch.rows = count * documents.group;
    std::vector<size_t> which((size_t)batch.rows);
    uint64_t longest = 0;
    for (int g = 0; g < count; g++) {
        const size_t first = (size_t)sample_window(first_index + (uint64_t)g, groups, seed, shuffle) * (size_t)documents.group;
        for (int r = 0; r < documents.group; r++) {
            which[(size_t)(r * count + g)] = first + (size_t)r;
            longest = std::max(longest, documents.length(first + (size_t)r));
        }
    }
    batch.T = (int)std::min((longest + 7) / 8 * 8, (uint64_t)std::max(max_tokens, 0));
    batch.ids.assign(checked_mul((size_t)batch.rows, (size_t)batch.T, "a batch of groups"), documents.special.pad);
    batch.lengths.resize((size_t)batch.rows);
    for (size_t r = 0; r < which.size(); r++) { batch.lengths[r] = documents.read(which[r], max_tokens, batch.ids.data() + r * (size_t)batch.T); }
}

#endif
