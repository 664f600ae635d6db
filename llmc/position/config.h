// position/config.h -- what a model is told of positions: its encodings, and what holds for all of them.
#pragma once

#include <optional>
#include <utility>

#include "documents.cuh"

// A number, positive where --pos gives it, or one of the words of `choices`, "plain|sqrt", kept as the word's number.
// All are written to config.json; a file without the key predates it, and means `old`.
struct Hyperparameter {
    std::string key;
    double value = 0;
    std::optional<double> old = std::nullopt;       // none: the same as the default
    const char* choices = nullptr;
    bool given = false;                             // --pos named it

    operator std::pair<const std::string, double>() const { return {key, value}; }
    bool operator==(const Hyperparameter& other) const { return key == other.key && value == other.value; }
};
using Hyperparameters = std::vector<Hyperparameter>;

// One encoding: "t5_clip:K=64"
struct EncodingConfig {
    int kind = 0;                                   // its row in POSITIONS, position/table.h
    std::string name = "none";
    Hyperparameters values;

    bool operator==(const EncodingConfig& other) const { return name == other.name && values == other.values; }
    double value(const char* key) const {
        for (const Hyperparameter& h : values) { if (h.key == key) { return h.value; } }
        die(EXIT_BAD_INPUT, "encoding %s has no hyperparameter %s", name.c_str(), key);
    }
};

enum class RopeScaling { None, PI, NTK, YaRN, LongRoPE };
enum class TileSkip { Off, Exact, Default };        // of tiles that the bias has zeroed: attention/flash/skip.cuh

// The encodings of a model, and what a run says of all of them
struct PositionConfig {
    std::string name = "none";                      // of all encodings: "rope+cable" in one layer, "rope,none" in turns
    std::vector<EncodingConfig> parts = {{}};       // the different ones
    std::vector<std::vector<int>> pattern = {{0}};  // layer l has those of pattern[l % pattern.size()], last step first
    int T_train = 1024;                             // the length the model is, or was, trained at
    RopeScaling scaling = RopeScaling::None;        // config.json's rope_scaling
    double scaling_factor = 0;                      // 0: max(1, T / original_length()) at each length
    int T_original = 0;                             // the length that is stretched; 0: T_train
    std::vector<double> short_factor, long_factor;  // of LongRoPE, for each pair, up to that length and beyond it
    double other_theta = 0;                         // --rope_theta, where the evaluated checkpoint has another; else 0
    TileSkip tile_skip = TileSkip::Default;
    AttentionMask mask;                             // but for its window
    std::vector<int> windows = {0};                 // layer l has windows[l % windows.size()]; 0: no window

    bool has(const char* encoding) const {
        return std::any_of(parts.begin(), parts.end(), [&](const EncodingConfig& c) { return c.name == encoding; });
    }
    bool has_window() const { return *std::max_element(windows.begin(), windows.end()) > 0; }
    AttentionMask mask_of(int layer) const {
        AttentionMask of_layer = mask;
        of_layer.window = windows[(size_t)layer % windows.size()];
        return of_layer;
    }
    int original_length() const { return T_original > 0 ? T_original : T_train; }
    // how much longer than that rope is made for T tokens
    double stretch(int T) const {
        if (scaling == RopeScaling::None) { return 1.0; }
        return scaling_factor > 0 ? scaling_factor : std::max(1.0, (double)T / original_length());
    }
};
