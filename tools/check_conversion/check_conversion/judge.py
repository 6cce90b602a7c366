"""The verdict: a function of three runs."""
import re

from check_conversion.files import compare_new_files, compare_saved
from check_conversion.outputs import compare_bars, compare_errors, compare_lines, compare_logged
from check_conversion.protocol import About, BatchNorm
from check_conversion.running import own_error
from check_conversion.samples import Losses
from check_conversion.training import Training, compare_training, unseeded
from check_conversion.verdict import CHAPTER, CannotSay, Fault, Verdict

FIGURES = 1e-7  # of a figure: no wrong one is nearer, and scripts may count in float32
STOOD_STILL = {  # what to do about it
    "BatchNorm": ("BatchNorm kept its statistics, so it was not compared", "What your script has"),
    "dropout": ("dropout was 0, so it was not compared", "Random numbers"),
    "autocast": ("autocast was off, so it was not compared", "Check it")}


# Whether it can be judged.

def resumed(run):
    """A run that finds its work done takes no step."""
    loaded = [name for name in dict.fromkeys(run.remarks(About.LOADED))
              if not name.startswith(("..", "("))]
    if not loaded:
        return ""
    return (f"; it reads {', '.join(loaded)}: if it resumes from the last of them, leave it out with "
            f"--without '{loaded[-1]}'")


def check_writes(run):
    if refused := run.remarks(About.WRITE):
        raise CannotSay(f"{run.name} tried to write {refused[0]}, outside this folder. Under the check, a script may "
                        "write only into its copy of the folder and into tempfile's directory")


def check_original(original):
    """Whether the original can be the measure."""
    if original.waits:
        raise CannotSay(f"{original.name} itself hangs: {' '.join(original.waits)}")
    check_writes(original)
    if error := re.search(r"Error in sitecustomize.*\n(?:.*\n)?(.*)", original.stderr):
        raise CannotSay(f"the check cannot start in the script's Python: {error[1]}")
    if original.status:
        raise CannotSay(f"{original.name} fails under the check ({own_error(original.stderr)}): "
                        "does it run without the check?")
    if not original.ranks:
        raise CannotSay(f"{original.name} takes no optimizer step{resumed(original)}")
    if len(original.ranks) > 1:
        raise CannotSay(f"{len(original.ranks)} processes of {original.name} train: the check compares with one")


def check_nudged(original, nudged):
    """Whether it trains the same each time."""
    if nudged.waits:
        raise CannotSay(f"{original.name} hangs in its second run: "
                        f"{' '.join(nudged.waits)}")
    if nudged.ranks:
        reason = unseeded(original, nudged)
        if reason:
            raise CannotSay(f"{original.name} draws different random numbers in each run ({reason}): begin it "
                            "with torch.manual_seed(0), random.seed(0) and numpy.random.seed(0), "
                            "and seed its own generators with fixed numbers, not with the time; "
                            "a set of strings also has a different order in each run")
    changed = "with weights moved by one rounding and with other clocks"
    if nudged.status:
        raise CannotSay(f"{original.name} fails in its second run, {changed}: "
                        f"{own_error(nudged.stderr)}")
    if not nudged.ranks or len(nudged.ranks[0].steps) != len(original.ranks[0].steps):
        raise CannotSay(f"{original.name} takes more or fewer steps in the second run, {changed}")


def check_converted(converted):
    """Whether the check could follow it."""
    check_writes(converted)
    if unsupported := converted.remarks(About.UNSUPPORTED):
        raise CannotSay(f"the check cannot follow {unsupported[0]}")
    if len({one.rank for one in converted.ranks}) < len(converted.ranks):
        raise CannotSay(f"several processes of {converted.name} train as the same rank: the check compares one training")


def how_it_ended(original, converted):
    """A fault of the converted script's run as a whole."""
    counts = [len(rank.steps) for rank in converted.ranks]
    if converted.waits:
        return Fault("\n  ".join(["it hangs:", *converted.waits]), "Hangs")
    if {*counts} == {len(original.ranks[0].steps)} and re.search(
            "terminate called without|SIGABRT", converted.stderr):
        return Fault("it aborts when it ends", "The end of a run")
    if converted.status:
        error = own_error(converted.stderr)
        gone = re.search("Connection (reset|closed)", error)
        steps = ", ".join(map(str, counts)) or 0
        ended = " (the rank that it waits for has ended)" * bool(gone)
        return Fault(f"it fails after the ranks took {steps} steps: {error}{ended}",
                     "Hangs" if gone else "Errors")
    if converted.outlived:
        return Fault("it leaves processes behind", "The end of a run")
    if not converted.ranks:
        raise CannotSay(f"{converted.name} takes no optimizer step{resumed(converted)}")
    if idle := converted.idle:
        return Fault(f"rank {' and '.join(map(str, idle))} did not train: {len(idle) + len(counts)} processes were "
                     f"started, {len(counts)} trained", "Training goes through DDP")
    return None


# What is said.

def say_training(agree, converted, counts, stood_still):
    count = len(converted.ranks)
    yield (f"the same training{', but not split between ranks' * agree.not_shared_out}: {agree.steps} steps "
           f"with {count} process{'es' * (count > 1)}{say_batchnorm(converted)}; compared: "
           + ", ".join(["training", *filter(None, counts)])
           + f"; not {', '.join(stood_still)}" * bool(stood_still))
    yield (f"weights within {agree.weights:.0e} of their norm; rounding alone moves them by "
           f"{agree.rounding:.0e}")
    if agree.not_shared_out:
        yield str(Fault("each rank computes all of it", "Two routes"))
    elif agree.whole:
        parts = {*agree.whole} <= {Losses.MEAN, Losses.SUM, Losses.MEAN_OF_SAMPLES}
        yield "every rank runs the forward pass on the whole batch" + ", but takes the loss of its own part only" * parts
    elif agree.unseen == agree.steps and count > 1:
        yield "the model is fed nothing that the check sees, so it cannot tell whether the ranks share the work"
    if agree.noise:
        yield (f"not compared, because their gradients are nothing but rounding: "
               f"{', '.join(agree.noise[:5])}{f' and {len(agree.noise) - 5} more' * (len(agree.noise) > 5)}")


def say_part(name, part):
    yield from map(str, part.faults)
    said = [part.said] if part.said and not part.faults else []
    for k, line in enumerate([*said, *part.remarks]):
        yield f"  {line}" if k or part.faults else f"{name}: {line}"


def say_batchnorm(run):
    if run.batchnorm != {BatchNorm.SYNCHRONISED}:
        return ""
    if run.synchronised_at:
        return f", BatchNorm compared as SyncBatchNorm (the conversion at {run.synchronised_at} was not called)"
    return ", SyncBatchNorm"


def what_stood_still(original, converted):
    steps = [step for run in (original, converted) for rank in run.ranks for step in rank.steps]
    found = {what.partition(" ")[0] for step in steps for what in step.on}
    found |= {"BatchNorm" for step in steps if BatchNorm.FROZEN in step.batchnorm}
    return [what for what in STOOD_STILL if what in found]


def say_why(stood_still, converted):
    for what in stood_still:
        text, heading = STOOD_STILL[what]
        apart = what == "dropout" and converted.ranks and not ranks_draw_alike(converted)
        more = "; without the check, the ranks would draw different numbers, which is right" if apart else ""
        yield f'{text}{more}. See "{heading}" in {CHAPTER}.'


def ranks_draw_alike(run):
    states = [rank.steps[-1].states["torch"] for rank in run.ranks]
    return len({*states}) < len(states)


def faults_of_the_run(end, fault, shortest):
    """How the run ended, after a fault of training that was seen before it; without such an end the fault
    alone. What only keeps the check from seeing more is the last of the three."""
    if end:
        return [fault, end] if fault and not fault.unknown and fault.step <= shortest else [end]
    if fault and fault.unknown:
        raise CannotSay(str(fault))
    return [fault] if fault else []


def judge(original, nudged, converted):
    """Of an original that can be the measure, which check_original has said before its second run."""
    check_nudged(original, nudged)
    check_converted(converted)
    end = how_it_ended(original, converted)
    agree = compare_training(original, nudged, converted) if converted.ranks else Training()
    shortest = min((len(rank.steps) for rank in converted.ranks), default=0)
    if faults := faults_of_the_run(end, agree.fault, shortest):
        return Verdict(1, ["NOT THE SAME TRAINING", *map(str, faults)])
    return judge_outputs(original, nudged, converted, agree)


def judge_outputs(original, nudged, converted, agree):
    """Of the same training."""
    drift = max(agree.rounding, agree.weights, FIGURES)
    parts = {name: compare(original, nudged, converted, drift) for name, compare in (
        ("printed", compare_lines), ("on stderr", compare_errors), ("shown", compare_bars), ("logged", compare_logged),
        ("saved", compare_saved), ("written", compare_new_files))}
    stood_still = what_stood_still(original, converted)
    faults = [fault for part in parts.values() for fault in part.faults]
    if agree.blurred and not agree.not_shared_out and all(fault.measured for fault in faults):
        raise CannotSay(f"the same up to step {agree.blurred - 1} of {agree.steps}; from there on "
                        "rounding alone moves the weights by 1% of what training does, so neither "
                        "smaller faults nor the figures of later steps can be judged")
    lines = [*say_training(agree, converted, [part.count for part in parts.values()], stood_still),
             *(line for name, part in parts.items() for line in say_part(name, part)),
             *say_why(stood_still, converted)]
    return Verdict(int(agree.not_shared_out or bool(faults)), lines)
