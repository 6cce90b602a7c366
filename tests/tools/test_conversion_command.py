"""tools/check_conversion.py as a command: what it runs, and how it ends."""
import re
import shutil
import sys
from pathlib import Path

import pytest
from launch import ROOT, Job
from pairs import AFTER, BEFORE, PATH, changed


def check(*words, status, cwd="."):
    job = Job([sys.executable, ROOT / "tools/check_conversion.py", *words], cwd=cwd, CUDA_VISIBLE_DEVICES="", PATH=PATH)
    assert job.wait() == status, job.stdout + job.stderr
    return job


def test_two_commands_are_compared():
    Path("train.py").write_text("def main(args):\n" + re.sub("^", "    ", BEFORE, flags=re.MULTILINE) + "\nmain([])\n")
    Path("train_ddp.py").write_text(AFTER)
    said = check("python train.py", "torchrun --standalone --nproc_per_node=2 train_ddp.py", status=0).stdout
    assert re.match(r"the same training: 12 steps with 2 processes, weights within \de-0[78] of their norm; rounding alone moves "
                    r"them by \de-07\nprinted: 2 of 2 lines the same\nsaved: 1 file the same: model.pt\n$", said), said


def test_ranks_that_their_script_spawns_are_compared_too():
    for name in ("single_gpu.py", "multigpu_spawn.py", "utils.py"):
        shutil.copy(ROOT / name, ".")
    said = check("python single_gpu.py 1", "python multigpu_spawn.py 1 -g 2", status=0).stdout
    assert said.startswith("the same training: 4 steps with 2 processes")


def test_a_collective_in_a_branch_hangs_and_is_shown_by_the_line_at_which_each_rank_waits():
    Path("train.py").write_text(BEFORE)
    Path("train_ddp.py").write_text(changed(AFTER, ("model = DDP", "if rank == 0:\n    dist.barrier()\nmodel = DDP")))
    said = check("--patience", 20, "python train.py", "torchrun --standalone --nproc_per_node=2 train_ddp.py", status=1).stdout
    assert ("NOT THE SAME TRAINING\nit hangs:\n  rank 0, after 0 steps, waits at train_ddp.py:17, in barrier\n"
            "  rank 1, after 0 steps, waits at train_ddp.py:18, in __init__. See") in said


@pytest.mark.parametrize("before, says", [
    ("no_such_command train.py", "cannot be started: .*no_such_command.*not found"),
    ("python -c 'import torch'", "takes no optimizer step$"),
    ("python unseeded.py", r"draws new numbers each time \(it begins with different weights\): begin it with torch.manual"),
    ("python noisy.py", r"draws new numbers each time \(step 1: by numpy\)"),
    ("python fails.py", r"fails.py fails under the check \(it at fails.py:2: ZeroDivisionError: division by zero\): does it")])
def test_what_cannot_be_judged_gets_one_line(before, says, folder):
    Path("unseeded.py").write_text(BEFORE.replace("torch.manual_seed(0)", "torch.seed()"))
    Path("noisy.py").write_text("import numpy\n" + BEFORE.replace("model(x)", "model(x + numpy.random.rand())"))
    Path("fails.py").write_text("import torch\n1 / 0\n")
    said = check(before, "python -c 'import torch'", status=2).stderr
    last = [line for line in said.splitlines() if not line.startswith("running: ")]
    assert len(last) == 1 and re.search(says, last[0]), said


def test_a_process_that_outlives_its_script_is_a_fault_and_is_ended():
    Path("train.py").write_text(BEFORE)
    said = check("python train.py", "sleep 600 & python train.py", status=1).stdout
    assert "NOT THE SAME TRAINING\nit leaves processes behind. See" in said
