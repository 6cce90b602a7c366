"""Reads what a run has left in its copy of the folder, as it lies there at the end; nothing of it is run."""
import contextlib
import io
import pickle
import re
import sys
import zipfile
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch.utils._pytree import tree_flatten_with_path

from check_conversion.sketch import describe, sketch, whole

MOST = 2**29  # bytes of one file, or of what is in it
STATES = {torch.get_rng_state().shape, torch.Size([16])}  # of torch's generators, the CPU's and CUDA's
NUMPYS = {f"numpy.{core}multiarray.{name}" for core in ("core.", "_core.") for name in ("_reconstruct", "scalar")} | {
    "numpy.ndarray", "numpy.dtype"}


class Unreadable(Exception):
    """Why nothing can be said about a file."""


@dataclass
class File:
    """A file that is new, or no longer as it was copied."""
    kind: str  # "text", "values" or "unread"
    text: str = ""
    values: dict = field(default_factory=dict)  # by name: a Tensor, or a number or string itself
    why: str = ""  # it was not read


@dataclass
class Tensor:
    """A tensor in a file, in several sketches, for large numbers would hide small ones, or NaN all."""
    shape: list
    sketches: list
    whole: bool = False  # counts, which are never rounded
    in_any_order: list = field(default_factory=list)  # sorted checksums of its rows, and of its columns


class StandIn:
    """Whatever a pickle holds besides tensors and plain values: it has its name and its state."""

    def __new__(cls, *given, **options):
        stand_in = super().__new__(cls)
        stand_in.state = dict(enumerate(given))
        return stand_in

    def __init__(self, *given, **options):
        pass

    def __call__(self, *given, **options):
        return StandIn(*given)

    def __setstate__(self, state):
        self.state = state

    def __setitem__(self, key, value):
        self.state[key] = value

    def append(self, value):
        self.state[len(self.state)] = value

    def extend(self, values):
        self.state.update(enumerate(values, len(self.state)))


class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if f"{module}.{name}" in NUMPYS:
            return super().find_class(module, name)
        known = torch._weights_only_unpickler._get_allowed_globals()
        return known.get(f"{module}.{name}") or type(name, (StandIn,), {})


PICKLE = SimpleNamespace(__name__="pickle", Unpickler=Unpickler)  # for torch.load


# What is in it: of each tensor its shape and sketch, of each plain value itself.

def is_generator_state(part):
    """Which is no part of training: torch's, numpy's or Python's."""
    if isinstance(part, torch.Tensor):
        return part.dtype == torch.uint8 and part.shape in STATES
    if isinstance(part, tuple):
        numpys = part[:1] and isinstance(part[0], str) and part[0] == "MT19937"
        return bool(numpys) or (len(part) == 3 and isinstance(part[1], tuple) and len(part[1]) == 625)
    return str(getattr(part, "dtype", "")) == "uint32" and part.shape == (624,)


def leaves(value, way=()):
    """All parts with their names; of a pickled module its parameters, buffers and modules."""
    state = getattr(value, "state", None)
    if isinstance(state, dict) and "_parameters" in state:
        value = {name: one for kind in ("_parameters", "_buffers", "_modules") for name, one in state[kind].items()}
    elif isinstance(value, StandIn):
        value = state
    parts, _ = tree_flatten_with_path(value, lambda part: isinstance(part, tuple) and is_generator_state(part))
    for path, part in parts:
        here = (*way, *(str(next(getattr(key, kind) for kind in ("key", "idx", "name") if hasattr(key, kind)))
                        for key in path))
        if isinstance(part, StandIn):
            yield from leaves(part, here)
        else:
            yield ".".join(here) or "value", part


def as_known(part):
    """What numpy has made, as torch's tensor or Python's number."""
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(part, numpy.generic):
        return part.item()
    if numpy and isinstance(part, numpy.ndarray) and part.dtype.kind in "fiubc" and not is_generator_state(part):
        return torch.from_numpy(part.astype("complex128" if part.dtype.kind == "c" else "float64"))
    return part


def describe_tensor(tensor):
    numbers = whole(tensor).to_dense().double()
    finite = torch.where(numbers.isfinite(), numbers, 0)
    kinds = numbers.isnan() + 2. * (numbers == float("inf")) + 3. * (numbers == -float("inf"))
    sizes = torch.asinh(1000 * finite)  # about their logarithms
    fed = describe(finite)
    return Tensor(list(tensor.shape), [sketch([one]) for one in (finite, sizes, kinds)],
                  not (tensor.is_floating_point() or tensor.is_complex()), [sorted(fed.rows), sorted(fed.columns)])


def with_values(value):
    file = File("values")
    for name, given in leaves(value):
        part = as_known(given)
        if isinstance(part, torch.Tensor) and not is_generator_state(part) and part.device.type != "meta":
            file.values[name] = describe_tensor(part)
        elif isinstance(part, (bool, int, float, str)) and not re.search(r"param_groups\.\d+\.params\.\d+$", name):
            file.values[name] = part
    return file


# The kinds of files.

def read_torch(path):
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(one.filename.endswith("/constants.pkl") for one in members):
        raise Unreadable("TorchScript")  # which torch.load would hand to another function
    if sum(one.file_size for one in members) > MOST:
        raise Unreadable("too large")
    return torch.load(path, map_location="cpu", pickle_module=PICKLE, weights_only=False)


def read_numpy(path):
    """An array or several; never anything pickled, which could run code."""
    import numpy
    found = numpy.load(path, allow_pickle=False)
    return dict(found) if hasattr(found, "files") else found


def read_safetensors(path):
    from safetensors import safe_open
    with safe_open(path, "pt") as file:
        return {**(file.metadata() or {}), **{name: file.get_tensor(name) for name in file.keys()}}


def read_file(path):
    if path.stat().st_size > MOST:
        raise Unreadable("too large")
    content = path.read_bytes()
    if content.startswith(b"PK\3\4") and b"/data.pkl" in content[:200]:
        return with_values(read_torch(path))
    if path.suffix in (".npy", ".npz"):
        return with_values(read_numpy(path))
    if path.suffix == ".safetensors":
        return with_values(read_safetensors(path))
    if path.suffix in (".pkl", ".pickle"):
        return with_values(Unpickler(io.BytesIO(content)).load())
    with contextlib.suppress(UnicodeDecodeError):
        if "\0" not in (text := content.decode()):
            return File("text", text)
    raise Unreadable("neither text nor arrays")


def without_root(file, root):
    """So that paths in it are those of the folder itself."""
    file.text = file.text.replace(root, "")
    file.values = {key: part.replace(root, "") if isinstance(part, str) else part for key, part in file.values.items()}
    return file


def read_all(copy, known, root=""):
    """By their names in the copy, all files that it has beside those that are known; nothing behind a link."""
    found = {}
    for path in sorted(copy.rglob("*")):
        name = str(path.relative_to(copy))
        if name not in known and path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts:
            try:
                found[name] = without_root(read_file(path), root)
            except Exception as reason:  # of whichever package reads it
                why = str(reason) if isinstance(reason, Unreadable) else type(reason).__name__
                found[name] = File("unread", why=why)
    return found
