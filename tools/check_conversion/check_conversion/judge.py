"""The verdict: a function of three runs."""
import re

import torch

from check_conversion import outputs, training
from check_conversion.records import FLOORS
from check_conversion.running import own_error
from check_conversion.samples import PARTS
from check_conversion.training import Pair
from check_conversion.verdict import CannotSay, Fault, Verdict, few, say

# Whether a run can be judged.

def check_start(run):
    """What any run shows before its training is compared."""
    if refused := run.names("refused"):
        raise CannotSay(f"{run.name} tried to write {refused[0]}, outside this folder. Under the check, a script may "
                        "write only into its copy of the folder and into tempfile's directory")
    if error := re.search(r"Error in sitecustomize.*\n(?:.*\n)?(.*)", run.stderr):
        raise CannotSay(f"the check cannot start in the script's Python: {error[1]}")
    if unsupported := run.names("unsupported"):
        raise CannotSay(f"the check cannot follow {unsupported[0]}")
    if narrow := run.names("float32"):
        raise CannotSay(f"{run.name} does not work in float64, where the check is sharpest ({narrow[0]}): run the "
                        "check with --float32")
    if "plain" in run.names("batchnorm"):
        raise CannotSay(
            f"{run.name} has plain BatchNorm on several processes, so here each normalizes its own part of the batch. "
            "If it is converted to SyncBatchNorm where there are GPUs, run the check with --sync-batchnorm: it is "
            "then compared as that. If each process is to keep statistics of its own, run the check with "
            "--rank-batchnorm: BatchNorm is then not compared. If neither is so, convert it: "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before DDP")
    error = own_error(run.stderr) if run.status else ""
    if re.search("invalid device ordinal|Duplicate GPU", run.stderr):
        gpus, processes = torch.accelerator.device_count(), len({one.rank for one in run.processes})
        if gpus < processes:
            raise CannotSay(f"{run.name} needs a GPU for each of its {processes} processes, and there are {gpus}. With "
                            "CUDA_VISIBLE_DEVICES= before the command, the check runs on CPUs")
    if run.settings.intervene and run.settings.float64 and re.search(
            r"dtype|scalar type|Float\b.*Double|Double\b.*Float|'Double'|out of memory|No available kernel", error):
        raise CannotSay(f"{run.name} fails in float64 ({error}): run the check with --float32")
    if not (run.ranks or run.status or run.waits):
        read = [name for name in run.names("read") if not name.startswith("..")]
        resumed = read and f"; it reads {few(read)}: if it resumes from there, leave that out: --without '{read[-1]}'"
        raise CannotSay(f"{run.name} takes no optimizer step{resumed or ''}")


def check_measure(run, when=""):
    """Whether it can be what another run is compared with."""
    if run.waits:
        raise CannotSay(f"{run.name} itself hangs{when}: {' '.join(run.waits)}")
    check_start(run)
    if run.status:
        raise CannotSay(f"{run.name} itself fails{when} ({own_error(run.stderr)}): does it run without the check?")


def check_original(original):
    check_measure(original)
    if len(original.ranks) > 1:
        raise CannotSay(f"{len(original.ranks)} processes of {original.name} train: the check compares with one")


def check_nudged(original, nudged):
    """Whether it trains the same each time."""
    changed = " in its second run, with weights moved by one rounding and with other clocks"
    if nudged.ranks and (reason := training.unseeded(original.ranks[0], nudged.ranks[0])):
        raise CannotSay(f"{original.name} draws different random numbers in each run ({reason}): begin it "
                        "with torch.manual_seed(0), random.seed(0) and numpy.random.seed(0), "
                        "and seed its own generators with fixed numbers, not with the time; "
                        "a set of strings also has a different order in each run")
    check_measure(nudged, changed)
    if len(nudged.ranks[0].steps) != len(original.ranks[0].steps):
        raise CannotSay(f"{original.name} takes more or fewer steps{changed}")


def how_it_ended(original, converted):
    """A fault of the other run as a whole."""
    counts, error = [len(rank.steps) for rank in converted.ranks], own_error(converted.stderr)
    if converted.waits:
        return Fault("Hangs and errors", "\n  ".join(["it hangs:", *converted.waits]))
    if {*counts} == {len(original.ranks[0].steps)} and re.search("terminate called without|SIGABRT", converted.stderr):
        return Fault("Hangs and errors", "it aborts when it ends: import torch.distributed.nn before the process group "
                     "is made, and del model before it is destroyed")
    if converted.status:
        gone = re.search("Connection (reset|closed)", error)
        return Fault("Hangs and errors",
                     f"it fails after the ranks took {', '.join(map(str, counts)) or 0} steps: {error}"
                     + " (the rank that it waits for has ended)" * bool(gone))
    if converted.outlived and not original.outlived:
        return Fault("Hangs and errors", "it leaves processes behind")
    if (idle := converted.idle) and idle != original.idle:
        return Fault("Training goes through DDP", f"rank {' and '.join(map(str, idle))} did not train: "
                     f"{len(idle) + len(counts)} processes were started, {len(counts)} trained")
    return None if converted.ranks else Fault("Training goes through DDP", "it takes no step")


# The verdict.

def judge(original, nudged, converted):
    """Of runs that check_start and check_original have let pass."""
    check_nudged(original, nudged)
    if len({one.rank for one in converted.ranks}) < len(converted.ranks):
        raise CannotSay(f"several processes of {converted.name} train as the same rank: the check compares one "
                        "training")
    end, fault = how_it_ended(original, converted), None
    if converted.ranks:
        drew = [*dict.fromkeys([*original.names("worker drew"), *converted.names("worker drew")])]
        pair = Pair((original.name, converted.name), original.ranks[0], nudged.ranks[0], converted.ranks, drew)
        fault = training.first_fault(pair, to_the_end=not end)
    if fault and not fault.heading and not end:
        raise CannotSay(str(fault))
    if faults := [one for one in (fault, end) if one and one.heading]:
        return Verdict(1, ["NOT THE SAME TRAINING", *map(str, faults)])
    return judge_outputs(original, nudged, converted, pair)


def judge_outputs(original, nudged, converted, pair):
    """Of the same training."""
    drift = max(pair.rounding, pair.apart, FLOORS["figure"] / 5)
    parts = outputs.compare_outputs((original, nudged, converted), (original.name, converted.name), drift)
    faults = [fault for part in parts for fault in part.faults]
    if pair.hidden_since and not pair.not_shared_out and all(fault.measured for fault in faults):
        raise CannotSay(f"the same up to step {pair.hidden_since - 1} of {pair.agreed}; from there on rounding alone "
                        "moves the weights by 1% of what training does, so neither smaller faults nor the figures of "
                        "later steps can be judged: lower the learning rate in both")
    if pair.not_shared_out:
        faults.insert(0, Fault("Two routes", "each rank computes all of it: give each its part of the batch"))
    return say(say_training(pair, original, converted), faults, parts, say_rest(original, converted, parts, pair))


def say_training(pair, original, converted):
    count, without = len(converted.ranks), not_compared(original, converted)
    yield (f"the same training{', but not split between ranks' * pair.not_shared_out}: {pair.agreed} steps with "
           f"{count} process{'es' * (count > 1)}{', SyncBatchNorm' * ('synchronised' in converted.names('batchnorm'))}"
           + f"; not compared: {', '.join(without)}" * bool(without))
    yield f"weights within {pair.apart:.0e} of their norm; rounding alone moves them by {pair.rounding:.0e}"
    if pair.whole and not pair.not_shared_out:
        own = ", but takes the loss of its own part only" * ({*pair.whole} <= PARTS)
        yield f"every rank runs the forward pass on the whole batch{own}"
    elif pair.unseen == pair.agreed and count > 1:
        yield "the model is fed nothing that the check sees, so it cannot tell whether the ranks share the work"


def not_compared(original, converted):
    """What the check has turned off."""
    found = {name.partition(" ")[0] for run in (original, converted) for rank in run.ranks for step in rank.steps
             for name in step.named("switch")} & {"dropout", "autocast"}
    return [*["BatchNorm"] * ("frozen" in converted.names("batchnorm")), *sorted(found, reverse=True)]


def say_rest(original, converted, parts, pair):
    """Each thing once: three names and a count."""
    missing = [one for part in parts for one in part.missing]
    varying = [f"{one[:60]}…" if len(one) > 60 else one for part in parts for one in part.varying]
    where = "/".join(dict.fromkeys(part.what for part in parts if part.missing))
    for text, names in (
            (f"not {where} by {converted.name} in these words", missing),
            (f"compared but for what differs in each run of {original.name}, such as a time", varying),
            ("not compared, because the gradient is nothing but rounding", pair.noise),
            ("not compared, because it is on only where there is a GPU", sorted(pair.on_gpus))):
        if names:
            yield f"{text}: {few(names)}"
