// engine/flags.h -- the trainers' flags, in one table. From its rows follow the fields of Options, the parser, --help,
// the copy in a checkpoint that --resume compares, the flags' lines of the banner.
//
// Parsing is strict, as an ignored flag that was mistyped costs a run: names and numbers must match completely, ranges
// are checked, and no flag may come twice. llm.c's letters are aliases if they mean the same, otherwise refused.
#pragma once

#include "../base/common.h"
#include "json.h"

// SAME: the flag decides what is computed, so a resumed run must keep its value, unless --allow_change names it. FREE:
// it decides only speed, output, or the work after training.
enum OnResume { FREE, SAME };

// Which trainers have a flag; the other one refuses it.
enum Program { GPT2_FLAG = 1, BERT_FLAG = 2, BOTH = 3 };

constexpr int MOST_WINDOW = 1 << 30;

// X(type, name, alias, default, range, on resume, help); a bool takes 0 or 1, or no value if it is a switch.
// Validation and samples are rare by default: less than 5 % of the time of a pass over tiny Shakespeare.
#define OPTIONS(X, GROUP) \
    GROUP("Data", BOTH) \
    X(Text, train_files, "-i", "data/tinyshakespeare/tiny_shakespeare_train.bin", any(), SAME, \
      "training shards: a file or a quoted glob; .txt files are read as bytes") \
    X(Text, val_files, "-j", "data/tinyshakespeare/tiny_shakespeare_val.bin", any(), FREE, \
      "validation shards: a file or a quoted glob, as for --train_files") \
    X(Text, tokenizer, "", "", any(), FREE, \
      "tokenizer.json, vocab.json or vocab.txt, or its directory: prints tokens as text; checkpoints get a copy") \
    GROUP("Model", BOTH) \
    X(Text, model, "", "small", any(), SAME, "a size by name, or L,NH,C: layers, heads, channels") \
    X(Text, pos, "--layers", "cable", any(), SAME, \
      "positional encoding: NAME[:key=value,...]; A+B: both in every layer; A,A,B: the layers take turns") \
    X(Text, load, "-e", "", any(), FREE, \
      "initial weights: a checkpoint, a safetensors directory or llm.c's .bin; -e d12 means --model d12") \
    X(Text, rope_scaling, "", "none", one_of("none|pi[:s]|ntk[:s]|yarn[:s]|longrope[:FILE]"), SAME, \
      "how rope is stretched, also in new checkpoints; s = new length / old length, by default from --T; FILE: JSON " \
      "with LongRoPE's factors") \
    X(double, rope_theta, "", 0, at_least(0), FREE, \
      "rope's base, also in new checkpoints; 0 = the checkpoint's, or the default") \
    X(Ints, window, "", {0}, between(0, MOST_WINDOW), SAME, \
      "a query sees its own key and the W - 1 keys before it (BERT: and after it); 0 = all keys; W,W,0: the layers " \
      "take turns. Checkpoints keep W; an evaluation may use another W") \
    X(int, sinks, "", 0, between(0, MOST_WINDOW), SAME, \
      "with --window: every query also sees the first S tokens of its sequence") \
    GROUP("Batches and steps", BOTH) \
    X(int, B, "-b", 4, minus_one_or(1), FREE, \
      "sequences in a micro-batch; -1 = the most that divide --total_batch and fit in memory") \
    X(int, T, "-t", 1024, at_least(1), SAME, "tokens in a sequence") \
    X(int64_t, total_batch, "-d", -1, minus_one_or(1), SAME, \
      "tokens in an update: a multiple of B x T x the number of ranks; -1 = exactly B x T x ranks") \
    X(int64_t, steps, "-x", -1, minus_one_or(0), SAME, "number of updates; -1 = one pass over the data") \
    X(bool, overfit, "-a", false, any(), SAME, "1 = train on one batch over and over") \
    X(int64_t, seed, "", 42, at_least(0), SAME, "seed of the initial weights, the order of samples and generation") \
    GROUP("Learning rate and AdamW", BOTH) \
    X(double, lr, "-l", 3e-4, between(0, 1e30), SAME, "peak learning rate") \
    X(Text, schedule, "-k", "cosine", one_of("cosine|linear|constant|wsd"), SAME, "course of the learning rate") \
    X(int64_t, warmup, "-u", 0, at_least(0), SAME, "steps of linear warm-up") \
    X(double, final_lr, "-q", 1.0, between(0, 1), SAME, \
      "learning rate at the end, as a fraction of the peak; 1 = it stays constant") \
    X(double, weight_decay, "-c", 0.0, at_least(0), SAME, "weight decay of matrices and embeddings") \
    X(double, beta1, "", 0.9, between(0, 0.999999), SAME, "AdamW's decay of the first moment") \
    X(double, beta2, "", 0.95, between(0, 0.999999), SAME, "AdamW's decay of the second moment") \
    X(double, eps, "", 1e-8, at_least(1e-30), SAME, "AdamW's epsilon") \
    X(double, clip, "", 1.0, at_least(0), SAME, "largest norm of the gradient; 0 = no clipping") \
    X(double, skip_loss_z, "-sl", 0.0, at_least(0), SAME, "skip updates whose loss has a higher z-score; 0 = off") \
    X(double, skip_norm_z, "-sg", 0.0, at_least(0), SAME, \
      "skip updates whose gradient norm has a higher z-score; 0 = off") \
    GROUP("Speed and memory", BOTH) \
    X(int, recompute, "-r", -1, between(-1, 2), FREE, \
      "recompute in the backward: 0 nothing, 1 GELU, 2 GELU and layernorm, -1 nothing if that fits, else GELU") \
    X(int, threads, "", 0, at_least(0), FREE, "CPU threads; 0 = all that the machine and the control group allow") \
    X(Text, tile_skip, "", "default", one_of("exact|default|off"), FREE, \
      "cable and alibi, for T >= 2048 and in generation (BERT: GPU only): skip tiles that weigh less than 2^-24 of a " \
      "row; exact = only weights of 0, which changes no bit") \
    X(int, ranks, "--gpus", 1, at_least(1), FREE, \
      "start this many processes on this machine (GPU build: one per GPU), which share the work; all end if one " \
      "fails. With --check: start none, and print what each would need and send") \
    X(int, collective_timeout, "", 600, at_least(1), FREE, \
      "several ranks: seconds a rank waits for another before the run ends") \
    X(int, profile, "", 0, at_least(0), FREE, \
      "print the time of each kernel of step N, which gets a little slower; 0 = off") \
    GROUP("Logs and checkpoints", BOTH) \
    X(Text, out, "-o", "", any(), FREE, "directory of logs and checkpoints; without it nothing is written") \
    X(Text, config, "", "", any(), FREE, \
      "JSON with flags, {\"flags\": {\"lr\": 1e-3, ...}}, as in scripts/paper.json; the command line's override it") \
    X(int, resume, "-y", 0, between(0, 2), FREE, \
      "1 = continue from the newest good checkpoint in --out, if any; 2 = there must be one") \
    X(int, checkpoint_every, "-n", 0, at_least(0), FREE, "save every N steps; 0 = never") \
    X(int, keep, "-nk", 0, at_least(0), FREE, "keep the last N checkpoints; 0 = all") \
    X(Names, allow_change, "", {}, any(), FREE, "flags that may differ from the resumed run's") \
    GROUP("Validation while training", BOTH) \
    X(int, val_every, "-v", 250, at_least(0), FREE, "validate every N steps and at the end; 0 = never") \
    X(int, val_batches, "-m", 5, minus_one_or(1), FREE, "validation batches of B*T tokens; -1 = the whole split") \
    GROUP("Samples while training", GPT2_FLAG) \
    X(int, sample_every, "-s", 250, at_least(0), FREE, "print a sample every N steps and at the end; 0 = never") \
    GROUP("Evaluation, instead of training", BOTH) \
    X(Ints, eval_lengths, "", {}, at_least(1), FREE, "perplexity at these lengths") \
    X(int64_t, eval_tokens, "", 0, at_least(0), FREE, "evaluate at most this many tokens; 0 = all") \
    X(int, stride, "", 0, at_least(0), FREE, \
      "evaluate windows S apart and score the last S tokens of each; 0 = they do not overlap") \
    X(bool, curve, "", false, a_switch(), FREE, "also the loss at each position") \
    X(Text, dump_bias, "", "", any(), FREE, \
      "LAYER,parts: write the parts of attention's weights into --out, for scripts/heads.py. In train_gpt2 also " \
      "LAYER,HEAD[,TEXT]: a head's bias matrix. LAYER may be all, HEAD all or mean; TEXT is bytes or token ids; " \
      "without TEXT: each window of --eval_lengths, or the first --T tokens of --val_files") \
    GROUP("Causal language model", GPT2_FLAG) \
    X(bool, token_losses, "", false, a_switch(), FREE, \
      "with --eval_lengths: write the loss of each token into --out") \
    X(bool, document_mask, "", false, any(), SAME, \
      "1 = a query sees only its own document, from the end-of-text token that begins it") \
    X(Text, vocab_softmax, "", "used", one_of("used|padded"), SAME, \
      "the softmax covers the vocabulary, or also the rows that pad it to a multiple of 128") \
    X(Text, hellaswag, "", "", any(), FREE, \
      "multiple-choice file of data/hellaswag.py: scored at each validation, or after --load") \
    X(Text, tasks, "", "", any(), FREE, \
      "test files of data/tasks.py, a quoted glob: share of the examples whose whole answer is right, per file") \
    X(Text, generate, "", "", any(), FREE, \
      "continue this text of bytes, or these token ids (scripts/text.py makes them); may be empty; @FILE: a text or " \
      "shard in a file; @@TEXT: a text that begins with @") \
    X(bool, stop_at_eot, "", true, any(), FREE, \
      "1 = --generate stops at the end-of-text token; 0 = it continues to --tokens") \
    X(int64_t, tokens, "-g", 64, at_least(1), FREE, "tokens to generate: at most by --generate, exactly in a sample") \
    X(double, temperature, "", 1.0, at_least(0), FREE, "temperature of sampling; 0 = always the likeliest token") \
    X(int, top_k, "", 0, at_least(0), FREE, "sample among the K likeliest tokens; 0 = all") \
    X(double, top_p, "", 1.0, between(1e-6, 1), FREE, \
      "sample among the likeliest tokens whose probabilities sum to this") \
    GROUP("Masked language model", BERT_FLAG) \
    X(double, mask_share, "", 0.15, between(0.001, 0.999), SAME, "share of the tokens that are masked and predicted") \
    X(Text, predict, "", "", any(), FREE, \
      "print the likeliest tokens for each [MASK] in this text of bytes, these token ids (scripts/text.py) or @SHARD") \
    GROUP("Contrastive fine-tuning", BERT_FLAG) \
    X(Text, pairs, "", "", any(), SAME, \
      "train on groups instead of masked tokens: shards, or for a model of bytes .txt lines of QUERY tab PASSAGE " \
      "[tab NEGATIVE]") \
    X(double, tau, "", 0.05, at_least(1e-6), SAME, "temperature of the cosine similarities") \
    X(Text, pooling, "", "mean", one_of("mean|cls"), SAME, "embedding of a text: the mean of its tokens, or [CLS]") \
    X(Text, distill, "", "", any(), SAME, \
      "train on --pairs of single texts: towards their embeddings, which --encode has written into this directory") \
    X(Text, encode, "", "", any(), FREE, \
      "write the embeddings of these documents into --out, for scripts/retrieve.py: shards, or for a model of bytes " \
      ".txt with a document per line; a document is cut to the first of --eval_lengths, or to --T tokens") \
    X(int, encode_piece, "", 0, at_least(0), FREE, \
      "write an embedding for each N tokens of a document, after one forward of the whole; 0: one for the whole") \
    GROUP("Looking", BOTH) \
    X(bool, check, "", false, a_switch(), FREE, "check flags, data and memory, print the tensors, and stop") \
    X(bool, help, "-h", false, a_switch(), FREE, "print this, and the commit and precision of this program, and stop")

// llm.c's flags that have no counterpart, and why
constexpr const char* STARTED = "--gpus N or a launcher starts the processes";
const char* const refused_flags[][2] = {
    {"-pn", STARTED}, {"-pr", STARTED}, {"-pg", STARTED}, {"-pi", STARTED}, {"-ps", STARTED}, {"-pf", STARTED},
    {"-nm", "copy the checkpoints to keep; --keep N keeps the last ones"},
};

// llm.c's flags that have no effect here: the accepted values, and the notice
struct NoOpFlag { const char* name; int lowest, highest; const char* holds; };
const NoOpFlag no_op_flags[] = {
    {"-h", 0, 1, "HellaSwag is scored if its file is given, --hellaswag FILE"},     // -h alone is --help
    {"-w", 1, 1, "master weights are always float32"},
    {"-f", 0, 1, "the build fixes the precision of matmuls"},
    {"-z", 0, 1, "several ranks always share the optimizer state (ZeRO-1), which changes no bit"},
    {"-ge", -1, 2, "there is no choice of GELU fusion"},
    {"-lg", -1, INT_MAX, "no device statistics are printed"},
};

// Other programs' names of flags, and the flag here
const char* const other_names[][2] = {
    {"--learning_rate", "--lr"}, {"--epochs", "--steps -1, one pass over the data"}, {"--batch_size", "--B"},
    {"--block_size", "--T"}, {"--seq_length", "--T"}, {"--max_steps", "--steps"},
};

struct Options {
#define GROUP(title, programs)
#define X(type, name, alias, value, range, on_resume, help) type name = value;
    OPTIONS(X, GROUP)
#undef X
#undef GROUP
    Names given;                        // the flags of the command line, by long name
    Names notes;                        // for the start banner
    Program program = GPT2_FLAG;

    Options(Program program = GPT2_FLAG) : program(program) { if (program == BERT_FLAG) { T = 512; } }

    bool is_given(const std::string& name) const { return is_in(given, name); }
    bool may_change(const std::string& name) const { return is_in(allow_change, name); }
};

struct OptionRow {
    const char *group, *name, *alias;
    Range range;
    OnResume on_resume;
    const char* help;
    int programs;
    bool is_list = false;               // of numbers
};

// Calls f(row, field) for every flag; O is Options or const Options.
template <class O, class F> void for_each_option(O& o, F f) {
    const char* group = "";
    int of = BOTH;
#define GROUP(title, programs) group = title; of = programs;
#define X(type, name, alias, value, range, on_resume, help) \
    f(OptionRow{group, #name, alias, range, on_resume, help, of, std::is_same_v<type, Ints>}, o.name);
    OPTIONS(X, GROUP)
#undef X
#undef GROUP
}

inline std::vector<OptionRow> option_rows(int programs = BOTH) {
    std::vector<OptionRow> rows;
    const Options defaults;
    for_each_option(defaults, [&](const OptionRow& row, const auto&) {
        if (row.programs & programs) { rows.push_back(row); }
    });
    return rows;
}

// ----------------------------------------------------------------------------------------------------------
// the command line

// The row of a flag as typed, --name or alias; its name is "" if there is no such flag.
inline OptionRow find_option(const std::string& flag) {
    for (const OptionRow& row : option_rows()) {
        if (flag == std::string("--") + row.name || (row.alias[0] != '\0' && flag == row.alias)) { return row; }
    }
    return {"", "", "", any(), FREE, "", BOTH};
}
inline bool is_flag(const std::string& text) { return find_option(text).name[0] != '\0'; }

[[noreturn]] inline void die_unknown_flag(const std::string& flag) {
    for (auto& refused : refused_flags) {
        check(flag != refused[0], "%s: this flag of llm.c has no counterpart here: %s", refused[0], refused[1]);
    }
    check(flag.substr(0, flag.find('=')) != "--heads", "--heads: a script says where each head looks: "
          "scripts/heads.py CHECKPOINT --val_files FILE --eval_lengths 256,1024 --out DIRECTORY");
    const std::string shown = "'" + printable(flag) + "'";
    check(!flag.empty() && flag[0] == '-', "%s: expected a flag such as --lr; --help lists them", shown.c_str());
    for (auto& other : other_names) {
        check(edit_distance(flag.substr(0, std::min(flag.find('='), (size_t)40)), other[0]) > 1,
              "%s: there is no such flag; did you mean %s? --help lists them", shown.c_str(), other[1]);
    }
    Names flags;
    for (const OptionRow& row : option_rows()) { flags.push_back(std::string("--") + row.name); }
    die(EXIT_BAD_INPUT, "%s: there is no such flag; %s--help lists them", shown.c_str(),
        did_you_mean(flag, flags).c_str());
}

// Gives the flag `name` its value; messages call it `shown`.
inline void set_option(Options& o, const std::string& name, const std::string& shown, const std::string& text) {
    for_each_option(o, [&](const OptionRow& row, auto& field) {
        if (name != row.name) { return; }
        check(parse_value(text, row.range, field), "%s: expected %s, got '%s' (%s)", shown.c_str(),
              option_wanted(row.range, field).c_str(), printable(text).c_str(), row.help);
    });
}

// llm.c's -e takes a file or a size: d12, gpt2:d12
inline bool is_model_descriptor(const std::string& s) {
    const size_t d = s.compare(0, 5, "gpt2:") == 0 ? 5 : 0;
    return s.size() > d + 1 && s[d] == 'd' && s.find_first_not_of("0123456789", d + 1) == std::string::npos;
}

// Accepts a flag of no_op_flags with its value (null: none); false for any other flag, and for -h without 0 or 1.
inline bool take_no_op(Options& o, const std::string& flag, const char* value) {
    for (const NoOpFlag& f : no_op_flags) {
        if (flag != f.name) { continue; }
        int n = 0;
        const std::string text = value == nullptr ? "" : value;
        const bool good = parse_value(text, between(f.lowest, f.highest), n);
        if (!good && is_flag(flag)) { return false; }
        check(!o.is_given(flag), "%s: is given twice", f.name);
        o.given.push_back(flag);
        check(good, "%s: expected %s, got '%s' (%s)", f.name,
              option_wanted(between(f.lowest, f.highest), n).c_str(), printable(text).c_str(), f.holds);
        o.notes.push_back(strprintf("%s %d changes nothing: %s", f.name, n, f.holds));
        return true;
    }
    return false;
}

// Every flag and its value, for state.json
inline Json options_json(const Options& o) {
    Json j = Json::object();
    for_each_option(o, [&](const OptionRow& row, const auto& value) {
        if (row.programs & o.program) { j[row.name] = value; }
    });
    return j;
}

// A flag's value in JSON as it would be typed
inline std::string json_words(const Json& value) {
    if (value.is_string()) { return value.get<std::string>(); }
    if (value.is_boolean()) { return option_text(value.get<bool>()); }
    if (!value.is_array()) { return json_text(value); }
    std::string s;
    for (const Json& one : value) { s += (s.empty() ? "" : ",") + json_words(one); }
    return s;
}

// j: the contents of --config's file, {"flags": {"lr": 0.001, ...}}, over which the command line wins. An earlier run's
// record in log.jsonl has other keys, too; a note names its flags that this trainer does not have.
inline void take_config(Options& o, const Json& j, const std::string& path) {
    const Json defaults = options_json(Options(o.program));
    const Names known = {"kind", "commit", "time", "encoding", "flags"};
    Names names;
    for (const OptionRow& row : option_rows(o.program)) { names.push_back(row.name); }
    check(j.is_object() && j.contains("flags") && j["flags"].is_object(), "%s: expected an object with \"flags\"",
          path.c_str());
    for (const auto& item : j.items()) {
        check(is_in(known, item.key()), "%s: \"%s\": expected one of kind, commit, time, encoding, flags", path.c_str(),
              item.key().c_str());
    }
    std::string unknown;
    for (const auto& item : j["flags"].items()) {
        const std::string& name = item.key();
        const bool known_flag = defaults.contains(name) && name != "config";
        if (!known_flag && j.contains("kind")) {
            unknown += (unknown.empty() ? "" : ", ") + printable(name + " " + json_words(item.value()));
            continue;
        }
        check(known_flag, "%s: \"%s\" is not a flag of this trainer; %s--help lists them", path.c_str(), name.c_str(),
              did_you_mean(name, names).c_str());
        const std::string value = json_words(item.value());
        if (o.is_given(name) || value == json_words(defaults[name])) { continue; }
        set_option(o, name, path + ": " + name, value);
        o.given.push_back(name);
    }
    if (!unknown.empty()) { o.notes.push_back("--config: this trainer has no flags " + unknown); }
}

// The command line as Options, or an Error that names the flag. Stops at --help, even if the line is wrong after it.
inline Options parse_options(int argc, const char* const* argv, Program program = GPT2_FLAG) {
    const Phase reading("reading the flags");
    Options o(program);
    const auto flag_of = [](const std::string& word) {              // "--lr" of "--lr=1e-3"
        const std::string before = word.substr(0, word.find('='));
        return is_flag(before) ? before : word;
    };
    for (int i = 1; i < argc; i++) {
        const std::string word = argv[i], flag = flag_of(word);
        if (program == GPT2_FLAG && take_no_op(o, flag, i + 1 < argc ? argv[i + 1] : nullptr)) { i++; continue; }
        if (!is_flag(flag)) { die_unknown_flag(flag); }
        const OptionRow row = find_option(flag);
        check(row.programs & program, "%s: this flag belongs to the other trainer (%s); --help lists this one's",
              flag.c_str(), row.group);
        const bool joined = flag != word;
        std::string name = row.name, value = joined ? word.substr(flag.size() + 1) : "1";
        check(row.range.takes_value || !joined, "%s: expected no value, got '%s'", flag.c_str(), value.c_str());
        if (row.range.takes_value && !joined) {
            check(i + 1 < argc, "%s: the value after it is missing", flag.c_str());
            check(!is_flag(flag_of(argv[i + 1])), "%s: the value between it and %s is missing", flag.c_str(),
                  argv[i + 1]);
            value = argv[++i];
        }
        while (row.is_list && i + 1 < argc && isdigit((unsigned char)argv[i + 1][0])) {
            value += std::string(",") + argv[++i];
        }
        if (row.is_list) { std::replace(value.begin(), value.end(), ' ', ','); }
        if (name == "load" && is_model_descriptor(value)) { name = "model"; }
        check(!o.is_given(name), "%s: --%s is given twice", flag.c_str(), name.c_str());
        o.given.push_back(name);
        set_option(o, name, flag == "--" + name ? flag : flag + " (--" + name + ")", value);
        if (o.help) { return o; }
    }
    if (!o.config.empty()) { take_config(o, read_json(o.config), o.config); }
    return o;
}

// ----------------------------------------------------------------------------------------------------------
// --help and the banner

// The text of --help. description: the program's purpose, sizes and examples
inline std::string help_text(const std::string& name, const std::string& description, Program program = GPT2_FLAG) {
    std::string s = "usage: " + name + " [--flag value]...\n" + description;
    std::string group;
    const Options defaults(program);
    for_each_option(defaults, [&](const OptionRow& row, const auto& value) {
        if (!(row.programs & program)) { return; }
        if (group != row.group) { s += strprintf("\n%s\n", row.group); }
        group = row.group;
        std::string help = row.help;
        if (row.range.takes_value) {
            const std::string text = option_text(value);
            help += " [" + (text.empty() ? "absent" : text) + "; " + option_wanted(row.range, value) + "]";
        }
        const std::string flag = strprintf("  --%-18s %-4s ", row.name, row.alias);
        s += flag + wrapped(words_of(help), flag.size(), flag.size()) + "\n";
    });
    return s;
}

// The flags that differ from their defaults, as they would be typed: {"--lr 0.001", "--out run/cable"}
inline Names changed_flags(const Options& o) {
    Names flags;
    const Json defaults = options_json(Options(o.program));
    for_each_option(o, [&](const OptionRow& row, const auto& value) {
        if (!(row.programs & o.program) || Json(value) == defaults.at(row.name)) { return; }
        const std::string text = printable(option_text(value), 60);
        const char* quote = text.empty() || text.find_first_of(" *?[;|&") != std::string::npos ? "'" : "";
        flags.push_back(std::string("--") + row.name + (row.range.takes_value ? " " + (quote + text + quote) : ""));
    });
    return flags;
}

// A line of the start banner: "encoding          cable"
inline std::string banner_line(const char* label, const Names& pieces) {
    return strprintf("%-17s %s\n", label, wrapped(pieces, 18, 18, CONSOLE_COLUMNS).c_str());
}

// ----------------------------------------------------------------------------------------------------------
// the flags of a run that is resumed, which are in state.json

using Facts = std::vector<std::pair<std::string, std::string>>;     // keys and their values

// "lr 0.001, not 0.003": the first fact that differs; "": none. Both lists have the same keys in the same order.
inline std::string first_difference(const Facts& now, const Facts& was) {
    const auto value = [](const Facts& facts, size_t i) {
        return i < facts.size() && !facts[i].second.empty() ? printable(facts[i].second, 250) : "absent";
    };
    for (size_t i = 0; i < std::max(now.size(), was.size()); i++) {
        if (i < now.size() && i < was.size() && now[i].second == was[i].second) { continue; }
        return (i < now.size() ? now : was)[i].first + " " + value(now, i) + ", not " + value(was, i);
    }
    return "";
}

// Dies unless every SAME flag has its value in `saved`, the options_json of the run that wrote the checkpoint (if it is
// absent there, its default), or is named by --allow_change. Call this, and save options, after each -1 has been
// replaced by the number that it stands for: a total batch of B*T changes with B.
inline void check_resumed_options(const Options& now, const Json& saved, const std::string& what) {
    // through JSON text, as the saved flags: a path that is not UTF-8 then has U+FFFD in both
    const Json current = parse_json(json_text(options_json(now)), "flags");
    const Json defaults = options_json(Options(now.program));
    check(saved.is_object(), "%s: expected an object of flags", what.c_str());
    Facts is, was;
    for (const OptionRow& row : option_rows(now.program)) {
        if (row.on_resume == FREE || now.may_change(row.name)) { continue; }
        is.push_back({row.name, json_words(current.at(row.name))});
        was.push_back({row.name, json_words(saved.contains(row.name) ? saved.at(row.name) : defaults.at(row.name))});
    }
    const std::string difference = first_difference(is, was), flag = difference.substr(0, difference.find(' '));
    check(difference.empty(), "--%s as in %s: resuming needs the old value, or --allow_change %s", difference.c_str(),
          what.c_str(), flag.c_str());
}
