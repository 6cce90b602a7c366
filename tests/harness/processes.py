"""Processes of a test, and what they print: a Job is a command as a user starts it, a fork a copy of this process."""
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

HARNESS = Path(__file__).parent
ROOT = HARNESS.parent.parent
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
        (self.files / "sitecustomize.py").write_text(  # multiprocessing's tracker needs no torch, which takes seconds
            f"import sys\nif 'resource_tracker' not in str(sys.orig_argv):\n    exec({before!r}, {{}})\n")
        env = {**os.environ, "PYTHONPATH": f"{self.files}:{ROOT}:{HARNESS}", **env}
        with open(self.files / "stdout", "w") as stdout, open(self.files / "stderr", "w") as stderr:
            self.process = subprocess.Popen(
                [str(word) for word in command], cwd=cwd, env={name: str(value) for name, value in env.items()},
                stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True)
        started.append(self)

    stdout = property(lambda self: (self.files / "stdout").read_text())
    stderr = property(lambda self: (self.files / "stderr").read_text())

    def until(self, condition, what):
        end = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < end, f"{what} for {SECONDS} seconds"
            time.sleep(0.05)

    def wait_for(self, text):
        self.until(lambda: text in self.stdout or self.process.poll() is not None, f"no {text!r}")
        assert text in self.stdout, f"it ended without {text!r}"

    def wait(self):
        """The job's status, once all its processes have ended."""
        self.until(lambda: self.process.poll() is not None, "it did not end")
        self.until(lambda: not any(self.processes()), "processes were left behind")
        return self.process.returncode

    def processes(self):
        """The ids of the job's processes, wherever they are in the process tree."""
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if str(self.files).encode() in file.read_bytes():
                    yield int(file.parent.name)

    def kill(self):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def let_gloo_rest():
    """Before Python 3.11.10, a fork hangs if a thread of gloo takes up Python meanwhile (python/cpython#112275)."""
    with contextlib.suppress(OSError):  # a thread has ended
        while any("(pt_gloo_runloop) R" in thread.read_text() for thread in Path("/proc/self/task").glob("*/stat")):
            time.sleep(0.001)


os.register_at_fork(before=let_gloo_rest)  # of loader workers


def be_rank(file, arguments, outputs, before, environment):
    """In a fork: become what a launcher starts."""
    os.setsid()
    for stream, output in zip((1, 2), outputs):
        os.dup2(output.fileno(), stream)
    sys.stdout, sys.stderr = (open(stream, "w", closefd=False) for stream in (1, 2))
    os.environ.update({name: str(value) for name, value in environment.items()})
    multiprocessing.set_start_method("fork", force=True)  # of loader workers, which keep what `before` has changed
    sys.argv = [str(file), *map(str, arguments)]
    exec(before, {})
    runpy.run_path(str(file), run_name="__main__")


def fork(file, arguments, before, environments):
    """Run a file to its end in a fork for each environment; return the exit codes, and what was printed."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        ranks = [multiprocessing.get_context("fork").Process(
            target=be_rank, args=(file, arguments, (stdout, stderr), before, environment)) for environment in environments]
        for rank in ranks:
            rank.start()
        try:
            end = time.monotonic() + SECONDS
            for rank in ranks:
                rank.join(max(0, end - time.monotonic()))
            codes = ["hangs" if rank.exitcode is None else rank.exitcode for rank in ranks]
        finally:
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)  # its loader workers too
                rank.join()
        for output in (stdout, stderr):
            output.seek(0)
        return codes, stdout.read(), stderr.read()
