"""README is short and leads to the chapters; links lead somewhere; figures are those that were measured."""
import json
import re
import runpy

from chapters import CHAPTERS
from launch import RECIPES, ROOT

README = CHAPTERS[ROOT / "README.md"]


def test_the_front_door_is_short_and_every_link_between_the_chapters_leads_to_a_file_and_a_heading():
    assert len(README.split()) <= 800
    assert sum(len(text.split()) for text in CHAPTERS.values()) <= 12_000
    assert all(f"]({file.relative_to(ROOT)})" in README for file in CHAPTERS if file != ROOT / "README.md")
    found = [(file, *link) for file in CHAPTERS for link in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", CHAPTERS[file])]
    assert len(found) > 20
    for recipe in (ROOT / name for name in RECIPES):  # which names the section with its reasons
        found.append((recipe, "../docs/recipes.md", re.search(r'docs/recipes\.md#(\S+)"""', recipe.read_text())[1]))
    for file, path, anchor in found:
        target = (file.parent / path).resolve() if path else file
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
        places = ["", *(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)]
        assert target.exists() and anchor in places, (file, path, anchor)


def test_the_chapter_shows_the_figures_of_the_record():
    figures = runpy.run_path(str(ROOT / "tools/benchmark.py"))["figures"]
    chapter = (ROOT / "docs/measured.md").read_text()
    record = json.loads((ROOT / "docs/benchmark.json").read_text())
    assert record["command"] in " ".join(chapter.split())
    for row in record["rows"]:
        assert f"| {' | '.join(map(str, figures(row)))} |\n" in chapter
