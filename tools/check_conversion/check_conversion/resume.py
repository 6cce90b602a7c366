"""Is a run that was killed and started again the run that nobody stopped? The command is run to its end; in another
copy of the folder until it is killed, at the step after a checkpoint; and once more in that copy. Nothing is switched
off or seeded, so all three have the same bits, and the first difference is the cause."""
import collections
import itertools
import re
from dataclasses import replace

from check_conversion import outputs
from check_conversion.causes import of_the_optimizer, other_options
from check_conversion.files import File, Tensor
from check_conversion.judge import check_measure, how_it_ended
from check_conversion.outputs import TOKEN, items_of_text
from check_conversion.records import FLOORS
from check_conversion.running import own_error
from check_conversion.samples import Losses, Relation
from check_conversion.sketch import apart_in, distance, norm, of_tensors
from check_conversion.training import Pair
from check_conversion.verdict import CannotSay, few, say

NAMES = "the unbroken run", "the restarted one"
DRIFT = FLOORS["figure"] / 5  # how far figures may part: they are the same
# A figure is a time by its form, or by the words before or after it: also where the killed run has no second one.
CLOCK = re.compile(r"\d:\d|\d{4}-\d\d|\d(ms|s)$")
BEFORE = re.compile(r"(?i)(?<![a-z])((run)?time|elapsed|duration|seconds?|sec|speed|throughput|fps|took)(?![a-z])"
                    r"\w*\W{0,3}$")
AFTER = re.compile(r"(?i) ?(m?s|secs?|seconds?|min|minutes?|hours?|\w*/s)\b")
ANOTHER = "0time"  # in the place of a figure that is not compared


# The three runs.

def check_resuming(once):
    """The verdict; once runs the command, with options of records.Settings."""
    unbroken = once()
    check_measure(unbroken)
    killer, step = where_to_kill(unbroken)
    killed = once(killer=killer, killed_at=step)
    check_killed(unbroken, killed, step)
    return judge(unbroken, killed, once(again=killed.settings), step)


def where_to_kill(unbroken):
    """The rank that saves, and the step after its middle checkpoint; not before each file that it saves is there."""
    for process in unbroken.ranks:
        saved = {record.step for record in process.of("saved")} & {*range(1, len(process.steps))}
        wrote = [record for record in process.of("wrote") if record.step in saved]
        first = {re.sub(r"\d+", "", record.name): record.step for record in reversed(wrote)}
        if wrote:
            moments = sorted({record.step for record in wrote if record.step >= max(first.values())})
            return process.rank, moments[(len(moments) - 1) // 2] + 1
    if unbroken.names("saved"):
        raise CannotSay(f"{unbroken.name} saves nothing before its last step: let it train longer, or save earlier")
    raise CannotSay(f"{unbroken.name} saves nothing by torch.save, torch.distributed.checkpoint or safetensors")


def check_killed(unbroken, killed, step):
    if killed.waits:
        raise CannotSay(f"{unbroken.name} hangs in its second run: {' '.join(killed.waits)}")
    if found := first_difference(unbroken, killed):
        raise CannotSay(f"two runs of {unbroken.name} differ from step {found[0]} on: {found[1]}. Begin it with "
                        "torch.manual_seed(0), random.seed(0) and numpy.random.seed(0); where GPUs round differently "
                        "each time, CUDA_VISIBLE_DEVICES= lets the check run on CPUs")
    if max((len(process.steps) for process in killed.ranks), default=0) < step:
        raise CannotSay(f"{unbroken.name} ends before step {step} in its second run: {own_error(killed.stderr)}")
    if not killed.names("saved"):
        raise CannotSay(f"{unbroken.name} saves nothing before step {step} in its second run, where it did in the "
                        "first: let it save by steps or epochs, not by the clock")


# Step by step.

def faults(e):
    """Whatever differs, in the order of a step, as causes.py has it for a conversion; something false in the place of
    what does not, so that one place is one cause on all ranks."""
    before, scales = e.both("old_weights"), e.both("scale")
    generators, options = " and ".join(other_numbers(e)), other_options(e)
    numbers = f"other random numbers, by {generators}" * bool(generators)
    also = f"; {numbers}" * bool(numbers)
    if {share.last("optimizer") for share in e.shares} != {e.optimizer}:
        return ["this step is taken by another optimizer"]
    found = [
        e.weights.differs(*before) and f"other weights, most in {apart_in(e.names, *before)}{also}",
        options and f"{options}: were the states of the optimizer and its schedule loaded?",
        scales[0] != scales[1] and f"GradScaler's scale is {scales[1]} instead of {scales[0]}: was its state loaded?"]
    if e.parted:
        samples = ("the model is fed values that the unbroken run never feeds it" if e.relation == Relation.VALUES
                   else "other samples")
        buffers = e.pair.other_buffers(*(step.named("buffer") for step in (e.one, e.one, e.shares[0])))
        found += [
            e.relation not in (Relation.SAME, Relation.UNKNOWN) and f"{samples}{also}",
            e.losses == Losses.OTHER and numbers and f"{numbers}, for dropout or noise",
            buffers and f"{buffers} differs, which no optimizer holds: was it loaded?",
            e.losses == Losses.OTHER and f"another loss; {e.what_differs}",
            of_the_optimizer(e) and "the gradients agree, the optimizer's step does not: was its state loaded?",
            e.what_differs]
    return found


def other_numbers(e):
    """Generators that have moved for this step, to another state."""
    one, ours = e.one.named("drew"), e.shares[0].named("drew")
    return [name for name, (state, moved) in one.items()
            if name in ours and ours[name][0] != state and (moved or ours[name][1])]


def by_rank(unbroken, other):
    ours = {process.rank: process for process in other.ranks}
    return [(process, ours[process.rank]) for process in unbroken.ranks if process.rank in ours]


def first_difference(unbroken, other, step=0):
    """Between both runs from this step on: which step, and the cause; or None. All ranks are asked for each cause."""
    pairs = [Pair(NAMES, process.since(step), None, [ours]) for process, ours in by_rank(unbroken, other)]
    for k in range(1, min((len(one.steps) for pair in pairs for one in (pair, pair.ranks[0])), default=0) + 1):
        for of_ranks in itertools.zip_longest(*(faults(pair.follow(k)) for pair in pairs)):
            if found := {rank: fault for rank, fault in enumerate(of_ranks) if fault}:
                where = f" (on rank {few(map(str, found))})" * (len(found) < len(pairs))
                return step + k, next(iter(found.values())) + where
    return None


def begins_like(unbroken, restarted):
    """After how many steps the unbroken run had the weights with which a restarted process begins, or None, and which
    of them it had not. Of several steps: that from which on as many are left as are taken."""
    parameters, found = restarted.parameters(0), []
    for k, step in enumerate(unbroken.steps):
        if unbroken.parameters(step.last("optimizer")).names == parameters.names:
            others = other_weights(step, restarted.steps[0], parameters)
            found.append((len(others), abs(len(unbroken.steps) - k - len(restarted.steps)), k, others))
    _, _, k, others = min(found, default=(0, 0, 0, parameters.names))
    if len(others) == len(parameters.names):
        return None, others
    firsts = [{step.last("optimizer"): step for step in reversed(process.steps)}  # of each optimizer
              for process in (unbroken.since(k), restarted)]
    for which in (firsts[0].keys() & firsts[1].keys()) - {0}:
        others = others + other_weights(firsts[0][which], firsts[1][which], restarted.parameters(which))
    return k, others + other_constants(unbroken, restarted)


def other_weights(one, other, parameters):
    pairs = zip(parameters.names, *(of_tensors(step.last("old_weights")) for step in (one, other)))
    return [name for name, a, b in pairs if distance(a, b) > 4 * parameters.eps * norm(a)]


def other_constants(unbroken, restarted):
    """What no optimizer holds, and what never moves in the unbroken run: a frozen model."""
    eps, known = restarted.parameters(0).eps, collections.defaultdict(list)
    for record in unbroken.of("buffer"):
        known[record.name].append(record.value)
    constant = {name: values[0] for name, values in known.items() if all(value == values[0] for value in values)}
    return [name for name, value in restarted.steps[0].named("buffer").items()
            if name in constant and distance(value, constant[name]) > 4 * eps * norm(value)]


def wrong_beginning(begins, unbroken, killed, restarted):
    """Where it does not begin as it should. begins: of each rank, what begins_like says."""
    k, others = begins[0]
    if len({one for one, _ in begins}) > 1:
        return "the ranks begin with different weights: " + ", ".join(
            f"rank {rank} with those of {'no step' if one is None else f'step {one}'}"
            for rank, (one, _) in enumerate(begins))
    if k is None:
        return "it begins with weights that the unbroken run has at no step"
    if others:
        return f"it begins with the weights of step {k}, but not in {few(others)}"
    if not k:
        wrote = few(name for name in killed.names("wrote") if name in killed.files)
        read = few(restarted.names("read")) or "no file by torch.load"
        return f"it starts afresh; the killed run has written {wrote}, and the restarted one has read {read}"
    left, taken = len(unbroken.ranks[0].steps) - k, sorted({len(process.steps) for process in restarted.ranks})
    if taken != [left] and not (restarted.status or restarted.waits):
        return (f"it begins with the weights of step {k} and takes {' or '.join(map(str, taken))} more steps, the "
                f"unbroken run {left}")
    return ""


# Printed lines and files: the unbroken run's are the measure, as far as the restarted run can have them, and once more
# with other times.

def lines_after(texts):
    """Of one text in all three runs: the lines that came after the kill, and of each wording as many before as the
    restarted run has; and these at another time. Figures of the latter are where it stood: "0 of 4 epochs done"."""
    unbroken, killed, restarted = map(items_of_text, texts)
    expected, again = [], []
    for words, items in unbroken.items():
        seen = len(killed[words])
        begin = min(seen, max(0, len(items) - len(restarted[words])))
        expected += [item.shown for item in items[begin:]]
        again += [with_others(item.shown, range(len(item.parts))) for item in items[begin:seen]]
        again += at_another_time(items, killed[words])[max(begin, seen):]
    return "\n".join(expected), "\n".join(again)


def text_at_another_time(text, killed, rewritten):
    """rewritten: since the kill, so that the killed run's lines may be others."""
    unbroken, seen = items_of_text(text), items_of_text(killed)
    if any(len(items) > len(unbroken[words]) for words, items in seen.items()):
        return ""  # it has other words each time
    return "\n".join(itertools.chain(*(at_another_time(items, seen[words], rewritten)
                                       for words, items in unbroken.items())))


def at_another_time(items, seen, rewritten=False):
    """Lines of one wording, with another figure where the killed run has another, and where one is a time."""
    varying = set()
    for one, other in zip(items, seen):
        moved = {place for place, part in enumerate(one.parts) if part != other.parts[place]}
        if not rewritten or 2 * len(moved) <= len(one.parts):
            varying |= moved
    return [with_others(item.shown, varying | times_in(item.shown)) for item in items]


def times_in(line):
    return {place for place, token in enumerate(TOKEN.finditer(line)) if CLOCK.search(token[0])
            or BEFORE.search(line[max(0, token.start() - 40):token.start()]) or AFTER.match(line, token.end())}


def with_others(line, places):
    count = itertools.count()
    return TOKEN.sub(lambda token: ANOTHER if next(count) in places else token[0], line)


def file_at_another_time(file, killed, rewritten):
    if file.kind == "text":
        return File("text", text_at_another_time(file.text, killed.text if killed else "", rewritten))
    times = {name for name, value in file.values.items()
             if not isinstance(value, Tensor) and times_in(f"{name}: {value}")}
    return replace(file, values={**file.values, **dict.fromkeys(times, ANOTHER)})


def measures(unbroken, killed, restarted, step):
    """The unbroken run twice: as it would have been if it had begun at the kill, and at another time. A file that it
    has not written anew since, and that no other run has, has another name each time."""
    expected, again = replace(unbroken, texts={}), replace(unbroken, texts={})
    for stream, texts in unbroken.texts.items():
        pairs = {rank: lines_after([text, *(run.texts[stream].get(rank, "") for run in (killed, restarted))])
                 for rank, text in texts.items()}
        expected.texts[stream], again.texts[stream] = ({rank: pair[k] for rank, pair in pairs.items()} for k in (0, 1))
    later = {record.name for process in unbroken.processes for record in process.of("wrote") if record.step >= step}
    again.files = {name: file_at_another_time(file, killed.files.get(name), name in later)
                   for name, file in unbroken.files.items() if name in {*later, *killed.files, *restarted.files}}
    return expected, again


# The verdict.

def judge(unbroken, killed, restarted, step):
    begins = [begins_like(*pair) for pair in by_rank(unbroken, restarted)]
    faults, parts, where = [], [], f"killed at step {step} of {len(unbroken.ranks[0].steps)}"
    if begins and (fault := wrong_beginning(begins, unbroken, killed, restarted)):
        faults.append(fault)
    elif begins:
        where += f", resumed from step {begins[0][0]}"
        if found := first_difference(unbroken, restarted, begins[0][0]):
            faults.append(f"step {found[0]}: {found[1]}")
    if end := how_it_ended(unbroken, restarted):
        faults.append(end.text)
    if not faults:
        three = *measures(unbroken, killed, restarted, step), restarted
        parts = outputs.compare_outputs(three, NAMES, DRIFT, needed="lines")
        faults = [fault.text.rstrip() for part in parts for fault in part.faults]
    first = "NOT THE SAME RUN" if faults else "a killed run goes on as if it had never stopped"
    varying = few([name for part in parts for name in part.varying], 1)
    return say([f"{first}: {where}"], faults, parts,
               [f"times, what differs in each run, and what each start prints are not compared: {varying}"] * bool(varying))
