"""Whatever ends a run ends all of it, at once; what can go on goes on to the same weights."""
import os
import random
import signal
import sys
import time

import torch
from launch import ROOT, Job, figures, run_all, start, two_at_a_time

RESTARTS = dict(torchrun=["--max-restarts=3"], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def test_a_killed_worker_costs_no_bit_under_torchrun_with_restarts(tmp_path):
    undisturbed = start("multigpu_torchrun.py", 8, 2, "--checkpoint", "undisturbed.pt", cwd=tmp_path)
    job = start("multigpu_torchrun.py", 8, 2, "--checkpoint", "killed.pt", cwd=tmp_path, **RESTARTS)
    epoch, rank, delay = random.randint(1, 6), random.randint(0, 1), random.random() / 2
    job.wait_for(f"epoch {epoch}/8")
    time.sleep(delay)  # anywhere in an epoch, or in the saving of a checkpoint
    os.kill(job.workers()[rank], signal.SIGKILL)
    assert undisturbed.wait() == 0
    assert job.wait() == 0, (epoch, rank, delay, job.stderr)
    assert figures(job) == figures(undisturbed)
    one, other = (torch.load(tmp_path / name, weights_only=True) for name in ("undisturbed.pt", "killed.pt"))
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
    assert "--max-restarts will hardly recover" not in job.stderr


def test_restarts_without_what_they_need_are_told_at_the_start(tmp_path):
    job = start("multigpu_torchrun.py", 1, cwd=tmp_path, torchrun=["--max-restarts=3"])
    assert job.wait() == 0 and figures(job)
    said = [line for line in job.stderr.splitlines() if "will hardly recover" in line]
    assert len(said) == 1 and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in said[0]


def test_an_exception_in_one_rank_ends_all_and_is_shown(tmp_path, customize):
    third_step_of_rank_1 = customize("""
import torch
step, calls = torch.optim.SGD.step, []
def step_or_raise(self):
    calls.append(self)
    if len(calls) == 3 and torch.distributed.get_rank() == 1:
        raise ValueError("this rank's own words")
    return step(self)
torch.optim.SGD.step = step_or_raise
""")
    for job in run_all(*[(script, 2, dict(cwd=tmp_path, status=1, timeout=60, **third_step_of_rank_1))
                         for script in ("multigpu_spawn.py", "multigpu_torchrun.py")]):
        assert "ValueError: this rank's own words" in job.stderr


ENDINGS = [  # script, what is signalled, signal, after which line
    ("single_gpu.py", "all", signal.SIGINT, " 1/1000"),
    ("single_gpu.py", "starter", signal.SIGTERM, " 1/1000"),
    ("single_gpu.py", "starter", signal.SIGKILL, " 1/1000"),
    ("multigpu_spawn.py", "starter", signal.SIGINT, " 1/1000"),
    ("multigpu_spawn.py", "starter", signal.SIGTERM, "processes"),
    ("multigpu_spawn.py", "starter", signal.SIGKILL, "processes"),
    ("multigpu_spawn.py", "starter", signal.SIGTERM, None),
    ("multigpu_torchrun.py", "all", signal.SIGINT, " 1/1000"),
    ("multigpu_torchrun.py", "starter", signal.SIGTERM, "processes"),
]


def test_a_signal_ends_every_process_within_seconds(tmp_path):
    def end(case):
        script, whom, what, line = case
        job = start(script, 1000, "--workers", 1, cwd=tmp_path)
        if line:
            job.wait_for(line)
        else:  # the processes have been started, and still import torch
            while len(job.pids()) < 3:
                assert job.process.poll() is None
        (os.killpg if whom == "all" else os.kill)(job.process.pid, what)
        try:
            job.wait_until_gone(10)  # torch's own watch over loader workers takes five seconds
        finally:
            assert job.wait() != 0, case
    two_at_a_time(end, *ENDINGS)


def test_the_older_launcher_works_with_and_without_use_env(tmp_path):
    def launch(option):
        job = Job([sys.executable, "-m", "torch.distributed.launch", "--standalone", "--nproc_per_node=2", *option,
                   str(ROOT / "multigpu_torchrun.py"), "1", "--device", "cpu", "--checkpoint", f"{len(option)}.pt"], cwd=tmp_path)
        assert job.wait() == 0, job.stderr
        assert list(figures(job)) == [1] and "processes: 2," in job.stdout
    two_at_a_time(launch, [], ["--use-env"])


def test_nothing_of_gloo_is_left_when_main_has_returned(tmp_path, customize):
    """A thread of it that outlives the group may abort the process at its exit, after good training."""
    at_exit = customize("""
import atexit, glob, os
def name_threads():
    with open(f"{os.environ['THREADS']}/{os.getpid()}", "w") as file:
        file.writelines(open(thread).read() for thread in glob.glob("/proc/self/task/*/comm"))
atexit.register(name_threads)
""")
    for job in run_all(*[(script, 1, dict(cwd=tmp_path, THREADS=str(tmp_path), **at_exit))
                         for script in ("multigpu_spawn.py", "multigpu_torchrun.py")]):
        assert job.stderr == ""
    threads = [file.read_text() for file in tmp_path.iterdir() if file.name.isdecimal()]
    assert len(threads) >= 2 * 3  # of the starting processes too
    assert "gloo" not in "".join(threads)
