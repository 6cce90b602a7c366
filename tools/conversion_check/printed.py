"""What both printed, and logged for TensorBoard or wandb: figures that rounding does not part."""
import collections
import re
from dataclasses import dataclass, field

from conversion_check.evidence import Fault
from conversion_check.record import Logged

NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
VARIES = (rf"\S+\.[a-z]\w*(?::\d+)?|{NUMBER} ?(?:\S+/s\w*|m?s|sec\w*|min\w*)\b"
          r"|\d{4}-\d\d-\d\d|\d+:\d\d[:\d]*(?:[.,]\d+)?"
          rf"|(?:time|eta|elapsed|dt)\W*{NUMBER}")  # files and times
TIMES = 5  # as far as rounding parts a figure, it may part
BY_ROUNDING = 100  # times as far as the weights; further apart in the original is no rounding


@dataclass
class Compared:
    """One part of the verdict: what was found the same, in words, or the fault."""
    said: str = ""
    fault: Fault = None
    remarks: list = field(default_factory=list)


def value(figure):
    return float(figure.replace(",", ""))


def last_digit(figure):
    """A printed number may differ by one in its last digit."""
    mantissa, _, exponent = figure.replace(",", "").lower().partition("e")
    digits = len(mantissa.partition(".")[2])
    return 1.01 * 10.0 ** (int(exponent or 0) - digits) if digits or exponent else 0


class Figures:
    """Judges figures of the same place in their order."""

    def __init__(self, drift):
        self.drift, self.largest, self.varying = drift, 0.0, 0

    def parts(self, a, again, b, unit=0.0):
        """Whether b is another figure than a, which again is when the original runs again."""
        apart = abs(a - again)
        if apart > unit + BY_ROUNDING * self.drift * abs(a):
            self.varying += 1  # a time, perhaps
            return False
        self.largest = max(self.largest, apart)
        allowed = unit + TIMES * max(self.largest, self.drift * abs(a))
        return not (abs(a - b) <= allowed or a == b or (a != a and b != b))


def lines_by_words(run):
    found = collections.defaultdict(list)
    for line in run.stdout.splitlines():
        rest = re.sub(VARIES, "...", line)
        if words := " ".join(re.sub(NUMBER, "#", rest).split()):
            found[words].append((line, re.findall(NUMBER, rest)))
    return found


def counterpart(words, converted):
    """The converted script's line of these words, or one that has a few more."""
    if words in converted or "#" not in words:
        return words
    return next((other for other in converted if words in other), words)


def compare_lines(first, again, many, drift):
    """Each line of the original that has figures, beside its counterpart."""
    original, twice, converted = map(lines_by_words, (first, again, many))
    total, same, missing, varying = sum(map(len, original.values())), 0, [], 0
    for words, lines in original.items():
        others = converted.get(counterpart(words, converted), [])
        if len(twice[words]) != len(lines):
            varying += len(lines)
            continue
        if not others:
            missing += [line for line, _ in lines]
            continue
        if len(others) != len(lines):
            heading = "Printed by all ranks" if len(others) > len(lines) else "Printed figures"
            return Compared(fault=Fault(f"printed {len(others)} times instead of {len(lines)}: "
                                        f"{lines[0][0].strip()}", heading))
        if parted := compare_line(lines, twice[words], others, drift):
            return Compared(fault=Fault(f"printed differently:\n  {first.name}: {parted[0]}\n"
                                        f"  {many.name}: {parted[1]}\n ", "Printed figures"))
        same += len(lines)
    return say_lines(first, many, total, same, missing, converted)


def compare_line(lines, twice, others, drift):
    """The first two lines of the same words that have another figure."""
    judges = collections.defaultdict(lambda: Figures(drift))
    for (line, figures), (_, again), (other, now) in zip(lines, twice, others):
        now = now[len(now) - len(figures):]  # where more words stand before it, so may figures
        for place, (a, b, c) in enumerate(zip(figures, again, now)):
            if a != c and judges[place].parts(value(a), value(b), value(c), last_digit(a)):
                return line, other
    return None


def say_lines(first, many, total, same, missing, converted):
    with_figures = [line for line in missing if re.search(r"\d", re.sub(VARIES, "", line))]
    if not total:
        return Compared("no line was printed by either" if not converted else
                        f"{first.name} prints no line")
    if not same and with_figures and not any("#" in words for words in converted):
        return Compared(fault=Fault(f"{many.name} prints none of the {len(with_figures)} lines "
                                    f"with figures that {first.name} prints", "Printed figures"))
    remarks = [f"not printed by {many.name} in these words: {missing[0].strip()}"
               + f" (and {len(missing) - 1} more lines)" * (len(missing) > 1)] if missing else []
    return Compared(f"{same} of {total} lines the same", remarks=remarks)


def logged(run):
    found = collections.defaultdict(list)
    for rank in run.processes:
        for one in rank.of(Logged):
            found[one.to, one.name].append((rank.rank, one.value))
    return found


def compare_logged(first, again, many, drift):
    """Each figure by its name, in its order."""
    original, twice, converted = map(logged, (first, again, many))
    same = collections.Counter()
    for (to, name), figures in original.items():
        others, judge = converted[to, name], Figures(drift)
        if len(others) != len(figures):
            heading = "Printed by all ranks" if len(others) > len(figures) else "Printed figures"
            return Compared(fault=Fault(f"{to}: {name} is logged {len(others)} times instead of "
                                        f"{len(figures)}", heading))
        for (_, a), (_, b), (_, c) in zip(figures, twice[to, name], others):
            if judge.parts(a, b, c):
                return Compared(fault=Fault(f"{to}: {name} is {c:.6g} instead of {a:.6g}",
                                            "Printed figures"))
        same[to] += len(figures)
    return Compared("; ".join(f"{to}: {count} figures the same" for to, count in same.items()))
