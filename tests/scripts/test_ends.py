"""Whatever ends a run ends all of it, at once, and leaves nothing."""
import os
import re
import signal
import time
from pathlib import Path

import pytest
from launch import after, figures, start, train


@pytest.mark.timeout(120)
@pytest.mark.parametrize("script, times", [("multigpu_spawn.py", 1), ("multigpu_torchrun.py", 2)])  # once more in a summary
def test_an_exception_in_one_rank_ends_all_and_is_shown(script, times):
    job = start(script, 2, before=after("torch.optim.SGD.step", "torch.distributed.get_rank() == 1 and float('own words')"))
    assert job.wait() == 1
    assert job.stderr.count("ValueError: could not convert string to float: 'own words'") == times


AS_PYTHON_3_14_DOES = "import multiprocessing\nmultiprocessing.set_start_method('forkserver')\n"  # it forks loader workers


@pytest.mark.parametrize("script, workers, before, whom, what, line", [
    ("single_gpu.py", 2, AS_PYTHON_3_14_DOES, "starter", signal.SIGKILL, " 1/1000"),
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
    spawn, torchrun, _ = jobs = [
        start("multigpu_spawn.py", 1, before=at_exit),
        start("multigpu_torchrun.py", 1, torchrun=["--max-restarts=3"], before=at_exit),
        start("multigpu_spawn.py", 1, "--checkpoint", "other.pt", processes=1, before=at_exit)]
    assert [job.wait() for job in jobs] == [0] * 3, "".join(job.stderr for job in jobs)
    alone = figures(train("single_gpu.py", 1).stdout)
    assert [figures(job.stdout) for job in jobs] == [alone] * 3
    assert spawn.stderr == "" and torchrun.stderr.count("\n") == 1  # restarts without what they need are told at the start
    assert "--max-restarts is unlikely to work" in torchrun.stderr and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in torchrun.stderr
    threads = [file.read_text() for file in Path().glob("*.threads")]
    assert len(threads) >= 3 + 3 + 2  # of the starting processes too
    assert "gloo" not in "".join(threads)
