"""Makes docs/index.html of page.html: the files, where any two differ, and the reasons."""
import ast
import html
import itertools
import json
import os
import re
from pathlib import Path

from diffs import ARROWS, ROOT, TEXTS, changed, docstring_lines, hunks, places
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

SCRIPTS = ["single_gpu.py", *(new for _, new in ARROWS)]
EXAMPLES = [(f"examples/{file.name.replace('_ddp', '')}", f"examples/{file.name}")
            for file in sorted(ROOT.glob("examples/*_ddp.py"))]


def as_html(text, file):
    """A reason's Markdown. A browser shows a text raw, without a way to its heading."""
    def link(match):
        words, target = match.groups()
        path, _, heading = target.partition("#")
        if path.startswith("http"):
            return f'<a href="{target}">{words}</a>'
        place = file.parent / path if path else file
        shown = os.path.relpath(place, ROOT / "docs")
        return f'<a href="{shown}">{words}</a>' + (f" in {place.name}" if heading else "")

    if text.startswith("```"):
        return "<pre>" + html.escape(text.strip("`").partition("\n")[2]) + "</pre>"
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
    return "<p>" + re.sub(r"\[([^]]+)\]\(([^)]+)\)", link, text) + "</p>"


def telling(place):
    """The lines that tell a diff: those added, and those removed where none is added in their
    place. Without short ones, such as `break`, which many have."""
    gone, come = set(), set()
    for hunk in place.hunks:
        removed, added = changed(*place[:2], hunk)
        (come if added else gone).update(line.strip() for line in added or removed)
    return [{line for line in lines if len(line) > 5} for lines in (gone, come)]


def find_reasons():
    """Of each diff in the texts: its arrow, the lines that no other has, removed or added, its reasons."""
    for file in TEXTS:
        shown = [*places(file)]
        for place in shown:
            others = [telling(one) for one in shown if one[:2] == place[:2] and one is not place]
            lines = [own.difference(*theirs) for own, *theirs in zip(telling(place), *others)]
            yield place[:2], lines, "".join(as_html(reason, file) for reason in place.reasons)


def find_ways():
    """Of each file, the arrows that lead to it; an example's DDP is that of multigpu_torchrun.py."""
    ways = {SCRIPTS[0]: set()}
    for old, new in ARROWS:
        ways[new] = {*ways[old], (old, new)}
    for old, new in EXAMPLES:
        ways |= {old: set(), new: {ARROWS[0], (old, new)}}
    return ways


def pair(old, new, ways, reasons):
    """The hunks between two files, each with the numbers of its reasons."""
    for hunk in hunks(old, new):
        gone, come = ({line.strip() for line in lines} for lines in changed(old, new, hunk))
        why = [number for number, (arrow, (removed, added), _) in enumerate(reasons)
               if (arrow in ways[new] - ways[old] and (removed & gone or added & come))
               or (arrow in ways[old] - ways[new] and (removed & come or added & gone))]
        yield [*hunk, why]


def purpose(name):
    """What a file is for, in its docstring's words: its first line's, or a recipe's last line's."""
    lines = ast.get_docstring(ast.parse((ROOT / name).read_text())).splitlines()
    return lines[-1 if name.startswith("recipes/") else 0].rpartition(": ")[0] or lines[0].rstrip(":")


def short(name):
    return name.removesuffix(".py")


def page():
    """The page: its template with the files, where any two differ, and the texts' reasons."""
    numbers, files = {}, []  # a line that stands in several files is written once
    for name in [*SCRIPTS, *itertools.chain(*EXAMPLES)]:
        text = highlight((ROOT / name).read_text(), PythonLexer(), HtmlFormatter(nowrap=True))
        lines = [numbers.setdefault(line, len(numbers)) for line in text.splitlines()]
        files.append([short(name), {"purpose": purpose(name), "docstring": docstring_lines(name),
                                    "lines": lines}])
    ways, reasons = find_ways(), [*find_reasons()]
    pairs = [[short(old), short(new), [*pair(old, new, ways, reasons)]] for old, new in
             [*itertools.combinations_with_replacement(SCRIPTS, 2), *EXAMPLES]]
    values = {"lines": [*numbers], "files": files, "pairs": pairs,
              "reasons": [reason for *_, reason in reasons]}

    def rows(place):  # a row for each entry, so that a diff of the page can be read
        entries = [json.dumps(entry, separators=(",", ":")) for entry in values[place[1]]]
        return "[\n" + ",\n".join(entries).replace("</", r"<\/") + "\n]"

    return re.sub(r"\{\{(\w+)\}\}", rows, Path(__file__).with_name("page.html").read_text())
