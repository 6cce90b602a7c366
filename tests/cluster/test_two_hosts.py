"""Two hosts that share nothing but a cable train as one device does, and go on without each other."""
import shutil
import sys

from chapters import blocks
from hosts import end, on_one_device
from launch import EXACT, ROOT, SMALL
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
