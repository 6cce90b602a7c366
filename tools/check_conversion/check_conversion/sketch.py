"""Tensors in a few numbers, which differ as far as the tensors do; how far two are apart, and may be."""
import contextlib
import functools
import math
from array import array

import torch
from torch.distributed.tensor import DTensor

from check_conversion.records import FLOORS, Fed
from check_conversion.verdict import few

BUCKETS = 32  # numbers in the sketch of a tensor
ROWS = 1024  # a larger tensor is folded
MOST_SAMPLES = 10_000
TIMES = 5  # as far as rounding has parted something, it may part; correct conversions: 0 to 1.8
LARGE = 0.01  # of what training moves the weights: rounding that hides smaller faults
NO_LONGER = 0.1  # of a difference: a factor that leaves less of it explains it


@functools.cache
def fixed_numbers(device, seed=1, count=2**16):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(count, generator=generator, device="cpu", dtype=torch.float64).to(device)


def folded(flat):
    """A large tensor as one of few rows: the sum of its folds, each times a number of its own."""
    folds = flat.view(-1, ROWS * BUCKETS)
    factors = fixed_numbers(flat.device, 2, len(folds))
    return sum(some @ part.double() for some, part in zip(factors.split(64), folds.split(64)))  # little memory


def gathered(tensor):
    """All of a tensor of which each rank has a share: all ranks must call this."""
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


@torch.no_grad()
def sketch(tensors):
    """Each tensor's numbers times random ones, summed in buckets: the distance of two sketches
    is about that of the tensors."""
    found = []
    for tensor in tensors:
        flat = torch.zeros(0) if tensor is None else gathered(tensor).to_dense().flatten()
        size = BUCKETS if flat.numel() <= ROWS * BUCKETS else ROWS * BUCKETS
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % size))
        rows = (folded(flat) if size > BUCKETS else flat.double()).view(-1, BUCKETS)
        found.append((rows * fixed_numbers(flat.device).view(-1, BUCKETS)[:len(rows)]).sum(0))
    return array("d", torch.cat([one.to("cpu", torch.float64) for one in found]).tolist())


def checksums(matrix):
    """Of each row, whatever zeros are appended to it."""
    if not matrix.numel() or len(matrix) > MOST_SAMPLES:
        return []
    numbers = fixed_numbers(matrix.device)
    width = matrix.shape[1]
    return (matrix.to(numbers.dtype) @ numbers.repeat(width // len(numbers) + 1)[:width]).tolist()


@torch.no_grad()
def describe(tensor, in_a_list=False):
    """What the same samples are known again by."""
    fed = Fed(list(tensor.shape), not (tensor.is_floating_point() or tensor.is_complex()))
    with contextlib.suppress(RuntimeError):  # a sparse tensor, or one without numbers of its own, while torch traces
        numbers = gathered(tensor)
        if in_a_list:
            fed.one = checksums(numbers.reshape(1, -1))
        if tensor.dim():
            fed.rows = checksums(numbers.reshape(len(numbers), -1))
        if tensor.dim() > 1:
            across = numbers.transpose(0, 1)
            fed.columns = checksums(across.reshape(len(across), -1))
    return fed


# Distances.

def norm(numbers):
    """Of those that are finite: nothing that is compared with it passes because it is NaN."""
    return math.hypot(*filter(math.isfinite, numbers))


def distance(one, other):
    """Never NaN: where both have NaN or the same infinity they are equal, where one has, far apart."""
    if len(one) != len(other):
        return math.inf
    apart = math.dist(one, other)
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


class Measured:
    """Values of one kind. Rounding is measured by the original's second run, whose weights are moved by one rounding at
    each step: a correct conversion parts from the original about as far as that run has parted any of them so far."""

    def __init__(self, kind):
        self.floor, self.parted, self.largest = FLOORS[kind], 0.0, 0.0

    def learn(self, one, nudged):
        self.parted = max(self.parted, distance(one, nudged))
        self.largest = max(self.largest, norm(one))

    @property
    def allowed(self):
        return max(TIMES * self.parted, self.floor * self.largest)

    def differs(self, one, other):
        return not distance(one, other) <= self.allowed
