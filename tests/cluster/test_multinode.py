"""multinode.py on two hosts that share nothing but a cable, and what breaks there."""
import os
import shutil
import signal
import sys

import pytest
import torch
from forked import train
from launch import IN_FLOAT64, RESTARTS, ROOT, SLOWLY, TORCHRUN, figures, first, load, weights

SOON = "--rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=4"  # what a lost host costs


def torchrun(hosts, *words, **env):
    """The same line on each host, given up to None as torchrun's and from there on as the script's."""
    place = words.index(None)
    return [host.start(*TORCHRUN, *words[:place], ROOT / "multinode.py", "--device", "cpu", *words[place + 1:], **env)
            for host in hosts]


def c10d(host, port=29400):
    return "--rdzv-backend=c10d", f"--rdzv-endpoint={host.name}:{port}"


def end(jobs, status=0):
    for job in jobs:
        assert job.wait(300) == status, "\n".join(job.stdout + job.stderr for job in jobs)
    return figures(jobs[0].stdout)


@pytest.mark.parametrize("way", ["by the environment", "static", "spawn"])
def test_two_hosts_end_with_the_weights_of_one_device_however_they_are_started(way, hosts, tmp_path, small):
    a, b = hosts
    float64 = first(IN_FLOAT64, tmp_path)
    if way == "by the environment":
        jobs = torchrun(hosts, "--nnodes=2", "--nproc_per_node=2", None, 3, 2, *small, PET_RDZV_BACKEND="c10d",
                        PET_RDZV_ENDPOINT=f"{a.name}:29400", **float64)
    elif way == "static":
        jobs = [job for rank, host in enumerate(hosts)
                for job in torchrun([host], "--nnodes=2", "--nproc_per_node=1", f"--node_rank={rank}", "--master_port=29500",
                                    f"--master_addr={a.address}", None, 3, 2, *small, **float64)]
    else:
        jobs = [host.start(sys.executable, ROOT / "multigpu_spawn.py", "--device", "cpu", "-n", 2, "-g", 1, "-nr", rank, 3, 2,
                           *small, "--checkpoint", "multinode.pt", MASTER_ADDR=a.address, MASTER_PORT="29501", **float64)
                for rank, host in enumerate(hosts)]
    alone = train("single_gpu.py", 3, 2, *small, cwd=tmp_path, processes=0, before=IN_FLOAT64)
    assert end(jobs) == figures(alone.stdout) and jobs[1].stdout == ""
    one, other = weights(tmp_path / "single_gpu.pt"), weights(a.folder / "multinode.pt")
    assert (other - one).norm() <= 1e-9 * one.norm()
    assert not list(b.folder.glob("*.pt*"))  # rank 0 alone saves


@pytest.mark.parametrize("held", [(2, 0), (0, 2)])
def test_rank_0_alone_reads_the_checkpoint_and_sends_it_to_a_host_that_holds_none_or_another(held, hosts, tmp_path, small):
    train("single_gpu.py", 2, *small, cwd=tmp_path, processes=0, before=IN_FLOAT64)
    for host, epochs in zip(hosts, held):
        if epochs:
            shutil.copy(tmp_path / "single_gpu.pt", host.folder / "multinode.pt")
    jobs = torchrun(hosts, "--nnodes=2", "--max-restarts=1", *c10d(hosts[1]), None, 3, *small, **first(IN_FLOAT64, tmp_path))
    alone = train("single_gpu.py", 3, "--checkpoint", "new.pt", *small, cwd=tmp_path, processes=0, before=IN_FLOAT64)
    unbroken = figures(alone.stdout)
    assert end(jobs) == {epoch: unbroken[epoch] for epoch in range(held[0] + 1, 4)}
    assert jobs[0].stdout.count(f"multinode.pt: {held[0]} of 3 epochs are done") == (held[0] > 0)
    assert jobs[1].stdout == ""
    for host, job_there in zip(hosts, jobs):
        assert "--max-restarts will hardly recover" in job_there.stderr  # each host says what it lacks
        assert not list(host.folder.glob("*.tmp"))


def test_a_worker_killed_on_the_host_without_rank_0_costs_no_bit(hosts, tmp_path):
    jobs = torchrun(hosts, "--nnodes=2", "--max-restarts=3", *c10d(hosts[0]), None, 6, 1, **RESTARTS)
    for epoch in (2, 4):
        jobs[0].wait_for(f"epoch {epoch}/6")
        os.kill(jobs[1].workers()[0], signal.SIGKILL)
    assert end(jobs) == figures(train("multinode.py", 6, 1, cwd=tmp_path).stdout)
    assert jobs[0].stdout.count("processes: 2") == 3
    assert torch.equal(weights(tmp_path / "multinode.pt"), weights(hosts[0].folder / "multinode.pt"))


def test_sigterm_to_one_launcher_ends_its_processes_within_seconds_and_the_job_with_them(hosts):
    jobs = torchrun(hosts, "--nnodes=2", *c10d(hosts[0]), None, 1000)
    jobs[0].wait_for("epoch")
    jobs[1].process.terminate()
    jobs[1].wait_until_gone(10)
    end(jobs, status=1)


@pytest.mark.long
def test_a_lost_host_is_done_without_and_taken_in_again(hosts, tmp_path, small):
    line = ["--nnodes=1:2", "--max-restarts=5", SOON, *c10d(hosts[0]), None, 25, 1, *small]
    slowly = first(SLOWLY, tmp_path)
    one, other = torchrun(hosts, *line, **RESTARTS, **slowly)
    one.wait_for("epoch  2/25")
    assert "processes: 2," in one.stdout
    other.kill()  # all of its processes, as when its power fails
    one.wait_for("processes: 1,")
    one.wait_for("/25 | loss")
    back, = torchrun(hosts[1:], *line, **RESTARTS, **slowly)
    one.wait_for("processes: 2,")
    assert end([one, back]) == figures(train("single_gpu.py", 25, *small, cwd=tmp_path, processes=0, before=IN_FLOAT64).stdout)


def test_another_host_goes_on_where_the_one_with_rank_0_is_lost(hosts, tmp_path, small):
    """Rank 0 is on the host that sorts first, the rendezvous on the other, the checkpoint where both see it."""
    lost, other = torchrun(hosts, "--nnodes=1:2", "--max-restarts=5", SOON, *c10d(hosts[1]), None, 9, 1,
                           *small, "--checkpoint", tmp_path / "shared.pt", **RESTARTS, **first(SLOWLY, tmp_path))
    lost.wait_for("epoch 3/9")
    assert other.stdout == ""
    lost.kill()
    lost.wait()  # and read what it still had printed
    end([other])
    assert "processes: 1," in other.stdout and "shared.pt: " in other.stdout
    printed = figures(lost.stdout) | figures(other.stdout)
    assert list(printed) == list(range(1, 10)) and 1 not in figures(other.stdout)
    assert printed == figures(train("single_gpu.py", 9, *small, cwd=tmp_path, processes=0, before=IN_FLOAT64).stdout)


@pytest.mark.long
def test_a_cut_cable_parks_nobody(hosts):
    for host in hosts:  # as README says: else a launcher may wait a quarter of an hour for its lost store
        host.run("sh", "-c", "echo 8 > /proc/sys/net/ipv4/tcp_retries2")
    jobs = torchrun(hosts, "--nnodes=2", *c10d(hosts[0]), None, 1000, 1)
    jobs[0].wait_for("saved")
    hosts[1].pull_the_plug()
    assert all(job.wait(300) for job in jobs)  # two minutes of them for the timeout
    assert load(hosts[0].folder / "multinode.pt")["epoch"] == jobs[0].stdout.count("saved")
