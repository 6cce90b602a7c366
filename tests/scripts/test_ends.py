"""Whatever ends a run ends all of it, at once, leaves nothing, and costs neither the last good checkpoint nor a bit."""
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from launch import LITTLE_DATA, RESTARTS, SMALL, after, figures, load, start, train


@pytest.mark.timeout(120)
@pytest.mark.parametrize("script, times", [("multigpu_spawn.py", 1), ("multigpu_torchrun.py", 2)])  # once more in a summary
def test_an_exception_in_one_rank_ends_all_and_is_shown(script, times):
    job = start(script, 2, before=after("torch.optim.SGD.step", "torch.distributed.get_rank() == 1 and float('own words')"))
    assert job.wait() == 1
    assert job.stderr.count("ValueError: could not convert string to float: 'own words'") == times


FORKSERVER = "import multiprocessing; multiprocessing.set_start_method('forkserver')\n"  # as loader workers start by Python 3.14


@pytest.mark.parametrize("script, workers, before, whom, what, line", [
    ("single_gpu.py", 2, FORKSERVER, "starter", signal.SIGKILL, " 1/1000"),
    ("multigpu_spawn.py", 1, "", "starter", signal.SIGKILL, " 1/1000"),
    ("multigpu_torchrun.py", 1, "", "all", signal.SIGINT, " 1/1000"),
    ("multigpu_torchrun.py", 1, "", "starter", signal.SIGTERM, "processes")])
def test_a_signal_ends_every_process(script, workers, before, whom, what, line):
    job = start(script, 1000, "--workers", workers, before=before)
    job.wait_for(line)
    (os.killpg if whom == "all" else os.kill)(job.process.pid, what)
    assert job.wait() != 0


@pytest.mark.timeout(60)
def test_ctrl_c_ends_a_rank_that_waits_for_another_in_a_collective():
    stops = """torch.distributed.get_rank() == 1 and os.kill(os.getpid(), signal.SIGSTOP)
            or print(os.getpid(), 'waits', flush=True)"""
    job = start("multigpu_spawn.py", 1, before=after("torch.optim.SGD.step", stops))
    job.wait_for(" waits")  # for rank 1, which stops itself
    waiting = int(re.search(r"(\d+) waits", job.stdout)[1])
    time.sleep(2)  # it gets there, a few lines further on
    os.kill(job.process.pid, signal.SIGINT)
    while waiting in job.processes():
        time.sleep(0.1)


def test_runs_side_by_side_end_well_with_the_same_figures_and_nothing_of_gloo_left():
    """A thread of it that outlives the group may abort a process at its exit, after good training."""
    threads = "cat /proc/{0}/task/*/comm > {0}.threads"
    at_exit = f"import atexit, os\natexit.register(os.system, '{threads}'.format(os.getpid()))"
    spawn, torchrun = jobs = [start("multigpu_spawn.py", 1, before=at_exit),
                              start("multigpu_torchrun.py", 1, torchrun=["--max-restarts=3"], before=at_exit)]
    assert [job.wait() for job in jobs] == [0, 0], spawn.stderr + torchrun.stderr
    assert figures(spawn.stdout) == figures(torchrun.stdout) == figures(train("single_gpu.py", 1).stdout)
    assert spawn.stderr == "" and torchrun.stderr.count("\n") == 1  # restarts without what they need are told at the start
    assert "--max-restarts is unlikely to work" in torchrun.stderr and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in torchrun.stderr
    threads = [file.read_text() for file in Path().glob("*.threads")]
    assert len(threads) >= 3 + 3 and "gloo" not in "".join(threads)  # of the starting processes too


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
    assert load("run.pt")["epoch"] == job.stdout.count("saved") == 1 and not list(Path().glob("*.tmp"))


@pytest.mark.parametrize("place", ["missing/run.pt", "file/run.pt", "/proc/run.pt", ".", ""])
def test_a_place_that_takes_no_checkpoint_is_told_before_training(place, folder):
    Path("file").touch()
    path = str(folder / place) if place else ""
    job = train("single_gpu.py", 2, "--checkpoint", path, status=1)
    assert (path.removesuffix("/run.pt") or ". cannot be resumed") in job.stderr and job.stderr.count("\n") == 1
    assert "epoch" not in job.stdout
