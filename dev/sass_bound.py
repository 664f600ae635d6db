#!/usr/bin/env python3
"""sass_bound.py -- the best time that a kernel's instructions allow, counted in its SASS (no GPU needed), against
dev/sass_budget.json. These are upper bounds that name the limiting pipe, not measured speeds.

    dev/sass_bound.py PROGRAM...               programs that nvcc made, such as train_gpt2cu train_bertcu
    dev/sass_bound.py --sass FILE...           what `cuobjdump -sass` printed for one architecture
    dev/sass_bound.py --update ...             writes the budget from what was found
                      --budget FILE            instead of dev/sass_budget.json
    dev/sass_bound.py --probes CUBIN           whether the rate kernels of dev/gpu_probes.cu repeat their instructions

Tensor-core attention: clocks of an SM for 64 x 64 pairs, by pipe. The main loop is the outermost one with HMMA, by its
back edges. Of the ways through an iteration the one with all HMMA and copies and the fewest other instructions is a
full tile. Branches on threadIdx.x are decided warp by warp; the iterations of inner loops follow from their counters.
Elementwise kernels: instructions per element in the loops over them, beside the number that the SMs issue while memory
delivers the element. All rates are those of one H200.

It fails if a pipe's clocks or an element's instructions exceed the budget by more than 1 %, if a different pipe limits
a kernel without a higher bound, and if a kernel has no budget. Under another nvcc it only prints.
cuobjdump and nvdisasm come with the CUDA toolkit, or from pip (nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm).
"""
import argparse
import collections
import glob
import json
import os
import re
import shutil
import subprocess
import sys

from ptxas_budget import BadInput, ROOT, compiler_version, console, demangle, read_budget, verdict, write_budget
from roofline import COPY, GPUS         # of scripts/, which ptxas_budget.py has put on the path

GPU = GPUS["H200"]
UPDATE = "dev/sass_bound.py --update train_gpt2cu train_bertcu"
ARCH = "sm_90a"
GROWTH = 1.01
PIPES = ("issue", "tensor", "mufu", "shared", "fma", "alu")
WARPS = 4                               # of a block of attention
TILE = 64 * 64                          # pairs
PRODUCTS = {"forward": 2, "backward_dkdv": 4, "backward_dq": 3}
BACKWARD = 2.5                          # times the forward's FLOPs
FLASH = re.compile(r"flash_(forward|backward_dkdv|backward_dq)_kernel<(true|false), \(FlashBias\)(\d+), (\d+)"
                   r"(?:, (\d+))?>")       # causal, bias, head size, rows of a warp

# Clocks of an SM per instruction of a warp, by the throughput table of the CUDA programming guide (9.0). tensor: a
# mma.m16n8k16 has 4,096 FLOPs; GPU.mma is how many an SM does.
ISSUE, FP32, INTEGER, MUFU = 1 / 4, 1 / 4, 1 / 2, 2
CONTROL = {"BRA", "EXIT", "BSSY", "BSYNC", "BAR", "NOP", "DEPBAR", "LDGDEPBAR", "WARPSYNC", "CALL", "RET", "LDC", "S2R",
           "ERRBAR", "MEMBAR", "BREAK", "YIELD", "NANOSLEEP", "VOTE", "BMOV", "CS2R", "BRX", "R2UR", "R2P", "P2R"}
MEMORY = {"LDS", "STS", "LDSM", "LDGSTS", "LDG", "STG", "LD", "ST", "LDL", "STL", "ATOMG", "RED", "ATOMS", "ATOM"}

# Elementwise kernels: bytes of memory per element, and for each pass the bytes per element that its loop loads and
# stores, by which it is found
Elements = collections.namedtuple("Elements", "kernel bytes passes")
ELEMENTWISE = [
    Elements("gelu_forward_kernel<8>", 4, [(2, 2)]),
    Elements("gelu_backward_kernel<8>", 6, [(4, 2)]),
    Elements("gelu_erf_forward_kernel<8>", 4, [(2, 2)]),
    Elements("gelu_erf_backward_kernel<8>", 6, [(4, 2)]),
    Elements("layernorm_forward_kernel<8>", 4, [(2, 0), (2, 0), (6, 2)]),
    Elements("layernorm_backward_kernel<8>", 8, [(6, 0), (8, 2)]),
    Elements("classifier_kernel<__nv_bfloat16>", 6, [(2, 0), (2, 2)]),
    Elements("adamw_kernel", 30, [(16, 14)]),
]


# ----------------------------------------------------------------------------------------------------------------------
# instructions, blocks, loops

Instruction = collections.namedtuple("Instruction", "at guard name words operands")
LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?\w+)\s+)?([A-Z][A-Z0-9_]*)(\.[\w.]+)?\s*([^;]*);")


def functions(text):
    """[(mangled name, its lines)]"""
    for part in text.split("Function : ")[1:]:
        name, _, body = part.partition("\n")
        yield name.strip(), body


def instructions(body):
    found = []
    for line in body.split("\n"):
        m = LINE.match(line)
        if m:
            at, guard, name, words, operands = m.groups()
            found.append(Instruction(int(at, 16), guard, name, (words or "")[1:].split("."), operands.strip()))
    return found


def target_of(i):
    m = re.search(r"0x([0-9a-f]+)\s*$", i.operands)
    return int(m.group(1), 16) if m else None


class Graph:
    """the blocks of a function: code[b], after[b] (their successors), and loops: header -> the set of its blocks"""

    def __init__(self, body):
        self.all = instructions(body)
        barrier, after = {}, []
        for i in self.all:
            onward = i.at + 16
            if i.name == "BSSY":
                barrier[i.operands.split(",")[0]] = target_of(i)
            if i.name == "BRA":
                conditional = (i.guard and i.guard != "PT") or re.match(r"!?U?P\d", i.operands)
                after.append([target_of(i)] + ([onward] if conditional else []))
            elif i.name == "BSYNC":
                after.append([barrier.get(i.operands.strip(), onward)])
            elif i.name in ("EXIT", "RET"):
                after.append([onward] if i.guard else [])
            else:
                after.append([onward])
        starts = {self.all[0].at} if self.all else set()
        for i, to in zip(self.all, after):
            if to != [i.at + 16]:
                starts.update(to, [i.at + 16])
        self.code, self.after, block = {}, {}, None
        for i, to in zip(self.all, after):
            if i.at in starts:
                block = i.at
            self.code.setdefault(block, []).append(i)
            self.after[block] = to
        self.after = {b: [t for t in to if t in self.code] for b, to in self.after.items()}
        self.loops = self.find_loops()

    def order(self):
        """reverse postorder of what can be reached"""
        seen, out = set(), []
        stack = [(min(self.code), iter(self.after[min(self.code)]))]
        seen.add(min(self.code))
        while stack:
            block, rest = stack[-1]
            step = next((b for b in rest if b not in seen), None)
            if step is None:
                out.append(block)
                stack.pop()
            else:
                seen.add(step)
                stack.append((step, iter(self.after[step])))
        return out[::-1]

    def find_loops(self):
        """natural loops: of each edge back to a block that comes earlier; nvcc makes no loop with two entries"""
        order = self.order()
        place, before = {b: n for n, b in enumerate(order)}, {b: [] for b in order}
        for b in order:
            for t in self.after[b]:
                before[t].append(b)
        loops = {}
        for b in order:
            for header in self.after[b]:
                if place[header] <= place[b]:
                    inside, todo = loops.setdefault(header, {header}), [b]
                    while todo:
                        x = todo.pop()
                        if x not in inside:
                            inside.add(x)
                            todo += before[x]
        return loops


# ----------------------------------------------------------------------------------------------------------------------
# the cost of an iteration

def width(i):
    return next((int(w) // 32 for w in i.words if w in ("64", "128")), 1)


def wavefronts(i):
    """of 128 bytes each: by the width of an access, as the emulator counts them where no bank conflicts are"""
    if i.name == "LDSM":
        return next((int(w) for w in i.words if w in ("2", "4")), 1)
    return width(i) if i.name in MEMORY else 1


def cost_of(i, runs=True):
    """Counter of pipes and of some instructions; runs: false if its guard leaves no lane of the warp"""
    c = collections.Counter(issue=ISSUE, instructions=1)
    if i.guard == "!PT" or not runs:
        return c
    if i.name == "HMMA":
        c["hmma"] = 1 if "16816" in i.words else 0.5
    elif i.name == "CALL":
        c["calls"] = 1
    elif i.name in MEMORY or i.name == "SHFL":
        c["shared"] = wavefronts(i)
        c["copies"] = i.name == "LDGSTS"
        c["load"] = 4 * width(i) if i.name == "LDG" else 0
        c["store"] = 4 * width(i) if i.name == "STG" else 0
        if i.name in ("LDG", "STG") and any(w in ("U16", "S16") for w in i.words):
            c["load"], c["store"] = c["load"] / 2, c["store"] / 2
    elif i.name in ("MUFU", "F2I", "I2F", "F2F", "I2FP"):
        c["mufu"] = MUFU
    elif i.name in ("FFMA", "FMUL", "FADD"):
        c["fma"] = FP32
    elif i.name in ("IMAD", "HFMA2", "HADD2", "HMUL2"):
        c["fma"] = INTEGER
    elif i.name not in CONTROL and not i.name.startswith("U"):
        c["alu"] = INTEGER
    return c


COMPARE = {"LT": lambda a, b: a < b, "LE": lambda a, b: a <= b, "GT": lambda a, b: a > b, "GE": lambda a, b: a >= b,
           "EQ": lambda a, b: a == b, "NE": lambda a, b: a != b}
NUMBER = re.compile(r"-?(0x[0-9a-f]+|\d+)$")


def operands(i):
    return [word.replace(".reuse", "").strip() for word in i.operands.split(",")]


def comparison(i):
    """(predicate, comparison, register, number) of an ISETP or UISETP of a register and a number, or None"""
    words = operands(i)
    if i.name not in ("ISETP", "UISETP") or len(words) != 5 or words[4].lstrip("U") != "PT" or words[0] == "PT":
        return None
    if not NUMBER.match(words[3]) or i.words[0] not in COMPARE:
        return None
    return words[0], COMPARE[i.words[0]], words[2], int(words[3], 0)


def trips(graph, header, blocks):
    """how often the loop runs whose counter begins at 0, or None if that cannot be told"""
    code = sorted((i for b in blocks for i in graph.code[b]), key=lambda i: i.at)
    branch = next((i for i in code if i.name == "BRA" and target_of(i) == header and i.guard), None)
    predicate = branch.guard.lstrip("!") if branch else None
    for i in code:                                      # a uniform predicate is handed over
        if i.name == "PLOP3" and operands(i)[0] == predicate and operands(i)[4].startswith("UP"):
            predicate = operands(i)[4]
            break
    tests = [(i.at, comparison(i)) for i in code if comparison(i) and comparison(i)[0] == predicate]
    if not tests:
        return None
    at, (_, test, register, number) = tests[-1]
    for i in code:
        words = operands(i)
        if i.name in ("VIADD", "IADD3", "UIADD3") and words[:2] == [register] * 2 and NUMBER.match(words[2]):
            value, step = 0, int(words[2], 0)
            for n in range(1, 1025):
                seen = value + step if i.at < at else value
                value += step
                if test(seen, number) == (not branch.guard.startswith("!")):
                    continue
                return n
    return None


class Paths:
    """the cost of an iteration of a loop for one warp"""

    def __init__(self, graph, warp):
        self.graph, self.warp = graph, warp
        self.thread = self.registers_of_thread()
        self.decided = self.decide()

    def registers_of_thread(self):
        """the registers that hold threadIdx.x and nothing else"""
        found, others = set(), set()
        for i in self.graph.all:
            to = operands(i)[0]
            if i.name == "S2R" and "SR_TID.X" in i.operands:
                found.add(to)
            elif re.match(r"R\d+$", to) and i.name not in ("STG", "STS"):
                wide = 4 if i.name in ("HMMA", "LDSM") or "128" in i.words else 2
                others |= {f"R{int(to[1:]) + k}" for k in range(wide)}      # a neighbour too many does no harm
        return found - others

    def decide(self):
        """{address: whether the guard lets this warp through} of guards that compare threadIdx.x with a number"""
        known, decided = {}, {}
        for i in self.graph.all:
            if i.guard and i.guard.lstrip("!") in known:
                decided[i.at] = known[i.guard.lstrip("!")] != i.guard.startswith("!")
            found = comparison(i)
            for word in i.operands.split(",")[:2]:
                known.pop(word.strip(), None)           # it is written, or only read: then it is looked up again
            if found and found[2] in self.thread and not i.guard:
                _, test, _, number = found
                values = {test(32 * self.warp + lane, number) for lane in (0, 31)}
                if len(values) == 1:
                    known[found[0]] = values.pop()
        return decided

    def block(self, b):
        total = collections.Counter()
        for i in self.graph.code[b]:
            runs = self.decided.get(i.at, True)
            first_tile_only = i.name == "LDSM" and i.guard and i.at not in self.decided
            total.update(cost_of(i, runs and not first_tile_only))
        return total

    def rank(self, cost):
        return (-cost["calls"], cost["hmma"], cost["copies"], -cost["instructions"])

    def onward(self, b):
        """the successors of a block, without those that a decided branch excludes"""
        last = self.graph.code[b][-1]
        if last.name == "BRA" and last.at in self.decided and not re.match(r"!?U?P\d", last.operands):
            wanted = target_of(last) if self.decided[last.at] else last.at + 16
            return [t for t in self.graph.after[b] if t == wanted]
        return self.graph.after[b]

    def iteration(self, header):
        """the Counter of the best way from the header back to it, None if there is none"""
        blocks = self.graph.loops[header]
        inner = {h: x for h, x in self.graph.loops.items() if h != header and h in blocks and x < blocks}
        outermost = {h: x for h, x in inner.items() if not any(x < y for y in inner.values())}
        known = {}

        def node(b):
            """(cost, successors) of a block, or of the whole loop that it begins"""
            if b not in outermost:
                return self.block(b), self.onward(b)
            times, once = trips(self.graph, b, outermost[b]), self.iteration(b)
            if times is None:
                if once and once["hmma"]:
                    raise BadInput(f"expected a loop with a counter at {b:#x}, which has HMMA")
                times = 1
            cost = collections.Counter({k: v * times for k, v in (once or {}).items()})
            return cost, [t for x in outermost[b] for t in self.onward(x) if t not in outermost[b]]

        def best(b):
            if b not in known:
                known[b] = None                         # a way that meets itself is none
                cost, onward = node(b)
                ways = [collections.Counter() for t in onward if t == header]
                ways += [w for w in (best(t) for t in onward if t in blocks and t != header) if w is not None]
                if ways:
                    known[b] = cost + max(ways, key=self.rank)
            return known[b]
        return best(header)


# ----------------------------------------------------------------------------------------------------------------------
# kernels

def flash_clocks(graph, what, HS):
    """{pipe: clocks of an SM for 64 x 64 pairs}"""
    with_hmma = {h: x for h, x in graph.loops.items() if any(i.name == "HMMA" for b in x for i in graph.code[b])}
    outermost = [h for h, x in with_hmma.items() if not any(x < y for y in with_hmma.values())]
    if len(outermost) != 1:
        raise BadInput(f"{what}, head size {HS}: expected one main loop with HMMA, got {len(outermost)}")
    total = collections.Counter()
    for warp in range(WARPS):
        total.update(Paths(graph, warp).iteration(outermost[0]) or {})
    macs = 16 * 8 * 16
    if not total["hmma"]:
        raise BadInput(f"{what}, head size {HS}: no HMMA on any way through the main loop")
    tiles = total["hmma"] * macs / (PRODUCTS[what] * TILE * HS)
    total["tensor"] = total["hmma"] * 2 * macs / GPU.mma
    return {p: round(total[p] / tiles, 1) for p in PIPES}


def bias_names():
    with open(os.path.join(ROOT, "llmc", "position", "encoding.cuh")) as f:
        return re.search(r"enum class FlashBias \{([^}]*)\}", f.read()).group(1).replace(" ", "").split(",")


def elementwise(graph, kernel):
    """Instructions per element of an entry of ELEMENTWISE, or None if a loop is missing. A pass that the compiler has
    written several times (unrolled, and for the rest; with and without an option) counts once, at its shortest."""
    found = {}
    path = Paths(graph, 0)
    for header, blocks in graph.loops.items():
        if any(h != header and h in blocks for h in graph.loops):
            continue
        cost = path.iteration(header)
        if cost is None or cost["load"] + cost["store"] == 0:
            continue
        for load, store in set(kernel.passes):
            if cost["load"] * store == cost["store"] * load and (store > 0) == (cost["store"] > 0):
                elements = cost["load"] / load
                found.setdefault((load, store), []).append((header, cost["instructions"] / elements))
    total = 0.0
    for each in set(kernel.passes):
        times, loops = kernel.passes.count(each), sorted(found.get(each, []))
        if len(loops) < times:
            return None
        total += sum(sorted(n for _, n in loops)[:times])
    return round(total, 1)


def analyse(texts):
    """{kernel: {pipe: clocks}} of attention, {kernel: instructions per element}"""
    flash, elements = {}, {}
    for text in texts:
        found = list(functions(text))
        names = demangle(name for name, _ in found)
        for mangled, body in found:
            name = names[mangled]
            m = FLASH.match(name)
            if m:
                what, causal, bias, HS, rows = m.groups()
                mask = "causal" if causal == "true" else "full"
                key = f"{bias_names()[int(bias)]} {HS} {mask} {what}" + (f" {rows}" if rows else "")    # of a warp
                flash[key] = flash_clocks(Graph(body), what, int(HS))
            for kernel in ELEMENTWISE:
                if name.split("(")[0] == kernel.kernel and kernel.kernel not in elements:
                    elements[kernel.kernel] = elementwise(Graph(body), kernel)
    return flash, {k: n for k, n in elements.items() if n}


def probed():
    """([(words of the instruction that a rate kernel repeats)], how often) of dev/gpu_probes.cu"""
    with open(os.path.join(ROOT, "dev", "gpu_probes.cu")) as f:
        text = f.read()
    loops, each = (int(re.search(rf"RATE_{name} = (\d+)", text).group(1)) for name in ("LOOPS", "EACH"))
    return [name.split()[0].split(".") for name in re.findall(r'\{Rate::\w+, "([^"]+)"', text)], loops * each


def check_probes(text):
    """one line for each rate kernel in which the compiler has left out or merged something"""
    wanted, times = probed()
    seen, breaches = {}, []
    for mangled, body in functions(text):
        m = re.search(r"rate_kernelIL4Rate(\d+)E", mangled)
        if m:
            name, *words = wanted[int(m.group(1))]
            graph = Graph(body)
            counts = [trips(graph, h, x) * sum(i.name == name and set(words) <= set(i.words)
                                               for b in x for i in graph.code[b])
                      for h, x in graph.loops.items() if trips(graph, h, x)]
            seen[int(m.group(1))] = max(counts, default=0)
    for k, words in enumerate(wanted):
        if seen.get(k) != times:
            breaches.append(f"rate of {'.'.join(words)}: expected {times} of them, got {seen.get(k)}")
    return breaches


def limit_of(clocks):
    return max(PIPES, key=lambda p: clocks[p])


def tflops(pairs_clocks, HS, factor):
    return factor * 4 * TILE * HS / pairs_clocks * GPU.sms * GPU.ghz * 1e9 / 1e12


def bounds(flash):
    """{(bias, HS, mask): (forward, backward)}, TFLOP/s of full tiles"""
    found = {}
    for key in flash:
        bias, HS, mask = key.split()[:3]
        found[bias, int(HS), mask] = None
    for bias, HS, mask in found:
        clocks = []
        for what in PRODUCTS:                           # the better one, where a kernel is there with 16 and 32 rows
            own = [max(c.values()) for key, c in flash.items() if key.split()[:4] == [bias, str(HS), mask, what]]
            clocks.append(min(own) if own else None)
        forward = clocks[0] and tflops(clocks[0], HS, 1)
        backward = tflops(clocks[1] + clocks[2], HS, BACKWARD) if clocks[1] and clocks[2] else None
        found[bias, HS, mask] = (forward, backward)
    return found


def memory_budget(kernel):
    """instructions of a thread that the SMs issue while memory delivers an element, as fast as to a copy"""
    return kernel.bytes / (GPU.gbs * 1e9 * COPY) * GPU.sms * GPU.ghz * 1e9 * 4 * 32


# ----------------------------------------------------------------------------------------------------------------------
# the report and the budget

def show(flash, elements):
    print(f"Upper bounds by counted instructions at the rates of one H200 ({GPU.sms} SMs, {GPU.ghz} GHz): which pipe "
          "limits a kernel.\nNothing was measured, and no kernel reaches its bound.")
    print(f"\nclocks of an SM per 64 x 64 pairs\n{'':42}" + "".join(f"{p:>8}" for p in PIPES) + "  limit")
    order = sorted(flash, key=lambda k: (k.split()[2], int(k.split()[1]), bias_names().index(k.split()[0]),
                                         list(PRODUCTS).index(k.split()[3]), k))
    for key in order:
        print(f"{key:42}" + "".join(f"{flash[key][p]:8.0f}" for p in PIPES) + f"  {limit_of(flash[key])}")
    print("\nTFLOP/s of full tiles, at most              forward backward")
    for (bias, HS, mask), each in bounds({k: flash[k] for k in order}).items():
        cells = "".join(f"{x:9.0f}" if x else f"{'-':>9}" for x in each)
        print(f"{bias + ' ' + str(HS) + ' ' + mask:42}{cells}")
    print("\ninstructions per element                      needed   allowed")
    for kernel in (k for k in ELEMENTWISE if k.kernel in elements):
        found, most = elements[kernel.kernel], memory_budget(kernel)
        verdict = "memory limits it" if found <= most else "ISSUE limits it"
        print(f"{kernel.kernel:42}{found:10.1f}{most:10.1f}  {verdict}")


def compare(flash, elements, budget):
    """one line for each breach"""
    breaches = []
    for key, clocks in sorted(flash.items()):
        allowed = budget["flash"].get(key)
        if allowed is None:
            breaches.append(f"{key}: has no budget; found {clocks}")
            continue
        for p in PIPES:
            if clocks[p] > GROWTH * allowed[p]:
                breaches.append(f"{key}, {p}: found {clocks[p]} clocks, budget {allowed[p]}")
        was, now = limit_of(allowed), limit_of(clocks)
        if was != now and max(clocks.values()) >= max(allowed.values()):
            breaches.append(f"{key}: {now} limits it, expected {was} or a higher bound")
    for kernel, found in sorted(elements.items()):
        allowed = budget["elementwise"].get(kernel)
        if allowed is None:
            breaches.append(f"{kernel}: has no budget; found {found} instructions per element")
        elif found > GROWTH * allowed:
            breaches.append(f"{kernel}: found {found} instructions per element, budget {allowed}")
    return breaches


def disassembler():
    """the directory of cuobjdump and nvdisasm, or None"""
    own = os.environ.get("SASS_TOOLS") or os.path.join(ROOT, "build", "sass")       # an environment of Python
    for tool in (shutil.which("cuobjdump"), os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin/cuobjdump",
                 *glob.glob(os.path.join(own, "lib/python*/site-packages/nvidia/*/bin/cuobjdump"))):
        if tool and os.path.exists(tool) and os.path.exists(os.path.join(os.path.dirname(tool), "nvdisasm")):
            return os.path.dirname(tool)
    return None


def disassemble(program):
    directory = disassembler()
    if not directory:
        return None
    env = dict(os.environ, PATH=directory + os.pathsep + os.environ.get("PATH", ""))
    p = subprocess.run([os.path.join(directory, "cuobjdump"), "-sass", "-arch", ARCH, program], stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT, universal_newlines=True, env=env)
    if p.returncode != 0:
        raise BadInput(f"cuobjdump {program}: {p.stdout[-300:]}")
    return p.stdout


def parse(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("programs", nargs="*", metavar="PROGRAM")
    p.add_argument("--sass", nargs="+", default=[], metavar="FILE")
    p.add_argument("--update", action="store_true")
    p.add_argument("--probes", metavar="CUBIN")
    p.add_argument("--budget", default=os.path.join(ROOT, "dev", "sass_budget.json"))
    p.add_argument("--nvcc-version", help="of the compiler that made them, such as 13.0 [that of nvcc]")
    return p.parse_args(argv)


def main(argv):
    args = parse(argv)
    if not args.programs and not args.sass and not args.probes:
        raise BadInput("expected programs that nvcc made, or --sass FILE")
    if (args.programs or args.probes) and not disassembler():
        print("#" * 88)
        print("## SKIPPED: cuobjdump and nvdisasm are not here. Nothing was counted in the SASS.     ##")
        print("#" * 88)
        return 0
    if args.probes:
        breaches = check_probes(disassemble(args.probes))
        print("\n".join(breaches) or "probes: each rate kernel repeats its instruction")
        return 1 if breaches else 0
    texts = [disassemble(program) for program in args.programs] + [open(name).read() for name in args.sass]
    flash, elements = analyse(texts)
    if not flash:
        raise BadInput("no tensor-core attention kernel in the disassembly")
    show(flash, elements)
    nvcc = shutil.which("nvcc") or os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin/nvcc"
    version = args.nvcc_version or (compiler_version(nvcc) if os.path.exists(nvcc) else "unknown")
    if args.update:
        write_budget(args.budget, version, flash=flash, elementwise=elements)
        print(f"\n{args.budget}: {len(flash)} kernels of attention, {len(elements)} elementwise")
        return 0
    budget = read_budget(args.budget, UPDATE, "flash", "elementwise")
    if version != budget["nvcc"]:
        print(f"\nnvcc {version}, but the budget is of nvcc {budget['nvcc']}: not compared")
        return 0
    gone = sorted((set(budget["flash"]) | set(budget["elementwise"])) - set(flash) - set(elements))
    if gone and len(args.programs) > 1:
        print(f"\n{len(gone)} budgeted kernels are gone; --update forgets them: {', '.join(gone[:5])}")
    print(flush=True)
    return verdict(compare(flash, elements, budget), args.budget, UPDATE,
                   f"{len(flash)} kernels of attention and {len(elements)} elementwise ones: within their budget")


if __name__ == "__main__":
    console.run(main)
