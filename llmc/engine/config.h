// engine/config.h -- the model of a run: its config.json, and the flags that change it.
#pragma once

#include "../position/table.h"
#include "checkpoint.h"
#include "comm.h"
#include "data.h"
#include "flags.h"
#include "import.h"
#include "vocabulary.h"

// ----------------------------------------------------------------------------------------------------------
// the model

// The base of GPT2Config and BERTConfig
struct ModelConfig {
    int T = 1024;                                       // trained sequence length
    int V = 0;                                          // vocabulary
    int L = 12, NH = 12;                                // layers, heads
    int C = 768;                                        // channels
    bool padded_softmax = false;                        // the softmax sees the padding rows, too (--vocab_softmax)
    std::string pooling;                                // of contrastive training; "": none so far
    PositionConfig position;                            // the encoding and its hyperparameters
    int Vp() const { return round_up(V, 128); }         // rows of wte; matrix products like whole tiles
    int classes() const { return padded_softmax ? Vp() : V; }           // of the softmax; the rows of wte in files
};

// ----------------------------------------------------------------------------------------------------------
// config.json: "position", the encoding
//
//   {"name": "t5_clip", "K": 1023, ...}
//   {"name": "layers", "layers": [[{"name": "rope", ...}], [{"name": "none"}]]}         several: a list for each layer
//
// All hyperparameters are written, except numbers that are 0, and a file must have them: an earlier version, which did
// not know a key, may have computed something else than today's default.

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
// bam, and ssmax beside a bias, had other formulas before "encoding_version": 2, which this program does not compute.
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

// The mask: "window", a number, or a list if the layers take turns; "sinks"; "document_mask", the token that begins a
// document. A mask without a window, sinks or documents lacks their key.
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
// config.json: "rope_scaling", rope's stretch (rope.cuh), under Hugging Face's names
//
//   --rope_scaling yarn:4
//   "rope_scaling": {"rope_type": "yarn_paper", "factor": 4, "original_max_position_embeddings": 1024}
//
// YaRN's ramp is over the turns of the pairs, as in its paper; transformers' "yarn" has it over their numbers. Our
// older files say "yarn", too.
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

// "rope_scaling" for T tokens; null: no stretch
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

// j: "rope_scaling", or null
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
// config.json: "rope_theta", rope's base, which repeats the hyperparameter theta where other programs look for it

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

// An error if "rope_theta" contradicts the base in "position"
inline void check_rope_theta(const Json& config, const PositionConfig& position, const std::string& what) {
    const double theta = rope_theta(position);
    if (theta == 0 || !config.contains("rope_theta")) { return; }
    const double found = json_number(config, "rope_theta", what);
    check(found == theta, "%s: rope_theta: expected %.9g, which position has, got %.9g; --rope_theta changes both",
          what.c_str(), theta, found);
}

// Adds the keys of the encoding beside "position".
inline void set_position_json(Json& config, const PositionConfig& position, int T) {
    const double theta = rope_theta(position);
    const Json scaling = rope_scaling_json(position, T);
    if (theta > 0) { config["rope_theta"] = theta; }
    if (!scaling.is_null()) { config["rope_scaling"] = scaling; }
    if (has_other_formulas(position)) { config["encoding_version"] = 2; }
}

// ----------------------------------------------------------------------------------------------------------
// config.json as a whole

// The config.json of a GPT-2's checkpoint; tokenizer: may be null
inline Json gpt2_json(const ModelConfig& c, const Tokenizer* tokenizer) {
    Json j = gpt2_config(c.classes(), c.position.T_train, c.C, c.L, c.NH, position_json(c.position),
                         mask_json(c.position));
    const int end = stop_token(c.V, tokenizer);
    for (const char* key : {"bos_token_id", "eos_token_id"}) { j[key] = end >= 0 ? Json(end) : Json(); }
    if (c.padded_softmax) {
        j["vocab_softmax"] = "padded";
        j["vocab_used"] = c.V;
    }
    set_position_json(j, c.position, c.T);
    return j;
}

// The config.json of a BERT's checkpoint; "pooling", if --pairs has trained it, is the default of --encode
template <class Config> Json bert_json(const Config& c) {
    Json j = bert_config(c.V, c.position.T_train, c.C, c.L, c.NH, c.special.pad, position_json(c.position),
                         mask_json(c.position));
    if (!c.pooling.empty()) { j["pooling"] = c.pooling; }
    set_position_json(j, c.position, c.T);
    return j;
}

// Sets `c` from `j`, the config.json of the model at `path`. positions: the encoding if there is no "position", because
// another program wrote the file
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

// ----------------------------------------------------------------------------------------------------------
// --model: a size by name, with or without the prefix ("gpt2:"), or L,NH,C

struct ModelSize { const char* name; int L, NH, C; };

inline const std::vector<ModelSize>& model_sizes(Program program) {
    static const std::vector<ModelSize> gpt2 = {
        {"tiny", 6, 8, 512}, {"small", 12, 12, 768}, {"medium", 24, 16, 1024}, {"large", 36, 20, 1280},
        {"xl", 48, 25, 1600}, {"d6", 6, 6, 384}, {"d12", 12, 12, 768}, {"d24", 24, 16, 1024}, {"d36", 36, 20, 1280},
        {"d48", 48, 25, 1600}, {"d60", 60, 30, 1920}, {"d72", 72, 30, 2880}, {"d84", 84, 36, 3456}};
    static const std::vector<ModelSize> bert = {
        {"tiny", 2, 2, 128}, {"mini", 4, 4, 256}, {"small", 4, 8, 512}, {"base", 12, 12, 768}};
    return program == BERT_FLAG ? bert : gpt2;
}

// The sizes as --help shows them
inline std::string sizes_help(Program program) {
    Names words = words_of("Sizes for --model, with their layers, heads and channels:");
    for (const ModelSize& m : model_sizes(program)) {
        const char* end = &m == &model_sizes(program).back() ? "" : ";";
        words.push_back(strprintf("%s %d,%d,%d%s", m.name, m.L, m.NH, m.C, end));
    }
    return wrapped(words, 0, 2) + "\n";
}

inline void parse_model(const std::string& text, Program program, ModelConfig& c) {
    const std::string prefix = program == BERT_FLAG ? "bert:" : "gpt2:";
    const std::string name = text.compare(0, prefix.size(), prefix) == 0 ? text.substr(prefix.size()) : text;
    std::string names;
    Ints shape;
    if (!parse_value(text, any(), shape)) { shape.clear(); }
    for (const ModelSize& s : model_sizes(program)) {
        names += s.name + std::string(", ");
        if (name == s.name) { shape = {s.L, s.NH, s.C}; }
    }
    check(shape.size() == 3, "--model: expected %sor L,NH,C as in 12,12,768, got '%s'", names.c_str(),
          printable(text).c_str());
    c.L = shape[0];
    c.NH = shape[1];
    c.C = shape[2];
    check(c.L >= 1 && c.L <= 1024, "--model: expected 1 to 1024 layers, got '%s'", text.c_str());
    check(c.C >= 1 && c.C <= 65536, "--model: expected 1 to 65536 channels, got '%s'", text.c_str());
    check(c.NH >= 1 && c.C % c.NH == 0, "--model: expected a number of heads that divides the %d channels, got '%s'",
          c.C, text.c_str());
}

// Checks of flags that depend neither on the data nor on the model
inline void check_before_data(const Options& o) {
    const int cores = (int)sysconf(_SC_NPROCESSORS_ONLN), most = std::max(64, 4 * cores);
    check(o.threads <= most, "--threads: expected at most %d on this machine of %d cores, got %d", most, cores,
          o.threads);
    check(o.pos.size() <= 2000, "--pos: expected the name of an encoding, got %zu bytes, %.40s...", o.pos.size(),
          o.pos.c_str());
    parse_position(o.pos, o.T);
    ModelConfig shape;
    parse_model(o.model, o.program, shape);
}

// ----------------------------------------------------------------------------------------------------------
// the flags over config.json: a new model takes every setting from its flag; a model with weights takes those of its
// config.json, and a flag changes one only if it is given. A row of model_settings may read what earlier rows have set.

// Where the model comes from
struct ModelSource {
    std::string path;                   // of a checkpoint or other weights; "": the model is new
    bool resumed = false;               // `path` is this run's own checkpoint
    bool trains = false;
    int end_of_text = -1;               // the token that begins a document of the data; -1: unknown
    bool foreign = false;               // another program's, whose config.json has no "position"
};

// What a flag may do to the value of a checkpoint. KEEPS: nothing, as the weights need it. REPLACES: change it,
// with a notice, but in a resumed run only by --allow_change. CHOOSES: change it without a word.
enum OnLoad { KEEPS, REPLACES, CHOOSES };

struct ModelSetting {
    const char* flag;
    OnLoad on_load;
    std::string (*text)(const ModelConfig&);                                    // the value, as typed
    void (*set)(ModelConfig&, const Options&, const ModelSource&);              // takes the flag's value
};

// --pos. Hyperparameters that it leaves out stay as in the checkpoint, with a message if they are not today's defaults.
inline void set_position(ModelConfig& c, const Options& o, const ModelSource& from) {
    PositionConfig& p = c.position;
    if (from.path.empty()) {
        p = parse_position(o.pos, c.T);
        p.T_original = c.T;
    }
    if (from.path.empty() || from.foreign) {                    // config_from_json has parsed it for a foreign model
        const size_t turns = p.pattern.size();
        check((size_t)c.L % turns == 0, "--pos %s: expected a number of layers that divides the model's %d, got %zu",
              o.pos.c_str(), c.L, turns);
        return;
    }
    const std::string was = position_text(p);
    PositionConfig flag = parse_position(o.pos, p.T_train);
    const bool differs = position_text(flag) != was, same = flag.name == p.name && flag.pattern == p.pattern;
    for (size_t part = 0; same && part < flag.parts.size(); part++) {
        for (size_t i = 0; i < flag.parts[part].values.size(); i++) {
            Hyperparameter& h = flag.parts[part].values[i];
            if (!h.given) { h.value = p.parts[part].values[i].value; }
        }
    }
    p.name = flag.name;
    p.parts = flag.parts;
    p.pattern = flag.pattern;
    if (!differs || position_text(p) != was || comm().rank > 0) { return; }
    say("--pos %s: %s holds %s, which is used", o.pos.c_str(), from.path.c_str(), was.c_str());
}

// --rope_scaling. Over a checkpoint the original length stays. A kind without a factor keeps the checkpoint's, if
// that has the same kind; otherwise training fixes it, as T / the original length.
inline void set_rope_scaling(ModelConfig& c, const Options& o, const ModelSource& from) {
    PositionConfig& p = c.position;
    const PositionConfig found = p;
    parse_rope_scaling(o.rope_scaling, p);
    check(from.path.empty() || p.T_original == found.T_original, "--rope_scaling %s: expected "
          "original_max_position_embeddings %d, the original length of %s, got %d", o.rope_scaling.c_str(),
          found.T_original, from.path.c_str(), p.T_original);
    if (p.scaling == RopeScaling::None || p.scaling_factor > 0) { return; }
    if (p.scaling == found.scaling) { p.scaling_factor = found.scaling_factor; }
    else if (from.trains) { p.scaling_factor = std::max(1.0, (double)c.T / p.original_length()); }
}

// The base of all ropes, or the encodings if their bases differ
inline std::string rope_theta_text(const ModelConfig& c) {
    const double theta = rope_theta(c.position);
    return theta > 0 ? strprintf("%.9g", theta) : position_text(c.position);
}

inline void set_base(ModelConfig& c, const Options& o, const ModelSource& from) {
    if (o.rope_theta == 0) { return; }
    check(c.position.has("rope"), "--rope_theta %.9g: only rope has a base, and the encoding is %s", o.rope_theta,
          c.position.name.c_str());
    const bool trained = !from.path.empty() && !from.foreign;
    for (const EncodingConfig& part : c.position.parts) {
        check(trained || part.name != "rope" || !part.values[0].given, "--rope_theta %.9g: --pos %s gives rope a base, "
              "too", o.rope_theta, o.pos.c_str());
    }
    const bool changed = set_rope_theta(c.position, o.rope_theta);
    if (changed && trained && !from.trains) { c.position.other_theta = o.rope_theta; }
}

// --document_mask: config.json has the token that begins a document.
inline void set_documents(ModelConfig& c, const Options& o, const ModelSource& from) {
    int& token = c.position.mask.end_of_text;
    if (!o.document_mask) { token = -1; }
    else if (token < 0) { token = from.end_of_text; }
    check(!o.document_mask || token >= 0, "--document_mask 1: expected shards, whose header names the token that a "
          "document begins with; text files have none");
}

inline const ModelSetting model_settings[] = {
    {"model", KEEPS, [](const ModelConfig& c) { return strprintf("%d,%d,%d", c.L, c.NH, c.C); },
     [](ModelConfig& c, const Options& o, const ModelSource&) { parse_model(o.model, o.program, c); }},
    {"T", CHOOSES, [](const ModelConfig& c) { return std::to_string(c.T); },
     [](ModelConfig& c, const Options& o, const ModelSource&) { c.T = o.T; }},
    {"pos", KEEPS, [](const ModelConfig& c) { return position_text(c.position); }, set_position},
    {"rope_scaling", REPLACES, [](const ModelConfig& c) { return rope_scaling_text(c.position); }, set_rope_scaling},
    {"rope_theta", REPLACES, rope_theta_text, set_base},
    {"window", REPLACES, [](const ModelConfig& c) { return option_text(c.position.windows); },
     [](ModelConfig& c, const Options& o, const ModelSource&) {
         c.position.windows = o.window;
         if (!c.position.has_window()) { c.position.mask.sinks = 0; }
     }},
    {"sinks", REPLACES, [](const ModelConfig& c) { return std::to_string(c.position.mask.sinks); },
     [](ModelConfig& c, const Options& o, const ModelSource&) { c.position.mask.sinks = o.sinks; }},
    {"document_mask", REPLACES, [](const ModelConfig& c) { return option_text(c.position.mask.by_document()); },
     set_documents},
    {"vocab_softmax", KEEPS, [](const ModelConfig& c) { return std::string(c.padded_softmax ? "padded" : "used"); },
     [](ModelConfig& c, const Options& o, const ModelSource&) { c.padded_softmax = o.vocab_softmax == "padded"; }}};

// A flag says `now`, the checkpoint had `was`: an error unless the flag may replace it. Returns the notice, or "".
inline std::string difference_text(const ModelSetting& row, const Options& o, const ModelSource& from,
                                   const std::string& was, const std::string& now) {
    const bool free = row.on_load == CHOOSES || (from.foreign && row.set == set_base);
    if (was == now || from.path.empty() || free) { return ""; }
    check(row.on_load != KEEPS, "--%s %s: the weights of %s need --%s %s", row.flag, now.c_str(), from.path.c_str(),
          row.flag, was.c_str());
    const std::string text = strprintf("--%s %s, not %s as in %s", row.flag, now.c_str(), was.c_str(),
                                       from.path.c_str());
    check(!from.resumed || o.may_change(row.flag), "%s: resuming needs the old value, or --allow_change %s",
          text.c_str(), row.flag);
    return text;
}

// An error unless the model has all tokens of the data. data_vocab: their number; 0 without data
inline void check_vocabulary(const ModelConfig& c, const Options& o, const std::string& path, int data_vocab) {
    const bool bytes = data_vocab == (o.program == BERT_FLAG ? BYTE_VOCAB : 256);
    check(data_vocab == c.V || (data_vocab < c.V && !bytes),
          "--train_files, --val_files: the data has a vocabulary of %d, the model in %s one of %d", data_vocab,
          path.c_str(), c.V);
    if (data_vocab > 0 && data_vocab < c.V) {
        say_once("%s: the model has %d rows for the %d tokens of the data; its softmax is over all of them",
                 path.c_str(), c.V, data_vocab);
    }
}

// Settles the model of a run, and sets its flags in `o` to the values in effect, which --resume compares.
inline void settle_config(ModelConfig& c, Options& o, ModelSource from, int data_vocab) {
    const std::string& path = from.path;
    c.V = data_vocab;
    if (!path.empty()) {
        const ConfigKeys& keys = o.program == BERT_FLAG ? BERT_KEYS : GPT2_KEYS;
        const Json j = read_config(path, keys);
        from.foreign = !j.contains("position");                 // then it has learned positions, unless --pos says more
        config_from_json(c, j, keys, o.is_given("pos") ? o.pos : "learned", path);
        check_vocabulary(c, o, path, data_vocab);
    }
    Names notices;
    for (const ModelSetting& row : model_settings) {
        if (!path.empty() && !o.is_given(row.flag)) { continue; }
        const std::string was = row.text(c);
        row.set(c, o, from);
        notices.push_back(difference_text(row, o, from, was, row.text(c)));
    }
    PositionConfig& p = c.position;
    const int token = p.mask.end_of_text;
    check(p.mask.sinks == 0 || p.has_window(), "--sinks %d: expected --window, too: without one every key is seen",
          p.mask.sinks);
    check(token < 0 || from.end_of_text < 0 || from.end_of_text == token, "%s: the data's documents begin with token "
          "%d, but those that the model was trained with begin with %d", path.c_str(), from.end_of_text, token);
    check(token < 0 || !p.has("fire"), "--document_mask 1: fire divides by the position in the sequence, which "
          "continues from document to document; expected another encoding");
    const int reach = position_max_length(p);
    check(c.T <= reach, "--T %d: %s has no positions beyond %d", c.T, p.name.c_str(), reach);
    for (const std::string& notice : notices) {
        if (!notice.empty()) { say_once("%s", notice.c_str()); }
    }
    if (from.trains && !from.resumed && !p.has("learned")) { p.T_train = c.T; }
    o.T = c.T;
    o.rope_scaling = rope_scaling_text(p);
    o.window = p.windows;
    o.sinks = p.mask.sinks;
    o.document_mask = p.mask.by_document();
    o.vocab_softmax = c.padded_softmax ? "padded" : "used";
}
