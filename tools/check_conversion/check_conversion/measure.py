"""How far two sketches or numbers are apart, and may be."""
import math

from check_conversion.records import BUCKETS, KINDS
from check_conversion.verdict import few

TIMES = 5  # as far as rounding has parted something, it may part; correct conversions: 0 to 1.8
LARGE = 0.01  # of what training moves the weights: rounding that hides smaller faults
NO_LONGER = 0.1  # of a difference: a factor that leaves less of it explains it


class Measured:
    """Values of one kind. Rounding is measured by the original's second run, whose weights are moved by one rounding at each
    step: a correct conversion parts from the original about as far as that run has parted any of these values so far."""

    def __init__(self, kind):
        self.floor, self.parted, self.largest = KINDS[kind].floor, 0.0, 0.0

    def learn(self, one, nudged):
        self.parted = max(self.parted, distance(one, nudged))
        self.largest = max(self.largest, norm(one))

    @property
    def allowed(self):
        return max(TIMES * self.parted, self.floor * self.largest)

    def differs(self, one, other):
        return not distance(one, other) <= self.allowed


def norm(numbers):
    """Of those that are finite: nothing that is compared with it passes because it is NaN."""
    try:
        size = math.hypot(*numbers)
    except OverflowError:  # a whole number that no float can hold
        return math.inf
    return size if math.isfinite(size) else math.hypot(*filter(math.isfinite, numbers))


def distance(one, other):
    """Never NaN: where both have NaN or the same infinity they are equal, where one has, far apart."""
    if len(one) != len(other):
        return math.inf
    try:
        apart = math.dist(one, other)
    except OverflowError:
        return math.inf
    if not math.isnan(apart):
        return apart
    apart = math.hypot(*(a - b for a, b in zip(one, other) if a != b and (a == a or b == b)))
    return math.inf if math.isnan(apart) else apart


def factor_between(one, other):
    """What all of one times is the other, or None where no factor explains their difference."""
    apart = distance(one, other)
    if not math.isfinite(apart) or not norm(one):
        return None
    factor = sum(map(math.prod, zip(one, other))) / norm(one) ** 2
    rest = math.dist([factor * number for number in one], other)
    return factor if rest < NO_LONGER * apart else None


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
    return few(found)
