"""Makes docs/index.html of page.html: the files, where any two differ, and the reasons."""
import html
import itertools
import json
import re
import sys
from pathlib import Path

from diffs import ARROWS, PLACE, ROOT, SCRIPTS, hunks, show
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

EXAMPLES = [(f"examples/{file.name.replace('_ddp', '')}", f"examples/{file.name}")
            for file in sorted(ROOT.glob("examples/*_ddp.py"))]


def as_html(text):
    """The Markdown that reasons use. A browser does not render a chapter, so its link becomes its name."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    text = re.sub(r"\[([^]]+)\]\((http[^)]+)\)", r'<a href="\2">\1</a>', text)
    text = re.sub(r"\[([^]]+)\]\((\w+\.md)[^)]*\)", r"\1 (docs/\2)", text)
    return "\n".join(f"<p>{part}</p>" for part in text.strip().split("\n\n"))


def telling(sign, diff):
    """The lines with this sign, but for short ones, such as `break`, which stand in many places."""
    return set(re.findall(rf"^\{sign}( *\S.{{5,}})", diff, re.MULTILINE))


def squeezed(text):
    return "".join(text.split())


def changed(old, new, hunk):
    """The lines of a hunk, with their signs but without those around it."""
    return "\n".join(re.findall(r"^[+-].*", show(old, new, [hunk]), re.MULTILINE))


def code_in(reason):
    return re.findall(r"`([^`]+)`", reason)


def fits(reason, old, new, hunk):
    """Whether the hunk has all code that the reason names."""
    lines = squeezed(re.sub(r"(?m)^.", "", changed(old, new, hunk)))
    return all(squeezed(name) in lines for name in code_in(reason))


def read_places(chapters):
    """Of each reason in the chapters: its arrow, the lines removed and added there, its words."""
    for _, old, new, first, last, diff, _, text in PLACE.findall(chapters):
        found = hunks(old, new)[int(first) - 1:int(last or first)]
        for reason in text.strip().split("\n\n"):
            where = f"hunk {first} of {old} -> {new}:\n{reason}\n"
            if last and not code_in(reason):
                sys.exit(f"{where}of several hunks this explains one: name code that shows which")
            if not any(fits(reason, old, new, hunk) for hunk in found):
                sys.exit(f"{where}this names code that these lines do not have")
            yield (old, new), telling("-", diff), telling("+", diff), reason


def table_of_places():
    """Of each row of the table of places: the calls that show it, and its reason."""
    chapter = (ROOT / "docs/your_own_script.md").read_text()
    table = chapter.partition("| place |")[2].partition("| --- |\n")[2].partition("\n\n")[0]
    for cell, why in re.findall(r"^\| [^|]* \| (.*`.*) \| ([^|]*) \|$", table, re.MULTILINE):
        code = [squeezed(part) for part in re.findall(r"`([^`]+)`", cell)]
        yield [part[:part.find("(", 1) + 1] or part for part in code], why


def short(name):
    return name.removesuffix(".py")


def page(chapters):
    """The page: its template with the files, where any two differ, and the chapters' reasons."""
    numbers, files = {}, []  # a line that stands in several files is written once
    for name in [*SCRIPTS, *itertools.chain(*EXAMPLES)]:
        text = highlight((ROOT / name).read_text(), PythonLexer(), HtmlFormatter(nowrap=True))
        lines = [numbers.setdefault(line, len(numbers)) for line in text.splitlines()]
        files.append([short(name), lines])
    places, table = [*read_places(chapters)], [*table_of_places()]
    ways = {SCRIPTS[0]: set()}  # the arrows that lead to each script
    for old, new in ARROWS:
        ways[new] = {*ways[old], (old, new)}
    pairs = []
    for old, new in itertools.combinations_with_replacement(SCRIPTS, 2):
        there, back = ways[new] - ways[old], ways[old] - ways[new]
        found = []
        for hunk in hunks(old, new):
            diff = changed(old, new, hunk)
            gone, come = telling("-", diff), telling("+", diff)
            why = [number for number, (arrow, removed, added, reason) in enumerate(places)
                   if ((arrow in there and (added & come if added else removed & gone))
                       or (arrow in back and (added & gone if added else removed & come)))
                   and fits(reason, old, new, hunk)]
            found.append([*hunk, why])
        pairs.append([short(old), short(new), found])
    for old, new in EXAMPLES:
        after = (ROOT / new).read_text().splitlines()
        found = []
        for hunk in hunks(old, new):
            lines = squeezed("".join(after[hunk[2]:hunk[3]]))
            why = [len(places) + number for number, (signs, reason) in enumerate(table)
                   if any(sign in lines for sign in signs)
                   and fits(reason, old, new, hunk)]
            found.append([*hunk, why])
        pairs.append([short(old), short(new), found])
    reasons = [as_html(reason) for *_, reason in [*places, *table]]
    values = {"lines": [*numbers], "files": files, "pairs": pairs, "reasons": reasons}

    def rows(place):  # a row for each entry, so that a diff of the page can be read
        entries = [json.dumps(entry, separators=(",", ":")) for entry in values[place[1]]]
        return "[\n" + ",\n".join(entries).replace("</", r"<\/") + "\n]"

    return re.sub(r"\{\{(\w+)\}\}", rows, Path(__file__).with_name("page.html").read_text())
