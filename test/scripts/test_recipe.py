"""dev/recipe.py stops where a page cannot be followed: each kind of mark, right and wrong. Nothing is built here."""
import os
import sys
import unittest

from folder import ROOT, Folder, read

sys.path.insert(0, os.path.join(ROOT, "dev"))
import recipe  # noqa: E402


def page(mark, *lines):
    return "\n".join(["Text.", mark, "```", *lines, "```", "More text.", ""])


class Recipe(Folder):
    def setUp(self):
        super().setUp()
        self.recipe = recipe.Recipe(self.folder)
        self.recipe.say = lambda *line: None
        self.write("rows.h", "one\ntwo\ntwo and a half\n")

    def follow(self, mark, *lines):
        for block in recipe.blocks_of("page.md", page(mark, *lines)):
            self.recipe.follow(block)

    def refused(self, words, mark, *lines):
        with self.assertRaises(recipe.Failure) as caught:
            self.follow(mark, *lines)
        self.assertIn(words, str(caught.exception))

    def test_files(self):
        self.follow("<!-- file: new/a.h -->", "int a;", "", "int b;")
        self.assertEqual(self.read("new/a.h"), "int a;\n\nint b;\n")
        self.refused("exists already", "<!-- file: rows.h -->", "int a;")

    def test_insertions(self):
        self.follow('<!-- insert: rows.h after "one" -->', "one and a half")
        self.assertEqual(self.read("rows.h"), "one\none and a half\ntwo\ntwo and a half\n")
        self.refused("expected one line of rows.h with 'three', got 0", '<!-- insert: rows.h after "three" -->', "x")
        self.refused("expected one line of rows.h with 'two', got 2", '<!-- insert: rows.h after "two" -->', "x")
        self.refused("expected PATH after", "<!-- insert: rows.h -->", "x")

    def test_commands(self):
        self.follow('<!-- run: prints "one" -->', "cat rows.h", "pwd >where")
        self.assertEqual(self.read("where").strip(), self.folder)
        self.refused("expected 'three' in the output", '<!-- run: prints "three" -->', "cat rows.h")
        self.refused("exit code 1", "<!-- run -->", "false", "true")
        self.refused("exit code 3", "<!-- run -->", "exit 3")
        self.refused("expected every test to run, got 2 passed, 0 failed, 1 skipped", "<!-- run -->",
                     "echo 2 passed, 0 failed, 1 skipped")
        self.refused("got OK (skipped=1)", "<!-- run -->", "echo 'OK (skipped=1)'")
        self.follow("<!-- run -->", "echo 2 passed, 0 failed, 0 skipped")
        self.refused("expected prints", "<!-- run: print one -->", "cat rows.h")
        self.follow("<!-- run: needs no_such_module -->", "false")
        self.assertEqual(self.recipe.counts["skipped"], 1)

    def test_what_runs_here_leaves_nothing_here(self):
        recipe.link_sources(self.recipe.directory)
        self.follow("<!-- run -->", "mkdir run", "echo written >run/log", "cmp README.md build/../README.md")
        self.assertEqual(self.read("run/log"), "written\n")
        self.assertFalse(os.path.islink(self.path("run")))

    def test_launches(self):
        self.write("l.txt", "2 llmc/attention/../gelu.cuh:5\n1 llmc/a.cuh:7\n")
        block = ("<!-- run -->\n<!-- launches: l.txt has %s, not llmc/b.cuh -->", "true")
        self.follow(block[0] % "llmc/gelu.cuh and llmc/a.cuh", block[1])
        self.refused("expected kernels launched in llmc/c.cuh", block[0] % "llmc/gelu.cuh and llmc/c.cuh", block[1])
        self.refused("no kernel of llmc/a.cuh", (block[0] % "llmc/gelu.cuh").replace("b.cuh", "a.cuh"), block[1])

    def test_marks(self):
        for words, text in (("expected a mark", page("<!-- files: a.h -->", "x")),
                            ("expected a code block", page("<!-- run -->\n\nText", "x")),
                            ("expected a code block", "<!-- run -->"),
                            ("no end", "<!-- run -->\n```\nx\n")):
            with self.assertRaises(recipe.Failure) as caught:
                recipe.blocks_of("page.md", text)
            self.assertIn(words, str(caught.exception))
        self.assertEqual(recipe.blocks_of("page.md", "```\n<!-- run -->\n```\n"), [])

    def test_no_edit_of_the_readme_is_followed_here(self):
        blocks = recipe.blocks_of("README.md", page("<!-- run -->", "true") + page("<!-- copy -->", "rm a.h"))
        self.assertEqual(recipe.followed("README.md", blocks, here=True), blocks[:1])
        self.assertEqual(recipe.followed("README.md", blocks, here=False), blocks[1:])
        self.assertEqual(recipe.followed("docs/new_kernel.md", blocks, here=False), blocks)

    def test_page(self):
        """the page in this repository has all kinds of blocks, and their anchors are where it says"""
        kinds = set()
        for name in recipe.PAGES:
            for block in recipe.blocks_of(name, read(name)):
                kinds.update(kind for kind, _ in block.marks)
        self.assertEqual(kinds, {"file", "insert", "run", "copy", "launches"})


if __name__ == "__main__":
    unittest.main()
