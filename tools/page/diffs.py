"""Where two scripts differ, and where the chapters show it."""
import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = [ROOT / "docs/diffs.md", ROOT / "docs/recipes.md"]
PLACE = re.compile(r"(<!-- diff (\S+) (\S+) ([^\n]+) -->\n)(.*?)(<!-- end -->)"
                   r"(.*?)(?=\n<!-- diff |\n#|\Z)", re.DOTALL)
ARROWS = [*dict.fromkeys(place[1:3] for chapter in CHAPTERS  # each after that to its base
                         for place in PLACE.findall(chapter.read_text()))]
SCRIPTS = ["single_gpu.py", *(new for _, new in ARROWS)]


def docstring_lines(name):
    return ast.parse((ROOT / name).read_text()).body[0].end_lineno


def hunks(old, new):
    """Where two files differ, by `diff`: (start, stop) in the old one's lines and in the new's.

    Without their docstrings, which always differ.
    """
    output = subprocess.run(["diff", "-U0", ROOT / old, ROOT / new], capture_output=True, text=True)
    least, new_least = docstring_lines(old), docstring_lines(new)
    found = []
    for numbers in re.findall(r"^@@ -(\d+),?(\d*) \+(\d+),?(\d*) @@", output.stdout, re.MULTILINE):
        first, count, new_first, new_count = (int(number or 1) for number in numbers)
        start, new_start = first - (count > 0), new_first - (new_count > 0)
        hunk = (max(start, least), max(start + count, least),
                max(new_start, new_least), max(new_start + new_count, new_least))
        if any(changed(old, new, hunk)):
            found.append(hunk)
    return found


def changed(old, new, hunk):
    """The lines that a hunk removes, and those that it adds."""
    start, stop, new_start, new_stop = hunk
    gone, come = ((ROOT / name).read_text().splitlines() for name in (old, new))
    return gone[start:stop], come[new_start:new_stop]


def has(old, new, hunk, codes):
    """Whether a hunk's lines have all this code, however it is broken into lines."""
    gone, come = changed(old, new, hunk)
    lines = "".join("".join(gone + come).split())
    return all("".join(code.split()) in lines for code in codes)


def having(old, new, *codes):
    return [hunk for hunk in hunks(old, new) if has(old, new, hunk, codes)]


def named(old, new, code):
    """The hunks that have this code, or one of `ONE | OTHER`; an error if one is in no hunk."""
    found = set()
    for one in code.split(" | "):
        if not having(old, new, one):
            raise SystemExit(f"{old} -> {new}: no hunk has {one}: name other code in its place")
        found.update(having(old, new, one))
    return sorted(found)


def show(old, new, hunks):
    """These hunks as a diff, each after the line before it, which says where it stands."""
    before = (ROOT / old).read_text().splitlines()
    lines, end = [], None
    for hunk in hunks:
        start, stop, _, _ = hunk
        gone, come = changed(old, new, hunk)
        if end is not None and start - end > 1:
            lines.append("...")
            end = None
        lines += [" " + line for line in before[max(0, start - 1) if end is None else end:start]]
        lines += ["-" + line for line in gone] + ["+" + line for line in come]
        end = stop
    return "\n".join(line.rstrip() for line in lines).strip("\n")
