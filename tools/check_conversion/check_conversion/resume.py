"""Is a run that was killed and started again the run that nobody stopped? It is run whole; killed, by kill -9, at the step
behind a checkpoint; and started again in the folder that it left. Nothing is switched off or reseeded, so the three have
the same bits, and the first difference is the cause."""
import re
import sys
from dataclasses import replace
from pathlib import Path

from check_conversion import outputs, training
from check_conversion.causes import Cause, other_optimizer, other_options, of_the_optimizer
from check_conversion.files import Tensor
from check_conversion.judge import check_start, resumed
from check_conversion.outputs import TABLES, Comparison, Item, Part, items_of_text
from check_conversion.records import KINDS
from check_conversion.running import own_error, prepare, run
from check_conversion.samples import Losses, Relation
from check_conversion.sketch import apart_in, distance, norm, of_tensors
from check_conversion.training import Pair
from check_conversion.verdict import CannotSay, Heading, Verdict, few

NAMES = "the unbroken run", "the restarted one"
SHOWN = 3  # faults
DRIFT = KINDS["figure"].floor / 5  # how far figures may part: they are the same
# What a line or a value is called that may be a time, where there is no second one to tell.
NAMES_A_TIME = re.compile(r"time|elapsed|duration|second|minute|hour|speed|throughput|\btook\b|\beta\b|/s\b|\d\s?m?s\b|\d:\d\d",
                          re.IGNORECASE)
TIME = Part("a time", [])  # in the place of a figure that is not compared


# The three runs.

def check(args, workspace):
    def once(what, **options):
        print(f"{what}: {args.resume}", file=sys.stderr, flush=True)
        return run(args.resume, workspace, args, prepare(workspace, intervene=False, **options))
    return compare(once)


def compare(once):
    """The verdict; once runs the command, with options of records.Settings."""
    whole = once("run 1 of 3")
    check_whole(whole)
    killer, step = where_to_kill(whole)
    killed = once(f"run 2 of 3, killed at step {step}", killer=killer, killed_at=step)
    check_killed(whole, killed, step)
    return judge(whole, killed, once("run 3 of 3, started again", again=killed.settings), step)


def check_whole(whole):
    if whole.waits:
        raise CannotSay(f"{whole.name} itself hangs: {' '.join(whole.waits)}")
    if whole.status:
        raise CannotSay(f"{whole.name} itself fails: {own_error(whole.stderr)}")
    check_start(whole)
    if not whole.ranks:
        raise CannotSay(f"{whole.name} takes no optimizer step{resumed(whole)}")


def where_to_kill(whole):
    """The rank that saves, and the step behind the middle one of its checkpoints, of those that leave all its files there."""
    for process in whole.ranks:
        saved, first = {record.step for record in process.of("saved")}, {}
        wrote = [record for record in process.of("wrote") if record.step in saved and 0 < record.step < len(process.steps)]
        for record in wrote:
            first.setdefault(re.sub(r"\d+", "", record.name), record.step)
        if wrote:
            moments = sorted({record.step for record in wrote if record.step >= max(first.values())})
            return process.rank, moments[(len(moments) - 1) // 2] + 1
    if whole.names("saved"):
        raise CannotSay(f"{whole.name} saves nothing before its last step: let it train longer, or save earlier")
    raise CannotSay(f"{whole.name} saves nothing by torch.save, torch.distributed.checkpoint or safetensors")


def check_killed(whole, killed, step):
    if killed.waits:
        raise CannotSay(f"{whole.name} hangs in its second run: {' '.join(killed.waits)}")
    if fault := first_difference(whole, killed):
        raise CannotSay(f"two runs of {whole.name} differ from step {fault.step} on: {fault.text}. Begin it with "
                        "torch.manual_seed(0), random.seed(0) and numpy.random.seed(0); where GPUs round otherwise each time, "
                        "CUDA_VISIBLE_DEVICES= lets the check run on CPUs")
    if max((len(process.steps) for process in killed.ranks), default=0) < step:
        raise CannotSay(f"{whole.name} ends before step {step} in its second run: {own_error(killed.stderr)}")


# Step by step.

def other_numbers(e):
    """Drawn for this step."""
    one, ours = (step.named("drew") for step in (e.one, e.shares[0]))
    names = [name for name, (state, moved) in one.items()
             if name in ours and ours[name][0] != state and (moved or ours[name][1])]
    return f"other random numbers, by {' and '.join(names)}" if names else ""


def with_numbers(said, e):
    return "; ".join(filter(None, [said, other_numbers(e)]))


def other_weights(e):
    one, ours = e.both("before")
    return e.weights.differs(one, ours) and with_numbers(f"other weights, most in {apart_in(e.names, one, ours)}", e)


def other_samples(e):
    values = "the model is fed values that the unbroken run never feeds it"
    return e.relation not in (Relation.SAME, Relation.UNKNOWN) and with_numbers(
        values if e.relation == Relation.VALUES else "other samples", e)


def other_buffers(e):
    one, ours = (step.named("buffer") for step in (e.one, e.shares[0]))
    return e.pair.buffers.apart(one, one, ours)


CAUSES = [  # as causes.py has them for a conversion
    Cause(None, other_optimizer, "this step is taken by another optimizer", always=True),
    Cause(None, other_weights, "{found}", always=True),
    Cause(None, other_options, "{found}: were the states of the optimizer and its schedule loaded?", always=True),
    Cause(None, lambda e: len({*e.both("scale")}) > 1 and e.both("scale"),
          "GradScaler's scale is {found[1]} instead of {found[0]}: was its state loaded?", always=True),
    Cause(None, other_samples, "{found}"),
    Cause(None, lambda e: e.losses == Losses.OTHER and other_numbers(e), "{found}, for dropout or noise"),
    Cause(None, other_buffers, "{found} differs, which no optimizer holds: was it loaded?"),
    Cause(None, lambda e: e.losses == Losses.OTHER, "another loss; {e.what_differs}"),
    Cause(None, of_the_optimizer, "the gradients agree, the optimizer's step does not: was its state loaded?"),
    Cause(None, lambda e: True, "{e.what_differs}"),
]


def by_rank(whole, other):
    ours = {process.rank: process for process in other.ranks}
    return [(process, ours[process.rank]) for process in whole.ranks if process.rank in ours]


def first_difference(whole, other, step=0):
    """Between both runs from this step on: a Fault, or None."""
    pairs = [Pair(NAMES, process.since(step), None, [ours]) for process, ours in by_rank(whole, other)]
    faults = [training.compare(pair, whole=False, causes=CAUSES).fault for pair in pairs]
    first = min(filter(None, faults), key=lambda fault: fault.step, default=None)
    ranks = [str(rank) for rank, fault in enumerate(faults) if fault == first]
    where = f" (on rank {few(ranks)})" * (len(ranks) < len(faults))
    return first and replace(first, step=step + first.step, text=first.text + where)


def begins_like(whole, restarted):
    """After how many steps the unbroken run had the weights with which a restarted process begins, and those that it had
    not. Of several steps: that from which on as many are left as are taken."""
    first, found = restarted.steps[0], []
    names, eps = restarted.parameters(0).names, restarted.parameters(0).eps
    for k, step in enumerate(whole.steps):
        if step.last("optimizer") == first.last("optimizer"):
            pairs = zip(names, of_tensors(step.last("before")), of_tensors(first.last("before")))
            others = [name for name, a, b in pairs if distance(a, b) > 4 * eps * norm(a)]
            found.append((len(others), abs(len(whole.steps) - k - len(restarted.steps)), k, others))
    _, _, k, others = min(found)
    return k, others


def how_it_goes_on(whole, killed, restarted, step):
    """The step that it goes on from, and what is no longer as it was."""
    pairs = by_rank(whole, restarted)
    if not pairs:
        return None, not restarted.status and f"it takes no step, the unbroken run {len(whole.ranks[0].steps) - step + 1} more"
    begins = {process.rank: begins_like(process, ours) for process, ours in pairs}
    (k, others), taken = begins[min(begins)], {len(ours.steps) for _, ours in pairs}
    left = len(whole.ranks[0].steps) - k
    if len({one for one, _ in begins.values()}) > 1:
        return None, "the ranks begin with different weights: " + ", ".join(
            f"rank {rank} with those of step {one}" for rank, (one, _) in begins.items())
    if k == 0 and not others:
        wrote = [name for name in killed.names("wrote") if name in killed.files]
        return 0, (f"it starts afresh; the killed run has written {few(wrote)}, and the restarted one has read "
                   f"{few(restarted.names('read')) or 'no file by torch.load'}")
    if others:
        return k, ("it begins with weights that the unbroken run has at no step" if len(others) == len(
            restarted.ranks[0].parameters(0).names) else f"it begins with the weights of step {k}, but not in {few(others)}")
    if not restarted.status and taken != {left}:
        return k, (f"it begins with the weights of step {k} and takes {' or '.join(map(str, sorted(taken)))} more steps, "
                   f"the unbroken run {left}")
    fault = first_difference(whole, restarted, k)
    return k, fault and f"step {fault.step}: {fault.text}"


# Printed lines and files.

def lines_of(run):
    """What each rank printed, showed in progress bars and logged."""
    found = {process.rank: "" for process in run.processes} | run.lines
    for process in run.processes:
        lines = [record.value for record in process.of("bar")]
        lines += [f"{record.name} {record.value[0]} for step {record.value[1]}" for record in process.of("figure")]
        found[process.rank] += "\n".join(["", *lines])
    return found


def compare_lines(texts, found, from_the_start=False):
    """The lines that came after the kill, and of each wording as many before as the restarted run has; or all lines. What
    differs between the unbroken run and the killed one is a time."""
    whole, killed, restarted = map(items_of_text, texts)
    expected, again = {}, {}
    for words, items in whole.items():
        seen, ours = killed.get(words, []), restarted.get(words, [])
        times = {place for one, other in zip(items, seen) for place, (a, b) in enumerate(zip(one.parts, other.parts)) if a != b}
        count = len(items) if from_the_start else min(len(items), max(len(ours), len(items) - len(seen)))
        if count:
            expected[words] = items[-count:]
            again[words] = [Item(one.shown, [TIME if place in times or (not seen and NAMES_A_TIME.search(one.shown)) else part
                                             for place, part in enumerate(one.parts)]) for one in items[-count:]]
    found.compare(expected, again, restarted)


def compare_printed(runs):
    found = Comparison("printed", NAMES, DRIFT)
    whole, killed, restarted = map(lines_of, runs)
    for rank in whole:
        compare_lines([whole[rank], killed.get(rank, ""), restarted.get(rank, "")], found)
    return close(found)


def close(found):
    found.say_parted()
    if found.missing:
        found.fault(f"not {found.what} by {NAMES[1]}: {few(found.missing)}", None)
    return found


def compare_file(name, file, killed, restarted):
    found = Comparison("written", NAMES, DRIFT, f"{name}: ")
    if not restarted or restarted.kind != file.kind:
        found.fault(restarted.why or "of another kind" if restarted else f"not there when {NAMES[1]} ends", None)
    elif file.kind == "unread":
        found.remarks.append(f"{name} is not compared: {file.why}")
    elif file.kind == "values":
        again = {key: "a time" if not isinstance(value, Tensor) and NAMES_A_TIME.search(f"{key} {value}") else value
                 for key, value in file.values.items()}
        outputs.compare_values([file.values, again, restarted.values], found)
    else:
        separate = ", " if Path(name).suffix in TABLES else ","
        texts = [one.text.replace(",", separate) if one else "" for one in (file, killed, restarted)]
        compare_lines(texts, found, from_the_start=True)
        close(found)
    return found


def compare_files(runs, step):
    found = Comparison("written", NAMES, DRIFT, noun="file")
    whole, killed, restarted = runs
    later = {record.name for process in whole.processes for record in process.of("wrote") if record.step >= step}
    for name, file in whole.files.items():
        if name in later or name in killed.files:
            inside = compare_file(name, file, killed.files.get(name), restarted.files.get(name))
            found.add(inside)
            found.same += not inside.faults
        else:
            found.varying.append(name)  # it has another name each time
    found.total = len(whole.files)
    return found


# The verdict.

def judge(whole, killed, restarted, step):
    k, fault = how_it_goes_on(whole, killed, restarted, step)
    faults, parts, runs = [fault] * bool(fault), [], (whole, killed, restarted)
    if restarted.waits:
        faults.append("\n  ".join(["it hangs:", *restarted.waits]))
    elif restarted.status:
        faults.append(f"it fails: {own_error(restarted.stderr)}")
    if not faults:
        parts = [compare_printed(runs), compare_files(runs, step)]
        faults = [fault.text.rstrip() for part in parts for fault in part.faults]
    where = f"killed at step {step} of {len(whole.ranks[0].steps)}" + f", resumed from step {k}" * bool(k)
    first = "NOT THE SAME RUN" if faults else "a killed run goes on as if it had never stopped"
    varying = [name for part in parts for name in part.varying]
    return Verdict(int(bool(faults)), [
        f"{first}: {where}", *faults[:SHOWN], *[f"and {len(faults) - SHOWN} more faults"] * (len(faults) > SHOWN),
        *(f"{part.what}: {part.count} the same" for part in parts if part.count),
        *[f"times, and what else differs in each run, are not compared: {few(varying, 1)}"] * bool(varying),
        *(remark for part in parts for remark in part.remarks)])
