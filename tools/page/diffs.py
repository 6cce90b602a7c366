"""Where two scripts differ, and where the texts show it."""
import ast
import itertools
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
README, DIFFS, RECIPES, OWN = TEXTS = [
    ROOT / name for name in ("README.md", "docs/diffs.md", "docs/recipes.md", "docs/your_own_script.md")]
# Each script and what it is a change of
ARROWS = [("single_gpu.py", "multigpu_torchrun.py"), ("single_gpu.py", "dp.py"),
          ("multigpu_torchrun.py", "multigpu_spawn.py"), ("multigpu_torchrun.py", "multinode.py"),
          *(("recipes/fsdp.py" if file.name == "large.py" else "multigpu_torchrun.py", f"recipes/{file.name}")
            for file in sorted(ROOT.glob("recipes/*.py")))]
WHOLE = {README: ARROWS[:1], DIFFS: ARROWS[1:4]}  # of these, the text shows everything
PLACE = re.compile(r"(<!-- diff (\S+) (\S+) (.+) -->\n)[\s\S]*?(<!-- end -->)")
CONTEXT = 2  # unchanged lines before a change, and after it


class Place(NamedTuple):
    old: str
    new: str
    hunks: list
    reasons: list  # paragraphs


def read(name):
    return (ROOT / name).read_text().splitlines()


def docstring_lines(name):
    return ast.parse((ROOT / name).read_text()).body[0].end_lineno


def hunks(old, new, docstrings=False):
    """Where two files differ, by `diff`: (start, stop) in the old one's lines and in the new's."""
    output = subprocess.run(["diff", "-U0", ROOT / old, ROOT / new], capture_output=True, text=True)
    least, new_least = (0, 0) if docstrings else (docstring_lines(old), docstring_lines(new))
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
    return read(old)[start:stop], read(new)[new_start:new_stop]


def squeeze(text):
    return "".join(text.split())


def named(old, new, code):
    """The hunks that have this code, or one of `ONE | OTHER`, however it is broken into lines."""
    found = set()
    for one in code.split(" | "):
        having = [hunk for hunk in hunks(old, new) if squeeze(one) in squeeze(
            "".join(itertools.chain(*changed(old, new, hunk))))]
        if not having:
            raise SystemExit(f"{old} -> {new}: no hunk has {one}: name other code in its place")
        found.update(having)
    return sorted(found)


def places(file):
    """A text's diffs. A reason is the paragraph before, in README's manner, or all that stand after."""
    text = file.read_text()
    for place in PLACE.finditer(text):
        _, old, new, code, _ = place.groups()
        if file in (README, OWN):
            reasons = text[:place.start()].strip().split("\n\n")[-1:]
        else:
            reasons = re.split(r"\n(?:<!-- diff |#)", text[place.end():])[0].strip().split("\n\n")
        yield Place(old, new, named(old, new, code), [reason for reason in reasons if re.match(r"[^#<]", reason)])


def beside(edge, lines):
    """Of the lines next to a change's edge, the nearest, up to an empty one."""
    return [*itertools.takewhile(str.strip, lines[:CONTEXT])] if edge.strip("+-") else []


def show(old, new, chosen):
    """These hunks as a diff; near ones stand in one block, with the lines between them."""
    lines, shown, end, was_shown = read(old), [], docstring_lines(old), False
    for hunk in [*hunks(old, new), None]:  # None: the end
        same = [" " + line for line in lines[end:hunk[0] if hunk else None]]
        near = was_shown and hunk in chosen and len(same) <= 2 * CONTEXT
        if was_shown and not near:
            shown += [*beside(shown[-1], same), "..."]
        if was_shown := hunk in chosen:
            gone, come = changed(old, new, hunk)
            diff = ["-" + line for line in gone] + ["+" + line for line in come]
            shown += (same if near else beside(diff[0], same[::-1])[::-1]) + diff
        end = hunk and hunk[1]
    while shown[-1].strip() in ("", "+", "..."):
        shown.pop()
    return "\n".join(line.rstrip() for line in shown)
