// What must hold for any bytes given to a parser: it refuses them with an Error for bad input, or its result is
// consistent. One program for all parsers, so that it is compiled once; --target=NAME picks one. `make fuzz` runs each
// (dev/fuzz.sh):
//
//   build/fuzz --targets            prints the names
//   build/fuzz --seeds DIR          writes DIR/NAME/0, 1, ...: valid inputs of each parser, for libFuzzer to start with
//   build/fuzz --target=NAME FILE   runs one input again
#define LLVMFuzzerTestOneInput fuzz_tokenizer
#include "test/fuzz/fuzz_tokenizer.cu"
#undef LLVMFuzzerTestOneInput

#include <map>
#include <sstream>

#include "llmc/engine/data.h"
#include "llmc/lab/generate.h"
#include "llmc/engine/run.h"

namespace {

using Seeds = std::vector<std::string>;
const std::string zero(1, '\0');

// An input that is taken apart from its front; zeros stand for missing bytes.
struct Input {
    const std::string& bytes;
    size_t at = 0;
    explicit Input(const std::string& bytes) : bytes(bytes) {}
    int byte() { return at < bytes.size() ? (unsigned char)bytes[at++] : 0; }
    uint32_t number() {
        uint32_t n = 0;
        for (int i = 0; i < 4; i++) { n |= (uint32_t)byte() << 8 * i; }
        return n;
    }
    std::string take(size_t n) {
        const std::string s = bytes.substr(std::min(at, bytes.size()), n);
        at += s.size();
        return s;
    }
    std::string rest() { return take(bytes.size()); }
    std::string until(char separator) {             // without it
        const std::string s = take(std::min(bytes.find(separator, at), bytes.size()) - at);
        at++;
        return s;
    }
};

// False: the input was refused, which only an Error for bad input may do.
template <class F> bool accepts(F f) {
    try {
        f();
    } catch (const Error& e) {
        must(e.code == EXIT_BAD_INPUT, e.what());
        must(e.what()[0] != '\0', "an error says why");
        return false;
    }
    return true;
}

std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    std::istringstream stream(text);
    for (std::string line; std::getline(stream, line);) { lines.push_back(line); }
    return lines;
}

std::string int_bytes(const std::vector<int32_t>& numbers) {
    return std::string((const char*)numbers.data(), 4 * numbers.size());
}
std::string word_bytes(const std::vector<uint16_t>& words) {
    return std::string((const char*)words.data(), 2 * words.size());
}

// A file with a header of 1024 bytes, where only a few have a meaning: the input has these `numbers`, and then the rest
// of the file.
std::string unfold_header(Input& in, size_t numbers) {
    std::string header = in.take(4 * numbers);
    header.resize(1024);
    return header + in.rest();
}
void set_number(std::string& s, size_t index, uint64_t value) {
    const int32_t n = (int32_t)value;
    if (s.size() >= 4 * (index + 1)) { memcpy(&s[4 * index], &n, 4); }
}


// ----------------------------------------------------------------------------------------------------------
// encodings

// A configuration is restored from what it is saved as, and nothing that is computed from it overflows.
void check_position(const PositionConfig& config) {
    const std::string text = position_text(config);
    must(position_text(parse_position(text, config.T_train)) == text, "position_text is parse_position's inverse");
    const PositionConfig again = position_from_json(parse_json(json_text(position_json(config)), "p"),
                                                    config.T_train, "p");
    must(again.name == config.name && again.parts == config.parts && again.pattern == config.pattern,
         "config.json restores the encodings");
    for (const EncodingConfig& c : config.parts) {
        for (const Hyperparameter& h : c.values) {
            must(!h.written() || h.choices != nullptr || (std::isfinite(h.value) && h.value > 0),
                 "hyperparameters are positive");
        }
    }
    must(position_max_length(config) >= 1, "an encoding has a position");
    accepts([&] {
        const PositionTables tables = position_tables(config, {2, 2, 4, 1, 8, config.T_train % 2 == 0});
        for (const TensorSpec& s : tables.params) {
            must(s.rows >= 1 && s.size() < (size_t)1 << 40, "tensors of an encoding have a size");
        }
    });
}

bool fuzz_position(const std::string& bytes) {
    Input in(bytes);
    const bool json = in.byte() % 2;
    const int T = 1 + (int)(in.number() % INT32_MAX);
    const std::string scaling = in.until('\x01'), text = in.rest();
    return accepts([&] {
        PositionConfig config = json ? position_from_json(parse_json(text, "p"), T, "p") : parse_position(text, T);
        std::string value;
        const bool known = parse_value(scaling, one_of("none|pi[:s]|ntk[:s]|yarn[:s]|longrope"), value);
        check(known, "--rope_scaling %s", scaling.c_str());
        parse_rope_scaling(value, config);
        must(config.scaling_factor == 0 || (std::isfinite(config.scaling_factor) && config.scaling_factor >= 1),
             "a factor is at least 1");
        check_position(config);
    });
}
Seeds seeds_position() {
    Seeds seeds;
    const std::string none = std::string("\0\x3F\0\0\0none\x01", 10);
    for (const PositionRow& row : position_rows) {
        seeds.push_back(none + position_text(parse_position(row.name, 64)));
    }
    for (const char* text : {"t5_clip:K=16", "rope:theta=1e4", "rope:theta=0.5e+3"}) { seeds.push_back(none + text); }
    for (const char* s : {"pi", "ntk:4", "yarn:2.5"}) {
        seeds.push_back(std::string("\0\x3F\0\0\0", 5) + s + "\x01rope");
    }
    for (const char* json : {"{\"name\": \"cable\"}", "{\"name\": \"t5\", \"buckets\": 32, \"distance\": 128.0}"}) {
        seeds.push_back("\x01" + none.substr(1) + json);
    }
    return seeds;
}

// ----------------------------------------------------------------------------------------------------------
// the command line

void check_plan(const Options& o) {
    Run r;
    r.o = o;
    r.trains = true;
    ModelConfig config;
    parse_model(o.model, o.program, config);
    if (o.model.find(',') != std::string::npos) {
        const std::string typed = strprintf("%d,%d,%d", config.L, config.NH, config.C);
        std::string digits;
        for (size_t i = 0; i < o.model.size(); i++) {       // without leading zeros, spaces and signs
            const char c = o.model[i];
            const bool first = digits.empty() || digits.back() == ',';
            const bool more = i + 1 < o.model.size() && isdigit((unsigned char)o.model[i + 1]);
            const bool leading_zero = c == '0' && first && more;
            if ((isdigit((unsigned char)c) || c == ',') && !leading_zero) { digits += c; }
        }
        must(digits == typed, "the model is the one that was typed");
    }
    settle_config(config, r.o, {"", false, true}, 256);
    check_position(config.position);
    plan_steps(r, config, 1000);
    must((int64_t)r.samples * r.o.T == r.o.total_batch && (int64_t)r.micro_batches * r.o.B == r.samples,
         "an update is micro-batches of samples");
    must(r.o.steps >= 0 && r.o.steps <= INT32_MAX, "every step has a name");
    for (const int64_t step : {(int64_t)0, r.o.steps / 2, r.o.steps - 1}) {
        if (step < 0) { continue; }
        const double rate = learning_rate(o.schedule, o.lr, o.warmup, r.o.steps, o.final_lr, step);
        must(rate >= 0 && rate <= o.lr * (1 + 1e-12), "learning rates are from 0 to --lr");
    }
}

std::map<std::string, std::string> option_texts(const Options& o) {
    std::map<std::string, std::string> texts;
    for_each_option(o, [&](const OptionRow& row, const auto& value) { texts[row.name] = option_text(value); });
    return texts;
}

bool fuzz_flags(const std::string& bytes) {
    Input in(bytes);
    const Program program = in.byte() % 2 ? BERT_FLAG : GPT2_FLAG;
    const std::string rest = in.rest();
    const std::vector<std::string> words = lines_of(rest);
    std::vector<const char*> argv = {"train"};
    for (const std::string& w : words) { argv.push_back(w.c_str()); }
    return accepts([&] {
        Options o(program);
        if (rest[0] == '{') { take_config(o, parse_json(rest, "config"), "config"); }       // the file of --config
        else { o = parse_options((int)argv.size(), argv.data(), program); }
        if (o.help) { return; }
        const std::map<std::string, std::string> texts = option_texts(o);
        Options again(program);
        for (const OptionRow& row : option_rows()) {
            if (!o.is_given(row.name)) { continue; }
            must((row.programs & program) != 0, "only flags of this trainer");
            set_option(again, row.name, row.name, texts.at(row.name));
            must(option_texts(again).at(row.name) == texts.at(row.name), "a value survives as text");
        }
        must(!banner_line("flags", changed_flags(o)).empty(), "a banner");
        check_resumed_options(o, options_json(o), "now");
        const Json saved = parse_json(json_text(options_json(o), 2), "state.json");
        must(accepts([&] { check_resumed_options(o, saved, "saved"); }), "a run can be resumed with its own flags");
        accepts([&] { check_plan(o); });
    });
}
Seeds seeds_flags() {
    Seeds seeds = {zero, zero + "--help", zero + "-e\nd12\n-b\n8",
                   zero + "--model\n2,2,8\n--T\n64\n--B\n2\n--total_batch\n256\n--steps\n10\n--schedule\nwsd\n"
                          "--warmup\n3",
                   "\x01--model\nbert:tiny\n--schedule\nwsd\n--pairs\nx.txt",
                   zero + R"({"flags": {"lr": 0.1, "eval_lengths": [64, 128], "curve": true, "pos": "rope"}})"};
    for (const Program program : {GPT2_FLAG, BERT_FLAG}) {
        const Options defaults(program);
        for_each_option(defaults, [&](const OptionRow& row, const auto& value) {
            if (!(row.programs & program) || std::string(row.name) == "config") { return; }
            std::string text = option_text(value);
            const char* choices = row.range.choices;
            if (text.empty()) { text = choices != nullptr ? std::string(choices, strcspn(choices, "|[")) : "64"; }
            seeds.push_back(std::string(1, program == BERT_FLAG) + "--" + row.name +
                            (row.range.takes_value ? "\n" + text : ""));
        });
    }
    return seeds;
}

// ----------------------------------------------------------------------------------------------------------
// JSON

template <class J> void check_json(const J& j, int depth) {
    must(depth <= JSON_MAX_DEPTH, "bounded depth");
    if (!j.is_structured()) { return; }
    for (const auto& item : j.items()) {
        const std::string key = item.key();
        if (j.is_object()) {
            accepts([&] {
                const int64_t n = json_int(j, key, -5, 300, "x");
                must(n >= -5 && n <= 300 && std::to_string(n) == json_text(j[key]), "integers are in range");
            });
            accepts([&] { must(std::isfinite(json_number(j, key, "x")), "numbers are finite"); });
            accepts([&] { json_string(j, key, "x"); });
        }
        check_json(item.value(), depth + 1);
    }
}
bool fuzz_json(const std::string& bytes) {
    bool ordered = false;
    const bool sorted = accepts([&] { check_json(parse_json<nlohmann::json>(bytes, "x"), 0); });
    accepts([&] {
        const Json j = parse_json(bytes, "x");
        ordered = true;
        check_json(j, 0);
        std::vector<size_t> open;                   // how many keys the text has in each enclosing object
        const Json counted = Json::parse(bytes, [&](int, Json::parse_event_t event, Json& parsed) {
            if (event == Json::parse_event_t::object_start) { open.push_back(0); }
            if (event == Json::parse_event_t::key) { open.back()++; }
            if (event == Json::parse_event_t::object_end) {
                must(open.back() == parsed.size(), "no key appears twice");
                open.pop_back();
            }
            return true;
        });
        must(counted == j, "the same JSON");
        for (const int indent : {-1, 2}) {
            const std::string text = json_text(j, indent);
            must(json_text(parse_json(text, "x"), indent) == text, "writing and reading changes nothing");
        }
        must(!json_excerpt(j).empty(), "an excerpt");
    });
    must(ordered == sorted, "both kinds of JSON accept the same texts");
    return ordered;
}
Seeds seeds_json() {
    return {"{\"a\": 1, \"b\": [true, null, -2.5e-3, \"\\u00e9\\ud83d\\ude00\\n\"], \"c\": {\"d\": {}}}",
            "[[[[[[[[]]]]]]]]", "18446744073709551615",
            "-9223372036854775808", "1e308", "\"\xC3\xA9\"", "{\"\": [], \"x\": 0.1}"};
}

// ----------------------------------------------------------------------------------------------------------
// config.json

bool fuzz_config(const std::string& bytes) {
    Input in(bytes);
    const int bits = in.byte();
    const FuzzDirectory& dir = fuzz_directory();
    if (!path_exists(dir.path + "/model.safetensors")) {
        dir.write("model.safetensors", std::string("\x02\0\0\0\0\0\0\0{}", 10));
    }
    Options o(bits & 1 ? BERT_FLAG : GPT2_FLAG);
    if (bits & 2) { o.pos = "t5_clip:K=5"; o.given.push_back("pos"); }
    if (bits & 4) { o.T = 32; o.given.push_back("T"); }
    const std::string text = in.rest();
    dir.write("config.json", text);
    accepts([&] {
        const Json bert = bert_config(260, 64, 8, 2, 2, 256, {{"name", "cable"}});
        const Json gpt2 = gpt2_config(256, 64, 8, 2, 2, {{"name", "t5_clip"}, {"K", 63}});
        check_config(parse_json(text, "c"), bits & 1 ? bert : gpt2, "c");
    });
    return accepts([&] {
        ModelConfig c;
        settle_config(c, o, {dir.path}, bits & 8 ? 256 : 0);
        must(c.L >= 1 && c.NH >= 1 && c.C >= 1 && c.C % c.NH == 0 && c.V >= 1 && c.V <= MAX_VOCAB && c.T >= 1,
             "a model has a shape");
        must(!(bits & 8) || c.V == 256, "the vocabulary is the data's");
        check_position(c.position);
        const Json position = position_json(c.position);
        const Json saved = bits & 1 ? bert_config(c.V, c.T, c.C, c.L, c.NH, 0, position)
                                    : gpt2_config(c.V, c.T, c.C, c.L, c.NH, position);
        check_config(saved, saved, "saved");
    });
}
Seeds seeds_config() {
    Seeds seeds;
    for (const char* name : {"cable", "t5_clip", "learned", "rope"}) {
        const Json position = position_json(parse_position(name, 64));
        seeds.push_back(zero + json_text(gpt2_config(256, 64, 8, 2, 2, position), 2));
        seeds.push_back("\x05" + json_text(bert_config(260, 64, 8, 2, 2, 256, position)));
    }
    const Json t5_clip = position_json(parse_position("t5_clip:K=5", 64));
    seeds.push_back("\x0E" + json_text(gpt2_config(256, 64, 8, 2, 2, t5_clip)));
    seeds.push_back(zero + "{\"n_layer\":2,\"n_head\":2,\"n_embd\":8,\"vocab_size\":256,\"n_positions\":64}");
    return seeds;
}

// ----------------------------------------------------------------------------------------------------------
// tensors and weights

// A file from its header and the rest of the input: two bytes that say how much data follows, and its first bytes
std::string unfold_safetensors(Input& in, const std::string& header) {
    std::string s(8, '\0');
    for (int i = 0; i < 8; i++) { s[(size_t)i] = (char)((uint64_t)header.size() >> 8 * i & 255); }
    size_t data = (size_t)in.byte();
    data |= (size_t)(in.byte() & 31) << 8;
    std::string body = in.rest();
    body.resize(data);
    return s + header + body;
}
std::string fold_safetensors(const std::string& header, const std::string& body) {
    return header + "\x01" + (char)(body.size() & 255) + (char)(body.size() >> 8) + body;
}

void check_safetensors(const std::string& path) {
    const Safetensors file(path);
    uint64_t at = file.file.size;
    std::vector<SafetensorsItem> items;
    std::vector<std::vector<float>> values;
    for (auto e = file.entries.rbegin(); e != file.entries.rend(); ++e) {
        must(e->offset + e->bytes == at && e->bytes == e->elements * safetensors_dtype_size(e->dtype),
             "each tensor begins where the one before ends");
        at = e->offset;
        must(&file.entry(e->name) == &*e, "a tensor is found by its name");
        accepts([&] {
            std::vector<float> x(e->elements);
            file.read_elements(*e, x.data(), 0, x.size());
            values.push_back(x);
            items.push_back({e->name, e->shape, nullptr});
        });
    }
    for (size_t i = 0; i < items.size(); i++) {
        const std::vector<float>& x = values[i];
        items[i].fill = [&x, &items, i](float* out, size_t row0, size_t rows) {
            const size_t row = x.size() / (items[i].shape.empty() ? 1 : items[i].shape[0]);
            std::copy_n(x.begin() + (long)(row0 * row), rows * row, out);
        };
    }
    const std::string copy = fuzz_directory().path + "/copy.safetensors";
    write_safetensors(copy, items, file.metadata);
    const Safetensors again(copy);
    for (size_t i = 0; i < items.size(); i++) {
        std::vector<float> x(values[i].size());
        again.read_elements(again.entry(items[i].name), x.data(), 0, x.size());
        must(x.empty() || memcmp(x.data(), values[i].data(), 4 * x.size()) == 0, "writing and reading changes nothing");
    }
}

// A model of four tensors; the last one belongs to an encoding
void check_load(const std::string& path) {
    TensorTable table;
    const std::vector<TensorSpec> specs = {{"wte", 0, 4, 2}, {"qkvw", 2, 3, 2}, {"lnfw", 0, 2, 0}, {"t5", 0, 3, 2}};
    for (const TensorSpec& s : specs) { table.add(s); }
    const FileTensor t5 = {"transformer.t5.weight", "t5", 0, 0, 3, false};
    const std::vector<FileTensor> files = {{"transformer.wte.weight", "wte", 0, 0, 4, false},
                                           {"transformer.h.0.attn.c_attn.weight", "qkvw", 0, 0, 3, true},
                                           {"transformer.h.1.attn.c_attn.weight", "qkvw", 1, 0, 3, true},
                                           {"transformer.ln_f.weight", "lnfw", 0, 0, 2, false}, t5};
    std::vector<float> params(table.total, -7.0f);
    const bool loaded = accepts([&] {
        const WeightReader reader(path, table, files, {t5});
        try { reader.read(params.data(), {0, table.total}); } catch (const Error& e) {
            if (e.code != EXIT_DIVERGED) { throw; }         // a NaN, which is found when its tensor is read
        }
    });
    must(loaded || params == std::vector<float>(table.total, -7.0f), "refused weights change nothing");
}

bool fuzz_safetensors(const std::string& bytes) {
    Input in(bytes);
    const bool raw = in.byte() % 4 == 3;
    const FuzzDirectory& dir = fuzz_directory();
    dir.clear();
    dir.write("x.safetensors", raw ? in.rest() : unfold_safetensors(in, in.until('\x01')));
    check_load(dir.path + "/x.safetensors");
    return accepts([&] { check_safetensors(dir.path + "/x.safetensors"); });
}
Seeds seeds_safetensors() {
    const auto tensor = [](const char* name, const char* dtype, const char* shape, int begin, int end) {
        return strprintf("\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%d,%d]}", name, dtype,
                         shape, begin, end);
    };
    const std::string types = "{" + tensor("a", "F16", "[2,2]", 0, 8) + "," + tensor("b", "BF16", "[]", 8, 10) + "," +
                              tensor("c", "I64", "[1]", 10, 18) + "," + tensor("d", "I32", "[0,3]", 18, 18) + "}";
    const std::string model = "{\"__metadata__\":{\"format\":\"pt\"}," +
                              tensor("transformer.wte.weight", "F32", "[4,2]", 0, 32) + "," +
                              tensor("h.0.attn.c_attn.weight", "F16", "[2,3]", 32, 44) + "," +
                              tensor("transformer.h.1.attn.c_attn.weight", "BF16", "[2,3]", 44, 56) + "," +
                              tensor("ln_f.weight", "F32", "[2]", 56, 64) + "," +
                              tensor("lm_head.weight", "U8", "[3]", 64, 67) + "}";
    return {zero + fold_safetensors(types, std::string(18, '\x7C')),
            zero + fold_safetensors(model, std::string(67, '\x3C')),
            std::string("\x03\x02\0\0\0\0\0\0\0{}", 11)};
}

bool fuzz_bin(const std::string& bytes) {
    Input in(bytes);
    const int bits = in.byte();
    std::string content = unfold_header(in, 8);
    int32_t header[8];
    memcpy(header, content.data(), sizeof header);
    const int64_t T = header[2], L = header[4];
    const int64_t C = header[6], Vp = header[7];
    const bool small = std::max({T, L, C, Vp}) <= 16 && std::min({T, L, C, Vp}) >= 1;
    if (small && bits % 4 != 3) {                   // make the file as large as such a model is
        const int64_t elements = (Vp + T) * C + L * (12 * C * C + 13 * C) + 2 * C;
        content.resize(1024 + (size_t)(elements * (header[1] == 3 ? 4 : 2)));
    }
    const FuzzDirectory& dir = fuzz_directory();
    dir.clear();
    dir.write("model.bin", content);
    const std::string path = dir.path + "/model.bin";
    check_load(path);
    return accepts([&] {
        ModelConfig c;
        Options o;
        settle_config(c, o, {path}, 0);
        const LlmcModel model(path);
        must(c.L == model.L && c.C == model.C && c.V == model.V && c.T == model.max_T && model.V <= model.Vp,
             "the model has the shape of the header");
        size_t elements = 0;
        for (const SourceTensor& t : model.tensors()) {
            std::vector<float> x(shape_size(t.shape, "t"));
            t.read(x.data(), 0, x.size());
            elements += x.size();
        }
        elements += (size_t)(model.Vp - model.V) * (size_t)model.C;
        must(1024 + elements * (model.version == 3 ? 4 : 2) == content.size(), "the tensors fill the file");
    });
}
Seeds seeds_bin() {
    return {zero + int_bytes({20240326, 3, 4, 5, 1, 1, 2, 8}) + "abcdefgh",
            zero + int_bytes({20240326, 5, 8, 16, 2, 2, 4, 16}) + "abcdefgh"};
}

// ----------------------------------------------------------------------------------------------------------
// data

size_t shard_width(const std::string& content) {
    int32_t magic;
    memcpy(&magic, content.data(), 4);
    return magic == SHARD_MAGIC_UINT32 ? 4 : 2;
}

// Examples in rows: every one is read, with ids of the vocabulary, and each target is the id after its input.
void fuzz_rows(const TokenFiles& files) {
    const int T = files.row - 1;
    std::vector<int> inputs((size_t)T), targets((size_t)T);
    for (uint64_t w = 0; w < files.windows(T); w++) {
        files.window(w, T, inputs.data(), targets.data());
        for (int t = 0; t < T; t++) {
            must(inputs[(size_t)t] >= 0 && inputs[(size_t)t] < files.vocab, "ids are in the vocabulary");
            const int target = targets[(size_t)t];
            must(target == IGNORE_INDEX || t == T - 1 || target == inputs[(size_t)t + 1], "a target is the next id");
            must(target == IGNORE_INDEX || (target >= 0 && target < files.vocab), "targets are in the vocabulary");
        }
    }
}

bool fuzz_shard(const std::string& bytes) {
    Input in(bytes);
    const int choice = in.byte(), T = 1 + in.byte() % 16;
    const int kind = choice % 4;
    const size_t numbers = choice / 4 % 2 == 0 ? 5 : 9;            // 9: also those of examples in rows
    std::string content = kind == 0 || kind == 1 ? unfold_header(in, numbers) : in.rest();
    if (kind == 0) { set_number(content, 2, (content.size() - 1024) / shard_width(content)); }
    const FuzzDirectory& dir = fuzz_directory();
    dir.clear();
    for (const char* name : {"a", "b"}) { dir.write(name + std::string(kind == 3 ? ".txt" : ".bin"), content); }
    return accepts([&] {
        const TokenFiles files(dir.path + "/*", "--train_files", 0, true);
        if (files.row > 0) { return fuzz_rows(files); }
        const Shard& s = files.shards[0];
        must(files.shards.size() == 2 && files.tokens == 2 * s.tokens &&
             s.first_byte + s.tokens * (uint64_t)s.width == content.size(), "the tokens fill the file");
        std::vector<int> ids(files.tokens);
        files.read(0, files.tokens, ids.data());
        for (const int id : ids) { must(id >= 0 && id < files.vocab, "ids are in the vocabulary"); }
        const uint64_t windows = files.windows(T), each = windows / 2;
        std::vector<int> seen(windows), inputs((size_t)T), targets((size_t)T);
        for (uint64_t i = 0; i < windows; i++) {
            const uint64_t w = sample_window(i, windows, 7, true);
            must(w < windows && seen[w]++ == 0, "an epoch has each window once");
            fill_batch(files, T, i, 1, 7, true, inputs.data(), targets.data());
            const int* from = ids.data() + w / each * s.tokens + w % each * (uint64_t)T;
            must(std::equal(inputs.begin(), inputs.end(), from) &&
                 std::equal(targets.begin(), targets.end(), from + 1), "windows lie in their shard");
        }
    });
}
Seeds seeds_shard() {
    return {std::string("\0\3", 2) + int_bytes({SHARD_MAGIC, 1, 0, 300, 299}) + word_bytes({1, 2, 3, 4, 5, 299, 6}),
            std::string("\0\1", 2) + int_bytes({SHARD_MAGIC, 1, 0, 0, 0}) + word_bytes({50256, 7, 9}),
            std::string("\0\0", 2) + int_bytes({SHARD_MAGIC_UINT32, 7, 0, 0, 0}) + int_bytes({128000, 1, 70000}),
            std::string("\1\0", 2) + int_bytes({SHARD_MAGIC, 1, 2, 260, 258}) + word_bytes({1, 2}),
            std::string("\4\0", 2) + int_bytes({SHARD_MAGIC, 2, 0, 300, 299, 0, 0, 3, 1}) +
                word_bytes({1, 2, 0x8000 + 3, 4, 0x8000 + 5, 0x8000 + 299}),
            std::string("\3\2", 2) + "To be, or not to be"};
}

bool fuzz_documents(const std::string& bytes) {
    Input in(bytes);
    const int bits = in.byte(), kind = bits % 4;
    const SpecialTokens special = special_tokens(bits & 4 ? BERT_VOCAB : BYTE_VOCAB);
    const std::string names = in.take((size_t)in.byte());
    std::string content = kind <= 1 ? unfold_header(in, 7) : in.rest();
    if (kind == 0) { set_number(content, 2, (content.size() - 1024) / shard_width(content)); }
    const FuzzDirectory& dir = fuzz_directory();
    dir.clear();
    dir.write(kind == 3 ? "a.txt" : "a.bin", content);
    if (!names.empty()) { dir.write("a.ids", names); }
    return accepts([&] {
        const Documents d(dir.path + (kind == 3 ? "/a.txt" : "/a.bin"), "--encode", special);
        must(d.size() >= 1 && d.group >= 1 && d.size() == d.groups() * (size_t)d.group, "documents come in groups");
        uint64_t inside = 0;
        const size_t width = kind == 3 ? 1 : shard_width(content);
        for (size_t i = 0; i < d.size(); i++) {
            const int length = (int)d.length(i);
            std::vector<int> ids((size_t)length + 2);
            must(length >= 2 && d.read(i, length + 2, ids.data()) == length, "a document has [CLS] and [SEP]");
            must(ids[0] == special.cls && ids[(size_t)length - 1] == special.sep, "[CLS] ... [SEP]");
            for (int k = 1; k + 1 < length; k++) {
                must(ids[(size_t)k] >= 0 && ids[(size_t)k] < special.V && ids[(size_t)k] != special.cls &&
                     ids[(size_t)k] != special.sep, "ids of a text");
            }
            for (int k = 0; kind != 3 && k < length; k++) {
                uint32_t id = 0;
                memcpy(&id, content.data() + 1024 + (inside + (uint64_t)k) * width, width);
                must(id == (uint32_t)ids[(size_t)k], "the ids are those of the file");
            }
            std::vector<int> cut(2);
            must(d.read(i, 2, cut.data()) == 2 && cut[0] == special.cls && cut[1] == special.sep,
                 "cut to [CLS] and [SEP]");
            inside += (uint64_t)length - (kind == 3 ? 1 : 0);
            if (d.group == 1 && (kind == 3 || !names.empty())) { must(!d.name(i).empty(), "a document has a name"); }
        }
        if (kind == 3) { inside -= content.back() != '\n'; }
        const uint64_t all = kind == 3 ? content.size() : (content.size() - 1024) / width;
        must(inside == all, "the documents fill the file");
        GroupBatch batch;
        const int count = (int)std::min(d.groups(), (size_t)3);
        fill_groups(d, 5, count, 9, true, 16, batch);
        must(batch.ids.size() == (size_t)batch.rows * (size_t)batch.T && batch.rows == count * d.group,
             "a batch is groups");
        for (size_t i = 0; i < batch.ids.size(); i++) {
            const int row = (int)i / batch.T, t = (int)i % batch.T;
            must(batch.lengths[(size_t)row] <= batch.T &&
                 (t < batch.lengths[(size_t)row] || batch.ids[i] == special.pad), "[PAD] after the end of each row");
        }
    });
}
Seeds seeds_documents() {
    const auto shard = [](int V, int sep, int group, int documents, const std::vector<uint16_t>& ids) {
        return int_bytes({SHARD_MAGIC, 1, (int)ids.size(), V, sep, group, documents}) + word_bytes(ids);
    };
    const std::vector<uint16_t> two = {257, 1, 2, 258, 257, 258};
    return {std::string("\0\0", 2) + shard(260, 258, 2, 2, two),
            std::string("\0\4x\nyz", 6) + shard(260, 258, 1, 2, two),
            std::string("\1\0", 2) + shard(260, 258, 1, 2, two),
            std::string("\4\0", 2) + shard(30522, 102, 1, 1, {101, 2000, 102}),
            std::string("\3\0", 2) + "a query\tits text\tanother\nb\tc\td\n", std::string("\3\4x\nyz", 6) + "one\ntwo"};
}

bool fuzz_hellaswag(const std::string& bytes) {
    Input in(bytes);
    const bool raw = in.byte() % 4 == 3;
    const int V = 1 + (int)(in.number() & 0xffff);
    const std::string content = raw ? in.rest() : unfold_header(in, 4);
    const FuzzDirectory& dir = fuzz_directory();
    dir.write("choices", content);
    return accepts([&] {
        const HellaSwag set = load_hellaswag(dir.path + "/choices", V);
        size_t words = 0;
        for (const HellaSwag::Example& x : set.examples) {
            must(x.label >= 0 && x.label < HELLASWAG_ENDINGS, "a label is an ending");
            const std::vector<int>* texts[] = {&x.context, &x.ending[0], &x.ending[1], &x.ending[2], &x.ending[3]};
            words += 5;
            for (const std::vector<int>* text : texts) {
                must(!text->empty(), "a text has tokens");
                for (const int id : *text) { must(id >= 0 && id < V, "ids are in the vocabulary"); }
                words += 1 + text->size();
            }
        }
        must(1024 + 2 * words == content.size(), "the examples fill the file");
    });
}
Seeds seeds_hellaswag() {
    const std::vector<uint16_t> one = {65535, 34, 0, 2, 4, 2, 7, 8, 1, 1, 1, 2, 1, 3, 2, 4, 5};
    std::vector<uint16_t> two = one;
    two[2] = 1;
    const std::string V = zero + int_bytes({50256});
    return {V + int_bytes({HELLASWAG_MAGIC, 1, 1, 34}) + word_bytes(one),
            V + int_bytes({HELLASWAG_MAGIC, 1, 2, 34}) + word_bytes(one) + word_bytes(two)};
}

// ----------------------------------------------------------------------------------------------------------
// the output directory

// The checkpoint of step 7 that the manifests of this target describe; written once.
const std::vector<std::pair<std::string, std::string>> checkpoint_files = {
    {"model.safetensors", std::string("\x02\0\0\0\0\0\0\0{}", 10)}, {"config.json", "{}"}, {"state.json", "{}"}};
std::string true_manifest() {
    FileSums sums;
    for (const auto& f : checkpoint_files) { sums.push_back({f.first, {f.second.size(), checksum(f.second)}}); }
    return manifest_text(7, sums);
}

// The manifest as it is, or with a checksum that matches it, as a hostile writer would make one.
bool fuzz_manifest(const std::string& bytes) {
    Input in(bytes);
    const bool sealed = in.byte() % 2;
    std::string text = in.rest();
    const std::string dir = fuzz_directory().path + "/step_00000007";
    if (!is_directory(dir)) {
        io_mkdir(dir);
        for (const auto& f : checkpoint_files) { write_text(dir + "/" + f.first, f.second); }
    }
    accepts([&] {
        if (!sealed) { return; }
        Json j = parse_json(text, "m");
        if (!j.is_object()) { return; }
        j.erase("checksum");
        j["checksum"] = sum_text(checksum(json_text(j, 1)));
        text = json_text(j, 1) + "\n";
    });
    fuzz_directory().write("step_00000007/manifest.json", text);
    return accepts([&] {
        const std::vector<std::string> names = verify_checkpoint(dir);
        must(sealed || text == true_manifest(), "no change of a manifest goes unnoticed");
        const Json files = parse_json(text, "m")["files"];
        must(names.size() == files.size() && names.size() >= checkpoint_files.size(), "the files that it lists");
        for (const auto& f : checkpoint_files) {
            must(files.at(f.first)["checksum"] == sum_text(checksum(f.second)) &&
                 files.at(f.first)["bytes"] == f.second.size(), "the sums are those of the files");
        }
    });
}
Seeds seeds_manifest() { return {zero + true_manifest(), "\x01" + true_manifest()}; }

// One name per line: of a file, after an f, or of a directory
bool fuzz_outdir(const std::string& bytes) {
    const FuzzDirectory& dir = fuzz_directory();
    dir.clear();
    for (std::string name : lines_of(bytes)) {
        const bool is_file = !name.empty() && name[0] == 'f';
        if (is_file) { name.erase(0, 1); }
        const std::string path = dir.path + "/" + name;
        const bool legal = !name.empty() && name.find_first_of(std::string("/\0", 2)) == std::string::npos;
        if (!legal || name.size() > 60 || path_exists(path)) { continue; }      // "." and ".." exist
        if (is_file) { dir.write(name, "x"); } else { io_mkdir(path); }
    }
    for (const int step : list_checkpoints(dir.path)) {
        must(path_exists(dir.path + "/" + step_name(step)), "a checkpoint that is listed exists");
    }
    return accepts([&] {
        const OutputLock lock(dir.path);
        clean_output_directory(dir.path);
        for (const std::string& name : list_directory(dir.path)) {
            for (const char* rubbish : {".old_step_", ".tmp_step_", ".trash_step_"}) {
                must(!starts_with(name, rubbish), "what a killed run left is removed");
            }
            const bool step = step_of_name(name) >= 0;
            must(!step || step_name(step_of_name(name)) == name, "a name belongs to its step");
        }
        must(find_checkpoint(dir.path).empty(), "nothing here is a checkpoint");
        remove_checkpoint_files(dir.path + "/step_00000001");
        must(!path_exists(dir.path + "/step_00000001"), "removed");
    });
}
Seeds seeds_outdir() {
    return {"main.log", "fmain.log\n.tmp_step_00000003\n.trash_step_00000001\nf.tmp_step_1",
            ".old_step_x\nfx", "f.lock"};
}

bool fuzz_state(const std::string& bytes) {
    Input in(bytes);
    const Options o(in.byte() % 2 ? BERT_FLAG : GPT2_FLAG);
    const std::string text = in.rest();
    return accepts([&] {
        RunState s, again;
        s.from_json(parse_json(text, "state.json"), o, "state.json");
        must(s.step >= 0 && s.updates >= 0 && s.updates <= s.step, "no more updates than steps");
        const std::string saved = json_text(s.to_json(o));
        again.from_json(parse_json(saved, "saved"), o, "saved");
        must(json_text(again.to_json(o)) == saved, "writing and reading changes nothing");
        s.guard.skip_loss_z = s.guard.skip_norm_z = 3;
        for (const double x : {1.0, (double)NAN, 1e30, -1.0, 2.0}) { s.guard.judge(x, 1.0); }
        must(step_of_name(step_name((int)s.step)) == s.step, "its checkpoint has a name");
        s.step++;                                   // no count of a run overflows
        s.updates++;
        s.sample += INT32_MAX;
    });
}
Seeds seeds_state() {
    Seeds seeds;
    RunState s;
    s.step = 9; s.updates = 8; s.sample = 36;
    for (const Program program : {GPT2_FLAG, BERT_FLAG}) {
        const std::string first(1, program == BERT_FLAG);
        s.guard.judge(4.5, 1.25);
        s.guard.judge(NAN, 1);
        Json bare = s.to_json(Options(program));
        seeds.push_back(first + json_text(bare));
        bare["options"] = Json::object();
        seeds.push_back(first + json_text(bare));
    }
    for (int i = 0; i < 130; i++) { s.guard.judge(i % 7, 1); }
    Json full = s.to_json(Options(GPT2_FLAG));
    full["options"] = Json::object();
    seeds.push_back(zero + json_text(full));
    return seeds;
}

bool fuzz_log(const std::string& bytes) {
    Input in(bytes);
    const bool json = in.byte() % 2;
    const auto step_of = json ? json_log_step : main_log_step;
    const int64_t step = in.byte() % 8;
    const std::string text = in.rest(), path = fuzz_directory().path + "/log";
    fuzz_directory().write("log", text);
    return accepts([&] {
        const bool changed = cut_log(path, step, step_of);
        const std::string kept = read_file(path);
        must(changed == (kept != text) && !cut_log(path, step, step_of), "a log is cut once");
        size_t at = 0;
        for (const std::string& line : lines_of(kept)) {
            must(step_of(line) == -1 || (step_of(line) >= 0 && step_of(line) < step), "only lines of earlier steps");
            at = text.find(line + "\n", at);
            must(at != std::string::npos, "lines in their order");
            at += line.size() + 1;
        }
        must(kept.empty() || kept.back() == '\n', "whole lines");
        if (!json) { return; }
        for (const std::string& line : lines_of(kept)) {
            const Json j = parse_json(line, "line");
            must(!j.contains("step") || !j["step"].is_number_integer() || j["step"] < step, "an earlier step");
        }
    });
}
Seeds seeds_log() {
    return {std::string("\0\3", 2) + "hello\ns:1 tel:4.1234\ns:2 trl:4.2345 lr:0.000300 norm:1.23\ns:3 trl:4.1\ns:4 to",
            "\1\3{\"kind\":\"train\",\"step\":2,\"loss\":1.5}\n{\"kind\":\"val\",\"step\":3}\n"
            "{\"kind\":\"eval\"}\n{\"ki"};
}

// A prompt of ids
bool fuzz_prompt(const std::string& bytes) {
    Input in(bytes);
    const int V = 1 + (int)(in.number() % INT32_MAX);
    const std::string text = in.rest();
    return accepts([&] {
        const std::vector<int> ids = prompt_ids(text, V);
        must(!ids.empty(), "a prompt has a token");
        for (const int id : ids) { must(id >= 0 && id < V, "ids are in the vocabulary"); }
    });
}
Seeds seeds_prompt() {
    return {int_bytes({50256}) + "15496 995", int_bytes({50256}), int_bytes({255}) + "text",
            int_bytes({9}) + " 0, 9,3 "};
}

bool fuzz_tokenizers(const std::string& bytes) {
    return fuzz_tokenizer((const uint8_t*)bytes.data(), bytes.size()) == 0;
}

// ----------------------------------------------------------------------------------------------------------
// the program

const struct Target {
    const char* name;
    bool (*run)(const std::string&);                // whether the input was accepted
    Seeds (*seeds)();
} targets[] = {
    {"flags", fuzz_flags, seeds_flags}, {"position", fuzz_position, seeds_position}, {"json", fuzz_json, seeds_json},
    {"config", fuzz_config, seeds_config}, {"safetensors", fuzz_safetensors, seeds_safetensors},
    {"bin", fuzz_bin, seeds_bin},
    {"shard", fuzz_shard, seeds_shard}, {"documents", fuzz_documents, seeds_documents},
    {"hellaswag", fuzz_hellaswag, seeds_hellaswag}, {"manifest", fuzz_manifest, seeds_manifest},
    {"outdir", fuzz_outdir, seeds_outdir},
    {"state", fuzz_state, seeds_state}, {"log", fuzz_log, seeds_log},
    {"prompt", fuzz_prompt, seeds_prompt}, {"tokenizer", fuzz_tokenizers, tokenizer_seeds}};
const Target* target = nullptr;

// What parsers have failed on, or might. They may refuse it.
Seeds hard_inputs(const std::string& name) {
    const std::string position = std::string("\0\x3F\0\0\0none\x01", 10);
    const std::string deep(JSON_MAX_DEPTH + 1, '['), closed(JSON_MAX_DEPTH + 1, ']');
    const std::string gap = "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                            "\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]}}";
    const std::multimap<std::string, std::string> inputs = {
        {"config", zero + "[]"}, {"config", zero + "17"}, {"outdir", "step_000000012"}, {"outdir", "step_2147483647"},
        {"outdir", "step_2147483648"},
        {"flags", zero + "--train_files\ncaf\xE9.txt"}, {"flags", zero + "--model\n4294967298,2,8"},
        {"flags", zero + "--steps\n9223372036854775807"},
        {"flags", zero + "--lr\n1e999"}, {"flags", zero + "--B\n4294967297"}, {"flags", zero + "--B\n8\n-b\n9"},
        {"position", position + "rope:theta=-1"},
        {"position", position + "rope:theta=nan"}, {"position", position + "t5_clip:K=1e999"},
        {"position", position + "t5_clip:K=5,K=6"},
        {"json", "{\"a\":1,\"b\":2,\"a\":3}"}, {"json", "{\"a\":18446744073709551615}"}, {"json", deep + "1" + closed},
        {"bin", zero + int_bytes({20240326, 3, 4, 9, 1, 1, 2, 8})},
        {"safetensors", zero + fold_safetensors(gap, "xy")}, {"safetensors", zero + fold_safetensors(gap, "xyz")},
        {"documents", std::string("\0\0", 2) + int_bytes({SHARD_MAGIC, 1, 0, 260, 258, 1, 2}) +
         word_bytes({257, 1, 258, 257, 5})},
        {"log", "\1\3{\"step\":18446744073709551615}\n"}, {"prompt", int_bytes({4}) + "5"}};
    Seeds seeds;
    for (auto at = inputs.lower_bound(name); at != inputs.upper_bound(name); ++at) { seeds.push_back(at->second); }
    return seeds;
}
// A state in which one number is replaced by one at the end of its range
Seeds extreme_states() {
    Seeds seeds;
    const std::string state = seeds_state()[1];
    for (const char* key : {"step", "updates", "sample", "non_finite", "spikes", "level_shifts", "bad_in_a_row",
                            "spikes_in_a_row", "next"}) {
        for (const char* value : {"9223372036854775807", "2147483647", "18446744073709551615", "-1"}) {
            std::string s = state;
            const std::string name = std::string("\"") + key + "\":";
            const size_t at = s.find(name) + name.size();
            seeds.push_back(s.replace(at, s.find_first_of(",}", at) - at, value));
        }
    }
    return seeds;
}

// Every seed must be accepted: from refused ones libFuzzer would rarely get past a parser's first check.
void write_seeds(const std::string& path) {
    for (const Target& t : targets) {
        const std::string dir = path + "/" + t.name;
        io_mkdirs(dir);
        Seeds seeds = t.seeds();
        const size_t good = seeds.size();
        for (const std::string& s : hard_inputs(t.name)) { seeds.push_back(s); }
        if (strcmp(t.name, "state") == 0) { for (const std::string& s : extreme_states()) { seeds.push_back(s); } }
        fuzz_directory().clear();
        for (size_t i = 0; i < seeds.size(); i++) {
            const std::string file = dir + "/" + std::to_string(i);
            write_text(file, seeds[i]);
            if (i < good) { must(t.run(seeds[i]), (file + ": the parser refuses this seed").c_str()); }
        }
    }
}

} // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
    const std::string wanted = "--target=";
    for (int i = 1; i < *argc; i++) {
        const std::string arg = (*argv)[i];
        if (arg == "--seeds" && i + 1 < *argc) {
            try { write_seeds((*argv)[i + 1]); } catch (const Error& e) { fprintf(stderr, "%s\n", e.what()); exit(1); }
            exit(0);
        }
        for (const Target& t : targets) {
            if (arg == "--targets") { printf("%s\n", t.name); }
            if (arg == wanted + t.name) { target = &t; }
        }
        if (arg == "--targets") { exit(0); }
    }
    if (target == nullptr) {
        fprintf(stderr, "expected --target=NAME, with one of the names that --targets prints\n");
        exit(2);
    }
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    target->run(std::string((const char*)data, size));
    return 0;
}
