"""multinode.py on two hosts that share nothing but a cable, and what breaks there."""
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from launch import IN_FLOAT64, RESTARTS, ROOT, TORCHRUN, after, check_equal, figures, first, hold, load, train

ELASTIC = "--nnodes=1:2 --max-restarts=5 --rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=4"
# Whoever is alone waits after an epoch, and two take their time, so that something is left to train when one comes or goes.
ALONE = (IN_FLOAT64 + hold("os.replace", unless="os.environ['WORLD_SIZE'] == '2'")
         + after("torch.optim.SGD.step", "time.sleep(0.1)"))


def torchrun(hosts, options, *arguments, **env):
    """The same line on each host, but for its number, which a static rendezvous needs."""
    line = [ROOT / "multinode.py", "--device", "cpu", *arguments]
    return [host.start(*TORCHRUN, *options.split(), f"--node_rank={rank}", *line, **env) for rank, host in enumerate(hosts)]


def end(jobs):
    assert [job.wait() for job in jobs] == [0] * len(jobs), "\n".join(job.stdout + job.stderr for job in jobs)
    return figures(jobs[0].stdout)


def on_one_device(epochs, *data):
    return figures(train("single_gpu.py", epochs, *data, before=IN_FLOAT64).stdout)


@pytest.mark.parametrize("way", ["torchrun", "kubernetes", "spawn"])
def test_two_hosts_end_with_the_weights_of_one_device_however_they_are_started(way, hosts):
    a, b = hosts
    if way == "torchrun":  # told by its environment
        jobs = torchrun(hosts, "--nnodes=2 --nproc_per_node=2", 3, 2, PET_RDZV_BACKEND="c10d",
                        PET_RDZV_ENDPOINT=f"{a.name}:29400", **first(IN_FLOAT64))
    elif way == "kubernetes":  # the variables of a Kubeflow Trainer job
        jobs = [host.start(*TORCHRUN, ROOT / "multinode.py", 3, 2, "--device", "cpu", PET_NNODES="2",
                           PET_NPROC_PER_NODE="1", PET_NODE_RANK=str(rank), PET_MASTER_ADDR=a.name, PET_MASTER_PORT="29500",
                           MASTER_ADDR=a.name, RANK=str(rank), **first(IN_FLOAT64)) for rank, host in enumerate(hosts)]
    else:
        line = [sys.executable, ROOT / "multigpu_spawn.py", 3, 2, "--device", "cpu", "--checkpoint", "multinode.pt"]
        jobs = [host.start(*line, "-n", 2, "-g", 1, "-nr", rank, MASTER_ADDR=a.address, MASTER_PORT="29501", **first(IN_FLOAT64))
                for rank, host in enumerate(hosts)]
    assert end(jobs) == on_one_device(3) and jobs[1].stdout == ""
    check_equal(a.folder / "multinode.pt", "single_gpu.pt")
    assert not list(b.folder.glob("*.pt*"))  # rank 0 alone saves


def test_a_recipe_runs_on_two_hosts_by_the_line_that_the_chapter_prints(hosts):
    line, = re.findall(r"torchrun (--nnodes=2 .*-m recipes\.bf16) 50 10", (ROOT / "docs/clusters.md").read_text())
    options = line.replace("node1", hosts[0].name).replace("--nproc_per_node=4", "--nproc_per_node=2").replace("bf16", "fsdp")
    jobs = [host.start(*TORCHRUN, *options.split(), 2, "--device", "cpu", **first(IN_FLOAT64)) for host in hosts]
    assert end(jobs) == on_one_device(2) and jobs[1].stdout == ""
    check_equal(hosts[0].folder / "fsdp.pt", "single_gpu.pt")


@pytest.mark.parametrize("way, held", [("c10d", (2, 0)), ("static", (0, 2))])
def test_rank_0_alone_reads_the_checkpoint_and_sends_it_to_a_host_that_holds_none_or_another(way, held, hosts):
    a, b = hosts
    unbroken = on_one_device(2)
    shutil.copy("single_gpu.pt", hosts[held.index(2)].folder / "multinode.pt")
    unbroken |= on_one_device(3)
    meet = b.rendezvous if way == "c10d" else f"--master_addr={a.address} --master_port=29500"
    jobs = torchrun(hosts, f"--nnodes=2 --max-restarts=1 {meet}", 3, **first(IN_FLOAT64))
    assert end(jobs) == {epoch: unbroken[epoch] for epoch in range(held[0] + 1, 4)}
    assert jobs[0].stdout.count("multinode.pt: 2 of 3 epochs are done") == (held[0] == 2)
    assert jobs[1].stdout == ""
    assert all("--max-restarts is unlikely to work" in job.stderr for job in jobs)  # each host says what it lacks
    assert not list(Path().glob("*/*.tmp"))


def test_a_worker_killed_on_the_host_without_rank_0_costs_no_bit(hosts):
    jobs = torchrun(hosts, f"--nnodes=2 --max-restarts=3 {hosts[0].rendezvous}", 4, 1, **RESTARTS, **first(hold("os.replace")))
    for epoch in (1, 2):
        jobs[0].wait_for(f"epoch {epoch}/4")
        os.kill(jobs[1].workers()[0], signal.SIGKILL)
    (hosts[0].folder / "go").touch()
    assert end(jobs) == figures(train("multinode.py", 4, 1).stdout)
    assert jobs[0].stdout.count("processes: 2") == 3
    torch.testing.assert_close(load(hosts[0].folder / "multinode.pt"), load("multinode.pt"), rtol=0, atol=0)


def test_a_lost_host_is_done_without_and_taken_in_again(hosts, small):
    line = f"{ELASTIC} {hosts[0].rendezvous}", 25, 1, *small
    one, other = torchrun(hosts, *line, **RESTARTS, **first(ALONE))
    one.wait_for("processes: 2,")
    one.wait_for("/25 | loss")
    other.kill()  # all of its processes, as when its power fails
    one.wait_for("processes: 1,")
    one.wait_for("/25 | loss")
    back, = torchrun([hosts[1]], *line, **RESTARTS, **first(ALONE))
    one.wait_for("processes: 2,")
    assert end([one, back]) == on_one_device(25, *small)


def test_another_host_goes_on_where_the_one_with_rank_0_is_lost(hosts, small, folder):
    """Rank 0 is on the host that sorts first, the rendezvous on the other, the checkpoint where both see it."""
    lost, other = torchrun(hosts, f"{ELASTIC} {hosts[1].rendezvous}", 25, 1, *small, "--checkpoint", folder / "shared.pt",
                           **RESTARTS, **first(ALONE))
    lost.wait_for("processes: 2,")
    for _ in range(2):
        lost.wait_for("/25 | loss")
    lost.kill()
    lost.wait()  # and read what it still had printed
    (hosts[1].folder / "go").touch()
    end([other])
    assert "processes: 1," in other.stdout and re.search(r"shared.pt: [1-9]\d? of 25 epochs are done", other.stdout)
    assert figures(lost.stdout) | figures(other.stdout) == on_one_device(25, *small)


# multinode.py gives ten minutes.
SOONER = """
import datetime, torch.distributed
init = torch.distributed.init_process_group
torch.distributed.init_process_group = lambda *given, timeout, **options: init(
    *given, timeout=min(timeout, datetime.timedelta(minutes=1)), **options)
"""


def test_a_cut_cable_parks_nobody(hosts):
    for host in hosts:  # as README says: else a launcher may wait a quarter of an hour for its lost store
        host.run("sh", "-c", "echo 8 > /proc/sys/net/ipv4/tcp_retries2")
    jobs = torchrun(hosts, f"--nnodes=2 {hosts[0].rendezvous}", 1000, 1, **first(SOONER))
    jobs[0].wait_for("saved")
    hosts[1].pull_the_plug()
    assert all(job.wait() for job in jobs)
    assert load(hosts[0].folder / "multinode.pt")["epoch"] == jobs[0].stdout.count("saved")
