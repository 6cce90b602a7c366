"""What is in a file of torch.save: of each tensor its shape and sketch, of each plain value itself."""
import re
import sys

import torch
from torch.utils._pytree import tree_leaves_with_path

from check_conversion.observed.sketch import sketch, whole
from check_conversion.protocol import Numbers, Saved

STATES = {torch.get_rng_state().shape, torch.Size([16])}  # of torch's generators, the CPU's and CUDA's


def is_generator_state(part):
    """Which is no part of training: torch's, numpy's or Python's."""
    if isinstance(part, torch.Tensor):
        return part.dtype == torch.uint8 and part.shape in STATES
    if isinstance(part, tuple):
        numpys = part[:1] and isinstance(part[0], str) and part[0] == "MT19937"
        return bool(numpys) or (len(part) == 3 and isinstance(part[1], tuple) and len(part[1]) == 625)
    return str(getattr(part, "dtype", "")) == "uint32" and part.shape == (624,)


def name_of(key):
    """One step of the way to a part of what is saved."""
    return str(next(getattr(key, kind) for kind in ("key", "idx", "name") if hasattr(key, kind)))


def leaves(value, way=()):
    """All parts with their names, those of a module in its state_dict."""
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    for path, part in tree_leaves_with_path(value, is_leaf=lambda part: isinstance(part, tuple) and is_generator_state(part)):
        here = (*way, *map(name_of, path))
        if isinstance(part, torch.nn.Module):
            yield from leaves(part, here)
        else:
            yield ".".join(here) or "tensor", part


def as_known(part):
    """What numpy has made, as torch's tensor or Python's number."""
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(part, numpy.generic):
        return part.item()
    if numpy and isinstance(part, numpy.ndarray) and part.dtype.kind in "fiubc" and not is_generator_state(part):
        return torch.from_numpy(part.astype("complex128" if part.dtype.kind == "c" else "float64"))
    return part


def numbers_of(tensor):
    numbers = whole(tensor).to_dense().double()
    finite = torch.where(numbers.isfinite(), numbers, 0)
    kinds = numbers.isnan() + 2. * (numbers == float("inf")) + 3. * (numbers == -float("inf"))
    sizes = torch.asinh(1000 * finite)  # about their logarithms
    return Numbers(list(tensor.shape), [sketch([one]) for one in (finite, sizes, kinds)],
                   not (tensor.is_floating_point() or tensor.is_complex()))


def contents(path, value):
    saved = Saved(path, {}, {})
    for name, given in leaves(value):
        part = as_known(given)
        if isinstance(part, (bool, int, float)):
            if not re.search(r"param_groups\.\d+\.params\.\d+$", name):  # just a count
                saved.values[name] = part
        elif isinstance(part, str):
            saved.strings[name] = part
        elif isinstance(part, torch.Tensor) and not is_generator_state(part):
            try:
                saved.tensors[name] = numbers_of(part)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # one without numbers, or in a form of its own
                saved.unknown[name] = "a tensor without plain numbers"
        elif part is not None and not is_generator_state(part):
            saved.unknown[name] = type(part).__name__
    return saved
