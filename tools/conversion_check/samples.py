"""Which samples a step was made of, in both runs: the same, fewer, others, or other values."""
import itertools
import math
from dataclasses import dataclass, field

SAME = 1e-5  # two checksums, of the largest: samples that nothing but rounding parts


@dataclass
class Samples:
    """What the ranks of a step were fed together, beside what the original was."""
    relation: str = "unknown"
    sizes: str = ""
    original: int = 0  # how many
    ranks: tuple = ()
    whole_numbers: bool = False  # tokens, classes: no noise
    relations: dict = field(default_factory=dict)  # the same for each argument


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
    """In a word, how the samples of all ranks relate to the original's."""
    together = [*itertools.chain(*ranks)]
    if not original or not together:
        return "unknown", 0
    found = matched(original, together)
    share = found / max(len(original), len(together))
    if found == len(original) == len(together):
        return "same", 1
    if len(ranks) > 1 and all(len(rank) == len(original) == matched(rank, original)
                              for rank in ranks):
        return "whole", 1
    if len(ranks) > 1 and all(len(rank) == matched(rank, ranks[0]) for rank in ranks):
        return "alike", share
    if found == len(original):
        return "repeated", share
    if found == len(together):
        return "left out", share
    if all(len(rank) == matched(rank, original) for rank in ranks):
        return "overlap", share
    return "others", share


def fed(step, name, axis):
    return [number for one in step.fed if one.name == name for number in getattr(one, axis)]


def of_argument(name, one, shares):
    """By whichever of the first two dimensions the samples are told apart."""
    found = {axis: relate(fed(one, name, axis), [fed(share, name, axis) for share in shares])
             for axis in ("rows", "columns")}
    best = max(found, key=lambda axis: found[axis][1])
    return best, found[best][0]


def shapes(step):
    return " and ".join(sorted({str(one.shape) for one in step.fed if one.shape})) or "nothing"


def calls(step, name):
    return sum(one.name == name for one in step.fed)


def same_twice(one, again):
    """Arguments in which rounding, through the weights, has changed nothing yet."""
    return [name for name in dict.fromkeys(fed.name for fed in one.fed)
            if of_argument(name, one, [again])[1] in ("same", "unknown")]


def compare(one, again, shares, steps, name):
    """The samples of a step; again: when the original runs again, steps: all of its, name: its
    script's."""
    names = [argument for argument in same_twice(one, again)
             if all(argument in {fed.name for fed in share.fed} for share in shares)]
    sizes = f"{name} was fed {shapes(one)}, the ranks {', '.join(map(shapes, shares))}"
    if not names:
        return Samples(sizes=sizes)
    relations = {}
    for argument in names:
        axis, relation = of_argument(argument, one, shares)
        if relation == "others" and not (whole_numbers(one, argument)
                                         or found_elsewhere(argument, axis, shares, steps)):
            relation = "values"
        elif relation == "repeated" and len({calls(step, argument) for step in (one, *shares)}) > 1:
            relation = "unknown"  # the model is called more often with the same samples
        relations[argument] = relation
    axis, relation = of_argument(names[0], one, shares)[0], relations[names[0]]
    if relation == "whole" and {*relations.values()} != {"whole"}:
        relation = "unknown"  # what all samples share, a graph perhaps
    counts = [len(fed(share, names[0], axis)) for share in shares]
    return Samples(relation, sizes, len(fed(one, names[0], axis)), tuple(counts),
                   whole_numbers(one, names[0]), relations)


def whole_numbers(step, name):
    return any(fed.whole_numbers for fed in step.fed if fed.name == name)


def found_elsewhere(name, axis, shares, steps):
    """Whether the ranks' samples are those of other steps of the original."""
    known = [number for step in steps for number in fed(step, name, axis)]
    ours = [number for share in shares for number in fed(share, name, axis)]
    return matched(known, ours) > 0.5 * len({*ours})


def losses(one, shares, samples):
    """How the ranks' losses make up the original's."""
    whole, parts = sum(one.losses), [sum(share.losses) for share in shares]
    if not one.losses or not all(share.losses for share in shares) or not math.isfinite(whole):
        return "unknown"

    def is_whole(value):
        return math.isclose(value, whole, rel_tol=1e-5, abs_tol=1e-12)
    if all(map(is_whole, parts)):
        return "each"
    if is_whole(sum(parts) / len(parts)):
        return "mean"
    if is_whole(sum(parts)):
        return "sum"
    if sum(samples.ranks) and is_whole(
            sum(map(math.prod, zip(samples.ranks, parts))) / sum(samples.ranks)):
        return "mean of samples"
    return "other"
