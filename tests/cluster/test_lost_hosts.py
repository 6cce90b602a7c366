"""multinode.py where a worker is killed, a host is lost, or a cable is cut."""
import os
import re
import signal

import torch
from hosts import end, on_one_device, torchrun
from launch import IN_FLOAT64, RESTARTS, after, figures, first, hold, load, train

ELASTIC = "--nnodes=1:2 --max-restarts=5 --rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=4"
# Whoever is alone waits after an epoch, and two take their time, so that something is left to train when one comes or goes.
ALONE = (IN_FLOAT64 + hold("os.replace", unless="os.environ['WORLD_SIZE'] == '2'")
         + after("torch.optim.SGD.step", "time.sleep(0.1)"))


def test_a_worker_killed_on_the_host_without_rank_0_costs_no_bit(hosts):
    jobs = torchrun(hosts, f"--nnodes=2 --max-restarts=3 {hosts[0].rendezvous}", 3, 1, **RESTARTS, **first(hold("os.replace")))
    jobs[0].wait_for("epoch 1/3")
    os.kill(jobs[1].workers()[0], signal.SIGKILL)
    (hosts[0].folder / "go").touch()
    assert end(jobs) == figures(train("multinode.py", 3, 1).stdout)
    assert jobs[0].stdout.count("processes: 2") == 2
    torch.testing.assert_close(load(hosts[0].folder / "multinode.pt"), load("multinode.pt"), rtol=0, atol=0)


def test_a_lost_host_is_done_without_and_taken_in_again(hosts, small):
    line = f"{ELASTIC} {hosts[0].rendezvous}", 10, 1, *small
    one, other = torchrun(hosts, *line, **RESTARTS, **first(ALONE))
    one.wait_for("processes: 2,")
    one.wait_for("/10 | loss")
    other.kill()  # all of its processes, as when its power fails
    one.wait_for("processes: 1,")
    one.wait_for("/10 | loss")
    back, = torchrun([hosts[1]], *line, **RESTARTS, **first(ALONE))
    one.wait_for("processes: 2,")
    assert end([one, back]) == on_one_device(10, *small)


def test_another_host_goes_on_where_the_one_with_rank_0_is_lost(hosts, small, folder):
    """Rank 0 is on the host that sorts first, the rendezvous on the other, the checkpoint where both see it."""
    lost, other = torchrun(hosts, f"{ELASTIC} {hosts[1].rendezvous}", 10, 1, *small, "--checkpoint", folder / "shared.pt",
                           **RESTARTS, **first(ALONE))
    lost.wait_for("processes: 2,")
    for _ in range(2):
        lost.wait_for("/10 | loss")
    lost.kill()
    lost.wait()  # and read what it still had printed
    (hosts[1].folder / "go").touch()
    end([other])
    assert "processes: 1," in other.stdout and re.search(r"shared.pt: [1-9]\d? of 10 epochs are done", other.stdout)
    assert figures(lost.stdout) | figures(other.stdout) == on_one_device(10, *small)


# multinode.py waits ten minutes for a host that is silent.
SOONER = """
import datetime, torch.distributed
init = torch.distributed.init_process_group
torch.distributed.init_process_group = lambda *given, timeout, **options: init(
    *given, timeout=min(timeout, datetime.timedelta(seconds=15)), **options)
"""


def test_a_cut_cable_parks_nobody(hosts):
    for host in hosts:  # by default a launcher may wait a quarter of an hour for its lost store; the chapter sets 8
        host.run("sh", "-c", "echo 5 > /proc/sys/net/ipv4/tcp_retries2")
    jobs = torchrun(hosts, f"--nnodes=2 {hosts[0].rendezvous}", 1000, 1, **first(SOONER))
    jobs[0].wait_for("saved")
    hosts[1].pull_the_plug()
    assert all(job.wait() for job in jobs)
    assert load(hosts[0].folder / "multinode.pt")["epoch"] == jobs[0].stdout.count("saved")
