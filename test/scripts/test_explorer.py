"""test_explorer.py -- the page of scripts/explorer.py in a headless Chromium: its numbers against the trainer's files,
and what a click, a key and a move of the mouse show."""
import json
import math
import os
import re
import struct
import subprocess
import unittest
from unittest import mock

from folder import HAS_TRAINER, TRAINER, ClassFolder, called, read
import browser
import explorer
import heads

T = 150                                         # two chunks of S and three tiles, the last one of either in part
HOSTILE = b"</script><!-- <b>Not markup</b> &amp; "


@unittest.skipUnless(HAS_TRAINER, "the trainer is not built")
class TestExplorer(ClassFolder):
    browser = None

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        text = HOSTILE + read("LICENSE").encode()
        for name, content in ("train.txt", text), ("text.txt", text[:400]), ("short.txt", text[:T + 1]):
            cls.write(name, content)
        # token ids, as a shard has them: documents of 37 tokens, which --document_mask keeps apart
        ids = struct.pack("<400H", *(n * n % 299 + 1 if n % 37 else 0 for n in range(400)))
        cls.write("text.bin", struct.pack("<5i", 20240520, 1, 400, 300, 0).ljust(1024, b"\0") + ids)
        for name, pos, *more in (("cable", "cable"), ("alibi", "alibi"), ("fire", "fire"), ("rope", "rope+ssmax"),
                                 ("inside", "kcable:weight=inside", "--window", "20,30", "--sinks", "2"),
                                 ("cope", "cope"), ("documents", "cable", "--document_mask", "1")):
            train, val = ("text.bin", "text.bin") if name == "documents" else ("train.txt", "text.txt")
            cls.trainer("--train_files", train, "--val_files", val, "--model", "2,2,16", "--T", "64", "--B", "4",
                        "--steps", "12", "--checkpoint_every", "12", "--lr", "1e-2", "--val_every", "0",
                        "--sample_every", "0", "--threads", "1", "--out", name, "--pos", pos, *more)
        cls.trainer("--train_files", "train.txt", "--val_files", "text.txt", "--model", "12,12,48", "--T", "64", "--B",
                    "1", "--steps", "1", "--checkpoint_every", "1", "--sample_every", "0", "--out", "deep")

    @classmethod
    def tearDownClass(cls):
        if cls.browser:
            cls.browser.close()

    @classmethod
    def trainer(cls, *words):
        subprocess.run([TRAINER, *words], cwd=cls.folder, check=True, capture_output=True)

    def explorer(self, *words):
        """(exit code, what it says)"""
        code, out, err = called(explorer.main, *words, "--trainer", TRAINER)
        return code, out + err

    def page(self, *models, text=None, anchor=""):
        """opens the page of these models"""
        if browser.CHROMIUM is None:
            self.skipTest("SKIPPED: there is no Chromium: apt install chromium")
        out = self.path("-".join(models) + ".html")
        text = self.path(text or self.text_of(models[0]))
        code, said = self.explorer(*map(self.path, models), "--text", text, "-o", out, "--tokens", str(T))
        self.assertEqual(code, 0, said)
        type(self).browser = self.browser or browser.Browser()
        self.browser.open(out, anchor)
        return self.browser.value

    @staticmethod
    def text_of(model):
        return "text.bin" if model == "documents" else "text.txt"

    def matrices(self, model):
        self.trainer("--load", model, "--val_files", "text.txt", "--T", str(T), "--dump_bias", "all,all", "--out",
                     "bias_" + model)
        return [m["bias"] for m in json.loads(self.read("bias_" + model, "bias_all_all.json"))["matrices"]]

    def evaluation(self, model):
        """(records of heads, losses)"""
        out = "heads_" + model
        self.trainer("--load", model, "--val_files", self.text_of(model), "--eval_lengths", str(T), "--eval_tokens",
                     str(T), "--T", str(T), "--dump_bias", "all,parts", "--token_losses", "--out", out)
        losses = explorer.read_losses(self.path(out, f"token_losses_{T}_{T}.safetensors"))
        return heads.statistics(self.path(out)), losses

    def test_biases(self):
        """those of --dump_bias: the same float32 numbers, but for a logarithm, which is float64 here"""
        for pair in ("cable", "alibi"), ("fire", "inside"):
            value = self.page(*pair)
            for n, model in enumerate(pair):
                found = value(f"""DATA.models[{n}].heads.map(h => DATA.tokens.map((_, i) =>
                    Array.from({{length: i + 1}}, (_, j) => bias(h, i, j))))""")
                want = self.matrices(model)
                self.assertEqual(len(found), 4)
                for ours, theirs in zip(found, want):
                    for i in range(T):
                        for a, b in zip(ours[i], theirs[i]):
                            self.assertLessEqual(abs(a - b), 1e-6 * abs(b) if model == "inside" else 0, (model, i))
                self.assertGreater(max(abs(b) for m in want for row in m for b in row), 0.1, model)

    def test_attention(self):
        """its sums equal the ones of heads.py, its losses equal --token_losses"""
        for pair in ("cable", "alibi"), ("fire", "inside"), ("rope",), ("documents",):
            value = self.page(*pair)
            for n, model in enumerate(pair):
                records, losses = self.evaluation(model)
                self.assertEqual(value(f"Array.from(DATA.models[{n}].losses)"), [None, *losses[:T - 1]])
                rows = value(f"""DATA.models[{n}].heads.map(h => DATA.tokens.map((_, i) =>
                    Array.from(attention(DATA.models[{n}], h, i).weights)))""")
                shown = value(f"DATA.models[{n}].heads.map(h => h.statistics)")
                live = value(f"DATA.models[{n}].heads.map(h => h.tiles.filter(w => w > LEAST).length)")
                for record, weights, said, alive in zip(records, rows, shown, live):
                    self.assertEqual(said, record)
                    flat = [(i, j, w) for i, row in enumerate(weights) for j, w in enumerate(row)]
                    entropy = -sum(w * math.log(w) for *_, w in flat if w > 0) / T
                    distance = sum(w * (i - j) for i, j, w in flat) / T
                    nearest = sum(w for i, j, w in flat if i == j) / T
                    self.assertAlmostEqual(entropy, record["entropy"], delta=1e-6)
                    self.assertAlmostEqual(distance, record["distance"], delta=1e-6 * T)
                    self.assertAlmostEqual(nearest, record["by_distance"][0], delta=1e-6)
                    for sinks, weight in record["sink_weight"].items():
                        self.assertAlmostEqual(sum(w for _, j, w in flat if j < int(sinks)) / T, weight, delta=1e-6)
                    self.assertEqual(alive / 6, record["live_tiles"])

    def shown(self, value, n):
        """{name: number} of the sum below the text of model n"""
        return {name: float(exact) for name, exact in value(
            f"[...document.querySelectorAll('.readout')[{n}].querySelectorAll('b[data-of]')]"
            ".map(b => [b.dataset.of, b.title])")}

    def middle(self, value, of):
        return value(f"""(() => {{ const r = ({of}).getBoundingClientRect();
            return [r.x + r.width / 2, r.y + r.height / 2]; }})()""")

    def test_clicks(self):
        value = self.page("cable", "alibi", anchor="#heads=0,0&theme=light&q=20")
        cable, alibi, (_, losses) = self.matrices("cable"), self.matrices("alibi"), self.evaluation("cable")
        mouse = self.browser.mouse
        mouse(*self.middle(value, "DATA.models[0].spans[140]"))         # query 140, in both
        mouse(*self.middle(value, "DATA.models[1].spans[100]"), click=False)            # over key 100
        for n, want in enumerate((cable, alibi)):
            found = self.shown(value, n)
            self.assertEqual(found["bias"], want[0][140][100])
            self.assertAlmostEqual(found["logit"], found["score"] + found["bias"], 12)
            self.assertAlmostEqual(found["weight"], value(
                f"attention(DATA.models[{n}], DATA.models[{n}].heads[0], 140).weights[100]"), 12)
        self.assertEqual(self.shown(value, 0)["loss"], losses[99])
        self.assertNotIn("S", self.shown(value, 1))
        self.assertEqual(value("document.querySelectorAll('.query').length"), 2)
        mouse(*self.middle(value, "DATA.models[0].maps[3]"))            # layer 1, head 1 of the first model only
        self.assertEqual([self.shown(value, n)["bias"] for n in (0, 1)], [cable[3][140][100], alibi[0][140][100]])
        key = lambda name: [self.browser.call("Input.dispatchKeyEvent", type=kind, key=name)
                            for kind in ("keyDown", "keyUp")]
        key("ArrowLeft")
        self.assertEqual(self.shown(value, 0)["bias"], cable[3][139][100])
        # in the curves 100 tokens end at 20 after the query, and a click in the middle chooses one
        at = self.middle(value, "DATA.models[1].tracks")
        first, end = value("range()")
        self.assertEqual((first, end), (T - 100, T))
        width = value("DATA.models[1].tracks.clientWidth")
        chosen = first + int(width / 2 / (width - value("MARGIN")) * 100)
        mouse(*at)
        self.assertEqual(value("[state.query, state.key]"), [chosen, chosen])
        self.assertEqual(self.shown(value, 1)["bias"], 0)
        # ink is what the scale says, and the page's address keeps all choices
        mouse(*self.middle(value, "document.querySelector('#by').children[4]"))
        ink = float(re.search(r"([\d.]+)\)$", value("DATA.models[0].spans[60].style.background"))[1])
        self.assertAlmostEqual(ink, 0.72 * min(1, losses[59] / 8), 3)
        key("t")
        self.assertEqual(value("document.documentElement.dataset.theme"), "dark")
        self.assertEqual(value("location.hash"), f"#q={chosen}&k={chosen}&by=loss&span=100&heads=3%2C0&theme=dark")
        self.assertEqual(self.browser.errors, [])

    def test_addresses(self):
        """what an address names and the page does not have is as if it were not there; 0 is a token like the rest"""
        told = "[state.query, state.key, state.by, state.span, state.heads[0] === farthest(DATA.models[0].heads)]"
        first = [60, 48, "attention", 100, True]
        for anchor in ("", "q=-5", "q=1.5&k=1e1", "k=1.5", "k=-1", f"q={T}&k={T}", "heads=-1", "heads=0.5,x", "heads=4",
                       "by=toString", "by=__proto__", "q=&k=&by=&heads=&span=", "q=0x10", "q=%20", "q=NaN", "%",
                       "span=-1", "q=" + "9" * 400):
            self.assertEqual(self.page("cable", anchor="#" + anchor)(told), first, anchor)
        value = self.page("cable", anchor=f"#q=0&k=0&by=loss&span={T}&heads=3")
        self.assertEqual([value(told)[:4], value("state.heads")], [[0, 0, "loss", T], [3]])
        self.assertEqual(self.browser.errors, [])

    def test_sizes(self):
        """what a page shows has room on a phone, a tablet and laptops, light and dark: nothing lies on another thing or
        beyond the right edge, some lines of the text are seen, and at 1,280 x 720 all curves are"""
        overlaps = """(() => {
            const seen = [...document.querySelectorAll(`body > header > *, .model, .model > *, dl > div, dd, dt, h2,
                .maps, .maps > *, .readout b`)].filter(e => e.offsetWidth > 0), found = [];
            const name = e => (e.className || e.id || e.tagName) + " " + e.textContent.slice(0, 20);
            for (const [n, a] of seen.entries()) {
                const r = a.getBoundingClientRect();
                if (r.right > document.documentElement.clientWidth + 1) found.push(name(a) + " is outside");
                for (const b of seen.slice(n + 1)) {
                    const o = b.getBoundingClientRect();
                    if (!a.contains(b) && Math.min(r.right, o.right) - Math.max(r.left, o.left) > 1
                        && Math.min(r.bottom, o.bottom) - Math.max(r.top, o.top) > 1) found.push([name(a), name(b)]);
                }
            }
            return found;
        })()"""
        texts = """(() => {                                             // what stands on other words in a canvas
            const boxes = [], found = [], real = CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
                const m = this.measureText(text), left = this.textAlign === "center" ? x - m.width / 2 : x;
                boxes.push([this.canvas, text, left, left + m.width, y - m.actualBoundingBoxAscent,
                            y + m.actualBoundingBoxDescent]);
            };
            paint(["tracks"]);
            CanvasRenderingContext2D.prototype.fillText = real;
            for (const [n, a] of boxes.entries()) for (const b of boxes.slice(n + 1)) {
                if (a[0] === b[0] && Math.min(a[3], b[3]) - Math.max(a[2], b[2]) > 0.1
                    && Math.min(a[5], b[5]) - Math.max(a[4], b[4]) > 0.1) found.push([a[1], b[1]]);
            }
            return [boxes.length, found];
        })()"""
        for models in ("cable", "alibi"), ("deep", "cable"), ("inside",), ("deep",), ("documents",):
            value = self.page(*models)
            if models[0] in ("inside", "documents"):                    # long names
                value("$('h2').textContent += '+x'.repeat(20), $('#about span').textContent += 'x'.repeat(60)")
            if models == ("deep",):
                self.assertEqual(value("DATA.models[0].heads.map(h => 12 * h.layer + h.head)"), [*range(144)])
            for width, height in ((390, 844), (768, 1024), (1280, 720), (1600, 1000), (1366, 768), (1440, 900),
                                  (1001, 700), (800, 600)):
                self.browser.size(width, height)
                value("toggleTheme(), new Promise(requestAnimationFrame)")
                self.assertEqual(value(overlaps), [], (models, width, height))
                wide, high = value("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
                self.assertLessEqual(wide, width, models)
                cut = value("""[...document.querySelectorAll('.maps')].filter(
                    e => e.scrollWidth > e.clientWidth + 1).length""")
                self.assertEqual(cut, 0, (models, width))
                if width == 1280 and models[0] == "cable":
                    self.assertLessEqual(high, height)
                drawn, found = value(texts)
                self.assertEqual(found, [], (models, width, height))
                self.assertGreater(drawn, 10 if models[0] == "documents" else 50)       # ids have no letters below
                heights = value("[...document.querySelectorAll('.text, .tracks')].map(e => e.clientHeight)")
                self.assertGreaterEqual(min(heights), 135, (models, width, height))
        self.browser.size(1600, 1000)

    def test_a_sign_while_it_draws(self):
        value = self.page("cable")
        sign = "[getComputedStyle($('#busy')).display, $('#busy').textContent]"
        self.assertEqual(value(sign)[0], "none")
        self.assertEqual(value(f"(toggleTheme(), {sign})"), ["block", "drawing cable's head 1 of 4 …"])
        value("new Promise(done => setTimeout(done, 1000))")
        self.assertEqual(value(sign), ["none", "drawing cable's head 4 of 4 …"])

    def test_the_first_head(self):
        """sees farthest of those whose sum grows"""
        value = self.page("cable", "alibi")
        far = value("DATA.models.map(m => m.heads.map(h => h.statistics.distance))")
        self.assertEqual(value("state.heads[1]"), far[1].index(max(far[1])))
        value("""DATA.models[0].heads.forEach((h, n) => {
            h.statistics.distance = [9, 70, 8, 7][n];
            h.statistics.g = [1, 1, 1];
            h.S.fill(n === 1 ? 0.01 : 5); })""")
        self.assertEqual(value("farthest(DATA.models[0].heads)"), 0)

    def test_dead_heads(self):
        value = self.page("cable", "alibi")
        value("DATA.models[0].heads.forEach((h, n) => { h.statistics.dead = n === 3; }), paint()")
        shown = [value(f"[...document.querySelectorAll('dl')[{n}].children].map(e => e.textContent)") for n in (0, 1)]
        value("state.heads[0] = 3, paint()")
        shown += [value("[...document.querySelectorAll('dl')[0].children].map(e => e.textContent)")]
        found = [[text for text in texts if "dead" in text] for texts in shown]
        self.assertEqual(found, [[f"{n} of 2heads of the layer are dead"] if n is not None else []
                                 for n in (0, None, 1)])

    def test_a_page_of_one_model(self):
        """the text of hostile tokens is text, and a window hides keys"""
        value = self.page("inside", text="short.txt")                   # one token more than are shown
        text = "document.querySelector('.text').textContent.replaceAll('↵ ', '\\n')"
        self.assertTrue(value(text).startswith(HOSTILE.decode()))
        self.assertEqual(value("document.querySelectorAll('.text b, .text script').length"), 0)
        value("choose(100), hover(50)")
        self.assertIn("Hidden from this query", value("document.querySelector('.readout').textContent"))
        value("hover(1)")
        self.assertGreater(self.shown(value, 0)["weight"], 0)           # a sink
        outside = re.findall(r"https?:|\bsrc=|<link|\bfetch\(|\bimport\b", self.read("inside.html"))
        self.assertEqual(outside, [])
        self.assertEqual(self.browser.errors, [])

    def test_bad_input(self):
        good = [self.path("cable"), "--text", self.path("text.txt"), "-o", self.path("page.html")]
        for words, why in (
                ([*good, "--tokens", "1"], "expected at least 3 tokens and --tokens of at least 2"),
                ([*2 * [self.path("alibi")], *good], "expected one or two checkpoints, got 3"),
                ([self.path("cope"), *good[1:]], "cope's biases depend on the scores of other keys"),
                ([self.path("nothing"), *good[1:]], self.path("nothing"))):
            code, said = self.explorer(*words)
            self.assertEqual(code, 2, said)
            self.assertIn(why, said)
        with mock.patch.object(explorer, "LARGEST_PAGE", 40_000):
            code, said = self.explorer(*good)
            self.assertEqual(code, 2, said)
            fits = re.search(r"expected a page of at most .* got .* MB for 399 tokens: give --tokens (\d+)", said)
            self.assertIn(int(fits[1]), range(2, 399))
        other = self.shell("other", 'for last; do :; done; echo \'{"pos": "cable"}\' > "$last/bias_all_parts.json"\n')
        code, out, said = called(explorer.main, *good, "--trainer", other)
        self.assertIn("bias_all_parts.json: tokens: expected a list, got none", said)
        self.assertFalse(os.path.exists(self.path("page.html")))


if __name__ == "__main__":
    unittest.main()
