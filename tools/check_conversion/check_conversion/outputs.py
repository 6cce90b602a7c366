"""What two runs printed, showed, logged and left in files. Text is compared line by line: lines of the same words, in
their order, number by number; and so are figures of a log, and numbers and strings in a file.

There are always three: the first, its measure, and the other. What the measure has otherwise, by more than rounding, is
a time, an address or the like: it is not compared. All else has to be the same, as far as rounding moves it.
"""
import collections
import re
from pathlib import Path
from typing import NamedTuple

from check_conversion.files import Tensor
from check_conversion.records import FLOORS, STREAMS
from check_conversion.sketch import LARGE, TIMES, distance, norm
from check_conversion.verdict import SHOWN, Fault, few

NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|\b(?:nan|inf(?:inity)?)\b)")
# What a line may have in a figure's place: also 3/50, 12ms, 0:01:22, 2026-01-31, 1,000, 0x7f12ab, Mon, Jan, PM.
DATES = r"(?-i:\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec|AM|PM)\b)"
TOKEN = re.compile(rf"{DATES}|[-+]?(?:\d(?:[\w.]|[:/+-](?=\d)|,(?=\d{{3}}(?!\d)))*|\b(?:nan|inf(?:inity)?|none)\b)",
                   re.IGNORECASE)
MARK = "\0"  # of a token among the words
ZERO = 1e-14  # what is 0 but for rounding may be so large
BY_ROUNDING = 100  # times as far as the weights; further apart in the original is no rounding
DATA = (".csv", ".tsv", ".json", ".jsonl", ".yaml", ".yml")  # of which each line with a figure counts
SETTINGS = {"args", "config", "hparams", "opt", "options", "settings", "param_groups"}


class Item(NamedTuple):
    """A line, or a value in a file."""
    shown: str
    parts: list  # its tokens, or the value


def items_of_text(text):
    """Lines, by their words without figures."""
    found = collections.defaultdict(list)
    for line in text.splitlines():
        words = " ".join(TOKEN.sub(MARK, line).split())
        words = re.sub(r"(?<=[\[(]) | (?=[\])])", "", words)  # [ 0.5 -0.5] is [0.5 -0.5]
        if re.search(rf"\w|{MARK}", words):  # brackets alone say nothing
            found[words].append(Item(line.strip(), TOKEN.findall(line)))
    return found


# How far they may part.

def split(part):
    """Its words, and its numbers: the value of each, and what one in its last digit is worth, 0 for a count."""
    part, numbers = part.lower().replace("none", "nan"), []
    for figure in NUMBER.findall(part):
        mantissa, e, exponent = figure.partition("e")
        digits = len(mantissa.partition(".")[2])
        unit = 1.01 * float(f"1e{int(exponent or 0) - digits}") if e or digits else 0.0
        numbers.append((float(figure), unit))
    return NUMBER.sub(MARK, part), numbers


def compare_column(rows, drift):
    """Of parts in the same place, each in all three runs: the numbers of the rows that part, and of those that vary."""
    rows = [[split(part) for part in row] for row in rows]
    varying = {k for k, (one, nudged, _) in enumerate(rows) if varies(one, nudged, drift)}
    if 2 * len(varying) > len(rows):  # a time, where it is too short to be seen too
        return set(), {*range(len(rows))}
    parted, nudges = set(), collections.defaultdict(float)  # how far the nudged run has parted each number so far
    for k, ((words, one), (_, nudged), (other_words, other)) in enumerate(rows):
        if k in varying:
            continue
        for place, ((a, unit), (b, _), (c, other_unit)) in enumerate(zip(one, nudged, other)):
            nudges[place] = max(nudges[place], distance([a], [b]))
            exact = not unit and a == b  # a count
            if distance([a], [c]) > (0 if exact else allowed(a, min(unit, other_unit), nudges[place], drift)):
                parted.add(k)
        if other_words != words:
            parted.add(k)
    return parted, varying


def varies(one, nudged, drift):
    """Whether it moves by more than rounding when the original runs again."""
    return one[0] != nudged[0] or any(distance([a], [b]) > unit + BY_ROUNDING * drift * norm([a]) + ZERO
                                      for (a, unit), (b, _) in zip(one[1], nudged[1]))


def allowed(figure, unit, nudged, drift):
    """How far another may be from a figure, where the nudged run has parted such figures so far. It may also be rounded
    to the next last digit, if rounding is not far below that."""
    by_rounding = max(TIMES * (nudged - unit), TIMES * drift * norm([figure]))
    return by_rounding + ZERO + unit * (BY_ROUNDING * max(nudged, by_rounding) > unit)


class Comparison:
    """Of the items of one place, in all three; and what is said of it."""

    def __init__(self, what, names, drift, place="", noun="line"):
        self.what, self.names, self.drift, self.place, self.noun = what, names, drift, place, noun
        self.same, self.total, self.files = 0, 0, []  # files: the names of those that are the same
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
        self.faults.append(Fault(heading, f"{self.place}{text}", measured=measured))

    def compare(self, first, measure, other):
        parted = []
        for name, items in first.items():
            theirs, skipped = counterpart(name, first, other)
            again, others = measure.get(name, []), other.get(theirs, [])
            self.total += len(items)
            if len(again) != len(items):
                self.varying += [self.place + one.shown for one in items]
            elif not others:
                self.missing += [one.shown for one in items]
            elif len(others) != len(items):
                self.fault(f"{self.what} {len(others)} times instead of {len(items)}: {items[0].shown}",
                           "Printed by all ranks" if len(others) > len(items) else "Printed figures")
            else:
                parted += self.compare_rows(items, again, others, skipped)
        if parted:
            shown = "".join(f"\n  {self.names[0]}: {a}\n  {self.names[1]}: {b}" for a, b in parted[:SHOWN])
            more = f"\n  and {len(parted) - SHOWN} more" * (len(parted) > SHOWN)
            self.fault(f"{self.what} differently:{shown}{more}\n ", "Printed figures", measured=True)

    def compare_rows(self, items, again, others, skipped):
        """Of items of the same name: how the first shows those that part, and how the other does."""
        parted, varying = set(), set()
        for place in range(len(items[0].parts)):
            rows = [(one.parts[place], nudged.parts[place], our.parts[skipped + place])
                    for one, nudged, our in zip(items, again, others)]
            found = compare_column(rows, self.drift)
            parted, varying = parted | found[0], varying | found[1]
        self.varying += [self.place + items[k].shown for k in sorted(varying - parted)]
        self.same += len(items) - len(parted)
        return [(items[k].shown, others[k].shown) for k in sorted(parted)]


def counterpart(words, original, converted):
    """The converted script's line of these words, or one of its own that has a few more, and how many
    tokens stand before them there."""
    if words not in converted and MARK in words and re.search(r"[^\W\d_]", words):
        pattern = re.compile(rf"(?<!\w){re.escape(words)}(?!\w)")
        for other in sorted(converted.keys() - original.keys(), key=len):
            if found := pattern.search(other):
                return other, other[:found.start()].count(MARK)
    return words, 0


def compare_text(texts, found, needed=""):
    """Of all three; needed: "lines" or "figures", if the other run must have each line, or each with a figure."""
    first, measure, other = map(items_of_text, texts)
    found.compare(first, measure, other)
    lacking = [line for line in found.missing if needed == "lines" or TOKEN.search(line)]
    nothing_compared = not found.faults and not any(MARK in name and name in other for name in first)
    worded_otherwise = nothing_compared and (len(lacking) > 1 or not any(MARK in name for name in other))
    if lacking and (needed or worded_otherwise):
        found.fault(f"not {found.what} by {found.names[1]} in these words: {few(lacking)}", "Printed figures")
        found.missing = []
    found.missing = [f"{found.place}{line}" for line in found.missing]
    return found


# Files.

def compare_values(three, found):
    """Of the tensors, numbers and strings in a file, by their names."""
    one, nudged, other = three
    plainly = {re.sub(r"(^|\.)module\.", r"\1", name) for name in other}
    if any(name in plainly and name not in other for name in one):
        found.fault("the saved names begin with `module.`: save model.module.state_dict()", "Saving")
        return
    other, renamed = under_the_same_names(one, other)
    three = one, nudged, other
    lacking = [name for name in one if name in nudged and name not in other]
    both = [name for name in one if name in nudged and name in other]
    tensors, plain = ([name for name in both if all(isinstance(each[name], Tensor) == kind for each in three)]
                      for kind in (True, False))
    # What a script was told, not what it found; and what BatchNorm has counted.
    settings = {name for name in both if SETTINGS & {*name.split(".")} or name.endswith("num_batches_tracked")}
    measured, counted = ([name for name in names if name not in settings] for names in (tensors, plain))
    found.compare(*(values_as_items(each, counted) for each in three))
    parted, varying = compare_tensors(*three, measured, found.drift)
    found.varying += [f"{found.place}{name}" for name in [*varying, *sorted(one.keys() - nudged.keys())]]
    reordered = [name for name in parted if in_another_order(one[name], other[name])]
    if lost := [name for name in lacking if isinstance(one[name], Tensor)]:
        found.fault(f"without {few(lost)}", "Saving")
    if differing := [name for name in parted if name not in reordered]:
        shapes = [f"{name} has the shape {other[name].shape} instead of {one[name].shape}" for name in differing
                  if other[name].shape != one[name].shape]
        found.fault(few(shapes) or f"a different {few(differing)} is saved", "Saving", measured=not shapes)
    for what, names in {
            f"not saved by {found.names[1]}": [name for name in lacking if name not in lost],
            f"saved by {found.names[1]} alone": [name for name in other if name not in one],
            "of another type": [name for name in both if name not in tensors + plain],
            "another setting": [name for name in plain
                                if name not in counted and one[name] == nudged[name] != other[name]],
            "the same rows or columns in another order": reordered,
            "saved under other names": renamed}.items():
        found.remarks += [f"{found.place}{what}: {few(names)}"] * bool(names)


def values_as_items(values, names):
    """Numbers and strings, those of a list together."""
    found = collections.defaultdict(list)
    for name in names:
        value = " ".join(str(values[name]).split())
        found[re.sub(r"\d+", MARK, name)].append(Item(f"{name}: {value}", [value]))
    return found


def compare_tensors(one, nudged, other, names, drift):
    """Those that part, and those that vary. Each is measured by the largest of all whose names end alike, for one that
    is 0 in theory has no size of its own."""
    groups, parted, varying = collections.defaultdict(list), set(), set()
    states = {*of_optimizers(names, one)}
    for name in names:
        groups[name in states, name.rpartition(".")[2]].append(name)
    for (of_optimizer, _), group in groups.items():
        floor = max(FLOORS["state" if of_optimizer else "tensor"], TIMES * drift)
        for k in range(len(one[group[0]].sketches)):
            largest = max(norm(one[name].sketches[k]) for name in group)
            nudges = {name: distance(one[name].sketches[k], nudged[name].sketches[k]) for name in group}
            moved = {name for name in group if nudges[name] > max(LARGE, BY_ROUNDING * drift) * largest + ZERO}
            rounding = max((nudges[name] for name in group if name not in moved), default=0)
            parted |= {name for name in group if distance(one[name].sketches[k], other[name].sketches[k]) > (
                max(TIMES * rounding, floor * largest) + ZERO)}
            varying |= moved
    varying |= {name for name in names if nudged[name].shape != one[name].shape}
    parted |= {name for name in names if other[name].shape != one[name].shape}
    return [name for name in names if name in parted - varying], [name for name in names if name in varying]


def of_optimizers(names, values):
    """Those of them that are of an optimizer's state, beside which its groups are saved."""
    states = {name.partition("param_groups.")[0] + "state." for name in values if "param_groups." in name}
    return [name for name in names if name.startswith(tuple(states))]


def under_the_same_names(one, other):
    """The converted script's values under the original's names, and those renamed: FSDP's optimizer has the parameters'
    names, torch.optim's their numbers."""
    lacking, more = ([name for name in of_optimizers(values, values)
                      if name not in others and isinstance(values[name], Tensor)]
                     for values, others in ((one, other), (other, one)))
    if [one[name].shape for name in lacking] != [other[name].shape for name in more]:
        return other, []
    names = dict(zip(more, lacking))
    return {names.get(name, name): value for name, value in other.items()}, more


def in_another_order(one, other):
    """Whether two tensors that are far apart have the same rows, or the same columns: keys in a queue."""
    if one.shape != other.shape or len(one.shape) < 2:
        return False
    return distance(one.sketches[0], other.sketches[0]) > LARGE * norm(one.sketches[0]) and any(
        a and distance(a, b) <= FLOORS["fed"] * norm(a) for a, b in zip(one.in_any_order, other.in_any_order))


def pair(found, others, by_name=False):
    """Files of the same name; the rest by their endings, in their order."""
    both = {name: name for name in found if name in others}
    rest = [] if by_name else [name for name in others if name not in found]
    for name in found:
        alike = [other for other in rest if Path(other).suffix == Path(name).suffix]
        if name not in both and alike:
            both[name] = alike[0]
            rest.remove(alike[0])
    return both


def compare_files(first, measure, other, found, needed=""):
    ours, again = (pair(first.files, run.files, by_name=bool(needed)) for run in (other, measure))
    wrote, unread = {(record.name, one.rank) for one in other.processes for record in one.of("wrote")}, []
    for name, file in first.files.items():
        our = ours.get(name)
        writers = sorted(rank for what, rank in wrote if what == our)
        if name not in again:
            found.varying.append(name)
        elif not our:
            found.fault(f"not written by {found.names[1]}: {name}", "Saving")
        elif len(writers) > 1 and not needed:
            found.fault(f"{our} is written by ranks {' and '.join(map(str, writers))}", "Saving")
        elif file.kind == "unread":
            unread.append(f"{our} ({file.why})")
        elif other.files[our].kind != file.kind:
            why = other.files[our].why or "of another kind"
            found.fault(f"{our} cannot be read as in {found.names[0]}: it is {why}", "Saving")
        else:
            inside = compare_file(our, (file, measure.files[again[name]], other.files[our]), found, needed)
            if name != our:
                inside.add(compare_text([name, again[name], our], Comparison("named", found.names, found.drift)))
            found.files += [our] * (not inside.faults)
            found.add(inside)
    more = [name for name in other.files if name not in ours.values()]
    found.remarks += [f"written by {found.names[1]} alone: {few(more)}"] * bool(more)
    found.remarks += [f"not read: {few(unread)}"] * bool(unread)
    found.same = len(found.files)
    found.total = sum(name in again and file.kind != "unread" for name, file in first.files.items())
    return found


def compare_file(name, three, found, needed):
    inside = Comparison("written", found.names, found.drift, f"{name}: ")
    if three[0].kind == "values":
        compare_values([file.values for file in three], inside)
    else:
        compare_text([file.text for file in three], inside, needed or "figures" * name.endswith(DATA))
    return inside


def compare_outputs(three, names, drift, needed=""):
    """All of it, in the order in which the verdict has it; needed: "lines", if nothing may be missing."""
    found = []
    for stream, (what, noun) in STREAMS.items():
        texts = [run.text(stream) for run in three]
        needed_here = needed or "figures" * (stream == "logged")
        found.append(compare_text(texts, Comparison(what, names, drift, noun=noun), needed_here))
    return [*found, compare_files(*three, Comparison("written", names, drift, noun="file"), needed)]
