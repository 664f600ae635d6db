// run/flag_parser.h -- everything that follows from the table in flags.h: the fields of Options, the parser, --help,
// the banner, the copy in a checkpoint, and the comparison with that copy on resume.
//
// Parsing is strict, because ignoring a mistyped flag costs a run: names and numbers must match completely, ranges are
// checked, and no flag may come twice. llm.c's letters are aliases if they mean the same, and refused otherwise.
#pragma once

#include "../../base/common.h"
#include "../json.h"
#include "flags.h"

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

// Names that other programs give to flags of this one, and the flag
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
    Names given; // the flags of the command line, by long name
    Names notes; // the start banner's notices
    Program program = GPT2_FLAG;

    Options(Program program = GPT2_FLAG) : program(program) { if (program == BERT_FLAG) { T = 512; } }

    bool is_given(const std::string& name) const { return std::find(given.begin(), given.end(), name) != given.end(); }
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

// Accepts one of no_op_flags and its value (null: none); false if `flag` is not one of them, or -h without 0 or 1.
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

// Every flag and its value, for state.json.
inline Json options_json(const Options& o) {
    Json j = Json::object();
    for_each_option(o, [&](const OptionRow& row, const auto& value) {
        if (row.programs & o.program) { j[row.name] = value; }
    });
    return j;
}

inline Names keys_of(const Json& j) {
    Names keys;
    for (const auto& item : j.items()) { keys.push_back(item.key()); }
    return keys;
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

// j: the contents of --config's file, {"flags": {"lr": 0.001, ...}}; the command line wins over it. log.jsonl's config
// record of an earlier run has other keys, too, and perhaps flags that this trainer does not have: a note names them.
inline void take_config(Options& o, const Json& j, const std::string& path) {
    const Json defaults = options_json(Options(o.program));
    const Names known = {"kind", "commit", "time", "encoding", "flags"};
    check(j.is_object() && j.contains("flags") && j["flags"].is_object(), "%s: expected an object with \"flags\"",
          path.c_str());
    for (const auto& item : j.items()) {
        check(std::find(known.begin(), known.end(), item.key()) != known.end(), "%s: \"%s\": expected one of kind, "
              "commit, time, encoding, flags", path.c_str(), item.key().c_str());
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
              did_you_mean(name, keys_of(defaults)).c_str());
        const std::string value = json_words(item.value());
        if (o.is_given(name) || value == json_words(defaults[name])) { continue; }
        set_option(o, name, path + ": " + name, value);
        o.given.push_back(name);
    }
    if (!unknown.empty()) { o.notes.push_back("--config: this trainer has no flags " + unknown); }
}

// The command line as Options, or an Error that names the flag. Stops at --help, so that it works even if the rest of
// the line is wrong.
inline Options parse_options(int argc, const char* const* argv, Program program = GPT2_FLAG) {
    const Doing reading("reading the flags");
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
        std::string name = row.name, value = "1";
        const bool joined = flag != word;
        check(row.range.takes_value || !joined, "%s: expected no value, got '%s'", flag.c_str(),
              word.substr(flag.size() + 1).c_str());
        if (joined) {
            value = word.substr(flag.size() + 1);
        } else if (row.range.takes_value) {
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
// showing them

// The text of --help; `description` has the program's purpose, its sizes and examples.
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
inline std::string banner_line(const char* label, const std::string& text) {
    return banner_line(label, words_of(text));
}

// Whether --allow_change names the flag
inline bool may_change(const Options& o, const char* flag) {
    return std::find(o.allow_change.begin(), o.allow_change.end(), flag) != o.allow_change.end();
}

// Dies unless every flag marked SAME has the value in `saved`, the options_json of the run that wrote the checkpoint,
// or is named by --allow_change. A flag that the checkpoint does not know must have its default. Call this, and save
// options, after -1 has been replaced by the number that it stands for: a total batch of B*T changes with B.
inline void check_resumed_options(const Options& now, const Json& saved, const std::string& what) {
    // through JSON text, as the saved flags: a path that is not UTF-8 then has U+FFFD in both
    const Json current = parse_json(json_text(options_json(now)), "flags");
    const Json defaults = options_json(Options(now.program));
    check(saved.is_object(), "%s: expected an object of flags", what.c_str());
    for (const OptionRow& row : option_rows(now.program)) {
        if (row.on_resume == FREE || may_change(now, row.name)) { continue; }
        const Json& was = saved.contains(row.name) ? saved.at(row.name) : defaults.at(row.name);
        const Json& is = current.at(row.name);
        check(json_words(was) == json_words(is), "--%s %s: the run to be resumed had %s (%s); give that, or "
              "--allow_change %s", row.name, json_excerpt(is).c_str(), json_excerpt(was).c_str(), what.c_str(),
              row.name);
    }
}
