"""Starts the scripts as a user does, each start marked so that no process of it can be overlooked."""
import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
BY_TORCHRUN = ["multigpu_torchrun.py", "multinode.py"]
SCRIPTS = ["single_gpu.py", "dp.py", "multigpu_spawn.py", *BY_TORCHRUN]
RECIPES = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "recipes").glob("*.py"))
FIGURES = re.compile(r"epoch +(\d+)/\d+ \| loss (\S+) \| accuracy (\S+)% \| \S+ samples/s \| \d+:\d\d left")


def command(script, *arguments, processes=2, torchrun=(), device="cpu"):
    """The command line that starts a script; None leaves out what says how many processes, or on which device."""
    line, arguments = [sys.executable], [str(argument) for argument in arguments]
    if device:
        arguments += ["--device", device]
    if (script in BY_TORCHRUN or script.startswith("recipes.")) and processes:
        line += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *torchrun]
    if script == "multigpu_spawn.py" and processes:
        arguments += ["-g", str(processes)]
    return [*line, *(["-m", script] if script.startswith("recipes.") else [str(ROOT / script)]), *arguments]


ended_well_with_several_processes = []


class Job:
    """A started command, with all processes that come of it."""

    def __init__(self, command, cwd, **env):
        self.mark = f"TEST_JOB={uuid.uuid4()}"
        name, value = self.mark.split("=")
        self.stdout, self.lines, self.errors = "", queue.Queue(), Path(cwd) / f"{value}.err"
        with open(self.errors, "w") as errors:
            self.process = subprocess.Popen(
                command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
                text=True, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", name: value, **env})
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            if line.strip() and not line.startswith("[Gloo]"):  # torch 2.10 announces each rank so
                self.lines.put(line)
        self.lines.put(None)

    def wait_for(self, text, timeout=120):
        """Read what the job prints until a line contains text."""
        end = time.monotonic() + timeout
        while True:
            try:
                line = self.lines.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                line = None
            assert line is not None, f"did not print {text!r}:\n{self.stdout}{self.stderr}"
            self.stdout += line
            if text in line:
                return line

    def wait(self, timeout=120):
        """The job's status, once it and all its processes have ended."""
        try:
            status = self.process.wait(timeout)
            while (line := self.lines.get(timeout=10)) is not None:
                self.stdout += line
            self.wait_until_gone(10)
        finally:
            self.kill()
        if status == 0 and re.match("processes: [24],", self.stdout):
            ended_well_with_several_processes.append(self)
        return status

    @property
    def stderr(self):
        return self.errors.read_text()

    def pids(self):
        """The processes that carry this job's mark, wherever they are in the process tree."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:  # it has ended meanwhile
                pass
        return found

    def workers(self):
        """The training processes: those that a launcher started with this script, by rank."""
        ranks = {}
        for pid in self.pids():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                for variable in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0"):
                    if variable.startswith("LOCAL_RANK="):
                        ranks.setdefault(int(variable.partition("=")[2]), pid)
        return ranks

    def wait_until_gone(self, timeout):
        end = time.monotonic() + timeout
        while pids := self.pids():
            assert time.monotonic() < end, f"left behind: {pids}\n{self.stdout}{self.stderr}"
            time.sleep(0.05)

    def kill(self):
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()


def start(script, *arguments, cwd, processes=2, torchrun=(), device="cpu", **env):
    return Job(command(script, *arguments, processes=processes, torchrun=torchrun, device=device), cwd, **env)


def run(script, *arguments, cwd, status=0, timeout=120, **options):
    """Run a script to its end, and check how it ended."""
    job = start(script, *arguments, cwd=cwd, **options)
    ended = job.wait(timeout)
    assert ended == status, f"status {ended} instead of {status}\n{job.stdout}{job.stderr}"
    return job


def two_at_a_time(function, *calls):
    """Call a function with each of several arguments; most of what a job takes is its start."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, calls))


def run_all(*calls):
    """Run several jobs; each call is the arguments of run, options last."""
    return two_at_a_time(lambda call: run(*call[:-1], **call[-1]), *calls)


def figures(job):
    """Loss and accuracy (in percent) of each epoch that the job printed."""
    return figures_in(job.stdout)


def figures_in(text):
    return {int(epoch): (float(loss), float(accuracy)) for epoch, loss, accuracy in FIGURES.findall(text)}


def load(path):
    return torch.load(path, weights_only=True)


def weights(path):
    return torch.cat([tensor.flatten().double() for tensor in load(path)["model"].values()])
