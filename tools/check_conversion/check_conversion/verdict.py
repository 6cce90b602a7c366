"""What the check says."""
from dataclasses import dataclass, field
from enum import Enum

CHAPTER = "docs/your_own_script.md"  # which says what to do
SHOWN = 3  # of faults, differences or names of a kind; of the rest their count


class Heading(Enum):
    """Of the chapter: all that verdicts cite."""
    BY_ALL = "Printed by all ranks"
    CHECK_IT = "Check it"
    DECISIONS = "Decisions"
    END = "The end of a run"
    ERRORS = "Errors"
    FIGURES = "Printed figures"
    HANGS = "Hangs"
    HAS = "What your script has"
    LOAD_FIRST = "Load first, then DDP"
    NUMBERS = "Random numbers"
    PAIRS = "Losses over pairs"
    ROUTES = "Two routes"
    SAVING = "Saving"
    STEPS = "Loops of steps"
    SUMS = "Sums and unequal parts"
    THROUGH_DDP = "Training goes through DDP"
    VARY = "Errors that vary"


class CannotSay(Exception):
    """Why it cannot be said whether both train the same."""


@dataclass
class Fault:
    text: str
    heading: Heading
    step: int = 0
    measured: bool = False  # it rests on how far two figures are apart

    def __str__(self):
        step = f"step {self.step}: " if self.step else ""
        end = "" if self.text.endswith(("?", "\n ")) else "."
        return f'{step}{self.text}{end} See "{self.heading.value}" in {CHAPTER}.'


@dataclass
class Verdict:
    status: int  # 0: the same; 1: not the same
    lines: list = field(default_factory=list)


def few(names, most=SHOWN):
    """Three names and a count."""
    names = [*dict.fromkeys(names)]
    return ", ".join(names[:most]) + f" and {len(names) - most} more" * (len(names) > most)
