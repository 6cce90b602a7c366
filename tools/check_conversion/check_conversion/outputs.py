"""What both printed and logged for TensorBoard or wandb.

What differs between the two runs of the original by more than rounding is a time, an address or the
like: it is not compared. All else has to be the same, as far as rounding moves it.
"""
import collections
import re

from check_conversion.distances import TIMES, distance, norm
from check_conversion.protocol import Bar, Logged
from check_conversion.verdict import Compared, Fault

NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?|\b(?:nan|inf(?:inity)?|none)\b)"
# What a line may have in a figure's place: also 3/50, 12ms, 0:01:22, 2026-01-31, 0x7f12ab, Mon, Jan, PM.
DATES = r"(?-i:\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec|AM|PM)\b)"
TOKEN = rf"{DATES}|[-+]?(?:\d(?:[\w.]|[:/+-](?=\d)|,(?=\d{{3}}(?!\d)))*|\b(?:nan|inf(?:inity)?|none)\b)"
NUMBER, TOKEN = (re.compile(pattern, re.IGNORECASE) for pattern in (NUMBER, TOKEN))
MARK = "\0"  # of a token among the words
ZERO = 1e-14  # what is 0 but for rounding may be so large
BY_ROUNDING = 100  # times as far as the weights; further apart in the original is no rounding
SHOWN = 3  # faults of a kind that are shown in full


class Figures:
    """Judges figures of the same place, one after the other: rounding may part each as far as it has
    parted any of them so far. A printed figure may also be rounded to another last digit, but by chance:
    that is rarer, the less rounding moves the figure."""

    def __init__(self, drift):
        self.drift, self.largest = drift, 0.0
        self.expected, self.flipped = 0.0, []  # last digits that chance changes; the rows that have such

    def varies(self, original, nudged, unit=0.0):
        """Whether it moves by more than rounding when the original runs again."""
        return original != nudged and distance([original], [nudged]) > unit + BY_ROUNDING * self.drift * norm([original])

    def differs(self, original, nudged, converted, unit=0.0, row=0):
        """Whether the converted script's is another figure; unit: of its last digit."""
        if original == nudged and isinstance(original, int):  # a count, which is never rounded
            return converted != original
        apart = distance([original], [converted])
        self.largest = max(self.largest, distance([original], [nudged]) - unit)
        allowed = TIMES * max(self.largest, self.drift * norm([original])) + ZERO
        if unit:
            self.expected += min(1, allowed / unit)
        if allowed < apart <= allowed + unit:
            self.flipped.append(row)
            return False
        return apart > allowed

    def flipped_by_fault(self, rows):
        """Rows whose last digits differ, if they are more than chance explains."""
        return self.flipped if len(self.flipped) > 3 * self.expected + 0.01 * rows else []


# Text: lines of the same words, in their order.

def value(figure):
    figure = figure.replace(",", "").lower()
    whole = re.fullmatch(r"[-+]?\d{1,300}", figure)
    return int(figure) if whole else float(figure.replace("none", "nan"))


def last_digit(figure):
    """What one in its last digit is worth."""
    mantissa, _, exponent = figure.lower().partition("e")
    digits = len(mantissa.partition(".")[2])
    if exponent.lstrip("+-").isdecimal():
        return 1.01 * 10.0 ** min(int(exponent) - digits, 300)
    return 1.01 * 10.0 ** -digits if digits else 0


def by_words(text):
    """Lines without their figures, and of each its lines with them."""
    found = collections.defaultdict(list)
    for line in text.splitlines():
        dense = re.sub(r"(?<=[\[(]) +| +(?=[\])])", "", line)  # [ 0.5 -0.5] is [0.5 -0.5]
        words = " ".join(TOKEN.sub(MARK, dense).split())
        if re.search(rf"\w|{MARK}", words):  # brackets alone say nothing
            found[words].append((line.strip(), TOKEN.findall(dense)))
    return found


def around(token):
    return NUMBER.sub(MARK, token)


def token_varies(token, nudged, drift):
    if around(token) != around(nudged):
        return True
    figures = zip(*map(NUMBER.findall, (token, nudged)))
    return any(Figures(drift).varies(value(a), value(b), last_digit(a)) for a, b in figures)


def token_differs(judges, row, token, nudged, other):
    if around(token) != around(other):
        return True
    differ = False
    for place, (a, b, c) in enumerate(zip(*map(NUMBER.findall, (token, nudged, other)))):
        unit = min(last_digit(a), last_digit(c))
        differ |= judges[place].differs(value(a), value(b), value(c), unit, row)
    return differ


def counterpart(words, original, converted):
    """The converted script's line of these words, or one of its own that has a few more, and how many
    tokens stand before them there."""
    if words not in converted and re.search(r"[^\W\d_]", words):
        pattern = re.compile(rf"(?<!\w){re.escape(words)}(?!\w)")
        for other in sorted(converted.keys() - original.keys(), key=len):
            if found := pattern.search(other):
                return other, other[:found.start()].count(MARK)
    return words, 0


def compare_group(lines, nudged_lines, others, skipped, drift):
    """Of lines of the same words: those that part, and those with something that varies."""
    parted, varying = set(), set()
    for place in range(len(lines[0][1])):
        rows = [(one[place], nudged[place], other[skipped + place])
                for (_, one), (_, nudged), (_, other) in zip(lines, nudged_lines, others)]
        moved = [token_varies(one, nudged, drift) for one, nudged, _ in rows]
        if 2 * sum(moved) > len(rows):  # a time, where it is too short to be seen too
            moved = [True] * len(rows)
        judges = collections.defaultdict(lambda: Figures(drift))
        for k, (row, varies) in enumerate(zip(rows, moved)):
            if varies:
                varying.add(k)
            elif token_differs(judges, k, *row):
                parted.add(k)
        for judge in judges.values():
            parted.update(judge.flipped_by_fault(len(rows)))
    return ([(lines[k][0], others[k][0]) for k in sorted(parted)],
            [lines[k][0] for k in sorted(varying - parted)])


def compare_texts(texts, names, drift, verb="printed", file="", needed=lambda line: False):
    """Texts of the original's two runs and of the converted script's; names: of both scripts; file: that
    they are in; needed: lines that the converted script must have too."""
    original, nudged, converted = map(by_words, texts)
    same, figures_same, faults, parted, missing, varying, other_words = 0, 0, [], [], [], [], []
    for words, lines in original.items():
        theirs, skipped = counterpart(words, original, converted)
        others = converted.get(theirs, [])
        if len(nudged[words]) != len(lines):
            other_words += [line for line, _ in lines]
        elif not others:
            missing += [line for line, _ in lines]
        elif len(others) != len(lines):
            heading = "Printed by all ranks" if len(others) > len(lines) else "Printed figures"
            faults.append(Fault(f"{file}{verb} {len(others)} times instead of {len(lines)}: "
                                f"{lines[0][0]}", heading))
        else:
            different, vary = compare_group(lines, nudged[words], others, skipped, drift)
            parted, varying = parted + different, varying + vary
            same += len(lines) - len(different)
            figures_same += (len(lines) - len(different)) * (MARK in words)
    if parted:
        shown = "".join(f"\n  {names[0]}: {a}\n  {names[1]}: {b}" for a, b in parted[:SHOWN])
        more = f"\n  and {many(len(parted) - SHOWN, 'more line')}" * (len(parted) > SHOWN)
        faults.append(Fault(f"{file}{verb} differently:{shown}{more}\n ", "Printed figures", measured=True))
    figures = [line for line in missing if TOKEN.search(line)]
    if figures and not figures_same and not faults and (
            len(figures) > 1 or not any(MARK in words for words in converted)):
        faults.append(Fault(f"{file}{verb} by {names[1]}: none of the {many(len(figures), 'line')} with figures "
                            f"of {names[0]}", "Printed figures"))
        missing = []
    not_there = named(f"{file}not {verb} by {names[1]} in these words", missing)
    if any(map(needed, missing)):
        faults.append(Fault(not_there, "Printed figures"))
        not_there = ""
    total = sum(map(len, original.values()))
    remarks = [not_there,
               named(f"{file}not compared, because {names[0]} has different lines in each run", other_words),
               named(f"{file}compared except for what differs in each run, such as a time", varying)]
    said = (f"{same} of {total} lines the same" if total else
            f"{names[0]} prints no line" if converted else "no line by either")
    count = (f"{same} of {total} lines" if same < total else many(total, "line")) if total else ""
    return Compared(said, count, *few(faults, remarks), whole=same == total)


def many(count, what):
    return f"{count} {what}{'s' * (count != 1)}" if count else ""


def few(faults, remarks):
    """The first faults, and that there are more."""
    more = [f"and {many(len(faults) - SHOWN, 'more fault')} of this kind"] * (len(faults) > SHOWN)
    return faults[:SHOWN], [*more, *filter(None, remarks)]


def named(what, lines):
    more = f" (and {many(len(lines) - 1, 'more line')})" * (len(lines) > 1)
    return f"{what}: {lines[0]}{more}" if lines else ""


def compare_lines(original, nudged, converted, drift):
    return compare_texts([run.stdout for run in (original, nudged, converted)],
                         (original.name, converted.name), drift)


def compare_errors(original, nudged, converted, drift):
    """What the scripts' own lines wrote to stderr, where loggers write."""
    texts = [run.errors for run in (original, nudged, converted)]
    if not any(texts):
        return Compared()
    found = compare_texts(texts, (original.name, converted.name), drift, "written to stderr")
    found.count += " on stderr" * bool(found.count)
    return found


def compare_bars(original, nudged, converted, drift):
    """The last state of each of tqdm's."""
    texts = ["\n".join(bar.state for process in run.processes for bar in process.of(Bar))
             for run in (original, nudged, converted)]
    if not any(texts):
        return Compared()
    found = compare_texts(texts, (original.name, converted.name), drift, "shown in a progress bar")
    found.said, found.count = (text.replace("line", "progress bar") for text in (found.said, found.count))
    return found


# What was logged: figures of the same name, in their order.

def logged(run):
    found = collections.defaultdict(list)
    for process in run.processes:
        for figure in process.of(Logged):
            found[figure.to, figure.name].append((figure.value, figure.step))
    return found


def compare_logged(original, nudged, converted, drift):
    found, of_nudged, others = map(logged, (original, nudged, converted))
    same, faults, varying = collections.Counter(), [], []
    for (to, name), lines in found.items():
        judge = Figures(drift)
        (figures, steps), (nudged_ones, _), (ours, our_steps) = (
            zip(*them[to, name]) if them[to, name] else ((), ()) for them in (found, of_nudged, others))
        if len(nudged_ones) != len(lines):
            varying.append(f"{to}: {name}")
            continue
        if len(ours) != len(figures):
            heading = "Printed by all ranks" if len(ours) > len(figures) else "Printed figures"
            faults.append(Fault(f"{to}: {name} is logged {len(ours)} times instead of "
                                f"{len(figures)}", heading))
            continue
        moved = [judge.varies(a, b) for a, b in zip(figures, nudged_ones)]
        if any(moved):
            some = f" ({sum(moved)} of {len(figures)})"
            varying.append(f"{to}: {name}{some * (2 * sum(moved) <= len(figures))}")
        if 2 * sum(moved) > len(figures):
            continue
        parted = [(a, c) for a, b, c, varies in zip(figures, nudged_ones, ours, moved)
                  if not varies and judge.differs(a, b, c)]
        if parted:
            faults.append(Fault(f"{to}: {name} is {parted[0][1]:.6g} instead of "
                                f"{parted[0][0]:.6g}", "Printed figures", measured=True))
        if steps != our_steps:
            a, c = next((a, c) for a, c in zip(steps, our_steps) if a != c)
            faults.append(Fault(f"{to}: {name} is logged for step {c} instead of {a}", "Printed figures"))
        same[to] += len(figures) - sum(moved) - len(parted)
    said = "; ".join(f"{to}: {count} figures the same" for to, count in same.items())
    remark = named(f"not compared, because {original.name} logs different values in each run", varying)
    return Compared(said, many(sum(same.values()), "logged figure"), *few(faults, [remark]))
