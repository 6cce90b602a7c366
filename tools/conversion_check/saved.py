"""What both saved by torch.save."""
import collections
import math

from conversion_check.causes import Fault, distance, norm
from conversion_check.printed import TIMES, Compared, Figures
from conversion_check.record import Saved


def files(run):
    found = collections.defaultdict(list)
    for rank in run.processes:
        for save in rank.of(Saved):
            found[save.path].append((rank.rank, save))
    return found


def pairs(original, converted):
    """Files of the same name, then those that are left, in their order."""
    both = [name for name in original if name in converted]
    others = [[name for name in found if name not in both] for found in (original, converted)]
    return [(name, name) for name in both] + [*zip(*others)]


def tensors_apart(one, nudged, other, drift):
    """The first tensor that is further from the original's than rounding explains."""
    for name, (_, numbers) in one.tensors.items():
        if name not in nudged.tensors or name.endswith("num_batches_tracked"):
            continue
        by_rounding = distance(numbers, nudged.tensors[name][1])
        if not distance(numbers, other.tensors[name][1]) <= TIMES * max(
                by_rounding, drift * norm(numbers)):
            return name
    return None


def compare_save(name, one, nudged, other, judges, drift):
    """One call of torch.save in the original, and its counterpart."""
    names = {**one.tensors, **one.values}
    ours = {**other.tensors, **other.values}
    if any("module." in key for key in ours) and not any("module." in key for key in names):
        return f"{name}: the saved names begin with `module.`", "Saving"
    if missing := [key for key in names if key not in ours]:
        return f"{name}: {', '.join(missing[:3])} is not saved", "Saving"
    for key, (shape, _) in one.tensors.items():
        if key not in other.tensors or other.tensors[key][0] != shape:
            return f"{name}: {key} is saved in another shape", "Saving"
    if key := tensors_apart(one, nudged, other, drift):
        return f"{name}: another {key} is saved", "Saving"
    for key, a in one.values.items():
        if judges[key].parts(a, nudged.values.get(key, math.nan), other.values.get(key, math.nan)):
            return f"{name}: another {key} is saved: {other.values[key]:g} instead of {a:g}", "Printed figures"
    return None


def compare_saved(first, again, many, drift):
    original, twice, converted = files(first), files(again), files(many)
    for name, ours in pairs(original, converted):
        saves, others = original[name], converted[ours]
        if len({rank for rank, _ in others}) > 1:
            return Compared(fault=Fault(f"{ours} is saved by more than one rank", "Saving"))
        if len(others) != len(saves):
            return Compared(fault=Fault(f"{ours} is saved {len(others)} times instead of {len(saves)}",
                                        "Decisions"))
        judges = collections.defaultdict(lambda: Figures(drift))
        nudged = [save for _, save in twice[name]]
        for (_, one), again_, (_, other) in zip(saves, nudged, others):
            if found := compare_save(ours, one, again_, other, judges, drift):
                return Compared(fault=Fault(*found))
    if len(converted) < len(original):
        names = ", ".join(name for name in original if name not in converted)
        return Compared(fault=Fault(f"{len(converted)} files are saved instead of {len(original)}, "
                                    f"without {names}", "Saving"))
    return Compared(say_files(original), remarks=[*more_than_before(first, many, original, converted)])


def say_files(original):
    if not original:
        return "nothing was saved by torch.save"
    count = sum(map(len, original.values()))
    return f"{count} file{'s' * (count > 1)} the same: {', '.join(original)}"


def more_than_before(first, many, original, converted):
    paired = {ours for _, ours in pairs(original, converted)}
    if more := [name for name in converted if name not in paired]:
        yield f"{', '.join(more)}: saved by {many.name} alone"
    for name, ours in pairs(original, converted):
        one, other = original[name][0][1], converted[ours][0][1]
        known = {**one.tensors, **one.values}
        if more := [key for key in {**other.tensors, **other.values} if key not in known]:
            yield f"{ours}: {', '.join(more[:3])} is saved by {many.name} alone"
    if images := {*first.remarks("image"), *many.remarks("image")}:
        yield f"images were not compared: {', '.join(sorted(images))}"
