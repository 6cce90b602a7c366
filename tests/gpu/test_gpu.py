"""What only a GPU can show. All else runs there too: python -m pytest --device cuda tests/scripts tests/recipes"""
import pytest
import torch
from launch import SCRIPTS, check_close, figures, load, start

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def run(script, *arguments, processes=1, before=""):
    before = "import torch; torch.backends.cudnn.allow_tf32 = False\n" + before
    job = start(script, *arguments, processes=processes, device=False, before=before)
    assert job.wait() == 0, job.stderr
    return job


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_finds_the_gpu_by_itself_and_its_checkpoint_goes_on_on_the_cpu(script):
    job = run(script, 1)
    assert "processes: 1, device: cuda" in job.stdout and job.stderr == ""
    assert "backend: nccl" in job.stdout or not script.startswith("multi")
    on_cpu = run(script, 2, "--device", "cpu")
    assert "device: cpu" in on_cpu.stdout and list(figures(on_cpu.stdout)) == [2]


def test_batch_norm_is_over_the_batch_of_both_processes():
    one = run("single_gpu.py", 1, "--model", "resnet18")
    two = run("multigpu_torchrun.py", 1, "--model", "resnet18", "--backend", "gloo", processes=2)
    check_close(figures(two.stdout), figures(one.stdout), loss=5e-2, accuracy=100)
    saved = [load(f"{name}.pt")["model"]["bn1.running_mean"] for name in ("single_gpu", "multigpu_torchrun")]
    torch.testing.assert_close(*saved, rtol=1e-2, atol=1e-3)


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


@pytest.mark.parametrize("script", ["single_gpu.py", "multigpu_torchrun.py"])
def test_no_step_waits_for_the_device(script):
    """From the third step on torch is told to raise where the host waits for the GPU between two batches."""
    run(script, 2, before=WATCHES)
