"""README and its chapters: their text, and the blocks of code in it."""
import re

from launch import ROOT

CHAPTERS = {file: file.read_text() for file in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]}


def blocks(language):
    text = "\n".join(CHAPTERS.values())
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def block(text, language="python"):
    """The one block that has this text."""
    found, = (block for block in blocks(language) if text in block)
    return found
