"""Two hosts on one machine, network namespaces with addresses, names and folders of their own; and a Slurm on them."""
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch import Job, needs

CABLE = """
ip netns add $1
ip netns add $2
ip link add eth0 netns $1 type veth peer name eth0 netns $2
ip -n $1 addr add 10.77.0.1/24 dev eth0
ip -n $2 addr add 10.77.0.2/24 dev eth0
for host in $1 $2; do
    ip -n $host link set lo up
    ip -n $host link set eth0 up
    ip netns exec $host sh -c 'echo 4 > /proc/sys/net/ipv4/tcp_retries2'  # who does not answer is given up in seconds
    mkdir -p /etc/netns/$host  # where ip netns exec finds /etc/hosts
    printf '127.0.0.1 localhost\n10.77.0.1 %s\n10.77.0.2 %s\n' $1 $2 > /etc/netns/$host/hosts
done
"""
END = "for host do ip netns pids $host | xargs -r kill -9; ip netns del $host; rm -rf /etc/netns/$host; done"
CONF = """
ClusterName=tests
SlurmctldHost={a.name}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SelectType=select/cons_tres
GresTypes=gpu
NodeName={a.name},{b.name} CPUs=4 Gres=gpu:1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL Default=YES GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=2
"""


@dataclass
class Host:
    """A network namespace under a host name of its own, whose one cable leads to the other host."""
    name: str
    address: str
    folder: Path

    def command(self, *words):
        """A command line that runs on this host, as one typed there would."""
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"',
                self.name, *map(str, words)]

    def start(self, *words, **settings):
        return Job(self.command(*words), self.folder, **settings)

    def run(self, *words):
        return subprocess.check_output(self.command(*words), text=True).strip()


@pytest.fixture
def hosts(folder):
    needs("ip")
    names = [f"{letter}{uuid.uuid4().hex[:8]}" for letter in "ab"]
    try:
        if subprocess.run(["sh", "-ec", CABLE, "-", *names]).returncode:
            pytest.skip("needs root")  # who may make network namespaces
        hosts = [Host(name, address, folder / name) for name, address in zip(names, ("10.77.0.1", "10.77.0.2"))]
        for host in hosts:
            host.folder.mkdir()
        yield hosts
    finally:
        subprocess.run(["sh", "-c", END, "-", *names])


@pytest.fixture
def slurm(hosts, folder, monkeypatch):
    """The first of two hosts that share this folder, on which Slurm's commands work."""
    needs("slurmctld", "slurmd", "srun")
    (folder / "slurm.conf").write_text(CONF.format(a=hosts[0], b=hosts[1], folder=folder))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    monkeypatch.setenv("SLURM_CONF", f"{folder}/slurm.conf")
    controller = hosts[0].start("slurmctld", "-D")
    for host in hosts:
        host.start("slurmd", "-D", "-N", host.name)
    controller.until(lambda: hosts[0].run("sh", "-c", "sinfo --noheader --format=%T || true") == "idle", "not idle")
    hosts[0].folder = folder
    return hosts[0]
