"""gpu_report.py -- the results of gpu_check.py as Markdown: what failed, ratios, tables, stages."""

# attention.md, 12: most time over none, by pass and head size; least TFLOP/s of none, causal, at T = 1024, 4096, 16384
RATIO_TARGETS = {("cable", "forward", 64): 1.06, ("cable", "forward", 128): 1.03, ("cable", "backward", 64): 1.08,
                 ("cable", "backward", 128): 1.08, ("alibi", "forward", 64): 1.06, ("alibi", "forward", 128): 1.03,
                 ("alibi", "backward", 64): 1.08, ("alibi", "backward", 128): 1.08, ("kcable", "forward", 64): 1.35,
                 ("kcable", "forward", 128): 1.30}
SPEED_TARGETS = {("forward", 64): {1024: 180, 4096: 250, 16384: 270}, ("backward", 64): {1024: 120, 4096: 170, 16384: 190},
                 ("forward", 128): {1024: 210, 4096: 280, 16384: 300}, ("backward", 128): {1024: 130, 4096: 190, 16384: 210}}
EVAL_TARGET = 10.0


def items(data, stage):
    return data["stages"].get(stage, {}).get("items", {})


def table(head, rows):
    if not rows:
        return []
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)] + ["| " + " | ".join(str(c) for c in r) + " |" for r in rows] + [""]


def against(value, target, less=True):
    if target is None:
        return ""
    met = value <= target if less else value >= target
    return f"{'at most' if less else 'at least'} {target:g}: {'met' if met else 'MISSED'}"


def attention(data, stage="bench"):
    """[((pass, HS, T, causal, tokens, C, pos), record)]"""
    found = [(tuple(r[k] for k in ("pass", "HS", "T", "causal", "tokens", "C", "pos")), r)
             for r in items(data, stage).values() if r.get("ok") and "pass" in r]
    return sorted(found, key=lambda x: (x[0], x[1].get("backend", "")))


def shape_text(key):
    direction, hs, t, causal, tokens, c, _ = key
    return f"{direction} d={hs} T={t} {'causal' if causal else 'full'}, {tokens} tokens, NH*d={c}"


def ratios(data):
    """rows: what, ratio, target"""
    rows, found = [], dict(attention(data))
    for key in sorted(found):
        none = found.get(key[:6] + ("none",))
        if key[6] != "none" and none:
            ratio = found[key]["ms"] / none["ms"]
            rows.append((f"{key[6]} / none, time: {shape_text(key)}", f"{ratio:.3f}", against(ratio, RATIO_TARGETS.get((key[6], key[0], key[1])))))
    trained = {(r["size"], r["pos"]): r for r in items(data, "train").values() if r.get("ok") and "tokens_per_s" in r}
    for (size, pos), r in sorted(trained.items()):
        none = trained.get((size, "none"))
        if pos != "none" and none and none["B"] == r["B"]:
            rows.append((f"{pos} / none, tokens/s of a training step: {size}, T={r['T']}, B={r['B']}", f"{r['tokens_per_s'] / none['tokens_per_s']:.3f}", ""))
    for r in items(data, "eval").values():
        if r.get("ok") and "ratio" in r:
            rows.append(("evaluation, time of T=131,072 / T=16,384: 124M cable, random weights", f"{r['ratio']:.2f}", against(r["ratio"], EVAL_TARGET)))
    return rows + beside_pytorch(data, found, trained)


def beside_pytorch(data, found, trained):
    rows = []
    for key, theirs in attention(data, "pytorch"):
        ours = found.get(key)
        if ours:
            rows.append((f"PyTorch {theirs['backend']} / ours, time: {key[6]}, {shape_text(key)}", f"{theirs['ms'] / ours['ms']:.3f}", ""))
    for r in items(data, "pytorch").values():
        ours = trained.get((r.get("size"), r.get("pos")))
        if r.get("ok") and ours and "tokens_per_s" in r:
            rows.append((f"ours / PyTorch {r['backend']}, tokens/s: {r['size']} {r['pos']}, T={r['T']}, B={ours['B']} / {r['B']}",
                         f"{ours['tokens_per_s'] / r['tokens_per_s']:.3f}", ""))
    return rows


def result_tables(data):
    lines = []
    rows = []
    for key, r in attention(data):
        target = SPEED_TARGETS.get(key[:2], {}).get(key[2]) if key[6] == "none" and key[3] else None
        live = f"{100 * r['live']:.0f}%" if "live" in r else ""
        rows.append((key[6], shape_text(key), f"{r['ms']:.3f}", f"{r['tflops']:.0f}", f"{100 * r['share']:.0f}%", live,
                     against(r["tflops"], target, less=False)))
    if rows:
        product = items(data, "bench").get("matmul causal") or items(data, "bench").get("matmul full") or {}
        lines += [f"## Attention\n\nA bf16 cuBLASLt product of 8192^3 in the same run: {product.get('tflops', 0):.0f} TFLOP/s; shares are of that.", ""]
        clocks = [f"{r['sm_mhz']['least']} / {r['sm_mhz']['median']} / {r['sm_mhz']['most']}" for n, r in sorted(items(data, "bench").items())
                  if "sm_mhz" in r]
        lines += [f"SM clock while measuring, least / median / most MHz: {'; '.join(clocks)}", ""] if clocks else []
        lines += table(("encoding", "shape", "ms", "TFLOP/s", "share", "live tiles", "target (TFLOP/s)"), rows)
    rows = [(r["size"], r["pos"], r["T"], r["B"], f"{r['tokens_per_s']:,.0f}", f"{100 * r['mfu']:.1f}%" if "mfu" in r else "n/a",
             r["peak_mib"] if r.get("peak_mib") else "n/a") for r in items(data, "train").values() if r.get("ok") and "tokens_per_s" in r]
    if rows:
        lines += ["## Training, bf16", ""] + table(("model", "encoding", "T", "B", "tokens/s", "MFU", "peak MiB (all of the GPU)"), sorted(rows))
    for r in items(data, "eval").values():
        if r.get("ok") and "ratio" in r:
            lines += ["## Evaluation, 124M cable, random weights", ""]
            lines += table(("T", "seconds a window"), [(t, f"{s:.3f}") for t, s in sorted(r["seconds_per_window"].items(), key=lambda x: int(x[0]))])
            lines += [*r.get("live", []), ""]
    rows = [(n, k, r[k]["step"], f"{r[k]['difference']:.2e}", f"{r[k]['measured_error']:.2e}", f"{r[k]['multiple']} x", f"{r[k]['bound']:.2e}")
            for n, r in sorted(items(data, "losses").items()) for k in ("fp32", "bf16") if k in r]
    if rows:
        lines += ["## Losses of 20 steps, CPU against CUDA", "", "Measured error: FP32, two CPU builds of other rounding; bf16, initial weights "
                  "rounded to bf16 on the CPU, the largest up to that step; of the encoding or the median of all, whichever is larger. "
                  "Shown is the step nearest to its bound.", ""]
        lines += table(("run", "build", "step", "relative difference", "measured error", "allowed", "bound"), rows)
    rows = [(trainer, len(r["losses"]), "NCCL" if r["nccl"] else "MPI") for trainer, r in sorted(items(data, "ranks").items()) if r.get("ok")]
    if rows:
        lines += ["## Two ranks: the bits of one", ""] + table(("trainer", "steps", "by way of"), rows)
    rows = [(f"{binary}: {t['name']}", t["status"], f"{t['ms']:.1f}", t.get("info", "")) for binary, r in sorted(items(data, "kernels").items())
            for t in r.get("tests", [])]
    if rows:
        checked = [(n, r["test"] or "no test passed", "no finding" if r.get("finished") else "not finished" if r["test"] else "not run")
                   for n, r in sorted(items(data, "sanitizer").items()) if r.get("ok")]
        lines += (["## Sanitizer", ""] + table(("tool, tests", "test", "result"), checked)) if checked else []
        lines += ["## Kernel tests", ""] + table(("test", "result", "ms", ""), rows)
    return lines


def markdown(data, order):
    lines = [f"# {data['gpu']}, commit {data['commit']}", ""]
    smi, nvcc = items(data, "device").get("nvidia-smi", {}), items(data, "device").get("nvcc", {})
    lines += [f"Driver {smi.get('driver_version', '?')}, {smi.get('memory.total', '?')} MiB, SM clock at most {smi.get('clocks.max.sm', '?')} MHz; "
              f"{' '.join(nvcc.get('version', ['nvcc ?']))}", ""]
    failures = []
    for name in order:
        stage = data["stages"].get(name, {})
        if stage.get("status") == "unfinished":
            failures.append(f"- {name} is unfinished. {stage.get('error', '')}")
        elif stage.get("error"):
            failures.append(f"- {name}: {stage['error']}")
        failures += [f"- {name}, {n}: " + r.get("error", "failed").replace("\n", "\n  ") for n, r in stage.get("items", {}).items() if not r.get("ok")]
    lines += ["## FAILED", "", *failures, ""] if failures else []
    rows = ratios(data)
    if rows:
        lines += ["## Ratios", ""] + table(("", "ratio", "target"), rows)
    lines += result_tables(data)
    lines += ["## Stages", ""]
    lines += table(("stage", "status", "seconds", "results", ""),
                   [(n, s["status"], f"{s['seconds']:.0f}", len(s["items"]), s.get("note", "")) for n in order for s in [data["stages"].get(n)] if s]
                   + [(n, "not run", "", "", "") for n in order if n not in data["stages"]])
    return "\n".join(lines).rstrip() + "\n"
