"""tools/check_cluster on two hosts and under Slurm, where nothing is wrong and where one thing is."""
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from launch import ROOT, after, copy_project, first, needs

CHECK = ROOT / "tools/check_cluster"
PARTS = ["1. Who is here", "2. What differs", "3. Who reaches whom", "4. How fast", "5. "]
FORKED = "import multiprocessing as m; context = m.get_context; m.get_context = lambda _: context('fork')\n"  # sooner


def start(hosts, *options, check=CHECK, before="", **env):
    """The same line on each host, of which the first one keeps the rendezvous."""
    line = [sys.executable, check, "--nnodes=2", *hosts[0].rendezvous.split(), *options]
    return [host.start(*line, **first(FORKED + before), **env) for host in hosts]


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


def test_a_good_cluster_is_fine_also_where_it_is_slow_which_is_measured_three_times_or_has_no_gpu(hosts, folder):
    """A cable of 100 Mbit/s between cards that state 10 Gbit/s; however busy this machine is, no figure can be better.

    With Debian's /etc/hosts, against which GLOO_SOCKET_IFNAME helps."""
    a, b = hosts
    for host in hosts:
        file = Path("/etc/netns", host.name, "hosts")
        file.write_text(f"127.0.1.1 {host.name}\n{file.read_text()}")
    for host in hosts:
        host.run(*"tc qdisc add dev eth0 root tbf rate 100mbit burst 64k latency 500ms".split())
    makes_log = "import torch.distributed" + after("torch.distributed.init_process_group",
                                                   "open(os.environ['NCCL_DEBUG_FILE'], 'w').close()")  # as NCCL does
    jobs = start(hosts, before=makes_log, PET_NPROC_PER_NODE="2", TMPDIR=str(folder), CUDA_VISIBLE_DEVICES="",
                 GLOO_SOCKET_IFNAME="eth0")
    printed = end(jobs, 0, rf"ranks 2, 3 on {b.name}, {b.address}, device: cpu",
                  rf"remark: {a.name} - {b.name}: 0\.\d+ of 10 Gbit/s", f"^5. Fine, but DEVICE: CPU on {a.name}, {b.name}, where",
                  *(rf"{where}: latency .* ms, bus bandwidth .* Gbit/s"
                    for where in (f"within {a.name}", f"within {b.name}", f"{a.name} - {b.name}")))
    assert [printed.count(part) for part in PARTS] == [1] * 5 and printed.count("good: ") == 4
    assert (a.folder / "log.0").read_text().count("\n") == 3 * (3 + 2)  # each time its two processes make 3 groups and 2
    assert not list(folder.glob("check_cluster.*"))


MACHINES = """
import os, socket, sys, threading
sys.path[:0] = [{tools!r}, {root!r}]
import torch.distributed
import follow, lead
from types import SimpleNamespace
server = socket.create_server(("10.77.0.1", 0), backlog=64)
args = SimpleNamespace(host="10.77.0.1", port=server.getsockname()[1], wait=60, machines=3, processes=3, device="cpu",
                       backend="gloo", local_ranks=[0], device_was_found=False, leads=False)
os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
for number in range(3):
    if os.fork() == 0:
        follow.HERE, args.leads = f"node{number}", number == 0
        follow.follow(args, 0, threading.Event())
lead.lead(args, server)
print([os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(3)])
"""


def test_of_three_machines_which_are_processes_here_the_last_pairs_with_the_first(hosts):
    Path("machines.py").write_text(MACHINES.replace("{tools!r}", repr(str(CHECK))).replace("{root!r}", repr(str(ROOT))))
    job = hosts[0].start(sys.executable, Path("machines.py").resolve())
    assert job.wait() == 0, job.stderr
    assert "good: 3 processes, 3 machines" in job.stdout and "5. Fine.\n" in job.stdout, job.stdout
    assert re.findall(r"(node\d - node\d): latency", job.stdout) == ["node0 - node1", "node2 - node0"]
    assert job.stdout.endswith("[0, 0, 0]\n")


def test_what_cannot_be_started_is_refused_at_once_in_one_line(hosts):
    def refused(says, *options, **environment):
        job = hosts[0].start(sys.executable, CHECK, "--nnodes=2", "--wait=300", *options, **environment)
        assert job.wait() in (1, 2) and re.fullmatch(f"check_cluster: .*{says}.*\n", job.stderr) and job.stdout == "", job.stderr

    name, port = hosts[0].name, 29400
    refused("--nnodes=2 needs --rdzv-backend=c10d --rdzv-endpoint=HOST:29400: .* meets only itself")
    refused("knows no IPv4 address of no.such: ", "--rdzv-backend=c10d", "--rdzv-endpoint=no.such:29400")
    refused("argument --wait: '0' is not a whole number", "--wait=0")
    refused("start it by python instead of torchrun", TORCHELASTIC_RUN_ID="7")  # each process would check itself alone
    listens = "import socket, time; server = socket.create_server(('', 29400)); print('listens', flush=True); time.sleep(600)"
    hosts[0].start(sys.executable, "-c", listens).wait_for("listens")
    refused(f"{name} cannot use port {port}, .*: Address already in use", *hosts[0].rendezvous.split())


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
    jobs = [a.start(sys.executable, CHECK, "--node_rank=0", *line, **first(FORKED)),
            b.start(sys.executable, other / "tools/check_cluster", "--node_rank=1", *line, OMP_NUM_THREADS="2",
                    **first(FORKED + EARLY_AND_WRONG))]
    printed = end(jobs, 1, f"OMP_NUM_THREADS differs: 1 in rank 0 on {a.name} . 2 in rank 1 on {b.name}",
                  rf"multinode.py differs: \w+ in rank 0 on {a.name} . \w+ in rank 1 on {b.name}",
                  rf"the clock of {b.name} is \+\d+\.\d s from that of {a.name}",
                  f"the sum of an all-reduce {a.name} - {b.name} is wrong in rank 1 on {b.name}")
    assert "utils.py differs" not in printed


def test_a_machine_that_was_not_started_is_missed_by_those_that_were(hosts):
    """On the machine of the rendezvous, and on another one, each alone."""
    a, b = hosts
    end(start([a], "--wait=20"), 1, f"1 of 2 machines, 1 of 2 processes, did not come within 20 s; here: {a.name}\\.")
    job = b.start(sys.executable, CHECK, "--nnodes=2", *a.rendezvous.split(), "--wait=1", PET_NPROC_PER_NODE="2", **first(FORKED))
    assert job.wait() == 1
    assert job.stderr.count(f"{b.name}: waited 1 s for the machine of the rendezvous, {a.name}:29400: ") == 1


def test_a_firewall_in_one_direction_and_an_address_that_leads_back_are_named_with_both_machines_and_a_cure(hosts):
    needs("nft")
    a, b = hosts
    b.run("nft", "add table ip fw; add chain ip fw in { type filter hook input priority 0; }; "
          "add rule ip fw in iifname eth0 tcp flags & (syn|ack) == syn drop")  # whoever comes hears nothing
    file = Path("/etc/netns", a.name, "hosts")
    file.write_text(f"127.0.1.1 {a.name}\n{file.read_text()}")
    printed = end(start(hosts), 1, f"{a.name} cannot reach {b.name} at {b.address}: timed out: a firewall",
                  f"{b.name} cannot reach {a.name} at 127.0.1.1: that leads back to whoever asks",
                  f"to try there: GLOO_SOCKET_IFNAME, the card of {a.address}$")
    assert "4. " not in printed  # before a process group is made


@pytest.mark.parametrize("which", ["one that stops", "the one that leads"])
def test_a_process_that_is_lost_in_the_middle_is_named_and_nobody_waits_for_it(which, hosts):
    jobs = start(hosts, "--wait=30", PET_NPROC_PER_NODE="2")
    jobs[0].wait_for("good: 4 processes")
    if which == "one that stops":
        starter = jobs[1].process.pid
        _, second = Path(f"/proc/{starter}/task/{starter}/children").read_text().split()
        os.kill(int(second), signal.SIGSTOP)
        end(jobs, 1, f"NOT GOOD: no answer in .* from rank 3 on {hosts[1].name}: stopped")  # its starter is rid of it too
    else:
        jobs[0].kill()
        assert jobs[1].wait() == 1
        assert jobs[1].stderr.count(f"{hosts[1].name}: nothing is heard any more of {hosts[0].name}:29400, the machine") == 1


def test_srun_starts_it_too_and_a_task_that_does_not_come_or_a_machine_that_does_not_know_its_name_is_named(slurm):
    check = ["python", CHECK, "--device=cpu"]
    printed = slurm("srun", "--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1", *check)
    assert "good: 4 processes, 2 machines" in printed and printed.splitlines()[-1] == "5. Fine."
    for other, says in (("exec sleep 600", f"1 of 2 processes, did not come within 20 s; here: {slurm.hosts[0].name}. "),
                        ("hostname no.such", "NOT GOOD: no.such knows no IPv4 address of its own name, which gloo looks up")):
        job = slurm.run("srun", "--nodes=2", "--kill-on-bad-exit=1", "unshare", "--uts", "sh", "-c",
                        f'[ $SLURM_NODEID = 0 ] || {other}; exec "$@"', "-", *check, "--wait=20", **first(FORKED))
        assert job.returncode != 0 and says in job.stdout, job.stdout + job.stderr
