#!/usr/bin/env python3
"""unicode_table.py -- writes llmc/engine/text/unicode.h, the table of characters that words.h looks up.

    pip install unicodedata2==16.0.0
    dev/unicode_table.py >llmc/engine/text/unicode.h

tiktoken and Hugging Face's tokenizers use Unicode 16 for \\p{L}, \\p{N} and \\s. With another version, the tokens of
characters assigned since would differ from theirs. That is why Python's own table does not do: every release of Python
has a different one.
"""
import hashlib
import struct
import sys

VERSION = "16.0.0"

try:
    import unicodedata2 as unicodedata
except ImportError:
    sys.exit(f"unicodedata2 is missing: pip install unicodedata2=={VERSION}")

CLASSES = ["OTHER", "LETTER", "NUMBER", "SPACE", "MARK", "PUNCTUATION", "CONTROL"]
LAST = 0x10FFFF                                 # the largest code point
HANGUL = range(0xAC00, 0xAC00 + 11172)          # words.h decomposes these syllables by arithmetic
SURROGATES = range(0xD800, 0xE000)              # halves of UTF-16 pairs, not characters
COLUMNS = 120


def class_of(c):
    """the class of code point c, one of CLASSES"""
    category = unicodedata.category(chr(c))
    if category[0] == "Z" or 9 <= c <= 13 or c == 0x85:     # the White_Space property, which \s matches
        return "SPACE"
    by_category = {"Mn": "MARK", "Cc": "CONTROL", "Cf": "CONTROL", "Co": "CONTROL"}
    by_letter = {"L": "LETTER", "N": "NUMBER", "P": "PUNCTUATION"}
    if category in by_category:
        return by_category[category]
    ascii_symbol = 33 <= c <= 126 and not chr(c).isalnum()  # BERT counts $ + < = > ^ ` | ~ as punctuation too
    return by_letter.get(category[0], "PUNCTUATION" if ascii_symbol else "OTHER")


def fold(c):
    """the code points of c's canonical decomposition, without nonspacing marks and in lower case"""
    parts = [p for p in unicodedata.normalize("NFD", chr(c)) if unicodedata.category(p) != "Mn"]
    return [ord(lower_of.get(ord(p), p)) for p in parts]


def read_lower_cases():
    """{code point: lower-case character}; str.lower() knows the Unicode of Python itself, 14 or newer, so the pairs
    assigned since then are added"""
    pairs = {0x1C89: 0x1C8A, 0xA7CB: 0x0264, 0xA7CC: 0xA7CD, 0xA7DA: 0xA7DB, 0xA7DC: 0x019B}
    pairs.update({c: c + 0x20 for c in range(0x10D50, 0x10D66)})
    table = {}
    for c in range(LAST + 1):
        if c not in SURROGATES and len(chr(c).lower()) == 1:    # U+0130 becomes two: fold() splits it
            table[c] = chr(c).lower()
    for upper, lower in pairs.items():
        assert unicodedata.category(chr(upper)) == "Lu" and unicodedata.category(chr(lower)) == "Ll"
        table[upper] = chr(lower)
    return table


def class_runs():
    """the runs of code points of one class, from U+0000 to the last: length << 3 | class"""
    runs = []
    for c in range(LAST + 1):
        k = CLASSES.index(class_of(c))
        if runs and runs[-1][1] == k:
            runs[-1][0] += 1
        else:
            runs.append([1, k])
    assert sum(n for n, _ in runs) == LAST + 1
    return [n << 3 | k for n, k in runs]


def fold_runs():
    """the characters that fold to one character, in runs: distance from the start of the run before, length << 2 |
    step, targets, each less the target before it. Step 1 or 2: the run takes every character or every other one, and
    has the target of the first; the next becomes step more. Step 0: neighbours, with the target of each. Then
    [character, up to three targets] of those that fold to several; and the last character that folds to anything but
    itself"""
    one, many = {}, {}
    for c in range(LAST + 1):
        if c in SURROGATES or c in HANGUL:
            continue
        f = fold(c)
        if class_of(c) == "MARK":
            assert f == [], hex(c)
        elif f != [c]:
            assert 1 <= len(f) <= 3, hex(c)
            (one if len(f) == 1 else many)[c] = f
    runs, taken = [], set()                         # [first character, step, targets]
    for c in sorted(one):
        if c in taken:
            continue

        def length(step):
            n = 1
            while one.get(c + step * n) == [one[c][0] + step * n] and c + step * n not in taken:
                n += 1
            return n
        # capitals stand side by side (A to Z) or alternate with their small letters (U+0100, U+0102, ...)
        step = 1 if length(1) >= length(2) else 2
        n = length(step)
        if n < 3:                                   # a list takes less space
            step, n = 0, 1
        taken.update(range(c, c + n * max(step, 1), max(step, 1)))
        if step == 0 and runs and runs[-1][1] == 0 and runs[-1][0] + len(runs[-1][2]) == c:
            runs[-1][2] += one[c]
        else:
            runs.append([c, step, [one[d][0] for d in range(c, c + n * max(step, 1), max(step, 1))]])
    flat, before, target = [], 0, 0
    for first, step, targets in runs:
        less = [now - last for last, now in zip([target] + targets, targets)]
        flat += [first - before, len(targets) << 2 | step] + (less if step == 0 else less[:1])
        before, target = first, targets[-1]
    long_folds = [v for c in sorted(many) for v in [c] + many[c] + [0] * (3 - len(many[c]))]
    return flat, long_folds, max(max(one), max(many))


def digest():
    """SHA-256 of all that the tables say, of each code point in its order: its class, how many characters it folds to,
    and these, each 4 bytes; computed without the runs"""
    hashed = hashlib.sha256()
    for c in range(LAST + 1):
        folded = [c] if c in SURROGATES else fold(c)
        hashed.update(struct.pack(f"<{2 + len(folded)}I", CLASSES.index(class_of(c)), len(folded), *folded))
    return hashed.hexdigest()


def table(comment, declaration, values):
    """prints a C++ array, its lines filled up to COLUMNS"""
    print(f"// {comment}\n{declaration} = {{")
    line = "   "
    for v in values:
        if len(line) + len(str(v)) + 2 > COLUMNS:
            print(line)
            line = "   "
        line += f" {v},"
    print(line + "\n};\n")


if unicodedata.unidata_version != VERSION:
    sys.exit(f"expected Unicode {VERSION}, got {unicodedata.unidata_version}: pip install unicodedata2=={VERSION}")
if sys.version_info < (3, 11):
    sys.exit(f"expected Python 3.11 or newer, got {sys.version.split()[0]}: older ones lack some lower-case letters")
lower_of = read_lower_cases()
folds, long_folds, last_fold = fold_runs()
print(f"""// text/unicode.h -- classes of characters, and their folded forms.
//
// Generated by dev/unicode_table.py from Unicode {VERSION}; do not edit. words.h expands the runs below into arrays
// with one entry per character.
#pragma once

#include <cstdint>
#include <vector>

// By general category: L*, N*, White_Space, Mn, P* with ASCII's symbols, Cc + Cf + Co. OTHER is
// the rest: symbols, other marks, unassigned code points.""")
print("enum UnicodeClass : uint8_t {\n    " + ", ".join("UNICODE_" + c for c in CLASSES) + "\n};")
print(f"const uint32_t UNICODE_LAST = 0x{LAST:X};           // the largest code point")
print(f"const uint32_t UNICODE_LAST_FOLD = 0x{last_fold:X};       // characters after this one fold to themselves\n")
table("Runs of one class, from U+0000 on: length << 3 | class.",
      "const uint32_t UNICODE_CLASS_RUNS[]", class_runs())
table("Runs of characters that fold to one character. Folding is: decompose canonically, drop Mn, lower the case.\n"
      "// A run: its distance from the start of the run before; length << 2 | step; targets, each less the target\n"
      "// before it. Step 1 or 2: the run takes every character or every other one, and has the target of the first;\n"
      "// the next becomes step more. Step 0: neighbours, with the target of each.",
      "const int32_t UNICODE_FOLD_RUNS[]", folds)
table("Characters that fold to two or three. Four numbers each: the character, and what it becomes (0: no third).",
      "const uint32_t UNICODE_LONG_FOLDS[]", long_folds)
print("the sum that test/text/test_words.cu expects:", digest(), file=sys.stderr)
