"""Runs a command until it ends or hangs, and reads what it noted."""
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from check_conversion import protocol
from check_conversion.new_files import read as read_new_files
from check_conversion.protocol import Remark, Settings, Step
from check_conversion.verdict import CannotSay

START = Path(__file__).resolve().parent / "start"
ENDING = 10  # seconds that processes may take to end


@dataclass
class Process:
    """What one process noted."""
    rank: int
    pid: int
    notes: list

    def of(self, kind):
        return [one for one in self.notes if isinstance(one, kind)]

    @property
    def steps(self):
        return self.of(Step)


@dataclass
class Run:
    """A run that has ended."""
    name: str  # of its script
    status: int
    stdout: str
    stderr: str
    errors: str  # what the script's own lines wrote to stderr
    processes: list
    waits: list = field(default_factory=list)  # where each rank waits, if it hangs
    outlived: list = field(default_factory=list)  # by processes that it started
    new_files: dict = field(default_factory=dict)  # in its copy of the folder, by their names
    started: set = field(default_factory=set)  # ranks, whether they noted anything or not

    @property
    def idle(self):
        """Ranks that took no step."""
        return sorted({*self.started, *(one.rank for one in self.processes)} - {one.rank for one in self.ranks})

    @property
    def ranks(self):
        return [one for one in self.processes if one.steps]

    @property
    def batchnorm(self):
        return set().union(*(step.batchnorm for rank in self.ranks for step in rank.steps[-1:]))

    @property
    def synchronised_at(self):
        return max((rank.steps[-1].synchronised_at for rank in self.ranks), default="")

    def remarks(self, about):
        return [remark.name for one in self.processes for remark in one.of(Remark)
                if remark.about == about]


def run(command, workspace, args, **options):
    """Run a command in a copy of the folder, and end all that it has started."""
    print("running:", command, file=sys.stderr, flush=True)
    settings = prepare(workspace, **options)
    records = Path(settings.records)
    with open(records / "stdout", "w") as stdout, open(records / "stderr", "w") as stderr:
        started = subprocess.Popen(
            ["bash", "-o", "pipefail", "-c", workspace.in_copy(command, Path(settings.copy))],  # | tee has a status too
            cwd=settings.copy, start_new_session=True, env=environment(workspace, settings),
            stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
    waits, outlived = [], []
    try:
        waits = wait(started, records, args)
        time.sleep(0.1)  # while a process becomes another program, its environment reads empty
        end = time.monotonic() + (0 if waits else ENDING)  # loader workers see late that they are alone
        while (outlived := [*processes(settings.records)]) and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        kill(settings.records)
    status = started.wait()
    if status in (126, 127):
        raise CannotSay(f"the command cannot be started: {(records / 'stderr').read_text().strip()}")
    found = read_run(script_of(command), records, status, waits, outlived)
    found.new_files = read_new_files(settings.copy, workspace.unchanged(Path(settings.copy)))
    return found


def prepare(workspace, **options):
    """A copy to work in, a folder of records beside it, and what the processes are told."""
    root, copy = workspace.copy()
    records = root.with_name(f"{root.name}.records")
    records.mkdir()
    temporary = tempfile.mkdtemp(prefix="t", dir=workspace.home)  # short: sockets have names of at most 107 letters
    return Settings(str(records), str(workspace.home), temporary, str(root), str(copy),
                    [*map(str, workspace.protected)], **options)


def environment(workspace, settings):
    path = os.environ.get("PYTHONPATH")
    added = {**settings.as_environment(), "PWD": settings.copy,
             "PYTHONPATH": f"{START}:{path}" if path else START,
             "PYTHONDONTWRITEBYTECODE": "1", "WANDB_MODE": "offline",  # where they would be stored
             "TORCH_COMPILE_DISABLE": "1", "NVIDIA_TF32_OVERRIDE": "0"}
    return {**os.environ, **{name: str(value) for name, value in added.items()}}


def wait(started, records, args):
    """Until it ends. Where it hangs: where each rank waits."""
    while started.poll() is None:
        time.sleep(0.1)
        if args.interrupted:
            raise CannotSay("interrupted")
        idle = time.time() - max(file.stat().st_mtime for file in records.iterdir())
        if idle > args.patience and (idle > 60 or read_processes(records)):  # torch may be imported yet
            return [*where_ranks_wait(records)] or ["no rank has reported yet"]
    return []


def kill(records):
    """All processes of a run, and those that they start meanwhile."""
    end = time.monotonic() + ENDING
    while still := [*processes(records)]:
        if time.monotonic() > end:
            raise CannotSay(f"process {still[0]}, which a script has started, cannot be ended")
        for process in still:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def processes(records):
    """Those in whose environment the folder of records is named, wherever in the process tree they are."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is somebody else's
            if records in file.read_bytes().decode(errors="replace"):
                yield int(file.parent.name)


def where_ranks_wait(records):
    """The innermost line of the user's own in which each rank is, and what that has called."""
    # A forked loader worker notes too, and has no file for its stack.
    ranks = [one for one in read_processes(records) if (records / f"{one.pid}.stack").exists()]
    for one in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGUSR2)  # faulthandler writes, also within C++
    time.sleep(1)
    for one in ranks:
        place, called = "has ended", ""
        stack = (records / f"{one.pid}.stack").read_text()
        for file, line, function in re.findall(r'File "(.*)", line (\d+) in (\S+)', stack):
            if not re.search("/lib/python|/check_conversion/|^<", file):
                place = f"waits at {os.path.basename(file)}:{line}{called}"
                break
            if function not in ("wrapper", "_wrapped_call_impl", "_call_impl", "note_and_go"):
                called = f", in {function}"
        yield f"rank {one.rank}, after {len(one.steps)} steps, {place}"


def read_processes(records):
    found = []
    for file in records.glob("*.notes"):
        if notes := protocol.read(file):
            found.append(Process(notes[-1][0], int(file.stem), [one for _, one in notes]))
    return sorted(found, key=lambda one: (one.rank, one.pid))


def script_of(command):
    found = re.search(r"(?:^|[\s/])([^\s/]+\.py)(?=$|\s)|.* -m (\S+)", command)
    return found[1] or found[2] if found else command


def read_run(name, records, status=0, waits=(), outlived=()):
    root = json.loads((records / "settings").read_text())["root"]  # so that paths are those of the folder itself
    stdout, errors = ("".join(file.read_text(errors="replace") for file in sorted(records.glob(f"*{stream}"))).replace(root, "")
                      for stream in ("stdout", "errors"))
    stderr = (records / "stderr").read_text(errors="replace")
    started = {int(file.read_text() or 0) for file in records.glob("*.rank")}
    return Run(name, status, stdout, stderr, errors, read_processes(records), [*waits], [*outlived], started=started)


def own_error(stderr):
    """The first error that anybody had, after the last line of the user's own that led to it."""
    place = "?"
    for line in stderr.splitlines():
        who, line = re.match(r"(?:\[(rank\d+)\]: ?)?(.*)", line).groups()
        found = re.match(r' *File "(.*)", line (\d+)', line)
        if found and not re.search('/lib/python|/check_conversion/|"<', line):
            place = f"{os.path.basename(found[1])}:{found[2]}"
        elif re.match(r"[\w.]*(Error|Exception)(: \S|$)|.*can't open file", line):
            return f"{who} at {place}: {line[:300]}".removeprefix("None ")
    return ["it prints no error", *(line for line in stderr.splitlines() if line.strip("= "))][-1]
