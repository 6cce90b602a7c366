"""What the check says."""
from dataclasses import dataclass, field

# The chapter that says what to do, and its headings: all that a verdict cites.
CHAPTER = "docs/your_own_script.md"
(DECISIONS, RANDOM_NUMBERS, LOAD_FIRST, THROUGH_DDP, TWO_ROUTES, STEPS, SUMS, VARY, PAIRS, HAS, FIGURES, BY_ALL, SAVING,
 HANGS, ERRORS, END, CHECK_IT) = (
    "Decisions", "Random numbers", "Load first, then DDP", "Training goes through DDP", "Two routes", "Loops of steps",
    "Sums and unequal parts", "Errors that vary", "Losses over pairs", "What your script has", "Printed figures",
    "Printed by all ranks", "Saving", "Hangs", "Errors", "The end of a run", "Check it")


class CannotSay(Exception):
    """Why it cannot be said whether both train the same."""


@dataclass
class Fault:
    text: str
    heading: str
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
