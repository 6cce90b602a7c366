"""README and its chapters, as text."""
import re

from launch import ROOT

CHAPTERS = {file: file.read_text() for file in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]}


def blocks(language):
    text = "\n".join(CHAPTERS.values())
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
