"""Two hosts that share nothing but a cable train as one device does; so do batch jobs and steps of a real Slurm on them."""
import shutil
import sys
import time
from pathlib import Path

from chapters import blocks
from hosts import end, on_one_device
from launch import EXACT, ROOT, SMALL, after
from processes import HARNESS
from results import check_equal, figures, load


def test_readmes_command_resumes_from_the_file_of_rank_0_alone_and_ends_on_both_hosts_when_the_cable_is_cut(hosts):
    for host, epochs in zip(hosts[::-1], (1, 2)):  # each has a file, but not the same
        on_one_device(epochs)
        shutil.copy("single_gpu.pt", host.folder / "multinode.pt")
    expected = on_one_device(3)
    for host in hosts:  # after some seconds without an answer a connection is lost, instead of after a quarter of an hour
        host.run("sh", "-c", "echo 4 > /proc/sys/net/ipv4/tcp_retries2")
    command, = (block for block in blocks("sh") if "PET_RDZV_ENDPOINT" in block)
    for shown, typed in {"node1": hosts[0].name, "node=4": "node=1", "multinode.py 50 10\n": f"{ROOT}/multinode.py $@"}.items():
        assert command.count(shown) == 1
        command = command.replace(shown, typed)
    jobs = [host.start("sh", "-c", command, "-", 1000, 1, "--device", "cpu", *SMALL, before=EXACT) for host in hosts]
    jobs[0].wait_for("after epoch 3")
    for host, other in (hosts, hosts[::-1]):  # what is sent from now on is lost, and nobody is told
        host.run("ip", "neigh", "replace", other.address, "lladdr", "02:00:00:00:00:01", "dev", "eth0")
    assert all(job.wait() for job in jobs)
    assert jobs[0].stdout.startswith("processes: 2, ") and "multinode.pt: 2 of 1000 epochs done" in jobs[0].stdout
    assert figures(jobs[0].stdout)[3] == expected[3] and jobs[1].stdout == ""
    assert load(hosts[1].folder / "multinode.pt")["epoch"] == 1  # rank 0 alone saves


def test_two_hosts_each_spawn_processes_that_train_as_one_device_and_refuse_to_resume_from_a_file_that_one_host_lacks(hosts):
    def spawn(epochs):
        return [host.start(sys.executable, ROOT / "multigpu_spawn.py", epochs, "--device", "cpu", "-n", 2, "-g", 1, "-nr", rank,
                           *SMALL, before=EXACT, MASTER_ADDR=hosts[0].name, MASTER_PORT="29501")
                for rank, host in enumerate(hosts)]

    jobs = spawn(2)
    assert end(jobs) == on_one_device(2) and jobs[1].stdout == ""
    check_equal(hosts[0].folder / "multigpu_spawn.pt", "single_gpu.pt")
    for job in spawn(3):
        assert job.wait() == 1 and job.stdout == "" and "use multinode.py" in job.stderr
    assert load(hosts[0].folder / "multigpu_spawn.pt")["epoch"] == 2


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
