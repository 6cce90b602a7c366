"""Runs the scripts: `start` by their command line, as a user does; `train` in forks of this process, which has torch loaded.

Both take `before`, lines that each process runs before the script: other data, another precision, or what happens to it.
"""
import contextlib
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo  # this and torchvision take each process seconds: forks have them from here
import torch.distributed.nn
import torchvision.models  # noqa: F401

import utils

ROOT = Path(__file__).resolve().parent.parent
BASES = {"dp.py": "single_gpu.py", "multigpu_torchrun.py": "single_gpu.py",
         "multigpu_spawn.py": "multigpu_torchrun.py", "multinode.py": "multigpu_torchrun.py"}  # what each script is a change of
SCRIPTS = ["single_gpu.py", *BASES]
BY_TORCHRUN = ["multigpu_torchrun.py", "multinode.py"]
RECIPES = sorted(f"recipes/{file.name}" for file in ROOT.glob("recipes/*.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
RESTARTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # without it, processes that are restarted seldom meet again
PACKAGES = {"ip": "iproute2", "munged": "munge", "nft": "nftables", "srun": "slurm-client"}  # others have their command's name
SECONDS = 300  # after which a test gives a process up: many times what it takes on a busy machine

# Lines for `before`
IN_FLOAT64 = "import torch; torch.set_default_dtype(torch.float64)\n"  # where the order of a sum hardly matters
EXACT_ON_GPUS = """import torch
torch.backends.cudnn.allow_tf32 = False
torch.use_deterministic_algorithms(True, warn_only=True)
"""


def little_data(train=240, held_out=51):
    """Lines by which the data that are made in memory are these few."""
    return f"""
import torch, utils
def little_data():
    generator = torch.Generator().manual_seed(0)
    for size in ({train}, {held_out}):
        labels = torch.randint(10, (size,), generator=generator)
        images = torch.randn(size, 3, 32, 32, generator=generator) + labels[:, None, None, None] / 5
        yield torch.utils.data.TensorDataset(images, labels)
utils.synthetic_data = lambda: [*little_data()]
"""


SMALL, LITTLE_DATA = ("--batch-size", 48), little_data()  # five steps an epoch
EXACT = IN_FLOAT64 + LITTLE_DATA


def after(function, expression):
    """Lines by which each rank evaluates an expression after each call of a function, and logs its value in log.RANK."""
    return f"""
import functools, os, signal, time, torch
def wrapped(function):
    @functools.wraps(function)
    def logged(*given, **options):
        result = function(*given, **options)
        with open("log." + os.environ.get("RANK", "0"), "a") as file:
            print({expression}, file=file)
        return result
    return logged
{function} = wrapped({function})
"""


def hold(function, unless="False", until="os.path.exists('go')"):
    """Lines by which each rank waits after a call of a function, unless an expression is true, until another one is."""
    return after(function, f"{unless} or [time.sleep(0.05) for _ in iter(lambda: bool({until}), True)]")


def needs(*commands):
    if missing := [PACKAGES.get(command, command) for command in commands if not shutil.which(command)]:
        pytest.skip(f"needs a package: apt-get install {' '.join(missing)}")


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


started = []  # all jobs of a test
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and all that they start, ignore Ctrl-C


class Job:
    """A command that was started, with all its processes: a mark in their environment shows them."""

    def __init__(self, command, cwd=".", before="", **env):
        self.mark, self.output, self.errors = str(uuid.uuid4()), tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self.lines = tempfile.TemporaryDirectory()
        Path(self.lines.name, "sitecustomize.py").write_text(before)
        path = {"PYTHONPATH": f"{self.lines.name}:{ROOT}"}
        self.process = subprocess.Popen(
            [str(word) for word in command], cwd=cwd, stdin=subprocess.DEVNULL, stdout=self.output, stderr=self.errors,
            start_new_session=True, env={**os.environ, **path, "TEST_JOB": self.mark, **env})
        started.append(self)

    @property
    def stdout(self):
        return without_gloo(os.pread(self.output.fileno(), 2**24, 0).decode())

    @property
    def stderr(self):
        return os.pread(self.errors.fileno(), 2**24, 0).decode()

    def until(self, condition, what):
        end = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < end, f"{what} for {SECONDS} seconds:\n{self.stdout}{self.stderr}"
            time.sleep(0.05)

    def wait_for(self, text):
        """Until the job has printed this."""
        self.until(lambda: text in self.stdout or self.process.poll() is not None, f"no {text!r}")
        assert text in self.stdout, f"it ended without {text!r}:\n{self.stdout}{self.stderr}"

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
                if self.mark.encode() in file.read_bytes():
                    found.append(int(file.parent.name))
        return found

    def kill(self):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def without_gloo(text):
    return re.sub(r"(?m)^\[Gloo].*\n", "", text)  # torch 2.10 announces each rank so


def fits(processes):
    """Whether pytest's --device has room for them: each process needs a GPU of its own."""
    return os.environ["TEST_DEVICE"] == "cpu" or processes <= torch.accelerator.device_count()


def options(script, processes):
    """The device of pytest's --device, and how many processes multigpu_spawn.py is to start."""
    if not fits(processes):
        pytest.skip(f"needs a GPU for each of {processes} processes")
    return ["--device", os.environ["TEST_DEVICE"], *(["-g", processes] if Path(script).name == "multigpu_spawn.py" else [])]


def exactly(before):
    """Where --device asks for a GPU: also lines by which it rounds in the same way each time."""
    return before if os.environ["TEST_DEVICE"] == "cpu" else EXACT_ON_GPUS + before


def start(script, *arguments, processes=2, torchrun=(), before="", **env):
    """Start a script by its command line."""
    launcher = [*TORCHRUN, "--standalone", f"--nproc_per_node={processes}", *torchrun]
    line = [*(launcher if script in BY_TORCHRUN else [sys.executable]), ROOT / script, *options(script, processes)]
    return Job([*line, *arguments], before=exactly(before), **env)


forks = multiprocessing.get_context("fork")


def be_rank(script, arguments, folder, output, before, environment):
    """In a fork: become what a launcher starts."""
    os.setsid()
    os.chdir(folder)
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{output}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.stdout, sys.stderr = (open(stream, "w", closefd=False) for stream in (1, 2))
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # of loader workers
    torch.multiprocessing.spawn = lambda function, args, nprocs: torch.multiprocessing.start_processes(
        function, args, nprocs, start_method="fork")
    sys.path.insert(0, str(ROOT))
    sys.argv = [script, *arguments]
    exec(before, {})
    runpy.run_path(script, run_name="__main__")


def fork(script, arguments, folder, output, processes, before, environment):
    """Run a script in forks and return their exit codes. 0 processes: one, without what a launcher sets."""
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": utils.free_port(), "WORLD_SIZE": processes,
                "LOCAL_WORLD_SIZE": processes}
    ranks = [{**launched, "RANK": rank, "LOCAL_RANK": rank} for rank in range(processes)] or [{}]
    forked = []
    for rank in ranks:
        variables = {name: str(value) for name, value in {**environment, **rank}.items()}
        forked.append(forks.Process(target=be_rank, args=(script, arguments, folder, output, before, variables)))
        forked[-1].start()
    try:
        for process in forked:
            process.join(SECONDS)
        return [process.exitcode for process in forked]
    finally:
        for process in forked:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its loader workers
            process.join()


def train(script, *arguments, processes=2, device=True, before="", status=0, **environment):
    """Run a script to its end in forks, and check how they end. Of `device` False, the script chooses device and processes."""
    words = [*map(str, [*(options(script, processes) if device else []), *arguments])]
    launched = Path(script).name not in {*SCRIPTS} - {*BY_TORCHRUN}  # also of a copy
    with tempfile.TemporaryDirectory() as output:
        codes = fork(str(ROOT / script), words, os.getcwd(), output, processes if launched else 0, exactly(before), environment)
        stdout, stderr = (without_gloo(Path(output, name).read_text()) for name in ("stdout", "stderr"))
    print(stdout, stderr)  # which pytest shows where a test has failed
    assert codes == [status] * len(codes)
    return SimpleNamespace(stdout=stdout, stderr=stderr)


def figures(text):
    """Loss and accuracy (in percent) of each epoch that was printed."""
    found = re.findall(r"epoch +(\d+)/\d+ \| loss (\S+) \| accuracy (\S+)% \| \S+ samples/s \| \d+:\d\d left", text)
    return {int(epoch): (float(loss), float(accuracy)) for epoch, loss, accuracy in found}


def check_close(printed, expected, loss=1e-3, accuracy=100 / 509 + 0.01):  # one sample, rounded; 100: not compared
    assert printed.keys() == expected.keys() != set()
    for epoch in printed:
        assert printed[epoch] == (pytest.approx(expected[epoch][0], abs=loss), pytest.approx(expected[epoch][1], abs=accuracy))


def load(path):
    return torch.load(path, weights_only=True, map_location="cpu")


def check_equal(path, expected):
    """The weights in two files, where all was done in float64."""
    torch.testing.assert_close(load(path)["model"], load(expected)["model"], rtol=0, atol=1e-12)
