"""multinode.py and its batch file under a real Slurm of two nodes."""
import re
import shutil
import time
from pathlib import Path

import pytest
from hosts import on_one_device
from launch import EXACT, ROOT, SMALL, TWO_GPUS, figures, first, hold

HELD = EXACT + hold("os.replace")  # after an epoch, so that there is something left to train
TILL_A_SIGNAL = EXACT + "calls = []\n" + hold("torch.optim.SGD.step", "calls.append(0) or len(calls) != 8",
                                              "signal.sigpending() or os.path.exists('go')")


@pytest.fixture(autouse=True)
def scripts(folder, slurm):
    """The scripts in a folder that all nodes see, which is also where jobs write; of jobs that are left none goes on."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True)
    yield
    slurm("scancel", "--user=root")
    print(*(output.read_text() for output in folder.glob("*.out")))  # which pytest shows where a test has failed


def test_two_batch_jobs_at_once_train_a_recipe_too_and_when_time_runs_out_or_they_are_preempted_they_go_on(slurm):
    """With the GPUs asked for; where a machine has more, it warns."""
    line = 3, 1, "--device", "cpu", *SMALL
    job, recipe = (slurm.submit("--gpus-per-node=1", "--cpus-per-task=3", "multinode.sbatch", *what, *line, **first(HELD))
                   for what in ((), ("-m", "recipes.fsdp")))
    outputs = [Path(f"multinode-{number}.out") for number in (job, recipe)]
    for output in outputs:
        slurm.wait_for("epoch 1/3", output)  # and no more, before there is a file `go`
    while not (Path("multinode.pt").exists() and Path("fsdp.pt").exists()):
        time.sleep(0.1)
    slurm("scancel", "--batch", "--signal=USR1", job)  # as Slurm does, by --signal, before its time runs out
    slurm.submit("--partition=urgent", "--nodes=2", "--cpus-per-task=6", "--wrap=true")  # of the 8 on each
    for number in (job, recipe):
        while "Restarts=0" in (state := slurm("scontrol", "show", "job", number)):
            assert "JobState=FAILED" not in state
            time.sleep(0.1)
    Path("go").touch()
    alone = on_one_device(3)
    for number, output in zip((job, recipe), outputs):
        assert slurm.wait(number) == "COMPLETED", output.read_text()
        assert output.read_text().count("processes: 2, ") == 2
        assert figures(output.read_text()) == alone
        for host in slurm.hosts:
            assert f"{host.name}: 3 cores, 1 GPUs\n" in output.read_text()
            assert f"{host.name}: WARNING: it has 2 GPUs, but this job asked for 1: use --gpus-per-node=2" in output.read_text()
    assert "multinode.pt: 1 of 3 epochs are done" in outputs[0].read_text()
    assert "fsdp.pt: 1 of 3 epochs are done" in outputs[1].read_text()


def test_the_batch_file_binds_its_processes_to_the_cores_it_asks_for_or_else_leaves_them_alone(slurm):
    """Set to 1 where nothing was asked for, it would leave all processes of a whole node on one core."""
    Path("multinode.py").write_text("""import os
open("cores.{SLURM_JOB_ID}.{RANK}".format(**os.environ), "w").write(os.environ.get("SRUN_CPUS_PER_TASK", "any"))
""")
    batch = Path("multinode.sbatch").read_text()
    Path("whole_nodes.sbatch").write_text(batch.replace("#SBATCH --cpus-per-task", "##SBATCH --cpus-per-task"))
    jobs = [slurm.submit("--gpus-per-node=2", file, PYTHONPATH="") for file in ("multinode.sbatch", "whole_nodes.sbatch")]
    for job, cores in zip(jobs, ("2", "any")):
        assert slurm.wait(job) == "COMPLETED"
        assert [told.read_text() for told in Path().glob(f"cores.{job}.*")] == [cores] * 4
        assert "WARNING" not in Path(f"multinode-{job}.out").read_text()


def test_the_chapters_batch_script_has_a_preempted_job_requeued_which_goes_on_at_that_step(slurm):
    """On both machines, told in advance that the time runs out, as Slurm does by --signal."""
    batch, = re.findall(r"```sh\n(#!/bin/bash\n.*?)```", (ROOT / "docs/recipes.md").read_text(), flags=re.DOTALL)
    for wanted, there_is in ((" --gpus-per-node=4", ""), ("--cpus-per-task=16", "--cpus-per-task=2"),
                             ("--nproc_per_node=4", "--nproc_per_node=1"),
                             ("50 10", "3 3 --device cpu --batch-size 48")):
        assert wanted in batch
        batch = batch.replace(wanted, there_is)
    assert batch.endswith(re.search(r"(?m)^wait (?:.*\n)+?exit 1\n", Path("multinode.sbatch").read_text())[0])  # if preempted
    Path("preempt.sbatch").write_text(batch)
    job = slurm.submit("preempt.sbatch", **first(TILL_A_SIGNAL))
    output = Path(f"preempt-{job}.out")
    slurm.wait_for("epoch 1/", output)
    slurm("scancel", "--batch", "--signal=USR1", job)
    slurm.wait_for("saved", output)
    Path("go").touch()
    assert slurm.wait(job) == "COMPLETED", output.read_text()
    assert output.read_text().count("saved preempt.pt") == 2 and output.read_text().count("processes: 2, ") == 2
    assert figures(output.read_text()) == on_one_device(3)


def test_srun_starts_the_script_itself_and_ends_all_its_tasks_and_launchers_count_before_slurm(slurm):
    step = ["srun", "--nodes=2", "--kill-on-bad-exit=1"]
    script = ["python", "multinode.py", 2, 2, "--device", "cpu", *SMALL]
    printed = slurm(*step, "--ntasks-per-node=2", *script, **first(EXACT))
    assert "processes: 4, " in printed
    assert figures(printed) == on_one_device(2)
    Path("multinode.pt").write_text("no checkpoint")
    failed = slurm.run(*step, *script)
    assert failed.returncode != 0 and failed.stderr.count("multinode.pt cannot be resumed and is left as it was") == 1
    Path("multinode.pt").unlink()
    crowded = slurm.run("srun", "--nodes=1", "--ntasks=3", "--gpus-per-node=2", *step[2:], *script[:2], **first(TWO_GPUS))
    assert "nccl needs a GPU for each process, but with --device cuda there are 2 GPUs for 3" in crowded.stderr
    for launched in ("torchrun --standalone --nproc_per_node=2 multinode.py", "python multigpu_spawn.py"):
        printed = slurm("srun", "--ntasks=1", *launched.split(), 1, "--device", "cpu", *SMALL, **first(EXACT))
        assert "processes: 2, " in printed
