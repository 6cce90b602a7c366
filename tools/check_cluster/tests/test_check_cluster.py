"""tools/check_cluster on two hosts and under Slurm, where nothing is wrong and where one thing is."""
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from launch import ROOT, after, needs

CHECK = ROOT / "tools/check_cluster"
FORKED = "import multiprocessing as m; context = m.get_context; m.get_context = lambda _: context('fork')\n"  # sooner
UNSHARED = "unshare", "--uts", "sh", "-c"


def meet_at(host):
    return "--rdzv-backend=c10d", f"--rdzv-endpoint={host.name}:29400"


def start(hosts, *options, **env):
    """The same line on each host, of which the first one keeps the rendezvous."""
    return [host.start(sys.executable, CHECK, "--nnodes=2", *meet_at(hosts[0]), *options, before=FORKED, **env)
            for host in hosts]


def end(jobs, status, *said):
    """What the machine that leads printed: all parts in their order, up to the one that says what is wrong."""
    assert [job.wait() for job in jobs] == [status] * len(jobs), "\n".join(job.stdout + job.stderr for job in jobs)
    *parts, last = re.findall("^[^ ].*", jobs[0].stdout, re.MULTILINE)
    assert [part[0] for part in parts] == ["1", "2", "3", "4"][:len(parts)]
    assert last.startswith("5. First to fix: " if status else "5. Fine")
    for text in said:
        assert re.search(text, jobs[0].stdout, re.MULTILINE), jobs[0].stdout
    assert all(job.stdout == "" for job in jobs[1:])


def as_debian_has_it(host):
    file = Path("/etc/netns", host.name, "hosts")  # a host's own name leads back to it
    file.write_text(f"127.0.1.1 {host.name} third\n{file.read_text()}")


def test_three_machines_are_fine_where_they_are_slow_or_have_no_gpu(hosts):
    """A cable of 400 Mbit/s between cards that state 10 Gbit/s. The third machine is the second one under another name."""
    a, b = hosts
    for host in hosts:
        host.run(*"tc qdisc add dev eth0 root tbf rate 400mbit burst 64k latency 500ms".split())
        as_debian_has_it(host)
    line = [sys.executable, CHECK, "--nnodes=3", "--nproc-per-node=2", *meet_at(a)]
    env = {"before": FORKED, "GLOO_SOCKET_IFNAME": "eth0"}
    jobs = [*(host.start(*line, **env) for host in hosts), b.start(*UNSHARED, 'hostname third && exec "$@"', "-", *line, **env)]
    end(jobs, 0, rf"ranks 2, 3 on {b.name}, {b.address}, device: cpu", f"within {a.name}: latency .* ms, bus bandwidth",
        f"^5. Fine, but training would use the CPU: torch sees no GPU on {a.name}, {b.name}, third",
        rf"remark: {a.name} - {b.name}: 0\.\d+ of 10 Gbit/s", rf"remark: third - {a.name}: ")  # the last one with the first


def test_what_cannot_be_started_is_refused_at_once_in_one_line(hosts):
    def refused(says, *options, **environment):
        job = hosts[0].start(sys.executable, CHECK, "--nnodes=2", "--wait=300", *options, **environment)
        assert job.wait() == 1 and re.fullmatch(rf"\w+: .*{says}.*\n", job.stderr) and job.stdout == "", job.stderr

    refused("--nnodes=2 needs --rdzv-backend=c10d --rdzv-endpoint=HOST:29400: .* finds only itself")
    refused("start it by python instead of torchrun", TORCHELASTIC_RUN_ID="7")  # each process would check itself alone
    refused(f"waited 1 s for the rendezvous machine, {hosts[1].name}:29400: ", "--wait=1", *meet_at(hosts[1]))
    hosts[0].start(sys.executable, "-u", "-m", "http.server", "29400").wait_for("Serving")
    refused(f"{hosts[0].name} cannot use port 29400, .*: Address already in use", *meet_at(hosts[0]))


def test_what_differs_on_a_machine_is_named_with_the_processes_that_have_it_and_a_wrong_sum_too(hosts, folder):
    """Another number of threads, version of a script, clock and all-reduce on one of two; started as static."""
    a, b = hosts
    other = shutil.copytree(ROOT, folder / "other", ignore=shutil.ignore_patterns(".*"))
    (other / "multinode.py").write_text("# mine")
    early = FORKED + "import time, torch.distributed; real_time = time.time; time.time = lambda: real_time() + 9\n"
    wrong = early + after("torch.distributed.all_reduce", "given[0][5:6].add_(1)")
    line = ["--nnodes=2", f"--master_addr={a.address}", "--master_port=29500", "--device=cpu"]
    jobs = [a.start(sys.executable, CHECK, "--node_rank=0", *line, before=FORKED),
            b.start(sys.executable, other / "tools/check_cluster", "--node_rank=1", *line, OMP_NUM_THREADS="2", before=wrong)]
    end(jobs, 1, f"OMP_NUM_THREADS differs: 1 in rank 0 on {a.name} . 2 in rank 1 on {b.name}",
        rf"multinode.py differs: \w+ in rank 0 on {a.name} . \w+ in rank 1 on {b.name}",
        rf"the clock of {b.name} is \+\d+\.\d s from that of {a.name}",
        f"the all-reduce {a.name} - {b.name} gives a wrong sum in rank 1 on {b.name}")
    assert "utils.py differs" not in jobs[0].stdout


def test_a_firewall_in_one_direction_and_an_address_that_leads_back_are_named_with_both_machines_and_a_cure(hosts):
    needs("nft")
    a, b = hosts
    b.run("nft", "add table ip fw; add chain ip fw in { type filter hook input priority 0; }; "
          "add rule ip fw in iifname eth0 tcp flags & (syn|ack) == syn drop")  # whoever comes hears nothing
    as_debian_has_it(a)
    end(start(hosts), 1, f"{a.name} cannot reach {b.name} at {b.address}: timed out: a firewall",
        f"{b.name} cannot reach {a.name} at 127.0.1.1: that address is loopback.*GLOO_SOCKET_IFNAME with .* of {a.address}$")


@pytest.mark.parametrize("which", ["one that stops", "the one that leads"])
def test_a_process_that_is_lost_in_the_middle_is_named_and_nobody_waits_for_it(which, hosts):
    jobs = start(hosts, "--wait=15", PET_NPROC_PER_NODE="2")
    jobs[0].wait_for("good: 4 processes")
    if which == "one that stops":
        starter = jobs[1].process.pid
        os.kill(int(Path(f"/proc/{starter}/task/{starter}/children").read_text().split()[1]), signal.SIGSTOP)
        end(jobs, 1, f"NOT GOOD: no answer from rank 3 on {hosts[1].name} during .*: stopped")  # its starter is rid of it too
    else:
        jobs[0].kill()
        assert jobs[1].wait() == 1
        assert jobs[1].stderr.count(f"{hosts[1].name}: lost contact with {hosts[0].name}:29400, the rendezvous machine") == 1


@pytest.mark.parametrize("second, tasks, wait, fails, says", [
    (":", 2, 60, 0, "5. Fine."),
    ("exit 1", 1, 10, 1, "1 of 2 processes, did not connect within 10 s; connected: {}. "),
    ("hostname no.such", 1, 60, 1, "NOT GOOD: no.such cannot resolve its own name to an IPv4 address, as gloo must")])
def test_srun_starts_it_too_and_a_task_that_does_not_come_or_a_machine_that_does_not_know_its_name_is_named(
        second, tasks, wait, fails, says, slurm):
    check = "python", CHECK, "--device=cpu", f"--wait={wait}"
    command = *UNSHARED, f'[ $SLURM_NODEID = 0 ] || {second}; exec "$@"', "-", *check
    job = slurm[0].start("srun", "--nodes=2", f"--ntasks-per-node={tasks}", *command, before=FORKED,
                         MASTER_ADDR=slurm[0].name, MASTER_PORT="29500")
    assert bool(job.wait()) == bool(fails) and says.format(slurm[0].name) in job.stdout, job.stdout + job.stderr
