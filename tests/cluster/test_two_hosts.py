"""Two hosts that share nothing but a cable train as one device does, however they are started, and go on without each other."""
import shutil
import sys

from hosts import end, on_one_device, torchrun
from launch import EXACT, RESTARTS, ROOT, SMALL, after, check_equal, figures, first, hold, load


def test_rank_0_alone_reads_and_writes_the_checkpoint_also_where_the_other_host_has_another_one(hosts):
    a, b = hosts
    for host, epochs in ((b, 1), (a, 2)):
        on_one_device(epochs)
        shutil.copy("single_gpu.pt", host.folder / "multinode.pt")
    jobs = torchrun(hosts, f"--nnodes=2 --max-restarts=1 {a.rendezvous}", 3, *SMALL, **first(EXACT))
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


ELASTIC = "--nnodes=1:2 --max-restarts=5 --rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=4"
# Whoever is alone waits after an epoch, and two take their time, so that something is left to train when one comes or goes.
ALONE = (EXACT + hold("os.replace", unless="os.environ['WORLD_SIZE'] == '2'")
         + after("torch.optim.SGD.step", "time.sleep(0.05)"))


def test_the_host_with_rank_0_is_lost_done_without_and_taken_in_again(hosts, folder):
    """It sorts first; the rendezvous is on the other, the checkpoint where both see it."""
    line = f"{ELASTIC} {hosts[1].rendezvous}", 8, 1, *SMALL, "--checkpoint", folder / "shared.pt"
    lost, other = torchrun(hosts, *line, **RESTARTS, **first(ALONE))
    lost.wait_for("processes: 2,")
    lost.wait_for("/8 | loss")
    lost.kill()  # all of its processes, as when its power fails
    lost.wait()  # and read what it still had printed
    other.wait_for("processes: 1,")
    other.wait_for("/8 | loss")
    back, = torchrun([hosts[0]], *line, **RESTARTS, **first(ALONE))
    back.wait_for("processes: 2,")
    end([back, other])
    assert all("of 8 epochs are done" in job.stdout for job in (other, back))
    assert figures(lost.stdout + other.stdout + back.stdout) == on_one_device(8)


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
    jobs = torchrun(hosts, f"--nnodes=2 {hosts[0].rendezvous}", 1000, 1, *SMALL, **first(EXACT + SOONER))
    jobs[0].wait_for("saved")
    for host, other in (hosts, hosts[::-1]):  # what is sent from now on is lost, and nobody is told
        host.run("ip", "neigh", "replace", other.address, "lladdr", "02:00:00:00:00:01", "dev", "eth0")
    assert all(job.wait() for job in jobs)
    assert load(hosts[0].folder / "multinode.pt")["epoch"] == jobs[0].stdout.count("saved")
