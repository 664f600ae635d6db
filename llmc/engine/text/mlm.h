// text/mlm.h -- the tokens that a masked language model predicts.     Devlin et al. 2019, section 3.1, task 1
//
//   Each token that is not special is chosen with probability 0.15. Of the chosen, 80 % become [MASK], 10 % a random
//   token, and 10 % stay.
//
// The choice is a pure function of (seed, sample, position) and the token, so that the number of ranks, the batch size
// and restarts do not change it.
#pragma once

#include "../../base/rand.h"
#include "tokenizer.h"

constexpr int BERT_VOCAB = 30522;
constexpr int BYTE_VOCAB = 260;             // of models trained on bytes: the 256, then [PAD] [CLS] [SEP] [MASK]

// The sample number of evaluation, which no training sample has. Its positions count in the whole stream of tokens, so
// that windows of any length find the same tokens masked.
constexpr uint64_t EVALUATION_SAMPLE = UINT64_MAX;

// Separates the draws of masking from those of the initial values and of the order of the samples.
constexpr uint64_t MASKING_STREAM = 0x4d4c4d;

struct SpecialTokens {
    int V = 0;                              // ids are 0 to V - 1
    int pad = -1;                           // [PAD] fills the rows of a batch
    int unk = -1;                           // [UNK] stands for a word that cannot be encoded; -1: none (bytes)
    int cls = -1;                           // [CLS] begins a sequence
    int sep = -1;                           // [SEP] ends it
    int mask = -1;                          // [MASK]

    bool is_special(int id) const { return id == pad || id == unk || id == cls || id == sep || id == mask; }
};

// The special tokens of a vocabulary that is known by its size
inline SpecialTokens special_tokens(int vocab) {
    if (vocab == BERT_VOCAB) { return {vocab, 0, 100, 101, 102, 103}; }
    check(vocab == BYTE_VOCAB, "the ids of [PAD] [CLS] [SEP] [MASK]: expected a vocabulary of %d (BERT) or %d (bytes), "
          "got %d (give the vocab.txt of any other by --tokenizer)", BERT_VOCAB, BYTE_VOCAB, vocab);
    return {vocab, 256, -1, 257, 258, 259};                     // V, pad, unk, cls, sep, mask
}

// By their names in vocab.txt; if a line appears twice, the last counts, as in the tokenizer. A vocabulary of bytes
// gets four more ids.
inline SpecialTokens special_tokens(const Tokenizer& tokenizer) {
    if (!tokenizer.word_piece && tokenizer.vocab_size() == 256) { return special_tokens(BYTE_VOCAB); }
    check(tokenizer.word_piece, "%s: expected BERT's vocab.txt, or bytes, for a masked language model, got byte-pair "
          "encoding, which has no [MASK]", tokenizer.path.c_str());
    SpecialTokens s;
    s.V = tokenizer.vocab_size();
    const struct { const char* name; int* id; } table[] = {
        {"[PAD]", &s.pad}, {"[UNK]", &s.unk}, {"[CLS]", &s.cls}, {"[SEP]", &s.sep}, {"[MASK]", &s.mask}};
    for (int id = 0; id < s.V; id++) {
        for (const auto& row : table) { if (tokenizer.tokens[(size_t)id] == row.name) { *row.id = id; } }
    }
    for (const auto& row : table) {
        check(*row.id >= 0, "%s: has no line %s, which a masked language model needs", tokenizer.path.c_str(),
              row.name);
    }
    return s;
}

// The ids that are not special, numbered from 0: random tokens are drawn from these.
struct PlainTokens {
    std::vector<int> special;               // ascending
    int count;

    explicit PlainTokens(const SpecialTokens& s) {
        for (const int id : {s.pad, s.unk, s.cls, s.sep, s.mask}) { if (id >= 0) { special.push_back(id); } }
        std::sort(special.begin(), special.end());
        count = s.V - (int)special.size();
    }
    // plain token number i, 0 <= i < count: each special id at or below it moves it up by one
    int operator[](int i) const {
        for (const int id : special) { i += i >= id; }
        return i;
    }
};

// ids (n): tokens first .. first + n - 1 of the sample -> inputs (n): the same, masked; targets (n): the token where
// one was chosen, otherwise IGNORE_INDEX. inputs may be ids itself. Returns how many were chosen, possibly 0.
inline int mask_tokens(const SpecialTokens& special, uint64_t seed, uint64_t sample, uint64_t first, int n,
                       const int* ids, int* inputs, int* targets, double share = 0.15) {
    check(share >= 0.0 && share <= 1.0, "masking: expected a share of the tokens from 0 to 1, got %g", share);
    const PlainTokens plain(special);
    check(special.mask >= 0 && plain.count >= 1,
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

// The ids of a text between [CLS] and [SEP]; "[MASK]" in the text is that token.
inline std::vector<int> text_ids(const std::string& text, const SpecialTokens& special, const Tokenizer& tokenizer) {
    std::vector<int> ids = {special.cls};
    for (size_t at = 0; at <= text.size();) {
        const size_t mask = text.find("[MASK]", at);
        const std::string piece = text.substr(at, mask == std::string::npos ? mask : mask - at);
        const std::vector<int> more = tokenizer.encode(piece);
        ids.insert(ids.end(), more.begin(), more.end());
        if (mask == std::string::npos) { break; }
        ids.push_back(special.mask);
        at = mask + strlen("[MASK]");
    }
    ids.push_back(special.sep);
    return ids;
}
