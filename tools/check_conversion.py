"""Does my converted script train the same as before? It runs both, and says where they part:

python tools/check_conversion.py "python train.py --epochs 2" \\
    "torchrun --standalone --nproc_per_node=2 train_ddp.py --epochs 2"

The status is 0 where they train the same, 1 where not, 2 where that cannot be said. Each run has a
folder of its own, with copies of this folder's files, and links to the folders in it.
"""
import argparse
import collections
import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
VARIES = (rf"\S+\.[a-z]\w*|{NUMBER} ?(?:\S+/s\w*|m?s|sec\w*|min\w*)\b|\d+:\d\d[:\d]*"
          rf"|(?:time|eta|elapsed|dt)\W*{NUMBER}")  # files and times


class NotJudged(Exception):
    """Why it cannot be said whether both train the same."""


# Running a command, and what is known of it afterwards.

def processes(mark):
    """What there is of a run, wherever it is in the process tree."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is somebody else's
            if mark in file.read_bytes().decode(errors="replace"):
                yield int(file.parent.name)


def read_ranks(records):
    """Of each process that notes something: rank, steps, parameters' names, saved files."""
    ranks = []
    for file in records.glob("*.log"):
        notes = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        steps, names, saves = ([one for one in notes if key in one]
                               for key in ("weights", "names", "saved"))
        ranks.append(SimpleNamespace(rank=notes[-1]["rank"], process=int(file.stem), steps=steps,
                                     names=[one["names"] for one in names], saves=saves,
                                     eps=names[0]["eps"] if names else 0))
    return sorted(ranks, key=lambda one: (one.rank, one.process))


def where_ranks_wait(records):
    """The innermost line of the user's own in which each rank is, and what that has called."""
    ranks = read_ranks(records)
    for one in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.process, signal.SIGUSR2)  # faulthandler writes, also within C++
    time.sleep(1)
    for one in ranks:
        place, called = "has ended", ""
        stack = (records / f"{one.process}.stack").read_text()
        for file, line, function in re.findall(r'File "(.*)", line (\d+) in (\S+)', stack):
            if not re.search("/lib/python|/recorder/|^<", file):
                place = f"waits at {os.path.basename(file)}:{line}{called}"
                break
            if function not in ("wrapper", "_wrapped_call_impl", "_call_impl"):  # those of each call
                called = f", in {function}"
        yield f"rank {one.rank}, after {len(one.steps)} steps, {place}"


def own_error(stderr):
    """The first error that anybody had, after the last line of the user's own that led to it."""
    place = "?"
    for line in stderr.splitlines():
        who, line = re.match(r"(?:\[(rank\d+)\]: ?)?(.*)", line).groups()
        found = re.match(r' *File "(.*)", line (\d+)', line)
        if found and not re.search('/lib/python|"<', line):
            place = f"{os.path.basename(found[1])}:{found[2]}"
        elif re.match(r"[\w.]*(Error|Exception)(: \S|$)|.*can't open file", line):
            return f"{who or 'it'} at {place}: {line[:300]}"
    return ["it says nothing", *(line for line in stderr.splitlines() if line.strip("= "))][-1]


def run(command, args):
    """Run a command until it ends or hangs. Nothing of it is left then."""
    print("running:", command, file=sys.stderr, flush=True)
    folder, records = (Path(tempfile.mkdtemp(dir=args.home)) for _ in range(2))
    for file in Path.cwd().iterdir():
        (folder / file.name).symlink_to(file) if file.is_dir() else shutil.copy(file, folder)
    path = f"{Path(__file__).resolve().parent}/recorder:{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "CHECK_CONVERSION": str(records), "PYTHONPATH": path.rstrip(":"),
           "NVIDIA_TF32_OVERRIDE": "0", **({"CHECK_CONVERSION_FLOAT64": "1"} if args.float64 else {})}
    subprocess.run(args.before_each, shell=True, cwd=folder)
    with open(records / "stdout", "w") as stdout, open(records / "stderr", "w") as stderr:
        started = subprocess.Popen(command, shell=True, cwd=folder, env=env, start_new_session=True,
                                   stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
    waits, left = [], []
    try:
        while started.poll() is None and not waits:
            time.sleep(0.1)
            if args.interrupted:
                raise NotJudged("interrupted")
            idle = time.time() - max(file.stat().st_mtime for file in records.iterdir())
            if idle > args.patience and (idle > 60 or read_ranks(records)):  # torch may still be imported
                waits = [*where_ranks_wait(records)] or ["no rank has come so far"]
        end = time.monotonic() + (0 if waits else 10)  # loader workers see late that they are alone
        while (left := [*processes(str(records))]) and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        while still := [*processes(str(records))]:
            for process in still:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
    if started.wait() in (126, 127):
        raise NotJudged(f"cannot be started: {(records / 'stderr').read_text().strip()}")
    return read_run(command, records, started.wait(), waits, left)


def read_run(command, records, status=0, waits=(), left=()):
    name = os.path.basename([*(word for word in command.split() if word.endswith(".py")), command][0])
    return SimpleNamespace(name=name, status=status, waits=waits, left=left,
                           ranks=[one for one in read_ranks(records) if one.steps],
                           stdout="".join(file.read_text() for file in sorted(records.glob("*stdout"))),
                           stderr=(records / "stderr").read_text())


# How they trained: the first step at which they part.

def distance(one, other):
    return math.dist(one, other) if len(one) == len(other) else math.inf


def other_options(one, step):
    """What two optimizers have been told otherwise: lr 0.1 instead of 0.05."""
    return ", ".join(sorted({f"{name} {new.get(name)} instead of {old[name]}"
                             for old, new in zip(one["groups"], step["groups"])
                             for name in old if new.get(name) != old[name]}))


def between_ranks(shares, ranks):
    """DDP keeps weights and gradients the same in all ranks, to the last bit."""
    for other, step in zip(ranks[1:], shares[1:]):
        who, one = f"ranks 0 and {other.rank}", shares[0]
        if options := other_options(one, step):
            return f"{who} have other options of the optimizer: {options}", "Decisions"
        if one["loader"] and step.get("drawn") != one.get("drawn"):
            return f"{who} shuffle differently, each by random numbers of its own", "Random numbers"
        for what, heading in (("weights", "Load first, then DDP"),
                              ("gradients", "Training goes through DDP")):
            if distance(one[what], step[what]) > 1e-6 * math.hypot(*one[what]):
                parts = [math.dist(one[what][i:i + 2], step[what][i:i + 2])
                         for i in range(0, len(one[what]), 2)]
                names = [name for name, part in zip(other.names[step["optimizer"]], parts)
                         if part > 0.1 * max(parts)]
                if "in no DDP" in names[0]:
                    heading = "Training goes through DDP"
                return f"{who} have other {what}: {', '.join(names[:5])}", heading


def passes(steps):
    """The number of steps each time that a loader was gone through."""
    starts = [k for k, step in enumerate(steps) if step["loader"] or k == 0] + [len(steps)]
    return [end - start for start, end in itertools.pairwise(starts)]


def why(k, one, shares, first, many):
    """What explains other gradients than before: the first of these that is true."""
    n, now, before = len(shares), many.ranks[0].steps, first.ranks[0].steps
    a, b = one["gradients"], shares[0]["gradients"]
    factor = sum(map(math.prod, zip(a, b))) / (math.hypot(*a) ** 2 or 1)
    in_line = distance([factor * x for x in a], b) < 0.002 * math.hypot(*b)
    fed, whole = [step["fed"] for step in shares], one["fed"]
    ratio = sum(map(math.prod, fed)) / math.prod(whole) if whole and all(fed) else 1
    sizes = f"{first.name} was fed {whole}, the ranks {' and '.join(map(str, fed))}"
    kinds = [next((step["loader"] for step in steps[k - 1::-1] if step["loader"]), [None, None])
             for steps in (before, now)]
    draws = all(any(step["draws"] for step in steps[:k + 1]) for steps in (before, now))
    same = "the same" if len({step["random"] for step in shares}) == 1 else "others"
    is_factor = f"all gradients are {factor:.4g} times those of {first.name}"
    causes = [
        (not any(b), "Training goes through DDP", "there are none now: has the optimizer the parameters "
         "of the model that is trained, or was it made before?"),
        (in_line and math.isclose(factor * n, 1, rel_tol=0.01), "Sums and unequal parts",
         f"{is_factor} = 1/{n}, the number of processes: the loss is a sum over the batch, and DDP "
         "takes the mean over ranks (or gradients are clipped to another norm)"),
        (in_line and math.isclose(factor, n, rel_tol=0.01), "Sums and unequal parts",
         f"{is_factor}, the number of processes"),
        (in_line, "Sums and unequal parts", f"{is_factor}, with {n} processes"),
        (kinds[1][0] in ("RandomSampler", "SequentialSampler") and ratio == 1 and
         passes(before)[:1] != passes(now)[:1], "Two routes",
         f"each rank goes through all samples: {sizes}"),
        (n > 1 and ratio == n, "Two routes", f"each rank takes a whole batch: {sizes}"),
        (n > 1 and ratio < 0.6, "Two routes", f"the batch is divided twice: {sizes}"),
        (kinds[0][1] != kinds[1][1], "Two routes", "one of the two shuffles, one does not"),
        (shares[0].get("again"), "Two routes",
         "the samples come in the order of an epoch before: no set_epoch"),
        (bool(one["loader"]) != bool(shares[0]["loader"]), "Two routes",
         f"an epoch had {passes(before)[0]} steps and has {passes(now)[0]}"),
        (ratio != 1, "Two routes", f"samples are repeated or left out: {sizes}"),
        (len(set(map(str, fed))) > 1, "Sums and unequal parts",
         f"a mean over parts that are not equal: {sizes}"),
        (draws, "Random numbers", f"both draw random numbers in each step, the ranks {same}: more "
         "cannot be seen until it is 0 in both, or drawn for the whole batch: noise[rank::world_size]"),
        (True, "No common factor", "by no common factor: do parts count differently (padding, "
         "ignore_index), are gradients clipped or unscaled before they are averaged, do ranks get "
         f"other samples? {sizes}")]
    return next((text, heading) for applies, heading, text in causes if applies)


def compare_training(first, many):
    """The first fault, or None; and how far both agree, and where rounding has driven them apart."""
    strict = max(1000 * first.ranks[0].eps, 1e-9)
    agree = SimpleNamespace(gradients=0.0, weights=0.0, parted=None, steps=0)
    largest = collections.Counter()
    for k, (one, *shares) in enumerate(zip(*(rank.steps for rank in first.ranks[:1] + many.ranks)), 1):
        if fault := between_ranks(shares, many.ranks):
            return (f"step {k}: {fault[0]}", fault[1]), agree
        share = shares[0]
        if options := other_options(one, share):
            return (f"step {k}: other options of the optimizer: {options}", "Decisions"), agree
        largest[one["optimizer"]] = max(largest[one["optimizer"]], math.hypot(*one["gradients"]))
        scale = max(math.hypot(*one["gradients"]), 0.01 * largest[one["optimizer"]]) or 1
        error = distance(one["gradients"], share["gradients"]) / scale
        weights = distance(one["weights"], share["weights"]) / (math.hypot(*one["weights"]) or 1)
        if weights == math.inf or (k == 1 and weights > strict):
            return ("step 1: it begins with other weights", "Load first, then DDP"), agree
        if k > 1 and weights > max(100 * strict, 1000 * max(agree.gradients, agree.weights)):
            return (f"step {k - 1}: the gradients agree, and the weights do not after it, by "
                    f"{weights:.2g} of their norm", "No common factor"), agree
        # Rounding grows step by step; one ReLU of one sample that it turns over is a jump, but small.
        grown = max(10 * strict, 50 * agree.gradients, 300 * weights)
        if math.isfinite(scale) and not error <= (strict if k == 1 else grown):
            text, heading = why(k, one, shares, first, many)
            if k == 1 or error > 0.05 or heading not in ("Random numbers", "No common factor"):
                return (f"step {k}: gradients differ by {error:.2g} of their norm: {text}", heading), agree
        if not error <= 0.01:
            agree.parted = k
            break
        agree.gradients, agree.weights = max(agree.gradients, error), max(agree.weights, weights)
        agree.steps = k
    counts = [len(rank.steps) for rank in many.ranks]
    if {*counts} != {len(first.ranks[0].steps)}:
        heading = "Two routes" if len({*counts}) == 1 else "Decisions"
        return (f"{first.name} takes {len(first.ranks[0].steps)} steps, the ranks take "
                f"{', '.join(map(str, counts))}", heading), agree
    one, share = first.ranks[0].steps[0], many.ranks[0].steps[0]
    if len(many.ranks) > 1 and one["fed"] == share["fed"] and (
            share["loader"] or [""])[0] in ("RandomSampler", "SequentialSampler"):
        return ("each rank goes through all samples", "Two routes"), agree
    return None, agree


# What they printed and saved.

def close(one, other, tolerance):
    """Two numbers as they are printed: the last digit may differ by one."""
    one, other = one.replace(",", ""), other.replace(",", "")
    unit = 1.01 * 10.0 ** -len(one.partition(".")[2].partition("e")[0]) if "." in one else 0
    return one == other or abs(float(one) - float(other)) <= unit + tolerance * abs(float(one))


def printed(run):
    """The lines by their words."""
    found = collections.defaultdict(list)
    for line in run.stdout.splitlines():
        rest = re.sub(VARIES, "...", line)
        found[" ".join(re.sub(NUMBER, "#", rest).split())].append((line, re.findall(NUMBER, rest)))
    return found


def compare_printed(first, again, many, tolerance):
    twice, converted = printed(again), printed(many)
    for words, lines in printed(first).items():
        others = converted[words]
        if not others or len(twice[words]) != len(lines):
            continue  # a line of one of the two alone
        if len(others) != len(lines):
            return (f"printed {len(others)} times instead of {len(lines)}: {lines[0][0].strip()}",
                    "Printed by all ranks" if len(others) > len(lines) else "Printed figures")
        for (line, figures), (_, figures2), (line2, now) in zip(lines, twice[words], others):
            if any(a == b and not close(a, c, tolerance) for a, b, c in zip(figures, figures2, now)):
                return f"printed otherwise:\n  {first.name}: {line}\n  {many.name}: {line2}\n ", "Printed figures"


def compare_saved(first, many, tolerance):
    files = []
    for run in (first, many):
        files.append(collections.defaultdict(list))
        for rank in run.ranks:
            for save in rank.saves:
                files[-1][os.path.basename(save["path"])].append((rank.rank, save["saved"]))
    for one, (name, other) in zip(files[0].values(), files[1].items()):
        if len({rank for rank, _ in other}) > 1:
            return f"{name} is saved by more than one rank", "Saving"
        if len(one) != len(other):
            return f"{name} is saved {len(other)} times instead of {len(one)}", "Decisions"
        for (_, a), (_, b) in zip(one, other):
            if any("module." in key for key in b) and not any("module." in key for key in a):
                return f"{name}: the saved names begin with `module.`", "Saving"
            if {key: a[key][0] for key in a} != {key: b[key][0] for key in b}:
                return f"{name}: other names or shapes are saved", "Saving"
            scale = math.hypot(*(value[1] for value in a.values() if value[0] is not None))
            for key, (shape, *numbers) in a.items():
                size = abs(numbers[0]) if shape is None else 100 * scale  # after the last step, too
                if distance(numbers, b[key][1:]) > tolerance * size:
                    return (f"{name}: another {key or 'tensor'} is saved",
                            "Printed figures" if shape is None else "Saving")
    if len(files[0]) != len(files[1]):
        return f"{len(files[1])} files are saved instead of {len(files[0])}", "Saving"


def judge(first, again, many):
    """Print the verdict, and give the status."""
    fault, agree = compare_training(first, many) if many.ranks else (None, None)
    end = None
    if many.waits:
        end = "\n  ".join(["it hangs:", *many.waits]), "Hangs"
    elif {len(rank.steps) for rank in many.ranks} == {len(first.ranks[0].steps)} and re.search(
            "terminate called without|SIGABRT", many.stderr):
        end = "it aborts when it ends", "The end of a run"
    elif many.status:
        steps = ", ".join(str(len(rank.steps)) for rank in many.ranks)
        error = own_error(many.stderr)
        gone = re.search("Connection (reset|closed)", error)
        end = (f"it fails after {steps or 0} steps of the ranks: {error}" + ": the rank that it waits for "
               "has ended" * bool(gone), "Hangs" if gone else "Errors")
    elif many.left:
        end = "it leaves processes behind", "The end of a run"
    elif not many.ranks:
        raise NotJudged(f"{many.name} takes no optimizer step")
    if end and fault and not fault[0].startswith("step"):
        fault = None  # it did not come to its end
    if not end and not fault:
        tolerance = math.inf if agree.parted else max(1e-9, 10 * agree.gradients, 100 * agree.weights)
        fault = (compare_saved(first, many, tolerance)
                 or compare_printed(first, again, many, tolerance))
    faults = [one for one in (fault, end) if one]
    if not faults and agree.parted and agree.steps < 2:
        raise NotJudged("rounding drives both apart after one step: lower the learning rate "
                        "in both, or try --float64")
    if faults:
        print("NOT THE SAME TRAINING")
        for text, heading in faults:
            print(f'{text}. See "{heading}" in docs/your_own_script.md.')
    else:
        rest = (f"from step {agree.parted} on rounding drives them apart: --float64 sees farther"
                if agree.parted else "printed and saved the same")
        ranks = f"{len(many.ranks)} process{'es' * (len(many.ranks) > 1)}"
        print(f"the same training: {agree.steps} steps with {ranks}, gradients "
              f"within {agree.gradients:.0e}, weights within {agree.weights:.0e}; {rest}")
        last = [rank.steps[-1] for rank in many.ranks]
        if last[0]["dropout"] and len({step["random"] for step in last}) < len(last):
            print('Dropout was 0 here, and would be the same in all ranks. See "Random numbers" in '
                  "docs/your_own_script.md.")
    return bool(faults)


def main(args):
    first = run(args.before, args)
    if first.waits:
        raise NotJudged(f"{first.name} itself takes no step for {args.patience:g} s: {' '.join(first.waits)}")
    if first.status:
        raise NotJudged(f"{first.name} itself fails: {own_error(first.stderr)}")
    if not first.ranks:
        raise NotJudged(f"{first.name} takes no optimizer step")
    again = run(args.before, args)
    if not again.ranks or len(again.ranks[0].steps) != len(first.ranks[0].steps):
        raise NotJudged(f"{first.name} takes other steps the second time: does it go on from a file "
                        "that it has saved? Let --before-each 'rm -f ...' remove that")
    if fault := compare_training(first, again)[0]:
        raise NotJudged(f"{first.name} draws other numbers each time ({fault[0]}): begin it with "
                        "torch.manual_seed(0), random.seed(0) and numpy.random.seed(0), and seed its "
                        "own generators")
    return judge(first, again, run(args.after, args))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="the command that trains in one process")
    parser.add_argument("after", help="the command that trains with DDP")
    parser.add_argument("--float64", action="store_true", help="sharper, where the data allow it")
    parser.add_argument("--patience", type=float, default=60, metavar="SECONDS",
                        help="how long it may go without a step before it hangs (60)")
    parser.add_argument("--before-each", default="true", metavar="COMMAND", help="before each run")
    args = parser.parse_args()
    args.interrupted = []  # looked at where nothing is half done
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: args.interrupted.append(True))
    with tempfile.TemporaryDirectory(prefix="check_conversion.") as args.home:
        try:
            status = main(args)
        except NotJudged as reason:
            print(f"cannot be judged: {reason}", file=sys.stderr)
            status = 2
    sys.exit(status)
