"""What is in a file of torch.save: of each tensor its shape and sketch, of each plain value itself."""
import sys

import torch
from torch.utils._pytree import tree_leaves_with_path

from check_conversion.observed.sketch import sketch
from check_conversion.protocol import Saved

GENERATOR = torch.get_rng_state().shape  # of its state, which is no part of training


def is_generator_state(part):
    return (part.dtype == torch.uint8 and part.shape == GENERATOR if isinstance(part, torch.Tensor) else
            str(part.dtype) == "uint32" and part.shape == (624,))  # numpy's


def name_of(key):
    """One step of the way to a part of what is saved."""
    return str(next(getattr(key, kind) for kind in ("key", "idx", "name") if hasattr(key, kind)))


def leaves(value, way=()):
    """All parts with their names, those of a module in its state_dict."""
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    for path, part in tree_leaves_with_path(value):
        whole = (*way, *map(name_of, path))
        if isinstance(part, torch.nn.Module):
            yield from leaves(part, whole)
        else:
            yield ".".join(whole) or "the tensor", part


def as_known(part):
    """What numpy has made, as torch's tensor or Python's number."""
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(part, numpy.generic):
        return part.item()
    if numpy and isinstance(part, numpy.ndarray) and part.dtype.kind in "fiub" and not is_generator_state(part):
        return torch.from_numpy(part.astype("float64"))
    return part


def contents(path, value):
    saved = Saved(path, {}, {})
    for name, given in leaves(value):
        part = as_known(given)
        if isinstance(part, (bool, int, float)):
            if ".params." not in name:  # just a count
                saved.values[name] = part
        elif isinstance(part, str):
            saved.strings[name] = part
        elif isinstance(part, torch.Tensor) and not is_generator_state(part):
            saved.tensors[name] = list(part.shape), sketch([part])
        elif part is not None and not (hasattr(part, "dtype") and is_generator_state(part)):
            saved.unknown[name] = type(part).__name__
    return saved
