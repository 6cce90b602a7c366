"""Runs a command in a copy of the folder until it ends or hangs, and reads what its processes noted."""
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from training import Verdict, see

START = Path(__file__).resolve().parent / "start"
LARGE = 50 * 2**20  # bytes; a larger file is linked, and a folder of twenty times that: both can only be read
LEFT_OUT = {".git", "__pycache__", "node_modules", ".cache", ".ipynb_checkpoints"}


class Run:
    """What a command that has ended did and left. If it did not end well, `status` is that of the verdict."""

    def __init__(self, root, copy, notes, ended, waits, who, status):
        texts = [file.read_text().rpartition("\n")[0] for file in notes.glob("*.jsonl")]  # the last line was killed, perhaps
        found = [json.loads(line) for text in texts for line in text.splitlines()]
        self.copy, self.notes, self.ranks = copy, sorted(found, key=lambda note: note["time"]), {}
        for note in sorted(self.of("rank") + self.of("step"), key=lambda note: note["rank"]):
            self.ranks.setdefault(note["rank"], []).extend([note] * (note["kind"] == "step"))
        texts = [file.read_text(errors="replace") for file in sorted(notes.glob("stdout*"))]
        texts += ["".join(note["text"] for note in self.of("line"))]
        self.lines = re.split("[\n\r]", "\n".join(texts).replace(str(root), ""))
        errors = [note["text"] for note in self.of("error")]  # the first has led to the others
        error = (errors or [(notes / "stderr").read_text(errors="replace")])[0].strip().splitlines()[-4:]
        fault, lines = "", error
        if self.of("stop"):
            status, fault, lines = 2, self.of("stop")[0]["text"], []
        elif waits:
            fault, lines = f"{who} hangs{see('Hangs and errors')}:", waits
        elif ended in (126, 127) or re.search("invalid device ordinal|Duplicate GPU", "".join(error)):
            status, fault = 2, f"{who} cannot be started:"
        elif ended and status:
            fault = f"{who} ends with {ended}{see('Hangs and errors')}:"
        elif not any(self.ranks.values()):
            status, fault = 2, f"no optimizer takes a step in {who}; does it resume a file? --without leaves it out"
        if fault:
            raise Verdict(status, "\n".join([fault, *lines]).replace(str(root), ""))

    def of(self, kind):
        return [note for note in self.notes if note["kind"] == kind]


def size(path):
    return sum(one.lstat().st_size for one in (path, *path.rglob("*")))


class Workspace:
    """A temporary folder, in which each run has a copy of the current one, at the same path below a root."""

    def __init__(self, patience, batchnorm, without):
        self.home, self.folder = Path(tempfile.mkdtemp(prefix="check.")).resolve(), Path.cwd()
        self.patience, self.batchnorm, self.silence, self.linked = patience, batchnorm, 0, {}
        self.without = {self.home, *(path for pattern in without for path in self.folder.glob(pattern))}

    def copies(self):
        root = Path(tempfile.mkdtemp(dir=self.home))
        copy, links = root / self.folder.relative_to("/"), []

        def left_out(folder, names):
            paths = [Path(folder, name) for name in names]
            paths = [path for path in paths if path.name not in LEFT_OUT and path not in self.without]
            large = [path for path in paths if not path.is_symlink() and size(path) > LARGE * (20 if path.is_dir() else 1)]
            self.linked |= {path: path.stat().st_mtime_ns for path in large if path not in self.linked}
            links.extend({*large, *(path for path in paths if (path / "pyvenv.cfg").exists())})
            return {*names} - {path.name for path in paths if path not in links}
        with contextlib.suppress(shutil.Error):  # what cannot be read, or is no file
            shutil.copytree(self.folder, copy, symlinks=True, ignore=left_out)
        links += [path for above in self.folder.parents[:2] for path in above.iterdir()  # for ../data
                  if path not in (self.folder, self.home, *self.folder.parents)]
        for path in links:
            (root / path.relative_to("/")).symlink_to(path)
        return root, copy

    def run(self, command, role, who="the original", status=2, place=None, force=True, offset=0, kill=None):
        root, copy = place or self.copies()
        notes, other = (Path(tempfile.mkdtemp(dir=self.home)) for _ in range(2))
        settings = {"home": str(self.home), "notes": str(notes), "copy": str(copy), "role": role,
                    "force": force, "batchnorm": self.batchnorm, "kill": kill, "offset": offset}
        environment = {
            **os.environ, "CHECK_CONVERSION": json.dumps(settings), "PWD": str(copy), "TMPDIR": str(other),
            "PYTHONPATH": ":".join(filter(None, (str(START), os.environ.get("PYTHONPATH")))),
            "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "WANDB_MODE": "offline",
            **({"TORCH_COMPILE_DISABLE": "1", "NVIDIA_TF32_OVERRIDE": "0"} if force else {}),
            **({"TZ": "LATER-24:59:59"} if role == "second" else {})}  # another day, hour, minute and second
        print(f"running: {command}", file=sys.stderr, flush=True)
        command = re.sub(rf"(?<![\w./-]){re.escape(str(self.folder))}(?![\w.-])", lambda _: str(copy), command)
        with open(notes / "stdout", "w") as stdout, open(notes / "stderr", "w") as stderr:
            started = subprocess.Popen(["bash", "-o", "pipefail", "-c", command], cwd=copy, env=environment,
                                       stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
        waits = []
        try:
            while started.poll() is None and not waits and not (notes / "kill").exists():
                time.sleep(0.1)
                idle = time.time() - max(file.stat().st_mtime for file in notes.iterdir())
                begun = (notes / "alive").exists() and (notes / "alive").stat().st_size  # it may import for a while
                if idle > max(self.patience, 5 * self.silence, 0 if begun else 60):
                    waits = [*where_ranks_wait(notes)] or ["no rank has reported yet"]
                elif who == "the original":  # which shows how long a script may be silent
                    self.silence = max(self.silence, idle)
        finally:
            kill_all(str(notes).encode())
        for path, changed in self.linked.items():  # by a write that Python did not see
            if not path.exists() or path.stat().st_mtime_ns != changed:
                raise Verdict(2, f"{path} has changed: it is large, and was linked, not copied; --without leaves it out")
        return Run(root, copy, notes, started.wait(), waits, who, status)


def kill_all(mark):
    """All that have it in their environment, wherever in the tree they are, and what they start meanwhile."""
    for _ in range(100):
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                if mark in file.read_bytes():
                    found.append(file)
                    os.kill(int(file.parent.name), signal.SIGKILL)
        if not found:
            return
        time.sleep(0.05)


def where_ranks_wait(notes):
    """The innermost line of the script's own in which each rank is."""
    for file in sorted(notes.glob("*.stack")):
        if not (said := file.with_suffix(".jsonl")).exists():
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.stem), signal.SIGUSR2)  # faulthandler writes, also within C++
        time.sleep(1)
        stack = file.read_text().splitlines()[1:]
        own = [line.strip() for line in stack if not re.search("/lib(64)?/python|check_conversion_observer|<fro", line)]
        yield f"rank {json.loads(said.read_text().splitlines()[-1])['rank']}: {(own or ['has ended'])[0]}"
