"""multinode.py and its batch file under a real Slurm of two nodes."""
import shutil
import time
from pathlib import Path

import pytest
from hosts import end, on_one_device
from launch import EXACT, ROOT, SMALL, figures, first, hold, load

HELD = EXACT + hold("os.replace")  # after an epoch, so that there is something left to train
TILL_A_SIGNAL = EXACT + "calls = []\n" + hold("torch.optim.SGD.step", "calls.append(0) or len(calls) != 8",
                                              "signal.sigpending() or os.path.exists('go')")


@pytest.fixture(autouse=True)
def scripts(folder, slurm):
    """The scripts in a folder that all nodes see, which is also where jobs write; of jobs that are left none goes on."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True)
    slurm[0].folder = folder
    yield
    slurm[0].run("scancel", "--user=root")
    print(*(output.read_text() for output in folder.glob("*.out")))  # which pytest shows where a test has failed


def test_two_batch_jobs_at_once_go_on_when_time_runs_out_or_one_is_preempted_a_recipe_at_the_step_where_it_was(slurm):
    """With the GPUs asked for; where a machine has more, it warns."""
    host, options = slurm[0], (3, 1, "--device", "cpu", *SMALL)
    batch = "sbatch", "--parsable", "--gpus-per-node=1", "--cpus-per-task=3", "multinode.sbatch"
    jobs = [host.run(*batch, script, *options, **first(before))
            for script, before in (("multinode.py", HELD), ("recipes.preempt", TILL_A_SIGNAL))]
    outputs = [Path(f"multinode-{job}.out") for job in jobs]
    while not all(Path(name).exists() for name in ("multinode.pt", "preempt.pt")):  # after an epoch, and no more without `go`
        time.sleep(0.1)
    host.run("scancel", "--batch", "--signal=USR1", jobs[0])  # as Slurm does, by --signal, before its time runs out
    host.run("sbatch", "--partition=urgent", "--nodes=2", "--cpus-per-task=6", "--wrap=true")  # of the 8 on each
    for job in jobs:
        while "Restarts=0" in (state := host.run("scontrol", "show", "job", job)):
            assert "JobState=FAILED" not in state
            time.sleep(0.1)
    assert load("preempt.pt")["total"][1] == 3 * 48  # steps of the second epoch
    Path("go").touch()
    alone = on_one_device(3)
    for job, output in zip(jobs, outputs):
        while "JobState=COMPLETED" not in (state := host.run("scontrol", "show", "job", job)):
            assert "JobState=FAILED" not in state, output.read_text()
            time.sleep(1)
        assert output.read_text().count("processes: 2, ") == 2
        assert figures(output.read_text()) == alone
        assert ".pt: 1 of 3 epochs are done" in output.read_text()
        for machine in slurm:
            assert f"{machine.name}: 3 cores, 1 GPUs\n" in output.read_text()
            assert f"{machine.name}: WARNING: it has 2 GPUs, but this job asked for 1: use" in output.read_text()


def test_srun_starts_the_script_itself_and_ends_all_its_tasks(slurm):
    step = ["srun", "--nodes=2", "--kill-on-bad-exit=1"]
    script = ["python", "multinode.py", 2, 2, "--device", "cpu", *SMALL]
    job = slurm[0].start(*step, "--ntasks-per-node=2", *script, **first(EXACT))
    assert end([job]) == on_one_device(2) and "processes: 4, " in job.stdout
    Path("multinode.pt").write_text("no checkpoint")
    failed = slurm[0].start(*step, *script)
    assert failed.wait() and failed.stderr.count("multinode.pt cannot be resumed and is left as it was") == 1


def test_launchers_count_before_slurm(slurm):
    for launched in ("torchrun --standalone --nproc_per_node=2 multinode.py", "python multigpu_spawn.py"):
        job = slurm[0].start("srun", "--ntasks=1", *launched.split(), 1, "--device", "cpu", *SMALL, **first(EXACT))
        assert end([job]) and "processes: 2, " in job.stdout
