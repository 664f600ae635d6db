// text/subwords.h -- the tokens of a word: GPT-2's byte-pair encoding and BERT's WordPiece; and a text's whole tokens.
#pragma once

#include <functional>
#include <unordered_map>

#include "../../base/common.h"
#include "words.h"

// Byte-level byte-pair encoding: a word starts as its bytes, and neighbours are merged in the order of a list.
//                                                                     Sennrich et al. 2016; Radford et al. 2019
// Merges have ranks. In a word, the neighbours with the lowest rank are merged first, so that encoding repeats the
// order in which the merges were learned: "l o w e r" -> "lo w e r" -> "low e r" -> "low er" -> "lower".
struct Bpe {
    struct Merge {
        int rank, id;                               // id: the merged token
        bool operator==(const Merge& o) const { return rank == o.rank && id == o.id; }
    };
    std::unordered_map<uint64_t, Merge> merges;     // by two ids, left << 32 | right
    std::vector<int> byte_ids;                      // [256] the id of each single byte

    // Looks up the 256 bytes with which every word starts. Returns "", or why the vocabulary cannot encode.
    std::string find_bytes(const std::vector<std::string>& tokens) {
        byte_ids.assign(256, -1);
        for (size_t id = 0; id < tokens.size(); id++) {
            if (tokens[id].size() != 1) { continue; }
            int& of = byte_ids[(unsigned char)tokens[id][0]];       // -1, or the token that has this byte
            if (of >= 0) { return strprintf("tokens %d and %zu are the same byte", of, id); }
            of = (int)id;
        }
        for (size_t b = 0; b < 256; b++) {
            if (byte_ids[b] < 0) { return strprintf("no token is the byte 0x%02zX", b); }
        }
        return "";
    }

    // Appends the ids of a word: merges the pair of the lowest rank, the leftmost of equal pairs, until none is left.
    //
    // The parts are a linked list over the word's bytes, and the pairs wait in a heap, so that a word of n bytes takes
    // O(n log n): a "word" may be a megabyte of one letter. A merge changes the pairs on both sides; instead of
    // searching the heap for their old entries, we push new ones, and skip entries whose pair has changed since.
    void encode_word(const std::string& word, std::vector<int>& ids) const {
        const int n = (int)word.size();
        std::vector<int> id(n);                     // of the part that begins at this byte; -1: merged into another
        std::vector<int> before(n), after(n);       // where the neighbouring parts begin
        std::vector<uint64_t> heap;                 // rank << 32 | where the pair begins; the smallest is next
        const std::greater<uint64_t> least;
        const auto propose = [&](int i) {           // the pair that begins at i, if there is such a merge
            const bool pair = i >= 0 && after[i] < n;
            const Merge* m = pair ? find(id[i], id[after[i]]) : nullptr;
            if (m == nullptr) { return; }
            heap.push_back((uint64_t)m->rank << 32 | (uint32_t)i);
            std::push_heap(heap.begin(), heap.end(), least);
        };
        for (int i = 0; i < n; i++) {
            id[i] = byte_ids[(unsigned char)word[i]];
            before[i] = i - 1;
            after[i] = i + 1;
        }
        for (int i = 0; i < n; i++) { propose(i); }
        while (!heap.empty()) {
            const int i = (int)(uint32_t)heap.front();              // the left part of the pair
            const int rank = (int)(heap.front() >> 32);
            const int j = after[i];                                 // the right part
            std::pop_heap(heap.begin(), heap.end(), least);
            heap.pop_back();
            const Merge* m = id[i] >= 0 && j < n ? find(id[i], id[j]) : nullptr;
            if (m == nullptr || m->rank != rank) { continue; }      // out of date: one of the two was merged
            id[i] = m->id;                          // i takes over j, which leaves the list
            id[j] = -1;
            after[i] = after[j];
            if (after[i] < n) { before[after[i]] = i; }
            propose(before[i]);                     // the two pairs with the new part
            propose(i);
        }
        for (int i = 0; i < n; i = after[i]) { ids.push_back(id[i]); }
    }

    // Bytes as GPT-2's files spell them: a byte that prints is itself, and the other 68 are U+0100, U+0101, ... in
    // order, so that the files are text without spaces or control characters (a space is U+0120).
    static std::string spell(const std::string& bytes) {
        std::string spelled;
        for (const char c : bytes) { utf8_append(spelled, spelling()[(unsigned char)c]); }
        return spelled;
    }
    // Returns false if `spelled` has any other character.
    static bool unspell(const std::string& spelled, std::string& bytes) {
        static const std::vector<int> byte = [] {
            std::vector<int> of(0x144, -1);         // code point -> byte; 0x144 = 0x100 + 68
            for (int b = 0; b < 256; b++) { of[spelling()[(size_t)b]] = b; }
            return of;
        }();
        for (size_t at = 0; at < spelled.size();) {
            const uint32_t c = utf8_next(spelled, at);
            if (c >= byte.size() || byte[c] < 0) { return false; }
            bytes += (char)byte[c];
        }
        return true;
    }

    // merges.txt, to be read by load()
    std::string text(const std::vector<std::string>& tokens) const {
        std::vector<std::pair<int, uint64_t>> by_rank;
        for (const auto& m : merges) { by_rank.push_back({m.second.rank, m.first}); }
        std::sort(by_rank.begin(), by_rank.end());
        std::string s = "#version: 0.2\n";
        for (const auto& m : by_rank) {
            s += spell(tokens[m.second >> 32]) + " " + spell(tokens[(uint32_t)m.second]) + "\n";
        }
        return s;
    }

    // vocab.bpe or merges.txt: an optional first line "#version: 0.2", then one merge "left right" per line, from rank
    // 0 on. whole(id): the token needs no merge. Returns "", or why no text can be encoded: a list that was cut short
    // would give wrong ids.
    std::string load(const std::string& path, const std::string& text, const std::vector<std::string>& tokens,
                     const std::function<bool(int)>& whole) {
        std::unordered_map<std::string, int> id_of;
        for (size_t id = 0; id < tokens.size(); id++) { id_of.emplace(tokens[id], (int)id); }
        std::vector<bool> made(tokens.size());      // by some merge
        int line = 0;
        for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
            line++;
            end = std::min(text.find('\n', begin), text.size());
            const size_t length = end - begin - (end > begin && text[end - 1] == '\r');
            const std::string s = text.substr(begin, length);
            if (line == 1 && s.compare(0, 9, "#version:") == 0) { continue; }
            const char *name = path.c_str(), *shown = s.c_str();
            const size_t space = s.find(' ');
            check(space != std::string::npos && space > 0 && space + 1 < s.size(), "%s: line %d: expected two tokens "
                  "with a space between them, got \"%.80s\"", name, line, shown);
            std::string left, right;
            check(unspell(s.substr(0, space), left) && unspell(s.substr(space + 1), right), "%s: line %d, \"%.80s\", "
                  "is not spelled as byte-level BPE spells", name, line, shown);
            const auto a = id_of.find(left), b = id_of.find(right);
            const auto both = id_of.find(left + right);
            check(a != id_of.end() && b != id_of.end() && both != id_of.end(), "%s: line %d, \"%.80s\", merges tokens "
                  "that the vocabulary does not have (files of two tokenizers?)", name, line, shown);
            const bool added = add(a->second, b->second, {(int)merges.size(), both->second});
            check(added, "%s: line %d, \"%.80s\", appears twice", name, line, shown);
            made[(size_t)both->second] = true;
        }
        for (size_t id = 0; id < tokens.size(); id++) {
            const std::string& t = tokens[id];
            // <|endoftext|> and [MASK] are not made by merges
            const bool special = (t.front() == '<' && t.back() == '>') || (t.front() == '[' && t.back() == ']');
            const bool needed = t.size() > 1 && !special && !whole((int)id);
            if (needed && !made[id]) {
                return strprintf("no merge of %s makes token %zu (is the file truncated?)", path.c_str(), id);
            }
        }
        return "";
    }

    // The merges of a vocabulary whose tokens are in the order in which they were learned, as GPT-2's are: a token is
    // the merge of the two parts into which the merges before it encode its bytes, and its rank is its id. Returns "",
    // or the reason why the vocabulary cannot be of that kind. Token `special` is not made by a merge.
    std::string recover(const std::vector<std::string>& tokens, int special) {
        std::vector<int> parts;
        for (int id = 0; id < (int)tokens.size(); id++) {
            if (tokens[id].size() == 1 || id == special) { continue; }
            parts.clear();
            encode_word(tokens[id], parts);
            if (parts.size() != 2) { return strprintf("token %d is not a merge of two tokens before it", id); }
            add(parts[0], parts[1], {id, id});
        }
        return "";
    }

private:
    // the code point that spells each byte
    static const std::vector<uint32_t>& spelling() {
        static const std::vector<uint32_t> of = [] {
            std::vector<uint32_t> s;
            uint32_t next = 0x100;
            for (uint32_t b = 0; b < 256; b++) {
                const bool prints = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
                s.push_back(prints ? b : next++);
            }
            return s;
        }();
        return of;
    }

    static uint64_t key(int left, int right) { return (uint64_t)left << 32 | (uint32_t)right; }

    bool add(int left, int right, Merge m) { return merges.emplace(key(left, right), m).second; }

    const Merge* find(int left, int right) const {
        const auto found = merges.find(key(left, right));
        return found == merges.end() ? nullptr : &found->second;
    }
};

// WordPiece: the longest piece that the word begins with, then the longest "##" piece that the rest begins with, and so
// on. If the rest begins with none, the whole word is [UNK].
// "unaffable" -> "un" "##aff" "##able"                                        Wu et al. 2016; Devlin et al. 2019
struct WordPieces {
    std::unordered_map<std::string, int> ids;       // of each piece
    size_t longest = 0;                             // bytes of a piece
    int unknown = -1;                               // [UNK]
    static constexpr int MAX_WORD = 100;            // characters; a longer word is [UNK]

    // If a piece is added twice, the last counts, as in BERT's own code.
    void add(const std::string& piece, int id) {
        ids[piece] = id;
        longest = std::max(longest, piece.size());
        if (piece == "[UNK]") { unknown = id; }
    }
    // Appends the ids of a word in UTF-8.
    void encode_word(const std::string& word, int characters, std::vector<int>& out) const {
        const size_t before = out.size();
        std::string piece;
        for (size_t begin = 0; begin < word.size();) {
            const size_t prefix = begin > 0 ? 2 : 0;        // how much of "##" the piece has
            size_t end = characters > MAX_WORD ? begin : std::min(word.size(), begin + longest);
            auto found = ids.end();
            for (; end > begin; end--) {            // no piece ends inside a character, as the file is UTF-8
                piece.assign("##", prefix).append(word, begin, end - begin);
                found = ids.find(piece);
                if (found != ids.end()) { break; }
            }
            if (found == ids.end()) {               // take back the pieces before: the whole word is unknown
                out.resize(before);
                out.push_back(unknown);
                return;
            }
            out.push_back(found->second);
            begin = end;
        }
    }
};

// Tokens that are found in a text before it is split into words: where one begins, the longest that begins there.
struct WholeTokens {
    // lstrip, rstrip: white space on that side of the token is part of it
    struct Token { std::string text; int id; bool lstrip, rstrip; };
    std::vector<Token> by_byte[256];                // by the first byte, the longest first

    void add(const Token& token) {
        std::vector<Token>& list = by_byte[(unsigned char)token.text[0]];
        const auto shorter = [&](const Token& t) { return t.text.size() < token.text.size(); };
        list.insert(std::find_if(list.begin(), list.end(), shorter), token);
    }
    // Calls found(id) for each of them in the text and between(piece) for the rest, in order. As in transformers, a
    // token that is white space is found even where the token before it has taken that space.
    template <class F, class G> void split(const std::string& text, F between, G found) const {
        const auto is_space = [&](size_t& at) {
            const uint32_t c = utf8_next(text, at);
            return c != NO_CHARACTER && UnicodeTables::get().classes[c] == UNICODE_SPACE;
        };
        size_t from = 0;                            // where the text begins that is not taken yet
        for (size_t at = 0; at < text.size();) {
            const std::vector<Token>& list = by_byte[(unsigned char)text[at]];
            const auto begins = [&](const Token& t) { return text.compare(at, t.text.size(), t.text) == 0; };
            const auto token = std::find_if(list.begin(), list.end(), begins);
            if (token == list.end()) { at++; continue; }
            size_t begin = at, end = at += token->text.size();
            while (token->lstrip && begin > from) {
                size_t before = begin - 1;          // where the character before begins
                while (before > from && ((unsigned char)text[before] & 0xC0) == 0x80) { before--; }
                size_t next = before;
                if (!is_space(next) || next != begin) { break; }
                begin = before;
            }
            for (size_t next = end; token->rstrip && next < text.size() && is_space(next);) { end = next; }
            if (from < begin) { between(text.substr(from, begin - from)); }
            found(token->id);
            from = end;
        }
        if (from < text.size()) { between(text.substr(from)); }
    }
};
