"""Do both train the same? Rounding is measured: a run of the original whose weights were moved by
one rounding at each step drifts as far as a right conversion does."""
import math
from dataclasses import dataclass, field

from conversion_check import samples
from conversion_check.causes import Evidence, Fault, apart_in, distance, factor_between, norm, why
from conversion_check.record import Began, Score
from conversion_check.workspace import CannotSay

TIMES = 5  # as far as rounding parts the weights, they may part; right conversions: 0 to 1.8
LARGE = 0.01  # of what training moves the weights: rounding that hides smaller faults


@dataclass
class Training:
    """How far both agree, and the first fault."""
    fault: Fault = None
    steps: int = 0
    weights: float = 0.0  # how far they parted, and how far rounding parts them, of their norm
    rounding: float = 0.0
    blurred: int = 0  # the step from which on rounding alone is large


@dataclass
class Rounding:
    """How far the weights of each optimizer may part so far."""
    drift: dict = field(default_factory=dict)
    start: dict = field(default_factory=dict)
    blurred: int = 0
    seen: bool = False  # a step in which a fault of any size would show

    def measure(self, k, one, nudged):
        which = one.optimizer
        self.start.setdefault(which, one.before)
        for a, b in ((one.before, nudged.before), (one.after, nudged.after)):
            self.drift[which] = max(self.drift.get(which, 0), distance(a, b))
        moved = distance(one.after, self.start[which])
        if self.drift[which] <= LARGE * moved:
            self.blurred = 0
        else:
            self.blurred = self.blurred or k
        self.seen |= TIMES * self.drift[which] < moved

    def parts(self, one, other, which):
        return not distance(one, other) <= TIMES * self.drift[which]


def unseeded(first, again):
    """What shows that the original draws other numbers each time."""
    one, other = first.ranks[0].steps, again.ranks[0].steps
    eps = first.ranks[0].of(Began)[0].eps
    if not distance(one[0].before, other[0].before) <= 100 * eps * norm(one[0].before):
        return "it begins with other weights"
    for k, (a, b) in enumerate(zip(one, other), 1):
        if distance(a.before, b.before) > 100 * eps * norm(a.before):
            return None  # by rounding, which what is fed and drawn may follow
        if drawn := [name for name in a.draws if a.states[name] != b.states.get(name)]:
            return f"step {k}: {' and '.join(drawn)}'s"
        if len(samples.same_twice(a, b)) < len({fed.name for fed in a.fed}):
            return f"step {k}: other samples, or other values of them"
    return None


def other_options(one, other):
    """What two optimizers have been told otherwise: lr 0.1 instead of 0.05."""
    def same(a, b):
        return math.isclose(a, b, rel_tol=1e-6) if isinstance(a, float) and b is not None else a == b
    return ", ".join(sorted({f"{name} {new.get(name)} instead of {old[name]}"
                             for old, new in zip(one.options, other.options)
                             for name in old if not same(old[name], new.get(name))}))


def between_ranks(ranks, shares):
    """DDP keeps weights and gradients the same in all ranks, to the last bit."""
    for other, step in zip(ranks[1:], shares[1:]):
        who, one = f"ranks 0 and {other.rank}", shares[0]
        began = other.of(Began)[step.optimizer]
        if options := other_options(one, step):
            return Fault(f"{who} have other options of the optimizer: {options}", "Decisions")
        if fault := apart_in_shuffles(who, one, step):
            return fault
        for what, heading in (("before", "Load first, then DDP"),
                              ("gradients", "Training goes through DDP")):
            a, b = getattr(one, what), getattr(step, what)
            if distance(a, b) > 1e-6 * norm(a):
                where = apart_in(began.names, a, b)
                without = [name for name in began.without if name in where]
                heading = "Training goes through DDP" if without else heading
                text = f"{who} have other {'weights' if what == 'before' else what}: {where}"
                return Fault(text + f" ({', '.join(without[:3])} in no DDP)" * bool(without), heading)
    return None


def apart_in_shuffles(who, one, step):
    for a, b in zip(one.passes, step.passes):
        if a.shuffles and a.asked != b.asked:
            return Fault(f"{who} shuffle differently, by DistributedSampler's seed and epoch {a.asked} "
                         f"and {b.asked}", "Random numbers")
        if a.shuffles and a.sampler == b.sampler and a.length == b.length and a.drawn != b.drawn:
            return Fault(f"{who} shuffle differently, each by random numbers of its own",
                         "Random numbers")
    return None


def first_pass(steps):
    """How many steps come of it."""
    lengths = [one.passes[-1].steps for one in steps if one.passes]
    ends = [a for a, b in zip(lengths, lengths[1:]) if b <= a]
    return ends[0] if ends else max(lengths, default=0)


def compare_steps(first, again, many):
    """Step by step, until one of them goes otherwise."""
    agree, rounding = Training(), Rounding()
    ranks, before = many.ranks, first.ranks[0].steps
    rows = zip(before, again.ranks[0].steps, *(rank.steps for rank in ranks))
    for k, (one, nudged, *shares) in enumerate(rows, 1):
        rounding.measure(k, one, nudged)
        agree.fault = compare_step(k, one, nudged, shares, first, many, rounding)
        if agree.fault:
            agree.fault.step = agree.fault.step or k
            return agree
        agree.steps, size = k, norm(one.after) or 1
        agree.weights = max(agree.weights, distance(one.after, shares[0].after) / size)
        agree.rounding = max(agree.rounding, rounding.drift[one.optimizer] / size)
    agree.blurred = rounding.blurred
    counts = [len(rank.steps) for rank in ranks]
    if {*counts} != {len(before)}:
        heading = "Two routes" if len({*counts}) == 1 else "Decisions"
        agree.fault = Fault(f"{first.name} takes {len(before)} steps, the ranks take "
                            f"{', '.join(map(str, counts))}", heading, step=agree.steps + 1)
    elif not rounding.seen:
        raise CannotSay(f"in {first.name} rounding alone moves the weights as far as training does: "
                        "take a larger learning rate in both, or --float64")
    return agree


def compare_step(k, one, nudged, shares, first, many, rounding):
    share, which = shares[0], one.optimizer
    if fault := between_ranks(many.ranks, shares):
        return fault
    if len(share.before) != len(one.before) or (k == 1 and rounding.parts(one.before, share.before, which)):
        return Fault("it begins with other weights", "Load first, then DDP")
    if rounding.parts(one.before, share.before, which):
        return Fault("the weights are others before the step, although they were not after the one "
                     "before", "Load first, then DDP")
    if options := other_options(one, share):
        return Fault(f"other options of the optimizer: {options}", "Decisions")
    parted = rounding.parts(one.after, share.after, which)
    apart = distance(one.gradients, share.gradients)
    scaled = apart > LARGE * norm(one.gradients) and factor_between(one.gradients, share.gradients)
    steps, names = first.ranks[0].steps, first.ranks[0].of(Began)[which].names
    found = samples.compare(one, nudged, shares, steps, first.name)
    if parted or scaled or (k == 1 and found.relation == "whole" and len(shares) > 1):
        losses = samples.losses(one, shares, found)
        lengths = first_pass(steps), first_pass(many.ranks[0].steps)
        return why(Evidence(first.name, one, shares, found, losses, lengths, names))
    return None


def compare_scores(first, again, many):
    """Each decision of ReduceLROnPlateau rests on one figure, the same in all ranks."""
    scores = [rank.of(Score) for rank in many.ranks]
    for a, b, *ours in zip(first.ranks[0].of(Score), again.ranks[0].of(Score), *scores):
        values = [one.value for one in ours]
        if max(values) - min(values) > 1e-6 * max(map(abs, values)):
            return Fault(f"ReduceLROnPlateau is given another figure in each rank: "
                         f"{', '.join(f'{value:.6g}' for value in values)}", "Decisions", ours[0].steps)
        if abs(values[0] - a.value) > TIMES * abs(b.value - a.value) + LARGE * abs(a.value):
            return Fault(f"ReduceLROnPlateau is given {values[0]:.6g} instead of {a.value:.6g}",
                         "Decisions", ours[0].steps)
    return None


def compare_training(first, again, many):
    agree, decision = compare_steps(first, again, many), compare_scores(first, again, many)
    if decision and (not agree.fault or decision.step < agree.fault.step):
        agree.fault = decision
    return agree
