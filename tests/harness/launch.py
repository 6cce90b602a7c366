"""How tests start the scripts, and break them.

`start` starts a script by its command line, as a user does, and returns at once a Job (processes.py), which ends at the latest
with its test. `train` runs a script to its end, checks its status and returns what it printed. To load torch and torchvision
takes 4.6 seconds a process, so `train` starts each rank as a fork of pytest, which has loaded them, with the environment that
torchrun would have set; multigpu_spawn.py alone, whose launcher is part of it, it starts by its command line. `run` does the same
for any file, without the options that scripts have. All of them take `before`: lines that each process runs before the file.
"""
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it; what is forked later must not have used threads
os.environ.pop("PYTHONUNBUFFERED", None)  # it would hide that a line is not flushed
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # another way to look for GPUs cannot be followed by a fork

import pytest
import torch
import torch._dynamo
import torchvision.models  # noqa: F401  forks shall have it
from processes import ROOT, Job, fork

import utils

BASES = {"dp.py": "single_gpu.py", "multigpu_torchrun.py": "single_gpu.py",
         "multigpu_spawn.py": "multigpu_torchrun.py", "multinode.py": "multigpu_torchrun.py"}  # what each script is a change of
SCRIPTS = ["single_gpu.py", *BASES]
WITHOUT_LAUNCHER = ["single_gpu.py", "dp.py", "multigpu_spawn.py"]
RECIPES = sorted(f"recipes/{file.name}" for file in ROOT.glob("recipes/*.py"))


def needs(*commands):
    if missing := [command for command in commands if not shutil.which(command)]:
        pytest.skip(f"needs {' and '.join(missing)}, which .ci/run installs")


def settings(script, processes):
    """A script's device and number of processes as options, and as lines for `before`."""
    name = Path(script).name
    if Path(script).parent.name == "examples":  # they look for a device themselves
        return [], "import torch; torch.accelerator.current_accelerator = lambda *_, **__: None\n"
    device = utils.find_device() if name == "dp.py" else os.environ.get("TEST_DEVICE", "cpu")  # DataParallel takes any GPU
    if device != "cpu" and name not in ("single_gpu.py", "dp.py") and processes > torch.accelerator.device_count():
        pytest.skip(f"needs a GPU for each of {processes} processes")
    options = ["--device", device, *(["-g", processes] if name == "multigpu_spawn.py" else [])]
    return options, EXACT_ON_GPUS if device != "cpu" else ""


def start(script, *arguments, processes=2, before="", **env):
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    launcher = [sys.executable, *([] if script in WITHOUT_LAUNCHER else torchrun)]
    options, lines = settings(script, processes)
    return Job([*launcher, ROOT / script, *options, *arguments], before=lines + before, **env)


def run(file, *arguments, processes=2, before="", status=0, **env):
    """In so many ranks, all of which are to end with this status. 0 processes: one, without what a launcher sets."""
    if Path(file).name == "multigpu_spawn.py":
        job = Job([sys.executable, file, *arguments], before=before, **env)
        assert job.wait() == status
        return job
    launched = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=utils.free_port(), WORLD_SIZE=processes, LOCAL_WORLD_SIZE=processes)
    ranks = [{**launched, "RANK": rank, "LOCAL_RANK": rank, **env} for rank in range(processes)] or [env]
    codes, stdout, stderr = fork(file, arguments, before, ranks)
    print(stdout, stderr)  # which pytest shows where a test has failed
    assert codes == [status] * len(codes)
    return SimpleNamespace(stdout=stdout, stderr=stderr)


def train(script, *arguments, processes=2, before="", **more):
    """A script, or a copy of one."""
    options, lines = settings(script, processes)
    ranks = 0 if Path(script).name in WITHOUT_LAUNCHER else processes
    return run(ROOT / script, *options, *arguments, processes=ranks, before=lines + before, **more)


# Lines for `before`
IN_FLOAT64 = "import torch; torch.set_default_dtype(torch.float64)\n"  # where the order of a sum hardly matters
EXACT_ON_GPUS = """import torch
torch.backends.cudnn.allow_tf32 = False
torch.use_deterministic_algorithms(True, warn_only=True)
"""


def little_data(train=240, held_out=51):
    return f"import changes; changes.little_data({train}, {held_out})\n"


SMALL, LITTLE_DATA = ("--batch-size", 48), little_data()  # five steps an epoch
EXACT = IN_FLOAT64 + LITTLE_DATA


def after(function, lines):
    """Each rank runs these lines after each call of a function; in them log(…) writes a line to log.RANK."""
    return f"import changes; changes.after({function!r}, {lines!r})\n"


def hold(function, until):
    """Each rank waits after a call of a function until an expression is true."""
    return after(function, f"while not ({until}): time.sleep(0.05)")


# What each rank draws, and evaluates with
MASKS = after("torch.nn.Dropout.forward", """
    if given[0].training:
        log("mask", hash(bytes(result.eq(0).flatten().tolist())))
""")
STATISTICS = after("torch.nn.Module.eval", "log('statistics', *(buffer.sum().item() for buffer in given[0].buffers()))")
