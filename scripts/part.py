#!/usr/bin/env python3
"""part.py -- where two training runs part: the first step, kernel, tensor and element that differ.

    make trace
    scripts/part.py 'build/trace/train_gpt2 --threads 1 FLAGS' 'build/trace/train_gpt2 --threads 8 FLAGS'

Both commands run a trainer of `make trace`: of two builds, two commits, two numbers of threads or of ranks. They must
train the same model on the same batches. Both are run up to three times: for the first step after which a weight or a
moment differs, for the kernel of that step that wrote the difference, and for what it wrote. If they differ in the
number of ranks, whose kernels see other micro-batches, the search ends at the step. The exit code is 1 if they part.
"""
import os
import shlex
import subprocess
import tempfile

from console import BadInput, command_line, need, parser, run, say


def read(path):
    if not os.path.exists(path):
        return ""
    with open(path) as f:
        return f.read()


def traced(command, path, step, *tensor):
    """runs the command; returns the lines of its trace. It is stopped after `step`; if that is 0, it runs to its end,
    and the last line has its exit code. tensor: a kernel of that step, and the tensor whose contents after it go to
    path.bin"""
    where = ":".join(map(str, (path, step, *tensor)))
    if os.path.exists(path):
        os.remove(path)                                     # of the run before
    with open(path + ".log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "CABLE_TRACE": where})
        while process.poll() is None:
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                if step > 0 and f"\nstep {step} " in read(path):
                    process.kill()
                    process.wait()
    lines = read(path).splitlines()
    if not any(line.startswith("step ") for line in lines):
        raise BadInput(f"{command_line(command)}: trained no step, or is not a trainer that `make trace` has built:\n"
                       f"{read(path + '.log')[-1000:]}")
    ended = [f"ended {process.returncode}"] * (step == 0)
    return [line.split(" ") for line in lines + ended]


def kernels_of(trace):
    """[(name of the kernel, {tensor: sum of what it changed})], the state before the step first"""
    kernels = []
    for line in trace:
        if line[0] == "kernel":
            index, name, tensor, value = int(line[1]), line[2], line[3], line[4]
            while len(kernels) <= index:                    # a kernel that changes nothing has no line
                kernels.append(("", {}))
            kernels[index] = (name, {**kernels[index][1], tensor: value})
    return kernels


def contents_of(command, path, step, kernel, tensor):
    """(the tensor's elements after that kernel, the length of its rows); None if the run has no such tensor"""
    numpy = need("numpy")
    line = next((line for line in traced(command, path, step, kernel, tensor) if line[0] == "contents"), None)
    if line is None:
        return None, 1
    with open(path + ".bin", "rb") as f:
        raw = f.read()
    if line[2] == "2":                                      # bf16: the upper half of a float32
        return (numpy.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4"), int(line[3])
    return numpy.frombuffer(raw, "<f8" if line[2] == "8" else "<f4"), int(line[3])


def first_element(a, b, columns):
    """where two tensors differ first, and how often"""
    numpy = need("numpy")
    different = numpy.flatnonzero(a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}"))
    at = int(different[0])
    place = f"({at // columns}, {at % columns})" if columns > 1 else f"({at})"
    return f"element {place}: {a[at]:.9g} and {b[at]:.9g}; {different.size:,} of {a.size:,} differ"


def part(commands, directory):
    """a sentence that says where they part, None if they do not"""
    paths = [os.path.join(directory, name) for name in "AB"]
    say("1. the step")
    traces = [traced(c, p, 0) for c, p in zip(commands, paths)]
    steps = [[line for line in trace if line[0] == "step"] for trace in traces]
    common = min(map(len, steps))
    step = next((int(a[1]) for a, b in zip(*steps) if a != b), None)
    if step is None:
        for command, trace in zip(commands, traces):
            if trace[-1] != ["ended", "0"]:
                raise BadInput(f"the same bits in {common} steps, but {command_line(command)} ended with exit code "
                               f"{trace[-1][1]}")
        print(f"the same bits in {common} steps" + ("" if len(steps[0]) == len(steps[1]) else
                                                   f"; A trained {len(steps[0])} steps, B {len(steps[1])}"))
        return None
    say(f"2. the kernel of step {step}")
    kernels = [kernels_of(traced(c, p, step)) for c, p in zip(commands, paths)]
    for index, ((name, a), (other, b)) in enumerate(zip(*kernels)):
        if name != other and name and other:
            return f"step {step}, kernel {index}: A runs {name}, B {other}"
        tensor = next((t for t in [*a, *b] if a.get(t) != b.get(t)), None)
        if tensor is None:
            continue
        where = f"before step {step}" if index == 0 else f"step {step}, {name or other} (kernel {index} of the step)"
        say(f"3. the element of {tensor}")
        (x, columns), (y, _) = (contents_of(c, p, step, index, tensor) for c, p in zip(commands, paths))
        if x is None or y is None or x.size != y.size:
            sizes = " and ".join("none" if z is None else f"{z.size:,}" for z in (x, y))
            return f"{where}, {tensor}: {sizes} elements"
        return f"{where}, {tensor}, {first_element(x, y, columns)}"
    return f"step {step}, in its update or in what no kernel of rank 0 computes"


def main(argv):
    p = parser(__doc__)
    p.add_argument("A", type=shlex.split)
    p.add_argument("B", type=shlex.split)
    args = p.parse_args(argv)
    if not args.A or not args.B:
        raise BadInput("expected two commands, got an empty one")
    here = os.curdir if ":" in tempfile.gettempdir() else None          # with a colon CABLE_TRACE ends a path
    with tempfile.TemporaryDirectory(prefix="cable_part", dir=here) as directory:
        found = part([args.A, args.B], os.path.relpath(directory) if here else directory)
    if found is not None:
        print("first difference: " + found)
    return 0 if found is None else 1


if __name__ == "__main__":
    run(main)
