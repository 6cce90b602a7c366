"""What both printed, showed, logged and left in files. Text is compared line by line: lines of the same words, in their
order, number by number; and so are figures of a log, and numbers and strings in a file.

What differs between the two runs of the original by more than rounding is a time, an address or the like: it is not
compared. All else has to be the same, as far as rounding moves it.
"""
import collections
import re
from pathlib import Path
from typing import NamedTuple

from check_conversion.files import Tensor
from check_conversion.records import FLOORS
from check_conversion.sketch import LARGE, TIMES, Measured, distance, norm
from check_conversion.verdict import SHOWN, Fault, few

NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?|\b(?:nan|inf(?:inity)?|none)\b)"
# What a line may have in a figure's place: also 3/50, 12ms, 0:01:22, 2026-01-31, 0x7f12ab, Mon, Jan, PM.
DATES = r"(?-i:\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec|AM|PM)\b)"
TOKEN = rf"{DATES}|[-+]?(?:\d(?:[\w.]|[:/+-](?=\d)|,(?=\d{{3}}(?!\d)))*|\b(?:nan|inf(?:inity)?|none)\b)"
NUMBER, TOKEN = (re.compile(pattern, re.IGNORECASE) for pattern in (NUMBER, TOKEN))
MARK = "\0"  # of a token among the words
ZERO = 1e-14  # what is 0 but for rounding may be so large
BY_ROUNDING = 100  # times as far as the weights; further apart in the original is no rounding
TABLES = ".csv", ".tsv"
DATA = (*TABLES, ".json", ".jsonl", ".yaml", ".yml")  # of which each line with a figure counts
SETTINGS = {"args", "config", "hparams", "opt", "options", "settings", "param_groups"}


class Number(NamedTuple):
    value: float  # a count, which is never rounded, is an int
    unit: float  # what one in its last printed digit is worth


class Part(NamedTuple):
    around: str  # its words
    numbers: list


class Item(NamedTuple):
    shown: str
    parts: list


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
    return 1.01 * 10.0 ** -digits if digits else 0.0


def part_of(token):
    return Part(NUMBER.sub(MARK, token), [Number(value(one), last_digit(one)) for one in NUMBER.findall(token)])


def items_of_text(text):
    """Lines, by their words without figures."""
    found = collections.defaultdict(list)
    for line in text.splitlines():
        dense = re.sub(r"(?<=[\[(]) +| +(?=[\])])", "", line)  # [ 0.5 -0.5] is [0.5 -0.5]
        words = " ".join(TOKEN.sub(MARK, dense).split())
        if re.search(rf"\w|{MARK}", words):  # brackets alone say nothing
            found[words].append(Item(line.strip(), [*map(part_of, TOKEN.findall(dense))]))
    return found


def text_of_log(run):
    records = (record for process in run.processes for record in process.of("figure"))
    return "\n".join(f"{record.name} {record.value[0]!r}" + " for step "
                                                            f"{record.value[1]}" * (record.value[1] is not None)
                     for record in records)


# How far they may part.

class Figures(Measured):
    """Numbers of the same place, one after the other. A printed figure may also be rounded to another last digit, but
    by chance: that is rarer, the less rounding moves the figure."""

    def __init__(self, drift):
        super().__init__("figure", TIMES * drift)
        self.least = BY_ROUNDING * drift
        self.expected, self.flipped = 0.0, []  # last digits that chance changes; the rows that have such

    def varies(self, one, nudged):
        """Whether it moves by more than rounding when the original runs again."""
        return one.value != nudged.value and distance([one.value], [nudged.value]) > (
            one.unit + self.least * norm([one.value]) + ZERO)

    def part(self, one, nudged, other, row):
        """Whether the converted script's is another number."""
        if isinstance(one.value, int) and one.value == nudged.value:
            return other.value != one.value
        unit, apart = min(one.unit, other.unit), distance([one.value], [other.value])
        self.parted = max(self.parted, distance([one.value], [nudged.value]) - unit)
        allowed = max(TIMES * self.parted, self.floor * norm([one.value])) + ZERO
        if unit:
            self.expected += min(1, allowed / unit)
        if allowed < apart <= allowed + unit:
            self.flipped.append(row)
            return False
        return not apart <= allowed

    def flipped_by_fault(self, rows):
        """Rows whose last digits differ, if they are more than chance explains."""
        return self.flipped if len(self.flipped) > 3 * self.expected + 0.01 * rows else []


class Comparison:
    """Of the items of one place, in the original's two runs and in the converted script's; and what is said of it."""

    def __init__(self, what, names, drift, place="", noun="line"):
        self.what, self.names, self.drift, self.place, self.noun = what, names, drift, place, noun
        self.judges = collections.defaultdict(lambda: Figures(drift))  # of each place of an item's numbers
        self.same, self.total, self.files = 0, 0, []  # files: the names of those that are the same
        self.parted = []  # pairs: how the original shows an item, and how the converted script does
        self.missing, self.varying, self.remarks, self.faults = [], [], [], []

    @property
    def count(self):
        names = f": {few(self.files)}" * bool(self.files)
        return f"{self.same} of {self.total} {self.noun}{'s' * (self.total != 1)} the same{names}" if self.total else ""

    def add(self, other):
        """What is said of one of several places."""
        for said in ("missing", "varying", "remarks", "faults"):
            getattr(self, said).extend(getattr(other, said))

    def fault(self, text, heading, measured=False):
        self.faults.append(Fault(f"{self.place}{text}", heading, measured=measured))

    def compare(self, original, nudged, converted):
        for name, items in original.items():
            theirs, skipped = counterpart(name, original, converted)
            again, others = nudged.get(name, []), converted.get(theirs, [])
            self.total += len(items)
            if len(again) != len(items):
                self.varying += [self.place + one.shown for one in items]
            elif not others:
                self.missing += [one.shown for one in items]
            elif len(others) != len(items):
                self.fault(f"{self.what} {len(others)} times instead of {len(items)}: {items[0].shown}",
                           "Printed by all ranks" if len(others) > len(items) else "Printed figures")
            else:
                self.compare_rows(name, items, again, others, skipped)
        return self

    def compare_rows(self, name, items, again, others, skipped):
        """Of items of the same name: those that part, and those with something that varies."""
        parted, varying = set(), set()
        for place, first in enumerate(items[0].parts):
            rows = [(one.parts[place], nudged.parts[place], other.parts[skipped + place])
                    for one, nudged, other in zip(items, again, others)]
            moved = [self.varies((name, place), *row[:2]) for row in rows]
            if 2 * sum(moved) > len(rows):  # a time, where it is too short to be seen too
                moved = [True] * len(rows)
            varying.update(k for k, varies in enumerate(moved) if varies)
            parted.update(k for k, varies in enumerate(moved)
                          if not varies and self.differs((name, place), k, *rows[k]))
            for index in range(len(first.numbers)):
                parted.update(self.judges[name, place, index].flipped_by_fault(len(rows)))
        self.parted += [(items[k].shown, others[k].shown) for k in sorted(parted)]
        self.varying += [self.place + items[k].shown for k in sorted(varying - parted)]
        self.same += len(items) - len(parted)

    def varies(self, place, part, nudged):
        return part.around != nudged.around or any(
            self.judges[(*place, index)].varies(a, b) for index, (a, b) in enumerate(zip(part.numbers, nudged.numbers)))

    def differs(self, place, row, part, nudged, other):
        if part.around != other.around:
            return True
        three = enumerate(zip(part.numbers, nudged.numbers, other.numbers))
        return max([self.judges[(*place, index)].part(*numbers, row) for index, numbers in three], default=False)

    def say_parted(self):
        if self.parted:
            shown = "".join(f"\n  {self.names[0]}: {a}\n  {self.names[1]}: {b}" for a, b in self.parted[:SHOWN])
            more = f"\n  and {len(self.parted) - SHOWN} more" * (len(self.parted) > SHOWN)
            self.fault(f"{self.what} differently:{shown}{more}\n ", "Printed figures", measured=True)


def counterpart(words, original, converted):
    """The converted script's line of these words, or one of its own that has a few more, and how many
    tokens stand before them there."""
    if words not in converted and MARK in words and re.search(r"[^\W\d_]", words):
        pattern = re.compile(rf"(?<!\w){re.escape(words)}(?!\w)")
        for other in sorted(converted.keys() - original.keys(), key=len):
            if found := pattern.search(other):
                return other, other[:found.start()].count(MARK)
    return words, 0


def compare_text(texts, found, every_figure=False, every_line=False):
    """Of all three; every_figure, every_line: the converted script must have each line with figures, or each."""
    original, nudged, converted = map(items_of_text, texts)
    found.compare(original, nudged, converted).say_parted()
    needed = [line for line in found.missing if every_line or TOKEN.search(line)]
    others = [name for name in original if MARK in name and name in converted]
    if needed and (every_figure or every_line or (not (others or found.faults) and (
            len(needed) > 1 or not any(MARK in name for name in converted)))):
        found.fault(f"not {found.what} by {found.names[1]} in these words: {few(needed)}", "Printed figures")
        found.missing = []
    found.missing = [f"{found.place}{line}" for line in found.missing]
    return found


# Files.

def compare_values(values, found):
    """Of the tensors, numbers and strings in a file, in all three runs."""
    one, nudged, other = values
    other, renamed = under_the_same_names(one, other)
    if renamed == "module.":
        found.fault("the saved names begin with `module.`: save model.module.state_dict()", "Saving")
        return found
    parted, varying = compare_tensors(one, nudged, other, found.drift)
    found.varying += [f"{found.place}{name}" for name in varying]
    reordered = [name for name in parted if in_another_order(one[name], other[name])]
    tensors = [name for name in parted if name not in reordered]
    shapes = [f"{name} has the shape {other[name].shape} instead of {one[name].shape}" for name in tensors
              if other[name].shape != one[name].shape]
    lacking = [name for name in one if name not in other and name in nudged]
    if lost := [name for name in lacking if isinstance(one[name], Tensor)]:
        found.fault(f"without {few(lost)}", "Saving")
    elif tensors:
        found.fault(few(shapes) or f"a different {few(tensors)} is saved", "Saving", measured=not shapes)
    text = Comparison("saved", found.names, found.drift, found.place)
    found.add(compare_text([plain(each, values) for each in (one, nudged, other)], text, every_line=True))
    settings = [name for name in one if is_setting(name) and is_other(one[name], nudged.get(name), other.get(name))]
    for names, what in ((lacking * (not found.faults), f"not saved by {found.names[1]}"),
                        ([name for name in other if name not in one], f"saved by {found.names[1]} alone"),
                        (settings, "another setting"),
                        (reordered, "the same rows or columns in another order"),
                        ([renamed] * bool(renamed), "saved under other names")):
        found.remarks += [f"{found.place}{what}: {few(names)}"] * bool(names)
    return found


def compare_tensors(one, nudged, other, drift):
    """Names of those that part, and of those that vary."""
    names = [name for name in one if all(isinstance(each.get(name), Tensor) for each in (one, nudged, other))
             and not is_setting(name)]
    groups = in_groups({name: one[name] for name in names}, one, drift)

    def measured(name, others):
        return zip(groups[name], one[name].sketches, others[name].sketches)
    varying = [name for name in names if nudged[name].shape != one[name].shape or any(
        distance(a, b) > max(LARGE, BY_ROUNDING * drift) * by.largest + ZERO for by, a, b in measured(name, nudged))]
    parted, kept = [], [name for name in names if name not in varying]
    for name in kept:
        for by, a, b in measured(name, nudged):
            by.learn(a, b)
    for name in kept:
        a, b, c = one[name], nudged[name], other[name]
        differs = any(distance(*two) > by.allowed + ZERO for by, *two in measured(name, other))
        if a.whole and a.sketches == b.sketches:
            differs = a.sketches != c.sketches
        if differs or a.shape != c.shape:
            parted.append(name)
    return parted, varying


def in_groups(tensors, values, drift):
    """Of each tensor what it is measured by: the largest of all whose names end alike, for one that is 0 in theory has
    no size of its own."""
    groups = {}
    for name, one in tensors.items():
        kind = "state" if of_optimizer(name, values) else "tensor"
        new = [Measured(kind, TIMES * drift) for _ in one.sketches]
        groups[name] = groups.setdefault((kind, name.rpartition(".")[2]), new)
        for by, a in zip(groups[name], one.sketches):
            by.largest = max(by.largest, norm(a))
    return groups


def plain(values, all_three):
    """Numbers and strings that all three have, as lines."""
    return "\n".join(f"{name}: {' '.join(str(one).split())}" for name, one in values.items()
                     if all(name in each for each in all_three) and not isinstance(one, Tensor)
                     and not is_setting(name))


def of_optimizer(name, values):
    """Whether it is of an optimizer's state, beside which its groups are saved."""
    found = re.match(r"(|.*?\.)state\.", name)
    return bool(found) and any(key.startswith(f"{found[1]}param_groups.") for key in values)


def is_setting(name):
    """What a script was told, not what it found; and what BatchNorm has counted."""
    return bool(SETTINGS & {*name.split(".")}) or name.endswith("num_batches_tracked")


def is_other(one, nudged, other):
    return not isinstance(one, Tensor) and one == nudged and other is not None and other != one


def under_the_same_names(one, other):
    """The converted script's values under the original's names, and what was renamed: FSDP's optimizer has the
    parameters' names, torch.optim's their numbers; and names may begin with module., at any place."""
    plain = {re.sub(r"(^|\.)module\.", r"\1", key) for key in other} - other.keys()
    if any(key in plain and key not in other for key in one):
        return other, "module."
    lacking, more = ([key for key, part in values.items() if isinstance(part, Tensor) and key not in others
                      and of_optimizer(key, values)] for values, others in ((one, other), (other, one)))
    if lacking and [one[key].shape for key in lacking] == [other[key].shape for key in more]:
        names = dict(zip(more, lacking))
        return {names.get(key, key): part for key, part in other.items()}, few(more)
    return other, ""


def in_another_order(one, other):
    """Whether two tensors that are far apart have the same rows, or the same columns: keys in a queue."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape and len(one.shape) > 1):
        return False
    return distance(one.sketches[0], other.sketches[0]) > LARGE * norm(one.sketches[0]) and any(
        a and distance(a, b) <= FLOORS["fed"] * norm(a) for a, b in zip(one.in_any_order, other.in_any_order))


def pair(found, others):
    """Files of the same name; the rest by their endings, in their order."""
    both = {name: name for name in found if name in others}
    rest = [name for name in others if name not in found]
    for name in found:
        alike = [other for other in rest if Path(other).suffix == Path(name).suffix]
        if name not in both and alike:
            both[name] = alike[0]
            rest.remove(alike[0])
    return both


def writers(run):
    """The ranks that have begun each file anew."""
    found = collections.defaultdict(set)
    for process in run.processes:
        for record in process.of("wrote"):
            found[record.name].add(process.rank)
    return found


def compare_files(original, nudged, converted, found):
    ours, again = pair(original.files, converted.files), pair(original.files, nudged.files)
    by, by_original, same, unread = writers(converted), writers(original), [], []
    for name, file in original.files.items():
        our = ours.get(name)
        if not our:
            found.fault(f"not written by {found.names[1]}: {name}", "Saving")
        elif name not in again:
            found.varying.append(name)
        elif len(by[our]) > 1 >= len(by_original[name]):
            found.fault(f"{our} is written by ranks {' and '.join(map(str, sorted(by[our])))}", "Saving")
        elif file.kind == "unread":
            unread.append(f"{our} ({file.why})")
        elif converted.files[our].kind != file.kind:
            found.fault(f"{our} cannot be read as in {found.names[0]}: it is "
                        f"{converted.files[our].why or 'of another kind'}",
                        "Saving")
        else:
            inside = compare_file(our, (file, nudged.files[again[name]], converted.files[our]), found)
            if name != our:
                inside.add(compare_text([name, again[name], our], Comparison("named", found.names, found.drift)))
            same += [our] * (not inside.faults)
            found.add(inside)
    more = [name for name in converted.files if name not in ours.values()]
    found.remarks += [f"written by {found.names[1]} alone: {few(more)}"] * bool(more)
    found.remarks += [f"not read: {few(unread)}"] * bool(unread)
    found.same, found.total, found.files = len(same), len(original.files), same
    return found


def compare_file(name, three, found):
    inside = Comparison("written", found.names, found.drift, f"{name}: ")
    if three[0].kind == "values":
        return compare_values([file.values for file in three], inside)
    separate = ", " if Path(name).suffix in TABLES else ","  # 2,100 are two figures in a table
    return compare_text([file.text.replace(",", separate) for file in three], inside, Path(name).suffix in DATA)


def compare(original, nudged, converted, drift):
    """All of it, in the order in which the verdict has it."""
    runs, names = (original, nudged, converted), (original.name, converted.name)
    bars = ["\n".join(record.value for process in run.processes for record in process.of("bar")) for run in runs]
    return [compare_text([run.stdout for run in runs], Comparison("printed", names, drift)),
            compare_text([run.errors for run in runs], Comparison("written to stderr", names, drift)),
            compare_text(bars, Comparison("shown in progress bars", names, drift, noun="bar")),
            compare_text([*map(text_of_log, runs)], Comparison("logged", names, drift, noun="figure"), True),
            compare_files(*runs, Comparison("written", names, drift, noun="file"))]
