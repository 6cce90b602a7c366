"""Two hosts that share nothing but a cable train as one device does, however they are started."""
import re
import shutil
import sys

from hosts import end, on_one_device, torchrun
from launch import IN_FLOAT64, ROOT, TORCHRUN, check_equal, first, load


def test_two_hosts_end_with_the_weights_of_one_device_by_the_variables_of_a_kubeflow_trainer_job(hosts):
    jobs = [host.start(*TORCHRUN, ROOT / "multinode.py", 2, "--device", "cpu", PET_NNODES="2", PET_NPROC_PER_NODE="1",
                       PET_NODE_RANK=str(rank), PET_MASTER_ADDR=hosts[0].name, PET_MASTER_PORT="29500",
                       MASTER_ADDR=hosts[0].name, RANK=str(rank), **first(IN_FLOAT64)) for rank, host in enumerate(hosts)]
    assert end(jobs) == on_one_device(2) and jobs[1].stdout == ""
    check_equal(hosts[0].folder / "multinode.pt", "single_gpu.pt")
    assert not list(hosts[1].folder.glob("*.pt*"))  # rank 0 alone saves


def test_two_hosts_end_with_the_weights_of_one_device_where_each_spawns_its_processes(hosts):
    line = [sys.executable, ROOT / "multigpu_spawn.py", 2, "--device", "cpu", "-n", 2, "-g", 1]
    jobs = [host.start(*line, "-nr", rank, MASTER_ADDR=hosts[0].address, MASTER_PORT="29501", **first(IN_FLOAT64))
            for rank, host in enumerate(hosts)]
    assert end(jobs) == on_one_device(2) and jobs[1].stdout == ""
    check_equal(hosts[0].folder / "multigpu_spawn.pt", "single_gpu.pt")
    assert not list(hosts[1].folder.glob("*.pt*"))


def test_a_recipe_runs_on_two_hosts_by_the_line_that_the_chapter_prints(hosts):
    line, = re.findall(r"torchrun (--nnodes=2 .*-m recipes\.bf16) 50 10", (ROOT / "docs/clusters.md").read_text())
    options = line.replace("node1", hosts[0].name).replace("--nproc_per_node=4", "--nproc_per_node=1").replace("bf16", "fsdp")
    jobs = [host.start(*TORCHRUN, *options.split(), 2, "--device", "cpu", **first(IN_FLOAT64)) for host in hosts]
    assert end(jobs) == on_one_device(2) and jobs[1].stdout == ""
    check_equal(hosts[0].folder / "fsdp.pt", "single_gpu.pt")


def test_rank_0_alone_reads_the_checkpoint_and_sends_it_to_a_host_that_holds_another(hosts):
    a, b = hosts
    for host, epochs in ((b, 1), (a, 2)):
        on_one_device(epochs)
        shutil.copy("single_gpu.pt", host.folder / "multinode.pt")
    jobs = torchrun(hosts, f"--nnodes=2 --max-restarts=1 --master_addr={a.address} --master_port=29500", 3, **first(IN_FLOAT64))
    assert end(jobs) == {3: on_one_device(3)[3]} and "multinode.pt: 2 of 3 epochs are done" in jobs[0].stdout
    assert jobs[1].stdout == "" and load(b.folder / "multinode.pt")["epoch"] == 1
    assert all("--max-restarts is unlikely to work" in job.stderr for job in jobs)  # each host says what it lacks
