"""Brings the diffs and the counts of changed lines in README.md and docs up to date:
python tools/embed_diffs.py [--check]

A diff stands in a text between `<!-- diff OLD NEW CODE -->` and `<!-- end -->`: the changes from OLD
to NEW that have this code, or one of `ONE | OTHER`. README.md must show each change from
single_gpu.py to multigpu_torchrun.py once, docs/diffs.md those of the other launch styles. In a
table, the first `-N +N` in the row of [`NEW`] counts all changed lines, docstrings included.
"""
import re
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README, DIFFS, RECIPES, OWN = "README.md", "docs/diffs.md", "docs/recipes.md", "docs/your_own_script.md"
TEXTS = {name: (ROOT / name).read_text() for name in (README, DIFFS, RECIPES, OWN)}
WHOLE = [(README, "single_gpu.py", "multigpu_torchrun.py"), (DIFFS, "single_gpu.py", "dp.py"),
         (DIFFS, "multigpu_torchrun.py", "multigpu_spawn.py"), (DIFFS, "multigpu_torchrun.py", "multinode.py")]
COUNTED = {README: [pair for _, *pair in WHOLE],
           RECIPES: [("multigpu_torchrun.py", f"recipes/{file.name}") for file in ROOT.glob("recipes/*.py")]}
PLACE = re.compile(r"(<!-- diff (\S+) (\S+) (.+) -->\n)[\s\S]*?(<!-- end -->)")
CONTEXT = 2  # unchanged lines before a change, and after it


def compare(old, new, first_lines=("1", "1")):
    """All lines of both files, from these on, as `diff -u` marks them: " " if both have them, else "-" or "+"."""
    command = ["bash", "-c", 'diff -U9999 <(tail -n "+$1" "$3") <(tail -n "+$2" "$4")', "-", *first_lines, old, new]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines(keepends=True)[3:]


def split(old, new):
    """The lines below the docstrings: what agrees (perhaps nothing), a change, what agrees, ..., what agrees."""
    docstrings = [re.match(r'"""[\s\S]*?"""\n', (ROOT / name).read_text())[0] for name in (old, new)]
    lines = compare(old, new, [str(docstring.count("\n") + 1) for docstring in docstrings])
    return re.split(r"((?:^[-+].*\n)+)", "".join(lines), flags=re.MULTILINE)


def find(old, new, code):
    """Where the changes with this code stand in what `split` returns."""
    found = set()
    for one in code.split(" | "):
        having = [at for at, part in enumerate(split(old, new)) if at % 2 and one in part]
        if not having:
            sys.exit(f"{old} -> {new}: no change has {one}: name other code in its place")
        found.update(having)
    return sorted(found)


def beside(edge, lines):
    """Of the lines next to a change's edge, the nearest, up to an empty one."""
    return [*takewhile(str.strip, lines[:CONTEXT])] if edge.strip("-+") else []


def show(old, new, chosen):
    """These changes as a diff; near ones stand in one block, with the lines between them."""
    parts, shown = split(old, new), []
    for at in chosen:
        before, change, after = (part.splitlines() for part in parts[at - 1:at + 2])
        near = at - 2 in chosen and len(before) <= 2 * CONTEXT
        shown += before if near else ["...", *beside(change[0], before[::-1])[::-1]]
        shown += change
        if at + 2 not in chosen or len(after) > 2 * CONTEXT:
            shown += beside(change[-1], after)
    while shown[-1].strip() in ("", "+"):
        shown.pop()
    return "\n".join(line.rstrip() for line in shown[1:])  # without the "..." above the first


def render(name):
    """The text, with diffs and counts as the scripts have them."""
    def fill(place):
        begin, old, new, code, end = place.groups()
        return f"{begin}```diff\n{show(old, new, find(old, new, code))}\n```\n{end}"

    text = PLACE.sub(fill, TEXTS[name])
    for old, new in COUNTED.get(name, ()):
        gone, come = (sum(line[0] == sign for line in compare(old, new)) for sign in "-+")
        text, rows = re.subn(rf"(?m)^(\| \[`{Path(new).name}`].*?)-\d+ \+\d+", rf"\g<1>-{gone} +{come}", text)
        if not rows:
            sys.exit(f"{name}: no row of a table has [`{Path(new).name}`] and -0 +0")
    return text


def check_whole(name, old, new):
    """Stop unless the text shows each change once."""
    places = [place[1:4] for place in PLACE.findall(TEXTS[name]) if place[1:3] == (old, new)]
    shown = [at for place in places for at in find(*place)]
    for at in range(1, len(split(old, new)), 2):
        if (times := shown.count(at)) != 1:
            sys.exit(f"{name} shows this of {old} -> {new} {times} times instead of once\n{show(old, new, [at])}")


if __name__ == "__main__":
    for whole in WHOLE:
        check_whole(*whole)
    for old, new in COUNTED[RECIPES]:
        if f"<!-- diff {old} {new} " not in TEXTS[RECIPES]:
            sys.exit(f"{RECIPES} shows nothing of {new}")
    made = {name: render(name) for name in TEXTS}
    behind = [name for name in TEXTS if made[name] != TEXTS[name]]
    if "--check" in sys.argv[1:]:
        sys.exit("\n".join(f"{name} is behind: run python tools/embed_diffs.py" for name in behind) or None)
    for name in behind:
        (ROOT / name).write_text(made[name])
        print(name, *(row for row in made[name].splitlines() if row.startswith("| [`") and row not in TEXTS[name]), sep="\n")
