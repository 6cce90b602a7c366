"""What all ranks must have alike."""
import math

from conversion_check.evidence import Fault, apart_in, distance, norm
from conversion_check.record import Began, Score
from conversion_check.rounding import LARGE, TIMES


def other_options(one, other):
    """What two optimizers have been told otherwise: lr 0.1 instead of 0.05."""
    def same(a, b):
        return a == b or (isinstance(a, float) and isinstance(b, float)
                          and math.isclose(a, b, rel_tol=1e-6))
    return ", ".join(sorted({f"{name} {new.get(name)} instead of {old[name]}"
                             for old, new in zip(one.options, other.options)
                             for name in old if not same(old[name], new.get(name))}))


def between_ranks(ranks, shares):
    """DDP keeps weights and gradients the same in all ranks, to the last bit."""
    for other, step in zip(ranks[1:], shares[1:]):
        who, one = f"ranks 0 and {other.rank}", shares[0]
        began = other.of(Began)[step.optimizer]
        if options := other_options(one, step):
            return Fault(f"{who} have different optimizer options: {options}", "Decisions")
        if fault := apart_in_shuffles(who, one, step):
            return fault
        for what, heading in (("before", "Load first, then DDP"),
                              ("gradients", "Training goes through DDP")):
            a, b = getattr(one, what), getattr(step, what)
            if distance(a, b) > 1e-6 * norm(a):
                where = apart_in(began.names, a, b)
                without = [name for name in began.without if name in where]
                heading = "Training goes through DDP" if without else heading
                text = f"{who} have different {'weights' if what == 'before' else what}: {where}"
                alone = f" ({', '.join(without[:3])} in no DDP)" * bool(without)
                return Fault(text + alone, heading)
    return None


def apart_in_shuffles(who, one, step):
    for a, b in zip(one.passes, step.passes):
        if a.shuffles and a.asked != b.asked:
            return Fault(f"{who} shuffle differently, by DistributedSampler's seed and epoch "
                         f"{a.asked} and {b.asked}", "Random numbers")
        if a.shuffles and a.sampler == b.sampler and a.length == b.length and a.drawn != b.drawn:
            return Fault(f"{who} shuffle differently, each by random numbers of its own",
                         "Random numbers")
    return None


def compare_scores(first, again, many):
    """Each decision of ReduceLROnPlateau rests on one figure, the same in all ranks."""
    scores = [rank.of(Score) for rank in many.ranks]
    for a, b, *ours in zip(first.ranks[0].of(Score), again.ranks[0].of(Score), *scores):
        values = [one.value for one in ours]
        if max(values) - min(values) > 1e-6 * max(map(abs, values)):
            given = ", ".join(f"{value:.6g}" for value in values)
            return Fault(f"ReduceLROnPlateau is given a different figure on each rank: {given}",
                         "Decisions", ours[0].steps)
        if abs(values[0] - a.value) > TIMES * abs(b.value - a.value) + LARGE * abs(a.value):
            return Fault(f"ReduceLROnPlateau is given {values[0]:.6g} instead of {a.value:.6g}",
                         "Decisions", ours[0].steps)
    return None
