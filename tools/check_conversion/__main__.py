"""Does a script that was converted to DistributedDataParallel train, print and save the same as before?
Or, with --resume: does a run that was killed go on as if it had never stopped?
Status 0: the same; 1: not the same; 2: it cannot be judged."""
import argparse
import contextlib
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from compare import Training, Verdict, compare_lines, read_lines, same_names

LEFT_OUT = {".git", "__pycache__", "node_modules", ".cache", ".ipynb_checkpoints"}
JUDGED = "the converted script", "the restarted run"  # if one of these fails, that is the verdict; of others, there is none
NOT_HERE = "invalid device ordinal|Duplicate GPU|SyncBatchNorm layers only work|DTensor|check_conversion_observer"
LIBRARY = "/lib(64)?/python|check_conversion_|<fro"  # in the names of files that are not the script's own
ALIKE = 'do all resume, decide and call collectives alike? (see "Decisions")'
ERROR = r"[\w.]+(Error|Exception):|.*: (can't open file|error: )"


class Run:
    """What a command that has ended did and left."""

    def __init__(self, root, copy, notes):
        def read(pattern):
            return [file.read_text(errors="replace").replace(str(root), "") for file in sorted(notes.glob(pattern))]
        found = [json.loads(line) for text in read("*.jsonl") for line in text.split("\n")[:-1]]  # whole lines
        self.root, self.copy, self.notes = root, copy, defaultdict(list)  # by what they are of
        for one in sorted(found, key=lambda note: note["time"]):
            self.notes[one["kind"]].append(one)
        self.ranks = {rank: [note for note in self.notes["step"] if note["rank"] == rank]
                      for rank in sorted({note["rank"] for note in found})}
        self.lines = "\n".join(read("stdout*")).split("\n")
        errors = [re.sub(r"(?s)Traceback \(((?!Traceback \().)*ChildFailedError.*", "", text)  # without torchrun's own
                  for text in [note["text"] for note in self.notes["error"]] + read("stderr")]
        first = next(filter(None, errors), "")  # it has led to the other ranks' errors
        lines = [line.strip() for line in first.splitlines() if line.strip(" ~^")]
        begin = next((place for place, line in enumerate(lines) if re.match(ERROR, line)), -3)
        self.error = "\n".join(dict.fromkeys([*own_lines(lines)[-1:], *lines[begin:][:3]]))  # each of them once

    def judge(self, who, ended, killed, waits):
        """If it did not end well, that is the verdict."""
        status, error = 1 if who in JUDGED else 2, self.error
        if re.search("Connection (closed|reset) by peer", error):
            error += f"\nanother rank ended first: was it killed? If not, {ALIKE}"
        if self.notes["stop"]:
            raise Verdict(2, self.notes["stop"][0]["text"])
        if waits:
            raise Verdict(status, f'{who} hangs (see "Hangs and errors"): {ALIKE}\n{waits}')
        if ended in (126, 127) or (ended and re.search(NOT_HERE, error)):
            raise Verdict(2, f"{who} cannot be run here:\n{error}")
        if ended and not killed:
            raise Verdict(status, f'{who} ends with {ended} (see "Hangs and errors"):\n{error}')
        if not self.notes["step"]:
            raise Verdict(2, f"no optimizer takes a step in {who}: does it resume a file, which --without leaves "
                          f"out, update weights by hand, without torch.optim, or set PYTHONPATH itself?\n{error}")
        return self


class Workspace:
    """A temporary folder, in which each run has a copy of the current one, at the same path below a root."""

    def __init__(self, patience, without, **settings):
        self.home, self.folder = Path(tempfile.mkdtemp(prefix="check.")).resolve(), Path.cwd()
        self.patience, self.silence, self.settings = patience, 0, settings
        self.without = {self.home, *(self.folder / path for pattern in without for path in glob.glob(pattern, recursive=True))}

    def copies(self):
        root = Path(tempfile.mkdtemp(dir=self.home))
        copy, links = root / self.folder.relative_to("/"), []

        def left_out(folder, names):  # and link what is large, which can only be read, and virtual environments
            paths = [path for path in map(Path(folder).joinpath, names) if path.name not in LEFT_OUT and path not in self.without]
            links.extend(path for path in paths if (path / "pyvenv.cfg").exists() or path.lstat().st_size > 50 * 2**20)
            return {*names} - {path.name for path in paths if path not in links}
        with contextlib.suppress(shutil.Error):  # what cannot be read, or is no file
            shutil.copytree(self.folder, copy, symlinks=True, ignore=left_out)
        self.linked = {path: path.stat().st_mtime_ns for path in links if path.is_file()}
        links += [path for above in self.folder.parents[:2] if os.access(above, os.R_OK)  # for ../data
                  for path in above.iterdir() if path not in (self.folder, self.home, *self.folder.parents)]
        for path in links:
            (root / path.relative_to("/")).symlink_to(path)
        return root, copy

    def run(self, command, who, place=None, **how):
        """How: `record` the steps, `nudge` clocks and weights, `kill` after a step, or begin at step `offset` + 1."""
        root, copy = place or self.copies()
        notes, other = (Path(tempfile.mkdtemp(dir=self.home)) for _ in range(2))
        settings = {"home": str(self.home), "notes": str(notes), "copy": str(copy), "library": LIBRARY, **self.settings, **how}
        environment = {
            "OMP_NUM_THREADS": "1", **os.environ, "CHECK_CONVERSION": json.dumps(settings), "TMPDIR": str(other),
            "PYTHONPATH": f"{Path(__file__).resolve().parent}/start:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
            "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "TORCH_COMPILE_DISABLE": "1", "NVIDIA_TF32_OVERRIDE": "0",
            "WANDB_MODE": "offline", **({"TZ": "LATER-24:31:17"} if "nudge" in how else {})}  # another day, minute and second
        print(f"running: {command}", file=sys.stderr, flush=True)
        command = re.sub(rf"(?<![\w./-]){re.escape(str(self.folder))}(?![\w.-])", lambda _: str(copy), command)
        limit = max(self.patience, 5 * self.silence) if who in JUDGED else 10 * self.patience
        waits, latest, idle = "", 0, 0
        try:
            with open(notes / "stdout", "w") as stdout, open(notes / "stderr", "w") as stderr:
                started = subprocess.Popen(["bash", "-o", "pipefail", "-c", command], cwd=copy, env=environment,
                                           stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
            while started.poll() is None and not waits and not (notes / "kill").exists():
                time.sleep(0.1)
                before, latest = latest, max(file.stat().st_mtime for file in notes.iterdir())
                idle = idle + 0.1 if latest == before else 0  # counted, for a machine may sleep meanwhile
                self.silence = max(self.silence, idle)  # so long the script may be silent
                if idle > limit:
                    waits = "\n".join(where_ranks_wait(notes))
        finally:
            kill_all(str(notes).encode())
        if changed := [path for path, before in self.linked.items() if not path.exists() or path.stat().st_mtime_ns != before]:
            raise Verdict(2, f"{changed[0]} was changed: it is large, so it is linked, not copied; --without leaves it out")
        return Run(root, copy, notes).judge(who, started.wait(), (notes / "kill").exists(), waits.replace(str(root), ""))


def kill_all(mark):
    """All that have it in their environment, wherever in the tree they are; and what they have started meanwhile."""
    for _ in range(3):
        time.sleep(0.1)  # what is being started has no environment yet
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                if mark in file.read_bytes():
                    os.kill(int(file.parent.name), signal.SIGKILL)


def where_ranks_wait(notes):
    """The innermost lines of the script's own in which each rank is."""
    for file in sorted(notes.glob("*.stack")):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.stem), signal.SIGUSR2)  # faulthandler writes, also within C++
        time.sleep(1)
        own, last = own_lines(file.read_text().splitlines()), file.with_suffix(".jsonl").read_text().splitlines()[-1]
        yield f"rank {json.loads(last)['rank']}: {', called from '.join(own[:2]) or 'has ended'}"


def own_lines(stack):
    """Those of the script, not of libraries."""
    return [line.strip() for line in stack if 'File "' in line and not re.search(LIBRARY, line)]


def check_conversion(workspace, original, converted):
    first = workspace.run(original, "the original", record=True)
    second = workspace.run(original, "the original", nudge=True)
    other = workspace.run(converted, "the converted script")
    training = Training(first.ranks[0], [*other.ranks.values()])
    training.measure(second.ranks[0])
    if fault := training.fault():
        raise Verdict(1, fault)
    found, writers = [*map(outputs, (first, second, other))], defaultdict(set)
    for note in other.notes["wrote"]:
        writers[note["file"]].add(note["rank"])
    faults = [f'{file} is written by ranks {", ".join(map(str, sorted(ranks)))} (see "Saving")'
              for file, ranks in sorted(writers.items()) if len(ranks) > 1
              and f"saved {file}" in found[2] and (other.copy / file).stat().st_size]  # a lock is empty
    faults += sorted({f'{note["file"]} holds the DDP model, not model.module (see "Saving")'
                      for note in other.notes["saved"] if note["wrapped"]})
    batchnorm = "; BatchNorm is as its option says, on CPUs too" if workspace.settings["batchnorm"] else ""
    texts = [f"the same training: {len(training.base)} steps with {len(other.ranks)} processes", "changed for "
             f"the check: both scripts shuffle as DistributedSampler does, and dropout and autocast are off{batchnorm}"]
    return report(texts, found, faults)


def check_resume(workspace, command):
    """Whole; then killed in the step after one of its saves; then started again in that copy."""
    whole = workspace.run(command, "the unbroken run", record=True)
    length, writes, files = len(whole.ranks[0]), writes_of(whole), defaultdict(set)
    for step, file in writes:
        files[step].add(file)
    steps = sorted({note["steps"] for note in whole.notes["saved"] if note["steps"]})
    often = {file for _, file in writes if sum(file in files[step] for step in steps) > 1}  # it resumes from one of them
    saves = [step for step in steps if step < length and files[step] >= often]
    best = [step for step, later in pairwise(steps) if step in saves and files[step] - files[later]]  # the next is no new best
    saves = best or saves
    if not saves:
        raise Verdict(2, "before its last step, it never saves all its files after the same step: let it "
                      "evaluate and save at intervals that meet")
    saved = saves[len(saves) // 2]
    killed = workspace.run(command, "the killed run", nudge=True, kill=saved + 1)
    faults = [Training(whole.ranks[rank][:saved], [steps[:saved]]).fault() for rank, steps in killed.ranks.items()]
    if any(faults):
        raise Verdict(2, f"the script draws other numbers in each run, is it seeded? {max(faults)}")
    when_killed = outputs(killed)
    again = workspace.run(command, "the restarted run", (killed.root, killed.copy), nudge=True, offset=saved)
    faults = [Training(whole.ranks[rank][saved:], [steps], saved).fault() for rank, steps in again.ranks.items()]
    if any(faults):
        raise Verdict(1, f"killed at step {saved + 1}, saved at {saved}: {min(filter(None, faults), key=first_cause)}")
    faults = []
    if writes_of(killed) == {write for write in writes if write[0] <= saved}:  # it does not write by the clock
        faults = [f"{file} is saved at step {step} in only one of the two runs"
                  for step, file in sorted(writes ^ writes_of(again, saved)) if step > saved]
    finally_found = outputs(again) | {"printed": killed.lines + again.lines}
    title = f"a killed run goes on as if it had never stopped: killed at step {saved + 1} of {length}"
    return report([title], [outputs(whole), when_killed, finally_found], faults, resumed=True)


def writes_of(run, offset=0):
    """After which steps it writes which files, but temporary ones. What it writes before the first, it writes at each start."""
    moved = {note["file"] for note in run.notes["moved"]}
    return {(offset + note["steps"], note["file"]) for note in run.notes["wrote"] if note["steps"] and note["file"] not in moved}


def first_cause(fault):
    """A fault's step, and of one step what led to the others."""
    return int(re.search(r"\d+", fault)[0]), "not loaded" not in fault, "other samples" not in fault


def report(texts, found, faults, resumed=False):
    """Compares what is printed and saved, too."""
    (first, second, other), same, left_out = found, [], []
    if not resumed:
        same_names(first, second, other)
    for name, lines in first.items():
        again = second.get(name, lines if resumed else None)  # it was not there yet when the run was killed
        if None in (lines, again, other.get(name, ())):
            left_out.append(name)
        elif name not in other:
            faults.append(f"{name} is missing")
        else:
            different, unlike, count = compare_lines([lines, again, other[name]], resumed, name == "printed")
            faults += [f"{name}: {one}" for one in different[:4]]
            faults += [f"{name}: {len(different) - 4} more differ"] if different[4:] else []
            if name == "printed" and not resumed and "' instead of '" in "".join(different):
                faults.append('is it one rank\'s figure, or a mean of unequal batches or ranks? (see "Printed figures")')
            left_out += unlike
            same += [] if different else [f"{name} ({count} lines)"]
    left_out += sorted(other.keys() - first.keys())
    if resumed and faults:
        faults.append('is all loaded that this comes from, such as the best metric so far? (see "Load first, then DDP")')
    if left_out[5:]:
        left_out[5:] = [f"and {len(left_out) - 5} more"]
    if faults:
        texts[0] = f"NOT THE SAME OUTPUT: {texts[0]}"
    texts += [f"the same: {', '.join(same)}",
              f"not compared (it differs from run to run, cannot be read, or is new): {', '.join(left_out)}", *faults]
    return int(faults != []), "\n".join(text for text in texts if not text.endswith(": "))


def outputs(run):
    """Lines that it printed, and those of each file that is not as in this folder."""
    found = {"printed": run.lines}
    for path in sorted(run.copy.rglob("*")):
        before = path.relative_to(run.copy)
        if path.is_file() and not (before.exists() and before.stat().st_mtime_ns == path.stat().st_mtime_ns):
            found[f"saved {before}"] = read_lines(path)
    return found


def main():
    parser = argparse.ArgumentParser("python tools/check_conversion", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("commands", nargs="+", metavar="COMMAND", help="the original and the converted one; with --resume, one")
    add("--resume", action="store_true", help="kill this one and start it again: does it go on as if it had never stopped?")
    add("--sync-batchnorm", dest="batchnorm", action="store_const", const="sync", help="compare BatchNorm as SyncBatchNorm")
    add("--rank-batchnorm", dest="batchnorm", action="store_const", const="rank", help="leave BatchNorm out, as each rank's own")
    add("--without", action="append", default=[], metavar="PATTERN", help="files to leave out of the copies: 'checkpoints/*.pt'")
    add("--patience", type=float, default=60, metavar="SECONDS", help="without activity, a run counts as hung (default: 60)")
    given = parser.parse_args()
    if len(given.commands) != 2 - given.resume:
        parser.error("give two commands, or --resume and one")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    workspace = Workspace(given.patience, given.without, batchnorm=given.batchnorm, force=not given.resume)
    try:
        status, text = (check_resume if given.resume else check_conversion)(workspace, *given.commands)
    except Verdict as verdict:
        status, text = verdict.args
        text = ("NOT THE SAME TRAINING: " if status == 1 else "cannot be judged: ") + text
    except (Exception, KeyboardInterrupt):
        status, text = 2, f"cannot be judged: the check was interrupted, or failed: {traceback.format_exc()}"
    finally:
        shutil.rmtree(workspace.home, ignore_errors=True)
    text += "\n(sections of docs/your_own_script.md)" if '(see "' in text else ""
    print(text, file=sys.stderr if status == 2 else sys.stdout)
    return status


if __name__ == "__main__":
    sys.exit(main())
