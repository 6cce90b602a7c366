"""multinode.py and its batch file under a real Slurm of two nodes."""
import re
import shutil

import pytest
from forked import train
from launch import IN_FLOAT64, ROOT, SLOWLY, figures, first

pytestmark = pytest.mark.xdist_group("slurm")  # one Slurm is enough


@pytest.fixture
def folder(tmp_path):
    """The scripts in a folder that all nodes see, which is also where jobs write."""
    for name in ("utils.py", "multinode.py", "multigpu_torchrun.py", "multigpu_spawn.py", "multinode.sbatch"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def one_device(tmp_path_factory, small):
    return figures(train("single_gpu.py", 9, *small, cwd=tmp_path_factory.mktemp("one"), processes=0, before=IN_FLOAT64).stdout)


def test_two_batch_jobs_at_once_both_train_and_a_requeued_one_goes_on_from_its_checkpoint(slurm, folder, one_device, small):
    jobs = [slurm.submit("multinode.sbatch", 9, 1, *small, "--device", "cpu", "--checkpoint", f"{number}.pt", cwd=folder,
                         SLURM_GPUS_ON_NODE="1", **first(SLOWLY, folder)) for number in range(2)]
    outputs = [folder / f"multinode-{job}.out" for job in jobs]
    slurm.wait_for("after epoch 2", outputs[0])
    slurm("scontrol", "requeue", jobs[0])
    for job, output in zip(jobs, outputs):
        assert slurm.wait(job) == "COMPLETED", output.read_text()
        assert output.read_text().count("processes: 2, ") == 1 + (job == jobs[0])
        assert figures(output.read_text()) == one_device
    assert "0.pt: " in outputs[0].read_text()  # so many epochs are done


def test_the_batch_file_binds_its_processes_to_the_cores_it_asks_for_or_else_leaves_them_alone(slurm, folder):
    """Set to 1 where nothing was asked for, it would leave all processes of a whole node on one core."""
    (folder / "multinode.py").write_text("""import os
open("cores.{SLURM_JOB_ID}.{RANK}".format(**os.environ), "w").write(os.environ.get("SRUN_CPUS_PER_TASK", "any"))
""")
    batch = (folder / "multinode.sbatch").read_text()
    (folder / "whole_nodes.sbatch").write_text(batch.replace("#SBATCH --cpus-per-task", "##SBATCH --cpus-per-task"))
    jobs = [slurm.submit(file, cwd=folder) for file in ("multinode.sbatch", "whole_nodes.sbatch")]
    for job, cores in zip(jobs, ("2", "any")):
        assert slurm.wait(job) == "COMPLETED"
        assert [told.read_text() for told in folder.glob(f"cores.{job}.*")] == [cores] * 4


def test_the_chapters_batch_script_has_a_preempted_job_requeued_which_goes_on_at_that_step(slurm, folder, one_device, small):
    """Told in advance that its time runs out, as Slurm does by --signal."""
    batch, = re.findall(r"```sh\n(#!/bin/bash\n.*?)```", (ROOT / "docs/recipes.md").read_text(), flags=re.DOTALL)
    for wanted, there_is in ((" --cpus-per-task=16 --gpus-per-node=4", ""), ("--nproc_per_node=4", "--nproc_per_node=2"),
                             ("50 10", f"9 9 --device cpu {' '.join(map(str, small))}")):
        assert wanted in batch
        batch = batch.replace(wanted, there_is)
    (folder / "preempt.sbatch").write_text(batch)
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    job = slurm.submit("preempt.sbatch", cwd=folder, **first(SLOWLY, folder))
    output = folder / f"preempt-{job}.out"
    slurm.wait_for("epoch 2/", output)
    slurm("scancel", "--batch", "--signal=USR1", job)
    assert slurm.wait(job) == "COMPLETED", output.read_text()
    assert output.read_text().count("saved preempt.pt") == 2 and output.read_text().count("processes: 2, ") == 2
    assert figures(output.read_text()) == one_device


def test_srun_starts_the_script_itself(slurm, folder, one_device, small):
    printed = slurm("srun", "--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1", "python", "multinode.py", 3, 2,
                    *small, "--device", "cpu", cwd=folder, **first(IN_FLOAT64, folder))
    assert "processes: 4, " in printed
    assert figures(printed) == {epoch: one_device[epoch] for epoch in (1, 2, 3)}


def test_a_bad_checkpoint_where_rank_0_is_ends_the_tasks_on_all_machines(slurm, folder):
    for host in slurm.hosts:
        (folder / host.name).mkdir()
    (folder / slurm.hosts[0].name / "multinode.pt").write_text("no checkpoint")
    train_there = 'cd "$SLURMD_NODENAME" && python ../multinode.py 3 --device cpu'
    step = slurm.run("srun", "--nodes=2", "--kill-on-bad-exit=1", "sh", "-c", train_there, cwd=folder)
    assert step.returncode != 0 and "multinode.pt cannot be resumed and is left as it was" in step.stderr


def test_the_batch_step_itself_is_told_what_is_missing(slurm, folder):
    job = slurm.submit("--ntasks=2", "--output=%j.out", "--wrap", "python multinode.py 3", cwd=folder, MASTER_ADDR="127.0.0.1")
    assert slurm.wait(job) == "FAILED"
    said, = (folder / f"{job}.out").read_text().splitlines()
    assert said.startswith("multinode.py: a launcher has to start it: ")


@pytest.mark.parametrize("command", ["torchrun --standalone --nproc_per_node=2 multinode.py", "python multigpu_spawn.py"])
def test_launchers_count_before_slurm_inside_an_allocation(command, slurm, folder):
    assert "processes: 2, " in slurm("srun", "--ntasks=1", *command.split(), 1, "--device", "cpu", cwd=folder)
