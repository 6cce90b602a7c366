"""Is a run that was killed and started again the run that nobody stopped? It is run whole; killed, by kill -9, at the step
behind a checkpoint; and started again in the folder that it left. Nothing is switched off or reseeded, so the three have
the same bits, and the first difference is the cause."""
import collections
import re
import sys
from dataclasses import replace
from pathlib import Path

from check_conversion import outputs
from check_conversion.causes import Cause, other_optimizer, other_options, of_the_optimizer
from check_conversion.files import File, Tensor
from check_conversion.judge import check_start, resumed
from check_conversion.measure import apart_in, distance, norm, of_tensors
from check_conversion.outputs import TABLES, TOKEN, Comparison, items_of_text
from check_conversion.records import KINDS
from check_conversion.running import own_error, prepare, run
from check_conversion.samples import Losses, Relation
from check_conversion.training import Pair, compare
from check_conversion.verdict import CannotSay, Heading, Verdict, few

NAMES = "the unbroken run", "the restarted one"
SHOWN = 3  # faults
# What a line or a value is called that may be a time, where there is no second one to tell.
TIME = re.compile(r"time|elapsed|duration|second|minute|hour|speed|throughput|\btook\b|\beta\b|/s\b|\d\s?m?s\b|\d:\d\d",
                  re.IGNORECASE)
VARYING = "1e300"  # in the place of a figure that is not compared


# The three runs.

def check(args, workspace):
    def once(what, **options):
        print(f"{what}: {args.resume}", file=sys.stderr, flush=True)
        settings = prepare(workspace, intervene=False, **options)
        return settings, run(args.resume, workspace, args, settings)
    _, whole = once("run 1 of 3")
    check_whole(whole)
    killer, step = where_to_kill(whole)
    settings, killed = once(f"run 2 of 3, to be killed at step {step}", killer=killer, killed_at=step)
    check_killed(whole, killed)
    _, restarted = once("run 3 of 3, started again", again=settings)
    return judge(whole, killed, restarted, step)


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
    what = "saves only after its last step" if whole.names("saved") else "saves nothing that the check sees"
    raise CannotSay(f"{whole.name} {what}: to be killed and started again, it must save before, by torch.save, "
                    "torch.distributed.checkpoint or safetensors; let it train longer or save earlier")


def check_killed(whole, killed):
    if killed.waits:
        raise CannotSay(f"{whole.name} hangs in its second run: {' '.join(killed.waits)}")
    if fault := first_difference(whole, killed):
        raise CannotSay(f"two runs of {whole.name} differ from step {fault.step} on: {fault.text}. Begin it with "
                        "torch.manual_seed(0), random.seed(0) and numpy.random.seed(0); where GPUs round otherwise each time, "
                        'CUDA_VISIBLE_DEVICES="" lets the check run on CPUs')


# Step by step.

def numbers(e):
    """Generators that are not in the state in which the unbroken run has them."""
    ours = e.shares[0].named("drew")
    return " and ".join(name for name, (state, _) in e.one.named("drew").items() if ours.get(name, (state,))[0] != state)


def other_samples(e):
    """And which random numbers may have chosen them."""
    return e.relation not in (Relation.SAME, Relation.UNKNOWN) and (
        ("the model is fed values that the unbroken run never has" if e.relation == Relation.VALUES else "other samples")
        + f", and other random numbers, by {numbers(e)}" * bool(numbers(e)))


def other_weights(e):
    one, ours = e.both("before")
    return e.weights.differs(one, ours) and apart_in(e.names, one, ours)


def other_buffers(e):
    one = e.one.named("buffer")
    return e.pair.buffers.apart(one, one, e.shares[0].named("buffer"))


CAUSES = [Cause(Heading.SAVING, *row, always=always) for always, *row in (
    (True, other_optimizer, "this step is taken by another optimizer"),
    (True, other_weights, "other weights, most in {found}"),
    (True, other_options, "{found}"),
    (True, lambda e: len({*e.both("scale")}) > 1 and e.both("scale"),
     "GradScaler's scale is {found[1]} instead of {found[0]}: was its state loaded?"),
    (False, other_samples, "{found}"),
    (False, lambda e: e.losses == Losses.OTHER and any(name in numbers(e) for name in e.draws) and numbers(e),
     "{e.known}, but other random numbers, by {found}, for dropout or noise"),
    (False, other_buffers, "{found} differs, which no optimizer holds: was it loaded?"),
    (False, lambda e: e.losses == Losses.OTHER, "{e.known}, but another loss; {e.what_differs}"),
    (False, of_the_optimizer, "the gradients agree, the optimizer's step does not: was its state loaded?"),
    (False, lambda e: True, "{e.known}; {e.what_differs}"))]


def first_difference(whole, other, step=0):
    """Of both runs from this step on, or None."""
    found = []
    for process, ours in by_rank(whole, other):
        agree = compare(Pair(NAMES, process.since(step), None, [ours]), whole=False, causes=CAUSES)
        found += [(agree.fault.step, process.rank, agree.fault)] if agree.fault else []
    if not found:
        return None
    first, rank, fault = min(found)
    everywhere = len({one.text for number, _, one in found if number == first}) == 1 and len(found) == len(whole.ranks)
    return replace(fault, step=step + first, text=fault.text + f" (rank {rank})" * (not everywhere))


def by_rank(whole, other):
    ours = {process.rank: process for process in other.ranks}
    return [(process, ours[process.rank]) for process in whole.ranks if process.rank in ours]


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
        return None, f"it takes no step, the unbroken run {len(whole.ranks[0].steps) - step + 1} more"
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

def words_of(line):
    return next(iter(items_of_text(line)), "")


def counts(text):
    return collections.Counter(map(words_of, text.splitlines()))


def last_lines(text, count):
    """Of each wording so many."""
    more, kept = counts(text), []
    for line in text.splitlines():
        words = words_of(line)
        if more[words] <= count[words]:
            kept.append(line)
        more[words] -= 1
    return "\n".join(kept)


def without_times(text, whole, killed):
    """The text with another figure where the killed run's lines of this wording differ from those of the unbroken run; where
    it has none, in lines that name a time."""
    varying, seen = set(), items_of_text(killed)
    for words, items in items_of_text(whole).items():
        for one, other in zip(items, seen.get(words, [])):
            varying |= {(words, place) for place, parts in enumerate(zip(one.parts, other.parts)) if len({*map(str, parts)}) > 1}

    def change(line):
        words, places = words_of(line), iter(range(len(line)))
        time = words not in seen and TIME.search(line)
        return TOKEN.sub(lambda token: VARYING if (words, next(places)) in varying or time else token[0], line)
    return "\n".join(map(change, text.splitlines()))


def compare_lines(what, texts):
    """Of each rank the lines that come after the kill, and as many before as the restarted run prints."""
    both = [], [], []
    for rank, whole in texts[0].items():
        killed, restarted = (text.get(rank, "") for text in texts[1:])
        all_of_them, before, ours = map(counts, (whole, killed, restarted))
        tail = last_lines(whole, ours | (all_of_them - before))
        for text, more in zip(both, (tail, without_times(tail, whole, killed), last_lines(restarted, {**ours, **all_of_them}))):
            text.append(more)
    return outputs.compare_text(["\n".join(text) for text in both], Comparison(what, NAMES, KINDS["figure"].floor / 5))


def figures_of(run):
    return {process.rank: "\n".join(f"{record.name} {record.value[0]!r} for step {record.value[1]}" for record in process.of("figure"))
            for process in run.processes}


def bars_of(run):
    return {process.rank: "\n".join(record.value for record in process.of("bar")) for process in run.processes}


def file_without_times(name, file, killed):
    if file.kind == "text":
        texts = [text.replace(",", ", ") if Path(name).suffix in TABLES else text for text in (file.text, killed.text)]
        return replace(file, text=without_times(texts[0], *texts))
    return replace(file, values={key: VARYING if TIME.search(f"{key} {value}") and not isinstance(value, Tensor) else value
                                 for key, value in file.values.items()})


def compare_files(whole, killed, restarted, step):
    """Those whose names are other ones in each run are not compared."""
    later = {record.name for process in whole.processes for record in process.of("wrote") if record.step >= step}
    again = {name: file_without_times(name, file, killed.files.get(name, File("text"))) for name, file in whole.files.items()
             if name in killed.files or name in later}
    return outputs.compare_files(whole, replace(whole, files=again), restarted, Comparison(
        "written", NAMES, KINDS["figure"].floor / 5))


# The verdict.

def judge(whole, killed, restarted, step):
    k, fault = how_it_goes_on(whole, killed, restarted, step)
    faults, parts, runs = [fault] * bool(fault), [], (whole, killed, restarted)
    if restarted.waits:
        faults.append("\n  ".join(["it hangs:", *restarted.waits]))
    elif restarted.status:
        faults.append(f"it fails: {own_error(restarted.stderr)}")
    if not faults:
        parts = [compare_lines("printed", [one.texts["stdout"] for one in runs]),
                 compare_lines("written to stderr", [one.texts["errors"] for one in runs]),
                 compare_lines("shown in progress bars", [*map(bars_of, runs)]),
                 compare_lines("logged", [*map(figures_of, runs)]), compare_files(*runs, step)]
        faults = [fault.text for part in parts for fault in part.faults]
    where = f"killed at step {step} of {len(whole.ranks[0].steps)}" + f", resumed from step {k}" * bool(k)
    first = "NOT THE SAME RUN" if faults else "a killed run goes on as if it had never stopped"
    varying = [name for part in parts for name in part.varying]
    return Verdict(int(bool(faults)), [
        f"{first}: {where}", *faults[:SHOWN], *[f"and {len(faults) - SHOWN} more faults"] * (len(faults) > SHOWN),
        *(f"{part.what}: {part.count} the same" for part in parts if part.count),
        *[f"not compared, because it is a time or differs in each run: {few(varying)}"] * bool(varying),
        *(remark for part in parts for remark in part.remarks)])
