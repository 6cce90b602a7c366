"""What was noted of a step in both runs, side by side."""
import math
from dataclasses import dataclass

from conversion_check import samples as fed
from conversion_check.record import BUCKETS, Pass

NO_LONGER = 0.1  # of a difference: a factor that leaves less of it explains it


@dataclass
class Fault:
    text: str
    heading: str  # of the chapter, which says what to do
    step: int = 0
    unknown: bool = False  # it keeps the check from seeing more, and is none


def norm(numbers):
    return math.hypot(*numbers)


def distance(one, other):
    return math.dist(one, other) if len(one) == len(other) else math.inf


def factor_between(one, other):
    """What all of one times is the other, or None where no factor explains their difference."""
    apart = distance(one, other)
    if not math.isfinite(apart) or not norm(one):
        return None
    factor = sum(map(math.prod, zip(one, other))) / norm(one) ** 2
    left = math.dist([factor * number for number in one], other)
    return factor if left < NO_LONGER * apart else None


def of_tensors(numbers):
    return [numbers[i:i + BUCKETS] for i in range(0, len(numbers), BUCKETS)]


def apart_in(names, one, other):
    """The parameters whose numbers differ most, with the factor between them if there is one."""
    pairs = [*zip(names, of_tensors(one), of_tensors(other))]
    most = max((distance(a, b) for _, a, b in pairs), default=0)
    found = []
    for name, a, b in pairs:
        if distance(a, b) > NO_LONGER * most:
            factor = factor_between(a, b)
            found.append(f"{name} ({factor:.3g} times)" if factor is not None else name)
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return ", ".join(found[:5]) + more


@dataclass
class Evidence:
    """Of one step: what was noted in the original, and in each rank."""
    name: str  # of the original's script
    one: object
    shares: list
    samples: fed.Samples
    losses: str
    lengths: tuple  # steps of the first pass over the samples, in both
    names: list  # of the parameters
    within_passes: set  # generators that move between steps of one pass over the samples
    alike_before: set  # generators whose states were the same in all ranks in the step before
    blurred: bool  # rounding alone is large: what was seen counts, how far they parted does not

    @property
    def count(self):
        return len(self.shares)

    @property
    def factor(self):
        return factor_between(self.one.gradients, self.shares[0].gradients)

    @property
    def passes(self):
        """The last pass over the samples of each."""
        return [step.passes[-1] if step.passes else Pass("", False)
                for step in (self.one, *self.shares)]

    @property
    def drawing(self):
        """Generators that move in both from step to step, not by a sampler for a whole pass."""
        return [name for name in self.one.draws if name in self.shares[0].draws
                and name in self.within_passes]

    def alike(self, generator):
        return len({share.states[generator] for share in self.shares}) == 1 < self.count
