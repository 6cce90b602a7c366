"""Brings the diffs and counts in README.md and docs, and docs/index.html, up to date:
python tools/page [--check]

A diff in a text stands between `<!-- diff OLD NEW CODE -->` and `<!-- end -->`: the hunks that have
this code, or one of `ONE | OTHER`. README.md must show all of single_gpu.py -> multigpu_torchrun.py
once, docs/diffs.md the other launch styles. The page shows each diff's reasons beside it: in
README.md and docs/your_own_script.md the paragraph before it, in the others the paragraphs after
it, to the next diff or heading. In a table, the first `-N +N` in the row of [`NAME`] is counted.
"""
import re
import sys
from pathlib import Path

from diffs import ARROWS, PLACE, README, RECIPES, ROOT, TEXTS, WHOLE, hunks, named, places, show
from page import page


def render(file):
    """The text, with diffs and counts as the scripts have them."""
    def fill(place):
        begin, old, new, code, end = place.groups()
        return f"{begin}```diff\n{show(old, new, named(old, new, code))}\n```\n{end}"

    text = PLACE.sub(fill, file.read_text())
    for old, new in ARROWS:
        gone, come = (sum(hunk[side + 1] - hunk[side] for hunk in hunks(old, new, docstrings=True))
                      for side in (0, 2))
        row = rf"(?m)^(\| \[`{Path(new).name}`].*?)-\d+ \+\d+"
        text, found = re.subn(row, rf"\g<1>-{gone} +{come}", text)
        if not found and file == (RECIPES if "/" in new else README):
            sys.exit(f"{file.relative_to(ROOT)}: no row of a table has [`{Path(new).name}`] and -0 +0")
    return text


def check_places(file):
    """Stop if the text does not show once what it must show whole."""
    shown = [(*place[:2], hunk) for place in places(file) for hunk in place.hunks]
    for old, new in WHOLE.get(file, ()):
        for hunk in hunks(old, new):
            if (times := shown.count((old, new, hunk))) != 1:
                sys.exit(f"{file.relative_to(ROOT)} shows this of {old} -> {new} {times} times instead"
                         f" of once\n{show(old, new, [hunk])}")


if __name__ == "__main__":
    made = {file: render(file) for file in TEXTS}
    for file in TEXTS:
        check_places(file)
    made[ROOT / "docs/index.html"] = page()
    behind = [file for file, text in made.items() if not file.exists() or file.read_text() != text]
    if "--check" in sys.argv[1:]:
        sys.exit("\n".join(f"{file.relative_to(ROOT)} is behind: run python tools/page"
                           for file in behind) or None)
    for file in behind:
        file.write_text(made[file])
