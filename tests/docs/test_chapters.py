"""README leads to the chapters, and links lead somewhere."""
import re

from chapters import CHAPTERS
from launch import RECIPES, ROOT

README = CHAPTERS[ROOT / "README.md"]


def test_readme_leads_to_every_chapter_and_every_link_between_the_chapters_leads_to_a_file_and_a_heading():
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
