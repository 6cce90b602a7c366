"""Do both train the same? Step by step, until one of them goes otherwise."""
import itertools
from dataclasses import dataclass

from conversion_check import samples
from conversion_check.causes import why
from conversion_check.evidence import Evidence, Fault, distance, factor_between, norm
from conversion_check.ranks import between_ranks, compare_scores, other_options
from conversion_check.record import Began
from conversion_check.rounding import LARGE, Rounding
from conversion_check.workspace import CannotSay


@dataclass
class Training:
    """How far both agree, and the first fault."""
    fault: Fault = None
    steps: int = 0
    weights: float = 0.0  # how far they parted, and how far rounding parts them, of their norm
    rounding: float = 0.0
    blurred: int = 0  # the step from which on rounding alone is large


def first_pass(steps):
    """How many steps come of it."""
    lengths = [one.passes[-1].steps for one in steps if one.passes]
    ends = [a for a, b in itertools.pairwise(lengths) if b <= a]
    return ends[0] if ends else max(lengths, default=0)


def drawn_within_passes(steps):
    within = [one for one in steps if all(noted.steps > 1 for noted in one.passes)]
    return {name for one in within or steps for name in one.draws}


def alike_before(k, ranks):
    """Generators whose states were the same in all ranks in the step before."""
    before = [rank.steps[k - 2].states for rank in ranks] if k > 1 else []
    return {name for name in (before[0] if before else ())
            if len({states.get(name) for states in before}) == 1}


def compare_steps(first, again, many):
    """Step by step, until one of them goes otherwise."""
    agree, rounding = Training(), Rounding(first.ranks[0].of(Began)[0].eps)
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
        raise CannotSay(f"in {first.name} rounding alone moves the weights as far as training "
                        "does: take a larger learning rate in both, or --float64")
    return agree


def compare_step(k, one, nudged, shares, first, many, rounding):
    share, which = shares[0], one.optimizer
    if fault := between_ranks(many.ranks, shares):
        return fault
    parted = rounding.parts(one.before, share.before, which)
    if len(share.before) != len(one.before) or (k == 1 and parted):
        return Fault("it begins with different weights", "Load first, then DDP")
    if parted and not rounding.blurred:
        return Fault("the weights differ before the step, although they agreed after the previous "
                     "step", "Load first, then DDP")
    if options := other_options(one, share):
        return Fault(f"different optimizer options: {options}", "Decisions")
    parted = rounding.parts(one.after, share.after, which)
    apart = distance(one.gradients, share.gradients)
    scaled = apart > LARGE * norm(one.gradients) and factor_between(one.gradients, share.gradients)
    steps, names = first.ranks[0].steps, first.ranks[0].of(Began)[which].names
    found = samples.compare(one, nudged, shares, steps, first.name)
    if parted or scaled or (k == 1 and found.relation == "whole" and len(shares) > 1):
        losses = samples.losses(one, shares, found)
        lengths = first_pass(steps), first_pass(many.ranks[0].steps)
        return why(Evidence(first.name, one, shares, found, losses, lengths, names,
                            drawn_within_passes(steps),
                            alike_before(k, many.ranks), rounding.blurred > 0))
    return None


def compare_training(first, again, many):
    agree, decision = compare_steps(first, again, many), compare_scores(first, again, many)
    if decision and (not agree.fault or decision.step < agree.fault.step):
        agree.fault = decision
    return agree
