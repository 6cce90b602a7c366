"""Runs a command until it ends or hangs, and reads what it noted."""
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from conversion_check import record
from conversion_check.workspace import CannotSay

START = Path(__file__).resolve().parent / "start"


@dataclass
class Rank:
    """What one process noted."""
    rank: int
    process: int
    notes: list

    def of(self, kind):
        return [one for one in self.notes if isinstance(one, kind)]

    @property
    def steps(self):
        return self.of(record.Step)

    def remarks(self, what):
        return [one.name for one in self.of(record.Remark) if one.what == what]


@dataclass
class Run:
    """A run that has ended."""
    name: str
    status: int
    stdout: str
    stderr: str
    processes: list
    waits: list = field(default_factory=list)  # where each rank waits, if it hangs
    left: list = field(default_factory=list)  # processes that outlived it

    @property
    def ranks(self):
        return [one for one in self.processes if one.steps]

    def remarks(self, what):
        return [name for one in self.processes for name in one.remarks(what)]


def processes(mark):
    """What there is of a run, wherever it is in the process tree."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is somebody else's
            if mark in file.read_bytes().decode(errors="replace"):
                yield int(file.parent.name)


def read_ranks(records):
    ranks = []
    for file in records.glob("*.notes"):
        if notes := record.read(file):
            ranks.append(Rank(notes[-1][0], int(file.stem), [one for _, one in notes]))
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
            if not re.search("/lib/python|/conversion_check/|^<", file):
                place = f"waits at {os.path.basename(file)}:{line}{called}"
                break
            if function not in ("wrapper", "_wrapped_call_impl", "_call_impl", "note_call"):
                called = f", in {function}"
        yield f"rank {one.rank}, after {len(one.steps)} steps, {place}"


def environment(workspace, records, root, copy, options):
    path = os.environ.get("PYTHONPATH")
    added = {"CHECK_CONVERSION": records, "CHECK_CONVERSION_HOME": workspace.home,
             "CHECK_CONVERSION_COPY": root, "CHECK_CONVERSION_FOLDER": copy,
             "CHECK_CONVERSION_KEPT": "\n".join(map(str, workspace.kept)),
             "CHECK_CONVERSION_BEGAN": time.time(), "PWD": copy, "TMPDIR": workspace.temporary,
             "PYTHONPATH": f"{START}:{path}" if path else START,
             "PYTHONDONTWRITEBYTECODE": "1", "WANDB_MODE": "offline",  # where they would be kept
             "TORCH_COMPILE_DISABLE": "1", "NVIDIA_TF32_OVERRIDE": "0", **options}
    return {**os.environ, **{name: str(value) for name, value in added.items()}}


def wait(started, records, args):
    """Until it ends. Where it hangs: where each rank waits."""
    while started.poll() is None:
        time.sleep(0.1)
        if args.interrupted:
            raise CannotSay("interrupted")
        idle = time.time() - max(file.stat().st_mtime for file in records.iterdir())
        if idle > args.patience and (idle > 60 or read_ranks(records)):  # torch may be imported yet
            return [*where_ranks_wait(records)] or ["no rank has come so far"]
    return []


def run(command, workspace, args, **options):
    """Run a command in a copy of the folder. Nothing of it is left then."""
    print("running:", command, file=sys.stderr, flush=True)
    root, copy = workspace.copy()
    records = root.with_name(f"{root.name}.records")
    records.mkdir()
    if args.float64:
        options["CHECK_CONVERSION_FLOAT64"] = "1"
    with open(records / "stdout", "w") as stdout, open(records / "stderr", "w") as stderr:
        started = subprocess.Popen(
            workspace.in_copy(command, copy), shell=True, cwd=copy, start_new_session=True,
            env=environment(workspace, records, root, copy, options), stdin=subprocess.DEVNULL,
            stdout=stdout, stderr=stderr)
    waits, left = [], []
    try:
        waits = wait(started, records, args)
        end = time.monotonic() + (0 if waits else 10)  # loader workers see late that they are alone
        while (left := [*processes(str(records))]) and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        while still := [*processes(str(records))]:
            for process in still:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
    if started.wait() in (126, 127):
        raise CannotSay(f"cannot be started: {(records / 'stderr').read_text().strip()}")
    return read_run(command, records, started.wait(), waits, left)


def read_run(command, records, status=0, waits=(), left=()):
    found = re.search(r"(?:^|[\s/])([^\s/]+\.py)(?=$|\s)|.* -m (\S+)", command)
    name = found[1] or found[2] if found else command
    stdout = "".join(file.read_text(errors="replace") for file in sorted(records.glob("*stdout")))
    stderr = (records / "stderr").read_text(errors="replace")
    return Run(name, status, stdout, stderr, read_ranks(records), waits, left)
