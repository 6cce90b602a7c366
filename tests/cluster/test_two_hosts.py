"""Two hosts that share nothing but a cable train as one device does, however they are started."""
import shutil
import sys

from hosts import end, on_one_device
from launch import EXACT, ROOT, SMALL, TORCHRUN, check_equal, first, load


def test_rank_0_alone_reads_and_writes_the_checkpoint_also_by_the_variables_of_a_kubeflow_trainer_job(hosts):
    """The other host holds another one."""
    a, b = hosts
    for host, epochs in ((b, 1), (a, 2)):
        on_one_device(epochs)
        shutil.copy("single_gpu.pt", host.folder / "multinode.pt")
    jobs = [host.start(*TORCHRUN, "--max-restarts=1", ROOT / "multinode.py", 3, "--device", "cpu", *SMALL, PET_NNODES="2",
                       PET_NPROC_PER_NODE="1", PET_NODE_RANK=str(rank), PET_MASTER_ADDR=a.name, PET_MASTER_PORT="29500",
                       MASTER_ADDR=a.name, RANK=str(rank), **first(EXACT)) for rank, host in enumerate(hosts)]
    assert end(jobs) == {3: on_one_device(3)[3]} and "multinode.pt: 2 of 3 epochs are done" in jobs[0].stdout
    check_equal(a.folder / "multinode.pt", "single_gpu.pt")
    assert jobs[1].stdout == "" and load(b.folder / "multinode.pt")["epoch"] == 1
    assert all("--max-restarts is unlikely to work" in job.stderr for job in jobs)  # each host says what it lacks


def test_two_hosts_end_with_the_weights_of_one_device_where_each_spawns_its_processes(hosts):
    line = [sys.executable, ROOT / "multigpu_spawn.py", 2, "--device", "cpu", "-n", 2, "-g", 1, *SMALL]
    jobs = [host.start(*line, "-nr", rank, MASTER_ADDR=hosts[0].address, MASTER_PORT="29501", **first(EXACT))
            for rank, host in enumerate(hosts)]
    assert end(jobs) == on_one_device(2) and jobs[1].stdout == ""
    check_equal(hosts[0].folder / "multigpu_spawn.pt", "single_gpu.pt")
    assert not list(hosts[1].folder.glob("*.pt*"))  # rank 0 alone saves
