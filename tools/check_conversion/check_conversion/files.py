"""Compares what both have left: what torch.save was seen to save, and all other new files.

What differs between the two runs of the original by more than rounding is not compared, and named.
"""
import collections
import re
from pathlib import Path

from check_conversion.buffers import reordered
from check_conversion.distances import LARGE, TIMES, distance, norm
from check_conversion.new_files import NewFile
from check_conversion.outputs import BY_ROUNDING, TOKEN, ZERO, Figures, by_words, compare_texts, few, many
from check_conversion.protocol import About, Remark, Saved
from check_conversion.verdict import Compared, Fault

SETTINGS = {"args", "config", "hparams", "opt", "options", "settings", "param_groups"}
TABLES = ".csv", ".tsv"
DATA = (*TABLES, ".json", ".jsonl", ".yaml", ".yml")  # of which each line with a figure counts


# One file.

def under_other_names(one, other):
    """The original's names of an optimizer's tensors that are there under others: FSDP's optimizer has
    the parameters' names, torch.optim's their numbers."""
    lacking = [name for name in one.tensors if name not in other.tensors and of_optimizer(name, one)]
    more = [name for name in other.tensors if name not in one.tensors and of_optimizer(name, other)]
    shapes = [[save.tensors[name].shape for name in names] for save, names in ((one, lacking), (other, more))]
    return dict(zip(more, lacking)) if lacking and shapes[0] == shapes[1] else {}


def of_optimizer(name, save):
    """Whether it is of an optimizer's state, beside which its groups are saved."""
    found = re.match(r"(|.*?\.)state\.", name)
    return bool(found) and any(key.startswith(f"{found[1]}param_groups.") for key in save.values)


def left_out(saves, in_other_order):
    """Names of what BatchNorm has counted, and of what is said elsewhere to lie in another order."""
    tensors = {name for one in saves for name in one.tensors}
    found = {name for name in tensors if name.endswith("num_batches_tracked")}
    for known in in_other_order:
        same = [name for name in tensors if f".{name}".endswith(f".{known}")]
        found |= {*same} if len(same) == 1 else set()
    return found


def tensor_varies(one, nudged, drift):
    """Whether another run of the original has none like it, or rounding alone moves it by 1%."""
    if nudged is None or nudged.shape != one.shape:
        return True
    return any(distance(a, b) > max(LARGE, BY_ROUNDING * drift) * norm(a) + ZERO
               for a, b in zip(one.sketches, nudged.sketches))


def tensor_differs(one, nudged, other, least):
    """Whether it is further from the original's than rounding explains; least: that may part it."""
    if one.whole and one == nudged:
        return other.sketches != one.sketches
    return any(distance(a, c) > TIMES * distance(a, b) + least * norm(a) + ZERO
               for a, b, c in zip(one.sketches, nudged.sketches, other.sketches))


def is_setting(name, value):
    """What a script was told, not what it found."""
    return isinstance(value, (bool, int, str)) and bool(SETTINGS & {*name.split(".")})


def plain(save):
    return {**save.values, **save.strings}


def strings_of(saves):
    """As lines, which a time may be in, or a figure."""
    return "\n".join(f"{name}: {' '.join(text.split())}" for save in saves for name, text in save.strings.items()
                     if not is_setting(name, text))


def varying_in(one, nudged, judges, drift):
    """Names of what one call of torch.save saves otherwise in each run of the original."""
    return [key for key, tensor in one.tensors.items() if tensor_varies(tensor, nudged.tensors.get(key), drift)] + [
        key for key, a in one.values.items() if not is_setting(key, a)
        and (key not in nudged.values or judges[key].varies(a, nudged.values[key]))]


def compare_save(name, one, nudged, other, judges, drift, varying):
    """One call of torch.save in the original, and its counterpart."""
    if any(f"module.{key}" in other.tensors and key not in other.tensors for key in one.tensors):
        return Fault(f"{name}: the saved names begin with `module.`", "Saving")
    renamed = under_other_names(one, other)
    tensors = {renamed.get(key, key): saved for key, saved in other.tensors.items()}
    missing = [key for key in one.tensors if key not in tensors and key not in varying]
    missing += [key for key in plain(one) if key not in plain(other) and key not in varying]
    if missing:
        return Fault(f"{name}: without {', '.join(missing[:3])}", "Saving")
    for key in one.tensors.keys() - varying:
        if tensors[key].shape != one.tensors[key].shape:
            return Fault(f"{name}: {key} has the shape {tensors[key].shape} instead of {one.tensors[key].shape}", "Saving")
    for key in (key for key in one.tensors if key not in varying):
        # What an optimizer makes of gradients a tie in a pooling layer may part.
        least = LARGE if of_optimizer(key, one) else TIMES * drift
        if tensor_differs(one.tensors[key], nudged.tensors[key], tensors[key], least):
            return Fault(f"{name}: a different {key} is saved", "Saving", measured=True)
    parted = [key for key, a in one.values.items() if not is_setting(key, a) and key not in varying
              and judges[key].differs(a, nudged.values[key], other.values[key])]
    if parted:
        said = ", ".join(f"{other.values[key]:g} instead of {one.values[key]:g}" for key in parted[:3])
        return Fault(f"{name}: a different {', '.join(parted[:3])} is saved: {said}", "Printed figures",
                     measured=True)
    return None


def compare_saves(name, saves, names, drift, in_other_order):
    """All that was saved under one name, in all three runs."""
    judges, found, varying = collections.defaultdict(lambda: Figures(drift)), Compared(), {}
    there = {key for one in saves[0] for key in (*one.tensors, *plain(one))}
    out = left_out(saves[0], in_other_order)
    for one, nudged, other in zip(*saves):
        vary = varying_in(one, nudged, judges, drift)
        varying.update(dict.fromkeys(key for key in vary if key not in out))
        if not found.faults and (fault := compare_save(name, one, nudged, other, judges, drift, {*vary, *out})):
            found.faults.append(fault)
    strings = compare_texts([*map(strings_of, saves)], names, drift, "saved", f"{name}: ", lambda line: True)
    found.faults += strings.faults
    found.remarks += strings.remarks
    if varying:
        found.remarks.append(f"not compared, because {names[0]} saves it differently in each run: {name}: "
                             f"{', '.join(varying)}")
    if unknown := {f"{key} ({kind})" for them in saves for one in them for key, kind in one.unknown.items()}:
        found.remarks.append(f"{name}: not compared: {', '.join(sorted(unknown))}")
    if reordered_here := sorted(key for key in out if not key.endswith("num_batches_tracked")):
        found.remarks.append(f"{name}: the same rows or columns in another order: {', '.join(reordered_here)}")
    found.remarks += more_than_before(name, saves[0][-1], saves[2][-1], names[1])
    found.whole = bool(there - {*varying} - out) or not (there or unknown)
    return found


def more_than_before(name, one, other, script):
    if renamed := under_other_names(one, other):
        yield f"{name}: {', '.join([*renamed.values()][:3])} are saved under other names"
    for key, a in plain(one).items():
        if is_setting(key, a) and (b := plain(other).get(key, a)) != a:
            yield f"{name}: {key} is {b} instead of {a}"
    known = {**one.tensors, **plain(one), **renamed}
    if more := [key for key in {**other.tensors, **plain(other)} if key not in known]:
        yield f"{name}: {', '.join(more[:3])} is saved by {script} alone"


def compare_text(name, texts, names, drift):
    suffix = Path(name).suffix
    if suffix in TABLES:
        texts = [text.replace(",", ", ") for text in texts]  # 2,100 are two figures
    needed = TOKEN.search if suffix in DATA else lambda line: False
    return compare_texts(texts, names, drift, "written", f"{name}: ", needed)


# All files.

def saved_by(run):
    """By their names: what each call of torch.save saved, and in which rank."""
    found = collections.defaultdict(list)
    for process in run.processes:
        for save in process.of(Saved):
            found[save.path].append((process.rank, NewFile("saved", saved=save)))
    return found


def left_by(run, other):
    """By their names: new files, but those that torch.save was seen to write under these names; where
    the other script has one of them by a copy or under its last name, the files are compared."""
    noted, noted_there, ranks = saved_by(run), saved_by(other), {}
    for process in run.processes:
        for remark in process.of(Remark):
            if remark.about == About.WRITTEN:
                ranks.setdefault(remark.name, set()).add(process.rank)
    return {name: [(rank, one) for rank in sorted(ranks.get(name, {0}))]
            for name, one in run.new_files.items()
            if name not in noted or (name in other.new_files and name not in noted_there)}


def pair(found, others):
    """Files of the same name; then those of the same words or tensors; then those of the same kind and
    ending, in their order. What torch.save has saved may have any ending, for it may be renamed."""
    def inside(name, one):
        return {*by_words(one.text)} if one.kind == "text" else one.saved and {*one.saved.tensors}

    def kind(name, one):
        return one.kind if one.kind == "saved" else (one.kind, Path(name).suffix)
    both = {name: name for name in found if name in others}
    for same in (lambda *one: (kind(*one), inside(*one)), kind):
        rest = [name for name in others if name not in both.values()]
        for name in (name for name in found if name not in both):
            alike = [one for one in rest if same(one, others[one][0][1]) == same(name, found[name][0][1])]
            if alike:
                both[name] = alike[0]
                rest.remove(alike[0])
    return both


def compare_contents(name, three, names, drift, in_other_order):
    """What was left under one name in all three runs."""
    if three[0][0].kind == "saved":
        saves = [[one.saved for one in them] for them in three]
        return compare_saves(name, saves, names, drift, in_other_order)
    return compare_text(name, [them[0].text for them in three], names, drift)


def compare_left(three, names, drift, verb, in_other_order):
    """What was left under all names: of each run the files, by their names, each with its rank."""
    found, of_nudged, others = three
    in_both, in_nudged = pair(found, others), pair(found, of_nudged)
    same, faults, remarks, varying, unread = [], [], [], [], []
    for name, ours in in_both.items():
        contents = [[one for _, one in them] for them in (
            found[name], of_nudged.get(in_nudged.get(name), []), others[ours])]
        kinds = [{one.kind for one in them} for them in contents]
        ranks = sorted({rank for rank, _ in others[ours]})
        if len(ranks) > 1 and len({rank for rank, _ in found[name]}) == 1:
            faults.append(Fault(f"{ours} is {verb} by ranks {' and '.join(map(str, ranks))}", "Saving"))
        elif len(contents[0]) != len(contents[1]) or kinds[0] != kinds[1]:
            varying.append(name)
        elif len(contents[0]) != len(contents[2]):
            faults.append(Fault(f"{ours} is {verb} {len(contents[2])} times instead of {len(contents[0])}", "Decisions"))
        elif unreadable := [one for one in (contents[2][0], contents[0][0]) if one.kind == "unread"]:
            unread.append(f"{ours} ({unreadable[0].why})")
        elif kinds[0] != kinds[2]:
            faults.append(Fault(f"{ours} is of kind {contents[2][0].kind} instead of {contents[0][0].kind}", "Saving"))
        else:
            compared = compare_contents(ours, contents, names, drift, in_other_order)
            faults += compared.faults
            remarks += compared.remarks
            same += [ours] * len(contents[0]) * (compared.whole and not compared.faults)
        if name != ours and name in of_nudged:  # if it is not there, its name varies
            remarks.append(f"{ours} was compared with {name}")
            faults += compare_texts([name, name, ours], names, drift, "named").faults
    if missing := [name for name in found if name not in in_both]:
        faults.append(Fault(f"not {verb} by {names[1]}: {', '.join(missing)}", "Saving"))
    if more := [name for name in others if name not in in_both.values()]:
        remarks.append(f"{verb} by {names[1]} alone: {', '.join(more)}")
    if varying:
        remarks.append(f"not compared, because {names[0]} has it differently in each run: {', '.join(varying)}")
    if unread:
        remarks.append(f"not read: {', '.join(unread)}")
    said = f"{many(len(same), 'file')} the same: {', '.join(dict.fromkeys(same))}" if same else ""
    return Compared(said, "", *few(faults, remarks)), same


def compare_saved(original, nudged, converted, drift):
    in_other_order = reordered(original, nudged, converted)
    three = [*map(saved_by, (original, nudged, converted))]
    found, same = compare_left(three, (original.name, converted.name), drift, "saved", in_other_order)
    found.count = many(len(same), "save")
    if not three[0]:
        found.said = "nothing by torch.save"
    return found


def spoiled(original, converted):
    """Names of files that torch.save was seen to write in both, and that are gone or broken at the end of one."""
    both = saved_by(original).keys() & saved_by(converted).keys() & original.new_files.keys()
    return [name for name in sorted(both) if name not in converted.new_files
            or converted.new_files[name].kind != original.new_files[name].kind]


def compare_new_files(original, nudged, converted, drift):
    three = left_by(original, converted), left_by(nudged, converted), left_by(converted, original)
    found, same = compare_left(three, (original.name, converted.name), drift, "written",
                               reordered(original, nudged, converted))
    found.faults += [Fault(f"{name} is gone or broken when {converted.name} ends", "Saving")
                     for name in spoiled(original, converted)]
    kinds = collections.Counter(Path(name).suffix.removeprefix(".") or "file" for name in same)
    found.count = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return found
