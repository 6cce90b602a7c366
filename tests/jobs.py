"""Commands started as a user starts them, and followed until none of their processes is left."""
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 300  # after which a test gives a process up: many times what it takes on a busy machine

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and all that they start, ignore Ctrl-C
started = []  # all jobs of a test


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Each test works in a folder of its own, finds torchrun, and leaves no process behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    yield tmp_path
    while started:
        job = started.pop()
        job.kill()
        print(job.stdout, job.stderr)  # which pytest shows where a test has failed


class Job:
    """A command and all its processes, in each of which Python runs the lines `before` anything else."""

    def __init__(self, command, cwd=".", before="", **env):
        self.kept = tempfile.TemporaryDirectory()
        self.files = Path(self.kept.name)
        (self.files / "sitecustomize.py").write_text(before)
        with open(self.files / "stdout", "w") as stdout, open(self.files / "stderr", "w") as stderr:
            self.process = subprocess.Popen(
                [str(word) for word in command], cwd=cwd, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": f"{self.files}:{ROOT}", "TEST_JOB": str(self.files), **env})
        started.append(self)

    @property
    def stdout(self):
        return (self.files / "stdout").read_text()

    @property
    def stderr(self):
        return (self.files / "stderr").read_text()

    def until(self, condition, what):
        end = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < end, f"{what} for {SECONDS} seconds"
            time.sleep(0.05)

    def wait_for(self, text):
        """Until the job has printed this."""
        self.until(lambda: text in self.stdout or self.process.poll() is not None, f"no {text!r}")
        assert text in self.stdout, f"it ended without {text!r}"

    def wait(self):
        """The job's status, once all its processes have ended."""
        self.until(lambda: self.process.poll() is not None, "it did not end")
        self.until(lambda: not self.processes(), "processes were left behind")
        return self.process.returncode

    def processes(self):
        """The ids of the job's processes, wherever they are in the process tree."""
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if str(self.files).encode() in file.read_bytes():
                    found.append(int(file.parent.name))
        return found

    def kill(self):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
