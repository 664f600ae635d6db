"""faults.py -- what mutate.py plants: the faults of a table, or drawn ones; and how a fault becomes an expression."""
import ast
import collections
import itertools
import os
import random
import re
import subprocess

from console import BadInput

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
# A test reads this as text, and the emulator has its own functions for these, so that a switch would never be reached.
TEXT = {"llmc/base/ptx.cuh": "test/simt/test_ptx_text.py"}
DRAWN = ["llmc", "train_gpt2.cu", "train_bert.cu", "data", "scripts", "dev/hf"]

# tests: what to run, where that is named, as known.tsv says. Drawn faults have none: coverage finds them.
Fault = collections.namedtuple("Fault", "id file line before after tests")


# ----------------------------------------------------------------------------------------------------------
# drawn faults

def exchange(words):
    """each of these words becomes the one beside it; a word that stands by itself goes"""
    table = {}
    for pair in words:
        table |= dict(zip(pair, reversed(pair))) if len(pair) == 2 else {pair[0]: ""}
    return "|".join(re.escape(word) for word in sorted(table, key=len, reverse=True)), lambda m: table[m[0]]


def swapped(m):
    """f(b, a) of f(a, b); None of a declaration, whose arguments are two words each"""
    return None if re.search(r"\w[*&]* [*&]*\w", m[2] + "," + m[3]) else f"{m[1]}{m[3]}, {m[2]}"


def deleted(m):
    """nothing, as a statement of C++ or of Python; None of a part of a statement"""
    return m[1] + (m[2] or "pass") if m[0].count("(") == m[0].count(")") else None


# name: what it finds in a line of code, and what that becomes, None where it does not change
OPERATORS = {
    "off by one": exchange([(" < ", " <= "), (" > ", " >= "), (" + 1",), (" - 1",)]),
    "sign": exchange([(" + ", " - "), (" += ", " -= "), (" == ", " != "), (" && ", " || "), (" and ", " or "), ("!",)]),
    "arguments": (r"\b(?!i?(?:min|max)\()(\w+\()([^\s(),][^(),]*), ([^\s(),][^(),]*)(?=[,)])", swapped),
    "constant": (r"(?<![\w.])\d+(?![\w.])", lambda m: str(int(m[0]) + 1)),
    "statement": (r"^(\s+)(?!(?:return|yield)\b)(?:[*\w.\->\[\]+]+(?: [-+*/|&]?= |\()[^;]*(;)|"
                  r"[\w.\[\]]+(?:\(.*\)| [-+*/|]?= [^;{]*[^;{(\[,\\]))$", deleted),
}


def mutated(operator, line, rng):
    """the line with one fault, None where the operator finds nothing; what a string or a comment says stays"""
    string = r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'"
    texts, places = re.findall(string, line), itertools.count(0xE000)           # each string as one letter
    line = re.sub(string, lambda _: chr(next(places)), line)
    code, rest = re.fullmatch(r"(.*?)(\s*(?:(?://|(?<=  )#|\").*)?)", line).groups()
    pattern, change = OPERATORS[operator]
    found = [(m, new) for m in re.finditer(pattern, code) if (new := change(m)) not in (None, m[0])]
    if not found:
        return None
    m, new = rng.choice(found)
    changed = code[:m.start()] + new + code[m.end():] + rest
    return re.sub("[\ue000-\uf8ff]", lambda letter: texts[ord(letter[0]) - 0xE000], changed)


def code_lines(path):
    """(number, line) of what is code: not a comment, and not a line that only words what is printed"""
    quoted = False
    for number, line in enumerate(source(path).split("\n"), 1):
        comment = quoted or line.lstrip().startswith(("//", "#", '"""'))
        if line.count('"""') % 2 == 1:
            comment, quoted = True, not quoted
        if line.strip() and not comment and not re.search(r"\b(die|say|\w*printf|print)\(|^\s*f?\"", line):
            yield number, line


def draw(seed, count):
    """faults that depend only on the seed and the sources: every line of code that an operator changes is as likely as
    any other, whichever file it is in"""
    files = subprocess.run(["git", "ls-files", *DRAWN], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    lines = [(path, number, line) for path in sorted(files.stdout.split())
             if path.endswith((".h", ".cuh", ".cu", ".py")) for number, line in code_lines(path)]
    rng, faults = random.Random(seed), []
    rng.shuffle(lines)
    for path, number, line in lines:
        for operator in rng.sample(sorted(OPERATORS), len(OPERATORS)):
            changed = mutated(operator, line, rng)
            if changed is not None and len(faults) < count:
                faults.append(Fault(f"seed {seed}, {len(faults)}: {operator}", path, number, line, changed,
                                    TEXT.get(path, "")))
                break
    return faults


# ----------------------------------------------------------------------------------------------------------
# how a fault is planted: as it is, or as an expression

def source(name):
    with open(os.path.join(ROOT, name), encoding="utf-8", newline="") as f:
        return f.read()


def place(text, fault):
    """(start, end, the new text) of the least part that the fault changes"""
    begin = sum(len(line) + 1 for line in text.split("\n")[:fault.line - 1])
    at = text.find(fault.before, begin)
    if at < 0 or "\n" in text[begin:at]:
        raise BadInput(f"{fault.id}: expected its text in {fault.file}, which has changed")
    shared = len(os.path.commonprefix([fault.before, fault.after]))
    tail = len(os.path.commonprefix([fault.before[shared:][::-1], fault.after[shared:][::-1]]))
    return at + shared, at + len(fault.before) - tail, fault.after[shared:len(fault.after) - tail]


def planted(fault):
    """its file with the fault as it is"""
    text = source(fault.file)
    start, end, new = place(text, fault)
    return text[:start] + new + text[end:]


def parses(fault):
    """whether a file of Python is one with the fault, too"""
    try:
        compile(planted(fault), "", "exec")
        return True
    except (SyntaxError, ValueError):
        return False


def mask(text):
    """as long as the text, without what its comments and strings say"""
    words = r'//[^\n]*|/\*.*?\*/|R"\w*\(.*?\)\w*"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\''
    return re.sub(words, lambda m: re.sub(r"[^\n]", " " if m[0][0] == "/" else "_", m[0]), text, flags=re.S)


def flat(text):
    """a masked text with ; for each letter of a block or of the head of an if or a loop, _ for the rest in brackets"""
    while True:
        found = re.sub(r"(\{[^{}]*\}(?=\s)|\b(?:if|for|while|switch)\s*(?:constexpr\s*)?\([^()]*\))"
                       r"|\([^()]*\)|\[[^][]*\]|\{[^{}]*\}", lambda m: (";" if m[1] else "_") * len(m[0]), text)
        if found == text:
            return text
        text = found


def expression(m, start, end):
    """(start, end) of the smallest part of a masked text that holds this one and may be an expression"""
    if "," in flat(m[start:end]):                       # arguments change places: the call
        start = max(flat(m[:start]).rfind(c) for c in "([{")
        end += re.search(r"[])}]|$", flat(m[end:])).end()
    begins = r"[,;?([{]|(?<!:):(?!:)|(?<![<>=!])=(?!=)|\b(?:return|else|do|throw|case)\b"
    first = max((found.end() for found in re.finditer(begins, flat(m[:start]))), default=0)
    last = end + re.search(r"[,;?\])}]|(?<!:):(?!:)|$", flat(m[end:])).start()
    return last - len(m[first:last].lstrip()), first + len(m[first:last].rstrip())


def schema(text, fault, n):
    """(start, end, new text): the fault n as an expression that mut.h switches; None where it cannot be one"""
    start, end, new = place(text, fault)
    m = mask(text)
    if fault.file in TEXT or re.search(r"[][(){};]", flat(m[start:end])):       # a bracket without its partner
        return None
    if m[m.rfind("\n", 0, start) + 1:].lstrip(" ").startswith("#"):
        return None
    first, last = expression(m, start, end)
    declared = re.search(r"(\w+)[*&>]*\s+\w+(\[\w*\])*\[$", m[max(0, first - 80):first])
    if declared and declared[1] not in ("return", "case", "else"):          # the size of an array
        return None
    whole, changed = text[first:last], text[first:start] + new + text[end:last]
    if not first <= start <= end <= last or first == last:
        return None
    if not changed.strip():
        return first, last, f"(mut({n}) ? (void)0 : (void)({whole}))"
    return first, last, f"(mut({n}) ? ({changed}) : ({whole}))"


def python_span(text, line):
    """(first, last) line of the statement around a line; of a statement with a body, of its head"""
    best = line, line
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno:
            body = getattr(node, "body", None)
            last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno
            if line <= last:
                best = node.lineno, last
    return best
