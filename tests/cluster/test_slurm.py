"""multinode.py and its batch file under a real Slurm of two nodes."""
import shutil
import time
from pathlib import Path

from hosts import end, on_one_device
from launch import EXACT, ROOT, SMALL, after
from processes import HARNESS
from results import figures, load

# In its second epoch a job waits, so that there is something left to train, until the test has touched `go`.
WAITS = after("torch.optim.SGD.step", """
    if call == 8:
        Path("waits." + Path(sys.argv[0]).stem).touch()
        while not (signal.sigpending() or os.path.exists("go")):
            time.sleep(0.05)
""")


def wait_for(host, job, wanted):
    while wanted not in (state := host.run("scontrol", "show", "job", job)):
        assert "JobState=FAILED" not in state, Path(f"slurm-{job}.out").read_text()
        time.sleep(0.1)


def test_batch_jobs_go_on_after_the_time_limit_and_after_preemption_and_srun_starts_the_script_itself(slurm, folder, monkeypatch):
    """A recipe goes on at the step where it was. Both nodes see the folder of the scripts, to which the jobs write."""
    host, other = slurm
    host.folder = shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "*.pt"), dirs_exist_ok=True)
    (folder / "sitecustomize.py").write_text(EXACT + WAITS)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{HARNESS}")
    lines = {"multinode": "--nodes=2 --gpus-per-node=1 multinode.sbatch multinode.py",
             "preempt": f"--nodelist={other.name} --gpus-per-node=2 multinode.sbatch -m recipes.preempt"}  # for one machine
    multinode, preempt = jobs = [host.run(*f"sbatch --parsable --cpus-per-task=3 {line} 3 1 --device cpu".split(), *SMALL)
                                 for line in lines.values()]
    while not all(Path(f"waits.{name}").exists() for name in lines):
        time.sleep(0.1)
    host.run("scancel", "--batch", "--signal=USR1", preempt)  # as Slurm does, by --signal, before its time runs out
    host.run(*f"sbatch --partition=urgent --nodelist={host.name} --cpus-per-task=6 --wrap=true".split())  # of its 8
    wait_for(host, preempt, "JobState=PENDING")
    assert load("preempt.pt")["model"]["begun"][1] == 3 * 48  # the samples of three steps
    wait_for(host, multinode, "Restarts=1")
    Path("go").touch()

    step = "srun --nodes=2 --ntasks-per-node=1 --kill-on-bad-exit=1 python multinode.py 3 --checkpoint srun.pt --device cpu"
    srun = host.start(*step.split(), *SMALL, before=EXACT, MASTER_ADDR=host.name, MASTER_PORT="29500")
    alone = on_one_device(3)
    assert end([srun]) == alone and "processes: 2, " in srun.stdout
    for job, name in zip(jobs, lines):
        wait_for(host, job, "JobState=COMPLETED")
        said = Path(f"slurm-{job}.out").read_text()
        assert figures(said) == alone and f"{name}.pt: 1 of 3 epochs done" in said
        assert said.count("processes: 2, ") == 2  # as torchrun says, not Slurm, which started one task on each node
