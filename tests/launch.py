"""Runs the scripts: `start` by their command line, as a user does; `train` to their end, in forks, which is sooner.

Both take `before`, lines that each process runs before the script: other data, another precision, or what happens to it.
"""
import os
import shutil
import sys
import tempfile
from pathlib import Path
from textwrap import dedent, indent
from types import SimpleNamespace

import pytest
import torch
from forks import fork
from jobs import ROOT, Job

import utils

BASES = {"dp.py": "single_gpu.py", "multigpu_torchrun.py": "single_gpu.py",
         "multigpu_spawn.py": "multigpu_torchrun.py", "multinode.py": "multigpu_torchrun.py"}  # what each script is a change of
SCRIPTS = ["single_gpu.py", *BASES]
WITHOUT_LAUNCHER = ["single_gpu.py", "dp.py", "multigpu_spawn.py"]
RECIPES = sorted(f"recipes/{file.name}" for file in ROOT.glob("recipes/*.py"))
PACKAGES = {"ip": "iproute2", "munged": "munge", "nft": "nftables", "srun": "slurm-client"}  # others have their command's name


def needs(*commands):
    if missing := [PACKAGES.get(command, command) for command in commands if not shutil.which(command)]:
        pytest.skip(f"needs a package: apt-get install {' '.join(missing)}")


def device_of(script):
    """That of pytest's --device; DataParallel takes the GPUs whenever there are some."""
    return utils.find_device() if Path(script).name == "dp.py" else os.environ["TEST_DEVICE"]


def options(script, processes):
    """The device, and how many processes multigpu_spawn.py is to start."""
    device = device_of(script)
    if device != "cpu" and processes > torch.accelerator.device_count():
        pytest.skip(f"needs a GPU for each of {processes} processes")
    return ["--device", device, *(["-g", processes] if Path(script).name == "multigpu_spawn.py" else [])]


def start(script, *arguments, processes=2, before="", **env):
    """Start a script by its command line."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    launcher = [sys.executable, *([] if script in WITHOUT_LAUNCHER else torchrun)]
    return Job([*launcher, ROOT / script, *options(script, processes), *arguments], before=exact(script) + before, **env)


def run(file, *arguments, processes=2, before="", status=0, **environment):
    """Run a file in so many ranks, check with which status all of them end, and return what they printed."""
    with tempfile.TemporaryDirectory() as output:
        codes = fork(str(file), [*map(str, arguments)], os.getcwd(), output, processes, before, environment)
        printed = SimpleNamespace(stdout=Path(output, "stdout").read_text(), stderr=Path(output, "stderr").read_text())
    print(printed.stdout, printed.stderr)  # which pytest shows where a test has failed
    assert codes == [status] * len(codes)
    return printed


def train(script, *arguments, processes=2, before="", **settings):
    """Run a script, or a copy of one, to its end in forks."""
    ranks = 0 if Path(script).name in WITHOUT_LAUNCHER else processes
    return run(ROOT / script, *options(script, processes), *arguments, processes=ranks, before=exact(script) + before, **settings)


# Lines for `before`
IN_FLOAT64 = "import torch; torch.set_default_dtype(torch.float64)\n"  # where the order of a sum hardly matters
EXACT_ON_GPUS = """
import torch
torch.backends.cudnn.allow_tf32 = False
torch.use_deterministic_algorithms(True, warn_only=True)
"""


def exact(script):
    return EXACT_ON_GPUS if device_of(script) != "cpu" else ""


def little_data(train=240, held_out=51):
    """Lines by which the data that are made in memory are these few."""
    return f"""
import torch, utils
def few(size):
    labels = torch.arange(size) % 10
    images = torch.randn(size, 3, 32, 32, generator=torch.Generator().manual_seed(size)) + labels[:, None, None, None] / 5
    return torch.utils.data.TensorDataset(images, labels)
utils.synthetic_data = lambda: (few({train}), few({held_out}))
"""


SMALL, LITTLE_DATA = ("--batch-size", 48), little_data()  # five steps an epoch
EXACT = IN_FLOAT64 + LITTLE_DATA


def after(function, lines):
    """Lines by which each rank runs these after each call of a function. `log(…)` there writes a line to log.RANK."""
    return f"""
import functools, itertools, os, signal, time, torch, {function.partition(".")[0]}
def log(*words):
    with open("log." + os.environ.get("RANK", "0"), "a") as file:
        print(*words, file=file)
def followed(function):
    calls = itertools.count(1)
    @functools.wraps(function)
    def wrapper(*given, **options):
        result, call = function(*given, **options), next(calls)
{indent(dedent(lines), " " * 8)}
        return result
    return wrapper
{function} = followed({function})
"""


def hold(function, until):
    """Lines by which each rank waits after a call of a function until an expression is true."""
    return after(function, f"while not ({until}): time.sleep(0.05)")
