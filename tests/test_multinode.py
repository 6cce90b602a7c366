"""multinode.py on two hosts that share nothing but a cable, and what breaks there."""
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import IN_FLOAT64
from hosts import give_folders, two_hosts
from launch import ROOT, figures, load, run, run_all, two_at_a_time, weights

RESTARTS = dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
SOON = "--rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=4"  # what a lost host costs


def torchrun(hosts, *words, **env):
    """The same line on each host, given up to None as torchrun's and from there on as the script's."""
    place = words.index(None)
    return [host.start(sys.executable, "-m", "torch.distributed.run", *words[:place], ROOT / "multinode.py",
                       "--device", "cpu", *words[place + 1:], **env) for host in hosts]


def c10d(host, port=29400):
    return "--rdzv-backend=c10d", f"--rdzv-endpoint={host.name}:{port}"


def end(jobs, status=0):
    for job in jobs:
        assert job.wait(300) == status, "\n".join(job.stdout + job.stderr for job in jobs)
    return figures(jobs[0])


def test_two_hosts_end_with_the_weights_of_one_device_however_they_are_started(hosts, tmp_path, float64):
    """Two of these jobs at once on the same two hosts, each at an address of its own."""
    a, b = hosts
    run("single_gpu.py", 3, 2, cwd=tmp_path, **float64)

    def plain(*options):  # the rendezvous stands in the environment
        return torchrun(hosts, "--nnodes=2", "--nproc_per_node=2", None, *options,
                        PET_RDZV_BACKEND="c10d", PET_RDZV_ENDPOINT=f"{a.name}:29400", **float64)

    def static(*options):
        return [torchrun([host], "--nnodes=2", "--nproc_per_node=1", f"--node_rank={rank}", "--master_port=29500",
                         f"--master_addr={a.address}", None, *options, **float64)[0] for rank, host in enumerate(hosts)]

    def spawn(*options):
        return [host.start(sys.executable, ROOT / "multigpu_spawn.py", "--device", "cpu", "-n", 2, "-g", 1, "-nr", rank, *options,
                           MASTER_ADDR=a.address, MASTER_PORT="29501", **float64) for rank, host in enumerate(hosts)]

    def train(way):
        jobs = way(3, 2, "--checkpoint", f"{way.__name__}.pt")
        assert list(end(jobs)) == [1, 2, 3] and jobs[1].stdout == ""
        one, other = weights(tmp_path / "single_gpu.pt"), weights(a.folder / f"{way.__name__}.pt")
        assert (other - one).norm() <= 1e-9 * one.norm(), way
        assert not list(b.folder.glob("*.pt*"))  # rank 0 alone saves

    two_at_a_time(train, plain, static, spawn)


def test_rank_0_alone_reads_the_checkpoint_and_sends_it_to_hosts_that_hold_none_or_an_old_one(hosts, tmp_path, float64):
    unbroken, *_ = run_all(*[("single_gpu.py", epochs, "--checkpoint", f"{epochs}.pt", dict(cwd=tmp_path, **float64))
                             for epochs in (3, 2)])

    def go_on(name, port, *held):
        for host, epochs in zip(hosts, held):
            if epochs:
                shutil.copy(tmp_path / f"{epochs}.pt", host.folder / name)
        jobs = torchrun(hosts, "--nnodes=2", "--max-restarts=1", *c10d(hosts[1], port), None, 3, "--checkpoint", name, **float64)
        assert end(jobs) == {epoch: figures(unbroken)[epoch] for epoch in range(held[0] + 1, 4)}
        assert jobs[0].stdout.count(f"{name}: {held[0]} of 3 epochs are done") == (held[0] > 0)
        assert jobs[1].stdout == ""
        for host, job_there in zip(hosts, jobs):
            assert "--max-restarts will hardly recover" in job_there.stderr  # each host says what it lacks
            assert not list(host.folder.glob("*.tmp"))

    two_at_a_time(lambda case: go_on(*case), ("alone.pt", 29400, 2, 0), ("stale.pt", 29401, 0, 2))


def test_a_worker_killed_on_the_host_without_rank_0_costs_no_bit(hosts):
    def train(name, port):
        return torchrun(hosts, "--nnodes=2", "--max-restarts=3", *c10d(hosts[0], port), None, 9, 1, "--checkpoint", name,
                        **RESTARTS)
    undisturbed, jobs = train("undisturbed.pt", 29400), train("killed.pt", 29401)
    for epoch in (2, 6):
        jobs[0].wait_for(f"epoch {epoch}/9")
        os.kill(jobs[1].workers()[0], signal.SIGKILL)
    assert end(jobs) == end(undisturbed)
    assert jobs[0].stdout.count("processes: 2") == 3
    assert torch.equal(*(weights(hosts[0].folder / name) for name in ("undisturbed.pt", "killed.pt")))


def test_sigterm_to_one_launcher_ends_its_processes_within_seconds_and_the_job_with_them(hosts):
    jobs = torchrun(hosts, "--nnodes=2", *c10d(hosts[0]), None, 1000)
    jobs[0].wait_for("epoch")
    jobs[1].process.terminate()
    jobs[1].wait_until_gone(10)
    end(jobs, status=1)


@pytest.fixture(scope="module", autouse=True)
def waiting(network, tmp_path_factory, customize):
    """What mostly waits for what is lost does so beside the tests above, each on hosts of its own."""
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor())
        futures = {}
        for function in (lose_a_host, lose_the_host_of_rank_0, cut_the_cable):
            folder, hosts = tmp_path_factory.mktemp(function.__name__), stack.enter_context(two_hosts())
            give_folders(hosts, folder)
            futures[function] = pool.submit(function, hosts, folder, customize(IN_FLOAT64 + SLOWLY))
        yield futures


SLOWLY = """
import time
step = torch.optim.SGD.step
def step_slowly(self):  # so that there is something left to train when a host comes back
    time.sleep(0.05)
    return step(self)
torch.optim.SGD.step = step_slowly
"""


def lose_a_host(hosts, folder, slowly):
    line = ["--nnodes=1:2", "--max-restarts=5", SOON, *c10d(hosts[0]), None, 25, 1]
    first, second = torchrun(hosts, *line, **RESTARTS, **slowly)
    first.wait_for("epoch  2/25")
    assert "processes: 2," in first.stdout
    second.kill()  # all of its processes, as when its power fails
    first.wait_for("processes: 1,")
    first.wait_for("/25 | loss")
    back, = torchrun(hosts[1:], *line, **RESTARTS, **slowly)
    first.wait_for("processes: 2,")
    assert end([first, back]) == figures(run("single_gpu.py", 25, cwd=folder, timeout=300, **slowly))


def test_a_lost_host_is_done_without_and_taken_in_again(waiting):
    waiting[lose_a_host].result()


def lose_the_host_of_rank_0(hosts, folder, slowly):
    """Rank 0 is on the host that sorts first, the rendezvous on the other, the checkpoint where both see it."""
    first, second = torchrun(hosts, "--nnodes=1:2", "--max-restarts=5", SOON, *c10d(hosts[1]), None, 9, 1,
                             "--checkpoint", folder / "shared.pt", **RESTARTS, **slowly)
    first.wait_for("epoch 3/9")
    assert second.stdout == ""
    first.kill()
    first.wait()  # and read what it still had printed
    end([second])
    assert "processes: 1," in second.stdout and "shared.pt: " in second.stdout
    printed = figures(first) | figures(second)
    assert list(printed) == list(range(1, 10)) and 1 not in figures(second)
    assert printed == figures(run("single_gpu.py", 9, cwd=folder, timeout=300, **slowly))


def test_another_host_goes_on_where_the_one_with_rank_0_is_lost(waiting):
    waiting[lose_the_host_of_rank_0].result()


def cut_the_cable(hosts, folder, slowly):
    for host in hosts:  # as README says: else a launcher may wait a quarter of an hour for its lost store
        subprocess.run(host.command("sh", "-c", "echo 8 > /proc/sys/net/ipv4/tcp_retries2"), check=True)
    jobs = torchrun(hosts, "--nnodes=2", *c10d(hosts[0]), None, 1000, 1, **slowly)
    jobs[0].wait_for("saved")
    hosts[1].pull_the_plug()
    assert all(job.wait(300) for job in jobs)  # two minutes of them for the timeout
    assert load(hosts[0].folder / "multinode.pt")["epoch"] == jobs[0].stdout.count("saved")


def test_a_cut_cable_parks_nobody(waiting):
    waiting[cut_the_cable].result()
