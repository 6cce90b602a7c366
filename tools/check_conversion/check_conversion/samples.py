"""Which samples a step was made of, in both runs: the same, fewer, others, or other values; and how the ranks' losses
make up the original's."""
import bisect
import itertools
import math
from dataclasses import dataclass, field
from enum import Enum

from check_conversion.records import KINDS

SAME = KINDS["fed"].floor


class Relation(Enum):
    """How the samples of all ranks together relate to those of the original's step."""
    SAME = "each of them once"
    WHOLE = "all of them on each rank"
    ALIKE = "every rank has the same, and not all"
    REPEATED = "all of them, and some twice"
    MORE = "all of them, and others"
    LEFT_OUT = "fewer of them"
    OVERLAP = "no others, but some twice and some not at all"
    OTHERS = "samples that the original has in another step"
    VALUES = "values that the original never has"
    UNKNOWN = "cannot be told"


class Losses(Enum):
    """How the ranks' losses make up the original's."""
    EACH = "each is the whole loss"
    MEAN = "their mean is"
    SUM = "their sum is"
    MEAN_OF_SAMPLES = "their mean is, weighted by the ranks' samples"
    OTHER = "none of these"
    UNKNOWN = "one of them is missing or not finite"


@dataclass
class Samples:
    """What the ranks of a step were fed together, beside what the original was."""
    relation: Relation = Relation.UNKNOWN
    argument: str = ""  # of the model, that tells most
    sizes: str = ""
    original: int = 0  # how many
    ranks: tuple = ()
    whole_numbers: bool = False  # tokens, classes: no noise
    relations: dict = field(default_factory=dict)  # of each argument
    mispaired: tuple = ()  # two arguments that go together otherwise


def matched(one, other):
    """How many of the checksums are in both."""
    one, other = sorted(one), sorted(other)
    close = SAME * max(map(abs, one + other), default=0)
    i = j = found = 0
    while i < len(one) and j < len(other):
        if abs(one[i] - other[j]) <= close:
            i, j, found = i + 1, j + 1, found + 1
        elif one[i] < other[j]:
            i += 1
        else:
            j += 1
    return found


def relate(original, ranks):
    """The relation of the checksums of all ranks to the original's, and how many agree."""
    together = [*itertools.chain(*ranks)]
    if not original or not together:
        return Relation.UNKNOWN, 0
    found = matched(original, together)
    share = found / max(len(original), len(together))
    if found == len(original) == len(together):
        return Relation.SAME, 1
    if len(ranks) > 1 and all(len(rank) == len(original) == matched(rank, original) for rank in ranks):
        return Relation.WHOLE, 1
    if len(ranks) > 1 and all(len(rank) == matched(rank, ranks[0]) for rank in ranks):
        return Relation.ALIKE, share
    if found == len(original):
        known = all(matched([one], original) for one in together)
        return (Relation.REPEATED if known else Relation.MORE), share
    if found == len(together):
        return Relation.LEFT_OUT, share
    if all(len(rank) == matched(rank, original) for rank in ranks):
        return Relation.OVERLAP, share
    return Relation.OTHERS, share


class Argument:
    """Of the model, in the original's step and in those of all ranks."""

    def __init__(self, name, step, shares):
        self.name = name
        self.fed = [[one for known, one in each.get("fed", []) if known == name] for each in (step, *shares)]
        self.whole_numbers = any(one.whole_numbers for one in self.fed[0])
        # By whichever dimension the samples are told apart: a list's elements, rows or columns.
        found = {axis: relate(self.checksums(axis)[0], self.checksums(axis)[1:]) for axis in ("one", "rows", "columns")}
        self.axis = max(found, key=lambda axis: (found[axis][0] != Relation.UNKNOWN, found[axis][1]))
        self.relation = found[self.axis][0]

    def checksums(self, axis=None):
        """Of the original, and of each rank."""
        return [[number for one in each for number in getattr(one, axis or self.axis)] for each in self.fed]

    def calls(self):
        """How often the original and each rank have called the model with it."""
        return [sum(not one.one for one in each) for each in self.fed]

    def look_closer(self, steps):
        """Which samples others are, and whether they can be told at all."""
        original, *ranks = self.checksums()
        ours = [*itertools.chain(*ranks)]
        if self.relation == Relation.REPEATED and len({*self.calls()}) > 1:
            self.relation = Relation.UNKNOWN  # the model is called more often with the same samples
        if self.relation == Relation.OTHERS and not self.whole_numbers:
            known = [number for step in steps for name, one in step.get("fed", []) if name == self.name
                     for number in getattr(one, self.axis)]
            if matched(known, ours) <= 0.5 * len({*ours}):
                self.relation = Relation.VALUES
        if self.relation == Relation.OTHERS:  # parts are as wide as their longest: tokens[:, :-1] cuts that one alone
            widths = {frozenset(tuple(one.shape[1:]) for one in each) for each in self.fed}
            original, *ranks = self.checksums("rows")
            ours = [*itertools.chain(*ranks)]
            if len(widths) > 1 and matched(original, ours) > 0.5 * len(ours):
                self.relation = Relation.UNKNOWN
        return self


def same_twice(step, nudged):
    """Arguments in which rounding, through the weights, has changed nothing yet."""
    return [name for name in step.named("fed")
            if Argument(name, step, [nudged]).relation in (Relation.SAME, Relation.UNKNOWN)]


def shapes(step):
    return " and ".join(sorted({str(one.shape) for one in step.all("fed") if one.shape})) or "nothing"


def compare(step, nudged, shares, steps, name):
    """The samples of a step; steps: all of the original's, name: its script's."""
    found = [Argument(argument, step, shares).look_closer(steps) for argument in same_twice(step, nudged)
             if all(argument in share.named("fed") for share in shares)]
    sizes = f"{name} was fed {shapes(step)}, the ranks {', '.join(map(shapes, shares))}"
    if not found:
        return Samples(sizes=sizes)
    # What all samples share, a graph perhaps, says nothing beside what they do not.
    telling = [one for one in found if one.relation not in (Relation.WHOLE, Relation.UNKNOWN)]
    chosen = ([one for one in telling if one.relation != Relation.SAME] or telling or found)[0]
    is_whole = {one.relation for one in found} == {Relation.WHOLE}
    original, *ranks = map(len, chosen.checksums())
    relation = chosen.relation if telling or is_whole else Relation.UNKNOWN
    return Samples(relation, chosen.name, sizes, original, tuple(ranks), chosen.whole_numbers,
                   {one.name: one.relation for one in found}, mispaired(telling))


def mispaired(arguments):
    """Two whose samples are all there, but go together otherwise, or nothing."""
    found = {one.name: one.checksums() for one in arguments}
    distinct = [name for name, (original, *_) in found.items() if len({*original}) == len(original)]
    for key, other in itertools.product(distinct[:1], found):
        if len(found[key][0]) != len(found[other][0]):
            continue
        known, *pairs = ([*zip(*both)] for both in zip(found[key], found[other]))
        known.sort()
        close = SAME * max((abs(value) for _, value in known), default=0)
        for number, value in itertools.chain(*pairs):
            place = bisect.bisect(known, (number,))
            nearest = min(known[max(place - 1, 0):place + 1], key=lambda pair: abs(pair[0] - number))
            if abs(nearest[1] - value) > close:
                return other, key
    return ()


def losses(step, shares, samples):
    whole, parts = sum(step.all("loss")), [sum(share.all("loss")) for share in shares]
    if not all(one.all("loss") for one in (step, *shares)) or not math.isfinite(whole):
        return Losses.UNKNOWN

    def is_whole(value):
        return math.isclose(value, whole, rel_tol=KINDS["loss"].floor, abs_tol=1e-12)
    if all(map(is_whole, parts)):
        return Losses.EACH
    if is_whole(sum(parts) / len(parts)):
        return Losses.MEAN
    if is_whole(sum(parts)):
        return Losses.SUM
    if sum(samples.ranks) and is_whole(sum(map(math.prod, zip(samples.ranks, parts))) / sum(samples.ranks)):
        return Losses.MEAN_OF_SAMPLES
    return Losses.OTHER
