"""gpu_report.py -- the results of gpu_check.py as Markdown: failures first, then ratios, tables and stages."""

# at most this time relative to none, by encoding, pass and head size
RATIO_TARGETS = {("cable", "forward", 64): 1.06, ("cable", "forward", 128): 1.03, ("cable", "backward", 64): 1.08,
                 ("cable", "backward", 128): 1.08, ("alibi", "forward", 64): 1.06, ("alibi", "forward", 128): 1.03,
                 ("alibi", "backward", 64): 1.08, ("alibi", "backward", 128): 1.08, ("kcable", "forward", 64): 1.35,
                 ("kcable", "forward", 128): 1.30}
EVAL_TARGET = 10.0      # at most this time for a window of 131,072 tokens relative to one of 16,384


def items(data, stage):
    return data["stages"].get(stage, {}).get("items", {})


def good(data, stage, field):
    """the records of a stage that passed and have this field"""
    return [r for r in items(data, stage).values() if r.get("ok") and field in r]


def line_of(cells):
    return "| " + " | ".join(str(c) for c in cells) + " |"


def table(head, rows):
    """the lines of a table, none without rows"""
    if not rows:
        return []
    return [line_of(head), "|" + "---|" * len(head), *(line_of(r) for r in rows), ""]


def at_most(value, target):
    if target is None:
        return ""
    return f"at most {target:g}: " + ("met" if value <= target else "MISSED")


def attention(data, stage="bench"):
    """[((pass, HS, T, causal, tokens, C, pos), record)]"""
    found = [(tuple(r[k] for k in ("pass", "HS", "T", "causal", "tokens", "C", "pos")), r)
             for r in good(data, stage, "pass")]
    return sorted(found, key=lambda x: (x[0], x[1].get("backend", "")))


def shape_text(key):
    direction, hs, t, causal, tokens, c, _ = key
    return f"{direction} d={hs} T={t} {'causal' if causal else 'full'}, {tokens} tokens, NH*d={c}"


# Ratios ---------------------------------------------------------------------------------------------------------------

def ratios(data):
    """rows of (what, ratio, target)"""
    rows, found = [], dict(attention(data))
    for key in sorted(found):
        none = found.get(key[:6] + ("none",))
        if key[6] != "none" and none:
            ratio = found[key]["ms"] / none["ms"]
            target = RATIO_TARGETS.get((key[6], key[0], key[1]))
            rows.append((f"{key[6]} / none, time: {shape_text(key)}", f"{ratio:.3f}", at_most(ratio, target)))
    ours = good(data, "train", "tokens_per_s") + good(data, "step", "tokens_per_s")
    trained = {(r["size"], r["pos"]): r for r in ours}
    for (size, pos), r in sorted(trained.items()):
        none = trained.get((size, "none"))
        if pos != "none" and none and none["B"] == r["B"]:
            ratio = r["tokens_per_s"] / none["tokens_per_s"]
            what = f"{pos} / none, tokens/s of a training step: {size}, T={r['T']}, B={r['B']}"
            rows.append((what, f"{ratio:.3f}", ""))
    for r in good(data, "eval", "ratio"):
        what = "evaluation, time of T=131,072 / T=16,384: 124M cable, random weights"
        rows.append((what, f"{r['ratio']:.2f}", at_most(r["ratio"], EVAL_TARGET)))
    return rows + pytorch_ratios(data, found, trained)


def pytorch_ratios(data, found, trained):
    rows = []
    for key, theirs in attention(data, "pytorch"):
        ours = found.get(key)
        if ours:
            what = f"PyTorch {theirs['backend']} / ours, time: {key[6]}, {shape_text(key)}"
            rows.append((what, f"{theirs['ms'] / ours['ms']:.3f}", ""))
    for theirs in good(data, "torch", "tokens_per_s"):
        ours = trained.get((theirs.get("size"), theirs.get("pos")))
        if ours:
            what = (f"ours / PyTorch {theirs['backend']}, tokens/s: {theirs['size']} {theirs['pos']}, T={theirs['T']}, "
                    f"B={ours['B']} / {theirs['B']}")
            rows.append((what, f"{ours['tokens_per_s'] / theirs['tokens_per_s']:.3f}", ""))
    return rows


# Tables: each function returns the lines of its section, none without results -----------------------------------------

def attention_section(data):
    rows = [(key[6], shape_text(key), f"{r['ms']:.3f}", f"{r['tflops']:.0f}", f"{100 * r['share']:.0f}%",
             f"{100 * r['live']:.0f}%" if "live" in r else "") for key, r in attention(data)]
    if not rows:
        return []
    product = items(data, "bench").get("matmul causal") or items(data, "bench").get("matmul full") or {}
    return ["## Attention", "", f"A bf16 cuBLASLt product of 8192^3 in the same run: {product.get('tflops', 0):.0f} "
            "TFLOP/s; shares are relative to it.", "",
            *table(("encoding", "shape", "ms", "TFLOP/s", "share", "live tiles"), rows)]


def training_section(data):
    rows = []
    for r in good(data, "train", "tokens_per_s") + good(data, "step", "tokens_per_s"):
        mfu = f"{100 * r['mfu']:.1f}%" if "mfu" in r else "n/a"
        rows.append((r["size"], r["pos"], r["T"], r["B"], f"{r['tokens_per_s']:,.0f}", mfu, r.get("peak_mib") or "n/a"))
    if not rows:
        return []
    head = ("model", "encoding", "T", "B", "tokens/s", "MFU", "peak MiB (all of the GPU)")
    return ["## Training, bf16", ""] + table(head, sorted(rows))


def step_section(data):
    """the kernels of a step, beside their prediction"""
    r = items(data, "step").get("profile", {})
    if not r.get("ok"):
        return []
    return ["## A step of 124M, kernel by kernel", "",
            f"Beside the prediction for one {r['predicted_for']} (scripts/roofline.py).", "",
            "```", *r["lines"], "", *r["beside"], "```", ""]


def evaluation_section(data):
    lines = []
    for r in good(data, "eval", "ratio"):
        seconds = sorted(r["seconds_per_window"].items(), key=lambda x: int(x[0]))
        lines += ["## Evaluation, 124M cable, random weights", ""]
        lines += table(("T", "seconds per window"), [(t, f"{s:.3f}") for t, s in seconds])
        lines += [*r.get("live", []), ""]
    return lines


def losses_section(data):
    rows = [(name, kind, r[kind]["step"], f"{r[kind]['difference']:.2e}", f"{r[kind]['bound']:.2e}")
            for name, r in sorted(items(data, "losses").items()) for kind in ("fp32", "bf16") if kind in r]
    if not rows:
        return []
    return ["## Losses of 20 steps, CPU against CUDA", "", "Each row shows the step nearest to its bound, a multiple "
            "of what an H100 had (DIFFERENCES of dev/gpu_check.py).", "",
            *table(("run", "build", "step", "relative difference", "bound"), rows)]


def ranks_section(data):
    rows = [(trainer, len(r["losses"]), "NCCL" if r["nccl"] else "host")
            for trainer, r in sorted(items(data, "ranks").items()) if r.get("ok")]
    return ["## Two ranks: the bits of one", ""] + table(("trainer", "steps", "library"), rows) if rows else []


def sanitizer_result(record):
    if record.get("finished"):
        return "no finding"
    return "not finished" if record["test"] else "not run"


def kernels_section(data):
    rows = [(name, r["status"], f"{r['ms']:.1f}", r["info"])
            for name, r in sorted(items(data, "kernels").items()) if "ms" in r]
    if not rows:
        return []
    lines = []
    checked = [(n, r["test"] or "no test passed", sanitizer_result(r))
               for n, r in sorted(items(data, "sanitizer").items()) if r.get("ok")]
    if checked:
        lines += ["## Sanitizer", ""] + table(("tool, tests", "test", "result"), checked)
    return lines + ["## Kernel tests", ""] + table(("test", "result", "ms", ""), rows)


# The whole report -----------------------------------------------------------------------------------------------------

def failures(data, order):
    """(lines of what failed, lines of what is unfinished)"""
    failed, unfinished = [], []
    for name in order:
        stage = data["stages"].get(name, {})
        if stage.get("status") == "unfinished":
            unfinished.append(f"- {name} is unfinished. {stage.get('error', '')}")
        elif stage.get("error"):
            failed.append(f"- {name}: {stage['error']}")
        for item, r in stage.get("items", {}).items():
            if not r.get("ok"):
                text = f"- {name}, {item}: " + r.get("error", "failed").replace("\n", "\n  ")
                (unfinished if r.get("unfinished") else failed).append(text)
    return failed, unfinished


def stage_rows(data, order):
    stages = data["stages"]
    rows = []
    for name in order:
        if name in stages:
            s = stages[name]
            rows.append((name, s["status"], f"{s['seconds']:.0f}", len(s["items"]), s.get("note", "")))
    return rows + [(name, "not run", "", "", "") for name in order if name not in stages]


def markdown(data, order):
    """the report; order: the names of all stages"""
    smi, nvcc = items(data, "device").get("nvidia-smi", {}), items(data, "device").get("nvcc", {})
    driver, mib, mhz = (smi.get(field, "?") for field in ("driver_version", "memory.total", "clocks.max.sm"))
    lines = [f"# {data['gpu']}, commit {data['commit']}", ""]
    version = " ".join(nvcc.get("version", ["nvcc ?"]))
    lines += [f"Driver {driver}, {mib} MiB, SM clock at most {mhz} MHz; {version}", ""]
    failed, unfinished = failures(data, order)
    if failed:
        lines += ["## FAILED", "", *failed, ""]
    if unfinished:
        lines += ["## Unfinished", "", *unfinished, ""]
    rows = ratios(data)
    if rows:
        lines += ["## Ratios", ""] + table(("", "ratio", "target"), rows)
    for section in (attention_section, training_section, step_section, evaluation_section, losses_section,
                    ranks_section, kernels_section):
        lines += section(data)
    lines += ["## Stages", ""] + table(("stage", "status", "seconds", "results", ""), stage_rows(data, order))
    return "\n".join(lines).rstrip() + "\n"
