// run/config.h -- what a model is, from the flags and from the checkpoint or weights that they name: its shape, its
// encoding, its tokenizer.
#ifndef LLMC_RUN_CONFIG_H
#define LLMC_RUN_CONFIG_H

#include "../files/checkpoint.h"
#include "../files/import.h"
#include "../position/table.h"
#include "../text/dataloader.h"
#include "../text/tokenizer.h"
#include "flag_parser.h"

// ----------------------------------------------------------------------------------------------------------
// the encoding in config.json: {"name": "t5_clip", "K": 1023}

inline Json position_json(const PositionConfig& position) {
    Json j = {{"name", position.name}};
    for (const auto& kv : position.values) { j[kv.first] = kv.second; }
    return j;
}
inline PositionConfig position_from_json(const Json& j, int T_train, const std::string& what) {
    std::string text = json_string(j, "name", what);
    char separator = ':';
    for (const auto& item : j.items()) {
        if (item.key() == "name") { continue; }
        text += strprintf("%c%s=%.17g", separator, item.key().c_str(), json_number(j, item.key(), what));
        separator = ',';
    }
    return parse_position(text, T_train);
}

// --rope_scaling ntk:4 -> how, and the factor s (0: T / T_train at each length)
inline void parse_rope_scaling(const std::string& text, PositionConfig& position) {
    const size_t colon = text.find(':');
    const std::string kind = text.substr(0, colon);
    position.scaling = RopeScaling::None;
    if (kind == "pi") { position.scaling = RopeScaling::PI; }
    if (kind == "ntk") { position.scaling = RopeScaling::NTK; }
    if (kind == "yarn") { position.scaling = RopeScaling::YaRN; }
    position.scaling_factor = colon == std::string::npos ? 0.0 : strtod(text.c_str() + colon + 1, nullptr);
    check(position.scaling == RopeScaling::None || position.name == "rope",
          "--rope_scaling %s: only rope can be stretched, and the encoding is %s", text.c_str(), position.name.c_str());
}

inline TileSkip parse_tile_skip(const std::string& text) {
    if (text == "off") { return TileSkip::Off; }
    return text == "exact" ? TileSkip::Exact : TileSkip::Default;
}

// The tokenizer of a model: --tokenizer, or the one its checkpoint carries, or its bytes; null: ids are all there is.
inline std::unique_ptr<Tokenizer> find_tokenizer(const std::string& flag, const std::string& source, int V) {
    std::string path = flag;
    if (path.empty() && V == 256) { return std::make_unique<Tokenizer>(Tokenizer::bytes()); }
    const std::vector<int> steps = list_checkpoints(source);
    const std::string dir = steps.empty() ? source : source + "/" + step_name(steps.back());
    for (const char* name : {"encoder.json", "vocab.json", "vocab.txt", "gpt2_tokenizer.bin"}) {
        if (path.empty() && is_directory(dir) && path_exists(dir + "/" + name)) { path = dir + "/" + name; }
    }
    if (path.empty()) { return nullptr; }
    auto tokenizer = std::make_unique<Tokenizer>(Tokenizer::load(path));
    check(tokenizer->vocab_size() == V, "--tokenizer %s: expected the model's %d tokens, got %d", path.c_str(), V,
          tokenizer->vocab_size());
    return tokenizer;
}

// The command that writes the files of this pattern, "" when no script of data/ does
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
    bool found = false;
    for (const ModelSize& s : sizes) {
        names += s.name + std::string(", ");
        if (name != s.name) { continue; }
        c.L = s.L;
        c.NH = s.NH;
        c.C = s.C;
        found = true;
    }
    Ints shape;
    if (!found && parse_value(text, any(), shape) && shape.size() == 3) {
        c.L = shape[0];
        c.NH = shape[1];
        c.C = shape[2];
        found = true;
    }
    check(found, "--model: expected %sor L,NH,C as in 12,12,768, got '%s'", names.c_str(), printable(text).c_str());
    check(c.L >= 1 && c.L <= 1024 && c.NH >= 1 && c.C >= 1 && c.C <= 65536 && c.C % c.NH == 0,
          "--model: expected L in 1..1024, C in 1..65536 and an NH that divides C, got '%s'", text.c_str());
}

// The model's configuration: `c` as the flags have it, or that of the checkpoint or weights at `path` (if any), which
// must agree with the flags and the data. data_vocab: what the data wants of the model, 0: there is none.
template <class Config>
Config resolve_config(const Options& o, Config c, const std::string& path, int data_vocab, const ConfigKeys& keys) {
    check(o.pos.size() <= 200, "--pos: expected the name of an encoding, got %zu bytes, %.40s...", o.pos.size(),
          o.pos.c_str());
    c.T = o.T;
    c.V = data_vocab;
    if (path.empty()) {
        c.position = parse_position(o.pos, c.T);
        parse_rope_scaling(o.rope_scaling, c.position);
        return c;
    }
    const Json j = read_config(path, keys);
    const Config asked = c;
    c.L = (int)json_int(j, keys.L, 1, 1024, path);
    c.NH = (int)json_int(j, keys.NH, 1, 65536, path);
    c.C = (int)json_int(j, keys.C, 1, 65536, path);
    c.V = (int)json_int(j, keys.V, 1, MAX_VOCAB, path);
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
        if (o.is_given("pos")) {
            const std::string wanted = position_text(parse_position(o.pos, trained)), found = position_text(c.position);
            check(wanted == found, "--pos %s: the checkpoint %s was trained with %s", wanted.c_str(), path.c_str(),
                  found.c_str());
        }
    } else {                    // a model of another program: learned positions, unless another encoding is asked for
        c.position = parse_position(o.is_given("pos") ? o.pos : "learned", trained);
    }
    parse_rope_scaling(o.rope_scaling, c.position);
    return c;
}

#endif
