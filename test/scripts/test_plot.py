"""test_plot.py -- scripts/plot.py draws every figure from a small log and refuses bad input in words."""
import itertools
import json
import math
import os
import re
import struct
import subprocess
import sys
import unittest

from folder import SCRIPTS, Folder, called
import plot

PLOT = os.path.join(SCRIPTS, "plot.py")


def plotted(fig):
    """{label: [(x, y), ...]} of the first axes"""
    return {line.get_label(): list(zip(line.get_xdata(), line.get_ydata())) for line in fig.axes[0].get_lines()
            if not line.get_label().startswith("_")}

# a task's record but for its file, T and exact answers
PASSAGE = {"kind": "task", "pos": "cable", "length": 8, "examples": 1000, "tokens": 8000, "accuracy": 0.5, "loss": 1.5}


class TestPlot(Folder):
    def log(self, name, *lines):
        text = lambda r: json.dumps({"stride": r["T"], **r} if r["kind"] == "curve" else r)
        self.write(name + "/log.jsonl", "".join(text(line) + "\n" for line in lines))
        return self.path(name)

    def file(self, name, content):
        return self.write(name, content if isinstance(content, str) else json.dumps(content))

    def draw(self, *args):
        """runs plot.py: a PNG of readable size comes out"""
        out = self.path("out.png")
        r = subprocess.run([sys.executable, PLOT, *args, "-o", out], capture_output=True, text=True)
        self.assertEqual((r.returncode, r.stdout.strip()), (0, out), r.stderr)
        with open(out, "rb") as f:
            head = f.read(24)
        self.assertEqual(head[:8], b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", head[16:24])
        self.assertTrue(900 <= width <= 1600 and 500 <= height <= 1200, (width, height))
        return r.stderr

    def refused(self, *args, naming):
        r = subprocess.run([sys.executable, PLOT, *args], capture_output=True, text=True)
        self.assertEqual(r.returncode, 2, r.stdout + r.stderr)
        self.assertIn(naming, r.stderr)
        self.assertNotIn("Traceback", r.stderr)

    def train_log(self, name="run"):
        steps = [{"kind": "train", "step": s, "loss": 5 - s / 50, "lr": 1e-3, "norm": 1, "ms": 3, "tok_per_s": 9}
                 for s in range(130)]
        again = {"kind": "train", "step": 7, "loss": 4.5, "lr": 1e-3}
        return self.log(name, *steps, {"kind": "train", "step": 130, "loss": None}, again,
                        {"kind": "val", "step": 100, "loss": 3.2})

    def test_train(self):
        run = self.train_log()
        with open(os.path.join(run, "log.jsonl"), "a") as f:
            f.write('{"kind":"train","ste')                         # of a run that was killed
        self.assertIn("line 134: left out, because it has no end",
                      self.draw("train", run, self.train_log("_$\\other$")))
        self.assertEqual(len(plotted(plot.plot_train([self.path("_$\\other$")]))), 2)
        train = dict(plot.series(plot.read_log(run), "train", "loss"))
        self.assertEqual((len(train), train[7], train[8]), (130, 4.5, 5 - 8 / 50))
        self.assertEqual(plotted(plot.plot_train([run]))["run, validation"], [(100, 3.2)])
        dead = self.log("dead", *({"kind": "val", "step": step, "loss": 3, "dead_heads": 0.125} for step in (5, 10)))
        self.assertEqual(len(plot.plot_train([run]).axes), 2)
        self.assertEqual(plot.plot_train([run, dead]).axes[2].lines[0].get_xydata().tolist(), [[5, 12.5], [10, 12.5]])

    def record(self, T, ppl, stride=None, pos="cable"):
        return {"kind": "extrapolation", "pos": pos, "T": T, "T_train": 128, "stride": stride or T, "ppl": ppl}

    def test_lengths(self):
        run = self.log("run", self.record(64, 99), self.record(256, 5.8), self.record(64, 6), self.record(128, 5.9),
                       self.record(256, 5.7, 64), self.record(128, 300, pos="rope"), self.record(256, None, pos="rope"))
        self.draw("lengths", run)
        fig = plot.plot_lengths([run])
        self.assertEqual(plotted(fig), {"cable": [(64, 6), (128, 5.9), (256, 5.8)], "rope": [(128, 300)],
                                        "cable, stride 64": [(64, 6), (256, 5.7)]})
        trained = [line for line in fig.axes[0].get_lines() if line.get_label().startswith("_")]
        self.assertEqual([list(line.get_xdata()) for line in trained], [[128, 128]])
        both = plotted(plot.plot_lengths([run, self.log("twin", self.record(64, 7))]))
        self.assertEqual(both["cable (twin)"], [(64, 7)])

    def test_runs_with_equal_names_stay_apart(self):
        passage = {**PASSAGE, "file": "quote_000_0064.bin", "T": 64}
        head = {"kind": "head", "pos": "cable", "T": 64, "layer": 0, "head": 0, "live_tiles": 0.5, "window90": 1,
                "sink_weight": {"4": 0.5}}
        runs = [self.log(f"cable-T{n}/seed_42", {"kind": "train", "step": 0, "loss": n}, self.record(64, n),
                         {"kind": "curve", "pos": "cable", "T": 1, "loss": [n]}, {**passage, "exact": 250 * n},
                         {**head, "entropy": n}) for n in (1, 2)]
        names = ["cable-T1/seed_42", "cable-T2/seed_42"]
        self.assertEqual(plotted(plot.plot_lengths(runs)), {f"cable ({names[n]})": [(64, n + 1)] for n in (0, 1)})
        self.assertEqual(list(plotted(plot.plot_curve(runs))), [f"cable ({name}), T = 1" for name in names])
        self.assertEqual(list(plotted(plot.plot_train(runs))), [f"{name}, train" for name in names])
        maps = [ax for ax in plot.plot_passages(runs).axes if ax.images]
        self.assertEqual([(ax.get_title(), ax.images[0].get_array().tolist()) for ax in maps[:2]],
                         [(f"quote, {names[n]} (cable)", [[25 * n + 25]]) for n in (0, 1)])
        rows = plot.plot_heads(runs).axes[::4]
        self.assertEqual([ax.get_ylabel() for ax in rows], [f"{name} (cable)\nT = 64; layer" for name in names])
        self.assertEqual([ax.images[0].get_array().tolist() for ax in plot.plot_heads(runs).axes[1::4]],
                         [[[1]], [[2]]])
        self.assertEqual(plot.name_of("a/b/c/", ["a/b/c/", "d/b/c", "b/e"]), "a/b/c")
        self.assertEqual(plot.name_of("b/e", ["a/b/c", "d/b/c", "b/e"]), "e")

    def test_a_stretched_rope_is_a_line_of_its_own(self):
        stretch = {"rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 128}}
        curves = [{"kind": "curve", "pos": "rope", "T": 4, "loss": [4, 3, 2, last]} for last in (9, 1)]
        run = self.log("run", self.record(256, 90, pos="rope"), {**self.record(256, 7, pos="rope"), **stretch},
                       curves[0], {**curves[1], **stretch})
        fig = plot.plot_lengths([run])
        self.assertEqual(plotted(fig), {"rope": [(256, 90)], "rope, yarn": [(256, 7)]})
        self.assertEqual([y for _, y in plotted(plot.plot_curve([run]))["rope, yarn, T = 4"]], [4, 3, 2, 1])
        self.assertEqual(plot.stretch_of({"window": 64, "sinks": 4, **stretch}), ", yarn, window 64+4")
        self.assertEqual(plot.stretch_of({"window": [64, 0], "document_mask": True}),
                         ", window 64,0+0, documents apart")
        self.assertEqual(plot.stretch_of({"rope_theta": 500000.0, **stretch}), ", yarn, theta 500000")

    def test_curve(self):
        run = self.log("run", {"kind": "curve", "pos": "alibi", "T": 4, "loss": [4, 3, 2, None]},
                       {"kind": "curve", "pos": "cable", "T": 4, "loss": [4, 3, 2.5, 2]})
        skipped = [self.log("trained", {"kind": "train", "step": 0, "loss": 3}), self.path("empty")]
        os.mkdir(self.path("empty"))
        self.assertEqual(self.draw("curve", *skipped, run),
                         "".join(f'skipped {path}: no records of kind "curve"\n' for path in skipped))
        lines = plotted(plot.plot_curve([run]))
        self.assertEqual([y for _, y in lines["cable, T = 4"]], [4, 3, 2.5, 2])
        self.assertEqual([round(x, 9) for x, _ in lines["alibi, T = 4"]], [1, 2, 3])

    def test_records_below_a_run(self):
        """an evaluation's --out may be in the run's directory; a run's own records count first"""
        curve = {"kind": "curve", "pos": "alibi", "T": 2, "loss": [4, 3]}
        train = {"kind": "train", "step": 0, "loss": 3}
        run = self.log("all/a [1]", train)
        self.refused("curve", run, naming="no records of kind")
        deep = [self.log(f"all/a [1]/eval/{name}", {**curve, "loss": [4, n]}) for n, name in enumerate("xy")]
        self.assertEqual(plot.logs_with([run], "curve").keys(), {*deep})
        self.assertEqual(plotted(plot.plot_curve([run])), {"alibi (x), T = 2": [(1, 4), (2, 0)],
                                                           "alibi (y), T = 2": [(1, 4), (2, 1)]})
        near = self.log("all/a [1]/eval", curve)
        self.assertEqual(plot.logs_with([run + "/"], "curve").keys(), {near})
        self.assertEqual(plot.logs_with([run], "train").keys(), {run})
        self.assertEqual(plot.logs_with([self.path("all")], "train").keys(), {run})
        self.draw("train", self.path("all"))

    def line(self, fig, label):
        return next(line for line in fig.axes[0].get_lines() if line.get_label() == label)

    @staticmethod
    def cielab(colour):
        """by matrices, of the standard's text; L* is grey"""
        rgb = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        rgb = [((v + 0.055) / 1.055) ** 2.4 if v > 0.04045 else v / 12.92 for v in rgb]
        xyz = [sum(m * v for m, v in zip(row, rgb)) for row in (
            (0.412391, 0.357584, 0.180481), (0.212639, 0.715169, 0.072192), (0.019331, 0.119195, 0.950532))]
        f = [v ** (1 / 3) if v > (6 / 29) ** 3 else v * (29 / 6) ** 2 / 3 + 4 / 29
             for v in (xyz[0] / 0.95046, xyz[1], xyz[2] / 1.08906)]
        return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])

    def test_looks_are_apart_in_colour_and_in_grey(self):
        """of all encodings, and of those that published figures show beside each other"""
        shown = [[*plot.STYLES], ["carope", "rope", "rope:clock=cable", "cable", "none"],
                 ["cable", "cable:bias=0.5", "cable:bias=0.25", "cable_v1", "cable"],
                 ["none", "cable", "none,none,none,cable", "cable,none,none,none", "rope", "rope+cable_nw"],
                 ["cable", "alibi", "rope", "none", "cable_nw", "bam+ssmax", "rope:clock=cable", "fox", "carope"]]
        for n, names in enumerate(shown):
            looks = plot.styles_of(enumerate(names))
            for a, b in itertools.combinations(looks, 2):
                (one, marker), (two, its) = looks[a], looks[b]
                x, y = self.cielab(one), self.cielab(two)
                self.assertGreater(math.dist(x, y), 18 if n == 0 else 13, (a, b, one, two))
                family = [re.search("cable|alibi|grape|kerple|t5|rope|$", re.split("[:,+]", pos)[0])[0]
                          for _, pos in (a, b)]
                if marker == its or family[0] == family[1] != "":           # grey has to tell them apart
                    self.assertGreater(abs(x[0] - y[0]), 15 if marker == its and n == 0 else 7, (a, b, one, two))
                if family[0] == family[1] != "":
                    hues = [math.degrees(math.atan2(*z[:0:-1])) for z in (x, y)]
                    self.assertLess(abs((hues[0] - hues[1] + 180) % 360 - 180), 30, (a, b, one, two))
                self.assertAlmostEqual(math.dist(x, y), math.dist(plot.lab(one), plot.lab(two)), 0)
            self.assertLess(max(self.cielab(colour)[0] for colour, _ in looks.values()), 84)    # paper has 100

    def test_lines_that_coincide_are_drawn_apart(self):
        fig, ax = plot.figure()
        lines = [ax.plot([1, 2, 4], y, label=name)[0] for name, y in (
            ("one", [9, 9, 9]), ("two", [9, 9, 9]), ("low", [9, 9, 0]), ("three", [9, 9, 9.001]))]
        ax.plot([1, 2, 4], [9, 9, 9], label="_hidden")
        plot.legend_beside(ax, [(1, line) for line in lines], plot.band_of([2, 3]))
        fig.canvas.draw()
        at = {line.get_label(): round(float(line.get_transform().transform((1, 9))[1] * 72 / fig.dpi), 2)
              for line in ax.lines}
        base = at["low"]
        self.assertEqual([round(at[name] - base, 1) for name in ("one", "two", "three", "_hidden")], [-2.5, 0, 2.5, 0])
        self.assertEqual(ax.get_legend().get_title().get_text(),
                         "band: ± the standard\ndeviation of 2 to 3 seeds\nlines that coincide are\ndrawn apart")
        self.assertEqual(plot.band_of([1, 1]), "one seed")
        self.assertIn("of 3 seeds", plot.band_of([3]))

    def test_one_colour_per_encoding_in_every_figure(self):
        mine = plot.style("my_gate")[0]
        self.assertEqual([plot.style("cable"), plot.styles_of([("a", "rope, yarn"), ("b", "rope")])["b", "rope"]],
                         [plot.STYLES["cable"], plot.STYLES["rope"]])
        def run(name, pos):
            curves = [{"kind": "curve", "pos": pos, "T": T, "loss": [4 - t / T for t in range(T)]} for T in (8, 16)]
            return self.log(name, {"kind": "train", "step": 0, "loss": 3}, self.record(8, 5, pos=pos), *curves)
        runs = [run("one", "alibi"), run("two", "my_gate")]
        for figure, label in ((plot.plot_lengths, "my_gate"), (plot.plot_curve, "my_gate, T = 8"),
                              (plot.plot_train, "two, train")):
            for order in runs, runs[::-1], runs[1:]:
                self.assertEqual(self.line(figure(order), label).get_color(), mine, label)
        # the second run of an encoding has a shade of its colour
        twins = plot.plot_curve([*runs, run("three", "my_gate")])
        first, second = (self.line(twins, f"my_gate ({name}), T = 8").get_color() for name in ("two", "three"))
        self.assertEqual((first, second == first), (mine, False))

    def test_one_line_style_per_length(self):
        curve = lambda pos, T: {"kind": "curve", "pos": pos, "T": T, "loss": [4 - t / T for t in range(T)]}
        both = [self.log(pos, curve(pos, 16), curve(pos, 8)) for pos in ("alibi", "rope")]
        fig = plot.plot_curve(both)
        dash = {(pos, T): self.line(fig, f"{pos}, T = {T}").get_linestyle()
                for pos in ("alibi", "rope") for T in (8, 16)}
        self.assertEqual([dash["alibi", T] == dash["rope", T] for T in (8, 16)], [True, True])
        self.assertNotEqual(dash["alibi", 8], dash["alibi", 16])
        legend = [text.get_text() for text in fig.axes[0].get_legend().get_texts()]
        self.assertEqual(sorted(legend), ["T = 16", "T = 8", "alibi", "rope"])

    def test_curve_has_no_last_bin_of_a_single_position(self):
        for T in (64, 100, 128, 2048):
            values = [1.0] * (T - 1) + [9.0]
            bins = plot.geometric_bins(values)
            self.assertLess(bins[-1][1], 2.5, T)                # by itself the last position would be 9
            self.assertTrue(all(a < b for (a, _), (b, _) in zip(bins, bins[1:])))
        self.assertEqual(len(plot.geometric_bins([1.0] * 4)), 4)
        # four bins an octave: 54 to 63, then 64 on, which joins them until it has half as many positions
        for T, mean in ((64, 19 / 11), (67, 22 / 14), (68, 13 / 5), (70, 15 / 7)):
            self.assertAlmostEqual(plot.geometric_bins([1.0] * (T - 1) + [9.0])[-1][1], mean, 12, T)

    def test_curve_shows_small_differences(self):
        losses = lambda end: [end + 4 / t for t in range(1, 129)]
        run = self.log("run", *({"kind": "curve", "pos": pos, "T": 128, "loss": losses(end)}
                                for pos, end in (("cable", 1.30), ("alibi", 1.36))))
        fig = plot.plot_curve([run])
        low, high = fig.axes[0].get_ylim()
        self.assertGreater(0.06 / (high - low), 0.08)           # on a full axis it would be 0.015
        self.assertLess(low, 1.33)
        self.assertIn("to 5.36", " ".join(text.get_text() for text in fig.axes[0].texts))

    def test_the_later_half_of_every_curve_is_in_the_frame(self):
        noisy = [3.48, 3.20, 3.69, 3.86, 3.45, 3.26, 3.50, 3.33, 3.45, 3.35, 3.33]      # of a study of 30 steps
        alibi = [3.47, 3.17, 3.69, 3.83, 3.46, 3.27, 3.52, 3.34, 3.46, 3.36, 3.34]
        rope = [4.30, 3.21, 3.80, 3.96, 3.48, 3.29, 3.57, 3.37, 3.50, 3.38, 3.36]
        ax = plot.figure()[1]
        for shown, lines in ((32, [noisy, alibi, rope]), (11, [noisy]), (17, [noisy, [4.9] * 5 + noisy[5:]]),
                             (18, [noisy, [1.1] * 4 + noisy[4:]]), (22, [noisy, [9.0] * 11]),
                             (15, [noisy, [2.0, 9.0, 2.1, 8.0]]), (1, [[1.0]]), (10, [[2.0] * 5] * 2)):
            ax.clear()
            plot.loss_axis(ax, [list(enumerate(line)) for line in lines])
            low, high = ax.get_ylim()
            inside = [[low < v < high for v in line] for line in lines]
            self.assertTrue(all(all(line[len(line) // 2:]) for line in inside), (low, high, lines))
            self.assertEqual(sum(map(sum, inside)), shown, (low, high, lines))
            note, values = [text.get_text() for text in ax.texts], sum(map(len, lines))
            self.assertEqual([text.split(" points")[0] for text in note],
                             [f"cut off: {values - shown} of {values}"] * (shown < values))

    def test_bias(self):
        data = {"pos": "cable", "layer": 0, "head": 1, "tokens": ["a", " $\\b$", "\n"]}
        data["bias"] = [[0], [-1, 0], [-3, -2, 0]]
        self.draw("bias", self.file("bias.json", data))
        shown = plot.plot_bias([self.path("bias.json")]).axes[0].images[0].get_array().filled(9).tolist()
        self.assertEqual(shown, [[0, 9, 9], [-1, 0, 9], [-3, -2, 0]])
        # the colours: without the lowest 2 %; both signs around white
        colours = lambda rows: plot.plot_bias([self.file("c.json", {"bias": rows})]).axes[0].images[0]
        penalties = [[-float(i - j) for j in range(i + 1)] for i in range(20)]
        penalties[19][0] = -1000
        self.assertEqual(colours(penalties).get_clim(), (-17, 0))           # of 210, four are lower
        both = colours([[1], [-2, 0.5]])
        self.assertEqual((both.get_clim(), both.get_cmap().name), ((-2, 2), "PuOr_r"))
        data["bias"] = [[0, 7, 7], [-1, 0, 7], [-3, -2, 0]]         # above the diagonal, where the mask is
        full = plot.plot_bias([self.file("full.json", data)]).axes[0].images[0].get_array().filled(9).tolist()
        self.assertEqual(full, shown)
        self.draw("bias", self.file("bias.json", {**data, "bias": [[0], [-1, 0], [-4, -2, 0]]}), "--normalize")
        fig = plot.plot_bias([self.path("bias.json")], True)
        shown = fig.axes[0].images[0].get_array().filled(9).tolist()
        self.assertEqual(shown, [[0, 9, 9], [-0.25, 0, 9], [-1, -0.5, 0]])

    def test_passages(self):
        cells = [{**PASSAGE, "file": f"{kind}_{d:03d}_{T:04d}.bin", "T": T, "exact": T + d}
                 for kind in ("needle", "quote") for T in (128, 64) for d in (0, 50, 100)]
        run = self.log("asked", {**cells[0], "file": "fflm_test_sparse_0080.bin"}, *cells[:-1],
                       {**cells[0], "exact": 250})                           # the last record of a cell counts
        self.draw("passages", run)
        shown = [ax.images[0].get_array().filled(-1).tolist() for ax in plot.plot_passages([run]).axes if ax.images]
        for found, last in zip(shown[:2], (16.4, -1)):                  # a row per length, the shortest at the bottom
            first = 25 if last > 0 else 12.8
            for row, expected in zip(found, ([6.4, 11.4, 16.4 if last > 0 else -1], [first, 17.8, 22.8])):
                for x, y in zip(row, expected):
                    self.assertAlmostEqual(x, y)
        self.assertEqual({ax.images[0].get_clim() for ax in plot.plot_passages([run]).axes if ax.images}, {(0, 100)})
        self.refused("passages", self.train_log(), naming="--tasks")
        self.refused("passages", self.log("none", {**cells[0], "file": "copy_test_0010.bin"}), naming="--text")

    def test_heads(self):
        heads = [{"kind": "head", "pos": pos, "T": 512, "layer": l, "head": h, "entropy": 1 + l, "live_tiles": 0.5,
                  "window90": 10 * h + l, "sink_weight": {"1": 0.1, "4": 0.1 * l + 0.01 * h}}
                 for pos in ("none", "cable") for l in range(2) for h in range(3)]
        run = self.log("run", {**heads[0], "entropy": 9}, *heads, {**heads[0], "entropy": None})
        self.draw("heads", run)
        shown = [ax.images[0].get_array().tolist() for ax in plot.plot_heads([run]).axes]
        self.assertEqual(len(shown), 8)                                 # four statistics of two models
        self.assertEqual([ax.images[0].get_clim() for ax in plot.plot_heads([run]).axes],
                         2 * [(0, 100), (0, math.log(512)), (0, 512), (0, 100)])
        self.assertEqual(shown[1], [[1] * 3, [2] * 3])                  # layer 0 at the bottom
        self.assertEqual(shown[2], [[0, 10, 20], [1, 11, 21]])
        self.assertAlmostEqual(shown[4][1][2], 12)
        self.refused("heads", self.train_log("trained"), naming="scripts/heads.py")

    def test_without_out_a_figure_is_beside_its_input(self):
        run = self.train_log()
        grid = self.file("grid.json", {"bias": [[0], [-1, 0]]})
        for figure, given, image in ("train", run, os.path.join(run, "train.png")), ("bias", grid, grid[:-5] + ".png"):
            code, _, _ = called(plot.main, figure, given)
            self.assertEqual((code, os.path.exists(image)), (0, True), image)

    def test_refusals(self):
        self.refused("train", self.path("nowhere"), naming="nowhere")
        self.refused("train", self.log("empty"), naming="no record")
        self.refused("lengths", self.train_log(), naming="--out RUN_eval --eval_lengths")
        self.refused("lengths", self.log("reach", self.record(256, None)), naming="perplexity")
        self.refused("curve", self.train_log(), naming="--curve")
        grid = {"pos": "cable", "matrices": [{"layer": n // 3, "head": n % 3, "bias": [[0], [-n - 1, 0]]}
                                             for n in range(6)]}
        axes = plot.plot_bias([self.file("grid.json", grid)]).axes
        values = [ax.images[0].get_array().filled(9).tolist() for ax in axes if ax.images]
        self.assertEqual(values, [[[0, 9], [-n - 1, 0]] for n in range(6)])
        self.assertEqual(len({ax.images[0].get_clim() for ax in axes if ax.images}), 1)     # one scale of colours
        axes = plot.plot_bias([self.path("grid.json")], True).axes
        values = [ax.images[0].get_array().filled(9).tolist() for ax in axes if ax.images]
        self.assertEqual(values, 6 * [[[0, 9], [-1, 0]]])
        self.refused("lengths", self.path("grid.json"), "--normalize", naming="--normalize: expected the figure bias")
        grid["matrices"][4]["bias"] = [[0], [1]]
        self.refused("bias", self.file("ragged_grid.json", grid), naming="row 1")
        self.refused("bias", self.file("torn.json", '{"bias": [[0'), naming="torn.json")
        self.refused("bias", self.file("ragged.json", {"bias": [[0], [1]]}), naming="row 1")
        self.refused("bias", self.file("other.json", [1]), naming="other.json")
        one = {"layer": 0, "head": 0, "bias": [[0], [-1, 0]]}
        for data, naming in (({"matrices": []}, "matrices: expected a list of objects, got []"),
                             ({"matrices": [{"bias": [[0]]}]}, "layer: expected a whole number, got none"),
                             ({"matrices": [{**one, "head": "a"}]}, 'head: expected a whole number or "mean", got "a"'),
                             ({**one, "tokens": 5}, "tokens: expected a list, got 5")):
            self.refused("bias", self.file("kind.json", data), naming="kind.json: " + naming)
        self.file("other/step_00000001/config.json", {"position": 3})
        self.refused("train", self.train_log("other"), naming="config.json: position: expected an object, got 3")
        head = "model,trained_at,encoding,lr,seed,T,what,positions,value,commit\n"
        for row in "64,loss,,2", "64,loss,x-y,2", "64,loss,0-0,2", "0,ppl,,2", "64,ppl,,0", "64,ppl,3,2":
            for figure in "study", "positions":
                self.refused(figure, self.file("study.csv", f"{head}m,64,a,1,1,{row},c\n"),
                             naming=f"study.csv: m,64,a,1,1,{row},c: expected a perplexity above 0")
        self.refused("train", self.train_log(), "-o", self.path("no/where.png"), naming="where.png")
        self.refused("train", self.train_log(), "-o", self.path("x.foo"), naming="foo")
        self.assertEqual(called(plot.main, "train", self.path("run"), "-o", self.device("null", 3))[0], 0)
        self.assertFalse(os.path.isfile(self.path("null")) or os.path.exists(self.path("null.png")))
        self.refused("histogram", self.train_log(), naming="histogram")


if __name__ == "__main__":
    unittest.main()
