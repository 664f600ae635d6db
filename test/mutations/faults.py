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

# tests: what to run, where that is named: see tree.Case. Drawn faults have none: coverage finds them.
Fault = collections.namedtuple("Fault", "id file line before after tests")


def swap_arguments(code, rng):
    """f(a, b) -> f(b, a)"""
    calls = [m for m in re.finditer(r"\b(?!i?(?:min|max)\()\w+\(([^\s(),][^(),]*), ([^\s(),][^(),]*)([,)])", code)
             if m[1] != m[2] and not re.search(r"\w[*&]* [*&]*\w", m[1] + "," + m[2])]        # not parameters
    if not calls:
        return None
    m = rng.choice(calls)
    return code[:m.start(1)] + m[2] + ", " + m[1] + code[m.start(3):]


def exchange(pairs):
    """an operator that replaces one of these by its partner"""
    table = dict(pairs)
    words = "|".join(re.escape(a) for a in sorted(table, key=len, reverse=True))

    def apply(code, rng):
        places = list(re.finditer(words, code))
        if not places:
            return None
        m = rng.choice(places)
        return code[:m.start()] + table[m[0]] + code[m.end():]
    return apply


def change_constant(code, rng):
    places = list(re.finditer(r"(?<![\w.])(\d+)(?![\w.])", code))
    if not places:
        return None
    m = rng.choice(places)
    return code[:m.start()] + str(int(m[1]) + 1) + code[m.end():]


def delete_statement(code, _):
    """calls and assignments, of C++ with a semicolon and of Python without one; not declarations"""
    if code.count("(") != code.count(")") or re.match(r"\s+(return|yield)\b", code):
        return None
    if re.fullmatch(r"\s+[*\w.\->\[\]+]+( [-+*/|&]?= |\()[^;]*;", code):
        return re.sub(r"\S.*", ";", code)
    if re.fullmatch(r"\s+[\w.\[\]]+(\(.*\)| [-+*/|]?= [^;{]*[^;{(\[,\\])", code):
        return re.sub(r"\S.*", "pass", code)
    return None


OPERATORS = {
    "off by one": exchange([(" < ", " <= "), (" <= ", " < "), (" > ", " >= "), (" >= ", " > "), (" + 1", ""),
                            (" - 1", "")]),
    "sign": exchange([(" + ", " - "), (" - ", " + "), (" += ", " -= "), (" == ", " != "), (" != ", " == "),
                      (" && ", " || "), (" || ", " && "), (" and ", " or "), (" or ", " and "), ("!", "")]),
    "arguments": swap_arguments,
    "constant": change_constant,
    "statement": delete_statement,
}


def mutated(operator, line, rng):
    """the line with one fault, None where the operator finds nothing; what a string or a comment says stays"""
    code, comment = re.fullmatch(r"((?:[^\"'/#]|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|/(?!/)|(?<!  )#|')*)(.*)",
                                 line).groups()
    gap = code[len(code.rstrip()):]
    texts = re.findall(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'", code)
    for i, text in enumerate(texts):
        code = code.replace(text, chr(0xE000 + i), 1)
    code, found = code.rstrip(), OPERATORS[operator](code.rstrip(), rng)
    if found is None or found == code:
        return None
    found += gap + comment
    for i, text in enumerate(texts):
        found = found.replace(chr(0xE000 + i), text)
    return found


def code_lines(path):
    """(number, line) of what is code: not a comment, and not a line that only words what is printed"""
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        lines = f.read().split("\n")
    quoted = False
    for number, line in enumerate(lines, 1):
        opens = line.count('"""') % 2 == 1
        comment = line.lstrip().startswith(("//", "#", '"""')) or quoted or opens
        quoted = quoted != opens
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
        operators = sorted(OPERATORS)
        rng.shuffle(operators)
        for operator in operators:
            changed = mutated(operator, line, rng)
            if changed is not None:
                faults.append(Fault(f"seed {seed}, {len(faults)}: {operator}", path, number, line, changed,
                                    TEXT.get(path, "")))
                break
        if len(faults) == count:
            break
    return faults


# ----------------------------------------------------------------------------------------------------------
# how a fault becomes an expression

def place(text, fault):
    """(start, end, the new text) of the least part that the fault changes"""
    at = text.find(fault.before)
    if text.count(fault.before) != 1:               # of a drawn fault: a whole line, which may not be the only one
        lines = text.split("\n")
        if fault.line > len(lines) or lines[fault.line - 1] != fault.before:
            raise BadInput(f"{fault.id}: expected its text in {fault.file}, which has changed")
        at = sum(len(line) + 1 for line in lines[:fault.line - 1])
    before, after = fault.before, fault.after
    shared = len(os.path.commonprefix([before, after]))
    tail = len(os.path.commonprefix([before[shared:][::-1], after[shared:][::-1]]))
    return at + shared, at + len(before) - tail, after[shared:len(after) - tail]


def mask(text):
    """as long as the text, without what its comments and strings say"""
    words = r'//[^\n]*|/\*.*?\*/|R"\w*\(.*?\)\w*"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\''
    return re.sub(words, lambda m: re.sub(r"[^\n]", " " if m[0][0] == "/" else "_", m[0]), text, flags=re.S)


OPEN, CLOSE = "([{", ")]}"
BEFORE = r"(?:\b(?:return|else|do|throw|case)|(?<!:):(?!:)|(?<![<>=!])=(?!=))$"      # an expression begins after these


def match(m, i, step):
    """the position of the bracket that belongs to the one at i"""
    depth, inner = 0, CLOSE if step < 0 else OPEN
    while 0 <= i < len(m):
        depth += (m[i] in inner) - (m[i] in OPEN + CLOSE and m[i] not in inner)
        if depth == 0:
            return i
        i += step
    return -1


def expression(m, start, end):
    """(start, end) of the smallest part of a masked text that holds this one and may be an expression"""
    def left(i, stops):
        while i > 0:
            c = m[i - 1]
            if c in stops + OPEN or (c == "}" and m[i:i + 1].isspace()):
                break
            if c in CLOSE:
                i = match(m, i - 1, -1)
                if c == ")" and re.search(r"\b(if|for|while|switch)\s*(constexpr\s*)?$", m[max(0, i - 20):i]):
                    return match(m, i, 1) + 1
                continue
            if stops and re.search(BEFORE, m[max(0, i - 8):i]) and m[i:i + 1] not in ":=":
                break
            i -= 1
        return i

    def right(i, stops):
        while i < len(m) and m[i] not in stops + CLOSE and not (stops and re.match(r"(?<!:):(?!:)", m[i - 1:i + 2][1:])
                                                                and m[i - 1] != ":"):
            i = match(m, i, 1) + 1 if m[i] in OPEN else i + 1
        return i

    inside, depth = m[start:end], 0
    for c in inside:
        depth += (c in OPEN) - (c in CLOSE)
        if depth == 0 and c == ",":                 # arguments change places: the call
            start, end = left(start, "") - 1, right(end, "") + 1
            break
    start, end = left(start, ",;?"), right(end, ",;?")
    return start + len(m[start:end]) - len(m[start:end].lstrip()), start + len(m[start:end].rstrip())


def schema(text, fault, n):
    """(start, end, new text): the fault n as an expression that mut.h switches; None where it cannot be one"""
    start, end, new = place(text, fault)
    m = mask(text)
    inside = [(c in OPEN) - (c in CLOSE) for c in m[start:end]]
    if fault.file in TEXT or sum(inside) or min(itertools.accumulate(inside), default=0) < 0:
        return None
    if m[m.rfind("\n", 0, start) + 1:].lstrip(" ").startswith("#") or ";" in m[start:end]:
        return None
    first, last = expression(m, start, end)
    if not first <= start <= end <= last or first == last:
        return None
    declared = re.search(r"(\w+)[*&>]*\s+\w+(\[\w*\])*\[$", m[max(0, first - 80):first])
    if declared and declared[1] not in ("return", "case", "else"):          # the size of an array
        return None
    whole, changed = text[first:last], text[first:start] + new + text[end:last]
    if "//" in whole:
        return None
    if not changed.strip():
        return first, last, f"(mut({n}) ? (void)0 : (void)({whole}))"
    return first, last, f"(mut({n}) ? ({changed}) : ({whole}))"


def python_span(text, line):
    """(first, last) line of the statement around a line, of its head where it has a body"""
    best = (line, line)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno:
            body = getattr(node, "body", None)
            last = node.end_lineno
            if isinstance(body, list) and body:
                last = max(node.lineno, body[0].lineno - 1)
            if line <= last:
                best = (node.lineno, last)
    return best
