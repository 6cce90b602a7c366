"""What both printed, logged for TensorBoard or wandb, and saved by torch.save.

What differs between the two runs of the original by more than rounding is a time, an address or the
like: it is not compared. All else has to be the same, as far as rounding moves it.
"""
import collections
import re

from check_conversion.buffers import reordered
from check_conversion.distances import LARGE, TIMES, distance, norm
from check_conversion.protocol import About, Bar, Logged, Saved
from check_conversion.verdict import Compared, Fault

NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?|\b(?:nan|inf)\b)"
# What a line may have in a figure's place: also 3/50, 12ms, 0:01:22, 2026-01-31, 0x7f12ab.
TOKEN = r"[-+]?(?:\d(?:[\w.]|[:/+-](?=\d)|,(?=\d{3}(?!\d)))*|\b(?:nan|inf)\b)"
BY_ROUNDING = 100  # times as far as the weights; further apart in the original is no rounding
SHOWN = 3  # faults of a kind that are shown in full


class Figures:
    """Judges figures of the same place in their order."""

    def __init__(self, drift):
        self.drift, self.largest = drift, 0.0

    def varies(self, original, nudged, unit=0.0):
        """Whether it moves by more than rounding when the original runs again."""
        return distance([original], [nudged]) > unit + BY_ROUNDING * self.drift * norm([original])

    def parts(self, original, nudged, converted, unit=0.0):
        """Whether the converted script's is another figure."""
        if original == nudged and isinstance(original, int):  # a count, which is never rounded
            return converted != original
        self.largest = max(self.largest, distance([original], [nudged]))
        allowed = unit + TIMES * max(self.largest, self.drift * norm([original]))
        return distance([original], [converted]) > allowed


# What was printed: lines of the same words, in their order.

def value(figure):
    figure = figure.replace(",", "")
    return int(figure) if re.fullmatch(r"[-+]?\d+", figure) else float(figure)


def last_digit(figure):
    """A printed number may differ by one in its last digit."""
    mantissa, _, exponent = figure.lower().partition("e")
    digits = len(mantissa.partition(".")[2])
    return 1.01 * 10.0 ** (int(exponent or 0) - digits) if digits or exponent else 0


def by_words(text):
    """Lines without their figures, and of each its lines with them."""
    found = collections.defaultdict(list)
    for line in text.splitlines():
        if words := " ".join(re.sub(TOKEN, "#", line).split()):
            found[words].append((line.strip(), re.findall(TOKEN, line)))
    return found


def around(token):
    return re.sub(NUMBER, "#", token)


def token_varies(token, nudged, drift):
    if around(token) != around(nudged):
        return True
    figures = zip(*(re.findall(NUMBER, one) for one in (token, nudged)))
    return any(Figures(drift).varies(value(a), value(b), last_digit(a)) for a, b in figures)


def token_parts(judges, token, nudged, other):
    if token == other:
        return False
    if around(token) != around(other):
        return True
    figures = zip(*(re.findall(NUMBER, one) for one in (token, nudged, other)))
    return any(judges[place].parts(value(a), value(b), value(c), last_digit(a))
               for place, (a, b, c) in enumerate(figures))


def counterpart(words, converted):
    """The converted script's line of these words, or one that has a few more."""
    if words in converted or "#" not in words:
        return words
    return next((other for other in converted if words in other), words)


def compare_group(lines, nudged_lines, others, drift):
    """Of lines of the same words: those that part, and those with something that varies."""
    parted, varying = {}, {}
    for place in range(len(lines[0][1])):
        judges = collections.defaultdict(lambda: Figures(drift))
        from_end = len(lines[0][1]) - place  # where more words stand before it, so may figures
        rows = [(one[place], nudged[place], other[-from_end])
                for (_, one), (_, nudged), (_, other) in zip(lines, nudged_lines, others)]
        moved = [token_varies(one, nudged, drift) for one, nudged, _ in rows]
        if 2 * sum(moved) > len(rows):  # a time, where it is too short to be seen too
            moved = [True] * len(rows)
        for k, (row, varies) in enumerate(zip(rows, moved)):
            if varies:
                varying.setdefault(k, lines[k][0])
            elif token_parts(judges, *row):
                parted[k] = lines[k][0], others[k][0]
    return [*parted.values()], [*varying.values()]


def compare_texts(texts, names, drift, verb="printed"):
    """Texts of the original's two runs and of the converted script's; names: of both scripts."""
    original, nudged, converted = map(by_words, texts)
    same, faults, parted, missing, varying, other_words = 0, [], [], [], [], []
    for words, lines in original.items():
        others = converted.get(counterpart(words, converted), [])
        if len(nudged[words]) != len(lines):
            other_words += [line for line, _ in lines]
        elif not others:
            missing += [line for line, _ in lines]
        elif len(others) != len(lines):
            heading = "Printed by all ranks" if len(others) > len(lines) else "Printed figures"
            faults.append(Fault(f"{verb} {len(others)} times instead of {len(lines)}: "
                                f"{lines[0][0]}", heading))
        else:
            different, vary = compare_group(lines, nudged[words], others, drift)
            parted, varying = parted + different, varying + vary
            same += len(lines) - len(different)
    if parted:
        shown = "".join(f"\n  {names[0]}: {a}\n  {names[1]}: {b}" for a, b in parted[:SHOWN])
        more = f"\n  and {many(len(parted) - SHOWN, 'more line')}" * (len(parted) > SHOWN)
        faults.append(Fault(f"{verb} differently:{shown}{more}\n ", "Printed figures", measured=True))
    figures = [line for line in missing if re.search(TOKEN, line)]
    if figures and not same and not parted and not any("#" in words for words in converted):
        faults.append(Fault(f"{verb} by {names[1]}: none of the {many(len(figures), 'line')} with figures "
                            f"of {names[0]}", "Printed figures"))
        missing = []
    total = sum(map(len, original.values()))
    remarks = [named(f"not {verb} by {names[1]} in these words", missing),
               named(f"not compared, because {names[0]} has different lines in each run",
                     other_words),
               named("compared except for what differs in each run, such as a time", varying)]
    said = (f"{same} of {total} lines the same" if total else
            f"{names[0]} prints no line" if converted else "no line by either")
    count = (f"{same} of {total} lines" if same < total else many(total, "line")) if total else ""
    return Compared(said, count, faults[:SHOWN], [*filter(None, remarks)])


def many(count, what):
    return f"{count} {what}{'s' * (count != 1)}" if count else ""


def named(what, lines):
    more = f" (and {many(len(lines) - 1, 'more line')})" * (len(lines) > 1)
    return f"{what}: {lines[0]}{more}" if lines else ""


def compare_lines(original, nudged, converted, drift):
    return compare_texts([run.stdout for run in (original, nudged, converted)],
                         (original.name, converted.name), drift)


def compare_errors(original, nudged, converted, drift):
    """What the scripts' own lines wrote to stderr, where loggers write."""
    texts = [run.errors for run in (original, nudged, converted)]
    if not any(texts):
        return Compared()
    found = compare_texts(texts, (original.name, converted.name), drift, "written to stderr")
    found.count += " on stderr" * bool(found.count)
    return found


def compare_bars(original, nudged, converted, drift):
    """The last state of each of tqdm's."""
    texts = ["\n".join(bar.state for process in run.processes for bar in process.of(Bar))
             for run in (original, nudged, converted)]
    if not any(texts):
        return Compared()
    found = compare_texts(texts, (original.name, converted.name), drift, "shown in a progress bar")
    found.said, found.count = (text.replace("line", "progress bar") for text in (found.said, found.count))
    return found


# What was logged: figures of the same name, in their order.

def logged(run):
    found = collections.defaultdict(list)
    for process in run.processes:
        for figure in process.of(Logged):
            found[figure.to, figure.name].append(figure.value)
    return found


def compare_logged(original, nudged, converted, drift):
    found, of_nudged, others = map(logged, (original, nudged, converted))
    same, faults, varying = collections.Counter(), [], []
    for (to, name), figures in found.items():
        nudged_ones, ours, judge = of_nudged[to, name], others[to, name], Figures(drift)
        if len(nudged_ones) != len(figures):
            varying.append(f"{to}: {name}")
            continue
        if len(ours) != len(figures):
            heading = "Printed by all ranks" if len(ours) > len(figures) else "Printed figures"
            faults.append(Fault(f"{to}: {name} is logged {len(ours)} times instead of "
                                f"{len(figures)}", heading))
            continue
        moved = [judge.varies(a, b) for a, b in zip(figures, nudged_ones)]
        if any(moved):
            some = f" ({sum(moved)} of {len(figures)})"
            varying.append(f"{to}: {name}{some * (2 * sum(moved) <= len(figures))}")
        if 2 * sum(moved) > len(figures):
            continue
        parted = [(a, c) for a, b, c, varies in zip(figures, nudged_ones, ours, moved)
                  if not varies and judge.parts(a, b, c)]
        if parted:
            faults.append(Fault(f"{to}: {name} is {parted[0][1]:.6g} instead of "
                                f"{parted[0][0]:.6g}", "Printed figures", measured=True))
        same[to] += len(figures) - sum(moved) - len(parted)
    said = "; ".join(f"{to}: {count} figures the same" for to, count in same.items())
    remark = named(f"not compared, because {original.name} logs different values in each run", varying)
    return Compared(said, many(sum(same.values()), "logged figure"), faults[:SHOWN],
                    [remark] if remark else [])


# What was saved by torch.save.

def saves_of(run):
    found = collections.defaultdict(list)
    for process in run.processes:
        for save in process.of(Saved):
            found[save.path].append((process.rank, save))
    return found


def pair(found, others):
    """Files of the same name, then the others, in their order."""
    both = [name for name in found if name in others]
    unpaired = [[name for name in names if name not in both] for names in (found, others)]
    return {name: name for name in both} | dict(zip(*unpaired))


def under_other_names(one, other):
    """The original's names of the tensors that are there under others: FSDP's optimizer has the
    parameters' names, torch.optim's their numbers."""
    lacking = [name for name in one.tensors if name not in other.tensors]
    more = [name for name in other.tensors if name not in one.tensors]
    shapes = [[tensors[name][0] for name in names]
              for tensors, names in ((one.tensors, lacking), (other.tensors, more))]
    return dict(zip(more, lacking)) if lacking and shapes[0] == shapes[1] else {}


def left_out(name, in_other_order):
    """What BatchNorm has counted, and what is said elsewhere to lie in another order."""
    return any(f".{name}".endswith(f".{known}") for known in ("num_batches_tracked", *in_other_order))


def tensor_varies(name, one, nudged, drift):
    """Whether another run of the original has none like it, or rounding alone moves it by 1%."""
    if name not in nudged.tensors or nudged.tensors[name][0] != one.tensors[name][0]:
        return True
    numbers = one.tensors[name][1]
    return distance(numbers, nudged.tensors[name][1]) > max(LARGE, BY_ROUNDING * drift) * norm(numbers)


def tensor_parts(name, one, nudged, tensors, drift):
    """Whether it is further from the original's than rounding explains."""
    numbers = one.tensors[name][1]
    allowed = TIMES * max(distance(numbers, nudged.tensors[name][1]), drift * norm(numbers))
    if ".state." in name:  # an optimizer's: of gradients, which a tie in a pooling layer parts
        allowed = max(allowed, LARGE * norm(numbers))
    return distance(numbers, tensors[name][1]) > allowed


def is_setting(name, value):
    """What a script was told, not what it found."""
    return isinstance(value, bool) or (isinstance(value, (int, str)) and bool(
        {"args", "config", "hparams", "opt", "options", "settings"} & {*name.split(".")}))


def plain(save):
    return {**save.values, **save.strings}


def strings_of(saves):
    """As lines, which a time may be in, or a figure."""
    return "\n".join(f"{name}: {' '.join(text.split())}" for save in saves for name, text in save.strings.items()
                     if not is_setting(name, text))


def varying_in(one, nudged, judges, drift):
    """Names of what one call of torch.save saves otherwise in each run of the original."""
    return [key for key in one.tensors if tensor_varies(key, one, nudged, drift)] + [
        key for key, a in one.values.items() if not is_setting(key, a)
        and (key not in nudged.values or judges[key].varies(a, nudged.values[key]))]


def compare_save(name, one, nudged, other, judges, drift, varying):
    """One call of torch.save in the original, and its counterpart."""
    ours = {**other.tensors, **other.values}
    if any("module." in key for key in ours) and not any(
            "module." in key for key in {**one.tensors, **one.values}):
        return Fault(f"{name}: the saved names begin with `module.`", "Saving")
    renamed = under_other_names(one, other)
    tensors = {renamed.get(key, key): saved for key, saved in other.tensors.items()}
    missing = [key for key in one.tensors if key not in tensors]
    missing += [key for key in plain(one) if key not in plain(other)]
    if missing:
        return Fault(f"{name}: {', '.join(missing[:3])} is not saved", "Saving")
    for key, (shape, _) in one.tensors.items():
        if tensors[key][0] != shape:
            return Fault(f"{name}: {key} is saved with a different shape", "Saving")
    for key in one.tensors:
        if key not in varying and tensor_parts(key, one, nudged, tensors, drift):
            return Fault(f"{name}: a different {key} is saved", "Saving", measured=True)
    parted = [key for key, a in one.values.items() if not is_setting(key, a) and key not in varying
              and judges[key].parts(a, nudged.values[key], other.values[key])]
    if parted:
        said = ", ".join(f"{other.values[key]:g} instead of {one.values[key]:g}" for key in parted)
        return Fault(f"{name}: a different {', '.join(parted)} is saved: {said}", "Printed figures",
                     measured=True)
    return None


def compare_saves(name, saves, names, drift, in_other_order=()):
    """Calls of torch.save under one name, in all three runs: faults, what varies, remarks, and
    whether anything was compared."""
    judges, faults, varying = collections.defaultdict(lambda: Figures(drift)), [], {}
    there = {key for one in saves[0] for key in (*one.tensors, *plain(one))}
    out = {key for key in there if left_out(key, in_other_order)}
    for one, nudged, other in zip(*saves):
        vary = varying_in(one, nudged, judges, drift)
        faults.append(compare_save(name, one, nudged, other, judges, drift, {*vary, *out}))
        varying.update(dict.fromkeys(key for key in vary if key not in out))
    strings = compare_texts([*map(strings_of, saves)], names, drift, f"{name}: saved")
    unknown = {f"{key} ({kind})" for them in saves for one in them for key, kind in one.unknown.items()}
    remarks = [*strings.remarks, *([f"{name}: not compared: {', '.join(sorted(unknown))}"] if unknown else [])]
    compared = bool(there - {*varying} - out) or not (there or unknown)
    faults = [fault for fault in faults if fault][:1] + strings.faults
    return faults, [f"{name}: {key}" for key in varying], remarks, compared


def compare_saved(original, nudged, converted, drift):
    found, of_nudged, others = map(saves_of, (original, nudged, converted))
    in_both, in_nudged = pair(found, others), pair(found, of_nudged)
    same, faults, remarks, varying = [], [], [], []
    if in_other_order := reordered(original, nudged, converted):
        remarks.append(f"the same rows or columns in another order: {', '.join(sorted(in_other_order))}")
    for name, ours in in_both.items():
        saves, nudged_saves = ([save for _, save in them] for them in (
            found[name], of_nudged.get(in_nudged.get(name), [])))
        if len(nudged_saves) != len(saves):
            remarks.append(f"{name} was not compared: another run of {original.name} saves it "
                           f"{len(nudged_saves)} times instead of {len(saves)}")
        elif len({rank for rank, _ in others[ours]}) > 1:
            faults.append(Fault(f"{ours} is saved by more than one rank", "Saving"))
        elif len(others[ours]) != len(saves):
            faults.append(Fault(f"{ours} is saved {len(others[ours])} times instead of "
                                f"{len(saves)}", "Decisions"))
        else:
            parted, vary, said, compared = compare_saves(
                ours, (saves, nudged_saves, [save for _, save in others[ours]]),
                (original.name, converted.name), drift, in_other_order)
            same += [name] * len(saves) * (compared and not parted)
            faults += parted
            remarks += said
            varying += vary
    if varying:
        remarks.append(f"not compared, because {original.name} saves it differently in each run: "
                       f"{', '.join(varying)}")
    if missing := [name for name in found if name not in in_both]:
        faults.append(Fault(f"{len(others)} files are saved instead of {len(found)}; missing: "
                            f"{', '.join(missing)}", "Saving"))
    remarks += more_than_before(found, others, in_both, converted.name)
    if images := {*original.remarks(About.IMAGE), *converted.remarks(About.IMAGE)}:
        remarks.append(f"images were not compared: {', '.join(sorted(images))}")
    said = f"{many(len(same), 'file')} the same: {', '.join(dict.fromkeys(same))}"
    return Compared(said if same else "nothing by torch.save" if not found else "",
                    many(len(same), "save"), faults[:SHOWN], remarks)


def more_than_before(found, others, in_both, name):
    if more := [ours for ours in others if ours not in in_both.values()]:
        yield f"{', '.join(more)}: saved by {name} alone"
    for one_name, ours in in_both.items():
        one, other = found[one_name][0][1], others[ours][0][1]
        if renamed := under_other_names(one, other):
            yield f"{ours}: {', '.join([*renamed.values()][:3])} are saved under other names"
        for key, a in plain(one).items():
            if is_setting(key, a) and (b := plain(other).get(key, a)) != a:
                yield f"{ours}: {key} is {b} instead of {a}"
        known = {**one.tensors, **plain(one), **renamed}
        if more := [key for key in {**other.tensors, **plain(other)} if key not in known]:
            yield f"{ours}: {', '.join(more[:3])} is saved by {name} alone"
