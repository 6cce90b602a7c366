"""Starts the scripts as a user does, each start marked so that no process of it can be overlooked."""
import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
BY_TORCHRUN = ["multigpu_torchrun.py", "multinode.py"]
SCRIPTS = ["single_gpu.py", "dp.py", "multigpu_spawn.py", *BY_TORCHRUN]
RECIPES = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "recipes").glob("*.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
RESTARTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
IN_FLOAT64 = "import torch; torch.set_default_dtype(torch.float64)\n"  # where the order of a sum hardly matters
SLOWLY = IN_FLOAT64 + """
import time
step = torch.optim.SGD.step
def step_slowly(self):  # so that there is something left to train when what was lost comes back
    time.sleep(0.1)
    return step(self)
torch.optim.SGD.step = step_slowly
"""
FIGURES = re.compile(r"epoch +(\d+)/\d+ \| loss (\S+) \| accuracy (\S+)% \| \S+ samples/s \| \d+:\d\d left")


class Job:
    """A started command, with all processes that come of it."""

    def __init__(self, command, cwd, **env):
        self.mark = f"TEST_JOB={uuid.uuid4()}"
        name, value = self.mark.split("=")
        self.stdout, self.lines, self.errors = "", queue.Queue(), Path(cwd) / f"{value}.err"
        with open(self.errors, "w") as errors:
            self.process = subprocess.Popen(
                [str(word) for word in command], cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
                text=True, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1", name: value, **env})
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            if line.strip() and not line.startswith("[Gloo]"):  # torch 2.10 announces each rank so
                self.lines.put(line)
        self.lines.put(None)

    def wait_for(self, text, timeout=180):
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
                return

    def wait(self, timeout=180):
        """The job's status, once it and all its processes have ended."""
        try:
            status = self.process.wait(timeout)
            while (line := self.lines.get(timeout=10)) is not None:
                self.stdout += line
            self.wait_until_gone(10)
        finally:
            self.kill()
        return status

    @property
    def stderr(self):
        return self.errors.read_text()

    def environments(self):
        """What stands in the environment of each of the job's processes, wherever they are in the process tree."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                environment = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                if self.mark in environment:
                    found[int(folder.name)] = environment
        return found

    def workers(self):
        """The training processes: those that a launcher started, by rank."""
        return {int(variable.partition("=")[2]): pid for pid, environment in sorted(self.environments().items(), reverse=True)
                for variable in environment if variable.startswith("LOCAL_RANK=")}

    def wait_until_gone(self, timeout):
        end = time.monotonic() + timeout
        while pids := list(self.environments()):
            assert time.monotonic() < end, f"left behind: {pids}\n{self.stdout}{self.stderr}"
            time.sleep(0.05)

    def kill(self):
        for pid in self.environments():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def first(lines, folder):
    """An environment in which every Python process runs these lines before all others."""
    place = Path(tempfile.mkdtemp(dir=folder))
    (place / "sitecustomize.py").write_text(lines)
    return {"PYTHONPATH": str(place)}


def logs(function, what):
    """Lines after which each rank writes down what an expression gives whenever a function was called."""
    return f"""
import functools, os, torch, torchvision, zlib
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks as hooks
def wrapped(function):
    @functools.wraps(function)
    def logged(*given, **options):
        result = function(*given, **options)
        with open("log." + os.environ.get("RANK", "0"), "a") as file:
            print({what}, file=file)
        return result
    return logged
{function} = wrapped({function})
"""


def start(script, *arguments, cwd, processes=2, torchrun=(), device="cpu", before="", **env):
    """Start a script by its command line; None leaves out what says how many processes, or on which device."""
    line, arguments = [sys.executable], [*arguments, *(["--device", device] if device else [])]
    if (script in BY_TORCHRUN or script.startswith("recipes.")) and processes:
        line = [*TORCHRUN, "--standalone", f"--nproc_per_node={processes}", *torchrun]
    if script == "multigpu_spawn.py" and processes:
        arguments += ["-g", processes]
    line += ["-m", script] if script.startswith("recipes.") else [ROOT / script]
    return Job([*line, *arguments], cwd, **env, **(first(before, cwd) if before else {}))


def run(script, *arguments, status=0, timeout=180, **options):
    """Run a script to its end, and check how it ended."""
    job = start(script, *arguments, **options)
    ended = job.wait(timeout)
    assert ended == status, f"status {ended} instead of {status}\n{job.stdout}{job.stderr}"
    return job


def figures(text):
    """Loss and accuracy (in percent) of each epoch that was printed."""
    return {int(epoch): (float(loss), float(accuracy)) for epoch, loss, accuracy in FIGURES.findall(text)}


def load(path):
    return torch.load(path, weights_only=True)


def weights(path):
    state = load(path)
    return torch.cat([tensor.flatten().double() for tensor in state.get("model", state).values()])
