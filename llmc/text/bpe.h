// text/bpe.h -- byte-level byte-pair encoding: a word is its bytes, of which neighbours are merged, in the order of a list.
//                                                                      Sennrich et al. 2016; Radford et al. 2019
#ifndef LLMC_TEXT_BPE_H
#define LLMC_TEXT_BPE_H

#include <functional>
#include <unordered_map>

#include "../base/common.h"
#include "words.h"

struct Bpe {
    struct Merge { int rank, id; };
    std::unordered_map<uint64_t, Merge> merges;     // of two ids, left << 32 | right; the least rank goes first
    std::vector<int> byte_ids;                      // [256]

    // Looks up the 256 bytes, which every word starts as. Returns why that cannot be, or "".
    std::string find_bytes(const std::vector<std::string>& tokens) {
        byte_ids.assign(256, -1);
        for (size_t id = 0; id < tokens.size(); id++) {
            if (tokens[id].size() != 1) { continue; }
            int& of = byte_ids[(unsigned char)tokens[id][0]];
            if (of >= 0) { return strprintf("tokens %d and %zu are the same byte", of, id); }
            of = (int)id;
        }
        for (size_t b = 0; b < 256; b++) {
            if (byte_ids[b] < 0) { return strprintf("no token is the byte 0x%02zX", b); }
        }
        return "";
    }

    // Appends the ids of a word: of all neighbours, those with the least rank become one, the leftmost first, until none can.
    // A heap of candidates, so that a word of a million letters takes n log n; what has changed since is skipped.
    void encode_word(const std::string& word, std::vector<int>& ids) const {
        const int n = (int)word.size();
        std::vector<int> id(n), before(n), after(n);                // a list of parts, each at its first byte; id -1: gone
        std::vector<uint64_t> heap;                                 // rank << 32 | place of the left part
        const std::greater<uint64_t> least;
        const auto propose = [&](int i) {
            const Merge* m = i >= 0 && after[i] < n ? find(id[i], id[after[i]]) : nullptr;
            if (m == nullptr) { return; }
            heap.push_back((uint64_t)m->rank << 32 | (uint32_t)i);
            std::push_heap(heap.begin(), heap.end(), least);
        };
        for (int i = 0; i < n; i++) { id[i] = byte_ids[(unsigned char)word[i]]; before[i] = i - 1; after[i] = i + 1; }
        for (int i = 0; i < n; i++) { propose(i); }
        while (!heap.empty()) {
            const int i = (int)(uint32_t)heap.front(), rank = (int)(heap.front() >> 32), j = after[i];
            std::pop_heap(heap.begin(), heap.end(), least);
            heap.pop_back();
            const Merge* m = id[i] >= 0 && j < n ? find(id[i], id[j]) : nullptr;
            if (m == nullptr || m->rank != rank) { continue; }
            id[i] = m->id;
            id[j] = -1;
            after[i] = after[j];
            if (after[i] < n) { before[after[i]] = i; }
            propose(before[i]);
            propose(i);
        }
        for (int i = 0; i < n; i = after[i]) { ids.push_back(id[i]); }
    }

    // Bytes as GPT-2's files spell them: those that print as themselves, the other 68, in order, as U+0100 and up, so that
    // the files are text without spaces or control characters. False: this is not spelled so.
    static bool unspell(const std::string& spelled, std::string& bytes) {
        static const std::vector<int> byte = [] {
            std::vector<int> of(0x144, -1);         // code point -> byte
            size_t next = 0x100;
            for (int b = 0; b < 256; b++) {
                const bool prints = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
                of[prints ? (size_t)b : next++] = b;
            }
            return of;
        }();
        for (size_t at = 0; at < spelled.size();) {
            const uint32_t c = utf8_next(spelled, at);
            if (c >= byte.size() || byte[c] < 0) { return false; }
            bytes += (char)byte[c];
        }
        return true;
    }

    // vocab.bpe, or merges.txt: a line a merge, "left right", the first has rank 0; before them "#version: 0.2". Returns "", or
    // why no text is to be encoded: a list that was cut short would encode, but differently.
    std::string load(const std::string& path, const std::string& text, const std::vector<std::string>& tokens) {
        std::unordered_map<std::string, int> id_of;
        for (size_t id = 0; id < tokens.size(); id++) { id_of.emplace(tokens[id], (int)id); }
        std::vector<bool> made(tokens.size());
        int line = 0;
        for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
            line++;
            end = std::min(text.find('\n', begin), text.size());
            const size_t length = end - begin - (end > begin && text[end - 1] == '\r');
            const std::string s = text.substr(begin, length);
            if (line == 1 && s.compare(0, 9, "#version:") == 0) { continue; }
            const size_t space = s.find(' ');
            check(space != std::string::npos && space > 0 && space + 1 < s.size(), "%s: line %d is \"%.80s\", two tokens with a space "
                  "between them wanted", path.c_str(), line, s.c_str());
            std::string left, right;
            check(unspell(s.substr(0, space), left) && unspell(s.substr(space + 1), right), "%s: line %d, \"%.80s\", is not spelled as "
                  "byte-level BPE spells", path.c_str(), line, s.c_str());
            const auto a = id_of.find(left), b = id_of.find(right), both = id_of.find(left + right);
            check(a != id_of.end() && b != id_of.end() && both != id_of.end(), "%s: line %d, \"%.80s\", merges what the vocabulary "
                  "does not have (files of two tokenizers?)", path.c_str(), line, s.c_str());
            const bool added = add(a->second, b->second, {(int)merges.size(), both->second});
            check(added, "%s: line %d, \"%.80s\", is there twice", path.c_str(), line, s.c_str());
            made[(size_t)both->second] = true;
        }
        for (size_t id = 0; id < tokens.size(); id++) {
            const std::string& t = tokens[id];
            const bool special = (t.front() == '<' && t.back() == '>') || (t.front() == '[' && t.back() == ']');
            const bool needed = t.size() > 1 && !special;
            if (needed && !made[id]) { return strprintf("no merge of %s makes token %zu (truncated?)", path.c_str(), id); }
        }
        return "";
    }

    // The merges of a vocabulary that has its tokens in their order, as GPT-2's has: each token is what two made by the merges
    // before it come to. Returns why that cannot be, or ""; token `special` is none of them.
    std::string recover(const std::vector<std::string>& tokens, int special) {
        std::vector<int> parts;
        for (int id = 0; id < (int)tokens.size(); id++) {
            if (tokens[id].size() == 1 || id == special) { continue; }
            parts.clear();
            encode_word(tokens[id], parts);
            if (parts.size() != 2) { return strprintf("token %d is no merge of two before it", id); }
            add(parts[0], parts[1], {id, id});
        }
        return "";
    }

private:
    static uint64_t key(int left, int right) { return (uint64_t)left << 32 | (uint32_t)right; }

    bool add(int left, int right, Merge m) { return merges.emplace(key(left, right), m).second; }

    const Merge* find(int left, int right) const {
        const auto found = merges.find(key(left, right));
        return found == merges.end() ? nullptr : &found->second;
    }
};

#endif
