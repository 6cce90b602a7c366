"""A Slurm of two nodes, on the two hosts, that lasts as long as the tests."""
import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

PYTHON = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}  # an active environment
CONF = """
ClusterName=tests
SlurmctldHost={a.name}({a.address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName={a.name} NodeAddr={a.address} CPUs=8
NodeName={b.name} NodeAddr={b.address} CPUs=8
PartitionName=all Nodes=ALL Default=YES
"""


class Slurm:
    def __init__(self, hosts, folder):
        self.hosts, self.folder = hosts, folder
        self.environment = {**os.environ, **PYTHON, "SLURM_CONF": f"{folder}/slurm.conf"}

    def run(self, *words, cwd=None, **env):
        """One of Slurm's commands, given on the first host."""
        return subprocess.run(self.hosts[0].command(*words), cwd=cwd, capture_output=True, text=True, timeout=180, check=False,
                              env={**self.environment, **env})

    def __call__(self, *words, **options):
        done = self.run(*words, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, *words, cwd, **env):
        return self("sbatch", "--parsable", *words, cwd=cwd, **env).strip()

    def wait_for(self, text, output):
        """Until a job has written this to its file."""
        end = time.monotonic() + 180
        while not output.exists() or text not in output.read_text():
            assert time.monotonic() < end, output.exists() and output.read_text()
            time.sleep(0.1)

    def wait(self, job):
        """How a job ended."""
        end, state = time.monotonic() + 240, None
        while state not in ("COMPLETED", "FAILED"):
            assert time.monotonic() < end, f"job {job} is {state}"
            time.sleep(1)
            state = self("scontrol", "show", "job", job).split("JobState=")[1].split()[0]
        return state


@contextlib.contextmanager
def slurm_on(hosts, folder):
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    (folder / "slurm.conf").write_text(CONF.format(a=hosts[0], b=hosts[1], folder=folder))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    slurm = Slurm(hosts, folder)
    munged = [shutil.which("munged"), "--foreground", "--force", *(f"--{name}={folder}/munge.{name.split('-')[0]}" for name in (
        "key-file", "socket", "pid-file", "log-file", "seed-file"))]
    daemons = [munged, hosts[0].command("slurmctld", "-D"), *(host.command("slurmd", "-D", "-N", host.name) for host in hosts)]
    processes = []
    try:
        for daemon in daemons:
            with open(folder / "daemons.log", "a") as log:
                processes.append(subprocess.Popen(daemon, stdout=log, stderr=log, start_new_session=True,
                                                  env=slurm.environment))
            while daemon is munged and not (folder / "munge.socket").exists():
                assert processes[0].poll() is None
        end = time.monotonic() + 60
        while slurm.run("sinfo", "--noheader", "--format=%T").stdout.split() != ["idle"]:
            assert time.monotonic() < end, (folder / "daemons.log").read_text()
            time.sleep(0.2)
        yield slurm
        slurm("scancel", "--user=root")
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait()
