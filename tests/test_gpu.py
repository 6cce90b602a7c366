"""On a GPU: every script, NCCL with one process, and two processes that share the GPU by gloo."""
import pytest
import torch
from launch import RECIPES, SCRIPTS, figures, load, run

pytestmark = pytest.mark.gpu

WITHOUT_TF32 = """
import torch
torch.backends.cudnn.allow_tf32 = False
"""


def test_each_script_trains_on_the_gpu(tmp_path):
    """Some backward kernels add up in no fixed order: losses agree to 1e-2, accuracies to 1%."""
    environment = {"cwd": tmp_path, "before": WITHOUT_TF32}
    printed = []
    for script in SCRIPTS:
        job = run(script, 20, processes=1, device=None, **environment)
        assert "device: cuda" in job.stdout and job.stderr == ""
        assert "backend: nccl" in job.stdout or not script.startswith("multi")
        printed.append(figures(job.stdout))
    printed.append(figures(run("multigpu_torchrun.py", 20, "--backend", "gloo", "--checkpoint", "shared.pt",
                               device=None, **environment).stdout))
    for other in printed[1:]:
        for epoch, (loss, accuracy) in printed[0].items():
            assert other[epoch] == (pytest.approx(loss, abs=1e-2), pytest.approx(accuracy, abs=1))


def test_batch_norm_is_over_the_batch_of_both_processes(tmp_path):
    environment = {"cwd": tmp_path, "before": WITHOUT_TF32}
    one = figures(run("single_gpu.py", 1, "--model", "resnet18", device=None, **environment).stdout)
    two = figures(run("multigpu_torchrun.py", 1, "--model", "resnet18", "--backend", "gloo", device=None, **environment).stdout)
    assert two[1][0] == pytest.approx(one[1][0], abs=5e-2)
    saved = [load(tmp_path / f"{name}.pt")["model"]["bn1.running_mean"]
             for name in ("single_gpu", "multigpu_torchrun")]
    torch.testing.assert_close(*saved, rtol=1e-2, atol=1e-3)


def test_each_recipe_trains_on_the_gpu_and_saves_for_the_others(recipes):
    environment = {"cwd": recipes, "device": None, "processes": 1, "before": WITHOUT_TF32}
    plain = figures(run("multigpu_torchrun.py", 4, **environment).stdout)
    for recipe in RECIPES:
        name = recipe.removesuffix(".py").replace("/", ".")
        job = run(name, 3, "--checkpoint", f"{name}.pt", timeout=300, **environment)
        assert "device: cuda, backend: nccl" in job.stdout
        goes_on = run("multigpu_torchrun.py", 4, "--checkpoint", f"{name}.pt", **environment)
        for epoch, (loss, accuracy) in (figures(job.stdout) | figures(goes_on.stdout)).items():
            assert (loss, accuracy) == (pytest.approx(plain[epoch][0], abs=2e-2), pytest.approx(plain[epoch][1], abs=2)), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a GPU for each of two processes")
def test_two_processes_with_nccl_train_as_one_does(tmp_path):
    environment = {"cwd": tmp_path, "device": None, "before": WITHOUT_TF32}
    one = figures(run("single_gpu.py", 20, **environment).stdout)
    for script in ("multigpu_spawn.py", "multigpu_torchrun.py"):
        job = run(script, 20, **environment)
        assert "processes: 2, device: cuda, backend: nccl" in job.stdout and job.stderr == ""
        for epoch, (loss, accuracy) in one.items():
            assert figures(job.stdout)[epoch] == (pytest.approx(loss, abs=1e-2), pytest.approx(accuracy, abs=1))


def test_the_cpu_can_be_asked_for_and_goes_on_where_the_gpu_stopped(tmp_path):
    for script in SCRIPTS:
        on_gpu = run(script, 1, "--checkpoint", f"{script}.pt", processes=1, device=None, cwd=tmp_path)
        on_cpu = run(script, 2, "--checkpoint", f"{script}.pt", cwd=tmp_path)
        assert "device: cuda" in on_gpu.stdout and "device: cpu" in on_cpu.stdout
        assert "backend: gloo" in on_cpu.stdout or not script.startswith("multi")
        assert list(figures(on_cpu.stdout)) == [2]


def test_no_step_waits_for_the_device(tmp_path):
    """From the third step on torch is told to raise where the host waits for the GPU between two batches.

    Before that DDP does wait: after the first step it rebuilds its buckets.
    """
    before = WITHOUT_TF32 + """
from torch.utils.data import DataLoader
iterate, steps = DataLoader.__iter__, []
def watched(self):
    for images, labels in iterate(self):
        assert images.is_pinned() and labels.is_pinned()
        steps.append(self)
        torch.cuda.set_sync_debug_mode("error" if len(steps) > 2 else "default")
        yield images, labels
        torch.cuda.set_sync_debug_mode("default")
DataLoader.__iter__ = watched
"""
    for script in ("single_gpu.py", "multigpu_torchrun.py"):
        run(script, 2, processes=1, device=None, cwd=tmp_path, before=before)
