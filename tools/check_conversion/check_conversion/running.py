"""Runs a command in a copy of the folder until it ends or hangs, and reads what its processes noted."""
import collections
import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from check_conversion import files, records
from check_conversion.records import STREAMS, Settings
from check_conversion.verdict import CannotSay

START = Path(__file__).resolve().parent / "start"
PACKAGES = r"/lib(64)?/python\d"  # where Python keeps its own files, and packages
ENDING = 10  # seconds that processes may take to end


@dataclass
class Run:
    """A run that has ended."""
    name: str  # of its script
    status: int
    stderr: str  # of the command
    texts: dict  # of each of STREAMS, by rank; -1 is the command itself, perhaps a launcher
    processes: list
    waits: list  # where each rank waits, if it hangs
    outlived: list  # by processes that it started
    files: dict  # what it left in its copy of the folder, by their names
    settings: Settings

    @property
    def ranks(self):
        """The processes that train."""
        return [one for one in self.processes if one.steps]

    @property
    def idle(self):
        """Ranks that took no step."""
        return sorted({one.rank for one in self.processes} - {one.rank for one in self.ranks})

    def names(self, kind):
        """Of all records of a kind."""
        return [*dict.fromkeys(record.name for one in self.processes for record in one.of(kind))]

    def text(self, stream):
        return "\n".join(text for _, text in sorted(self.texts[stream].items()))


def prepare(workspace, again=None, **options):
    """What the processes of a run are told: a new copy to work in, or an earlier run's, and a folder of records."""
    root, copy = (again.root, again.copy) if again else map(str, workspace.copy())
    return Settings(tempfile.mkdtemp(prefix="records.", dir=workspace.home), root, copy,
                    [*map(str, workspace.protected)], **options)


def run(command, workspace, patience, settings):
    """Run a command as the settings say, and end all that it has started."""
    folder, waits, outlived = Path(settings.records), [], []
    try:
        with open(folder / "stdout", "w") as stdout, open(folder / "stderr", "w") as stderr:
            started = subprocess.Popen(
                ["bash", "-o", "pipefail", "-c", workspace.in_copy(command, settings.copy)],  # | tee has a status too
                cwd=settings.copy, start_new_session=True, env=environment(settings),
                stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
        waits = wait(started, folder, patience)
        time.sleep(0.1)  # while a process becomes another program, its environment reads empty
        end = time.monotonic() + (0 if waits else ENDING)  # loader workers see late that they are alone
        while (outlived := [*processes(settings.records)]) and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        kill(settings.records)
    status = started.wait()
    if status in (126, 127):
        raise CannotSay(f"the command cannot be started: {(folder / 'stderr').read_text().strip()}")
    return read_run(script_of(command), workspace, settings, status, waits, outlived)


def environment(settings):
    home = Path(settings.records).parent
    added = {**settings.as_environment(), "PWD": settings.copy,
             "TMPDIR": tempfile.mkdtemp(prefix="t", dir=home),  # short: sockets have names of at most 107 letters
             "PYTHONPATH": ":".join(filter(None, (str(START), os.environ.get("PYTHONPATH")))),
             "PYTHONDONTWRITEBYTECODE": "1", "WANDB_MODE": "offline",  # nothing of it leaves this machine
             "PYTHONUNBUFFERED": "1"}  # what a killed rank has printed is there
    if settings.intervene:
        added |= {"TORCH_COMPILE_DISABLE": "1", "NVIDIA_TF32_OVERRIDE": "0"}
    if settings.nudged:
        added["TZ"] = "LATER-24:59:59"  # another day, hour, minute and second
    return {**os.environ, **added}


def wait(started, folder, patience):
    """Until it ends. Where it hangs: where each rank waits."""
    while started.poll() is None:
        time.sleep(0.1)
        idle = time.time() - max(file.stat().st_mtime for file in folder.iterdir())
        if idle > patience and (idle > 60 or any(one.steps for one in read_processes(folder))):  # it may import yet
            return [*where_ranks_wait(folder)] or ["no rank has reported yet"]
    return []


def kill(mark):
    """All processes of a run, and those that they start meanwhile."""
    end = time.monotonic() + ENDING
    while still := [*processes(mark)]:
        if time.monotonic() > end:
            raise CannotSay(f"process {still[0]}, which a script has started, cannot be ended")
        for process in still:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def processes(mark):
    """Those in whose environment the folder of records is named, wherever in the process tree they are."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is somebody else's
            if mark in file.read_bytes().decode(errors="replace"):
                yield int(file.parent.name)


def where_ranks_wait(folder):
    """The innermost line of the user's own in which each rank is, and what is called there."""
    # Loader workers have the rank of the process that they serve.
    found = sorted(read_processes(folder), key=lambda one: (len(one.steps), -one.pid))
    for rank, one in sorted({one.rank: one for one in found if (folder / f"{one.pid}.stack").exists()}.items()):
        place = "has ended"
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGUSR2)  # faulthandler writes, also within C++
            time.sleep(1)
        stack = re.findall(r'File "(.*)", line (\d+) in (\S+)', (folder / f"{one.pid}.stack").read_text())
        if own := [(file, line) for file, line, _ in stack if is_users(file)]:
            called = "" if is_users(stack[0][0]) else f", in {stack[0][2]}"
            place = f"waits at {os.path.basename(own[0][0])}:{own[0][1]}{called}"
        elif stack:
            place = f"waits in {stack[0][2]}, outside its script"
        yield f"rank {rank}, after {len(one.steps)} steps, {place}"


def is_users(file):
    return not re.search(f"{PACKAGES}|/check_conversion/|^<", file)


def read_processes(folder):
    found = [records.read(file) for file in folder.glob("*.notes")]
    return sorted((one for one in found if one.records), key=lambda one: (one.rank, one.pid))


def script_of(command):
    found = re.search(r"(?:^|[\s/])([^\s/]+\.py)(?=$|\s)", command) or re.search(r".* -m (\S+)", command)
    return found[1] if found else command


def read_run(name, workspace, settings, status=0, waits=(), outlived=()):
    folder, copy, processes = Path(settings.records), Path(settings.copy), read_processes(Path(settings.records))
    ranks, texts = {str(one.pid): one.rank for one in processes}, {}
    for stream in STREAMS:
        texts[stream] = collections.defaultdict(str)
        for file in sorted(folder.glob(f"*{stream}")):  # without the copy's root, paths are those of the folder itself
            texts[stream][ranks.get(file.stem, -1)] += file.read_text("utf-8", "replace").replace(settings.root, "")
    left = files.read_all(copy, workspace.unchanged(copy), settings.root)
    return Run(name, status, (folder / "stderr").read_text(errors="replace"), texts, processes, [*waits], [*outlived],
               left, settings)


def own_error(stderr):
    """The first error that anybody had, after the last line of the user's own that led to it."""
    place = "?"
    for line in stderr.splitlines():
        who, line = re.match(r"(?:\[(rank\d+)\]: ?)?(.*)", line).groups()
        found = re.match(r' *File "(.*)", line (\d+)', line)
        if found and is_users(found[1]):
            place = f"{os.path.basename(found[1])}:{found[2]}"
        elif re.match(r"[\w.]*(Error|Exception)(: \S|$)|.*can't open file", line):
            return f"{who} at {place}: {line[:300]}".removeprefix("None ")
    return ["it prints no error", *(line for line in stderr.splitlines() if line.strip("= "))][-1]
