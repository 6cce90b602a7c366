"""Whatever ends a run ends all of it, at once; what can go on goes on to the same weights."""
import os
import random
import signal
import sys
import time

import pytest
import torch
from forked import train
from launch import RESTARTS, ROOT, Job, figures, load, run, start


def test_a_killed_worker_costs_no_bit_under_torchrun_with_restarts(tmp_path):
    job = start("multigpu_torchrun.py", 6, 2, cwd=tmp_path, torchrun=["--max-restarts=3"], **RESTARTS)
    epoch, rank, delay = random.randint(1, 4), random.randint(0, 1), random.random() / 2
    job.wait_for(f"epoch {epoch}/6")
    time.sleep(delay)  # anywhere in an epoch, or in the saving of a checkpoint
    os.kill(job.workers()[rank], signal.SIGKILL)
    assert job.wait() == 0, (epoch, rank, delay, job.stderr)
    undisturbed = train("multigpu_torchrun.py", 6, 2, "--checkpoint", "undisturbed.pt", cwd=tmp_path)
    assert figures(job.stdout) == figures(undisturbed.stdout)
    torch.testing.assert_close(load(tmp_path / "multigpu_torchrun.pt"), load(tmp_path / "undisturbed.pt"), rtol=0, atol=0)
    assert "--max-restarts will hardly recover" not in job.stderr


RAISES_IN_RANK_1 = """
import torch
step, calls = torch.optim.SGD.step, []
def step_or_raise(self):
    calls.append(self)
    if len(calls) == 3 and torch.distributed.get_rank() == 1:
        raise ValueError("this rank's own words")
    return step(self)
torch.optim.SGD.step = step_or_raise
"""


@pytest.mark.parametrize("script", ["multigpu_spawn.py", "multigpu_torchrun.py"])
def test_an_exception_in_one_rank_ends_all_and_is_shown(script, tmp_path):
    job = run(script, 2, cwd=tmp_path, status=1, timeout=60, before=RAISES_IN_RANK_1)
    assert "ValueError: this rank's own words" in job.stderr


@pytest.mark.parametrize("script, workers, whom, what, line", [
    ("single_gpu.py", 1, "all", signal.SIGINT, " 1/1000"),
    ("single_gpu.py", 0, "starter", signal.SIGTERM, " 1/1000"),
    ("multigpu_spawn.py", 1, "starter", signal.SIGINT, " 1/1000"),
    ("multigpu_spawn.py", 0, "starter", signal.SIGTERM, "processes"),
    ("multigpu_spawn.py", 0, "starter", signal.SIGKILL, "processes"),
    ("multigpu_spawn.py", 0, "starter", signal.SIGTERM, None),
    ("multigpu_torchrun.py", 0, "all", signal.SIGINT, " 1/1000"),
    ("multigpu_torchrun.py", 1, "starter", signal.SIGTERM, "processes")])
def test_a_signal_ends_every_process_within_seconds(script, workers, whom, what, line, tmp_path):
    job = start(script, 1000, "--workers", workers, cwd=tmp_path)
    if line:
        job.wait_for(line)
    else:  # the processes have been started, and still import torch
        while len(job.environments()) < 3:
            assert job.process.poll() is None
    (os.killpg if whom == "all" else os.kill)(job.process.pid, what)
    try:
        job.wait_until_gone(20)  # torch's own watch over loader workers takes five; other tests keep the machine busy
    finally:
        job.kill()
    assert job.wait() != 0


def test_the_older_launcher_works_which_hands_over_the_local_rank(tmp_path):
    job = Job([sys.executable, "-m", "torch.distributed.launch", "--standalone", "--nproc_per_node=2",
               ROOT / "multigpu_torchrun.py", 1, "--device", "cpu"], tmp_path)
    assert job.wait() == 0, job.stderr
    assert list(figures(job.stdout)) == [1] and "processes: 2," in job.stdout


NAMES_THREADS = """
import atexit, glob, os
def name_threads():
    with open(f"{os.getpid()}.threads", "w") as file:
        file.writelines(open(thread).read() for thread in glob.glob("/proc/self/task/*/comm"))
atexit.register(name_threads)
"""


def test_runs_side_by_side_end_well_with_the_same_weights_and_nothing_of_gloo_left(tmp_path):
    """A thread of it that outlives the group may abort a process at its exit, after good training."""
    jobs = [start("multigpu_spawn.py", 1, cwd=tmp_path, before=NAMES_THREADS),
            start("multigpu_torchrun.py", 1, cwd=tmp_path, before=NAMES_THREADS, torchrun=["--max-restarts=3"])]
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].stderr + jobs[1].stderr
    alone = train("single_gpu.py", 1, cwd=tmp_path, processes=0)
    assert figures(jobs[0].stdout) == figures(jobs[1].stdout) == figures(alone.stdout)
    assert jobs[0].stderr == "" and jobs[1].stderr.count("\n") == 1  # restarts without what they need are told at the start
    assert "--max-restarts will hardly recover" in jobs[1].stderr and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in jobs[1].stderr
    threads = [file.read_text() for file in tmp_path.glob("*.threads")]
    assert len(threads) >= 2 * 3  # of the starting processes too
    assert "gloo" not in "".join(threads)
