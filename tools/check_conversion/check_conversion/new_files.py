"""Reads what a run has left in its copy of the folder; nothing of it is run."""
import contextlib
import io
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from check_conversion.observed.contents import contents
from check_conversion.protocol import Saved

MOST = 2**29  # bytes of one file, or of what is in it


class Unreadable(Exception):
    """Why nothing can be said about a file."""


@dataclass
class NewFile:
    """A file that is new, or no longer as it was copied."""
    kind: str  # "text", "saved" (tensors, arrays, numbers, strings) or "unread"
    text: str = ""
    saved: Saved = None
    why: str = ""  # it was not read


def with_arrays(value):
    return NewFile("saved", saved=contents("", value))


def read_safetensors(path):
    try:
        from safetensors import safe_open
    except ImportError:
        raise Unreadable("safetensors is not installed") from None
    with safe_open(path, "pt") as file:
        return with_arrays({**(file.metadata() or {}), **{name: file.get_tensor(name) for name in file.keys()}})


def read_array(file):
    """Of numpy's format; never anything pickled, which could run code."""
    try:
        import numpy
        array = numpy.load(file, allow_pickle=False)
        if array.dtype.kind not in "fiubc":
            raise Unreadable(f"numbers of type {array.dtype}")
        return array
    except ImportError:
        raise Unreadable("numpy is not installed") from None
    except ValueError as error:  # pickled objects
        raise Unreadable(f"{error}") from None


def read_arrays(content):
    """An npz: a zip of npy files."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = archive.infolist()
        if any(one.filename.endswith("/data.pkl") for one in members):
            return read_saved(content, members)
        if not all(one.filename.endswith(".npy") for one in members):
            raise Unreadable("a zip archive")
        if sum(one.file_size for one in members) > MOST:
            raise Unreadable("too large")
        return with_arrays({one.filename.removesuffix(".npy"): read_array(io.BytesIO(archive.read(one)))
                            for one in members})


def read_saved(content, members):
    """A file of torch's, a copy of a checkpoint perhaps."""
    if any(one.filename.endswith("/constants.pkl") for one in members):
        raise Unreadable("TorchScript")  # which torch.load would hand to another function
    if sum(one.file_size for one in members) > MOST:
        raise Unreadable("too large")
    try:
        value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as reason:  # objects of the user's own
        raise Unreadable(f"torch.load: {type(reason).__name__} with weights_only=True") from None
    return with_arrays(value)


def read_file(path):
    if path.is_symlink():
        return NewFile("text", f"a link to {os.readlink(path)}")
    if path.stat().st_size > MOST:
        raise Unreadable("too large")
    content = path.read_bytes()
    if content.startswith(b"\x93NUMPY"):
        return with_arrays({"array": read_array(io.BytesIO(content))})
    if content.startswith(b"PK\3\4"):
        return read_arrays(content)
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    with contextlib.suppress(UnicodeDecodeError):
        text = content.decode()
        if "\0" not in text:
            return NewFile("text", text)
    raise Unreadable("neither text nor arrays")


def files_in(folder):
    """Each, behind no link: what these lead to is not the run's."""
    for path in sorted(folder.iterdir()):
        if path.name == "__pycache__":
            continue
        if path.is_symlink():
            yield path
        elif path.is_dir():
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
            found[name] = NewFile("unread", why=str(reason))
        except Exception:  # of whichever package reads it
            found[name] = NewFile("unread", why="broken")
    return found
