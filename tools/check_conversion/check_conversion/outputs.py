"""What both printed, showed, logged and left in files: all of it in the same way. An item has a place and a name (its words
in text, its name in a file or a log) and parts with numbers; items of the same place and name are compared in their order.

What differs between the two runs of the original by more than rounding is a time, an address or the like: it is not
compared. All else has to be the same, as far as rounding moves it.
"""
import collections
import re
from pathlib import Path
from typing import NamedTuple

from check_conversion.files import Tensor
from check_conversion.records import KINDS
from check_conversion.sketch import LARGE, TIMES, Measured, distance, norm
from check_conversion.verdict import Fault, Heading, few

NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?|\b(?:nan|inf(?:inity)?|none)\b)"
# What a line may have in a figure's place: also 3/50, 12ms, 0:01:22, 2026-01-31, 0x7f12ab, Mon, Jan, PM.
DATES = r"(?-i:\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec|AM|PM)\b)"
TOKEN = rf"{DATES}|[-+]?(?:\d(?:[\w.]|[:/+-](?=\d)|,(?=\d{{3}}(?!\d)))*|\b(?:nan|inf(?:inity)?|none)\b)"
NUMBER, TOKEN = (re.compile(pattern, re.IGNORECASE) for pattern in (NUMBER, TOKEN))
MARK = "\0"  # of a token among the words
ZERO = 1e-14  # what is 0 but for rounding may be so large
BY_ROUNDING = 100  # times as far as the weights; further apart in the original is no rounding
SHOWN = 3  # faults of a kind that are shown in full
TABLES = ".csv", ".tsv"
DATA = (*TABLES, ".json", ".jsonl", ".yaml", ".yml")  # of which each line with a figure counts
SETTINGS = {"args", "config", "hparams", "opt", "options", "settings", "param_groups"}


class Number(NamedTuple):
    values: list  # one, or the sketch of a tensor
    unit: float = 0.0  # what one in its last printed digit is worth
    exact: bool = False  # a count, which is never rounded
    kind: str = "figure"  # a row of KINDS
    group: str = ""  # of tensors of which the largest is the measure


class Part(NamedTuple):
    around: str  # its words, or a tensor's shape
    numbers: list


class Item(NamedTuple):
    shown: str
    parts: list


# Items of text.

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
    figures = [(value(one), last_digit(one)) for one in NUMBER.findall(token)]
    return Part(NUMBER.sub(MARK, token), [Number([one], unit, isinstance(one, int)) for one, unit in figures])


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
    return "\n".join(f"{record.name} {record.value[0]!r}" + f" for step {record.value[1]}" * (record.value[1] is not None)
                     for record in records)


# Items of a file.

def items_of_tensors(values):
    found = collections.defaultdict(list)
    for name, one in values.items():
        if isinstance(one, Tensor):
            kind = "state" if of_optimizer(name, values) else "tensor"
            group = f"{kind} {name.rpartition('.')[2]}"
            found[name] = [Item(name, [Part(str(one.shape), [
                Number(sketch, 0.0, one.whole, kind, f"{group} {place}") for place, sketch in enumerate(one.sketches)])])]
    return found


def plain(values, others):
    """Numbers and strings that the others have too, as lines."""
    return "\n".join(f"{name}: {' '.join(str(one).split())}" for name, one in values.items()
                     if name in others and not isinstance(one, Tensor) and not is_setting(name))


def of_optimizer(name, values):
    """Whether it is of an optimizer's state, beside which its groups are saved."""
    found = re.match(r"(|.*?\.)state\.", name)
    return bool(found) and any(key.startswith(f"{found[1]}param_groups.") for key in values)


def is_setting(name):
    """What a script was told, not what it found; and what BatchNorm has counted."""
    return bool(SETTINGS & {*name.split(".")}) or name.endswith("num_batches_tracked")


# How far they may part.

class Figures(Measured):
    """Numbers of the same place, one after the other. A printed figure may also be rounded to another last digit, but by
    chance: that is rarer, the less rounding moves the figure."""

    def __init__(self, kind, drift):
        super().__init__(kind)
        self.floor = max(self.floor, TIMES * drift)
        self.least = max(LARGE if kind != "figure" else 0, BY_ROUNDING * drift)
        self.expected, self.flipped = 0.0, []  # last digits that chance changes; the rows that have such

    def size(self, one):
        return self.largest if one.group else norm(one.values)

    def varies(self, one, nudged):
        """Whether it moves by more than rounding when the original runs again."""
        return one.values != nudged.values and (
            distance(one.values, nudged.values) > one.unit + self.least * self.size(one) + ZERO)

    def part(self, one, nudged, other, row):
        """Whether the converted script's is another number."""
        if one.exact and one.values == nudged.values:
            return other.values != one.values
        unit = min(one.unit, other.unit)
        self.parted = max(self.parted, distance(one.values, nudged.values) - unit)
        allowed = max(TIMES * self.parted, self.floor * self.size(one)) + ZERO
        apart = distance(one.values, other.values)
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
        self.judges = {}
        self.same, self.total = 0, 0
        self.parted = []  # pairs: how the original shows an item, and how the converted script does
        self.missing, self.varying, self.remarks, self.faults = [], [], [], []

    @property
    def count(self):
        return f"{self.same} of {self.total} {self.noun}{'s' * (self.total != 1)}" if self.total else ""

    def add(self, other):
        """What is said of one of several places."""
        for said in ("missing", "varying", "remarks", "faults"):
            getattr(self, said).extend(getattr(other, said))

    def fault(self, text, heading, measured=False):
        self.faults.append(Fault(f"{self.place}{text}", heading, measured=measured))

    def compare(self, original, nudged, converted):
        self.learn_groups(original, nudged)
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
                           Heading.BY_ALL if len(others) > len(items) else Heading.FIGURES)
            else:
                self.compare_rows(name, items, again, others, skipped)
        return self

    def learn_groups(self, original, nudged):
        """The largest of each group, and how far rounding parts any of it."""
        pairs = [(self.judge(key, place, a), a, b) for key, items in original.items()
                 for one, again in zip(items, nudged.get(key, [])) for part, its in zip(one.parts, again.parts)
                 for place, (a, b) in enumerate(zip(part.numbers, its.numbers)) if a.group]
        for judge, a, _ in pairs:
            judge.largest = max(judge.largest, norm(a.values))
        for judge, a, b in pairs:
            if not judge.varies(a, b):
                judge.learn(a.values, b.values)

    def judge(self, place, index, one):
        key = one.group or (place, index)
        if key not in self.judges:
            self.judges[key] = Figures(one.kind, self.drift)
        return self.judges[key]

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
            parted.update(k for k, varies in enumerate(moved) if not varies and self.differs((name, place), k, *rows[k]))
            for index, one in enumerate(first.numbers):
                parted.update(self.judge((name, place), index, one).flipped_by_fault(len(rows)))
        self.parted += [(items[k].shown, others[k].shown) for k in sorted(parted)]
        self.varying += [self.place + items[k].shown for k in sorted(varying - parted)]
        self.same += len(items) - len(parted)

    def varies(self, place, part, nudged):
        return part.around != nudged.around or any(
            self.judge(place, index, a).varies(a, b) for index, (a, b) in enumerate(zip(part.numbers, nudged.numbers)))

    def differs(self, place, row, part, nudged, other):
        if part.around != other.around:
            return True
        three = enumerate(zip(part.numbers, nudged.numbers, other.numbers))
        return max([self.judge(place, index, one).part(one, *them, row) for index, (one, *them) in three], default=False)

    def say_parted(self):
        if self.parted:
            shown = "".join(f"\n  {self.names[0]}: {a}\n  {self.names[1]}: {b}" for a, b in self.parted[:SHOWN])
            more = f"\n  and {len(self.parted) - SHOWN} more" * (len(self.parted) > SHOWN)
            self.fault(f"{self.what} differently:{shown}{more}\n ", Heading.FIGURES, measured=True)


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
        found.fault(f"not {found.what} by {found.names[1]} in these words: {few(needed)}", Heading.FIGURES)
        found.missing = []
    found.missing = [f"{found.place}{line}" for line in found.missing]
    return found


# Files.

def compare_values(values, found):
    """Of the tensors, numbers and strings in a file, in all three runs."""
    one, nudged, other = values
    other, renamed = under_the_same_names(one, other)
    if renamed == "module.":
        found.fault("the saved names begin with `module.`: save model.module.state_dict()", Heading.SAVING)
        return found
    both = {name for name in one if name in nudged and name in other}
    found.compare(*map(items_of_tensors, (one, nudged, other)))
    reordered = [name for name, _ in found.parted if in_another_order(one[name], other[name])]
    tensors = [name for name, _ in found.parted if name not in reordered]
    shapes = [f"{name} has the shape {other[name].shape} instead of {one[name].shape}" for name in tensors
              if other[name].shape != one[name].shape]
    lacking = [name for name in one if name not in other and name in nudged]
    if lost := [name for name in lacking if isinstance(one[name], Tensor)]:
        found.fault(f"without {few(lost)}", Heading.SAVING)
    elif shapes:
        found.fault(few(shapes), Heading.SAVING)
    elif tensors:
        found.fault(f"a different {few(tensors)} is saved", Heading.SAVING, measured=True)
    text = Comparison("saved", found.names, found.drift, found.place)
    found.missing = []
    found.add(compare_text([plain(each, both) for each in values], text, every_line=True))
    for names, what in ((lacking * (not found.faults), f"not saved by {found.names[1]}"),
                        ([name for name in other if name not in one], f"saved by {found.names[1]} alone"),
                        ([name for name in one if is_setting(name) and is_other(one[name], nudged.get(name), other.get(name))],
                         "another setting"),
                        (reordered, "the same rows or columns in another order"),
                        ([renamed] * bool(renamed), "saved under other names")):
        found.remarks += [f"{found.place}{what}: {few(names)}"] * bool(names)
    return found


def is_other(one, nudged, other):
    return not isinstance(one, Tensor) and one == nudged and other is not None and other != one


def under_the_same_names(one, other):
    """The converted script's values under the original's names, and what was renamed: FSDP's optimizer has the parameters'
    names, torch.optim's their numbers; and names may begin with module., at any place."""
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
        a and distance(a, b) <= KINDS["fed"].floor * norm(a) for a, b in zip(one.in_any_order, other.in_any_order))


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
            found.fault(f"not written by {found.names[1]}: {name}", Heading.SAVING)
        elif name not in again:
            found.varying.append(name)
        elif len(by[our]) > 1 >= len(by_original[name]):
            found.fault(f"{our} is written by ranks {' and '.join(map(str, sorted(by[our])))}", Heading.SAVING)
        elif file.kind == "unread":
            unread.append(f"{our} ({file.why})")
        elif converted.files[our].kind != file.kind:
            found.fault(f"{our} cannot be read as in {found.names[0]}: it is {converted.files[our].why or 'of another kind'}",
                        Heading.SAVING)
        else:
            inside = compare_file(our, (file, nudged.files[again[name]], converted.files[our]), found)
            if name != our:
                inside.add(compare_text([name, again[name], our], Comparison("named", found.names, found.drift)))
            same += [our] * (not inside.faults)
            found.add(inside)
    more = [name for name in converted.files if name not in ours.values()]
    found.remarks += [f"written by {found.names[1]} alone: {few(more)}"] * bool(more)
    found.remarks += [f"not read: {few(unread)}"] * bool(unread)
    found.same, found.total = len(same), len(original.files)
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
            compare_text([*map(text_of_log, runs)], Comparison("logged", names, drift, noun="figure"), every_figure=True),
            compare_files(*runs, Comparison("written", names, drift, noun="file"))]
