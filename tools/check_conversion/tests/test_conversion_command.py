"""check-conversion as a command, with processes as a user starts them."""
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import AFTER, BEFORE, STEP, TOOL, changed, check

TORCHRUN = "torchrun --standalone --nproc_per_node=2 train_ddp.py"


def start(*words):
    """The command, and its processes ended with it."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
                   "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # where torchrun is
    process = subprocess.Popen([sys.executable, TOOL, *map(str, words)], env=environment, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    try:
        stdout, stderr = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        raise
    print(stdout, stderr)
    return process.returncode, stdout, stderr


SPAWNED = """
import runpy, sys
import torch.multiprocessing as mp

def be_rank(rank):
    sys.argv = ["ranks.py", str(rank)]
    runpy.run_path("ranks.py")

if __name__ == "__main__":
    mp.spawn(be_rank, nprocs=2)
"""


def test_two_commands_are_compared_also_ranks_that_their_script_spawns():
    Path("train.py").write_text("def main(args):\n" + re.sub("^", "    ", BEFORE, flags=re.MULTILINE) + "\nmain([])\n")
    Path("train_ddp.py").write_text(SPAWNED)
    Path("ranks.py").write_text("import os, sys\n" + changed(AFTER, ('("gloo")', '("gloo", rank=int(sys.argv[1]), world_size=2, '
                                                                     'init_method=f"file://{os.getcwd()}/met")')))
    files = {*os.listdir()}
    status, said, _ = start("python train.py", "python train_ddp.py")
    assert status == 0 and re.match(
        r"the same training: 12 steps with 2 processes; compared: training, 2 lines, 1 save\n"
        r"weights within \de-1\d of their norm; rounding alone moves them by \de-1\d\n"
        r"printed: 2 of 2 lines the same\nsaved: 1 file the same: model.pt\n", said), said
    assert {*os.listdir()} == files


LOADED = """
class Loaded(TensorDataset):
    def __getitem__(self, index):
        torch.load("nothing.pt")
        return super().__getitem__(index)


torch.save([], "nothing.pt")
data = Loaded("""


def test_a_hang_is_shown_by_the_line_at_which_each_rank_waits_also_with_workers_that_load_files():
    Path("train.py").write_text(BEFORE)
    Path("train_ddp.py").write_text(changed(AFTER, ("data = TensorDataset(", LOADED), (
        "24 // world_size", "24 // world_size, num_workers=1"), (
        STEP, f"{STEP}        if rank == 0:\n            dist.barrier()\n")))
    status, said, _ = start("--patience", 12, "python train.py", TORCHRUN)
    assert status == 1 and re.match(
        r"NOT THE SAME TRAINING\nit hangs:\n  rank 0, after \d steps, waits at train_ddp.py:\d+, in \w+\n"
        r"  rank 1, after \d steps, waits at train_ddp.py:\d+, in \w+. See", said), said


def test_help_fits_a_screen():
    said = subprocess.run([sys.executable, TOOL, "--help"], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "COLUMNS": "80"}).stdout.splitlines()
    assert len(said) <= 32 and all(len(line) <= 80 for line in said)


def test_all_packages_are_installed_with_it():
    packages = {str(file.parent.relative_to(TOOL)).replace("/", ".") for file in TOOL.glob("check_conversion/**/*.py")}
    listed = re.search(r"packages = \[(.*)\]", (TOOL / "pyproject.toml").read_text())[1]
    assert packages == {*re.findall('"(.*?)"', listed)}


@pytest.mark.parametrize("script, says", [
    (BEFORE.replace("torch.manual_seed(0)", "torch.seed()"),
     r"draws new numbers each time \(it begins with different weights\): begin it with torch.manual"),
    ("import numpy\n" + BEFORE.replace("model(x)", "model(x + numpy.random.rand())"),
     r"draws new numbers each time \(step 1: by numpy\)"),
    ("import time\n" + BEFORE.replace("torch.manual_seed(0)", "torch.manual_seed(int(time.time()))"),
     "draws new numbers each time"),
    ("import torch\n1 / 0\n", r"train.py fails under the check \(it at train.py:2: ZeroDivisionError: division by zero\): does"),
    ("import torch\n", "train.py takes no optimizer step$")])
def test_what_cannot_be_judged_is_said_in_one_line(script, says):
    status, said = check(script, "import torch")
    assert status == 2 and re.match(f"cannot be judged: {says}|cannot be judged: train.py {says}", said)
