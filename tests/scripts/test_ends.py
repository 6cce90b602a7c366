"""Whatever ends a run ends all of it, leaves nothing, and costs neither the last good checkpoint nor a bit."""
import os
import re
import signal
from pathlib import Path

from launch import LITTLE_DATA, SMALL, after, hold, start, train
from results import check_same_bits, figures, load


def test_an_exception_in_one_rank_ends_all_and_is_shown_above_torchruns_summary():
    raises = after("torch.Tensor.backward", "assert torch.distributed.get_rank() == 0, 'own words'")
    reading = after("torch.utils.data.TensorDataset.__getitem__", "assert os.environ['RANK'] == '0', 'own words'")
    jobs = [start(script, 2, before=raises) for script in ("multigpu_spawn.py", "multigpu_torchrun.py")]
    jobs += [start("recipes/preempt.py", 2, "--workers", 1, before=reading)]  # whose workers block SIGTERM
    for job in jobs:
        assert job.wait() == 1 and "AssertionError: own words" in job.stderr.partition("FAILED")[0]


def test_a_signal_ends_every_process():
    cases = [  # script, loader workers, who gets which signal
        ("single_gpu.py", 2, os.kill, signal.SIGKILL),
        ("multigpu_spawn.py", 0, os.kill, signal.SIGKILL),
        ("multigpu_spawn.py", 1, os.kill, signal.SIGINT),  # the launcher alone, as by an IDE's stop button
        ("multigpu_torchrun.py", 1, os.killpg, signal.SIGINT),  # all of them, as by Ctrl-C
        ("multigpu_torchrun.py", 1, os.kill, signal.SIGTERM)]
    stays = hold("utils.report", until="False")  # in its first epoch, and leaves the cores to the others
    jobs = [start(script, 1, "--workers", workers, before=stays) for script, workers, *_ in cases]
    for job, (_, _, kill, what) in zip(jobs, cases):
        job.wait_for(" 1/1 ")
        kill(job.process.pid, what)
    assert all(job.wait() for job in jobs)


def test_a_rank_whose_launcher_is_killed_while_it_starts_does_not_train():
    job = start("multigpu_spawn.py", 1, *SMALL, processes=1, before=LITTLE_DATA + """import os, sys, time
if "spawn_main" in str(sys.orig_argv):
    launcher = os.getppid()
    print("a rank starts", flush=True)
    while os.getppid() == launcher:
        time.sleep(0.05)
""")
    job.wait_for("a rank starts")
    os.kill(job.process.pid, signal.SIGKILL)
    assert job.wait() and "epoch" not in job.stdout


def test_ctrl_c_ends_a_rank_that_waits_for_another_in_a_collective():
    job = start("multigpu_spawn.py", 1, before=after("torch.Tensor.backward", """
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        print(os.getpid(), "waits", flush=True)
    """))
    job.wait_for(" waits")
    waiting = int(re.search(r"(\d+) waits", job.stdout)[1])
    state = Path(f"/proc/{waiting}/stat")
    job.until(lambda: state.read_text().split()[2] == "S", "it did not get to the collective")
    os.killpg(job.process.pid, signal.SIGINT)
    job.until(lambda: waiting not in job.processes(), "it did not end")


def test_a_killed_rank_costs_no_bit_under_torchrun_with_restarts():
    line = "multigpu_torchrun.py", 4, 2, *SMALL
    rank_1_is_killed = after("torch.Tensor.backward", """
        if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], call) == ("1", "0", 13):
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    job = start(*line, before=LITTLE_DATA + rank_1_is_killed, PET_MAX_RESTARTS="3", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert job.wait() == 0 and "multigpu_torchrun.pt: 2 of 4 epochs done" in job.stdout
    undisturbed = train(*line, "--checkpoint", "undisturbed.pt", before=LITTLE_DATA)
    assert figures(job.stdout) == figures(undisturbed.stdout)
    check_same_bits("multigpu_torchrun.pt", "undisturbed.pt")


def test_a_kill_and_a_disk_that_fills_up_while_saving_leave_the_checkpoint_before():
    line = "single_gpu.py", 3, 1, *SMALL
    killed = after("os.fsync", "if call == 2: os.kill(os.getpid(), signal.SIGKILL)")
    fills_up = after("os.replace", "resource.setrlimit(resource.RLIMIT_FSIZE, (102400, 102400))")  # no file may exceed 100 KiB
    train(*line, status=-9, before=LITTLE_DATA + killed)
    full = train(*line, status=1, before=LITTLE_DATA + fills_up)
    assert "single_gpu.pt: 1 of 3 epochs done" in full.stdout and "OSError: [Errno 27] File too large" in full.stderr
    assert "single_gpu.pt: 2 of 3 epochs done" in train(*line, before=LITTLE_DATA).stdout


def test_two_jobs_on_one_machine_find_a_port_each_and_break_no_file_where_they_save_the_same_one():
    in_containers = after("utils.time_to_save", "os.getpid = lambda: 1")
    both_have_written = after("os.fsync", "log('written')") + hold("os.fsync", until="open('log.0').read().count('written') == 2")
    threads = "import os, sys\nif 'spawn_main' not in str(sys.orig_argv): del os.environ['OMP_NUM_THREADS']\n"
    threads += after("utils.report", "assert torch.get_num_threads() == 1")
    jobs = [start("multigpu_spawn.py", 1, *SMALL, processes=1, before=threads + LITTLE_DATA + in_containers + both_have_written)
            for _ in range(2)]
    assert [job.wait() for job in jobs] == [0, 0] and load("multigpu_spawn.pt")["epoch"] == 1
