"""Brings README.md's diffs up to date with the files: python tools/render.py [--check]

Each stands between `<!-- diff OLD NEW 1 -->` and `<!-- end -->`: the first hunk, or `2-4`, or with
no number all hunks. Which reason belongs under which hunk is for a person to say: where hunks come,
go or become others, this fails and writes nothing. A new or changed place begins as an empty one.
"""
import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PLACE = re.compile(
    r"(<!-- diff (\S+) (\S+?)(?: (\d+)(?:-(\d+))?)? -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def hunks(old, new):
    """Where two files, given as lines, differ: (start, stop) in the old one and in the new."""
    opcodes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [opcode[1:] for opcode in opcodes if opcode[0] != "equal"]


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


def render(text):
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
            sys.exit(f"README.md: hunk {first} of {arrow} is not what stands there: see to its "
                     "place and the reason under it, empty it and run again")
        shown[arrow] = last
        return f"{begin}```diff\n{after}\n```\n{end}"

    text = PLACE.sub(fill, text)
    for arrow, count in counts.items():
        if shown[arrow] != count:
            sys.exit(f"README.md shows {shown[arrow]} hunks of {arrow}, which has {count}: "
                     "add or remove a place, with its reason")
    return text


if __name__ == "__main__":
    before = README.read_text()
    after = render(before)
    if "--check" in sys.argv[1:]:
        sys.exit(None if after == before else "README.md is behind: run python tools/render.py")
    README.write_text(after)
