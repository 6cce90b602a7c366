"""Tensors in a few numbers, which differ as far as the tensors do."""
import functools
from array import array

import torch
from torch.distributed.tensor import DTensor

from check_conversion.records import BUCKETS, Fed

ROWS = 1024  # a larger tensor is folded
MOST_SAMPLES = 10_000


@functools.cache
def fixed_numbers(device, seed=1, count=2**16):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(count, generator=generator, device="cpu", dtype=torch.float64).to(device)


def folded(flat):
    """A large tensor as one of few rows: the sum of its folds, each times a number of its own."""
    folds = flat.view(-1, ROWS * BUCKETS)
    factors = fixed_numbers(flat.device, 2, len(folds)).split(64)
    return sum(some @ part.double() for some, part in zip(factors, folds.split(64)))  # little memory


def whole(tensor):
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
        if tensor is None or not tensor.numel():
            found.append(torch.zeros(BUCKETS))
            continue
        flat = whole(tensor).to_dense().flatten()
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
    try:
        numbers = whole(tensor)
        if in_a_list:
            fed.one = checksums(numbers.reshape(1, -1))
        if tensor.dim():
            fed.rows = checksums(numbers.reshape(len(numbers), -1))
        if tensor.dim() > 1:
            across = numbers.transpose(0, 1)
            fed.columns = checksums(across.reshape(len(across), -1))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        pass  # a tensor without numbers of its own, while torch traces
    return fed
