"""On a GPU: every script, NCCL with one process, and two processes that share the GPU by gloo."""
from pathlib import Path

import pytest
import torch
from launch import RECIPES, SCRIPTS, check_close, figures, load, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
WITHOUT_TF32 = "import torch; torch.backends.cudnn.allow_tf32 = False\n"
ON_GPU = {"device": None, "before": WITHOUT_TF32}


def test_each_script_trains_on_the_gpu_as_single_gpu_does_and_goes_on_on_the_cpu():
    ways = [(script, 1, []) for script in SCRIPTS] + [("multigpu_torchrun.py", 2, ["--backend", "gloo"])]
    if torch.cuda.device_count() > 1:
        ways += [(script, 2, []) for script in ("multigpu_spawn.py", "multigpu_torchrun.py")]
    printed = []
    for number, (script, processes, options) in enumerate(ways):
        job = run(script, 20, "--checkpoint", f"{number}.pt", *options, processes=processes, **ON_GPU)
        assert f"processes: {processes}, device: cuda" in job.stdout and job.stderr == ""
        assert f"backend: {'gloo' if options else 'nccl'}" in job.stdout or not script.startswith("multi")
        printed.append(figures(job.stdout))
        check_close(printed[-1], printed[0], loss=1e-2, accuracy=1)  # some kernels add up in no fixed order
        on_cpu = run(script, 21, "--checkpoint", f"{number}.pt")
        assert "device: cpu" in on_cpu.stdout and list(figures(on_cpu.stdout)) == [21]


def test_batch_norm_is_over_the_batch_of_both_processes():
    one = run("single_gpu.py", 1, "--model", "resnet18", **ON_GPU)
    two = run("multigpu_torchrun.py", 1, "--model", "resnet18", "--backend", "gloo", **ON_GPU)
    check_close(figures(two.stdout), figures(one.stdout), loss=5e-2, accuracy=100)
    saved = [load(f"{name}.pt")["model"]["bn1.running_mean"] for name in ("single_gpu", "multigpu_torchrun")]
    torch.testing.assert_close(*saved, rtol=1e-2, atol=1e-3)


def test_each_recipe_trains_on_the_gpu_and_saves_for_the_others():
    plain = figures(run("multigpu_torchrun.py", 4, processes=1, **ON_GPU).stdout)
    for recipe in RECIPES:
        name = Path(recipe).stem
        job = run(recipe, 3, "--checkpoint", f"{name}.pt", processes=1, **ON_GPU)
        assert "device: cuda, backend: nccl" in job.stdout
        goes_on = run("multigpu_torchrun.py", 4, "--checkpoint", f"{name}.pt", processes=1, **ON_GPU)
        check_close(figures(job.stdout) | figures(goes_on.stdout), plain, loss=2e-2, accuracy=2)


WATCHES = """
from torch.utils.data import DataLoader
iterate, steps = DataLoader.__iter__, []
def watched(self):
    for images, labels in iterate(self):
        assert images.is_pinned() and labels.is_pinned()
        steps.append(self)
        torch.cuda.set_sync_debug_mode("error" if len(steps) > 2 else "default")  # before that DDP does wait: for its buckets
        yield images, labels
        torch.cuda.set_sync_debug_mode("default")
DataLoader.__iter__ = watched
"""


def test_no_step_waits_for_the_device():
    """From the third step on torch is told to raise where the host waits for the GPU between two batches."""
    for script in ("single_gpu.py", "multigpu_torchrun.py"):
        run(script, 2, processes=1, device=None, before=WITHOUT_TF32 + WATCHES)
