// test_run.cu -- the program train_gpt2 from the outside, as a user meets it: what it computes, leaves on the disk and
// says when something is wrong. Every run is a process of its own. The binary is $TRAIN_GPT2, or ./train_gpt2.
#include <cfloat>

#include "test/programs/program.h"
#include "llmc/engine/schedule.h"
#include "llmc/engine/checkpoint.h"
#include "llmc/engine/vocabulary.h"

namespace {

// A directory with data and the flags of a run that takes a few milliseconds.
struct Place : ::Place {
    Place() : ::Place("train_gpt2") {
        write_file(*this / "train.txt", words(6000, 1));
        write_file(*this / "val.txt", words(1200, 2));
        base = Flags().set("--train_files", *this / "train.txt").set("--val_files", *this / "val.txt")
            .with("--model 2,2,32 --T 32 --B 4 --steps 12 --lr 1e-3 --threads 2 --sample_every 0 --val_every 4")
            .with("--val_batches 2 --checkpoint_every 6").set("--out", *this / "out");
    }
};

std::string shard(const std::vector<uint16_t>& ids, int vocab, int claimed) {
    return header_bytes({20240520, 1, claimed, vocab, 0}) + bytes_of(ids);
}
std::vector<uint16_t> ids_below(int vocab, size_t n) {
    std::vector<uint16_t> ids(n);
    for (size_t i = 0; i < n; i++) { ids[i] = (uint16_t)(hash64(5, i) % (uint64_t)vocab); }
    return ids;
}

// ----------------------------------------------------------------------------------------------------------
// the same bits

TEST_CASE("run: resumed in a fresh process, the bits are those of an unbroken run", "[run][P1]") {
    for (const char* pos : {"cable", "fire", "learned"}) {
        INFO(pos);
        Place place;
        const Flags flags = place.base.set("--pos", pos).with("--total_batch 512 --B 2 --model 1,2,16 --T 16");
        check_resumes(place, flags);
        const auto done = bits(step_dir(place.out(), 200));
        const std::string log = untimed_log(place.out());
        CHECK(place.run(resumable(flags).set("--resume", "1")).code == 0);          // nothing is left to do
        check_same(done, bits(step_dir(place.out(), 200)));
        CHECK(untimed_log(place.out()) == log);
    }
}

TEST_CASE("run: the log begins with the flags, from which --config trains the same again", "[run]") {
    Place place;
    const Flags flags = place.base.with("--pos t5_clip:K=5 --steps 9 --checkpoint_every 3 --allow_change steps");
    REQUIRE(place.run(flags).code == 0);
    REQUIRE(place.run(flags.with("--resume 1 --steps 12")).code == 0);
    const std::vector<Json> log = json_lines(place.out() + "/log.jsonl"), found = of_kind(log, "config");
    REQUIRE(found.size() == 1);
    CHECK(log[0].at("kind") == "config");
    const Json config = parse_json(read_file(step_dir(place.out(), 12) + "/config.json"), "config");
    CHECK(found[0].at("encoding") == config.at("position"));
    CHECK(found[0].at("flags").at("steps") == 9);
    CHECK(log[0].at("time").get<std::string>().size() == strlen("2026-01-31T12:34:56.789Z"));
    for (size_t i = 1; i < log.size(); i++) { CHECK(log[i - 1].at("time") <= log[i].at("time")); }
    write_file(place / "config.json", json_text(log[0]));
    REQUIRE(place.run(Flags().set("--config", place / "config.json").with("--steps 12").set("--out", place / "again"))
                .code == 0);
    check_same(bits(step_dir(place.out(), 12)), bits(step_dir(place / "again", 12)));
    CHECK(untimed_log(place / "again") == untimed_log(place.out()));
    const Outcome use = place.run(Flags().set("--load", place.out()).set("--val_files", place / "train.txt")
                                      .with("--eval_lengths 8 --eval_tokens 64").set("--out", place / "use"));
    REQUIRE(use.code == 0);
    CHECK(of_kind(json_lines(place / "use/log.jsonl"), "config").empty());  // there the first record is a result
}

TEST_CASE("run: killed at any instant, it resumes to the same bits", "[run][P1]") {
    Place place;
    const Flags flags = place.base.with("--steps 30 --checkpoint_every 2 --keep 2 --skip_norm_z 3");
    const double start = wall_seconds();
    REQUIRE(place.run(flags.set("--out", place / "whole")).code == 0);
    const double whole = wall_seconds() - start;
    int killed = 0;
    for (uint64_t i = 0; i < 12; i++) {
        Process p(place.program, flags.set("--resume", "1").words(), place / "killed");
        if (i % 2 == 0) {
            usleep((useconds_t)(1e6 * whole * uniform01(99, i)));
        } else {                                                // between steps, after one checkpoint or more
            p.wait_for_lines(place.out() + "/main.log", 2 * i + 5);
            usleep((useconds_t)(5e3 * uniform01(99, i)));
        }
        kill(p.pid, SIGKILL);
        const Outcome o = p.wait();
        INFO("kill " << i << ": " << o.err);
        CHECK((o.code == 128 + SIGKILL || o.code == 0));
        killed += o.code != 0;
    }
    CHECK(killed > 0);
    REQUIRE(place.run(flags.set("--resume", "1")).code == 0);
    check_same(bits(step_dir(place / "whole", 30)), bits(step_dir(place.out(), 30)));
    check_each_step_once(place.out(), 30);
    CHECK(untimed_log(place.out()) == untimed_log(place / "whole"));
    CHECK(read_file(place.out() + "/main.log") == read_file(place / "whole/main.log"));
    for (const std::string& name : list_directory(place.out())) {
        INFO(name);
        CHECK((name[0] != '.' || name == ".lock"));                                 // no rubbish is left
    }
}

TEST_CASE("run: a signal ends it after the step, resumable to the same bits", "[run][P16]") {
    Place place;
    const Flags flags = place.base.with("--model 1,2,16 --T 16 --B 1 --steps 4000 --val_every 0")
        .with("--checkpoint_every 4000 --threads 1");
    REQUIRE(place.run(flags.set("--out", place / "whole")).code == 0);
    size_t lines = 0;
    for (int number : {SIGTERM, SIGINT, SIGUSR1, SIGHUP, SIGXCPU}) {
        INFO("signal " << number);
        Process p(place.program, flags.set("--resume", "1").words(), place / "signalled");
        p.wait_for_lines(place.out() + "/main.log", lines + 20);
        kill(p.pid, number);
        const Outcome o = p.wait();
        INFO(o.err);
        REQUIRE(o.code == EXIT_INTERRUPTED);
        CHECK(contains(o.err, strprintf("stopped by signal %d", number)));
        CHECK(contains(o.err, "--resume 1"));
        lines = of_kind(json_lines(place.out() + "/log.jsonl"), "train").size();
        CHECK(contains(o.out, "saved " + step_dir(place.out(), (int)lines)));       // of the step it stopped at
        CHECK(path_exists(step_dir(place.out(), (int)lines)));
    }
    REQUIRE(place.run(flags.set("--resume", "1")).code == 0);
    check_same(bits(step_dir(place / "whole", 4000)), bits(step_dir(place.out(), 4000)));
    CHECK(read_file(place.out() + "/main.log") == read_file(place / "whole/main.log"));
}

TEST_CASE("run: a second signal, one during a validation, nohup, and a console that goes away", "[run][P16]") {
    Place place;
    const Flags flags = place.base.with("--model 1,2,16 --T 16 --B 1 --val_every 0 --steps 100000")
        .with("--checkpoint_every 100000 --threads 1");
    const auto in_shell = [&](const std::string& start, const Flags& f, const std::string& end) {
        return std::vector<std::string>{"-c", start + place.command(f) + end};
    };
    {   // 1 more signals, while the first is being answered and until the run has ended
        Process p(place.program, flags.set("--out", place / "twice").words(), place / "twice.log");
        p.wait_for_lines(place / "twice/main.log", 20);
        kill(p.pid, SIGTERM);
        kill(p.pid, SIGHUP);
        for (; p.running(); usleep(100)) { kill(p.pid, SIGTERM); }
        CHECK(p.wait().code == EXIT_INTERRUPTED);
        CHECK(path_exists(step_dir(place / "twice", (int)losses(place / "twice").size())));
    }
    {   // 2 during a validation of half a minute or more, which the resumed run repeats
        write_file(place / "long.txt", words(20000000, 3));
        const Flags begun = flags.set("--out", place / "val").with("--steps 4 --checkpoint_every 4");
        REQUIRE(place.run(begun).code == 0);
        const Flags f = begun.set("--resume", "1").set("--val_files", place / "long.txt")
            .with("--val_every 4 --val_batches -1 --steps 5 --allow_change steps");
        Process p(place.program, f.words(), place / "val.log");
        while (p.running() && !contains(read_file(p.err), "evaluating at T = 16")) { usleep(1000); }
        REQUIRE(p.running());
        kill(p.pid, SIGTERM);
        const Outcome o = p.wait();
        INFO(o.err);
        CHECK(o.code == EXIT_INTERRUPTED);
        CHECK(of_kind(json_lines(place / "val/log.jsonl"), "val").empty());
        CHECK(of_kind(json_lines(place / "val/log.jsonl"), "train").size() == 4);
    }
    {   // 3 what nohup ignores stays ignored
        const Flags f = flags.set("--out", place / "nohup");
        Process p("/bin/sh", in_shell("trap '' HUP; exec ", f, ""), place / "nohup.log");
        p.wait_for_lines(place / "nohup/main.log", 20);
        kill(p.pid, SIGHUP);
        p.wait_for_lines(place / "nohup/main.log", 200);
        CHECK(p.running());
        kill(p.pid, SIGTERM);
        CHECK(contains(p.wait().err, strprintf("stopped by signal %d", SIGTERM)));
    }
    {   // 4 `| head` reads one line; the run continues to its end
        const Flags f = flags.set("--out", place / "head").with("--steps 500");
        Process p("/bin/sh", in_shell("", f, " | head -n 1"), place / "head.log");
        CHECK(p.wait().code == 0);
        CHECK(path_exists(step_dir(place / "head", 500)));
    }
    {   // 5 a file beyond `ulimit -f` (blocks of 512 bytes) is an error with a message, not a death
        const Flags f = place.base.set("--out", place / "limit");
        Process p("/bin/sh", in_shell("ulimit -f 32; exec ", f, ""), place / "limit.log");
        const Outcome o = p.wait();
        CHECK(o.code == EXIT_BAD_INPUT);
        CHECK(contains(o.err, "step 12 is not saved"));
        CHECK(losses(place / "limit").size() == 12);
    }
}

TEST_CASE("run: resuming where there is nothing is said, or refused, and loses no log", "[run]") {
    Place place;
    check_refused(place, {place.base.set("--resume", "2"), {"--resume 2", place.out(), "is --out right"}});
    const Flags short_run = place.base.with("--steps 3 --checkpoint_every 0");
    const Outcome first = place.run(short_run.set("--resume", "1"));
    REQUIRE(first.code == 0);
    CHECK(contains(first.err, "--resume 1: there is no checkpoint in " + place.out()));
    const std::string main_log = read_file(place.out() + "/main.log"), json = read_file(place.out() + "/log.jsonl");
    for (const char* suffix : {".1", ".2"}) {
        const Outcome again = place.run(short_run.set("--lr", "2e-3").set("--resume", "1"));
        REQUIRE(again.code == 0);
        CHECK(contains(again.err, std::string("main.log") + suffix));
        CHECK(contains(again.err, std::string("log.jsonl") + suffix));
        CHECK(path_exists(place.out() + "/log.jsonl" + suffix));
    }
    CHECK(read_file(place.out() + "/main.log.1") == main_log);
    CHECK(read_file(place.out() + "/log.jsonl.1") == json);
    check_each_step_once(place.out(), 3);
    check_refused(place, {short_run.set("--resume", "2"), {"--resume 2", "found none"}});
    REQUIRE(place.run(place.base.set("--out", place / "saved")).code == 0);
    const Outcome resumed = place.run(place.base.set("--out", place / "saved").set("--resume", "2"));
    CHECK(resumed.code == 0);
    CHECK(contains(resumed.out, "resumed from"));
    CHECK_FALSE(path_exists(place / "saved/main.log.1"));
}

TEST_CASE("run: threads and recomputing change no bit, micro-batches only rounding", "[run][P11]") {
    Place place;
    check_same_on_any_threads(place);
}

// ----------------------------------------------------------------------------------------------------------
// refused

TEST_CASE("run: flags and data that cannot be are refused before anything is written", "[run]") {
    Place place;
    const Flags& b = place.base;
    // 1 shards and texts, most of them wrong
    const std::string good = place / "good.bin", cut = place / "cut.bin";
    const std::string grown = place / "grown.bin", high = place / "high.bin";
    write_file(good, shard(ids_below(300, 400), 300, 400));
    write_file(cut, shard(ids_below(300, 399), 300, 400));
    write_file(grown, shard(ids_below(300, 401), 300, 400));
    write_file(place / "short.txt", "too short");
    write_file(place / "raw.bin", bytes_of(ids_below(300, 2000)));
    write_file(place / "zero.txt", "");
    // 2 each of these flags is refused, with a message that holds these words
    const Refusal refusals[] = {
        {b.set("--steeps", "3"), {"'--steeps'", "--steps"}},
        {b.set("--B", "0"), {"--B: expected ", "got '0'", "an int >= 1"}},
        {b.set("--pos", std::string(10000, 'p')), {"--pos: expected ", "got 10000 bytes"}},
        {b.set("--model", std::string(10000, 'm')), {"--model: expected ", "L,NH,C", "got 'mmm"}},
        {b.set("--model", "3,5,32"), {"heads that divides the 32 channels, got '3,5,32'"}},
        {b.set("--pos", "cabel").set("--train_files", "no.bin"), {"--pos cabel: did you mean cable? expected one of"}},
        {b.set("--model", "2,2,32,"), {"--model: expected ", "got '2,2,32,'"}},
        {b.set("--model", "0,2,32"), {"--model: expected ", "got '0,2,32'"}},
        {b.set("--pos", "nope"), {"--pos nope", "cable", "alibi"}},
        {b.set("--pos", "t5_clip:Q=3"), {"--pos t5_clip:Q=3", "K"}},
        {b.set("--pos", "t5_clip:K=0.5"), {"K is 0.5", "whole number"}},
        {b.set("--pos", "t5_clip:K=1e300"), {"K is 1e+300"}},
        {b.set("--pos", "t5_clip:K=0x8"), {"--pos t5_clip:K=0x8", "a positive number", "'0x8'"}},
        {b.set("--pos", "t5_clip:K=8,K=8"), {"--pos t5_clip:K=8,K=8", "K is given twice"}},
        {b.set("--rope_scaling", "ntk:2"), {"--rope_scaling ntk:2", "cable"}},
        {b.set("--sinks", "2"), {"--sinks 2", "expected --window"}},
        {b.set("--window", "-1"), {"--window: expected ", "got '-1'"}},
        {b.set("--window", "9,0,"), {"--window: expected ints joined by commas", "got '9,0,'"}},
        {b.set("--document_mask", "1"), {"--document_mask 1", "text files have none"}},
        {b.set("--document_mask", "1").set("--pos", "fire").set("--train_files", good).set("--val_files", good),
         {"--document_mask 1", "fire"}},
        {b.set("--train_files", place / "gone_*.txt"), {"--train_files", "gone_*.txt"}},
        {b.set("--val_files", place / "gone.txt"), {"--val_files", "gone.txt"}},
        {b.set("--train_files", place.path), {"--train_files", "not a regular file"}},
        {b.set("--train_files", cut), {"cut.bin", "1824 bytes", "400 tokens", "got 1822"}},
        {b.set("--train_files", grown), {"grown.bin", "1824 bytes", "400 tokens", "got 1826"}},
        {b.set("--train_files", place / "raw.bin"), {"raw.bin", "magic", "20240520"}},
        {b.set("--train_files", place / "zero.txt"), {"zero.txt", "is empty"}},
        {b.set("--train_files", good), {"--val_files", "val.txt", "expected a vocabulary of 300", "got 256"}},
        {b.set("--total_batch", "100"), {"--total_batch 100", "4 x 32 = 128"}},
        {b.set("--resume", "1").without("--out"), {"--resume", "--out"}},
        {b.set("--load", place / "nothing"), {"nothing", "cannot open"}},
        {b.set("--load", place / "train.txt"), {"train.txt", "magic"}},
        {Flags().set("--generate", "abc"), {"--generate", "--load"}},
        {Flags().set("--eval_lengths", "32"), {"--eval_lengths", "--load"}},
        {b.set("--allow_change", ","), {"--allow_change"}},
    };
    for (const Refusal& r : refusals) { check_refused(place, r); }
    check_refused(place, {b.set("--train_files", place / "short.txt").set("--steps", "-1"),
                          {"--train_files", "short.txt", "33 tokens", "got at most 9"}});
    CHECK_FALSE(path_exists(place.out()));
    // 3 the disk has room for one checkpoint, and not for all that there will be
    const Flags many = b.set("--steps", "2000000000").with("--checkpoint_every 1").set("--out", place / "full");
    check_refused(place, {many, {place / "full: 2000000000 checkpoints need ", " are free", "--keep"}});
    check_refused(place, {many.with("--keep 300000000"), {place / "full: 300000001 checkpoints need "}});

    // 4 ids are looked at when they are read
    std::vector<uint16_t> ids = ids_below(300, 400);
    ids[123] = 300;
    write_file(high, shard(ids, 300, 400));
    check_refused(place, {b.set("--train_files", high).set("--val_every", "0"),
                          {"high.bin", "token 123", "0 to 299", "got 300"}});
    check_refused(place, {b.set("--train_files", good).set("--val_files", high).set("--out", place / "out2"),
                          {"high.bin", "token 123"}});
    CHECK(json_lines(place / "out2/log.jsonl").empty());
}

TEST_CASE("run: a checkpoint of another model is refused", "[run][P9]") {
    Place place;
    const Flags use = Flags().set("--val_files", place / "val.txt").set("--threads", "1");
    const std::string learned = place / "learned", t5 = place / "t5";
    REQUIRE(place.run(place.base.set("--pos", "learned").set("--out", learned)).code == 0);
    REQUIRE(place.run(place.base.set("--pos", "t5_clip:K=9").set("--out", t5)).code == 0);
    write_file(place / "other.bin", shard(ids_below(300, 400), 300, 400));
    const Flags load = place.base.set("--load", learned).without("--model");
    const Refusal refusals[] = {
        {load.set("--pos", "rope"), {"--pos rope", "learned"}},
        {place.base.set("--load", t5).without("--model").set("--pos", "t5_clip:K=8"),
         {"--pos t5_clip:K=8", "t5_clip:K=9"}},
        {load.set("--model", "2,4,32"), {"--model 2,4,32", "2,2,32"}},
        {load.set("--model", "small"), {"--model 12,12,768", "2,2,32"}},
        {load.set("--train_files", place / "other.bin").set("--val_every", "0"), {"vocabulary of 300", "256"}},
        {load.set("--T", "33"), {"--T 33", "learned", "32"}},
        {use.set("--load", learned).set("--eval_lengths", "33,64"), {"--eval_lengths", "learned", "32"}},
        {use.set("--load", learned).set("--val_files", place / "other.bin").set("--eval_lengths", "32"),
         {"vocabulary of", "300", "256"}},
        {use.set("--load", learned).with("--generate abcde --tokens 28"), {"--generate", "learned", "32", "--tokens"}},
        {use.set("--load", t5).with("--generate a --tokens 9999999999"), {"--generate", "9999999999", "--tokens"}},
        {use.set("--load", t5).set("--dump_bias", "2,0,text").set("--out", place / "out"),
         {"--dump_bias: expected LAYER,HEAD[,TEXT] with a layer below 2", "got '2,0,text'"}},
        {use.set("--load", t5).set("--dump_bias", "0,0,text"), {"--dump_bias", "--out"}},
        {use.set("--load", learned).set("--dump_bias", "0,0,text").set("--out", place / "out3"),
         {"learned adds no bias"}},
    };
    for (const Refusal& r : refusals) { check_refused(place, r); }
    for (const char* kind : {"/step_00000006", "/step_00000012"}) { CHECK(path_exists(learned + kind)); }

    // weights that no manifest vouches for
    const std::string dir = place / "bare", model = dir + "/model.safetensors";
    const std::string bytes = read_file(step_dir(t5, 12) + "/model.safetensors");
    io_mkdirs(dir);
    write_file(dir + "/config.json", read_file(step_dir(t5, 12) + "/config.json"));
    write_file(model, bytes.substr(0, bytes.size() - 4));
    check_refused(place, {use.set("--load", dir).set("--generate", "a"), {"bare/model.safetensors"}});
    write_file(model, bytes);
    CHECK(place.run(use.set("--load", dir).set("--generate", "a")).code == 0);
    // of another program, which says nothing of an encoding: learned positions, or what --pos says
    const std::string said = read_file(dir + "/config.json");
    const Json ours = parse_json(said, "config.json");
    Json plain = {{"model_type", "gpt2"}};
    for (const char* key : {"n_layer", "n_head", "n_embd", "n_positions", "vocab_size"}) { plain[key] = ours.at(key); }
    write_file(dir + "/config.json", json_text(plain));
    const Flags evaluate = use.set("--load", dir).set("--eval_lengths", "32");
    const Outcome given = place.run(evaluate.set("--pos", "t5_clip:K=9"));
    CHECK(given.code == 0);
    CHECK(contains(given.err, "t5_clip:K=9"));
    check_refused(place, {evaluate, {"tensors that this model does not have: t5.weight"}});
    write_file(dir + "/config.json", said);
    write_file(dir + "/manifest.json", read_file(step_dir(t5, 12) + "/manifest.json"));
    write_file(model, flipped(bytes, bytes.size() - 50));
    check_refused(place, {use.set("--load", dir).set("--generate", "a"), {"bare"}});
}

// An earlier version, which did not know the key, may have computed something else than today's default.
TEST_CASE("run: a config.json that lacks a key of its encoding is refused", "[run][P23]") {
    Place place;
    struct Lacking { const char *pos, *key, *today; };
    for (const Lacking& k : {Lacking{"kcable", "weight", "outside"}, {"kcable:weight=inside", "weight", "outside"},
                             {"sinusoidal", "scale", "0.1"}, {"sinusoidal", "embed", "plain"}, {"t5_clip", "K", "31"},
                             {"rope+cable,rope:theta=50", "theta", "10000"}}) {
        INFO(k.pos << " without " << k.key);
        const std::string out = place / std::string(k.pos);
        if (!path_exists(out)) { REQUIRE(place.run(place.base.set("--pos", k.pos).set("--out", out)).code == 0); }
        const std::string step = step_dir(out, 12), lacks = place / "lacks";
        Json config = parse_json(read_file(step + "/config.json"), "config");
        Json& position = config["position"];
        Json& encoding = position["name"] == "layers" ? position["layers"][1][0] : position;
        REQUIRE(encoding.erase(k.key) == 1);
        if (config.contains("rope_theta")) { config.erase("rope_theta"); }
        io_mkdirs(lacks);
        write_file(lacks + "/config.json", json_text(config));
        write_file(lacks + "/model.safetensors", read_file(step + "/model.safetensors"));
        const std::string said = std::string("the key \"") + k.key + "\" is missing", today = k.today;
        check_refused(place, {Flags().set("--load", lacks).set("--generate", "a"), {lacks + ": position", said,
                                                                                    "default is " + today}});
        // as the message says
        const bool word = isalpha((unsigned char)today[0]);
        encoding[k.key] = word ? Json(today) : parse_json(today, "today");
        write_file(lacks + "/config.json", json_text(config));
        CHECK(place.run(Flags().set("--load", lacks).set("--generate", "a")).code == 0);
    }
}

TEST_CASE("run: a resumed run keeps what it is", "[run][P9]") {
    Place place;
    const Flags flags = place.base.with("--steps 8 --checkpoint_every 4 --schedule linear");
    REQUIRE(place.run(flags).code == 0);
    TempDir::remove(step_dir(place.out(), 8));
    const std::string log = read_file(place.out() + "/main.log"), json_log = read_file(place.out() + "/log.jsonl");
    const auto before = bits(step_dir(place.out(), 4));
    const Flags resume = flags.set("--resume", "1");
    write_file(place / "other.txt", words(4000, 7));
    const std::vector<std::vector<std::string>> changes = {
        {"--lr", "2e-3"}, {"--steps", "9"}, {"--schedule", "cosine"}, {"--warmup", "2"}, {"--final_lr", "0.5"},
        {"--weight_decay", "0.1"}, {"--beta1", "0.8"}, {"--beta2", "0.99"}, {"--eps", "1e-6"}, {"--clip", "0.5"},
        {"--skip_loss_z", "3"}, {"--skip_norm_z", "3"}, {"--overfit", "1"}, {"--seed", "7"}, {"--total_batch", "256"},
        {"--train_files", place / "other.txt"}, {"--T", "16"}, {"--model", "1,2,32"}, {"--pos", "alibi"}};
    const std::vector<std::string> files = {".lock", "log.jsonl", "main.log", "step_00000004"};
    for (const auto& change : changes) {
        check_refused(place, {resume.set(change[0], change[1]), {change[0]}});
        CHECK(list_directory(place.out()) == files);
    }
    CHECK(read_file(place.out() + "/main.log") == log);
    CHECK(read_file(place.out() + "/log.jsonl") == json_log);
    check_same(before, bits(step_dir(place.out(), 4)));

    check_refused(place, {flags, {"--out", "holds checkpoints", "--resume 1"}});
    REQUIRE(place.run(resume.with("--threads 1 --B 2 --total_batch 128 --recompute 0")).code == 0);     // free
    check_each_step_once(place.out(), 8);
    TempDir::remove(step_dir(place.out(), 8));
    REQUIRE(place.run(resume.with("--lr 2e-3 --allow_change lr")).code == 0);
    CHECK(of_kind(json_lines(place.out() + "/log.jsonl"), "train")[4].at("lr") == 2e-3);
}

// Three files of training data in a directory of their own, and a run on them that has saved step 4 of 8.
struct ShardedPlace : Place {
    Flags flags, resume;

    ShardedPlace() {
        io_mkdir(*this / "data");
        for (int i = 0; i < 3; i++) { write_file(data(i), words(3000, 10 + i)); }
        flags = base.with("--steps 8 --checkpoint_every 4").set("--train_files", *this / "data/*.txt");
        resume = flags.set("--resume", "1");
        REQUIRE(run(flags).code == 0);
        forget();
    }
    std::string data(int i) const { return *this / ("data/" + std::to_string(i) + ".txt"); }
    void forget() const { TempDir::remove(step_dir(out(), 8)); }        // what was done after step 4
    bool saved() const { return path_exists(step_dir(out(), 8)); }
};

// Replaces one file of a checkpoint, and the manifest that covers it.
void rewrite_in_checkpoint(const std::string& dir, int step, const std::string& name, const std::string& text) {
    write_file(dir + "/" + name, text);
    FileSums sums;
    for (const std::string& file : list_directory(dir)) {
        if (file != "manifest.json") { sums.push_back({file, sum_file(dir + "/" + file)}); }
    }
    write_file(dir + "/manifest.json", manifest_text(step, sums));
}

TEST_CASE("run: it is not resumed on other data", "[run][P9]") {
    ShardedPlace place;
    const std::string first = read_file(place.data(0)), second = read_file(place.data(1));
    const std::string last = read_file(place.data(2));
    std::string other = first;
    std::swap(other[100], other[101]);
    const auto refused = [&](const std::vector<std::string>& said) {
        check_refused(place, {place.resume, said});
        CHECK(!place.saved());
    };
    // 1 other contents, another size, one more, one less, two exchanged
    write_file(place.data(0), other);
    refused({"--train_files: file 1 is 0.txt of 3002 bytes (xxh3:", ", not 0.txt of 3002 bytes (xxh3:",
             " as in " + step_dir(place.out(), 4), "--allow_change train_files"});
    write_file(place.data(0), first + "more");
    refused({"file 1 is 0.txt of 3006 bytes", "not 0.txt of 3002 bytes"});
    write_file(place.data(0), first);
    write_file(place.data(3), last);
    refused({"file 4 is 3.txt of ", ", not absent as in"});
    io_unlink(place.data(3));
    io_unlink(place.data(2));
    refused({"file 3 is absent, not 2.txt of "});
    write_file(place.data(2), second);
    write_file(place.data(1), last);
    refused({"file 2 is 1.txt of "});
    // 2 what is the same may be younger, or lie elsewhere
    write_file(place.data(1), second);
    write_file(place.data(2), last);
    CHECK(place.run(place.resume).code == 0);
    place.forget();
    io_rename(place / "data", place / "moved");
    const Flags moved = place.resume.set("--train_files", place / "moved/*.txt");
    check_refused(place, {moved, {"--train_files", "--allow_change train_files"}});
    const Outcome o = place.run(moved.set("--allow_change", "train_files"));
    CHECK(o.code == 0);
    CHECK(!contains(o.err, "warning"));
    place.forget();
    io_rename(place / "moved", place / "data");
    // 3 by request on other data, which the next checkpoint then has
    write_file(place.data(0), other);
    const Outcome allowed = place.run(place.resume.set("--allow_change", "train_files"));
    CHECK(allowed.code == 0);
    CHECK(contains(allowed.err, "warning: --train_files: file 1 is 0.txt of "));
    CHECK(place.run(place.resume).code == 0);
    // 4 other validation data gives a warning
    place.forget();
    write_file(place.data(0), first);
    write_file(place / "val.txt", flipped(read_file(place / "val.txt"), 30));
    const Outcome validated = place.run(place.resume);
    CHECK(validated.code == 0);
    CHECK(contains(validated.err, "warning: --val_files: file 1 is val.txt of "));
    // 5 a checkpoint of a time when none was kept
    place.forget();
    const std::string path = step_dir(place.out(), 4) + "/state.json";
    Json state = parse_json(read_file(path), "state");
    state.erase("data");
    rewrite_in_checkpoint(step_dir(place.out(), 4), 4, "state.json", json_text(state, 2));
    write_file(place.data(0), other);
    CHECK(place.run(place.resume).code == 0);
}

static Json config_of(const std::string& step) {
    return parse_json(read_file(step + "/config.json"), "config");
}

// llm.c's multiple-choice file, of contexts and endings of 4 to 13 bytes of text
std::string choices(int examples) {
    const std::string text = words(4000, 3);
    std::vector<uint16_t> data;
    for (int e = 0; e < examples; e++) {
        std::vector<uint16_t> x = {65535, 0, (uint16_t)e, (uint16_t)(e % 4), 4};
        for (int part = 0; part < 5; part++) {
            const size_t from = hash64(7, (uint64_t)(5 * e + part)) % 3900, n = 4 + (size_t)(7 * e + part) % 10;
            x.push_back((uint16_t)n);
            x.insert(x.end(), text.begin() + (long)from, text.begin() + (long)(from + n));
        }
        x[1] = (uint16_t)(2 * x.size());
        data.insert(data.end(), x.begin(), x.end());
    }
    return header_bytes({20240522, 1, examples}) + bytes_of(data);
}

// Resumed without the flag, a run ends with the same bits; with another value it is refused.
void check_kept(Place& place, const Flags& resume, const std::string& step, const Flags& other,
                const std::vector<std::string>& said) {
    const auto unbroken = bits(step);
    TempDir::remove(step);
    check_refused(place, {other, said});
    REQUIRE(place.run(resume).code == 0);
    check_same(unbroken, bits(step));
}

TEST_CASE("run: how rope is stretched belongs to the checkpoint, to each of its uses and to their log",
          "[run][rope_scaling]") {
    Place place;
    write_file(place / "choices.bin", choices(12));
    const Flags base = place.base.without("--out").with("--model 1,2,32 --lr 1e-2");
    REQUIRE(place.run(base.with("--pos rope --T 16").set("--out", place / "short")).code == 0);
    const std::string old = step_dir(place / "short", 12), log = place / "use";
    CHECK(!config_of(old).contains("rope_scaling"));
    // an evaluation with HellaSwag, what it has logged, and a text
    const auto used = [&](const std::string& step, const std::string& flags) {
        TempDir::remove(log);
        const std::string more = " --curve --threads 1 --hellaswag " + place / "choices.bin" + " --out " + log;
        const Outcome o = place.evaluate(step, flags + more);
        const Outcome text = place.run(Flags().set("--load", step).with("--generate a --tokens 60 " + flags));
        REQUIRE(text.code == 0);
        std::string scores;
        for (const Json& j : of_kind(json_lines(log + "/log.jsonl"), "hellaswag_example")) { scores += j.dump(); }
        return std::vector<std::string>{o.out, untimed_log(log), text.out, scores};
    };
    struct Kind { const char *flag, *settled, *type; double factor; };
    for (const Kind& k : {Kind{"pi:4", "pi:4", "linear", 4}, Kind{"ntk:3.5", "ntk:3.5", "ntk", 3.5},
                          Kind{"yarn", "yarn:4", "yarn_paper", 4}}) {
        INFO(k.flag);
        // 1 trained on at four times the length
        const std::string out = place / k.type, step = step_dir(out, 12);
        const Flags tune = base.set("--load", old).with("--T 64 --B 2").set("--rope_scaling", k.flag).set("--out", out);
        const Outcome o = place.run(tune);
        REQUIRE(o.code == 0);
        CHECK(contains(o.out, k.settled + std::string(" of 16 tokens")));
        const Json want = {{"rope_type", k.type}, {"factor", k.factor}, {"original_max_position_embeddings", 16}};
        CHECK(config_of(step).at("rope_scaling") == want);
        CHECK(config_of(step).at("n_positions") == 64);
        // 2 used without the flag as with it, and not as without a stretch
        const auto stored = used(step, "");
        CHECK(of_kind(json_lines(log + "/log.jsonl"), "hellaswag_example").size() == 12);
        for (const char* kind : {"extrapolation", "curve"}) {
            const auto found = of_kind(json_lines(log + "/log.jsonl"), kind);
            REQUIRE(found.size() == 2);
            for (const Json& j : found) { CHECK(j.at("rope_scaling") == want); }
        }
        CHECK(used(step, std::string("--rope_scaling ") + k.settled) == stored);
        const auto none = used(step, "--rope_scaling none");
        for (size_t i = 0; i < 4; i++) { CHECK(none[i] != stored[i]); }
        CHECK(!contains(none[1], "rope_scaling"));
        const Outcome other = place.evaluate(step, "--rope_scaling none");
        CHECK(contains(other.err, "--rope_scaling none, not " + std::string(k.settled) + " as in"));
        if (k.type == std::string("yarn_paper")) {              // an older file calls it yarn
            Json older = config_of(step);
            older["rope_scaling"]["rope_type"] = "yarn";
            const std::string dir = place / "older";
            io_mkdir(dir);
            write_file(dir + "/model.safetensors", read_file(step + "/model.safetensors"));
            write_file(dir + "/config.json", json_text(older));
            CHECK(used(dir, "")[0] == stored[0]);
        }
        const Flags resume = tune.without("--load").without("--rope_scaling").set("--resume", "1");
        check_kept(place, resume, step, resume.set("--rope_scaling", "pi:7"),
                   {"--rope_scaling", "pi:7", k.settled, "--allow_change rope_scaling"});
        // 3 stretched again, the original length stays
        REQUIRE(place.run(tune.set("--load", step).with("--rope_scaling yarn:8 --T 128 --B 1")
                              .set("--out", out + "_again")).code == 0);
        CHECK(config_of(step_dir(out + "_again", 12)).at("rope_scaling").at("original_max_position_embeddings") == 16);
        CHECK(config_of(step_dir(out + "_again", 12)).at("rope_scaling").at("factor") == 8);
    }
    // 4 a model that was not trained so: the factor is that of the length
    used(old, "--rope_scaling ntk");
    const auto found = of_kind(json_lines(log + "/log.jsonl"), "extrapolation");
    REQUIRE(found.size() == 2);
    CHECK(found[0].at("rope_scaling").at("factor") == 1.5);
    CHECK(found[1].at("rope_scaling").at("factor") == 6);
}

TEST_CASE("run: LongRoPE's factors are read once, and belong to the checkpoint", "[run][rope_scaling]") {
    Place place;
    const Flags base = place.base.without("--out").with("--model 1,2,32 --lr 1e-2");
    REQUIRE(place.run(base.with("--pos rope --T 16").set("--out", place / "short")).code == 0);
    const std::string old = step_dir(place / "short", 12), file = place / "factors.json";
    const std::vector<double> short_factor(8, 1.5), long_factor = {1, 1, 2, 2, 3, 4, 4, 4.125};
    Json factors = {{"short_factor", short_factor}, {"long_factor", long_factor}};
    write_file(file, json_text(factors));
    const auto evaluate = [&](const std::string& step, const std::string& flags) {
        return place.evaluate(step, "--eval_lengths 16,96 " + flags);
    };
    // 1 evaluated by the factors for short texts and for long ones
    const auto losses = [&](const Json& changed) {
        write_file(place / "other.json", json_text(changed));
        return evaluate(old, "--rope_scaling longrope:" + place / "other.json").out;
    };
    const auto by_length = [](const std::string& out) {
        const size_t at = out.find("\n      16 ");
        return std::make_pair(out.substr(at, out.find('\n', at + 1) - at), out.substr(out.find("\n      96 ")));
    };
    const auto plain = by_length(losses(factors));
    Json other = factors;
    other["short_factor"][0] = 5;
    CHECK(by_length(losses(other)).first != plain.first);
    CHECK(by_length(losses(other)).second == plain.second);
    other = factors;
    other["long_factor"][0] = 5;
    CHECK(by_length(losses(other)).first == plain.first);
    CHECK(by_length(losses(other)).second != plain.second);
    other = factors;
    other["factor"] = 6;                                    // as 96 is of 16
    CHECK(by_length(losses(other)).second == plain.second);
    // with all factors 1 and s 1 it is the plain rope
    const std::vector<double> ones(8, 1.0);
    const Json one = {{"rope_type", "longrope"}, {"factor", 1}, {"short_factor", ones}, {"long_factor", ones},
                      {"original_max_position_embeddings", 16}};
    CHECK(by_length(losses(one)) == by_length(evaluate(old, "").out));
    // 2 trained on: the checkpoint has what is needed, and the file may go
    const std::string out = place / "long";
    const Flags tune = base.without("--model").set("--load", old).with("--T 64 --B 2").set("--out", out)
        .set("--rope_scaling", "longrope:" + file);
    const Outcome o = place.run(tune);
    REQUIRE(o.code == 0);
    CHECK(contains(o.out, "longrope:4#"));
    const Json want = {{"rope_type", "longrope"}, {"factor", 4}, {"original_max_position_embeddings", 16},
                       {"short_factor", short_factor}, {"long_factor", long_factor}};
    CHECK(config_of(step_dir(out, 12)).at("rope_scaling") == want);
    const std::string kept = evaluate(step_dir(out, 12), "").out;
    CHECK(evaluate(step_dir(out, 12), "--rope_scaling longrope").out == kept);
    CHECK(evaluate(step_dir(out, 12), "--rope_scaling longrope:" + file).out == kept);
    const Outcome yarn = evaluate(step_dir(out, 12), "--rope_scaling yarn:4");
    CHECK(yarn.out != kept);
    CHECK(contains(yarn.err, "--rope_scaling yarn:4, not longrope:4#"));
    // 3 resumed to the same bits without the flag, with the file, and once it is gone; other factors are refused
    const auto unbroken = bits(step_dir(out, 12));
    const Flags resume = tune.without("--load").without("--rope_scaling").with("--resume 1");
    const auto check_resumed = [&](const Flags& flags) {
        TempDir::remove(step_dir(out, 12));
        REQUIRE(place.run(flags).code == 0);
        check_same(unbroken, bits(step_dir(out, 12)));
    };
    check_resumed(resume.set("--rope_scaling", "longrope:" + file));
    check_refused(place, {resume.set("--rope_scaling", "longrope:" + place / "other.json"),
                          {"--rope_scaling", "longrope:1#", "longrope:4#", "--allow_change rope_scaling"}});
    TempDir::remove(file);
    check_resumed(resume);
    check_resumed(resume.set("--rope_scaling", "longrope"));
    check_refused(place, {resume.set("--rope_scaling", "longrope:" + file), {"factors.json"}});
}

TEST_CASE("run: factors that LongRoPE cannot use are refused before anything is allocated", "[run][rope_scaling]") {
    Place place;
    const Flags base = place.base.with("--model 1,2,32 --pos rope --T 16");
    REQUIRE(place.run(base.set("--out", place / "plain")).code == 0);
    const std::string file = place / "factors.json", good = "[1,1,1,1,1,1,1,1]";
    const Flags load = Flags().set("--load", step_dir(place / "plain", 12)).with("--generate a")
        .set("--rope_scaling", "longrope:" + file);
    const auto refused = [&](const std::string& text, const char* message) {
        INFO(text);
        write_file(file, text);
        for (const Flags& flags : {load, base.set("--rope_scaling", "longrope:" + file)}) {
            const Outcome o = place.run(flags);
            INFO(o.err);
            CHECK(o.code == 2);
            CHECK(contains(o.err, message));
            CHECK(!contains(o.err, "memory:"));
        }
    };
    const auto lists = [](const std::string& a, const std::string& b) {
        return "{\"short_factor\": " + a + ", \"long_factor\": " + b + "}";
    };
    refused(lists("[1,1,1,1]", good), "8 numbers, one for each pair of a head's 16 channels, got 4 and 8");
    refused(lists(good, "[1,1,1,1,1,1,1,1,1]"), "got 8 and 9");
    refused(lists(good, "[]"), "got 8 and 0");
    refused(lists("[1,1,0,1,1,1,1,1]", good), "factors.json: short_factor: expected numbers of at least "
            "1e-290, got 0 as number 3");
    refused(lists(good, "[1,1,1,1,1,1,1,-2.5]"), "1e-290, got -2.5 as number 8");
    refused(lists("[1,1e-300,1,1,1,1,1,1]", good), "1e-290, got 1e-300 as number 2");
    refused(lists(good, "[1,1,1,1,1,1,1,1e999]"), "factors.json: not valid JSON");
    refused(lists(good, "[1,1,1,1,1,1,1,NaN]"), "factors.json: not valid JSON");
    refused(lists(good, "[1,1,1,1,1,1,1,\"2\"]"), "got \"2\" as number 8");
    refused(lists(good, "[1,1,1,1,1,1,1,null]"), "got null as number 8");
    refused(lists(good, "2"), "long_factor: expected a list of numbers, got 2");
    refused("{\"short_factor\": " + good + "}", "the key \"long_factor\" is missing");
    refused("[1, 2]", "factors.json: expected an object with short_factor and long_factor, got an array of 2");
    refused("{\"rope_type\": \"yarn\", \"factor\": 2}", "factors.json: expected rope_type longrope");
    const std::string both = "\"short_factor\": " + good + ", \"long_factor\": " + good;
    refused("{" + both + ", \"factor\": 0.5}", "expected a factor of at least 1, got 0.5");
    refused("{" + both + ", \"original_max_position_embeddings\": 0}", "an integer from 1");
    refused("{" + both + ", \"beta_fast\": 1}", "'beta_fast'");
    // the original length of a checkpoint is known; that of a new model is what the file says
    write_file(file, "{" + both + ", \"original_max_position_embeddings\": 8}");
    check_refused(place, {load, {"expected original_max_position_embeddings 16", "got 8"}});
    write_file(place / "one.json", "{" + both + ", \"original_max_position_embeddings\": 1}");
    check_refused(place, {base.set("--rope_scaling", "longrope:" + place / "one.json"), {"at least 2 tokens, got 1"}});
    REQUIRE(place.run(base.set("--rope_scaling", "longrope:" + file).set("--out", place / "new")).code == 0);
    const Json stored = config_of(step_dir(place / "new", 12)).at("rope_scaling");
    CHECK(stored.at("original_max_position_embeddings") == 8);
    CHECK(stored.at("factor") == 2);
    TempDir::remove(file);
    check_refused(place, {load, {"factors.json"}});
    check_refused(place, {base.with("--rope_scaling longrope"), {"expected longrope:FILE"}});
    check_refused(place, {base.with("--pos cable --rope_scaling longrope:x"), {"only rope can be stretched"}});
}

TEST_CASE("run: a checkpoint of an earlier formula is refused", "[run][P23]") {
    Place place;
    for (const auto& [pos, changed] : {std::pair<const char*, bool>{"bam", true}, {"ssmax+alibi", true},
                                       {"bam,none", true}, {"ssmax", false}, {"ssmax+rope", false}}) {
        INFO(pos);
        const std::string out = place / pos;
        REQUIRE(place.run(place.base.set("--pos", pos).set("--out", out)).code == 0);
        const std::string path = step_dir(out, 12) + "/config.json";
        Json config = config_of(step_dir(out, 12));
        CHECK(config.contains("encoding_version") == changed);
        place.evaluate(step_dir(out, 12), "");
        if (!changed) { continue; }
        for (const Json& version : {Json(), Json(1)}) {
            config["encoding_version"] = version;
            if (version.is_null()) { config.erase("encoding_version"); }
            write_file(path, json_text(config));
            remove((step_dir(out, 12) + "/manifest.json").c_str());
            const Flags use = Flags().set("--load", step_dir(out, 12)).set("--generate", "a");
            check_refused(place, {use, {"encoding_version"}});
        }
    }
}

TEST_CASE("run: rope's base belongs to the checkpoint", "[run][rope_scaling]") {
    Place place;
    const Flags base = place.base.without("--out").with("--model 1,2,32 --T 16 --lr 1e-2");
    REQUIRE(place.run(base.with("--pos rope").set("--out", place / "short")).code == 0);
    const std::string old = step_dir(place / "short", 12);
    CHECK(config_of(old).at("rope_theta") == 10000);
    struct Use { std::string out, err; Json record; };
    const auto evaluate = [&](const std::string& step, const char* flags) {
        const std::string log = place / "use";
        const Outcome o = place.evaluate(step, "--eval_lengths 48 --out " + log + " " + flags);
        return Use{o.out, o.err, of_kind(json_lines(log + "/log.jsonl"), "extrapolation").back()};
    };
    // 1 evaluated with another base, which is printed and logged; the checkpoint's own changes nothing
    const Use plain = evaluate(old, ""), same = evaluate(old, "--rope_theta 10000");
    const Use other = evaluate(old, "--rope_theta 50");
    CHECK(same.record == plain.record);
    CHECK(!contains(same.err, " as in "));
    CHECK(!plain.record.contains("rope_theta"));
    CHECK(other.record.at("rope_theta") == 50);
    CHECK(other.record.at("loss") != plain.record.at("loss"));
    CHECK(contains(other.out, "rope:theta=50,p=1,clock=token"));
    CHECK(contains(other.err, "--rope_theta 50, not 10000 as in " + old));
    // 2 trained on with it: its checkpoints have it
    const std::string out = place / "long";
    const Flags tune = base.without("--model").set("--load", old).with("--rope_theta 50").set("--out", out);
    REQUIRE(place.run(tune).code == 0);
    const Json config = config_of(step_dir(out, 12));
    CHECK(config.at("rope_theta") == 50);
    CHECK(config.at("position").at("theta") == 50);
    const Use kept = evaluate(step_dir(out, 12), "");
    CHECK(!kept.record.contains("rope_theta"));
    CHECK(evaluate(step_dir(out, 12), "--rope_theta 50").record == kept.record);
    CHECK(evaluate(step_dir(out, 12), "--rope_theta 10000").record.at("loss") != kept.record.at("loss"));
    // 3 resumed with and without the flag to the same bits; another base is refused
    const auto unbroken = bits(step_dir(out, 12));
    for (const Flags& resume : {tune.without("--load").with("--resume 1"),
                                tune.without("--load").without("--rope_theta").with("--resume 1")}) {
        TempDir::remove(step_dir(out, 12));
        REQUIRE(place.run(resume).code == 0);
        check_same(unbroken, bits(step_dir(out, 12)));
        const Flags changed = resume.without("--rope_theta").with("--rope_theta 60");
        check_refused(place, {changed, {"--rope_theta 60, not 50 as in", "--allow_change rope_theta"}});
        CHECK(place.run(changed.with("--allow_change rope_theta")).code == 0);
    }
    // 4 a new model, and one whose layers have ropes of several bases
    REQUIRE(place.run(base.with("--pos rope:theta=50").set("--out", place / "key")).code == 0);
    REQUIRE(place.run(base.with("--pos rope --rope_theta 50").set("--out", place / "flag")).code == 0);
    check_same(bits(step_dir(place / "key", 12)), bits(step_dir(place / "flag", 12)));
    const Flags two = base.without("--model").with("--model 2,2,32");
    REQUIRE(place.run(two.with("--pos rope+cable,rope:theta=5").set("--out", place / "two")).code == 0);
    CHECK(!config_of(step_dir(place / "two", 12)).contains("rope_theta"));
    const Use both = evaluate(step_dir(place / "two", 12), "--rope_theta 50");
    CHECK(contains(both.out, "cable+rope:theta=50,p=1,clock=token,rope:theta=50,p=1,clock=token"));
    CHECK(both.record.at("loss") != evaluate(step_dir(place / "two", 12), "").record.at("loss"));
}

TEST_CASE("run: a base that does not fit the model is refused", "[run][rope_scaling]") {
    Place place;
    REQUIRE(place.run(place.base.with("--pos rope").set("--out", place / "plain")).code == 0);
    REQUIRE(place.run(place.base.with("--pos alibi").set("--out", place / "alibi")).code == 0);
    const Flags a = Flags().with("--generate a --rope_theta 50");
    check_refused(place, {a.set("--load", step_dir(place / "alibi", 12)), {"--rope_theta 50: only rope has a base",
                                                                           "alibi"}});
    check_refused(place, {place.base.with("--rope_theta 50"), {"only rope has a base", "cable"}});
    check_refused(place, {place.base.with("--pos rope:theta=40 --rope_theta 50"), {"--rope_theta 50",
                                                                                   "rope:theta=40"}});
    check_refused(place, {place.base.with("--pos rope --rope_theta -1"), {"--rope_theta", "-1"}});
    check_refused(place, {place.base.with("--pos rope --rope_theta nan"), {"--rope_theta", "nan"}});
    Json j = config_of(step_dir(place / "plain", 12));
    j["rope_theta"] = 500000;
    io_mkdir(place / "edited");
    write_file(place / "edited/model.safetensors", read_file(step_dir(place / "plain", 12) + "/model.safetensors"));
    write_file(place / "edited/config.json", json_text(j));
    check_refused(place, {Flags().set("--load", place / "edited").with("--generate a"),
                          {"edited: rope_theta: expected 10000", "got 500000"}});
}

TEST_CASE("run: what a flag may do to a checkpoint's value", "[run]") {
    Place place;
    const Flags base = place.base.without("--out").with("--model 1,2,32 --T 16 --pos rope");
    REQUIRE(place.run(base.set("--out", place / "old")).code == 0);
    const std::string old = step_dir(place / "old", 12);
    const Flags use = Flags().set("--load", old).with("--generate a --tokens 4");
    // what the weights need is kept
    struct Kept { const char *flags, *now, *was; };
    for (const Kept& k : {Kept{"--model 4,2,32", "--model 4,2,32", "1,2,32"},
                          Kept{"--pos alibi", "--pos alibi:slopes=press", "rope:theta=10000,p=1,clock=token"},
                          Kept{"--pos rope:p=0.5", "--pos rope:theta=10000,p=0.5,clock=token",
                               "rope:theta=10000,p=1,clock=token"},
                          Kept{"--vocab_softmax padded", "--vocab_softmax padded", "used"}}) {
        const std::string flag = std::string(k.flags).substr(0, std::string(k.flags).find(' ') + 1);
        check_refused(place, {use.with(k.flags), {k.now + (": the weights of " + old + " need " + flag + k.was)}});
    }
    // the rest is replaced with a notice; what agrees, and the length, without one
    for (const char* flags : {"--window 5", "--rope_scaling yarn:2", "--rope_theta 50"}) {
        const Outcome o = place.run(use.with(flags));
        CHECK(o.code == 0);
        CHECK(contains(o.err, flags + std::string(", not ")));
    }
    for (const char* flags : {"--T 8", "--model 1,2,32", "--pos rope", "--window 0", "--rope_theta 10000",
                              "--rope_scaling none", "--vocab_softmax used"}) {
        const Outcome o = place.run(use.with(flags));
        CHECK(o.code == 0);
        CHECK(!contains(o.err, " as in "));
    }
    // --resume 1 that finds nothing to resume trains the model of --load, with what the flags replace
    const std::string out = place / "new";
    REQUIRE(place.run(base.without("--model").set("--load", old).with("--rope_theta 50 --resume 1").set("--out", out))
                .code == 0);
    CHECK(config_of(step_dir(out, 12)).at("position").at("theta") == 50);
    // layers in turn whose number does not divide the model's, in a new model and in another program's
    const std::string pos = "rope,none,none", foreign = place / "foreign";
    Json config = config_of(old);
    config.erase("position");
    config["model_type"] = "gpt2";
    for (const char* key : {"auto_map", "rope_theta"}) { config.erase(key); }
    io_mkdir(foreign);
    write_file(foreign + "/config.json", json_text(config));
    write_file(foreign + "/model.safetensors", read_file(old + "/model.safetensors"));
    const Flags turns = base.without("--model").without("--pos").set("--pos", pos);
    check_refused(place, {turns.set("--model", "2,2,32"), {"--pos " + pos, "divides the model's 2, got 3"}});
    check_refused(place, {turns.set("--load", foreign), {"--pos " + pos, "divides the model's 1, got 3"}});
}

TEST_CASE("run: a window belongs to the checkpoint", "[run][mask]") {
    Place place;
    const Flags base = place.base.with("--model 1,2,32 --window 5 --sinks 2");
    const std::string out = place / "out";
    const Outcome o = place.run(base.set("--out", out));
    REQUIRE(o.code == 0);
    CHECK(contains(o.out, "a window of 5 keys, 2 sinks"));
    const Json config = config_of(step_dir(out, 12));
    CHECK(config.at("window") == 5);
    CHECK(config.at("sinks") == 2);
    const auto evaluate = [&](const std::string& flags) { return place.evaluate(step_dir(out, 12), flags); };
    // used without the flags as with them; a different one is accepted with a notice
    const std::string plain = evaluate("").out;
    CHECK(evaluate("--window 5 --sinks 2").out == plain);
    CHECK(evaluate("--window 5 --sinks 2").err.find(" as in ") == std::string::npos);
    const Outcome whole = evaluate("--window 0");
    CHECK(whole.out != plain);
    CHECK(contains(whole.err, "--window 0, not 5 as in " + step_dir(out, 12)));
    CHECK(evaluate("--window 1000").out == whole.out);      // longer than any text
    CHECK(evaluate("--sinks 0").out != plain);
    // layers that take turns: both have it, or only the second one
    CHECK(evaluate("--window 5,5").out == plain);
    const Outcome turns = evaluate("--window 0,5");
    CHECK(contains(turns.err, "--window 0,5, not 5 as in"));
    CHECK(turns.out == whole.out);                          // a single layer: the first of them
    const Flags resume = base.without("--window").without("--sinks").set("--out", out).set("--resume", "1");
    check_kept(place, resume, step_dir(out, 12), resume.set("--window", "6"),
               {"--window 6, not 5 as in", "--allow_change window"});
}

TEST_CASE("run: documents that are kept apart are so in the checkpoint", "[run][mask]") {
    Place place;
    write_file(place / "ids.bin", shard(ids_below(40, 4000), 40, 4000));        // a document is 40 tokens, on average
    const Flags base = place.base.with("--model 1,2,32 --pos sinusoidal --document_mask 1")
                           .set("--train_files", place / "ids.bin").set("--val_files", place / "ids.bin");
    const std::string out = place / "out";
    const Outcome o = place.run(base.set("--out", out));
    REQUIRE(o.code == 0);
    CHECK(contains(o.out, ", documents apart"));
    CHECK(config_of(step_dir(out, 12)).at("document_mask") == 0);
    const auto evaluate = [&](const std::string& flags) {
        return place.evaluate(step_dir(out, 12), "--val_files " + place / "ids.bin" + " " + flags);
    };
    const std::string plain = evaluate("").out;
    CHECK(evaluate("--document_mask 1").out == plain);
    const Outcome whole = evaluate("--document_mask 0");
    CHECK(whole.out != plain);
    CHECK(contains(whole.err, "--document_mask 0, not 1 as in"));
    // data whose documents begin with another token
    write_file(place / "other.bin", header_bytes({20240520, 1, 4000, 40, 7}) + bytes_of(ids_below(40, 4000)));
    check_refused(place, {Flags().set("--load", step_dir(out, 12)).set("--val_files", place / "other.bin")
                              .with("--eval_lengths 24"), {"begin with token 7", "with 0"}});
    const Flags resume = base.without("--document_mask").set("--out", out).set("--resume", "1");
    check_kept(place, resume, step_dir(out, 12), resume.set("--document_mask", "0"),
               {"--document_mask 0, not 1", "--allow_change document_mask"});
}

TEST_CASE("run: a stretch of rope that this project does not know is refused", "[run][rope_scaling]") {
    Place place;
    REQUIRE(place.run(place.base.with("--pos rope").set("--out", place / "plain")).code == 0);
    const std::string old = step_dir(place / "plain", 12), dir = place / "edited";
    io_mkdir(dir);
    write_file(dir + "/model.safetensors", read_file(old + "/model.safetensors"));
    const auto refused = [&](const Json& scaling, const char* message) {
        Json j = config_of(old);
        j["rope_scaling"] = scaling;
        write_file(dir + "/config.json", json_text(j));
        check_refused(place, {Flags().set("--load", dir).with("--generate a"), {"edited", message}});
    };
    refused({{"rope_type", "dynamic"}, {"factor", 2}},
            "expected rope_type linear, ntk, yarn_paper or longrope, got 'dynamic'");
    refused({{"rope_type", "yarn"}, {"factor", 0.5}}, "expected a factor of at least 1, got 0.5");
    refused({{"rope_type", "yarn"}, {"factor", 2}, {"beta_fast", 16}}, "'beta_fast'");
    refused("yarn", "expected an object");
    refused({{"rope_type", "longrope"}, {"factor", 2}, {"short_factor", {1, 2}}, {"long_factor", {1, 0}}},
            "long_factor: expected numbers of at least 1e-290, got 0 as number 2");
    refused({{"rope_type", "yarn"}, {"factor", 2}, {"long_factor", {1, 2}}}, "'long_factor'");
}

TEST_CASE("run: the rows that a softmax sees belong to the checkpoint", "[run][vocab_softmax]") {
    Place place;
    write_file(place / "ids.bin", shard(ids_below(300, 4000), 300, 4000));
    const Flags base = place.base.set("--train_files", place / "ids.bin").set("--val_files", place / "ids.bin");
    const Flags padded = base.with("--vocab_softmax padded").set("--out", place / "padded");
    REQUIRE(place.run(padded).code == 0);
    REQUIRE(place.run(base.set("--out", place / "used")).code == 0);
    const std::string dir = step_dir(place / "padded", 12), used = step_dir(place / "used", 12);
    const Json j = config_of(dir);
    CHECK((j.at("vocab_size") == 384 && j.at("vocab_used") == 300 && j.at("vocab_softmax") == "padded"));
    CHECK((config_of(used).at("vocab_size") == 300 && !config_of(used).contains("vocab_softmax")));
    CHECK(bits(dir).at("model.safetensors") != bits(used).at("model.safetensors"));
    // used, and resumed, without the flag
    const Flags use = Flags().set("--val_files", place / "ids.bin").with("--eval_lengths 32 --threads 2");
    const Outcome plain = place.run(use.set("--load", dir));
    CHECK(plain.code == 0);
    CHECK(place.run(use.set("--load", dir).with("--vocab_softmax padded")).out == plain.out);
    check_kept(place, padded.without("--vocab_softmax").set("--resume", "1"), dir,
               use.set("--load", used).with("--vocab_softmax padded"), {"--vocab_softmax padded", "used"});
    check_refused(place, {use.set("--load", dir).with("--vocab_softmax used"), {"--vocab_softmax used", "padded"}});
}

TEST_CASE("run: a directory that cannot be written to, or is in use", "[run]") {
    Place place;
    write_file(place / "file", "not a directory");
    check_refused(place, {place.base.set("--out", place / "file"), {"file", "cannot create directory"}});
    check_refused(place, {place.base.set("--out", place / "file/out"), {"file", "cannot create directory"}});
    CHECK(read_file(place / "file") == "not a directory");
    io_mkdirs(place / "odd/.lock");
    check_refused(place, {place.base.set("--out", place / "odd"), {"odd", "not writable"}});

    Process first(place.program, place.base.with("--steps 1000000 --checkpoint_every 1000000").words(),
                  place / "first");
    first.wait_for_lines(place.out() + "/main.log", 3);
    REQUIRE(first.running());
    const Refusal second = {place.base.set("--checkpoint_every", "1"),
                            {"out is in use", strprintf("pid %d", (int)first.pid), "--out"}};
    check_refused(place, second);
    check_refused(place, {second.flags.set("--resume", "1"), {"out is in use"}});
    kill(first.pid, SIGTERM);
    CHECK(first.wait().code == EXIT_INTERRUPTED);
    check_each_step_once(place.out(), (int)losses(place.out()).size());
}

// ----------------------------------------------------------------------------------------------------------
// damage

TEST_CASE("run: an old checkpoint goes on", "[run][P23]") {
    check_old_checkpoint("train_gpt2");
}

TEST_CASE("run: a loss that is not finite stops the run and reaches no checkpoint", "[run][P14]") {
    Place place;
    const Outcome o = place.run(place.base.with("--steps 60 --checkpoint_every 5 --lr 1e30 --schedule constant"));
    CHECK(o.code == EXIT_DIVERGED);
    CHECK(contains(o.err, strprintf("%d updates in a row were skipped, the last at step %d: ", MAX_BAD_STEPS,
                                    MAX_BAD_STEPS + 1)));
    CHECK(contains(o.err, "non-finite"));
    CHECK(contains(o.out, "SKIPPED: non-finite loss"));
    check_each_step_once(place.out(), MAX_BAD_STEPS + 1);
    const std::vector<Json> train = of_kind(json_lines(place.out() + "/log.jsonl"), "train");
    CHECK_FALSE(train[0].contains("skipped"));
    CHECK(train[1].at("loss").is_null());
    CHECK(contains(train[1].at("skipped").get<std::string>(), "non-finite loss"));
    for (int step : {5, 10, 15, 20}) {
        const std::string dir = step_dir(place.out(), step);
        size_t bad = 0;
        for (const char* name : {"/model.safetensors", "/optimizer_0.state"}) {
            for (float x : values_of(dir + name)) { bad += !std::isfinite(x); }
            CHECK(read_file(dir + name) == read_file(step_dir(place.out(), 5) + name));     // skipped: unchanged
        }
        CHECK(bad == 0);
    }

}

TEST_CASE("run: weights that are not finite, and weights too large, have no use", "[run]") {
    Place place;
    // without 20 skipped updates in a row, the last validation says so
    const Outcome few = place.run(place.base.with("--steps 6 --lr 1e30 --schedule constant")
                                      .set("--out", place / "few"));
    CHECK(few.code == EXIT_DIVERGED);
    CHECK(contains(few.err, "warning: before step 5: the loss at T = 32: expected finite numbers, got "));
    CHECK(contains(few.err, "error: the loss at T = 32: expected finite numbers, got "));
    CHECK(of_kind(json_lines(place / "few/log.jsonl"), "val").size() == 1);
    CHECK(path_exists(step_dir(place / "few", 6)));

    // any use of these weights, which are finite but huge, and of weights with a NaN or an infinity
    write_file(place / "choices.bin", choices(12));
    const auto check_no_use = [&](const std::string& model, const std::string& said) {
        const Flags use = Flags().set("--load", model).set("--val_files", place / "val.txt");
        for (const Flags& flags : {use.set("--generate", "a"), use.with("--eval_lengths 16 --curve --token_losses"),
                                   use.set("--hellaswag", place / "choices.bin"), use.with("--dump_bias 0,0 --T 8")}) {
            const Outcome p = place.run(flags.set("--out", place / "use"));
            INFO(flags.words()[4] << ": " << p.err);
            CHECK(p.code == EXIT_DIVERGED);
            CHECK(contains(p.err, said));
        }
        for (const std::string& name : path_exists(place / "use") ? list_directory(place / "use") : Names()) {
            CHECK((contains(name, ".log") || name == "log.jsonl"));
            CHECK(read_file(place / "use/" + name).empty());
        }
    };
    check_no_use(step_dir(place / "few", 6), "expected finite numbers, got ");
    REQUIRE(place.run(place.base.set("--out", place / "good").set("--steps", "6")).code == 0);
    const std::string good = step_dir(place / "good", 6), dir = place / "bad";
    io_mkdirs(dir);
    write_file(dir + "/config.json", read_file(good + "/config.json"));
    std::string bytes = read_file(good + "/model.safetensors");
    for (const float bad : {NAN, -INFINITY}) {
        memcpy(&bytes[bytes.size() - 8], &bad, 4);
        write_file(dir + "/model.safetensors", bytes);
        const std::string said = strprintf("bad/model.safetensors: transformer.h.1.attn.cable.s.bias: element 0: "
                                           "expected a finite weight, got %g", bad);
        check_no_use(dir, said);
        const Outcome p = place.run(place.base.set("--load", dir).set("--out", place / "out2").without("--model"));
        CHECK(p.code == EXIT_DIVERGED);
        CHECK(contains(p.err, said));
    }
}

// Overwrites c_c of a head in a copy of a checkpoint's weights, at `path`.
void set_cable_bias(const std::string& path, const std::string& layer, int head, float value) {
    std::string bytes = read_file(path);
    uint64_t header = 0;
    memcpy(&header, bytes.data(), 8);
    const Json tensor = Json::parse(bytes.substr(8, header)).at("transformer.h." + layer + ".attn.cable.c.bias");
    const size_t at = 8 + header + tensor.at("data_offsets").at(0).get<size_t>() + sizeof(float) * (size_t)head;
    memcpy(&bytes[at], &value, sizeof(value));
    write_file(path, bytes);
}

TEST_CASE("run: heads whose sum never moves are counted at every validation", "[run]") {
    Place place;
    // 3000 bytes are no multiple of T: the last window is short, and padding must not count
    write_file(place / "long.txt", words(3000, 5));
    const Flags base = place.base.with("--steps 2 --val_every 1 --val_batches -1 --lr 0").set("--threads", "2")
        .set("--val_files", place / "long.txt");
    REQUIRE(place.run(base.set("--pos", "kcable")).code == 0);
    for (const Json& val : of_kind(json_lines(place.out() + "/log.jsonl"), "val")) {
        CHECK(val.at("dead_heads") == 0.0);
    }
    const std::string dir = place / "planted";
    io_mkdirs(dir);
    for (const char* name : {"/config.json", "/model.safetensors"}) {
        write_file(dir + name, read_file(step_dir(place.out(), 2) + name));
    }
    set_cable_bias(dir + "/model.safetensors", "1", 0, -1000.0f);
    const Outcome o = place.run(base.without("--model").set("--load", dir).set("--out", place / "on"));
    REQUIRE(o.code == 0);
    CHECK(contains(o.out, " | 25.0% of heads dead\n"));
    const std::vector<Json> val = of_kind(json_lines(place / "on/log.jsonl"), "val");
    REQUIRE(val.size() == 3);
    for (const Json& j : val) { CHECK(j.at("dead_heads") == 0.25); }
    for (const char* pos : {"grape_q", "cable_v1", "cable_signed", "rope", "alibi"}) {
        const std::string out = place / pos;
        REQUIRE(place.run(base.set("--pos", pos).set("--out", out)).code == 0);
        CHECK_FALSE(contains(read_file(out + "/log.jsonl"), "dead_heads"));
    }
}

TEST_CASE("run: CABLE's bias starts where --pos says, and a checkpoint keeps that", "[run]") {
    Place place;
    const auto start = [&](const char* pos, const char* out) {
        REQUIRE(place.run(place.base.with("--steps 1 --lr 0").set("--pos", pos).set("--out", place / out)).code == 0);
        return step_dir(place / out, 1);
    };
    const std::string plain = start("cable", "plain"), open = start("cable:bias=0.25", "open");
    CHECK_FALSE(contains(read_file(plain + "/config.json"), "bias"));
    CHECK(contains(read_file(open + "/config.json"), "\"bias\": 0.25"));
    for (const char* layer : {"0", "1"}) {
        for (int head : {0, 1}) { set_cable_bias(plain + "/model.safetensors", layer, head, 0.25f); }
    }
    CHECK(read_file(plain + "/model.safetensors") == read_file(open + "/model.safetensors"));
    // about 0.5 times ALiBi's slopes, 1/16 and 1/256 of two heads
    const Safetensors weak(start("cable:gate=0.5", "weak") + "/model.safetensors");
    for (const char* layer : {"0", "1"}) {
        float c[2];
        read_f32(weak, std::string("transformer.h.") + layer + ".attn.cable.s.bias", c, {2});
        for (int head : {0, 1}) { CHECK(std::fabs(c[head] - std::log(0.5 / std::pow(16.0, head + 1))) < 1e-6); }
    }
    check_refused(place, {place.base.set("--pos", "cable:bias=0").set("--out", place / "zero"),
                          {"--pos cable:bias=0: bias: expected a positive number, got '0'"}});
}

TEST_CASE("run: a step that is skipped is a step, with its samples and its learning rate", "[run][P14]") {
    Place place;
    // updates too small to change a loss, so that it tells the samples
    const Flags flags = place.base.with("--model 1,2,16 --T 16 --steps 200 --schedule linear --warmup 10 --lr 1e-30")
        .with("--final_lr 0.1 --val_every 0 --checkpoint_every 0");
    REQUIRE(place.run(flags).code == 0);
    REQUIRE(place.run(flags.set("--skip_loss_z", "1").set("--out", place / "skipping")).code == 0);
    const auto train = [](const std::string& out) { return of_kind(json_lines(out + "/log.jsonl"), "train"); };
    const std::vector<Json> all = train(place.out()), some = train(place / "skipping");
    REQUIRE((all.size() == 200 && some.size() == 200));
    int skipped = 0;
    for (size_t i = 0; i < 200; i++) {
        INFO("step " << i + 1);
        skipped += some[i].contains("skipped");
        CHECK(some[i].at("loss") == all[i].at("loss"));
        CHECK(some[i].at("lr") == all[i].at("lr"));
    }
    CHECK(skipped >= 3);
}

TEST_CASE("run: a gradient longer than --clip is cut to it, exactly, and a shorter one is left alone", "[run][clip]") {
    Place place;
    // the norm of the gradient that the first update has seen: its m is (1 - beta1) times that
    const auto first = [&](double clip, double* norm) {
        const std::string out = place / strprintf("clip%g", clip);
        REQUIRE(place.run(place.base.with("--steps 1 --checkpoint_every 1 --val_every 0").set("--out", out)
            .set("--clip", strprintf("%.17g", clip))).code == 0);
        *norm = of_kind(json_lines(out + "/log.jsonl"), "train")[0].at("norm").get<double>();
        const Safetensors file(step_dir(out, 1) + "/optimizer_0.state");
        double sum = 0;
        for (const SafetensorsEntry& e : file.entries) {
            if (!starts_with(e.name, "m.")) { continue; }
            std::vector<float> m(e.elements);
            read_f32(file, e.name, m.data(), e.shape);
            for (float x : m) { sum += (double)x * x; }
        }
        return std::sqrt(sum) / (double)(1.0f - 0.9f);
    };
    double norm = 0, said = 0;
    const double rounding = 4 * FLT_EPSILON / 2;            // of the scale, and of each element's two products and norm
    CHECK(std::fabs(first(0, &norm) / norm - 1) <= rounding);
    REQUIRE(norm > 0);
    for (double part : {0.5, 0.01}) {
        CHECK(std::fabs(first(part * norm, &said) / (part * norm) - 1) <= rounding);
        CHECK(said == norm);                                // what is logged is not cut
    }
    CHECK(std::fabs(first(1.5 * norm, &said) / norm - 1) <= rounding);
}

TEST_CASE("run: a damaged checkpoint is passed over", "[run][P6]") {
    Place place;
    REQUIRE(place.run(place.base).code == 0);
    const auto whole = bits(step_dir(place.out(), 12));
    const Flags resume = place.base.set("--resume", "1");
    for (const char* name : {"model.safetensors", "optimizer_0.state", "state.json", "config.json",
                             "manifest.json"}) {
        INFO(name);
        const std::string path = step_dir(place.out(), 12) + "/" + name, bytes = read_file(path);
        write_file(path, flipped(bytes, bytes.size() / 2));
        const Outcome o = place.run(resume);
        CHECK(o.code == 0);
        CHECK(contains(o.err, step_dir(place.out(), 12) + " is bad"));
        CHECK(contains(o.err, "falling back to " + step_dir(place.out(), 6)));
        CHECK(contains(o.out, "resumed from " + step_dir(place.out(), 6)));
        check_same(whole, bits(step_dir(place.out(), 12)));                         // replaced by a good one
        check_each_step_once(place.out(), 12);
    }
    // killed while it was replacing a checkpoint: the one set aside is the newest
    io_rename(step_dir(place.out(), 12), place.out() + "/.old_step_00000012");
    const Outcome o = place.run(resume);
    CHECK(o.code == 0);
    CHECK(contains(o.out, "resumed from " + step_dir(place.out(), 12)));
    check_same(whole, bits(step_dir(place.out(), 12)));

    const std::string older = step_dir(place.out(), 6), newer = step_dir(place.out(), 12);
    for (const std::string& dir : {older, newer}) { resize_file(dir + "/model.safetensors", 1000); }
    check_refused(place, {resume, {"none of its 2 checkpoints is good", older, newer}});
    CHECK(path_exists(newer + "/model.safetensors"));
}

// ----------------------------------------------------------------------------------------------------------
// looking and using

TEST_CASE("run: the console keeps to 100 columns and prints no control characters", "[run]") {
    Place place;
    const Flags flags =
        place.base.with("--lr 0 --steps 140 --val_every 70 --sample_every 140 --tokens 300")
            .with("--checkpoint_every 0");
    const Outcome o = place.run(flags);
    REQUIRE(o.code == 0);
    std::vector<std::string> steps, validations;
    for (const std::string& line : lines_of(o.out)) {
        INFO(line);
        const bool step = line.compare(0, 5, "step ") == 0;
        if (step && contains(line, " | loss ")) { steps.push_back(line.substr(0, line.find(" |"))); }
        if (step && contains(line, " | val loss ")) { validations.push_back(line.substr(0, line.find(" |"))); }
        if (step || line.compare(0, 6, "flags ") == 0) {
            CHECK((line.size() <= 100 || contains(line, " bytes) ...")));    // the path of a deep directory
        }
    }
    CHECK((steps.size() == 140 && steps.front() == "step    1/140" && steps.back() == "step  140/140"));
    CHECK(validations == std::vector<std::string>{"step    0/140", "step   70/140", "step  140/140"});
    check_each_step_once(place.out(), 140);
    CHECK(o.out.find(" +nan") == std::string::npos);
    size_t control = 0;
    for (const char c : o.out) { control += (unsigned char)c < 32 && c != '\n' && c != '\t'; }
    CHECK(control == 0);
    CHECK(contains(o.out, "\\x"));                              // the untrained model did write some
}

size_t controls(const std::string& text) {                          // except line ends
    size_t n = 0;
    for (size_t i = 0; i < text.size(); i++) {
        const unsigned char c = (unsigned char)text[i];
        const bool after_c2 = i > 0 && (unsigned char)text[i - 1] == 0xC2;
        n += (c < 32 && c != '\n') || c == 127 || (c >= 0x80 && c < 0xA0 && after_c2);
    }
    return n;
}

TEST_CASE("run: control characters and long texts of files and flags do not reach the terminal", "[run][terminal]") {
    Place place;
    REQUIRE(place.run(place.base.with("--steps 1 --checkpoint_every 1")).code == 0);
    const std::string evil = "\x1b[2J\x1b]0;title\x07\r\b\t\x0b\x0c\x0e\x0f\x7f\x01\xC2\x9B[31m\nerror: x";
    std::string shown = "\\x1b[2J\\x1b]0;title\\x07\\x0d\\x08";
    const std::string long_text(100000, 'x'), good = step_dir(place.out(), 1);
    const auto refused = [&](const Flags& flags, const std::string& part) {
        const Outcome o = place.run(flags);
        INFO(o.err.substr(0, 3000));
        CHECK(o.code == EXIT_BAD_INPUT);
        CHECK(controls(o.out) + controls(o.err) == 0);
        CHECK(contains(o.err, part));
        CHECK(!contains(o.err, "\nerror: x"));                           // a line that a file made up
        CHECK(o.err.size() < 4000);
    };
    // 1 names of tensors, types and metadata in a file's header
    const std::string bad = place / "bad";
    io_mkdirs(bad);
    for (const char* name : {"config.json", "model.safetensors"}) {
        write_file(bad + "/" + name, read_file(good + "/" + name));
    }
    const auto one = [](float* out, size_t, size_t n) { std::fill(out, out + n, 1.0f); };
    const Flags load = Flags().set("--load", bad).with("--generate a --threads 1 --tokens 1");
    for (const std::string& name : {evil, evil + long_text}) {
        const std::string text = read_file(good + "/model.safetensors");
        write_safetensors(bad + "/model.safetensors", {{name, {1}, one}});
        refused(load, "lacks transformer.wte.weight");
        const std::string header = json_text(Json{{name, {{"dtype", name}, {"shape", {1}}, {"data_offsets", {0, 4}}}}});
        std::string size(8, '\0');
        for (size_t i = 0; i < 8; i++) { size[i] = (char)(header.size() >> 8 * i); }
        write_file(bad + "/model.safetensors", size + header + "1234");
        refused(load, "unknown dtype " + shown);
        write_file(bad + "/model.safetensors", text);
        // 2 config.json
        for (const char* key : {"model_type", "n_layer", "position"}) {
            Json config = parse_json(read_file(good + "/config.json"), "config");
            config[key] = name;
            write_file(bad + "/config.json", json_text(config));
            refused(load, bad);
            if (strcmp(key, "position") != 0) { continue; }
            config[key] = {{"name", name}};
            write_file(bad + "/config.json", json_text(config));
            refused(load, shown);
        }
        write_file(bad + "/config.json", read_file(good + "/config.json"));
        // 3 flags: names of files and values
        const std::string part = name.size() < 1000 ? shown : "bytes";
        for (const char* flag : {"--load", "--tokenizer", "--train_files", "--val_files", "--hellaswag", "--pos",
                                 "--model", "--schedule", "--lr", "--eval_lengths", "--dump_bias"}) {
            refused(place.base.set(flag, name).without("--out"), part);
        }
        refused(place.base.set("--" + name, "1"), part);
    }
    // 4 a directory of such a name works
    const std::string odd = place / ("odd" + evil.substr(0, 40));
    const Outcome o = place.run(place.base.set("--out", odd).set("--checkpoint_every", "6"));
    CHECK(o.code == 0);
    CHECK(controls(o.out) + controls(o.err) == 0);
    CHECK(contains(o.out, "saved " + place.path + "/odd" + shown));
    const Outcome again = place.run(place.base.set("--out", odd).with("--checkpoint_every 6 --resume 1"));
    CHECK(again.code == 0);
    CHECK(controls(again.out) + controls(again.err) == 0);
}

TEST_CASE("run: the banner shows what was changed and what the user may not expect", "[run]") {
    Place place;
    const Flags check_run = place.base.set("--check");
    const auto banner = [&](const Flags& flags) {               // with each of its lines in one piece
        std::string s = place.run(flags).out;
        const std::string wrapped_at = "\n" + std::string(18, ' ');
        for (size_t at; (at = s.find(wrapped_at)) != std::string::npos;) { s.replace(at, wrapped_at.size(), " "); }
        return s;
    };
    const std::string plain = banner(check_run);
    INFO(plain);
    CHECK(contains(plain, "--lr 0.001 "));
    CHECK_FALSE(contains(plain, "--beta1"));                    // has its default
    CHECK_FALSE(contains(plain, "note "));                      // none against defaults
    const Flags cosine = check_run.with("--schedule cosine");
    CHECK(contains(banner(cosine),
                   "note              --schedule cosine with --final_lr 1 keeps the learning rate constant; "));
    CHECK_FALSE(contains(banner(cosine.with("--final_lr 0.1")), "note "));
    CHECK_FALSE(contains(banner(check_run.with("--schedule constant")), "note "));
    CHECK(contains(banner(cosine.with("--warmup 5")), "constant after the warm-up; "));
    CHECK_FALSE(contains(plain, "tensor-core kernel"));
    CHECK_FALSE(contains(banner(check_run.with("--pos fire")), "tensor-core kernel"));
}

TEST_CASE("run: a missing data set names the script that makes it", "[run]") {
    Place place;
    const Flags flags = place.base.set("--train_files", place / "data/tinyshakespeare/tiny_shakespeare_train.bin");
    check_refused(place, {flags, {"--train_files", "tiny_shakespeare_train.bin: no such file",
                                  ": python3 data/tinyshakespeare.py"}});
    check_refused(place, {place.base.set("--val_files", place / "data/wikitext103/*_val_*.bin"),
                          {"--val_files", ": python3 data/wikitext.py"}});
    check_refused(place, {place.base.set("--val_files", place / "other.bin"), {"--val_files", "no file matches"}});
}

TEST_CASE("run: no validation data is not an error of the default file", "[run]") {
    Place place;
    const Flags trains = place.base.without("--val_files");
    check_refused(place, {trains, {"no data to validate on: give --val_files, or --val_every 0"}});
    CHECK_FALSE(contains(place.run(trains).err, "tinyshakespeare"));
    CHECK(place.run(trains.set("--val_every", "0").set("--check")).code == 0);
    REQUIRE(place.run(place.base).code == 0);
    check_refused(place, {Flags().set("--load", place.out()).with("--eval_lengths 16"),
                          {"no data to evaluate: give --val_files"}});
}

TEST_CASE("run: a trainer's process has its name", "[run]") {
    Place place;
    const std::string log = place / "log", name = place.program.substr(place.program.rfind('/') + 1);
    std::string shown;
    // without the variables that keep it from starting itself again
    std::vector<std::string> words = place.base.with("--steps 1000000 --checkpoint_every 0").words();
    words.insert(words.begin(), {"-u", "OMP_WAIT_POLICY", "-u", "GOMP_SPINCOUNT", place.program});
    const Process p("/usr/bin/env", words, log);
    p.wait_for_lines(log + ".out", 12);
    INFO(read_file(p.err));
    REQUIRE(p.running());
    std::ifstream("/proc/" + std::to_string(p.pid) + "/comm") >> shown;
    CHECK(shown == name.substr(0, 15));
}

TEST_CASE("run: limits of memory, threads no machine has, and batches that fit in none", "[run][limits]") {
    Place place;
    const auto limited = [&](const char* kilobytes, const Flags& flags) {
        Process p("/bin/sh", {"-c", std::string("ulimit -v ") + kilobytes + " && exec " + place.command(flags)},
                  place / "limited");
        return p.wait();
    };
    // 1 little address space is enough; with none for its threads, a run says so
    CHECK(limited("150000", Flags().set("--help")).code == 0);
    const Outcome little = limited("150000", place.base.set("--out", place / "little"));
    INFO(little.err.substr(0, 1000));
    CHECK((little.code == 0 || (little.code == EXIT_OUT_OF_MEMORY && contains(little.err, "cannot allocate")) ||
           (little.code == EXIT_OUT_OF_MEMORY && contains(little.err, "threads"))));
    CHECK(limited("4000000", place.base).code == 0);
    // 2 what the limit leaves is what the run may take
    const Outcome large = limited("4000000", place.base.with("--model 4,8,512 --T 256 --B 256").without("--total_batch")
                                                 .set("--out", place / "large"));
    CHECK(large.code == EXIT_OUT_OF_MEMORY);
    CHECK(contains(large.err, "are available"));
    // 3 threads
    check_refused(place, {place.base.set("--threads", "100000"), {"--threads: expected at most", "got 100000"}});
    check_refused(place, {place.base.set("--threads", "2147483647"), {"--threads: expected at most"}});
    // 4 the ids of a step are host memory, too
    const Outcome batch = place.run(place.base.with("--total_batch 2147483520 --check --B 1"));
    CHECK((batch.code == EXIT_OUT_OF_MEMORY || batch.code == 0));
    const Outcome ids = limited("4000000", place.base.with("--total_batch 2147483520 --check --B 4"));
    CHECK(ids.code == EXIT_OUT_OF_MEMORY);
    CHECK(contains(ids.err, "--total_batch"));
}

TEST_CASE("run: a stdout that takes nothing", "[run]") {
    Place place;
    const auto in_full = [&](const Flags& f, const std::string& name) {
        return Process("/bin/sh", {"-c", place.command(f) + " > /dev/full"}, place / name).wait();
    };
    REQUIRE(place.run(place.base).code == 0);
    const Flags load = Flags().set("--load", step_dir(place.out(), 12));
    const Flags uses[] = {place.base.without("--out").set("--check"), Flags().set("--help"),
                          load.set("--generate", "the"),
                          load.with("--eval_lengths 16").set("--val_files", place / "val.txt")};
    for (const Flags& use : uses) {                             // 1 what is to be printed, and cannot be
        INFO(use.words().back());
        const Outcome o = in_full(use, "full.log");
        INFO(o.err);
        CHECK(o.code == EXIT_BAD_INPUT);
        CHECK(contains(o.err, "cannot write to stdout"));
    }
    CHECK(in_full(place.base.set("--out", place / "full"), "train.log").code == 0);             // 2 training
    CHECK(path_exists(step_dir(place / "full", 12)));
}

TEST_CASE("run: a control group's memory and cores are the machine's", "[run]") {
    Place place;
    write_file(place / "in.sh", "at=/sys/fs/cgroup; mount -t tmpfs groups $at && mkdir $at/memory $at/cpu || exit 77\n"
                                "echo 100000000 | tee $at/memory.max >$at/memory/memory.limit_in_bytes\n"
                                "echo 10000000 | tee $at/memory.current >$at/memory/memory.usage_in_bytes\n"
                                "echo 150000 >$at/cpu/cpu.cfs_quota_us; echo 100000 >$at/cpu/cpu.cfs_period_us\n"
                                "echo 150000 100000 >$at/cpu.max; unset OMP_NUM_THREADS; exec \"$@\"\n");
    const auto in_group = [&](const Flags& flags) {
        Names words = flags.words();
        words.insert(words.begin(), {"-m", "sh", place / "in.sh", place.program});
        return Process("/usr/bin/unshare", words, place / "group").wait();
    };
    const Flags check = place.base.without("--threads").set("--check");
    const Outcome small = in_group(check);
    if (small.code == 77 || small.code == 127 || contains(small.err, "unshare: ")) {
        WARN("SKIPPED: cannot mount a control group: " << small.err);
        return;
    }
    CHECK(small.code == 0);
    CHECK(contains(small.err, "90.0 MB available in its control group"));
    cpu_set_t cores;
    const bool two = sched_getaffinity(0, sizeof(cores), &cores) == 0 && CPU_COUNT(&cores) >= 2;
    CHECK(contains(small.out, two ? "CPU, 2 threads for 1.5 cores of its control group" : "CPU, 1 thread, "));
    const Outcome large = in_group(check.with("--model 8,8,256 --B 4"));
    CHECK(large.code == EXIT_OUT_OF_MEMORY);
    CHECK(contains(large.err, "90.0 MB are available in its control group; "));
    CHECK(place.run(check.with("--model 8,8,256 --B 4")).code == 0);
}

TEST_CASE("run: --check and --help", "[run]") {
    Place place;
    const Outcome check_run = place.run(place.base.with("--check --total_batch 256"));
    CHECK(check_run.code == 0);
    for (const char* part : {"wte", "qkvw", "lnfb", "transformer.h.0.attn.cable.c.weight", "attn.c_attn.weight^T"}) {
        INFO(part);
        CHECK(contains(check_run.out, part));
    }
    const size_t C = 32, V = 256;
    const size_t layer = 12 * C * C + 13 * C + 2 * 2 * (C + 1);
    CHECK(contains(check_run.out, strprintf("%zu of them parameters", V * C + 2 * layer + 2 * C)));
    CHECK(contains(check_run.out, "all is well: 12 steps of 256 tokens"));
    const std::string text = read_file(place / "train.txt");
    const size_t per_epoch = (text.size() - 1) / 32 / 8;        // steps of 8 sequences of 32 tokens
    const std::string tokens = strprintf("%zu,%03zu tokens", text.size() / 1000, text.size() % 1000);
    INFO(check_run.out);
    CHECK(contains(check_run.out, strprintf("%s, %zu steps per epoch, 0.", tokens.c_str(), per_epoch)));
    CHECK(contains(check_run.err + check_run.out, "memory: "));
    CHECK_FALSE(path_exists(place.out()));
    const std::string all = std::to_string(32 * 8 * per_epoch);         // without --steps: one epoch, of one step here
    const Outcome epoch = place.run(place.base.without("--steps").with("--check --B 1").set("--total_batch", all));
    CHECK(contains(epoch.out, "all is well: 1 steps of " + all));
    check_refused(place, {place.base.set("--check").set("--val_files", place / "gone"), {"--val_files", "gone"}});
    CHECK(place.run(place.base.with("--check --T 2000000000 --B 1000000")
        .with("--model 1000,1,1024")).code == EXIT_OUT_OF_MEMORY);
    const Outcome help = place.run(Flags().set("--help"));
    CHECK(help.code == 0);
    for (const char* part : {"usage: train_gpt2", "--eval_lengths", "kcable_nw", "-sl",
                             "\ncable.c 1.0.0\ncommit ", ", float32, CPU"}) {
        CHECK(contains(help.out, part));
    }
    for (const std::string& line : lines_of(help.out)) { CHECK((line.size() <= 80 || contains(line, "commit "))); }
    CHECK(place.run(Flags().set("-h")).out == help.out);
}

TEST_CASE("run: perplexity at every length, logged", "[run]") {
    Place place;
    const Flags eval = Flags().set("--val_files", place / "val.txt").with("--threads 2 --eval_lengths 16,32,64,128");
    const uint64_t tokens = words(1200, 2).size() - 1;
    for (const char* pos : {"alibi", "learned"}) {
        INFO(pos);
        const std::string out = place / pos, to = place / (std::string("eval_") + pos);
        REQUIRE(place.run(place.base.set("--pos", pos).set("--out", out)).code == 0);
        const Outcome o = place.run(eval.set("--load", out).set("--out", to).set("--curve"));
        REQUIRE(o.code == 0);
        std::istringstream table(o.out.substr(o.out.find(", trained at 32\n")));
        for (std::string line; std::getline(table, line);) { CHECK(line.size() < 80); }
        const bool bounded = std::string(pos) == "learned";
        const std::vector<Json> found = of_kind(json_lines(to + "/log.jsonl"), "extrapolation");
        REQUIRE(found.size() == (bounded ? 2u : 4u));
        for (size_t i = 0; i < found.size(); i++) {
            const int T = 16 << i;
            CHECK(found[i].at("pos") == pos);
            CHECK(found[i].at("T") == T);
            CHECK(found[i].at("T_train") == 32);
            CHECK(found[i].at("tokens") == tokens);
            CHECK(found[i].at("windows") == ceil_div(tokens, (uint64_t)T));
            const double loss = found[i].at("loss").get<double>(), ppl = found[i].at("ppl").get<double>();
            const int windows = found[i].at("windows").get<int>();
            const std::string row =
                strprintf("%8d %8d %10d %12d %10.4f %10.4f\n", T, T, windows, (int)tokens, loss, ppl);
            CHECK(contains(o.out, row));
        }
        const std::vector<Json> curves = of_kind(json_lines(to + "/log.jsonl"), "curve");
        REQUIRE(curves.size() == found.size());
        CHECK(curves[1].at("loss").size() == 32);
        CHECK(contains(o.out, "learned has no positions beyond 32") == bounded);
        CHECK(list_directory(out).size() == 5);                                     // the run itself is left alone
        // the same figure that validation at the end of training gave, over all of the split
        const Outcome again = place.run(place.base.set("--resume", "1").set("--pos", pos).set("--out", out)
            .set("--val_batches", "-1"));
        REQUIRE(again.code == 0);
        const double val = of_kind(json_lines(out + "/log.jsonl"), "val").back().at("loss").get<double>();
        CHECK(std::fabs(val - found[1].at("loss").get<double>()) <= 1e-6 * val);
    }
    const Outcome both = place.run(place.base.with("--eval_lengths 32 --steps 2"));        // train, then evaluate
    REQUIRE(both.code == 0);
    CHECK(of_kind(json_lines(place.out() + "/log.jsonl"), "extrapolation").size() == 1);
}

TEST_CASE("run: no evaluation and no validation at a length that the text does not have", "[run]") {
    Place place;
    REQUIRE(place.run(place.base).code == 0);
    write_file(place / "32.txt", words(32, 3).substr(0, 32));
    write_file(place / "33.txt", words(33, 3).substr(0, 33));
    const std::string to = place / "to";
    const Flags use = Flags().set("--load", place.out()).set("--out", to).set("--val_files", place / "32.txt")
        .with("--eval_lengths 16,32");
    const std::vector<std::string> said = {"--val_files", "32.txt': expected at least 33 tokens", "T = 32, got 32"};
    for (const char* more : {"", "--check", "--stride 8 --curve", "--dump_bias 0,parts", "--token_losses",
                             "--eval_tokens 99"}) {
        check_refused(place, {use.with(more), said});
    }
    const Flags long_enough = use.set("--val_files", place / "33.txt");
    const Flags nowhere = Flags().set("--load", place.out()).set("--val_files", place / "33.txt");
    check_refused(place, {nowhere.with("--eval_lengths 16 --token_losses"),
                          {"--token_losses: give the directory to write to"}});
    check_refused(place, {long_enough.with("--eval_tokens 31"),
                          {"--eval_tokens: expected at least 32, for a window of --eval_lengths, got 31"}});
    const Flags trains = place.base.set("--val_files", place / "32.txt").set("--out", to);
    check_refused(place, {trains, said});
    check_refused(place, {trains.set("--check"), said});
    CHECK_FALSE(path_exists(to));
    CHECK(place.run(trains.with("--val_every 0 --check")).code == 0);
    CHECK(place.run(trains.with("--check").set("--val_files", place / "33.txt")).code == 0);
    REQUIRE(place.run(long_enough.with("--eval_tokens 32")).code == 0);
    CHECK(of_kind(json_lines(to + "/log.jsonl"), "extrapolation")[1].at("windows") == 1);
}

TEST_CASE("run: a use whose results are not on the disk has failed", "[run]") {
    Place place;
    write_file(place / "choices.bin", choices(12));
    REQUIRE(place.run(place.base).code == 0);
    const Flags use = Flags().set("--load", place.out()).set("--val_files", place / "val.txt");
    int n = 0;
    for (const char* flags : {"--eval_lengths 16,32 --curve", "--eval_lengths 16 --token_losses",
                              "--dump_bias 0,0 --T 8"}) {
        check_lost(place, use.with(flags), place / strprintf("lost%d", n++));
    }
    check_lost(place, use.set("--hellaswag", place / "choices.bin"), place / "choices");
    // only once: what was kept is written at the end
    CHECK(run_with_faults(place, use.with("--eval_lengths 16").set("--out", place / "once"), "write:1:28").code == 0);
    CHECK(of_kind(json_lines(place / "once/log.jsonl"), "extrapolation").size() == 1);
}

TEST_CASE("run: text from a checkpoint, and the samples of a run", "[run]") {
    Place place;
    write_file(place / "ids.bin", shard(ids_below(300, 2000), 300, 2000));
    const Flags ids = place.base.set("--train_files", place / "ids.bin").set("--val_files", place / "ids.bin")
        .set("--tokens", "7");
    const Outcome trained = place.run(ids.set("--sample_every", "6").set("--out", place / "ids"));
    REQUIRE(trained.code == 0);
    CHECK(contains(trained.out, "generating:\n---\n"));
    const Flags use = Flags().set("--load", place / "ids").with("--threads 1 --tokens 9").set("--generate", "5 299");
    const Outcome a = place.run(use), b = place.run(use);
    const Outcome c = place.run(use.set("--seed", "1"));
    REQUIRE(a.code == 0);
    CHECK(a.out.compare(0, 6, "5 299 ") == 0);                                      // stdout has only the text
    std::vector<long> numbers;
    for (const char* at = a.out.c_str(); *at != '\0' && *at != '\n';) {
        char* end = nullptr;
        numbers.push_back(strtol(at, &end, 10));
        at = end;
    }
    CHECK(numbers.size() == 2 + 9);
    CHECK(*std::max_element(numbers.begin(), numbers.end()) < 300);
    CHECK(a.out.back() == '\n');
    CHECK(contains(a.err, "9 tokens, "));
    CHECK(contains(a.err, "tokens/s"));
    CHECK(a.out == b.out);
    CHECK(a.out != c.out);
    check_refused(place, {use.set("--generate", "5 300"), {"--generate", "'300'", "below 300"}});

    REQUIRE(place.run(place.base.with("--lr 3e-2 --steps 60 --final_lr 0.1 --checkpoint_every 60")).code == 0);
    const Flags bytes = Flags().set("--load", place.out()).with("--tokens 40 --threads 2")
        .set("--generate", "what came ");
    const Outcome greedy = place.run(bytes.set("--temperature", "0"));
    CHECK(greedy.out.size() == 10 + 40 + 1);
    CHECK(greedy.out.compare(0, 10, "what came ") == 0);
    // it has learnt which bytes occur
    CHECK(greedy.out.find_first_not_of("abcdefghijklmnopqrstuvwxyz. \n") == std::string::npos);
    CHECK(place.run(bytes.with("--top_k 1 --seed 9")).out == greedy.out);
    CHECK(!contains(greedy.err, "tokens of prompt"));           // only a wait that may seem like a hang is explained
    const Outcome slow = place.run(bytes.with("--tokens 1").set("--generate", std::string(5000, 'a')));
    CHECK(slow.code == 0);
    CHECK(contains(slow.err, "reading 5000 tokens of prompt"));
}

TEST_CASE("run: a prompt from a file is its text, whatever its length", "[run]") {
    Place place;
    write_file(place / "ids.bin", shard(ids_below(300, 2000), 300, 2000));
    const Flags train = place.base.with("--steps 1 --val_every 0 --checkpoint_every 1");
    REQUIRE(place.run(train).code == 0);
    REQUIRE(place.run(train.set("--train_files", place / "ids.bin").set("--out", place / "ids")).code == 0);
    const Flags use = Flags().with("--tokens 5 --threads 1").set("--load", place.out());
    const std::string file = place / "prompt", a(6000, 'a');
    const std::vector<std::vector<std::string>> cases = {       // model, in the file, the same as an argument
        {place.out(), "what came\n", "what came\n"}, {place.out(), "@me", "@@me"},
        {place.out(), a + "\xff", a + "\xff"}, {place.out(), "", "\n"},
        {place / "ids", "5 299\n7\t8\r\n", "5 299 7 8"}};
    for (const auto& c : cases) {
        write_file(file, c[1]);
        const Outcome o = place.run(use.set("--load", c[0]).set("--generate", "@" + file));
        CHECK(o.code == 0);
        CHECK(o.out == place.run(use.set("--load", c[0]).set("--generate", c[2])).out);
    }
    check_refused(place, {use.set("--generate", "@" + file + "s"), {"there is no such file (@@ begins a text"}});
    check_refused(place, {use.set("--generate", "@" + place.path), {"not a regular file"}});
    write_file(file, "version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 5\n");
    check_refused(place, {use.set("--generate", "@" + file), {"a Git LFS pointer"}});
    REQUIRE(truncate((write_file(file, ""), file.c_str()), (16 << 20) + 1) == 0);
    check_refused(place, {use.set("--generate", "@" + file), {"expected a file of at most 16.8 MB"}});
    REQUIRE(truncate(file.c_str(), 8 << 20) == 0);
    const std::string line = place.command(use.set("--generate", "@" + file)) + " 2>&1 >/dev/null | ";
    const std::string said = "grep -q 'a prompt of 8388608 tokens needs .* GB of memory'";
    CHECK(system(("ulimit -v 3000000; " + line + said).c_str()) == 0);
}

TEST_CASE("run: data that is read twice, or trained on and measured on, is named", "[run]") {
    Place place;
    const std::string in = place / "d", other = place / "e";
    const std::string train = in + "/a_train.bin", val = in + "/a_val.bin";
    for (const std::string& dir : {in + "/.hidden", other}) { io_mkdirs(dir); }
    auto ids = ids_below(300, 40000);
    for (const char* name : {"/a_train.bin", "/.a_train.bin", "/.hidden/b_train.bin"}) {
        write_file(in + name, shard(ids, 300, 40000));
    }
    ids.back() = 0;                                             // another shard, with the same beginning
    for (const std::string& path : {val, other + "/copy.bin"}) { write_file(path, shard(ids, 300, 40000)); }
    REQUIRE(symlink(train.c_str(), (other + "/link").c_str()) == 0);
    REQUIRE(link(train.c_str(), (other + "/hard").c_str()) == 0);
    const std::string text = place / "train.txt";
    std::string large(1000000, 'a');                            // alike in the blocks that are looked at first
    write_file(place / "large.txt", large);
    large[100000] = 'b';
    write_file(place / "other.txt", large);
    const std::string both = " of --train_files, so what is measured on it is trained on, too\n";
    const std::vector<std::vector<std::string>> cases = {       // the flags, which file is the same as which
        {in + "/*_train.bin", val, "", ""}, {in + "/*.bin", val, val, val}, {text, text, text, text},
        {in + "/*.bin", other + "/copy.bin", other + "/copy.bin", val},
        {train, other + "/link", other + "/link", train}, {train, other + "/hard", other + "/hard", train},
        {place / "large.txt", place / "other.txt", "", ""}};
    for (const auto& c : cases) {
        const Outcome o = place.run(place.base.set("--train_files", c[0]).set("--val_files", c[1]).with("--check"));
        INFO(c[0] << " " << c[1] << "\n" << o.err);
        CHECK(o.code == 0);
        const std::string said = "warning: --val_files: " + c[2] + " holds the same data as " + c[3] + both;
        CHECK((c[2].empty() ? !contains(o.err, "warning") : o.err.compare(0, said.size(), said) == 0));
    }
    const Flags twice = place.base.set("--train_files", other + "/[hl]*").set("--val_files", val).with("--check");
    CHECK(contains(place.run(twice).err, "--train_files: " + other + "/link holds the same data as " + other +
                                         "/hard of --train_files\n"));
}

// A run on a shard of 260 tokens, with their vocabulary: the bytes, three merges, and <|endoftext|>
struct WithVocabulary : Place {
    Flags ids;                                              // without --tokenizer
    std::string vocab = *this / "given/encoder.json", merges = *this / "given/vocab.bpe";

    WithVocabulary() {
        nlohmann::json j;
        for (int b = 0; b < 256; b++) { j[spelled(b)] = b; }
        j["th"] = 256;
        j["the"] = 257;
        j[spelled(' ') + "the"] = 258;
        j["<|endoftext|>"] = 259;
        io_mkdirs(*this / "given");
        write_file(vocab, j.dump());
        write_file(merges, "#version: 0.2\nt h\nth e\n" + spelled(' ') + " the\n");
        write_file(*this / "ids.bin", shard(ids_below(260, 4000), 260, 4000));
        ids = base.set("--train_files", *this / "ids.bin").with("--val_every 0 --keep 1");
    }
    static std::vector<std::string> names(const std::string& dir) {
        std::vector<std::string> found;
        for (const std::string& name : list_directory(dir)) {
            const bool other = name == "model.safetensors" || name == "optimizer_0.state" || name == "state.json" ||
                               name == "config.json" || name == "cable_hf.py" || name == "manifest.json";
            if (!other) { found.push_back(name); }
        }
        return found;
    }
};

TEST_CASE("run: --generate ends with the text, unless --stop_at_eot 0", "[run][vocabulary]") {
    WithVocabulary place;
    const Flags train = place.ids.set("--tokenizer", place.vocab).with("--steps 1 --checkpoint_every 1 --tokens 900");
    const Outcome samples = place.run(train.with("--sample_every 1"));
    const size_t begin = samples.out.find("---\n") + strlen("---\n");
    CHECK(samples.out.find("<|endoftext|>", begin + 1) != std::string::npos);       // these do not end there
    const Flags use = Flags().set("--load", place.out()).with("--tokens 900 --threads 1").set("--generate", "257");
    const Outcome all = place.run(use.with("--stop_at_eot 0")), one = place.run(use);
    const size_t end = all.out.find("<|endoftext|>");
    REQUIRE((end != std::string::npos && end > 10));
    CHECK(one.out == all.out.substr(0, end) + "\n");
    CHECK((contains(all.err, "900 tokens, ") && contains(one.err, " tokens, up to the end of the text, ")));
    CHECK(place.run(use.without("--generate").with("--generate= --tokens 3")).out.size() > strlen("<|endoftext|>") + 1);
}

TEST_CASE("run: without a tokenizer, texts end with GPT-2's token in GPT-2's vocabulary alone", "[run][vocabulary]") {
    Place place;
    for (int vocab : {300, 50257}) {
        write_file(place / "ids.bin", shard(ids_below(vocab, 100), vocab, 100));
        for (const char* softmax : {"used", "padded"}) {
            INFO(vocab << " " << softmax);
            const std::string out = place / (std::to_string(vocab) + softmax);
            REQUIRE(place.run(place.base.set("--train_files", place / "ids.bin").set("--vocab_softmax", softmax)
                                  .with("--model 1,1,8 --B 1 --steps 1 --val_every 0 --checkpoint_every 1")
                                  .set("--out", out)).code == 0);
            const Json end = vocab == 50257 ? Json(50256) : Json();
            for (const char* key : {"bos_token_id", "eos_token_id"}) {
                CHECK(config_of(step_dir(out, 1)).at(key) == end);
            }
            CHECK(path_exists(step_dir(out, 1) + "/generation_config.json") == !end.is_null());
        }
    }
}

TEST_CASE("run: the tokenizer is read once, and every checkpoint has it by the libraries' names", "[run][vocabulary]") {
    WithVocabulary place;
    const std::string was = read_file(place.vocab), was_merges = read_file(place.merges);
    const std::vector<std::string> wanted = {"generation_config.json", "merges.txt", "tokenizer_config.json",
                                             "vocab.json"};
    // edited and deleted during the run
    {
        const Flags flags = place.ids.with("--steps 400 --checkpoint_every 100 --keep 2");
        Process p(place.program, flags.set("--tokenizer", place.vocab).words(), place / "edited");
        p.wait_for_lines(place.out() + "/log.jsonl", 10);
        write_file(place.vocab, "{\"a\": 0}");
        ::unlink(place.merges.c_str());
        const Outcome o = p.wait();
        INFO(o.err);
        REQUIRE(o.code == 0);
    }
    for (int step : {300, 400}) {
        const std::string dir = step_dir(place.out(), step);
        CHECK(WithVocabulary::names(dir) == wanted);
        CHECK(read_file(dir + "/vocab.json") == was);
        CHECK(read_file(dir + "/merges.txt") == was_merges);
        const Json manifest = parse_json(read_file(dir + "/manifest.json"), "manifest");
        for (const std::string& name : wanted) { CHECK(manifest.at("files").contains(name)); }
        const Json end = parse_json(read_file(dir + "/generation_config.json"), "generation_config");
        CHECK(end.at("eos_token_id") == 259);
        CHECK(config_of(dir).at("eos_token_id") == 259);
        CHECK(config_of(dir).at("bos_token_id") == 259);
    }
    // without --tokenizer, with one checkpoint at a time
    REQUIRE(place.run(place.ids.with("--resume 1 --steps 430 --checkpoint_every 10 --allow_change steps")).code == 0);
    CHECK(list_directory(place.out()).size() == 4);         // .lock, two logs and
    CHECK(WithVocabulary::names(step_dir(place.out(), 430)) == wanted);
    CHECK(read_file(step_dir(place.out(), 430) + "/vocab.json") == was);
    const Flags use = Flags().set("--load", place.out()).with("--tokens 1");
    const Outcome text = place.run(use.set("--generate", "257 110,258"));
    REQUIRE(text.code == 0);
    CHECK(text.out.compare(0, 8, "then the") == 0);
    // one that the run did not begin with
    std::string other = was;
    other.replace(other.find("\"th\""), 4, "\"ht\"");
    write_file(place.vocab, other);
    const Flags go_on = place.ids.with("--resume 1 --steps 440 --allow_change steps");
    check_refused(place, {go_on.set("--tokenizer", place.vocab), {"its tokens are not those of", "leave it out"}});
    write_file(place.vocab, was);
    CHECK(place.run(go_on.set("--tokenizer", place.vocab)).code == 0);
    // damaged: as any other file of the checkpoint
    const std::string stored = step_dir(place.out(), 440) + "/merges.txt";
    write_file(stored, flipped(was_merges, 20));
    check_refused(place, {Flags().set("--load", step_dir(place.out(), 440)).set("--generate", "1"), {"merges.txt"}});
}

TEST_CASE("run: what is not a tokenizer is refused, and an old checkpoint's is read", "[run][vocabulary]") {
    WithVocabulary place;
    REQUIRE(place.run(place.ids.set("--tokenizer", place.vocab)).code == 0);
    const std::string dir = step_dir(place.out(), 12);
    const Flags flags = place.ids.set("--out", place / "not");
    for (const char* name : {"/state.json", "/config.json", "/tokenizer_config.json", "/manifest.json"}) {
        check_refused(place, {flags.set("--tokenizer", dir + name), {name, "expected an integer"}});
    }
    check_refused(place, {flags.set("--tokenizer", dir + "/generation_config.json"), {"two tokens have the id 259"}});
    check_refused(place, {flags.set("--tokenizer", dir + "/model.safetensors"), {"expected tokenizer.json"}});
    check_refused(place, {flags.set("--tokenizer", place / "train.txt"), {"no line [UNK]"}});
    check_refused(place, {place.base.set("--tokenizer", place.vocab), {"expected the model's 256 tokens, got 260"}});
    CHECK(!path_exists(place / "not"));
    // by any name, it is written under the libraries' names
    write_file(place / "model.safetensors.json", read_file(place.vocab));
    REQUIRE(place.run(flags.set("--tokenizer", place / "model.safetensors.json")).code == 0);
    CHECK(WithVocabulary::names(step_dir(place / "not", 12)) ==
          std::vector<std::string>{"generation_config.json", "tokenizer_config.json", "vocab.json"});   // no merges
    // an older checkpoint, with the original names of its files
    const std::string old = place / "old/step_00000012";
    io_mkdirs(old);
    int step = 0;
    FileSums sums;
    for (const auto& file : read_manifest(dir + "/manifest.json", step)) {
        std::string name = file.first;
        if (name == "tokenizer_config.json" || name == "generation_config.json") { continue; }
        if (name == "vocab.json") { name = "encoder.json"; }
        if (name == "merges.txt") { name = "vocab.bpe"; }
        write_file(old + "/" + name, read_file(dir + "/" + file.first));
        sums.push_back({name, file.second});
    }
    write_file(old + "/manifest.json", manifest_text(12, sums));
    const Flags resume = place.ids.with("--resume 1 --steps 24 --allow_change steps").set("--out", place / "old");
    REQUIRE(place.run(resume).code == 0);
    CHECK(read_file(step_dir(place / "old", 24) + "/vocab.json") == read_file(place.vocab));
    CHECK(read_file(step_dir(place / "old", 24) + "/merges.txt") == read_file(place.merges));
    // text is read as bytes: transformers' byte-level tokenizer, without a merge
    REQUIRE(place.run(place.base.set("--out", place / "bytes")).code == 0);
    const std::string bytes = step_dir(place / "bytes", 12);
    CHECK(WithVocabulary::names(bytes) == std::vector<std::string>{"tokenizer.json", "tokenizer_config.json"});
    CHECK(Tokenizer::load(bytes).tokens == Tokenizer::bytes().tokens);
}

TEST_CASE("run: weights of other software with more rows than tokens, and added tokens", "[run][vocabulary]") {
    WithVocabulary place;
    // 1 a model of 320 rows without our files, and data of 260 tokens
    write_file(place / "rows.bin", shard(ids_below(320, 4000), 320, 4000));
    REQUIRE(place.run(place.ids.set("--train_files", place / "rows.bin").set("--pos", "learned")
                          .set("--out", place / "wide")).code == 0);
    const std::string dir = place / "foreign";
    io_mkdirs(dir);
    for (const char* name : {"/model.safetensors", "/config.json"}) {
        write_file(dir + name, read_file(step_dir(place / "wide", 12) + name));
    }
    Json config = read_json(dir + "/config.json");
    config.erase("position");
    write_file(dir + "/config.json", config.dump());
    const Flags load = Flags().set("--load", dir).with("--threads 1");
    const Flags ids = load.set("--val_files", place / "ids.bin").with("--eval_lengths 32");
    const Outcome known = place.run(ids);
    REQUIRE(known.code == 0);
    CHECK(contains(known.err, "the model has 320 rows for the 260 tokens of the data; its softmax is over all"));
    write_file(place / "same.bin", shard(ids_below(260, 4000), 320, 4000));        // the same ids
    const Outcome same = place.run(ids.set("--val_files", place / "same.bin"));
    CHECK(!contains(same.err, "320 rows"));
    CHECK(same.out == known.out);
    write_file(place / "more.bin", shard(ids_below(321, 4000), 321, 4000));
    check_refused(place, {ids.set("--val_files", place / "more.bin"), {"a vocabulary of 321", "one of 320"}});
    check_refused(place, {ids.set("--val_files", place / "train.txt"), {"a vocabulary of 256", "one of 320"}});
    // 2 its tokenizer, with a token that is added and one that the model has room for
    write_file(dir + "/vocab.json", read_file(place.vocab));
    write_file(dir + "/merges.txt", read_file(place.merges));
    write_file(dir + "/added_tokens.json", R"({"[PAD] x": 260})");
    write_file(dir + "/tokenizer_config.json", R"({"eos_token": "[PAD] x", "model_max_length": 1024})");
    const Flags train = place.ids.set("--load", dir).without("--model").without("--pos").set("--out", place / "tuned");
    const Outcome tuned = place.run(train);
    INFO(tuned.err);
    REQUIRE(tuned.code == 0);
    CHECK(contains(tuned.err, "vocab.json: has 261 tokens, and the model has 320 rows"));
    const std::string step = step_dir(place / "tuned", 12);
    CHECK(config_of(step).at("vocab_size") == 320);
    CHECK(Tokenizer::load(step).tokens == Tokenizer::load(dir).tokens);
    CHECK(config_of(step).at("eos_token_id") == 260);
    const Json tokenizer = read_json(step + "/tokenizer_config.json");       // of a --pos learned
    CHECK(tokenizer == Json{{"eos_token", "[PAD] x"}, {"model_max_length", 32}, {"padding_side", "left"}});
    REQUIRE(place.run(train.without("--load").with("--resume 1 --steps 24 --allow_change steps")).code == 0);
    // 3 ids without a token are shown as numbers
    const Outcome text = place.run(load.with("--tokens 30 --seed 3").set("--generate", "258 260"));
    REQUIRE(text.code == 0);
    CHECK(contains(text.out, " the[PAD] x"));
    CHECK(text.out.find_first_of('<') != std::string::npos);
    // 4 a tokenizer that cannot be read gives a notice, as the weights have a use without text
    for (const char* bad : {R"({"x": 259})", R"({"[PAD] x": 260, "x": 260})"}) {
        write_file(dir + "/added_tokens.json", bad);
        const Outcome o = place.run(ids);
        CHECK(o.code == 0);
        CHECK(contains(o.err, "two tokens have the id"));
        CHECK(contains(o.err, "tokens are shown as ids"));
    }
    // 5 a model of 256 rows reads bytes, and no other 256 tokens
    REQUIRE(place.run(place.base.set("--pos", "learned").set("--out", place / "bytes")).code == 0);
    const std::string bytes = place / "foreign_bytes";
    io_mkdirs(bytes);
    for (const char* name : {"/model.safetensors", "/config.json"}) {
        write_file(bytes + name, read_file(step_dir(place / "bytes", 12) + name));
    }
    Json turned;
    for (int b = 0; b < 256; b++) { turned[spelled(b)] = 255 - b; }
    write_file(bytes + "/vocab.json", turned.dump());
    write_file(bytes + "/merges.txt", "#version: 0.2\n");
    check_refused(place, {Flags().set("--load", bytes).set("--generate", "a"), {"vocab.json", "the 256 bytes"}});
}

TEST_CASE("run: the bias matrix of a head as JSON", "[run]") {
    Place place;
    REQUIRE(place.run(place.base).code == 0);
    const std::string text = "caf\xc3\xa9 \xff of,a";        // commas, and bytes that are not UTF-8
    const Outcome o = place.run(Flags().set("--load", place.out()).set("--dump_bias", "1,0," + text)
        .set("--out", place / "bias"));
    REQUIRE(o.code == 0);
    const Json j = parse_json(read_file(place / "bias/bias_1_0.json"), "bias");
    const size_t T = text.size();
    CHECK(j.at("pos") == "cable");
    CHECK(j.at("layer") == 1);
    CHECK(j.at("head") == 0);
    CHECK(j.at("tokens").size() == T);
    CHECK(j.at("tokens")[0] == "c");
    REQUIRE((j.at("bias").size() == T && j.at("bias")[T - 1].size() == T));
    CHECK((j.at("bias")[T - 1][0].get<double>() < 0 && j.at("bias")[0][T - 1] == 0.0));
    // the grid of all heads, and the mean over the heads of a layer for the first tokens of the validation data
    const auto dump = [&](const std::string& what) {
        return place.run(Flags().set("--load", place.out()).set("--dump_bias", what).set("--out", place / "bias")
                             .set("--val_files", place / "val.txt").set("--T", "8"));
    };
    write_file(place / "val.txt", "of,a text that is longer than eight bytes");
    REQUIRE(dump("all,all,of,a tex").code == 0);
    const Json grid = parse_json(read_file(place / "bias/bias_all_all.json"), "bias");
    REQUIRE(grid.at("matrices").size() == 4);
    REQUIRE(dump("0,1,of,a tex").code == 0);
    const Json one = parse_json(read_file(place / "bias/bias_0_1.json"), "bias");
    CHECK(grid.at("matrices")[1].at("bias") == one.at("bias"));
    CHECK(grid.at("matrices")[1].at("layer") == 0);
    CHECK(grid.at("matrices")[1].at("head") == 1);
    CHECK(grid.at("matrices")[2].at("bias") != grid.at("matrices")[0].at("bias"));     // another layer
    REQUIRE(dump("1,mean,").code == 0);
    const Json mean = parse_json(read_file(place / "bias/bias_1_mean.json"), "bias");
    CHECK(mean.at("tokens") == grid.at("tokens"));
    for (size_t i = 0; i < 8; i++) {
        for (size_t k = 0; k < 8; k++) {
            const auto of = [&](size_t m) { return grid.at("matrices")[m].at("bias")[i][k].get<double>(); };
            CHECK(std::fabs(mean.at("bias")[i][k].get<double>() - 0.5 * (of(2) + of(3))) <= 1e-6);
        }
    }
    REQUIRE(dump("1,mean").code == 0);                          // the comma before no text may be left out
    CHECK(parse_json(read_file(place / "bias/bias_1_mean.json"), "bias") == mean);
    for (const char* bad : {"1", "mean,0,x", "a,0,x", "1,,x", "1x,0,x", " 1,0,x", "1, 0,x", "0x1,0,x", "2,0,x",
                            "1,2,x", "-1,0,x", "4294967297,0,x", "18446744073709551617,0,x", "1,0.0,x"}) {
        check_refused(place,
                      {Flags().set("--load", place.out()).set("--dump_bias", bad).set("--out", place / "bias"),
                       {"--dump_bias: expected LAYER,HEAD[,TEXT] with a layer below 2 and a head below 2, got '"}});
    }
}

TEST_CASE("run: it overfits one batch", "[run]") {
    Place place;
    check_overfits(place, "--steps 300");
}

// 48 micro-batches of one sequence
TEST_CASE("run: the leaves of a step are recorded, and kept by --resume", "[run]") {
    Place place;
    const Flags flags = place.base.with("--model 1,2,16 --T 16 --B 1 --total_batch 768 --steps 4 --val_every 0")
        .with("--checkpoint_every 2 --keep 0");
    const auto run = [&](const char* name, const char* more, const char* leaves) {
        const std::string out = place / name;
        const bool good = place.run(flags.set("--out", out).with(more)).code == 0;
        if (!good) { return std::map<std::string, std::string>(); }
        const Json state = parse_json(read_file(step_dir(out, 4) + "/state.json"), "state");
        CHECK(json_text(state.at("options").at("leaves")) == leaves);
        return bits(step_dir(out, 4));
    };
    const auto eight = run("eight", "", "8");
    CHECK(run("few", "--B 6", "8").size() == 4);                    // a leaf for each of 8 micro-batches
    const auto resumed = [&](const Json& leaves, const char* more, const char* recorded) {
        const std::string before = step_dir(place / "eight", 2);
        TempDir::remove(step_dir(place / "eight", 4));
        Json state = parse_json(read_file(before + "/state.json"), "state");
        state["options"].erase("leaves");
        if (!leaves.is_null()) { state["options"]["leaves"] = leaves; }
        rewrite_in_checkpoint(before, 2, "state.json", json_text(state, 2));
        return run("eight", (std::string("--resume 1 ") + more).c_str(), recorded);
    };
    check_same(eight, resumed(8, "", "8"));
    // those of an earlier version: 0 and 48 are a leaf for each micro-batch, each cut adds in another order
    const auto one = resumed(1, "", "1"), tree = resumed(0, "", "0");
    check_same(tree, resumed(nullptr, "", "0"));
    CHECK(tree.at("model.safetensors") == resumed(48, "", "48").at("model.safetensors"));
    for (const auto& other : {tree, one}) { CHECK(other.at("model.safetensors") != eight.at("model.safetensors")); }
    CHECK(resumed(48, "--B 2", "8").size() == 4);                   // which they do not fit
}

TEST_CASE("run: llm.c's letters", "[run]") {
    Place place;
    const Flags letters = Flags().set("-i", place / "train.txt").set("-j", place / "val.txt")
        .with("--model 2,2,32 -t 32 -b 2 -d 256 -x 8 -l 1e-3 -u 3 -q 0.1 -c 0.1 -k linear -v 4 -m 3 -s 0 -g 9 -n 2")
        .with("-nk 2 -r 2 -sl 9 -sg 9 -a 0 -y 0 -h 1 -z 1 -f 0 -w 1 -ge 2 -lg 10").set("-o", place / "letters");
    const Flags names = Flags().set("--train_files", place / "train.txt").set("--val_files", place / "val.txt")
        .with("--model 2,2,32 --T 32 --B 2 --total_batch 256 --steps 8 --lr 1e-3 --warmup 3 --final_lr 0.1")
        .with("--weight_decay 0.1 --schedule linear --val_every 4 --val_batches 3 --sample_every 0 --tokens 9")
        .with("--checkpoint_every 2 --keep 2 --recompute 2 --skip_loss_z 9 --skip_norm_z 9 --overfit 0")
        .with("--resume 0")
        .set("--out", place / "names");
    const Outcome o = place.run(letters);
    REQUIRE(o.code == 0);
    for (const char* flag : {"-h 1", "-f 0", "-w 1", "-ge 2", "-lg 10"}) {
        CHECK(contains(o.out, std::string(flag) + " changes nothing: "));
    }
    REQUIRE(place.run(names).code == 0);
    check_same(bits(step_dir(place / "letters", 8)), bits(step_dir(place / "names", 8)));
    CHECK(untimed_log(place / "letters") == untimed_log(place / "names"));
    CHECK(list_directory(place / "letters") == std::vector<std::string>{".lock", "log.jsonl", "main.log",
          "step_00000006", "step_00000008"});
    Json options = parse_json(read_file(step_dir(place / "letters", 8) + "/state.json"), "state").at("options");
    CHECK(options.at("total_batch") == 256);
    CHECK(options.at("skip_loss_z") == 9.0);
    CHECK(place.run(Flags().with("-e d12 --check --model small")).code == EXIT_BAD_INPUT);      // --model twice
    CHECK(contains(place.run(place.base.without("--model").with("-e d6 --check --ranks 1")).out, " 384 "));
}

}  // namespace
