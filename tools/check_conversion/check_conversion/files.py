"""Reads what a run has left in its copy of the folder, as it lies there at the end; nothing of it is run."""
import io
import pickle
import re
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from check_conversion.sketch import describe, gathered, sketch

MOST = 2**29  # bytes of one file
STATES = {torch.get_rng_state().shape, torch.Size([16])}  # of torch's generators, the CPU's and CUDA's
NUMPYS = r"numpy\.(ndarray|dtype|_?core\.(multiarray\.(_reconstruct|scalar)|numeric\._frombuffer))"


@dataclass
class File:
    """A file that is new, or no longer as it was copied."""
    kind: str  # "text", "values" or "unread"
    text: str = ""
    values: dict = field(default_factory=dict)  # by name: a Tensor, or a number or string itself
    why: str = ""  # it was not read


@dataclass
class Tensor:
    """A tensor in a file, in two sketches, for large numbers would hide small ones."""
    shape: list
    sketches: list
    in_any_order: list  # sorted checksums of its rows, and of its columns


class StandIn(dict):
    """Whatever a pickle holds besides tensors and plain values: what it was made of, and its state."""

    def __new__(cls, *given, **options):
        made = super().__new__(cls)
        made.update(enumerate(given))
        return made

    def __init__(self, *given, **options):
        pass

    def __setstate__(self, state):
        self.update(state if isinstance(state, dict) else enumerate([state]))

    def append(self, value):
        self[len(self)] = value


class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if re.fullmatch(NUMPYS, f"{module}.{name}"):
            return super().find_class(module, name)
        return torch._weights_only_unpickler._get_allowed_globals().get(f"{module}.{name}", StandIn)


PICKLE = SimpleNamespace(__name__="pickle", Unpickler=Unpickler)  # for torch.load


def leaves(value, name=""):
    """All tensors and plain values with their names; of a pickled module its parameters, buffers and modules."""
    if type(value).__module__ == "numpy":
        value = torch.tensor(value) if value.shape and value.dtype.kind in "fiubc" else value.tolist()
    if isinstance(value, dict) and "_parameters" in value:
        value = {**value["_parameters"], **value["_buffers"], **value["_modules"]}
    if is_generator_state(value):
        return
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (torch.Tensor, bool, int, float, str)):
        yield name or "value", value


def is_generator_state(value):
    """torch's, numpy's or Python's, which is no part of training."""
    if isinstance(value, tuple):
        return (len(value) == 625 and {*map(type, value)} == {int}) or str(value[:1]) == "('MT19937',)"
    return isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.shape in STATES


def describe_tensor(tensor):
    numbers = gathered(tensor).to_dense().double()
    finite = numbers.nan_to_num(0, 0, 0)
    sizes = torch.asinh(1000 * numbers.nan_to_num(1e30, 1e40, -1e40))  # about their logarithms
    fed = describe(finite)
    return Tensor(list(tensor.shape), [sketch([finite]), sketch([sizes])], [sorted(fed.rows), sorted(fed.columns)])


def with_values(value, root=""):
    file = File("values")
    for name, part in leaves(value):
        if isinstance(part, torch.Tensor):
            file.values[name] = describe_tensor(part)
        else:
            file.values[name] = part.replace(root, "") if isinstance(part, str) else part
    return file


def with_text(text, path):
    if "\0" in text or "\ufffd" in text:  # which stands for what is no text
        return File("unread", why="neither text nor arrays")
    if path.suffix == ".json" and '"traceEvents"' in text:
        return File("unread", why="a trace")
    if path.suffix in (".csv", ".tsv"):
        text = text.replace(",", ", ")  # 2,100 are two figures there
    return File("text", text)


def read_file(path, root):
    """root: what is left out, so that paths are those of the folder itself."""
    if path.stat().st_size > MOST:
        return File("unread", why="too large")
    if path.suffix == ".distcp" or path.name == ".metadata":
        return File("unread", why="of torch.distributed.checkpoint")
    content = path.read_bytes()
    file = io.BytesIO(content)
    if path.suffix in (".npy", ".npz"):
        import numpy
        found = numpy.load(file, allow_pickle=False)
        return with_values(dict(found) if path.suffix == ".npz" else found, root)
    if path.suffix == ".safetensors":
        import safetensors.torch
        return with_values(safetensors.torch.load(content))
    if path.suffix in (".pkl", ".pickle"):
        return with_values(Unpickler(file).load(), root)
    if content.startswith(b"PK\3\4") and b"/data.pkl" in content[:200]:
        if b"/constants.pkl" in content:  # which torch.load would hand to another function
            return File("unread", why="TorchScript")
        return with_values(torch.load(file, map_location="cpu", pickle_module=PICKLE, weights_only=False), root)
    return with_text(content.decode(errors="replace").replace(root, ""), path)


def read_all(copy, known, root=""):
    """By their names in the copy, all files that it has beside those that are known; nothing behind a link."""
    found = {}
    for path in sorted(copy.rglob("*")):
        name = str(path.relative_to(copy))
        if name not in known and path.is_file() and not path.is_symlink():
            try:
                found[name] = read_file(path, root)
            except Exception as reason:  # of whichever package reads it
                found[name] = File("unread", why=type(reason).__name__)
    return found
