"""What the check says."""
from dataclasses import dataclass

CHAPTER = "docs/your_own_script.md"  # which says what to do
SHOWN = 3  # of faults, differences or names of a kind; of the rest their count


class CannotSay(Exception):
    """Why it cannot be said whether both train the same."""


@dataclass
class Fault:
    heading: str  # of the chapter; None: it is no fault, but nothing more can be compared
    text: str
    step: int = 0
    measured: bool = False  # it rests on how far two figures are apart

    def __str__(self):
        text = f"step {self.step}: {self.text}" if self.step else self.text
        end = "" if text.endswith(("?", "\n ")) else "."
        return f'{text}{end} See "{self.heading}" in {CHAPTER}.' if self.heading else text


@dataclass
class Verdict:
    status: int  # 0: the same; 1: not the same
    lines: list


def few(names, most=SHOWN):
    """Three names and a count."""
    names = [*dict.fromkeys(names)]
    return ", ".join(names[:most]) + f" and {len(names) - most} more" * (len(names) > most)


def say(first, faults, parts, rest):
    """parts: outputs.Comparison of each kind of output."""
    more = [f"and {len(faults) - SHOWN} more fault{'s' * (len(faults) > SHOWN + 1)}"] * (len(faults) > SHOWN)
    counts = [f"{part.what}: {part.count}" for part in parts if part.count]
    remarks = [remark for part in parts for remark in part.remarks]
    return Verdict(int(bool(faults)), [*first, *map(str, faults[:SHOWN]), *more, *counts, *rest, *remarks])
