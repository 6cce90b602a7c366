"""What both printed, showed, logged and left in files: all of it in the same way. An item has a place and a name (its words
in text, its name in a file or a log) and parts with numbers; items of the same place and name are compared in their order.

What differs between the two runs of the original by more than rounding is a time, an address or the like: it is not
compared. All else has to be the same, as far as rounding moves it.
"""
import collections
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from check_conversion.files import Tensor
from check_conversion.measure import KINDS, LARGE, TIMES, Measured
from check_conversion.sketch import distance, few, norm
from check_conversion.verdict import BY_ALL, FIGURES, SAVING, Fault

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


def number(figure, unit=0.0):
    return Number([figure], unit, isinstance(figure, int))


def parts_of(text):
    return [Part(NUMBER.sub(MARK, token), [number(value(one), last_digit(one)) for one in NUMBER.findall(token)])
            for token in TOKEN.findall(text)]


def items_of_text(text):
    """Lines, by their words without figures."""
    found = collections.defaultdict(list)
    for line in text.splitlines():
        dense = re.sub(r"(?<=[\[(]) +| +(?=[\])])", "", line)  # [ 0.5 -0.5] is [0.5 -0.5]
        words = " ".join(TOKEN.sub(MARK, dense).split())
        if re.search(rf"\w|{MARK}", words):  # brackets alone say nothing
            found[words].append(Item(line.strip(), parts_of(dense)))
    return found


def items_of_log(run):
    found = collections.defaultdict(list)
    for process in run.processes:
        for record in process.of("figure"):
            figure, step = record.value
            for_step = Part(f"for step {step}", []) if step is not None else Part("", [])
            found[record.name].append(Item(f"{record.name} {figure:.6g} {for_step.around}".strip(),
                                           [Part("", [number(figure)]), for_step]))
    return found


# Items of a file.

def items_of_values(values):
    return collections.defaultdict(list, {name: [item_of_value(name, one, values)] for name, one in values.items()})


def item_of_value(name, one, values):
    if isinstance(one, Tensor):
        kind = "state" if of_optimizer(name, values) else "tensor"
        group = f"{kind} {name.rpartition('.')[2]}"
        return Item(name, [Part(str(one.shape), [Number(sketch, 0.0, one.whole, kind, f"{group} {place}")
                                                 for place, sketch in enumerate(one.sketches)])])
    if isinstance(one, str):
        return Item(f"{name} {one}", [Part(" ".join(TOKEN.sub(MARK, one).split()), []), *parts_of(one)])
    if isinstance(one, bool):
        return Item(f"{name} {one}", [Part(str(one), [])])
    return Item(f"{name} {one:.6g}", [Part("", [number(one)])])


def of_optimizer(name, values):
    """Whether it is of an optimizer's state, beside which its groups are saved."""
    found = re.match(r"(|.*?\.)state\.", name)
    return bool(found) and any(key.startswith(f"{found[1]}param_groups.") for key in values)


def is_setting(name):
    """What a script was told, not what it found; and what BatchNorm has counted."""
    return bool(SETTINGS & {*name.split(".")}) or name.endswith("num_batches_tracked")


# How far the numbers of a place may part.

class Figures(Measured):
    """Numbers of the same place, one after the other. A printed figure may also be rounded to another last digit, but by
    chance: that is rarer, the less rounding moves the figure."""

    def __init__(self, kind, drift):
        super().__init__(max(KINDS[kind].floor, TIMES * drift))
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


@dataclass
class Compared:
    """Items of one place."""
    same: int = 0
    total: int = 0
    parted: list = field(default_factory=list)  # pairs: how the original shows it, and how the converted script does
    counted: list = field(default_factory=list)  # other numbers of items: how many, instead of how many, and the first
    missing: list = field(default_factory=list)
    varying: list = field(default_factory=list)  # with something that differs in each run of the original
    unlike: list = field(default_factory=list)  # that differ as a whole in each run


class Comparison:
    """Of the items of one place, in the original's two runs and in the converted script's."""

    def __init__(self, drift):
        self.drift, self.judges, self.found = drift, {}, Compared()

    def judge(self, place, index, one):
        key = one.group or (place, index)
        if key not in self.judges:
            self.judges[key] = Figures(one.kind, self.drift)
        return self.judges[key]

    def learn_groups(self, original, nudged):
        """The largest of each group, and how far rounding parts any of it."""
        pairs = [(self.judge(key, place, a), a, b) for key, items in original.items()
                 for one, again in zip(items, nudged.get(key, [])) for part, its in zip(one.parts, again.parts)
                 for place, (a, b) in enumerate(zip(part.numbers, its.numbers)) if a.group]
        for judge, a, _ in pairs:
            judge.largest = max(judge.largest, norm(a.values))
        for judge, a, b in pairs:
            if not judge.varies(a, b):
                judge.parted = max(judge.parted, distance(a.values, b.values))

    def compare(self, original, nudged, converted):
        self.learn_groups(original, nudged)
        found = self.found
        for name, items in original.items():
            theirs, skipped = counterpart(name, original, converted)
            again, others = nudged.get(name, []), converted.get(theirs, [])
            found.total += len(items)
            if len(again) != len(items):
                found.unlike += [one.shown for one in items]
            elif not others:
                found.missing += [one.shown for one in items]
            elif len(others) != len(items):
                found.counted.append((len(others), len(items), items[0].shown))
            else:
                self.compare_rows(name, items, again, others, skipped)
        return found

    def compare_rows(self, name, items, again, others, skipped):
        """Of items of the same name: those that part, and those with something that varies."""
        parted, varying = set(), set()
        for place in range(len(items[0].parts)):
            rows = [(one.parts[place], nudged.parts[place], other.parts[skipped + place])
                    if min(len(nudged.parts), len(other.parts) - skipped) > place else None
                    for one, nudged, other in zip(items, again, others)]
            moved = [row is None or self.varies((name, place), *row[:2]) for row in rows]
            if 2 * sum(moved) > len(rows):  # a time, where it is too short to be seen too
                moved = [True] * len(rows)
            for k, (row, varies) in enumerate(zip(rows, moved)):
                if varies:
                    varying.add(k)
                elif self.differs((name, place), k, *row):
                    parted.add(k)
            for index in range(len(items[0].parts[place].numbers)):
                parted.update(self.judge((name, place), index, items[0].parts[place].numbers[index]).flipped_by_fault(len(rows)))
        self.found.parted += [(items[k].shown, others[k].shown) for k in sorted(parted)]
        self.found.varying += [items[k].shown for k in sorted(varying - parted)]
        self.found.same += len(items) - len(parted)

    def varies(self, place, part, nudged):
        return part.around != nudged.around or any(
            self.judge(place, index, a).varies(a, b) for index, (a, b) in enumerate(zip(part.numbers, nudged.numbers)))

    def differs(self, place, row, part, nudged, other):
        if part.around != other.around:
            return True
        three = [*zip(part.numbers, nudged.numbers, other.numbers)]
        return any([self.judge(place, index, one[0]).part(*one, row) for index, one in enumerate(three)])


def counterpart(words, original, converted):
    """The converted script's line of these words, or one of its own that has a few more, and how many
    tokens stand before them there."""
    if words not in converted and MARK in words and re.search(r"[^\W\d_]", words):
        pattern = re.compile(rf"(?<!\w){re.escape(words)}(?!\w)")
        for other in sorted(converted.keys() - original.keys(), key=len):
            if found := pattern.search(other):
                return other, other[:found.start()].count(MARK)
    return words, 0


# What is said of it.

@dataclass
class Said:
    """Of one part of the verdict."""
    what: str  # "printed", "files"
    same: str = ""  # "2 of 2 lines"
    faults: list = field(default_factory=list)
    varying: list = field(default_factory=list)
    missing: list = field(default_factory=list)
    remarks: list = field(default_factory=list)


def many(count, what):
    return f"{count} {what}{'s' * (count != 1)}"


def compare_text(texts, names, drift, verb, noun="line", file="", all_lines=False):
    """Texts of all three; names: of both scripts; all_lines: the converted script must have each line with figures."""
    original, nudged, converted = map(items_of_text, texts)
    found = Comparison(drift).compare(original, nudged, converted)
    said = Said(verb, varying=[f"{file}{one}" for one in (*found.unlike, *found.varying)])
    say_items(said, found, names, verb, file)
    figures = [one for one in found.missing if TOKEN.search(one)]
    none_the_same = not any(TOKEN.search(one.shown) for name in original for one in original[name]
                            if name in converted) and not said.faults
    if figures and (all_lines or (none_the_same and (len(figures) > 1 or not any(MARK in words for words in converted)))):
        said.faults.append(Fault(f"{file}{many(len(figures), noun)} with figures not {verb} by {names[1]} in these words: "
                                 f"{few(figures, 1)}", FIGURES))
    else:
        said.missing = [f"{file}{one}" for one in found.missing]
    said.same = f"{found.same} of {many(found.total, noun)}" if found.total else ""
    return said


def say_items(said, found, names, verb, file=""):
    for now, before, first in found.counted:
        heading = BY_ALL if now > before else FIGURES
        said.faults.append(Fault(f"{file}{verb} {now} times instead of {before}: {first}", heading))
    if found.parted:
        shown = "".join(f"\n  {names[0]}: {a}\n  {names[1]}: {b}" for a, b in found.parted[:SHOWN])
        more = f"\n  and {many(len(found.parted) - SHOWN, 'more')}".rstrip("s") * (len(found.parted) > SHOWN)
        said.faults.append(Fault(f"{file}{verb} differently:{shown}{more}\n ", FIGURES, measured=True))


def compare_log(original, nudged, converted, drift):
    found = Comparison(drift).compare(*map(items_of_log, (original, nudged, converted)))
    said = Said("logged", varying=found.unlike + found.varying)
    say_items(said, found, (original.name, converted.name), "logged")
    if found.missing:
        said.faults.append(Fault(f"not logged by {converted.name}: {few(found.missing)}", FIGURES))
    said.same = f"{found.same} of {many(found.total, 'figure')}" if found.total else ""
    return said


# Files.

def compare_values(name, values, names, drift):
    """Of what is in one file of tensors, numbers and strings, in all three runs."""
    one, nudged, other = values
    other, renamed = in_the_same_words(one, other)
    said = Said(name)
    if renamed == "module.":
        said.faults.append(Fault(f"{name}: the saved names begin with `module.`: save model.module.state_dict()", SAVING))
        return said
    compared = {key: part for key, part in one.items() if not is_setting(key)}
    found = Comparison(drift).compare(*map(items_of_values, (compared, nudged, other)))
    said.varying = [f"{name}: {key}" for key in dict.fromkeys(found.unlike + found.varying)]
    reordered = [a for a, b in found.parted if in_another_order(one.get(a), other.get(b))]
    different = [(a, b) for a, b in found.parted if a not in reordered]
    lacking = [key for key in one if key not in other and key in nudged]
    if tensors := [key for key in lacking if isinstance(one[key], Tensor)]:
        said.faults.append(Fault(f"{name}: without {few(tensors)}", SAVING))
    elif unlike := [f"{key} has the shape {other[key].shape} instead of {one[key].shape}" for key, _ in different
                    if isinstance(one.get(key), Tensor) and isinstance(other.get(key), Tensor)
                    and other[key].shape != one[key].shape]:
        said.faults.append(Fault(f"{name}: {few(unlike)}", SAVING))
    elif tensors := [a for a, _ in different if isinstance(one.get(a), Tensor)]:
        said.faults.append(Fault(f"{name}: a different {few(tensors)} is saved", SAVING, measured=True))
    elif values := [f"{a} in {names[0]}, {b} in {names[1]}" for a, b in different]:
        said.faults.append(Fault(f"{name}: a different value is saved: {few(values)}", FIGURES, measured=True))
    said.remarks += [f"{name}: {few(those)} {what}" for those, what in (
        (lacking * (not said.faults), f"is not saved by {names[1]}"),
        ([key for key in other if key not in one], f"is saved by {names[1]} alone"),
        ([key for key in one if key in other and is_setting(key) and not isinstance(one[key], Tensor)
          and one[key] != other[key] and nudged.get(key) == one[key]], "is another setting"),
        (reordered, "has the same rows or columns in another order"),
        ([renamed] * bool(renamed), "is saved under other names")) if those]
    return said


def in_the_same_words(one, other):
    """The converted script's values under the original's names, and what was renamed: FSDP's optimizer has the parameters'
    names, torch.optim's their numbers; and names may begin with module., at any place."""
    plain = {re.sub(r"(^|\.)module\.", r"\1", key): key for key in other}
    if any(key in plain and key not in other for key in one):
        return other, "module."
    lacking, more = ([key for key, part in values.items() if isinstance(part, Tensor) and key not in others
                      and of_optimizer(key, values)] for values, others in ((one, other), (other, one)))
    if lacking and [one[key].shape for key in lacking] == [other[key].shape for key in more]:
        names = dict(zip(more, lacking))
        return {names.get(key, key): part for key, part in other.items()}, f"{more[0].rpartition('.')[0]}"
    return other, ""


def in_another_order(one, other):
    """Whether two tensors have the same rows, or the same columns: keys in a queue."""
    return isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape and any(
        a and distance(a, b) <= KINDS["fed"].floor * norm(a) for a, b in zip(one.in_any_order, other.in_any_order))


def pair(found, others):
    """Files of the same name; the rest by kind and ending, in their order."""
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


def compare_files(original, nudged, converted, drift):
    names, found = (original.name, converted.name), Said("files")
    ours, again = pair(original.files, converted.files), pair(original.files, nudged.files)
    by, by_original, same, unread = writers(converted), writers(original), [], []
    for name, file in original.files.items():
        if name not in ours:
            found.faults.append(Fault(f"not written by {names[1]}: {name}", SAVING))
            continue
        if name not in again:
            found.varying.append(name)
            continue
        three = file, nudged.files[again[name]], converted.files[ours[name]]
        kinds = [one.kind for one in three]
        ranks = sorted(by[ours[name]])
        if len(ranks) > 1 and len(by_original[name]) <= 1:
            found.faults.append(Fault(f"{ours[name]} is written by ranks {' and '.join(map(str, ranks))}", SAVING))
            continue
        if kinds[0] == "unread":
            unread.append(f"{ours[name]} ({three[0].why})")
            continue
        if kinds[2] != kinds[0]:
            found.faults.append(Fault(f"{ours[name]} cannot be read as that of {names[0]}: {three[2].why or three[2].kind}",
                                      SAVING))
            continue
        said = (compare_values(ours[name], [one.values for one in three], names, drift) if kinds[0] == "values"
                else compare_lines_in(ours[name], [one.text for one in three], names, drift))
        said.faults += compare_text([name, again[name], ours[name]], names, drift, "named").faults if name != ours[name] else []
        same += [ours[name]] * (not said.faults)
        for kind in ("faults", "varying", "missing", "remarks"):
            getattr(found, kind).extend(getattr(said, kind))
    more = [name for name in converted.files if name not in ours.values()]
    found.remarks += [f"written by {names[1]} alone: {few(more)}"] * bool(more) + [f"not read: {few(unread)}"] * bool(unread)
    if original.files:
        found.same = f"{len(same)} of {many(len(original.files), 'file')}" + f": {few(same)}" * bool(same)
    return found


def compare_lines_in(name, texts, names, drift):
    if Path(name).suffix in TABLES:
        texts = [text.replace(",", ", ") for text in texts]  # 2,100 are two figures
    return compare_text(texts, names, drift, "written", file=f"{name}: ", all_lines=Path(name).suffix in DATA)


def compare(original, nudged, converted, drift):
    """All of it, in the order in which the verdict has it."""
    runs, names = (original, nudged, converted), (original.name, converted.name)
    bars = ["\n".join(record.value for process in run.processes for record in process.of("bar")) for run in runs]
    return [compare_text([run.stdout for run in runs], names, drift, "printed"),
            compare_text([run.errors for run in runs], names, drift, "written to stderr"),
            compare_text(bars, names, drift, "shown in a progress bar", "progress bar"),
            compare_log(*runs, drift), compare_files(*runs, drift)]
