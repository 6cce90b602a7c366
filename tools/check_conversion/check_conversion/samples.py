"""Which samples a step was made of, in both runs: the same, fewer, others, or other values; and how the ranks' losses
make up the original's."""
import itertools
import math
from enum import Enum

from check_conversion.records import FLOORS
from check_conversion.verdict import few


class Relation(Enum):
    """How the samples of all ranks together relate to those of the original's step."""
    SAME = "each of them once"
    WHOLE = "each rank takes the whole batch, instead of its part"
    ALIKE = "all ranks are fed the same samples, so each of them goes through all samples"
    MORE = "samples are repeated or added"
    LEFT_OUT = "samples are left out"
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


PARTS = {Losses.MEAN, Losses.SUM, Losses.MEAN_OF_SAMPLES}  # each rank has the loss of its own part


def matched(one, other):
    """How many of the checksums are in both."""
    one, other = sorted(one), sorted(other)
    close = FLOORS["fed"] * max(map(abs, one + other), default=0)
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
    if len(ranks) > 1 and all(len(rank) == matched(rank, ranks[0]) for rank in ranks):
        whole = found == len(original) and all(len(rank) == len(original) for rank in ranks)
        return (Relation.WHOLE, 1) if whole else (Relation.ALIKE, share)
    if found == len(original):
        return Relation.MORE, share
    of_these = all(len(rank) == matched(rank, original) for rank in ranks)  # perhaps some of them twice
    return (Relation.LEFT_OUT if of_these else Relation.OTHERS), share


class Argument:
    """Of the model: what the original fed it with in a step, and what each rank did."""

    def __init__(self, name, step, shares, steps=()):
        self.name = name
        self.fed = [[one for known, one in each.get("fed", []) if known == name] for each in (step, *shares)]
        self.calls = [sum(not one.one for one in each) for each in self.fed]
        self.whole_numbers = any(one.whole_numbers for one in self.fed[0])
        self.padded = len({frozenset(tuple(one.shape[1:]) for one in each) for each in self.fed}) > 1  # to the longest
        # By whichever dimension the samples are told apart: a list's elements, rows or columns.
        found = {axis: relate(self.along(axis)[0], self.along(axis)[1:]) for axis in ("one", "rows", "columns")}
        axis = max(found, key=lambda axis: (found[axis][0] != Relation.UNKNOWN, found[axis][1]))
        self.relation, self.checksums = found[axis][0], self.along(axis)
        if self.relation == Relation.MORE and len({*self.calls}) > 1 and all(
                matched([one], self.checksums[0]) for rank in self.checksums[1:] for one in rank):
            self.relation = Relation.UNKNOWN  # the model is called more often with the same samples
        if self.relation == Relation.OTHERS:
            self.relation = self.which_others([number for one in steps for fed, tensor in one.get("fed", [])
                                               if fed == name for number in getattr(tensor, axis)])

    def along(self, axis):
        """The checksums of the original, and of each rank."""
        return [[number for one in each for number in getattr(one, axis)] for each in self.fed]

    def which_others(self, known):
        """Of another step, new values, or what cannot be told; known: those of all of the original's steps."""
        ours = [*itertools.chain(*self.checksums[1:])]
        if not self.whole_numbers and matched(known, ours) <= 0.5 * len({*ours}):
            return Relation.VALUES
        original, *ranks = self.along("rows")
        if self.padded and 2 * matched(original, itertools.chain(*ranks)) > sum(map(len, ranks)):
            return Relation.UNKNOWN  # tokens[:, :-1] cuts the longest sample alone
        return Relation.OTHERS


def same_twice(step, nudged):
    """Arguments in which rounding, through the weights, has changed nothing yet."""
    return [name for name in step.named("fed")
            if Argument(name, step, [nudged]).relation in (Relation.SAME, Relation.UNKNOWN)]


def shapes(step):
    return " and ".join(sorted({str(one.shape) for one in step.all("fed") if one.shape})) or "nothing"


class Samples:
    """What the ranks of a step were fed together, beside what the original was; of several arguments the one that
    tells most."""

    def __init__(self, step, nudged, shares, steps, name):
        self.sizes = f"{name} was fed {shapes(step)}, the ranks {', '.join(map(shapes, shares))}"
        found = [Argument(one, step, shares, steps) for one in same_twice(step, nudged)
                 if all(one in share.named("fed") for share in shares)]
        # Beside samples that are known to be the same, what is padded says nothing, nor do whole numbers that count
        # from the batch's beginning, as a graph's edges do.
        known = [one for one in found if one.relation == Relation.SAME
                 and 2 * len({*one.checksums[0]}) > len(one.checksums[0])]
        features, count = [one for one in known if not one.whole_numbers], len(found)
        found = [one for one in found if one.relation in (Relation.SAME, Relation.WHOLE)
                 or not ((known and one.padded) or (features and one.whole_numbers))]
        self.known = "the same samples" + f" in {few(one.name for one in known)}" * (len(found) < count)
        # What all samples share, a graph perhaps, says nothing beside what they do not.
        telling = [one for one in found if one.relation not in (Relation.WHOLE, Relation.UNKNOWN)]
        self.relations = {one.name: one.relation for one in found}
        self.mispaired = mispaired([one for one in telling if one.relation == Relation.SAME])
        nothing = Argument("", step, shares)
        chosen = [*(one for one in telling if one.relation != Relation.SAME), *telling, *found, nothing][0]
        told = telling or {*self.relations.values()} == {Relation.WHOLE}
        self.relation = chosen.relation if told else Relation.UNKNOWN
        self.original, *self.ranks = map(len, chosen.checksums)
        self.argument, self.calls, self.whole_numbers = chosen.name, chosen.calls, chosen.whole_numbers


def mispaired(arguments):
    """Two whose samples are all there, but go together otherwise: then sums of their checksums are others."""
    for one, other in itertools.combinations(arguments, 2):
        scales = [max(map(abs, each.checksums[0])) or 1 for each in (one, other)]
        original, *ranks = ([a / scales[0] + b / scales[1] for a, b in zip(*both)]
                            for both in zip(one.checksums, other.checksums))
        if len(one.checksums[0]) == len(other.checksums[0]) > matched(original, itertools.chain(*ranks)):
            return other.name, one.name
    return ()


def losses(step, shares, samples, allowed):
    whole, *parts = (sum(one.all("loss")) for one in (step, *shares))
    if not all(one.all("loss") for one in (step, *shares)) or not math.isfinite(whole):
        return Losses.UNKNOWN
    made = {Losses.EACH: parts, Losses.MEAN: [sum(parts) / len(parts)], Losses.SUM: [sum(parts)]}
    if count := sum(samples.ranks):
        made[Losses.MEAN_OF_SAMPLES] = [sum(map(math.prod, zip(samples.ranks, parts))) / count]
    return next((way for way, values in made.items()
                 if all(abs(value - whole) <= allowed + 1e-12 for value in values)), Losses.OTHER)
