// run/config.h -- a model's shape, encoding and vocabulary, from the flags and the checkpoint or weights they name.
#pragma once

#include "../files/checkpoint.h"
#include "../files/import.h"
#include "../ranks/comm.h"
#include "../text/dataloader.h"
#include "../text/tokenizer.h"
#include "config_json.h"
#include "../flags.h"

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
// the model of a run: the config.json of the checkpoint or other weights that it begins with, and over that the flags.
// Each row of model_settings is a flag; a row may read what the rows before it have set.

// Where the model comes from
struct ModelSource {
    std::string path;                   // of a checkpoint or other weights; "": the model is new
    bool resumed = false;               // the checkpoint of the run itself
    bool trains = false;
    int end_of_text = -1;               // the token that begins a document of the data; -1: unknown
    bool foreign = false;               // another program's, whose config.json has no "position"
};

// What a flag may do to the value that a checkpoint has. KEEPS: nothing, as the weights need it. REPLACES: change it,
// with a notice, but in a resumed run only by --allow_change. CHOOSES: change it without a word.
enum OnLoad { KEEPS, REPLACES, CHOOSES };

struct ModelSetting {
    const char* flag;
    OnLoad on_load;
    std::string (*text)(const ModelConfig&);                                    // its value, as the flag has it
    void (*set)(ModelConfig&, const Options&, const ModelSource&);              // to the flag's
};

// --pos. What it does not say is as in the checkpoint; if that is not today's default, a message says so.
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

// --rope_scaling. Over a checkpoint, a kind without a factor takes the checkpoint's, and the original length stays. In
// training, a model has one factor.
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

// The model's vocabulary, c.V, must have room for the data's; 0: there is no data
inline void check_vocabulary(const ModelConfig& c, const Options& o, const std::string& path, int data_vocab) {
    const bool bytes = data_vocab == (o.program == BERT_FLAG ? BYTE_VOCAB : 256);
    check(data_vocab == c.V || (data_vocab < c.V && !bytes),
          "--train_files, --val_files: the data has a vocabulary of %d, the model in %s one of %d", data_vocab,
          path.c_str(), c.V);
    if (data_vocab > 0 && data_vocab < c.V && comm().rank == 0) {
        say("%s: the model has %d rows for the %d tokens of the data; its softmax is over all of them", path.c_str(),
            c.V, data_vocab);
    }
}

// Settles the model of a run, and in `o` the values that its flags have in effect, for --resume to compare. data_vocab:
// the vocabulary of the data, 0 without data
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
        if (!notice.empty() && comm().rank == 0) { say("%s", notice.c_str()); }
    }
    if (from.trains && !from.resumed && !p.has("learned")) { p.T_train = c.T; }
    o.T = c.T;
    o.rope_scaling = rope_scaling_text(p);
    o.window = p.windows;
    o.sinks = p.mask.sinks;
    o.document_mask = p.mask.by_document();
    o.vocab_softmax = c.padded_softmax ? "padded" : "used";
}

// ----------------------------------------------------------------------------------------------------------
// the tokenizer of a run: found at the start, kept in memory, written into every checkpoint as transformers reads it:
//
//   the vocabulary's files         as they were given, but under transformers' names; tokenizer.json of bytes
//   tokenizer_config.json          as given, but for the side and the length that the model wants, or written here
//   generation_config.json         for a GPT-2: the token at which generate() stops

inline bool is_bytes(const Tokenizer& t) {
    return t.kind == Tokenizer::Kind::Bytes && t.tokens == Tokenizer::bytes().tokens;
}

// An error unless every id of the tokenizer is one of the model's V; fewer give a notice. what: names the tokenizer
inline void check_fits(const Tokenizer& t, const std::string& what, int V) {
    check(t.vocab_size() <= V, "%s: expected the model's %d tokens, got %d", what.c_str(), V, t.vocab_size());
    if (t.vocab_size() < V && comm().rank == 0) {
        say("%s: has %d tokens, and the model has %d rows", what.c_str(), t.vocab_size(), V);
    }
}

// The tokenizer beside the weights of a model with V tokens, or null. One of an unknown kind, or with more tokens, is
// ignored with a notice if other software wrote the model; in a checkpoint of this program it is an error.
inline std::unique_ptr<Tokenizer> stored_tokenizer(const std::string& source, int V) {
    if (source.empty()) { return nullptr; }
    const size_t slash = source.rfind('/');
    std::string dir = source;
    if (!is_directory(source)) { dir = slash == std::string::npos ? "." : source.substr(0, slash); }
    if (Tokenizer::files_in(dir).empty()) { return nullptr; }
    try {
        auto t = std::make_unique<Tokenizer>(Tokenizer::load(dir));
        if (V != 256) { check_fits(*t, t->path, V); }
        return t;
    } catch (const Error& e) {
        if (path_exists(dir + "/manifest.json")) { throw; }
        if (comm().rank == 0) { say("%s; tokens are shown as ids (--tokenizer)", e.what()); }
        return nullptr;
    }
}

// The tokenizer of a model with V tokens: --tokenizer, or the one beside its weights (`source`, a directory or a file),
// or bytes; null if there is none. A resumed run keeps its checkpoint's. Weights from elsewhere may have more rows.
inline std::unique_ptr<Tokenizer> find_tokenizer(const std::string& flag, const std::string& source, bool resumed,
                                                 int V) {
    const Phase reading("reading the tokenizer");
    std::unique_ptr<Tokenizer> t;
    if (!flag.empty()) {
        t = std::make_unique<Tokenizer>(Tokenizer::load(flag));
        const std::string name = "--tokenizer " + t->path;
        check(!source.empty() || t->vocab_size() == V, "%s: expected the model's %d tokens, got %d", name.c_str(), V,
              t->vocab_size());
        check_fits(*t, name, V);
        if (!resumed && V != 256) { return t; }
    }
    std::unique_ptr<Tokenizer> stored = stored_tokenizer(source, V);
    for (const Tokenizer* other : {t.get(), stored.get()}) {
        const std::vector<std::string> bytes = Tokenizer::bytes().tokens;
        const bool fits = V != 256 || other == nullptr ||
                          (other->kind == Tokenizer::Kind::Bytes && other->vocab_size() >= V &&
                           std::equal(bytes.begin(), bytes.end(), other->tokens.begin()));
        check(fits, "%s%s: expected the 256 bytes in their order, as the tokens of this model are bytes; leave it out",
              other == t.get() ? "--tokenizer " : "", other->path.c_str());
    }
    if (V == 256) { return std::make_unique<Tokenizer>(Tokenizer::bytes()); }
    if (stored == nullptr) { return t; }
    check(t == nullptr || t->tokens == stored->tokens, "--tokenizer %s: its tokens are not those of %s, with which the "
          "run began; leave it out", t->path.c_str(), stored->path.c_str());
    return stored;
}

// tokenizer_config.json for a vocabulary that has none
inline Json tokenizer_config(const Tokenizer& t, bool bert) {
    const char* type = t.file("vocab.txt") ? "BertTokenizer" : "GPT2Tokenizer";
    const bool whole = is_bytes(t) || t.file("tokenizer.json") != nullptr;
    Json j = {{"tokenizer_class", whole ? "PreTrainedTokenizerFast" : type}, {"clean_up_tokenization_spaces", false}};
    if (!bert) {
        const int special = is_bytes(t) ? 0 : t.eot;
        const Json end = special >= 0 ? Json(t.tokens[(size_t)special]) : Json();
        for (const char* key : {"bos_token", "eos_token", is_bytes(t) ? "pad_token" : "unk_token"}) { j[key] = end; }
        j["model_input_names"] = {"input_ids", "attention_mask"};
        return j;
    }
    const std::pair<const char*, const char*> names[] = {
        {"pad_token", "[PAD]"}, {"unk_token", "[UNK]"}, {"cls_token", "[CLS]"}, {"sep_token", "[SEP]"},
        {"mask_token", "[MASK]"}};
    for (const auto& [key, token] : names) {
        const bool has = is_bytes(t) ? strcmp(token, "[UNK]") != 0 : t.id_of(token) >= 0;       // bytes need no [UNK]
        if (has) { j[key] = token; }
    }
    return j;
}

// The small files of a checkpoint beside config.json, which is `config`: name, contents. tokenizer: may be null
inline std::vector<std::pair<std::string, std::string>> vocabulary_files(const Tokenizer* tokenizer,
                                                                         const Json& config) {
    const bool bert = config.contains(BERT_KEYS.C);
    const bool learned = config.contains("position") && config["position"].value("name", "") == "learned";
    std::vector<std::pair<std::string, std::string>> files;
    if (tokenizer != nullptr) {
        const Tokenizer& t = *tokenizer;
        files = t.files;
        if (is_bytes(t)) { files = {{"tokenizer.json", json_text(byte_tokenizer_json(bert), 1) + "\n"}}; }
        const std::string name = "tokenizer_config.json";
        const std::string* given = t.file(name);
        const bool words = bert || t.kind == Tokenizer::Kind::WordPiece;
        Json j = given != nullptr ? parse_json(*given, name) : tokenizer_config(t, words);
        j.erase("model_max_length");
        if (learned) { j["model_max_length"] = config.at(bert ? BERT_KEYS.T : GPT2_KEYS.T); }
        if (!words) { j["padding_side"] = "left"; }     // generate() continues a batch of texts at their common end
        const std::pair<std::string, std::string> file = {name, json_text(j, 2) + "\n"};
        const auto at = std::find_if(files.begin(), files.end(), [&](const auto& f) { return f.first == name; });
        if (at != files.end()) { *at = file; } else { files.push_back(file); }
    }
    const Json end = config.contains("eos_token_id") ? config["eos_token_id"] : Json();
    if (!bert && !end.is_null()) {
        const Json j = {{"bos_token_id", end}, {"eos_token_id", end}};
        files.push_back({"generation_config.json", json_text(j, 2) + "\n"});
    }
    return files;
}
