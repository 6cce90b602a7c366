"""What only an accelerator can show. All else runs there too: python -m pytest --device cuda tests/scripts tests/recipes"""
import pytest
import torch
from launch import ROOT, SCRIPTS, WITHOUT_LAUNCHER, run
from results import figures

pytestmark = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU")


def train(script, *arguments, **settings):
    """On the device that the script finds, in one process."""
    one = ["-g", 1] if script == "multigpu_spawn.py" else []
    return run(ROOT / script, *arguments, *one, processes=0 if script in WITHOUT_LAUNCHER else 1, **settings)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_finds_the_gpu_by_itself_and_its_checkpoint_goes_on_on_the_cpu(script):
    job = train(script, 1, "--checkpoint", "run.pt")
    device = torch.accelerator.current_accelerator().type
    assert f"processes: 1, device: {device}" in job.stdout and job.stderr == ""
    on_cpu = "single_gpu.py" if script == "dp.py" else script  # DataParallel takes the GPUs that it finds
    assert list(figures(train(on_cpu, 2, "--device", "cpu", "--checkpoint", "run.pt").stdout)) == [2]


# From the third step on torch is told to raise where the host waits for the GPU between two batches.
WATCHES = """
import torch
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that CUDA or ROCm drives")
@pytest.mark.parametrize("script", ["single_gpu.py", "multigpu_torchrun.py", "recipes/loop.py"])
def test_no_step_waits_for_the_device(script):
    train(script, 2, before=WATCHES)
