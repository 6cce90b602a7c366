"""Which samples a step was made of, in both runs: the same, fewer, others, or other values; and how the ranks' losses make
up the original's."""
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


def fed(step, name):
    return [one for known, one in step.get("fed", []) if known == name]


def checksums(step, name, axis):
    return [number for one in fed(step, name) for number in getattr(one, axis)]


def of_argument(name, step, shares):
    """By whichever dimension the samples are told apart: a list's elements, rows or columns."""
    found = {axis: relate(checksums(step, name, axis), [checksums(share, name, axis) for share in shares])
             for axis in ("one", "rows", "columns")}
    best = max(found, key=lambda axis: (found[axis][0] != Relation.UNKNOWN, found[axis][1]))
    return best, found[best][0]


def shapes(step):
    return " and ".join(sorted({str(one.shape) for one in step.all("fed") if one.shape})) or "nothing"


def calls(step, name):
    return sum(not one.one for one in fed(step, name))


def same_twice(step, nudged):
    """Arguments in which rounding, through the weights, has changed nothing yet."""
    return [name for name in step.named("fed")
            if of_argument(name, step, [nudged])[1] in (Relation.SAME, Relation.UNKNOWN)]


def names_apart(step, nudged):
    """Arguments that are other ones when the original runs again."""
    return [name for name in step.named("fed") if name not in same_twice(step, nudged)]


def compare(step, nudged, shares, steps, name):
    """The samples of a step; steps: all of the original's, name: its script's."""
    names = [argument for argument in same_twice(step, nudged)
             if all(argument in share.named("fed") for share in shares)]
    sizes = f"{name} was fed {shapes(step)}, the ranks {', '.join(map(shapes, shares))}"
    if not names:
        return Samples(sizes=sizes)
    relations = {argument: relation_of(argument, step, shares, steps) for argument in names}
    # What all samples share, a graph perhaps, says nothing beside what they do not.
    telling = [argument for argument in names if relations[argument] not in (Relation.WHOLE, Relation.UNKNOWN)]
    wrong = [argument for argument in telling if relations[argument] != Relation.SAME]
    chosen = (wrong or telling or names)[0]
    axis, _ = of_argument(chosen, step, shares)
    relation = relations[chosen]
    if not telling and {*relations.values()} != {Relation.WHOLE}:
        relation = Relation.UNKNOWN
    counts = [len(checksums(share, chosen, axis)) for share in shares]
    return Samples(relation, chosen, sizes, len(checksums(step, chosen, axis)), tuple(counts),
                   whole_numbers(step, chosen), relations, mispaired(telling, step, shares))


def mispaired(names, step, shares):
    """Two arguments whose samples are all there, but go together otherwise, or nothing."""
    axes = {name: of_argument(name, step, shares)[0] for name in names}
    found = {name: checksums(step, name, axis) for name, axis in axes.items()}
    distinct = [name for name in names if len({*found[name]}) == len(found[name])]
    for key, name in itertools.product(distinct[:1], names):
        if len(found[key]) != len(found[name]):
            continue
        known = sorted(zip(found[key], found[name]))
        close = SAME * max(map(abs, found[name]))
        for share in shares:
            for number, other in zip(*(checksums(share, one, axes[one]) for one in (key, name))):
                place = bisect.bisect(known, (number,))
                nearest = min(known[max(place - 1, 0):place + 1], key=lambda pair: abs(pair[0] - number))
                if abs(nearest[1] - other) > close:
                    return name, key
    return ()


def relation_of(argument, step, shares, steps):
    axis, relation = of_argument(argument, step, shares)
    if relation == Relation.OTHERS and not (whole_numbers(step, argument)
                                            or found_elsewhere(argument, axis, shares, steps)):
        return Relation.VALUES
    if relation == Relation.REPEATED and len({calls(one, argument) for one in (step, *shares)}) > 1:
        return Relation.UNKNOWN  # the model is called more often with the same samples
    if relation == Relation.OTHERS and padded_otherwise(argument, step, shares):
        return Relation.UNKNOWN
    return relation


def padded_otherwise(argument, step, shares):
    """Parts are as wide as their longest sample: tokens[:, :-1] cuts that one alone."""
    widths = {frozenset(tuple(one.shape[1:]) for one in fed(each, argument)) for each in (step, *shares)}
    ours = [number for share in shares for number in checksums(share, argument, "rows")]
    return len(widths) > 1 and matched(checksums(step, argument, "rows"), ours) > 0.5 * len(ours)


def whole_numbers(step, name):
    return any(one.whole_numbers for one in fed(step, name))


def found_elsewhere(name, axis, shares, steps):
    """Whether the ranks' samples are those of other steps of the original."""
    known = [number for step in steps for number in checksums(step, name, axis)]
    ours = [number for share in shares for number in checksums(share, name, axis)]
    return matched(known, ours) > 0.5 * len({*ours})


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
