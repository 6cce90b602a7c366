"""What is compared, how the ranks together make it up, and how far two runs may part in it.

Rounding is measured: the original runs twice, the second time with weights that are moved by one rounding at each step.
A correct conversion parts from the original about as far as that run does.
"""
from dataclasses import dataclass

from check_conversion.sketch import distance, norm

TIMES = 5  # as far as rounding has parted something, it may part; correct conversions: 0 to 1.8
LARGE = 0.01  # of what training moves the weights: rounding that hides smaller faults
ALIKE, SHARED_OUT, MADE_UP, ALONE = (
    "each rank has the original's", "each rank has a part of the original's",
    "the original's is the ranks' mean or sum", "one of the ranks has the original's")


@dataclass(frozen=True)
class Kind:
    """How a kind of value is compared."""
    ranks: str
    floor: float | None = None  # how far it may always part, as a share of the largest of its group; None: not at all
    group: str = ""  # of what the largest is taken


KINDS = {
    "options": Kind(ALIKE, 1e-6, "each number"),
    "switch": Kind(ALIKE),
    "shuffle": Kind(ALIKE),
    "score": Kind(ALIKE, LARGE, "all that were given so far"),
    "fed": Kind(SHARED_OUT, 1e-5, "all samples of a step"),
    "loss": Kind(MADE_UP, 1e-5, "each step's"),
    "gradients": Kind(ALIKE, LARGE, "all parameters of a step"),
    "weights": Kind(ALIKE, 1e-8, "how far training has moved an optimizer's"),  # no fault that anybody makes is smaller
    "buffer": Kind(ALIKE, 1e-6, "each buffer"),
    "figure": Kind(ALONE, 5e-7, "each figure"),  # no wrong one is nearer, and scripts may count in float32
    "tensor": Kind(ALONE, 5e-7, "all tensors of a file whose names end alike"),
    "state": Kind(ALONE, LARGE, "all of an optimizer's tensors whose names end alike"),  # a tie in a pooling layer parts
}
SAME_BITS = 1e-10, 1e-6  # of what DDP keeps alike on all ranks, in float64 and in float32


class Measured:
    """Values of one kind: how far rounding has parted any of them so far, and so how far they may part."""

    def __init__(self, floor):
        self.floor, self.parted, self.largest = floor, 0.0, 0.0

    def learn(self, one, nudged, unit=0.0):
        self.parted = max(self.parted, distance(one, nudged) - unit)
        self.largest = max(self.largest, norm(one))

    @property
    def allowed(self):
        return max(TIMES * self.parted, self.floor * self.largest)

    def differs(self, one, other):
        return not distance(one, other) <= self.allowed
