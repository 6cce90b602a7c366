"""Whether a run prints and saves what the original did. Whatever differs between the original's two runs shows what rounding
and the clock do, and is compared no more closely."""
import argparse
import contextlib
import re
from collections import defaultdict

import numpy
import torch
from training import NOISE, see

SLIGHT, TIME = 1e-5, 1e-3  # of a figure: no difference; one that, between two originals, shows a time
DAY = re.compile(r"\b(Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\b")
NUMBER = re.compile(r"(?<![A-Za-z_\d.])[-+]?(?:\d{1,3}(?:,\d{3})+(?= ?[A-Za-z/])|\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf)")
PICKLED = [argparse.Namespace, numpy.ndarray, numpy.dtype, *(getattr(numpy.dtypes, name) for name in numpy.dtypes.__all__)]
with contextlib.suppress(AttributeError):  # names of numpy's own: without them, files that hold arrays are not compared
    PICKLED += [numpy._core.multiarray._reconstruct, numpy._core.multiarray.scalar]


def gap(one, other):
    """Relative; one unit of the last digit is nothing."""
    one, other = one.replace(",", ""), other.replace(",", "")  # of thousands
    if one == other:
        return 0.0
    a, b, (mantissa, _, exponent) = float(one), float(other), one.lower().partition("e")
    unit = 1.01 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2])) if "." in mantissa else 0
    slack = unit if unit < 1e-3 * max(abs(a), abs(b)) else 0  # a coarser figure is not rounded otherwise by chance
    return max(0.0, abs(a - b) - slack) / max(abs(a), abs(b)) if abs(a - b) < float("inf") else 1.0


def by_words(lines):
    """Numbers and text of each line, by what it has besides its numbers."""
    found = defaultdict(list)
    for line in filter(None, map(str.strip, lines)):
        line = DAY.sub("day", line)
        found[NUMBER.sub("#", line)].append((NUMBER.findall(line), line[:120]))
    return found


def compare_lines(runs, anywhere=False, all_of_them=True):
    """Lines with the same words, in their order; or, anywhere, each at least once. What differs, how many there are, and which
    cannot be compared."""
    (first, second, other), found, count, left_out, missing = map(by_words, runs), [], 0, [], []
    for words, lines in first.items():
        if not anywhere and len(second[words]) != len(lines):
            left_out.append(f"{lines[0][1]!r}, which the original does not print twice")  # it has a time in it, perhaps
            continue
        if not all_of_them and not other[words]:
            missing.append(f"{lines[0][1]!r}, which the converted script does not print in these words")
            continue
        count += len(lines)
        if len(other[words]) != len(lines) and not (anywhere and other[words]):
            found.append(f"{len(other[words])} times instead of {len(lines)}: {lines[0][1]}{advice(lines, other[words], other)}")
            continue
        gaps = [[*map(gap, one, again)] for (one, _), (again, _) in zip(lines, second[words])]
        moved = [*map(max, zip(*gaps))] or [0.0] * len(lines[0][0])
        for place, (numbers, line) in enumerate(lines):
            candidates = other[words] if anywhere else [other[words][place]]
            if not any(all(move > TIME or gap(one, its) <= max(SLIGHT, NOISE * move)
                           for one, its, move in zip(numbers, others, moved)) for others, _ in candidates):
                differs = f"{candidates[-1][1]!r} instead of {line!r}"
                (found if second[words] else left_out).append(differs)  # each start prints its own, perhaps a time
    if not any(other.values()):  # else it has other words for them, perhaps
        return missing, len(missing), left_out
    return found, count, left_out + missing


def advice(lines, others, other):
    names = {line.replace("module.", "").partition(":")[0] for found in other.values() for _, line in found if "module." in line}
    if lines[0][1].partition(":")[0] in names:
        return "; without module., as of model.module.state_dict()" + see("Saving")
    return "; is it of each rank?" + see("Printed by all ranks") if others and len(others) % len(lines) == 0 else ""


def compare_files(folders, anywhere=False):
    """What differs, and the names of files that are the same, and of those that could not be compared."""
    found, same, left_out = [], [], []
    for name in sorted(str(path.relative_to(folders[0])) for path in folders[0].rglob("*") if path.is_file()):
        paths = [folder / name for folder in folders if (folder / name).exists()]
        if anywhere and len(paths) == 2 and paths[1].is_relative_to(folders[2]):
            paths.insert(1, paths[0])  # it was not there yet when the run was killed
        if len(paths) == 3 and len({path.stat().st_mtime_ns for path in paths}) > 1:  # not as it was copied
            contents = [*map(read_lines, paths)]
            if anywhere and any(": norm " in line for line in contents[0] or ()):
                contents[1] = contents[0]  # the killed run's is that of another step
            different = compare_lines(contents, anywhere)[0][:3] if None not in contents else []
            found += [f"{name}: {one}" for one in different]
            (left_out if None in contents else same).extend([] if different else [name])
        elif len(paths) == 2 and paths[1].is_relative_to(folders[1]):
            found.append(f"{name} is missing")
        elif len(paths) == 1:
            left_out.append(f"{name}, which one run alone has")
    return found, same, left_out


def read_lines(path):
    """Of a text; of a checkpoint, one for each value: a tensor's norm, and its direction. None if it cannot be read."""
    with contextlib.suppress(Exception), torch.serialization.safe_globals(PICKLED):  # nothing else in it is executed
        return [*value_lines(numpy.load(path) if path.suffix in (".npy", ".npz") else torch.load(
            path, weights_only=True, map_location="cpu", mmap=False))]
    with contextlib.suppress(UnicodeDecodeError):
        return path.read_text().splitlines()


def value_lines(value, name=""):
    if isinstance(value, (list, tuple)) or hasattr(value, "keys"):
        keys = value.keys() if hasattr(value, "keys") else range(len(value))
        for key in [key for key in keys if key not in ("args", "config", "hparams")]:  # which may differ
            yield from value_lines(value[key], f"{name}.{key}".strip("."))
    elif isinstance(value, (torch.Tensor, numpy.ndarray)):
        flat = torch.as_tensor(value).double().flatten().nan_to_num()
        direction = flat @ torch.arange(1.0, len(flat) + 1).double().sin() / (flat.norm() + 1e-30)
        yield f"{name}: norm {flat.norm():.9g} direction {direction:.5f} of {[*value.shape]}"
    elif isinstance(value, (int, float, numpy.number)):
        yield f"{name}: {float(value):.12g}"
