"""multinode.py and its batch file under a real Slurm of two nodes."""
import shutil
import time
from pathlib import Path

import pytest
from hosts import end, on_one_device
from launch import EXACT, ROOT, SMALL, after, figures, first, hold, load

# After an epoch, so that there is something left to train
HELD = EXACT + after("utils.report", "'cores', os.environ['SRUN_CPUS_PER_TASK']") + hold("os.replace")
TILL_A_SIGNAL = EXACT + "calls = []\n" + hold("torch.optim.SGD.step", "calls.append(0) or len(calls) != 8",
                                              "open('waits', 'w') and signal.sigpending() or os.path.exists('go')")
SAVES_SLOWLY = after("os.fsync", "signal.sigpending() and time.sleep(3)")


@pytest.fixture(autouse=True)
def scripts(folder, slurm):
    """The scripts in a folder that all nodes see, which is also where jobs write; of jobs that are left none goes on."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "*.pt"), dirs_exist_ok=True)
    slurm[0].folder = folder
    yield
    slurm[0].run("scancel", "--user=root")
    print(*(output.read_text() for output in folder.glob("*.out")))  # which pytest shows where a test has failed


def wait_for(host, job, wanted):
    while wanted not in (state := host.run("scontrol", "show", "job", job)):
        assert "JobState=FAILED" not in state, Path(f"multinode-{job}.out").read_text()
        time.sleep(0.1)


def test_batch_jobs_go_on_after_the_time_limit_and_after_preemption_a_recipe_at_the_step_where_it_was(slurm):
    host, options = slurm[0], (3, 1, "--device", "cpu", *SMALL)
    batch = "sbatch", "--parsable", "--gpus-per-node=1", "--cpus-per-task=3", "multinode.sbatch"
    jobs = [host.run(*batch, *script, *options, **first(before))
            for script, before in (([], HELD), (["recipes.preempt"], TILL_A_SIGNAL + SAVES_SLOWLY))]

    while not all(Path(name).exists() for name in ("multinode.pt", "waits")):  # and no more is trained without `go`
        time.sleep(0.1)
    host.run("scancel", "--batch", "--signal=USR1", jobs[1])  # as Slurm does, by --signal, before its time runs out
    wait_for(host, jobs[1], "Restarts=1")
    assert load("preempt.pt")["total"][1] == 3 * 48  # steps of the second epoch
    host.run("sbatch", "--partition=urgent", "--nodes=2", "--cpus-per-task=6", "--wrap=true")  # of the 8 on each
    wait_for(host, jobs[0], "Restarts=1")
    Path("go").touch()
    alone = on_one_device(3)
    for job, name in zip(jobs, ("multinode.pt", "preempt.pt")):
        wait_for(host, job, "JobState=COMPLETED")
        said = Path(f"multinode-{job}.out").read_text()
        assert figures(said) == alone and f"{name}: 1 of 3 epochs are done" in said
        assert all(f"{machine.name}: WARNING: it has 2 GPUs, but this job asked for 1: use" in said for machine in slurm)
    assert "cores 3\n" in Path("log.0").read_text()


def test_batch_jobs_run_the_script_or_module_that_is_named_and_one_that_is_a_single_process_once(slurm):
    host, options = slurm[0], (2, 2, "--device", "cpu", *SMALL)
    shutil.copy("multinode.py", "train.py")
    named = {"train.py": 4, "-m recipes.profiler": 4, "single_gpu.py": 1}
    jobs = [host.run("sbatch", "--parsable", "--cpus-per-task=2", "multinode.sbatch", *script.split(), *options,
                     "--checkpoint", f"{processes}-{number}.pt", **first(EXACT))
            for number, (script, processes) in enumerate(named.items())]
    alone = on_one_device(2)
    for job, processes in zip(jobs, named.values()):
        wait_for(host, job, "JobState=COMPLETED")
        said = Path(f"multinode-{job}.out").read_text()
        assert figures(said) == alone and said.count(f"processes: {processes}, ") == 1


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
