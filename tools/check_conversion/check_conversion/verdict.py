"""What the check says."""
from dataclasses import dataclass, field

CHAPTER = "docs/your_own_script.md"


class CannotSay(Exception):
    """Why it cannot be said whether both train the same."""


@dataclass
class Fault:
    text: str
    heading: str  # of the chapter, which says what to do
    step: int = 0
    unknown: bool = False  # it keeps the check from seeing more, and is none
    measured: bool = False  # it rests on how far two figures are apart

    def __str__(self):
        step = f"step {self.step}: " if self.step else ""
        end = "" if self.text.endswith(("?", "\n ")) else "."
        return f'{step}{self.text}{end} See "{self.heading}" in {CHAPTER}.'


@dataclass
class Compared:
    """One part of the verdict: what was found the same, and what was not."""
    said: str = ""
    count: str = ""  # what was compared: "12 lines"
    faults: list = field(default_factory=list)
    remarks: list = field(default_factory=list)
    whole: bool = True  # nothing was left out


@dataclass
class Verdict:
    status: int  # 0: the same; 1: not the same
    lines: list
