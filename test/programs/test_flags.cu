// test_flags.cu -- the flag table and the JSON helpers: what is taken, and that everything else is refused by name.
#include "test/catch.h"
#include "test/files.h"
#include "llmc/engine/flags.h"

namespace {
Options parse(std::vector<std::string> words, Program program = GPT2_FLAG) {
    words.insert(words.begin(), "the trainer");
    std::vector<const char*> argv;
    for (const std::string& w : words) { argv.push_back(w.c_str()); }
    return parse_options((int)argv.size(), argv.data(), program);
}
void refused(const std::vector<std::string>& words, const std::string& message) {
    INFO("flags: " << words[0].substr(0, 50) << " ...");
    CHECK(throws_with([&] { parse(words); }, message) == EXIT_BAD_INPUT);
}
// a text that the row's range admits and that is not its default
template <class V> std::string other_value(const OptionRow& row, const V& value) {
    for (const char* text : {"1", "0", "2", "7", "0.5", "linear", "padded", "pi:2", "exact", "cls", "copy"}) {
        V v;
        if (parse_value(text, row.range, v) && !(v == value)) { return text; }
    }
    return "?";
}
} // namespace

TEST_CASE("args: no flags gives llm.c's defaults", "[args]") {
    const Options o = parse({});
    CHECK(o.train_files == "data/tinyshakespeare/tiny_shakespeare_train.bin");    // what data/tinyshakespeare.py writes
    CHECK((o.B == 4 && o.T == 1024 && o.total_batch == -1 && o.steps == -1 && o.lr == 3e-4 && o.warmup == 0));
    CHECK((o.weight_decay == 0 && o.val_every == 250 && o.val_batches == 5 && o.sample_every == 250 && o.tokens == 64));
    CHECK((o.schedule == "cosine" && o.final_lr == 1.0 && o.recompute == -1 && o.out.empty() && !o.resume));
    CHECK((o.pos == "cable" && o.model == "small" && o.seed == 42 && o.clip == 1.0 && o.beta2 == 0.95));
    CHECK((o.checkpoint_every == 0 && !o.overfit && o.given.empty()));
}

TEST_CASE("args: every flag sets its own field, by its name and by its letter", "[args]") {
    for (const Program program : {GPT2_FLAG, BERT_FLAG}) {
    const Options defaults(program);
    for_each_option(defaults, [&](const OptionRow& row, const auto& value) {
        INFO("--" << row.name);
        const std::string name = row.name;
        if (name == "config") { return; }                   // sets other fields on purpose; has a test of its own
        if (!(row.programs & program)) {                    // the other trainer's
            const std::string flag = std::string("--") + row.name;
            CHECK(throws_with([&] { parse({flag, "1"}, program); }, flag) == EXIT_BAD_INPUT);
            CHECK(!options_json(defaults).contains(row.name));
            return;
        }
        const std::string text = other_value(row, value);
        for (const std::string& flag : {std::string("--") + row.name, std::string(row.alias)}) {
            if (flag.empty()) { continue; }
            const Options o = row.range.takes_value ? parse({flag, text}, program) : parse({flag}, program);
            const Json changed = options_json(o), before = options_json(defaults);
            CHECK(o.is_given(row.name));
            CHECK(o.given.size() == 1);
            CHECK(changed.size() == option_rows(program).size());
            for (const auto& item : changed.items()) {
                INFO("field " << item.key() << " = " << json_text(item.value()));
                CHECK((item.value() == before.at(item.key())) == (item.key() != row.name));
            }
        }
    });
    }
}

TEST_CASE("args: names and letters are unique", "[args]") {
    std::set<std::string> seen;
    for (const OptionRow& row : option_rows()) {
        INFO(row.name);
        CHECK(seen.insert(std::string("--") + row.name).second);
        if (row.alias[0]) { CHECK(seen.insert(row.alias).second); }
    }
    for (auto& refused_flag : refused_flags) { CHECK(seen.insert(refused_flag[0]).second); }
    for (const NoOpFlag& f : no_op_flags) { CHECK((seen.insert(f.name).second || is_flag(f.name))); }     // -h
}

TEST_CASE("args: values of every kind", "[args]") {
    const Options o = parse({"-i", "x.bin", "-e", "dir/", "-d", "8589934592", "--lr", "6e-4", "-y", "1", "--check",
                             "--eval_lengths", "64,128,16384", "--allow_change", "lr,steps", "-x", "0", "-m", "-1",
                             "--rope_scaling", "yarn:2.5"});
    CHECK(o.train_files == "x.bin");
    CHECK(o.load == "dir/");
    CHECK(o.total_batch == 8589934592);
    CHECK(o.lr == 6e-4);
    CHECK((o.resume && o.check && !o.curve));
    CHECK(o.eval_lengths == std::vector<int>{64, 128, 16384});
    CHECK(o.allow_change == std::vector<std::string>{"lr", "steps"});
    CHECK(o.rope_scaling == "yarn:2.5");
    CHECK(parse({"--rope_theta", "5e5"}).rope_theta == 500000);
    CHECK((o.steps == 0 && o.val_batches == -1));
    CHECK(parse({"--rope_scaling", "ntk"}).rope_scaling == "ntk");
    for (const char* good : {"longrope", "longrope:4", "longrope:a:b[].json"}) {
        CHECK(parse({"--rope_scaling", good}).rope_scaling == good);
    }
    CHECK(parse({"--generate", "-- \n-5"}).generate == "-- \n-5");
}

TEST_CASE("args: an empty prompt is told from none", "[args]") {
    CHECK(!parse({"--tokens", "5"}).is_given("generate"));
    CHECK(parse({"--generate", ""}).is_given("generate"));
}

TEST_CASE("args: -e with a size means --model", "[args]") {
    const Options o = parse({"-e", "d12"});
    CHECK((o.model == "d12" && o.load.empty() && o.is_given("model") && !o.is_given("load")));
    CHECK(parse({"-e", "gpt2:d24"}).model == "gpt2:d24");
    for (const char* path : {"d", "dir", "d12/x", "d12.bin", "gpt2:", "gpt2"}) {
        CHECK(parse({"-e", path}).load == path);
    }
    CHECK(parse({"-e", "x.bin", "--model", "tiny"}).model == "tiny");
    refused({"-e", "d12", "--model", "tiny"}, "--model: --model is given twice");
}

TEST_CASE("args: the paper's recipe, where the flag is not given", "[args]") {
    const Options o = parse({"--config", "scripts/paper.json"});
    CHECK((o.lr == 6e-4 && o.warmup == 750 && o.final_lr == 0.1 && o.weight_decay == 0.1 && o.total_batch == 524288));
    CHECK((o.clip == 1.0 && o.schedule == "cosine"));
    // a default that the command line repeats counts as given
    const Options mine = parse({"-l", "3e-4", "--config", "scripts/paper.json", "--total_batch", "-1", "-k", "wsd"});
    CHECK((mine.lr == 3e-4 && mine.total_batch == -1 && mine.schedule == "wsd" && mine.warmup == 750));
    // BERT's: Adam as printed, 0.9, 0.999 and no decay, all settable
    const Options b = parse({"--config", "scripts/paper_bert.json", "--beta1", "0.8"}, BERT_FLAG);
    CHECK((b.beta1 == 0.8 && b.beta2 == 0.999 && b.weight_decay == 0 && b.lr == 1e-4));
    const Options c = parse({"--config", "scripts/paper_bert.json", "--beta2", "0.98", "--weight_decay", "0.01"},
                            BERT_FLAG);
    CHECK((c.beta1 == 0.9 && c.beta2 == 0.98 && c.weight_decay == 0.01));
}

TEST_CASE("args: a file of flags, over which the command line wins", "[args]") {
    TempDir dir;
    const std::string path = dir / "flags.json";
    const auto with = [&](const std::string& text) {
        write_file(path, text);
        return parse({"--steps", "7", "--config", path, "--pos=rope"});
    };
    // any value that a run had is read back from the file
    const Options was = parse({"--lr=2e-3", "--eval_lengths", "64,128", "--curve", "--overfit", "1", "--pos", "alibi",
                               "--steps", "5", "--allow_change", "lr,B", "--clip", "0.1", "--total_batch", "4096"});
    Json flags = options_json(was);
    flags.erase("config");
    const Json record = {{"kind", "config"}, {"commit", "1a2b"}, {"time", "now"}, {"encoding", "a"}, {"flags", flags}};
    const Options o = with(json_text(record));
    Options wanted = was;
    wanted.steps = 7;
    wanted.pos = "rope";
    wanted.config = path;
    CHECK(options_json(o) == options_json(wanted));
    CHECK((o.is_given("lr") && o.is_given("curve") && !o.is_given("seed")));
    // the record of a run of an earlier version, or of the other trainer: a note names the flags that are not known
    const std::string old = "test/fixtures/old_train_gpt2/step_00000020/state.json";
    const Json old_flags = read_json(old).at("options");
    const Options found = with(json_text(Json{{"kind", "config"}, {"flags", old_flags}}));
    CHECK(found.out == old_flags.at("out"));
    REQUIRE(found.notes.size() == 1);
    CHECK(found.notes[0].find("--config: this trainer has no flags ") == 0);
    CHECK(found.notes[0].find("no_fallback 0, on_save_error warn") != std::string::npos);
    const Options other = with(R"({"kind": "config", "flags": {"pairs": "x", "a\nb": [1, true], "lr": 0.5}})");
    CHECK((other.lr == 0.5 && !other.is_given("pairs")));
    CHECK(other.notes == Names{"--config: this trainer has no flags pairs x, a\\x0ab 1,1"});
    // and nothing else
    struct { const char *text, *message; } bad[] = {
        {"{}", "expected an object with \"flags\""}, {"[1]", "expected an object"}, {"{", "flags.json"},
        {R"({"flags": {}, "flag": 1})", "\"flag\": expected one of kind, commit, time, encoding, flags"},
        {R"({"flags": {"lrr": 1}})", "\"lrr\" is not a flag of this trainer; did you mean lr? --help"},
        {R"({"flags": {"pairs": "x"}})", "\"pairs\" is not a flag of this trainer"},
        {R"({"flags": {"config": "x"}})", "\"config\" is not a flag"},
        {R"({"flags": {"lr": "fast"}})", "flags.json: lr: expected a number from 0"},
        {R"({"flags": {"lr": null}})", "lr: expected a number"}, {R"({"flags": {"B": [1, 2]}})", "B: expected an int"},
        {R"({"flags": {"B": {"a": 1}}})", "B: expected an int"}};
    for (const auto& b : bad) { CHECK(throws_with([&] { with(b.text); }, b.message) == EXIT_BAD_INPUT); }
    CHECK(throws_with([&] { parse({"--config", dir / "none"}); }, "none: cannot open") == EXIT_BAD_INPUT);
}

TEST_CASE("args: unknown flags are refused, with the nearest name", "[args]") {
    refused({"--lrr", "1"}, "'--lrr': there is no such flag; did you mean --lr?");
    refused({"--val-every", "5"}, "did you mean --val_every?");
    refused({"--zzzzzzzzz", "5"}, "there is no such flag; --help");
    refused({"--learning_rate", "1"}, "'--learning_rate': there is no such flag; did you mean --lr? --help lists them");
    refused({"--learning-rate=1"}, "did you mean --lr?");
    refused({"--epochs", "1"}, "did you mean --steps -1, one pass over the data?");
    refused({"--lrr=1"}, "'--lrr=1': there is no such flag; did you mean --lr?");
    refused({"--lr="}, "--lr: expected a number");
    refused({"--check=1"}, "--check: expected no value, got '1'");
    refused({"--T", "--lr=1"}, "--T: the value between it and --lr=1 is missing");
    refused({"train.bin"}, "expected a flag such as --lr");
    refused({""}, "expected a flag such as --lr");
    refused({"-"}, "no such flag");
    refused({"-b", "4", "5"}, "'5'");
    refused({"--B4"}, "no such flag");
    refused({std::string(10000, 'x')}, "(10000 bytes)");
    refused({"--" + std::string(10000, 'x'), "1"}, "(10002 bytes)");
    refused({"--a\x1b[2J"}, "--a\\x1b[2J");
}

TEST_CASE("args: llm.c's flags without a counterpart say so", "[args]") {
    for (auto& row : refused_flags) { refused({row[0], "1"}, row[1]); }
}

TEST_CASE("args: llm.c's flags without effect here are accepted with a notice", "[args]") {
    for (const NoOpFlag& f : no_op_flags) {
        if (is_flag(f.name)) { continue; }                              // -h
        INFO(f.name);
        for (int n : {f.lowest, f.highest}) {
            const std::string value = std::to_string(n);
            const Options o = parse({"-b", "8", f.name, value, "-t", "16"});
            CHECK((o.B == 8 && o.T == 16));
            CHECK(o.notes == Names{std::string(f.name) + " " + value + " changes nothing: " + f.holds});
            Options plain = parse({"-b", "8", "-t", "16"});
            CHECK(options_json(o) == options_json(plain));
            CHECK(parse({f.name, value}).notes == o.notes);         // the last word of all
        }
        refused({f.name, std::to_string(f.lowest - 1)}, std::string(f.name) + ": expected ");
        refused({f.name}, std::string(f.name) + ": expected ");
        refused({f.name, "x"}, f.holds);
        refused({f.name, "1", f.name, "1"}, "is given twice");
    }
    refused({"-w", "0"}, "master weights are always float32");
}

TEST_CASE("args: -h is --help, and llm.c's switch for HellaSwag where 0 or 1 follows", "[args]") {
    for (const std::vector<std::string>& words : {std::vector<std::string>{"-h"}, {"-h", "x"}, {"-h", "--lr", "1"}}) {
        CHECK(parse(words).help);
    }
    for (const char* value : {"0", "1"}) {
        const Options o = parse({"-h", value, "-b", "8"});
        CHECK((!o.help && o.B == 8 && o.notes.size() == 1));
    }
    refused({"-h", "1", "-h", "1"}, "is given twice");
    const char* const bert[] = {"train_bert", "-h"};
    CHECK(parse_options(2, bert, BERT_FLAG).help);
}

TEST_CASE("args: llm.c's own command line for GPT-2 124M", "[args]") {
    const Options o = parse({"-i", "dev/data/fineweb10B/fineweb_train_*.bin",
                             "-j", "dev/data/fineweb10B/fineweb_val_*.bin", "-o", "log_gpt2_124M", "-v", "250",
                             "-s", "20000", "-g", "144", "-h", "1", "-b", "64", "-t", "1024", "-d", "524288",
                             "-r", "0", "-z", "1", "-c", "0.1", "-l", "0.0006", "-q", "0.0", "-u", "700",
                             "-n", "5000", "-y", "1", "-e", "d12"});
    CHECK((o.model == "d12" && o.B == 64 && o.T == 1024 && o.total_batch == 524288 && o.recompute == 0));
    CHECK((o.weight_decay == 0.1 && o.lr == 0.0006 && o.final_lr == 0 && o.warmup == 700));
    CHECK((o.val_every == 250 && o.sample_every == 20000 && o.tokens == 144 && o.checkpoint_every == 5000));
    CHECK((o.resume && o.out == "log_gpt2_124M" && o.notes.size() == 2));
}

TEST_CASE("args: a flag given twice is refused, also under its other name", "[args]") {
    refused({"--lr", "1", "--lr", "1"}, "--lr: --lr is given twice");
    refused({"-b", "4", "--T", "8", "--B", "4"}, "--B: --B is given twice");
    refused({"--check", "--check"}, "given twice");
}

TEST_CASE("args: a missing value is seen at the end and between two flags", "[args]") {
    refused({"-b"}, "-b: the value after it is missing");
    refused({"--out", "--resume", "1"}, "the value between it and --resume is missing");
    refused({"--check", "1"}, "'1'"); // a switch takes none
}

TEST_CASE("args: malformed and out-of-range values name the flag, the value and what was expected", "[args]") {
    refused({"-b", "abc"}, "-b (--B): expected an int >= 1 or -1, got 'abc'");
    refused({"--B", "0"}, "--B: expected an int >= 1 or -1, got '0'");
    for (const char* bad : {"", " 5", "5 ", "12abc", "1e3", "0x10", "+5", "-", "--", "5-5", "1.0", "99999999999",
                            "2147483648", "4294967297", "99999999999999999999999", "-1", "nan"}) {
        refused({"-t", bad}, "expected an int >= 1");
    }
    for (const char* bad : {"", " 1", "1 ", "1x", "nan", "inf", "1e39", "infinity", "-inf", "1e999", "0x1p-3", "1e",
                            "e5", ".", "-0.1", "1,5"}) {
        refused({"--lr", bad}, "expected a number from 0 to 1e+30");
    }
    refused({"-q", "1.5"}, "-q (--final_lr): expected a number from 0 to 1, got '1.5'");
    refused({"--beta2", "1"}, "expected a number from 0 to 0.999999");
    refused({"--eps", "0"}, "--eps: expected a number >= 1e-30, got '0'");
    refused({"--top_p", "0"}, "--top_p: expected a number from 1e-06 to 1, got '0'");
    refused({"-r", "3"}, "from -1 to 2");
    refused({"-y", "3"}, "expected an int from 0 to 2");
    refused({"-y", "true"}, "expected an int from 0 to 2");
    refused({"--window", "x"}, "each from 0 to 1073741824");
    for (const char* bad : {"0", "-2", "9223372036854775808"}) { refused({"-d", bad}, "an integer >= 1 or -1"); }
    for (const char* bad : {"", "64,", ",64", "64,,128", "64,x", "64, 128", "0", "-1", "64;128"}) {
        refused({"--eval_lengths", bad}, "ints joined by commas or blanks, each >= 1");
    }
    for (const char* bad : {"", "cos", "cosine|linear", "cosinelinear", "|"}) {
        refused({"-k", bad}, "one of cosine|linear");
    }
    for (const char* bad : {"pi:", "pi:x", "pi:0", "pi:nan", "none:2", "yarn:2:3", "pi[:s]", "Pi", "longrope:",
                            "longropes"}) {
        refused({"--rope_scaling", bad}, "one of none|pi[:s]");
    }
    refused({"-b", std::string(10000, '9')}, "(10000 bytes)");
}

TEST_CASE("args: a list of numbers takes commas and blanks alike", "[args]") {
    const Ints lengths = {64, 128, 256};
    for (const std::vector<std::string>& words :
         {std::vector<std::string>{"64,128,256"}, {"64 128 256"}, {"64", "128", "256"}, {"64,128", "256"}}) {
        std::vector<std::string> line = {"--eval_lengths"};
        line.insert(line.end(), words.begin(), words.end());
        line.insert(line.end(), {"-b", "8"});
        const Options o = parse(line);
        CHECK((o.eval_lengths == lengths && o.B == 8));
    }
    CHECK(parse({"--eval_lengths=64", "128", "256"}).eval_lengths.size() == 3);
    refused({"--eval_lengths", "64", "x"}, "'x': expected a flag");
}

TEST_CASE("args: long texts are taken whole", "[args]") {
    const std::string prompt(10000, 'x');
    CHECK(parse({"--generate", prompt}).generate == prompt);
    CHECK(options_json(parse({"--generate", prompt})).at("generate") == prompt);
    CHECK(banner_line("flags", changed_flags(parse({"--generate", prompt}))).size() < 200);
}

TEST_CASE("args: --help stops the parser and lists every flag once", "[args]") {
    CHECK(parse({"--lr", "1", "--help", "--nonsense"}).help);
    const std::string text = help_text("train_gpt2", "Trains a GPT-2.");
    CHECK(text.find("Trains a GPT-2.") != std::string::npos);
    for (const OptionRow& row : option_rows()) {
        const std::string entry = strprintf("\n  --%-18s %-4s ", row.name, row.alias);
        INFO(entry);
        CHECK((text.find(entry) != std::string::npos) == ((row.programs & GPT2_FLAG) != 0));
        CHECK(text.find(entry) == text.rfind(entry));
        CHECK((help_text("train_bert", "", BERT_FLAG).find(entry) != std::string::npos) ==
              ((row.programs & BERT_FLAG) != 0));
    }
    CHECK(text.find("[1024; an int >= 1]") != std::string::npos);
    CHECK(text.find("[absent; text]") != std::string::npos);
}

TEST_CASE("args: --help keeps to 80 columns, the banner to 100", "[args]") {
    const auto longest = [](const std::string& text) {
        size_t most = 0;
        for (size_t at = 0, end; at < text.size(); at = end + 1) {
            end = std::min(text.find('\n', at), text.size());
            most = std::max(most, end - at);
        }
        return most;
    };
    for (Program program : {GPT2_FLAG, BERT_FLAG}) {
        const size_t columns = longest(help_text("train", "", program));
        CHECK((columns <= 80 && columns > 70));
    }
    const Options many =
        parse({"--lr", "0.5", "--out", std::string(60, 'o'), "--train_files", std::string(55, 'i'), "--T", "64"});
    const std::string banner = banner_line("flags", changed_flags(many));
    CHECK(longest(banner) <= 100);
    CHECK(std::count(banner.begin(), banner.end(), '\n') == 2);
    CHECK(wrapped(words_of("one two three"), 0, 2) == "one two three");
    const std::string x75(75, 'x'), x76(76, 'x');
    CHECK(wrapped({x75, "four", "five"}, 0, 2) == x75 + " four\n  five");       // 80 columns
    CHECK(wrapped({x76, "four", "five"}, 0, 2) == x76 + "\n  four five");       // would be 81
}

TEST_CASE("args: the banner shows the flags that differ from their defaults", "[args]") {
    CHECK(changed_flags(parse({})).empty());
    const Names flags =
        changed_flags(parse({"--lr", "0.5", "--B", "4", "--out", "a\nb", "--generate", "", "--check", "-i", "x *"}));
    CHECK(flags == Names{"--train_files 'x *'", "--lr 0.5", "--out a\\x0ab", "--check"});
    CHECK(banner_line("flags", flags) == "flags             --train_files 'x *' --lr 0.5 --out a\\x0ab --check\n");
}

TEST_CASE("args: a resumed run must have the flags that decide what is computed", "[args][P9]") {
    const Options first = parse({"--lr", "1e-3", "--eval_lengths", "64,128"});
    const Json saved = parse_json(json_text(options_json(first)), "state.json");
    check_resumed_options(first, saved, "state.json");
    int same = 0;
    for_each_option(first, [&](const OptionRow& row, const auto& value) {
        INFO("--" << row.name);
        Options second = first;
        if (!(row.programs & GPT2_FLAG)) { return; }
        set_option(second, row.name, "", other_value(row, value));
        if (row.on_resume == FREE) {
            check_resumed_options(second, saved, "state.json");
        } else {
            same++;
            const std::string flag = std::string("--") + row.name + " ";
            CHECK(throws_with([&] { check_resumed_options(second, saved, "state.json"); }, flag) == EXIT_BAD_INPUT);
            second.allow_change = {"nothing", row.name};
            check_resumed_options(second, saved, "state.json");
        }
    });
    CHECK(same >= 19);
    for (const char* flag : {"--T", "--model", "--pos", "--total_batch", "--lr", "--schedule", "--seed", "-i"}) {
        CHECK(find_option(flag).on_resume == SAME);
    }
    for (const char* flag : {"--B", "--threads", "--recompute", "--out"}) {
        CHECK(find_option(flag).on_resume == FREE);
    }
    Json older = saved; // a checkpoint written before there was --clip
    older.erase("clip");
    check_resumed_options(first, older, "state.json");
    const Options clipped = parse({"--lr", "1e-3", "--clip", "2"});
    const char* said = "--clip 2.0, not 1.0 as in state.json: resuming needs the old value, or --allow_change clip";
    CHECK(throws_with([&] { check_resumed_options(clipped, older, "state.json"); }, said) == EXIT_BAD_INPUT);
}

TEST_CASE("json: broken texts are refused with the file's name", "[json]") {
    for (const char* bad : {"", "{", "[1,]", "{\"a\":1}x", "{'a':1}", "nan", "[1e999]", "\"\xff\"", "{\"a\":1,\"a\":2}",
                            "{\"b\":{\"a\":1,\"a\":2}}", "[\x01]"}) {
        INFO(bad);
        CHECK(throws_with([&] { parse_json(bad, "config.json"); }, "config.json: ") == EXIT_BAD_INPUT);
    }
    CHECK(parse_json("[{\"a\":1},{\"a\":2}]", "x").size() == 2); // the same key in two objects is fine
    CHECK(parse_json("{\"a\":{\"a\":1},\"b\":2}", "x").size() == 2);
    throws_with([] { parse_json("{\"a\":1,\"a\":2}", "x"); }, "x: the key \"a\" appears twice");
    throws_with([] { parse_json(std::string(100000, '['), "x"); }, "deeper than 32");
    throws_with([] { parse_json(std::string(33, '[') + std::string(33, ']'), "x"); }, "deeper than 32");
    parse_json(std::string(32, '[') + std::string(32, ']'), "x");
    std::string many = "{";
    for (size_t i = 0; i <= JSON_MAX_ORDERED_KEYS; i++) { many += strprintf("%s\"%zu\":0", i ? "," : "", i); }
    throws_with([&] { parse_json(many + "}", "x"); }, "more than 20000 keys");
    CHECK(parse_json<nlohmann::json>(many + "}", "x").size() == JSON_MAX_ORDERED_KEYS + 1);
    std::string values = "[[";                          // counts itself
    for (size_t i = 2; i < JSON_MAX_VALUES; i++) { values += i % 2 == 0 ? "0," : "[],"; }
    values.back() = ']';
    CHECK(parse_json(values + "]", "x").size() == 1);
    throws_with([&] { parse_json(values + ",0]", "x"); }, "x: JSON of more than 250000 values");
    CHECK(parse_json<nlohmann::json>(values + ",0]", "x").size() == 2);
    CHECK(throws_with([] { parse_json("\"" + std::string(100000, 'x'), "x"); }, "not valid JSON") == EXIT_BAD_INPUT);
}

TEST_CASE("json: order of keys and doubles survive, bytes that are no text do not stop the writer", "[json]") {
    CHECK(json_text(parse_json("{\"z\":1,\"a\":[0.1,1e-300,-3]}", "x")) == "{\"z\":1,\"a\":[0.1,1e-300,-3]}");
    CHECK(json_text(Json("a\xff")) == "\"a\xEF\xBF\xBD\"");
}

TEST_CASE("json: fields of the wrong kind are named", "[json]") {
    const Json j = parse_json(R"({"n":12,"f":0.5,"s":"x","b":true,"big":18446744073709551615,"neg":-3,"o":{}})", "f");
    CHECK(json_int(j, "n", 0, 12, "f") == 12);
    CHECK(json_int(j, "neg", -3, 12, "f") == -3);
    CHECK(json_number(j, "f", "f") == 0.5);
    CHECK(json_number(j, "n", "f") == 12);
    CHECK(json_string(j, "s", "f") == "x");
    throws_with([&] { json_int(j, "n", 0, 11, "f"); }, "f: \"n\": expected an integer from 0 to 11, got 12");
    throws_with([&] { json_int(j, "n", 13, 20, "f"); }, "\"n\": expected an integer from 13 to 20, got 12");
    throws_with([&] { json_int(j, "big", INT64_MIN, INT64_MAX, "f"); }, "18446744073709551615");
    throws_with([&] { json_int(j, "f", 0, 9, "f"); }, "\"f\": expected an integer from 0 to 9, got 0.5");
    throws_with([&] { json_int(j, "b", 0, 9, "f"); }, "\"b\": expected an integer from 0 to 9, got true");
    throws_with([&] { json_int(j, "none", 0, 9, "f"); }, "f: the key \"none\" is missing");
    throws_with([&] { json_number(j, "s", "f"); }, "\"s\": expected a finite number, got \"x\"");
    throws_with([&] { json_string(j, "o", "f"); }, "\"o\": expected a string, got an object of 0");
    throws_with([&] { json_at(j.at("n"), "x", "f"); }, "f: expected an object with the key \"x\", got 12");
}
