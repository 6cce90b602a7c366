"""No accident costs the last good checkpoint, or a bit of the training."""
from pathlib import Path

import pytest
import torch
from launch import LITTLE_DATA, RESTARTS, SMALL, after, figures, load, start, train


def test_a_killed_worker_costs_no_bit_under_torchrun_with_restarts():
    options = "multigpu_torchrun.py", 4, 2, *SMALL
    rank_1_is_killed = "steps = []\n" + after("torch.optim.SGD.step", """
            os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and
            steps.append(0) or len(steps) == 13 and os.kill(os.getpid(), signal.SIGKILL)""")
    job = start(*options, torchrun=["--max-restarts=3"], before=LITTLE_DATA + rank_1_is_killed, **RESTARTS)
    assert job.wait() == 0 and "--max-restarts is unlikely to work" not in job.stderr, job.stderr
    assert "multigpu_torchrun.pt: 2 of 4 epochs are done" in job.stdout
    undisturbed = train(*options, "--checkpoint", "undisturbed.pt", before=LITTLE_DATA)
    assert figures(job.stdout) == figures(undisturbed.stdout)
    torch.testing.assert_close(load("multigpu_torchrun.pt"), load("undisturbed.pt"), rtol=0, atol=0)


def test_a_kill_while_saving_leaves_the_old_checkpoint_whole():
    dies_at_the_second = after("os.fsync", "os.path.exists('single_gpu.pt') and os.kill(os.getpid(), 9)")
    job = train("single_gpu.py", 3, 1, *SMALL, status=-9, before=LITTLE_DATA + dies_at_the_second)
    assert "saved" in job.stdout and load("single_gpu.pt")["epoch"] == 1
    train("single_gpu.py", 2, *SMALL, before=LITTLE_DATA)
    assert load("single_gpu.pt")["epoch"] == 2 and not [*Path().glob("*.tmp")]


@pytest.mark.parametrize("script", ["multigpu_spawn.py", "multigpu_torchrun.py"])
def test_a_disk_that_fills_up_ends_the_run_and_keeps_the_last_checkpoint(script):
    """Once the first epoch is saved, no file may exceed 100 KiB."""
    fills_up = "import resource\n" + after("os.replace", "resource.setrlimit(resource.RLIMIT_FSIZE, (100 * 1024, 100 * 1024))")
    job = train(script, 1000, 1, *SMALL, "--checkpoint", "run.pt", status=1, before=LITTLE_DATA + fills_up)
    assert "run.pt was not saved: [Errno 27] File too large" in job.stderr
    assert load("run.pt")["epoch"] == job.stdout.count("saved") == 1
    assert not list(Path().glob("*.tmp"))


@pytest.mark.parametrize("place", ["missing/run.pt", "file/run.pt", "/proc/run.pt", "."])
def test_a_place_that_takes_no_checkpoint_is_told_before_training(place, folder):
    Path("file").touch()
    job = train("single_gpu.py", 2, "--checkpoint", folder / place, status=1)
    assert str(folder / place).removesuffix("/run.pt") in job.stderr and job.stderr.count("\n") == 1
    assert "epoch" not in job.stdout
