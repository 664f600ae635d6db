// run/config.h -- a model's shape and encoding, from the flags and from the checkpoint or weights that they name.
#pragma once

#include "../files/checkpoint.h"
#include "../files/import.h"
#include "rope_scaling.h"
#include "../../position/table.h"
#include "../text/dataloader.h"
#include "flag_parser.h"
#include "vocabulary.h"

// ----------------------------------------------------------------------------------------------------------
// the encoding in config.json: {"name": "t5_clip", "K": 1023}. All keys are written. If a file lacks a key, it predates
// the key, and means the value that was fixed at that time.

// Several encodings: {"name": "layers", "layers": [[{"name": "rope", ...}], [{"name": "none"}]]}, a list for each layer
// of the pattern.

inline Json encoding_json(const EncodingConfig& encoding) {
    Json j = {{"name", encoding.name}};
    for (const Hyperparameter& h : encoding.values) {
        j[h.key] = h.choices != nullptr ? Json(hyperparameter_text(h, h.value)) : Json(h.value);
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
// an encoding as --pos has it
inline std::string encoding_from_json(const Json& j, const std::string& what) {
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
    return text;
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
                layers.back().push_back(parse_encoding(encoding_from_json(one, what), T_train, AbsentKeys::Old));
            }
        }
        return compose_positions(layers, T_train, what + ": position");
    }
    return parse_position(encoding_from_json(j, what), T_train, AbsentKeys::Old);
}
// --pos for a model from a checkpoint: what the flag says must agree with the checkpoint, and the checkpoint decides
// the rest. If that is not today's default, a message tells the value.
inline void check_position(const std::string& flag, const PositionConfig& found, const std::string& path) {
    const PositionConfig asked = parse_position(flag, found.T_train);
    bool conflict = asked.name != found.name || asked.pattern != found.pattern;
    bool differs = false;
    for (size_t part = 0; !conflict && part < asked.parts.size(); part++) {
        const Hyperparameters &mine = asked.parts[part].values, &theirs = found.parts[part].values;
        for (size_t i = 0; i < mine.size(); i++) {
            const bool same = mine[i] == theirs[i];
            conflict = conflict || (mine[i].given && !same);
            differs = differs || !same;
        }
    }
    check(!conflict, "--pos %s: the checkpoint %s was trained with %s", flag.c_str(), path.c_str(),
          position_text(found).c_str());
    if (!differs || comm().rank > 0) { return; }
    say("--pos %s: %s holds %s, which is used", flag.c_str(), path.c_str(), position_text(found).c_str());
}

// bam's distance, and what ssmax makes of a bias beside it, were other formulas before "encoding_version": 2. Earlier
// checkpoints of theirs cannot be computed any more.
inline bool has_other_formulas(const PositionConfig& position) {
    return std::any_of(position.pattern.begin(), position.pattern.end(), [&](const std::vector<int>& layer) {
        int hooks = 0;
        bool bam = false;
        for (int part : layer) {
            hooks |= position_hooks(position.parts[(size_t)part]);
            bam = bam || position.parts[(size_t)part].name == "bam";
        }
        return bam || (hooks & (SCALES_Q | ADDS_BIAS | COUNTS_GATES)) == (SCALES_Q | ADDS_BIAS);
    });
}
inline void set_version_json(Json& config, const PositionConfig& position) {
    if (has_other_formulas(position)) { config["encoding_version"] = 2; }
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
// --window and --sinks from the flags, or else, as `position` has them, from the checkpoint at `path` (if any). A
// different window is used with a notice; --resume refuses it (check_resumed_options).
inline void resolve_mask(const Options& o, PositionConfig& position, const std::string& path) {
    const std::vector<int> windows = position.windows;
    const int sinks = position.mask.sinks;
    if (path.empty() || o.is_given("window")) { position.windows = o.window; }
    if (path.empty() || o.is_given("sinks")) { position.mask.sinks = o.sinks; }
    else if (!position.has_window()) { position.mask.sinks = 0; }       // --window 0 of a checkpoint that has both
    check(position.mask.sinks == 0 || position.has_window(), "--sinks %d: expected --window, too: without one every "
          "key is seen", position.mask.sinks);
    const bool same = position.windows == windows && position.mask.sinks == sinks;
    if (path.empty() || same || o.resume || comm().rank > 0) { return; }
    say("--window %s --sinks %d: used instead of %s and %d, which %s was trained with",
        option_text(position.windows).c_str(), position.mask.sinks, option_text(windows).c_str(), sinks, path.c_str());
}

// --document_mask from the flag, or else from the checkpoint at `path` (if any). A different choice is used with a
// notice; --resume refuses it. data: the token that begins a document of the data, -1: unknown
inline void resolve_documents(Options& o, PositionConfig& position, const std::string& path, int data) {
    int& token = position.mask.end_of_text;
    const bool found = token >= 0;
    if (path.empty() || o.is_given("document_mask")) {
        if (!path.empty() && o.document_mask != found && !o.resume && comm().rank == 0) {
            say("--document_mask %d: used instead of %d, which %s was trained with", o.document_mask, found,
                path.c_str());
        }
        if (!o.document_mask) { token = -1; }
        else if (!found) { token = data; }
        check(!o.document_mask || token >= 0, "--document_mask 1: expected shards, whose header names the token that a "
              "document begins with; text files have none");
    }
    o.document_mask = token >= 0;                           // the effective value, for --resume to compare
    check(token < 0 || data < 0 || data == token, "%s: the data's documents begin with token %d, but those that "
          "the model was trained with begin with %d", path.c_str(), data, token);
    check(token < 0 || !position.has("fire"), "--document_mask 1: fire divides by the position in the sequence, which "
          "continues from document to document; expected another encoding");
}

// Checks of flags that depend neither on the data nor on the model
inline void check_before_data(const Options& o) {
    const int cores = (int)sysconf(_SC_NPROCESSORS_ONLN), most = std::max(64, 4 * cores);
    check(o.threads <= most, "--threads: expected at most %d on this machine of %d cores, got %d", most, cores,
          o.threads);
    check(o.pos.size() <= 2000, "--pos: expected the name of an encoding, got %zu bytes, %.40s...", o.pos.size(),
          o.pos.c_str());
    parse_position(o.pos, o.T);
}

// --pos for a model of L layers
inline PositionConfig parse_layers(const std::string& text, int T_train, int L) {
    const PositionConfig position = parse_position(text, T_train);
    const size_t turns = position.pattern.size();
    check((size_t)L % turns == 0, "--pos %s: expected a number of layers that divides the model's %d, got %zu",
          text.c_str(), L, turns);
    return position;
}

inline TileSkip parse_tile_skip(const std::string& text) {
    if (text == "off") { return TileSkip::Off; }
    return text == "exact" ? TileSkip::Exact : TileSkip::Default;
}

// The command that writes the files of this pattern, "" if no script of data/ does
inline std::string data_command(const std::string& pattern, Program program) {
    struct Script { const char *directory, *name, *for_bert; };
    const Script scripts[] = {{"data/tinyshakespeare/", "tinyshakespeare.py", " --encoding bert"},
                              {"data/edu_fineweb10B/", "fineweb_edu.py", " --encoding bert"},
                              {"data/wikitext103/", "wikitext.py", " --encoding bert"},
                              {"data/mldr_en/", "mldr.py", ""}, {"data/msmarco/", "msmarco.py", ""}};
    for (const Script& s : scripts) {
        if (pattern.find(s.directory) == std::string::npos) { continue; }
        return std::string("python3 data/") + s.name + (program == BERT_FLAG ? s.for_bert : "");
    }
    return "";
}

// --model: a size by name, with or without the prefix ("gpt2:"), or L,NH,C
struct ModelSize { const char* name; int L, NH, C; };

// The sizes as --help shows them
inline std::string sizes_help(const std::vector<ModelSize>& sizes) {
    Names words = words_of("Sizes for --model, with their layers, heads and channels:");
    for (const ModelSize& m : sizes) {
        const char* end = &m == &sizes.back() ? "" : ";";
        words.push_back(strprintf("%s %d,%d,%d%s", m.name, m.L, m.NH, m.C, end));
    }
    return wrapped(words, 0, 2) + "\n";
}

template <class Config>
void parse_model(const std::string& text, const std::string& prefix, const std::vector<ModelSize>& sizes, Config& c) {
    const std::string name = text.compare(0, prefix.size(), prefix) == 0 ? text.substr(prefix.size()) : text;
    std::string names;
    Ints shape;
    if (!parse_value(text, any(), shape)) { shape.clear(); }
    for (const ModelSize& s : sizes) {
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

// --rope_scaling for a model whose checkpoint at `path` has a stretch already: a kind without a factor takes the
// checkpoint's, and a different stretch of the same original length is used with a notice. --resume refuses it
// (check_resumed_options).
inline void restretch(const Options& o, const std::string& path, PositionConfig& position) {
    const PositionConfig found = position;
    parse_rope_scaling(o.rope_scaling, position);
    check(position.T_original == found.T_original, "--rope_scaling %s: expected original_max_position_embeddings %d, "
          "the original length of %s, got %d", o.rope_scaling.c_str(), found.T_original, path.c_str(),
          position.T_original);
    if (found.scaling == RopeScaling::None) { return; }
    if (position.scaling == found.scaling && position.scaling_factor == 0) {
        position.scaling_factor = found.scaling_factor;
    }
    const std::string now = rope_scaling_text(position), was = rope_scaling_text(found);
    if (now == was || o.resume) { return; }
    say("--rope_scaling %s: used instead of %s, which %s was trained with; its original length is %d", now.c_str(),
        was.c_str(), path.c_str(), found.original_length());
}

// --rope_theta: the base of all ropes. path: the checkpoint, if any, that was trained with position's. A different base
// is used with a notice, but --resume refuses it.
inline void rebase(const Options& o, const std::string& path, PositionConfig& position) {
    if (o.rope_theta == 0) { return; }
    check(position.has("rope"), "--rope_theta %.9g: only rope has a base, and the encoding is %s", o.rope_theta,
          position.name.c_str());
    for (const EncodingConfig& c : position.parts) {
        const bool free = c.name != "rope" || !path.empty() || !c.values[0].given;
        check(free, "--rope_theta %.9g: --pos %s gives rope a base, too", o.rope_theta, o.pos.c_str());
    }
    const std::string was = position_text(position);
    if (!set_rope_theta(position, o.rope_theta) || path.empty()) { return; }
    check(!o.resume || may_change(o, "rope_theta"), "--rope_theta %.9g: the run to be resumed had %s (%s); give that, "
          "or --allow_change rope_theta", o.rope_theta, was.c_str(), path.c_str());
    position.other_theta = o.rope_theta;
    if (comm().rank > 0) { return; }
    say("--rope_theta %.9g: used instead of that of %s, which %s was trained with", o.rope_theta, was.c_str(),
        path.c_str());
}

// The model's configuration: `c` from the flags, or that of the checkpoint or weights at `path` (if any), which must
// agree with the flags and the data. data_vocab: the vocabulary of the data, 0 without data
template <class Config>
Config resolve_config(const Options& o, Config c, const std::string& path, int data_vocab, const ConfigKeys& keys) {
    c.T = o.T;
    c.V = data_vocab;
    if (path.empty()) {
        c.position = parse_layers(o.pos, c.T, c.L);
        c.position.T_original = c.T;
        parse_rope_scaling(o.rope_scaling, c.position);
        rebase(o, "", c.position);
        resolve_mask(o, c.position, path);
        return c;
    }
    const Json j = read_config(path, keys);
    const Config asked = c;
    c.L = (int)json_int(j, keys.L, 1, 1024, path);
    c.NH = (int)json_int(j, keys.NH, 1, 65536, path);
    c.C = (int)json_int(j, keys.C, 1, 65536, path);
    c.V = (int)json_int(j, keys.V, 1, MAX_VOCAB, path);
    if (j.contains("vocab_used")) { c.V = (int)json_int(j, "vocab_used", 1, c.V, path); }    // the rest is padding
    const int trained = (int)json_int(j, keys.T, 1, INT32_MAX, path);
    check(c.C % c.NH == 0, "%s: %s %d does not divide %s %d", path.c_str(), keys.NH, c.NH, keys.C, c.C);
    const bool same_shape = c.L == asked.L && c.NH == asked.NH && c.C == asked.C;
    check(!o.is_given("model") || same_shape, "--model %s: %s holds a model of %d,%d,%d", o.model.c_str(),
          path.c_str(), c.L, c.NH, c.C);
    check(data_vocab == 0 || data_vocab == c.V,
          "--train_files, --val_files: the data has a vocabulary of %d, the model in %s one of %d", data_vocab,
          path.c_str(), c.V);
    if (!o.is_given("T")) { c.T = trained; }
    if (j.contains("position")) {
        c.position = position_from_json(j["position"], trained, path);
        check_version(j, c.position, path);
        if (o.is_given("pos")) { check_position(o.pos, c.position, path); }
    } else {                    // a model of another program: learned positions, unless another encoding is requested
        c.position = parse_layers(o.is_given("pos") ? o.pos : "learned", trained, c.L);
    }
    c.position.T_original = trained;
    if (j.contains("rope_scaling")) { rope_scaling_from_json(j["rope_scaling"], c.position, path); }
    if (o.is_given("rope_scaling")) { restretch(o, path, c.position); }
    check_rope_theta(j, c.position, path);
    rebase(o, j.contains("position") ? path : "", c.position);
    mask_from_json(c.position, j, path);
    resolve_mask(o, c.position, path);
    return c;
}

// Which rows the softmax sees: as --vocab_softmax says, or the checkpoint at `path` (if any), which it must not
// contradict.
template <class Config> void resolve_softmax(Options& o, Config& c, const std::string& path) {
    c.padded_softmax = o.vocab_softmax == "padded";
    if (path.empty()) { return; }
    const Json j = read_config(path, GPT2_KEYS);
    const bool padded = j.contains("vocab_softmax") && json_string(j, "vocab_softmax", path) == "padded";
    const std::string found = padded ? "padded" : "used";
    check(!o.is_given("vocab_softmax") || o.vocab_softmax == found,
          "--vocab_softmax %s: the model in %s was trained with %s", o.vocab_softmax.c_str(), path.c_str(),
          found.c_str());
    check(!padded || json_int(j, "vocab_size", 1, MAX_VOCAB, path) == c.Vp(),
          "%s: vocab_size: expected vocab_used %d padded to %d", path.c_str(), c.V, c.Vp());
    o.vocab_softmax = found;
    c.padded_softmax = padded;
}

// The config.json of a GPT-2's checkpoint; tokenizer: may be null
template <class Config> Json gpt2_json(const Config& c, const Tokenizer* tokenizer) {
    Json j = gpt2_config(c.classes(), c.position.T_train, c.C, c.L, c.NH, position_json(c.position),
                         mask_json(c.position));
    set_end_of_text(j, tokenizer, c.V);
    if (c.padded_softmax) {
        j["vocab_softmax"] = "padded";
        j["vocab_used"] = c.V;
    }
    set_rope_json(j, c.position, c.T);
    set_version_json(j, c.position);
    return j;
}

// The config.json of a BERT's checkpoint. It names the pooling that --pairs has trained, so that --encode uses no other
// one by default.
template <class Config> Json bert_json(const Config& c) {
    Json j = bert_config(c.V, c.position.T_train, c.C, c.L, c.NH, c.special.pad, position_json(c.position),
                         mask_json(c.position));
    if (!c.pooling.empty()) { j["pooling"] = c.pooling; }
    set_rope_json(j, c.position, c.T);
    set_version_json(j, c.position);
    return j;
}
