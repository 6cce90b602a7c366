"""Brings docs/diffs.md, docs/recipes.md and docs/index.html up to date:
python tools/render.py [--check]

A diff in a chapter stands between `<!-- diff OLD NEW 1 -->` and `<!-- end -->`: the first hunk, or
`2-4`. The text below, to the next place or heading, is the reason, which the page shows too. Which
reason belongs under which hunk is for a person to say: where hunks come, go or become others, this
fails and writes nothing. A new or changed place begins as an empty one.
"""
import difflib
import html
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = [ROOT / "docs/diffs.md", ROOT / "docs/recipes.md"]
PLACE = re.compile(r"(<!-- diff (\S+) (\S+) (\d+)(?:-(\d+))? -->\n)(.*?)(<!-- end -->)"
                   r"(.*?)(?=\n<!-- diff |\n#|\Z)", re.DOTALL)
ARROWS = [*dict.fromkeys(place[1:3] for chapter in CHAPTERS  # each after that to its base
                         for place in PLACE.findall(chapter.read_text()))]
SCRIPTS = ["single_gpu.py", *(new for _, new in ARROWS)]
EXAMPLES = [(f"examples/{file.name.replace('_ddp', '')}", f"examples/{file.name}")
            for file in sorted(ROOT.glob("examples/*_ddp.py"))]


def hunks(old, new):
    """Where two files differ, by `diff`: (start, stop) in the old one's lines and in the new's."""
    output = subprocess.run(["diff", "-U0", ROOT / old, ROOT / new], capture_output=True, text=True)
    found = []
    for numbers in re.findall(r"^@@ -(\d+),?(\d*) \+(\d+),?(\d*) @@", output.stdout, re.MULTILINE):
        first, count, new_first, new_count = (int(number or 1) for number in numbers)
        start, new_start = first - (count > 0), new_first - (new_count > 0)
        found.append((start, start + count, new_start, new_start + new_count))
    return found


def show(old, new, hunks):
    """These hunks as a diff, each after the line before it, which says where it stands."""
    old, new = ((ROOT / name).read_text().splitlines() for name in (old, new))
    lines, end = [], None
    for start, stop, new_start, new_stop in hunks:
        if end is not None and start - end > 1:
            lines.append("@@ ... @@")
            end = None
        lines += [" " + line for line in old[max(0, start - 1) if end is None else end:start]]
        lines += ["-" + line for line in old[start:stop]]
        lines += ["+" + line for line in new[new_start:new_stop]]
        end = stop
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def alike(*diffs):
    """Whether the changed lines of two diffs are the same ones, but for small edits."""
    before, after = ("\n".join(re.findall(r"^[+-].*", diff, re.MULTILINE)) for diff in diffs)
    return difflib.SequenceMatcher(None, before, after, autojunk=False).ratio() > 0.6


def render(text, chapter):
    shown = {}

    def fill(place):
        begin, old, new, first, last, before, end, reason = place.groups()
        first, last, found = int(first), int(last or first), hunks(old, new)
        after = show(old, new, found[first - 1:last]) if last <= len(found) else ""
        if first != shown.get((old, new), 0) + 1 or (before.strip() and not alike(before, after)):
            sys.exit(f"{chapter}: hunk {first} of {old} -> {new} is not what stands there: see to "
                     "its place and the reason under it, empty it and run python tools/render.py")
        shown[old, new] = last
        return f"{begin}```diff\n{after}\n```\n{end}{reason}"

    text = PLACE.sub(fill, text)
    for (old, new), last in shown.items():
        count = len(hunks(old, new))
        if last != count:
            sys.exit(f"{chapter} shows {last} hunks of {old} -> {new}, which has {count}: add or "
                     "remove a place, with its reason, and run python tools/render.py")
    return text


def count_changes(chapter):
    """The chapter, where the table of recipes says how many lines each changes in its base."""
    for old, new in ARROWS:
        count = sum(stop - start + new_stop - new_start
                    for start, stop, new_start, new_stop in hunks(old, new))
        name = new.removeprefix("recipes/")
        chapter = re.sub(rf"(\| \[`{name}`\]\([^)]*\) \|)[ \d]*\|", rf"\g<1> {count} |", chapter)
    return chapter


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


if __name__ == "__main__":
    unseen = {f"recipes/{file.name}" for file in ROOT.glob("recipes/*.py")} - {*SCRIPTS}
    if unseen:
        sys.exit(f"docs/recipes.md does not show {', '.join(sorted(unseen))}: begin an empty place")
    made = {file: count_changes(render(file.read_text(), file.name)) for file in CHAPTERS}
    made[ROOT / "docs/index.html"] = page("\n".join(made.values()))
    behind = [file for file, text in made.items() if not file.exists() or file.read_text() != text]
    if "--check" in sys.argv[1:]:
        sys.exit("\n".join(f"{file.relative_to(ROOT)} is behind: run python tools/render.py"
                           for file in behind) or None)
    for file in behind:
        file.write_text(made[file])
