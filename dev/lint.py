#!/usr/bin/env python3
"""lint.py -- the rules of this repository that no compiler checks. Prints the place and the rule of each breach; exit
code 1 if there is any.

    dev/lint.py [ROOT] [--only PATH...]     checks only the files whose path begins with PATH
    dev/lint.py --words                     also lists phrases that are better said otherwise: no findings
    dev/lint.py --counts                    only prints how large the parts are, beside how large they should be at most
"""
import ast
import collections
import os
import re
import subprocess
import sys

# A file includes only files of its own floor or a lower one. The floors, the lowest first, are folders, and headers
# that stand on another floor than their folder does.
FLOORS = [["llmc/base"], ["llmc"], ["llmc/position", "llmc/cable.cuh"], ["llmc/attention", "llmc/attention.cuh"],
          ["llmc/engine/json.h"], ["llmc/engine/flags.h"], ["llmc/engine/safetensors.h"],
          ["llmc/engine/launch.h", "llmc/engine/wire.h", "llmc/engine/comm.h", "llmc/engine/parameters.cuh"],
          ["llmc/engine/model.cuh", "llmc/engine/data.h", "llmc/engine/vocabulary.h", "llmc/engine/checkpoint.h",
           "llmc/engine/import.h"],
          ["llmc/engine"], ["llmc/lab"], ["trainers", "llmc/compiled"]]

# the top level: these directories and files, and what begins with a dot
PLACES = r"((data|dev|docs|llmc|scripts|test)/|\.)[\w./+-]+|LICENSE|Makefile|README\.md|train_(gpt2|bert)[\w.]*"

# what no line of llmc/ or of the trainers may have, but for those of the files that are listed
KNOWS_THE_BUILD = ("llmc/base/device.h", "llmc/base/math.h", "llmc/base/gpu.h", "llmc/base/ptx.cuh")
REFUSED = (
    ("__CUDACC__", KNOWS_THE_BUILD, f"__CUDACC__: only {', '.join(KNOWS_THE_BUILD)} may ask which build this is"),
    ("<<<", ("llmc/base/device_cuda.h",), "<<<: only launch() starts kernels"),
    (r"(?<!\w)assert\s*\(", (), "assert(): it vanishes in a release; use check()"),
    (r"^using\s+namespace\b", (), "using namespace: it hides where a name comes from"),
    (r"\batomic(Add|Sub|Exch|Max|Min|CAS)\w*\s*\(", (),
     "atomics: sums go through slabs in a fixed order, so that runs give the same bits"))

# Calls of libm in kernels and layers: no compiler vectorizes them. Which a file may have, each as often as it stands
# here, and why it is not in an inner loop.
LIBM = "expf? exp2f? expm1f? tanhf? logf? log2f? log10f? log1pf? powf? erff? erfcf? sinf? cosf? tanf?".split()
LIBM_ALLOWED = {
    "llmc/attention.cuh": "logf",                       # once per row: the log-sum-exp
    "llmc/attention/flash/forward.cuh": "logf",         # once per row: the log-sum-exp
    "llmc/cable.cuh": "log",                            # a start value, on the host
    "llmc/classifier.cuh": "logf",                      # once per row: the loss
    "llmc/contrastive.cuh": "logf",                     # once per row: the loss
    "llmc/adamw.cuh": "pow pow",                        # once per update, on the host
    "llmc/base/math.h":                                 # the portable functions, in double, and what they are made of
        "log log log log log log log1p exp exp pow exp2 sin sin sin cos cos logf logf log2f log2f",
    "llmc/position/encoding.cuh": "log2f",              # on the host
    "llmc/position/ssmax.cuh": "log log log",           # once per token; on the host
    "llmc/position/added.cuh": "pow sin cos",           # once per channel of a table, in double
    "llmc/position/rope.cuh":                           # on the host; in double: an angle, its sin and cos
        "pow pow pow log log log log1p exp exp sin sin sin cos cos cos",
    "llmc/position/fire.cuh": "log1p",                  # once per entry of a table, in double
    "llmc/position/toeplitz.cuh": "pow pow cos exp2 log",   # once per head, bucket, thread, or frequency and distance
}

# where the scripts are that a user starts
CONSOLE = ("scripts/", "data/", "dev/hf/export.py", "dev/hf/import_authors.py")

MAX_COLUMNS = 120
MAX_LINES_HEADER, MAX_LINES_TRAINER, MAX_LINES_ONE_FILE = 950, 600, 700
MAX_LINES_FUNCTION, MAX_LINES_NUMBERED = 60, 100         # numbered: a function whose steps are
MAX_LINES = {"README.md": 160}
CPP = (".cu", ".cuh", ".h", ".c", ".cpp")
SOURCES = CPP + (".py", ".js", ".html", ".sh", "Makefile", ".ci/run")
TEXT = SOURCES + (".md", ".yml", ".json", ".txt", ".csv", ".gitignore", "LICENSE")
# files of libraries, users and other projects, which comments and documents may name although they are not here
FOREIGN = {"mpi.h", "cuda_runtime.h", "cuda_bf16.h", "xxhash.h", "json.hpp", "sqrt.cuh", "gated.cuh",
           "cable_log2.cuh", "rmsnorm.cuh", "test_rmsnorm.cu", "test_rmsnorm_simt.cu"}

# phrases of prose that are usually better said otherwise, and what to write instead
INSTEAD = {"of which": "the thing itself, or two sentences", "others": "the rest; the other ranks, files, tests",
           "alone": "only", "so many": "that many, this many", "ask(s|ed)? for": "requested, wanted, needed",
           "(go|goes|going|went) on": "continues", "in hand": "current", "anew": "again", "besides": "also",
           "taken, and said": "accepted with a notice", "(?<![Tt]here )(is|are) no (?!longer|more)": "is not an X"}
WORDS = re.compile(rf"\b({'|'.join(INSTEAD)})\b")

findings, phrases = [], []
tracked = set()


def report(path, line, rule):
    findings.append((path, line, rule))


# ---------------------------------------------------------------------------------------------------------
# reading C++ without a parser

def blank(match):
    return re.sub(r"[^\n]", " ", match.group(0))


TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)


def without_comments(text, strings=True):
    """the text with spaces in place of comments, and of strings unless strings=False; the rest keeps its place"""
    return TOKEN.sub(lambda m: blank(m) if m.group(0)[0] == "/" or strings else m.group(0), text)


def comments(text):
    """yields (line number, text) for each line of each comment"""
    for m in TOKEN.finditer(text):
        if m.group(0)[0] == "/":
            first = text.count("\n", 0, m.start()) + 1
            for k, line in enumerate(m.group(0).split("\n")):
                yield first + k, line


def initialised(line):
    """how many variables a declaration on this line initialises"""
    m = re.match(r"\s*(?:static |const |constexpr |inline )*[A-Za-z_][\w:<>, ]*?[ *&]+\w+(?:\[[^\]]*\])? = (.*);\s*$",
                 line)
    if not m or re.match(r"\s*(return|using|delete|else|goto|case)\b", line) or "(" in line.split("=")[0]:
        return 0
    depth, count = 0, 1
    for k, c in enumerate(m.group(1)):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0 and re.match(r",\s*\**\w+(?:\[[^\]]*\])? = ", m.group(1)[k:]):
            count += 1
    return count


def functions(text):
    """yields (first line, number of lines, head, text) for each function of a C++ source, those of structs included"""
    lines, source = without_comments(text).split("\n"), text.split("\n")
    at = 0
    while at < len(lines):
        if at > 0 and source[at - 1].endswith("\\"):       # rows of a macro are no head of a function
            at += 1
            continue
        indent = len(lines[at]) - len(lines[at].lstrip())
        opening, furthest = at, min(at + 8, len(lines))     # opening: the line of this statement's brace
        while lines[at].strip() and opening + 1 < furthest and not re.search(r"[{;}]\s*$", lines[opening]):
            opening += 1
        head = " ".join(line.strip() for line in lines[at:opening + 1])
        other = (r"(\}|#|(if|for|while|switch|struct|class|enum|namespace|union|else|do|try|return|using|private|"
                 r"public|UNROLL|SIMD)\b)")
        starts = indent <= 4 and head.endswith("{") and "(" in head and not re.match(other, head)
        in_macro = "\\" in head
        if not starts or in_macro or re.search(r"= (\{$|\[)", head) or re.match(r"(template <.*> )?struct ", head):
            at += 1
            continue
        end = opening + 1
        while end < len(lines) - 1 and not re.match(" " * indent + r"\}", lines[end]):
            end += 1
        yield at + 1, end - at + 1, head, "\n".join(source[at:end + 1])
        at = end + 1


def numbered(function):
    """whether the steps of a function are numbered: // 1 ..., // 2 ..."""
    return all(re.search(rf"^\s*(//|/\*) {step}[. ]", function, re.M) for step in (1, 2))


# ---------------------------------------------------------------------------------------------------------
# rules

def floor_of(path):
    """the floor of the file itself, or else of its folder; None if neither has one"""
    place = "trainers/" + path if path.startswith("train_") else path
    if place.startswith("llmc/attention/"):
        place = "llmc/attention"
    for name in (place, os.path.dirname(place)):
        for floor, places in enumerate(FLOORS):
            if name in places:
                return floor
    return None


def check_includes(path, text):
    """the floors; path is relative to the root, text has no comments"""
    floor = floor_of(path)
    if floor is None:
        report(path, 1, "this folder has no floor: give it one in FLOORS of dev/lint.py")
        return
    for number, line in enumerate(text.split("\n"), 1):
        m = re.match(r'\s*#\s*include\s*"([^"]+)"', line)
        if not m:
            continue
        target = os.path.normpath(os.path.join(os.path.dirname(path), m.group(1)))
        if target not in tracked:
            report(path, number, f'"{m.group(1)}" does not exist; includes are relative to the file that has them')
        elif not target.startswith("llmc/") and not target.endswith(".py"):      # text that a trainer writes
            report(path, number, f'"{m.group(1)}" is outside llmc/')
        elif floor_of(target) is not None and floor_of(target) > floor:
            report(path, number, f"{FLOORS[floor][0]} may not include {target}, which is on a higher floor")


def check_code(path, code):
    """rules for the C++ of llmc/ and the trainers; code has neither comments nor strings"""
    shared = ("llmc/base/device.h", "llmc/base/math.h")
    kernels = path.startswith("llmc/") and (path.endswith(".cuh") or path in shared)
    calls = collections.Counter()
    for number, line in enumerate(code.split("\n"), 1):
        for pattern, allowed, rule in REFUSED:
            if re.search(pattern, line) and path not in allowed:
                report(path, number, rule)
        called = r"(?<![\w.>])(?:std::|::|portable_)?(" + "|".join(LIBM) + r")\s*\("
        for name in re.findall(called, line) if kernels else ():
            calls[name] += 1
            if calls[name] > LIBM_ALLOWED.get(path, "").split().count(name):
                report(path, number, f"{name}(): no compiler vectorizes it; use a fast_* of math.h, or allow it in "
                       "dev/lint.py and say why")


def check_lines(path, text):
    """rules for how a C++ source reads"""
    lines = without_comments(text).split("\n")
    kernel_end = 0
    for number, line in enumerate(lines, 1):
        if line.count("?") > 1:
            report(path, number, f"{line.count('?')} ternaries on a line: at most one; imin, imax and clamp choose too")
        if re.match(r"((template <.*> *)?(static )?__global__|__launch_bounds__|.*_kernel\()", line):
            kernel_end = number + next((k for k, l in enumerate(lines[number:], 1) if l.startswith("}")), 0)
        most, where = (1, " in a kernel") if number <= kernel_end else (2, "")
        if initialised(line) > most:
            report(path, number, f"{initialised(line)} variables are initialised on a line: at most {most}{where}")
    for first, count, _, body in functions(text):
        if count > (MAX_LINES_NUMBERED if numbered(body) else MAX_LINES_FUNCTION):
            report(path, first, f"a function of {count} lines: at most {MAX_LINES_FUNCTION}, or with numbered steps "
                   f"(// 1 ..., // 2 ...) {MAX_LINES_NUMBERED}")


def check_python(path, text):
    """rules for how a Python source reads"""
    try:
        tree = ast.parse(text)
    except SyntaxError as e:
        report(path, e.lineno or 1, f"not Python: {e.msg}")
        return
    conditionals = collections.Counter(node.test.lineno for node in ast.walk(tree) if isinstance(node, ast.IfExp))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= MAX_LINES_FUNCTION:
            report(path, node.lineno, f"a function of {node.end_lineno - node.lineno + 1} lines: at most "
                   f"{MAX_LINES_FUNCTION}")
    for number, count in sorted(conditionals.items()):
        if count > 1:
            report(path, number, f"{count} conditional expressions on a line: at most one")


def check_console(path, text):
    """scripts that a user starts let console.py print and end them"""
    program = text.partition('\nif __name__ == "__main__":\n')[2]
    if path.startswith(CONSOLE) and program and not re.fullmatch(r"    (console\.)?run\(main\)\n", program):
        report(path, text.count("\n"), "a script ends with console.run(main), which keeps control characters from the "
               "terminal: scripts/console.py")


def check_citations(path, text):
    """comments, documents and scripts of pages name only files that exist"""
    names = {os.path.basename(t) for t in tracked}
    named = comments(text) if path.endswith(CPP) else enumerate(text.split("\n"), 1)
    for number, line in named:
        for m in re.finditer(r"(?<![\w./*{$<%-])(?:\.\./)*((?:[\w-]+/)*[\w-]+\.(?:cuh|cu|h|md))\b(?![.(]\w?)", line):
            cited = m.group(1)
            found = any(t == cited or t.endswith("/" + cited) for t in tracked) if "/" in cited else cited in names
            if not found and os.path.basename(cited) not in FOREIGN:
                report(path, number, f"{cited} is named, but there is no such file")


def check_line_counts(root, path, text):
    """a table of what to read, | [file](file) | lines | or | `f` and `g` in [file](file) | lines + lines |, gives about
    as many lines as the file or the functions have"""
    for number, line in enumerate(text.split("\n"), 1):
        m = re.match(r"\| (?:`(\w+)` and `(\w+)` in )?\[[^]]+\]\(([^)]+)\) \| (\d+)(?: \+ (\d+))? \|", line)
        if not m or m.group(3) not in tracked:
            continue
        with open(os.path.join(root, m.group(3)), encoding="utf-8") as f:
            source = f.read()
        lines = {m.group(3): source.count("\n")}
        if m.group(1):
            lines = {name: count for _, count, head, _ in functions(source) for name in m.group(1, 2)
                     if name + "(" in head}
        for (name, count), said in zip(lines.items(), m.group(4, 5)):
            if abs(count - int(said)) > count / 10:
                report(path, number, f"{name} has {count} lines, not {said}")


def check_text(path, text):
    """rules for every text file"""
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line) and path not in ("dev/lint.py", "test/scripts/test_lint.py"):
            report(path, number, "a left-over: do it, or file an issue")
        m = re.search(r"(?<![\w.$}~])/(work|root|tmp|home)\b", line)
        if m and not (m.group(1) == "tmp" and path.startswith("test/")):
            report(path, number, f"{m.group(0)}: a path of one machine")
        if path == "Makefile" or path.endswith(".sh"):
            for flag in ("-Ofast", "-ffast-math", "-use_fast_math"):
                if flag in line.split("#")[0]:
                    report(path, number, f"{flag}: infinities and NaN would lose their meaning")
        if path.endswith(SOURCES) and len(line) > MAX_COLUMNS:
            report(path, number, f"{len(line)} columns, {MAX_COLUMNS} are the limit")
    limit = MAX_LINES.get(path)
    if path.endswith(CPP) and not path.startswith("test/"):
        one_file = MAX_LINES_ONE_FILE if path.endswith(".cpp") else MAX_LINES_HEADER
        limit = MAX_LINES_TRAINER if path.startswith("train_") else one_file
    count = len(lines) - (lines[-1] == "")
    if limit and count > limit:
        report(path, limit + 1, f"{count} lines, {limit} are the limit")


def check_words(path, text):
    """notes WORDS in comments and pages"""
    prose = enumerate(text.split("\n"), 1)
    if path.endswith(CPP):
        prose = comments(text)
    elif not path.endswith(".md"):                                      # comments and doc strings, roughly
        prose = ((number, line) for number, line in prose if "#" in line or '"' not in line.strip('" '))
    phrases.extend((path, number, m.group(0)) for number, line in prose for m in WORDS.finditer(line))


def check_prose(path, text):
    """lines of docs/ outside of tables and blocks of code"""
    prose = re.sub(r"^```.*?^```", lambda m: "\n" * m.group(0).count("\n"), text, flags=re.M | re.S)
    for number, line in enumerate(prose.split("\n"), 1):
        if len(line) > MAX_COLUMNS and not line.startswith(("|", "![", "    ", "<!--")) and path.startswith("docs/"):
            report(path, number, f"{len(line)} columns, {MAX_COLUMNS} are the limit")


def tracked_files(root):
    """the files that git tracks or would track; in a copy without git, all files"""
    git = subprocess.run(["git", "-C", root, "ls-files", "-coz", "--exclude-standard"], stdout=subprocess.PIPE,
                         stderr=subprocess.DEVNULL, universal_newlines=True)
    if git.returncode == 0 and git.stdout:
        return {p for p in git.stdout.split("\0") if p and os.path.isfile(os.path.join(root, p))}
    found = set()
    for directory, names, files in os.walk(root):
        names[:] = [n for n in names if n not in (".git", ".venv", "build", "__pycache__")]
        found.update(os.path.relpath(os.path.join(directory, f), root) for f in files)
    return found


# --counts: what is counted, and its largest count
TARGETS = {"llmc: files": 58, "llmc: lines": 19000, "train_gpt2.cu includes: headers": 55,
           "train_gpt2.cu includes: lines": 18600, "test: lines": 36500, "dev, scripts, data: lines": 17000,
           "docs and README.md: lines": 3250, "train_gpt2.cu: lines": 480, "train_bert.cu: lines": 560,
           "llmc: headers of two subjects": 0}


def two_subjects(text):
    """whether a header's first line, // name -- subject: more, names two subjects: has an "and" in its subject"""
    subject = re.sub(r"\([^)]*\)", "", text.partition("\n")[0].partition(" -- ")[2])
    return " and " in re.split(r"[:.] ", subject)[0]


def counts(root):
    """prints each count, its target, and whether it is met"""
    texts = {}
    for path in tracked:
        if path.endswith(TEXT + (".tsv",)) and not path.startswith("test/fixtures/"):
            with open(os.path.join(root, path), encoding="utf-8", errors="replace") as f:
                texts[path] = f.read()
    llmc = [path for path in texts if path.startswith("llmc/")]
    includes = {path: {name if path.startswith("dev/") else os.path.normpath(os.path.join(os.path.dirname(path), name))
                       for name in re.findall(r'^\s*#\s*include\s*"([^"]+)(?<![.]py)"', texts[path], re.M)}
                for path in texts if path.startswith(("llmc/", "train_", "dev/")) and path.endswith(CPP)}
    below, new = set(), {"train_gpt2.cu"}
    while new:
        below, new = below | new, set().union(*(includes.get(path, ()) for path in new)) - below - new
    lines = lambda chosen: sum(texts[path].count("\n") for path in chosen)
    code = (".cu", ".cuh", ".h", ".cpp", ".py", ".sh", ".js", ".html")
    places = ("dev/", "scripts/", "data/")
    found = (len(llmc), lines(llmc), len(below) - 1, lines(below), lines(p for p in texts if p.startswith("test/")),
             lines(p for p in texts if p.startswith(places) and p.endswith(code)),
             lines(p for p in texts if re.fullmatch(r"docs/[^/]*\.md|README\.md", p)),
             lines(["train_gpt2.cu"]), lines(["train_bert.cu"]), sum(two_subjects(texts[path]) for path in llmc))
    print(f"{'':34} {'now':>7} {'most':>7}")
    for (name, most), now in zip(TARGETS.items(), found, strict=True):
        print(f"{name:34} {now:7,} {most:7,} {'ok' if now <= most else 'over'}")
    return 0


def main():
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__)
        return 0
    args = [a for a in sys.argv[1:] if a not in ("--words", "--counts")]
    only = args[args.index("--only") + 1:] if "--only" in args else [""]
    args = args[:args.index("--only")] if "--only" in args else args
    root = os.path.normpath(args[0] if args else os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    tracked.update(tracked_files(root))
    if "--counts" in sys.argv:
        return counts(root)
    count = 0
    for path in sorted(tracked):
        if path.startswith(tuple(only)) and not re.fullmatch(PLACES, path):
            report(ascii(path), 1, "expected a plain name, below a directory or as a file that the top level has")
        if not path.endswith(TEXT) or path.startswith("test/fixtures/") or not path.startswith(tuple(only)):
            continue
        with open(os.path.join(root, path), encoding="utf-8", errors="replace") as f:
            text = f.read()
        count += 1
        if text.startswith("#!") != os.access(os.path.join(root, path), os.X_OK):
            report(path, 1, "a file is executable if it begins with #!, and only then")
        check_text(path, text)
        if path.endswith(SOURCES + (".md",)) and path != "dev/lint.py":
            check_words(path, text)
        if path.endswith(CPP + (".md", ".js")):
            check_citations(path, text)
        if path.endswith(".md"):
            check_line_counts(root, path, text)
            check_prose(path, text)
        if path.endswith(CPP):
            check_lines(path, text)
        if path.endswith(".py"):
            check_python(path, text)
            check_console(path, text)
        if path.startswith(("llmc/", "train_")):
            check_includes(path, without_comments(text, strings=False))
            check_code(path, without_comments(text))
    for path, line, rule in findings:
        print(f"{path}:{line}: {rule}")
    for path, line, phrase in phrases if "--words" in sys.argv else []:
        better = next(words for pattern, words in INSTEAD.items() if re.match(pattern, phrase))
        print(f"{path}:{line}: \"{phrase}\": better: {better}")
    print(f"lint: {count} files, {len(findings)} finding{'s' if len(findings) != 1 else ''}; "
          f"{len(phrases)} phrases to replace (--words)")
    return 1 if findings or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
