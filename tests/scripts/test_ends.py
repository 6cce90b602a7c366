"""Whatever ends a run ends all of it, leaves nothing, and costs neither the last good checkpoint nor a bit."""
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from launch import LITTLE_DATA, RESTARTS, SMALL, after, figures, load, start, train


def test_an_exception_in_one_rank_ends_all_and_is_shown():
    raises = after("torch.optim.SGD.step", "torch.distributed.get_rank() == 1 and float('own words')")
    for job in [start(script, 2, before=raises) for script in ("multigpu_spawn.py", "multigpu_torchrun.py")]:
        assert job.wait() == 1 and "ValueError: could not convert string to float: 'own words'" in job.stderr


def test_a_signal_ends_every_process():
    cases = [  # script, loader workers, who gets which signal
        ("single_gpu.py", 2, os.kill, signal.SIGKILL),
        ("multigpu_spawn.py", 0, os.kill, signal.SIGKILL),
        ("multigpu_torchrun.py", 1, os.killpg, signal.SIGINT),  # all of them, as by Ctrl-C
        ("multigpu_torchrun.py", 1, os.kill, signal.SIGTERM)]
    jobs = [start(script, 1000, "--workers", workers, "--checkpoint", f"{number}.pt")
            for number, (script, workers, *_) in enumerate(cases)]
    for job, (_, _, kill, what) in zip(jobs, cases):
        job.wait_for(" 1/1000")
        kill(job.process.pid, what)
    assert all(job.wait() for job in jobs)


def test_ctrl_c_ends_a_rank_that_waits_for_another_in_a_collective():
    stops = """torch.distributed.get_rank() == 1 and os.kill(os.getpid(), signal.SIGSTOP)
            or print(os.getpid(), 'waits', flush=True)"""
    job = start("multigpu_spawn.py", 1, before=after("torch.optim.SGD.step", stops))
    job.wait_for(" waits")  # for rank 1, which stops itself
    waiting = int(re.search(r"(\d+) waits", job.stdout)[1])
    sleeping = Path(f"/proc/{waiting}/stat")
    job.until(lambda: sleeping.read_text().split()[2] == "S", "it did not get to the collective")
    os.killpg(job.process.pid, signal.SIGINT)
    job.until(lambda: waiting not in job.processes(), "it did not end")


def test_a_killed_worker_costs_no_bit_under_torchrun_with_restarts():
    options = "multigpu_torchrun.py", 4, 2, *SMALL
    rank_1_is_killed = "steps = []\n" + after("torch.optim.SGD.step", """
            os.environ.get("RANK") == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and
            steps.append(0) or len(steps) == 13 and os.kill(os.getpid(), signal.SIGKILL)""")
    job = start(*options, torchrun=["--max-restarts=3"], before=LITTLE_DATA + rank_1_is_killed, **RESTARTS)
    assert job.wait() == 0, job.stderr
    assert "multigpu_torchrun.pt: 2 of 4 epochs done" in job.stdout
    undisturbed = train(*options, "--checkpoint", "undisturbed.pt", before=LITTLE_DATA)
    assert figures(job.stdout) == figures(undisturbed.stdout)
    torch.testing.assert_close(load("multigpu_torchrun.pt"), load("undisturbed.pt"), rtol=0, atol=0)


def test_a_kill_while_saving_leaves_the_old_checkpoint_whole():
    dies_at_the_second = after("os.fsync", "os.path.exists('single_gpu.pt') and os.kill(os.getpid(), 9)")
    job = train("single_gpu.py", 3, 1, *SMALL, status=-9, before=LITTLE_DATA + dies_at_the_second)
    assert "saved" in job.stdout and load("single_gpu.pt")["epoch"] == 1


@pytest.mark.parametrize("script", ["single_gpu.py", "multigpu_torchrun.py"])
def test_a_disk_that_fills_up_ends_the_run_and_keeps_the_last_checkpoint(script):
    """Once the first epoch is saved, no file may exceed 100 KiB."""
    fills_up = "import resource\n" + after("os.replace", "resource.setrlimit(resource.RLIMIT_FSIZE, (100 * 1024, 100 * 1024))")
    job = train(script, 1000, 1, *SMALL, "--checkpoint", "run.pt", status=1, before=LITTLE_DATA + fills_up)
    assert "OSError: [Errno 27] File too large" in job.stderr
    assert load("run.pt")["epoch"] == job.stdout.count("saved") == 1


def test_two_jobs_on_one_machine_find_a_port_each_and_break_no_file_where_they_save_the_same_one():
    both_have_written = "len([name for name in os.listdir() if name.startswith('written.')]) == 2"
    meet = after("os.fsync", f"""open(f'written.{{os.getpid()}}', 'w') and
            [time.sleep(0.05) for _ in iter(lambda: {both_have_written}, True)]""")
    jobs = [start("multigpu_spawn.py", 1, *SMALL, "--checkpoint", "run.pt", processes=1, before=LITTLE_DATA + meet)
            for _ in range(2)]
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].stderr + jobs[1].stderr
    assert load("run.pt")["epoch"] == 1
