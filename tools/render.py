"""Brings docs/changes.md, docs/recipes.md and docs/index.html up to date:
python tools/render.py [--check]

A diff in a chapter stands between `<!-- diff OLD NEW 1 -->` and `<!-- end -->`: the first hunk, or
`2-4`, or with no number all hunks. The text below, to the next place or heading, is the reason,
which the page shows too. Which reason belongs under which hunk is for a person to say: where hunks
come, go or become others, this fails and writes nothing. A new or changed place begins as an empty
one.
"""
import difflib
import html
import itertools
import json
import re
import sys
from pathlib import Path

from pygments import token
from pygments.lexers import PythonLexer

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = [ROOT / "docs/changes.md", ROOT / "docs/recipes.md"]
PAGE = ROOT / "docs/index.html"
TEMPLATE = ROOT / "tools/page.html"
PLACE = re.compile(
    r"(<!-- diff (\S+) (\S+?)(?: (\d+)(?:-(\d+))?)? -->\n)(.*?)(<!-- end -->)", re.DOTALL)
REASON = re.compile(PLACE.pattern + r"\n(.*?)(?=\n<!-- diff |\n#|\Z)", re.DOTALL)
ARROWS = [("single_gpu.py", "dp.py"), ("single_gpu.py", "multigpu_spawn.py"),
          ("multigpu_spawn.py", "multigpu_torchrun.py"), ("multigpu_torchrun.py", "multinode.py"),
          *(("multigpu_torchrun.py", f"recipes/{file.name}")
            for file in sorted(ROOT.glob("recipes/*.py")))]
SCRIPTS = ["single_gpu.py", *(new for _, new in ARROWS)]
COLOURS = {token.Comment: "c", token.String: "s", token.Number: "n", token.Keyword: "k",
           token.Operator.Word: "k", token.Name.Builtin: "b", token.Name.Function: "d",
           token.Name.Decorator: "d"}


def hunks(old, new):
    """Where two files, given as lines, differ: (start, stop) in the old one and in the new."""
    found, end = [], (len(old), len(new))
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for what, *hunk in reversed(matcher.get_opcodes()):
        if what == "equal":
            continue
        # What is only in one file may lie in several places; diff takes the last, so we do too.
        lines, start, stop, last = ((new, hunk[2], hunk[3], end[1]) if what == "insert" else
                                    (old, hunk[0], hunk[1], end[0]))
        while what != "replace" and stop < last and lines[start] == lines[stop]:
            start, stop, hunk = start + 1, stop + 1, [edge + 1 for edge in hunk]
        found.insert(0, tuple(hunk))
        end = hunk[0], hunk[2]
    return found


def show(old, new, hunks):
    """These hunks as a diff, with one line of context."""
    lines, end = [], None
    for start, stop, new_start, new_stop in hunks:
        if end is not None and start - end > 2:
            lines += [" " + old[end], "@@ ... @@"]
            end = None
        lines += [" " + line for line in old[max(0, start - 1) if end is None else end:start]]
        lines += ["-" + line for line in old[start:stop]]
        lines += ["+" + line for line in new[new_start:new_stop]]
        end = stop
    lines += [" " + line for line in old[end:end + 1]]
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def alike(*hunks):
    """Whether the changed lines of two hunks are the same ones, but for small edits."""
    first, second = ("\n".join(line for line in hunk.splitlines() if line[:1] in ("+", "-"))
                     for hunk in hunks)
    return difflib.SequenceMatcher(None, first, second, autojunk=False).ratio() > 0.6


def render(text, chapter):
    shown, counts = {}, {}

    def fill(place):
        begin, *names, first, last, before, end = place.groups()
        arrow = " -> ".join(names)
        old, new = ((ROOT / name).read_text().splitlines() for name in names)
        found = hunks(old, new)
        counts[arrow] = len(found)
        last = int(last or first or len(found))
        first = int(first or 1)
        after = show(old, new, found[first - 1:last]) if last <= len(found) else ""
        if first != shown.get(arrow, 0) + 1 or before.strip() and not alike(before, after):
            sys.exit(f"{chapter}: hunk {first} of {arrow} is not what stands there: see to its "
                     "place and the reason under it, empty it and run python tools/render.py")
        shown[arrow] = last
        return f"{begin}```diff\n{after}\n```\n{end}"

    text = PLACE.sub(fill, text)
    for arrow, count in counts.items():
        if shown[arrow] != count:
            sys.exit(f"{chapter} shows {shown[arrow]} hunks of {arrow}, which has {count}: add or "
                     "remove a place, with its reason, and run python tools/render.py")
    return text


def as_html(text):
    """The chapter's Markdown, as far as its reasons use it: paragraphs, code and links."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    text = re.sub(r"\[([^]]+)\]\((?!http)[^)]+\)", r"\1", text)  # the page stands alone
    text = re.sub(r"\[([^]]+)\]\(([^)]+)\)", r'<a href="\2">\1</a>', text)
    return "".join(f"<p>{part}</p>" for part in text.strip().split("\n\n"))


def coloured(text):
    """The text's lines, each as pieces: (class, text)."""
    lines = [[]]
    for kind, value in PythonLexer(stripnl=False, ensurenl=False).get_tokens(text):
        colour = next((name for part_of, name in COLOURS.items() if kind in part_of), "")
        for number, piece in enumerate(value.split("\n")):
            if number:
                lines.append([])
            if piece and lines[-1] and lines[-1][-1][0] == colour:
                lines[-1][-1][1] += piece
            elif piece:
                lines[-1].append([colour, piece])
    return [tuple(map(tuple, line)) for line in lines[:-1]]


def marks(old, new, hunk):
    """What changed within lines of a hunk that are alike: (0 old or 1 new, line, from, to)."""
    start, stop, new_start, new_stop = hunk
    best = None, 0.375  # below that, lines of these files say different things
    for line, new_line in itertools.product(range(start, stop), range(new_start, new_stop)):
        words = [re.findall(r"\w+|\s+|.", text) for text in (old[line], new[new_line])]
        matcher = difflib.SequenceMatcher(str.isspace, *words, autojunk=False)
        if all(words) and matcher.ratio() > best[1]:
            best = (line, new_line, words, matcher.get_opcodes()), matcher.ratio()
    if not best[0]:
        return []
    line, new_line, words, opcodes = best[0]
    here = [(side, number, *(len("".join(words[side][:edge])) for edge in edges))
            for what, *ends in opcodes if what != "equal"
            for side, number, edges in ((0, line, ends[:2]), (1, new_line, ends[2:]))
            if edges[0] < edges[1]]
    return [*marks(old, new, (start, line, new_start, new_line)), *here,
            *marks(old, new, (line + 1, stop, new_line + 1, new_stop))]


def path(old, new):
    """The files on the way from one to another, along the arrows or against them."""
    before = {after: before for before, after in ARROWS}
    ways = [[old], [new]]
    for way in ways:
        while way[-1] in before:
            way.append(before[way[-1]])
    while len(ways[0]) > 1 and len(ways[1]) > 1 and ways[0][-2] == ways[1][-2]:
        ways = [way[:-1] for way in ways]
    return ways[0] + ways[1][-2::-1]


def changed_at(files, line, steps):
    """Where on the way through these files a line of the first is changed: (step, hunk)."""
    for number, step in enumerate(itertools.pairwise(files)):
        moved = 0
        for hunk, (start, stop, _, new_stop) in enumerate(steps[step]):
            if start <= line < stop:
                return [(number, hunk)]
            moved = new_stop - stop if stop <= line else moved
        line += moved
    return []


def page(chapters):
    """The page: its template with the files, what differs between any two, and the chapters' reasons."""
    texts = {name: (ROOT / name).read_text() for name in SCRIPTS}
    lines = {name: text.splitlines() for name, text in texts.items()}
    numbers, files = {}, {}  # a line that stands in several files is written once
    for name, text in texts.items():
        files[name] = [numbers.setdefault(line, len(numbers)) for line in coloured(text)]
    steps, reasons, reason_of = {}, [], {}
    for old, new in ARROWS:
        steps[old, new] = hunks(lines[old], lines[new])
        steps[new, old] = [(*hunk[2:], *hunk[:2]) for hunk in steps[old, new]]
    for _, old, new, first, last, _, _, text in REASON.findall(chapters):
        if (old, new) in ARROWS:
            for hunk in range(int(first or 1) - 1, int(last or first or len(steps[old, new]))):
                reason_of[old, new, hunk] = reason_of[new, old, hunk] = len(reasons)
            reasons.append((old, new, as_html(text)))
    pairs = {}
    for old, new in itertools.permutations(SCRIPTS, 2):
        way = path(old, new)
        for hunk in hunks(lines[old], lines[new]):
            start, stop, new_start, new_stop = hunk
            places = {place for line in range(start, stop)
                      for place in changed_at(way, line, steps)}
            places |= {(len(way) - 2 - step, place) for line in range(new_start, new_stop)
                       for step, place in changed_at(way[::-1], line, steps)}
            along = list(itertools.pairwise(way))
            why = [(reason_of[(*along[step], place)], along[step] in ARROWS)
                   for step, place in sorted(places)]
            pairs.setdefault(f"{old} {new}", []).append(
                [*hunk, list(dict.fromkeys(why)), marks(lines[old], lines[new], hunk)])
    values = {"files": files, "lines": [*numbers], "reasons": reasons, "pairs": pairs}

    def rows(name):  # a row for each entry, so that a diff of the page can be read
        entries = values[name].items() if isinstance(values[name], dict) else values[name]
        text = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
        text = "[\n" + text.replace("<", r"\u003c") + "\n]"
        return f"Object.fromEntries({text})" if isinstance(values[name], dict) else text

    return re.sub(r"\{\{(\w+)\}\}", lambda place: rows(place[1]), TEMPLATE.read_text())


if __name__ == "__main__":
    made = {file: render(file.read_text(), file.name) for file in CHAPTERS}
    made[PAGE] = page("\n".join(made.values()))
    behind = [(file, text) for file, text in made.items()
              if not file.exists() or file.read_text() != text]
    if "--check" in sys.argv[1:]:
        sys.exit("\n".join(f"{file.relative_to(ROOT)} is behind: run python tools/render.py"
                           for file, _ in behind) or None)
    for file, text in behind:
        file.write_text(text)
