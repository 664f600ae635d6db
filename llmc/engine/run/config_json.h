// run/config_json.h -- a checkpoint's config.json: the model's shape, its encoding with all hyperparameters, its mask,
// and rope's base and stretch, as --rope_theta and --rope_scaling give them.
#pragma once

#include "../../position/table.h"
#include "../files/import.h"
#include "../text/dataloader.h"
#include "../text/tokenizer.h"
#include "../flags.h"

// A model's shape and encoding, which GPT2Config and BERTConfig derive from
struct ModelConfig {
    int T = 1024;                                       // trained sequence length
    int V = 0;                                          // vocabulary
    int L = 12, NH = 12;                                // layers, heads
    int C = 768;                                        // channels
    bool padded_softmax = false;                        // the softmax sees the padding rows, too (--vocab_softmax)
    std::string pooling;                                // that contrastive training has used; empty: none yet
    PositionConfig position;                            // the encoding and its hyperparameters
    int Vp() const { return round_up(V, 128); }         // rows of wte; matrix products like whole tiles
    int classes() const { return padded_softmax ? Vp() : V; }           // of the softmax, and rows of wte in files
};

// ----------------------------------------------------------------------------------------------------------
// the encoding: {"name": "t5_clip", "K": 1023, ...}. All keys are written but a number of 0, and a file must have
// them: an earlier version, which did not know a key, may have computed something else than today's default.
//
// Several encodings: {"name": "layers", "layers": [[{"name": "rope", ...}], [{"name": "none"}]]}, a list per layer

inline Json encoding_json(const EncodingConfig& encoding) {
    Json j = {{"name", encoding.name}};
    for (const Hyperparameter& h : encoding.values) {
        if (h.written()) { j[h.key] = h.choices != nullptr ? Json(hyperparameter_text(h, h.value)) : Json(h.value); }
    }
    return j;
}
inline Json position_json(const PositionConfig& position) {
    if (position.parts.size() == 1) { return encoding_json(position.parts[0]); }
    Json layers = Json::array();
    for (const std::vector<int>& here : position.pattern) {
        layers.push_back(Json::array());
        for (int part : here) { layers.back().push_back(encoding_json(position.parts[(size_t)part])); }
    }
    return {{"name", "layers"}, {"layers", layers}};
}
inline EncodingConfig encoding_from_json(const Json& j, int T_train, const std::string& what) {
    std::string text = json_string(j, "name", what);
    char separator = ':';
    for (const auto& item : j.items()) {
        if (item.key() == "name") { continue; }
        const bool word = item.value().is_string();
        const std::string value = word ? json_string(j, item.key(), what)
                                       : strprintf("%.17g", json_number(j, item.key(), what));
        check(value.find(',') == std::string::npos, "%s: position.%s: expected one value, got '%s'", what.c_str(),
              item.key().c_str(), value.c_str());
        text += separator + item.key() + "=" + value;
        separator = ',';
    }
    const EncodingConfig encoding = parse_encoding(text, T_train);
    for (const Hyperparameter& h : encoding.values) {
        check(h.given || !h.written(), "%s: position %s: the key \"%s\" is missing, as in files of an earlier version; "
              "add the value that the model was trained with (today's default is %s)", what.c_str(),
              encoding.name.c_str(), h.key.c_str(), hyperparameter_text(h, h.value).c_str());
    }
    return encoding;
}
inline PositionConfig position_from_json(const Json& j, int T_train, const std::string& what) {
    if (json_string(j, "name", what) == "layers") {
        const auto is_list = [](const Json& list) { return list.is_array() && !list.empty() && list.size() <= 1024; };
        check(j.size() == 2 && j.contains("layers") && is_list(j["layers"]), "%s: position: expected a name and "
              "layers, got %s", what.c_str(), json_excerpt(j).c_str());
        std::vector<std::vector<EncodingConfig>> layers;
        for (const Json& here : j["layers"]) {
            check(is_list(here), "%s: position.layers: expected a list of encodings for each layer, got %s",
                  what.c_str(), json_excerpt(here).c_str());
            layers.emplace_back();
            for (const Json& one : here) {
                const bool single = one.is_object() && one.contains("name") && one["name"] != "layers";
                check(single, "%s: position.layers: expected an encoding, got %s", what.c_str(),
                      json_excerpt(one).c_str());
                layers.back().push_back(encoding_from_json(one, T_train, what));
            }
        }
        return compose_positions(layers, T_train, what + ": position");
    }
    return compose_positions({{encoding_from_json(j, T_train, what)}}, T_train, what + ": position");
}
// bam's distance, and what ssmax makes of a bias beside it, were other formulas before "encoding_version": 2. Earlier
// checkpoints of theirs cannot be computed any more.
inline bool has_other_formulas(const PositionConfig& position) {
    return std::any_of(position.pattern.begin(), position.pattern.end(), [&](const std::vector<int>& layer) {
        int hooks = 0;
        bool bam = false;
        for (int part : layer) {
            hooks |= encoding_traits(position.parts[(size_t)part]).hooks;
            bam = bam || position.parts[(size_t)part].name == "bam";
        }
        return bam || (hooks & (SCALES_Q | ADDS_BIAS | COUNTS_GATES)) == (SCALES_Q | ADDS_BIAS);
    });
}
inline void check_version(const Json& config, const PositionConfig& position, const std::string& path) {
    const bool known = config.contains("encoding_version") && json_int(config, "encoding_version", 2, 2, path) == 2;
    check(known || !has_other_formulas(position), "%s: expected \"encoding_version\": 2, got none: this model was "
          "trained with an earlier formula of %s; train it again, or use the version that trained it", path.c_str(),
          position_text(position).c_str());
}

// The mask in config.json: "window", a number or a list for layers that take turns, and "sinks", if they are not 0, and
// "document_mask", the token that begins a document
inline Json mask_json(const PositionConfig& position) {
    Json j = Json::object();
    const std::vector<int>& windows = position.windows;
    if (position.has_window()) { j["window"] = windows.size() == 1 ? Json(windows[0]) : Json(windows); }
    if (position.mask.sinks > 0) { j["sinks"] = position.mask.sinks; }
    if (position.mask.by_document()) { j["document_mask"] = position.mask.end_of_text; }
    return j;
}
inline void mask_from_json(PositionConfig& position, const Json& j, const std::string& what) {
    AttentionMask& mask = position.mask;
    if (j.contains("window")) {
        const Json windows = j["window"].is_array() ? j["window"] : Json::array({j["window"]});
        check(!windows.empty(), "%s: window: expected a number or a list of them, got []", what.c_str());
        position.windows.clear();
        for (const Json& window : windows) {
            const Json one = {{"window", window}};
            position.windows.push_back((int)json_int(one, "window", 0, MOST_WINDOW, what));
        }
    }
    if (j.contains("sinks")) { mask.sinks = (int)json_int(j, "sinks", 0, MOST_WINDOW, what); }
    if (j.contains("document_mask") && !j["document_mask"].is_null()) {
        mask.end_of_text = (int)json_int(j, "document_mask", 0, MAX_VOCAB, what);
    }
    check(mask.sinks == 0 || position.has_window(), "%s: sinks %d: expected a window, too", what.c_str(), mask.sinks);
}

// ----------------------------------------------------------------------------------------------------------
// rope's base and stretch (rope.cuh): in the flags, under Hugging Face's names, and in log.jsonl:
//
//   --rope_theta 500000 --rope_scaling yarn:4
//   "rope_theta": 500000,
//   "rope_scaling": {"rope_type": "yarn_paper", "factor": 4, "original_max_position_embeddings": 1024}
//
// (Older files say "yarn". But transformers' YaRN has a ramp over the pairs' numbers, the paper's is over their turns.)
//
//   --rope_scaling longrope:FILE
//   "rope_scaling": {"rope_type": "longrope", "factor": 4, "original_max_position_embeddings": 1024,
//                    "short_factor": [1, ...], "long_factor": [1.03, ...]}
// FILE has such an object. It may leave out rope_type, factor (then T / the original length) and
// original_max_position_embeddings (then the model's).

struct RopeScalingName { const char *flag, *file; };
constexpr RopeScalingName rope_scaling_names[] = {              // by RopeScaling
    {"none", "default"}, {"pi", "linear"}, {"ntk", "ntk"}, {"yarn", "yarn_paper"}, {"longrope", "longrope"}};

// "yarn:4", as in --rope_scaling; "longrope:4#5d3a9c01", whose last part is a checksum of the factors
inline std::string rope_scaling_text(const PositionConfig& position) {
    std::string text = rope_scaling_names[(int)position.scaling].flag;
    if (position.scaling_factor > 0) { text += strprintf(":%.9g", position.scaling_factor); }
    if (position.scaling != RopeScaling::LongRoPE) { return text; }
    uint64_t sum = 0;
    for (const std::vector<double>* factors : {&position.short_factor, &position.long_factor}) {
        sum = checksum(factors->data(), sizeof(double) * factors->size(), sum);
    }
    return text + strprintf("#%08x", (unsigned)sum);
}

// The object for T tokens; null: no stretch
inline Json rope_scaling_json(const PositionConfig& position, int T) {
    if (position.scaling == RopeScaling::None) { return Json(); }
    Json j = {{"rope_type", rope_scaling_names[(int)position.scaling].file}, {"factor", position.stretch(T)},
              {"original_max_position_embeddings", position.original_length()}};
    if (position.scaling == RopeScaling::LongRoPE) {
        j["short_factor"] = position.short_factor;
        j["long_factor"] = position.long_factor;
    }
    return j;
}

// The factors of LongRoPE under `key`; rope.cuh checks their number
inline std::vector<double> rope_factors(const Json& j, const char* key, const std::string& what) {
    const Json& list = json_at(j, key, what);
    check(list.is_array(), "%s: %s: expected a list of numbers, got %s", what.c_str(), key, json_excerpt(list).c_str());
    std::vector<double> factors;
    for (const Json& item : list) {
        const double factor = item.is_number() ? item.get<double>() : NAN;
        check(std::isfinite(factor) && factor >= 1e-290,        // so that position / factor, an angle, is finite
              "%s: %s: expected numbers of at least 1e-290, got %s as number %zu", what.c_str(), key,
              json_excerpt(item).c_str(), factors.size() + 1);
        factors.push_back(factor);
    }
    return factors;
}

// Sets the stretch of `position` from the "rope_scaling" of a config.json, which may be null.
inline void rope_scaling_from_json(const Json& j, PositionConfig& position, const std::string& what) {
    if (j.is_null()) { return; }
    check(j.is_object(), "%s: rope_scaling: expected an object, got %s", what.c_str(), json_excerpt(j).c_str());
    std::string type = json_string(j, j.contains("rope_type") ? "rope_type" : "type", what);
    if (type == "yarn") { type = "yarn_paper"; }
    for (const auto& item : j.items()) {
        const std::string& key = item.key();
        const bool factors = type == "longrope" && (key == "short_factor" || key == "long_factor");
        check(key == "rope_type" || key == "type" || key == "factor" || key == "original_max_position_embeddings" ||
              factors, "%s: rope_scaling: expected rope_type, factor and original_max_position_embeddings, and for "
              "longrope short_factor and long_factor, got '%s'", what.c_str(), printable(key).c_str());
    }
    const auto* end = std::end(rope_scaling_names);
    const auto* found = std::find_if(std::begin(rope_scaling_names), end, [&](auto& n) { return type == n.file; });
    check(found != end, "%s: rope_scaling: expected rope_type linear, ntk, yarn_paper or longrope, got '%s'",
          what.c_str(), printable(type).c_str());
    position.scaling = (RopeScaling)(found - std::begin(rope_scaling_names));
    if (position.scaling == RopeScaling::None) { return; }
    check(position.has("rope"), "%s: rope_scaling: only rope can be stretched, and the encoding is %s", what.c_str(),
          position.name.c_str());
    position.scaling_factor = json_number(j, "factor", what);
    check(position.scaling_factor >= 1, "%s: rope_scaling: expected a factor of at least 1, got %g", what.c_str(),
          position.scaling_factor);
    if (j.contains("original_max_position_embeddings")) {
        position.T_original = (int)json_int(j, "original_max_position_embeddings", 1, INT32_MAX, what);
    }
    if (position.scaling != RopeScaling::LongRoPE) { return; }
    position.short_factor = rope_factors(j, "short_factor", what);
    position.long_factor = rope_factors(j, "long_factor", what);
}

// --rope_scaling longrope:FILE -> the factor of each pair, s, and the original length if the file has it
inline void read_longrope(const std::string& path, PositionConfig& position) {
    Json j = read_json(path);
    check(j.is_object(), "%s: expected an object with short_factor and long_factor, got %s", path.c_str(),
          json_excerpt(j).c_str());
    const bool has_factor = j.contains("factor");
    if (!has_factor) { j["factor"] = 1; }
    if (!j.contains("rope_type") && !j.contains("type")) { j["rope_type"] = "longrope"; }
    rope_scaling_from_json(j, position, path);
    check(position.scaling == RopeScaling::LongRoPE, "%s: expected rope_type longrope", path.c_str());
    if (!has_factor) { position.scaling_factor = 0; }
}

// --rope_scaling ntk:4 -> the kind, and the factor s (0: T / T_original at each length)
inline void parse_rope_scaling(const std::string& text, PositionConfig& position) {
    const size_t colon = text.find(':');
    const std::string kind = text.substr(0, colon), rest = colon == std::string::npos ? "" : text.substr(colon + 1);
    for (const RopeScalingName& n : rope_scaling_names) {
        if (kind == n.flag) { position.scaling = (RopeScaling)(&n - rope_scaling_names); }
    }
    check(position.scaling == RopeScaling::None || position.has("rope"),
          "--rope_scaling %s: only rope can be stretched, and the encoding is %s", text.c_str(), position.name.c_str());
    const bool longrope = position.scaling == RopeScaling::LongRoPE;
    position.scaling_factor = longrope ? 0.0 : strtod(rest.c_str(), nullptr);
    if (longrope && !rest.empty()) { read_longrope(rest, position); }
    const bool known = !rest.empty() || !position.long_factor.empty();
    check(!longrope || known, "--rope_scaling longrope: expected longrope:FILE, with the factors of each pair, as the "
          "model has none");
}

// ----------------------------------------------------------------------------------------------------------
// the base theta. It is a hyperparameter of rope, which config.json has with the encoding, and once more as
// "rope_theta", where other programs look for it.

// The base of all ropes of `position`; 0 if there is no rope, or if their bases differ
inline double rope_theta(const PositionConfig& position) {
    double theta = 0;
    bool same = true;
    for (const EncodingConfig& c : position.parts) {
        if (c.name != "rope") { continue; }
        same = same && (theta == 0 || theta == c.value("theta"));
        theta = c.value("theta");
    }
    return same ? theta : 0;
}

// Gives each rope of `position` the base theta. Returns whether any changed.
inline bool set_rope_theta(PositionConfig& position, double theta) {
    bool changed = false;
    for (EncodingConfig& c : position.parts) {
        for (Hyperparameter& h : c.values) {
            if (c.name != "rope" || h.key != "theta" || h.value == theta) { continue; }
            h.value = theta;
            changed = true;
        }
    }
    return changed;
}

// The "rope_theta" of a config.json, if any, must be the base that its encoding has.
inline void check_rope_theta(const Json& config, const PositionConfig& position, const std::string& what) {
    const double theta = rope_theta(position);
    if (theta == 0 || !config.contains("rope_theta")) { return; }
    const double found = json_number(config, "rope_theta", what);
    check(found == theta, "%s: rope_theta: expected %.9g, which position has, got %.9g; --rope_theta changes both",
          what.c_str(), theta, found);
}

// The entries of config.json that belong to the encoding, in addition to "position"
inline void set_position_json(Json& config, const PositionConfig& position, int T) {
    const double theta = rope_theta(position);
    const Json scaling = rope_scaling_json(position, T);
    if (theta > 0) { config["rope_theta"] = theta; }
    if (!scaling.is_null()) { config["rope_scaling"] = scaling; }
    if (has_other_formulas(position)) { config["encoding_version"] = 2; }
}

// ----------------------------------------------------------------------------------------------------------
// the whole

// The token that ends a text, at which --generate and transformers' generate() stop: the tokenizer's, or without one
// GPT-2's; -1: none. tokenizer: may be null
inline int end_of_text(int V, const Tokenizer* tokenizer) {
    if (tokenizer != nullptr && tokenizer->eot >= 0) { return tokenizer->eot; }
    return V == 50257 ? 50256 : -1;
}

// The config.json of a GPT-2's checkpoint; tokenizer: may be null
inline Json gpt2_json(const ModelConfig& c, const Tokenizer* tokenizer) {
    Json j = gpt2_config(c.classes(), c.position.T_train, c.C, c.L, c.NH, position_json(c.position),
                         mask_json(c.position));
    const int end = end_of_text(c.V, tokenizer);
    for (const char* key : {"bos_token_id", "eos_token_id"}) { j[key] = end >= 0 ? Json(end) : Json(); }
    if (c.padded_softmax) {
        j["vocab_softmax"] = "padded";
        j["vocab_used"] = c.V;
    }
    set_position_json(j, c.position, c.T);
    return j;
}

// The config.json of a BERT's checkpoint, with the pooling that --pairs has trained: --encode then has it by default.
template <class Config> Json bert_json(const Config& c) {
    Json j = bert_config(c.V, c.position.T_train, c.C, c.L, c.NH, c.special.pad, position_json(c.position),
                         mask_json(c.position));
    if (!c.pooling.empty()) { j["pooling"] = c.pooling; }
    set_position_json(j, c.position, c.T);
    return j;
}

// Sets `c` to the model at `path`, whose config.json is `j`. `positions` are the encodings of one without "position",
// which another program wrote.
inline void config_from_json(ModelConfig& c, const Json& j, const ConfigKeys& keys, const std::string& positions,
                             const std::string& path) {
    c.L = (int)json_int(j, keys.L, 1, 1024, path);
    c.NH = (int)json_int(j, keys.NH, 1, 65536, path);
    c.C = (int)json_int(j, keys.C, 1, 65536, path);
    c.T = (int)json_int(j, keys.T, 1, INT32_MAX, path);
    check(c.C % c.NH == 0, "%s: %s %d does not divide %s %d", path.c_str(), keys.NH, c.NH, keys.C, c.C);
    const int rows = c.V = (int)json_int(j, keys.V, 1, MAX_VOCAB, path);
    if (j.contains("vocab_used")) { c.V = (int)json_int(j, "vocab_used", 1, rows, path); }      // the rest is padding
    c.padded_softmax = j.contains("vocab_softmax") && json_string(j, "vocab_softmax", path) == "padded";
    check(!c.padded_softmax || rows == c.Vp(), "%s: vocab_size: expected vocab_used %d padded to %d", path.c_str(), c.V,
          c.Vp());
    const bool ours = j.contains("position");
    c.position = ours ? position_from_json(j["position"], c.T, path) : parse_position(positions, c.T);
    if (ours) { check_version(j, c.position, path); }
    c.position.T_original = c.T;
    if (j.contains("rope_scaling")) { rope_scaling_from_json(j["rope_scaling"], c.position, path); }
    check_rope_theta(j, c.position, path);
    mask_from_json(c.position, j, path);
    const std::string pooling = j.contains("pooling") ? json_string(j, "pooling", path) : "";
    check(pooling.empty() || parse_value(pooling, one_of("mean|cls"), c.pooling), "%s: pooling: expected mean|cls, got "
          "'%s'", path.c_str(), printable(pooling).c_str());
}

// tokenizer.json of a model that was trained on bytes. A BERT's puts [CLS] and [SEP] around a text. A GPT-2's only
// special token is byte 0, which text does not contain. Spelled U+0100, it would be found in texts with this character.
inline Json byte_tokenizer_json(bool bert) {
    Json j = parse_json(R"json({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                       {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
            "pair": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                     {"SpecialToken": {"id": "[SEP]", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}},
                     {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
            "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [257], "tokens": ["[CLS]"]},
                               "[SEP]": {"id": "[SEP]", "ids": [258], "tokens": ["[SEP]"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": {}, "merges": []}})json", "tokenizer.json");
    if (!bert) { j["post_processor"] = nullptr; }
    Names tokens;                                               // by id
    for (int b = 0; b < 256; b++) { tokens.push_back(spelled(b)); }
    if (bert) { tokens.insert(tokens.end(), {"[PAD]", "[CLS]", "[SEP]", "[MASK]"}); } else { tokens[0] = {'\0'}; }
    for (int id = 0; id < (int)tokens.size(); id++) {
        const std::string& token = tokens[(size_t)id];
        j["model"]["vocab"][token] = id;
        if (bert ? id < 256 : id > 0) { continue; }
        j["added_tokens"].push_back({{"id", id}, {"content", token}, {"single_word", false}, {"lstrip", false},
                                     {"rstrip", false}, {"normalized", false}, {"special", true}});
    }
    return j;
}
