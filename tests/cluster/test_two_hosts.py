"""Two hosts that share nothing but a cable train as one device does, and go on without each other."""
import shutil
import sys

from chapters import blocks
from hosts import end, on_one_device, torchrun
from launch import EXACT, RESTARTS, ROOT, SMALL, after, check_equal, figures, hold, load


def typed(host, name, script, arguments=(), **settings):
    """README's command for several machines, as typed on a host."""
    command, = (block for block in blocks("sh") if "PET_RDZV_ENDPOINT" in block)
    for written, meant in {"=node1": f"={name}", "node=4": "node=1", " multinode.py 50 10\n": f" {script} $@"}.items():
        assert command.count(written) == 1
        command = command.replace(written, meant)
    return host.start("sh", "-c", command, "-", *arguments, "--device", "cpu", *SMALL, **settings)


def test_readmes_command_resumes_from_the_file_of_rank_0_alone_and_ends_on_both_hosts_when_the_cable_is_cut(hosts):
    for host, epochs in zip(hosts[::-1], (1, 2)):  # each has a file, but not the same
        on_one_device(epochs)
        shutil.copy("single_gpu.pt", host.folder / "multinode.pt")
    expected = on_one_device(3)
    for host in hosts:  # after some seconds without an answer a connection is lost, instead of after a quarter of an hour
        host.run("sh", "-c", "echo 4 > /proc/sys/net/ipv4/tcp_retries2")
    jobs = [typed(host, hosts[0].name, ROOT / "multinode.py", (1000, 1), before=EXACT) for host in hosts]
    jobs[0].wait_for("after epoch 3")
    for host, other in (hosts, hosts[::-1]):  # what is sent from now on is lost, and nobody is told
        host.run("ip", "neigh", "replace", other.address, "lladdr", "02:00:00:00:00:01", "dev", "eth0")
    assert all(job.wait() for job in jobs)
    assert jobs[0].stdout.startswith("processes: 2, ") and "multinode.pt: 2 of 1000 epochs done" in jobs[0].stdout
    assert figures(jobs[0].stdout)[3] == expected[3] and jobs[1].stdout == ""
    saved = [load(host.folder / "multinode.pt")["epoch"] for host in hosts]
    assert saved == [2 + jobs[0].stdout.count("saved"), 1]


def test_multigpu_torchrun_refuses_several_hosts_before_it_trains(hosts):
    jobs = [typed(host, hosts[0].name, ROOT / "multigpu_torchrun.py") for host in hosts]
    for job in jobs:
        assert job.wait() and job.stdout == "" and "use multinode.py" in job.stderr


def test_two_hosts_each_spawn_processes_that_train_as_one_device_and_refuse_to_resume_from_a_file_that_one_host_lacks(hosts):
    def spawn(epochs):
        return [host.start(sys.executable, ROOT / "multigpu_spawn.py", epochs, "--device", "cpu", "-n", 2, "-g", 1, "-nr", rank,
                           *SMALL, before=EXACT, MASTER_ADDR=hosts[0].name, MASTER_PORT="29501")
                for rank, host in enumerate(hosts)]

    jobs = spawn(2)
    assert end(jobs) == on_one_device(2) and jobs[1].stdout == ""
    check_equal(hosts[0].folder / "multigpu_spawn.pt", "single_gpu.pt")
    assert not list(hosts[1].folder.glob("*.pt*"))  # rank 0 alone saves
    for job in spawn(3):
        assert job.wait() == 1 and job.stdout == "" and "use multinode.py" in job.stderr
    assert load(hosts[0].folder / "multigpu_spawn.pt")["epoch"] == 2


ELASTIC = "--nnodes=1:2 --max-restarts=5 --rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=4"
# Whoever is alone waits after an epoch, and two take their time, so that something is left to train when one comes or goes.
ALONE = (EXACT + hold("os.replace", unless="os.environ['WORLD_SIZE'] == '2'")
         + after("torch.optim.SGD.step", "time.sleep(0.05)"))


def test_the_host_with_rank_0_is_lost_done_without_and_taken_in_again(hosts, folder):
    """It sorts first; the rendezvous is on the other, the checkpoint where both see it."""
    line = hosts[1], ELASTIC, 6, 1, *SMALL, "--checkpoint", folder / "shared.pt"
    lost, other = [torchrun(host, *line, before=ALONE, **RESTARTS) for host in hosts]
    lost.wait_for("/6 | loss")
    lost.kill()  # all of its processes, as when its power fails
    lost.wait()  # and read what it still had printed
    other.wait_for("/6 | loss")
    back = torchrun(hosts[0], *line, before=ALONE, **RESTARTS)
    back.wait_for("processes: 2,")
    end([back, other])
    assert "processes: 2," in lost.stdout and "processes: 1," in other.stdout
    assert all("shared.pt: 0 of 6" not in job.stdout for job in (other, back))
    assert figures(lost.stdout + other.stdout + back.stdout) == on_one_device(6)
