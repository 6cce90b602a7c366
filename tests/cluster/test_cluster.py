"""Two hosts that share nothing but a cable train as one device does; so do a batch job and a step of a real Slurm on them."""
import shutil
import sys
from pathlib import Path

from chapters import blocks
from launch import EXACT, ROOT, SMALL, after, hold, train
from results import check_equal, figures, load


def alone(epochs):
    return figures(train("single_gpu.py", epochs, *SMALL, before=EXACT).stdout)


def start(hosts, *arguments, before):
    """README's command on each host."""
    command, = (block for block in blocks("sh") if "PET_RDZV_ENDPOINT" in block)
    command = command.replace("node1", hosts[0].name).replace("node=4", "node=1").replace("multinode.py 50 10\n", '"$@"')
    script = ROOT / "multinode.py", *arguments, "--device", "cpu", *SMALL
    return [host.start("sh", "-c", command, "-", *script, before=before) for host in hosts]


def test_a_last_save_that_fails_ends_on_both_hosts_with_an_error(hosts):
    jobs = start(hosts, 1, before=EXACT + after("os.fsync", "time.sleep(3); raise OSError('the disk is full')"))
    assert all(job.wait() for job in jobs)
    assert "the disk is full" in jobs[0].stderr


def test_readmes_command_resumes_from_the_file_of_rank_0_alone_and_ends_on_both_hosts_when_the_cable_is_cut(hosts):
    for host, epochs in zip(hosts[::-1], (1, 2)):  # each has a file, but not the same
        alone(epochs)
        shutil.copy("single_gpu.pt", host.folder / "multinode.pt")
    jobs = start(hosts, 1000, 1, before=EXACT)
    jobs[0].wait_for("after epoch 3")
    for host, other in (hosts, hosts[::-1]):  # what is sent from now on is lost, and nobody is told
        host.run("ip", "neigh", "replace", other.address, "lladdr", "02:00:00:00:00:01", "dev", "eth0")
    assert all(job.wait() for job in jobs)
    assert jobs[0].stdout.startswith("processes: 2, ") and "multinode.pt: 2 of 1000 epochs done" in jobs[0].stdout
    assert figures(jobs[0].stdout)[3] == alone(3)[3] and jobs[1].stdout == ""
    assert load(hosts[1].folder / "multinode.pt")["epoch"] == 1  # rank 0 alone saves


def test_two_hosts_each_spawn_processes_that_train_as_one_device_and_refuse_to_resume_from_different_files(hosts):
    def spawn(epochs):
        jobs = [host.start(sys.executable, ROOT / "multigpu_spawn.py", epochs, "--device", "cpu", "-n", 2, "-g", 2, "-nr", rank,
                           *SMALL, before=EXACT, MASTER_ADDR=hosts[0].name, MASTER_PORT="29501")
                for rank, host in enumerate(hosts)]
        return jobs, [job.wait() for job in jobs]

    jobs, codes = spawn(2)
    assert codes == [0, 0] and figures(jobs[0].stdout) == alone(2) and jobs[1].stdout == ""
    check_equal(hosts[0].folder / "multigpu_spawn.pt", "single_gpu.pt")
    train("single_gpu.py", 2, "--lr", 0.01, "--checkpoint", hosts[1].folder / "multigpu_spawn.pt", *SMALL, before=EXACT)
    jobs, codes = spawn(3)
    assert codes == [1, 1] and all(job.stdout == "" and "use multinode.py" in job.stderr for job in jobs)
    assert [load(host.folder / "multigpu_spawn.pt")["epoch"] for host in hosts] == [2, 2]


def test_a_batch_job_goes_on_after_its_time_limit_and_preemption_and_srun_starts_the_script_itself(slurm):
    """Whenever it has saved, the job waits for `go`, so that there is something left to train."""
    options = *"4 1 --device cpu".split(), *SMALL
    sbatch = f"sbatch --nodes=2 --gpus-per-node=1 --cpus-per-task=3 {ROOT}/multinode.sbatch {ROOT}/multinode.py"
    job = slurm.start(*sbatch.split(), *options, before=EXACT + hold("utils.save", until="os.path.exists('go')"))
    job.until(Path("multinode.pt").exists, "it saved nothing")
    slurm.run("scancel", "--batch", "--signal=USR1", 1)  # as Slurm does, by --signal, before the job's time runs out
    job.until(lambda: load("multinode.pt")["epoch"] == 2, "it was not requeued")
    step = f"srun -K -N 2 --partition=high --exclusive {sys.executable} {ROOT}/multinode.py --checkpoint s.pt"
    local = after("utils.load_data", "assert os.environ['LOCAL_RANK'] == '0'")  # each rank is the only one of its host
    srun = slurm.start(*step.split(), *options, before=EXACT + local, MASTER_ADDR=slurm.name, MASTER_PORT="29500")
    job.until(lambda: "Restarts=2" in slurm.run("scontrol", "show", "job", 1), "it was not requeued when srun preempted it")
    Path("go").touch()
    assert srun.wait() == 0
    job.until(lambda: "JobState=COMPLETED" in slurm.run("scontrol", "show", "job", 1), "it did not end well")
    batch = Path("slurm-1.out").read_text()
    assert "multinode.pt: 2 of 4 epochs done" in batch and figures(batch) == figures(srun.stdout) == alone(4)
    assert (batch.count("processes: 2, "), srun.stdout.count("processes: 2, ")) == (3, 1)
