// text/mlm.h -- the tokens that a masked language model has to guess.     Devlin et al. 2019, section 3.1, task 1
//   Each token that is not special is chosen with probability 0.15; of the chosen 80% become [MASK], 10% a random token, 10% stay.
// Whether and how is a pure function of (seed, sample, position) and the token: ranks, batch sizes and restarts do not change it.
#ifndef LLMC_TEXT_MLM_H
#define LLMC_TEXT_MLM_H

#include "../base/rand.h"
#include "tokenizer.h"

constexpr int BERT_VOCAB = 30522;
constexpr int BYTE_VOCAB = 260;             // of models trained on bytes: the 256, then [PAD] [CLS] [SEP] [MASK]

// The sample number of evaluation, which no training sample has. It goes with the position in the whole stream of tokens, so
// that windows of any length find the same tokens masked.
constexpr uint64_t EVALUATION_SAMPLE = UINT64_MAX;

struct SpecialTokens {
    int V = 0;                              // ids are 0 to V - 1
    int pad = -1, unk = -1, cls = -1, sep = -1, mask = -1;      // unk: -1 in bytes, which are all known

    bool is_special(int id) const { return id == pad || id == unk || id == cls || id == sep || id == mask; }
};

inline SpecialTokens special_tokens(int vocab) {
    if (vocab == BERT_VOCAB) { return {vocab, 0, 100, 101, 102, 103}; }
    check(vocab == BYTE_VOCAB, "a vocabulary of %d: which of its ids are [PAD] [CLS] [SEP] [MASK] is known for BERT's %d and for %d (bytes); "
          "of any other, give its vocab.txt (--tokenizer)", vocab, BERT_VOCAB, BYTE_VOCAB);
    return {vocab, 256, -1, 257, 258, 259};
}

// By their names in vocab.txt; of a line that is there twice the last counts, as in the tokenizer. Bytes get four ids more.
inline SpecialTokens special_tokens(const Tokenizer& tokenizer) {
    if (!tokenizer.word_piece && tokenizer.vocab_size() == 256) { return special_tokens(BYTE_VOCAB); }
    check(tokenizer.word_piece, "%s: byte-pair encoding, which has no [MASK]; a masked language model wants BERT's vocab.txt or bytes",
          tokenizer.path.c_str());
    SpecialTokens s;
    s.V = tokenizer.vocab_size();
    const struct { const char* name; int* id; } table[] = {
        {"[PAD]", &s.pad}, {"[UNK]", &s.unk}, {"[CLS]", &s.cls}, {"[SEP]", &s.sep}, {"[MASK]", &s.mask}};
    for (int id = 0; id < s.V; id++) {
        for (const auto& row : table) { if (tokenizer.tokens[(size_t)id] == row.name) { *row.id = id; } }
    }
    for (const auto& row : table) {
        check(*row.id >= 0, "%s: has no line %s, which a masked language model needs", tokenizer.path.c_str(), row.name);
    }
    return s;
}

// Random tokens are drawn among the ids that are not special: these, counted.
struct PlainTokens {
    std::vector<int> special;               // ascending
    int count;

    explicit PlainTokens(const SpecialTokens& s) {
        for (const int id : {s.pad, s.unk, s.cls, s.sep, s.mask}) { if (id >= 0) { special.push_back(id); } }
        std::sort(special.begin(), special.end());
        count = s.V - (int)special.size();
    }
    // plain token number i, 0 <= i < count
    int operator[](int i) const {
        for (const int id : special) { i += i >= id; }
        return i;
    }
};

// inputs, targets (n): of the tokens ids (n), which are number first .. first + n - 1 of the sample. A target is the token where it
// was chosen, IGNORE_INDEX elsewhere. inputs may be ids. Returns how many were chosen, which may be none.
inline int mask_tokens(const SpecialTokens& special, uint64_t seed, uint64_t sample, uint64_t first, int n, const int* ids, int* inputs,
                       int* targets, double share = 0.15) {
    check(share >= 0.0 && share <= 1.0, "a share of %g of the tokens, wanted 0 to 1", share);
    const PlainTokens plain(special);
    check(special.mask >= 0 && plain.count >= 1, "a vocabulary of %d without [MASK] or without anything else", special.V);
    const uint64_t stream = hash64(seed, 0x4d4c4d /* apart from the draws of initial values and of the order */, sample);
    int chosen = 0;
    for (int k = 0; k < n; k++) {
        const uint64_t position = first + (uint64_t)k;
        const int id = ids[k];
        const double draw = uniform01(stream, position);        // below share: its place there says what happens
        const bool choose = draw < share && !special.is_special(id);
        targets[k] = choose ? id : IGNORE_INDEX;
        chosen += choose;
        if (!choose || draw >= 0.9 * share) {
            inputs[k] = id;
        } else if (draw < 0.8 * share) {
            inputs[k] = special.mask;
        } else {
            inputs[k] = plain[(int)(uniform01(stream, position, 1) * (double)plain.count)];
        }
    }
    return chosen;
}

// The ids of a text, [CLS] in front and [SEP] behind; "[MASK]" in it is that token.
inline std::vector<int> text_ids(const std::string& text, const SpecialTokens& special, const Tokenizer& tokenizer) {
    std::vector<int> ids = {special.cls};
    for (size_t at = 0; at <= text.size();) {
        const size_t mask = text.find("[MASK]", at);
        const std::string piece = text.substr(at, mask == std::string::npos ? mask : mask - at);
        const std::vector<int> more = tokenizer.encode(piece);
        ids.insert(ids.end(), more.begin(), more.end());
        if (mask == std::string::npos) { break; }
        ids.push_back(special.mask);
        at = mask + 6;
    }
    ids.push_back(special.sep);
    return ids;
}

#endif
