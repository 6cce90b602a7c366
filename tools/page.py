"""Makes docs/index.html of tools/page.html: the files, where any two differ, and the reasons."""
import html
import itertools
import json
import re

from diffs import ARROWS, PLACE, ROOT, SCRIPTS, hunks, show
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

EXAMPLES = [(f"examples/{file.name.replace('_ddp', '')}", f"examples/{file.name}")
            for file in sorted(ROOT.glob("examples/*_ddp.py"))]


def as_html(text):
    """The chapter's Markdown, as far as its reasons use it: paragraphs, code and links."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    text = re.sub(r"\[([^]]+)\]\(([^)]+)\)", r'<a href="\2">\1</a>', text)
    return "\n".join(f"<p>{part}</p>" for part in text.strip().split("\n\n"))


def telling(sign, diff):
    """The lines with this sign, but for short ones, such as `break`, which stand in many places."""
    return set(re.findall(rf"^\{sign}( *\S.{{5,}})", diff, re.MULTILINE))


def table_of_places():
    """Of each row of the table of places: the calls that show it, and its reason as HTML."""
    chapter = (ROOT / "docs/your_own_script.md").read_text()
    table = chapter.partition("| place |")[2].partition("| --- |\n")[2].partition("\n\n")[0]
    for place, cell, why in re.findall(r"^\| ([^|]*) \| (.*`.*) \| ([^|]*) \|$", table, re.MULTILINE):
        code = ["".join(part.split()) for part in re.findall(r"`([^`]+)`", cell)]
        yield [part[:part.find("(", 1) + 1] or part for part in code], as_html(f"{place}: {why}")


def short(name):
    return name.removesuffix(".py")


def page(chapters):
    """The page: its template with the files, where any two differ, and the chapters' reasons."""
    numbers, files = {}, []  # a line that stands in several files is written once
    for name in [*SCRIPTS, *itertools.chain(*EXAMPLES)]:
        text = highlight((ROOT / name).read_text(), PythonLexer(), HtmlFormatter(nowrap=True))
        lines = [numbers.setdefault(line, len(numbers)) for line in text.splitlines()]
        files.append([short(name), lines])
    places = [((old, new), telling("-", diff), telling("+", diff), as_html(reason))
              for _, old, new, _, _, diff, _, reason in PLACE.findall(chapters)]
    ways = {SCRIPTS[0]: set()}  # the arrows that lead to each script
    for old, new in ARROWS:
        ways[new] = {*ways[old], (old, new)}
    pairs = []
    for old, new in itertools.combinations_with_replacement(SCRIPTS, 2):
        found = []
        for hunk in hunks(old, new):
            diff = show(old, new, [hunk])
            gone, come = telling("-", diff), telling("+", diff)
            why = [number for number, (arrow, removed, added, _) in enumerate(places)
                   if (arrow in ways[new] - ways[old] and (removed & gone or added & come))
                   or (arrow in ways[old] - ways[new] and (added & gone or removed & come))]
            found.append([*hunk, why])
        pairs.append([short(old), short(new), found])
    reasons = [["..".join(map(short, arrow)), words] for arrow, _, _, words in places]
    table = [*table_of_places()]
    for old, new in EXAMPLES:
        after = (ROOT / new).read_text().splitlines()
        found = []
        for hunk in hunks(old, new):
            lines = "".join("".join(after[hunk[2]:hunk[3]]).split())
            why = [len(reasons) + number for number, (signs, _) in enumerate(table)
                   if any(sign in lines for sign in signs)]
            found.append([*hunk, why])
        pairs.append([short(old), short(new), found])
    reasons += [["", words] for _, words in table]
    values = {"lines": [*numbers], "files": files, "pairs": pairs, "reasons": reasons}

    def rows(place):  # a row for each entry, so that a diff of the page can be read
        entries = [json.dumps(entry, separators=(",", ":")) for entry in values[place[1]]]
        return "[\n" + ",\n".join(entries).replace("</", r"<\/") + "\n]"

    return re.sub(r"\{\{(\w+)\}\}", rows, (ROOT / "tools/page.html").read_text())
