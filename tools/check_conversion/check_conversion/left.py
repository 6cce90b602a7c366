"""What a run leaves in its copy of the folder: text, arrays, and what cannot be read."""
import contextlib
import io
import json
import math
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

MOST = 2**26  # bytes of one file, or of an array in it
TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
         "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
         "U8": torch.uint8, "BOOL": torch.bool}  # of safetensors


class Unreadable(Exception):
    """Why nothing can be said about a file."""


@dataclass
class Left:
    """A file that is new, or no longer as it was copied."""
    kind: str  # "text", "arrays" or "unread"
    text: str = ""  # of arrays: what stands beside them
    arrays: dict = field(default_factory=dict)  # tensors by their names
    why: str = ""  # it was not read


def read_safetensors(content):
    """Eight bytes that say how long the header is, the header in JSON, the numbers."""
    begin = 8 + int.from_bytes(content[:8], "little")
    if begin > len(content):
        raise Unreadable("broken")
    header = json.loads(content[8:begin])
    arrays = {}
    for name, about in header.items():
        if name == "__metadata__":
            continue
        if about["dtype"] not in TYPES:
            raise Unreadable(f"numbers of type {about['dtype']}")
        first, last = (begin + offset for offset in about["data_offsets"])
        numbers = bytearray(content[first:last])
        array = torch.frombuffer(numbers, dtype=TYPES[about["dtype"]]) if numbers else torch.empty(0)
        arrays[name] = array.reshape(about["shape"])
    about = header.get("__metadata__", {})
    return Left("arrays", "\n".join(f"{name}: {about[name]}" for name in sorted(about)), arrays)


def read_array(file):
    """Of numpy's format; never anything pickled, which could run code."""
    try:
        import numpy
        array = numpy.load(file, allow_pickle=False)
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))
    except ImportError:
        raise Unreadable("numpy is not there") from None
    except (TypeError, ValueError) as error:  # strings, records, objects
        raise Unreadable(f"{error}") from None


def read_arrays(content):
    """An npz: a zip of npy files."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = archive.infolist()
        if not all(one.filename.endswith(".npy") for one in members):
            raise Unreadable("a zip archive")
        if sum(one.file_size for one in members) > MOST:
            raise Unreadable("too large")
        return Left("arrays", arrays={one.filename.removesuffix(".npy"): read_array(
            io.BytesIO(archive.read(one))) for one in members})


def read_file(path):
    if path.stat().st_size > MOST:
        raise Unreadable("too large")
    content = path.read_bytes()
    if content.startswith(b"\x93NUMPY"):
        return Left("arrays", arrays={"the array": read_array(io.BytesIO(content))})
    if content.startswith(b"PK\3\4"):
        return read_arrays(content)
    if path.suffix == ".safetensors":
        return read_safetensors(content)
    with contextlib.suppress(UnicodeDecodeError):
        text = content.decode()
        if "\0" not in text:
            return Left("text", text)
    raise Unreadable("neither text nor arrays")


def files_in(folder):
    """Each, behind no link: what these lead to is not the run's."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or path.name == "__pycache__":
            continue
        if path.is_dir():
            yield from files_in(path)
        elif path.is_file():
            yield path


def read(copy, known):
    """By their names in the copy, all files that it has beside those that are known."""
    found = {}
    for path in files_in(Path(copy)):
        name = str(path.relative_to(copy))
        if name in known:
            continue
        try:
            found[name] = read_file(path)
        except (Unreadable, zipfile.BadZipFile, OSError) as reason:
            found[name] = Left("unread", why=str(reason))
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):
            found[name] = Left("unread", why="broken")
    return found


def distance(one, other):
    """How far two arrays of the same shape are apart, and how large the first is."""
    one, other = (array.detach().to(torch.complex128 if array.is_complex() else torch.float64)
                  for array in (one, other))
    alike = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(alike, 0, one - other).abs().square().sum().sqrt().item()
    size = torch.nan_to_num(one).abs().square().sum().sqrt().item()
    return (math.inf if math.isnan(apart) else apart), size
