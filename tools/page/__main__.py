"""Brings docs/diffs.md, docs/recipes.md and docs/index.html up to date:
python tools/page [--check]

A diff in a chapter stands between `<!-- diff OLD NEW 1 -->` and `<!-- end -->`: the first hunk, or
`2-4`. Each paragraph below, to the next place or heading, is a reason, which the page shows at the
first hunk that has all the code it names. Which reason belongs under which hunk is for a person to
say: where hunks come, go or become others, this fails and writes nothing. A new or changed place
begins as an empty one.
"""
import difflib
import re
import sys

from diffs import ARROWS, CHAPTERS, PLACE, ROOT, SCRIPTS, hunks, show
from page import page


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
                     "its place and the reason under it, empty it and run python tools/page")
        shown[old, new] = last
        return f"{begin}```diff\n{after}\n```\n{end}{reason}"

    text = PLACE.sub(fill, text)
    for (old, new), last in shown.items():
        count = len(hunks(old, new))
        if last != count:
            sys.exit(f"{chapter} shows {last} hunks of {old} -> {new}, which has {count}: add or "
                     "remove a place, with its reason, and run python tools/page")
    return text


def count_changes(chapter):
    """The chapter, where the table of recipes says how many lines each changes in its base."""
    for old, new in ARROWS:
        count = sum(stop - start + new_stop - new_start
                    for start, stop, new_start, new_stop in hunks(old, new))
        name = new.removeprefix("recipes/")
        chapter = re.sub(rf"(\| \[`{name}`\]\([^)]*\) \|)[ \d]*\|", rf"\g<1> {count} |", chapter)
    return chapter


if __name__ == "__main__":
    unseen = {f"recipes/{file.name}" for file in ROOT.glob("recipes/*.py")} - {*SCRIPTS}
    if unseen:
        sys.exit(f"docs/recipes.md does not show {', '.join(sorted(unseen))}: begin an empty place")
    made = {file: count_changes(render(file.read_text(), file.name)) for file in CHAPTERS}
    made[ROOT / "docs/index.html"] = page("\n".join(made.values()))
    behind = [file for file, text in made.items() if not file.exists() or file.read_text() != text]
    if "--check" in sys.argv[1:]:
        sys.exit("\n".join(f"{file.relative_to(ROOT)} is behind: run python tools/page"
                           for file in behind) or None)
    for file in behind:
        file.write_text(made[file])
