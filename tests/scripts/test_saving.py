"""No accident costs the last good checkpoint."""
from pathlib import Path

import pytest
from launch import LITTLE_DATA, SMALL, after, load, train

# A disk that fills up: once the first epoch is saved, no file may exceed 100 KiB.
FILLS_UP = "import resource\n" + after("os.replace", "resource.setrlimit(resource.RLIMIT_FSIZE, (100 * 1024, 100 * 1024))")


def test_a_kill_while_saving_leaves_the_old_checkpoint_whole():
    dies_at_the_second = after("os.fsync", "os.path.exists('run.pt') and os.kill(os.getpid(), 9)")
    job = train("single_gpu.py", 3, 1, *SMALL, "--checkpoint", "run.pt", status=-9, before=LITTLE_DATA + dies_at_the_second)
    assert "saved" in job.stdout and load("run.pt")["epoch"] == 1
    train("single_gpu.py", 2, *SMALL, "--checkpoint", "run.pt", before=LITTLE_DATA)
    assert load("run.pt")["epoch"] == 2 and not [*Path().glob("*.tmp")]


@pytest.mark.parametrize("script", ["multigpu_spawn.py", "multigpu_torchrun.py"])
def test_a_disk_that_fills_up_ends_the_run_and_keeps_the_last_checkpoint(script):
    job = train(script, 1000, 1, *SMALL, "--checkpoint", "run.pt", status=1, before=LITTLE_DATA + FILLS_UP)
    assert "run.pt was not saved: [Errno 27] File too large" in job.stderr
    assert load("run.pt")["epoch"] == job.stdout.count("saved") == 1
    assert not list(Path().glob("*.tmp"))


@pytest.mark.parametrize("place", ["missing/run.pt", "file/run.pt", "/proc/run.pt", "."])
def test_a_place_that_takes_no_checkpoint_is_told_before_training(place, folder):
    Path("file").touch()
    job = train("single_gpu.py", 2, "--checkpoint", folder / place, status=1)
    assert str(folder / place).removesuffix("/run.pt") in job.stderr and job.stderr.count("\n") == 1
    assert "epoch" not in job.stdout
