"""tools/check_cluster.py on two hosts and under Slurm, where nothing is wrong and where one thing is."""
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from launch import NOT_COPIED, ROOT, TORCHRUN, Job, after, first, needs

CHECK = ROOT / "tools/check_cluster.py"
PARTS = ["1. Who is here", "2. What differs", "3. Who reaches whom", "4. How fast", "5. "]


def start(hosts, *options, **env):
    """The same line on each host, of which the first one keeps the rendezvous."""
    line = [sys.executable, CHECK, "--nnodes=2", *hosts[0].rendezvous.split(), "--device=cpu", "--largest=16", *options]
    return [host.start(*line, **env) for host in hosts]


def end(jobs, status, *said):
    """What rank 0 printed: all parts in their order, up to the one that says what is wrong."""
    assert [job.wait() for job in jobs] == [status] * len(jobs), "\n".join(job.stdout + job.stderr for job in jobs)
    parts = [line for line in jobs[0].stdout.splitlines() if not line.startswith(" ")]
    assert all(part.startswith(expected) for part, expected in zip(parts[:-1], PARTS)), parts
    assert parts[-1].startswith("5. First to mend: " if status else "5. Fine."), parts
    for text in said:
        assert re.search(text, jobs[0].stdout, flags=re.MULTILINE), jobs[0].stdout
    assert all(job.stdout == "" for job in jobs[1:])
    return jobs[0].stdout


def test_a_good_cluster_is_fine_and_said_so_in_five_parts_and_in_json_when_torchrun_starts_it(hosts):
    a, b = hosts
    line = [*TORCHRUN, "--nnodes=2", *a.rendezvous.split(), CHECK, "--device=cpu", "--largest=16", "--json=found.json"]
    printed = end([host.start(*line, PET_NPROC_PER_NODE="2") for host in hosts], 0)
    assert [printed.count(part) for part in PARTS] == [1] * 5 and printed.count("good: ") == 4
    found = json.loads((a.folder / "found.json").read_text())
    assert found["fine"] and not found["faults"] and not (b.folder / "found.json").exists()
    assert [row["address"] for row in found["processes"]] == [a.address, a.address, b.address, b.address]
    assert list(found["all-reduce"]) == [f"within {a.name}", f"within {b.name}", f"{a.name} - {b.name}"]
    assert all(line["right"] for line in found["all-reduce"].values())


EARLY_AND_WRONG = """
import time
real_time = time.time
time.time = lambda: real_time() + 9
import torch.distributed
""" + after("torch.distributed.all_reduce", "given[0][5:6].add_(1)")


def test_what_differs_on_a_machine_is_named_with_the_processes_that_have_it_and_a_wrong_sum_too(hosts, folder):
    """Another number of threads, version of a script, clock and all-reduce on one of two; started as static."""
    a, b = hosts
    other = folder / "other"
    shutil.copytree(ROOT, other, ignore=NOT_COPIED)
    with open(other / "multinode.py", "a") as file:
        file.write("# mine\n")
    line = ["--nnodes=2", f"--master_addr={a.address}", "--master_port=29500", "--device=cpu", "--largest=1"]
    wrong = {"OMP_NUM_THREADS": "2", **first(EARLY_AND_WRONG)}
    jobs = [a.start(sys.executable, CHECK, "--node_rank=0", *line),
            b.start(sys.executable, other / "tools/check_cluster.py", "--node_rank=1", *line, **wrong)]
    printed = end(jobs, 1, f"OMP_NUM_THREADS differs: 1 in rank 0 on {a.name} . 2 in rank 1 on {b.name}",
                  rf"multinode.py differs: \w+ in rank 0 on {a.name} . \w+ in rank 1 on {b.name}",
                  rf"the clock of {b.name} is \d+\.\d s ahead of that of {a.name}",
                  f"the sum of an all-reduce {a.name} - {b.name} is wrong in rank 1 on {b.name}")
    assert "utils.py differs" not in printed


def test_a_machine_that_was_not_started_is_missed_by_those_that_were(hosts):
    """On the machine of the rendezvous, and on another one, each alone."""
    a, b = hosts
    end(start([a], "--wait=10"), 1, f"1 of 2 machines did not come within 10 s; here: rank 0 on {a.name}")
    job = b.start(sys.executable, CHECK, "--nnodes=2", *a.rendezvous.split(), "--wait=10")
    assert job.wait() == 1
    assert f"{b.name}: waited 10 s for the machine of the rendezvous, {a.name}:29400: " in job.stderr


def test_a_firewall_in_one_direction_is_named_with_both_machines_before_the_process_group_is_made(hosts):
    needs("nft")
    a, b = hosts
    b.run("nft", "add table ip fw; add chain ip fw in { type filter hook input priority 0; }; "
          "add rule ip fw in iifname eth0 tcp flags & (syn|ack) == syn drop")  # whoever comes hears nothing
    printed = end(start(hosts), 1, f"{a.name} cannot reach {b.name} at {b.address}: no answer: a firewall")
    assert f"{b.name} cannot reach" not in printed and "4. " not in printed


def test_an_address_that_leads_back_to_whoever_asks_is_named_with_the_variable_that_cures_it(hosts):
    a, b = hosts
    file = Path("/etc/netns", b.name, "hosts")
    file.write_text(f"127.0.1.1 {b.name}\n{file.read_text()}")
    end(start(hosts), 1, f"{a.name} cannot reach {b.name} at 127.0.1.1: that leads back to whoever asks",
        rf"to try on {b.name}: GLOO_SOCKET_IFNAME=eth0 \({b.address}\)$")


# A cable that holds each frame back for 10 ms. Not tc netem, which is a module that a kernel may lack. With its header
# (15: PACKET_VNET_HDR) a frame may be longer than the cable takes; what was sent here is not read (23: PACKET_IGNORE_OUTGOING).
LATE = """
import collections, select, socket, sys, time
ends, frames = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) for _ in range(2)], collections.deque()
for end, name in zip(ends, sys.argv[1:]):
    end.setsockopt(263, 15, 1)
    end.setsockopt(263, 23, 1)
    end.bind((name, 0))
print("ready", flush=True)
while True:
    wait = max(0, frames[0][0] - time.monotonic()) if frames else None
    for end in select.select(ends, [], [], wait)[0]:
        frames.append((time.monotonic() + 0.01, ends[end is ends[0]], end.recv(2**17)))
    while frames and frames[0][0] <= time.monotonic():
        _, end, frame = frames.popleft()
        end.send(frame)
"""


def test_a_slow_link_is_remarked_on_and_leaves_a_cluster_fine(hosts):
    """However busy this machine is, no figure can be better than the cable."""
    a, b = hosts
    for host in hosts:
        host.pull_the_plug()
        host.run(*"tc qdisc add dev eth0 root tbf rate 100mbit burst 64k latency 500ms".split())
    Job(["ip", "netns", "exec", a.switch, sys.executable, "-c", LATE, a.name, b.name]).wait_for("ready")
    end(start(hosts, "--json=found.json"), 0, rf"remark: {a.name} - {b.name}: \d+\.\d ms latency, which",
        rf"remark: {a.name} - {b.name}: \d+ Mbit/s, less than half of what")
    found = json.loads((a.folder / "found.json").read_text())
    figures = found["all-reduce"][f"{a.name} - {b.name}"]
    said = " ".join(found["remarks"])  # on a busy machine perhaps also that a process computes slower than the rest
    assert found["fine"] and "ms latency" in said and "Mbit/s, less than half" in said
    assert figures["latency, s"] >= 0.02 and figures["best"] < 100e6 / 8 * 4 / 3, found  # a burst is free


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_process_that_stops_in_the_middle_is_named_and_nobody_waits_for_it(stopped, hosts):
    """Also where it is rank 0: then the others say that nothing is heard of it."""
    jobs = start(hosts, "--wait=40", PET_NPROC_PER_NODE="2")
    jobs[0].wait_for("good: each machine reaches")
    os.kill(jobs[stopped].workers()[stopped], signal.SIGSTOP)
    if stopped == 1:
        end(jobs, 1, f"rank 3 on {hosts[1].name} said nothing for 40 s")  # its launcher is rid of it too
    else:
        assert [job.wait() for job in jobs] == [1, 1]
        assert f"{hosts[1].name}: nothing is heard of rank 0 at " in jobs[1].stderr


def test_srun_starts_it_too_and_a_task_that_does_not_come_is_missed(slurm):
    step = ["srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    check = ["python", CHECK, "--device=cpu", "--largest=16"]
    assert slurm(*step, *check).splitlines()[-1] == "5. Fine."
    missed = slurm.run(*step, "sh", "-c", '[ $SLURM_PROCID = 0 ] || exec sleep 600; exec "$@"', "-", *check, "--wait=10")
    assert missed.returncode != 0
    assert f"1 of 2 processes (ranks 1) did not come within 10 s; here: rank 0 on {slurm.hosts[0].name}" in missed.stdout
