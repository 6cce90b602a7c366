"""What the check says."""
from dataclasses import dataclass, field

CHAPTER = "docs/your_own_script.md"  # which says what to do
SHOWN = 3  # of faults, differences or names of a kind; of the rest their count


class CannotSay(Exception):
    """Why it cannot be said whether both train the same."""


@dataclass
class Fault:
    text: str
    heading: str  # of the chapter
    step: int = 0
    measured: bool = False  # it rests on how far two figures are apart

    def __str__(self):
        step = f"step {self.step}: " if self.step else ""
        end = "" if self.text.endswith(("?", "\n ")) else "."
        return f'{step}{self.text}{end} See "{self.heading}" in {CHAPTER}.'


@dataclass
class Verdict:
    status: int  # 0: the same; 1: not the same
    lines: list = field(default_factory=list)


def few(names, most=SHOWN):
    """Three names and a count."""
    names = [*dict.fromkeys(names)]
    return ", ".join(names[:most]) + f" and {len(names) - most} more" * (len(names) > most)
