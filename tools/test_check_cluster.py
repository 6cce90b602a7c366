"""tools/check_cluster.py on two hosts, on three and under Slurm, where nothing is wrong and where one thing is."""
import re
import sys

import pytest
from launch import ROOT, after, needs

CHECK = sys.executable, ROOT / "tools/check_cluster.py", "--device=cpu"
DROPS = "add table ip fw; add chain ip fw in { type filter hook input priority 0; }; add rule ip fw in iifname eth0 drop"


def meet_at(host):
    return "--rdzv-backend=c10d", f"--rdzv-endpoint={host}:29400"


def end(jobs, status, *said):
    """All machines end with this status, and the one that hosts the rendezvous alone has printed what is found."""
    assert [job.wait() for job in jobs] == [status] * len(jobs)
    for text in said:
        assert re.search(text, jobs[0].stdout, re.MULTILINE), text
    assert all(job.stdout == "" for job in jobs[1:]) and jobs[0].stdout.count("Fine.") == (status == 0)


def test_three_machines_that_are_fine_are_named_and_measured(hosts):
    """The third machine is the second one under another name; interfaces may have other names on each."""
    a, b = hosts
    with open(f"/etc/netns/{b.name}/hosts", "a") as file:
        file.write(f"{b.address} third\n")
    line = [*CHECK, "--nnodes=3", "--nproc-per-node=2", *meet_at(a.name)]
    third = b.start("unshare", "--uts", "sh", "-c", 'hostname third && exec "$@"', "-", *line)
    jobs = a.start(*line), b.start(*line, NCCL_SOCKET_IFNAME="eth0"), third
    end(jobs, 0, rf"^{b.name}: ranks \[\d, \d\], torch \d", "^third: ranks",
        "^within third: an all-reduce of 16 MiB in .* ms, .* Gbit/s$", r"^between machines: .*\nall: .*\nFine.$")


@pytest.mark.parametrize("says, env", [("write on all: python .* --rdzv-backend=c10d --rdzv-endpoint={}:29400$", {}),
                                       ("start it by python in place of torchrun", {"TORCHELASTIC_RUN_ID": "7"})])
def test_a_forgotten_endpoint_and_torchrun_are_refused_at_once_with_what_to_write(says, env, hosts):
    job = hosts[0].start(*CHECK, "--nnodes=2", "--wait=300", **env)
    end([job], 2, "^$")
    assert re.search(says.format(hosts[0].name), job.stderr)


@pytest.mark.parametrize("endpoint, drops, sees", [
    ("{}", False, "which is 10.77.0.1 here: .* Connection refused"), ("{}", True, "which is 10.77.0.1 here: timed out"),
    ("no.such", False, "port 29400 of no.such, which is unknown here: ")])
def test_a_machine_that_cannot_come_says_what_it_sees(endpoint, drops, sees, hosts):
    a, b = hosts
    if drops:
        needs("nft")
        a.run("nft", DROPS)
    job = b.start(*CHECK, "--nnodes=2", "--wait=1", *meet_at(endpoint.format(a.name)))
    end([job], 1, "^$")
    assert len(re.findall(sees, job.stderr)) == 1


def test_a_machine_that_waits_for_others_says_who_has_come(hosts):
    end([hosts[0].start(*CHECK, "--nnodes=2", "--wait=5", *meet_at(hosts[0].name))], 1,
        rf"^{hosts[0].name}: ranks \[0\], .*\nWRONG: .*: 1 of 2 processes came in 5 s: start the same command on each")


@pytest.mark.parametrize("lines, says", [
    ("import torch; torch.__version__ = '2.0'", "^WRONG: only on {0}: torch .*\nWRONG: only on {1}: torch 2.0\n"),
    ("import time; real = time.time; time.time = lambda: real() - 9", r"^WRONG: the clock of {1} is -\d+\.\d s off\n"),
    (after("torch.distributed.all_reduce", "given[0][5:6].add_(1)"), r"^WRONG: rank 1 on {1}: the sum over .* is wrong\n"),
    (after("torch.distributed.new_group", "os.kill(os.getpid(), 9)"), "^WRONG: rank 0 on {0}: ")])
def test_what_is_wrong_on_the_second_machine_is_named(lines, says, hosts):
    """Started as static; the last one's process is killed."""
    jobs = [host.start(*CHECK, "--nnodes=2", f"--node-rank={rank}", f"--master-addr={hosts[0].name}", "--master-port=29500",
                       before=lines * rank) for rank, host in enumerate(hosts)]
    end(jobs, 1, says.format(*(host.name for host in hosts)))


@pytest.mark.parametrize("spoil, says", [
    ("nft '{}'".format(DROPS.replace("drop", "tcp flags & (syn | ack) == syn drop")),
     "{0} cannot connect to {1} at 10.77.0.2, .* timed out"),
    ("echo 10.77.0.2 $(hostname) > /etc/hosts", "{1} cannot connect to {0} at {0}, .* name resolution")])
def test_a_machine_that_another_can_only_answer_or_cannot_look_up_is_named(spoil, says, hosts):
    needs("nft")
    a, b = hosts
    b.run("sh", "-c", spoil)
    jobs = [host.start(*CHECK, "--nnodes=2", *meet_at(a.address)) for host in hosts]
    end(jobs, 1, "^WRONG: " + says.format(a.name, b.name))


@pytest.mark.parametrize("lines, status, says", [("", 0, "Fine."), (
    "import os, torch; torch.__version__ = os.environ['SLURMD_NODENAME']", 1, "WRONG: only on .*: torch .*\nWRONG: only on ")])
def test_srun_starts_it_too(lines, status, says, slurm, hosts):
    srun = "srun", "--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1"
    job = slurm.start(*srun, *CHECK, before=lines, MASTER_ADDR=slurm.name, MASTER_PORT="29500")
    assert bool(job.wait()) == bool(status)  # srun's own: another one if it has ended a task that waited for rank 0
    end([job], job.wait(), rf"^{hosts[1].name}: ranks \[\d, \d\], torch", rf"^between machines: .*\nall: .*\n{says}")
