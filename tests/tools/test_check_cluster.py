"""tools/check_cluster.py on two hosts and under Slurm, where nothing is wrong and where one thing is."""
import os
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from launch import ROOT, TORCHRUN, after, copy_project, first, needs

CHECK = ROOT / "tools/check_cluster.py"
PARTS = ["1. Who is here", "2. What differs", "3. Who reaches whom", "4. How fast", "5. "]


def start(hosts, *options, **env):
    """The same line on each host, of which the first one keeps the rendezvous."""
    line = [sys.executable, CHECK, "--nnodes=2", *hosts[0].rendezvous.split(), "--device=cpu", *options]
    return [host.start(*line, **env) for host in hosts]


def end(jobs, status, *said):
    """What the machine that leads printed: all parts in their order, up to the one that says what is wrong."""
    assert [job.wait() for job in jobs] == [status] * len(jobs), "\n".join(job.stdout + job.stderr for job in jobs)
    parts = [line for line in jobs[0].stdout.splitlines() if not line.startswith(" ")]
    assert all(part.startswith(expected) for part, expected in zip(parts[:-1], PARTS)), parts
    assert parts[-1].startswith("5. First to fix: " if status else "5. Fine"), parts
    for text in said:
        assert re.search(text, jobs[0].stdout, flags=re.MULTILINE), jobs[0].stdout
    assert all(job.stdout == "" for job in jobs[1:])
    return jobs[0].stdout


def test_a_good_cluster_is_fine_and_said_so_in_five_parts(hosts, folder):
    a, b = hosts
    makes_log = "import torch.distributed" + after("torch.distributed.init_process_group",
                                                   "open(os.environ['NCCL_DEBUG_FILE'], 'w').close()")  # as NCCL does
    jobs = start(hosts, PET_NPROC_PER_NODE="2", TMPDIR=str(folder), **first(makes_log))
    printed = end(jobs, 0, rf"ranks 2, 3 on {b.name}, {b.address}, device: cpu", r"^5. Fine\.$",
                  *(rf"{where}: latency .* ms, bus bandwidth .* Gbit/s"
                    for where in (f"within {a.name}", f"within {b.name}", f"{a.name} - {b.name}")))
    assert [printed.count(part) for part in PARTS] == [1] * 5 and printed.count("good: ") == 4
    assert not list(folder.glob("check_cluster.*"))


MACHINES = """
import os, socket, sys
sys.path.insert(0, {tools!r})
import check_cluster
import torch.distributed
from cluster_check import follow, lead, lines
args = check_cluster.parse_args()
server = socket.create_server(("", args.port), backlog=64)
for number in range(33):
    if os.fork() == 0:
        lines.HERE, args.leads = f"node{number:02}", number == 0
        follow.follow(args, 0, lines.meet(args))
lead.lead(args, server)
statuses = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(33)]
assert statuses == [0] * 33, statuses
"""


def test_thirty_three_machines_are_paired_and_each_pair_waits_for_no_other(hosts):
    """Each a process here, and the last one pairs with the first, which is in two pairs."""
    script = hosts[0].folder / "machines.py"
    script.write_text(MACHINES.replace("{tools!r}", repr(str(ROOT / "tools"))))
    line = ["--nnodes=33", *hosts[0].rendezvous.split(), "--device=cpu"]
    groups = "import torch.distributed" + after("torch.distributed.init_process_group", "os.getpid(), options['world_size']")
    job = hosts[0].start(sys.executable, script, *line, GLOO_SOCKET_IFNAME="eth0", **first(groups))
    printed = end([job], 0, "good: 33 processes, 33 machines", "node32 - node00: latency",
                  *(f"node{one:02} - node{one + 1:02}: latency" for one in range(0, 32, 2)))
    assert printed.count(": latency ") == 17
    made = Counter((hosts[0].folder / "log.0").read_text().splitlines())  # by process and size
    rounds = max(made.values()) // 2  # again where it looked slow; the first machine is in two pairs
    assert len(made) == 2 * 33 and sorted(made.values()) == [rounds] * 65 + [2 * rounds], made


def test_a_line_without_a_place_to_meet_is_refused_at_once_and_so_is_a_name_that_nobody_knows(hosts):
    a, _ = hosts
    for options, says in (((), r"--nnodes=2 needs --rdzv-backend=c10d --rdzv-endpoint=HOST:29400: .* meets only itself\n"),
                          (("--rdzv-backend=c10d", "--rdzv-endpoint=no.such:29400"), "no.such is no known host name here"),
                          (("--master_addr=no.such",), "no.such is no known host name here")):
        began = time.monotonic()
        job = a.start(sys.executable, CHECK, "--nnodes=2", "--wait=300", *options)
        assert job.wait() == 1 and time.monotonic() - began < 200  # nobody has been waited for
        assert re.search(says, job.stderr) and job.stderr.count("\n") == 1 and job.stdout == ""
    job = a.start(*TORCHRUN, "--standalone", CHECK)  # each process would check itself alone
    assert job.wait() == 1 and "start it by python instead of torchrun" in job.stderr


def test_training_on_the_cpu_by_mistake_is_said_in_the_last_line(hosts):
    job = hosts[0].start(sys.executable, CHECK, CUDA_VISIBLE_DEVICES="")
    end([job], 0, f"^5. Fine, but DEVICE: CPU on {hosts[0].name}, where torch sees no GPU$")


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
    copy_project(other)
    with open(other / "multinode.py", "a") as file:
        file.write("# mine\n")
    line = ["--nnodes=2", f"--master_addr={a.address}", "--master_port=29500", "--device=cpu"]
    wrong = {"OMP_NUM_THREADS": "2", **first(EARLY_AND_WRONG)}
    jobs = [a.start(sys.executable, CHECK, "--node_rank=0", *line),
            b.start(sys.executable, other / "tools/check_cluster.py", "--node_rank=1", *line, **wrong)]
    printed = end(jobs, 1, f"OMP_NUM_THREADS differs: 1 in rank 0 on {a.name} . 2 in rank 1 on {b.name}",
                  rf"multinode.py differs: \w+ in rank 0 on {a.name} . \w+ in rank 1 on {b.name}",
                  rf"the clock of {b.name} is \+\d+\.\d s from that of {a.name}",
                  f"the sum of an all-reduce {a.name} - {b.name} is wrong in rank 1 on {b.name}")
    assert "utils.py differs" not in printed


def test_a_machine_that_was_not_started_is_missed_by_those_that_were(hosts):
    """On the machine of the rendezvous, and on another one, each alone."""
    a, b = hosts
    end(start([a], "--wait=10"), 1, f"1 of 2 machines, 1 of 2 processes, did not come within 10 s; here: {a.name}\\.")
    job = b.start(sys.executable, CHECK, "--nnodes=2", *a.rendezvous.split(), "--wait=10")
    assert job.wait() == 1
    assert f"{b.name}: waited 10 s for the machine of the rendezvous, {a.name}:29400: " in job.stderr


def test_a_firewall_in_one_direction_is_named_with_both_machines_before_the_process_group_is_made(hosts):
    needs("nft")
    a, b = hosts
    b.run("nft", "add table ip fw; add chain ip fw in { type filter hook input priority 0; }; "
          "add rule ip fw in iifname eth0 tcp flags & (syn|ack) == syn drop")  # whoever comes hears nothing
    printed = end(start(hosts), 1, f"{a.name} cannot reach {b.name} at {b.address}: timed out: a firewall")
    assert f"{b.name} cannot reach" not in printed and "4. " not in printed


def test_an_address_that_leads_back_to_whoever_asks_is_named_with_the_variable_that_cures_it(hosts):
    a, b = hosts
    file = Path("/etc/netns", b.name, "hosts")
    file.write_text(f"127.0.1.1 {b.name}\n{file.read_text()}")
    end(start(hosts), 1, f"{a.name} cannot reach {b.name} at 127.0.1.1: that leads back to whoever asks",
        f"to try there: GLOO_SOCKET_IFNAME, the card of {b.address}$")


def test_what_is_far_slower_than_its_cards_is_remarked_on_and_leaves_a_cluster_fine(hosts):
    """A cable of 100 Mbit/s between cards that state 10 Gbit/s; however busy this machine is, no figure can be better."""
    for host in hosts:
        host.run(*"tc qdisc add dev eth0 root tbf rate 100mbit burst 64k latency 500ms".split())
    end(start(hosts), 0, rf"remark: {hosts[0].name} - {hosts[1].name}: 0\.\d+ of 10 Gbit/s", r"^5. Fine\.$")


# Between the machines, after the 26 within each, the first all-reduces take long; all later ones do not.
SLOW_AT_FIRST = "calls = []\n" + after("torch.distributed.all_reduce",
                                       "time.sleep(0.3 * (26 <= len(calls) < 38)), calls.append(0)")


def test_what_looks_slow_is_measured_again_before_it_is_said(hosts):
    slow = first("import torch.distributed\n" + SLOW_AT_FIRST)
    printed = end(start(hosts, PET_NPROC_PER_NODE="2", **slow), 0, r"^5. Fine\.$")
    rounds = (hosts[0].folder / "log.0").read_text().count("\n") / 26 / 3  # by two processes, one of which is in two groups
    assert rounds in (2, 3) and ("remark" not in printed or rounds == 3)  # 3: this machine is busy


@pytest.mark.parametrize("leads", [False, True])
def test_a_process_that_stops_in_the_middle_is_named_and_nobody_waits_for_it(leads, hosts):
    """Also where it is the one that asks: then the others say that nothing is heard of it."""
    jobs = start(hosts, "--wait=40", PET_NPROC_PER_NODE="2")
    jobs[0].wait_for("good: 4 processes")
    os.kill(jobs[0].process.pid if leads else jobs[1].workers()[1], signal.SIGSTOP)
    if leads:
        assert jobs[1].wait() == 1
        assert f"{hosts[1].name}: nothing is heard of the machine of the rendezvous, {hosts[0].name}:29400" in jobs[1].stderr
    else:
        end(jobs, 1, f"NOT GOOD: rank 3 on {hosts[1].name} said nothing for 40 s")  # its starter is rid of it too


def test_srun_starts_it_too_and_a_task_that_does_not_come_is_missed(slurm):
    step = ["srun", "--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1"]
    check = ["python", CHECK, "--device=cpu"]
    printed = slurm(*step, *check)
    assert "good: 4 processes, 2 machines" in printed and printed.splitlines()[-1] == "5. Fine."
    missed = slurm.run(*step, "sh", "-c", '[ $SLURM_NODEID = 0 ] || exec sleep 600; exec "$@"', "-", *check, "--wait=30")
    assert missed.returncode != 0
    said = f"1 of 2 machines, 2 of 4 processes, did not come within 30 s; here: {slurm.hosts[0].name}. "
    assert said in missed.stdout
