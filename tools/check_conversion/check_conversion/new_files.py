"""What a run leaves in its copy of the folder: text, arrays, and what cannot be read."""
import collections
import contextlib
import io
import json
import math
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from check_conversion.buffers import reordered
from check_conversion.distances import TIMES
from check_conversion.outputs import BY_ROUNDING, SHOWN, compare_saves, compare_texts, many, pair, saves_of
from check_conversion.protocol import About, Remark, Saved
from check_conversion.verdict import Compared, Fault

MOST = 2**26  # bytes of one file, or of an array in it
TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
         "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
         "U8": torch.uint8, "BOOL": torch.bool}  # of safetensors


class Unreadable(Exception):
    """Why nothing can be said about a file."""


@dataclass
class NewFile:
    """A file that is new, or no longer as it was copied."""
    kind: str  # "text", "arrays", "saved" or "unread"
    text: str = ""  # of arrays: what stands beside them
    arrays: dict = field(default_factory=dict)  # tensors by their names
    saved: Saved = None  # what torch.save has made
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
    return NewFile("arrays", "\n".join(f"{name}: {about[name]}" for name in sorted(about)), arrays)


def read_array(file):
    """Of numpy's format; never anything pickled, which could run code."""
    try:
        import numpy
        array = numpy.load(file, allow_pickle=False)
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))
    except ImportError:
        raise Unreadable("numpy is not installed") from None
    except (TypeError, ValueError) as error:  # strings, records, objects
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
        return NewFile("arrays", arrays={one.filename.removesuffix(".npy"): read_array(
            io.BytesIO(archive.read(one))) for one in members})


def read_saved(content, members):
    """A file of torch's, a copy of a checkpoint perhaps; nothing of it is run."""
    from check_conversion.observed.contents import contents
    if any(one.filename.endswith("/constants.pkl") for one in members):
        raise Unreadable("TorchScript")  # which torch.load would hand to another function
    if sum(one.file_size for one in members) > MOST:
        raise Unreadable("too large")
    try:
        value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as reason:  # objects of the user's own
        raise Unreadable(f"torch.load: {type(reason).__name__} with weights_only=True") from None
    return NewFile("saved", saved=contents("", value))


def read_file(path):
    if path.stat().st_size > MOST:
        raise Unreadable("too large")
    content = path.read_bytes()
    if content.startswith(b"\x93NUMPY"):
        return NewFile("arrays", arrays={"the array": read_array(io.BytesIO(content))})
    if content.startswith(b"PK\3\4"):
        return read_arrays(content)
    if path.suffix == ".safetensors":
        return read_safetensors(content)
    with contextlib.suppress(UnicodeDecodeError):
        text = content.decode()
        if "\0" not in text:
            return NewFile("text", text)
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
            found[name] = NewFile("unread", why=str(reason))
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):
            found[name] = NewFile("unread", why="broken")
    return found


def apart_and_size(one, other):
    """How far two arrays of the same shape are apart, and how large the first is."""
    one, other = (array.detach().to(torch.complex128 if array.is_complex() else torch.float64)
                  for array in (one, other))
    alike = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(alike, 0, one - other).abs().square().sum().sqrt().item()
    size = torch.nan_to_num(one, posinf=0, neginf=0).abs().square().sum().sqrt().item()
    return (math.inf if math.isnan(apart) else apart), size


# What both scripts leave.

def compare_arrays(name, one, nudged, other, drift):
    """Faults, what was not compared because it varies, and how many arrays were."""
    faults, varying, compared = [], [], len(one.arrays)
    for key, array in one.arrays.items():
        ours, nudged_one = other.arrays.get(key), nudged.arrays.get(key)
        if nudged_one is None or nudged_one.shape != array.shape:
            varying.append(f"{name}: {key}")
            continue
        moved, size = apart_and_size(array, nudged_one)
        if moved > BY_ROUNDING * max(drift * size, torch.finfo(torch.float32).eps * size):
            varying.append(f"{name}: {key}")
        elif ours is None or ours.shape != array.shape:
            shape = "is missing" if ours is None else (
                f"has the shape {[*ours.shape]} instead of {[*array.shape]}")
            hint = " (names begin with `module.`)" * (ours is None and f"module.{key}" in other.arrays)
            faults.append(Fault(f"{name}: {key} {shape}{hint}", "Saving"))
        elif not apart_and_size(array, ours)[0] <= TIMES * max(moved, drift * size):
            faults.append(Fault(f"{name}: a different {key} is saved", "Saving", measured=True))
    return faults[:1], varying, compared - len(varying)


def by_several_ranks(converted):
    """Files that more than one rank has opened to write them anew."""
    ranks = {}
    for process in converted.processes:
        for remark in process.of(Remark):
            if remark.about == About.WRITTEN:
                ranks.setdefault(remark.name, set()).add(process.rank)
    return {name: sorted(them) for name, them in ranks.items() if len(them) > 1}


def compare_file(name, three, names, drift, in_other_order):
    """Faults of a file of all three runs, what of it varies, remarks, and whether anything was compared."""
    if three[0].kind == "saved":
        saves = [[one.saved] for one in three]
        return compare_saves(name, saves, names, drift, in_other_order)
    faults, varying, arrays = compare_arrays(name, *three, drift)
    text = compare_texts([one.text for one in three], names, drift, f"{name}: written")
    compared = arrays or three[0].text or not three[0].arrays  # an empty file is compared too
    return faults + text.faults, varying, text.remarks, bool(compared)


def not_noted(run, other):
    """New files, but those that torch.save was seen to write under these names; where the other script
    has one of them by a copy or under its last name, the files are compared."""
    noted, noted_there = saves_of(run), saves_of(other)
    return {name: one for name, one in run.new_files.items()
            if name not in noted or (name in other.new_files and name not in noted_there)}


def compare_new_files(original, nudged, converted, drift):
    found, of_nudged, others = map(
        not_noted, (original, nudged, converted), (converted, converted, original))
    in_both, in_nudged, several = pair(found, others), pair(found, of_nudged), by_several_ranks(converted)
    same, faults, remarks, varying, unread = [], [], [], [], []
    in_other_order = reordered(original, nudged, converted)
    for name, ours in in_both.items():
        one, other = found[name], others[ours]
        nudged_one = of_nudged.get(in_nudged.get(name))
        if ours in several:
            faults.append(Fault(f"{ours} is written by ranks {' and '.join(map(str, several[ours]))}",
                                "Saving"))
        elif nudged_one is None or nudged_one.kind != one.kind:
            varying.append(name)
        elif "unread" in (one.kind, other.kind):
            unread.append(f"{ours} ({other.why or one.why})")
        elif one.kind != other.kind:
            faults.append(Fault(f"{ours} is of kind {other.kind} instead of {one.kind}", "Saving"))
        else:
            parted, vary, said, compared = compare_file(
                ours, (one, nudged_one, other), (original.name, converted.name), drift, in_other_order)
            varying += vary
            remarks += said
            faults += parted
            same += [ours] * (compared and not parted)
    if missing := [name for name in found if name not in in_both]:
        faults.append(Fault(f"{converted.name} does not write {', '.join(missing)}", "Saving"))
    if more := [name for name in others if name not in in_both.values()]:
        remarks.append(f"written by {converted.name} alone: {', '.join(more)}")
    if varying:
        remarks.append(f"not compared, because {original.name} writes it differently in each run: "
                       f"{', '.join(varying)}")
    if unread:
        remarks.append(f"not read: {', '.join(unread)}")
    said = f"{many(len(same), 'file')} the same: {', '.join(same)}" if same else ""
    kinds = collections.Counter(Path(name).suffix.removeprefix(".") or "file" for name in same)
    count = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return Compared(said, count, faults[:SHOWN], remarks)
