"""tools/check_cluster.py on two hosts and under Slurm, where nothing is wrong and where one thing is."""
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import ip
from launch import ROOT, two_at_a_time
from slurm import PYTHON

CHECK = ROOT / "tools/check_cluster.py"
PARTS = ["1. Who is here", "2. What differs", "3. Who reaches whom", "4. How fast", "5. "]


def start(hosts, *options, endpoint=None, launcher=(), checks=(CHECK, CHECK), **env):
    """The same line on each host; without a launcher the check is its own."""
    line = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint or hosts[0].name}:29400"]
    return [host.start(sys.executable, *launcher, *(line if launcher else []), check, *([] if launcher else line),
                       "--device=cpu", "--largest=16", *options, **env) for host, check in zip(hosts, checks)]


def end(jobs, status, *said):
    """What the machine of rank 0 printed: all parts in their order, up to the one that says what is wrong."""
    assert [job.wait(120) for job in jobs] == [status] * len(jobs), "\n".join(job.stdout + job.stderr for job in jobs)
    parts = [line for line in jobs[0].stdout.splitlines() if not line.startswith(" ")]
    expected = [part for part in PARTS if any(line.startswith(part) for line in parts)]
    assert len(parts) == len(expected) and all(line.startswith(part) for line, part in zip(parts, expected)), parts
    assert parts[-1].startswith("5. First to mend: " if status else "5. Fine."), parts
    for text in said:
        assert re.search(text, jobs[0].stdout, flags=re.M), jobs[0].stdout
    assert all(job.stdout == "" for job in jobs if job is not jobs[0])
    return jobs[0].stdout


def on(host, *words):
    subprocess.run(host.command(*words), check=True)


@contextlib.contextmanager
def silent_to_newcomers(host):
    """A firewall in one direction: whoever connects to this host hears nothing, it may connect itself."""
    if not shutil.which("nft"):
        pytest.skip("needs Debian's package nftables")
    on(host, "nft", "add table ip fw; add chain ip fw in { type filter hook input priority 0; }; "
       "add rule ip fw in iifname eth0 tcp flags & (syn|ack) == syn drop")
    try:
        yield
    finally:
        on(host, "nft", "delete table ip fw")


# The cable between two hosts, whose every frame arrives late from the first to the second. Not tc netem, which is a
# module that a kernel may lack. With its header (15: PACKET_VNET_HDR) a frame may be longer than the cable takes.
LATE = """
import queue, socket, sys, threading, time
def carry(source, target, delay):
    frames = queue.Queue()
    def send():
        while True:
            due, frame = frames.get()
            time.sleep(max(0, due - time.monotonic()))
            target.send(frame)
    threading.Thread(target=send, daemon=True).start()
    while True:
        frame, address = source.recvfrom(2**17)
        if address[2] != socket.PACKET_OUTGOING:
            frames.put((time.monotonic() + delay, frame))
ends = []
for name in sys.argv[1:3]:
    ends.append(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)))
    ends[-1].setsockopt(263, 15, 1)
    ends[-1].bind((name, 0))
threading.Thread(target=carry, args=(*ends, float(sys.argv[3])), daemon=True).start()
print("ready", flush=True)
carry(*ends[::-1], 0)
"""


@contextlib.contextmanager
def slow_cable(a, b, delay, rate):
    for host in (a, b):
        host.pull_the_plug()
        on(host, *f"tc qdisc add dev eth0 root tbf rate {rate} burst 64k latency 500ms".split())
    late = subprocess.Popen(["ip", "netns", "exec", a.switch, sys.executable, "-c", LATE, a.name, b.name, str(delay)],
                            stdout=subprocess.PIPE)
    try:
        assert late.stdout.readline() == b"ready\n"
        yield
    finally:
        late.kill()
        late.wait()
        for host in (a, b):
            on(host, *"tc qdisc del dev eth0 root".split())
            ip("-n", host.switch, "link", "set", host.name, "master", "bridge")


def within(seconds, function):
    begin = time.monotonic()
    result = function()
    assert time.monotonic() - begin < seconds
    return result


def test_a_good_cluster_is_fine_and_said_so_in_five_parts_and_in_json_when_torchrun_starts_it(hosts):
    jobs = start(hosts, "--json=found.json", launcher=["-m", "torch.distributed.run"], PET_NPROC_PER_NODE="2")
    printed = end(jobs, 0)
    assert [printed.count(part) for part in PARTS] == [1] * 5 and printed.count("good: ") == 4
    found = json.loads((hosts[0].folder / "found.json").read_text())
    assert found["fine"] and not found["faults"] and not (hosts[1].folder / "found.json").exists()
    assert [(row["rank"], row["address"]) for row in found["processes"]] == [
        (rank, hosts[rank // 2].address) for rank in range(4)]
    a, b = (host.name for host in hosts)
    assert list(found["all-reduce"]) == [f"within {a}", f"{a} - {b}", f"within {b}"]
    assert all(line["right"] for line in found["all-reduce"].values())


EARLY_AND_WRONG = """
import os, time
real_time = time.time
time.time = lambda: real_time() + 9
if "RANK" in os.environ:
    import torch.distributed
    real_all_reduce = torch.distributed.all_reduce
    def all_reduce(tensor, *arguments, **options):
        real_all_reduce(tensor, *arguments, **options)
        if len(tensor) > 1:
            tensor[5] += 1
    torch.distributed.all_reduce = all_reduce
"""


def test_what_differs_on_a_machine_is_named_with_the_processes_that_have_it_and_a_wrong_sum_too(hosts, tmp_path, customize):
    """Another number of threads, version of a script, clock and all-reduce on one of two; started as static."""
    other = tmp_path / "other"
    shutil.copytree(ROOT / "tools", other / "tools")
    for script in [*ROOT.glob("*.py"), *ROOT.glob("recipes/*.py")]:
        (other / script.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        shutil.copy(script, other / script.relative_to(ROOT))
    (other / "multinode.py").write_text((ROOT / "multinode.py").read_text() + "# mine\n")
    wrong = customize(EARLY_AND_WRONG)
    a, b = hosts
    jobs = [host.start(sys.executable, check, "--nnodes=2", f"--node_rank={rank}", f"--master_addr={a.address}",
                       "--master_port=29500", "--device=cpu", "--largest=1", **env)
            for rank, (host, check, env) in enumerate(zip(hosts, (CHECK, other / "tools/check_cluster.py"),
                                                          ({}, dict(OMP_NUM_THREADS="2", **wrong))))]
    end(jobs, 1, f"OMP_NUM_THREADS differs: 1 in rank 0 on {a.name} . 2 in rank 1 on {b.name}",
        rf"multinode.py differs: \w+ in rank 0 on {a.name} . \w+ in rank 1 on {b.name}",
        rf"the clock of {b.name} is (8\.9|9\.0) s ahead of that of {a.name}",
        f"the sum of an all-reduce {a.name} - {b.name} is wrong in rank 1 on {b.name}")
    assert "utils.py differs" not in jobs[0].stdout


def test_a_machine_that_was_not_started_is_missed_by_those_that_were(hosts):
    """On the machine of the rendezvous, and on another one, each alone."""
    a, b = hosts

    def alone(host):
        job, = start([host], "--wait=10", endpoint=a.name)
        return job
    job = alone(a)
    within(20, lambda: end([job], 1, f"1 of 2 machines did not come within 10 s; here: {a.name}"))
    job = alone(b)
    assert within(20, job.wait) == 1
    assert f"{b.name}: waited 10 s for the machine of the rendezvous, {a.name}:29400: " in job.stderr


def test_a_firewall_in_one_direction_is_named_with_both_machines_before_the_process_group_is_made(hosts):
    a, b = hosts
    with silent_to_newcomers(b):
        printed = end(start(hosts, "--wait=20"), 1, f"{a.name} cannot reach {b.name} at {b.address}: no answer: a firewall")
    assert f"{b.name} reaches {a.name}" in printed and f"{b.name} cannot reach" not in printed and "4. " not in printed


def test_an_address_that_leads_back_to_whoever_asks_is_named_with_the_variable_that_cures_it(hosts):
    a, b = hosts
    file = Path("/etc/netns") / b.name / "hosts"
    right = file.read_text()
    try:
        file.write_text(f"127.0.1.1 {b.name}\n{right}")
        end(start(hosts, "--wait=20"), 1, f"{a.name} cannot reach {b.name} at 127.0.1.1: that leads back to whoever asks",
            rf"to try on {b.name}: GLOO_SOCKET_IFNAME=eth0 \({b.address}\)$")
        end(start(hosts, "--wait=20", GLOO_SOCKET_IFNAME="eth0"), 0)
    finally:
        file.write_text(right)


def test_a_slow_link_shows_in_the_figures_within_a_third(hosts):
    a, b = hosts
    with slow_cable(a, b, 0.02, "100mbit"):
        end(start(hosts, "--json=found.json"), 1, rf"{a.name} reaches {b.name} at \S+ round trip \S+ ms: much",
            rf"{a.name} - {b.name}: \d+ Mbit/s, less than half of what")
    found = json.loads((a.folder / "found.json").read_text())
    figures = found["all-reduce"][f"{a.name} - {b.name}"]
    trips = [connection["round trip, s"] for connection in found["connections"]]
    for measured, there_is in [*((trip, 0.02) for trip in trips), (figures["latency, s"], 0.02), (figures["best"], 100e6 / 8)]:
        assert there_is * 2 / 3 < measured < there_is * 4 / 3, found


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_process_that_stops_in_the_middle_is_named_and_nobody_waits_for_it(hosts, stopped):
    """Also where it is rank 0: then the others say that nothing is heard of it."""
    jobs = start(hosts, "--wait=10")
    jobs[0].wait_for("good: each machine reaches")
    pid, begin = jobs[stopped].workers()[0], time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    if stopped == 1:
        jobs[0].wait_for(f"rank 1 on {hosts[1].name} said nothing for 10 s", timeout=20)
        end(jobs, 1)
    else:
        assert [job.wait(60) for job in jobs] == [1, 1]
        assert f"{hosts[1].name}: nothing is heard of rank 0 at " in jobs[1].stderr
    assert time.monotonic() - begin < 45  # its launcher is rid of it too


def test_srun_starts_it_too_and_a_task_that_does_not_come_is_missed(slurm, tmp_path):
    step = ["srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    check = ["python", CHECK, "--device=cpu", "--largest=1", "--wait=10"]
    calls = [[*step, *check], [*step, "sh", "-c", '[ $SLURM_PROCID = 0 ] || exec sleep 40; exec "$@"', "-", *check]]
    good, missed = two_at_a_time(lambda call: slurm.run(*call, cwd=tmp_path, **PYTHON), *calls)
    assert good.returncode == 0 and good.stdout.splitlines()[-1] == "5. Fine.", good
    a = slurm.hosts[0].name
    assert missed.returncode != 0
    assert f"1 of 2 processes did not come within 10 s: rank 1; here: rank 0 on {a}" in missed.stdout, missed
