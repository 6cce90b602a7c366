"""Makes docs/index.html of page.html: the files, where any two differ, and the reasons."""
import ast
import html
import itertools
import json
import re
import sys
from pathlib import Path

from diffs import ARROWS, PLACE, ROOT, SCRIPTS, changed, docstring_lines, has, having, hunks, named
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

EXAMPLES = [(f"examples/{file.name.replace('_ddp', '')}", f"examples/{file.name}")
            for file in sorted(ROOT.glob("examples/*_ddp.py"))]


def as_html(text):
    """The Markdown that reasons use. A browser shows a chapter raw, without a way to its heading."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
    text = re.sub(r"\[([^]]+)\]\((http[^)]+)\)", r'<a href="\2">\1</a>', text)
    text = re.sub(r"\[([^]]+)\]\((\w+\.md)[^)]*\)", r'<a href="\2">\1</a> in \2', text)
    return f"<p>{text}</p>"


def telling(parts):
    """The lines of these parts but for short ones, such as `break`, which stand in many places."""
    return {line for part in parts for line in part if re.match(r" *\S.{5,}", line)}


def code_in(reason):
    return re.findall(r"`([^`]+)`", reason)


def read_places(chapters):
    """Of each reason in the chapters: its arrow, the lines removed and added there, its words.

    What it names may stand in a hunk that the chapter does not show.
    """
    for _, old, new, code, _, _, text in PLACE.findall(chapters):
        here = named(old, new, code)
        for reason in filter(None, text.strip().split("\n\n")):
            where, codes = f"{old} -> {new}, {code}:\n{reason}\n", code_in(reason)
            if len(here) > 1 and not codes:
                sys.exit(f"{where}of several hunks this explains one: name code that shows which")
            found = [hunk for hunk in here if has(old, new, hunk, codes)] or having(old, new, *codes)
            if not found:
                sys.exit(f"{where}this names code that no hunk has")
            gone, come = zip(*(changed(old, new, hunk) for hunk in found))
            yield (old, new), telling(gone), telling(come), reason


def find_ways():
    """Of each script, the arrows that lead to it."""
    ways = {SCRIPTS[0]: set()}
    for old, new in ARROWS:
        ways[new] = {*ways[old], (old, new)}
    return ways


def pair_of_scripts(old, new, places, ways):
    """The hunks between any two scripts, each with the numbers of its reasons."""
    there, back = ways[new] - ways[old], ways[old] - ways[new]
    for hunk in hunks(old, new):
        gone, come = changed(old, new, hunk)
        why = [number for number, (arrow, removed, added, reason) in enumerate(places)
               if ((arrow in there and (added & {*come} if added else removed & {*gone}))
                   or (arrow in back and (added & {*gone} if added else removed & {*come})))
               and has(old, new, hunk, code_in(reason))]
        yield [*hunk, why]


def pair_of_examples(old, new, places, ways):
    """As above: the reasons of multigpu_torchrun.py whose code stands here too, not in imports."""
    for hunk in hunks(old, new):
        _, come = changed(old, new, hunk)
        imports = all(line.startswith(("import ", "from ")) for line in come)
        why = [number for number, (arrow, _, _, reason) in enumerate(places)
               if arrow in ways["multigpu_torchrun.py"] and code_in(reason) and not imports
               and has(old, new, hunk, code_in(reason))]
        yield [*hunk, why]


def purpose(name):
    """What a file is for, in its docstring's words: its first line's, or a recipe's last line's."""
    lines = ast.get_docstring(ast.parse((ROOT / name).read_text())).splitlines()
    return lines[-1 if name.startswith("recipes/") else 0].rpartition(": ")[0] or lines[0].rstrip(":")


def short(name):
    return name.removesuffix(".py")


def page(chapters):
    """The page: its template with the files, where any two differ, and the chapters' reasons."""
    numbers, files = {}, []  # a line that stands in several files is written once
    for name in [*SCRIPTS, *itertools.chain(*EXAMPLES)]:
        text = highlight((ROOT / name).read_text(), PythonLexer(), HtmlFormatter(nowrap=True))
        lines = [numbers.setdefault(line, len(numbers)) for line in text.splitlines()]
        files.append([short(name), {"purpose": purpose(name), "docstring": docstring_lines(name),
                                    "lines": lines}])
    places, ways = [*read_places(chapters)], find_ways()
    pairs = [[short(old), short(new), [*pair(old, new, places, ways)]]
             for pair, names in ((pair_of_scripts, itertools.combinations_with_replacement(SCRIPTS, 2)),
                                 (pair_of_examples, EXAMPLES))
             for old, new in names]
    values = {"lines": [*numbers], "files": files, "pairs": pairs,
              "reasons": [as_html(reason) for *_, reason in places]}

    def rows(place):  # a row for each entry, so that a diff of the page can be read
        entries = [json.dumps(entry, separators=(",", ":")) for entry in values[place[1]]]
        return "[\n" + ",\n".join(entries).replace("</", r"<\/") + "\n]"

    return re.sub(r"\{\{(\w+)\}\}", rows, Path(__file__).with_name("page.html").read_text())
