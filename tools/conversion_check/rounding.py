"""Rounding is measured: a run of the original whose weights were moved by one rounding at each step
drifts as far as a right conversion does."""
from dataclasses import dataclass, field

from conversion_check import samples
from conversion_check.evidence import distance, norm
from conversion_check.record import Began

TIMES = 5  # as far as rounding parts the weights, they may part; right conversions: 0 to 1.8
LARGE = 0.01  # of what training moves the weights: rounding that hides smaller faults


@dataclass
class Rounding:
    """How far the weights of each optimizer may part so far."""
    eps: float  # of the weights' type
    drift: dict = field(default_factory=dict)
    start: dict = field(default_factory=dict)
    blurred: int = 0
    seen: bool = False  # a step in which a fault of any size would show

    def measure(self, k, one, nudged):
        which = one.optimizer
        self.start.setdefault(which, one.before)
        for a, b in ((one.before, nudged.before), (one.after, nudged.after)):
            least = self.eps * norm(a)  # one rounding
            self.drift[which] = max(self.drift.get(which, 0), distance(a, b), least)
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
        return "it begins with different weights"
    for k, (a, b) in enumerate(zip(one, other), 1):
        if distance(a.before, b.before) > 100 * eps * norm(a.before):
            return None  # by rounding, which what is fed and drawn may follow
        if drawn := [name for name in a.draws if a.states[name] != b.states.get(name)]:
            return f"step {k}: by {' and '.join(drawn)}"
        if k > 2:
            continue  # a state that is fed again follows the weights
        if len(samples.same_twice(a, b)) < len({fed.name for fed in a.fed}):
            return f"step {k}: other samples, or other values of them"
    return None
