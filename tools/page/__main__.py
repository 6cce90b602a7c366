"""Brings docs/diffs.md, docs/recipes.md and docs/index.html up to date:
python tools/page [--check]

A diff in a chapter stands between `<!-- diff OLD NEW CODE -->` and `<!-- end -->`: the hunks that
have this code, or one of `ONE | OTHER`. Each paragraph below, to the next place or heading, is a
reason, which the page shows at the first hunk that has all the code it names. A reason that begins
in bold marks what is DDP itself. docs/diffs.md must show every hunk, docs/recipes.md need not.
"""
import re
import sys

from diffs import ARROWS, CHAPTERS, PLACE, ROOT, SCRIPTS, changed, hunks, named, show
from page import page


def render(chapter):
    """The chapter's text, each diff as the files have it."""
    def fill(place):
        begin, old, new, code, _, end, reason = place.groups()
        return f"{begin}```diff\n{show(old, new, named(old, new, code))}\n```\n{end}{reason}"

    return count_changes(PLACE.sub(fill, chapter.read_text()))


def count_changes(text):
    """The text, where the table of recipes says how many lines each changes in its base."""
    for old, new in ARROWS:
        count = sum(len(lines) for hunk in hunks(old, new) for lines in changed(old, new, hunk))
        name = new.removeprefix("recipes/")
        text = re.sub(rf"(\| \[`{name}`\]\([^)]*\) \|)[ \d]*\|", rf"\g<1> {count} |", text)
    return text


def check_places(text):
    """Stop if docs/diffs.md, which has this text, lacks a hunk, or docs/recipes.md a recipe."""
    shown = {}
    for _, old, new, code, *_ in PLACE.findall(text):
        shown.setdefault((old, new), []).extend(named(old, new, code))
    for (old, new), found in shown.items():
        if missing := [hunk for hunk in hunks(old, new) if hunk not in found]:
            sys.exit(f"docs/diffs.md does not show this of {old} -> {new}: add a place with its "
                     f"reason\n{show(old, new, missing)}")
    unseen = {f"recipes/{file.name}" for file in ROOT.glob("recipes/*.py")} - {*SCRIPTS}
    if unseen:
        sys.exit(f"docs/recipes.md does not show {', '.join(sorted(unseen))}: add a place")


if __name__ == "__main__":
    made = {file: render(file) for file in CHAPTERS}
    check_places(made[CHAPTERS[0]])
    made[ROOT / "docs/index.html"] = page("\n".join(made.values()))
    behind = [file for file, text in made.items() if not file.exists() or file.read_text() != text]
    if "--check" in sys.argv[1:]:
        sys.exit("\n".join(f"{file.relative_to(ROOT)} is behind: run python tools/page"
                           for file in behind) or None)
    for file in behind:
        file.write_text(made[file])
