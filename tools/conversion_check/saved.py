"""What both saved by torch.save."""
import collections
import math

from conversion_check.evidence import Fault, distance, norm
from conversion_check.printed import TIMES, Compared, Figures
from conversion_check.record import Saved
from conversion_check.rounding import LARGE


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


def under_other_names(one, other):
    """The original's names of the tensors that are there under others: FSDP's optimizer has the
    parameters' names, torch.optim's their numbers."""
    lacking = [name for name in one.tensors if name not in other.tensors]
    more = [name for name in other.tensors if name not in one.tensors]
    shapes = [[tensors[name][0] for name in names]
              for tensors, names in ((one.tensors, lacking), (other.tensors, more))]
    return dict(zip(more, lacking)) if lacking and shapes[0] == shapes[1] else {}


def tensors_apart(one, nudged, other, drift):
    """The first tensor that is further from the original's than rounding explains."""
    for name, (_, numbers) in one.tensors.items():
        if name not in nudged.tensors or name.endswith("num_batches_tracked"):
            continue
        by_rounding = distance(numbers, nudged.tensors[name][1])
        allowed = TIMES * max(by_rounding, drift * norm(numbers))
        if ".state." in name:  # an optimizer's: of gradients, which a tie in a pooling layer parts
            allowed = max(allowed, LARGE * norm(numbers))
        if not distance(numbers, other[name][1]) <= allowed:
            return name
    return None


def is_setting(name, value):
    """What a script was told, not what it found."""
    return isinstance(value, bool) or (isinstance(value, int) and bool(
        {"args", "config", "hparams", "opt", "options", "settings"} & {*name.split(".")}))


def compare_save(name, one, nudged, other, judges, drift):
    """One call of torch.save in the original, and its counterpart."""
    ours = {**other.tensors, **other.values}
    if any("module." in key for key in ours) and not any(
            "module." in key for key in {**one.tensors, **one.values}):
        return f"{name}: the saved names begin with `module.`", "Saving"
    renamed = under_other_names(one, other)
    tensors = {renamed.get(key, key): saved for key, saved in other.tensors.items()}
    missing = [key for key in one.tensors if key not in tensors]
    missing += [key for key in one.values if key not in other.values]
    if missing:
        return f"{name}: {', '.join(missing[:3])} is not saved", "Saving"
    for key, (shape, _) in one.tensors.items():
        if tensors[key][0] != shape:
            return f"{name}: {key} is saved with a different shape", "Saving"
    if key := tensors_apart(one, nudged, tensors, drift):
        return f"{name}: a different {key} is saved", "Saving"
    parted = [key for key, a in one.values.items() if not is_setting(key, a) and judges[key].parts(
        a, nudged.values.get(key, math.nan), other.values[key])]
    if parted:
        said = ", ".join(f"{other.values[key]:g} instead of {one.values[key]:g}" for key in parted)
        return f"{name}: a different {', '.join(parted)} is saved: {said}", "Printed figures"
    return None


def compare_saved(first, again, many, drift):
    original, twice, converted = files(first), files(again), files(many)
    for name, ours in pairs(original, converted):
        saves, others = original[name], converted[ours]
        if len({rank for rank, _ in others}) > 1:
            return Compared(fault=Fault(f"{ours} is saved by more than one rank", "Saving"))
        if len(others) != len(saves):
            return Compared(fault=Fault(f"{ours} is saved {len(others)} times instead of "
                                        f"{len(saves)}", "Decisions"))
        judges = collections.defaultdict(lambda: Figures(drift))
        nudged = [save for _, save in twice[name]]
        for (_, one), again_, (_, other) in zip(saves, nudged, others):
            if found := compare_save(ours, one, again_, other, judges, drift):
                return Compared(fault=Fault(*found))
    if len(converted) < len(original):
        names = ", ".join(name for name in original if name not in converted)
        return Compared(fault=Fault(f"{len(converted)} files are saved instead of {len(original)}, "
                                    f"without {names}", "Saving"))
    remarks = [*more_than_before(first, many, original, converted)]
    return Compared(say_files(original), remarks=remarks)


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
        if renamed := under_other_names(one, other):
            yield f"{ours}: {', '.join([*renamed.values()][:3])} are saved under other names"
        for key, a in one.values.items():
            if is_setting(key, a) and other.values.get(key, a) != a:
                yield f"{ours}: {key} is {other.values[key]} instead of {a}"
        known = {**one.tensors, **one.values, **renamed}
        if more := [key for key in {**other.tensors, **other.values} if key not in known]:
            yield f"{ours}: {', '.join(more[:3])} is saved by {many.name} alone"
    if images := {*first.remarks("image"), *many.remarks("image")}:
        yield f"images were not compared: {', '.join(sorted(images))}"
